//! Vendors' models through a real HTTP server that speaks their wire formats and records its
//! requests.

use construct_proto::v1::{self, TurnOutcome, Usage};
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT},
    mesh::{Mesh, Service},
    recorder::{check_order, streamed_text},
    transcript,
    vendor::{Captured, VendorServer, anthropic, openai},
    wait::until,
};
use serde_json::{Value, json};

const KEY: &str = "sk-test-0123456789";
const CODE: &str = "create_file('x.txt', 'made'); print('hi'); read_file('x.txt')";
const FAILING: &str = "print('so far'); throw new RangeError('too far')";

async fn begin(
    mesh: &Mesh,
    name: &str,
    kind: v1::ModelProviderType,
    base_url: String,
) -> Conversation {
    let provider = v1::ModelProviderSpec {
        name: name.into(),
        r#type: kind.into(),
        base_url,
        api_key: KEY.into(),
        ..v1::ModelProviderSpec::default()
    };
    mesh.agent(name, provider).await.unwrap();
    let client = mesh.client().unwrap();
    let update = v1::UpdateAgentRequest {
        agent: name.into(),
        parameters: Some(v1::ModelParameters {
            temperature: Some(0.5),
            max_tokens: Some(777),
            ..Default::default()
        }),
        ..Default::default()
    };
    client.agents().update_agent(update).await.unwrap();
    let workspace = mesh.folder(name).unwrap().display().to_string();
    // With a title, no model call is made for one.
    let spec = v1::TaskSpec {
        agent: name.into(),
        workspace,
        title: "A job".into(),
        ..v1::TaskSpec::default()
    };
    client.create_task_with(spec).await.unwrap()
}

/// Checks what every vendor is told about the job and the mesh.
fn check_system(mesh: &Mesh, system: &str) {
    assert!(system.contains("# Tools"));
    for part in [
        "function execute_command(",
        "function read_file(",
        "Do what the test says.",
        "OutcomeUnknown",
    ] {
        assert!(system.contains(part), "{part:?} is not in the system prompt:\n{system}");
    }
    assert!(
        system.contains(&mesh.workspace().display().to_string()),
        "the workspace is named:\n{system}"
    );
}

async fn check_costs(conversation: &Conversation, expected: &[Usage]) {
    let transcript = conversation.transcript().await;
    let usages: Vec<Usage> = transcript
        .from_source(v1::MessageSource::Assistant)
        .into_iter()
        .map(|message| transcript::status(message).usage.unwrap_or_default())
        .collect();
    assert_eq!(usages, expected);
    let status = conversation.task().await.unwrap().status.unwrap();
    let total = status.usage.unwrap_or_default();
    let sum = |field: fn(&Usage) -> i64| expected.iter().map(field).sum::<i64>();
    assert_eq!(total.cost_pico_usd, sum(|usage| usage.cost_pico_usd));
    assert_eq!(total.input_tokens, sum(|usage| usage.input_tokens));
    assert_eq!(total.cache_read_tokens, sum(|usage| usage.cache_read_tokens));
}

fn usage(input: i64, output: i64, cache_read: i64, cache_write: i64) -> Usage {
    Usage {
        input_tokens: input,
        output_tokens: output,
        cache_read_tokens: cache_read,
        cache_write_tokens: cache_write,
        cost_pico_usd: input * 3_000_000
            + output * 15_000_000
            + cache_read * 300_000
            + cache_write * 3_750_000,
        ..Usage::default()
    }
}

#[tokio::test]
async fn vendor_requests_and_answers_match_their_apis() {
    let mesh = Mesh::start().await.unwrap();
    tokio::join!(
        anthropic_job(&mesh),
        openai_job(&mesh),
        failing_vendor(&mesh),
        vendor_that_is_down(&mesh)
    );
}

async fn anthropic_job(mesh: &Mesh) {
    let vendor = VendorServer::start().await;
    let first =
        anthropic::Answer::text("I look.").and_code("toolu_1", CODE).and_code("toolu_2", FAILING);
    vendor
        .reply(first.with_usage(100, 20, 30, 40).reply())
        .reply(anthropic::Answer::text("All is made.").with_usage(5, 150, 6, 7).reply())
        .reply(anthropic::Answer::text("You are welcome.").with_usage(1, 160, 2, 3).reply());
    let conversation =
        begin(mesh, "anthropic", v1::ModelProviderType::Anthropic, vendor.url()).await;
    let recorder = conversation.record();
    conversation.ask("Make it.").await;
    let status = conversation.ask("Thanks.").await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{status:?}");
    let transcript = conversation.transcript().await;
    transcript.check(&["Make it.", "Thanks."]);
    assert_eq!(transcript.answers(), ["I look.", "All is made.", "You are welcome."]);
    let events = recorder.wait_for_sequence(status.event_sequence).await;
    check_order(&events);
    assert_eq!(streamed_text(&events, 1), "I look.");
    check_costs(&conversation, &[usage(100, 40, 20, 30), usage(5, 7, 150, 6), usage(1, 3, 160, 2)])
        .await;

    let requests = vendor.requests();
    assert_eq!(requests.len(), 3);
    for request in &requests {
        assert_eq!(request.path, "/v1/messages");
        assert_eq!(request.header("x-api-key"), KEY);
        assert_eq!(request.header("anthropic-version"), "2023-06-01");
        assert_eq!(request.header("authorization"), "");
        let body = &request.body;
        assert_eq!(
            (&body["model"], &body["stream"], &body["max_tokens"]),
            (&json!("anthropic"), &json!(true), &json!(777))
        );
        assert_eq!(body["temperature"], json!(0.5));
        check_system(mesh, body["system"][0]["text"].as_str().unwrap());
        assert_eq!(body["tools"][0]["name"], "code_interpreter");
        assert_eq!(body["tools"][0]["input_schema"]["required"], json!(["code"]));
        // Tools, system prompt, and the user's last two turns: the vendor's maximum.
        assert_eq!(body["tools"][0]["cache_control"], json!({"type": "ephemeral"}));
        assert_eq!(body["system"][0]["cache_control"], json!({"type": "ephemeral"}));
        assert!(breakpoints(body) <= 4, "{body}");
    }
    assert_eq!(roles(&requests[0]), ["user"]);
    assert_eq!(requests[0].body["messages"][0]["content"][0]["text"], "Make it.");
    assert_eq!(roles(&requests[1]), ["user", "assistant", "user"]);
    let messages = &requests[1].body["messages"];
    assert_eq!(
        messages[1]["content"],
        json!([
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "toolu_1", "name": "code_interpreter", "input": {"code": CODE}},
            {"type": "tool_use", "id": "toolu_2", "name": "code_interpreter", "input": {"code": FAILING}},
        ])
    );
    let results = &messages[2]["content"];
    assert_eq!(
        (&results[0]["type"], &results[0]["tool_use_id"]),
        (&json!("tool_result"), &json!("toolu_1"))
    );
    assert_eq!(
        (&results[0]["content"], &results[0]["is_error"]),
        (&json!("hi\nmade"), &Value::Null)
    );
    assert_eq!(
        (&results[1]["tool_use_id"], &results[1]["is_error"]),
        (&json!("toolu_2"), &json!(true))
    );
    let told = results[1]["content"].as_str().unwrap();
    assert!(told.contains("so far") && told.contains("RangeError: too far"), "{told}");
    assert_eq!(results[1]["cache_control"], json!({"type": "ephemeral"}));
    assert_eq!(roles(&requests[2]), ["user", "assistant", "user", "assistant", "user"]);
    // The cached prefix begins every later request, unchanged.
    for (earlier, later) in [(0, 1), (1, 2)] {
        let (earlier, later) = (plain(&requests[earlier].body), plain(&requests[later].body));
        assert_eq!((&earlier["system"], &earlier["tools"]), (&later["system"], &later["tools"]));
        let (earlier, later) =
            (earlier["messages"].as_array().unwrap(), later["messages"].as_array().unwrap());
        assert_eq!(earlier[..], later[..earlier.len()]);
    }
}

async fn openai_job(mesh: &Mesh) {
    let vendor = VendorServer::start().await;
    let counted = |prompt: i64, cached: i64, completion: i64| {
        Some(
            json!({"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached}}),
        )
    };
    vendor
        .reply(
            openai::Answer::text("I look.")
                .and_code("call_1", CODE)
                .and_code("call_2", FAILING)
                .with_usage(counted(120, 20, 40))
                .reply(),
        )
        .reply(openai::Answer::text("All is made.").with_usage(counted(155, 150, 7)).reply());
    let conversation =
        begin(mesh, "openai", v1::ModelProviderType::Openai, format!("{}/v1", vendor.url())).await;
    let status = conversation.ask("Make it.").await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{status:?}");
    let transcript = conversation.transcript().await;
    transcript.check(&["Make it."]);
    assert_eq!(transcript.answers(), ["I look.", "All is made."]);
    check_costs(&conversation, &[usage(100, 40, 20, 0), usage(5, 7, 150, 0)]).await;

    let requests = vendor.requests();
    assert_eq!(requests.len(), 2);
    for request in &requests {
        assert_eq!(request.path, "/v1/chat/completions");
        assert_eq!(request.header("authorization"), format!("Bearer {KEY}"));
        assert_eq!(request.header("x-api-key"), "");
        let body = &request.body;
        assert_eq!((&body["model"], &body["stream"]), (&json!("openai"), &json!(true)));
        assert_eq!(body["stream_options"], json!({"include_usage": true}));
        assert_eq!((&body["max_tokens"], &body["temperature"]), (&json!(777), &json!(0.5)));
        assert_eq!(body["messages"][0]["role"], "system");
        check_system(mesh, body["messages"][0]["content"].as_str().unwrap());
        assert_eq!(body["tools"][0]["type"], "function");
        assert_eq!(body["tools"][0]["function"]["name"], "code_interpreter");
        assert_eq!(body["tools"][0]["function"]["parameters"]["required"], json!(["code"]));
    }
    assert_eq!(roles(&requests[0]), ["system", "user"]);
    assert_eq!(roles(&requests[1]), ["system", "user", "assistant", "tool", "tool"]);
    let messages = &requests[1].body["messages"];
    assert_eq!(messages[2]["content"], "I look.");
    let calls = &messages[2]["tool_calls"];
    assert_eq!((&calls[0]["id"], &calls[0]["type"]), (&json!("call_1"), &json!("function")));
    let arguments: Value =
        serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"code": CODE}));
    assert_eq!(
        messages[3],
        json!({"role": "tool", "tool_call_id": "call_1", "content": "hi\nmade"})
    );
    assert_eq!(messages[4]["tool_call_id"], "call_2");
    let told = messages[4]["content"].as_str().unwrap();
    assert!(told.contains("the script failed") && told.contains("RangeError: too far"), "{told}");
}

/// A refused key ends the turn with a clear error that does not contain the key.
async fn failing_vendor(mesh: &Mesh) {
    let vendor = VendorServer::start().await;
    vendor.reply(anthropic::error(
        401,
        "authentication_error",
        &format!("invalid x-api-key {KEY}"),
    ));
    let conversation =
        begin(mesh, "refusing", v1::ModelProviderType::Anthropic, vendor.url()).await;
    let status = conversation.ask("Hello?").await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Failed);
    let error = status.last_error.unwrap();
    assert_eq!(error.code, "AUTHENTICATION");
    assert!(!error.message.contains(KEY), "{error:?}");
    assert_eq!(vendor.requests().len(), 1, "what cannot pass by waiting is not tried again");
    conversation.transcript().await.check(&["Hello?"]);
    // The key can neither be read back, nor is it in the database in plain text.
    let get = v1::GetModelProviderRequest { model_provider: "refusing".into() };
    let provider =
        conversation.client().providers().get_model_provider(get).await.unwrap().into_inner();
    assert_eq!(provider.spec.unwrap().api_key, "");
    let sealed = provider.status.unwrap();
    assert!(sealed.api_key_set);
    assert_eq!(sealed.encryption_key_id, "test");
    for service in Service::ALL {
        assert!(!mesh.log(service).contains(KEY), "{service:?} has logged a key");
    }
}

/// Five failures in a row open the circuit breaker, and everybody can see why.
async fn vendor_that_is_down(mesh: &Mesh) {
    let vendor =
        VendorServer::answering(|_| anthropic::error(500, "api_error", "it is down")).await;
    let conversation = begin(mesh, "down", v1::ModelProviderType::Anthropic, vendor.url()).await;
    let status = conversation.ask("Hello?").await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Failed);
    assert_eq!(vendor.requests().len(), 5);
    let get = v1::GetModelRequest { model: "down".into() };
    let model = conversation.client().models().get_model(get).await.unwrap().into_inner();
    let breaker = model.status.unwrap().breaker.unwrap();
    assert_eq!((breaker.state(), breaker.failures), (v1::breaker::State::Open, 5), "{breaker:?}");
    let page = mesh.metrics(Service::Providers).await.unwrap();
    let line = page.lines().find(|line| {
        line.starts_with("construct_providers_breaker_state") && line.contains("\"down\"")
    });
    assert!(line.is_some_and(|line| line.ends_with(" 2")), "{page}");
}

fn roles(request: &Captured) -> Vec<String> {
    let messages = request.body["messages"].as_array().unwrap();
    messages.iter().map(|message| message["role"].as_str().unwrap().to_owned()).collect()
}

/// The cache breakpoints of a request.
fn breakpoints(value: &Value) -> usize {
    value.to_string().matches("\"cache_control\"").count()
}

/// A request without its cache breakpoints, which move.
fn plain(value: &Value) -> Value {
    match value {
        Value::Object(fields) => fields
            .iter()
            .filter(|(key, _)| *key != "cache_control")
            .map(|(key, value)| (key.clone(), plain(value)))
            .collect(),
        Value::Array(values) => values.iter().map(plain).collect(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => value.clone(),
    }
}

#[tokio::test]
async fn slow_title_does_not_delay_the_conversation() {
    let mesh = Mesh::start().await.unwrap();
    let vendor = VendorServer::start().await;
    vendor
        .reply(anthropic::Answer::text("First.").reply())
        .reply(anthropic::Answer::text("A title").reply().silent_after(0))
        .reply(anthropic::Answer::text("Second.").reply());
    let provider = v1::ModelProviderSpec {
        name: "slow".into(),
        r#type: v1::ModelProviderType::Anthropic.into(),
        base_url: vendor.url(),
        api_key: KEY.into(),
        ..v1::ModelProviderSpec::default()
    };
    mesh.agent("slow", provider).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("slow", None).await.unwrap();
    conversation.ask("one").await;
    until("the model to be asked for a title", TURN_TIMEOUT, async || {
        match vendor.requests().len() {
            2 => Ok(()),
            count => Err(count),
        }
    })
    .await;
    conversation.ask("two").await;
    assert_eq!(
        conversation.transcript().await.check(&["one", "two"]).answers(),
        ["First.", "Second."]
    );
}
