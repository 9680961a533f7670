-- Who may do what: people, the organisations they belong to, and what else opens the door.

-- People as their issuer knows them. The one of issuer `local` is whoever the gateway takes for the operator of this machine.
CREATE TABLE users (
    id uuid NOT NULL,
    issuer text NOT NULL,
    subject text NOT NULL,
    -- In lower case; empty when the issuer does not tell. Invitations are for an address, and so only a verified one counts.
    email text NOT NULL,
    email_verified boolean NOT NULL,
    name text NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT users_pkey PRIMARY KEY (id),
    CONSTRAINT users_subject_key UNIQUE (issuer, subject)
);

ALTER TABLE organizations
    ADD COLUMN kind text NOT NULL DEFAULT 'team',
    ADD COLUMN slug text COLLATE "C",
    ADD COLUMN avatar_url text NOT NULL DEFAULT '',
    -- Whose personal one it is.
    ADD COLUMN user_id uuid,
    ADD COLUMN revision bigint NOT NULL DEFAULT 1,
    ADD COLUMN updated_at timestamptz,
    -- A deleted one opens to nobody. What it spent, did and said stays until the operator removes it.
    ADD COLUMN deleted_at timestamptz;

UPDATE organizations SET slug = CASE WHEN name = 'local' THEN 'local' ELSE id::text END, updated_at = created_at;

ALTER TABLE organizations
    ALTER COLUMN slug SET NOT NULL,
    ALTER COLUMN updated_at SET NOT NULL,
    ADD CONSTRAINT organizations_slug_key UNIQUE (slug),
    ADD CONSTRAINT organizations_user_fkey FOREIGN KEY (user_id) REFERENCES users (id),
    ADD CONSTRAINT organizations_kind_check CHECK (kind IN ('personal', 'team')),
    ADD CONSTRAINT organizations_personal_check CHECK ((kind = 'personal') = (user_id IS NOT NULL));

CREATE UNIQUE INDEX organizations_personal_key ON organizations (user_id) WHERE user_id IS NOT NULL;

CREATE TABLE members (
    organization_id uuid NOT NULL,
    user_id uuid NOT NULL,
    role text NOT NULL,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT members_pkey PRIMARY KEY (organization_id, user_id),
    CONSTRAINT members_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT members_user_fkey FOREIGN KEY (user_id) REFERENCES users (id),
    CONSTRAINT members_role_check CHECK (role IN ('owner', 'admin', 'member', 'viewer'))
);

CREATE INDEX members_user_idx ON members (user_id);

-- Their ids are `UserId::LOCAL` and `OrganizationId::LOCAL`.
INSERT INTO users (id, issuer, subject, email, email_verified, name, created_at, updated_at)
VALUES ('00000000-0000-7000-8000-000000000002', 'local', 'operator', '', false, 'local', '2026-01-01T00:00:00Z', '2026-01-01T00:00:00Z');
INSERT INTO members (organization_id, user_id, role, created_at, updated_at)
VALUES ('00000000-0000-7000-8000-000000000001', '00000000-0000-7000-8000-000000000002', 'owner', '2026-01-01T00:00:00Z', '2026-01-01T00:00:00Z');

CREATE TABLE invitations (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    -- In lower case.
    email text NOT NULL,
    role text NOT NULL,
    state text NOT NULL DEFAULT 'pending',
    invited_by text NOT NULL,
    accepted_by uuid,
    expires_at timestamptz NOT NULL,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT invitations_pkey PRIMARY KEY (id),
    CONSTRAINT invitations_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT invitations_user_fkey FOREIGN KEY (accepted_by) REFERENCES users (id),
    CONSTRAINT invitations_role_check CHECK (role IN ('owner', 'admin', 'member', 'viewer')),
    CONSTRAINT invitations_state_check CHECK (state IN ('pending', 'accepted', 'revoked')),
    CONSTRAINT invitations_accepted_check CHECK ((state = 'accepted') = (accepted_by IS NOT NULL))
);

-- One at a time for an address; the look at log-in; lists.
CREATE UNIQUE INDEX invitations_email_key ON invitations (organization_id, email) WHERE state = 'pending';
CREATE INDEX invitations_pending_idx ON invitations (email) WHERE state = 'pending';
CREATE INDEX invitations_organization_idx ON invitations (organization_id, created_at, id);

-- Keys of programs. What is presented is found by its SHA-256: it has 256 random bits, so that a plain hash tells nothing.
CREATE TABLE api_keys (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    name text NOT NULL,
    -- How it begins, for people who look for the one they hold.
    prefix text NOT NULL,
    hash bytea NOT NULL,
    role text NOT NULL,
    scopes text[] NOT NULL,
    -- In whose name it acts. It never may more than this user, and nothing when the user is no member any more.
    user_id uuid NOT NULL,
    expires_at timestamptz,
    revoked_at timestamptz,
    last_used_at timestamptz,
    created_at timestamptz NOT NULL,
    CONSTRAINT api_keys_pkey PRIMARY KEY (id),
    CONSTRAINT api_keys_hash_key UNIQUE (hash),
    CONSTRAINT api_keys_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT api_keys_user_fkey FOREIGN KEY (user_id) REFERENCES users (id),
    CONSTRAINT api_keys_role_check CHECK (role IN ('owner', 'admin', 'member', 'viewer')),
    CONSTRAINT api_keys_hash_check CHECK (octet_length(hash) = 32)
);

CREATE INDEX api_keys_organization_idx ON api_keys (organization_id, created_at, id);

-- What a new client exchanges for a key, once.
CREATE TABLE setup_codes (
    hash bytea NOT NULL,
    organization_id uuid NOT NULL,
    name text NOT NULL,
    role text NOT NULL,
    scopes text[] NOT NULL,
    user_id uuid NOT NULL,
    -- The key that it was made with: what this is, ends with it.
    made_by uuid,
    -- Of the key.
    key_expires_at timestamptz,
    expires_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT setup_codes_pkey PRIMARY KEY (hash),
    CONSTRAINT setup_codes_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT setup_codes_key_fkey FOREIGN KEY (made_by) REFERENCES api_keys (id),
    CONSTRAINT setup_codes_user_fkey FOREIGN KEY (user_id) REFERENCES users (id),
    CONSTRAINT setup_codes_role_check CHECK (role IN ('owner', 'admin', 'member', 'viewer')),
    CONSTRAINT setup_codes_hash_check CHECK (octet_length(hash) = 32)
);

CREATE INDEX setup_codes_expired_idx ON setup_codes (expires_at);
