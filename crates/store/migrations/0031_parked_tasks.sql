-- Who looks after a deployment asks how many tasks are put aside: few of them ever were, whatever the table's size.
CREATE INDEX tasks_parked_at_idx ON tasks (parked_at) WHERE parked_at IS NOT NULL;
