//! `llm.ask`, `llm.json` and `llm.embed`, against a proxy with prepared answers.

use std::sync::Mutex;

use super::fetch::server;
use super::*;

fn http(status: u16, body: &Value) -> Vec<u8> {
    let body = body.to_string();
    let length = body.len();
    format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}")
        .into()
}

fn completion(text: &str) -> Vec<u8> {
    let choice = json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"});
    http(200, &json!({"object": "chat.completion", "choices": [choice]}))
}

/// A toolbox whose scripts may ask `own` and `mini`, and the requests to the proxy.
async fn bench_with_proxy(
    answers: Vec<Vec<u8>>,
) -> (Bench, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let answers = Mutex::new(answers.into_iter());
    let (address, requests) = server(move |_| {
        answers.lock().expect("no panic").next().unwrap_or_else(|| http(500, &json!({})))
    })
    .await;
    let mut bench = Bench::new();
    let client = Models::client().expect("a client");
    let models = Models::new(
        client,
        &format!("http://{address}/"),
        "token-1",
        &["own".to_owned(), "mini".to_owned()],
    );
    bench.tools = bench.tools.with_models(models);
    (bench, requests)
}

fn body(request: &str) -> Value {
    let (_, body) = request.split_once("\r\n\r\n").expect("a body");
    serde_json::from_str(body).expect("JSON")
}

#[tokio::test]
async fn question_is_sent_once_with_the_token() {
    let (bench, mut requests) =
        bench_with_proxy(vec![completion("Hello."), completion("Bonjour.")]).await;
    assert_eq!(bench.call("llm.ask", json!(["Say hello"])).await, "Hello.");
    let options = json!({"model": "mini", "system": "Be French.", "max_tokens": 7});
    assert_eq!(bench.call("llm.ask", json!(["Say hello", options])).await, "Bonjour.");
    let first = requests.recv().await.expect("a request");
    assert!(first.starts_with("POST /v1/chat/completions "), "{first}");
    assert!(first.contains("authorization: Bearer token-1"), "{first}");
    let asked = json!({"model": "own", "messages": [{"role": "user", "content": "Say hello"}]});
    assert_eq!(body(&first), asked);
    let asked = json!({"model": "mini", "max_completion_tokens": 7, "messages":
        [{"role": "system", "content": "Be French."}, {"role": "user", "content": "Say hello"}]});
    assert_eq!(body(&requests.recv().await.expect("a request")), asked);
    assert!(!format!("{:?}", bench.tools).contains("token-1"));
}

#[tokio::test]
async fn truncated_answer_is_an_error_unless_max_tokens_was_set() {
    let cut = || {
        http(
            200,
            &json!({"choices": [{"message": {"content": "Once upon"}, "finish_reason": "length"}]}),
        )
    };
    let (bench, _requests) = bench_with_proxy(vec![cut(), cut()]).await;
    let error = bench.fails("llm.ask", json!(["Tell a story"])).await;
    assert_eq!((error.name, error.details), ("AnswerCut", Some(json!({"answer": "Once upon"}))));
    assert_eq!(
        bench.call("llm.ask", json!(["Tell a story", {"max_tokens": 2}])).await,
        "Once upon"
    );
}

#[tokio::test]
async fn oversized_vectors_are_rejected_before_the_request() {
    let vector = json!({"data": [{"embedding": [0.5, 0.25]}]});
    let (mut bench, mut requests) = bench_with_proxy(vec![http(200, &vector)]).await;
    bench.tools = bench.tools.with_result_bytes(1000);
    let refused =
        bench.fails("llm.embed", json!([["a", "b"], {"model": "own", "dimensions": 50}])).await;
    assert_eq!(refused.name, "InvalidArguments");
    assert!(refused.message.contains("at most 1 texts at once"), "{refused}");
    assert!(requests.try_recv().is_err(), "no request was sent");
    let one = bench.call("llm.embed", json!(["a", {"model": "own", "dimensions": 50}])).await;
    assert_eq!(one, json!([[0.5, 0.25]]));
}

#[tokio::test]
async fn invalid_answer_is_sent_back_once_with_its_faults() {
    let schema =
        json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    let args = json!(["Which number?", {"schema": schema}]);
    let (bench, mut requests) = bench_with_proxy(vec![
        completion("```json\n{\"n\": \"7\"}\n```"),
        completion("{\"n\": 7}"),
    ])
    .await;
    assert_eq!(bench.call("llm.json", args.clone()).await, json!({"n": 7}));
    let first = body(&requests.recv().await.expect("a request"));
    assert_eq!(first["response_format"]["json_schema"]["schema"], schema);
    let second = body(&requests.recv().await.expect("a request"));
    let complaint = second["messages"][2]["content"].as_str().expect("a text");
    assert!(complaint.contains("/n: ") && complaint.contains("integer"), "{complaint}");

    let (bench, _requests) = bench_with_proxy(vec![completion("seven"), completion("{}")]).await;
    let error = bench.fails("llm.json", args).await;
    assert_eq!(error.name, "InvalidAnswer");
    assert_eq!(error.details.expect("details")["answer"], "{}");
}

#[tokio::test]
async fn vectors_are_returned_as_the_proxy_sends_them() {
    let vectors = |vectors: Value| {
        let items: Vec<Value> =
            vectors.as_array().expect("a list").iter().map(|v| json!({"embedding": v})).collect();
        http(200, &json!({"object": "list", "data": items}))
    };
    let (bench, mut requests) = bench_with_proxy(vec![
        vectors(json!([[0.1, -0.25], [1.0, 0.0]])),
        vectors(json!([[0.5]])),
        vectors(json!([])),
    ])
    .await;
    let texts = json!([["a cat", "a dog"], {"model": "mini"}]);
    // As short as they were received.
    assert_eq!(bench.call("llm.embed", texts).await.to_string(), "[[0.1,-0.25],[1.0,0.0]]");
    let first = requests.recv().await.expect("a request");
    assert!(
        first.starts_with("POST /v1/embeddings ")
            && first.contains("authorization: Bearer token-1"),
        "{first}"
    );
    assert_eq!(body(&first), json!({"model": "mini", "input": ["a cat", "a dog"]}));
    let one = json!(["a cat", {"model": "mini", "dimensions": 1}]);
    assert_eq!(bench.call("llm.embed", one.clone()).await, json!([[0.5]]));
    let asked = json!({"model": "mini", "input": ["a cat"], "dimensions": 1});
    assert_eq!(body(&requests.recv().await.expect("a request")), asked);
    assert_eq!(
        bench.fails("llm.embed", one).await.name,
        "InternalError",
        "fewer vectors than texts"
    );
}

#[tokio::test]
async fn invalid_texts_are_rejected_before_the_request() {
    let (bench, mut requests) =
        bench_with_proxy(vec![http(402, &json!({"error": {"message": "spent"}}))]).await;
    for (args, name) in [
        (json!(["x"]), "InvalidArguments"),
        (json!([7, {"model": "mini"}]), "InvalidArguments"),
        (json!(["x".repeat((64 << 10) + 1), {"model": "mini"}]), "InvalidArguments"),
        (json!([vec!["x"; 101], {"model": "mini"}]), "InvalidArguments"),
        (json!(["x", {"model": "opus"}]), "ModelNotAllowed"),
    ] {
        assert_eq!(bench.fails("llm.embed", args).await.name, name);
    }
    assert!(requests.try_recv().is_err(), "no request was sent");
    assert_eq!(
        bench.fails("llm.embed", json!(["x", {"model": "mini"}])).await.name,
        "BudgetExhausted"
    );
}

#[tokio::test]
async fn invalid_schema_is_rejected_before_the_request() {
    let (bench, mut requests) = bench_with_proxy(vec![completion("1")]).await;
    for schema in [json!({"type": "nothing"}), json!({"allOf": [{"$ref": "#"}]}), json!(7)] {
        let error = bench.fails("llm.json", json!(["x", {"schema": schema}])).await;
        assert_eq!(error.name, "InvalidArguments", "{error}");
    }
    assert_eq!(bench.fails("llm.json", json!(["x", {}])).await.name, "InvalidArguments");
    assert!(requests.try_recv().is_err());
}

#[tokio::test]
async fn proxy_failures_have_stable_names() {
    let refused = |status| http(status, &json!({"error": {"message": "because"}}));
    for (answer, name) in [
        (refused(402), "BudgetExhausted"),
        (refused(404), "ModelNotAllowed"),
        (refused(429), "ModelUnavailable"),
        (refused(503), "ModelUnavailable"),
        (refused(504), "Timeout"),
        (refused(400), "ModelFailed"),
        (
            http(
                200,
                &json!({"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}),
            ),
            "ModelFailed",
        ),
    ] {
        let (bench, _requests) = bench_with_proxy(vec![answer]).await;
        assert_eq!(bench.fails("llm.ask", json!(["x"])).await.name, name);
    }
    let (bench, mut requests) = bench_with_proxy(Vec::new()).await;
    let error = bench.fails("llm.ask", json!(["x", {"model": "opus"}])).await;
    assert_eq!(error.name, "ModelNotAllowed");
    assert!(error.message.contains("own, mini"), "{error}");
    assert!(requests.try_recv().is_err(), "no request was sent");
    assert_eq!(Bench::new().fails("llm.ask", json!(["x"])).await.name, "ModelNotAllowed");
}

#[tokio::test]
async fn question_is_not_repeatable() {
    for name in ["llm.ask", "llm.json", "llm.embed"] {
        let tool = definition(name).expect("a tool");
        assert_eq!(
            (tool.effect, tool.permission, tool.is_repeatable()),
            (Effect::External, Permission::Models, false)
        );
        assert_eq!(
            tool.subject(&json!({"options": {"model": "mini"}})),
            PolicySubject::Name("mini".into())
        );
    }
}
