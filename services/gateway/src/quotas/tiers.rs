//! The tiers of the gateway's configuration.

use std::collections::BTreeMap;

use construct_runtime::config::Invalid;
use construct_store::Limits;

/// The predefined tier without limits.
pub(crate) const UNLIMITED: &str = "unlimited";

/// The quotas, in the order of [`Limits::all`].
pub(crate) const QUOTAS: [&str; 7] = [
    "requests_per_minute",
    "key_requests_per_minute",
    "tasks_per_day",
    "runs_per_day",
    "tokens_per_day",
    "spend_per_month_pico_usd",
    "storage_bytes",
];

/// Maximum request rate per minute: the part of a minute of one request must be measurable.
pub(crate) const MAX_REQUESTS_PER_MINUTE: i64 = 1_000_000_000;
/// Maximum of all other limits: sums of money saturate beyond.
pub(crate) const MAX_LIMIT: i64 = 9_000_000_000_000_000_000;

/// Whether a tier can have this name.
fn is_name(name: &str) -> bool {
    let tail = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    name.len() <= 32
        && name.starts_with(|first: char| first.is_ascii_lowercase())
        && name.bytes().all(tail)
}

/// Returns the first invalid limit, with the violation.
pub(crate) fn find_invalid(limits: &Limits) -> Option<(&'static str, String)> {
    QUOTAS.into_iter().zip(limits.all()).find_map(|(name, limit)| {
        let max = if name.contains("requests") { MAX_REQUESTS_PER_MINUTE } else { MAX_LIMIT };
        let limit = limit.filter(|limit| !(0..=max).contains(limit))?;
        Some((name, format!("must be between 0 and {max}, is {limit}")))
    })
}

/// Checks the configured tiers.
///
/// # Errors
/// The first violation.
pub(crate) fn check(tiers: &BTreeMap<String, Limits>, default: &str) -> Result<(), Invalid> {
    for (name, limits) in tiers {
        if !is_name(name) || name == UNLIMITED {
            let message = format!(
                "must have tiers with names like `free` (`[a-z][a-z0-9-]{{0,31}}`); `{name}` is not one"
            );
            return Err(Invalid::new("gateway_tiers", message));
        }
        if let Some((limit, message)) = find_invalid(limits) {
            return Err(Invalid::new(
                "gateway_tiers",
                format!("has a tier `{name}` whose `{limit}` {message}"),
            ));
        }
    }
    if default != UNLIMITED && !tiers.contains_key(default) {
        let message =
            format!("must be `{UNLIMITED}` or a tier of gateway_tiers; `{default}` is not one");
        return Err(Invalid::new("gateway_tier", message));
    }
    Ok(())
}
