//! Money as people write it, exactly: no floating point.

use construct_proto::v1::BudgetPeriod;

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

/// An amount and, if one is said, a period: `5`, `$2.50/month`, `0.10/call`; in 10^-12 dollars.
///
/// # Errors
/// What is wrong with the text, for a person.
pub(crate) fn parse_limit(text: &str) -> Result<Limit, String> {
    let (amount, period) = match text.split_once('/') {
        Some((amount, period)) => (amount, Some(period)),
        None => (text, None),
    };
    let period = match period {
        None => None,
        Some("total") => Some(BudgetPeriod::Total),
        Some("day") => Some(BudgetPeriod::Day),
        Some("month") => Some(BudgetPeriod::Month),
        Some("call") => Some(BudgetPeriod::Call),
        Some(_) => {
            return Err(
                "write total, day, month or call behind the amount, like 5/month".to_owned()
            );
        }
    };
    let micros = parse_price(amount)
        .map_err(|_| "write dollars, like 5, 2.50/month or 0.10/call".to_owned())?;
    let pico_usd = micros.checked_mul(1_000_000).ok_or("the amount is too large")?;
    Ok(Limit { pico_usd, period })
}

/// How much may be spent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limit {
    /// In 10^-12 dollars.
    pub(crate) pico_usd: i64,
    /// In what time, if that was said.
    pub(crate) period: Option<BudgetPeriod>,
}

/// The name of a period as people say it.
pub(crate) fn period(period: BudgetPeriod) -> &'static str {
    match period {
        BudgetPeriod::Unspecified => "",
        BudgetPeriod::Total => "total",
        BudgetPeriod::Day => "day",
        BudgetPeriod::Month => "month",
        BudgetPeriod::Call => "call",
    }
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
        for text in
            ["", "-1", "1.", ".5", "1e3", "0.0000001", "1,5", "NaN", "99999999999999999999", "$"]
        {
            assert!(parse_price(text).is_err(), "{text}");
        }
    }

    #[test]
    fn limits_are_read_with_their_period() {
        let read = |text| parse_limit(text).map(|limit| (limit.pico_usd, limit.period));
        assert_eq!(read("5"), Ok((5_000_000_000_000, None)));
        assert_eq!(read("$2.50/month"), Ok((2_500_000_000_000, Some(BudgetPeriod::Month))));
        assert_eq!(read("0/call"), Ok((0, Some(BudgetPeriod::Call))));
        for text in ["", "5/", "5/year", "-1", "5/month/day", "99999999999"] {
            assert!(read(text).is_err(), "{text}");
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
