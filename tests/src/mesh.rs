//! A mesh for one test: its own PostgreSQL database, its own NATS server, and the four services as
//! processes that can be killed and restarted.

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

/// The first port that services listen on.
const FIRST_PORT: u16 = 12_000;

/// The time limit for stopping a service: the grace period of its work, and a little for itself.
const STOP_TIMEOUT: Duration = Duration::from_secs(8);

/// What a service logs when NATS denies it a permission.
const REFUSED_BY_NATS: &str = "NATS denies this";

/// One of the services.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Service {
    /// Serves the API.
    Gateway,
    /// Decides about tasks.
    Reconciler,
    /// Runs scripts.
    Interpreter,
    /// Calls models.
    Providers,
    /// Talks to Slack; started on request.
    Slack,
    /// Scans repositories; started on request.
    Scanner,
}

impl Service {
    /// The services of every mesh.
    pub const ALL: [Self; 4] =
        [Self::Gateway, Self::Reconciler, Self::Interpreter, Self::Providers];

    /// The clients of the gateway, which a mesh has on request.
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

    /// The service's NATS user.
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
    /// The folder with logs and data of the services.
    home: TempDir,
    /// The folder that tools may use. With disks, one is mounted here, and the services' data is
    /// here as well.
    service_dir: TempDir,
    workspace: PathBuf,
    data: PathBuf,
    /// None: the folders are ordinary ones.
    disks: Option<Disks>,
    /// The clocks of the services; none: the machine's.
    clocks: Option<Clocks>,
    /// Processes that used clocks of the test.
    faked_clock_pids: Mutex<Vec<u32>>,
    /// Its PostgreSQL database.
    pub database: Database,
    /// Its NATS server.
    pub nats: NatsServer,
    /// The folder under the disk of the NATS streams, if it has one.
    store: Option<TempDir>,
    gateway: SocketAddr,
    slack: SocketAddr,
    health: BTreeMap<Service, SocketAddr>,
    processes: BTreeMap<Service, Child>,
    /// Additional processes of services; none where one has ended.
    replicas: Vec<Option<(Service, Child)>>,
    environment: Vec<(String, String)>,
    /// The folder with the services' programs; none: the test's own.
    programs: Option<PathBuf>,
}

impl Mesh {
    /// Starts everything and waits until it is ready.
    pub async fn start() -> anyhow::Result<Self> {
        Self::start_with(&[]).await
    }

    /// The same with additional environment variables for every service.
    pub async fn start_with(environment: &[(&str, &str)]) -> anyhow::Result<Self> {
        let mut mesh = Self::prepare(environment).await?;
        mesh.start_services().await?;
        Ok(mesh)
    }

    /// Prepares everything but the services.
    pub async fn prepare(environment: &[(&str, &str)]) -> anyhow::Result<Self> {
        let (database, nats) = tokio::join!(Database::new(), NatsServer::start());
        // Usually a reconciler creates the streams. Tests that start other services first need them
        // from the beginning.
        drop(nats.bus().await);
        Self::from_parts(database, nats, environment)
    }

    /// The same on the given database.
    ///
    /// # Errors
    /// As [`Mesh::prepare`].
    pub async fn prepare_on(database: Database) -> anyhow::Result<Self> {
        let nats = NatsServer::start().await;
        drop(nats.bus().await);
        Self::from_parts(database, nats, &[])
    }

    /// Prepares everything but the services, without schema and streams, which the first services
    /// create.
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

    /// Sets an environment variable for services that are started from now on.
    pub fn set_env(&mut self, key: &str, value: impl Into<String>) {
        self.environment.push((key.to_owned(), value.into()));
    }

    /// Services that are started from now on use the programs of this folder; none: those built
    /// beside the test.
    pub fn set_programs_dir(&mut self, folder: Option<PathBuf>) {
        self.programs = folder;
    }

    /// Migrates the schema, as a deployment does before it replaces anything.
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

    /// Where the test finds a path of services and tools.
    pub fn host_path(&self, path: &Path) -> PathBuf {
        self.disks.as_ref().map_or_else(|| path.to_owned(), |disks| disks.host_path(path))
    }

    /// The folder with the files of scans.
    pub fn scans(&self) -> PathBuf {
        self.workspace().join("scans")
    }

    /// The folder with logs and data of the services.
    pub fn home(&self) -> &Path {
        self.home.path()
    }

    /// Creates a directory of this name in the workspace, for tests with several tasks.
    ///
    /// # Errors
    /// When it cannot be created.
    pub fn folder(&self, name: &str) -> anyhow::Result<PathBuf> {
        let path = self.workspace().join(name);
        fs::create_dir(self.host_path(&path))
            .with_context(|| format!("{} cannot be made", path.display()))?;
        Ok(path)
    }

    /// A client of the gateway; it survives restarts of the gateway.
    ///
    /// # Errors
    /// When the gateway's address is invalid, which is impossible.
    pub fn client(&self) -> anyhow::Result<Client> {
        Ok(Client::new(self.channel()?))
    }

    /// Where the gateway listens.
    pub fn gateway_url(&self) -> String {
        format!("http://{}", self.gateway)
    }

    /// The address at which the Slack service serves requests.
    pub const fn slack_address(&self) -> SocketAddr {
        self.slack
    }

    /// The same as a URL for browsers.
    pub fn slack_url(&self) -> String {
        format!("http://{}", self.slack)
    }

    /// The log of a service so far.
    pub fn log(&self, service: Service) -> String {
        fs::read_to_string(self.log_path(service)).unwrap_or_default()
    }

    fn log_path(&self, service: Service) -> PathBuf {
        self.home.path().join(format!("{}.log", service.name()))
    }

    /// A connection to the gateway. It connects on first use, so that it survives restarts of the
    /// gateway.
    pub fn channel(&self) -> anyhow::Result<Channel> {
        Ok(Channel::from_shared(self.gateway_url())?.connect_lazy())
    }

    /// A connection to the bus, to observe and to disturb it.
    pub async fn bus(&self) -> Bus {
        self.nats.bus().await
    }

    /// Creates a scripted provider with its model and agent, all called `name`.
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

    /// Creates a provider, and a model and an agent of the same name that use it.
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

    /// The state of the work queues, printed when a test has failed. At that point only another
    /// thread can wait for it.
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

/// A command that passes a socket to a program, as systemd does: at descriptor 3, with the
/// variables for it. It needs the returned standard input.
///
/// # Errors
/// When the socket's descriptor cannot be duplicated.
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

/// The folder with the compiled guest, which tests share: compiling it takes seconds in an
/// unoptimized build.
///
/// # Errors
/// When the services are not built.
pub fn guest_cache() -> anyhow::Result<PathBuf> {
    let binary = binary("construct-interpreter")?;
    Ok(binary.with_file_name("guest-cache"))
}

/// An unused port of this machine that no other test takes until this process ends. It is below the
/// range for outgoing connections, so that none of these takes it while its service is down.
///
/// # Errors
/// When ports cannot be reserved in the folder for temporary files.
pub fn free_address() -> anyhow::Result<SocketAddr> {
    /// Reserved ports of this process: locked files.
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
