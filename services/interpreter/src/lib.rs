//! The interpreter: runs JavaScript in Wasm, hosts the tools, confines files and commands.
//!
//! A command on JetStream carries the scripts of one assistant message. Every host call is
//! journaled. When a process dies, the next one continues its script and repeats no side effect
//! (promises 2 and 3 in ARCHITECTURE.md). The process holds no state that matters.

mod blocking;
pub mod command;
pub mod confine;
mod execution;
mod facts;
mod host;
mod journal;
mod metrics;
mod modules;
mod policy;
mod report;
mod running;
pub mod sandbox;
mod scrub;
#[cfg(test)]
mod test_requirements;
mod tiers;
pub mod tools;
pub mod workspace;
mod workspaces;

use std::{
    collections::BTreeMap,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context as _;
use construct_bus::{Bus, ConnectOptions, ConsumeOptions, Pool, Tls, User, files, subject};
use construct_domain::compute;
use construct_runtime::{Common, Context, Lifecycle, ServiceConfig, clock, config};
use futures::StreamExt as _;
use serde::{Deserialize, Serialize};
use tokio_util::task::TaskTracker;

use crate::{
    command::{CommandPolicy, CommandSandbox, Confinement},
    execution::Executor,
    running::Running,
    sandbox::{Engine, EngineConfig, Parameter, Tool, ToolTable},
    tiers::Tiers,
    tools::{Egress, HostPattern, Models, Policy, Provider},
    workspaces::Workspaces,
};

pub use tiers::{Overrides, Span};

/// The configuration of the service.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Pools whose scripts this process runs.
    pub interpreter_pools: Vec<String>,
    /// Concurrent executions per pool; further commands wait in JetStream.
    pub interpreter_concurrency: usize,
    /// Directories that tasks may name as their workspace, including everything below them. If
    /// empty, a task can only have its own directory below the data directory.
    pub interpreter_workspace_roots: Vec<PathBuf>,
    /// Hosts that scripts may fetch from: `example.com`, `*.example.com`.
    pub interpreter_fetch_hosts: Vec<String>,
    /// Non-public addresses that scripts may fetch from, for example of a service in the operator's
    /// own network. The host has to be granted as well.
    pub interpreter_fetch_private_addresses: Vec<IpAddr>,
    /// Whether commands may run without a sandbox on machines that offer none.
    pub interpreter_allow_unconfined_commands: bool,
    /// Whether commands may use TCP on their own loopback, for servers that a test starts.
    /// Otherwise Landlock, where the kernel has it, refuses TCP to commands without network.
    pub interpreter_command_loopback: bool,
    /// Whether commands share the network of the service. They then reach whatever the service
    /// reaches: every host, granted to `fetch` or not, its loopback, NATS and private addresses,
    /// including a cloud's metadata. No policy rule sees this traffic. Meant for a service whose
    /// own network is confined to what commands may reach.
    pub interpreter_command_network: bool,
    /// Files and directories that commands may read in addition to the system's programs, for
    /// example a toolchain. Missing ones are skipped.
    pub interpreter_command_read_only_paths: Vec<PathBuf>,
    /// Directories where commands look for programs before the system's own. Directories outside
    /// `/usr` have to be readable, too.
    pub interpreter_command_search_path: Vec<PathBuf>,
    /// Files and directories that no task may see, even in a granted directory: the operator's keys
    /// and the mesh's own data. Always includes the data and cache directories.
    pub interpreter_hidden_paths: Vec<PathBuf>,
    /// Directory for compiled code; below the data directory if empty.
    pub interpreter_cache_dir: PathBuf,
    /// CPU time of a script in every pool; defaults to the limit of its tier.
    pub interpreter_cpu_limit: Option<Span>,
    /// Time from a script's start to its end, in every pool; at most that of a step, 30 minutes.
    pub interpreter_wall_limit: Option<Span>,
    /// Memory of a script in every pool.
    pub interpreter_memory_bytes: Option<usize>,
    /// Limits of single pools. They override the limits above and those of the tier.
    pub interpreter_limits: BTreeMap<String, Overrides>,
    /// URL of the providers' proxy for model calls of scripts (docs/proxy.md), such as
    /// `http://127.0.0.1:60090`. If empty, scripts reach no models.
    pub interpreter_llm_url: String,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            interpreter_pools: compute::STANDARD.map(str::to_owned).into(),
            interpreter_concurrency: 64,
            interpreter_workspace_roots: Vec::new(),
            interpreter_fetch_hosts: Vec::new(),
            interpreter_fetch_private_addresses: Vec::new(),
            interpreter_allow_unconfined_commands: false,
            interpreter_command_loopback: false,
            interpreter_command_network: false,
            interpreter_command_read_only_paths: Vec::new(),
            interpreter_command_search_path: Vec::new(),
            interpreter_hidden_paths: Vec::new(),
            interpreter_cache_dir: PathBuf::new(),
            interpreter_cpu_limit: None,
            interpreter_wall_limit: None,
            interpreter_memory_bytes: None,
            interpreter_limits: BTreeMap::new(),
            interpreter_llm_url: String::new(),
        }
    }
}

impl Config {
    fn cache_dir(&self, common: &Common) -> PathBuf {
        if self.interpreter_cache_dir.as_os_str().is_empty() {
            common.cache_dir()
        } else {
            self.interpreter_cache_dir.clone()
        }
    }

    /// Paths that belong to the service and not to any task.
    fn hidden_paths(&self, common: &Common) -> Vec<PathBuf> {
        let keys_and_cache =
            [self.cache_dir(common)].into_iter().chain(common.secrets_key_file.clone());
        self.interpreter_hidden_paths.iter().cloned().chain(keys_and_cache).collect()
    }

    /// The policy for commands.
    fn command_policy(&self, common: &Common) -> Result<CommandPolicy, config::Invalid> {
        let relative = |paths: &[PathBuf]| paths.iter().find(|path| !path.is_absolute()).cloned();
        let (readable, search_path) =
            (&self.interpreter_command_read_only_paths, &self.interpreter_command_search_path);
        let invalid = |key, path: &Path, must: &str| {
            Err(config::Invalid::new(
                key,
                format!("must {must}, which {} does not", path.display()),
            ))
        };
        if let Some(path) = relative(search_path) {
            return invalid("interpreter_command_search_path", &path, "contain absolute paths");
        }
        // The paths become one variable, separated by colons.
        if let Some(path) =
            search_path.iter().find(|path| path.to_str().is_none_or(|path| path.contains(':')))
        {
            return invalid(
                "interpreter_command_search_path",
                path,
                "contain UTF-8 paths without colons",
            );
        }
        if let Some(path) = relative(readable) {
            return invalid("interpreter_command_read_only_paths", &path, "contain absolute paths");
        }
        let hidden_paths = self.hidden_paths(common);
        let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let real = |path: &Path| path.canonicalize().unwrap_or_else(|_| absolute(path));
        let own: Vec<PathBuf> =
            hidden_paths.iter().chain([&common.data_dir]).map(|path| real(path)).collect();
        let exposes_own = |path: &&PathBuf| {
            own.iter().any(|own| own.starts_with(real(path)) || real(path).starts_with(own))
        };
        if let Some(path) = readable.iter().find(exposes_own) {
            return invalid(
                "interpreter_command_read_only_paths",
                path,
                "not expose the service's own files",
            );
        }
        let confinement = match self.interpreter_allow_unconfined_commands {
            true => Confinement::AllowUnconfined,
            false => Confinement::RequireSandbox,
        };
        Ok(CommandPolicy {
            confinement,
            network: self.interpreter_command_network,
            loopback: self.interpreter_command_loopback,
            hidden_paths,
            read_only_paths: readable.clone(),
            search_path: search_path.clone(),
            ..CommandPolicy::default()
        })
    }

    fn pools(&self) -> Result<Vec<Pool>, config::Invalid> {
        let invalid = |message: String| config::Invalid::new("interpreter_pools", message);
        let pool = |name: &String| {
            Pool::new(name).map_err(|_| {
                invalid(format!(
                    "must contain pool names like `cpu-2` (`[a-z][a-z0-9-]{{0,31}}`), not `{name}`"
                ))
            })
        };
        let mut pools = self.interpreter_pools.iter().map(pool).collect::<Result<Vec<_>, _>>()?;
        let mut seen = std::collections::HashSet::new();
        pools.retain(|pool| seen.insert(pool.clone()));
        if pools.is_empty() {
            Err(invalid("must name at least one pool".to_owned()))
        } else {
            Ok(pools)
        }
    }

    fn tiers(&self) -> Result<Tiers, config::Invalid> {
        let all = Overrides {
            script_cpu: self.interpreter_cpu_limit,
            script_wall: self.interpreter_wall_limit,
            script_memory_bytes: self.interpreter_memory_bytes,
            ..Overrides::default()
        };
        Tiers::new(&self.interpreter_pools, &all, &self.interpreter_limits).map_err(|fault| {
            config::Invalid::new("interpreter_limits", format!("are invalid: {fault}"))
        })
    }

    fn hosts(&self) -> Result<Vec<HostPattern>, config::Invalid> {
        let parse = |host: &String| host.parse();
        self.interpreter_fetch_hosts
            .iter()
            .map(parse)
            .collect::<Result<_, tools::HostPatternError>>()
            .map_err(|error| config::Invalid::new("interpreter_fetch_hosts", error.to_string()))
    }
}

impl ServiceConfig for Config {
    fn validate(&self, common: &Common) -> Result<(), config::Invalid> {
        common.secrets_keys()?;
        let pools = self.pools()?.len();
        if self.interpreter_concurrency == 0
            || self.interpreter_concurrency.saturating_mul(pools) > 8000
        {
            let max = 8000 / pools;
            return Err(config::Invalid::new(
                "interpreter_concurrency",
                format!("must be between 1 and {max}: 8000 in total over {pools} pools"),
            ));
        }
        let url = &self.interpreter_llm_url;
        if !url.is_empty() && !["http://", "https://"].iter().any(|scheme| url.starts_with(scheme))
        {
            return Err(config::Invalid::new(
                "interpreter_llm_url",
                "must begin with http:// or https://",
            ));
        }
        self.tiers()?;
        self.command_policy(common)?;
        self.hosts().map(drop)
    }
}

/// Starts the service; it runs until its lifecycle drains.
pub async fn run(config: Config, context: &Context) -> anyhow::Result<()> {
    let common = context.common();
    let lifecycle = context.lifecycle();
    let nats = context.readiness().register("nats");

    let (pools, tiers) = (config.pools()?, config.tiers()?);
    for name in
        config.interpreter_limits.keys().filter(|name| !config.interpreter_pools.contains(name))
    {
        tracing::warn!(pool = name, "limits are set for a pool that this process does not serve");
    }
    let engine = engine(&config, &pools, &tiers, common).await?;
    // This program itself, even if its file has been replaced meanwhile.
    let sandbox = CommandSandbox::detect(Path::new("/proc/self/exe")).await;
    if sandbox.is_available() {
        tracing::info!("{}", sandbox.describe());
    } else if config.interpreter_allow_unconfined_commands {
        tracing::warn!("{}; they run UNCONFINED, as the operator allowed", sandbox.describe());
    } else {
        tracing::warn!("{}; commands are refused", sandbox.describe());
    }
    if config.interpreter_command_network {
        tracing::warn!("commands share the network of this service, as the operator allowed");
    }
    let commands = config.command_policy(common)?;
    let policy = Policy { commands, hosts: config.hosts()? };
    let own = common.data_dir.join("workspaces");
    let egress = Egress::new(&config.interpreter_fetch_private_addresses)?;
    let workspaces =
        Workspaces::new(&config.interpreter_workspace_roots, own, policy, egress, sandbox)
            .context(
                "the directories of CONSTRUCT_INTERPRETER_WORKSPACE_ROOTS cannot be granted",
            )?;

    let bus = context
        .connect_with_retry("nats", &nats, async || {
            let tls =
                Tls { ca: common.nats_ca_file.clone(), certificate: common.nats_certificate() };
            let options = ConnectOptions::new(context.instance_id())
                .blobs(common.blob_dir())
                .user(User::Interpreter)
                .tls(tls);
            let bus = Bus::connect(common.nats_url.expose(), options).await?;
            bus.ensure_topology().await?;
            Ok::<_, anyhow::Error>(bus)
        })
        .await?;
    lifecycle.spawn_job("topology", bus.clone().maintain_topology(lifecycle.draining()));

    let clock_sync =
        clock::sync_from_stream(bus.subscribe_time().await?, lifecycle.draining()).await;
    lifecycle.spawn_job("clock", clock_sync);

    let url = config.interpreter_llm_url.clone();
    let llm = if url.is_empty() { None } else { Some((url, Models::client()?)) };
    let executor = Arc::new(Executor {
        bus: bus.clone(),
        engine: Arc::new(engine),
        table: tool_table(),
        workspaces,
        tiers,
        secrets_keys: common.secrets_keys()?,
        llm,
        files: files::Store::open(common.blob_dir())?,
        running: Running::default(),
        draining: lifecycle.draining(),
        drain_timeout: common.shutdown_grace.saturating_sub(Duration::from_secs(1)),
    });

    let (remover, workspaces_bus, stop) =
        (Arc::clone(&executor), bus.clone(), lifecycle.draining());
    lifecycle.spawn_job("workspaces", async move {
        remover.workspaces.remove_deleted(workspaces_bus, stop).await
    });

    let mut cancels = bus.subscribe_cancel(subject::Service::Interpreter).await?;
    let (canceler, executions, draining) =
        (Arc::clone(&executor), TaskTracker::new(), lifecycle.draining());
    let remaining = executions.clone();
    lifecycle.spawn("cancels", async move {
        // Scripts continue for a while after draining begins, and can be canceled meanwhile.
        let drained = async {
            draining.cancelled().await;
            remaining.close();
            remaining.wait().await;
        };
        tokio::pin!(drained);
        while let Some(cancel) =
            tokio::select! { next = cancels.next() => next, () = &mut drained => None }
        {
            match cancel.step_id.parse() {
                Ok(step) => canceler.running.cancel(step, &cancel.reason),
                Err(error) => tracing::warn!(%error, "a cancellation has no valid step id"),
            }
        }
        Ok::<_, std::convert::Infallible>(())
    });

    for pool in pools {
        serve(pool, &config, &executor, &executions, lifecycle);
    }
    Ok(())
}

/// Serves the tool catalog of a pool, and runs the pool's scripts.
fn serve(
    pool: Pool,
    config: &Config,
    executor: &Arc<Executor>,
    executions: &TaskTracker,
    lifecycle: &Lifecycle,
) {
    let (catalog_executor, bus, stop, name) =
        (Arc::clone(executor), executor.bus.clone(), lifecycle.draining(), pool.clone());
    lifecycle.spawn("catalog", async move {
        let tier = catalog_executor.tiers.for_pool(name.as_str()).clone();
        let handler = move |request| {
            let (executor, tier) = (Arc::clone(&catalog_executor), tier.clone());
            Box::pin(async move { facts::catalog(&executor.workspaces, &tier, request).await })
                as futures::future::BoxFuture<'static, _>
        };
        bus.serve_tools(&name, stop, handler).await
    });

    let options = ConsumeOptions::new(config.interpreter_concurrency, lifecycle.draining());
    let (executor, executions, jobs) =
        (Arc::clone(executor), executions.clone(), lifecycle.clone());
    lifecycle.spawn("executions", async move {
        let mut consumer = executor.bus.consume_code(&pool, options);
        while let Some(delivery) = consumer.next().await {
            let executor = Arc::clone(&executor);
            let execution =
                executions.track_future(async move { executor.execute(delivery).await });
            jobs.spawn_job("execution", execution);
        }
        Ok::<_, std::convert::Infallible>(())
    });
}

/// Loads the sandbox. Compiling it for the first time takes a second, in an unoptimized build half
/// a minute.
async fn engine(
    config: &Config,
    pools: &[Pool],
    tiers: &Tiers,
    common: &Common,
) -> anyhow::Result<Engine> {
    let cache = config.cache_dir(common);
    let instances = u32::try_from(config.interpreter_concurrency * pools.len())?;
    let max_memory_bytes = tiers.max_memory_bytes().max(EngineConfig::default().max_memory_bytes);
    let engine = tokio::task::spawn_blocking(move || {
        Engine::new(&cache, EngineConfig { instances, max_memory_bytes })
    })
    .await??;
    Ok(engine)
}

/// The table of tools that the sandbox offers to scripts.
pub fn tool_table() -> ToolTable {
    let tools: Vec<Tool> = tools::definitions()
        .iter()
        .filter(|tool| tool.provider == Provider::Host)
        .map(|tool| Tool {
            name: tool.name.to_owned(),
            aliases: tool.callable_aliases(),
            parameters: tool
                .positional()
                .map(|parameter| Parameter {
                    name: parameter.name.to_owned(),
                    object: parameter.kind.takes_object(),
                })
                .collect(),
            immediate: true,
        })
        .collect();
    ToolTable::new(&tools)
}

#[cfg(test)]
mod tests;
