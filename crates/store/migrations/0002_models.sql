-- Accounts with model vendors, and the models they offer.

-- Names are compared byte by byte (COLLATE "C"): they are ASCII, and pages ordered by name must not change their order with
-- the operating system's collation.
CREATE TABLE model_providers (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    kind text NOT NULL,
    base_url text NOT NULL,
    -- The turns of a scripted provider.
    script text,
    -- The API key, AES-256-GCM with the master key `key_id` and the provider's id as associated data.
    key_id text,
    key_nonce bytea,
    key_ciphertext bytea,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT model_providers_pkey PRIMARY KEY (id),
    CONSTRAINT model_providers_tenant_key UNIQUE (organization_id, id),
    CONSTRAINT model_providers_name_key UNIQUE (organization_id, name),
    CONSTRAINT model_providers_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT model_providers_kind_check CHECK (kind IN ('anthropic', 'openai', 'scripted')),
    CONSTRAINT model_providers_key_check CHECK (num_nulls(key_id, key_nonce, key_ciphertext) IN (0, 3))
);

CREATE TABLE models (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    provider_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    vendor_model text NOT NULL,
    -- Tokens.
    context_window bigint NOT NULL,
    max_output_tokens bigint NOT NULL,
    -- Micro US dollars per million tokens: whole numbers, so that costs are exact.
    input_price bigint NOT NULL,
    output_price bigint NOT NULL,
    cache_read_price bigint NOT NULL,
    cache_write_price bigint NOT NULL,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT models_pkey PRIMARY KEY (id),
    CONSTRAINT models_tenant_key UNIQUE (organization_id, id),
    CONSTRAINT models_name_key UNIQUE (organization_id, name),
    CONSTRAINT models_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT models_provider_fkey FOREIGN KEY (organization_id, provider_id) REFERENCES model_providers (organization_id, id),
    CONSTRAINT models_prices_check CHECK (
        input_price >= 0 AND output_price >= 0 AND cache_read_price >= 0 AND cache_write_price >= 0
    )
);

-- For the foreign key, when a provider is deleted.
CREATE INDEX models_provider_idx ON models (organization_id, provider_id);
