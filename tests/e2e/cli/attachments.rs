//! Files in messages from the command line.

use super::*;

#[tokio::test]
async fn small_files_are_inlined_and_large_ones_uploaded_first() {
    let mesh = Mesh::start().await.unwrap();
    // The error about an unknown file lists the attached ones.
    let code = "let files = [];
        try { save_file('?', 'none') } catch (error) { files = error.details.files }
        files.map(file => save_file(file, file).bytes).join(' ')";
    let script = json!({"conversations": [{"match": "weigh", "turns": [{"code": code}, {"text": "{{last_result}}"}]}]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("small.csv"), "1;2").unwrap();
    std::fs::write(path("large.bin"), vec![0xFF; 3_000_000]).unwrap();
    std::fs::write(path("empty.txt"), "").unwrap();

    let (small, large, empty) = (path("small.csv"), path("large.bin"), path("empty.txt"));
    let arguments = [
        "exec",
        "-o",
        "json",
        "--attach",
        &small,
        "--attach",
        &large,
        "--attach",
        &empty,
        "weigh them",
    ];
    let done = construct(&mesh, &arguments, "").await;
    assert_eq!(done.code(), 0, "{done:?}");
    let report = done.json();
    assert_eq!(report["text"], "0 3000000", "the newest first");
    let task = report["task"].as_str().unwrap();
    let listed = construct(&mesh, &["message", "list", task, "-o", "json"], "").await.json();
    let blocks = &listed["messages"][0]["spec"]["blocks"];
    assert_eq!(blocks[1]["attachment"]["mediaType"], "text/csv", "{blocks}");
    let file = blocks[2]["attachment"]["file"].as_str().unwrap();
    assert_eq!(
        (&blocks[2]["attachment"]["name"], &blocks[2]["attachment"]["size"]),
        (&json!("large.bin"), &json!("3000000"))
    );

    // An uploaded file is named by its id, and shown that way.
    let arguments = ["message", "create", task, "weigh again", "--attach", file, "-o", "json"];
    let sent = construct(&mesh, &arguments, "").await;
    assert_eq!(sent.code(), 0, "{sent:?}");
    let id = sent.json()["metadata"]["id"].as_str().unwrap().to_owned();
    let shown = construct(&mesh, &["message", "get", &id], "").await;
    let line = format!("[large.bin: application/octet-stream, 3000000 bytes, {file}]");
    assert!(shown.output.contains(&line), "{shown:?}");

    let missing = construct(&mesh, &["exec", "--attach", &path("none"), "weigh"], "").await;
    assert_eq!(missing.code(), 2, "{missing:?}");
    let tasks = construct(&mesh, &["task", "list", "-o", "json"], "").await.json();
    assert_eq!(
        tasks["tasks"].as_array().unwrap().len(),
        1,
        "nothing was begun for what cannot be read"
    );
}
