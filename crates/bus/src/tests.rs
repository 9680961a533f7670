//! Tests with a real nats-server.

mod consume;
mod events;
mod journal;
mod permissions;
mod publish;
mod stuck_messages;
mod subjects;
mod tls;
mod topology;
mod trace;

use std::time::Duration;

use construct_domain::{OrganizationId, StepId, TaskId, partition};
use construct_proto::{
    mesh::v1::{CodeExecute, ModelInvoke, StepRef, StepResult, TaskWake},
    v1::{Event, MessageDelta, ToolCalled, event::Payload},
};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{ConsumeOptions, Consumer, Delivery};

/// Longer than any operation here takes.
const TIMEOUT: Duration = Duration::from_secs(60);

const ORGANIZATION: OrganizationId = OrganizationId::LOCAL;

fn task(number: u128) -> TaskId {
    TaskId::from_uuid(Uuid::from_u128(number))
}

fn step(number: u128) -> StepId {
    StepId::from_uuid(Uuid::from_u128(number))
}

/// Tasks of partition 0.
fn tasks_of_first_partition() -> impl Iterator<Item = TaskId> {
    (1..).map(task).filter(|&task| partition::for_task(task) == 0)
}

fn step_ref(task: TaskId, number: u64) -> StepRef {
    StepRef {
        organization_id: ORGANIZATION.to_string(),
        task_id: task.to_string(),
        step_id: step(u128::from(number)).to_string(),
        number,
        deadline: None,
        round: 0,
    }
}

fn wake(task: TaskId, reason: impl Into<String>) -> TaskWake {
    TaskWake {
        organization_id: ORGANIZATION.to_string(),
        task_id: task.to_string(),
        reason: reason.into(),
    }
}

fn result(task: TaskId, number: u64) -> StepResult {
    StepResult { step: Some(step_ref(task, number)), delivery: 1, ..Default::default() }
}

fn invoke(task: TaskId, number: u64) -> ModelInvoke {
    ModelInvoke {
        step: Some(step_ref(task, number)),
        system: "be brief".to_owned(),
        ..Default::default()
    }
}

fn execute(task: TaskId, number: u64) -> CodeExecute {
    CodeExecute { step: Some(step_ref(task, number)), ..Default::default() }
}

fn event(task: TaskId, kind: &str, step: u64, index: u64) -> Event {
    let payload = match kind {
        "message.delta" => {
            Some(Payload::MessageDelta(MessageDelta { index, ..Default::default() }))
        }
        "tool.called" => {
            Some(Payload::ToolCalled(ToolCalled { name: "grep".to_owned(), ..Default::default() }))
        }
        _ => None,
    };
    Event {
        r#type: kind.to_owned(),
        organization_id: ORGANIZATION.to_string(),
        task_id: task.to_string(),
        step,
        index,
        payload,
        ..Default::default()
    }
}

fn options(max_in_flight: usize) -> ConsumeOptions {
    ConsumeOptions::new(max_in_flight, CancellationToken::new())
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(TIMEOUT, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {TIMEOUT:?} in vain: {what}"),
    }
}

async fn next<T>(consumer: &mut Consumer<T>) -> Delivery<T> {
    within("the next delivery", consumer.next()).await.expect("the consumer was not stopped")
}

/// Whether a NATS pattern matches a subject, or all subjects of another pattern.
fn matches(pattern: &str, subject: &str) -> bool {
    let mut wanted = pattern.split('.');
    for token in subject.split('.') {
        match wanted.next() {
            Some(">") => return true,
            Some("*") if token != ">" => {}
            Some(word) if word == token => {}
            _ => return false,
        }
    }
    wanted.next().is_none()
}
