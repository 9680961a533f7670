//! Proxies by others, where `benches/peers/setup` could set them up.

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

/// How long one may take to start.
const START: Duration = Duration::from_secs(120);
/// How long one may take to end by itself.
const END: Duration = Duration::from_secs(5);
/// How much of what one has said is shown when it is left out.
const LAST_WORDS: usize = 20;

/// A proxy that runs.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    pub(crate) target: Target,
    /// Whether it passes streams on. One that cannot is measured by what it can.
    pub(crate) streams: bool,
    running: Running,
}

/// A process, ended when dropped.
#[derive(Debug)]
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Asked first, because one that has processes of its own ends them then.
        let _ = Command::new("kill").arg(self.0.id().to_string()).stderr(Stdio::null()).status();
        let asked = Instant::now();
        while asked.elapsed() < END && matches!(self.0.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts those that are there; says which are not.
pub(crate) async fn start(folder: &Path, work: &Path, upstream: SocketAddr) -> Vec<Peer> {
    let mut peers = Vec::new();
    for (name, ready, start) in [
        ("TensorZero", "tensorzero/ready", tensorzero as Start),
        ("Portkey", "portkey/ready", portkey),
        ("LiteLLM", "litellm/ready", litellm),
    ] {
        if !folder.join(ready).exists() {
            eprintln!("{name} is not installed and is left out (benches/peers/setup)");
            continue;
        }
        match begin(name, start, folder, work, upstream).await {
            Ok(peer) => peers.push(peer),
            Err(error) => {
                let log = fs::read_to_string(log(work, name)).unwrap_or_default();
                let last: Vec<&str> = log.lines().rev().take(LAST_WORDS).collect();
                eprintln!("{name} does not work here and is left out: {error:#}");
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
    peer.answers().await?;
    if let Err(error) = call(&peer.target, true).await {
        eprintln!("{name} passes no stream on: {error:#}");
        peer.streams = false;
    }
    Ok(peer)
}

impl Peer {
    async fn answers(&mut self) -> anyhow::Result<()> {
        let deadline = tokio::time::Instant::now() + START;
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
    // It does not start without a key of its own, and refuses one that is easily guessed.
    let key = format!("sk-{}{}", Uuid::now_v7().simple(), Uuid::now_v7().simple());
    let mut command = command(&folder.join("litellm/bin/litellm"), work, "LiteLLM")?;
    let child = command
        .env("LITELLM_MASTER_KEY", &key)
        // It would fetch a list of prices while it starts, and again in each worker. Where the
        // network is slow or not there, a worker takes longer than the 5 s that its supervisor
        // believes in it, which kills it, for ever.
        .env("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        .args(["--timeout_worker_healthcheck", &START.as_secs().to_string()])
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
        // What stands in the way of an upstream on this machine.
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
    let (found, url) = mpsc::channel();
    // To the end, because an output that nobody reads would stop it.
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // Among the lines of its log one says where it serves.
            if let Some(url) = line.strip_prefix("http://") {
                // An error only says that it was known before.
                let _ = found.send(url.to_owned());
            }
        }
    });
    let url = url.recv_timeout(START).context("it does not say where it serves")?;
    let (host, path) = url.split_once('/').context("it names no path")?;
    let address: SocketAddr =
        host.replace("0.0.0.0", "127.0.0.1").replace("localhost", "127.0.0.1").parse()?;
    let path = format!("/{}/chat/completions", path.trim_end_matches('/'));
    Ok((running, target(address, &path, "tensorzero::model_name::m", &[])))
}
