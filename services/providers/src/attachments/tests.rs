//! Which content of files reaches a call, with a real folder of files.

use construct_proto::{mesh::v1::FailureClass, v1::MessageSource};
use futures::FutureExt as _;
use tempfile::TempDir;
use uuid::Uuid;

use super::*;

const ORG: OrganizationId = OrganizationId::LOCAL;
/// The bytes that calls may show at once in these tests.
const MAX_BYTES: u64 = 64 << 20;

struct Fixture {
    folder: TempDir,
    attached: Attachments,
}

impl Fixture {
    fn new(room: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let attached = Attachments::open(folder.path(), room).expect("opened");
        Self { folder, attached }
    }

    /// Uploads a file of an organization.
    async fn upload(
        &self,
        organization: OrganizationId,
        media_type: &str,
        name: &str,
        content: &[u8],
    ) -> Attachment {
        let (store, id) =
            (&self.attached.files, construct_domain::FileId::from_uuid(Uuid::now_v7()));
        let part =
            store.put_part(organization, id, Bytes::copy_from_slice(content)).await.expect("put");
        let whole = store.assemble(organization, id, &[part]).await.expect("assembled");
        let stored = store.place(organization, whole).await.expect("placed");
        Attachment {
            media_type: media_type.into(),
            name: name.into(),
            file: id.to_string(),
            sha256: stored.sha256.to_string(),
            size: i64::try_from(stored.size).expect("small"),
            ..Attachment::default()
        }
    }

    async fn show(&self, messages: Vec<Vec<Block>>) -> Vec<Vec<Block>> {
        let shown = self
            .attached
            .resolve(&ORG.to_string(), user_messages(messages), true)
            .await
            .expect("shown");
        shown
            .0
            .into_iter()
            .map(|message| message.blocks.into_iter().filter_map(|block| block.block).collect())
            .collect()
    }
}

fn user_messages(messages: Vec<Vec<Block>>) -> Vec<ChatMessage> {
    let blocks = |blocks: Vec<Block>| {
        blocks.into_iter().map(|block| v1::Block { block: Some(block) }).collect()
    };
    messages
        .into_iter()
        .map(|message| ChatMessage { source: MessageSource::User.into(), blocks: blocks(message) })
        .collect()
}

fn file(attachment: &Attachment) -> Block {
    Block::Attachment(attachment.clone())
}

/// Inline content of a message.
fn content(media_type: &str, name: &str, data: &[u8]) -> Block {
    let (media_type, name, data) = (media_type.into(), name.into(), data.into());
    Block::Attachment(Attachment { media_type, name, data, ..Attachment::default() })
}

#[track_caller]
fn notice_text_of(block: &Block) -> &str {
    let Block::Text(text) = block else { panic!("no text: {block:?}") };
    assert!(
        text.text.starts_with("<system-notice>\n") && text.text.ends_with("\n</system-notice>"),
        "{}",
        text.text
    );
    &text.text
}

#[tokio::test]
async fn supported_file_is_shown_with_its_path() {
    let folder = Fixture::new(MAX_BYTES);
    let image = folder.upload(ORG, "image/png", "a.png", b"\x89PNG-image").await;
    let table = folder.upload(ORG, "text/csv", "dir/t.csv", b"1;2").await;
    let text = || Block::Text(Text { text: "What is this?".into() });
    let shown = folder.show(vec![vec![text(), file(&image), file(&table)]]).await;
    let [asked, about_image, shown_image, about_table, shown_table] = &shown[0][..] else {
        panic!("{shown:?}")
    };
    assert_eq!(asked, &text());
    assert_eq!(shown_image, &content("image/png", "a.png", b"\x89PNG-image"));
    assert_eq!(shown_table, &content("text/csv", "dir/t.csv", b"1;2"));
    let told = notice_text_of(about_image);
    assert!(
        told.contains(&format!("a.png (image/png, 10 bytes, sha256:{})", image.sha256)),
        "{told}"
    );
    assert!(told.contains(&format!("save_file({:?}, \"a.png\")", image.file)), "{told}");
    assert!(
        notice_text_of(about_table).contains(&format!("save_file({:?}, \"t.csv\")", table.file)),
        "{shown:?}"
    );
    // Without scripts, the notice does not mention them.
    let bare = folder
        .attached
        .resolve(&ORG.to_string(), user_messages(vec![vec![file(&image)]]), false)
        .await
        .expect("shown");
    let Some(first) = &bare.0[0].blocks[0].block else { panic!("{bare:?}") };
    assert!(!notice_text_of(first).contains("save_file"), "{bare:?}");
}

#[tokio::test]
async fn unsupported_file_is_named_with_the_reason() {
    let folder = Fixture::new(MAX_BYTES);
    let large = folder.upload(ORG, "text/csv", "large.csv", &vec![b'1'; 300 << 10]).await;
    let archive = folder.upload(ORG, "application/zip", "a.zip", b"PK").await;
    let binary = folder.upload(ORG, "text/plain", "b.txt", b"a\0b").await;
    let gone = folder.upload(ORG, "image/png", "gone.png", b"gone").await;
    folder
        .attached
        .files
        .remove(ORG, &gone.sha256.parse().expect("a hash"))
        .await
        .expect("removed");
    let shown =
        folder.show(vec![vec![file(&large), file(&archive), file(&binary), file(&gone)]]).await;
    let reasons = [
        "It is too large to be shown.",
        "Files of this kind cannot be shown.",
        "It is not UTF-8 text.",
    ];
    for ((block, attachment), reason) in
        shown[0].iter().zip([&large, &archive, &binary]).zip(reasons)
    {
        let told = notice_text_of(block);
        assert!(told.contains("is not shown to you") && told.contains(reason), "{told}");
        assert!(told.contains(&attachment.sha256) && told.contains(&attachment.file), "{told}");
        assert!(told.contains("save_file("), "{told}");
    }
    let told = notice_text_of(&shown[0][3]);
    assert!(told.contains("gone.png") && told.contains("It was deleted after that."), "{told}");
    assert!(!told.contains("save_file"), "{told}");
}

#[tokio::test]
async fn older_files_are_omitted_when_newer_ones_fill_a_call() {
    let folder = Fixture::new(MAX_BYTES);
    let mut messages = Vec::new();
    let mut images = Vec::new();
    for n in 0..4_u8 {
        let image = folder.upload(ORG, "image/png", &format!("{n}.png"), &vec![n; 6 << 20]).await;
        messages.push(vec![file(&image)]);
        images.push(image);
    }
    let shown = folder.show(messages.clone()).await;
    assert!(
        notice_text_of(&shown[0][0]).contains("Newer files have taken the room"),
        "{}",
        notice_text_of(&shown[0][0])
    );
    assert_eq!(shown[0].len(), 1);
    for message in &shown[1..] {
        assert!(matches!(&message[1], Block::Attachment(shown) if shown.data.len() == 6 << 20));
    }
    // Inline content of the messages counts toward the limit too.
    messages.push(vec![content("image/png", "own.png", &vec![9; 4 << 20])]);
    let shown = folder.show(messages).await;
    let counts: Vec<usize> = shown.iter().map(Vec::len).collect();
    assert_eq!(counts, [1, 1, 2, 2, 1]);
}

#[tokio::test]
async fn file_of_another_organization_is_not_shown() {
    let folder = Fixture::new(MAX_BYTES);
    let other = OrganizationId::from_uuid(Uuid::from_u128(7));
    let foreign = folder.upload(other, "image/png", "secret.png", b"canary").await;
    let shown = folder.show(vec![vec![file(&foreign)]]).await;
    assert!(!format!("{shown:?}").contains("canary"), "{shown:?}");
    assert!(notice_text_of(&shown[0][0]).contains("deleted"), "{shown:?}");
}

#[tokio::test]
async fn corrupt_file_is_omitted_and_storage_failure_is_transient() {
    let folder = Fixture::new(MAX_BYTES);
    let image = folder.upload(ORG, "image/png", "a.png", b"whole").await;
    let (first, rest) = image.sha256.split_at(2);
    let path = folder.folder.path().join("files").join(ORG.to_string()).join(first);
    std::fs::write(path.join(rest), b"wrong").expect("written");
    let shown = folder.show(vec![vec![file(&image)]]).await;
    assert!(notice_text_of(&shown[0][0]).contains("It is damaged where it is kept."), "{shown:?}");
    // A file in place of the folder.
    std::fs::remove_dir_all(&path).expect("removed");
    std::fs::write(&path, b"").expect("written");
    let failed = folder
        .attached
        .resolve(&ORG.to_string(), user_messages(vec![vec![file(&image)]]), true)
        .await;
    let failure = failed.expect_err("the storage fails");
    assert_eq!((failure.class, failure.attempts), (FailureClass::Transient, 1));
}

#[tokio::test]
async fn calls_wait_for_free_bytes() {
    let folder = Fixture::new(1 << 20);
    // More than the limit: the call gets all of it.
    let image = folder.upload(ORG, "image/png", "a.png", &vec![1; 2 << 20]).await;
    let small = folder.upload(ORG, "image/png", "b.png", b"small").await;
    let organization = ORG.to_string();
    let (_, room) = folder
        .attached
        .resolve(&organization, user_messages(vec![vec![file(&image)]]), true)
        .await
        .expect("shown");
    let second =
        folder.attached.resolve(&organization, user_messages(vec![vec![file(&small)]]), true);
    let mut second = Box::pin(second);
    assert!(second.as_mut().now_or_never().is_none(), "the first call has all the room");
    let unshown = folder.attached.resolve(
        &organization,
        user_messages(vec![vec![Block::Text(Text::default())]]),
        true,
    );
    assert!(unshown.now_or_never().is_some(), "who shows nothing does not wait");
    drop(room);
    let (messages, room) = second.await.expect("shown");
    assert_eq!((messages[0].blocks.len(), room.is_some()), (2, true));
}
