-- The intent by which a person asked for a turn that had failed to be tried again; of no account once an intent as new has been looked at.
ALTER TABLE tasks ADD COLUMN retry_intent bigint;
