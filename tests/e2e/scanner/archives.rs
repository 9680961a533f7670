//! Archives that were sent, and archives that are hostile.

use std::{
    io::{Cursor, Write as _},
    path::{Path, PathBuf},
};

use flate2::{Compression, write::GzEncoder};
use zip::{CompressionMethod, ZipWriter, write::SimpleFileOptions};

use super::*;

/// All files below a folder.
pub(super) fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let below = |path: PathBuf| if path.is_dir() { files(&path) } else { vec![path] };
    entries.flat_map(|entry| below(entry.unwrap().path())).collect()
}

#[tokio::test]
async fn an_archive_that_was_sent_is_sealed_and_goes_with_its_scan() {
    let temporary = tempfile::tempdir().unwrap();
    let (mesh, _github) = begin_with(&[("TMPDIR", temporary.path().to_str().unwrap())]).await;
    let blobs = mesh.home().join("data/blobs");
    let secret = format!("token = \"{PLANTED}\"\n");
    let packed = tarball(
        "ledger",
        &"0".repeat(40),
        &[("tools/report.py", REPORT.as_bytes()), ("config.toml", secret.as_bytes())],
    );
    mesh.scripted_agent("m", &json!([{"text": answer(&[good()])}])).await.unwrap();
    // No model answers before what is there meanwhile has been looked at.
    mesh.pause(Service::Providers).unwrap();
    let upload = v1::ScanUpload { archive: packed.clone(), name: "ledger.tar.gz".into() };
    let spec = v1::ScanSpec { source: Some(v1::scan_spec::Source::Upload(upload)), ..of("", "m") };
    let request = |key: &str| v1::CreateScanRequest {
        spec: Some(spec.clone()),
        idempotency_key: key.to_owned(),
    };
    let scans = mesh.client().unwrap().scans();
    let mut made = Vec::new();
    // Two of the same archive; the second request is heard twice.
    for key in ["one", "two", "two"] {
        let scan = scans.clone().create_scan(request(key)).await.unwrap().into_inner();
        made.push(id(scan.metadata.as_ref()));
    }
    assert_eq!(made[1], made[2]);
    in_phase(&mesh, &made[0], Exploring).await;
    let stored = files(&blobs);
    assert_eq!(stored.len(), 2, "{stored:?}");
    for file in stored {
        let content = std::fs::read(file).unwrap();
        assert!(!content.windows(64).any(|part| part == &packed[..64]));
    }
    // As a process leaves it that is killed while it reads the archive.
    let left = mesh.scans().join(format!(".unmasked-{}/.taking-x", made[0]));
    std::fs::create_dir_all(&left).unwrap();
    std::fs::write(left.join("archive"), &packed).unwrap();
    mesh.resume(Service::Providers).unwrap();
    for scan in &made[..2] {
        let status = in_phase(&mesh, scan, Review).await;
        assert!(status.candidates == 1 && status.secrets_masked >= 1, "{status:?}");
    }
    clean(&mesh).await;
    assert_eq!((files(&blobs), files(temporary.path())), (Vec::new(), Vec::new()));
    assert!(!mesh.database.contents().await.contains(PLANTED));
}

/// An archive of entries of which nothing is checked: their names, kinds and links, and what they
/// hold.
fn hostile(entries: &[(&str, tar::EntryType, &str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::best()));
    for (name, kind, link, content) in entries {
        let mut header = tar::Header::new_gnu();
        let raw = header.as_old_mut();
        raw.name[..name.len()].copy_from_slice(name.as_bytes());
        raw.linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(*kind);
        header.set_mode(0o644);
        header.set_size(content.len() as u64);
        header.set_cksum();
        archive.append(&header, *content).unwrap();
    }
    archive.into_inner().and_then(GzEncoder::finish).unwrap()
}

#[tokio::test]
async fn a_hostile_archive_ends_its_scan_with_a_reason_and_nothing_else() {
    let (mesh, github) = begin().await;
    mesh.scripted_agent("m", &json!([{"text": answer(&[good()])}])).await.unwrap();
    let file = tar::EntryType::Regular;
    let whole = tarball("t", &"0".repeat(40), &[("a.txt", REPORT.as_bytes())]);
    let zeros = vec![0; 64 << 20];
    let cases = [
        ("escape", hostile(&[("t/a", file, "", b"a"), ("t/../../x", file, "", b"x")])),
        ("bomb", hostile(&[("t/zeros", file, "", &zeros)])),
        ("cut", whole[..whole.len() / 2].to_vec()),
    ];
    for (number, (name, archive)) in cases.into_iter().enumerate() {
        let repository = format!("octo/{name}");
        github.commit_archive(&repository, &format!("{:040x}", number + 1), archive);
        let scan = create(&mesh, of(&repository, "m")).await;
        let status = in_phase(&mesh, &scan, v1::ScanPhase::Failed).await;
        assert!(status.reason.starts_with("the archive"), "{name}: {status:?}");
        let told = mesh.client().unwrap().conversation(&status.task_id).transcript().await;
        assert!(format!("{told:?}").len() < 200, "{name}: nobody asks the task anything: {told:?}");
        clean(&mesh).await;
        assert!(!mesh.workspace().join("x").exists() && !mesh.scans().join("x").exists(), "{name}");
    }
    // A link is left out, whatever it leads to; the next scan works.
    let link = tar::EntryType::Symlink;
    let archive = hostile(&[
        ("t/tools/report.py", file, "", REPORT.as_bytes()),
        ("t/out", link, "/etc/passwd", b""),
    ]);
    github.commit_archive("octo/link", &format!("{:040x}", 9), archive);
    let scan = create(&mesh, of("octo/link", "m")).await;
    let status = in_phase(&mesh, &scan, Review).await;
    assert_eq!((status.candidates, status.files, status.files_skipped), (1, 1, 1), "{status:?}");
}

/// A zip archive of entries with their modes, of which nothing is checked.
fn zipped(entries: &[(&str, &[u8], u32)]) -> Vec<u8> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for (name, content, mode) in entries {
        let options = SimpleFileOptions::default()
            .compression_method(CompressionMethod::Deflated)
            .unix_permissions(*mode);
        match mode & 0o170_000 {
            0o120_000 => {
                archive.add_symlink(*name, str::from_utf8(content).unwrap(), options).unwrap()
            }
            _ => {
                archive.start_file(*name, options).unwrap();
                archive.write_all(content).unwrap();
            }
        }
    }
    archive.finish().unwrap().into_inner()
}

/// A scan of an archive that is sent.
fn sent(name: &str, archive: Vec<u8>) -> v1::ScanSpec {
    let upload = v1::ScanUpload { archive, name: name.to_owned() };
    v1::ScanSpec { source: Some(v1::scan_spec::Source::Upload(upload)), ..of("", "m") }
}

#[tokio::test]
async fn a_zip_that_was_sent_is_scanned() {
    let (mesh, _github) = begin().await;
    mesh.scripted_agent("m", &json!([{"text": answer(&[good()])}])).await.unwrap();
    let config = format!("[api]\ntoken = \"{PLANTED}\"\n");
    let archive = zipped(&[
        ("ledger-2.1/README.md", ledger("").as_bytes(), 0o644),
        ("ledger-2.1/tools/report.py", REPORT.as_bytes(), 0o755),
        ("ledger-2.1/config.toml", config.as_bytes(), 0o644),
        // What cannot be had is left out.
        ("ledger-2.1/passwd", b"/etc/passwd", 0o120_777),
    ]);
    let scan = create(&mesh, sent("ledger.zip", archive)).await;
    let status = in_phase(&mesh, &scan, Review).await;
    assert_eq!((status.files, status.files_skipped, status.candidates), (3, 1, 1), "{status:?}");
    assert!(status.secrets_masked >= 1, "{status:?}");
    let told = transcript(&mesh, &scan).await;
    assert!(
        told.contains("Totals of a ledger")
            && told.contains("tools/report.py")
            && !told.contains(PLANTED),
        "{told}"
    );
    clean(&mesh).await;
    assert_eq!(files(&mesh.home().join("data/blobs")), Vec::<PathBuf>::new());
}

#[tokio::test]
async fn a_hostile_archive_that_was_sent_ends_its_scan_and_nothing_of_it_stays() {
    let (mesh, _github) = begin().await;
    mesh.scripted_agent("m", &json!([{"text": answer(&[good()])}])).await.unwrap();
    let (file, zeros) = (tar::EntryType::Regular, vec![0; 40 << 20]);
    let outside = mesh.workspace().join("x");
    let absolute = outside.display().to_string();
    let honest = zipped(&[("t/a.py", REPORT.as_bytes(), 0o644)]);
    // Its directory says that the file is called otherwise than the file itself does.
    let mut lying = honest.clone();
    let at = lying.windows(6).rposition(|bytes| bytes == b"t/a.py").unwrap();
    lying[at..at + 6].copy_from_slice(b"t/b.py");
    let cases = [
        (
            "up.zip",
            zipped(&[("t/a.py", REPORT.as_bytes(), 0o644), ("t/../../x", b"x", 0o644)]),
            "the archive",
        ),
        (
            "away.zip",
            zipped(&[("t/a.py", REPORT.as_bytes(), 0o644), (&absolute, b"x", 0o644)]),
            "the archive",
        ),
        ("bomb.zip", zipped(&[("t/zeros", &zeros, 0o644)]), "the archive"),
        ("cut.zip", honest[..honest.len() - 30].to_vec(), "the archive"),
        ("lying.zip", lying, "the archive"),
        (
            "up.tar.gz",
            hostile(&[("t/a", file, "", b"a"), ("t/../../x", file, "", b"x")]),
            "the archive",
        ),
        ("bomb.tar.gz", hostile(&[("t/zeros", file, "", &zeros)]), "the archive"),
        (
            "no.zip",
            b"#!/bin/sh\nrm -rf /\n".to_vec(),
            "neither a tar archive in gzip nor a zip archive",
        ),
    ];
    for (name, archive, why) in cases {
        let scan = create(&mesh, sent(name, archive)).await;
        let status = in_phase(&mesh, &scan, v1::ScanPhase::Failed).await;
        assert!(status.reason.contains(why), "{name}: {status:?}");
        assert_eq!((status.files, status.candidates), (0, 0), "{name}: {status:?}");
        let told = mesh.client().unwrap().conversation(&status.task_id).transcript().await;
        assert!(format!("{told:?}").len() < 200, "{name}: nobody asks the task anything: {told:?}");
        clean(&mesh).await;
        assert_eq!(files(&mesh.home().join("data/blobs")), Vec::<PathBuf>::new(), "{name}");
        assert!(!outside.exists() && !mesh.scans().join("x").exists(), "{name}");
    }
    // What is too large is refused before anything is made for it.
    let spec = sent("large.tar.gz", vec![0; (3 << 20) + 1]);
    let request = v1::CreateScanRequest { spec: Some(spec), ..Default::default() };
    let refused = mesh.client().unwrap().scans().create_scan(request).await.unwrap_err();
    assert!(
        refused.code() == Code::InvalidArgument && refused.message().contains("3,145,728 bytes"),
        "{refused}"
    );
    // The next honest one gets through.
    let scan = create(
        &mesh,
        sent("honest.zip", zipped(&[("t/tools/report.py", REPORT.as_bytes(), 0o644)])),
    )
    .await;
    assert_eq!(in_phase(&mesh, &scan, Review).await.candidates, 1);
}
