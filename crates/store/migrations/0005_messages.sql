-- The messages of tasks. A message is queued (no position, not processed), in the transcript (position), or dropped
-- (no position, processed).
CREATE TABLE messages (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    task_id uuid NOT NULL,
    -- The task's `intents` when the message was accepted: the order of the queue. 0 for what the reconciler appended.
    arrival bigint NOT NULL,
    -- Place in the transcript, from 1 and with no gap.
    position bigint,
    source text NOT NULL,
    -- {"blocks": [{"kind": …, "payload": …}]}
    content jsonb NOT NULL,
    -- Who wrote it. No foreign key: an agent may go, what it said stays.
    agent_id uuid,
    processed_at timestamptz,
    error text,
    input_tokens bigint NOT NULL DEFAULT 0,
    output_tokens bigint NOT NULL DEFAULT 0,
    cache_read_tokens bigint NOT NULL DEFAULT 0,
    cache_write_tokens bigint NOT NULL DEFAULT 0,
    cost_pico_usd bigint NOT NULL DEFAULT 0,
    -- The step it is the result of.
    step_id uuid,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT messages_pkey PRIMARY KEY (id),
    CONSTRAINT messages_task_fkey FOREIGN KEY (organization_id, task_id) REFERENCES tasks (organization_id, id) ON DELETE CASCADE,
    -- Also what the transcript is read by.
    CONSTRAINT messages_position_key UNIQUE (task_id, position),
    CONSTRAINT messages_position_check CHECK (position > 0),
    CONSTRAINT messages_source_check CHECK (source IN ('user', 'assistant', 'system')),
    CONSTRAINT messages_queued_check CHECK (position IS NOT NULL OR source = 'user')
);

CREATE INDEX messages_queue_idx ON messages (task_id, arrival) WHERE position IS NULL AND processed_at IS NULL;
