//! The suite: its tests and their verdicts in the sandbox.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use construct_interpreter::sandbox::{
    Engine, EngineConfig, Host, HostCall, IMPORT, Limits, Outcome, Status, ToolError, ToolTable,
};
use futures::{Stream, StreamExt as _, future::BoxFuture};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// The host functions that the suite requires, as far as the sandbox can offer them; and the end of
/// an asynchronous test as a promise.
const HOST_FUNCTIONS: &str = "
var $262 = {global: globalThis, gc() {}, evalScript: (source) => (0, eval)(source), detachArrayBuffer: (buffer) => buffer.transfer()};
var __ended, __end = new Promise((resolve, reject) => { __ended = {resolve, reject} });
function $DONE(error) { error ? __ended.reject(error) : __ended.resolve() }
";

/// Tests with these words need features that the sandbox omits on purpose.
const OMITTED_FEATURES: [&str; 6] = [
    "createRealm",
    "$262.agent",
    "Atomics",
    "SharedArrayBuffer",
    "tail-call-optimization",
    "IsHTMLDDA",
];

/// Number of tests that run concurrently.
const CONCURRENT_TESTS: usize = 4;

/// The suite in a folder, and the engine that runs it.
pub(crate) struct Suite {
    /// Holds the suite's `test` and `harness`.
    root: PathBuf,
    engine: Engine,
    tools: ToolTable,
}

/// How a test ended.
pub(crate) enum Verdict {
    Passed,
    /// With the reason.
    Failed(String),
    /// It needs a feature that the sandbox omits on purpose.
    Skipped,
}

/// The metadata of a test.
#[derive(Default)]
struct Header {
    flags: Vec<String>,
    includes: Vec<String>,
    /// The name of the error it must end with.
    negative: Option<String>,
}

/// The host of a test: it serves imports of files beside the test, and nothing else.
struct FileHost<'a> {
    directory: &'a Path,
    tools: &'a ToolTable,
}

impl Host for FileHost<'_> {
    fn declare(&self) -> &ToolTable {
        self.tools
    }

    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<Value, ToolError>> {
        Box::pin(async move {
            let path =
                call.args["path"].as_str().filter(|_| call.name == IMPORT).unwrap_or_default();
            match tokio::fs::read_to_string(self.directory.join(path)).await {
                Ok(source) => Ok(json!({"path": path, "source": source})),
                Err(error) => Err(ToolError::new("FileNotFound", error.to_string())),
            }
        })
    }

    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::now()
    }

    fn seed(&self) -> [u8; 32] {
        [7; 32]
    }
}

impl Suite {
    /// Blocks for half a minute if the build is not optimized and the guest is not compiled yet.
    pub(crate) fn open(root: PathBuf) -> anyhow::Result<Self> {
        // Beside the build's other artifacts, shared with the library's tests.
        let executable = std::env::current_exe()?;
        let cache = executable
            .ancestors()
            .nth(3)
            .unwrap_or(Path::new("."))
            .join("tmp")
            .join("sandbox-cache");
        let engine =
            Engine::new(&cache, EngineConfig { instances: 16, ..EngineConfig::default() })?;
        Ok(Self { root, engine, tools: ToolTable::new(&[]) })
    }

    /// Every `every`-th test whose path below `test` contains `part`, as a path below `test`.
    pub(crate) fn tests(&self, part: &str, every: usize) -> anyhow::Result<Vec<String>> {
        let (folder, mut files) = (self.root.join("test"), Vec::new());
        find(&folder, &mut files)
            .with_context(|| format!("{} cannot be read", folder.display()))?;
        files.sort();
        let tests = files.iter().filter_map(|file| file.strip_prefix(&folder).ok()?.to_str());
        let tests: Vec<String> = tests
            .filter(|test| test.contains(part))
            .step_by(every.max(1))
            .map(str::to_owned)
            .collect();
        anyhow::ensure!(!tests.is_empty(), "{} has no such tests", folder.display());
        Ok(tests)
    }

    /// Runs tests, a few concurrently, and yields each verdict.
    pub(crate) fn run(
        self,
        tests: Vec<String>,
    ) -> impl Stream<Item = anyhow::Result<(String, Verdict)>> {
        let suite = Arc::new(self);
        let running = futures::stream::iter(tests).map(move |test| {
            let suite = Arc::clone(&suite);
            // On any free thread.
            async move {
                let run = tokio::spawn(async move {
                    (suite.run_one(&suite.root.join("test").join(&test)).await, test)
                });
                let (verdict, test) = run.await?;
                Ok((test, verdict))
            }
        });
        running.buffer_unordered(CONCURRENT_TESTS)
    }

    async fn run_one(&self, test: &Path) -> Verdict {
        let source = match std::fs::read_to_string(test) {
            Ok(source) => source,
            Err(error) => return Verdict::Failed(error.to_string()),
        };
        let path = test.to_string_lossy();
        let header = header(&source);
        if path.contains("/intl402/")
            || path.contains("Atomics")
            || OMITTED_FEATURES.iter().any(|word| source.contains(word))
        {
            return Verdict::Skipped;
        }
        let flag = |name: &str| header.flags.iter().any(|flag| flag == name);
        let (module, raw) = (flag("module"), flag("raw"));
        let modes: &[bool] = match () {
            () if flag("onlyStrict") => &[true],
            () if flag("noStrict") || module || raw => &[false],
            () => &[false, true],
        };
        let name = test.file_name().map(|name| name.to_string_lossy());
        for strict in modes {
            let script =
                match self.script(&source, &header, name.as_deref().filter(|_| module), *strict) {
                    Ok(script) => script,
                    Err(missing) => return Verdict::Failed(missing),
                };
            let host =
                FileHost { directory: test.parent().unwrap_or(&self.root), tools: &self.tools };
            let limits = Limits {
                cpu: Duration::from_secs(20),
                wall: Duration::from_secs(60),
                ..Limits::default()
            };
            let outcome = self.engine.run(&script, &host, &limits, CancellationToken::new()).await;
            if let Some(why) = difference(&outcome, &header) {
                return Verdict::Failed(format!("{}{why}", if *strict { "strict: " } else { "" }));
            }
        }
        Verdict::Passed
    }

    /// The script that runs a test; `module` is the test's file if it is a module.
    fn script(
        &self,
        source: &str,
        header: &Header,
        module: Option<&str>,
        strict: bool,
    ) -> Result<String, String> {
        let flag = |name: &str| header.flags.iter().any(|flag| flag == name);
        let (raw, is_async) = (flag("raw"), flag("async"));
        if raw {
            return Ok(source.to_owned());
        }
        let mut script = String::from(if strict { "'use strict';\n" } else { "" });
        script.push_str(HOST_FUNCTIONS);
        let includes =
            header.includes.iter().map(String::as_str).filter(|name| *name != "doneprintHandle.js");
        for name in ["assert.js", "sta.js"].into_iter().chain(includes) {
            let include = std::fs::read_to_string(self.root.join("harness").join(name));
            script.push_str(&include.map_err(|error| format!("{name}: {error}"))?);
            script.push('\n');
        }
        match module {
            // The suite's functions must exist before the module and its imports are evaluated. The
            // module may import itself.
            Some(name) => script.push_str(&format!("await import({})", json!(format!("./{name}")))),
            None => script.push_str(source),
        }
        if is_async {
            script.push_str("\n;await __end;\n");
        }
        Ok(script)
    }
}

fn find(directory: &Path, tests: &mut Vec<PathBuf>) -> std::io::Result<()> {
    for entry in std::fs::read_dir(directory)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if path.is_dir() {
            find(&path, tests)?;
        } else if name.ends_with(".js") && !name.contains("_FIXTURE") {
            tests.push(path);
        }
    }
    Ok(())
}

/// Why a test failed, if it did.
fn difference(outcome: &Outcome, header: &Header) -> Option<String> {
    let excerpt = |status: &Status| format!("{status:?}").chars().take(200).collect::<String>();
    match (&outcome.status, &header.negative) {
        (Status::Completed { .. }, None) => None,
        (Status::Completed { .. }, Some(name)) => Some(format!("there was no {name}")),
        (Status::Threw { name, .. }, Some(expected)) if name == expected => None,
        (status, _) => Some(excerpt(status)),
    }
}

/// Parses the metadata in a test's leading comment. It is YAML, of which the suite uses a small
/// part.
fn header(source: &str) -> Header {
    let mut header = Header::default();
    let Some(text) = source
        .split_once("/*---")
        .and_then(|(_, rest)| rest.split_once("---*/"))
        .map(|(text, _)| text)
    else {
        return header;
    };
    let list = |text: &str| -> Vec<String> {
        let items = text.trim().trim_start_matches('[').trim_end_matches(']').split(',');
        items.map(|item| item.trim().to_owned()).filter(|item| !item.is_empty()).collect()
    };
    let mut key = "";
    for line in text.lines() {
        let indented = line.starts_with([' ', '\t']);
        if let Some((name, value)) = line.split_once(':').filter(|_| !indented) {
            key = match name {
                "flags" | "includes" | "negative" => name,
                _ => "",
            };
            match name {
                "flags" => header.flags = list(value),
                "includes" => header.includes = list(value),
                // The old form: just the name, as a pattern.
                "negative" if !value.trim().is_empty() => {
                    header.negative = Some(value.trim().to_owned())
                }
                _ => {}
            }
        } else if let Some(item) = line.trim().strip_prefix("- ") {
            match key {
                "flags" => header.flags.push(item.trim().to_owned()),
                "includes" => header.includes.push(item.trim().to_owned()),
                _ => {}
            }
        } else if key == "negative"
            && let Some(name) = line.trim().strip_prefix("type:")
        {
            header.negative = Some(name.trim().to_owned());
        } else if key == "includes" || key == "flags" {
            let more = list(line);
            if key == "includes" { header.includes.extend(more) } else { header.flags.extend(more) }
        }
    }
    header
}
