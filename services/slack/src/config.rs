//! The configuration of the Slack service.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use construct_runtime::{
    ServiceConfig,
    config::{self, Common, Invalid, Secret},
};
use reqwest::Url;
use serde::{Deserialize, Serialize};

/// The placeholder for the task's id in `slack_task_url`.
pub(crate) const TASK_PLACEHOLDER: &str = "{task}";

/// The configuration keys of the service.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The address that serves Slack's requests. Unset: none; then Socket Mode is required.
    pub slack_listen: Option<SocketAddr>,
    /// The public address of `slack_listen`, e.g. `https://construct.example.com`. Required to
    /// install the app over OAuth.
    pub slack_public_url: Option<String>,
    /// The secret that Slack signs its requests with ("Signing Secret" of the app). Required with
    /// `slack_listen`.
    pub slack_signing_secret: Option<Secret>,
    /// The app-level token (`xapp-…`) of Socket Mode. Unset: no Socket Mode.
    pub slack_app_token: Option<Secret>,
    /// The bot token (`xoxb-…`) of one workspace, for an installation without OAuth. Slack shows it
    /// to the person who installed the app from its settings. Such a token is not renewed, so the
    /// app must not use token rotation.
    pub slack_bot_token: Option<Secret>,
    /// The app's OAuth id ("Client ID").
    pub slack_client_id: Option<String>,
    /// The app's OAuth secret ("Client Secret").
    pub slack_client_secret: Option<Secret>,
    /// The secret that starts an installation for the organization of `slack_gateway_key` at
    /// `/slack/connect?key=…`; at least 16 characters. Unset: no such installation. Members of an
    /// organization start theirs at `/slack/connect` with their own set-up code.
    pub slack_connect_key: Option<Secret>,
    /// The agent that answers in a connected workspace.
    pub slack_agent: String,
    /// Whether only users who linked their Construct account (`/construct link`) are answered,
    /// besides the workspace's permissions.
    pub slack_members_only: bool,
    /// The address of the gateway's API: `http://` or `https://`.
    pub slack_gateway_url: String,
    /// A PEM file with the certificate authorities of the gateway. Unset: the system's.
    pub slack_gateway_ca: Option<PathBuf>,
    /// A PEM file with the client certificate for a gateway that requires one, with
    /// `slack_gateway_certificate_key`.
    pub slack_gateway_certificate: Option<PathBuf>,
    /// A PEM file with the private key of that certificate.
    pub slack_gateway_certificate_key: Option<PathBuf>,
    /// The API key of this service, for workspaces that were connected without a key of their own.
    pub slack_gateway_key: Option<Secret>,
    /// The address at which people view tasks, with `{task}` in place of the id. Links of this form
    /// are unfurled. Unset: none.
    pub slack_task_url: Option<String>,
    /// The base address of Slack's Web API.
    pub slack_api_url: String,
    /// The address at which people authorize an installation.
    pub slack_authorize_url: String,
    /// Mentions that this process handles at a time; others wait in PostgreSQL. At least 1.
    pub slack_concurrency: usize,
    /// The lease on a mention. After a crash, other processes take the mention over when it ends.
    /// At least 3 s; a live process renews it three times in that period.
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
                "is not set, and neither is slack_app_token: Slack cannot reach this service",
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
            let reason = "is needed with slack_gateway_certificate, and only then: the certificate's private key";
            return Err(Invalid::new("slack_gateway_certificate_key", reason));
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
                "must have at least 16 characters, because it is the only credential",
            ));
        }
        if self.slack_task_url.as_ref().is_some_and(|url| !url.contains(TASK_PLACEHOLDER)) {
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

impl Config {
    /// The address at which people view a task, if one is configured.
    pub(crate) fn task_url(&self, task: &str) -> Option<String> {
        self.slack_task_url.as_ref().map(|url| url.replace(TASK_PLACEHOLDER, task))
    }
}

/// A secret that is set and not empty.
pub(crate) fn secret(secret: Option<&Secret>) -> Option<&Secret> {
    secret.filter(|secret| !secret.expose().is_empty())
}
