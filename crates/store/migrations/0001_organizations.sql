-- Tenants. Every other table carries an organisation id, and references between tenants' rows are made of
-- (organization_id, id), so that the database itself refuses a reference from one tenant into another.
--
-- Rules of all tables: ids are UUIDs (version 7, made by the services); times are given by the services, none comes from
-- now(), so that one clock decides; sets of words are text with a CHECK, because PostgreSQL's enums cannot lose a value.
CREATE TABLE organizations (
    id uuid NOT NULL,
    name text NOT NULL,
    -- The newest event of the organisation's own stream (agents, models, providers). Counted here and not by a
    -- SEQUENCE, because a sequence leaves gaps and lets a later number become visible before an earlier one.
    event_sequence bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL,
    CONSTRAINT organizations_pkey PRIMARY KEY (id)
);

-- The organisation of an installation without log-in; its id is `OrganizationId::LOCAL`.
INSERT INTO organizations (id, name, created_at)
VALUES ('00000000-0000-7000-8000-000000000001', 'local', '2026-01-01T00:00:00Z');
