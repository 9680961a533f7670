//! Tokens and their exact cost.
//!
//! Prices are integers: micro-dollars per million tokens. So one token costs an integer number of
//! pico-dollars (10⁻¹² US dollars), and the cost of a call is the sum of its parts without
//! rounding.

mod estimate;
#[cfg(test)]
mod tests;

use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

pub use estimate::{Target, max_cost, tokens_of_bytes, tokens_of_content};

/// Pico-dollars per micro-dollar.
pub const PICO_PER_MICRO: i64 = 1_000_000;

/// Prices of a model in micro US dollars per million tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Prices {
    /// Uncached input tokens.
    pub input: i64,
    /// Output tokens.
    pub output: i64,
    /// Tokens read from the vendor's cache; 0: as `input`.
    pub cache_read: i64,
    /// Tokens written to the vendor's cache; 0: as `input`.
    pub cache_write: i64,
    /// Reasoning tokens; 0: as `output`.
    pub thinking: i64,
    /// Price of each call that used anything, in micro-dollars.
    pub request: i64,
    /// Prices for calls with a long input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_context: Option<LongContext>,
}

/// Prices of tokens in micro US dollars per million. The fields are those of [`Prices`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[expect(missing_docs, reason = "they are those of `Prices`")]
pub struct Rates {
    pub input: i64,
    pub output: i64,
    pub cache_read: i64,
    pub cache_write: i64,
    pub thinking: i64,
}

/// Prices of all tokens of a call with a long input.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongContext {
    /// They apply when the input, cached or not, has more tokens than this.
    pub above_input_tokens: i64,
    /// The prices.
    #[serde(flatten)]
    pub rates: Rates,
}

impl Prices {
    /// The prices of tokens in a call with this many input tokens.
    pub fn rates(&self, input_tokens: i64) -> Rates {
        match self.long_context {
            Some(long) if input_tokens > long.above_input_tokens => long.rates,
            _ => {
                let Self { input, output, cache_read, cache_write, thinking, .. } = *self;
                Rates { input, output, cache_read, cache_write, thinking }
            }
        }
    }

    /// Whether everything is free.
    pub fn is_zero(&self) -> bool {
        *self == Self::default()
    }
}

impl Rates {
    /// Price of a reasoning token.
    const fn thinking_rate(&self) -> i64 {
        if self.thinking == 0 { self.output } else { self.thinking }
    }

    /// Price of a token read from the vendor's cache. Most tokens of a long conversation are
    /// cached; if they were free, no budget would notice them.
    const fn cache_read_rate(&self) -> i64 {
        if self.cache_read == 0 { self.input } else { self.cache_read }
    }

    /// Price of a token written to the vendor's cache.
    const fn cache_write_rate(&self) -> i64 {
        if self.cache_write == 0 { self.input } else { self.cache_write }
    }
}

/// Tokens of a call, each counted once, and their cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Uncached input tokens: without those read from or written to the cache.
    pub input_tokens: i64,
    /// Output tokens, including reasoning tokens.
    pub output_tokens: i64,
    /// Tokens read from the vendor's cache.
    pub cache_read_tokens: i64,
    /// Tokens written to the vendor's cache.
    pub cache_write_tokens: i64,
    /// Reasoning tokens, where the vendor reports them separately.
    #[serde(default)]
    pub thinking_tokens: i64,
    /// Cost in pico-dollars (10⁻¹² US dollars).
    pub cost_pico_usd: i64,
}

impl Usage {
    /// Computes the cost at `prices` of these tokens as one call. The length of the input decides
    /// which prices apply. The price of a call is added once, unless nothing was used.
    ///
    /// Saturates instead of overflowing: nine million dollars for one call is an error of a vendor
    /// or a script.
    #[must_use]
    pub fn with_cost(self, prices: &Prices) -> Self {
        let input = self
            .input_tokens
            .saturating_add(self.cache_read_tokens)
            .saturating_add(self.cache_write_tokens);
        let rates = prices.rates(input);
        let thinking = self.thinking_tokens.clamp(0, self.output_tokens.max(0));
        let requests = i64::from(Self { cost_pico_usd: 0, ..self } != Self::default());
        let cost_pico_usd = [
            (self.input_tokens, rates.input),
            (self.output_tokens - thinking, rates.output),
            (thinking, rates.thinking_rate()),
            (self.cache_read_tokens, rates.cache_read_rate()),
            (self.cache_write_tokens, rates.cache_write_rate()),
            (requests, prices.request.saturating_mul(PICO_PER_MICRO)),
        ]
        .into_iter()
        .fold(0_i64, |sum, (tokens, price)| sum.saturating_add(tokens.saturating_mul(price)));
        Self { cost_pico_usd, ..self }
    }

    /// Whether nothing was used.
    pub fn is_zero(&self) -> bool {
        *self == Self::default()
    }
}

impl Add for Usage {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            input_tokens: self.input_tokens.saturating_add(other.input_tokens),
            output_tokens: self.output_tokens.saturating_add(other.output_tokens),
            cache_read_tokens: self.cache_read_tokens.saturating_add(other.cache_read_tokens),
            cache_write_tokens: self.cache_write_tokens.saturating_add(other.cache_write_tokens),
            thinking_tokens: self.thinking_tokens.saturating_add(other.thinking_tokens),
            cost_pico_usd: self.cost_pico_usd.saturating_add(other.cost_pico_usd),
        }
    }
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

/// Formats an amount for people: at least cents, and as many further digits as it has, up to
/// millionths. Smaller amounts are rounded up, so that nothing that costs something reads as free.
pub fn format_dollars(pico_usd: i64) -> String {
    let sign = if pico_usd < 0 { "-" } else { "" };
    let micros = pico_usd.unsigned_abs().div_ceil(PICO_PER_MICRO.unsigned_abs());
    let text = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
    let kept = text.trim_end_matches('0').len().max(text.len() - 4);
    format!("{sign}${}", &text[..kept])
}
