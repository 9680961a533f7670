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
    /// Model calls in flight in this process at most. Further commands wait in the stream, where
    /// another replica may take them. At least 1.
    pub providers_concurrency: usize,
    /// Bytes of attached files that the calls in flight in this process show at most. A call that
    /// would exceed it waits for others; one call shows up to 20 MiB. Sizes are those of the stored
    /// files; a request under construction holds each file several times, encoded. At least 1 MiB.
    pub providers_attached_bytes: u64,
    /// Timeout of connecting to a vendor: name resolution, TCP and TLS.
    #[serde(with = "config::duration")]
    pub providers_connect_timeout: Duration,
    /// Timeout from the request to the response head, and from there to the first byte of the
    /// answer.
    #[serde(with = "config::duration")]
    pub providers_first_byte_timeout: Duration,
    /// Longest silence within an answer. A vendor's pings end a silence.
    #[serde(with = "config::duration")]
    pub providers_idle_timeout: Duration,
    /// Timeout of one call, with its attempts, delays and fallbacks. The deadline of a step may end
    /// it earlier.
    #[serde(with = "config::duration")]
    pub providers_call_timeout: Duration,
    /// Attempts of one call, the first included. At least 1.
    pub providers_tries: u32,
    /// Upper bound of the first delay between attempts. It doubles with each attempt.
    #[serde(with = "config::duration")]
    pub providers_retry_first: Duration,
    /// Upper bound of all delays between attempts. A vendor may ask for up to twice as long. When
    /// it asks for more, the call fails with the time of the next attempt.
    #[serde(with = "config::duration")]
    pub providers_retry_last: Duration,
    /// Listen address of the proxy, over which scripts and programs reach models (docs/proxy.md).
    /// Unset: no proxy. Needs a token key.
    pub providers_proxy_listen: Option<SocketAddr>,
    /// Calls of the proxy in flight in this process at most. Further ones are rejected, and their
    /// client retries. Their bodies share 256 KiB per allowed call, and at least 32 MiB.
    pub providers_proxy_concurrency: usize,
    /// A folder that receives a recording of each vendor call, with its answer and without keys
    /// (docs/scripted.md). Unset: nothing is recorded.
    pub providers_record_dir: Option<PathBuf>,
    /// A folder with embedding models, for providers of the type `local` (docs/providers.md).
    /// Unset: there are none.
    pub providers_models_dir: Option<PathBuf>,
    /// Timeout of one call of the proxy, with its attempts and delays.
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
            attempts: self.providers_tries,
            initial_delay: self.providers_retry_first,
            max_delay: self.providers_retry_last,
        }
    }
}
