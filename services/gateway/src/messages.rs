//! `MessageService`.

use construct_domain::{MessageId, TaskId};
use construct_proto::v1::{
    self, CreateMessageRequest, DeleteMessageRequest, DeleteMessageResponse, EditMessageRequest,
    GetMessageRequest, ListMessagesRequest, ListMessagesResponse, MessagePriority,
    UpdateMessageRequest, event::Payload, message_service_server::MessageService,
};
use construct_store::{
    Error, MessageCursor, MessageFilter, NewUserMessage, StoredMessage, WriteOutput,
};
use tonic::{Request, Response, Status};
use uuid::Uuid;

use crate::{
    api::{Api, Lookup},
    convert, events,
    page::{Column, Page},
    quotas::Wanted,
    status,
    validate::{self, requests},
};

fn render(kind: &'static str) -> impl FnOnce(&StoredMessage) -> WriteOutput + Send {
    move |message| {
        let message = convert::message(message);
        events::rendered(kind, Payload::Message(message.clone()), &message)
    }
}

fn wake(reason: &'static str) -> impl FnOnce(&StoredMessage) -> Option<(TaskId, &'static str)> {
    move |message| Some((message.task, reason))
}

#[tonic::async_trait]
impl MessageService for Api {
    async fn create_message(
        &self,
        request: Request<CreateMessageRequest>,
    ) -> Result<Response<v1::Message>, Status> {
        let (entry, mut request) = self.enter_unchecked(request)?;
        let task = requests::create_message(&request)?;
        entry.sees(task)?;
        let write = entry.write("CreateMessage", &mut request);
        self.allow(&entry, Some(&write), Wanted::WORK).await?;
        let spec = request.spec.unwrap_or_default();
        let id = MessageId::from_uuid(Uuid::now_v7());
        let interrupts = spec.priority() == MessagePriority::Interrupt;
        let mut lookup = Lookup::new(&write);
        let task = lookup.take(&spec.task, Ok(task), TaskId::from_uuid)?;
        let found = entry.content("spec.blocks", spec.blocks, &mut lookup, task, TaskId::from_uuid);
        let (task, content) = found.await?;
        let new = NewUserMessage { id, task, content, interrupts };
        let created = entry.store().message_create(&write, new, render("message.created")).await;
        let created = lookup.settle(created)?;
        entry.answer(created, wake("message"), convert::message).await
    }

    async fn get_message(
        &self,
        request: Request<GetMessageRequest>,
    ) -> Result<Response<v1::Message>, Status> {
        let (entry, request) = self.enter(request)?;
        let id = validate::id(&request.message)?;
        let found = entry.store().message_get(entry.organization(), id).await;
        let hidden = |message: &StoredMessage| !entry.caller().may_see(message.task);
        let message = match found {
            Ok(message) if hidden(&message) => Err(Error::NotFound { what: "message" }),
            found => found,
        };
        let message = message.map_err(|error| status::about(&request.message, error))?;
        Ok(Response::new(convert::message(&message)))
    }

    async fn list_messages(
        &self,
        request: Request<ListMessagesRequest>,
    ) -> Result<Response<ListMessagesResponse>, Status> {
        let (entry, request) = self.enter_unchecked(request)?;
        let page: Page<MessageCursor> =
            requests::list(entry.organization(), &request, &[Column::Position])?;
        let task = validate::id(&request.task)?;
        entry.sees(task)?;
        let asked = request.filter.unwrap_or_default();
        let source = convert::to_source(asked.source());
        let (after_position, superseded) = (asked.after_position, asked.include_superseded);
        let filter = MessageFilter { source, after_position, superseded };
        // A page is read whole, and cut to what an answer may have.
        let _room = self.room(entry.organization()).await?;
        let found =
            entry.store().message_list(entry.organization(), task, &filter, &page.query()).await;
        let messages = found.map_err(|error| status::about(&request.task, error))?;
        let (messages, info) = page.cut(&messages, convert::message, StoredMessage::cursor);
        Ok(Response::new(ListMessagesResponse { messages, page: Some(info) }))
    }

    async fn update_message(
        &self,
        request: Request<UpdateMessageRequest>,
    ) -> Result<Response<v1::Message>, Status> {
        let (entry, mut request) = self.enter_unchecked(request)?;
        let message = requests::update_message(&request)?;
        let write = entry.write("UpdateMessage", &mut request);
        let expected = (request.revision != 0).then_some(request.revision);
        let mut lookup = Lookup::new(&write);
        let message = lookup.take(&request.message, Ok(message), MessageId::from_uuid)?;
        let found =
            entry.content("blocks", request.blocks, &mut lookup, message, MessageId::from_uuid);
        let (message, content) = found.await?;
        let updated = entry
            .store()
            .message_update(&write, message, expected, content, render("message.updated"))
            .await;
        let updated = lookup.settle(updated)?;
        entry.answer(updated, wake("message changed"), convert::message).await
    }

    async fn delete_message(
        &self,
        request: Request<DeleteMessageRequest>,
    ) -> Result<Response<DeleteMessageResponse>, Status> {
        let (entry, mut request) = self.enter(request)?;
        let message = validate::id(&request.message)?;
        let write = entry.write("DeleteMessage", &mut request);
        let render = |message: &StoredMessage| events::deleted("message.deleted", message.id);
        let deleted = entry.store().message_delete(&write, message, render).await;
        let deleted = deleted.map_err(|error| status::about(&request.message, error))?;
        entry.answer(deleted, wake("message taken back"), |_| DeleteMessageResponse {}).await
    }

    async fn edit_message(
        &self,
        request: Request<EditMessageRequest>,
    ) -> Result<Response<v1::Message>, Status> {
        let (entry, mut request) = self.enter_unchecked(request)?;
        let message = requests::edit_message(&request)?;
        let write = entry.write("EditMessage", &mut request);
        self.allow(&entry, Some(&write), Wanted::WORK).await?;
        let new = MessageId::from_uuid(Uuid::now_v7());
        let mut lookup = Lookup::new(&write);
        let message = lookup.take(&request.message, Ok(message), MessageId::from_uuid)?;
        let found =
            entry.content("blocks", request.blocks, &mut lookup, message, MessageId::from_uuid);
        let (message, content) = found.await?;
        let edited = entry
            .store()
            .message_edit(&write, message, new, content, render("message.created"))
            .await;
        let edited = lookup.settle(edited)?;
        entry.answer(edited, wake("message sent anew"), convert::message).await
    }
}
