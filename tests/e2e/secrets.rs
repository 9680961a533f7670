//! A secret is used and echoed in every encoding, and is stored nowhere.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Arc, Mutex},
};

use construct_proto::v1::{self, PolicyAction, TaskPhase, decide_approval_request::Decision};
use construct_tests::{
    mesh::{Mesh, Service, binary},
    terminal::{CTRL_C, Terminal},
    vendor::{Reply, VendorServer},
};
use futures::StreamExt as _;
use serde_json::json;
use tokio::io::AsyncWriteExt as _;

const VALUE: &str = "sk-e2e/7Qw+x9Zk2Lm4=Vt8&Rp1\"end";
const HANDLE: &str = "{{secret:TOKEN:";

/// The maximal logging of our services and the libraries they communicate through.
const LOG: &str = "info,construct_gateway=trace,construct_reconciler=trace,construct_interpreter=trace,construct_providers=trace,\
                   construct_bus=trace,construct_store=trace,sqlx=trace,hyper=trace,hyper_util=trace,h2=trace,reqwest=trace,\
                   tonic=trace,tower=trace,async_nats=trace,tokio_util=trace";

/// The encodings of the value: plain, in base64 (without the character that depends on what
/// follows), for a URL, in JSON, in hexadecimal as the database shows bytes. Parts of it as well.
fn needles() -> Vec<String> {
    let hexadecimal =
        |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
    // base64 of the first 27 bytes, which are whole groups.
    let base64 = "c2stZTJlLzdRdyt4OVprMkxtND1WdDgmUnAx";
    let parts = [
        "sk-e2e/7Qw",
        "x9Zk2Lm4",
        "Vt8&Rp1",
        "sk-e2e%2F7Qw",
        "sk-e2e%2f7Qw",
        &base64[..12],
        &base64[12..24],
        &base64[24..],
    ];
    parts
        .iter()
        .map(|part| (*part).to_owned())
        .chain(parts.iter().map(|part| hexadecimal(part)))
        .collect()
}

/// Fails when the value is in `text`, or when the text lacks the control that shows that it was
/// searched.
fn search(place: &str, text: &[u8], control: Option<&str>) {
    // Every needle is ASCII, so that it is found in any content.
    let text = String::from_utf8_lossy(text);
    for needle in needles() {
        assert!(!text.contains(&needle), "{needle:?} is in {place}");
    }
    if let Some(control) = control {
        assert!(text.contains(control), "{control:?} is not in {place}, so nothing is proved");
    }
}

/// The content of every file below a directory.
fn files(directory: &Path) -> Vec<u8> {
    let mut all = Vec::new();
    let mut open: Vec<PathBuf> = vec![directory.to_owned()];
    while let Some(path) = open.pop() {
        if path.is_dir() {
            open.extend(
                std::fs::read_dir(&path).into_iter().flatten().flatten().map(|entry| entry.path()),
            );
        } else if path.is_file() {
            all.extend(std::fs::read(&path).unwrap_or_default());
        }
    }
    all
}

/// Runs the command line; returns its output.
async fn construct(mesh: &Mesh, arguments: &[&str], input: &str) -> String {
    let mut child = tokio::process::Command::new(binary("construct").unwrap())
        .env_clear()
        .env("CONSTRUCT_GATEWAY_URL", mesh.gateway_url())
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).await.unwrap();
    let done = child.wait_with_output().await.unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    );
    assert!(done.status.success(), "{arguments:?}: {text}");
    text
}

#[tokio::test]
async fn used_and_echoed_secret_is_stored_nowhere() {
    let mesh = Mesh::start_with(&[
        ("CONSTRUCT_INTERPRETER_FETCH_HOSTS", "127.0.0.1"),
        ("CONSTRUCT_INTERPRETER_FETCH_PRIVATE_ADDRESSES", "127.0.0.1"),
        ("CONSTRUCT_LOG", LOG),
    ])
    .await
    .unwrap();
    let elsewhere =
        VendorServer::answering(|request| Reply::text(200, request.header("authorization"))).await;
    let away = format!("{}/away", elsewhere.url());
    let host = VendorServer::answering(move |request| {
        let sent = request.header("authorization");
        match request.path.as_str() {
            "/redirect" => Reply::text(302, sent).header("location", &away),
            "/json" => {
                Reply::json(403, &json!({"error": {"sent": sent}})).header("www-authenticate", sent)
            }
            _ => Reply::text(200, &format!("<p>You sent {sent}, and {sent}</p>"))
                .header("x-echo", sent),
        }
    })
    .await;

    // All traffic on the bus.
    let bus = mesh.bus().await;
    let passed = Arc::new(Mutex::new(Vec::new()));
    let mut tap = bus.tap("construct.>").await.unwrap();
    let seen = Arc::clone(&passed);
    let tapping = tokio::spawn(async move {
        while let Some(message) = tap.next().await {
            let mut seen = seen.lock().unwrap();
            seen.extend_from_slice(
                format!("\n{} {:?} ", message.subject, message.headers).as_bytes(),
            );
            seen.extend_from_slice(&message.payload);
        }
    });

    let url = host.url();
    let code = [
        "const handle = secrets.get('TOKEN');",
        "const headers = { authorization: `Bearer ${handle}` };",
        &format!("const first = fetch('{url}/echo', {{ headers }});"),
        "print(first.body, first.headers['x-echo']);",
        &format!("const markdown = fetch('{url}/echo', {{ headers, as: 'markdown' }}).body;"),
        "create_file('approved/notes.md', markdown);",
        &format!("const json = fetch('{url}/json', {{ headers }});"),
        "print(json.status, json.body, json.headers['www-authenticate']);",
        &format!("print(fetch('{url}/redirect', {{ headers }}).body);"),
        "const printed = execute_command('printenv TOKEN', { env: { TOKEN: `<${handle}>` } });",
        "print(printed.exit_code, printed.stdout);",
        "let refused; try { execute_command('rev', { env: { TOKEN: handle } }) } catch (error) { refused = error }",
        "print(refused.name);",
        "throw new Error(`${json.body} ${handle === secrets.get('TOKEN')}`);",
    ];
    let script =
        json!({"turns": [{"text": "I shall.", "code": [code]}, {"text": "Done: {{last_result}}"}]});
    mesh.scripted_agent("worker", &script).await.unwrap();

    // As people do it: the value through standard input.
    let arguments = [
        "secret",
        "create",
        "TOKEN",
        "--host",
        "127.0.0.1",
        "--command",
        "printenv",
        "--description",
        "for tests",
    ];
    let mut shown = construct(&mesh, &arguments, &format!("{VALUE}\n")).await;
    shown += &construct(
        &mesh,
        &[
            "secret",
            "update",
            "TOKEN",
            "--new-value",
            "--host",
            "127.0.0.1",
            "--command",
            "printenv",
        ],
        VALUE,
    )
    .await;
    for arguments in [
        &["secret", "get", "TOKEN", "-o", "json"][..],
        &["secret", "list", "-o", "yaml"],
        &["secret", "list"],
    ] {
        shown += &construct(&mesh, arguments, "").await;
    }
    construct(&mesh, &["agent", "update", "worker", "--secret", "TOKEN"], "").await;
    search("what the command line shows", shown.as_bytes(), Some("printenv"));

    let client = mesh.client().unwrap();
    let asks = v1::PolicyRule {
        action: PolicyAction::Ask.into(),
        tools: vec!["create_file".to_owned()],
        ..v1::PolicyRule::default()
    };
    let update = v1::UpdateAgentRequest {
        agent: "worker".to_owned(),
        policy: Some(v1::Policy { rules: vec![asks] }),
        ..v1::UpdateAgentRequest::default()
    };
    client.agents().update_agent(update).await.unwrap();
    let conversation = client.create_task("worker", Some(mesh.workspace())).await.unwrap();
    let recorder = conversation.record();
    conversation.submit("Use it.").await;

    // The script waits for approval, and continues from its journal with the same handle.
    conversation.wait_for_phase(TaskPhase::AwaitApproval).await;
    let mut approvals =
        v1::approval_service_client::ApprovalServiceClient::new(mesh.channel().unwrap());
    let asked = approvals
        .list_approvals(v1::ListApprovalsRequest::default())
        .await
        .unwrap()
        .into_inner()
        .approvals;
    let [asked] = asked.as_slice() else { panic!("one is asked: {asked:?}") };
    let arguments = &asked.spec.as_ref().unwrap().arguments;
    search("what a person is shown", arguments.as_bytes(), Some(HANDLE));
    let decide = v1::DecideApprovalRequest {
        approval: asked.metadata.as_ref().unwrap().id.clone(),
        decision: Decision::Approve.into(),
        ..v1::DecideApprovalRequest::default()
    };
    approvals.decide_approval(decide).await.unwrap();
    let status = conversation.wait_until_idle().await.status.unwrap();
    let events = recorder.wait_for_sequence(status.event_sequence).await;

    // The host received it, and no other one.
    let sent: Vec<String> =
        host.requests().iter().map(|request| request.header("authorization").to_owned()).collect();
    assert_eq!(sent, vec![format!("Bearer {VALUE}"); 4], "each request once, with the value");
    let [redirected] = &elsewhere.requests()[..] else { panic!("the redirect is followed once") };
    assert_eq!(redirected.header("authorization"), "", "another origin gets nothing");

    // The model gets handles in their place.
    let transcript = conversation.transcript().await;
    let result = transcript.result();
    let told = format!("{}\n{}", result.output, result.error);
    for part in [
        "You sent Bearer {{secret:TOKEN:",
        "403 {\"error\":{\"sent\":\"Bearer {{secret:TOKEN:",
        "SecretNotAllowed",
        "0 <{{secret:TOKEN:",
    ] {
        assert!(told.contains(part), "{part:?} is not in {told}");
    }
    assert!(result.error.contains("}} true"), "the handle stays the same: {}", result.error);
    search("the transcript", transcript.show().as_bytes(), None);
    search("what the model is told", told.as_bytes(), Some(HANDLE));
    search("the events", format!("{events:?}").as_bytes(), Some(HANDLE));
    search("the workspace", &files(mesh.workspace()), Some(HANDLE));

    tapping.abort();
    let passed = std::mem::take(&mut *passed.lock().unwrap());
    for control in [
        HANDLE,
        "construct.v1.journal.",
        "construct.v1.cmd.code.execute.",
        "- TOKEN: for tests; hosts: 127.0.0.1",
    ] {
        search("what passed over the bus", &passed, Some(control));
    }
    search("what NATS keeps", &files(mesh.nats.dir()), Some(HANDLE));
    search("the services' files and logs", &files(mesh.home()), Some("construct_interpreter"));
    search("the database", mesh.database.contents().await.as_bytes(), Some("TOKEN"));
    for service in Service::ALL {
        search(&format!("the log of {service:?}"), mesh.log(service).as_bytes(), Some("construct"));
    }
}

#[tokio::test]
async fn typed_secret_value_is_not_echoed() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    let environment = [("CONSTRUCT_GATEWAY_URL", mesh.gateway_url())];
    let environment = environment.each_ref().map(|(name, value)| (*name, value.as_str()));
    let arguments = ["secret", "create", "TYPED", "--host", "api.example.com"];
    let mut person =
        Terminal::run(&binary("construct").unwrap(), &arguments, &environment).unwrap();
    person.wait_for_text("value of TYPED:").await;
    person.type_line("unseen-0123-x7Qw9Zk2Lm4").await;
    person.wait_for_text("set, encrypted with test").await;
    let pictures = person.pictures();
    assert!(
        pictures.iter().all(|picture| !picture.contains("unseen") && !picture.contains("0123")),
        "{pictures:#?}"
    );
    assert_eq!(person.wait_for_exit().await, 0);

    let mut person =
        Terminal::run(&binary("construct").unwrap(), &arguments, &environment).unwrap();
    person.wait_for_text("value of TYPED:").await;
    person.press(CTRL_C).await;
    person.wait_for_text("no input").await;
    assert_eq!(person.wait_for_exit().await, 2);
}
