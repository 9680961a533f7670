//! `construct login`: a person logs in at the issuer that the context's gateway names, and the
//! session is kept in the place of a key (`docs/adr/0043-login.md`).
//!
//! Where the issuer offers it, by a code that is entered in any browser (RFC 8628), else with a
//! browser of this machine that comes back to a loopback port (RFC 8252). A session is renewed when
//! it is about to end, by whichever command needs it, and while one runs.

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
    context::{Kept, Login, Target, TlsArgs, Wanted},
    failure::Failure,
    gateway::{Gateway, call},
    keyring, output,
    words::one_line,
};

/// How long before its end a session is renewed: what it is presented with takes its time, and
/// clocks are apart.
const MARGIN: Duration = Duration::from_secs(60);
/// At most so long passes between two looks at how long a session lasts: a machine that was asleep
/// has not counted the time.
const LOOK: Duration = Duration::from_secs(30);
/// How long a command waits at its end for a session that is being renewed.
const PATIENCE: Duration = Duration::from_secs(10);
/// Held while a session is renewed and kept. Many issuers take a refresh token once: a command that
/// ended in between would have lost the next.
static RENEWING: Mutex<()> = Mutex::const_new(());
/// The pauses between two looks at a session that cannot be renewed, or hardly lasts: the first and
/// the longest.
const PAUSES: (Duration, Duration) = (Duration::from_secs(15), Duration::from_secs(600));

#[derive(Debug, Args)]
pub(crate) struct LoginArgs {
    /// Log in with a browser of this machine, also where the issuer gives codes that can be entered
    /// in any.
    #[arg(long)]
    browser: bool,
    /// The port that this machine's browser comes back to, for issuers that want to know it
    /// beforehand; any free one when not given.
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    port: u16,
    /// What the issuer knows this program as, when the gateway does not say it.
    #[arg(long, env = "CONSTRUCT_CLIENT_ID", value_name = "ID")]
    client_id: Option<String>,
    /// Whether to put the log-in into the keyring of this session: when there is one that takes it,
    /// always, or never.
    #[arg(long, value_enum, default_value_t = keyring::Wanted::Auto, env = "CONSTRUCT_KEYRING", value_name = "WHEN")]
    keyring: keyring::Wanted,
}

impl LoginArgs {
    /// # Errors
    /// When nobody logs in, or the gateway does not take who did.
    pub(crate) async fn run(self, wanted: Wanted) -> Result<(), Failure> {
        let kept = Kept::find(wanted.context.as_deref())?.with(wanted.tls);
        if let Some(other) = wanted.gateway.filter(|gateway| *gateway != kept.address) {
            let message =
                format!("the context {} is of {}, and not of {other}", kept.name, kept.address);
            return Err(Failure::usage(message)
                .hint("construct context add NAME --address URL, then log in there"));
        }
        kept.takes_session()?;
        let resource = Resource::ask(&kept.address, &kept.tls).await?;
        let (login, session) = self.log_in(resource, &kept).await?;
        let Kept { address, tls, .. } = &kept;
        let target = Target {
            address: address.clone(),
            key: Some(session.token.clone()),
            organization: None,
            tls: tls.clone(),
            session: None,
        };
        let me: WhoAmIResponse =
            call(Gateway::new(&target)?.organizations().who_am_i(WhoAmIRequest {})).await?;
        let lock = kept.lock().await?;
        kept.begin(login, session.to_text(), self.keyring)?;
        drop(lock);
        let who = [me.name, me.email, me.user_id]
            .into_iter()
            .find(|name| !name.is_empty())
            .unwrap_or_default();
        output::print(&format!("logged in at {} as {}\n", kept.name, one_line(&who)))
    }

    /// Has a person log in.
    ///
    /// # Errors
    /// When nobody does.
    async fn log_in(&self, resource: Resource, kept: &Kept) -> Result<(Login, Session), Failure> {
        let Resource { issuer, client_id, audience, scopes } = resource;
        let client_id = self.client_id.clone().or(client_id).ok_or_else(|| {
            let failure =
                Failure::usage("the gateway does not say what its issuer knows this program as");
            failure.hint(
                "--client-id says it; for everybody, the gateway's gateway_oidc_client_id does",
            )
        })?;
        let login = Login { issuer, client_id, audience };
        let issuer = Issuer::find(&login, kept.tls.ca.as_deref()).await?;
        let scopes = issuer.known(scopes);
        eprintln!("logging in at {} for {}", one_line(&login.issuer), kept.address);
        let by_code = if self.browser { None } else { issuer.begin_device(&scopes).await? };
        let tokens = match by_code {
            Some(begun) => device::wait(&issuer, begun).await?,
            None => browser::wait(&issuer, &scopes, self.port).await?,
        };
        let session = accepted(&login, tokens, None)?;
        Ok((login, session))
    }
}

/// # Errors
/// When none of the tokens is for the gateway.
fn accepted(login: &Login, tokens: Tokens, before: Option<Session>) -> Result<Session, Failure> {
    let session = Session::of(tokens, &login.audience, before, jiff::Timestamp::now());
    let none = || {
        let (issuer, audience) = (one_line(&login.issuer), one_line(&login.audience));
        Failure::failed(format!("{issuer} gives no token that is for {audience}"))
            .hint("neither its access token nor its ID token is a JWT with that in aud; docs/identity.md says what the issuer has to be told")
    };
    session.ok_or_else(none)
}

/// `construct logout`: forgets a session, and tells the issuer.
///
/// # Errors
/// When there is none, or it stays.
pub(crate) async fn logout(wanted: Wanted) -> Result<(), Failure> {
    let kept = Kept::find(wanted.context.as_deref())?.with(wanted.tls);
    let _lock = kept.lock().await?;
    let session = kept.session();
    if matches!(session, Ok(None)) {
        return Err(Failure::usage(format!("nobody is logged in with the context {}", kept.name)));
    }
    let ended = kept.end();
    // The issuer is told in any case: then it is of no use to anybody who has a copy, or to the
    // keyring that does not let go of it.
    let told = match session {
        Ok(Some((login, session))) => revoke(&login, &session, &kept).await,
        Ok(None) => Ok(()),
        Err(failure) => Err(failure),
    };
    if let Err(failure) = told {
        eprintln!("warning: the issuer is not told: {}", failure.message());
    }
    ended?;
    output::print(&format!("logged out of {}\n", kept.name))
}

async fn revoke(login: &Login, session: &str, kept: &Kept) -> Result<(), Failure> {
    let Some(refresh) = Session::from_text(session).and_then(|session| session.refresh) else {
        return Ok(());
    };
    Ok(Issuer::find(login, kept.tls.ca.as_deref()).await?.revoke(&refresh).await?)
}

/// The gateway that is wanted. Where a person has logged in, the session is renewed now if it has
/// to be, and from then on in time.
///
/// # Errors
/// When it is not known whom to talk to, or the session has ended.
pub(crate) async fn gateway(wanted: Wanted) -> Result<Gateway, Failure> {
    let mut target = wanted.target()?;
    let Some(name) = target.session.take() else { return Gateway::new(&target) };
    let kept = Kept::find(Some(&name))?.with(target.tls.clone());
    let session = lasting(&kept).await?;
    target.key = Some(session.token.clone());
    let gateway = Gateway::new(&target)?;
    tokio::spawn(keep_up(gateway.clone(), kept, session));
    Ok(gateway)
}

/// Waits for a session that is being renewed right now, for a while.
pub(crate) async fn finish() {
    _ = timeout(PATIENCE, RENEWING.lock()).await;
}

/// Renews the session as long as the command runs. What cannot be renewed is tried again: the
/// gateway says that it has ended when it has.
async fn keep_up(gateway: Gateway, kept: Kept, mut session: Session) {
    let mut pause = PAUSES.0;
    loop {
        sleep(pause).await;
        while session.left() > MARGIN {
            sleep((session.left() - MARGIN).min(LOOK)).await;
        }
        match lasting(&kept).await {
            Ok(renewed) if gateway.present(&renewed.token).is_ok() => {
                session = renewed;
                pause = PAUSES.0;
            }
            _ => pause = (pause * 2).min(PAUSES.1),
        }
    }
}

/// The session of a context, renewed if it is about to end.
async fn lasting(kept: &Kept) -> Result<Session, Failure> {
    let (_, session) = read(kept)?;
    if session.left() > MARGIN {
        return Ok(session);
    }
    let _lock = kept.lock().await?;
    // Another command may have been faster.
    let (login, session) = read(kept)?;
    if session.left() > MARGIN {
        return Ok(session);
    }
    let _renewing = RENEWING.lock().await;
    match renewed(&login, &session, &kept.tls).await {
        Ok(renewed) => {
            if let Err(failure) = kept.renew(renewed.to_text()) {
                eprintln!(
                    "warning: the log-in of {} was renewed and cannot be kept: {}",
                    kept.name,
                    failure.message()
                );
            }
            Ok(renewed)
        }
        Err(_) if !session.left().is_zero() => Ok(session),
        Err(None) => {
            let failure = Failure::failed(format!("the log-in of {} is over", kept.name));
            Err(failure.hint(format!("construct login --context {}", kept.name)))
        }
        Err(Some(failure)) => Err(failure),
    }
}

fn read(kept: &Kept) -> Result<(Login, Session), Failure> {
    let again = || {
        let failure =
            Failure::usage(format!("nobody is logged in with the context {} any more", kept.name));
        failure.hint(format!("construct login --context {}", kept.name))
    };
    let (login, session) = kept.session()?.ok_or_else(again)?;
    Ok((login, Session::from_text(&session).ok_or_else(again)?))
}

/// # Errors
/// Why it cannot be renewed; nothing when it never can be.
async fn renewed(
    login: &Login,
    session: &Session,
    tls: &TlsArgs,
) -> Result<Session, Option<Failure>> {
    let Some(refresh) = &session.refresh else { return Err(None) };
    let issuer =
        Issuer::find(login, tls.ca.as_deref()).await.map_err(|error| Some(Failure::from(error)))?;
    let tokens = match issuer.refresh(refresh).await {
        Ok(tokens) => tokens,
        Err(Error::Refused { code, .. }) if code == "invalid_grant" => return Err(None),
        Err(error) => return Err(Some(error.into())),
    };
    accepted(login, tokens, Some(session.clone())).map_err(Some)
}

/// When something that lasts so many seconds is over. What nobody can wait for is a day.
fn end(seconds: u64) -> Instant {
    Instant::now() + Duration::from_secs(seconds.min(86_400))
}
