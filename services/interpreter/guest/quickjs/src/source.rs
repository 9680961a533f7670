//! How a script is read.
//!
//! As a global script in which `await` may stand anywhere; its value is that of its last expression. Where it doesn't parse because of a
//! `return` outside of functions, as the body of an async function; its value is then what it returns. Where it doesn't parse
//! at all, it is taken for TypeScript, stripped of its types by the host, and read again in the same ways.

use rquickjs::{Ctx, Exception, Object, Value, qjs};

use crate::host;

/// The name of the script in stacks.
pub(crate) const SCRIPT: &str = "script.js";

/// Evaluates the script, which a zero byte follows. An error is what it threw, or why it doesn't parse.
pub(crate) fn evaluate<'js>(ctx: &Ctx<'js>, script: &[u8]) -> Result<Value<'js>, Value<'js>> {
    let source = script.strip_suffix(b"\0").unwrap_or(script);
    if may_mislead(source)
        && let Ok(javascript) = strip(ctx, source, SCRIPT)
    {
        return as_javascript(ctx, &javascript);
    }
    let thrown = match as_javascript(ctx, script) {
        Err(thrown) if may_be_typescript(&thrown) => thrown,
        done => return done,
    };
    let javascript = strip(ctx, source, SCRIPT)?;
    if javascript == script { Err(thrown) } else { as_javascript(ctx, &javascript) }
}

/// Evaluates JavaScript, which a zero byte follows.
fn as_javascript<'js>(ctx: &Ctx<'js>, script: &[u8]) -> Result<Value<'js>, Value<'js>> {
    const HEAD: &[u8] = b"(async () => {\n\n";
    const TAIL: &[u8] = b"\n})()\0";
    let thrown = match evaluate_at(ctx, script, 1) {
        Err(thrown) if is_return_outside(&thrown) => thrown,
        done => return done,
    };
    let body = script.strip_suffix(b"\0").unwrap_or(script);
    let Some(wrapped) = concat([HEAD, body, TAIL]) else { return Err(thrown) };
    // The body begins two lines below the head: counting from minus one, its first line is the first. (Zero would mean
    // "not given".)
    evaluate_at(ctx, &wrapped, -1)
}

/// Throws only if the source doesn't parse: what a script throws while it runs rejects the promise that is its value.
fn evaluate_at<'js>(ctx: &Ctx<'js>, source: &[u8], first_line: i32) -> Result<Value<'js>, Value<'js>> {
    debug_assert_eq!(source.last(), Some(&0));
    let mut options = qjs::JSEvalOptions {
        version: qjs::JS_EVAL_OPTIONS_VERSION as i32,
        eval_flags: (qjs::JS_EVAL_TYPE_GLOBAL | qjs::JS_EVAL_FLAG_ASYNC) as i32,
        filename: c"script.js".as_ptr(),
        line_num: first_line,
    };
    // SAFETY: the source ends with a zero byte that isn't counted, the options are alive, and the value that is
    // returned is owned by the wrapper made of it.
    unsafe {
        let raw = ctx.as_raw().as_ptr();
        let value = qjs::JS_Eval2(raw, source.as_ptr().cast(), source.len() as qjs::size_t - 1, &raw mut options);
        if qjs::JS_IsException(value) { Err(ctx.catch()) } else { Ok(Value::from_raw(ctx.clone(), value)) }
    }
}

fn is_return_outside(thrown: &Value<'_>) -> bool {
    message(thrown).is_some_and(|message| message == "return not in a function")
}

/// The message of an error that the engine itself has thrown.
fn message(thrown: &Value<'_>) -> Option<String> {
    thrown.as_object().and_then(|error| error.get("message").ok())
}

/// Whether a source that the engine refused may be TypeScript. Not when the reason was memory, depth or an interruption.
pub(crate) fn may_be_typescript(thrown: &Value<'_>) -> bool {
    let name = thrown.as_object().and_then(|error| error.get::<_, String>("name").ok());
    name.is_some_and(|name| name == "SyntaxError")
        && message(thrown).is_some_and(|message| message != "stack overflow")
        && !crate::interrupted()
}

/// Whether the source looks like TypeScript that is JavaScript too, but means something else there: `parse<Config>(text)`
/// compares twice. Looking wrongly costs a millisecond.
pub(crate) fn may_mislead(source: &[u8]) -> bool {
    const LONGEST: usize = 200;
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$';
    let mut from = 0;
    while let Some(found) = memchr::memchr(b'>', &source[from..]) {
        let close = from + found;
        from = close + 1;
        if source.get(from) != Some(&b'(') {
            continue;
        }
        let mut depth = 0;
        for at in (close.saturating_sub(LONGEST)..=close).rev() {
            match source[at] {
                b'>' if at > 0 && source[at - 1] == b'=' => break,
                b'>' => depth += 1,
                b'<' => depth -= 1,
                b';' | b'(' | b')' | b'+' | b'\n' => break,
                _ => {}
            }
            if depth == 0 {
                if at > 0 && word(source[at - 1]) && close > at + 1 {
                    return true;
                }
                break;
            }
        }
    }
    false
}

/// The JavaScript of TypeScript, with a zero byte after it.
pub(crate) fn strip<'js>(ctx: &Ctx<'js>, source: &[u8], file: &str) -> Result<Vec<u8>, Value<'js>> {
    let short = || {
        Exception::throw_internal(ctx, "out of memory");
        ctx.catch()
    };
    match host::strip(source) {
        Ok(Ok(mut javascript)) => {
            javascript.try_reserve_exact(1).map_err(|_| short())?;
            javascript.push(0);
            Ok(javascript)
        }
        Ok(Err(problem)) => Err(syntax_error(ctx, problem, file)),
        Err(host::TooLarge) => Err(short()),
    }
}

/// The error for what the TypeScript parser has found, with the position where the engine gives its own.
fn syntax_error<'js>(ctx: &Ctx<'js>, problem: Vec<u8>, file: &str) -> Value<'js> {
    let error = || -> rquickjs::Result<Value<'js>> {
        let problem: rquickjs::Array = ctx.json_parse(problem)?.get()?;
        let (message, line, column): (String, u32, u32) = (problem.get(0)?, problem.get(1)?, problem.get(2)?);
        Exception::throw_syntax(ctx, &message);
        let thrown = ctx.catch();
        if let Some(error) = thrown.as_object() {
            let stack = format!("    at {file}:{line}:{column}\n");
            Object::set(error, "stack", stack)?;
        }
        Ok(thrown)
    };
    error().unwrap_or_else(|_| ctx.catch())
}

/// The parts in one buffer, if there is memory for it.
fn concat<const N: usize>(parts: [&[u8]; N]) -> Option<Vec<u8>> {
    let mut whole = Vec::new();
    whole.try_reserve_exact(parts.iter().map(|part| part.len()).sum()).ok()?;
    parts.iter().for_each(|part| whole.extend_from_slice(part));
    Some(whole)
}
