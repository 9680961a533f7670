//! `ScanService`: requests for scans. The scanner executes them.
//!
//! The exploring task is created here with its scan, a budget, and a read-only policy. So callers
//! need no permission to name a directory, and the scanner needs a token for this one task only.

mod compare;
mod explore;
mod watch;

use std::time::Duration;

use construct_bus::{blob, request, subject};
use construct_domain::{CandidateId, OrganizationId, ScanConnectionId, ScanId};
use construct_proto::{
    mesh::v1::{RepositoriesQuery, ToolCreate},
    v1::{
        self, CancelScanRequest, CompareScansRequest, CompareScansResponse,
        CreateScanConnectionRequest, CreateScanRequest, CreateToolsRequest, CreateToolsResponse,
        DeleteScanConnectionRequest, DeleteScanConnectionResponse, GetScanRequest,
        ListCandidatesRequest, ListCandidatesResponse, ListRepositoriesRequest,
        ListRepositoriesResponse, ListScanConnectionsRequest, ListScanConnectionsResponse,
        ListScansRequest, ListScansResponse, ReviewCandidateRequest, ScanEvent, WatchScanRequest,
        scan_connection_spec::Credential, scan_service_server::ScanService, scan_spec::Source,
    },
};
use construct_runtime::{ScanToken, clock};
use construct_store::{
    Error, Keyring, Write, WriteOutcome,
    scan::{
        Candidate, HandOverResult, NewScan, NewScanConnection, Review, Scan, ScanFilter, ScanKind,
        ScanLimits,
    },
};
use construct_wire::scan as show;
use futures::stream::BoxStream;
use jiff::SignedDuration;
use tonic::{Code, Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, CallerContext, ReferenceResolver, no_wake},
    deadline,
    organizations::response_output,
    page::Column,
    quotas::QuotaRequest,
    status,
    validate::{self, requests},
};

/// The timeout of listing repositories: the scanner calls another host.
const REPOSITORIES_TIMEOUT: Duration = Duration::from_secs(25);
/// Default budget of an exploration: two dollars.
const DEFAULT_BUDGET_PICO_USD: i64 = 2_000_000_000_000;
/// Default maximum of model calls per answer of an exploration.
const DEFAULT_TURNS: u32 = 40;
/// Default timeout of a scan, in seconds.
const DEFAULT_TIMEOUT_SECONDS: i64 = 3600;
/// How long the token of a scan is valid after the deadline, so that the scanner can still end its
/// task.
const TOKEN_GRACE_PERIOD: SignedDuration = SignedDuration::from_mins(10);

fn digest(keyring: &Keyring, value: &mut String) -> Result<String, Status> {
    let digest = keyring
        .digest(value.as_bytes())
        .map_err(|error| status::internal("a credential could not be encrypted", &error))?;
    let digest = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(std::mem::replace(value, digest))
}

/// Removes the credential from a request before the request is identified by its hash, which is
/// stored; see `secrets.rs`.
fn take_credential(keyring: &Keyring, credential: &mut Credential) -> Result<String, Status> {
    match credential {
        Credential::Token(token) => digest(keyring, token),
        Credential::App(app) => {
            let private_key = digest(keyring, &mut app.private_key)?;
            let full_app = v1::GitHubApp { private_key, ..app.clone() };
            // The scanner parses this.
            Ok(serde_json::json!({
                "app_id": full_app.app_id,
                "installation_id": full_app.installation_id,
                "private_key": full_app.private_key,
            })
            .to_string())
        }
    }
}

/// The target of a scan: its kind, its location there, and its repository name here.
struct Target {
    kind: ScanKind,
    location: String,
    repository: String,
}

/// The authority of a repository host.
fn authority(base_url: &str) -> Option<String> {
    requests::repository_path(base_url).and_then(|(host, _)| host)
}

fn target(
    source: &Source,
    connection: Option<&construct_store::scan::ScanConnection>,
) -> Result<Target, Status> {
    let hosted = |kind: ScanKind, location: &str, public: &str| {
        let (host, path) = requests::repository_path(location).unwrap_or_default();
        let own = connection.and_then(|connection| authority(&connection.base_url));
        // The public address of a host may differ from that of its API.
        let same =
            |host: &str, known: &str| known == host || known.strip_prefix("api.") == Some(host);
        match (&host, &own) {
            (Some(host), Some(own)) if !same(host, own) => {
                return Err(Status::invalid_argument(format!(
                    "spec.connection: is for {own}, not for {host}"
                )));
            }
            (Some(host), None) if host != public => {
                let message =
                    format!("spec.connection: a connection whose `base_url` is {host} is required");
                return Err(Status::invalid_argument(message));
            }
            _ => {}
        }
        let place = own.map(|own| format!("{own}/")).unwrap_or_default();
        let repository = format!("{}:{place}{}", kind.as_str(), path.to_lowercase());
        Ok(Target { kind, location: path, repository })
    };
    match source {
        Source::Github(location) => hosted(ScanKind::Github, location, "github.com"),
        Source::Gitlab(location) => hosted(ScanKind::Gitlab, location, "gitlab.com"),
        Source::Upload(upload) => Ok(Target {
            kind: ScanKind::Upload,
            location: upload.name.clone(),
            repository: format!("upload:{}", upload.name),
        }),
        Source::Folder(path) => Ok(Target {
            kind: ScanKind::Folder,
            location: path.clone(),
            repository: format!("folder:{path}"),
        }),
    }
}

impl CallerContext {
    /// Checks whether the caller may scan a directory of the scanner's machine.
    fn check_folder(&self, is_local: bool) -> Result<(), Status> {
        if self.organization() == OrganizationId::LOCAL && is_local {
            return Ok(());
        }
        Err(Status::permission_denied(
            "only the operator's organization may have a folder scanned, and only in local mode; send an archive",
        ))
    }

    /// Checks whether the caller may set the address of a repository host: the scanner reaches
    /// addresses that others don't.
    fn check_host(&self, base_url: &str) -> Result<(), Status> {
        if base_url.is_empty() || self.organization() == OrganizationId::LOCAL {
            return Ok(());
        }
        Err(Status::permission_denied(
            "only the operator's organization may set the address of a repository host",
        ))
    }
}

impl Api {
    /// Stores an archive until its scan is over. It is encrypted, so no other scan shares its blob,
    /// and it can be removed with its scan.
    async fn store_archive(
        &self,
        context: &CallerContext,
        archive: &[u8],
    ) -> Result<blob::Reference, Status> {
        let sealed = self.keyring().seal(&context.organization().to_string(), archive);
        let sealed = sealed
            .map_err(|error| status::internal("an archive could not be encrypted", &error))?;
        let put = context.backend.blobs.put(sealed.to_bytes().into()).await;
        put.map_err(|error| status::internal("an archive could not be stored", &error))
    }
}

#[tonic::async_trait]
impl ScanService for Api {
    type WatchScanStream = BoxStream<'static, Result<ScanEvent, Status>>;

    async fn create_scan_connection(
        &self,
        request: Request<CreateScanConnectionRequest>,
    ) -> Result<Response<v1::ScanConnection>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::create_scan_connection(&request)?;
        context.check_host(request.spec.as_ref().map_or("", |spec| &spec.base_url))?;
        let keyring = self.keyring();
        let credential = request.spec.as_mut().and_then(|spec| spec.credential.as_mut());
        let Some(credential) = credential else {
            return Err(Status::invalid_argument("spec.token: is required"));
        };
        let (kind, value) = (show::credential(credential), take_credential(keyring, credential)?);
        let write = context.write("CreateScanConnection", &mut request);
        let spec = request.spec.unwrap_or_default();
        let id = ScanConnectionId::from_uuid(Uuid::now_v7());
        let sealed = keyring.seal(&id.to_string(), value.as_bytes());
        let new = NewScanConnection {
            id,
            host: show::to_host(spec.host())
                .ok_or_else(|| Status::invalid_argument("spec.host: is required"))?,
            name: spec.name,
            base_url: spec.base_url.trim_end_matches('/').to_owned(),
            credential: kind,
            sealed: sealed
                .map_err(|error| status::internal("a credential could not be encrypted", &error))?,
        };
        let render = |made: &_| response_output(&show::connection(made));
        let written = context
            .store()
            .scan_connection_create(&write, new, render)
            .await
            .map_err(status::from_store)?;
        context.answer(written, no_wake, show::connection).await
    }

    async fn list_scan_connections(
        &self,
        request: Request<ListScanConnectionsRequest>,
    ) -> Result<Response<ListScanConnectionsResponse>, Status> {
        let (context, _, page) = self.begin_list_request(request, &Column::NAMED)?;
        let found =
            context.store().scan_connection_list(context.organization(), &page.query()).await;
        let found = found.map_err(status::from_store)?;
        let (connections, info) =
            page.cut(&found, show::connection, |connection| connection.cursor(page.key()));
        Ok(Response::new(ListScanConnectionsResponse { connections, page: Some(info) }))
    }

    async fn delete_scan_connection(
        &self,
        request: Request<DeleteScanConnectionRequest>,
    ) -> Result<Response<DeleteScanConnectionResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("DeleteScanConnection", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let found =
            context.store().scan_connection_find(context.organization(), &request.connection).await;
        let found = found.map(|connection| connection.id);
        let id = resolver.resolve(&request.connection, found, ScanConnectionId::from_uuid)?;
        let render = |_: &_| response_output(&DeleteScanConnectionResponse {});
        let deleted = context.store().scan_connection_delete(&write, id, render).await;
        context
            .answer(resolver.finish(deleted)?, no_wake, |_| DeleteScanConnectionResponse {})
            .await
    }

    async fn list_repositories(
        &self,
        request: Request<ListRepositoriesRequest>,
    ) -> Result<Response<ListRepositoriesResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let found =
            context.store().scan_connection_find(context.organization(), &request.connection).await;
        let connection =
            found.map_err(|error| status::for_reference(&request.connection, error))?;
        self.scans_dir()?;
        let question = RepositoriesQuery {
            organization_id: context.organization().to_string(),
            connection_id: connection.id.to_string(),
            owner: request.owner,
            page: request.page.max(1),
        };
        let timeout = context.deadline.remaining(REPOSITORIES_TIMEOUT);
        let reply = context
            .backend
            .publisher
            .bus()
            .ask(&subject::ListRepositories, &question, timeout)
            .await;
        let answer = reply.map_err(|error| match error {
            request::Error::NoResponders => status::unavailable("the scanner is not running"),
            request::Error::Timeout if context.deadline.is_over() => deadline::exceeded(),
            request::Error::Timeout => {
                status::unavailable("the scanner, or the host, did not answer in time")
            }
            error => status::internal("the request to the scanner failed", &error),
        })?;
        if !answer.failure.is_empty() {
            return Err(Status::failed_precondition(answer.failure));
        }
        let mut repositories = answer.repositories;
        let place =
            authority(&connection.base_url).map(|own| format!("{own}/")).unwrap_or_default();
        let known =
            |name: &str| format!("{}:{place}{}", connection.host.as_str(), name.to_lowercase());
        let names: Vec<String> =
            repositories.iter().map(|repository| known(&repository.name)).collect();
        let last = context
            .store()
            .scan_latest(context.organization(), &names)
            .await
            .map_err(status::from_store)?;
        for repository in &mut repositories {
            let name = known(&repository.name);
            let scan = last.iter().find(|(repository, _)| *repository == name);
            repository.last_scan = scan.map(|(_, scan)| scan.to_string()).unwrap_or_default();
        }
        Ok(Response::new(ListRepositoriesResponse { repositories, next_page: answer.next_page }))
    }

    async fn create_scan(
        &self,
        request: Request<CreateScanRequest>,
    ) -> Result<Response<v1::Scan>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::create_scan(&request)?;
        let keys = self.token_keys()?;
        let write = context.write("CreateScan", &mut request);
        // A repeated request gets its response, whatever has become of its references and results.
        if let Some(response) =
            context.store().idempotent_response(&write).await.map_err(status::from_store)?
        {
            return context.answer(WriteOutcome::Repeated { response }, no_wake, show::scan).await;
        }
        let spec = request.spec.unwrap_or_default();
        let source =
            spec.source.ok_or_else(|| Status::invalid_argument("spec.github: is required"))?;
        if matches!(source, Source::Folder(_)) {
            context.check_folder(self.is_local())?;
        }
        let connection = match spec.connection.as_str() {
            "" => None,
            name => {
                let found =
                    context.store().scan_connection_find(context.organization(), name).await;
                Some(found.map_err(|error| status::for_reference(name, error))?)
            }
        };
        let Target { kind, location, repository } = target(&source, connection.as_ref())?;
        if connection.as_ref().is_some_and(|connection| connection.host.as_str() != kind.as_str()) {
            return Err(Status::invalid_argument("spec.connection: is for another kind of host"));
        }
        let model = explore::model(&context, &spec.model).await?;
        let dir = self.scans_dir()?;
        let limits = spec.limits.unwrap_or_default();
        let limits = ScanLimits {
            max_bytes: limits.max_bytes,
            max_files: limits.max_files,
            max_turns: i32::try_from(if limits.max_turns == 0 {
                DEFAULT_TURNS
            } else {
                limits.max_turns
            })
            .unwrap_or(i32::MAX),
            timeout_seconds: limits
                .timeout
                .map_or(DEFAULT_TIMEOUT_SECONDS, |timeout| timeout.seconds),
        };
        let budget_pico_usd =
            if spec.budget_pico_usd == 0 { DEFAULT_BUDGET_PICO_USD } else { spec.budget_pico_usd };
        // Checked before anything is created that a refusal would leave behind.
        context
            .store()
            .scan_check_limit(context.organization())
            .await
            .map_err(status::from_store)?;
        let sent = if let Source::Upload(upload) = &source { upload.archive.len() } else { 0 };
        self.check_quotas(&context, Some(&write), QuotaRequest::scan(sent)).await?;
        let archive = match source {
            Source::Upload(upload) => Some(self.store_archive(&context, &upload.archive).await?),
            _ => None,
        };
        let exploration = explore::ExplorationRequest {
            model: &model,
            repository: &repository,
            budget_pico_usd,
            limits: &limits,
        };
        let make = async {
            let prepared = explore::prepare(&context, &write, dir, &exploration).await?;
            let (id, task) = (prepared.scan, prepared.task.to_string());
            let deadline = write.now + SignedDuration::from_secs(limits.timeout_seconds);
            let token = ScanToken {
                scan: id.to_string(),
                organization: context.organization().to_string(),
                task: task.clone(),
                user: context.user().to_string(),
                expires_at: deadline + TOKEN_GRACE_PERIOD,
            };
            let token = self.keyring().seal(&id.to_string(), token.sign(keys).expose().as_bytes());
            let new = NewScan {
                id,
                kind,
                location,
                repository: repository.clone(),
                connection: connection.map(|connection| (connection.id, connection.name)),
                archive: archive.as_ref().map(ToString::to_string),
                reference: spec.reference,
                model: model.name.clone(),
                budget_pico_usd,
                limits,
                created_by: context.name(),
                task,
                token: token
                    .map_err(|error| status::internal("a token could not be encrypted", &error))?,
                deadline,
            };
            let render = |scan: &_| response_output(&show::scan(scan));
            match context.store().scan_create(&write, new, render).await {
                Ok(written) => {
                    // Another request with the same key has created the scan meanwhile, and its
                    // task is gone, so this request has created a second one.
                    if let WriteOutcome::Repeated { response } = &written
                        && !explore::has_exploration(response, &prepared)
                    {
                        explore::undo(&context, &write, &prepared).await;
                    }
                    Ok(written)
                }
                Err(error) => {
                    // If the scan may have been written, the task stays.
                    if !matches!(error, Error::Unavailable(_) | Error::Internal(_)) {
                        explore::undo(&context, &write, &prepared).await;
                    }
                    Err(status::from_store(error))
                }
            }
        };
        let written = make.await;
        let is_needed = match &written {
            Ok(written) => matches!(written, WriteOutcome::Applied { .. }),
            Err(refused) => matches!(refused.code(), Code::Unavailable | Code::Internal),
        };
        if let Some(archive) = archive.filter(|_| !is_needed) {
            // A remaining blob is removed by the blob sweep.
            if let Err(error) = context.backend.blobs.remove(&archive).await {
                tracing::debug!(
                    error = status::chain(&error),
                    "an unused archive could not be removed"
                );
            }
        }
        let written = written?;
        notify_scanners(&context, &written).await;
        context.answer(written, no_wake, show::scan).await
    }

    async fn get_scan(
        &self,
        request: Request<GetScanRequest>,
    ) -> Result<Response<v1::Scan>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.scan)?;
        let found = context.store().scan_get(context.organization(), id).await;
        found
            .map(|scan| Response::new(show::scan(&scan)))
            .map_err(|error| status::for_reference(&request.scan, error))
    }

    async fn list_scans(
        &self,
        request: Request<ListScansRequest>,
    ) -> Result<Response<ListScansResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::TIMES)?;
        let filter = ScanFilter { repository: request.filter.unwrap_or_default().repository };
        let found = context.store().scan_list(context.organization(), &filter, &page.query()).await;
        let found = found.map_err(status::from_store)?;
        let (scans, info) = page.cut(&found, show::scan, |scan| scan.cursor(page.key()));
        Ok(Response::new(ListScansResponse { scans, page: Some(info) }))
    }

    async fn cancel_scan(
        &self,
        request: Request<CancelScanRequest>,
    ) -> Result<Response<v1::Scan>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.scan)?;
        let write = context.write("CancelScan", &mut request);
        let render = |scan: &_| response_output(&show::scan(scan));
        let written = context.store().scan_cancel(&write, id, &request.reason, render).await;
        let written = written.map_err(|error| status::for_reference(&request.scan, error))?;
        notify_scanners(&context, &written).await;
        context.answer(written, no_wake, show::scan).await
    }

    async fn watch_scan(
        &self,
        request: Request<WatchScanRequest>,
    ) -> Result<Response<Self::WatchScanStream>, Status> {
        watch::begin(self, request).await
    }

    async fn list_candidates(
        &self,
        request: Request<ListCandidatesRequest>,
    ) -> Result<Response<ListCandidatesResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.scan)?;
        let state = show::to_candidate_state(request.state());
        let found = context.store().candidate_list(context.organization(), id, state).await;
        let found = found.map_err(|error| status::for_reference(&request.scan, error))?;
        Ok(Response::new(ListCandidatesResponse {
            candidates: found.iter().map(show::candidate).collect(),
        }))
    }

    async fn review_candidate(
        &self,
        request: Request<ReviewCandidateRequest>,
    ) -> Result<Response<v1::Candidate>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let id = requests::review_candidate(&request)?;
        let write = context.write("ReviewCandidate", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let found = context.store().candidate_get(context.organization(), id).await;
        let (id, found) = match found {
            Ok(found) => {
                (resolver.resolve(&request.candidate, Ok(id), CandidateId::from_uuid)?, Some(found))
            }
            Err(error) => {
                (resolver.resolve(&request.candidate, Err(error), CandidateId::from_uuid)?, None)
            }
        };
        let mut expected = (request.revision != 0).then_some(request.revision);
        let content = match (request.content, &found) {
            (Some(new), Some(found)) => {
                // Unchanged parts are those read here.
                expected.get_or_insert(found.revision);
                Some(apply_review(found, &new, &request.fields)?)
            }
            _ => None,
        };
        let state =
            v1::CandidateState::try_from(request.state).ok().and_then(show::to_candidate_state);
        let review = Review { state, content, by: context.name() };
        let render = |candidate: &_| response_output(&show::candidate(candidate));
        let reviewed = context.store().candidate_review(&write, id, expected, review, render).await;
        context.answer(resolver.finish(reviewed)?, no_wake, show::candidate).await
    }

    async fn create_tools(
        &self,
        request: Request<CreateToolsRequest>,
    ) -> Result<Response<CreateToolsResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let id = validate::id(&request.scan)?;
        let named = request
            .candidates
            .iter()
            .map(|candidate| validate::id(candidate))
            .collect::<Result<Vec<CandidateId>, _>>()?;
        let write = context.write("CreateTools", &mut request);
        let render = |handed: &HandOverResult| response_output(&create_tools_response(handed));
        let name = context.name();
        let written = context.store().candidates_hand_over(&write, id, &named, &name, render).await;
        let written = written.map_err(|error| status::for_reference(&request.scan, error))?;
        if let WriteOutcome::Applied { entity, .. } = &written {
            publish_hand_over(&context, entity).await;
        }
        context.answer(written, no_wake, create_tools_response).await
    }

    async fn compare_scans(
        &self,
        request: Request<CompareScansRequest>,
    ) -> Result<Response<CompareScansResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let (before, after) = (validate::id(&request.before)?, validate::id(&request.after)?);
        compare::compare(&context, (&request.before, before), (&request.after, after))
            .await
            .map(Response::new)
    }
}

/// Notifies the scanners. If none hears it, they find the scan by its row.
async fn notify_scanners(context: &CallerContext, written: &WriteOutcome<Scan>) {
    if let WriteOutcome::Applied { entity, .. } = written
        && entity.next_wake.is_some()
    {
        context.backend.publisher.scan(context.organization(), entity.id).await;
    }
}

fn create_tools_response(handed: &HandOverResult) -> CreateToolsResponse {
    CreateToolsResponse {
        hand_over_id: handed.id.map(|id| id.to_string()).unwrap_or_default(),
        candidates: handed.candidates.iter().map(show::candidate).collect(),
    }
}

/// Publishes a hand-over. If this fails, the scanner publishes it later under the same id.
async fn publish_hand_over(context: &CallerContext, handed: &HandOverResult) {
    let Some(id) = handed.id else { return };
    let message = ToolCreate {
        organization_id: context.organization().to_string(),
        hand_over_id: id.to_string(),
        scan_id: handed.scan.id.to_string(),
        repository: handed.scan.repository.clone(),
        commit: handed.scan.commit.clone(),
        candidates: handed.candidates.iter().map(show::candidate).collect(),
    };
    let address = subject::ToolCreate { organization: context.organization() };
    let result = context
        .backend
        .publisher
        .bus()
        .publish_within(&address, &message, Duration::from_secs(1))
        .await;
    let noted = match result {
        Ok(_) => context
            .store()
            .hand_over_mark_published(id, clock::now())
            .await
            .map_err(|error| status::chain(&error)),
        Err(error) => Err(status::chain(&error)),
    };
    if let Err(error) = noted {
        tracing::warn!(error, hand_over = %id, "a hand-over will be published later");
    }
}

/// Applies a review to a candidate: its name, score and content.
fn apply_review(
    found: &Candidate,
    new: &v1::CandidateContent,
    fields: &[String],
) -> Result<(String, i32, serde_json::Value), Status> {
    let new =
        show::to_content(new).ok_or_else(|| Status::invalid_argument("content: cannot be read"))?;
    let mut content = found.content.clone();
    for field in fields {
        content[field.as_str()] = new[field.as_str()].clone();
    }
    let full_content = show::content(&content)
        .ok_or_else(|| Status::invalid_argument("content: cannot be read"))?;
    let score = i32::try_from(full_content.score).unwrap_or(100);
    // Normalized as every reader will see it.
    let content = show::to_content(&full_content)
        .ok_or_else(|| Status::invalid_argument("content: cannot be read"))?;
    Ok((full_content.name, score, content))
}

/// A write that is part of another one, executed once per parent write.
fn partial_write(write: &Write, what: &str) -> Write {
    let idempotency = write.idempotency.as_ref().map(|parent| {
        // The client's key may have the maximum length.
        let digest = <sha2::Sha256 as sha2::Digest>::digest(parent.key.as_bytes());
        let digest: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        construct_store::Idempotency { key: format!("scan/{what}/{digest}"), ..parent.clone() }
    });
    // The audit entry belongs to the parent write, the scan.
    Write { idempotency, audit: None, ..write.clone() }
}

/// The entity of a partial write, written now or by an earlier request.
fn written_entity<T, M: prost::Message + Default>(
    written: WriteOutcome<T>,
    show: impl FnOnce(&T) -> M,
) -> Result<M, Status> {
    match written {
        WriteOutcome::Applied { entity, .. } => Ok(show(&entity)),
        WriteOutcome::Repeated { response } => M::decode(response.as_slice())
            .map_err(|error| status::internal("a stored answer cannot be read", &error)),
    }
}

/// The same error for a missing scan and for one of others.
fn no_scan(reference: &str) -> Status {
    status::for_reference(reference, Error::NotFound { what: "scan" })
}

/// The scan of a request.
async fn find_scan(context: &CallerContext, reference: &str, id: ScanId) -> Result<Scan, Status> {
    context.store().scan_get(context.organization(), id).await.map_err(|error| match error {
        Error::NotFound { .. } => no_scan(reference),
        error => status::from_store(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_write_has_a_short_key_of_its_own() {
        let key = "k".repeat(128);
        let idempotency =
            construct_store::Idempotency { key, method: "CreateScan", request_hash: [7; 32] };
        let write = Write {
            idempotency: Some(idempotency),
            ..Write::new(OrganizationId::LOCAL, clock::now())
        };
        let keys = ["task", "budget"]
            .map(|what| partial_write(&write, what).idempotency.expect("it has one").key);
        assert!(keys[0] != keys[1] && keys.iter().all(|key| key.len() < 64), "{keys:?}");
        assert!(partial_write(&Write { idempotency: None, ..write }, "task").idempotency.is_none());
    }

    #[test]
    fn repository_names_are_normalized() {
        let of = |location: &str| {
            target(&Source::Github(location.to_owned()), None)
                .map(|target| target.repository)
                .map_err(|_| ())
        };
        assert_eq!(of("Octocat/Hello"), Ok("github:octocat/hello".to_owned()));
        assert_eq!(of("https://github.com/octocat/hello.git"), of("octocat/hello"));
        assert_eq!(of("https://github.example.com/octocat/hello"), Err(()));
    }
}
