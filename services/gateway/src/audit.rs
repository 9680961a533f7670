//! The audit trail: who did what, from where, to what, and how it ended (docs/adr/0032-audit.md).
//!
//! - Every call of a method that writes, or takes out much, has a [`draft::AuditDraft`]. What the store
//!   changes takes the draft's entry into its transaction; what changes nothing there, or fails, is
//!   written down when it has ended, before it is answered.
//! - Calls that are refused (nobody knows who it is, or they may not) are written down once a
//!   minute and counted, so that a flood of them does not fill the table ([`refusals`]).
//! - What an entry says of a request are ids and names, found by the contract's descriptors
//!   ([`methods`]): never what anybody wrote.

pub(crate) mod draft;
pub(crate) mod methods;
mod objects;
pub(crate) mod origin;
mod refusals;
mod service;
pub(crate) mod writer;
