//! API keys: how programs log in.

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
    hidden, money,
    output::{Entity, Format, OutputArgs, print},
    page::ListArgs,
    time,
    words::thousands,
};

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make one, and print it. It is shown this once.
    Create(Create),
    /// Show one, with its limits and how much of them is used.
    Get {
        /// Its id.
        key: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List yours; admins see all.
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Change the limits of one. What is not said stays as it is.
    Limit(Limit),
    /// Make one worthless, at once.
    Revoke {
        /// Its id.
        key: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Make a code that a new client exchanges for a key, once, and print it.
    Code {
        #[command(flatten)]
        key: KeyArgs,
        /// How long the key will hold, once there is one; for ever when not given.
        #[arg(long, value_name = "TIME", value_parser = time::parse_duration)]
        key_expires: Option<Duration>,
        /// How long the code can be exchanged, at most 1d.
        #[arg(long, value_name = "TIME", default_value = "15m", value_parser = time::parse_duration)]
        expires: Duration,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Exchange a code for a key, and print the key. The code is asked for, or read from standard
    /// input.
    Exchange {
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Limit {
    /// Its id.
    key: String,
    #[command(flatten)]
    limits: LimitArgs,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// How much may be done with a key, within what the organization may.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Calls of the API with it: a number, or `none` for no limit of its own.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    requests_per_minute: Option<Said>,
    /// Tasks begun with it.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    tasks_per_day: Option<Said>,
    /// Steps that run scripts.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    runs_per_day: Option<Said>,
    /// Tokens that models read and write.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    tokens_per_day: Option<Said>,
    /// What models may cost.
    #[arg(long, value_name = "DOLLARS", value_parser = parse_dollars)]
    spend_per_month: Option<Said>,
    /// Bytes of files, of uploads for scans and of documents that are kept.
    #[arg(long, value_name = "N", value_parser = parse_number)]
    storage_bytes: Option<Said>,
}

/// A limit as it is said: a number, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Said(Option<i64>);

/// What stands for no limit.
const NONE: &str = "none";

fn parse_number(text: &str) -> Result<Said, String> {
    if text == NONE {
        return Ok(Said(None));
    }
    let number = text.parse::<i64>().ok().filter(|number| *number >= 0);
    number.map(|number| Said(Some(number))).ok_or_else(|| "write a number, or `none`".to_owned())
}

fn parse_dollars(text: &str) -> Result<Said, String> {
    if text == NONE {
        return Ok(Said(None));
    }
    match money::parse_limit(text) {
        Ok(money::Limit { pico_usd, period: None }) => Ok(Said(Some(pico_usd))),
        _ => Err("write dollars, like 5 or 2.50, or `none`".to_owned()),
    }
}

impl LimitArgs {
    /// What is said, and otherwise what there was.
    fn over(&self, before: ApiKeyLimits) -> ApiKeyLimits {
        let said = |limit: Option<Said>, before| limit.map_or(before, |limit| limit.0);
        ApiKeyLimits {
            requests_per_minute: said(self.requests_per_minute, before.requests_per_minute),
            tasks_per_day: said(self.tasks_per_day, before.tasks_per_day),
            runs_per_day: said(self.runs_per_day, before.runs_per_day),
            tokens_per_day: said(self.tokens_per_day, before.tokens_per_day),
            spend_per_month_pico_usd: said(self.spend_per_month, before.spend_per_month_pico_usd),
            storage_bytes: said(self.storage_bytes, before.storage_bytes),
        }
    }
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    #[command(flatten)]
    key: KeyArgs,
    /// How long it holds; for ever when not given.
    #[arg(long, value_name = "TIME", value_parser = time::parse_duration)]
    expires: Option<Duration>,
    #[command(flatten)]
    output: OutputArgs,
}

/// What a key is.
#[derive(Debug, Args)]
pub(crate) struct KeyArgs {
    /// What it is for.
    name: String,
    /// What it is good for, as `tasks:read`; can be given several times. `admin` is everything that
    /// the role allows.
    #[arg(long = "scope", value_name = "SCOPE", required = true)]
    scopes: Vec<String>,
    /// viewer, member, admin or owner; yours when not given.
    #[arg(long, value_parser = parse_role)]
    role: Option<Role>,
    #[command(flatten)]
    limits: LimitArgs,
}

impl KeyArgs {
    fn spec(self) -> ApiKeySpec {
        let role = self.role.unwrap_or(Role::Unspecified);
        let limits = Some(self.limits.over(ApiKeyLimits::default()));
        ApiKeySpec { name: self.name, role: role.into(), scopes: self.scopes, limits }
    }
}

fn lasting(duration: Duration) -> Option<prost_types::Duration> {
    prost_types::Duration::try_from(duration).ok()
}

impl KeyCommand {
    /// # Errors
    /// What the gateway fails with.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(Create { key, expires, output }) => {
                let request = CreateApiKeyRequest {
                    spec: Some(key.spec()),
                    expires_in: expires.and_then(lasting),
                };
                shown(&call(gateway.keys().create_api_key(request)).await?, output)
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
            Self::Get { key, output } => output
                .one(&call(gateway.keys().get_api_key(GetApiKeyRequest { api_key: key })).await?),
            Self::Limit(Limit { key, limits, write, output }) => {
                let before =
                    call(gateway.keys().get_api_key(GetApiKeyRequest { api_key: key.clone() }))
                        .await?;
                let request = UpdateApiKeyRequest {
                    api_key: key,
                    limits: Some(
                        limits.over(before.spec.and_then(|spec| spec.limits).unwrap_or_default()),
                    ),
                    // What somebody else has said meanwhile is not undone.
                    revision: before.metadata.map(|metadata| metadata.revision).unwrap_or_default(),
                    idempotency_key: write.key(),
                };
                output.one(&call(gateway.keys().update_api_key(request)).await?)
            }
            Self::Revoke { key, write, output } => {
                let request = RevokeApiKeyRequest { api_key: key, idempotency_key: write.key() };
                output.one(&call(gateway.keys().revoke_api_key(request)).await?)
            }
            Self::Code { key, key_expires, expires, output } => {
                let request = CreateSetupCodeRequest {
                    spec: Some(key.spec()),
                    key_expires_in: key_expires.and_then(lasting),
                    expires_in: lasting(expires),
                };
                let code = call(gateway.keys().create_setup_code(request)).await?;
                output.words("construct.v1.SetupCode", &code, &format!("{}\n", code.code))
            }
            Self::Exchange { output } => {
                let request =
                    ExchangeSetupCodeRequest { code: hidden::read("code: ")?.trim().to_owned() };
                shown(&call(gateway.keys().exchange_setup_code(request)).await?, output)
            }
        }
    }
}

/// The key alone on standard output, so that a shell can take it: `CONSTRUCT_KEY=$(construct key
/// create …)`.
fn shown(made: &CreateApiKeyResponse, output: OutputArgs) -> Result<(), Failure> {
    if output.format() != Format::Table {
        return output.words("construct.v1.CreateApiKeyResponse", made, "");
    }
    for (name, value) in made.api_key.clone().unwrap_or_default().details(Timestamp::now()) {
        if !value.is_empty() {
            eprintln!("{name:<10} {value}");
        }
    }
    print(&format!("{}\n", made.key))
}

/// `12 of 100 tasks a day, $1.20 of $5.00 a month`; without what was used, the limits alone.
/// Nothing where nothing is limited.
fn limits(limits: &ApiKeyLimits, used: Option<&ApiKeyUsage>) -> String {
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
        (number, limits.storage_bytes, used.map(|used| used.storage_bytes), " bytes kept"),
    ];
    let mut parts = Vec::new();
    for (show, limit, used, what) in rows {
        if let Some(limit) = limit {
            let used = used.map(|used| format!("{} of ", show(used))).unwrap_or_default();
            parts.push(format!("{used}{}{what}", show(limit)));
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
        let limits = limits(&spec.limits.unwrap_or_default(), self.used.as_ref());
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
    fn limits_are_numbers_dollars_or_none_and_what_is_not_said_stays() {
        assert_eq!(parse_number("100"), Ok(Said(Some(100))));
        assert_eq!(parse_number("none"), Ok(Said(None)));
        assert_eq!(parse_dollars("2.50"), Ok(Said(Some(2_500_000_000_000))));
        for wrong in ["-1", "", "1.5", "tier"] {
            assert!(parse_number(wrong).is_err(), "{wrong}");
        }
        assert!(parse_dollars("5/month").is_err());
        let before = ApiKeyLimits {
            tasks_per_day: Some(5),
            runs_per_day: Some(7),
            ..ApiKeyLimits::default()
        };
        let args = LimitArgs {
            requests_per_minute: None,
            tasks_per_day: Some(Said(None)),
            runs_per_day: None,
            tokens_per_day: Some(Said(Some(0))),
            spend_per_month: None,
            storage_bytes: Some(Said(Some(1000))),
        };
        let after = ApiKeyLimits {
            runs_per_day: Some(7),
            tokens_per_day: Some(0),
            storage_bytes: Some(1000),
            ..ApiKeyLimits::default()
        };
        assert_eq!(args.over(before), after);
    }

    #[test]
    fn limits_are_shown_with_what_is_used_where_that_is_known() {
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
        let shown = "60 requests a minute, 12 of 1,000 tasks a day, $1.20 of $5.00 a month, 4,096 of 2,000,000 bytes kept";
        assert_eq!(limits(&limited, Some(&used)), shown);
        let alone = "60 requests a minute, 1,000 tasks a day, $5.00 a month, 2,000,000 bytes kept";
        assert_eq!(limits(&limited, None), alone);
        assert_eq!(limits(&ApiKeyLimits::default(), Some(&used)), "");
    }
}
