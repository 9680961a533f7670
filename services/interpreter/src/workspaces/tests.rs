//! Workspaces that were not granted, and the service's own files.

use std::{collections::HashSet, os::unix::fs::MetadataExt};

use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::tools::CallContext;

/// A granted directory with a checkout that contains the service's data.
struct Bench {
    directory: TempDir,
    workspaces: Workspaces,
}

impl Bench {
    async fn new() -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let checkout = directory.path().join("checkout");
        for path in ["src", "home/data/blobs", "home/cache"] {
            std::fs::create_dir_all(checkout.join(path)).expect("made");
        }
        for path in [
            "src/main.rs",
            "home/data/blobs/secret",
            "home/cache/native",
            "home/master.key",
            "home/readme",
        ] {
            std::fs::write(checkout.join(path), "text").expect("written");
        }
        let mut policy = Policy::default();
        policy.commands.hidden_paths = vec![
            checkout.join("home/cache"),
            checkout.join("home/master.key"),
            checkout.join("home/missing"),
        ];
        let egress = Egress::new(&[]).expect("an HTTP client");
        let sandbox = crate::command::tests::sandbox().await;
        let roots = [directory.path().to_owned()];
        let own = checkout.join("home/data/workspaces");
        let workspaces = Workspaces::new(&roots, own, policy, egress, sandbox).expect("workspaces");
        Self { directory, workspaces }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    async fn open(&self, name: &str) -> Result<Toolbox, Error> {
        self.workspaces
            .open(self.path(name).to_str().expect("UTF-8"), "task", &CommandLimits::default())
            .await
    }
}

async fn call(tools: &Toolbox, name: &str, args: Value) -> Result<Value, &'static str> {
    tools.call(name, args, &CallContext::default()).await.map_err(|error| error.name)
}

#[tokio::test]
async fn workspace_must_be_granted() {
    let bench = Bench::new().await;
    bench.open("checkout").await.expect("granted");
    bench.open("checkout/src").await.expect("granted");
    let outside = tempfile::tempdir().expect("a temporary directory");
    symlink(outside.path(), bench.path("away")).expect("linked");
    symlink("checkout/src", bench.path("inside")).expect("linked");
    bench.open("inside").await.expect("a link that stays inside");
    assert!(matches!(bench.open("away").await, Err(Error::NotGranted(_))));
    assert!(matches!(bench.open("..").await, Err(Error::NotGranted(_))));
    assert!(matches!(bench.open("nothing").await, Err(Error::Missing(..))));
}

#[tokio::test]
async fn service_and_kernel_directories_are_rejected() {
    let bench = Bench::new().await;
    for path in ["checkout/home/data", "checkout/home/data/blobs", "checkout/home/cache"] {
        assert!(matches!(bench.open(path).await, Err(Error::Reserved(_))), "{path}");
    }
    let own = bench.path("checkout/home/data/workspaces");
    let everything = AllowedDirectories::new(&["/".into()], own.clone(), &[]).expect("places");
    for path in ["/proc", "/proc/self", "/sys/kernel", "/dev", "/dev/shm"] {
        assert!(matches!(everything.granted(Path::new(path)), Err(Error::Reserved(_))), "{path}");
        assert!(
            matches!(
                AllowedDirectories::new(&[path.into()], own.clone(), &[]),
                Err(Error::Reserved(_))
            ),
            "{path}"
        );
    }
    assert!(matches!(
        everything.granted(Path::new("/")),
        Err(Error::Open(OpenError::FileSystemRoot))
    ));
    let inside = bench.path("checkout/home/data/blobs");
    assert!(matches!(AllowedDirectories::new(&[inside], own, &[]), Err(Error::Reserved(_))));
}

#[tokio::test]
async fn task_without_workspace_gets_a_private_one() {
    let bench = Bench::new().await;
    let tools = bench.workspaces.open("", "task-1", &CommandLimits::default()).await.expect("made");
    call(&tools, "create_file", json!(["a", "x"])).await.expect("written");
    let own = bench.path("checkout/home/data/workspaces/task-1");
    assert!(own.join("a").exists());
    assert_eq!(std::fs::metadata(&own).expect("there").mode() & 0o777, 0o700);
    for task in ["", "..", "a/b", "/etc"] {
        let opened = bench.workspaces.open("", task, &CommandLimits::default()).await;
        assert!(matches!(opened, Err(Error::Create(_))), "{task:?}");
    }
}

#[tokio::test]
async fn storage_id_is_the_same_for_all_processes() {
    let bench = Bench::new().await;
    let (own, other) = (bench.path("checkout/home/data/workspaces"), bench.path("other"));
    let known = bench.workspaces.storage("").to_owned();
    assert_eq!((known.len(), storage(&own).expect("read")), (36, known.clone()));
    assert_eq!(bench.workspaces.storage("/a/named/one"), "");
    std::fs::create_dir(&other).expect("made");
    let found: HashSet<String> = std::thread::scope(|scope| {
        let readers: Vec<_> =
            (0..8).map(|_| scope.spawn(|| storage(&other).expect("made"))).collect();
        readers.into_iter().map(|reader| reader.join().expect("it ends")).collect()
    });
    assert!(found.len() == 1 && !found.contains(&known), "{found:?}");
    std::fs::remove_file(own.join(STORAGE_ID)).expect("removed");
    std::fs::write(own.join(STORAGE_ID), "no link").expect("written");
    assert!(storage(&own).is_err(), "the id is unknown");
}

#[tokio::test]
async fn tools_cannot_access_service_files_in_a_workspace() {
    let bench = Bench::new().await;
    let tools = bench.open("checkout").await.expect("granted");
    symlink("home/data", bench.path("checkout/link")).expect("linked");
    symlink("home/master.key", bench.path("checkout/key")).expect("linked");
    for path in [
        "home/data/blobs/secret",
        "home/cache/native",
        "home/master.key",
        "link/blobs/secret",
        "key",
    ] {
        assert_eq!(
            call(&tools, "read_file", json!([path])).await,
            Err("PermissionDenied"),
            "{path}"
        );
        assert_eq!(
            call(&tools, "create_file", json!([path, "x"])).await,
            Err("PermissionDenied"),
            "{path}"
        );
        let edit = call(&tools, "edit_file", json!([path, [{"old": "text", "new": "x"}]])).await;
        assert_eq!(edit, Err("PermissionDenied"), "{path}");
    }
    for path in ["home/data/new", "home/data/new/new", "link/new"] {
        assert_eq!(
            call(&tools, "create_file", json!([path, "x"])).await,
            Err("PermissionDenied"),
            "{path}"
        );
    }
    std::fs::write(bench.path("checkout/new.key"), "text").expect("written");
    std::fs::rename(bench.path("checkout/new.key"), bench.path("checkout/home/master.key"))
        .expect("replaced");
    let tools = bench.open("checkout").await.expect("granted");
    assert_eq!(
        call(&tools, "read_file", json!(["home/master.key"])).await,
        Err("PermissionDenied")
    );
    assert_eq!(call(&tools, "list_files", json!(["home/data"])).await, Err("PermissionDenied"));
    let found = call(&tools, "find_file", json!(["*"])).await.expect("found");
    assert_eq!(found["paths"], json!(["home", "home/readme", "key", "link", "src", "src/main.rs"]));
    let found = call(&tools, "grep", json!(["text"])).await.expect("found");
    assert_eq!(found["files_searched"], json!(2));
    assert_eq!(call(&tools, "read_file", json!(["home/readme"])).await, Ok(json!("text")));
    call(&tools, "create_file", json!(["home/readme", "changed"])).await.expect("written");
}

#[tokio::test]
async fn commands_cannot_access_service_files_in_a_workspace() {
    let bench = Bench::new().await;
    let tools = bench.open("checkout").await.expect("granted");
    let script = "cat home/data/blobs/secret home/cache/native home/master.key && echo LEAKED\n\
        touch home/data/x && echo WROTE; rm -rf home/data home/master.key; mv home elsewhere && echo MOVED\n\
        ls -A home/data home/cache | wc -w; cat home/readme; echo x > home/new && echo fine";
    let result = call(&tools, "execute_command", json!([script])).await;
    if result == Err("CommandsUnavailable") {
        return;
    }
    let result = result.expect("a result");
    assert_eq!(result["stdout"], json!("2\ntextfine\n"), "{result}");
    assert!(bench.path("checkout/home/data/blobs/secret").exists());
    assert!(bench.path("checkout/home/master.key").exists());

    // Moved by someone with permission: it is hidden at its new location.
    std::fs::rename(bench.path("checkout/home"), bench.path("checkout/moved")).expect("moved");
    let script =
        "cat moved/data/blobs/secret moved/cache/native moved/master.key; cat moved/readme";
    let result = call(&tools, "execute_command", json!([script])).await.expect("a result");
    assert_eq!(result["stdout"], json!("text"), "{result}");
    let read = call(&tools, "read_file", json!(["moved/data/blobs/secret"])).await;
    assert_eq!(read, Err("PermissionDenied"));
}

#[tokio::test]
async fn swapped_workspace_stays_the_same_for_its_commands() {
    let bench = Bench::new().await;
    let outside = tempfile::tempdir().expect("a temporary directory");
    let tools = bench.open("checkout/src").await.expect("granted");
    std::fs::rename(bench.path("checkout/src"), bench.path("old")).expect("moved");
    symlink(outside.path(), bench.path("checkout/src")).expect("linked");
    let result = call(&tools, "execute_command", json!(["echo x > made; ls"])).await;
    if result == Err("CommandsUnavailable") {
        return;
    }
    assert_eq!(result.expect("a result")["stdout"], json!("made\nmain.rs\n"));
    assert!(bench.path("old/made").exists());
    assert!(!outside.path().join("made").exists());
    assert!(matches!(bench.open("checkout/src").await, Err(Error::NotGranted(_))));
}
