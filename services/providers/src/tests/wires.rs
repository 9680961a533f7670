//! The differences between the vendors' wire formats, as far as the tests need them.

use construct_domain::money::Usage;
use construct_proto::{mesh::v1::FailureClass, v1::ModelProviderType};
use construct_tests::vendor::{Reply, anthropic, bedrock, gemini, ollama, openai, responses};
use serde_json::json;

pub(crate) const KEY: &str = "sk-test-12345";

/// The thinking, the text and the script of the rich answer.
pub(crate) const THINKING_TEXT: &str = "I should look — 考.";
pub(crate) const ANSWER_TEXT: &str = "Let me see — 😀.";
pub(crate) const CODE: &str = "const n = read_file(\"a\\tb\").length;\nprint(`${n} ä😀`)";
/// The vendor's proof of thinking.
pub(crate) const PROOF: &str = "EqQBCgIYAhIMproofproofproof";

/// A vendor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wire {
    Anthropic,
    OpenAi,
    Responses,
    Gemini,
    Bedrock,
    Xai,
    DeepSeek,
    Ollama,
    OpenRouter,
}

impl Wire {
    pub(crate) const ALL: [Self; 9] = [
        Self::Anthropic,
        Self::OpenAi,
        Self::Responses,
        Self::Gemini,
        Self::Bedrock,
        Self::Xai,
        Self::DeepSeek,
        Self::Ollama,
        Self::OpenRouter,
    ];

    pub(crate) fn provider(self) -> ModelProviderType {
        match self {
            Self::Anthropic => ModelProviderType::Anthropic,
            Self::OpenAi => ModelProviderType::Openai,
            Self::Responses => ModelProviderType::OpenaiResponses,
            Self::Gemini => ModelProviderType::Gemini,
            Self::Bedrock => ModelProviderType::Bedrock,
            Self::Xai => ModelProviderType::Xai,
            Self::DeepSeek => ModelProviderType::Deepseek,
            Self::Ollama => ModelProviderType::Ollama,
            Self::OpenRouter => ModelProviderType::Openrouter,
        }
    }

    /// A text answer on the wire.
    pub(crate) fn answer(self, text: &str) -> Vec<u8> {
        match self {
            Self::Anthropic => anthropic::Answer::text(text).wire().into(),
            Self::OpenAi | Self::Xai | Self::DeepSeek | Self::OpenRouter => {
                openai::Answer::text(text).wire().into()
            }
            Self::Responses => responses::Answer::text(text).wire().into(),
            Self::Gemini => gemini::Answer::text(text).wire().into(),
            Self::Bedrock => bedrock::Answer::text(text).wire(),
            Self::Ollama => ollama::Answer::text(text).wire().into(),
        }
    }

    /// Two models, and where the vendor lists them, another one without text output.
    pub(crate) fn listing(self) -> serde_json::Value {
        match self {
            Self::Gemini => json!({"models": [
                {"name": "models/one", "inputTokenLimit": 10, "supportedGenerationMethods": ["generateContent"]},
                {"name": "models/embedding", "supportedGenerationMethods": ["embedContent"]},
                {"name": "models/two", "supportedGenerationMethods": ["generateContent"]}]}),
            Self::Bedrock => json!({"modelSummaries": [
                {"modelId": "one", "outputModalities": ["TEXT"]}, {"modelId": "image", "outputModalities": ["IMAGE"]},
                {"modelId": "two", "outputModalities": ["TEXT"]}]}),
            Self::Ollama => json!({"models": [{"name": "one"}, {"name": "two"}]}),
            Self::Anthropic
            | Self::OpenAi
            | Self::Responses
            | Self::Xai
            | Self::DeepSeek
            | Self::OpenRouter => {
                json!({"data": [{"id": "one"}, {"id": "two"}]})
            }
        }
    }

    /// The vendor's response to a token count, and its path; none where the vendor cannot count.
    pub(crate) fn count(self, tokens: u32) -> Option<(Reply, &'static str)> {
        match self {
            Self::Anthropic => Some((anthropic::count(tokens), "/v1/messages/count_tokens")),
            Self::Responses => Some((responses::count(tokens), "/responses/input_tokens")),
            Self::Gemini => Some((gemini::count(tokens), "/v1beta/models/test-model:countTokens")),
            Self::Bedrock => Some((bedrock::count(tokens), "/model/test-model/count-tokens")),
            Self::OpenAi | Self::Xai | Self::DeepSeek | Self::Ollama | Self::OpenRouter => None,
        }
    }

    /// Vectors on the wire, and the path of the request; none where the vendor has none.
    pub(crate) fn vectors(
        self,
        vectors: &[Vec<f32>],
        tokens: u32,
    ) -> Option<(Reply, &'static str)> {
        match self {
            Self::OpenAi | Self::Responses | Self::Xai | Self::DeepSeek | Self::OpenRouter => {
                Some((openai::vectors(vectors, tokens), "/embeddings"))
            }
            Self::Gemini => {
                Some((gemini::vectors(vectors), "/v1beta/models/test-model:batchEmbedContents"))
            }
            Self::Ollama => Some((ollama::vectors(vectors, tokens), "/api/embed")),
            Self::Anthropic | Self::Bedrock => None,
        }
    }

    /// Thinking, a text, a call and every kind of usage that the vendor counts, on the wire; and
    /// that usage.
    pub(crate) fn rich_answer(self) -> (Vec<u8>, Usage) {
        let usage = |cache_read_tokens, cache_write_tokens| Usage {
            input_tokens: 25,
            output_tokens: 90,
            cache_read_tokens,
            cache_write_tokens,
            ..Usage::default()
        };
        let chat = |thoughts: serde_json::Value| {
            let counted = json!({"prompt_tokens": 525, "completion_tokens": 90, "total_tokens": 615,
                "prompt_tokens_details": {"cached_tokens": 500}});
            let answer =
                openai::Answer::text(ANSWER_TEXT).thinking(thoughts).and_code("call_1", CODE);
            (answer.with_usage(Some(counted)).wire().into(), usage(500, 0))
        };
        match self {
            Self::Anthropic => {
                let answer = anthropic::Answer::empty()
                    .and_thinking(THINKING_TEXT, PROOF)
                    .and_text(ANSWER_TEXT);
                (
                    answer.and_code("call_1", CODE).with_usage(25, 500, 40, 90).wire().into(),
                    usage(500, 40),
                )
            }
            Self::OpenAi | Self::Xai | Self::DeepSeek => {
                chat(json!({"reasoning_content": THINKING_TEXT}))
            }
            Self::OpenRouter => chat(json!({"reasoning": THINKING_TEXT, "reasoning_details": [
                {"type": "reasoning.text", "text": THINKING_TEXT, "signature": PROOF, "format": "anthropic-claude-v1", "index": 0}]})),
            Self::Responses => {
                let answer = responses::Answer::empty()
                    .and_reasoning(THINKING_TEXT, PROOF)
                    .and_text(ANSWER_TEXT);
                (
                    answer.and_code("call_1", CODE).with_usage(525, 500, 90).wire().into(),
                    usage(500, 0),
                )
            }
            Self::Gemini => {
                let answer =
                    gemini::Answer::empty().and_thought(THINKING_TEXT).and_text(ANSWER_TEXT);
                (
                    answer
                        .and_code("call_1", CODE, PROOF)
                        .with_usage(525, 500, 30, 60)
                        .wire()
                        .into(),
                    Usage { thinking_tokens: 60, ..usage(500, 0) },
                )
            }
            Self::Bedrock => {
                let answer = bedrock::Answer::empty()
                    .and_reasoning(THINKING_TEXT, PROOF)
                    .and_text(ANSWER_TEXT);
                (answer.and_code("call_1", CODE).with_usage(25, 500, 40, 90).wire(), usage(500, 40))
            }
            Self::Ollama => {
                let answer = ollama::Answer::text("")
                    .and_thinking(THINKING_TEXT)
                    .and_text(ANSWER_TEXT)
                    .and_code(CODE);
                (answer.with_usage(25, 90).wire().into(), usage(0, 0))
            }
        }
    }

    /// `stream` with the vendor's content type.
    pub(crate) fn reply(self, stream: &[u8]) -> Reply {
        let label = match self {
            Self::Bedrock => bedrock::CONTENT_TYPE,
            Self::Ollama => ollama::CONTENT_TYPE,
            _ => "text/event-stream",
        };
        Reply::bytes(label, stream.to_vec())
    }

    /// The position in the stream of an answer from which it is complete: before, it was truncated.
    pub(crate) fn whole_from(self, stream: &[u8]) -> usize {
        let mark = match self {
            Self::Anthropic => "stop_reason\":\"end_turn",
            Self::OpenAi | Self::Xai | Self::DeepSeek | Self::OpenRouter => {
                "finish_reason\":\"stop"
            }
            Self::Responses => "event: response.completed",
            Self::Gemini => "finishReason",
            Self::Bedrock => "stopReason",
            Self::Ollama => "done\":true",
        };
        stream.windows(mark.len()).position(|window| window == mark.as_bytes()).expect("an end")
    }

    /// An error of `class` in the vendor's words.
    pub(crate) fn error(self, status: u16, class: FailureClass) -> Reply {
        self.error_saying(status, self.error_message(class))
    }

    fn error_message(self, class: FailureClass) -> &'static str {
        match (class, self) {
            (FailureClass::ContextTooLong, Self::Xai) => {
                "This model's maximum prompt length is 131072 but the request contains 205000 tokens."
            }
            (FailureClass::ContextTooLong, Self::OpenAi | Self::Responses | Self::DeepSeek) => {
                "This model's maximum context length is 131072 tokens. However, your messages resulted in 205000 tokens."
            }
            (FailureClass::ContextTooLong, Self::OpenRouter) => {
                "This endpoint's maximum context length is 131072 tokens. However, you requested about 205000 tokens."
            }
            (FailureClass::ContextTooLong, _) => {
                "prompt is too long: 205000 tokens > 200000 maximum"
            }
            (FailureClass::ContentRefused, Self::OpenAi | Self::Responses) => {
                "Invalid prompt: your prompt was flagged as potentially violating our usage policy."
            }
            (FailureClass::ContentRefused, Self::Xai) => "Content violates usage guidelines.",
            (FailureClass::ContentRefused, Self::DeepSeek) => "Content Exists Risk",
            (FailureClass::ContentRefused, Self::OpenRouter) => {
                "openai/gpt-5.5 requires moderation on OpenAI. Your input was flagged for \"violence\"."
            }
            (FailureClass::ContentRefused, _) => {
                "Output blocked by content filtering policy / violates our content policy"
            }
            _ => "something is wrong",
        }
    }

    /// The status of refused content.
    pub(crate) fn status_of_refused(self) -> u16 {
        if matches!(self, Self::Xai | Self::OpenRouter) { 403 } else { 400 }
    }

    /// An error with this message.
    pub(crate) fn error_saying(self, status: u16, message: &str) -> Reply {
        let by_status = |names: [&'static str; 8]| match status {
            401 => names[0],
            403 => names[1],
            404 => names[2],
            413 => names[3],
            429 => names[4],
            500 => names[5],
            529 => names[6],
            _ => names[7],
        };
        let anthropic = by_status([
            "authentication_error",
            "permission_error",
            "not_found_error",
            "request_too_large",
            "rate_limit_error",
            "api_error",
            "overloaded_error",
            "invalid_request_error",
        ]);
        match self {
            Self::Anthropic => anthropic::error(status, anthropic, message),
            // Code and type: <https://platform.openai.com/docs/guides/error-codes>.
            Self::OpenAi | Self::Responses => {
                let kind = by_status([
                    "invalid_request_error",
                    "request_forbidden",
                    "invalid_request_error",
                    "invalid_request_error",
                    "requests",
                    "server_error",
                    "service_unavailable_error",
                    "invalid_request_error",
                ]);
                let code = by_status([
                    "invalid_api_key",
                    "unsupported_country_region_territory",
                    "model_not_found",
                    "",
                    "rate_limit_exceeded",
                    "",
                    "server_is_overloaded",
                    "",
                ]);
                openai::error(status, code, kind, message)
            }
            // The same code for every error:
            // <https://api-docs.deepseek.com/quick_start/error_codes>.
            Self::DeepSeek => {
                let kind = match status {
                    401 => "authentication_error",
                    400 => "invalid_request_error",
                    529 => "service_unavailable_error",
                    _ => "unknown_error",
                };
                openai::error(status, "invalid_request_error", kind, message)
            }
            // A sentence as the code, and a text as the error:
            // <https://docs.x.ai/docs/key-information/debugging>.
            Self::Xai => {
                let code = by_status([
                    "The request does not have valid authentication credentials",
                    "The caller does not have permission to execute the specified operation",
                    "Some requested entity was not found",
                    "Client specified an invalid argument",
                    "Some resource has been exhausted",
                    "Internal error",
                    "The service is currently unavailable",
                    "Client specified an invalid argument",
                ]);
                Reply::json(status, &json!({"code": code, "error": message}))
            }
            // The status as the code: <https://openrouter.ai/docs/api-reference/errors>.
            Self::OpenRouter => Reply::json(
                status,
                &json!({"error": {"code": status, "message": message, "metadata": {"provider_name": "OpenAI"}},
                    "user_id": "user_1"}),
            ),
            Self::Gemini => {
                let name = by_status([
                    "UNAUTHENTICATED",
                    "PERMISSION_DENIED",
                    "NOT_FOUND",
                    "",
                    "RESOURCE_EXHAUSTED",
                    "INTERNAL",
                    "UNAVAILABLE",
                    "INVALID_ARGUMENT",
                ]);
                gemini::error(status, name, message, &[])
            }
            Self::Bedrock => {
                let name = by_status([
                    "UnrecognizedClientException",
                    "AccessDeniedException",
                    "ResourceNotFoundException",
                    "ValidationException",
                    "ThrottlingException",
                    "InternalServerException",
                    "ServiceUnavailableException",
                    "ValidationException",
                ]);
                bedrock::refusal(status, name, message)
            }
            Self::Ollama => Reply::json(status, &ollama::error_body(message)),
        }
    }

    /// Whether thinking is sent back to the vendor with the call it led to, and in which form.
    pub(crate) fn thought_sent_back(self) -> Option<&'static str> {
        match self {
            Self::Anthropic | Self::Responses | Self::Gemini | Self::Bedrock | Self::OpenRouter => {
                Some(PROOF)
            }
            Self::OpenAi | Self::DeepSeek | Self::Ollama => Some(THINKING_TEXT),
            Self::Xai => None,
        }
    }

    pub(crate) fn takes_images(self) -> bool {
        self != Self::DeepSeek
    }

    pub(crate) fn takes_documents(self) -> bool {
        matches!(
            self,
            Self::Anthropic | Self::Responses | Self::Gemini | Self::Bedrock | Self::OpenRouter
        )
    }
}
