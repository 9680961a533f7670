//! Reservations and reports.

use std::time::Duration;

use construct_proto::v1;
use construct_tests::vendor::openai;
use serde_json::Value;

use super::{Limits, Proxy, client::Client};

async fn ask(proxy: &Proxy, client: Client) -> (u16, Value) {
    let response = proxy
        .post(client.path())
        .json(&client.question("openai", false))
        .send()
        .await
        .expect("an answer");
    (response.status().as_u16(), response.json().await.expect("JSON"))
}

#[tokio::test]
async fn usage_is_reported_exactly_with_few_reservations() {
    let proxy = Proxy::start().await;
    for _ in 0..20 {
        proxy.vendor.reply(openai::Answer::text("x").reply());
        assert_eq!(ask(&proxy, Client::Chat).await.0, 200);
    }
    let reserved = proxy.mesh(|mesh| mesh.reserved.clone());
    assert!(reserved.len() < 10, "{} questions for 20 calls", reserved.len());
    for reserve in &reserved {
        assert_eq!((reserve.token_id.as_str(), reserve.task_id.as_str()), ("token_1", "task_1"));
        assert!(reserve.expires_at.is_some());
    }
    let reports = proxy.reports(reserved.len()).await;
    let sum = |part: fn(&v1::Usage) -> i64| -> i64 {
        reports.iter().map(|report| part(report.usage.as_ref().expect("a usage"))).sum()
    };
    // Each answer reads 19 tokens and writes 10.
    assert_eq!(
        (sum(|usage| usage.input_tokens), sum(|usage| usage.output_tokens)),
        (20 * 19, 20 * 10)
    );
    assert_eq!(sum(|usage| usage.cost_pico_usd), 20 * (19 * 3_000_000 + 10 * 15_000_000));
    for report in &reports {
        assert_eq!((report.task_id.as_str(), report.model_id.as_str()), ("task_1", "model_openai"));
        assert!(report.purpose.starts_with("chat completions"), "{}", report.purpose);
        assert_eq!(
            report.api_key_id, "key_1",
            "it is counted for the key that the token was made with"
        );
        assert!(reserved.iter().any(|reserve| reserve.reservation_id == report.reservation_id));
    }
    let calls: std::collections::BTreeSet<&str> =
        reports.iter().map(|report| report.call_id.as_str()).collect();
    assert_eq!(calls.len(), reports.len());
}

#[tokio::test]
async fn exhausted_budget_is_reported_and_no_vendor_is_called() {
    let proxy = Proxy::start().await;
    proxy.mesh(|mesh| mesh.budget = Some(1_000));
    for client in Client::ALL {
        let (status, body) = ask(&proxy, client).await;
        assert_eq!(status, 402, "{body}");
        let (kind, message) = client.error(&body);
        assert_eq!(message, "the budget of the test is exhausted");
        assert_eq!(
            kind,
            if client == Client::Messages { "billing_error" } else { "insufficient_quota" }
        );
    }
    assert!(proxy.vendor.requests().is_empty());
}

#[tokio::test]
async fn rest_of_a_budget_allows_one_more_call() {
    let proxy = Proxy::start().await;
    // 4,096 tokens at 15,000,000 and the input: enough for one call, not for the several of the
    // first reservation.
    proxy.mesh(|mesh| mesh.budget = Some(4_096 * 15_000_000 * 5 / 4));
    proxy.vendor.reply(openai::Answer::text("x").reply());
    assert_eq!(ask(&proxy, Client::Chat).await.0, 200);
    assert_eq!(proxy.mesh(|mesh| mesh.reserved.len()), 2);
}

#[tokio::test]
async fn free_model_needs_no_reservation_and_is_reported() {
    let proxy = Proxy::with(Limits { prices: v1::Prices::default(), ..Limits::default() }).await;
    proxy.mesh(|mesh| mesh.budget = Some(0));
    proxy.vendor.reply(openai::Answer::text("x").reply());
    assert_eq!(ask(&proxy, Client::Responses).await.0, 200);
    assert!(proxy.mesh(|mesh| mesh.reserved.is_empty()));
    let report = &proxy.reports(1).await[0];
    assert_eq!((report.reservation_id.as_str(), report.purpose.as_str()), ("", "responses"));
    assert_eq!(report.usage.expect("a usage").output_tokens, 10);
}

#[tokio::test]
async fn unreported_usage_is_reported_on_shutdown() {
    let proxy = Proxy::start().await;
    proxy.vendor.reply(openai::Answer::text("x").reply());
    assert_eq!(ask(&proxy, Client::Chat).await.0, 200);
    proxy.lifecycle.stop("the test is over");
    tokio::time::timeout(Duration::from_secs(10), proxy.reports(1)).await.expect("it is reported");
}
