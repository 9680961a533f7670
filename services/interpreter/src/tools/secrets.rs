//! `secrets.get`, and the replacement of handles by secrets.
//!
//! A script never sees a value. It gets a handle, an opaque text, and writes it in place of the
//! value: in a header of `fetch`, or in the environment of a command. Policies, the journal and
//! subscribers only see the handle as well. The handle is replaced by the value at the last moment,
//! when the recipient is known, and the value is scrubbed from what comes back in the same
//! exchange. No other text is compared with a value, because a script could use that to guess the
//! value.

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
    summary: "Returns a handle for a secret, such as a token or a password. The secret itself is never shown.",
    description: "Write the handle into the value of a header of fetch, or of an environment variable of a command \
     (options.env, setenv): it is replaced by the secret when sent to the hosts and commands that the secret is bound \
     to, and nowhere else. In responses and outputs the secret is replaced by its handle again. A handle is valid for \
     the scripts of one message.",
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
    "when there is no such secret, or a handle is from another message; the message lists the available secrets.",
);

pub(super) const UNAVAILABLE: (&str, &str) =
    ("SecretUnavailable", "when a secret cannot be decrypted, which is not the script's fault.");

pub(super) const NOT_ALLOWED: (&str, &str) =
    ("SecretNotAllowed", "when a secret is not bound to the host or command; nothing was done.");

/// Beginning and end of a handle; between are the name, a colon and `HANDLE_DIGITS` hexadecimal
/// digits.
const HANDLE_START: &str = "{{secret:";
const HANDLE_END: &str = "}}";
const HANDLE_DIGITS: usize = 16;

/// Maximum bytes of one environment variable including secrets: the kernel's limit is 128 KiB.
const MAX_VARIABLE_BYTES: usize = 128 * 1024 - 512;

/// Maximum bytes of all variables of a command including secrets.
const MAX_ENVIRONMENT_BYTES: usize = 512 * 1024;

/// Variables, and prefixes of variables, with which a script could run something else instead of or
/// before the program that a secret is bound to.
const HIJACKING_VARIABLES: [&str; 9] =
    ["PATH", "ENV", "IFS", "PS4", "SHELLOPTS", "BASHOPTS", "CDPATH", "GCONV_PATH", "LOCPATH"];
const HIJACKING_PREFIXES: [&str; 3] = ["LD_", "BASH_", "GLIBC_"];

/// Maximum bytes of all secrets of one execution. Each is searched in dozens of forms, which are
/// kept in memory.
const MAX_TOTAL_BYTES: usize = 256 * 1024;

/// The secrets that the scripts of one execution may use.
#[derive(Default)]
pub struct Secrets {
    list: Vec<Secret>,
}

/// The secrets whose values were sent in one exchange, with the requests of one `fetch` or to one
/// command, as indices into the list.
#[derive(Debug, Default)]
pub(super) struct SentSecrets(BTreeSet<usize>);

struct Secret {
    name: String,
    handle: String,
    /// The value, or the reason why it is unavailable.
    value: Result<SecretString, String>,
    /// Created when the value is first sent: for a value of many kilobytes it takes milliseconds
    /// and megabytes.
    pattern: OnceLock<Arc<Pattern>>,
    hosts: Vec<HostPattern>,
    commands: Vec<String>,
}

/// Shows only the names.
impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.list.iter().map(|secret| &secret.name)).finish()
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GetArguments {
    name: String,
}

impl Secrets {
    /// Decrypts the secrets of a command. The handles are derived from the execution's `seed`, so
    /// that a replayed script gets the same ones. Scripts do not know the seed and so cannot guess
    /// handles that they did not request.
    ///
    /// A secret that cannot be decrypted is included too; requesting it fails.
    #[must_use]
    pub fn open(granted: &[GrantedSecret], keys: Option<&MasterKeys>, seed: &[u8]) -> Self {
        let mut room = MAX_TOTAL_BYTES;
        let list = granted
            .iter()
            .take(secret::MAX_PER_AGENT)
            .map(|one| Secret::open(one, keys, seed, &mut room))
            .collect();
        Self { list }
    }

    /// Executes `secrets.get`.
    pub(super) fn get(&self, GetArguments { name }: &GetArguments) -> Result<String, ToolError> {
        let secret = self
            .list
            .iter()
            .find(|secret| secret.name == *name)
            .ok_or_else(|| self.not_found(name))?;
        secret.value()?;
        Ok(secret.handle.clone())
    }

    /// A scrubber for the secrets of an exchange.
    pub(super) fn scrubber(&self, SentSecrets(sent): &SentSecrets) -> Arc<Scrubber> {
        let secrets = sent.iter().filter_map(|number| self.list.get(*number));
        Arc::new(Scrubber::new(secrets.filter_map(Secret::pattern)))
    }

    /// Replaces the handles in the value of a header for a request to `host`; `None` if there are
    /// no handles. The result has at most `room` bytes. The secrets are added to `used`.
    pub(super) fn in_header(
        &self,
        text: &str,
        host: &str,
        room: usize,
        used: &mut SentSecrets,
    ) -> Result<Option<SecretString>, ToolError> {
        let too_long = || {
            ToolError::invalid(
                "fetch: with their secrets, the headers are too long; nothing was sent.",
            )
        };
        self.fill(text, room, used, too_long, &|secret| {
            if secret.hosts.iter().any(|pattern| pattern.matches(host)) {
                return Ok(());
            }
            let name = &secret.name;
            Err(secret.not_allowed(format!(
                "fetch: the secret {name} may not be sent to {host:?}; nothing was sent"
            )))
        })
    }

    /// Replaces the handles in the environment of a command, and returns which secrets were used.
    /// `program` is the only program that runs, if that is certain.
    pub(super) fn in_environment(
        &self,
        tool: &str,
        program: Option<&str>,
        mut environment: BTreeMap<String, String>,
    ) -> Result<(BTreeMap<String, String>, SentSecrets), ToolError> {
        let mut sent = SentSecrets::default();
        if !environment.values().any(|value| handles(value).next().is_some()) {
            return Ok((environment, sent));
        }
        let can_hijack = |name: &&String| {
            HIJACKING_VARIABLES.contains(&name.as_str())
                || HIJACKING_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        };
        if let Some(name) = environment.keys().find(can_hijack) {
            return Err(ToolError::new(
                NOT_ALLOWED.0,
                format!(
                    "{tool}: a command with a secret cannot have the variable {name}, which could make another program \
                     run in its place. Nothing ran. Remove {name} from options.env, or unset it with \
                     setenv(\"{name}\")."
                ),
            ));
        }
        let mut room = MAX_ENVIRONMENT_BYTES;
        for (name, value) in &mut environment {
            let too_long = || {
                ToolError::invalid(format!(
                    "{tool}: with its secrets, the environment is too long, and nothing ran: the limit is \
                     {MAX_VARIABLE_BYTES} bytes for {name}, and {MAX_ENVIRONMENT_BYTES} bytes for all variables \
                     together."
                ))
            };
            let allowed = |secret: &Secret| secret.check_program(tool, name, program);
            if let Some(filled) =
                self.fill(value, MAX_VARIABLE_BYTES.min(room), &mut sent, too_long, &allowed)?
            {
                *value = filled.expose_secret().to_owned();
            }
            room = room.saturating_sub(name.len() + value.len());
        }
        Ok((environment, sent))
    }

    /// Replaces handles by values, and adds their secrets to `used`; `None` if there are no
    /// handles.
    fn fill(
        &self,
        text: &str,
        room: usize,
        used: &mut SentSecrets,
        too_long: impl FnOnce() -> ToolError,
        allowed: &dyn Fn(&Secret) -> Result<(), ToolError>,
    ) -> Result<Option<SecretString>, ToolError> {
        let mut parts: Vec<&str> = Vec::new();
        let mut next = 0;
        for (range, name) in handles(text) {
            let mut list = self.list.iter().enumerate();
            let found = list
                .find(|(_, secret)| secret.name == name && secret.handle == text[range.clone()]);
            let (number, secret) = found.ok_or_else(|| self.unknown_handle(name))?;
            allowed(secret)?;
            used.0.insert(number);
            parts.extend([&text[next..range.start], secret.value()?]);
            next = range.end;
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
        let list = if names.is_empty() {
            "This agent has no secrets; the user can create one and grant it to the agent."
                .to_owned()
        } else {
            format!("The available secrets are: {}.", names.join(", "))
        };
        ToolError::new(NOT_FOUND.0, format!("There is no secret {shown:?}. {list}"))
            .with(json!({"name": shown, "names": names}))
    }

    /// The error for a text that looks like a handle but is not from this execution.
    fn unknown_handle(&self, name: &str) -> ToolError {
        if self.list.iter().any(|secret| secret.name == name) {
            let message = format!(
                "This is not a valid handle of the secret {name}: handles are valid for the scripts of one message, \
                 and only come from secrets.get(\"{name}\"). Nothing was done."
            );
            return ToolError::new(NOT_FOUND.0, message).with(json!({"name": name}));
        }
        self.not_found(name)
    }
}

impl SentSecrets {
    /// Adds the secrets of a request that is about to be sent.
    pub(super) fn extend(&mut self, Self(others): Self) {
        self.0.extend(others);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Scrubs the secrets of an exchange from an error.
pub(super) fn scrubbed(mut error: ToolError, scrubber: &Scrubber) -> ToolError {
    error.message = scrubber.text(error.message);
    error.details.iter_mut().for_each(|details| scrubber.value(details));
    error
}

/// Rejects handles in a text that is not confidential.
pub(super) fn refuse(tool: &str, what: &str, text: &str) -> Result<(), ToolError> {
    let Some((_, name)) = handles(text).next() else { return Ok(()) };
    Err(ToolError::invalid(format!(
        "{tool}: {what} contains the handle of the secret {name}, but it is not replaced there; nothing was done. \
         Handles are only replaced in the value of a header of fetch, and of an environment variable of a command \
         (options.env, setenv), which the command can read as $NAME."
    )))
}

/// Whether a text contains a handle.
pub(super) fn has_handle(text: &str) -> bool {
    handles(text).next().is_some()
}

/// The handles in a text, each with its range and the name of its secret.
fn handles(text: &str) -> impl Iterator<Item = (Range<usize>, &str)> {
    text.match_indices(HANDLE_START).filter_map(|(start, _)| {
        let rest = &text[start + HANDLE_START.len()..];
        let (name, rest) = rest.split_once(':').filter(|(name, _)| secret::is_name(name))?;
        let (digits, rest) = rest.split_at_checked(HANDLE_DIGITS)?;
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        let is_handle = digits.bytes().all(is_digit) && rest.starts_with(HANDLE_END);
        let length = HANDLE_START.len() + name.len() + 1 + HANDLE_DIGITS + HANDLE_END.len();
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
            OpenError::Unopenable => "its stored value is damaged and has to be set again".to_owned(),
        });
        // The gateway rejects values that cannot be in a variable; here such a value could end one
        // variable and begin another.
        let value = value.and_then(|value| match secret::is_value(value.expose_secret()) {
            true => Ok(value),
            false => Err("its value is not valid and has to be set again".to_owned()),
        });
        let value = value.and_then(|value| match room.checked_sub(value.expose_secret().len()) {
            Some(left) => {
                *room = left;
                Ok(value)
            }
            None => {
                Err(format!("the agent's secrets together have more than {MAX_TOTAL_BYTES} bytes"))
            }
        });
        let digest = Sha256::new_with_prefix(b"construct secret handle\0")
            .chain_update(seed)
            .chain_update([0])
            .chain_update(name);
        let digits: String = digest
            .finalize()
            .iter()
            .take(HANDLE_DIGITS / 2)
            .map(|byte| format!("{byte:02x}"))
            .collect();
        Self {
            name: name.clone(),
            handle: format!("{HANDLE_START}{name}:{digits}{HANDLE_END}"),
            value,
            pattern: OnceLock::new(),
            // An invalid host pattern permits nothing.
            hosts: hosts.iter().filter_map(|host| host.parse().ok()).collect(),
            commands: commands.clone(),
        }
    }

    fn value(&self) -> Result<&str, ToolError> {
        let Self { name, .. } = self;
        self.value.as_ref().map(|value| value.expose_secret()).map_err(|why| {
            ToolError::new(
                UNAVAILABLE.0,
                format!("The secret {name} cannot be used: {why}. Continue without it."),
            )
        })
    }

    /// The pattern to scrub; `None` for a secret that cannot be decrypted, which is never sent.
    fn pattern(&self) -> Option<Arc<Pattern>> {
        let value = self.value.as_ref().ok()?;
        let make = || Arc::new(Pattern::new(value.expose_secret(), &self.handle));
        Some(Arc::clone(self.pattern.get_or_init(make)))
    }

    fn check_program(
        &self,
        tool: &str,
        variable: &str,
        program: Option<&str>,
    ) -> Result<(), ToolError> {
        let Self { name, commands, .. } = self;
        let Some(program) = program else {
            return Err(self.not_allowed(format!(
                "{tool}: {variable} contains the secret {name}, but the command may run more than one program, or not \
                 by its plain name; nothing ran. Run a single program, its name first, without ; & | < > ` ${{ $( $[ \
                 and line breaks, even in quotes, or use a tool such as git"
            )));
        };
        if commands.iter().any(|command| command == program) {
            return Ok(());
        }
        Err(self.not_allowed(format!(
            "{tool}: {variable} contains the secret {name}, which is not allowed for {program:?}; nothing ran. If it \
             was set with setenv, unset it with setenv({variable:?}) and pass it only in options.env of the right \
             command"
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
