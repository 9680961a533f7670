-- The tiers of the gateways' configuration, as the one has them that started last. They stand here for who makes the runs of schedules
-- (docs/adr/0033-quotas.md).
CREATE TABLE tiers (
    name text NOT NULL,
    -- {"tasks_per_day": 100}; what is not there is not limited.
    limits jsonb NOT NULL,
    -- That of organisations of which nothing else is said, but for the operator's.
    is_default boolean NOT NULL,
    CONSTRAINT tiers_pkey PRIMARY KEY (name)
);
