//! Opens the source of a scan's files, with its credential.

use construct_bus::blob;
use construct_domain::ScanConnectionId;
use construct_runtime::clock;
use construct_store::{
    Keyring, SealedSecret,
    scan::{Scan, ScanConnection, ScanCredential, ScanKind},
};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use tempfile::TempDir;

use crate::{
    cleanup,
    error::Error,
    hosts::ClientKey,
    repository::{Folder, GitHub, GitHubAuth, GitLab, STAGING_PREFIX, Source, Upload},
    shared::Shared,
};

/// The file name of an uploaded archive.
const ARCHIVE_NAME: &str = "archive";

/// A source, and what has to live as long as it.
pub(crate) struct OpenSource {
    pub(crate) source: Box<dyn Source>,
    _upload: Option<TempDir>,
}

/// A GitHub App's credential, as the gateway seals it.
#[derive(Deserialize)]
struct AppCredential {
    app_id: String,
    installation_id: String,
    private_key: String,
}

/// Unseals the credential of a connection.
fn open_credential(keyring: &Keyring, connection: &ScanConnection) -> Result<SecretString, Error> {
    let opened = keyring.open(&connection.id.to_string(), &connection.sealed);
    let bytes = opened.map_err(|error| Error::Failed(error.to_string()))?;
    let text = std::str::from_utf8(bytes.expose_secret());
    Ok(SecretString::from(
        text.map_err(|_| Error::Failed("the credential cannot be read".to_owned()))?,
    ))
}

/// The key of the client: with the connection's address, else the configured one, else the default.
fn client_key(connection: Option<&ScanConnection>, configured: Option<&str>) -> ClientKey {
    let own =
        connection.map(|connection| connection.base_url.as_str()).filter(|url| !url.is_empty());
    ClientKey {
        connection: connection.map(|connection| (connection.id, connection.revision)),
        base: own.or(configured).map(str::to_owned),
    }
}

/// Returns the GitHub client of a connection, or the anonymous one.
pub(crate) fn github_client(
    shared: &Shared,
    connection: Option<&ScanConnection>,
) -> Result<GitHub, Error> {
    let key = client_key(connection, shared.config.scanner_github_url.as_deref());
    let base = key.base.clone();
    shared.hosts.github.get(key, clock::now(), || {
        Ok(GitHub::new(
            &shared.forge_clients,
            base.as_deref(),
            &github_auth(&shared.keyring, connection)?,
        )?)
    })
}

/// The authentication at GitHub.
fn github_auth(
    keyring: &Keyring,
    connection: Option<&ScanConnection>,
) -> Result<GitHubAuth, Error> {
    Ok(match connection {
        None => GitHubAuth::Anonymous,
        Some(connection) => {
            let secret = open_credential(keyring, connection)?;
            match connection.credential {
                ScanCredential::Token => GitHubAuth::Token(secret),
                ScanCredential::App => {
                    let unreadable =
                        || Error::Failed("the app's credential cannot be read".to_owned());
                    let app: AppCredential =
                        serde_json::from_str(secret.expose_secret()).map_err(|_| unreadable())?;
                    let installation = app.installation_id.parse().map_err(|_| unreadable())?;
                    GitHubAuth::App {
                        issuer: app.app_id,
                        installation,
                        key: SecretString::from(app.private_key),
                    }
                }
            }
        }
    })
}

/// Returns the GitLab client of a connection, or the anonymous one.
pub(crate) fn gitlab_client(
    shared: &Shared,
    connection: Option<&ScanConnection>,
) -> Result<GitLab, Error> {
    let key = client_key(connection, shared.config.scanner_gitlab_url.as_deref());
    let base = key.base.clone();
    shared.hosts.gitlab.get(key, clock::now(), || {
        let token = connection
            .map(|connection| open_credential(&shared.keyring, connection))
            .transpose()?;
        Ok(GitLab::new(&shared.forge_clients, base.as_deref(), token)?)
    })
}

async fn find_connection(shared: &Shared, scan: &Scan) -> Result<Option<ScanConnection>, Error> {
    let gone =
        || Error::Failed(format!("the connection `{}` no longer exists", scan.connection_name));
    let id: ScanConnectionId = match (scan.connection, scan.connection_name.is_empty()) {
        (Some(id), _) => id,
        (None, true) => return Ok(None),
        (None, false) => return Err(gone()),
    };
    match shared.store.scan_connection_get(scan.organization, id).await {
        Ok(found) => Ok(Some(found)),
        Err(construct_store::Error::NotFound { .. }) => Err(gone()),
        Err(error) => Err(error.into()),
    }
}

/// Opens the source of a scan.
pub(crate) async fn open(shared: &Shared, scan: &Scan) -> Result<OpenSource, Error> {
    let plain = |source: Box<dyn Source>| OpenSource { source, _upload: None };
    Ok(match scan.kind {
        ScanKind::Github => {
            let connection = find_connection(shared, scan).await?;
            plain(Box::new(github_client(shared, connection.as_ref())?.repository(&scan.location)?))
        }
        ScanKind::Gitlab => {
            let connection = find_connection(shared, scan).await?;
            plain(Box::new(gitlab_client(shared, connection.as_ref())?.project(&scan.location)?))
        }
        ScanKind::Folder => plain(Box::new(Folder::new(scan.location.clone().into()))),
        ScanKind::Upload => {
            let reference: blob::Reference =
                scan.archive.as_deref().and_then(|text| text.parse().ok()).ok_or_else(|| {
                    Error::Failed("the reference to the uploaded archive is malformed".to_owned())
                })?;
            let bytes = shared.blobs.get(&reference).await.map_err(|error| match error {
                blob::Error::Missing(_) => {
                    Error::Failed("the uploaded archive no longer exists".to_owned())
                }
                error => Error::retryable(&error),
            })?;
            let unreadable = || Error::Failed("the uploaded archive cannot be read".to_owned());
            let sealed = SealedSecret::from_bytes(&bytes).ok_or_else(unreadable)?;
            let archive = shared.keyring.open(&scan.organization.to_string(), &sealed);
            let archive = archive.map_err(Error::from_seal_error)?;
            // In the folder of unmasked files, which no interpreter sees and the cleanup deletes
            // after a crash.
            let unmasked_dir = cleanup::unmasked_dir(&shared.dir, scan.id);
            let writing = async {
                tokio::fs::create_dir_all(&unmasked_dir).await?;
                let folder =
                    tempfile::Builder::new().prefix(STAGING_PREFIX).tempdir_in(&unmasked_dir)?;
                tokio::fs::write(folder.path().join(ARCHIVE_NAME), archive.expose_secret()).await?;
                Ok(folder)
            };
            let folder = writing.await.map_err(|error: std::io::Error| Error::retryable(&error))?;
            let upload = Upload::new(folder.path().join(ARCHIVE_NAME))?;
            OpenSource { source: Box::new(upload), _upload: Some(folder) }
        }
    })
}
