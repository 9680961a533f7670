//! `construct new` and `construct resume`: a conversation in the terminal.

mod chat;
mod input_line;
mod piped;
mod screen;
mod terminal;

use std::{
    io::{self, IsTerminal as _},
    path::PathBuf,
};

use construct_proto::v1::{GetAgentRequest, GetTaskRequest, ListTasksRequest, PageRequest, Task};

use self::chat::Chat;
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
    /// The agent; Tab changes it. Default: CONSTRUCT_AGENT, or the first by name.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// The directory the agent works in. Default: a new empty one.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    #[command(flatten)]
    attach: AttachArgs,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ResumeArgs {
    /// The task's id. Default: the task that changed last.
    task: Option<String>,
    /// Continue the task that changed last.
    #[arg(long, conflicts_with = "task")]
    last: bool,
}

/// Starts a conversation.
///
/// # Errors
/// When the gateway refuses or stays away.
pub(crate) async fn new(args: NewArgs, gateway: Gateway, color: Color) -> Result<Exit, Failure> {
    let workspace = args.workspace.as_deref().map(exec::workspace).transpose()?.unwrap_or_default();
    let names: Vec<String> = agents::all(&gateway).await?.iter().map(agents::name).collect();
    let agent = match (agents::named(args.agent), names.first()) {
        // Looked up, so that an unknown name is refused before a message is typed.
        (Some(agent), _) => {
            agents::name(&call(gateway.agents().get_agent(GetAgentRequest { agent })).await?)
        }
        (None, Some(first)) if is_interactive() => first.clone(),
        (None, _) => agents::choose(&gateway, None).await?,
    };
    let attached = args.attach.blocks(&gateway).await?;
    run(Chat::new(gateway, names, agent, workspace).with_attachments(attached), color).await
}

/// Continues a conversation.
///
/// # Errors
/// When there is no task, or the gateway refuses or stays away.
pub(crate) async fn resume(
    args: ResumeArgs,
    gateway: Gateway,
    color: Color,
) -> Result<Exit, Failure> {
    let task = match args.task.filter(|_| !args.last) {
        Some(task) => call(gateway.tasks().get_task(GetTaskRequest { task })).await?,
        None => last_changed_task(&gateway).await?,
    };
    let names = agents::all(&gateway).await?.iter().map(agents::name).collect();
    run(Chat::open(gateway, names, task).await?, color).await
}

async fn run(chat: Chat, color: Color) -> Result<Exit, Failure> {
    if is_interactive() {
        Box::pin(terminal::run(chat, color)).await
    } else {
        Box::pin(piped::run(chat, color)).await
    }
}

fn is_interactive() -> bool {
    io::stdin().is_terminal() && io::stdout().is_terminal()
}

async fn last_changed_task(gateway: &Gateway) -> Result<Task, Failure> {
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
        .ok_or_else(|| Failure::failed("there is no task yet").hint("start one: construct new"))
}
