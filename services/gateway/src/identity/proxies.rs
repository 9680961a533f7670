//! Trusted proxies, whose information about the client is used.
//!
//! `X-Forwarded-For` is a list to which every hop appends the address that connected to it. So the
//! last address was written by the proxy that connects to the gateway, the one before it by the
//! host of the last address, and so on. It is read from the end, as long as the writer of an
//! address is trusted; anything before that may be forged. `Forwarded` (RFC 7239) is not read: a
//! proxy that does not know it passes on what the client wrote.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use tonic::codegen::http::{Extensions, HeaderMap};

use super::peer::{ForwardedClient, Peer};
use crate::limit::Holder;

const FORWARDED_FOR: &str = "x-forwarded-for";

/// The networks of trusted proxies. Clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proxies(Arc<[IpNet]>);

/// A text that is not a network of trusted proxies.
#[derive(Debug, thiserror::Error)]
#[error("must be networks like `10.20.0.0/16`, without bits after the prefix; `{0}` is not one")]
pub(crate) struct InvalidNetwork(String);

impl Proxies {
    /// # Errors
    /// When a text is not a network, or is the network of all addresses: that would trust every
    /// client.
    pub(crate) fn new(networks: &[String]) -> Result<Self, InvalidNetwork> {
        let networks = networks
            .iter()
            .map(|text| parse_network(text).ok_or_else(|| InvalidNetwork(text.clone())));
        networks.collect::<Result<_, _>>().map(Self)
    }

    /// The client of a request that a trusted proxy forwards: the last address of the header that
    /// is not a trusted proxy.
    ///
    /// An invalid address ends the search, and its writer counts as the client: a trusted proxy.
    /// Anything before it may be forged. A client that counts as the proxy shares the limits of
    /// others instead of having new ones with each request.
    pub(crate) fn client(
        &self,
        extensions: &Extensions,
        headers: &HeaderMap,
    ) -> Option<ForwardedClient> {
        let Peer::Address(proxy) = Peer::from_extensions(extensions) else { return None };
        if !self.is_trusted(proxy) || !headers.contains_key(FORWARDED_FOR) {
            return None;
        }
        // Several header lines are one list.
        let lines = headers.get_all(FORWARDED_FOR).iter().rev();
        let entries = lines.flat_map(|line| line.as_bytes().rsplit(|byte| *byte == b','));
        let mut client = proxy;
        for entry in entries {
            let Some(address) = parse_address(entry) else { break };
            client = address;
            if !self.is_trusted(address) {
                break;
            }
        }
        Some(ForwardedClient(client))
    }

    /// The holder of a connection, for limits per network. Connections of trusted proxies have
    /// none: their clients are known per request.
    pub(crate) fn holder(&self, peer: SocketAddr) -> Holder {
        let address = peer.ip().to_canonical();
        Holder::network((!self.is_trusted(address)).then_some(address))
    }

    fn is_trusted(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }
}

/// Parses `10.20.0.0/16`, or the address of a single host. IPv4-mapped IPv6 networks are refused,
/// because addresses are compared in their IPv4 form.
fn parse_network(text: &str) -> Option<IpNet> {
    let network: IpNet = text.parse().or_else(|_| text.parse().map(IpAddr::into)).ok()?;
    let base = network.addr();
    let is_valid =
        network.prefix_len() > 0 && network.network() == base && base.to_canonical() == base;
    is_valid.then_some(network)
}

/// Parses an address as proxies write it: with or without a port, IPv6 with or without brackets.
fn parse_address(entry: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(entry.trim_ascii()).ok()?;
    let with_port = || text.parse::<SocketAddr>().ok().map(|address| address.ip());
    let in_brackets =
        || text.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok().map(IpAddr::V6);
    let address = text.parse().ok().or_else(with_port).or_else(in_brackets)?;
    Some(address.to_canonical())
}

#[cfg(test)]
mod tests {
    use tonic::{codegen::http::HeaderValue, transport::server::TcpConnectInfo};

    use super::*;

    fn proxies(networks: &[&str]) -> Proxies {
        Proxies::new(&networks.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>())
            .expect("networks")
    }

    /// The peer of a request from `peer` with these header lines.
    fn client_of(proxies: &Proxies, peer: &str, lines: &[&[u8]]) -> String {
        let mut extensions = Extensions::new();
        let remote_addr = Some(SocketAddr::new(peer.parse().expect("an address"), 1));
        extensions.insert(TcpConnectInfo { local_addr: None, remote_addr });
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(FORWARDED_FOR, HeaderValue::from_bytes(line).expect("a value"));
        }
        if let Some(client) = proxies.client(&extensions, &headers) {
            extensions.insert(client);
        }
        Peer::from_extensions(&extensions).to_string()
    }

    #[test]
    fn untrusted_peer_is_the_client() {
        let trusted: [&[&str]; 2] = [&[], &["10.0.0.0/8", "fd00::/8"]];
        for networks in trusted {
            for peer in ["192.0.2.1", "11.0.0.1", "2001:db8::1"] {
                for line in [
                    "198.51.100.1",
                    "10.0.0.1",
                    "127.0.0.1",
                    "198.51.100.1, 10.0.0.1",
                    "nonsense",
                    "",
                ] {
                    assert_eq!(
                        client_of(&proxies(networks), peer, &[line.as_bytes()]),
                        peer,
                        "{networks:?} {line}"
                    );
                }
            }
        }
    }

    #[test]
    fn client_is_the_last_untrusted_address() {
        let proxies = proxies(&["10.0.0.0/8", "192.0.2.7", "fd00::/8"]);
        let cases: [(&[&str], &str); 8] = [
            (&["198.51.100.1"], "198.51.100.1"),
            (&["203.0.113.66, 198.51.100.1"], "198.51.100.1"),
            (&["127.0.0.1,198.51.100.1,10.9.9.9 , 192.0.2.7"], "198.51.100.1"),
            (&["203.0.113.66, 10.0.0.3", "198.51.100.1", "10.0.0.2, fd00::2"], "198.51.100.1"),
            (&["198.51.100.1", "203.0.113.66"], "203.0.113.66"),
            // All are trusted: the first one is the origin.
            (&["10.0.0.5, 10.0.0.4"], "10.0.0.5"),
            (&["10.0.0.5", "10.0.0.4"], "10.0.0.5"),
            (&[], "10.0.0.1"),
        ];
        for (lines, client) in cases {
            let bytes: Vec<_> = lines.iter().map(|line| line.as_bytes()).collect();
            for peer in ["10.0.0.1", "::ffff:10.0.0.1"] {
                assert_eq!(client_of(&proxies, peer, &bytes), client, "{lines:?}");
            }
        }
    }

    #[test]
    fn addresses_may_have_ports_and_brackets() {
        let proxies = proxies(&["10.0.0.0/8"]);
        for (entry, client) in [
            ("198.51.100.1:4711", "198.51.100.1"),
            ("2001:db8::1", "2001:db8::1"),
            ("2001:DB8:0::1", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("[2001:db8::1]:4711", "2001:db8::1"),
            ("::ffff:198.51.100.1", "198.51.100.1"),
            ("198.51.100.1, ::ffff:10.0.0.9", "198.51.100.1"),
            ("198.51.100.1, [::ffff:10.0.0.9]:80", "198.51.100.1"),
            ("\t198.51.100.1\t", "198.51.100.1"),
        ] {
            assert_eq!(client_of(&proxies, "10.0.0.1", &[entry.as_bytes()]), client, "{entry}");
        }
    }

    #[test]
    fn invalid_address_ends_the_search_at_its_proxy() {
        let proxies = proxies(&["10.0.0.0/8"]);
        let garbage = [
            "unknown",
            "_hidden",
            "",
            "198.51.100",
            "198.51.100.1:x",
            "[198.51.100.1]",
            "2001:db8::1%eth0",
        ];
        for garbage in garbage
            .map(str::as_bytes)
            .into_iter()
            .chain([&b"198.51.100.1\xff"[..], b"for=198.51.100.1"])
        {
            let told = String::from_utf8_lossy(garbage);
            assert_eq!(client_of(&proxies, "10.0.0.1", &[garbage]), "10.0.0.1", "{told}");
            assert_eq!(
                client_of(&proxies, "10.0.0.1", &[b"203.0.113.66", garbage]),
                "10.0.0.1",
                "{told}"
            );
            let before = [&b"203.0.113.66,"[..], garbage, b", 10.0.0.2"].concat();
            assert_eq!(client_of(&proxies, "10.0.0.1", &[&before]), "10.0.0.2", "{told}");
            // Addresses before an untrusted one are ignored.
            let after = [garbage, b", 198.51.100.1"].concat();
            assert_eq!(client_of(&proxies, "10.0.0.1", &[&after]), "198.51.100.1", "{told}");
        }
    }

    #[test]
    fn forwarded_client_is_never_local() {
        let proxies = proxies(&["127.0.0.1", "::1"]);
        let mut extensions = Extensions::new();
        let remote_addr = Some(SocketAddr::from(([127, 0, 0, 1], 1)));
        extensions.insert(TcpConnectInfo { local_addr: None, remote_addr });
        let headers = |text| HeaderMap::from_iter([(FORWARDED_FOR.parse().expect("a name"), text)]);
        assert!(Peer::from_extensions(&extensions).is_loopback());
        for text in ["127.0.0.1", "::1", "nonsense", ""] {
            let client = proxies.client(&extensions, &headers(HeaderValue::from_static(text)));
            let mut extensions = extensions.clone();
            extensions.insert(client.expect("it is passed on"));
            assert!(!Peer::from_extensions(&extensions).is_loopback(), "{text}");
        }
    }

    #[test]
    fn connections_of_trusted_proxies_have_no_network() {
        let proxies = proxies(&["10.0.0.0/8"]);
        for (peer, counted) in [
            ("10.1.2.3:1", None),
            ("[::ffff:10.1.2.3]:1", None),
            ("192.0.2.1:1", Some("192.0.2.1")),
            ("[::ffff:192.0.2.1]:1", Some("192.0.2.1")),
        ] {
            let counted = Holder::network(counted.map(|text| text.parse().expect("an address")));
            assert_eq!(proxies.holder(peer.parse().expect("an address")), counted, "{peer}");
        }
    }

    #[test]
    fn network_is_a_prefix_and_never_all_addresses() {
        for (text, within, without) in [
            ("10.0.0.0/8", "10.255.255.255", "11.0.0.0"),
            ("192.0.2.128/25", "192.0.2.128", "192.0.2.127"),
            ("192.0.2.7", "192.0.2.7", "192.0.2.6"),
            ("192.0.2.7/32", "192.0.2.7", "::192.0.2.7"),
            ("128.0.0.0/1", "255.0.0.1", "127.0.0.1"),
            ("fd00::/8", "fdff::1", "fe00::1"),
            ("::1", "::1", "::2"),
            ("2001:db8::/127", "2001:db8::1", "2001:db8::2"),
        ] {
            let network = parse_network(text).expect("a network");
            assert!(
                network.contains(&within.parse::<IpAddr>().expect("an address")),
                "{text} {within}"
            );
            assert!(
                !network.contains(&without.parse::<IpAddr>().expect("an address")),
                "{text} {without}"
            );
        }
        for text in [
            "0.0.0.0/0",
            "::/0",
            "10.0.0.1/8",
            "10.0.0.0/33",
            "fd00::/129",
            "10.0.0.0/",
            "10.0.0.0/-1",
            "10.0.0/8",
            "::ffff:10.0.0.0/104",
            "proxy.example",
            "",
        ] {
            assert!(parse_network(text).is_none(), "{text}");
        }
    }
}
