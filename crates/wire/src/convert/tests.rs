use std::collections::BTreeMap;

use construct_domain::{
    AgentId, MessageId, ModelId, ModelProviderId, TaskId,
    message::{CodeCall, CodeResult, Content, ToolUse},
    task::{Stage, Task, Turn},
};
use construct_store::SealedSecret;
use uuid::Uuid;

use super::*;

const NOW: Timestamp = Timestamp::constant(1_700_000_000, 123_456_000);

fn stored_task() -> StoredTask {
    StoredTask {
        state: Task {
            id: TaskId::from_uuid(Uuid::from_u128(1)),
            organization: OrganizationId::LOCAL,
            agent: AgentId::from_uuid(Uuid::from_u128(2)),
            suspend: false,
            cancel: None,
            rewind: None,
            retry: None,
            max_turns: 50,
            titled: false,
            phase: Phase::AwaitInput,
            turn: None,
            step: None,
            title_step: None,
            steps: 0,
            last_position: 0,
            next_wake: None,
            last_outcome: None,
            last_error: None,
            approvals: Vec::new(),
            subtasks: None,
            context: construct_domain::context::Context::default(),
        },
        agent_name: "ada".into(),
        workspace: "/w".into(),
        title: "A title".into(),
        max_turns_override: 7,
        policy: Vec::new(),
        pinned: Vec::new(),
        compute: "cpu-4".into(),
        phase_since: NOW,
        usage: Usage::default(),
        tool_uses: BTreeMap::new(),
        queued_count: 0,
        event_sequence: 9,
        trace_id: None,
        forked_from: None,
        ancestors: Vec::new(),
        subtasks: Vec::new(),
        revision: 3,
        created_at: NOW,
        updated_at: NOW,
        unreadable: Vec::new(),
    }
}

fn every_rule() -> Rule {
    let list = |text: &str| vec![text.to_owned()];
    Rule {
        action: Action::Ask,
        tools: list("t"),
        paths: list("p"),
        commands: list("c"),
        hosts: list("h"),
        methods: list("m"),
        agents: list("a"),
        reason: "r".to_owned(),
    }
}

#[test]
fn rules_convert_both_ways() {
    assert_eq!(to_rule(rule(&every_rule())), Some(every_rule()));
    assert_eq!(to_rule(v1::PolicyRule::default()), None);
}

#[test]
fn approval_states_convert_both_ways() {
    for state in ApprovalState::ALL {
        assert_eq!(to_approval_state(approval_state(state)), Some(state));
    }
}

fn turn(stage: Stage) -> Turn {
    Turn { calls: 4, ..Turn::new(MessageId::from_uuid(Uuid::from_u128(3)), stage) }
}

#[test]
fn task_has_all_fields() {
    let mut stored = stored_task();
    stored.state.suspend = true;
    stored.state.phase = Phase::InvokeModel;
    stored.state.turn = Some(turn(Stage::Model));
    stored.state.last_position = 12;
    stored.state.last_outcome = Some(TurnOutcome::MaxTurns);
    stored.state.last_error =
        Some(TaskError { code: "MAX_TURNS".into(), message: "enough".into(), time: NOW });
    stored.queued_count = 2;
    stored.usage = Usage {
        input_tokens: 1,
        output_tokens: 2,
        cache_read_tokens: 3,
        cache_write_tokens: 4,
        thinking_tokens: 2,
        cost_pico_usd: 5,
    };
    stored.tool_uses = BTreeMap::from([("grep".to_owned(), 6)]);
    let task = task(&stored);
    let (metadata, spec, status) =
        (task.metadata.expect("set"), task.spec.expect("set"), task.status.expect("set"));
    assert_eq!(
        (metadata.revision, metadata.organization_id),
        (3, OrganizationId::LOCAL.to_string())
    );
    assert_eq!(
        metadata.created_at,
        Some(prost_types::Timestamp { seconds: 1_700_000_000, nanos: 123_456_000 })
    );
    assert_eq!(
        (spec.agent.as_str(), spec.workspace.as_str(), spec.title.as_str(), spec.max_turns),
        ("ada", "/w", "A title", 7)
    );
    assert_eq!(status.phase(), v1::TaskPhase::InvokeModel);
    assert_eq!(status.desired_phase(), v1::TaskPhase::Suspended);
    assert_eq!(status.last_outcome(), v1::TurnOutcome::MaxTurns);
    assert_eq!(status.last_error.expect("set").code, "MAX_TURNS");
    assert_eq!(
        (status.message_count, status.queued_count, status.turns_used, status.event_sequence),
        (12, 2, 4, 9)
    );
    assert_eq!(status.tool_uses.get("grep"), Some(&6));
    assert_eq!(status.usage.expect("set").cost_pico_usd, 5);

    // A task with an unknown phase must not seem to be at rest.
    stored.unreadable = vec!["phase"];
    assert_eq!(super::task(&stored).status.expect("set").phase(), v1::TaskPhase::Unspecified);
}

#[test]
fn api_key_is_never_included() {
    let provider = ModelProvider {
        id: ModelProviderId::from_uuid(Uuid::nil()),
        organization: OrganizationId::LOCAL,
        name: "p".into(),
        kind: ModelProviderKind::Openai,
        base_url: String::new(),
        script: None,
        key: Some(SealedSecret {
            key_id: "k1".into(),
            nonce: vec![1; 12],
            ciphertext: vec![2; 30],
        }),
        additional_keys: vec![SealedSecret {
            key_id: "k1".into(),
            nonce: vec![1; 12],
            ciphertext: vec![3; 30],
        }],
        limits: construct_store::KeyLimits { requests_per_minute: 60, ..Default::default() },
        revision: 1,
        created_at: NOW,
        updated_at: NOW,
    };
    let provider = model_provider(&provider);
    let (spec, status) = (provider.spec.expect("set"), provider.status.expect("set"));
    assert_eq!(spec.api_key, "");
    assert!(spec.additional_api_keys.is_empty());
    assert_eq!((spec.requests_per_minute, status.additional_api_keys), (60, 1));
    assert_eq!(spec.r#type(), v1::ModelProviderType::Openai);
    assert_eq!((status.api_key_set, status.encryption_key_id.as_str()), (true, "k1"));
}

#[test]
fn agents_and_models_name_their_references() {
    let parameters = ModelParameters {
        temperature: Some(0.5),
        stop_sequences: vec!["x".into()],
        ..ModelParameters::default()
    };
    let stored = Agent {
        id: AgentId::from_uuid(Uuid::nil()),
        organization: OrganizationId::LOCAL,
        model: ModelId::from_uuid(Uuid::nil()),
        model_name: "m".into(),
        name: "ada".into(),
        description: "d".into(),
        instructions: "i".into(),
        max_turns: 0,
        parameters: parameters.clone(),
        policy: vec![every_rule()],
        compute: "cpu-8".into(),
        secrets: vec!["TOKEN".into()],
        script_models: vec!["mini".into()],
        compact_at: 70,
        task_count: 3,
        revision: 1,
        created_at: NOW,
        updated_at: NOW,
    };
    let agent = agent(&stored);
    let spec = agent.spec.expect("set");
    assert_eq!((spec.model.as_str(), spec.max_turns), ("m", 0));
    assert_eq!(spec.secrets, ["TOKEN"]);
    assert_eq!(spec.script_models, ["mini"]);
    assert_eq!(to_parameters(spec.parameters.expect("set")), parameters);
    assert_eq!(agent.status.expect("set").task_count, 3);
    let rates = Rates { input: 5, output: 6, cache_read: 7, cache_write: 8, thinking: 9 };
    let long_context = Some(LongContext { above_input_tokens: 10, rates });
    let prices = Prices {
        input: 1,
        output: 2,
        cache_read: 3,
        cache_write: 4,
        thinking: 11,
        request: 12,
        long_context,
    };
    let stored = Model {
        id: ModelId::from_uuid(Uuid::nil()),
        organization: OrganizationId::LOCAL,
        provider: ModelProviderId::from_uuid(Uuid::nil()),
        provider_name: "p".into(),
        name: "m".into(),
        vendor_model: "vendor/m".into(),
        context_window: 10,
        max_output_tokens: 5,
        prices,
        prices_source: PricesSource::Catalog,
        tool_calling: false,
        fallbacks: vec![Fallback {
            model: ModelId::from_uuid(Uuid::nil()),
            name: "other".into(),
            weight: 3,
        }],
        hedge_after_ms: 1_500,
        revision: 1,
        created_at: NOW,
        updated_at: NOW,
    };
    let spec = model(&stored).spec.expect("set");
    assert_eq!((spec.provider.as_str(), spec.vendor_model.as_str()), ("p", "vendor/m"));
    assert_eq!(spec.tool_calling, Some(false));
    assert_eq!(spec.fallbacks, [v1::ModelFallback { model: "other".into(), weight: 3 }]);
    assert_eq!(spec.hedge_after.map(to_hedge_after), Some(1_500));
    assert_eq!(to_prices(spec.prices.expect("set")), prices);
    assert_eq!(model(&stored).status.expect("set").prices_source(), v1::PricesSource::Catalog);
}

const FILE: &str = "file_01890a5d-ac96-774b-bcce-b302099a8057";

#[test]
fn transcript_blocks_convert_completely() {
    let file = message::Attachment {
        media_type: "text/csv".into(),
        name: "t.csv".into(),
        data: String::new(),
        file: Some(message::AttachedFile {
            id: FILE.parse().expect("an id"),
            sha256: "0f".repeat(32),
            size: 7,
        }),
    };
    let uses = vec![ToolUse {
        number: 1,
        name: "grep".into(),
        succeeded: true,
        duration_micros: 5,
        arguments: "{\"query\":\"x\"}".into(),
        result: "[]".into(),
    }];
    let stored = StoredMessage {
        id: MessageId::from_uuid(Uuid::nil()),
        organization: OrganizationId::LOCAL,
        task: TaskId::from_uuid(Uuid::nil()),
        arrival: 0,
        position: Some(2),
        source: Source::Assistant,
        content: Content {
            blocks: vec![
                Block::Text("hi".into()),
                Block::CodeInterpreterCall(CodeCall { id: "c".into(), code: "1".into() }),
                Block::CodeInterpreterResult(CodeResult {
                    id: "c".into(),
                    output: "o".into(),
                    error: "e".into(),
                    tool_uses: uses.clone(),
                }),
                Block::Thinking(message::Thinking {
                    text: "Hm.".into(),
                    vendor: "v".into(),
                    provider_id: "p".into(),
                    data: "sealed".into(),
                }),
                Block::Attachment(message::Attachment {
                    media_type: "image/png".into(),
                    name: "a".into(),
                    data: "AP+A".into(),
                    file: None,
                }),
                Block::Attachment(file.clone()),
            ],
        },
        agent: None,
        processed_at: Some(NOW),
        error: None,
        interrupts: false,
        superseded_at: None,
        replaces: None,
        usage: Usage { output_tokens: 1, ..Usage::default() },
        step: None,
        revision: 1,
        created_at: NOW,
        updated_at: NOW,
    };
    let shown = message(&stored);
    let (spec, status) = (shown.spec.expect("set"), shown.status.expect("set"));
    assert!(
        matches!(&spec.blocks[1].block, Some(v1::block::Block::CodeInterpreterCall(call)) if call.code == "1")
    );
    let Some(v1::block::Block::CodeInterpreterResult(result)) = &spec.blocks[2].block else {
        panic!("a result")
    };
    assert_eq!((result.error.as_str(), result.tool_uses[0].name.as_str()), ("e", "grep"));
    assert_eq!(to_code_result(result.clone()).tool_uses, uses);
    assert_eq!((status.position, status.usage.expect("the model wrote it").output_tokens), (2, 1));
    // Users send text and attachments only.
    let (media_type, name, data) = ("image/png".into(), "a".into(), "AP+A".into());
    let attachment = message::Attachment { media_type, name, data, file: None };
    let expected =
        [Block::Text("hi".into()), Block::Attachment(attachment), Block::Attachment(file)];
    assert_eq!(to_content(spec.blocks.clone()).blocks, expected);
    let Some(v1::block::Block::Attachment(shown)) = &spec.blocks[4].block else {
        panic!("an attachment")
    };
    assert_eq!((&shown.data[..], shown.file.as_str()), (&[0x00, 0xFF, 0x80][..], ""));
    let Some(v1::block::Block::Attachment(shown)) = &spec.blocks[5].block else {
        panic!("an attachment")
    };
    assert_eq!((shown.file.as_str(), shown.sha256.len(), shown.size), (FILE, 64, 7));
    let back: Vec<Block> = spec.blocks.into_iter().filter_map(to_block).collect();
    assert_eq!(back, stored.content.blocks, "nothing is lost between reconciler and vendor");
    let queued = message(&StoredMessage { position: None, source: Source::User, ..stored })
        .status
        .expect("set");
    assert_eq!((queued.position, queued.usage), (0, None));
}

#[test]
fn values_convert_both_ways() {
    for value in Phase::ALL {
        assert_eq!(to_phase(phase(value)), Some(value));
    }
    for value in [Source::User, Source::Assistant, Source::System] {
        assert_eq!(to_source(source(value)), Some(value));
    }
    for value in ModelProviderKind::ALL {
        assert_eq!(to_provider_kind(provider_type(value)), Some(value));
        assert_eq!(ModelProviderKind::parse(value.as_str()), Some(value));
    }
    for value in [
        None,
        Some(ThinkingEffort::Off),
        Some(ThinkingEffort::Low),
        Some(ThinkingEffort::Medium),
        Some(ThinkingEffort::High),
    ] {
        let thinking = ModelParameters { thinking: value, ..ModelParameters::default() };
        assert_eq!(to_parameters(parameters(&thinking)), thinking);
    }
    assert_eq!(to_phase(v1::TaskPhase::Unspecified), None);
    assert_eq!(to_source(v1::MessageSource::Unspecified), None);
    assert_eq!(to_provider_kind(v1::ModelProviderType::Unspecified), None);
}

#[test]
fn budget_names_its_owner_in_one_field() {
    let agent = AgentId::from_uuid(Uuid::from_u128(2));
    let stored = Budget {
        id: construct_domain::BudgetId::from_uuid(Uuid::nil()),
        organization: OrganizationId::LOCAL,
        scope: Scope::Agent(agent),
        agent_name: "ada".into(),
        period: Period::Month,
        limit: 5,
        since: Some(NOW),
        spent: 3,
        reserved: 1,
        revision: 2,
        created_at: NOW,
        updated_at: NOW,
    };
    let shown = budget(&stored);
    let (spec, status) = (shown.spec.expect("set"), shown.status.expect("set"));
    assert_eq!((spec.agent.as_str(), spec.task.as_str(), spec.token_id.as_str()), ("ada", "", ""));
    assert_eq!((spec.period(), spec.limit_pico_usd), (v1::BudgetPeriod::Month, 5));
    assert_eq!(
        (status.agent_id, status.spent_pico_usd, status.reserved_pico_usd),
        (agent.to_string(), 3, 1)
    );
    assert_eq!(status.since, Some(time(NOW)));
    let task = TaskId::from_uuid(Uuid::nil());
    let of_task =
        budget(&Budget { scope: Scope::Task(task), agent_name: String::new(), ..stored.clone() });
    assert_eq!(of_task.spec.expect("set").task, task.to_string());
    for period in Period::ALL {
        assert_eq!(to_period(super::period(period)), Some(period));
    }
    assert_eq!(to_period(v1::BudgetPeriod::Unspecified), None);
}
