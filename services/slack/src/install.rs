//! Installing the app over OAuth 2: for who knows the service's key, or is a member of an
//! organization and has made a set-up code there; a state that is used once within ten minutes and
//! by the browser that it was given to, and says whose the workspace will be; and tokens that are
//! sealed before they are written down.

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

/// What the app may do in a workspace; the manifest names the same.
pub(crate) const SCOPES: &str = "app_mentions:read,channels:history,chat:write,commands,files:read,files:write,\
                                 groups:history,im:history,links:read,links:write,mpim:history,users:read";
/// How long somebody has to agree.
const STATE_LIFETIME: SignedDuration = SignedDuration::from_mins(10);
const COOKIE_NAME: &str = "construct_slack_state";
const UNCONFIGURED: &str =
    "Connecting a workspace needs slack_client_id, slack_client_secret and slack_public_url.";
/// An app that is installed in a whole Enterprise organization has one token for all workspaces,
/// and would have one organization of ours answer for people whose workspaces have agreed to
/// nothing.
const ORG_WIDE: &str = "The app was installed in a whole Enterprise organization at once, which Construct does not do. Remove it in the organization's \
                        settings, and install it in single workspaces.";

#[derive(Debug, Deserialize)]
pub(crate) struct ConnectQuery {
    /// None: somebody without it wants the form.
    key: Option<String>,
    /// The agent that is to answer; the configured one when absent.
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

/// The header with the app's id and secret, where it has them.
pub(crate) fn basic_authentication(config: &Config) -> Option<String> {
    use base64::{Engine as _, engine::general_purpose::STANDARD};
    let id = config.slack_client_id.as_ref().filter(|id| !id.is_empty())?;
    let password = secret(config.slack_client_secret.as_ref())?;
    Some(format!("Basic {}", STANDARD.encode(format!("{id}:{}", password.expose()))))
}

/// `GET /slack/connect?key=…`: sends whoever knows the key to Slack, to agree there; without a key,
/// a form for members of any organization.
pub(crate) async fn connect(
    State(shared): State<Arc<Shared>>,
    Query(query): Query<ConnectQuery>,
) -> Response {
    let config = &shared.config;
    let Some(given) = query.key else { return connect_form(config) };
    let Some(key) = secret(config.slack_connect_key.as_ref()) else {
        return page(
            StatusCode::NOT_FOUND,
            "Nobody can connect a workspace by a key here: none is configured.",
        );
    };
    // The comparison tells nothing of the key by the time it takes, nor of its length.
    let random = SystemRandom::new();
    let Ok(tag) = ring::hmac::Key::generate(ring::hmac::HMAC_SHA256, &random) else {
        return page(StatusCode::INTERNAL_SERVER_ERROR, "The machine gives no randomness.");
    };
    let expected = ring::hmac::sign(&tag, key.expose().as_bytes());
    if ring::hmac::verify(&tag, given.as_bytes(), expected.as_ref()).is_err() {
        return page(
            StatusCode::FORBIDDEN,
            "This is not the key that connecting a workspace needs.",
        );
    }
    // Whose this service is: its own key says so, or that there is no log-in.
    let organization =
        match shared.gateway.who_am_i(None).await.map(|who| who.organization_id.parse()) {
            Ok(Ok(organization)) => organization,
            Ok(Err(_)) => {
                return page(
                    StatusCode::BAD_GATEWAY,
                    "Construct does not say whose this service is.",
                );
            }
            Err(status) => return gateway_error_page(&status),
        };
    let agent =
        query.agent.filter(|agent| !agent.is_empty()).unwrap_or_else(|| config.slack_agent.clone());
    redirect_to_slack(&shared, WorkspaceConnection { organization, key: None, agent }).await
}

/// `POST /slack/connect`: sends a member of an organization, who has made a set-up code there, to
/// Slack, to agree there. The code becomes a key of theirs, with which the mesh is asked about the
/// workspace.
pub(crate) async fn connect_with_code(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    let config = &shared.config;
    // A page of somebody else could have a workspace's admin connect it to an organization of that
    // page's choice.
    let origin = headers.get(ORIGIN).map(|origin| origin.to_str().unwrap_or_default().to_owned());
    if origin.is_some_and(|origin| Some(origin) != own_origin(config)) {
        return page(StatusCode::FORBIDDEN, "This form was sent by another page.");
    }
    // Before the code is used up.
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
        Ok(made) => SecretString::from(made.key),
        Err(status) if is_transient(&status) => return gateway_error_page(&status),
        Err(_) => {
            return page(
                StatusCode::FORBIDDEN,
                "That code is not good, or not any more. Make another one.",
            );
        }
    };
    let Some(authorization) = Authorization::bearer(key.expose_secret()) else {
        return page(StatusCode::BAD_GATEWAY, "Construct has made a key that cannot be used.");
    };
    let who = match retry_transient(|| gateway.who_am_i(Some(&authorization))).await {
        Ok(who) => who,
        Err(status) if is_transient(&status) => return code_used_up_page(&status),
        Err(status) => return gateway_error_page(&status),
    };
    let has = |scopes: &[&str]| {
        who.scopes.iter().any(|scope| scope == "admin" || scopes.contains(&scope.as_str()))
    };
    let works = matches!(who.role(), v1::Role::Member | v1::Role::Admin | v1::Role::Owner);
    if !works || !has(&[members::SCOPE]) || !has(&["agents:read", "agents:write"]) {
        let words = "That code is for a key that may too little: it needs the role `member` and the scopes `tasks:write` and `agents:read`.";
        return page(StatusCode::FORBIDDEN, words);
    }
    let Ok(organization) = who.organization_id.parse() else {
        return page(StatusCode::BAD_GATEWAY, "Construct does not say whose that code is.");
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
            let words = format!(
                "Your organization has no agent `{agent}`. Make another code, and name one that there is."
            );
            return page(StatusCode::NOT_FOUND, &words);
        }
    }
    redirect_to_slack(&shared, WorkspaceConnection { organization, key: Some(key), agent }).await
}

/// What a state begins with: whether the browser that ends the flow has to bring a member's key.
const KEYED_PREFIX: char = 'k';
const UNKEYED_PREFIX: char = 'n';

/// Sends somebody to Slack with a state that says whose the workspace will be.
async fn redirect_to_slack(shared: &Shared, connected: WorkspaceConnection) -> Response {
    let config = &shared.config;
    let (Some(client), Some(_), Some(redirect)) =
        (&config.slack_client_id, basic_authentication(config), redirect_uri(config))
    else {
        return page(StatusCode::NOT_FOUND, UNCONFIGURED);
    };
    let mut bytes = [0_u8; 32];
    if SystemRandom::new().fill(&mut bytes).is_err() {
        return page(StatusCode::INTERNAL_SERVER_ERROR, "The machine gives no randomness.");
    }
    let state = format!(
        "{}{}",
        if connected.key.is_some() { KEYED_PREFIX } else { UNKEYED_PREFIX },
        hex(&bytes)
    );
    let carried = match cookie_value(&shared.keyring, &state, connected.key.as_ref()) {
        Ok(carried) => carried,
        Err(error) => {
            tracing::error!(error = %Chain(&error), "an installation could not be begun");
            return page(StatusCode::INTERNAL_SERVER_ERROR, "The key cannot be encrypted.");
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
        tracing::error!(error = %Chain(&error), "an installation could not be begun");
        return page(
            StatusCode::SERVICE_UNAVAILABLE,
            "The database does not answer. Try again in a moment.",
        );
    }
    let parameters = [
        ("client_id", client.as_str()),
        ("scope", SCOPES),
        ("redirect_uri", &redirect),
        ("state", &state),
    ];
    let Ok(url) = Url::parse_with_params(&config.slack_authorize_url, parameters) else {
        return page(StatusCode::INTERNAL_SERVER_ERROR, "slack_authorize_url is no address.");
    };
    let secure = if redirect.starts_with("https:") { "; Secure" } else { "" };
    let cookie = format!(
        "{COOKIE_NAME}={carried}; Path=/slack; Max-Age=600; HttpOnly; SameSite=Lax{secure}"
    );
    let headers = [(LOCATION, url.to_string()), (SET_COOKIE, cookie)];
    with_security_headers((StatusCode::SEE_OTHER, headers).into_response())
}

/// What the browser keeps meanwhile: the state, and the member's key, sealed for this state only.
fn cookie_value(
    keyring: &Keyring,
    state: &str,
    key: Option<&SecretString>,
) -> Result<String, SealError> {
    let Some(key) = key else { return Ok(state.to_owned()) };
    let sealed = keyring.seal(&seal_record(state), key.expose_secret().as_bytes())?;
    Ok(format!("{state}.{}", URL_SAFE_NO_PAD.encode(sealed.to_bytes())))
}

/// The key that a browser has kept, if it has one; an error when that is not what it was given.
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

/// What such a key is sealed for.
fn seal_record(state: &str) -> String {
    format!("slack_state.{state}")
}

/// `GET /slack/callback`: where Slack sends them back to.
pub(crate) async fn callback(
    State(shared): State<Arc<Shared>>,
    Query(query): Query<CallbackQuery>,
    headers: HeaderMap,
) -> Response {
    let config = &shared.config;
    if !query.error.is_empty() {
        return page(
            StatusCode::OK,
            "The app was not installed: Slack says that you did not agree.",
        );
    }
    let cookies = headers
        .get_all(COOKIE)
        .iter()
        .filter_map(|cookie| cookie.to_str().ok())
        .flat_map(|all| all.split(';'));
    let given = cookies
        .filter_map(|cookie| cookie.trim().split_once('='))
        .find(|(name, _)| *name == COOKIE_NAME);
    let expired = "This link is not valid any more. Begin again.";
    let (state, sealed) = given.map_or(("", None), |(_, carried)| match carried.split_once('.') {
        Some((state, sealed)) => (state, Some(sealed)),
        None => (carried, None),
    });
    if query.state.is_empty() || state_digest(state) != state_digest(&query.state) {
        return page(StatusCode::FORBIDDEN, expired);
    }
    let Ok(key) = key_from_cookie(&shared.keyring, state, sealed) else {
        return page(StatusCode::FORBIDDEN, expired);
    };
    // Which no browser can change: what was begun with a member's key is not ended without.
    if state.starts_with(KEYED_PREFIX) != key.is_some() {
        return page(StatusCode::FORBIDDEN, expired);
    }
    let taken = shared.store.slack_state_consume(&state_digest(&query.state), clock::now()).await;
    let (organization, agent) = match taken {
        Ok(taken) => taken,
        Err(construct_store::Error::NotFound { .. }) => {
            return page(StatusCode::FORBIDDEN, expired);
        }
        Err(error) => {
            tracing::error!(error = %Chain(&error), "an installation could not be gone on with");
            return page(
                StatusCode::SERVICE_UNAVAILABLE,
                "The database does not answer. Begin again.",
            );
        }
    };
    let (Some(app), Some(redirect)) = (basic_authentication(config), redirect_uri(config)) else {
        return page(StatusCode::NOT_FOUND, "The app is not configured any more.");
    };
    let access = match oauth::exchange_code(&shared.web, &app, &query.code, &redirect).await {
        Ok(access) => access,
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "an installation has failed");
            return page(
                StatusCode::BAD_GATEWAY,
                "Slack does not confirm the installation. Begin again.",
            );
        }
    };
    if access.team.is_none() || access.is_enterprise_install {
        tracing::warn!("an installation in a whole Enterprise organization was refused");
        return page(StatusCode::BAD_REQUEST, ORG_WIDE);
    }
    let connected = WorkspaceConnection { organization, key, agent };
    match shared.teams.install(&access, connected).await {
        Ok(name) => {
            let words = format!(
                "Construct is installed in {name}. Invite it into a channel with /invite, and mention it there."
            );
            page(StatusCode::OK, &words)
        }
        Err(error @ teams::Error::OtherOrganization) => {
            tracing::warn!(%error, "an installation was refused");
            let words = "This workspace is connected to another organization of Construct. Somebody has to remove the app in the \
                         workspace's settings first.";
            page(StatusCode::CONFLICT, words)
        }
        Err(error) => {
            tracing::error!(error = %Chain(&error), "an installation could not be written down");
            page(
                StatusCode::SERVICE_UNAVAILABLE,
                "The installation could not be written down. Begin again.",
            )
        }
    }
}

/// Installs the app in the workspace whose token is configured, trying until Slack says which that
/// is.
pub(crate) async fn install_own_workspace(shared: Arc<Shared>, draining: CancellationToken) {
    let Some(token) = secret(shared.config.slack_bot_token.as_ref()) else { return };
    loop {
        let tried = async {
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
        match tried.await {
            Ok(()) => return,
            Err(error) => tracing::error!(
                error = format!("{error:#}"),
                "the configured workspace cannot be used"
            ),
        }
        tokio::select! {
            () = draining.cancelled() => return,
            () = tokio::time::sleep(RETRY_DELAY) => {}
        }
    }
}

/// Where this service's pages are, as browsers say it.
fn own_origin(config: &Config) -> Option<String> {
    let url = Url::parse(config.slack_public_url.as_ref()?).ok()?;
    Some(url.origin().ascii_serialization())
}

/// Whether the app has what connecting a workspace needs.
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

/// What members of an organization connect a workspace with.
fn connect_form(config: &Config) -> Response {
    if !is_configured(config) {
        return page(StatusCode::NOT_FOUND, UNCONFIGURED);
    }
    let agent = escape_html(&config.slack_agent);
    let html = format!(
        "<!doctype html><title>Construct</title><h1>Connect a workspace</h1>\
         <p>Make a code in the organization that the workspace is to belong to: <code>construct key code slack --role member \
         --scope tasks:write --scope agents:read</code></p>\
         <form method=post action=/slack/connect><p><label>Code <input name=code type=password autocomplete=off required></label>\
         <p><label>Agent that answers <input name=agent placeholder=\"{agent}\"></label><p><button>Go to Slack</button></form>"
    );
    let mut response = with_security_headers((StatusCode::OK, Html(html)).into_response());
    // Without its own address the browser would not say that the form is this page's.
    response.headers_mut().insert(REFERRER_POLICY, HeaderValue::from_static("same-origin"));
    response
}

fn page(status: StatusCode, words: &str) -> Response {
    let words = escape_html(words);
    with_security_headers(
        (status, Html(format!("<!doctype html><title>Construct</title><p>{words}</p>")))
            .into_response(),
    )
}

fn gateway_error_page(status: &tonic::Status) -> Response {
    tracing::error!(error = %Chain(status), "an installation could not be begun");
    if is_transient(status) {
        return page(
            StatusCode::SERVICE_UNAVAILABLE,
            "Construct does not answer. Try again in a moment.",
        );
    }
    page(
        StatusCode::FORBIDDEN,
        "Construct does not accept this service's key, or the one the code was for.",
    )
}

/// A code is good once, and the gateway fell silent after it.
fn code_used_up_page(status: &tonic::Status) -> Response {
    tracing::error!(error = %Chain(status), "an installation could not be begun, and its code is used up");
    let words = "Construct does not answer any more, and your code is used up. Make another one in a moment.";
    page(StatusCode::SERVICE_UNAVAILABLE, words)
}

fn escape_html(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Neither the key nor the state leaves with the address of the page, nothing of it is kept, and no
/// other page shows it as its own.
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
    fn the_manifest_asks_for_the_same_permissions() {
        let manifest = include_str!("../../../deploy/slack/manifest.yaml");
        let (_, scopes) = manifest.split_once("    bot:\n").expect("the manifest names scopes");
        let scopes: Vec<&str> =
            scopes.lines().map_while(|line| line.strip_prefix("      - ")).collect();
        assert_eq!(scopes.join(","), SCOPES);
    }
}
