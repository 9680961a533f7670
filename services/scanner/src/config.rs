//! What can be configured about the scanner.

use std::{path::PathBuf, time::Duration};

use construct_runtime::{
    ServiceConfig,
    config::{self, Common, Invalid},
};
use reqwest::Url;
use serde::{Deserialize, Serialize};

/// The service's own keys.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The folder for the files of scans: a folder of this installation's own, which the
    /// interpreters may use and the gateway knows (`gateway_scans_dir`). What lies in it and
    /// belongs to no scan is deleted.
    pub scanner_dir: Option<PathBuf>,
    /// Where the gateway's API is.
    pub scanner_gateway_url: String,
    /// Scans worked on in this process at the same time; others wait in PostgreSQL. Those whose
    /// task explores are not worked on. At least 1.
    pub scanner_concurrency: usize,
    /// How long a process that died keeps its scans from being gone on with. At least 3 s.
    #[serde(with = "config::duration")]
    pub scanner_lease: Duration,
    /// How long the files of a scan are kept after it. Zero: they are deleted when it ends.
    #[serde(with = "config::duration")]
    pub scanner_keep_snapshots: Duration,
    /// Hosts that are reached although their addresses are private: those of the operator, e.g.
    /// `github.example.corp`, or with another port than 443 `github.example.corp:8443`. Loopback
    /// addresses among them are reached without TLS, and, named without a port, at all ports.
    pub scanner_trusted_hosts: Vec<String>,
    /// GitHub's API for scans without a connection. Not set: github.com's.
    pub scanner_github_url: Option<String>,
    /// The same of GitLab.
    pub scanner_gitlab_url: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            scanner_dir: None,
            scanner_gateway_url: "http://127.0.0.1:60080".to_owned(),
            scanner_concurrency: 2,
            scanner_lease: Duration::from_secs(10),
            scanner_keep_snapshots: Duration::ZERO,
            scanner_trusted_hosts: Vec::new(),
            scanner_github_url: None,
            scanner_gitlab_url: None,
        }
    }
}

impl ServiceConfig for Config {
    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        common.database_url()?;
        common.master_keys()?;
        match &self.scanner_dir {
            None => return Err(Invalid::missing("scanner_dir")),
            Some(path) if !path.is_absolute() => {
                return Err(Invalid::new(
                    "scanner_dir",
                    "must be an absolute path, as the interpreters know it",
                ));
            }
            Some(_) => {}
        }
        for (key, url) in [
            ("scanner_gateway_url", Some(&self.scanner_gateway_url)),
            ("scanner_github_url", self.scanner_github_url.as_ref()),
            ("scanner_gitlab_url", self.scanner_gitlab_url.as_ref()),
        ] {
            let Some(url) = url else { continue };
            if !Url::parse(url).is_ok_and(|url| matches!(url.scheme(), "http" | "https")) {
                return Err(Invalid::new(
                    key,
                    "is not an address that begins with https:// or http://",
                ));
            }
        }
        if Url::parse(&self.scanner_gateway_url).is_ok_and(|url| url.scheme() == "https") {
            let words = "begins with https://, and TLS to the gateway is not built in; go through a proxy beside this service and give its \
                         http:// address";
            return Err(Invalid::new("scanner_gateway_url", words));
        }
        if !(1..=64).contains(&self.scanner_concurrency) {
            return Err(Invalid::new("scanner_concurrency", "must be between 1 and 64"));
        }
        if self.scanner_lease < Duration::from_secs(3) {
            return Err(Invalid::new("scanner_lease", "must be at least 3 s"));
        }
        Ok(())
    }
}
