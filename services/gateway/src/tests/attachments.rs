//! Messages with attached files.

use construct_domain::{
    OrganizationId,
    access::{Role, Scope},
    message::{AttachedFile, Attachment, Block},
};
use construct_proto::v1::{
    self, block, file_service_client::FileServiceClient,
    schedule_service_client::ScheduleServiceClient,
};
use tonic::{Code, Request, transport::Channel};

use super::{
    harness::*,
    walk::{create_key, create_organization, with_key},
};
use crate::validate::tests::fields;

const UNKNOWN: &str = "file_01890a5d-ac96-774b-bcce-b302099a8057";

fn files(gateway: &Gateway) -> FileServiceClient<Channel> {
    FileServiceClient::new(gateway.channel())
}

/// Begins an upload. The file is ready after the last byte.
async fn begin(gateway: &Gateway, name: &str, size: usize) -> String {
    let size = i64::try_from(size).expect("small");
    let spec = v1::FileSpec {
        name: name.into(),
        media_type: "text/csv".into(),
        size,
        sha256: String::new(),
    };
    let request = v1::CreateFileRequest { spec: Some(spec), idempotency_key: String::new() };
    id(files(gateway).create_file(request).await.expect("it is begun").into_inner().metadata)
}

async fn upload(gateway: &Gateway, name: &str, content: &[u8]) -> String {
    let file = begin(gateway, name, content.len()).await;
    let part = v1::UploadPartRequest { file: file.clone(), offset: 0, data: content.into() };
    let uploaded = files(gateway).upload_part(part).await.expect("it is uploaded").into_inner();
    assert_eq!(uploaded.status.expect("set").state(), v1::FileState::Ready);
    file
}

fn attachment(file: &str) -> v1::Attachment {
    v1::Attachment { file: file.into(), ..v1::Attachment::default() }
}

fn blocks(attachment: v1::Attachment) -> Vec<v1::Block> {
    vec![v1::Block { block: Some(block::Block::Attachment(attachment)) }]
}

fn create(task: &str, attachment: v1::Attachment) -> v1::CreateMessageRequest {
    let spec = v1::MessageSpec {
        task: task.into(),
        blocks: blocks(attachment),
        ..v1::MessageSpec::default()
    };
    v1::CreateMessageRequest { spec: Some(spec), idempotency_key: String::new() }
}

fn attachment_of(message: v1::Message) -> v1::Attachment {
    match message.spec.and_then(|spec| spec.blocks.into_iter().next()?.block) {
        Some(block::Block::Attachment(attachment)) => attachment,
        other => panic!("no attachment: {other:?}"),
    }
}

#[tokio::test]
async fn attachment_is_stored_with_the_metadata_of_its_file() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let file = upload(&gateway, "t.csv", b"1;2").await;
    let sha256 = construct_bus::files::Sha256::digest(b"1;2").to_string();
    // Output-only fields of a request are ignored.
    let wrong = v1::Attachment { sha256: "0".repeat(64), size: 7, ..attachment(&file) };
    let sent = gateway
        .messages()
        .create_message(create(&task, wrong))
        .await
        .expect("it is accepted")
        .into_inner();
    let stored = id(sent.metadata.clone()).parse().expect("an id");
    let expected = v1::Attachment {
        media_type: "text/csv".into(),
        name: "t.csv".into(),
        data: Vec::new(),
        file: file.clone(),
        sha256: sha256.clone(),
        size: 3,
    };
    assert_eq!(attachment_of(sent), expected);
    let stored =
        gateway.store().message_get(OrganizationId::LOCAL, stored).await.expect("it is there");
    let attached = AttachedFile { id: file.parse().expect("an id"), sha256, size: 3 };
    let (media_type, name, data) = ("text/csv".into(), "t.csv".into(), String::new());
    let expected = Block::Attachment(Attachment { media_type, name, data, file: Some(attached) });
    assert_eq!(stored.content.blocks, [expected]);
    // Another name is allowed, another media type is not.
    let renamed = v1::Attachment {
        name: "other.csv".into(),
        media_type: "text/csv".into(),
        ..attachment(&file)
    };
    let sent = gateway
        .messages()
        .create_message(create(&task, renamed))
        .await
        .expect("it is accepted")
        .into_inner();
    let waiting = id(sent.metadata.clone());
    assert_eq!(attachment_of(sent).name, "other.csv");
    let other = v1::Attachment { media_type: "image/png".into(), ..attachment(&file) };
    let status = expect_error(
        gateway.messages().create_message(create(&task, other)).await,
        Code::InvalidArgument,
    );
    assert_eq!(fields(&status), ["spec.blocks[0].attachment.media_type"]);

    // The same holds for updates of messages, and for schedules.
    let update = |file: &str| v1::UpdateMessageRequest {
        message: waiting.clone(),
        blocks: blocks(attachment(file)),
        ..v1::UpdateMessageRequest::default()
    };
    let updated =
        gateway.messages().update_message(update(&file)).await.expect("it is changed").into_inner();
    assert_eq!(attachment_of(updated).name, "t.csv");
    let status = expect_error(
        gateway.messages().update_message(update(UNKNOWN)).await,
        Code::InvalidArgument,
    );
    assert_eq!(fields(&status), ["blocks[0].attachment.file"]);
    let edit = v1::EditMessageRequest {
        message: waiting.clone(),
        blocks: blocks(attachment(UNKNOWN)),
        ..v1::EditMessageRequest::default()
    };
    assert_eq!(
        fields(&expect_error(gateway.messages().edit_message(edit).await, Code::InvalidArgument)),
        ["blocks[0].attachment.file"]
    );
    let mut schedules = ScheduleServiceClient::new(gateway.channel());
    let schedule = |file: &str| {
        let spec = v1::ScheduleSpec {
            name: "morning".into(),
            agent: "ada".into(),
            cron: "0 9 * * *".into(),
            blocks: blocks(attachment(file)),
            ..v1::ScheduleSpec::default()
        };
        v1::CreateScheduleRequest { spec: Some(spec), ..v1::CreateScheduleRequest::default() }
    };
    let status =
        expect_error(schedules.create_schedule(schedule(UNKNOWN)).await, Code::InvalidArgument);
    assert_eq!(fields(&status), ["spec.blocks[0].attachment.file"]);
    let made = schedules.create_schedule(schedule(&file)).await.expect("it is made").into_inner();
    let Some(block::Block::Attachment(stored)) = &made.spec.expect("set").blocks[0].block else {
        panic!("no file")
    };
    assert_eq!((stored.name.as_str(), stored.size), ("t.csv", 3));
}

#[tokio::test]
async fn only_ready_files_of_the_organization_can_be_attached() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let file = upload(&gateway, "t.csv", b"1;2").await;
    let half = begin(&gateway, "half.csv", 10).await;
    let mut messages = gateway.messages();
    for file in [UNKNOWN, &half] {
        let status = expect_error(
            messages.create_message(create(&task, attachment(file))).await,
            Code::InvalidArgument,
        );
        assert_eq!(fields(&status), ["spec.blocks[0].attachment.file"], "{file}");
    }
    // Another organization gets the same answer as for an unknown file.
    let others = create_organization(&gateway, "others").await;
    let (_, foreign) = create_key(&gateway, others, Role::Owner, &[Scope::Admin], None).await;
    let answer =
        messages.create_message(with_key(create(&task, attachment(&file)), Some(&foreign))).await;
    let foreign = expect_error(answer, Code::InvalidArgument);
    let unknown = expect_error(
        messages.create_message(create(&task, attachment(UNKNOWN))).await,
        Code::InvalidArgument,
    );
    assert_eq!((foreign.message(), foreign.details()), (unknown.message(), unknown.details()));
    // A key without the scope for files cannot attach any.
    let own = (OrganizationId::LOCAL, construct_domain::UserId::LOCAL);
    for (scopes, code) in [
        (vec![Scope::TasksWrite], Some(Code::PermissionDenied)),
        (vec![Scope::TasksWrite, Scope::FilesRead], None),
    ] {
        let (_, limited) = create_key(&gateway, own, Role::Member, &scopes, None).await;
        let request: Request<_> = with_key(create(&task, attachment(&file)), Some(&limited));
        let answer = messages.create_message(request).await;
        assert_eq!(answer.err().map(|status| status.code()), code, "{scopes:?}");
    }
}

#[tokio::test]
async fn repeated_message_is_answered_after_its_file_is_deleted() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let file = upload(&gateway, "t.csv", b"1;2").await;
    let request = v1::CreateMessageRequest {
        idempotency_key: "once".into(),
        ..create(&task, attachment(&file))
    };
    let mut messages = gateway.messages();
    let first =
        messages.create_message(request.clone()).await.expect("it is accepted").into_inner();
    let delete = v1::DeleteFileRequest { file: file.clone(), idempotency_key: String::new() };
    files(&gateway).delete_file(delete).await.expect("it is deleted");
    let again = messages.create_message(request).await.expect("it was accepted").into_inner();
    assert_eq!(again, first);
    let another = v1::CreateMessageRequest {
        idempotency_key: "twice".into(),
        ..create(&task, attachment(&file))
    };
    let status = expect_error(messages.create_message(another).await, Code::InvalidArgument);
    assert_eq!(fields(&status), ["spec.blocks[0].attachment.file"]);
}
