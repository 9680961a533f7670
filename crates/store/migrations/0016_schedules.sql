-- Messages that are sent by the clock.
CREATE TABLE schedules (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- Whom it is for: exactly one of these.
    task_id uuid,
    agent_id uuid,
    content jsonb NOT NULL,
    interrupts boolean NOT NULL,
    -- Of the tasks that are begun for an agent.
    title text NOT NULL,
    workspace text NOT NULL,
    -- When: exactly one of these. Patterns are read by `domain::schedule`.
    run_at timestamptz,
    cron text,
    time_zone text NOT NULL,
    missed text NOT NULL,
    paused boolean NOT NULL DEFAULT false,
    -- None: it is over.
    next_run timestamptz,
    last_run timestamptz,
    last_error text,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT schedules_pkey PRIMARY KEY (id),
    CONSTRAINT schedules_name_key UNIQUE (organization_id, name),
    CONSTRAINT schedules_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT schedules_task_fkey FOREIGN KEY (organization_id, task_id) REFERENCES tasks (organization_id, id) ON DELETE CASCADE,
    CONSTRAINT schedules_agent_fkey FOREIGN KEY (organization_id, agent_id) REFERENCES agents (organization_id, id),
    CONSTRAINT schedules_target_check CHECK (num_nonnulls(task_id, agent_id) = 1),
    CONSTRAINT schedules_timing_check CHECK (num_nonnulls(run_at, cron) = 1),
    CONSTRAINT schedules_missed_check CHECK (missed IN ('skip', 'once', 'all'))
);

-- The sweep, and the foreign keys.
CREATE INDEX schedules_due_idx ON schedules (next_run) WHERE next_run IS NOT NULL AND NOT paused;
CREATE INDEX schedules_task_idx ON schedules (organization_id, task_id) WHERE task_id IS NOT NULL;
CREATE INDEX schedules_agent_idx ON schedules (organization_id, agent_id) WHERE agent_id IS NOT NULL;

-- What became of each run. The key is what keeps a run from being made twice.
CREATE TABLE schedule_runs (
    schedule_id uuid NOT NULL,
    due timestamptz NOT NULL,
    outcome text NOT NULL,
    task_id uuid,
    message_id uuid,
    error text,
    created_at timestamptz NOT NULL,
    CONSTRAINT schedule_runs_pkey PRIMARY KEY (schedule_id, due),
    CONSTRAINT schedule_runs_schedule_fkey FOREIGN KEY (schedule_id) REFERENCES schedules (id) ON DELETE CASCADE,
    CONSTRAINT schedule_runs_outcome_check CHECK (outcome IN ('sent', 'passed_over', 'failed'))
);
