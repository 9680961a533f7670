//! Secrets.

use construct_domain::{
    OrganizationId, SecretId,
    secret::{
        MAX_BINDINGS, MAX_NAME_CHARS, MAX_PER_AGENT, MAX_VALUE_BYTES, MIN_VALUE_BYTES, is_command,
        is_host, is_name, is_value,
    },
};
use construct_proto::v1::{
    CreateSecretRequest, DeleteSecretRequest, GetSecretRequest, ListSecretsRequest, SecretBindings,
    SecretSpec, UpdateSecretRequest,
};
use construct_store::{Bindings, Cursor, Secret};
use tonic::Status;

use super::entities::{DESCRIPTION_CHARS, ORDERS};
use crate::{
    page::Page,
    validate::{Violations, thousands},
};

pub(crate) fn create_secret(request: &CreateSecretRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    let default = SecretSpec::default();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.as_ref().unwrap_or(&default);
    name(&mut violations, "spec.name", &spec.name);
    violations.chars("spec.description", &spec.description, DESCRIPTION_CHARS);
    value(&mut violations, "spec.value", &spec.value);
    bindings(&mut violations, "spec.bindings", &spec.bindings.clone().unwrap_or_default());
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

pub(crate) fn get_secret(request: &GetSecretRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    reference(&mut violations, "secret", &request.secret);
    violations.finish()
}

pub(crate) fn list_secrets(
    organization: OrganizationId,
    request: &ListSecretsRequest,
) -> Result<Page<Cursor>, Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    violations.require(
        filter.name_prefix.is_empty() || is_name(&filter.name_prefix),
        "filter.name_prefix",
        || format!("must be empty or the beginning of a name, at most {MAX_NAME_CHARS} characters"),
    );
    let page = Page::read(
        request.page.as_ref(),
        "ListSecrets",
        organization,
        &filter,
        &ORDERS,
        &mut violations,
    );
    violations.finish().map(|()| page)
}

pub(crate) fn update_secret(request: &UpdateSecretRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    reference(&mut violations, "secret", &request.secret);
    if let Some(new) = &request.name {
        name(&mut violations, "name", new);
    }
    violations.chars("description", request.description(), DESCRIPTION_CHARS);
    if let Some(new) = &request.value {
        value(&mut violations, "value", new);
    }
    if let Some(replacement) = &request.bindings {
        bindings(&mut violations, "bindings", replacement);
    }
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

/// Whether an update suits the secret it is for.
pub(crate) fn secret_fits(
    wanted: Option<&Bindings>,
    has_value: bool,
    secret: &Secret,
) -> Result<(), Status> {
    let mut violations = Violations::new();
    let widens = wanted.is_some_and(|wanted| !wanted.is_within(&secret.bindings));
    violations.require(has_value || !widens, "value", || {
        "must be given again when `bindings` get a new host or command: a secret only goes where it was given for"
            .into()
    });
    violations.finish()
}

pub(crate) fn delete_secret(request: &DeleteSecretRequest) -> Result<(), Status> {
    let mut violations = Violations::new();
    reference(&mut violations, "secret", &request.secret);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish()
}

/// The secrets an agent may use.
pub(super) fn agent_secrets(violations: &mut Violations, field: &str, secrets: &[String]) {
    violations.require(secrets.len() <= MAX_PER_AGENT, field, || {
        format!("must have at most {MAX_PER_AGENT} entries, has {}", secrets.len())
    });
    for (index, secret) in secrets.iter().take(MAX_PER_AGENT).enumerate() {
        reference(violations, &format!("{field}[{index}]"), secret);
    }
}

/// The name or id of a secret.
fn reference(violations: &mut Violations, field: &str, reference: &str) {
    if reference.is_empty() {
        violations.add(field, "is required: the name or id of a secret");
    } else {
        let fits = is_name(reference) || reference.parse::<SecretId>().is_ok();
        violations.require(fits, field, || "is neither a name nor an id of a secret".into());
    }
}

fn name(violations: &mut Violations, field: &str, name: &str) {
    violations.require(is_name(name), field, || {
        format!("must be 1 to {MAX_NAME_CHARS} characters: upper-case letters, digits and `_`, beginning with a letter")
    });
}

/// Says nothing of the value, not even its length.
fn value(violations: &mut Violations, field: &str, value: &str) {
    violations.require(is_value(value), field, || {
        format!(
            "must have {MIN_VALUE_BYTES} to {} bytes (white space around it does not count for the least), and no U+0000: what is \
             shorter could not be told from other text when it comes back",
            thousands(MAX_VALUE_BYTES)
        )
    });
}

fn bindings(violations: &mut Violations, field: &str, bindings: &SecretBindings) {
    let SecretBindings { hosts, commands } = bindings;
    violations.require(!(hosts.is_empty() && commands.is_empty()), field, || {
        "must have at least one host or command: a secret that is bound to nothing is of no use"
            .into()
    });
    let lists = [
        (
            "hosts",
            hosts,
            is_host as fn(&str) -> bool,
            "a host in lower case, as `api.example.com`, `*.example.com` or an IP address",
        ),
        (
            "commands",
            commands,
            is_command,
            "the name of a program, without a directory and arguments",
        ),
    ];
    for (name, list, fits, what) in lists {
        violations.require(list.len() <= MAX_BINDINGS, &format!("{field}.{name}"), || {
            format!("must have at most {MAX_BINDINGS} entries, has {}", list.len())
        });
        for (index, entry) in list.iter().take(MAX_BINDINGS).enumerate() {
            violations.require(fits(entry), &format!("{field}.{name}[{index}]"), || {
                format!("must be {what}")
            });
        }
    }
}
