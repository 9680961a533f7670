//! TLS: with certificates that are made here.

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

/// Who vouches for certificates.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, in PEM.
struct Made {
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

    fn vouch(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Made {
        let mut params =
            CertificateParams::new(vec!["localhost".to_owned(), "127.0.0.1".to_owned()])
                .expect("names");
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("it is signed").pem();
        Made { certificate, key: key.serialize_pem() }
    }
}

fn expired(params: &mut CertificateParams) {
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2021, 1, 1);
}

/// Where a gateway's certificates are.
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

    /// As a renewal does it: whole, under the same name.
    fn put(&self, name: &str, text: &str) {
        let unfinished = self.file("unfinished");
        fs::write(&unfinished, text).expect("it is written");
        fs::rename(unfinished, self.file(name)).expect("it is put there");
    }

    fn take(&self, made: &Made) {
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

fn trusting(ca: &str) -> ClientTlsConfig {
    ClientTlsConfig::new().ca_certificate(Certificate::from_pem(ca)).domain_name("localhost")
}

async fn connected(
    gateway: &Gateway,
    tls: ClientTlsConfig,
) -> Result<Channel, tonic::transport::Error> {
    let endpoint =
        Endpoint::from_shared(format!("https://{}", gateway.address)).expect("an address");
    endpoint.tls_config(tls)?.connect().await
}

async fn lists(channel: Channel) -> Result<v1::ListAgentsResponse, tonic::Status> {
    let mut agents = v1::agent_service_client::AgentServiceClient::new(channel);
    agents.list_agents(v1::ListAgentsRequest::default()).await.map(tonic::Response::into_inner)
}

/// Waits until it serves; gives a connection.
async fn ready(gateway: &Gateway, tls: &ClientTlsConfig) -> Channel {
    let ask = || async {
        let channel =
            connected(gateway, tls.clone()).await.map_err(|error| format!("{error:?}"))?;
        lists(channel.clone()).await.map(|_| channel).map_err(|status| format!("{status:?}"))
    };
    wait_until("the gateway is ready", ask, Result::is_ok).await.expect("it is ready")
}

/// An HTTP client that trusts one authority alone.
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
    folder.take(&ca.vouch("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    ready(&gateway, &trusting(&ca.pem())).await;
    let wrong =
        connected(&gateway, trusting(&other.pem())).await.expect_err("nobody vouches for it");
    assert!(format!("{wrong:?}").contains("UnknownIssuer"), "{wrong:?}");
    // Both versions of HTTP, as the client and the gateway agree.
    for version in [reqwest::Version::HTTP_11, reqwest::Version::HTTP_2] {
        let url = format!("https://localhost:{}/v1/agents", gateway.address.port());
        let answer = http(&ca.pem(), version).get(url).send().await.expect("it answers");
        assert_eq!((answer.status().as_u16(), answer.version()), (200, version));
    }
    // Plain text is no handshake.
    let mut plain = TcpStream::connect(gateway.address).await.expect("it listens");
    plain.write_all(b"GET /v1/agents HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("it reads");
    let mut answer = Vec::new();
    // Whether the connection is closed or reset: nothing of HTTP comes.
    _ = wait_for("the connection is closed", plain.read_to_end(&mut answer)).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
}

#[tokio::test]
async fn operator_protocol_is_served_over_tls() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.take(&ca.vouch("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    ready(&gateway, &trusting(&ca.pem())).await;
    let answer = sessions(&gateway, &ca.pem(), None).await.expect("it answers");
    assert_eq!((&answer["type"], &answer["id"]), (&json!("sessions"), &json!("1")), "{answer}");
}

/// Lines that don't fit into what is on its way come to their end.
#[tokio::test]
async fn long_operator_line_arrives_completely_over_tls() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.take(&ca.vouch("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    let channel = ready(&gateway, &trusting(&ca.pem())).await;
    let (mut providers, mut models, mut agents) = (
        v1::model_provider_service_client::ModelProviderServiceClient::new(channel.clone()),
        v1::model_service_client::ModelServiceClient::new(channel.clone()),
        v1::agent_service_client::AgentServiceClient::new(channel),
    );
    providers.create_model_provider(provider("p")).await.expect("the provider is made");
    models.create_model(model("m")).await.expect("the model is made");
    agents.create_agent(agent("ada")).await.expect("the agent is made");
    let mut stream = secured(&gateway, &ca.pem(), None).await.expect("it comes in");
    let mut session = Value::Null;
    for _ in 0..4 {
        let said = json!([{"role": "user", "content": [{"type": "text", "text": "long ".repeat(180_000)}]}]);
        let line =
            json!({"type": "dispatch", "agentID": "ada", "sessionID": session, "messages": said});
        let made = asked(&mut stream, &line).await.expect("it answers");
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
    // Meanwhile all that there is room for is filled.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let mut line = String::new();
    wait_for("the end of the line", stream.read_line(&mut line)).await.expect("it comes");
    let exported: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(exported["session"]["turns"].as_array().map(Vec::len), Some(4));
    assert!(line.len() > 3_600_000, "{}", line.len());
}

/// What is answered over the operator protocol to who trusts an authority, and shows a certificate
/// or none.
async fn sessions(gateway: &Gateway, ca: &str, shown: Option<&Made>) -> io::Result<Value> {
    asked(&mut secured(gateway, ca, shown).await?, &json!({"id": "1", "type": "list_sessions"}))
        .await
}

type Secured = BufReader<tokio_rustls::client::TlsStream<TcpStream>>;

/// The answer to a line.
async fn asked(stream: &mut Secured, line: &Value) -> io::Result<Value> {
    stream.write_all(format!("{line}\n").as_bytes()).await?;
    stream.flush().await?;
    let mut line = String::new();
    match wait_for("an answer", stream.read_line(&mut line)).await? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(serde_json::from_str(&line).expect("JSON")),
    }
}

/// A connection to the operator protocol's port that has not much room.
async fn secured(gateway: &Gateway, ca: &str, shown: Option<&Made>) -> io::Result<Secured> {
    let der = |pem: &str| CertificateDer::from_pem_slice(pem.as_bytes()).expect("a certificate");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(der(ca)).expect("it is taken");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots);
    let config = match shown {
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
    folder.take(&ca.vouch("gateway", |_| {}));
    folder.put("client-ca.crt", &clients.pem());
    let config =
        Config { gateway_tls_client_ca: Some(folder.file("client-ca.crt")), ..folder.config() };
    let gateway = Gateway::start_unready(config).await;
    let showing = |made: &Made| {
        trusting(&ca.pem()).identity(Identity::from_pem(&made.certificate, &made.key))
    };
    ready(&gateway, &showing(&clients.vouch("me", |_| {}))).await;
    let refused = [
        ("none", trusting(&ca.pem())),
        ("of another authority", showing(&other.vouch("me", |_| {}))),
        ("expired", showing(&clients.vouch("me", expired))),
    ];
    for (which, tls) in refused {
        // In TLS 1.3 a client hears of it with its first request.
        let outcome = match connected(&gateway, tls).await {
            Ok(channel) => lists(channel).await.map_err(|status| format!("{status:?}")),
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
    folder.take(&ca.vouch("gateway", |_| {}));
    folder.put("client-ca.crt", &clients.pem());
    let config =
        Config { gateway_tls_client_ca: Some(folder.file("client-ca.crt")), ..folder.config() };
    let gateway = Gateway::start_unready(config).await;
    let me = clients.vouch("me", |_| {});
    ready(&gateway, &trusting(&ca.pem()).identity(Identity::from_pem(&me.certificate, &me.key)))
        .await;
    let answer = sessions(&gateway, &ca.pem(), Some(&me)).await.expect("it comes in");
    assert_eq!(answer["type"], "sessions", "{answer}");
    let refused = [
        ("none", None),
        ("of another authority", Some(other.vouch("me", |_| {}))),
        ("expired", Some(clients.vouch("me", expired))),
    ];
    for (which, shown) in refused {
        let outcome = sessions(&gateway, &ca.pem(), shown.as_ref()).await;
        assert!(outcome.is_err(), "{which}: {outcome:?}");
    }
}

#[tokio::test]
async fn expired_gateway_certificate_is_refused_by_clients() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.take(&ca.vouch("gateway", expired));
    let gateway = Gateway::start_unready(folder.config()).await;
    let refused = connected(&gateway, trusting(&ca.pem())).await.expect_err("it has expired");
    assert!(format!("{refused:?}").contains("Expired"), "{refused:?}");
}

#[tokio::test]
async fn renewed_certificate_is_loaded_and_connections_stay_open() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.take(&ca.vouch("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    let old = ready(&gateway, &trusting(&ca.pem())).await;
    let mut stream = v1::event_service_client::EventServiceClient::new(old.clone())
        .subscribe(v1::SubscribeRequest::default())
        .await
        .expect("it is accepted")
        .into_inner();
    let new_ca = Authority::new("new");
    let new = new_ca.vouch("gateway", |_| {});
    folder.take(&new);
    let asks = || async {
        connected(&gateway, trusting(&new_ca.pem())).await.map_err(|error| format!("{error:?}"))
    };
    wait_until("the new certificate is used", asks, Result::is_ok).await.expect("it is");
    connected(&gateway, trusting(&ca.pem())).await.expect_err("the old one is not");
    // The connections that were there are as they were.
    lists(old.clone()).await.expect("it goes on");
    v1::model_provider_service_client::ModelProviderServiceClient::new(old)
        .create_model_provider(provider("p"))
        .await
        .expect("it goes on");
    let event = wait_for("an event", stream.message()).await.expect("it goes on").expect("an event");
    assert_eq!(event.r#type, "provider.created");
}

#[tokio::test]
async fn slow_handshakes_delay_no_other_and_time_out() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    folder.take(&ca.vouch("gateway", |_| {}));
    let gateway = Gateway::start_unready(folder.config()).await;
    ready(&gateway, &trusting(&ca.pem())).await;
    let mut slow = Vec::new();
    for _ in 0..50 {
        slow.push(TcpStream::connect(gateway.address).await.expect("it listens"));
    }
    let began = tokio::time::Instant::now();
    let quick = wait_for("a quick one comes in", connected(&gateway, trusting(&ca.pem())))
        .await
        .expect("it comes in");
    lists(quick).await.expect("it is served");
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let mut byte = [0];
    for stream in &mut slow {
        let cut = wait_for("a slow one is cut off", stream.read(&mut byte)).await;
        assert!(matches!(cut, Ok(0) | Err(_)), "{cut:?}");
    }
}

#[tokio::test]
async fn invalid_certificate_files_are_reported_at_start() {
    let (ca, folder) = (Authority::new("ca"), Folder::new());
    let (made, another) = (ca.vouch("gateway", |_| {}), ca.vouch("gateway", |_| {}));
    let told = async || {
        let error = crate::tls::Tls::new(&folder.config()).await.err().expect("it is refused");
        format!("{error:#}")
    };
    assert!(
        told().await.contains("tls.crt cannot be read")
            || told().await.contains("tls.key cannot be read")
    );
    folder.take(&Made { certificate: "nothing".into(), key: made.key.clone() });
    assert!(told().await.contains("gateway_tls_certificate is no certificate"));
    folder.take(&Made { certificate: made.certificate.clone(), key: "secret".into() });
    let words = told().await;
    assert!(
        words.contains("gateway_tls_key is no private key") && !words.contains("secret"),
        "{words}"
    );
    folder.take(&Made { certificate: made.certificate.clone(), key: another.key });
    assert!(told().await.contains("do not belong together"));
    folder.take(&made);
    let tls = crate::tls::Tls::new(&folder.config())
        .await
        .expect("it is fine")
        .expect("it is configured");
    assert!(!tls.look().await.expect("nothing has changed"));
    // A certificate whose key has not come yet is not taken: the one before stays.
    let (new, before) = (ca.vouch("gateway", |_| {}), tls.web());
    folder.put("tls.crt", &new.certificate);
    assert!(tls.look().await.is_err() && Arc::ptr_eq(&tls.web(), &before));
    folder.put("tls.key", &new.key);
    assert!(tls.look().await.expect("it is whole") && !Arc::ptr_eq(&tls.web(), &before));
}
