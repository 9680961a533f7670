//! Which IP addresses are public. All others are refused: they belong to the host, its network, or
//! its cloud.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Ranges of IPv4 that are not public, as address and prefix length (IANA special-purpose
/// registry).
const REFUSED_V4: [(Ipv4Addr, u32); 17] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    // Carrier-grade NAT; some clouds serve metadata from it.
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    // Link-local, where most clouds serve metadata.
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 31, 196, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    // Multicast, reserved and broadcast.
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
    // Azure serves its platform from this address, although it is in a public range.
    (Ipv4Addr::new(168, 63, 129, 16), 32),
];

/// The only IPv6 range with public addresses.
const GLOBAL_V6: (Ipv6Addr, u32) = (Ipv6Addr::new(0x2000, 0, 0, 0, 0, 0, 0, 0), 3);

/// Ranges within it that are not public.
const REFUSED_V6: [(Ipv6Addr, u32); 5] = [
    // Protocol assignments, including Teredo, which tunnels to IPv4.
    (Ipv6Addr::new(0x2001, 0, 0, 0, 0, 0, 0, 0), 23),
    (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0), 32),
    // 6to4 tunnels to the embedded IPv4 address.
    (Ipv6Addr::new(0x2002, 0, 0, 0, 0, 0, 0, 0), 16),
    (Ipv6Addr::new(0x2620, 0x4f, 0x8000, 0, 0, 0, 0, 0), 48),
    (Ipv6Addr::new(0x3fff, 0, 0, 0, 0, 0, 0, 0), 20),
];

/// Whether an address is on the public internet. An IPv4-mapped IPv6 address counts as the IPv4
/// address.
#[must_use]
pub fn is_public(address: IpAddr) -> bool {
    // An IPv4-mapped address (::ffff:127.0.0.1) reaches the IPv4 address. NAT64 (64:ff9b::/96) and
    // all other embeddings are outside the global range.
    match address.to_canonical() {
        IpAddr::V4(v4) => !REFUSED_V4.iter().any(|(base, length)| within_v4(v4, *base, *length)),
        IpAddr::V6(v6) => {
            within_v6(v6, GLOBAL_V6.0, GLOBAL_V6.1)
                && !REFUSED_V6.iter().any(|(base, length)| within_v6(v6, *base, *length))
        }
    }
}

fn within_v4(address: Ipv4Addr, base: Ipv4Addr, length: u32) -> bool {
    (address.to_bits() ^ base.to_bits()).leading_zeros() >= length
}

fn within_v6(address: Ipv6Addr, base: Ipv6Addr, length: u32) -> bool {
    (address.to_bits() ^ base.to_bits()).leading_zeros() >= length
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_addresses_are_public() {
        for text in [
            "1.1.1.1",
            "8.8.8.8",
            "93.184.216.34",
            "172.32.0.1",
            "2606:4700::1111",
            "2a00:1450::1",
            "::ffff:1.1.1.1",
        ] {
            assert!(is_public(text.parse().expect("an address")), "{text}");
        }
    }

    #[test]
    fn private_addresses_are_not_public_in_any_spelling() {
        let refused = "0.0.0.0 10.1.2.3 100.64.0.1 100.100.100.200 127.0.0.1 127.255.255.254 169.254.169.254 \
            172.16.0.1 172.31.255.255 192.0.0.192 192.168.1.1 198.18.0.1 224.0.0.1 239.1.1.1 255.255.255.255 \
            168.63.129.16 :: ::1 ::7f00:1 ::ffff:127.0.0.1 ::ffff:169.254.169.254 64:ff9b::7f00:1 64:ff9b:1::1 \
            fc00::1 fd00:ec2::254 fe80::1 fec0::1 ff02::1 2001::1 2001:db8::1 2002:7f00:1::1 3fff::1 100::1 5f00::1";
        for text in refused.split_whitespace() {
            assert!(!is_public(text.parse().expect("an address")), "{text}");
        }
    }
}
