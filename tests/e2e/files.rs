//! Interrupted uploads through the command line: by the client's death and by the gateway's.

use std::{fs, path::Path, process::Stdio};

use construct_tests::{
    client::TURN_TIMEOUT,
    mesh::{Mesh, Service, binary},
    wait::until,
};
use serde_json::Value;
use tokio::process::{Child, Command};

use crate::identity::{output, refusal};

async fn gateway() -> Mesh {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    mesh
}

/// Starts an upload.
fn upload(mesh: &Mesh, path: &Path) -> Child {
    let mut command = Command::new(binary("construct").unwrap());
    command.env_clear().env("CONSTRUCT_GATEWAY_URL", mesh.gateway_url());
    command.args(["file", "upload", path.to_str().unwrap(), "-o", "json"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    command.spawn().unwrap()
}

async fn json_output(child: Child) -> Value {
    let done = tokio::time::timeout(TURN_TIMEOUT, child.wait_with_output())
        .await
        .expect("the upload ends")
        .unwrap();
    assert!(done.status.success(), "{done:?}");
    serde_json::from_slice(&done.stdout).unwrap()
}

async fn list_files(mesh: &Mesh) -> Vec<Value> {
    let listed: Value =
        serde_json::from_str(&output(mesh, None, &["file", "list", "-o", "json"], "").await)
            .unwrap();
    listed["files"].as_array().cloned().unwrap_or_default()
}

/// Waits until the only file has so many bytes; returns its id.
async fn wait_for_bytes(mesh: &Mesh, bytes: i64) -> String {
    until("enough of the file to be there", TURN_TIMEOUT, async || {
        let files = list_files(mesh).await;
        let there =
            files.first().and_then(|file| file["status"]["received"].as_str()?.parse::<i64>().ok());
        match there {
            Some(there) if there >= bytes => {
                Ok(files[0]["metadata"]["id"].as_str().unwrap().to_owned())
            }
            _ => Err(files),
        }
    })
    .await
}

#[tokio::test]
async fn upload_resumes_after_client_and_gateway_crash() {
    const MIB: i64 = 1024 * 1024;
    let mut mesh = gateway().await;
    let folder = mesh.folder("files").unwrap();
    let path = folder.join("data.bin");
    let content: Vec<u8> = (0..32 * 1024 * 1024_u32)
        .flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes())
        .collect();
    fs::write(&path, &content).unwrap();
    let mut first = upload(&mesh, &path);
    let id = wait_for_bytes(&mesh, 2 * MIB).await;
    first.kill().await.unwrap();
    let before = list_files(&mesh).await;
    assert_eq!(before[0]["status"]["state"], "FILE_STATE_UPLOADING", "{before:?}");

    let there: i64 = before[0]["status"]["received"].as_str().unwrap().parse().unwrap();
    let second = upload(&mesh, &path);
    wait_for_bytes(&mesh, there + 4 * MIB).await;
    mesh.kill(Service::Gateway).unwrap();
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    let file = json_output(second).await;
    assert_eq!(
        (file["metadata"]["id"].as_str(), &file["status"]["state"]),
        (Some(id.as_str()), &"FILE_STATE_READY".into())
    );
    assert_eq!(list_files(&mesh).await.len(), 1, "it is the same upload");

    let copy = folder.join("copy.bin");
    output(&mesh, None, &["file", "download", &id, copy.to_str().unwrap()], "").await;
    assert!(fs::read(&copy).unwrap() == content);
    let why = refusal(&mesh, None, &["file", "download", &id, copy.to_str().unwrap()]).await;
    assert!(why.contains("--force"), "{why}");
    // Content without references is deleted, and so are its parts.
    output(&mesh, None, &["file", "delete", &id], "").await;
    let files = mesh.home().join("data/blobs/files");
    until("the content to be gone", TURN_TIMEOUT, async || {
        let mut left = Vec::new();
        let mut folders = vec![files.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() { folders.push(path) } else { left.push(path) }
            }
        }
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
}

#[tokio::test]
async fn cli_explains_refused_files_and_uploads_content_once() {
    let mesh = gateway().await;
    let folder = mesh.folder("files").unwrap();
    let path = folder.join("picture.png");
    fs::write(&path, "no picture").unwrap();
    let path = path.to_str().unwrap();
    let why = refusal(&mesh, None, &["file", "upload", path, "--media-type", "image/png"]).await;
    assert!(why.contains("was refused: it is declared as image/png"), "{why}");
    let upload =
        ["file", "upload", path, "--media-type", "text/plain", "--name", "notes.txt", "-o", "json"];
    let one: Value = serde_json::from_str(&output(&mesh, None, &upload, "").await).unwrap();
    let two: Value = serde_json::from_str(&output(&mesh, None, &upload, "").await).unwrap();
    assert_eq!(
        (&one["status"]["sha256"], &one["spec"]["name"]),
        (&two["status"]["sha256"], &"notes.txt".into())
    );
    let id = two["metadata"]["id"].as_str().unwrap();
    assert_eq!(output(&mesh, None, &["file", "download", id, "-"], "").await, "no picture");
    output(&mesh, None, &["file", "update", id, "--name", "other.txt"], "").await;
    let named = output(&mesh, None, &["file", "list", "--name", "other.txt"], "").await;
    assert!(named.contains(id) && named.contains("ready"), "{named}");
}
