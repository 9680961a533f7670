//! Renders tool calls of scripts, one line each: `✓ grep("TODO", "src") 12 ms · 3 matches`.

use std::{collections::HashMap, io};

use construct_proto::v1::{ToolCalled, ToolResult, ToolUse};
use serde_json::Value;

use crate::{
    console::{Sink, Style},
    text::{clip, columns, count, one_line},
    time,
};

/// The maximum columns of an argument.
const ARGUMENT_COLUMNS: usize = 48;

/// The columns reserved for the result.
const RESULT_COLUMNS: usize = 16;

/// The calls of the running script.
#[derive(Debug, Default)]
pub(super) struct Tools {
    /// The arguments of calls without a result, by step and number.
    open: HashMap<(String, u32), String>,
    step: u64,
    /// The number of results shown in this step.
    shown: usize,
}

impl Tools {
    pub(super) fn record_call(&mut self, called: &ToolCalled) {
        self.open.insert((called.step_id.clone(), called.number), called.arguments.clone());
    }

    pub(super) fn result(
        &mut self,
        step: u64,
        result: &ToolResult,
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        self.start_step(step);
        self.shown += 1;
        let arguments =
            self.open.remove(&(result.step_id.clone(), result.number)).unwrap_or_default();
        let summary = summarize(&result.name, result.succeeded, &result.result);
        line(&result.name, &arguments, result.succeeded, result.duration_micros, &summary, sink)
    }

    /// Shows the calls whose progress events were missed.
    pub(super) fn show_remaining(
        &mut self,
        step: u64,
        uses: &[ToolUse],
        sink: &mut dyn Sink,
    ) -> io::Result<()> {
        self.start_step(step);
        let shown = self.shown.min(uses.len());
        self.shown -= shown;
        for tool_use in &uses[shown..] {
            let ToolUse { name, arguments, succeeded, duration_micros, result, .. } = tool_use;
            let summary = summarize(name, *succeeded, result);
            line(name, arguments, *succeeded, *duration_micros, &summary, sink)?;
        }
        Ok(())
    }

    /// Ends the step: all results were shown.
    pub(super) fn end_step(&mut self) {
        self.open.clear();
        self.shown = 0;
    }

    fn start_step(&mut self, step: u64) {
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
    summary: &str,
    sink: &mut dyn Sink,
) -> io::Result<()> {
    let (style, sign) = if succeeded { (Style::Good, "  ✓ ") } else { (Style::Bad, "  ✗ ") };
    let took = format!(" {}", time::measured(micros));
    let name = one_line(name);
    // Long arguments leave space for the result.
    let fixed = 4 + columns(&name) + 2 + columns(&took) + 3 + RESULT_COLUMNS;
    let available = sink.width().saturating_sub(fixed).max(RESULT_COLUMNS);
    let call = format!("{name}({})", clip(&format_arguments(arguments), available));
    let remaining = sink.width().saturating_sub(4 + columns(&call) + columns(&took) + 3);
    let summary = if summary.is_empty() || remaining < 8 {
        String::new()
    } else {
        format!(" · {}", clip(summary, remaining))
    };
    let summary_style = if succeeded { Style::Dim } else { Style::Bad };
    sink.line(&[
        (style, sign),
        (Style::Plain, &call),
        (Style::Dim, &took),
        (summary_style, &summary),
    ])
}

/// The arguments as in the script, each clipped.
fn format_arguments(json: &str) -> String {
    match serde_json::from_str(json) {
        Ok(Value::Array(items)) => items.iter().map(short).collect::<Vec<_>>().join(", "),
        Ok(Value::Object(fields)) => fields
            .iter()
            .map(|(name, value)| format!("{name}: {}", short(value)))
            .collect::<Vec<_>>()
            .join(", "),
        Ok(Value::Null) => String::new(),
        Ok(value) => short(&value),
        // Long arguments were truncated and are not valid JSON.
        Err(_) => clip(&one_line(json), 2 * ARGUMENT_COLUMNS),
    }
}

fn short(value: &Value) -> String {
    clip(&one_line(&value.to_string()), ARGUMENT_COLUMNS)
}

/// A short summary of a result.
fn summarize(name: &str, succeeded: bool, json: &str) -> String {
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
