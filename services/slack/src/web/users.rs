//! Users.

use serde::Deserialize;

use super::{Body, Error, Token, Web};

/// A user, as the workspace of the token sees them.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct User {
    /// The user's own workspace.
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
    /// For users of an Enterprise organization, who may be in several of its workspaces.
    #[serde(default)]
    enterprise_user: Option<EnterpriseUser>,
}

/// A user's data in an Enterprise organization
/// (<https://docs.slack.dev/reference/objects/user-object>).
#[derive(Debug, Clone, Default, Deserialize)]
struct EnterpriseUser {
    /// The workspaces of the user.
    #[serde(default)]
    teams: Vec<String>,
}

#[derive(Debug, Clone, Default, Deserialize)]
struct Profile {
    #[serde(default)]
    display_name: String,
}

impl User {
    /// The name to display.
    pub(crate) fn display_name(&self) -> &str {
        let names =
            [self.profile.display_name.as_str(), self.real_name.as_deref().unwrap_or_default()];
        names.into_iter().find(|name| !name.trim().is_empty()).unwrap_or(&self.name)
    }

    /// Whether the user is a full member of this workspace: neither a guest nor an outsider in a
    /// shared channel.
    pub(crate) fn is_member(&self, team: &str) -> bool {
        let outside =
            self.is_restricted || self.is_ultra_restricted || self.is_stranger || self.deleted;
        let is_enterprise_member = self
            .enterprise_user
            .as_ref()
            .is_some_and(|user| user.teams.iter().any(|id| id == team));
        !outside && (self.team_id.as_deref() == Some(team) || is_enterprise_member)
    }
}

#[derive(Debug, Deserialize)]
struct UserInfoResponse {
    user: User,
}

/// Looks up a user.
pub(crate) async fn get(web: &Web, token: &Token, user: &str) -> Result<User, Error> {
    let info: UserInfoResponse =
        web.call(token, "users.info", Body::Form(&[("user", user)])).await?;
    Ok(info.user)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::User;

    #[test]
    fn enterprise_user_is_member_of_own_workspaces_only() {
        let user = |more: serde_json::Value| -> User {
            let mut user = json!({"id": "W1", "team_id": "T1", "name": "ann", "is_admin": false});
            for (name, value) in more.as_object().into_iter().flatten() {
                user[name] = value.clone();
            }
            serde_json::from_value(user).expect("a user")
        };
        let teams = json!({"id": "W1", "enterprise_id": "E1", "enterprise_name": "All", "is_admin": false, "is_owner": false, "teams": ["T1", "T2"]});
        let ann = user(json!({"enterprise_user": teams}));
        assert!(ann.is_member("T1") && ann.is_member("T2") && !ann.is_member("T3"));
        let guest = user(json!({"enterprise_user": teams, "is_restricted": true}));
        assert!(!guest.is_member("T2"));
        let alone = user(json!({}));
        assert!(alone.is_member("T1") && !alone.is_member("T2"));
    }
}
