-- Embedding models from files.

ALTER TABLE model_providers DROP CONSTRAINT model_providers_kind_check;
ALTER TABLE model_providers ADD CONSTRAINT model_providers_kind_check CHECK (
    kind IN (
        'anthropic', 'openai', 'scripted', 'openai_responses', 'gemini', 'bedrock', 'xai', 'deepseek', 'ollama', 'openrouter',
        'local'
    )
);
