-- A plan that is made while `tasks` is empty knows nothing of its rows: for `organization_id = $1 AND id = $2`, as foreign keys and most
-- statements ask, every index that begins with the organisation looked as good as the key, and the youngest was taken. Until the table was
-- first analysed each look-up then read all of the organisation's tasks. Now the key is the only index that begins so and holds for all rows.
DROP INDEX tasks_agent_idx;
CREATE INDEX tasks_agent_idx ON tasks (agent_id);

DROP INDEX tasks_created_idx;
CREATE INDEX tasks_created_idx ON tasks (organization_id, created_at, id) WHERE deleted_at IS NULL;
