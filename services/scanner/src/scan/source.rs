//! Where a scan's files come from, with what opens it.

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
    hosts::Key,
    repository::{Folder, GitHub, GitHubAuth, GitLab, STAGING, Source, Upload},
    shared::Shared,
};

/// What an archive is called that was sent.
const ARCHIVE: &str = "archive";

/// A source, and what has to live as long as it.
pub(crate) struct Opened {
    pub(crate) source: Box<dyn Source>,
    _upload: Option<TempDir>,
}

/// As the gateway seals it.
#[derive(Deserialize)]
struct App {
    app_id: String,
    installation_id: String,
    private_key: String,
}

/// What opens a connection.
fn secret(keyring: &Keyring, connection: &ScanConnection) -> Result<SecretString, Error> {
    let opened = keyring.open(&connection.id.to_string(), &connection.sealed);
    let bytes = opened.map_err(|error| Error::Failed(error.to_string()))?;
    let text = std::str::from_utf8(bytes.expose_secret());
    Ok(SecretString::from(
        text.map_err(|_| Error::Failed("the credential cannot be read".to_owned()))?,
    ))
}

/// Which client reaches a host: at the connection's address, or the one that is configured, or its
/// own.
fn key(connection: Option<&ScanConnection>, configured: Option<&str>) -> Key {
    let own =
        connection.map(|connection| connection.base_url.as_str()).filter(|url| !url.is_empty());
    Key {
        connection: connection.map(|connection| (connection.id, connection.revision)),
        base: own.or(configured).map(str::to_owned),
    }
}

/// GitHub, as a connection reaches it, or as everybody does.
pub(crate) fn github(
    shared: &Shared,
    connection: Option<&ScanConnection>,
) -> Result<GitHub, Error> {
    let key = key(connection, shared.config.scanner_github_url.as_deref());
    let base = key.base.clone();
    shared.hosts.github.get(key, clock::now(), || {
        Ok(GitHub::new(&shared.reach, base.as_deref(), &auth(&shared.keyring, connection)?)?)
    })
}

/// What GitHub is shown.
fn auth(keyring: &Keyring, connection: Option<&ScanConnection>) -> Result<GitHubAuth, Error> {
    Ok(match connection {
        None => GitHubAuth::Anonymous,
        Some(connection) => {
            let secret = secret(keyring, connection)?;
            match connection.credential {
                ScanCredential::Token => GitHubAuth::Token(secret),
                ScanCredential::App => {
                    let unreadable =
                        || Error::Failed("the app's credential cannot be read".to_owned());
                    let app: App =
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

/// GitLab in the same way.
pub(crate) fn gitlab(
    shared: &Shared,
    connection: Option<&ScanConnection>,
) -> Result<GitLab, Error> {
    let key = key(connection, shared.config.scanner_gitlab_url.as_deref());
    let base = key.base.clone();
    shared.hosts.gitlab.get(key, clock::now(), || {
        let token = connection.map(|connection| secret(&shared.keyring, connection)).transpose()?;
        Ok(GitLab::new(&shared.reach, base.as_deref(), token)?)
    })
}

async fn connection(shared: &Shared, scan: &Scan) -> Result<Option<ScanConnection>, Error> {
    let gone = || Error::Failed(format!("the connection `{}` is gone", scan.connection_name));
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

/// The source of a scan.
pub(crate) async fn open(shared: &Shared, scan: &Scan) -> Result<Opened, Error> {
    let plain = |source: Box<dyn Source>| Opened { source, _upload: None };
    Ok(match scan.kind {
        ScanKind::Github => {
            let connection = connection(shared, scan).await?;
            plain(Box::new(github(shared, connection.as_ref())?.repository(&scan.location)?))
        }
        ScanKind::Gitlab => {
            let connection = connection(shared, scan).await?;
            plain(Box::new(gitlab(shared, connection.as_ref())?.project(&scan.location)?))
        }
        ScanKind::Folder => plain(Box::new(Folder::new(scan.location.clone().into()))),
        ScanKind::Upload => {
            let reference: blob::Reference =
                scan.archive.as_deref().and_then(|text| text.parse().ok()).ok_or_else(|| {
                    Error::Failed("the archive that was sent cannot be named".to_owned())
                })?;
            let bytes = shared.blobs.get(&reference).await.map_err(|error| match error {
                blob::Error::Missing(_) => {
                    Error::Failed("the archive that was sent is gone".to_owned())
                }
                error => Error::retryable(&error),
            })?;
            let unreadable =
                || Error::Failed("the archive that was sent cannot be read".to_owned());
            let sealed = SealedSecret::from_bytes(&bytes).ok_or_else(unreadable)?;
            let archive = shared.keyring.open(&scan.organization.to_string(), &sealed);
            let archive = archive.map_err(Error::from_seal_error)?;
            // Where no interpreter sees it, as nothing in it is masked, and where it is swept when
            // this process dies.
            let beside = cleanup::unmasked_dir(&shared.dir, scan.id);
            let written = async {
                tokio::fs::create_dir_all(&beside).await?;
                let folder = tempfile::Builder::new().prefix(STAGING).tempdir_in(&beside)?;
                tokio::fs::write(folder.path().join(ARCHIVE), archive.expose_secret()).await?;
                Ok(folder)
            };
            let folder = written.await.map_err(|error: std::io::Error| Error::retryable(&error))?;
            let upload = Upload::new(folder.path().join(ARCHIVE))?;
            Opened { source: Box::new(upload), _upload: Some(folder) }
        }
    })
}
