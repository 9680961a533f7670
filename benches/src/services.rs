//! The four services, started from beside this binary and stopped when dropped.

use std::{
    net::{Ipv4Addr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, ensure};

/// A running mesh.
#[derive(Debug)]
pub(crate) struct Services {
    children: Vec<Child>,
    pub(crate) gateway: String,
}

impl Services {
    /// Starts them with the settings of the environment, and waits until they are ready.
    pub(crate) async fn start(home: &Path, workspace: &Path) -> anyhow::Result<Self> {
        let folder = std::env::current_exe()?.parent().map(Path::to_owned).context("this binary lies nowhere")?;
        let gateway = format!("127.0.0.1:{}", free_port()?);
        let mut services = Self { children: Vec::new(), gateway: format!("http://{gateway}") };
        // Another part of the process may have chosen one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().build()?;
        for service in ["gateway", "reconciler", "interpreter", "providers"] {
            let health = format!("127.0.0.1:{}", free_port()?);
            let log = std::fs::File::create(home.join(format!("{service}.log")))?;
            let child = Command::new(folder.join(format!("construct-{service}")))
                .env("CONSTRUCT_DATA_DIR", home.join("data"))
                .env("CONSTRUCT_GATEWAY_LISTEN", &gateway)
                .env("CONSTRUCT_HEALTH_LISTEN", &health)
                .env("CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS", workspace)
                .env("CONSTRUCT_LOG", "warn")
                .stdin(Stdio::null())
                .stdout(log.try_clone()?)
                .stderr(log)
                .spawn()
                .with_context(|| format!("{service} does not start"))?;
            services.children.push(child);
            let url = format!("http://{health}/readyz");
            let mut ready = false;
            for _ in 0..1200 {
                if client.get(&url).send().await.is_ok_and(|response| response.status().is_success()) {
                    ready = true;
                    break;
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            let log = || std::fs::read_to_string(home.join(format!("{service}.log"))).unwrap_or_default();
            ensure!(ready, "{service} is not ready:\n{}", log());
        }
        Ok(services)
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
