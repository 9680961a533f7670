-- Who did what (docs/adr/0032-audit.md). The gateway writes; nothing is changed afterwards, and nothing removed but what is old.

CREATE TABLE audit_entries (
    id uuid NOT NULL,
    -- Whose trail it is in. What strangers do is in the operator's. Nothing here refers to other tables: an entry outlives what it names.
    organization_id uuid NOT NULL,
    -- None: nobody knows who it was.
    user_id uuid,
    api_key_id uuid,
    -- Empty: several, of calls that were only counted.
    method text NOT NULL,
    face text NOT NULL,
    peer text NOT NULL,
    user_agent text NOT NULL,
    objects text[] NOT NULL,
    -- gRPC's.
    code smallint NOT NULL,
    -- How many calls it stands for.
    count bigint NOT NULL,
    request_id text NOT NULL,
    trace_id text NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT audit_entries_pkey PRIMARY KEY (id),
    CONSTRAINT audit_entries_code_check CHECK (code BETWEEN 0 AND 16),
    CONSTRAINT audit_entries_count_check CHECK (count > 0)
);

CREATE INDEX audit_entries_organization_idx ON audit_entries (organization_id, created_at, id);
-- For what is old. Appending on the right of an index costs a write little; ranges (BRIN) would not get narrower again where freed pages are used.
CREATE INDEX audit_entries_time_idx ON audit_entries (created_at);

-- Whoever may append and no more, can do no more. What is old is removed by the function below, and whatever is asked for, what is younger than
-- 30 days stays.
CREATE FUNCTION audit_entries_keep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF current_setting('construct.audit_expire', true) = 'on' AND OLD.created_at < now() - interval '30 days' THEN
            RETURN OLD;
        END IF;
    END IF;
    RAISE EXCEPTION 'entries of the audit trail are neither changed nor removed' USING ERRCODE = 'insufficient_privilege';
END
$$;

CREATE TRIGGER audit_entries_keep BEFORE UPDATE OR DELETE ON audit_entries
    FOR EACH ROW EXECUTE FUNCTION audit_entries_keep();
CREATE TRIGGER audit_entries_keep_all BEFORE TRUNCATE ON audit_entries
    FOR EACH STATEMENT EXECUTE FUNCTION audit_entries_keep();

-- Removes entries of before a time, a limited number at once. Gives how many.
CREATE FUNCTION audit_entries_expire(before timestamptz, at_once bigint) RETURNS bigint LANGUAGE plpgsql
    -- As the owner, so that whoever calls it needs no right to remove anything.
    -- Temporary tables of the caller are looked at last, and so never.
    SECURITY DEFINER SET search_path = pg_catalog, public, pg_temp SET construct.audit_expire = 'on' AS $$
DECLARE
    removed bigint;
BEGIN
    DELETE FROM audit_entries WHERE id IN (SELECT id FROM audit_entries WHERE created_at < before ORDER BY created_at LIMIT at_once);
    GET DIAGNOSTICS removed = ROW_COUNT;
    RETURN removed;
END
$$;
