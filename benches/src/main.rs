//! `construct-bench NAME [--json]`: measures one thing and prints our figure beside the floor
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

/// Measures one thing and prints our figure beside the floor measured in the same run.
#[derive(Debug, Parser)]
struct Arguments {
    /// What to measure.
    #[arg(value_enum)]
    bench: Bench,
    /// Print one JSON object instead of a table.
    #[arg(long)]
    json: bool,
    /// Tasks run one after the other for the latency.
    #[arg(long, default_value_t = 300)]
    serial: usize,
    /// Tasks under way at the same time for the throughput.
    #[arg(long, default_value_t = 64)]
    concurrency: usize,
    /// Seconds each throughput is measured for.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Rounds, alternating between the mesh and the floor; the machine's speed drifts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Bench {
    /// A two-turn task with an instant scripted model: model call, one script with three tool
    /// calls, model call.
    Mesh,
    /// Scripts in the sandbox: starting, calling the host, computing, waiting.
    Sandbox,
    /// What confining a command costs.
    Commands,
    /// How soon a cancel and a suspend take effect on a task that is at work.
    Control,
    /// How soon a thousand subscribers of one gateway are told what happens, also while some of
    /// them do not listen.
    Events,
    /// What an installation needs: memory and processor time, by who spends them.
    Capacity,
    /// What calling a model through the proxy and over the mesh costs.
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
