//! Paths that try to leave the workspace, including races.

use std::io::Read;
use std::ops::ControlFlow;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, RenameFlags};
use tempfile::TempDir;

use super::*;

fn workspace() -> (TempDir, Workspace) {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let workspace = Workspace::open(directory.path()).expect("a workspace");
    (directory, workspace)
}

fn read(workspace: &Workspace, path: &str) -> Result<String, PathError> {
    let mut text = String::new();
    workspace
        .open_file(&workspace.locate(path)?)?
        .read_to_string(&mut text)
        .expect("readable text");
    Ok(text)
}

fn write(workspace: &Workspace, path: &str, text: &str) -> Result<WriteOutcome, PathError> {
    workspace.replace(&workspace.locate(path)?, text.as_bytes(), Expected::Anything)
}

fn walked(workspace: &Workspace, base: &str, include_ignored: bool) -> Vec<String> {
    let mut paths = Vec::new();
    let base = workspace.locate(base).expect("a path");
    let end = workspace.walk(&base, Walk { recursive: true, include_ignored }, &mut |entry| {
        paths.push(entry.path.to_string_lossy().into_owned());
        ControlFlow::Continue(())
    });
    assert_eq!(end.expect("a directory"), WalkEnd::Complete);
    paths
}

#[test]
fn dots_and_absolute_paths_do_not_leave_the_workspace() {
    let (directory, workspace) = workspace();
    std::fs::create_dir(directory.path().join("sub")).expect("made");
    std::fs::write(directory.path().join("inside"), "inside").expect("written");
    let sneaky = format!("{}/../../etc/passwd", directory.path().display());
    for path in
        ["/etc/passwd", "../x", "sub/../../x", "../../../../../../etc/passwd", sneaky.as_str(), "/"]
    {
        assert!(matches!(read(&workspace, path), Err(PathError::Outside { .. })), "reading {path}");
        let written = write(&workspace, path, "");
        assert!(
            matches!(written, Err(PathError::Outside { .. } | PathError::IsDirectory { .. })),
            "writing {path}"
        );
    }
    assert_eq!(read(&workspace, "sub/../inside").expect("inside"), "inside");
    assert_eq!(read(&workspace, "./inside").expect("inside"), "inside");
    let absolute = directory.path().join("inside");
    assert_eq!(read(&workspace, absolute.to_str().expect("UTF-8")).expect("inside"), "inside");
}

#[test]
fn invalid_path_text_is_rejected() {
    let (_directory, workspace) = workspace();
    for path in ["", "a\0b", &"x/".repeat(5000)] {
        assert!(matches!(workspace.locate(path), Err(PathError::Invalid { .. })));
    }
    let long = "x".repeat(300);
    assert!(matches!(read(&workspace, &long), Err(PathError::Invalid { .. })));
}

#[test]
fn symbolic_links_are_followed_only_inside() {
    let (directory, workspace) = workspace();
    let root = directory.path();
    let outside = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(outside.path().join("secret"), "outside").expect("written");
    std::fs::create_dir(root.join("sub")).expect("made");
    std::fs::write(root.join("sub/file"), "inside").expect("written");
    symlink("/etc/passwd", root.join("passwd")).expect("linked");
    symlink(outside.path(), root.join("away")).expect("linked");
    symlink("../".repeat(30) + "etc/passwd", root.join("climbing")).expect("linked");
    symlink("/proc/self/root", root.join("magic")).expect("linked");
    symlink("loop", root.join("loop")).expect("linked");
    symlink("sub/file", root.join("good")).expect("linked");

    for path in ["passwd", "away/secret", "climbing", "magic/etc/passwd"] {
        assert!(matches!(read(&workspace, path), Err(PathError::Outside { .. })), "reading {path}");
        assert!(
            matches!(write(&workspace, path, "x"), Err(PathError::Outside { .. })),
            "writing {path}"
        );
    }
    assert!(matches!(write(&workspace, "away/new/file", "x"), Err(PathError::Outside { .. })));
    assert!(matches!(read(&workspace, "loop"), Err(PathError::Invalid { .. })));
    assert!(matches!(write(&workspace, "loop", "x"), Err(PathError::Invalid { .. })));
    assert_eq!(std::fs::read_dir(outside.path()).expect("a directory").count(), 1);

    assert_eq!(read(&workspace, "good").expect("inside"), "inside");
    assert_eq!(write(&workspace, "good", "changed").expect("written"), WriteOutcome::Overwritten);
    assert!(std::fs::symlink_metadata(root.join("good")).expect("still there").is_symlink());
    assert_eq!(std::fs::read_to_string(root.join("sub/file")).expect("readable"), "changed");
}

#[test]
fn pipes_and_directories_are_not_read_as_files() {
    let (directory, workspace) = workspace();
    std::fs::create_dir(directory.path().join("sub")).expect("made");
    let pipe = directory.path().join("pipe");
    rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).expect("a pipe");
    assert!(matches!(read(&workspace, "pipe"), Err(PathError::Special { kind: "pipe", .. })));
    assert!(matches!(write(&workspace, "pipe", "x"), Err(PathError::Special { .. })));
    assert!(matches!(read(&workspace, "sub"), Err(PathError::IsDirectory { .. })));
    assert!(matches!(write(&workspace, "sub", "x"), Err(PathError::IsDirectory { .. })));
    assert!(matches!(read(&workspace, "nothing"), Err(PathError::NotFound { .. })));
    assert!(matches!(write(&workspace, "pipe/x", "x"), Err(PathError::NotDirectory { .. })));
}

#[test]
fn workspace_must_be_a_directory_other_than_root() {
    assert!(matches!(Workspace::open("/"), Err(OpenError::FileSystemRoot)));
    assert!(matches!(Workspace::open("/nothing/here"), Err(OpenError::Root { .. })));
    assert!(matches!(Workspace::open("/etc/passwd"), Err(OpenError::Root { .. })));
}

#[test]
fn replaced_file_keeps_its_mode_and_leaves_no_temporary() {
    let (directory, workspace) = workspace();
    let script = directory.path().join("script.sh");
    std::fs::write(&script, "old").expect("written");
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o750)).expect("set");
    assert_eq!(write(&workspace, "script.sh", "new").expect("written"), WriteOutcome::Overwritten);
    assert_eq!(std::fs::metadata(&script).expect("there").mode() & 0o7777, 0o750);
    assert_eq!(write(&workspace, "a/b/c/file", "x").expect("written"), WriteOutcome::Created);
    assert_eq!(walked(&workspace, ".", true), ["a", "a/b", "a/b/c", "a/b/c/file", "script.sh"]);
    assert_eq!(std::fs::read_dir(directory.path()).expect("a directory").count(), 2);
}

#[test]
fn concurrently_changed_file_is_not_replaced() {
    let (directory, workspace) = workspace();
    let file = directory.path().join("file");
    std::fs::write(&file, "first").expect("written");
    let path = workspace.locate("file").expect("a path");
    let version =
        Version::from_file(&workspace.open_file(&path).expect("a file"), &path).expect("a version");
    std::fs::write(&file, "by another writer").expect("written");
    let written = workspace.replace(&path, b"mine", Expected::Version(version));
    assert!(matches!(written, Err(PathError::Changed { .. })));
    assert_eq!(std::fs::read_to_string(&file).expect("readable"), "by another writer");
}

/// Swaps `a` and `b` continuously while `work` runs, for a second.
fn while_swapping(a: &Path, b: &Path, mut work: impl FnMut()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE)
                    .expect("both exist");
            }
        });
        let end = Instant::now() + Duration::from_secs(1);
        while Instant::now() < end {
            work();
        }
        done.store(true, Ordering::Relaxed);
    });
}

/// A workspace with the directory `d` that is sometimes a link to an outside directory with the
/// same files.
fn racing() -> (TempDir, TempDir, Workspace) {
    let (directory, workspace) = workspace();
    let outside = tempfile::tempdir().expect("a temporary directory");
    std::fs::create_dir_all(directory.path().join("d/e")).expect("made");
    std::fs::create_dir(outside.path().join("e")).expect("made");
    std::fs::write(directory.path().join("d/e/file"), "inside").expect("written");
    std::fs::write(outside.path().join("e/file"), "outside").expect("written");
    symlink(outside.path(), directory.path().join("link")).expect("linked");
    (directory, outside, workspace)
}

#[test]
fn swapped_directory_never_leaks_outside_content() {
    let (directory, _outside, workspace) = racing();
    let (mut inside, mut refused) = (0, 0);
    while_swapping(&directory.path().join("d"), &directory.path().join("link"), || {
        match read(&workspace, "d/e/file") {
            Ok(text) => {
                assert_eq!(text, "inside");
                inside += 1;
            }
            Err(_) => refused += 1,
        }
    });
    assert!(inside > 0 && refused > 0, "the race was not run: {inside} inside, {refused} refused");
}

#[test]
fn swapped_directory_never_redirects_a_write_outside() {
    let (directory, outside, workspace) = racing();
    let mut written = 0;
    while_swapping(&directory.path().join("d"), &directory.path().join("link"), || {
        written += usize::from(write(&workspace, "d/e/file", "by the tool").is_ok());
        written += usize::from(write(&workspace, "d/made/file", "by the tool").is_ok());
    });
    assert!(written > 0, "the race was not run");
    assert_eq!(
        std::fs::read_to_string(outside.path().join("e/file")).expect("readable"),
        "outside"
    );
    assert!(!outside.path().join("made").exists());
}

#[test]
fn walk_never_enters_a_swapped_directory() {
    let (directory, _outside, workspace) = racing();
    let mut seen = 0;
    while_swapping(&directory.path().join("d"), &directory.path().join("link"), || {
        let walk = Walk { recursive: true, include_ignored: false };
        let end = workspace.walk(&RelativePath::root(), walk, &mut |entry| {
            if entry.kind == EntryKind::File
                && let Some(mut file) = entry.open()
            {
                let mut text = String::new();
                file.read_to_string(&mut text).expect("readable text");
                assert_eq!(text, "inside");
                seen += 1;
            }
            ControlFlow::Continue(())
        });
        end.expect("the root is a directory");
    });
    assert!(seen > 0, "the race was not run");
}

#[test]
fn walk_applies_ignore_files_of_every_level() {
    let (directory, workspace) = workspace();
    let files = [
        (".gitignore", "target/\n*.log\n"),
        (".git/config", ""),
        ("a.log", ""),
        ("main.rs", ""),
        ("sub/.gitignore", "!keep.log\n/only-here\n"),
        ("sub/keep.log", ""),
        ("sub/other.log", ""),
        ("sub/only-here", ""),
        ("sub/deep/only-here", ""),
        ("target/out", ""),
        ("x/.ignore", "*\n"),
        ("x/y", ""),
    ];
    for (path, text) in files {
        write(&workspace, path, text).expect("written");
    }
    symlink("sub", directory.path().join("link")).expect("linked");
    let seen = walked(&workspace, ".", false);
    let expected = [
        ".gitignore",
        "link",
        "main.rs",
        "sub",
        "sub/.gitignore",
        "sub/deep",
        "sub/deep/only-here",
        "sub/keep.log",
        "x",
    ];
    assert_eq!(seen, expected);
    // The rules above a directory apply when the walk starts in it.
    let below = ["sub/.gitignore", "sub/deep", "sub/deep/only-here", "sub/keep.log"];
    assert_eq!(walked(&workspace, "sub", false), below);
    assert!(walked(&workspace, ".", true).contains(&"target/out".to_owned()));
}

#[test]
fn similar_names_are_found_at_the_first_wrong_component() {
    let (_directory, workspace) = workspace();
    for path in ["src/main.rs", "src/library.rs", "README.md"] {
        write(&workspace, path, "").expect("written");
    }
    let similar = |path: &str| workspace.similar_names(&workspace.locate(path).expect("a path"), 3);
    assert_eq!(similar("src/mian.rs"), ["src/main.rs"]);
    assert_eq!(similar("scr/main.rs"), ["src"]);
    assert_eq!(similar("readme.txt"), ["README.md"]);
    assert!(similar("completely/else").is_empty());
}

#[test]
fn rule_with_nested_braces_is_skipped_and_others_apply() {
    let (_directory, workspace) = workspace();
    let bomb = format!("{}{}", "{".repeat(100_000), "}".repeat(100_000));
    let hidden_depth = "{[}]".repeat(5_000) + &"}".repeat(5_000);
    write(&workspace, ".gitignore", &format!("{bomb}\n{hidden_depth}\n{{{{a,b}},c}}.log\n"))
        .expect("written");
    for path in ["a.log", "c.log", "d.log"] {
        write(&workspace, path, "").expect("written");
    }
    // The stack size of a thread that works on files.
    let walk = || walked(&workspace, ".", false);
    let seen = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .stack_size(2 << 20)
            .spawn_scoped(scope, walk)
            .expect("a thread");
        thread.join().expect("a list")
    });
    assert_eq!(seen, [".gitignore", "d.log"]);
}

#[test]
fn deletion_keeps_hidden_paths_and_their_parents() {
    let (directory, _) = workspace();
    let path = |name: &str| directory.path().join(name);
    std::fs::create_dir_all(path("project/data/tasks")).expect("made");
    std::fs::write(path("project/data/key"), "key").expect("written");
    std::fs::write(path("project/file"), "").expect("written");
    let hidden = vec![Arc::new(HiddenPath::open(&path("project/data")).expect("there"))];
    let root = rustix::fs::open(directory.path(), OFlags::PATH | OFlags::DIRECTORY, Mode::empty())
        .expect("a directory");
    let workspace = Workspace::from_directory(directory.path(), root, hidden).expect("a workspace");
    for name in ["project/data", "project/data/key", "project", "project/data/tasks"] {
        let located = workspace.locate(name).expect("a path");
        let removed = workspace.remove(&located, true, &mut || true);
        let refused = matches!(
            removed,
            Err(RemoveError::Path { removed: 0, source: PathError::Reserved { .. } })
        );
        assert!(refused, "{name}: {removed:?}");
    }
    assert!(path("project/data/key").exists() && path("project/file").exists());
}

#[test]
fn swapped_directory_never_redirects_a_deletion_outside() {
    let (directory, outside, workspace) = racing();
    let mut removed = 0;
    while_swapping(&directory.path().join("d"), &directory.path().join("link"), || {
        let made = write(&workspace, "d/made/file", "by the tool").is_ok();
        for name in ["d/made/file", "d/e"] {
            let located = workspace.locate(name).expect("a path");
            removed +=
                workspace.remove(&located, true, &mut || true).unwrap_or(0) * usize::from(made);
        }
    });
    assert!(removed > 0, "the race was not run");
    assert_eq!(
        std::fs::read_to_string(outside.path().join("e/file")).expect("readable"),
        "outside"
    );
}
