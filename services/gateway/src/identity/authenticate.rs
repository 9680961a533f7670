//! Who a request is from.

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
    audit::origin::{Known, Origin},
    caller::Caller,
    limit::Holder,
    status,
};

/// Characters of what is presented: a token of an issuer can be long, but not without end.
const LONGEST: usize = 16 * 1024;

/// What the audit trail calls it that somebody came for the first time, or joined an organization.
const SIGN_IN: &str = "SignIn";

/// What a request says of who sent it.
pub(crate) struct Presented {
    /// From `authorization`.
    pub(crate) bearer: Option<String>,
    /// From `x-organization-id`.
    pub(crate) organization: Option<String>,
    /// Where it came from.
    pub(crate) peer: Peer,
}

/// What is needed to judge it.
pub(crate) struct Gate {
    login: Login,
    /// The user that this process runs as, who may do everything over the socket.
    uid: Option<u32>,
    oidc: Option<Oidc>,
    failures: Failures,
}

impl Gate {
    pub(crate) fn new(config: &Config) -> anyhow::Result<Self> {
        let oidc = match (&config.gateway_oidc_issuer, &config.gateway_oidc_audience) {
            (Some(issuer), Some(audience)) => Some(Oidc::new(issuer, audience)?),
            _ => None,
        };
        Ok(Self {
            login: config.gateway_login,
            uid: own_uid(),
            oidc,
            failures: Failures::new(config.gateway_login_failures),
        })
    }

    /// Whether who comes from there without credentials is taken for the operator. Pages of others
    /// in a browser of this machine don't get here: the protocols refuse them.
    pub(crate) fn trusts(&self, peer: Peer) -> bool {
        match peer {
            Peer::Process { uid } => Some(uid) == self.uid,
            Peer::Address(_) => self.login == Login::Local && peer.is_loopback(),
            // A proxy may be on this machine and speak for all others.
            Peer::Forwarded(_) | Peer::Unknown => false,
        }
    }
}

/// Whose files this process makes, which is how the kernel names it to others.
pub(crate) fn own_uid() -> Option<u32> {
    use std::os::unix::fs::MetadataExt as _;
    std::fs::metadata(PathBuf::from("/proc/self")).ok().map(|process| process.uid())
}

/// Why nobody is let in, and who it is as far as that is known.
pub(crate) struct Refused {
    pub(crate) status: Status,
    pub(crate) known: Option<Known>,
}

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Self { status, known: None }
    }
}

/// Finds the caller. `origin` is where they come from, for the audit trail.
///
/// # Errors
/// `UNAUTHENTICATED` when nobody can be found, `PERMISSION_DENIED` when they don't belong to the
/// organization they chose, `RESOURCE_EXHAUSTED` after too many failures.
pub(crate) async fn authenticate(
    api: &Api,
    presented: Presented,
    origin: &Origin,
) -> Result<Caller, Refused> {
    let gate = api.gate();
    let wanted = presented.organization.as_deref().map(str::parse::<OrganizationId>).transpose();
    let everything: Arc<[Scope]> = Arc::new([Scope::Admin]);
    let Some(bearer) = presented.bearer else {
        if !gate.trusts(presented.peer) {
            return Err(Status::unauthenticated(
                "this needs an API key or a token: `authorization: Bearer …`",
            )
            .into());
        }
        let wanted = wanted.map_err(|_| unknown_organization())?.unwrap_or(OrganizationId::LOCAL);
        let role = match wanted {
            // What anybody on this machine is at once, without asking the database.
            OrganizationId::LOCAL => Role::Owner,
            other => {
                let known =
                    Known { organization: OrganizationId::LOCAL, user: UserId::LOCAL, key: None };
                Box::pin(member(api.store()?, known, other)).await?
            }
        };
        return Ok(Caller {
            organization: wanted,
            user: UserId::LOCAL,
            key: None,
            limits: Limits::default(),
            counted_for: None,
            role,
            scopes: everything,
            until: None,
            confined: None,
        });
    };
    let (address, hash) = (presented.peer.address(), credential::digest(&bearer));
    // Keys and codes are looked at whoever failed before: that is one look into an index. A token
    // may make the issuer be asked.
    let limited = ![credential::KEY, credential::CODE, scan_token::PREFIX]
        .iter()
        .any(|kind| bearer.starts_with(kind));
    if limited && gate.failures.refuses(address, &hash, Instant::now()) {
        return Err(status::exhausted(
            "too many log-ins from this address have failed; try again in a minute",
        )
        .into());
    }
    // Who has no credentials can present something else each time: what all need is not theirs to
    // fill.
    let _login = if gate.failures.knows(&hash) {
        None
    } else {
        let login = api.capacity().logins.take(Holder::network(address), 1);
        Some(login.map_err(|full| full.status("log-ins under way"))?)
    };
    // What is rarer than a key is boxed, so that each request is only as large as one with a key.
    let found = if bearer.len() > LONGEST {
        Ok(None)
    } else if bearer.starts_with(credential::KEY) {
        by_key(api.store()?, &hash).await.map_err(Refused::from)
    } else if bearer.starts_with(scan_token::PREFIX) {
        Box::pin(by_scan(api, &bearer)).await.map_err(Refused::from)
    } else if !limited {
        // A code is exchanged, and opens nothing itself.
        Ok(None)
    } else {
        Box::pin(by_token(
            api,
            &bearer,
            wanted.as_ref().ok().copied().flatten(),
            &everything,
            origin,
        ))
        .await
    };
    match found? {
        Some(caller) => {
            gate.failures.accepted(&hash);
            match wanted {
                Ok(wanted) if wanted.is_none_or(|wanted| wanted == caller.organization) => {
                    Ok(caller)
                }
                _ => Err(Refused {
                    status: unknown_organization(),
                    known: Some(Known::from(&caller)),
                }),
            }
        }
        None => {
            gate.failures.forget(&hash);
            if limited {
                gate.failures.failed(address, &hash, Instant::now());
            }
            // One answer for all: who presents something in vain learns nothing of why.
            Err(Status::unauthenticated("the API key or token is not valid").into())
        }
    }
}

async fn by_key(store: &Store, hash: &[u8; 32]) -> Result<Option<Caller>, Status> {
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

/// Who comes with the token of a scan acts as a member who may do a few things with one task, until
/// the scan is over.
async fn by_scan(api: &Api, token: &str) -> Result<Option<Caller>, Status> {
    let Ok(keys) = api.token_keys() else { return Ok(None) };
    let Ok(token) = ScanToken::verify(token, keys, clock::now()) else { return Ok(None) };
    let ids =
        (token.organization.parse(), token.scan.parse(), token.task.parse(), token.user.parse());
    let (Ok(organization), Ok(scan), Ok(task), Ok(user)) = ids else { return Ok(None) };
    let by =
        api.store()?.scan_open_creator(organization, scan).await.map_err(status::from_store)?;
    let Some(by) = by else { return Ok(None) };
    Ok(Some(Caller {
        organization,
        user,
        key: None,
        limits: Limits::default(),
        // Who made the scan is a key or a person.
        counted_for: by.parse().ok(),
        role: Role::Member,
        scopes: Arc::new([Scope::TasksWrite]),
        until: Some(token.expires_at),
        confined: Some(task),
    }))
}

async fn by_token(
    api: &Api,
    token: &str,
    wanted: Option<OrganizationId>,
    scopes: &Arc<[Scope]>,
    origin: &Origin,
) -> Result<Option<Caller>, Refused> {
    let Some(oidc) = &api.gate().oidc else { return Ok(None) };
    let now = clock::now();
    let (profile, until) = match oidc.verify(token, Instant::now(), now).await {
        Ok(verified) => verified,
        Err(error @ oidc::Error::Invalid(_)) => {
            tracing::debug!(%error, "a token was refused");
            return Ok(None);
        }
        Err(error @ oidc::Error::Unavailable(_)) => {
            tracing::warn!(error = status::chain(&error), "the issuer of log-ins cannot be asked");
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
    let organization = wanted.unwrap_or(personal);
    let role =
        member(store, Known { organization: personal, user, key: None }, organization).await?;
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

/// What somebody who is known is in the organization they chose.
async fn member(
    store: &Store,
    known: Known,
    organization: OrganizationId,
) -> Result<Role, Refused> {
    let role = store.user_role(known.user, organization).await.map_err(status::from_store)?;
    role.ok_or_else(|| Refused { status: unknown_organization(), known: Some(known) })
}

/// Whether a caller still is who they were, for what lasts longer than a call.
pub(crate) async fn holds(store: &Store, caller: &Caller) -> Result<bool, construct_store::Error> {
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

/// The same words for one that does not exist and for one of others.
fn unknown_organization() -> Status {
    Status::permission_denied("x-organization-id names no organization that these credentials open")
}
