//! The layer in front of every method: it authenticates and authorizes each call.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use construct_store::AuditEntry;
use tokio::time::Instant;
use tonic::{
    Code, Status,
    codegen::http::{HeaderMap, HeaderValue, Request, Response, header},
};
use tower::{Layer, Service};

use super::{
    authenticate::{Credentials, Rejection, authenticate},
    peer::Peer,
    rules::{self, Access},
};
use crate::{
    api::Api,
    audit::{
        draft::AuditDraft,
        methods::{self, Method},
        origin::{CallerIdentity, Origin, Protocol},
        writer,
    },
    caller::Caller,
    deadline::Deadline,
    limit::Account,
    metrics::{self, Transcoded},
    quotas::{CredentialHash, QuotaStates},
    status,
};

/// Selects the organization of a caller with several.
pub(crate) const ORGANIZATION: &str = "x-organization-id";

/// Puts a [`Guard`] in front of a service.
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

/// Authenticates the caller of each call, and refuses unauthorized calls.
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
    R: Default + Send,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        let next = self.inner.clone();
        // Calls the service that was polled for readiness.
        let mut inner = std::mem::replace(&mut self.inner, next);
        let api = self.api.clone();
        // Only this layer sets the caller, whatever a protocol in front of it may have passed on.
        request.extensions_mut().remove::<Caller>();
        request.extensions_mut().remove::<Arc<AuditDraft>>();
        let path = request.uri().path().to_owned();
        let Some(access) = rules::access(&path) else {
            return Box::pin(async {
                Ok(Status::unimplemented("the method does not exist").into_http())
            });
        };
        let method = methods::find_method(&path);
        let origin = Origin::from_request(&request);
        let credentials = read_credentials(&request, origin.peer);
        let reached = request.extensions_mut().remove::<Transcoded>();
        // A protocol has authenticated the caller before it read the body, and counted the call.
        let metered = request.extensions_mut().remove::<QuotaStates>();
        request.extensions_mut().insert(origin.peer);
        let deadline = Deadline::from_extensions(request.extensions());
        let account = request.extensions().get::<Account>().cloned();
        Box::pin(async move {
            let mut call_guard = CallGuard::new(&api, method, origin.protocol, deadline);
            if let Some(reached) = &reached {
                reached.reached();
            }
            let AuthorizedCall { caller, metered } = match admit(
                &api,
                &path,
                access,
                credentials,
                &origin,
                method,
                metered,
                account.as_ref(),
            )
            .await
            {
                Ok(admitted) => admitted,
                Err(status) => return Ok(call_guard.finish(status.code(), status.into_http())),
            };
            let known = caller.as_ref().map(CallerIdentity::from);
            let draft = method
                .filter(|method| method.writes)
                .map(|method| Arc::new(AuditDraft::new(method, &origin, known)));
            if let Some(caller) = caller {
                request.extensions_mut().insert(caller);
            }
            if let Some(draft) = &draft {
                request.extensions_mut().insert(Arc::clone(draft));
                call_guard.draft = Some((Arc::clone(draft), &origin, known));
            }
            let mut response = mark_client_errors(inner.call(request).await?);
            metered.write_headers(response.headers_mut());
            if origin.protocol.is_operator() {
                response.extensions_mut().insert(metered.clone());
            }
            let code = Status::from_header_map(response.headers())
                .map_or(Code::Ok, |status| status.code());
            let noted = match (&draft, method) {
                (Some(draft), _) if draft.is_written() => Ok(()),
                // Failures of unknown callers, and refusals because of limits, are counted and
                // reach the database in batches: a flood of them must not slow down others.
                (draft, Some(method))
                    if writer::is_refusal(code)
                        || draft.is_some()
                            && (code == Code::ResourceExhausted
                                || known.is_none() && code != Code::Ok) =>
                {
                    let entry = draft.as_ref().map(|draft| draft.entry(code));
                    let entry = entry.unwrap_or_else(|| origin.entry(&method.name, known, code));
                    api.audit_writer().record_refused(&origin, known, entry);
                    Ok(())
                }
                // Boxed, because it is rare and would enlarge the future of every call.
                (Some(draft), _) => Box::pin(record(&api, draft.entry(code), code)).await,
                (None, _) => Ok(()),
            };
            call_guard.draft = None;
            Ok(match noted {
                Ok(()) => call_guard.finish(code, response),
                Err(status) => {
                    let mut response = status.clone().into_http();
                    metered.write_headers(response.headers_mut());
                    call_guard.finish(status.code(), response)
                }
            })
        })
    }
}

/// Prefixes of tonic's messages for malformed requests. tonic reports them as `INTERNAL`, and only
/// the text distinguishes them from bugs of ours. A compressed message without `grpc-encoding` is
/// not included: gRPC's specification requires `INTERNAL` for it.
const MALFORMED_PREFIXES: [&str; 5] = [
    "failed to decode Protobuf message",
    "protocol error: received message with invalid compression flag",
    "Error decompressing: ",
    "Unexpected EOF decoding stream",
    "Missing request message",
];

/// Prefixes of tonic's messages for requests that are too large, before and after decompression.
const TOO_LARGE_PREFIXES: [&str; 2] =
    ["Error, decoded message length too large", "Error decompressing: size limit"];

/// Reports a malformed request as an error of the client. Done here, so that metrics and the audit
/// log have that code as well.
fn mark_client_errors<B>(mut response: Response<B>) -> Response<B> {
    let Some(status) = Status::from_header_map(response.headers()) else { return response };
    let is_one_of =
        |known: &[&str]| known.iter().any(|prefix| status.message().starts_with(prefix));
    match status.code() {
        Code::Internal if is_one_of(&MALFORMED_PREFIXES) => {
            response
                .headers_mut()
                .insert(Status::GRPC_STATUS, HeaderValue::from(Code::InvalidArgument as i32));
        }
        Code::OutOfRange | Code::ResourceExhausted if is_one_of(&TOO_LARGE_PREFIXES) => {
            // Cannot fail for our own statuses.
            _ = status::too_large_with_message(status.message()).add_header(response.headers_mut());
        }
        _ => {}
    }
    response
}

/// Writes the audit entry of a call that changed nothing in the database, or failed, before the
/// response.
///
/// # Errors
/// `UNAVAILABLE` when a successful call cannot be recorded: its response is then withheld. The
/// response of a failed call is sent, and its entry follows when the database is available.
async fn record(api: &Api, entry: AuditEntry, code: Code) -> Result<(), Status> {
    // The database is probably unavailable, and the next attempt would take as long.
    if code != Code::Unavailable {
        match writer::write_entry(api, &entry).await {
            Ok(()) => return Ok(()),
            Err(error) if code == Code::Ok => {
                tracing::warn!(
                    error = status::chain(&error),
                    "a call is not answered because the audit log cannot be written"
                );
                return Err(status::unavailable(
                    "the call may have taken effect, but the audit log cannot be written",
                ));
            }
            Err(_) => {}
        }
    }
    api.audit_writer().enqueue(entry);
    Ok(())
}

/// A call until its response. A call that is dropped is counted and recorded as `DEADLINE_EXCEEDED`
/// after its deadline, else (the client has disconnected) as `CANCELLED`, unless its change is in
/// the audit log already.
struct CallGuard<'a> {
    api: &'a Api,
    /// With the origin and the caller of the call.
    draft: Option<(Arc<AuditDraft>, &'a Origin, Option<CallerIdentity>)>,
    call: metrics::Call,
    /// `None`: the response was sent, or the call has no deadline.
    deadline: Option<Deadline>,
}

impl<'a> CallGuard<'a> {
    fn new(
        api: &'a Api,
        method: Option<&'static Method>,
        protocol: Protocol,
        deadline: Option<Deadline>,
    ) -> Self {
        let call = metrics::Call::begin(method.map(|method| method.name.as_str()), protocol);
        Self { api, draft: None, call, deadline }
    }

    fn finish<R>(&mut self, code: Code, response: Response<R>) -> Response<R> {
        self.call.set_code(code);
        self.deadline = None;
        response
    }
}

impl Drop for CallGuard<'_> {
    fn drop(&mut self) {
        let mut code = Code::Cancelled;
        if self.deadline.is_some_and(Deadline::is_over) {
            code = Code::DeadlineExceeded;
            self.call.set_code(code);
        }
        if let Some((draft, origin, known)) = self.draft.take()
            && !draft.is_written()
        {
            self.api.audit_writer().record_abandoned(origin, known, draft.entry(code));
        }
    }
}

/// An authorized caller, and the quotas that the call was counted for.
#[derive(Default)]
struct AuthorizedCall {
    /// `None` for public methods.
    caller: Option<Caller>,
    metered: QuotaStates,
}

/// Authenticates and authorizes a call. `metered` is set if the call was counted before; `account`
/// is charged for the resources of the call.
#[expect(clippy::too_many_arguments, reason = "they are what is known of a call")]
async fn admit(
    api: &Api,
    path: &str,
    access: Access,
    credentials: Result<Credentials, Status>,
    origin: &Origin,
    method: Option<&'static Method>,
    metered: Option<QuotaStates>,
    account: Option<&Account>,
) -> Result<AuthorizedCall, Status> {
    if access == Access::Public {
        return account
            .map_or(Ok(()), Account::enter_anonymous)
            .map(|()| AuthorizedCall::default());
    }
    let found = match credentials {
        Ok(credentials) => authenticate_and_count(api, credentials, origin, metered).await,
        Err(status) => Err(status.into()),
    };
    let found = found.and_then(|(caller, metered)| {
        match check(path, access, &caller)
            .and_then(|()| account.map_or(Ok(()), |account| account.identify(caller.organization)))
        {
            Ok(()) => Ok(AuthorizedCall { caller: Some(caller), metered }),
            Err(status) => Err(Rejection { status, known: Some(CallerIdentity::from(&caller)) }),
        }
    });
    found.map_err(|Rejection { status, known }| {
        // Too many failed log-ins are refusals as well.
        if writer::is_refusal(status.code()) || status.code() == Code::ResourceExhausted {
            let name = method.map(|method| method.name.as_str()).unwrap_or_default();
            api.audit_writer().record_refused(
                origin,
                known,
                origin.entry(name, known, status.code()),
            );
        }
        status
    })
}

/// Authenticates the caller, and counts the call. A caller that was refused for its rate a moment
/// ago is refused without a check.
async fn authenticate_and_count(
    api: &Api,
    credentials: Credentials,
    origin: &Origin,
    metered: Option<QuotaStates>,
) -> Result<(Caller, QuotaStates), Rejection> {
    let credential = credentials
        .bearer
        .as_ref()
        .map(|bearer| CredentialHash::new(bearer, credentials.organization.as_deref()));
    let now = Instant::now();
    if metered.is_none()
        && let Some(rejection) = credential
            .as_ref()
            .and_then(|credential| api.quotas().cached_rejection(credential, now))
    {
        return Err(Rejection { status: rejection.status(now), known: Some(rejection.known) });
    }
    let caller = authenticate(api, credentials, origin).await?;
    let metered = match metered {
        Some(metered) => metered,
        None => {
            let counted = api.quotas().count_request(api.store().ok(), &caller, credential).await;
            counted.map_err(|status| Rejection {
                status,
                known: Some(CallerIdentity::from(&caller)),
            })?
        }
    };
    Ok((caller, metered))
}

/// Checks whether a caller may call the method of this path.
fn check(path: &str, access: Access, caller: &Caller) -> Result<(), Status> {
    if caller.confined.is_some() && !rules::allows_scan_token(path) {
        return Err(Status::permission_denied(
            "the token of a scan is only for the task of the scan",
        ));
    }
    access.check(caller)
}

/// Checks whether the sender of a request may call the method of this path, for protocols that
/// check before they read a body. Returns the quotas that the call was counted for. The layer
/// checks again, because its decision is authoritative, but does not count the call again.
///
/// # Errors
/// Those of the layer.
pub(crate) fn authorize<'a, B>(
    api: &'a Api,
    path: &str,
    request: &Request<B>,
) -> impl Future<Output = Result<QuotaStates, Status>> + Send + use<'a, B> {
    let access =
        rules::access(path).ok_or_else(|| Status::unimplemented("the method does not exist"));
    let (method, origin) = (methods::find_method(path), Origin::from_request(request));
    let credentials = read_credentials(request, origin.peer);
    let (path, account) = (path.to_owned(), request.extensions().get::<Account>().cloned());
    async move {
        let admitted =
            admit(api, &path, access?, credentials, &origin, method, None, account.as_ref()).await;
        admitted.map(|admitted| admitted.metered)
    }
}

/// Reads the credentials of a request.
fn read_credentials<B>(request: &Request<B>, peer: Peer) -> Result<Credentials, Status> {
    let headers = request.headers();
    let bearer = match single_header(headers, header::AUTHORIZATION.as_str())? {
        None => None,
        Some(text) => {
            let bearer =
                text.split_once(' ').filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
            let malformed = || {
                Status::unauthenticated("authorization must be `Bearer` and an API key or a token")
            };
            Some(bearer.map(|(_, token)| token.trim().to_owned()).ok_or_else(malformed)?)
        }
    };
    let organization = single_header(headers, ORGANIZATION)?.map(str::to_owned);
    Ok(Credentials { bearer, organization, peer })
}

/// Returns the value of a header that must not be repeated: with two values, one could be checked
/// and the other used.
fn single_header<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Status> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let invalid = || {
        Status::unauthenticated(format!("{name} must be set once, with visible ASCII characters"))
    };
    if values.next().is_some() {
        return Err(invalid());
    }
    value.to_str().map(Some).map_err(|_| invalid())
}
