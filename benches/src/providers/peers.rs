//! Other proxies, if `benches/peers/setup` could install them.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, ensure};
use uuid::Uuid;

use super::http::Target;
use crate::services::free_port;

/// Timeout of a peer's start.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// Timeout of a peer's termination.
const STOP_TIMEOUT: Duration = Duration::from_secs(5);
/// Log lines shown for a peer that is skipped.
const MAX_LOG_LINES: usize = 20;

/// A running proxy.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    pub(crate) target: Target,
    /// Whether it supports streaming. Otherwise only complete responses are measured.
    pub(crate) streams: bool,
    running: Running,
}

/// A process, terminated when dropped.
#[derive(Debug)]
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // SIGTERM first, so that it can end its own processes.
        let _ = Command::new("kill").arg(self.0.id().to_string()).stderr(Stdio::null()).status();
        let asked = Instant::now();
        while asked.elapsed() < STOP_TIMEOUT && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts the installed peers and reports the others.
pub(crate) async fn start(folder: &Path, work: &Path, upstream: SocketAddr) -> Vec<Peer> {
    let mut peers = Vec::new();
    for (name, ready, start) in [
        ("TensorZero", "tensorzero/ready", tensorzero as Start),
        ("Portkey", "portkey/ready", portkey),
        ("LiteLLM", "litellm/ready", litellm),
    ] {
        if !folder.join(ready).exists() {
            eprintln!("{name} is not installed and is skipped (benches/peers/setup)");
            continue;
        }
        match begin(name, start, folder, work, upstream).await {
            Ok(peer) => peers.push(peer),
            Err(error) => {
                let log = fs::read_to_string(log(work, name)).unwrap_or_default();
                let last: Vec<&str> = log.lines().rev().take(MAX_LOG_LINES).collect();
                eprintln!("{name} does not work here and is skipped: {error:#}");
                last.into_iter().rev().for_each(|line| eprintln!("    {line}"));
            }
        }
    }
    peers
}

type Start = fn(&Path, &Path, SocketAddr) -> anyhow::Result<(Running, Target)>;

async fn begin(
    name: &'static str,
    start: Start,
    folder: &Path,
    work: &Path,
    upstream: SocketAddr,
) -> anyhow::Result<Peer> {
    let (running, target) = start(folder, work, upstream)?;
    let mut peer = Peer { name, target, streams: true, running };
    peer.wait_ready().await?;
    if let Err(error) = call(&peer.target, true).await {
        eprintln!("{name} does not support streaming: {error:#}");
        peer.streams = false;
    }
    Ok(peer)
}

impl Peer {
    async fn wait_ready(&mut self) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + START_TIMEOUT;
        loop {
            let Err(error) = call(&self.target, false).await else { return Ok(()) };
            if let Some(status) = self.running.0.try_wait()? {
                return Err(error.context(format!("it has ended ({status})")));
            }
            ensure!(tokio::time::Instant::now() < deadline, "it does not answer: {error:#}");
            tokio::time::sleep(Duration::from_millis(250)).await;
        }
    }
}

async fn call(target: &Target, streamed: bool) -> anyhow::Result<()> {
    let called = async { target.connect(streamed).await?.call().await };
    tokio::time::timeout(Duration::from_secs(10), called)
        .await
        .context("no answer in time")?
        .map(drop)
}

fn log(work: &Path, name: &str) -> PathBuf {
    work.join(format!("{name}.log"))
}

fn command(program: &Path, work: &Path, name: &str) -> anyhow::Result<Command> {
    let log = fs::File::create(log(work, name))?;
    let mut command = Command::new(program);
    command
        .current_dir(work)
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log)
        .env("OPENAI_API_KEY", "none");
    Ok(command)
}

fn target(address: SocketAddr, path: &str, model: &str, headers: &[(&str, String)]) -> Target {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    Target { address, path: path.to_owned(), headers, model: model.to_owned() }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn litellm(folder: &Path, work: &Path, upstream: SocketAddr) -> anyhow::Result<(Running, Target)> {
    let config = work.join("litellm.yaml");
    fs::write(
        &config,
        format!(
            "model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m\n      api_base: http://{upstream}/v1\n      \
             api_key: none\n"
        ),
    )?;
    let port = free_port()?;
    // It requires a key of its own, and rejects one that is easy to guess.
    let key = format!("sk-{}{}", Uuid::now_v7().simple(), Uuid::now_v7().simple());
    let mut command = command(&folder.join("litellm/bin/litellm"), work, "LiteLLM")?;
    let child = command
        .env("LITELLM_MASTER_KEY", &key)
        // By default it downloads a price list at the start, and again in each worker. With a slow
        // or missing network, a worker then exceeds the 5 s timeout of its supervisor, which kills
        // it in a loop.
        .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        .args(["--timeout_worker_healthcheck", &START_TIMEOUT.as_secs().to_string()])
        .args(["--host", "127.0.0.1", "--num_workers", "2", "--port", &port.to_string()])
        .arg("--config")
        .arg(&config)
        .spawn()?;
    let headers = [("authorization", format!("Bearer {key}"))];
    Ok((Running(child), target(local(port), "/v1/chat/completions", "m", &headers)))
}

fn portkey(folder: &Path, work: &Path, upstream: SocketAddr) -> anyhow::Result<(Running, Target)> {
    let port = free_port()?;
    let script = folder.join("portkey/node_modules/@portkey-ai/gateway/build/start-server.js");
    let mut command = command(Path::new("node"), work, "Portkey")?;
    let child = command
        .arg(script)
        .args(["--headless", &format!("--port={port}")])
        // Disables its protection against local upstreams.
        .env("TRUSTED_CUSTOM_HOSTS", "127.0.0.1,localhost")
        .spawn()?;
    let headers = [
        ("x-portkey-provider", "openai".to_owned()),
        ("x-portkey-custom-host", format!("http://{upstream}/v1")),
        ("authorization", "Bearer none".to_owned()),
    ];
    Ok((Running(child), target(local(port), "/v1/chat/completions", "m", &headers)))
}

fn tensorzero(
    folder: &Path,
    work: &Path,
    upstream: SocketAddr,
) -> anyhow::Result<(Running, Target)> {
    let config = work.join("tensorzero.toml");
    fs::write(
        &config,
        format!(
            "[gateway]\nobservability.enabled = false\n\n[models.m]\nrouting = [\"up\"]\n\n[models.m.providers.up]\ntype = \
             \"openai\"\nmodel_name = \"m\"\napi_base = \"http://{upstream}/v1/\"\napi_key_location = \"none\"\n"
        ),
    )?;
    let mut command = command(&folder.join("tensorzero/bin/python"), work, "TensorZero")?;
    let child = command
        .arg(folder.join("serve_tensorzero.py"))
        .arg(&config)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut running = Running(child);
    let stdout = running.0.stdout.take().context("it has an output")?;
    let (address_found, url) = mpsc::channel();
    // Read to the end, because a full pipe would block it.
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // One of its log lines has the address.
            if let Some(url) = line.strip_prefix("http://") {
                // Fails only when the address is already known.
                let _ = address_found.send(url.to_owned());
            }
        }
    });
    let url = url.recv_timeout(START_TIMEOUT).context("it does not report its address")?;
    let (host, path) = url.split_once('/').context("the address has no path")?;
    let address: SocketAddr =
        host.replace("0.0.0.0", "127.0.0.1").replace("localhost", "127.0.0.1").parse()?;
    let path = format!("/{}/chat/completions", path.trim_end_matches('/'));
    Ok((running, target(address, &path, "tensorzero::model_name::m", &[])))
}
