//! OpenRouter: OpenAI's Chat Completions in its own flavor, documented at
//! <https://openrouter.ai/docs/api-reference/chat-completion> and
//! <https://openrouter.ai/docs/use-cases/reasoning-tokens>; what is cached, at
//! <https://openrouter.ai/docs/guides/best-practices/prompt-caching>.

use serde_json::json;

use crate::openai::{self, Flavor, ThinkingReplay};

pub(crate) const DEFAULT_BASE_URL: &str = "https://openrouter.ai/api/v1";

/// What the models behind it thought goes back as the list it came in, unchanged and in order.
pub(crate) const FLAVOR: Flavor = Flavor {
    max_tokens_field: "max_tokens",
    top_k: true,
    images: true,
    documents: true,
    json_schemas: true,
    thinking_replay: ThinkingReplay::Details,
    // Of the vendors behind it this one caches nothing by itself, and all of its models are called
    // alike.
    needs_breakpoints: |model| model.contains("claude"),
    reports_cost: true,
    // OpenAI's models that think refuse it there as well.
    allows_sampling: |request| {
        !request.model.strip_prefix("openai/").is_some_and(openai::is_reasoning_model)
    },
    effort: |effort, _| json!({"reasoning": {"effort": effort.name()}}),
    // Anybody may list the models.
    check_path: "/key",
};
