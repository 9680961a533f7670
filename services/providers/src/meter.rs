//! What a try has used so far.

use std::sync::Arc;

use construct_domain::money::{Prices, Usage};

use crate::{
    answer::estimate_tokens,
    vendor::{Chunk, Request},
};

/// Counts along with the chunks of one try.
#[derive(Debug)]
pub(crate) struct Meter {
    request: Arc<Request>,
    /// What the model wrote.
    output_bytes: usize,
    reported: Option<Usage>,
    /// Whether the vendor has read the request, although nothing of its answer came.
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
            // Opaque data is not written by the model.
            Chunk::ThinkingData(_)
            | Chunk::Call { .. }
            | Chunk::Stop(_)
            | Chunk::Named { .. }
            | Chunk::Vector(_) => {}
        }
    }

    /// What was used so far, with what it costs.
    pub(crate) fn cost(&self, complete: bool, prices: &Prices) -> Usage {
        let usage = self.usage(complete);
        // What the vendor itself says holds, because that is what it charges.
        if usage.cost_pico_usd > 0 { usage } else { usage.with_cost(prices) }
    }

    /// What was used so far; of its cost only what the vendor says. Where the vendor has not said
    /// it, it is estimated: an answer that is cut off, or comes from a server that counts nothing,
    /// is not free.
    pub(crate) fn usage(&self, complete: bool) -> Usage {
        reported_or_estimated(self.reported, self.output_bytes, complete, self.accepted, || self.request.input_chars())
    }
}

/// What an answer of so many `bytes` used: what its vendor has `reported`, and an estimate where it
/// has not. `taken`: the vendor has read the request, although nothing of the answer may have come.
/// `input_chars` are those of the request.
pub(crate) fn reported_or_estimated(
    reported: Option<Usage>,
    output_bytes: usize,
    complete: bool,
    accepted: bool,
    input_chars: impl FnOnce() -> usize,
) -> Usage {
    let estimated_output = estimate_tokens(bytes);
    match reported {
        Some(reported) if complete && reported.output_tokens > 0 => reported,
        Some(reported) => {
            Usage { output_tokens: reported.output_tokens.max(estimated_output), ..reported }
        }
        None if bytes == 0 && !complete && !accepted => Usage::default(),
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

    /// What these chunks used.
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
        // Two tries of a hundred tokens each are not one of two hundred.
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
