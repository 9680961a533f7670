//! The other faces on gRPC's port: Connect, gRPC-Web, REST and server-sent events.
//!
//! Each face is a transcoder in front of the gRPC services: its request becomes a gRPC request to
//! them, in process. So authorization, validation, limits and tracing exist once, behind the faces,
//! and a face knows nothing of them. It passes on what a request says of its caller (headers, and
//! the extensions with the connection's peer) unchanged. For whom a trusted proxy asks is found out
//! before all of them, once.
//!
//! A gRPC request doesn't pass through any of this: one look at its content type, and it goes
//! straight on, with its deadline.

mod call;
mod codec;
mod connect;
mod envelope;
mod errors;
mod guard;
mod methods;
pub(crate) mod operator;
mod public;
pub(crate) mod rest;
mod unread;

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures::future::{BoxFuture, FutureExt as _, TryFutureExt as _};
use tokio::sync::{Semaphore, SemaphorePermit};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderMap, Request, Response, StatusCode, header},
};
use tonic_web::GrpcWebLayer;
use tower::{BoxError, Layer, Service, ServiceExt as _, service_fn, util::BoxCloneService};

use self::{
    guard::Guard,
    methods::{Method, Methods},
    public::Public,
    rest::Rest,
    unread::Unread,
};
use crate::{
    Config,
    api::Api,
    audit::{
        self,
        origin::{Face, Origin},
    },
    deadline::Deadline,
    identity::{self, proxies::Proxies},
    metrics::{self, Transcoded},
    quotas::Metered,
    status,
};

/// The gRPC services, as a face calls them.
type Inner = BoxCloneService<Request<Body>, Response<Body>, BoxError>;

/// How long a transcoded call may take until its answer begins. Less than what gRPC's calls may,
/// and than the server's own limit, which would answer in gRPC's words.
const TIMEOUT: Duration = Duration::from_secs(29);

/// Requests of the other faces that are transcoded at the same time, over all connections: each may
/// hold its body, and its answer, in several forms. Further ones are refused with
/// `RESOURCE_EXHAUSTED`. Streams don't count once they have begun.
const TRANSCODED: usize = 256;

/// Puts the faces before the gRPC services.
#[derive(Clone)]
pub(crate) struct Faces {
    shared: Arc<Shared>,
    /// Whether browsers can get here.
    guarded: bool,
}

struct Shared {
    guard: Guard,
    methods: Methods,
    rest: Rest,
    /// Who judges callers before their bodies are read.
    api: Api,
    /// Places for requests that are transcoded.
    places: Semaphore,
    /// Places for streams that anybody may open.
    public: Public,
    /// Who may say for whom a request is.
    proxies: Proxies,
    /// The services, for faces with a port of their own. Set when the server begins to serve.
    services: OnceLock<Mutex<Inner>>,
}

impl Faces {
    /// The faces of a gateway that listens on a loopback address, or on another one.
    pub(crate) fn new(api: Api, loopback: bool, config: &Config) -> anyhow::Result<Self> {
        let guard = Guard::new(loopback, &config.gateway_origins, &config.gateway_hosts);
        let methods = Methods::new()?;
        let rest = Rest::new(&methods, config)?;
        let places = Semaphore::new(TRANSCODED);
        let shared = Arc::new(Shared {
            guard,
            methods,
            rest,
            api,
            places,
            public: Public::default(),
            proxies: Proxies::new(&config.gateway_trusted_proxies)?,
            services: OnceLock::new(),
        });
        Ok(Self { shared, guarded: true })
    }

    /// Who may say for whom a request is.
    pub(crate) fn proxies(&self) -> &Proxies {
        &self.shared.proxies
    }

    /// The same faces on a Unix socket. No browser gets there, and what stands for a host there is
    /// nobody's name: so neither origin nor host is looked at.
    pub(crate) fn on_socket(&self) -> Self {
        Self { shared: Arc::clone(&self.shared), guarded: false }
    }
}

impl<S> Layer<S> for Faces
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send + 'static,
{
    type Service = Faced<S>;

    fn layer(&self, inner: S) -> Faced<S> {
        // There is one server; a second one's services would be ignored.
        _ = self
            .shared
            .services
            .set(Mutex::new(BoxCloneService::new(inner.clone().map_err(Into::into))));
        Faced { inner, shared: Arc::clone(&self.shared), guarded: self.guarded }
    }
}

/// The gRPC services with the faces before them.
#[derive(Clone)]
pub(crate) struct Faced<S> {
    inner: S,
    shared: Arc<Shared>,
    guarded: bool,
}

impl<S> Service<Request<Body>> for Faced<S>
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
        let kind = Kind::of(&request);
        request.extensions_mut().insert(kind.face());
        if let Some(client) = self.shared.proxies.client(request.extensions(), request.headers()) {
            request.extensions_mut().insert(client);
        }
        let unread = Unread::of(&mut request);
        let checked = if self.guarded { self.shared.guard.check(&request) } else { Ok(()) };
        let place = match checked.and_then(|()| self.shared.public.take(&request)) {
            Ok(place) => place,
            Err(refusal) => {
                self.shared.note(&request, kind, &refusal);
                let response = errors::refused(kind, &refusal);
                drop(request);
                return async move { Ok(Unread::read_before(unread, response).await) }.boxed();
            }
        };
        let deadline = match kind {
            Kind::Grpc | Kind::GrpcWeb => Deadline::of_grpc(request.headers()),
            // What cannot be read is refused by the face.
            Kind::Connect => {
                Deadline::new(connect::timeout(request.headers()).unwrap_or_default(), TIMEOUT)
            }
            Kind::Rest => Deadline::new(None, TIMEOUT),
        };
        request.extensions_mut().insert(deadline);
        if matches!(kind, Kind::Grpc) {
            let answering = deadline.answer(self.inner.call(request));
            return answering.map_ok(|answer| public::holding(place, answer)).boxed();
        }
        // The one that is ready serves this request, as a service's contract demands.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        let inner = BoxCloneService::new(ready.map_err(Into::into));
        let shared = Arc::clone(&self.shared);
        async move {
            let response = shared.serve(kind, deadline, inner, request).await;
            Ok(public::holding(place, Unread::read_before(unread, response).await))
        }
        .boxed()
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
            // The services get them whatever they are.
            Kind::Grpc | Kind::GrpcWeb => None,
        };
        let mut face = kind.face();
        if kind == Kind::Rest && method.is_some_and(Rest::tells_events) {
            face = Face::Sse;
            request.extensions_mut().insert(face);
        }
        let name = method
            .and_then(|method| audit::methods::of(method.path.path()))
            .map(|method| method.name.as_str());
        let transcoded = Transcoded::default();
        request.extensions_mut().insert(transcoded.clone());
        let mut counted = metrics::Call::transcoded(name, face, transcoded);
        let challenge = self.rest.challenge(&request);
        let mut response = match kind {
            Kind::Grpc | Kind::GrpcWeb => {
                // Within what transcodes, so that the deadline is told in this form as well.
                let inner = service_fn(move |request: Request<Body>| {
                    deadline.answer(inner.clone().oneshot(request))
                });
                match GrpcWebLayer::new().layer(inner).oneshot(request).await {
                    Ok(response) => response,
                    Err(error) => Status::from_error(error).into_http(),
                }
            }
            Kind::Connect | Kind::Rest => {
                // Logging in, which may ask others, is a part of what the client waits for. Boxed,
                // because its future is large.
                let let_in = Box::pin(self.let_in(method, &request));
                let mut response = match deadline.begin(let_in).await {
                    Ok((_place, metered)) => {
                        let refusal = metered.clone();
                        if let Some(metered) = metered {
                            request.extensions_mut().insert(metered);
                        }
                        let mut response = if kind == Kind::Connect {
                            connect::serve(inner, &self.methods, deadline, request).await
                        } else {
                            self.rest.serve(inner, request).await
                        };
                        // What went wrong before the services had it has nothing of theirs.
                        if let Some(metered) = refusal
                            && !response.headers().contains_key("ratelimit-policy")
                        {
                            metered.tell(response.headers_mut());
                        }
                        response
                    }
                    Err(refusal) if kind == Kind::Connect => {
                        connect::refusal(&self.methods, &request, &refusal)
                    }
                    Err(refusal) => errors::problem(&refusal),
                };
                counted.ended(errors::code(&response));
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
    /// Notes that a page, or a request for another host, was refused.
    fn note(&self, request: &Request<Body>, kind: Kind, refusal: &Status) {
        let path = match kind {
            Kind::Rest => self.rest.method(request).map_or("", |method| method.path.path()),
            _ => request.uri().path(),
        };
        let origin = Origin::of(request);
        let name = audit::methods::of(path).map(|method| method.name.as_str()).unwrap_or_default();
        self.api.trail().refused(&origin, None, origin.entry(name, None, refusal.code()));
    }

    /// Lets a request be transcoded, and says what it was counted against. Its body is read only
    /// for who may call the method: what a request's head says suffices for that.
    ///
    /// # Errors
    /// Why the caller may not, or that there are too many requests.
    fn let_in<'a>(
        &'a self,
        method: Option<&Method>,
        request: &Request<Body>,
    ) -> impl Future<Output = Result<(SemaphorePermit<'a>, Option<Metered>), Status>> + Send + use<'a>
    {
        // What is no method has a body that nobody reads.
        let admitted =
            method.map(|method| identity::guard::admitted(&self.api, method.path.path(), request));
        async move {
            let metered = match admitted {
                Some(admitted) => Some(admitted.await?),
                None => None,
            };
            let busy =
                |_| status::exhausted("the gateway works on too many requests at the moment");
            Ok((self.places.try_acquire().map_err(busy)?, metered))
        }
    }
}

/// Which face a request is for.
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
    const fn face(self) -> Face {
        match self {
            Self::Grpc => Face::Grpc,
            Self::GrpcWeb => Face::GrpcWeb,
            Self::Connect => Face::Connect,
            Self::Rest => Face::Rest,
        }
    }

    fn of(request: &Request<Body>) -> Self {
        let content_type = content_type(request.headers());
        if let Some(rest) = content_type.strip_prefix("application/grpc") {
            return if rest.starts_with("-web") { Self::GrpcWeb } else { Self::Grpc };
        }
        let service =
            request.uri().path().trim_start_matches('/').split('/').next().unwrap_or_default();
        // A resource's first segment is `v1`, or a file at the root, and a service has a package of
        // two parts at least.
        if service.split('.').count() > 2 { Self::Connect } else { Self::Rest }
    }
}

/// The media type of a body, without parameters.
fn content_type(headers: &HeaderMap) -> &str {
    let value =
        headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim()
}
