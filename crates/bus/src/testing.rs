//! A real nats-server for tests, with its own port and store, removed after the test.

use std::{
    env,
    ffi::OsStr,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use async_nats::{HeaderMap, jetstream::stream::LastRawMessageErrorKind};
use futures::TryStreamExt as _;
use tempfile::TempDir;

use crate::{
    Bus, ConnectOptions, Message, RawMessage, User,
    envelope::{BLOB, SealedMessage, TYPE},
    permissions,
    publish::{self, Expectation, Refusal},
    subject,
    tap::sorted,
    topology::Stream,
};

/// Timeout of the server's start.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// The interval of checks for it.
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// A nats-server with JetStream on its own port. Killed when dropped.
///
/// The binary is `CONSTRUCT_TEST_NATS_SERVER`, or `nats-server` in `PATH` or in Debian's folders
/// for servers.
#[derive(Debug)]
pub struct NatsServer {
    dir: TempDir,
    child: Option<Child>,
    url: String,
    port: u16,
    /// Additional configuration.
    configuration: String,
    /// The folder of its streams.
    store: PathBuf,
    /// A program and its arguments that launch the server; the server's own follow. Empty: launched
    /// directly.
    launcher: Vec<String>,
}

/// The user without a password that may do everything: the test itself.
const TEST_USER: &str = "test";

fn password(user: &str) -> String {
    format!("p-{user}")
}

impl NatsServer {
    /// Starts a server and waits until it accepts connections. A client without a password may do
    /// everything. Services connect with [`NatsServer::url_for`] and have the permissions of the
    /// table in [`permissions`].
    ///
    /// # Panics
    /// When the server cannot be started; the message has the reason.
    pub async fn start() -> Self {
        Self::start_configured("").await
    }

    /// Starts a server with additional lines of configuration.
    ///
    /// # Panics
    /// When the server cannot be started; the message has the reason.
    pub async fn start_configured(lines: &str) -> Self {
        let users = format!(
            "no_auth_user: {TEST_USER}\nauthorization {{ include \"permissions.conf\" }}\n{lines}\n"
        );
        Self::start_with(users).await
    }

    /// Starts a server that accepts one user and password. [`NatsServer::url`] does not contain
    /// them.
    ///
    /// # Panics
    /// When the server cannot be started; the message has the reason.
    pub async fn start_guarded(user: &str, password: &str) -> Self {
        Self::start_with(format!("authorization {{ user: {user:?}, password: {password:?} }}\n"))
            .await
    }

    /// Starts a server through a launcher that executes its arguments, with the streams in a folder
    /// that perhaps only the launcher can see.
    ///
    /// # Panics
    /// When the server cannot be started; the message has the reason.
    pub async fn start_through(launcher: Vec<String>, store: PathBuf) -> Self {
        let users = format!(
            "no_auth_user: {TEST_USER}\nauthorization {{ include \"permissions.conf\" }}\n"
        );
        let mut server = Self::configured(users);
        (server.store, server.launcher) = (store, launcher);
        server.launch().await;
        server
    }

    async fn start_with(configuration: String) -> Self {
        let mut server = Self::configured(configuration);
        server.launch().await;
        server
    }

    fn configured(configuration: String) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("construct-nats-")
            .tempdir()
            .expect("a temporary folder can be made");
        let store = dir.path().join("store");
        Self {
            dir,
            child: None,
            url: String::new(),
            port: 0,
            configuration,
            store,
            launcher: Vec::new(),
        }
    }

    /// The address for clients without a login.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// The address for a service, with its login.
    pub fn url_for(&self, user: User) -> String {
        Self::address_for(&self.url, user)
    }

    /// The address of the server, or of a proxy before it, for a service.
    pub fn address_for(url: &str, user: User) -> String {
        url.replacen("://", &format!("://{}:{}@", user.name(), password(user.name())), 1)
    }

    /// The server's folder; its store and the blobs of [`NatsServer::bus`] are inside.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The folder for blobs that [`NatsServer::bus`] uses.
    pub fn blobs(&self) -> PathBuf {
        self.dir.path().join("blobs")
    }

    /// Kills the server with SIGKILL.
    ///
    /// # Panics
    /// When it runs and cannot be killed.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("an own child can be killed");
            child.wait().expect("an own child can be waited for");
        }
    }

    /// Stops the server with SIGTERM and waits until it has written everything and ended.
    ///
    /// # Panics
    /// When it does not run.
    pub fn stop(&mut self) {
        self.signal("TERM");
        let mut child = self.child.take().expect("the server runs");
        child.wait().expect("an own child can be waited for");
    }

    /// The folder of its streams.
    pub fn store(&self) -> PathBuf {
        self.store.clone()
    }

    /// Suspends the server: it keeps its connections and does not answer, until
    /// [`NatsServer::resume`].
    ///
    /// # Panics
    /// When it does not run.
    pub fn pause(&self) {
        self.signal("STOP");
        // The signal is asynchronous: on a busy machine the server may still answer.
        let id = self.child.as_ref().expect("the server runs").id();
        let stopped = || {
            fs::read_to_string(format!("/proc/{id}/stat")).is_ok_and(|stat| stat.contains(") T "))
        };
        let deadline = Instant::now() + START_TIMEOUT;
        while !stopped() {
            assert!(Instant::now() < deadline, "the server does not stop");
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Continues a suspended server.
    ///
    /// # Panics
    /// When it does not run.
    pub fn resume(&self) {
        self.signal("CONT");
    }

    fn signal(&self, name: &str) {
        let child = self.child.as_ref().expect("the server runs");
        let sent = Command::new("kill").args(["-s", name, &child.id().to_string()]).status();
        assert!(sent.is_ok_and(|status| status.success()), "an own child can be sent a signal");
    }

    /// The process id if it runs.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    /// Starts the server again on the same port with the same store. Kills it first if it runs.
    ///
    /// # Panics
    /// When it cannot be started.
    pub async fn restart(&mut self) {
        self.kill();
        self.launch().await;
    }

    /// Starts the server again, as a supervisor does, if it has ended by itself. Returns its last
    /// log lines in that case.
    ///
    /// # Panics
    /// When it cannot be started.
    pub async fn restart_if_ended(&mut self) -> Option<String> {
        let child = self.child.as_mut()?;
        child.try_wait().expect("an own child can be asked for")?;
        let said = self.log();
        self.launch().await;
        Some(said)
    }

    /// The number of messages of a stream; of a work queue, those that wait or are in progress.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn message_count(&self, stream: Stream) -> u64 {
        let bus = self.bus().await;
        let mut stream =
            bus.inner.jetstream.get_stream(stream.name()).await.expect("the stream is there");
        stream.info().await.expect("the server describes it").state.messages
    }

    /// The messages of a stream in order. A message whose payload is a blob has the reference only.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn stored_messages(&self, stream: Stream) -> Vec<RawMessage> {
        let bus = self.bus().await;
        let stream =
            bus.inner.jetstream.get_stream(stream.name()).await.expect("the stream is there");
        let (mut stored, mut next) = (Vec::new(), 1);
        loop {
            let message = match stream.get_first_raw_message_by_subject(">", next).await {
                Ok(message) => message,
                Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                    return stored;
                }
                Err(error) => panic!("the server does not return the stream's messages: {error}"),
            };
            next = message.sequence + 1;
            let text =
                |name: &str| message.headers.get(name).map(|value| value.as_str().to_owned());
            stored.push(RawMessage {
                subject: message.subject.to_string(),
                type_name: text(TYPE),
                headers: sorted(&message.headers),
                blob: text(BLOB),
                payload: message.payload,
            });
        }
    }

    /// The number of undelivered or unacknowledged messages of a queue. A server that was killed
    /// may hold more ([`NatsServer::message_count`]): messages acknowledged just before, whose
    /// removal was not on disk yet.
    ///
    /// # Panics
    /// When the server does not answer.
    pub async fn pending_messages(&self, stream: Stream) -> u64 {
        let bus = self.bus().await;
        let stream =
            bus.inner.jetstream.get_stream(stream.name()).await.expect("the stream is there");
        let consumers: Vec<_> =
            stream.consumers().try_collect().await.expect("the server describes its consumers");
        consumers
            .iter()
            .map(|consumer| consumer.num_pending + consumer.num_ack_pending as u64)
            .sum()
    }

    /// The state of a work queue and its consumers with the headers of its messages, for diagnosing
    /// a task that does not continue. Read-only.
    pub async fn describe(&self, stream: Stream) -> String {
        let options = ConnectOptions::new("test").blobs(self.blobs());
        let described = async {
            let bus = Bus::connect(&self.url, options).await?;
            let stream = bus.inner.jetstream.get_stream(stream.name()).await?;
            let mut text =
                format!("{}: {:?}\n", stream.cached_info().config.name, stream.cached_info().state);
            let consumers: Vec<_> = stream.consumers().try_collect().await?;
            for consumer in consumers {
                let _ = writeln!(
                    text,
                    "  {}: delivered {:?}, settled {:?}, {} in progress, {} pending, {} pull requests",
                    consumer.name,
                    consumer.delivered,
                    consumer.ack_floor,
                    consumer.num_ack_pending,
                    consumer.num_pending,
                    consumer.num_waiting
                );
            }
            let mut next = 1;
            while let Ok(message) = stream.get_first_raw_message_by_subject(">", next).await {
                next = message.sequence + 1;
                let _ = writeln!(
                    text,
                    "  {} {} {:?}",
                    message.sequence,
                    message.subject,
                    sorted(&message.headers)
                );
            }
            Ok::<_, async_nats::Error>(text)
        };
        described.await.unwrap_or_else(|error| {
            format!("the server does not describe {}: {error}", stream.name())
        })
    }

    /// The last lines of the log since the last start.
    pub fn log(&self) -> String {
        let log = fs::read_to_string(self.dir().join("nats.log")).unwrap_or_default();
        log.lines()
            .rev()
            .take(60)
            .collect::<Vec<_>>()
            .into_iter()
            .rev()
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Limits the size of a stream in bytes until its topology is ensured again.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn limit_bytes(&self, stream: Stream, bytes: i64) {
        let bus = self.bus().await;
        let found =
            bus.inner.jetstream.get_stream(stream.name()).await.expect("the stream is there");
        let config = async_nats::jetstream::stream::Config {
            max_bytes: bytes,
            ..found.cached_info().config.clone()
        };
        bus.inner.jetstream.update_stream(config).await.expect("the stream can be changed");
    }

    /// Removes a stream with its messages.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn remove_stream(&self, stream: Stream) {
        let bus = self.bus().await;
        bus.inner.jetstream.delete_stream(stream.name()).await.expect("the stream can be deleted");
    }

    /// Removes a stream with its messages and creates it again.
    ///
    /// # Panics
    /// When the server fails.
    pub async fn recreate_stream(&self, stream: Stream) {
        self.remove_stream(stream).await;
        self.bus().await.ensure_topology().await.expect("the server accepts the topology");
    }

    /// A connection with the topology ensured, and blobs in the server's folder.
    ///
    /// # Panics
    /// When that fails.
    pub async fn bus(&self) -> Bus {
        let options = ConnectOptions::new("test").blobs(self.blobs());
        let bus = Bus::connect(&self.url, options).await.expect("the server accepts connections");
        bus.ensure_topology().await.expect("the server accepts the topology");
        bus
    }

    /// A connection as a service, with blobs in the server's folder. Ensures nothing.
    ///
    /// # Panics
    /// When the server rejects the connection.
    pub async fn bus_for(&self, user: User) -> Bus {
        let options = ConnectOptions::new(user.name()).blobs(self.blobs()).user(user);
        Bus::connect(&self.url_for(user), options).await.expect("the user may connect")
    }

    async fn launch(&mut self) {
        let dir = self.dir.path().to_owned();
        let config = dir.join("nats.conf");
        let port = if self.port == 0 { -1 } else { i32::from(self.port) };
        // The limits are explicit: by default they depend on the free disk space of the machine.
        let text = format!(
            "{configuration}listen: \"127.0.0.1:{port}\"\nports_file_dir: {ports:?}\n\
             jetstream {{ store_dir: {store:?}, max_file_store: 100GB, max_memory_store: 1GB }}\n",
            configuration = self.configuration,
            ports = dir.display().to_string(),
            store = self.store().display().to_string(),
        );
        fs::write(&config, text).expect("the temporary folder can be written to");
        let test =
            format!("users: [\n  {{user: {TEST_USER}, password: {}}}\n", password(TEST_USER));
        let users = permissions::config().replacen("users: [\n", &test, 1);
        fs::write(dir.join("permissions.conf"), users)
            .expect("the temporary folder can be written to");
        remove_ports_files(&dir);
        let log =
            fs::File::create(dir.join("nats.log")).expect("the temporary folder can be written to");
        let binary = binary();
        let mut words = self.launcher.iter().map(OsStr::new).chain([binary.as_os_str()]);
        let child = Command::new(words.next().expect("the server's program is one"))
            .args(words)
            .arg("--config")
            .arg(&config)
            .envs(User::ALL.map(|user| (user.password_variable(), password(user.name()))))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file handle can be duplicated"))
            .stderr(log)
            .spawn()
            .unwrap_or_else(|error| panic!("{binary:?} cannot be started: {error}"));
        let child = self.child.insert(child);
        let end = Instant::now() + START_TIMEOUT;
        loop {
            if let Some(url) = read_ports_file(&dir, child.id()) {
                let port = url.rsplit(':').next().and_then(|port| port.parse().ok());
                self.port = port.unwrap_or_else(|| panic!("no port in {url}"));
                self.url = url;
                return;
            }
            let ended = child.try_wait().expect("an own child can be asked for");
            if let (Some(_), _) | (None, true) = (ended, Instant::now() > end) {
                let log = fs::read_to_string(dir.join("nats.log")).unwrap_or_default();
                panic!("nats-server did not start (exit: {ended:?}):\n{log}");
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

impl Drop for NatsServer {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // A failure cannot be handled here.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn binary() -> PathBuf {
    if let Some(named) = env::var_os("CONSTRUCT_TEST_NATS_SERVER") {
        return named.into();
    }
    // Debian puts servers into folders that an ordinary user's PATH does not contain.
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/usr/local/sbin")])
        .map(|dir| dir.join("nats-server"))
        .find(|candidate| candidate.is_file())
        .unwrap_or_else(|| "nats-server".into())
}

/// The server writes `nats-server_<pid>.ports` once it accepts connections.
fn read_ports_file(dir: &Path, pid: u32) -> Option<String> {
    let ends = format!("_{pid}.ports");
    let path = fs::read_dir(dir).ok()?.filter_map(io::Result::ok).map(|entry| entry.path());
    let path = { path }.find(|path| path.to_string_lossy().ends_with(&ends))?;
    let ports: serde_json::Value = serde_json::from_str(&fs::read_to_string(path).ok()?).ok()?;
    ports["nats"][0].as_str().map(str::to_owned)
}

fn remove_ports_files(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.filter_map(io::Result::ok).map(|entry| entry.path()) {
        if path.extension().is_some_and(|extension| extension == "ports") {
            // A leftover that cannot be removed names another process and is not mistaken for ours.
            let _ = fs::remove_file(path);
        }
    }
}

impl Bus {
    /// Publishes a message to `subject` without checking that it belongs there.
    ///
    /// # Errors
    /// As [`Bus::publish`].
    pub async fn publish_raw<M: Message>(
        &self,
        subject: &str,
        message: &M,
    ) -> Result<(), publish::Error> {
        let sealed = self.seal(message).await?;
        match self
            .deliver(subject, sealed, Expectation::unique(self.unique_id()), publish::DEADLINE)
            .await
        {
            Ok(_) => Ok(()),
            Err(Refusal::Failed(error)) => Err(error),
            Err(Refusal::WrongLast) => Err(publish::unexpected_refusal()),
        }
    }

    /// Publishes a command as [`Bus::publish_once`] does, with a payload that cannot be decoded.
    ///
    /// # Errors
    /// As [`Bus::publish`].
    pub async fn publish_unreadable<A: subject::Command>(
        &self,
        address: &A,
        message: &A::Message,
    ) -> Result<(), publish::Error> {
        let sealed = SealedMessage {
            payload: vec![0xff_u8; 3].into(),
            ..self.seal_command(address, message).await?
        };
        match self
            .deliver(&address.subject(), sealed, Expectation::last(0), publish::DEADLINE)
            .await
        {
            Ok(_) => Ok(()),
            Err(Refusal::Failed(error)) => Err(error),
            Err(Refusal::WrongLast) => Err(publish::unexpected_refusal()),
        }
    }

    /// Publishes a tapped message again, unchanged.
    ///
    /// # Errors
    /// As [`Bus::publish`].
    pub async fn republish(&self, tapped: &RawMessage) -> Result<(), publish::Error> {
        let mut headers = HeaderMap::new();
        for (name, value) in
            tapped.headers.iter().filter(|(name, _)| !name.starts_with("Nats-") && name != BLOB)
        {
            headers.insert(name.as_str(), value.as_str());
        }
        let sealed = SealedMessage { headers, payload: tapped.payload.clone() };
        match self
            .deliver(
                &tapped.subject,
                sealed,
                Expectation::unique(self.unique_id()),
                publish::DEADLINE,
            )
            .await
        {
            Ok(_) => Ok(()),
            Err(Refusal::Failed(error)) => Err(error),
            Err(Refusal::WrongLast) => Err(publish::unexpected_refusal()),
        }
    }
}
