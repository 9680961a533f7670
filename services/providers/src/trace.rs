//! What a trace shows of the calls of vendors, in the words of OpenTelemetry's conventions for generative AI. Each try is a span of its own;
//! what was asked and answered is in none.

use construct_domain::money::Usage;
use tracing::{Span, field::Empty};

use crate::{
    metrics::{End, Labels},
    router::Target,
    vendor::Request,
};

/// A call that is made now, as a child of the current span. It lasts until the span is dropped.
pub(crate) fn begun(target: &Target, request: &Request) -> Span {
    let (operation, vendor) = Labels::words(target, request);
    let model = target.model.vendor_model.as_str();
    tracing::info_span!(
        "providers.vendor.call",
        otel.kind = "client",
        otel.name = format_args!("{operation} {model}"),
        otel.status_code = Empty,
        gen_ai.operation.name = operation,
        gen_ai.provider.name = vendor,
        gen_ai.request.model = model,
        gen_ai.request.max_tokens = request.max_tokens,
        gen_ai.usage.input_tokens = Empty,
        gen_ai.usage.output_tokens = Empty,
        error.r#type = Empty,
    )
}

/// It has ended, and has used this.
pub(crate) fn ended(span: &Span, end: End, usage: &Usage) {
    // The conventions count what came out of the vendor's cache or went into it as input.
    let cached = usage.cache_read_tokens.saturating_add(usage.cache_write_tokens);
    span.record("gen_ai.usage.input_tokens", usage.input_tokens.saturating_add(cached));
    span.record("gen_ai.usage.output_tokens", usage.output_tokens);
    if let Some(word) = end.word() {
        span.record("error.type", word);
        span.record("otel.status_code", "ERROR");
    }
}
