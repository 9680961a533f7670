//! Conversions between stored entities and the contracts. The gateway returns entities, and the
//! reconciler publishes them in events. Both use these conversions, so that an entity looks the
//! same everywhere (docs/adr/0009-wire.md).

pub mod convert;
pub mod identity;
pub mod record;
pub mod scan;
