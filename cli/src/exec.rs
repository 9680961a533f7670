//! `construct exec`: sends one prompt, and watches the turn to its end.

pub(crate) mod watch;

use std::{
    io::{self, IsTerminal as _, Read as _},
    path::PathBuf,
    time::Duration,
};

use construct_proto::v1::{
    Block, CancelTaskRequest, CreateMessageRequest, CreateTaskRequest, GetTaskRequest,
    ListMessagesRequest, Message, MessageSource, MessageSpec, SubscribeRequest, Task, TaskError,
    TaskPhase, TaskSpec, TurnOutcome, list_messages_request,
};
use serde_json::{Value, json};
use tokio::{sync::mpsc, time::Instant};

use self::watch::{TurnEvent, TurnWatch};
use crate::{
    agents,
    attach::{self, AttachArgs},
    console::{Color, Console, Sink as _, Style},
    entity::budget,
    event_follower::{EventFollower, StreamUpdate},
    failure::{Exit, Failure},
    gateway::{Gateway, call, call_with_retry, idempotency_key},
    json,
    money::{self, Limit},
    page,
    render::{Options, Renderer, note},
    text::clip,
    time,
};

/// The columns of a title made from a prompt.
const TITLE_COLUMNS: usize = 60;

/// The time a canceled turn has to end before the command exits. Longer than the 10 s that a
/// stopped script has.
pub(crate) const CANCEL_GRACE_PERIOD: Duration = Duration::from_secs(12);

/// The timeout of the request to cancel.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);

/// The message after an interrupt before the prompt was sent.
const INTERRUPTED_BEFORE_SEND: &str = "interrupted before the prompt was sent; nothing runs";

/// The output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// The answer on standard output, everything else on standard error. A terminal shows the
    /// answer while it is written; a pipe or file gets each message of the model when complete.
    Text,
    /// One JSON object at the end.
    Json,
    /// Every event as a line of JSON.
    Ndjson,
}

#[derive(Debug, clap::Args)]
#[command(after_help = crate::failure::EXIT_CODES)]
pub(crate) struct ExecArgs {
    /// The agent. Default: CONSTRUCT_AGENT, or the only agent.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// The directory the agent works in. Default: a new empty one.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// Continue this task.
    #[arg(long, value_name = "TASK", conflicts_with_all = ["agent", "workspace", "title", "max_turns", "compute", "budget"])]
    task: Option<String>,
    /// The title of the task. Default: the beginning of the prompt.
    #[arg(long)]
    title: Option<String>,
    /// The maximum number of model calls.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    max_turns: u32,
    /// The compute pool for the agent's scripts: cpu-2, cpu-4, cpu-8, or another pool of the
    /// installation. Default: the agent's.
    #[arg(long, value_name = "POOL", default_value = "", hide_default_value = true)]
    compute: String,
    /// The maximum cost in dollars.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_limit)]
    budget: Option<Limit>,
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// How long to retry when the gateway is away.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = time::parse_duration)]
    reconnect: Duration,
    /// Cancel the turn when it takes longer.
    #[arg(long, value_name = "DURATION", value_parser = time::parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    attach: AttachArgs,
    /// The prompt. `-`, or no argument, reads it from standard input.
    prompt: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// When the prompt could not be sent, or the turn not be watched to its end.
pub(crate) async fn exec(args: ExecArgs, gateway: Gateway, color: Color) -> Result<Exit, Failure> {
    let prompt = read_prompt(args.prompt.as_deref())?;
    let interrupts = interrupts()?;
    let mut console = Console::standard(color);
    Box::pin(run(&args, prompt, gateway, &mut console, interrupts)).await
}

/// The result of the turn.
#[derive(Debug)]
struct JobResult {
    exit: Exit,
    outcome: &'static str,
    error: Option<TaskError>,
}

async fn run(
    args: &ExecArgs,
    prompt: String,
    gateway: Gateway,
    console: &mut Console,
    mut interrupts: mpsc::Receiver<()>,
) -> Result<Exit, Failure> {
    let deadline = args.timeout.map(|timeout| Instant::now() + timeout);
    // First, so that unreadable files leave no task behind.
    let attached = args.attach.blocks(&gateway).await?;
    let (task, cursor) = open_task(args, &prompt, &gateway).await?;
    let id = task.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default();
    if task.status.as_ref().is_some_and(|status| status.phase() == TaskPhase::Suspended) {
        return Err(Failure::new(Exit::Suspended, "the task is suspended")
            .hint(format!("resume it first: construct task resume {id}")));
    }
    let text = args.output == Output::Text;
    if text {
        note(&format!("· task {id}"), console)?;
    }

    // Subscribe before sending: no event after the message can be missed.
    let subscribe = SubscribeRequest { task: id.clone(), cursor, types: Vec::new() };
    let mut follower = tokio::select! {
        follower = EventFollower::open(gateway.clone(), subscribe, args.reconnect, args.reconnect) => follower?,
        Some(()) = interrupts.recv() => return Err(Failure::new(Exit::Interrupted, INTERRUPTED_BEFORE_SEND)),
    };
    if interrupts.try_recv().is_ok() {
        return Err(Failure::new(Exit::Interrupted, INTERRUPTED_BEFORE_SEND));
    }
    let spec = message(&id, attach::message(prompt, &attached));
    let message = send(&gateway, spec, idempotency_key(), args.reconnect).await?;
    // From here on, a lost connection restarts from the beginning to find the message.
    follower.rewind_if_lost();
    // Even when the task was idle a moment ago: another client may have sent a message first.
    let ahead = if args.task.is_some() {
        messages_ahead(&gateway, &id, &message, args.reconnect).await?
    } else {
        Vec::new()
    };
    if text && !ahead.is_empty() {
        note("· earlier messages of this task are answered first", console)?;
    }

    let mut job = Job {
        gateway,
        task: id,
        renderer: Renderer::new(Options {
            live: console.is_live(),
            user_messages: false,
            entities: false,
        }),
        watch: TurnWatch::new(message, ahead),
        output: args.output,
        stopping: None,
    };
    let mut exit_at = deadline;
    let result = loop {
        let due = async {
            match exit_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            Some(()) = interrupts.recv() => {
                if job.stopping == Some(Exit::Interrupted) {
                    break job.abandon();
                }
                job.cancel(Exit::Interrupted, "interrupted by the user", console).await?;
                exit_at = Some(Instant::now() + CANCEL_GRACE_PERIOD);
            }
            () = due => {
                if job.stopping.is_some() {
                    break job.abandon();
                }
                job.cancel(Exit::Cancelled, "the --timeout has expired", console).await?;
                exit_at = Some(Instant::now() + CANCEL_GRACE_PERIOD);
            }
            update = follower.next() => {
                if let Some(result) = job.handle(update?, console).await? {
                    break result;
                }
            }
        }
    };
    job.finish(&result, console).await?;
    Ok(result.exit)
}

/// A sent message and the watch over its turn.
struct Job {
    gateway: Gateway,
    task: String,
    renderer: Renderer,
    watch: TurnWatch,
    output: Output,
    /// The exit code once the turn is being canceled.
    stopping: Option<Exit>,
}

impl Job {
    async fn handle(
        &mut self,
        update: StreamUpdate,
        console: &mut Console,
    ) -> Result<Option<JobResult>, Failure> {
        let event = match update {
            StreamUpdate::Event(event) => event,
            StreamUpdate::Disconnected(reason) => {
                if self.output == Output::Text {
                    note(&format!("· {reason}; reconnecting"), console)?;
                }
                return Ok(None);
            }
            StreamUpdate::Reconnected => {
                if self.output == Output::Text {
                    note("· reconnected", console)?;
                }
                return Ok(None);
            }
        };
        let observed = self.watch.observe(&event);
        if self.watch.is_active() || matches!(observed, TurnEvent::Ended { .. }) {
            match self.output {
                Output::Text => self.renderer.event(&event, console)?,
                Output::Ndjson => {
                    console.record(&json::message("construct.v1.Event", &*event).to_string())?
                }
                Output::Json => {}
            }
        }
        Ok(match observed {
            TurnEvent::Other => None,
            TurnEvent::Ended { outcome, error } => Some(self.result(outcome, error)),
            TurnEvent::MessageDropped => Some(self.result(TurnOutcome::Cancelled, None)),
            TurnEvent::TaskDeleted => {
                Some(JobResult { exit: Exit::Failed, outcome: "deleted", error: None })
            }
            // Also while canceling: a suspended task is canceled only after it is resumed.
            TurnEvent::Suspended => {
                Some(JobResult { exit: Exit::Suspended, outcome: "suspended", error: None })
            }
        })
    }

    fn result(&self, outcome: TurnOutcome, error: Option<TaskError>) -> JobResult {
        let (exit, outcome) = match outcome {
            TurnOutcome::Completed => (Exit::Completed, "completed"),
            TurnOutcome::Cancelled => (self.stopping.unwrap_or(Exit::Cancelled), "cancelled"),
            TurnOutcome::Interrupted => (self.stopping.unwrap_or(Exit::Cancelled), "interrupted"),
            TurnOutcome::MaxTurns => (Exit::MaxTurns, "max_turns"),
            TurnOutcome::Failed | TurnOutcome::Unspecified => (Exit::Failed, "failed"),
        };
        JobResult { exit, outcome, error }
    }

    /// The result when the command exits before the turn has ended.
    fn abandon(&self) -> JobResult {
        JobResult {
            exit: self.stopping.unwrap_or(Exit::Interrupted),
            outcome: "cancelling",
            error: None,
        }
    }

    /// Cancels the turn. Its end arrives as an event.
    async fn cancel(
        &mut self,
        exit: Exit,
        reason: &str,
        console: &mut Console,
    ) -> Result<(), Failure> {
        self.stopping = Some(exit);
        if self.output == Output::Text {
            console.line(&[(Style::Bad, &format!("■ {reason}; canceling"))])?;
        }
        let request = CancelTaskRequest {
            task: self.task.clone(),
            reason: reason.to_owned(),
            idempotency_key: idempotency_key(),
        };
        let canceled = call_with_retry(CANCEL_TIMEOUT, || {
            let (mut tasks, request) = (self.gateway.tasks(), request.clone());
            async move { tasks.cancel_task(request).await }
        });
        match tokio::time::timeout(CANCEL_TIMEOUT, canceled).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(failure)) => Ok(console
                .line(&[(Style::Bad, &format!("✗ the turn could not be canceled: {failure}"))])?),
            Err(_) => {
                Ok(console.line(&[(Style::Bad, "✗ the turn could not be canceled in time")])?)
            }
        }
    }

    async fn finish(&self, result: &JobResult, console: &mut Console) -> Result<(), Failure> {
        match self.output {
            Output::Text => {
                let next = match result.exit {
                    Exit::Suspended => {
                        format!("· suspended; continue with: construct resume {}", self.task)
                    }
                    _ if result.outcome == "deleted" => "· the task was deleted".to_owned(),
                    _ if result.outcome == "cancelling" => {
                        format!(
                            "· the turn has not ended yet; see: construct explain {}",
                            self.task
                        )
                    }
                    _ => format!("· continue with: construct resume {}", self.task),
                };
                note(&next, console)?;
            }
            Output::Json => console.record(&self.report(result).await.to_string())?,
            Output::Ndjson => {}
        }
        Ok(())
    }

    async fn report(&self, result: &JobResult) -> Value {
        let totals = self.watch.totals();
        // The usage of the whole task is optional: its absence is no failure.
        let task = call(self.gateway.tasks().get_task(GetTaskRequest { task: self.task.clone() }))
            .await
            .ok();
        let task_usage =
            task.and_then(|task| task.status).and_then(|status| status.usage).unwrap_or_default();
        json!({
            "task": self.task,
            "message": self.watch.message(),
            "outcome": result.outcome,
            "text": totals.text,
            "usage": json::message("construct.v1.Usage", &totals.usage),
            "task_usage": json::message("construct.v1.Usage", &task_usage),
            "tool_uses": totals.tool_uses,
            "error": result.error.as_ref().map(|error| json!({ "code": error.code, "message": error.message })),
        })
    }
}

/// Gets or creates the task. Also returns the cursor to subscribe from.
async fn open_task(
    args: &ExecArgs,
    prompt: &str,
    gateway: &Gateway,
) -> Result<(Task, String), Failure> {
    if let Some(task) = &args.task {
        let task = call(gateway.tasks().get_task(GetTaskRequest { task: task.clone() })).await?;
        return Ok((task, String::new()));
    }
    let spec = TaskSpec {
        agent: agents::choose(gateway, args.agent.clone()).await?,
        workspace: args.workspace.as_deref().map(workspace).transpose()?.unwrap_or_default(),
        title: args.title.clone().unwrap_or_else(|| title(prompt)),
        max_turns: args.max_turns,
        policy: Vec::new(),
        compute: args.compute.clone(),
        pinned: Vec::new(),
    };
    let request = CreateTaskRequest { spec: Some(spec), idempotency_key: idempotency_key() };
    let task = call(gateway.tasks().create_task(request)).await?;
    let id = task.metadata.as_ref().map_or("", |metadata| metadata.id.as_str());
    budget::create(gateway, budget::Owner::Task(id), args.budget).await?;
    Ok((task, "0".to_owned()))
}

/// The path of a workspace for the interpreter. A relative path is resolved here, so it must exist
/// here.
///
/// # Errors
/// When the path cannot be resolved, is no directory, or is not UTF-8.
pub(crate) fn workspace(dir: &std::path::Path) -> Result<String, Failure> {
    let path = match dir.canonicalize() {
        Ok(path) if !path.is_dir() => {
            return Err(Failure::usage(format!("{} is not a directory", dir.display())));
        }
        Ok(path) => path,
        // The interpreter may run on another machine.
        Err(_) if dir.is_absolute() => dir.to_owned(),
        Err(error) => {
            return Err(Failure::usage(format!(
                "the workspace {} cannot be used: {error}",
                dir.display()
            )));
        }
    };
    path.into_os_string()
        .into_string()
        .map_err(|_| Failure::usage("the workspace's path is not UTF-8"))
}

/// A message to a task.
pub(crate) fn message(task: &str, blocks: Vec<Block>) -> MessageSpec {
    MessageSpec { task: task.to_owned(), blocks, ..MessageSpec::default() }
}

/// Sends the message, with retries when the connection breaks. The idempotency key makes it one
/// message.
///
/// # Errors
/// When the gateway refuses it, or stays away. In the second case it may have been received.
pub(crate) async fn send(
    gateway: &Gateway,
    spec: MessageSpec,
    idempotency_key: String,
    retry_timeout: Duration,
) -> Result<String, Failure> {
    let request = CreateMessageRequest { spec: Some(spec), idempotency_key };
    let message = call_with_retry(retry_timeout, || {
        let (mut messages, request) = (gateway.messages(), request.clone());
        async move { messages.create_message(request).await }
    })
    .await?;
    Ok(message.metadata.map(|metadata| metadata.id).unwrap_or_default())
}

/// The ids of messages that are answered before `message`.
async fn messages_ahead(
    gateway: &Gateway,
    task: &str,
    message: &str,
    retry_timeout: Duration,
) -> Result<Vec<String>, Failure> {
    let messages: Vec<Message> = page::all("", |page| async move {
        let filter = list_messages_request::Filter {
            source: MessageSource::User.into(),
            ..Default::default()
        };
        let request =
            ListMessagesRequest { task: task.to_owned(), page: Some(page), filter: Some(filter) };
        let list = || {
            let (mut messages, request) = (gateway.messages(), request.clone());
            async move { messages.list_messages(request).await }
        };
        let response = call_with_retry(retry_timeout, list).await?;
        Ok((response.messages, response.page))
    })
    .await?;
    let waiting = messages.iter().filter(|message| {
        message.status.as_ref().is_none_or(|status| status.processed_at.is_none())
    });
    let ids =
        waiting.filter_map(|message| message.metadata.as_ref().map(|metadata| metadata.id.clone()));
    // Transcript order, queued messages last: later messages do not matter.
    Ok(ids.take_while(|id| id != message).collect())
}

/// The title made from the beginning of a prompt.
fn title(prompt: &str) -> String {
    clip(prompt.split_whitespace().collect::<Vec<_>>().join(" ").as_str(), TITLE_COLUMNS)
}

fn read_prompt(argument: Option<&str>) -> Result<String, Failure> {
    let prompt = match argument {
        Some(prompt) if prompt != "-" => prompt.to_owned(),
        None if io::stdin().is_terminal() => {
            return Err(Failure::usage(
                "a prompt is required, as an argument or on standard input",
            ));
        }
        _ => {
            let mut prompt = String::new();
            io::stdin().read_to_string(&mut prompt)?;
            prompt
        }
    };
    if prompt.trim().is_empty() {
        return Err(Failure::usage("the prompt is empty"));
    }
    Ok(prompt)
}

/// Receives each Ctrl-C or SIGTERM. Called before anything is sent, so that no signal kills the
/// process without canceling the turn.
pub(crate) fn interrupts() -> Result<mpsc::Receiver<()>, Failure> {
    let (send, receive) = mpsc::channel(4);
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        let (mut interrupt, mut terminate) =
            (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    _ = interrupt.recv() => {}
                    _ = terminate.recv() => {}
                }
                if send.send(()).await.is_err() {
                    return;
                }
            }
        });
    }
    #[cfg(not(unix))]
    tokio::spawn(async move {
        while tokio::signal::ctrl_c().await.is_ok() && send.send(()).await.is_ok() {}
    });
    Ok(receive)
}

#[cfg(test)]
mod tests;
