//! Configuration in layers: defaults, then an optional TOML file, then the environment.
//!
//! Keys are flat. The key `gateway_listen` is `CONSTRUCT_GATEWAY_LISTEN` in the environment and
//! `gateway_listen = …` in the file named by `CONSTRUCT_CONFIG`; one file and one environment serve
//! all services, each reads the keys it knows. What all services share is [`Common`]; a service's
//! own keys are a struct of its own, loaded from the same sources. The two are deliberately not
//! joined with `#[serde(flatten)]`, which loses the types of values and the names of keys in
//! errors.

mod common;
pub mod duration;
mod secret;
mod sources;

use std::{fmt, io, path::PathBuf};

use serde::{Serialize, de::DeserializeOwned};

pub use common::{Common, LogFormat};
pub use secret::{Secret, SecretUrl};
pub use sources::Sources;
pub(crate) use sources::keys;

/// What the environment variables of all keys begin with.
pub(crate) const PREFIX: &str = "CONSTRUCT_";

/// The configuration of one service beside [`Common`].
///
/// The struct carries `#[serde(default)]`: its `Default` supplies what no source sets. Every field
/// is serialized (no `skip`), because the serialized default is the list of known keys.
pub trait ServiceConfig: Default + Serialize + DeserializeOwned {
    /// Whether it is a service with health endpoints, and not a command that runs beside one, in
    /// its environment.
    const SERVES: bool = true;

    /// Checks what types cannot say, before anything is started. `--check-config` runs it too.
    ///
    /// # Errors
    /// The first key whose value the service cannot work with, with what is wrong about it.
    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        let _ = common;
        Ok(())
    }
}

/// Where the value of a key came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// No source sets it.
    Default,
    /// The environment variable of this name.
    Environment(String),
    /// The key of this name in the file.
    File {
        /// Name of the key.
        key: String,
        /// The file.
        path: PathBuf,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Environment(name) => write!(f, "{name} in the environment"),
            Self::File { key, path } => write!(f, "`{key}` in {}", path.display()),
        }
    }
}

/// A value that its type accepts and the service does not.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` {message}")]
pub struct Invalid {
    key: &'static str,
    message: String,
}

impl Invalid {
    /// `message` continues a sentence that begins with the key: "must be at least 1". It never
    /// contains a secret.
    pub fn new(key: &'static str, message: impl Into<String>) -> Self {
        Self { key, message: message.into() }
    }

    /// A required key that no source sets.
    pub fn missing(key: &'static str) -> Self {
        let variable = variable_name(key);
        Self::new(
            key,
            format!(
                "is required: set {variable} in the environment, or `{key}` in the configuration file"
            ),
        )
    }
}

/// Why there is no usable configuration. The text names the key and where its value came from.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration file was named and cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The configuration file is not TOML.
    #[error("the configuration file {} is not valid TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What the parser met, and where.
        message: String,
    },
    /// A value has the wrong type or shape.
    #[error("{origin}: {message}")]
    Value {
        /// Where the value came from.
        origin: Origin,
        /// What is wrong with it.
        message: String,
    },
    /// A value was refused by [`ServiceConfig::validate`], or a required one is missing.
    #[error("{}{invalid}", place(origin))]
    Refused {
        /// Where the value came from.
        origin: Origin,
        /// What is wrong with it.
        invalid: Invalid,
    },
    /// The shape of the defaults could not be found out: a mistake in the program.
    #[error("the configuration type is unsuitable: {message}")]
    Shape {
        /// What is wrong with the type.
        message: String,
    },
}

/// Loads `T` from the environment of the process and the file that `CONSTRUCT_CONFIG` names, if it
/// does.
///
/// # Errors
/// [`Error`]: an unreadable file, or a value that `T` does not accept.
pub fn load<T: Default + Serialize + DeserializeOwned>() -> Result<T, Error> {
    Sources::from_process(None)?.load()
}

/// Names the place that has to be looked at. What nobody has set is in no place.
fn place(origin: &Origin) -> String {
    match origin {
        Origin::Default => String::new(),
        Origin::Environment(_) | Origin::File { .. } => format!("{origin}: "),
    }
}

/// The environment variable of a key.
pub(crate) fn variable_name(key: &str) -> String {
    format!("{PREFIX}{}", key.to_uppercase())
}
