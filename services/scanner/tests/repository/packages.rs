//! Real repositories, from their archive to what a model is told of them.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use construct_scanner::repository::{
    Clean, EntryKind, Folder, Limits, Masked, Outlined, Outliner, OutlinerLimits, Snapshot, Source,
    Survey, SurveyLimits, Upload, brief, mask, outline, survey,
};
use construct_tests::{
    repositories::{self, NODE, PYTHON, RUST},
    wait,
};
use tempfile::TempDir;

/// The example is built with the tests; it calls the child's part of the library, as the service
/// does.
fn program() -> PathBuf {
    let test = std::env::current_exe().expect("this is a program");
    let program =
        test.ancestors().nth(2).expect("in a folder of the target").join("examples/repository");
    assert!(program.is_file(), "{} is not built", program.display());
    program
}

fn outliner(limits: OutlinerLimits) -> Outliner {
    Outliner::new(program(), vec!["outline".into()], limits)
}

struct Seen {
    _into: TempDir,
    snapshot: Clean,
    masked: Masked,
    survey: Survey,
    outlined: Outlined,
}

async fn see(source: &dyn Source) -> Seen {
    // Without optimization, beside other tests, a large file takes longer than one may in service.
    see_with(
        source,
        OutlinerLimits { file_time: Duration::from_secs(60), ..OutlinerLimits::default() },
    )
    .await
}

async fn clean(source: &dyn Source, into: &Path) -> Clean {
    let commit = source.resolve(None).await.expect("it is there");
    let snapshot =
        Snapshot::take(source, &commit, &Limits::default(), into).await.expect("it is honest");
    mask(&snapshot).await.expect("the disk works")
}

async fn see_with(source: &dyn Source, limits: OutlinerLimits) -> Seen {
    let into = tempfile::tempdir().expect("a folder");
    let snapshot = clean(source, into.path()).await;
    let masked = snapshot.masked().clone();
    let survey = survey(&snapshot, &SurveyLimits::default()).await.expect("the disk works");
    let outlined = outline(&snapshot, &outliner(limits)).await.expect("the program runs");
    Seen { _into: into, snapshot, masked, survey, outlined }
}

async fn see_package(name: &str) -> Seen {
    let seen = see(&Upload::new(repositories::package(name)).expect("an archive")).await;
    // Whatever is said to stand somewhere does.
    for entry in &seen.survey.entries {
        assert!(seen.snapshot.cites(&entry.place.path, entry.place.line), "{entry:?}");
        for argument in &entry.arguments {
            assert!(seen.snapshot.cites(&entry.place.path, argument.line), "{entry:?}");
        }
    }
    for module in &seen.survey.modules {
        assert!(seen.snapshot.cites(&module.place.path, module.place.line), "{module:?}");
    }
    assert_eq!((seen.outlined.skipped, &seen.outlined.named), (0, &Vec::new()));
    assert!(seen.outlined.symbols > 50, "{:?}", seen.outlined);
    seen
}

fn outline_of(seen: &Seen, path: &str) -> String {
    let list = seen
        .snapshot
        .read(&format!(".construct/outline/{path}.txt"), 1 << 20)
        .expect("there is a list");
    String::from_utf8(list).expect("text")
}

#[tokio::test]
async fn a_rust_package_is_understood() {
    let seen = see_package(RUST).await;
    let cli = seen
        .survey
        .entries
        .iter()
        .find(|entry| entry.with.as_deref() == Some("clap"))
        .expect("its command line");
    assert_eq!(cli.kind, EntryKind::Command);
    assert!(
        cli.arguments
            .iter()
            .any(|argument| argument.name.contains("length") && argument.about.is_some()),
        "{cli:?}"
    );
    assert_eq!(seen.survey.languages[0].name, "Rust");
    assert!(outline_of(&seen, "src/main.rs").contains("fn main()"));
    let length = cli
        .arguments
        .iter()
        .find(|argument| argument.name == "length")
        .expect("one of its arguments");
    assert!(
        length.about.as_ref().is_some_and(|about| about.starts_with("Only read N bytes")),
        "{length:?}"
    );
    let told = brief(&seen.survey, 6000);
    assert!(told.contains("hexyl") && told.chars().count() <= 6000, "{told}");
    assert_eq!(seen.masked.total, 0, "{:?}", seen.masked);
}

#[tokio::test]
async fn a_python_package_is_understood() {
    let seen = see_package(PYTHON).await;
    let insert = seen
        .survey
        .entries
        .iter()
        .find(|entry| entry.name == "insert" && entry.with.as_deref() == Some("click"));
    let insert = insert.expect("one of its commands");
    assert!(insert.arguments.len() >= 3, "{insert:?}");
    let binary = seen
        .survey
        .entries
        .iter()
        .find(|entry| entry.kind == EntryKind::Binary)
        .expect("its program");
    assert_eq!(binary.name, "sqlite-utils");
    assert!(outline_of(&seen, "sqlite_utils/db.py").contains("class Database"));
}

#[tokio::test]
async fn a_node_package_is_understood() {
    let seen = see_package(NODE).await;
    let binary = seen
        .survey
        .entries
        .iter()
        .find(|entry| entry.kind == EntryKind::Binary)
        .expect("its program");
    assert_eq!(binary.name, "svgo");
    let cli = seen
        .survey
        .entries
        .iter()
        .find(|entry| entry.with.as_deref() == Some("commander"))
        .expect("its command line");
    assert!(cli.arguments.iter().any(|argument| argument.name.contains("--input")), "{cli:?}");
    assert!(outline_of(&seen, "lib/svgo.js").contains("optimize"));
}

#[tokio::test]
async fn a_workspace_of_ten_thousand_files_is_understood_within_its_bounds() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = repositories::monorepo(folder.path(), 10_000).expect("cargo has them");
    // Lists of some of the sources say as much of the bounds as those of all; without optimization
    // the parsers are slow.
    let limits = OutlinerLimits {
        bytes: 2 << 20,
        file_time: Duration::from_secs(60),
        ..OutlinerLimits::default()
    };
    let seen = see_with(&Folder::new(folder.path().to_owned()), limits).await;
    // Crates hold few things that are left out, and those are counted.
    let skipped: u64 = seen.snapshot.manifest().skipped.counts.values().sum();
    assert_eq!(seen.survey.files + skipped, files as u64);
    assert!(
        seen.survey.files > 9_000 && seen.survey.modules.len() > 50,
        "{:?}",
        seen.survey.truncated
    );
    assert!(seen.survey.modules[0].members.contains(&"crates/*".to_owned()));
    assert!(seen.outlined.files > 500 && seen.outlined.skipped > 500, "{:?}", seen.outlined);
    // A second look at the same snapshot says the same.
    let again = survey(&seen.snapshot, &SurveyLimits::default()).await;
    assert_eq!(again.expect("the disk works"), seen.survey);
}

#[tokio::test]
async fn a_file_that_takes_too_long_is_left_out_and_the_others_are_not() {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["a.rs", "c.rs"] {
        std::fs::write(folder.path().join(name), "fn f() {}\n").expect("written");
    }
    // Enough for any parser to need more than a millisecond.
    std::fs::write(
        folder.path().join("b.rs"),
        "fn f(a: A<B<C>>) -> D { x[1](2) }\n".repeat(25_000),
    )
    .expect("written");
    let source = Folder::new(folder.path().to_owned());
    let into = tempfile::tempdir().expect("a folder");
    let snapshot = clean(&source, into.path()).await;
    let limits =
        OutlinerLimits { file_time: Duration::from_millis(100), ..OutlinerLimits::default() };
    let outlined = outline(&snapshot, &outliner(limits)).await.expect("the program runs");
    assert!(outlined.named.iter().any(|(path, _)| path == "b.rs"), "{outlined:?}");
}

#[tokio::test]
async fn a_list_whose_place_is_a_folder_is_left_out_and_named() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("x.py.txt")).expect("a folder");
    for name in ["x.py", "x.py.txt/y.py", "z.py"] {
        std::fs::write(folder.path().join(name), "def f(): pass\n").expect("written");
    }
    let seen = see(&Folder::new(folder.path().to_owned())).await;
    assert_eq!((seen.outlined.files, seen.outlined.skipped), (2, 1), "{:?}", seen.outlined);
    assert!(outline_of(&seen, "x.py.txt/y.py").contains("def f"));
}

#[tokio::test]
async fn secrets_are_masked_in_the_snapshot_before_anything_else_reads_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let secret = format!("ghp_{}", "a1B2c3D4e5".repeat(4));
    std::fs::write(folder.path().join("README.md"), format!("# Tool\nUse {secret} to log in.\n"))
        .expect("written");
    std::fs::write(
        folder.path().join("x.py"),
        format!("import click\n@click.command(help='with {secret}')\ndef f(): pass\n"),
    )
    .expect("written");
    std::fs::write(folder.path().join(".env"), "PASSWORD=hunter2hunter2\n").expect("written");
    let seen = see(&Folder::new(folder.path().to_owned())).await;
    assert_eq!(seen.masked.total, 3, "{:?}", seen.masked);
    let said = format!(
        "{:?} {:?} {} {:?}",
        seen.masked,
        seen.survey,
        brief(&seen.survey, 10_000),
        outline_of(&seen, "x.py")
    );
    assert!(!said.contains(&secret) && !said.contains("hunter2"), "{said}");
    for path in seen.snapshot.manifest().files.keys() {
        let text =
            String::from_utf8(seen.snapshot.read(path, 1 << 20).expect("a file")).expect("text");
        assert!(!text.contains(&secret) && !text.contains("hunter2"), "{path}");
    }
    assert_eq!(seen.snapshot.lines("README.md", 1, 5).map(|lines| lines.len()), Some(2));
}

#[tokio::test]
async fn what_parses_is_confined_before_it_reads_anything() {
    let mut command = tokio::process::Command::new(program());
    command.arg("outline").env_clear().kill_on_drop(true);
    let child = command
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let folder = PathBuf::from(format!("/proc/{}", child.id().expect("it runs")));
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    // It waits for its input now, which was sent by nobody yet.
    wait::until("the filter", Duration::from_secs(20), async || {
        let status = read("status");
        let is_confined = status.contains("Seccomp:\t2") && status.contains("NoNewPrivs:\t1");
        if is_confined { Ok(()) } else { Err(status) }
    })
    .await;
    let limits = read("limits");
    for name in ["Max address space", "Max cpu time", "Max file size", "Max core file size"] {
        let line = limits.lines().find(|line| line.starts_with(name)).expect("a limit");
        assert!(!line.contains("unlimited"), "{line}");
    }
    assert_eq!(read("environ"), "");
}
