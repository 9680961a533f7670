-- What the Slack service knows. It writes these tables and no other; nobody else writes them.

-- The workspaces the app is installed in.
CREATE TABLE slack_installations (
    team text NOT NULL,
    organization_id uuid NOT NULL,
    team_name text NOT NULL,
    -- The app, and its user in this workspace.
    app text NOT NULL,
    bot_user text NOT NULL,
    -- Who installed it.
    installed_by text NOT NULL,
    -- The agent that answers where nothing else is said.
    agent text NOT NULL,
    scopes text NOT NULL,
    -- The bot's token and what it is renewed with, AES-256-GCM with the master key `key_id` and the workspace as associated data. None
    -- of the three after the app was removed.
    key_id text,
    key_nonce bytea,
    key_ciphertext bytea,
    -- When the token has to be renewed; none for one that doesn't end.
    expires_at timestamptz,
    -- Rises with every token.
    revision bigint NOT NULL DEFAULT 1,
    -- When somebody has agreed to it last: what Slack says about the time before is about another installation.
    installed_at timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT slack_installations_pkey PRIMARY KEY (team),
    CONSTRAINT slack_installations_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT slack_installations_key_check CHECK (num_nonnulls(key_id, key_nonce, key_ciphertext) IN (0, 3))
);

-- Installations that have begun. A state is used once.
CREATE TABLE slack_states (
    -- SHA-256 of it: who reads the table cannot go on with somebody's installation.
    state bytea NOT NULL,
    organization_id uuid NOT NULL,
    agent text NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT slack_states_pkey PRIMARY KEY (state),
    CONSTRAINT slack_states_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id)
);

-- A thread is a task.
CREATE TABLE slack_threads (
    team text NOT NULL,
    channel text NOT NULL,
    thread text NOT NULL,
    organization_id uuid NOT NULL,
    agent text NOT NULL,
    -- How many tasks there were before, which were deleted.
    generation integer NOT NULL DEFAULT 0,
    task text,
    CONSTRAINT slack_threads_pkey PRIMARY KEY (team, channel, thread),
    CONSTRAINT slack_threads_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id)
);

-- What somebody wants to have answered. The key is what keeps it from being answered twice.
CREATE TABLE slack_mentions (
    team text NOT NULL,
    channel text NOT NULL,
    ts text NOT NULL,
    -- 0, and one more each time somebody asks for another try.
    attempt integer NOT NULL,
    organization_id uuid NOT NULL,
    thread text NOT NULL,
    user_id text NOT NULL,
    -- What Slack sent; JSON's null when it is forgotten.
    event jsonb NOT NULL,
    state text NOT NULL,
    -- What the gateway is asked, written down before it is asked, so that asking again is the same request.
    request bytea,
    task text,
    message text,
    -- The file that a long answer became.
    file text,
    failures integer NOT NULL DEFAULT 0,
    error text,
    -- When it has to be looked at; none when it is over.
    next_look timestamptz,
    -- Who is at it, and until when nobody else may be.
    lease bigint NOT NULL DEFAULT 0,
    leased_until timestamptz NOT NULL,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT slack_mentions_pkey PRIMARY KEY (team, channel, ts, attempt),
    CONSTRAINT slack_mentions_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT slack_mentions_state_check CHECK (state IN ('received', 'asked', 'answered', 'refused', 'failed'))
);

CREATE INDEX slack_mentions_due_idx ON slack_mentions (next_look) WHERE next_look IS NOT NULL;
CREATE INDEX slack_mentions_thread_idx ON slack_mentions (team, channel, thread, ts);
CREATE INDEX slack_mentions_user_idx ON slack_mentions (team, user_id, created_at);
CREATE INDEX slack_mentions_task_idx ON slack_mentions (task) WHERE next_look IS NOT NULL;
-- What will be forgotten.
CREATE INDEX slack_mentions_old_idx ON slack_mentions (updated_at) WHERE next_look IS NULL AND event <> 'null'::jsonb;

-- What is posted. The row comes before the post; one without `ts` may or may not be in Slack, and is looked for there first.
CREATE TABLE slack_posts (
    team text NOT NULL,
    channel text NOT NULL,
    thread text NOT NULL,
    key text NOT NULL,
    ts text,
    created_at timestamptz NOT NULL,
    CONSTRAINT slack_posts_pkey PRIMARY KEY (team, channel, thread, key)
);

CREATE INDEX slack_posts_old_idx ON slack_posts (created_at);

-- Who may do what. Without any row that allows something in a workspace, its defaults hold.
CREATE TABLE slack_grants (
    team text NOT NULL,
    -- Each of these empty: any.
    channel text NOT NULL,
    user_id text NOT NULL,
    agent text NOT NULL,
    may text NOT NULL,
    created_by text NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT slack_grants_pkey PRIMARY KEY (team, channel, user_id, agent, may),
    CONSTRAINT slack_grants_may_check CHECK (may IN ('use', 'approve'))
);
