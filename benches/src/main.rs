//! `construct-bench NAME [--json]`: runs one benchmark and prints our figures beside the floor
//! measured in the same run. Started by `./dev bench`, which provides PostgreSQL and NATS.

mod capacity;
mod commands;
mod control;
mod events;
mod figures;
mod floor;
mod mesh;
mod providers;
mod sandbox;
mod services;

use std::{process::ExitCode, time::Duration};

use clap::Parser;

/// Runs one benchmark and prints our figures beside the floor measured in the same run.
#[derive(Debug, Parser)]
struct Arguments {
    /// The benchmark.
    #[arg(value_enum)]
    bench: Bench,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tasks for the latency, one after the other.
    #[arg(long, default_value_t = 300)]
    serial: usize,
    /// Concurrent tasks for the throughput.
    #[arg(long, default_value_t = 64)]
    concurrency: usize,
    /// Seconds of each throughput measurement.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Rounds, alternating between the mesh and the floor, because the machine's speed drifts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Bench {
    /// A two-turn task with an instant scripted model: model call, one script with three tool
    /// calls, model call.
    Mesh,
    /// Scripts in the sandbox: startup, host calls, computation, memory.
    Sandbox,
    /// The cost of confining a command.
    Commands,
    /// How fast a cancel and a suspend take effect on a running task.
    Control,
    /// How fast a thousand subscribers of one gateway receive events, also while some of them do
    /// not read.
    Events,
    /// Resource needs of an installation: memory and processor time per process.
    Capacity,
    /// The cost of calling a model through the proxy and over the mesh.
    Providers,
}

#[tokio::main]
async fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let plan = mesh::Plan {
        serial: arguments.serial,
        concurrency: arguments.concurrency,
        duration: Duration::from_secs(arguments.seconds),
        rounds: arguments.rounds,
    };
    let measured = match arguments.bench {
        Bench::Mesh => mesh::measure(&plan).await,
        Bench::Sandbox => sandbox::measure(plan.rounds).await,
        Bench::Commands => commands::measure(plan.rounds).await,
        Bench::Control => control::measure(plan.rounds).await,
        Bench::Events => events::measure(plan.duration).await,
        Bench::Capacity => capacity::measure(plan.concurrency, plan.duration).await,
        Bench::Providers => Box::pin(providers::measure(&plan)).await,
    };
    match measured {
        Ok(figures) if arguments.json => {
            println!("{}", figures.json());
            ExitCode::SUCCESS
        }
        Ok(figures) => {
            println!("{}", figures.table());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("construct-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
