//! The events of a commit, for clients. They are stored in the same transaction as the change they
//! describe.

use construct_domain::{
    decide::Decision,
    message::Source,
    task::{NewMessage, Phase, TurnOutcome},
};
use construct_proto::v1::{self, event::Payload};
use construct_store::{LoadedTask, NewEvent, StoredApproval};
use construct_wire::{convert, record};
use jiff::Timestamp;

/// The events of a decision, in the order in which clients see them. `usage` is that of its model
/// call, and `step` the number of the step whose result was absorbed.
pub(crate) fn decision_events(
    before: &LoadedTask,
    decision: &Decision,
    usage: &construct_domain::money::Usage,
    step: Option<u64>,
    now: Timestamp,
) -> Vec<NewEvent> {
    let mut events = Vec::new();
    for message in &decision.appended {
        let superseded = decision.rewound.is_some_and(|from| message.position >= from);
        let message = message_to_proto(before, message, superseded, usage, now);
        events.push(record::new("message.created", Payload::Message(message), step));
    }
    if let Some(error) = &decision.error {
        events.push(record::new("error", Payload::Error(convert::error(error)), step));
    }
    if let Some(ended) = &decision.ended {
        let failed = ended.outcome != TurnOutcome::Completed;
        let completed = v1::TurnCompleted {
            message_id: ended.message.to_string(),
            outcome: convert::outcome(ended.outcome).into(),
            turns: ended.calls,
            error: decision.task.last_error.as_ref().filter(|_| failed).map(convert::error),
        };
        events.push(record::new("turn.completed", Payload::TurnCompleted(completed), step));
    }
    if let Some(from_position) = decision.rewound {
        let rewound = v1::Rewound { from_position, last_position: decision.task.last_position };
        events.push(record::new("task.rewound", Payload::Rewound(rewound), None));
    }
    if let Some(compacted) = &decision.compacted {
        let compacted = v1::ContextCompacted {
            through_position: compacted.through,
            kept_positions: compacted.kept.clone(),
            tokens_before: compacted.before,
            tokens_after: compacted.after,
            summary: compacted.summary,
            text: compacted.text.clone(),
        };
        events.push(record::new("context.compacted", Payload::ContextCompacted(compacted), step));
    }
    if decision.task.phase != before.task.phase {
        let changed = v1::PhaseChanged {
            previous: convert::phase(before.task.phase).into(),
            phase: convert::phase(decision.task.phase).into(),
            reason: phase_reason(decision).to_owned(),
        };
        events.push(record::new("task.phase_changed", Payload::PhaseChanged(changed), step));
    }
    events
}

/// The event of a requested approval.
pub(crate) fn approval_requested(approval: &StoredApproval) -> NewEvent {
    record::new("approval.requested", Payload::Approval(convert::approval(approval)), None)
}

/// The event of an approval that was closed without a person's decision.
pub(crate) fn approval_closed(approval: &StoredApproval) -> NewEvent {
    record::new("approval.decided", Payload::Approval(convert::approval(approval)), None)
}

fn phase_reason(decision: &Decision) -> &'static str {
    match decision.task.phase {
        Phase::AwaitInput if decision.ended.is_some() => "the turn ended",
        Phase::AwaitInput => "there is no unprocessed message",
        Phase::InvokeModel if decision.admitted.is_some() => "a message is to be answered",
        Phase::InvokeModel => "the model is called again",
        Phase::ExecuteTools => match &decision.task.step {
            Some(step) if step.round > 0 => "the script resumes",
            _ => "the model wants to run a script",
        },
        Phase::AwaitApproval => "the script wants to make calls that a person must approve",
        Phase::AwaitSubtasks => "the script waits for subtasks",
        Phase::Suspended => "a person suspended the task",
    }
}

fn message_to_proto(
    before: &LoadedTask,
    message: &NewMessage,
    superseded: bool,
    usage: &construct_domain::money::Usage,
    now: Timestamp,
) -> v1::Message {
    let assistant = message.source == Source::Assistant;
    v1::Message {
        metadata: convert::metadata(message.id, before.task.organization, (now, now), 1),
        spec: Some(v1::MessageSpec {
            task: before.task.id.to_string(),
            blocks: message.blocks.iter().map(convert::block).collect(),
            ..v1::MessageSpec::default()
        }),
        status: Some(v1::MessageStatus {
            source: convert::source(message.source).into(),
            position: message.position,
            processed_at: Some(convert::time(now)),
            usage: assistant.then(|| convert::usage(usage)),
            agent_id: if assistant { before.task.agent.to_string() } else { String::new() },
            error: String::new(),
            superseded_at: superseded.then(|| convert::time(now)),
            replaces: String::new(),
        }),
    }
}
