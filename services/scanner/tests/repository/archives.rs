//! Hostile archives.

use std::{
    io::{Cursor, Write as _},
    path::Path,
    time::Duration,
};

use bytes::Bytes;
use construct_scanner::repository::{
    Archive, ArchiveKind, Commit, Folder, Limit, Limits, SkipReason, Snapshot, SnapshotError,
    Source as _, Upload,
};
use flate2::{Compression, write::GzEncoder};
use futures::StreamExt as _;
use proptest::prelude::*;
use tar::{EntryType, Header};
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

fn commit() -> Commit {
    Commit::new(&"ab".repeat(20), None).expect("an id")
}

async fn unpack(
    kind: ArchiveKind,
    packed: Vec<u8>,
    limits: &Limits,
    into: &Path,
) -> Result<Snapshot, SnapshotError> {
    let bytes = futures::stream::iter([Ok(Bytes::from(packed))]).boxed();
    let result = Snapshot::unpack(&commit(), Archive { kind, bytes }, limits, into).await;
    if result.is_err() {
        assert_eq!(
            std::fs::read_dir(into).expect("a folder").count(),
            0,
            "something is left behind"
        );
    }
    result
}

/// A raw entry, without validation.
#[derive(Debug, Clone)]
struct Entry {
    name: Vec<u8>,
    kind: u8,
    link: Vec<u8>,
    content: Vec<u8>,
    /// The size in the header, if it is wrong.
    size: Option<u64>,
}

fn file(name: &str, content: &[u8]) -> Entry {
    Entry { name: name.into(), kind: b'0', link: Vec::new(), content: content.to_vec(), size: None }
}

fn special_entry(name: &str, kind: u8, link: &str) -> Entry {
    Entry { name: name.into(), kind, link: link.into(), content: Vec::new(), size: None }
}

fn tar_of(entries: &[Entry]) -> Vec<u8> {
    let mut tar = Vec::new();
    for entry in entries {
        let mut header = Header::new_gnu();
        let raw = header.as_old_mut();
        let length = entry.name.len().min(100);
        raw.name[..length].copy_from_slice(&entry.name[..length]);
        let length = entry.link.len().min(100);
        raw.linkname[..length].copy_from_slice(&entry.link[..length]);
        header.set_mode(0o4755);
        header.set_entry_type(EntryType::new(entry.kind));
        header.set_size(entry.size.unwrap_or(entry.content.len() as u64));
        header.set_cksum();
        tar.extend_from_slice(header.as_bytes());
        tar.extend_from_slice(&entry.content);
        tar.resize(tar.len().next_multiple_of(512), 0);
    }
    tar.resize(tar.len() + 1024, 0);
    gzip(&tar)
}

fn gzip(content: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    packed.write_all(content).and_then(|()| packed.finish()).expect("memory takes everything")
}

fn zip_of(entries: &[(&str, &[u8], u32)]) -> Vec<u8> {
    let mut zip = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content, mode) in entries {
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .unix_permissions(*mode);
        zip.start_file(*name, options)
            .and_then(|()| Ok(zip.write_all(content)?))
            .expect("memory takes everything");
    }
    zip.finish().expect("memory takes everything").into_inner()
}

async fn refuse(kind: ArchiveKind, packed: Vec<u8>, limits: &Limits) -> SnapshotError {
    let into = tempfile::tempdir().expect("a folder");
    unpack(kind, packed, limits, into.path()).await.expect_err("it is refused")
}

fn exceeds(error: &SnapshotError, limit: Limit) -> bool {
    matches!(error, SnapshotError::Exceeded { limit: which, .. } if *which == limit)
}

#[tokio::test]
async fn archive_beyond_any_limit_is_refused() {
    let many: Vec<Entry> = (0..40).map(|n| file(&format!("t/f{n}"), b"x")).collect();
    let noise: Vec<u8> =
        (0..300_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let base = Limits { ratio_from: 1 << 20, ..Limits::default() };
    let cases = [
        (
            Limit::ArchiveBytes,
            tar_of(&[file("t/a", &noise)]),
            Limits { archive_bytes: 100_000, ..base.clone() },
        ),
        (Limit::Bytes, tar_of(&[file("t/a", &noise)]), Limits { bytes: 500_000, ..base.clone() }),
        // Skipped files count as well.
        (
            Limit::Bytes,
            tar_of(&[file("t/a", &noise)]),
            Limits { bytes: 500_000, file_bytes: 10, ..base.clone() },
        ),
        (Limit::Entries, tar_of(&many), Limits { entries: 30, ..base.clone() }),
        (Limit::Depth, tar_of(&[file("t/1/2/3/4/a", b"")]), Limits { depth: 3, ..base.clone() }),
        (
            Limit::PathBytes,
            tar_of(&[file(&format!("t/{}", "x".repeat(60)), b"")]),
            Limits { path_bytes: 50, ..base.clone() },
        ),
        (Limit::Ratio, tar_of(&[file("t/a", &vec![0; 4 << 20])]), base.clone()),
    ];
    for (limit, packed, limits) in cases {
        let error = refuse(ArchiveKind::TarGz, packed, &limits).await;
        assert!(exceeds(&error, limit), "{limit:?}: {error:?}");
    }
    let zipped = zip_of(&[("t/a", &vec![0; 4 << 20], 0o644)]);
    assert!(exceeds(&refuse(ArchiveKind::Zip, zipped, &base).await, Limit::Ratio));
    let names: Vec<String> = (0..40).map(|n| format!("t/f{n}")).collect();
    let files: Vec<(&str, &[u8], u32)> =
        names.iter().map(|name| (name.as_str(), &b""[..], 0o644)).collect();
    assert!(exceeds(
        &refuse(ArchiveKind::Zip, zip_of(&files), &Limits { entries: 30, ..base }).await,
        Limit::Entries
    ));
}

#[tokio::test]
async fn oversized_file_is_skipped_and_named() {
    let into = tempfile::tempdir().expect("a folder");
    let limits = Limits { file_bytes: 10, ..Limits::default() };
    let packed = tar_of(&[file("t/big", b"12345678901"), file("t/small", b"1234567890")]);
    let snapshot =
        unpack(ArchiveKind::TarGz, packed, &limits, into.path()).await.expect("the rest is fine");
    assert_eq!(snapshot.manifest().files.keys().collect::<Vec<_>>(), ["small"]);
    assert_eq!(snapshot.manifest().skipped.named, [(SkipReason::TooLarge, "t/big".to_owned())]);
}

#[tokio::test]
async fn escaping_paths_are_refused() {
    let limits = Limits::default();
    for name in ["/etc/passwd", "../x", "t/../../x", "t/..", "..", "t//x"] {
        let error = refuse(ArchiveKind::TarGz, tar_of(&[file(name, b"x")]), &limits).await;
        assert!(matches!(error, SnapshotError::Hostile { .. }), "{name}: {error:?}");
        let mut long = file("././@LongLink", format!("{name}\0").as_bytes());
        long.kind = b'L';
        let error = refuse(ArchiveKind::TarGz, tar_of(&[long, file("t/ok", b"x")]), &limits).await;
        assert!(matches!(error, SnapshotError::Hostile { .. }), "{name}: {error:?}");
        let record = pax(&[("path", name)]);
        let error =
            refuse(ArchiveKind::TarGz, tar_of(&[record, file("t/ok", b"x")]), &limits).await;
        assert!(matches!(error, SnapshotError::Hostile { .. }), "{name}: {error:?}");
    }
    for name in ["../x", "t/../../x", "/etc/passwd"] {
        let error = refuse(
            ArchiveKind::Zip,
            zip_of(&[("ok/aaaaaaaaaaaaaaaaaaaaaa", b"x", 0o644), (name, b"x", 0o644)]),
            &limits,
        )
        .await;
        assert!(
            matches!(error, SnapshotError::Hostile { .. } | SnapshotError::Malformed { .. }),
            "{name}: {error:?}"
        );
    }
}

/// An extension header with records `LENGTH KEY=VALUE`.
fn pax(records: &[(&str, &str)]) -> Entry {
    let mut content = Vec::new();
    for (key, value) in records {
        let rest = key.len() + value.len() + 3;
        let length = (rest..)
            .find(|length| rest + length.to_string().len() == *length)
            .expect("there is one");
        content.extend_from_slice(format!("{length} {key}={value}\n").as_bytes());
    }
    Entry { kind: b'x', ..file("PaxHeader", &content) }
}

#[tokio::test]
async fn links_and_devices_are_skipped_and_not_followed() {
    let (into, outside) =
        (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let target = outside.path().to_str().expect("text");
    let packed = tar_of(&[
        special_entry("t/link", b'2', target),
        file("t/link/inside", b"x"),
        special_entry("t/hard", b'1', "/etc/passwd"),
        special_entry("t/device", b'3', ""),
        special_entry("t/pipe", b'6', ""),
        special_entry("t/up", b'2', ".."),
        file("t/up/b", b"y"),
    ]);
    let snapshot = unpack(ArchiveKind::TarGz, packed, &Limits::default(), into.path())
        .await
        .expect("the rest is fine");
    let skipped = &snapshot.manifest().skipped;
    assert_eq!(
        (
            skipped.count(SkipReason::Symlink),
            skipped.count(SkipReason::Hardlink),
            skipped.count(SkipReason::Special)
        ),
        (2, 1, 2)
    );
    assert_eq!(std::fs::read_dir(outside.path()).expect("a folder").count(), 0);
    assert!(snapshot.path().join("link").symlink_metadata().expect("it is there").is_dir());
    assert_eq!(snapshot.read("link/inside", 9).expect("a file"), b"x");

    let into = tempfile::tempdir().expect("a folder");
    let packed = zip_of(&[("t/a", b"x", 0o100_755), ("t/l", target.as_bytes(), 0o120_777)]);
    let snapshot = unpack(ArchiveKind::Zip, packed, &Limits::default(), into.path()).await;
    // The archiving library keeps the type bits or not, depending on its version; a link must never
    // be created.
    if let Ok(snapshot) = snapshot {
        assert!(!snapshot.path().join("l").is_symlink());
    }
}

#[tokio::test]
async fn ambiguous_names_are_skipped_or_refused() {
    let into = tempfile::tempdir().expect("a folder");
    let mut latin = file("", b"x");
    latin.name = b"t/caf\xe9".to_vec();
    let packed = tar_of(&[
        latin,
        file("t/a\\b", b"x"),
        file("t/new\nline", b"x"),
        file("t/.git/config", b"x"),
        file("t/.construct/outline/a.txt", b"x"),
        file("t/Read", b"1"),
        file("t/read", b"2"),
    ]);
    let snapshot = unpack(ArchiveKind::TarGz, packed, &Limits::default(), into.path())
        .await
        .expect("the rest is fine");
    let manifest = snapshot.manifest();
    assert_eq!(
        (manifest.skipped.count(SkipReason::OddName), manifest.skipped.count(SkipReason::Reserved)),
        (3, 2)
    );
    assert_eq!(manifest.alike, [["Read".to_owned(), "read".to_owned()]]);
    assert_eq!(
        (snapshot.read("Read", 9).expect("1"), snapshot.read("read", 9).expect("2")),
        (b"1".to_vec(), b"2".to_vec())
    );

    for entries in [
        vec![file("t/a", b"1"), file("t/a", b"2")],
        vec![file("t/a", b"1"), file("t/./a", b"2")],
        vec![file("t/a", b"1"), file("t/a/b", b"2")],
        vec![file("t/a/b", b"1"), file("t/a", b"2")],
        vec![special_entry("t/s", b'S', ""), file("t/a", b"1")],
        vec![pax(&[("size", "99999")]), file("t/a", b"1")],
        vec![pax(&[("size", "0")]), file("t/a", b"1")],
        vec![Entry { kind: b'g', ..pax(&[("path", "t/all")]) }, file("t/a", b"1")],
        vec![Entry { kind: b'L', ..file("L", &vec![b'a'; 100_000]) }, file("t/a", b"1")],
    ] {
        let shown = format!(
            "{:?}",
            entries
                .iter()
                .map(|entry| String::from_utf8_lossy(&entry.name).into_owned())
                .collect::<Vec<_>>()
        );
        let error = refuse(ArchiveKind::TarGz, tar_of(&entries), &Limits::default()).await;
        assert!(
            matches!(error, SnapshotError::Hostile { .. } | SnapshotError::Exceeded { .. }),
            "{shown}: {error:?}"
        );
    }
}

#[tokio::test]
async fn gnu_and_pax_long_names_and_root_folder_are_handled() {
    let into = tempfile::tempdir().expect("a folder");
    let (long, longer) =
        (format!("t/{}/gnu", "d".repeat(150)), format!("t/{}/pax", "e".repeat(150)));
    let gnu = Entry { kind: b'L', ..file("././@LongLink", format!("{long}\0").as_bytes()) };
    let packed = tar_of(&[
        Entry { kind: b'g', ..pax(&[("comment", "0123")]) },
        special_entry("t/", b'5', ""),
        gnu,
        file("t/short", b"1"),
        pax(&[("path", &longer), ("mtime", "1.5")]),
        file("t/short", b"2"),
        special_entry("t/empty/", b'5', ""),
    ]);
    let snapshot = unpack(ArchiveKind::TarGz, packed, &Limits::default(), into.path())
        .await
        .expect("it is honest");
    let names: Vec<&str> = snapshot
        .manifest()
        .files
        .keys()
        .map(|name| name.rsplit('/').next().expect("a name"))
        .collect();
    assert_eq!(names, ["gnu", "pax"]);
    assert!(snapshot.path().join("empty").is_dir() && !snapshot.path().join("t").exists());
}

#[tokio::test]
async fn redundant_size_records_and_line_breaks_are_accepted() {
    let into = tempfile::tempdir().expect("a folder");
    let record = pax(&[("comment", "two\nlines"), ("size", "3"), ("path", "t/named")]);
    let packed = tar_of(&[record, file("t/a", b"123"), file("t/b", b"1")]);
    let snapshot = unpack(ArchiveKind::TarGz, packed, &Limits::default(), into.path())
        .await
        .expect("it is honest");
    assert_eq!(snapshot.manifest().files.keys().collect::<Vec<_>>(), ["b", "named"]);
    let damaged = Entry { content: b"99 path=t/x\n".to_vec(), ..pax(&[]) };
    let error =
        refuse(ArchiveKind::TarGz, tar_of(&[damaged, file("t/a", b"1")]), &Limits::default()).await;
    assert!(matches!(error, SnapshotError::Malformed { .. }), "{error:?}");
}

#[tokio::test]
async fn archive_without_usable_entry_is_refused() {
    let packed = tar_of(&[file("t\\a.py", b"1"), file("t\\b.py", b"1")]);
    let error = refuse(ArchiveKind::TarGz, packed, &Limits::default()).await;
    assert!(error.to_string().contains("a.py"), "{error}");
}

#[tokio::test]
async fn zip_directory_size_is_limited() {
    // Few entries, each with 64 KiB of extra data: the library would read all at once.
    let mut entry = b"PK\x01\x02".to_vec();
    entry.resize(46, 0);
    entry[30..32].copy_from_slice(&u16::MAX.to_le_bytes());
    let mut packed = zip_of(&[("t/a", b"x", 0o644)]);
    packed.extend(entry.repeat(1100));
    let error = refuse(ArchiveKind::Zip, packed, &Limits::default()).await;
    assert!(exceeds(&error, Limit::Entries), "{error:?}");
}

#[tokio::test]
async fn changed_folder_or_upload_is_refused() {
    let (folder, into) =
        (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let put = |path: &str, text: &[u8]| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a parent"))
            .and_then(|()| std::fs::write(path, text))
            .expect("written");
    };
    put("repo/a.py", b"one\n");
    put("repo/target/debug/a", b"built");
    put("repo/target/CACHEDIR.TAG", b"");
    put("repo/node_modules/x/index.js", b"fetched");
    put("repo/src/target/b.py", b"a folder of that name");
    let source = Folder::new(folder.path().join("repo"));
    let commit = source.resolve(None).await.expect("a folder");
    put("repo/node_modules/x/index.js", b"fetched anew");
    let taken = Snapshot::take(&source, &commit, &Limits::default(), into.path())
        .await
        .expect("it is the same");
    assert_eq!(taken.manifest().files.keys().collect::<Vec<_>>(), ["a.py", "src/target/b.py"]);
    Snapshot::remove(&commit, into.path()).await.expect("it goes");
    put("repo/a.py", b"two\n");
    let refuse = Snapshot::take(&source, &commit, &Limits::default(), into.path()).await;
    assert!(refuse.is_err_and(|error| !error.is_transient()));
    assert_eq!(std::fs::read_dir(into.path()).expect("a folder").count(), 0);

    let path = folder.path().join("up.zip");
    std::fs::write(&path, zip_of(&[("x.py", b"1\n", 0o644)])).expect("written");
    let upload = Upload::new(path.clone()).expect("a zip");
    let commit = upload.resolve(None).await.expect("an archive");
    // Another file of the same name is not read; a change to the file is noticed.
    std::fs::rename(&path, folder.path().join("moved.zip")).expect("moved");
    std::os::unix::fs::symlink("/etc/passwd", &path).expect("a link");
    assert!(Upload::new(path.clone()).is_err());
    Snapshot::take(&upload, &commit, &Limits::default(), into.path())
        .await
        .expect("it is the same");
    Snapshot::remove(&commit, into.path()).await.expect("it goes");
    std::fs::write(folder.path().join("moved.zip"), zip_of(&[("x.py", b"2\n", 0o644)]))
        .expect("written");
    assert!(Snapshot::take(&upload, &commit, &Limits::default(), into.path()).await.is_err());
}

#[tokio::test]
async fn snapshot_with_damaged_manifest_is_taken_again() {
    let into = tempfile::tempdir().expect("a folder");
    let packed = || tar_of(&[file("t/a", b"1")]);
    let snapshot = unpack(ArchiveKind::TarGz, packed(), &Limits::default(), into.path())
        .await
        .expect("it is honest");
    let manifest = snapshot.path().parent().expect("its folder").join("manifest.json");
    std::fs::write(&manifest, b"").expect("written");
    assert!(Snapshot::open(&commit(), into.path()).await.expect("a look").is_none());
    let again = unpack(ArchiveKind::TarGz, packed(), &Limits::default(), into.path())
        .await
        .expect("it is honest");
    assert_eq!(again.manifest(), snapshot.manifest());
}

#[tokio::test]
async fn deeply_nested_folders_are_refused() {
    let deep = "d/".repeat(10_000);
    let record = pax(&[("path", &format!("{deep}a"))]);
    let error =
        refuse(ArchiveKind::TarGz, tar_of(&[record, file("t/a", b"1")]), &Limits::default()).await;
    assert!(
        matches!(error, SnapshotError::Exceeded { limit: Limit::PathBytes | Limit::Depth, .. }),
        "{error:?}"
    );
    let limits = Limits { path_bytes: 60_000, ..Limits::default() };
    let record = pax(&[("path", &format!("{deep}a"))]);
    let error = refuse(ArchiveKind::TarGz, tar_of(&[record, file("t/a", b"1")]), &limits).await;
    assert!(exceeds(&error, Limit::Depth), "{error:?}");
}

#[tokio::test]
async fn inconsistent_and_damaged_archives_are_refused() {
    let honest = tar_of(&[file("t/a", &[7; 5000])]);
    let limits = Limits::default();
    for packed in [
        Vec::new(),
        b"no archive".to_vec(),
        gzip(b"no archive either, and long enough to be one, if it were one; which it is not, as everybody sees"),
        honest[..honest.len() / 2].to_vec(),
        tar_of(&[Entry { size: Some(1 << 40), ..file("t/a", b"short") }]),
        tar_of(&[Entry { size: Some(600), ..file("t/a", b"short") }, file("t/b", b"hidden in a")]),
    ] {
        let into = tempfile::tempdir().expect("a folder");
        let result = unpack(ArchiveKind::TarGz, packed.clone(), &limits, into.path()).await;
        // A header may claim the following content; then that is the file's content, and no
        // separate file.
        if let Ok(snapshot) = result {
            assert!(!snapshot.manifest().files.contains_key("b"), "{:?}", snapshot.manifest());
        }
    }
    let zipped = zip_of(&[("aaaa", b"first", 0o644), ("bbbb", b"other", 0o644)]);
    let with = |from: &[u8], to: &[u8], nth: usize| {
        let mut lying = zipped.clone();
        let at = (0..lying.len() - from.len())
            .filter(|at| lying[*at..].starts_with(from))
            .nth(nth)
            .expect("it is there");
        lying[at..at + to.len()].copy_from_slice(to);
        lying
    };
    // The directory, then a header, has another name; both entries have one name.
    for lying in [
        with(b"bbbb", b"cccc", 1),
        with(b"bbbb", b"../x", 0),
        with(b"bbbb", b"aaaa", 1),
        zipped[..zipped.len() - 30].to_vec(),
    ] {
        let error = refuse(ArchiveKind::Zip, lying, &limits).await;
        assert!(
            matches!(error, SnapshotError::Hostile { .. } | SnapshotError::Malformed { .. }),
            "{error:?}"
        );
    }
    // The directory has a smaller size than the file.
    let at = zipped.windows(4).position(|bytes| bytes == b"PK\x01\x02").expect("it is there");
    let mut lying = zipped.clone();
    lying[at + 24] = 2;
    let error = refuse(ArchiveKind::Zip, lying, &limits).await;
    assert!(
        matches!(error, SnapshotError::Hostile { .. } | SnapshotError::Malformed { .. }),
        "{error:?}"
    );
}

#[tokio::test]
async fn canceled_snapshot_leaves_nothing_behind() {
    let into = tempfile::tempdir().expect("a folder");
    let bytes = futures::stream::pending().boxed();
    let archive = Archive { kind: ArchiveKind::TarGz, bytes };
    let limits = Limits::default();
    let abandoned = tokio::time::timeout(
        Duration::from_millis(50),
        Snapshot::unpack(&commit(), archive, &limits, into.path()),
    )
    .await;
    assert!(abandoned.is_err());
    assert_eq!(std::fs::read_dir(into.path()).expect("a folder").count(), 0);
    // Leftovers of a crash are swept when they are old.
    std::fs::create_dir(into.path().join(".taking-x")).expect("a folder");
    let now = std::fs::metadata(into.path()).and_then(|found| found.modified()).expect("a time");
    Snapshot::sweep(into.path(), Duration::from_secs(3600), now).await.expect("it sweeps");
    assert!(into.path().join(".taking-x").exists());
    Snapshot::sweep(into.path(), Duration::from_secs(3600), now + Duration::from_secs(7200))
        .await
        .expect("it sweeps");
    assert!(!into.path().join(".taking-x").exists());
}

#[tokio::test]
async fn folders_and_uploads_are_sources_and_can_be_compared() {
    let (folder, into) =
        (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    let put = |path: &str, text: &str| {
        let path = folder.path().join(path);
        std::fs::create_dir_all(path.parent().expect("a parent"))
            .and_then(|()| std::fs::write(path, text))
            .expect("written");
    };
    put("src/a.py", "one\n");
    put("src/b.py", "two\n");
    put(".git/config", "no\n");
    std::os::unix::fs::symlink("/etc/passwd", folder.path().join("src/link")).expect("a link");
    let source = Folder::new(folder.path().to_owned());
    let first = source.resolve(None).await.expect("a folder");
    let old = Snapshot::take(&source, &first, &Limits::default(), into.path())
        .await
        .expect("it is taken");
    // Its only folder is part of the repository.
    assert_eq!(old.manifest().files.keys().collect::<Vec<_>>(), ["src/a.py", "src/b.py"]);
    assert_eq!(source.resolve(None).await.expect("a folder"), first);
    put("src/a.py", "changed\n");
    put("c.py", "three\n");
    std::fs::remove_file(folder.path().join("src/b.py")).expect("removed");
    let second = source.resolve(None).await.expect("a folder");
    let new = Snapshot::take(&source, &second, &Limits::default(), into.path())
        .await
        .expect("it is taken");
    let changes = old.compare(&new);
    assert_eq!(
        (changes.added, changes.removed, changes.changed),
        (vec!["c.py".to_owned()], vec!["src/b.py".to_owned()], vec!["src/a.py".to_owned()])
    );

    let path = folder.path().join("up.zip");
    std::fs::write(&path, zip_of(&[("top/x.py", b"print(1)\n", 0o755)])).expect("written");
    let upload = Upload::new(path).expect("a zip");
    let commit = upload.resolve(None).await.expect("an archive");
    let snapshot = Snapshot::take(&upload, &commit, &Limits::default(), into.path())
        .await
        .expect("it is taken");
    assert_eq!(snapshot.read("x.py", 99).expect("a file"), b"print(1)\n");
    Snapshot::remove(&commit, into.path()).await.expect("it goes");
    Snapshot::remove(&commit, into.path()).await.expect("it is gone");
    assert!(Snapshot::open(&commit, into.path()).await.expect("a look").is_none());
    assert!(Upload::new(folder.path().join("c.py")).is_err());
}

/// Everything below a folder, without following links.
fn list_tree(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            found.extend(list_tree(&entry.path()));
        }
        found.push(entry.path());
    }
    found
}

fn names() -> impl Strategy<Value = Vec<u8>> {
    let part = prop_oneof![
        "[a-c]",
        Just("..".to_owned()),
        Just(".".to_owned()),
        Just(String::new()),
        "[a-cA-C.]{1,3}"
    ];
    let text = proptest::collection::vec(part, 1..5).prop_map(|parts| parts.join("/").into_bytes());
    prop_oneof![8 => text, 1 => proptest::collection::vec(any::<u8>(), 0..20)]
}

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let kinds = prop_oneof![6 => Just(b'0'), 2 => Just(b'5'), 2 => Just(b'2'), 1 => Just(b'1'), 1 => Just(b'L'), 1 => any::<u8>()];
    let links = prop_oneof![
        Just(b"..".to_vec()),
        Just(b"../../outside".to_vec()),
        Just(b"/tmp".to_vec()),
        names()
    ];
    let size = proptest::option::weighted(0.1, 0_u64..2000);
    let entry = (names(), kinds, links, proptest::collection::vec(any::<u8>(), 0..30), size);
    let entry = entry.prop_map(|(name, kind, link, content, size)| Entry {
        name,
        kind,
        link,
        content,
        size,
    });
    proptest::collection::vec(entry, 1..8)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_archive_writes_outside_its_folder(entries in entries()) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let world = tempfile::tempdir().expect("a folder");
        let (into, outside) = (world.path().join("into"), world.path().join("outside"));
        std::fs::create_dir_all(&into).and_then(|()| std::fs::create_dir(&outside)).expect("folders");
        let bytes = futures::stream::iter([Ok(Bytes::from(tar_of(&entries)))]).boxed();
        let archive = Archive { kind: ArchiveKind::TarGz, bytes };
        let result = runtime.block_on(Snapshot::unpack(&commit(), archive, &Limits::default(), &into));
        let found = list_tree(world.path());
        prop_assert!(found.iter().all(|path| !path.is_symlink()), "{found:?}");
        let outer: Vec<_> = found.iter().filter(|path| !path.starts_with(&into)).collect();
        prop_assert_eq!(outer, [&outside]);
        match result {
            // The files on disk are those of the manifest.
            Ok(snapshot) => {
                let mut files: Vec<String> = list_tree(&snapshot.path())
                    .into_iter()
                    .filter(|path| path.is_file())
                    .map(|path| path.strip_prefix(snapshot.path()).expect("below").to_str().expect("text").to_owned())
                    .collect();
                files.sort();
                prop_assert_eq!(files, snapshot.manifest().files.keys().cloned().collect::<Vec<_>>());
            }
            Err(_) => prop_assert_eq!(std::fs::read_dir(&into).expect("a folder").count(), 0),
        }
    }
}
