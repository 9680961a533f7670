//! `construct login`: a user logs in at the issuer of the context's gateway. The context stores the
//! session instead of a key (`docs/adr/0043-login.md`).
//!
//! If the issuer supports it, the user enters a code in any browser (RFC 8628). Otherwise a browser
//! on this machine is redirected to a loopback port (RFC 8252). A command renews a session that is
//! about to expire when it starts, and while it runs.

mod browser;
mod device;
mod issuer;
mod resource;
mod session;

#[cfg(test)]
mod tests;

use std::time::Duration;

use clap::Args;
use construct_proto::v1::{WhoAmIRequest, WhoAmIResponse};
use tokio::{
    sync::Mutex,
    time::{Instant, sleep, timeout},
};

use self::{
    issuer::{Error, Issuer, Tokens},
    resource::Resource,
    session::Session,
};
use crate::{
    context::{Login, LoginContext, Target, TargetArgs, TlsArgs},
    failure::Failure,
    gateway::{Gateway, call},
    keyring::KeyringMode,
    output,
    text::one_line,
};

/// How long before its expiry a session is renewed: requests take time, and clocks differ.
const RENEWAL_MARGIN: Duration = Duration::from_secs(60);
/// The longest time between checks of a session's expiry: timers do not run while the machine
/// sleeps.
const EXPIRY_POLL_INTERVAL: Duration = Duration::from_secs(30);
/// How long a command waits before it exits for a renewal in progress.
const RENEWAL_GRACE_PERIOD: Duration = Duration::from_secs(10);
/// Held while a session is renewed and stored. Many issuers rotate refresh tokens: a command that
/// exited in between would lose the next token.
static RENEWAL: Mutex<()> = Mutex::const_new(());
/// The first and the longest delay between attempts to renew a session.
const RENEWAL_DELAYS: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(600));

#[derive(Debug, Args)]
pub(crate) struct LoginArgs {
    /// Log in with a browser on this machine, even if the issuer supports device codes.
    #[arg(long)]
    browser: bool,
    /// The loopback port of the redirect, for issuers that must know it in advance. Default: any
    /// free port.
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// The client id at the issuer, if the gateway does not announce it.
    #[arg(long, env = "CONSTRUCT_CLIENT_ID", value_name = "ID")]
    client_id: Option<String>,
    /// Whether to store the log-in in the desktop session's keyring: if possible, always, or never.
    #[arg(long, value_enum, default_value_t = KeyringMode::Auto, env = "CONSTRUCT_KEYRING", value_name = "WHEN")]
    keyring: KeyringMode,
}

impl LoginArgs {
    /// # Errors
    /// When the log-in fails, or the gateway refuses the session.
    pub(crate) async fn run(self, target: TargetArgs) -> Result<(), Failure> {
        let context = LoginContext::find(target.context.as_deref())?.with_tls(target.tls);
        if let Some(other) = target.gateway.filter(|gateway| *gateway != context.address) {
            let message =
                format!("the context {} is for {}, not for {other}", context.name, context.address);
            return Err(Failure::usage(message)
                .hint("construct context add NAME --address URL, then log in there"));
        }
        context.check_accepts_session()?;
        let resource = Resource::fetch(&context.address, &context.tls).await?;
        let (login, session) = self.authenticate(resource, &context).await?;
        let LoginContext { address, tls, .. } = &context;
        let target = Target {
            address: address.clone(),
            key: Some(session.token.clone()),
            organization: None,
            tls: tls.clone(),
            session: None,
        };
        let me: WhoAmIResponse =
            call(Gateway::new(&target)?.organizations().who_am_i(WhoAmIRequest {})).await?;
        let lock = context.lock().await?;
        context.store_session(login, session.to_text(), self.keyring)?;
        drop(lock);
        let user = [me.name, me.email, me.user_id]
            .into_iter()
            .find(|name| !name.is_empty())
            .unwrap_or_default();
        output::print(&format!("logged in at {} as {}\n", context.name, one_line(&user)))
    }

    /// Runs the log-in at the issuer.
    ///
    /// # Errors
    /// When it fails or times out.
    async fn authenticate(
        &self,
        resource: Resource,
        context: &LoginContext,
    ) -> Result<(Login, Session), Failure> {
        let Resource { issuer, client_id, audience, scopes } = resource;
        let client_id = self.client_id.clone().or(client_id).ok_or_else(|| {
            let failure =
                Failure::usage("the gateway does not announce a client id for this program");
            failure.hint("set --client-id, or for all users the gateway's gateway_oidc_client_id")
        })?;
        let login = Login { issuer, client_id, audience };
        let issuer = Issuer::discover(&login, context.tls.ca.as_deref()).await?;
        let scopes = issuer.supported_scopes(scopes);
        eprintln!("logging in at {} for {}", one_line(&login.issuer), context.address);
        let device_code =
            if self.browser { None } else { issuer.request_device_code(&scopes).await? };
        let tokens = match device_code {
            Some(device_code) => device::wait(&issuer, device_code).await?,
            None => browser::wait(&issuer, &scopes, self.port).await?,
        };
        let session = session_from_tokens(&login, tokens, None)?;
        Ok((login, session))
    }
}

/// # Errors
/// When none of the tokens is for the gateway.
fn session_from_tokens(
    login: &Login,
    tokens: Tokens,
    previous: Option<Session>,
) -> Result<Session, Failure> {
    let session = Session::from_tokens(tokens, &login.audience, previous, jiff::Timestamp::now());
    let no_token = || {
        let (issuer, audience) = (one_line(&login.issuer), one_line(&login.audience));
        Failure::failed(format!("{issuer} issued no token for {audience}"))
            .hint("neither its access token nor its ID token is a JWT with this audience; docs/identity.md describes the configuration of the issuer")
    };
    session.ok_or_else(no_token)
}

/// `construct logout`: deletes the session, and revokes it at the issuer.
///
/// # Errors
/// When there is no session, or it cannot be deleted.
pub(crate) async fn logout(target: TargetArgs) -> Result<(), Failure> {
    let context = LoginContext::find(target.context.as_deref())?.with_tls(target.tls);
    let _lock = context.lock().await?;
    let session = context.session();
    if matches!(session, Ok(None)) {
        return Err(Failure::usage(format!("the context {} has no log-in", context.name)));
    }
    let deleted = context.delete_session();
    // Revoked in any case: copies of the session become useless, even if the keyring still has it.
    let revoked = match session {
        Ok(Some((login, session))) => revoke(&login, &session, &context).await,
        Ok(None) => Ok(()),
        Err(failure) => Err(failure),
    };
    if let Err(failure) = revoked {
        eprintln!("warning: the session is not revoked at the issuer: {}", failure.message());
    }
    deleted?;
    output::print(&format!("logged out of {}\n", context.name))
}

async fn revoke(login: &Login, session: &str, context: &LoginContext) -> Result<(), Failure> {
    let Some(refresh) = Session::from_text(session).and_then(|session| session.refresh) else {
        return Ok(());
    };
    Ok(Issuer::discover(login, context.tls.ca.as_deref()).await?.revoke(&refresh).await?)
}

/// Connects to the gateway. A session is renewed now if necessary, and in the background from then
/// on.
///
/// # Errors
/// When the gateway is unknown, or the session has expired.
pub(crate) async fn gateway(target: TargetArgs) -> Result<Gateway, Failure> {
    let mut target = target.target()?;
    let Some(name) = target.session.take() else { return Gateway::new(&target) };
    let context = LoginContext::find(Some(&name))?.with_tls(target.tls.clone());
    let session = valid_session(&context).await?;
    target.key = Some(session.token.clone());
    let gateway = Gateway::new(&target)?;
    tokio::spawn(renew_periodically(gateway.clone(), context, session));
    Ok(gateway)
}

/// Waits for a renewal in progress, for a limited time.
pub(crate) async fn finish() {
    _ = timeout(RENEWAL_GRACE_PERIOD, RENEWAL.lock()).await;
}

/// Renews the session while the command runs. A failed renewal is retried: once the session has
/// expired, the gateway reports it.
async fn renew_periodically(gateway: Gateway, context: LoginContext, mut session: Session) {
    let mut delay = RENEWAL_DELAYS.0;
    loop {
        sleep(delay).await;
        while session.remaining() > RENEWAL_MARGIN {
            sleep((session.remaining() - RENEWAL_MARGIN).min(EXPIRY_POLL_INTERVAL)).await;
        }
        match valid_session(&context).await {
            Ok(renewed) if gateway.set_token(&renewed.token).is_ok() => {
                session = renewed;
                delay = RENEWAL_DELAYS.0;
            }
            _ => delay = (delay * 2).min(RENEWAL_DELAYS.1),
        }
    }
}

/// The session of a context, renewed if it is about to expire.
async fn valid_session(context: &LoginContext) -> Result<Session, Failure> {
    let (_, session) = read_session(context)?;
    if session.remaining() > RENEWAL_MARGIN {
        return Ok(session);
    }
    let _lock = context.lock().await?;
    // Another command may have renewed it.
    let (login, session) = read_session(context)?;
    if session.remaining() > RENEWAL_MARGIN {
        return Ok(session);
    }
    let _renewal = RENEWAL.lock().await;
    match renew(&login, &session, &context.tls).await {
        Ok(renewed) => {
            if let Err(failure) = context.renew_session(renewed.to_text()) {
                eprintln!(
                    "warning: the renewed log-in of {} cannot be stored: {}",
                    context.name,
                    failure.message()
                );
            }
            Ok(renewed)
        }
        Err(_) if !session.remaining().is_zero() => Ok(session),
        Err(None) => {
            let failure = Failure::failed(format!("the log-in of {} has expired", context.name));
            Err(failure.hint(format!("construct login --context {}", context.name)))
        }
        Err(Some(failure)) => Err(failure),
    }
}

fn read_session(context: &LoginContext) -> Result<(Login, Session), Failure> {
    let missing = || {
        let failure =
            Failure::usage(format!("the context {} no longer has a log-in", context.name));
        failure.hint(format!("construct login --context {}", context.name))
    };
    let (login, session) = context.session()?.ok_or_else(missing)?;
    Ok((login, Session::from_text(&session).ok_or_else(missing)?))
}

/// Renews a session at the issuer.
///
/// # Errors
/// Why it cannot be renewed; none when it never can be.
async fn renew(
    login: &Login,
    session: &Session,
    tls: &TlsArgs,
) -> Result<Session, Option<Failure>> {
    let Some(refresh) = &session.refresh else { return Err(None) };
    let issuer = Issuer::discover(login, tls.ca.as_deref())
        .await
        .map_err(|error| Some(Failure::from(error)))?;
    let tokens = match issuer.refresh(refresh).await {
        Ok(tokens) => tokens,
        Err(Error::Refused { code, .. }) if code == "invalid_grant" => return Err(None),
        Err(error) => return Err(Some(error.into())),
    };
    session_from_tokens(login, tokens, Some(session.clone())).map_err(Some)
}

/// The deadline in so many seconds, at most a day.
fn deadline_in(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds.min(86_400))
}
