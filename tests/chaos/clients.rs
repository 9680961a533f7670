//! Clients of the mesh with their own durable state: questions in Slack and scans of a repository.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use construct_bus::topology::Stream;
use construct_proto::{mesh::v1 as mesh_v1, v1};
use construct_tests::{
    client::{self, Client, id},
    github::GitHubServer,
    mesh::{Mesh, Service},
    slack::{ANN, CHANNEL, SlackServer, visible_text},
    wait::until,
};
use jiff::Timestamp;
use prost::Message as _;
use serde_json::{Value, json};

/// The time limit of a question or a step of a scan: failures are retried after up to a minute.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(240);
/// How long Slack waits before it resends an event.
const SLACK_RETRY_INTERVAL: Duration = Duration::from_secs(3);

const REPOSITORY: &str = "octo/ledger";
const FILE: &str = "total.py";
const CONTENT: &str = r#"import sys


def main():
    print(sum(map(float, sys.stdin)))


if __name__ == "__main__":
    main()
"#;

/// Slack, a repository host, and the requests so far.
pub(crate) struct Clients {
    slack: SlackServer,
    github: GitHubServer,
    /// The address of the Slack service.
    service: String,
    client: Client,
    /// Each question with its position in the channel.
    questions: Mutex<Vec<(String, String)>>,
    /// Each scan with its hand-over.
    scans: Mutex<BTreeMap<String, String>>,
}

/// The finding of the exploring model.
fn candidate() -> Value {
    json!({
        "name": "total", "description": "Adds numbers up.", "category": "report", "score": 80,
        "score_reasons": ["It is asked for every month."], "confidence": 0.9,
        "entry_point": {"path": FILE, "line": 4, "symbol": "main", "command": format!("python {FILE}")},
        "inputs": [{"name": "numbers", "type": "string", "description": "One a line.", "required": true}],
        "outputs": [{"name": "total", "type": "number", "description": "The total."}],
        "credentials": [], "side_effects": [{"kind": "reads_files", "description": "standard input"}],
        "evidence": [{"path": FILE, "line": 4, "quote": "def main():", "statement": "It is started here."}],
        "dry_run": {"steps": [format!("python {FILE} < numbers")], "expected": "a number is shown"},
    })
}

/// Repeats a request while the gateway is unavailable.
async fn retry_unavailable<T>(
    mut ask: impl AsyncFnMut() -> Result<tonic::Response<T>, tonic::Status>,
) -> T {
    client::retry_unavailable("the gateway to answer", async || ask().await)
        .await
        .unwrap()
        .into_inner()
}

impl Clients {
    /// Configures the services for Slack and the repository host before they start.
    pub(crate) async fn prepare(mesh: &mut Mesh) -> Self {
        let (slack, github) = (SlackServer::start().await, GitHubServer::start().await);
        slack.configure(mesh);
        mesh.set_env("CONSTRUCT_SCANNER_GITHUB_URL", github.url());
        mesh.set_env("CONSTRUCT_SCANNER_TRUSTED_HOSTS", "127.0.0.1");
        mesh.set_env("CONSTRUCT_SCANNER_LEASE", "5s");
        github.commit(REPOSITORY, &[("README.md", b"# Ledger\n"), (FILE, CONTENT.as_bytes())]);
        let (service, client) = (mesh.slack_url(), mesh.client().unwrap());
        Self {
            slack,
            github,
            service,
            client,
            questions: Mutex::default(),
            scans: Mutex::default(),
        }
    }

    /// Starts the services.
    pub(crate) async fn begin(&self, mesh: &mut Mesh) {
        let found = format!("```json\n{}\n```", json!({"candidates": [candidate()]}));
        mesh.scripted_agent("helper", &json!([{"text": "You said: {{last_user_text}}"}]))
            .await
            .unwrap();
        mesh.scripted_agent("explorer", &json!([{"text": found}])).await.unwrap();
        for service in Service::CLIENTS {
            mesh.spawn(service).unwrap();
            mesh.wait_until_ready(service).await.unwrap();
        }
        self.slack.install(mesh).await.unwrap();
    }

    /// Alternates between questions in Slack and scans of the repository until it is `over`.
    pub(crate) async fn work(&self, over: &AtomicBool) {
        let asking = async {
            for n in 0_usize.. {
                Box::pin(self.ask(&format!("question {n}?"))).await;
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        };
        let scanning = async {
            for n in 0.. {
                Box::pin(self.scan(n)).await;
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        };
        tokio::join!(asking, scanning);
    }

    /// Mentions the app and waits for the answer.
    async fn ask(&self, words: &str) {
        let (ts, event) = self.slack.ask(CHANNEL, ANN, None, words, json!([]));
        until("Slack's event to be taken", REQUEST_TIMEOUT, async || {
            match tokio::time::timeout(
                SLACK_RETRY_INTERVAL,
                self.slack.send_event_to(&self.service, &event),
            )
            .await
            {
                Ok(Ok(200)) => Ok(()),
                other => Err(format!("{other:?}")),
            }
        })
        .await;
        self.questions.lock().unwrap().push((ts.clone(), words.to_owned()));
        until(&format!("the answer to {words:?}"), REQUEST_TIMEOUT, async || {
            let posts = self.slack.posts(CHANNEL, &ts);
            if posts.iter().any(|post| visible_text(post).contains(words)) {
                Ok(())
            } else {
                Err(posts)
            }
        })
        .await;
    }

    /// Scans the repository, accepts the findings, and hands them over.
    async fn scan(&self, n: usize) {
        let scans = self.client.scans();
        let spec = v1::ScanSpec {
            source: Some(v1::scan_spec::Source::Github(REPOSITORY.to_owned())),
            model: "explorer".to_owned(),
            ..v1::ScanSpec::default()
        };
        let request =
            v1::CreateScanRequest { spec: Some(spec), idempotency_key: format!("scan-{n}") };
        let made =
            retry_unavailable(async || scans.clone().create_scan(request.clone()).await).await;
        let scan = id(made.metadata.as_ref());
        let request = v1::GetScanRequest { scan: scan.clone() };
        until(&format!("{scan} to be reviewed"), REQUEST_TIMEOUT, async || {
            let found =
                retry_unavailable(async || scans.clone().get_scan(request.clone()).await).await;
            let status = found.status.unwrap();
            let over = status.phase() == v1::ScanPhase::Review;
            assert!(over || status.next_wake.is_some(), "{scan} has ended: {status:?}");
            if over { Ok(()) } else { Err(format!("{status:?}")) }
        })
        .await;
        let request = v1::ListCandidatesRequest { scan: scan.clone(), ..Default::default() };
        let found =
            retry_unavailable(async || scans.clone().list_candidates(request.clone()).await)
                .await
                .candidates;
        assert_eq!(found.len(), 1, "{found:?}");
        let request = v1::ReviewCandidateRequest {
            candidate: id(found[0].metadata.as_ref()),
            state: v1::CandidateState::Accepted.into(),
            idempotency_key: format!("review-{n}"),
            ..Default::default()
        };
        retry_unavailable(async || scans.clone().review_candidate(request.clone()).await).await;
        let request = v1::CreateToolsRequest {
            scan: scan.clone(),
            idempotency_key: format!("tools-{n}"),
            ..v1::CreateToolsRequest::default()
        };
        let handed =
            retry_unavailable(async || scans.clone().create_tools(request.clone()).await).await;
        assert_eq!(handed.candidates.len(), 1, "{handed:?}");
        self.scans.lock().unwrap().insert(scan, handed.hand_over_id);
    }

    /// Panics with every broken promise; returns a summary.
    pub(crate) async fn check(&self, mesh: &Mesh) -> String {
        let questions = self.questions.lock().unwrap().clone();
        let scans = self.scans.lock().unwrap().clone();
        let asked = self.asked_messages().await;
        for (ts, words) in &questions {
            let posts = self.slack.posts(CHANNEL, ts);
            assert_eq!(posts.len(), 1, "{words:?} is answered once: {posts:#?}");
            assert_eq!(
                posts[0]["metadata"]["event_payload"]["key"],
                format!("{ts}.0.answer"),
                "{posts:#?}"
            );
            let times = asked.iter().filter(|asked| asked.contains(words.as_str())).count();
            assert_eq!(times, 1, "{words:?} is asked once: {asked:#?}");
        }
        until("the hand-overs to be published", REQUEST_TIMEOUT, async || {
            let untold =
                mesh.database.store().hand_overs_unpublished(Timestamp::now(), 100).await.unwrap();
            if untold.is_empty() { Ok(()) } else { Err(format!("{untold:?}")) }
        })
        .await;
        let report: Vec<mesh_v1::ToolCreate> = mesh
            .nats
            .stored_messages(Stream::Tool)
            .await
            .into_iter()
            .map(decode_hand_over)
            .collect();
        let pairs: BTreeMap<_, _> =
            report.iter().map(|tool| (tool.scan_id.clone(), tool.hand_over_id.clone())).collect();
        assert_eq!((report.len(), &pairs), (scans.len(), &scans), "each scan is handed over once");
        let begun: BTreeSet<String> = self.list_scans().await.into_iter().collect();
        assert_eq!(
            begun,
            scans.keys().cloned().collect::<BTreeSet<_>>(),
            "each scan was begun once"
        );
        let complaints = [self.slack.complaints(), self.github.complaints()].concat();
        assert_eq!(complaints, Vec::<String>::new());
        format!("{} questions in Slack, {} scans", questions.len(), scans.len())
    }

    /// The user messages of all tasks, including those from Slack.
    async fn asked_messages(&self) -> Vec<String> {
        let mut page = v1::PageRequest { page_size: 100, ..v1::PageRequest::default() };
        let mut asked = Vec::new();
        loop {
            let request = v1::ListTasksRequest {
                page: Some(page.clone()),
                ..v1::ListTasksRequest::default()
            };
            let listed =
                retry_unavailable(async || self.client.tasks().list_tasks(request.clone()).await)
                    .await;
            for task in listed.tasks {
                let filter = v1::list_messages_request::Filter {
                    source: v1::MessageSource::User.into(),
                    ..v1::list_messages_request::Filter::default()
                };
                let task = id(task.metadata.as_ref());
                let request = v1::ListMessagesRequest { task, page: None, filter: Some(filter) };
                let said = retry_unavailable(async || {
                    self.client.messages().list_messages(request.clone()).await
                })
                .await;
                asked.extend(said.messages.iter().map(|message| format!("{:?}", message.spec)));
            }
            page.page_token = listed.page.unwrap_or_default().next_page_token;
            if page.page_token.is_empty() {
                return asked;
            }
        }
    }

    /// The existing scans.
    async fn list_scans(&self) -> Vec<String> {
        let page = v1::PageRequest { page_size: 100, ..v1::PageRequest::default() };
        let request = v1::ListScansRequest { page: Some(page), ..v1::ListScansRequest::default() };
        let scans =
            retry_unavailable(async || self.client.scans().list_scans(request.clone()).await)
                .await
                .scans;
        scans.iter().map(|scan| id(scan.metadata.as_ref())).collect()
    }
}

fn decode_hand_over(message: construct_bus::RawMessage) -> mesh_v1::ToolCreate {
    mesh_v1::ToolCreate::decode(message.payload).unwrap()
}
