-- Further vendors, and models that cannot call tools.

ALTER TABLE model_providers DROP CONSTRAINT model_providers_kind_check;
ALTER TABLE model_providers ADD CONSTRAINT model_providers_kind_check CHECK (
    kind IN (
        'anthropic', 'openai', 'scripted', 'openai_responses', 'gemini', 'bedrock', 'xai', 'deepseek', 'ollama', 'openrouter'
    )
);

ALTER TABLE models ADD COLUMN tool_calling boolean NOT NULL DEFAULT true;
