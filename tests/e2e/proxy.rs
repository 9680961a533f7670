//! Scripts that ask models.

use std::net::TcpListener;

use anyhow::Context as _;
use construct_proto::v1;
use construct_tests::mesh::Mesh;
use serde_json::json;

/// A script asks the model it may ask, with what its task was given; the answer comes from there, and what it used is reported.
#[tokio::test]
async fn a_script_asks_a_model_through_the_proxy() -> anyhow::Result<()> {
    let listen = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let url = format!("http://{listen}");
    let settings =
        [("CONSTRUCT_PROVIDERS_PROXY_LISTEN", listen.as_str()), ("CONSTRUCT_INTERPRETER_LLM_URL", url.as_str())];
    let mesh = Mesh::start_with(&settings).await?;
    let code = "const answer = await llm.ask('the weather?', { model: 'oracle' }); \
                let refused; \
                try { llm.ask('x', { model: 'other' }) } catch (error) { refused = error.name } \
                print(answer, refused)";
    mesh.scripted_agent("oracle", &json!([{"text": "It is sunny."}])).await?;
    mesh.scripted_agent("other", &json!([])).await?;
    let agent = mesh.scripted_agent("worker", &json!([{"code": code}, {"text": "{{last_result}}"}])).await?;
    let client = mesh.client()?;
    let allow = v1::AgentScriptModels { script_models: vec!["oracle".to_owned()] };
    let id = agent.metadata.context("an agent has metadata")?.id;
    let update = v1::UpdateAgentRequest { agent: id, script_models: Some(allow), ..Default::default() };
    let updated = client.agents().update_agent(update).await?.into_inner();
    assert_eq!(updated.spec.context("a spec")?.script_models, ["oracle"]);
    // In use: it cannot be deleted.
    let delete = v1::DeleteModelRequest { model: "oracle".to_owned(), ..Default::default() };
    assert!(client.models().delete_model(delete).await.is_err());

    let conversation = client.begin("worker", Some(mesh.workspace())).await?;
    conversation.ask("go").await;
    let text = conversation.transcript().await.answers().join("\n");
    assert!(text.contains("It is sunny.") && text.contains("ModelNotAllowed"), "{text}");
    Ok(())
}
