//! Secrets.

use construct_proto::v1::{CreateSecretRequest, SecretBindings, UpdateSecretRequest};
use construct_store::{Bindings, Secret};
use tonic::Status;

use crate::validate::Violations;

pub(crate) fn create_secret(request: &CreateSecretRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    check_bindings(
        &mut violations,
        "spec.bindings",
        request.spec.as_ref().and_then(|spec| spec.bindings.as_ref()),
    );
    violations.finish()
}

pub(crate) fn update_secret(request: &UpdateSecretRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    check_bindings(&mut violations, "bindings", request.bindings.as_ref());
    violations.finish()
}

/// Checks an update against the stored secret.
pub(crate) fn check_secret_update(
    requested: Option<&Bindings>,
    has_value: bool,
    secret: &Secret,
) -> Result<(), Status> {
    let mut violations = Violations::new();
    let widens = requested.is_some_and(|requested| !requested.is_within(&secret.bindings));
    violations.require(has_value || !widens, "value", || {
        "must be set again when `bindings` get a new host or command: a secret is only sent where it was set for"
            .into()
    });
    violations.finish()
}

fn check_bindings(violations: &mut Violations, field: &str, bindings: Option<&SecretBindings>) {
    let is_bound = bindings
        .is_none_or(|bindings| !(bindings.hosts.is_empty() && bindings.commands.is_empty()));
    violations.require(is_bound, field, || {
        "must have at least one host or command: an unbound secret cannot be used".into()
    });
}
