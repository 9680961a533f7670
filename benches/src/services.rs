//! The four services, started from the folder of this binary and stopped when dropped.

use std::{
    net::{Ipv4Addr, TcpListener},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, bail};
use construct_proto::v1::{
    self, agent_service_client::AgentServiceClient,
    model_provider_service_client::ModelProviderServiceClient,
    model_service_client::ModelServiceClient,
};
use tonic::transport::Channel;

/// A running mesh.
#[derive(Debug)]
pub(crate) struct Services {
    running: Vec<Service>,
    pub(crate) gateway: String,
}

impl Services {
    /// Starts the services with the environment's settings, and waits until they are ready.
    pub(crate) async fn start(home: &Path, workspace: &Path) -> anyhow::Result<Self> {
        let gateway = format!("127.0.0.1:{}", free_port()?);
        let mut services = Self { running: Vec::new(), gateway: format!("http://{gateway}") };
        // The reconciler creates the streams that the others wait for.
        for service in ["reconciler", "gateway", "interpreter", "providers"] {
            let workspace = workspace.to_string_lossy();
            let settings = [
                ("CONSTRUCT_GATEWAY_LISTEN", gateway.as_str()),
                ("CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS", &workspace),
            ];
            services.running.push(Service::start(service, home, &settings).await?);
        }
        Ok(services)
    }

    /// Names and process ids of the services.
    pub(crate) fn pids(&self) -> Vec<(String, u32)> {
        self.running.iter().map(|service| (service.name.clone(), service.child.id())).collect()
    }
}

/// One service; killed when dropped.
#[derive(Debug)]
pub(crate) struct Service {
    name: String,
    child: Child,
}

impl Service {
    /// Starts a service with the environment's settings and `settings`, and waits until it is
    /// ready.
    pub(crate) async fn start(
        service: &str,
        home: &Path,
        settings: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let folder = std::env::current_exe()?
            .parent()
            .map(Path::to_owned)
            .context("this binary has no folder")?;
        // Another part of the process may have installed one already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder().no_proxy().build()?;
        let health = format!("127.0.0.1:{}", free_port()?);
        let log = std::fs::File::create(home.join(format!("{service}.log")))?;
        let child = Command::new(folder.join(format!("construct-{service}")))
            .env("CONSTRUCT_DATA_DIR", home.join("data"))
            .env("CONSTRUCT_HEALTH_LISTEN", &health)
            .env("CONSTRUCT_LOG", "warn")
            .envs(settings.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("{service} does not start"))?;
        let started = Self { name: service.to_owned(), child };
        let url = format!("http://{health}/readyz");
        for _ in 0..1200 {
            if client.get(&url).send().await.is_ok_and(|response| response.status().is_success()) {
                return Ok(started);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        let log = std::fs::read_to_string(home.join(format!("{service}.log"))).unwrap_or_default();
        bail!("{service} is not ready:\n{log}")
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Creates an agent whose model runs a script.
pub(crate) async fn scripted_agent(
    channel: &Channel,
    name: &str,
    script: &serde_json::Value,
) -> anyhow::Result<()> {
    let provider = v1::ModelProviderSpec {
        name: name.to_owned(),
        r#type: v1::ModelProviderType::Scripted.into(),
        script: script.to_string(),
        ..Default::default()
    };
    let request = v1::CreateModelProviderRequest { spec: Some(provider), ..Default::default() };
    ModelProviderServiceClient::new(channel.clone()).create_model_provider(request).await?;
    let model =
        v1::ModelSpec { name: name.to_owned(), provider: name.to_owned(), ..Default::default() };
    let request = v1::CreateModelRequest { spec: Some(model), ..Default::default() };
    ModelServiceClient::new(channel.clone()).create_model(request).await?;
    let agent =
        v1::AgentSpec { name: name.to_owned(), model: name.to_owned(), ..Default::default() };
    let request = v1::CreateAgentRequest { spec: Some(agent), ..Default::default() };
    AgentServiceClient::new(channel.clone()).create_agent(request).await?;
    Ok(())
}

pub(crate) fn free_port() -> std::io::Result<u16> {
    Ok(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port())
}
