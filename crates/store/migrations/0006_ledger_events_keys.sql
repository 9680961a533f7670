-- What each model call cost, once, however often its result is delivered. Rows outlive their task, model and agent (no foreign keys): money
-- that was spent stays spent.
CREATE TABLE step_usage (
    step_id uuid NOT NULL,
    organization_id uuid NOT NULL,
    task_id uuid NOT NULL,
    model_id uuid NOT NULL,
    purpose text NOT NULL,
    input_tokens bigint NOT NULL,
    output_tokens bigint NOT NULL,
    cache_read_tokens bigint NOT NULL,
    cache_write_tokens bigint NOT NULL,
    cost_pico_usd bigint NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT step_usage_pkey PRIMARY KEY (step_id),
    CONSTRAINT step_usage_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT step_usage_purpose_check CHECK (purpose IN ('turn', 'title'))
);

-- Spending over time.
CREATE INDEX step_usage_created_idx ON step_usage (organization_id, created_at);

-- What happened, written with the change it tells of. A stream is a task's, or an organisation's for everything else;
-- its id is theirs. No foreign key to tasks: `task.deleted` outlives its task.
CREATE TABLE events (
    organization_id uuid NOT NULL,
    stream_id uuid NOT NULL,
    -- 1, 2, 3, … with no gap.
    sequence bigint NOT NULL,
    type text NOT NULL,
    -- A `construct.v1.Event` with its payload only.
    payload bytea NOT NULL,
    -- Number of the step the event ends, in its task.
    step bigint,
    created_at timestamptz NOT NULL,
    CONSTRAINT events_pkey PRIMARY KEY (stream_id, sequence),
    CONSTRAINT events_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id)
);

-- Answers to writes that carried a key, kept for a day.
CREATE TABLE idempotency_keys (
    organization_id uuid NOT NULL,
    key text NOT NULL,
    method text NOT NULL,
    request_hash bytea NOT NULL,
    -- Empty only inside the transaction that carries the request out.
    response bytea NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT idempotency_keys_pkey PRIMARY KEY (organization_id, key),
    CONSTRAINT idempotency_keys_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id)
);

CREATE INDEX idempotency_keys_created_idx ON idempotency_keys (created_at);
