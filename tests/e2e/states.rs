//! Documents of clients, through REST and the command line, and through several gateways.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use construct_tests::{
    client::TURN_TIMEOUT,
    http,
    mesh::{Mesh, Service, free_address},
    wait::until,
};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    identity::{output, refusal},
    protocols::follow_events,
};

/// The gateway alone: other services do not handle documents.
async fn gateway() -> Mesh {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    mesh
}

/// The data folder of an operator.
fn data(mesh: &Mesh) -> (PathBuf, BTreeMap<&'static str, &'static str>) {
    let files = BTreeMap::from([
        (
            "storage",
            "{\"workspaces\": [], \"recentProjects\": [], \"agents\": [], \"version\": \"1.0\"}\n",
        ),
        (
            "settings",
            "{\"theme\": \"dark\", \"autoSave\": true, \"providers\": {\"anthropic\": {\"apiKey\": \"sk-secret\"}}}",
        ),
        ("pinned", "{\n  \"tools\": [\"bash\"],\n  \"spaces\": [\"chat\"]\n}\n"),
        (
            "designs",
            "{\"templates\": [], \"designs\": [{\"scale\": 0.1000000000000000055511151231257827}]}",
        ),
        (
            "project-settings",
            "{\"projectName\": \"construct\", \"root\": \"/path\", \"settings\": {}}",
        ),
        (
            "skill-states",
            "{\"skills\": {\"code-review\": {\"enabled\": true, \"lastUsed\": 12345678901234567890}}}",
        ),
        ("hook-states", "{\"hooks\": {\"pre-tool\": []}}"),
        ("mcp-states", "{\"servers\": {}}"),
    ]);
    let folder = mesh.folder("data").unwrap();
    for (name, text) in &files {
        fs::write(folder.join(format!("{name}.json")), text).unwrap();
    }
    fs::create_dir(folder.join("sessions")).unwrap();
    fs::write(folder.join("config.yaml"), "").unwrap();
    (folder, files)
}

fn path(folder: &Path) -> &str {
    folder.to_str().unwrap()
}

/// The versions of the existing documents.
async fn versions(mesh: &Mesh, more: &[&str]) -> BTreeMap<String, String> {
    let listed = output(mesh, None, &[&["state", "list", "-o", "json"], more].concat(), "").await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let field = |state: &Value, name: &str| state[name].as_str().unwrap().to_owned();
    listed["states"]
        .as_array()
        .unwrap()
        .iter()
        .map(|state| (field(state, "name"), field(state, "version")))
        .collect()
}

#[tokio::test]
async fn operator_files_are_imported_and_exported_unchanged() {
    let mesh = gateway().await;
    let (folder, files) = data(&mesh);
    output(&mesh, None, &["state", "put", "settings"], "{\"theme\": \"light\"}").await;
    let why = refusal(&mesh, None, &["state", "import", path(&folder)]).await;
    assert!(why.contains("settings (version 1, by local)") && why.contains("--force"), "{why}");
    assert_eq!(versions(&mesh, &[]).await.len(), 1, "nothing was imported");
    fs::write(folder.join("pinned.json"), "[]").unwrap();
    let why = refusal(&mesh, None, &["state", "import", path(&folder), "--force"]).await;
    assert!(why.contains("pinned.json is not a JSON object"), "{why}");
    assert_eq!(versions(&mesh, &[]).await.len(), 1, "nothing was imported");
    fs::write(folder.join("pinned.json"), files["pinned"]).unwrap();

    output(&mesh, None, &["state", "import", path(&folder), "--force"], "").await;
    let imported = versions(&mesh, &[]).await;
    let expected = files.keys().map(|name| (*name, if *name == "settings" { "2" } else { "1" }));
    let expected: BTreeMap<_, _> =
        expected.map(|(name, version)| (name.to_owned(), version.to_owned())).collect();
    assert_eq!(imported, expected);
    assert!(
        versions(&mesh, &["--shared"]).await.is_empty(),
        "what is the organization's is another set"
    );
    output(&mesh, None, &["state", "import", path(&folder)], "").await;
    assert_eq!(versions(&mesh, &[]).await, imported, "all of it is the same already");

    let copy = folder.with_file_name("copy");
    output(&mesh, None, &["state", "export", path(&copy)], "").await;
    for (name, text) in &files {
        let file = copy.join(format!("{name}.json"));
        assert_eq!(crate::read(&file), *text, "{name}");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
    }
    assert_eq!(fs::read_dir(&copy).unwrap().count(), files.len(), "nothing unfinished is left");
    let why = refusal(&mesh, None, &["state", "export", path(&copy)]).await;
    assert!(why.contains("settings.json") && why.contains("--force"), "{why}");
    output(&mesh, None, &["state", "export", path(&copy), "--force"], "").await;

    // The state before the import is restored.
    let restore = ["state", "restore", "settings", "1", "--idempotency-key", "back", "-o", "json"];
    let restored = output(&mesh, None, &restore, "").await;
    assert_eq!(
        output(&mesh, None, &["state", "get", "settings"], "").await,
        "{\"theme\": \"light\"}\n"
    );
    // Repeated after another client's write, the request gets its first answer, and nothing is
    // undone.
    output(&mesh, None, &["state", "put", "settings"], "{\"theme\": \"blue\"}").await;
    assert_eq!(output(&mesh, None, &restore, "").await, restored);
    assert_eq!(
        output(&mesh, None, &["state", "get", "settings"], "").await,
        "{\"theme\": \"blue\"}\n"
    );
    let kept = output(&mesh, None, &["state", "versions", "settings", "-o", "json"], "").await;
    let kept: Value = serde_json::from_str(&kept).unwrap();
    let numbers: Vec<_> =
        kept["states"].as_array().unwrap().iter().map(|state| state["version"].as_str()).collect();
    assert_eq!(numbers, [Some("4"), Some("3"), Some("2"), Some("1")]);
    assert!(!kept.to_string().contains("theme"), "{kept}");
    assert!(
        !mesh.log(Service::Gateway).contains("sk-secret"),
        "what documents say stands in no log"
    );
    let trail = output(&mesh, None, &["audit", "list", "-o", "json"], "").await;
    assert!(trail.contains("settings@2") && !trail.contains("sk-secret"), "{trail}");
}

#[tokio::test]
async fn concurrent_document_writes_report_a_conflict() {
    let mesh = gateway().await;
    let client = http::client().build().unwrap();
    let url = format!("{}/v1/states/settings", mesh.gateway_url());
    let put = async |body: Value| {
        let answer = client.put(&url).json(&body).send().await.unwrap();
        (answer.status().as_u16(), answer.json::<Value>().await.unwrap())
    };
    assert_eq!(client.get(&url).send().await.unwrap().status().as_u16(), 404);
    let (status, made) =
        put(json!({"json": "{\"theme\": \"dark\"}", "expectedVersion": "0"})).await;
    assert_eq!(
        (status, &made["id"], &made["version"]),
        (200, &json!("settings@1"), &json!("1")),
        "{made}"
    );
    let line = ["state", "put", "settings", "--expected-version", "1"];
    output(&mesh, None, &line, "{\"theme\": \"light\"}").await;
    let (status, problem) = put(json!({"json": "{}", "expectedVersion": "1"})).await;
    let violation = &problem["preconditions"][0];
    assert_eq!(
        (status, &violation["type"], &violation["description"]),
        (409, &json!("VERSION"), &json!("2")),
        "{problem}"
    );
    let why =
        refusal(&mesh, None, &["state", "delete", "settings", "--expected-version", "1"]).await;
    assert!(why.contains("version 2"), "{why}");
    let got: Value = client.get(&url).send().await.unwrap().json().await.unwrap();
    assert_eq!((&got["json"], &got["version"]), (&json!("{\"theme\": \"light\"}"), &json!("2")));
    let (status, problem) = put(json!({"json": "[1]"})).await;
    assert_eq!((status, &problem["violations"][0]["field"]), (400, &json!("json")), "{problem}");

    let deleted =
        client.delete(format!("{url}?expectedVersion=2&forget=true")).send().await.unwrap();
    assert_eq!(deleted.status().as_u16(), 204);
    assert_eq!(client.get(format!("{url}/versions")).send().await.unwrap().status().as_u16(), 404);
}

#[tokio::test]
async fn document_changes_reach_watchers_of_a_restarted_gateway() {
    let mut mesh = gateway().await;
    let first = mesh.gateway_url();
    let second = free_address().unwrap();
    mesh.set_env("CONSTRUCT_GATEWAY_LISTEN", second.to_string());
    let replica = mesh.start_replica(Service::Gateway).await.unwrap();
    let client = http::client().build().unwrap();
    let put = async |name: &str, json: &str| {
        let answer = client
            .put(format!("{first}/v1/states/{name}"))
            .json(&json!({"json": json}))
            .send()
            .await
            .unwrap();
        assert_eq!(answer.status().as_u16(), 200);
    };
    put("pinned", "{}").await;
    let seen = watch::Sender::new(Vec::new());
    let follower = follow_events(format!("http://{second}/v1/states/events"), seen.clone());
    let wait_for_lines = async |what: &str, expected: &[&str]| {
        until(what, TURN_TIMEOUT, async || {
            let id = |event: &Value| event["state"]["id"].as_str().unwrap_or_default().to_owned();
            let ids: Vec<_> = seen.borrow().iter().map(id).collect();
            if ids == expected { Ok(()) } else { Err(ids) }
        })
        .await;
    };
    wait_for_lines("the existing documents", &["pinned@1"]).await;
    put("settings", "{\"n\": 1}").await;
    wait_for_lines("the change through the other gateway", &["pinned@1", "settings@1"]).await;
    mesh.kill_replica(replica).unwrap();
    put("settings", "{\"n\": 2}").await;
    put("settings", "{\"n\": 3}").await;
    mesh.start_replica(Service::Gateway).await.unwrap();
    wait_for_lines(
        "what was missed to be told, and nothing twice",
        &["pinned@1", "settings@1", "settings@3"],
    )
    .await;
    assert_eq!(seen.borrow()[2]["state"]["json"], "{\"n\": 3}");
    follower.abort();
}
