//! `construct key`: API keys, the credentials of programs.

use std::time::Duration;

use clap::{Args, Subcommand};
use construct_proto::v1::{
    ApiKey, ApiKeyLimits, ApiKeySpec, ApiKeyUsage, CreateApiKeyRequest, CreateApiKeyResponse,
    CreateSetupCodeRequest, ExchangeSetupCodeRequest, GetApiKeyRequest, ListApiKeysRequest,
    RevokeApiKeyRequest, Role, UpdateApiKeyRequest,
};
use jiff::Timestamp;

use super::{
    WriteArgs, age, id,
    organization::{parse_role, role},
};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money,
    output::{Entity, Format, OutputArgs, print},
    page::ListArgs,
    secret_input,
    text::thousands,
    time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Create an API key, and print it once.
    Create(Create),
    /// Show an API key with its limits and usage.
    Get {
        /// The id of the API key.
        key: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List your API keys; admins see all.
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Change the given limits of an API key.
    Limit(Limit),
    /// Revoke an API key immediately.
    Revoke {
        /// The id of the API key.
        key: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Create a setup code, which a new client exchanges for an API key once.
    Code {
        #[command(flatten)]
        key: KeyArgs,
        /// How long the key is valid after the exchange. Default: forever.
        #[arg(long, value_name = "TIME", value_parser = time::parse_duration)]
        key_expires: Option<Duration>,
        /// How long the code is valid, at most 1d.
        #[arg(long, value_name = "TIME", default_value = "15m", value_parser = time::parse_duration)]
        expires: Duration,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Exchange a setup code for an API key, and print the key. Prompts for the code, or reads it
    /// from standard input.
    Exchange {
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Limit {
    /// The id of the API key.
    key: String,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Limits of a key, within the quotas of the organization.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// API requests: a number, or `none` for no limit of the key.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    requests_per_minute: Option<LimitValue>,
    /// Created tasks.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    tasks_per_day: Option<LimitValue>,
    /// Steps that execute scripts.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    runs_per_day: Option<LimitValue>,
    /// Input and output tokens of models.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    tokens_per_day: Option<LimitValue>,
    /// Costs of models.
    #[arg(long, value_name = "DOLLARS", value_parser = parse_dollars)]
    spend_per_month: Option<LimitValue>,
    /// Stored bytes of files, scan uploads and documents.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    storage_bytes: Option<LimitValue>,
}

/// A limit argument: a number, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct LimitValue(Option<i64>);

/// The argument for no limit.
const NONE: &str = "none";

fn parse_number(text: &str) -> Result<LimitValue, String> {
    if text == NONE {
        return Ok(LimitValue(None));
    }
    let number = text.parse::<i64>().ok().filter(|number| *number >= 0);
    number
        .map(|number| LimitValue(Some(number)))
        .ok_or_else(|| "write a number, or `none`".to_owned())
}

fn parse_dollars(text: &str) -> Result<LimitValue, String> {
    if text == NONE {
        return Ok(LimitValue(None));
    }
    match money::parse_limit(text) {
        Ok(money::Limit { pico_usd, period: None }) => Ok(LimitValue(Some(pico_usd))),
        _ => Err("write dollars, like 5 or 2.50, or `none`".to_owned()),
    }
}

impl LimitArgs {
    /// The given limits, with the others from `base`.
    fn merge(&self, base: ApiKeyLimits) -> ApiKeyLimits {
        let merge = |limit: Option<LimitValue>, base| limit.map_or(base, |limit| limit.0);
        ApiKeyLimits {
            requests_per_minute: merge(self.requests_per_minute, base.requests_per_minute),
            tasks_per_day: merge(self.tasks_per_day, base.tasks_per_day),
            runs_per_day: merge(self.runs_per_day, base.runs_per_day),
            tokens_per_day: merge(self.tokens_per_day, base.tokens_per_day),
            spend_per_month_pico_usd: merge(self.spend_per_month, base.spend_per_month_pico_usd),
            storage_bytes: merge(self.storage_bytes, base.storage_bytes),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    #[command(flatten)]
    key: KeyArgs,
    /// How long the key is valid. Default: forever.
    #[arg(long, value_name = "TIME", value_parser = time::parse_duration)]
    expires: Option<Duration>,
    #[command(flatten)]
    output: OutputArgs,
}

/// The fields of a key.
#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    /// The name of the key.
    name: String,
    /// A scope, e.g. `tasks:read`. Repeatable. `admin` includes everything that the role allows.
    #[arg(long = "scope", value_name = "SCOPE", required = true)]
    scopes: Vec<String>,
    /// The role: viewer, member, admin or owner. Default: yours.
    #[arg(long, value_parser = parse_role)]
    role: Option<Role>,
    #[command(flatten)]
    limits: LimitArgs,
}

impl KeyArgs {
    fn spec(self) -> ApiKeySpec {
        let role = self.role.unwrap_or(Role::Unspecified);
        let limits = Some(self.limits.merge(ApiKeyLimits::default()));
        ApiKeySpec { name: self.name, role: role.into(), scopes: self.scopes, limits }
    }
}

fn proto_duration(duration: Duration) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(duration).ok()
}

impl KeyCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(Create { key, expires, output }) => {
                let request = CreateApiKeyRequest {
                    spec: Some(key.spec()),
                    expires_in: expires.and_then(proto_duration),
                };
                print_created(&call(gateway.keys().create_api_key(request)).await?, output)
            }
            Self::List { list, output } => {
                let listed = list
                    .collect(|page| async move {
                        let request = ListApiKeysRequest { page: Some(page) };
                        let response = call(gateway.keys().list_api_keys(request)).await?;
                        Ok((response.api_keys, response.page))
                    })
                    .await?;
                output.list(&listed)
            }
            Self::Get { key, output } => output.entity(
                &call(gateway.keys().get_api_key(GetApiKeyRequest { api_key: key })).await?,
            ),
            Self::Limit(Limit { key, limits, write, output }) => {
                let current =
                    call(gateway.keys().get_api_key(GetApiKeyRequest { api_key: key.clone() }))
                        .await?;
                let request = UpdateApiKeyRequest {
                    api_key: key,
                    limits: Some(
                        limits.merge(current.spec.and_then(|spec| spec.limits).unwrap_or_default()),
                    ),
                    // A concurrent change is not overwritten.
                    revision: current
                        .metadata
                        .map(|metadata| metadata.revision)
                        .unwrap_or_default(),
                    idempotency_key: write.key(),
                };
                output.entity(&call(gateway.keys().update_api_key(request)).await?)
            }
            Self::Revoke { key, write, output } => {
                let request = RevokeApiKeyRequest { api_key: key, idempotency_key: write.key() };
                output.entity(&call(gateway.keys().revoke_api_key(request)).await?)
            }
            Self::Code { key, key_expires, expires, output } => {
                let request = CreateSetupCodeRequest {
                    spec: Some(key.spec()),
                    key_expires_in: key_expires.and_then(proto_duration),
                    expires_in: proto_duration(expires),
                };
                let code = call(gateway.keys().create_setup_code(request)).await?;
                output.message("construct.v1.SetupCode", &code, &format!("{}\n", code.code))
            }
            Self::Exchange { output } => {
                let request = ExchangeSetupCodeRequest {
                    code: secret_input::read("code: ")?.trim().to_owned(),
                };
                print_created(&call(gateway.keys().exchange_setup_code(request)).await?, output)
            }
        }
    }
}

/// Prints only the key on standard output, for use in a shell: `CONSTRUCT_KEY=$(construct key
/// create …)`.
fn print_created(response: &CreateApiKeyResponse, output: OutputArgs) -> Result<(), Failure> {
    if output.format() != Format::Table {
        return output.message("construct.v1.CreateApiKeyResponse", response, "");
    }
    for (name, value) in response.api_key.clone().unwrap_or_default().details(Timestamp::now()) {
        if !value.is_empty() {
            eprintln!("{name:<10} {value}");
        }
    }
    print(&format!("{}\n", response.key))
}

/// Formats limits with the usage, if known: `12 of 100 tasks a day, $1.20 of $5.00 a month`. Empty
/// without limits.
fn describe_limits(limits: &ApiKeyLimits, used: Option<&ApiKeyUsage>) -> String {
    let number: fn(i64) -> String = thousands;
    let rows = [
        (number, limits.requests_per_minute, None, " requests a minute"),
        (number, limits.tasks_per_day, used.map(|used| used.tasks), " tasks a day"),
        (number, limits.runs_per_day, used.map(|used| used.runs), " runs a day"),
        (number, limits.tokens_per_day, used.map(|used| used.tokens), " tokens a day"),
        (
            money::cost,
            limits.spend_per_month_pico_usd,
            used.map(|used| used.spend_pico_usd),
            " a month",
        ),
        (number, limits.storage_bytes, used.map(|used| used.storage_bytes), " bytes stored"),
    ];
    let mut parts = Vec::new();
    for (format, limit, used, unit) in rows {
        if let Some(limit) = limit {
            let used = used.map(|used| format!("{} of ", format(used))).unwrap_or_default();
            parts.push(format!("{used}{}{unit}", format(limit)));
        }
    }
    parts.join(", ")
}

fn state(key: &ApiKey, now: Timestamp) -> String {
    let at = |time| time::read(time);
    if at(key.revoked_at.as_ref()).is_some() {
        return "revoked".to_owned();
    }
    match at(key.expires_at.as_ref()) {
        Some(expires) if expires <= now => "expired".to_owned(),
        Some(expires) => format!("valid for {}", time::distance(now, expires)),
        None => "valid".to_owned(),
    }
}

impl Entity for ApiKey {
    const NAME: &'static str = "construct.v1.ApiKey";
    const PLURAL: &'static str = "apiKeys";
    const COLUMNS: &'static [&'static str] =
        &["NAME", "KEY", "ROLE", "SCOPES", "STATE", "USED", "AGE", "ID"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let (spec, metadata) = (self.spec.clone().unwrap_or_default(), self.metadata.as_ref());
        let used = time::read(self.last_used_at.as_ref())
            .map(|at| time::relative(at, now))
            .unwrap_or_default();
        let (role, scopes) = (role(spec.role()), spec.scopes.join(", "));
        vec![
            spec.name,
            format!("{}…", self.prefix),
            role,
            scopes,
            state(self, now),
            used,
            age(metadata, now),
            id(metadata),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let used = time::read(self.last_used_at.as_ref())
            .map(|at| time::relative(at, now))
            .unwrap_or_default();
        let limits = describe_limits(&spec.limits.unwrap_or_default(), self.used.as_ref());
        vec![
            ("role", role(spec.role())),
            ("scopes", spec.scopes.join(", ")),
            ("name", spec.name),
            ("id", id(self.metadata.as_ref())),
            ("user", self.user_id.clone()),
            ("state", state(self, now)),
            ("last used", used),
            ("limits", limits),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_arguments_are_parsed_and_merged() {
        assert_eq!(parse_number("100"), Ok(LimitValue(Some(100))));
        assert_eq!(parse_number("none"), Ok(LimitValue(None)));
        assert_eq!(parse_dollars("2.50"), Ok(LimitValue(Some(2_500_000_000_000))));
        for invalid in ["-1", "", "1.5", "tier"] {
            assert!(parse_number(invalid).is_err(), "{invalid}");
        }
        assert!(parse_dollars("5/month").is_err());
        let base = ApiKeyLimits {
            tasks_per_day: Some(5),
            runs_per_day: Some(7),
            ..ApiKeyLimits::default()
        };
        let args = LimitArgs {
            requests_per_minute: None,
            tasks_per_day: Some(LimitValue(None)),
            runs_per_day: None,
            tokens_per_day: Some(LimitValue(Some(0))),
            spend_per_month: None,
            storage_bytes: Some(LimitValue(Some(1000))),
        };
        let merged = ApiKeyLimits {
            runs_per_day: Some(7),
            tokens_per_day: Some(0),
            storage_bytes: Some(1000),
            ..ApiKeyLimits::default()
        };
        assert_eq!(args.merge(base), merged);
    }

    #[test]
    fn limits_are_formatted_with_known_usage() {
        let limited = ApiKeyLimits {
            requests_per_minute: Some(60),
            tasks_per_day: Some(1000),
            spend_per_month_pico_usd: Some(5_000_000_000_000),
            storage_bytes: Some(2_000_000),
            ..ApiKeyLimits::default()
        };
        let used = ApiKeyUsage {
            tasks: 12,
            spend_pico_usd: 1_200_000_000_000,
            storage_bytes: 4096,
            ..ApiKeyUsage::default()
        };
        let expected = "60 requests a minute, 12 of 1,000 tasks a day, $1.20 of $5.00 a month, 4,096 of 2,000,000 bytes stored";
        assert_eq!(describe_limits(&limited, Some(&used)), expected);
        let expected =
            "60 requests a minute, 1,000 tasks a day, $5.00 a month, 2,000,000 bytes stored";
        assert_eq!(describe_limits(&limited, None), expected);
        assert_eq!(describe_limits(&ApiKeyLimits::default(), Some(&used)), "");
    }
}
