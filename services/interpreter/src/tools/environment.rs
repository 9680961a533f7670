//! `getenv`, `setenv` and `pwd`: the environment of a task's commands.
//!
//! The variables belong to the toolbox and live as long as one execution. They never include the
//! service's own environment, which holds keys.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::error::ToolError;
use super::kind::{Kind, optional, required};
use super::output::{Output, field};
use super::program::shell_quote;
use super::subject::{self, PolicySubject};
use crate::command::{CommandPolicy, environment};

/// Maximum number of variables.
const MAX_VARIABLES: usize = 200;

/// Maximum size of all names and values together, in bytes, of the variables that are set and of
/// those of one call.
const MAX_BYTES: usize = 64 * 1024;

const NAME: Kind = Kind::Text { min_bytes: 1, max_bytes: 256 };

const NAME_RULE: &str = "use letters, digits and _, and do not begin with a digit";

pub(super) const GETENV: Definition = Definition {
    name: "getenv",
    aliases: &[],
    summary: "Returns an environment variable of the commands you run, or null if there is none.",
    description: "",
    parameters: &[required("name", NAME, "Name of the variable.")],
    output: Output::Nullable(&Output::Text),
    base_tool: None,
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
    summary: "Sets an environment variable for all following commands of this message's scripts.",
    description: "It is not kept after that; use a file for what must last. Without a value, the variable is unset. If \
     the value contains a secret's handle, only commands that the secret is bound to can run.",
    parameters: &[
        required("name", NAME, "Name of the variable."),
        optional("value", Kind::Text { min_bytes: 0, max_bytes: MAX_BYTES }, "none", "Its value."),
    ],
    output: Output::Object(&[
        field("name", Output::Text, "Name of the variable."),
        field(
            "value",
            Output::Nullable(&Output::Text),
            "The new value, null if the variable was unset.",
        ),
    ]),
    base_tool: None,
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
    summary: "Returns the absolute path of the workspace, the directory in which commands start.",
    description: "For other tools, prefer paths relative to it.",
    parameters: &[],
    output: Output::Text,
    base_tool: None,
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
pub(super) struct GetArguments {
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SetArguments {
    name: String,
    value: Option<String>,
}

/// A variable as it was set. It is the result of `setenv`, from which the journal can restore the
/// variable.
#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Assignment {
    name: String,
    value: Option<String>,
}

/// The variables that scripts have set at a point in time.
pub type Environment = BTreeMap<String, String>;

/// The variables of a toolbox.
#[derive(Debug, Default)]
pub(super) struct Variables {
    set: Mutex<Environment>,
}

impl Variables {
    /// The value of a variable for commands.
    pub(super) fn get(
        &self,
        policy: &CommandPolicy,
        GetArguments { name }: &GetArguments,
    ) -> Option<String> {
        environment(policy, &self.set()).remove(name)
    }

    /// Sets or unsets a variable.
    pub(super) fn change(
        &self,
        SetArguments { name, value }: SetArguments,
    ) -> Result<Assignment, ToolError> {
        check(SETENV.name, "value", &name, value.as_deref().unwrap_or_default())?;
        let mut set = self.set();
        let others = || set.iter().filter(|(other, _)| **other != name);
        let count = others().count() + usize::from(value.is_some());
        let bytes = size(others()) + value.as_ref().map_or(0, |value| name.len() + value.len());
        if count > MAX_VARIABLES || bytes > MAX_BYTES {
            return Err(ToolError::invalid(format!(
                "setenv: with {name} there would be {count} variables of {bytes} bytes; the limit is {MAX_VARIABLES} \
                 variables of {MAX_BYTES} bytes together. Nothing was changed. Pass data in a file.",
            )));
        }
        let changed = Assignment { name, value };
        changed.apply(&mut set);
        Ok(changed)
    }

    /// Restores a variable that an earlier process had set, from the result in the journal.
    pub(super) fn restore(&self, result: &Value) {
        if let Ok(changed) = Assignment::deserialize(result) {
            changed.apply(&mut self.set());
        }
    }

    /// A snapshot of the variables.
    pub(super) fn snapshot(&self) -> Environment {
        self.set().clone()
    }

    fn set(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        // A panic cannot leave a change half done.
        self.set.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The variables of a command as a shell prefix (`NAME=value …`): those that are `set`, overridden
/// by `own`.
pub(super) fn assignments(set: &Environment, own: &Value) -> String {
    let mut all = set.clone();
    let own = own.as_object().into_iter().flatten();
    all.extend(own.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))));
    all.iter()
        .map(|(name, value)| format!("{name}={}", shell_quote(value)))
        .collect::<Vec<_>>()
        .join(" ")
}

/// The variables for one command: those that are `set`, overridden by those of the call.
pub(super) fn merge(
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
            "{tool}: options.env has {bytes} bytes; the limit is {MAX_BYTES}. Pass data in a file or through stdin."
        )));
    }
    let mut all = set.clone();
    all.extend(own);
    Ok(all)
}

impl Assignment {
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
            "{tool}: {shown:?} cannot be the name of an environment variable; {NAME_RULE}."
        )));
    }
    if value.contains('\0') {
        return Err(ToolError::invalid(format!("{tool}: {parameter} contains a NUL character.")));
    }
    Ok(())
}
