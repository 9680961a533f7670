//! The tiers of the gateway's configuration.

use std::collections::BTreeMap;

use construct_runtime::config::Invalid;
use construct_store::Limits;

/// The tier that is always there, in which nothing is limited.
pub(crate) const UNLIMITED: &str = "unlimited";

/// What can be limited, in the order of [`Limits::all`].
pub(crate) const QUOTAS: [&str; 7] = [
    "requests_per_minute",
    "key_requests_per_minute",
    "tasks_per_day",
    "runs_per_day",
    "tokens_per_day",
    "spend_per_month_pico_usd",
    "storage_bytes",
];

/// Calls in a minute at most, where they are limited: each takes a part of a minute that a clock
/// can measure.
pub(crate) const MOST_REQUESTS: i64 = 1_000_000_000;
/// What any other limit is at most: sums of money saturate beyond.
pub(crate) const MOST: i64 = 9_000_000_000_000_000_000;

/// Whether a tier can be called this.
fn is_name(name: &str) -> bool {
    let tail = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    name.len() <= 32
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(tail)
}

/// What is wrong with some limits, and with which.
pub(crate) fn wrong(limits: &Limits) -> Option<(&'static str, String)> {
    QUOTAS.into_iter().zip(limits.all()).find_map(|(name, limit)| {
        let most = if name.contains("requests") { MOST_REQUESTS } else { MOST };
        let limit = limit.filter(|limit| !(0..=most).contains(limit))?;
        Some((name, format!("must be between 0 and {most}, is {limit}")))
    })
}

/// Checks what is configured.
///
/// # Errors
/// The first thing that is wrong.
pub(crate) fn check(tiers: &BTreeMap<String, Limits>, default: &str) -> Result<(), Invalid> {
    for (name, limits) in tiers {
        if !is_name(name) || name == UNLIMITED {
            let words =
                format!("names tiers like `free` (`[a-z][a-z0-9-]{{0,31}}`), and `{name}` is none");
            return Err(Invalid::new("gateway_tiers", words));
        }
        if let Some((limit, words)) = wrong(limits) {
            return Err(Invalid::new(
                "gateway_tiers",
                format!("has a tier `{name}` whose `{limit}` {words}"),
            ));
        }
    }
    if default != UNLIMITED && !tiers.contains_key(default) {
        let words =
            format!("must be `{UNLIMITED}` or a tier of gateway_tiers, and `{default}` is none");
        return Err(Invalid::new("gateway_tier", words));
    }
    Ok(())
}
