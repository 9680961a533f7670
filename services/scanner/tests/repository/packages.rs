//! Real repositories, from their archive to the brief.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use construct_scanner::repository::{
    EntryKind, Folder, Limits, MaskReport, MaskedSnapshot, OutlineReport, Outliner, OutlinerLimits,
    Snapshot, Source, Survey, SurveyLimits, Upload, brief, mask, outline, survey,
};
use construct_tests::{
    repositories::{self, NODE, PYTHON, RUST},
    wait,
};
use tempfile::TempDir;

/// The example is built with the tests. Like the service, it calls the child's part of the library.
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

struct ScanResult {
    _into: TempDir,
    snapshot: MaskedSnapshot,
    masked: MaskReport,
    survey: Survey,
    outlined: OutlineReport,
}

async fn scan_source(source: &dyn Source) -> ScanResult {
    // Without optimization and next to other tests, a large file takes longer than in production.
    scan_with_limits(
        source,
        OutlinerLimits { file_time: Duration::from_secs(60), ..OutlinerLimits::default() },
    )
    .await
}

async fn clean(source: &dyn Source, into: &Path) -> MaskedSnapshot {
    let commit = source.resolve(None).await.expect("it is there");
    let snapshot =
        Snapshot::take(source, &commit, &Limits::default(), into).await.expect("it is honest");
    mask(&snapshot).await.expect("the disk works")
}

async fn scan_with_limits(source: &dyn Source, limits: OutlinerLimits) -> ScanResult {
    let into = tempfile::tempdir().expect("a folder");
    let snapshot = clean(source, into.path()).await;
    let masked = snapshot.report().clone();
    let survey = survey(&snapshot, &SurveyLimits::default()).await.expect("the disk works");
    let outlined = outline(&snapshot, &outliner(limits)).await.expect("the program runs");
    ScanResult { _into: into, snapshot, masked, survey, outlined }
}

async fn scan_package(name: &str) -> ScanResult {
    let result = scan_source(&Upload::new(repositories::package(name)).expect("an archive")).await;
    // Every location exists.
    for entry in &result.survey.entries {
        assert!(result.snapshot.has_line(&entry.place.path, entry.place.line), "{entry:?}");
        for argument in &entry.arguments {
            assert!(result.snapshot.has_line(&entry.place.path, argument.line), "{entry:?}");
        }
    }
    for module in &result.survey.modules {
        assert!(result.snapshot.has_line(&module.place.path, module.place.line), "{module:?}");
    }
    assert_eq!((result.outlined.skipped, &result.outlined.named), (0, &Vec::new()));
    assert!(result.outlined.symbols > 50, "{:?}", result.outlined);
    result
}

fn outline_of(result: &ScanResult, path: &str) -> String {
    let list = result
        .snapshot
        .read(&format!(".construct/outline/{path}.txt"), 1 << 20)
        .expect("there is a list");
    String::from_utf8(list).expect("text")
}

#[tokio::test]
async fn rust_package_is_surveyed_and_outlined() {
    let result = scan_package(RUST).await;
    let cli = result
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
    assert_eq!(result.survey.languages[0].name, "Rust");
    assert!(outline_of(&result, "src/main.rs").contains("fn main()"));
    let length = cli
        .arguments
        .iter()
        .find(|argument| argument.name == "length")
        .expect("one of its arguments");
    assert!(
        length.about.as_ref().is_some_and(|about| about.starts_with("Only read N bytes")),
        "{length:?}"
    );
    let summary = brief(&result.survey, 6000);
    assert!(summary.contains("hexyl") && summary.chars().count() <= 6000, "{summary}");
    assert_eq!(result.masked.total, 0, "{:?}", result.masked);
}

#[tokio::test]
async fn python_package_is_surveyed_and_outlined() {
    let result = scan_package(PYTHON).await;
    let insert = result
        .survey
        .entries
        .iter()
        .find(|entry| entry.name == "insert" && entry.with.as_deref() == Some("click"));
    let insert = insert.expect("one of its commands");
    assert!(insert.arguments.len() >= 3, "{insert:?}");
    let binary = result
        .survey
        .entries
        .iter()
        .find(|entry| entry.kind == EntryKind::Binary)
        .expect("its program");
    assert_eq!(binary.name, "sqlite-utils");
    assert!(outline_of(&result, "sqlite_utils/db.py").contains("class Database"));
}

#[tokio::test]
async fn node_package_is_surveyed_and_outlined() {
    let result = scan_package(NODE).await;
    let binary = result
        .survey
        .entries
        .iter()
        .find(|entry| entry.kind == EntryKind::Binary)
        .expect("its program");
    assert_eq!(binary.name, "svgo");
    let cli = result
        .survey
        .entries
        .iter()
        .find(|entry| entry.with.as_deref() == Some("commander"))
        .expect("its command line");
    assert!(cli.arguments.iter().any(|argument| argument.name.contains("--input")), "{cli:?}");
    assert!(outline_of(&result, "lib/svgo.js").contains("optimize"));
}

#[tokio::test]
async fn workspace_of_ten_thousand_files_is_surveyed() {
    let folder = tempfile::tempdir().expect("a folder");
    let files = repositories::monorepo(folder.path(), 10_000).expect("cargo has them");
    // The outlines of some sources test the limits as well as those of all; without optimization
    // the parsers are slow.
    let limits = OutlinerLimits {
        bytes: 2 << 20,
        file_time: Duration::from_secs(60),
        ..OutlinerLimits::default()
    };
    let result = scan_with_limits(&Folder::new(folder.path().to_owned()), limits).await;
    // Crates have few skipped entries, and those are counted.
    let skipped: u64 = result.snapshot.manifest().skipped.counts.values().sum();
    assert_eq!(result.survey.files + skipped, files as u64);
    assert!(
        result.survey.files > 9_000 && result.survey.modules.len() > 50,
        "{:?}",
        result.survey.truncated
    );
    assert!(result.survey.modules[0].members.contains(&"crates/*".to_owned()));
    assert!(result.outlined.files > 500 && result.outlined.skipped > 500, "{:?}", result.outlined);
    // A second survey of the same snapshot gives the same result.
    let again = survey(&result.snapshot, &SurveyLimits::default()).await;
    assert_eq!(again.expect("the disk works"), result.survey);
}

#[tokio::test]
async fn slow_file_is_skipped_and_others_are_not() {
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
async fn outline_whose_path_is_a_folder_is_skipped() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::create_dir(folder.path().join("x.py.txt")).expect("a folder");
    for name in ["x.py", "x.py.txt/y.py", "z.py"] {
        std::fs::write(folder.path().join(name), "def f(): pass\n").expect("written");
    }
    let result = scan_source(&Folder::new(folder.path().to_owned())).await;
    assert_eq!((result.outlined.files, result.outlined.skipped), (2, 1), "{:?}", result.outlined);
    assert!(outline_of(&result, "x.py.txt/y.py").contains("def f"));
}

#[tokio::test]
async fn secrets_are_masked_before_anything_reads_the_snapshot() {
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
    let result = scan_source(&Folder::new(folder.path().to_owned())).await;
    assert_eq!(result.masked.total, 3, "{:?}", result.masked);
    let output = format!(
        "{:?} {:?} {} {:?}",
        result.masked,
        result.survey,
        brief(&result.survey, 10_000),
        outline_of(&result, "x.py")
    );
    assert!(!output.contains(&secret) && !output.contains("hunter2"), "{output}");
    for path in result.snapshot.manifest().files.keys() {
        let text =
            String::from_utf8(result.snapshot.read(path, 1 << 20).expect("a file")).expect("text");
        assert!(!text.contains(&secret) && !text.contains("hunter2"), "{path}");
    }
    assert_eq!(result.snapshot.lines("README.md", 1, 5).map(|lines| lines.len()), Some(2));
}

#[tokio::test]
async fn parser_is_confined_before_it_reads_input() {
    let mut command = tokio::process::Command::new(program());
    command.arg("outline").env_clear().kill_on_drop(true);
    let child = command
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .expect("it starts");
    let folder = PathBuf::from(format!("/proc/{}", child.id().expect("it runs")));
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap_or_default();
    // It waits for its input now, which nobody has sent yet.
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
