//! The actions of people during a trial: suspending tasks, canceling turns, rewinding and editing
//! messages, approving calls, and scheduling messages.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    pin::pin,
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use construct_proto::v1;
use construct_tests::{
    client::{
        Client, Conversation, TURN_TIMEOUT, id, is_unavailable, retry_unavailable, text_blocks,
    },
    mesh::Mesh,
    random::Random,
    transcript::text,
    wait::until,
};
use futures::future::join_all;
use jiff::Timestamp;
use serde_json::json;
use tokio::time::sleep;
use tonic::Code;
use uuid::Uuid;

use crate::load::{Job, Kind};

/// The time between two checks for pending approvals.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

fn key() -> String {
    Uuid::now_v7().to_string()
}

/// Makes the agent's scripts wait for approval before they create a file.
pub(crate) async fn ask_before_files(client: &Client, agent: &str) {
    let tools = vec!["create_file".to_owned()];
    let rule =
        v1::PolicyRule { action: v1::PolicyAction::Ask.into(), tools, ..v1::PolicyRule::default() };
    let update = v1::UpdateAgentRequest {
        agent: agent.to_owned(),
        policy: Some(v1::Policy { rules: vec![rule] }),
        ..v1::UpdateAgentRequest::default()
    };
    client.agents().update_agent(update).await.unwrap();
}

/// Does the `work` while every pending call of these conversations is approved.
pub(crate) async fn approving<T>(jobs: &[Job], work: impl Future<Output = T>) -> T {
    let asked = jobs.iter().filter(|job| matches!(job.kind, Kind::Asks));
    let attentive = join_all(asked.map(|job| approve(&job.conversation)));
    let mut work = pin!(work);
    tokio::select! {
        done = &mut work => done,
        _nobody_is_asked = attentive => work.await,
    }
}

async fn approve(conversation: &Conversation) -> Infallible {
    let approvals = conversation.client().approvals();
    let state = v1::ApprovalState::Pending.into();
    let filter = v1::list_approvals_request::Filter {
        task: conversation.id().to_owned(),
        state,
        ..Default::default()
    };
    let request = v1::ListApprovalsRequest { page: None, filter: Some(filter) };
    loop {
        let look = async || approvals.clone().list_approvals(request.clone()).await;
        for approval in
            retry_unavailable("what is asked", look).await.unwrap().into_inner().approvals
        {
            let decision = v1::DecideApprovalRequest {
                approval: id(approval.metadata.as_ref()),
                decision: v1::decide_approval_request::Decision::Approve.into(),
                arguments_hash: approval.spec.unwrap_or_default().arguments_hash,
                idempotency_key: key(),
                ..v1::DecideApprovalRequest::default()
            };
            let decide = async || approvals.clone().decide_approval(decision.clone()).await;
            if let Err(refused) = retry_unavailable("an approval", decide).await {
                assert_eq!(
                    refused.code(),
                    Code::FailedPrecondition,
                    "the script may be over, but nothing else: {refused:?}"
                );
            }
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Suspends a conversation for a moment, again and again, in any phase, until it is `over`; then
/// all continue.
pub(crate) async fn suspend_at_random(jobs: &[Job], mut random: Random, over: &AtomicBool) {
    while !over.load(Ordering::Relaxed) {
        let at = random.next_below(jobs.len() as u64) as usize;
        let Some(Job { conversation, .. }) = jobs.get(at) else { return };
        sleep(random.millis(300, 2_000)).await;
        conversation.suspend().await;
        sleep(random.millis(0, 1_000)).await;
        conversation.resume().await;
    }
}

/// Sends messages until it is `over`, and cancels each one's turn, rewinds the conversation to
/// before it, or edits it, in any phase.
pub(crate) async fn change_messages(job: &Job, mut random: Random, over: &AtomicBool) {
    let Job { conversation, said, .. } = job;
    for n in 0.. {
        let text = format!("m{n}");
        let message = id(conversation.submit(&text).await.metadata.as_ref());
        said.lock().unwrap().push(text);
        sleep(random.millis(0, 2_500)).await;
        let better = format!("m{n}-better");
        match random.next_below(3) {
            0 => conversation.cancel("it is not needed any more").await,
            1 => rewind(conversation, message).await,
            _ if edit(conversation, message, &better).await => said.lock().unwrap().push(better),
            _ => {}
        }
        conversation.wait_until_idle().await;
        if over.load(Ordering::Relaxed) {
            return;
        }
    }
}

/// Rewinds the conversation to before a message, unless that is still queued.
async fn rewind(conversation: &Conversation, message: String) {
    let (task, idempotency_key) = (conversation.id().to_owned(), key());
    let request = v1::RewindTaskRequest {
        task,
        message,
        idempotency_key,
        ..v1::RewindTaskRequest::default()
    };
    let rewind = async || conversation.client().tasks().rewind_task(request.clone()).await;
    was_accepted(retry_unavailable("the conversation to be rewound", rewind).await);
}

/// Edits a message, unless it is still queued.
async fn edit(conversation: &Conversation, message: String, better: &str) -> bool {
    let request =
        v1::EditMessageRequest { message, blocks: text_blocks(better), idempotency_key: key() };
    let edit = async || conversation.client().messages().edit_message(request.clone()).await;
    was_accepted(retry_unavailable("the message to be edited", edit).await)
}

fn was_accepted<T>(answer: Result<T, tonic::Status>) -> bool {
    let Err(refused) = answer else { return true };
    assert_eq!(
        refused.code(),
        Code::FailedPrecondition,
        "a message may wait, but nothing else: {refused:?}"
    );
    false
}

/// A conversation with scheduled messages.
pub(crate) struct Clock {
    conversation: Conversation,
    schedules: Mutex<Vec<String>>,
}

impl Clock {
    pub(crate) async fn begin(mesh: &Mesh) -> Self {
        mesh.scripted_agent("echo", &json!([{"text": "{{last_user_text}}"}])).await.unwrap();
        let conversation = mesh.client().unwrap().create_task("echo", None).await.unwrap();
        Self { conversation, schedules: Mutex::default() }
    }

    /// Schedules one message after the other for the near future, until it is `over`.
    pub(crate) async fn work(&self, mut random: Random, over: &AtomicBool) {
        let schedules = self.conversation.client().schedules();
        for n in 0.. {
            let name = format!("s{n}");
            until("a schedule to be accepted", TURN_TIMEOUT, async || {
                let at = Timestamp::now() + random.millis(500, 3_000);
                let at = prost_types::Timestamp {
                    seconds: at.as_second(),
                    nanos: at.subsec_nanosecond(),
                };
                let (task, blocks) = (self.conversation.id().to_owned(), text_blocks(&name));
                let spec = v1::ScheduleSpec {
                    name: name.clone(),
                    task,
                    blocks,
                    at: Some(at),
                    ..v1::ScheduleSpec::default()
                };
                let request =
                    v1::CreateScheduleRequest { spec: Some(spec), idempotency_key: key() };
                match schedules.clone().create_schedule(request).await {
                    // Its time may have passed when the request arrives.
                    Err(late) if is_unavailable(&late) || late.code() == Code::InvalidArgument => {
                        Err(late)
                    }
                    // An earlier attempt was accepted, and its answer was lost.
                    Err(taken) if taken.code() == Code::AlreadyExists => Ok(()),
                    answer => {
                        answer.map(drop).map_err(|refused| panic!("{name} is refused: {refused:?}"))
                    }
                }
            })
            .await;
            self.schedules.lock().unwrap().push(name);
            if over.load(Ordering::Relaxed) {
                return;
            }
            sleep(random.millis(500, 2_500)).await;
        }
    }

    /// Panics unless each message came once and was answered; returns their number.
    pub(crate) async fn check(&self) -> usize {
        let mut schedules = self.conversation.client().schedules();
        let expected: BTreeSet<String> = self.schedules.lock().unwrap().iter().cloned().collect();
        for schedule in &expected {
            let request = v1::ListScheduleRunsRequest { schedule: schedule.clone() };
            until("the message of a schedule to be sent", TURN_TIMEOUT, async || {
                let runs = schedules
                    .list_schedule_runs(request.clone())
                    .await
                    .map_err(|status| status.to_string())?;
                match runs.into_inner().runs.as_slice() {
                    [] => Err(format!("{schedule} has no run")),
                    [run] if run.outcome() == v1::ScheduleRunOutcome::Sent => Ok(()),
                    other => panic!("{schedule} has other runs than one: {other:?}"),
                }
            })
            .await;
        }
        self.conversation.wait_until_idle().await;
        let transcript = self.conversation.transcript().await;
        let said: Vec<String> =
            transcript.from_source(v1::MessageSource::User).into_iter().map(text).collect();
        transcript.check(&said.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(
            said.len(),
            expected.len(),
            "a message has come twice, or not:\n{}",
            transcript.show()
        );
        assert_eq!(said.into_iter().collect::<BTreeSet<_>>(), expected);
        expected.len()
    }
}
