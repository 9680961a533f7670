//! Tool calls of scripts, one line each: `✓ grep("TODO", "src") 12 ms · 3 matches`.

use std::{collections::HashMap, io};

use construct_proto::v1::{ToolCalled, ToolResult, ToolUse};
use serde_json::Value;

use crate::{
    console::{Sink, Style},
    time,
    words::{clip, columns, count, one_line},
};

/// Columns one argument may take.
const ARGUMENT: usize = 48;

/// Columns that are kept for what came back.
const SAID: usize = 16;

/// What is known of the calls of the running script.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// Arguments of calls that have no result yet, by step and number.
    open: HashMap<(String, u32), String>,
    step: u64,
    shown: usize,
}

impl Tools {
    pub(super) fn called(&mut self, called: &ToolCalled) {
        self.open.insert((called.step_id.clone(), called.number), called.arguments.clone());
    }

    pub(super) fn result(
        &mut self,
        step: u64,
        result: &ToolResult,
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        self.begin(step);
        self.shown += 1;
        let arguments =
            self.open.remove(&(result.step_id.clone(), result.number)).unwrap_or_default();
        let said = summary(&result.name, result.succeeded, &result.result);
        line(&result.name, &arguments, result.succeeded, result.duration_micros, &said, sink)
    }

    /// Shows the calls of a script that nothing was heard of while it ran.
    pub(super) fn missed(
        &mut self,
        step: u64,
        uses: &[ToolUse],
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        self.begin(step);
        let heard = self.shown.min(uses.len());
        self.shown -= heard;
        for used in &uses[heard..] {
            let said = summary(&used.name, used.succeeded, &used.result);
            line(&used.name, &used.arguments, used.succeeded, used.duration_micros, &said, sink)?;
        }
        Ok(())
    }

    /// The script's results are all told.
    pub(super) fn end_step(&mut self) {
        self.open.clear();
        self.shown = 0;
    }

    fn begin(&mut self, step: u64) {
        if step != self.step {
            self.step = step;
            self.shown = 0;
        }
    }
}

fn line(
    name: &str,
    arguments: &str,
    succeeded: bool,
    micros: i64,
    said: &str,
    sink: &mut dyn Sink,
) -> io::Result<()> {
    let (style, sign) = if succeeded { (Style::Good, "  ✓ ") } else { (Style::Bad, "  ✗ ") };
    let took = format!(" {}", time::measured(micros));
    let name = one_line(name);
    // Some room is kept for what came back, however long the arguments are.
    let room = sink.width().saturating_sub(4 + columns(&name) + 2 + columns(&took) + 3 + SAID);
    let call = format!("{name}({})", clip(&shown_arguments(arguments), room.max(SAID)));
    let left = sink.width().saturating_sub(4 + columns(&call) + columns(&took) + 3);
    let said = if said.is_empty() || left < 8 {
        String::new()
    } else {
        format!(" · {}", clip(said, left))
    };
    let said_style = if succeeded { Style::Dim } else { Style::Bad };
    sink.line(&[(style, sign), (Style::Plain, &call), (Style::Dim, &took), (said_style, &said)])
}

/// The arguments as they stand in the script, each clipped.
fn shown_arguments(json: &str) -> String {
    match serde_json::from_str(json) {
        Ok(Value::Array(items)) => items.iter().map(short).collect::<Vec<_>>().join(", "),
        Ok(Value::Object(fields)) => fields
            .iter()
            .map(|(name, value)| format!("{name}: {}", short(value)))
            .collect::<Vec<_>>()
            .join(", "),
        Ok(Value::Null) => String::new(),
        Ok(value) => short(&value),
        // Long arguments are clipped on the way and are no JSON any more.
        Err(_) => clip(&one_line(json), 2 * ARGUMENT),
    }
}

fn short(value: &Value) -> String {
    clip(&one_line(&value.to_string()), ARGUMENT)
}

/// What came back, in a few words.
fn summary(name: &str, succeeded: bool, json: &str) -> String {
    let value = match serde_json::from_str(json) {
        Ok(value) => value,
        Err(_) if succeeded => return String::new(),
        Err(_) => return one_line(json),
    };
    if !succeeded {
        return error_message(&value).unwrap_or_else(|| one_line(json));
    }
    match value {
        Value::Array(items) => count(items.len() as i128, "item"),
        Value::String(text) => count(text.lines().count() as i128, "line"),
        Value::Object(fields) => fields
            .iter()
            .find_map(|(field, value)| match value {
                Value::Number(code) if field.starts_with("exit") => Some(format!("exit {code}")),
                Value::Number(status) if name == "fetch" && field == "status" => {
                    Some(format!("status {status}"))
                }
                Value::Array(items) => Some(format!("{} {}", items.len(), one_line(field))),
                _ => None,
            })
            .unwrap_or_default(),
        Value::Null | Value::Bool(_) | Value::Number(_) => String::new(),
    }
}

fn error_message(value: &Value) -> Option<String> {
    let message = value.as_str().or_else(|| value.get("message")?.as_str())?;
    Some(one_line(message))
}
