-- Limits of single keys (docs/adr/0039-key-limits.md), and for which key something is counted.

ALTER TABLE api_keys
    -- {"tasks_per_day": 100}; what is not there is not limited.
    ADD COLUMN limits jsonb NOT NULL DEFAULT '{}',
    ADD COLUMN revision bigint NOT NULL DEFAULT 1,
    -- When its limits were last changed.
    ADD COLUMN updated_at timestamptz;

-- Of the key.
ALTER TABLE setup_codes ADD COLUMN limits jsonb NOT NULL DEFAULT '{}';

-- None of these refers to api_keys: what was done stays done, and a reference would be one look more with each row. None of them is in an
-- index either: what keys have done is read together, by the organisation and the time.
ALTER TABLE tasks
    -- The key it was begun with.
    ADD COLUMN api_key_id uuid,
    -- The key with which it was last asked for something: what the task does is counted for that one.
    ADD COLUMN asked_key_id uuid;

-- The key it was made or last changed with.
ALTER TABLE schedules ADD COLUMN api_key_id uuid;

-- Of what the mesh has written: the key that it is counted for.
ALTER TABLE messages ADD COLUMN api_key_id uuid;
ALTER TABLE step_usage ADD COLUMN api_key_id uuid;

-- Of `task.deleted` when the task's row is gone: the key that the task was begun with.
ALTER TABLE events ADD COLUMN api_key_id uuid;
