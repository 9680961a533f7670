-- What a subtask has cost with all below it, also after it is gone. Most rows of the ledger are of tasks without a tree, and cost nothing here.
CREATE INDEX step_usage_tree_idx ON step_usage USING gin (tree) WHERE tree IS NOT NULL;
