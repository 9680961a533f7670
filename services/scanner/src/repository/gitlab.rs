//! GitLab: <https://docs.gitlab.com/api/repositories/>.

use std::sync::Arc;

use async_trait::async_trait;
use jiff::Timestamp;
use reqwest::Url;
use secrecy::SecretString;
use serde::{Deserialize, de::IgnoredAny};

use super::{
    ForgeClients, SourceError,
    api::Api,
    credential::Credential,
    error::redact_address,
    github::{Listing, Owner, Repository, check_reference},
    source::{Archive, ArchiveKind, Commit, Source},
};

/// The address of gitlab.com.
const PUBLIC_URL: &str = "https://gitlab.com";
/// Projects per page; GitLab's maximum.
const PAGE_SIZE: usize = 100;

/// A client of a GitLab server. Cheap to clone; clones share the cached responses.
#[derive(Debug, Clone)]
pub struct GitLab {
    api: Arc<Api>,
}

impl GitLab {
    /// Creates a client of gitlab.com or another server, with an optional token.
    ///
    /// # Errors
    /// When the address may not be contacted.
    pub fn new(
        reach: &ForgeClients,
        base: Option<&str>,
        token: Option<SecretString>,
    ) -> Result<Self, SourceError> {
        let credential = token.map_or(Credential::None, Credential::Private);
        let base = base.unwrap_or(PUBLIC_URL).trim_end_matches('/');
        let api =
            Api::new(reach.clone(), &format!("{base}/api/v4"), credential, "application/json")?;
        Ok(Self { api: Arc::new(api) })
    }

    /// A project by its path (`group/subgroup/name`) or number.
    ///
    /// # Errors
    /// When the name is malformed.
    pub fn project(&self, name: &str) -> Result<impl Source + use<>, SourceError> {
        let name = check_path(name, "a project is named by its path")?.to_owned();
        Ok(GitLabProject { gitlab: self.clone(), name })
    }

    /// A page, from 1, of the projects of a group with its subgroups, of a user, or of those the
    /// token's user is a member of; at most 100.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub async fn projects(&self, owner: &Owner, page: u32) -> Result<Listing, SourceError> {
        let reason = "a group is named by its path, a user by the name";
        let (segments, filters): (Vec<&str>, &[_]) = match owner {
            // Shared projects are not below the group's path.
            Owner::Organization(name) => (
                vec!["groups", check_path(name, reason)?, "projects"],
                &[("include_subgroups", "true"), ("with_shared", "false")],
            ),
            Owner::User(name) => (vec!["users", check_path(name, reason)?, "projects"], &[]),
            // Without it, all public projects of the server are listed.
            Owner::Connection => (vec!["projects"], &[("membership", "true")]),
        };
        let mut url = self.api.url(segments);
        url.query_pairs_mut()
            .extend_pairs(filters)
            .extend_pairs([("order_by", "path"), ("sort", "asc")])
            .append_pair("per_page", &PAGE_SIZE.to_string())
            .append_pair("page", &page.to_string());
        let answer = self.api.json::<Vec<Project>>(url, "the list of projects").await?;
        let repositories = answer.value.into_iter().take(PAGE_SIZE).map(Repository::from).collect();
        Ok(Listing { repositories, more: answer.next.is_some() })
    }
}

/// A project in a list.
#[derive(Deserialize)]
struct Project {
    path_with_namespace: String,
    description: Option<String>,
    visibility: Option<String>,
    #[serde(default)]
    archived: bool,
    forked_from_project: Option<IgnoredAny>,
    default_branch: Option<String>,
    last_activity_at: Option<Timestamp>,
}

impl From<Project> for Repository {
    fn from(project: Project) -> Self {
        Self {
            full_name: project.path_with_namespace,
            description: project.description,
            // `internal` projects are for users with an account.
            private: project.visibility.as_deref() != Some("public"),
            archived: project.archived,
            fork: project.forked_from_project.is_some(),
            default_branch: project.default_branch,
            language: None,
            size: 0,
            pushed_at: project.last_activity_at,
        }
    }
}

/// The needed fields of a project.
#[derive(Deserialize)]
struct ProjectInfo {
    /// None when nothing was committed yet.
    default_branch: Option<String>,
}

/// The needed fields of a commit.
#[derive(Deserialize)]
struct CommitInfo {
    id: String,
}

/// A project on a GitLab server.
#[derive(Debug)]
struct GitLabProject {
    gitlab: GitLab,
    name: String,
}

impl GitLabProject {
    fn url<'a>(&'a self, more: &[&'a str]) -> Url {
        // As one segment, in which the slashes are escaped.
        self.gitlab
            .api
            .url(["projects", self.name.as_str()].into_iter().chain(more.iter().copied()))
    }
}

#[async_trait]
impl Source for GitLabProject {
    async fn resolve(&self, reference: Option<&str>) -> Result<Commit, SourceError> {
        let reference = match reference {
            Some(reference) => check_reference(reference)?.to_owned(),
            None => {
                let head =
                    self.gitlab.api.json::<ProjectInfo>(self.url(&[]), &self.name).await?.value;
                let empty =
                    || SourceError::NotFound { subject: format!("a commit of {}", self.name) };
                head.default_branch.ok_or_else(empty)?
            }
        };
        let subject = format!("{} of {}", reference, self.name);
        let answer = self
            .gitlab
            .api
            .json::<CommitInfo>(self.url(&["repository", "commits", &reference]), &subject)
            .await?;
        Commit::new(&answer.value.id, Some(reference))
    }

    async fn archive(&self, commit: &Commit) -> Result<Archive, SourceError> {
        let mut url = self.url(&["repository", "archive.tar.gz"]);
        url.query_pairs_mut().append_pair("sha", commit.id());
        let subject = format!("{} of {}", commit.id(), self.name);
        Ok(Archive {
            kind: ArchiveKind::TarGz,
            bytes: self.gitlab.api.stream(url, &subject).await?,
        })
    }
}

/// Checks the path of a group, user or project.
fn check_path<'a>(name: &'a str, reason: &str) -> Result<&'a str, SourceError> {
    let usable = |c: char| c.is_ascii_alphanumeric() || "-_./".contains(c);
    let parts_fit = name.split('/').all(|part| !part.is_empty() && part != "." && part != "..");
    if name.len() <= 500 && name.chars().all(usable) && parts_fit {
        return Ok(name);
    }
    Err(SourceError::Invalid { subject: redact_address(name), reason: reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_with_credential_is_refused_without_revealing_it() {
        let reach = ForgeClients::new([]).expect("a client");
        let given = "https://oauth2:glpat-SECRET@gitlab.com/group/project";
        let gitlab = GitLab::new(&reach, None, None).expect("it is public");
        let refused = gitlab.project(given).map(drop).expect_err("refused").to_string();
        assert!(!refused.contains("SECRET") && refused.contains("gitlab.com"), "{refused}");
    }
}
