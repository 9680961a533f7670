//! The other protocols on gRPC's port: Connect, gRPC-Web, REST and server-sent events.
//!
//! Each protocol is a transcoder in front of the gRPC services: it turns its request into a gRPC
//! request to them, in the same process. So authorization, validation, limits and tracing exist
//! once, behind the protocols, and a protocol knows nothing of them. It passes on what a request
//! says about its caller (headers, and the extensions with the connection's peer) unchanged. The
//! client for which a trusted proxy calls is determined once, before all protocols.
//!
//! A gRPC request skips all of this: it is recognized by its content type and goes straight to the
//! services, with its deadline.

mod call;
mod codec;
mod connect;
mod envelope;
mod errors;
mod guard;
mod inbound;
mod methods;
pub(crate) mod operator;
mod outbound;
mod public;
pub(crate) mod rest;

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures::future::{BoxFuture, FutureExt as _};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderMap, Request, Response, StatusCode, header},
};
use tonic_web::GrpcWebLayer;
use tower::{BoxError, Layer, Service, ServiceExt as _, service_fn, util::BoxCloneService};

use self::{
    guard::OriginGuard,
    inbound::Inbound,
    methods::{Method, Methods},
    rest::Rest,
};
use crate::{
    Config,
    api::Api,
    audit::{
        self,
        origin::{Origin, Protocol},
    },
    deadline::{self, Deadline},
    identity::{self, peer::Peer, proxies::Proxies},
    limit::{Account, Permit, connection::Connection},
    metrics::{self, Transcoded},
    quotas::QuotaStates,
};

/// The gRPC services, as a protocol calls them.
type Inner = BoxCloneService<Request<Body>, Response<Body>, BoxError>;

/// Time until a transcoded call begins its response. Less than the limit of gRPC calls.
const TIMEOUT: Duration = Duration::from_secs(29);
/// Time after which any request without a response fails. Later than all deadlines.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(31);

/// Puts the other protocols in front of the gRPC services.
#[derive(Clone)]
pub(crate) struct ProtocolLayer {
    shared: Arc<Shared>,
    /// Whether browsers can reach it.
    is_guarded: bool,
}

struct Shared {
    guard: OriginGuard,
    methods: Methods,
    rest: Rest,
    /// Authenticates callers before their bodies are read.
    api: Api,
    /// The proxies that may name the client of a request.
    proxies: Proxies,
    /// The services, for protocols with a port of their own. Set when the server begins to serve.
    services: OnceLock<Mutex<Inner>>,
}

impl ProtocolLayer {
    /// Creates the protocols. `is_loopback` says whether the gateway listens on a loopback address
    /// only.
    pub(crate) fn new(api: Api, is_loopback: bool, config: &Config) -> anyhow::Result<Self> {
        let guard = OriginGuard::new(is_loopback, &config.gateway_origins, &config.gateway_hosts);
        let methods = Methods::new()?;
        let rest = Rest::new(&methods, config)?;
        let shared = Arc::new(Shared {
            guard,
            methods,
            rest,
            api,
            proxies: Proxies::new(&config.gateway_trusted_proxies)?,
            services: OnceLock::new(),
        });
        Ok(Self { shared, is_guarded: true })
    }

    /// The proxies that may name the client of a request.
    pub(crate) fn proxies(&self) -> &Proxies {
        &self.shared.proxies
    }

    /// The same protocols on a Unix socket. Browsers cannot reach it, and a host on it names
    /// nobody. So origin and host are not checked.
    pub(crate) fn on_socket(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), is_guarded: false }
    }
}

impl<S> Layer<S> for ProtocolLayer
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send + 'static,
{
    type Service = ProtocolService<S>;

    fn layer(&self, inner: S) -> ProtocolService<S> {
        // There is one server; a second one's services would be ignored.
        _ = self
            .shared
            .services
            .set(Mutex::new(BoxCloneService::new(inner.clone().map_err(Into::into))));
        ProtocolService { inner, shared: Arc::clone(&self.shared), is_guarded: self.is_guarded }
    }
}

/// The gRPC services with the other protocols in front of them.
#[derive(Clone)]
pub(crate) struct ProtocolService<S> {
    inner: S,
    shared: Arc<Shared>,
    is_guarded: bool,
}

impl<S> Service<Request<Body>> for ProtocolService<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        let kind = Kind::from_request(&request);
        request.extensions_mut().insert(kind.protocol());
        if let Some(client) = self.shared.proxies.client(request.extensions(), request.headers()) {
            request.extensions_mut().insert(client);
        }
        let account = self.shared.account(&request);
        request.extensions_mut().insert(account.clone());
        let inbound = Inbound::charge(&mut request, account.clone());
        let checked = if self.is_guarded { self.shared.guard.check(&request) } else { Ok(()) };
        let admitted = checked.and_then(|()| {
            public::acquire_permit(self.shared.api.capacity(), account.holder(), &request)
        });
        let stream = match admitted {
            Ok(stream) => stream,
            Err(refusal) => {
                self.shared.record_refusal(&request, kind, &refusal);
                let response = errors::refused(kind, &refusal);
                drop(request);
                return async move { Ok(inbound.complete(response).await) }.boxed();
            }
        };
        let deadline = match kind {
            Kind::Grpc | Kind::GrpcWeb => Deadline::from_grpc_headers(request.headers()),
            // An unreadable timeout is refused by the protocol.
            Kind::Connect => {
                Deadline::new(connect::timeout(request.headers()).unwrap_or_default(), TIMEOUT)
            }
            Kind::Rest => Deadline::new(None, TIMEOUT),
        };
        request.extensions_mut().insert(deadline);
        let path = request.uri().path().to_owned();
        let shared = Arc::clone(&self.shared);
        if matches!(kind, Kind::Grpc) {
            let answering = deadline.enforce(self.inner.call(request));
            return async move {
                Ok(shared.finish(kind, &path, account, stream, answering.await?).await)
            }
            .boxed();
        }
        // `poll_ready` was called on this one, so it must serve the request.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        let inner = BoxCloneService::new(ready.map_err(Into::into));
        async move {
            let serving = shared.serve(kind, deadline, inner, request);
            let response = match tokio::time::timeout(RESPONSE_TIMEOUT, serving).await {
                Ok(response) => response,
                Err(_) => errors::refused(kind, &deadline::exceeded()),
            };
            let response = inbound.complete(response).await;
            Ok(shared.finish(kind, &path, account, stream, response).await)
        }
        .boxed()
    }
}

impl Shared {
    /// The account of a request. Its network is charged until the caller is known.
    fn account(&self, request: &Request<Body>) -> Account {
        // Every request comes over a connection.
        let connection = request.extensions().get().cloned().unwrap_or_else(Connection::uncounted);
        let network = Peer::from_extensions(request.extensions()).into();
        Account::new(
            Arc::clone(self.api.capacity()),
            connection,
            network,
            public::is_stream(request),
        )
    }

    /// Releases what the request held, and charges for its response.
    async fn finish(
        &self,
        kind: Kind,
        path: &str,
        account: Account,
        stream: Option<Permit>,
        response: Response<Body>,
    ) -> Response<Body> {
        account.release();
        let is_unary = || self.methods.get(path).is_some_and(|method| !method.streams());
        let charged = outbound::charge(&account, stream, response, is_unary).await;
        charged.unwrap_or_else(|refusal| errors::refused(kind, &refusal))
    }
}

impl Shared {
    /// The services.
    ///
    /// # Errors
    /// `UNAVAILABLE` before the server serves.
    fn services(&self) -> Result<Inner, Status> {
        let services =
            self.services.get().ok_or_else(|| Status::unavailable("the gateway is starting"))?;
        Ok(services.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    async fn serve(
        &self,
        kind: Kind,
        deadline: Deadline,
        inner: Inner,
        mut request: Request<Body>,
    ) -> Response<Body> {
        let allowed = self.guard.allowed_origin(request.headers());
        if let Some(origin) = &allowed
            && guard::is_preflight(&request)
        {
            return guard::preflight(origin, &request);
        }
        let method = match kind {
            Kind::Rest => self.rest.method(&request),
            Kind::Connect => self.methods.get(request.uri().path()),
            // The services receive these requests in any case.
            Kind::Grpc | Kind::GrpcWeb => None,
        };
        let mut protocol = kind.protocol();
        if kind == Kind::Rest && method.is_some_and(Rest::streams_events) {
            protocol = Protocol::Sse;
            request.extensions_mut().insert(protocol);
        }
        let name = method
            .and_then(|method| audit::methods::find_method(method.path.path()))
            .map(|method| method.name.as_str());
        let transcoded = Transcoded::default();
        request.extensions_mut().insert(transcoded.clone());
        let mut counted = metrics::Call::transcoded(name, protocol, transcoded);
        let challenge = self.rest.challenge(&request);
        let mut response = match kind {
            Kind::Grpc | Kind::GrpcWeb => {
                // Inside the transcoder, so that an exceeded deadline is reported in its format as
                // well.
                let inner = service_fn(move |request: Request<Body>| {
                    deadline.enforce(inner.clone().oneshot(request))
                });
                match GrpcWebLayer::new().layer(inner).oneshot(request).await {
                    Ok(response) => response,
                    Err(error) => Status::from_error(error).into_http(),
                }
            }
            Kind::Connect | Kind::Rest => {
                // Authentication may call other services and counts toward the deadline. Boxed,
                // because its future is large.
                let authorize = Box::pin(self.authorize(method, &request));
                let mut response = match deadline.begin(authorize).await {
                    Ok(metered) => {
                        let refusal = metered.clone();
                        if let Some(metered) = metered {
                            request.extensions_mut().insert(metered);
                        }
                        let mut response = if kind == Kind::Connect {
                            connect::serve(inner, &self.methods, deadline, request).await
                        } else {
                            self.rest.serve(inner, request).await
                        };
                        // An error from before the services has no quota headers yet.
                        if let Some(metered) = refusal
                            && !response.headers().contains_key("ratelimit-policy")
                        {
                            metered.write_headers(response.headers_mut());
                        }
                        response
                    }
                    Err(refusal) if kind == Kind::Connect => {
                        connect::refusal(&self.methods, &request, &refusal)
                    }
                    Err(refusal) => errors::problem(&refusal),
                };
                counted.set_code(errors::code(&response));
                if response.status() == StatusCode::UNAUTHORIZED
                    && let Some(challenge) = challenge
                {
                    response.headers_mut().insert(header::WWW_AUTHENTICATE, challenge);
                }
                response
            }
        };
        if let Some(origin) = allowed {
            guard::allow(origin, response.headers_mut());
        }
        response
    }
}

impl Shared {
    /// Records a refused request of a page, or one for another host.
    fn record_refusal(&self, request: &Request<Body>, kind: Kind, refusal: &Status) {
        let path = match kind {
            Kind::Rest => self.rest.method(request).map_or("", |method| method.path.path()),
            _ => request.uri().path(),
        };
        let origin = Origin::from_request(request);
        let name = audit::methods::find_method(path)
            .map(|method| method.name.as_str())
            .unwrap_or_default();
        self.api.audit_writer().record_refused(
            &origin,
            None,
            origin.entry(name, None, refusal.code()),
        );
    }

    /// Authorizes a request before it is transcoded, and returns what it was counted against. The
    /// head of the request suffices for that; the body is read only for authorized callers.
    ///
    /// # Errors
    /// `UNAUTHENTICATED` or `PERMISSION_DENIED`; `RESOURCE_EXHAUSTED` when there are too many
    /// requests.
    fn authorize(
        &self,
        method: Option<&Method>,
        request: &Request<Body>,
    ) -> impl Future<Output = Result<Option<QuotaStates>, Status>> + Send + use<'_> {
        // The body of a request for no method is not read.
        let admitted =
            method.map(|method| identity::guard::authorize(&self.api, method.path.path(), request));
        let account = request.extensions().get::<Account>().cloned();
        async move {
            match (admitted, account) {
                (Some(admitted), _) => admitted.await.map(Some),
                (None, Some(account)) => account.enter_anonymous().map(|()| None),
                (None, None) => Ok(None),
            }
        }
    }
}

/// The protocol of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Grpc,
    GrpcWeb,
    /// `/package.Service/Method`.
    Connect,
    /// Every other path.
    Rest,
}

impl Kind {
    const fn protocol(self) -> Protocol {
        match self {
            Self::Grpc => Protocol::Grpc,
            Self::GrpcWeb => Protocol::GrpcWeb,
            Self::Connect => Protocol::Connect,
            Self::Rest => Protocol::Rest,
        }
    }

    fn from_request(request: &Request<Body>) -> Self {
        let content_type = content_type(request.headers());
        if let Some(rest) = content_type.strip_prefix("application/grpc") {
            return if rest.starts_with("-web") { Self::GrpcWeb } else { Self::Grpc };
        }
        let service =
            request.uri().path().trim_start_matches('/').split('/').next().unwrap_or_default();
        // The first segment of a resource is `v1`, or a file at the root. The package of a service
        // has at least two parts.
        if service.split('.').count() > 2 { Self::Connect } else { Self::Rest }
    }
}

/// The media type of a body, without parameters.
fn content_type(headers: &HeaderMap) -> &str {
    let value =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim()
}
