//! Between what is stored and what the contracts say. Gateway answers with entities and the
//! reconciler tells of them in events; both go through here, so that an entity looks the same
//! wherever a client meets it (docs/adr/0009-wire.md).

pub mod convert;
pub mod identity;
pub mod record;
pub mod scan;
