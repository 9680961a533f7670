//! What all methods of the API share: the caller, the backend, limits, the identification of
//! writes, and their completion.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};

use construct_bus::blob;
use construct_domain::{OrganizationId, TaskId, UserId};
use construct_proto::{ApiRequest, IdempotentRequest, PagedRequest};
use construct_runtime::{Lifecycle, MasterKeys, clock};
use construct_store::{
    Audit, Cursor, Error, Idempotency, Keyring, ModelProviderKind, Store, Write, WriteOutcome,
};
use prost::Message;
use sha2::{Digest as _, Sha256};
use tonic::{Request, Status};
use uuid::Uuid;

use crate::{
    Config, Keyrings, Login,
    audit::{draft::AuditDraft, writer::AuditWriter},
    caller::{self, Caller},
    deadline::{self, Deadline},
    diagnosis::RecentSpending,
    files::work::Files,
    identity::{authenticate::Authenticator, peer::Peer},
    limit::{Capacity, Holder, Permit},
    page::{Column, Page},
    pool_monitor::PoolMonitor,
    providers_client::ProvidersClient,
    publish::{Publisher, Wake},
    quotas::{self, QuotaRequest, Quotas, Sums},
    status,
    subscribe::hub::Hub,
    validate::{self, requests},
};

/// Memory for reading potentially large rows, in bytes, and how long to wait for it.
const LARGE_ROWS_BYTES: usize = 3 * 1024 * 1024;
const MEMORY_TIMEOUT: Duration = Duration::from_secs(5);

/// The implementation of every service. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Api {
    shared: Arc<Shared>,
}

struct Shared {
    /// Set once PostgreSQL and NATS have been reached.
    backend: OnceLock<Arc<Backend>>,
    keyrings: Keyrings,
    /// What callers are judged by.
    gate: Authenticator,
    /// The configured pools of interpreters.
    pools: Vec<String>,
    /// Where the interpreters see what the scanner has fetched. `None` where there is no scanner.
    scans_dir: Option<PathBuf>,
    /// Team organizations that one user may own.
    organizations_of_one: u32,
    /// Whether local callers are the operator.
    is_local: bool,
    lifecycle: Lifecycle,
    capacity: Arc<Capacity>,
    audit_writer: AuditWriter,
    quotas: Quotas,
    /// Limits concurrent queries that sum up usage.
    sums: Sums,
    /// The cached recent spending of overviews.
    recent_spending: RecentSpending,
}

/// The connections and clients of a running gateway.
pub(crate) struct Backend {
    pub(crate) store: Store,
    pub(crate) publisher: Publisher,
    pub(crate) hub: Hub,
    pub(crate) pools: PoolMonitor,
    pub(crate) providers: ProvidersClient,
    /// Payloads that are too large for a row.
    pub(crate) blobs: blob::Store,
    /// Uploaded files.
    pub(crate) files: Files,
}

impl Api {
    pub(crate) fn new(
        config: &Config,
        keyrings: Keyrings,
        gate: Authenticator,
        lifecycle: Lifecycle,
    ) -> Self {
        let (backend, pools) = (OnceLock::new(), config.gateway_pools.clone());
        let (scans_dir, is_local) =
            (config.gateway_scans_dir.clone(), config.gateway_login == Login::Local);
        let (audit_writer, quotas) = (AuditWriter::new(), Quotas::new(config));
        let shared = Shared {
            backend,
            keyrings,
            gate,
            pools,
            scans_dir,
            organizations_of_one: config.gateway_organizations_of_one,
            is_local,
            lifecycle,
            capacity: Arc::new(Capacity::new(config)),
            audit_writer,
            quotas,
            sums: Sums::default(),
            recent_spending: RecentSpending::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Allows requests to be served.
    pub(crate) fn open(&self, backend: Arc<Backend>) {
        // Called once. A second backend would be ignored.
        _ = self.shared.backend.set(backend);
    }

    pub(crate) fn keyring(&self) -> &Keyring {
        &self.shared.keyrings.providers
    }

    /// The keys that encrypt secrets.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` when the operator has given none.
    pub(crate) fn secrets_keyring(&self) -> Result<&Keyring, Status> {
        self.shared.keyrings.secrets.as_deref().ok_or_else(|| {
            Status::failed_precondition(
                "this installation has no key for secrets: set CONSTRUCT_SECRETS_KEY or CONSTRUCT_SECRETS_KEY_FILE for the \
                 gateway and the interpreter",
            )
        })
    }

    /// The keys that tokens for models are signed with.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` when the operator has given none.
    pub(crate) fn token_keys(&self) -> Result<&MasterKeys, Status> {
        self.shared.keyrings.tokens.as_deref().ok_or_else(|| {
            Status::failed_precondition(
                "this installation has no key for tokens: set CONSTRUCT_TOKEN_KEY or CONSTRUCT_TOKEN_KEY_FILE for the gateway, \
                 the reconciler and the providers",
            )
        })
    }

    /// The cached recent spending of overviews.
    pub(crate) fn recent_spending(&self) -> &RecentSpending {
        &self.shared.recent_spending
    }

    /// Team organizations that one user may own.
    pub(crate) fn max_organizations_per_user(&self) -> u32 {
        self.shared.organizations_of_one
    }

    /// The configured pools of interpreters.
    pub(crate) fn pools(&self) -> &[String] {
        &self.shared.pools
    }

    /// Where the interpreters see what the scanner has fetched.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` where there is no scanner.
    pub(crate) fn scans_dir(&self) -> Result<&Path, Status> {
        self.shared.scans_dir.as_deref().ok_or_else(|| {
            Status::failed_precondition(
                "this installation has no scanner: set CONSTRUCT_GATEWAY_SCANS_DIR and start construct-scanner (docs/scanner.md)",
            )
        })
    }

    /// Whether local callers are the operator, because nobody has to log in.
    pub(crate) fn is_local(&self) -> bool {
        self.shared.is_local
    }

    pub(crate) fn lifecycle(&self) -> &Lifecycle {
        &self.shared.lifecycle
    }

    /// The limits on what the gateway holds at the same time.
    pub(crate) fn capacity(&self) -> &Arc<Capacity> {
        &self.shared.capacity
    }

    /// Writes audit entries.
    pub(crate) fn audit_writer(&self) -> &AuditWriter {
        &self.shared.audit_writer
    }

    /// The quotas of organizations.
    pub(crate) fn quotas(&self) -> &Quotas {
        &self.shared.quotas
    }

    /// Acquires the permit for a query that sums up usage, held while it runs.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when none becomes free soon.
    pub(crate) async fn acquire_sum_permit(
        &self,
        organization: OrganizationId,
    ) -> Result<Permit, Status> {
        self.shared.sums.acquire(organization).await
    }

    /// Checks the quotas of a caller's key and organization for a lasting change. A repeated
    /// request gets its stored response whatever the quota.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when a quota is exhausted; `UNAVAILABLE`.
    pub(crate) async fn check_quotas(
        &self,
        context: &CallerContext,
        write: Option<&Write>,
        requested: QuotaRequest,
    ) -> Result<(), Status> {
        // Work for a scan was allowed when the scan was created.
        if context.caller().confined.is_some() {
            return Ok(());
        }
        let caller = context.caller();
        let key = caller.key.map(|key| (key, caller.limits));
        let Some(refusal) =
            self.quotas().allow(context.store(), caller.organization, key, requested).await?
        else {
            return Ok(());
        };
        let is_repeated = match write {
            Some(write) => context
                .store()
                .idempotent_response(write)
                .await
                .map_err(status::from_store)?
                .is_some(),
            None => false,
        };
        if is_repeated { Ok(()) } else { Err(quotas::rejection_status(&refusal)) }
    }

    /// What callers are judged by.
    pub(crate) fn gate(&self) -> &Authenticator {
        &self.shared.gate
    }

    /// The database, for authentication.
    ///
    /// # Errors
    /// `UNAVAILABLE` until it has been reached.
    pub(crate) fn store(&self) -> Result<&Store, Status> {
        self.backend().map(|backend| &backend.store)
    }

    fn backend(&self) -> Result<&Arc<Backend>, Status> {
        let not_connected = || {
            status::unavailable("the gateway is starting and cannot reach PostgreSQL or NATS yet")
        };
        self.shared.backend.get().ok_or_else(not_connected)
    }

    /// Begins an authenticated request that conforms to the contract.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when it does not.
    pub(crate) fn begin_request<T: ApiRequest>(
        &self,
        request: Request<T>,
    ) -> Result<(CallerContext, T), Status> {
        let (context, request) = self.begin_unchecked_request(request)?;
        validate::check(&request)?;
        Ok((context, request))
    }

    /// Begins an authenticated request for a page that conforms to the contract. The list can be
    /// ordered by `columns`.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when it does not.
    pub(crate) fn begin_list_request<T: PagedRequest>(
        &self,
        request: Request<T>,
        columns: &[Column],
    ) -> Result<(CallerContext, T, Page<Cursor>), Status> {
        let (context, request) = self.begin_unchecked_request(request)?;
        let page = requests::list(context.organization(), &request, columns)?;
        Ok((context, request, page))
    }

    /// Begins a request that is validated by its own function in [`requests`], which checks the
    /// contract as well.
    pub(crate) fn begin_unchecked_request<T: ApiRequest>(
        &self,
        request: Request<T>,
    ) -> Result<(CallerContext, T), Status> {
        let caller = caller::identify(request.extensions())?;
        let (request_context, request) = self.begin_context(request)?;
        Ok((CallerContext { caller, request: request_context }, request))
    }

    /// Begins a request without authentication that conforms to the contract.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when it does not.
    pub(crate) fn begin_public_request<T: ApiRequest>(
        &self,
        request: Request<T>,
    ) -> Result<(RequestContext, T), Status> {
        let (request_context, request) = self.begin_context(request)?;
        validate::check(&request)?;
        Ok((request_context, request))
    }

    fn begin_context<T: ApiRequest>(
        &self,
        request: Request<T>,
    ) -> Result<(RequestContext, T), Status> {
        let draft = request.extensions().get::<Arc<AuditDraft>>().cloned();
        let deadline = Deadline::from_extensions(request.extensions())
            .unwrap_or_else(|| Deadline::new(None, deadline::GRPC_TIMEOUT));
        if let Some(draft) = &draft {
            draft.add_request_objects(request.get_ref());
        }
        let backend = Arc::clone(self.backend()?);
        let holder = match request.extensions().get::<Caller>() {
            Some(caller) => Holder::Organization(caller.organization),
            None => Peer::from_extensions(request.extensions()).into(),
        };
        let share =
            self.capacity().requests.acquire(holder, 1).map_err(|full| full.status("requests"))?;
        Ok((RequestContext { backend, draft, deadline, _share: share }, request.into_inner()))
    }

    /// Acquires memory for reading potentially large rows, held until the response is built.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when none becomes free soon.
    pub(crate) async fn acquire_read_memory(
        &self,
        organization: OrganizationId,
    ) -> Result<Permit, Status> {
        let waiting =
            self.capacity().answers.wait(Holder::Organization(organization), LARGE_ROWS_BYTES);
        let full = |_| status::exhausted("the organization has too many unread responses");
        tokio::time::timeout(MEMORY_TIMEOUT, waiting).await.map_err(full)
    }

    /// Acquires the permit for a subscription, held as long as it lives.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there are too many.
    pub(crate) fn acquire_subscription_permit(
        &self,
        organization: OrganizationId,
    ) -> Result<Permit, Status> {
        let share = self.capacity().subscriptions.acquire(Holder::Organization(organization), 1);
        share.map_err(|full| full.status("subscriptions"))
    }
}

/// The context of a request, authenticated or not.
pub(crate) struct RequestContext {
    pub(crate) backend: Arc<Backend>,
    /// The audit entry of a call that writes.
    draft: Option<Arc<AuditDraft>>,
    /// When the client stops waiting.
    pub(crate) deadline: Deadline,
    _share: Permit,
}

/// The context of an authenticated request.
pub(crate) struct CallerContext {
    caller: Caller,
    request: RequestContext,
}

impl std::ops::Deref for CallerContext {
    type Target = RequestContext;

    fn deref(&self) -> &RequestContext {
        &self.request
    }
}

impl RequestContext {
    pub(crate) fn store(&self) -> &Store {
        &self.backend.store
    }

    /// The audit entry of the call, which the store writes with its change.
    pub(crate) fn audit(&self) -> Option<Audit> {
        self.draft.as_ref().map(|draft| draft.audit())
    }

    /// Adds an object to the audit entry that neither the request nor the store's response names.
    pub(crate) fn touch(&self, id: &str) {
        if let Some(draft) = &self.draft {
            draft.add_object(id);
        }
    }
}

impl CallerContext {
    pub(crate) fn organization(&self) -> OrganizationId {
        self.caller.organization
    }

    /// Checks whether the caller's tasks may use this directory. Any path under the interpreter's
    /// roots can be named, whoever uses it. So only the operator's organization may name one; the
    /// tasks of others get directories of their own.
    ///
    /// # Errors
    /// `PERMISSION_DENIED`.
    pub(crate) fn check_workspace(&self, path: &str) -> Result<(), Status> {
        if path.is_empty() || self.organization() == OrganizationId::LOCAL {
            return Ok(());
        }
        Err(Status::permission_denied(
            "only the operator's organization may name a workspace; leave it empty for a directory of its own",
        ))
    }

    /// Checks whether the caller may have a model provider of this kind at this address (empty: the
    /// vendor's). The providers service runs next to the operator's machines: it can reach their
    /// addresses and load their models. So only the operator's organization may set addresses;
    /// others use the vendors.
    ///
    /// # Errors
    /// `PERMISSION_DENIED`.
    pub(crate) fn check_provider(
        &self,
        kind: ModelProviderKind,
        base_url: &str,
    ) -> Result<(), Status> {
        if self.organization() == OrganizationId::LOCAL {
            return Ok(());
        }
        if matches!(kind, ModelProviderKind::Ollama | ModelProviderKind::Local) {
            let message = "only the operator's organization may have a model provider of the type `OLLAMA` or `LOCAL`";
            return Err(Status::permission_denied(message));
        }
        if base_url.is_empty()
            || (kind == ModelProviderKind::Bedrock && is_bedrock_address(base_url))
        {
            return Ok(());
        }
        Err(Status::permission_denied(
            "only the operator's organization may set the address of a model provider; leave `base_url` empty (for Bedrock: \
             `https://bedrock-runtime.REGION.amazonaws.com`)",
        ))
    }

    /// Checks whether the caller may access a task. A forbidden task is reported as missing.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub(crate) fn check_task_access(&self, task: TaskId) -> Result<(), Status> {
        if self.caller.may_see(task) {
            return Ok(());
        }
        Err(status::for_reference(&task.to_string(), Error::NotFound { what: "task" }))
    }

    /// The user that the caller acts for.
    pub(crate) fn user(&self) -> UserId {
        self.caller.user
    }

    pub(crate) const fn caller(&self) -> &Caller {
        &self.caller
    }

    /// The name of the caller in records of decisions.
    pub(crate) fn name(&self) -> String {
        self.caller.name()
    }

    /// Identifies a write, and removes its idempotency key, which is not part of the compared
    /// request.
    pub(crate) fn write(
        &self,
        method: &'static str,
        request: &mut impl IdempotentRequest,
    ) -> Write {
        let key = std::mem::take(request.idempotency_key());
        let idempotency = (!key.is_empty()).then(|| {
            let request_hash = Sha256::digest(request.encode_to_vec()).into();
            Idempotency { key, method, request_hash }
        });
        Write { idempotency, ..self.plain_write() }
    }

    /// A write without an idempotency key.
    pub(crate) fn plain_write(&self) -> Write {
        let key = self.caller.counted_for;
        Write { audit: self.audit(), key, ..Write::new(self.organization(), clock::now()) }
    }

    /// Completes a successful write: publishes its event and wake, and responds.
    pub(crate) async fn answer<T, R: Message + Default>(
        &self,
        written: WriteOutcome<T>,
        wake: impl FnOnce(&T) -> Option<(TaskId, &'static str)>,
        response: impl FnOnce(&T) -> R,
    ) -> Result<tonic::Response<R>, Status> {
        match written {
            WriteOutcome::Applied { entity, event } => {
                let organization = self.organization();
                let wake = wake(&entity).map(|(task, reason)| Wake { organization, task, reason });
                self.backend.publisher.announce(event.as_ref(), wake).await;
                Ok(tonic::Response::new(response(&entity)))
            }
            WriteOutcome::Repeated { response } => {
                let response = R::decode(response.as_slice());
                let response = response
                    .map_err(|error| status::internal("a stored answer cannot be read", &error))?;
                let mut response = tonic::Response::new(response);
                response.extensions_mut().insert(RepeatedResponse);
                Ok(response)
            }
        }
    }
}

/// Whether this is exactly Bedrock's address in some region.
fn is_bedrock_address(base_url: &str) -> bool {
    let host = base_url.strip_prefix("https://").map(|rest| rest.strip_suffix('/').unwrap_or(rest));
    let region =
        host.and_then(|host| host.strip_prefix("bedrock-runtime.")?.strip_suffix(".amazonaws.com"));
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    region.is_some_and(|region| !region.is_empty() && region.bytes().all(plain))
}

/// An extension of a stored response to a repeated request. Callers within the process read it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RepeatedResponse;

/// No wake.
pub(crate) fn no_wake<T>(_: &T) -> Option<(TaskId, &'static str)> {
    None
}

/// Resolves the references of a write, by name or id.
///
/// A repeated request gets its first response even if its references are gone or renamed. So for a
/// request with an idempotency key, a missing reference is not refused at once: the write continues
/// with an id that exists nowhere. It either finds its key or fails with the error kept here.
pub(crate) struct ReferenceResolver {
    is_repeatable: bool,
    /// The first reference, the object of the write.
    reference: Option<String>,
    /// Why the write must fail.
    refusal: Option<Status>,
}

impl ReferenceResolver {
    pub(crate) fn new(write: &Write) -> Self {
        Self { is_repeatable: write.idempotency.is_some(), reference: None, refusal: None }
    }

    /// Accepts the result of a lookup. `nil_id` makes an id that exists nowhere.
    pub(crate) fn resolve<I>(
        &mut self,
        reference: &str,
        result: Result<I, Error>,
        nil_id: fn(Uuid) -> I,
    ) -> Result<I, Status> {
        self.reference.get_or_insert_with(|| reference.to_owned());
        match result {
            Ok(id) => Ok(id),
            Err(error @ Error::NotFound { .. }) if self.is_repeatable => {
                self.refusal.get_or_insert_with(|| status::for_reference(reference, error));
                Ok(nil_id(Uuid::nil()))
            }
            Err(error) => Err(status::for_reference(reference, error)),
        }
    }

    /// Records why the write must fail because of a referenced entity. A repeated request still
    /// gets its first response.
    pub(crate) fn reject<I>(&mut self, reason: Status, nil_id: fn(Uuid) -> I) -> Result<I, Status> {
        if !self.is_repeatable {
            return Err(reason);
        }
        self.refusal.get_or_insert(reason);
        Ok(nil_id(Uuid::nil()))
    }

    /// The result of the write, considering the references.
    pub(crate) fn finish<T>(
        self,
        result: Result<WriteOutcome<T>, Error>,
    ) -> Result<WriteOutcome<T>, Status> {
        match (result, self.refusal) {
            (Ok(written), _) => Ok(written),
            (Err(error @ (Error::IdempotencyMismatch | Error::Unavailable(_))), _) => {
                Err(status::from_store(error))
            }
            (Err(_), Some(refusal)) => Err(refusal),
            (Err(error), None) => {
                Err(status::for_reference(&self.reference.unwrap_or_default(), error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use construct_proto::options;
    use prost_reflect::prost_types::method_options::IdempotencyLevel;

    #[test]
    fn bedrock_address_is_matched_exactly() {
        for (url, fine) in [
            ("https://bedrock-runtime.eu-west-1.amazonaws.com", true),
            ("https://bedrock-runtime.eu-west-1.amazonaws.com/", true),
            ("http://bedrock-runtime.eu-west-1.amazonaws.com", false),
            ("https://bedrock-runtime.eu-west-1.amazonaws.com.evil.example", false),
            ("https://bedrock-runtime.x@127.0.0.1/.amazonaws.com", false),
            ("https://bedrock-runtime.a/b.amazonaws.com", false),
            ("https://bedrock-runtime.evil.example#.amazonaws.com", false),
            ("http://127.0.0.1?region=eu-west-1", false),
        ] {
            assert_eq!(super::is_bedrock_address(url), fine, "{url}");
        }
    }

    /// A write without idempotency would repeat itself on a retry.
    #[test]
    fn contract_writes_declare_their_idempotency() {
        for method in construct_proto::methods() {
            let standard = method
                .method_descriptor_proto()
                .options
                .as_ref()
                .map(|options| options.idempotency_level());
            let declarations = [
                standard == Some(IdempotencyLevel::NoSideEffects),
                standard == Some(IdempotencyLevel::Idempotent),
                options::is_not_idempotent(&method),
                method.input().get_field_by_name("idempotency_key").is_some(),
            ];
            assert_eq!(
                declarations.iter().filter(|way| **way).count(),
                1,
                "{}: {declarations:?}",
                method.full_name()
            );
        }
    }
}
