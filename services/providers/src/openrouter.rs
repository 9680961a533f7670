//! OpenRouter: OpenAI's Chat Completions with its own flavor, documented at
//! <https://openrouter.ai/docs/api-reference/chat-completion> and
//! <https://openrouter.ai/docs/use-cases/reasoning-tokens>. Caching is documented at
//! <https://openrouter.ai/docs/guides/best-practices/prompt-caching>.

use serde_json::json;

use crate::openai::{self, Flavor, ThinkingReplay};

pub(crate) const DEFAULT_BASE_URL: &str = "https://openrouter.ai/api/v1";

/// Thinking is sent back as the list in which it came, unchanged and in order.
pub(crate) const FLAVOR: Flavor = Flavor {
    max_tokens_field: "max_tokens",
    top_k: true,
    images: true,
    documents: true,
    json_schemas: true,
    thinking_replay: ThinkingReplay::Details,
    // Of the vendors behind it, this one needs breakpoints to cache, and all of its model names
    // contain the word.
    needs_breakpoints: |model| model.contains("claude"),
    reports_cost: true,
    // OpenAI's reasoning models reject it there as well.
    allows_sampling: |request| {
        !request.model.strip_prefix("openai/").is_some_and(openai::is_reasoning_model)
    },
    effort: |effort, _| json!({"reasoning": {"effort": effort.name()}}),
    // The model list needs no key.
    check_path: "/key",
};
