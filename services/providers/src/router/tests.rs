//! Calls over several targets, in paused time: each target is a vendor with scripted behavior.

use std::{collections::HashMap, sync::Mutex};

use construct_proto::{
    mesh::v1::{ModelInvoke, SealedSecret, model_completed::StopReason},
    v1::{ModelProviderType, Prices as WirePrices, VendorModel},
};
use futures::{StreamExt as _, future::BoxFuture, stream};
use jiff::Timestamp;
use proptest::prelude::*;
use tokio::time::sleep;

use super::*;
use crate::{
    call::{
        self, Outcome,
        tests::{command, routed, router},
    },
    delta::{
        Deltas,
        tests::{RecordingProgress, step_context},
    },
    http::HeadroomObserver,
    sealed_key::tests::{keys, seal},
    vendor::Vendor,
};

const RETRY_POLICY: Policy = Policy {
    attempts: 3,
    initial_delay: Duration::from_secs(1),
    max_delay: Duration::from_secs(10),
};
const SECOND: Duration = Duration::from_secs(1);

/// What a vendor does when it is called.
#[derive(Debug, Clone)]
enum Behavior {
    Answer(&'static str),
    /// After a delay.
    AnswerAfter(Duration, &'static str),
    Fail(Failure),
    /// After some visible text.
    BreakAfter(&'static str, Failure),
}

/// The called provider and its key.
type CallRecord = (String, Option<String>);

/// Vendors by provider id, with the behavior of the n-th call; the last one repeats.
#[derive(Debug, Default, Clone)]
struct FakeVendors {
    parts: HashMap<&'static str, Vec<Behavior>>,
    calls: Arc<Mutex<Vec<CallRecord>>>,
}

struct FakeVendor {
    vendors: FakeVendors,
    provider: String,
    key: Option<String>,
}

impl VendorFactory for FakeVendors {
    fn open(
        &self,
        provider: &Provider,
        key: Option<SecretString>,
        _: Option<Arc<dyn HeadroomObserver>>,
    ) -> Result<Box<dyn Vendor>, Failure> {
        let key = key.map(|key| key.expose_secret().to_owned());
        Ok(Box::new(FakeVendor { vendors: self.clone(), provider: provider.id.clone(), key }))
    }
}

impl Vendor for FakeVendor {
    fn invoke(&self, _: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let mut calls = self.vendors.calls.lock().expect("no test panics while it holds the lock");
        let before = calls.iter().filter(|(provider, _)| *provider == self.provider).count();
        calls.push((self.provider.clone(), self.key.clone()));
        let parts = &self.vendors.parts[self.provider.as_str()];
        let used = || Chunk::Usage(Usage { input_tokens: 1_000_000, ..Usage::default() });
        let named = || Chunk::Named { id: "answer-1".to_owned(), model: "model-1".to_owned() };
        let text =
            |text: &str| [Chunk::Text(text.to_owned()), Chunk::Stop(StopReason::EndTurn)].map(Ok);
        match parts[before.min(parts.len() - 1)].clone() {
            Behavior::Answer(words) => {
                stream::iter([Ok(used())].into_iter().chain(text(words))).boxed()
            }
            // Usage and names are not part of the answer.
            Behavior::AnswerAfter(pause, words) => stream::iter([Ok(named()), Ok(used())])
                .chain(stream::once(sleep(pause)).flat_map(move |()| stream::iter(text(words))))
                .boxed(),
            Behavior::Fail(failure) => stream::iter([Err(failure)]).boxed(),
            Behavior::BreakAfter(words, failure) => {
                stream::iter([Ok(used()), Ok(Chunk::Text(words.to_owned())), Err(failure)]).boxed()
            }
        }
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }
}

impl FakeVendors {
    fn new<const N: usize>(parts: [(&'static str, Vec<Behavior>); N]) -> Self {
        Self { parts: HashMap::from(parts), calls: Arc::default() }
    }

    fn called_providers(&self) -> Vec<String> {
        let calls = self.calls.lock().expect("no test panics while it holds the lock");
        calls.iter().map(|(provider, _)| provider.clone()).collect()
    }

    fn keys(&self) -> Vec<String> {
        let calls = self.calls.lock().expect("no test panics while it holds the lock");
        calls.iter().filter_map(|(_, key)| key.clone()).collect()
    }
}

fn target(name: &str, window: i64) -> (Provider, ModelTarget) {
    let provider = Provider {
        id: name.to_owned(),
        r#type: ModelProviderType::Openai.into(),
        ..Provider::default()
    };
    let model = ModelTarget {
        id: format!("model_{name}"),
        vendor_model: name.to_owned(),
        context_window: window,
        max_output_tokens: 100,
        prices: Some(WirePrices { input: 3, ..WirePrices::default() }),
        tool_calling: None,
    };
    (provider, model)
}

/// A command for `a` with these fallbacks.
fn command_for_a(fallbacks: &[(&str, i64)]) -> ModelInvoke {
    let (provider, model) = target("a", 100);
    let routes = (1..).zip(fallbacks).map(|(order, (name, window))| {
        let (provider, model) = target(name, *window);
        Route { provider: Some(provider), model: Some(model), order, weight: 0 }
    });
    ModelInvoke {
        provider: Some(provider),
        model: Some(model),
        fallbacks: routes.collect(),
        ..command("go")
    }
}

async fn run_call(
    router: &Router,
    command: &ModelInvoke,
) -> (Outcome, Usage, String, RecordingProgress) {
    run_call_until(router, command, &CancelSignal::default()).await
}

async fn run_call_until(
    router: &Router,
    command: &ModelInvoke,
    cancel: &CancelSignal,
) -> (Outcome, Usage, String, RecordingProgress) {
    let progress_log = RecordingProgress::default();
    let mut progress = progress_log.clone();
    let mut deltas = Deltas::new(step_context(1), &mut progress);
    let (outcome, usage, model) = call::answer(router, routed(command, cancel), &mut deltas).await;
    (outcome, usage, model, progress_log)
}

fn failed(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("not failed: {other:?}"),
    }
}

fn down() -> Failure {
    Failure::transient("it is down")
}

fn refusal(class: FailureClass) -> Failure {
    Failure::new(class, "no")
}

#[tokio::test(start_paused = true)]
async fn fallback_answers_after_all_attempts_of_the_model_failed() {
    let vendors = FakeVendors::new([
        ("a", vec![Behavior::BreakAfter("half", down())]),
        ("b", vec![Behavior::Answer("whole")]),
    ]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let (outcome, usage, model, progress_log) =
        run_call(&router, &command_for_a(&[("b", 100)])).await;
    assert!(matches!(outcome, Outcome::Completed(_)), "{outcome:?}");
    assert_eq!(vendors.called_providers(), ["a", "a", "a", "b"]);
    assert_eq!((model.as_str(), progress_log.text().as_str()), ("model_b", "whole"));
    assert_eq!(progress_log.types().iter().filter(|kind| *kind == "message.restarted").count(), 3);
    // Four calls have read a million tokens each, at 3 microdollars per million.
    assert_eq!(usage.cost_pico_usd, 4 * 3_000_000);
}

#[tokio::test(start_paused = true)]
async fn permanent_failure_goes_to_the_fallback_at_once() {
    for (failure, called) in [
        (refusal(FailureClass::Authentication), vec!["a", "b"]),
        (
            refusal(FailureClass::RateLimited).with_retry_at(Some(Timestamp::now() + 600 * SECOND)),
            vec!["a", "b"],
        ),
        (
            Failure::new(FailureClass::InvalidRequest, "The model `a` does not exist"),
            vec!["a", "b"],
        ),
        (refusal(FailureClass::ContextTooLong), vec!["a", "c"]),
        (refusal(FailureClass::ContentRefused), vec!["a"]),
        (refusal(FailureClass::InvalidRequest), vec!["a"]),
    ] {
        let class = failure.class;
        let vendors = FakeVendors::new([
            ("a", vec![Behavior::Fail(failure)]),
            ("b", vec![Behavior::Answer("b")]),
            ("c", vec![Behavior::Answer("c")]),
        ]);
        let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
        let begun = Instant::now();
        run_call(&router, &command_for_a(&[("b", 100), ("c", 1_000)])).await;
        assert_eq!(vendors.called_providers(), called, "{class:?}");
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
}

#[tokio::test(start_paused = true)]
async fn retryable_failure_is_reported_when_no_model_answered() {
    let vendors = FakeVendors::new([
        ("a", vec![Behavior::Fail(refusal(FailureClass::Authentication))]),
        ("b", vec![Behavior::Fail(refusal(FailureClass::Overloaded))]),
    ]);
    let router = router(Arc::new(vendors), RETRY_POLICY);
    let failure = failed(run_call(&router, &command_for_a(&[("b", 100)])).await.0);
    assert_eq!(
        (failure.class, failure.attempts),
        (FailureClass::Overloaded, 4),
        "those of all models count"
    );
    assert_eq!(
        failure.message, "openai/a: authentication: no; openai/b: overloaded: no",
        "each says why"
    );
}

/// A command for `a` with this many fallbacks.
fn command_with_fallbacks(others: usize) -> (ModelInvoke, FakeVendors) {
    const NAMES: [&str; 8] = ["b", "c", "d", "e", "f", "g", "h", "i"];
    let names = &NAMES[..others];
    let parts =
        std::iter::once(&"a").chain(names).map(|name| (*name, vec![Behavior::Fail(down())]));
    let vendors = FakeVendors { parts: parts.collect(), calls: Arc::default() };
    (command_for_a(&names.iter().map(|name| (*name, 100)).collect::<Vec<_>>()), vendors)
}

#[tokio::test(start_paused = true)]
async fn answer_takes_at_most_five_calls_over_models_and_commands() {
    for (others, called) in
        [(0, "aaa"), (1, "aaab"), (2, "aaabc"), (3, "aabcd"), (4, "abcde"), (8, "abcde")]
    {
        let (mut command, vendors) = command_with_fallbacks(others);
        let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
        command.max_attempts = 5;
        let failure = failed(run_call(&router, &command).await.0);
        // With two models, the last call is left for the second one, which has three attempts.
        let called = if others == 1 { "aaabb" } else { called };
        assert_eq!(vendors.called_providers().concat(), called, "{others} others");
        assert_eq!(failure.attempts as usize, called.len(), "{others} others");
        // The reconciler retries with the remaining calls.
        let left = 5 - failure.attempts;
        if left > 0 {
            command.max_attempts = left;
            run_call(&router, &command).await;
        }
        assert_eq!(vendors.called_providers().len(), 5, "{others} others");
    }
}

#[tokio::test(start_paused = true)]
async fn lost_calls_count_as_calls_of_the_first_model() {
    for (others, lost, called) in [
        (0, 1, "aa"),
        (0, 2, "a"),
        (0, 4, "a"),
        (1, 1, "aabb"),
        (1, 3, "ab"),
        (1, 4, "a"),
        (3, 1, "abcd"),
        (4, 2, "abc"),
    ] {
        let (mut command, vendors) = command_with_fallbacks(others);
        command.max_attempts = 5 - lost;
        let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
        let (cancel, progress_log) = (CancelSignal::default(), RecordingProgress::default());
        let (mut progress, call) =
            (progress_log.clone(), RoutedCall { lost_calls: lost, ..routed(&command, &cancel) });
        call::answer(&router, call, &mut Deltas::new(step_context(1), &mut progress)).await;
        assert_eq!(vendors.called_providers().concat(), called, "{others} others, {lost} lost");
    }
}

#[tokio::test(start_paused = true)]
async fn calls_without_a_count_are_limited() {
    let (command, vendors) = command_with_fallbacks(8);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    assert_eq!(command.max_attempts, 0);
    run_call(&router, &command).await;
    assert_eq!(vendors.called_providers().len(), 5);
}

#[tokio::test(start_paused = true)]
async fn hedge_counts_as_a_call() {
    let (mut command, _) = command_with_fallbacks(1);
    command.hedge_after = Some(prost_types::Duration { seconds: 1, nanos: 0 });
    let slow = || vec![Behavior::AnswerAfter(3 * SECOND, "slow"), Behavior::Fail(down())];
    for (attempts, called) in [(1, "a"), (2, "ab")] {
        let vendors = FakeVendors::new([("a", slow()), ("b", slow())]);
        command.max_attempts = attempts;
        run_call(&router(Arc::new(vendors.clone()), RETRY_POLICY), &command).await;
        assert_eq!(vendors.called_providers().concat(), called, "{attempts}");
    }
}

#[tokio::test(start_paused = true)]
async fn fifth_failure_opens_the_breaker_and_cooldown_allows_a_probe() {
    let mut does = vec![Behavior::Fail(down()); 5];
    does.push(Behavior::AnswerAfter(3 * SECOND, "well again"));
    let vendors = FakeVendors::new([("a", does)]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let first = failed(run_call(&router, &command_for_a(&[])).await.0);
    assert_eq!((first.class, first.attempts), (FailureClass::Transient, 3));
    let second = failed(run_call(&router, &command_for_a(&[])).await.0);
    assert_eq!(
        (second.class, second.attempts),
        (FailureClass::Overloaded, 2),
        "the breaker opened between its attempts"
    );
    assert_eq!(vendors.called_providers().len(), 5);

    let begun = Instant::now();
    let refused = failed(run_call(&router, &command_for_a(&[])).await.0);
    assert_eq!((refused.class, refused.attempts), (FailureClass::Overloaded, 0), "it costs no try");
    assert!(refused.requested_delay(Timestamp::now()).is_some_and(|wait| wait <= 10 * SECOND));
    assert_eq!(
        (begun.elapsed(), vendors.called_providers().len()),
        (Duration::ZERO, 5),
        "nothing was called"
    );

    tokio::time::advance(10 * SECOND).await;
    let (probing, command) = (router.clone(), command_for_a(&[]));
    let probe = tokio::spawn(async move { run_call(&probing, &command).await.0 });
    sleep(SECOND).await;
    let meanwhile = failed(run_call(&router, &command_for_a(&[])).await.0);
    assert_eq!(
        (meanwhile.attempts, vendors.called_providers().len()),
        (0, 6),
        "one probe and no more"
    );
    assert!(matches!(probe.await.expect("no panic"), Outcome::Completed(_)));
    assert!(matches!(run_call(&router, &command_for_a(&[])).await.0, Outcome::Completed(_)));
    assert_eq!(vendors.called_providers().len(), 7);
}

#[tokio::test(start_paused = true)]
async fn healthy_refusals_do_not_open_the_breaker() {
    for class in
        [FailureClass::Authentication, FailureClass::InvalidRequest, FailureClass::RateLimited]
    {
        let vendors = FakeVendors::new([("a", vec![Behavior::Fail(refusal(class))])]);
        let router = router(Arc::new(vendors.clone()), Policy { attempts: 1, ..RETRY_POLICY });
        for calls in 1..=8 {
            run_call(&router, &command_for_a(&[])).await;
            assert_eq!(vendors.called_providers().len(), calls, "{class:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn open_breaker_sends_the_call_to_the_fallback_at_once() {
    let vendors =
        FakeVendors::new([("a", vec![Behavior::Fail(down())]), ("b", vec![Behavior::Answer("b")])]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    for _ in 0..2 {
        run_call(&router, &command_for_a(&[("b", 100)])).await;
    }
    let begun = Instant::now();
    let (outcome, _, model, _) = run_call(&router, &command_for_a(&[("b", 100)])).await;
    assert!(matches!(outcome, Outcome::Completed(_)));
    assert_eq!((model.as_str(), begun.elapsed()), ("model_b", Duration::ZERO));
    assert_eq!(vendors.called_providers().iter().filter(|name| *name == "a").count(), 5);
}

#[tokio::test(start_paused = true)]
async fn silent_model_is_hedged_and_first_answer_wins() {
    let hedged = |after: u64| ModelInvoke {
        hedge_after: Some(prost_types::Duration {
            seconds: i64::try_from(after).expect("small"),
            nanos: 0,
        }),
        ..command_for_a(&[("b", 100)])
    };
    let vendors = FakeVendors::new([
        ("a", vec![Behavior::AnswerAfter(20 * SECOND, "slow")]),
        ("b", vec![Behavior::AnswerAfter(SECOND, "quick")]),
    ]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let begun = Instant::now();
    let (_, usage, model, progress_log) = run_call(&router, &hedged(3)).await;
    assert_eq!(
        (model.as_str(), progress_log.text().as_str(), begun.elapsed()),
        ("model_b", "quick", 4 * SECOND)
    );
    assert_eq!(usage.input_tokens, 2_000_000, "what the loser had read is paid for");
    assert_eq!(progress_log.types(), ["message.delta"], "nobody saw that two were asked");

    let begun = Instant::now();
    let (_, _, model, progress_log) = run_call(&router, &hedged(19)).await;
    assert_eq!(
        (model.as_str(), progress_log.text().as_str()),
        ("model_a", "slow"),
        "the first may still win"
    );
    assert_eq!(begun.elapsed(), 20 * SECOND);
    assert_eq!(vendors.called_providers(), ["a", "b", "a", "b"]);
    run_call(&router, &hedged(21)).await;
    assert_eq!(vendors.called_providers().len(), 5, "in time, nobody else is asked");
}

#[tokio::test(start_paused = true)]
async fn hedge_continues_alone_when_the_model_fails() {
    let vendors = FakeVendors::new([
        ("a", vec![Behavior::AnswerAfter(5 * SECOND, "never seen"), Behavior::Fail(down())]),
        ("b", vec![Behavior::AnswerAfter(4 * SECOND, "b")]),
    ]);
    let router = router(Arc::new(vendors), RETRY_POLICY);
    let mut command = command_for_a(&[("b", 100)]);
    command.hedge_after = Some(prost_types::Duration { seconds: 2, nanos: 0 });
    let (_, _, model, _) = run_call(&router, &command).await;
    assert_eq!(model, "model_a");
    let (_, _, model, progress_log) = run_call(&router, &command).await;
    // It fails before each hedge starts, until it is the fallback's turn.
    assert_eq!((model.as_str(), progress_log.text().as_str()), ("model_b", "b"));
}

#[tokio::test(start_paused = true)]
async fn failed_hedge_does_not_affect_the_model() {
    let vendors = FakeVendors::new([
        ("a", vec![Behavior::AnswerAfter(9 * SECOND, "a")]),
        ("b", vec![Behavior::Fail(refusal(FailureClass::Authentication))]),
    ]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let mut command = command_for_a(&[("b", 100)]);
    command.hedge_after = Some(prost_types::Duration { seconds: 2, nanos: 0 });
    let (outcome, _, model, _) = run_call(&router, &command).await;
    assert!(matches!(outcome, Outcome::Completed(_)), "{outcome:?}");
    assert_eq!(
        (model.as_str(), vendors.called_providers()),
        ("model_a", vec!["a".to_owned(), "b".to_owned()])
    );
}

#[tokio::test(start_paused = true)]
async fn refused_key_is_replaced_by_the_next_at_once() {
    for class in [FailureClass::Authentication, FailureClass::RateLimited] {
        let vendors =
            FakeVendors::new([("a", vec![Behavior::Fail(refusal(class)), Behavior::Answer("x")])]);
        let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
        let mut command = command_for_a(&[]);
        let provider = command.provider.as_mut().expect("set");
        provider.api_key = Some(seal("a", "sk-one"));
        provider.additional_api_keys = vec![seal("a", "sk-two-longer")];
        let begun = Instant::now();
        let (outcome, ..) = run_call(&router, &command).await;
        assert!(matches!(outcome, Outcome::Completed(_)), "{outcome:?}");
        assert_eq!(begun.elapsed(), Duration::ZERO);
        run_call(&router, &command).await;
        assert_eq!(
            vendors.keys(),
            ["sk-one", "sk-two-longer", "sk-two-longer"],
            "the refused one is left out"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn failure_is_final_when_every_key_is_refused() {
    let vendors =
        FakeVendors::new([("a", vec![Behavior::Fail(refusal(FailureClass::Authentication))])]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let mut command = command_for_a(&[]);
    let provider = command.provider.as_mut().expect("set");
    provider.api_key = Some(seal("a", "sk-one"));
    provider.additional_api_keys = vec![seal("a", "sk-two-longer")];
    let failure = failed(run_call(&router, &command).await.0);
    assert_eq!((failure.class, failure.attempts), (FailureClass::Authentication, 1));
    assert_eq!(vendors.keys(), ["sk-one", "sk-two-longer"]);
}

/// Keys of `a`: one under an unknown master key, and one that opens.
fn with_unopenable_key(command: &mut ModelInvoke) {
    let provider = command.provider.as_mut().expect("set");
    provider.api_key = Some(SealedSecret { key_id: "retired".into(), ..seal("a", "sk-one") });
    provider.additional_api_keys = vec![seal("a", "sk-two-longer")];
}

#[tokio::test(start_paused = true)]
async fn unopenable_key_is_replaced_by_the_next_at_once() {
    let vendors = FakeVendors::new([("a", vec![Behavior::Answer("x")])]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let mut command = command_for_a(&[]);
    with_unopenable_key(&mut command);
    let begun = Instant::now();
    for _ in 0..2 {
        let (outcome, ..) = run_call(&router, &command).await;
        assert!(matches!(outcome, Outcome::Completed(_)), "{outcome:?}");
    }
    assert_eq!(begun.elapsed(), Duration::ZERO);
    assert_eq!(vendors.keys(), ["sk-two-longer", "sk-two-longer"]);
    // As the only key it ends the call with the reason.
    command.provider.as_mut().expect("set").additional_api_keys.clear();
    let failure = failed(run_call(&router, &command).await.0);
    assert_eq!((failure.class, failure.attempts), (FailureClass::Configuration, 0));
    assert!(failure.message.contains("`retired`"), "{failure}");
}

#[tokio::test(start_paused = true)]
async fn unopenable_key_does_not_hide_the_failure_of_another() {
    let limited = Behavior::Fail(
        refusal(FailureClass::RateLimited).with_retry_at(Some(Timestamp::now() + 5 * SECOND)),
    );
    let vendors = FakeVendors::new([("a", vec![limited, Behavior::Answer("x")])]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let mut command = command_for_a(&[]);
    with_unopenable_key(&mut command);
    let (outcome, ..) = run_call(&router, &command).await;
    assert!(matches!(outcome, Outcome::Completed(_)), "{outcome:?}");
    assert_eq!(vendors.called_providers(), ["a", "a"], "after a pause it is asked again");
}

#[tokio::test(start_paused = true)]
async fn cancel_ends_the_wait_for_a_key() {
    let vendors = FakeVendors::new([("a", vec![Behavior::AnswerAfter(100 * SECOND, "x")])]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let mut command = command_for_a(&[]);
    command.provider.as_mut().expect("set").max_concurrency = 1;
    let (first, occupying) = (router.clone(), command.clone());
    let first = tokio::spawn(async move { run_call(&first, &occupying).await.0 });
    sleep(SECOND).await;
    let cancel = CancelSignal::default();
    let canceller = cancel.clone();
    tokio::spawn(async move {
        sleep(7 * SECOND).await;
        canceller.cancel("suspended");
    });
    let begun = Instant::now();
    let (outcome, ..) = run_call_until(&router, &command, &cancel).await;
    assert_eq!(outcome, Outcome::Cancelled { reason: "suspended".into(), partial: Vec::new() });
    assert_eq!((begun.elapsed(), vendors.called_providers().len()), (7 * SECOND, 1));
    assert!(matches!(first.await.expect("no panic"), Outcome::Completed(_)));
}

#[tokio::test(start_paused = true)]
async fn delays_are_drawn_from_the_upper_half_of_a_doubling_bound() {
    let mut drawn = [0; 2];
    for _ in 0..200 {
        let vendors =
            FakeVendors::new([("a", vec![Behavior::Fail(refusal(FailureClass::RateLimited))])]);
        let router = router(Arc::new(vendors), Policy { attempts: 2, ..RETRY_POLICY });
        let begun = Instant::now();
        run_call(&router, &command_for_a(&[])).await;
        assert!((SECOND / 2..=SECOND).contains(&begun.elapsed()), "{:?}", begun.elapsed());
        drawn[usize::from(begun.elapsed() > SECOND * 3 / 4)] += 1;
    }
    assert!(drawn.iter().all(|times| *times > 50), "they spread over it: {drawn:?}");
}

/// A sink whose client has already received the chunks.
#[derive(Default)]
struct CommittedSink(Vec<Chunk>);

#[async_trait]
impl Sink for CommittedSink {
    fn begin(&mut self, _: &Request) {}

    async fn push(&mut self, chunk: Chunk) -> Result<(), Failure> {
        self.0.push(chunk);
        Ok(())
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    async fn flush(&mut self) {}

    async fn discard(&mut self, _: &Failure) -> bool {
        self.0.is_empty()
    }
}

#[tokio::test(start_paused = true)]
async fn committed_answer_is_not_retried() {
    let vendors = FakeVendors::new([
        ("a", vec![Behavior::Fail(down()), Behavior::BreakAfter("half", down())]),
        ("b", vec![Behavior::Answer("b")]),
    ]);
    let router = router(Arc::new(vendors.clone()), RETRY_POLICY);
    let cancel = CancelSignal::default();
    let mut sink = CommittedSink::default();
    let outcome = router.call(routed(&command_for_a(&[("b", 100)]), &cancel), &mut sink).await;
    assert!(matches!(outcome.end, CallEnd::Failed(failure) if failure.attempts == 2));
    assert_eq!((vendors.called_providers().len(), outcome.model_id.as_str()), (2, "model_a"));
}

#[test]
fn weights_decide_only_within_an_order() {
    let route = |name: &str, order, weight| {
        let (provider, model) = target(name, 1);
        Route { provider: Some(provider), model: Some(model), order, weight }
    };
    let (provider, model) = target("a", 1);
    let first = Target { provider, model };
    let routes = [route("d", 2, 0), route("b", 1, 30), route("c", 1, 70)];
    let names = |random: f64| -> Vec<String> {
        ordered_targets(first.clone(), &routes, || random)
            .into_iter()
            .map(|target| target.model.vendor_model.clone())
            .collect()
    };
    assert_eq!(names(0.29), ["a", "b", "c", "d"]);
    assert_eq!(names(0.31), ["a", "c", "b", "d"]);
    assert_eq!(names(1.0), ["a", "b", "c", "d"]);
}

proptest! {
    #[test]
    fn each_fallback_is_tried_once_for_any_draw(
        routes in prop::collection::vec((0_u32..4, 0_u32..1_001), 0..9),
        drawn in prop::collection::vec(0.0_f64..1.0, 9),
    ) {
        let routes: Vec<Route> = routes.into_iter().enumerate().map(|(at, (order, weight))| {
            let (provider, model) = target(&at.to_string(), 1);
            Route { provider: Some(provider), model: Some(model), order, weight }
        }).collect();
        let mut drawn = drawn.into_iter();
        let targets = ordered_targets(Target::default(), &routes, || drawn.next().unwrap_or(0.5));
        let orders: Vec<u32> = targets[1..].iter().map(|target| {
            let at: usize = target.model.vendor_model.parse().expect("a number");
            routes[at].order
        }).collect();
        prop_assert!(orders.is_sorted());
        let mut names: Vec<&str> = targets[1..].iter().map(|target| target.model.vendor_model.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        prop_assert_eq!(names.len(), routes.len());
    }
}

#[tokio::test(start_paused = true)]
async fn calls_are_counted_by_model_and_outcome() {
    let metrics = construct_runtime::metrics::Metrics::new("construct-providers").expect("a page");
    let vendors = FakeVendors::new([
        (
            "a",
            vec![
                Behavior::Fail(down()),
                Behavior::AnswerAfter(2 * SECOND, "a"),
                Behavior::Fail(down()),
            ],
        ),
        ("b", vec![Behavior::Answer("b")]),
    ]);
    let router = Router::with_meter(
        Arc::new(vendors),
        keys(),
        RETRY_POLICY,
        Breakers::new().0,
        &metrics.meter("construct-providers"),
    );
    for _ in 0..4 {
        run_call(&router, &command_for_a(&[("b", 100)])).await;
    }
    let page = metrics.text().expect("text");
    let value = |name: &str, labels: &[(&str, &str)]| -> f64 {
        let fits = |line: &&str| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{'))
                && labels
                    .iter()
                    .all(|(label, value)| line.contains(&format!("{label}=\"{value}\"")))
                && (line.contains("error_type=")
                    == labels.iter().any(|(label, _)| *label == "error_type"))
        };
        let lines: Vec<&str> = page.lines().filter(fits).collect();
        let [line] = lines[..] else { panic!("{name} {labels:?}: {lines:?} in\n{page}") };
        line.rsplit(' ').next().and_then(|value| value.parse().ok()).expect("a number")
    };
    let (a, b) = (("gen_ai_request_model", "a"), ("gen_ai_request_model", "b"));
    let common = [
        ("gen_ai_operation_name", "chat"),
        ("gen_ai_provider_name", "openai"),
        ("construct_provider_id", "a"),
    ];
    // It fails once, answers, and then fails until its breaker opens.
    let duration = "gen_ai_client_operation_duration_seconds";
    assert_eq!(value(&format!("{duration}_count"), &[a, common[0], common[1], common[2]]), 1.0);
    assert_eq!(value(&format!("{duration}_sum"), &[a]), 2.0);
    assert_eq!(value(&format!("{duration}_count"), &[a, ("error_type", "transient")]), 6.0);
    assert_eq!(value(&format!("{duration}_count"), &[b]), 3.0);
    assert_eq!(value("gen_ai_client_operation_time_to_first_chunk_seconds_sum", &[a]), 2.0);
    assert_eq!(
        value("gen_ai_client_token_usage_sum", &[b, ("gen_ai_token_type", "input")]),
        3_000_000.0
    );
    // A million tokens at three millionths of a dollar.
    assert!((value("construct_providers_cost_total", &[b]) - 3.0 * 3e-6).abs() < 1e-12);
    assert_eq!(value("construct_providers_retries_total", &[a, ("error_type", "transient")]), 5.0);
    assert_eq!(
        value("construct_providers_fallbacks_total", &[a, ("error_type", "transient")]),
        1.0
    );
    assert_eq!(
        value("construct_providers_fallbacks_total", &[a, ("error_type", "overloaded")]),
        2.0
    );
    assert_eq!(value("construct_providers_breaker_state", &[a]), 2.0);
    assert_eq!(value("construct_providers_breaker_state", &[b]), 0.0);
    assert!(!page.contains("task_") && !page.contains("step_"), "nothing is told apart by task");
}

#[tokio::test(start_paused = true)]
async fn calls_waiting_for_a_key_are_counted() {
    let metrics = construct_runtime::metrics::Metrics::new("construct-providers").expect("a page");
    let vendors = FakeVendors::new([("a", vec![Behavior::AnswerAfter(4 * SECOND, "a")])]);
    let router = Router::with_meter(
        Arc::new(vendors),
        keys(),
        RETRY_POLICY,
        Breakers::new().0,
        &metrics.meter("construct-providers"),
    );
    let mut command = command_for_a(&[]);
    command.provider.as_mut().expect("set").max_concurrency = 1;
    let both = [(router.clone(), command.clone()), (router, command)];
    let both = both
        .map(|(router, command)| tokio::spawn(async move { run_call(&router, &command).await.0 }));
    sleep(SECOND).await;
    let line = |name: &str| {
        let page = metrics.text().expect("text");
        let found =
            page.lines().find(|line| line.starts_with(&format!("{name}{{"))).map(str::to_owned);
        found.unwrap_or_else(|| panic!("no {name} in\n{page}"))
    };
    assert!(line("construct_providers_key_waiting").ends_with(" 1"));
    for call in both {
        assert!(matches!(call.await.expect("no panic"), Outcome::Completed(_)));
    }
    assert!(line("construct_providers_key_waiting").ends_with(" 0"));
    assert!(line("construct_providers_key_wait_seconds_sum").ends_with(" 4"));
    assert!(
        line("construct_providers_key_wait_seconds_count").ends_with(" 1"),
        "the first one had not to wait"
    );
}
