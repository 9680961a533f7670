//! The tools that scripts call.
//!
//! [`definitions`] is the single description of the tools. The check of the arguments, the
//! TypeScript declarations for the model, the JSON schema and the names for the sandbox all come
//! from it. Each tool has its own module. Error messages help a model to recover: they say what was
//! wrong, where, and what to do instead.

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
mod size;
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
pub use tasks::{AwaitOutcome, Subtasks, handed_off};

use environment::Variables;
use stop::Stop;

/// Maximum concurrent calls of one toolbox that work on files; more wait. A script may start any
/// number of calls, and each call that works on files occupies a thread.
const CONCURRENT_FILE_CALLS: usize = 8;

/// Maximum concurrent calls of all toolboxes that work on files. It is well below the runtime's 512
/// threads for blocking work: those serve other things too, and a long call keeps its thread after
/// it was abandoned.
static FILE_CALLS: Semaphore = Semaphore::const_new(64);

/// Maximum concurrent calls of all toolboxes that search the content of files. Such a call can keep
/// a processor busy for its whole time; other tools need little CPU.
static SEARCHES: Semaphore = Semaphore::const_new(16);

/// Maximum concurrent commands of one toolbox; more wait.
const CONCURRENT_COMMANDS: usize = 8;

/// Maximum concurrent requests of one toolbox; more wait.
const CONCURRENT_REQUESTS: usize = 16;

/// Maximum concurrent questions to models of one toolbox; more wait.
const CONCURRENT_QUESTIONS: usize = 16;

/// How long to wait for writes of abandoned calls when a script has ended.
const WRITE_GRACE_PERIOD: Duration = Duration::from_secs(2);

/// The same after the script was canceled: the canceler is waiting.
const WRITE_GRACE_PERIOD_AFTER_CANCEL: Duration = Duration::from_millis(100);

/// The tool that waits for subtasks.
pub const AWAIT: &str = tasks::AWAIT.name;

/// The tool that makes requests.
pub const FETCH: &str = fetch::DEFINITION.name;

/// The tool that hands the task over to another agent.
pub const HAND_OFF: &str = tasks::HAND_OFF.name;

/// Permissions of the tools of one task. The default grants nothing beyond the workspace.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    /// What commands may do.
    pub commands: CommandPolicy,
    /// Hosts that `fetch` may reach.
    pub hosts: Vec<HostPattern>,
}

/// The context of one call.
#[derive(Clone, Debug, Default)]
pub struct CallContext {
    /// Ends the call. Its processes are killed. A write that has begun is completed, so that its
    /// outcome is known.
    pub cancel: CancellationToken,
    /// The variables that scripts had set for commands when the call was made. `None` means the
    /// variables at execution time. A call whose approval precedes its execution must run with the
    /// variables it was approved with.
    pub environment: Option<Arc<Environment>>,
    /// Position of the call: the index of its script in the step, from 0, and its number in the
    /// script, from 1. It identifies what the call creates in other tasks.
    pub position: (u32, u32),
    /// Decides which redirects a request follows. `None` follows all redirects to granted hosts.
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
    /// Largest result for a script, in bytes of JSON. A larger one is an error, or truncated if the
    /// call asked for that.
    result_bytes: usize,
    files: Arc<Semaphore>,
    /// The threads that write for calls, abandoned calls included. The tracker is closed, so that a
    /// waiter is woken when there are none.
    writes: TaskTracker,
    commands: Semaphore,
    requests: Semaphore,
    questions: Semaphore,
}

impl Toolbox {
    /// Binds the tools to a workspace and a policy. `egress` and `sandbox` are created once per
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
            result_bytes: crate::sandbox::Limits::default().call_bytes,
            files: Arc::new(Semaphore::new(CONCURRENT_FILE_CALLS)),
            writes,
            commands: Semaphore::new(CONCURRENT_COMMANDS),
            requests: Semaphore::new(CONCURRENT_REQUESTS),
            questions: Semaphore::new(CONCURRENT_QUESTIONS),
        }
    }

    /// Adds the secrets that its scripts may use without seeing them.
    #[must_use]
    pub fn with_secrets(self, secrets: Secrets) -> Self {
        Self { secrets, ..self }
    }

    /// Adds the models that its scripts may ask.
    #[must_use]
    pub fn with_models(self, models: Models) -> Self {
        Self { models, ..self }
    }

    /// Adds access to subtasks.
    #[must_use]
    pub fn with_subtasks(self, subtasks: Subtasks) -> Self {
        Self { subtasks, ..self }
    }

    /// Adds the files that people attached to the conversation.
    #[must_use]
    pub fn with_attachments(self, attachments: Attachments) -> Self {
        Self { attachments, ..self }
    }

    /// Sets the largest result, in bytes of JSON.
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
    /// Every failure of a tool is a [`ToolError`] with a stable name, for example
    /// `FileNotFound`; the definitions list them. A command that exits with a status other than 0
    /// and a response other than 2xx are results, not errors.
    ///
    /// Neither results nor errors contain the values of secrets that the call itself sent. Values
    /// that a program has written into files are ordinary content.
    pub async fn call(
        &self,
        name: &str,
        args: Value,
        cx: &CallContext,
    ) -> Result<Value, ToolError> {
        let tool = host_tool(name)?;
        check_error_name(tool, self.call_tool(tool, args, cx).await)
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
        // The call's own token: the end of the call, for whatever reason, also ends its thread.
        let cancel = cx.cancel.child_token();
        let _guard = cancel.clone().drop_guard();
        let environment = cx.environment.clone().unwrap_or_else(|| self.environment());
        if tool.permission == Permission::Tasks && tool.name != AWAIT {
            let _permit = admit(tool, &self.requests, &cancel).await?;
            return self.subtasks.run(tool, arguments, cx.position, &cancel).await;
        }
        self.dispatch(tool, arguments, cancel, &environment, cx.redirects.as_deref()).await
    }

    /// Checks whether a call of [`AWAIT`] has what it waits for. The call was made at the start of
    /// `time` and times out at its end. [`AWAIT`] fails when it is called in any other way.
    ///
    /// # Errors
    /// As [`Toolbox::call`].
    pub async fn wait(
        &self,
        args: Value,
        time: Range<Timestamp>,
        cx: &CallContext,
    ) -> Result<AwaitOutcome, ToolError> {
        let tool = host_tool(AWAIT)?;
        let is_one = args["tasks"].is_string();
        let arguments = parse(tool, self.check(tool, args)?)?;
        let _permit = admit(tool, &self.requests, &cx.cancel).await?;
        check_error_name(
            tool,
            self.subtasks.wait(arguments, is_one, time, cx.position, &cx.cancel).await,
        )
    }

    /// Waits until abandoned calls have stopped writing, so that statements about the workspace
    /// stay true. Returns false after two seconds, or a tenth of a second after `cancel`. Writes
    /// that have not begun by then never begin.
    pub async fn wait_for_writes(&self, cancel: &CancellationToken) -> bool {
        let stopped = async {
            cancel.cancelled().await;
            tokio::time::sleep(WRITE_GRACE_PERIOD_AFTER_CANCEL).await;
        };
        tokio::select! {
            biased;
            () = self.writes.wait() => true,
            () = stopped => false,
            () = tokio::time::sleep(WRITE_GRACE_PERIOD) => false,
        }
    }

    async fn dispatch(
        &self,
        tool: &'static Definition,
        arguments: Value,
        cancel: CancellationToken,
        environment: &Environment,
        redirects: Option<&dyn Redirects>,
    ) -> Result<Value, ToolError> {
        let result_bytes = self.result_bytes;
        match tool.name {
            "read_file" => {
                self.run_on_files(tool, arguments, cancel, bounded(read::run, result_bytes)).await
            }
            "create_file" => self.run_on_files(tool, arguments, cancel, write::run).await,
            "edit_file" => self.run_on_files(tool, arguments, cancel, edit::run).await,
            "list_files" => {
                self.run_on_files(tool, arguments, cancel, bounded(list::run, result_bytes)).await
            }
            "grep" => {
                self.run_on_files(tool, arguments, cancel, bounded(grep::run, result_bytes)).await
            }
            "find_file" => {
                self.run_on_files(tool, arguments, cancel, bounded(find::run, result_bytes)).await
            }
            "delete_file" => self.run_on_files(tool, arguments, cancel, delete::run).await,
            "save_file" => self.save(tool, arguments, cancel).await,
            "execute_command" => {
                let _permit = admit(tool, &self.commands, &cancel).await?;
                encode(
                    tool,
                    &execute::run(self.command_host(&cancel, environment), parse(tool, arguments)?)
                        .await?,
                )
            }
            "node" | "python" | "git" | "npm" => {
                let _permit = admit(tool, &self.commands, &cancel).await?;
                let arguments = parse(tool, arguments)?;
                encode(
                    tool,
                    &program::run(tool.name, self.command_host(&cancel, environment), arguments)
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
                    result_bytes,
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
                            &self.models.embed(parse(tool, arguments)?, result_bytes).await?,
                        ),
                    }
                };
                tokio::select! {
                    answer = answered => answer,
                    () = cancel.cancelled() => Err(ToolError::cancelled(tool.name)),
                }
            }
            AWAIT => {
                let message = format!(
                    "{AWAIT} can only be called by a script, which is suspended meanwhile."
                );
                Err(ToolError::new("TasksUnavailable", message))
            }
            other => Err(error::unknown_tool(other)),
        }
    }

    /// The canonical form of a call's arguments, in which it is executed, shown and approved: see
    /// [`Definition::canonical`]. Absolute paths below the workspace are made relative to it.
    ///
    /// # Errors
    /// When there is no such tool, or the arguments do not fit; the call itself would fail with the
    /// same error.
    pub fn canonical(&self, name: &str, args: &Value) -> Result<Value, ToolError> {
        self.check(host_tool(name)?, args.clone())
    }

    /// What a policy must permit for a call with these canonical arguments: its
    /// [`Definition::subject`], for a path with symbolic links also the resolved path, and for a
    /// command with environment variables also the command line with the variables in front. A call
    /// is permitted when each of them is.
    ///
    /// Links are resolved now. A concurrent command could change them before the call does its
    /// work, but a script that may run commands could as well read and write with those.
    ///
    /// # Errors
    /// When there is no such tool.
    pub async fn subjects(
        &self,
        name: &str,
        canonical: &Value,
        environment: &Environment,
    ) -> Result<Vec<PolicySubject>, ToolError> {
        let tool = host_tool(name)?;
        let subject = tool.subject(canonical);
        let (path, is_tree) = match &subject {
            PolicySubject::Path(path) => (path.clone(), false),
            PolicySubject::Tree(path) => (path.clone(), true),
            // A variable can change what a program does as much as an argument can:
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
        // A deletion removes the link itself and not its target.
        let follow = tool.permission != Permission::FilesDelete;
        let named = path.clone();
        let resolving = blocking(move || {
            let path = named;
            let located = workspace.locate(&path).ok()?;
            // A file has nothing below it.
            let is_tree = is_tree && workspace.open_directory(&located).is_ok();
            Some((workspace.resolve_links(&located, follow).ok()?.display(), is_tree))
        });
        // A path that cannot be resolved cannot be used either; the call reports why.
        let Some((target, is_tree)) = resolving.await.flatten() else { return Ok(vec![subject]) };
        let kind = if is_tree { PolicySubject::Tree } else { PolicySubject::Path };
        let mut subjects: Vec<PolicySubject> = [path, target].map(kind).into();
        subjects.dedup();
        Ok(subjects)
    }

    /// The variables that scripts have set for all commands so far.
    pub fn environment(&self) -> Arc<Environment> {
        Arc::new(self.variables.snapshot())
    }

    /// Restores the effect on the toolbox of a call that is not repeated because its script had
    /// ended in an earlier process: the variables it had set apply to the scripts after it. A
    /// resumed script sets its variables again when it replays each call. Calls that change nothing
    /// in the toolbox are ignored.
    pub fn replay(&self, name: &str, result: &Value) {
        if definition(name).is_some_and(|tool| tool.name == environment::SETENV.name) {
            self.variables.restore(result);
        }
    }

    fn command_host<'a>(
        &'a self,
        cancel: &'a CancellationToken,
        variables: &'a Environment,
    ) -> execute::Host<'a> {
        let Self { sandbox, workspace, policy, secrets, result_bytes, .. } = self;
        let (policy, result_bytes) = (&policy.commands, *result_bytes);
        execute::Host { sandbox, workspace, policy, variables, secrets, result_bytes, cancel }
    }

    fn check(&self, tool: &Definition, args: Value) -> Result<Value, ToolError> {
        let relative = |path: &str| {
            let path = argument::normalize_lexically(path);
            self.workspace
                .below_root(&path)
                .map_or(path, |below| if below.is_empty() { ".".to_owned() } else { below })
        };
        argument::check(tool, args, &relative)
    }

    /// Runs a tool that works on files, on a thread that may block.
    async fn run_on_files<A, R>(
        &self,
        tool: &'static Definition,
        arguments: Value,
        cancel: CancellationToken,
        run: impl FnOnce(&Workspace, A, &Stop) -> Result<R, ToolError> + Send + 'static,
    ) -> Result<Value, ToolError>
    where
        A: DeserializeOwned + Send + 'static,
        R: Serialize + 'static,
    {
        let arguments: A = parse(tool, arguments)?;
        let permits = self.admit_to_files(tool, &cancel).await?;
        let workspace = self.workspace.clone();
        let stop = Stop::for_tool(tool, cancel.clone());
        let writes = tool.effect != Effect::Read;
        let counted = writes.then(|| self.writes.token());
        let working = blocking(move || {
            // The thread holds them, not the call, which may be abandoned before the thread ends.
            let _guards = (permits, counted);
            run(&workspace, arguments, &stop).and_then(|result| encode(tool, &result))
        });
        let thread_died = || thread_died(tool);
        if writes {
            // A write that has begun is awaited: its caller must know whether it happened. If the
            // script itself ends earlier, `wait_for_writes` waits.
            return working.await.ok_or_else(thread_died)?;
        }
        tokio::select! {
            result = working => result.ok_or_else(thread_died)?,
            () = cancel.cancelled() => Err(ToolError::cancelled(tool.name)),
        }
    }

    /// Saves an attached file: its content is read here, and written on a thread that may block.
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
        let stop = Stop::for_tool(tool, cancel);
        let counted = self.writes.token();
        let writing = blocking(move || {
            let _held = (permits, counted);
            save::write(&workspace, &arguments, &content, receiver, &stop)
        });
        // It ends by itself when it is cancelled, and is waited for: its caller must know whether
        // it happened.
        let (saved, ()) = tokio::join!(writing, save::forward(pieces, sender));
        encode(tool, &saved.ok_or_else(|| thread_died(tool))??)
    }

    /// Acquires permits for work on files, from this toolbox and from the service.
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

/// Wraps work on files whose result takes at most `result_bytes` bytes of JSON.
fn bounded<A, R>(
    run: fn(&Workspace, A, &Stop, usize) -> Result<R, ToolError>,
    result_bytes: usize,
) -> impl FnOnce(&Workspace, A, &Stop) -> Result<R, ToolError> + Send + 'static
where
    A: 'static,
    R: 'static,
{
    move |workspace, arguments, stop| run(workspace, arguments, stop, result_bytes)
}

/// Returns the result of a call. In debug builds it panics on an error that the definition does not
/// list, so that every test checks the definitions.
fn check_error_name<T>(tool: &Definition, result: Result<T, ToolError>) -> Result<T, ToolError> {
    if let Err(error) = &result {
        debug_assert!(
            tool.can_fail_with(error.name),
            "the definition of {} does not list {error}",
            tool.name
        );
    }
    result
}

/// The thread of a call has panicked.
fn thread_died(tool: &Definition) -> ToolError {
    ToolError::internal(tool.name, "the thread that worked for it ended unexpectedly")
}

/// The tool of this name, if the toolbox executes it.
fn host_tool(name: &str) -> Result<&'static Definition, ToolError> {
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
    // The arguments were checked against the definition; a mismatch here is our bug.
    serde_json::from_value(arguments).map_err(|e| ToolError::internal(tool.name, &e.to_string()))
}

fn encode(tool: &Definition, result: &impl Serialize) -> Result<Value, ToolError> {
    serde_json::to_value(result).map_err(|e| ToolError::internal(tool.name, &e.to_string()))
}

#[cfg(test)]
pub(crate) mod tests;
