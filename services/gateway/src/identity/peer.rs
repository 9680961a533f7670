//! The origin of a request, as far as it says something about its sender.

use std::{fmt, net::IpAddr};

use tonic::{
    codegen::http::Extensions,
    transport::server::{TcpConnectInfo, UdsConnectInfo},
};

/// The peer of the connection, or the client that a proxy forwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A program at an address.
    Address(IpAddr),
    /// A client of a trusted proxy, by the address that the proxy reports. Never a local client,
    /// whatever the address: those connect directly.
    Forwarded(IpAddr),
    /// A process of this machine.
    Process {
        /// The id of its user.
        uid: u32,
    },
    /// No information.
    Unknown,
}

/// The client that a trusted proxy forwards. A request extension that only the gateway sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForwardedClient(pub(crate) IpAddr);

impl Peer {
    /// The peer of the request's connection, or the client that a proxy forwards.
    pub(crate) fn from_extensions(extensions: &Extensions) -> Self {
        if let Some(ForwardedClient(address)) = extensions.get() {
            return Self::Forwarded(*address);
        }
        if let Some(socket) = extensions.get::<UdsConnectInfo>() {
            return socket
                .peer_cred
                .map_or(Self::Unknown, |peer| Self::Process { uid: peer.uid() });
        }
        let address = extensions.get::<TcpConnectInfo>().and_then(TcpConnectInfo::remote_addr);
        address.map_or(Self::Unknown, |address| Self::Address(address.ip().to_canonical()))
    }

    /// Its address, for limits per address.
    pub(crate) const fn address(self) -> Option<IpAddr> {
        match self {
            Self::Address(address) | Self::Forwarded(address) => Some(address),
            Self::Process { .. } | Self::Unknown => None,
        }
    }

    /// Whether it connects over a loopback address.
    pub(crate) const fn is_loopback(self) -> bool {
        matches!(self, Self::Address(address) if address.is_loopback())
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) | Self::Forwarded(address) => address.fmt(f),
            Self::Process { uid } => write!(f, "unix:{uid}"),
            Self::Unknown => Ok(()),
        }
    }
}

/// Whether the host of a URL is a loopback name or address.
pub(crate) fn is_loopback_host(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_hosts_are_recognized() {
        for (address, loopback) in
            [("127.0.0.1", true), ("::1", true), ("::ffff:127.0.0.1", true), ("10.0.0.1", false)]
        {
            let address: IpAddr = address.parse().expect("an address");
            let info = TcpConnectInfo { local_addr: None, remote_addr: Some((address, 1).into()) };
            let mut extensions = Extensions::new();
            extensions.insert(info);
            assert_eq!(Peer::from_extensions(&extensions).is_loopback(), loopback, "{address}");
        }
        assert_eq!(Peer::from_extensions(&Extensions::new()), Peer::Unknown);
    }
}
