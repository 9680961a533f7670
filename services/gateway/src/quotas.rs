//! How much an organization may do (docs/adr/0033-quotas.md), and each of its keys
//! (docs/adr/0039-key-limits.md).
//!
//! - Requests are counted in this process, by token buckets ([`bucket`]), where every call passes:
//!   the layer of `identity`. What is counted: calls of an organization, and calls with each of its
//!   keys. Who is beyond is refused at once; nobody waits. Each gateway counts for itself, so an
//!   organization gets its rate from each that it reaches.
//! - What lasts (tasks, runs, tokens, money, uploads) is counted from the tables that hold it, when
//!   something is asked for that adds to it. What was read is good for two seconds; what is let in
//!   meanwhile is added. So a limit is exceeded at most by what other gateways let in within that
//!   time, and by what is under way.
//! - What keys may do is counted likewise, for all keys of an organization at once, when one that
//!   is limited asks.
//! - Sums that people ask for ([`sums`]) are made a few at a time.
//! - Where nothing is limited, as by default, nothing is counted and nothing read but one row in
//!   five seconds for each organization that calls.

mod bucket;
mod calendar;
mod limiter;
mod refusal;
mod sums;
pub(crate) mod tiers;

pub(crate) use calendar::Calendar;
pub(crate) use limiter::{Mark, Quotas, Wanted, refused};
pub(crate) use refusal::{Metered, seconds};
pub(crate) use sums::Sums;
