//! Secrets.

use construct_proto::v1::{CreateSecretRequest, SecretBindings, UpdateSecretRequest};
use construct_store::{Bindings, Secret};
use tonic::Status;

use crate::validate::Violations;

pub(crate) fn create_secret(request: &CreateSecretRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    bindings(
        &mut violations,
        "spec.bindings",
        request.spec.as_ref().and_then(|spec| spec.bindings.as_ref()),
    );
    violations.finish()
}

pub(crate) fn update_secret(request: &UpdateSecretRequest) -> Result<(), Status> {
    let mut violations = Violations::in_request(request);
    bindings(&mut violations, "bindings", request.bindings.as_ref());
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

fn bindings(violations: &mut Violations, field: &str, bindings: Option<&SecretBindings>) {
    let is_bound = bindings
        .is_none_or(|bindings| !(bindings.hosts.is_empty() && bindings.commands.is_empty()));
    violations.require(is_bound, field, || {
        "must have at least one host or command: a secret that is bound to nothing is of no use"
            .into()
    });
}
