//! Money as people write it, exactly: no floating point.

/// A price in US dollars per million tokens, such as `3`, `0.25` or `$0.075`, in micro-dollars.
///
/// # Errors
/// What is wrong with the text, for a person.
pub(crate) fn parse_price(text: &str) -> Result<i64, String> {
    const WRONG: &str = "write dollars per million tokens, like 3 or 0.25";
    let number = text.strip_prefix('$').unwrap_or(text);
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || !digits(whole) || !digits(fraction) || number.ends_with('.') {
        return Err(WRONG.to_owned());
    }
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > 6 {
        return Err("prices have at most 6 digits after the point".to_owned());
    }
    format!("{whole}{fraction:0<6}").parse().map_err(|_| "the price is too large".to_owned())
}

/// A price in micro-dollars as dollars: `$3`, `$0.25`.
pub(crate) fn price(micros: i64) -> String {
    let text = format!("{}.{:06}", micros / 1_000_000, (micros % 1_000_000).unsigned_abs());
    format!("${}", text.trim_end_matches('0').trim_end_matches('.'))
}

/// A cost in 10^-12 dollars, rounded to micro-dollars: `$0.0123`, `$1.20`.
pub(crate) fn cost(pico_usd: i64) -> String {
    let micros = (i128::from(pico_usd) + 500_000) / 1_000_000;
    if micros == 0 && pico_usd > 0 {
        return "<$0.000001".to_owned();
    }
    let text = format!("{}.{:06}", micros / 1_000_000, micros % 1_000_000);
    let kept = text.trim_end_matches('0').len().max(text.len() - 4);
    format!("${}", &text[..kept])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prices_are_read_exactly() {
        for (text, micros) in [
            ("3", 3_000_000),
            ("0.25", 250_000),
            ("$0.075", 75_000),
            ("0.000001", 1),
            ("0", 0),
            ("1.10000000", 1_100_000),
        ] {
            assert_eq!(parse_price(text), Ok(micros), "{text}");
        }
    }

    #[test]
    fn what_is_no_price_is_refused() {
        for text in ["", "-1", "1.", ".5", "1e3", "0.0000001", "1,5", "NaN", "99999999999999999999", "$"] {
            assert!(parse_price(text).is_err(), "{text}");
        }
    }

    #[test]
    fn amounts_are_shown_as_dollars() {
        assert_eq!([3_000_000, 250_000, 0, 1].map(price), ["$3", "$0.25", "$0", "$0.000001"]);
        assert_eq!(
            [0, 1, 12_345_000_000, 1_200_000_000_000, 500_000].map(cost),
            ["$0.00", "<$0.000001", "$0.012345", "$1.20", "$0.000001"]
        );
    }
}
