//! Files: one part per offset is accepted, contents are stored once, and unused ones are removed.

use construct_domain::FileId;
use futures::future::join_all;
use jiff::SignedDuration;

use super::*;
use crate::{
    File, FileFilter, FileState, MAX_UNFINISHED_UPLOADS, NewFile, NewPart, Order, Page,
    PartOutcome, RemovalTarget, UPLOAD_TIMEOUT,
};

pub(super) fn file(size: i64) -> NewFile {
    NewFile {
        id: FileId::from_uuid(Uuid::now_v7()),
        name: "report.pdf".into(),
        media_type: "application/pdf".into(),
        size,
        expected_sha256: None,
        created_by: "ada".into(),
        is_stored: false,
    }
}

async fn create(store: &Store, new: NewFile) -> File {
    applied(store.file_create(&write(), new, rendered("x")).await.expect("created"))
}

fn part(position: i64, size: i64, says: u8) -> NewPart {
    NewPart { position, size, part: Uuid::now_v7(), sha256: [says; 32] }
}

async fn add_part(store: &Store, id: FileId, part: NewPart) -> Result<PartOutcome, Error> {
    store.file_part_add(&write(), id, part, rendered("x")).await
}

/// Uploads the whole content as one part.
async fn upload(store: &Store, new: NewFile, says: u8) -> File {
    let file = create(store, new).await;
    let taken = add_part(store, file.id, part(0, file.size, says)).await.expect("taken");
    assert!(
        matches!(taken, PartOutcome::Accepted(File { state: FileState::Checking, .. })),
        "{taken:?}"
    );
    file
}

async fn ready(store: &Store, file: &File, says: u8) -> bool {
    store.file_claim(file.id, now()).await.expect("asked").expect("nobody is at it");
    let content = store.file_content(ORG, [says; 32]).await.expect("locked");
    content.mark_ready(file.id, "application/pdf", now()).await.expect("written")
}

/// Performs the recorded removals, and returns them.
async fn remove_all(store: &Store) -> Vec<RemovalTarget> {
    let mut removed = Vec::new();
    for removal in store.file_removals(100).await.expect("read") {
        store.file_removal_done(removal.id).await.expect("noted");
        removed.push(removal.target);
    }
    removed
}

#[tokio::test]
async fn concurrent_parts_at_one_offset_have_one_winner() {
    let database = Database::new().await;
    let store = database.store();
    let file = create(&store, file(100)).await;
    assert_eq!((file.state, file.received, file.sha256), (FileState::Uploading, 0, None));
    let parts: Vec<_> = (0..8).map(|says| part(0, 40, says)).collect();
    let results = join_all(parts.iter().map(|part| add_part(&store, file.id, *part))).await;
    let mut taken = Vec::new();
    for (part, result) in parts.iter().zip(results) {
        match result {
            Ok(PartOutcome::Accepted(file)) => {
                assert_eq!(file.received, 40);
                taken.push(*part);
            }
            Err(Error::WrongOffset { offset: 40 }) => {}
            other => panic!("{other:?}"),
        }
    }
    let [first] = taken[..] else { panic!("{taken:?}") };
    // A repetition of the last part is answered like the first time; another part at its offset is
    // refused.
    let again = add_part(&store, file.id, NewPart { part: Uuid::now_v7(), ..first })
        .await
        .expect("as at first");
    assert!(matches!(again, PartOutcome::Duplicate(File { received: 40, .. })), "{again:?}");
    let other = add_part(&store, file.id, NewPart { sha256: [99; 32], ..first }).await;
    assert!(matches!(other, Err(Error::WrongOffset { offset: 40 })), "{other:?}");
    let late = add_part(&store, file.id, part(39, 1, 1)).await;
    assert!(matches!(late, Err(Error::WrongOffset { offset: 40 })), "{late:?}");
    let long = add_part(&store, file.id, part(40, 61, 1)).await;
    assert!(matches!(long, Err(Error::TooLong { size: 100 })), "{long:?}");
    let last = part(40, 60, 50);
    add_part(&store, file.id, last).await.expect("the last one");
    assert!(matches!(add_part(&store, file.id, last).await, Ok(PartOutcome::Duplicate(_))));
    assert!(matches!(add_part(&store, file.id, part(100, 1, 1)).await, Err(Error::NotUploading)));
    let claimed =
        store.file_claim(file.id, now()).await.expect("asked").expect("all parts are there");
    let names: Vec<_> = claimed.parts.iter().map(|part| part.part).collect();
    assert_eq!(names, [first.part, last.part]);
    assert_eq!(store.file_claim(file.id, now()).await.expect("asked"), None, "somebody is at it");
}

#[tokio::test]
async fn expired_file_claim_is_taken_over() {
    let database = Database::new().await;
    let store = database.store();
    let file = upload(&store, file(10), 1).await;
    assert_eq!(store.file_list_unclaimed(now()).await.expect("read"), [file.id]);
    store.file_claim(file.id, now()).await.expect("asked").expect("nobody is at it");
    assert!(store.file_list_unclaimed(now()).await.expect("read").is_empty());
    let later = now() + SignedDuration::from_mins(6);
    assert_eq!(store.file_list_unclaimed(later).await.expect("read"), [file.id]);
    assert!(store.file_claim(file.id, later).await.expect("asked").is_some());
    store.file_release(file.id, now()).await.expect("let go");
    assert!(ready(&store, &file, 1).await);
    let found = store.file_get(ORG, file.id).await.expect("there");
    assert_eq!(
        (found.state, found.sha256, found.expires_at),
        (FileState::Ready, Some([1; 32]), None)
    );
    assert_eq!(remove_all(&store).await, [RemovalTarget::Upload(file.id)]);
    // The other process finishes too, and changes nothing.
    let content = store.file_content(ORG, [1; 32]).await.expect("locked");
    assert!(
        !content.mark_ready(file.id, "application/pdf", now()).await.expect("nothing to write")
    );
    let mut content = store.file_content(ORG, [1; 32]).await.expect("locked");
    assert!(content.is_needed().await.expect("read"), "the file says it");
}

#[tokio::test]
async fn known_content_makes_file_ready_and_is_removed_with_last_file() {
    let database = Database::new().await;
    let store = database.store();
    let first = upload(&store, file(10), 1).await;
    let known = NewFile { expected_sha256: Some([1; 32]), is_stored: true, ..file(10) };
    let early = create(&store, known.clone()).await;
    assert_eq!(early.state, FileState::Uploading, "nothing is there yet");
    assert!(ready(&store, &first, 1).await);
    assert!(store.file_content_exists(ORG, &[1; 32], 10).await.expect("read"));
    assert!(!store.file_content_exists(ORG, &[1; 32], 11).await.expect("read"));
    let elsewhere = OrganizationId::from_uuid(Uuid::now_v7());
    assert!(
        !store.file_content_exists(elsewhere, &[1; 32], 10).await.expect("read"),
        "nobody knows what others have"
    );
    let fresh = |new: NewFile| NewFile { id: FileId::from_uuid(Uuid::now_v7()), ..new };
    let second = create(&store, fresh(known.clone())).await;
    assert_eq!(
        (second.state, second.received, second.sha256),
        (FileState::Ready, 10, Some([1; 32]))
    );
    let unlike = NewFile { media_type: "image/png".into(), ..fresh(known.clone()) };
    assert_eq!(
        create(&store, unlike).await.state,
        FileState::Uploading,
        "what it says it is was never looked at"
    );
    let damaged = NewFile { is_stored: false, ..fresh(known) };
    assert_eq!(create(&store, damaged).await.state, FileState::Uploading);
    remove_all(&store).await;
    for (file, needed) in [(first, true), (second, false)] {
        let deleted =
            applied(store.file_delete(&write(), file.id, rendered("x")).await.expect("deleted"));
        assert_eq!(deleted.id, file.id);
        assert_not_found(store.file_get(ORG, file.id).await);
        let removals = store.file_removals(10).await.expect("read");
        assert_eq!(removals.len(), 1);
        assert_eq!(removals[0].target, RemovalTarget::Content([1; 32]));
        let mut content = store.file_content(ORG, [1; 32]).await.expect("locked");
        assert_eq!(content.is_needed().await.expect("read"), needed);
        content.finish(removals[0].id).await.expect("settled");
        assert!(store.file_removals(10).await.expect("read").is_empty());
    }
}

#[tokio::test]
async fn unfinished_upload_expires_and_ready_file_stays() {
    let database = Database::new().await;
    let store = database.store();
    let [kept, refused, cut] = [
        upload(&store, file(10), 1).await,
        upload(&store, file(10), 2).await,
        create(&store, file(10)).await,
    ];
    assert!(ready(&store, &kept, 1).await);
    store.file_claim(refused.id, now()).await.expect("asked").expect("nobody is at it");
    store.file_refuse(refused.id, "it is a bomb", now()).await.expect("refused");
    let found = store.file_get(ORG, refused.id).await.expect("it can be read why");
    assert_eq!(
        (found.state, found.reason.as_str(), found.received),
        (FileState::Refused, "it is a bomb", 0)
    );
    assert!(matches!(add_part(&store, refused.id, part(0, 10, 2)).await, Err(Error::NotUploading)));
    remove_all(&store).await;
    assert_eq!(
        store
            .file_expire(now() + UPLOAD_TIMEOUT - SignedDuration::from_hours(1))
            .await
            .expect("looked"),
        0
    );
    assert_eq!(store.file_expire(now() + UPLOAD_TIMEOUT).await.expect("looked"), 2);
    let mut went = remove_all(&store).await;
    went.sort_by_key(|removed| format!("{removed:?}"));
    assert_eq!(went.len(), 2);
    assert!(
        [refused.id, cut.id].iter().all(|id| went.contains(&RemovalTarget::Upload(*id))),
        "{went:?}"
    );
    assert_not_found(store.file_get(ORG, cut.id).await);
    assert_eq!(store.file_get(ORG, kept.id).await.expect("there").state, FileState::Ready);
    assert_eq!(store.file_expire(now() + UPLOAD_TIMEOUT * 1000).await.expect("looked"), 0);
}

#[tokio::test]
async fn unfinished_uploads_are_limited() {
    let database = Database::new().await;
    let store = database.store();
    let begun = (0..MAX_UNFINISHED_UPLOADS + 5)
        .map(|_| async { store.file_create(&write(), file(10), rendered("x")).await });
    let begun = join_all(begun).await;
    let refused =
        begun.iter().filter(|begun| matches!(begun, Err(Error::TooManyUploads { .. }))).count();
    assert_eq!((refused, begun.len()), (5, 105), "{:?}", begun.last());
    let Some(Ok(first)) = begun.into_iter().find(Result::is_ok) else { panic!("one was begun") };
    let first = applied(first);
    applied(store.file_delete(&write(), first.id, rendered("x")).await.expect("deleted"));
    create(&store, file(10)).await;
}

#[tokio::test]
async fn files_are_listed_by_every_filter() {
    let database = Database::new().await;
    let store = database.store();
    let pdf = upload(&store, file(10), 1).await;
    assert!(ready(&store, &pdf, 1).await);
    let png =
        create(&store, NewFile { name: "a.png".into(), media_type: "image/png".into(), ..file(5) })
            .await;
    let list = async |filter: FileFilter| {
        let page = Page { limit: 10, order: Order::default(), after: None };
        let found = store.file_list(ORG, &filter, &page).await.expect("listed");
        found.into_iter().map(|file| file.id).collect::<Vec<_>>()
    };
    let all = FileFilter::default();
    assert_eq!(list(all.clone()).await, [png.id, pdf.id]);
    assert_eq!(list(FileFilter { name: Some("a.png".into()), ..all.clone() }).await, [png.id]);
    assert_eq!(
        list(FileFilter { media_kind: Some("image/".into()), ..all.clone() }).await,
        [png.id]
    );
    assert_eq!(
        list(FileFilter { media_type: Some("application/pdf".into()), ..all.clone() }).await,
        [pdf.id]
    );
    assert_eq!(list(FileFilter { state: Some(FileState::Ready), ..all.clone() }).await, [pdf.id]);
    assert_eq!(list(FileFilter { sha256: Some([1; 32]), ..all.clone() }).await, [pdf.id]);
    assert!(list(FileFilter { sha256: Some([2; 32]), ..all }).await.is_empty());
    let renamed = store.file_update(&write(), png.id, Some(1), Some("b.png"), rendered("x")).await;
    assert_eq!(applied(renamed.expect("renamed")).name, "b.png");
    let late = store.file_update(&write(), png.id, Some(1), Some("c.png"), rendered("x")).await;
    assert!(matches!(late, Err(Error::Conflict)), "{late:?}");
}
