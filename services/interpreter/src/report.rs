//! The report of a script that the model reads: its output, its value, and why it stopped.

use std::fmt::Write as _;

use construct_proto::v1;

use crate::{
    host::{CallRecord, WaitsFor},
    sandbox::{Limit, Outcome, Status, Value},
    tools,
};

/// The report of a script that ran, was stopped, or could not continue. `stopped` is the reason for
/// a stop.
pub(crate) fn result(
    id: &str,
    outcome: &Outcome,
    calls: &[CallRecord],
    stopped: &str,
) -> v1::CodeInterpreterResult {
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
        Status::Cancelled => format!("Stopped: {stopped}.\n{}", call_summary(calls)),
        Status::Internal(error) => {
            tracing::error!(error, "the sandbox failed");
            format!(
                "SandboxFailed: the sandbox failed while the script ran; this is not the script's fault.\n{}",
                call_summary(calls)
            )
        }
    };
    let mut output = output(outcome);
    if !matches!(outcome.status, Status::Cancelled | Status::Internal(_)) {
        append_line(&mut output, &open_effects(calls));
        append_line(&mut output, &unrequested_approvals(calls));
    }
    v1::CodeInterpreterResult {
        id: id.to_owned(),
        output: clip(output),
        error: clip(error),
        tool_uses: tool_uses(calls),
    }
}

/// The report of a script that was interrupted and whose replay did something else than before.
pub(crate) fn diverged(
    id: &str,
    outcome: &Outcome,
    calls: &[CallRecord],
    why: &str,
) -> v1::CodeInterpreterResult {
    let error = format!(
        "ReplayDiverged: the script was interrupted and cannot be continued, because {why}; a script must behave the same on \
         each run. Nothing further was done.\n{}",
        call_summary(calls)
    );
    v1::CodeInterpreterResult {
        id: id.to_owned(),
        output: clip(outcome.output.clone()),
        error: clip(error),
        tool_uses: tool_uses(calls),
    }
}

/// The report of an interrupted script whose journal cannot be read completely.
pub(crate) fn unreadable(id: &str, why: &str, calls: &[CallRecord]) -> v1::CodeInterpreterResult {
    let error = format!(
        "JournalUnreadable: the script was interrupted and is not continued, because the record of its calls is \
         incomplete: {why}. Check the current state before you repeat anything.\nKnown calls: {}",
        call_summary(calls)
    );
    v1::CodeInterpreterResult {
        id: id.to_owned(),
        error: clip(error),
        tool_uses: tool_uses(calls),
        ..v1::CodeInterpreterResult::default()
    }
}

/// The report of a script that is not continued: the calls that an earlier process journaled.
pub(crate) fn not_continued(
    id: &str,
    why: &str,
    calls: &[CallRecord],
) -> v1::CodeInterpreterResult {
    if calls.is_empty() {
        return not_run(id, why);
    }
    v1::CodeInterpreterResult {
        id: id.to_owned(),
        error: clip(format!("Stopped: {why}.\n{}", call_summary(calls))),
        tool_uses: tool_uses(calls),
        ..v1::CodeInterpreterResult::default()
    }
}

/// The report of a script that never started.
pub(crate) fn not_run(id: &str, why: &str) -> v1::CodeInterpreterResult {
    v1::CodeInterpreterResult {
        id: id.to_owned(),
        error: format!("NotRun: {why}. The script did nothing."),
        ..v1::CodeInterpreterResult::default()
    }
}

/// The printed text, then the value, then notes.
fn output(outcome: &Outcome) -> String {
    let mut text = outcome.output.clone();
    if outcome.output_dropped > 0 {
        append_line(
            &mut text,
            &format!(
                "[{} more bytes were printed and are not shown; print less]",
                outcome.output_dropped
            ),
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

/// A sentence about calls with side effects that were under way when the script ended; empty if
/// there were none.
fn open_effects(calls: &[CallRecord]) -> String {
    let has_effect = |call: &&CallRecord| {
        call.end.is_none()
            && call.waits.is_none()
            && tools::definition(&call.name).is_some_and(|tool| tool.effect != tools::Effect::Read)
    };
    let open: Vec<String> = calls
        .iter()
        .filter(has_effect)
        .map(|call| format!("#{} {}", call.number, call.name))
        .collect();
    if open.is_empty() {
        return String::new();
    }
    format!(
        "[under way when the script ended, so they may or may not have had their effect: {}]",
        open.join(", ")
    )
}

/// A sentence about calls that need an approval and that the script did not wait for; empty if
/// there were none.
fn unrequested_approvals(calls: &[CallRecord]) -> String {
    let waiting = waiting_calls(calls, WaitsFor::Approval);
    if waiting.is_empty() {
        return waiting;
    }
    format!(
        "[not made, because they need a person's approval and the script ended without waiting for it: {waiting}]"
    )
}

/// Lists the calls that wait for `wait`.
fn waiting_calls(calls: &[CallRecord], wait: WaitsFor) -> String {
    let waiting = calls
        .iter()
        .filter(|call| call.waits == Some(wait))
        .map(|call| format!("#{} {}", call.number, call.name));
    waiting.collect::<Vec<_>>().join(", ")
}

/// Maximum size of the output and of the error of one script, in bytes: both are part of every
/// later request. Beginning and end are kept.
const MAX_TEXT_BYTES: usize = 64 * 1024;

fn clip(text: String) -> String {
    if text.len() <= MAX_TEXT_BYTES {
        return text;
    }
    let (head, tail) = (
        text.floor_char_boundary(MAX_TEXT_BYTES * 3 / 4),
        text.ceil_char_boundary(text.len() - MAX_TEXT_BYTES / 4),
    );
    format!(
        "{}\n[… {} bytes are left out here; print less, or write it to a file and read parts of it …]\n{}",
        &text[..head],
        tail - head,
        &text[tail..]
    )
}

/// Lists the calls that ended and those that may have had an effect, so that the model can continue
/// after a stop.
fn call_summary(calls: &[CallRecord]) -> String {
    let (mut done, mut unknown) = (String::new(), String::new());
    for call in calls.iter().filter(|call| call.waits.is_none()) {
        let list =
            if call.end.is_some_and(|end| !end.is_unknown) { &mut done } else { &mut unknown };
        let mark = if call.end.is_some_and(|end| !end.succeeded && !end.is_unknown) {
            " (failed)"
        } else {
            ""
        };
        let _ = write!(
            list,
            "{}#{} {}{mark}",
            if list.is_empty() { "" } else { ", " },
            call.number,
            call.name
        );
    }
    let none = |list: String| if list.is_empty() { "none".to_owned() } else { list };
    let mut text = format!(
        "Calls that had ended: {}. Calls that were under way and may or may not have had their effect: {}.",
        none(done),
        none(unknown)
    );
    let unapproved = waiting_calls(calls, WaitsFor::Approval);
    if !unapproved.is_empty() {
        let _ = write!(
            text,
            " Calls that were not made, because they were not approved: {unapproved}."
        );
    }
    let awaiting = waiting_calls(calls, WaitsFor::Subtasks);
    if !awaiting.is_empty() {
        let _ = write!(text, " Calls that still waited for subtasks: {awaiting}.");
    }
    text
}

/// Maximum size of the arguments and results of one script's calls, in bytes. They are part of the
/// message that reports the script, and are shown to people, not to models. A text that no longer
/// fits is left out; a shorter one after it may still fit.
const MAX_TOOL_USE_BYTES: usize = 32 * 1024;

/// One entry per call; the limit of host calls bounds them.
fn tool_uses(calls: &[CallRecord]) -> Vec<v1::ToolUse> {
    let mut room = MAX_TOOL_USE_BYTES;
    let mut keep = |text: &str| {
        if text.len() > room {
            return String::new();
        }
        room -= text.len();
        text.to_owned()
    };
    calls
        .iter()
        .filter(|call| call.waits.is_none())
        .map(|call| v1::ToolUse {
            number: call.number,
            name: call.name.clone(),
            succeeded: call.end.is_some_and(|end| end.succeeded),
            duration_micros: call.end.map_or(0, |end| end.duration_micros),
            arguments: keep(&call.arguments),
            result: keep(&call.result),
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
    fn threw_report_has_error_stack_and_output() {
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
    fn value_follows_output() {
        let completed = Status::Completed { value: Value::Json("\"done\"".into()) };
        assert_eq!(result("call_1", &outcome(completed, "one"), &[], "").output, "one\ndone");
    }

    #[test]
    fn huge_output_keeps_both_ends() {
        let printed = format!("first {} last", "é".repeat(MAX_TEXT_BYTES));
        let text = result(
            "call_1",
            &outcome(Status::Completed { value: Value::Undefined }, &printed),
            &[],
            "",
        )
        .output;
        assert!(text.len() < MAX_TEXT_BYTES + 200);
        assert!(
            text.starts_with("first")
                && text.ends_with("last")
                && text.contains("bytes are left out")
        );
    }

    #[test]
    fn calls_not_awaited_are_reported_as_uncertain() {
        let calls = [
            CallRecord::in_progress(1, "create_file"),
            CallRecord::in_progress(2, "read_file"),
            CallRecord {
                waits: Some(WaitsFor::Approval),
                ..CallRecord::in_progress(3, "edit_file")
            },
        ];
        let text = result(
            "call_1",
            &outcome(Status::Completed { value: Value::Undefined }, ""),
            &calls,
            "",
        )
        .output;
        assert!(text.contains("#1 create_file]") && !text.contains("read_file"), "{text}");
        assert!(text.contains("without waiting for it: #3 edit_file]"), "{text}");
    }

    #[test]
    fn stopped_script_accounts_for_each_call() {
        let end =
            |succeeded, is_unknown| Some(CallEnd { succeeded, is_unknown, duration_micros: 5 });
        let calls = [
            CallRecord { end: end(true, false), ..CallRecord::in_progress(1, "read_file") },
            CallRecord::in_progress(2, "execute_command"),
            CallRecord {
                waits: Some(WaitsFor::Approval),
                ..CallRecord::in_progress(3, "create_file")
            },
            CallRecord { end: end(false, false), ..CallRecord::in_progress(4, "edit_file") },
            CallRecord { end: end(false, true), ..CallRecord::in_progress(5, "fetch") },
        ];
        let result = result(
            "call_1",
            &outcome(Status::Cancelled, ""),
            &calls,
            "the user suspended the task",
        );
        let error = result.error;
        assert!(error.contains("ended: #1 read_file, #4 edit_file (failed)."), "{error}");
        assert!(
            error.contains("may or may not have had their effect: #2 execute_command, #5 fetch."),
            "{error}"
        );
        assert!(error.contains("they were not approved: #3 create_file."), "{error}");
        assert_eq!(result.tool_uses.len(), 4, "a call that was not made is not a tool use");
    }

    #[test]
    fn summary_of_many_calls_is_clipped() {
        let calls: Vec<_> =
            (1..=40_000).map(|number| CallRecord::in_progress(number, "read_file")).collect();
        let stopped = result("call_1", &outcome(Status::Cancelled, ""), &calls, "enough").error;
        for text in [stopped, not_continued("call_1", "enough", &calls).error] {
            assert!(text.len() < MAX_TEXT_BYTES + 200, "{}", text.len());
            assert!(text.starts_with("Stopped: enough.\nCalls that had ended: none."), "{text}");
            assert!(text.ends_with("#40000 read_file."), "{text}");
        }
    }

    #[test]
    fn arguments_and_results_are_kept_while_they_fit() {
        let call = |number, arguments: usize, result: usize| CallRecord {
            arguments: "a".repeat(arguments),
            result: "r".repeat(result),
            ..CallRecord::in_progress(number, "read_file")
        };
        let calls = [call(1, 10, MAX_TOOL_USE_BYTES - 20), call(2, 4, 4096), call(3, 6, 1)];
        let kept: Vec<_> = tool_uses(&calls)
            .iter()
            .map(|used| (used.number, used.arguments.len(), used.result.len()))
            .collect();
        assert_eq!(kept, [(1, 10, MAX_TOOL_USE_BYTES - 20), (2, 4, 0), (3, 6, 0)]);
    }
}
