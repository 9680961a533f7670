//! The configuration of the scanner.

use std::{path::PathBuf, time::Duration};

use construct_runtime::{
    ServiceConfig,
    config::{self, Common, Invalid},
};
use reqwest::Url;
use serde::{Deserialize, Serialize};

/// The configuration keys of the service.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The folder for the files of scans. Only this installation uses it. The interpreters can read
    /// it, and the gateway knows it (`gateway_scans_dir`). Content that belongs to no scan is
    /// deleted.
    pub scanner_dir: Option<PathBuf>,
    /// The address of the gateway's API.
    pub scanner_gateway_url: String,
    /// Scans that this process handles at a time; others wait in PostgreSQL. Scans whose task
    /// explores do not count. At least 1.
    pub scanner_concurrency: usize,
    /// The lease on a scan. After a crash, other processes take the scan over when it ends. At
    /// least 3 s.
    #[serde(with = "config::duration")]
    pub scanner_lease: Duration,
    /// How long the files of a scan are kept after it. Zero: they are deleted when it ends.
    #[serde(with = "config::duration")]
    pub scanner_keep_snapshots: Duration,
    /// Hosts of the operator that may have private addresses, e.g. `github.example.corp`, or with
    /// another port than 443 `github.example.corp:8443`. Loopback addresses among them are reached
    /// without TLS and, if named without a port, at all ports.
    pub scanner_trusted_hosts: Vec<String>,
    /// The address of GitHub's API for scans without a connection. Unset: github.com's.
    pub scanner_github_url: Option<String>,
    /// The address of GitLab for scans without a connection. Unset: gitlab.com.
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
                    "must be an absolute path, the same as for the interpreters",
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
            let reason = "begins with https://, but the scanner does not support TLS to the gateway; use a proxy beside this service and give its \
                         http:// address";
            return Err(Invalid::new("scanner_gateway_url", reason));
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
