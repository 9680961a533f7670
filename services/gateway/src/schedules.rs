//! `ScheduleService`. The reconciler makes the runs.

use construct_domain::{AgentId, ScheduleId, TaskId};
use construct_proto::v1::{
    self, CreateScheduleRequest, DeleteScheduleRequest, DeleteScheduleResponse, GetScheduleRequest,
    ListScheduleRunsRequest, ListScheduleRunsResponse, ListSchedulesRequest, ListSchedulesResponse,
    MessagePriority, PauseScheduleRequest, ResumeScheduleRequest, UpdateScheduleRequest,
    event::Payload, schedule_service_server::ScheduleService,
};
use construct_runtime::clock;
use construct_store::{
    NewSchedule, Schedule, ScheduleChanges, ScheduleFilter, ScheduleTarget, WriteOutput,
};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, ReferenceResolver, no_wake},
    convert, events,
    page::Column,
    status,
    validate::{optional_id, requests},
};

fn render(kind: &'static str) -> impl FnOnce(&Schedule) -> WriteOutput + Send {
    move |schedule| {
        let schedule = convert::schedule(schedule);
        events::write_output(kind, Payload::Schedule(schedule.clone()), &schedule)
    }
}

#[tonic::async_trait]
impl ScheduleService for Api {
    async fn create_schedule(
        &self,
        request: Request<CreateScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let now = clock::now();
        let checked = requests::create_schedule(&request, now)?;
        context.check_workspace(request.spec.as_ref().map_or("", |spec| &spec.workspace))?;
        let write = context.write("CreateSchedule", &mut request);
        let spec = request.spec.unwrap_or_default();
        let mut resolver = ReferenceResolver::new(&write);
        let target = match checked.task {
            Some(task) => {
                let found = context
                    .store()
                    .task_get(context.organization(), task)
                    .await
                    .map(|task| task.state.id);
                ScheduleTarget::Task(resolver.resolve(&spec.task, found, TaskId::from_uuid)?)
            }
            None => {
                let found =
                    context.store().agent_resolve(context.organization(), &spec.agent).await;
                ScheduleTarget::Agent(resolver.resolve(&spec.agent, found, AgentId::from_uuid)?)
            }
        };
        let nil_target = |id| ScheduleTarget::Task(TaskId::from_uuid(id));
        let (priority, missed) = (spec.priority(), spec.missed_runs());
        let (target, content) =
            context.content("spec.blocks", spec.blocks, &mut resolver, target, nil_target).await?;
        let new = NewSchedule {
            id: ScheduleId::from_uuid(Uuid::now_v7()),
            name: spec.name.clone(),
            target,
            interrupts: priority == MessagePriority::Interrupt,
            missed: convert::to_missed_run_policy(missed).unwrap_or_default(),
            content,
            title: spec.title,
            workspace: spec.workspace,
            timing: checked.timing,
            next_run: Some(checked.next),
        };
        let written =
            context.store().schedule_create(&write, new, render("schedule.created")).await;
        context.answer(resolver.finish(written)?, no_wake, convert::schedule).await
    }

    async fn get_schedule(
        &self,
        request: Request<GetScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (context, request) = self.begin_request(request)?;
        let found = context.store().schedule_find(context.organization(), &request.schedule).await;
        let schedule = found.map_err(|error| status::for_reference(&request.schedule, error))?;
        Ok(Response::new(convert::schedule(&schedule)))
    }

    async fn list_schedules(
        &self,
        request: Request<ListSchedulesRequest>,
    ) -> Result<Response<ListSchedulesResponse>, Status> {
        let (context, request, page) = self.begin_list_request(request, &Column::NAMED)?;
        let filter = request.filter.unwrap_or_default();
        let filter =
            ScheduleFilter { task: optional_id(&filter.task)?, name_prefix: filter.name_prefix };
        let found =
            context.store().schedule_list(context.organization(), &filter, &page.query()).await;
        let schedules = found.map_err(status::from_store)?;
        let (schedules, info) =
            page.cut(&schedules, convert::schedule, |schedule| schedule.cursor(page.key()));
        Ok(Response::new(ListSchedulesResponse { schedules, page: Some(info) }))
    }

    async fn update_schedule(
        &self,
        request: Request<UpdateScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        requests::update_schedule(&request)?;
        let write = context.write("UpdateSchedule", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let mut expected = (request.revision != 0).then_some(request.revision);
        let (mut timing, reference) = (None, request.schedule.clone());
        let id = match context.store().schedule_find(context.organization(), &reference).await {
            Ok(schedule) => {
                let id = resolver.resolve(&reference, Ok(schedule.id), ScheduleId::from_uuid)?;
                if request.at.is_some() || request.cron.is_some() || request.time_zone.is_some() {
                    // Missing fields are taken from the schedule as it was read.
                    expected.get_or_insert(schedule.revision);
                    match requests::updated_timing(&request, &schedule.timing, clock::now()) {
                        Ok((read, next)) => {
                            timing = Some((read, Some(next)));
                            id
                        }
                        Err(reason) => resolver.reject(reason, ScheduleId::from_uuid)?,
                    }
                } else {
                    id
                }
            }
            Err(error) => resolver.resolve(&reference, Err(error), ScheduleId::from_uuid)?,
        };
        let missed = convert::to_missed_run_policy(request.missed_runs());
        let (id, content) = if request.blocks.is_empty() {
            (id, None)
        } else {
            let found =
                context.content("blocks", request.blocks, &mut resolver, id, ScheduleId::from_uuid);
            let (id, content) = found.await?;
            (id, Some(content))
        };
        let changes = ScheduleChanges { name: request.name, content, timing, missed };
        let updated = context
            .store()
            .schedule_update(&write, id, expected, changes, render("schedule.updated"))
            .await;
        context.answer(resolver.finish(updated)?, no_wake, convert::schedule).await
    }

    async fn delete_schedule(
        &self,
        request: Request<DeleteScheduleRequest>,
    ) -> Result<Response<DeleteScheduleResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("DeleteSchedule", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let found = context.store().schedule_find(context.organization(), &request.schedule).await;
        let id = resolver.resolve(
            &request.schedule,
            found.map(|schedule| schedule.id),
            ScheduleId::from_uuid,
        )?;
        let render = |schedule: &Schedule| events::deletion_output("schedule.deleted", schedule.id);
        let deleted = context.store().schedule_delete(&write, id, render).await;
        context.answer(resolver.finish(deleted)?, no_wake, |_| DeleteScheduleResponse {}).await
    }

    async fn pause_schedule(
        &self,
        request: Request<PauseScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("PauseSchedule", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let found = context.store().schedule_find(context.organization(), &request.schedule).await;
        let id = resolver.resolve(
            &request.schedule,
            found.map(|schedule| schedule.id),
            ScheduleId::from_uuid,
        )?;
        let paused = context
            .store()
            .schedule_pause(&write, id, true, None, None, render("schedule.updated"))
            .await;
        context.answer(resolver.finish(paused)?, no_wake, convert::schedule).await
    }

    async fn resume_schedule(
        &self,
        request: Request<ResumeScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let write = context.write("ResumeSchedule", &mut request);
        let mut resolver = ReferenceResolver::new(&write);
        let found = context.store().schedule_find(context.organization(), &request.schedule).await;
        let next = found
            .as_ref()
            .ok()
            .and_then(|schedule| schedule.timing.next_after(clock::now()).ok().flatten());
        // Its time may change concurrently.
        let read = found.as_ref().ok().map(|schedule| schedule.revision);
        let id = resolver.resolve(
            &request.schedule,
            found.map(|schedule| schedule.id),
            ScheduleId::from_uuid,
        )?;
        let resumed = context
            .store()
            .schedule_pause(&write, id, false, next, read, render("schedule.updated"))
            .await;
        context.answer(resolver.finish(resumed)?, no_wake, convert::schedule).await
    }

    async fn list_schedule_runs(
        &self,
        request: Request<ListScheduleRunsRequest>,
    ) -> Result<Response<ListScheduleRunsResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let found = context.store().schedule_find(context.organization(), &request.schedule).await;
        let schedule = found.map_err(|error| status::for_reference(&request.schedule, error))?;
        let runs = context
            .store()
            .schedule_runs(context.organization(), schedule.id)
            .await
            .map_err(status::from_store)?;
        Ok(Response::new(ListScheduleRunsResponse {
            runs: runs.iter().map(convert::schedule_run).collect(),
        }))
    }
}
