-- With which key something was stored that is kept, for the limits of single keys (docs/adr/0039-key-limits.md). As where else a key is counted
-- for, none of these refers to api_keys, and none is in an index: what keys keep is summed up together, of all that the organisation keeps.

ALTER TABLE files ADD COLUMN api_key_id uuid;

-- What was sent for it.
ALTER TABLE scans ADD COLUMN api_key_id uuid;

-- The key with which what it says now was put, or brought back; none while it is deleted.
ALTER TABLE states ADD COLUMN api_key_id uuid;
ALTER TABLE state_versions ADD COLUMN api_key_id uuid;
