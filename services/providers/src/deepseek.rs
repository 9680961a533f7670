//! DeepSeek: OpenAI's Chat Completions with its own flavor, documented at
//! <https://api-docs.deepseek.com/api/create-chat-completion> and
//! <https://api-docs.deepseek.com/guides/thinking_mode>.

use serde_json::json;

use crate::{
    openai::{Flavor, ThinkingReplay},
    vendor::Effort,
};

pub(crate) const DEFAULT_BASE_URL: &str = "https://api.deepseek.com";

/// Thinking that led to a call must come back with it as `reasoning_content`, which must be present
/// even if empty: otherwise the vendor rejects the conversation. Other thinking is ignored, and so
/// omitted. The supported formats are `text` and `json_object`; the latter is rejected unless the
/// prompt contains the word JSON.
pub(crate) const FLAVOR: Flavor = Flavor {
    max_tokens_field: "max_tokens",
    top_k: false,
    images: false,
    documents: false,
    json_schemas: false,
    thinking_replay: ThinkingReplay::WithEveryCall,
    needs_breakpoints: |_| false,
    reports_cost: false,
    allows_sampling: |_| true,
    effort: |effort, _| match effort {
        Effort::Off => json!({"thinking": {"type": "disabled"}}),
        effort => json!({"thinking": {"type": "enabled"}, "reasoning_effort": effort.name()}),
    },
    check_path: "/models",
};
