//! The audit log: who did what, from where, to which objects, with which outcome
//! (docs/adr/0032-audit.md).
//!
//! - Every call of a method that writes, or exports much, has a [`draft::AuditDraft`]. A change in
//!   the store includes the draft's entry in its transaction. A call without a change, or one that
//!   fails, is recorded when it has ended, before its response.
//! - Refused calls (unauthenticated or unauthorized) are recorded once a minute and counted, so
//!   that a flood of them does not fill the table ([`refusals`]).
//! - From a request, an entry has only ids and names, found with the contract's descriptors
//!   ([`methods`]): never text that somebody wrote.

pub(crate) mod draft;
pub(crate) mod methods;
mod objects;
pub(crate) mod origin;
mod refusals;
mod service;
pub(crate) mod writer;
