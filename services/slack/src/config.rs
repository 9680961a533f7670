//! What can be configured about the Slack service.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use construct_runtime::{
    ServiceConfig,
    config::{self, Common, Invalid, Secret},
};
use reqwest::Url;
use serde::{Deserialize, Serialize};

/// The service's own keys.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Where Slack's requests are served. Not set: nowhere; then Socket Mode is needed.
    pub slack_listen: Option<SocketAddr>,
    /// What Slack's users reach `slack_listen` by, e.g. `https://construct.example.com`; needed to install the app over OAuth.
    pub slack_public_url: Option<String>,
    /// What Slack signs its requests with ("Signing Secret" of the app). Needed with
    /// `slack_listen`.
    pub slack_signing_secret: Option<Secret>,
    /// The app-level token (`xapp-…`) of Socket Mode. Not set: no Socket Mode.
    pub slack_app_token: Option<Secret>,
    /// The bot token (`xoxb-…`) of one workspace, which Slack shows whoever has installed the app
    /// from its settings: for an installation without OAuth. Such a token isn't renewed, so that
    /// the app must be without token rotation.
    pub slack_bot_token: Option<Secret>,
    /// The app's id for OAuth ("Client ID").
    pub slack_client_id: Option<String>,
    /// The app's secret for OAuth ("Client Secret").
    pub slack_client_secret: Option<Secret>,
    /// What somebody has to know to begin an installation for the organization of
    /// `slack_gateway_key` at `/slack/connect?key=…`; at least 16 characters. Not set: nobody can.
    /// Members of an organization begin theirs at `/slack/connect` with a set-up code of their own.
    pub slack_connect_key: Option<Secret>,
    /// The agent that answers in a workspace that is connected.
    pub slack_agent: String,
    /// Whether only those are answered who have said who they are in Construct (`/construct link`),
    /// besides what the workspace's permissions say.
    pub slack_members_only: bool,
    /// Where the gateway's API is: `http://` or `https://`.
    pub slack_gateway_url: String,
    /// A file with the certificates (PEM) that vouch for the gateway's. Not set: the system's do.
    pub slack_gateway_ca: Option<PathBuf>,
    /// A file with the certificate (PEM) to show to a gateway that asks for one, with
    /// `slack_gateway_certificate_key`.
    pub slack_gateway_certificate: Option<PathBuf>,
    /// A file with that certificate's private key (PEM).
    pub slack_gateway_certificate_key: Option<PathBuf>,
    /// What the gateway knows this service by, where a workspace was not connected with a key of
    /// its own.
    pub slack_gateway_key: Option<Secret>,
    /// Where people look at tasks, with `{task}` in the place of the id; links of this form are
    /// unfurled. Not set: nowhere.
    pub slack_task_url: Option<String>,
    /// Slack's Web API.
    pub slack_api_url: String,
    /// Where people agree to an installation.
    pub slack_authorize_url: String,
    /// Mentions worked on in this process at the same time; others wait in PostgreSQL. At least 1.
    pub slack_concurrency: usize,
    /// How long a process that died keeps its mentions from being gone on with. At least 3 s: a
    /// living one says so three times within it.
    #[serde(with = "config::duration")]
    pub slack_lease: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            slack_listen: None,
            slack_public_url: None,
            slack_signing_secret: None,
            slack_app_token: None,
            slack_bot_token: None,
            slack_client_id: None,
            slack_client_secret: None,
            slack_connect_key: None,
            slack_agent: "default".to_owned(),
            slack_members_only: false,
            slack_gateway_url: "http://127.0.0.1:60080".to_owned(),
            slack_gateway_ca: None,
            slack_gateway_certificate: None,
            slack_gateway_certificate_key: None,
            slack_gateway_key: None,
            slack_task_url: None,
            slack_api_url: "https://slack.com/api/".to_owned(),
            slack_authorize_url: "https://slack.com/oauth/v2/authorize".to_owned(),
            slack_concurrency: 64,
            slack_lease: Duration::from_secs(15),
        }
    }
}

impl ServiceConfig for Config {
    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        common.database_url()?;
        common.master_keys()?;
        if self.slack_listen.is_none() && secret(self.slack_app_token.as_ref()).is_none() {
            return Err(Invalid::new(
                "slack_listen",
                "is not set, and neither is slack_app_token: Slack could not reach this service",
            ));
        }
        if self.slack_listen.is_some() && secret(self.slack_signing_secret.as_ref()).is_none() {
            return Err(Invalid::missing("slack_signing_secret"));
        }
        for (key, url) in [
            ("slack_api_url", Some(&self.slack_api_url)),
            ("slack_authorize_url", Some(&self.slack_authorize_url)),
            ("slack_gateway_url", Some(&self.slack_gateway_url)),
            ("slack_public_url", self.slack_public_url.as_ref()),
        ] {
            let Some(url) = url else { continue };
            if !Url::parse(url).is_ok_and(|url| matches!(url.scheme(), "http" | "https")) {
                return Err(Invalid::new(
                    key,
                    "is not an address that begins with https:// or http://",
                ));
            }
        }
        if self.slack_gateway_ca.is_some() && !self.slack_gateway_url.starts_with("https://") {
            return Err(Invalid::new(
                "slack_gateway_ca",
                "is for a slack_gateway_url that begins with https://",
            ));
        }
        if self.slack_gateway_certificate.is_some() != self.slack_gateway_certificate_key.is_some()
        {
            let words = "is needed with slack_gateway_certificate, and only then: the certificate's private key";
            return Err(Invalid::new("slack_gateway_certificate_key", words));
        }
        if !self.slack_api_url.ends_with('/') {
            return Err(Invalid::new(
                "slack_api_url",
                "must end with a slash, because methods are appended to it",
            ));
        }
        if secret(self.slack_connect_key.as_ref()).is_some_and(|key| key.expose().len() < 16) {
            return Err(Invalid::new(
                "slack_connect_key",
                "must have at least 16 characters, because it is all one needs",
            ));
        }
        if self.slack_task_url.as_ref().is_some_and(|url| !url.contains("{task}")) {
            return Err(Invalid::new("slack_task_url", "must contain `{task}`"));
        }
        if self.slack_concurrency == 0 {
            return Err(Invalid::new("slack_concurrency", "must be at least 1"));
        }
        if self.slack_lease < Duration::from_secs(3) {
            return Err(Invalid::new("slack_lease", "must be at least 3 s"));
        }
        Ok(())
    }
}

/// A secret that is set to something.
pub(crate) fn secret(secret: Option<&Secret>) -> Option<&Secret> {
    secret.filter(|secret| !secret.expose().is_empty())
}
