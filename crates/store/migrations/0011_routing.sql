-- Who answers when a model cannot, several keys of a provider, and their limits.

ALTER TABLE models ADD COLUMN hedge_after_ms bigint NOT NULL DEFAULT 0;
ALTER TABLE models ADD CONSTRAINT models_hedge_check CHECK (hedge_after_ms >= 0);

CREATE TABLE model_fallbacks (
    organization_id uuid NOT NULL,
    model_id uuid NOT NULL,
    -- From 0, in the order they are tried.
    position integer NOT NULL,
    fallback_id uuid NOT NULL,
    -- 0: none.
    weight bigint NOT NULL,
    CONSTRAINT model_fallbacks_pkey PRIMARY KEY (model_id, position),
    CONSTRAINT model_fallbacks_once_key UNIQUE (model_id, fallback_id),
    CONSTRAINT model_fallbacks_other_check CHECK (model_id <> fallback_id),
    CONSTRAINT model_fallbacks_weight_check CHECK (weight BETWEEN 0 AND 1000),
    CONSTRAINT model_fallbacks_model_fkey FOREIGN KEY (organization_id, model_id) REFERENCES models (organization_id, id)
        ON DELETE CASCADE,
    CONSTRAINT model_fallbacks_fallback_fkey FOREIGN KEY (organization_id, fallback_id) REFERENCES models (organization_id, id)
);

-- For the foreign key, when a model is deleted.
CREATE INDEX model_fallbacks_fallback_idx ON model_fallbacks (organization_id, fallback_id);

-- Of each key of the provider; 0: none.
ALTER TABLE model_providers ADD COLUMN max_concurrency bigint NOT NULL DEFAULT 0;
ALTER TABLE model_providers ADD COLUMN requests_per_minute bigint NOT NULL DEFAULT 0;
ALTER TABLE model_providers ADD COLUMN tokens_per_minute bigint NOT NULL DEFAULT 0;
ALTER TABLE model_providers ADD CONSTRAINT model_providers_limits_check CHECK (
    max_concurrency >= 0 AND requests_per_minute >= 0 AND tokens_per_minute >= 0
);

-- The keys behind the first, which stays in `model_providers`. Sealed like that one.
CREATE TABLE model_provider_keys (
    organization_id uuid NOT NULL,
    provider_id uuid NOT NULL,
    position integer NOT NULL,
    key_id text NOT NULL,
    key_nonce bytea NOT NULL,
    key_ciphertext bytea NOT NULL,
    CONSTRAINT model_provider_keys_pkey PRIMARY KEY (provider_id, position),
    CONSTRAINT model_provider_keys_provider_fkey FOREIGN KEY (organization_id, provider_id)
        REFERENCES model_providers (organization_id, id) ON DELETE CASCADE
);
