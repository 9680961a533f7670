use tempfile::TempDir;

use super::*;
use crate::blob;

const ORGANIZATION: OrganizationId = OrganizationId::LOCAL;
const OTHER: OrganizationId = OrganizationId::from_uuid(Uuid::from_u128(7));
const FILE: FileId = FileId::from_uuid(Uuid::from_u128(8));

fn store() -> (TempDir, Store) {
    let folder = tempfile::tempdir().expect("a folder");
    let store = Store::open(folder.path()).expect("opened");
    (folder, store)
}

/// Uploads parts and assembles a file.
async fn file(store: &Store, parts: &[&[u8]]) -> StoredContent {
    let mut names = Vec::new();
    for part in parts {
        names.push(
            store.put_part(ORGANIZATION, FILE, Bytes::copy_from_slice(part)).await.expect("put"),
        );
    }
    let whole = store.assemble(ORGANIZATION, FILE, &names).await.expect("assembled");
    store.place(ORGANIZATION, whole).await.expect("placed")
}

async fn read(store: &Store, sha256: &Sha256, range: Option<Range<u64>>) -> (Vec<u8>, usize) {
    let chunks: Vec<_> = store
        .read(ORGANIZATION, sha256, range)
        .await
        .expect("there")
        .try_collect()
        .await
        .expect("read");
    (chunks.concat(), chunks.len())
}

fn names(folder: &std::path::Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    entries
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("a name"))
        .collect()
}

#[tokio::test]
async fn assembled_file_reads_whole_and_in_ranges() {
    let (folder, store) = store();
    let content: Vec<u8> = (0..=255).cycle().take(3 * CHUNK_BYTES + 17).collect();
    let stored = file(
        &store,
        &[&content[..10], &content[10..CHUNK_BYTES + 20], &content[CHUNK_BYTES + 20..]],
    )
    .await;
    assert_eq!(
        stored,
        StoredContent { sha256: Sha256::digest(&content), size: content.len() as u64 }
    );
    assert_eq!(store.head(ORGANIZATION, &stored.sha256).await.expect("looked"), Some(stored.size));
    let (whole, chunks) = read(&store, &stored.sha256, None).await;
    assert!(whole == content && chunks == 4, "{chunks} chunks, {} bytes", whole.len());
    let end = content.len() as u64;
    for (range, expected) in [
        (0..1, &content[..1]),
        (CHUNK_BYTES as u64 - 1..CHUNK_BYTES as u64 + 1, &content[CHUNK_BYTES - 1..=CHUNK_BYTES]),
        (end - 3..end + 100, &content[content.len() - 3..]),
        (end..end + 1, &[][..]),
        (end + 7..end + 9, &[][..]),
    ] {
        assert_eq!(
            read(&store, &stored.sha256, Some(range.clone())).await.0,
            expected,
            "{range:?}"
        );
    }
    assert_eq!(store.get(ORGANIZATION, &stored.sha256, end).await.expect("read"), content);
    assert!(
        matches!(store.get(ORGANIZATION, &stored.sha256, end - 1).await, Err(Error::TooLarge(size)) if size == end)
    );
    let digits = stored.sha256.to_string();
    let path =
        folder.path().join(format!("files/{ORGANIZATION}/{}/{}", &digits[..2], &digits[2..]));
    assert_eq!(std::fs::read(path).expect("it lies where the documents say"), content);
}

#[tokio::test]
async fn file_exists_after_place_and_damage_is_healed() {
    let (folder, store) = store();
    let part = store.put_part(ORGANIZATION, FILE, Bytes::from_static(b"words")).await.expect("put");
    let whole = store.assemble(ORGANIZATION, FILE, &[part]).await.expect("assembled");
    let sha256 = whole.stored().sha256;
    assert_eq!(store.head(ORGANIZATION, &sha256).await.expect("looked"), None);
    assert!(matches!(store.get(ORGANIZATION, &sha256, 5).await, Err(Error::Missing)));
    assert_eq!(std::io::read_to_string(whole.open().expect("opened")).expect("read"), "words");
    store.place(ORGANIZATION, whole).await.expect("placed");
    let path =
        store.files.path_to_filesystem(&content_path(ORGANIZATION, &sha256)).expect("a path");
    std::fs::write(&path, "Words").expect("damaged");
    assert!(matches!(store.get(ORGANIZATION, &sha256, 5).await, Err(Error::Corrupt)));
    file(&store, &[b"wor", b"ds"]).await;
    assert_eq!(store.get(ORGANIZATION, &sha256, 5).await.expect("healed"), "words");
    assert!(!names(&folder.path().join(format!("files/{ORGANIZATION}/uploads/{FILE}"))).is_empty());
    // Files that the storage itself does not list are removed too.
    let unfinished = store
        .files
        .put_multipart(&upload(ORGANIZATION, FILE).join("whole-x"))
        .await
        .expect("unfinished");
    std::mem::forget(unfinished);
    for _ in 0..2 {
        store.remove_upload(ORGANIZATION, FILE).await.expect("removed, or gone already");
    }
    assert_eq!(names(&folder.path().join(format!("files/{ORGANIZATION}/uploads"))), [""; 0]);
    assert_eq!(store.get(ORGANIZATION, &sha256, 5).await.expect("the file stays"), "words");
    assert!(matches!(store.assemble(ORGANIZATION, FILE, &[part]).await, Err(Error::Missing)));
}

#[tokio::test]
async fn empty_file_has_the_empty_hash() {
    let (_folder, store) = store();
    let stored = file(&store, &[]).await;
    assert_eq!(
        stored.sha256.to_string(),
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    );
    assert_eq!(read(&store, &stored.sha256, None).await, (Vec::new(), 0));
}

#[tokio::test]
async fn files_are_separate_per_organization() {
    let (folder, store) = store();
    let stored = file(&store, &[b"secret"]).await;
    assert_eq!(store.head(OTHER, &stored.sha256).await.expect("looked"), None);
    store.remove(OTHER, &stored.sha256).await.expect("nothing to remove");
    store.remove_organization(OTHER).await.expect("nothing to remove");
    assert_eq!(store.get(ORGANIZATION, &stored.sha256, 6).await.expect("still there"), "secret");
    let mut open = Box::pin(store.read(ORGANIZATION, &stored.sha256, None).await.expect("there"));
    store.remove_organization(ORGANIZATION).await.expect("removed");
    assert_eq!(names(&folder.path().join("files")), [""; 0]);
    assert_eq!(
        open.try_next().await.expect("an open read continues"),
        Some(Bytes::from_static(b"secret"))
    );
    assert!(matches!(
        store.read(ORGANIZATION, &stored.sha256, None).await.err(),
        Some(Error::Missing)
    ));
}

#[tokio::test]
async fn blob_cleanup_keeps_files() {
    let (folder, store) = store();
    let stored = file(&store, &[b"kept"]).await;
    let part = store.put_part(ORGANIZATION, FILE, Bytes::from_static(b"part")).await.expect("put");
    let blobs = blob::Store::open(folder.path()).expect("opened");
    blobs.put(Bytes::from_static(b"blob")).await.expect("put");
    let old = jiff::Timestamp::now() - blob::RETENTION * 3;
    for path in [content_path(ORGANIZATION, &stored.sha256), part_path(ORGANIZATION, FILE, part)] {
        let path = store.files.path_to_filesystem(&path).expect("a path");
        File::options()
            .append(true)
            .open(path)
            .expect("there")
            .set_modified(old.into())
            .expect("a time");
    }
    let removed =
        blobs.remove_older_than(jiff::Timestamp::now() - blob::RETENTION).await.expect("cleaned");
    assert_eq!(removed, blob::RemovedBlobs::default());
    assert_eq!(store.get(ORGANIZATION, &stored.sha256, 4).await.expect("kept"), "kept");
    store.assemble(ORGANIZATION, FILE, &[part]).await.expect("the part is there");
}

#[test]
fn hash_parses_only_its_canonical_form() {
    let text = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
    let hash: Sha256 = text.parse().expect("a hash");
    assert_eq!((hash, hash.to_string().as_str()), (Sha256::digest(b""), text));
    assert_eq!(Sha256::from_bytes(*hash.as_bytes()), hash);
    let long = vec![7; CHUNK_BYTES + 1];
    assert_eq!(
        Sha256::read(&mut &long[..]).expect("read"),
        (Sha256::digest(&long), CHUNK_BYTES as u64 + 1)
    );
    for wrong in [
        "",
        &text[1..],
        &text.to_uppercase(),
        &format!("{text}0"),
        &format!("sha256:{}", &text[7..]),
        &"é".repeat(32),
    ] {
        assert!(wrong.parse::<Sha256>().is_err(), "{wrong}");
    }
}
