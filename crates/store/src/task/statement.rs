//! The statement of [`Store::task_commit`](crate::Store::task_commit), in four sizes. PostgreSQL
//! sets up every part of a statement at each execution, and most commits neither move money nor
//! change approvals.
//!
//! # Structure
//!
//! `guard` is the only part that waits for the row. Every other part joins it, so that nothing is
//! written when no row has the expected version. All parts see the same snapshot: a part reads the
//! writes of another only through RETURNING.
//!
//! Writes after the snapshot are safe. Every other writer of these messages and approvals locks the
//! task's row, and increments the version when it removes a message or decides an approval.

use uuid::Uuid;

/// The result of the statement.
pub(super) struct Row {
    pub(super) version: i64,
    pub(super) revision: i64,
    pub(super) event_sequence: i64,
    pub(super) next_wake: Option<jiff_sqlx::Timestamp>,
    pub(super) has_new_intents: bool,
    pub(super) queued: Option<Uuid>,
    pub(super) queued_interrupts: bool,
    pub(super) queued_tokens: i64,
    pub(super) transcript_tokens: i64,
}

/// `statement!(plain | paid | budgeted | all, arguments…)`. Every size has the same numbered
/// arguments. A size that does not use some of them names them in its last line.
macro_rules! statement {
    (plain, $($argument:expr),* $(,)?) => {
        statement!(@add [tools, quiet] [] [
            "WHERE num_nulls($17::bigint, $18::bigint, $19::bigint, $20::bigint, $21::bigint, $39::bigint, $33::jsonb, $41::uuid,
                             $42::uuid, $43::uuid, $44::bigint, $45::timestamptz) >= 0"
        ] [] $($argument),*)
    };
    (paid, $($argument:expr),* $(,)?) => {
        statement!(@add [sums, ledger, quiet] [] [
            "WHERE num_nulls($22::jsonb, $42::uuid, $43::uuid, $44::bigint, $45::timestamptz) >= 0"
        ] [] $($argument),*)
    };
    (budgeted, $($argument:expr),* $(,)?) => {
        statement!(@add [sums, ledger, budgets, quiet] [] ["WHERE num_nulls($22::jsonb) >= 0"] [] $($argument),*)
    };
    (all, $($argument:expr),* $(,)?) => {
        statement!(@add [sums, tools, asks, ledger, budgets] [] ["WHERE true"] [] $($argument),*)
    };
    // Tool calls of scripts.
    (@add [tools $(, $next:ident)*] [$($set:literal)*] [$($where:literal)+] [$($part:literal)*] $($argument:expr),*) => {
        statement!(@add [$($next),*] [
            $($set)*
            "tool_uses = CASE WHEN $22::jsonb = '{}' THEN t.tool_uses ELSE (
                        SELECT jsonb_object_agg(tool, calls) FROM (
                            SELECT key AS tool, sum(value::bigint) AS calls FROM (
                                SELECT * FROM jsonb_each_text(t.tool_uses) UNION ALL SELECT * FROM jsonb_each_text($22)
                            ) AS both_sides GROUP BY key
                        ) AS sums
                    ) END,"
        ] [$($where)+] [$($part)*] $($argument),*)
    };
    // Usage of model calls.
    (@add [sums $(, $next:ident)*] [$($set:literal)*] [$($where:literal)+] [$($part:literal)*] $($argument:expr),*) => {
        statement!(@add [$($next),*] [
            $($set)*
            "input_tokens = least(t.input_tokens::numeric + $17::bigint, 9223372036854775807)::bigint,
                    output_tokens = least(t.output_tokens::numeric + $18::bigint, 9223372036854775807)::bigint,
                    cache_read_tokens = least(t.cache_read_tokens::numeric + $19::bigint, 9223372036854775807)::bigint,
                    cache_write_tokens = least(t.cache_write_tokens::numeric + $20::bigint, 9223372036854775807)::bigint,
                    cost_pico_usd = least(t.cost_pico_usd::numeric + $21::bigint, 9223372036854775807)::bigint,
                    thinking_tokens = least(t.thinking_tokens::numeric + $39::bigint, 9223372036854775807)::bigint,"
        ] [$($where)+] [$($part)*] $($argument),*)
    };
    // The transcript only grows, and approvals do not change.
    (@add [quiet $(, $next:ident)*] [$($set:literal)*] [$($where:literal)+] [$($part:literal)*] $($argument:expr),*) => {
        statement!(@add [$($next),*] [
            $($set)*
            "next_wake = $11,
                    compacted_through = $53,
                    transcript_tokens = least(
                        t.transcript_tokens::numeric + $40::bigint
                            + coalesce((SELECT q.estimated_tokens FROM messages q WHERE q.id = $28), 0),
                        9223372036854775807)::bigint,"
        ] [
            $($where)+
            " AND num_nulls($37::jsonb, $38::jsonb, $50::text, $54::jsonb) >= 0"
        ] [$($part)*] $($argument),*)
    };
    // Queued messages, the transcript, or approvals change.
    (@add [asks $(, $next:ident)*] [$($set:literal)*] [$($where:literal)+] [$($part:literal)*] $($argument:expr),*) => {
        statement!(@add [$($next),*] [
            $($set)*
            "next_wake = CASE
                        WHEN $10::bigint IS NOT NULL AND EXISTS (
                            SELECT 1 FROM messages q
                            WHERE q.task_id = t.id AND q.position IS NULL AND q.processed_at IS NULL AND q.arrival > $10
                        ) THEN $3
                        ELSE $11
                    END,
                    compacted_through = CASE WHEN $48::bigint IS NULL THEN $53 ELSE coalesce(
                        (SELECT max(c.through) FROM compactions c WHERE c.task_id = t.id AND c.through < $48), 0) END,
                    transcript_tokens = CASE WHEN $48::bigint IS NULL THEN least(
                        t.transcript_tokens::numeric + $40::bigint
                            + coalesce((SELECT q.estimated_tokens FROM messages q WHERE q.id = $28), 0),
                        9223372036854775807)::bigint
                    ELSE transcript_size(t.id, $48) END,"
        ] [$($where)+] [
            $($part)*
            r#"
            ), dropped AS (
                UPDATE messages m SET processed_at = $3, error = $50, revision = m.revision + 1, updated_at = $3
                FROM guard
                WHERE m.task_id = guard.id AND m.position IS NULL AND m.processed_at IS NULL AND m.arrival < $10
            ), superseded AS (
                -- A statement can change a row only once: the message whose turn ended is put aside above.
                UPDATE messages m SET superseded_at = $3, revision = m.revision + 1, updated_at = $3
                FROM guard
                WHERE m.task_id = guard.id AND m.position >= $48 AND m.superseded_at IS NULL AND m.id IS DISTINCT FROM $30
            ), forgotten AS (
                DELETE FROM compactions c USING guard WHERE c.task_id = guard.id AND c.through >= $48
            ), compacted AS (
                INSERT INTO compactions
                    (task_id, organization_id, through, kept, content, estimated_tokens, replaced_tokens, summary, created_at)
                SELECT guard.id, guard.organization_id, n.through, n.kept, n.content, n.estimated_tokens, n.replaced_tokens, n.summary, $3
                FROM guard, jsonb_to_recordset($54) AS n (
                    through bigint, kept bigint[], content text, estimated_tokens bigint, replaced_tokens bigint, summary boolean)
            ), asked AS (
                INSERT INTO approvals AS p
                    (id, organization_id, task_id, step_id, script, number, tool, arguments, arguments_size, arguments_hash,
                     reason, expires_at, created_at, updated_at)
                SELECT n.id, guard.organization_id, guard.id, n.step_id, n.script, n.number, n.tool, n.arguments,
                       n.arguments_size, n.arguments_hash, n.reason, n.expires_at, $3, $3
                FROM guard, jsonb_to_recordset($37) AS n (
                    id uuid, step_id uuid, script bigint, number bigint, tool text, arguments text, arguments_size bigint,
                    arguments_hash text, reason text, expires_at timestamptz)
                ON CONFLICT ON CONSTRAINT approvals_call_key DO UPDATE SET
                    tool = excluded.tool, arguments = excluded.arguments, arguments_size = excluded.arguments_size,
                    arguments_hash = excluded.arguments_hash, reason = excluded.reason, state = 'pending', decided_by = '',
                    words = '', decided_at = NULL, revision = p.revision + 1, updated_at = $3
                WHERE p.arguments_hash <> excluded.arguments_hash
            ), closed AS (
                UPDATE approvals p SET
                    state = c.state, words = c.words, decided_at = $3, revision = p.revision + 1, updated_at = $3
                FROM guard, jsonb_to_recordset($38) AS c (id uuid, state text, words text)
                WHERE p.id = c.id AND p.task_id = guard.id AND p.state = 'pending'"#
        ] $($argument),*)
    };
    // The ledger.
    (@add [ledger $(, $next:ident)*] [$($set:literal)*] [$($where:literal)+] [$($part:literal)*] $($argument:expr),*) => {
        statement!(@add [$($next),*] [$($set)*] [$($where)+] [
            $($part)*
            r#"
            ), ledger AS (
                INSERT INTO step_usage
                    (step_id, organization_id, task_id, root_id, tree, agent_id, model_id, purpose,
                     input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, thinking_tokens, cost_pico_usd, created_at, api_key_id)
                SELECT u.step_id, guard.organization_id, guard.id, guard.root_id,
                       -- The index of trees has what belongs to one; a task of its own is found by its root.
                       CASE WHEN cardinality(guard.tree) > 1 THEN guard.tree END, $41, u.model_id, u.purpose,
                       u.input_tokens, u.output_tokens, u.cache_read_tokens, u.cache_write_tokens, u.thinking_tokens,
                       u.cost_pico_usd, $3, guard.asked_key_id
                FROM guard, jsonb_to_recordset($33) AS u (
                    step_id uuid, model_id uuid, purpose text,
                    input_tokens bigint, output_tokens bigint, cache_read_tokens bigint, cache_write_tokens bigint,
                    thinking_tokens bigint, cost_pico_usd bigint)"#
        ] $($argument),*)
    };
    // Reservations. PostgreSQL does not execute a part that nothing refers to.
    (@add [budgets $(, $next:ident)*] [$($set:literal)*] [$($where:literal)+] [$($part:literal)*] $($argument:expr),*) => {
        statement!(@add [$($next),*] [$($set)*] [
            $($where)+
            " AND (SELECT count(*) FROM settled) + (SELECT count(*) FROM reserved) >= 0"
        ] [
            $($part)*
            r#"
            ), settled AS MATERIALIZED (
                SELECT budgets_settle_tree($42, guard.organization_id, $41, guard.tree, $21, true, $3)
                FROM guard WHERE $42::uuid IS NOT NULL
            ), reserved AS MATERIALIZED (
                SELECT budgets_reserve_tree($43, guard.organization_id, $41, guard.tree, NULL, $44, $45, false, $3)
                FROM guard, (SELECT count(*) FROM settled) AS what_is_settled_can_be_reserved
                WHERE $43::uuid IS NOT NULL"#
        ] $($argument),*)
    };
    (@add [] [$($set:literal)+] [$($where:literal)+] [$($part:literal)*] $($argument:expr),*) => {
        sqlx::query_as!(
            crate::task::statement::Row,
            r#"WITH guard AS (
                UPDATE tasks t SET
                    phase = $4,
                    phase_since = CASE WHEN t.phase = $4 THEN t.phase_since ELSE $3 END,
                    turn = $5,
                    step = $6,
                    title_step = $7,
                    steps = $8,
                    last_position = $9,
                    last_outcome = $12,
                    error_code = $13,
                    error_message = $14,
                    error_time = $15,
                    cancel_reason = CASE WHEN t.cancel_intent = $16 THEN NULL ELSE t.cancel_reason END,
                    cancel_intent = CASE WHEN t.cancel_intent = $16 THEN NULL ELSE t.cancel_intent END,
                    rewind_from = CASE WHEN t.rewind_intent = $49 THEN NULL ELSE t.rewind_from END,
                    rewind_intent = CASE WHEN t.rewind_intent = $49 THEN NULL ELSE t.rewind_intent END,
                    context_scale = $51,
                    context_tokens = $52,
                    title = CASE WHEN t.titled THEN t.title ELSE coalesce($23, t.title) END,
                    titled = t.titled OR $24 OR $23::text IS NOT NULL,
                    trace_id = coalesce($25, t.trace_id),
                    -- What somebody else has seen since this was loaded, and found that it asks for nothing, may ask for something of the new state.
                    intents_seen = $26,
                    -- A turn has ended, or messages are dropped: whoever waits for it is to look.
                    parent_due_at = CASE
                        WHEN t.parent_id IS NOT NULL AND ($30::uuid IS NOT NULL OR $10::bigint IS NOT NULL) THEN $3
                        ELSE t.parent_due_at
                    END,
                    parked_intents = NULL,
                    parked_at = NULL,
                    parked_reason = NULL,
                    "#
            $(+ $set)+
            + r#"
                    event_sequence = t.event_sequence + $27,
                    version = t.version + 1,
                    revision = t.revision + 1,
                    updated_at = $3
                WHERE t.id = $1 AND t.version = $2
                  -- What was remembered instead of loaded must be as it would be loaded now.
                  AND ($46::bigint IS NULL OR (
                      t.revision = $46
                      AND EXISTS (
                          SELECT FROM agents a
                          WHERE a.organization_id = t.organization_id AND a.id = t.agent_id AND a.revision = $47)
                      AND NOT EXISTS (
                          SELECT FROM budgets b WHERE b.organization_id = t.organization_id
                            AND (b.agent_id = t.agent_id OR b.task_id = t.id OR b.task_id = ANY (t.ancestors)
                                 OR (b.agent_id IS NULL AND b.task_id IS NULL AND b.token_id IS NULL)))))
                RETURNING t.organization_id, t.id, t.root_id, t.ancestors || t.id AS tree, t.version, t.revision, t.event_sequence, t.next_wake,
                    t.transcript_tokens, t.asked_key_id, t.intents > t.intents_seen AS has_new_intents
            ), turned AS (
                -- The message whose turn begins, and the one whose turn ended.
                UPDATE messages m SET
                    position = CASE WHEN m.id = $28 THEN $29 ELSE m.position END,
                    processed_at = CASE WHEN m.id = $30 THEN $3 ELSE m.processed_at END,
                    error = CASE WHEN m.id = $30 THEN $31 ELSE m.error END,
                    superseded_at = CASE WHEN m.id = $30 AND m.position >= $48 THEN coalesce(m.superseded_at, $3) ELSE m.superseded_at END,
                    revision = m.revision + 1, updated_at = $3
                FROM guard
                WHERE m.id IN ($28, $30) AND m.task_id = guard.id
                  AND (m.id = $30 OR m.position IS NULL AND m.processed_at IS NULL)
            ), appended AS (
                INSERT INTO messages
                    (id, organization_id, task_id, arrival, position, source, content, agent_id, step_id,
                     input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, thinking_tokens, cost_pico_usd,
                     estimated_tokens, processed_at, superseded_at, created_at, updated_at, api_key_id)
                SELECT n.id, guard.organization_id, guard.id, 0, n.position, n.source, n.content, n.agent_id, n.step_id,
                       n.input_tokens, n.output_tokens, n.cache_read_tokens, n.cache_write_tokens, n.thinking_tokens, n.cost_pico_usd,
                       n.estimated_tokens, $3, CASE WHEN n.position >= $48 THEN $3 END, $3, $3, guard.asked_key_id
                FROM guard, jsonb_to_recordset($32) AS n (
                    id uuid, position bigint, source text, content jsonb, agent_id uuid, step_id uuid,
                    input_tokens bigint, output_tokens bigint, cache_read_tokens bigint, cache_write_tokens bigint,
                    thinking_tokens bigint, cost_pico_usd bigint, estimated_tokens bigint)"#
            $(+ $part)*
            + r#"
            ), recorded AS (
                INSERT INTO events (organization_id, stream_id, sequence, type, payload, step, created_at)
                SELECT guard.organization_id, guard.id, guard.event_sequence - $27 + e.number, e.kind, e.payload, e.step, $3
                FROM guard, unnest($34::text[], $35::bytea[], $36::bigint[]) WITH ORDINALITY AS e (kind, payload, step, number)
            )
            SELECT version AS "version!", revision AS "revision!", event_sequence AS "event_sequence!",
                   next_wake AS "next_wake?: jiff_sqlx::Timestamp", has_new_intents AS "has_new_intents!",
                   waits.id AS "queued?", coalesce(waits.interrupts, false) AS "queued_interrupts!",
                   coalesce(waits.estimated_tokens, 0) AS "queued_tokens!",
                   transcript_tokens AS "transcript_tokens!"
            FROM guard
            LEFT JOIN LATERAL (
                SELECT q.id, q.interrupts, q.estimated_tokens FROM messages q
                WHERE q.task_id = guard.id AND q.position IS NULL AND q.processed_at IS NULL AND q.id IS DISTINCT FROM $28
                ORDER BY q.interrupts DESC, q.arrival LIMIT 1
            ) AS waits ON true
            "#
            $(+ $where)+,
            $($argument),*
        )
    };
}
pub(super) use statement;
