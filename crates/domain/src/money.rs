//! Tokens and what they cost, exactly.
//!
//! Prices are whole micro-dollars per million tokens, so that one token costs a whole number of
//! pico-dollars (10⁻¹² US dollars) and the cost of a call is the sum of its parts with no rounding.

mod estimate;
#[cfg(test)]
mod tests;

use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

pub use estimate::{Target, tokens_of_bytes, tokens_of_content, upper_cost};

/// Pico-dollars in a micro-dollar.
pub const PICO_PER_MICRO: i64 = 1_000_000;

/// Prices of a model in micro US dollars per million tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Prices {
    /// Tokens read afresh.
    pub input: i64,
    /// Tokens written.
    pub output: i64,
    /// Tokens read from the vendor's cache; 0: as `input`.
    pub cache_read: i64,
    /// Tokens written to the vendor's cache; 0: as `input`.
    pub cache_write: i64,
    /// Tokens spent on thinking; 0: as `output`.
    pub thinking: i64,
    /// Each call that used anything, in micro-dollars.
    pub request: i64,
    /// What holds instead for calls with a long input.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub long_context: Option<LongContext>,
}

/// Prices of tokens in micro US dollars per million; the fields are those of [`Prices`].
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

/// Prices of all tokens of a call whose input is long.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LongContext {
    /// They hold when the input, cached or not, has more tokens than this.
    pub above_input_tokens: i64,
    /// The prices.
    #[serde(flatten)]
    pub rates: Rates,
}

impl Prices {
    /// What tokens cost in a call with so many tokens of input.
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
    /// Of a token spent on thinking.
    const fn of_thinking(&self) -> i64 {
        if self.thinking == 0 { self.output } else { self.thinking }
    }

    /// Of a token read from the vendor's cache. Nearly all of a long conversation is: for nothing,
    /// no budget would notice it.
    const fn of_cache_read(&self) -> i64 {
        if self.cache_read == 0 { self.input } else { self.cache_read }
    }

    /// Of a token written to it.
    const fn of_cache_write(&self) -> i64 {
        if self.cache_write == 0 { self.input } else { self.cache_write }
    }
}

/// Tokens of a call, each counted once, and their cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens read afresh: without those read from or written to the cache.
    pub input_tokens: i64,
    /// Tokens written, with those spent on thinking.
    pub output_tokens: i64,
    /// Tokens read from the vendor's cache.
    pub cache_read_tokens: i64,
    /// Tokens written to the vendor's cache.
    pub cache_write_tokens: i64,
    /// Those of the output that were spent on thinking, where the vendor tells them apart.
    #[serde(default)]
    pub thinking_tokens: i64,
    /// In 10⁻¹² US dollars.
    pub cost_pico_usd: i64,
}

impl Usage {
    /// The same tokens with their cost at `prices`, as those of one call: which prices hold depends
    /// on the length of its input, and the price of a call is paid once, unless nothing was used.
    /// Saturates instead of wrapping: nine million dollars in one call is a vendor's or a script's
    /// nonsense, not a sum to overflow on.
    #[must_use]
    pub fn priced(self, prices: &Prices) -> Self {
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
            (thinking, rates.of_thinking()),
            (self.cache_read_tokens, rates.of_cache_read()),
            (self.cache_write_tokens, rates.of_cache_write()),
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

/// An amount for people: at least cents, and as many further digits as it has, up to millionths;
/// less than that is rounded up, because nothing that costs something reads as free.
pub fn dollars(pico_usd: i64) -> String {
    let sign = if pico_usd < 0 { "-" } else { "" };
    let micros = pico_usd.unsigned_abs().div_ceil(PICO_PER_MICRO.unsigned_abs());
    let text = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
    let kept = text.trim_end_matches('0').len().max(text.len() - 4);
    format!("{sign}${}", &text[..kept])
}
