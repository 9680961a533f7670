//! The way out to the network: one HTTP client that connects to public addresses only.
//!
//! Names are resolved by a resolver of our own inside the client, so that the address that was
//! checked is the address that is connected to; a name that resolves differently the second time
//! gains nothing. Addresses written into a URL never reach the resolver and are checked before the
//! request.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};

use construct_runtime::address::is_public;

/// How long a connection may take to be made.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);

/// How long an unused connection is kept.
const IDLE: Duration = Duration::from_secs(30);

/// The HTTP client behind `fetch`. Made once per service; cloning shares its connections.
#[derive(Clone, Debug)]
pub struct Egress {
    pub(super) client: reqwest::Client,
    exceptions: Exceptions,
}

/// The HTTP client cannot be made: no TLS provider or no root certificates.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client of the tools cannot be made")]
pub struct EgressError(#[from] reqwest::Error);

/// Addresses that are reachable although they are not public.
type Exceptions = Arc<[IpAddr]>;

/// Finds the addresses of a name.
pub(crate) type Lookup =
    Arc<dyn Fn(String) -> BoxFuture<'static, io::Result<Vec<IpAddr>>> + Send + Sync>;

impl Egress {
    /// Makes the client. It reaches public addresses and `exceptions`: addresses of a private
    /// network that the operator wants tools to reach (the host still has to be granted). Tests
    /// except loopback addresses.
    ///
    /// # Errors
    /// When TLS cannot be set up on this host.
    pub fn new(exceptions: &[IpAddr]) -> Result<Self, EgressError> {
        Self::resolving(exceptions, Arc::new(|host| Box::pin(ask_the_system(host))))
    }

    /// The same, with names resolved in another way than the system's.
    pub(crate) fn resolving(exceptions: &[IpAddr], lookup: Lookup) -> Result<Self, EgressError> {
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Another thread may have installed one meanwhile, which serves as well.
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
            .pool_idle_timeout(IDLE)
            .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")))
            .build()?;
        Ok(Self { client, exceptions })
    }

    /// Whether the operator wants this address reached although it is not public.
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

/// A name has no address that may be connected to.
#[derive(Debug, thiserror::Error)]
#[error("{host} has no public address, only {addresses:?}")]
pub(super) struct Forbidden {
    /// The name.
    pub(super) host: String,
    /// What it resolves to.
    pub(super) addresses: Vec<IpAddr>,
}

async fn ask_the_system(host: String) -> io::Result<Vec<IpAddr>> {
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

/// A host, or hosts, that `fetch` may reach: `api.example.com`, `*.example.com` (every name below,
/// not `example.com` itself), an IP address, or `*` for every public host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPattern(Pattern);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern {
    Every,
    Exact(String),
    /// With the leading dot.
    Below(String),
}

/// A text that is no host pattern.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0:?} is not a host to grant; write \"example.com\", \"*.example.com\" or \"*\", without scheme, port and path"
)]
pub struct HostPatternError(String);

impl FromStr for HostPattern {
    type Err = HostPatternError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "*" {
            return Ok(Self(Pattern::Every));
        }
        let (below, host) = text.strip_prefix("*.").map_or((false, text), |host| (true, host));
        // The parser of URLs knows how a host is spelled: lower case, punycode, brackets around
        // IPv6.
        let bracketed = host
            .parse::<std::net::Ipv6Addr>()
            .map_or_else(|_| host.to_owned(), |v6| format!("[{v6}]"));
        let url = reqwest::Url::parse(&format!("https://{bracketed}/"))
            .map_err(|_| HostPatternError(text.to_owned()))?;
        let plain = !bracketed.contains(['/', '?', '#', '@', '*', '\\'])
            && url.port().is_none()
            && !host.ends_with(":443");
        match url.host_str().map(normal) {
            Some(host) if plain && !host.is_empty() => Ok(Self(if below {
                Pattern::Below(format!(".{host}"))
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
            Pattern::Every => f.write_str("*"),
            Pattern::Exact(host) => f.write_str(host),
            Pattern::Below(suffix) => write!(f, "*{suffix}"),
        }
    }
}

impl HostPattern {
    /// Whether the host of a URL, as the URL parser spells it, is meant.
    #[must_use]
    pub fn matches(&self, host: &str) -> bool {
        let host = normal(host);
        match &self.0 {
            Pattern::Every => true,
            Pattern::Exact(exact) => host == *exact,
            Pattern::Below(suffix) => host.len() > suffix.len() && host.ends_with(suffix.as_str()),
        }
    }
}

fn normal(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matches(pattern: &str, host: &str) -> bool {
        pattern.parse::<HostPattern>().expect("a valid pattern").matches(host)
    }

    #[test]
    fn a_host_is_granted_exactly_or_by_its_domain() {
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
    fn what_is_no_host_is_no_pattern() {
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
