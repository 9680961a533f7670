//! OpenRouter: OpenAI's Chat Completions in its own flavor, documented at
//! <https://openrouter.ai/docs/api-reference/chat-completion> and
//! <https://openrouter.ai/docs/use-cases/reasoning-tokens>; what is cached, at
//! <https://openrouter.ai/docs/guides/best-practices/prompt-caching>.

use serde_json::json;

use crate::openai::{self, Flavor, Thoughts};

pub(crate) const DEFAULT_BASE_URL: &str = "https://openrouter.ai/api/v1";

/// What the models behind it thought goes back as the list it came in, unchanged and in order.
pub(crate) const FLAVOR: Flavor = Flavor {
    limit: "max_tokens",
    top_k: true,
    images: true,
    documents: true,
    schemas: true,
    thoughts: Thoughts::Details,
    // Of the vendors behind it this one caches nothing by itself, and all of its models are called
    // alike.
    breakpoints: |model| model.contains("claude"),
    tells_cost: true,
    // OpenAI's models that think refuse it there as well.
    samples: |request| {
        !request.model.strip_prefix("openai/").is_some_and(openai::is_known_to_think)
    },
    effort: |effort, _| json!({"reasoning": {"effort": effort.word()}}),
    // Anybody may list the models.
    check: "/key",
};
