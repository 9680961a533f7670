//! Network egress: one HTTP client that connects to public addresses only.
//!
//! The client resolves names with its own resolver, so that it connects to exactly the address that
//! was checked; DNS rebinding has no effect. IP addresses in a URL bypass the resolver and are
//! checked before the request.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use construct_runtime::address::is_public;

/// Time limit for establishing a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// How long an unused connection stays open.
const IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The HTTP client behind `fetch`. Created once per service; clones share its connections.
#[derive(Clone, Debug)]
pub struct Egress {
    pub(super) client: reqwest::Client,
    exceptions: Exceptions,
}

/// The HTTP client cannot be created: no TLS provider or no root certificates.
#[derive(Debug, thiserror::Error)]
#[error("failed to create the HTTP client of the tools")]
pub struct EgressError(#[from] reqwest::Error);

/// Addresses that may be reached although they are not public.
type Exceptions = Arc<[IpAddr]>;

/// Resolves a name to its addresses.
pub(crate) type Lookup =
    Arc<dyn Fn(String) -> BoxFuture<'static, io::Result<Vec<IpAddr>>> + Send + Sync>;

impl Egress {
    /// Creates the client. It reaches public addresses and `exceptions`: private addresses that the
    /// operator allows (the host still has to be granted). Tests allow loopback addresses.
    ///
    /// # Errors
    /// When TLS cannot be set up on this host.
    pub fn new(exceptions: &[IpAddr]) -> Result<Self, EgressError> {
        Self::with_lookup(exceptions, Arc::new(|host| Box::pin(lookup_system(host))))
    }

    /// Creates the client with another name resolution than the system's.
    pub(crate) fn with_lookup(exceptions: &[IpAddr], lookup: Lookup) -> Result<Self, EgressError> {
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Another thread may have installed one concurrently, which is as good.
            drop(rustls::crypto::ring::default_provider().install_default());
        }
        let exceptions: Exceptions = exceptions.into();
        let client = reqwest::Client::builder()
            .dns_resolver(PublicOnly { exceptions: Arc::clone(&exceptions), lookup })
            // A proxy would connect on our behalf, to whatever address it resolves.
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .referer(false)
            .connect_timeout(CONNECT_TIMEOUT)
            .pool_idle_timeout(IDLE_TIMEOUT)
            .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { client, exceptions })
    }

    /// Whether the operator allows this address although it is not public.
    pub(super) fn is_excepted(&self, address: IpAddr) -> bool {
        self.exceptions.contains(&address)
    }

    /// Whether this address may be connected to.
    pub(super) fn permits(&self, address: IpAddr) -> bool {
        permits(&self.exceptions, address)
    }
}

fn permits(exceptions: &Exceptions, address: IpAddr) -> bool {
    is_public(address) || exceptions.contains(&address)
}

/// A name has no address that the client may connect to.
#[derive(Debug, thiserror::Error)]
#[error("{host} has no public address, only {addresses:?}")]
pub(super) struct Forbidden {
    /// The name.
    pub(super) host: String,
    /// What it resolves to.
    pub(super) addresses: Vec<IpAddr>,
}

async fn lookup_system(host: String) -> io::Result<Vec<IpAddr>> {
    Ok(tokio::net::lookup_host((host, 0)).await?.map(|found| found.ip()).collect())
}

struct PublicOnly {
    exceptions: Exceptions,
    lookup: Lookup,
}

impl Resolve for PublicOnly {
    fn resolve(&self, name: Name) -> Resolving {
        let exceptions = Arc::clone(&self.exceptions);
        let host = name.as_str().to_owned();
        let looked_up = (self.lookup)(host.clone());
        Box::pin(async move {
            let addresses = looked_up.await?;
            let permitted: Vec<SocketAddr> = addresses
                .iter()
                .filter(|address| permits(&exceptions, **address))
                .map(|address| SocketAddr::new(*address, 0))
                .collect();
            if permitted.is_empty() && !addresses.is_empty() {
                return Err(Forbidden { host, addresses }.into());
            }
            Ok(Box::new(permitted.into_iter()) as Addrs)
        })
    }
}

/// A pattern of hosts that `fetch` may reach: `api.example.com`, `*.example.com` (every subdomain,
/// not `example.com` itself), an IP address, or `*` for every public host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPattern(Pattern);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Any,
    Exact(String),
    /// The suffix, with its leading dot.
    Subdomains(String),
}

/// A string is not a host pattern.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is not a host pattern; write \"example.com\", \"*.example.com\" or \"*\", without scheme, port and path"
)]
pub struct HostPatternError(String);

impl FromStr for HostPattern {
    type Err = HostPatternError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "*" {
            return Ok(Self(Pattern::Any));
        }
        let (below, host) = text.strip_prefix("*.").map_or((false, text), |host| (true, host));
        // The URL parser normalizes hosts: lower case, punycode, brackets around IPv6.
        let bracketed = host
            .parse::<std::net::Ipv6Addr>()
            .map_or_else(|_| host.to_owned(), |v6| format!("[{v6}]"));
        let url = reqwest::Url::parse(&format!("https://{bracketed}/"))
            .map_err(|_| HostPatternError(text.to_owned()))?;
        let plain = !bracketed.contains(['/', '?', '#', '@', '*', '\\'])
            && url.port().is_none()
            && !host.ends_with(":443");
        match url.host_str().map(normalize_host) {
            Some(host) if plain && !host.is_empty() => Ok(Self(if below {
                Pattern::Subdomains(format!(".{host}"))
            } else {
                Pattern::Exact(host)
            })),
            _ => Err(HostPatternError(text.to_owned())),
        }
    }
}

impl fmt::Display for HostPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Pattern::Any => f.write_str("*"),
            Pattern::Exact(host) => f.write_str(host),
            Pattern::Subdomains(suffix) => write!(f, "*{suffix}"),
        }
    }
}

impl HostPattern {
    /// Whether it matches the host of a URL, as the URL parser normalizes it.
    #[must_use]
    pub fn matches(&self, host: &str) -> bool {
        let host = normalize_host(host);
        match &self.0 {
            Pattern::Any => true,
            Pattern::Exact(exact) => host == *exact,
            Pattern::Subdomains(suffix) => {
                host.len() > suffix.len() && host.ends_with(suffix.as_str())
            }
        }
    }
}

fn normalize_host(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, host: &str) -> bool {
        pattern.parse::<HostPattern>().expect("a valid pattern").matches(host)
    }

    #[test]
    fn host_pattern_matches_exact_hosts_and_subdomains() {
        assert!(matches("Example.com", "example.com"));
        assert!(matches("example.com", "example.com."));
        assert!(!matches("example.com", "www.example.com"));
        assert!(matches("*.example.com", "a.b.example.com"));
        assert!(!matches("*.example.com", "example.com"));
        assert!(!matches("*.example.com", "evilexample.com"));
        assert!(!matches("example.com", "example.com.evil.org"));
        assert!(matches("*", "anything.org"));
        assert!(matches("::1", "[::1]"));
    }

    #[test]
    fn invalid_host_pattern_is_rejected() {
        for text in [
            "",
            "https://a.com",
            "a.com/path",
            "a.com:8080",
            "a.com:443",
            "user@a.com",
            "a b",
            "*.*.com",
            "a*",
        ] {
            assert!(text.parse::<HostPattern>().is_err(), "{text:?}");
        }
    }
}
