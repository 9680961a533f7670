//! The examples of docs/api.md work as they are.

use std::process::Stdio;

use super::*;

const DOCUMENT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/api.md");

/// The examples of a document, with their headings.
fn examples(document: &str) -> Vec<(String, String)> {
    let (mut heading, mut example, mut found) = (String::new(), None::<String>, Vec::new());
    for line in document.lines() {
        match (&mut example, line) {
            (None, "```sh") => example = Some(String::new()),
            (Some(text), "```") => {
                found.push((heading.clone(), std::mem::take(text)));
                example = None;
            }
            (Some(text), line) => *text += &format!("{line}\n"),
            (None, line) => {
                if let Some(title) = line.strip_prefix("## ") {
                    title.clone_into(&mut heading);
                }
            }
        }
    }
    found
}

#[tokio::test]
async fn every_example_of_api_docs_works() {
    let gateway = Gateway::start().await.with_agent().await;
    let document = std::fs::read_to_string(DOCUMENT).expect("the document is there");
    let examples = examples(&document);
    for (protocol, words) in [
        ("Connect", "/construct.v1."),
        ("REST", "/v1/tasks"),
        ("State", "/v1/states"),
        ("Files", "tus-resumable"),
        ("Server-sent events", "/events"),
        ("gRPC", "content-type: application/grpc'"),
        ("gRPC-Web", "content-type: application/grpc-web"),
        ("Operator protocol", "/dev/tcp/"),
        ("Operator protocol", "upgrade: websocket"),
    ] {
        let shown =
            |(heading, example): &(String, String)| heading == protocol && example.contains(words);
        assert!(examples.iter().any(shown), "{protocol} has no example with {words}");
    }
    for (heading, example) in examples {
        let mut command = tokio::process::Command::new("bash");
        command
            .args(["-euc", &example])
            .env("CONSTRUCT_GATEWAY_URL", gateway.url(""))
            .env("no_proxy", "*");
        command.env("CONSTRUCT_OPERATOR", gateway.operator.to_string());
        let command = command.stdin(Stdio::null()).kill_on_drop(true).output();
        let output = wait_for(&heading, command).await.expect("bash starts");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{heading}: {}: {printed}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        assert!(!printed.is_empty(), "{heading} prints nothing");
        if heading == "Server-sent events" {
            assert!(printed.contains(r#""type":"task.created""#), "{printed}");
        }
    }
}
