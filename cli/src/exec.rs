//! `construct exec`: one job, watched to its end.

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

use self::watch::{Seen, Watch};
use crate::{
    agents,
    attach::{self, AttachArgs},
    console::{Color, Console, Sink as _, Style},
    entity::budget,
    failure::{Exit, Failure},
    follow::{Follow, News},
    gateway::{Gateway, call, idempotency_key, patiently},
    json,
    money::{self, Limit},
    page,
    render::{Options, Renderer, note},
    time,
    words::clip,
};

/// Columns of a title made from a prompt.
const TITLE: usize = 60;

/// How long a cancelled turn has to end before we leave. A script that was told to stop has 10 s
/// for its last words.
pub(crate) const LAST_WORDS: Duration = Duration::from_secs(12);

/// How long telling the gateway to cancel may take.
const CANCEL: Duration = Duration::from_secs(5);

/// What a person is told who changes their mind before anything was said.
const NOT_GIVEN: &str = "interrupted before the job was given; nothing runs";

/// What is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// The answer to standard output, everything else to standard error. A terminal shows the
    /// answer as it is written; a pipe or file gets each of the model's messages when it is whole.
    Text,
    /// One JSON object at the end.
    Json,
    /// Every event as a line of JSON.
    Ndjson,
}

#[derive(Debug, clap::Args)]
#[command(after_help = crate::failure::EXIT_CODES)]
pub(crate) struct ExecArgs {
    /// Which agent. When not given: CONSTRUCT_AGENT, or the only one there is.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// The directory the agent works in. Without it the task gets an empty one of its own.
    #[arg(long, value_name = "DIR")]
    workspace: Option<PathBuf>,
    /// Go on with this task.
    #[arg(long, value_name = "TASK", conflicts_with_all = ["agent", "workspace", "title", "max_turns", "compute", "budget"])]
    task: Option<String>,
    /// What the task is called; made from the prompt when not given.
    #[arg(long)]
    title: Option<String>,
    /// The most model calls the job may take.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    max_turns: u32,
    /// Where the agent's scripts run: cpu-2, cpu-4, cpu-8, or another pool of the installation; the
    /// agent's when not given.
    #[arg(long, value_name = "POOL", default_value = "", hide_default_value = true)]
    compute: String,
    /// Dollars the job may cost.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_limit)]
    budget: Option<Limit>,
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// How long to wait for a gateway that went away.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = time::parse_duration)]
    reconnect: Duration,
    /// Cancel the job when it takes longer.
    #[arg(long, value_name = "DURATION", value_parser = time::parse_duration)]
    timeout: Option<Duration>,
    #[command(flatten)]
    attach: AttachArgs,
    /// The job in words; `-`, or nothing, reads them from standard input.
    prompt: Option<String>,
}

/// Runs the command.
///
/// # Errors
/// When the job could not be given, or not be watched to its end.
pub(crate) async fn exec(args: ExecArgs, gateway: Gateway, color: Color) -> Result<Exit, Failure> {
    let prompt = read_prompt(args.prompt.as_deref())?;
    let interrupts = interrupts()?;
    let mut console = Console::standard(color);
    Box::pin(run(&args, prompt, gateway, &mut console, interrupts)).await
}

/// What came of the job.
#[derive(Debug)]
struct End {
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
    // First, so that nothing is begun for what cannot be read.
    let attached = args.attach.blocks(&gateway).await?;
    let (task, cursor) = task(args, &prompt, &gateway).await?;
    let id = task.metadata.as_ref().map(|metadata| metadata.id.clone()).unwrap_or_default();
    if task.status.as_ref().is_some_and(|status| status.phase() == TaskPhase::Suspended) {
        return Err(Failure::new(Exit::Suspended, "the task is suspended")
            .hint(format!("resume it first: construct task resume {id}")));
    }
    let text = args.output == Output::Text;
    if text {
        note(&format!("· task {id}"), console)?;
    }

    // Listen first, then speak: nothing that follows the message can be missed.
    let subscribe = SubscribeRequest { task: id.clone(), cursor, types: Vec::new() };
    let mut follow = tokio::select! {
        follow = Follow::open(gateway.clone(), subscribe, args.reconnect, args.reconnect) => follow?,
        Some(()) = interrupts.recv() => return Err(Failure::new(Exit::Interrupted, NOT_GIVEN)),
    };
    if interrupts.try_recv().is_ok() {
        return Err(Failure::new(Exit::Interrupted, NOT_GIVEN));
    }
    let spec = message(&id, attach::message(prompt, &attached));
    let message = send(&gateway, spec, idempotency_key(), args.reconnect).await?;
    // From here on a lost connection means to look for the message from the beginning.
    follow.rewind_if_lost();
    // Also when nothing was going on a moment ago: somebody else may have sent a message just
    // before ours.
    let ahead = if args.task.is_some() {
        ahead(&gateway, &id, &message, args.reconnect).await?
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
            people: false,
            entities: false,
        }),
        watch: Watch::new(message, ahead),
        output: args.output,
        stopping: None,
    };
    let mut leave_at = deadline;
    let end = loop {
        let due = async {
            match leave_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            Some(()) = interrupts.recv() => {
                if job.stopping == Some(Exit::Interrupted) {
                    break job.left();
                }
                job.stop(Exit::Interrupted, "interrupted by the user", console).await?;
                leave_at = Some(Instant::now() + LAST_WORDS);
            }
            () = due => {
                if job.stopping.is_some() {
                    break job.left();
                }
                job.stop(Exit::Cancelled, "the time given with --timeout is over", console).await?;
                leave_at = Some(Instant::now() + LAST_WORDS);
            }
            news = follow.next() => {
                if let Some(end) = job.news(news?, console).await? {
                    break end;
                }
            }
        }
    };
    job.finish(&end, console).await?;
    Ok(end.exit)
}

/// A message that was sent, until it is answered.
struct Job {
    gateway: Gateway,
    task: String,
    renderer: Renderer,
    watch: Watch,
    output: Output,
    /// Why the turn is being cancelled, once it is.
    stopping: Option<Exit>,
}

impl Job {
    async fn news(&mut self, news: News, console: &mut Console) -> Result<Option<End>, Failure> {
        let event = match news {
            News::Event(event) => event,
            News::Lost(why) => {
                if self.output == Output::Text {
                    note(&format!("· {why}; reconnecting"), console)?;
                }
                return Ok(None);
            }
            News::Back => {
                if self.output == Output::Text {
                    note("· connected again", console)?;
                }
                return Ok(None);
            }
        };
        let seen = self.watch.see(&event);
        if self.watch.is_ours() || matches!(seen, Seen::Ended { .. }) {
            match self.output {
                Output::Text => self.renderer.event(&event, console)?,
                Output::Ndjson => {
                    console.record(&json::message("construct.v1.Event", &*event).to_string())?
                }
                Output::Json => {}
            }
        }
        Ok(match seen {
            Seen::Nothing => None,
            Seen::Ended { outcome, error } => Some(self.ended(outcome, error)),
            Seen::Gone => Some(self.ended(TurnOutcome::Cancelled, None)),
            Seen::TaskDeleted => Some(End { exit: Exit::Failed, outcome: "deleted", error: None }),
            // Whoever cancels a suspended task must resume it for that, so our own wish does not
            // matter.
            Seen::Suspended => {
                Some(End { exit: Exit::Suspended, outcome: "suspended", error: None })
            }
        })
    }

    fn ended(&self, outcome: TurnOutcome, error: Option<TaskError>) -> End {
        let (exit, outcome) = match outcome {
            TurnOutcome::Completed => (Exit::Completed, "completed"),
            TurnOutcome::Cancelled => (self.stopping.unwrap_or(Exit::Cancelled), "cancelled"),
            TurnOutcome::Interrupted => (self.stopping.unwrap_or(Exit::Cancelled), "interrupted"),
            TurnOutcome::MaxTurns => (Exit::MaxTurns, "max_turns"),
            TurnOutcome::Failed | TurnOutcome::Unspecified => (Exit::Failed, "failed"),
        };
        End { exit, outcome, error }
    }

    /// We leave before the end is known.
    fn left(&self) -> End {
        End { exit: self.stopping.unwrap_or(Exit::Interrupted), outcome: "cancelling", error: None }
    }

    /// Cancels the turn; its end comes as an event like any other.
    async fn stop(
        &mut self,
        exit: Exit,
        reason: &str,
        console: &mut Console,
    ) -> Result<(), Failure> {
        self.stopping = Some(exit);
        if self.output == Output::Text {
            console.line(&[(Style::Bad, &format!("■ {reason}; cancelling"))])?;
        }
        let request = CancelTaskRequest {
            task: self.task.clone(),
            reason: reason.to_owned(),
            idempotency_key: idempotency_key(),
        };
        let cancelled = patiently(CANCEL, || {
            let (mut tasks, request) = (self.gateway.tasks(), request.clone());
            async move { tasks.cancel_task(request).await }
        });
        match tokio::time::timeout(CANCEL, cancelled).await {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(failure)) => Ok(console
                .line(&[(Style::Bad, &format!("✗ the turn could not be cancelled: {failure}"))])?),
            Err(_) => {
                Ok(console.line(&[(Style::Bad, "✗ the turn could not be cancelled in time")])?)
            }
        }
    }

    async fn finish(&self, end: &End, console: &mut Console) -> Result<(), Failure> {
        match self.output {
            Output::Text => {
                let next = match end.exit {
                    Exit::Suspended => {
                        format!("· suspended; go on with: construct resume {}", self.task)
                    }
                    _ if end.outcome == "deleted" => "· the task was deleted".to_owned(),
                    _ if end.outcome == "cancelling" => {
                        format!(
                            "· left before the turn had ended; look again with: construct why {}",
                            self.task
                        )
                    }
                    _ => format!("· go on with: construct resume {}", self.task),
                };
                note(&next, console)?;
            }
            Output::Json => console.record(&self.report(end).await.to_string())?,
            Output::Ndjson => {}
        }
        Ok(())
    }

    async fn report(&self, end: &End) -> Value {
        let tally = self.watch.tally();
        // What the task came to in all is good to know, and nothing to fail for.
        let task = call(self.gateway.tasks().get_task(GetTaskRequest { task: self.task.clone() }))
            .await
            .ok();
        let task_usage =
            task.and_then(|task| task.status).and_then(|status| status.usage).unwrap_or_default();
        json!({
            "task": self.task,
            "message": self.watch.message(),
            "outcome": end.outcome,
            "text": tally.text,
            "usage": json::message("construct.v1.Usage", &tally.usage),
            "task_usage": json::message("construct.v1.Usage", &task_usage),
            "tool_uses": tally.tool_uses,
            "error": end.error.as_ref().map(|error| json!({ "code": error.code, "message": error.message })),
        })
    }
}

/// The task, and the cursor from which on it is listened to.
async fn task(args: &ExecArgs, prompt: &str, gateway: &Gateway) -> Result<(Task, String), Failure> {
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
    budget::make(gateway, budget::Of::Task(id), args.budget).await?;
    Ok((task, "0".to_owned()))
}

/// The directory as the interpreter knows it. A relative one is meant from here, so it must exist
/// here.
///
/// # Errors
/// When it can't be told.
pub(crate) fn workspace(dir: &std::path::Path) -> Result<String, Failure> {
    let found = match dir.canonicalize() {
        Ok(found) if !found.is_dir() => {
            return Err(Failure::usage(format!("{} is no directory", dir.display())));
        }
        Ok(found) => found,
        // The interpreter may run on another machine.
        Err(_) if dir.is_absolute() => dir.to_owned(),
        Err(error) => {
            return Err(Failure::usage(format!(
                "the workspace {} cannot be used: {error}",
                dir.display()
            )));
        }
    };
    found
        .into_os_string()
        .into_string()
        .map_err(|_| Failure::usage("the workspace's path is not UTF-8"))
}

/// A message to a task.
pub(crate) fn message(task: &str, blocks: Vec<Block>) -> MessageSpec {
    MessageSpec { task: task.to_owned(), blocks, ..MessageSpec::default() }
}

/// Gives the message to its task, however often the connection breaks meanwhile. Under one key it
/// is given once.
///
/// # Errors
/// When the gateway refuses it, or stays away; in the second case it may have been given.
pub(crate) async fn send(
    gateway: &Gateway,
    spec: MessageSpec,
    idempotency_key: String,
    patience: Duration,
) -> Result<String, Failure> {
    let request = CreateMessageRequest { spec: Some(spec), idempotency_key };
    let message = patiently(patience, || {
        let (mut messages, request) = (gateway.messages(), request.clone());
        async move { messages.create_message(request).await }
    })
    .await?;
    Ok(message.metadata.map(|metadata| metadata.id).unwrap_or_default())
}

/// The messages that are answered before ours.
async fn ahead(
    gateway: &Gateway,
    task: &str,
    ours: &str,
    patience: Duration,
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
        let response = patiently(patience, list).await?;
        Ok((response.messages, response.page))
    })
    .await?;
    let waiting = messages.iter().filter(|message| {
        message.status.as_ref().is_none_or(|status| status.processed_at.is_none())
    });
    let ids =
        waiting.filter_map(|message| message.metadata.as_ref().map(|metadata| metadata.id.clone()));
    // Transcript order, those in the queue last: what comes after ours is none of our business.
    Ok(ids.take_while(|id| id != ours).collect())
}

/// The prompt's first words.
fn title(prompt: &str) -> String {
    clip(prompt.split_whitespace().collect::<Vec<_>>().join(" ").as_str(), TITLE)
}

fn read_prompt(given: Option<&str>) -> Result<String, Failure> {
    let prompt = match given {
        Some(words) if words != "-" => words.to_owned(),
        None if io::stdin().is_terminal() => {
            return Err(Failure::usage(
                "what is to be done? give the job in words, or write it to standard input",
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

/// Each Ctrl-C or SIGTERM. Listening begins before anything is sent, so that none is answered by
/// just dying.
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
