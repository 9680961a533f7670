//! The layer itself: it stands before every method and lets nobody through unseen.

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
    authenticate::{Presented, Refused, authenticate},
    peer::Peer,
    rules::{self, Access},
};
use crate::{
    api::Api,
    audit::{
        draft::AuditDraft,
        methods::{self, Method},
        origin::{Known, Origin, Protocol},
        writer,
    },
    caller::Caller,
    deadline::Deadline,
    limit::Account,
    metrics::{self, Transcoded},
    quotas::{Mark, Metered},
    status,
};

/// Chooses the organization where a caller has several.
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
        // The one that was asked whether it is ready is the one to call.
        let mut inner = std::mem::replace(&mut self.inner, next);
        let api = self.api.clone();
        // Whatever a protocol in front of this may have let through: who calls is said here and nowhere
        // else.
        request.extensions_mut().remove::<Caller>();
        request.extensions_mut().remove::<Arc<AuditDraft>>();
        let path = request.uri().path().to_owned();
        let Some(access) = rules::of(&path) else {
            return Box::pin(async {
                Ok(Status::unimplemented("there is no such method").into_http())
            });
        };
        let method = methods::of(&path);
        let origin = Origin::of(&request);
        let presented = presented(&request, origin.peer);
        let reached = request.extensions_mut().remove::<Transcoded>();
        // A protocol has looked at who calls before it read the body, and the call was counted there.
        let metered = request.extensions_mut().remove::<Metered>();
        request.extensions_mut().insert(origin.peer);
        let deadline = Deadline::from_extensions(request.extensions());
        let account = request.extensions().get::<Account>().cloned();
        Box::pin(async move {
            let mut running = Running::new(&api, method, origin.protocol, deadline);
            if let Some(reached) = &reached {
                reached.reached();
            }
            let Admitted { caller, metered } = match admit(
                &api,
                &path,
                access,
                presented,
                &origin,
                method,
                metered,
                account.as_ref(),
            )
            .await
            {
                Ok(admitted) => admitted,
                Err(status) => return Ok(running.ended(status.code(), status.into_http())),
            };
            let known = caller.as_ref().map(Known::from);
            let draft = method
                .filter(|method| method.writes)
                .map(|method| Arc::new(AuditDraft::new(method, &origin, known)));
            if let Some(caller) = caller {
                request.extensions_mut().insert(caller);
            }
            if let Some(draft) = &draft {
                request.extensions_mut().insert(Arc::clone(draft));
                running.draft = Some((Arc::clone(draft), &origin, known));
            }
            let mut response = blame_the_client(inner.call(request).await?);
            metered.tell(response.headers_mut());
            if origin.protocol.is_operator() {
                response.extensions_mut().insert(metered.clone());
            }
            let code = Status::from_header_map(response.headers())
                .map_or(Code::Ok, |status| status.code());
            let noted = match (&draft, method) {
                (Some(draft), _) if draft.is_written() => Ok(()),
                // What strangers fail at, and what is refused because there is too much of it, is
                // counted and does not reach the database by itself: a flood of it must cost nobody
                // else anything.
                (draft, Some(method))
                    if writer::is_refusal(code)
                        || draft.is_some()
                            && (code == Code::ResourceExhausted
                                || known.is_none() && code != Code::Ok) =>
                {
                    let entry = draft.as_ref().map(|draft| draft.entry(code));
                    let entry = entry.unwrap_or_else(|| origin.entry(&method.name, known, code));
                    api.audit_writer().refused(&origin, known, entry);
                    Ok(())
                }
                // Boxed, because few calls come here and each would be as large as this.
                (Some(draft), _) => Box::pin(note(&api, draft.entry(code), code)).await,
                (None, _) => Ok(()),
            };
            running.draft = None;
            Ok(match noted {
                Ok(()) => running.ended(code, response),
                Err(status) => {
                    let mut response = status.clone().into_http();
                    metered.tell(response.headers_mut());
                    running.ended(status.code(), response)
                }
            })
        })
    }
}

/// How what tonic says of a request that is not well-formed begins. It calls that `INTERNAL`, as if
/// it were our defect, and offers no other place to tell the two apart. A compressed message
/// without `grpc-encoding` is not among them: that this is `INTERNAL` is what gRPC's specification
/// demands.
const MALFORMED: [&str; 5] = [
    "failed to decode Protobuf message",
    "protocol error: received message with invalid compression flag",
    "Error decompressing: ",
    "Unexpected EOF decoding stream",
    "Missing request message",
];

/// How what tonic says of a message that is too large begins, before and after it is decompressed.
const TOO_LARGE: [&str; 2] =
    ["Error, decoded message length too large", "Error decompressing: size limit"];

/// A request that cannot be read is the client's mistake. Said here, so that it is counted and
/// written down as that as well.
fn blame_the_client<B>(mut response: Response<B>) -> Response<B> {
    let Some(status) = Status::from_header_map(response.headers()) else { return response };
    let is_one_of = |known: &[&str]| known.iter().any(|words| status.message().starts_with(words));
    match status.code() {
        Code::Internal if is_one_of(&MALFORMED) => {
            response
                .headers_mut()
                .insert(Status::GRPC_STATUS, HeaderValue::from(Code::InvalidArgument as i32));
        }
        Code::OutOfRange | Code::ResourceExhausted if is_one_of(&TOO_LARGE) => {
            // Fails for no status of ours.
            _ = status::too_large_with_message(status.message()).add_header(response.headers_mut());
        }
        _ => {}
    }
    response
}

/// Writes down a call that changed nothing in the database, or failed, before it is answered.
///
/// # Errors
/// `UNAVAILABLE` when that is not possible and the call went well: what is not written down is not
/// given out. A call that failed is answered with its failure, and its entry follows when the
/// database is back.
async fn note(api: &Api, entry: AuditEntry, code: Code) -> Result<(), Status> {
    // The database is away, as likely as not: the next attempt would take as long again.
    if code != Code::Unavailable {
        match writer::now(api, &entry).await {
            Ok(()) => return Ok(()),
            Err(error) if code == Code::Ok => {
                tracing::warn!(
                    error = status::chain(&error),
                    "a call is not answered because the audit trail cannot be written"
                );
                return Err(status::unavailable(
                    "it may have been done, and cannot be written down at the moment",
                ));
            }
            Err(_) => {}
        }
    }
    api.audit_writer().later(entry);
    Ok(())
}

/// A call until it is answered. One that nobody waits for any more is counted and written down as
/// `DEADLINE_EXCEEDED` when its time is over, else (the client is gone) as `CANCELLED`, unless what
/// it changed is in the trail already.
struct Running<'a> {
    api: &'a Api,
    /// With where the call comes from and whose it is.
    draft: Option<(Arc<AuditDraft>, &'a Origin, Option<Known>)>,
    call: metrics::Call,
    /// None: it is answered, or takes as long as it takes.
    deadline: Option<Deadline>,
}

impl<'a> Running<'a> {
    fn new(
        api: &'a Api,
        method: Option<&'static Method>,
        protocol: Protocol,
        deadline: Option<Deadline>,
    ) -> Self {
        let call = metrics::Call::begin(method.map(|method| method.name.as_str()), protocol);
        Self { api, draft: None, call, deadline }
    }

    fn ended<R>(&mut self, code: Code, response: Response<R>) -> Response<R> {
        self.call.set_code(code);
        self.deadline = None;
        response
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut code = Code::Cancelled;
        if self.deadline.is_some_and(Deadline::is_over) {
            code = Code::DeadlineExceeded;
            self.call.set_code(code);
        }
        if let Some((draft, origin, known)) = self.draft.take()
            && !draft.is_written()
        {
            self.api.audit_writer().abandoned(origin, known, draft.entry(code));
        }
    }
}

/// Who was let in, and what their call was counted against.
#[derive(Default)]
struct Admitted {
    /// None: of a method that anybody may call.
    caller: Option<Caller>,
    metered: Metered,
}

/// Lets a call in. `metered` is what it was counted against already; `account` is charged for what
/// it holds from now on.
#[expect(clippy::too_many_arguments, reason = "they are what is known of a call")]
async fn admit(
    api: &Api,
    path: &str,
    access: Access,
    presented: Result<Presented, Status>,
    origin: &Origin,
    method: Option<&'static Method>,
    metered: Option<Metered>,
    account: Option<&Account>,
) -> Result<Admitted, Status> {
    if access == Access::Public {
        return account.map_or(Ok(()), Account::enter_anonymous).map(|()| Admitted::default());
    }
    let found = match presented {
        Ok(presented) => judge(api, presented, origin, metered).await,
        Err(status) => Err(status.into()),
    };
    let found = found.and_then(|(caller, metered)| {
        match check(path, access, &caller)
            .and_then(|()| account.map_or(Ok(()), |account| account.identify(caller.organization)))
        {
            Ok(()) => Ok(Admitted { caller: Some(caller), metered }),
            Err(status) => Err(Refused { status, known: Some(Known::from(&caller)) }),
        }
    });
    found.map_err(|Refused { status, known }| {
        // Too many log-ins that failed are refusals as well.
        if writer::is_refusal(status.code()) || status.code() == Code::ResourceExhausted {
            let name = method.map(|method| method.name.as_str()).unwrap_or_default();
            api.audit_writer().refused(origin, known, origin.entry(name, known, status.code()));
        }
        status
    })
}

/// Finds out who calls, and counts the call. What was refused a moment ago because there was too
/// much of it is refused unseen.
async fn judge(
    api: &Api,
    presented: Presented,
    origin: &Origin,
    metered: Option<Metered>,
) -> Result<(Caller, Metered), Refused> {
    let mark =
        presented.bearer.as_ref().map(|bearer| Mark::of(bearer, presented.organization.as_deref()));
    let now = Instant::now();
    if metered.is_none()
        && let Some(shed) = mark.as_ref().and_then(|mark| api.quotas().shed(mark, now))
    {
        return Err(Refused { status: shed.status(now), known: Some(shed.known) });
    }
    let caller = authenticate(api, presented, origin).await?;
    let metered = match metered {
        Some(metered) => metered,
        None => {
            let counted = api.quotas().request(api.store().ok(), &caller, mark).await;
            counted.map_err(|status| Refused { status, known: Some(Known::from(&caller)) })?
        }
    };
    Ok((caller, metered))
}

/// Whether a caller may call the method of this path.
fn check(path: &str, access: Access, caller: &Caller) -> Result<(), Status> {
    if caller.confined.is_some() && !rules::is_of_scans(path) {
        return Err(Status::permission_denied(
            "the token of a scan is only for the task of the scan",
        ));
    }
    access.check(caller)
}

/// Whether who sends a request may call the method of this path, and what the call was counted
/// against. For those that look before they read a body; the layer looks again, because what it
/// lets through is what counts, but does not count it again.
///
/// # Errors
/// Those of the layer.
pub(crate) fn admitted<'a, B>(
    api: &'a Api,
    path: &str,
    request: &Request<B>,
) -> impl Future<Output = Result<Metered, Status>> + Send + use<'a, B> {
    let access = rules::of(path).ok_or_else(|| Status::unimplemented("there is no such method"));
    let (method, origin) = (methods::of(path), Origin::of(request));
    let presented = presented(request, origin.peer);
    let (path, account) = (path.to_owned(), request.extensions().get::<Account>().cloned());
    async move {
        let admitted =
            admit(api, &path, access?, presented, &origin, method, None, account.as_ref()).await;
        admitted.map(|admitted| admitted.metered)
    }
}

/// What a request says of who sent it.
fn presented<B>(request: &Request<B>, peer: Peer) -> Result<Presented, Status> {
    let headers = request.headers();
    let bearer = match one(headers, header::AUTHORIZATION.as_str())? {
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
    let organization = one(headers, ORGANIZATION)?.map(str::to_owned);
    Ok(Presented { bearer, organization, peer })
}

/// A header that is given once or not at all: of two, one would be judged and the other believed.
fn one<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, Status> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let wrong = || {
        Status::unauthenticated(format!("{name} must be given once, in visible ASCII characters"))
    };
    if values.next().is_some() {
        return Err(wrong());
    }
    value.to_str().map(Some).map_err(|_| wrong())
}
