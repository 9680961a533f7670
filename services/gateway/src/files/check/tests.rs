//! Archives that are assembled by hand, because no program creates invalid ones.

use std::io::Write as _;

use flate2::{
    Compression,
    write::{DeflateEncoder, GzEncoder},
};
use tempfile::TempDir;

use super::*;

/// An entry of an archive, and its declared properties.
struct TestEntry {
    name: &'static str,
    content: Vec<u8>,
    method: u16,
    /// The size after decompression that the directory declares.
    size: u32,
}

fn deflated(name: &'static str, data: &[u8]) -> TestEntry {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(data).expect("packed");
    TestEntry { name, content: encoder.finish().expect("packed"), method: 8, size: length(data) }
}

fn stored(name: &'static str, data: &[u8]) -> TestEntry {
    TestEntry { name, content: data.to_vec(), method: 0, size: length(data) }
}

fn length(data: &[u8]) -> u32 {
    u32::try_from(data.len()).expect("it is short")
}

/// Creates an archive. Each item of `directory` is the index of an entry in `entries`.
fn zipped_as(entries: &[TestEntry], directory: &[usize]) -> Vec<u8> {
    let mut archive = Vec::new();
    let mut offsets = Vec::new();
    for TestEntry { name, content, method, size } in entries {
        offsets.push(length(&archive));
        archive.extend(b"PK\x03\x04\x14\0\0\0");
        archive.extend(method.to_le_bytes());
        archive.extend([0; 8]);
        archive.extend(length(content).to_le_bytes());
        archive.extend(size.to_le_bytes());
        archive.extend(u16::try_from(name.len()).expect("short").to_le_bytes());
        archive.extend([0; 2]);
        archive.extend(name.as_bytes());
        archive.extend(content);
    }
    let begins = length(&archive);
    for entry in directory {
        let TestEntry { name, content, method, size } = &entries[*entry];
        archive.extend(b"PK\x01\x02\x14\0\x14\0\0\0");
        archive.extend(method.to_le_bytes());
        archive.extend([0; 8]);
        archive.extend(length(content).to_le_bytes());
        archive.extend(size.to_le_bytes());
        archive.extend(u16::try_from(name.len()).expect("short").to_le_bytes());
        archive.extend([0; 12]);
        archive.extend(offsets[*entry].to_le_bytes());
        archive.extend(name.as_bytes());
    }
    let ends = length(&archive);
    archive.extend(b"PK\x05\x06\0\0\0\0");
    let count = u16::try_from(directory.len()).expect("few").to_le_bytes();
    archive.extend(count);
    archive.extend(count);
    archive.extend((ends - begins).to_le_bytes());
    archive.extend(begins.to_le_bytes());
    archive.extend([0; 2]);
    archive
}

fn zipped(entries: &[TestEntry]) -> Vec<u8> {
    zipped_as(entries, &(0..entries.len()).collect::<Vec<_>>())
}

fn gzipped(data: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(data).expect("packed");
    encoder.finish().expect("packed")
}

fn tarred(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = Vec::new();
    for (name, data) in entries {
        let mut header = [0; 512];
        header[..name.len()].copy_from_slice(name.as_bytes());
        header[124..136].copy_from_slice(format!("{:011o}\0", data.len()).as_bytes());
        header[257..263].copy_from_slice(b"ustar\0");
        archive.extend(header);
        archive.extend(*data);
        archive.resize(archive.len().next_multiple_of(512), 0);
    }
    archive.resize(archive.len() + 1024, 0);
    archive
}

/// Creates zeros, in MiB.
fn zeros(mib: usize) -> Vec<u8> {
    vec![0; mib * 1024 * 1024]
}

fn check_bytes(data: &[u8], declared: &str) -> Result<String, String> {
    let folder = TempDir::new().expect("a folder");
    let mut file = tempfile::tempfile_in(folder.path()).expect("a file");
    file.write_all(data).expect("written");
    let spool = Spool { folder: folder.path().to_owned(), max: 1024 * 1024 };
    let found = check(&file, declared, &spool);
    let left = std::fs::read_dir(folder.path()).expect("a folder").count();
    assert_eq!(left, 0, "the spooled file is deleted");
    found.map_err(|stop| match stop {
        Stop::Refused(words) => words,
        Stop::Failed(error) => panic!("the content could not be checked: {error}"),
    })
}

#[track_caller]
fn assert_refused(data: &[u8], words: &str) {
    let why = check_bytes(data, "").expect_err(words);
    assert!(why.contains(words), "{why}");
}

/// A ZIP with `[Content_Types].xml` and other entries of a document.
fn document() -> Vec<u8> {
    let xml = "<w:p><w:r><w:t>What we spent in May.</w:t></w:r></w:p>".repeat(2000);
    zipped(&[
        deflated("[Content_Types].xml", b"<Types/>"),
        deflated("word/document.xml", xml.as_bytes()),
        stored("empty/", b""),
    ])
}

#[test]
fn valid_archives_are_detected() {
    let noise: Vec<u8> =
        (0..3_000_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    let large = zipped(&[deflated("noise", &noise), deflated("zeros", &zeros(15))]);
    let tar =
        tarred(&[("a.txt", b"a"), ("document.docx", &document()), ("b.bin", &noise[..70_000])]);
    for (data, expected) in [
        (document(), "application/zip"),
        (large, "application/zip"),
        (zipped(&[]), "application/zip"),
        (gzipped(&tar), "application/gzip"),
        (gzipped(b"words"), "application/gzip"),
        ([gzipped(b"two"), gzipped(b"members")].concat(), "application/gzip"),
        (tar, "application/x-tar"),
        (
            zipped(&[stored("inner.tar.gz", &gzipped(&tarred(&[("x", &document())])))]),
            "application/zip",
        ),
        (b"PK is a name".to_vec(), "application/octet-stream"),
        (b"".to_vec(), "application/octet-stream"),
    ] {
        assert_eq!(check_bytes(&data, "").as_deref(), Ok(expected));
    }
    let docx = "application/vnd.openxmlformats-officedocument.wordprocessingml.document";
    assert_eq!(check_bytes(&document(), docx).as_deref(), Ok(docx));
    let why = check_bytes(b"no document", docx).expect_err("it is none");
    assert!(why.contains("looks like something else"), "{why}");
    // Self-extracting programs have data before the archive.
    assert_eq!(
        check_bytes(&[b"MZ\x90\0\x03\0".to_vec(), document()].concat(), "").map(|_| ()),
        Ok(())
    );
}

#[test]
fn decompression_bombs_are_refused() {
    const MUCH: &str = "more than 16,777,216 bytes";
    let flat = zipped(&[deflated("zeros", &zeros(64))]);
    assert!(flat.len() < 100_000);
    assert_refused(&flat, MUCH);
    assert_refused(&gzipped(&zeros(64)), MUCH);
    assert_refused(&gzipped(&gzipped(&zeros(64))), MUCH);
    // Many small archives.
    let inner = zipped(&[deflated("zeros", &zeros(3))]);
    let many: Vec<TestEntry> = (0..8).map(|_| stored("inner.zip", &inner)).collect();
    assert_refused(&zipped(&many), MUCH);
    assert_refused(&gzipped(&tarred(&[("a.zip", &inner), ("b.gz", &gzipped(&zeros(14)))])), MUCH);
    // After other content, where a program that opens the archive finds it.
    assert_refused(&[b"GIF89a\x01\0\x01\0\0\0\0;".to_vec(), flat].concat(), MUCH);
}

#[test]
fn inconsistent_archives_are_refused() {
    let lies = |size: u32| zipped(&[TestEntry { size, ..deflated("x", b"words and more words") }]);
    assert_refused(&lies(3), "another size than declared");
    assert_refused(&lies(4_000_000), "another size than declared");
    // One content for many entries: each is decompressed, and none is stored twice.
    assert_refused(&zipped_as(&[deflated("x", &zeros(1))], &[0, 0]), "overlap");
    // More entries than declared, which other programs find.
    let mut few = zipped_as(&[deflated("x", &zeros(1))], &[0, 0]);
    let end = few.len() - 22;
    few[end + 8..end + 12].copy_from_slice(&[1, 0, 1, 0]);
    assert_refused(&few, "more entries than declared");
    let mut none = zipped(&[deflated("x", &zeros(1))]);
    let end = none.len() - 22;
    none[end + 8..end + 12].copy_from_slice(&[0; 4]);
    assert_refused(&none, "more entries than declared");
    // An entry whose content contains further entries.
    let inside = zipped(&[stored("inner", b"words")]);
    let mut nested = zipped(&[stored("outer", &inside)]);
    let directory =
        nested.windows(4).rposition(|bytes| bytes == b"PK\x01\x02").expect("there is one");
    let again = nested[directory..]
        .windows(22)
        .position(|bytes| bytes.starts_with(b"PK\x05\x06"))
        .expect("an end");
    let outer = nested[directory..directory + again].to_vec();
    let mut inner = outer.clone();
    // The inner entry starts at offset 35: after the header and the name of the outer one.
    inner[42..46].copy_from_slice(&35_u32.to_le_bytes());
    inner[20..24].copy_from_slice(&5_u32.to_le_bytes());
    inner[24..28].copy_from_slice(&5_u32.to_le_bytes());
    let mut end = nested.split_off(directory + again);
    nested.extend(&inner);
    end[8..12].copy_from_slice(&[2, 0, 2, 0]);
    end[12..16].copy_from_slice(&length(&[outer, inner].concat()).to_le_bytes());
    nested.extend(end);
    assert_refused(&nested, "overlap");
    // A directory with a wrong offset, and a truncated one.
    let mut lost = document();
    let entry = lost.windows(4).position(|bytes| bytes == b"PK\x01\x02").expect("there is one");
    lost[entry + 42] = 7;
    assert_refused(&lost, "not where its directory says");
    assert_refused(&document()[..200], "no directory");
    let mut broken = document();
    broken[80..120].fill(0xFF);
    assert!(check_bytes(&broken, "").is_err());
    assert_refused(&gzipped(b"words that are cut")[..20], "damaged");
}

#[test]
fn nesting_of_archives_is_limited() {
    let mut deep = b"words".to_vec();
    for _ in 0..MAX_DEPTH {
        deep = gzipped(&deep);
    }
    assert_eq!(check_bytes(&deep, "").as_deref(), Ok("application/gzip"));
    assert_refused(&gzipped(&deep), "nested more than 4 deep");
    let mut deep = document();
    for _ in 1..MAX_DEPTH {
        deep = zipped(&[deflated("inner.zip", &deep)]);
    }
    assert_eq!(check_bytes(&deep, "").as_deref(), Ok("application/zip"));
    assert_refused(&zipped(&[stored("x", &deep)]), "nested more than 4 deep");
    // Spooled content is no larger than a file may be: here 1 MiB.
    let noise: Vec<u8> =
        (0..300_000_u32).flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    assert_refused(
        &zipped(&[stored("inner.zip", &zipped(&[stored("noise", &noise)]))]),
        "larger than a file may be",
    );
}

#[test]
fn number_of_entries_is_limited() {
    let names = vec![("x", &b""[..]); 100_001];
    assert_refused(&tarred(&names), "more than 100,000 entries");
}

#[test]
fn oversized_images_are_refused() {
    let png = |width: u32, height: u32| {
        let mut picture = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
        picture.extend(width.to_be_bytes());
        picture.extend(height.to_be_bytes());
        picture.extend([8, 6, 0, 0, 0]);
        picture
    };
    assert_eq!(check_bytes(&png(10_000, 10_000), "image/png").as_deref(), Ok("image/png"));
    let why = check_bytes(&png(60_000, 60_000), "image/png").expect_err("too large");
    assert!(why.contains("60000 × 60000 pixels; the maximum is 100,000,000"), "{why}");
    assert_refused(&png(u32::MAX, u32::MAX), "pixels");
    assert_refused(b"\x89PNG\r\n\x1a\n", "has no size");
    let why = check_bytes(&png(1, 1), "text/plain").expect_err("it is a picture");
    assert!(why.contains("declared as text/plain, but looks like image/png"), "{why}");
    let why = check_bytes(b"<html>", "image/png").expect_err("it is none");
    assert!(why.contains("looks like something else"), "{why}");
}
