//! Records: events that are stored with the change they describe.
//!
//! The stored payload is an encoded `construct.v1.Event` with its payload only. All other fields
//! are columns of the row and are filled in on reading.

use construct_domain::id::event_id;
use construct_proto::v1::{Event, event::Payload};
use construct_store::{NewEvent, StoredEvent};
use prost::{DecodeError, Message as _};

use crate::convert;

/// An event of a type for storing. `step` is the number of the step that it ends.
pub fn new(kind: &str, payload: Payload, step: Option<u64>) -> NewEvent {
    let payload = Event { payload: Some(payload), ..Event::default() }.encode_to_vec();
    NewEvent { kind: kind.to_owned(), payload, step }
}

/// A stored event for clients, without its cursor, which depends on the subscriber.
///
/// # Errors
/// When [`new`] did not encode the payload.
pub fn read(stored: &StoredEvent) -> Result<Event, DecodeError> {
    let task = (stored.stream != stored.organization.uuid())
        .then(|| construct_domain::TaskId::from_uuid(stored.stream).to_string());
    Ok(Event {
        id: event_id(stored.stream, stored.sequence),
        sequence: stored.sequence,
        r#type: stored.kind.clone(),
        time: Some(convert::time(stored.created_at)),
        organization_id: stored.organization.to_string(),
        task_id: task.unwrap_or_default(),
        step: stored.step.unwrap_or_default(),
        ..Event::decode(stored.payload.as_slice())?
    })
}

#[cfg(test)]
mod tests {
    use construct_domain::{OrganizationId, TaskId};
    use construct_proto::v1::Deleted;
    use jiff::Timestamp;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn stored_event_reads_back_completely() {
        let task = TaskId::from_uuid(Uuid::from_u128(5));
        let deleted = Payload::Deleted(Deleted { id: "msg_1".into() });
        let NewEvent { kind, payload, step } = new("message.deleted", deleted.clone(), Some(3));
        let stored = StoredEvent {
            organization: OrganizationId::LOCAL,
            stream: task.uuid(),
            sequence: 7,
            kind,
            payload,
            step,
            created_at: Timestamp::UNIX_EPOCH,
        };
        let event = read(&stored).expect("it was encoded by us");
        assert_eq!((event.sequence, event.step, event.r#type.as_str()), (7, 3, "message.deleted"));
        assert_eq!(event.task_id, task.to_string());
        assert_eq!(event.payload, Some(deleted));
        // The event has the same id for every reader.
        assert_eq!(event.id, event_id(task.uuid(), 7));
        let own = StoredEvent { stream: OrganizationId::LOCAL.uuid(), ..stored };
        assert_eq!(read(&own).expect("it was encoded by us").task_id, "");
    }
}
