//! Where a request comes from, as far as that says anything about who sent it.

use std::{fmt, net::IpAddr};

use tonic::{
    codegen::http::Extensions,
    transport::server::{TcpConnectInfo, UdsConnectInfo},
};

/// The other end of the connection, or who that speaks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    /// A program at an address.
    Address(IpAddr),
    /// Whoever a trusted proxy passes on, by the address it says. Never somebody of this machine,
    /// whatever the address: to be that, one has to connect.
    Forwarded(IpAddr),
    /// A process of this machine that runs as this user.
    Process {
        /// Its user id.
        uid: u32,
    },
    /// Nobody says.
    Unknown,
}

/// For whom a trusted proxy asks. Among a request's extensions, where the gateway alone puts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Forwarded(pub(crate) IpAddr);

impl Peer {
    /// As the connection of the request says, or the proxy at its other end.
    pub(crate) fn of(extensions: &Extensions) -> Self {
        if let Some(Forwarded(address)) = extensions.get() {
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

    /// Its address, for what is counted per address.
    pub(crate) const fn address(self) -> Option<IpAddr> {
        match self {
            Self::Address(address) | Self::Forwarded(address) => Some(address),
            Self::Process { .. } | Self::Unknown => None,
        }
    }

    /// Whether it is on this machine, at a loopback address.
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

/// Whether a host as addresses name it is this machine by loopback.
pub(crate) fn is_loopback_host(host: &str) -> bool {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost")
        || bare.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_known_in_every_spelling() {
        for (address, loopback) in
            [("127.0.0.1", true), ("::1", true), ("::ffff:127.0.0.1", true), ("10.0.0.1", false)]
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
