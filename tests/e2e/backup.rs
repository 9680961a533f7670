//! Backup and restore with the parts of `./dev backup` and `./dev restore` that do not depend on
//! homes: everything is restored and continues.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

use construct_tests::{
    client::Conversation,
    mesh::{Mesh, Service},
};
use serde_json::json;

use crate::{
    approvals::{AwaitingApproval, SCRIPT, construct, wait_until_nothing_in_flight},
    read,
};

/// The parts of `./dev` that are used, for the database of libpq's variables.
const PRELUDE: &str = "set -euo pipefail
    root=$1; shift
    PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
    for part in console postgres backup; do . \"$root/scripts/dev/$part.sh\"; done
";

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests lie in the repository")
        .to_owned()
}

/// Runs shell statements after the parts of `./dev`.
fn shell(mesh: &Mesh, statements: &str, arguments: &[&Path]) -> Output {
    let url = reqwest::Url::parse(mesh.database.url()).unwrap();
    let places = format!(
        "places=([data]={:?} [streams]={:?})\n",
        mesh.home().join("data").display().to_string(),
        mesh.nats.store().display().to_string()
    );
    Command::new("bash")
        .args(["-c", &format!("{PRELUDE}{places}{statements}"), "backup"])
        .arg(root())
        .args(arguments)
        .env("PGHOST", url.host_str().unwrap())
        .env("PGPORT", url.port().unwrap().to_string())
        .env("PGUSER", url.username())
        .env("PGPASSWORD", url.password().unwrap_or_default())
        .env("PGDATABASE", url.path().trim_start_matches('/'))
        .env("NO_COLOR", "1")
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn run(mesh: &Mesh, statements: &str, arguments: &[&Path]) {
    let done = shell(mesh, statements, arguments);
    assert!(done.status.success(), "{statements}: {}", String::from_utf8_lossy(&done.stderr));
}

/// The standard error of a command that has to fail.
fn failure_of(mesh: &Mesh, statements: &str, arguments: &[&Path]) -> String {
    let done = shell(mesh, statements, arguments);
    let said = String::from_utf8_lossy(&done.stderr).into_owned();
    assert_eq!(done.status.code(), Some(1), "{statements}: {said}");
    said
}

async fn stop(mesh: &mut Mesh) {
    for service in Service::ALL {
        mesh.stop(service).await.unwrap();
    }
    mesh.nats.stop();
}

async fn start(mesh: &mut Mesh) {
    mesh.nats.restart().await;
    mesh.start_services().await.unwrap();
}

/// Deletes everything that a home holds.
async fn destroy(mesh: &Mesh) {
    mesh.database.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public").await;
    fs::remove_dir_all(mesh.home().join("data")).unwrap();
    fs::remove_dir_all(mesh.nats.store()).unwrap();
}

async fn talker(mesh: &Mesh) -> Conversation {
    let script = json!({"conversations": [
        {"match": "write", "turns": [{"text": "I write.", "code": "create_file('note', 'kept'); 'written'"}, {"text": "{{last_result}}"}]},
        {"match": "read", "turns": [{"text": "I read.", "code": "read_file('note').content"}, {"text": "{{last_result}}"}]},
    ]});
    mesh.scripted_agent("talker", &script).await.unwrap();
    mesh.client().unwrap().create_task("talker", None).await.unwrap()
}

#[tokio::test]
async fn restored_backup_continues_its_tasks() {
    let mut mesh = Mesh::start().await.unwrap();
    let asking = AwaitingApproval::start(&mesh, &SCRIPT).await;
    let talk = talker(&mesh).await;
    talk.ask("write").await;
    wait_until_nothing_in_flight(&mesh).await;
    let notes = mesh.home().join("notes.txt");
    fs::write(&notes, "what somebody has uploaded").unwrap();
    construct(&mesh, &["file", "upload", notes.to_str().unwrap(), "-o", "json"]).await;
    let before = (talk.transcript().await.show(), asking.conversation.transcript().await.show());
    assert!(before.0.contains("written"), "{}", before.0);

    stop(&mut mesh).await;
    let folder = tempfile::tempdir().unwrap();
    let backup = folder.path().join("backups/one");
    run(&mesh, "backup_take \"$1\"", &[&backup]);
    for entry in fs::read_dir(&backup).unwrap() {
        let entry = entry.unwrap();
        assert_eq!(
            entry.metadata().unwrap().permissions().mode() & 0o777,
            0o600,
            "{}",
            entry.path().display()
        );
    }
    assert_eq!(fs::metadata(&backup).unwrap().permissions().mode() & 0o777, 0o700);
    destroy(&mesh).await;
    run(&mesh, "backup_check \"$1\"; backup_put \"$1\"", &[&backup]);
    start(&mut mesh).await;

    let listed = construct(&mesh, &["file", "list", "-o", "json"]).await;
    let file = listed["files"][0]["metadata"]["id"].as_str().unwrap();
    let restored = folder.path().join("notes.txt");
    crate::identity::output(
        &mesh,
        None,
        &["file", "download", file, restored.to_str().unwrap()],
        "",
    )
    .await;
    assert_eq!(read(&restored), "what somebody has uploaded");

    let after = (talk.transcript().await.show(), asking.conversation.transcript().await.show());
    assert_eq!(after, before);
    talk.ask("read").await;
    let transcript = talk.transcript().await;
    assert!(transcript.check(&["write", "read"]).show().contains("kept"), "{}", transcript.show());
    // The suspended script continues from its journal: completed calls are not repeated.
    construct(&mesh, &["approval", "approve", &asking.approval, "-o", "json"]).await;
    asking.result().await;
    assert_eq!(read(&mesh.workspace().join("log")), "open\nafter\n");

    // The same without its streams: the outcome of the script's calls is unknown, which is
    // reported, and they are not repeated.
    stop(&mut mesh).await;
    run(
        &mesh,
        "rm -r \"${places[streams]}\"; unset 'places[streams]'; backup_check \"$1\"; backup_put \"$1\"",
        &[&backup],
    );
    start(&mut mesh).await;
    assert_eq!(talk.transcript().await.show(), before.0, "what came after the backup is not known");
    construct(&mesh, &["approval", "approve", &asking.approval, "-o", "json"]).await;
    asking.conversation.wait_until_idle().await;
    let transcript = asking.conversation.transcript().await;
    assert!(transcript.result().error.starts_with("JournalUnreadable"), "{}", transcript.show());
    assert_eq!(read(&mesh.workspace().join("log")), "open\nafter\n");
    talk.ask("hello").await;
    assert_eq!(
        talk.transcript().await.answers().last().map(String::as_str),
        Some("You said: hello")
    );
}

#[tokio::test]
async fn incomplete_or_incompatible_backup_is_refused() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    fs::create_dir_all(mesh.home().join("data/blobs")).unwrap();
    fs::write(mesh.home().join("data/blobs/one"), "a blob").unwrap();
    mesh.nats.stop();
    let folder = tempfile::tempdir().unwrap();
    let (backup, keys) = (folder.path().join("backup"), folder.path().join("master.key"));
    let with_keys = "key_files=([master]=\"$2\"); ";
    // A key without a name has the name that the services give it.
    fs::write(
        &keys,
        "# two\nold:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=\nAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=\n",
    )
    .unwrap();
    run(&mesh, &format!("{with_keys}backup_take \"$1\""), &[&backup, &keys]);
    let manifest = read(&backup.join("manifest"));
    assert!(manifest.contains("\nkey master old\nkey master k"), "{manifest}");
    assert!(!backup.join("master.key").exists(), "keys are kept only when that is asked for");
    let check = format!("{with_keys}backup_check \"$1\"; backup_keys_missing \"$1\"");
    let nothing_missing = shell(&mesh, &check, &[&backup, &keys]);
    assert!(
        nothing_missing.status.success() && nothing_missing.stdout.is_empty(),
        "{nothing_missing:?}"
    );
    fs::write(&keys, "other:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=").unwrap();
    let missing = shell(&mesh, &check, &[&backup, &keys]);
    assert!(
        String::from_utf8_lossy(&missing.stdout).starts_with("old (master.key)\nk"),
        "{missing:?}"
    );

    assert!(failure_of(&mesh, "backup_take \"$1\"", &[&backup]).contains("exists already"));
    let kept = folder.path().join("with-keys");
    run(&mesh, &format!("{with_keys}backup_take \"$1\" --with-keys"), &[&kept, &keys]);
    assert_eq!(read(&kept.join("master.key")), read(&keys));

    let check = "backup_check \"$1\"";
    let spoil = |name: &str, text: &str| {
        let path = backup.join(name);
        let was = fs::read(&path).unwrap();
        fs::write(&path, text).unwrap();
        let said = failure_of(&mesh, check, &[&backup]);
        fs::write(&path, was).unwrap();
        said
    };
    assert!(spoil("data.tar.gz", "something else").contains("its checksum differs"));
    assert!(spoil("manifest", "construct-backup 2\n").contains("another version"));
    assert!(spoil("manifest", "construct-backup 1\nschema 1\n").contains("incomplete"));
    let newer =
        manifest.lines().map(|line| if line.starts_with("schema ") { "schema 9999" } else { line });
    assert!(
        spoil("manifest", &newer.collect::<Vec<_>>().join("\n")).contains("from a newer version")
    );
    let newer =
        manifest.lines().map(|line| if line.starts_with("nats ") { "nats 99.0.0" } else { line });
    assert!(
        spoil("manifest", &newer.collect::<Vec<_>>().join("\n")).contains("restore without them")
    );
    assert!(failure_of(&mesh, check, &[folder.path()]).contains("no manifest"));
    fs::rename(backup.join("database.dump"), folder.path().join("dump")).unwrap();
    assert!(failure_of(&mesh, check, &[&backup]).contains("database.dump is missing"));
    fs::rename(folder.path().join("dump"), backup.join("database.dump")).unwrap();
    run(&mesh, check, &[&backup]);
}
