//! One trace from a client's request to the vendor's answer and each tool call, through every
//! service.

use std::collections::{BTreeMap, BTreeSet};

use construct_proto::v1;
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT},
    collector::{Collector, Span},
    mesh::{Mesh, Service},
    vendor::{VendorServer, anthropic},
    wait::until,
};

/// The client's own span, in which it sends its message.
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";
const KEY: &str = "sk-test-0123456789";
const QUESTION: &str = "What-nobody-is-to-read-in-a-trace?";
const CODE: &str = "create_file('Nobody-reads-this.txt', 'made'); execute_command('echo Nor-that'); try { read_file('none') } catch {} 1";

/// Whether `outer` is an ancestor of a span.
fn is_within(span: &Span, outer: &Span, by_id: &BTreeMap<String, Span>) -> bool {
    let mut at = span;
    while let Some(parent) = by_id.get(&at.parent) {
        if parent.id == outer.id {
            return true;
        }
        at = parent;
    }
    false
}

/// A mesh that exports its traces, with an agent of the vendor's.
async fn traced_mesh(
    collector: &Collector,
    vendor: &VendorServer,
    settings: &[(&str, &str)],
) -> Mesh {
    let mut mesh = Mesh::prepare(settings).await.unwrap();
    mesh.set_env("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url());
    mesh.set_env("OTEL_BSP_SCHEDULE_DELAY", "200");
    mesh.start_services().await.unwrap();
    let provider = v1::ModelProviderSpec {
        name: "worker".into(),
        r#type: v1::ModelProviderType::Anthropic.into(),
        base_url: vendor.url(),
        api_key: KEY.into(),
        ..v1::ModelProviderSpec::default()
    };
    mesh.agent("worker", provider).await.unwrap();
    // A reconciler that takes over its partitions reconciles existing tasks without a trace. Here
    // that is over.
    mesh.scripted_agent("warm", &serde_json::json!({"turns": [{"text": "{{last_user_text}}"}]}))
        .await
        .unwrap();
    mesh.client().unwrap().create_task("warm", None).await.unwrap().ask("hello").await;
    mesh
}

/// A new task with a message that a client sends in its own trace.
async fn begin(mesh: &Mesh) -> Conversation {
    let spec =
        v1::TaskSpec { agent: "worker".into(), title: "A job".into(), ..v1::TaskSpec::default() };
    let conversation = mesh.client().unwrap().create_task_with(spec).await.unwrap();
    let text =
        v1::Block { block: Some(v1::block::Block::Text(v1::Text { text: QUESTION.to_owned() })) };
    let spec = v1::MessageSpec {
        task: conversation.id().to_owned(),
        blocks: vec![text],
        ..v1::MessageSpec::default()
    };
    let request =
        v1::CreateMessageRequest { spec: Some(spec), ..v1::CreateMessageRequest::default() };
    let mut request = tonic::Request::new(request);
    request
        .metadata_mut()
        .insert("traceparent", format!("00-{TRACE}-{PARENT}-01").parse().unwrap());
    mesh.client().unwrap().messages().create_message(request).await.unwrap();
    conversation
}

/// The traces in which a task's calls were made, once there are enough of them.
async fn traces_of_calls(
    collector: &Collector,
    conversation: &Conversation,
    enough: usize,
) -> BTreeSet<String> {
    let calls = until("the calls of the task", TURN_TIMEOUT, async || {
        let mut calls = collector.spans();
        calls.retain(|span| {
            span.name == "providers.model.invoke"
                && span.attribute("construct.task") == conversation.id()
        });
        if calls.len() >= enough { Ok(calls) } else { Err(calls) }
    })
    .await;
    calls.into_iter().map(|call| call.trace).collect()
}

#[tokio::test]
async fn one_trace_joins_a_turn_across_all_services() {
    let (collector, vendor) = (Collector::start().await, VendorServer::start().await);
    let mut mesh = traced_mesh(&collector, &vendor, &[]).await;
    // The first call fails, and is retried.
    vendor.reply(anthropic::error(529, "overloaded_error", "busy"));
    vendor.reply(
        anthropic::Answer::text("I look.").and_code("toolu_1", CODE).with_usage(7, 0, 0, 9).reply(),
    );
    vendor.reply(anthropic::Answer::text("It is done.").with_usage(5, 0, 0, 7).reply());
    let conversation = begin(&mesh).await;
    conversation.wait_until_idle().await;

    let wanted = |spans: &[Span], name: &str, count| {
        spans.iter().filter(|span| span.name == name).count() >= count
    };
    let spans = until("all of the trace", TURN_TIMEOUT, async || {
        let spans = collector.trace(TRACE);
        let whole = wanted(&spans, "reconciler.task.look", 4)
            && wanted(&spans, "providers.model.invoke", 2)
            && wanted(&spans, "interpreter.step.execute", 1)
            && wanted(&spans, "gateway.request", 1);
        if whole {
            Ok(spans)
        } else {
            Err(collector
                .spans()
                .into_iter()
                .map(|span| (span.trace, span.name))
                .collect::<Vec<_>>())
        }
    })
    .await;
    let services: BTreeSet<&str> = spans.iter().map(|span| span.service.as_str()).collect();
    let all = [
        "construct-gateway",
        "construct-interpreter",
        "construct-providers",
        "construct-reconciler",
    ];
    assert_eq!(services, BTreeSet::from(all));
    // No span is an orphan: each has an ancestor, and the last one is the client's.
    let by_id: BTreeMap<String, Span> =
        spans.iter().map(|span| (span.id.clone(), span.clone())).collect();
    for span in &spans {
        assert!(
            span.parent == PARENT || by_id.contains_key(&span.parent),
            "{span:#?} has no parent among {spans:#?}"
        );
    }
    let named = |name: &str| spans.iter().filter(|span| span.name == name).collect::<Vec<_>>();

    // Spans of received messages follow the semantic conventions.
    for (name, stream) in [
        ("providers.model.invoke", "CONSTRUCT_MODEL"),
        ("interpreter.step.execute", "CONSTRUCT_CODE"),
    ] {
        for span in named(name) {
            assert_eq!(
                (
                    span.kind,
                    span.attribute("messaging.system"),
                    span.attribute("messaging.operation.type")
                ),
                ("SPAN_KIND_CONSUMER", "nats", "process"),
                "{span:#?}"
            );
            assert_eq!(span.attribute("messaging.destination.name"), stream, "{span:#?}");
            assert_eq!(span.attribute("construct.task"), conversation.id());
        }
    }
    // A span for each call of the vendor, including the failed one, within the step that made it.
    let calls: Vec<&Span> =
        spans.iter().filter(|span| span.attribute("gen_ai.operation.name") == "chat").collect();
    assert_eq!(
        calls.iter().map(|call| call.failed).filter(|failed| *failed).count(),
        1,
        "{calls:#?}"
    );
    assert_eq!(calls.len(), 3, "{calls:#?}");
    for call in &calls {
        assert_eq!(
            (call.name.as_str(), call.kind),
            (&*format!("chat {}", call.attribute("gen_ai.request.model")), "SPAN_KIND_CLIENT")
        );
        assert_eq!(call.attribute("gen_ai.provider.name"), "anthropic");
        assert!(
            named("providers.model.invoke").iter().any(|step| is_within(call, step, &by_id)),
            "{call:#?}"
        );
        let answered = !call.failed;
        let tokens = |name: &str| call.attribute(name).parse::<u64>().unwrap();
        assert_eq!(tokens("gen_ai.usage.output_tokens") > 0, answered, "{call:#?}");
        assert_eq!(call.attribute("error.type"), if answered { "" } else { "overloaded" });
        let told = [
            "server.address",
            "gen_ai.conversation.id",
            "gen_ai.output.type",
            "gen_ai.request.stream",
        ];
        assert_eq!(
            told.map(|name| call.attribute(name)),
            ["127.0.0.1", conversation.id(), "text", "true"]
        );
        assert!(
            vendor.url().ends_with(&format!(":{}", call.attribute("server.port"))),
            "{call:#?}"
        );
        // Attributes of an answer only.
        let named =
            ["gen_ai.response.id", "gen_ai.response.model"].map(|name| call.attribute(name));
        assert_eq!(
            named,
            if answered { ["msg_01XFDUDYJgAACzvnptvVoYEL", "claude-test"] } else { ["", ""] }
        );
        let first = call.attribute("gen_ai.response.time_to_first_chunk").parse::<f64>();
        assert_eq!(first.is_ok_and(|seconds| seconds > 0.0), answered, "{call:#?}");
    }
    let mut reasons: Vec<&str> =
        calls.iter().map(|call| call.attribute("gen_ai.response.finish_reasons")).collect();
    reasons.sort_unstable();
    assert_eq!(reasons, ["", "stop", "tool_call"], "{calls:#?}");
    // A span for each tool call.
    let step = named("interpreter.step.execute")[0];
    let tools: Vec<(&str, &str)> = spans
        .iter()
        .filter(|span| {
            span.attribute("gen_ai.operation.name") == "execute_tool"
                && is_within(span, step, &by_id)
        })
        .map(|span| (span.attribute("gen_ai.tool.name"), span.attribute("error.type")))
        .collect();
    let mut names: Vec<&str> = tools.iter().map(|(name, _)| *name).collect();
    names.sort_unstable();
    assert_eq!(names, ["create_file", "execute_command", "read_file"]);
    assert_eq!(
        tools
            .iter()
            .filter(|(_, error)| !error.is_empty())
            .map(|(name, _)| *name)
            .collect::<Vec<_>>(),
        ["read_file"]
    );

    // Content and secrets stay out of the trace, and vendors get no trace context.
    for span in collector.spans() {
        let shown = format!("{span:?}");
        for secret in [QUESTION, "Nobody-reads", "Nor-that", "It is done", KEY] {
            assert!(!shown.contains(secret), "{secret} is in {shown}");
        }
    }
    for request in vendor.requests() {
        assert_eq!((request.header("traceparent"), request.header("tracestate")), ("", ""));
    }
    // An explanation shows the trace's id.
    let explained = v1::ExplainTaskRequest { task: conversation.id().to_owned() };
    let explained =
        mesh.client().unwrap().tasks().explain_task(explained).await.unwrap().into_inner();
    assert_eq!(explained.trace_id, TRACE);
    mesh.stop(Service::Gateway).await.unwrap();
}

#[tokio::test]
async fn retried_call_keeps_the_trace_of_its_message() {
    let (collector, vendor) = (Collector::start().await, VendorServer::start().await);
    let mut mesh = traced_mesh(&collector, &vendor, &[("CONSTRUCT_PROVIDERS_TRIES", "1")]).await;
    // After a delay the reconciler retries it, without a message.
    vendor.reply(anthropic::error(529, "overloaded_error", "busy"));
    vendor.reply(anthropic::Answer::text("It is done.").with_usage(5, 0, 0, 7).reply());
    let conversation = begin(&mesh).await;
    assert_eq!(
        conversation.wait_until_idle().await.status.unwrap().last_outcome(),
        v1::TurnOutcome::Completed
    );
    assert_eq!(conversation.explain().await.unwrap().trace_id, TRACE);
    assert_eq!(
        traces_of_calls(&collector, &conversation, 2).await,
        BTreeSet::from([TRACE.to_owned()])
    );
    // The reconcile that a timer started is in the trace as well, not an orphan.
    until("complete reconciles", TURN_TIMEOUT, async || {
        let spans = collector.trace(TRACE);
        let by_id: BTreeSet<&str> = spans.iter().map(|span| span.id.as_str()).collect();
        let hangs = |span: &&Span| span.parent != PARENT && !by_id.contains(span.parent.as_str());
        let looks = spans.iter().filter(|span| span.name == "reconciler.task.look").count();
        match spans.iter().find(hangs) {
            None if looks >= 4 => Ok(()),
            hangs => Err(format!("{looks} reconciles, orphans: {hangs:?}")),
        }
    })
    .await;

    // The trace also continues in another process, and after a manual resume.
    vendor.reply(anthropic::error(529, "overloaded_error", "busy"));
    vendor.reply(anthropic::Answer::text("It is done.").with_usage(5, 0, 0, 7).reply());
    let conversation = begin(&mesh).await;
    conversation.wait_for_phase(v1::TaskPhase::InvokeModel).await;
    conversation.suspend().await;
    conversation.wait_for_phase(v1::TaskPhase::Suspended).await;
    mesh.kill(Service::Reconciler).unwrap();
    mesh.spawn(Service::Reconciler).unwrap();
    conversation.resume().await;
    assert_eq!(
        conversation.wait_until_idle().await.status.unwrap().last_outcome(),
        v1::TurnOutcome::Completed
    );
    assert_eq!(conversation.explain().await.unwrap().trace_id, TRACE);
    assert_eq!(
        traces_of_calls(&collector, &conversation, 2).await,
        BTreeSet::from([TRACE.to_owned()])
    );
}
