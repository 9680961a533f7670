//! Proxies that are believed when they say for whom they ask.
//!
//! `X-Forwarded-For` is a list to whose end everybody on the way adds who connected to them: so the
//! last address was written by the proxy that connects to the gateway, the one before it by whoever
//! is at the last address, and so on. It is read from its end, for as long as the one who wrote an
//! address is trusted; what is before that anybody may have made up. `Forwarded` (RFC 7239) is not
//! read: what a proxy doesn't know, it passes on as the client wrote it.

use std::{
    net::{IpAddr, Ipv6Addr, SocketAddr},
    sync::Arc,
};

use ipnet::IpNet;
use tonic::codegen::http::{Extensions, HeaderMap};

use super::peer::{Forwarded, Peer};

const FORWARDED_FOR: &str = "x-forwarded-for";

/// The networks that trusted proxies are in. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proxies(Arc<[IpNet]>);

/// A text that names no network in which there can be trusted proxies.
#[derive(Debug, thiserror::Error)]
#[error(
    "names the networks of proxies like `10.20.0.0/16`, without bits after the prefix, and `{0}` is none"
)]
pub(crate) struct NoNetwork(String);

impl Proxies {
    /// # Errors
    /// When one of them is no network, or all addresses there are: who would trust everybody would
    /// believe whatever a client says.
    pub(crate) fn new(networks: &[String]) -> Result<Self, NoNetwork> {
        let networks =
            networks.iter().map(|text| network(text).ok_or_else(|| NoNetwork(text.clone())));
        networks.collect::<Result<_, _>>().map(Self)
    }

    /// Whom a request is from, when a trusted proxy passes it on: the last address of the header
    /// that is not a trusted proxy's.
    ///
    /// What is no address ends the search, and the one that wrote it counts: a trusted proxy.
    /// Whatever is before it may be the client's invention, and who is counted as the proxy shares
    /// its limits with others instead of having new ones at each request.
    pub(crate) fn client(&self, extensions: &Extensions, headers: &HeaderMap) -> Option<Forwarded> {
        let Peer::Address(proxy) = Peer::of(extensions) else { return None };
        if !self.trust(proxy) || !headers.contains_key(FORWARDED_FOR) {
            return None;
        }
        // Several lines are one list.
        let lines = headers.get_all(FORWARDED_FOR).iter().rev();
        let entries = lines.flat_map(|line| line.as_bytes().rsplit(|byte| *byte == b','));
        let mut client = proxy;
        for entry in entries {
            let Some(address) = address(entry) else { break };
            client = address;
            if !self.trust(address) {
                break;
            }
        }
        Some(Forwarded(client))
    }

    /// Whose a connection is, for what is counted per network. A trusted proxy's is nobody's in
    /// particular: whom it is for is known when a request is read, and will be others at each.
    pub(crate) fn counted(&self, peer: SocketAddr) -> Option<IpAddr> {
        let address = peer.ip().to_canonical();
        (!self.trust(address)).then_some(address)
    }

    fn trust(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }
}

/// From `10.20.0.0/16`, or the address of a single machine. IPv4 in IPv6 clothes is none, because
/// addresses are compared without them.
fn network(text: &str) -> Option<IpNet> {
    let network: IpNet = text.parse().or_else(|_| text.parse().map(IpAddr::into)).ok()?;
    let base = network.addr();
    let fine = network.prefix_len() > 0 && network.network() == base && base.to_canonical() == base;
    fine.then_some(network)
}

/// An address as proxies write it: by itself or with a port, IPv6 in brackets or not.
fn address(entry: &[u8]) -> Option<IpAddr> {
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

    /// Whom a request counts as that comes from `peer` with these lines of the header.
    fn seen(proxies: &Proxies, peer: &str, lines: &[&[u8]]) -> String {
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
        Peer::of(&extensions).to_string()
    }

    #[test]
    fn who_is_not_trusted_is_who_connects_whatever_they_say() {
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
                        seen(&proxies(networks), peer, &[line.as_bytes()]),
                        peer,
                        "{networks:?} {line}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_client_is_the_last_address_that_is_no_trusted_proxys() {
        let proxies = proxies(&["10.0.0.0/8", "192.0.2.7", "fd00::/8"]);
        let cases: [(&[&str], &str); 8] = [
            (&["198.51.100.1"], "198.51.100.1"),
            (&["203.0.113.66, 198.51.100.1"], "198.51.100.1"),
            (&["127.0.0.1,198.51.100.1,10.9.9.9 , 192.0.2.7"], "198.51.100.1"),
            (&["203.0.113.66, 10.0.0.3", "198.51.100.1", "10.0.0.2, fd00::2"], "198.51.100.1"),
            (&["198.51.100.1", "203.0.113.66"], "203.0.113.66"),
            // All are trusted: the first is where it began.
            (&["10.0.0.5, 10.0.0.4"], "10.0.0.5"),
            (&["10.0.0.5", "10.0.0.4"], "10.0.0.5"),
            (&[], "10.0.0.1"),
        ];
        for (lines, client) in cases {
            let bytes: Vec<_> = lines.iter().map(|line| line.as_bytes()).collect();
            for peer in ["10.0.0.1", "::ffff:10.0.0.1"] {
                assert_eq!(seen(&proxies, peer, &bytes), client, "{lines:?}");
            }
        }
    }

    #[test]
    fn addresses_are_read_with_ports_and_brackets_and_without() {
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
            assert_eq!(seen(&proxies, "10.0.0.1", &[entry.as_bytes()]), client, "{entry}");
        }
    }

    #[test]
    fn what_is_no_address_ends_the_search_at_the_proxy_that_wrote_it() {
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
            assert_eq!(seen(&proxies, "10.0.0.1", &[garbage]), "10.0.0.1", "{told}");
            assert_eq!(
                seen(&proxies, "10.0.0.1", &[b"203.0.113.66", garbage]),
                "10.0.0.1",
                "{told}"
            );
            let before = [&b"203.0.113.66,"[..], garbage, b", 10.0.0.2"].concat();
            assert_eq!(seen(&proxies, "10.0.0.1", &[&before]), "10.0.0.2", "{told}");
            // Nobody looks at what is before an address that is not trusted.
            let after = [garbage, b", 198.51.100.1"].concat();
            assert_eq!(seen(&proxies, "10.0.0.1", &[&after]), "198.51.100.1", "{told}");
        }
    }

    #[test]
    fn who_comes_by_a_proxy_is_not_on_this_machine_whatever_is_said() {
        let proxies = proxies(&["127.0.0.1", "::1"]);
        let mut extensions = Extensions::new();
        let remote_addr = Some(SocketAddr::from(([127, 0, 0, 1], 1)));
        extensions.insert(TcpConnectInfo { local_addr: None, remote_addr });
        let headers = |text| HeaderMap::from_iter([(FORWARDED_FOR.parse().expect("a name"), text)]);
        assert!(Peer::of(&extensions).is_loopback());
        for text in ["127.0.0.1", "::1", "nonsense", ""] {
            let client = proxies.client(&extensions, &headers(HeaderValue::from_static(text)));
            let mut extensions = extensions.clone();
            extensions.insert(client.expect("it is passed on"));
            assert!(!Peer::of(&extensions).is_loopback(), "{text}");
        }
    }

    #[test]
    fn connections_of_trusted_proxies_are_of_no_network() {
        let proxies = proxies(&["10.0.0.0/8"]);
        for (peer, counted) in [
            ("10.1.2.3:1", None),
            ("[::ffff:10.1.2.3]:1", None),
            ("192.0.2.1:1", Some("192.0.2.1")),
            ("[::ffff:192.0.2.1]:1", Some("192.0.2.1")),
        ] {
            let counted = counted.map(|text| text.parse().expect("an address"));
            assert_eq!(proxies.counted(peer.parse().expect("an address")), counted, "{peer}");
        }
    }

    #[test]
    fn a_network_is_a_prefix_and_never_everybody() {
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
            let network = network(text).expect("a network");
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
            assert!(network(text).is_none(), "{text}");
        }
    }
}
