//! Records: the events that are stored with the change they tell of.
//!
//! The stored payload is an encoded `construct.v1.Event` of which only the payload is set; everything else stands in
//! the row's own columns and is filled in when it is read.

use construct_domain::id::event_id;
use construct_proto::v1::{Deleted, Event, event::Payload};
use construct_store::{NewEvent, Rendered, StoredEvent};
use prost::{DecodeError, Message};

use crate::convert;

/// What a write tells others, and what it answers.
pub(crate) fn rendered(kind: &str, payload: Payload, response: &impl Message) -> Rendered {
    let payload = Event { payload: Some(payload), ..Event::default() }.encode_to_vec();
    let event = NewEvent { kind: kind.to_owned(), payload, step: None };
    Rendered { event, response: response.encode_to_vec() }
}

/// What a deletion tells others; its answer is empty.
pub(crate) fn deleted(kind: &str, id: impl ToString) -> Rendered {
    rendered(kind, Payload::Deleted(Deleted { id: id.to_string() }), &())
}

/// A stored event as clients see it, but for its cursor, which depends on who reads.
pub(crate) fn read(stored: &StoredEvent) -> Result<Event, DecodeError> {
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
    use jiff::Timestamp;
    use uuid::Uuid;

    use super::*;

    #[test]
    fn a_stored_event_reads_back_whole() {
        let task = TaskId::from_uuid(Uuid::from_u128(5));
        let NewEvent { kind, payload, .. } = deleted("message.deleted", "msg_1").event;
        let stored = StoredEvent {
            organization: OrganizationId::LOCAL,
            stream: task.uuid(),
            sequence: 7,
            kind,
            payload,
            step: Some(3),
            created_at: Timestamp::UNIX_EPOCH,
        };
        let event = read(&stored).expect("it was encoded by us");
        assert_eq!((event.sequence, event.step, event.r#type.as_str()), (7, 3, "message.deleted"));
        assert_eq!(event.task_id, task.to_string());
        assert_eq!(event.payload, Some(Payload::Deleted(Deleted { id: "msg_1".into() })));
        // Whoever reads the event, it has the same id.
        assert_eq!(event.id, event_id(task.uuid(), 7));
        let own = StoredEvent { stream: OrganizationId::LOCAL.uuid(), ..stored };
        assert_eq!(read(&own).expect("it was encoded by us").task_id, "");
    }
}
