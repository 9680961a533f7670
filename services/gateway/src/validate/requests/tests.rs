use construct_domain::{ModelProviderId, OrganizationId, TaskId};
use construct_proto::v1::{self, block};
use construct_store::{ModelProvider, ModelProviderKind, SealedSecret};
use jiff::Timestamp;
use tonic::{Code, Status};
use uuid::Uuid;

use super::*;
use crate::{
    page::Column,
    validate::{check, tests::fields},
};

const TASK: &str = "task_01890a5d-ac96-774b-bcce-b302099a8057";
const ORG: OrganizationId = OrganizationId::LOCAL;

#[track_caller]
fn refused<T>(result: Result<T, Status>, expected: &[&str]) {
    let status = result.err().expect("the request is refused");
    assert_eq!(status.code(), Code::InvalidArgument);
    assert_eq!(fields(&status), expected, "{}", status.message());
}

fn pools() -> Vec<String> {
    ["cpu-2", "cpu-4", "bench"].map(str::to_owned).into()
}

fn agent() -> v1::AgentSpec {
    v1::AgentSpec { name: "ada".into(), model: "m".into(), ..v1::AgentSpec::default() }
}

fn text(text: &str) -> v1::Block {
    v1::Block { block: Some(block::Block::Text(v1::Text { text: text.into() })) }
}

#[test]
fn unknown_pool_is_refused_with_the_known_ones() {
    let agent = |compute: &str| {
        let spec = v1::AgentSpec { compute: compute.into(), ..agent() };
        create_agent(&v1::CreateAgentRequest { spec: Some(spec), ..Default::default() }, &pools())
    };
    let update = |compute: &str| {
        let compute = Some(compute.to_owned());
        update_agent(
            &v1::UpdateAgentRequest { agent: "ada".into(), compute, ..Default::default() },
            &pools(),
        )
    };
    let task = |compute: &str| {
        let spec = v1::TaskSpec {
            agent: "ada".into(),
            compute: compute.into(),
            ..v1::TaskSpec::default()
        };
        create_task(&v1::CreateTaskRequest { spec: Some(spec), ..Default::default() }, &pools())
    };
    for fine in ["", "cpu-2", "cpu-4", "bench"] {
        agent(fine).and(update(fine)).and(task(fine)).expect(fine);
    }
    for wrong in ["gpu", "cpu-8", "CPU-2", "a.b", &"x".repeat(5000)] {
        refused(agent(wrong), &["spec.compute"]);
        refused(update(wrong), &["compute"]);
        refused(task(wrong), &["spec.compute"]);
    }
    let words = task("gpu").expect_err("there is none").message().to_owned();
    assert!(words.contains("no pool `gpu`; there are `cpu-2`, `cpu-4`, `bench`"), "{words}");
    let words = task(&"x".repeat(5000)).expect_err("it is too long").message().to_owned();
    assert!(words.len() < 500, "{words}");
}

#[test]
fn agents_at_their_limits_are_accepted() {
    let spec = v1::AgentSpec {
        description: "ü".repeat(1024),
        instructions: "x".repeat(64 * 1024),
        max_turns: 1000,
        parameters: Some(v1::ModelParameters {
            temperature: Some(2.0),
            top_p: Some(0.0),
            top_k: Some(1),
            max_tokens: Some(1),
            stop_sequences: vec!["stop".into(); 8],
            thinking: v1::ThinkingEffort::High.into(),
        }),
        ..agent()
    };
    create_agent(
        &v1::CreateAgentRequest { spec: Some(spec), idempotency_key: "k".repeat(128) },
        &pools(),
    )
    .expect("all is within limits");
}

#[test]
fn agents_beyond_limits_are_refused_by_field() {
    let create = |spec| {
        create_agent(
            &v1::CreateAgentRequest { spec: Some(spec), ..v1::CreateAgentRequest::default() },
            &pools(),
        )
    };
    let parameters = |parameters| v1::AgentSpec { parameters: Some(parameters), ..agent() };
    let default = v1::ModelParameters::default;
    for (spec, field) in [
        (v1::AgentSpec { name: "Ada".into(), ..agent() }, "spec.name"),
        (v1::AgentSpec { description: "x".repeat(1025), ..agent() }, "spec.description"),
        (v1::AgentSpec { instructions: "x".repeat(64 * 1024 + 1), ..agent() }, "spec.instructions"),
        (v1::AgentSpec { instructions: "\0".into(), ..agent() }, "spec.instructions"),
        (v1::AgentSpec { model: String::new(), ..agent() }, "spec.model"),
        (v1::AgentSpec { model: "no such/name".into(), ..agent() }, "spec.model"),
        (v1::AgentSpec { max_turns: 1001, ..agent() }, "spec.max_turns"),
        (v1::AgentSpec { compact_at_percent: 101, ..agent() }, "spec.compact_at_percent"),
        (
            parameters(v1::ModelParameters { temperature: Some(2.1), ..default() }),
            "spec.parameters.temperature",
        ),
        (
            parameters(v1::ModelParameters { temperature: Some(f64::NAN), ..default() }),
            "spec.parameters.temperature",
        ),
        (
            parameters(v1::ModelParameters { top_p: Some(-0.1), ..default() }),
            "spec.parameters.top_p",
        ),
        (parameters(v1::ModelParameters { top_k: Some(0), ..default() }), "spec.parameters.top_k"),
        (
            parameters(v1::ModelParameters { max_tokens: Some(0), ..default() }),
            "spec.parameters.max_tokens",
        ),
        (
            parameters(v1::ModelParameters { stop_sequences: vec!["x".into(); 9], ..default() }),
            "spec.parameters.stop_sequences",
        ),
        (
            parameters(v1::ModelParameters { stop_sequences: vec![String::new()], ..default() }),
            "spec.parameters.stop_sequences[0]",
        ),
    ] {
        refused(create(spec), &[field]);
    }
    refused(
        create_agent(&v1::CreateAgentRequest::default(), &pools()),
        &["spec", "spec.name", "spec.model"],
    );
}

#[test]
fn update_has_the_limits_of_create() {
    let request = v1::UpdateAgentRequest {
        agent: "ada".into(),
        name: Some(String::new()),
        model: Some(String::new()),
        max_turns: Some(1001),
        revision: -1,
        idempotency_key: "a b".into(),
        ..v1::UpdateAgentRequest::default()
    };
    refused(
        update_agent(&request, &pools()),
        &["name", "model", "max_turns", "revision", "idempotency_key"],
    );
    update_agent(
        &v1::UpdateAgentRequest { agent: "ada".into(), ..v1::UpdateAgentRequest::default() },
        &pools(),
    )
    .expect("it changes nothing");
}

#[test]
fn model_numbers_are_bounded() {
    let spec = v1::ModelSpec {
        name: "m".into(),
        provider: "p".into(),
        context_window: -1,
        max_output_tokens: 100_000_001,
        vendor_model: "a\nb".into(),
        prices: Some(v1::Prices { output: -1, ..v1::Prices::default() }),
        fallbacks: vec![v1::ModelFallback { model: "x".into(), weight: 1001 }],
        hedge_after: Some(prost_types::Duration { seconds: 0, nanos: 99_000_000 }),
        ..v1::ModelSpec::default()
    };
    let request = v1::CreateModelRequest { spec: Some(spec), ..v1::CreateModelRequest::default() };
    let expected = [
        "spec.vendor_model",
        "spec.context_window",
        "spec.max_output_tokens",
        "spec.prices.output",
        "spec.fallbacks[0].weight",
        "spec.hedge_after",
    ];
    refused(check(&request), &expected);
    let fallbacks =
        (0..9).map(|n| v1::ModelFallback { model: format!("m{n}"), weight: 0 }).collect();
    let spec = v1::ModelSpec {
        name: "m".into(),
        provider: "p".into(),
        fallbacks,
        ..v1::ModelSpec::default()
    };
    let request = v1::CreateModelRequest { spec: Some(spec), ..v1::CreateModelRequest::default() };
    refused(check(&request), &["spec.fallbacks"]);
}

#[test]
fn provider_fields_depend_on_its_kind() {
    let create = |kind: v1::ModelProviderType, base_url: &str, api_key: &str, script: &str| {
        let spec = v1::ModelProviderSpec {
            name: "p".into(),
            r#type: kind.into(),
            base_url: base_url.into(),
            api_key: api_key.into(),
            script: script.into(),
            ..v1::ModelProviderSpec::default()
        };
        create_model_provider(&v1::CreateModelProviderRequest {
            spec: Some(spec),
            ..v1::CreateModelProviderRequest::default()
        })
    };
    use v1::ModelProviderType::{
        Anthropic, Bedrock, Gemini, Ollama, Openai, Scripted, Unspecified,
    };
    assert_eq!(
        create(Openai, "http://localhost:11434/v1", "", "").ok(),
        Some(ModelProviderKind::Openai)
    );
    assert_eq!(create(Scripted, "", "", "{\"turns\": []}").ok(), Some(ModelProviderKind::Scripted));
    assert_eq!(create(Anthropic, "", "sk-ant", "").ok(), Some(ModelProviderKind::Anthropic));
    assert_eq!(create(Ollama, "", "", "").ok(), Some(ModelProviderKind::Ollama));
    const REGIONAL: &str = "https://bedrock-runtime.eu-central-1.amazonaws.com";
    for key in ["AKIAEXAMPLE:secret/with+signs=", "ASIAEXAMPLE:secret:token", "ABSKexample"] {
        assert_eq!(
            create(Bedrock, REGIONAL, key, "").ok(),
            Some(ModelProviderKind::Bedrock),
            "{key}"
        );
    }
    assert!(create(Bedrock, "http://127.0.0.1:4566/?region=us-east-1", "ABSKexample", "").is_ok());
    for (kind, base_url, api_key, script, field) in [
        (Unspecified, "", "", "", "spec.type"),
        (Openai, "ftp://host", "", "", "spec.base_url"),
        (Openai, "/v1", "", "", "spec.base_url"),
        (Openai, "not an address", "", "", "spec.base_url"),
        (Openai, "https://user:secret@host/v1", "", "", "spec.base_url"),
        (Openai, "", "with space", "", "spec.api_key"),
        (Openai, "", "key", "{}", "spec.script"),
        (Gemini, "", "", "", "spec.api_key"),
        (Bedrock, REGIONAL, "", "", "spec.api_key"),
        (Bedrock, REGIONAL, "AKIAEXAMPLE", "", "spec.api_key"),
        (Bedrock, REGIONAL, "AKIAEXAMPLE:", "", "spec.api_key"),
        (Bedrock, REGIONAL, "a:b:c:d", "", "spec.api_key"),
        (Bedrock, "", "ABSKexample", "", "spec.base_url"),
        (Bedrock, "http://127.0.0.1:4566", "ABSKexample", "", "spec.base_url"),
        (Scripted, "http://host", "", "", "spec.base_url"),
        (Scripted, "", "key", "", "spec.api_key"),
        (Scripted, "", "", "{", "spec.script"),
        (Scripted, "", "", "42", "spec.script"),
    ] {
        refused(create(kind, base_url, api_key, script), &[field]);
    }
    let large = format!("\"{}\"", "x".repeat(1024 * 1024));
    refused(create(Scripted, "", "", &large), &["spec.script"]);
    let update = v1::UpdateModelProviderRequest {
        script: Some("{}".into()),
        ..v1::UpdateModelProviderRequest::default()
    };
    refused(check_model_provider_update(&update, &stored("", false)), &["script"]);
    let update =
        v1::UpdateModelProviderRequest { base_url: Some(String::new()), ..Default::default() };
    let bedrock = ModelProvider { kind: ModelProviderKind::Bedrock, ..stored(REGIONAL, false) };
    refused(check_model_provider_update(&update, &bedrock), &["base_url"]);
}

fn stored(base_url: &str, with_key: bool) -> ModelProvider {
    let key = || SealedSecret { key_id: "k".into(), nonce: vec![0; 12], ciphertext: vec![1] };
    ModelProvider {
        id: ModelProviderId::from_uuid(Uuid::from_u128(1)),
        organization: ORG,
        name: "p".into(),
        kind: ModelProviderKind::Openai,
        base_url: base_url.into(),
        script: None,
        key: with_key.then(key),
        additional_keys: Vec::new(),
        limits: construct_store::KeyLimits::default(),
        revision: 1,
        created_at: Timestamp::UNIX_EPOCH,
        updated_at: Timestamp::UNIX_EPOCH,
    }
}

#[test]
fn changed_origin_requires_a_new_key() {
    let update = |base_url: &str, api_key: Option<&str>| v1::UpdateModelProviderRequest {
        base_url: Some(base_url.into()),
        api_key: api_key.map(Into::into),
        ..v1::UpdateModelProviderRequest::default()
    };
    for (from, to) in [
        ("", "https://elsewhere"),
        ("https://vendor/v1", ""),
        ("https://vendor/v1", "https://elsewhere/v1"),
        ("https://vendor/v1", "http://vendor/v1"),
        ("https://vendor/v1", "https://vendor:8443/v1"),
        ("https://vendor/v1", "https://vendor.elsewhere/v1"),
    ] {
        refused(check_model_provider_update(&update(to, None), &stored(from, true)), &["api_key"]);
        for allowed in [
            check_model_provider_update(&update(to, Some("again")), &stored(from, true)),
            check_model_provider_update(&update(to, Some("")), &stored(from, true)),
            check_model_provider_update(&update(to, None), &stored(from, false)),
        ] {
            allowed.unwrap_or_else(|status| panic!("{from} to {to}: {status}"));
        }
    }
    for (from, to) in [
        ("", ""),
        ("https://vendor/v1", "https://VENDOR:443/v2?x=1"),
        ("http://localhost:11434", "http://localhost:11434/v1"),
    ] {
        check_model_provider_update(&update(to, None), &stored(from, true))
            .unwrap_or_else(|status| panic!("{from} to {to}: {status}"));
    }
    let unrelated = v1::UpdateModelProviderRequest { name: Some("q".into()), ..Default::default() };
    check_model_provider_update(&unrelated, &stored("https://vendor", true))
        .expect("the address stays");
}

#[test]
fn workspace_is_an_absolute_path_without_dots() {
    let create = |workspace: &str| {
        let spec = v1::TaskSpec {
            agent: "ada".into(),
            workspace: workspace.into(),
            ..v1::TaskSpec::default()
        };
        create_task(
            &v1::CreateTaskRequest { spec: Some(spec), ..v1::CreateTaskRequest::default() },
            &pools(),
        )
    };
    for good in ["", "/", "/home/me/project", "/a/..b"] {
        assert!(create(good).is_ok(), "{good}");
    }
    let long = format!("/{}", "x".repeat(4096));
    for bad in ["relative", "./x", "/a/../b", "/a\0b", long.as_str()] {
        refused(create(bad), &["spec.workspace"]);
    }
}

#[test]
fn titles_are_one_short_line() {
    let update = |title: &str| {
        update_task(&v1::UpdateTaskRequest {
            task: TASK.into(),
            title: Some(title.into()),
            ..v1::UpdateTaskRequest::default()
        })
    };
    assert_eq!(update(&"ü".repeat(200)).ok(), TASK.parse().ok());
    refused(update(&"ü".repeat(201)), &["title"]);
    refused(update("two\nlines"), &["title"]);
}

#[test]
fn user_messages_are_text() {
    let create = |blocks| {
        let spec = v1::MessageSpec { task: TASK.into(), blocks, ..v1::MessageSpec::default() };
        create_message(&v1::CreateMessageRequest {
            spec: Some(spec),
            ..v1::CreateMessageRequest::default()
        })
    };
    assert_eq!(create(vec![text("hello")]).ok(), TASK.parse().ok());
    assert!(create(vec![text(""), text("x")]).is_ok());
    assert!(create(vec![text(&"x".repeat(1_048_576))]).is_ok());
    refused(create(vec![text(&"x".repeat(1_048_577))]), &["spec.blocks"]);
    refused(create(vec![text(&"x".repeat(600_000)), text(&"x".repeat(600_000))]), &["spec.blocks"]);
    refused(create(Vec::new()), &["spec.blocks"]);
    refused(create(vec![text(" \n\t")]), &["spec.blocks"]);
    refused(create(vec![text("ok"), text("a\0b")]), &["spec.blocks[1].text.text"]);
    refused(create(vec![text("x"); 257]), &["spec.blocks"]);
    refused(create(vec![text("ok"), v1::Block { block: None }]), &["spec.blocks[1]"]);
    let call = block::Block::CodeInterpreterCall(v1::CodeInterpreterCall::default());
    refused(create(vec![text("ok"), v1::Block { block: Some(call) }]), &["spec.blocks[1]"]);
    let thinking = block::Block::Thinking(v1::Thinking::default());
    refused(create(vec![text("ok"), v1::Block { block: Some(thinking) }]), &["spec.blocks[1]"]);
}

#[test]
fn attachments_have_known_types_and_bounded_size() {
    use super::tasks::{ATTACHED_BYTES, MEDIA_TYPES};
    let create = |media_type: &str, name: &str, data: &[u8]| {
        let (media_type, name) = (media_type.into(), name.into());
        let attachment =
            v1::Attachment { media_type, name, data: data.into(), ..v1::Attachment::default() };
        let spec = v1::MessageSpec {
            task: TASK.into(),
            blocks: vec![v1::Block { block: Some(block::Block::Attachment(attachment)) }],
            ..v1::MessageSpec::default()
        };
        create_message(&v1::CreateMessageRequest {
            spec: Some(spec),
            ..v1::CreateMessageRequest::default()
        })
    };
    for media_type in MEDIA_TYPES.into_iter().chain(["text/plain", "text/x-rust"]) {
        create(media_type, "a name", b"x")
            .unwrap_or_else(|status| panic!("{media_type}: {status}"));
    }
    assert!(
        create("image/png", "", &[0xFF; ATTACHED_BYTES]).is_ok(),
        "nothing but an image may be said"
    );
    refused(create("image/png", "", &[0xFF; ATTACHED_BYTES + 1]), &["spec.blocks"]);
    for media_type in
        ["", "image/tiff", "text/", "text/a b", "text/plain; charset=utf-8", "audio/wav"]
    {
        refused(create(media_type, "", b"x"), &["spec.blocks[0].attachment.media_type"]);
    }
    refused(create("image/png", "a\nb", b"x"), &["spec.blocks[0].attachment.name"]);
    refused(create("image/png", "", b""), &["spec.blocks[0].attachment.data"]);
    refused(create("text/plain", "", b"\xFF"), &["spec.blocks[0].attachment.data"]);
    refused(create("application/json", "", b"a\0b"), &["spec.blocks[0].attachment.data"]);
}

#[test]
fn file_replaces_the_content_of_an_attachment() {
    let create = |attachment: v1::Attachment| {
        let spec = v1::MessageSpec {
            task: TASK.into(),
            blocks: vec![v1::Block { block: Some(block::Block::Attachment(attachment)) }],
            ..v1::MessageSpec::default()
        };
        create_message(&v1::CreateMessageRequest {
            spec: Some(spec),
            ..v1::CreateMessageRequest::default()
        })
    };
    let file = || v1::Attachment {
        file: "file_01890a5d-ac96-774b-bcce-b302099a8057".into(),
        ..Default::default()
    };
    assert!(create(file()).is_ok(), "nothing else need be said");
    assert!(create(v1::Attachment { media_type: "application/zip".into(), ..file() }).is_ok());
    refused(
        create(v1::Attachment { data: b"x".into(), ..file() }),
        &["spec.blocks[0].attachment.data"],
    );
    refused(
        create(v1::Attachment { name: "a\nb".into(), ..file() }),
        &["spec.blocks[0].attachment.name"],
    );
    for wrong in ["a.png", TASK, "file_1"] {
        refused(
            create(v1::Attachment { file: wrong.into(), ..file() }),
            &["spec.blocks[0].attachment.file"],
        );
    }
}

#[test]
fn ids_of_another_kind_are_refused() {
    let get = |task: &str| check(&v1::GetTaskRequest { task: task.into() });
    refused(get("agent_01890a5d-ac96-774b-bcce-b302099a8057"), &["task"]);
    refused(get(""), &["task"]);
    refused(check(&v1::GetMessageRequest { message: TASK.into() }), &["message"]);
    assert!(get(TASK).is_ok());
}

#[test]
fn filter_values_are_validated() {
    let filter = v1::list_tasks_request::Filter {
        agent: "No Name".into(),
        phase: 99,
        workspace: "relative".into(),
        created_after: Some(prost_types::Timestamp { seconds: i64::MAX, nanos: 0 }),
        created_before: Some(prost_types::Timestamp { seconds: 0, nanos: -1 }),
        parent: "agent_1".into(),
    };
    let request = v1::ListTasksRequest { filter: Some(filter), ..v1::ListTasksRequest::default() };
    let expected = [
        "filter.agent",
        "filter.phase",
        "filter.workspace",
        "filter.created_after",
        "filter.created_before",
        "filter.parent",
    ];
    let list = |request: &v1::ListTasksRequest| {
        list::<construct_store::Cursor>(ORG, request, &Column::TIMES)
    };
    refused(list(&request), &expected);
    let page = v1::PageRequest { order_by: "name".into(), ..v1::PageRequest::default() };
    refused(list(&v1::ListTasksRequest { page: Some(page), filter: None }), &["page.order_by"]);
}

#[test]
fn page_token_is_bound_to_the_messages_of_one_task() {
    let request = |task: TaskId, page_token: String| v1::ListMessagesRequest {
        task: task.to_string(),
        page: Some(v1::PageRequest { page_size: 1, page_token, ..v1::PageRequest::default() }),
        filter: None,
    };
    let (one, other) =
        (TaskId::from_uuid(Uuid::from_u128(1)), TaskId::from_uuid(Uuid::from_u128(2)));
    let list = |request: &v1::ListMessagesRequest| {
        list::<construct_store::MessageCursor>(ORG, request, &[Column::Position])
    };
    let page = list(&request(one, String::new())).expect("the request is valid");
    let cursor = construct_store::MessageCursor { position: Some(1), arrival: 1 };
    let token = page.cut(&[(), ()], Clone::clone, |()| cursor).1.next_page_token;
    assert!(list(&request(one, token.clone())).is_ok());
    refused(list(&request(other, token)), &["page.page_token"]);
}

#[test]
fn subscription_globs_are_bounded() {
    let with = |types: Vec<String>| {
        subscribe(v1::SubscribeRequest { types, ..v1::SubscribeRequest::default() })
    };
    assert!(with(vec!["message.*".into(); 32]).is_ok());
    refused(with(vec!["*".into(); 33]), &["types"]);
    refused(with(vec!["ok".into(), "[a-z]".into(), String::new()]), &["types[1]", "types[2]"]);
    refused(
        subscribe(v1::SubscribeRequest { task: "x".into(), cursor: "y".into(), types: Vec::new() }),
        &["task", "cursor"],
    );
}

#[test]
fn pinned_facts_are_bounded_and_not_blank() {
    let with = |pinned: Vec<String>| {
        let spec =
            v1::TaskSpec { agent: "ada".into(), pinned: pinned.clone(), ..v1::TaskSpec::default() };
        let create = v1::CreateTaskRequest { spec: Some(spec), ..v1::CreateTaskRequest::default() };
        let pinned = Some(v1::PinnedFacts { facts: pinned });
        let update =
            v1::UpdateTaskRequest { task: TASK.into(), pinned, ..v1::UpdateTaskRequest::default() };
        (create_task(&create, &pools()), update_task(&update))
    };
    for good in
        [vec![], vec!["ü".repeat(2000); 8], vec!["x".repeat(500); 32], vec!["two\nlines".into()]]
    {
        let (create, update) = with(good);
        assert!(create.is_ok() && update.is_ok(), "{create:?} {update:?}");
    }
    let fact = || "It rains.".to_owned();
    for (bad, place) in [
        (vec![fact(), " \n".into()], "[1]"),
        (vec![fact(), fact(), "ü".repeat(2001)], "[2]"),
        (vec!["a\0b".into()], "[0]"),
        (vec![fact(); 33], ""),
        ([vec!["ü".repeat(2000); 8], vec!["x".into()]].concat(), ""),
    ] {
        let (create, update) = with(bad);
        refused(create, &[&format!("spec.pinned{place}")]);
        refused(update, &[&format!("pinned.facts{place}")]);
    }
    // All violations are reported at once.
    let (create, _) = with(vec![String::new(), "y".repeat(2001), "x".repeat(15_000)]);
    refused(create, &["spec.pinned[0]", "spec.pinned[1]", "spec.pinned[2]", "spec.pinned"]);
}
