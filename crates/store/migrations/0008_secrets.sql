-- Secrets that scripts use without seeing them, and the agents that may.

CREATE TABLE secrets (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    description text NOT NULL,
    -- Where the value may go.
    hosts text[] NOT NULL,
    commands text[] NOT NULL,
    -- The value, AES-256-GCM with the key `key_id`, which is none of the master keys, and the secret's id as associated data.
    key_id text NOT NULL,
    key_nonce bytea NOT NULL,
    key_ciphertext bytea NOT NULL,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT secrets_pkey PRIMARY KEY (id),
    CONSTRAINT secrets_tenant_key UNIQUE (organization_id, id),
    CONSTRAINT secrets_name_key UNIQUE (organization_id, name),
    CONSTRAINT secrets_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT secrets_bindings_check CHECK (cardinality(hosts) + cardinality(commands) > 0)
);

CREATE TABLE agent_secrets (
    organization_id uuid NOT NULL,
    agent_id uuid NOT NULL,
    secret_id uuid NOT NULL,
    CONSTRAINT agent_secrets_pkey PRIMARY KEY (agent_id, secret_id),
    CONSTRAINT agent_secrets_agent_fkey FOREIGN KEY (organization_id, agent_id) REFERENCES agents (organization_id, id) ON DELETE CASCADE,
    CONSTRAINT agent_secrets_secret_fkey FOREIGN KEY (organization_id, secret_id) REFERENCES secrets (organization_id, id)
);

-- For the foreign key, when a secret is deleted.
CREATE INDEX agent_secrets_secret_idx ON agent_secrets (organization_id, secret_id);
