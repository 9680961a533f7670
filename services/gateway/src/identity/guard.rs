//! The layer itself: it stands before every method and lets nobody through unseen.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use tonic::{
    Status,
    codegen::http::{HeaderMap, Request, Response, header},
};
use tower::{Layer, Service};

use super::{
    authenticate::{Presented, authenticate},
    peer::Peer,
    rules::{self, Access},
};
use crate::{api::Api, caller::Caller};

/// Chooses the organisation where a caller has several.
pub(crate) const ORGANIZATION: &str = "x-organization-id";

/// Puts a [`Guard`] before a service.
#[derive(Clone)]
pub(crate) struct GuardLayer {
    api: Api,
}

impl GuardLayer {
    pub(crate) const fn new(api: Api) -> Self {
        Self { api }
    }
}

impl<S> Layer<S> for GuardLayer {
    type Service = Guard<S>;

    fn layer(&self, inner: S) -> Guard<S> {
        Guard { api: self.api.clone(), inner }
    }
}

/// Finds out who calls, and refuses what they may not do.
#[derive(Clone)]
pub(crate) struct Guard<S> {
    api: Api,
    inner: S,
}

impl<S, B, R> Service<Request<B>> for Guard<S>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    R: Default,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let next = self.inner.clone();
        // The one that was asked whether it is ready is the one to call.
        let mut inner = std::mem::replace(&mut self.inner, next);
        let api = self.api.clone();
        // Whatever a face in front of this may have let through: who calls is said here and nowhere else.
        request.extensions_mut().remove::<Caller>();
        let Some(access) = rules::of(request.uri().path()) else {
            return Box::pin(async { Ok(Status::unimplemented("there is no such method").into_http()) });
        };
        let peer = Peer::of(request.extensions());
        request.extensions_mut().insert(peer);
        let presented = presented(&request, peer);
        Box::pin(async move {
            match admit(&api, access, presented).await {
                Ok(Some(caller)) => _ = request.extensions_mut().insert(caller),
                Ok(None) => {}
                Err(status) => return Ok(status.into_http()),
            }
            inner.call(request).await
        })
    }
}

async fn admit(api: &Api, access: Access, presented: Result<Presented, Status>) -> Result<Option<Caller>, Status> {
    if access == Access::Public {
        return Ok(None);
    }
    let caller = authenticate(api, presented?).await?;
    access.check(&caller)?;
    Ok(Some(caller))
}

/// Who sends a request, when they may call the method of this path. For those that look before they read a body; the layer looks again,
/// because what it lets through is what counts.
///
/// # Errors
/// Those of the layer.
pub(crate) fn admitted<'a, B>(
    api: &'a Api,
    path: &str,
    request: &Request<B>,
) -> impl Future<Output = Result<(), Status>> + Send + use<'a, B> {
    let access = rules::of(path).ok_or_else(|| Status::unimplemented("there is no such method"));
    let presented = presented(request, Peer::of(request.extensions()));
    async move { admit(api, access?, presented).await.map(drop) }
}

/// What a request says of who sent it.
fn presented<B>(request: &Request<B>, peer: Peer) -> Result<Presented, Status> {
    let headers = request.headers();
    let bearer = match one(headers, header::AUTHORIZATION.as_str())? {
        None => None,
        Some(text) => {
            let bearer = text.split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
            let malformed = || Status::unauthenticated("authorization must be `Bearer` and an API key or a token");
            Some(bearer.map(|(_, token)| token.trim().to_owned()).ok_or_else(malformed)?)
        }
    };
    let organization = one(headers, ORGANIZATION)?.map(str::to_owned);
    Ok(Presented { bearer, organization, peer })
}

/// A header that is given once or not at all: of two, one would be judged and the other believed.
fn one<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Status> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let wrong = || Status::unauthenticated(format!("{name} must be given once, in visible ASCII characters"));
    if values.next().is_some() {
        return Err(wrong());
    }
    value.to_str().map(Some).map_err(|_| wrong())
}
