//! Obtaining and renewing tokens.

use construct_runtime::config::Secret;
use serde::Deserialize;

use super::{Body, Error, Web};

/// The response to an authorization.
#[derive(Debug, Deserialize)]
pub(crate) struct Access {
    pub(crate) access_token: Secret,
    /// With token rotation.
    #[serde(default)]
    pub(crate) refresh_token: Option<Secret>,
    /// The lifetime in seconds; with token rotation.
    #[serde(default)]
    pub(crate) expires_in: Option<i64>,
    #[serde(default)]
    pub(crate) scope: String,
    #[serde(default)]
    pub(crate) bot_user_id: String,
    #[serde(default)]
    pub(crate) app_id: String,
    /// Whether the app is installed in a whole Enterprise organization.
    #[serde(default)]
    pub(crate) is_enterprise_install: bool,
    /// The workspace; none for such an app.
    #[serde(default)]
    pub(crate) team: Option<Team>,
    #[serde(default)]
    pub(crate) authed_user: AuthedUser,
}

/// The workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Team {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) name: String,
}

/// The user who installed the app.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct AuthedUser {
    #[serde(default)]
    pub(crate) id: String,
}

#[derive(Debug, Deserialize)]
struct AuthTestResponse {
    team_id: String,
    #[serde(default)]
    team: String,
    user_id: String,
    /// Only bot tokens have one.
    bot_id: Option<String>,
    #[serde(default)]
    is_enterprise_install: bool,
}

/// Looks up a bot token, as if it had just been issued. Such a token is not renewed.
pub(crate) async fn test_token(web: &Web, token: &Secret) -> Result<Access, Error> {
    let authorization = format!("Bearer {}", token.expose());
    let info: AuthTestResponse =
        web.call_with_authorization(&authorization, "auth.test", Body::Form(&[])).await?;
    if info.bot_id.is_none() {
        return Err(Error::Refused { method: "auth.test", code: "not_a_bot_token".to_owned() });
    }
    Ok(Access {
        access_token: token.clone(),
        refresh_token: None,
        expires_in: None,
        scope: String::new(),
        bot_user_id: info.user_id,
        app_id: String::new(),
        is_enterprise_install: info.is_enterprise_install,
        team: Some(Team { id: info.team_id, name: info.team }),
        authed_user: AuthedUser::default(),
    })
}

/// Exchanges an OAuth code. `app` is the app's id and secret as HTTP basic authentication.
pub(crate) async fn exchange_code(
    web: &Web,
    app: &str,
    code: &str,
    redirect: &str,
) -> Result<Access, Error> {
    web.call_with_authorization(
        app,
        "oauth.v2.access",
        Body::Form(&[("code", code), ("redirect_uri", redirect)]),
    )
    .await
}

/// Exchanges a refresh token, which is invalid from then on.
pub(crate) async fn refresh(web: &Web, app: &str, refresh_token: &str) -> Result<Access, Error> {
    let fields = [("grant_type", "refresh_token"), ("refresh_token", refresh_token)];
    web.call_with_authorization(app, "oauth.v2.access", Body::Form(&fields)).await
}
