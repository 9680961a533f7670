//! The other faces on gRPC's port: Connect, gRPC-Web, REST and server-sent events.
//!
//! Each face is a transcoder in front of the gRPC services: its request becomes a gRPC request to them, in process. So
//! authorisation, validation, limits and tracing exist once, behind the faces, and a face knows nothing of them. It passes on
//! what a request says of its caller (headers, and the extensions with the connection's peer) unchanged.
//!
//! A gRPC request doesn't pass through any of this: one look at its content type, and it goes straight on.

mod call;
mod codec;
mod connect;
mod envelope;
mod errors;
mod guard;
mod methods;
pub(crate) mod operator;
mod rest;

use std::{
    sync::{Arc, Mutex, OnceLock, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures::future::{BoxFuture, Either, FutureExt as _};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderMap, Request, Response, header},
};
use tonic_web::GrpcWebLayer;
use tower::{BoxError, Layer, Service, ServiceExt as _, util::BoxCloneService};

use self::{guard::Guard, methods::Methods, rest::Rest};

/// The gRPC services, as a face calls them.
type Inner = BoxCloneService<Request<Body>, Response<Body>, BoxError>;

/// How long a face's call may take until its answer begins. Less than the server's own limit, which would answer in gRPC's
/// words.
const TIMEOUT: Duration = Duration::from_secs(29);

/// Puts the faces before the gRPC services.
#[derive(Clone)]
pub(crate) struct Faces {
    shared: Arc<Shared>,
}

struct Shared {
    guard: Guard,
    methods: Methods,
    rest: Rest,
    /// The services, for faces with a port of their own. Set when the server begins to serve.
    services: OnceLock<Mutex<Inner>>,
}

impl Faces {
    /// The faces of a gateway that listens on a loopback address, or on another one. `origins` are those whose pages may call,
    /// `hosts` the names besides loopback's under which a gateway on a loopback address may be called.
    pub(crate) fn new(loopback: bool, origins: &[String], hosts: &[String]) -> anyhow::Result<Self> {
        let guard = Guard::new(loopback, origins, hosts);
        let methods = Methods::new()?;
        let rest = Rest::new(&methods)?;
        Ok(Self { shared: Arc::new(Shared { guard, methods, rest, services: OnceLock::new() }) })
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
        _ = self.shared.services.set(Mutex::new(BoxCloneService::new(inner.clone().map_err(Into::into))));
        Faced { inner, shared: Arc::clone(&self.shared) }
    }
}

/// The gRPC services with the faces before them.
#[derive(Clone)]
pub(crate) struct Faced<S> {
    inner: S,
    shared: Arc<Shared>,
}

impl<S> Service<Request<Body>> for Faced<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Error: Into<BoxError> + Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = Either<S::Future, BoxFuture<'static, Result<Response<Body>, S::Error>>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let kind = Kind::of(&request);
        if let Err(refusal) = self.shared.guard.check(&request) {
            let response = errors::refused(kind, &refusal);
            return Either::Right(futures::future::ready(Ok(response)).boxed());
        }
        if matches!(kind, Kind::Grpc) {
            return Either::Left(self.inner.call(request));
        }
        // The one that is ready serves this request, as a service's contract demands.
        let next = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, next);
        let inner = BoxCloneService::new(ready.map_err(Into::into));
        let shared = Arc::clone(&self.shared);
        Either::Right(async move { Ok(shared.serve(kind, inner, request).await) }.boxed())
    }
}

impl Shared {
    /// The services.
    ///
    /// # Errors
    /// `UNAVAILABLE` before the server serves.
    fn services(&self) -> Result<Inner, Status> {
        let services = self.services.get().ok_or_else(|| Status::unavailable("the gateway is starting"))?;
        Ok(services.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    async fn serve(&self, kind: Kind, inner: Inner, request: Request<Body>) -> Response<Body> {
        let allowed = self.guard.allowed_origin(request.headers());
        if let Some(origin) = &allowed
            && guard::is_preflight(&request)
        {
            return guard::preflight(origin, &request);
        }
        let mut response = match kind {
            Kind::Grpc | Kind::GrpcWeb => match GrpcWebLayer::new().layer(inner).oneshot(request).await {
                Ok(response) => response,
                Err(error) => Status::from_error(error).into_http(),
            },
            Kind::Connect => connect::serve(inner, &self.methods, request).await,
            Kind::Rest => self.rest.serve(inner, request).await,
        };
        if let Some(origin) = allowed {
            guard::allow(origin, response.headers_mut());
        }
        response
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
    fn of(request: &Request<Body>) -> Self {
        let content_type = content_type(request.headers());
        if let Some(rest) = content_type.strip_prefix("application/grpc") {
            return if rest.starts_with("-web") { Self::GrpcWeb } else { Self::Grpc };
        }
        let service = request.uri().path().trim_start_matches('/').split('/').next().unwrap_or_default();
        // A resource's first segment is `v1`, or a file at the root, and a service has a package of two parts at least.
        if service.split('.').count() > 2 { Self::Connect } else { Self::Rest }
    }
}

/// The media type of a body, without parameters.
fn content_type(headers: &HeaderMap) -> &str {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim()
}
