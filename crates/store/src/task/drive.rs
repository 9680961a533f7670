//! The reconciler's access to tasks besides the commit: find due tasks, load them, purge them.

use std::time::Duration;

use jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use construct_domain::{
    MessageId, OrganizationId, TaskId,
    money::{Prices, Target},
    policy::Rule,
    task::{QueuedMessage, Task},
};

use crate::{
    Error, NewEvent, Store, StoredMessage,
    event::to_u64,
    task::{select, subtask, unreadable::UnreadableColumns},
    time::sql,
};

/// How long the wake of an intent has to arrive before the sweep considers the intent missed.
const WAKE_GRACE_PERIOD: Duration = Duration::from_secs(1);

/// A task with everything that a decision needs, from one snapshot.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedTask {
    /// Its state, intents included.
    pub task: Task,
    /// The next queued message.
    pub queued: Option<QueuedMessage>,
    /// Guards the commit.
    pub version: i64,
    /// The number of intents.
    pub intents: i64,
    /// The number of intents that earlier commits have seen.
    pub intents_seen: i64,
    /// Whether it was deleted: stop what runs, then call [`Store::task_purge`].
    pub deleted: bool,
    /// The directory its tools may access; empty: a directory of its own.
    pub workspace: String,
    /// Empty until it is set.
    pub title: String,
    /// The name of its agent.
    pub agent_name: String,
    /// Rules for the calls of its scripts.
    pub policy: Vec<Rule>,
    /// The policy of its agent.
    pub agent_policy: Vec<Rule>,
    /// Facts that are part of every prompt.
    pub pinned: Vec<String>,
    /// The pool of interpreters that runs its scripts. It never changes.
    pub compute: String,
    /// When it entered its phase.
    pub phase_since: Timestamp,
    /// Sequence of its newest event.
    pub event_sequence: u64,
    /// The trace of the running turn, or of the last one.
    pub trace_id: Option<String>,
    /// The root of the tree of tasks it belongs to.
    pub root: TaskId,
    /// Its parent.
    pub parent: Option<TaskId>,
    /// Its subtasks that ended since the last reconcile, with the time: see
    /// [`Store::subtasks_mark_seen`].
    pub(crate) ended_subtasks: Option<Value>,
    /// The inputs for an estimate of its next model call; none when no budget applies.
    pub cost_inputs: Option<CostInputs>,
    /// The intent that requested the cancel, which drops messages that arrived before it.
    pub(crate) cancel_intent: Option<i64>,
    /// The intent that requested the rewind.
    pub(crate) rewind_intent: Option<i64>,
    /// The revision of the row.
    pub(crate) revision: i64,
    /// The revision of the agent's row.
    pub(crate) agent_revision: i64,
    /// Whether it is cached from the last commit instead of loaded. The next commit checks that it
    /// is still current.
    pub(crate) is_cached: bool,
}

/// The inputs for an estimate of a model call's cost, before anything else about the call is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CostInputs {
    /// The models that may be called.
    pub targets: Vec<Target>,
    /// Whether two of them may be called at the same time.
    pub hedged: bool,
    /// Whether one of the vendors reports the cost of a call, so that a model without prices is not
    /// free.
    pub has_reported_cost: bool,
    /// Upper estimate of the transcript, in tokens.
    pub transcript_tokens: i64,
    /// Upper estimate of the queued message, in tokens.
    pub queued_tokens: i64,
    /// Bytes of the agent's instructions and of the pinned facts.
    pub instructions_bytes: i64,
}

/// [`CostInputs`], as the statement encodes them.
#[derive(Deserialize)]
struct SpendingRow {
    targets: Vec<TargetRow>,
    hedged: bool,
    told: bool,
    transcript: i64,
    queued: Option<i64>,
    instructions: i64,
    max_tokens: Option<i64>,
}

#[derive(Deserialize)]
struct TargetRow {
    prices: Prices,
    context_window: i64,
    max_output_tokens: i64,
}

impl SpendingRow {
    fn read(self, pinned_bytes: usize) -> CostInputs {
        // An agent may request shorter answers.
        let shorter = |limit: i64| {
            self.max_tokens
                .filter(|&requested| requested > 0)
                .map_or(limit, |requested| requested.min(limit))
        };
        let targets = self.targets.into_iter().map(
            |TargetRow { prices, context_window, max_output_tokens }| Target {
                prices,
                context_window,
                max_output_tokens: shorter(max_output_tokens),
            },
        );
        CostInputs {
            targets: targets.collect(),
            hedged: self.hedged,
            has_reported_cost: self.told,
            transcript_tokens: self.transcript,
            queued_tokens: self.queued.unwrap_or(0),
            instructions_bytes: self
                .instructions
                .saturating_add(i64::try_from(pinned_bytes).unwrap_or(i64::MAX)),
        }
    }
}

/// A due task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DueTask {
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The task.
    pub task: TaskId,
    /// Since when it is due.
    pub since: Timestamp,
}

impl LoadedTask {
    /// Whether there are intents that no commit has seen. They must be marked as seen even if they
    /// change nothing ([`Store::task_commit`] or [`Store::task_intents_mark_seen`]). Otherwise the
    /// sweep finds the task again and again.
    pub fn has_new_intents(&self) -> bool {
        self.intents > self.intents_seen
    }

    /// Whether it is cached from the last commit
    /// ([`CommittedTask::cached_task`](crate::CommittedTask::cached_task)) instead of loaded.
    pub fn is_cached(&self) -> bool {
        self.is_cached
    }

    /// Whether the requested cancel or rewind drops this queued message, because it was accepted
    /// before.
    pub fn is_dropped_by_cancel(&self, message: &StoredMessage) -> bool {
        message.position.is_none()
            && message.processed_at.is_none()
            && self.drop_intent().is_some_and(|intent| message.arrival < intent)
    }

    /// The intent that drops the queued messages that arrived before it.
    pub(crate) fn drop_intent(&self) -> Option<i64> {
        self.cancel_intent.max(self.rewind_intent)
    }
}

impl Store {
    /// Loads a task. None when it does not exist (anymore).
    ///
    /// # Errors
    /// [`Error::Unavailable`]; [`Error::Internal`] when the row cannot be read.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_load(&self, id: TaskId) -> Result<Option<LoadedTask>, Error> {
        // One statement, so that the queue and the count of intents are from one snapshot: a
        // message that is not seen here has an intent that is not counted here. The step's
        // approvals are read only if it has ever waited for one.
        let row = select!(
            [r#"0::bigint AS "queued_count!",
                    waits.id AS queued, coalesce(waits.interrupts, false) AS "queued_interrupts!",
                    coalesce(waits.estimated_tokens, 0) AS "queued_tokens!",
                    NULL::uuid[] AS children,
                    CASE WHEN t.step ? 'round' OR t.step #>> '{state,state}' = 'parked' THEN (
                        SELECT jsonb_agg(jsonb_build_object(
                            'id', p.id, 'script', p.script, 'number', p.number, 'hash', p.arguments_hash, 'state', p.state
                        ) ORDER BY p.script, p.number)
                        FROM approvals p
                        WHERE p.step_id = substr(t.step ->> 'id', 6)::uuid AND p.task_id = t.id
                    ) END AS approvals,
                    CASE WHEN t.step #> '{state,awaits}' IS NOT NULL THEN (
                        SELECT coalesce(jsonb_agg(c.id), '[]') FROM tasks c
                        WHERE c.parent_id = t.id AND c.deleted_at IS NULL AND (c.turn IS NOT NULL OR EXISTS (
                            SELECT FROM messages q WHERE q.task_id = c.id AND q.position IS NULL AND q.processed_at IS NULL))
                    ) END AS subtasks,
                    (SELECT jsonb_agg(jsonb_build_object('id', c.id, 'at', c.parent_due_at))
                     FROM tasks c WHERE c.parent_id = t.id AND c.parent_due_at IS NOT NULL) AS ended,
                    CASE WHEN EXISTS (
                        SELECT FROM budgets b WHERE b.organization_id = t.organization_id
                          AND (b.agent_id = t.agent_id OR b.task_id = t.id OR b.task_id = ANY (t.ancestors)
                               OR (b.agent_id IS NULL AND b.task_id IS NULL AND b.token_id IS NULL))
                    ) THEN (
                        SELECT jsonb_build_object(
                            'targets', (
                                SELECT jsonb_agg(jsonb_build_object(
                                    'prices', jsonb_build_object(
                                        'input', n.input_price, 'output', n.output_price, 'cache_read', n.cache_read_price,
                                        'cache_write', n.cache_write_price, 'thinking', n.thinking_price,
                                        'request', n.request_price, 'long_context', n.long_context_prices),
                                    'context_window', n.context_window, 'max_output_tokens', n.max_output_tokens))
                                FROM models n
                                WHERE n.organization_id = a.organization_id AND (n.id = a.model_id OR EXISTS (
                                    SELECT FROM model_fallbacks f WHERE f.model_id = a.model_id AND f.fallback_id = n.id))),
                            'hedged', EXISTS (
                                SELECT FROM models h
                                WHERE h.organization_id = a.organization_id AND h.id = a.model_id AND h.hedge_after_ms > 0),
                            'told', EXISTS (
                                SELECT FROM models v JOIN model_providers p ON p.id = v.provider_id
                                WHERE p.kind = 'openrouter' AND v.organization_id = a.organization_id
                                  AND (v.id = a.model_id OR EXISTS (
                                      SELECT FROM model_fallbacks f WHERE f.model_id = a.model_id AND f.fallback_id = v.id))),
                            'transcript', t.transcript_tokens,
                            'queued', waits.estimated_tokens,
                            'instructions', octet_length(a.instructions), 'max_tokens', a.parameters -> 'max_tokens')
                    ) END AS spending"#],
            ["LEFT JOIN LATERAL (
                 SELECT q.id, q.interrupts, q.estimated_tokens FROM messages q
                 WHERE q.task_id = t.id AND q.position IS NULL AND q.processed_at IS NULL
                 ORDER BY q.interrupts DESC, q.arrival LIMIT 1
             ) AS waits ON true
             WHERE t.id = $1"],
            id.uuid(),
        )
        .fetch_optional(&self.pool)
        .await?;
        let Some(mut row) = row else { return Ok(None) };
        // A partially read task must not be reconciled.
        let mut unreadable = UnreadableColumns::default();
        let spending: Option<SpendingRow> = unreadable.option("spending", row.spending.take());
        let pinned_bytes = row.pinned_bytes();
        let task = row.state(&mut unreadable);
        let policy = unreadable.json("policy", row.policy);
        let agent_policy = unreadable.json("agent's policy", row.agent_policy);
        if let Some(description) = unreadable.describe() {
            return Err(Error::internal(description));
        }
        Ok(Some(LoadedTask {
            task,
            queued: row.queued.map(|message| QueuedMessage {
                message: MessageId::from_uuid(message),
                interrupts: row.queued_interrupts,
            }),
            version: row.version,
            intents: row.intents,
            intents_seen: row.intents_seen,
            deleted: row.deleted,
            workspace: row.workspace,
            title: row.title,
            agent_name: row.agent_name,
            policy,
            agent_policy,
            pinned: row.pinned,
            compute: row.compute,
            phase_since: row.phase_since,
            event_sequence: to_u64(row.event_sequence),
            trace_id: row.trace_id,
            root: TaskId::from_uuid(row.root_id),
            parent: row.parent_id.map(TaskId::from_uuid),
            ended_subtasks: row.ended,
            cost_inputs: spending.map(|spending| spending.read(pinned_bytes)),
            cancel_intent: row.cancel_intent,
            rewind_intent: row.rewind_intent,
            revision: row.revision,
            agent_revision: row.agent_revision,
            is_cached: false,
        }))
    }

    /// Those of these tasks that were purged. Unknown tasks are not among them: the caller is about
    /// to remove their workspaces, and may be connected to the wrong database.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn tasks_purged(&self, tasks: &[TaskId]) -> Result<Vec<TaskId>, Error> {
        let ids: Vec<Uuid> = tasks.iter().map(|task| task.uuid()).collect();
        let purged = sqlx::query_scalar!(
            r#"SELECT asked.id AS "id!" FROM unnest($1::uuid[]) AS asked (id)
               WHERE NOT EXISTS (SELECT 1 FROM tasks t WHERE t.id = asked.id)
                 AND (EXISTS (SELECT 1 FROM events e WHERE e.stream_id = asked.id AND e.type = 'task.deleted')
                      OR EXISTS (SELECT 1 FROM erased_tasks e WHERE e.id = asked.id))"#,
            &ids,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(purged.into_iter().map(TaskId::from_uuid).collect())
    }

    /// Marks the intents of a loaded task as seen, after a decision that they require no change. If
    /// the task changed since, they stay unseen.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_intents_mark_seen(&self, loaded: &LoadedTask) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE tasks SET intents_seen = $2 WHERE id = $1 AND version = $3 AND intents_seen < $2",
            loaded.task.id.uuid(),
            loaded.intents,
            loaded.version
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Due tasks whose wake may have been lost: their next wake has passed, an intent was not seen
    /// for a second, a subtask ended, or they are deleted and idle. Quarantined tasks
    /// ([`Store::task_quarantine`]) are left out. Those that are due longest come first; at most
    /// `limit`, after `after`.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn sweep_due(
        &self,
        now: Timestamp,
        after: Option<&DueTask>,
        limit: u32,
    ) -> Result<Vec<DueTask>, Error> {
        let (since, task) = after
            .map_or((Timestamp::UNIX_EPOCH, Uuid::nil()), |after| (after.since, after.task.uuid()));
        let rows = sqlx::query!(
            r#"SELECT organization_id AS "organization_id!", id AS "id!", due AS "due!: jiff_sqlx::Timestamp" FROM (
                   (SELECT organization_id, id, next_wake AS due FROM tasks
                    WHERE next_wake <= $1 AND (next_wake, id) > ($4, $5) AND parked_intents IS DISTINCT FROM intents
                    ORDER BY next_wake, id LIMIT $3)
                   UNION ALL
                   (SELECT organization_id, id, intent_at FROM tasks
                    WHERE intents > intents_seen AND intent_at <= $2 AND (intent_at, id) > ($4, $5)
                      AND parked_intents IS DISTINCT FROM intents
                    ORDER BY intent_at, id LIMIT $3)
                   UNION ALL
                   (SELECT organization_id, id, deleted_at FROM tasks
                    WHERE deleted_at <= $2 AND next_wake IS NULL AND (deleted_at, id) > ($4, $5)
                      AND parked_intents IS DISTINCT FROM intents
                    ORDER BY deleted_at, id LIMIT $3)
                   UNION ALL
                   (SELECT p.organization_id, p.id, c.parent_due_at FROM tasks c
                    JOIN tasks p ON p.id = c.parent_id AND p.parked_intents IS DISTINCT FROM p.intents
                    WHERE c.parent_due_at <= $2 AND (c.parent_due_at, c.parent_id) > ($4, $5)
                    ORDER BY c.parent_due_at, c.parent_id LIMIT $3)
               ) AS waiting
               ORDER BY due, id
               LIMIT $3"#,
            sql(now),
            sql(now - WAKE_GRACE_PERIOD),
            i64::from(limit),
            sql(since),
            task,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows
            .into_iter()
            .map(|row| DueTask {
                organization: OrganizationId::from_uuid(row.organization_id),
                task: TaskId::from_uuid(row.id),
                since: row.due.into(),
            })
            .collect())
    }

    /// Purges a deleted task: removes it with its messages and events. Its costs stay in the
    /// ledger, and the event of its deletion in its stream. Its subtasks are deleted too, with the
    /// event `deleted_event`, and returned to be reconciled. None when the task does not exist, or
    /// is not deleted.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn task_purge(
        &self,
        id: TaskId,
        deleted_event: impl Fn(TaskId) -> NewEvent + Send,
        now: Timestamp,
    ) -> Result<Option<Vec<TaskId>>, Error> {
        let mut transaction = self.pool.begin().await?;
        let children = subtask::children_delete(&mut transaction, id, deleted_event, now).await?;
        let purged = sqlx::query!(
            "DELETE FROM tasks WHERE id = $1 AND deleted_at IS NOT NULL RETURNING event_sequence, api_key_id",
            id.uuid(),
        )
        .fetch_optional(&mut *transaction)
        .await?;
        let Some(purged) = purged else { return Ok(None) };
        if let Some(key) = purged.api_key_id {
            sqlx::query!(
                "UPDATE events SET api_key_id = $2 WHERE stream_id = $1 AND type = 'task.deleted'",
                id.uuid(),
                key,
            )
            .execute(&mut *transaction)
            .await?;
        }
        sqlx::query!(
            "DELETE FROM events WHERE stream_id = $1 AND sequence < $2 AND type <> 'task.deleted'",
            id.uuid(),
            purged.event_sequence,
        )
        .execute(&mut *transaction)
        .await?;
        transaction.commit().await?;
        Ok(Some(children))
    }
}
