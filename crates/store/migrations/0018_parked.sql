-- Tasks that could not be looked at: tried again and again, each time with a failure that does not pass by itself, and then put aside.
-- What a task is put aside for holds until its next intent; so nothing has to be undone, and versions that do not know of it do no harm.
ALTER TABLE tasks ADD COLUMN parked_intents bigint;
ALTER TABLE tasks ADD COLUMN parked_at timestamptz;
ALTER TABLE tasks ADD COLUMN parked_reason text;
