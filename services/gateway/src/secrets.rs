//! `SecretService`. Values are encrypted before they reach the store, and are never returned.

use construct_domain::SecretId;
use construct_proto::v1::{
    self, CreateSecretRequest, DeleteSecretRequest, DeleteSecretResponse, GetSecretRequest,
    ListSecretsRequest, ListSecretsResponse, SecretBindings, UpdateSecretRequest, event::Payload,
    secret_service_server::SecretService,
};
use construct_store::{
    Bindings, Error, Keyring, NewSecret, SealError, SealedSecret, Secret, SecretChanges,
    WriteOutput,
};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, ReferenceResolver, no_wake},
    convert, events,
    page::Column,
    status,
    validate::requests,
};

fn render(kind: &'static str) -> impl FnOnce(&Secret) -> WriteOutput + Send {
    move |secret| {
        let secret = convert::secret(secret);
        events::write_output(kind, Payload::Secret(secret.clone()), &secret)
    }
}

fn bindings(bindings: SecretBindings) -> Bindings {
    let SecretBindings { mut hosts, mut commands } = bindings;
    for list in [&mut hosts, &mut commands] {
        list.sort_unstable();
        list.dedup();
    }
    Bindings { hosts, commands }
}

fn seal_failed(error: &SealError) -> Status {
    status::internal("a secret could not be encrypted", error)
}

fn seal(keyring: &Keyring, id: SecretId, value: &str) -> Result<SealedSecret, Status> {
    keyring.seal(&id.to_string(), value.as_bytes()).map_err(|error| seal_failed(&error))
}

/// Removes the value from a request before the request is identified by its hash, which is stored:
/// for a value that can be guessed, a plain hash is as good as the value. The keyed digest left in
/// its place distinguishes values only for holders of the key.
fn take_value(keyring: &Keyring, value: &mut String) -> Result<String, Status> {
    let digest = keyring.digest(value.as_bytes()).map_err(|error| seal_failed(&error))?;
    let digest = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(std::mem::replace(value, digest))
}

#[tonic::async_trait]
impl SecretService for Api {
    async fn create_secret(
        &self,
        request: Request<CreateSecretRequest>,
    ) -> Result<Response<v1::Secret>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::create_secret(&request)?;
        let keyring = self.secrets_keyring()?;
        let value = request
            .spec
            .as_mut()
            .map(|spec| take_value(keyring, &mut spec.value))
            .transpose()?
            .unwrap_or_default();
        let write = context.write("CreateSecret", &mut request);
        let spec = request.spec.unwrap_or_default();
        let id = SecretId::from_uuid(Uuid::now_v7());
        let new = NewSecret {
            id,
            name: spec.name,
            description: spec.description,
            bindings: bindings(spec.bindings.unwrap_or_default()),
            value: seal(keyring, id, &value)?,
        };
        let written = context.store().secret_create(&write, new, render("secret.created")).await;
        context.answer(written.map_err(status::from_store)?, no_wake, convert::secret).await
    }

    async fn get_secret(
        &self,
        request: Request<GetSecretRequest>,
    ) -> Result<Response<v1::Secret>, Status> {
        let (context, request) = self.begin_request(request)?;
        let found = context.store().secret_find(context.organization(), &request.secret).await;
        let secret = found.map_err(|error| status::for_reference(&request.secret, error))?;
        Ok(Response::new(convert::secret(&secret)))
    }

    async fn list_secrets(
        &self,
        request: Request<ListSecretsRequest>,
    ) -> Result<Response<ListSecretsResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::NAMED)?;
        let prefix = request.filter.unwrap_or_default().name_prefix;
        let found =
            context.store().secret_list(context.organization(), &prefix, &page.query()).await;
        let secrets = found.map_err(status::from_store)?;
        let (secrets, info) =
            page.cut(&secrets, convert::secret, |secret| secret.cursor(page.key()));
        Ok(Response::new(ListSecretsResponse { secrets, page: Some(info) }))
    }

    async fn update_secret(
        &self,
        request: Request<UpdateSecretRequest>,
    ) -> Result<Response<v1::Secret>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::update_secret(&request)?;
        let value = match &mut request.value {
            Some(value) => Some(take_value(self.secrets_keyring()?, value)?),
            None => None,
        };
        let write = context.write("UpdateSecret", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let mut expected = (request.revision != 0).then_some(request.revision);
        let bindings_change = request.bindings.map(bindings);
        let found = context.store().secret_find(context.organization(), &request.secret).await;
        let id = match found {
            Ok(secret) => {
                let id = resolver.resolve(&request.secret, Ok(secret.id), SecretId::from_uuid)?;
                let mut checked = requests::check_secret_update(
                    bindings_change.as_ref(),
                    value.is_some(),
                    &secret,
                );
                if bindings_change.is_some() && value.is_none() {
                    // Whether the bindings are within the present ones was decided for the secret
                    // as it was read.
                    let revision = *expected.get_or_insert(secret.revision);
                    if revision != secret.revision {
                        checked = Err(status::from_store(Error::Conflict));
                    }
                }
                match checked {
                    Ok(()) => id,
                    Err(reason) => resolver.reject(reason, SecretId::from_uuid)?,
                }
            }
            Err(error) => resolver.resolve(&request.secret, Err(error), SecretId::from_uuid)?,
        };
        let changes = SecretChanges {
            name: request.name,
            description: request.description,
            bindings: bindings_change,
            value: value.map(|value| seal(self.secrets_keyring()?, id, &value)).transpose()?,
        };
        let updated = context
            .store()
            .secret_update(&write, id, expected, changes, render("secret.updated"))
            .await;
        context.answer(resolver.finish(updated)?, no_wake, convert::secret).await
    }

    async fn delete_secret(
        &self,
        request: Request<DeleteSecretRequest>,
    ) -> Result<Response<DeleteSecretResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("DeleteSecret", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let secret = context.store().secret_resolve(context.organization(), &request.secret).await;
        let secret = resolver.resolve(&request.secret, secret, SecretId::from_uuid)?;
        let render = |secret: &Secret| events::deletion_output("secret.deleted", secret.id);
        let deleted = context.store().secret_delete(&write, secret, render).await;
        context.answer(resolver.finish(deleted)?, no_wake, |_| DeleteSecretResponse {}).await
    }
}
