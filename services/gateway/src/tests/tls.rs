//! TLS, with certificates that the tests create.

use std::{fs, io, path::PathBuf, sync::Arc, time::Duration};

use construct_proto::v1;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa,
    KeyPair,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject as _};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::{TcpSocket, TcpStream},
};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::harness::*;
use crate::Config;

/// A certificate authority.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
struct CertifiedKey {
    certificate: String,
    key: String,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("a key");
        Self { issuer: CertifiedIssuer::self_signed(params, key).expect("a certificate") }
    }

    fn pem(&self) -> String {
        self.issuer.pem()
    }

    fn issue(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> CertifiedKey {
        let mut params =
            CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])
                .expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("it is signed").pem();
        CertifiedKey { certificate, key: key.serialize_pem() }
    }
}

fn expire(params: &mut CertificateParams) {
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
}

/// The folder with a gateway's certificates.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        let path = std::env::temp_dir().join(format!("construct-tls-{}", uuid::Uuid::now_v7()));
        fs::create_dir(&path).expect("a directory");
        Self(path)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Replaces a file atomically, as a renewal does.
    fn put(&self, name: &str, text: &str) {
        let unfinished = self.file("unfinished");
        fs::write(&unfinished, text).expect("it is written");
        fs::rename(unfinished, self.file(name)).expect("it is replaced");
    }

    fn install(&self, made: &CertifiedKey) {
        self.put("tls.crt", &made.certificate);
        self.put("tls.key", &made.key);
    }

    fn config(&self) -> Config {
        Config {
            gateway_tls_certificate: Some(self.file("tls.crt")),
            gateway_tls_key: Some(self.file("tls.key")),
            ..Config::default()
        }
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        _ = fs::remove_dir_all(&self.0);
    }
}

fn trust(ca: &str) -> ClientTlsConfig {
    ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name("localhost")
}

async fn connect(
    gateway: &Gateway,
    tls: ClientTlsConfig,
) -> Result<Channel, tonic::transport::Error> {
    let endpoint =
        Endpoint::from_shared(format!("https://{}", gateway.address)).expect("an address");
    endpoint.tls_config(tls)?.connect().await
}

async fn list_agents(channel: Channel) -> Result<v1::ListAgentsResponse, tonic::Status> {
    let mut agents = v1::agent_service_client::AgentServiceClient::new(channel);
    agents.list_agents(v1::ListAgentsRequest::default()).await.map(tonic::Response::into_inner)
}

/// Waits until the gateway is ready; returns a connection.
async fn connect_when_ready(gateway: &Gateway, tls: &ClientTlsConfig) -> Channel {
    let ask = || async {
        let channel = connect(gateway, tls.clone()).await.map_err(|error| format!("{error:?}"))?;
        list_agents(channel.clone()).await.map(|_| channel).map_err(|status| format!("{status:?}"))
    };
    wait_until("the gateway is ready", ask, Result::is_ok).await.expect("it is ready")
}

/// An HTTP client that trusts only one authority.
fn http(ca: &str, version: reqwest::Version) -> reqwest::Client {
    _ = rustls::crypto::ring::default_provider().install_default();
    let ca = reqwest::Certificate::from_pem(ca.as_bytes()).expect("a certificate");
    let client = reqwest::Client::builder().tls_certs_only([ca]).no_proxy();
    let client = if version == reqwest::Version::HTTP_11 { client.http1_only() } else { client };
    client.build().expect("a client")
}

#[tokio::test]
async fn tls_serves_every_protocol_and_refuses_plain_text() {
    let (ca, other, folder) = (Authority::new("ca"), Authority::new("other"), Folder::new());
    folder.install(&ca.issue("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    connect_when_ready(&gateway, &trust(&ca.pem())).await;
    let wrong =
        connect(&gateway, trust(&other.pem())).await.expect_err("the authority is not trusted");
    assert!(format!("{wrong:?}").contains("UnknownIssuer"), "{wrong:?}");
    // Both versions of HTTP, as client and gateway negotiate.
    for version in [reqwest::Version::HTTP_11, reqwest::Version::HTTP_2] {
        let url = format!("https://localhost:{}/v1/agents", gateway.address.port());
        let answer = http(&ca.pem(), version).get(url).send().await.expect("it answers");
        assert_eq!((answer.status().as_u16(), answer.version()), (200, version));
    }
    // Plain text is not a handshake.
    let mut plain = TcpStream::connect(gateway.address).await.expect("it listens");
    plain.write_all(b"GET /v1/agents HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("it reads");
    let mut answer = Vec::new();
    // The connection may be closed or reset, but there is no HTTP answer.
    _ = wait_for("the connection is closed", plain.read_to_end(&mut answer)).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[tokio::test]
async fn operator_protocol_is_served_over_tls() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.install(&ca.issue("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    connect_when_ready(&gateway, &trust(&ca.pem())).await;
    let answer = list_sessions(&gateway, &ca.pem(), None).await.expect("it answers");
    assert_eq!((&answer["type"], &answer["id"]), (&json!("sessions"), &json!("1")), "{answer}");
}

/// A line larger than the buffers of the connection arrives completely.
#[tokio::test]
async fn long_operator_line_arrives_completely_over_tls() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.install(&ca.issue("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    let channel = connect_when_ready(&gateway, &trust(&ca.pem())).await;
    let (mut providers, mut models, mut agents) = (
        v1::model_provider_service_client::ModelProviderServiceClient::new(channel.clone()),
        v1::model_service_client::ModelServiceClient::new(channel.clone()),
        v1::agent_service_client::AgentServiceClient::new(channel),
    );
    providers.create_model_provider(provider("p")).await.expect("the provider is made");
    models.create_model(model("m")).await.expect("the model is made");
    agents.create_agent(agent("ada")).await.expect("the agent is made");
    let mut stream = connect_operator(&gateway, &ca.pem(), None).await.expect("it is accepted");
    let mut session = Value::Null;
    for _ in 0..4 {
        let messages = json!([{"role": "user", "content": [{"type": "text", "text": "long ".repeat(180_000)}]}]);
        let line = json!({"type": "dispatch", "agentID": "ada", "sessionID": session, "messages": messages});
        let made = ask(&mut stream, &line).await.expect("it answers");
        assert_eq!(made["stopReason"], "dispatched", "{made}");
        session = made["sessionID"].clone();
    }
    stream
        .write_all(
            format!("{}\n", json!({"type": "export_session", "sessionID": session})).as_bytes(),
        )
        .await
        .expect("it reads");
    stream.flush().await.expect("it reads");
    // Meanwhile all buffers fill.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut line = String::new();
    wait_for("the end of the line", stream.read_line(&mut line)).await.expect("it comes");
    let exported: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(exported["session"]["turns"].as_array().map(Vec::len), Some(4));
    assert!(line.len() > 3_600_000, "{}", line.len());
}

/// The list of sessions over the operator protocol, for a client that trusts this authority, with a
/// client certificate or none.
async fn list_sessions(
    gateway: &Gateway,
    ca: &str,
    client: Option<&CertifiedKey>,
) -> io::Result<Value> {
    ask(
        &mut connect_operator(gateway, ca, client).await?,
        &json!({"id": "1", "type": "list_sessions"}),
    )
    .await
}

type TlsConnection = BufReader<tokio_rustls::client::TlsStream<TcpStream>>;

/// Sends a line; returns the answer.
async fn ask(stream: &mut TlsConnection, line: &Value) -> io::Result<Value> {
    stream.write_all(format!("{line}\n").as_bytes()).await?;
    stream.flush().await?;
    let mut line = String::new();
    match wait_for("an answer", stream.read_line(&mut line)).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(serde_json::from_str(&line).expect("JSON")),
    }
}

/// A connection to the port of the operator protocol, with a small receive buffer.
async fn connect_operator(
    gateway: &Gateway,
    ca: &str,
    client: Option<&CertifiedKey>,
) -> io::Result<TlsConnection> {
    let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(der(ca)).expect("it is valid");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match client {
        None => builder.with_no_client_auth(),
        Some(made) => {
            let key = PrivateKeyDer::from_pem_slice(made.key.as_bytes()).expect("a key");
            builder
                .with_client_auth_cert(vec![der(&made.certificate)], key)
                .expect("they belong together")
        }
    };
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(16 * 1024)?;
    let stream = socket.connect(gateway.operator).await.expect("it listens");
    let name = ServerName::try_from("localhost").expect("a name");
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    Ok(BufReader::new(connector.connect(name, stream).await?))
}

#[tokio::test]
async fn client_ca_requires_a_valid_client_certificate() {
    let (ca, clients, other) =
        (Authority::new("ca"), Authority::new("clients"), Authority::new("other"));
    let folder = Folder::new();
    folder.install(&ca.issue("gateway", |_| {}));
    folder.put("client-ca.crt", &clients.pem());
    let config =
        Config { gateway_tls_client_ca: Some(folder.file("client-ca.crt")), ..folder.config() };
    let gateway = Gateway::start_unready(config).await;
    let trust_with = |made: &CertifiedKey| {
        trust(&ca.pem()).identity(Identity::from_pem(&made.certificate, &made.key))
    };
    connect_when_ready(&gateway, &trust_with(&clients.issue("me", |_| {}))).await;
    let refused = [
        ("none", trust(&ca.pem())),
        ("of another authority", trust_with(&other.issue("me", |_| {}))),
        ("expired", trust_with(&clients.issue("me", expire))),
    ];
    for (which, tls) in refused {
        // In TLS 1.3 the client learns of the refusal with its first request.
        let outcome = match connect(&gateway, tls).await {
            Ok(channel) => list_agents(channel).await.map_err(|status| format!("{status:?}")),
            Err(error) => Err(format!("{error:?}")),
        };
        assert!(outcome.is_err(), "{which}");
    }
}

#[tokio::test]
async fn client_ca_applies_to_the_operator_protocol() {
    let (ca, clients, other) =
        (Authority::new("ca"), Authority::new("clients"), Authority::new("other"));
    let folder = Folder::new();
    folder.install(&ca.issue("gateway", |_| {}));
    folder.put("client-ca.crt", &clients.pem());
    let config =
        Config { gateway_tls_client_ca: Some(folder.file("client-ca.crt")), ..folder.config() };
    let gateway = Gateway::start_unready(config).await;
    let me = clients.issue("me", |_| {});
    connect_when_ready(
        &gateway,
        &trust(&ca.pem()).identity(Identity::from_pem(&me.certificate, &me.key)),
    )
    .await;
    let answer = list_sessions(&gateway, &ca.pem(), Some(&me)).await.expect("it is accepted");
    assert_eq!(answer["type"], "sessions", "{answer}");
    let refused = [
        ("none", None),
        ("of another authority", Some(other.issue("me", |_| {}))),
        ("expired", Some(clients.issue("me", expire))),
    ];
    for (which, client) in refused {
        let outcome = list_sessions(&gateway, &ca.pem(), client.as_ref()).await;
        assert!(outcome.is_err(), "{which}: {outcome:?}");
    }
}

#[tokio::test]
async fn expired_gateway_certificate_is_refused_by_clients() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.install(&ca.issue("gateway", expire));
    let gateway = Gateway::start_unready(folder.config()).await;
    let refused = connect(&gateway, trust(&ca.pem())).await.expect_err("it has expired");
    assert!(format!("{refused:?}").contains("Expired"), "{refused:?}");
}

#[tokio::test]
async fn renewed_certificate_is_loaded_and_connections_stay_open() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.install(&ca.issue("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    let old = connect_when_ready(&gateway, &trust(&ca.pem())).await;
    let mut stream = v1::event_service_client::EventServiceClient::new(old.clone())
        .subscribe(v1::SubscribeRequest::default())
        .await
        .expect("it is accepted")
        .into_inner();
    let new_ca = Authority::new("new");
    let new = new_ca.issue("gateway", |_| {});
    folder.install(&new);
    let reconnect = || async {
        connect(&gateway, trust(&new_ca.pem())).await.map_err(|error| format!("{error:?}"))
    };
    wait_until("the new certificate is used", reconnect, Result::is_ok).await.expect("it is");
    connect(&gateway, trust(&ca.pem())).await.expect_err("the old one is not");
    // Existing connections stay open.
    list_agents(old.clone()).await.expect("it continues");
    v1::model_provider_service_client::ModelProviderServiceClient::new(old)
        .create_model_provider(provider("p"))
        .await
        .expect("it continues");
    let event =
        wait_for("an event", stream.message()).await.expect("it continues").expect("an event");
    assert_eq!(event.r#type, "provider.created");
}

#[tokio::test]
async fn slow_handshakes_delay_no_other_and_time_out() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.install(&ca.issue("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    connect_when_ready(&gateway, &trust(&ca.pem())).await;
    let mut slow = Vec::new();
    for _ in 0..50 {
        slow.push(TcpStream::connect(gateway.address).await.expect("it listens"));
    }
    let began = tokio::time::Instant::now();
    let fast = wait_for("a fast client connects", connect(&gateway, trust(&ca.pem())))
        .await
        .expect("it is accepted");
    list_agents(fast).await.expect("it is served");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let mut byte = [0];
    for stream in &mut slow {
        let closed = wait_for("a slow client is disconnected", stream.read(&mut byte)).await;
        assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    }
}

#[tokio::test]
async fn invalid_certificate_files_are_reported_at_start() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    let (made, another) = (ca.issue("gateway", |_| {}), ca.issue("gateway", |_| {}));
    let load_error = async || {
        let error = crate::tls::Tls::new(&folder.config()).await.err().expect("it is refused");
        format!("{error:#}")
    };
    assert!(
        load_error().await.contains("tls.crt cannot be read")
            || load_error().await.contains("tls.key cannot be read")
    );
    folder.install(&CertifiedKey { certificate: "nothing".into(), key: made.key.clone() });
    assert!(load_error().await.contains("gateway_tls_certificate is no certificate"));
    folder.install(&CertifiedKey { certificate: made.certificate.clone(), key: "secret".into() });
    let error = load_error().await;
    assert!(
        error.contains("gateway_tls_key is no private key") && !error.contains("secret"),
        "{error}"
    );
    folder.install(&CertifiedKey { certificate: made.certificate.clone(), key: another.key });
    assert!(load_error().await.contains("do not belong together"));
    folder.install(&made);
    let tls = crate::tls::Tls::new(&folder.config())
        .await
        .expect("it is fine")
        .expect("it is configured");
    assert!(!tls.reload().await.expect("nothing has changed"));
    // A certificate without its new key is not loaded: the previous one stays.
    let (new, before) = (ca.issue("gateway", |_| {}), tls.web());
    folder.put("tls.crt", &new.certificate);
    assert!(tls.reload().await.is_err() && Arc::ptr_eq(&tls.web(), &before));
    folder.put("tls.key", &new.key);
    assert!(tls.reload().await.expect("it is whole") && !Arc::ptr_eq(&tls.web(), &before));
}
