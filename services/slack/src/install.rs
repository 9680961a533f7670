//! Installing the app over OAuth 2: a link that only who knows the key gets, a state that is used once within ten minutes and by the
//! browser that it was given to, and a token that is sealed before it is written down.

use std::sync::Arc;

use axum::{
    extract::{Query, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, StatusCode,
        header::{CACHE_CONTROL, COOKIE, LOCATION, REFERRER_POLICY, SET_COOKIE},
    },
    response::{Html, IntoResponse as _, Response},
};
use construct_domain::OrganizationId;
use construct_runtime::telemetry::Chain;
use construct_store::slack::NewState;
use jiff::{SignedDuration, Timestamp};
use reqwest::Url;
use ring::{
    digest,
    rand::{SecureRandom as _, SystemRandom},
};
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use crate::{Config, Shared, config::secret, face::Face, teams::AGAIN, web::oauth};

/// What the app may do in a workspace; the manifest names the same.
pub(crate) const SCOPES: &str = "app_mentions:read,channels:history,chat:write,commands,files:read,files:write,\
                                 groups:history,im:history,links:read,links:write,mpim:history,users:read";
/// How long somebody has to agree.
const LIFETIME: SignedDuration = SignedDuration::from_mins(10);
const COOKIE_NAME: &str = "construct_slack_state";

#[derive(Debug, Deserialize)]
pub(crate) struct Connect {
    #[serde(default)]
    key: String,
    /// The agent that is to answer; the configured one when absent.
    agent: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Callback {
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

/// `GET /slack/connect?key=…`: sends whoever knows the key to Slack, to agree there.
pub(crate) async fn connect(State(face): State<Arc<Face>>, Query(query): Query<Connect>) -> Response {
    let config = &face.shared.config;
    let Some(key) = secret(config.slack_connect_key.as_ref()) else {
        return page(StatusCode::NOT_FOUND, "Nobody can connect a workspace here: no key is configured for it.");
    };
    // The comparison tells nothing of the key by the time it takes, nor of its length.
    let random = SystemRandom::new();
    let Ok(tag) = ring::hmac::Key::generate(ring::hmac::HMAC_SHA256, &random) else {
        return page(StatusCode::INTERNAL_SERVER_ERROR, "The machine gives no randomness.");
    };
    let expected = ring::hmac::sign(&tag, key.expose().as_bytes());
    if ring::hmac::verify(&tag, query.key.as_bytes(), expected.as_ref()).is_err() {
        return page(StatusCode::FORBIDDEN, "This is not the key that connecting a workspace needs.");
    }
    let (Some(client), Some(_), Some(redirect)) =
        (&config.slack_client_id, basic_authentication(config), redirect(config))
    else {
        let words = "Connecting a workspace needs slack_client_id, slack_client_secret and slack_public_url.";
        return page(StatusCode::NOT_FOUND, words);
    };
    let mut bytes = [0_u8; 32];
    if random.fill(&mut bytes).is_err() {
        return page(StatusCode::INTERNAL_SERVER_ERROR, "The machine gives no randomness.");
    }
    let state = hex(&bytes);
    let now = Timestamp::now();
    let new = NewState {
        state: digest_of(&state),
        organization: OrganizationId::LOCAL,
        agent: query.agent.filter(|agent| !agent.is_empty()).unwrap_or_else(|| config.slack_agent.clone()),
        expires_at: now + LIFETIME,
    };
    if let Err(error) = face.shared.store.slack_state_put(&new, now).await {
        tracing::error!(error = %Chain(&error), "an installation could not be begun");
        return page(StatusCode::SERVICE_UNAVAILABLE, "The database does not answer. Try again in a moment.");
    }
    let parameters =
        [("client_id", client.as_str()), ("scope", SCOPES), ("redirect_uri", &redirect), ("state", &state)];
    let Ok(url) = Url::parse_with_params(&config.slack_authorize_url, parameters) else {
        return page(StatusCode::INTERNAL_SERVER_ERROR, "slack_authorize_url is no address.");
    };
    let secure = if redirect.starts_with("https:") { "; Secure" } else { "" };
    let cookie = format!("{COOKIE_NAME}={state}; Path=/slack; Max-Age=600; HttpOnly; SameSite=Lax{secure}");
    let headers = [(LOCATION, url.to_string()), (SET_COOKIE, cookie)];
    silent((StatusCode::SEE_OTHER, headers).into_response())
}

/// `GET /slack/callback`: where Slack sends them back to.
pub(crate) async fn callback(
    State(face): State<Arc<Face>>,
    Query(query): Query<Callback>,
    headers: HeaderMap,
) -> Response {
    let config = &face.shared.config;
    if !query.error.is_empty() {
        return page(StatusCode::OK, "The app was not installed: Slack says that you did not agree.");
    }
    let cookies =
        headers.get_all(COOKIE).iter().filter_map(|cookie| cookie.to_str().ok()).flat_map(|all| all.split(';'));
    let given = cookies.filter_map(|cookie| cookie.trim().split_once('=')).find(|(name, _)| *name == COOKIE_NAME);
    let expired = "This link is not valid any more. Begin again.";
    if query.state.is_empty() || given.is_none_or(|(_, state)| digest_of(state) != digest_of(&query.state)) {
        return page(StatusCode::FORBIDDEN, expired);
    }
    let taken = face.shared.store.slack_state_take(&digest_of(&query.state), Timestamp::now()).await;
    let (organization, agent) = match taken {
        Ok(taken) => taken,
        Err(construct_store::Error::NotFound { .. }) => return page(StatusCode::FORBIDDEN, expired),
        Err(error) => {
            tracing::error!(error = %Chain(&error), "an installation could not be gone on with");
            return page(StatusCode::SERVICE_UNAVAILABLE, "The database does not answer. Begin again.");
        }
    };
    let (Some(app), Some(redirect)) = (basic_authentication(config), redirect(config)) else {
        return page(StatusCode::NOT_FOUND, "The app is not configured any more.");
    };
    let access = match oauth::exchange(&face.shared.web, &app, &query.code, &redirect).await {
        Ok(access) => access,
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "an installation has failed");
            return page(StatusCode::BAD_GATEWAY, "Slack does not confirm the installation. Begin again.");
        }
    };
    if access.team.is_none() {
        let words = "The app can be installed in workspaces, not in a whole Enterprise organization at once.";
        return page(StatusCode::BAD_REQUEST, words);
    }
    match face.shared.teams.install(&access, organization, agent).await {
        Ok(name) => {
            let words = format!(
                "Construct is installed in {name}. Invite it into a channel with /invite, and mention it there."
            );
            page(StatusCode::OK, &words)
        }
        Err(error) => {
            tracing::error!(error = %Chain(&error), "an installation could not be written down");
            page(StatusCode::SERVICE_UNAVAILABLE, "The installation could not be written down. Begin again.")
        }
    }
}

/// Installs the app in the workspace whose token is configured, trying until Slack says which that is.
pub(crate) async fn own(shared: Arc<Shared>, draining: CancellationToken) {
    let Some(token) = secret(shared.config.slack_bot_token.as_ref()) else { return };
    loop {
        let tried = async {
            let access = oauth::test(&shared.web, token).await?;
            shared.teams.install(&access, OrganizationId::LOCAL, shared.config.slack_agent.clone()).await?;
            anyhow::Ok(())
        };
        match tried.await {
            Ok(()) => return,
            Err(error) => tracing::error!(error = format!("{error:#}"), "the configured workspace cannot be used"),
        }
        tokio::select! {
            () = draining.cancelled() => return,
            () = tokio::time::sleep(AGAIN) => {}
        }
    }
}

fn redirect(config: &Config) -> Option<String> {
    let public = config.slack_public_url.as_ref()?;
    Some(format!("{}/slack/callback", public.trim_end_matches('/')))
}

fn digest_of(state: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(digest::digest(&digest::SHA256, state.as_bytes()).as_ref());
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn page(status: StatusCode, words: &str) -> Response {
    let words = words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    silent((status, Html(format!("<!doctype html><title>Construct</title><p>{words}</p>"))).into_response())
}

/// Neither the key nor the state leaves with the address of the page, and nothing of it is kept.
fn silent(mut response: Response) -> Response {
    let headers: [(HeaderName, &str); 2] = [(REFERRER_POLICY, "no-referrer"), (CACHE_CONTROL, "no-store")];
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
        let scopes: Vec<&str> = scopes.lines().map_while(|line| line.strip_prefix("      - ")).collect();
        assert_eq!(scopes.join(","), SCOPES);
    }
}
