-- Tasks. Two writers share a row and must not undo each other's work: the reconciler owns the state (phase, turn, step, …),
-- the gateway writes intents (suspend, cancel_reason, agent_id, title, deleted_at). The counters below keep them apart.
CREATE TABLE tasks (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    agent_id uuid NOT NULL,
    workspace text NOT NULL,
    title text NOT NULL,
    -- Whether the title is there to stay: given by a person, or made.
    titled boolean NOT NULL,
    -- 0: the agent's limit holds.
    max_turns_override integer NOT NULL,

    -- The state, as `domain::task::Task` has it.
    phase text NOT NULL DEFAULT 'await_input',
    phase_since timestamptz NOT NULL,
    turn jsonb,
    step jsonb,
    title_step uuid,
    steps bigint NOT NULL DEFAULT 0,
    last_position bigint NOT NULL DEFAULT 0,
    next_wake timestamptz,
    last_outcome text,
    error_code text,
    error_message text,
    error_time timestamptz,

    -- Sums over the ledger (step_usage); they rise only with a new row there.
    input_tokens bigint NOT NULL DEFAULT 0,
    output_tokens bigint NOT NULL DEFAULT 0,
    cache_read_tokens bigint NOT NULL DEFAULT 0,
    cache_write_tokens bigint NOT NULL DEFAULT 0,
    cost_pico_usd bigint NOT NULL DEFAULT 0,
    -- {"tool": calls}
    tool_uses jsonb NOT NULL DEFAULT '{}',

    -- What people want.
    suspend boolean NOT NULL DEFAULT false,
    cancel_reason text,
    -- The value of `intents` when the cancel was asked for: queued messages with a smaller arrival are dropped with it, later ones are not.
    cancel_intent bigint,
    deleted_at timestamptz,

    -- The newest event of the task's stream.
    event_sequence bigint NOT NULL DEFAULT 0,
    -- Guards the reconciler's commits: rises with each of them, and with what makes their premises untrue (a queued message taken back).
    version bigint NOT NULL DEFAULT 0,
    -- Rises with every visible change, whoever makes it.
    revision bigint NOT NULL DEFAULT 1,
    -- Counts what people asked for (messages too); the reconciler notes up to where it has looked. An intent that comes while
    -- a commit is on its way leaves intents > intents_seen, and so is never overlooked.
    intents bigint NOT NULL DEFAULT 0,
    intents_seen bigint NOT NULL DEFAULT 0,
    -- When the oldest unseen intent came, or earlier.
    intent_at timestamptz,
    trace_id text,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,

    CONSTRAINT tasks_pkey PRIMARY KEY (id),
    CONSTRAINT tasks_tenant_key UNIQUE (organization_id, id),
    CONSTRAINT tasks_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT tasks_agent_fkey FOREIGN KEY (organization_id, agent_id) REFERENCES agents (organization_id, id),
    CONSTRAINT tasks_max_turns_check CHECK (max_turns_override >= 0),
    CONSTRAINT tasks_phase_check CHECK (phase IN ('await_input', 'invoke_model', 'execute_tools', 'suspended')),
    CONSTRAINT tasks_outcome_check CHECK (last_outcome IN ('completed', 'failed', 'cancelled', 'max_turns')),
    CONSTRAINT tasks_error_check CHECK (num_nulls(error_code, error_message, error_time) IN (0, 3)),
    CONSTRAINT tasks_cancel_check CHECK (num_nulls(cancel_reason, cancel_intent) IN (0, 2)),
    CONSTRAINT tasks_intent_check CHECK (intents = 0 OR intent_at IS NOT NULL)
)
-- Rows are rewritten at every step: room on the page keeps their versions together.
WITH (fillfactor = 60);

-- Lists. There is none on updated_at: it would be rewritten at every step for a list that sorts quickly enough.
CREATE INDEX tasks_created_idx ON tasks (organization_id, created_at, id);
-- For the foreign key, when an agent is deleted, and to count an agent's tasks.
CREATE INDEX tasks_agent_idx ON tasks (organization_id, agent_id);
-- The sweep: three small indexes that hold only tasks with something to do.
CREATE INDEX tasks_due_idx ON tasks (next_wake) WHERE next_wake IS NOT NULL;
CREATE INDEX tasks_intents_idx ON tasks (intent_at) WHERE intents > intents_seen;
CREATE INDEX tasks_deleted_idx ON tasks (deleted_at) WHERE deleted_at IS NOT NULL;
