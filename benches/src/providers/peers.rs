//! Proxies by others, where `benches/peers/setup` could set them up.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::Context as _;
use uuid::Uuid;

use super::http::Target;
use crate::services::free_port;

/// How long one may take to start.
const START: Duration = Duration::from_secs(120);

/// A proxy that runs; killed when dropped.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    pub(crate) target: Target,
    /// Whether it passes streams on. One that cannot is measured by what it can.
    pub(crate) streams: bool,
    child: Child,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
        match start(folder, work, upstream) {
            Ok((child, target)) => {
                let mut peer = Peer { name, target, streams: true, child };
                match answers(&peer.target).await {
                    Ok(()) => {
                        if let Err(error) = call(&peer.target, true).await {
                            eprintln!("{name} passes no stream on: {error:#}");
                            peer.streams = false;
                        }
                        peers.push(peer);
                    }
                    Err(error) => eprintln!("{name} does not answer and is left out: {error:#}"),
                }
            }
            Err(error) => eprintln!("{name} does not start and is left out: {error:#}"),
        }
    }
    peers
}

type Start = fn(&Path, &Path, SocketAddr) -> anyhow::Result<(Child, Target)>;

async fn answers(target: &Target) -> anyhow::Result<()> {
    let deadline = tokio::time::Instant::now() + START;
    loop {
        match call(target, false).await {
            Ok(()) => return Ok(()),
            Err(error) if tokio::time::Instant::now() > deadline => return Err(error),
            Err(_) => tokio::time::sleep(Duration::from_millis(250)).await,
        }
    }
}

async fn call(target: &Target, streamed: bool) -> anyhow::Result<()> {
    let called = async { target.connect(streamed).await?.call().await };
    tokio::time::timeout(Duration::from_secs(10), called).await.context("no answer in time")?.map(drop)
}

fn command(program: &Path, work: &Path, name: &str) -> anyhow::Result<Command> {
    let log = fs::File::create(work.join(format!("{name}.log")))?;
    let mut command = Command::new(program);
    command.current_dir(work).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).env("OPENAI_API_KEY", "none");
    Ok(command)
}

fn target(address: SocketAddr, path: &str, model: &str, headers: &[(&str, String)]) -> Target {
    let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    Target { address, path: path.to_owned(), headers, model: model.to_owned() }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

fn litellm(folder: &Path, work: &Path, upstream: SocketAddr) -> anyhow::Result<(Child, Target)> {
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
    let mut command = command(&folder.join("litellm/bin/litellm"), work, "litellm")?;
    let child = command
        .env("LITELLM_MASTER_KEY", &key)
        .args(["--host", "127.0.0.1", "--num_workers", "2", "--port", &port.to_string()])
        .arg("--config")
        .arg(&config)
        .spawn()?;
    let headers = [("authorization", format!("Bearer {key}"))];
    Ok((child, target(local(port), "/v1/chat/completions", "m", &headers)))
}

fn portkey(folder: &Path, work: &Path, upstream: SocketAddr) -> anyhow::Result<(Child, Target)> {
    let port = free_port()?;
    let script = folder.join("portkey/node_modules/@portkey-ai/gateway/build/start-server.js");
    let mut command = command(Path::new("node"), work, "portkey")?;
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
    Ok((child, target(local(port), "/v1/chat/completions", "m", &headers)))
}

fn tensorzero(folder: &Path, work: &Path, upstream: SocketAddr) -> anyhow::Result<(Child, Target)> {
    let config = work.join("tensorzero.toml");
    fs::write(
        &config,
        format!(
            "[gateway]\nobservability.enabled = false\n\n[models.m]\nrouting = [\"up\"]\n\n[models.m.providers.up]\ntype = \
             \"openai\"\nmodel_name = \"m\"\napi_base = \"http://{upstream}/v1/\"\napi_key_location = \"none\"\n"
        ),
    )?;
    let mut command = command(&folder.join("tensorzero/bin/python"), work, "tensorzero")?;
    let mut child = command.arg(folder.join("serve_tensorzero.py")).arg(&config).stdout(Stdio::piped()).spawn()?;
    let stdout = child.stdout.take().context("it has an output")?;
    // Among the lines of its log one says where it serves.
    let mut lines = BufReader::new(stdout).lines().map_while(Result::ok);
    let url = lines.find_map(|line| line.strip_prefix("http://").map(str::to_owned));
    let ended = || fs::read_to_string(work.join("tensorzero.log")).unwrap_or_default();
    let url = url.with_context(|| format!("it ended: {}", ended()))?;
    // A log that nobody reads would stop it.
    std::thread::spawn(move || lines.for_each(drop));
    let (host, path) = url.split_once('/').context("it names no path")?;
    let address: SocketAddr = host.replace("0.0.0.0", "127.0.0.1").replace("localhost", "127.0.0.1").parse()?;
    let path = format!("/{}/chat/completions", path.trim_end_matches('/'));
    Ok((child, target(address, &path, "tensorzero::model_name::m", &[])))
}
