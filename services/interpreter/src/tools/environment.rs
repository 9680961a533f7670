//! `getenv`, `setenv` and `pwd`: what the commands of a task find around them.
//!
//! The variables belong to the toolbox and live as long as one execution. They are never those of
//! the service, whose environment holds keys.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::ToolError;
use super::kind::{Kind, optional, required};
use super::output::{Output, field};
use super::program::quoted;
use super::subject::{self, PolicySubject};
use crate::command::{CommandPolicy, environment};

/// Most variables that are set.
const MAX_VARIABLES: usize = 200;

/// Most bytes of names and values together, of those that are set and of those of one call.
const MAX_BYTES: usize = 64 * 1024;

const NAME: Kind = Kind::Text { min_bytes: 1, max_bytes: 256 };

const WRONG_NAME: &str = "use letters, digits and _, and no digit in front";

pub(super) const GETENV: Definition = Definition {
    name: "getenv",
    aliases: &[],
    summary: "Returns an environment variable of the commands you run, or null where there is none.",
    description: "",
    parameters: &[required("name", NAME, "Name of the variable.")],
    output: Output::Nullable(&Output::Text),
    like: None,
    example: "getenv(\"PATH\")",
    errors: &[],
    effect: Effect::Read,
    permission: Permission::Environment,
    subject: name,
    provider: Provider::Host,
    limits: limits(1, 64),
};

pub(super) const SETENV: Definition = Definition {
    name: "setenv",
    aliases: &[],
    summary: "Sets an environment variable for all commands that follow, in this message's scripts.",
    description: "It is gone afterwards; a file keeps things longer. Without a value, what was set is taken back. \
        With a secret's handle in it, only commands run that the secret is bound to.",
    parameters: &[
        required("name", NAME, "Name of the variable."),
        optional("value", Kind::Text { min_bytes: 0, max_bytes: MAX_BYTES }, "none", "Its value."),
    ],
    output: Output::Object(&[
        field("name", Output::Text, "Name of the variable."),
        field(
            "value",
            Output::Nullable(&Output::Text),
            "What was set, null where that was taken back.",
        ),
    ]),
    like: None,
    example: "setenv(\"RUST_LOG\", \"debug\")",
    errors: &[],
    effect: Effect::Write,
    permission: Permission::Environment,
    subject: name,
    provider: Provider::Host,
    limits: limits(1, 64),
};

pub(super) const PWD: Definition = Definition {
    name: "pwd",
    aliases: &[],
    summary: "Returns the absolute path of the workspace, which is where commands start.",
    description: "Paths given to other tools are best written relative to it.",
    parameters: &[],
    output: Output::Text,
    like: None,
    example: "pwd()",
    errors: &[],
    effect: Effect::Read,
    permission: Permission::Pure,
    subject: subject::none,
    provider: Provider::Host,
    limits: limits(1, 8),
};

fn name(args: &Value) -> PolicySubject {
    PolicySubject::Name(args["name"].as_str().unwrap_or_default().to_owned())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Named {
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Setting {
    name: String,
    value: Option<String>,
}

/// A variable as it was set; the result of `setenv`, of which the journal keeps what is needed to
/// set it again.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Set {
    name: String,
    value: Option<String>,
}

/// The variables that scripts had set at one moment.
pub type Environment = BTreeMap<String, String>;

/// The variables that scripts have set.
#[derive(Debug, Default)]
pub(super) struct Variables {
    set: Mutex<Environment>,
}

impl Variables {
    /// The value that commands see.
    pub(super) fn get(&self, policy: &CommandPolicy, Named { name }: &Named) -> Option<String> {
        environment(policy, &self.set()).remove(name)
    }

    /// Sets a variable, or takes back what was set.
    pub(super) fn change(&self, Setting { name, value }: Setting) -> Result<Set, ToolError> {
        check(SETENV.name, "value", &name, value.as_deref().unwrap_or_default())?;
        let mut set = self.set();
        let others = || set.iter().filter(|(other, _)| **other != name);
        let count = others().count() + usize::from(value.is_some());
        let bytes = size(others()) + value.as_ref().map_or(0, |value| name.len() + value.len());
        if count > MAX_VARIABLES || bytes > MAX_BYTES {
            return Err(ToolError::invalid(format!(
                "setenv: with {name} there would be {count} variables of {bytes} bytes; at most {MAX_VARIABLES} of \
                 {MAX_BYTES} bytes together can be set. Nothing was changed. Pass data in a file.",
            )));
        }
        let changed = Set { name, value };
        changed.apply(&mut set);
        Ok(changed)
    }

    /// Sets what an earlier process had set, from the result that the journal has.
    pub(super) fn restore(&self, result: &Value) {
        if let Ok(changed) = Set::deserialize(result) {
            changed.apply(&mut self.set());
        }
    }

    /// Those that are set now.
    pub(super) fn now(&self) -> Environment {
        self.set().clone()
    }

    fn set(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // No change is ever half done.
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The variables of a command as a person would write them before it: those that are `set`, and
/// over them `own`.
pub(super) fn assignments(set: &Environment, own: &Value) -> String {
    let mut all = set.clone();
    let own = own.as_object().into_iter().flatten();
    all.extend(own.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))));
    all.iter()
        .map(|(name, value)| format!("{name}={}", quoted(value)))
        .collect::<Vec<_>>()
        .join(" ")
}

/// The variables for one command: those that are `set`, and over them those of the call.
pub(super) fn with(
    set: &Environment,
    tool: &str,
    own: Environment,
) -> Result<Environment, ToolError> {
    for (name, value) in &own {
        check(tool, &format!("options.env.{name}"), name, value)?;
    }
    let bytes = size(own.iter());
    if bytes > MAX_BYTES {
        return Err(ToolError::invalid(format!(
            "{tool}: options.env has {bytes} bytes, at most {MAX_BYTES} are allowed; pass data in a file or stdin."
        )));
    }
    let mut all = set.clone();
    all.extend(own);
    Ok(all)
}

impl Set {
    fn apply(&self, set: &mut BTreeMap<String, String>) {
        match &self.value {
            Some(value) => set.insert(self.name.clone(), value.clone()),
            None => set.remove(&self.name),
        };
    }
}

fn size<'a>(variables: impl Iterator<Item = (&'a String, &'a String)>) -> usize {
    variables.map(|(name, value)| name.len() + value.len()).sum()
}

fn check(tool: &str, parameter: &str, name: &str, value: &str) -> Result<(), ToolError> {
    let mut characters = name.chars();
    let starts = characters.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
    if !starts || !characters.all(|c| c.is_ascii_alphanumeric() || c == '_') {
        let shown: String = name.chars().take(100).collect();
        return Err(ToolError::invalid(format!(
            "{tool}: {shown:?} cannot be the name of an environment variable; {WRONG_NAME}."
        )));
    }
    if value.contains('\0') {
        return Err(ToolError::invalid(format!("{tool}: {parameter} contains a NUL character.")));
    }
    Ok(())
}
