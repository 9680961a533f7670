//! Configuration in layers: defaults, then an optional TOML file, then the environment.
//!
//! Keys are flat. The key `gateway_listen` is `CONSTRUCT_GATEWAY_LISTEN` in the environment and
//! `gateway_listen = …` in the file that `CONSTRUCT_CONFIG` names. One file and one environment
//! serve all services; each reads the keys it knows. All services share [`Common`]; a service's own
//! keys are a separate struct, loaded from the same sources. The two are deliberately not joined
//! with `#[serde(flatten)]`, which loses the types of values and the names of keys in errors.

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

/// The prefix of all environment variables.
pub(crate) const PREFIX: &str = "CONSTRUCT_";

/// The configuration of one service in addition to [`Common`].
///
/// The struct has `#[serde(default)]`: its `Default` supplies values that no source sets. Every
/// field is serialized (no `skip`), because the serialized default is the list of known keys.
pub trait ServiceConfig: Default + Serialize + DeserializeOwned {
    /// Whether it is a service with health endpoints, and not a command that runs beside one in the
    /// same environment.
    const SERVES: bool = true;

    /// Checks what types cannot express, before anything starts. `--check-config` runs it too.
    ///
    /// # Errors
    /// The first invalid key, with the reason.
    fn validate(&self, common: &Common) -> Result<(), Invalid> {
        let _ = common;
        Ok(())
    }
}

/// The source of a key's value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The default.
    Default,
    /// This environment variable.
    Environment(String),
    /// A key of the configuration file.
    File {
        /// The key.
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

/// A value that its type accepts and the service rejects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{key}` {message}")]
pub struct Invalid {
    key: &'static str,
    message: String,
}

impl Invalid {
    /// `message` continues a sentence that begins with the key: "must be at least 1". It must not
    /// contain a secret.
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

/// Why the configuration is unusable. The text names the key and its source.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration file cannot be read.
    #[error("cannot read the configuration file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The configuration file is not TOML.
    #[error("the configuration file {} is not valid TOML: {message}", path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The parser's error with its position.
        message: String,
    },
    /// A value has the wrong type or shape.
    #[error("{origin}: {message}")]
    Value {
        /// The source of the value.
        origin: Origin,
        /// The reason.
        message: String,
    },
    /// [`ServiceConfig::validate`] rejected a value, or a required one is missing.
    #[error("{}{invalid}", place(origin))]
    Refused {
        /// The source of the value.
        origin: Origin,
        /// The rejected value.
        invalid: Invalid,
    },
    /// The keys of the defaults are unknown: a programming error.
    #[error("the configuration type is unsuitable: {message}")]
    Shape {
        /// The reason.
        message: String,
    },
}

/// Loads `T` from the environment of the process and the file that `CONSTRUCT_CONFIG` names, if it
/// is set.
///
/// # Errors
/// [`Error`]: an unreadable file, or a value that `T` does not accept.
pub fn load<T: Default + Serialize + DeserializeOwned>() -> Result<T, Error> {
    Sources::from_process(None)?.load()
}

/// The source as a prefix of an error; empty for a default.
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
