-- Organizations that are deleted are erased, part by part (docs/adr/0035-erasure.md).

ALTER TABLE organizations
    -- Since when. None of those that were closed before there was this: their rows stay until the operator deletes them again.
    ADD COLUMN erasing_since timestamptz,
    -- When a part was last looked at, so that each gets its turn.
    ADD COLUMN erasing_looked_at timestamptz,
    -- How much of what is gone already: {"messages": 12}.
    ADD COLUMN erased jsonb NOT NULL DEFAULT '{}';

CREATE INDEX organizations_erasing_idx ON organizations (erasing_looked_at) WHERE erasing_since IS NOT NULL;

-- Tasks whose events are gone as well: by these, interpreters know which workspaces to remove.
CREATE TABLE erased_tasks (
    id uuid NOT NULL,
    -- As long as events of it are left; then nothing says whose it was.
    organization_id uuid,
    erased_at timestamptz NOT NULL,
    CONSTRAINT erased_tasks_pkey PRIMARY KEY (id)
);

CREATE INDEX erased_tasks_organization_idx ON erased_tasks (organization_id) WHERE organization_id IS NOT NULL;
CREATE INDEX erased_tasks_time_idx ON erased_tasks (erased_at);

-- By these, what is an organization's is found; every other table has such an index already.
CREATE INDEX budgets_organization_idx ON budgets (organization_id);
CREATE INDEX model_provider_keys_organization_idx ON model_provider_keys (organization_id);
CREATE INDEX reservations_organization_idx ON reservations (organization_id);
CREATE INDEX setup_codes_organization_idx ON setup_codes (organization_id);
CREATE INDEX slack_installations_organization_idx ON slack_installations (organization_id);
CREATE INDEX slack_members_organization_idx ON slack_members (organization_id);
CREATE INDEX slack_mentions_organization_idx ON slack_mentions (organization_id);
CREATE INDEX slack_states_organization_idx ON slack_states (organization_id);
CREATE INDEX slack_threads_organization_idx ON slack_threads (organization_id);
