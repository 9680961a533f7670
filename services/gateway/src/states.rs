//! `StateService`: documents of clients. Their content is opaque: it is stored, returned, and never
//! logged.

mod watch;

use construct_domain::{UserId, access::Role};
use construct_proto::{
    IdempotentRequest,
    v1::{
        self, DeleteStateRequest, DeleteStateResponse, GetStateRequest, ListStateVersionsRequest,
        ListStateVersionsResponse, ListStatesRequest, ListStatesResponse, PutStateRequest,
        StateEvent, WatchStatesRequest, state_service_server::StateService,
    },
};
use construct_store::{State, StateContent, StateRef, Write, WriteOutcome};
use futures::stream::BoxStream;
use tonic::{Request, Response, Status};

use crate::{
    api::{Api, CallerContext, no_wake},
    convert,
    organizations::response_output,
    quotas::QuotaRequest,
    status,
    validate::requests,
};

#[tonic::async_trait]
impl StateService for Api {
    type WatchStatesStream = BoxStream<'static, Result<StateEvent, Status>>;

    async fn get_state(
        &self,
        request: Request<GetStateRequest>,
    ) -> Result<Response<v1::State>, Status> {
        let (context, request) = self.begin_request(request)?;
        let version = (request.version > 0).then_some(request.version);
        let state = StateRef { owner: owner(&context, request.shared), name: &request.state };
        let found = context.store().state_get(context.organization(), state, version).await;
        let found = found.map_err(|error| status::for_reference(&request.state, error))?;
        Ok(Response::new(show(&found)))
    }

    async fn list_states(
        &self,
        request: Request<ListStatesRequest>,
    ) -> Result<Response<ListStatesResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let found = context
            .store()
            .state_list(context.organization(), owner(&context, request.shared))
            .await;
        let states = found.map_err(status::from_store)?.iter().map(show).collect();
        Ok(Response::new(ListStatesResponse { states }))
    }

    async fn list_state_versions(
        &self,
        request: Request<ListStateVersionsRequest>,
    ) -> Result<Response<ListStateVersionsResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let state = StateRef { owner: owner(&context, request.shared), name: &request.state };
        let found = context.store().state_versions(context.organization(), state).await;
        let found = found.map_err(|error| status::for_reference(&request.state, error))?;
        Ok(Response::new(ListStateVersionsResponse { versions: found.iter().map(show).collect() }))
    }

    async fn put_state(
        &self,
        request: Request<PutStateRequest>,
    ) -> Result<Response<v1::State>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::put_state(&request)?;
        let owner = writable_owner(&context, request.shared)?;
        let write = write(&context, "PutState", &mut request, owner);
        let (state, by) = (StateRef { owner, name: &request.state }, context.name());
        let content = match request.restore {
            0 => StateContent::Text(&request.json),
            version => StateContent::Version(version),
        };
        let of_key = context.caller().limits.storage_bytes.is_some();
        if of_key || self.quotas().limits_storage(context.store(), context.organization()).await {
            let growth = context
                .store()
                .state_growth(context.organization(), state, content, write.key)
                .await;
            let growth = growth.map_err(status::from_store)?;
            let requested = QuotaRequest {
                bytes_of_key: growth.bytes_of_key,
                ..QuotaRequest::storage(growth.bytes)
            };
            self.check_quotas(&context, Some(&write), requested).await?;
        }
        let render = |state: &State| response_output(&show(state));
        let put = context
            .store()
            .state_put(&write, state, (content, by.as_str()), request.expected_version, render)
            .await;
        let about = match content {
            StateContent::Text(_) => request.state.clone(),
            StateContent::Version(version) => id(&request.state, version),
        };
        let put = put.map_err(|error| status::for_reference(&about, error))?;
        publish_change(&context, &put).await;
        context.answer(put, no_wake, show).await
    }

    async fn delete_state(
        &self,
        request: Request<DeleteStateRequest>,
    ) -> Result<Response<DeleteStateResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let owner = writable_owner(&context, request.shared)?;
        let write = write(&context, "DeleteState", &mut request, owner);
        let (state, by) = (StateRef { owner, name: &request.state }, context.name());
        let how = (request.expected_version, request.forget);
        let deleted =
            context.store().state_delete(&write, state, how, &by, |_| response_output(&())).await;
        let deleted = deleted.map_err(|error| status::for_reference(&request.state, error))?;
        publish_change(&context, &deleted).await;
        context.answer(deleted, no_wake, |_| DeleteStateResponse {}).await
    }

    async fn watch_states(
        &self,
        request: Request<WatchStatesRequest>,
    ) -> Result<Response<Self::WatchStatesStream>, Status> {
        watch::begin(self, request).await
    }
}

/// The owner of a request's documents; `None` if shared.
fn owner(context: &CallerContext, shared: bool) -> Option<UserId> {
    (!shared).then(|| context.user())
}

/// The owner of the document to change, if the caller may change it. The audit entry records
/// whether it is shared.
///
/// # Errors
/// `PERMISSION_DENIED`.
fn writable_owner(context: &CallerContext, shared: bool) -> Result<Option<UserId>, Status> {
    context.touch(if shared { "shared" } else { "own" });
    if shared && context.caller().role < Role::Admin {
        let (needed, is) = (Role::Admin.as_str(), context.caller().role.as_str());
        return Err(Status::permission_denied(format!(
            "insufficient role to change shared documents: requires `{needed}`, the caller is `{is}`"
        )));
    }
    Ok(owner(context, shared))
}

/// Identifies a write. Two members who write their own documents with the same key must not get
/// each other's responses.
fn write(
    context: &CallerContext,
    method: &'static str,
    request: &mut impl IdempotentRequest,
    owner: Option<UserId>,
) -> Write {
    let mut write = context.write(method, request);
    if let (Some(idempotency), Some(owner)) = (&mut write.idempotency, owner) {
        idempotency.key = format!("{owner}/{}", idempotency.key);
    }
    write
}

/// Notifies the watches of all gateways.
async fn publish_change(context: &CallerContext, written: &WriteOutcome<State>) {
    if let WriteOutcome::Applied { entity, .. } = written {
        let version = (entity.owner, entity.name.as_str(), entity.version);
        context.backend.publisher.state(context.organization(), version).await;
    }
}

/// The document for clients.
fn show(state: &State) -> v1::State {
    v1::State {
        id: id(&state.name, state.version),
        name: state.name.clone(),
        shared: state.owner.is_none(),
        version: state.version,
        json: state.json.clone(),
        bytes: state.bytes,
        updated_by: state.updated_by.clone(),
        updated_at: state.updated_at.map(convert::time),
        deleted: state.is_deleted,
    }
}

/// The id of a version of a document.
fn id(name: &str, version: i64) -> String {
    format!("{name}@{version}")
}
