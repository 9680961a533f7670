//! The reconciler's commit: everything one decision changes, in one guarded statement.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use construct_domain::{
    AgentId, ApprovalId, MessageId, StepId,
    approval::{ApprovalRequest, ClosedApproval},
    context::Context,
    decide::ContextCompaction,
    message::{Content, Source},
    money::{Usage, tokens_of_content},
    task::{QueuedMessage, StepState, Task, TurnOutcome},
};

use crate::{
    Error, LoadedTask, NewEvent, StepReservation, StepUsage, Store,
    error::violated_constraint,
    event::{to_i64, to_u64},
    task::statement::{Row, statement},
    text,
    time::{from_sql_option, micros, sql, sql_option},
    usage::LedgerRow,
};

/// Everything that one decision changes. See [`TaskCommit::new`].
#[derive(Debug, Clone)]
pub struct TaskCommit<'a> {
    /// The task that the decision was made from.
    pub before: &'a LoadedTask,
    /// The new state. The agent, the limit of turns, `suspend` and `titled` are not written,
    /// because users own them. A cancel or rewind is cleared if it is gone from the state and no
    /// newer one was requested meanwhile.
    pub task: &'a Task,
    /// The queued message that enters the transcript, and its position.
    pub admitted: Option<(MessageId, i64)>,
    /// Further messages of the transcript.
    pub appended: Vec<AppendedMessage>,
    /// The user message whose turn ended; never the admitted one.
    pub ended_message: Option<EndedMessage>,
    /// Drop the messages that were queued when the cancel or rewind was requested, with this text
    /// as their error. Later ones stay, and the task is reconciled again immediately because of
    /// them.
    pub drop_queued: Option<String>,
    /// Supersede the transcript from this position on, including what this commit appends.
    pub rewind_from: Option<i64>,
    /// The new compaction of the transcript.
    pub compaction: Option<ContextCompaction>,
    /// Usage of steps. A step that was booked before is skipped.
    pub usage: Vec<StepUsage>,
    /// The step whose reservation is settled: the cost of [`TaskCommit::usage`] is spent, the rest
    /// is released.
    pub settled_step: Option<StepId>,
    /// The reservation of the step that starts.
    pub reservation: Option<StepReservation>,
    /// Calls to add, by tool.
    pub tool_uses: BTreeMap<String, i64>,
    /// A title; ignored if the task got one meanwhile.
    pub title: Option<String>,
    /// The trace of the turn that begins; none leaves the last one.
    pub trace_id: Option<String>,
    /// Approvals to request.
    pub new_approvals: Vec<NewApproval>,
    /// Approvals to close. Decided ones stay decided.
    pub closed_approvals: Vec<ClosedApproval>,
    /// Events to store in the task's stream, in order.
    pub events: Vec<NewEvent>,
    /// The time of the decision.
    pub now: Timestamp,
}

/// A message that the reconciler writes.
#[derive(Debug, Clone, PartialEq)]
pub struct AppendedMessage {
    /// Its id.
    pub id: MessageId,
    /// Its position in the transcript.
    pub position: i64,
    /// The sender.
    pub source: Source,
    /// The content.
    pub content: Content,
    /// The agent that wrote it.
    pub agent: Option<AgentId>,
    /// Of the model call that wrote it.
    pub usage: Usage,
    /// The step it is the result of.
    pub step: Option<StepId>,
}

/// An approval to request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewApproval {
    /// Its id. An existing approval of the same call of the same step with other arguments keeps
    /// its id.
    pub id: ApprovalId,
    /// The step that runs the script.
    pub step: StepId,
    /// The call that needs the approval.
    pub request: ApprovalRequest,
    /// The deadline for a decision.
    pub expires_at: Timestamp,
}

/// A user message whose turn ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedMessage {
    /// The message.
    pub message: MessageId,
    /// Why the turn failed, if it did.
    pub error: Option<String>,
}

/// The result of a commit.
#[derive(Debug, Clone, PartialEq)]
pub struct CommittedTask {
    /// The version, which guards the next commit.
    pub version: i64,
    /// The task's revision.
    pub revision: i64,
    /// Sequence of the commit's first event; the others follow it with no gap. Without events, the
    /// sequence the next one will have.
    pub first_event_sequence: u64,
    /// When the next reconcile is due. Earlier than decided if queued messages survived a cancel.
    pub next_wake: Option<Timestamp>,
    /// Whether there are new intents since the task was loaded: reconcile again immediately.
    pub has_new_intents: bool,
    /// The task after the commit, so that the next decision need not load it. None when the commit
    /// does not determine it completely: with new intents, open approvals, suspended scripts, or an
    /// applicable budget.
    ///
    /// Later changes are detected: the commit of a decision that was made from it fails with
    /// [`Error::Conflict`].
    pub cached_task: Option<Box<LoadedTask>>,
}

impl<'a> TaskCommit<'a> {
    /// A commit of only the state.
    pub fn new(before: &'a LoadedTask, task: &'a Task, now: Timestamp) -> Self {
        Self {
            before,
            task,
            admitted: None,
            appended: Vec::new(),
            ended_message: None,
            drop_queued: None,
            rewind_from: None,
            compaction: None,
            usage: Vec::new(),
            settled_step: None,
            reservation: None,
            tool_uses: BTreeMap::new(),
            title: None,
            trace_id: None,
            new_approvals: Vec::new(),
            closed_approvals: Vec::new(),
            events: Vec::new(),
            now,
        }
    }

    /// The task after the commit, if the commit determines it completely.
    fn cached_task(&self, row: &Row) -> Option<Box<LoadedTask>> {
        let is_suspended = self
            .task
            .step
            .as_ref()
            .is_some_and(|step| matches!(step.state, StepState::Suspended { .. }));
        let is_undetermined =
            self.changes_queue_or_approvals() || is_suspended || !self.task.approvals.is_empty();
        let before = self.before;
        if row.has_new_intents
            || is_undetermined
            || before.drop_intent().is_some()
            || before.cost_inputs.is_some()
        {
            return None;
        }
        let new_title = self.title.as_ref().filter(|_| !before.task.titled);
        let titled = self.task.titled || new_title.is_some();
        let (base, transcript, queued) =
            (before.task.context.base, row.transcript_tokens, row.queued_tokens);
        let context = Context { base, transcript, queued, ..self.task.context.clone() };
        Some(Box::new(LoadedTask {
            task: Task {
                titled,
                next_wake: from_sql_option(row.next_wake),
                context,
                ..self.task.clone()
            },
            queued: row.queued.map(|message| QueuedMessage {
                message: MessageId::from_uuid(message),
                interrupts: row.queued_interrupts,
            }),
            version: row.version,
            intents_seen: before.intents,
            title: new_title.unwrap_or(&before.title).clone(),
            phase_since: if self.task.phase == before.task.phase {
                before.phase_since
            } else {
                micros(self.now)
            },
            event_sequence: to_u64(row.event_sequence),
            trace_id: self.trace_id.clone().or_else(|| before.trace_id.clone()),
            revision: row.revision,
            ended_subtasks: None,
            is_cached: true,
            ..before.clone()
        }))
    }

    /// Whether the commit rewinds or compacts the transcript, or changes queued messages or
    /// approvals.
    fn changes_queue_or_approvals(&self) -> bool {
        self.drop_queued.is_some()
            || self.rewind_from.is_some()
            || self.compaction.is_some()
            || !self.new_approvals.is_empty()
            || !self.closed_approvals.is_empty()
    }
}

/// A message, as the statement reads it from JSON.
#[derive(Serialize)]
struct MessageRow<'a> {
    id: Uuid,
    position: i64,
    source: &'static str,
    content: &'a Content,
    agent_id: Option<Uuid>,
    step_id: Option<Uuid>,
    #[serde(flatten)]
    usage: Usage,
    estimated_tokens: i64,
}

impl<'a> From<&'a AppendedMessage> for MessageRow<'a> {
    fn from(message: &'a AppendedMessage) -> Self {
        Self {
            id: message.id.uuid(),
            position: message.position,
            source: message.source.as_str(),
            content: &message.content,
            agent_id: message.agent.map(AgentId::uuid),
            step_id: message.step.map(StepId::uuid),
            usage: message.usage,
            estimated_tokens: tokens_of_content(&message.content),
        }
    }
}

/// A new approval, as the statement reads it from JSON.
#[derive(Serialize)]
struct NewApprovalRow<'a> {
    id: Uuid,
    step_id: Uuid,
    script: u32,
    number: u32,
    tool: &'a str,
    arguments: &'a str,
    arguments_size: u64,
    arguments_hash: &'a str,
    reason: &'a str,
    expires_at: Timestamp,
}

impl<'a> From<&'a NewApproval> for NewApprovalRow<'a> {
    fn from(approval: &'a NewApproval) -> Self {
        let ApprovalRequest { call, tool, arguments, arguments_size, reason } = &approval.request;
        Self {
            id: approval.id.uuid(),
            step_id: approval.step.uuid(),
            script: call.script,
            number: call.number,
            tool,
            arguments,
            arguments_size: *arguments_size,
            arguments_hash: &call.hash,
            reason,
            expires_at: micros(approval.expires_at),
        }
    }
}

/// A closed approval, as the statement reads it from JSON.
#[derive(Serialize)]
struct ClosedApprovalRow<'a> {
    id: Uuid,
    state: &'static str,
    words: &'a str,
}

impl<'a> From<&'a ClosedApproval> for ClosedApprovalRow<'a> {
    fn from(closed: &'a ClosedApproval) -> Self {
        Self { id: closed.id.uuid(), state: closed.state.as_str(), words: &closed.reason }
    }
}

/// A compaction, as the statement reads it from JSON.
#[derive(Serialize)]
struct CompactionRow<'a> {
    through: i64,
    kept: &'a [i64],
    content: &'a str,
    estimated_tokens: i64,
    replaced_tokens: i64,
    summary: bool,
}

impl<'a> From<&'a ContextCompaction> for CompactionRow<'a> {
    fn from(compacted: &'a ContextCompaction) -> Self {
        Self {
            through: compacted.through,
            kept: &compacted.kept,
            content: &compacted.text,
            estimated_tokens: compacted.tokens,
            replaced_tokens: compacted.replaced,
            summary: compacted.summary,
        }
    }
}

/// The encoded parameters of the statement.
struct StatementParameters {
    turn: Option<Value>,
    step: Option<Value>,
    appended: Value,
    tool_uses: Value,
    new_approvals: Value,
    closed_approvals: Value,
    compaction: Value,
}

impl Store {
    /// Commits a decision: one statement, one round trip, all or nothing.
    ///
    /// # Concurrency
    ///
    /// The version guards the commit: of two reconcilers that decided from the same state one wins.
    /// Concurrent intents do not increment the version. They are in columns that the commit does
    /// not write, and in `intents`, of which the commit only marks those as seen that were read. So
    /// a commit never fails because of an arriving message, and a commit never loses an intent.
    ///
    /// # Errors
    /// [`Error::Exhausted`] when a budget cannot cover the reservation: nothing was written, decide
    /// without it. [`Error::Conflict`] when the task has another version, was purged, or differs
    /// from the cached one ([`CommittedTask::cached_task`]): nothing was written, load and decide
    /// again. [`Error::Unavailable`]: the outcome is unknown, and loading the task shows it.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_commit(&self, mut commit: TaskCommit<'_>) -> Result<CommittedTask, Error> {
        let parameters = StatementParameters {
            turn: commit.task.turn.as_ref().map(text::json).transpose()?,
            step: commit.task.step.as_ref().map(text::json).transpose()?,
            appended: text::json(
                &commit.appended.iter().map(MessageRow::from).collect::<Vec<_>>(),
            )?,
            tool_uses: text::json(&commit.tool_uses)?,
            new_approvals: text::json(
                &commit.new_approvals.iter().map(NewApprovalRow::from).collect::<Vec<_>>(),
            )?,
            closed_approvals: text::json(
                &commit.closed_approvals.iter().map(ClosedApprovalRow::from).collect::<Vec<_>>(),
            )?,
            compaction: text::json(
                &commit.compaction.iter().map(CompactionRow::from).collect::<Vec<_>>(),
            )?,
        };
        loop {
            match self.task_commit_once(&commit, &parameters).await {
                // Rare: the result of an awaited step was already booked as a late one. It must not
                // be counted twice. The statement was rolled back.
                Err(error) if violated_constraint(&error) == Some("step_usage_pkey") => {
                    self.retain_unbooked(&mut commit.usage).await?
                }
                Err(error) => return Err(Error::from_reservation(error)),
                Ok(committed) => return committed.ok_or(Error::Conflict),
            }
        }
    }

    /// Retains only the entries that are not in the ledger.
    async fn retain_unbooked(&self, entries: &mut Vec<StepUsage>) -> Result<(), Error> {
        let before = entries.len();
        let calls: Vec<Uuid> = entries.iter().map(|entry| entry.call).collect();
        let booked =
            sqlx::query_scalar!("SELECT step_id FROM step_usage WHERE step_id = ANY($1)", &calls)
                .fetch_all(&self.pool)
                .await?;
        let mut seen = booked;
        entries.retain(|entry| {
            let new = !seen.contains(&entry.call);
            seen.push(entry.call);
            new
        });
        // Otherwise the statement would fail in the same way forever.
        if entries.len() == before {
            Err(Error::internal("the ledger refuses a step that it does not contain"))
        } else {
            Ok(())
        }
    }

    async fn task_commit_once(
        &self,
        commit: &TaskCommit<'_>,
        parameters: &StatementParameters,
    ) -> Result<Option<CommittedTask>, sqlx::Error> {
        let TaskCommit { before, task, now, .. } = commit;
        let used = commit.usage.iter().fold(Usage::default(), |sum, entry| sum + entry.usage);
        let ledger =
            serde_json::to_value(commit.usage.iter().map(LedgerRow::from).collect::<Vec<_>>())
                .map_err(|error| sqlx::Error::Encode(Box::new(error)))?;
        let kinds: Vec<String> = commit.events.iter().map(|event| event.kind.clone()).collect();
        let payloads: Vec<&[u8]> =
            commit.events.iter().map(|event| event.payload.as_slice()).collect();
        let steps: Vec<Option<i64>> =
            commit.events.iter().map(|event| event.step.map(to_i64)).collect();
        let count = to_i64(commit.events.len() as u64);
        let appended = commit
            .appended
            .iter()
            .map(|message| tokens_of_content(&message.content))
            .fold(0, i64::saturating_add);
        let less =
            commit.compaction.as_ref().map_or(0, |compacted| compacted.replaced - compacted.tokens);
        let reservation = commit.reservation.as_ref();
        let error = task.last_error.as_ref();
        macro_rules! run {
            ($size:ident) => {
                statement!(
                    $size,
                    task.id.uuid(),
                    before.version,
                    sql(*now),
                    task.phase.as_str(),
                    parameters.turn as _,
                    parameters.step as _,
                    task.title_step.map(StepId::uuid) as _,
                    to_i64(task.steps),
                    task.last_position,
                    // Without a cancel intent nothing is dropped.
                    before.drop_intent().filter(|_| commit.drop_queued.is_some()) as _,
                    sql_option(task.next_wake) as _,
                    task.last_outcome.map(TurnOutcome::as_str) as _,
                    error.map(|error| error.code.as_str()) as _,
                    error.map(|error| text::clean(&error.message).into_owned()) as _,
                    sql_option(error.map(|error| error.time)) as _,
                    before.cancel_intent.filter(|_| task.cancel.is_none()) as _,
                    used.input_tokens,
                    used.output_tokens,
                    used.cache_read_tokens,
                    used.cache_write_tokens,
                    used.cost_pico_usd,
                    parameters.tool_uses,
                    text::clean_option(commit.title.as_deref()) as _,
                    task.titled && !before.task.titled,
                    commit.trace_id.as_deref() as _,
                    before.intents,
                    count,
                    commit.admitted.map(|(id, _)| id.uuid()) as _,
                    commit.admitted.map(|(_, position)| position) as _,
                    commit.ended_message.as_ref().map(|ended| ended.message.uuid()) as _,
                    text::clean_option(
                        commit.ended_message.as_ref().and_then(|ended| ended.error.as_deref())
                    ) as _,
                    parameters.appended,
                    ledger,
                    &kinds,
                    payloads.as_slice() as _,
                    steps.as_slice() as _,
                    parameters.new_approvals,
                    parameters.closed_approvals,
                    used.thinking_tokens,
                    appended - less,
                    task.agent.uuid(),
                    commit.settled_step.map(StepId::uuid) as _,
                    reservation.map(|reservation| reservation.step.uuid()) as _,
                    reservation.map(|reservation| reservation.amount_pico_usd) as _,
                    sql_option(reservation.map(|reservation| reservation.expires_at)) as _,
                    before.is_cached.then_some(before.revision) as _,
                    before.agent_revision,
                    commit.rewind_from as _,
                    before.rewind_intent.filter(|_| task.rewind.is_none()) as _,
                    text::clean_option(commit.drop_queued.as_deref()) as _,
                    i32::try_from(task.context.scale).unwrap_or(i32::MAX),
                    task.context.tokens,
                    task.context.through,
                    parameters.compaction,
                )
                .fetch_optional(&self.pool)
                .await?
            };
        }
        let (paid, budgeted) =
            (!commit.usage.is_empty(), commit.settled_step.is_some() || reservation.is_some());
        // Only the largest statement has both usage and tool calls.
        let row = if commit.changes_queue_or_approvals()
            || (paid || budgeted) && !commit.tool_uses.is_empty()
        {
            run!(all)
        } else if budgeted {
            run!(budgeted)
        } else if paid {
            run!(paid)
        } else {
            run!(plain)
        };
        Ok(row.map(|row| CommittedTask {
            version: row.version,
            revision: row.revision,
            first_event_sequence: to_u64(row.event_sequence - count + 1),
            next_wake: from_sql_option(row.next_wake),
            has_new_intents: row.has_new_intents,
            cached_task: commit.cached_task(&row),
        }))
    }
}
