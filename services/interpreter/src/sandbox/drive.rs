//! Drives a run: polls the guest, and the host's futures when the guest has asked for something.
//!
//! The guest's imports can't hold the host, which is only borrowed for the run. They put what they
//! want into the bridge and suspend the guest; the driver, in the same task, takes it from there,
//! lets the host answer, and polls the guest again. So host code never runs on the guest's stack,
//! and its time is told apart from the script's.

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
use super::imports::Requested;
use super::limits::{Limits, RESULT_EXCEEDED};
use super::meter::Meter;
use super::outstanding::Outstanding;
use super::typescript::{StripError, TypeScript};

/// What guest and driver tell each other. Locked for moments only, by one task.
#[derive(Default)]
pub(super) struct Bridge {
    /// The question the guest waits for the answer to.
    asked: Option<Ask>,
    answer: Option<Answer>,
    /// Concurrent calls and timers the driver doesn't know yet; those that were refused with the
    /// error the script gets.
    started: Vec<Result<Requested, (u32, Refusal)>>,
    /// Timers the script has cleared, which the driver doesn't know yet either.
    cancelled: BTreeSet<u32>,
    outstanding: Outstanding,
    pub(super) meter: Meter,
}

impl Bridge {
    /// Starts a call or timer, or what is refused the script instead. `Err` ends the run.
    pub(super) fn start(
        &mut self,
        number: u32,
        requested: Result<Requested, Refusal>,
    ) -> wasmtime::Result<()> {
        match requested {
            Ok(Requested::Sleep { .. }) => self.outstanding.start_timer(number)?,
            Ok(Requested::Call(_)) | Err(_) => self.outstanding.start_call(number)?,
        }
        self.started.push(requested.map_err(|refusal| (number, refusal)));
        Ok(())
    }

    /// Clears a timer. A call can't be cancelled: the host holds its arguments until it has ended,
    /// and it counts for as long.
    pub(super) fn cancel(&mut self, number: u32) {
        if self.outstanding.cancel(number) {
            self.cancelled.insert(number);
        }
    }
}

/// The name and the message of an error.
type Refusal = (&'static str, String);

/// What the guest stands still for.
pub(super) enum Ask {
    /// An immediate call.
    Call(Requested),
    /// An immediate call that isn't made: its error.
    Refused(Refusal),
    /// The end of any concurrent call or timer.
    Any,
    /// The time.
    Now,
    /// The seed.
    Seed,
    /// The JavaScript of a source.
    Strip(String),
}

/// What it gets.
#[derive(Debug)]
pub(super) enum Answer {
    /// The end of a call.
    Result {
        number: u32,
        succeeded: bool,
        json: Vec<u8>,
    },
    /// There is no concurrent call to end.
    Nothing,
    Now(jiff::Timestamp),
    Seed([u8; 32]),
    /// The JavaScript, or what is wrong with the source.
    Stripped(Result<String, StripError>),
}

pub(super) fn lock(bridge: &Mutex<Bridge>) -> MutexGuard<'_, Bridge> {
    // Nothing panics while it holds the lock, and if it did, the run would end with it.
    bridge.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Asks the driver, for an import. Suspends the guest.
pub(super) fn ask(
    bridge: &Mutex<Bridge>,
    ask: Ask,
) -> impl Future<Output = Answer> + Send + use<'_> {
    lock(bridge).asked = Some(ask);
    // No waker: the driver polls the guest when it has put the answer here, and only then.
    poll_fn(|_| lock(bridge).answer.take().map_or(Poll::Pending, Poll::Ready))
}

type Outcome = Result<serde_json::Value, Box<ToolError>>;

/// The driver's side of a run.
pub(super) struct Driver<'h> {
    host: &'h dyn Host,
    typescript: &'h TypeScript,
    bridge: Arc<Mutex<Bridge>>,
    call_bytes: usize,
    /// The question under way.
    asked: Option<Waiting<'h>>,
    /// Concurrent calls and timers under way. `None` comes from those that were aborted.
    running: FuturesUnordered<BoxFuture<'h, Option<(u32, Outcome)>>>,
    /// Their names, and how to abort them, by number; also of those that are ready.
    names: BTreeMap<u32, (String, Option<AbortHandle>)>,
    /// Ends the script hasn't seen yet.
    ready: VecDeque<(u32, Outcome)>,
}

enum Waiting<'h> {
    Call { number: u32, name: String, future: BoxFuture<'h, Outcome> },
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
            asked: None,
            running: FuturesUnordered::new(),
            names: BTreeMap::new(),
            ready: VecDeque::new(),
        }
    }

    /// The names of calls that were under way, or had ended without the script seeing it.
    pub(super) fn dropped(&self) -> Vec<String> {
        let immediate = match &self.asked {
            Some(Waiting::Call { name, .. }) => Some(name.clone()),
            _ => None,
        };
        // Calls the guest has started since the driver last looked.
        let bridge = lock(&self.bridge);
        let unseen = bridge.started.iter().filter_map(|started| match started {
            Ok(Requested::Call(call)) => Some(call.name.clone()),
            Ok(Requested::Sleep { number, .. }) if bridge.cancelled.contains(number) => None,
            Ok(Requested::Sleep { .. }) => Some(TIMER.to_owned()),
            Err(_) => None,
        });
        let known = self
            .names
            .iter()
            .filter(|(number, _)| !bridge.cancelled.contains(*number))
            .map(|(_, (name, _))| name.clone());
        immediate.into_iter().chain(known).chain(unseen).collect()
    }

    /// Goes on with the run until it ends or nothing more can be done now.
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
            if self.asked.is_none() {
                if let Poll::Ready(ended) = guest.as_mut().poll(cx) {
                    return Poll::Ready(ended);
                }
                self.accept();
            }
            self.poll_running(cx);
            let Some(mut waiting) = self.asked.take() else {
                // The guest was only interrupted to let others have the processor, and has woken
                // its task.
                return Poll::Pending;
            };
            let answer = match &mut waiting {
                Waiting::Now => Some(Answer::Now(self.host.now())),
                Waiting::Seed => Some(Answer::Seed(self.host.seed())),
                Waiting::Refused((name, message)) => {
                    Some(self.result(0, refused(name, std::mem::take(message))))
                }
                // Not excluded from the script's time: what is parsed is the script's own.
                Waiting::Strip(future) => match future.as_mut().poll(cx) {
                    Poll::Ready(stripped) => Some(Answer::Stripped(stripped)),
                    Poll::Pending => None,
                },
                Waiting::Call { number, future, .. } => {
                    let began = Instant::now();
                    let polled = future.as_mut().poll(cx);
                    lock(&self.bridge).meter.exclude_since(began);
                    match polled {
                        Poll::Ready(outcome) => {
                            self.host.settled(*number);
                            Some(self.result(*number, outcome))
                        }
                        Poll::Pending => None,
                    }
                }
                Waiting::Any => match self.next_ready() {
                    Some((number, outcome)) => {
                        self.names.remove(&number);
                        lock(&self.bridge).outstanding.end(number);
                        self.host.settled(number);
                        Some(self.result(number, outcome))
                    }
                    None if self.running.is_empty() && self.ready.is_empty() => {
                        Some(Answer::Nothing)
                    }
                    None => None,
                },
            };
            let Some(answer) = answer else {
                // A source that is parsed is the script's own work, not something it waits for.
                let works = matches!(waiting, Waiting::Strip(_));
                self.asked = Some(waiting);
                if !works {
                    self.host.stands_still(&mut self.under_way());
                }
                return Poll::Pending;
            };
            lock(&self.bridge).answer = Some(answer);
        }
    }

    /// The numbers of what has not ended.
    fn under_way(&self) -> impl Iterator<Item = u32> {
        let immediate = match &self.asked {
            Some(Waiting::Call { number, .. }) => Some(*number),
            _ => None,
        };
        let ended: HashSet<u32> = self.ready.iter().map(|(number, _)| *number).collect();
        immediate
            .into_iter()
            .chain(self.names.keys().copied().filter(move |number| !ended.contains(number)))
    }

    /// Takes over what the guest has put into the bridge.
    fn accept(&mut self) {
        let (started, cancelled, asked) = {
            let mut bridge = lock(&self.bridge);
            if bridge.started.is_empty() && bridge.cancelled.is_empty() && bridge.asked.is_none() {
                return;
            }
            (
                std::mem::take(&mut bridge.started),
                std::mem::take(&mut bridge.cancelled),
                bridge.asked.take(),
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
        for number in &cancelled {
            if let Some((_, Some(abort))) = self.names.remove(number) {
                abort.abort();
            }
        }
        if !cancelled.is_empty() {
            self.ready.retain(|(ready, _)| !cancelled.contains(ready));
        }
        self.asked = asked.map(|ask| match ask {
            Ask::Call(Requested::Call(call)) => {
                let (number, name) = (call.number, call.name.clone());
                Waiting::Call { number, future: self.call(call), name }
            }
            Ask::Call(Requested::Sleep { number, milliseconds }) => {
                let sleep = self.host.sleep(number, Duration::from_millis(milliseconds));
                Waiting::Call {
                    number,
                    name: TIMER.to_owned(),
                    future: sleep.map(|()| Ok(serde_json::Value::Null)).boxed(),
                }
            }
            Ask::Refused(refusal) => Waiting::Refused(refusal),
            Ask::Any => Waiting::Any,
            Ask::Now => Waiting::Now,
            Ask::Seed => Waiting::Seed,
            Ask::Strip(source) => {
                let typescript = self.typescript;
                Waiting::Strip(Box::pin(async move { typescript.strip(&source).await }))
            }
        });
    }

    fn start(&mut self, requested: Requested) {
        match requested {
            Requested::Call(call) => {
                let number = call.number;
                self.names.insert(number, (call.name.clone(), None));
                let call = self.call(call);
                self.running.push(call.map(move |outcome| Some((number, outcome))).boxed());
            }
            Requested::Sleep { number, milliseconds } => {
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

    /// The host's future, which is made when it is first polled, so that its time is the poll's. A
    /// panic becomes an error the script can catch.
    fn call(&self, call: super::HostCall) -> BoxFuture<'h, Outcome> {
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

    /// Lets the concurrent calls get on.
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

    /// The end the script sees next, if it is there.
    fn next_ready(&mut self) -> Option<(u32, Outcome)> {
        // Calls that were never made come first: they were refused at once, and so they are when
        // the script runs again.
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

    fn result(&self, number: u32, outcome: Outcome) -> Answer {
        let outcome = outcome.map(|value| value.to_string().into_bytes());
        let outcome = outcome.and_then(|json| {
            if json.len() <= self.call_bytes {
                return Ok(json);
            }
            let message = format!(
                "the call was made, and what it did stands; only its result is left out: it is {} bytes, more than the {} allowed. Of what \
                 only reads, ask for less",
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

/// How a timer is called in notes.
const TIMER: &str = "timer";
