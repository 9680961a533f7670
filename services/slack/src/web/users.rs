//! Who somebody is.

use serde::Deserialize;

use super::{Body, Error, Token, Web};

/// A user, as the workspace of the token sees them.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct User {
    /// Their own workspace.
    #[serde(default)]
    pub(crate) team_id: Option<String>,
    #[serde(default)]
    name: String,
    #[serde(default)]
    real_name: Option<String>,
    #[serde(default)]
    profile: Profile,
    #[serde(default)]
    pub(crate) deleted: bool,
    #[serde(default)]
    pub(crate) is_bot: bool,
    #[serde(default)]
    pub(crate) is_admin: bool,
    #[serde(default)]
    pub(crate) is_owner: bool,
    #[serde(default)]
    is_restricted: bool,
    #[serde(default)]
    is_ultra_restricted: bool,
    #[serde(default)]
    is_stranger: bool,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Profile {
    #[serde(default)]
    display_name: String,
}

impl User {
    /// What people call them.
    pub(crate) fn shown(&self) -> &str {
        let names = [self.profile.display_name.as_str(), self.real_name.as_deref().unwrap_or_default()];
        names.into_iter().find(|name| !name.trim().is_empty()).unwrap_or(&self.name)
    }

    /// Whether they are a full member of this workspace: no guest, and nobody from elsewhere who shares a channel.
    pub(crate) fn is_member(&self, team: &str) -> bool {
        let outside = self.is_restricted || self.is_ultra_restricted || self.is_stranger || self.deleted;
        !outside && self.team_id.as_deref() == Some(team)
    }
}

#[derive(Debug, Deserialize)]
struct Info {
    user: User,
}

/// One user.
pub(crate) async fn info(web: &Web, token: &Token, user: &str) -> Result<User, Error> {
    let info: Info = web.call(token, "users.info", Body::Form(&[("user", user)])).await?;
    Ok(info.user)
}
