use futures::FutureExt as _;

use super::*;

const MINUTE: Duration = Duration::from_secs(60);

fn provider(keys: usize) -> Provider {
    let key = |number: u8| SealedSecret {
        key_id: "k".into(),
        nonce: vec![number],
        ciphertext: vec![number],
    };
    let mut keys = (1..=u8::try_from(keys).expect("few")).map(key);
    Provider {
        id: "provider_1".into(),
        api_key: keys.next(),
        additional_api_keys: keys.collect(),
        ..Provider::default()
    }
}

fn want(provider: &Provider) -> KeyRequest<'_> {
    KeyRequest {
        provider,
        vendor_model: "m",
        tokens: 0,
        excluded: &[],
        max_wait: 10 * MINUTE,
        max_vendor_wait: Duration::from_secs(20),
    }
}

fn refused(class: FailureClass, seconds: Option<u64>) -> Failure {
    let at = seconds.map(|seconds| clock::now() + Duration::from_secs(seconds));
    Failure::new(class, "no").with_retry_at(at)
}

#[tokio::test(start_paused = true)]
async fn calls_use_the_least_busy_key_then_the_least_recent() {
    let (keys, provider) = (Keys::default(), provider(3));
    let mut leases = Vec::new();
    for _ in 0..6 {
        leases.push(keys.lease(&want(&provider)).await.expect("free"));
    }
    let used: Vec<u8> = leases.iter().map(|lease| lease.key()[0]).collect();
    assert_eq!(used, [1, 2, 3, 1, 2, 3]);
    drop(leases.remove(4));
    assert_eq!(keys.lease(&want(&provider)).await.expect("free").key()[0], 2);
}

#[tokio::test(start_paused = true)]
async fn calls_beyond_the_concurrency_wait_in_order() {
    let keys = Keys::default();
    let provider = Provider { max_concurrency: 1, ..provider(1) };
    let first = keys.lease(&want(&provider)).await.expect("free");
    let (second_want, third_want) = (want(&provider), want(&provider));
    let mut second = std::pin::pin!(keys.lease(&second_want));
    let mut third = std::pin::pin!(keys.lease(&third_want));
    assert!(second.as_mut().now_or_never().is_none());
    assert!(third.as_mut().now_or_never().is_none());
    drop(first);
    assert!(third.as_mut().now_or_never().is_none(), "the third is not before the second");
    let second = second.await.expect("its turn");
    assert!(third.as_mut().now_or_never().is_none());
    drop(second);
    third.await.expect("its turn");
}

#[tokio::test(start_paused = true)]
async fn requests_and_tokens_are_spread_over_a_minute() {
    let keys = Keys::default();
    let provider = Provider { requests_per_minute: 60, tokens_per_minute: 6_000, ..provider(1) };
    let begun = Instant::now();
    for _ in 0..61 {
        keys.lease(&want(&provider)).await.expect("within its patience");
    }
    assert_eq!(
        begun.elapsed().as_millis().div_ceil(100),
        10,
        "the last waited for a sixtieth of a minute"
    );

    tokio::time::advance(MINUTE).await;
    let large = KeyRequest { tokens: 6_000, ..want(&provider) };
    let mut lease = keys.lease(&large).await.expect("the bucket is full");
    lease.settle_tokens(1_000);
    let begun = Instant::now();
    let small = KeyRequest { tokens: 5_000, ..want(&provider) };
    keys.lease(&small).await.expect("what was not used came back");
    assert_eq!(begun.elapsed(), Duration::ZERO);
    keys.lease(&KeyRequest { tokens: 100, ..want(&provider) }).await.expect("within its patience");
    assert_eq!(begun.elapsed().as_millis().div_ceil(100), 10);
}

#[tokio::test(start_paused = true)]
async fn excessive_wait_fails_with_a_retry_time() {
    let keys = Keys::default();
    let provider = Provider { requests_per_minute: 1, ..provider(1) };
    keys.lease(&want(&provider)).await.expect("free");
    let impatient = KeyRequest { max_wait: Duration::from_secs(5), ..want(&provider) };
    let begun = Instant::now();
    let failure = keys.lease(&impatient).await.expect_err("too long");
    assert_eq!(failure.class, FailureClass::RateLimited);
    assert_eq!(begun.elapsed(), Duration::ZERO, "nobody waits for what cannot come in time");
    let wait = failure.requested_delay(clock::now()).expect("it says when");
    assert!((Duration::from_secs(58)..=MINUTE).contains(&wait), "{wait:?}");
}

#[tokio::test(start_paused = true)]
async fn refused_key_is_skipped_for_five_minutes_unless_it_is_alone() {
    let (keys, two) = (Keys::default(), provider(2));
    let lease = keys.lease(&want(&two)).await.expect("free");
    assert!(lease.on_failure(&refused(FailureClass::Authentication, None), true));
    drop(lease);
    for _ in 0..3 {
        assert_eq!(keys.lease(&want(&two)).await.expect("free").key()[0], 2);
    }
    tokio::time::advance(REFUSED_KEY_COOLDOWN).await;
    assert_eq!(keys.lease(&want(&two)).await.expect("free").key()[0], 1);

    let (keys, one) = (Keys::default(), provider(1));
    for _ in 0..2 {
        let lease = keys.lease(&want(&one)).await.expect("there is no other");
        lease.on_failure(&refused(FailureClass::Authentication, None), false);
    }
}

#[tokio::test(start_paused = true)]
async fn limited_key_rests_until_reset_for_the_limited_model() {
    let (keys, two) = (Keys::default(), provider(2));
    let lease = keys.lease(&want(&two)).await.expect("free");
    lease.on_failure(&refused(FailureClass::RateLimited, Some(600)), true);
    drop(lease);
    for _ in 0..2 {
        assert_eq!(keys.lease(&want(&two)).await.expect("free").key()[0], 2);
    }
    let other = KeyRequest { vendor_model: "other", ..want(&two) };
    assert_eq!(keys.lease(&other).await.expect("free").key()[0], 1);

    let lease = keys.lease(&want(&two)).await.expect("free");
    lease.observer().on_headroom(Headroom { exhausted_for: Some(Duration::from_secs(15)) });
    drop(lease);
    let begun = Instant::now();
    assert_eq!(keys.lease(&want(&two)).await.expect("it is worth waiting").key()[0], 2);
    assert_eq!(begun.elapsed().as_secs(), 15);
    let lease = keys.lease(&want(&two)).await.expect("free");
    lease.observer().on_headroom(Headroom { exhausted_for: Some(Duration::from_secs(30)) });
    let begun = Instant::now();
    keys.lease(&want(&two)).await.expect_err("longer than it is worth waiting here");
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn provider_without_key_has_limits() {
    let keys = Keys::default();
    let provider = Provider { max_concurrency: 1, ..provider(0) };
    let lease = keys.lease(&want(&provider)).await.expect("free");
    assert!(lease.sealed.is_none());
    let impatient = KeyRequest { max_wait: Duration::ZERO, ..want(&provider) };
    keys.lease(&impatient).await.expect_err("one is under way");
    drop(lease);
    keys.lease(&impatient).await.expect("free again");
}

#[tokio::test(start_paused = true)]
async fn changed_limits_apply_at_once() {
    let keys = Keys::default();
    let mut provider = Provider { requests_per_minute: 1, ..provider(1) };
    keys.lease(&want(&provider)).await.expect("free");
    provider.requests_per_minute = 0;
    let begun = Instant::now();
    keys.lease(&want(&provider)).await.expect("no limit any more");
    assert_eq!(begun.elapsed(), Duration::ZERO);
}
