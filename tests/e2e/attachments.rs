//! Files in messages through the whole mesh: shown to the model in the vendor's form, saved by
//! scripts, and named when they are not shown.

use construct_bus::files::{Sha256, Store};
use construct_domain::OrganizationId;
use construct_proto::v1::{
    self, FileState, TurnOutcome, block::Block, file_service_client::FileServiceClient,
};
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT},
    mesh::Mesh,
    vendor::{VendorServer, anthropic},
    wait::until,
};
use serde_json::{Value, json};
use tonic::transport::Channel;

/// An image of one pixel.
const PNG: &[u8] = &[
    0x89, b'P', b'N', b'G', 0x0D, 0x0A, 0x1A, 0x0A, 0, 0, 0, 13, b'I', b'H', b'D', b'R', 0, 0, 0,
    1, 0, 0, 0, 1, 8, 6, 0, 0, 0, 0x1F, 0x15, 0xC4, 0x89, 0, 0, 0, 13, b'I', b'D', b'A', b'T',
    0x78, 0xDA, 0x63, 0x64, 0xF8, 0xCF, 0x50, 0x0F, 0, 3, 0x86, 1, 0x80, 0x5A, 0x34, 0x7D, 0x6B, 0,
    0, 0, 0, b'I', b'E', b'N', b'D', 0xAE, 0x42, 0x60, 0x82,
];
const PNG_BASE64: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";

/// The size of one part in bytes.
const PART_SIZE: usize = 1 << 20;

fn files(mesh: &Mesh) -> FileServiceClient<Channel> {
    FileServiceClient::new(mesh.channel().unwrap())
}

async fn upload(mesh: &Mesh, name: &str, media_type: &str, content: &[u8]) -> String {
    let size = i64::try_from(content.len()).unwrap();
    let spec = v1::FileSpec {
        name: name.into(),
        media_type: media_type.into(),
        size,
        sha256: String::new(),
    };
    let request = v1::CreateFileRequest { spec: Some(spec), idempotency_key: String::new() };
    let mut file = files(mesh).create_file(request).await.unwrap().into_inner();
    let id = file.metadata.as_ref().unwrap().id.clone();
    for (number, part) in (0..).zip(content.chunks(PART_SIZE)) {
        let offset = i64::try_from(PART_SIZE).unwrap() * number;
        let request = v1::UploadPartRequest { file: id.clone(), offset, data: part.into() };
        file = files(mesh).upload_part(request).await.unwrap().into_inner();
    }
    let status = file.status.unwrap();
    assert_eq!(status.state(), FileState::Ready, "{status:?}");
    id
}

async fn begin(mesh: &Mesh, name: &str, vendor: &VendorServer) -> Conversation {
    let provider = v1::ModelProviderSpec {
        name: name.into(),
        r#type: v1::ModelProviderType::Anthropic.into(),
        base_url: vendor.url(),
        api_key: "key".into(),
        ..v1::ModelProviderSpec::default()
    };
    mesh.agent(name, provider).await.unwrap();
    // With a title, no model call is made for one.
    let spec =
        v1::TaskSpec { agent: name.into(), title: "A job".into(), ..v1::TaskSpec::default() };
    mesh.client().unwrap().create_task_with(spec).await.unwrap()
}

/// Sends a text with files and waits for the answer.
async fn send_with_files(conversation: &Conversation, text: &str, files: &[&str]) {
    let words = Block::Text(v1::Text { text: text.into() });
    let shown = files.iter().map(|file| {
        Block::Attachment(v1::Attachment { file: (*file).into(), ..Default::default() })
    });
    let blocks =
        std::iter::once(words).chain(shown).map(|block| v1::Block { block: Some(block) }).collect();
    let spec =
        v1::MessageSpec { task: conversation.id().into(), blocks, ..v1::MessageSpec::default() };
    let request =
        v1::CreateMessageRequest { spec: Some(spec), ..v1::CreateMessageRequest::default() };
    conversation.client().messages().create_message(request).await.unwrap();
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{status:?}");
}

/// The content of a user message in a vendor's request.
fn content(request: &Value, message: usize) -> &Vec<Value> {
    request["messages"][message]["content"].as_array().unwrap()
}

fn text_of(block: &Value) -> &str {
    block["text"].as_str().unwrap_or_else(|| panic!("no words: {block}"))
}

#[tokio::test]
async fn files_are_shown_saved_and_named_across_the_mesh() {
    let mesh = Mesh::start().await.unwrap();
    tokio::join!(image_and_table(&mesh), files_beyond_one_call(&mesh));
}

/// The image is shown; the table is too large for that, and a script reads it. Then the image is
/// deleted.
async fn image_and_table(mesh: &Mesh) {
    let vendor = VendorServer::start().await;
    let conversation = begin(mesh, "reader", &vendor).await;
    let table: String = (1..=50_000_u64).map(|n| format!("{n};{}\n", n * n)).collect();
    let picture = upload(mesh, "dot.png", "image/png", PNG).await;
    let squares = upload(mesh, "squares.csv", "text/csv", table.as_bytes()).await;
    let script = format!(
        "const saved = save_file({squares:?}, 'squares.csv');
         [saved.bytes, read_file('squares.csv', 49999).trim().split('\\n').join(' ')].join(' ')"
    );
    vendor
        .reply(anthropic::Answer::text("I look.").and_code("toolu_1", &script).reply())
        .reply(anthropic::Answer::text("A dot and squares.").reply())
        .reply(anthropic::Answer::text("It is gone.").reply());
    send_with_files(&conversation, "What are these?", &[&picture, &squares]).await;
    let delete = v1::DeleteFileRequest { file: picture.clone(), idempotency_key: String::new() };
    files(mesh).delete_file(delete).await.unwrap();
    let store = Store::open(mesh.home().join("data/blobs")).unwrap();
    until("the image to be deleted", TURN_TIMEOUT, async || {
        match store.head(OrganizationId::LOCAL, &Sha256::digest(PNG)).await {
            Ok(None) => Ok(()),
            there => Err(there),
        }
    })
    .await;
    send_with_files(&conversation, "And now?", &[]).await;

    let requests = vendor.requests();
    assert_eq!(requests.len(), 3);
    for request in &requests[..2] {
        let [asked, about_picture, shown, about_table] = &content(&request.body, 0)[..] else {
            panic!("{}", request.body["messages"][0])
        };
        assert_eq!(text_of(asked), "What are these?");
        assert!(
            text_of(about_picture)
                .contains(&format!("dot.png (image/png, {} bytes, sha256:", PNG.len()))
        );
        let source = json!({"type": "base64", "media_type": "image/png", "data": PNG_BASE64});
        assert_eq!((&shown["type"], &shown["source"]), (&json!("image"), &source));
        let told = text_of(about_table);
        assert!(
            told.contains("squares.csv") && told.contains("It is too large to be shown."),
            "{told}"
        );
        assert!(told.contains(&format!("save_file({squares:?}, \"squares.csv\")")), "{told}");
    }
    let result = content(&requests[1].body, 2)[0]["content"].as_str().unwrap();
    assert_eq!(result, format!("{} 49999;2499900001 50000;2500000000", table.len()));
    let told = text_of(&content(&requests[2].body, 0)[1]);
    assert!(told.contains("dot.png") && told.contains("It was deleted after that."), "{told}");
    assert!(!requests[2].body.to_string().contains(PNG_BASE64));
}

/// Three documents, of which two fit: the oldest is named.
async fn files_beyond_one_call(mesh: &Mesh) {
    let vendor = VendorServer::start().await;
    let conversation = begin(mesh, "archivist", &vendor).await;
    let mut documents = Vec::new();
    for n in 0..3_u8 {
        let mut document = b"%PDF-1.4\n".to_vec();
        document.resize(8 << 20, b'0' + n);
        documents.push(upload(mesh, &format!("{n}.pdf"), "application/pdf", &document).await);
    }
    for (n, document) in documents.iter().enumerate() {
        vendor.reply(anthropic::Answer::text(&format!("Number {n}.")).reply());
        send_with_files(&conversation, &format!("This is number {n}."), &[document]).await;
    }
    let requests = vendor.requests();
    let last = &requests[2].body;
    assert!(
        text_of(&content(last, 0)[1]).contains("Newer files have taken the room that there is."),
        "{:?}",
        content(last, 0)
    );
    assert_eq!(content(last, 0).len(), 2);
    for message in [2, 4] {
        let shown = &content(last, message)[2];
        assert_eq!(
            (&shown["type"], shown["source"]["data"].as_str().unwrap().len()),
            (&json!("document"), 11_184_812)
        );
    }
    // It was shown while there was space.
    assert_eq!(content(&requests[1].body, 0)[2]["type"], "document");
}
