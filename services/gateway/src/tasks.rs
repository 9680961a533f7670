//! `TaskService`. It writes intents; the reconciler decides about tasks.

use construct_domain::{
    AgentId, MessageId, TaskId,
    approval::ApprovalState,
    message::{Block, Content},
    task::Phase,
};
use construct_proto::v1::{
    self, CancelTaskRequest, CreateTaskRequest, DeleteTaskRequest, DeleteTaskResponse,
    ExplainTaskRequest, ForkTaskRequest, GetTaskRequest, ListTasksRequest, ListTasksResponse,
    ResumeTaskRequest, RewindTaskRequest, SuspendTaskRequest, TaskExplanation, UpdateTaskRequest,
    event::Payload, task_service_server::TaskService,
};
use construct_store::{
    ApprovalFilter, Error, Key, NewFork, NewTask, Order, Page, Rewind, StoredTask, TaskChanges,
    TaskFilter, WriteOutput,
};
use futures::future;
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, ReferenceResolver, no_wake},
    convert, events, explain, location,
    page::Column,
    quotas::QuotaRequest,
    status::{self, chain},
    validate::{self, optional_id, requests},
};

/// A notice for the model of a fork that works in another directory than its original.
const ELSEWHERE: &str = "The conversation up to here is a copy of another one's. It goes on in another working directory: files \
                         that were made before are not there, unless somebody has put them there.";

fn render(kind: &'static str) -> impl FnOnce(&StoredTask) -> WriteOutput + Send {
    move |task| {
        let task = convert::task(task);
        events::write_output(kind, Payload::Task(Box::new(task.clone())), &task)
    }
}

fn wake(reason: &'static str) -> impl FnOnce(&StoredTask) -> Option<(TaskId, &'static str)> {
    move |task| Some((task.state.id, reason))
}

#[tonic::async_trait]
impl TaskService for Api {
    async fn create_task(
        &self,
        request: Request<CreateTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::create_task(&request, self.pools())?;
        context.check_workspace(request.spec.as_ref().map_or("", |spec| &spec.workspace))?;
        let write = context.write("CreateTask", &mut request);
        self.check_quotas(&context, Some(&write), QuotaRequest::TASK).await?;
        let spec = request.spec.unwrap_or_default();
        let mut resolver = ReferenceResolver::new(&write);
        let agent = context.store().agent_resolve(context.organization(), &spec.agent).await;
        let new = NewTask {
            id: TaskId::from_uuid(Uuid::now_v7()),
            agent: resolver.resolve(&spec.agent, agent, AgentId::from_uuid)?,
            workspace: spec.workspace,
            title: spec.title,
            max_turns_override: spec.max_turns,
            policy: spec.policy.into_iter().filter_map(convert::to_rule).collect(),
            pinned: spec.pinned,
            compute: (!spec.compute.is_empty()).then_some(spec.compute),
        };
        let written = resolver
            .finish(context.store().task_create(&write, new, render("task.created")).await)?;
        // A new task awaits its first message, so there is no wake.
        context.answer(written, no_wake, convert::task).await
    }

    async fn get_task(
        &self,
        request: Request<GetTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, request) = self.begin_request(request)?;
        let task = validate::id(&request.task)?;
        context.check_task_access(task)?;
        let found = context.store().task_get(context.organization(), task).await;
        let found = found.map_err(|error| status::for_reference(&request.task, error))?;
        let mut shown = convert::task(&found);
        if !found.subtasks.is_empty()
            && let Some(shown) = &mut shown.status
        {
            match context.store().task_descendants(context.organization(), task).await {
                Ok(below) => {
                    shown.subtask_totals = Some(Box::new(convert::descendant_totals(&below)))
                }
                // The task itself is returned in any case.
                Err(error) => {
                    tracing::warn!(%task, error = chain(&error), "what is below a task cannot be read")
                }
            }
        }
        Ok(Response::new(shown))
    }

    async fn list_tasks(
        &self,
        request: Request<ListTasksRequest>,
    ) -> Result<Response<ListTasksResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::TIMES)?;
        let organization = context.organization();
        let filter = request.filter.unwrap_or_default();
        let agent = match filter.agent.as_str() {
            "" => None,
            agent => {
                let found = context.store().agent_resolve(organization, agent).await;
                Some(found.map_err(|error| status::for_reference(agent, error))?)
            }
        };
        let filter = TaskFilter {
            agent,
            phase: convert::to_phase(filter.phase()),
            created_after: filter.created_after.and_then(convert::to_time),
            created_before: filter.created_before.and_then(convert::to_time),
            parent: optional_id(&filter.parent)?,
            workspace: (!filter.workspace.is_empty()).then_some(filter.workspace),
        };
        let found = context.store().task_list(organization, &filter, &page.query()).await;
        let tasks = found.map_err(status::from_store)?;
        let (tasks, info) = page.cut(&tasks, convert::task, |task| task.cursor(page.key()));
        Ok(Response::new(ListTasksResponse { tasks, page: Some(info) }))
    }

    async fn update_task(
        &self,
        request: Request<UpdateTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let task = requests::update_task(&request)?;
        let write = context.write("UpdateTask", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        resolver.resolve(&request.task, Ok(task), TaskId::from_uuid)?;
        let agent = match &request.agent {
            None => None,
            Some(agent) => {
                let found = context.store().agent_resolve(context.organization(), agent).await;
                Some(resolver.resolve(agent, found, AgentId::from_uuid)?)
            }
        };
        let changes = TaskChanges {
            agent,
            title: request.title,
            max_turns_override: request.max_turns,
            policy: request
                .policy
                .map(|policy| policy.rules.into_iter().filter_map(convert::to_rule).collect()),
            pinned: request.pinned.map(|pinned| pinned.facts),
        };
        let expected = (request.revision != 0).then_some(request.revision);
        let updated = context
            .store()
            .task_update(&write, task, expected, changes, render("task.updated"))
            .await;
        context.answer(resolver.finish(updated)?, wake("updated"), convert::task).await
    }

    async fn delete_task(
        &self,
        request: Request<DeleteTaskRequest>,
    ) -> Result<Response<DeleteTaskResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let task = validate::id(&request.task)?;
        let write = context.write("DeleteTask", &mut request);
        let render = |task: &StoredTask| events::deletion_output("task.deleted", task.state.id);
        let deleted = context.store().task_delete(&write, task, render).await;
        let deleted = deleted.map_err(|error| status::for_reference(&request.task, error))?;
        context.answer(deleted, wake("deleted"), |_| DeleteTaskResponse {}).await
    }

    async fn suspend_task(
        &self,
        request: Request<SuspendTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let task = validate::id(&request.task)?;
        let write = context.write("SuspendTask", &mut request);
        let suspended = context.store().task_suspend(&write, task, render("task.updated")).await;
        let suspended = suspended.map_err(|error| status::for_reference(&request.task, error))?;
        context.answer(suspended, wake("suspended"), convert::task).await
    }

    async fn resume_task(
        &self,
        request: Request<ResumeTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let task = validate::id(&request.task)?;
        let write = context.write("ResumeTask", &mut request);
        self.check_quotas(&context, Some(&write), QuotaRequest::WORK).await?;
        let resumed = context.store().task_resume(&write, task, render("task.updated")).await;
        let resumed = resumed.map_err(|error| status::for_reference(&request.task, error))?;
        context.answer(resumed, wake("resumed"), convert::task).await
    }

    async fn cancel_task(
        &self,
        request: Request<CancelTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let task = validate::id(&request.task)?;
        context.check_task_access(task)?;
        let write = context.write("CancelTask", &mut request);
        let cancelled = context
            .store()
            .task_cancel(&write, task, &request.reason, render("task.updated"))
            .await;
        let cancelled = cancelled.map_err(|error| status::for_reference(&request.task, error))?;
        context.answer(cancelled, wake("cancelled"), convert::task).await
    }

    async fn rewind_task(
        &self,
        request: Request<RewindTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let (task, message) = (validate::id(&request.task)?, validate::id(&request.message)?);
        let write = context.write("RewindTask", &mut request);
        let rewind = Rewind { task, message, keep: request.keep };
        let rewound = context.store().task_rewind(&write, rewind, render("task.updated")).await;
        let rewound = rewound.map_err(|error| status::for_reference(&request.message, error))?;
        context.answer(rewound, wake("taken back"), convert::task).await
    }

    async fn fork_task(
        &self,
        request: Request<ForkTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let (source, message) = (validate::id(&request.task)?, validate::id(&request.message)?);
        context.check_workspace(&request.workspace)?;
        let write = context.write("ForkTask", &mut request);
        self.check_quotas(&context, Some(&write), QuotaRequest::TASK).await?;
        let elsewhere = Content { blocks: vec![Block::Text(ELSEWHERE.to_owned())] };
        let new = NewFork {
            id: TaskId::from_uuid(Uuid::now_v7()),
            source,
            message,
            title: request.title,
            workspace: request.workspace,
            workspace_notice: (MessageId::from_uuid(Uuid::now_v7()), elsewhere),
        };
        let forked = context.store().task_fork(&write, new, render("task.created")).await;
        let forked = forked.map_err(|error| status::for_reference(&request.message, error))?;
        // Like any new task it awaits a message.
        context.answer(forked, no_wake, convert::task).await
    }

    async fn explain_task(
        &self,
        request: Request<ExplainTaskRequest>,
    ) -> Result<Response<TaskExplanation>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.task)?;
        let found = context.store().task_get(context.organization(), id).await;
        let task = found.map_err(|error| status::for_reference(&request.task, error))?;
        let parked = context
            .store()
            .task_quarantine_get(context.organization(), id)
            .await
            .map_err(status::from_store)?;
        if let Some(parked) = parked {
            return Ok(Response::new(explain::quarantined(&task, parked)));
        }
        // The model's name is optional in an explanation.
        let model = match context.store().agent_get(context.organization(), task.state.agent).await
        {
            Ok(agent) => Some(agent.model_name),
            Err(Error::NotFound { .. }) => None,
            Err(error) => return Err(status::from_store(error)),
        };
        let asked = match task.state.phase {
            Phase::AwaitApproval | Phase::Suspended => {
                let filter = ApprovalFilter {
                    task: Some(id),
                    state: Some(ApprovalState::Pending),
                    tree: None,
                };
                let order = Order { key: Key::CreatedAt, descending: false };
                let page = Page { limit: explain::MAX_APPROVALS, order, after: None };
                context
                    .store()
                    .approval_list(context.organization(), &filter, &page)
                    .await
                    .map_err(status::from_store)?
            }
            _ => Vec::new(),
        };
        let mesh = if explain::is_idle(&task) {
            explain::MeshStatus::default()
        } else {
            let (pools, providers) = (&context.backend.pools, &context.backend.providers);
            let deadline = context.deadline;
            let report = location::find(context.backend.publisher.bus(), &task, deadline);
            let (no_interpreter, no_providers, report) = future::join3(
                pools.absence(&task.compute, deadline),
                providers.absence(deadline),
                report,
            )
            .await;
            explain::MeshStatus { no_interpreter, no_providers, report }
        };
        Ok(Response::new(explain::explain(&task, model.as_deref(), &asked, Some(&mesh))))
    }
}
