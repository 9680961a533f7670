//! How a run ended.

use std::borrow::Cow;
use std::time::Duration;

/// How a run ended, and what it did until then.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    /// How it ended.
    pub status: Status,
    /// The printed text, whatever the status, up to
    /// [`Limits::output_bytes`](super::Limits::output_bytes).
    pub output: String,
    /// How many bytes were printed beyond those in `output`.
    pub output_dropped: u64,
    /// Further facts for a reader, in sentences: unhandled errors, dropped calls.
    pub notes: Vec<String>,
    /// How many tool calls and timers the script started.
    pub host_calls: u32,
    /// CPU time of the script itself.
    pub cpu: Duration,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub enum Status {
    /// The script ran to its end.
    Completed {
        /// The value of its last expression, or what it returned.
        value: Value,
    },
    /// The script threw something and did not catch it; or it does not parse, or awaits a promise
    /// that never settles.
    Threw {
        /// The error's name, `NotAnError` when something else was thrown.
        name: String,
        /// The error's message, or what was thrown.
        message: String,
        /// Where: lines such as `    at parse (script.js:3:14)`, then causes. May be empty.
        stack: String,
        /// The error's `code`, if it has one.
        code: Option<String>,
        /// The error's `details`, if it has some.
        details: Option<serde_json::Value>,
    },
    /// The run exceeded a limit.
    LimitExceeded {
        /// Which limit.
        limit: Limit,
        /// The limit, its value, and what to do about it, for the model.
        message: String,
        /// Where the script was, as far as known. Of the interrupted function only the name.
        stack: String,
    },
    /// The run was canceled.
    Cancelled,
    /// The sandbox failed; not the script's fault. The text is for the operator.
    Internal(String),
}

/// A limit that can end a run. See [`Limits`](super::Limits).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Limit {
    /// CPU time.
    Cpu,
    /// Time from start to end.
    Wall,
    /// Memory.
    Memory,
    /// The native stack, which JavaScript's own limit normally keeps from being reached.
    Stack,
    /// Number of host calls.
    HostCalls,
    /// Size of the script's value.
    Result,
}

/// The value of a script.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// None: the last expression was undefined, or nothing was returned.
    Undefined,
    /// A value that JSON represents faithfully, as JSON.
    Json(String),
    /// Anything else (a Map, a function, a BigInt, a cycle …) as a console would show it.
    Text(String),
}

impl Value {
    /// The value for a reader: strings without quotes and escapes, everything else unchanged.
    pub fn display(&self) -> Cow<'_, str> {
        match self {
            Value::Undefined => "undefined".into(),
            Value::Text(text) => text.as_str().into(),
            Value::Json(json) if json.starts_with('"') => {
                serde_json::from_str::<String>(json).map_or(json.as_str().into(), Cow::Owned)
            }
            Value::Json(json) => json.as_str().into(),
        }
    }
}
