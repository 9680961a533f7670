-- How much an organisation may do (docs/adr/0033-quotas.md), where the operator has said so. What it has done is counted from the
-- tables that hold it: nothing is counted here.

CREATE TABLE quotas (
    organization_id uuid NOT NULL,
    -- A tier of the gateway's configuration. Empty: the one that holds for everybody.
    tier text NOT NULL,
    -- Each in the place of the tier's; none: the tier's.
    requests_per_minute bigint,
    key_requests_per_minute bigint,
    tasks_per_day bigint,
    runs_per_day bigint,
    tokens_per_day bigint,
    spend_per_month_pico_usd bigint,
    storage_bytes bigint,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT quotas_pkey PRIMARY KEY (organization_id),
    CONSTRAINT quotas_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id)
);

-- Tasks that are gone were begun all the same. The event that they were deleted stays, and their id says when they were made.
CREATE INDEX events_deleted_tasks_idx ON events (organization_id, stream_id) WHERE type = 'task.deleted';

-- Runs: what came of the scripts of one step, with the calls of tools they made. Copies in a forked task have no step.
CREATE INDEX messages_runs_idx ON messages (organization_id, created_at)
    WHERE step_id IS NOT NULL AND content #>> '{blocks,0,kind}' = 'code_interpreter_result';

-- Uploads that are kept for a scan.
CREATE INDEX scans_archives_idx ON scans (organization_id) WHERE archive IS NOT NULL AND cleaned_at IS NULL;
