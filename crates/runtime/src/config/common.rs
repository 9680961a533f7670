//! The configuration that all services share.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::{Deserialize, Serialize};

use super::{Invalid, Secret, SecretUrl, duration};
use crate::{master_key::MasterKeys, telemetry::Chain};

/// Keys with the same meaning in every service. Each is `CONSTRUCT_<KEY>` in the environment.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(default)]
pub struct Common {
    /// Address of the NATS server.
    pub nats_url: SecretUrl,
    /// CA certificates that authenticate the NATS server, in PEM, for an address that begins with
    /// `tls://`. Not set: the system's.
    pub nats_ca_file: Option<PathBuf>,
    /// The client certificate for the NATS server, in PEM.
    pub nats_certificate_file: Option<PathBuf>,
    /// The key of that certificate, in PEM.
    pub nats_key_file: Option<PathBuf>,
    /// Address of the PostgreSQL database. Required by services that use it; see
    /// [`Common::database_url`].
    pub database_url: Option<SecretUrl>,
    /// Folder for [blobs](Common::blob_dir) and [caches](Common::cache_dir).
    pub data_dir: PathBuf,
    /// Address for `/healthz`, `/readyz` and `/metrics`. Not set: they are not served.
    pub health_listen: Option<SocketAddr>,
    /// Filter of log lines and spans, in the syntax of `tracing`: `info`,
    /// `warn,construct_bus=debug`.
    pub log: String,
    /// Format of log lines.
    pub log_format: LogFormat,
    /// Grace period for work in flight after the first stop signal.
    #[serde(with = "duration")]
    pub shutdown_grace: Duration,
    /// Name of this process among its replicas. Not set: the service's name and a random suffix.
    pub instance_id: Option<String>,
    /// Master keys as text; see [`MasterKeys::parse`].
    pub master_key: Option<Secret>,
    /// File with master keys, readable by its owner only.
    pub master_key_file: Option<PathBuf>,
    /// Keys that encrypt the secrets of scripts, in the format of `master_key`. None of them may be
    /// a master key.
    pub secrets_key: Option<Secret>,
    /// File with such keys, readable by its owner only.
    pub secrets_key_file: Option<PathBuf>,
    /// Keys that sign model tokens for scripts and programs, in the format of `master_key`. None of
    /// them may be a master key.
    pub token_key: Option<Secret>,
    /// File with such keys, readable by its owner only.
    pub token_key_file: Option<PathBuf>,
}

/// Format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// One line of text, colored on a terminal.
    Text,
    /// One JSON object per line.
    Json,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            nats_url: "nats://127.0.0.1:4222".into(),
            nats_ca_file: None,
            nats_certificate_file: None,
            nats_key_file: None,
            database_url: None,
            data_dir: ".construct/data".into(),
            health_listen: None,
            log: "info".to_owned(),
            log_format: LogFormat::Text,
            shutdown_grace: Duration::from_secs(5),
            instance_id: None,
            master_key: None,
            master_key_file: None,
            secrets_key: None,
            secrets_key_file: None,
            token_key: None,
            token_key_file: None,
        }
    }
}

impl Common {
    /// The database address, for services that require it.
    ///
    /// # Errors
    /// When it is not set.
    pub fn database_url(&self) -> Result<&SecretUrl, Invalid> {
        self.database_url.as_ref().ok_or_else(|| Invalid::missing("database_url"))
    }

    /// The master keys from `CONSTRUCT_MASTER_KEY` or the file that `CONSTRUCT_MASTER_KEY_FILE`
    /// names.
    ///
    /// # Errors
    /// When neither or both are set, the file is unreadable or readable by others, or the text is
    /// malformed.
    pub fn master_keys(&self) -> Result<MasterKeys, Invalid> {
        keys(["master_key", "master_key_file"], self.master_key.as_ref(), self.master_key_file.as_deref())?.ok_or_else(
            || {
                Invalid::new(
                    "master_key",
                    "is required: set CONSTRUCT_MASTER_KEY_FILE to a file with 32 random bytes in base64 \
                     (`head -c 32 /dev/urandom | base64`, mode 0600), or CONSTRUCT_MASTER_KEY to such text",
                )
            },
        )
    }

    /// The keys of scripts' secrets, from `CONSTRUCT_SECRETS_KEY` or the file that
    /// `CONSTRUCT_SECRETS_KEY_FILE` names; `None` when neither is set. They are separate keys,
    /// because the interpreter has them and no master key.
    ///
    /// # Errors
    /// When both are set, the file is unreadable or readable by others, the text is malformed, or
    /// one of them is a configured master key.
    pub fn secrets_keys(&self) -> Result<Option<MasterKeys>, Invalid> {
        let found = keys(
            ["secrets_key", "secrets_key_file"],
            self.secrets_key.as_ref(),
            self.secrets_key_file.as_deref(),
        )?;
        let reason =
            "is also a master key: it must be a key of its own, because the interpreter has it";
        self.no_master_key("secrets_key", found, reason)
    }

    /// The keys that sign [`crate::ModelToken`]s, from `CONSTRUCT_TOKEN_KEY` or the file that
    /// `CONSTRUCT_TOKEN_KEY_FILE` names. `None` when neither is set: then tokens are neither issued
    /// nor accepted. They are separate keys, because the reconciler has them and no master key.
    ///
    /// # Errors
    /// As [`Common::secrets_keys`].
    pub fn token_keys(&self) -> Result<Option<MasterKeys>, Invalid> {
        let found = keys(
            ["token_key", "token_key_file"],
            self.token_key.as_ref(),
            self.token_key_file.as_deref(),
        )?;
        let reason =
            "is also a master key: it must be a key of its own, because the reconciler has it";
        self.no_master_key("token_key", found, reason)
    }

    fn no_master_key(
        &self,
        name: &'static str,
        found: Option<MasterKeys>,
        reason: &str,
    ) -> Result<Option<MasterKeys>, Invalid> {
        let masters = keys(
            ["master_key", "master_key_file"],
            self.master_key.as_ref(),
            self.master_key_file.as_deref(),
        )?;
        if let (Some(found), Some(masters)) = (&found, &masters)
            && found.iter().any(|key| masters.iter().any(|master| master.expose() == key.expose()))
        {
            return Err(Invalid::new(name, reason));
        }
        Ok(found)
    }

    /// The files of the client certificate for NATS and its key, if configured.
    pub fn nats_certificate(&self) -> Option<(PathBuf, PathBuf)> {
        self.nats_certificate_file.clone().zip(self.nats_key_file.clone())
    }

    /// Folder of content-addressed payloads that are too large for the bus. All services of a mesh
    /// share it.
    pub fn blob_dir(&self) -> PathBuf {
        self.data_dir.join("blobs")
    }

    /// Folder of caches, which may be deleted at any time and are recreated.
    pub fn cache_dir(&self) -> PathBuf {
        self.data_dir.join("cache")
    }

    /// Checks what types cannot express.
    pub(crate) fn validate(&self) -> Result<(), Invalid> {
        if self.nats_url.expose().is_empty() {
            return Err(Invalid::missing("nats_url"));
        }
        if self.nats_certificate_file.is_some() != self.nats_key_file.is_some() {
            return Err(Invalid::new(
                "nats_certificate_file",
                "and `nats_key_file` belong together: set both, or neither",
            ));
        }
        if self.data_dir == Path::new("") {
            return Err(Invalid::missing("data_dir"));
        }
        crate::telemetry::check_filter(&self.log)
            .map_err(|message| Invalid::new("log", message))?;
        let is_token = |id: &str| {
            (1..=64).contains(&id.len())
                && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
        };
        match &self.instance_id {
            // The id is a token of subjects, where a dot or a wildcard would address something
            // else.
            Some(id) if !is_token(id) => Err(Invalid::new(
                "instance_id",
                "must be 1 to 64 letters, digits, `-` or `_`, because it is part of subjects",
            )),
            _ => Ok(()),
        }
    }
}

/// Keys from a text or a file, whichever is set.
fn keys(
    [key, key_file]: [&'static str; 2],
    text: Option<&Secret>,
    file: Option<&Path>,
) -> Result<Option<MasterKeys>, Invalid> {
    match (text.filter(|text| !text.expose().is_empty()), file) {
        (Some(_), Some(_)) => Err(Invalid::new(
            key,
            format!(
                "is set together with `{key_file}`: set one of them, so that it is clear which keys hold"
            ),
        )),
        (Some(text), None) => MasterKeys::parse(text.expose())
            .map(Some)
            .map_err(|error| Invalid::new(key, error.to_string())),
        (None, Some(path)) => MasterKeys::read(path)
            .map(Some)
            .map_err(|error| Invalid::new(key_file, Chain(&error).to_string())),
        (None, None) => Ok(None),
    }
}
