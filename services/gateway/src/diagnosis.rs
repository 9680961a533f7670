//! `DiagnosisService`: the health of the deployment, as far as a gateway can see it. It checks
//! PostgreSQL, NATS and the folder of blobs, as every service of the mesh uses them, and derives
//! from the queues which services are running.

mod database;
mod mesh;

use std::time::Duration;

use construct_bus::blob;
use construct_proto::v1::{
    DiagnoseRequest, Diagnosis, Finding, FindingSeverity as Severity, GetOverviewRequest, Overview,
    PhaseCount, Spender, Spending, diagnosis_service_server::DiagnosisService,
};
use construct_runtime::clock;
use construct_store::Store;
use futures::future;
use jiff::{SignedDuration, Timestamp};
use tokio::sync::Mutex;
use tonic::{Request, Response, Status};

use crate::{
    api::Api,
    convert,
    status::{self, chain},
};

/// Timeout of the check of one part of the deployment.
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);

/// The period of the spending in an overview.
const SPENDING_WINDOW: SignedDuration = SignedDuration::from_hours(1);
/// How long the cached spending is used.
const SPENDING_REFRESH_INTERVAL: SignedDuration = SignedDuration::from_secs(10);
/// Maximum number of agents in an overview.
const MAX_SPENDERS: usize = 10;

/// The findings, in display order.
#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(
        &mut self,
        check: &str,
        severity: Severity,
        summary: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let (summary, remedy) = (summary.into(), remedy.into());
        self.0.push(Finding {
            check: check.to_owned(),
            severity: severity.into(),
            summary,
            remedy,
        });
    }

    fn ok(&mut self, check: &str, summary: impl Into<String>) {
        self.add(check, Severity::Ok, summary, "");
    }

    fn warn(&mut self, check: &str, summary: impl Into<String>, remedy: impl Into<String>) {
        self.add(check, Severity::Warning, summary, remedy);
    }

    fn problem(&mut self, check: &str, summary: impl Into<String>, remedy: impl Into<String>) {
        self.add(check, Severity::Problem, summary, remedy);
    }
}

/// Runs a check. A timeout is a finding as well.
async fn with_timeout(check: &str, checking: impl Future<Output = Findings>) -> Vec<Finding> {
    match tokio::time::timeout(CHECK_TIMEOUT, checking).await {
        Ok(findings) => findings.0,
        Err(_elapsed) => {
            let mut findings = Findings::default();
            let seconds = CHECK_TIMEOUT.as_secs();
            findings.problem(
                check,
                format!("does not answer within {seconds} s"),
                "check its load and the network between",
            );
            findings.0
        }
    }
}

/// Checks whether the folder of all services can be written and read.
async fn blobs(blobs: &blob::Store) -> Findings {
    let mut findings = Findings::default();
    // Unique content.
    let probe = uuid::Uuid::now_v7().into_bytes().to_vec();
    let done = async {
        let reference = blobs.put(probe.into()).await?;
        blobs.get(&reference).await?;
        blobs.remove(&reference).await
    };
    match done.await {
        Ok(()) => findings.ok("blobs", "the folder for large payloads can be written and read"),
        Err(error) => findings.problem(
            "blobs",
            chain(&error),
            "every service needs the same writable folder (CONSTRUCT_DATA_DIR) with free space",
        ),
    }
    findings
}

/// The begin of the period, its spending, and the top spenders.
type SpendingSince =
    (Timestamp, construct_store::ModelSpending, Vec<construct_store::AgentSpending>);

/// The cached recent spending. However many clients ask, the ledger is queried by one at a time,
/// and seldom.
pub(crate) type RecentSpending = Mutex<Option<SpendingSince>>;

impl Api {
    async fn read_recent_spending(
        &self,
        store: &Store,
        now: Timestamp,
    ) -> Result<SpendingSince, Status> {
        let mut recent = self.recent_spending().lock().await;
        let since = now - SPENDING_WINDOW;
        match &*recent {
            Some(cached) if since.duration_since(cached.0) < SPENDING_REFRESH_INTERVAL => {
                Ok(cached.clone())
            }
            _ => {
                let (spent, spenders) =
                    store.top_spenders(since, MAX_SPENDERS).await.map_err(status::from_store)?;
                Ok(recent.insert((since, spent, spenders)).clone())
            }
        }
    }
}

#[tonic::async_trait]
impl DiagnosisService for Api {
    async fn diagnose(
        &self,
        request: Request<DiagnoseRequest>,
    ) -> Result<Response<Diagnosis>, Status> {
        let (context, DiagnoseRequest {}) = self.begin_request(request)?;
        let bus = context.backend.publisher.bus();
        let keys = database::Keys {
            active: self.keyring().active(),
            secrets: self.secrets_keyring().ok().map(|keys| keys.active()),
        };
        let (database, streams, services, blobs) = tokio::join!(
            with_timeout("postgresql", database::check(context.store(), &keys)),
            with_timeout("nats", mesh::check(bus)),
            with_timeout(
                "services",
                mesh::check_services(bus, self.pools(), self.scans_dir().is_ok())
            ),
            with_timeout("blobs", blobs(&context.backend.blobs)),
        );
        let findings = [database, streams, services, blobs].concat();
        let version = env!("CARGO_PKG_VERSION").to_owned();
        Ok(Response::new(Diagnosis { time: Some(convert::time(clock::now())), version, findings }))
    }

    async fn get_overview(
        &self,
        request: Request<GetOverviewRequest>,
    ) -> Result<Response<Overview>, Status> {
        let (context, GetOverviewRequest {}) = self.begin_request(request)?;
        let (bus, store) = (context.backend.publisher.bus(), context.store());
        let now = clock::now();
        let mesh = async {
            let reading = future::try_join(
                mesh::worker_loads(bus, self.pools(), self.scans_dir().is_ok()),
                mesh::dead_letters(bus),
            );
            match tokio::time::timeout(CHECK_TIMEOUT, reading).await {
                Ok(reading) => reading.map_err(|error| Status::unavailable(chain(&error))),
                Err(_elapsed) => Err(Status::unavailable("NATS does not answer")),
            }
        };
        let rows = async {
            let (since, spent, spenders) = self.read_recent_spending(store, now).await?;
            let overdue =
                store.sweep_due(now - database::OVERDUE_AFTER, None, database::MAX_COUNTED_TASKS);
            let rows =
                future::try_join3(store.active_task_counts(), overdue, store.tasks_quarantined());
            let (tasks, overdue, quarantined) = rows.await.map_err(status::from_store)?;
            Ok((tasks, overdue, quarantined, (since, spent, spenders)))
        };
        let ((workers, dead_letters), (tasks, overdue, quarantined, (since, spent, spenders))) =
            future::try_join(mesh, rows).await?;
        Ok(Response::new(Overview {
            time: Some(convert::time(now)),
            workers,
            tasks: tasks
                .into_iter()
                .map(|(phase, count)| PhaseCount { phase: convert::phase(phase).into(), count })
                .collect(),
            overdue: i64::try_from(overdue.len()).unwrap_or(i64::MAX),
            quarantined: quarantined.count,
            dead_letters,
            since: Some(convert::time(since)),
            spending: Some(to_spending(spent)),
            spenders: spenders
                .into_iter()
                .map(|spender| Spender {
                    organization: spender.organization.to_string(),
                    organization_name: spender.organization_name,
                    agent: spender.agent.map(|agent| agent.to_string()).unwrap_or_default(),
                    agent_name: spender.agent_name,
                    spending: Some(to_spending(spender.spending)),
                })
                .collect(),
        }))
    }
}

fn to_spending(spending: construct_store::ModelSpending) -> Spending {
    Spending {
        calls: spending.calls,
        tokens: spending.tokens,
        cost_pico_usd: spending.cost_pico_usd,
    }
}
