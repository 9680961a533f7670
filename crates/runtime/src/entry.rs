//! The `main` of every service: arguments, configuration, telemetry, lifecycle, run, exit code.

use std::{env, ffi::OsString, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::Context as _;
use clap::{CommandFactory as _, FromArgMatches as _, Parser};
use tokio::runtime::Builder;

use crate::{
    Common, Context, ServiceConfig,
    config::{self, Sources},
    context::VERSION,
    health, lifecycle, retry,
    telemetry::{self, Chain},
};

/// Exit code for invalid configuration, the same as for wrong arguments.
const EXIT_CONFIGURATION: u8 = 2;

/// How long blocking threads may take to end after everything else.
const THREAD_SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

const CONFIGURATION_HELP: &str = "\
Configuration: defaults, then the configuration file (TOML), then the environment, where the key `nats_url` is \
CONSTRUCT_NATS_URL. --print-config lists all keys.

Exit codes: 0 stopped cleanly, 1 failed, 2 wrong arguments or configuration, 3 work had to be cut off.";

#[derive(Debug, Parser)]
#[command(version = VERSION, after_help = CONFIGURATION_HELP)]
struct Arguments {
    /// Configuration file (default: the file that CONSTRUCT_CONFIG names).
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Check the configuration and exit.
    #[arg(long)]
    check_config: bool,
    /// Print the configuration with the origin of each value, secrets masked, and exit.
    #[arg(long)]
    print_config: bool,
}

/// Runs a service as a process; the whole `main` of a service.
///
/// `run` starts the service and returns: it registers readiness latches, connects, binds, and
/// spawns tasks through [`crate::Lifecycle::spawn`]. When it has returned `Ok`, the process counts
/// as started. An error ends the process. See [`crate::lifecycle`] for the phases that follow and
/// the exit codes.
pub fn main<C: ServiceConfig>(
    service: &'static str,
    run: impl AsyncFnOnce(C, &Context) -> anyhow::Result<()>,
) -> ExitCode {
    main_with_arguments(service, env::args_os(), run)
}

/// As [`main`], for a program that has parsed some arguments itself and passes the rest. The first
/// one is the program's name.
pub fn main_with_arguments<C: ServiceConfig>(
    service: &'static str,
    arguments: impl IntoIterator<Item = OsString>,
    run: impl AsyncFnOnce(C, &Context) -> anyhow::Result<()>,
) -> ExitCode {
    let name = format!("construct-{service}");
    let arguments = match parse_arguments(&name, arguments) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version arrive here as well. A failure to print cannot be reported.
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(EXIT_CONFIGURATION));
        }
    };
    let loaded = match LoadedConfig::<C>::load(&arguments) {
        Ok(loaded) => loaded,
        Err(error) => return report_config_error(&name, &error),
    };
    if arguments.print_config {
        match loaded.describe() {
            Ok(text) => print!("{text}"),
            Err(error) => return report_config_error(&name, &error),
        }
    }
    if let Err(error) = loaded.validate() {
        return report_config_error(&name, &error);
    }
    if arguments.check_config {
        println!("{name}: the configuration is valid");
    }
    if arguments.print_config || arguments.check_config {
        return ExitCode::SUCCESS;
    }
    match execute(service, loaded, run) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{name}: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the service with its configuration. Errors are those that occur before logging works.
fn execute<C: ServiceConfig>(
    service: &'static str,
    loaded: LoadedConfig<C>,
    run: impl AsyncFnOnce(C, &Context) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let context = Context::new(service, loaded.common.clone());
    let runtime = Builder::new_multi_thread()
        .enable_all()
        .thread_name(service)
        .build()
        .context("no tokio runtime")?;
    let telemetry = {
        let _entered = runtime.enter();
        telemetry::init(&telemetry::Options {
            service,
            instance_id: context.instance_id(),
            version: context.version(),
            log: &context.common().log,
            format: context.common().log_format,
        })?
    };
    let code = runtime.block_on(Box::pin(supervise(&context, loaded, run)));
    // The runtime exports the last spans, so it ends after telemetry.
    telemetry.shutdown();
    runtime.shutdown_timeout(THREAD_SHUTDOWN_TIMEOUT);
    Ok(code)
}

async fn supervise<C: ServiceConfig>(
    context: &Context,
    loaded: LoadedConfig<C>,
    run: impl AsyncFnOnce(C, &Context) -> anyhow::Result<()>,
) -> ExitCode {
    tracing::info!(instance = context.instance_id(), version = context.version(), "starting");
    for key in &loaded.unknown_keys {
        tracing::warn!(key, "the configuration file has a key that this service does not know");
    }
    let lifecycle = context.lifecycle();
    let start = async {
        lifecycle::watch_signals(lifecycle).context("cannot receive stop signals")?;
        context.readiness().measure(&opentelemetry::global::meter("construct-runtime"));
        let started = context.readiness().register("start");
        if let Some(address) = context.common().health_listen.filter(|_| C::SERVES) {
            let listener = retry::listen(address).await.context("CONSTRUCT_HEALTH_LISTEN")?;
            tracing::info!(address = %listener.local_addr()?, "health endpoints");
            // Owned by the runtime, so that it answers through draining until the process ends.
            tokio::spawn(health::serve(listener, context.clone()));
        }
        run(loaded.config, context).await?;
        started.set_ready();
        tracing::info!("started");
        Ok(())
    };
    let outcome = lifecycle.run_until_stopped(start).await;
    tracing::info!(failed = outcome.failure.is_some(), cut_off = ?outcome.cut_off, "stopped");
    outcome.exit_code()
}

/// Both parts of the configuration, and their sources.
struct LoadedConfig<C> {
    sources: Sources,
    common: Common,
    config: C,
    unknown_keys: Vec<String>,
}

impl<C: ServiceConfig> LoadedConfig<C> {
    fn load(arguments: &Arguments) -> Result<Self, config::Error> {
        let sources = Sources::from_process(arguments.config.as_deref())?;
        let (common, config) = (sources.load()?, sources.load()?);
        let known = &config::keys::<Common>()? | &config::keys::<C>()?;
        let unknown_keys = sources.unknown_keys(&known);
        Ok(Self { sources, common, config, unknown_keys })
    }

    fn validate(&self) -> Result<(), config::Error> {
        self.common
            .validate()
            .and_then(|()| self.config.validate(&self.common))
            .map_err(|invalid| self.sources.refused(invalid))
    }

    fn describe(&self) -> Result<String, config::Error> {
        Ok(self.sources.describe(&self.common)? + &self.sources.describe(&self.config)?)
    }
}

fn parse_arguments(
    name: &str,
    given: impl IntoIterator<Item = OsString>,
) -> Result<Arguments, clap::Error> {
    let matches =
        Arguments::command().display_name(name).bin_name(name).try_get_matches_from(given)?;
    Arguments::from_arg_matches(&matches)
}

fn report_config_error(name: &str, error: &config::Error) -> ExitCode {
    eprintln!("{name}: {}", Chain(error));
    ExitCode::from(EXIT_CONFIGURATION)
}
