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
    failure::{Failure, may_pass},
};

/// The largest answer that is read, in bytes: a transcript's message may hold a large output.
const MAX_ANSWER: usize = 64 * 1024 * 1024;

/// How long one call may take before it is given up; streams are not bounded by it.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// The same over a socket of this machine: whom the call is for may first have to be started
/// (`construct daemon`), which includes servers.
const START_TIMEOUT: Duration = Duration::from_secs(180);

/// Whether calls go over such a socket. A process talks to one gateway.
static OVER_SOCKET: AtomicBool = AtomicBool::new(false);

/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(200);

/// Where the mesh's public API is. Cheap to clone; connects when first used, and again whenever
/// needed.
#[derive(Debug, Clone)]
pub(crate) struct Gateway {
    line: Line,
    authorization: Option<Authorization>,
}

/// What a request says of who calls. It is shared, so that a session can be renewed while commands
/// run.
type Authorization = Arc<RwLock<MetadataValue<Ascii>>>;

/// A connection that says who calls.
pub(crate) type Line = InterceptedService<Channel, Credentials>;

/// Who calls, put into every request. The key is marked as sensitive, so that nothing prints it.
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
    /// When the address is none, or the key or the organization cannot be sent.
    pub(crate) fn new(target: &Target) -> Result<Self, Failure> {
        let mut endpoint = Self::check(&target.address)?;
        let secure = endpoint.uri().scheme_str() == Some("https");
        if secure {
            let wrong = |error| {
                Failure::usage(format!("the certificates cannot be used: {}", causes(&error)))
            };
            endpoint = endpoint.tls_config(certificates(&target.tls)?).map_err(wrong)?;
        }
        let authorization = target
            .key
            .as_deref()
            .map(bearer)
            .transpose()?
            .map(|value| Arc::new(RwLock::new(value)));
        let organization =
            target.organization.as_deref().map(|id| header("organization", id)).transpose()?;
        if authorization.is_some() && !secure && !stays_here(&target.address) {
            eprintln!(
                "warning: the API key goes to {} in plain text; everybody on the way can read it",
                target.address
            );
        }
        let credentials = Credentials { authorization: authorization.clone(), organization };
        let mut endpoint = endpoint.connect_timeout(Duration::from_secs(3)).tcp_nodelay(true);
        // Nobody vanishes from a socket of this machine without being noticed; but who listens
        // there may first have to be started.
        if target.address.starts_with("unix:") {
            OVER_SOCKET.store(true, Ordering::Relaxed);
        } else {
            // A gateway that vanished without closing the connection is noticed within these.
            endpoint = endpoint
                .http2_keep_alive_interval(Duration::from_secs(10))
                .keep_alive_timeout(Duration::from_secs(5))
                .keep_alive_while_idle(true);
        }
        Ok(Self {
            line: InterceptedService::new(endpoint.connect_lazy(), credentials),
            authorization,
        })
    }

    /// From now on calls come with this token, in the place of the one before it.
    ///
    /// # Errors
    /// When it cannot be sent.
    pub(crate) fn present(&self, token: &str) -> Result<(), Failure> {
        if let Some(authorization) = &self.authorization {
            *authorization.write().unwrap_or_else(PoisonError::into_inner) = bearer(token)?;
        }
        Ok(())
    }

    /// Reads an address.
    ///
    /// # Errors
    /// When it is none.
    pub(crate) fn check(url: &str) -> Result<Endpoint, Failure> {
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

    pub(crate) fn scans(&self) -> ScanServiceClient<Line> {
        ScanServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn files(&self) -> FileServiceClient<Line> {
        FileServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn organizations(&self) -> OrganizationServiceClient<Line> {
        OrganizationServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn keys(&self) -> KeyServiceClient<Line> {
        KeyServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn agents(&self) -> AgentServiceClient<Line> {
        AgentServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn approvals(&self) -> ApprovalServiceClient<Line> {
        ApprovalServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn audit(&self) -> AuditServiceClient<Line> {
        AuditServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn budgets(&self) -> BudgetServiceClient<Line> {
        BudgetServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn diagnosis(&self) -> DiagnosisServiceClient<Line> {
        DiagnosisServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn recovery(&self) -> RecoveryServiceClient<Line> {
        RecoveryServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn tasks(&self) -> TaskServiceClient<Line> {
        TaskServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn messages(&self) -> MessageServiceClient<Line> {
        MessageServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn models(&self) -> ModelServiceClient<Line> {
        ModelServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn model_providers(&self) -> ModelProviderServiceClient<Line> {
        ModelProviderServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn model_tokens(&self) -> ModelTokenServiceClient<Line> {
        ModelTokenServiceClient::new(self.line.clone())
    }

    pub(crate) fn schedules(&self) -> ScheduleServiceClient<Line> {
        ScheduleServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn secrets(&self) -> SecretServiceClient<Line> {
        SecretServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn states(&self) -> StateServiceClient<Line> {
        StateServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn usage(&self) -> UsageServiceClient<Line> {
        UsageServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }

    pub(crate) fn events(&self) -> EventServiceClient<Line> {
        EventServiceClient::new(self.line.clone()).max_decoding_message_size(MAX_ANSWER)
    }
}

fn header(what: &str, text: &str) -> Result<MetadataValue<Ascii>, Failure> {
    text.parse().map_err(|_| Failure::usage(format!("the {what} has characters that cannot be")))
}

fn bearer(key: &str) -> Result<MetadataValue<Ascii>, Failure> {
    let mut value = header("API key", &format!("Bearer {key}"))?;
    value.set_sensitive(true);
    Ok(value)
}

/// Whom to trust, and what to show.
fn certificates(args: &TlsArgs) -> Result<ClientTlsConfig, Failure> {
    let mut config = match &args.ca {
        Some(path) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(path)?)),
        None => ClientTlsConfig::new().with_native_roots(),
    };
    if let (Some(certificate), Some(key)) = (&args.client_certificate, &args.client_key) {
        config = config.identity(Identity::from_pem(read(certificate)?, read(key)?));
    }
    Ok(config)
}

/// A file of certificates.
///
/// # Errors
/// When it cannot be read.
pub(crate) fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    fs::read(path)
        .map_err(|error| Failure::usage(format!("{} cannot be read: {error}", path.display())))
}

/// An error with what caused it.
pub(crate) fn causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |words, cause| format!("{words}: {cause}"))
}

/// Whether what is sent to an address that was checked stays on this machine.
pub(crate) fn stays_here(url: &str) -> bool {
    let Some(authority) = url.strip_prefix("http://") else { return url.starts_with("unix:") };
    let authority = authority.split('/').next().unwrap_or_default().parse::<Authority>();
    authority.is_ok_and(|authority| {
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        host.eq_ignore_ascii_case("localhost")
            || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    })
}

/// One call, bounded in time.
///
/// # Errors
/// What the gateway says, or that it says nothing.
pub(crate) async fn call<T>(
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Failure> {
    Ok(bounded(call).await?)
}

/// A call that is repeated while the gateway is away, for at most `patience`. Writes are repeated
/// too: their idempotency key makes that one write.
///
/// # Errors
/// What the gateway says last.
pub(crate) async fn patiently<T, F>(
    patience: Duration,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Failure>
where
    F: Future<Output = Result<tonic::Response<T>, Status>>,
{
    persistently(patience, || bounded(attempt())).await
}

/// The same of a call that may take as long as the connection lives.
///
/// # Errors
/// What the gateway says last.
pub(crate) async fn persistently<T, F>(
    patience: Duration,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Failure>
where
    F: Future<Output = Result<T, Status>>,
{
    let mut away = None;
    loop {
        let status = match attempt().await {
            Err(status) if may_pass(&status) => status,
            done => return Ok(done?),
        };
        if away.get_or_insert_with(Instant::now).elapsed() + PAUSE >= patience {
            return Err(status.into());
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// The same for whoever wants to know what kind of failure it was.
///
/// # Errors
/// As [`call`].
pub(crate) async fn bounded<T>(
    call: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, Status> {
    let limit = if OVER_SOCKET.load(Ordering::Relaxed) { START_TIMEOUT } else { CALL_TIMEOUT };
    match tokio::time::timeout(limit, call).await {
        Ok(answer) => answer.map(tonic::Response::into_inner),
        Err(_) => Err(Status::unavailable(format!("no answer within {} s", limit.as_secs()))),
    }
}

/// A key that makes a write one write, however often it is sent.
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
    fn an_address_is_one_over_http_or_https_or_a_socket() {
        for fine in [
            "http://127.0.0.1:60080",
            "http://construct.example.com",
            "https://construct.example.com",
            "unix:/run/construct/socket",
        ] {
            assert!(Gateway::check(fine).is_ok(), "{fine}");
        }
        for wrong in ["ftp://127.0.0.1", "127.0.0.1:60080"] {
            assert!(Gateway::check(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_leaves_the_machine_is_known() {
        for (address, here) in [
            ("http://127.0.0.1:60080", true),
            ("http://[::1]:60080/", true),
            ("http://localhost", true),
            ("unix:/run/construct/socket", true),
            ("http://10.0.0.1:60080", false),
            ("http://localhost.example.com", false),
            ("http://127.0.0.1@example.com", false),
        ] {
            assert_eq!(stays_here(address), here, "{address}");
        }
    }

    #[tokio::test]
    async fn a_gateway_over_tls_is_spoken_to_when_its_certificate_is_vouched_for_and_ours_is_shown()
    {
        let ca = |name: &str| {
            let mut params = rcgen::CertificateParams::default();
            params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
            params.distinguished_name.push(rcgen::DnType::CommonName, name);
            rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap())
                .unwrap()
        };
        let (ca, other) = (ca("ca"), ca("other"));
        let made = || {
            let key = rcgen::KeyPair::generate().unwrap();
            let params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
            (params.signed_by(&key, &ca).unwrap().pem(), key.serialize_pem())
        };
        let (certificate, key) = made();
        let server = ServerTlsConfig::new()
            .identity(Identity::from_pem(certificate, key))
            .client_ca_root(Certificate::from_pem(ca.pem()));
        let fake = Fake::secure(server);
        let folder = std::env::temp_dir().join(format!("construct-cli-tls-{}", Uuid::now_v7()));
        fs::create_dir(&folder).unwrap();
        let file = |name: &str, text: &str| {
            fs::write(folder.join(name), text).unwrap();
            Some(folder.join(name))
        };
        let (certificate, key) = made();
        let good = TlsArgs {
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
        ask(&good).await.expect("it answers");
        let distrusted = TlsArgs { ca: file("other.pem", &other.pem()), ..good.clone() };
        ask(&distrusted).await.expect_err("nobody vouches for it");
        let stranger = TlsArgs { client_certificate: None, client_key: None, ..good.clone() };
        ask(&stranger).await.expect_err("it asks for a certificate");
        let missing = TlsArgs { ca: Some(folder.join("none.pem")), ..good };
        let refused = ask(&missing).await.expect_err("there is no such file");
        assert!(refused.to_string().contains("none.pem cannot be read"), "{refused}");
        fs::remove_dir_all(folder).unwrap();
    }
}
