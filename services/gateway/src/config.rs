//! What can be configured about the gateway.

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
};

use construct_domain::compute;
use construct_runtime::config::{Common, Invalid};
use construct_store::Limits;
use serde::{Deserialize, Serialize};

use crate::{
    identity::{oidc, proxies::Proxies},
    quotas::{Calendar, tiers},
};

/// The gateway's own keys.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Where gRPC and the other protocols are served.
    pub gateway_listen: SocketAddr,
    /// Who has to log in.
    pub gateway_login: Login,
    /// Failed log-ins of one address with tokens of the issuer in a minute, beyond which its tokens
    /// are refused unseen.
    pub gateway_login_failures: u32,
    /// A Unix socket where gRPC is served as well, for processes that run as the same user; these
    /// are the operator. One that was passed to the process (systemd's `LISTEN_FDS`) is served in
    /// its place.
    pub gateway_socket: Option<PathBuf>,
    /// The issuer of people's log-ins, as its tokens name it; with `gateway_oidc_audience`.
    pub gateway_oidc_issuer: Option<String>,
    /// What tokens of the issuer say whom they are for.
    pub gateway_oidc_audience: Option<String>,
    /// What the issuer knows programs as by which people log in (`construct login`): a public
    /// client. The gateway tells it to whoever asks.
    pub gateway_oidc_client_id: Option<String>,
    /// What these programs ask the issuer for.
    pub gateway_oidc_scopes: Vec<String>,
    /// Requests worked on at the same time, over all connections. Further ones are refused with
    /// `RESOURCE_EXHAUSTED`, because what waits behind so many would time out anyway. Half of them
    /// are for one organization at most; all, for the operator's.
    pub gateway_max_requests: usize,
    /// Subscriptions open at the same time, over all connections; each holds a buffer. Further ones
    /// are refused with `RESOURCE_EXHAUSTED`. Half of them are for one organization at most; all,
    /// for the operator's.
    pub gateway_max_subscriptions: usize,
    /// The pools of interpreters that exist; an agent or a task that names another one is refused.
    /// Each needs an interpreter that serves it (`interpreter_pools`).
    pub gateway_pools: Vec<String>,
    /// Origins, e.g. `https://app.example`, whose pages may call the gateway from a browser. Requests from pages of any other
    /// are refused on every protocol.
    pub gateway_origins: Vec<String>,
    /// Host names, e.g. `construct.test`, under which a gateway on a loopback address may be called
    /// besides loopback's own. On other addresses whoever guards them decides that.
    pub gateway_hosts: Vec<String>,
    /// Networks of proxies, e.g. `10.20.0.0/16` or `192.0.2.7`, that are believed what they say in
    /// `X-Forwarded-For` of whom a request is from: for the audit trail, and for what is limited
    /// per address. Of others the header means nothing. Whoever is in one of them can say what they
    /// like, so it is the proxies' own network, and they have to add to the header, or write it,
    /// themselves. All addresses (`/0`) are refused.
    pub gateway_trusted_proxies: Vec<String>,
    /// Where the operator protocol is served, e.g. `127.0.0.1:60100`. Unset: nowhere, because its
    /// port is the same for every gateway of a machine. `./dev` sets it where that port is free,
    /// and docker-compose.yml does.
    pub gateway_operator_listen: Option<SocketAddr>,
    /// The folder in which the interpreters see what the scanner has fetched (`scanner_dir`).
    /// Unset: there is no scanner, and scans are refused.
    pub gateway_scans_dir: Option<PathBuf>,
    /// Name or id of the agent that answers requests of the operator protocol that name none.
    pub gateway_operator_agent: Option<String>,
    /// A file with the certificate (PEM, with those that vouch for it) that the ports of gRPC and
    /// of the operator protocol speak TLS with, and `gateway_tls_key`. Unset: they speak without.
    /// Read again when it changes.
    pub gateway_tls_certificate: Option<PathBuf>,
    /// A file with the certificate's private key (PEM).
    pub gateway_tls_key: Option<PathBuf>,
    /// A file with certificates (PEM). Who shows no certificate that one of them vouches for does
    /// not come in; besides that it means nothing. Unset: nobody is asked for one.
    pub gateway_tls_client_ca: Option<PathBuf>,
    /// Days that entries of the audit trail are kept, 31 at least.
    pub gateway_audit_keep: u32,
    /// Bytes of a file that is uploaded, 16 GiB at most.
    pub gateway_files_max_bytes: u64,
    /// Media types of files that are taken, with `*` for any part of one: `image/*`. One that is
    /// not declared is told from the content, and is `application/octet-stream` where that says
    /// nothing.
    pub gateway_files_types: Vec<String>,
    /// How much organizations of a tier may do, by the tier's name: `[gateway_tiers.free]` with
    /// `requests_per_minute`, `key_requests_per_minute`, `tasks_per_day`, `runs_per_day`,
    /// `tokens_per_day`, `spend_per_month_pico_usd` and `storage_bytes`. What is left out is not
    /// limited. `unlimited` is always there.
    pub gateway_tiers: BTreeMap<String, Limits>,
    /// The tier of organizations of which nothing was said. The operator's is `unlimited` then.
    pub gateway_tier: String,
    /// Team organizations that one user may own: each has quotas of its own. Who makes one while
    /// working in the operator's is not limited.
    pub gateway_organizations_of_one: u32,
    /// Which days and months quotas are of. Not configured: those of UTC, except in tests.
    #[serde(skip)]
    pub(crate) gateway_calendar: Calendar,
}

/// Who has to log in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Login {
    /// Who comes without credentials is the operator: only loopback addresses are served.
    Local,
    /// Everybody; but for processes of the same user over `gateway_socket`.
    Required,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            gateway_listen: (Ipv4Addr::LOCALHOST, 60080).into(),
            gateway_login: Login::Local,
            gateway_login_failures: 20,
            gateway_socket: None,
            gateway_oidc_issuer: None,
            gateway_oidc_audience: None,
            gateway_oidc_client_id: None,
            gateway_oidc_scopes: ["openid", "profile", "email", "offline_access"]
                .map(str::to_owned)
                .into(),
            gateway_max_requests: 1024,
            gateway_max_subscriptions: 2000,
            gateway_pools: compute::STANDARD.map(str::to_owned).into(),
            gateway_origins: Vec::new(),
            gateway_hosts: Vec::new(),
            gateway_trusted_proxies: Vec::new(),
            gateway_operator_listen: None,
            gateway_operator_agent: None,
            gateway_tls_certificate: None,
            gateway_tls_key: None,
            gateway_tls_client_ca: None,
            gateway_audit_keep: 400,
            gateway_files_max_bytes: 512 * 1024 * 1024,
            gateway_files_types: vec!["*/*".to_owned()],
            gateway_tiers: BTreeMap::new(),
            gateway_tier: tiers::UNLIMITED.to_owned(),
            gateway_organizations_of_one: 20,
            gateway_calendar: Calendar::default(),
            gateway_scans_dir: None,
        }
    }
}

impl construct_runtime::ServiceConfig for Config {
    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        common.database_url()?;
        common.master_keys()?;
        common.secrets_keys()?;
        common.token_keys()?;
        let reachable = |address: &SocketAddr| {
            !address.ip().is_loopback() && self.gateway_login == Login::Local
        };
        let operator =
            self.gateway_operator_listen.filter(reachable).map(|_| "gateway_operator_listen");
        if let Some(key) =
            Some("gateway_listen").filter(|_| reachable(&self.gateway_listen)).or(operator)
        {
            return Err(Invalid::new(
                key,
                "is reachable from other machines, where nobody would have to log in. Use a loopback address, or set \
                 CONSTRUCT_GATEWAY_LOGIN=required",
            ));
        }
        if self.gateway_oidc_issuer.as_deref().is_some_and(|issuer| !oidc::is_trustworthy(issuer)) {
            return Err(Invalid::new(
                "gateway_oidc_issuer",
                "must be an `https` address, or `http` on this machine",
            ));
        }
        if self.gateway_oidc_issuer.is_some()
            != self.gateway_oidc_audience.as_deref().is_some_and(|text| !text.is_empty())
        {
            let words =
                "is needed with gateway_oidc_issuer, and only then: whom its tokens are for";
            return Err(Invalid::new("gateway_oidc_audience", words));
        }
        if self.gateway_oidc_client_id.is_some() && self.gateway_oidc_issuer.is_none() {
            return Err(Invalid::new(
                "gateway_oidc_client_id",
                "is one of an issuer's, which takes gateway_oidc_issuer",
            ));
        }
        if let Some(scope) = self.gateway_oidc_scopes.iter().find(|scope| !is_scope(scope)) {
            let words = format!("names scopes like `openid`, and `{scope}` is none");
            return Err(Invalid::new("gateway_oidc_scopes", words));
        }
        if self.gateway_scans_dir.as_deref().is_some_and(|path| !path.is_absolute()) {
            return Err(Invalid::new(
                "gateway_scans_dir",
                "must be an absolute path, as the interpreters know it",
            ));
        }
        if let Some(name) = self.gateway_pools.iter().find(|name| !compute::is_name(name)) {
            return Err(Invalid::new(
                "gateway_pools",
                format!(
                    "names pools like `cpu-2` (`[a-z][a-z0-9-]{{0,31}}`), and `{name}` is none"
                ),
            ));
        }
        if !self.gateway_pools.iter().any(|name| name == compute::DEFAULT) {
            let default = compute::DEFAULT;
            return Err(Invalid::new(
                "gateway_pools",
                format!("must have `{default}`, where scripts go by default"),
            ));
        }
        if !(1..=1_000_000).contains(&self.gateway_login_failures) {
            return Err(Invalid::new("gateway_login_failures", "must be between 1 and 1,000,000"));
        }
        if self.gateway_tls_certificate.is_some() != self.gateway_tls_key.is_some() {
            return Err(Invalid::new(
                "gateway_tls_key",
                "is needed with gateway_tls_certificate, and only then",
            ));
        }
        if self.gateway_tls_client_ca.is_some() && self.gateway_tls_certificate.is_none() {
            return Err(Invalid::new(
                "gateway_tls_client_ca",
                "asks for certificates, which takes gateway_tls_certificate",
            ));
        }
        // The database refuses to remove what is younger than 30 days, by its own clock.
        if !(31..=36_500).contains(&self.gateway_audit_keep) {
            return Err(Invalid::new("gateway_audit_keep", "must be between 31 and 36,500 days"));
        }
        // Parts of 2 MiB, and 10,000 of them.
        if !(1..=16 * 1024 * 1024 * 1024).contains(&self.gateway_files_max_bytes) {
            return Err(Invalid::new(
                "gateway_files_max_bytes",
                "must be between 1 and 17,179,869,184",
            ));
        }
        if let Some(pattern) = self
            .gateway_files_types
            .iter()
            .find(|pattern| !pattern.contains('/') || pattern.len() > 100)
        {
            let words = format!("names media types like `image/*`, and `{pattern}` is none");
            return Err(Invalid::new("gateway_files_types", words));
        }
        tiers::check(&self.gateway_tiers, &self.gateway_tier)?;
        if let Some(origin) = self.gateway_origins.iter().find(|origin| !is_origin(origin)) {
            let words = format!("names origins like `https://app.example`, and `{origin}` is none");
            return Err(Invalid::new("gateway_origins", words));
        }
        Proxies::new(&self.gateway_trusted_proxies)
            .map_err(|error| Invalid::new("gateway_trusted_proxies", error.to_string()))?;
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

/// Whether browsers would write an origin like this: a scheme, a host, a port that isn't the
/// scheme's own; no path.
fn is_origin(text: &str) -> bool {
    let host =
        text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or_default();
    !host.is_empty()
        && host.bytes().all(|byte| {
            byte.is_ascii_graphic() && !byte.is_ascii_uppercase() && !b"/?#@*".contains(&byte)
        })
}

/// Whether it can be one of several in a list with spaces between them (RFC 6749, 3.3).
fn is_scope(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\".contains(&byte))
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
        for (pools, fine) in [
            (vec!["cpu-2"], true),
            (vec!["cpu-2", "gpu"], true),
            (vec!["gpu"], false),
            (vec!["cpu-2", "G.P"], false),
        ] {
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
    fn trusted_proxies_are_in_networks_and_not_everywhere() {
        for (network, fine) in [
            ("10.20.0.0/16", true),
            ("fd00::/8", true),
            ("127.0.0.1", true),
            ("0.0.0.0/0", false),
            ("10.20.0.1/16", false),
            ("ingress.example", false),
        ] {
            let config =
                Config { gateway_trusted_proxies: vec![network.to_owned()], ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{network}");
        }
    }

    #[test]
    fn an_address_others_can_reach_needs_log_in() {
        for (address, gateway_login, fine) in [
            ("127.0.0.1:60080", Login::Local, true),
            ("[::1]:0", Login::Local, true),
            ("0.0.0.0:60080", Login::Local, false),
            ("[::]:60080", Login::Local, false),
            ("10.0.0.1:60080", Login::Local, false),
            ("0.0.0.0:60080", Login::Required, true),
        ] {
            let gateway_listen = address.parse().expect("an address");
            let config = Config { gateway_listen, gateway_login, ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{address}");
            let gateway_operator_listen = Some(gateway_listen);
            let config = Config { gateway_operator_listen, gateway_login, ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{address}");
        }
    }

    #[test]
    fn a_certificate_has_a_key_and_others_are_asked_for_theirs_only_then() {
        for (certificate, key, client_ca, fine) in [
            (false, false, false, true),
            (true, true, false, true),
            (true, true, true, true),
            (true, false, false, false),
            (false, true, false, false),
            (false, false, true, false),
        ] {
            let file = |there: bool| there.then(|| PathBuf::from("file.pem"));
            let config = Config {
                gateway_tls_certificate: file(certificate),
                gateway_tls_key: file(key),
                gateway_tls_client_ca: file(client_ca),
                ..Config::default()
            };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{certificate} {key} {client_ca}");
        }
    }

    #[test]
    fn tiers_have_names_and_limits_that_can_be_counted() {
        let tier = |name: &str, requests| {
            let limits = Limits { requests_per_minute: Some(requests), ..Limits::default() };
            BTreeMap::from([(name.to_owned(), limits)])
        };
        for (gateway_tiers, gateway_tier, fine) in [
            (BTreeMap::new(), "unlimited", true),
            (tier("free", 60), "free", true),
            (tier("free", 0), "unlimited", true),
            (tier("free", 60), "paid", false),
            (tier("free", -1), "free", false),
            (tier("free", 1_000_000_001), "free", false),
            (tier("unlimited", 60), "unlimited", false),
            (tier("Free", 60), "unlimited", false),
        ] {
            let config = Config {
                gateway_tiers,
                gateway_tier: gateway_tier.to_owned(),
                ..Config::default()
            };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{config:?}");
        }
    }

    #[test]
    fn an_issuer_is_reached_over_tls_and_has_an_audience() {
        for (issuer, audience, fine) in [
            (Some("https://login.example.com/realm"), Some("construct"), true),
            (Some("http://127.0.0.1:9000"), Some("construct"), true),
            (Some("http://login.example.com"), Some("construct"), false),
            (Some("local"), Some("construct"), false),
            (Some("https://login.example.com"), None, false),
            (None, Some("construct"), false),
        ] {
            let config = Config {
                gateway_oidc_issuer: issuer.map(str::to_owned),
                gateway_oidc_audience: audience.map(str::to_owned),
                ..Config::default()
            };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{issuer:?} {audience:?}");
        }
    }

    #[test]
    fn a_client_is_one_of_an_issuer_and_asks_for_scopes() {
        for (issuer, scopes, fine) in [
            (true, vec!["openid", "api://construct/.default"], true),
            (true, vec![], true),
            (false, vec!["openid"], false),
            (true, vec!["openid email"], false),
            (true, vec![""], false),
        ] {
            let config = Config {
                gateway_oidc_issuer: issuer.then(|| "https://login.example.com".to_owned()),
                gateway_oidc_audience: issuer.then(|| "construct".to_owned()),
                gateway_oidc_client_id: Some("cli".to_owned()),
                gateway_oidc_scopes: scopes.iter().map(|scope| (*scope).to_owned()).collect(),
                ..Config::default()
            };
            assert_eq!(config.validate(&common()).is_ok(), fine, "{issuer} {scopes:?}");
        }
    }
}
