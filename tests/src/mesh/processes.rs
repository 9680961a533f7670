//! The services of a mesh as processes: start, readiness, metrics and end.

use std::{
    fs::{self, File},
    net::SocketAddr,
    os::unix::net::UnixListener,
    process::{Child, Command, Stdio},
    sync::PoisonError,
    time::Duration,
};

use anyhow::{Context as _, ensure};
use construct_bus::testing::NatsServer;

use super::{Mesh, STOP_TIMEOUT, Service, faults, free_address, guest_cache, with_socket};
use crate::{
    client::TURN_TIMEOUT,
    disk::{self, Disks},
    http, wait,
};

/// The time limit for a service to become ready. The interpreter's first start on a machine
/// compiles its guest.
const READY_TIMEOUT: Duration = Duration::from_secs(180);

/// The variable with NATS' address.
const NATS_URL: &str = "CONSTRUCT_NATS_URL";

/// The key that model tokens are signed with.
const TOKEN_KEY: &str = "test:AGRjYmE5ODc2NTQzMjEwZmVkY2JhOTg3NjU0MzIxMA8=";

impl Mesh {
    /// Starts a service that is not running.
    pub fn spawn(&mut self, service: Service) -> anyhow::Result<()> {
        let child = self.launch(service, false, self.health[&service], None)?;
        self.processes.insert(service, child);
        Ok(())
    }

    /// Starts a service that is not running and passes it a socket, as systemd does.
    ///
    /// # Errors
    /// When it does not start.
    pub fn spawn_with_socket(
        &mut self,
        service: Service,
        socket: &UnixListener,
    ) -> anyhow::Result<()> {
        let child = self.launch(service, false, self.health[&service], Some(socket))?;
        self.processes.insert(service, child);
        Ok(())
    }

    /// Starts a replica of a service that does not listen, and waits until it is ready. It runs as
    /// long as the mesh, unless it is stopped by the returned number.
    ///
    /// # Errors
    /// When it does not start.
    pub async fn start_replica(&mut self, service: Service) -> anyhow::Result<usize> {
        let health = free_address()?;
        let child = self.launch(service, true, health, None)?;
        self.replicas.push(Some((service, child)));
        let client = http::client().build()?;
        wait::until("a second process to be ready", READY_TIMEOUT, async || {
            let response = client.get(format!("http://{health}/readyz")).send().await?;
            response.error_for_status().map(drop)
        })
        .await;
        Ok(self.replicas.len() - 1)
    }

    /// Starts a replica of a service that does not listen, without waiting for readiness. Returns
    /// its number.
    ///
    /// # Errors
    /// When it does not start.
    pub fn spawn_replica(&mut self, service: Service) -> anyhow::Result<usize> {
        let child = self.launch(service, true, free_address()?, None)?;
        self.replicas.push(Some((service, child)));
        Ok(self.replicas.len() - 1)
    }

    /// Kills a replica as a crash would.
    ///
    /// # Errors
    /// When it is not running.
    pub fn kill_replica(&mut self, replica: usize) -> anyhow::Result<()> {
        let (_, mut child) = self.replicas[replica].take().context("the process does not run")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Asks a replica to stop and waits for it. Returns its exit code.
    ///
    /// # Errors
    /// When it is not running or does not stop.
    pub async fn stop_replica(&mut self, replica: usize) -> anyhow::Result<i32> {
        let (service, child) = self.replicas[replica].take().context("the process does not run")?;
        stop_process(service, child).await
    }

    /// The process id of a replica.
    pub fn replica_pid(&self, replica: usize) -> Option<u32> {
        self.replicas[replica].as_ref().map(|(_, child)| child.id())
    }

    fn launch(
        &self,
        service: Service,
        replica: bool,
        health: SocketAddr,
        socket: Option<&UnixListener>,
    ) -> anyhow::Result<Child> {
        let program = self.program(service)?;
        let log = File::options().append(true).create(true).open(self.log_path(service))?;
        // Each service uses its own NATS user, also behind a proxy, so that every test shows that
        // its permissions suffice.
        let nats = self
            .environment
            .iter()
            .rfind(|(key, _)| key == NATS_URL)
            .map_or(self.nats.url(), |(_, url)| url);
        let nats = if nats.contains('@') {
            nats.to_owned()
        } else {
            NatsServer::address_for(nats, service.user())
        };
        let (mut command, input) = match socket {
            Some(socket) => with_socket(&program, &[], socket)?,
            None => {
                let mut prefix = self.disks.as_ref().map(Disks::launch_prefix).unwrap_or_default();
                if let Some(clocks) = &self.clocks {
                    prefix.extend(clocks.launch_prefix(&faults::clock(service, replica))?);
                }
                (disk::command(&prefix, &[program.display().to_string()]), Stdio::null())
            }
        };
        let child = command
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("RUST_BACKTRACE", "1")
            .env("CONSTRUCT_DATABASE_URL", self.database.url())
            .env("CONSTRUCT_DATA_DIR", &self.data)
            .env("CONSTRUCT_INTERPRETER_CACHE_DIR", guest_cache()?)
            .env("CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS", self.workspace())
            .env("CONSTRUCT_MASTER_KEY", "test:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=")
            .env("CONSTRUCT_SECRETS_KEY", "test:ZmVkY2JhOTg3NjU0MzIxMGZlZGNiYTk4NzY1NDMyMTA=")
            .env("CONSTRUCT_TOKEN_KEY", TOKEN_KEY)
            .env("CONSTRUCT_GATEWAY_LISTEN", self.gateway.to_string())
            .env("CONSTRUCT_GATEWAY_SCANS_DIR", self.scans())
            .env("CONSTRUCT_SCANNER_DIR", self.scans())
            .env("CONSTRUCT_SCANNER_GATEWAY_URL", self.gateway_url())
            .env("CONSTRUCT_HEALTH_LISTEN", health.to_string())
            .env(
                "CONSTRUCT_LOG",
                std::env::var("CONSTRUCT_TEST_LOG").unwrap_or_else(|_| "info".to_owned()),
            )
            .envs(self.environment.iter().map(|(key, value)| (key, value)))
            .env(NATS_URL, nats)
            .stdin(input)
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{} does not start", service.name()))?;
        if self.clocks.is_some() {
            self.faked_clock_pids.lock().unwrap_or_else(PoisonError::into_inner).push(child.id());
        }
        Ok(child)
    }

    /// Starts every service that is not running, and waits until all are ready.
    pub async fn start_services(&mut self) -> anyhow::Result<()> {
        for service in Service::ALL {
            if !self.processes.contains_key(&service) {
                self.spawn(service)?;
            }
        }
        for service in Service::ALL {
            self.wait_until_ready(service).await?;
        }
        Ok(())
    }

    /// A service's readiness: the status code and the body.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn readiness(&self, service: Service) -> anyhow::Result<(u16, String)> {
        let url = format!("http://{}/readyz", self.health[&service]);
        let response = http::client().build()?.get(&url).send().await?;
        Ok((response.status().as_u16(), response.text().await?))
    }

    /// The metrics of a service, in Prometheus' text format.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn metrics(&self, service: Service) -> anyhow::Result<String> {
        let url = format!("http://{}/metrics", self.health[&service]);
        Ok(http::client().build()?.get(&url).send().await?.error_for_status()?.text().await?)
    }

    /// Waits until the metrics of a service contain `line`.
    pub async fn wait_for_metric(&self, service: Service, line: &str) {
        wait::until(line, TURN_TIMEOUT, async || {
            let page = self.metrics(service).await.unwrap_or_else(|error| format!("{error:#}"));
            if page.lines().any(|found| found == line) { Ok(()) } else { Err(page) }
        })
        .await;
    }

    /// Waits until a service reports that it is ready.
    pub async fn wait_until_ready(&mut self, service: Service) -> anyhow::Result<()> {
        let url = format!("http://{}/readyz", self.health[&service]);
        let client = http::client().build()?;
        let deadline = tokio::time::Instant::now() + READY_TIMEOUT;
        loop {
            if let Some(child) = self.processes.get_mut(&service)
                && let Some(status) = child.try_wait()?
            {
                anyhow::bail!("{} ended with {status}:\n{}", service.name(), self.log(service));
            }
            let last = match client.get(&url).send().await {
                Ok(response) if response.status().is_success() => return Ok(()),
                Ok(response) => response.text().await.unwrap_or_default(),
                Err(error) => error.to_string(),
            };
            ensure!(
                tokio::time::Instant::now() < deadline,
                "{} is not ready: {last}\n{}",
                service.name(),
                self.log(service)
            );
            tokio::time::sleep(wait::POLL_INTERVAL).await;
        }
    }

    /// Kills a service as a crash would: `kill -9`.
    pub fn kill(&mut self, service: Service) -> anyhow::Result<()> {
        if let Some(mut child) = self.processes.remove(&service) {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Asks a service to stop, as a deployment does, and waits for it. Returns its exit code.
    ///
    /// # Errors
    /// When it is not running or does not stop.
    pub async fn stop(&mut self, service: Service) -> anyhow::Result<i32> {
        let child = self.processes.remove(&service).context("the service does not run")?;
        stop_process(service, child).await
    }

    /// `kill -9`, then a new process.
    pub async fn crash(&mut self, service: Service) -> anyhow::Result<()> {
        self.kill(service)?;
        self.spawn(service)?;
        self.wait_until_ready(service).await
    }

    /// Freezes a service, as a hanging machine would, until [`Mesh::resume`].
    pub fn pause(&self, service: Service) -> anyhow::Result<()> {
        self.signal(service, "-STOP")
    }

    /// Continues a paused service.
    pub fn resume(&self, service: Service) -> anyhow::Result<()> {
        self.signal(service, "-CONT")
    }

    fn signal(&self, service: Service, signal: &str) -> anyhow::Result<()> {
        let pid = self.pid(service).context("the service does not run")?;
        let status = Command::new("kill").args([signal, &pid.to_string()]).status()?;
        anyhow::ensure!(status.success(), "kill {signal} failed");
        Ok(())
    }

    /// The process id of a running service.
    pub fn pid(&self, service: Service) -> Option<u32> {
        self.processes.get(&service).map(Child::id)
    }

    /// The resident memory of a service in bytes.
    ///
    /// # Errors
    /// When it is not running.
    pub fn resident_memory(&self, service: Service) -> anyhow::Result<u64> {
        self.memory(service, "VmRSS:")
    }

    /// The peak memory of a service in bytes.
    ///
    /// # Errors
    /// When it is not running.
    pub fn peak_memory(&self, service: Service) -> anyhow::Result<u64> {
        self.memory(service, "VmHWM:")
    }

    fn memory(&self, service: Service, name: &str) -> anyhow::Result<u64> {
        let pid = self.pid(service).context("the service does not run")?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let size =
            status.lines().find_map(|line| line.strip_prefix(name)).context("no size is told")?;
        Ok(size.trim().trim_end_matches("kB").trim().parse::<u64>()? * 1024)
    }
}

/// Asks a process to stop and waits for it.
async fn stop_process(service: Service, mut child: Child) -> anyhow::Result<i32> {
    Command::new("kill").args(["-TERM", &child.id().to_string()]).status()?;
    let deadline = tokio::time::Instant::now() + STOP_TIMEOUT;
    loop {
        if let Some(status) = child.try_wait()? {
            return status.code().context("the service ended by a signal");
        }
        if tokio::time::Instant::now() >= deadline {
            child.kill()?;
            child.wait()?;
            anyhow::bail!("{} did not stop within {STOP_TIMEOUT:?}", service.name());
        }
        tokio::time::sleep(wait::POLL_INTERVAL).await;
    }
}
