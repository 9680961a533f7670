//! Tokens and what they cost, exactly.
//!
//! Prices are whole micro-dollars per million tokens, so that one token costs a whole number of pico-dollars
//! (10⁻¹² US dollars) and the cost of a call is the sum of its parts with no rounding.

use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

/// Prices of a model in micro US dollars per million tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prices {
    /// Tokens read afresh.
    pub input: i64,
    /// Tokens written.
    pub output: i64,
    /// Tokens read from the vendor's cache.
    pub cache_read: i64,
    /// Tokens written to the vendor's cache.
    pub cache_write: i64,
}

/// Tokens of a call, each counted once, and their cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Tokens read afresh: without those read from or written to the cache.
    pub input_tokens: i64,
    /// Tokens written.
    pub output_tokens: i64,
    /// Tokens read from the vendor's cache.
    pub cache_read_tokens: i64,
    /// Tokens written to the vendor's cache.
    pub cache_write_tokens: i64,
    /// In 10⁻¹² US dollars.
    pub cost_pico_usd: i64,
}

impl Usage {
    /// The same tokens with their cost at `prices`. Saturates instead of wrapping: nine million dollars in one call
    /// is a vendor's or a script's nonsense, not a sum to overflow on.
    #[must_use]
    pub fn priced(self, prices: &Prices) -> Self {
        let cost_pico_usd = [
            (self.input_tokens, prices.input),
            (self.output_tokens, prices.output),
            (self.cache_read_tokens, prices.cache_read),
            (self.cache_write_tokens, prices.cache_write),
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
            cost_pico_usd: self.cost_pico_usd.saturating_add(other.cost_pico_usd),
        }
    }
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_million_tokens_cost_the_price() {
        let prices = Prices { input: 3_000_000, output: 15_000_000, cache_read: 300_000, cache_write: 3_750_000 };
        let usage = Usage { input_tokens: 1_000_000, ..Usage::default() }.priced(&prices);
        // 3 dollars in 10⁻¹² dollars.
        assert_eq!(usage.cost_pico_usd, 3_000_000_000_000);
    }

    #[test]
    fn the_cost_of_a_call_is_the_sum_of_its_parts() {
        let prices = Prices { input: 75_000, output: 300_000, cache_read: 3_500, cache_write: 1 };
        let a = Usage { input_tokens: 7, output_tokens: 11, cache_read_tokens: 13, ..Usage::default() };
        let b = Usage { input_tokens: 1, cache_write_tokens: 5, ..Usage::default() };
        assert_eq!((a + b).priced(&prices), a.priced(&prices) + b.priced(&prices));
    }
}
