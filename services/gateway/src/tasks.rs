//! `TaskService`. It writes intents; what becomes of a task is the reconciler's decision.

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
    api::{Api, Lookup, nobody},
    convert, events, explain,
    page::Column,
    quotas::Wanted,
    status::{self, chain},
    validate::{self, optional_id, requests},
    whereabouts,
};

/// What the model of a copied task is told that works in another directory than the task it was
/// copied from.
const ELSEWHERE: &str = "The conversation up to here is a copy of another one's. It goes on in another working directory: files \
                         that were made before are not there, unless somebody has put them there.";

fn render(kind: &'static str) -> impl FnOnce(&StoredTask) -> WriteOutput + Send {
    move |task| {
        let task = convert::task(task);
        events::rendered(kind, Payload::Task(Box::new(task.clone())), &task)
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
        let (entry, mut request) = self.enter_unchecked(request)?;
        requests::create_task(&request, self.pools())?;
        entry.workspace(request.spec.as_ref().map_or("", |spec| &spec.workspace))?;
        let write = entry.write("CreateTask", &mut request);
        self.allow(&entry, Some(&write), Wanted::TASK).await?;
        let spec = request.spec.unwrap_or_default();
        let mut lookup = Lookup::new(&write);
        let agent = entry.store().agent_resolve(entry.organization(), &spec.agent).await;
        let new = NewTask {
            id: TaskId::from_uuid(Uuid::now_v7()),
            agent: lookup.take(&spec.agent, agent, AgentId::from_uuid)?,
            workspace: spec.workspace,
            title: spec.title,
            max_turns_override: spec.max_turns,
            policy: spec.policy.into_iter().filter_map(convert::to_rule).collect(),
            pinned: spec.pinned,
            compute: (!spec.compute.is_empty()).then_some(spec.compute),
        };
        let written =
            lookup.settle(entry.store().task_create(&write, new, render("task.created")).await)?;
        // A new task awaits its first message: there is nothing to wake it for.
        entry.answer(written, nobody, convert::task).await
    }

    async fn get_task(
        &self,
        request: Request<GetTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (entry, request) = self.enter(request)?;
        let task = validate::id(&request.task)?;
        entry.sees(task)?;
        let found = entry.store().task_get(entry.organization(), task).await;
        let found = found.map_err(|error| status::about(&request.task, error))?;
        let mut shown = convert::task(&found);
        if !found.subtasks.is_empty()
            && let Some(shown) = &mut shown.status
        {
            match entry.store().task_descendants(entry.organization(), task).await {
                Ok(below) => shown.below = Some(Box::new(convert::below(&below))),
                // Who asks for the task is told of the task.
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
        let (entry, request, page) = self.enter_list(request, &Column::TIMES)?;
        let organization = entry.organization();
        let filter = request.filter.unwrap_or_default();
        let agent = match filter.agent.as_str() {
            "" => None,
            agent => {
                let found = entry.store().agent_resolve(organization, agent).await;
                Some(found.map_err(|error| status::about(agent, error))?)
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
        let found = entry.store().task_list(organization, &filter, &page.query()).await;
        let tasks = found.map_err(status::of_store)?;
        let (tasks, info) = page.cut(&tasks, convert::task, |task| task.cursor(page.key()));
        Ok(Response::new(ListTasksResponse { tasks, page: Some(info) }))
    }

    async fn update_task(
        &self,
        request: Request<UpdateTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (entry, mut request) = self.enter_unchecked(request)?;
        let task = requests::update_task(&request)?;
        let write = entry.write("UpdateTask", &mut request);
        let mut lookup = Lookup::new(&write);
        lookup.take(&request.task, Ok(task), TaskId::from_uuid)?;
        let agent = match &request.agent {
            None => None,
            Some(agent) => {
                let found = entry.store().agent_resolve(entry.organization(), agent).await;
                Some(lookup.take(agent, found, AgentId::from_uuid)?)
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
        let updated = entry
            .store()
            .task_update(&write, task, expected, changes, render("task.updated"))
            .await;
        entry.answer(lookup.settle(updated)?, wake("updated"), convert::task).await
    }

    async fn delete_task(
        &self,
        request: Request<DeleteTaskRequest>,
    ) -> Result<Response<DeleteTaskResponse>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let task = validate::id(&request.task)?;
        let write = entry.write("DeleteTask", &mut request);
        let render = |task: &StoredTask| events::deleted("task.deleted", task.state.id);
        let deleted = entry.store().task_delete(&write, task, render).await;
        let deleted = deleted.map_err(|error| status::about(&request.task, error))?;
        entry.answer(deleted, wake("deleted"), |_| DeleteTaskResponse {}).await
    }

    async fn suspend_task(
        &self,
        request: Request<SuspendTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let task = validate::id(&request.task)?;
        let write = entry.write("SuspendTask", &mut request);
        let suspended = entry.store().task_suspend(&write, task, render("task.updated")).await;
        let suspended = suspended.map_err(|error| status::about(&request.task, error))?;
        entry.answer(suspended, wake("suspended"), convert::task).await
    }

    async fn resume_task(
        &self,
        request: Request<ResumeTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let task = validate::id(&request.task)?;
        let write = entry.write("ResumeTask", &mut request);
        self.allow(&entry, Some(&write), Wanted::WORK).await?;
        let resumed = entry.store().task_resume(&write, task, render("task.updated")).await;
        let resumed = resumed.map_err(|error| status::about(&request.task, error))?;
        entry.answer(resumed, wake("resumed"), convert::task).await
    }

    async fn cancel_task(
        &self,
        request: Request<CancelTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let task = validate::id(&request.task)?;
        entry.sees(task)?;
        let write = entry.write("CancelTask", &mut request);
        let cancelled =
            entry.store().task_cancel(&write, task, &request.reason, render("task.updated")).await;
        let cancelled = cancelled.map_err(|error| status::about(&request.task, error))?;
        entry.answer(cancelled, wake("cancelled"), convert::task).await
    }

    async fn rewind_task(
        &self,
        request: Request<RewindTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let (task, message) = (validate::id(&request.task)?, validate::id(&request.message)?);
        let write = entry.write("RewindTask", &mut request);
        let rewind = Rewind { task, message, keep: request.keep };
        let rewound = entry.store().task_rewind(&write, rewind, render("task.updated")).await;
        let rewound = rewound.map_err(|error| status::about(&request.message, error))?;
        entry.answer(rewound, wake("taken back"), convert::task).await
    }

    async fn fork_task(
        &self,
        request: Request<ForkTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let (source, message) = (validate::id(&request.task)?, validate::id(&request.message)?);
        entry.workspace(&request.workspace)?;
        let write = entry.write("ForkTask", &mut request);
        self.allow(&entry, Some(&write), Wanted::TASK).await?;
        let elsewhere = Content { blocks: vec![Block::Text(ELSEWHERE.to_owned())] };
        let new = NewFork {
            id: TaskId::from_uuid(Uuid::now_v7()),
            source,
            message,
            title: request.title,
            workspace: request.workspace,
            workspace_notice: (MessageId::from_uuid(Uuid::now_v7()), elsewhere),
        };
        let forked = entry.store().task_fork(&write, new, render("task.created")).await;
        let forked = forked.map_err(|error| status::about(&request.message, error))?;
        // Like any new task it awaits a message.
        entry.answer(forked, nobody, convert::task).await
    }

    async fn explain_task(
        &self,
        request: Request<ExplainTaskRequest>,
    ) -> Result<Response<TaskExplanation>, Status> {
        let (entry, request) = self.enter(request)?;
        let id = validate::id(&request.task)?;
        let found = entry.store().task_get(entry.organization(), id).await;
        let task = found.map_err(|error| status::about(&request.task, error))?;
        let parked = entry
            .store()
            .task_quarantine_get(entry.organization(), id)
            .await
            .map_err(status::of_store)?;
        if let Some(parked) = parked {
            return Ok(Response::new(explain::put_aside(&task, parked)));
        }
        // The model is named when it can be; the explanation doesn't depend on it.
        let model = match entry.store().agent_get(entry.organization(), task.state.agent).await {
            Ok(agent) => Some(agent.model_name),
            Err(Error::NotFound { .. }) => None,
            Err(error) => return Err(status::of_store(error)),
        };
        let asked = match task.state.phase {
            Phase::AwaitApproval | Phase::Suspended => {
                let filter = ApprovalFilter {
                    task: Some(id),
                    state: Some(ApprovalState::Pending),
                    tree: None,
                };
                let order = Order { key: Key::CreatedAt, descending: false };
                let page = Page { limit: explain::APPROVALS, order, after: None };
                entry
                    .store()
                    .approval_list(entry.organization(), &filter, &page)
                    .await
                    .map_err(status::of_store)?
            }
            _ => Vec::new(),
        };
        let mesh = if explain::at_rest(&task) {
            explain::Mesh::default()
        } else {
            let (pools, providers) = (&entry.backend.pools, &entry.backend.providers);
            let deadline = entry.deadline;
            let found = whereabouts::find(entry.backend.publisher.bus(), &task, deadline);
            let (no_interpreter, no_providers, found) = future::join3(
                pools.absence(&task.compute, deadline),
                providers.absence(deadline),
                found,
            )
            .await;
            explain::Mesh { no_interpreter, no_providers, found }
        };
        Ok(Response::new(explain::explain(&task, model.as_deref(), &asked, Some(&mesh))))
    }
}
