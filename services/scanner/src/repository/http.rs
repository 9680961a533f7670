//! The way to forges: one HTTP client that goes to https addresses on the public internet, and to
//! hosts the operator has named.
//!
//! Names are resolved inside the client by a resolver that drops what is not public, so that the
//! address that was checked is the one that is connected to. Addresses written into a URL never
//! reach the resolver, and are checked before.

use std::{
    collections::BTreeSet,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use construct_runtime::address::is_public;
use reqwest::{
    Url,
    dns::{Addrs, Name, Resolve, Resolving},
    redirect,
};

use super::SourceError;

/// How long a connection may take to be made.
const CONNECT: Duration = Duration::from_secs(10);
/// How long an answer may stand still.
const IDLE: Duration = Duration::from_secs(60);

/// What forges may be reached. Made once for the service; cheap to clone.
#[derive(Debug, Clone)]
pub struct Reach {
    /// For everybody: connects to public addresses only.
    public: reqwest::Client,
    /// For what the operator has named, and what that leads to.
    private: reqwest::Client,
    trusted: Arc<[Trusted]>,
}

/// A host that the operator has named.
#[derive(Debug)]
struct Trusted {
    host: String,
    /// Of a loopback address that was named without a port, all.
    port: Option<u16>,
}

impl Trusted {
    /// `HOST`, `HOST:PORT` or an address with a scheme. None when it is neither.
    fn parse(named: &str) -> Option<Self> {
        let named = named.trim();
        let bare = |text: &str| Url::parse(&format!("https://{text}")).ok();
        let url = if named.contains("://") { Url::parse(named).ok() } else { None };
        let is_address = url.is_some();
        let url = url.or_else(|| bare(named)).or_else(|| bare(&format!("[{named}]")))?;
        let host = normal(url.host_str()?);
        let has_port = is_address || url.port().is_some() || named.ends_with(":443");
        let port = if has_port || !is_loopback(&host) { url.port_or_known_default() } else { None };
        Some(Self { host, port })
    }

    fn is(&self, url: &Url) -> bool {
        let host = url.host_str().map(normal).unwrap_or_default();
        let is_safe = url.scheme() == "https" || url.scheme() == "http" && is_loopback(&host);
        is_safe
            && host == self.host
            && (self.port.is_none() || self.port == url.port_or_known_default())
    }
}

/// The HTTP client cannot be made: no certificate authorities on this machine.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP client for forges cannot be made")]
pub struct ReachError(#[from] reqwest::Error);

impl Reach {
    /// Public hosts, and those that the operator has named: `github.example.corp` or
    /// `github.example.corp:8443` of a private network, or a loopback address, which alone may be
    /// reached without TLS, and without a port at all of them. Only who asks a host that was named
    /// is led to another one. An organization's own wish for such a host is none of the operator's.
    ///
    /// # Errors
    /// When TLS cannot be set up on this machine.
    pub fn new(trusted: impl IntoIterator<Item = String>) -> Result<Self, ReachError> {
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Another thread may have installed one meanwhile, which serves as well.
            drop(rustls::crypto::ring::default_provider().install_default());
        }
        let trusted: Arc<[Trusted]> =
            trusted.into_iter().filter_map(|named| Trusted::parse(&named)).collect();
        let public = client(PublicOnly { trusted: Arc::default() })?;
        let hosts = trusted.iter().map(|one| one.host.clone()).collect();
        let private = client(PublicOnly { trusted: Arc::new(hosts) })?;
        Ok(Self { public, private, trusted })
    }

    /// Whether the operator has named this one.
    pub(super) fn trusts(&self, url: &Url) -> bool {
        self.trusted.iter().any(|one| one.is(url))
    }

    /// What may ask this address; `led` when it was led there by what the operator has named, or is
    /// that.
    pub(super) fn client(&self, url: &Url, led: bool) -> Result<&reqwest::Client, SourceError> {
        let host = url.host_str().map(normal).unwrap_or_default();
        let refuse =
            |why: &str| Err(SourceError::Forbidden { what: host.clone(), why: why.to_owned() });
        if !url.username().is_empty() || url.password().is_some() {
            return refuse("its address holds a user or password");
        }
        if led && self.trusts(url) {
            return Ok(&self.private);
        }
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        if address.is_some_and(|address| !is_public(address)) {
            return refuse("it is not a public address");
        }
        if url.scheme() != "https" {
            return refuse("it is not reached over https");
        }
        Ok(&self.public)
    }
}

fn client(resolver: PublicOnly) -> Result<reqwest::Client, reqwest::Error> {
    reqwest::Client::builder()
        .dns_resolver(resolver)
        // A proxy would connect on our behalf, to whatever address it resolves.
        .no_proxy()
        .redirect(redirect::Policy::none())
        .referer(false)
        // Archives are packed already, and what an answer unpacks to is not to be a surprise.
        .no_gzip()
        .connect_timeout(CONNECT)
        .read_timeout(IDLE)
        .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")))
        .build()
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
    address.map_or(host == "localhost", |address| address.to_canonical().is_loopback())
}

fn normal(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

/// A name has no address that may be connected to.
#[derive(Debug, thiserror::Error)]
#[error("the name has no public address")]
pub(super) struct NotPublic;

struct PublicOnly {
    trusted: Arc<BTreeSet<String>>,
}

impl Resolve for PublicOnly {
    fn resolve(&self, name: Name) -> Resolving {
        let host = name.as_str().to_owned();
        let trusted = self.trusted.contains(&normal(&host));
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            let permitted: Vec<SocketAddr> = found
                .iter()
                .filter(|address| trusted || is_public(address.ip()))
                .copied()
                .collect();
            if permitted.is_empty() && !found.is_empty() {
                return Err(NotPublic.into());
            }
            Ok(Box::new(permitted.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may(reach: &Reach, url: &str) -> bool {
        reach.client(&url.parse().expect("a URL"), true).is_ok()
    }

    #[test]
    fn only_public_hosts_over_https_and_what_the_operator_has_named_are_reached() {
        let reach =
            Reach::new(["127.0.0.1".to_owned(), "GitHub.corp".to_owned()]).expect("a client");
        for url in [
            "https://api.github.com/",
            "https://github.corp/api/v3",
            "http://127.0.0.1:1/",
            "https://1.1.1.1/",
        ] {
            assert!(may(&reach, url), "{url}");
        }
        for url in [
            "http://api.github.com/",
            "http://github.corp/",
            "https://10.0.0.1/",
            "https://[::1]/",
            "https://[::ffff:169.254.169.254]/",
            "http://localhost/",
            "ftp://1.1.1.1/",
            "https://user@api.github.com/",
            "https://167772161/",
        ] {
            assert!(!may(&reach, url), "{url}");
        }
    }

    #[test]
    fn a_host_that_was_named_is_no_way_to_its_other_ports_nor_for_others() {
        let named = ["10.0.0.1", "10.0.0.2:8443", "https://10.0.0.3", "127.0.0.1:81", "::1"]
            .map(str::to_owned);
        let reach = Reach::new(named).expect("a client");
        for url in [
            "https://10.0.0.1/",
            "https://10.0.0.2:8443/",
            "https://10.0.0.3/",
            "http://127.0.0.1:81/",
            "http://[::1]:9/",
        ] {
            assert!(may(&reach, url), "{url}");
            // Whoever asks another host is not led there.
            assert!(reach.client(&url.parse().expect("a URL"), false).is_err(), "{url}");
        }
        for url in [
            "https://10.0.0.1:22/",
            "https://10.0.0.2/",
            "http://10.0.0.3/",
            "http://127.0.0.1:82/",
        ] {
            assert!(!may(&reach, url), "{url}");
        }
    }

    #[tokio::test]
    async fn a_name_that_means_this_machine_is_not_connected_to() {
        let reach = Reach::new([]).expect("a client");
        let failed = reach.public.get("https://localhost:1/").send().await.expect_err("refused");
        let mut cause = std::error::Error::source(&failed);
        while let Some(inner) = cause {
            if inner.is::<NotPublic>() {
                return;
            }
            cause = inner.source();
        }
        panic!("refused for another reason: {failed:?}");
    }
}
