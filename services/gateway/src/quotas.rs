//! Quotas of organizations (docs/adr/0033-quotas.md), and limits of their API keys
//! (docs/adr/0039-key-limits.md).
//!
//! - Request rates are counted in this process, by token buckets ([`bucket`]), in the layer of
//!   `identity` that every call passes: calls of an organization, and calls with each of its keys.
//!   Calls beyond the limit are refused at once; none waits. Each gateway counts for itself, so an
//!   organization has its rate at each gateway it uses.
//! - Durable usage (tasks, runs, tokens, money, uploads) is counted from the tables that have it,
//!   when a request would add to it. A count is valid for two seconds, and requests admitted
//!   meanwhile are added. So the excess of a limit is bounded by what other gateways admit in that
//!   time, and by work in progress.
//! - Usage of keys is counted in the same way, for all keys of an organization at once, when one
//!   with a limit makes a request.
//! - Usage reports ([`sums`]) are limited to a few at a time.
//! - Without limits, as by default, nothing is counted, and only one row per calling organization
//!   is read every five seconds.

mod bucket;
mod calendar;
mod limiter;
mod refusal;
mod sums;
pub(crate) mod tiers;

pub(crate) use calendar::Calendar;
pub(crate) use limiter::{CredentialHash, QuotaRequest, Quotas, rejection_status};
pub(crate) use refusal::{QuotaStates, seconds};
pub(crate) use sums::Sums;
