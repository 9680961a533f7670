//! `construct-gateway first-key`: creates and prints an owner's key of the operator's organization
//! when there is none.
//!
//! When log-in is required, somebody has to be first. Whoever can start this with the database's
//! address could write the key there anyway. It works once: while such a key is valid, nothing is
//! printed.

use anyhow::Context as _;
use construct_domain::{
    ApiKeyId, AuditEntryId, OrganizationId, UserId,
    access::{Role, Scope},
};
use construct_runtime::{
    Context, ServiceConfig,
    config::{Common, Invalid},
};
use construct_store::{AuditEntry, PoolOptions, Store, identity::NewApiKey};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::identity::credential;

/// The argument that selects this mode.
pub const MODE: &str = "first-key";

/// No keys besides the shared ones.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Config {}

impl ServiceConfig for Config {
    // It may run next to a gateway, which uses the health address.
    const SERVES: bool = false;

    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        common.database_url().map(drop)
    }
}

/// Creates and prints the key.
///
/// # Errors
/// When there is one already, or the database cannot be written.
pub async fn run(_: Config, context: &Context) -> anyhow::Result<()> {
    let latch = context.readiness().register("postgresql");
    let url = context.common().database_url()?.clone();
    let connect = || {
        let options = PoolOptions {
            application_name: "construct-first-key".to_owned(),
            ..PoolOptions::default()
        };
        Store::connect(url.expose(), options)
    };
    let store = context.connect_with_retry("postgresql", &latch, connect).await?;
    let made = make(&store).await;
    store.close().await;
    let key = made?.context(
        "an owner's key exists already; revoke it with `construct key revoke` to create another",
    )?;
    use std::io::Write as _;
    writeln!(std::io::stdout(), "{key}").context("the key cannot be printed")
}

async fn make(store: &Store) -> anyhow::Result<Option<String>> {
    store.migrate().await.context("the schema cannot be migrated")?;
    let (key, secret) = credential::mint(credential::KEY)
        .map_err(|status| anyhow::anyhow!("{}", status.message()))?;
    let new = NewApiKey {
        id: ApiKeyId::from_uuid(Uuid::now_v7()),
        name: "first key".to_owned(),
        secret,
        role: Role::Owner,
        scopes: vec![Scope::Admin],
        user: UserId::LOCAL,
        expires_at: None,
        limits: construct_store::Limits::default(),
    };
    let entry = AuditEntry {
        id: AuditEntryId::from_uuid(Uuid::now_v7()),
        organization: OrganizationId::LOCAL,
        user: Some(UserId::LOCAL),
        api_key: None,
        method: "FirstKey".to_owned(),
        protocol: "command".to_owned(),
        peer: String::new(),
        user_agent: String::new(),
        objects: vec![new.id.to_string()],
        code: 0,
        count: 1,
        request_id: String::new(),
        trace_id: String::new(),
        created_at: Timestamp::now(),
    };
    let made = store
        .api_key_create_first(&new, entry, Timestamp::now())
        .await
        .context("the key cannot be stored")?;
    Ok(made.then_some(key))
}

#[cfg(test)]
mod tests {
    use construct_store::testing::Database;

    use super::*;

    #[tokio::test]
    async fn concurrent_requests_create_one_first_key() {
        let database = Database::new().await;
        let store = database.store();
        let (one, other) = tokio::join!(make(&store), make(&store));
        let made: Vec<String> =
            [one, other].into_iter().filter_map(|made| made.expect("it is asked")).collect();
        assert_eq!(made.len(), 1, "exactly one is made");
        let hash = credential::digest(&made[0]);
        let holder = store
            .api_key_holder(&hash, Timestamp::now())
            .await
            .expect("it is read")
            .expect("it is valid");
        assert_eq!(
            (holder.role, holder.scopes.as_slice()),
            (Role::Owner, [Scope::Admin].as_slice())
        );
        assert!(!database.contents().await.contains(&made[0]), "the key itself is stored nowhere");
    }
}
