//! Token counts of every vendor.

use std::sync::Arc;

use construct_bus::{subject::CountTokens, testing::NatsServer};
use construct_proto::mesh::v1::{FailureClass, ModelInvoke, TokenCountQuery};
use construct_runtime::{Common, Context};
use construct_tests::vendor::{Reply, VendorServer};

use super::{
    TEST_TIMEOUT, provider, until, vendors,
    wires::{KEY, Wire},
};
use crate::{
    call::tests::{NO_DELAY_POLICY, command, router},
    check::Checks,
    router::{Router, Target},
    token_count::CountResult,
    vendor::Request,
};

fn call(wire: Wire, server: &VendorServer, keys: &[&str]) -> ModelInvoke {
    ModelInvoke {
        provider: Some(provider(wire, &server.url(), keys)),
        ..command("How long is this?")
    }
}

async fn count(router: &Router, call: &ModelInvoke) -> CountResult {
    let target = Target {
        provider: call.provider.clone().expect("one"),
        model: call.model.clone().expect("one"),
    };
    router.count_tokens(&target, &Request::from_command(call).expect("a whole command")).await
}

#[tokio::test]
async fn counting_vendor_is_queried_and_others_are_estimated() {
    for wire in Wire::ALL {
        let server = VendorServer::start().await;
        let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
        let Some((reply, path)) = wire.count(1234) else {
            let counted = count(&router, &call(wire, &server, &[KEY])).await;
            assert!(!counted.exact && counted.tokens > 0, "{wire:?}: {counted:?}");
            assert!(server.requests().is_empty(), "{wire:?}");
            continue;
        };
        server.reply(reply);
        let counted = count(&router, &call(wire, &server, &[KEY])).await;
        assert_eq!(counted, CountResult { tokens: 1234, exact: true }, "{wire:?}");
        let requests = server.requests();
        let [request] = &requests[..] else { panic!("{wire:?}: {requests:?}") };
        assert_eq!(request.path, path, "{wire:?}");
        let body = request.body.to_string();
        assert!(
            body.contains("How long is this?") && body.contains("code_interpreter"),
            "{wire:?}: {body}"
        );
        // A counting vendor rejects fields that only an answer needs.
        for field in
            ["max_tokens", "max_output_tokens", "stream", "inferenceConfig", "store", "include"]
        {
            assert!(!body.contains(&format!("\"{field}\"")), "{wire:?}: {body}");
        }
    }
}

#[tokio::test]
async fn failing_count_is_estimated() {
    for (status, class) in [
        (404, FailureClass::InvalidRequest),
        (429, FailureClass::RateLimited),
        (401, FailureClass::Authentication),
        (500, FailureClass::Transient),
    ] {
        let server = VendorServer::start().await;
        server.reply(Wire::Anthropic.error(status, class));
        let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
        let counted = count(&router, &call(Wire::Anthropic, &server, &[KEY])).await;
        assert!(!counted.exact && counted.tokens > 0, "{status}: {counted:?}");
        assert_eq!(server.requests().len(), 1, "nothing is tried again for a count");
    }
}

#[tokio::test]
async fn count_uses_the_next_key_after_a_refusal() {
    let server = VendorServer::answering(|request| match request.header("x-api-key") {
        "sk-good-key" => Wire::Anthropic.count(7).expect("it counts").0,
        _ => Wire::Anthropic.error(401, FailureClass::Authentication),
    })
    .await;
    let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
    let counted =
        count(&router, &call(Wire::Anthropic, &server, &["sk-bad-key", "sk-good-key"])).await;
    assert_eq!(counted, CountResult { tokens: 7, exact: true });
}

#[tokio::test]
async fn count_query_over_nats_is_answered() {
    let nats = NatsServer::start().await;
    let bus = nats.bus().await;
    let context = Context::new("providers", Common::default());
    Checks { bus: bus.clone(), router: router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY) }
        .start(context.lifecycle());
    let server =
        VendorServer::answering(|_| Reply::json(200, &serde_json::json!({"input_tokens": 42})))
            .await;
    // A count needs no step.
    let call = ModelInvoke { step: None, ..call(Wire::Anthropic, &server, &[KEY]) };
    let ask = async |call| {
        bus.ask(&CountTokens, &TokenCountQuery { call: Some(call) }, TEST_TIMEOUT).await
    };
    let counted = until("an answer", async || ask(call.clone()).await).await;
    assert_eq!((counted.input_tokens, counted.exact, counted.failure), (42, true, None));
    let nobody = ask(ModelInvoke { model: None, ..call }).await.expect("it is served");
    assert_eq!(nobody.failure.map(|failure| failure.class()), Some(FailureClass::Internal));
    context.lifecycle().stop("the test is over");
}
