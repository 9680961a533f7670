//! `construct-gateway migrate`: migrates the database schema and exits.
//!
//! Services migrate at their start as well. A rolling deployment runs this first, so that a failed
//! migration stops it before any service is replaced. It needs the address of the database and no
//! key.

use anyhow::Context as _;
use construct_runtime::{
    Context, ServiceConfig,
    config::{Common, Invalid},
};
use construct_store::{PoolOptions, Store};
use serde::{Deserialize, Serialize};

/// The argument that selects this mode.
pub const MODE: &str = "migrate";

/// No keys besides the shared ones.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Config {}

impl ServiceConfig for Config {
    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        common.database_url().map(drop)
    }
}

/// Waits for the database as long as necessary, then applies missing migrations. Unlike at a
/// service's start, a migration has no time limit, and a failed one is not retried.
///
/// # Errors
/// When a migration fails, or the process is told to stop first.
pub async fn run(_: Config, context: &Context) -> anyhow::Result<()> {
    let latch = context.readiness().register("postgresql");
    let url = context.common().database_url()?.clone();
    let connect = || {
        let options = PoolOptions {
            application_name: "construct-migrate".to_owned(),
            ..PoolOptions::default()
        };
        Store::connect(url.expose(), options)
    };
    let store = context.connect_with_retry("postgresql", &latch, connect).await?;
    store.migrate().await.context("the schema cannot be migrated")?;
    store.close().await;
    tracing::info!("the schema is up to date");
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use construct_store::testing::Database;

    use super::*;

    #[tokio::test]
    async fn migrate_exits_when_nothing_is_pending() {
        let database = Database::new().await;
        let common = Common { database_url: Some(database.url().into()), ..Common::default() };
        let context = Context::new("gateway", common);
        let process = context.lifecycle().run_until_stopped(run(Config::default(), &context));
        let outcome = tokio::time::timeout(Duration::from_secs(60), process)
            .await
            .expect("it ends by itself");
        assert!(outcome.failure.is_none(), "{outcome:?}");
        assert!(outcome.cut_off.is_empty(), "{outcome:?}");
    }

    #[test]
    fn migrate_needs_the_database_and_no_key() {
        assert!(Config::default().validate(&Common::default()).is_err());
        let common = Common {
            database_url: Some("postgres://localhost/construct".into()),
            ..Common::default()
        };
        assert_eq!(Config::default().validate(&common), Ok(()));
    }
}
