-- Subtasks: tasks that a script of another task has begun, and budgets that bound a part of a tree.

-- The task whose script has begun it, and all tasks above it, the root first. No foreign keys: who deletes a task deletes what is below it.
ALTER TABLE tasks ADD COLUMN parent_id uuid;
ALTER TABLE tasks ADD COLUMN ancestors uuid[] NOT NULL DEFAULT '{}';
-- When it came to rest, as long as its parent has not been looked at since. It stands here and not in the parent's row, because
-- whoever writes several tasks locks them from the root downwards, and a commit locks its own only.
ALTER TABLE tasks ADD COLUMN parent_due_at timestamptz;
CREATE INDEX tasks_parent_idx ON tasks (parent_id, created_at, id) WHERE parent_id IS NOT NULL;
CREATE INDEX tasks_tree_idx ON tasks (root_id) WHERE parent_id IS NOT NULL;
CREATE INDEX tasks_parent_due_idx ON tasks (parent_due_at) WHERE parent_due_at IS NOT NULL;

-- Whose money it was: the task and all above it, the root first. None: the root alone.
ALTER TABLE step_usage ADD COLUMN tree uuid[];
ALTER TABLE reservations ADD COLUMN tree uuid[];

-- The functions of migration 0012 for any task of a tree. Those stay for replicas of the version before, which know of roots only.

CREATE FUNCTION budgets_apply_tree(budgets, agent uuid, tree uuid[], token text) RETURNS boolean LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE
        WHEN $1.agent_id IS NOT NULL THEN $1.agent_id IS NOT DISTINCT FROM agent
        WHEN $1.task_id IS NOT NULL THEN coalesce($1.task_id = ANY (tree), false)
        WHEN $1.token_id IS NOT NULL THEN $1.token_id IS NOT DISTINCT FROM token
        ELSE true
    END
$$;

CREATE FUNCTION budgets_reserve_tree(
    reservation uuid, organization uuid, agent uuid, tree uuid[], token text, amount bigint,
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
          AND (b.agent_id = agent OR b.task_id = ANY (tree) OR b.token_id = token
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
            (id, organization_id, agent_id, root_id, tree, token_id, amount_pico_usd, budgets, expires_at, spent_when_expired, created_at)
        VALUES (reservation, organization, agent, tree[1], tree, token, amount, counted, expires, spent_at_expiry, moment);
    END IF;
END
$$;

CREATE FUNCTION budgets_settle_tree(
    reservation uuid, organization uuid, agent uuid, tree uuid[], cost bigint, forget boolean, moment timestamptz
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
    -- All that `budgets_reserve_tree` locks, in the same order, although nothing is kept of single calls: a commit may do both.
    PERFORM 1 FROM budgets b
    WHERE b.organization_id = organization
      AND (b.id = ANY (held.budgets) OR b.agent_id = agent OR b.task_id = ANY (tree) OR b.token_id = held.token_id
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
            + CASE WHEN budgets_apply_tree(b, agent, tree, held.token_id) THEN cost ELSE 0 END,
            9223372036854775807))::bigint
    WHERE b.organization_id = organization AND b.period <> 'call'
      AND (b.id = ANY (held.budgets) OR b.agent_id = agent OR b.task_id = ANY (tree) OR b.token_id = held.token_id
           OR (b.agent_id IS NULL AND b.task_id IS NULL AND b.token_id IS NULL));
    IF forget THEN
        DELETE FROM reservations WHERE id = reservation;
    ELSE
        UPDATE reservations SET amount_pico_usd = 0 WHERE id = reservation;
    END IF;
END
$$;

-- As before, but the ledger's rows are those of a task and what is below it.
CREATE OR REPLACE FUNCTION budgets_count(budget uuid, moment timestamptz) RETURNS void LANGUAGE plpgsql AS $$
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
      AND (b.agent_id IS NULL OR u.agent_id = b.agent_id)
      AND (b.task_id IS NULL OR (
          u.root_id = coalesce((SELECT t.root_id FROM tasks t WHERE t.id = b.task_id), b.task_id)
          AND (u.root_id = b.task_id OR b.task_id = ANY (u.tree))));
    SELECT coalesce(sum(r.amount_pico_usd), 0) INTO unreported FROM reservations r
    WHERE b.id = ANY (r.budgets) AND r.expired_at >= opened;
    UPDATE budgets SET
        window_start = opened, spent_pico_usd = least(ledger + unreported, 9223372036854775807)::bigint, counted_at = moment
    WHERE id = budget;
END
$$;
