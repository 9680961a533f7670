//! Model calls of scripts and programs through the proxy.

use std::{fs, net::TcpListener, path::Path};

use anyhow::Context as _;
use construct_proto::v1;
use construct_tests::{
    client::TURN_TIMEOUT,
    http,
    mesh::{Mesh, Service},
};
use serde_json::{Value, json};

/// A script calls the model it may use, with its task's token; the answer comes from there, and its
/// usage is reported.
#[tokio::test]
async fn script_calls_a_model_through_the_proxy() -> anyhow::Result<()> {
    let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let url = format!("http://{listen}");
    let settings = [
        ("CONSTRUCT_PROVIDERS_PROXY_LISTEN", listen.as_str()),
        ("CONSTRUCT_INTERPRETER_LLM_URL", url.as_str()),
    ];
    let mesh = Mesh::start_with(&settings).await?;
    let code = "const answer = await llm.ask('the weather?', { model: 'oracle' }); \
                let refused; \
                try { llm.ask('x', { model: 'other' }) } catch (error) { refused = error.name } \
                print(answer, refused)";
    mesh.scripted_agent("oracle", &json!([{"text": "It is sunny."}])).await?;
    mesh.scripted_agent("other", &json!([])).await?;
    let agent = mesh
        .scripted_agent("worker", &json!([{"code": code}, {"text": "{{last_result}}"}]))
        .await?;
    let client = mesh.client()?;
    let allow = v1::AgentScriptModels { script_models: vec!["oracle".to_owned()] };
    let id = agent.metadata.context("an agent has metadata")?.id;
    let update =
        v1::UpdateAgentRequest { agent: id, script_models: Some(allow), ..Default::default() };
    let updated = client.agents().update_agent(update).await?.into_inner();
    assert_eq!(updated.spec.context("a spec")?.script_models, ["oracle"]);
    // It is in use and cannot be deleted.
    let delete = v1::DeleteModelRequest { model: "oracle".to_owned(), ..Default::default() };
    assert!(client.models().delete_model(delete).await.is_err());

    let conversation = client.create_task("worker", Some(mesh.workspace())).await?;
    conversation.ask("go").await;
    let text = conversation.transcript().await.answers().join("\n");
    assert!(text.contains("It is sunny.") && text.contains("ModelNotAllowed"), "{text}");
    Ok(())
}

/// A program's model call on behalf of a task ends when the task is canceled, also while the task
/// runs a script.
#[tokio::test]
async fn canceled_task_ends_its_programs_model_calls() -> anyhow::Result<()> {
    let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let mesh = Mesh::start_with(&[("CONSTRUCT_PROVIDERS_PROXY_LISTEN", listen.as_str())]).await?;
    let stalled =
        json!([{"text": "It is sunny.", "fault": {"stall_ms": 600_000, "after_chars": 5}}]);
    mesh.scripted_agent("oracle", &stalled).await?;
    mesh.scripted_agent("worker", &json!([{"code": "execute_command('sleep 600')"}])).await?;
    let client = mesh.client()?;
    let conversation = client.create_task("worker", Some(mesh.workspace())).await?;
    conversation.submit("go").await;
    conversation.wait_for_phase(v1::TaskPhase::ExecuteTools).await;
    let (models, task) = (vec!["oracle".to_owned()], conversation.id().to_owned());
    let token = v1::CreateModelTokenRequest { models, task, ..Default::default() };
    let token = client.tokens().create_model_token(token).await?.into_inner().token;

    let question =
        json!({"stream": true, "messages": [{"role": "user", "content": "the weather?"}]});
    let asked = http::client().build()?.post(format!("http://{listen}/v1/chat/completions"));
    let mut answer = asked.bearer_auth(token).json(&question).send().await?;
    let begun = answer.chunk().await?.context("it begins")?;
    assert!(String::from_utf8_lossy(&begun).contains("It is"), "{begun:?}");
    conversation.cancel("it was a test").await;
    let ended =
        tokio::time::timeout(TURN_TIMEOUT, answer.text()).await.context("the call went on")??;
    assert!(ended.contains("it was a test"), "{ended}");
    Ok(())
}

/// A static embedding model of three words in Model2Vec's format: the length of a header, the
/// header, the numbers.
fn write_model(folder: &Path) -> anyhow::Result<()> {
    let numbers: Vec<u8> =
        [0.0_f32, 0.0, 3.0, 0.0, 0.0, 4.0].iter().flat_map(|number| number.to_le_bytes()).collect();
    let tensor = json!({"dtype": "F32", "shape": [3, 2], "data_offsets": [0, numbers.len()]});
    let header = json!({"embeddings": tensor}).to_string();
    let length = u64::try_from(header.len())?.to_le_bytes();
    let tokenizer = json!({
        "normalizer": {"type": "BertNormalizer", "clean_text": true, "handle_chinese_chars": true, "strip_accents": null,
            "lowercase": true},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "cat": 1, "dog": 2}},
    });
    fs::create_dir_all(folder)?;
    fs::write(folder.join("model.safetensors"), [&length, header.as_bytes(), &numbers].concat())?;
    Ok(fs::write(folder.join("tokenizer.json"), tokenizer.to_string())?)
}

/// A program with only a token, and a script without one, embed texts with a model from files, and
/// count tokens; both appear in the metrics.
#[tokio::test]
async fn local_embeddings_need_no_vendor_and_are_counted() -> anyhow::Result<()> {
    let models = tempfile::tempdir()?;
    write_model(&models.path().join("tiny"))?;
    let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let folder = models.path().to_str().context("a path in UTF-8")?;
    let url = format!("http://{listen}");
    let settings = [
        ("CONSTRUCT_PROVIDERS_PROXY_LISTEN", listen.as_str()),
        ("CONSTRUCT_PROVIDERS_MODELS_DIR", folder),
        ("CONSTRUCT_INTERPRETER_LLM_URL", url.as_str()),
    ];
    let mesh = Mesh::start_with(&settings).await?;
    let client = mesh.client()?;
    let provider = |base_url: &str| v1::CreateModelProviderRequest {
        spec: Some(v1::ModelProviderSpec {
            name: "disk".to_owned(),
            r#type: v1::ModelProviderType::Local.into(),
            base_url: base_url.to_owned(),
            ..v1::ModelProviderSpec::default()
        }),
        ..Default::default()
    };
    let refused =
        client.providers().create_model_provider(provider("http://127.0.0.1:1")).await.unwrap_err();
    assert!(refused.message().contains("base_url"), "{refused}");
    client.providers().create_model_provider(provider("")).await?;
    let list = v1::ListVendorModelsRequest { model_provider: "disk".to_owned() };
    let listed = client.providers().list_vendor_models(list).await?.into_inner();
    assert_eq!(listed.models.iter().map(|model| model.name.as_str()).collect::<Vec<_>>(), ["tiny"]);
    let spec = v1::ModelSpec {
        name: "words".to_owned(),
        provider: "disk".to_owned(),
        vendor_model: "tiny".to_owned(),
        ..v1::ModelSpec::default()
    };
    client
        .models()
        .create_model(v1::CreateModelRequest { spec: Some(spec), ..Default::default() })
        .await?;
    let token =
        v1::CreateModelTokenRequest { models: vec!["words".to_owned()], ..Default::default() };
    let token = client.tokens().create_model_token(token).await?.into_inner().token;

    let http = http::client().build()?;
    let post = async |path: &str, body: Value| -> anyhow::Result<Value> {
        let sent = http
            .post(format!("http://{listen}{path}"))
            .bearer_auth(&token)
            .json(&body)
            .send()
            .await?;
        Ok(sent.json().await?)
    };
    let body = json!({"model": "words", "input": ["Cat!", "cat and dog"]});
    let answer = post("/v1/embeddings", body).await?;
    let vectors: Vec<&Value> =
        answer["data"].as_array().into_iter().flatten().map(|item| &item["embedding"]).collect();
    assert_eq!(json!(vectors), json!([[1.0, 0.0], [0.6, 0.8]]), "{answer}");
    assert_eq!(answer["usage"]["prompt_tokens"], 3, "{answer}");
    let question = json!({"model": "words", "messages": [{"role": "user", "content": "12345678"}]});
    let counted = post("/v1/messages/count_tokens", question).await?;
    assert_eq!(counted, json!({"input_tokens": 2, "exact": false}));

    let page = mesh.metrics(Service::Providers).await?;
    let labels = "gen_ai_operation_name=\"embeddings\",gen_ai_provider_name=\"local\",gen_ai_request_model=\"tiny\"";
    let line =
        |name: &str| page.lines().find(|line| line.starts_with(name) && line.contains(labels));
    let calls =
        line("gen_ai_client_operation_duration_seconds_count").with_context(|| page.clone())?;
    assert!(calls.ends_with(" 1"), "{calls}");
    let tokens = line("gen_ai_client_token_usage_sum").with_context(|| page.clone())?;
    assert!(tokens.ends_with(" 3"), "{tokens}");

    let code = "const [cat, both] = await llm.embed(['Cat!', 'cat and dog'], { model: 'words' }); \
                print(cat, both, cat[0] * both[0] + cat[1] * both[1])";
    let agent = mesh
        .scripted_agent("worker", &json!([{"code": code}, {"text": "{{last_result}}"}]))
        .await?;
    let allow = v1::AgentScriptModels { script_models: vec!["words".to_owned()] };
    let id = agent.metadata.context("an agent has metadata")?.id;
    client
        .agents()
        .update_agent(v1::UpdateAgentRequest {
            agent: id,
            script_models: Some(allow),
            ..Default::default()
        })
        .await?;
    let conversation = client.create_task("worker", Some(mesh.workspace())).await?;
    conversation.ask("go").await;
    let text = conversation.transcript().await.answers().join("\n");
    assert!(text.contains("[1,0] [0.6,0.8] 0.6"), "{text}");

    for service in Service::ALL {
        let page = mesh.metrics(service).await?;
        assert!(page.contains("target_info"), "{service:?}: {page}");
    }
    Ok(())
}
