-- Facts that people have pinned to a task: they stand in the prompt of every model call, whatever becomes of the conversation
-- (docs/adr/0025-context.md). How many there may be, and how long, the gateway checks.
ALTER TABLE tasks ADD COLUMN pinned text[] NOT NULL DEFAULT '{}';
