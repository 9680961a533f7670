-- Conversations that are longer than a model can see: what is known of their length, and what is shown in the place of their older part.

-- How many tokens a thousand of the estimate are, learned from what vendors count; see `domain::context`.
ALTER TABLE tasks ADD COLUMN context_scale integer NOT NULL DEFAULT 500;
-- Tokens that the next call needs, as it was last decided.
ALTER TABLE tasks ADD COLUMN context_tokens bigint NOT NULL DEFAULT 0;
-- Up to which place the transcript is shown as the text of a compaction; 0: it is shown whole. `transcript_tokens` is of what is shown.
ALTER TABLE tasks ADD COLUMN compacted_through bigint NOT NULL DEFAULT 0;
-- From which share of its model's room on conversations are compacted.
ALTER TABLE agents ADD COLUMN compact_at_percent integer NOT NULL DEFAULT 80
    CONSTRAINT agents_compact_at_check CHECK (compact_at_percent BETWEEN 1 AND 100);

-- What is shown instead of the messages up to a place, which stay as they are. The one with the greatest place holds; those before are
-- shown again when a rewind removes it.
CREATE TABLE compactions (
    task_id uuid NOT NULL,
    organization_id uuid NOT NULL,
    through bigint NOT NULL,
    -- Places up to there that are shown all the same.
    kept bigint[] NOT NULL,
    content text NOT NULL,
    estimated_tokens bigint NOT NULL,
    -- Of what is not shown any more.
    replaced_tokens bigint NOT NULL,
    -- Whether a model wrote it; else it only says that something was left out.
    summary boolean NOT NULL,
    created_at timestamptz NOT NULL,
    CONSTRAINT compactions_pkey PRIMARY KEY (task_id, through),
    CONSTRAINT compactions_task_fkey FOREIGN KEY (organization_id, task_id) REFERENCES tasks (organization_id, id) ON DELETE CASCADE,
    CONSTRAINT compactions_smaller_check CHECK (estimated_tokens < replaced_tokens)
);

-- The estimate of what is shown of a transcript before a place.
CREATE FUNCTION transcript_size(task uuid, below bigint) RETURNS bigint LANGUAGE sql STABLE AS $$
    SELECT coalesce(max(c.estimated_tokens), 0) + coalesce(sum(m.estimated_tokens), 0)::bigint
    FROM (VALUES (task)) AS one (id)
    LEFT JOIN LATERAL (
        SELECT k.* FROM compactions k WHERE k.task_id = one.id AND k.through < below ORDER BY k.through DESC LIMIT 1
    ) c ON true
    LEFT JOIN messages m ON m.task_id = one.id AND m.position < below AND m.superseded_at IS NULL
        AND (c.through IS NULL OR m.position > c.through OR m.position = ANY (c.kept))
$$;
