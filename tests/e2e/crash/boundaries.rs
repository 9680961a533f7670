//! A process that ends between any two things that it says or hears. All that it does to others goes over its connections: where it is killed
//! before the nth piece that it sent has arrived, what that says was not done; where it is killed before the nth piece that it is sent has
//! arrived, it was done, and the process did not come to know. `CONSTRUCT_BOUNDARIES` says at how many places of each kind, spread over
//! a whole job.

use std::path::Path;

use construct_tests::{
    mesh::{Mesh, Service},
    proxy::{End, Proxy, authority},
};
use tokio::sync::watch;

use super::{Job, ONE_BY_ONE, script};

/// Places of each kind when nobody says how many.
const PLACES: u64 = 2;
/// Side effects of a job: few, as it is begun so often.
const EFFECTS: u32 = 6;

/// What services talk to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Server {
    Nats,
    PostgreSql,
}

/// What passes between a service and its servers.
const KINDS: [(Server, End); 4] = [
    (Server::Nats, End::Client),
    (Server::Nats, End::Server),
    (Server::PostgreSql, End::Client),
    (Server::PostgreSql, End::Server),
];

/// A mesh in which one service has its own way to the servers.
struct Watched {
    mesh: Mesh,
    service: Service,
    nats: Proxy,
    database: Proxy,
    jobs: u32,
}

impl Watched {
    async fn start(service: Service) -> Self {
        let mut mesh = Mesh::prepare(&[]).await.unwrap();
        for other in Service::ALL.into_iter().filter(|other| *other != service) {
            mesh.spawn(other).unwrap();
        }
        let nats = Proxy::start(&authority(mesh.nats.url())).await.unwrap();
        let database = Proxy::start(&authority(mesh.database.url())).await.unwrap();
        mesh.set("CONSTRUCT_NATS_URL", nats.instead_of(mesh.nats.url()));
        mesh.set("CONSTRUCT_DATABASE_URL", database.instead_of(mesh.database.url()));
        mesh.start_services().await.unwrap();
        let code = ONE_BY_ONE.map(|line| line.replace("n <= 24", &format!("n <= {EFFECTS}")));
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

    fn passed(&self) -> [u64; KINDS.len()] {
        KINDS.map(|(server, end)| self.proxy(server).passed(end))
    }

    /// Has a job done, kills the process at the piece that is named, and checks what came of the job. Gives whether the process was killed
    /// in the middle of it, and how much of each kind passed.
    async fn job(&mut self, place: Option<(Server, End, u64)>) -> (bool, [u64; KINDS.len()]) {
        self.jobs += 1;
        let folder = self.mesh.folder(&format!("job-{}", self.jobs)).unwrap();
        let job = Job::prepare(&self.mesh, &folder, EFFECTS).await;
        let before = self.passed();
        let over = watch::Sender::new(false);
        // Only what is told is waited for: who asks a gateway again and again has it ask the database.
        let working = async {
            job.conversation.say("Do it.").await;
            job.recorder.until_count("turn.completed", 1).await;
            over.send_replace(true);
        };
        let mut done = over.subscribe();
        let killing = async {
            let Some((server, end, nth)) = place else { return false };
            let mut sprung = self.proxy(server).trap(end, nth, &[&self.nats, &self.database]);
            let reached = tokio::select! {
                _ = &mut sprung => true,
                _ = done.wait_for(|over| *over) => false,
            };
            self.proxy(server).disarm();
            // It may have sprung at the last moment.
            if reached || sprung.try_recv().is_ok() {
                self.mesh.kill(self.service).unwrap();
                tokio::join!(self.nats.reset(), self.database.reset());
                self.mesh.spawn(self.service).unwrap();
            }
            reached
        };
        let ((), killed) = tokio::join!(working, killing);
        let after = self.passed();
        self.check(&job, &folder).await;
        (killed, std::array::from_fn(|kind| after[kind] - before[kind]))
    }

    async fn check(&mut self, job: &Job, folder: &Path) {
        let unknown = job.check(folder).await;
        // Only who runs scripts can lose what became of a call, and there is one call at a time.
        let most = usize::from(self.service == Service::Interpreter);
        assert!(unknown.len() <= most, "{unknown:?} are said to be unknown");
        self.mesh.ready(self.service).await.unwrap();
    }
}

/// Has jobs done whose service is killed at so many places of each kind, the first one as the first piece passes.
async fn survives(service: Service, servers: &[Server]) {
    let places = std::env::var("CONSTRUCT_BOUNDARIES").ok().and_then(|places| places.parse().ok()).unwrap_or(PLACES);
    let mut watched = Watched::start(service).await;
    // The first one fills what is remembered.
    watched.job(None).await;
    let (_, lengths) = watched.job(None).await;
    for ((server, end), length) in KINDS.into_iter().zip(lengths).filter(|((server, _), _)| servers.contains(server)) {
        let (mut killed, places) = (0, places.min(length));
        for place in 0..places {
            let nth = 1 + length * place / places;
            println!("{service:?}: piece {nth} of {length} from the {end:?} between it and {server:?}");
            killed += u64::from(watched.job(Some((server, end, nth))).await.0);
        }
        assert!(places > 0 && 2 * killed >= places, "{server:?}, {end:?}: killed at {killed} of {places} places only");
    }
}

#[tokio::test]
async fn a_job_survives_the_gateway_at_every_boundary() {
    survives(Service::Gateway, &[Server::Nats, Server::PostgreSql]).await;
}

#[tokio::test]
async fn a_job_survives_the_reconciler_at_every_boundary() {
    survives(Service::Reconciler, &[Server::Nats, Server::PostgreSql]).await;
}

#[tokio::test]
async fn a_job_survives_the_providers_at_every_boundary() {
    survives(Service::Providers, &[Server::Nats]).await;
}

#[tokio::test]
async fn a_job_survives_the_interpreter_at_every_boundary() {
    survives(Service::Interpreter, &[Server::Nats]).await;
}
