//! The usage of an attempt so far.

use std::sync::Arc;

use construct_domain::money::{Prices, Usage};

use crate::{
    answer::estimate_tokens,
    vendor::{Chunk, Request},
};

/// Follows the chunks of one attempt.
#[derive(Debug)]
pub(crate) struct Meter {
    request: Arc<Request>,
    /// What the model wrote.
    output_bytes: usize,
    reported: Option<Usage>,
    /// Whether the vendor has read the request, although no answer arrived.
    accepted: bool,
}

impl Meter {
    pub(crate) fn new(request: Arc<Request>) -> Self {
        Self { request, output_bytes: 0, reported: None, accepted: false }
    }

    /// The vendor has read the request.
    pub(crate) fn mark_accepted(&mut self) {
        self.accepted = true;
    }

    pub(crate) fn observe(&mut self, chunk: &Chunk) {
        match chunk {
            Chunk::Text(text) | Chunk::Thinking(text) => self.output_bytes += text.len(),
            Chunk::Arguments { json, .. } => self.output_bytes += json.len(),
            Chunk::Usage(usage) => self.reported = Some(*usage),
            // The model did not write opaque data.
            Chunk::ThinkingData(_)
            | Chunk::Call { .. }
            | Chunk::Stop(_)
            | Chunk::Named { .. }
            | Chunk::Vector(_) => {}
        }
    }

    /// The usage so far, with its cost.
    pub(crate) fn cost(&self, complete: bool, prices: &Prices) -> Usage {
        let usage = self.usage(complete);
        // A cost that the vendor reports takes precedence, because the vendor charges it.
        if usage.cost_pico_usd > 0 { usage } else { usage.with_cost(prices) }
    }

    /// The usage so far; its cost is only what the vendor reports. Usage that the vendor has not
    /// reported is estimated: an interrupted answer, or one of a server that counts nothing, is not
    /// free.
    pub(crate) fn usage(&self, complete: bool) -> Usage {
        reported_or_estimated(self.reported, self.output_bytes, complete, self.accepted, || {
            self.request.input_chars()
        })
    }
}

/// The usage of an answer of `bytes`: as `reported` by the vendor, and estimated otherwise.
/// `accepted`: the vendor has read the request, although no answer may have arrived. `input_chars`
/// returns the length of the request.
pub(crate) fn reported_or_estimated(
    reported: Option<Usage>,
    output_bytes: usize,
    complete: bool,
    accepted: bool,
    input_chars: impl FnOnce() -> usize,
) -> Usage {
    let estimated_output = estimate_tokens(output_bytes);
    match reported {
        Some(reported) if complete && reported.output_tokens > 0 => reported,
        Some(reported) => {
            Usage { output_tokens: reported.output_tokens.max(estimated_output), ..reported }
        }
        None if output_bytes == 0 && !complete && !accepted => Usage::default(),
        None => Usage {
            input_tokens: estimate_tokens(input_chars()),
            output_tokens: estimated_output,
            ..Usage::default()
        },
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use construct_domain::money::{LongContext, Rates};

    use super::*;

    /// The usage of these chunks.
    pub(crate) fn used(request: &Request, chunks: &[Chunk], complete: bool) -> Usage {
        let mut meter = Meter::new(Arc::new(request.clone()));
        chunks.iter().for_each(|chunk| meter.observe(chunk));
        meter.usage(complete)
    }

    #[test]
    fn attempts_are_priced_separately_unless_vendor_reports_cost() {
        let rates = Rates { input: 20, output: 200, ..Rates::default() };
        let long_context = Some(LongContext { above_input_tokens: 100, rates });
        let prices =
            Prices { input: 10, output: 100, request: 1, long_context, ..Prices::default() };
        let request = Arc::new(crate::answer::tests::request());
        let cost = |usage: Usage| {
            let mut meter = Meter::new(Arc::clone(&request));
            meter.observe(&Chunk::Usage(usage));
            meter.cost(true, &prices).cost_pico_usd
        };
        let short = Usage { input_tokens: 100, output_tokens: 1, ..Usage::default() };
        // Two attempts of a hundred tokens each are not one of two hundred.
        assert_eq!(cost(short) + cost(short), 2 * (100 * 10 + 100 + 1_000_000));
        assert_eq!(cost(short + short), 200 * 20 + 2 * 200 + 1_000_000);
        assert_eq!(cost(Usage { cost_pico_usd: 7, ..short }), 7);
        assert_eq!(
            Meter::new(request).cost(false, &prices).cost_pico_usd,
            0,
            "what was never answered"
        );
    }

    #[test]
    fn unreported_usage_is_estimated() {
        let request = crate::answer::tests::request();
        let used = |chunks: &[Chunk], complete| used(&request, chunks, complete);
        let text = Chunk::Text("x".repeat(400));
        let silent = used(std::slice::from_ref(&text), true);
        assert_eq!(silent.output_tokens, 100);
        assert!(silent.input_tokens > 0);
        assert!(used(&[], false).is_zero());
        let begun = Usage { input_tokens: 50, output_tokens: 1, ..Usage::default() };
        let cut = [Chunk::Usage(begun), text];
        assert_eq!(
            used(&cut, false),
            Usage { input_tokens: 50, output_tokens: 100, ..Usage::default() }
        );
        assert_eq!(used(&cut, true), begun);
    }
}
