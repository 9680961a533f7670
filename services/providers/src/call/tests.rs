use std::{sync::Arc, time::Duration};

use construct_domain::{OrganizationId, StepId, TaskId};
use construct_proto::{
    mesh::v1::{
        ChatMessage, FailureClass, ModelInvoke, ModelTarget, Provider, StepRef, ToolDefinition,
        model_invoke::Purpose,
    },
    v1::{Block, MessageSource, ModelProviderType, Text, VendorModel, block},
};
use futures::{future::BoxFuture, stream::BoxStream};
use secrecy::SecretString;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::*;
use crate::{
    breaker::Breakers,
    cancels::CancelSignal,
    delta::tests::{RecordingProgress, step_context},
    http::HeadroomObserver,
    retry::Policy,
    router::{Interrupts, Target},
    scripted::Scripted,
    sealed_key::tests::keys,
    vendor::{Vendor, VendorFactory},
};

/// A complete command, as the reconciler sends it: one user message, the code tool, no vendor
/// settings, and no prices.
pub(crate) fn command(question: &str) -> ModelInvoke {
    ModelInvoke {
        step: Some(StepRef {
            organization_id: OrganizationId::LOCAL.to_string(),
            task_id: TaskId::from_uuid(Uuid::from_u128(1)).to_string(),
            step_id: StepId::from_uuid(Uuid::from_u128(2)).to_string(),
            number: 1,
            deadline: None,
            round: 0,
        }),
        purpose: Purpose::Turn.into(),
        provider: Some(Provider {
            id: "provider_1".into(),
            r#type: ModelProviderType::Scripted.into(),
            ..Provider::default()
        }),
        model: Some(ModelTarget {
            id: "model_1".into(),
            vendor_model: "test-model".into(),
            context_window: 128_000,
            max_output_tokens: 4_096,
            prices: None,
            tool_calling: None,
        }),
        system: "You work through scripts.".into(),
        messages: vec![ChatMessage {
            source: MessageSource::User.into(),
            blocks: vec![Block { block: Some(block::Block::Text(Text { text: question.into() })) }],
        }],
        tools: vec![ToolDefinition {
            name: "code_interpreter".into(),
            description: "Runs JavaScript.".into(),
            input_schema:
                r#"{"type":"object","properties":{"code":{"type":"string"}},"required":["code"]}"#
                    .into(),
        }],
        parameters: None,
        ..ModelInvoke::default()
    }
}

/// Retries at once, so that tests with real connections don't wait.
pub(crate) const NO_DELAY_POLICY: Policy =
    Policy { attempts: 3, initial_delay: Duration::ZERO, max_delay: Duration::from_secs(1) };
const RETRY_POLICY: Policy = Policy {
    attempts: 3,
    initial_delay: Duration::from_secs(1),
    max_delay: Duration::from_secs(10),
};

/// Opens the same vendor for every provider.
pub(crate) struct SingleVendor(pub(crate) Arc<dyn Vendor>);

/// A vendor with several owners.
pub(crate) struct SharedVendor(pub(crate) Arc<dyn Vendor>);

impl Vendor for SharedVendor {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        self.0.invoke(request)
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        self.0.models()
    }
}

impl VendorFactory for SingleVendor {
    fn open(
        &self,
        _: &Provider,
        _: Option<SecretString>,
        _: Option<Arc<dyn HeadroomObserver>>,
    ) -> Result<Box<dyn Vendor>, Failure> {
        Ok(Box::new(SharedVendor(Arc::clone(&self.0))))
    }
}

/// A router with its own breakers.
pub(crate) fn router(vendors: Arc<dyn VendorFactory>, policy: Policy) -> Router {
    Router::new(vendors, keys(), policy, Breakers::new().0)
}

/// The call of a command, with five minutes until its deadline.
pub(crate) fn routed<'a>(command: &ModelInvoke, cancel: &'a CancelSignal) -> RoutedCall<'a> {
    let first = Target {
        provider: command.provider.clone().expect("it names a provider"),
        model: command.model.clone().expect("it names a model"),
    };
    RoutedCall {
        request: Arc::new(Request::from_command(command).expect("the command is whole")),
        targets: crate::router::ordered_targets(first, &command.fallbacks, || 0.0),
        hedge_after: command
            .hedge_after
            .map(|after| Duration::try_from(after).expect("it is not negative")),
        attempts: command.max_attempts,
        lost_calls: 0,
        interrupts: Interrupts {
            cancel,
            deadline: Instant::now() + Duration::from_secs(300),
            hand_back: CancellationToken::new(),
        },
    }
}

/// Makes a call of `vendor`.
pub(crate) async fn run(
    vendor: &Arc<dyn Vendor>,
    policy: Policy,
    cancel: &CancelSignal,
    progress_log: &RecordingProgress,
) -> (Outcome, Usage) {
    let mut progress = progress_log.clone();
    let mut deltas = Deltas::new(step_context(1), &mut progress);
    let router = router(Arc::new(SingleVendor(Arc::clone(vendor))), policy);
    // Without prices, so that usages can be compared.
    let mut command = command("go");
    if let Some(model) = &mut command.model {
        model.prices = None;
    }
    let (outcome, usage, _) = answer(&router, routed(&command, cancel), &mut deltas).await;
    (outcome, usage)
}

async fn play(script: &str, cancel: &CancelSignal) -> (Outcome, Usage, RecordingProgress) {
    let progress_log = RecordingProgress::default();
    let scripted =
        Scripted::parse(script, "provider_1".into(), Arc::default()).expect("the script is valid");
    let scripted: Arc<dyn Vendor> = Arc::new(scripted);
    let (outcome, usage) = run(&scripted, RETRY_POLICY, cancel, &progress_log).await;
    (outcome, usage, progress_log)
}

fn text_of(outcome: &Outcome) -> String {
    let Outcome::Completed(completed) = outcome else { panic!("not completed: {outcome:?}") };
    completed
        .blocks
        .iter()
        .map(|block| match &block.block {
            Some(block::Block::Text(text)) => text.text.as_str(),
            Some(block::Block::CodeInterpreterCall(call)) => call.code.as_str(),
            other => panic!("not in an answer: {other:?}"),
        })
        .collect()
}

#[tokio::test(start_paused = true)]
async fn answer_is_streamed_and_completed() {
    let script = r#"[{"text": "Let me look at it.", "code": "list_files('.')\n", "tokens_per_second": 200,
        "usage": {"input": 10, "output": 20, "cache_read": 30}}]"#;
    let (outcome, usage, progress_log) = play(script, &CancelSignal::default()).await;
    assert_eq!(text_of(&outcome), "Let me look at it.list_files('.')\n");
    assert_eq!(progress_log.text(), text_of(&outcome), "what was streamed is what is completed");
    assert!(
        progress_log.events().len() > 2 && progress_log.events().len() < 9,
        "gathered: {}",
        progress_log.events().len()
    );
    assert_eq!(
        usage,
        Usage { input_tokens: 10, output_tokens: 20, cache_read_tokens: 30, ..Usage::default() }
    );
}

#[tokio::test(start_paused = true)]
async fn transient_failure_is_retried_and_visible_text_is_voided() {
    let script = r#"[{"text": "abcdefgh", "usage": {"input": 100, "output": 10},
        "fault": {"class": "transient", "times": 2, "after_chars": 4}}]"#;
    let (outcome, usage, progress_log) = play(script, &CancelSignal::default()).await;
    assert_eq!(text_of(&outcome), "abcdefgh");
    assert_eq!(
        progress_log.types(),
        [
            "message.delta",
            "message.restarted",
            "message.delta",
            "message.restarted",
            "message.delta"
        ]
    );
    assert_eq!(progress_log.text(), "abcdefgh");
    // Both interrupted attempts had read everything, and had written a token each.
    assert_eq!((usage.input_tokens, usage.output_tokens), (300, 12));
}

#[tokio::test(start_paused = true)]
async fn third_failure_is_final() {
    let script =
        r#"[{"text": "x", "fault": {"class": "overloaded", "http_status": 529, "times": 0}}]"#;
    let begun = Instant::now();
    let (outcome, usage, progress_log) = play(script, &CancelSignal::default()).await;
    let Outcome::Failed(failure) = outcome else { panic!("not failed: {outcome:?}") };
    assert_eq!((failure.class, failure.http_status), (FailureClass::Overloaded, 529));
    assert!(begun.elapsed() <= Duration::from_secs(3));
    assert!(progress_log.events().is_empty());
    assert_eq!(usage.output_tokens, 0);
}

#[tokio::test(start_paused = true)]
async fn vendor_delay_is_waited_for() {
    let script = r#"[{"text": "x", "fault": {"class": "rate_limited", "retry_after_ms": 12000}}]"#;
    let begun = Instant::now();
    let (outcome, ..) = play(script, &CancelSignal::default()).await;
    assert_eq!(text_of(&outcome), "x");
    // The vendor's retry time is wall-clock time, which hardly moves while the test's time is
    // paused.
    assert!(begun.elapsed() >= Duration::from_secs(11), "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn permanent_failure_is_not_retried() {
    let script = r#"[{"text": "x", "fault": {"class": "authentication", "times": 0, "message": "no such key"}}]"#;
    let begun = Instant::now();
    let (outcome, ..) = play(script, &CancelSignal::default()).await;
    assert!(matches!(outcome, Outcome::Failed(failure) if failure.message == "no such key"));
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn deadline_ends_a_call_with_its_usage() {
    let (outcome, usage, _) = play(
        r#"[{"text": "abcdefgh", "fault": {"stall_ms": 900000, "after_chars": 4}}]"#,
        &CancelSignal::default(),
    )
    .await;
    assert!(
        matches!(outcome, Outcome::Failed(failure) if failure.class == FailureClass::DeadlineExceeded)
    );
    assert!(usage.input_tokens > 0 && usage.output_tokens == 1, "{usage:?}");
}

#[tokio::test(start_paused = true)]
async fn cancel_ends_a_call_at_once_with_its_usage() {
    let cancel = CancelSignal::default();
    let canceller = cancel.clone();
    let begun = Instant::now();
    tokio::spawn(async move {
        sleep(Duration::from_secs(7)).await;
        canceller.cancel("suspended");
    });
    let (outcome, usage, progress_log) =
        play(r#"[{"text": "abcdefgh", "fault": {"stall_ms": 100000, "after_chars": 4}}]"#, &cancel)
            .await;
    let text = block::Block::Text(Text { text: "abcd".into() });
    let partial = vec![Block { block: Some(text) }];
    assert_eq!(outcome, Outcome::Cancelled { reason: "suspended".into(), partial });
    assert_eq!(begun.elapsed(), Duration::from_secs(7));
    assert!(usage.input_tokens > 0 && usage.output_tokens == 1, "{usage:?}");
    assert_eq!(progress_log.text(), "abcd");
}

#[tokio::test(start_paused = true)]
async fn cancel_ends_the_delay_between_attempts() {
    let cancel = CancelSignal::default();
    let canceller = cancel.clone();
    tokio::spawn(async move {
        sleep(Duration::from_secs(2)).await;
        canceller.cancel("suspended");
    });
    let (outcome, ..) =
        play(r#"[{"text": "x", "fault": {"class": "rate_limited", "retry_after_ms": 15000, "times": 0}}]"#, &cancel)
            .await;
    assert_eq!(outcome, Outcome::Cancelled { reason: "suspended".into(), partial: Vec::new() });
}
