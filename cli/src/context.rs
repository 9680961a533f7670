//! Contexts: where a gateway is and how to log in there, by name. They are kept in a file that only
//! its owner may read; their keys in the keyring where there is one, and no command prints a key. A
//! person who has logged in ([`crate::login`]) has a session in a key's place.

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
    hidden,
    keyring::{self, Keyring},
    output,
};

/// Where the gateway is when nobody says.
pub(crate) const DEFAULT_ADDRESS: &str = "http://127.0.0.1:60080";
/// Holds a key, for programs.
const KEY: &str = "CONSTRUCT_KEY";
/// Between two looks at whether what is remembered may be changed.
const LOCK_PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Subcommand)]
pub(crate) enum ContextCommand {
    /// Remember a gateway, or replace what is remembered. The first one is used from then on. With
    /// --organization, that one is worked in.
    Add(Add),
    /// Use this one from now on.
    Use {
        /// Its name.
        name: String,
    },
    /// List them. The one that is used has a star.
    List,
    /// Forget one.
    Remove {
        /// Its name.
        name: String,
    },
}

/// How a gateway at an `https://` address is trusted, and what is shown to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Args, Serialize, Deserialize)]
pub(crate) struct TlsArgs {
    /// The certificates (PEM) that vouch for the gateway's, instead of the system's.
    #[arg(long, global = true, env = "CONSTRUCT_CA", value_name = "FILE")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ca: Option<PathBuf>,
    /// The certificate (PEM) to show to a gateway that asks for one.
    #[arg(
        long,
        global = true,
        env = "CONSTRUCT_CLIENT_CERTIFICATE",
        value_name = "FILE",
        requires = "client_key"
    )]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) client_certificate: Option<PathBuf>,
    /// Its private key (PEM).
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
    /// These, filled up with what is remembered. A certificate and its key go together.
    fn or(self, remembered: Self) -> Self {
        let (client_certificate, client_key) = match self.client_certificate {
            Some(certificate) => (Some(certificate), self.client_key),
            None => (remembered.client_certificate, remembered.client_key),
        };
        Self { ca: self.ca.or(remembered.ca), client_certificate, client_key }
    }

    /// The same files, wherever a later command is started.
    ///
    /// # Errors
    /// When there is no such file.
    fn absolute(self) -> Result<Self, Failure> {
        let whole = |path: Option<PathBuf>| {
            path.map(|path| {
                let found = fs::canonicalize(&path);
                found.map_err(|error| {
                    Failure::usage(format!("{} cannot be read: {error}", path.display()))
                })
            })
            .transpose()
        };
        let Self { ca, client_certificate, client_key } = self;
        Ok(Self {
            ca: whole(ca)?,
            client_certificate: whole(client_certificate)?,
            client_key: whole(client_key)?,
        })
    }
}

/// A key never stands on the command line, where every process of the machine could read it.
#[derive(Debug, Args)]
pub(crate) struct Add {
    /// What to call it.
    name: String,
    /// Where the gateway is: https://HOST:PORT (with --ca and the like, where needed), http://HOST:PORT, or unix:/PATH for the socket on
    /// this machine.
    #[arg(long, value_name = "URL")]
    address: String,
    /// Read the API key from this file.
    #[arg(long, value_name = "FILE", conflicts_with = "key_stdin")]
    key_file: Option<PathBuf>,
    /// Ask for the API key, or read it from standard input.
    #[arg(long)]
    key_stdin: bool,
    /// Whether to put the API key into the keyring of this session: when there is one that takes
    /// it, always, or never.
    #[arg(long, value_enum, default_value_t = keyring::Wanted::Auto, env = "CONSTRUCT_KEYRING", value_name = "WHEN")]
    keyring: keyring::Wanted,
}

/// All of the file.
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
    /// When what is in the key's place is a session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    login: Option<Login>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    organization: Option<String>,
    #[serde(flatten)]
    tls: TlsArgs,
}

/// Where a person has logged in, and as which program: what it takes to renew their session, but
/// for the session itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Login {
    pub(crate) issuer: String,
    pub(crate) client_id: String,
    /// Whom tokens have to be for.
    pub(crate) audience: String,
}

/// Where the key of a context is.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Key {
    /// Here.
    #[serde(default, rename = "key", skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    /// In the keyring, under this name. Each key has a new one, so that none is ever in the place
    /// of another.
    #[serde(default, rename = "keyring", skip_serializing_if = "Option::is_none")]
    item: Option<String>,
}

/// What the command line and the environment say of whom to talk to.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wanted {
    /// An address.
    pub(crate) gateway: Option<String>,
    /// A context by name.
    pub(crate) context: Option<String>,
    /// An organization by id.
    pub(crate) organization: Option<String>,
    /// Certificates.
    pub(crate) tls: TlsArgs,
}

/// Whom to talk to, and as whom.
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
    /// The context whose session is to be presented in a key's place.
    pub(crate) session: Option<String>,
}

impl Wanted {
    /// What is wanted, filled up from the context that is named or used. A context's key goes to
    /// the context's address and nowhere else: who names another address has to bring a key for it.
    ///
    /// # Errors
    /// When there is no such context, or the file cannot be read.
    pub(crate) fn target(self) -> Result<Target, Failure> {
        let key =
            std::env::var(KEY).ok().map(|key| key.trim().to_owned()).filter(|key| !key.is_empty());
        self.target_of(&path(), key)
    }

    fn target_of(
        self,
        path: &Result<PathBuf, Failure>,
        key: Option<String>,
    ) -> Result<Target, Failure> {
        let context = match (&self.context, &self.gateway, path) {
            (Some(name), _, Ok(path)) => Some((name.clone(), Contexts::read(path)?.get(name)?)),
            (Some(name), _, Err(_)) => return Err(unknown(name)),
            (None, None, Ok(path)) => Contexts::read(path)?.used(),
            (None, ..) => None,
        };
        let (remembered, address) = match (context, self.gateway) {
            (Some((_, context)), Some(gateway)) if gateway != context.address => (None, gateway),
            (Some((name, context)), _) => (Some((name, context.clone())), context.address),
            (None, gateway) => {
                let usual = || daemon::address().unwrap_or_else(|| DEFAULT_ADDRESS.to_owned());
                (None, gateway.unwrap_or_else(usual))
            }
        };
        let mut session = None;
        let (remembered_key, organization, tls) = match remembered {
            // The keyring is not asked for what is not needed.
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
            key: key.or(remembered_key),
            organization: self.organization.or(organization),
            tls: self.tls.or(tls),
            session,
        })
    }
}

/// A context that a person logs in with.
pub(crate) struct Kept {
    path: PathBuf,
    pub(crate) name: String,
    pub(crate) address: String,
    pub(crate) tls: TlsArgs,
}

impl Kept {
    /// The one that is named or used.
    ///
    /// # Errors
    /// When there is none, or the file cannot be read.
    pub(crate) fn find(wanted: Option<&str>) -> Result<Self, Failure> {
        let path = path()?;
        let all = Contexts::read(&path)?;
        let found = match wanted {
            Some(name) => Some((name.to_owned(), all.get(name)?)),
            None => all.used(),
        };
        let none =
            || Failure::usage("no context is used, and what it takes to log in is kept in one");
        let (name, Context { address, tls, .. }) = found.ok_or_else(|| {
            none()
                .hint("add one: construct context add work --address https://construct.example.com")
        })?;
        Ok(Self { path, name, address, tls })
    }

    /// The same with these certificates, as far as there are some.
    pub(crate) fn with(mut self, tls: TlsArgs) -> Self {
        self.tls = tls.or(self.tls);
        self
    }

    /// Keeps others from changing what is remembered, until the file is dropped. Who renews a
    /// session holds this meanwhile: an issuer that gives a new refresh token with each renewal
    /// takes the second use of an old one for a theft.
    ///
    /// # Errors
    /// When the file of the lock cannot be had.
    pub(crate) async fn lock(&self) -> Result<File, Failure> {
        let file = lock_file(&self.path)?;
        // Asked for again and again: a command that has nothing else to do any more ends, whoever
        // has it.
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => tokio::time::sleep(LOCK_PAUSE).await,
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }

    /// Whether there is room for a session.
    ///
    /// # Errors
    /// When an API key is there.
    pub(crate) fn takes_session(&self) -> Result<(), Failure> {
        let context = Contexts::read(&self.path)?.get(&self.name)?;
        if context.login.is_some() || (context.key.item.is_none() && context.key.text.is_none()) {
            return Ok(());
        }
        let failure = Failure::usage(format!("the context {} has an API key", self.name));
        Err(failure.hint(format!(
            "add another one to log in with: construct context add NAME --address {}",
            self.address
        )))
    }

    /// Where somebody has logged in, if somebody has, and the session.
    ///
    /// # Errors
    /// When the keyring does not give it, or the context is of another gateway by now, which no
    /// session of this one is for.
    pub(crate) fn session(&self) -> Result<Option<(Login, String)>, Failure> {
        let context = Contexts::read(&self.path)?.get(&self.name)?;
        if context.address != self.address {
            return Err(unknown(&self.name));
        }
        let Some(login) = context.login else { return Ok(None) };
        Ok(context.key.get("log-in", &self.name)?.map(|session| (login, session)))
    }

    /// Keeps a new session, and says where. The lock has to be held.
    ///
    /// # Errors
    /// When it cannot be kept.
    pub(crate) fn begin(
        &self,
        login: Login,
        session: String,
        wanted: keyring::Wanted,
    ) -> Result<(), Failure> {
        self.takes_session()?;
        let key = Key::keep("log-in", &self.name, session, wanted, &self.path)?;
        self.replace(Some(login), key)?.forget_or_warn();
        Ok(())
    }

    /// Keeps a session that was renewed where the one before it was. The lock has to be held.
    ///
    /// # Errors
    /// When it cannot be kept.
    pub(crate) fn renew(&self, session: String) -> Result<(), Failure> {
        let context = Contexts::read(&self.path)?.get(&self.name)?;
        let key = match context.key.item {
            Some(_) => Key::put(&self.name, &session)
                .map_err(|why| Key::refused("log-in", &why, &self.path))?,
            None => Key { text: Some(session), item: None },
        };
        self.replace(context.login, key)?.forget_or_warn();
        Ok(())
    }

    /// Forgets the session. The lock has to be held.
    ///
    /// # Errors
    /// When it stays.
    pub(crate) fn end(&self) -> Result<(), Failure> {
        self.replace(None, Key::default())?.forget()
    }

    /// Puts another session in the place of one, and gives that one, which is to be forgotten.
    fn replace(&self, login: Option<Login>, key: Key) -> Result<Key, Failure> {
        let item = key.item.clone();
        let swapped = self.swap(login, key);
        if swapped.is_err() {
            _ = Key { text: None, item }.forget();
        }
        swapped
    }

    /// Puts a session into the file, and gives what was there.
    fn swap(&self, login: Option<Login>, key: Key) -> Result<Key, Failure> {
        let mut all = Contexts::read(&self.path)?;
        // A session goes to the address it was made for, and to no other that took the name
        // meanwhile.
        let context =
            all.contexts.get_mut(&self.name).filter(|context| context.address == self.address);
        let context = context.ok_or_else(|| unknown(&self.name))?;
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
                crate::gateway::Gateway::check(&address)?;
                let key = match key_file {
                    Some(file) => Some(entity::read_text(&file)?),
                    None if key_stdin => Some(hidden::read("API key: ")?),
                    None => None,
                };
                let key = key.map(|key| key.trim().to_owned()).filter(|key| !key.is_empty());
                let tls = tls.absolute()?;
                // What is read is not old when it is written, however long the person took to type.
                let _lock = lock(&path)?;
                let mut all = Contexts::read(&path)?;
                let key = key
                    .map(|key| Key::keep("key", &name, key, keyring, &path))
                    .transpose()?
                    .unwrap_or_default();
                let item = key.item.clone();
                all.current.get_or_insert_with(|| name.clone());
                let replaced = all
                    .contexts
                    .insert(name, Context { address, key, login: None, organization, tls });
                if let Err(failure) = all.write(&path) {
                    _ = Key { text: None, item }.forget();
                    return Err(failure);
                }
                replaced.map_or(Ok(()), |context| context.key.forget())
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
                let removed = all.contexts.remove(&name).ok_or_else(|| unknown(&name))?;
                all.current = all.current.filter(|current| *current != name);
                all.write(&path)?;
                removed.key.forget()
            }
        }
    }
}

impl Key {
    /// Puts a key, or what is in a key's place, where it is wanted, and says where that is. `what`
    /// it is called.
    ///
    /// # Errors
    /// When it is wanted in the keyring alone, which does not take it.
    fn keep(
        what: &str,
        name: &str,
        key: String,
        wanted: keyring::Wanted,
        path: &Path,
    ) -> Result<Self, Failure> {
        let kept = match wanted {
            keyring::Wanted::Never => Err(String::new()),
            keyring::Wanted::Auto | keyring::Wanted::Always => Self::put(name, &key),
        };
        match kept {
            Ok(kept) => {
                eprintln!("the {what} of {name} is in the keyring");
                Ok(kept)
            }
            Err(why) if wanted == keyring::Wanted::Always => Err(Self::refused(what, &why, path)),
            Err(why) => {
                let why = if why.is_empty() { why } else { format!(" ({why})") };
                eprintln!(
                    "the {what} of {name} is in {}, which only you may read{why}",
                    path.display()
                );
                Ok(Self { text: Some(key), item: None })
            }
        }
    }

    /// Puts it into the keyring.
    ///
    /// # Errors
    /// When there is none, or it does not take it, in words.
    fn put(name: &str, key: &str) -> Result<Self, String> {
        let item = uuid::Uuid::now_v7().to_string();
        Keyring::find()?.store(&item, &format!("Construct: {name}"), key)?;
        Ok(Self { text: None, item: Some(item) })
    }

    fn refused(what: &str, why: &str, path: &Path) -> Failure {
        let failure = Failure::failed(format!("the keyring does not take the {what}: {why}"));
        failure.hint(format!(
            "--keyring never keeps it in {}, which only you may read",
            path.display()
        ))
    }

    /// The key of this context, or what is in its place, if there is one.
    ///
    /// # Errors
    /// When the keyring does not give it.
    fn get(self, what: &str, name: &str) -> Result<Option<String>, Failure> {
        let Some(item) = self.item else { return Ok(self.text) };
        let found = Keyring::find().and_then(|keyring| keyring.get(&item));
        let key = found.map_err(|why| {
            Failure::failed(format!("the keyring does not give the {what} of {name}: {why}"))
        })?;
        let again = match what {
            "key" => format!("give it again: construct context add {name} --key-stdin …"),
            _ => format!("log in again: construct login --context {name}"),
        };
        let missing =
            || Failure::usage(format!("the {what} of {name} is not in the keyring any more"));
        key.map(Some).ok_or_else(|| missing().hint(again))
    }

    /// Removes it from the keyring.
    ///
    /// # Errors
    /// When it stays there.
    fn forget(self) -> Result<(), Failure> {
        let Some(item) = self.item else { return Ok(()) };
        let done = Keyring::find().and_then(|keyring| keyring.remove(&item));
        let failed = |why| {
            let failure = Failure::failed(format!(
                "the context is changed, but its old key stays in the keyring: {why}"
            ));
            failure.hint(format!(
                "it is the one of the service construct with the item {item}; revoke it, or remove it there"
            ))
        };
        done.map_err(failed)
    }

    /// The same where something else is there already that matters more.
    fn forget_or_warn(self) {
        if let Err(failure) = self.forget() {
            eprintln!("warning: {}", failure.message());
        }
    }

    /// Where it is, in words.
    const fn place(&self, login: bool) -> &'static str {
        match (&self.item, &self.text) {
            (Some(_), _) if login => "log-in in the keyring",
            (None, Some(_)) if login => "log-in in the file",
            (Some(_), _) => "key in the keyring",
            (None, Some(_)) => "key in the file",
            (None, None) => "without a key",
        }
    }
}

fn unknown(name: &str) -> Failure {
    Failure::usage(format!("there is no context {name}")).hint("construct context list")
}

/// Where contexts are kept.
fn path() -> Result<PathBuf, Failure> {
    let set =
        |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CONFIG_HOME").or_else(|| set("HOME").map(|home| home.join(".config")));
    let base =
        base.ok_or_else(|| Failure::usage("contexts are kept below HOME, which is not set"))?;
    Ok(base.join("construct").join("contexts.json"))
}

impl Contexts {
    fn read(path: &Path) -> Result<Self, Failure> {
        let shown = path.display();
        let text = match fs::read(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(Failure::usage(format!("{shown} cannot be read: {error}"))),
        };
        let mode = fs::metadata(path).map_or(0, |found| found.permissions().mode());
        if mode & 0o077 != 0 {
            return Err(Failure::usage(format!("{shown} holds keys, and others may read it"))
                .hint(format!("chmod 600 {shown}")));
        }
        // What cannot be read is not quoted: it may be a key.
        serde_json::from_slice(&text)
            .map_err(|_| Failure::usage(format!("{shown} is not what this program wrote")))
    }

    fn write(&self, path: &Path) -> Result<(), Failure> {
        create_folder(path)?;
        let unfinished = path.with_extension(format!("{}.tmp", std::process::id()));
        // Whole or not at all, and never readable for others.
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
        let text = serde_json::to_string_pretty(self).unwrap_or_default() + "\n";
        let done = file
            .write_all(text.as_bytes())
            .and_then(|()| file.sync_all())
            .and_then(|()| fs::rename(&unfinished, path));
        if done.is_err() {
            _ = fs::remove_file(&unfinished);
        }
        Ok(done?)
    }

    fn get(&self, name: &str) -> Result<Context, Failure> {
        self.contexts.get(name).cloned().ok_or_else(|| unknown(name))
    }

    fn used(&self) -> Option<(String, Context)> {
        let name = self.current.as_ref()?;
        Some((name.clone(), self.contexts.get(name)?.clone()))
    }

    fn show(&self) -> String {
        let line = |(name, context): (&String, &Context)| {
            let star = if self.current.as_ref() == Some(name) { '*' } else { ' ' };
            let key = context.key.place(context.login.is_some());
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
    fn contexts_are_kept_for_their_owner_alone_and_keys_are_not_shown() {
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
    fn a_key_goes_to_the_address_it_was_given_for() {
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
            let wanted = Wanted { gateway, context, ..Wanted::default() };
            let Target { address, key, organization, tls, .. } =
                wanted.target_of(&path, key.map(str::to_owned)).unwrap();
            // Whom to trust is remembered with the address, too.
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
            Wanted { context: Some("c".into()), ..Wanted::default() }
                .target_of(&path, None)
                .is_err()
        );
        fs::remove_dir_all(folder).unwrap();
    }
}
