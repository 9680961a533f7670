//! Other requests of clients: token counts and embeddings.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use construct_proto::mesh::v1::FailureClass;
use construct_tests::vendor::openai;
use serde_json::{Value, json};

use super::{Proxy, client::Client, name};
use crate::tests::{until, wires::Wire};

async fn post(proxy: &Proxy, path: &str, body: &Value) -> (u16, Value) {
    let response = proxy.post(path).json(body).send().await.expect("the proxy answers");
    (response.status().as_u16(), response.json().await.expect("JSON"))
}

#[tokio::test]
async fn tokens_are_counted_for_every_vendor() {
    let proxy = Proxy::start().await;
    for wire in Wire::ALL {
        let counts = wire.count(1234);
        let exact = counts.is_some();
        if let Some((reply, _)) = counts {
            proxy.vendor.reply(reply);
        }
        let question = Client::Messages.question(&name(wire), false);
        let (status, body) = post(&proxy, "/v1/messages/count_tokens", &question).await;
        assert_eq!((status, &body["exact"]), (200, &json!(exact)), "{wire:?}: {body}");
        let tokens = body["input_tokens"].as_i64().expect("a number");
        assert!(
            if exact { tokens == 1234 } else { (10..200).contains(&tokens) },
            "{wire:?}: {tokens}"
        );
    }
    assert!(proxy.mesh(|mesh| mesh.reserved.is_empty()), "a count costs nothing");
    let question = json!({"model": "other", "messages": [{"role": "user", "content": "x"}]});
    let (status, body) = post(&proxy, "/v1/messages/count_tokens", &question).await;
    assert_eq!((status, body["error"]["type"].as_str()), (404, Some("not_found_error")), "{body}");
}

#[tokio::test]
async fn vectors_are_returned_as_numbers_and_base64() {
    let proxy = Proxy::start().await;
    let vectors = [vec![0.5, -1.25], vec![3.0, 0.1]];
    for wire in Wire::ALL {
        let Some((reply, _)) = wire.vectors(&vectors, 30) else { continue };
        proxy.vendor.reply(reply.clone()).reply(reply);
        let mut body = json!({"model": name(wire), "input": ["one", "two"]});
        let (status, numbers) = post(&proxy, "/v1/embeddings", &body).await;
        assert_eq!(status, 200, "{wire:?}: {numbers}");
        assert_eq!((&numbers["object"], &numbers["model"]), (&json!("list"), &json!(name(wire))));
        body["encoding_format"] = json!("base64");
        let (_, bytes) = post(&proxy, "/v1/embeddings", &body).await;
        for (at, vector) in vectors.iter().enumerate() {
            let item = &numbers["data"][at];
            assert_eq!((&item["object"], &item["index"]), (&json!("embedding"), &json!(at)));
            let read: Vec<f32> =
                serde_json::from_value(item["embedding"].clone()).expect("numbers");
            assert_eq!(&read, vector, "{wire:?}");
            let text = bytes["data"][at]["embedding"].as_str().expect("a text");
            let read: Vec<f32> = STANDARD
                .decode(text)
                .expect("base64")
                .chunks_exact(4)
                .map(|number| f32::from_le_bytes([number[0], number[1], number[2], number[3]]))
                .collect();
            assert_eq!(&read, vector, "{wire:?}");
        }
        // This vendor does not count, and six characters are estimated.
        let read = if wire == Wire::Gemini { 2 } else { 30 };
        assert_eq!(
            numbers["usage"],
            json!({"prompt_tokens": read, "total_tokens": read}),
            "{wire:?}"
        );
    }
}

#[tokio::test]
async fn vectors_are_reserved_counted_and_charged() {
    let proxy = Proxy::start().await;
    proxy.vendor.reply(openai::vectors(&[vec![1.0]], 1_000));
    let (status, body) =
        post(&proxy, "/v1/embeddings", &json!({"model": "openai", "input": "a text"})).await;
    assert_eq!(status, 200, "{body}");
    assert!(proxy.mesh(|mesh| mesh.reserved.len()) >= 1);
    let report = &proxy.reports(1).await[0];
    assert_eq!((report.purpose.as_str(), report.model_id.as_str()), ("embeddings", "model_openai"));
    let usage = report.usage.expect("a usage");
    assert_eq!(
        (usage.input_tokens, usage.output_tokens, usage.cost_pico_usd),
        (1_000, 0, 1_000 * 3_000_000)
    );

    let poor = Proxy::start().await;
    poor.mesh(|mesh| mesh.budget = Some(1));
    let (status, body) =
        post(&poor, "/v1/embeddings", &json!({"model": "openai", "input": "a text"})).await;
    assert_eq!(
        (status, body["error"]["type"].as_str()),
        (402, Some("insufficient_quota")),
        "{body}"
    );
    assert!(poor.vendor.requests().is_empty());
}

#[tokio::test]
async fn each_text_may_fill_the_context_window() {
    let proxy = Proxy::start().await;
    proxy.vendor.reply(openai::vectors(&[vec![1.0], vec![1.0], vec![1.0]], 1_000));
    let text = "x".repeat(300_000);
    let body = json!({"model": "openai", "input": [text, text, text]});
    assert_eq!(post(&proxy, "/v1/embeddings", &body).await.0, 200);
    // For four calls at first, at the highest input price, and without output.
    let reserved = proxy.mesh(|mesh| mesh.reserved.clone());
    assert_eq!(reserved[0].amount_pico_usd, 4 * 3 * 128_000 * 3_750_000);
}

#[tokio::test]
async fn invalid_embedding_request_is_rejected_with_a_reason() {
    let proxy = Proxy::start().await;
    for (input, words) in [
        (json!([1, 2, 3]), "tokens are not supported"),
        (json!([[1, 2], [3]]), "tokens are not supported"),
        (json!([]), "an empty list"),
        (json!(["x", ""]), "an empty text"),
        (json!(vec!["x"; 2_049]), "at most 2048"),
    ] {
        let (status, body) =
            post(&proxy, "/v1/embeddings", &json!({"model": "openai", "input": input})).await;
        let message = body["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(words), "{status} {message}");
    }
    let (status, body) =
        post(&proxy, "/v1/embeddings", &json!({"model": "anthropic", "input": "x"})).await;
    assert_eq!(status, 400, "a vendor without vectors: {body}");
    assert!(proxy.vendor.requests().is_empty());
    proxy.vendor.reply(Wire::OpenAi.error(400, FailureClass::ContextTooLong));
    let (status, body) =
        post(&proxy, "/v1/embeddings", &json!({"model": "openai", "input": "x"})).await;
    assert_eq!(
        (status, body["error"]["code"].as_str()),
        (400, Some("context_length_exceeded")),
        "{body}"
    );
}

#[tokio::test]
async fn client_disconnect_closes_the_vendor_connection() {
    let proxy = Proxy::start().await;
    let reply = openai::vectors(&[vec![1.0; 100]], 10);
    proxy.vendor.reply(reply.silent_after(50));
    let sent = proxy.post("/v1/embeddings").json(&json!({"model": "openai", "input": "x"})).send();
    let asking = tokio::spawn(sent);
    until("the vendor to be asked", async || match proxy.vendor.open_answers() {
        1 => Ok(()),
        open => Err(open),
    })
    .await;
    asking.abort();
    until("its connection to close", async || match proxy.vendor.open_answers() {
        0 => Ok(()),
        open => Err(open),
    })
    .await;
}
