-- What scripts may call without asking, and the calls that people are asked about.

-- Lists of rules, as `domain::policy::Rule` has them.
ALTER TABLE agents ADD COLUMN policy jsonb NOT NULL DEFAULT '[]';
ALTER TABLE tasks ADD COLUMN policy jsonb NOT NULL DEFAULT '[]';

ALTER TABLE tasks DROP CONSTRAINT tasks_phase_check;
ALTER TABLE tasks ADD CONSTRAINT tasks_phase_check
    CHECK (phase IN ('await_input', 'invoke_model', 'execute_tools', 'await_approval', 'suspended'));

-- The reconciler asks, and ends what nobody needs to answer any more; what people say is an intent of the gateway's. Both
-- hold the task's row meanwhile, and the gateway raises its version: so no commit overlooks a decision.
CREATE TABLE approvals (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    task_id uuid NOT NULL,
    -- Which call: of which script (from 0) of which execution, and its number there (from 1).
    step_id uuid NOT NULL,
    script bigint NOT NULL,
    number bigint NOT NULL,
    tool text NOT NULL,
    -- The canonical arguments, or their beginning; how many bytes they have; the hash of the tool and all of them, which is
    -- what a decision holds for.
    arguments text NOT NULL,
    arguments_size bigint NOT NULL,
    arguments_hash text NOT NULL,
    reason text NOT NULL,
    state text NOT NULL DEFAULT 'pending',
    decided_by text NOT NULL DEFAULT '',
    words text NOT NULL DEFAULT '',
    decided_at timestamptz,
    expires_at timestamptz NOT NULL,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT approvals_pkey PRIMARY KEY (id),
    -- Also what an execution's questions are read by.
    CONSTRAINT approvals_call_key UNIQUE (step_id, script, number),
    CONSTRAINT approvals_task_fkey FOREIGN KEY (organization_id, task_id) REFERENCES tasks (organization_id, id) ON DELETE CASCADE,
    CONSTRAINT approvals_state_check CHECK (state IN ('pending', 'approved', 'rejected', 'expired', 'cancelled')),
    CONSTRAINT approvals_decided_check CHECK ((state = 'pending') = (decided_at IS NULL))
);

-- Lists: of an organisation, of one task, and of what waits for people.
CREATE INDEX approvals_created_idx ON approvals (organization_id, created_at, id);
CREATE INDEX approvals_task_idx ON approvals (task_id, created_at);
CREATE INDEX approvals_pending_idx ON approvals (organization_id, created_at, id) WHERE state = 'pending';
