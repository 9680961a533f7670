//! Getting and renewing tokens.

use construct_runtime::config::Secret;
use serde::Deserialize;

use super::{Body, Error, Web};

/// What the app may, from now on.
#[derive(Debug, Deserialize)]
pub(crate) struct Access {
    pub(crate) access_token: Secret,
    /// With token rotation.
    #[serde(default)]
    pub(crate) refresh_token: Option<Secret>,
    /// In seconds; with token rotation.
    #[serde(default)]
    pub(crate) expires_in: Option<i64>,
    #[serde(default)]
    pub(crate) scope: String,
    #[serde(default)]
    pub(crate) bot_user_id: String,
    #[serde(default)]
    pub(crate) app_id: String,
    /// Whether it is installed in a whole Enterprise organization.
    #[serde(default)]
    pub(crate) is_enterprise_install: bool,
    /// None for such an app.
    #[serde(default)]
    pub(crate) team: Option<Team>,
    #[serde(default)]
    pub(crate) authed_user: Authed,
}

/// The workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Team {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) name: String,
}

/// Who has installed the app.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Authed {
    #[serde(default)]
    pub(crate) id: String,
}

#[derive(Debug, Deserialize)]
struct Whose {
    team_id: String,
    #[serde(default)]
    team: String,
    user_id: String,
    /// Only bots' tokens have one.
    bot_id: Option<String>,
    #[serde(default)]
    is_enterprise_install: bool,
}

/// What a bot's token is good for, as if it had just been given; it isn't renewed.
pub(crate) async fn test(web: &Web, token: &Secret) -> Result<Access, Error> {
    let authorization = format!("Bearer {}", token.expose());
    let whose: Whose = web.call_as(&authorization, "auth.test", Body::Form(&[])).await?;
    if whose.bot_id.is_none() {
        return Err(Error::Refused { method: "auth.test", code: "not_a_bot_token".to_owned() });
    }
    Ok(Access {
        access_token: token.clone(),
        refresh_token: None,
        expires_in: None,
        scope: String::new(),
        bot_user_id: whose.user_id,
        app_id: String::new(),
        is_enterprise_install: whose.is_enterprise_install,
        team: Some(Team { id: whose.team_id, name: whose.team }),
        authed_user: Authed::default(),
    })
}

/// The app as Slack's OAuth knows it: its id and secret, as HTTP's basic authentication.
pub(crate) async fn exchange(
    web: &Web,
    app: &str,
    code: &str,
    redirect: &str,
) -> Result<Access, Error> {
    web.call_as(app, "oauth.v2.access", Body::Form(&[("code", code), ("redirect_uri", redirect)]))
        .await
}

/// A new token for an old one's refresh token, which is void from then on.
pub(crate) async fn refresh(web: &Web, app: &str, refresh_token: &str) -> Result<Access, Error> {
    let fields = [("grant_type", "refresh_token"), ("refresh_token", refresh_token)];
    web.call_as(app, "oauth.v2.access", Body::Form(&fields)).await
}
