//! Scans of repositories: the whole mesh with the scanner, and a GitHub that is a real HTTP server.
//! The model is scripted; its scripts really read and search.

mod archives;
mod events;
mod files;
mod gitlab;
mod hand_over;
mod hosts;
mod interruptions;
mod lifecycle;
mod organizations;
mod packages;
mod requests;
mod secrets;

use std::time::Duration;

use construct_proto::v1::{
    self,
    ScanPhase::{Checking, Exploring, Queued, Review, Snapshot, Survey},
    scan_connection_spec::Credential,
};
use construct_tests::{
    client::id,
    github::{Fault, GitHubServer, TOKEN, tarball},
    mesh::{Mesh, Service},
    wait::until,
};
use futures::StreamExt as _;
use serde_json::{Value, json};
use tonic::Code;
use uuid::Uuid;

/// The time limit of a scan: much longer than any takes, so that it does not depend on the machine.
const SCAN_TIMEOUT: Duration = Duration::from_secs(240);
/// A secret in a repository.
const PLANTED: &str = concat!("ghp_", "16C7e42F292c6912E7710c838347Ae178B4a");

pub(crate) const REPORT: &str = r#"import argparse
import csv


def total(path, month):
    """Sums the amounts of one month."""
    with open(path) as file:
        return sum(float(row["amount"]) for row in csv.DictReader(file) if row["month"] == month)


def main():
    parser = argparse.ArgumentParser(description="Totals of a ledger")
    parser.add_argument("ledger")
    parser.add_argument("--month", required=True)
    arguments = parser.parse_args()
    print(total(arguments.ledger, arguments.month))


if __name__ == "__main__":
    main()
"#;

pub(crate) async fn begin() -> (Mesh, GitHubServer) {
    begin_with(&[]).await
}

async fn begin_with(environment: &[(&str, &str)]) -> (Mesh, GitHubServer) {
    let github = GitHubServer::start().await;
    let mut mesh = Mesh::prepare(environment).await.unwrap();
    mesh.set_env("CONSTRUCT_SCANNER_GITHUB_URL", github.url());
    mesh.set_env("CONSTRUCT_SCANNER_TRUSTED_HOSTS", "127.0.0.1");
    mesh.start_services().await.unwrap();
    mesh.spawn(Service::Scanner).unwrap();
    mesh.wait_until_ready(Service::Scanner).await.unwrap();
    (mesh, github)
}

fn ledger(more: &str) -> String {
    format!("# Ledger\n\nTotals of a ledger.\n{more}")
}

/// Commits a small Python package with a secret in it.
pub(crate) fn commit(github: &GitHubServer, repository: &str, more: &str) -> String {
    let config = format!("[api]\ntoken = \"{PLANTED}\"\nurl = \"https://ledger.example\"\n");
    github.commit(
        repository,
        &[
            ("README.md", ledger(more).as_bytes()),
            ("tools/report.py", REPORT.as_bytes()),
            ("config.toml", config.as_bytes()),
        ],
    )
}

pub(crate) fn candidate(name: &str, path: &str, line: u32, quote: &str) -> Value {
    let symbol =
        quote.strip_prefix("def ").and_then(|rest| rest.split('(').next()).unwrap_or_default();
    json!({
        "name": name,
        "description": "Adds up what was spent in one month.",
        "category": "report",
        "score": 80,
        "score_reasons": ["It is asked for every month."],
        "confidence": 0.9,
        "entry_point": {"path": path, "line": line, "symbol": symbol, "command": format!("python {path} LEDGER --month MONTH")},
        "inputs": [{"name": "month", "type": "string", "description": "Which month.", "required": true}],
        "outputs": [{"name": "total", "type": "number", "description": "The total."}],
        "credentials": [],
        "side_effects": [{"kind": "reads_files", "description": "the ledger"}],
        "evidence": [{"path": path, "line": line, "quote": quote, "statement": "It is started here."}],
        "dry_run": {"steps": [format!("python {path} --help")], "expected": "its arguments are shown"},
    })
}

pub(crate) fn answer(candidates: &[Value]) -> String {
    format!("Here they are:\n```json\n{}\n```", json!({"candidates": candidates}))
}

pub(crate) fn valid_candidate() -> Value {
    candidate("monthly-total", "tools/report.py", 11, "def main():")
}

/// Repeats a request while its service is unavailable. A busy machine may have no answer in time,
/// e.g. while it waits for a database connection, and reports that; these tests are not about that.
async fn retry_unavailable<T>(
    mut ask: impl AsyncFnMut() -> Result<tonic::Response<T>, tonic::Status>,
) -> T {
    until("an answer", SCAN_TIMEOUT, async || match ask().await {
        Err(busy) if busy.code() == Code::Unavailable => Err(busy.to_string()),
        answer => Ok(answer.unwrap().into_inner()),
    })
    .await
}

async fn create(mesh: &Mesh, spec: v1::ScanSpec) -> String {
    // Repeated requests create one scan.
    let request =
        v1::CreateScanRequest { spec: Some(spec), idempotency_key: Uuid::now_v7().to_string() };
    let scans = mesh.client().unwrap().scans();
    id(retry_unavailable(async || scans.clone().create_scan(request.clone()).await)
        .await
        .metadata
        .as_ref())
}

fn scan_spec(repository: &str, model: &str) -> v1::ScanSpec {
    v1::ScanSpec {
        source: Some(v1::scan_spec::Source::Github(repository.to_owned())),
        model: model.to_owned(),
        ..v1::ScanSpec::default()
    }
}

async fn get(mesh: &Mesh, scan: &str) -> v1::Scan {
    let (scans, request) =
        (mesh.client().unwrap().scans(), v1::GetScanRequest { scan: scan.to_owned() });
    retry_unavailable(async || scans.clone().get_scan(request.clone()).await).await
}

async fn wait_for_phase(mesh: &Mesh, scan: &str, phase: v1::ScanPhase) -> v1::ScanStatus {
    wait_for_phase_within(mesh, scan, phase, SCAN_TIMEOUT).await
}

/// Waits until a scan is in `phase`. A scan that ended in another phase fails the test at once.
async fn wait_for_phase_within(
    mesh: &Mesh,
    scan: &str,
    phase: v1::ScanPhase,
    patience: Duration,
) -> v1::ScanStatus {
    // One connection for all checks.
    let (scans, request) =
        (mesh.client().unwrap().scans(), v1::GetScanRequest { scan: scan.to_owned() });
    until(&format!("{} of {scan}", phase.as_str_name()), patience, async || {
        let found = retry_unavailable(async || scans.clone().get_scan(request.clone()).await).await;
        let status = found.status.unwrap();
        if status.phase() == phase {
            return Ok(status);
        }
        assert!(
            status.next_wake.is_some(),
            "{scan} is over, and not in {}: {status:?}",
            phase.as_str_name()
        );
        Err(format!("{status:?}"))
    })
    .await
}

async fn candidates(mesh: &Mesh, scan: &str) -> Vec<v1::Candidate> {
    let request = v1::ListCandidatesRequest { scan: scan.to_owned(), ..Default::default() };
    let scans = mesh.client().unwrap().scans();
    retry_unavailable(async || scans.clone().list_candidates(request.clone()).await)
        .await
        .candidates
}

/// All events of a finished scan.
async fn events(mesh: &Mesh, scan: &str) -> Vec<v1::ScanEvent> {
    let request = v1::WatchScanRequest { scan: scan.to_owned(), ..Default::default() };
    let stream = mesh.client().unwrap().scans().watch_scan(request).await.unwrap().into_inner();
    stream.map(|event| event.unwrap()).collect().await
}

async fn review(
    mesh: &Mesh,
    request: v1::ReviewCandidateRequest,
) -> Result<v1::Candidate, tonic::Status> {
    Ok(mesh.client().unwrap().scans().review_candidate(request).await?.into_inner())
}

/// The messages of a scan's task.
async fn transcript(mesh: &Mesh, scan: &str) -> String {
    let task = get(mesh, scan).await.status.unwrap().task_id;
    format!("{:?}", mesh.client().unwrap().conversation(&task).transcript().await)
}

fn logs(mesh: &Mesh) -> String {
    Service::ALL.into_iter().chain([Service::Scanner]).map(|service| mesh.log(service)).collect()
}

/// Creates a connection to the test's host.
async fn connect(mesh: &Mesh, github: &GitHubServer, name: &str, credential: Credential) {
    let spec = v1::ScanConnectionSpec {
        name: name.to_owned(),
        host: v1::ScanHost::Github.into(),
        base_url: github.url(),
        credential: Some(credential),
    };
    let request = v1::CreateScanConnectionRequest { spec: Some(spec), ..Default::default() };
    mesh.client().unwrap().scans().create_scan_connection(request).await.unwrap();
}

/// Waits until no files of scans are on disk.
async fn wait_until_clean(mesh: &Mesh) {
    until("the files to be deleted", SCAN_TIMEOUT, async || {
        let left: Vec<_> = std::fs::read_dir(mesh.scans()).unwrap().collect();
        if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
    })
    .await;
}
