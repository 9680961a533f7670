//! Who calls, and whether they may: one layer that every method passes, whatever protocol it came
//! through (docs/adr/0027-identity.md).
//!
//! - The caller is found from an API key, a token of the configured issuer, or, without
//!   credentials, from where they are ([`authenticate`]). Who presents credentials is judged by
//!   them alone.
//! - What a method needs stands in one table ([`rules`]); a method that is not in it is refused.
//! - The layer puts the [`crate::caller::Caller`] into the request; a method that finds none
//!   refuses ([`crate::caller::identify`]).

pub(crate) mod authenticate;
pub(crate) mod credential;
pub(crate) mod failures;
pub(crate) mod guard;
pub(crate) mod oidc;
pub(crate) mod peer;
pub(crate) mod proxies;
pub(crate) mod rules;
