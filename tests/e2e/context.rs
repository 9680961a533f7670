//! Conversations beyond their model's context window, and models in loops.

use construct_proto::v1::{self, MessageSource, TurnOutcome, event::Payload};
use construct_tests::{
    client::{Client, Conversation, id},
    mesh::{Mesh, Service},
    recorder::check_order,
    vendor::{Captured, VendorServer, anthropic},
};
use serde_json::json;

/// A summary with all required sections.
const SUMMARY: &str = "# Goal\nTo remember.\n# Facts\n# Done\n# Open\nNothing.";

/// Sets the context window of a model, of which the answer may have a thousand tokens.
async fn set_context_window(client: &Client, model: &str, tokens: i64) {
    let request = v1::UpdateModelRequest {
        model: model.to_owned(),
        context_window: Some(tokens),
        max_output_tokens: Some(1_000),
        ..Default::default()
    };
    client.models().update_model(request).await.unwrap();
}

/// A text of about so many tokens, as vendors count.
fn text_of_tokens(tokens: usize) -> String {
    format!("Remember this: {}", "abc ".repeat(tokens))
}

fn compactions(events: &[v1::Event]) -> Vec<v1::ContextCompacted> {
    let compacted = events.iter().filter_map(|event| match &event.payload {
        Some(Payload::ContextCompacted(compacted)) => Some(compacted.clone()),
        _ => None,
    });
    compacted.collect()
}

/// Fills a conversation until it is compacted.
async fn fill(conversation: &Conversation) -> v1::TaskStatus {
    for _ in 0..12 {
        let status = conversation.ask(&text_of_tokens(2_000)).await.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{status:?}");
        assert!(
            status.context_tokens > 0 && status.context_tokens < status.context_limit,
            "{status:?}"
        );
        if status.compacted_through > 0 {
            return status;
        }
    }
    panic!("it was never summed up: {:?}", conversation.task().await);
}

#[tokio::test]
async fn long_conversation_is_compacted_repeatedly_and_stays_listed() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({
        "summary": {"text": SUMMARY, "usage": {"input": 5_000, "output": 10}},
        "conversations": [{"match": "Remember", "turns": [{"text": "I do."}]}],
    });
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    set_context_window(&client, "worker", 24_000).await;
    let conversation = client.create_task("worker", None).await.unwrap();
    let recorder = conversation.record();
    let first = fill(&conversation).await;
    let mut last = first.clone();
    while last.compacted_through == first.compacted_through {
        last = conversation.ask(&text_of_tokens(2_000)).await.status.unwrap();
    }
    let events = recorder.wait_for_sequence(last.event_sequence).await;
    check_order(&events);
    let told = compactions(&events);
    assert_eq!(told.len(), 2, "{told:?}");
    for compacted in &told {
        assert!(compacted.summary && compacted.text.ends_with(SUMMARY), "{compacted:?}");
        assert!(compacted.tokens_after < compacted.tokens_before, "{compacted:?}");
    }
    assert_eq!(told[1].through_position, last.compacted_through);
    let transcript = conversation.transcript().await;
    assert_eq!(
        transcript.from_source(MessageSource::User).len(),
        transcript.answers().len(),
        "everything is listed"
    );
    let answer = i64::from(transcript.answers().len() as u32);
    assert!(answer * 2 == last.message_count, "a summary is no message");

    // A fork continues with the summary, and a rewind to before it shows the originals.
    let end = transcript.messages.last().unwrap();
    let request = v1::ForkTaskRequest {
        task: conversation.id().to_owned(),
        message: id(end.metadata.as_ref()),
        ..Default::default()
    };
    let copy = client.tasks().fork_task(request).await.unwrap().into_inner();
    assert_eq!(copy.status.as_ref().unwrap().compacted_through, last.compacted_through);
    let copy = client.conversation(&id(copy.metadata.as_ref()));
    assert_eq!(
        copy.ask(&text_of_tokens(10)).await.status.unwrap().last_outcome(),
        TurnOutcome::Completed
    );
    let request = v1::RewindTaskRequest {
        task: conversation.id().to_owned(),
        message: id(transcript.messages[2].metadata.as_ref()),
        ..Default::default()
    };
    client.tasks().rewind_task(request).await.unwrap();
    let back = conversation
        .wait_for_task("the task to be rewound", |_, status| status.compacted_through == 0)
        .await;
    assert_eq!(back.status.unwrap().phase(), v1::TaskPhase::AwaitInput);
    assert_eq!(
        conversation.ask(&text_of_tokens(10)).await.status.unwrap().last_outcome(),
        TurnOutcome::Completed
    );
}

#[tokio::test]
async fn compaction_survives_worker_crashes_and_is_explained() {
    let mut mesh = Mesh::start().await.unwrap();
    let script = json!({
        "summary": {"text": SUMMARY, "fault": {"stall_ms": 4_000, "times": 0}},
        "conversations": [{"match": "Remember", "turns": [{"text": "I do."}]}],
    });
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    set_context_window(&client, "worker", 40_000).await;
    let conversation = client.create_task("worker", None).await.unwrap();
    let recorder = conversation.record();
    for _ in 0..3 {
        conversation.ask(&text_of_tokens(3_000)).await;
    }
    // The same conversation continues with an agent whose model has a smaller window.
    mesh.scripted_agent("small", &script).await.unwrap();
    set_context_window(&client, "small", 16_000).await;
    let request = v1::UpdateTaskRequest {
        task: conversation.id().to_owned(),
        agent: Some("small".to_owned()),
        ..Default::default()
    };
    client.tasks().update_task(request).await.unwrap();
    conversation.submit(&text_of_tokens(100)).await;
    let waits = construct_tests::wait::until(
        "the summary to be asked for",
        construct_tests::client::TURN_TIMEOUT,
        async || {
            let why = conversation.explain().await.map_err(|status| status.to_string())?;
            if why.waiting_for.contains("a summary of the conversation") {
                Ok(why)
            } else {
                Err(format!("{why:?}"))
            }
        },
    )
    .await;
    assert!(waits.deadline.is_some());
    mesh.crash(Service::Reconciler).await.unwrap();
    mesh.crash(Service::Providers).await.unwrap();
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{status:?}");
    assert!(
        status.compacted_through > 0 && status.context_tokens < status.context_limit,
        "{status:?}"
    );
    let told = compactions(&recorder.wait_for_sequence(status.event_sequence).await);
    assert!(matches!(told.as_slice(), [one] if one.summary), "{told:?}");
}

/// The system prompt of a model's request.
fn system_prompt(request: &Captured) -> &str {
    request.body["system"][0]["text"].as_str().unwrap_or_default()
}

/// Whether a model was asked for a summary.
fn is_summary_request(request: &Captured) -> bool {
    system_prompt(request).contains("no longer fits the assistant's memory")
}

#[tokio::test]
async fn pinned_facts_are_in_every_call_after_compaction_and_fallback() {
    const PORT: &str = "The port is 8417.";
    const ANN: &str = "Ann decides.";
    let vendor = VendorServer::answering(|request| {
        let text = if is_summary_request(request) { SUMMARY } else { "I do." };
        // About as vendors count.
        let tokens = u32::try_from(request.body.to_string().len() / 4).unwrap_or(u32::MAX);
        anthropic::Answer::text(text).with_usage(tokens, 0, 0, 10).reply()
    })
    .await;
    let mesh = Mesh::start().await.unwrap();
    let client = mesh.client().unwrap();
    for (name, tokens) in [("large", 24_000), ("small", 16_000)] {
        let provider = v1::ModelProviderSpec {
            name: name.to_owned(),
            r#type: v1::ModelProviderType::Anthropic.into(),
            base_url: vendor.url(),
            api_key: "sk-test-0123456789".to_owned(),
            ..Default::default()
        };
        mesh.agent(name, provider).await.unwrap();
        set_context_window(&client, name, tokens).await;
    }
    // With a title, no model call is made for one.
    let (agent, title, pinned) = ("large".to_owned(), "A job".to_owned(), vec![PORT.to_owned()]);
    let conversation = client
        .create_task_with(v1::TaskSpec { agent, title, pinned, ..Default::default() })
        .await
        .unwrap();
    let pin = async |agent: Option<&str>, facts: &[&str]| {
        let facts = facts.iter().map(|fact| (*fact).to_owned()).collect();
        let request = v1::UpdateTaskRequest {
            task: conversation.id().to_owned(),
            agent: agent.map(ToOwned::to_owned),
            pinned: Some(v1::PinnedFacts { facts }),
            ..Default::default()
        };
        client.tasks().update_task(request).await.unwrap();
    };
    let newest = || vendor.requests().pop().expect("the model was called");

    fill(&conversation).await;
    let requests = vendor.requests();
    let summaries: Vec<_> = requests.iter().filter(|request| is_summary_request(request)).collect();
    assert!(
        matches!(summaries.as_slice(), [one] if !system_prompt(one).contains(PORT)),
        "{}",
        summaries.len()
    );
    for request in requests.iter().filter(|request| !is_summary_request(request)) {
        assert_eq!(system_prompt(request).matches(PORT).count(), 1, "{}", system_prompt(request));
    }
    let after = newest();
    assert!(
        !is_summary_request(&after) && after.body["messages"].to_string().contains("To remember."),
        "{after:?}"
    );

    // Its size counts toward the context window.
    let long = "abc ".repeat(500);
    let without = conversation.ask(&text_of_tokens(10)).await.status.unwrap();
    pin(None, &[PORT, &long, &long]).await;
    let with = conversation.ask(&text_of_tokens(10)).await.status.unwrap();
    assert!(with.context_tokens > without.context_tokens + 500, "{with:?} after {without:?}");
    conversation.ask(&text_of_tokens(3_500)).await;

    // A fact that is pinned in between is in every call from the next one on, also with a smaller
    // model, for which the conversation is compacted again.
    pin(Some("small"), &[PORT, ANN]).await;
    let status = conversation.ask(&text_of_tokens(100)).await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{status:?}");
    let is_of_small = |request: &Captured| request.body["model"] == "small";
    assert!(
        vendor.requests().iter().any(|request| is_of_small(request) && is_summary_request(request)),
        "{status:?}"
    );
    let asked = newest();
    assert!(is_of_small(&asked) && !is_summary_request(&asked));
    assert!(
        system_prompt(&asked).ends_with(&format!("\n- {PORT}\n- {ANN}\n")),
        "{}",
        system_prompt(&asked)
    );
    pin(None, &[]).await;
    conversation.ask(&text_of_tokens(10)).await;
    assert!(!system_prompt(&newest()).contains("# Pinned"), "{}", system_prompt(&newest()));
}

#[tokio::test]
async fn prompt_refused_as_too_long_is_compacted_and_retried() {
    let mesh = Mesh::start().await.unwrap();
    let fits = json!({"text": "That fits."});
    let script = json!({
        "summary": {"text": ""},
        "conversations": [
            // The fifth visible answer; it is that one while nothing is left out.
            {"match": "too much", "count": "total", "turns": [
                fits, fits, fits, fits,
                {"text": "unused", "fault": {"class": "context_too_long", "message": "too many tokens", "times": 0}},
            ]},
            {"match": "Remember", "turns": [{"text": "I do."}]},
        ],
    });
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let conversation = client.create_task("worker", None).await.unwrap();
    let recorder = conversation.record();
    for _ in 0..4 {
        conversation.ask(&text_of_tokens(500)).await;
    }
    let status = conversation.ask("Is it too much?").await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{status:?}");
    assert_eq!(
        conversation.transcript().await.answers().last().map(String::as_str),
        Some("That fits.")
    );
    // No summary was possible, as the model's answer was empty: the oldest exchanges are left out.
    let told = compactions(&recorder.wait_for_sequence(status.event_sequence).await);
    assert!(
        matches!(told.as_slice(), [one] if !one.summary && one.text.contains("left out")),
        "{told:?}"
    );
}

#[tokio::test]
async fn looping_model_is_warned_once_then_stopped_with_own_reason() {
    let mesh = Mesh::start().await.unwrap();
    let turns: Vec<_> = (0..20).map(|_| json!({"code": [["'the same'"]]})).collect();
    mesh.scripted_agent("worker", &json!({"turns": turns})).await.unwrap();
    let client = mesh.client().unwrap();
    let conversation = client.create_task("worker", None).await.unwrap();
    let recorder = conversation.record();
    let status = conversation.ask("Find it.").await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Failed);
    assert_eq!(status.last_error.unwrap().code, "STUCK");
    let events = recorder.wait_for_sequence(status.event_sequence).await;
    let ended = events.iter().find_map(|event| match &event.payload {
        Some(Payload::TurnCompleted(turn)) => Some(turn.clone()),
        _ => None,
    });
    let ended = ended.expect("the turn's end is published");
    assert_eq!((ended.turns, ended.error.unwrap().code), (6, "STUCK".to_owned()));
    let transcript = conversation.transcript().await;
    let told = transcript.messages.iter().filter(|message| {
        construct_tests::transcript::status(message).source() == MessageSource::System
            && construct_tests::transcript::text(message).contains("your turn ends")
    });
    assert_eq!(told.count(), 1, "{}", transcript.show());
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for.contains("STUCK"), "{why:?}");
}
