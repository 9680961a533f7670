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
    api::{Api, ReferenceResolver},
    convert, events,
    page::{Column, Page},
    quotas::QuotaRequest,
    status,
    validate::{self, requests},
};

fn render(kind: &'static str) -> impl FnOnce(&StoredMessage) -> WriteOutput + Send {
    move |message| {
        let message = convert::message(message);
        events::write_output(kind, Payload::Message(message.clone()), &message)
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
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let task = requests::create_message(&request)?;
        context.check_task_access(task)?;
        let write = context.write("CreateMessage", &mut request);
        self.check_quotas(&context, Some(&write), QuotaRequest::WORK).await?;
        let spec = request.spec.unwrap_or_default();
        let id = MessageId::from_uuid(Uuid::now_v7());
        let interrupts = spec.priority() == MessagePriority::Interrupt;
        let mut resolver = ReferenceResolver::new(&write);
        let task = resolver.resolve(&spec.task, Ok(task), TaskId::from_uuid)?;
        let found =
            context.content("spec.blocks", spec.blocks, &mut resolver, task, TaskId::from_uuid);
        let (task, content) = found.await?;
        let new = NewUserMessage { id, task, content, interrupts };
        let created = context.store().message_create(&write, new, render("message.created")).await;
        let created = resolver.finish(created)?;
        context.answer(created, wake("message"), convert::message).await
    }

    async fn get_message(
        &self,
        request: Request<GetMessageRequest>,
    ) -> Result<Response<v1::Message>, Status> {
        let (context, request) = self.begin_request(request)?;
        let id = validate::id(&request.message)?;
        let found = context.store().message_get(context.organization(), id).await;
        let hidden = |message: &StoredMessage| !context.caller().may_see(message.task);
        let message = match found {
            Ok(message) if hidden(&message) => Err(Error::NotFound { what: "message" }),
            found => found,
        };
        let message = message.map_err(|error| status::for_reference(&request.message, error))?;
        Ok(Response::new(convert::message(&message)))
    }

    async fn list_messages(
        &self,
        request: Request<ListMessagesRequest>,
    ) -> Result<Response<ListMessagesResponse>, Status> {
        let (context, request) = self.begin_unchecked_request(request)?;
        let page: Page<MessageCursor> =
            requests::list(context.organization(), &request, &[Column::Position])?;
        let task = validate::id(&request.task)?;
        context.check_task_access(task)?;
        let asked = request.filter.unwrap_or_default();
        let source = convert::to_source(asked.source());
        let (after_position, superseded) = (asked.after_position, asked.include_superseded);
        let filter = MessageFilter { source, after_position, superseded };
        // A page is read completely, and cut to the size of a response.
        let _memory = self.acquire_read_memory(context.organization()).await?;
        let found = context
            .store()
            .message_list(context.organization(), task, &filter, &page.query())
            .await;
        let messages = found.map_err(|error| status::for_reference(&request.task, error))?;
        let (messages, info) = page.cut(&messages, convert::message, StoredMessage::cursor);
        Ok(Response::new(ListMessagesResponse { messages, page: Some(info) }))
    }

    async fn update_message(
        &self,
        request: Request<UpdateMessageRequest>,
    ) -> Result<Response<v1::Message>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let message = requests::update_message(&request)?;
        let write = context.write("UpdateMessage", &mut request);
        let expected = (request.revision != 0).then_some(request.revision);
        let mut resolver = ReferenceResolver::new(&write);
        let message = resolver.resolve(&request.message, Ok(message), MessageId::from_uuid)?;
        let found =
            context.content("blocks", request.blocks, &mut resolver, message, MessageId::from_uuid);
        let (message, content) = found.await?;
        let updated = context
            .store()
            .message_update(&write, message, expected, content, render("message.updated"))
            .await;
        let updated = resolver.finish(updated)?;
        context.answer(updated, wake("message changed"), convert::message).await
    }

    async fn delete_message(
        &self,
        request: Request<DeleteMessageRequest>,
    ) -> Result<Response<DeleteMessageResponse>, Status> {
        let (context, mut request) = self.begin_request(request)?;
        let message = validate::id(&request.message)?;
        let write = context.write("DeleteMessage", &mut request);
        let render =
            |message: &StoredMessage| events::deletion_output("message.deleted", message.id);
        let deleted = context.store().message_delete(&write, message, render).await;
        let deleted = deleted.map_err(|error| status::for_reference(&request.message, error))?;
        context.answer(deleted, wake("message deleted"), |_| DeleteMessageResponse {}).await
    }

    async fn edit_message(
        &self,
        request: Request<EditMessageRequest>,
    ) -> Result<Response<v1::Message>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let message = requests::edit_message(&request)?;
        let write = context.write("EditMessage", &mut request);
        self.check_quotas(&context, Some(&write), QuotaRequest::WORK).await?;
        let new = MessageId::from_uuid(Uuid::now_v7());
        let mut resolver = ReferenceResolver::new(&write);
        let message = resolver.resolve(&request.message, Ok(message), MessageId::from_uuid)?;
        let found =
            context.content("blocks", request.blocks, &mut resolver, message, MessageId::from_uuid);
        let (message, content) = found.await?;
        let edited = context
            .store()
            .message_edit(&write, message, new, content, render("message.created"))
            .await;
        let edited = resolver.finish(edited)?;
        context.answer(edited, wake("message edited"), convert::message).await
    }
}
