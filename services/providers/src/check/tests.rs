use std::sync::Arc;

use construct_bus::{subject::BreakerState, testing::NatsServer};
use construct_proto::{
    mesh::v1::{BreakerQuestion, BreakerRef, FailureClass},
    v1::breaker::State,
};
use construct_runtime::{Common, Context};
use construct_tests::vendor::{Reply, VendorServer};

use super::*;
use crate::{
    breaker::{self, Breakers},
    call::tests::{NO_DELAY_POLICY, router},
    tests::{TEST_TIMEOUT, provider, until, vendors, wires::Wire},
};

#[tokio::test]
async fn each_key_is_checked_and_first_valid_one_lists_models() {
    let nats = NatsServer::start().await;
    let bus = nats.bus().await;
    let context = Context::new("providers", Common::default());
    let router = router(Arc::new(vendors(TEST_TIMEOUT)), NO_DELAY_POLICY);
    let checks = Checks { bus: bus.clone(), router };
    checks.clone().start(context.lifecycle());
    let server = VendorServer::answering(|request| {
        if request.header("authorization") == "Bearer sk-good-key" {
            Reply::json(200, &Wire::OpenAi.listing())
        } else {
            Wire::OpenAi
                .error_saying(401, &format!("no such key: {}", request.header("authorization")))
        }
    })
    .await;
    let provider = provider(Wire::OpenAi, &server.url(), &["sk-bad-key", "sk-good-key"]);

    let checked = until("an answer", async || {
        let question = ProviderCheck { provider: Some(provider.clone()) };
        bus.ask(&CheckProvider, &question, TEST_TIMEOUT).await
    })
    .await;
    let verdicts: Vec<_> = checked.keys.iter().map(|key| (key.number, key.accepted)).collect();
    assert_eq!(verdicts, [(1, false), (2, true)]);
    assert_eq!(checked.keys[0].error, "no such key: Bearer [api key]");

    let question = VendorModelsQuestion { provider: Some(provider) };
    let listed = bus.ask(&ListVendorModels, &question, TEST_TIMEOUT).await.expect("it is served");
    assert_eq!(listed.models.len(), 2);
    let nobody = Provider::default();
    let question = VendorModelsQuestion { provider: Some(nobody) };
    let failed =
        bus.ask(&ListVendorModels, &question, TEST_TIMEOUT).await.expect("it is served").failure;
    assert_eq!(failed.map(|failure| failure.class()), Some(FailureClass::Configuration));
    context.lifecycle().stop("the test is over");
}

/// A process of the service, as far as breakers are concerned.
async fn process(bus: &Bus, name: &str) -> (Breakers, Context) {
    let context = Context::new("providers", Common::default());
    let (breakers, changed) = Breakers::new();
    breaker::peers::start(bus, name, &breakers, changed, context.lifecycle())
        .await
        .expect("the server is up");
    (breakers, context)
}

#[tokio::test]
async fn breaker_state_reaches_running_and_new_processes() {
    let nats = NatsServer::start().await;
    let bus = nats.bus().await;
    let (one, _one) = process(&bus, "one").await;
    let (two, _two) = process(&bus, "two").await;
    let key = breaker::Key { provider_id: "provider_1".into(), vendor_model: "m".into() };
    for _ in 0..breaker::state::FAILURE_THRESHOLD {
        one.admit(&key).expect("closed").on_failure(&Failure::transient("down"));
    }
    let hears = async |breakers: &Breakers| {
        until("the news", async || match breakers.status(&key).state() {
            State::Open => Ok(()),
            state => Err(state),
        })
        .await;
    };
    hears(&two).await;
    let refused = two.admit(&key).expect_err("open here as well");
    assert!(
        refused
            .requested_delay(jiff::Timestamp::now())
            .is_some_and(|wait| wait <= breaker::state::COOLDOWN)
    );
    let (three, _three) = process(&bus, "three").await;
    hears(&three).await;

    let question =
        BreakerRef { provider_id: key.provider_id.clone(), vendor_model: key.vendor_model.clone() };
    let question = BreakerQuestion { breaker: Some(question) };
    let answer = bus.ask(&BreakerState, &question, TEST_TIMEOUT).await.expect("it is served");
    assert_eq!((answer.state(), answer.failures), (State::Open, 5));
    let other = BreakerQuestion { breaker: Some(BreakerRef::default()) };
    let answer = bus.ask(&BreakerState, &other, TEST_TIMEOUT).await.expect("it is served");
    assert_eq!(answer.state(), State::Closed);
}
