//! Attached files, saved in the workspace.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use construct_bus::files;
use construct_domain::OrganizationId;
use construct_proto::mesh::v1::AttachedFile;
use futures::FutureExt as _;
use uuid::Uuid;

use super::*;
use crate::tests::store_file;

const ORG: OrganizationId = OrganizationId::LOCAL;

/// A workspace and a folder of attached files.
struct Desk {
    bench: Bench,
    blobs: TempDir,
}

impl Desk {
    fn new(policy: Policy, attach: impl FnOnce(&std::path::Path) -> Vec<AttachedFile>) -> Self {
        let Bench { directory, tools } =
            Bench::with(policy, Egress::new(&[]).expect("an HTTP client"));
        let blobs = tempfile::tempdir().expect("a temporary directory");
        let attached = attach(blobs.path());
        let store = files::Store::open(blobs.path()).expect("a folder");
        let tools = tools.with_attachments(Attachments::new(store, ORG, &attached));
        Self { bench: Bench { directory, tools }, blobs }
    }

    fn with(content: &[u8]) -> (Self, AttachedFile) {
        let mut attached = None;
        let desk = Self::new(Policy::default(), |blobs| {
            let file = store_file(blobs, ORG, "t.csv", content);
            attached = Some(file.clone());
            vec![file]
        });
        (desk, attached.expect("attached"))
    }

    /// Everything in the workspace, including what walks omit.
    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.bench.directory.path()).expect("a directory");
        entries
            .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
            .collect()
    }
}

#[tokio::test]
async fn file_is_saved_by_id_or_hash_and_replaces_the_target() {
    let content: Vec<u8> = (0..3_000_000_u32).flat_map(u32::to_le_bytes).collect();
    let (desk, file) = Desk::with(&content);
    let saved = desk.bench.call("save_file", json!([file.id, "data/t.csv"])).await;
    assert_eq!(saved, json!({"path": "data/t.csv", "bytes": 12_000_000, "status": "created"}));
    assert!(std::fs::read(desk.bench.path("data/t.csv")).expect("saved") == content);
    std::fs::set_permissions(desk.bench.path("data/t.csv"), std::fs::Permissions::from_mode(0o750))
        .expect("set");
    desk.bench.write("data/t.csv", "old");
    symlink("data/t.csv", desk.bench.path("link")).expect("linked");
    let again =
        desk.bench.call("save_file", json!([format!("sha256:{}", file.sha256), "link"])).await;
    assert_eq!(again["status"], json!("overwritten"));
    let replaced = std::fs::metadata(desk.bench.path("data/t.csv")).expect("there");
    assert_eq!((replaced.len(), replaced.mode() & 0o777), (12_000_000, 0o750));
    assert!(std::fs::symlink_metadata(desk.bench.path("link")).expect("there").is_symlink());
    let (empty, file) = Desk::with(b"");
    assert_eq!(empty.bench.call("save_file", json!([file.id, "e"])).await["bytes"], json!(0));
}

#[tokio::test]
async fn file_not_attached_error_lists_attached_files() {
    let (desk, file) = Desk::with(b"1;2");
    let error = desk.bench.fails("save_file", json!(["t.csv", "a"])).await;
    assert_eq!(error.name, "FileNotAttached");
    assert!(error.message.contains(&format!("{} (\"t.csv\", 3 bytes)", file.id)), "{error}");
    assert_eq!(error.details, Some(json!({"file": "t.csv", "files": [file.id]})));
    let bare = Bench::new().fails("save_file", json!([file.id, "a"])).await;
    assert!(
        bare.name == "FileNotAttached" && bare.message.contains("No file is attached"),
        "{bare}"
    );
    let many = Desk::new(Policy::default(), |blobs| vec![store_file(blobs, ORG, "x", b"x"); 1_000]);
    let error = many.bench.fails("save_file", json!(["y", "a"])).await;
    assert!(error.message.len() < 4_096 && error.message.contains("and 980 older ones"), "{error}");
}

#[tokio::test]
async fn content_of_another_organization_is_not_available() {
    let desk = Desk::new(Policy::default(), |blobs| {
        vec![store_file(blobs, OrganizationId::from_uuid(Uuid::from_u128(7)), "theirs", b"canary")]
    });
    let wanted =
        desk.bench.fails("save_file", json!(["x", "a"])).await.details.expect("details")["files"]
            [0]
        .clone();
    let error = desk.bench.fails("save_file", json!([wanted, "a"])).await;
    assert!(error.name == "FileUnavailable" && error.message.contains("was deleted"), "{error}");
    assert_eq!(desk.names(), [""; 0]);
}

#[tokio::test]
async fn damaged_or_oversized_file_leaves_the_workspace_unchanged() {
    let (desk, file) = Desk::with(b"what it says");
    desk.bench.write("a", "old");
    let place = desk
        .blobs
        .path()
        .join("files")
        .join(ORG.to_string())
        .join(&file.sha256[..2])
        .join(&file.sha256[2..]);
    for damaged in ["what it sayz", "what it says and more", "what it", ""] {
        std::fs::write(&place, damaged).expect("written");
        let error = desk.bench.fails("save_file", json!([file.id, "a"])).await;
        assert!(
            error.name == "FileUnavailable" && error.message.contains("damaged"),
            "{damaged:?}: {error}"
        );
    }
    std::fs::remove_file(&place).expect("removed");
    assert!(
        desk.bench.fails("save_file", json!([file.id, "a"])).await.message.contains("was deleted")
    );
    assert_eq!((desk.bench.read("a").as_str(), desk.names()), ("old", vec!["a".to_owned()]));

    let mut policy = Policy::default();
    policy.commands.limits.file_bytes = 10;
    let desk = Desk::new(policy, |blobs| {
        vec![
            store_file(blobs, ORG, "t", b"0123456789"),
            store_file(blobs, ORG, "u", b"0123456789a"),
        ]
    });
    let ids =
        desk.bench.fails("save_file", json!(["x", "a"])).await.details.expect("details")["files"]
            .clone();
    desk.bench.call("save_file", json!([ids[0], "fits"])).await;
    let error = desk.bench.fails("save_file", json!([ids[1], "a"])).await;
    assert_eq!(error.name, "FileTooLarge");
    assert_eq!(error.details, Some(json!({"file": ids[1], "bytes": 11, "most": 10})));
    assert_eq!(desk.names(), ["fits"]);
}

#[tokio::test]
async fn save_canceled_while_waiting_saves_nothing() {
    let (desk, file) = Desk::with(b"1;2");
    let busy = FILE_CALLS.acquire_many(64).await.expect("open");
    let cx = CallContext::default();
    let mut waiting = Box::pin(desk.bench.tools.call("save_file", json!([file.id, "a"]), &cx));
    assert!(waiting.as_mut().now_or_never().is_none(), "it waits for the others");
    cx.cancel.cancel();
    assert_eq!(waiting.await.expect_err("cancelled").name, "Cancelled");
    drop(busy);
    assert_eq!(desk.names(), [""; 0]);
}

/// A save whose call is abandoned when everything is written but the file is not yet renamed.
#[tokio::test(flavor = "multi_thread")]
async fn write_of_an_abandoned_call_is_awaited() {
    let (desk, file) = Desk::with(b"1;2");
    let tools = &desk.bench.tools;
    let written = || desk.bench.path("t.csv").exists();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let (held, holds) = tokio::sync::oneshot::channel();
    let workspace = tools.workspace().clone();
    // Files are renamed one at a time.
    let holder = std::thread::spawn(move || {
        let _writing = workspace.lock_for_writing();
        held.send(()).expect("awaited");
        let _ = released.recv();
    });
    holds.await.expect("held");
    let never = CancellationToken::new();
    assert!(tools.wait_for_writes(&never).await, "nothing is written yet");
    let cx = CallContext::default();
    let mut call = Box::pin(tools.call("save_file", json!([file.id, "t.csv"]), &cx));
    let is_whole = || {
        let entries = std::fs::read_dir(desk.bench.directory.path()).expect("a directory");
        entries.flatten().any(|entry| entry.metadata().is_ok_and(|metadata| metadata.len() == 3))
    };
    while !is_whole() {
        assert!(futures::poll!(&mut call).is_pending(), "it waits for its turn");
        tokio::task::yield_now().await;
    }
    // All of its content was received, so it is renamed as soon as possible, though its call was
    // abandoned.
    drop(call);
    let told_to_stop = CancellationToken::new();
    told_to_stop.cancel();
    assert!(
        !tools.wait_for_writes(&told_to_stop).await && !written(),
        "the canceler does not wait for long"
    );
    let ends = tools.wait_for_writes(&never);
    let mut ends = Box::pin(ends);
    assert!(futures::poll!(&mut ends).is_pending(), "it is still being written");
    release.send(()).expect("it holds");
    assert!(ends.await, "it ends");
    assert!(written(), "the write ended before the wait");
    assert_eq!(desk.names(), ["t.csv"], "no temporary file is left");
    holder.join().expect("released");
}
