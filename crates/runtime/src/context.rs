//! What a service's `run` receives in addition to its configuration.

use std::sync::Arc;

use uuid::Uuid;

use crate::{Common, Latch, Lifecycle, Readiness, Stopping, retry};

/// Version of the product: all its crates are released together.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The process of a service. Clones share it.
#[derive(Clone)]
pub struct Context {
    shared: Arc<Shared>,
}

struct Shared {
    service: &'static str,
    instance_id: String,
    common: Common,
    lifecycle: Lifecycle,
    readiness: Readiness,
}

impl Context {
    /// A context without signals, telemetry and health endpoints. [`crate::main`] adds them; tests
    /// that run a service in their own process do not need them.
    pub fn new(service: &'static str, common: Common) -> Self {
        let lifecycle = Lifecycle::new(common.shutdown_grace);
        let readiness = Readiness::new(lifecycle.draining());
        let instance_id = common.instance_id.clone().unwrap_or_else(|| random_instance_id(service));
        Self { shared: Arc::new(Shared { service, instance_id, common, lifecycle, readiness }) }
    }

    /// Name of the service, such as `gateway`.
    pub fn service(&self) -> &'static str {
        self.shared.service
    }

    /// Name of this process among its replicas, such as `gateway-7f3a90c1`. Valid as one token of a
    /// subject.
    pub fn instance_id(&self) -> &str {
        &self.shared.instance_id
    }

    /// Version of the product.
    pub fn version(&self) -> &'static str {
        VERSION
    }

    /// The configuration that all services share.
    pub fn common(&self) -> &Common {
        &self.shared.common
    }

    /// Spawns tasks and tells them to stop.
    pub fn lifecycle(&self) -> &Lifecycle {
        &self.shared.lifecycle
    }

    /// Registers readiness conditions.
    pub fn readiness(&self) -> &Readiness {
        &self.shared.readiness
    }

    /// Retries until it succeeds or the process stops; see [`retry::connect_with_retry`].
    ///
    /// # Errors
    /// [`Stopping`] when the process stops first.
    pub async fn connect_with_retry<T, E, F>(
        &self,
        name: &str,
        latch: &Latch,
        attempt: impl FnMut() -> F,
    ) -> Result<T, Stopping>
    where
        F: Future<Output = Result<T, E>>,
        E: Into<anyhow::Error>,
    {
        retry::connect_with_retry(name, latch, &self.lifecycle().draining(), attempt).await
    }
}

/// 32 random bits distinguish the replicas of a service: the last ones of a version 7 id, whose
/// first ones are the time.
fn random_instance_id(service: &str) -> String {
    let id = Uuid::now_v7().simple().to_string();
    format!("{service}-{}", &id[id.len() - 8..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_id_is_random_unless_configured() {
        let [one, two] =
            [(); 2].map(|()| Context::new("gateway", Common::default()).instance_id().to_owned());
        assert_ne!(one, two);
        let suffix = one.strip_prefix("gateway-").unwrap();
        assert!(suffix.len() == 8 && suffix.bytes().all(|b| b.is_ascii_hexdigit()), "{one}");

        let named = Common { instance_id: Some("gateway-0".to_owned()), ..Common::default() };
        assert_eq!(Context::new("gateway", named).instance_id(), "gateway-0");
    }
}
