//! Authentication and authorization: one layer in front of every method, for all protocols
//! (docs/adr/0027-identity.md).
//!
//! - The caller is identified by an API key, a token of the configured issuer, or, without
//!   credentials, by the connection ([`authenticate`]). A caller with credentials is judged by the
//!   credentials alone.
//! - One table has the permissions that each method needs ([`rules`]). A method that is not in the
//!   table is refused.
//! - The layer puts the [`crate::caller::Caller`] into the request. A method without a caller
//!   refuses ([`crate::caller::identify`]).

pub(crate) mod authenticate;
pub(crate) mod credential;
pub(crate) mod failures;
pub(crate) mod guard;
pub(crate) mod oidc;
pub(crate) mod peer;
pub(crate) mod proxies;
pub(crate) mod rules;
