//! Where a request comes from, as far as that says anything about who sent it.

use std::net::IpAddr;

use tonic::{
    codegen::http::{Extensions, HeaderMap, Uri, header, uri::Authority},
    transport::server::{TcpConnectInfo, UdsConnectInfo},
};

/// The other end of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A program at an address.
    Address(IpAddr),
    /// A process of this machine that runs as this user.
    Process {
        /// Its user id.
        uid: u32,
    },
    /// Nobody says.
    Unknown,
}

impl Peer {
    /// As the connection of the request says.
    pub(crate) fn of(extensions: &Extensions) -> Self {
        if let Some(socket) = extensions.get::<UdsConnectInfo>() {
            return socket.peer_cred.map_or(Self::Unknown, |peer| Self::Process { uid: peer.uid() });
        }
        let address = extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
        address.map_or(Self::Unknown, |address| Self::Address(address.ip().to_canonical()))
    }

    /// Its address, for what is counted per address.
    pub(crate) const fn address(self) -> Option<IpAddr> {
        match self {
            Self::Address(address) => Some(address),
            Self::Process { .. } | Self::Unknown => None,
        }
    }

    /// Whether it is on this machine, at a loopback address.
    pub(crate) fn is_loopback(self) -> bool {
        self.address().is_some_and(|address| address.is_loopback())
    }
}

/// Whether a page of somebody else in a browser of this machine may have made the request: browsers let any page send requests to
/// loopback addresses (and to names that lead there), and say whose page it was.
pub(crate) fn from_a_strange_page(uri: &Uri, headers: &HeaderMap) -> bool {
    let names = |name| headers.get_all(name).iter();
    let strange = |text: Option<&str>| !text.is_some_and(is_local);
    let host = uri.authority().map(Authority::host).is_some_and(|host| !is_local(host));
    host || names(header::HOST).any(|host| strange(host.to_str().ok().and_then(host_of)))
        || names(header::ORIGIN).any(|origin| {
            let origin = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
            strange(origin.as_ref().and_then(Uri::host))
        })
        || names(header::HeaderName::from_static("sec-fetch-site"))
            .any(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"))
}

/// The host of `host:port`.
fn host_of(text: &str) -> Option<&str> {
    // An authority cannot be borrowed from; what it would be is the part before the port.
    text.parse::<Authority>().ok()?;
    let end = text.rfind(':').filter(|&colon| !text[colon..].contains(']')).unwrap_or(text.len());
    Some(&text[..end])
}

fn is_local(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    bare.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_others_and_names_that_lead_here_are_strange() {
        for (uri, headers, strange) in [
            ("/x", vec![], false),
            ("http://127.0.0.1:60080/x", vec![], false),
            ("http://localhost:60080/x", vec![("origin", "http://localhost:3000")], false),
            ("http://[::1]:60080/x", vec![("host", "[::1]:60080")], false),
            ("/x", vec![("host", "127.0.0.1:60080")], false),
            ("http://evil.example:60080/x", vec![], true),
            ("/x", vec![("host", "evil.example:60080")], true),
            ("http://127.0.0.1/x", vec![("origin", "https://evil.example")], true),
            ("http://127.0.0.1/x", vec![("origin", "null")], true),
            ("http://127.0.0.1/x", vec![("sec-fetch-site", "cross-site")], true),
        ] {
            let uri: Uri = uri.parse().expect("an address");
            let pairs = headers
                .iter()
                .map(|(name, value)| (header::HeaderName::from_static(name), header::HeaderValue::from_static(value)));
            assert_eq!(from_a_strange_page(&uri, &pairs.collect()), strange, "{uri} {headers:?}");
        }
    }

    #[test]
    fn loopback_is_known_in_every_spelling() {
        for (address, loopback) in [("127.0.0.1", true), ("::1", true), ("::ffff:127.0.0.1", true), ("10.0.0.1", false)]
        {
            let address: IpAddr = address.parse().expect("an address");
            let info = TcpConnectInfo { local_addr: None, remote_addr: Some((address, 1).into()) };
            let mut extensions = Extensions::new();
            extensions.insert(info);
            assert_eq!(Peer::of(&extensions).is_loopback(), loopback, "{address}");
        }
        assert_eq!(Peer::of(&Extensions::new()), Peer::Unknown);
    }
}
