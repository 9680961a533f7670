-- What people ask for while a task works: messages that do not wait, a transcript that is taken back, copies of a task.

-- Whether it ends the turn that runs instead of waiting for its end.
ALTER TABLE messages ADD COLUMN interrupts boolean NOT NULL DEFAULT false;
-- When it was put aside: it keeps its place, and the model does not see it any more.
ALTER TABLE messages ADD COLUMN superseded_at timestamptz;
-- The message in whose place it was sent.
ALTER TABLE messages ADD COLUMN replaces uuid;

-- In the order of the queue. The one it takes the place of served replicas of the version before; they sort what it gives them.
DROP INDEX messages_queue_idx;
CREATE INDEX messages_queue_idx ON messages (task_id, interrupts DESC, arrival) WHERE position IS NULL AND processed_at IS NULL;

-- From which place on the transcript is to be put aside, and the value of `intents` when that was asked for: as with a cancel, queued
-- messages with a smaller arrival are dropped.
ALTER TABLE tasks ADD COLUMN rewind_from bigint;
ALTER TABLE tasks ADD COLUMN rewind_intent bigint;
ALTER TABLE tasks ADD CONSTRAINT tasks_rewind_check CHECK (num_nulls(rewind_from, rewind_intent) IN (0, 2));
-- The task whose transcript it began with a copy of, and the last message that was copied. No foreign keys: they may go.
ALTER TABLE tasks ADD COLUMN forked_from uuid;
ALTER TABLE tasks ADD COLUMN forked_from_message uuid;

ALTER TABLE tasks DROP CONSTRAINT tasks_outcome_check;
ALTER TABLE tasks ADD CONSTRAINT tasks_outcome_check
    CHECK (last_outcome IN ('completed', 'failed', 'cancelled', 'max_turns', 'interrupted'));
