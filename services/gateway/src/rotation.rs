//! `construct-gateway keys`: rotates the keys for encryption and signatures, one at a time and
//! without downtime (docs/operations.md).
//!
//! Keys are added, promoted, and retired, each in one reversible step except for the last: a key is
//! retired only when the database shows that nothing needs it.

mod file;

use std::{
    ffi::OsString,
    io::{Read as _, Write as _},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use construct_domain::{AuditEntryId, OrganizationId, UserId};
use construct_runtime::{
    Context, ServiceConfig, clock,
    config::{Common, Invalid},
};
use construct_store::{AuditEntry, KeyringKind, PoolOptions, SealedRows, Store};
use jiff::{SignedDuration, Timestamp};
use ring::rand::{SecureRandom as _, SystemRandom};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use self::file::{KeyFile, LockedFile};

/// The argument that selects this mode.
pub const MODE: &str = "keys";

const USAGE: &str = "usage: construct-gateway keys COMMAND FILE [--kind master|secrets|token]

  list FILE                which keys there are, which is the first, and what still needs them
  add FILE [--name NAME]   a new key, behind the others: then restart the services that have the file
  promote FILE NAME        makes it the first, which encrypts or signs: then restart them
  retire FILE NAME         takes it out when nothing needs it any more: then restart them
           [--at-once]     of token.key: although tokens may be valid that it has signed

FILE is `-` for standard input, with what comes of it on standard output. What kind of keys they are follows from the file's name
(master.key, secrets.key, token.key) or from --kind. `list` and `retire` ask the database of the gateway's configuration.";

/// Maximum lifetime of a token for models.
const TOKEN_LIFETIME: SignedDuration = SignedDuration::from_hours(7 * 24);

/// No keys besides the shared ones.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct Config {}

impl ServiceConfig for Config {
    // It may run next to a gateway, which uses the health address.
    const SERVES: bool = false;

    fn validate(&self, _: &Common) -> Result<(), Invalid> {
        Ok(())
    }
}

/// The purpose of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Master,
    Secrets,
    Token,
}

impl Kind {
    fn from_name(name: &str) -> Option<Self> {
        match name {
            "master" => Some(Self::Master),
            "secrets" => Some(Self::Secrets),
            "token" => Some(Self::Token),
            _ => None,
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Master => "master",
            Self::Secrets => "secrets",
            Self::Token => "token",
        }
    }

    /// The keyring in the database; it has none of tokens.
    const fn sealing(self) -> Option<KeyringKind> {
        match self {
            Self::Master => Some(KeyringKind::Credentials),
            Self::Secrets => Some(KeyringKind::Secrets),
            Self::Token => None,
        }
    }

    /// The services that use them, which must be restarted after a change.
    const fn holders(self) -> &'static str {
        match self {
            Self::Master => "gateway, providers, slack, scanner",
            Self::Secrets => "gateway, interpreter",
            Self::Token => "gateway, reconciler, providers",
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verb {
    List,
    Add { name: Option<String> },
    Promote { name: String },
    Retire { name: String, at_once: bool },
}

/// The command line.
#[derive(Debug, PartialEq, Eq)]
pub struct Command {
    verb: Verb,
    /// `None`: standard input.
    file: Option<PathBuf>,
    kind: Option<Kind>,
}

impl Command {
    /// Parses the arguments after [`MODE`].
    ///
    /// # Errors
    /// The usage text, for invalid arguments.
    pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Self, &'static str> {
        let (mut positional, mut kind, mut name, mut at_once) = (Vec::new(), None, None, false);
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let mut value =
                || arguments.next().and_then(|value| value.into_string().ok()).ok_or(USAGE);
            match argument.to_str() {
                Some("--kind") => kind = Some(Kind::from_name(&value()?).ok_or(USAGE)?),
                Some("--name") => name = Some(value()?),
                Some("--at-once") => at_once = true,
                Some(option) if option.starts_with("--") => return Err(USAGE),
                _ => positional.push(argument),
            }
        }
        let mut positional = positional.into_iter();
        let verb = positional.next().and_then(|verb| verb.into_string().ok()).ok_or(USAGE)?;
        let file = PathBuf::from(positional.next().ok_or(USAGE)?);
        let key = positional.next().map(OsString::into_string).transpose().map_err(|_| USAGE)?;
        if positional.next().is_some()
            || at_once && verb != "retire"
            || name.is_some() && verb != "add"
        {
            return Err(USAGE);
        }
        let verb = match (verb.as_str(), key) {
            ("list", None) => Verb::List,
            ("add", None) => Verb::Add { name },
            ("promote", Some(name)) => Verb::Promote { name },
            ("retire", Some(name)) => Verb::Retire { name, at_once },
            _ => return Err(USAGE),
        };
        let kind = kind.or_else(|| {
            let name = file.file_name()?.to_str()?;
            Kind::from_name(name.strip_suffix(".key")?)
        });
        Ok(Self { verb, file: (file != Path::new("-")).then_some(file), kind })
    }
}

/// Executes the command.
///
/// # Errors
/// When the file holds no keys or cannot be replaced, when the database does not answer, or a key
/// is needed.
pub async fn run(command: Command, context: &Context) -> anyhow::Result<()> {
    let url = context.common().database_url.as_ref().map(|url| url.expose().to_owned());
    let asks = matches!(command.verb, Verb::List | Verb::Retire { .. })
        && command.kind.and_then(Kind::sealing).is_some();
    let store = match url {
        Some(url) if asks => {
            let options = PoolOptions {
                application_name: "construct-keys".to_owned(),
                ..PoolOptions::default()
            };
            Some(Store::connect(&url, options).await.context("the database does not answer")?)
        }
        _ => None,
    };
    let output = perform(&command, store.as_ref(), clock::now()).await;
    if let Some(store) = store {
        store.close().await;
    }
    let output = output?;
    // Without a file, its new content is on standard output.
    if let Some(text) = &output.text {
        std::io::stdout().write_all(text.as_bytes()).context("the keys cannot be written")?;
        std::io::stderr().write_all(output.message.as_bytes())?;
    } else {
        std::io::stdout().write_all(output.message.as_bytes())?;
    }
    Ok(())
}

/// The message, and the new content of the keys when there is no file.
#[derive(Debug)]
pub(crate) struct CommandOutput {
    pub(crate) message: String,
    text: Option<String>,
}

pub(crate) async fn perform(
    command: &Command,
    store: Option<&Store>,
    now: Timestamp,
) -> anyhow::Result<CommandOutput> {
    let locked = command.file.as_deref().map(LockedFile::open).transpose()?;
    let (mut keys, changed) = match &locked {
        Some(locked) => (locked.read()?, Some(locked.modified_at()?)),
        None => {
            let mut text = String::new();
            std::io::stdin().read_to_string(&mut text).context("standard input cannot be read")?;
            (KeyFile::parse(&text)?, None)
        }
    };
    let holders = command.kind.map_or("the services that have it", Kind::holders);
    let message = match &command.verb {
        Verb::List => {
            return Ok(CommandOutput {
                message: list(&keys, command.kind, store).await?,
                text: None,
            });
        }
        Verb::Add { name } => {
            let mut key = [0; 32];
            SystemRandom::new()
                .fill(&mut key)
                .map_err(|_| anyhow::anyhow!("the system gives no randomness"))?;
            let id = keys.add(name.as_deref(), &key)?;
            format!(
                "`{id}` is added, but not used yet. Restart all of {holders}; then: keys promote … {id}\n"
            )
        }
        Verb::Promote { name } => {
            let before = keys.promote(name, now)?;
            format!(
                "`{name}` is active. Restart {holders}; they re-encrypt what `{before}` has encrypted. When \
                 nothing needs it: keys retire … {before}\n"
            )
        }
        Verb::Retire { name, at_once } => {
            // An edit by hand cannot have promoted another key after the file's last change.
            let until = keys.first_until(name).or(changed);
            keys.retire(name)?;
            check_unneeded(command.kind, &keys, (until, *at_once), store, now).await?;
            if let Some(store) = store {
                store
                    .audit_append(&[audit_entry(name, command.kind, now)])
                    .await
                    .context("the audit trail cannot be written")?;
            }
            format!("`{name}` is retired. Restart {holders}\n")
        }
    };
    match &locked {
        Some(locked) => locked.replace(&keys).map(|()| CommandOutput { message, text: None }),
        None => Ok(CommandOutput { message, text: Some(keys.text()) }),
    }
}

/// Checks that nothing needs a key that is not among `remaining`.
async fn check_unneeded(
    kind: Option<Kind>,
    remaining: &KeyFile,
    (until, at_once): (Option<Timestamp>, bool),
    store: Option<&Store>,
    now: Timestamp,
) -> anyhow::Result<()> {
    let Some(kind) = kind else {
        bail!("unknown kind of keys: use --kind master, secrets or token")
    };
    let Some(sealing) = kind.sealing() else {
        if at_once {
            return Ok(());
        }
        let Some(until) = until else {
            bail!(
                "nothing says since when it is not the first, so tokens that it has signed may be valid; --at-once ends them now"
            );
        };
        let ends = until + TOKEN_LIFETIME;
        ensure!(
            ends <= now,
            "tokens that it has signed may be valid until {ends:.0}; --at-once ends them now"
        );
        return Ok(());
    };
    let store = store
        .context("the database's address is needed, to see what the key still encrypts (CONSTRUCT_DATABASE_URL)")?;
    let ids = remaining.ids();
    let sealed = store.sealed_rows(sealing).await.context("the database does not answer")?;
    let lost: Vec<String> =
        sealed.iter().filter(|sealed| !ids.contains(&sealed.key.as_str())).map(describe).collect();
    ensure!(
        lost.is_empty(),
        "this could not be read any more: {}. The gateway encrypts again at its start what it has the key for, and so does slack",
        lost.join("; ")
    );
    let running =
        store.scripts_with_stale_secrets().await.context("the database does not answer")?;
    ensure!(
        kind != Kind::Secrets || running == 0,
        "{running} scripts are under way that began before the secrets were encrypted again; wait for their end"
    );
    Ok(())
}

fn describe(sealed: &SealedRows) -> String {
    format!("{} of {} (`{}`)", sealed.count, sealed.table, sealed.key)
}

async fn list(keys: &KeyFile, kind: Option<Kind>, store: Option<&Store>) -> anyhow::Result<String> {
    let sealed = match (kind.and_then(Kind::sealing), store) {
        (Some(sealing), Some(store)) => {
            Some(store.sealed_rows(sealing).await.context("the database does not answer")?)
        }
        _ => None,
    };
    let mut lines = String::new();
    for (index, id) in keys.ids().iter().enumerate() {
        let position = if index == 0 { "first" } else { "behind" };
        let mut facts = Vec::new();
        if let Some(sealed) = &sealed {
            let mine: Vec<String> =
                sealed.iter().filter(|sealed| sealed.key == *id).map(seals).collect();
            facts.push(if mine.is_empty() {
                "encrypts nothing".to_owned()
            } else {
                mine.join(", ")
            });
        }
        if let Some(until) = keys.first_until(id) {
            facts.push(format!("was the first until {until:.0}"));
            if kind == Some(Kind::Token) {
                facts.push(format!("tokens it has signed end by {:.0}", until + TOKEN_LIFETIME));
            }
        }
        lines.push_str(format!("{id:<32}  {position:<6}  {}", facts.join("; ")).trim_end());
        lines.push('\n');
    }
    for other in sealed.iter().flatten().filter(|sealed| !keys.ids().contains(&sealed.key.as_str()))
    {
        lines.push_str(&format!("{:<32}  {:<6}  {}\n", other.key, "absent", seals(other)));
    }
    Ok(lines)
}

fn seals(sealed: &SealedRows) -> String {
    format!("{} of {}", sealed.count, sealed.table)
}

fn audit_entry(name: &str, kind: Option<Kind>, now: Timestamp) -> AuditEntry {
    AuditEntry {
        id: AuditEntryId::from_uuid(Uuid::now_v7()),
        organization: OrganizationId::LOCAL,
        user: Some(UserId::LOCAL),
        api_key: None,
        method: "RetireKey".to_owned(),
        protocol: "command".to_owned(),
        peer: String::new(),
        user_agent: String::new(),
        objects: vec![name.to_owned(), kind.map_or("", Kind::name).to_owned()],
        code: 0,
        count: 1,
        request_id: String::new(),
        trace_id: String::new(),
        created_at: now,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn token_key_without_known_demotion_is_kept() {
        let keys = KeyFile::parse(&format!("left:{}", "A".repeat(43) + "=")).expect("a key");
        let now = Timestamp::now();
        let check = async |until, at_once| {
            check_unneeded(Some(Kind::Token), &keys, (until, at_once), None, now).await
        };
        let refusal = check(None, false).await.expect_err("it may be needed").to_string();
        assert!(refusal.contains("--at-once"), "{refusal}");
        assert!(check(Some(now - SignedDuration::from_hours(1)), false).await.is_err());
        assert!(
            check(Some(now - TOKEN_LIFETIME - SignedDuration::from_hours(1)), false).await.is_ok()
        );
        assert!(check(None, true).await.is_ok());
    }
}
