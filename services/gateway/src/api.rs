//! What all methods of the API have in common: who calls, whether the gateway can work at all, how
//! much of it at the same time, how a write is identified, and how it ends.

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
    identity::{authenticate::Gate, peer::Peer},
    limit::{Capacity, Holder, Share},
    page::{Column, Page},
    pool_monitor::PoolMonitor,
    providers_client::ProvidersClient,
    publish::{Publisher, Wake},
    quotas::{self, Quotas, Sums, Wanted},
    status,
    subscribe::hub::Hub,
    validate::{self, requests},
};

/// Bytes of room for rows that can be large while they are read, and how long it is waited for.
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
    gate: Gate,
    /// The pools of interpreters that exist.
    pools: Vec<String>,
    /// Where the interpreters see what the scanner has fetched; none where there is no scanner.
    scans_dir: Option<PathBuf>,
    /// Team organizations that one user may own.
    organizations_of_one: u32,
    /// Whether whoever is on this machine is the operator.
    is_local: bool,
    lifecycle: Lifecycle,
    capacity: Arc<Capacity>,
    audit_writer: AuditWriter,
    quotas: Quotas,
    /// How many sums of what was used are made at the same time.
    sums: Sums,
    /// What overviews have said last of what was spent.
    recent_spending: RecentSpending,
}

/// What the gateway works with.
pub(crate) struct Backend {
    pub(crate) store: Store,
    pub(crate) publisher: Publisher,
    pub(crate) hub: Hub,
    pub(crate) pools: PoolMonitor,
    pub(crate) providers: ProvidersClient,
    /// What is too large for a row.
    pub(crate) blobs: blob::Store,
    /// What people upload.
    pub(crate) files: Files,
}

impl Api {
    pub(crate) fn new(
        config: &Config,
        keyrings: Keyrings,
        gate: Gate,
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

    /// From now on requests can be served.
    pub(crate) fn open(&self, backend: Arc<Backend>) {
        // Called once; a second backend would be ignored.
        _ = self.shared.backend.set(backend);
    }

    pub(crate) fn keyring(&self) -> &Keyring {
        &self.shared.keyrings.providers
    }

    /// The keys that secrets are sealed with.
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

    /// What overviews have said last of what was spent.
    pub(crate) fn recent_spending(&self) -> &RecentSpending {
        &self.shared.recent_spending
    }

    /// Team organizations that one user may own.
    pub(crate) fn max_organizations_per_user(&self) -> u32 {
        self.shared.organizations_of_one
    }

    /// The pools of interpreters that exist, as the operator says.
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

    /// Whether whoever is on this machine is the operator, because nobody has to log in.
    pub(crate) fn is_local(&self) -> bool {
        self.shared.is_local
    }

    pub(crate) fn lifecycle(&self) -> &Lifecycle {
        &self.shared.lifecycle
    }

    /// How much the gateway holds at the same time.
    pub(crate) fn capacity(&self) -> &Arc<Capacity> {
        &self.shared.capacity
    }

    /// Where calls are noted.
    pub(crate) fn audit_writer(&self) -> &AuditWriter {
        &self.shared.audit_writer
    }

    /// How much organizations may do.
    pub(crate) fn quotas(&self) -> &Quotas {
        &self.shared.quotas
    }

    /// A place for a statement that sums up what was used, held as long as it runs.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when none becomes free soon.
    pub(crate) async fn acquire_sum_permit(
        &self,
        organization: OrganizationId,
    ) -> Result<Share, Status> {
        self.shared.sums.place(organization).await
    }

    /// Whether a caller's key and organization may do something that lasts. What was done before is
    /// only answered again, whatever there is of the quota.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when a quota is used up; `UNAVAILABLE`.
    pub(crate) async fn check_quotas(
        &self,
        context: &CallerContext,
        write: Option<&Write>,
        requested: Wanted,
    ) -> Result<(), Status> {
        // What works for a scan goes on with what was allowed when that was made.
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
        if is_repeated { Ok(()) } else { Err(quotas::refused(&refusal)) }
    }

    /// What callers are judged by.
    pub(crate) fn gate(&self) -> &Gate {
        &self.shared.gate
    }

    /// The database, for who judges callers.
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

    /// Lets a request in that keeps to the contract.
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

    /// Lets a request for a page in that keeps to the contract. The list can be ordered by
    /// `columns`.
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

    /// Lets a request in that is checked by a function of its own in [`requests`], which holds it
    /// against the contract as well.
    pub(crate) fn begin_unchecked_request<T: ApiRequest>(
        &self,
        request: Request<T>,
    ) -> Result<(CallerContext, T), Status> {
        let caller = caller::identify(request.extensions())?;
        let (request_context, request) = self.begin_context(request)?;
        Ok((CallerContext { caller, request: request_context }, request))
    }

    /// Lets a request in that needs no log-in, and keeps to the contract.
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
            draft.read(request.get_ref());
        }
        let backend = Arc::clone(self.backend()?);
        let holder = match request.extensions().get::<Caller>() {
            Some(caller) => Holder::Organization(caller.organization),
            None => Peer::of(request.extensions()).into(),
        };
        let share =
            self.capacity().requests.take(holder, 1).map_err(|full| full.status("requests"))?;
        Ok((RequestContext { backend, draft, deadline, _share: share }, request.into_inner()))
    }

    /// Room to read rows that can be large, held until the answer is made of them.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when none becomes free soon.
    pub(crate) async fn acquire_read_memory(
        &self,
        organization: OrganizationId,
    ) -> Result<Share, Status> {
        let waiting =
            self.capacity().answers.wait(Holder::Organization(organization), LARGE_ROWS_BYTES);
        let full = |_| {
            status::exhausted(
                "the organization has too many answers that are not read at the moment",
            )
        };
        tokio::time::timeout(MEMORY_TIMEOUT, waiting).await.map_err(full)
    }

    /// A place for one subscription of an organization, held as long as it lives.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there are too many.
    pub(crate) fn acquire_subscription_permit(
        &self,
        organization: OrganizationId,
    ) -> Result<Share, Status> {
        let share = self.capacity().subscriptions.take(Holder::Organization(organization), 1);
        share.map_err(|full| full.status("subscriptions"))
    }
}

/// A request that was let in, of whomever.
pub(crate) struct RequestContext {
    pub(crate) backend: Arc<Backend>,
    /// Of a call that writes.
    draft: Option<Arc<AuditDraft>>,
    /// When nobody waits for the answer any more.
    pub(crate) deadline: Deadline,
    _share: Share,
}

/// A request of a caller.
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

    /// The call's entry for the audit trail, for what the store changes.
    pub(crate) fn audit(&self) -> Option<Audit> {
        self.draft.as_ref().map(|draft| draft.audit())
    }

    /// Notes for the audit trail what the call is about, where neither the request nor an answer of
    /// the store says it.
    pub(crate) fn touch(&self, id: &str) {
        if let Some(draft) = &self.draft {
            draft.touch(id);
        }
    }
}

impl CallerContext {
    pub(crate) fn organization(&self) -> OrganizationId {
        self.caller.organization
    }

    /// Whether the caller's tasks may work in this directory. Every path below the interpreter's
    /// roots can be named, whoever works there; so only the operator's organization may name one,
    /// and the tasks of others each have a directory of their own.
    ///
    /// # Errors
    /// `PERMISSION_DENIED`.
    pub(crate) fn check_workspace(&self, path: &str) -> Result<(), Status> {
        if path.is_empty() || self.organization() == OrganizationId::LOCAL {
            return Ok(());
        }
        Err(Status::permission_denied(
            "only the operator's organization may name a workspace; leave it empty, and the task has one of its own",
        ))
    }

    /// Whether the caller may have a model provider of this kind, reached there (empty: at its
    /// vendor). The providers service stands where others have no business: beside the operator's
    /// machines, whose addresses it reaches and whose models it loads. So only the operator's
    /// organization says where it goes; others use the vendors.
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
            "only the operator's organization may say where a model provider is; leave `base_url` empty (for Bedrock: \
             `https://bedrock-runtime.REGION.amazonaws.com`)",
        ))
    }

    /// Whether the caller may have to do with a task: who may not is told that there is none.
    ///
    /// # Errors
    /// `NOT_FOUND`.
    pub(crate) fn check_task_access(&self, task: TaskId) -> Result<(), Status> {
        if self.caller.may_see(task) {
            return Ok(());
        }
        Err(status::for_reference(&task.to_string(), Error::NotFound { what: "task" }))
    }

    /// In whose name the caller acts.
    pub(crate) fn user(&self) -> UserId {
        self.caller.user
    }

    pub(crate) const fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Who asks, for what is written down about a decision.
    pub(crate) fn name(&self) -> String {
        self.caller.name()
    }

    /// Identifies a write. The request loses its idempotency key, which is not part of what is
    /// compared.
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

    /// Ends a write that went well: tells the mesh, and answers.
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

/// Whether this is Bedrock's own address in some region, and nothing else.
fn is_bedrock_address(base_url: &str) -> bool {
    let host = base_url.strip_prefix("https://").map(|rest| rest.strip_suffix('/').unwrap_or(rest));
    let region =
        host.and_then(|host| host.strip_prefix("bedrock-runtime.")?.strip_suffix(".amazonaws.com"));
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    region.is_some_and(|region| !region.is_empty() && region.bytes().all(plain))
}

/// Stands in the extensions of an answer that was given before, to a request with the same
/// idempotency key. Callers within the process see it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RepeatedResponse;

/// No wake: nothing waits for it.
pub(crate) fn no_wake<T>(_: &T) -> Option<(TaskId, &'static str)> {
    None
}

/// What a write refers to by name or id.
///
/// A repeated request gets its first answer even when what it names is gone or has another name by
/// now. So a reference that leads nowhere is not refused at once when the request has an
/// idempotency key: the write goes on with an id that exists nowhere, and either finds its key, or
/// fails with the error kept here.
pub(crate) struct ReferenceResolver {
    is_repeatable: bool,
    /// The first reference: what the write is about.
    reference: Option<String>,
    /// Why the write is not to be done.
    refusal: Option<Status>,
}

impl ReferenceResolver {
    pub(crate) fn new(write: &Write) -> Self {
        Self { is_repeatable: write.idempotency.is_some(), reference: None, refusal: None }
    }

    /// Takes what was found for a reference. `nil_id` makes the id that exists nowhere.
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

    /// Keeps why the write must not be done, for reasons that lie in what was found: a repeated
    /// request still gets its first answer.
    pub(crate) fn reject<I>(&mut self, reason: Status, nil_id: fn(Uuid) -> I) -> Result<I, Status> {
        if !self.is_repeatable {
            return Err(reason);
        }
        self.refusal.get_or_insert(reason);
        Ok(nil_id(Uuid::nil()))
    }

    /// The result of the write, in view of what was found.
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
