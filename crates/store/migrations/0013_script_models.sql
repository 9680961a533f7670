-- The models that an agent's scripts may call beside the agent's own.

CREATE TABLE agent_script_models (
    organization_id uuid NOT NULL,
    agent_id uuid NOT NULL,
    model_id uuid NOT NULL,
    -- As they were listed.
    position integer NOT NULL,
    CONSTRAINT agent_script_models_pkey PRIMARY KEY (agent_id, model_id),
    CONSTRAINT agent_script_models_agent_fkey FOREIGN KEY (organization_id, agent_id) REFERENCES agents (organization_id, id) ON DELETE CASCADE,
    CONSTRAINT agent_script_models_model_fkey FOREIGN KEY (organization_id, model_id) REFERENCES models (organization_id, id)
);

-- For the foreign key, when a model is deleted.
CREATE INDEX agent_script_models_model_idx ON agent_script_models (organization_id, model_id);
