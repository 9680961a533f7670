//! Background jobs of the gateway.

use std::time::Duration;

use construct_bus::Bus;
use construct_domain::{AuditEntryId, OrganizationId};
use construct_runtime::{Latch, clock};
use construct_store::{AuditEntry, Error, Keyring, Store, identity::ErasureProgress};
use jiff::{SignedDuration, Timestamp};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{Keyrings, files::work::Files, status::chain};

/// Interval of PostgreSQL health checks.
const HEALTH_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Interval while PostgreSQL is unavailable.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval of removing expired data.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(600);
/// Audit entries removed per statement.
const AUDIT_BATCH_ROWS: u32 = 1000;
/// Interval of looking for organizations to erase.
const ERASE_INTERVAL: Duration = Duration::from_secs(5);
/// Rows of an organization removed per transaction.
const ERASE_BATCH_ROWS: u32 = 500;
/// How long responses to idempotent requests are kept, as the API promises.
const IDEMPOTENCY_RETENTION: SignedDuration = SignedDuration::from_hours(24);

/// Updates the readiness of PostgreSQL.
pub(crate) async fn watch_database(store: Store, latch: Latch, draining: CancellationToken) {
    let mut there = true;
    while !wait_until_draining(
        if there { HEALTH_CHECK_INTERVAL } else { RECHECK_INTERVAL },
        &draining,
    )
    .await
    {
        match store.ping().await {
            Ok(()) if there => {}
            Ok(()) => {
                tracing::info!("PostgreSQL is back");
                latch.set_ready();
                there = true;
            }
            Err(error) => {
                if there {
                    tracing::warn!(error = chain(&error), "PostgreSQL does not answer");
                }
                latch.set_not_ready("PostgreSQL does not answer");
                there = false;
            }
        }
    }
}

/// Re-encrypts API keys and secrets that are not under their active key, once; then removes expired
/// data periodically.
pub(crate) async fn housekeeping(
    store: Store,
    keyrings: Keyrings,
    audit_keep: SignedDuration,
    draining: CancellationToken,
) {
    match store.model_provider_reseal_all(&keyrings.providers, clock::now()).await {
        Ok(resealed) => {
            if resealed.resealed > 0 {
                tracing::info!(
                    count = resealed.resealed,
                    "API keys re-encrypted with the active master key"
                );
            }
            if !resealed.failed.is_empty() {
                let providers: Vec<String> =
                    resealed.failed.iter().map(ToString::to_string).collect();
                tracing::error!(
                    ?providers,
                    "API keys cannot be decrypted: the master key they need is not configured"
                );
            }
        }
        Err(error) => warn("API keys could not be checked", &error),
    }
    match store.scan_connection_reseal_all(&keyrings.providers, clock::now()).await {
        Ok(resealed) if resealed.failed.is_empty() => {}
        Ok(resealed) => {
            let connections: Vec<String> =
                resealed.failed.iter().map(ToString::to_string).collect();
            tracing::error!(
                ?connections,
                "connections cannot be decrypted: the master key they need is not configured"
            );
        }
        Err(error) => warn("connections could not be checked", &error),
    }
    if let Some(keyring) = keyrings.secrets {
        reseal_secrets(&store, &keyring).await;
    }
    while !wait_until_draining(CLEANUP_INTERVAL, &draining).await {
        match store.idempotency_expire(clock::now() - IDEMPOTENCY_RETENTION).await {
            Ok(count) => tracing::debug!(count, "expired responses removed"),
            Err(error) => warn("expired responses could not be removed", &error),
        }
        expire_audit(&store, clock::now() - audit_keep, &draining).await;
    }
}

async fn reseal_secrets(store: &Store, keyring: &Keyring) {
    match store.secret_reseal_all(keyring, clock::now()).await {
        Ok(resealed) => {
            if resealed.resealed > 0 {
                tracing::info!(
                    count = resealed.resealed,
                    "secrets re-encrypted with the active key"
                );
            }
            if !resealed.failed.is_empty() {
                let secrets: Vec<String> =
                    resealed.failed.iter().map(ToString::to_string).collect();
                tracing::error!(
                    ?secrets,
                    "secrets cannot be decrypted: the key they need is not configured"
                );
            }
        }
        Err(error) => warn("secrets could not be checked", &error),
    }
}

/// Erases deleted organizations in batches. Every replica does it; a locked organization is skipped
/// by the others.
pub(crate) async fn erase_organizations(
    store: Store,
    bus: Bus,
    files: Files,
    draining: CancellationToken,
) {
    let mut delay = Duration::ZERO;
    while !wait_until_draining(delay, &draining).await {
        delay = match store
            .organization_erase(erasure_entry(), ERASE_BATCH_ROWS, clock::now())
            .await
        {
            Ok(Some(ErasureProgress::More(_))) => Duration::ZERO,
            Ok(Some(ErasureProgress::Blocked(_))) => RECHECK_INTERVAL,
            Ok(Some(ErasureProgress::Done(organization))) => {
                files.remove().await;
                // Remaining events expire by age.
                if let Err(error) = bus.forget_organization(organization).await {
                    tracing::warn!(%organization, error = chain(&error), "the live events of an erased organization stay for a week");
                }
                tracing::info!(%organization, "organization erased");
                Duration::ZERO
            }
            Ok(None) => ERASE_INTERVAL,
            Err(error) => {
                warn("an organization could not be erased", &error);
                ERASE_INTERVAL
            }
        };
    }
}

/// The audit entry of a complete erasure.
fn erasure_entry() -> AuditEntry {
    AuditEntry {
        id: AuditEntryId::from_uuid(Uuid::now_v7()),
        organization: OrganizationId::LOCAL,
        user: None,
        api_key: None,
        method: "EraseOrganization".to_owned(),
        protocol: "housekeeping".to_owned(),
        peer: String::new(),
        user_agent: String::new(),
        objects: Vec::new(),
        code: 0,
        count: 1,
        request_id: String::new(),
        trace_id: String::new(),
        created_at: clock::now(),
    }
}

/// Removes expired audit entries in batches, so that nothing waits behind it.
pub(crate) async fn expire_audit(store: &Store, before: Timestamp, draining: &CancellationToken) {
    while !draining.is_cancelled() {
        match store.audit_expire(before, AUDIT_BATCH_ROWS).await {
            Ok(count) if count < u64::from(AUDIT_BATCH_ROWS) => return,
            Ok(_) => {}
            Err(error) => {
                return warn("old entries of the audit trail could not be removed", &error);
            }
        }
    }
}

fn warn(what: &str, error: &Error) {
    tracing::warn!(error = chain(error), "{what}");
}

/// Waits for `delay`. Returns `true` when the process drains.
async fn wait_until_draining(delay: Duration, draining: &CancellationToken) -> bool {
    tokio::select! {
        () = draining.cancelled() => true,
        () = tokio::time::sleep(delay) => false,
    }
}
