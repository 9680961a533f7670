//! Drives a run: polls the guest, and the host's futures when the guest has requested something.
//!
//! The guest's imports cannot hold the host, which is only borrowed for the run. They put requests
//! into the bridge and suspend the guest. The driver, in the same task, takes the requests, lets
//! the host answer, and polls the guest again. So host code never runs on the guest's stack, and
//! its time is separate from the script's.

use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::future::{Future, poll_fn};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use futures::future::{AbortHandle, BoxFuture, abortable};
use futures::stream::FuturesUnordered;
use futures::{FutureExt as _, Stream as _};

use super::host::{Host, ToolError};
use super::imports::HostRequest;
use super::limits::{Limits, RESULT_EXCEEDED};
use super::meter::Meter;
use super::outstanding::Outstanding;
use super::typescript::{StripError, TypeScript};

/// The state shared by guest and driver. Locked briefly, by one task only.
#[derive(Default)]
pub(super) struct Bridge {
    /// The request whose answer the guest waits for.
    request: Option<GuestRequest>,
    answer: Option<Answer>,
    /// Concurrent calls and timers that the driver has not accepted yet; refused ones with the
    /// script's error.
    started: Vec<Result<HostRequest, (u32, Refusal)>>,
    /// Cleared timers that the driver has not accepted yet.
    canceled: BTreeSet<u32>,
    outstanding: Outstanding,
    pub(super) meter: Meter,
}

impl Bridge {
    /// Starts a call or timer, or records its refusal. `Err` ends the run.
    pub(super) fn start(
        &mut self,
        number: u32,
        request: Result<HostRequest, Refusal>,
    ) -> wasmtime::Result<()> {
        match request {
            Ok(HostRequest::Sleep { .. }) => self.outstanding.start_timer(number)?,
            Ok(HostRequest::Call(_)) | Err(_) => self.outstanding.start_call(number)?,
        }
        self.started.push(request.map_err(|refusal| (number, refusal)));
        Ok(())
    }

    /// Clears a timer. A call cannot be canceled: the host holds its arguments until it ends, and
    /// it counts for as long.
    pub(super) fn cancel(&mut self, number: u32) {
        if self.outstanding.cancel(number) {
            self.canceled.insert(number);
        }
    }
}

/// The name and the message of an error.
type Refusal = (&'static str, String);

/// A request for which the guest is blocked.
pub(super) enum GuestRequest {
    /// An immediate call.
    Call(HostRequest),
    /// An immediate call that is not made: its error.
    Refused(Refusal),
    /// Waits for the end of any concurrent call or timer.
    Any,
    /// The time.
    Now,
    /// The seed.
    Seed,
    /// Strips the types of a source.
    Strip(String),
}

/// The answer to a [`GuestRequest`].
#[derive(Debug)]
pub(super) enum Answer {
    /// The end of a call.
    Result {
        number: u32,
        succeeded: bool,
        json: Vec<u8>,
    },
    /// No concurrent call is under way.
    Nothing,
    Now(jiff::Timestamp),
    Seed([u8; 32]),
    /// The JavaScript, or the error in the source.
    Stripped(Result<String, StripError>),
}

pub(super) fn lock(bridge: &Mutex<Bridge>) -> MutexGuard<'_, Bridge> {
    // Nothing panics while it holds the lock, and if it did, the run would end with it.
    bridge.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sends a request to the driver, for an import. Suspends the guest.
pub(super) fn ask(
    bridge: &Mutex<Bridge>,
    request: GuestRequest,
) -> impl Future<Output = Answer> + Send + use<'_> {
    lock(bridge).request = Some(request);
    // No waker is needed: the driver polls the guest only after it has put the answer here.
    poll_fn(|_| lock(bridge).answer.take().map_or(Poll::Pending, Poll::Ready))
}

type CallOutcome = Result<serde_json::Value, Box<ToolError>>;

/// The driver's side of a run.
pub(super) struct Driver<'h> {
    host: &'h dyn Host,
    typescript: &'h TypeScript,
    bridge: Arc<Mutex<Bridge>>,
    call_bytes: usize,
    /// The request under way.
    pending: Option<PendingRequest<'h>>,
    /// Concurrent calls and timers under way. Aborted ones yield `None`.
    running: FuturesUnordered<BoxFuture<'h, Option<(u32, CallOutcome)>>>,
    /// Their names and abort handles, by number; includes those in `ready`.
    names: BTreeMap<u32, (String, Option<AbortHandle>)>,
    /// Ends that the script has not seen yet.
    ready: VecDeque<(u32, CallOutcome)>,
}

enum PendingRequest<'h> {
    Call { number: u32, name: String, future: BoxFuture<'h, CallOutcome> },
    Any,
    Now,
    Seed,
    Refused(Refusal),
    Strip(BoxFuture<'h, Result<String, StripError>>),
}

impl<'h> Driver<'h> {
    pub(super) fn new(
        host: &'h dyn Host,
        typescript: &'h TypeScript,
        bridge: Arc<Mutex<Bridge>>,
        limits: &Limits,
    ) -> Self {
        Driver {
            host,
            typescript,
            bridge,
            call_bytes: limits.call_bytes,
            pending: None,
            running: FuturesUnordered::new(),
            names: BTreeMap::new(),
            ready: VecDeque::new(),
        }
    }

    /// The names of calls that were under way, or whose end the script has not seen.
    pub(super) fn dropped(&self) -> Vec<String> {
        let immediate = match &self.pending {
            Some(PendingRequest::Call { name, .. }) => Some(name.clone()),
            _ => None,
        };
        // Calls that the guest has started since the last `accept`.
        let bridge = lock(&self.bridge);
        let unaccepted = bridge.started.iter().filter_map(|started| match started {
            Ok(HostRequest::Call(call)) => Some(call.name.clone()),
            Ok(HostRequest::Sleep { number, .. }) if bridge.canceled.contains(number) => None,
            Ok(HostRequest::Sleep { .. }) => Some(TIMER.to_owned()),
            Err(_) => None,
        });
        let accepted = self
            .names
            .iter()
            .filter(|(number, _)| !bridge.canceled.contains(*number))
            .map(|(_, (name, _))| name.clone());
        immediate.into_iter().chain(accepted).chain(unaccepted).collect()
    }

    /// Advances the run until it ends or is blocked.
    pub(super) fn poll<F>(
        &mut self,
        cx: &mut Context<'_>,
        guest: Pin<&mut F>,
    ) -> Poll<wasmtime::Result<()>>
    where
        F: Future<Output = wasmtime::Result<()>>,
    {
        lock(&self.bridge).meter.enter();
        let polled = self.advance(cx, guest);
        lock(&self.bridge).meter.leave();
        polled
    }

    fn advance<F>(
        &mut self,
        cx: &mut Context<'_>,
        mut guest: Pin<&mut F>,
    ) -> Poll<wasmtime::Result<()>>
    where
        F: Future<Output = wasmtime::Result<()>>,
    {
        loop {
            if self.pending.is_none() {
                if let Poll::Ready(ended) = guest.as_mut().poll(cx) {
                    return Poll::Ready(ended);
                }
                self.accept();
            }
            self.poll_running(cx);
            let Some(mut waiting) = self.pending.take() else {
                // The guest only yielded the processor, and has woken its task.
                return Poll::Pending;
            };
            let answer = match &mut waiting {
                PendingRequest::Now => Some(Answer::Now(self.host.now())),
                PendingRequest::Seed => Some(Answer::Seed(self.host.seed())),
                PendingRequest::Refused((name, message)) => {
                    Some(self.result(0, refused(name, std::mem::take(message))))
                }
                // Counts as the script's time: the source is the script's own.
                PendingRequest::Strip(future) => match future.as_mut().poll(cx) {
                    Poll::Ready(stripped) => Some(Answer::Stripped(stripped)),
                    Poll::Pending => None,
                },
                PendingRequest::Call { number, future, .. } => {
                    let began = Instant::now();
                    let polled = future.as_mut().poll(cx);
                    lock(&self.bridge).meter.exclude_since(began);
                    match polled {
                        Poll::Ready(outcome) => {
                            self.host.on_settled(*number);
                            Some(self.result(*number, outcome))
                        }
                        Poll::Pending => None,
                    }
                }
                PendingRequest::Any => match self.next_ready() {
                    Some((number, outcome)) => {
                        self.names.remove(&number);
                        lock(&self.bridge).outstanding.end(number);
                        self.host.on_settled(number);
                        Some(self.result(number, outcome))
                    }
                    None if self.running.is_empty() && self.ready.is_empty() => {
                        Some(Answer::Nothing)
                    }
                    None => None,
                },
            };
            let Some(answer) = answer else {
                // Parsing a source is the script's own work, not a wait.
                let is_working = matches!(waiting, PendingRequest::Strip(_));
                self.pending = Some(waiting);
                if !is_working {
                    self.host.on_blocked(&mut self.under_way());
                }
                return Poll::Pending;
            };
            lock(&self.bridge).answer = Some(answer);
        }
    }

    /// The numbers of calls and timers that have not ended.
    fn under_way(&self) -> impl Iterator<Item = u32> {
        let immediate = match &self.pending {
            Some(PendingRequest::Call { number, .. }) => Some(*number),
            _ => None,
        };
        let ended: HashSet<u32> = self.ready.iter().map(|(number, _)| *number).collect();
        immediate
            .into_iter()
            .chain(self.names.keys().copied().filter(move |number| !ended.contains(number)))
    }

    /// Takes what the guest has put into the bridge.
    fn accept(&mut self) {
        let (started, canceled, request) = {
            let mut bridge = lock(&self.bridge);
            if bridge.started.is_empty() && bridge.canceled.is_empty() && bridge.request.is_none() {
                return;
            }
            (
                std::mem::take(&mut bridge.started),
                std::mem::take(&mut bridge.canceled),
                bridge.request.take(),
            )
        };
        for started in started {
            match started {
                Ok(requested) => self.start(requested),
                Err((number, (name, message))) => {
                    self.ready.push_back((number, refused(name, message)))
                }
            }
        }
        for number in &canceled {
            if let Some((_, Some(abort))) = self.names.remove(number) {
                abort.abort();
            }
        }
        if !canceled.is_empty() {
            self.ready.retain(|(ready, _)| !canceled.contains(ready));
        }
        self.pending = request.map(|request| match request {
            GuestRequest::Call(HostRequest::Call(call)) => {
                let (number, name) = (call.number, call.name.clone());
                PendingRequest::Call { number, future: self.call(call), name }
            }
            GuestRequest::Call(HostRequest::Sleep { number, milliseconds }) => {
                let sleep = self.host.sleep(number, Duration::from_millis(milliseconds));
                PendingRequest::Call {
                    number,
                    name: TIMER.to_owned(),
                    future: sleep.map(|()| Ok(serde_json::Value::Null)).boxed(),
                }
            }
            GuestRequest::Refused(refusal) => PendingRequest::Refused(refusal),
            GuestRequest::Any => PendingRequest::Any,
            GuestRequest::Now => PendingRequest::Now,
            GuestRequest::Seed => PendingRequest::Seed,
            GuestRequest::Strip(source) => {
                let typescript = self.typescript;
                PendingRequest::Strip(Box::pin(async move { typescript.strip(&source).await }))
            }
        });
    }

    fn start(&mut self, requested: HostRequest) {
        match requested {
            HostRequest::Call(call) => {
                let number = call.number;
                self.names.insert(number, (call.name.clone(), None));
                let call = self.call(call);
                self.running.push(call.map(move |outcome| Some((number, outcome))).boxed());
            }
            HostRequest::Sleep { number, milliseconds } => {
                let (sleep, abort) =
                    abortable(self.host.sleep(number, Duration::from_millis(milliseconds)));
                self.names.insert(number, (TIMER.to_owned(), Some(abort)));
                self.running.push(
                    sleep
                        .map(move |slept| {
                            slept.ok().map(|()| (number, Ok(serde_json::Value::Null)))
                        })
                        .boxed(),
                );
            }
        }
    }

    /// The host's future, created at its first poll so that its time counts as part of the poll. A
    /// panic becomes an error that the script can catch.
    fn call(&self, call: super::HostCall) -> BoxFuture<'h, CallOutcome> {
        let host = self.host;
        Box::pin(async move {
            let name = call.name.clone();
            match AssertUnwindSafe(async { host.call(call).await }).catch_unwind().await {
                Ok(outcome) => outcome.map_err(Box::new),
                Err(_) => refused(
                    "InternalError",
                    format!("{name} failed inside the host; this is not the script's fault"),
                ),
            }
        })
    }

    /// Polls the concurrent calls.
    fn poll_running(&mut self, cx: &mut Context<'_>) {
        if self.running.is_empty() {
            return;
        }
        let began = Instant::now();
        while let Poll::Ready(Some(ended)) = Pin::new(&mut self.running).poll_next(cx) {
            self.ready.extend(ended);
        }
        lock(&self.bridge).meter.exclude_since(began);
    }

    /// The end that the script sees next, if it is ready.
    fn next_ready(&mut self) -> Option<(u32, CallOutcome)> {
        // Refused calls come first: they were refused at once, and are on a replay.
        if let Some(position) =
            self.ready.iter().position(|(number, _)| !self.names.contains_key(number))
        {
            return self.ready.remove(position);
        }
        match self.host.next_settled(&|number| self.names.contains_key(&number)) {
            Some(number) => {
                let position = self.ready.iter().position(|(ready, _)| *ready == number)?;
                self.ready.remove(position)
            }
            None => self.ready.pop_front(),
        }
    }

    fn result(&self, number: u32, outcome: CallOutcome) -> Answer {
        let outcome = outcome.map(|value| value.to_string().into_bytes());
        let outcome = outcome.and_then(|json| {
            if json.len() <= self.call_bytes {
                return Ok(json);
            }
            let message = format!(
                "the call was made and had its effect; only its result is omitted: it is {} bytes, more than the {} allowed. If the \
                 call only reads, request less",
                json.len(),
                self.call_bytes
            );
            refused(RESULT_EXCEEDED, message)
        });
        match outcome {
            Ok(json) => Answer::Result { number, succeeded: true, json },
            Err(error) => {
                let json = serde_json::json!(error).to_string().into_bytes();
                Answer::Result { number, succeeded: false, json }
            }
        }
    }
}

fn refused<T>(name: &str, message: String) -> Result<T, Box<ToolError>> {
    Err(Box::new(ToolError::new(name, message)))
}

/// The name of timers in notes.
const TIMER: &str = "timer";
