//! Identifies the caller of a request.

use std::{path::PathBuf, sync::Arc, time::Instant};

use construct_domain::{
    OrganizationId, UserId,
    access::{Role, Scope},
};
use construct_runtime::{
    clock,
    scan_token::{self, ScanToken},
};
use construct_store::{Limits, Store};
use tonic::{Code, Status};

use super::{
    credential,
    failures::Failures,
    oidc::{self, Oidc},
    peer::Peer,
};
use crate::{
    Config, Login,
    api::Api,
    audit::origin::{CallerIdentity, Origin},
    caller::Caller,
    limit::Holder,
    status,
};

/// Maximum length of a credential: a token of an issuer can be long.
const MAX_CREDENTIAL_BYTES: usize = 16 * 1024;

/// The audit log's name for the first log-in of a user, and for joining an organization.
const SIGN_IN: &str = "SignIn";

/// The credentials of a request.
pub(crate) struct Credentials {
    /// From `authorization`.
    pub(crate) bearer: Option<String>,
    /// From `x-organization-id`.
    pub(crate) organization: Option<String>,
    /// The origin of the connection.
    pub(crate) peer: Peer,
}

/// Authenticates callers.
pub(crate) struct Authenticator {
    login: Login,
    /// The user of this process, who may do everything over the socket.
    uid: Option<u32>,
    oidc: Option<Oidc>,
    failures: Failures,
}

impl Authenticator {
    pub(crate) fn new(config: &Config) -> anyhow::Result<Self> {
        let oidc = match (&config.gateway_oidc_issuer, &config.gateway_oidc_audience) {
            (Some(issuer), Some(audience)) => Some(Oidc::new(issuer, audience)?),
            _ => None,
        };
        Ok(Self {
            login: config.gateway_login,
            uid: current_uid(),
            oidc,
            failures: Failures::new(config.gateway_login_failures),
        })
    }

    /// Whether a peer without credentials is the operator. Foreign pages in a browser of this
    /// machine do not get here: the protocols refuse them.
    pub(crate) fn trusts(&self, peer: Peer) -> bool {
        match peer {
            Peer::Process { uid } => Some(uid) == self.uid,
            Peer::Address(_) => self.login == Login::Local && peer.is_loopback(),
            // A proxy may run on this machine and forward requests of others.
            Peer::Forwarded(_) | Peer::Unknown => false,
        }
    }
}

/// The user of this process, as the kernel reports it for the process's files.
pub(crate) fn current_uid() -> Option<u32> {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(PathBuf::from("/proc/self")).ok().map(|process| process.uid())
}

/// An authentication failure, and the caller as far as known.
pub(crate) struct Rejection {
    pub(crate) status: Status,
    pub(crate) known: Option<CallerIdentity>,
}

impl From<Status> for Rejection {
    fn from(status: Status) -> Self {
        Self { status, known: None }
    }
}

/// Identifies the caller. `origin` is for the audit log.
///
/// # Errors
/// `UNAUTHENTICATED` when the caller is unknown, `PERMISSION_DENIED` when the caller is not a
/// member of the selected organization, `RESOURCE_EXHAUSTED` after too many failures.
pub(crate) async fn authenticate(
    api: &Api,
    credentials: Credentials,
    origin: &Origin,
) -> Result<Caller, Rejection> {
    let gate = api.gate();
    let selected =
        credentials.organization.as_deref().map(str::parse::<OrganizationId>).transpose();
    let all_scopes: Arc<[Scope]> = Arc::new([Scope::Admin]);
    let Some(bearer) = credentials.bearer else {
        if !gate.trusts(credentials.peer) {
            return Err(Status::unauthenticated(
                "an API key or a token is required: `authorization: Bearer …`",
            )
            .into());
        }
        let selected =
            selected.map_err(|_| unknown_organization())?.unwrap_or(OrganizationId::LOCAL);
        let role = match selected {
            // The operator on this machine, without a query.
            OrganizationId::LOCAL => Role::Owner,
            other => {
                let known = CallerIdentity {
                    organization: OrganizationId::LOCAL,
                    user: UserId::LOCAL,
                    key: None,
                };
                Box::pin(member_role(api.store()?, known, other)).await?
            }
        };
        return Ok(Caller {
            organization: selected,
            user: UserId::LOCAL,
            key: None,
            limits: Limits::default(),
            counted_for: None,
            role,
            scopes: all_scopes,
            until: None,
            confined: None,
        });
    };
    let (address, hash) = (credentials.peer.address(), credential::digest(&bearer));
    // Keys and codes are never limited: they cost one index lookup. A token may cost a request to
    // the issuer.
    let limited = ![credential::KEY, credential::CODE, scan_token::PREFIX]
        .iter()
        .any(|kind| bearer.starts_with(kind));
    if limited && gate.failures.is_limited(address, &hash, Instant::now()) {
        return Err(status::exhausted(
            "too many log-ins from this address have failed; try again in a minute",
        )
        .into());
    }
    // A client without valid credentials can present a new one each time. It must not use up the
    // log-ins of all.
    let _login = if gate.failures.was_accepted(&hash) {
        None
    } else {
        let login = api.capacity().logins.acquire(Holder::network(address), 1);
        Some(login.map_err(|full| full.status("concurrent log-ins"))?)
    };
    // The rare cases are boxed, so that the future of a request with a key stays small.
    let caller = if bearer.len() > MAX_CREDENTIAL_BYTES {
        Ok(None)
    } else if bearer.starts_with(credential::KEY) {
        authenticate_key(api.store()?, &hash).await.map_err(Rejection::from)
    } else if bearer.starts_with(scan_token::PREFIX) {
        Box::pin(authenticate_scan(api, &bearer)).await.map_err(Rejection::from)
    } else if !limited {
        // A code can only be exchanged.
        Ok(None)
    } else {
        Box::pin(authenticate_token(
            api,
            &bearer,
            selected.as_ref().ok().copied().flatten(),
            &all_scopes,
            origin,
        ))
        .await
    };
    match caller? {
        Some(caller) => {
            gate.failures.record_success(&hash);
            match selected {
                Ok(selected) if selected.is_none_or(|selected| selected == caller.organization) => {
                    Ok(caller)
                }
                _ => Err(Rejection {
                    status: unknown_organization(),
                    known: Some(CallerIdentity::from(&caller)),
                }),
            }
        }
        None => {
            gate.failures.forget(&hash);
            if limited {
                gate.failures.record_failure(address, &hash, Instant::now());
            }
            // The same answer for all failures, so that it reveals nothing.
            Err(Status::unauthenticated("the API key or token is not valid").into())
        }
    }
}

async fn authenticate_key(store: &Store, hash: &[u8; 32]) -> Result<Option<Caller>, Status> {
    let holder = store.api_key_holder(hash, clock::now()).await.map_err(status::from_store)?;
    Ok(holder.map(|holder| Caller {
        organization: holder.organization,
        user: holder.user,
        key: Some(holder.key),
        limits: holder.limits,
        counted_for: Some(holder.key),
        role: holder.role,
        scopes: holder.scopes.into(),
        until: holder.expires_at,
        confined: None,
    }))
}

/// A caller with the token of a scan acts as a member with few permissions on one task, until the
/// scan ends.
async fn authenticate_scan(api: &Api, token: &str) -> Result<Option<Caller>, Status> {
    let Ok(keys) = api.token_keys() else { return Ok(None) };
    let Ok(token) = ScanToken::verify(token, keys, clock::now()) else { return Ok(None) };
    let ids =
        (token.organization.parse(), token.scan.parse(), token.task.parse(), token.user.parse());
    let (Ok(organization), Ok(scan), Ok(task), Ok(user)) = ids else { return Ok(None) };
    let creator =
        api.store()?.scan_open_creator(organization, scan).await.map_err(status::from_store)?;
    let Some(creator) = creator else { return Ok(None) };
    Ok(Some(Caller {
        organization,
        user,
        key: None,
        limits: Limits::default(),
        // The creator of the scan is a key or a user.
        counted_for: creator.parse().ok(),
        role: Role::Member,
        scopes: Arc::new([Scope::TasksWrite]),
        until: Some(token.expires_at),
        confined: Some(task),
    }))
}

async fn authenticate_token(
    api: &Api,
    token: &str,
    selected: Option<OrganizationId>,
    scopes: &Arc<[Scope]>,
    origin: &Origin,
) -> Result<Option<Caller>, Rejection> {
    let Some(oidc) = &api.gate().oidc else { return Ok(None) };
    let now = clock::now();
    let (profile, until) = match oidc.verify(token, Instant::now(), now).await {
        Ok(verified) => verified,
        Err(error @ oidc::Error::Invalid(_)) => {
            tracing::debug!(%error, "a token was refused");
            return Ok(None);
        }
        Err(error @ oidc::Error::Unavailable(_)) => {
            tracing::warn!(error = status::chain(&error), "the issuer cannot be reached");
            return Err(status::unavailable(
                "the issuer of log-ins cannot be reached at the moment",
            )
            .into());
        }
    };
    let store = api.store()?;
    let entry = origin.entry(SIGN_IN, None, Code::Ok);
    let (user, personal) =
        store.user_sign_in(&profile, Some(entry), now).await.map_err(status::from_store)?;
    let organization = selected.unwrap_or(personal);
    let role = member_role(
        store,
        CallerIdentity { organization: personal, user, key: None },
        organization,
    )
    .await?;
    Ok(Some(Caller {
        organization,
        user,
        key: None,
        limits: Limits::default(),
        counted_for: None,
        role,
        scopes: Arc::clone(scopes),
        until: Some(until),
        confined: None,
    }))
}

/// Returns the role of a known user in the selected organization.
async fn member_role(
    store: &Store,
    known: CallerIdentity,
    organization: OrganizationId,
) -> Result<Role, Rejection> {
    let role = store.user_role(known.user, organization).await.map_err(status::from_store)?;
    role.ok_or_else(|| Rejection { status: unknown_organization(), known: Some(known) })
}

/// Whether a caller is still valid, for streams.
pub(crate) async fn is_still_valid(
    store: &Store,
    caller: &Caller,
) -> Result<bool, construct_store::Error> {
    let now = clock::now();
    if caller.until.is_some_and(|until| until <= now) {
        return Ok(false);
    }
    match caller.key {
        Some(key) => store.api_key_is_valid(key, now).await,
        None if (caller.user, caller.organization) == (UserId::LOCAL, OrganizationId::LOCAL) => {
            Ok(true)
        }
        None => Ok(store.user_role(caller.user, caller.organization).await?.is_some()),
    }
}

/// The same text for a missing organization and for one of others.
fn unknown_organization() -> Status {
    Status::permission_denied(
        "x-organization-id names no organization that these credentials have access to",
    )
}
