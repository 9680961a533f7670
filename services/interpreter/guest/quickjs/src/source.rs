//! How a script is read.
//!
//! A script is first read as a global script in which `await` may stand anywhere; its value is that
//! of its last expression. If it does not parse because of a `return` outside of functions, it is
//! read as the body of an async function; its value is what it returns. If it does not parse
//! because of `import` or `export`, it is read as a module; its value is its default export. If it
//! does not parse at all, it is treated as TypeScript: the host strips the types, and it is read
//! again in the same ways.

use rquickjs::module::Evaluated as EvaluatedModule;
use rquickjs::{Ctx, Error, Exception, Module, Object, Promise, Value, qjs};

use crate::{host, modules};

/// The name of the script in stacks.
pub(crate) const SCRIPT: &str = "script.js";

/// A script that is running.
pub(crate) enum Evaluated<'js> {
    /// The promise of its value.
    Script(Value<'js>),
    /// The module, and the promise of its end.
    Module(Module<'js, EvaluatedModule>, Promise<'js>),
}

/// Why a script is not running.
enum EvaluationError<'js> {
    /// It does not parse.
    Unparsed(Value<'js>),
    /// An import failed.
    Unlinked(Value<'js>),
}

impl<'js> EvaluationError<'js> {
    fn thrown(self) -> Value<'js> {
        match self {
            EvaluationError::Unparsed(thrown) | EvaluationError::Unlinked(thrown) => thrown,
        }
    }
}

/// Evaluates the script, which a zero byte follows. An error means that it is not running.
pub(crate) fn evaluate<'js>(ctx: &Ctx<'js>, script: &[u8]) -> Result<Evaluated<'js>, Value<'js>> {
    let source = without_zero(script);
    if may_mislead(source)
        && let Ok(javascript) = strip(ctx, source, SCRIPT)
    {
        return as_javascript(ctx, &with_zero(ctx, javascript)?).map_err(EvaluationError::thrown);
    }
    let thrown = match as_javascript(ctx, script) {
        Err(EvaluationError::Unparsed(thrown)) if may_be_typescript(&thrown) => thrown,
        done => return done.map_err(EvaluationError::thrown),
    };
    let javascript = strip(ctx, source, SCRIPT)?;
    if javascript == source {
        return Err(thrown);
    }
    as_javascript(ctx, &with_zero(ctx, javascript)?).map_err(EvaluationError::thrown)
}

/// Evaluates JavaScript, which a zero byte follows.
fn as_javascript<'js>(
    ctx: &Ctx<'js>,
    script: &[u8],
) -> Result<Evaluated<'js>, EvaluationError<'js>> {
    let thrown = match evaluate_at(ctx, script, 1) {
        Err(thrown) => thrown,
        Ok(completion) => return Ok(Evaluated::Script(completion)),
    };
    let source = without_zero(script);
    let message = message(&thrown).unwrap_or_default();
    if message == "return not in a function" {
        as_body(ctx, source).map_err(EvaluationError::Unparsed)
    } else if memchr::memmem::find(source, b"import").is_some()
        || memchr::memmem::find(source, b"export").is_some()
    {
        as_module(ctx, source).map_err(|failed| match failed {
            // Of two syntax errors, reports the one for the form that the script seems to have.
            EvaluationError::Unparsed(_)
                if !MODULE_ERRORS.iter().any(|start| message.starts_with(start)) =>
            {
                EvaluationError::Unparsed(thrown)
            }
            failed => failed,
        })
    } else {
        Err(EvaluationError::Unparsed(thrown))
    }
}

/// The engine's messages about `import`, `export` and `import.meta` in a script.
const MODULE_ERRORS: [&str; 4] = [
    "unsupported keyword: export",
    "unsupported keyword: import",
    "expecting '('",
    "import.meta only valid",
];

/// Evaluates JavaScript as the body of an async function.
fn as_body<'js>(ctx: &Ctx<'js>, source: &[u8]) -> Result<Evaluated<'js>, Value<'js>> {
    let wrapped = concat(ctx, [b"(async () => {\n\n", source, b"\n})()\0"])?;
    // The body begins two lines below the head. Counting from minus one, its first line is line 1.
    // (Zero would mean "not given".)
    evaluate_at(ctx, &wrapped, -1).map(Evaluated::Script)
}

/// Evaluates JavaScript as a module.
fn as_module<'js>(ctx: &Ctx<'js>, source: &[u8]) -> Result<Evaluated<'js>, EvaluationError<'js>> {
    let before = modules::request_count();
    let module = modules::declare_javascript(ctx, SCRIPT, source).map_err(|error| {
        let thrown = exception(ctx, &error);
        if modules::request_count() == before {
            EvaluationError::Unparsed(thrown)
        } else {
            EvaluationError::Unlinked(thrown)
        }
    })?;
    let (module, promise) =
        module.eval().map_err(|error| EvaluationError::Unlinked(exception(ctx, &error)))?;
    Ok(Evaluated::Module(module, promise))
}

/// Throws only if the source does not parse. An error while the script runs rejects the promise
/// that is its value.
fn evaluate_at<'js>(
    ctx: &Ctx<'js>,
    source: &[u8],
    first_line: i32,
) -> Result<Value<'js>, Value<'js>> {
    debug_assert_eq!(source.last(), Some(&0));
    let mut options = qjs::JSEvalOptions {
        version: qjs::JS_EVAL_OPTIONS_VERSION as i32,
        eval_flags: (qjs::JS_EVAL_TYPE_GLOBAL | qjs::JS_EVAL_FLAG_ASYNC) as i32,
        filename: c"script.js".as_ptr(),
        line_num: first_line,
    };
    // SAFETY: the source ends with a zero byte that is not counted, the options are alive, and the
    // returned value is owned by the wrapper.
    unsafe {
        let raw = ctx.as_raw().as_ptr();
        let value = qjs::JS_Eval2(
            raw,
            source.as_ptr().cast(),
            source.len() as qjs::size_t - 1,
            &raw mut options,
        );
        if qjs::JS_IsException(value) {
            Err(ctx.catch())
        } else {
            Ok(Value::from_raw(ctx.clone(), value))
        }
    }
}

/// The message of an error that the engine itself threw.
pub(crate) fn message(thrown: &Value<'_>) -> Option<String> {
    thrown.as_object().and_then(|error| error.get("message").ok())
}

/// Whether a source that the engine refused may be TypeScript. Not if the reason was memory, depth
/// or an interruption.
pub(crate) fn may_be_typescript(thrown: &Value<'_>) -> bool {
    let name = thrown.as_object().and_then(|error| error.get::<_, String>("name").ok());
    name.is_some_and(|name| name == "SyntaxError")
        && message(thrown).is_some_and(|message| message != "stack overflow")
        && !crate::interrupted()
}

/// Whether the source looks like TypeScript that is also JavaScript with another meaning:
/// `parse<Config>(text)` compares twice. A wrong guess costs a millisecond.
pub(crate) fn may_mislead(source: &[u8]) -> bool {
    const MAX_TYPE_ARGUMENTS_BYTES: usize = 200;
    let word = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_' || byte == b'$';
    let mut from = 0;
    while let Some(found) = memchr::memchr(b'>', &source[from..]) {
        let close = from + found;
        from = close + 1;
        if source.get(from) != Some(&b'(') {
            continue;
        }
        let mut depth = 0;
        for at in (close.saturating_sub(MAX_TYPE_ARGUMENTS_BYTES)..=close).rev() {
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

/// Turns TypeScript into JavaScript.
pub(crate) fn strip<'js>(ctx: &Ctx<'js>, source: &[u8], file: &str) -> Result<Vec<u8>, Value<'js>> {
    match host::strip(source) {
        Ok(Ok(javascript)) => Ok(javascript),
        Ok(Err(problem)) => Err(syntax_error(ctx, problem, file)),
        Err(host::TooLarge) => Err(out_of_memory(ctx)),
    }
}

/// The error of the TypeScript parser, with the position where the engine has its own.
fn syntax_error<'js>(ctx: &Ctx<'js>, problem: Vec<u8>, file: &str) -> Value<'js> {
    let error = || -> rquickjs::Result<Value<'js>> {
        let problem: rquickjs::Array = ctx.json_parse(problem)?.get()?;
        let (message, line, column): (String, u32, u32) =
            (problem.get(0)?, problem.get(1)?, problem.get(2)?);
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

/// The JavaScript exception for an error.
pub(crate) fn exception<'js>(ctx: &Ctx<'js>, error: &Error) -> Value<'js> {
    if matches!(error, Error::Exception) || ctx.has_exception() {
        return ctx.catch();
    }
    match Exception::from_message(ctx.clone(), &error.to_string()) {
        Ok(exception) => exception.into_value(),
        Err(_) => Value::new_null(ctx.clone()),
    }
}

fn out_of_memory<'js>(ctx: &Ctx<'js>) -> Value<'js> {
    Exception::throw_internal(ctx, "out of memory");
    ctx.catch()
}

fn without_zero(script: &[u8]) -> &[u8] {
    script.strip_suffix(b"\0").unwrap_or(script)
}

fn with_zero<'js>(ctx: &Ctx<'js>, mut source: Vec<u8>) -> Result<Vec<u8>, Value<'js>> {
    source.try_reserve_exact(1).map_err(|_| out_of_memory(ctx))?;
    source.push(0);
    Ok(source)
}

/// Concatenates the parts.
fn concat<'js, const N: usize>(ctx: &Ctx<'js>, parts: [&[u8]; N]) -> Result<Vec<u8>, Value<'js>> {
    let mut buffer = Vec::new();
    let len = parts.iter().map(|part| part.len()).sum();
    buffer.try_reserve_exact(len).map_err(|_| out_of_memory(ctx))?;
    parts.iter().for_each(|part| buffer.extend_from_slice(part));
    Ok(buffer)
}
