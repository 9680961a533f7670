//! Runs the ECMAScript conformance suite in the sandbox, as scripts run in it, and prints what passed by area. `./dev test262` gets the suite and
//! starts this: `test262 SUITE [--every N] [--failures] [PART-OF-A-PATH]`.
//!
//! Each test runs as the product reads scripts: `await` may stand anywhere, what is no JavaScript is tried as TypeScript, and modules are files.
//! What is skipped needs what the sandbox leaves out on purpose (threads, several realms, Intl). Tests that are not said to be of one mode run in
//! both, strict and not, and pass if both do.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use construct_interpreter::sandbox::{
    Engine, EngineConfig, Host, HostCall, IMPORT, Limits, Outcome, Status, ToolError, ToolTable,
};
use futures::StreamExt as _;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

/// What hosts of the suite must offer, as far as the sandbox can; and the end of an asynchronous test as a promise.
const HOST: &str = "
var $262 = {global: globalThis, gc() {}, evalScript: (source) => (0, eval)(source), detachArrayBuffer: (buffer) => buffer.transfer()};
var __ended, __end = new Promise((resolve, reject) => { __ended = {resolve, reject} });
function $DONE(error) { error ? __ended.reject(error) : __ended.resolve() }
";

/// Tests that say these words need what the sandbox leaves out on purpose.
const LEFT_OUT: [&str; 6] =
    ["createRealm", "$262.agent", "Atomics", "SharedArrayBuffer", "tail-call-optimization", "IsHTMLDDA"];

/// Tests that run at the same time.
const AT_ONCE: usize = 4;

struct Suite {
    root: PathBuf,
    engine: Engine,
    tools: ToolTable,
}

/// How a test ended.
enum Result {
    Passed,
    Failed(String),
    Skipped,
}

/// What a test says of itself.
#[derive(Default)]
struct Header {
    flags: Vec<String>,
    includes: Vec<String>,
    /// The name of the error it must end with.
    negative: Option<String>,
}

#[derive(Default)]
struct Counts {
    passed: usize,
    failed: usize,
    skipped: usize,
}

/// A test's host: it imports the files beside the test, and nothing else.
struct Beside<'a> {
    directory: &'a Path,
    tools: &'a ToolTable,
}

impl Host for Beside<'_> {
    fn declare(&self) -> &ToolTable {
        self.tools
    }

    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, std::result::Result<Value, ToolError>> {
        Box::pin(async move {
            let path = call.args["path"].as_str().filter(|_| call.name == IMPORT).unwrap_or_default();
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

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let (mut root, mut part, mut every, mut failures) = (None, String::new(), 1, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--every" => every = arguments.next().unwrap_or_default().parse()?,
            "--failures" => failures = true,
            _ if root.is_none() => root = Some(PathBuf::from(argument)),
            _ => part = argument,
        }
    }
    let root = root.ok_or_else(|| anyhow::anyhow!("usage: test262 SUITE [--every N] [--failures] [PART-OF-A-PATH]"))?;
    let cache = std::env::current_exe()?.ancestors().nth(3).unwrap_or(Path::new(".")).join("tmp").join("sandbox-cache");
    let engine = Engine::new(&cache, EngineConfig { instances: 16, ..EngineConfig::default() })?;
    let mut tests = Vec::new();
    find(&root.join("test"), &mut tests)?;
    tests.sort();
    tests.retain(|test| test.to_string_lossy().contains(&part));
    anyhow::ensure!(!tests.is_empty(), "{} holds no such tests", root.display());
    let tests: Vec<PathBuf> = tests.into_iter().step_by(every).collect();
    let suite = Arc::new(Suite { root, engine, tools: ToolTable::new(&[]) });
    let (total, done) = (tests.len(), AtomicUsize::new(0));
    let running = futures::stream::iter(tests.into_iter().map(|test| {
        let suite = Arc::clone(&suite);
        // On whatever thread is free.
        async move { tokio::spawn(async move { (suite.run(&test).await, test) }).await }
    }));
    let mut areas: BTreeMap<String, Counts> = BTreeMap::new();
    let mut running = running.buffer_unordered(AT_ONCE);
    while let Some(ended) = running.next().await {
        let (result, test) = ended?;
        let path = test.strip_prefix(suite.root.join("test")).unwrap_or(&test).to_string_lossy().into_owned();
        let counts = areas.entry(area(&path)).or_default();
        match result {
            Result::Passed => counts.passed += 1,
            Result::Skipped => counts.skipped += 1,
            Result::Failed(why) => {
                counts.failed += 1;
                if failures {
                    println!("{path}: {why}");
                }
            }
        }
        let done = done.fetch_add(1, Ordering::Relaxed) + 1;
        if done.is_multiple_of(1000) {
            eprintln!("{done} of {total}");
        }
    }
    print_table(&areas);
    Ok(())
}

fn print_table(areas: &BTreeMap<String, Counts>) {
    println!("| area | passed | failed | skipped | of those run |\n|---|---:|---:|---:|---:|");
    let mut all = Counts::default();
    let row = |name: &str, counts: &Counts| {
        let run = counts.passed + counts.failed;
        let share =
            if run == 0 { "–".to_owned() } else { format!("{:.1} %", 100.0 * counts.passed as f64 / run as f64) };
        println!("| {name} | {} | {} | {} | {share} |", counts.passed, counts.failed, counts.skipped);
    };
    for (name, counts) in areas {
        row(name, counts);
        all.passed += counts.passed;
        all.failed += counts.failed;
        all.skipped += counts.skipped;
    }
    row("**all**", &all);
}

/// Where a test is counted.
fn area(path: &str) -> String {
    let mut parts = path.split('/');
    let (first, second) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    match (first, second) {
        ("language", "expressions" | "statements" | "module-code" | "literals") => format!("language: {second}"),
        ("language", _) => "language: the rest".to_owned(),
        (
            "built-ins",
            "Array" | "Object" | "RegExp" | "String" | "Date" | "Function" | "Promise" | "Proxy" | "DataView",
        ) => {
            format!("built-ins: {second}")
        }
        ("built-ins", second) if second.starts_with("TypedArray") => "built-ins: typed arrays".to_owned(),
        ("built-ins", _) => "built-ins: the rest".to_owned(),
        ("annexB", _) => "annex B".to_owned(),
        (other, _) => other.to_owned(),
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

impl Suite {
    async fn run(&self, test: &Path) -> Result {
        let Ok(source) = std::fs::read_to_string(test) else { return Result::Skipped };
        let path = test.to_string_lossy();
        let header = header(&source);
        if path.contains("/intl402/") || path.contains("Atomics") || LEFT_OUT.iter().any(|word| source.contains(word)) {
            return Result::Skipped;
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
            let script = match self.script(&source, &header, name.as_deref().filter(|_| module), *strict) {
                Ok(script) => script,
                Err(missing) => return Result::Failed(missing),
            };
            let host = Beside { directory: test.parent().unwrap_or(&self.root), tools: &self.tools };
            let limits = Limits { cpu: Duration::from_secs(20), wall: Duration::from_secs(60), ..Limits::default() };
            let outcome = self.engine.run(&script, &host, &limits, CancellationToken::new()).await;
            if let Some(why) = difference(&outcome, &header) {
                return Result::Failed(format!("{}{why}", if *strict { "strict: " } else { "" }));
            }
        }
        Result::Passed
    }

    /// The script that runs a test; `module` is its file if it is one.
    fn script(
        &self,
        source: &str,
        header: &Header,
        module: Option<&str>,
        strict: bool,
    ) -> std::result::Result<String, String> {
        let flag = |name: &str| header.flags.iter().any(|flag| flag == name);
        let (raw, waits) = (flag("raw"), flag("async"));
        if raw {
            return Ok(source.to_owned());
        }
        let mut script = String::from(if strict { "'use strict';\n" } else { "" });
        script.push_str(HOST);
        let includes = header.includes.iter().map(String::as_str).filter(|name| *name != "doneprintHandle.js");
        for name in ["assert.js", "sta.js"].into_iter().chain(includes) {
            let include = std::fs::read_to_string(self.root.join("harness").join(name));
            script.push_str(&include.map_err(|error| format!("{name}: {error}"))?);
            script.push('\n');
        }
        match module {
            // What the suite offers must be there before the module and what it imports, among which may be itself.
            Some(name) => script.push_str(&format!("await import({})", json!(format!("./{name}")))),
            None => script.push_str(source),
        }
        if waits {
            script.push_str("\n;await __end;\n");
        }
        Ok(script)
    }
}

/// Why a test failed, if it did.
fn difference(outcome: &Outcome, header: &Header) -> Option<String> {
    let told = |status: &Status| format!("{status:?}").chars().take(200).collect::<String>();
    match (&outcome.status, &header.negative) {
        (Status::Completed { .. }, None) => None,
        (Status::Completed { .. }, Some(name)) => Some(format!("there was no {name}")),
        (Status::Threw { name, .. }, Some(expected)) if name == expected => None,
        (status, _) => Some(told(status)),
    }
}

/// The part of a test's leading comment that is for machines. It is YAML, of which the suite uses little.
fn header(source: &str) -> Header {
    let mut header = Header::default();
    let Some(text) = source.split_once("/*---").and_then(|(_, rest)| rest.split_once("---*/")).map(|(text, _)| text)
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
                "negative" if !value.trim().is_empty() => header.negative = Some(value.trim().to_owned()),
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
