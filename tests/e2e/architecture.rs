//! The crates' dependencies must equal `tests/architecture.txt`, so that a new edge is a visible
//! line in a diff; excluded dependencies must be absent.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;

/// Crates with a single user each.
const WATCHED: [&str; 6] = ["async-nats", "ractor", "reqwest", "rustls", "sqlx", "wasmtime"];
/// Text that finished code does not contain. Split, so that this file does not contain it either.
const ABSENT: [&str; 4] = [
    concat!("to", "do!("),
    concat!("unimpl", "emented!("),
    concat!("#[ig", "nore"),
    concat!("dbg", "!("),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the tests lie in the workspace")
        .to_owned()
}

/// The dependencies of each crate: always, and for its tests.
fn graph() -> BTreeMap<String, (BTreeSet<String>, BTreeSet<String>)> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .expect("cargo can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo prints JSON");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let packages = metadata["packages"].as_array().expect("there are packages");
    let ours: BTreeSet<String> = packages.iter().map(|package| text(&package["name"])).collect();
    let mut graph = BTreeMap::new();
    for package in packages {
        let (mut always, mut tests) = (BTreeSet::new(), BTreeSet::new());
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let name = text(&dependency["name"]);
            if ours.contains(&name) || WATCHED.contains(&name.as_str()) {
                let of = if dependency["kind"] == "dev" { &mut tests } else { &mut always };
                of.insert(name);
            }
        }
        let tests = tests.difference(&always).cloned().collect();
        graph.insert(text(&package["name"]), (always, tests));
    }
    graph
}

#[test]
fn crates_depend_on_each_other_as_listed() {
    let mut listing = String::from(
        "# Dependencies between our crates, and of our crates on libraries with few users. After `tests:`: for tests only.\n",
    );
    for (name, (always, tests)) in graph() {
        listing.push_str(&name);
        listing.push(':');
        for dependency in &always {
            listing.push(' ');
            listing.push_str(dependency);
        }
        if !tests.is_empty() {
            listing.push_str(" tests:");
            for dependency in &tests {
                listing.push(' ');
                listing.push_str(dependency);
            }
        }
        listing.push('\n');
    }
    let path = root().join("tests/architecture.txt");
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        committed == listing,
        "the crates depend on each other otherwise than {} says. If that is intended, put this there:\n\n{listing}",
        path.display()
    );
}

#[test]
fn dependency_rules_hold() {
    let graph = graph();
    let services = [
        "construct-gateway",
        "construct-reconciler",
        "construct-interpreter",
        "construct-providers",
        "construct-scanner",
        "construct-slack",
    ];
    let only = |library: &str, users: &[&str]| {
        for (name, (always, tests)) in &graph {
            let uses = always.contains(library) || tests.contains(library);
            assert!(
                !uses || users.contains(&name.as_str()),
                "{name} depends on {library}; only {users:?} may"
            );
        }
    };
    for service in services {
        // The benchmarks and the tests start the services' programs; one benchmark measures the
        // sandbox alone.
        only(
            service,
            if service == "construct-interpreter" { &["construct-benches"] } else { &[] },
        );
    }
    // The benchmarks measure the baseline, which uses both directly.
    only("sqlx", &["construct-store", "construct-benches"]);
    only("async-nats", &["construct-bus", "construct-benches"]);
    only("ractor", &["construct-reconciler"]);
    only("wasmtime", &["construct-interpreter"]);
    for (name, allowed) in [
        ("construct-proto", &[][..]),
        ("construct-domain", &[]),
        (
            "construct-interpreter",
            &[
                "construct-bus",
                "construct-domain",
                "construct-proto",
                "construct-runtime",
                "reqwest",
                "rustls",
                "wasmtime",
            ],
        ),
        (
            "construct-providers",
            &[
                "construct-bus",
                "construct-domain",
                "construct-proto",
                "construct-runtime",
                "reqwest",
                "rustls",
            ],
        ),
    ] {
        let (always, _) = &graph[name];
        let beyond: Vec<&String> =
            always.iter().filter(|dependency| !allowed.contains(&dependency.as_str())).collect();
        assert!(beyond.is_empty(), "{name} depends on {beyond:?}");
    }
}

#[test]
fn excluded_dependencies_are_absent() {
    let mut found = Vec::new();
    for path in sources(&root()) {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        for (number, line) in text.lines().enumerate() {
            if ABSENT.iter().any(|word| line.contains(word)) {
                found.push(format!("{}:{}: {}", path.display(), number + 1, line.trim()));
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

/// Every source file of the workspace.
fn sources(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let hidden = name.to_string_lossy().starts_with('.');
        if path.is_dir() && !hidden && name != "target" {
            files.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}
