//! TLS on the gateway's ports: certificates from files, reloaded when they change; and handshakes,
//! limited in time and number.
//!
//! With a client CA, clients without a certificate of it are refused. Such a certificate means
//! nothing beyond that: credentials identify callers (docs/identity.md).

pub(crate) mod accept;
pub(crate) mod stream;

use std::{
    path::PathBuf,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use anyhow::Context as _;
use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _},
    server::WebPkiClientVerifier,
};
use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;

use crate::Config;

/// How often the files are checked for changes. Their contents are compared, because a renewal may
/// keep the file times.
const RELOAD_INTERVAL: Duration = Duration::from_secs(5);

/// The paths of the certificates.
#[derive(Debug, Clone)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
}

/// The contents of the files.
struct Contents {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

/// The TLS configurations of two kinds of ports.
struct Configs {
    /// Negotiates HTTP/2 or HTTP/1.1.
    web: Arc<ServerConfig>,
    /// For lines or a WebSocket, without negotiation.
    lines: Arc<ServerConfig>,
    /// The digest of the files.
    digest: [u8; 32],
}

/// The current certificates. Clones share them.
#[derive(Clone)]
pub(crate) struct Tls {
    files: Files,
    current: Arc<RwLock<Configs>>,
}

impl Tls {
    /// Loads the certificates; `None` when TLS is not configured.
    ///
    /// # Errors
    /// When the files cannot be read or are invalid.
    pub(crate) async fn new(config: &Config) -> anyhow::Result<Option<Self>> {
        let (Some(certificate), Some(key)) =
            (&config.gateway_tls_certificate, &config.gateway_tls_key)
        else {
            return Ok(None);
        };
        let client_ca = config.gateway_tls_client_ca.clone();
        let files = Files { certificate: certificate.clone(), key: key.clone(), client_ca };
        let current = Arc::new(RwLock::new(files.read().await?.configs()?));
        Ok(Some(Self { files, current }))
    }

    /// For the port of gRPC and the other protocols.
    pub(crate) fn web(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).web)
    }

    /// For the operator protocol's port.
    pub(crate) fn lines(&self) -> Arc<ServerConfig> {
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).lines)
    }

    /// Reloads the files when they change. Incomplete or inconsistent files (a new key without its
    /// certificate) are ignored until they are consistent. Existing connections keep their
    /// configuration.
    pub(crate) async fn watch(self, draining: CancellationToken) {
        let mut last_error = None;
        loop {
            tokio::select! {
                () = draining.cancelled() => return,
                () = tokio::time::sleep(RELOAD_INTERVAL) => {}
            }
            match self.reload().await {
                Ok(true) => tracing::info!("certificate reloaded"),
                Ok(false) => {}
                // Once per reason.
                Err(error) => {
                    let message = format!("{error:#}");
                    if last_error.as_ref() != Some(&message) {
                        tracing::warn!(
                            error = message,
                            "the new certificate is invalid; the previous one is kept"
                        );
                    }
                    last_error = Some(message);
                    continue;
                }
            }
            last_error = None;
        }
    }

    /// Reloads the files. Returns whether they changed.
    pub(crate) async fn reload(&self) -> anyhow::Result<bool> {
        let contents = self.files.read().await?;
        if contents.digest() == self.current.read().unwrap_or_else(PoisonError::into_inner).digest {
            return Ok(false);
        }
        let configs = contents.configs()?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = configs;
        Ok(true)
    }
}

impl Files {
    async fn read(&self) -> anyhow::Result<Contents> {
        let read = async |path: &PathBuf| {
            tokio::fs::read(path)
                .await
                .with_context(|| format!("{} cannot be read", path.display()))
        };
        let client_ca = match &self.client_ca {
            Some(path) => Some(read(path).await?),
            None => None,
        };
        Ok(Contents {
            certificate: read(&self.certificate).await?,
            key: read(&self.key).await?,
            client_ca,
        })
    }
}

impl Contents {
    fn digest(&self) -> [u8; 32] {
        let mut digest = Sha256::new();
        for part in [&self.certificate, &self.key].into_iter().chain(&self.client_ca) {
            digest.update((part.len() as u64).to_be_bytes());
            digest.update(part);
        }
        digest.finalize().into()
    }

    fn configs(&self) -> anyhow::Result<Configs> {
        let chain = certificates(&self.certificate)
            .context("gateway_tls_certificate is no certificate in PEM")?;
        // An error of a key is not reported: it might quote the key.
        let key = PrivateKeyDer::from_pem_slice(&self.key)
            .map_err(|_| anyhow::anyhow!("gateway_tls_key is no private key in PEM"))?;
        let provider = Arc::new(ring::default_provider());
        let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(pem) => {
                let mut roots = RootCertStore::empty();
                for certificate in
                    certificates(pem).context("gateway_tls_client_ca is no certificate in PEM")?
                {
                    roots.add(certificate).context("gateway_tls_client_ca cannot be trusted")?;
                }
                let verifier =
                    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
                        .build()?;
                builder.with_client_cert_verifier(verifier)
            }
        };
        let lines = builder
            .with_single_cert(chain, key)
            .context("gateway_tls_certificate and gateway_tls_key do not belong together")?;
        let mut web = lines.clone();
        web.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        Ok(Configs { web: Arc::new(web), lines: Arc::new(lines), digest: self.digest() })
    }
}

/// All certificates of a file, at least one.
fn certificates(pem: &[u8]) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>()?;
    anyhow::ensure!(!all.is_empty(), "it holds none");
    Ok(all)
}
