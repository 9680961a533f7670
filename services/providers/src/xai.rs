//! xAI: OpenAI's Chat Completions in its own flavor, documented at <https://docs.x.ai/docs/api-reference>.

use serde_json::json;

use crate::openai::{Flavor, Thoughts};

pub(crate) const DEFAULT_BASE_URL: &str = "https://api.x.ai/v1";

/// Sampling by `top_k` is unknown, documents are not taken, and what the model shows of its thinking is not wanted
/// back.
pub(crate) const FLAVOR: Flavor = Flavor {
    limit: "max_completion_tokens",
    top_k: false,
    images: true,
    documents: false,
    schemas: true,
    thoughts: Thoughts::Never,
    breakpoints: |_| false,
    tells_cost: false,
    samples: |_| true,
    effort: |effort, _| json!({"reasoning_effort": effort.word()}),
    check: "/models",
};
