//! The worker on a real NATS server, with the scripted model.

use std::future::Future;

use construct_bus::{Bookmark, Dispatch, testing::NatsServer};
use construct_domain::{OrganizationId, StepId};
use construct_proto::{
    mesh::v1::{CancelStep, ModelTarget, Provider, Route},
    v1::{block::Block, event::Payload},
};
use construct_runtime::Common;
use uuid::Uuid;

use super::*;
use crate::{
    call::tests::{NO_DELAY_POLICY, command, router},
    http::Http,
    sealed_key,
    tests::until,
    vendor::Vendors,
};

const CALL_TIMEOUT: Duration = Duration::from_secs(900);

fn scripted() -> Router {
    let http = Http::new(crate::Config::default().timeouts());
    let vendors = Vendors {
        http,
        scripted_attempts: Arc::default(),
        local: crate::local::LocalModels::new(None),
    };
    router(Arc::new(vendors), NO_DELAY_POLICY)
}

fn attached(server: &NatsServer) -> Attachments {
    Attachments::open(server.blobs(), 1 << 20).expect("a folder")
}

/// A worker on a mesh of its own.
struct Mesh {
    server: NatsServer,
    bus: Bus,
    results: Consumer<construct_bus::TaskMessage>,
    context: Context,
    task: TaskId,
    step: StepId,
}

impl Mesh {
    async fn start(concurrency: usize) -> Self {
        let server = NatsServer::start().await;
        let bus = server.bus().await;
        crate::install_crypto();
        let common = Common { shutdown_grace: Duration::from_secs(1), ..Common::default() };
        let context = Context::new("providers", common);
        let worker = Worker {
            bus: bus.clone(),
            router: scripted(),
            attachments: attached(&server),
            call_timeout: CALL_TIMEOUT,
            cancels: CancelRegistry::default(),
            hand_back: CancellationToken::new(),
        };
        worker.start(concurrency, &context).await.expect("the server is up");
        let task = TaskId::from_uuid(Uuid::now_v7());
        let partition = construct_domain::partition::for_task(task);
        let results =
            bus.consume_tasks(partition, ConsumeOptions::new(8, CancellationToken::new()));
        Self { server, bus, results, context, task, step: StepId::from_uuid(Uuid::now_v7()) }
    }

    fn command(&self, script: &str) -> ModelInvoke {
        let mut command = command("go");
        if let Some(step) = &mut command.step {
            step.task_id = self.task.to_string();
            step.step_id = self.step.to_string();
        }
        if let Some(model) = &mut command.model {
            let (input, output, cache_read) = (3_000_000, 15_000_000, 300_000);
            model.prices = Some(v1::Prices { input, output, cache_read, ..v1::Prices::default() });
        }
        if let Some(provider) = &mut command.provider {
            provider.script = script.to_owned();
        }
        command
    }

    async fn dispatch(&self, command: &ModelInvoke) {
        let address = subject::ModelInvoke::new(subject::Pool::model_default(), self.task);
        let dispatched = self.bus.publish_once(&address, command).await.expect("the server is up");
        assert_eq!(dispatched, Dispatch::Published);
    }

    async fn result(&mut self) -> StepResult {
        let delivery = soon("the result", self.results.next()).await.expect("the consumer runs");
        delivery.receipt.ack().await;
        match delivery.message {
            construct_bus::TaskMessage::Result(result) => *result,
            other => panic!("not a result: {other:?}"),
        }
    }

    async fn events(&self) -> Vec<Event> {
        let all = Bookmark::default();
        let replay = self.bus.replay_progress(OrganizationId::LOCAL, self.task, None, all).await;
        replay.expect("the server is up").events
    }

    async fn cancel(&self) {
        let order = CancelStep {
            task_id: self.task.to_string(),
            step_id: self.step.to_string(),
            reason: "suspended".into(),
        };
        let address = subject::Cancel { service: subject::Service::Providers };
        self.bus.publish_cancel(&address, &order).await.expect("the server is up");
    }
}

async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .unwrap_or_else(|_| panic!("waited too long for {what}"))
}

fn text(result: &StepResult) -> String {
    let Some(step_result::Outcome::ModelCompleted(completed)) = &result.outcome else {
        panic!("not completed: {result:?}")
    };
    completed
        .blocks
        .iter()
        .map(|block| match &block.block {
            Some(Block::Text(text)) => text.text.as_str(),
            Some(Block::CodeInterpreterCall(call)) => call.code.as_str(),
            other => panic!("not in an answer: {other:?}"),
        })
        .collect()
}

fn class(result: &StepResult) -> FailureClass {
    match &result.outcome {
        Some(step_result::Outcome::Failed(failure)) => failure.class(),
        other => panic!("not failed: {other:?}"),
    }
}

fn attempts(outcome: &step_result::Outcome) -> u32 {
    match outcome {
        step_result::Outcome::Failed(failure) => failure.attempts,
        other => panic!("not failed: {other:?}"),
    }
}

fn types(events: &[Event]) -> Vec<&str> {
    events.iter().map(|event| event.r#type.as_str()).collect()
}

#[tokio::test]
async fn command_becomes_live_text_and_one_priced_result() {
    let mut mesh = Mesh::start(4).await;
    let script = r#"[{"text": "Looking.", "code": "f()", "usage": {"input": 1000, "output": 10, "cache_read": 100}}]"#;
    mesh.dispatch(&mesh.command(script)).await;
    let result = mesh.result().await;
    assert_eq!(text(&result), "Looking.f()");
    assert_eq!(result.delivery, 1);
    let call: uuid::Uuid = result.call_id.parse().expect("it is told apart from other calls");
    assert_eq!(call.get_version_num(), 7);
    assert_eq!(result.model_id, "model_1");
    let usage = result.usage.expect("there is usage");
    assert_eq!((usage.input_tokens, usage.output_tokens, usage.cache_read_tokens), (1000, 10, 100));
    assert_eq!(usage.cost_pico_usd, 1000 * 3_000_000 + 10 * 15_000_000 + 100 * 300_000);
    let events = mesh.events().await;
    assert_eq!(types(&events), ["message.delta", "message.delta"]);
    assert!(events.iter().all(|event| event.step == 1 && event.index >> 32 == 1));
    let blocks: Vec<u32> = events
        .iter()
        .filter_map(|event| match &event.payload {
            Some(Payload::MessageDelta(delta)) => Some(delta.block),
            _ => None,
        })
        .collect();
    assert_eq!(blocks, [0, 1]);
}

#[tokio::test]
async fn answering_fallback_is_named_and_priced_separately() {
    let mut mesh = Mesh::start(4).await;
    let refused = r#"[{"text": "x", "usage": {"input": 100, "output": 0}, "fault": {"class": "authentication", "times": 0}}]"#;
    let mut command = mesh.command(refused);
    let answers = r#"[{"text": "Hello.", "usage": {"input": 1000, "output": 10}}]"#;
    let provider = Provider {
        id: "provider_2".into(),
        r#type: v1::ModelProviderType::Scripted.into(),
        script: answers.into(),
        ..Provider::default()
    };
    let prices = v1::Prices { input: 1_000_000, ..v1::Prices::default() };
    let model =
        ModelTarget { id: "model_2".into(), prices: Some(prices), ..ModelTarget::default() };
    command.fallbacks =
        vec![Route { provider: Some(provider), model: Some(model), order: 1, weight: 0 }];
    mesh.dispatch(&command).await;
    let result = mesh.result().await;
    assert_eq!((text(&result).as_str(), result.model_id.as_str()), ("Hello.", "model_2"));
    let usage = result.usage.expect("there is usage");
    assert_eq!(
        (usage.input_tokens, usage.cost_pico_usd),
        (1100, 100 * 3_000_000 + 1000 * 1_000_000)
    );
}

#[tokio::test]
async fn title_is_answered_without_live_text() {
    let mut mesh = Mesh::start(4).await;
    let command =
        ModelInvoke { purpose: Purpose::Title.into(), tools: vec![], ..mesh.command("[]") };
    mesh.dispatch(&command).await;
    assert_eq!(text(&mesh.result().await), "go");
    assert!(mesh.events().await.is_empty());
}

#[tokio::test]
async fn canceled_step_ends_at_once_with_its_usage() {
    let mut mesh = Mesh::start(4).await;
    let script = r#"[{"text": "abcdefgh", "fault": {"stall_ms": 600000, "after_chars": 4}}]"#;
    mesh.dispatch(&mesh.command(script)).await;
    until("the first text", async || {
        let events = mesh.events().await;
        if events.is_empty() { Err(events) } else { Ok(()) }
    })
    .await;
    mesh.cancel().await;
    let result = mesh.result().await;
    assert!(
        matches!(&result.outcome, Some(step_result::Outcome::Cancelled(cancelled)) if cancelled.reason == "suspended")
    );
    assert!(result.usage.is_some_and(|usage| usage.output_tokens == 1 && usage.cost_pico_usd > 0));
}

#[tokio::test]
async fn step_canceled_before_its_command_is_not_started() {
    let mut mesh = Mesh::start(1).await;
    mesh.cancel().await;
    // Their order is certain only once another message has come through the same subscription.
    assert!(mesh.events().await.is_empty());
    mesh.dispatch(&mesh.command(r#"[{"delay_ms": 600000, "text": "x"}]"#)).await;
    let result = mesh.result().await;
    assert!(matches!(result.outcome, Some(step_result::Outcome::Cancelled(_))));
    assert_eq!(result.usage.map(|usage| usage.cost_pico_usd), Some(0));
}

#[tokio::test]
async fn command_past_its_deadline_is_not_started() {
    let mut mesh = Mesh::start(4).await;
    let mut command = mesh.command(r#"[{"text": "x"}]"#);
    if let Some(step) = &mut command.step {
        step.deadline = Some(prost_types::Timestamp { seconds: 1, nanos: 0 });
    }
    mesh.dispatch(&command).await;
    assert_eq!(class(&mesh.result().await), FailureClass::DeadlineExceeded);
}

#[tokio::test]
async fn invalid_commands_name_the_reason() {
    let mut mesh = Mesh::start(4).await;
    let mut unknown = mesh.command("");
    let mut sealed = mesh.command("");
    if let (Some(unknown), Some(sealed)) = (&mut unknown.provider, &mut sealed.provider) {
        unknown.r#type = 99;
        sealed.api_key = Some(sealed_key::tests::seal("another provider", "sk-1"));
    }
    let broken = mesh.command("{");
    let address = subject::ModelInvoke::new(subject::Pool::model_default(), mesh.task);
    for command in [unknown, sealed, broken] {
        // The previous one must be acknowledged: a task has one command at a time.
        until("the command to be queued", async || {
            match mesh.bus.publish_once(&address, &command).await {
                Ok(Dispatch::Published) => Ok(()),
                other => Err(other),
            }
        })
        .await;
        assert_eq!(class(&mesh.result().await), FailureClass::Configuration);
    }
}

#[tokio::test]
async fn undecodable_command_fails_its_step_and_others_proceed() {
    let mut mesh = Mesh::start(1).await;
    let command = mesh.command(r#"[{"text": "x"}]"#);
    let address = subject::ModelInvoke::new(subject::Pool::model_default(), mesh.task);
    mesh.bus.publish_unreadable(&address, &command).await.expect("the server is up");
    let result = mesh.result().await;
    let named = |result: &StepResult| {
        result.step.clone().map(|step| (step.organization_id, step.step_id, step.number))
    };
    assert_eq!(named(&result), Some((OrganizationId::LOCAL.to_string(), mesh.step.to_string(), 1)));
    assert_eq!(class(&result), FailureClass::Internal);
    until("the dead letter", async || {
        let letters = mesh.bus.dead_letters(0, 10).await.expect("the server is up");
        if letters.len() == 1 { Ok(()) } else { Err(letters) }
    })
    .await;
    until("its place to be free", async || match mesh.bus.publish_once(&address, &command).await {
        Ok(Dispatch::Published) => Ok(()),
        other => Err(other),
    })
    .await;
    assert_eq!(text(&mesh.result().await), "x");
}

#[tokio::test]
async fn stopping_worker_hands_back_its_call_and_next_voids_the_text() {
    let mut mesh = Mesh::start(4).await;
    let script = r#"[{"text": "abcdefgh", "fault": {"stall_ms": 600000, "after_chars": 4}}]"#;
    mesh.dispatch(&mesh.command(script)).await;
    until("the first text", async || {
        let events = mesh.events().await;
        if events.is_empty() { Err(events) } else { Ok(()) }
    })
    .await;
    mesh.context.lifecycle().stop("the test stops it");

    // Another process without state takes over. The turn stalls there as well, and is canceled.
    let context = Context::new("providers", Common::default());
    let worker = Worker {
        bus: mesh.bus.clone(),
        router: scripted(),
        attachments: attached(&mesh.server),
        call_timeout: CALL_TIMEOUT,
        cancels: CancelRegistry::default(),
        hand_back: CancellationToken::new(),
    };
    worker.start(4, &context).await.expect("the server is up");
    until("the second worker's text", async || {
        let events = mesh.events().await;
        match types(&events)[..] {
            ["message.delta", "message.restarted", "message.delta"] => Ok(()),
            _ => Err(events),
        }
    })
    .await;
    mesh.cancel().await;
    let result = mesh.result().await;
    assert_eq!(result.delivery, 2);
    assert!(matches!(result.outcome, Some(step_result::Outcome::Cancelled(_))));
}

#[tokio::test]
async fn command_delivered_too_often_fails() {
    let mesh = Mesh::start(1).await;
    let context = Context::new("providers", Common::default());
    let worker = Worker {
        bus: mesh.bus.clone(),
        router: scripted(),
        attachments: attached(&mesh.server),
        call_timeout: CALL_TIMEOUT,
        cancels: CancelRegistry::default(),
        hand_back: context.lifecycle().draining(),
    };
    let command = mesh.command(r#"[{"text": "x"}]"#);
    let fifth = worker.execute(&command, MAX_DELIVERIES).await.0.expect("not handed back");
    assert_eq!(text(&fifth), "x");
    let sixth = worker.execute(&command, MAX_DELIVERIES + 1).await.0.expect("not handed back");
    assert_eq!(class(&sixth), FailureClass::Internal);
    // Where another delivery would be the sixth, a handed-back call fails, and its step is started
    // again: this worker's call does not count.
    context.lifecycle().stop("the test stops it");
    assert_eq!(worker.execute(&command, MAX_DELIVERIES - 1).await.0, None);
    let last = worker.execute(&command, MAX_DELIVERIES).await.0.expect("not handed back");
    assert!(
        matches!(&last.outcome, Some(step_result::Outcome::Failed(failure)) if failure.attempts == MAX_DELIVERIES - 1),
        "it counts as no call of its own: {last:?}"
    );
    assert_eq!(class(&last), FailureClass::Transient);
}

#[tokio::test]
async fn redelivered_command_does_not_regain_its_attempts() {
    let mesh = Mesh::start(1).await;
    let context = Context::new("providers", Common::default());
    let worker = Worker {
        bus: mesh.bus.clone(),
        router: scripted(),
        attachments: attached(&mesh.server),
        call_timeout: CALL_TIMEOUT,
        cancels: CancelRegistry::default(),
        hand_back: context.lifecycle().draining(),
    };
    // Each is a command for another provider, whose first attempts fail this many times.
    let mut provider = 0;
    let mut failing = |times: u32, attempts: u32| {
        let fault = format!(r#", "fault": {{"class": "rate_limited", "times": {times}}}"#);
        let script = format!(r#"[{{"text": "x"{}}}]"#, if times > 0 { &fault } else { "" });
        let mut command = ModelInvoke { max_attempts: attempts, ..mesh.command(&script) };
        provider += 1;
        if let Some(named) = &mut command.provider {
            named.id = format!("provider_{provider}");
        }
        command
    };
    let answer = async |command: &ModelInvoke, delivery: u32| {
        worker.execute(command, delivery).await.0.expect("not handed back").outcome
    };
    // What is left of three attempts at a model and five of an answer: each earlier delivery counts
    // as an attempt.
    for (attempts, delivery, left) in
        [(5, 1, 3), (5, 2, 2), (5, 3, 1), (5, 5, 1), (0, 2, 2), (2, 1, 2), (2, 2, 1)]
    {
        let case = format!("{attempts} attempts, delivery {delivery}");
        let outcome = answer(&failing(left, attempts), delivery).await;
        let Some(step_result::Outcome::Failed(failure)) = outcome else {
            panic!("{case}: {outcome:?}")
        };
        assert_eq!(
            failure.attempts,
            left + delivery - 1,
            "{case}: the failure says how many count"
        );
        let outcome = answer(&failing(left - 1, attempts), delivery).await;
        assert!(
            matches!(outcome, Some(step_result::Outcome::ModelCompleted(_))),
            "{case}: {outcome:?}"
        );
    }
    // None is left: no vendor is called, and the answer fails.
    let outcome = answer(&failing(0, 2), 3).await;
    let Some(step_result::Outcome::Failed(failure)) = outcome else { panic!("{outcome:?}") };
    assert_eq!((failure.class(), failure.attempts), (FailureClass::Transient, 2));
    assert!(failure.message.contains("of the 2 calls"), "{}", failure.message);
    // A delivery that would leave none to the next one is not handed back, and does not count
    // itself.
    context.lifecycle().stop("the test stops it");
    assert_eq!(answer(&failing(1, 2), 2).await.map(|outcome| attempts(&outcome)), Some(1));
}

#[tokio::test]
async fn worker_takes_no_more_than_its_concurrency() {
    let mut mesh = Mesh::start(1).await;
    let first =
        mesh.command(r#"[{"text": "x", "fault": {"stall_ms": 600000, "after_chars": 1}}, {}]"#);
    mesh.dispatch(&first).await;
    until("the first call to begin", async || {
        let events = mesh.events().await;
        if events.is_empty() { Err(events) } else { Ok(()) }
    })
    .await;
    // The second waits in the stream until the first has ended.
    let other = TaskId::from_uuid(Uuid::now_v7());
    let mut second = mesh.command(r#"[{"text": "second"}]"#);
    if let Some(step) = &mut second.step {
        step.task_id = other.to_string();
        step.step_id = StepId::from_uuid(Uuid::now_v7()).to_string();
    }
    let address = subject::ModelInvoke::new(subject::Pool::model_default(), other);
    mesh.bus.publish_once(&address, &second).await.expect("the server is up");
    let partition = construct_domain::partition::for_task(other);
    let mut results =
        mesh.bus.consume_tasks(partition, ConsumeOptions::new(8, CancellationToken::new()));
    mesh.cancel().await;
    let first = mesh.result().await;
    assert!(matches!(first.outcome, Some(step_result::Outcome::Cancelled(_))));
    let second = soon("the second result", results.next()).await.expect("the consumer runs");
    assert!(
        matches!(second.message, construct_bus::TaskMessage::Result(result) if text(&result) == "second")
    );
}
