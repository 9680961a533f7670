//! Spans of vendor calls, with the attributes of OpenTelemetry's semantic conventions for
//! generative AI. Each attempt is a span. No span contains the text of requests or answers.

use std::time::Duration;

use construct_domain::money::Usage;
use construct_proto::mesh::v1::model_completed::StopReason;
use opentelemetry::{Array, StringValue, Value};
use reqwest::Url;
use tracing::{Span, field::Empty};
use tracing_opentelemetry::OpenTelemetrySpanExt as _;

use crate::{
    metrics::{Labels, VendorCallEnd},
    router::Target,
    vendor::{self, Chunk, Format, Request},
};

/// A call in flight, as a child of the current span. The span ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Trace {
    span: Span,
    stop: Option<StopReason>,
    calls: bool,
}

impl Trace {
    pub(crate) fn start(target: &Target, request: &Request) -> Self {
        let (operation, vendor) = Labels::operation_and_vendor(target, request);
        let model = target.model.vendor_model.as_str();
        let url = Url::parse(vendor::base_url(&target.provider)).ok();
        let parameters = &request.parameters;
        let answers = request.embed.is_none();
        let span = tracing::info_span!(
            "providers.vendor.call",
            otel.kind = "client",
            otel.name = format_args!("{operation} {model}"),
            otel.status_code = Empty,
            gen_ai.operation.name = operation,
            gen_ai.provider.name = vendor,
            gen_ai.conversation.id = Some(request.task_id.as_str()).filter(|task| !task.is_empty()),
            gen_ai.output.r#type = answers.then(|| output_type(&request.format)),
            gen_ai.request.model = model,
            gen_ai.request.stream = answers.then_some(true),
            gen_ai.request.max_tokens = answers.then_some(request.max_tokens),
            gen_ai.request.temperature = parameters.temperature,
            gen_ai.request.top_p = parameters.top_p,
            gen_ai.request.top_k = parameters.top_k.map(f64::from),
            gen_ai.response.id = Empty,
            gen_ai.response.model = Empty,
            gen_ai.response.time_to_first_chunk = Empty,
            gen_ai.usage.input_tokens = Empty,
            gen_ai.usage.output_tokens = Empty,
            gen_ai.usage.cache_read.input_tokens = Empty,
            gen_ai.usage.cache_creation.input_tokens = Empty,
            gen_ai.usage.reasoning.output_tokens = Empty,
            server.address = url.as_ref().and_then(Url::host_str),
            server.port = url.as_ref().and_then(Url::port_or_known_default),
            error.r#type = Empty,
        );
        Self { span, stop: None, calls: false }
    }

    pub(crate) fn observe(&mut self, chunk: &Chunk) {
        match chunk {
            Chunk::Named { id, model } => {
                for (name, value) in [("gen_ai.response.id", id), ("gen_ai.response.model", model)]
                {
                    if !value.is_empty() {
                        self.span.record(name, value);
                    }
                }
            }
            Chunk::Call { .. } => self.calls = true,
            Chunk::Stop(reason) => self.stop = Some(*reason),
            Chunk::Text(_)
            | Chunk::Thinking(_)
            | Chunk::ThinkingData(_)
            | Chunk::Arguments { .. }
            | Chunk::Usage(_)
            | Chunk::Vector(_) => {}
        }
    }

    /// The answer has begun.
    pub(crate) fn record_first_chunk(&self, after: Duration) {
        self.span.record("gen_ai.response.time_to_first_chunk", after.as_secs_f64());
    }

    /// The call has ended with this usage.
    pub(crate) fn end(&self, end: VendorCallEnd, usage: &Usage) {
        let span = &self.span;
        // The semantic conventions count tokens read from or written to the vendor's cache as
        // input.
        let cached = usage.cache_read_tokens.saturating_add(usage.cache_write_tokens);
        span.record("gen_ai.usage.input_tokens", usage.input_tokens.saturating_add(cached));
        span.record("gen_ai.usage.output_tokens", usage.output_tokens);
        for (name, tokens) in [
            ("gen_ai.usage.cache_read.input_tokens", usage.cache_read_tokens),
            ("gen_ai.usage.cache_creation.input_tokens", usage.cache_write_tokens),
            ("gen_ai.usage.reasoning.output_tokens", usage.thinking_tokens),
        ] {
            if tokens > 0 {
                span.record(name, tokens);
            }
        }
        if let Some(stop) = self.stop {
            // A list, for which the spans of `tracing` have no type.
            let reasons = Array::String(vec![StringValue::from(finish_reason(stop, self.calls))]);
            span.set_attribute("gen_ai.response.finish_reasons", Value::Array(reasons));
        }
        if let Some(word) = end.error_type() {
            span.record("error.type", word);
            span.record("otel.status_code", "ERROR");
        }
    }
}

const fn output_type(format: &Format) -> &'static str {
    match format {
        Format::Text => "text",
        Format::Json | Format::Schema { .. } => "json",
    }
}

/// The finish reason of the semantic conventions, which is the same for all vendors. Some servers
/// report a normal end after calls.
const fn finish_reason(stop: StopReason, calls: bool) -> &'static str {
    match stop {
        StopReason::MaxTokens => "length",
        StopReason::Refused => "content_filter",
        StopReason::ToolUse => "tool_call",
        StopReason::EndTurn | StopReason::Unspecified if calls => "tool_call",
        StopReason::EndTurn | StopReason::StopSequence | StopReason::Unspecified => "stop",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stop_reasons_map_to_semantic_convention_values() {
        for (stop, calls, word) in [
            (StopReason::EndTurn, false, "stop"),
            (StopReason::EndTurn, true, "tool_call"),
            (StopReason::ToolUse, true, "tool_call"),
            (StopReason::MaxTokens, true, "length"),
            (StopReason::StopSequence, false, "stop"),
            (StopReason::Refused, false, "content_filter"),
        ] {
            assert_eq!(finish_reason(stop, calls), word, "{stop:?} {calls}");
        }
    }
}
