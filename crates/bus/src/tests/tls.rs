//! NATS over TLS, with generated certificates.

use std::{fs, path::Path};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use tempfile::TempDir;

use super::{task, wake};
use crate::{Bus, ConnectOptions, Tls, User, subject::TaskWake, testing::NatsServer};

/// A certificate authority.
struct Authority(CertifiedIssuer<'static, KeyPair>);

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        Self(CertifiedIssuer::self_signed(params, key).expect("a certificate"))
    }

    /// Writes `name.crt`, `name.key` and the authority's certificate `name-ca.crt` into the folder.
    fn issue(&self, folder: &Path, name: &str) {
        let mut params =
            CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])
                .expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("it is signed");
        let put =
            |file: String, text: String| fs::write(folder.join(file), text).expect("it is written");
        put(format!("{name}.crt"), certificate.pem());
        put(format!("{name}.key"), key.serialize_pem());
        put(format!("{name}-ca.crt"), self.0.pem());
    }
}

fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let authority = Authority::new("ours");
    authority.issue(folder.path(), "server");
    authority.issue(folder.path(), "client");
    Authority::new("theirs").issue(folder.path(), "stranger");
    folder
}

async fn connect(
    server: &NatsServer,
    scheme: &str,
    tls: Tls,
) -> Result<Bus, crate::connect::Error> {
    let url = server.url_for(User::Reconciler).replace("nats://", scheme);
    Bus::connect(&url, ConnectOptions::new("test").user(User::Reconciler).tls(tls)).await
}

async fn works(bus: &Bus) {
    bus.ensure_topology().await.expect("the server accepts the topology");
    bus.publish(&TaskWake::new(task(7)), &wake(task(7), "x")).await.expect("it is published");
}

#[tokio::test]
async fn tls_server_of_configured_authority_is_trusted() {
    let folder = folder();
    let file = |name: &str| folder.path().join(name);
    let lines = format!(
        "tls {{ cert_file: {:?}, key_file: {:?} }}",
        file("server.crt"),
        file("server.key")
    );
    let server = NatsServer::start_configured(&lines).await;
    let trusting = |ca: &str| Tls { ca: Some(file(ca)), certificate: None };
    for scheme in ["tls://", "nats://"] {
        works(&connect(&server, scheme, trusting("server-ca.crt")).await.expect("it is trusted"))
            .await;
    }
    connect(&server, "tls://", trusting("stranger-ca.crt"))
        .await
        .expect_err("an unknown authority issued it");
    connect(&server, "tls://", Tls::default())
        .await
        .expect_err("the system does not trust its authority");
    let missing =
        connect(&server, "tls://", trusting("none.crt")).await.expect_err("there is no such file");
    assert!(!missing.is_retryable() && missing.to_string().contains("none.crt"), "{missing:?}");
    fs::write(file("empty.crt"), "nothing").expect("it is written");
    let empty =
        connect(&server, "tls://", trusting("empty.crt")).await.expect_err("it is no certificate");
    assert!(!empty.is_retryable() && empty.to_string().contains("empty.crt"), "{empty:?}");
}

#[tokio::test]
async fn tls_client_certificate_is_sent_when_required() {
    let folder = folder();
    let file = |name: &str| folder.path().join(name);
    let lines = format!(
        "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: true }}",
        file("server.crt"),
        file("server.key"),
        file("client-ca.crt")
    );
    let server = NatsServer::start_configured(&lines).await;
    let showing = |certificate| Tls { ca: Some(file("server-ca.crt")), certificate };
    let own = |name: &str| Some((file(&format!("{name}.crt")), file(&format!("{name}.key"))));
    works(&connect(&server, "tls://", showing(own("client"))).await.expect("it is let in")).await;
    connect(&server, "tls://", showing(own("stranger")))
        .await
        .expect_err("an unknown authority issued it");
    connect(&server, "tls://", showing(None)).await.expect_err("it shows none");
}

#[tokio::test]
async fn tls_scheme_refuses_plaintext_server() {
    let server = NatsServer::start().await;
    connect(&server, "tls://", Tls::default()).await.expect_err("the server speaks no TLS");
}
