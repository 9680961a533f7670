//! API keys: how programs log in.

use std::time::Duration;

use clap::{Args, Subcommand};
use construct_proto::v1::{
    ApiKey, ApiKeySpec, CreateApiKeyRequest, CreateApiKeyResponse, CreateSetupCodeRequest, ExchangeSetupCodeRequest,
    ListApiKeysRequest, RevokeApiKeyRequest, Role,
};
use jiff::Timestamp;

use super::{
    WriteArgs, age, id,
    organization::{parse_role, role},
};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    hidden,
    output::{Entity, Format, OutputArgs, print},
    page::ListArgs,
    time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
    /// Make one, and print it. It is shown this once.
    Create(Create),
    /// List yours; admins see all.
    List {
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
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
    /// Exchange a code for a key, and print the key. The code is asked for, or read from standard input.
    Exchange {
        #[command(flatten)]
        output: OutputArgs,
    },
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
    /// What it is good for, as `tasks:read`; can be given several times. `admin` is everything that the role allows.
    #[arg(long = "scope", value_name = "SCOPE", required = true)]
    scopes: Vec<String>,
    /// viewer, member, admin or owner; yours when not given.
    #[arg(long, value_parser = parse_role)]
    role: Option<Role>,
}

impl KeyArgs {
    fn spec(self) -> ApiKeySpec {
        let role = self.role.unwrap_or(Role::Unspecified);
        ApiKeySpec { name: self.name, role: role.into(), scopes: self.scopes }
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
                let request = CreateApiKeyRequest { spec: Some(key.spec()), expires_in: expires.and_then(lasting) };
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
                let request = ExchangeSetupCodeRequest { code: hidden::read("code: ")?.trim().to_owned() };
                shown(&call(gateway.keys().exchange_setup_code(request)).await?, output)
            }
        }
    }
}

/// The key alone on standard output, so that a shell can take it: `CONSTRUCT_KEY=$(construct key create …)`.
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
    const COLUMNS: &'static [&'static str] = &["NAME", "KEY", "ROLE", "SCOPES", "STATE", "USED", "AGE", "ID"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let (spec, metadata) = (self.spec.clone().unwrap_or_default(), self.metadata.as_ref());
        let used = time::read(self.last_used_at.as_ref()).map(|at| time::relative(at, now)).unwrap_or_default();
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
        let used = time::read(self.last_used_at.as_ref()).map(|at| time::relative(at, now)).unwrap_or_default();
        vec![
            ("role", role(spec.role())),
            ("scopes", spec.scopes.join(", ")),
            ("name", spec.name),
            ("id", id(self.metadata.as_ref())),
            ("user", self.user_id.clone()),
            ("state", state(self, now)),
            ("last used", used),
        ]
    }
}
