-- Who somebody in a workspace is in Construct: they have said so themselves, with a set-up code, and what they ask is asked with their key.
CREATE TABLE slack_members (
    team text NOT NULL,
    -- As Slack knows them.
    slack_user text NOT NULL,
    -- What the key opens. Where the workspace has got another organization since, they are nobody there.
    organization_id uuid NOT NULL,
    -- As Construct knows them.
    user_id text NOT NULL,
    name text NOT NULL,
    -- Their API key, AES-256-GCM with the master key `key_id` and the workspace and person as associated data.
    key_id text NOT NULL,
    key_nonce bytea NOT NULL,
    key_ciphertext bytea NOT NULL,
    linked_at timestamptz NOT NULL,
    CONSTRAINT slack_members_pkey PRIMARY KEY (team, slack_user),
    CONSTRAINT slack_members_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id)
);
