//! Invalid input from the model and from clients: each gets a clear error, and everything
//! continues.

use std::collections::BTreeSet;

use construct_proto::v1;
use construct_tests::{
    client::{Client, id},
    http,
    mesh::Mesh,
};
use serde_json::json;
use tonic::{Code, Status};
use tonic_types::StatusExt as _;

#[tokio::test]
async fn hostile_script_gets_a_clear_error_and_the_task_continues() {
    let mesh = Mesh::start_with(&[
        ("CONSTRUCT_INTERPRETER_CPU_LIMIT", "1s"),
        ("CONSTRUCT_INTERPRETER_MEMORY_BYTES", "33554432"),
    ])
    .await
    .unwrap();
    let outside =
        mesh.workspace().parent().unwrap().join(format!("outside-{}", std::process::id()));
    let outside = outside.display().to_string();
    // The script, and what the model has to be told.
    let cases: Vec<(&str, String, &[&str])> = vec![
        ("syntax", "const a = 1;\nconst = 2;".into(), &["SyntaxError", "script.js:2"]),
        ("loop", "print('in'); for (;;) {}".into(), &["in\n", "CpuLimitExceeded"]),
        (
            "allocation",
            "const all = []; for (;;) all.push(new Uint8Array(1 << 20).fill(1));".into(),
            &["emory"],
        ),
        (
            "recursion",
            "function deep(n) { return deep(n + 1) + 1; } deep(0)".into(),
            &["RangeError", "deep"],
        ),
        ("dotdot", "read_file('../../../../etc/passwd')".into(), &["OutsideWorkspace"]),
        ("absolute", "read_file('/etc/passwd')".into(), &["OutsideWorkspace"]),
        ("symlink", "read_file('link/passwd')".into(), &["OutsideWorkspace"]),
        ("symlinked write", "create_file('made/x', 'x')".into(), &["OutsideWorkspace"]),
        ("write outside", format!("create_file({}, 'x')", json!(outside)), &["OutsideWorkspace"]),
        (
            "command outside",
            format!("print(execute_command({}).exit_code)", json!(format!("touch {outside}"))),
            &[],
        ),
        (
            "output",
            "for (let n = 0; n < 100000; n++) print('0123456789');".into(),
            &["more bytes were printed"],
        ),
        ("value", "'x'.repeat(3 << 20)".into(), &["ResultLimitExceeded"]),
        ("stuck", "await new Promise(() => {})".into(), &["wait"]),
        ("thrown", "throw {not: 'an error'}".into(), &["not"]),
        ("tool", "tools.no_such_tool({})".into(), &["UnknownTool", "script.js:1"]),
        ("fetch", "fetch('http://127.0.0.1:1/')".into(), &["HostNotGranted"]),
        ("missing", "require('fs')".into(), &["require"]),
    ];
    let conversations: Vec<serde_json::Value> = cases
        .iter()
        .map(|(name, code, _)| json!({"match": format!("case:{name}:"), "turns": [{"code": code}, {"text": "{{last_result}}"}]}))
        .collect();
    mesh.scripted_agent("worker", &json!({"conversations": conversations})).await.unwrap();
    std::os::unix::fs::symlink("/etc", mesh.workspace().join("link")).unwrap();
    std::os::unix::fs::symlink(mesh.workspace().parent().unwrap(), mesh.workspace().join("made"))
        .unwrap();
    let conversation =
        mesh.client().unwrap().create_task("worker", Some(mesh.workspace())).await.unwrap();
    let said: Vec<String> = cases.iter().map(|(name, ..)| format!("case:{name}:")).collect();
    for said in &said {
        conversation.submit(said).await;
    }
    conversation.wait_until_idle().await;
    let transcript = conversation.transcript().await;
    transcript.check(&said.iter().map(String::as_str).collect::<Vec<_>>());
    let answers: Vec<String> = transcript.answers().into_iter().skip(1).step_by(2).collect();
    let mut wrong = Vec::new();
    for ((name, _, expected), answer) in cases.iter().zip(&answers) {
        for part in expected.iter().filter(|part| !answer.contains(**part)) {
            wrong.push(format!(
                "{name}: {part:?} is not in the model's input: {}",
                &answer[..answer.len().min(600)]
            ));
        }
        assert!(answer.len() < 300_000, "{name}: the model's input is bounded");
        assert!(!answer.contains("root:x:0"), "{name}: a file outside of the workspace was read");
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(
        !std::path::Path::new(&outside).exists(),
        "a file outside of the workspace was written"
    );
    assert!(
        !mesh.workspace().parent().unwrap().join("x").exists(),
        "a file outside of the workspace was written"
    );
}

#[tokio::test]
async fn workspace_outside_granted_roots_is_refused() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"turns": [{"code": "list_files()"}, {"text": "{{last_result}}"}]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    for (path, words) in
        [("/etc", "outside of the directories"), ("/no/such/place", "does not exist")]
    {
        let conversation =
            client.create_task("worker", Some(std::path::Path::new(path))).await.unwrap();
        conversation.ask("go").await;
        let transcript = conversation.transcript().await;
        let answer = transcript.check(&["go"]).answers().pop().unwrap();
        assert!(answer.contains("NotRun") && answer.contains(words), "{answer}");
    }
    // Without one, a task has its own directory that no other task sees.
    let script = json!({"turns": [{"code": "create_file('mine.txt', 'x'); list_files().map(f => f.path).join()"}, {"text": "{{last_result}}"}]});
    mesh.scripted_agent("loner", &script).await.unwrap();
    for _ in 0..2 {
        let conversation = client.create_task("loner", None).await.unwrap();
        conversation.ask("go").await;
        assert_eq!(conversation.transcript().await.result().output, "mine.txt");
    }
}

#[tokio::test]
async fn invalid_requests_name_their_violations() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"turns": [{"text": "hello"}]});
    let agent = mesh.scripted_agent("worker", &script).await.unwrap();
    for name in ["second", "third"] {
        mesh.scripted_agent(name, &script).await.unwrap();
    }
    let client = mesh.client().unwrap();
    let conversation = client.create_task("worker", None).await.unwrap();
    conversation.ask("hello").await;
    unknown_and_foreign_ids(&client, &id(agent.metadata.as_ref()), conversation.id()).await;
    fields_beyond_their_limits(&client, conversation.id()).await;
    page_tokens(&client).await;
    subscriptions(&client, conversation.id()).await;
    idempotency(&client).await;
    used_entities(&client).await;
    malformed(&mesh).await;
    // Afterwards it works as before.
    conversation.ask("still there?").await;
    conversation.transcript().await.check(&["hello", "still there?"]);
}

async fn unknown_and_foreign_ids(client: &Client, agent: &str, task: &str) {
    let unknown = "task_01890a5d-ac96-774b-bcce-b302099a8057";
    let get = async |task: &str| {
        client.tasks().get_task(v1::GetTaskRequest { task: task.into() }).await.unwrap_err()
    };
    let status = get(unknown).await;
    assert_eq!(status.code(), Code::NotFound);
    assert!(status.message().contains(unknown), "{status:?}");
    for wrong in [
        "",
        "nonsense",
        agent,
        "task_",
        "task_01890a5d-ac96-774b-bcce-b302099a805",
        "TASK_01890a5d-ac96-774b-bcce-b302099a8057",
    ] {
        assert_violations(&get(wrong).await, &["task"]);
    }
    let send = |task: &str| {
        let block = v1::block::Block::Text(v1::Text { text: "x".into() });
        let spec = v1::MessageSpec {
            task: task.into(),
            blocks: vec![v1::Block { block: Some(block) }],
            ..v1::MessageSpec::default()
        };
        v1::CreateMessageRequest { spec: Some(spec), idempotency_key: String::new() }
    };
    assert_eq!(
        client.messages().create_message(send(unknown)).await.unwrap_err().code(),
        Code::NotFound
    );
    assert_violations(
        &client.messages().create_message(send(agent)).await.unwrap_err(),
        &["spec.task"],
    );
    let get = async |agent: &str| {
        client.agents().get_agent(v1::GetAgentRequest { agent: agent.into() }).await
    };
    assert!(get(agent).await.is_ok() && get("worker").await.is_ok(), "names and ids are accepted");
    for (wrong, code) in [
        ("nobody", Code::NotFound),
        ("agent_01890a5d-ac96-774b-bcce-b302099a8057", Code::NotFound),
        (task, Code::NotFound),
        ("", Code::InvalidArgument),
        ("Not A Name", Code::InvalidArgument),
    ] {
        assert_eq!(get(wrong).await.unwrap_err().code(), code, "{wrong}");
    }
    for cancelled in [unknown, "nonsense"] {
        let request = v1::CancelTaskRequest { task: cancelled.into(), ..Default::default() };
        let status = client.tasks().cancel_task(request).await.unwrap_err();
        let expected = if cancelled == unknown { Code::NotFound } else { Code::InvalidArgument };
        assert_eq!(status.code(), expected);
    }
    let spec = v1::TaskSpec { agent: "nobody".into(), ..Default::default() };
    assert_eq!(client.create_task_with(spec).await.unwrap_err().code(), Code::NotFound);
}

async fn fields_beyond_their_limits(client: &Client, task: &str) {
    let spec = v1::AgentSpec {
        name: "x".repeat(64),
        description: "x".repeat(1025),
        instructions: "x".repeat(64 * 1024 + 1),
        model: String::new(),
        max_turns: 1001,
        parameters: Some(v1::ModelParameters {
            temperature: Some(f64::NAN),
            top_p: Some(1.5),
            max_tokens: Some(0),
            stop_sequences: vec!["x".into(); 9],
            ..Default::default()
        }),
        policy: vec![v1::PolicyRule {
            action: 2,
            tools: vec!["{a".into()],
            ..v1::PolicyRule::default()
        }],
        secrets: Vec::new(),
        script_models: Vec::new(),
        compact_at_percent: 0,
        compute: "gpu".into(),
    };
    let request = v1::CreateAgentRequest { spec: Some(spec), idempotency_key: "with space".into() };
    assert_violations(
        &client.agents().create_agent(request).await.unwrap_err(),
        &[
            "spec.name",
            "spec.description",
            "spec.instructions",
            "spec.model",
            "spec.max_turns",
            "spec.parameters.temperature",
            "spec.parameters.top_p",
            "spec.parameters.max_tokens",
            "spec.parameters.stop_sequences",
            "spec.policy[0].tools[0]",
            "spec.compute",
            "idempotency_key",
        ],
    );
    let status = client.agents().create_agent(v1::CreateAgentRequest::default()).await.unwrap_err();
    assert!(violations(&status).contains(&"spec".to_owned()), "{status:?}");

    let spec = v1::TaskSpec {
        agent: "worker".into(),
        workspace: "relative/../path".into(),
        title: "x".repeat(201),
        max_turns: 1001,
        ..v1::TaskSpec::default()
    };
    assert_violations(
        &client.create_task_with(spec).await.unwrap_err(),
        &["spec.workspace", "spec.workspace", "spec.title", "spec.max_turns"],
    );

    let send = |text: String| {
        let block = v1::block::Block::Text(v1::Text { text });
        let spec = v1::MessageSpec {
            task: task.into(),
            blocks: vec![v1::Block { block: Some(block) }],
            ..v1::MessageSpec::default()
        };
        v1::CreateMessageRequest { spec: Some(spec), idempotency_key: String::new() }
    };
    for text in ["x".repeat((1 << 20) + 1), "   ".into()] {
        assert_violations(
            &client.messages().create_message(send(text)).await.unwrap_err(),
            &["spec.blocks"],
        );
    }
    // Refused before it is read.
    let status = client.messages().create_message(send("x".repeat(5 << 20))).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
    // A user cannot make the model believe that a script ran.
    let result = v1::block::Block::CodeInterpreterResult(v1::CodeInterpreterResult::default());
    let spec = v1::MessageSpec {
        task: task.into(),
        blocks: vec![v1::Block { block: Some(result) }],
        ..v1::MessageSpec::default()
    };
    let request = v1::CreateMessageRequest { spec: Some(spec), idempotency_key: String::new() };
    assert_violations(
        &client.messages().create_message(request).await.unwrap_err(),
        &["spec.blocks[0]", "spec.blocks"],
    );

    for (spec, fields) in [
        (
            v1::ModelProviderSpec {
                name: "p".into(),
                script: "{".into(),
                r#type: 3,
                ..Default::default()
            },
            vec!["spec.script"],
        ),
        (
            v1::ModelProviderSpec { name: "p".into(), r#type: 99, ..Default::default() },
            vec!["spec.type"],
        ),
        (
            v1::ModelProviderSpec {
                name: "p".into(),
                r#type: 1,
                base_url: "ftp://user:word@host".into(),
                ..Default::default()
            },
            vec!["spec.base_url", "spec.base_url"],
        ),
    ] {
        let request = v1::CreateModelProviderRequest { spec: Some(spec), ..Default::default() };
        assert_violations(
            &client.providers().create_model_provider(request).await.unwrap_err(),
            &fields,
        );
    }
    let spec = v1::ModelSpec {
        name: "m".into(),
        provider: "worker".into(),
        context_window: -1,
        prices: Some(v1::Prices { input: -1, ..Default::default() }),
        ..Default::default()
    };
    let request = v1::CreateModelRequest { spec: Some(spec), ..Default::default() };
    assert_violations(
        &client.models().create_model(request).await.unwrap_err(),
        &["spec.context_window", "spec.prices.input"],
    );
}

async fn page_tokens(client: &Client) {
    let list = async |page: v1::PageRequest, name_prefix: &str| {
        let filter = v1::list_agents_request::Filter {
            name_prefix: name_prefix.into(),
            ..Default::default()
        };
        let request = v1::ListAgentsRequest { page: Some(page), filter: Some(filter) };
        client.agents().list_agents(request).await.map(tonic::Response::into_inner)
    };
    let page = |page_size, page_token: &str, order_by: &str| v1::PageRequest {
        page_size,
        page_token: page_token.into(),
        order_by: order_by.into(),
    };
    // Page by page, everything once and in order.
    let mut names = Vec::new();
    let mut token = String::new();
    let mut tokens = Vec::new();
    loop {
        let response = list(page(1, &token, "name"), "").await.unwrap();
        names.extend(response.agents.into_iter().map(|agent| agent.spec.unwrap().name));
        token = response.page.unwrap().next_page_token;
        if token.is_empty() {
            break;
        }
        tokens.push(token.clone());
    }
    assert_eq!(names, ["second", "third", "worker"]);
    let token = tokens[0].as_str();
    let mut altered = token.to_owned();
    altered.replace_range(10..11, if &token[10..11] == "A" { "B" } else { "A" });
    for (what, request, prefix) in [
        ("of another order", page(1, token, "name desc"), ""),
        ("of another column", page(1, token, "created_at"), ""),
        ("of another filter", page(1, token, "name"), "w"),
        ("altered", page(1, &altered, "name"), ""),
        ("made up", page(1, "nonsense", "name"), ""),
        ("too long", page(1, &"A".repeat(2000), "name"), ""),
    ] {
        let status = list(request, prefix).await.expect_err(what);
        assert_violations(&status, &["page.page_token"]);
    }
    // It is not valid in another list either.
    let request = v1::ListModelsRequest { page: Some(page(1, token, "name")), filter: None };
    assert_violations(
        &client.models().list_models(request).await.unwrap_err(),
        &["page.page_token"],
    );
    for size in [-1, 101, i32::MAX] {
        assert_violations(&list(page(size, "", ""), "").await.unwrap_err(), &["page.page_size"]);
    }
    for order in ["size", "name sideways", "name asc twice", "NAME"] {
        assert_violations(&list(page(1, "", order), "").await.unwrap_err(), &["page.order_by"]);
    }
}

async fn subscriptions(client: &Client, task: &str) {
    let subscribe = async |task: &str, cursor: &str, types: Vec<String>| {
        let request = v1::SubscribeRequest { task: task.into(), cursor: cursor.into(), types };
        match client.events().subscribe(request).await {
            Err(status) => status,
            Ok(stream) => stream.into_inner().message().await.expect_err("it is refused"),
        }
    };
    let unknown = "task_01890a5d-ac96-774b-bcce-b302099a8057";
    assert_eq!(subscribe(unknown, "0", vec![]).await.code(), Code::NotFound);
    assert_violations(&subscribe("nonsense", "0", vec![]).await, &["task"]);
    for cursor in ["nonsense", "-1", "1.2", "01.1.1", "99999.1.0"] {
        assert_violations(&subscribe(task, cursor, vec![]).await, &["cursor"]);
    }
    assert_violations(&subscribe(task, "", vec!["*".into(); 33]).await, &["types"]);
    let globs = vec!["message.*".into(), String::new(), "[a-z]".into(), "x".repeat(129)];
    assert_violations(&subscribe(task, "", globs).await, &["types[1]", "types[2]", "types[3]"]);
}

async fn idempotency(client: &Client) {
    let create = async |name: &str, key: &str| {
        let spec =
            v1::TaskSpec { agent: "worker".into(), title: name.into(), ..Default::default() };
        let request = v1::CreateTaskRequest { spec: Some(spec), idempotency_key: key.into() };
        client
            .tasks()
            .create_task(request)
            .await
            .map(|task| id(task.into_inner().metadata.as_ref()))
    };
    let first = create("a", "key-1").await.unwrap();
    assert_eq!(
        create("a", "key-1").await.unwrap(),
        first,
        "the same request is answered as before"
    );
    assert_violations(&create("b", "key-1").await.unwrap_err(), &["idempotency_key"]);
    assert_ne!(create("a", "key-2").await.unwrap(), first);
    // Twenty concurrent requests create one.
    let tries = futures::future::join_all((0..20).map(|_| create("c", "key-3"))).await;
    let made: BTreeSet<String> = tries.into_iter().map(Result::unwrap).collect();
    assert_eq!(made.len(), 1);
}

async fn used_entities(client: &Client) {
    let delete = v1::DeleteAgentRequest { agent: "worker".into(), ..Default::default() };
    assert_eq!(
        client.agents().delete_agent(delete).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let delete = v1::DeleteModelRequest { model: "worker".into(), ..Default::default() };
    assert_eq!(
        client.models().delete_model(delete).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let delete =
        v1::DeleteModelProviderRequest { model_provider: "worker".into(), ..Default::default() };
    assert_eq!(
        client.providers().delete_model_provider(delete).await.unwrap_err().code(),
        Code::FailedPrecondition
    );
    let spec =
        v1::AgentSpec { name: "worker".into(), model: "worker".into(), ..Default::default() };
    let again = v1::CreateAgentRequest { spec: Some(spec), ..Default::default() };
    assert_eq!(client.agents().create_agent(again).await.unwrap_err().code(), Code::AlreadyExists);
    let update = |revision, description: &str| v1::UpdateAgentRequest {
        agent: "worker".into(),
        description: Some(description.into()),
        revision,
        ..Default::default()
    };
    let agent = client.agents().update_agent(update(0, "one")).await.unwrap().into_inner();
    let revision = agent.metadata.unwrap().revision;
    client.agents().update_agent(update(revision, "two")).await.unwrap();
    let lost = client.agents().update_agent(update(revision, "three")).await.unwrap_err();
    assert_eq!(lost.code(), Code::Aborted, "a lost update is refused");
}

/// Bytes that no generated client would send.
async fn malformed(mesh: &Mesh) {
    let client = http::client().http2_prior_knowledge().build().unwrap();
    let post = async |path: &str, body: Vec<u8>, headers: &[(&'static str, &str)]| {
        let mut request = client
            .post(format!("{}/{path}", mesh.gateway_url()))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = request.send().await.unwrap();
        let header = |name: &str| {
            let value = response.headers().get(name).and_then(|value| value.to_str().ok());
            value.unwrap_or_default().to_owned()
        };
        (response.status().as_u16(), header("grpc-status"), header("grpc-message"))
    };
    let frame = |flag: u8, payload: &[u8]| {
        let mut frame = vec![flag];
        frame.extend(u32::try_from(payload.len()).unwrap().to_be_bytes());
        frame.extend(payload);
        frame
    };
    let get_task = "construct.v1.TaskService/GetTask";
    let code = |code: Code| (code as i32).to_string();
    let mut short = frame(0, b"abcdefgh");
    short.truncate(8);
    let gzip: &[(&'static str, &str)] = &[("grpc-encoding", "gzip")];
    for (what, body, headers, expected) in [
        ("a frame cut short", short, &[][..], Code::InvalidArgument),
        ("no frame", vec![], &[], Code::InvalidArgument),
        ("an unknown compression flag", frame(9, b""), &[], Code::InvalidArgument),
        // As the gRPC specification requires for this one.
        ("compressed without saying how", frame(1, b"\x1f\x8b"), &[], Code::Internal),
        ("broken gzip", frame(1, b"nonsense"), gzip, Code::InvalidArgument),
        (
            "an unknown compression",
            frame(1, b"x"),
            &[("grpc-encoding", "snappy")],
            Code::Unimplemented,
        ),
    ] {
        let (status, grpc, message) = post(get_task, body, headers).await;
        assert_eq!((status, grpc), (200, code(expected)), "{what}: {message}");
        assert!(!message.is_empty(), "{what}");
    }
    let (_, grpc, _) = post("construct.v1.TaskService/NoSuchCall", frame(0, b""), &[]).await;
    assert_eq!(grpc, code(Code::Unimplemented));
    let (_, grpc, _) = post("no.such.Service/Call", frame(0, b""), &[]).await;
    assert_eq!(grpc, code(Code::Unimplemented));
    // A varint without an end, a length beyond the end, text that is not UTF-8.
    for payload in [&[0x0A, 0xFF][..], &[0x0A, 0x7F, b'x'], &[0x0A, 0x02, 0xFF, 0xFE]] {
        let (status, grpc, message) = post(get_task, frame(0, payload), &[]).await;
        assert_eq!((status, grpc), (200, code(Code::InvalidArgument)), "{payload:?}: {message}");
        assert!(!message.is_empty());
    }
}

fn violations(status: &Status) -> Vec<String> {
    assert_eq!(status.code(), Code::InvalidArgument, "{status:?}");
    let found =
        status.get_details_bad_request().map(|bad| bad.field_violations).unwrap_or_default();
    found.into_iter().map(|violation| violation.field).collect()
}

/// Panics unless exactly these fields are reported as invalid.
fn assert_violations(status: &Status, fields: &[&str]) {
    let found = violations(status).into_iter().collect::<BTreeSet<_>>();
    assert_eq!(found, fields.iter().map(|field| (*field).to_owned()).collect(), "{status:?}");
    let described =
        status.get_details_bad_request().map(|bad| bad.field_violations).unwrap_or_default();
    assert!(described.iter().all(|violation| !violation.description.is_empty()));
}
