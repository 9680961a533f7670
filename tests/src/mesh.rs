//! A whole mesh for one test: its own PostgreSQL database, its own NATS server, and the four
//! services as processes that can be killed and started again.

mod faults;
mod processes;

use std::{
    collections::BTreeMap,
    fs::{self, File, TryLockError},
    net::{Ipv4Addr, SocketAddr, TcpListener},
    os::{fd::OwnedFd, unix::net::UnixListener},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use construct_bus::{Bus, User, testing::NatsServer, topology::Stream};
use construct_proto::v1;
use construct_store::testing::Database;
use tempfile::TempDir;
use tonic::transport::Channel;
use uuid::Uuid;

pub use faults::Disk;

use crate::{
    client::Client,
    clocks::{self, Clocks},
    disk::Disks,
};

/// Services listen on ports from here on.
const FIRST_PORT: u16 = 12_000;

/// How long a service may take to stop: the grace it gives its work, and a little for itself.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);

/// What a service logs that did what it may not do at NATS.
const REFUSED_BY_NATS: &str = "NATS does not allow this to us";

/// One of the services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// The outward faces.
    Gateway,
    /// Decides about tasks.
    Reconciler,
    /// Runs scripts.
    Interpreter,
    /// Calls models.
    Providers,
    /// Talks to Slack; started where a test asks for it.
    Slack,
    /// Looks through repositories; started where a test asks for it.
    Scanner,
}

impl Service {
    /// Those that every mesh has.
    pub const ALL: [Self; 4] =
        [Self::Gateway, Self::Reconciler, Self::Interpreter, Self::Providers];

    /// Clients of the gateway, which a mesh has where a test wants them.
    pub const CLIENTS: [Self; 2] = [Self::Slack, Self::Scanner];

    const fn name(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Reconciler => "reconciler",
            Self::Interpreter => "interpreter",
            Self::Providers => "providers",
            Self::Slack => "slack",
            Self::Scanner => "scanner",
        }
    }

    /// As whom it connects to NATS.
    pub const fn user(self) -> User {
        match self {
            Self::Gateway => User::Gateway,
            Self::Reconciler => User::Reconciler,
            Self::Interpreter => User::Interpreter,
            Self::Providers => User::Providers,
            Self::Slack => User::Slack,
            Self::Scanner => User::Scanner,
        }
    }
}

/// A running mesh. Everything ends and is deleted when it is dropped.
#[derive(Debug)]
pub struct Mesh {
    /// Where services write their logs and data.
    home: TempDir,
    /// The folder with what the tools may touch. Where there are disks, one lies over it, and
    /// services have their data there as well.
    service_dir: TempDir,
    workspace: PathBuf,
    data: PathBuf,
    /// None: it is a folder like any other.
    disks: Option<Disks>,
    /// The clocks of services; none: they go by the machine's.
    clocks: Option<Clocks>,
    /// Processes that went by clocks of the test's.
    faked_clock_pids: Mutex<Vec<u32>>,
    /// Its PostgreSQL database.
    pub database: Database,
    /// Its NATS server.
    pub nats: NatsServer,
    /// Over it lies the disk of the server's streams, where there is one.
    store: Option<TempDir>,
    gateway: SocketAddr,
    slack: SocketAddr,
    health: BTreeMap<Service, SocketAddr>,
    processes: BTreeMap<Service, Child>,
    /// Further processes of services; none where one was ended.
    replicas: Vec<Option<(Service, Child)>>,
    environment: Vec<(String, String)>,
    /// Where the services' programs are; none: beside the test.
    programs: Option<PathBuf>,
}

impl Mesh {
    /// Starts everything and waits until it is ready.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with(&[]).await
    }

    /// The same with replica environment variables for every service.
    pub async fn start_with(environment: &[(&str, &str)]) -> anyhow::Result<Self> {
        let mut mesh = Self::prepare(environment).await?;
        mesh.start_services().await?;
        Ok(mesh)
    }

    /// Everything but the services.
    pub async fn prepare(environment: &[(&str, &str)]) -> anyhow::Result<Self> {
        let (database, nats) = tokio::join!(Database::new(), NatsServer::start());
        // A reconciler makes the streams. Tests that begin with other services have them from the
        // beginning.
        drop(nats.bus().await);
        Self::from_parts(database, nats, environment)
    }

    /// The same on a database of the caller's.
    ///
    /// # Errors
    /// As [`Mesh::prepare`].
    pub async fn prepare_on(database: Database) -> anyhow::Result<Self> {
        let nats = NatsServer::start().await;
        drop(nats.bus().await);
        Self::from_parts(database, nats, &[])
    }

    /// Everything but the services, without schema and streams, which the first of them make.
    ///
    /// # Errors
    /// As [`Mesh::prepare`].
    pub async fn prepare_empty() -> anyhow::Result<Self> {
        let (database, nats) = tokio::join!(Database::empty(), NatsServer::start());
        Self::from_parts(database, nats, &[])
    }

    fn from_parts(
        database: Database,
        nats: NatsServer,
        environment: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let (home, service_dir) = (tempfile::tempdir()?, tempfile::tempdir()?);
        let mut health = BTreeMap::new();
        for service in Service::ALL.into_iter().chain(Service::CLIENTS) {
            health.insert(service, free_address()?);
        }
        let mesh = Self {
            workspace: service_dir.path().to_owned(),
            data: home.path().join("data"),
            home,
            service_dir,
            store: None,
            disks: None,
            clocks: None,
            faked_clock_pids: Mutex::default(),
            database,
            nats,
            gateway: free_address()?,
            slack: free_address()?,
            health,
            processes: BTreeMap::new(),
            replicas: Vec::new(),
            environment: environment
                .iter()
                .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
                .collect(),
            programs: None,
        };
        Ok(mesh)
    }

    /// Sets an environment variable for every service that is started from now on.
    pub fn set_env(&mut self, key: &str, value: impl Into<String>) {
        self.environment.push((key.to_owned(), value.into()));
    }

    /// Services that are started from now on are those of this folder; none: those that were built
    /// beside the test.
    pub fn set_programs_dir(&mut self, folder: Option<PathBuf>) {
        self.programs = folder;
    }

    /// Brings the schema up to date, as a deployment does before it replaces anything.
    ///
    /// # Errors
    /// When that fails.
    pub async fn migrate(&self) -> anyhow::Result<()> {
        let output = tokio::process::Command::new(self.program(Service::Gateway)?)
            .arg("migrate")
            .env_clear()
            .env("CONSTRUCT_DATABASE_URL", self.database.url())
            .env("CONSTRUCT_HEALTH_LISTEN", free_address()?.to_string())
            .output()
            .await?;
        ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    fn program(&self, service: Service) -> anyhow::Result<PathBuf> {
        let name = format!("construct-{}", service.name());
        match &self.programs {
            Some(folder) => Ok(folder.join(name)),
            None => binary(&name),
        }
    }

    /// The directory that tasks of the test work in.
    pub fn workspace(&self) -> &Path {
        &self.workspace
    }

    /// Where the test finds what services and tools have at this path.
    pub fn host_path(&self, path: &Path) -> PathBuf {
        self.disks.as_ref().map_or_else(|| path.to_owned(), |disks| disks.host_path(path))
    }

    /// Where the files of scans lie.
    pub fn scans(&self) -> PathBuf {
        self.workspace().join("scans")
    }

    /// Where the services write their logs and data.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// A new directory of this name in the workspace, for tests with several tasks.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn folder(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.workspace().join(name);
        fs::create_dir(self.host_path(&path))
            .with_context(|| format!("{} cannot be made", path.display()))?;
        Ok(path)
    }

    /// A client of the gateway; it outlives the gateway's restarts.
    ///
    /// # Errors
    /// When the gateway's address is none, which cannot be.
    pub fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::new(self.channel()?))
    }

    /// Where the gateway listens.
    pub fn gateway_url(&self) -> String {
        format!("http://{}", self.gateway)
    }

    /// Where Slack's requests are served, by a service that listens there.
    pub const fn slack_address(&self) -> SocketAddr {
        self.slack
    }

    /// The same as an address for browsers.
    pub fn slack_url(&self) -> String {
        format!("http://{}", self.slack)
    }

    /// What a service logged so far.
    pub fn log(&self, service: Service) -> String {
        fs::read_to_string(self.log_path(service)).unwrap_or_default()
    }

    fn log_path(&self, service: Service) -> PathBuf {
        self.home.path().join(format!("{}.log", service.name()))
    }

    /// A connection to the gateway; made when first used, so that it outlives the gateway's
    /// restart.
    pub fn channel(&self) -> anyhow::Result<Channel> {
        Ok(Channel::from_shared(self.gateway_url())?.connect_lazy())
    }

    /// A connection to the mesh, to tap and to disturb it.
    pub async fn bus(&self) -> Bus {
        self.nats.bus().await
    }

    /// Makes a scripted provider of this name with its model and agent, all called `name`.
    pub async fn scripted_agent(
        &self,
        name: &str,
        script: &serde_json::Value,
    ) -> anyhow::Result<v1::Agent> {
        let provider = v1::ModelProviderSpec {
            name: name.to_owned(),
            r#type: v1::ModelProviderType::Scripted.into(),
            script: script.to_string(),
            ..v1::ModelProviderSpec::default()
        };
        self.agent(name, provider).await
    }

    /// Makes a provider, and a model and an agent of the same name that use it.
    pub async fn agent(
        &self,
        name: &str,
        provider: v1::ModelProviderSpec,
    ) -> anyhow::Result<v1::Agent> {
        let channel = self.channel()?;
        let provider =
            v1::CreateModelProviderRequest { spec: Some(provider), ..Default::default() };
        v1::model_provider_service_client::ModelProviderServiceClient::new(channel.clone())
            .create_model_provider(provider)
            .await?;
        let model = v1::ModelSpec {
            name: name.to_owned(),
            provider: name.to_owned(),
            prices: Some(v1::Prices {
                input: 3_000_000,
                output: 15_000_000,
                cache_read: 300_000,
                cache_write: 3_750_000,
                ..v1::Prices::default()
            }),
            ..v1::ModelSpec::default()
        };
        v1::model_service_client::ModelServiceClient::new(channel.clone())
            .create_model(v1::CreateModelRequest { spec: Some(model), ..Default::default() })
            .await?;
        let agent = v1::AgentSpec {
            name: name.to_owned(),
            model: name.to_owned(),
            instructions: "Do what the test says.".to_owned(),
            ..v1::AgentSpec::default()
        };
        let agent = v1::agent_service_client::AgentServiceClient::new(channel)
            .create_agent(v1::CreateAgentRequest { spec: Some(agent), ..Default::default() })
            .await?;
        Ok(agent.into_inner())
    }

    /// How the work queues stand. For the end of a test that has failed, where nothing can be
    /// waited for but by another thread.
    fn queues(&self) -> String {
        let described = async {
            let mut text = String::new();
            for stream in [Stream::Task, Stream::Model, Stream::Code] {
                let described =
                    tokio::time::timeout(STOP_TIMEOUT, self.nats.describe(stream)).await;
                text += &described
                    .unwrap_or_else(|_| format!("{}: NATS does not answer\n", stream.name()));
            }
            text
        };
        let read = || {
            tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map(|one| one.block_on(described))
        };
        std::thread::scope(|scope| scope.spawn(read).join().unwrap_or_else(|_| Ok(String::new())))
            .unwrap_or_default()
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        let replicas = self.replicas.iter_mut().flatten().map(|(_, child)| child);
        for child in self.processes.values_mut().chain(replicas) {
            let _ = child.kill();
            let _ = child.wait();
        }
        for process in self.faked_clock_pids.get_mut().unwrap_or_else(PoisonError::into_inner) {
            clocks::cleanup(*process);
        }
        if std::thread::panicking() {
            for service in Service::ALL.into_iter().chain(Service::CLIENTS) {
                eprintln!("---- {} ----\n{}", service.name(), self.log(service));
            }
            eprintln!(
                "---- queues ----\n{}\n---- NATS, its last lines ----\n{}",
                self.queues(),
                self.nats.log()
            );
            return;
        }
        for service in Service::ALL.into_iter().chain(Service::CLIENTS) {
            let log = self.log(service);
            let refused: Vec<_> =
                log.lines().filter(|line| line.contains(REFUSED_BY_NATS)).collect();
            assert!(refused.is_empty(), "{} did what it may not do: {refused:#?}", service.name());
        }
    }
}

/// A command that passes a program a socket, as systemd does: at descriptor 3, with variables that
/// say so. It needs this standard input.
///
/// # Errors
/// When there can be no other descriptor of the socket.
pub fn with_socket(
    program: &Path,
    arguments: &[&str],
    socket: &UnixListener,
) -> anyhow::Result<(Command, Stdio)> {
    let mut command = Command::new("/bin/sh");
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" \"$@\"";
    command.arg("-c").arg(script).arg(program).args(arguments);
    Ok((command, Stdio::from(OwnedFd::from(socket.try_clone()?))))
}

/// A binary that was built beside this test.
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    let test = std::env::current_exe()?;
    // target/<profile>/deps/<test>
    let folder =
        test.parent().and_then(Path::parent).context("the test binary lies in no target folder")?;
    let path = folder.join(name);
    ensure!(
        path.exists(),
        "{} is not built; run `./dev test`, which builds the binaries first",
        path.display()
    );
    Ok(path)
}

/// The compiled guest is kept between tests: compiling it takes seconds in an unoptimized build.
///
/// # Errors
/// When the services are not built.
pub fn guest_cache() -> anyhow::Result<PathBuf> {
    let binary = binary("construct-interpreter")?;
    Ok(binary.with_file_name("guest-cache"))
}

/// A port of this machine that nobody listens on, and that no other test takes until this process
/// ends. It lies below those that the system gives to outgoing connections, so that none of these
/// takes it while the service that listens on it is down.
///
/// # Errors
/// When ports cannot be reserved in the folder for temporary files.
pub fn free_address() -> anyhow::Result<SocketAddr> {
    /// Ports of this process: locked files.
    static RESERVED: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let ports = std::env::temp_dir().join("construct-test-ports");
    fs::create_dir_all(&ports)?;
    loop {
        // The low bits of a version 7 UUID are random.
        let random = (Uuid::now_v7().as_u128() & 0x3FFF) as u16;
        let port = FIRST_PORT + random;
        let file = File::create(ports.join(port.to_string()))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => continue,
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        match TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
            Ok(listener) => {
                RESERVED.lock().unwrap_or_else(PoisonError::into_inner).push(file);
                return Ok(listener.local_addr()?);
            }
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {}
            Err(error) => return Err(error.into()),
        }
    }
}
