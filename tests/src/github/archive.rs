//! Archives as GitHub packs them.

use flate2::{Compression, write::GzEncoder};

/// Files in one folder, after a global header with the commit's id. Nothing is checked: tests pack
/// invalid archives as well.
pub fn tarball(folder: &str, commit: &str, files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut archive = tar::Builder::new(GzEncoder::new(Vec::new(), Compression::fast()));
    let comment = format!("52 comment={commit}\n");
    append(&mut archive, "pax_global_header", comment.as_bytes(), tar::EntryType::XGlobalHeader);
    append(&mut archive, &format!("{folder}/"), &[], tar::EntryType::Directory);
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(if content.starts_with(b"#!") { 0o755 } else { 0o644 });
        archive
            .append_data(&mut header, format!("{folder}/{path}"), *content)
            .expect("memory takes everything");
    }
    let packed = archive.into_inner().and_then(GzEncoder::finish);
    packed.expect("memory takes everything")
}

fn append(
    archive: &mut tar::Builder<GzEncoder<Vec<u8>>>,
    name: &str,
    content: &[u8],
    kind: tar::EntryType,
) {
    let mut header = tar::Header::new_ustar();
    header.set_size(content.len() as u64);
    header.set_mode(0o755);
    header.set_entry_type(kind);
    header.set_path(name).expect("the name is short");
    header.set_cksum();
    archive.append(&header, content).expect("memory takes everything");
}
