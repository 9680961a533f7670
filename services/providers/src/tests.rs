//! The common behavior of all vendors reached over HTTP, tested against a server that speaks their
//! wire formats.

mod content;
mod counts;
mod vectors;
pub(crate) mod wires;

use std::{
    cell::RefCell,
    collections::{HashMap, VecDeque},
    fmt::Debug,
    sync::Arc,
    time::Duration,
};

use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::{self as mesh, FailureClass},
    v1::ModelProviderType,
};
use construct_tests::vendor::{Reply, VendorServer, anthropic};
use secrecy::SecretString;
use tokio::time::Instant;

use self::wires::{KEY, Wire};
use crate::{
    answer::CompletedAnswer,
    call::{
        Outcome,
        tests::{NO_DELAY_POLICY, command, routed, router, run},
    },
    cancels::CancelSignal,
    delta::tests::RecordingProgress,
    failure::Failure,
    framing::Framing,
    http::{Dialect, Http, Timeouts},
    local::LocalModels,
    vendor::{Chunk, Vendor, VendorFactory as _, Vendors},
};

pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(10);

thread_local! {
    /// A client is expensive to create, because it reads the machine's certificate authorities. A
    /// test has a thread and a runtime of its own, to which a client's connections are bound.
    static CLIENTS: RefCell<HashMap<Duration, Http>> = RefCell::default();
}

/// The chunks that `D` reads from a stream given in pieces.
pub(crate) fn read<'a, D: Dialect + Default>(
    pieces: impl IntoIterator<Item = &'a [u8]>,
) -> Result<Vec<Chunk>, Failure> {
    let (mut framing, mut wire) = (D::Framing::default(), D::default());
    let (mut events, mut chunks) = (VecDeque::new(), VecDeque::new());
    let damaged = |error: crate::framing::Error| Failure::transient(error.to_string());
    for piece in pieces {
        framing.push(piece, &mut events).map_err(damaged)?;
        while let Some(event) = events.pop_front() {
            wire.read(&event, &mut chunks)?;
        }
    }
    if !wire.is_complete() {
        framing.finish(&mut events).map_err(damaged)?;
        while let Some(event) = events.pop_front() {
            wire.read(&event, &mut chunks)?;
        }
    }
    wire.end(&mut chunks)?;
    Ok(chunks.into())
}

/// Checks that a complete stream is read the same wherever its bytes are split, and returns its
/// chunks.
pub(crate) fn read_at_every_split<D: Dialect + Default>(stream: &[u8]) -> Vec<Chunk> {
    let whole = read::<D>([stream]).expect("the stream is whole");
    for at in 0..=stream.len() {
        let (left, right) = stream.split_at(at);
        assert_eq!(read::<D>([left, right]).as_ref(), Ok(&whole), "split at {at}");
    }
    assert_eq!(read::<D>(stream.chunks(1)).as_ref(), Ok(&whole), "byte by byte");
    whole
}

/// Calls `attempt` until it returns `Ok`; panics with the last `Err` after a timeout.
pub(crate) async fn until<T, E: Debug>(
    what: &str,
    mut attempt: impl AsyncFnMut() -> Result<T, E>,
) -> T {
    let deadline = Instant::now() + TEST_TIMEOUT;
    loop {
        match attempt().await {
            Ok(value) => return value,
            Err(last) if Instant::now() >= deadline => panic!("waited for {what}; last: {last:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Short timeouts, so that tests of silence are quick, and long enough for a busy machine.
pub(crate) fn vendors(idle_timeout: Duration) -> Vendors {
    crate::install_crypto();
    // The idle timeout only: a busy machine may need time for the first byte.
    let timeouts = Timeouts { connect: TEST_TIMEOUT, first_byte: TEST_TIMEOUT, idle: idle_timeout };
    let make = || Http::new(timeouts);
    let http =
        CLIENTS.with_borrow_mut(|clients| clients.entry(idle_timeout).or_insert_with(make).clone());
    Vendors { http, scripted_attempts: Arc::default(), local: LocalModels::new(None) }
}

pub(crate) fn open(kind: ModelProviderType, url: &str, idle_timeout: Duration) -> Arc<dyn Vendor> {
    // Only Bedrock reads it: a loopback address contains no region.
    let base_url = if kind == ModelProviderType::Bedrock {
        format!("{url}/?region=us-east-1")
    } else {
        url.to_owned()
    };
    let provider = mesh::Provider { r#type: kind.into(), base_url, ..mesh::Provider::default() };
    vendors(idle_timeout)
        .open(&provider, Some(SecretString::from(KEY)), None)
        .expect("the provider is valid")
        .into()
}

/// A provider with sealed keys.
pub(crate) fn provider(wire: Wire, url: &str, keys: &[&str]) -> mesh::Provider {
    let kind = wire.provider();
    let base_url = if kind == ModelProviderType::Bedrock {
        format!("{url}/?region=us-east-1")
    } else {
        url.to_owned()
    };
    let mut sealed = keys.iter().map(|key| crate::sealed_key::tests::seal("provider_1", key));
    mesh::Provider {
        id: "provider_1".into(),
        r#type: kind.into(),
        base_url,
        api_key: sealed.next(),
        additional_api_keys: sealed.collect(),
        ..mesh::Provider::default()
    }
}

async fn call(wire: Wire, server: &VendorServer) -> (Outcome, Usage, RecordingProgress) {
    let progress_log = RecordingProgress::default();
    let vendor = open(wire.provider(), &server.url(), TEST_TIMEOUT);
    let (outcome, usage) =
        run(&vendor, NO_DELAY_POLICY, &CancelSignal::default(), &progress_log).await;
    (outcome, usage, progress_log)
}

fn failure(outcome: Outcome) -> Failure {
    match outcome {
        Outcome::Failed(failure) => failure,
        other => panic!("not failed: {other:?}"),
    }
}

pub(crate) fn completed(outcome: Outcome) -> CompletedAnswer {
    match outcome {
        Outcome::Completed(completed) => completed,
        other => panic!("not completed: {other:?}"),
    }
}

#[tokio::test]
async fn answer_is_the_same_in_every_encoding() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let stream = wire.answer("Grüße — 😀!");
        let mut replies = vec![
            wire.reply(&stream),
            wire.reply(&stream).dripping(1, Duration::ZERO),
            wire.reply(&stream).dripping(37, Duration::from_millis(1)),
            wire.reply(&stream).gzipped(),
            wire.reply(&stream).gzipped().dripping(1, Duration::ZERO),
        ];
        if let Ok(text) = str::from_utf8(&stream) {
            replies.push(
                wire.reply(text.replace('\n', "\r\n").as_bytes()).dripping(3, Duration::ZERO),
            );
        }
        let mut answers = Vec::new();
        for reply in replies {
            server.reply(reply);
            let (outcome, usage, progress_log) = call(wire, &server).await;
            assert_eq!(progress_log.text(), "Grüße — 😀!", "{wire:?}");
            answers.push((completed(outcome), usage));
        }
        assert!(answers.windows(2).all(|pair| pair[0] == pair[1]), "{wire:?}: {answers:?}");
    }
}

#[tokio::test]
async fn stream_cut_anywhere_is_never_an_answer() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let stream = wire.answer("It is 42.");
        for at in (0..wire.whole_from(&stream)).step_by(97) {
            server.reply(wire.reply(&stream).ended_after(at)).reply(wire.reply(&stream));
            let (outcome, _, progress_log) = call(wire, &server).await;
            assert_eq!(progress_log.text(), "It is 42.", "{wire:?} cut at {at}");
            completed(outcome);
        }
    }
}

#[tokio::test]
async fn every_error_class_is_recognized() {
    for wire in Wire::ALL {
        for (status, class) in [
            (400, FailureClass::InvalidRequest),
            (400, FailureClass::ContextTooLong),
            (wire.status_of_refused(), FailureClass::ContentRefused),
            (401, FailureClass::Authentication),
            (403, FailureClass::Authentication),
            (404, FailureClass::InvalidRequest),
            (413, FailureClass::ContextTooLong),
            (429, FailureClass::RateLimited),
            (500, FailureClass::Transient),
            (529, FailureClass::Overloaded),
        ] {
            let server = VendorServer::start().await;
            for _ in 0..3 {
                server.reply(wire.error(status, class));
            }
            let (outcome, usage, _) = call(wire, &server).await;
            let failure = failure(outcome);
            assert_eq!(
                (failure.class, failure.http_status),
                (class, status),
                "{wire:?}: {}",
                failure.message
            );
            let tries = if failure.is_retryable() { 3 } else { 1 };
            assert_eq!(server.requests().len(), tries, "{wire:?} {status}");
            assert!(usage.is_zero(), "a refused request costs nothing");
        }
    }
}

#[tokio::test]
async fn foreign_bodies_are_classified_by_status() {
    for wire in Wire::ALL {
        for (reply, class) in [
            (Reply::text(502, "<html>Bad Gateway</html>"), FailureClass::Transient),
            (Reply::text(503, "no backend"), FailureClass::Overloaded),
            (
                Reply::text(302, "").header("location", "http://127.0.0.1:1/"),
                FailureClass::Configuration,
            ),
            (Reply::text(404, "404 page not found"), FailureClass::InvalidRequest),
            (
                Reply::json(200, &serde_json::json!({"object": "chat.completion"})),
                FailureClass::InvalidRequest,
            ),
        ] {
            let server = VendorServer::start().await;
            for _ in 0..3 {
                server.reply(reply.clone());
            }
            let failure = failure(call(wire, &server).await.0);
            assert_eq!(failure.class, class, "{wire:?}: {}", failure.message);
            assert!(!failure.message.contains("<html>"));
        }
    }
}

#[tokio::test]
async fn retry_after_reaches_the_result() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        server.reply(wire.error(429, FailureClass::RateLimited).header("retry-after", "600"));
        let failure = failure(call(wire, &server).await.0);
        let wait =
            failure.requested_delay(jiff::Timestamp::now()).expect("the vendor named a time");
        assert!((Duration::from_secs(590)..=Duration::from_secs(600)).contains(&wait), "{wait:?}");
        assert_eq!(server.requests().len(), 1, "nobody waits ten minutes within a call");
    }
}

#[tokio::test]
async fn broken_connection_is_retried_and_visible_text_is_voided() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let stream = wire.answer("The answer is 42, and that is certain.");
        server
            .reply(wire.reply(&stream).broken_after(stream.len() * 2 / 3))
            .reply(wire.reply(&stream));
        let (outcome, usage, progress_log) = call(wire, &server).await;
        completed(outcome);
        assert!(
            progress_log.types().contains(&"message.restarted".to_owned()),
            "{wire:?}: {:?}",
            progress_log.types()
        );
        assert_eq!(progress_log.text(), "The answer is 42, and that is certain.");
        assert!(usage.output_tokens > 15, "the broken try was not free: {usage:?}");
    }
}

#[tokio::test]
async fn silent_vendor_times_out() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let stream = wire.answer("x");
        for _ in 0..3 {
            server.reply(wire.reply(&stream).silent_after(stream.len() / 2));
        }
        let vendor = open(wire.provider(), &server.url(), Duration::from_millis(300));
        let (outcome, _) =
            run(&vendor, NO_DELAY_POLICY, &CancelSignal::default(), &RecordingProgress::default())
                .await;
        let failure = failure(outcome);
        assert_eq!(failure.class, FailureClass::Transient);
        assert!(failure.message.contains("sent nothing"), "{}", failure.message);
    }
}

/// The failure with a server that accepts connections and never sends a byte, where all other
/// timeouts are long.
async fn silence(scheme: &str, timeouts: Timeouts) -> Failure {
    crate::install_crypto();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let url = format!("{scheme}://{}", listener.local_addr().expect("it has an address"));
    let provider = mesh::Provider {
        r#type: ModelProviderType::Anthropic.into(),
        base_url: url,
        ..mesh::Provider::default()
    };
    let vendors = Vendors {
        http: Http::new(timeouts),
        scripted_attempts: Arc::default(),
        local: LocalModels::new(None),
    };
    let vendor: Arc<dyn Vendor> = vendors
        .open(&provider, Some(SecretString::from(KEY)), None)
        .expect("the provider is valid")
        .into();
    failure(
        run(&vendor, NO_DELAY_POLICY, &CancelSignal::default(), &RecordingProgress::default())
            .await
            .0,
    )
}

#[tokio::test]
async fn vendor_that_never_answers_times_out() {
    let short = Duration::from_millis(300);
    let first_byte =
        Timeouts { connect: TEST_TIMEOUT * 6, first_byte: short, idle: TEST_TIMEOUT * 6 };
    let failed = silence("http", first_byte).await;
    assert_eq!((failed.class, failed.tries), (FailureClass::Transient, 3));
    assert!(failed.message.contains("did not answer for 0.3 s"), "{}", failed.message);
    // Here the TLS handshake gets no response.
    let connect = Timeouts { connect: short, first_byte: TEST_TIMEOUT * 6, idle: TEST_TIMEOUT * 6 };
    let failed = silence("https", connect).await;
    assert_eq!((failed.class, failed.tries), (FailureClass::Transient, 3));
    assert!(failed.message.contains("cannot be reached"), "{}", failed.message);
    // A response head is not yet an answer.
    let server = VendorServer::start().await;
    for _ in 0..3 {
        server.reply(Wire::Anthropic.reply(&Wire::Anthropic.answer("x")).silent_after(0));
    }
    let provider = provider(Wire::Anthropic, &server.url(), &[]);
    let vendors = Vendors {
        http: Http::new(first_byte),
        scripted_attempts: Arc::default(),
        local: LocalModels::new(None),
    };
    let vendor: Arc<dyn Vendor> =
        vendors.open(&provider, None, None).expect("the provider is valid").into();
    let failed = failure(
        run(&vendor, NO_DELAY_POLICY, &CancelSignal::default(), &RecordingProgress::default())
            .await
            .0,
    );
    assert!(failed.message.contains("sent nothing for 0.3 s"), "{}", failed.message);
}

#[tokio::test]
async fn unreachable_vendor_is_a_transient_failure() {
    for wire in Wire::ALL {
        let url = VendorServer::start().await.url();
        let vendor = open(wire.provider(), &url, TEST_TIMEOUT);
        let failure = failure(
            run(&vendor, NO_DELAY_POLICY, &CancelSignal::default(), &RecordingProgress::default())
                .await
                .0,
        );
        assert_eq!(failure.class, FailureClass::Transient);
        assert!(!failure.message.contains(&url), "{}", failure.message);
    }
}

#[tokio::test]
async fn cancel_closes_the_connection() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let stream = wire.answer("The answer is 42, and that is certain.");
        server.reply(wire.reply(&stream).silent_after(stream.len() * 2 / 3));
        let cancel = CancelSignal::default();
        let canceller = cancel.clone();
        let progress_log = RecordingProgress::default();
        let shown = progress_log.clone();
        let vendor = open(wire.provider(), &server.url(), TEST_TIMEOUT);
        let calling =
            tokio::spawn(
                async move { run(&vendor, NO_DELAY_POLICY, &cancel, &progress_log).await },
            );
        until("the first text", async || if shown.text().is_empty() { Err(()) } else { Ok(()) })
            .await;
        assert_eq!(server.open_answers(), 1);
        canceller.cancel("suspended");
        let (outcome, usage) = calling.await.expect("the call does not panic");
        let Outcome::Cancelled { reason, partial } = outcome else {
            panic!("not cancelled: {outcome:?}")
        };
        assert_eq!((reason.as_str(), partial.len()), ("suspended", 1));
        assert!(usage.output_tokens > 0, "{usage:?}");
        until("the connection to close", async || match server.open_answers() {
            0 => Ok(()),
            open => Err(open),
        })
        .await;
    }
}

#[tokio::test]
async fn key_repeated_by_the_vendor_is_scrubbed() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let message = format!("Incorrect API key provided: {KEY}.");
        server.reply(wire.error_saying(401, &message));
        let progress_log = RecordingProgress::default();
        let mut progress = progress_log.clone();
        let mut deltas =
            crate::delta::Deltas::new(crate::delta::tests::step_context(1), &mut progress);
        let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
        let mut command = command("go");
        command.provider = Some(provider(wire, &server.url(), &[KEY]));
        let cancel = CancelSignal::default();
        let failure =
            failure(crate::call::answer(&router, routed(&command, &cancel), &mut deltas).await.0);
        assert_eq!(failure.message, "Incorrect API key provided: [api key].", "{wire:?}");
        assert_eq!(failure.class, FailureClass::Authentication);
    }
}

/// A client that has the vendor repeat its words, and the end of the connection, could find out the
/// key piece by piece.
#[tokio::test]
async fn error_body_that_breaks_off_says_nothing_about_key() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let vendor = open(wire.provider(), &server.url(), TEST_TIMEOUT);
        for padding in [0, 9_000] {
            let mut said = Vec::new();
            for guess in [KEY, "no-other-5678"] {
                let text = format!("unknown: {} {guess}", "x".repeat(padding));
                server.reply(Reply::text(400, &text).broken_after(text.len() - 4));
                said.push(vendor.check().await.expect_err("refused").scrubbed(Some(KEY)).message);
            }
            assert_eq!(said[0], said[1], "{wire:?}");
            assert!(
                !said[0].contains("sk-") && said[0].contains("answered with HTTP 400"),
                "{wire:?}: {}",
                said[0]
            );
            assert_eq!(said[0].contains("unknown: xxx"), padding > 0, "{wire:?}: {}", said[0]);
        }
    }
}

#[tokio::test]
async fn client_sends_its_name_and_reuses_its_connection() {
    let server = VendorServer::start().await;
    let vendor = open(ModelProviderType::Anthropic, &server.url(), TEST_TIMEOUT);
    for _ in 0..2 {
        server.reply(anthropic::Answer::text("x").reply());
        completed(
            run(&vendor, NO_DELAY_POLICY, &CancelSignal::default(), &RecordingProgress::default())
                .await
                .0,
        );
    }
    let requests = server.requests();
    assert!(requests[0].header("user-agent").starts_with("construct/"));
    assert_eq!(requests[0].peer, requests[1].peer, "the second call came over another connection");
}

#[tokio::test]
async fn key_is_checked_and_models_are_listed() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        server.reply(Reply::json(200, &wire.listing()));
        let vendor = open(wire.provider(), &server.url(), TEST_TIMEOUT);
        let models = vendor.models().await.unwrap_or_else(|failure| panic!("{wire:?}: {failure}"));
        let names: Vec<&str> = models.iter().map(|model| model.name.as_str()).collect();
        assert_eq!(names, ["one", "two"], "{wire:?}");
        server.reply(wire.error(401, FailureClass::Authentication));
        let failure = vendor.check().await.expect_err("the key is refused");
        assert_eq!(
            (failure.class, failure.http_status),
            (FailureClass::Authentication, 401),
            "{wire:?}"
        );
        assert!(
            server.requests().iter().all(|request| request.body.is_null()),
            "nothing was asked of a model"
        );
    }
}

#[tokio::test]
async fn remaining_limits_are_read_from_headers() {
    for (wire, remaining, reset) in [
        (
            Wire::Anthropic,
            "anthropic-ratelimit-output-tokens-remaining",
            "anthropic-ratelimit-output-tokens-reset",
        ),
        (Wire::OpenAi, "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"),
        (Wire::Responses, "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"),
    ] {
        let server = VendorServer::start().await;
        let answer = wire.answer("x");
        server.reply(wire.reply(&answer).header(remaining, "0").header(reset, "6m0s"));
        server.reply(wire.reply(&answer));
        let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
        let mut command = command("go");
        command.provider = Some(provider(wire, &server.url(), &[KEY]));
        let mut calls = Vec::new();
        for _ in 0..2 {
            let mut progress = RecordingProgress::default();
            let mut deltas =
                crate::delta::Deltas::new(crate::delta::tests::step_context(1), &mut progress);
            let cancel = CancelSignal::default();
            calls
                .push(crate::call::answer(&router, routed(&command, &cancel), &mut deltas).await.0);
        }
        let failure = failure(calls.remove(1));
        assert_eq!((failure.class, failure.tries), (FailureClass::RateLimited, 0), "{wire:?}");
        let wait = failure.requested_delay(jiff::Timestamp::now()).expect("it says when");
        assert!((Duration::from_secs(350)..=Duration::from_secs(360)).contains(&wait), "{wait:?}");
        completed(calls.remove(0));
        assert_eq!(server.requests().len(), 1, "the second call was not made");
    }
}
