//! The events a commit leaves: what clients are told, stored in the same transaction as what it tells of.

use construct_domain::{
    OrganizationId, TaskId,
    decide::Decision,
    message::Source,
    task::{NewMessage, Phase},
};
use construct_proto::v1::{self, event::Payload};
use construct_store::{LoadedTask, NewEvent};
use jiff::Timestamp;
use prost::Message as _;

use crate::convert::{
    block_to_proto, error_to_proto, outcome_to_proto, phase_to_proto, source_to_proto, timestamp_to_proto, usage_to_proto,
};

/// The events of a decision, in the order in which clients see them. `usage` is that of the model call it is about, and
/// `step` the number of the step whose result was taken in.
pub(crate) fn events(
    before: &LoadedTask,
    decision: &Decision,
    usage: &construct_domain::money::Usage,
    step: Option<u64>,
    now: Timestamp,
) -> Vec<NewEvent> {
    let mut events = Vec::new();
    for message in &decision.appended {
        let message = message_to_proto(before, message, usage, now);
        events.push(event("message.created", Payload::Message(message), step));
    }
    if let Some(error) = &decision.error {
        events.push(event("error", Payload::Error(error_to_proto(error)), step));
    }
    if let Some(ended) = &decision.ended {
        let failed = ended.outcome != construct_domain::task::TurnOutcome::Completed;
        let completed = v1::TurnCompleted {
            message_id: ended.message.to_string(),
            outcome: outcome_to_proto(ended.outcome).into(),
            turns: ended.calls,
            error: decision.task.last_error.as_ref().filter(|_| failed).map(error_to_proto),
        };
        events.push(event("turn.completed", Payload::TurnCompleted(completed), step));
    }
    if decision.task.phase != before.task.phase {
        let changed = v1::PhaseChanged {
            previous: phase_to_proto(before.task.phase).into(),
            phase: phase_to_proto(decision.task.phase).into(),
            reason: phase_reason(decision).to_owned(),
        };
        events.push(event("task.phase_changed", Payload::PhaseChanged(changed), step));
    }
    events
}

fn phase_reason(decision: &Decision) -> &'static str {
    match decision.task.phase {
        Phase::AwaitInput if decision.ended.is_some() => "the turn ended",
        Phase::AwaitInput => "there is no unprocessed message",
        Phase::InvokeModel if decision.admitted.is_some() => "a message is to be answered",
        Phase::InvokeModel => "the model is asked to go on",
        Phase::ExecuteTools => "the model wants to run a script",
        Phase::Suspended => "a person suspended the task",
    }
}

fn message_to_proto(
    before: &LoadedTask,
    message: &NewMessage,
    usage: &construct_domain::money::Usage,
    now: Timestamp,
) -> v1::Message {
    let assistant = message.source == Source::Assistant;
    v1::Message {
        metadata: Some(v1::Metadata {
            id: message.id.to_string(),
            organization_id: before.task.organization.to_string(),
            created_at: Some(timestamp_to_proto(now)),
            updated_at: Some(timestamp_to_proto(now)),
            revision: 1,
        }),
        spec: Some(v1::MessageSpec {
            task: before.task.id.to_string(),
            blocks: message.blocks.iter().map(block_to_proto).collect(),
        }),
        status: Some(v1::MessageStatus {
            source: source_to_proto(message.source).into(),
            position: message.position,
            processed_at: Some(timestamp_to_proto(now)),
            usage: assistant.then(|| usage_to_proto(usage)),
            agent_id: if assistant { before.task.agent.to_string() } else { String::new() },
            error: String::new(),
        }),
    }
}

fn event(kind: &str, payload: Payload, step: Option<u64>) -> NewEvent {
    let payload = v1::Event { payload: Some(payload), ..v1::Event::default() }.encode_to_vec();
    NewEvent { kind: kind.to_owned(), payload, step }
}

/// A stored event as it goes over the mesh.
pub(crate) fn to_publish(
    organization: OrganizationId,
    task: TaskId,
    sequence: u64,
    stored: &NewEvent,
    now: Timestamp,
) -> Result<v1::Event, prost::DecodeError> {
    Ok(v1::Event {
        id: construct_domain::id::event_id(task.uuid(), sequence),
        sequence,
        r#type: stored.kind.clone(),
        time: Some(timestamp_to_proto(now)),
        organization_id: organization.to_string(),
        task_id: task.to_string(),
        step: stored.step.unwrap_or_default(),
        ..v1::Event::decode(stored.payload.as_slice())?
    })
}
