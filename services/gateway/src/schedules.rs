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
    api::{Api, Lookup, nobody},
    convert, events,
    page::Column,
    status,
    validate::{optional_id, requests},
};

fn render(kind: &'static str) -> impl FnOnce(&Schedule) -> WriteOutput + Send {
    move |schedule| {
        let schedule = convert::schedule(schedule);
        events::rendered(kind, Payload::Schedule(schedule.clone()), &schedule)
    }
}

#[tonic::async_trait]
impl ScheduleService for Api {
    async fn create_schedule(
        &self,
        request: Request<CreateScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (entry, mut request) = self.enter_unchecked(request)?;
        let now = clock::now();
        let checked = requests::create_schedule(&request, now)?;
        entry.workspace(request.spec.as_ref().map_or("", |spec| &spec.workspace))?;
        let write = entry.write("CreateSchedule", &mut request);
        let spec = request.spec.unwrap_or_default();
        let mut lookup = Lookup::new(&write);
        let target = match checked.task {
            Some(task) => {
                let found = entry
                    .store()
                    .task_get(entry.organization(), task)
                    .await
                    .map(|task| task.state.id);
                ScheduleTarget::Task(lookup.take(&spec.task, found, TaskId::from_uuid)?)
            }
            None => {
                let found = entry.store().agent_resolve(entry.organization(), &spec.agent).await;
                ScheduleTarget::Agent(lookup.take(&spec.agent, found, AgentId::from_uuid)?)
            }
        };
        let nowhere = |id| ScheduleTarget::Task(TaskId::from_uuid(id));
        let (priority, missed) = (spec.priority(), spec.missed_runs());
        let (target, content) =
            entry.content("spec.blocks", spec.blocks, &mut lookup, target, nowhere).await?;
        let new = NewSchedule {
            id: ScheduleId::from_uuid(Uuid::now_v7()),
            name: spec.name.clone(),
            target,
            interrupts: priority == MessagePriority::Interrupt,
            missed: convert::to_missed(missed).unwrap_or_default(),
            content,
            title: spec.title,
            workspace: spec.workspace,
            timing: checked.timing,
            next_run: Some(checked.next),
        };
        let written = entry.store().schedule_create(&write, new, render("schedule.created")).await;
        entry.answer(lookup.settle(written)?, nobody, convert::schedule).await
    }

    async fn get_schedule(
        &self,
        request: Request<GetScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (entry, request) = self.enter(request)?;
        let found = entry.store().schedule_find(entry.organization(), &request.schedule).await;
        let schedule = found.map_err(|error| status::about(&request.schedule, error))?;
        Ok(Response::new(convert::schedule(&schedule)))
    }

    async fn list_schedules(
        &self,
        request: Request<ListSchedulesRequest>,
    ) -> Result<Response<ListSchedulesResponse>, Status> {
        let (entry, request, page) = self.enter_list(request, &Column::NAMED)?;
        let filter = request.filter.unwrap_or_default();
        let filter =
            ScheduleFilter { task: optional_id(&filter.task)?, name_prefix: filter.name_prefix };
        let found = entry.store().schedule_list(entry.organization(), &filter, &page.query()).await;
        let schedules = found.map_err(status::of_store)?;
        let (schedules, info) =
            page.cut(&schedules, convert::schedule, |schedule| schedule.cursor(page.key()));
        Ok(Response::new(ListSchedulesResponse { schedules, page: Some(info) }))
    }

    async fn update_schedule(
        &self,
        request: Request<UpdateScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (entry, mut request) = self.enter_unchecked(request)?;
        requests::update_schedule(&request)?;
        let write = entry.write("UpdateSchedule", &mut request);
        let mut lookup = Lookup::new(&write);
        let mut expected = (request.revision != 0).then_some(request.revision);
        let (mut timing, reference) = (None, request.schedule.clone());
        let id = match entry.store().schedule_find(entry.organization(), &reference).await {
            Ok(schedule) => {
                let id = lookup.take(&reference, Ok(schedule.id), ScheduleId::from_uuid)?;
                if request.at.is_some() || request.cron.is_some() || request.time_zone.is_some() {
                    // What is not said is taken from the schedule as it was read.
                    expected.get_or_insert(schedule.revision);
                    match requests::timing(&request, &schedule.timing, clock::now()) {
                        Ok((read, next)) => {
                            timing = Some((read, Some(next)));
                            id
                        }
                        Err(reason) => lookup.refuse(reason, ScheduleId::from_uuid)?,
                    }
                } else {
                    id
                }
            }
            Err(error) => lookup.take(&reference, Err(error), ScheduleId::from_uuid)?,
        };
        let missed = convert::to_missed(request.missed_runs());
        let (id, content) = if request.blocks.is_empty() {
            (id, None)
        } else {
            let found =
                entry.content("blocks", request.blocks, &mut lookup, id, ScheduleId::from_uuid);
            let (id, content) = found.await?;
            (id, Some(content))
        };
        let changes = ScheduleChanges { name: request.name, content, timing, missed };
        let updated = entry
            .store()
            .schedule_update(&write, id, expected, changes, render("schedule.updated"))
            .await;
        entry.answer(lookup.settle(updated)?, nobody, convert::schedule).await
    }

    async fn delete_schedule(
        &self,
        request: Request<DeleteScheduleRequest>,
    ) -> Result<Response<DeleteScheduleResponse>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let write = entry.write("DeleteSchedule", &mut request);
        let mut lookup = Lookup::new(&write);
        let found = entry.store().schedule_find(entry.organization(), &request.schedule).await;
        let id = lookup.take(
            &request.schedule,
            found.map(|schedule| schedule.id),
            ScheduleId::from_uuid,
        )?;
        let render = |schedule: &Schedule| events::deleted("schedule.deleted", schedule.id);
        let deleted = entry.store().schedule_delete(&write, id, render).await;
        entry.answer(lookup.settle(deleted)?, nobody, |_| DeleteScheduleResponse {}).await
    }

    async fn pause_schedule(
        &self,
        request: Request<PauseScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let write = entry.write("PauseSchedule", &mut request);
        let mut lookup = Lookup::new(&write);
        let found = entry.store().schedule_find(entry.organization(), &request.schedule).await;
        let id = lookup.take(
            &request.schedule,
            found.map(|schedule| schedule.id),
            ScheduleId::from_uuid,
        )?;
        let paused = entry
            .store()
            .schedule_pause(&write, id, true, None, None, render("schedule.updated"))
            .await;
        entry.answer(lookup.settle(paused)?, nobody, convert::schedule).await
    }

    async fn resume_schedule(
        &self,
        request: Request<ResumeScheduleRequest>,
    ) -> Result<Response<v1::Schedule>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let write = entry.write("ResumeSchedule", &mut request);
        let mut lookup = Lookup::new(&write);
        let found = entry.store().schedule_find(entry.organization(), &request.schedule).await;
        let next = found
            .as_ref()
            .ok()
            .and_then(|schedule| schedule.timing.next_after(clock::now()).ok().flatten());
        // Its time may be changed at this moment.
        let read = found.as_ref().ok().map(|schedule| schedule.revision);
        let id = lookup.take(
            &request.schedule,
            found.map(|schedule| schedule.id),
            ScheduleId::from_uuid,
        )?;
        let resumed = entry
            .store()
            .schedule_pause(&write, id, false, next, read, render("schedule.updated"))
            .await;
        entry.answer(lookup.settle(resumed)?, nobody, convert::schedule).await
    }

    async fn list_schedule_runs(
        &self,
        request: Request<ListScheduleRunsRequest>,
    ) -> Result<Response<ListScheduleRunsResponse>, Status> {
        let (entry, request) = self.enter(request)?;
        let found = entry.store().schedule_find(entry.organization(), &request.schedule).await;
        let schedule = found.map_err(|error| status::about(&request.schedule, error))?;
        let runs = entry
            .store()
            .schedule_runs(entry.organization(), schedule.id)
            .await
            .map_err(status::of_store)?;
        Ok(Response::new(ListScheduleRunsResponse {
            runs: runs.iter().map(convert::schedule_run).collect(),
        }))
    }
}
