//! One run of one script.
//!
//! `source.rs` describes how a script is read. If its value is a promise (`main()` as the last
//! line), the result is what the promise resolves to.

use rquickjs::promise::PromiseState;
use rquickjs::{Ctx, Error, Object, Value, qjs};

use crate::guest::Guest;
use crate::host::{self, RunEnd};
use crate::natives::{has_noted, parsed, string_from, utf8};
use crate::source::{self, Evaluated, exception};

/// Memory reserved for reporting the end of the run after the script has exhausted the rest.
const RESERVE_BYTES: usize = 1 << 20;

/// Minimum size at which cycles are collected; the engine itself uses half of it.
const MIN_GC_BYTES: usize = 1 << 20;

/// Why a run has no value.
enum Stop<'js> {
    /// An uncaught exception. For an interrupted run, the one that says where it was.
    Threw(Value<'js>),
    /// The script awaits something that will never settle.
    Stuck,
    /// A call's result does not fit into memory.
    TooLarge,
}

/// Runs the script (which a zero byte follows) and reports how it ended.
pub(crate) fn run(guest: &Guest, tools: &[u8], script: &[u8], memory_limit: usize) {
    guest.context.with(|ctx| {
        // SAFETY: the context is alive. The engine was booted on another stack than the current
        // one.
        unsafe { qjs::JS_UpdateStackTop(qjs::JS_GetRuntime(ctx.as_raw().as_ptr())) };
        limit_memory(&ctx, memory_limit.saturating_sub(RESERVE_BYTES));
        collect_beyond(&ctx, (memory_limit / 8).max(MIN_GC_BYTES));
        let value = value_of(guest, &ctx, tools, script);
        let interrupted = crate::interrupted();
        crate::clear_interrupt();
        limit_memory(&ctx, usize::MAX);
        report(guest, &ctx, value, interrupted, memory_limit);
    });
}

/// `Runtime::set_memory_limit` cannot be called while the context is in use.
fn limit_memory(ctx: &Ctx<'_>, bytes: usize) {
    // SAFETY: the context is alive.
    unsafe {
        qjs::JS_SetMemoryLimit(qjs::JS_GetRuntime(ctx.as_raw().as_ptr()), bytes as qjs::size_t)
    };
}

/// Sets the size at which unreachable cycles are collected for the first time. Everything else is
/// freed at once, and a collection writes to every object, including those that all instances
/// share.
fn collect_beyond(ctx: &Ctx<'_>, bytes: usize) {
    // SAFETY: the context is alive.
    unsafe {
        qjs::JS_SetGCThreshold(qjs::JS_GetRuntime(ctx.as_raw().as_ptr()), bytes as qjs::size_t)
    };
}

fn value_of<'js>(
    guest: &Guest,
    ctx: &Ctx<'js>,
    tools: &[u8],
    script: &[u8],
) -> Result<Value<'js>, Stop<'js>> {
    let thrown = |error: Error| Stop::Threw(exception(ctx, &error));
    if !tools.is_empty() {
        string_from(ctx, tools)
            .and_then(|declared| guest.prelude.declare(ctx, declared))
            .map_err(thrown)?;
    }

    let value = match source::evaluate(ctx, script).map_err(Stop::Threw)? {
        Evaluated::Script(completion) => {
            let completion = resolve(guest, ctx, completion)?;
            // An evaluation with `await` wraps its value, so that a promise is not awaited
            // implicitly.
            match completion.as_object() {
                Some(wrapper) => wrapper.get::<_, Value>("value").map_err(thrown)?,
                None => completion,
            }
        }
        Evaluated::Module(module, promise) => {
            resolve(guest, ctx, promise.into_value())?;
            module.get("default").map_err(thrown)?
        }
    };
    resolve(guest, ctx, value)
}

/// Resolves the value if it is a promise, otherwise returns it. Runs the script's jobs and passes
/// it the ends of its calls.
fn resolve<'js>(guest: &Guest, ctx: &Ctx<'js>, value: Value<'js>) -> Result<Value<'js>, Stop<'js>> {
    let Some(promise) = value.as_promise() else {
        return Ok(value);
    };
    loop {
        run_jobs(ctx).map_err(Stop::Threw)?;
        match promise.state() {
            PromiseState::Pending => {}
            PromiseState::Resolved => {
                return promise.finish().map_err(|error| Stop::Threw(exception(ctx, &error)));
            }
            PromiseState::Rejected => {
                let reason = promise.finish::<Value>().err().map(|error| exception(ctx, &error));
                return Err(Stop::Threw(
                    reason.unwrap_or_else(|| Value::new_undefined(ctx.clone())),
                ));
            }
        }
        let call = match host::wait_any() {
            Ok(Some(call)) => call,
            Ok(None) => return Err(Stop::Stuck),
            Err(host::TooLarge) => return Err(Stop::TooLarge),
        };
        let (number, succeeded) = (call.number, call.succeeded);
        let reply = if succeeded {
            parsed(ctx, call.json)
        } else {
            string_from(ctx, &call.json).map(|error| error.into_value())
        };
        let settled = reply.and_then(|reply| {
            guest.prelude.settle.get(ctx)?.call::<_, ()>((number, succeeded, reply))
        });
        if let Err(error) = settled {
            return Err(Stop::Threw(exception(ctx, &error)));
        }
    }
}

/// Runs the jobs that promises have queued. The script cannot catch an interruption, which ends the
/// run.
fn run_jobs<'js>(ctx: &Ctx<'js>) -> Result<(), Value<'js>> {
    loop {
        let mut context = std::ptr::null_mut();
        // SAFETY: the runtime is alive, and there is one context, which is this one.
        let done = unsafe {
            qjs::JS_ExecutePendingJob(qjs::JS_GetRuntime(ctx.as_raw().as_ptr()), &raw mut context)
        };
        if done == 0 {
            return Ok(());
        }
        if done < 0 {
            let thrown = ctx.catch();
            if crate::interrupted() {
                return Err(thrown);
            }
        }
    }
}

fn report<'js>(
    guest: &Guest,
    ctx: &Ctx<'js>,
    value: Result<Value<'js>, Stop<'js>>,
    interrupted: bool,
    memory_limit: usize,
) {
    let described = match value {
        Ok(value) if value.is_undefined() => Ok(None),
        Ok(value) => describe_value(guest, ctx, value)
            .map(Some)
            .map_err(|error| Stop::Threw(exception(ctx, &error))),
        Err(stop) => Err(stop),
    };
    let mut ended_with = None;
    match described {
        Ok(None) => host::finish(RunEnd::Undefined, b""),
        Ok(Some((end, text))) => finish(ctx, end, text),
        Err(Stop::Threw(thrown)) => {
            uncaught(guest, ctx, &thrown, interrupted, memory_limit);
            ended_with = Some(thrown);
        }
        // The job that would have settled it had no memory.
        Err(Stop::Stuck) if is_memory_short(memory_limit) => host::finish(RunEnd::OutOfMemory, b""),
        Err(Stop::Stuck) => host::finish(RunEnd::Threw, NEVER_SETTLED),
        Err(Stop::TooLarge) => host::finish(RunEnd::OutOfMemory, b""),
    }
    // A note that cannot be written does not lose the outcome.
    let _ = notes(guest, ctx, ended_with);
    ctx.catch();
}

const NEVER_SETTLED: &[u8] = br#"{"name":"NeverSettled","message":"the script awaits a promise that nothing will settle: no tool call and no timer is outstanding. Check that every `new Promise` calls resolve or reject.","stack":""}"#;
const UNDESCRIBED_ERROR: &[u8] = br#"{"name":"InternalError","message":"the script failed with an exception that could not be described","stack":""}"#;

fn describe_value<'js>(
    guest: &Guest,
    ctx: &Ctx<'js>,
    value: Value<'js>,
) -> rquickjs::Result<(RunEnd, rquickjs::String<'js>)> {
    // JSON always represents these faithfully, without the prelude.
    if (value.is_int() || value.is_bool() || value.is_null() || value.is_string())
        && let Some(text) = ctx.json_stringify(&value)?
    {
        return Ok((RunEnd::Json, text));
    }
    let (is_json, text): (bool, rquickjs::String) = {
        let pair: rquickjs::Array = guest.prelude.result.get(ctx)?.call((value,))?;
        (pair.get(0)?, pair.get(1)?)
    };
    Ok((if is_json { RunEnd::Json } else { RunEnd::Text }, text))
}

fn uncaught<'js>(
    guest: &Guest,
    ctx: &Ctx<'js>,
    thrown: &Value<'js>,
    interrupted: bool,
    memory_limit: usize,
) {
    let end = if interrupted {
        RunEnd::Interrupted
    } else if is_out_of_memory(thrown, memory_limit) {
        RunEnd::OutOfMemory
    } else {
        RunEnd::Threw
    };
    let describe = guest.prelude.describe.get(ctx);
    match describe.and_then(|describe| describe.call::<_, rquickjs::String>((thrown.clone(),))) {
        Ok(text) => finish(ctx, end, text),
        Err(_) => {
            ctx.catch();
            host::finish(end, UNDESCRIBED_ERROR);
        }
    }
}

/// The engine's messages about exhausted memory; the second one if there was none for compiled
/// code.
const OUT_OF_MEMORY: [&str; 2] = ["out of memory", "bytecode buffer overflow"];
/// The engine's message if there was no memory for a message.
const NO_MESSAGE: &str = "Invalid error message";

/// QuickJS throws null if there is not even memory for the error.
fn is_out_of_memory(thrown: &Value<'_>, memory_limit: usize) -> bool {
    if thrown.is_null() {
        return is_memory_short(memory_limit);
    }
    let text = |error: &Object<'_>, name: &str| error.get::<_, String>(name).unwrap_or_default();
    thrown.as_object().filter(|error| text(error, "name") == "InternalError").is_some_and(|error| {
        let message = text(error, "message");
        OUT_OF_MEMORY.iter().any(|start| message.starts_with(start))
            || (message == NO_MESSAGE && is_memory_short(memory_limit))
    })
}

/// Whether the memory has ever reached its limit: it does not shrink again.
fn is_memory_short(memory_limit: usize) -> bool {
    core::arch::wasm32::memory_size(0) * 65536 + RESERVE_BYTES * 2 >= memory_limit
}

fn finish<'js>(ctx: &Ctx<'js>, end: RunEnd, text: rquickjs::String<'js>) {
    match utf8(ctx, text) {
        Ok(text) => host::finish(end, text.as_str().as_bytes()),
        // Only memory can be short here.
        Err(_) => host::finish(RunEnd::OutOfMemory, b""),
    }
}

/// Adds notes to the outcome: unhandled errors, and calls that never started.
fn notes<'js>(guest: &Guest, ctx: &Ctx<'js>, thrown: Option<Value<'js>>) -> rquickjs::Result<()> {
    if !has_noted() {
        return Ok(());
    }
    let ended = thrown.is_some();
    let texts: rquickjs::Array = guest.prelude.unhandled.get(ctx)?.call((ended, thrown))?;
    for text in texts.iter::<rquickjs::String>() {
        host::note(
            format!("An error was thrown that nothing handled: {}", utf8(ctx, text?)?.as_str())
                .as_bytes(),
        );
    }
    let waiting: u32 = guest.prelude.waiting.get(ctx)?.call(())?;
    if waiting > 0 {
        host::note(
            format!("{waiting} calls were never started, because the script ended first")
                .as_bytes(),
        );
    }
    Ok(())
}
