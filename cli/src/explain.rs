//! `construct explain`: what a task waits for.

use construct_proto::v1::{ExplainTaskRequest, TaskExplanation};
use jiff::Timestamp;

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::OutputArgs,
    render::phase_name,
    text::printable,
    time,
};

#[derive(Debug, clap::Args)]
pub(crate) struct ExplainArgs {
    /// The task's id.
    task: String,
    #[command(flatten)]
    output: OutputArgs,
}

impl ExplainArgs {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let explanation =
            call(gateway.tasks().explain_task(ExplainTaskRequest { task: self.task })).await?;
        let text = describe(&explanation, Timestamp::now());
        self.output.message("construct.v1.TaskExplanation", &explanation, &text)
    }
}

/// The explanation as text for people.
pub(crate) fn describe(explanation: &TaskExplanation, now: Timestamp) -> String {
    let at = |field: &Option<prost_types::Timestamp>| {
        time::read(field.as_ref())
            .map(|at| format!("{} ({})", time::relative(at, now), time::local(at)))
    };
    let mut text =
        format!("The task waits for {}.\n", explanation.waiting_for.trim_end_matches('.'));
    let mut line = |name: &str, value: String| {
        if !value.is_empty() {
            text.push_str(&format!("  {name:<13}{value}\n"));
        }
    };
    line("phase", phase_name(explanation.phase()).to_owned());
    line("since", at(&explanation.since).unwrap_or_default());
    line("deadline", at(&explanation.deadline).unwrap_or_else(|| "none".to_owned()));
    line("next wake", at(&explanation.next_wake).unwrap_or_else(|| "none".to_owned()));
    line("released by", explanation.released_by.clone());
    if let Some(error) = &explanation.last_error {
        line("last error", format!("{}: {}", error.code, error.message));
    }
    if !explanation.step_id.is_empty() {
        line("step", format!("{}, attempt {}", explanation.step_id, explanation.attempt.max(1)));
    }
    line("trace", explanation.trace_id.clone());
    printable(&text)
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::TaskPhase;

    use super::*;

    #[test]
    fn explanation_is_one_sentence_and_its_fields() {
        let now = Timestamp::from_second(1_000_000).unwrap();
        let explanation = TaskExplanation {
            phase: TaskPhase::AwaitInput.into(),
            waiting_for: "a message from a person.".to_owned(),
            released_by: "a message".to_owned(),
            step_id: "step_1".to_owned(),
            attempt: 2,
            ..TaskExplanation::default()
        };
        assert_eq!(
            describe(&explanation, now),
            "The task waits for a message from a person.\n  phase        await input\n  deadline     none\n  next wake    \
             none\n  released by  a message\n  step         step_1, attempt 2\n"
        );
        let since = Some(time::write(Timestamp::from_second(999_400).unwrap()));
        let text = describe(&TaskExplanation { since, ..explanation }, now);
        assert!(text.contains("  since        10m ago (19"), "{text}");
    }
}
