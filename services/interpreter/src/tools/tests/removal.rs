//! `delete_file`.

use std::os::unix::fs::symlink;

use rustix::fs::{CWD, FileType, Mode};

use super::*;

#[tokio::test]
async fn files_and_directories_are_deleted_and_counted() {
    let bench = Bench::new();
    for path in ["a", "d/x", "d/e/y", "d/e/f/z"] {
        bench.write(path, "");
    }
    rustix::fs::mknodat(CWD, bench.path("d/pipe"), FileType::Fifo, Mode::RUSR, 0).expect("a pipe");
    assert_eq!(bench.call("delete_file", json!(["./a"])).await, json!({"path": "a", "deleted": 1}));
    assert!(!bench.path("a").exists());
    let refused = bench.fails("delete_file", json!(["d"])).await;
    assert!(
        refused.name == "IsADirectory" && refused.message.contains("delete_file(\"d\", true)"),
        "{refused}"
    );
    assert!(bench.path("d/e/f/z").exists());
    assert_eq!(bench.call("delete", json!(["d/", true])).await, json!({"path": "d", "deleted": 7}));
    assert!(!bench.path("d").exists());
    bench.write("src/main.rs", "");
    let missing = bench.fails("delete_file", json!(["src/mian.rs"])).await;
    assert!(missing.name == "FileNotFound" && missing.message.contains("src/main.rs"), "{missing}");
    assert_eq!(
        bench.fails("delete_file", json!(["nowhere/at/all"])).await.details.expect("details")["path"],
        "nowhere/at/all"
    );
    assert_eq!(bench.fails("delete_file", json!(["src/main.rs/x"])).await.name, "NotADirectory");
}

#[tokio::test]
async fn workspace_and_outside_paths_cannot_be_deleted() {
    let bench = Bench::new();
    bench.write("a/keep", "");
    let outside = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(outside.path().join("keep"), "").expect("written");
    symlink(outside.path(), bench.path("away")).expect("linked");
    let root = bench.directory.path().to_str().expect("UTF-8").to_owned();
    for path in [".", "a/..", "./", &root, &format!("{root}/a/..")] {
        let refused = bench.fails("delete_file", json!([path, true])).await;
        assert_eq!(refused.name, "InvalidArguments", "{path}: {refused}");
    }
    for path in ["..", "../x", "/", "/etc/hostname", "away/keep", "away/../keep"] {
        let refused = bench.fails("delete_file", json!([path, true])).await;
        assert!(["OutsideWorkspace", "FileNotFound"].contains(&refused.name), "{path}: {refused}");
    }
    assert!(outside.path().join("keep").exists() && bench.path("a/keep").exists());
}

#[tokio::test]
async fn links_are_deleted_and_never_followed() {
    let bench = Bench::new();
    bench.write("kept/file", "");
    let outside = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(outside.path().join("keep"), "").expect("written");
    bench.write("d/file", "");
    symlink(outside.path(), bench.path("d/away")).expect("linked");
    symlink("../kept", bench.path("d/kept")).expect("linked");
    symlink("loop", bench.path("d/loop")).expect("linked");
    symlink("kept", bench.path("link")).expect("linked");
    assert_eq!(
        bench.call("delete_file", json!(["link"])).await,
        json!({"path": "link", "deleted": 1})
    );
    assert_eq!(
        bench.call("delete_file", json!(["d", true])).await,
        json!({"path": "d", "deleted": 5})
    );
    assert!(outside.path().join("keep").exists() && bench.path("kept/file").exists());
}

#[tokio::test]
async fn partial_deletion_error_has_the_deleted_count() {
    let bench = Bench::new();
    let deep = "d/".repeat(300);
    // One component at a time: the whole path would be too long.
    std::fs::create_dir_all(bench.path(&format!("a/{deep}"))).expect("made");
    bench.write("a/b", "");
    let partly = bench.fails("delete_file", json!(["a", true])).await;
    assert_eq!(
        (partly.name, &partly.details.expect("details")["deleted"]),
        ("DeletedInPart", &json!(1))
    );
    assert!(
        partly.message.contains("nested too deeply") && partly.message.contains("with a command"),
        "{}",
        partly.message
    );
    assert!(!bench.path("a/b").exists() && bench.path("a/d/d").exists());
    let not_at_all = bench.fails("delete_file", json!(["a", true])).await;
    assert_eq!(not_at_all.name, "InvalidPath", "{not_at_all}");
}
