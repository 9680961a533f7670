//! The job of `./dev demo`: its script is the same for every workspace, and its report describes
//! this one.

use std::path::Path;

use construct_proto::v1::TurnOutcome;
use construct_tests::mesh::Mesh;

use crate::read;

const SCRIPT: &str = include_str!("../../scripts/demo/script.json");

/// A small Cargo workspace: path and text.
const FILES: [(&str, &str); 8] = [
    ("Cargo.toml", "[workspace]\nmembers = [\"crates/*\"]\n"),
    ("README.md", "# A small one\n"),
    ("build.rs", "fn main() {}\n"),
    ("crates/one/Cargo.toml", "[package]\nname = \"one\"\n"),
    (
        "crates/one/src/lib.rs",
        "mod deep;\n\n// TODO: more of it\n#[test]\nfn it_works() {\n    assert!(true);\n}\n",
    ),
    ("crates/one/src/deep.rs", "//! Deep.\n#[tokio::test]\nasync fn waits() {}\n"),
    ("crates/two/Cargo.toml", "[package]\nname = \"two\"\n"),
    ("crates/two/src/main.rs", "fn main() {\n    // FIXME: the TODO of somebody\n    run()\n}\n"),
];

/// Counted by hand in [`FILES`].
const REPORT: &str = "\
# Report on the workspace

4 Rust files, 15 lines, 2 tests, 2 TODOs.

## Lines per crate

| crate | files | lines | share |
| --- | ---: | ---: | ---: |
| crates/one/ | 2 | 10 | 66.7 % |
| crates/two/ | 1 | 4 | 26.7 % |
| (workspace) | 1 | 1 | 6.7 % |

## Largest files

| file | lines |
| --- | ---: |
| crates/one/src/lib.rs | 7 |
| crates/two/src/main.rs | 4 |
| crates/one/src/deep.rs | 3 |
| build.rs | 1 |

## Open TODOs

- crates/one/src/lib.rs:3: // TODO: more of it
- crates/two/src/main.rs:2: // FIXME: the TODO of somebody
";

const FINDINGS: &str = "\
- Rust files: 4
- lines: 15
- crates: 3
- largest file: crates/one/src/lib.rs (7 lines)
- TODOs: 2";

fn lay_out(workspace: &Path) {
    for (path, text) in FILES {
        let file = workspace.join(path);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, text).unwrap();
    }
}

#[tokio::test]
async fn demo_script_reports_the_workspace() {
    let mesh = Mesh::start().await.unwrap();
    lay_out(mesh.workspace());
    mesh.scripted_agent("demo", &serde_json::from_str(SCRIPT).unwrap()).await.unwrap();
    let conversation =
        mesh.client().unwrap().create_task("demo", Some(mesh.workspace())).await.unwrap();
    conversation.submit("Explore the workspace.").await;
    let status = conversation.wait_until_idle().await.status.unwrap();
    let transcript = conversation.transcript().await;
    transcript.check(&["Explore the workspace."]);
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{}", transcript.show());
    assert_eq!(read(&mesh.workspace().join("REPORT.md")), REPORT, "{}", transcript.show());
    let answer = transcript.answers().pop().unwrap();
    assert!(answer.contains(FINDINGS), "{answer}");
}
