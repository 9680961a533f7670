-- Who answers: a model with instructions.
CREATE TABLE agents (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    model_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    description text NOT NULL,
    instructions text NOT NULL,
    -- Model calls one user message may cause; 0 means the default, which the code knows.
    max_turns integer NOT NULL,
    -- How the model samples.
    parameters jsonb NOT NULL,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT agents_pkey PRIMARY KEY (id),
    CONSTRAINT agents_tenant_key UNIQUE (organization_id, id),
    CONSTRAINT agents_name_key UNIQUE (organization_id, name),
    CONSTRAINT agents_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT agents_model_fkey FOREIGN KEY (organization_id, model_id) REFERENCES models (organization_id, id),
    CONSTRAINT agents_max_turns_check CHECK (max_turns >= 0)
);

-- For the foreign key, when a model is deleted.
CREATE INDEX agents_model_idx ON agents (organization_id, model_id);
