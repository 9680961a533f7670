//! Installs the app over OAuth 2.
//!
//! - An installation is started with the service's connect key, or by a member of an organization
//!   with a set-up code.
//! - The state is valid for ten minutes, once, and only in the browser that it was given to. It
//!   names the organization that will own the workspace.
//! - Tokens are sealed before they are stored.

use std::sync::Arc;

use axum::{
    body::Bytes,
    extract::{Query, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, StatusCode,
        header::{
            CACHE_CONTROL, CONTENT_SECURITY_POLICY, COOKIE, LOCATION, ORIGIN, REFERRER_POLICY,
            SET_COOKIE,
        },
    },
    response::{Html, IntoResponse as _, Response},
};
use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use construct_proto::v1;
use construct_runtime::{clock, telemetry::Chain};
use construct_store::{Keyring, SealError, SealedSecret, slack::NewInstallState};
use jiff::SignedDuration;
use reqwest::Url;
use ring::{
    digest,
    rand::{SecureRandom as _, SystemRandom},
};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use crate::{
    Config,
    config::secret,
    gateway::{Authorization, Caller, call, is_transient, retry_transient},
    members,
    shared::Shared,
    teams::{self, RETRY_DELAY, WorkspaceConnection},
    web::oauth,
};

/// The OAuth scopes of the app; the manifest names the same.
pub(crate) const SCOPES: &str = "app_mentions:read,channels:history,chat:write,commands,files:read,files:write,\
                                 groups:history,im:history,links:read,links:write,mpim:history,users:read";
/// The time limit for authorizing.
const STATE_LIFETIME: SignedDuration = SignedDuration::from_mins(10);
const COOKIE_NAME: &str = "construct_slack_state";
const UNCONFIGURED: &str =
    "Connecting a workspace needs slack_client_id, slack_client_secret and slack_public_url.";
/// An app that is installed in a whole Enterprise organization has one token for all workspaces.
/// One Construct organization would answer for users whose workspaces have authorized nothing.
const ORG_WIDE: &str = "The app was installed in a whole Enterprise organization, which Construct does not support. Remove it in the organization's \
                        settings, and install it in single workspaces.";

#[derive(Debug, Deserialize)]
pub(crate) struct ConnectQuery {
    /// None: show the form.
    key: Option<String>,
    /// The agent that answers; the configured one when absent.
    agent: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct CallbackQuery {
    #[serde(default)]
    code: String,
    #[serde(default)]
    state: String,
    #[serde(default)]
    error: String,
}

/// The `Authorization` header with the app's id and secret, if both are configured.
pub(crate) fn basic_authentication(config: &Config) -> Option<String> {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let id = config.slack_client_id.as_ref().filter(|id| !id.is_empty())?;
    let password = secret(config.slack_client_secret.as_ref())?;
    Some(format!("Basic {}", STANDARD.encode(format!("{id}:{}", password.expose()))))
}

/// `GET /slack/connect?key=…` redirects the holder of the connect key to Slack. Without a key, it
/// shows the form for members of organizations.
pub(crate) async fn connect(
    State(shared): State<Arc<Shared>>,
    Query(query): Query<ConnectQuery>,
) -> Response {
    let config = &shared.config;
    let Some(provided) = query.key else { return connect_form(config) };
    let Some(key) = secret(config.slack_connect_key.as_ref()) else {
        return page(
            StatusCode::NOT_FOUND,
            "No connect key is configured, so a workspace cannot be connected by key.",
        );
    };
    // The comparison reveals neither the key nor its length by its duration.
    let random = SystemRandom::new();
    let Ok(tag) = ring::hmac::Key::generate(ring::hmac::HMAC_SHA256, &random) else {
        return page(StatusCode::INTERNAL_SERVER_ERROR, "No random numbers are available.");
    };
    let expected = ring::hmac::sign(&tag, key.expose().as_bytes());
    if ring::hmac::verify(&tag, provided.as_bytes(), expected.as_ref()).is_err() {
        return page(StatusCode::FORBIDDEN, "The connect key is wrong.");
    }
    // The organization of this service, by its own key, or of an installation without
    // authentication.
    let organization =
        match shared.gateway.who_am_i(None).await.map(|account| account.organization_id.parse()) {
            Ok(Ok(organization)) => organization,
            Ok(Err(_)) => {
                return page(
                    StatusCode::BAD_GATEWAY,
                    "Construct returned no organization for this service.",
                );
            }
            Err(status) => return gateway_error_page(&status),
        };
    let agent =
        query.agent.filter(|agent| !agent.is_empty()).unwrap_or_else(|| config.slack_agent.clone());
    redirect_to_slack(&shared, WorkspaceConnection { organization, key: None, agent }).await
}

/// `POST /slack/connect` redirects a member of an organization, who created a set-up code there, to
/// Slack. The code becomes a key of theirs, which authorizes the workspace's requests to the mesh.
pub(crate) async fn connect_with_code(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let config = &shared.config;
    // Another page could otherwise have a workspace's admin connect it to an organization of that
    // page's choice.
    let origin = headers.get(ORIGIN).map(|origin| origin.to_str().unwrap_or_default().to_owned());
    if origin.is_some_and(|origin| Some(origin) != own_origin(config)) {
        return page(StatusCode::FORBIDDEN, "This form was submitted from another page.");
    }
    // Check this before the code is used up.
    if !is_configured(config) {
        return page(StatusCode::NOT_FOUND, UNCONFIGURED);
    }
    let gateway = &shared.gateway;
    let field = |wanted: &str| {
        let found = form_urlencoded::parse(&body).find(|(name, _)| name == wanted);
        found.map(|(_, value)| value.trim().trim_matches('`').to_owned()).unwrap_or_default()
    };
    let code = field("code");
    let request = tonic::Request::new(v1::ExchangeSetupCodeRequest { code });
    let key = match call(gateway.keys().exchange_setup_code(request)).await {
        Ok(created) => SecretString::from(created.key),
        Err(status) if is_transient(&status) => return gateway_error_page(&status),
        Err(_) => {
            return page(
                StatusCode::FORBIDDEN,
                "That code is invalid or expired. Create another one.",
            );
        }
    };
    let Some(authorization) = Authorization::bearer(key.expose_secret()) else {
        return page(StatusCode::BAD_GATEWAY, "Construct created an unusable key.");
    };
    let account = match retry_transient(|| gateway.who_am_i(Some(&authorization))).await {
        Ok(account) => account,
        Err(status) if is_transient(&status) => return code_used_up_page(&status),
        Err(status) => return gateway_error_page(&status),
    };
    let has = |scopes: &[&str]| {
        account.scopes.iter().any(|scope| scope == "admin" || scopes.contains(&scope.as_str()))
    };
    let has_role = matches!(account.role(), v1::Role::Member | v1::Role::Admin | v1::Role::Owner);
    if !has_role || !has(&[members::SCOPE]) || !has(&["agents:read", "agents:write"]) {
        let text = "The key of that code has too few permissions: it needs the role `member` and the scopes `tasks:write` and `agents:read`.";
        return page(StatusCode::FORBIDDEN, text);
    }
    let Ok(organization) = account.organization_id.parse() else {
        return page(StatusCode::BAD_GATEWAY, "Construct returned no organization for that code.");
    };
    let agent = Some(field("agent"))
        .filter(|agent| !agent.is_empty())
        .unwrap_or_else(|| config.slack_agent.clone());
    let caller = Caller { organization, key: Some(authorization) };
    let get = async || {
        let request = gateway.request(&caller, v1::GetAgentRequest { agent: agent.clone() });
        call(gateway.agents().get_agent(request)).await
    };
    match retry_transient(get).await {
        Ok(_) => {}
        Err(status) if is_transient(&status) => return code_used_up_page(&status),
        Err(_) => {
            let text = format!(
                "Your organization has no agent `{agent}`. Create another code, and name an existing agent."
            );
            return page(StatusCode::NOT_FOUND, &text);
        }
    }
    redirect_to_slack(&shared, WorkspaceConnection { organization, key: Some(key), agent }).await
}

/// The prefixes of a state: whether the browser has to return a member's key.
const KEYED_PREFIX: char = 'k';
const UNKEYED_PREFIX: char = 'n';

/// Redirects to Slack with a state that names the organization of the workspace.
async fn redirect_to_slack(shared: &Shared, connected: WorkspaceConnection) -> Response {
    let config = &shared.config;
    let (Some(client), Some(_), Some(redirect)) =
        (&config.slack_client_id, basic_authentication(config), redirect_uri(config))
    else {
        return page(StatusCode::NOT_FOUND, UNCONFIGURED);
    };
    let mut bytes = [0_u8; 32];
    if SystemRandom::new().fill(&mut bytes).is_err() {
        return page(StatusCode::INTERNAL_SERVER_ERROR, "No random numbers are available.");
    }
    let state = format!(
        "{}{}",
        if connected.key.is_some() { KEYED_PREFIX } else { UNKEYED_PREFIX },
        hex(&bytes)
    );
    let cookie_value = match cookie_value(&shared.keyring, &state, connected.key.as_ref()) {
        Ok(cookie_value) => cookie_value,
        Err(error) => {
            tracing::error!(error = %Chain(&error), "cannot start an installation");
            return page(StatusCode::INTERNAL_SERVER_ERROR, "Cannot seal the key.");
        }
    };
    let now = clock::now();
    let new = NewInstallState {
        state: state_digest(&state),
        organization: connected.organization,
        agent: connected.agent,
        expires_at: now + STATE_LIFETIME,
    };
    if let Err(error) = shared.store.slack_state_put(&new, now).await {
        tracing::error!(error = %Chain(&error), "cannot start an installation");
        return page(
            StatusCode::SERVICE_UNAVAILABLE,
            "The database is not available. Try again in a moment.",
        );
    }
    let parameters = [
        ("client_id", client.as_str()),
        ("scope", SCOPES),
        ("redirect_uri", &redirect),
        ("state", &state),
    ];
    let Ok(url) = Url::parse_with_params(&config.slack_authorize_url, parameters) else {
        return page(
            StatusCode::INTERNAL_SERVER_ERROR,
            "slack_authorize_url is not a valid address.",
        );
    };
    let secure = if redirect.starts_with("https:") { "; Secure" } else { "" };
    let cookie = format!(
        "{COOKIE_NAME}={cookie_value}; Path=/slack; Max-Age=600; HttpOnly; SameSite=Lax{secure}"
    );
    let headers = [(LOCATION, url.to_string()), (SET_COOKIE, cookie)];
    with_security_headers((StatusCode::SEE_OTHER, headers).into_response())
}

/// The value of the cookie: the state, and the member's key, sealed for this state only.
fn cookie_value(
    keyring: &Keyring,
    state: &str,
    key: Option<&SecretString>,
) -> Result<String, SealError> {
    let Some(key) = key else { return Ok(state.to_owned()) };
    let sealed = keyring.seal(&seal_record(state), key.expose_secret().as_bytes())?;
    Ok(format!("{state}.{}", URL_SAFE_NO_PAD.encode(sealed.to_bytes())))
}

/// Unseals the key in the cookie, if there is one; an error when it was altered.
fn key_from_cookie(
    keyring: &Keyring,
    state: &str,
    sealed: Option<&str>,
) -> Result<Option<SecretString>, ()> {
    let Some(sealed) = sealed else { return Ok(None) };
    let bytes = URL_SAFE_NO_PAD.decode(sealed).map_err(drop)?;
    let sealed = SealedSecret::from_bytes(&bytes).ok_or(())?;
    let opened = keyring.open(&seal_record(state), &sealed).map_err(drop)?;
    let key = std::str::from_utf8(opened.expose_secret()).map_err(drop)?;
    Ok(Some(SecretString::from(key)))
}

/// The record that such a key is sealed for.
fn seal_record(state: &str) -> String {
    format!("slack_state.{state}")
}

/// `GET /slack/callback`: Slack redirects the user here.
pub(crate) async fn callback(
    State(shared): State<Arc<Shared>>,
    Query(query): Query<CallbackQuery>,
    headers: HeaderMap,
) -> Response {
    let config = &shared.config;
    if !query.error.is_empty() {
        return page(
            StatusCode::OK,
            "The app was not installed: you did not authorize it in Slack.",
        );
    }
    let cookies = headers
        .get_all(COOKIE)
        .iter()
        .filter_map(|cookie| cookie.to_str().ok())
        .flat_map(|all| all.split(';'));
    let cookie = cookies
        .filter_map(|cookie| cookie.trim().split_once('='))
        .find(|(name, _)| *name == COOKIE_NAME);
    let expired = "This link is no longer valid. Start again.";
    let (state, sealed) =
        cookie.map_or(("", None), |(_, cookie_value)| match cookie_value.split_once('.') {
            Some((state, sealed)) => (state, Some(sealed)),
            None => (cookie_value, None),
        });
    if query.state.is_empty() || state_digest(state) != state_digest(&query.state) {
        return page(StatusCode::FORBIDDEN, expired);
    }
    let Ok(key) = key_from_cookie(&shared.keyring, state, sealed) else {
        return page(StatusCode::FORBIDDEN, expired);
    };
    // The browser cannot change this: a flow that started with a member's key must end with it.
    if state.starts_with(KEYED_PREFIX) != key.is_some() {
        return page(StatusCode::FORBIDDEN, expired);
    }
    let stored = shared.store.slack_state_consume(&state_digest(&query.state), clock::now()).await;
    let (organization, agent) = match stored {
        Ok(stored) => stored,
        Err(construct_store::Error::NotFound { .. }) => {
            return page(StatusCode::FORBIDDEN, expired);
        }
        Err(error) => {
            tracing::error!(error = %Chain(&error), "cannot continue an installation");
            return page(
                StatusCode::SERVICE_UNAVAILABLE,
                "The database is not available. Start again.",
            );
        }
    };
    let (Some(app), Some(redirect)) = (basic_authentication(config), redirect_uri(config)) else {
        return page(StatusCode::NOT_FOUND, "The app is no longer configured.");
    };
    let access = match oauth::exchange_code(&shared.web, &app, &query.code, &redirect).await {
        Ok(access) => access,
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "an installation failed");
            return page(
                StatusCode::BAD_GATEWAY,
                "Slack did not confirm the installation. Start again.",
            );
        }
    };
    if access.team.is_none() || access.is_enterprise_install {
        tracing::warn!("refused an installation in a whole Enterprise organization");
        return page(StatusCode::BAD_REQUEST, ORG_WIDE);
    }
    let connected = WorkspaceConnection { organization, key, agent };
    match shared.teams.install(&access, connected).await {
        Ok(name) => {
            let text = format!(
                "Construct is installed in {name}. Invite it to a channel with /invite, and mention it there."
            );
            page(StatusCode::OK, &text)
        }
        Err(error @ teams::Error::OtherOrganization) => {
            tracing::warn!(%error, "refused an installation");
            let text = "This workspace is connected to another organization of Construct. Remove the app in the \
                         workspace's settings first.";
            page(StatusCode::CONFLICT, text)
        }
        Err(error) => {
            tracing::error!(error = %Chain(&error), "cannot store an installation");
            page(
                StatusCode::SERVICE_UNAVAILABLE,
                "The installation could not be stored. Start again.",
            )
        }
    }
}

/// Installs the app in the workspace of the configured token, retrying until Slack identifies it.
pub(crate) async fn install_own_workspace(shared: Arc<Shared>, draining: CancellationToken) {
    let Some(token) = secret(shared.config.slack_bot_token.as_ref()) else { return };
    loop {
        let attempt = async {
            let access = oauth::test_token(&shared.web, token).await?;
            if access.is_enterprise_install {
                anyhow::bail!("{ORG_WIDE}");
            }
            let organization = shared.gateway.who_am_i(None).await?.organization_id.parse()?;
            let connected = WorkspaceConnection {
                organization,
                key: None,
                agent: shared.config.slack_agent.clone(),
            };
            shared.teams.install(&access, connected).await?;
            anyhow::Ok(())
        };
        match attempt.await {
            Ok(()) => return,
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "cannot use the configured workspace")
            }
        }
        tokio::select! {
            () = draining.cancelled() => return,
            () = tokio::time::sleep(RETRY_DELAY) => {}
        }
    }
}

/// The origin of this service's pages.
fn own_origin(config: &Config) -> Option<String> {
    let url = Url::parse(config.slack_public_url.as_ref()?).ok()?;
    Some(url.origin().ascii_serialization())
}

/// Whether the configuration for connecting a workspace is complete.
fn is_configured(config: &Config) -> bool {
    basic_authentication(config).is_some() && redirect_uri(config).is_some()
}

fn redirect_uri(config: &Config) -> Option<String> {
    let public = config.slack_public_url.as_ref()?;
    Some(format!("{}/slack/callback", public.trim_end_matches('/')))
}

fn state_digest(state: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest::digest(&digest::SHA256, state.as_bytes()).as_ref());
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The form for members of organizations.
fn connect_form(config: &Config) -> Response {
    if !is_configured(config) {
        return page(StatusCode::NOT_FOUND, UNCONFIGURED);
    }
    let agent = escape_html(&config.slack_agent);
    let html = format!(
        "<!doctype html><title>Construct</title><h1>Connect a workspace</h1>\
         <p>Create a code in the organization that the workspace will belong to: <code>construct key code slack --role member \
         --scope tasks:write --scope agents:read</code></p>\
         <form method=post action=/slack/connect><p><label>Code <input name=code type=password autocomplete=off required></label>\
         <p><label>Agent that answers <input name=agent placeholder=\"{agent}\"></label><p><button>Go to Slack</button></form>"
    );
    let mut response = with_security_headers((StatusCode::OK, Html(html)).into_response());
    // The browser must send the origin with the form.
    response.headers_mut().insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    response
}

fn page(status: StatusCode, text: &str) -> Response {
    let text = escape_html(text);
    with_security_headers(
        (status, Html(format!("<!doctype html><title>Construct</title><p>{text}</p>")))
            .into_response(),
    )
}

fn gateway_error_page(status: &tonic::Status) -> Response {
    tracing::error!(error = %Chain(status), "cannot start an installation");
    if is_transient(status) {
        return page(
            StatusCode::SERVICE_UNAVAILABLE,
            "Construct is not available. Try again in a moment.",
        );
    }
    page(StatusCode::FORBIDDEN, "Construct rejected this service's key, or the key of the code.")
}

/// A code is valid once, and the gateway became unavailable after it was used.
fn code_used_up_page(status: &tonic::Status) -> Response {
    tracing::error!(error = %Chain(status), "cannot start an installation, and its code is used up");
    let text =
        "Construct is not available, and your code is used up. Create another one in a moment.";
    page(StatusCode::SERVICE_UNAVAILABLE, text)
}

fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Adds headers so that neither the key nor the state leaks with the page's address, nothing is
/// cached, and no other page frames this one.
fn with_security_headers(mut response: Response) -> Response {
    let headers: [(HeaderName, &str); 3] = [
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (CONTENT_SECURITY_POLICY, "default-src 'none'; frame-ancestors 'none'"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

#[cfg(test)]
mod tests {
    use super::SCOPES;

    #[test]
    fn manifest_scopes_match_requested_scopes() {
        let manifest = include_str!("../../../deploy/slack/manifest.yaml");
        let (_, scopes) = manifest.split_once("    bot:\n").expect("the manifest names scopes");
        let scopes: Vec<&str> =
            scopes.lines().map_while(|line| line.strip_prefix("      - ")).collect();
        assert_eq!(scopes.join(","), SCOPES);
    }
}
