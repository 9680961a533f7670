//! Calls of tools, and output.

use std::cell::{Cell, RefCell};

use rquickjs::promise::PromiseState;
use rquickjs::{CString, Ctx, Error, Exception, Result, String, Value};

use crate::host;

thread_local! {
    /// The number of the last call. Numbers are given when the script makes the call, so that a script that is run again
    /// gives every call the number it had.
    static LAST_NUMBER: Cell<u32> = const { Cell::new(0) };
    /// The error of the last immediate call, until the prelude fetches it.
    static FAILURE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Numbers a call.
pub(crate) fn number() -> u32 {
    let number = LAST_NUMBER.get() + 1;
    LAST_NUMBER.set(number);
    number
}

/// Calls a tool and waits: its result as JSON, or null after an error, which `failure` then gives.
pub(super) fn call<'js>(ctx: Ctx<'js>, name: String<'js>, args: String<'js>) -> Result<Value<'js>> {
    let name = utf8(&ctx, name)?;
    let args = utf8(&ctx, args)?;
    match host::call(number(), name.as_str().as_bytes(), args.as_str().as_bytes()) {
        Ok(Ok(json)) => Ok(string_from(&ctx, &json)?.into_value()),
        Ok(Err(error)) => {
            FAILURE.replace(error);
            Ok(Value::new_null(ctx))
        }
        Err(host::TooLarge) => {
            Err(Exception::throw_range(&ctx, "the tool's result does not fit into the sandbox's memory"))
        }
    }
}

/// The error of the last `call`, as JSON.
pub(super) fn failure<'js>(ctx: Ctx<'js>) -> Result<String<'js>> {
    string_from(&ctx, &FAILURE.take())
}

/// Starts a call that was numbered before.
pub(super) fn start<'js>(ctx: Ctx<'js>, number: u32, name: String<'js>, args: String<'js>) -> Result<()> {
    let name = utf8(&ctx, name)?;
    let args = utf8(&ctx, args)?;
    host::start(number, name.as_str().as_bytes(), args.as_str().as_bytes());
    Ok(())
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

/// What a promise is, for showing it.
pub(super) fn promise_state(value: Value<'_>) -> &'static str {
    match value.as_promise().map(|promise| promise.state()) {
        Some(PromiseState::Resolved) => "fulfilled",
        Some(PromiseState::Rejected) => "rejected",
        Some(PromiseState::Pending) | None => "pending",
    }
}

/// The text of a JavaScript string. Where memory is too short for it, that is the error; `to_cstring` alone gives an unknown one.
pub(crate) fn utf8<'js>(ctx: &Ctx<'js>, text: String<'js>) -> Result<CString<'js>> {
    text.to_cstring().map_err(|error| if ctx.has_exception() { Error::Exception } else { error })
}

/// A JavaScript string of what the host sent, which is always UTF-8.
pub(crate) fn string_from<'js>(ctx: &Ctx<'js>, bytes: &[u8]) -> Result<String<'js>> {
    match std::str::from_utf8(bytes) {
        Ok(text) => String::from_str(ctx.clone(), text),
        Err(_) => Err(Exception::throw_internal(ctx, "the host sent text that is not UTF-8")),
    }
}
