//! xAI: OpenAI's Chat Completions with its own flavor, documented at
//! <https://docs.x.ai/docs/api-reference> and
//! <https://docs.x.ai/developers/model-capabilities/text/reasoning>.

use serde_json::{Value, json};

use crate::{
    openai::{Flavor, ThinkingReplay},
    vendor::Effort,
};

pub(crate) const DEFAULT_BASE_URL: &str = "https://api.x.ai/v1";

/// The names of the efforts, from off to high.
type EffortNames = [&'static str; 4];

/// For models that always think.
const ALWAYS_THINKING: EffortNames = ["low", "low", "medium", "high"];

/// The effort names by the prefix of a model's name; the first match counts. None for models that
/// reject the parameter with 400, which most reasoning models do. Unknown models count as newer
/// ones, which all accept it.
const MODEL_EFFORTS: [(&str, Option<EffortNames>); 9] = [
    ("grok-4.3", Some(["none", "low", "medium", "high"])),
    // The effort is the number of agents.
    ("grok-4.20-multi-agent", Some(ALWAYS_THINKING)),
    ("grok-4.20", None),
    ("grok-4.", Some(ALWAYS_THINKING)),
    ("grok-4", None),
    ("grok-3-mini", Some(["low", "low", "low", "high"])),
    ("grok-3", None),
    ("grok-2", None),
    ("grok-code", None),
];

/// `top_k` and documents are not supported, and the vendor wants no thinking back.
pub(crate) const FLAVOR: Flavor = Flavor {
    max_tokens_field: "max_completion_tokens",
    top_k: false,
    images: true,
    documents: false,
    json_schemas: true,
    thinking_replay: ThinkingReplay::Never,
    needs_breakpoints: |_| false,
    reports_cost: false,
    allows_sampling: |_| true,
    effort,
    check_path: "/models",
};

fn effort(effort: Effort, model: &str) -> Value {
    let known = MODEL_EFFORTS.iter().find(|(name, _)| model.starts_with(name));
    let Some([off, low, medium, high]) = known.map_or(Some(ALWAYS_THINKING), |(_, words)| *words)
    else {
        return json!({});
    };
    let word = match effort {
        Effort::Off => off,
        Effort::Low => low,
        Effort::Medium => medium,
        Effort::High => high,
    };
    json!({"reasoning_effort": word})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn effort_is_sent_only_to_models_that_accept_it() {
        let told = |model| {
            [Effort::Off, Effort::Low, Effort::Medium, Effort::High]
                .map(|wanted| effort(wanted, model)["reasoning_effort"].as_str().map(str::to_owned))
        };
        let words = |words: EffortNames| words.map(|word| Some(word.to_owned()));
        assert_eq!(told("grok-4.3"), words(["none", "low", "medium", "high"]));
        assert_eq!(told("grok-3-mini"), words(["low", "low", "low", "high"]));
        for model in ["grok-4.5", "grok-4.6-latest", "grok-4.20-multi-agent-0309", "grok-5"] {
            assert_eq!(told(model), words(ALWAYS_THINKING), "{model}");
        }
        for model in [
            "grok-4",
            "grok-4-0709",
            "grok-4-1-fast-reasoning",
            "grok-4-1-fast-non-reasoning",
            "grok-4.20",
            "grok-4.20-0309-reasoning",
            "grok-3",
            "grok-code-fast-1",
        ] {
            assert_eq!(told(model), [None, None, None, None], "{model}");
            assert_eq!(effort(Effort::High, model), json!({}));
        }
    }
}
