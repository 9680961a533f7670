//! The configuration of the gateway.

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

/// The gateway's own settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Config {
    /// The address of gRPC and the other protocols.
    pub gateway_listen: SocketAddr,
    /// Who has to log in.
    pub gateway_login: Login,
    /// Failed log-ins with tokens of the issuer per minute and address; beyond this, tokens of the
    /// address are refused without verification.
    pub gateway_login_failures: u32,
    /// A Unix socket that also serves gRPC, for processes of the same user, which are the operator.
    /// A socket passed to the process (systemd's `LISTEN_FDS`) is served instead.
    pub gateway_socket: Option<PathBuf>,
    /// The issuer of people's log-ins, as named in its tokens; set together with
    /// `gateway_oidc_audience`.
    pub gateway_oidc_issuer: Option<String>,
    /// The audience that tokens of the issuer must have.
    pub gateway_oidc_audience: Option<String>,
    /// The client id, at the issuer, of programs that people log in with (`construct login`): a
    /// public client. The gateway publishes it.
    pub gateway_oidc_client_id: Option<String>,
    /// The scopes that these programs request.
    pub gateway_oidc_scopes: Vec<String>,
    /// Maximum number of concurrent requests over all connections. Further ones are refused with
    /// `RESOURCE_EXHAUSTED`, because queued ones would time out anyway. One organization may have
    /// at most half of them; the operator's may have all.
    pub gateway_max_requests: usize,
    /// Maximum number of open subscriptions over all connections; each holds a buffer. Further ones
    /// are refused with `RESOURCE_EXHAUSTED`. One organization may have at most half of them; the
    /// operator's may have all.
    pub gateway_max_subscriptions: usize,
    /// The pools of interpreters; agents and tasks that name another one are refused. Each needs an
    /// interpreter that serves it (`interpreter_pools`).
    pub gateway_pools: Vec<String>,
    /// Origins, e.g. `https://app.example`, whose pages may call the gateway from a browser. Requests
    /// of pages of other origins are refused on every protocol.
    pub gateway_origins: Vec<String>,
    /// Further host names, e.g. `construct.test`, of a gateway on a loopback address, besides
    /// loopback's own. On other addresses a proxy in front decides that.
    pub gateway_hosts: Vec<String>,
    /// Networks of trusted proxies, e.g. `10.20.0.0/16` or `192.0.2.7`, whose `X-Forwarded-For`
    /// names the client of a request, for audit entries and limits per address. The header of
    /// others is ignored. Anyone in these networks can forge the header, so they must be the
    /// proxies' own network, and the proxies must append to the header or overwrite it. All
    /// addresses (`/0`) are refused.
    pub gateway_trusted_proxies: Vec<String>,
    /// The address of the operator protocol, e.g. `127.0.0.1:60100`. Not served by default, because
    /// the port is the same for every gateway of a machine. `./dev` sets it where that port is
    /// free, and docker-compose.yml does.
    pub gateway_operator_listen: Option<SocketAddr>,
    /// The folder where the interpreters see what the scanner has fetched (`scanner_dir`). If
    /// unset, there is no scanner, and scans are refused.
    pub gateway_scans_dir: Option<PathBuf>,
    /// Name or id of the agent that answers requests of the operator protocol that name none.
    pub gateway_operator_agent: Option<String>,
    /// A file with the TLS certificate chain (PEM) for the gRPC and operator ports; set together
    /// with `gateway_tls_key`. If unset, they use no TLS. Reloaded when it changes.
    pub gateway_tls_certificate: Option<PathBuf>,
    /// A file with the certificate's private key (PEM).
    pub gateway_tls_key: Option<PathBuf>,
    /// A file with CA certificates (PEM). Clients without a certificate of one of these CAs are
    /// refused; a certificate means nothing beyond that. If unset, clients need none.
    pub gateway_tls_client_ca: Option<PathBuf>,
    /// How long audit entries are kept, in days; at least 31.
    pub gateway_audit_keep: u32,
    /// Maximum size of an uploaded file in bytes; at most 16 GiB.
    pub gateway_files_max_bytes: u64,
    /// Accepted media types of files, with `*` for a part: `image/*`. An undeclared type is
    /// detected from the content, with `application/octet-stream` as the fallback.
    pub gateway_files_types: Vec<String>,
    /// The limits of each tier, by name: `[gateway_tiers.free]` with `requests_per_minute`,
    /// `key_requests_per_minute`, `tasks_per_day`, `runs_per_day`, `tokens_per_day`,
    /// `spend_per_month_pico_usd` and `storage_bytes`. Missing limits are unlimited. `unlimited`
    /// always exists.
    pub gateway_tiers: BTreeMap<String, Limits>,
    /// The tier of organizations without an assigned one. The operator's default is `unlimited`.
    pub gateway_tier: String,
    /// Maximum number of team organizations that a user may own, since each has its own quotas.
    /// Users who create them while working in the operator's are not limited.
    pub gateway_organizations_of_one: u32,
    /// The calendar of quotas. Not configurable: UTC, except in tests.
    #[serde(skip)]
    pub(crate) gateway_calendar: Calendar,
}

/// Who has to log in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Login {
    /// Callers without credentials are the operator: only loopback addresses are served.
    Local,
    /// Everybody, except for processes of the same user over `gateway_socket`.
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
                "must be an `https` URL, or `http` on this machine",
            ));
        }
        if self.gateway_oidc_issuer.is_some()
            != self.gateway_oidc_audience.as_deref().is_some_and(|text| !text.is_empty())
        {
            let message =
                "must be set exactly when gateway_oidc_issuer is set: the audience of its tokens";
            return Err(Invalid::new("gateway_oidc_audience", message));
        }
        if self.gateway_oidc_client_id.is_some() && self.gateway_oidc_issuer.is_none() {
            return Err(Invalid::new("gateway_oidc_client_id", "requires gateway_oidc_issuer"));
        }
        if let Some(scope) = self.gateway_oidc_scopes.iter().find(|scope| !is_scope(scope)) {
            let message = format!("`{scope}` is not a scope like `openid`");
            return Err(Invalid::new("gateway_oidc_scopes", message));
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
                format!("`{name}` is not a pool name like `cpu-2` (`[a-z][a-z0-9-]{{0,31}}`)"),
            ));
        }
        if !self.gateway_pools.iter().any(|name| name == compute::DEFAULT) {
            let default = compute::DEFAULT;
            return Err(Invalid::new(
                "gateway_pools",
                format!("must include the default pool `{default}`"),
            ));
        }
        if !(1..=1_000_000).contains(&self.gateway_login_failures) {
            return Err(Invalid::new("gateway_login_failures", "must be between 1 and 1,000,000"));
        }
        if self.gateway_tls_certificate.is_some() != self.gateway_tls_key.is_some() {
            return Err(Invalid::new(
                "gateway_tls_key",
                "must be set exactly when gateway_tls_certificate is set",
            ));
        }
        if self.gateway_tls_client_ca.is_some() && self.gateway_tls_certificate.is_none() {
            return Err(Invalid::new("gateway_tls_client_ca", "requires gateway_tls_certificate"));
        }
        // The database refuses to remove entries younger than 30 days by its own clock.
        if !(31..=36_500).contains(&self.gateway_audit_keep) {
            return Err(Invalid::new("gateway_audit_keep", "must be between 31 and 36,500 days"));
        }
        // 10,000 parts of 2 MiB.
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
            let message = format!("`{pattern}` is not a media type like `image/*`");
            return Err(Invalid::new("gateway_files_types", message));
        }
        tiers::check(&self.gateway_tiers, &self.gateway_tier)?;
        if let Some(origin) = self.gateway_origins.iter().find(|origin| !is_origin(origin)) {
            let message = format!("`{origin}` is not an origin like `https://app.example`");
            return Err(Invalid::new("gateway_origins", message));
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

/// Whether it has the format of browsers' origins: a scheme, a host, an optional non-default port,
/// and no path.
fn is_origin(text: &str) -> bool {
    let host =
        text.strip_prefix("https://").or_else(|| text.strip_prefix("http://")).unwrap_or_default();
    !host.is_empty()
        && host.bytes().all(|byte| {
            byte.is_ascii_graphic() && !byte.is_ascii_uppercase() && !b"/?#@*".contains(&byte)
        })
}

/// Whether it is a valid scope of a space-separated list (RFC 6749, 3.3).
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
    fn pools_must_be_names_and_include_the_default() {
        for (pools, is_valid) in [
            (vec!["cpu-2"], true),
            (vec!["cpu-2", "gpu"], true),
            (vec!["gpu"], false),
            (vec!["cpu-2", "G.P"], false),
        ] {
            let gateway_pools = pools.iter().map(|name| (*name).to_owned()).collect();
            let config = Config { gateway_pools, ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), is_valid, "{pools:?}");
        }
    }

    #[test]
    fn origin_must_match_the_format_of_browsers() {
        for (origin, is_valid) in [
            ("https://app.example", true),
            ("http://localhost:5173", true),
            ("https://app.example/", false),
            ("https://*.example", false),
            ("app.example", false),
            ("null", false),
            ("*", false),
        ] {
            let config = Config { gateway_origins: vec![origin.to_owned()], ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), is_valid, "{origin}");
        }
    }

    #[test]
    fn trusted_proxies_must_be_limited_networks() {
        for (network, is_valid) in [
            ("10.20.0.0/16", true),
            ("fd00::/8", true),
            ("127.0.0.1", true),
            ("0.0.0.0/0", false),
            ("10.20.0.1/16", false),
            ("ingress.example", false),
        ] {
            let config =
                Config { gateway_trusted_proxies: vec![network.to_owned()], ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), is_valid, "{network}");
        }
    }

    #[test]
    fn reachable_address_requires_log_in() {
        for (address, gateway_login, is_valid) in [
            ("127.0.0.1:60080", Login::Local, true),
            ("[::1]:0", Login::Local, true),
            ("0.0.0.0:60080", Login::Local, false),
            ("[::]:60080", Login::Local, false),
            ("10.0.0.1:60080", Login::Local, false),
            ("0.0.0.0:60080", Login::Required, true),
        ] {
            let gateway_listen = address.parse().expect("an address");
            let config = Config { gateway_listen, gateway_login, ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), is_valid, "{address}");
            let gateway_operator_listen = Some(gateway_listen);
            let config = Config { gateway_operator_listen, gateway_login, ..Config::default() };
            assert_eq!(config.validate(&common()).is_ok(), is_valid, "{address}");
        }
    }

    #[test]
    fn certificate_key_and_client_ca_are_consistent() {
        for (certificate, key, client_ca, is_valid) in [
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
            assert_eq!(
                config.validate(&common()).is_ok(),
                is_valid,
                "{certificate} {key} {client_ca}"
            );
        }
    }

    #[test]
    fn tiers_have_valid_names_and_limits() {
        let tier = |name: &str, requests| {
            let limits = Limits { requests_per_minute: Some(requests), ..Limits::default() };
            BTreeMap::from([(name.to_owned(), limits)])
        };
        for (gateway_tiers, gateway_tier, is_valid) in [
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
            assert_eq!(config.validate(&common()).is_ok(), is_valid, "{config:?}");
        }
    }

    #[test]
    fn issuer_needs_tls_and_an_audience() {
        for (issuer, audience, is_valid) in [
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
            assert_eq!(config.validate(&common()).is_ok(), is_valid, "{issuer:?} {audience:?}");
        }
    }

    #[test]
    fn client_needs_an_issuer_and_valid_scopes() {
        for (issuer, scopes, is_valid) in [
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
            assert_eq!(config.validate(&common()).is_ok(), is_valid, "{issuer} {scopes:?}");
        }
    }
}
