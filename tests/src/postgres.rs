//! A PostgreSQL server for one trial, on a disk that can be full.

use std::{
    fs::{self, File},
    io::Write as _,
    net::SocketAddr,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process::{Child, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};
use construct_store::testing::Database;
use tempfile::TempDir;
use uuid::Uuid;

use crate::{
    disk::{Disks, command, unprivileged_user},
    mesh::free_address,
    wait::until,
};

/// The size of its disk in MiB: the cluster takes 30, each copy of the schema 10.
const DISK_SIZE_MIB: u32 = 320;
/// The time limit for a start, including recovery.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// The server. It is deleted when it is dropped.
#[derive(Debug)]
pub struct PostgresServer {
    disks: Disks,
    /// The folder under its disk; the log is beside it.
    folder: TempDir,
    programs: PathBuf,
    address: SocketAddr,
    password: String,
    child: Option<Child>,
}

impl PostgresServer {
    /// Creates a cluster and starts it.
    ///
    /// # Errors
    /// When that fails.
    pub async fn start() -> anyhow::Result<Self> {
        let folder = tempfile::Builder::new().prefix("construct-postgres-").tempdir()?;
        let disk = folder.path().join("disk");
        fs::create_dir(&disk)?;
        let user = unprivileged_user()?;
        if user.is_some() {
            // Processes of another user must reach the folder, but not its content.
            fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
            let owned = command(
                &[],
                &["chown".to_owned(), "postgres".to_owned(), disk.display().to_string()],
            )
            .status()?;
            ensure!(owned.success(), "the folder cannot be given to PostgreSQL's user");
        }
        let disks = Disks::mount(&[(disk.as_path(), DISK_SIZE_MIB)], user)?;
        let password = Uuid::now_v7().simple().to_string();
        let mut server = Self {
            disks,
            folder,
            programs: programs()?,
            address: free_address()?,
            password,
            child: None,
        };
        server.init_cluster().context("initdb")?;
        server.launch()?;
        server.wait_until_accepting().await;
        Ok(server)
    }

    /// Its URL with the password.
    pub fn url(&self) -> String {
        format!("postgres://construct:{}@{}/postgres", self.password, self.address)
    }

    /// Fills its disk.
    ///
    /// # Errors
    /// When that fails.
    pub fn fill(&self) -> anyhow::Result<()> {
        self.disks.fill(&self.disk())
    }

    /// Frees the space of its disk, and restarts it if it has ended, as an operator would. Returns
    /// whether it had ended.
    ///
    /// # Errors
    /// When that fails.
    pub async fn clear(&mut self) -> anyhow::Result<bool> {
        self.disks.clear(&self.disk())?;
        self.ensure_running().await
    }

    /// Kills its first process with `kill -9`, as the kernel does when memory runs out. The other
    /// processes end when they notice; the lock file stays.
    ///
    /// When it is not running.
    /// When it does not run.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let mut child = self.child.take().context("it was started")?;
        child.kill()?;
        child.wait()?;
        Ok(())
    }

    /// Makes sure that it runs, as an operator would: starts it if it has ended, repeatedly,
    /// because it refuses to run while an orphaned process still holds the shared memory. Returns
    /// whether it had ended.
    ///
    /// # Errors
    /// When it does not start again.
    pub async fn ensure_running(&mut self) -> anyhow::Result<bool> {
        let mut ended = false;
        let deadline = tokio::time::Instant::now() + START_TIMEOUT;
        loop {
            let runs = match &mut self.child {
                Some(child) => child.try_wait()?.is_none(),
                None => false,
            };
            if !runs {
                ended = true;
                self.launch()?;
            }
            if self.is_ready()? {
                return Ok(ended);
            }
            ensure!(
                tokio::time::Instant::now() < deadline,
                "PostgreSQL does not come back:\n{}",
                self.log()
            );
            tokio::time::sleep(crate::wait::POLL_INTERVAL).await;
        }
    }

    /// A migrated database on it.
    pub async fn database(&self) -> Database {
        Database::new_on(&self.url()).await
    }

    fn disk(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn program(&self, name: &str) -> String {
        self.programs.join(name).display().to_string()
    }

    fn init_cluster(&self) -> anyhow::Result<()> {
        let script = "umask 077; cat > \"$1/password\" && exec \"$0\" -D \"$1/data\" --pwfile=\"$1/password\" --username=construct \
                      --auth=scram-sha-256 --encoding=UTF8 --locale=C.UTF-8 --no-sync --wal-segsize=1";
        let disk = self.disk().display().to_string();
        let words = ["sh", "-c", script, &self.program("initdb"), &disk].map(str::to_owned);
        let mut making = command(&self.disks.launch_prefix(), &words);
        let mut making = making
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        making.stdin.take().context("it has an input")?.write_all(self.password.as_bytes())?;
        let made = making.wait_with_output()?;
        ensure!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Ok(())
    }

    fn launch(&mut self) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(self.folder.path().join("log"))?;
        let data = self.disk().join("data").display().to_string();
        let mut words = vec![self.program("postgres"), "-D".to_owned(), data];
        let port = format!("port={}", self.address.port());
        for option in [
            "listen_addresses=127.0.0.1",
            &port,
            "unix_socket_directories=",
            "max_connections=200",
            "max_wal_size=32MB",
            "min_wal_size=2MB",
            "timezone=UTC",
            // Checkpoints also write to a full disk.
            "checkpoint_timeout=30s",
        ] {
            words.extend(["-c".to_owned(), option.to_owned()]);
        }
        let mut starting = command(&self.disks.launch_prefix(), &words);
        let child = starting
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()?;
        self.child = Some(child);
        Ok(())
    }

    fn is_ready(&self) -> anyhow::Result<bool> {
        let port = self.address.port().to_string();
        let words =
            [&*self.program("pg_isready"), "-q", "-h", "127.0.0.1", "-p", &port].map(str::to_owned);
        Ok(command(&[], &words).status()?.success())
    }

    async fn wait_until_accepting(&self) {
        until("PostgreSQL to accept connections", START_TIMEOUT, async || match self.is_ready() {
            Ok(true) => Ok(()),
            other => Err(format!("{other:?}\n{}", self.log())),
        })
        .await;
    }
}

impl Drop for PostgresServer {
    fn drop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        // Stop immediately, without a checkpoint: the data is not needed. The children end as well,
        // which `kill -9` would orphan.
        let _ =
            command(&[], &["kill".to_owned(), "-QUIT".to_owned(), child.id().to_string()]).status();
        let _ = child.wait();
        if std::thread::panicking() {
            let log = self.log();
            let last: Vec<_> = log.lines().rev().take(100).collect();
            eprintln!("---- postgresql, its last lines ----");
            for line in last.iter().rev() {
                eprintln!("{line}");
            }
        }
    }
}

/// The folder with the server's programs: `CONSTRUCT_TEST_POSTGRES`, or the newest version that
/// Debian's packages installed.
fn programs() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os("CONSTRUCT_TEST_POSTGRES") {
        return Ok(named.into());
    }
    let versions = fs::read_dir("/usr/lib/postgresql")
        .context("PostgreSQL is not installed; `./dev test` installs it")?;
    let newest = versions
        .filter_map(Result::ok)
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .max();
    let newest = newest.context("PostgreSQL is not installed; `./dev test` installs it")?;
    Ok(PathBuf::from(format!("/usr/lib/postgresql/{newest}/bin")))
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader};

    use super::*;

    /// Reports that it began, then computes for seconds without checking whether the first process
    /// is alive.
    const BUSY: &str = "DO $$ BEGIN RAISE NOTICE 'begun'; \
                        PERFORM count(*) FROM (SELECT generate_series(1, 30000000)) AS numbers; END $$";

    #[tokio::test]
    async fn killed_server_restarts_after_its_processes_ended() {
        let mut server = PostgresServer::start().await.unwrap();
        let database = server.database().await;
        let rows = database.contents().await;
        let words = [&*server.program("psql"), &server.url(), "-X", "-c", BUSY].map(str::to_owned);
        let mut busy = command(&[], &words).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        BufReader::new(busy.stderr.take().unwrap()).read_line(&mut said).unwrap();
        assert!(said.contains("begun"), "{said}");
        server.kill().unwrap();
        assert!(!server.is_ready().unwrap(), "no process listens");
        assert!(server.ensure_running().await.unwrap(), "it had ended");
        assert!(server.log().contains("is still in use"), "no process was left:\n{}", server.log());
        assert!(!server.ensure_running().await.unwrap(), "it runs");
        assert_eq!(database.contents().await, rows);
        busy.wait().unwrap();
    }
}
