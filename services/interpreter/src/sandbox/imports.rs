//! The host's side of the guest's imports, and the state of a run.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use wasmtime::{Caller, Error, Linker, Memory, ResourceLimiter, Result};

use super::drive::{Answer, Bridge, GuestRequest, ask, lock};
use super::host::{HostCall, IMPORT};
use super::limits::{ARGUMENTS_EXCEEDED, Limits, VALUES_EXCEEDED};
use super::outcome::{Limit, Outcome, Status, Value};
use super::typescript::StripError;

/// Maximum size of the description of an uncaught error or of a note; the rest is cut off. The
/// guest itself stays below.
const MAX_DESCRIPTION_BYTES: usize = 256 << 10;
/// Maximum number of notes; more are dropped.
const MAX_NOTES: usize = 32;
/// The name under which timers pass through the imports for calls.
const SLEEP: &str = "__sleep";
/// Maximum number of values (lists, objects, texts, numbers …) in the arguments of one call. A
/// value here takes up to a hundred times the memory of its text, so the limit on the text's size
/// alone is too weak. More values are an error that the script can catch.
const MAX_VALUES: usize = 20_000;

/// The data of a run's store.
pub(super) struct State {
    pub(super) bridge: Arc<Mutex<Bridge>>,
    pub(super) limits: Limits,
    pub(super) memory: Option<Memory>,
    pub(super) memory_limiter: MemoryLimiter,
    pub(super) interrupt_flag: u32,
    /// The tools that the guest may call, in addition to timers and modules.
    tools: Arc<HashSet<String>>,
    /// The limit for which the host has stopped, or is stopping, the guest.
    pub(super) stopped: Option<Limit>,
    /// Data that was announced and not yet fetched: inputs of the run, and replies.
    pub(super) reply: Vec<u8>,
    output: Vec<u8>,
    output_dropped: u64,
    notes: Vec<String>,
    host_calls: u32,
    /// The numbers that calls have used. An approval and a journal entry are for one number, so a
    /// guest whose engine a script has taken over must not use a number twice.
    numbers: HashSet<u32>,
    ending: Option<(u32, Vec<u8>)>,
    /// The size of a value or of an error's description that is too large.
    oversized: Option<usize>,
}

/// Bounds the instance's memory.
pub(super) struct MemoryLimiter {
    /// In bytes.
    pub(super) limit: usize,
    /// Whether the guest requested more.
    pub(super) refused: bool,
}

impl ResourceLimiter for MemoryLimiter {
    fn memory_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> Result<bool> {
        let allowed = desired <= self.limit;
        self.refused |= !allowed;
        Ok(allowed)
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> Result<bool> {
        Ok(desired <= 4096)
    }
}

impl State {
    pub(super) fn new(
        limits: &Limits,
        max_memory_bytes: usize,
        interrupt_flag: u32,
        tools: Arc<HashSet<String>>,
    ) -> Self {
        State {
            bridge: Arc::default(),
            limits: limits.clone(),
            memory: None,
            memory_limiter: MemoryLimiter {
                limit: limits.memory_bytes.min(max_memory_bytes),
                refused: false,
            },
            interrupt_flag,
            tools,
            stopped: None,
            reply: Vec::new(),
            output: Vec::new(),
            output_dropped: 0,
            notes: Vec::new(),
            host_calls: 0,
            numbers: HashSet::new(),
            ending: None,
            oversized: None,
        }
    }

    /// Adds a note about calls and timers that were under way at the end of the run.
    pub(super) fn note_dropped(&mut self, dropped: &[String]) {
        if self.ending.is_none() || dropped.is_empty() {
            return;
        }
        let shown = dropped.iter().take(5).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = if dropped.len() > 5 { ", …" } else { "" };
        self.notes.push(format!(
            "{} calls or timers had not ended when the script ended, and were canceled ({shown}{more}); await what must be done",
            dropped.len()
        ));
    }

    /// The status of the run, as the guest reported it.
    pub(super) fn finished(&mut self) -> Status {
        let Some((kind, text)) = self.ending.take() else {
            return Status::Internal(
                "the guest returned without saying how the script ended".to_owned(),
            );
        };
        if let (Some(size), 0..=2) = (self.oversized, kind) {
            return Status::LimitExceeded {
                limit: Limit::Result,
                message: format!(
                    "the script's value is {size} bytes, more than the {} allowed. Return less: a count, a part or a summary; or write it to a file.",
                    self.limits.result_bytes
                ),
                stack: String::new(),
            };
        }
        let text = String::from_utf8(text)
            .unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned());
        match kind {
            0 => Status::Completed { value: Value::Json(text) },
            1 => Status::Completed { value: Value::Text(text) },
            2 => Status::Completed { value: Value::Undefined },
            // A thrown value may have getters of the script that hit the limit while it was
            // described.
            3 if let Some(limit) = self.stopped => self.exceeded(limit, String::new()),
            3 => match (ThrownError::parse(&text), self.oversized) {
                (Ok(thrown), _) => thrown.into(),
                (Err(_), Some(size)) => {
                    ThrownError::without_description(&format!("its details are {size} bytes"))
                        .into()
                }
                (Err(error), None) => ThrownError::without_description(&error.to_string()).into(),
            },
            4 | 5 => {
                let stack =
                    ThrownError::parse(&text).map(|thrown| thrown.stack).unwrap_or_default();
                match kind {
                    4 => self.exceeded(Limit::Memory, stack),
                    _ => {
                        self.exceeded(self.stopped.unwrap_or(Limit::Cpu), interrupted_stack(&stack))
                    }
                }
            }
            other => Status::Internal(format!("the guest ended in an unknown way: {other}")),
        }
    }

    /// The status of a run that exceeded a limit.
    pub(super) fn exceeded(&self, limit: Limit, stack: String) -> Status {
        let message = match limit {
            Limit::Cpu => format!(
                "the script used more than {:?} of CPU time and was stopped (waiting for tools is not counted). Look for an endless loop, or do less work in one script.",
                self.limits.cpu
            ),
            Limit::Memory => format!(
                "the script used more than its {} MiB of memory. Process less data at once; keep large results in files.",
                self.memory_limiter.limit >> 20
            ),
            Limit::HostCalls => format!(
                "the script made more than {} tool calls and timers, and was stopped. Do the work in fewer, larger calls, or in several scripts.",
                self.limits.host_calls
            ),
            Limit::Stack => {
                "the script nested calls or data too deeply. Use a loop instead of recursion, or flatter data."
                    .to_owned()
            }
            Limit::Wall | Limit::Result => "the script exceeded a limit".to_owned(),
        };
        Status::LimitExceeded { limit, message, stack }
    }

    /// The outcome of the run.
    pub(super) fn outcome(self, status: Status) -> Outcome {
        let cpu = lock(&self.bridge).meter.cpu();
        let output = String::from_utf8(self.output).unwrap_or_else(|error| {
            // Only a compromised guest prints invalid UTF-8. Replacement characters are longer than
            // the bytes they replace.
            let mut output = String::from_utf8_lossy(error.as_bytes()).into_owned();
            output.truncate(output.floor_char_boundary(self.limits.output_bytes));
            output
        });
        let (output_dropped, notes, host_calls) =
            (self.output_dropped, self.notes, self.host_calls);
        Outcome { status, output, output_dropped, notes, host_calls, cpu }
    }

    fn print(&mut self, text: &[u8]) {
        let room = self.limits.output_bytes.saturating_sub(self.output.len());
        if text.len() < room && self.output_dropped == 0 {
            self.output.extend_from_slice(text);
            self.output.push(b'\n');
            return;
        }
        // Once text was dropped, all later text is dropped: output with a hole would mislead.
        let kept = if self.output_dropped == 0 { floor_char_boundary(text, room) } else { 0 };
        self.output.extend_from_slice(&text[..kept]);
        self.output_dropped += (text.len() + 1 - kept) as u64;
    }

    /// Counts a call. `Err` ends the run.
    fn count_call(&mut self) -> Result<()> {
        if self.host_calls >= self.limits.host_calls {
            self.stopped = Some(Limit::HostCalls);
            return Err(Error::msg("more host calls than allowed"));
        }
        self.host_calls += 1;
        Ok(())
    }
}

/// The stack of an interrupted script. QuickJS records positions only where a function calls or may
/// throw. The innermost frame was interrupted elsewhere, so its position would point to the wrong
/// line; it is removed.
fn interrupted_stack(stack: &str) -> String {
    let (first, rest) =
        stack.split_once('\n').map_or((stack, None), |(first, rest)| (first, Some(rest)));
    let first = match first.rsplit_once('(') {
        Some((function, place)) if place.ends_with(')') => {
            let file = place.trim_end_matches(')').split(':').next().unwrap_or_default();
            format!("{function}({file})")
        }
        _ => first.to_owned(),
    };
    rest.map_or(first.clone(), |rest| format!("{first}\n{rest}"))
}

/// The length of the longest prefix of at most `len` bytes that does not cut a character.
fn floor_char_boundary(text: &[u8], len: usize) -> usize {
    if len >= text.len() {
        return text.len();
    }
    (0..=len).rev().take(4).find(|&end| text[end] & 0xC0 != 0x80).unwrap_or(len)
}

/// The guest's description of an exception, see `describe` in its `prelude/format.js`.
#[derive(Deserialize)]
struct ThrownError {
    name: String,
    message: String,
    stack: String,
    code: Option<String>,
    details: Option<serde_json::Value>,
}

impl ThrownError {
    /// Parses the guest's description of an exception. The script controls an exception: its texts
    /// may hold halves of surrogate pairs, and its details may be nested too deeply to parse. Such
    /// details are left out.
    fn parse(json: &str) -> serde_json::Result<Self> {
        serde_json::from_str(json).or_else(|_| {
            let json = replace_lone_surrogates(json);
            serde_json::from_str(&json).or_else(|_| {
                let WithoutDetails { name, message, stack, code } = serde_json::from_str(&json)?;
                Ok(ThrownError { name, message, stack, code, details: None })
            })
        })
    }

    fn without_description(why: &str) -> Self {
        ThrownError {
            name: "InternalError".to_owned(),
            message: format!(
                "the script failed with an exception that could not be described: {why}"
            ),
            stack: String::new(),
            code: None,
            details: None,
        }
    }
}

/// An exception whose details cannot be parsed.
#[derive(Deserialize)]
struct WithoutDetails {
    name: String,
    message: String,
    stack: String,
    code: Option<String>,
}

/// Replaces each lone half of a surrogate pair in JSON by U+FFFD. JavaScript strings can hold them,
/// UTF-8 text cannot.
fn replace_lone_surrogates(json: &str) -> String {
    let unit = |text: &str| u16::from_str_radix(text.strip_prefix("\\u")?.get(..4)?, 16).ok();
    let (mut text, mut rest) = (String::with_capacity(json.len()), json);
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        text.push_str(before);
        let pair =
            escape.get(6..).and_then(unit).is_some_and(|low| (0xdc00..0xe000).contains(&low));
        let (length, is_valid) = match unit(escape) {
            Some(0xd800..0xdc00) if pair => (12, true),
            Some(0xd800..0xe000) => (6, false),
            Some(_) => (6, true),
            None => (2, true),
        };
        let Some((escape, after)) = escape.split_at_checked(length) else { break };
        text.push_str(if is_valid { escape } else { "\u{fffd}" });
        rest = after;
    }
    text.push_str(rest);
    text
}

impl From<ThrownError> for Status {
    fn from(ThrownError { name, message, stack, code, details }: ThrownError) -> Self {
        Status::Threw { name, message, stack, code, details }
    }
}

/// Defines the imports. The guest's `host.rs` documents them.
pub(super) fn define(linker: &mut Linker<State>) -> Result<()> {
    linker.func_wrap_async(
        "host",
        "call",
        |mut caller: Caller<'_, State>,
         (number, name, name_len, args, args_len): (u32, u32, u32, u32, u32)| {
            Box::new(async move {
                caller.data_mut().count_call()?;
                let request =
                    match read_request(&mut caller, number, (name, name_len), (args, args_len))? {
                        Ok(call) => GuestRequest::Call(call),
                        Err(refused) => GuestRequest::Refused(refused),
                    };
                let bridge = Arc::clone(&caller.data().bridge);
                match ask(&bridge, request).await {
                    Answer::Result { succeeded, json, .. } => {
                        let len = json.len() as i64;
                        caller.data_mut().reply = json;
                        Ok(if succeeded { len } else { -1 - len })
                    }
                    other => Err(mismatch(&other)),
                }
            })
        },
    )?;
    linker.func_wrap(
        "host",
        "start",
        |mut caller: Caller<'_, State>,
         number: u32,
         name: u32,
         name_len: u32,
         args: u32,
         args_len: u32|
         -> Result<()> {
            caller.data_mut().count_call()?;
            let call = read_request(&mut caller, number, (name, name_len), (args, args_len))?;
            lock(&caller.data().bridge).start(number, call)
        },
    )?;
    linker.func_wrap("host", "cancel", |caller: Caller<'_, State>, number: u32| {
        lock(&caller.data().bridge).cancel(number);
    })?;
    linker.func_wrap_async(
        "host",
        "wait_any",
        |mut caller: Caller<'_, State>, (number_at, succeeded_at): (u32, u32)| {
            Box::new(async move {
                let bridge = Arc::clone(&caller.data().bridge);
                match ask(&bridge, GuestRequest::Any).await {
                    Answer::Result { number, succeeded, json } => {
                        write(&mut caller, number_at, &number.to_le_bytes())?;
                        write(&mut caller, succeeded_at, &u32::from(succeeded).to_le_bytes())?;
                        let len = json.len() as i64;
                        caller.data_mut().reply = json;
                        Ok(len)
                    }
                    Answer::Nothing => Ok(-1),
                    other => Err(mismatch(&other)),
                }
            })
        },
    )?;
    linker.func_wrap(
        "host",
        "take",
        |mut caller: Caller<'_, State>, buffer: u32| -> Result<()> {
            let reply = std::mem::take(&mut caller.data_mut().reply);
            write(&mut caller, buffer, &reply)
        },
    )?;
    linker.func_wrap(
        "host",
        "log",
        |mut caller: Caller<'_, State>, text: u32, len: u32| -> Result<()> {
            let (text, state) = read_with_state(&mut caller, text, len)?;
            state.print(text);
            Ok(())
        },
    )?;
    linker.func_wrap(
        "host",
        "note",
        |mut caller: Caller<'_, State>, text: u32, len: u32| -> Result<()> {
            let (text, state) = read_with_state(&mut caller, text, len)?;
            if state.notes.len() < MAX_NOTES {
                let text = &text[..floor_char_boundary(text, MAX_DESCRIPTION_BYTES)];
                state.notes.push(String::from_utf8_lossy(text).into_owned());
            }
            Ok(())
        },
    )?;
    linker.func_wrap(
        "host",
        "finish",
        |mut caller: Caller<'_, State>, kind: u32, text: u32, len: u32| -> Result<()> {
            let (text, state) = read_with_state(&mut caller, text, len)?;
            let limit = if kind <= 2 { state.limits.result_bytes } else { MAX_DESCRIPTION_BYTES };
            if text.len() <= limit {
                state.ending = Some((kind, text.to_vec()));
            } else {
                state.ending = Some((kind, Vec::new()));
                state.oversized = Some(text.len());
            }
            Ok(())
        },
    )?;
    linker.func_wrap_async(
        "host",
        "seed",
        |mut caller: Caller<'_, State>, (buffer,): (u32,)| {
            Box::new(async move {
                let bridge = Arc::clone(&caller.data().bridge);
                match ask(&bridge, GuestRequest::Seed).await {
                    Answer::Seed(seed) => write(&mut caller, buffer, &seed),
                    other => Err(mismatch(&other)),
                }
            })
        },
    )?;
    linker.func_wrap_async(
        "host",
        "strip",
        |mut caller: Caller<'_, State>, (source, len): (u32, u32)| {
            Box::new(async move {
                let source = str::from_utf8(read(&caller, source, len)?)?.to_owned();
                let bridge = Arc::clone(&caller.data().bridge);
                let (succeeded, reply) = match ask(&bridge, GuestRequest::Strip(source)).await {
                    Answer::Stripped(Ok(javascript)) => (true, javascript.into_bytes()),
                    Answer::Stripped(Err(StripError::Syntax { message, line, column })) => {
                        (false, serde_json::json!([message, line, column]).to_string().into_bytes())
                    }
                    Answer::Stripped(Err(unavailable)) => {
                        return Err(Error::msg(unavailable.to_string()));
                    }
                    other => return Err(mismatch(&other)),
                };
                let len = reply.len() as i64;
                caller.data_mut().reply = reply;
                Ok(if succeeded { len } else { -1 - len })
            })
        },
    )?;
    linker.func_wrap_async(
        "env",
        "__rquickjs_host_now_us",
        |caller: Caller<'_, State>, (): ()| {
            Box::new(async move {
                let bridge = Arc::clone(&caller.data().bridge);
                match ask(&bridge, GuestRequest::Now).await {
                    Answer::Now(now) => Ok(now.as_microsecond() as f64),
                    other => Err(mismatch(&other)),
                }
            })
        },
    )?;
    Ok(())
}

/// A request of the guest, or the name and message of the error that the script gets instead.
type RequestResult = std::result::Result<HostRequest, (&'static str, String)>;

/// A call or a timer.
pub(super) enum HostRequest {
    Call(HostCall),
    Sleep { number: u32, milliseconds: u64 },
}

fn read_request(
    caller: &mut Caller<'_, State>,
    number: u32,
    name: (u32, u32),
    args: (u32, u32),
) -> Result<RequestResult> {
    if !caller.data_mut().numbers.insert(number) {
        return Err(Error::msg(format!("the guest gives two calls the number {number}")));
    }
    let caller = &*caller;
    let name = str::from_utf8(read(caller, name.0, name.1)?)?;
    if name != SLEEP && name != IMPORT && !caller.data().tools.contains(name) {
        return Err(Error::msg("the guest calls what is no tool"));
    }
    let limit = caller.data().limits.call_bytes;
    if args.1 as usize > limit {
        let message = format!(
            "the arguments of {name} are {} bytes, more than the {limit} allowed, so it was not called; pass less at once",
            args.1
        );
        return Ok(Err((ARGUMENTS_EXCEEDED, message)));
    }
    let args = read(caller, args.0, args.1)?;
    if count_values(args) > MAX_VALUES {
        let message = format!(
            "the arguments of {name} hold more than {MAX_VALUES} values, so it was not called; pass less at once, or large data as one text"
        );
        return Ok(Err((VALUES_EXCEEDED, message)));
    }
    let args: serde_json::Value = match serde_json::from_slice(args) {
        Ok(args) => args,
        Err(error) => {
            return Ok(Err((
                "TypeError",
                format!("the arguments of {name} cannot be read: {error}"),
            )));
        }
    };
    if name == SLEEP {
        let milliseconds = args.get("ms").and_then(serde_json::Value::as_u64).unwrap_or_default();
        return Ok(Ok(HostRequest::Sleep { number, milliseconds }));
    }
    Ok(Ok(HostRequest::Call(HostCall { number, name: name.to_owned(), args })))
}

/// Counts the values in JSON without parsing it: opening brackets and separators outside of texts.
fn count_values(json: &[u8]) -> usize {
    let (mut count, mut at) = (0, 0);
    while at < json.len() {
        let text = memchr::memchr(b'"', &json[at..]).map_or(json.len(), |found| at + found);
        count += json[at..text].iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count();
        at = text + 1;
        // Finds the end of the text.
        while let Some(found) = json.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
            at += found + 1;
            if json[at - 1] == b'"' {
                break;
            }
            at += 1;
        }
    }
    count
}

fn memory(caller: &Caller<'_, State>) -> Result<Memory> {
    caller.data().memory.ok_or_else(|| Error::msg("the guest calls the host before it runs"))
}

fn out_of_bounds() -> Error {
    Error::msg("the guest points outside of its memory")
}

fn read<'a>(caller: &'a Caller<'_, State>, at: u32, len: u32) -> Result<&'a [u8]> {
    let at = at as usize;
    memory(caller)?.data(caller).get(at..at + len as usize).ok_or_else(out_of_bounds)
}

fn read_with_state<'a>(
    caller: &'a mut Caller<'_, State>,
    at: u32,
    len: u32,
) -> Result<(&'a [u8], &'a mut State)> {
    let at = at as usize;
    let (data, state) = memory(caller)?.data_and_store_mut(caller);
    Ok((data.get(at..at + len as usize).ok_or_else(out_of_bounds)?, state))
}

fn write(caller: &mut Caller<'_, State>, at: u32, bytes: &[u8]) -> Result<()> {
    memory(caller)?.write(caller, at as usize, bytes).map_err(|_| out_of_bounds())
}

fn mismatch(answer: &Answer) -> Error {
    Error::msg(format!("the answer {answer:?} does not match the request"))
}
