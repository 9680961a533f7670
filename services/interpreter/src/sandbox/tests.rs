use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use serde_json::{Value as Json, json};
use sha2::{Digest as _, Sha256};
use tokio::sync::{Barrier, Notify};
use tokio_util::sync::CancellationToken;

use super::*;

mod calls;
mod compromised_guests;
mod limits;
mod modules;
mod names;
mod typescript;
mod values;
mod web;

/// The engine of all tests; its compiled code is cached beside the build's other artifacts.
fn engine() -> &'static Engine {
    static ENGINE: OnceLock<Engine> = OnceLock::new();
    ENGINE.get_or_init(|| {
        Engine::new(&cache_dir(), EngineConfig { instances: 256, ..EngineConfig::default() })
            .unwrap()
    })
}

/// The built guests are committed. This compares them with their sources; `guest --check` builds
/// them again.
#[test]
fn guests_are_built_from_their_sources() {
    let artifacts = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest/artifacts");
    let sums = std::fs::read_to_string(artifacts.join("SHA256SUMS")).unwrap();
    let mut named = BTreeSet::new();
    for line in sums.lines() {
        let (sum, name) = line.split_once("  ").unwrap();
        let file = artifacts.join(name);
        let bytes = std::fs::read(&file).unwrap_or_else(|error| panic!("{name}: {error}"));
        let actual: String =
            Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(
            actual, sum,
            "{name} was changed: run services/interpreter/guest/build.sh and commit what it writes"
        );
        named.insert(file.canonicalize().unwrap());
    }
    let mut folders = vec![artifacts];
    folders.extend(
        ["preinit", "quickjs", "typescript"].map(|part| folders[0].join(format!("../{part}/src"))),
    );
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if !path.ends_with("SHA256SUMS") {
                assert!(
                    named.contains(&path.canonicalize().unwrap()),
                    "{} has no sum",
                    path.display()
                );
            }
        }
    }
}

fn cache_dir() -> PathBuf {
    let executable = std::env::current_exe().unwrap();
    executable.ancestors().nth(3).unwrap().join("tmp").join("sandbox-cache")
}

/// A host with a few tools, a fixed clock and a chosen seed, that records its calls.
struct TestHost {
    tools: ToolTable,
    /// The files that scripts can import.
    files: BTreeMap<&'static str, &'static str>,
    seed: [u8; 32],
    calls: Mutex<Vec<HostCall>>,
    barrier: Barrier,
    /// Notified when `hang` waits.
    hanging: Notify,
    /// Counts the futures of `hang` that were dropped.
    dropped: Arc<AtomicU32>,
    order: Mutex<Vec<u32>>,
    settled: Mutex<Vec<u32>>,
}

impl TestHost {
    fn new() -> Self {
        let tool = |name: &str, parameters: &[&str], immediate| Tool {
            name: name.to_owned(),
            aliases: if name == "echo" {
                vec!["say".to_owned(), "talk.loudly".to_owned()]
            } else {
                Vec::new()
            },
            parameters: parameters
                .iter()
                .map(|name| Parameter {
                    name: name.trim_start_matches('*').to_owned(),
                    object: name.starts_with('*'),
                })
                .collect(),
            immediate,
        };
        TestHost {
            tools: ToolTable::new(&[
                tool("echo", &["text", "first", "last"], true),
                tool("configure", &["*options", "name"], true),
                tool("run", &["command", "*options"], true),
                tool("fail", &["name"], true),
                tool("meet", &[], true),
                tool("hang", &[], true),
                tool("later", &["ms"], false),
                tool("block", &["ms"], true),
                tool("large", &["bytes"], true),
                tool("panics", &[], true),
                tool("secrets.get", &["name"], true),
                tool("secrets.later", &["name"], false),
                tool("tools.search", &["query"], true),
                tool("read_file", &["path"], true),
            ]),
            files: BTreeMap::new(),
            seed: [7; 32],
            calls: Mutex::default(),
            barrier: Barrier::new(3),
            hanging: Notify::new(),
            dropped: Arc::default(),
            order: Mutex::default(),
            settled: Mutex::default(),
        }
    }

    fn calls(&self) -> Vec<(u32, String, Json)> {
        self.calls
            .lock()
            .unwrap()
            .iter()
            .map(|call| (call.number, call.name.clone(), call.args.clone()))
            .collect()
    }

    async fn answer(&self, call: HostCall) -> Result<Json, ToolError> {
        match call.name.as_str() {
            IMPORT => {
                let path = call.args["path"].as_str().unwrap();
                let found = [path.to_owned(), format!("{path}.ts")];
                let found =
                    found.iter().find_map(|path| Some((path, self.files.get(path.as_str())?)));
                let (path, source) = found
                    .ok_or_else(|| ToolError::new("FileNotFound", format!("there is no {path}")))?;
                Ok(json!({"path": path, "source": source}))
            }
            "fail" => Err(ToolError {
                name: call.args["name"].as_str().unwrap_or("FileNotFound").to_owned(),
                message: "there is no a.txt".to_owned(),
                code: Some("ENOENT".to_owned()),
                details: Some(json!({"near": ["b.txt"]})),
            }),
            "meet" => {
                self.barrier.wait().await;
                Ok(json!("met"))
            }
            "hang" => {
                let _dropped = CountDrop(Arc::clone(&self.dropped));
                self.hanging.notify_one();
                std::future::pending().await
            }
            "later" => {
                let ms = call.args["ms"].as_u64().unwrap_or_default();
                tokio::time::sleep(Duration::from_millis(ms)).await;
                Ok(json!(ms))
            }
            "block" => {
                std::thread::sleep(Duration::from_millis(call.args["ms"].as_u64().unwrap()));
                Ok(json!(null))
            }
            "large" => Ok(json!("x".repeat(call.args["bytes"].as_u64().unwrap() as usize))),
            "panics" => panic!("the host's fault"),
            _ => Ok(call.args),
        }
    }
}

struct CountDrop(Arc<AtomicU32>);

impl Drop for CountDrop {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Host for TestHost {
    fn declare(&self) -> &ToolTable {
        &self.tools
    }

    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<Json, ToolError>> {
        self.calls.lock().unwrap().push(call.clone());
        Box::pin(self.answer(call))
    }

    fn now(&self) -> jiff::Timestamp {
        "2026-03-04T05:06:07.089Z".parse().unwrap()
    }

    fn seed(&self) -> [u8; 32] {
        self.seed
    }

    fn next_settled(&self, outstanding: &dyn Fn(u32) -> bool) -> Option<u32> {
        self.order.lock().unwrap().iter().copied().find(|number| outstanding(*number))
    }

    fn on_settled(&self, number: u32) {
        self.order.lock().unwrap().retain(|next| *next != number);
        self.settled.lock().unwrap().push(number);
    }
}

fn test_limits() -> Limits {
    Limits { cpu: Duration::from_secs(10), wall: Duration::from_secs(20), ..Limits::default() }
}

async fn run_on(host: &TestHost, script: &str) -> Outcome {
    engine().run(script, host, &test_limits(), CancellationToken::new()).await
}

async fn run(script: &str) -> Outcome {
    run_on(&TestHost::new(), script).await
}

/// The displayed value of a script that must complete.
async fn value(script: &str) -> String {
    let outcome = run(script).await;
    match &outcome.status {
        Status::Completed { value } => value.display().into_owned(),
        other => panic!("{script}\n{other:?}\n{}", outcome.output),
    }
}

/// Name, message and stack of the error of a script that must throw.
async fn thrown(script: &str) -> (String, String, String) {
    match run(script).await.status {
        Status::Threw { name, message, stack, .. } => (name, message, stack),
        other => panic!("{script}\n{other:?}"),
    }
}

#[track_caller]
fn exceeded(outcome: &Outcome) -> (Limit, &str) {
    match &outcome.status {
        Status::LimitExceeded { limit, message, .. } => (*limit, message),
        other => panic!("{other:?}"),
    }
}

#[test]
fn guest_is_booted_with_current_tools() {
    let tools = crate::tool_table();
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("guest/quickjs/src/tools.json");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, tools.json()).unwrap();
    }
    assert!(
        engine().is_booted_with(&tools),
        "the guest was built with other tools than the current ones, so every run declares them again. To build it with these: \
         UPDATE_DOCS=1 cargo test -p construct-interpreter guest_is_booted_with_current_tools; ./dev guest"
    );
}

#[tokio::test]
async fn other_tools_replace_the_booted_ones() {
    assert_eq!(
        value("[typeof create_file, typeof git, typeof echo, typeof talk]").await,
        r#"["undefined","undefined","function","object"]"#
    );
    assert_eq!(thrown("tools.create_file('a')").await.0, "UnknownTool");
}
