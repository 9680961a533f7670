//! What can be configured about the gateway.

use std::net::{Ipv4Addr, SocketAddr};

use construct_domain::compute;
use construct_runtime::config::{Common, Invalid};
use serde::{Deserialize, Serialize};

/// The gateway's own keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Where gRPC and the other faces are served.
    pub gateway_listen: SocketAddr,
    /// Accept that everybody who reaches the address may do everything: there is no log-in yet, so without this only
    /// loopback addresses are served.
    pub gateway_insecure: bool,
    /// Requests worked on at the same time, over all connections. Further ones are refused with `RESOURCE_EXHAUSTED`,
    /// because what waits behind so many would time out anyway.
    pub gateway_max_requests: usize,
    /// Subscriptions open at the same time, over all connections; each holds a buffer. Further ones are refused with
    /// `RESOURCE_EXHAUSTED`.
    pub gateway_max_subscriptions: usize,
    /// The pools of interpreters that exist; an agent or a task that names another one is refused. Each needs an
    /// interpreter that serves it (`interpreter_pools`).
    pub gateway_pools: Vec<String>,
    /// Origins, e.g. `https://app.example`, whose pages may call the gateway from a browser. Requests from pages of any other
    /// are refused on every face.
    pub gateway_origins: Vec<String>,
    /// Host names, e.g. `construct.test`, under which a gateway on a loopback address may be called besides loopback's own. On
    /// other addresses whoever guards them decides that.
    pub gateway_hosts: Vec<String>,
    /// Where the operator protocol is served, e.g. `127.0.0.1:60100`. Unset: nowhere, because its port is the same for every
    /// gateway of a machine, and most are not asked for it.
    pub gateway_operator_listen: Option<SocketAddr>,
    /// Name or id of the agent that answers requests of the operator protocol that name none.
    pub gateway_operator_agent: Option<String>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            gateway_listen: (Ipv4Addr::LOCALHOST, 60080).into(),
            gateway_insecure: false,
            gateway_max_requests: 1024,
            gateway_max_subscriptions: 2000,
            gateway_pools: compute::STANDARD.map(str::to_owned).into(),
            gateway_origins: Vec::new(),
            gateway_hosts: Vec::new(),
            gateway_operator_listen: None,
            gateway_operator_agent: None,
        }
    }
}

impl construct_runtime::ServiceConfig for Config {
    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        common.database_url()?;
        common.master_keys()?;
        common.secrets_keys()?;
        common.token_keys()?;
        let reachable = |address: &SocketAddr| !address.ip().is_loopback() && !self.gateway_insecure;
        let operator = self.gateway_operator_listen.filter(reachable).map(|_| "gateway_operator_listen");
        if let Some(key) = Some("gateway_listen").filter(|_| reachable(&self.gateway_listen)).or(operator) {
            return Err(Invalid::new(
                key,
                "is reachable from other machines, and the gateway has no log-in yet: everybody could do everything. Use a \
                 loopback address, or set CONSTRUCT_GATEWAY_INSECURE=true where something else guards the address",
            ));
        }
        if let Some(name) = self.gateway_pools.iter().find(|name| !compute::is_name(name)) {
            return Err(Invalid::new(
                "gateway_pools",
                format!("names pools like `cpu-2` (`[a-z][a-z0-9-]{{0,31}}`), and `{name}` is none"),
            ));
        }
        if !self.gateway_pools.iter().any(|name| name == compute::DEFAULT) {
            let default = compute::DEFAULT;
            return Err(Invalid::new("gateway_pools", format!("must have `{default}`, where scripts go by default")));
        }
        if let Some(origin) = self.gateway_origins.iter().find(|origin| !is_origin(origin)) {
            let words = format!("names origins like `https://app.example`, and `{origin}` is none");
            return Err(Invalid::new("gateway_origins", words));
        }
        for (key, value) in [
            ("gateway_max_requests", self.gateway_max_requests),
            ("gateway_max_subscriptions", self.gateway_max_subscriptions),
        ] {
            if !(1..=1_000_000).contains(&value) {
                return Err(Invalid::new(key, "must be between 1 and 1,000,000"));
            }
        }
        Ok(())
    }
}

/// Whether browsers would write an origin like this: a scheme, a host, a port that isn't the scheme's own; no path.
fn is_origin(text: &str) -> bool {
    let host = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or_default();
    !host.is_empty()
        && host.bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase() && !b"/?#@*".contains(&byte))
}

#[cfg(test)]
mod tests {
    use construct_runtime::ServiceConfig as _;

    use super::*;

    fn common() -> Common {
        Common {
            database_url: Some("postgres://localhost/construct".into()),
            master_key: Some("AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=".into()),
            ..Common::default()
        }
    }

    #[test]
    fn pools_have_names_and_the_default_is_among_them() {
        for (pools, fine) in
            [(vec!["cpu-2"], true), (vec!["cpu-2", "gpu"], true), (vec!["gpu"], false), (vec!["cpu-2", "G.P"], false)]
        {
            let gateway_pools = pools.iter().map(|name| (*name).to_owned()).collect();
            let config = Config { gateway_pools, ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{pools:?}");
        }
    }

    #[test]
    fn an_origin_is_written_as_browsers_write_it() {
        for (origin, fine) in [
            ("https://app.example", true),
            ("http://localhost:5173", true),
            ("https://app.example/", false),
            ("https://*.example", false),
            ("app.example", false),
            ("null", false),
            ("*", false),
        ] {
            let config = Config { gateway_origins: vec![origin.to_owned()], ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{origin}");
        }
    }

    #[test]
    fn an_address_others_can_reach_needs_consent() {
        for (address, insecure, fine) in [
            ("127.0.0.1:60080", false, true),
            ("[::1]:0", false, true),
            ("0.0.0.0:60080", false, false),
            ("[::]:60080", false, false),
            ("10.0.0.1:60080", false, false),
            ("0.0.0.0:60080", true, true),
        ] {
            let gateway_listen = address.parse().expect("an address");
            let config = Config { gateway_listen, gateway_insecure: insecure, ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{address}");
            let gateway_operator_listen = Some(gateway_listen);
            let config = Config { gateway_operator_listen, gateway_insecure: insecure, ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{address}");
        }
    }
}
