//! The host's side of the guest's imports, and what a run gathers.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use serde::Deserialize;
use wasmtime::{Caller, Error, Linker, Memory, ResourceLimiter, Result};

use super::drive::{Answer, Ask, Bridge, ask, lock};
use super::host::{HostCall, IMPORT};
use super::limits::{ARGUMENTS_EXCEEDED, Limits, VALUES_EXCEEDED};
use super::outcome::{Limit, Outcome, Status, Value};
use super::typescript::StripError;

/// More of a description of an uncaught error, or of a note, is cut off; the guest itself keeps
/// below.
const MAX_DESCRIPTION: usize = 256 << 10;
/// More notes are dropped.
const MAX_NOTES: usize = 32;
/// The name under which timers pass through the imports for calls.
const SLEEP: &str = "__sleep";
/// Most values (lists, objects, texts, numbers …) in the arguments of one call. Here each takes up
/// to a hundred times the memory that it takes as text, so that the size of the text alone bounds
/// little. More is an error the script can catch.
const MAX_VALUES: usize = 20_000;

/// The data of a run's store.
pub(super) struct State {
    pub(super) bridge: Arc<Mutex<Bridge>>,
    pub(super) limits: Limits,
    pub(super) memory: Option<Memory>,
    pub(super) memory_limiter: MemoryLimiter,
    pub(super) interrupt_flag: u32,
    /// What the guest may call, beside timers and modules.
    tools: Arc<HashSet<String>>,
    /// The limit that the host is stopping, or has stopped, the guest for.
    pub(super) stopped: Option<Limit>,
    /// What was announced and not yet fetched: what a run is given, and replies.
    pub(super) reply: Vec<u8>,
    output: Vec<u8>,
    output_dropped: u64,
    notes: Vec<String>,
    host_calls: u32,
    /// The numbers that calls have had. An approval and a journal's entry are for one number: a
    /// guest in which a script has taken over the engine must not use one twice.
    numbers: HashSet<u32>,
    ending: Option<(u32, Vec<u8>)>,
    /// The size of a value, or of the description of an error, that is too large.
    oversized: Option<usize>,
}

/// Bounds the instance's memory.
pub(super) struct MemoryLimiter {
    /// In bytes.
    pub(super) limit: usize,
    /// Whether the guest has asked for more.
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

    /// Notes the calls and timers that were under way when the run ended.
    pub(super) fn note_dropped(&mut self, dropped: &[String]) {
        if self.ending.is_none() || dropped.is_empty() {
            return;
        }
        let shown = dropped.iter().take(5).map(String::as_str).collect::<Vec<_>>().join(", ");
        let more = if dropped.len() > 5 { ", …" } else { "" };
        self.notes.push(format!(
            "{} calls or timers had not ended when the script ended, and were cancelled ({shown}{more}); await what must be done",
            dropped.len()
        ));
    }

    /// How the script ended, as the guest has said.
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
            // What is thrown may have getters of the script, which ran into the limit while it was
            // described.
            3 if let Some(limit) = self.stopped => self.exceeded(limit, String::new()),
            3 => match (Thrown::read(&text), self.oversized) {
                (Ok(thrown), _) => thrown.into(),
                (Err(_), Some(size)) => {
                    Thrown::undescribed(&format!("its details are {size} bytes")).into()
                }
                (Err(error), None) => Thrown::undescribed(&error.to_string()).into(),
            },
            4 | 5 => {
                let stack = Thrown::read(&text).map(|thrown| thrown.stack).unwrap_or_default();
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

    /// The status of a run that has exceeded a limit.
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

    /// What the run leaves.
    pub(super) fn outcome(self, status: Status) -> Outcome {
        let cpu = lock(&self.bridge).meter.cpu();
        let output = String::from_utf8(self.output).unwrap_or_else(|error| {
            // Only of a guest that lies; what stands for its bytes is longer than they are.
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
        // Once something was dropped, nothing later is kept: output with a hole in it would
        // mislead.
        let kept = if self.output_dropped == 0 { floor_char_boundary(text, room) } else { 0 };
        self.output.extend_from_slice(&text[..kept]);
        self.output_dropped += (text.len() + 1 - kept) as u64;
    }

    /// Counts a call; `Err` ends the run.
    fn count_call(&mut self) -> Result<()> {
        if self.host_calls >= self.limits.host_calls {
            self.stopped = Some(Limit::HostCalls);
            return Err(Error::msg("more host calls than allowed"));
        }
        self.host_calls += 1;
        Ok(())
    }
}

/// The stack of an interruption. QuickJS notes a position only where a function calls or may throw,
/// so that of the innermost frame, which was interrupted somewhere else, would point to the wrong
/// line.
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

/// The longest beginning of at most `len` bytes that doesn't cut a character.
fn floor_char_boundary(text: &[u8], len: usize) -> usize {
    if len >= text.len() {
        return text.len();
    }
    (0..=len).rev().take(4).find(|&end| text[end] & 0xC0 != 0x80).unwrap_or(len)
}

/// The guest's description of an exception, see `describe` in its `prelude/format.js`.
#[derive(Deserialize)]
struct Thrown {
    name: String,
    message: String,
    stack: String,
    code: Option<String>,
    details: Option<serde_json::Value>,
}

impl Thrown {
    /// Reads what the guest says of an exception. What an exception is lies with the script: its
    /// texts may hold halves of surrogate pairs, and its details may be nested deeper than can be
    /// read here; then they are left out.
    fn read(json: &str) -> serde_json::Result<Self> {
        serde_json::from_str(json).or_else(|_| {
            let json = with_whole_characters(json);
            serde_json::from_str(&json).or_else(|_| {
                let WithoutDetails { name, message, stack, code } = serde_json::from_str(&json)?;
                Ok(Thrown { name, message, stack, code, details: None })
            })
        })
    }

    fn undescribed(why: &str) -> Self {
        Thrown {
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

/// An exception whose details cannot be read.
#[derive(Deserialize)]
struct WithoutDetails {
    name: String,
    message: String,
    stack: String,
    code: Option<String>,
}

/// JSON with U+FFFD for each half of a surrogate pair, which JavaScript's strings can hold and text
/// cannot.
fn with_whole_characters(json: &str) -> String {
    let unit = |text: &str| u16::from_str_radix(text.strip_prefix("\\u")?.get(..4)?, 16).ok();
    let (mut whole, mut rest) = (String::with_capacity(json.len()), json);
    while let Some(at) = rest.find('\\') {
        let (before, escape) = rest.split_at(at);
        whole.push_str(before);
        let pair =
            escape.get(6..).and_then(unit).is_some_and(|low| (0xdc00..0xe000).contains(&low));
        let (length, is_whole) = match unit(escape) {
            Some(0xd800..0xdc00) if pair => (12, true),
            Some(0xd800..0xe000) => (6, false),
            Some(_) => (6, true),
            None => (2, true),
        };
        let Some((escape, after)) = escape.split_at_checked(length) else { break };
        whole.push_str(if is_whole { escape } else { "\u{fffd}" });
        rest = after;
    }
    whole.push_str(rest);
    whole
}

impl From<Thrown> for Status {
    fn from(Thrown { name, message, stack, code, details }: Thrown) -> Self {
        Status::Threw { name, message, stack, code, details }
    }
}

/// Defines the imports. Their meaning is documented in the guest's `host.rs`.
pub(super) fn define(linker: &mut Linker<State>) -> Result<()> {
    linker.func_wrap_async(
        "host",
        "call",
        |mut caller: Caller<'_, State>,
         (number, name, name_len, args, args_len): (u32, u32, u32, u32, u32)| {
            Box::new(async move {
                caller.data_mut().count_call()?;
                let request =
                    match request(&mut caller, number, (name, name_len), (args, args_len))? {
                        Ok(call) => Ask::Call(call),
                        Err(refused) => Ask::Refused(refused),
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
            let call = request(&mut caller, number, (name, name_len), (args, args_len))?;
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
                match ask(&bridge, Ask::Any).await {
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
                let text = &text[..floor_char_boundary(text, MAX_DESCRIPTION)];
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
            let limit = if kind <= 2 { state.limits.result_bytes } else { MAX_DESCRIPTION };
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
                match ask(&bridge, Ask::Seed).await {
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
                let (succeeded, reply) = match ask(&bridge, Ask::Strip(source)).await {
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
                match ask(&bridge, Ask::Now).await {
                    Answer::Now(now) => Ok(now.as_microsecond() as f64),
                    other => Err(mismatch(&other)),
                }
            })
        },
    )?;
    Ok(())
}

/// What the guest asks for, or the error the script gets instead: (its name, its message).
type Request = std::result::Result<Requested, (&'static str, String)>;

/// A call or a timer.
pub(super) enum Requested {
    Call(HostCall),
    Sleep { number: u32, milliseconds: u64 },
}

fn request(
    caller: &mut Caller<'_, State>,
    number: u32,
    name: (u32, u32),
    args: (u32, u32),
) -> Result<Request> {
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
    if values(args) > MAX_VALUES {
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
        return Ok(Ok(Requested::Sleep { number, milliseconds }));
    }
    Ok(Ok(Requested::Call(HostCall { number, name: name.to_owned(), args })))
}

/// How many values there are in JSON, without reading it: what is opened and what is separated,
/// outside of texts.
fn values(json: &[u8]) -> usize {
    let (mut count, mut at) = (0, 0);
    while at < json.len() {
        let text = memchr::memchr(b'"', &json[at..]).map_or(json.len(), |found| at + found);
        count += json[at..text].iter().filter(|byte| matches!(byte, b',' | b'[' | b'{')).count();
        at = text + 1;
        // The text's end.
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

fn outside() -> Error {
    Error::msg("the guest points outside of its memory")
}

fn read<'a>(caller: &'a Caller<'_, State>, at: u32, len: u32) -> Result<&'a [u8]> {
    let at = at as usize;
    memory(caller)?.data(caller).get(at..at + len as usize).ok_or_else(outside)
}

fn read_with_state<'a>(
    caller: &'a mut Caller<'_, State>,
    at: u32,
    len: u32,
) -> Result<(&'a [u8], &'a mut State)> {
    let at = at as usize;
    let (data, state) = memory(caller)?.data_and_store_mut(caller);
    Ok((data.get(at..at + len as usize).ok_or_else(outside)?, state))
}

fn write(caller: &mut Caller<'_, State>, at: u32, bytes: &[u8]) -> Result<()> {
    memory(caller)?.write(caller, at as usize, bytes).map_err(|_| outside())
}

fn mismatch(answer: &Answer) -> Error {
    Error::msg(format!("the answer {answer:?} does not fit the question"))
}
