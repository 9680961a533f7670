//! The connection to the gateway.

use std::{
    fs,
    net::IpAddr,
    path::Path,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use construct_proto::v1::{
    agent_service_client::AgentServiceClient, approval_service_client::ApprovalServiceClient,
    audit_service_client::AuditServiceClient, budget_service_client::BudgetServiceClient,
    diagnosis_service_client::DiagnosisServiceClient, event_service_client::EventServiceClient,
    file_service_client::FileServiceClient, key_service_client::KeyServiceClient,
    message_service_client::MessageServiceClient,
    model_provider_service_client::ModelProviderServiceClient,
    model_service_client::ModelServiceClient, model_token_service_client::ModelTokenServiceClient,
    organization_service_client::OrganizationServiceClient,
    recovery_service_client::RecoveryServiceClient, scan_service_client::ScanServiceClient,
    schedule_service_client::ScheduleServiceClient, secret_service_client::SecretServiceClient,
    state_service_client::StateServiceClient, task_service_client::TaskServiceClient,
    usage_service_client::UsageServiceClient,
};
use tonic::{
    Request, Status,
    codegen::http::uri::Authority,
    metadata::{Ascii, MetadataValue},
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity},
};
use uuid::Uuid;

use crate::{
    context::{Target, TlsArgs},
    failure::{Failure, is_retryable},
};

/// The maximum bytes of a response: a message of a transcript may hold a large output.
const MAX_RESPONSE_BYTES: usize = 64 * 1024 * 1024;

/// The timeout of a unary call. Streams have none.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The timeout over a Unix socket: the first call may start the mesh with its servers
/// (`construct daemon`).
const START_TIMEOUT: Duration = Duration::from_secs(180);

/// Whether calls go over a Unix socket. A process talks to one gateway.
static OVER_SOCKET: AtomicBool = AtomicBool::new(false);

/// The time between attempts.
const RETRY_DELAY: Duration = Duration::from_millis(200);

/// A client of the mesh's public API. Cheap to clone. Connects when first used, and reconnects.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    channel: AuthenticatedChannel,
    authorization: Option<Authorization>,
}

/// The `authorization` header of requests. Shared, so that a session can be renewed while a command
/// runs.
type Authorization = Arc<RwLock<MetadataValue<Ascii>>>;

/// A connection that adds credentials to requests.
pub(crate) type AuthenticatedChannel = InterceptedService<Channel, Credentials>;

/// The caller's credentials, added to every request. The key is marked as sensitive, so that
/// nothing prints it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Credentials {
    authorization: Option<Authorization>,
    organization: Option<MetadataValue<Ascii>>,
}

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(authorization) = &self.authorization {
            let authorization =
                authorization.read().unwrap_or_else(PoisonError::into_inner).clone();
            request.metadata_mut().insert("authorization", authorization);
        }
        if let Some(organization) = &self.organization {
            request.metadata_mut().insert("x-organization-id", organization.clone());
        }
        Ok(request)
    }
}

impl Gateway {
    /// # Errors
    /// When the address is invalid, or the key or the organization cannot be a header.
    pub(crate) fn new(target: &Target) -> Result<Self, Failure> {
        let mut endpoint = Self::parse_address(&target.address)?;
        let secure = endpoint.uri().scheme_str() == Some("https");
        if secure {
            let unusable = |error| {
                Failure::usage(format!("the certificates cannot be used: {}", error_chain(&error)))
            };
            endpoint = endpoint.tls_config(tls_config(&target.tls)?).map_err(unusable)?;
        }
        let authorization = target
            .key
            .as_deref()
            .map(bearer)
            .transpose()?
            .map(|value| Arc::new(RwLock::new(value)));
        let organization =
            target.organization.as_deref().map(|id| header("organization", id)).transpose()?;
        if authorization.is_some() && !secure && !is_local(&target.address) {
            eprintln!("warning: the API key is sent to {} without encryption", target.address);
        }
        let credentials = Credentials { authorization: authorization.clone(), organization };
        let mut endpoint = endpoint.connect_timeout(Duration::from_secs(3)).tcp_nodelay(true);
        // The peer of a local socket cannot vanish unnoticed, but it may have to be started first.
        if target.address.starts_with("unix:") {
            OVER_SOCKET.store(true, Ordering::Relaxed);
        } else {
            // Detects a gateway that vanished without closing the connection.
            endpoint = endpoint
                .http2_keep_alive_interval(Duration::from_secs(10))
                .keep_alive_timeout(Duration::from_secs(5))
                .keep_alive_while_idle(true);
        }
        Ok(Self {
            channel: InterceptedService::new(endpoint.connect_lazy(), credentials),
            authorization,
        })
    }

    /// Replaces the token for future calls.
    ///
    /// # Errors
    /// When it cannot be a header.
    pub(crate) fn set_token(&self, token: &str) -> Result<(), Failure> {
        if let Some(authorization) = &self.authorization {
            *authorization.write().unwrap_or_else(PoisonError::into_inner) = bearer(token)?;
        }
        Ok(())
    }

    /// Parses a gateway address.
    ///
    /// # Errors
    /// When it is invalid.
    pub(crate) fn parse_address(url: &str) -> Result<Endpoint, Failure> {
        let invalid = || {
            Failure::usage(format!(
                "{url} is not an address like https://construct.example.com, http://127.0.0.1:60080 or unix:/run/construct/socket"
            ))
        };
        let endpoint = Endpoint::from_shared(url.to_owned()).map_err(|_| invalid())?;
        if !url.starts_with("unix:")
            && !matches!(endpoint.uri().scheme_str(), Some("http" | "https"))
        {
            return Err(invalid());
        }
        Ok(endpoint)
    }

    pub(crate) fn scans(&self) -> ScanServiceClient<AuthenticatedChannel> {
        ScanServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn files(&self) -> FileServiceClient<AuthenticatedChannel> {
        FileServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn organizations(&self) -> OrganizationServiceClient<AuthenticatedChannel> {
        OrganizationServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn keys(&self) -> KeyServiceClient<AuthenticatedChannel> {
        KeyServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn agents(&self) -> AgentServiceClient<AuthenticatedChannel> {
        AgentServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn approvals(&self) -> ApprovalServiceClient<AuthenticatedChannel> {
        ApprovalServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn audit(&self) -> AuditServiceClient<AuthenticatedChannel> {
        AuditServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn budgets(&self) -> BudgetServiceClient<AuthenticatedChannel> {
        BudgetServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn diagnosis(&self) -> DiagnosisServiceClient<AuthenticatedChannel> {
        DiagnosisServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn recovery(&self) -> RecoveryServiceClient<AuthenticatedChannel> {
        RecoveryServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn tasks(&self) -> TaskServiceClient<AuthenticatedChannel> {
        TaskServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn messages(&self) -> MessageServiceClient<AuthenticatedChannel> {
        MessageServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn models(&self) -> ModelServiceClient<AuthenticatedChannel> {
        ModelServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn model_providers(&self) -> ModelProviderServiceClient<AuthenticatedChannel> {
        ModelProviderServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn model_tokens(&self) -> ModelTokenServiceClient<AuthenticatedChannel> {
        ModelTokenServiceClient::new(self.channel.clone())
    }

    pub(crate) fn schedules(&self) -> ScheduleServiceClient<AuthenticatedChannel> {
        ScheduleServiceClient::new(self.channel.clone())
            .max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn secrets(&self) -> SecretServiceClient<AuthenticatedChannel> {
        SecretServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn states(&self) -> StateServiceClient<AuthenticatedChannel> {
        StateServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn usage(&self) -> UsageServiceClient<AuthenticatedChannel> {
        UsageServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }

    pub(crate) fn events(&self) -> EventServiceClient<AuthenticatedChannel> {
        EventServiceClient::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES)
    }
}

fn header(name: &str, text: &str) -> Result<MetadataValue<Ascii>, Failure> {
    text.parse().map_err(|_| Failure::usage(format!("the {name} has invalid characters")))
}

fn bearer(key: &str) -> Result<MetadataValue<Ascii>, Failure> {
    let mut value = header("API key", &format!("Bearer {key}"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// The trusted authorities and the client certificate.
fn tls_config(args: &TlsArgs) -> Result<ClientTlsConfig, Failure> {
    let mut config = match &args.ca {
        Some(path) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(path)?)),
        None => ClientTlsConfig::new().with_native_roots(),
    };
    if let (Some(certificate), Some(key)) = (&args.client_certificate, &args.client_key) {
        config = config.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(config)
}

/// Reads a file with certificates or keys.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path)
        .map_err(|error| Failure::usage(format!("{} cannot be read: {error}", path.display())))
}

/// An error with its causes.
pub(crate) fn error_chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Whether traffic to a valid address stays on this machine.
pub(crate) fn is_local(url: &str) -> bool {
    let Some(authority) = url.strip_prefix("http://") else { return url.starts_with("unix:") };
    let authority = authority.split('/').next().unwrap_or_default().parse::<Authority>();
    authority.is_ok_and(|authority| {
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost")
            || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    })
}

/// Makes a call with a timeout.
///
/// # Errors
/// The gateway's error, or the timeout.
pub(crate) async fn call<T>(
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Failure> {
    Ok(with_timeout(call).await?)
}

/// Makes a call with retries while the gateway is away, for at most `retry_timeout`. Writes are
/// retried too: their idempotency key makes them one write.
///
/// # Errors
/// The last error of the gateway.
pub(crate) async fn call_with_retry<T, F>(
    retry_timeout: Duration,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Failure>
where
    F: Future<Output = Result<tonic::Response<T>, Status>>,
{
    retry(retry_timeout, || with_timeout(attempt())).await
}

/// Like [`call_with_retry`], for a call without a timeout.
///
/// # Errors
/// The last error of the gateway.
pub(crate) async fn retry<T, F>(
    retry_timeout: Duration,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Failure>
where
    F: Future<Output = Result<T, Status>>,
{
    let mut first_failure = None;
    loop {
        let status = match attempt().await {
            Err(status) if is_retryable(&status) => status,
            result => return Ok(result?),
        };
        let failing_since = first_failure.get_or_insert_with(Instant::now);
        if failing_since.elapsed() + RETRY_DELAY >= retry_timeout {
            return Err(status.into());
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

/// Like [`call`], with the status as the error.
///
/// # Errors
/// As [`call`].
pub(crate) async fn with_timeout<T>(
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    let timeout = if OVER_SOCKET.load(Ordering::Relaxed) { START_TIMEOUT } else { CALL_TIMEOUT };
    match tokio::time::timeout(timeout, call).await {
        Ok(response) => response.map(tonic::Response::into_inner),
        Err(_) => Err(Status::unavailable(format!("no response within {} s", timeout.as_secs()))),
    }
}

/// A random idempotency key.
pub(crate) fn idempotency_key() -> String {
    Uuid::now_v7().to_string()
}

#[cfg(test)]
mod tests {
    use construct_proto::v1;
    use tonic::transport::ServerTlsConfig;

    use super::*;
    use crate::fake::Fake;

    #[test]
    fn addresses_are_http_https_or_unix() {
        for valid in [
            "http://127.0.0.1:60080",
            "http://construct.example.com",
            "https://construct.example.com",
            "unix:/run/construct/socket",
        ] {
            assert!(Gateway::parse_address(valid).is_ok(), "{valid}");
        }
        for invalid in ["ftp://127.0.0.1", "127.0.0.1:60080"] {
            assert!(Gateway::parse_address(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn local_addresses_are_recognized() {
        for (address, local) in [
            ("http://127.0.0.1:60080", true),
            ("http://[::1]:60080/", true),
            ("http://localhost", true),
            ("unix:/run/construct/socket", true),
            ("http://10.0.0.1:60080", false),
            ("http://localhost.example.com", false),
            ("http://127.0.0.1@example.com", false),
        ] {
            assert_eq!(is_local(address), local, "{address}");
        }
    }

    #[tokio::test]
    async fn tls_requires_trusted_server_and_client_certificates() {
        let ca = |name: &str| {
            let mut params = rcgen::CertificateParams::default();
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap())
                .unwrap()
        };
        let (ca, other) = (ca("ca"), ca("other"));
        let issue = || {
            let key = rcgen::KeyPair::generate().unwrap();
            let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            (params.signed_by(&key, &ca).unwrap().pem(), key.serialize_pem())
        };
        let (certificate, key) = issue();
        let server = ServerTlsConfig::new()
            .identity(Identity::from_pem(certificate, key))
            .client_ca_root(Certificate::from_pem(ca.pem()));
        let fake = Fake::start_tls(server);
        let folder = std::env::temp_dir().join(format!("construct-cli-tls-{}", Uuid::now_v7()));
        fs::create_dir(&folder).unwrap();
        let file = |name: &str, text: &str| {
            fs::write(folder.join(name), text).unwrap();
            Some(folder.join(name))
        };
        let (certificate, key) = issue();
        let trusted = TlsArgs {
            ca: file("ca.pem", &ca.pem()),
            client_certificate: file("me.pem", &certificate),
            client_key: file("me.key", &key),
        };
        let ask = async |tls: &TlsArgs| {
            let address = format!("https://localhost:{}", fake.address().port());
            let gateway = Gateway::new(&Target {
                address,
                key: None,
                organization: None,
                tls: tls.clone(),
                session: None,
            })?;
            call(gateway.tasks().get_task(v1::GetTaskRequest { task: crate::fake::TASK.into() }))
                .await
        };
        ask(&trusted).await.expect("it answers");
        let untrusted = TlsArgs { ca: file("other.pem", &other.pem()), ..trusted.clone() };
        ask(&untrusted).await.expect_err("the authority is not trusted");
        let anonymous = TlsArgs { client_certificate: None, client_key: None, ..trusted.clone() };
        ask(&anonymous).await.expect_err("a client certificate is required");
        let missing = TlsArgs { ca: Some(folder.join("none.pem")), ..trusted };
        let refused = ask(&missing).await.expect_err("the file is missing");
        assert!(refused.to_string().contains("none.pem cannot be read"), "{refused}");
        fs::remove_dir_all(folder).unwrap();
    }
}
