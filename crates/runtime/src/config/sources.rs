//! The layers: reading and merging them, and tracking the source of each value.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::OsString,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
};

use figment::{
    Figment, Profile, Provider,
    providers::{Format, Toml},
    value::{Dict, Value},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value as Json;

use super::{Error, Invalid, Origin, PREFIX, variable_name};

/// The configuration file and the environment, read once. Any number of structs can be loaded from
/// them.
#[derive(Clone)]
pub struct Sources {
    file: Option<(PathBuf, Dict)>,
    /// By key, without the prefix and in lower case. Empty variables are omitted.
    environment: BTreeMap<String, OsString>,
}

impl Sources {
    /// Reads the environment of the process, and `file` or else the file that `CONSTRUCT_CONFIG`
    /// names.
    ///
    /// # Errors
    /// When the file cannot be read or is not TOML.
    pub fn from_process(file: Option<&Path>) -> Result<Self, Error> {
        Self::new(file, env::vars_os())
    }

    /// The same with the given environment, for tests.
    pub(crate) fn new(
        file: Option<&Path>,
        variables: impl IntoIterator<Item = (OsString, OsString)>,
    ) -> Result<Self, Error> {
        let environment: BTreeMap<_, _> = variables
            .into_iter()
            .filter_map(|(name, value)| {
                let key = name.to_str()?.strip_prefix(PREFIX)?;
                // Compose files and charts pass `NAME=` for unset values; it must not mean "the
                // empty string".
                (!value.is_empty()).then(|| (key.to_lowercase(), value))
            })
            .collect();
        let path =
            file.map(Path::to_owned).or_else(|| environment.get("config").map(PathBuf::from));
        let file = path.map(|path| read_file(&path).map(|dict| (path, dict))).transpose()?;
        Ok(Self { file, environment })
    }

    /// Loads a struct: values of the sources, and otherwise those of `T::default()`.
    ///
    /// # Errors
    /// [`Error::Value`] names the first key whose value `T` does not accept.
    pub fn load<T: Default + Serialize + DeserializeOwned>(&self) -> Result<T, Error> {
        let shape = shape::<T>()?;
        let mut layer = Dict::new();
        if let Some((_, file)) = &self.file {
            layer.extend(
                file.iter()
                    .filter(|(key, _)| shape.contains_key(*key))
                    .map(|(k, v)| (k.clone(), v.clone())),
            );
        }
        for (key, default) in &shape {
            let Some(value) = self.environment.get(key) else { continue };
            let value = value.to_str().ok_or_else(|| Error::Value {
                origin: self.origin(key),
                message: "the value is not valid UTF-8".to_owned(),
            })?;
            layer.insert(key.clone(), typed(value, default));
        }
        // Lossy: a field without a default value has no known type, so its value arrives as text,
        // and "8" may mean a number.
        Figment::from(Layer(layer)).extract_lossy().map_err(|error| self.explain(error))
    }

    /// The source of a key's value.
    pub fn origin(&self, key: &str) -> Origin {
        if self.environment.contains_key(key) {
            return Origin::Environment(variable_name(key));
        }
        match &self.file {
            Some((path, dict)) if dict.contains_key(key) => {
                Origin::File { key: key.to_owned(), path: path.clone() }
            }
            _ => Origin::Default,
        }
    }

    /// Adds the source to a rejected value.
    pub(crate) fn refused(&self, invalid: Invalid) -> Error {
        Error::Refused { origin: self.origin(invalid.key), invalid }
    }

    /// Keys of the file that are not in `known`: misspelled, or meant for another service.
    pub(crate) fn unknown_keys(&self, known: &BTreeSet<String>) -> Vec<String> {
        let Some((_, dict)) = &self.file else { return Vec::new() };
        dict.keys().filter(|key| !known.contains(*key)).cloned().collect()
    }

    /// The loaded values, one `key = value  # origin` per line. Secrets are masked by their types.
    pub(crate) fn describe(&self, config: &impl Serialize) -> Result<String, Error> {
        let mut text = String::new();
        for (key, value) in to_object(config)? {
            let origin = self.origin(&key);
            // Writing to a string cannot fail.
            let _ = match value {
                Json::Null => writeln!(text, "# {key} is not set ({})", variable_name(&key)),
                value => writeln!(text, "{key} = {value}  # {origin}"),
            };
        }
        Ok(text)
    }

    fn explain(&self, error: figment::Error) -> Error {
        let message = error.kind.to_string();
        match error.path.first() {
            Some(key) => Error::Value { origin: self.origin(key), message },
            None => Error::Shape { message },
        }
    }
}

/// The keys of a struct.
pub(crate) fn keys<T: Default + Serialize>() -> Result<BTreeSet<String>, Error> {
    Ok(shape::<T>()?.into_iter().map(|(key, _)| key).collect())
}

fn shape<T: Default + Serialize>() -> Result<serde_json::Map<String, Json>, Error> {
    to_object(&T::default())
}

fn to_object(config: &impl Serialize) -> Result<serde_json::Map<String, Json>, Error> {
    match serde_json::to_value(config) {
        Ok(Json::Object(object)) => Ok(object),
        Ok(_) => Err(Error::Shape { message: "it is not a struct".to_owned() }),
        Err(error) => Err(Error::Shape { message: error.to_string() }),
    }
}

/// Converts a variable's text to the type of the key's default. Guessing the type from the text
/// would turn a password of digits into a number.
fn typed(text: &str, default: &Json) -> Value {
    match default {
        Json::Null | Json::String(_) => Value::from(text),
        Json::Array(_) if !text.trim_start().starts_with('[') => {
            Value::from(text.split(',').map(|part| Value::from(part.trim())).collect::<Vec<_>>())
        }
        Json::Bool(_) | Json::Number(_) | Json::Array(_) | Json::Object(_) => {
            match text.trim().parse() {
                Ok(value) => value,
                Err(never) => match never {},
            }
        }
    }
}

fn read_file(path: &Path) -> Result<Dict, Error> {
    let text =
        fs::read_to_string(path).map_err(|source| Error::Read { path: path.to_owned(), source })?;
    Figment::from(Toml::string(&text))
        .extract()
        .map_err(|error| Error::Syntax { path: path.to_owned(), message: error.kind.to_string() })
}

/// Merged values as a figment provider.
struct Layer(Dict);

impl Provider for Layer {
    fn metadata(&self) -> figment::Metadata {
        figment::Metadata::named("configuration")
    }

    fn data(&self) -> Result<figment::value::Map<Profile, Dict>, figment::Error> {
        Ok(Profile::Default.collect(self.0.clone()))
    }
}

#[cfg(test)]
mod tests;
