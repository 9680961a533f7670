//! Embeddings of every vendor that has them, through the same router as answers.

use std::sync::Arc;

use async_trait::async_trait;
use construct_domain::money::Usage;
use construct_proto::{
    mesh::v1::{FailureClass, ModelInvoke},
    v1::Prices,
};
use construct_tests::vendor::{Reply, VendorServer, openai};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    TEST_TIMEOUT, provider, vendors,
    wires::{KEY, Wire},
};
use crate::{
    call::tests::{NO_DELAY_POLICY, command, router},
    cancels::CancelSignal,
    failure::Failure,
    router::{CallEnd, Interrupts, RoutedCall, RoutedResult, Router, Sink, Target},
    vendor::{Chunk, EmbedRequest, Request},
};

/// Keeps the vectors of the last attempt.
#[derive(Default)]
struct VectorSink(Vec<Vec<f32>>);

#[async_trait]
impl Sink for VectorSink {
    fn begin(&mut self, _request: &Request) {
        self.0.clear();
    }

    async fn push(&mut self, chunk: Chunk) -> Result<(), Failure> {
        if let Chunk::Vector(vector) = chunk {
            self.0.push(vector);
        }
        Ok(())
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    async fn flush(&mut self) {}

    async fn discard(&mut self, _failure: &Failure) -> bool {
        self.0.clear();
        true
    }
}

fn target(wire: Wire, server: &VendorServer) -> Arc<Target> {
    let ModelInvoke { model, .. } = command("");
    let mut model = model.expect("a model");
    model.prices = Some(Prices { input: 20_000, ..Prices::default() });
    Arc::new(Target { provider: provider(wire, &server.url(), &[KEY]), model })
}

/// Embeds this many texts.
async fn embed(
    router: &Router,
    targets: Vec<Arc<Target>>,
    texts: usize,
) -> (RoutedResult, Vec<Vec<f32>>) {
    let embed = EmbedRequest {
        texts: (0..texts).map(|at| format!("text {at}")).collect(),
        dimensions: Some(2),
    };
    let plain = ModelInvoke {
        provider: Some(targets[0].provider.clone()),
        model: Some(targets[0].model.clone()),
        system: String::new(),
        messages: Vec::new(),
        tools: Vec::new(),
        ..command("")
    };
    let request =
        Request { embed: Some(embed), ..Request::from_command(&plain).expect("a whole command") };
    let cancel = CancelSignal::default();
    let interrupts = Interrupts {
        cancel: &cancel,
        deadline: Instant::now() + TEST_TIMEOUT,
        hand_back: CancellationToken::new(),
    };
    let call = RoutedCall {
        request: Arc::new(request),
        targets,
        hedge_after: None,
        tries: 0,
        lost_calls: 0,
        interrupts,
    };
    let mut progress_log = VectorSink::default();
    let routed = router.call(call, &mut progress_log).await;
    (routed, progress_log.0)
}

fn vectors(count: u16) -> Vec<Vec<f32>> {
    (0..count).map(|at| vec![f32::from(at), 0.25]).collect()
}

#[tokio::test]
async fn texts_become_vectors_in_order_and_are_charged() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
        let Some((reply, path)) = wire.vectors(&vectors(3), 300) else {
            let (routed, _) = embed(&router, vec![target(wire, &server)], 3).await;
            let CallEnd::Failed(failure) = routed.end else { panic!("{wire:?}: {routed:?}") };
            assert_eq!(failure.class, FailureClass::InvalidRequest, "{wire:?}");
            assert!(server.requests().is_empty());
            continue;
        };
        server.reply(reply);
        let (routed, given) = embed(&router, vec![target(wire, &server)], 3).await;
        assert_eq!((&routed.end, given), (&CallEnd::Completed, vectors(3)), "{wire:?}");
        // This vendor does not count, and three texts of six characters are estimated.
        let read = if wire == Wire::Gemini { 5 } else { 300 };
        let used = Usage { input_tokens: read, cost_pico_usd: read * 20_000, ..Usage::default() };
        assert_eq!(routed.usage, used, "{wire:?}");
        let requests = server.requests();
        let [request] = &requests[..] else { panic!("{wire:?}: {requests:?}") };
        let body = request.body.to_string();
        assert_eq!(request.path, path);
        assert!(body.contains("text 0") && body.contains("text 2"), "{body}");
        assert!(
            body.contains("dimensions\":2") || body.contains("outputDimensionality\":2"),
            "{body}"
        );
    }
}

#[tokio::test]
async fn reported_cost_of_vectors_is_used() {
    for (wire, cost) in [(Wire::OpenRouter, 1_234_000_000), (Wire::OpenAi, 300 * 20_000)] {
        let server = VendorServer::start().await;
        let data =
            serde_json::json!([{"object": "embedding", "index": 0, "embedding": [0.0, 0.25]}]);
        let usage =
            serde_json::json!({"prompt_tokens": 300, "total_tokens": 300, "cost": 0.001_234});
        server.reply(Reply::json(
            200,
            &serde_json::json!({"object": "list", "data": data, "usage": usage}),
        ));
        let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
        let (routed, _) = embed(&router, vec![target(wire, &server)], 1).await;
        let used = Usage { input_tokens: 300, cost_pico_usd: cost, ..Usage::default() };
        assert_eq!((routed.end, routed.usage), (CallEnd::Completed, used), "{wire:?}");
    }
}

#[tokio::test]
async fn texts_beyond_the_vendor_limit_are_sent_in_batches() {
    let server = VendorServer::answering(|request| {
        let texts = request.body["requests"].as_array().map_or(0, Vec::len);
        let Ok(texts) = u16::try_from(texts) else { return Reply::text(500, "") };
        Wire::Gemini.vectors(&vectors(texts), 0).expect("it has vectors").0
    })
    .await;
    let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
    let (routed, given) = embed(&router, vec![target(Wire::Gemini, &server)], 250).await;
    assert_eq!((routed.end, given.len()), (CallEnd::Completed, 250));
    let parts: Vec<_> = server
        .requests()
        .iter()
        .map(|request| request.body["requests"].as_array().map_or(0, Vec::len))
        .collect();
    assert_eq!(parts, [100, 100, 50]);
}

#[tokio::test]
async fn too_few_vectors_fail_over_to_the_fallback() {
    let (broken, well) = (VendorServer::start().await, VendorServer::start().await);
    for _ in 0..3 {
        broken.reply(openai::vectors(&vectors(1), 10));
    }
    well.reply(openai::vectors(&vectors(2), 10));
    let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
    let targets = vec![target(Wire::OpenAi, &broken), target(Wire::OpenAi, &well)];
    let (routed, given) = embed(&router, targets, 2).await;
    assert_eq!((routed.end, given), (CallEnd::Completed, vectors(2)));
    assert_eq!((broken.requests().len(), well.requests().len()), (3, 1));
}

#[tokio::test]
async fn embedding_errors_have_the_classes_of_answer_errors() {
    for wire in Wire::ALL.into_iter().filter(|wire| wire.vectors(&[], 0).is_some()) {
        for (status, class, calls) in [
            (401, FailureClass::Authentication, 1),
            (404, FailureClass::InvalidRequest, 1),
            (429, FailureClass::RateLimited, 3),
            (500, FailureClass::Transient, 3),
        ] {
            let server = VendorServer::start().await;
            for _ in 0..calls {
                server.reply(wire.error(status, class));
            }
            let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
            let (routed, _) = embed(&router, vec![target(wire, &server)], 1).await;
            let CallEnd::Failed(failure) = routed.end else { panic!("{wire:?}: {routed:?}") };
            assert_eq!(
                (failure.class, failure.http_status, failure.tries),
                (class, status, calls),
                "{wire:?}"
            );
            assert!(routed.usage.is_zero());
        }
    }
}
