//! Costs and estimates.

use proptest::prelude::*;

use super::*;
use crate::message::{AttachedFile, Attachment, Block, Content};

const PRICES: Prices = Prices {
    input: 3_000_000,
    output: 15_000_000,
    cache_read: 300_000,
    cache_write: 3_750_000,
    thinking: 0,
    request: 0,
    long_context: None,
};

#[test]
fn million_tokens_cost_the_price() {
    let usage = Usage { input_tokens: 1_000_000, ..Usage::default() }.with_cost(&PRICES);
    // 3 dollars in 10⁻¹² dollars.
    assert_eq!(usage.cost_pico_usd, 3_000_000_000_000);
}

#[test]
fn thinking_tokens_have_their_own_price_and_count_once() {
    let usage = Usage { output_tokens: 100, thinking_tokens: 40, ..Usage::default() };
    assert_eq!(usage.with_cost(&PRICES).cost_pico_usd, 100 * 15_000_000);
    let prices = Prices { thinking: 2_000_000, ..PRICES };
    assert_eq!(usage.with_cost(&prices).cost_pico_usd, 60 * 15_000_000 + 40 * 2_000_000);
    // If a vendor reports more reasoning than output, the output counts.
    let odd = Usage { output_tokens: 10, thinking_tokens: 40, ..Usage::default() };
    assert_eq!(odd.with_cost(&prices).cost_pico_usd, 10 * 2_000_000);
}

#[test]
fn cached_tokens_without_price_cost_as_input() {
    let usage = Usage { cache_read_tokens: 100, cache_write_tokens: 40, ..Usage::default() };
    assert_eq!(usage.with_cost(&PRICES).cost_pico_usd, 100 * 300_000 + 40 * 3_750_000);
    let prices = Prices { cache_read: 0, cache_write: 0, ..PRICES };
    assert_eq!(usage.with_cost(&prices).cost_pico_usd, 140 * 3_000_000);
}

#[test]
fn call_price_is_added_once_unless_nothing_was_used() {
    let prices = Prices { request: 5_000, ..Prices::default() };
    assert_eq!(Usage::default().with_cost(&prices).cost_pico_usd, 0);
    assert_eq!(
        Usage { input_tokens: 1, ..Usage::default() }.with_cost(&prices).cost_pico_usd,
        5_000 * PICO_PER_MICRO
    );
}

#[test]
fn long_input_prices_apply_to_the_whole_call() {
    let rates = Rates {
        input: 6_000_000,
        output: 22_500_000,
        cache_read: 600_000,
        cache_write: 7_500_000,
        thinking: 0,
    };
    let prices =
        Prices { long_context: Some(LongContext { above_input_tokens: 200_000, rates }), ..PRICES };
    let at = |input_tokens, cache_read_tokens| {
        Usage { input_tokens, cache_read_tokens, output_tokens: 10, ..Usage::default() }
            .with_cost(&prices)
            .cost_pico_usd
    };
    assert_eq!(at(150_000, 50_000), 150_000 * 3_000_000 + 50_000 * 300_000 + 10 * 15_000_000);
    assert_eq!(at(150_001, 50_000), 150_001 * 6_000_000 + 50_000 * 600_000 + 10 * 22_500_000);
}

#[test]
fn amounts_are_formatted_as_dollars_and_rounded_up() {
    let shown = [5_000_000_000_000, 4_980_000_000_000, 123_456_000_000, 1, 0, -2_500_000_000_000]
        .map(format_dollars);
    assert_eq!(shown, ["$5.00", "$4.98", "$0.123456", "$0.000001", "$0.00", "-$2.50"]);
}

#[test]
fn estimate_exceeds_actual_tokens_of_a_message() {
    let text = Content { blocks: vec![Block::Text("x".repeat(1000))] };
    assert_eq!(tokens_of_content(&text), 550);
    let attachment = |media_type: &str, data: usize| Content {
        blocks: vec![Block::Attachment(Attachment {
            media_type: media_type.into(),
            name: String::new(),
            data: "A".repeat(data),
            file: None,
        })],
    };
    // An image counts as an image, whatever its size.
    assert_eq!(tokens_of_content(&attachment("image/png", 4_000_000)), 6_050);
    assert_eq!(tokens_of_content(&attachment("application/pdf", 4_000)), 1_550);
}

#[test]
fn file_estimate_depends_on_its_presentation() {
    let file = |media_type: &str, size: u64| {
        let id = "file_01890a5d-ac96-774b-bcce-b302099a8057".parse().expect("an id");
        let file = Some(AttachedFile { id, sha256: "0f".repeat(32), size });
        let attachment =
            Attachment { media_type: media_type.into(), file, ..Attachment::default() };
        tokens_of_content(&Content { blocks: vec![Block::Attachment(attachment)] })
    };
    assert_eq!(file("image/png", 10_000_000), 6_550);
    assert_eq!(file("application/pdf", 4_000), 2_550);
    assert_eq!(file("application/pdf", 10_000_000), 150_550);
    assert_eq!(file("text/csv", 4_000), 2_550);
    // By name only.
    assert_eq!(file("text/csv", 10_000_000), 550);
    assert_eq!(file("image/png", 30_000_000), 550);
    assert_eq!(file("application/zip", u64::MAX), 550);
}

#[test]
fn estimate_uses_dearest_target_and_context_window() {
    let cheap = Target { prices: PRICES, context_window: 1_000, max_output_tokens: 10 };
    let expensive = Target { prices: Prices { output: 75_000_000, ..PRICES }, ..cheap };
    // All input may be written to the cache.
    assert_eq!(max_cost(&[cheap], false, 100), 100 * 3_750_000 + 10 * 15_000_000);
    assert_eq!(max_cost(&[cheap, expensive], false, 100), 100 * 3_750_000 + 10 * 75_000_000);
    assert_eq!(max_cost(&[cheap], false, i64::MAX), 1_000 * 3_750_000 + 10 * 15_000_000);
    assert_eq!(max_cost(&[], false, 100), 0);
    // Two of three may be called at the same time: the most expensive ones.
    let both = 2 * 100 * 3_750_000 + 10 * 15_000_000 + 10 * 75_000_000;
    assert_eq!(max_cost(&[cheap, expensive, cheap], true, 100), both);
    assert_eq!(max_cost(&[cheap], true, 100), max_cost(&[cheap], false, 100));
}

/// Mostly realistic amounts, sometimes ones that overflow.
fn amount() -> impl Strategy<Value = i64> {
    prop_oneof![4 => 0..10_000_000_i64, 1 => Just(0), 1 => 0..=i64::MAX]
}

fn rates() -> impl Strategy<Value = Rates> {
    [amount(), amount(), amount(), amount(), amount()].prop_map(
        |[input, output, cache_read, cache_write, thinking]| Rates {
            input,
            output,
            cache_read,
            cache_write,
            thinking,
        },
    )
}

fn prices() -> impl Strategy<Value = Prices> {
    (rates(), amount(), proptest::option::of((amount(), rates()))).prop_map(
        |(rates, request, long)| {
            let Rates { input, output, cache_read, cache_write, thinking } = rates;
            let long_context =
                long.map(|(above_input_tokens, rates)| LongContext { above_input_tokens, rates });
            Prices { input, output, cache_read, cache_write, thinking, request, long_context }
        },
    )
}

fn usage() -> impl Strategy<Value = Usage> {
    [amount(), amount(), amount(), amount(), amount()].prop_map(
        |[input_tokens, output_tokens, cache_read_tokens, cache_write_tokens, thinking_tokens]| {
            Usage {
                input_tokens,
                output_tokens,
                cache_read_tokens,
                cache_write_tokens,
                thinking_tokens,
                cost_pico_usd: 0,
            }
        },
    )
}

/// The same sum in integers that cannot overflow.
fn exact_cost(usage: &Usage, prices: &Prices) -> i128 {
    let wide = i128::from;
    let input =
        wide(usage.input_tokens) + wide(usage.cache_read_tokens) + wide(usage.cache_write_tokens);
    let long = prices
        .long_context
        .filter(|long| input.min(wide(i64::MAX)) > wide(long.above_input_tokens));
    let short = Rates {
        input: prices.input,
        output: prices.output,
        cache_read: prices.cache_read,
        cache_write: prices.cache_write,
        thinking: prices.thinking,
    };
    let rates = long.map_or(short, |long| long.rates);
    let thinking = usage.thinking_tokens.min(usage.output_tokens);
    let or = |price: i64, other: i64| wide(if price == 0 { other } else { price });
    let request = if *usage == Usage::default() { 0 } else { wide(prices.request) * 1_000_000 };
    wide(usage.input_tokens) * wide(rates.input)
        + wide(usage.output_tokens - thinking) * wide(rates.output)
        + wide(thinking) * or(rates.thinking, rates.output)
        + wide(usage.cache_read_tokens) * or(rates.cache_read, rates.input)
        + wide(usage.cache_write_tokens) * or(rates.cache_write, rates.input)
        + request
}

proptest! {
    #[test]
    fn cost_is_the_saturated_sum_of_its_parts(usage in usage(), prices in prices()) {
        let expected = exact_cost(&usage, &prices).min(i128::from(i64::MAX));
        prop_assert_eq!(i128::from(usage.with_cost(&prices).cost_pico_usd), expected);
    }

    #[test]
    fn pricing_keeps_tokens_and_is_idempotent(usage in usage(), prices in prices()) {
        let once = usage.with_cost(&prices);
        prop_assert_eq!(Usage { cost_pico_usd: 0, ..once }, usage);
        prop_assert_eq!(once.with_cost(&prices), once);
    }

    #[test]
    fn sum_of_calls_costs_the_sum_of_their_costs(usages in proptest::collection::vec(usage(), 0..8), prices in prices()) {
        let sum = usages.iter().fold(Usage::default(), |sum, usage| sum + usage.with_cost(&prices));
        let costs: i128 = usages.iter().map(|usage| i128::from(usage.with_cost(&prices).cost_pico_usd)).sum();
        prop_assert_eq!(i128::from(sum.cost_pico_usd), costs.min(i128::from(i64::MAX)));
    }

    #[test]
    fn call_never_costs_more_than_its_estimate(usage in usage(), prices in prices(), more in amount(), spare in 0..1_000_i64) {
        let input = usage.input_tokens.saturating_add(usage.cache_read_tokens).saturating_add(usage.cache_write_tokens);
        // A vendor rejects what does not fit.
        let window = input.saturating_add(more);
        let target = Target { prices, context_window: window, max_output_tokens: usage.output_tokens };
        let estimate = max_cost(&[target], false, input.saturating_add(spare));
        prop_assert!(usage.with_cost(&prices).cost_pico_usd <= estimate);
    }
}
