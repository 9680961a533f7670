//! The service's own configuration keys.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use construct_runtime::{
    ServiceConfig,
    config::{self, Common, Invalid},
};

use crate::{http::Timeouts, retry::Policy};

/// Configuration of the providers service. The shared keys are in [`Common`].
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
#[serde(default)]
pub struct Config {
    /// Model calls at work in this process at most. Further commands wait in the queue, where
    /// another replica may take them. At least 1.
    pub providers_concurrency: usize,
    /// Bytes of attached files that calls at work in this process show at most. A call that would
    /// show more waits for others; one shows up to 20 MiB. CountResult as they are stored; while a
    /// request is built, each is in memory several times, encoded. At least 1 MiB.
    pub providers_attached_bytes: u64,
    /// Until a connection to a vendor stands: name resolution, TCP and TLS.
    #[serde(with = "config::duration")]
    pub providers_connect_timeout: Duration,
    /// Until a vendor answers a request, and from there until the first byte of the answer.
    #[serde(with = "config::duration")]
    pub providers_first_byte_timeout: Duration,
    /// Longest silence within an answer; a vendor's pings count as sound.
    #[serde(with = "config::duration")]
    pub providers_idle_timeout: Duration,
    /// Longest time of a whole call, its tries, pauses and fallbacks included. A step's deadline
    /// may end it earlier.
    #[serde(with = "config::duration")]
    pub providers_call_timeout: Duration,
    /// Tries of one call, the first included. At least 1.
    pub providers_tries: u32,
    /// Upper bound of the first pause between tries; doubles with each.
    #[serde(with = "config::duration")]
    pub providers_retry_first: Duration,
    /// Upper bound of all pauses between tries. A vendor may ask for up to twice as long; when it
    /// asks for more, the call fails and says when another is welcome.
    #[serde(with = "config::duration")]
    pub providers_retry_last: Duration,
    /// Where scripts and programs reach models over HTTP (docs/proxy.md). Not set: nowhere. Needs a
    /// key for tokens.
    pub providers_proxy_listen: Option<SocketAddr>,
    /// Calls of the proxy under way in this process at most; further ones are refused, and their
    /// client tries again. Their bodies have at most 256 KiB for each of them, all together, and 32
    /// MiB at least.
    pub providers_proxy_concurrency: usize,
    /// A folder into which each call of a vendor is recorded, with its answer and without keys
    /// (docs/scripted.md). Not set: nothing is recorded.
    pub providers_record_dir: Option<PathBuf>,
    /// A folder with embedding models, for providers of the type `local` (docs/providers.md). Not
    /// set: they have none.
    pub providers_models_dir: Option<PathBuf>,
    /// How long one call of the proxy may take, tries and pauses included.
    #[serde(with = "config::duration")]
    pub providers_proxy_timeout: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            providers_concurrency: 256,
            providers_attached_bytes: 128 << 20,
            providers_connect_timeout: Duration::from_secs(10),
            providers_first_byte_timeout: Duration::from_secs(60),
            providers_idle_timeout: Duration::from_secs(60),
            providers_call_timeout: Duration::from_secs(15 * 60),
            providers_tries: 3,
            providers_retry_first: Duration::from_secs(1),
            providers_retry_last: Duration::from_secs(10),
            providers_proxy_listen: None,
            providers_record_dir: None,
            providers_models_dir: None,
            providers_proxy_concurrency: 1024,
            providers_proxy_timeout: Duration::from_secs(15 * 60),
        }
    }
}

impl ServiceConfig for Config {
    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        common.master_keys()?;
        if self.providers_concurrency == 0 {
            return Err(Invalid::new("providers_concurrency", "must be at least 1"));
        }
        if self.providers_attached_bytes < 1 << 20 {
            return Err(Invalid::new(
                "providers_attached_bytes",
                "must be at least 1 MiB, which is 1048576",
            ));
        }
        if self.providers_tries == 0 {
            return Err(Invalid::new("providers_tries", "must be at least 1"));
        }
        if common.token_keys()?.is_none() && self.providers_proxy_listen.is_some() {
            return Err(Invalid::new(
                "providers_proxy_listen",
                "needs a key that tokens are verified with: set CONSTRUCT_TOKEN_KEY or CONSTRUCT_TOKEN_KEY_FILE",
            ));
        }
        if self.providers_proxy_concurrency == 0 {
            return Err(Invalid::new("providers_proxy_concurrency", "must be at least 1"));
        }
        for (key, duration) in [
            ("providers_proxy_timeout", self.providers_proxy_timeout),
            ("providers_connect_timeout", self.providers_connect_timeout),
            ("providers_first_byte_timeout", self.providers_first_byte_timeout),
            ("providers_idle_timeout", self.providers_idle_timeout),
            ("providers_call_timeout", self.providers_call_timeout),
        ] {
            if duration.is_zero() {
                return Err(Invalid::new(key, "must be longer than nothing"));
            }
        }
        Ok(())
    }
}

impl Config {
    pub(crate) fn timeouts(&self) -> Timeouts {
        Timeouts {
            connect: self.providers_connect_timeout,
            first_byte: self.providers_first_byte_timeout,
            idle: self.providers_idle_timeout,
        }
    }

    pub(crate) fn retries(&self) -> Policy {
        Policy {
            tries: self.providers_tries,
            initial_delay: self.providers_retry_first,
            max_delay: self.providers_retry_last,
        }
    }
}
