//! `construct new` and `construct resume`: a conversation in the terminal.

mod line;
mod piped;
mod screen;
mod talk;
mod terminal;

use std::{
    io::{self, IsTerminal as _},
    path::PathBuf,
};

use construct_proto::v1::{GetAgentRequest, GetTaskRequest, ListTasksRequest, PageRequest, Task};

use self::talk::Talk;
use crate::{
    agents,
    attach::AttachArgs,
    console::Color,
    exec,
    failure::{Exit, Failure},
    gateway::{Gateway, call},
};

#[derive(Debug, clap::Args)]
pub(crate) struct NewArgs {
    /// Which agent; Tab changes it. When not given: CONSTRUCT_AGENT, or the first by name.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// The directory the agent works in. Without it the task gets an empty one of its own.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    #[command(flatten)]
    attach: AttachArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    /// The task's id; without it, the task that changed last.
    task: Option<String>,
    /// The task that changed last.
    #[arg(long, conflicts_with = "task")]
    last: bool,
}

/// Begins a conversation.
///
/// # Errors
/// When the gateway refuses or stays away.
pub(crate) async fn new(args: NewArgs, gateway: Gateway, color: Color) -> Result<Exit, Failure> {
    let workspace = args.workspace.as_deref().map(exec::workspace).transpose()?.unwrap_or_default();
    let names: Vec<String> = agents::all(&gateway).await?.iter().map(agents::name).collect();
    let agent = match (agents::named(args.agent), names.first()) {
        // Looked up, so that a name that nobody has is refused before a message is typed.
        (Some(agent), _) => {
            agents::name(&call(gateway.agents().get_agent(GetAgentRequest { agent })).await?)
        }
        (None, Some(first)) if is_interactive() => first.clone(),
        (None, _) => agents::choose(&gateway, None).await?,
    };
    let attached = args.attach.blocks(&gateway).await?;
    run(Talk::new(gateway, names, agent, workspace).showing(attached), color).await
}

/// Goes on with one.
///
/// # Errors
/// When there is none, or the gateway refuses or stays away.
pub(crate) async fn resume(
    args: ResumeArgs,
    gateway: Gateway,
    color: Color,
) -> Result<Exit, Failure> {
    let task = match args.task.filter(|_| !args.last) {
        Some(task) => call(gateway.tasks().get_task(GetTaskRequest { task })).await?,
        None => last(&gateway).await?,
    };
    let names = agents::all(&gateway).await?.iter().map(agents::name).collect();
    run(Talk::resume(gateway, names, task).await?, color).await
}

async fn run(talk: Talk, color: Color) -> Result<Exit, Failure> {
    if is_interactive() {
        Box::pin(terminal::run(talk, color)).await
    } else {
        Box::pin(piped::run(talk, color)).await
    }
}

fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

async fn last(gateway: &Gateway) -> Result<Task, Failure> {
    let page = PageRequest {
        page_size: 1,
        order_by: "updated_at desc".to_owned(),
        page_token: String::new(),
    };
    let response =
        call(gateway.tasks().list_tasks(ListTasksRequest { page: Some(page), filter: None }))
            .await?;
    response
        .tasks
        .into_iter()
        .next()
        .ok_or_else(|| Failure::failed("there is no task yet").hint("begin one: construct new"))
}
