//! `secrets.get`, and what becomes of the handles it gives.
//!
//! A script never sees a value. It gets a handle, a text that says nothing, and writes that where
//! the value is to stand: in a header of `fetch`, or in the environment of a command. Policies, the
//! journal and everybody who watches see the handle as well. The value is put in its place at the
//! last moment, when it is clear to whom it goes, and taken out of what comes back in the same
//! exchange. In any other text nothing is compared with a value: a script could find out by it what
//! the value is.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use construct_domain::secret;
use construct_proto::mesh::v1::GrantedSecret;
use construct_runtime::{MasterKeys, OpenError};
use secrecy::{ExposeSecret as _, SecretString};
use serde::Deserialize;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::egress::HostPattern;
use super::error::ToolError;
use super::kind::{Kind, required};
use super::output::Output;
use super::subject;
use crate::scrub::{Pattern, Scrubber};

pub(super) const GET: Definition = Definition {
    name: "secrets.get",
    aliases: &[],
    summary: "Returns a handle that stands for a secret, such as a token or a password. Nobody here sees the secret itself.",
    description: "Write the handle anywhere in the value of a header of fetch, or of an environment variable of a command \
        (options.env, setenv): the secret is put in its place when that goes out, to the hosts and commands that it is bound \
        to. Nowhere else. Where the answer or the output repeats it, the handle stands again. A handle holds for the scripts of one message.",
    parameters: &[required(
        "name",
        Kind::Text { min_bytes: 1, max_bytes: 256 },
        "Name of the secret.",
    )],
    output: Output::Text,
    base_tool: None,
    example: "fetch(url, { headers: { authorization: `Bearer ${secrets.get(\"API_TOKEN\")}` } })",
    errors: &[NOT_FOUND, UNAVAILABLE],
    effect: Effect::Read,
    permission: Permission::Pure,
    subject: subject::none,
    provider: Provider::Host,
    limits: limits(1, 1),
};

pub(super) const NOT_FOUND: (&str, &str) = (
    "SecretNotFound",
    "when there is no such secret, or a handle is of another message; the message names those there are.",
);

pub(super) const UNAVAILABLE: (&str, &str) =
    ("SecretUnavailable", "when a secret cannot be opened, which is not the script's fault.");

pub(super) const NOT_ALLOWED: (&str, &str) =
    ("SecretNotAllowed", "when a secret is not bound to where it would go; nothing was done.");

/// What a handle begins and ends with; between are the name, a colon and so many hexadecimal
/// digits.
const OPEN: &str = "{{secret:";
const CLOSE: &str = "}}";
const DIGITS: usize = 16;

/// Most bytes of one environment variable with the secrets in it: the kernel takes no longer one
/// than 128 KiB.
const MAX_VARIABLE: usize = 128 * 1024 - 512;

/// Most bytes of all variables of a command, secrets included.
const MAX_ENVIRONMENT: usize = 512 * 1024;

/// Variables by which a script could have something else run in the place of the program that a
/// secret is bound to, or before it; and how the names of others begin.
const STEERING: [&str; 9] =
    ["PATH", "ENV", "IFS", "PS4", "SHELLOPTS", "BASHOPTS", "CDPATH", "GCONV_PATH", "LOCPATH"];
const STEERING_PREFIXES: [&str; 3] = ["LD_", "BASH_", "GLIBC_"];

/// Most bytes of all secrets of one execution. Each is looked for in dozens of forms, which are
/// kept in memory.
const MAX_TOGETHER: usize = 256 * 1024;

/// The secrets that the scripts of one execution may use.
#[derive(Default)]
pub struct Secrets {
    list: Vec<Secret>,
}

/// The secrets whose values went out in one exchange: with the requests of one `fetch`, or to one
/// command. By their places in the list.
#[derive(Debug, Default)]
pub(super) struct Sent(BTreeSet<usize>);

struct Secret {
    name: String,
    handle: String,
    /// Or why there is none.
    value: Result<SecretString, String>,
    /// Made when the value is first sent: it takes milliseconds and megabytes for a value of many
    /// kilobytes.
    pattern: OnceLock<Arc<Pattern>>,
    hosts: Vec<HostPattern>,
    commands: Vec<String>,
}

/// Names only.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.list.iter().map(|secret| &secret.name)).finish()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    name: String,
}

impl Secrets {
    /// Opens what a command carries. `seed` is that of the execution: the handles follow from it,
    /// so that a script which is run again gets the same. It is known to nobody who runs in the
    /// sandbox, and so are handles that were not asked for.
    ///
    /// A secret that cannot be opened is there as well, and says so when it is asked for.
    #[must_use]
    pub fn open(granted: &[GrantedSecret], keys: Option<&MasterKeys>, seed: &[u8]) -> Self {
        let mut room = MAX_TOGETHER;
        let list = granted
            .iter()
            .take(secret::MAX_PER_AGENT)
            .map(|one| Secret::open(one, keys, seed, &mut room))
            .collect();
        Self { list }
    }

    /// The tool.
    pub(super) fn get(&self, Named { name }: &Named) -> Result<String, ToolError> {
        let secret = self
            .list
            .iter()
            .find(|secret| secret.name == *name)
            .ok_or_else(|| self.not_found(name))?;
        secret.value()?;
        Ok(secret.handle.clone())
    }

    /// Finds the secrets of an exchange in what comes back from it.
    pub(super) fn scrubber(&self, Sent(sent): &Sent) -> Arc<Scrubber> {
        let secrets = sent.iter().filter_map(|number| self.list.get(*number));
        Arc::new(Scrubber::new(secrets.filter_map(Secret::pattern)))
    }

    /// The value of a header with the secrets in it, for a request to `host`; none when there is no
    /// handle in it. `room` is how long it may become. Which secrets those are is added to `used`.
    pub(super) fn in_header(
        &self,
        text: &str,
        host: &str,
        room: usize,
        used: &mut Sent,
    ) -> Result<Option<SecretString>, ToolError> {
        let too_long = || {
            ToolError::invalid(
                "fetch: with the secrets in them the headers are too long; nothing was sent.",
            )
        };
        self.fill(text, room, used, too_long, &|secret| {
            if secret.hosts.iter().any(|pattern| pattern.matches(host)) {
                return Ok(());
            }
            let name = &secret.name;
            Err(secret.not_allowed(format!(
                "fetch: the secret {name} may not be sent to {host:?}, and nothing was sent"
            )))
        })
    }

    /// The environment of a command with the secrets in it, and which those are. `program` is what
    /// runs and nothing else, where that is certain.
    pub(super) fn in_environment(
        &self,
        tool: &str,
        program: Option<&str>,
        mut environment: BTreeMap<String, String>,
    ) -> Result<(BTreeMap<String, String>, Sent), ToolError> {
        let mut sent = Sent::default();
        if !environment.values().any(|value| handles(value).next().is_some()) {
            return Ok((environment, sent));
        }
        let steers = |name: &&String| {
            STEERING.contains(&name.as_str())
                || STEERING_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        };
        if let Some(name) = environment.keys().find(steers) {
            return Err(ToolError::new(
                NOT_ALLOWED.0,
                format!(
                    "{tool}: a command that gets a secret runs without {name}, which could have another program run in its \
                     place. Nothing ran. Take {name} out of options.env, or back with setenv(\"{name}\")."
                ),
            ));
        }
        let mut room = MAX_ENVIRONMENT;
        for (name, value) in &mut environment {
            let too_long = || {
                ToolError::invalid(format!(
                    "{tool}: with the secrets in it the environment is too long, and nothing ran: {name} can have \
                     {MAX_VARIABLE} bytes, all variables together {MAX_ENVIRONMENT}."
                ))
            };
            let allowed = |secret: &Secret| secret.for_program(tool, name, program);
            if let Some(filled) =
                self.fill(value, MAX_VARIABLE.min(room), &mut sent, too_long, &allowed)?
            {
                *value = filled.expose_secret().to_owned();
            }
            room = room.saturating_sub(name.len() + value.len());
        }
        Ok((environment, sent))
    }

    /// Puts the values in the place of their handles, and adds their secrets to `used`; none when
    /// there is no handle in the text.
    fn fill(
        &self,
        text: &str,
        room: usize,
        used: &mut Sent,
        too_long: impl FnOnce() -> ToolError,
        allowed: &dyn Fn(&Secret) -> Result<(), ToolError>,
    ) -> Result<Option<SecretString>, ToolError> {
        let mut parts: Vec<&str> = Vec::new();
        let mut next = 0;
        for (place, name) in handles(text) {
            let mut list = self.list.iter().enumerate();
            let found = list
                .find(|(_, secret)| secret.name == name && secret.handle == text[place.clone()]);
            let (number, secret) = found.ok_or_else(|| self.no_handle(name))?;
            allowed(secret)?;
            used.0.insert(number);
            parts.extend([&text[next..place.start], secret.value()?]);
            next = place.end;
        }
        if next == 0 {
            return Ok(None);
        }
        parts.push(&text[next..]);
        if parts.iter().map(|part| part.len()).sum::<usize>() > room {
            return Err(too_long());
        }
        Ok(Some(SecretString::from(parts.concat())))
    }

    fn not_found(&self, name: &str) -> ToolError {
        let names: Vec<&str> = self.list.iter().map(|secret| secret.name.as_str()).collect();
        let shown: String = name.chars().take(100).collect();
        let there_are = if names.is_empty() {
            "This agent may use none; the person you work for can create one and grant it to the agent.".to_owned()
        } else {
            format!("There are: {}.", names.join(", "))
        };
        ToolError::new(NOT_FOUND.0, format!("There is no secret {shown:?}. {there_are}"))
            .with(json!({"name": shown, "names": names}))
    }

    /// Of a text that looks like a handle and is none of this execution's.
    fn no_handle(&self, name: &str) -> ToolError {
        if self.list.iter().any(|secret| secret.name == name) {
            let message = format!(
                "That is no handle of the secret {name}: a handle holds for the scripts of one message, and comes from \
                 secrets.get(\"{name}\") alone. Nothing was done."
            );
            return ToolError::new(NOT_FOUND.0, message).with(json!({"name": name}));
        }
        self.not_found(name)
    }
}

impl Sent {
    /// Adds those of a request that is about to be sent.
    pub(super) fn extend(&mut self, Self(others): Self) {
        self.0.extend(others);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// An error of an exchange without its secrets.
pub(super) fn scrubbed(mut error: ToolError, scrubber: &Scrubber) -> ToolError {
    error.message = scrubber.text(error.message);
    error.details.iter_mut().for_each(|details| scrubber.value(details));
    error
}

/// Refuses a handle where only texts may stand that others see.
pub(super) fn refuse(tool: &str, what: &str, text: &str) -> Result<(), ToolError> {
    let Some((_, name)) = handles(text).next() else { return Ok(()) };
    Err(ToolError::invalid(format!(
        "{tool}: the handle of the secret {name} stands in {what}, where no secret is put in its place, and nothing was done. \
         It may stand in the value of a header of fetch, and in that of an environment variable of a command (options.env, \
         setenv), which the command then reads as $NAME."
    )))
}

/// Whether there is a handle in a text.
pub(super) fn has_handle(text: &str) -> bool {
    handles(text).next().is_some()
}

/// The handles in a text, each with its place and the name in it.
fn handles(text: &str) -> impl Iterator<Item = (Range<usize>, &str)> {
    text.match_indices(OPEN).filter_map(|(start, _)| {
        let rest = &text[start + OPEN.len()..];
        let (name, rest) = rest.split_once(':').filter(|(name, _)| secret::is_name(name))?;
        let (digits, rest) = rest.split_at_checked(DIGITS)?;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_handle = digits.bytes().all(is_digit) && rest.starts_with(CLOSE);
        let length = OPEN.len() + name.len() + 1 + DIGITS + CLOSE.len();
        is_handle.then_some((start..start + length, name))
    })
}

impl Secret {
    fn open(
        granted: &GrantedSecret,
        keys: Option<&MasterKeys>,
        seed: &[u8],
        room: &mut usize,
    ) -> Self {
        let GrantedSecret { id, name, hosts, commands, value } = granted;
        let sealed = value.clone().unwrap_or_default();
        let opened = match keys {
            Some(keys) => keys.open(id, &sealed.key_id, &sealed.nonce, &sealed.ciphertext),
            None => Err(OpenError::UnknownKey { id: sealed.key_id }),
        };
        let value = opened.map_err(|error| match error {
            OpenError::UnknownKey { id } => format!(
                "it is encrypted with the key {id:?}, which the interpreter does not have (CONSTRUCT_SECRETS_KEY)"
            ),
            OpenError::Unopenable => "its stored form is damaged, and it has to be set again".to_owned(),
        });
        // What does not belong into a variable at all is refused by the gateway; here it would end
        // one and begin another.
        let value = value.and_then(|value| match secret::is_value(value.expose_secret()) {
            true => Ok(value),
            false => Err("it is not what a secret can be, and has to be set again".to_owned()),
        });
        let value = value.and_then(|value| match room.checked_sub(value.expose_secret().len()) {
            Some(left) => {
                *room = left;
                Ok(value)
            }
            None => {
                Err(format!("the agent's secrets have more than {MAX_TOGETHER} bytes together"))
            }
        });
        let digest = Sha256::new_with_prefix(b"construct secret handle\0")
            .chain_update(seed)
            .chain_update([0])
            .chain_update(name);
        let digits: String =
            digest.finalize().iter().take(DIGITS / 2).map(|byte| format!("{byte:02x}")).collect();
        Self {
            name: name.clone(),
            handle: format!("{OPEN}{name}:{digits}{CLOSE}"),
            value,
            pattern: OnceLock::new(),
            // What cannot be understood is nowhere.
            hosts: hosts.iter().filter_map(|host| host.parse().ok()).collect(),
            commands: commands.clone(),
        }
    }

    fn value(&self) -> Result<&str, ToolError> {
        let Self { name, .. } = self;
        self.value.as_ref().map(|value| value.expose_secret()).map_err(|why| {
            ToolError::new(
                UNAVAILABLE.0,
                format!("The secret {name} cannot be used: {why}. Go on without it."),
            )
        })
    }

    /// What to search for in what comes back; none of one that cannot be opened, which never goes
    /// out.
    fn pattern(&self) -> Option<Arc<Pattern>> {
        let value = self.value.as_ref().ok()?;
        let make = || Arc::new(Pattern::new(value.expose_secret(), &self.handle));
        Some(Arc::clone(self.pattern.get_or_init(make)))
    }

    fn for_program(
        &self,
        tool: &str,
        variable: &str,
        program: Option<&str>,
    ) -> Result<(), ToolError> {
        let Self { name, commands, .. } = self;
        let Some(program) = program else {
            return Err(self.not_allowed(format!(
                "{tool}: {variable} has the secret {name} in it, and the line may run more than one program, or not by its \
                 plain name; nothing ran. Run one program alone, its name first, without ; & | < > ` ${{ $( $[ and line breaks, even \
                 in quotes, or call it through a tool such as git"
            )));
        };
        if commands.iter().any(|command| command == program) {
            return Ok(());
        }
        Err(self.not_allowed(format!(
            "{tool}: {variable} has the secret {name} in it, which {program:?} may not get, and nothing ran. If it was set with \
             setenv, take it back with setenv({variable:?}) and pass it in options.env of the one command"
        )))
    }

    fn not_allowed(&self, what: String) -> ToolError {
        let Self { name, hosts, commands, .. } = self;
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        let list =
            |items: &[String]| if items.is_empty() { "none".to_owned() } else { items.join(", ") };
        let message = format!(
            "{what}. It is bound to these hosts: {}; and commands: {}.",
            list(&hosts),
            list(commands)
        );
        ToolError::new(NOT_ALLOWED.0, message)
            .with(json!({"name": name, "hosts": hosts, "commands": commands}))
    }
}
