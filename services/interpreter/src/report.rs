//! What the model is told about a script: what it printed, its value, and why it stopped if it did.

use std::fmt::Write as _;

use construct_proto::v1;

use crate::{
    host::CallRecord,
    sandbox::{Limit, Outcome, Status, Value},
};

/// What the model is told about a script that ran, was stopped, or could not go on. `stopped` says why it was stopped.
pub(crate) fn result(id: &str, outcome: &Outcome, calls: &[CallRecord], stopped: &str) -> v1::CodeInterpreterResult {
    let error = match &outcome.status {
        Status::Completed { .. } => String::new(),
        Status::Threw { name, message, stack, details, .. } => {
            let mut text = format!("{name}: {message}");
            append_line(&mut text, stack);
            if let Some(details) = details {
                append_line(&mut text, &format!("details: {details}"));
            }
            text
        }
        Status::LimitExceeded { limit, message, stack } => {
            let mut text = format!("{}: {message}", limit_name(*limit));
            append_line(&mut text, stack);
            text
        }
        Status::Cancelled => format!("Stopped: {stopped}.\n{}", account(calls)),
        Status::Internal(error) => {
            tracing::error!(error, "the sandbox failed");
            format!(
                "SandboxFailed: the sandbox failed while the script ran; this is not the script's fault.\n{}",
                account(calls)
            )
        }
    };
    v1::CodeInterpreterResult { id: id.to_owned(), output: output(outcome), error, tool_uses: tool_uses(calls) }
}

/// Of a script that was never begun.
pub(crate) fn not_run(id: &str, why: &str) -> v1::CodeInterpreterResult {
    v1::CodeInterpreterResult {
        id: id.to_owned(),
        error: format!("NotRun: {why}. The script did nothing."),
        ..v1::CodeInterpreterResult::default()
    }
}

/// What was printed, then the value, then what a reader should know besides.
fn output(outcome: &Outcome) -> String {
    let mut text = outcome.output.clone();
    if outcome.output_dropped > 0 {
        append_line(
            &mut text,
            &format!("[{} more bytes were printed and are not shown; print less]", outcome.output_dropped),
        );
    }
    if let Status::Completed { value } = &outcome.status
        && !matches!(value, Value::Undefined)
    {
        append_line(&mut text, &value.display());
    }
    for note in &outcome.notes {
        append_line(&mut text, &format!("[{note}]"));
    }
    text
}

/// Which calls were done and which may have been: what a model needs to go on after a stop.
fn account(calls: &[CallRecord]) -> String {
    let (mut done, mut unknown) = (String::new(), String::new());
    for call in calls {
        let list = if call.end.is_some() { &mut done } else { &mut unknown };
        let mark = if call.end.is_some_and(|end| !end.succeeded) { " (failed)" } else { "" };
        let _ = write!(list, "{}#{} {}{mark}", if list.is_empty() { "" } else { ", " }, call.number, call.name);
    }
    let none = |list: String| if list.is_empty() { "none".to_owned() } else { list };
    format!(
        "Calls that had ended: {}. Calls that were under way and may or may not have had their effect: {}.",
        none(done),
        none(unknown)
    )
}

fn tool_uses(calls: &[CallRecord]) -> Vec<v1::ToolUse> {
    calls
        .iter()
        .map(|call| v1::ToolUse {
            number: call.number,
            name: call.name.clone(),
            succeeded: call.end.is_some_and(|end| end.succeeded),
            duration_micros: call.end.map_or(0, |end| end.duration_micros),
        })
        .collect()
}

const fn limit_name(limit: Limit) -> &'static str {
    match limit {
        Limit::Cpu => "CpuLimitExceeded",
        Limit::Wall => "TimeLimitExceeded",
        Limit::Memory => "MemoryLimitExceeded",
        Limit::Stack => "StackLimitExceeded",
        Limit::HostCalls => "CallLimitExceeded",
        Limit::Result => "ResultLimitExceeded",
    }
}

fn append_line(text: &mut String, line: &str) {
    if line.is_empty() {
        return;
    }
    if !text.is_empty() && !text.ends_with('\n') {
        text.push('\n');
    }
    text.push_str(line);
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::host::CallEnd;

    fn outcome(status: Status, output: &str) -> Outcome {
        Outcome {
            status,
            output: output.to_owned(),
            output_dropped: 0,
            notes: Vec::new(),
            host_calls: 0,
            cpu: Duration::ZERO,
        }
    }

    #[test]
    fn an_error_its_stack_and_what_was_printed_before_all_reach_the_model() {
        let threw = Status::Threw {
            name: "TypeError".into(),
            message: "x is not a function".into(),
            stack: "    at script.js:2:1".into(),
            code: None,
            details: None,
        };
        let result = result("call_1", &outcome(threw, "before\n"), &[], "");
        assert_eq!(result.output, "before\n");
        assert_eq!(result.error, "TypeError: x is not a function\n    at script.js:2:1");
    }

    #[test]
    fn the_value_follows_what_was_printed() {
        let completed = Status::Completed { value: Value::Json("\"done\"".into()) };
        assert_eq!(result("call_1", &outcome(completed, "one"), &[], "").output, "one\ndone");
    }

    #[test]
    fn a_stopped_script_accounts_for_each_call() {
        let end = Some(CallEnd { succeeded: true, duration_micros: 5 });
        let calls = [
            CallRecord { number: 1, name: "read_file".into(), end },
            CallRecord { number: 2, name: "execute_command".into(), end: None },
        ];
        let error = result("call_1", &outcome(Status::Cancelled, ""), &calls, "the user suspended the task").error;
        assert!(error.contains("ended: #1 read_file"), "{error}");
        assert!(error.contains("may or may not have had their effect: #2 execute_command"), "{error}");
    }
}
