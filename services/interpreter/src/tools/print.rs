//! `print`: a tool of the sandbox; only its definition is here.

use super::definition::{Definition, Effect, Permission, Provider, limits};
use super::kind::{Kind, required};
use super::output::Output;
use super::subject;

pub(super) const DEFINITION: Definition = Definition {
    name: "print",
    aliases: &[],
    summary: "Shows a value to you, the model, and to no one else. Objects are shown as JSON.",
    description: "",
    parameters: &[required("value", Kind::Any, "What to show.")],
    output: Output::Nothing,
    base_tool: None,
    example: "print(read_file(\"README.md\"))",
    errors: &[],
    effect: Effect::Read,
    permission: Permission::Pure,
    subject: subject::none,
    provider: Provider::Sandbox,
    limits: limits(1, 256),
};
