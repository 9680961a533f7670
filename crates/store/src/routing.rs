//! Fallbacks of a model, and the additional keys of a provider.

use sqlx::{PgConnection, types::Json};
use uuid::Uuid;

use construct_domain::{ModelId, ModelProviderId};

use crate::{Error, SealedSecret};

/// A model that is called when another one fails.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fallback {
    /// The fallback.
    pub model: ModelId,
    /// Its name; ignored by writes.
    pub name: String,
    /// 0: none. At most 1,000.
    pub weight: u32,
}

/// Limits of each key of a provider, per process. 0: unlimited.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeyLimits {
    /// Concurrent calls.
    pub max_concurrency: i64,
    /// Calls per minute.
    pub requests_per_minute: i64,
    /// Tokens per minute, input and output.
    pub tokens_per_minute: i64,
}

/// A fallback, as the statement encodes it.
#[derive(Debug, serde::Deserialize)]
pub(crate) struct FallbackRow {
    id: Uuid,
    name: String,
    weight: u32,
}

/// Decodes fallbacks.
pub(crate) fn fallbacks(rows: Json<Vec<FallbackRow>>) -> Vec<Fallback> {
    rows.0
        .into_iter()
        .map(|row| Fallback {
            model: ModelId::from_uuid(row.id),
            name: row.name,
            weight: row.weight,
        })
        .collect()
}

/// Replaces a model's fallbacks.
pub(crate) async fn fallbacks_replace(
    connection: &mut PgConnection,
    organization: Uuid,
    model: ModelId,
    fallbacks: &[Fallback],
) -> Result<(), Error> {
    sqlx::query!(
        "DELETE FROM model_fallbacks WHERE organization_id = $1 AND model_id = $2",
        organization,
        model.uuid()
    )
    .execute(&mut *connection)
    .await?;
    if fallbacks.is_empty() {
        return Ok(());
    }
    let ids: Vec<Uuid> = fallbacks.iter().map(|fallback| fallback.model.uuid()).collect();
    let weights: Vec<i64> = fallbacks.iter().map(|fallback| i64::from(fallback.weight)).collect();
    sqlx::query!(
        "INSERT INTO model_fallbacks (organization_id, model_id, position, fallback_id, weight)
         SELECT $1, $2, f.number - 1, f.id, f.weight
         FROM unnest($3::uuid[], $4::bigint[]) WITH ORDINALITY AS f (id, weight, number)",
        organization,
        model.uuid(),
        &ids,
        &weights,
    )
    .execute(connection)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}

/// Combines the columns of keys.
pub(crate) fn additional_keys(
    ids: Vec<String>,
    nonces: Vec<Vec<u8>>,
    ciphertexts: Vec<Vec<u8>>,
) -> Vec<SealedSecret> {
    ids.into_iter()
        .zip(nonces)
        .zip(ciphertexts)
        .map(|((key_id, nonce), ciphertext)| SealedSecret { key_id, nonce, ciphertext })
        .collect()
}

/// Replaces a provider's additional keys.
pub(crate) async fn additional_keys_replace(
    connection: &mut PgConnection,
    organization: Uuid,
    provider: ModelProviderId,
    keys: &[SealedSecret],
) -> Result<(), Error> {
    sqlx::query!(
        "DELETE FROM model_provider_keys WHERE organization_id = $1 AND provider_id = $2",
        organization,
        provider.uuid(),
    )
    .execute(&mut *connection)
    .await?;
    if keys.is_empty() {
        return Ok(());
    }
    let ids: Vec<String> = keys.iter().map(|key| key.key_id.clone()).collect();
    let nonces: Vec<Vec<u8>> = keys.iter().map(|key| key.nonce.clone()).collect();
    let ciphertexts: Vec<Vec<u8>> = keys.iter().map(|key| key.ciphertext.clone()).collect();
    sqlx::query!(
        "INSERT INTO model_provider_keys (organization_id, provider_id, position, key_id, key_nonce, key_ciphertext)
         SELECT $1, $2, k.number - 1, k.id, k.nonce, k.ciphertext
         FROM unnest($3::text[], $4::bytea[], $5::bytea[]) WITH ORDINALITY AS k (id, nonce, ciphertext, number)",
        organization,
        provider.uuid(),
        &ids,
        &nonces,
        &ciphertexts,
    )
    .execute(connection)
    .await
    .map_err(Error::from_write)?;
    Ok(())
}
