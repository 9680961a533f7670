//! Content beyond plain text through the whole mesh: images and files, thinking that must be
//! returned to the vendor, and models without tool calls.

use construct_proto::v1::{self, TurnOutcome, block::Block};
use construct_tests::{
    client::Conversation,
    mesh::Mesh,
    transcript,
    vendor::{VendorServer, bedrock, gemini, ollama},
};
use serde_json::{Value, json};

/// An access key in the form of the vendor's documentation.
const ACCESS_KEY: &str = "AKIDEXAMPLE:wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY:a/session+token=";
const SIGNATURE: &str = "EqQBCgIYAhIMproof";

async fn begin(mesh: &Mesh, provider: v1::ModelProviderSpec) -> Conversation {
    let name = provider.name.clone();
    mesh.agent(&name, provider).await.unwrap();
    let workspace = mesh.folder(&name).unwrap().display().to_string();
    // With a title, no model call is made for one.
    let spec =
        v1::TaskSpec { agent: name, workspace, title: "A job".into(), ..v1::TaskSpec::default() };
    mesh.client().unwrap().create_task_with(spec).await.unwrap()
}

async fn send_blocks(conversation: &Conversation, blocks: Vec<Block>) -> v1::Task {
    let blocks = blocks.into_iter().map(|block| v1::Block { block: Some(block) }).collect();
    let spec =
        v1::MessageSpec { task: conversation.id().into(), blocks, ..v1::MessageSpec::default() };
    let request =
        v1::CreateMessageRequest { spec: Some(spec), ..v1::CreateMessageRequest::default() };
    conversation.client().messages().create_message(request).await.unwrap();
    conversation.wait_until_idle().await
}

fn text(text: &str) -> Block {
    Block::Text(v1::Text { text: text.into() })
}

fn attachment(media_type: &str, name: &str, data: Vec<u8>) -> Block {
    let (media_type, name) = (media_type.into(), name.into());
    Block::Attachment(v1::Attachment { media_type, name, data, ..v1::Attachment::default() })
}

fn assert_completed(task: v1::Task) {
    let status = task.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{status:?}");
}

#[tokio::test]
async fn images_thinking_and_toolless_models_work_across_the_mesh() {
    let mesh = Mesh::start().await.unwrap();
    tokio::join!(
        large_image_and_thinking(&mesh),
        signature_is_returned(&mesh),
        model_without_tools(&mesh)
    );
}

/// The image alone is larger than NATS' message limit.
async fn large_image_and_thinking(mesh: &Mesh) {
    let vendor = VendorServer::start().await;
    vendor
        .reply(
            bedrock::Answer::empty()
                .and_reasoning("Hm.", SIGNATURE)
                .and_text("I look.")
                .and_code("tooluse_1", "6 * 7")
                .reply(),
        )
        .reply(bedrock::Answer::text("It is 42.").with_usage(5, 150, 6, 7).reply());
    let provider = v1::ModelProviderSpec {
        name: "bedrock".into(),
        r#type: v1::ModelProviderType::Bedrock.into(),
        base_url: format!("{}/?region=eu-central-1", vendor.url()),
        api_key: ACCESS_KEY.into(),
        ..v1::ModelProviderSpec::default()
    };
    let conversation = begin(mesh, provider).await;
    let image: Vec<u8> = (0..2_000_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    let shown = vec![text("What is this?"), attachment("image/png", "big.png", image.clone())];
    assert_completed(send_blocks(&conversation, shown).await);

    let transcript = conversation.transcript().await;
    transcript.check(&["What is this?"]);
    let asked = transcript.from_source(v1::MessageSource::User)[0].spec.clone().unwrap();
    assert!(
        matches!(&asked.blocks[1].block, Some(Block::Attachment(shown)) if shown.data == image && shown.name == "big.png")
    );
    let answer = transcript.from_source(v1::MessageSource::Assistant)[0].spec.clone().unwrap();
    let Some(Block::Thinking(thinking)) = &answer.blocks[0].block else {
        panic!("no thinking: {answer:?}")
    };
    assert_eq!((thinking.text.as_str(), thinking.vendor.as_str()), ("Hm.", "bedrock"));
    let last = transcript.from_source(v1::MessageSource::Assistant)[1];
    let usage = transcript::status(last).usage.unwrap();
    assert_eq!((usage.cache_read_tokens, usage.cache_write_tokens), (150, 6));

    let requests = vendor.requests();
    assert_eq!(requests.len(), 2);
    for request in &requests {
        assert!(
            request.header("authorization").starts_with("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")
        );
        assert_eq!(request.header("x-amz-security-token"), "a/session+token=");
        let image = &request.body["messages"][0]["content"][1]["image"];
        assert_eq!(
            (&image["format"], image["source"]["bytes"].as_str().unwrap().len()),
            (&json!("png"), 2_666_668)
        );
    }
    let content = &requests[1].body["messages"][1]["content"];
    assert_eq!(
        content[0],
        json!({"reasoningContent": {"reasoningText": {"text": "Hm.", "signature": SIGNATURE}}})
    );
    assert_eq!(content[2]["toolUse"]["toolUseId"], "tooluse_1");
}

async fn signature_is_returned(mesh: &Mesh) {
    let vendor = VendorServer::start().await;
    vendor
        .reply(
            gemini::Answer::empty()
                .and_thought("I plan.")
                .and_code("call_1", "1 + 1", SIGNATURE)
                .reply(),
        )
        .reply(gemini::Answer::text("Two.").and_signature("the-last").reply())
        .reply(gemini::Answer::text("You are welcome.").reply());
    let provider = v1::ModelProviderSpec {
        name: "gemini".into(),
        r#type: v1::ModelProviderType::Gemini.into(),
        base_url: vendor.url(),
        api_key: "key".into(),
        ..v1::ModelProviderSpec::default()
    };
    let conversation = begin(mesh, provider).await;
    let recorder = conversation.record();
    assert_completed(conversation.ask("How much?").await);
    let task = conversation.ask("Thanks.").await;
    let events = recorder.wait_for_sequence(task.status.clone().unwrap().event_sequence).await;
    assert_completed(task);
    let thought = events.iter().any(|event| {
        matches!(&event.payload, Some(v1::event::Payload::MessageDelta(delta))
            if delta.delta == Some(v1::message_delta::Delta::Thinking("I plan.".into())))
    });
    assert!(thought, "thinking is streamed as such");
    conversation.transcript().await.check(&["How much?", "Thanks."]);

    let contents = &vendor.requests()[2].body["contents"];
    let called = json!({"id": "call_1", "name": "code_interpreter", "args": {"code": "1 + 1"}});
    assert_eq!(
        contents[1]["parts"],
        json!([{"functionCall": called, "thoughtSignature": SIGNATURE}])
    );
    assert_eq!(contents[2]["parts"][0]["functionResponse"]["response"], json!({"output": "2"}));
    assert_eq!(contents[3]["parts"], json!([{"text": "Two.", "thoughtSignature": "the-last"}]));
}

async fn model_without_tools(mesh: &Mesh) {
    let vendor = VendorServer::start().await;
    vendor
        .reply(
            ollama::Answer::text(
                "I count.\n```construct\nprint(read_file('n.txt').length)\n```\nIt printed 9.",
            )
            .reply(),
        )
        .reply(ollama::Answer::text("There are three.").reply());
    let provider = v1::ModelProviderSpec {
        name: "ollama".into(),
        r#type: v1::ModelProviderType::Ollama.into(),
        base_url: vendor.url(),
        ..v1::ModelProviderSpec::default()
    };
    let conversation = begin(mesh, provider).await;
    let update = v1::UpdateModelRequest {
        model: "ollama".into(),
        tool_calling: Some(false),
        ..v1::UpdateModelRequest::default()
    };
    let model = conversation.client().models().update_model(update).await.unwrap().into_inner();
    assert_eq!(model.spec.unwrap().tool_calling, Some(false));
    std::fs::write(mesh.workspace().join("ollama/n.txt"), "abc").unwrap();
    assert_completed(conversation.ask("How many letters?").await);
    let transcript = conversation.transcript().await;
    transcript.check(&["How many letters?"]);
    assert_eq!(transcript.answers(), ["I count.\n", "There are three."]);
    assert_eq!(transcript.result().output.trim(), "3");

    let requests = vendor.requests();
    assert!(
        requests.iter().all(|request| request.body.get("tools").is_none()
            && request.header("authorization").is_empty())
    );
    let messages = requests[1].body["messages"].as_array().unwrap();
    let contents: Vec<&Value> = messages[1..].iter().map(|message| &message["content"]).collect();
    let script = "I count.\n\n\n```construct\nprint(read_file('n.txt').length)\n```";
    assert_eq!(
        contents,
        [&json!("How many letters?"), &json!(script), &json!("<result>\n3\n</result>")]
    );
}
