//! Secrets are not shown to the model.

use construct_tests::vendor::{VendorServer, anthropic};

use super::*;

#[tokio::test]
async fn model_requests_contain_no_secret_of_the_repository() {
    let (mesh, github) = begin().await;
    let config = format!("[api]\ntoken = \"{PLANTED}\"\nurl = \"https://ledger.example\"\n");
    let environment =
        format!("API_PASSWORD=correct-horse-7Qz\nGITHUB_TOKEN={PLANTED}\nREGION=north-sea\n");
    let noted = format!("{REPORT}\n# Call it with {PLANTED}, says Ann in the kitchen.\n");
    let commit = github.commit(
        "octo/ledger",
        &[
            (
                "README.md",
                ledger(&format!(
                    "\n    curl -H 'Authorization: Bearer {PLANTED}' ledger.example\n"
                ))
                .as_bytes(),
            ),
            ("tools/report.py", noted.as_bytes()),
            ("config.toml", config.as_bytes()),
            (".env", environment.as_bytes()),
        ],
    );
    let code = format!(
        "const root = '{commit}/tree';\n\
         for (const path of ['README.md', 'tools/report.py', 'config.toml', '.env']) print(JSON.stringify(read_file(root + '/' + path)));\n\
         for (const word of ['token', 'ghp_', 'Bearer', 'PASSWORD', 'Ann']) print(JSON.stringify(grep(word, root).matches));"
    );
    let vendor = VendorServer::start().await;
    vendor
        .reply(
            anthropic::Answer::text("Let me look.")
                .and_code("toolu_1", &code)
                .with_usage(100, 20, 0, 0)
                .reply(),
        )
        .reply(anthropic::Answer::text("Nothing like JSON.").with_usage(100, 20, 0, 0).reply())
        .reply(
            anthropic::Answer::text(&answer(&[valid_candidate()]))
                .with_usage(100, 20, 0, 0)
                .reply(),
        );
    let provider = v1::ModelProviderSpec {
        name: "claude".into(),
        r#type: v1::ModelProviderType::Anthropic.into(),
        base_url: vendor.url(),
        api_key: "sk-test-0123456789".into(),
        ..Default::default()
    };
    mesh.agent("claude", provider).await.unwrap();
    let scan = create(&mesh, scan_spec("octo/ledger", "claude")).await;
    let status = wait_for_phase(&mesh, &scan, Review).await;
    assert!(status.candidates == 1 && status.secrets_masked >= 5, "{status:?}");
    let requests: Vec<String> =
        vendor.requests().iter().map(|request| request.body.to_string()).collect();
    assert_eq!(requests.len(), 3, "{requests:?}");
    // It saw the file list, read the lines around the secrets, and was told of its mistake.
    for (request, word) in [
        (0, "tools/report.py"),
        (1, "https://ledger.example"),
        (1, "API_PASSWORD="),
        (1, "in the kitchen"),
        (2, "the answer has no JSON object"),
    ] {
        assert!(requests[request].contains(word), "{word}: {}", requests[request]);
    }
    for request in &requests {
        for secret in [PLANTED, &PLANTED[4..], "correct-horse"] {
            assert!(!request.contains(secret), "{secret}: {request}");
        }
    }
}
