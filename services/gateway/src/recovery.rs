//! `RecoveryService`: dead letters and quarantined tasks, recovered by hand.

use construct_bus::{Bus, dead_letter};
use construct_proto::v1::{
    self, DeadLetter, DropDeadLetterRequest, DropDeadLetterResponse, GetDeadLetterRequest,
    ListDeadLettersRequest, ListDeadLettersResponse, RedriveDeadLetterRequest,
    RedriveDeadLetterResponse, RetryTaskRequest, event::Payload,
    recovery_service_server::RecoveryService,
};
use construct_store::{StoredTask, WriteOutput};
use tonic::{Request, Response, Status};

use crate::{api::Api, convert, events, quotas::QuotaRequest, status, validate};

/// Default number of letters of a page.
const DEFAULT_PAGE_SIZE: usize = 50;

fn to_proto(found: dead_letter::StoredLetter) -> DeadLetter {
    let redrivable = found.check().is_ok();
    let dead_letter::StoredLetter { number, letter } = found;
    DeadLetter {
        id: number,
        stream: letter.stream,
        subject: letter.subject,
        message_type: letter.message_type,
        reason: letter.reason,
        time: letter.time,
        deliveries: letter.deliveries,
        payload_size: letter.payload.len() as u64,
        redrivable,
    }
}

fn to_status(number: u64, error: &dead_letter::Error) -> Status {
    let cause =
        || std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    match error {
        dead_letter::Error::NotFound => {
            Status::not_found(format!("dead letter `{number}` not found"))
        }
        dead_letter::Error::Command | dead_letter::Error::Subject | dead_letter::Error::Headers => {
            Status::failed_precondition(error.to_string())
        }
        dead_letter::Error::Read(_) => Status::data_loss(format!("{error}{}", cause())),
        dead_letter::Error::Server(_) => status::unavailable(error.to_string()),
        dead_letter::Error::Publish(source) if source.is_retryable() => {
            status::unavailable(format!("{error}{}", cause()))
        }
        dead_letter::Error::Publish(_) => {
            Status::failed_precondition(format!("{error}{}", cause()))
        }
    }
}

fn render(task: &StoredTask) -> WriteOutput {
    let task = convert::task(task);
    events::write_output("task.updated", Payload::Task(Box::new(task.clone())), &task)
}

#[tonic::async_trait]
impl RecoveryService for Api {
    async fn list_dead_letters(
        &self,
        request: Request<ListDeadLettersRequest>,
    ) -> Result<Response<ListDeadLettersResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let limit = match request.limit.unsigned_abs() {
            0 => DEFAULT_PAGE_SIZE,
            limit => limit as usize,
        };
        let bus: &Bus = context.backend.publisher.bus();
        let letters =
            bus.dead_letters(request.after, limit).await.map_err(|error| to_status(0, &error))?;
        Ok(Response::new(ListDeadLettersResponse {
            letters: letters.into_iter().map(to_proto).collect(),
        }))
    }

    async fn get_dead_letter(
        &self,
        request: Request<GetDeadLetterRequest>,
    ) -> Result<Response<DeadLetter>, Status> {
        let (context, request) = self.begin_request(request)?;
        let found = context.backend.publisher.bus().find_dead_letter(request.letter).await;
        found
            .map(|found| Response::new(to_proto(found)))
            .map_err(|error| to_status(request.letter, &error))
    }

    async fn redrive_dead_letter(
        &self,
        request: Request<RedriveDeadLetterRequest>,
    ) -> Result<Response<RedriveDeadLetterResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let done = context.backend.publisher.bus().redrive(request.letter).await;
        done.map_err(|error| to_status(request.letter, &error))?;
        tracing::info!(letter = request.letter, by = context.name(), "dead letter redriven");
        Ok(Response::new(RedriveDeadLetterResponse {}))
    }

    async fn drop_dead_letter(
        &self,
        request: Request<DropDeadLetterRequest>,
    ) -> Result<Response<DropDeadLetterResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let done = context.backend.publisher.bus().remove_dead_letter(request.letter).await;
        done.map_err(|error| to_status(request.letter, &error))?;
        tracing::info!(letter = request.letter, by = context.name(), "dead letter removed");
        Ok(Response::new(DropDeadLetterResponse {}))
    }

    async fn retry_task(
        &self,
        request: Request<RetryTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let task = validate::id(&request.task)?;
        let write = context.write("RetryTask", &mut request);
        self.check_quotas(&context, Some(&write), QuotaRequest::WORK).await?;
        let retried = context.store().task_retry(&write, task, render).await;
        let retried = retried.map_err(|error| status::for_reference(&request.task, error))?;
        let wake = |task: &StoredTask| Some((task.state.id, "retried"));
        context.answer(retried, wake, convert::task).await
    }
}
