-- Which pool of interpreters runs a task's scripts. A task keeps the one it was created with: what is under way in one pool
-- must not be begun in another. Names are checked at the gateway, which knows the pools that exist.

ALTER TABLE agents ADD COLUMN compute text NOT NULL DEFAULT 'cpu-2';
ALTER TABLE tasks ADD COLUMN compute text NOT NULL DEFAULT 'cpu-2';
