//! The tools that scripts call.
//!
//! Everything known about a tool stands once, in [`definitions`]: from there come the check of the
//! arguments, the TypeScript shown to the model, the JSON schema, and the names for the sandbox.
//! What a tool does stands in a module of its own. Errors are written for a model to recover from:
//! what was wrong, with what, and what to do instead.

mod argument;
mod definition;
mod delete;
mod edit;
mod egress;
mod encoding;
mod environment;
mod error;
mod execute;
mod fetch;
mod find;
mod grep;
mod html;
mod kind;
mod list;
mod llm;
mod markdown;
mod note;
mod output;
mod print;
mod program;
mod read;
mod save;
mod search;
mod secrets;
mod stop;
mod subject;
mod table;
mod tasks;
mod write;

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::blocking::blocking;
use crate::command::{CommandPolicy, CommandSandbox};
use crate::workspace::Workspace;

pub use definition::{Definition, Effect, Limits, Permission, Provider};
pub use egress::{Egress, EgressError, HostPattern, HostPatternError};
pub use environment::Environment;
pub use error::ToolError;
pub use fetch::Redirects;
pub use kind::{Kind, Parameter};
pub use llm::Models;
pub use markdown::documentation;
pub use output::{Field, Output};
pub use save::Attachments;
pub use secrets::Secrets;
pub use subject::PolicySubject;
pub use table::{declarations, definition, definitions};
pub use tasks::{Subtasks, Waited, handed_off};

use environment::Variables;
use stop::Stop;

/// How many calls of one toolbox work on files at the same time; more wait. A script may start any
/// number of calls, and each that works on files occupies a thread.
const CONCURRENT_FILE_CALLS: usize = 8;

/// How many calls of all toolboxes together work on files at the same time. Well below the 512
/// threads that the runtime has for blocking work: those serve other things too, and a call that
/// takes long keeps its thread after it was given up.
static FILE_CALLS: Semaphore = Semaphore::const_new(64);

/// How many of them search the content of files: such a call keeps a processor busy as long as it
/// may, and the other tools need none to speak of.
static SEARCHES: Semaphore = Semaphore::const_new(16);

/// How many commands of one toolbox run at the same time; more wait.
const CONCURRENT_COMMANDS: usize = 8;

/// How many requests of one toolbox are under way at the same time; more wait.
const CONCURRENT_REQUESTS: usize = 16;

/// How many questions to models of one toolbox are under way at the same time; more wait.
const CONCURRENT_QUESTIONS: usize = 16;

/// How long is waited for writes whose calls were given up, when a script has ended.
const WRITES: Duration = Duration::from_secs(2);

/// The same once it was told to stop: whoever stopped it is waiting.
const WRITES_OF_STOPPED: Duration = Duration::from_millis(100);

/// The tool that waits for subtasks.
pub const AWAIT: &str = tasks::AWAIT.name;

/// The tool that makes requests.
pub const FETCH: &str = fetch::DEFINITION.name;

/// The tool that has another agent go on.
pub const HAND_OFF: &str = tasks::HAND_OFF.name;

/// What the tools of one task may do. The default grants nothing beyond the workspace.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// What commands may do.
    pub commands: CommandPolicy,
    /// Hosts that `fetch` may reach.
    pub hosts: Vec<HostPattern>,
}

/// What belongs to one call and not to the toolbox.
#[derive(Clone, Debug, Default)]
pub struct CallContext {
    /// Ends the call. Whatever it runs is killed, and a write that has begun is completed, so that
    /// its outcome is known.
    pub cancel: CancellationToken,
    /// What scripts had set for commands when the call was made; unset: what they have set when it
    /// is carried out. A call that is judged before it is carried out must find then what it was
    /// judged with.
    pub environment: Option<Arc<Environment>>,
    /// Where the call stands: in which script of its step, from 0, and its number there, from 1.
    /// What it makes of other tasks is known by that.
    pub place: (u32, u32),
    /// Says which redirects a request follows; none: all that lead to granted hosts.
    pub redirects: Option<Arc<dyn Redirects>>,
}

/// The tools of one task, bound to its workspace and policy. Calls may run concurrently.
#[derive(Debug)]
pub struct Toolbox {
    workspace: Workspace,
    policy: Policy,
    egress: Egress,
    sandbox: CommandSandbox,
    variables: Variables,
    secrets: Secrets,
    models: Models,
    subtasks: Subtasks,
    attachments: Attachments,
    /// How large a result may be for its script to get it, as JSON: whoever can cuts his to that.
    result_bytes: usize,
    files: Arc<Semaphore>,
    /// The threads that write for calls, also for those that were given up. Closed, so that whoever
    /// waits is told when there is none.
    writes: TaskTracker,
    commands: Semaphore,
    requests: Semaphore,
    questions: Semaphore,
}

impl Toolbox {
    /// Binds the tools to a workspace and a policy. `egress` and `sandbox` are made once per
    /// service and shared.
    #[must_use]
    pub fn new(
        workspace: Workspace,
        policy: Policy,
        egress: Egress,
        sandbox: CommandSandbox,
    ) -> Self {
        let writes = TaskTracker::new();
        writes.close();
        Self {
            workspace,
            policy,
            egress,
            sandbox,
            variables: Variables::default(),
            secrets: Secrets::default(),
            models: Models::default(),
            subtasks: Subtasks::default(),
            attachments: Attachments::default(),
            result_bytes: usize::MAX,
            files: Arc::new(Semaphore::new(CONCURRENT_FILE_CALLS)),
            writes,
            commands: Semaphore::new(CONCURRENT_COMMANDS),
            requests: Semaphore::new(CONCURRENT_REQUESTS),
            questions: Semaphore::new(CONCURRENT_QUESTIONS),
        }
    }

    /// The same with what its scripts may use without seeing it.
    #[must_use]
    pub fn with_secrets(self, secrets: Secrets) -> Self {
        Self { secrets, ..self }
    }

    /// The same with the models its scripts may ask.
    #[must_use]
    pub fn with_models(self, models: Models) -> Self {
        Self { models, ..self }
    }

    /// The same with the tasks its scripts may begin.
    #[must_use]
    pub fn with_subtasks(self, subtasks: Subtasks) -> Self {
        Self { subtasks, ..self }
    }

    /// The same with what people attached to the conversation.
    #[must_use]
    pub fn with_attachments(self, attachments: Attachments) -> Self {
        Self { attachments, ..self }
    }

    /// The same for scripts that get results of at most so many bytes, as JSON.
    #[must_use]
    pub fn with_result_bytes(self, result_bytes: usize) -> Self {
        Self { result_bytes, ..self }
    }

    /// The workspace the tools work in.
    #[must_use]
    pub fn workspace(&self) -> &Workspace {
        &self.workspace
    }

    /// Calls a tool. `args` is an object by parameter name, or an array by position.
    ///
    /// # Errors
    /// Every failure of a tool is a [`ToolError`] with a stable name, for example `FileNotFound`;
    /// the definitions say which. A command that exits with a status other than 0 and a response
    /// other than 2xx are results, not errors. Neither has been through [`Toolbox::scrub`].
    pub async fn call(
        &self,
        name: &str,
        args: Value,
        cx: &CallContext,
    ) -> Result<Value, ToolError> {
        let tool = provided(name)?;
        told(tool, self.call_tool(tool, args, cx).await)
    }

    async fn call_tool(
        &self,
        tool: &'static Definition,
        args: Value,
        cx: &CallContext,
    ) -> Result<Value, ToolError> {
        let arguments = self.check(tool, args)?;
        if cx.cancel.is_cancelled() {
            return Err(ToolError::cancelled(tool.name));
        }
        // The call's own token, so that whatever ends it also ends the thread that works for it.
        let cancel = cx.cancel.child_token();
        let _guard = cancel.clone().drop_guard();
        let environment = cx.environment.clone().unwrap_or_else(|| self.environment());
        if tool.permission == Permission::Tasks && tool.name != AWAIT {
            let _permit = admit(tool, &self.requests, &cancel).await?;
            return self.subtasks.run(tool, arguments, cx.place, &cancel).await;
        }
        self.carry_out(tool, arguments, cancel, &environment, cx.redirects.as_deref()).await
    }

    /// Takes the secrets that scripts may use out of what a call gives back. Whoever hands that on
    /// has to do so: a secret goes out with requests and commands only, but a program may have
    /// written it where any tool finds it.
    pub fn scrub(&self, value: &mut Value) {
        self.secrets.scrub(value);
    }

    /// The same, of what an error says.
    pub fn scrub_text(&self, text: &mut String) {
        self.secrets.scrub_text(text);
    }

    /// Asks whether a call of [`AWAIT`] that was made at the start of `time` has what it waits for;
    /// at its end the wait is over. Called in any other way it fails.
    ///
    /// # Errors
    /// As [`Toolbox::call`].
    pub async fn wait(
        &self,
        args: Value,
        time: Range<Timestamp>,
        cx: &CallContext,
    ) -> Result<Waited, ToolError> {
        let tool = provided(AWAIT)?;
        let is_one = args["tasks"].is_string();
        let arguments = parse(tool, self.check(tool, args)?)?;
        let _permit = admit(tool, &self.requests, &cx.cancel).await?;
        told(tool, self.subtasks.wait(arguments, is_one, time, cx.place, &cx.cancel).await)
    }

    /// Waits until nothing is written any more for calls that were given up, so that what is said
    /// then of the workspace holds. False where that takes too long: two seconds, or a tenth of one
    /// after `cancel`. What has not begun by then is not begun.
    pub async fn writes_end(&self, cancel: &CancellationToken) -> bool {
        let stopped = async {
            cancel.cancelled().await;
            tokio::time::sleep(WRITES_OF_STOPPED).await;
        };
        tokio::select! {
            biased;
            () = self.writes.wait() => true,
            () = stopped => false,
            () = tokio::time::sleep(WRITES) => false,
        }
    }

    async fn carry_out(
        &self,
        tool: &'static Definition,
        arguments: Value,
        cancel: CancellationToken,
        environment: &Environment,
        redirects: Option<&dyn Redirects>,
    ) -> Result<Value, ToolError> {
        match tool.name {
            "read_file" => self.on_files(tool, arguments, cancel, read::run).await,
            "create_file" => self.on_files(tool, arguments, cancel, write::run).await,
            "edit_file" => self.on_files(tool, arguments, cancel, edit::run).await,
            "list_files" => self.on_files(tool, arguments, cancel, list::run).await,
            "grep" => self.on_files(tool, arguments, cancel, grep::run).await,
            "find_file" => self.on_files(tool, arguments, cancel, find::run).await,
            "delete_file" => self.on_files(tool, arguments, cancel, delete::run).await,
            "save_file" => self.save(tool, arguments, cancel).await,
            "execute_command" => {
                let _permit = admit(tool, &self.commands, &cancel).await?;
                encode(
                    tool,
                    &execute::run(
                        self.commands_with(&cancel, environment),
                        parse(tool, arguments)?,
                    )
                    .await?,
                )
            }
            "node" | "python" | "git" | "npm" => {
                let _permit = admit(tool, &self.commands, &cancel).await?;
                let arguments = parse(tool, arguments)?;
                encode(
                    tool,
                    &program::run(tool.name, self.commands_with(&cancel, environment), arguments)
                        .await?,
                )
            }
            "getenv" => {
                encode(tool, &self.variables.get(&self.policy.commands, &parse(tool, arguments)?))
            }
            "setenv" => encode(tool, &self.variables.change(parse(tool, arguments)?)?),
            "secrets.get" => encode(tool, &self.secrets.get(&parse(tool, arguments)?)?),
            "tools.search" => encode(tool, &search::search(&parse(tool, arguments)?)),
            "tools.describe" => search::describe(&parse(tool, arguments)?),
            "pwd" => encode(tool, &self.workspace.root().to_string_lossy()),
            "fetch" => {
                let _permit = admit(tool, &self.requests, &cancel).await?;
                let arguments = parse(tool, arguments)?;
                let network = fetch::Network {
                    egress: &self.egress,
                    granted: &self.policy.hosts,
                    secrets: &self.secrets,
                    redirects,
                    result_bytes: self.result_bytes,
                };
                tokio::select! {
                    result = fetch::run(&network, arguments, &cancel) => encode(tool, &result?),
                    () = cancel.cancelled() => Err(ToolError::cancelled(tool.name)),
                }
            }
            "llm.ask" | "llm.json" | "llm.embed" => {
                let _permit = admit(tool, &self.questions, &cancel).await?;
                let answered = async {
                    match tool.name {
                        "llm.ask" => {
                            self.models.ask(parse(tool, arguments)?).await.map(Value::String)
                        }
                        "llm.json" => self.models.json(parse(tool, arguments)?).await,
                        _ => encode(
                            tool,
                            &self.models.embed(parse(tool, arguments)?, self.result_bytes).await?,
                        ),
                    }
                };
                tokio::select! {
                    answer = answered => answer,
                    () = cancel.cancelled() => Err(ToolError::cancelled(tool.name)),
                }
            }
            AWAIT => {
                let words =
                    format!("{AWAIT} can only be called by a script, which is put away meanwhile.");
                Err(ToolError::new("TasksUnavailable", words))
            }
            other => Err(error::unknown_tool(other)),
        }
    }

    /// The canonical form of a call's arguments, in which it is carried out, shown and approved:
    /// see [`Definition::canonical`]. Absolute paths below the workspace are made relative to it.
    ///
    /// # Errors
    /// When there is no such tool, or the arguments do not fit; the call itself would fail with the
    /// same error.
    pub fn canonical(&self, name: &str, args: &Value) -> Result<Value, ToolError> {
        self.check(provided(name)?, args.clone())
    }

    /// What a policy must permit for a call with these canonical arguments: its
    /// [`Definition::subject`], for a path that leads elsewhere through symbolic links also the
    /// path it leads to, and for a command that finds variables set also the line with them in
    /// front. A call is permitted when each of them is.
    ///
    /// The links are looked at now. A command that runs meanwhile could change them before the call
    /// does its work; who is granted commands could as well read and write with those.
    ///
    /// # Errors
    /// When there is no such tool.
    pub async fn subjects(
        &self,
        name: &str,
        canonical: &Value,
        environment: &Environment,
    ) -> Result<Vec<PolicySubject>, ToolError> {
        let tool = provided(name)?;
        let subject = tool.subject(canonical);
        let (path, is_tree) = match &subject {
            PolicySubject::Path(path) => (path.clone(), false),
            PolicySubject::Tree(path) => (path.clone(), true),
            // A variable can make a program do something else as well as an argument can:
            // `GIT_SSH_COMMAND`, `BASH_ENV`.
            PolicySubject::Command(line) => {
                let assignments =
                    environment::assignments(environment, &canonical["options"]["env"]);
                let prefixed = (!assignments.is_empty()).then(|| format!("{assignments} {line}"));
                return Ok([Some(subject), prefixed.map(PolicySubject::Command)]
                    .into_iter()
                    .flatten()
                    .collect());
            }
            _ => return Ok(vec![subject]),
        };
        let workspace = self.workspace.clone();
        // A deletion takes the link itself away and not what it leads to.
        let follow = tool.permission != Permission::FilesDelete;
        let named = path.clone();
        let resolving = blocking(move || {
            let path = named;
            let located = workspace.locate(&path).ok()?;
            // A file has nothing below it.
            let is_tree = is_tree && workspace.open_directory(&located).is_ok();
            Some((workspace.leads_to(&located, follow).ok()?.shown(), is_tree))
        });
        // What cannot be resolved cannot be used either, and the call says why.
        let Some((target, is_tree)) = resolving.await.flatten() else { return Ok(vec![subject]) };
        let kind = if is_tree { PolicySubject::Tree } else { PolicySubject::Path };
        let mut subjects: Vec<PolicySubject> = [path, target].map(kind).into();
        subjects.dedup();
        Ok(subjects)
    }

    /// What scripts have set for all commands by now.
    pub fn environment(&self) -> Arc<Environment> {
        Arc::new(self.variables.now())
    }

    /// Takes notice of a call of a script that had ended in an earlier process, and that is not
    /// made again: what it had set for commands holds for the scripts after it. A script that is
    /// continued sets its variables again where it comes to each call. Calls that change nothing in
    /// the toolbox are none of its business.
    pub fn replay(&self, name: &str, result: &Value) {
        if definition(name).is_some_and(|tool| tool.name == environment::SETENV.name) {
            self.variables.restore(result);
        }
    }

    fn commands_with<'a>(
        &'a self,
        cancel: &'a CancellationToken,
        variables: &'a Environment,
    ) -> execute::Host<'a> {
        let Self { sandbox, workspace, policy, secrets, .. } = self;
        execute::Host { sandbox, workspace, policy: &policy.commands, variables, secrets, cancel }
    }

    fn check(&self, tool: &Definition, args: Value) -> Result<Value, ToolError> {
        let relative = |path: &str| {
            let path = argument::lexical(path);
            self.workspace
                .below_root(&path)
                .map_or(path, |below| if below.is_empty() { ".".to_owned() } else { below })
        };
        argument::check(tool, args, &relative)
    }

    /// Runs a tool that works on files, on a thread where it may block.
    async fn on_files<A, R>(
        &self,
        tool: &'static Definition,
        arguments: Value,
        cancel: CancellationToken,
        run: fn(&Workspace, A, &Stop) -> Result<R, ToolError>,
    ) -> Result<Value, ToolError>
    where
        A: DeserializeOwned + Send + 'static,
        R: Serialize + 'static,
    {
        let arguments: A = parse(tool, arguments)?;
        let permits = self.admit_to_files(tool, &cancel).await?;
        let workspace = self.workspace.clone();
        let stop = Stop::of(tool, cancel.clone());
        let writes = tool.effect != Effect::Read;
        let counted = writes.then(|| self.writes.token());
        let working = blocking(move || {
            // Held by the thread and not by the call, which may be given up before the thread ends.
            let _held = (permits, counted);
            run(&workspace, arguments, &stop).and_then(|result| encode(tool, &result))
        });
        let died = || died(tool);
        if writes {
            // Once begun, a write is waited for: its caller must know whether it happened. Where
            // the script itself ends before, `writes_end` waits.
            return working.await.ok_or_else(died)?;
        }
        tokio::select! {
            result = working => result.ok_or_else(died)?,
            () = cancel.cancelled() => Err(ToolError::cancelled(tool.name)),
        }
    }

    /// Saves an attached file: its content is read here, and written on a thread where that may
    /// block.
    async fn save(
        &self,
        tool: &'static Definition,
        arguments: Value,
        cancel: CancellationToken,
    ) -> Result<Value, ToolError> {
        let arguments: save::Arguments = parse(tool, arguments)?;
        let permits = self.admit_to_files(tool, &cancel).await?;
        let (pieces, content) =
            self.attachments.read(&arguments, self.policy.commands.limits.file_bytes).await?;
        let (sender, receiver) = tokio::sync::mpsc::channel(1);
        let workspace = self.workspace.clone();
        let stop = Stop::of(tool, cancel);
        let counted = self.writes.token();
        let writing = blocking(move || {
            let _held = (permits, counted);
            save::write(&workspace, &arguments, &content, receiver, &stop)
        });
        // It ends by itself when it is cancelled, and is waited for: its caller must know whether
        // it happened.
        let (saved, ()) = tokio::join!(writing, save::pass(pieces, sender));
        encode(tool, &saved.ok_or_else(|| died(tool))??)
    }

    /// Leave to work on files, among the calls of this toolbox and of all.
    async fn admit_to_files(
        &self,
        tool: &Definition,
        cancel: &CancellationToken,
    ) -> Result<
        (OwnedSemaphorePermit, Option<SemaphorePermit<'static>>, SemaphorePermit<'static>),
        ToolError,
    > {
        let cancelled = || ToolError::cancelled(tool.name);
        let permit = tokio::select! {
            permit = Arc::clone(&self.files).acquire_owned() => permit.map_err(|_| cancelled())?,
            () = cancel.cancelled() => return Err(cancelled()),
        };
        let searches = tool.name == grep::DEFINITION.name;
        let search = if searches { Some(admit(tool, &SEARCHES, cancel).await?) } else { None };
        Ok((permit, search, admit(tool, &FILE_CALLS, cancel).await?))
    }
}

/// What a call gave. That it fails only as its definition says is for tests to find out, of
/// whatever they call.
fn told<T>(tool: &Definition, result: Result<T, ToolError>) -> Result<T, ToolError> {
    if let Err(error) = &result {
        debug_assert!(
            tool.can_fail_with(error.name),
            "the definition of {} does not tell of {error}",
            tool.name
        );
    }
    result
}

/// A thread that worked for a call is gone.
fn died(tool: &Definition) -> ToolError {
    ToolError::internal(tool.name, "the thread that worked for it ended unexpectedly")
}

/// The tool of this name, if the toolbox provides it.
fn provided(name: &str) -> Result<&'static Definition, ToolError> {
    definition(name)
        .filter(|tool| tool.provider == Provider::Host)
        .ok_or_else(|| error::unknown_tool(name))
}

async fn admit<'a>(
    tool: &Definition,
    semaphore: &'a Semaphore,
    cancel: &CancellationToken,
) -> Result<SemaphorePermit<'a>, ToolError> {
    tokio::select! {
        permit = semaphore.acquire() => permit.map_err(|_| ToolError::cancelled(tool.name)),
        () = cancel.cancelled() => Err(ToolError::cancelled(tool.name)),
    }
}

fn parse<A: DeserializeOwned>(tool: &Definition, arguments: Value) -> Result<A, ToolError> {
    // The arguments were checked against the definition; a difference between the two is a bug of
    // ours.
    serde_json::from_value(arguments).map_err(|e| ToolError::internal(tool.name, &e.to_string()))
}

fn encode(tool: &Definition, result: &impl Serialize) -> Result<Value, ToolError> {
    serde_json::to_value(result).map_err(|e| ToolError::internal(tool.name, &e.to_string()))
}

#[cfg(test)]
pub(crate) mod tests;
