//! Messages that show files.

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
    walk::{with_key, create_key, create_organization},
};
use crate::validate::tests::fields;

const NOWHERE: &str = "file_01890a5d-ac96-774b-bcce-b302099a8057";

fn files(gateway: &Gateway) -> FileServiceClient<Channel> {
    FileServiceClient::new(gateway.channel())
}

/// Begins an upload; with the last byte it is ready.
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

fn showing(file: &str) -> v1::Attachment {
    v1::Attachment { file: file.into(), ..v1::Attachment::default() }
}

fn blocks(shown: v1::Attachment) -> Vec<v1::Block> {
    vec![v1::Block { block: Some(block::Block::Attachment(shown)) }]
}

fn create(task: &str, shown: v1::Attachment) -> v1::CreateMessageRequest {
    let spec =
        v1::MessageSpec { task: task.into(), blocks: blocks(shown), ..v1::MessageSpec::default() };
    v1::CreateMessageRequest { spec: Some(spec), idempotency_key: String::new() }
}

fn shown(message: v1::Message) -> v1::Attachment {
    match message.spec.and_then(|spec| spec.blocks.into_iter().next()?.block) {
        Some(block::Block::Attachment(shown)) => shown,
        other => panic!("no attachment: {other:?}"),
    }
}

#[tokio::test]
async fn attachment_is_stored_with_the_metadata_of_its_file() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let file = upload(&gateway, "t.csv", b"1;2").await;
    let sha256 = construct_bus::files::Sha256::digest(b"1;2").to_string();
    // What only is read is not believed.
    let lying = v1::Attachment { sha256: "0".repeat(64), size: 7, ..showing(&file) };
    let sent = gateway
        .messages()
        .create_message(create(&task, lying))
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
    assert_eq!(shown(sent), expected);
    let stored =
        gateway.store().message_get(OrganizationId::LOCAL, stored).await.expect("it is there");
    let attached = AttachedFile { id: file.parse().expect("an id"), sha256, size: 3 };
    let (media_type, name, data) = ("text/csv".into(), "t.csv".into(), String::new());
    let expected = Block::Attachment(Attachment { media_type, name, data, file: Some(attached) });
    assert_eq!(stored.content.blocks, [expected]);
    // It may be called otherwise, but is what it is.
    let renamed = v1::Attachment {
        name: "other.csv".into(),
        media_type: "text/csv".into(),
        ..showing(&file)
    };
    let sent = gateway
        .messages()
        .create_message(create(&task, renamed))
        .await
        .expect("it is accepted")
        .into_inner();
    let waiting = id(sent.metadata.clone());
    assert_eq!(shown(sent).name, "other.csv");
    let other = v1::Attachment { media_type: "image/png".into(), ..showing(&file) };
    let refusal = expect_error(
        gateway.messages().create_message(create(&task, other)).await,
        Code::InvalidArgument,
    );
    assert_eq!(fields(&refusal), ["spec.blocks[0].attachment.media_type"]);

    // The same where a message is changed, and where it is sent by the clock.
    let update = |file: &str| v1::UpdateMessageRequest {
        message: waiting.clone(),
        blocks: blocks(showing(file)),
        ..v1::UpdateMessageRequest::default()
    };
    let updated =
        gateway.messages().update_message(update(&file)).await.expect("it is changed").into_inner();
    assert_eq!(shown(updated).name, "t.csv");
    let refusal =
        expect_error(gateway.messages().update_message(update(NOWHERE)).await, Code::InvalidArgument);
    assert_eq!(fields(&refusal), ["blocks[0].attachment.file"]);
    let edit = v1::EditMessageRequest {
        message: waiting.clone(),
        blocks: blocks(showing(NOWHERE)),
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
            blocks: blocks(showing(file)),
            ..v1::ScheduleSpec::default()
        };
        v1::CreateScheduleRequest { spec: Some(spec), ..v1::CreateScheduleRequest::default() }
    };
    let refusal =
        expect_error(schedules.create_schedule(schedule(NOWHERE)).await, Code::InvalidArgument);
    assert_eq!(fields(&refusal), ["spec.blocks[0].attachment.file"]);
    let made = schedules.create_schedule(schedule(&file)).await.expect("it is made").into_inner();
    let Some(block::Block::Attachment(kept)) = &made.spec.expect("set").blocks[0].block else {
        panic!("no file")
    };
    assert_eq!((kept.name.as_str(), kept.size), ("t.csv", 3));
}

#[tokio::test]
async fn only_ready_files_of_the_organization_can_be_attached() {
    let gateway = Gateway::start().await.with_agent().await;
    let task = gateway.task().await;
    let file = upload(&gateway, "t.csv", b"1;2").await;
    let half = begin(&gateway, "half.csv", 10).await;
    let mut messages = gateway.messages();
    for file in [NOWHERE, &half] {
        let refusal = expect_error(
            messages.create_message(create(&task, showing(file))).await,
            Code::InvalidArgument,
        );
        assert_eq!(fields(&refusal), ["spec.blocks[0].attachment.file"], "{file}");
    }
    // To another organization it looks like one that is nowhere.
    let theirs = create_organization(&gateway, "others").await;
    let (_, foreign) = create_key(&gateway, theirs, Role::Owner, &[Scope::Admin], None).await;
    let asked =
        messages.create_message(with_key(create(&task, showing(&file)), Some(&foreign))).await;
    let foreign = expect_error(asked, Code::InvalidArgument);
    let nowhere = expect_error(
        messages.create_message(create(&task, showing(NOWHERE))).await,
        Code::InvalidArgument,
    );
    assert_eq!((foreign.message(), foreign.details()), (nowhere.message(), nowhere.details()));
    // Who may see no files shows none.
    let own = (OrganizationId::LOCAL, construct_domain::UserId::LOCAL);
    for (scopes, code) in [
        (vec![Scope::TasksWrite], Some(Code::PermissionDenied)),
        (vec![Scope::TasksWrite, Scope::FilesRead], None),
    ] {
        let (_, limited) = create_key(&gateway, own, Role::Member, &scopes, None).await;
        let asked: Request<_> = with_key(create(&task, showing(&file)), Some(&limited));
        let answer = messages.create_message(asked).await;
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
        ..create(&task, showing(&file))
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
        ..create(&task, showing(&file))
    };
    let refusal = expect_error(messages.create_message(another).await, Code::InvalidArgument);
    assert_eq!(fields(&refusal), ["spec.blocks[0].attachment.file"]);
}
