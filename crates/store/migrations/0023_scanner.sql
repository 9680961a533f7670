-- Scans of repositories. The gateway writes what people want: connections, a scan, a cancel, what is said of a candidate, a hand-over.
-- Everything else of a scan is written by the scanner alone, under its lease.

-- How hosts of repositories are reached.
CREATE TABLE scan_connections (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    host text NOT NULL,
    -- Empty: the host's own.
    base_url text NOT NULL,
    -- What opens it: AES-256-GCM with the master key `key_id` and the connection's id as associated data. A token, or an app's ids and key.
    credential text NOT NULL,
    key_id text NOT NULL,
    key_nonce bytea NOT NULL,
    key_ciphertext bytea NOT NULL,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT scan_connections_pkey PRIMARY KEY (organization_id, id),
    CONSTRAINT scan_connections_id_key UNIQUE (id),
    CONSTRAINT scan_connections_name_key UNIQUE (organization_id, name),
    CONSTRAINT scan_connections_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT scan_connections_host_check CHECK (host IN ('github', 'gitlab')),
    CONSTRAINT scan_connections_credential_check CHECK (credential IN ('token', 'app'))
);

CREATE TABLE scans (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    -- What people asked for. Written once, by the gateway.
    kind text NOT NULL,
    location text NOT NULL,
    -- The same for every scan of a repository.
    repository text NOT NULL,
    connection_id uuid,
    connection_name text NOT NULL,
    -- Of an upload: where its bytes lie.
    archive text,
    reference text NOT NULL,
    model text NOT NULL,
    budget_pico_usd bigint NOT NULL,
    max_bytes bigint NOT NULL,
    max_files bigint NOT NULL,
    max_turns integer NOT NULL,
    timeout_seconds bigint NOT NULL,
    created_by text NOT NULL,
    -- The task that explores, made for it, and the token by which the scanner may speak to this task: sealed with a master key and the
    -- scan's id as associated data; none of the three when the scan is over.
    task text NOT NULL,
    token_key_id text,
    token_nonce bytea,
    token_ciphertext bytea,
    deadline timestamptz NOT NULL,
    -- An intent, written by the gateway.
    cancel_requested_at timestamptz,
    cancel_reason text NOT NULL DEFAULT '',
    -- The rest is the scanner's.
    phase text NOT NULL DEFAULT 'queued',
    phase_since timestamptz NOT NULL,
    reason text NOT NULL DEFAULT '',
    -- When somebody has to look at it; none when it is over.
    next_wake timestamptz,
    lease bigint NOT NULL DEFAULT 0,
    leased_until timestamptz NOT NULL,
    failures integer NOT NULL DEFAULT 0,
    commit_id text NOT NULL DEFAULT '',
    -- What the model is told of the repository.
    brief text NOT NULL DEFAULT '',
    -- How often the model was told what is wrong with its answer.
    repairs integer NOT NULL DEFAULT 0,
    -- What the model is told of that.
    request text NOT NULL DEFAULT '',
    message text NOT NULL DEFAULT '',
    files bigint NOT NULL DEFAULT 0,
    files_skipped bigint NOT NULL DEFAULT 0,
    secrets_masked bigint NOT NULL DEFAULT 0,
    candidates bigint NOT NULL DEFAULT 0,
    refused bigint NOT NULL DEFAULT 0,
    cost_pico_usd bigint NOT NULL DEFAULT 0,
    event_sequence bigint NOT NULL DEFAULT 0,
    -- When its files were deleted.
    cleaned_at timestamptz,
    ended_at timestamptz,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT scans_pkey PRIMARY KEY (organization_id, id),
    CONSTRAINT scans_id_key UNIQUE (id),
    CONSTRAINT scans_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT scans_connection_fkey FOREIGN KEY (organization_id, connection_id) REFERENCES scan_connections (organization_id, id)
        ON DELETE SET NULL (connection_id),
    CONSTRAINT scans_kind_check CHECK (kind IN ('github', 'gitlab', 'upload', 'folder')),
    CONSTRAINT scans_phase_check CHECK
        (phase IN ('queued', 'snapshot', 'survey', 'exploring', 'checking', 'review', 'failed', 'cancelled')),
    CONSTRAINT scans_token_check CHECK (num_nonnulls(token_key_id, token_nonce, token_ciphertext) IN (0, 3)),
    -- No scan stalls: what is not over is looked at again.
    CONSTRAINT scans_wake_check CHECK ((next_wake IS NULL) = (phase IN ('review', 'failed', 'cancelled')))
);

CREATE INDEX scans_due_idx ON scans (next_wake) WHERE next_wake IS NOT NULL;
CREATE INDEX scans_created_idx ON scans (organization_id, created_at, id);
CREATE INDEX scans_repository_idx ON scans (organization_id, repository, created_at);
CREATE INDEX scans_connection_idx ON scans (organization_id, connection_id) WHERE connection_id IS NOT NULL;
CREATE INDEX scans_files_idx ON scans (ended_at) WHERE ended_at IS NOT NULL AND cleaned_at IS NULL;

-- What happened, numbered 1, 2, 3, … in each scan; written with the change it tells of.
CREATE TABLE scan_events (
    organization_id uuid NOT NULL,
    scan_id uuid NOT NULL,
    sequence bigint NOT NULL,
    kind text NOT NULL,
    phase text NOT NULL,
    message text NOT NULL,
    files bigint NOT NULL,
    candidates bigint NOT NULL,
    cost_pico_usd bigint NOT NULL,
    tool_calls bigint NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT scan_events_pkey PRIMARY KEY (organization_id, scan_id, sequence),
    CONSTRAINT scan_events_scan_fkey FOREIGN KEY (organization_id, scan_id) REFERENCES scans (organization_id, id) ON DELETE CASCADE
);

-- Which files a scan has seen, with their hashes, so that scans can be compared when the files are gone.
CREATE TABLE scan_manifests (
    organization_id uuid NOT NULL,
    scan_id uuid NOT NULL,
    manifest text NOT NULL,
    CONSTRAINT scan_manifests_pkey PRIMARY KEY (organization_id, scan_id),
    CONSTRAINT scan_manifests_scan_fkey FOREIGN KEY (organization_id, scan_id) REFERENCES scans (organization_id, id) ON DELETE CASCADE
);

-- Accepted candidates that were handed over together: the intent, told to the mesh until it has it.
CREATE TABLE scan_hand_overs (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    scan_id uuid NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    told_at timestamptz,
    CONSTRAINT scan_hand_overs_pkey PRIMARY KEY (organization_id, id),
    CONSTRAINT scan_hand_overs_scan_fkey FOREIGN KEY (organization_id, scan_id) REFERENCES scans (organization_id, id) ON DELETE CASCADE
);

CREATE INDEX scan_hand_overs_untold_idx ON scan_hand_overs (created_at) WHERE told_at IS NULL;

-- What a scan proposes, checked. The scanner inserts the rows when the scan comes to its review; from then on they are the gateway's.
CREATE TABLE scan_candidates (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    scan_id uuid NOT NULL,
    name text COLLATE "C" NOT NULL,
    -- The whole of it, with the evidence, in the form of `construct.v1.CandidateContent`.
    content jsonb NOT NULL,
    score integer NOT NULL,
    state text NOT NULL DEFAULT 'proposed',
    edited boolean NOT NULL DEFAULT false,
    reviewed_by text NOT NULL DEFAULT '',
    reviewed_at timestamptz,
    hand_over_id uuid,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT scan_candidates_pkey PRIMARY KEY (organization_id, id),
    CONSTRAINT scan_candidates_name_key UNIQUE (organization_id, scan_id, name),
    CONSTRAINT scan_candidates_scan_fkey FOREIGN KEY (organization_id, scan_id) REFERENCES scans (organization_id, id) ON DELETE CASCADE,
    CONSTRAINT scan_candidates_hand_over_fkey FOREIGN KEY (organization_id, hand_over_id) REFERENCES scan_hand_overs (organization_id, id),
    CONSTRAINT scan_candidates_state_check CHECK (state IN ('proposed', 'accepted', 'rejected', 'handed_over')),
    CONSTRAINT scan_candidates_hand_over_check CHECK ((state = 'handed_over') = (hand_over_id IS NOT NULL)),
    CONSTRAINT scan_candidates_score_check CHECK (score BETWEEN 0 AND 100)
);

CREATE INDEX scan_candidates_hand_over_idx ON scan_candidates (organization_id, hand_over_id) WHERE hand_over_id IS NOT NULL;
