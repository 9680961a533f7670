//! Tests of the whole gateway: a real gRPC server and generated clients, with a real PostgreSQL and
//! a real NATS.

mod approvals;
mod attachments;
mod budgets;
mod clients;
mod entities;
mod faults;
mod files;
pub(crate) mod fuzz;
mod harness;
mod identity;
pub(crate) mod issuer;
mod model_tokens;
mod protocols;
mod quotas;
mod rotation;
mod secrets;
mod states;
mod subscriptions;
mod tasks;
mod tls;
mod walk;
