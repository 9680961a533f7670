//! `RecoveryService`: what was given up, taken up again by hand.

use construct_bus::{Bus, dead};
use construct_proto::v1::{
    self, DeadLetter, DropDeadLetterRequest, DropDeadLetterResponse, GetDeadLetterRequest,
    ListDeadLettersRequest, ListDeadLettersResponse, RedriveDeadLetterRequest,
    RedriveDeadLetterResponse, RetryTaskRequest, event::Payload,
    recovery_service_server::RecoveryService,
};
use construct_store::{StoredTask, WriteOutput};
use tonic::{Request, Response, Status};

use crate::{api::Api, convert, events, quotas::Wanted, status, validate};

/// Letters of a list when the request doesn't say.
const LETTERS: usize = 50;

fn letter(found: dead::Numbered) -> DeadLetter {
    let redrivable = found.check().is_ok();
    let dead::Numbered { number, letter } = found;
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

fn refused(number: u64, error: &dead::Error) -> Status {
    let cause =
        || std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    match error {
        dead::Error::NotFound => Status::not_found(format!("dead letter `{number}` not found")),
        dead::Error::Command | dead::Error::Subject | dead::Error::Headers => {
            Status::failed_precondition(error.to_string())
        }
        dead::Error::Read(_) => Status::data_loss(format!("{error}{}", cause())),
        dead::Error::Server(_) => status::unavailable(error.to_string()),
        dead::Error::Publish(source) if source.is_retryable() => {
            status::unavailable(format!("{error}{}", cause()))
        }
        dead::Error::Publish(_) => Status::failed_precondition(format!("{error}{}", cause())),
    }
}

fn render(task: &StoredTask) -> WriteOutput {
    let task = convert::task(task);
    events::rendered("task.updated", Payload::Task(Box::new(task.clone())), &task)
}

#[tonic::async_trait]
impl RecoveryService for Api {
    async fn list_dead_letters(
        &self,
        request: Request<ListDeadLettersRequest>,
    ) -> Result<Response<ListDeadLettersResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let limit = match request.limit.unsigned_abs() {
            0 => LETTERS,
            limit => limit as usize,
        };
        let bus: &Bus = context.backend.publisher.bus();
        let letters =
            bus.dead_letters(request.after, limit).await.map_err(|error| refused(0, &error))?;
        Ok(Response::new(ListDeadLettersResponse {
            letters: letters.into_iter().map(letter).collect(),
        }))
    }

    async fn get_dead_letter(
        &self,
        request: Request<GetDeadLetterRequest>,
    ) -> Result<Response<DeadLetter>, Status> {
        let (context, request) = self.begin_request(request)?;
        let found = context.backend.publisher.bus().dead_letter(request.letter).await;
        found
            .map(|found| Response::new(letter(found)))
            .map_err(|error| refused(request.letter, &error))
    }

    async fn redrive_dead_letter(
        &self,
        request: Request<RedriveDeadLetterRequest>,
    ) -> Result<Response<RedriveDeadLetterResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let done = context.backend.publisher.bus().redrive(request.letter).await;
        done.map_err(|error| refused(request.letter, &error))?;
        tracing::info!(
            letter = request.letter,
            by = context.name(),
            "a dead letter was published again"
        );
        Ok(Response::new(RedriveDeadLetterResponse {}))
    }

    async fn drop_dead_letter(
        &self,
        request: Request<DropDeadLetterRequest>,
    ) -> Result<Response<DropDeadLetterResponse>, Status> {
        let (context, request) = self.begin_request(request)?;
        let done = context.backend.publisher.bus().drop_dead(request.letter).await;
        done.map_err(|error| refused(request.letter, &error))?;
        tracing::info!(letter = request.letter, by = context.name(), "a dead letter was removed");
        Ok(Response::new(DropDeadLetterResponse {}))
    }

    async fn retry_task(
        &self,
        request: Request<RetryTaskRequest>,
    ) -> Result<Response<v1::Task>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let task = validate::id(&request.task)?;
        let write = context.write("RetryTask", &mut request);
        self.allow(&context, Some(&write), Wanted::WORK).await?;
        let retried = context.store().task_retry(&write, task, render).await;
        let retried = retried.map_err(|error| status::about(&request.task, error))?;
        let wake = |task: &StoredTask| Some((task.state.id, "retried"));
        context.answer(retried, wake, convert::task).await
    }
}
