-- Files that people upload (docs/adr/0038-files.md). What they say lies in the folder of blobs; these rows say what there is.

CREATE TABLE files (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    name text NOT NULL,
    -- Empty until it is told from the content.
    media_type text NOT NULL,
    -- As the client says, before anything is uploaded.
    size bigint NOT NULL,
    -- The same; none: the client does not say.
    expected bytea,
    state text NOT NULL,
    received bigint NOT NULL DEFAULT 0,
    part_count integer NOT NULL DEFAULT 0,
    -- Of what is there. Set when, and only when, the file is ready.
    sha256 bytea,
    -- Why it was refused.
    reason text NOT NULL DEFAULT '',
    created_by text NOT NULL,
    -- When it is removed unless it is ready.
    expires_at timestamptz,
    -- Of one that is being put together: until when a gateway is at it.
    claimed_until timestamptz,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT files_pkey PRIMARY KEY (id),
    CONSTRAINT files_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT files_state_check CHECK (state IN ('uploading', 'checking', 'ready', 'refused')),
    CONSTRAINT files_size_check CHECK (received BETWEEN 0 AND size)
);

CREATE INDEX files_created_idx ON files (organization_id, created_at, id);
CREATE INDEX files_updated_idx ON files (organization_id, updated_at, id);
-- What a content is needed by.
CREATE INDEX files_sha256_idx ON files (organization_id, sha256) WHERE sha256 IS NOT NULL;
-- For the sweep, and to count what is unfinished.
CREATE INDEX files_expires_idx ON files (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX files_unfinished_idx ON files (organization_id) WHERE state IN ('uploading', 'checking');

CREATE TABLE file_parts (
    organization_id uuid NOT NULL,
    file_id uuid NOT NULL,
    -- Where in the file it begins.
    position bigint NOT NULL,
    size bigint NOT NULL,
    -- What it is called in the folder.
    part uuid NOT NULL,
    sha256 bytea NOT NULL,
    CONSTRAINT file_parts_pkey PRIMARY KEY (file_id, position),
    CONSTRAINT file_parts_file_fkey FOREIGN KEY (file_id) REFERENCES files (id) ON DELETE CASCADE
);

-- For erasure.
CREATE INDEX file_parts_organization_idx ON file_parts (organization_id);

-- What has to go from the folder: written with the change that makes it superfluous, removed when it is gone. Outlives its organisation.
CREATE TABLE file_removals (
    id uuid NOT NULL,
    owner uuid NOT NULL,
    -- A content, if no row needs it.
    sha256 bytea,
    -- What was uploaded for a file. Neither: everything of the organisation.
    file_id uuid,
    created_at timestamptz NOT NULL,
    CONSTRAINT file_removals_pkey PRIMARY KEY (id)
);
