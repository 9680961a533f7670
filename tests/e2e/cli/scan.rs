//! `construct scan`: from a repository to the hand-over, and connections.

use construct_tests::{
    github::{APP, APP_KEY, INSTALLATION, TOKEN, tarball},
    mesh::{Mesh, Service},
    terminal::ENTER,
};
use serde_json::{Value, json};

use super::{
    CommandOutput, construct,
    entities::{check, get, run},
    spawn, terminal,
};
use crate::scanner::{REPORT, answer, begin, candidate, commit, valid_candidate};

/// The id of the scan that a command started and followed: its first output.
fn id_of(done: &CommandOutput) -> String {
    let id = done.errors.lines().next().unwrap_or_default();
    assert!(id.starts_with("scan_"), "{done:?}");
    id.to_owned()
}

/// The lines about a scan that a command printed while it followed it.
fn progress_lines(done: &CommandOutput) -> Vec<&str> {
    let phases = [
        "queued ",
        "snapshot ",
        "survey ",
        "exploring ",
        "checking ",
        "review ",
        "failed ",
        "cancelled ",
    ];
    done.errors
        .lines()
        .filter(|line| phases.iter().any(|phase| format!("{line} ").starts_with(phase)))
        .collect()
}

/// Starts a scan of `octo/ledger` that proposes these candidates, and waits for its end.
async fn finished_scan(mesh: &Mesh, model: &str, found: &[Value]) -> String {
    mesh.scripted_agent(model, &json!([{"text": answer(found)}])).await.unwrap();
    let done = construct(mesh, &["scan", "octo/ledger", "--model", model], "").await;
    assert_eq!(done.code(), 0, "{done:?}");
    id_of(&done)
}

#[tokio::test]
async fn cli_scans_and_follows_a_repository() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();

    // The only model need not be named. The proposals are the output; progress goes to standard
    // error.
    let done =
        construct(&mesh, &["scan", "octo/ledger", "--budget", "1.50", "--timeout", "30m"], "")
            .await;
    assert_eq!(done.code(), 0, "{done:?}");
    assert_eq!(done.output.lines().count(), 2, "{done:?}");
    for part in ["NAME", "monthly-total", "proposed", "tools/report.py:11"] {
        assert!(done.output.contains(part), "{part}: {done:?}");
    }
    let scan = id_of(&done);
    for phase in ["snapshot", "survey", "exploring", "checking", "review"] {
        assert!(done.errors.lines().any(|line| line.starts_with(phase)), "{phase}: {done:?}");
    }
    assert!(done.errors.ends_with(&format!("construct scan review {scan}\n")), "{done:?}");

    let shown = get(&mesh, &format!("scan get {scan}")).await;
    assert_eq!(
        (
            &shown["status"]["phase"],
            &shown["spec"]["budgetPicoUsd"],
            &shown["spec"]["limits"]["timeout"]
        ),
        (&json!("SCAN_PHASE_REVIEW"), &json!("1500000000000"), &json!("1800s")),
        "{shown}"
    );
    // Followed again, it prints the same, for people and for programs.
    let again = construct(&mesh, &["scan", "watch", &scan], "").await;
    assert_eq!((again.code(), progress_lines(&again)), (0, progress_lines(&done)), "{again:?}");
    let again = construct(&mesh, &["scan", "watch", &scan, "-o", "json"], "").await;
    let events: Vec<Value> =
        again.errors.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let sequences: Vec<&Value> = events.iter().map(|event| &event["sequence"]).collect();
    let expected: Vec<Value> = (1..=events.len()).map(|number| json!(number.to_string())).collect();
    assert_eq!(sequences, expected.iter().collect::<Vec<_>>(), "{again:?}");
    assert_eq!(again.json()["candidates"][0]["content"]["name"], "monthly-total", "{again:?}");

    // An archive and a folder of this machine.
    let files = [("README.md", &b"# Ledger\n"[..]), ("tools/report.py", REPORT.as_bytes())];
    let archive = mesh.home().join("ledger.tar.gz");
    std::fs::write(&archive, tarball("ledger-1", &"a".repeat(40), &files)).unwrap();
    let folder = mesh.folder("ledger").unwrap();
    std::fs::create_dir(folder.join("tools")).unwrap();
    for (path, content) in files {
        std::fs::write(folder.join(path), content).unwrap();
    }
    let (archive, folder) = (archive.display().to_string(), folder.display().to_string());
    for place in [&archive, &folder] {
        let done = construct(&mesh, &["scan", place], "").await;
        assert!(done.code() == 0 && done.output.contains("monthly-total"), "{place}: {done:?}");
    }

    // Scans that find nothing, and scans that are refused.
    let failed = construct(&mesh, &["scan", "octo/nowhere"], "").await;
    assert_eq!(failed.code(), 1, "{failed:?}");
    assert!(
        failed.output.contains("not found") && failed.output.contains("failed since"),
        "{failed:?}"
    );
    let large = mesh.home().join("large.zip");
    std::fs::write(&large, vec![0; 3 * 1024 * 1024 + 1]).unwrap();
    let queued = run(&mesh, "scan octo/ledger --no-wait -o json", "", 0, &[]).await.json();
    assert_eq!(queued["status"]["phase"], "SCAN_PHASE_QUEUED", "{queued}");
    let unknown = "scan_01890a5d-ac96-774b-bcce-b302099a8057";
    check(
        &mesh,
        &[
            (
                "scan list --repository github:octo/ledger",
                "",
                0,
                &["ID", &scan, "github:octo/ledger", "review"],
            ),
            ("scan list --repository github:octo/other", "", 0, &["ID"]),
            ("scan", "", 2, &["REPOSITORY"]),
            ("scan ./no-such-thing", "", 2, &["cannot be read"]),
            (&format!("scan {}", large.display()), "", 2, &["more than 3 MiB"]),
            ("scan octo/ledger/more", "", 2, &["spec.github"]),
            ("scan octo/ledger --budget 1/day", "", 2, &["without a period"]),
            ("scan octo/ledger --timeout 1s", "", 2, &["timeout"]),
            ("scan octo/ledger --model nobody", "", 1, &["nobody"]),
            ("scan octo/ledger --connection nobody", "", 1, &["nobody"]),
            ("scan https://git.example.com/octo/ledger", "", 2, &["git.example.com"]),
            ("scan get nonsense", "", 2, &["scan"]),
            (&format!("scan get {unknown}"), "", 1, &["not found", unknown]),
            (&format!("scan watch {unknown}"), "", 1, &["not found"]),
            (&format!("scan cancel {unknown}"), "", 1, &["not found"]),
            (&format!("scan review {unknown}"), "", 1, &["not found"]),
        ],
    )
    .await;
    // With a second model, the command has to name one.
    mesh.scripted_agent("n", &json!([{"text": answer(&[])}])).await.unwrap();
    run(&mesh, "scan octo/ledger", "", 2, &["model"]).await;
    let nothing = construct(&mesh, &["scan", "octo/ledger", "--model", "n"], "").await;
    assert_eq!(nothing.code(), 0, "{nothing:?}");
    assert_eq!(nothing.output, "the scan found no candidates in this repository\n", "{nothing:?}");
    assert_eq!(github.complaints(), Vec::<String>::new());
}

#[tokio::test]
async fn followed_scan_survives_gateway_crash_and_can_be_canceled() {
    let (mut mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    mesh.scripted_agent("slow", &json!([{"delay_ms": 5000, "text": answer(&[valid_candidate()])}]))
        .await
        .unwrap();
    mesh.scripted_agent("never", &json!([{"delay_ms": 900_000, "text": "late"}])).await.unwrap();

    // The gateway is killed in between: nothing is repeated, and nothing is missing.
    let mut job = spawn(&mesh, &["scan", "octo/ledger", "--model", "slow"], "").await;
    job.wait_for_error_line("exploring").await;
    mesh.crash(Service::Gateway).await.unwrap();
    let done = job.wait().await;
    assert_eq!(done.code(), 0, "{done:?}");
    let again = construct(&mesh, &["scan", "watch", &id_of(&done)], "").await;
    assert_eq!(progress_lines(&again), progress_lines(&done), "{done:?}");

    // A scan does not depend on its follower.
    let mut job = spawn(&mesh, &["scan", "octo/ledger", "--model", "never"], "").await;
    let scan = job.wait_for_error_line("scan_").await.trim().to_owned();
    job.wait_for_error_line("exploring").await;
    job.signal("INT");
    let left = job.wait().await;
    assert_ne!(left.code(), 0, "{left:?}");
    let shown = run(&mesh, &format!("scan get {scan} -o json"), "", 0, &[]).await.json();
    assert_eq!(shown["status"]["phase"], "SCAN_PHASE_EXPLORING", "{shown}");
    assert_eq!(shown["status"]["cancelRequested"], Value::Null, "{shown}");

    // Canceled by another caller, it ends for its followers.
    let mut job = spawn(&mesh, &["scan", "watch", &scan], "").await;
    job.wait_for_error_line("exploring").await;
    run(
        &mesh,
        &format!("scan cancel {scan} --reason 'not now'"),
        "",
        0,
        &[&scan, "cancel:", "requested"],
    )
    .await;
    let done = job.wait().await;
    assert_eq!(done.code(), 4, "{done:?}");
    assert!(done.output.contains("cancelled since") && done.output.contains("not now"), "{done:?}");
    // A second cancel changes nothing.
    run(&mesh, &format!("scan cancel {scan}"), "", 0, &["cancelled since", "not now"]).await;
}

#[tokio::test]
async fn candidates_are_reviewed_edited_handed_over_and_compared() {
    let (mesh, github) = begin().await;
    let first = commit(&github, "octo/ledger", "");
    let sum = |name: &str| candidate(name, "tools/report.py", 5, "def total(path, month)");
    let scan = finished_scan(&mesh, "m", &[valid_candidate(), sum("sum")]).await;
    let edit = mesh.home().join("edit.json");
    std::fs::write(&edit, r#"{"score": 90, "scoreReasons": ["Ann wants it."]}"#).unwrap();
    let review = format!("scan review {scan}");
    let tools = format!("scan create-tools {scan}");
    check(
        &mesh,
        &[
            (&review, "", 0, &["monthly-total", "sum", "proposed"]),
            (
                &format!("{review} --show monthly-total"),
                "",
                0,
                &[
                    "python tools/report.py LEDGER",
                    "tools/report.py:11",
                    "def main():",
                    "It is started here.",
                    "month",
                ],
            ),
            (&format!("{review} --show nobody"), "", 2, &["no candidate nobody"]),
            (&format!("{review} --accept nobody"), "", 2, &["no candidate nobody"]),
            (&tools, "", 0, &["no accepted candidates to hand over"]),
            (&format!("{review} --edit sum"), "", 2, &["--with"]),
            (
                &format!("{review} --edit sum --with -"),
                "{\"nothing\": 1}",
                2,
                &["no field `nothing`"],
            ),
            (&format!("{review} --edit sum --with -"), "{\"score\": 900}", 2, &["score"]),
            (
                &format!("{review} --edit sum --with -"),
                "{\"evidence\": []}",
                2,
                &["fields[0]: must be one of"],
            ),
            (&format!("{review} --edit sum --with /no/such/file"), "", 2, &["/no/such/file"]),
            // In the manual's words: all undecided candidates but the named one.
            (&format!("{review} --accept all --reject sum"), "", 0, &["accepted", "rejected"]),
            (&format!("{review} --undecide monthly-total"), "", 0, &["proposed", "rejected"]),
            // Edited and accepted at once, from standard input and from a file.
            (
                &format!("{review} --edit monthly-total --with - --accept monthly-total"),
                r#"{"name": "month"}"#,
                0,
                &["month ", "accepted"],
            ),
            (&format!("{review} --edit month --with {}", edit.display()), "", 0, &["90"]),
            (
                &format!("{review} --show month"),
                "",
                0,
                &["90 of 100", "Ann wants it.", "by a person", "local"],
            ),
            (&format!("{tools} --candidate nobody"), "", 2, &["no candidate nobody"]),
            (&format!("{tools} --candidate sum"), "", 1, &["accepted"]),
            (&tools, "", 0, &["1 candidate handed over as "]),
            (&tools, "", 0, &["no accepted candidates to hand over"]),
            (&format!("{review} --reject month"), "", 1, &["handed over"]),
            (&review, "", 0, &["month", "handed over", "rejected"]),
        ],
    )
    .await;

    let second = commit(&github, "octo/ledger", "And more.\n");
    let later =
        finished_scan(&mesh, "n", &[sum("sum"), candidate("new", "README.md", 1, "# Ledger")])
            .await;
    let commits =
        format!("{} → {}: 0 files added, 0 removed, 1 changed", &first[..12], &second[..12]);
    let compared = ["  ~ README.md", "candidates new: new", "candidates removed: month"];
    let parts: Vec<&str> = [commits.as_str()].into_iter().chain(compared).collect();
    run(&mesh, &format!("scan compare {scan} {later}"), "", 0, &parts).await;
    let json = run(&mesh, &format!("scan compare {scan} {later} -o json"), "", 0, &[]).await.json();
    assert_eq!(
        (&json["commitBefore"], &json["commitAfter"]),
        (&json!(first), &json!(second)),
        "{json}"
    );
    run(&mesh, &format!("scan compare {scan} nonsense"), "", 2, &["after"]).await;
}

#[tokio::test]
async fn connections_with_token_or_app_are_managed() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    github.make_private("octo/ledger");
    for number in 0..101 {
        github.commit(&format!("corp/r{number:03}"), &[("README.md", b"# One of many\n")]);
    }
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    mesh.scripted_agent("never", &json!([{"delay_ms": 900_000, "text": "late"}])).await.unwrap();
    let (key, token) = (mesh.home().join("app.pem"), mesh.home().join("token.txt"));
    std::fs::write(&key, APP_KEY).unwrap();
    std::fs::write(&token, format!("{TOKEN}\n")).unwrap();
    let (key, token, url) = (key.display(), token.display(), github.url());
    let app = format!("scan connection create app --base-url {url} --app {APP} --key-file {key}");
    check(
        &mesh,
        &[
            (
                &format!("scan connection create work --base-url {url}"),
                &format!("{TOKEN}\n"),
                0,
                &["work", "github", "token, encrypted with"],
            ),
            (
                &format!("scan connection create work --token-file {token}"),
                "",
                1,
                &["exists already"],
            ),
            (
                &format!("scan connection create filed --base-url {url} --token-file {token}"),
                "",
                0,
                &["filed"],
            ),
            ("scan connection create none", "", 2, &["spec.token"]),
            ("scan connection create 'Not A Name'", TOKEN, 2, &["spec.name"]),
            ("scan connection create x --base-url nonsense", TOKEN, 2, &["spec.base_url"]),
            ("scan connection create x --token-file /no/such/file", "", 2, &["/no/such/file"]),
            (&app, "", 2, &["--installation"]),
            (&format!("{app} --installation x"), "", 2, &["installation_id"]),
            (
                &format!("{app} --installation {INSTALLATION} --host gitlab"),
                "",
                2,
                &["only for GitHub"],
            ),
            (&format!("{app} --installation {INSTALLATION}"), "", 0, &["app, encrypted with"]),
            (
                "scan connection create lab --host gitlab --base-url https://gitlab.corp.example",
                "glpat-of-a-test",
                0,
                &["lab", "gitlab", "https://gitlab.corp.example"],
            ),
            ("scan connection list", "", 0, &["work", "filed", "app", "lab", "gitlab", "token"]),
            ("scan connection repositories nobody", "", 1, &["nobody"]),
            (
                "scan connection repositories work --owner octo",
                "",
                0,
                &["octo/ledger", "private", "main"],
            ),
            ("scan connection repositories app --owner octo", "", 0, &["octo/ledger", "private"]),
            (
                "scan connection repositories work --owner corp --page 2",
                "",
                0,
                &["corp/r100", "public"],
            ),
            ("scan connection repositories work --owner nobody-here", "", 1, &["not found"]),
        ],
    )
    .await;
    let page =
        construct(&mesh, &["scan", "connection", "repositories", "work", "--owner", "corp"], "")
            .await;
    assert_eq!((page.code(), page.errors.as_str()), (0, "there are more: --page 2\n"), "{page:?}");
    assert_eq!(page.output.lines().count(), 101, "{page:?}");

    // A person types it without echo.
    let mut person =
        terminal(&mesh, &["scan", "connection", "create", "typed", "--base-url", &url]);
    person.wait_for_text("token of typed:").await;
    person.press(TOKEN).await;
    person.press(ENTER).await;
    person.wait_for_text("encrypted with").await;
    assert!(
        person.pictures().iter().all(|picture| !picture.contains("ghp_")),
        "{}",
        person.screen()
    );
    assert_eq!(person.wait_for_exit().await, 0);

    // Repositories that only the app and the tokens reach are scanned with them, and the list shows
    // it.
    for name in ["typed", "app"] {
        let done =
            construct(&mesh, &["scan", "octo/ledger", "--connection", name, "--model", "m"], "")
                .await;
        assert_eq!(done.code(), 0, "{done:?}");
        run(
            &mesh,
            &format!("scan connection repositories {name} --owner octo"),
            "",
            0,
            &[&id_of(&done)],
        )
        .await;
    }
    let nobody = construct(&mesh, &["scan", "octo/ledger", "--model", "m"], "").await;
    assert!(nobody.code() == 1 && nobody.output.contains("not found"), "{nobody:?}");

    // A connection in use cannot be deleted.
    let line = "scan octo/ledger --connection work --model never --no-wait -o json";
    let scan =
        run(&mesh, line, "", 0, &[]).await.json()["metadata"]["id"].as_str().unwrap().to_owned();
    run(&mesh, "scan connection delete work", "", 1, &["in use by at least one scan"]).await;
    run(&mesh, &format!("scan cancel {scan}"), "", 0, &[]).await;
    assert_eq!(construct(&mesh, &["scan", "watch", &scan], "").await.code(), 4);
    check(
        &mesh,
        &[
            ("scan connection delete work", "", 0, &["connection work is deleted\n"]),
            ("scan connection delete work", "", 1, &["not found"]),
        ],
    )
    .await;
    let logs: String = Service::ALL
        .into_iter()
        .chain([Service::Scanner])
        .map(|service| mesh.log(service))
        .collect();
    let contents = mesh.database.contents().await;
    for secret in [TOKEN, "glpat-of-a-test", "PRIVATE KEY"] {
        assert!(!logs.contains(secret) && !contents.contains(secret), "{secret}");
    }
    assert_eq!(github.complaints(), Vec::<String>::new());
}
