-- Money: prices in full, budgets, what is set aside of them, and a ledger that can be asked whose money it was.

ALTER TABLE models ADD COLUMN thinking_price bigint NOT NULL DEFAULT 0;
-- Micro US dollars per call.
ALTER TABLE models ADD COLUMN request_price bigint NOT NULL DEFAULT 0;
-- Prices of calls with a long input, as `domain::money::LongContext` has them.
ALTER TABLE models ADD COLUMN long_context_prices jsonb;
-- Where the prices are from: a model that costs nothing because nobody knows better is told from one that is free.
ALTER TABLE models ADD COLUMN prices_source text NOT NULL DEFAULT 'given';
UPDATE models m SET prices_source = CASE WHEN p.kind IN ('scripted', 'ollama') THEN 'free' ELSE 'unknown' END
FROM model_providers p
WHERE p.id = m.provider_id AND m.input_price = 0 AND m.output_price = 0 AND m.cache_read_price = 0 AND m.cache_write_price = 0;
ALTER TABLE models ADD CONSTRAINT models_prices_source_check CHECK (prices_source IN ('given', 'catalogue', 'free', 'unknown'));
ALTER TABLE models ADD CONSTRAINT models_more_prices_check CHECK (thinking_price >= 0 AND request_price >= 0);

-- The tree a task belongs to: its root, which is itself as long as tasks have no subtasks.
ALTER TABLE tasks ADD COLUMN root_id uuid;
UPDATE tasks SET root_id = id;
ALTER TABLE tasks ALTER COLUMN root_id SET NOT NULL;
ALTER TABLE tasks ADD COLUMN thinking_tokens bigint NOT NULL DEFAULT 0;
-- Tokens of the transcript, as an upper estimate: the sum of its messages'. Kept beside the messages, so that what a call will
-- cost at most is known without reading them.
ALTER TABLE tasks ADD COLUMN transcript_tokens bigint NOT NULL DEFAULT 0;
ALTER TABLE messages ADD COLUMN thinking_tokens bigint NOT NULL DEFAULT 0;
ALTER TABLE messages ADD COLUMN estimated_tokens bigint NOT NULL DEFAULT 0;
UPDATE messages SET estimated_tokens = octet_length(content::text) / 2 + 50;
UPDATE tasks t SET transcript_tokens = coalesce(
    (SELECT sum(m.estimated_tokens) FROM messages m WHERE m.task_id = t.id AND m.position IS NOT NULL), 0);

-- The ledger also has what scripts and clients of the proxy use; `step_id` is then the id of their call.
ALTER TABLE step_usage DROP CONSTRAINT step_usage_purpose_check;
ALTER TABLE step_usage ALTER COLUMN task_id DROP NOT NULL;
ALTER TABLE step_usage ADD COLUMN thinking_tokens bigint NOT NULL DEFAULT 0;
ALTER TABLE step_usage ADD COLUMN agent_id uuid;
ALTER TABLE step_usage ADD COLUMN root_id uuid;
UPDATE step_usage u SET root_id = u.task_id, agent_id = (SELECT t.agent_id FROM tasks t WHERE t.id = u.task_id);
CREATE INDEX step_usage_agent_idx ON step_usage (organization_id, agent_id, created_at);
CREATE INDEX step_usage_root_idx ON step_usage (root_id, created_at);

-- How much may be spent: by an organisation, an agent, a task with its subtasks, or with a token.
CREATE TABLE budgets (
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    -- Whose: at most one of these; none: the organisation's.
    agent_id uuid,
    task_id uuid,
    token_id text,
    -- `call` bounds each single call and counts nothing.
    period text NOT NULL,
    limit_pico_usd bigint NOT NULL,
    -- When the period began that the sums are of.
    window_start timestamptz NOT NULL,
    -- What the ledger has since then, and what was set aside and never reported.
    spent_pico_usd bigint NOT NULL DEFAULT 0,
    -- What is set aside at the moment; it outlives the end of a period.
    reserved_pico_usd bigint NOT NULL DEFAULT 0,
    -- When the ledger was last summed up for it. A budget is counted twice: when it is made, and a while later, when every
    -- booking that could not see it yet has ended.
    counted_at timestamptz,
    revision bigint NOT NULL DEFAULT 1,
    created_at timestamptz NOT NULL,
    updated_at timestamptz NOT NULL,
    CONSTRAINT budgets_pkey PRIMARY KEY (id),
    CONSTRAINT budgets_scope_key UNIQUE NULLS NOT DISTINCT (organization_id, agent_id, task_id, token_id, period),
    CONSTRAINT budgets_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id),
    CONSTRAINT budgets_agent_fkey FOREIGN KEY (organization_id, agent_id) REFERENCES agents (organization_id, id) ON DELETE CASCADE,
    CONSTRAINT budgets_task_fkey FOREIGN KEY (organization_id, task_id) REFERENCES tasks (organization_id, id) ON DELETE CASCADE,
    CONSTRAINT budgets_scope_check CHECK (num_nonnulls(agent_id, task_id, token_id) <= 1),
    CONSTRAINT budgets_period_check CHECK (period IN ('total', 'day', 'month', 'call')),
    CONSTRAINT budgets_limit_check CHECK (limit_pico_usd >= 0)
);

-- For the foreign keys, and to find what applies.
CREATE INDEX budgets_agent_idx ON budgets (organization_id, agent_id) WHERE agent_id IS NOT NULL;
CREATE INDEX budgets_task_idx ON budgets (organization_id, task_id) WHERE task_id IS NOT NULL;
CREATE INDEX budgets_token_idx ON budgets (organization_id, token_id) WHERE token_id IS NOT NULL;

-- What is set aside, call by call. Only calls that a budget applies to have a row.
CREATE TABLE reservations (
    -- The step's id, or what the caller chose.
    id uuid NOT NULL,
    organization_id uuid NOT NULL,
    -- For whom, at the moment it was made. No foreign keys: the money is owed whatever becomes of them.
    agent_id uuid,
    root_id uuid,
    token_id text,
    amount_pico_usd bigint NOT NULL,
    budgets uuid[] NOT NULL,
    expires_at timestamptz NOT NULL,
    -- What becomes of it then: counted as spent, or given back.
    spent_when_expired boolean NOT NULL,
    -- When it was counted as spent. A report that comes later takes its place.
    expired_at timestamptz,
    created_at timestamptz NOT NULL,
    CONSTRAINT reservations_pkey PRIMARY KEY (id),
    CONSTRAINT reservations_organization_fkey FOREIGN KEY (organization_id) REFERENCES organizations (id)
);

CREATE INDEX reservations_expiry_idx ON reservations (expires_at) WHERE expired_at IS NULL;

-- The functions below are called within the statements that decide and book, so that money is set aside in the transaction
-- that begins a call, without a further round trip. All of them lock budgets in the order of their ids, after the task's row.

-- When the period that `at` is in began.
CREATE FUNCTION budgets_window(period text, at timestamptz) RETURNS timestamptz LANGUAGE sql STABLE AS $$
    SELECT CASE
        WHEN period IN ('day', 'month') THEN date_trunc(period, at, 'UTC')
        ELSE timestamptz '1970-01-01 00:00:00+00'
    END
$$;

-- Whether a budget is for what is spent by an agent, in a tree of tasks, with a token. To find such budgets the same is written out, so
-- that indexes serve it.
CREATE FUNCTION budgets_apply(budgets, agent uuid, root uuid, token text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN $1.agent_id IS NOT NULL THEN $1.agent_id IS NOT DISTINCT FROM agent
        WHEN $1.task_id IS NOT NULL THEN $1.task_id IS NOT DISTINCT FROM root
        WHEN $1.token_id IS NOT NULL THEN $1.token_id IS NOT DISTINCT FROM token
        ELSE true
    END
$$;

-- Sets money aside in every budget that applies, or fails with CB001 and, as its detail, which budget has not got it. The same
-- id asks for the same again.
CREATE FUNCTION budgets_reserve(
    reservation uuid, organization uuid, agent uuid, root uuid, token text, amount bigint,
    expires timestamptz, spent_at_expiry boolean, moment timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    budget budgets%ROWTYPE;
    opened timestamptz;
    spent bigint;
    counted uuid[] := '{}';
BEGIN
    IF EXISTS (SELECT FROM reservations WHERE id = reservation) THEN
        RETURN;
    END IF;
    FOR budget IN
        SELECT b.* FROM budgets b
        WHERE b.organization_id = organization
          AND (b.agent_id = agent OR b.task_id = root OR b.token_id = token
               OR (b.agent_id IS NULL AND b.task_id IS NULL AND b.token_id IS NULL))
        ORDER BY b.id
        FOR UPDATE
    LOOP
        opened := greatest(budget.window_start, budgets_window(budget.period, moment));
        spent := CASE WHEN budget.period = 'call' OR opened > budget.window_start THEN 0 ELSE budget.spent_pico_usd END;
        -- In numeric, because sums of money saturate.
        IF spent::numeric + budget.reserved_pico_usd + amount > budget.limit_pico_usd THEN
            RAISE EXCEPTION 'a budget is exhausted' USING ERRCODE = 'CB001', DETAIL = jsonb_build_object(
                'agent', (SELECT a.name FROM agents a WHERE a.id = budget.agent_id), 'agent_id', budget.agent_id, 'task_id', budget.task_id, 'token_id', budget.token_id,
                'period', budget.period, 'limit', budget.limit_pico_usd, 'spent', spent,
                'reserved', budget.reserved_pico_usd, 'needed', amount
            )::text;
        END IF;
        IF budget.period <> 'call' THEN
            UPDATE budgets SET
                window_start = opened, spent_pico_usd = spent, reserved_pico_usd = reserved_pico_usd + amount
            WHERE id = budget.id;
            counted := counted || budget.id;
        END IF;
    END LOOP;
    IF counted <> '{}' THEN
        INSERT INTO reservations
            (id, organization_id, agent_id, root_id, token_id, amount_pico_usd, budgets, expires_at, spent_when_expired, created_at)
        VALUES (reservation, organization, agent, root, token, amount, counted, expires, spent_at_expiry, moment);
    END IF;
END
$$;

-- Ends a reservation and counts as spent what the call has cost. With `forget` nothing stays of it; otherwise it is kept, empty, until it
-- expires, so that a later report finds whose it was. Whose money it was is what the booking says.
CREATE FUNCTION budgets_settle(
    reservation uuid, organization uuid, agent uuid, root uuid, cost bigint, forget boolean, moment timestamptz
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    held reservations%ROWTYPE;
    -- What is no longer set aside, and what was counted as spent before.
    freed bigint;
    given_back bigint := 0;
BEGIN
    SELECT * INTO held FROM reservations r WHERE r.id = reservation AND r.organization_id = organization FOR UPDATE;
    IF held.id IS NULL AND cost = 0 THEN
        RETURN;
    END IF;
    freed := coalesce(held.amount_pico_usd, 0);
    IF held.expired_at IS NOT NULL THEN
        given_back := freed;
        freed := 0;
    END IF;
    -- All that `budgets_reserve` locks, in the same order, although nothing is kept of single calls: a commit may do both.
    PERFORM 1 FROM budgets b
    WHERE b.organization_id = organization
      AND (b.id = ANY (held.budgets) OR b.agent_id = agent OR b.task_id = root OR b.token_id = held.token_id
           OR (b.agent_id IS NULL AND b.task_id IS NULL AND b.token_id IS NULL))
    ORDER BY b.id
    FOR UPDATE;
    UPDATE budgets b SET
        window_start = greatest(b.window_start, budgets_window(b.period, moment)),
        reserved_pico_usd = b.reserved_pico_usd - CASE WHEN b.id = ANY (held.budgets) THEN freed ELSE 0 END,
        spent_pico_usd = greatest(0, least(
            CASE WHEN budgets_window(b.period, moment) > b.window_start THEN 0 ELSE b.spent_pico_usd END::numeric
            - CASE
                WHEN b.id = ANY (held.budgets) AND held.expired_at >= greatest(b.window_start, budgets_window(b.period, moment))
                THEN given_back
                ELSE 0
              END
            + CASE WHEN budgets_apply(b, agent, root, held.token_id) THEN cost ELSE 0 END,
            9223372036854775807))::bigint
    WHERE b.organization_id = organization AND b.period <> 'call'
      AND (b.id = ANY (held.budgets) OR b.agent_id = agent OR b.task_id = root OR b.token_id = held.token_id
           OR (b.agent_id IS NULL AND b.task_id IS NULL AND b.token_id IS NULL));
    IF forget THEN
        DELETE FROM reservations WHERE id = reservation;
    ELSE
        UPDATE reservations SET amount_pico_usd = 0 WHERE id = reservation;
    END IF;
END
$$;

-- Ends one reservation whose time is over. False when it was settled meanwhile.
CREATE FUNCTION budgets_expire(reservation uuid, moment timestamptz) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    held reservations%ROWTYPE;
    counted bigint;
BEGIN
    SELECT * INTO held FROM reservations r
    WHERE r.id = reservation AND r.expires_at <= moment AND r.expired_at IS NULL
    FOR UPDATE;
    IF held.id IS NULL THEN
        RETURN false;
    END IF;
    counted := CASE WHEN held.spent_when_expired THEN held.amount_pico_usd ELSE 0 END;
    PERFORM 1 FROM budgets b WHERE b.id = ANY (held.budgets) ORDER BY b.id FOR UPDATE;
    UPDATE budgets b SET
        window_start = greatest(b.window_start, budgets_window(b.period, moment)),
        reserved_pico_usd = b.reserved_pico_usd - held.amount_pico_usd,
        spent_pico_usd = least(
            CASE WHEN budgets_window(b.period, moment) > b.window_start THEN 0 ELSE b.spent_pico_usd END::numeric + counted,
            9223372036854775807)::bigint
    WHERE b.id = ANY (held.budgets);
    IF counted > 0 THEN
        UPDATE reservations SET expired_at = moment WHERE id = reservation;
    ELSE
        DELETE FROM reservations WHERE id = reservation;
    END IF;
    RETURN true;
END
$$;

-- Sums the ledger up for a budget. It is locked first and summed up in a statement of its own, which sees everything that was booked
-- before, and what is booked afterwards waits and adds itself.
CREATE FUNCTION budgets_count(budget uuid, moment timestamptz) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    b budgets%ROWTYPE;
    opened timestamptz;
    ledger numeric;
    unreported numeric;
BEGIN
    SELECT * INTO b FROM budgets WHERE id = budget FOR UPDATE;
    IF b.id IS NULL OR b.period = 'call' OR b.token_id IS NOT NULL THEN
        UPDATE budgets SET counted_at = moment WHERE id = budget;
        RETURN;
    END IF;
    opened := greatest(b.window_start, budgets_window(b.period, moment));
    SELECT coalesce(sum(u.cost_pico_usd), 0) INTO ledger FROM step_usage u
    WHERE u.organization_id = b.organization_id AND u.created_at >= opened
      AND (b.agent_id IS NULL OR u.agent_id = b.agent_id) AND (b.task_id IS NULL OR u.root_id = b.task_id);
    SELECT coalesce(sum(r.amount_pico_usd), 0) INTO unreported FROM reservations r
    WHERE b.id = ANY (r.budgets) AND r.expired_at >= opened;
    UPDATE budgets SET
        window_start = opened, spent_pico_usd = least(ledger + unreported, 9223372036854775807)::bigint, counted_at = moment
    WHERE id = budget;
END
$$;
