//! TLS on the gateway's ports: certificates from files, read again when they change; and
//! handshakes, bounded in time and number.
//!
//! With a client CA, who has no certificate of it does not come in at all. What such a certificate
//! says means nothing beyond that: who somebody is, is judged by their credentials
//! (docs/identity.md).

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

/// How often it is looked whether the files have changed. They are read, because what renews them
/// may keep their times.
const RELOAD_INTERVAL: Duration = Duration::from_secs(5);

/// Where the certificates are.
#[derive(Debug, Clone)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
    client_ca: Option<PathBuf>,
}

/// What the files hold.
struct Contents {
    certificate: Vec<u8>,
    key: Vec<u8>,
    client_ca: Option<Vec<u8>>,
}

/// What connections are secured with, for two kinds of ports.
struct Configs {
    /// HTTP/2 and HTTP/1.1, whichever a client wants.
    web: Arc<ServerConfig>,
    /// Lines, or a WebSocket: nothing is agreed on before.
    lines: Arc<ServerConfig>,
    /// Of what it was made from.
    digest: [u8; 32],
}

/// The certificates, as they are at the moment. Clones are the same.
#[derive(Clone)]
pub(crate) struct Tls {
    files: Files,
    current: Arc<RwLock<Configs>>,
}

impl Tls {
    /// None, when the gateway is to speak without.
    ///
    /// # Errors
    /// When the files cannot be read, or are not what they should be.
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

    /// Looks again and again whether the files have changed. What is not complete or does not fit
    /// together (the key is there and its certificate is not yet) is left until it does;
    /// connections that are there go on as they are.
    pub(crate) async fn watch(self, draining: CancellationToken) {
        let mut last_error = None;
        loop {
            tokio::select! {
                () = draining.cancelled() => return,
                () = tokio::time::sleep(RELOAD_INTERVAL) => {}
            }
            match self.reload().await {
                Ok(true) => tracing::info!("the certificate was read again"),
                Ok(false) => {}
                // Once for each reason.
                Err(error) => {
                    let message = format!("{error:#}");
                    if last_error.as_ref() != Some(&message) {
                        tracing::warn!(
                            error = message,
                            "the new certificate cannot be used; the one before stays"
                        );
                    }
                    last_error = Some(message);
                    continue;
                }
            }
            last_error = None;
        }
    }

    /// Takes what the files hold. Gives whether it is something else than before.
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
        // What is wrong with a key is not told: it might be quoted.
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

/// All certificates of a file, one at least.
fn certificates(pem: &[u8]) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let all: Vec<_> = CertificateDer::pem_slice_iter(pem).collect::<Result<_, _>>()?;
    anyhow::ensure!(!all.is_empty(), "it holds none");
    Ok(all)
}
