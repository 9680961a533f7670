//! Decoding the messages of each consumer.

use async_nats::HeaderMap;
use bytes::Bytes;
use construct_domain::TaskId;
use construct_proto::mesh::v1 as mesh;
use uuid::Uuid;

use super::TaskMessage;
use crate::{
    Bus,
    envelope::OpenError,
    subject::{self, Address},
};

/// A message type of a consumer.
pub(super) trait Inbound: Sized + Send + 'static {
    /// Decodes a message and checks it against its subject.
    fn open(
        bus: &Bus,
        subject: &str,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> impl Future<Output = Result<(TaskId, Self), OpenError>> + Send;

    /// The task of the command with this subject, which waits for a result. `None` when the
    /// messages are not commands.
    fn command_task(_subject: &str) -> Option<TaskId> {
        None
    }
}

async fn open_at<A: Address>(
    bus: &Bus,
    address: &A,
    headers: Option<&HeaderMap>,
    payload: Bytes,
) -> Result<A::Message, OpenError> {
    let message = bus.open::<A::Message>(headers, payload).await?;
    address.check(&message).map_err(OpenError::Invalid)?;
    Ok(message)
}

impl Inbound for TaskMessage {
    async fn open(
        bus: &Bus,
        subject: &str,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> Result<(TaskId, Self), OpenError> {
        if let Ok(address) = subject::TaskWake::parse(subject) {
            let wake = open_at(bus, &address, headers, payload).await?;
            return Ok((address.task(), Self::Wake(wake)));
        }
        let address = subject::TaskResult::parse(subject).map_err(OpenError::Invalid)?;
        let result = open_at(bus, &address, headers, payload).await?;
        Ok((address.task(), Self::Result(Box::new(result))))
    }
}

impl Inbound for mesh::ModelInvoke {
    async fn open(
        bus: &Bus,
        subject: &str,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> Result<(TaskId, Self), OpenError> {
        let address = subject::ModelInvoke::parse(subject).map_err(OpenError::Invalid)?;
        Ok((address.task(), open_at(bus, &address, headers, payload).await?))
    }

    fn command_task(subject: &str) -> Option<TaskId> {
        subject::ModelInvoke::parse(subject).ok().map(|address| address.task())
    }
}

impl Inbound for mesh::CodeExecute {
    async fn open(
        bus: &Bus,
        subject: &str,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> Result<(TaskId, Self), OpenError> {
        let address = subject::CodeExecute::parse(subject).map_err(OpenError::Invalid)?;
        Ok((address.task(), open_at(bus, &address, headers, payload).await?))
    }

    fn command_task(subject: &str) -> Option<TaskId> {
        subject::CodeExecute::parse(subject).ok().map(|address| address.task())
    }
}

/// A report need not belong to a task; its payload says what it is about.
impl Inbound for mesh::SpendingReport {
    async fn open(
        bus: &Bus,
        subject: &str,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> Result<(TaskId, Self), OpenError> {
        let address = subject::Spending::parse(subject).map_err(OpenError::Invalid)?;
        let report = open_at(bus, &address, headers, payload).await?;
        Ok((report.task_id.parse().unwrap_or(TaskId::from_uuid(Uuid::nil())), report))
    }
}

/// Slack deliveries belong to no task yet.
impl Inbound for mesh::SlackDelivery {
    async fn open(
        bus: &Bus,
        subject: &str,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> Result<(TaskId, Self), OpenError> {
        let address = subject::SlackDelivery::parse(subject).map_err(OpenError::Invalid)?;
        Ok((TaskId::from_uuid(Uuid::nil()), open_at(bus, &address, headers, payload).await?))
    }
}

/// The row of the scan names its task.
impl Inbound for mesh::ScanRun {
    async fn open(
        bus: &Bus,
        subject: &str,
        headers: Option<&HeaderMap>,
        payload: Bytes,
    ) -> Result<(TaskId, Self), OpenError> {
        let address = subject::ScanRun::parse(subject).map_err(OpenError::Invalid)?;
        Ok((TaskId::from_uuid(Uuid::nil()), open_at(bus, &address, headers, payload).await?))
    }
}
