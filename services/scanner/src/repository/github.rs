//! GitHub, and GitHub Enterprise: <https://docs.github.com/en/rest>.

use std::sync::Arc;

use async_trait::async_trait;
use reqwest::Url;
use secrecy::SecretString;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{IgnoredAny, MapAccess, SeqAccess, Visitor},
};

use super::{
    ForgeClients, SourceError,
    api::Api,
    credential::{AppKeyError, Credential, GitHubApp},
    error::redact_address,
    source::{Archive, ArchiveKind, Commit, Source},
};

/// The API of github.com.
const PUBLIC_API_URL: &str = "https://api.github.com";
/// The media type of responses.
const MEDIA_TYPE: &str = "application/vnd.github+json";
/// Repositories per page.
const PAGE_SIZE: &str = "100";
/// Repositories of a page that are read at most.
const MAX_PAGE_LENGTH: usize = 100;

/// The authentication at GitHub.
#[derive(Clone)]
pub enum GitHubAuth {
    /// None: public repositories, sixty requests an hour.
    Anonymous,
    /// A personal access token.
    Token(SecretString),
    /// An installation of a GitHub App.
    App {
        /// The app's client id, or its number.
        issuer: String,
        /// The installation's number.
        installation: u64,
        /// The app's RSA key in PEM.
        key: SecretString,
    },
}

impl std::fmt::Debug for GitHubAuth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Anonymous => "Anonymous",
            Self::Token(_) => "Token(***)",
            Self::App { .. } => "App(***)",
        })
    }
}

/// A client of GitHub. Cheap to clone; clones share the cached responses.
#[derive(Debug, Clone)]
pub struct GitHub {
    api: Arc<Api>,
    is_app: bool,
}

/// Whose repositories are listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Owner {
    /// An organization's.
    Organization(String),
    /// A user's public ones.
    User(String),
    /// All that the connection may see: a token's, or those that an app is installed for.
    Connection,
}

/// A repository in a list.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Repository {
    /// `owner/name`.
    pub full_name: String,
    /// Its description.
    #[serde(default)]
    pub description: Option<String>,
    /// Whether it is private.
    #[serde(default)]
    pub private: bool,
    /// Whether it is archived.
    #[serde(default)]
    pub archived: bool,
    /// Whether it is a fork.
    #[serde(default)]
    pub fork: bool,
    /// The default branch.
    #[serde(default)]
    pub default_branch: Option<String>,
    /// Its main language, as GitHub counts.
    #[serde(default)]
    pub language: Option<String>,
    /// In KiB, as GitHub counts, its history included.
    #[serde(default)]
    pub size: u64,
    /// The time of the last push.
    #[serde(default)]
    pub pushed_at: Option<jiff::Timestamp>,
}

/// A page of a list of repositories.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listing {
    /// At most a hundred repositories, in GitHub's order.
    pub repositories: Vec<Repository>,
    /// Whether there is a next page.
    pub more: bool,
}

impl GitHub {
    /// Creates a client of github.com, or of a GitHub Enterprise server at `https://HOST/api/v3`.
    ///
    /// # Errors
    /// When the address may not be contacted, or the app's key is invalid.
    pub fn new(
        reach: &ForgeClients,
        base: Option<&str>,
        auth: &GitHubAuth,
    ) -> Result<Self, SourceError> {
        let is_app = matches!(auth, GitHubAuth::App { .. });
        let credential = match auth {
            GitHubAuth::Anonymous => Credential::None,
            GitHubAuth::Token(token) => Credential::Bearer(token.clone()),
            GitHubAuth::App { issuer, installation, key } => {
                let invalid = |error: AppKeyError| SourceError::Invalid {
                    subject: "the app".to_owned(),
                    reason: error.to_string(),
                };
                Credential::App(
                    GitHubApp::new(issuer.clone(), *installation, key).map_err(invalid)?,
                )
            }
        };
        let api = Api::new(reach.clone(), base.unwrap_or(PUBLIC_API_URL), credential, MEDIA_TYPE)?;
        Ok(Self { api: Arc::new(api), is_app })
    }

    /// A repository by `owner/name`, or by its web or git address.
    ///
    /// # Errors
    /// When the name is malformed.
    pub fn repository(&self, name: &str) -> Result<impl Source + use<>, SourceError> {
        let (owner, name) = owner_and_name(name, self.api.host())?;
        Ok(GitHubRepository { github: self.clone(), owner, name })
    }

    /// A page, from 1, of an owner's repositories, with one request.
    ///
    /// # Errors
    /// See [`SourceError`].
    pub async fn repositories(&self, owner: &Owner, page: u32) -> Result<Listing, SourceError> {
        let segments: Vec<&str> = match owner {
            Owner::Organization(name) => vec!["orgs", check_name(name)?, "repos"],
            Owner::User(name) => vec!["users", check_name(name)?, "repos"],
            Owner::Connection if self.is_app => vec!["installation", "repositories"],
            Owner::Connection => vec!["user", "repos"],
        };
        let mut url = self.api.url(segments);
        url.query_pairs_mut()
            .append_pair("per_page", PAGE_SIZE)
            .append_pair("page", &page.max(1).to_string());
        let answer = self.api.json(url, "the list of repositories").await?;
        let Page(repositories) = answer.value;
        Ok(Listing { repositories, more: answer.next.is_some() })
    }
}

/// A page of a list. An app's is wrapped in an object.
struct Page(Vec<Repository>);

impl<'de> Deserialize<'de> for Page {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PageVisitor)
    }
}

struct PageVisitor;

impl<'de> Visitor<'de> for PageVisitor {
    type Value = Page;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a list of repositories")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Page, A::Error> {
        let mut page = Vec::new();
        while page.len() < MAX_PAGE_LENGTH {
            let Some(repository) = list.next_element()? else { return Ok(Page(page)) };
            page.push(repository);
        }
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Page(page))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Page, A::Error> {
        let mut page = Page(Vec::new());
        while let Some(key) = object.next_key::<String>()? {
            if key == "repositories" {
                page = object.next_value()?;
            } else {
                object.next_value::<IgnoredAny>()?;
            }
        }
        Ok(page)
    }
}

/// The needed fields of a repository.
#[derive(Deserialize)]
struct RepositoryInfo {
    default_branch: String,
}

/// The needed fields of a commit.
#[derive(Deserialize)]
struct CommitInfo {
    sha: String,
}

#[derive(Debug, Clone)]
struct GitHubRepository {
    github: GitHub,
    owner: String,
    name: String,
}

impl GitHubRepository {
    fn full_name(&self) -> String {
        format!("{}/{}", self.owner, self.name)
    }

    fn url<'a>(&'a self, more: &[&'a str]) -> Url {
        self.github
            .api
            .url(["repos", &self.owner, &self.name].into_iter().chain(more.iter().copied()))
    }
}

#[async_trait]
impl Source for GitHubRepository {
    async fn resolve(&self, reference: Option<&str>) -> Result<Commit, SourceError> {
        let reference = match reference {
            Some(reference) => check_reference(reference)?.to_owned(),
            None => {
                self.github
                    .api
                    .json::<RepositoryInfo>(self.url(&[]), &self.full_name())
                    .await?
                    .value
                    .default_branch
            }
        };
        let subject = format!("{} of {}", reference, self.full_name());
        let answer = self
            .github
            .api
            .json::<CommitInfo>(self.url(&["commits", &reference]), &subject)
            .await?;
        Commit::new(&answer.value.sha, Some(reference))
    }

    async fn archive(&self, commit: &Commit) -> Result<Archive, SourceError> {
        let subject = format!("{} of {}", commit.id(), self.full_name());
        let bytes = self.github.api.stream(self.url(&["tarball", commit.id()]), &subject).await?;
        Ok(Archive { kind: ArchiveKind::TarGz, bytes })
    }
}

/// Checks the name of a user, organization or repository.
fn check_name(name: &str) -> Result<&str, SourceError> {
    let usable = name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
    if usable && !name.is_empty() && name.len() <= 100 && name != "." && name != ".." {
        return Ok(name);
    }
    Err(SourceError::Invalid {
        subject: redact_address(name),
        reason: "it is not a valid name on GitHub".to_owned(),
    })
}

/// Checks a branch, tag or commit, as git allows them: nothing that leads elsewhere in an address.
pub(super) fn check_reference(reference: &str) -> Result<&str, SourceError> {
    let odd = |c: char| c.is_control() || " ~^:?*[\\".contains(c);
    let dotted = reference.split('/').any(|part| part.is_empty() || part.starts_with('.'));
    if reference.len() <= 255 && !reference.contains(odd) && !dotted && !reference.contains("..") {
        return Ok(reference);
    }
    Err(SourceError::Invalid {
        subject: redact_address(reference),
        reason: "it is not a branch, tag or commit".to_owned(),
    })
}

/// The owner and name of a repository, on the server whose API is at this host.
fn owner_and_name(address: &str, api: &str) -> Result<(String, String), SourceError> {
    let refuse = |reason: &str| {
        Err(SourceError::Invalid { subject: redact_address(address), reason: reason.to_owned() })
    };
    let (host, path) = match address.split_once("://") {
        Some((scheme, rest)) => {
            let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
            match authority.rsplit_once('@') {
                None => (Some(authority), path),
                Some(("git", host)) if scheme.ends_with("ssh") => (Some(host), path),
                // This is likely a credential, which belongs into a connection.
                Some(_) => return refuse("its address contains a user or password"),
            }
        }
        None => match address.strip_prefix("git@").and_then(|rest| rest.split_once(':')) {
            Some((host, path)) => (Some(host), path),
            None => (None, address),
        },
    };
    if let Some(host) = host {
        let host = host.split(':').next().unwrap_or(host).to_ascii_lowercase();
        let web = api.strip_prefix("api.").unwrap_or(api);
        if host != api && host.strip_prefix("www.").unwrap_or(&host) != web {
            return refuse(&format!("it is on another server than {web}"));
        }
    }
    let path = path.trim_end_matches('/');
    let mut parts = path.strip_suffix(".git").unwrap_or(path).split('/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(owner), Some(name), None) => {
            Ok((check_name(owner)?.to_owned(), check_name(name)?.to_owned()))
        }
        _ => refuse("a repository is named owner/name, or by its address"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_is_parsed_from_common_addresses_only() {
        for address in [
            "octo/hello.rs",
            "https://github.com/octo/hello.rs",
            "https://github.com/octo/hello.rs.git",
            "git@github.com:octo/hello.rs.git",
            "ssh://git@github.com/octo/hello.rs/",
        ] {
            assert_eq!(
                owner_and_name(address, "api.github.com").expect("a repository"),
                ("octo".to_owned(), "hello.rs".to_owned()),
                "{address}"
            );
        }
        for address in
            ["octo", "octo/..", "a/b/c", "", "octo/x%2f..", "https://github.com/octo", "o cto/x"]
        {
            assert!(owner_and_name(address, "api.github.com").is_err(), "{address}");
        }
        for elsewhere in [
            "https://gitlab.com/octo/hello",
            "git@github.corp:octo/hello",
            "https://github.com.evil/octo/hello",
        ] {
            assert!(owner_and_name(elsewhere, "api.github.com").is_err(), "{elsewhere}");
        }
        assert!(owner_and_name("https://github.corp:8443/octo/hello", "github.corp").is_ok());
        // A credential is not shown in the error.
        for address in [
            "https://x:ghp_SECRET@github.com/octo/hello/tree/main",
            "https://ghp_SECRET@github.com/octo/hello",
            "https://github.com/octo/hello/x?token=ghp_SECRET",
            "ghp_SECRET@github.com:octo/hello",
        ] {
            let refused =
                owner_and_name(address, "api.github.com").expect_err("refused").to_string();
            assert!(!refused.contains("SECRET") && refused.contains("github.com"), "{refused}");
        }
        for reference in ["main", "feature/x-1", "v1.0", "abc123"] {
            assert!(check_reference(reference).is_ok(), "{reference}");
        }
        for reference in ["", "a..b", "a b", "/a", "a/../b", "a?b", "a\nb"] {
            assert!(check_reference(reference).is_err(), "{reference}");
        }
    }
}
