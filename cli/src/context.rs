//! Contexts: named gateways with their credentials. A file that only its owner may read stores
//! them. Their keys are in the keyring where there is one; no command prints a key. After a log-in
//! ([`crate::login`]) a context has a session instead of a key.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions, TryLockError},
    io::{ErrorKind, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use crate::{
    daemon, entity,
    failure::Failure,
    keyring::{Keyring, KeyringMode},
    output, secret_input,
};

/// The gateway's default address.
pub(crate) const DEFAULT_ADDRESS: &str = "http://127.0.0.1:60080";
/// The environment variable with an API key, for programs.
const KEY_VARIABLE: &str = "CONSTRUCT_KEY";
/// The time between attempts to lock the file.
const LOCK_POLL_INTERVAL: Duration = Duration::from_millis(50);

#[derive(Debug, Subcommand)]
pub(crate) enum ContextCommand {
    /// Add or replace a context. The first one becomes the current one. --organization sets its
    /// organization.
    Add(Add),
    /// Make a context the current one.
    Use {
        /// Its name.
        name: String,
    },
    /// List contexts. A star marks the current one.
    List,
    /// Remove a context.
    Remove {
        /// Its name.
        name: String,
    },
}

/// The certificates for a gateway at an `https://` address.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
pub(crate) struct TlsArgs {
    /// The certificate authorities (PEM) to trust instead of the system's.
    #[arg(long, global = true, env = "CONSTRUCT_CA", value_name = "FILE")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
    /// The client certificate (PEM), for a gateway that asks for one.
    #[arg(
        long,
        global = true,
        env = "CONSTRUCT_CLIENT_CERTIFICATE",
        value_name = "FILE",
        requires = "client_key"
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) client_certificate: Option<PathBuf>,
    /// The private key of the client certificate (PEM).
    #[arg(
        long,
        global = true,
        env = "CONSTRUCT_CLIENT_KEY",
        value_name = "FILE",
        requires = "client_certificate"
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) client_key: Option<PathBuf>,
}

impl TlsArgs {
    /// Fills in missing values from the stored ones. A certificate and its key go together.
    fn or(self, stored: Self) -> Self {
        let (client_certificate, client_key) = match self.client_certificate {
            Some(certificate) => (Some(certificate), self.client_key),
            None => (stored.client_certificate, stored.client_key),
        };
        Self { ca: self.ca.or(stored.ca), client_certificate, client_key }
    }

    /// The same files as absolute paths, valid in any directory.
    ///
    /// # Errors
    /// When there is no such file.
    fn absolute(self) -> Result<Self, Failure> {
        let absolute = |path: Option<PathBuf>| {
            path.map(|path| {
                fs::canonicalize(&path).map_err(|error| {
                    Failure::usage(format!("{} cannot be read: {error}", path.display()))
                })
            })
            .transpose()
        };
        let Self { ca, client_certificate, client_key } = self;
        Ok(Self {
            ca: absolute(ca)?,
            client_certificate: absolute(client_certificate)?,
            client_key: absolute(client_key)?,
        })
    }
}

/// There is no argument for a key: every process of the machine can read command lines.
#[derive(Debug, Args)]
pub(crate) struct Add {
    /// The name of the context.
    name: String,
    /// The gateway's address: https://HOST:PORT (see --ca), http://HOST:PORT, or unix:/PATH for a
    /// socket on this machine.
    #[arg(long, value_name = "URL")]
    address: String,
    /// Read the API key from this file.
    #[arg(long, value_name = "FILE", conflicts_with = "key_stdin")]
    key_file: Option<PathBuf>,
    /// Ask for the API key, or read it from standard input.
    #[arg(long)]
    key_stdin: bool,
    /// Whether to store the API key in the desktop session's keyring: if possible, always, or
    /// never.
    #[arg(long, value_enum, default_value_t = KeyringMode::Auto, env = "CONSTRUCT_KEYRING", value_name = "WHEN")]
    keyring: KeyringMode,
}

/// The content of the file.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Contexts {
    current: Option<String>,
    contexts: BTreeMap<String, Context>,
}

#[derive(Clone, Serialize, Deserialize)]
struct Context {
    address: String,
    #[serde(flatten)]
    key: Key,
    /// Set when `key` holds a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    login: Option<Login>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    organization: Option<String>,
    #[serde(flatten)]
    tls: TlsArgs,
}

/// The issuer and the client of a log-in: what renewing a session needs besides the session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Login {
    pub(crate) issuer: String,
    pub(crate) client_id: String,
    /// The audience that tokens must have.
    pub(crate) audience: String,
}

/// The place of a context's key.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Key {
    /// The key itself.
    #[serde(default, rename = "key", skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// The name of the keyring's item with the key. Each key has a new name, so no key replaces
    /// another.
    #[serde(default, rename = "keyring", skip_serializing_if = "Option::is_none")]
    item: Option<String>,
}

/// The gateway and organization that the command line and the environment name.
#[derive(Debug, Clone, Default)]
pub(crate) struct TargetArgs {
    /// An address.
    pub(crate) gateway: Option<String>,
    /// A context by name.
    pub(crate) context: Option<String>,
    /// An organization by id.
    pub(crate) organization: Option<String>,
    /// Certificates.
    pub(crate) tls: TlsArgs,
}

/// The gateway to talk to, and the credentials.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Target {
    /// The gateway's address.
    pub(crate) address: String,
    /// The API key.
    pub(crate) key: Option<String>,
    /// The organization.
    pub(crate) organization: Option<String>,
    /// Certificates.
    pub(crate) tls: TlsArgs,
    /// The context whose session replaces a key.
    pub(crate) session: Option<String>,
}

impl TargetArgs {
    /// Fills in missing values from the named or current context. A context's key goes to the
    /// context's address only: another address needs a key of its own.
    ///
    /// # Errors
    /// When there is no such context, or the file cannot be read.
    pub(crate) fn target(self) -> Result<Target, Failure> {
        let key = std::env::var(KEY_VARIABLE)
            .ok()
            .map(|key| key.trim().to_owned())
            .filter(|key| !key.is_empty());
        self.resolve(&path(), key)
    }

    fn resolve(
        self,
        path: &Result<PathBuf, Failure>,
        key: Option<String>,
    ) -> Result<Target, Failure> {
        let context = match (&self.context, &self.gateway, path) {
            (Some(name), _, Ok(path)) => Some((name.clone(), Contexts::read(path)?.get(name)?)),
            (Some(name), _, Err(_)) => return Err(unknown_context(name)),
            (None, None, Ok(path)) => Contexts::read(path)?.current(),
            (None, ..) => None,
        };
        let (stored, address) = match (context, self.gateway) {
            (Some((_, context)), Some(gateway)) if gateway != context.address => (None, gateway),
            (Some((name, context)), _) => (Some((name, context.clone())), context.address),
            (None, gateway) => {
                let default = || daemon::address().unwrap_or_else(|| DEFAULT_ADDRESS.to_owned());
                (None, gateway.unwrap_or_else(default))
            }
        };
        let mut session = None;
        let (stored_key, organization, tls) = match stored {
            // A key that is not needed is not read from the keyring.
            Some((_, context)) if key.is_some() => (None, context.organization, context.tls),
            Some((name, context)) if context.login.is_some() => {
                session = Some(name);
                (None, context.organization, context.tls)
            }
            Some((name, context)) => {
                (context.key.get("key", &name)?, context.organization, context.tls)
            }
            None => (None, None, TlsArgs::default()),
        };
        Ok(Target {
            address,
            key: key.or(stored_key),
            organization: self.organization.or(organization),
            tls: self.tls.or(tls),
            session,
        })
    }
}

/// A stored context that a user logs in with.
pub(crate) struct LoginContext {
    path: PathBuf,
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) tls: TlsArgs,
}

impl LoginContext {
    /// Finds the named or the current context.
    ///
    /// # Errors
    /// When there is none, or the file cannot be read.
    pub(crate) fn find(name: Option<&str>) -> Result<Self, Failure> {
        let path = path()?;
        let all = Contexts::read(&path)?;
        let selected = match name {
            Some(name) => Some((name.to_owned(), all.get(name)?)),
            None => all.current(),
        };
        let (name, Context { address, tls, .. }) = selected.ok_or_else(|| {
            Failure::usage("no context is selected; a log-in is stored in a context")
                .hint("add one: construct context add work --address https://construct.example.com")
        })?;
        Ok(Self { path, name, address, tls })
    }

    /// Replaces the certificates with those that are given.
    pub(crate) fn with_tls(mut self, tls: TlsArgs) -> Self {
        self.tls = tls.or(self.tls);
        self
    }

    /// Locks the contexts against changes by other processes until the file is dropped. Renewing a
    /// session needs the lock: an issuer that rotates refresh tokens treats the second use of an
    /// old one as theft.
    ///
    /// # Errors
    /// When the lock file cannot be opened.
    pub(crate) async fn lock(&self) -> Result<File, Failure> {
        let file = lock_file(&self.path)?;
        // Polled: a blocking lock would keep a finished command from exiting.
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => tokio::time::sleep(LOCK_POLL_INTERVAL).await,
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }

    /// Checks that the context can store a session.
    ///
    /// # Errors
    /// When it has an API key.
    pub(crate) fn check_accepts_session(&self) -> Result<(), Failure> {
        let context = Contexts::read(&self.path)?.get(&self.name)?;
        if context.login.is_some() || (context.key.item.is_none() && context.key.text.is_none()) {
            return Ok(());
        }
        let failure = Failure::usage(format!("the context {} has an API key", self.name));
        Err(failure.hint(format!(
            "add another context to log in with: construct context add NAME --address {}",
            self.address
        )))
    }

    /// The log-in and its session, if there is one.
    ///
    /// # Errors
    /// When the keyring cannot be read, or the context has another gateway by now: a session is
    /// for one gateway.
    pub(crate) fn session(&self) -> Result<Option<(Login, String)>, Failure> {
        let context = Contexts::read(&self.path)?.get(&self.name)?;
        if context.address != self.address {
            return Err(unknown_context(&self.name));
        }
        let Some(login) = context.login else { return Ok(None) };
        Ok(context.key.get("log-in", &self.name)?.map(|session| (login, session)))
    }

    /// Stores a new session, and prints where. Requires the lock.
    ///
    /// # Errors
    /// When it cannot be stored.
    pub(crate) fn store_session(
        &self,
        login: Login,
        session: String,
        mode: KeyringMode,
    ) -> Result<(), Failure> {
        self.check_accepts_session()?;
        let key = Key::store("log-in", &self.name, session, mode, &self.path)?;
        self.replace(Some(login), key)?.delete_or_warn();
        Ok(())
    }

    /// Stores a renewed session in the same place as the previous one. Requires the lock.
    ///
    /// # Errors
    /// When it cannot be stored.
    pub(crate) fn renew_session(&self, session: String) -> Result<(), Failure> {
        let context = Contexts::read(&self.path)?.get(&self.name)?;
        let key = match context.key.item {
            Some(_) => Key::store_in_keyring(&self.name, &session)
                .map_err(|reason| Key::keyring_failure("log-in", &reason, &self.path))?,
            None => Key { text: Some(session), item: None },
        };
        self.replace(context.login, key)?.delete_or_warn();
        Ok(())
    }

    /// Deletes the session. Requires the lock.
    ///
    /// # Errors
    /// When it cannot be deleted.
    pub(crate) fn delete_session(&self) -> Result<(), Failure> {
        self.replace(None, Key::default())?.delete()
    }

    /// Replaces the session. Returns the previous one, which the caller must delete.
    fn replace(&self, login: Option<Login>, key: Key) -> Result<Key, Failure> {
        let item = key.item.clone();
        let swapped = self.swap(login, key);
        if swapped.is_err() {
            _ = Key { text: None, item }.delete();
        }
        swapped
    }

    /// Writes a session into the file. Returns the previous one.
    fn swap(&self, login: Option<Login>, key: Key) -> Result<Key, Failure> {
        let mut all = Contexts::read(&self.path)?;
        // A session is for one address: another context may have taken the name in the meantime.
        let context =
            all.contexts.get_mut(&self.name).filter(|context| context.address == self.address);
        let context = context.ok_or_else(|| unknown_context(&self.name))?;
        context.login = login;
        let replaced = std::mem::replace(&mut context.key, key);
        all.write(&self.path)?;
        Ok(replaced)
    }
}

fn lock(path: &Path) -> Result<File, Failure> {
    let file = lock_file(path)?;
    file.lock()?;
    Ok(file)
}

fn lock_file(path: &Path) -> Result<File, Failure> {
    create_folder(path)?;
    Ok(OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path.with_extension("lock"))?)
}

fn create_folder(path: &Path) -> Result<(), Failure> {
    let folder = path.parent().unwrap_or(Path::new("."));
    Ok(fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?)
}

impl ContextCommand {
    /// # Errors
    /// When the file cannot be read or written.
    pub(crate) fn run(self, organization: Option<String>, tls: TlsArgs) -> Result<(), Failure> {
        let path = path()?;
        match self {
            Self::Add(Add { name, address, key_file, key_stdin, keyring }) => {
                crate::gateway::Gateway::parse_address(&address)?;
                let key = match key_file {
                    Some(file) => Some(entity::read_text(&file)?),
                    None if key_stdin => Some(secret_input::read("API key: ")?),
                    None => None,
                };
                let key = key.map(|key| key.trim().to_owned()).filter(|key| !key.is_empty());
                let tls = tls.absolute()?;
                // Locked after the input: the file may have changed while the user typed.
                let _lock = lock(&path)?;
                let mut all = Contexts::read(&path)?;
                let key = key
                    .map(|key| Key::store("key", &name, key, keyring, &path))
                    .transpose()?
                    .unwrap_or_default();
                let item = key.item.clone();
                all.current.get_or_insert_with(|| name.clone());
                let replaced = all
                    .contexts
                    .insert(name, Context { address, key, login: None, organization, tls });
                if let Err(failure) = all.write(&path) {
                    _ = Key { text: None, item }.delete();
                    return Err(failure);
                }
                replaced.map_or(Ok(()), |context| context.key.delete())
            }
            Self::Use { name } => {
                let _lock = lock(&path)?;
                let mut all = Contexts::read(&path)?;
                all.get(&name)?;
                all.current = Some(name);
                all.write(&path)
            }
            Self::List => output::print(&Contexts::read(&path)?.show()),
            Self::Remove { name } => {
                let _lock = lock(&path)?;
                let mut all = Contexts::read(&path)?;
                let removed = all.contexts.remove(&name).ok_or_else(|| unknown_context(&name))?;
                all.current = all.current.filter(|current| *current != name);
                all.write(&path)?;
                removed.key.delete()
            }
        }
    }
}

impl Key {
    /// Stores a key or a session by `mode`, and prints where. `kind` is the name of the secret in
    /// messages.
    ///
    /// # Errors
    /// When the mode requires the keyring, which refuses it.
    fn store(
        kind: &str,
        name: &str,
        key: String,
        mode: KeyringMode,
        path: &Path,
    ) -> Result<Self, Failure> {
        let stored = match mode {
            KeyringMode::Never => Err(String::new()),
            KeyringMode::Auto | KeyringMode::Always => Self::store_in_keyring(name, &key),
        };
        match stored {
            Ok(stored) => {
                eprintln!("the {kind} of {name} is in the keyring");
                Ok(stored)
            }
            Err(reason) if mode == KeyringMode::Always => {
                Err(Self::keyring_failure(kind, &reason, path))
            }
            Err(reason) => {
                let reason = if reason.is_empty() { reason } else { format!(" ({reason})") };
                eprintln!(
                    "the {kind} of {name} is in {}, which only you may read{reason}",
                    path.display()
                );
                Ok(Self { text: Some(key), item: None })
            }
        }
    }

    /// Stores it in the keyring.
    ///
    /// # Errors
    /// The reason, when there is no keyring or it refuses.
    fn store_in_keyring(name: &str, key: &str) -> Result<Self, String> {
        let item = uuid::Uuid::now_v7().to_string();
        Keyring::find()?.store(&item, &format!("Construct: {name}"), key)?;
        Ok(Self { text: None, item: Some(item) })
    }

    fn keyring_failure(kind: &str, reason: &str, path: &Path) -> Failure {
        let failure = Failure::failed(format!("the keyring does not store the {kind}: {reason}"));
        failure.hint(format!(
            "--keyring never stores it in {}, which only you may read",
            path.display()
        ))
    }

    /// The key or session of a context, if there is one.
    ///
    /// # Errors
    /// When the keyring cannot be read, or has lost it.
    fn get(self, kind: &str, name: &str) -> Result<Option<String>, Failure> {
        let Some(item) = self.item else { return Ok(self.text) };
        let secret = Keyring::find().and_then(|keyring| keyring.get(&item));
        let key = secret.map_err(|reason| {
            Failure::failed(format!("the keyring does not return the {kind} of {name}: {reason}"))
        })?;
        let remedy = match kind {
            "key" => format!("add it again: construct context add {name} --key-stdin …"),
            _ => format!("log in again: construct login --context {name}"),
        };
        let missing =
            || Failure::usage(format!("the {kind} of {name} is no longer in the keyring"));
        key.map(Some).ok_or_else(|| missing().hint(remedy))
    }

    /// Deletes it from the keyring.
    ///
    /// # Errors
    /// When the keyring refuses.
    fn delete(self) -> Result<(), Failure> {
        let Some(item) = self.item else { return Ok(()) };
        let removed = Keyring::find().and_then(|keyring| keyring.remove(&item));
        let failed = |reason| {
            let failure = Failure::failed(format!(
                "the context is changed, but its old key stays in the keyring: {reason}"
            ));
            failure.hint(format!(
                "revoke the key, or remove it from the keyring: service construct, item {item}"
            ))
        };
        removed.map_err(failed)
    }

    /// Deletes it, and prints a warning on failure.
    fn delete_or_warn(self) {
        if let Err(failure) = self.delete() {
            eprintln!("warning: {}", failure.message());
        }
    }

    /// The place of the key, for people.
    const fn location(&self, login: bool) -> &'static str {
        match (&self.item, &self.text) {
            (Some(_), _) if login => "log-in in the keyring",
            (None, Some(_)) if login => "log-in in the file",
            (Some(_), _) => "key in the keyring",
            (None, Some(_)) => "key in the file",
            (None, None) => "without a key",
        }
    }
}

fn unknown_context(name: &str) -> Failure {
    Failure::usage(format!("there is no context {name}")).hint("construct context list")
}

/// The file with the contexts.
fn path() -> Result<PathBuf, Failure> {
    let variable =
        |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base =
        variable("XDG_CONFIG_HOME").or_else(|| variable("HOME").map(|home| home.join(".config")));
    let base =
        base.ok_or_else(|| Failure::usage("contexts are stored below HOME, which is not set"))?;
    Ok(base.join("construct").join("contexts.json"))
}

impl Contexts {
    fn read(path: &Path) -> Result<Self, Failure> {
        let display = path.display();
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(Failure::usage(format!("{display} cannot be read: {error}"))),
        };
        let mode = fs::metadata(path).map_or(0, |found| found.permissions().mode());
        if mode & 0o077 != 0 {
            return Err(Failure::usage(format!("{display} holds keys, and others may read it"))
                .hint(format!("chmod 600 {display}")));
        }
        // Unreadable content is not quoted: it may be a key.
        serde_json::from_slice(&text)
            .map_err(|_| Failure::usage(format!("{display} was not written by this program")))
    }

    fn write(&self, path: &Path) -> Result<(), Failure> {
        create_folder(path)?;
        let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
        // Atomic, and never readable for others.
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        let written = file
            .write_all(text.as_bytes())
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::rename(&unfinished, path));
        if written.is_err() {
            _ = fs::remove_file(&unfinished);
        }
        Ok(written?)
    }

    fn get(&self, name: &str) -> Result<Context, Failure> {
        self.contexts.get(name).cloned().ok_or_else(|| unknown_context(name))
    }

    fn current(&self) -> Option<(String, Context)> {
        let name = self.current.as_ref()?;
        Some((name.clone(), self.contexts.get(name)?.clone()))
    }

    fn show(&self) -> String {
        let line = |(name, context): (&String, &Context)| {
            let star = if self.current.as_ref() == Some(name) { '*' } else { ' ' };
            let key = context.key.location(context.login.is_some());
            let organization = context.organization.as_deref().unwrap_or_default();
            format!("{star} {name:<16} {:<32} {key:<21} {organization}", context.address)
                .trim_end()
                .to_owned()
                + "\n"
        };
        self.contexts.iter().map(line).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> PathBuf {
        let path =
            std::env::temp_dir().join(format!("construct-contexts-{}", uuid::Uuid::now_v7()));
        fs::create_dir(&path).unwrap();
        path
    }

    #[test]
    fn contexts_file_is_private_and_keys_are_not_printed() {
        let folder = folder();
        let path = folder.join("construct").join("contexts.json");
        let mut all = Contexts::read(&path).unwrap();
        let context = Context {
            address: "http://a:1".into(),
            key: Key { text: Some("ct_x".into()), item: None },
            login: None,
            organization: None,
            tls: TlsArgs::default(),
        };
        all.contexts.insert("a".into(), context);
        all.current = Some("a".into());
        all.write(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        let read = Contexts::read(&path).unwrap();
        assert!(read.show().starts_with("* a") && !read.show().contains("ct_x"), "{}", read.show());
        assert!(read.show().contains("key in the file"), "{}", read.show());
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert!(Contexts::read(&path).is_err());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn key_is_sent_only_to_its_context_address() {
        let folder = folder();
        let path = folder.join("contexts.json");
        let context = |key: &str| Context {
            address: format!("http://{key}:1"),
            key: Key { text: Some(format!("ct_{key}")), item: None },
            login: None,
            organization: Some(format!("org_{key}")),
            tls: TlsArgs { ca: Some(format!("/{key}.pem").into()), ..TlsArgs::default() },
        };
        let contexts =
            BTreeMap::from([("a".to_owned(), context("a")), ("b".to_owned(), context("b"))]);
        Contexts { current: Some("a".into()), contexts }.write(&path).unwrap();
        let path = Ok(path);
        let target = |gateway: Option<&str>, name: Option<&str>, key: Option<&str>| {
            let (gateway, context) = (gateway.map(str::to_owned), name.map(str::to_owned));
            let args = TargetArgs { gateway, context, ..TargetArgs::default() };
            let Target { address, key, organization, tls, .. } =
                args.resolve(&path, key.map(str::to_owned)).unwrap();
            // The certificates are stored with the address, too.
            assert_eq!(tls.ca.is_some(), organization.is_some());
            (address, key.unwrap_or_default(), organization.unwrap_or_default())
        };
        let expected = |address: &str, key: &str, organization: &str| {
            (address.into(), key.into(), organization.into())
        };
        assert_eq!(target(None, None, None), expected("http://a:1", "ct_a", "org_a"));
        assert_eq!(target(None, Some("b"), None), expected("http://b:1", "ct_b", "org_b"));
        assert_eq!(target(None, None, Some("ct_own")), expected("http://a:1", "ct_own", "org_a"));
        assert_eq!(target(Some("http://x:1"), None, None), expected("http://x:1", "", ""));
        assert_eq!(target(Some("http://x:1"), Some("b"), None), expected("http://x:1", "", ""));
        assert!(
            TargetArgs { context: Some("c".into()), ..TargetArgs::default() }
                .resolve(&path, None)
                .is_err()
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
