//! A process is killed between any two pieces of its network traffic. If it is killed before the
//! nth piece that it sent has arrived, the effect did not happen. If it is killed before the nth
//! piece sent to it has arrived, the effect happened, and the process did not learn of it.
//! `CONSTRUCT_BOUNDARIES` sets the number of kill points of each kind, spread over a whole job. The
//! most important points have names and are hit exactly: docs/testing.md lists them.

mod subtasks;

use std::collections::BTreeSet;

use construct_tests::{
    mesh::{Mesh, Service},
    proxy::{End, Moment, Proxy, authority},
};
use tokio::sync::watch;

use super::{Job, SEQUENTIAL, script};
use crate::read;

/// Kill points of each kind by default.
const KILL_POINTS: u64 = 2;
/// The side effects of a job: few, as it runs so often.
const EFFECTS: u32 = 6;

/// A server that services talk to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    Nats,
    PostgreSql,
}

/// The directions of traffic between a service and its servers.
const KINDS: [(Server, End); 4] = [
    (Server::Nats, End::Client),
    (Server::Nats, End::Server),
    (Server::PostgreSql, End::Client),
    (Server::PostgreSql, End::Server),
];

/// A point at which a process is killed.
#[derive(Debug, Clone, Copy)]
enum KillPoint {
    /// Before the nth piece from an end arrives.
    Piece(Server, End, u64),
    /// At a piece to PostgreSQL that contains a text.
    Text(Moment, &'static str),
    /// At the commit of a transaction that contains a text.
    Commit(Moment, &'static str),
    /// At the nth message to subjects of NATS with this prefix; with a second prefix, the nth after
    /// a message to such a subject.
    Message(Moment, &'static str, u64, Option<&'static str>),
}

/// A finished job.
struct JobReport {
    /// Whether the process was killed during it.
    killed: bool,
    /// The number of pieces of each kind.
    passed: [u64; KINDS.len()],
    /// Effects whose outcome was reported as unknown.
    unknown: BTreeSet<u32>,
    /// The output of the effects that are shell commands.
    effects: String,
}

/// A mesh in which one service uses its own proxies to the servers.
struct ProxiedMesh {
    mesh: Mesh,
    service: Service,
    nats: Proxy,
    database: Proxy,
    jobs: u32,
}

impl ProxiedMesh {
    async fn start(service: Service) -> Self {
        let mut mesh = Mesh::prepare(&[]).await.unwrap();
        for other in Service::ALL.into_iter().filter(|other| *other != service) {
            mesh.spawn(other).unwrap();
        }
        let nats = Proxy::start_nats(&authority(mesh.nats.url())).await.unwrap();
        let database = Proxy::start(&authority(mesh.database.url())).await.unwrap();
        mesh.set_env("CONSTRUCT_NATS_URL", nats.proxied_url(mesh.nats.url()));
        mesh.set_env("CONSTRUCT_DATABASE_URL", database.proxied_url(mesh.database.url()));
        mesh.start_services().await.unwrap();
        let code = SEQUENTIAL.map(|line| line.replace("n <= 24", &format!("n <= {EFFECTS}")));
        let code: Vec<&str> = code.iter().map(String::as_str).collect();
        mesh.scripted_agent("worker", &script(&code)).await.unwrap();
        Self { mesh, service, nats, database, jobs: 0 }
    }

    fn proxy(&self, server: Server) -> &Proxy {
        match server {
            Server::Nats => &self.nats,
            Server::PostgreSql => &self.database,
        }
    }

    fn piece_counts(&self) -> [u64; KINDS.len()] {
        KINDS.map(|(server, end)| self.proxy(server).piece_count(end))
    }

    /// Runs a job, kills the process at the given point, and checks the job.
    async fn job(&mut self, place: Option<KillPoint>) -> JobReport {
        self.jobs += 1;
        let folder = self.mesh.folder(&format!("job-{}", self.jobs)).unwrap();
        let job = Job::prepare(&self.mesh, &folder, EFFECTS).await;
        let before = self.piece_counts();
        // Wait for events only: polling the gateway would make it query the database.
        let working = async {
            job.conversation.submit("Do it.").await;
            job.recorder.wait_for_count("turn.completed", 1).await;
        };
        let killed = self.kill_during(working, place).await;
        let after = self.piece_counts();
        let unknown = job.check(&folder).await;
        // Only an interpreter can lose the outcome of a call, and there is one call at a time.
        let most = usize::from(self.service == Service::Interpreter);
        assert!(unknown.len() <= most, "{unknown:?} are said to be unknown");
        self.mesh.wait_until_ready(self.service).await.unwrap();
        let passed = std::array::from_fn(|kind| after[kind] - before[kind]);
        JobReport { killed, passed, unknown, effects: read(&folder.join("effects.log")) }
    }

    /// Kills the process at the given point if it comes there during the work, and restarts it.
    /// Returns whether it did, after the work.
    async fn kill_during(
        &mut self,
        work: impl Future<Output = ()>,
        place: Option<KillPoint>,
    ) -> bool {
        let over = watch::Sender::new(false);
        let working = async {
            work.await;
            over.send_replace(true);
        };
        let mut done = over.subscribe();
        let killing = async {
            let ways = [&self.nats, &self.database];
            let mut sprung = match place {
                None => return false,
                Some(KillPoint::Piece(server, end, nth)) => {
                    self.proxy(server).trap(end, nth, &ways)
                }
                Some(KillPoint::Text(moment, text)) => {
                    self.database.trap_text(moment, text, None, &ways)
                }
                Some(KillPoint::Commit(moment, text)) => {
                    self.database.trap_text(moment, "COMMIT", Some(text), &ways)
                }
                Some(KillPoint::Message(moment, subject, nth, after)) => {
                    self.nats.trap_message(moment, (subject, nth), after, &ways)
                }
            };
            let reached = tokio::select! {
                biased;
                _ = &mut sprung => true,
                _ = done.wait_for(|over| *over) => false,
            };
            for way in ways {
                way.disarm();
            }
            // The trap may have sprung at the last moment.
            let killed = reached || sprung.try_recv().is_ok();
            if killed {
                self.mesh.kill(self.service).unwrap();
                tokio::join!(self.nats.reset(), self.database.reset());
                self.mesh.spawn(self.service).unwrap();
            }
            killed
        };
        let ((), killed) = tokio::join!(working, killing);
        killed
    }
}

/// Runs jobs whose service is killed at so many points of each kind, the first one at the first
/// piece.
async fn survives_crash_of(service: Service, servers: &[Server]) {
    let places = std::env::var("CONSTRUCT_BOUNDARIES")
        .ok()
        .and_then(|places| places.parse().ok())
        .unwrap_or(KILL_POINTS);
    let mut proxied = ProxiedMesh::start(service).await;
    // The first one fills the caches.
    proxied.job(None).await;
    let lengths = proxied.job(None).await.passed;
    for ((server, end), length) in
        KINDS.into_iter().zip(lengths).filter(|((server, _), _)| servers.contains(server))
    {
        let (mut killed, places) = (0, places.min(length));
        for place in 0..places {
            let nth = 1 + length * place / places;
            println!(
                "{service:?}: piece {nth} of {length} from the {end:?} between it and {server:?}"
            );
            killed += u64::from(proxied.job(Some(KillPoint::Piece(server, end, nth))).await.killed);
        }
        assert!(
            places > 0 && 2 * killed >= places,
            "{server:?}, {end:?}: killed at {killed} of {places} places only"
        );
    }
}

#[tokio::test]
async fn job_survives_gateway_crash_at_every_boundary() {
    survives_crash_of(Service::Gateway, &[Server::Nats, Server::PostgreSql]).await;
}

#[tokio::test]
async fn job_survives_reconciler_crash_at_every_boundary() {
    survives_crash_of(Service::Reconciler, &[Server::Nats, Server::PostgreSql]).await;
}

#[tokio::test]
async fn job_survives_providers_crash_at_every_boundary() {
    survives_crash_of(Service::Providers, &[Server::Nats]).await;
}

#[tokio::test]
async fn job_survives_interpreter_crash_at_every_boundary() {
    survives_crash_of(Service::Interpreter, &[Server::Nats]).await;
}

/// Wakes, commands, results and journal entries; and the acknowledgments of workers and
/// reconcilers.
const WAKE: &str = "construct.v1.cmd.task.wake.";
const MODEL: &str = "construct.v1.cmd.model.invoke.";
const CODE: &str = "construct.v1.cmd.code.execute.";
const RESULT: &str = "construct.v1.cmd.task.result.";
const JOURNAL: &str = "construct.v1.journal.";
const TASK_DONE: &str = "$JS.ACK.CONSTRUCT_TASK.";
const MODEL_DONE: &str = "$JS.ACK.CONSTRUCT_MODEL.";
const CODE_DONE: &str = "$JS.ACK.CONSTRUCT_CODE.";

/// Runs jobs whose service is killed at named points, each of which it reaches.
async fn survives_at(service: Service, places: &[(&str, KillPoint)]) -> Vec<JobReport> {
    let mut proxied = ProxiedMesh::start(service).await;
    proxied.job(None).await;
    let mut jobs = Vec::new();
    for (name, place) in places {
        println!("{service:?}: {name}");
        let done = proxied.job(Some(*place)).await;
        assert!(done.killed, "{service:?} did not come to where it is to be killed: {name}");
        jobs.push(done);
    }
    jobs
}

#[tokio::test]
async fn job_survives_gateway_crash_around_commit_wake_and_answer() {
    let places = [
        ("a message is not committed", KillPoint::Text(Moment::Sent, "COMMIT")),
        ("it is committed, and that is not known", KillPoint::Text(Moment::Answered, "COMMIT")),
        (
            "a message is committed, its wake is not published",
            KillPoint::Message(Moment::Sent, WAKE, 1, None),
        ),
        (
            "its wake is published, and whoever sent it is not told",
            KillPoint::Message(Moment::Answered, WAKE, 1, None),
        ),
    ];
    survives_at(Service::Gateway, &places).await;
}

#[tokio::test]
async fn job_survives_reconciler_crash_around_commit_command_and_ack() {
    // The first message record that it writes is the model's answer.
    let places = [
        ("a result is not committed", KillPoint::Text(Moment::Sent, "message.created")),
        (
            "a result is committed, and that is not known",
            KillPoint::Text(Moment::Answered, "message.created"),
        ),
        (
            "a model call is committed, its command not published",
            KillPoint::Message(Moment::Sent, MODEL, 1, None),
        ),
        (
            "its command is published, and that is not known",
            KillPoint::Message(Moment::Answered, MODEL, 1, None),
        ),
        (
            "a result is committed, the command for its script not published",
            KillPoint::Message(Moment::Sent, CODE, 1, None),
        ),
        (
            "the script's command is published, the result not acknowledged",
            KillPoint::Message(Moment::Sent, TASK_DONE, 1, Some(CODE)),
        ),
    ];
    survives_at(Service::Reconciler, &places).await;
}

#[tokio::test]
async fn job_survives_providers_crash_around_answer_result_and_ack() {
    let places = [
        (
            "the model has answered, the result is not published",
            KillPoint::Message(Moment::Sent, RESULT, 1, None),
        ),
        (
            "the result is published, and that is not known",
            KillPoint::Message(Moment::Answered, RESULT, 1, None),
        ),
        (
            "the result is published, the command not acknowledged",
            KillPoint::Message(Moment::Sent, MODEL_DONE, 1, Some(RESULT)),
        ),
    ];
    survives_at(Service::Providers, &places).await;
}

#[tokio::test]
async fn job_survives_interpreter_crash_around_journal_effect_and_ack() {
    // The first entry says which process has the script, the second that its first effect begins,
    // the third that it has ended.
    let places = [
        (
            "the script is taken over, and that is not known",
            KillPoint::Message(Moment::Answered, JOURNAL, 1, None),
        ),
        (
            "the effect is to begin, and that is not written",
            KillPoint::Message(Moment::Sent, JOURNAL, 2, None),
        ),
        (
            "that the effect begins is written, it has not begun",
            KillPoint::Message(Moment::Answered, JOURNAL, 2, None),
        ),
        (
            "the effect has happened, its end is not written",
            KillPoint::Message(Moment::Sent, JOURNAL, 3, None),
        ),
        (
            "its end is written, and that is not known",
            KillPoint::Message(Moment::Answered, JOURNAL, 3, None),
        ),
        (
            "the script is over, the result is not published",
            KillPoint::Message(Moment::Sent, RESULT, 1, None),
        ),
        (
            "the result is published, the command not acknowledged",
            KillPoint::Message(Moment::Sent, CODE_DONE, 1, Some(RESULT)),
        ),
    ];
    let jobs = survives_at(Service::Interpreter, &places).await;
    // Whether the first effect happened, and which are reported as unknown.
    let happened = |done: &JobReport| done.effects.lines().any(|line| line == "1");
    let found: Vec<_> = jobs.iter().map(|done| (happened(done), done.unknown.clone())).collect();
    let (known, first) = ((true, BTreeSet::new()), BTreeSet::from([1]));
    let (not_begun, not_ended) = ((false, first.clone()), (true, first));
    let expected = [&known, &known, &not_begun, &not_ended, &known, &known, &known];
    assert_eq!(found.iter().collect::<Vec<_>>(), expected);
}
