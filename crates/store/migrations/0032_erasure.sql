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
