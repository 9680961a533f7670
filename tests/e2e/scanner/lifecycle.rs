//! A scan from its start to its review, and the handling of the model's answers.

use construct_bus::topology::Stream;
use construct_proto::mesh::v1 as mesh_v1;
use prost::Message as _;

use super::*;

#[tokio::test]
async fn repository_yields_reviewed_candidates_and_one_hand_over() {
    let (mesh, github) = begin().await;
    let commit = commit(&github, "octo/ledger", "");
    github.make_private("octo/ledger");
    let read = format!(
        "const root = '{commit}/tree';\nprint(list_files(root).entries?.length ?? JSON.stringify(list_files(root)));\n\
         print(read_file(root + '/config.toml').content ?? read_file(root + '/config.toml'));\n\
         print(JSON.stringify(grep('def main', root).matches));\n\
         print(JSON.stringify(grep('total', root + '/.construct/outline').matches));"
    );
    // Tools other than reading.
    let tries = [
        "create_file('x', 'x')",
        "edit_file('tools/report.py', [{old: 'main', new: 'x'}])",
        "delete_file('README.md')",
        "execute_command('touch x')",
        "fetch('https://example.com/')",
        "llm.ask('hi')",
        "setenv('A', 'b')",
    ];
    let tried: Vec<String> = tries
        .iter()
        .map(|call| format!("try {{ await {call}; print('DONE') }} catch (e) {{ print(e.name) }}"))
        .collect();
    let script = json!({"turns": [
        {"text": "Let me look.", "code": read},
        {"code": tried.join("\n")},
        {"text": answer(&[valid_candidate(), candidate("Monthly Total", "tools/report.py", 12, "ArgumentParser(description"),
            candidate("other", "tools/report.py", 5, "def total(path, month)")])},
    ]});
    mesh.scripted_agent("m", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let spec = v1::ScanConnectionSpec {
        name: "work".into(),
        host: v1::ScanHost::Github.into(),
        base_url: github.url(),
        credential: Some(Credential::Token(TOKEN.into())),
    };
    let made = v1::CreateScanConnectionRequest { spec: Some(spec), ..Default::default() };
    let made = client.scans().create_scan_connection(made).await.unwrap().into_inner();
    assert!(made.spec.unwrap().credential.is_none());
    let request = v1::ListRepositoriesRequest { connection: "work".into(), ..Default::default() };
    let repositories =
        client.scans().list_repositories(request).await.unwrap().into_inner().repositories;
    assert_eq!(
        repositories.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(),
        ["octo/ledger"]
    );

    let scan =
        create(&mesh, v1::ScanSpec { connection: "work".into(), ..scan_spec("octo/ledger", "m") })
            .await;
    let status = wait_for_phase(&mesh, &scan, Review).await;
    assert_eq!(
        (status.commit.as_str(), status.files, status.candidates),
        (commit.as_str(), 3, 2),
        "{status:?}"
    );
    assert!(
        status.secrets_masked >= 1 && status.cost_pico_usd > 0 && status.next_wake.is_none(),
        "{status:?}"
    );
    let ended = r#"construct_scanner_scans_total{construct_outcome="review",construct_scan_phase="checking"} 1"#;
    mesh.wait_for_metric(Service::Scanner, ended).await;
    mesh.wait_for_metric(Service::Scanner, "construct_scanner_running 0").await;
    crate::metrics::compare(&mesh, &[Service::Scanner]).await;
    let found = candidates(&mesh, &scan).await;
    let names: Vec<_> = found.iter().map(|one| one.content.clone().unwrap().name).collect();
    assert_eq!(names, ["monthly-total", "other"]);
    assert_eq!(found[0].content.clone().unwrap().evidence.len(), 2, "the proof of both is kept");

    // The events, from the beginning and from a cursor.
    let all = events(&mesh, &scan).await;
    assert_eq!(
        all.iter().map(|event| event.sequence).collect::<Vec<_>>(),
        (1..=status.event_sequence).collect::<Vec<_>>()
    );
    let mut phases: Vec<_> = all.iter().map(v1::ScanEvent::phase).collect();
    phases.dedup();
    let all_of_them = [Queued, Snapshot, Survey, Exploring, Checking, Review];
    assert_eq!(phases, all_of_them);
    assert!(all.iter().any(|event| event.tool_calls >= 4), "{all:#?}");

    // The model has read files, and could do nothing else.
    let told = transcript(&mesh, &scan).await;
    assert!(told.contains("def main():") && told.contains("Sums the amounts"), "{told}");
    // Each is in the script's output and with its call.
    assert_eq!(told.matches("PolicyDenied").count(), 2 * tries.len(), "{told}");
    assert!(!told.contains("DONE\\n"), "{told}");

    // The secret appears nowhere.
    let (contents, logs) = (mesh.database.contents().await, logs(&mesh));
    for secret in [PLANTED, TOKEN, "cscan_"] {
        assert!(
            !told.contains(secret) && !contents.contains(secret) && !logs.contains(secret),
            "{secret}"
        );
    }
    let hex: String = TOKEN.bytes().map(|byte| format!("{byte:02x}")).collect();
    assert!(!contents.contains(&hex));
    // The files are deleted with the scan.
    until("the files to be deleted", SCAN_TIMEOUT, async || {
        let left: Vec<_> = std::fs::read_dir(mesh.scans()).unwrap().collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
    assert_eq!(github.complaints(), Vec::<String>::new());

    // Review: one is edited and accepted, one rejected; a review of an older revision is refused.
    let candidate_id = |index: usize| id(found[index].metadata.as_ref());
    let edit = v1::ReviewCandidateRequest {
        candidate: candidate_id(0),
        state: v1::CandidateState::Accepted.into(),
        content: Some(v1::CandidateContent { name: "month".into(), ..Default::default() }),
        fields: vec!["name".into()],
        revision: 1,
        ..Default::default()
    };
    let edited = review(&mesh, edit.clone()).await.unwrap();
    assert_eq!(edited.content.unwrap().name, "month");
    assert!(edited.edited && edited.reviewed_by == "local");
    assert_eq!(review(&mesh, edit).await.unwrap_err().code(), Code::Aborted);
    let reject = v1::ReviewCandidateRequest {
        candidate: candidate_id(1),
        state: v1::CandidateState::Rejected.into(),
        ..Default::default()
    };
    review(&mesh, reject.clone()).await.unwrap();

    // Repeated requests create one hand-over.
    let bus = mesh.bus().await;
    let mut tap = bus.tap("construct.v1.cmd.tool.>").await.unwrap();
    let tools = || v1::CreateToolsRequest { scan: scan.clone(), ..Default::default() };
    let handed = client.scans().create_tools(tools()).await.unwrap().into_inner();
    assert_eq!(handed.candidates.len(), 1);
    let again = client.scans().create_tools(tools()).await.unwrap().into_inner();
    assert_eq!((again.hand_over_id.as_str(), again.candidates.len()), ("", 0));
    let told = tokio::time::timeout(SCAN_TIMEOUT, tap.next()).await.unwrap().unwrap();
    let told = mesh_v1::ToolCreate::decode(told.payload).unwrap();
    assert_eq!((&told.hand_over_id, &told.commit), (&handed.hand_over_id, &commit));
    assert_eq!(told.candidates[0].content.clone().unwrap().name, "month");
    let late = v1::ReviewCandidateRequest {
        candidate: candidate_id(0),
        state: v1::CandidateState::Rejected.into(),
        ..Default::default()
    };
    assert_eq!(review(&mesh, late).await.unwrap_err().code(), Code::FailedPrecondition);
    let stored = until("the hand-over to be stored", SCAN_TIMEOUT, async || {
        let stored = mesh.nats.stored_messages(Stream::Tool).await;
        if stored.is_empty() { Err("nothing") } else { Ok(stored) }
    })
    .await;
    assert_eq!(stored.len(), 1, "{stored:?}");
}

#[tokio::test]
async fn invalid_answer_is_repaired_twice_and_never_stored_invalid() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    let lies = candidate("lies", "tools/nothing.py", 1, "x");
    let wild = candidate("wild", "tools/report.py", 3000, "def main():");
    let script = json!({"count": "total", "turns": [
        {"text": "There is nothing like JSON here."},
        {"text": answer(&[valid_candidate(), lies.clone()])},
        {"text": answer(&[valid_candidate(), lies, wild])},
    ]});
    mesh.scripted_agent("m", &script).await.unwrap();
    let scan = create(&mesh, scan_spec("octo/ledger", "m")).await;
    let status = wait_for_phase(&mesh, &scan, Review).await;
    assert_eq!((status.candidates, status.refused), (1, 2), "{status:?}");
    assert_eq!(candidates(&mesh, &scan).await.len(), 1);
    let told = events(&mesh, &scan).await;
    let messages_of_kind = |kind: &str| {
        told.iter()
            .filter(|event| event.r#type == kind)
            .map(|event| event.message.as_str())
            .collect::<Vec<_>>()
    };
    assert_eq!(messages_of_kind("repair").len(), 2, "{told:#?}");
    assert!(
        messages_of_kind("refused").iter().any(|why| why.contains("no text file tools/nothing.py")),
        "{told:#?}"
    );
    assert!(
        messages_of_kind("refused").iter().any(|why| why.contains("has no line 3000")),
        "{told:#?}"
    );
    let transcript = transcript(&mesh, &scan).await;
    assert!(
        transcript.contains("the answer has no JSON object")
            && transcript.contains("no text file tools/nothing.py"),
        "{transcript}"
    );

    // A model without any valid answer yields nothing, and the scan says so.
    mesh.scripted_agent(
        "n",
        &json!({"count": "total", "turns": [{"text": "a"}, {"text": "b"}, {"text": "c"}]}),
    )
    .await
    .unwrap();
    let scan = create(&mesh, scan_spec("octo/ledger", "n")).await;
    let status = wait_for_phase(&mesh, &scan, v1::ScanPhase::Failed).await;
    assert!(status.reason.contains("cannot be used"), "{status:?}");
}

#[tokio::test]
async fn valid_candidates_outlive_a_failed_repair() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    let lies = candidate("lies", "tools/nothing.py", 1, "x");
    let sum = candidate("sum", "tools/report.py", 5, "def total");
    let first = answer(&[valid_candidate(), sum, lies.clone()]);
    // Its repair makes the answer worse.
    let turns = json!({"count": "total", "turns": [{"text": first}, {"text": answer(&[lies])}, {"text": "No more."}]});
    mesh.scripted_agent("m", &turns).await.unwrap();
    // It fails at its first repair.
    let turns = json!({"count": "total", "turns": [{"text": first}, {"fault": {"class": "invalid_request", "times": 0}}]});
    mesh.scripted_agent("n", &turns).await.unwrap();
    for (model, repairs) in [("m", 2), ("n", 1)] {
        let scan = create(&mesh, scan_spec("octo/ledger", model)).await;
        let status = wait_for_phase(&mesh, &scan, Review).await;
        assert_eq!((status.candidates, status.refused), (2, 1), "{model}: {status:?}");
        let told = events(&mesh, &scan).await;
        let count = |kind: &str| told.iter().filter(|event| event.r#type == kind).count();
        // Two mistakes of the refused candidate: its entry point and its evidence.
        assert_eq!(
            (count("repair"), count("earlier"), count("refused")),
            (repairs, 1, 2),
            "{model}: {told:#?}"
        );
    }
    // Without earlier valid candidates there is nothing to review.
    let turns = json!({"count": "total", "turns": [{"text": "What?"}, {"fault": {"class": "invalid_request", "times": 0}}]});
    mesh.scripted_agent("o", &turns).await.unwrap();
    let scan = create(&mesh, scan_spec("octo/ledger", "o")).await;
    let status = wait_for_phase(&mesh, &scan, v1::ScanPhase::Failed).await;
    assert!(status.reason.contains("the exploration failed"), "{status:?}");
}

#[tokio::test]
async fn scans_of_one_repository_are_compared() {
    let (mesh, github) = begin().await;
    let first = commit(&github, "octo/ledger", "");
    let turns =
        |found: Value| json!({"count": "since_user", "turns": [{"text": answer(&[found])}]});
    mesh.scripted_agent("m", &turns(valid_candidate())).await.unwrap();
    let sum = candidate("sum", "tools/report.py", 5, "def total");
    mesh.scripted_agent("n", &turns(sum)).await.unwrap();
    let before = create(&mesh, scan_spec("octo/ledger", "m")).await;
    wait_for_phase(&mesh, &before, Review).await;
    let second = commit(&github, "octo/ledger", "And more.\n");
    let after = create(&mesh, scan_spec("https://github.com/octo/ledger", "n")).await;
    wait_for_phase(&mesh, &after, Review).await;
    let request = v1::CompareScansRequest { before: before.clone(), after };
    let changes = mesh.client().unwrap().scans().compare_scans(request).await.unwrap().into_inner();
    assert_eq!((changes.commit_before, changes.commit_after), (first, second));
    assert_eq!(changes.files_changed, ["README.md"]);
    assert_eq!((changes.files_added_count, changes.files_removed_count), (0, 0));
    assert_eq!(
        (&*changes.candidates_added, &*changes.candidates_removed),
        (&["sum".to_owned()][..], &["monthly-total".to_owned()][..])
    );
    let filter = Some(v1::list_scans_request::Filter { repository: "github:octo/ledger".into() });
    let request = v1::ListScansRequest { filter, ..Default::default() };
    assert_eq!(
        mesh.client().unwrap().scans().list_scans(request).await.unwrap().into_inner().scans.len(),
        2
    );
}

#[tokio::test]
async fn exploration_ends_at_budget_turn_or_time_limit() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    let reads = json!({"turns": [{"code": "print(1)"}, {"code": "print(2)"}, {"text": answer(&[valid_candidate()])}]});
    mesh.scripted_agent("reads", &reads).await.unwrap();
    mesh.scripted_agent("slow", &json!([{"delay_ms": 900_000, "text": "late"}])).await.unwrap();
    let limits = |limits: v1::ScanLimits, model: &str| v1::ScanSpec {
        limits: Some(limits),
        ..scan_spec("octo/ledger", model)
    };
    let soon = prost_types::Duration { seconds: 60, nanos: 0 };
    let cases = [
        // Less than the possible cost of one call.
        (
            v1::ScanSpec { budget_pico_usd: 1_000_000, ..scan_spec("octo/ledger", "reads") },
            "the budget of the task is exhausted",
        ),
        (
            limits(v1::ScanLimits { max_turns: 1, ..Default::default() }, "reads"),
            "the limit of 1 model calls",
        ),
        (
            limits(v1::ScanLimits { timeout: Some(soon), ..Default::default() }, "slow"),
            "it exceeded its time limit",
        ),
    ];
    for (spec, why) in cases {
        let limit = spec.budget_pico_usd;
        let scan = create(&mesh, spec).await;
        let status = wait_for_phase(&mesh, &scan, v1::ScanPhase::Failed).await;
        assert!(status.reason.contains(why), "{why}: {status:?}");
        assert!(limit == 0 || status.cost_pico_usd <= limit, "{status:?}");
        // Nothing continues in its task.
        mesh.client().unwrap().conversation(&status.task_id).wait_until_idle().await;
        wait_until_clean(&mesh).await;
    }
}
