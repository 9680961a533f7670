-- Documents that clients keep, for organisations and for their members (docs/adr/0036-state.md).

CREATE TABLE states (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    -- Whose own it is; all zeros: the organisation's.
    owner uuid NOT NULL,
    -- The same for the reference: what is a member's own goes with them.
    user_id uuid GENERATED ALWAYS AS (nullif(owner, '00000000-0000-0000-0000-000000000000')) STORED,
    name text NOT NULL,
    -- Rises with every change, deletions too: a row stays, so that no number is given twice.
    version bigint NOT NULL,
    -- As it was put. None: it is deleted.
    json text,
    updated_by text NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT states_pkey PRIMARY KEY (id),
    CONSTRAINT states_name_key UNIQUE (organization_id, owner, name),
    CONSTRAINT states_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT states_member_fkey FOREIGN KEY (organization_id, user_id) REFERENCES members (organization_id, user_id) ON DELETE CASCADE
);

-- For the reference, when a member leaves.
CREATE INDEX states_member_idx ON states (organization_id, user_id);

-- What documents said before, the newest few of each.
CREATE TABLE state_versions (
    organization_id uuid NOT NULL,
    state_id uuid NOT NULL,
    version bigint NOT NULL,
    json text NOT NULL,
    updated_by text NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT state_versions_pkey PRIMARY KEY (state_id, version),
    CONSTRAINT state_versions_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT state_versions_state_fkey FOREIGN KEY (state_id) REFERENCES states (id) ON DELETE CASCADE
);

CREATE INDEX state_versions_organization_idx ON state_versions (organization_id);
