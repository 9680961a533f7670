//! Calls of tools, and output.

use std::cell::{Cell, RefCell};

use rquickjs::promise::PromiseState;
use rquickjs::{CString, Ctx, Error, Exception, Result, String, Value, qjs};

use crate::host;

thread_local! {
    /// The number of the last call. The script's order of calls determines the numbers, so that a
    /// replayed script gives every call the same number.
    static LAST_NUMBER: Cell<u32> = const { Cell::new(0) };
    /// Whether there may be notes in addition to the outcome.
    static NOTED: Cell<bool> = const { Cell::new(false) };
    /// The error of the last immediate call, until the prelude fetches it.
    static FAILURE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    /// The host's names of the tools, in the order of their declaration. An index avoids copying a
    /// name for each call.
    static TOOLS: RefCell<Vec<Box<str>>> = const { RefCell::new(Vec::new()) };
}

/// Declares a tool, and returns its index.
pub(super) fn tool(name: std::string::String) -> u32 {
    TOOLS.with_borrow_mut(|tools| {
        tools.push(name.into());
        tools.len() as u32 - 1
    })
}

fn with_name<T>(ctx: &Ctx<'_>, tool: u32, f: impl FnOnce(&[u8]) -> T) -> Result<T> {
    TOOLS.with_borrow(|tools| match tools.get(tool as usize) {
        Some(name) => Ok(f(name.as_bytes())),
        None => Err(Exception::throw_internal(ctx, "no such tool")),
    })
}

/// Records that there may be notes in addition to the outcome: a started call may not end, or an
/// error may not be handled.
pub(crate) fn note() {
    NOTED.set(true);
}

/// Whether there may be notes in addition to the outcome.
pub(crate) fn has_noted() -> bool {
    NOTED.get()
}

/// Numbers a call.
pub(crate) fn number() -> u32 {
    let number = LAST_NUMBER.get() + 1;
    LAST_NUMBER.set(number);
    number
}

/// Calls a tool and waits. Returns the result, or undefined, which no result is, after an error.
/// `failure` then returns the error.
pub(super) fn call<'js>(ctx: Ctx<'js>, tool: u32, args: String<'js>) -> Result<Value<'js>> {
    let args = utf8(&ctx, args)?;
    match with_name(&ctx, tool, |name| host::call(number(), name, args.as_str().as_bytes()))? {
        Ok(Ok(json)) => parsed(&ctx, json),
        Ok(Err(error)) => {
            FAILURE.replace(error);
            Ok(Value::new_undefined(ctx))
        }
        Err(host::TooLarge) => Err(Exception::throw_range(
            &ctx,
            "the tool's result does not fit into the sandbox's memory",
        )),
    }
}

/// The error of the last `call`, as JSON.
pub(super) fn failure<'js>(ctx: Ctx<'js>) -> Result<String<'js>> {
    string_from(&ctx, &FAILURE.take())
}

/// Starts a call that already has its number.
pub(super) fn start<'js>(ctx: Ctx<'js>, number: u32, tool: u32, args: String<'js>) -> Result<()> {
    note();
    let args = utf8(&ctx, args)?;
    with_name(&ctx, tool, |name| host::start(number, name, args.as_str().as_bytes()))
}

/// Drops a started call.
pub(super) fn cancel(number: u32) {
    host::cancel(number);
}

/// Prints.
pub(super) fn log<'js>(ctx: Ctx<'js>, text: String<'js>) -> Result<()> {
    host::log(utf8(&ctx, text)?.as_str().as_bytes());
    Ok(())
}

/// The state of a promise, for display.
pub(super) fn promise_state(value: Value<'_>) -> &'static str {
    match value.as_promise().map(|promise| promise.state()) {
        Some(PromiseState::Resolved) => "fulfilled",
        Some(PromiseState::Rejected) => "rejected",
        Some(PromiseState::Pending) | None => "pending",
    }
}

/// The text of a JavaScript string. If memory is too short for it, returns that error; `to_cstring`
/// alone returns an unknown one.
pub(crate) fn utf8<'js>(ctx: &Ctx<'js>, text: String<'js>) -> Result<CString<'js>> {
    text.to_cstring().map_err(|error| if ctx.has_exception() { Error::Exception } else { error })
}

/// A JavaScript string of bytes from the host, which are always UTF-8.
pub(crate) fn string_from<'js>(ctx: &Ctx<'js>, bytes: &[u8]) -> Result<String<'js>> {
    match std::str::from_utf8(bytes) {
        Ok(text) => String::from_str(ctx.clone(), text),
        Err(_) => Err(Exception::throw_internal(ctx, "the host sent text that is not UTF-8")),
    }
}

/// Parses JSON from the host. The engine reads it in place, without creating a string first.
pub(crate) fn parsed<'js>(ctx: &Ctx<'js>, mut json: Vec<u8>) -> Result<Value<'js>> {
    json.try_reserve_exact(1).map_err(|_| Exception::throw_internal(ctx, "out of memory"))?;
    json.push(0);
    // SAFETY: the text ends with a zero byte that is not counted, and the returned value is owned
    // by the wrapper.
    unsafe {
        let (text, len) = (json.as_ptr().cast(), (json.len() - 1) as qjs::size_t);
        let value = qjs::JS_ParseJSON(ctx.as_raw().as_ptr(), text, len, c"result".as_ptr());
        if qjs::JS_IsException(value) {
            Err(Error::Exception)
        } else {
            Ok(Value::from_raw(ctx.clone(), value))
        }
    }
}
