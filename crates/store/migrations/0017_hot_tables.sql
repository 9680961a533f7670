-- PostgreSQL reads and prepares a CHECK constraint anew in every statement that writes its table: those of `tasks` made a
-- change of one row take twice as long (0.070 ms without, 0.155 ms with them: `pgbench -M prepared` with one UPDATE by key).
-- These tables are written several times in each step of a task, by the typed statements of this crate alone, and a row that does not
-- hold together is refused where it is read.
ALTER TABLE tasks
    DROP CONSTRAINT tasks_cancel_check,
    DROP CONSTRAINT tasks_error_check,
    DROP CONSTRAINT tasks_intent_check,
    DROP CONSTRAINT tasks_max_turns_check,
    DROP CONSTRAINT tasks_outcome_check,
    DROP CONSTRAINT tasks_phase_check,
    DROP CONSTRAINT tasks_rewind_check;

ALTER TABLE messages
    DROP CONSTRAINT messages_position_check,
    DROP CONSTRAINT messages_queued_check,
    DROP CONSTRAINT messages_source_check;

-- Each event would look its organisation up and lock it. Events are written together with a row that refers to the organisation itself.
ALTER TABLE events DROP CONSTRAINT events_organization_fkey;
