//! HTTP clients for forges. They contact https addresses on the public internet, and hosts that the
//! operator trusts.
//!
//! A resolver inside the client drops addresses that are not public, so the checked address is the
//! one that is connected to. Literal addresses in a URL never reach the resolver, and are checked
//! before.

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

/// The timeout for connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The timeout between two reads of a response.
const READ_TIMEOUT: Duration = Duration::from_secs(60);

/// The clients for forges, and the hosts that the operator trusts. Created once for the service;
/// cheap to clone.
#[derive(Debug, Clone)]
pub struct ForgeClients {
    /// For all hosts: connects to public addresses only.
    public: reqwest::Client,
    /// For trusted hosts, and what they redirect to.
    private: reqwest::Client,
    trusted: Arc<[TrustedHost]>,
}

/// A host that the operator trusts.
#[derive(Debug)]
struct TrustedHost {
    host: String,
    /// None for a loopback address without a port: all its ports.
    port: Option<u16>,
}

impl TrustedHost {
    /// Parses `HOST`, `HOST:PORT` or an address with a scheme. None when it is malformed.
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let bare = |text: &str| Url::parse(&format!("https://{text}")).ok();
        let url = if text.contains("://") { Url::parse(text).ok() } else { None };
        let is_address = url.is_some();
        let url = url.or_else(|| bare(text)).or_else(|| bare(&format!("[{text}]")))?;
        let host = normalize_host(url.host_str()?);
        let has_port = is_address || url.port().is_some() || text.ends_with(":443");
        let port = if has_port || !is_loopback(&host) { url.port_or_known_default() } else { None };
        Some(Self { host, port })
    }

    fn matches(&self, url: &Url) -> bool {
        let host = url.host_str().map(normalize_host).unwrap_or_default();
        let is_safe = url.scheme() == "https" || url.scheme() == "http" && is_loopback(&host);
        is_safe
            && host == self.host
            && (self.port.is_none() || self.port == url.port_or_known_default())
    }
}

/// The HTTP client cannot be created: this machine has no certificate authorities.
#[derive(Debug, thiserror::Error)]
#[error("cannot create the HTTP client for forges")]
pub struct ForgeClientsError(#[from] reqwest::Error);

impl ForgeClients {
    /// Creates clients for public hosts and the operator's trusted ones.
    ///
    /// A trusted host is `github.example.corp` or `github.example.corp:8443` of a private network,
    /// or a loopback address. Only loopback addresses are contacted without TLS, and without a port
    /// at all of their ports. Only a request to a trusted host may be redirected to another one. An
    /// organization cannot add trusted hosts.
    ///
    /// # Errors
    /// When TLS cannot be set up on this machine.
    pub fn new(trusted: impl IntoIterator<Item = String>) -> Result<Self, ForgeClientsError> {
        if rustls::crypto::CryptoProvider::get_default().is_none() {
            // Another thread may have installed one meanwhile, which works as well.
            drop(rustls::crypto::ring::default_provider().install_default());
        }
        let trusted: Arc<[TrustedHost]> =
            trusted.into_iter().filter_map(|host| TrustedHost::parse(&host)).collect();
        let public = build_client(PublicResolver { trusted: Arc::default() })?;
        let hosts = trusted.iter().map(|one| one.host.clone()).collect();
        let private = build_client(PublicResolver { trusted: Arc::new(hosts) })?;
        Ok(Self { public, private, trusted })
    }

    /// Whether the operator trusts this address.
    pub(super) fn trusts(&self, url: &Url) -> bool {
        self.trusted.iter().any(|one| one.matches(url))
    }

    /// Returns the client for an address. `is_trusted_chain` says whether the request started at a
    /// trusted host.
    pub(super) fn client(
        &self,
        url: &Url,
        is_trusted_chain: bool,
    ) -> Result<&reqwest::Client, SourceError> {
        let host = url.host_str().map(normalize_host).unwrap_or_default();
        let refuse = |reason: &str| {
            Err(SourceError::Forbidden { subject: host.clone(), reason: reason.to_owned() })
        };
        if !url.username().is_empty() || url.password().is_some() {
            return refuse("its address contains a user or password");
        }
        if is_trusted_chain && self.trusts(url) {
            return Ok(&self.private);
        }
        let address = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        if address.is_some_and(|address| !is_public(address)) {
            return refuse("it is not a public address");
        }
        if url.scheme() != "https" {
            return refuse("it does not use https");
        }
        Ok(&self.public)
    }
}

fn build_client(resolver: PublicResolver) -> Result<reqwest::Client, reqwest::Error> {
    reqwest::Client::builder()
        .dns_resolver(resolver)
        // A proxy would connect on our behalf, to any address that it resolves.
        .no_proxy()
        .redirect(redirect::Policy::none())
        .referer(false)
        // Archives are packed already, and a response must not grow when unpacked.
        .no_gzip()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(READ_TIMEOUT)
        .user_agent(concat!("construct/", env!("CARGO_PKG_VERSION")))
        .build()
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
    address.map_or(host == "localhost", |address| address.to_canonical().is_loopback())
}

fn normalize_host(host: &str) -> String {
    host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase()
}

/// A name has no address that may be contacted.
#[derive(Debug, thiserror::Error)]
#[error("the name has no public address")]
pub(super) struct NotPublicError;

struct PublicResolver {
    trusted: Arc<BTreeSet<String>>,
}

impl Resolve for PublicResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let host = name.as_str().to_owned();
        let trusted = self.trusted.contains(&normalize_host(&host));
        Box::pin(async move {
            let found: Vec<SocketAddr> = tokio::net::lookup_host((host, 0)).await?.collect();
            let permitted: Vec<SocketAddr> = found
                .iter()
                .filter(|address| trusted || is_public(address.ip()))
                .copied()
                .collect();
            if permitted.is_empty() && !found.is_empty() {
                return Err(NotPublicError.into());
            }
            Ok(Box::new(permitted.into_iter()) as Addrs)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_allowed(reach: &ForgeClients, url: &str) -> bool {
        reach.client(&url.parse().expect("a URL"), true).is_ok()
    }

    #[test]
    fn only_public_https_and_trusted_hosts_are_contacted() {
        let reach = ForgeClients::new(["127.0.0.1".to_owned(), "GitHub.corp".to_owned()])
            .expect("a client");
        for url in [
            "https://api.github.com/",
            "https://github.corp/api/v3",
            "http://127.0.0.1:1/",
            "https://1.1.1.1/",
        ] {
            assert!(is_allowed(&reach, url), "{url}");
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
            assert!(!is_allowed(&reach, url), "{url}");
        }
    }

    #[test]
    fn trusted_host_opens_no_other_port_and_no_redirect() {
        let hosts = ["10.0.0.1", "10.0.0.2:8443", "https://10.0.0.3", "127.0.0.1:81", "::1"]
            .map(str::to_owned);
        let reach = ForgeClients::new(hosts).expect("a client");
        for url in [
            "https://10.0.0.1/",
            "https://10.0.0.2:8443/",
            "https://10.0.0.3/",
            "http://127.0.0.1:81/",
            "http://[::1]:9/",
        ] {
            assert!(is_allowed(&reach, url), "{url}");
            // Requests to other hosts are not redirected there.
            assert!(reach.client(&url.parse().expect("a URL"), false).is_err(), "{url}");
        }
        for url in [
            "https://10.0.0.1:22/",
            "https://10.0.0.2/",
            "http://10.0.0.3/",
            "http://127.0.0.1:82/",
        ] {
            assert!(!is_allowed(&reach, url), "{url}");
        }
    }

    #[tokio::test]
    async fn name_of_this_machine_is_not_contacted() {
        let reach = ForgeClients::new([]).expect("a client");
        let failed = reach.public.get("https://localhost:1/").send().await.expect_err("refused");
        let mut cause = std::error::Error::source(&failed);
        while let Some(inner) = cause {
            if inner.is::<NotPublicError>() {
                return;
            }
            cause = inner.source();
        }
        panic!("refused for another reason: {failed:?}");
    }
}
