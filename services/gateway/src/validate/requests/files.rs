//! Files.

use construct_bus::files::Sha256;
use construct_domain::{FileId, OrganizationId};
use construct_proto::v1::{
    self, CreateFileRequest, DeleteFileRequest, DownloadFileRequest, ListFilesRequest,
    UpdateFileRequest, UploadPartRequest,
};
use construct_store::{Cursor, FileFilter, FileState};
use tonic::Status;

use crate::{
    files::work::Limits,
    page::{Column, Page},
    validate::{Violations, thousands},
};

const FILE_NAME_CHARS: usize = 256;
const MEDIA_TYPE_CHARS: usize = 100;
/// Bytes of a part. In JSON it is a third longer, and has to fit into a request all the same.
pub(crate) const PART_BYTES: usize = 2 * 1024 * 1024;
const COLUMNS: [Column; 2] = [Column::CreatedAt, Column::UpdatedAt];

/// Returns what the content's hash has to be, if the request says so.
pub(crate) fn create_file(
    request: &CreateFileRequest,
    limits: &Limits,
) -> Result<Option<Sha256>, Status> {
    let mut violations = Violations::new();
    violations.require(request.spec.is_some(), "spec", || "is required".into());
    let spec = request.spec.clone().unwrap_or_default();
    name(&mut violations, "spec.name", &spec.name);
    let kind = &spec.media_type;
    violations.require(kind.is_empty() || is_media_type(kind), "spec.media_type", || {
        format!("must be like `application/pdf`, in small letters and without parameters, of at most {MEDIA_TYPE_CHARS} characters")
    });
    violations.require(kind.is_empty() || limits.takes(kind), "spec.media_type", || {
        format!(
            "files of this type are not taken here; those that are: {}",
            limits.types.join(", ")
        )
    });
    let fits = u64::try_from(spec.size).is_ok_and(|size| size <= limits.max_bytes);
    violations.require(fits, "spec.size", || {
        let most = thousands(usize::try_from(limits.max_bytes).unwrap_or(usize::MAX));
        format!("must be between 0 and {most} bytes, is {}", spec.size)
    });
    let expected = sha256(&mut violations, "spec.sha256", &spec.sha256);
    violations.idempotency_key(&request.idempotency_key);
    violations.finish().map(|()| expected)
}

pub(crate) fn upload_part(request: &UploadPartRequest) -> Result<FileId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("file", &request.file);
    violations.require(request.offset >= 0, "offset", || "must not be negative".into());
    violations.require((1..=PART_BYTES).contains(&request.data.len()), "data", || {
        format!(
            "must have 1 to {} bytes, has {}",
            thousands(PART_BYTES),
            thousands(request.data.len())
        )
    });
    finish(violations, id)
}

pub(crate) fn file(text: &str) -> Result<FileId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("file", text);
    finish(violations, id)
}

pub(crate) fn list_files(
    organization: OrganizationId,
    request: &ListFilesRequest,
) -> Result<(Page<Cursor>, FileFilter), Status> {
    let mut violations = Violations::new();
    let filter = request.filter.clone().unwrap_or_default();
    violations.chars("filter.name", &filter.name, FILE_NAME_CHARS);
    let kind = filter.media_type.strip_suffix("/*");
    let is_kind = kind.is_some_and(|kind| is_media_type(&format!("{kind}/x")));
    let fine = filter.media_type.is_empty() || is_kind || is_media_type(&filter.media_type);
    violations.require(fine, "filter.media_type", || {
        "must be like `image/png` or `image/*`, or empty".into()
    });
    let sha256 = sha256(&mut violations, "filter.sha256", &filter.sha256);
    let state = v1::FileState::try_from(filter.state);
    violations.require(state.is_ok(), "filter.state", || "is not a known state".into());
    let page = Page::read(
        request.page.as_ref(),
        "ListFiles",
        organization,
        &filter,
        &COLUMNS,
        &mut violations,
    );
    violations.finish()?;
    let some = |text: String| (!text.is_empty()).then_some(text);
    let media_kind = filter.media_type.strip_suffix('*').filter(|_| is_kind).map(str::to_owned);
    let filter = FileFilter {
        name: some(filter.name),
        media_type: some(filter.media_type).filter(|_| !is_kind),
        media_kind,
        sha256: sha256.map(|sha256| *sha256.as_bytes()),
        state: match state {
            Ok(v1::FileState::Uploading) => Some(FileState::Uploading),
            Ok(v1::FileState::Checking) => Some(FileState::Checking),
            Ok(v1::FileState::Ready) => Some(FileState::Ready),
            Ok(v1::FileState::Refused) => Some(FileState::Refused),
            Ok(v1::FileState::Unspecified) | Err(_) => None,
        },
    };
    Ok((page, filter))
}

pub(crate) fn update_file(request: &UpdateFileRequest) -> Result<FileId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("file", &request.file);
    if let Some(new) = &request.name {
        name(&mut violations, "name", new);
    }
    violations.revision(request.revision);
    violations.idempotency_key(&request.idempotency_key);
    finish(violations, id)
}

pub(crate) fn delete_file(request: &DeleteFileRequest) -> Result<FileId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("file", &request.file);
    violations.idempotency_key(&request.idempotency_key);
    finish(violations, id)
}

pub(crate) fn download_file(request: &DownloadFileRequest) -> Result<FileId, Status> {
    let mut violations = Violations::new();
    let id = violations.id("file", &request.file);
    violations.require(request.offset >= 0, "offset", || "must not be negative".into());
    violations.require(request.length >= 0, "length", || {
        "must not be negative; 0 means to the end".into()
    });
    finish(violations, id)
}

fn finish(violations: Violations, id: Option<FileId>) -> Result<FileId, Status> {
    violations.finish()?;
    // What is no id was reported.
    id.ok_or_else(|| Status::invalid_argument("file: is required"))
}

fn name(violations: &mut Violations, field: &str, name: &str) {
    violations.require(!name.trim().is_empty(), field, || "is required".into());
    violations.chars(field, name, FILE_NAME_CHARS);
    violations.one_line(field, name);
    let is_path = name.contains('/') || name == "." || name == "..";
    violations.require(!is_path, field, || "must be the name of a file, without a folder".into());
}

fn sha256(violations: &mut Violations, field: &str, text: &str) -> Option<Sha256> {
    if text.is_empty() {
        return None;
    }
    let parsed = text.parse::<Sha256>();
    violations.require(parsed.is_ok(), field, || {
        "must be 64 hexadecimal digits, small ones, or empty".into()
    });
    parsed.ok()
}

/// Two words of RFC 6838, in small letters.
fn is_media_type(text: &str) -> bool {
    let word = |word: &str| {
        let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        word.bytes().next().is_some_and(plain)
            && word.bytes().all(|byte| plain(byte) || b"!#$&-^_.+".contains(&byte))
    };
    text.len() <= MEDIA_TYPE_CHARS
        && text.split_once('/').is_some_and(|(kind, rest)| word(kind) && word(rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::tests::fields;

    #[test]
    fn a_file_has_a_name_a_type_and_a_size_that_are_taken() {
        let limits = Limits { max_bytes: 100, types: vec!["text/*".into()] };
        let create = |name: &str, media_type: &str, size: i64, sha256: &str| {
            let (name, media_type, sha256) = (name.into(), media_type.into(), sha256.into());
            let spec = Some(v1::FileSpec { name, media_type, size, sha256 });
            create_file(&CreateFileRequest { spec, ..CreateFileRequest::default() }, &limits)
        };
        let hash = "a".repeat(64);
        assert!(create("report.csv", "text/csv", 100, &hash).expect("fine").is_some());
        assert!(create("Übersicht 2026.txt", "", 0, "").expect("fine").is_none());
        for (name, media_type, size, sha256, field) in [
            ("", "text/csv", 1, "", "spec.name"),
            ("a/b", "text/csv", 1, "", "spec.name"),
            ("..", "text/csv", 1, "", "spec.name"),
            ("a\nb", "text/csv", 1, "", "spec.name"),
            ("a", "text/CSV", 1, "", "spec.media_type"),
            ("a", "text", 1, "", "spec.media_type"),
            ("a", "image/png", 1, "", "spec.media_type"),
            ("a", "text/csv", 101, "", "spec.size"),
            ("a", "text/csv", -1, "", "spec.size"),
            ("a", "text/csv", 1, "A", "spec.sha256"),
        ] {
            let status = create(name, media_type, size, sha256).expect_err(field);
            assert!(
                fields(&status).iter().all(|wrong| wrong == field),
                "{name} {media_type}: {status:?}"
            );
        }
    }

    #[test]
    fn a_list_is_of_a_type_or_of_a_kind_of_types() {
        let list = |media_type: &str| {
            let filter = v1::list_files_request::Filter {
                media_type: media_type.into(),
                ..Default::default()
            };
            list_files(
                OrganizationId::LOCAL,
                &ListFilesRequest { page: None, filter: Some(filter) },
            )
        };
        let filter = list("image/*").expect("fine").1;
        assert_eq!((filter.media_type, filter.media_kind.as_deref()), (None, Some("image/")));
        let filter = list("image/png").expect("fine").1;
        assert_eq!((filter.media_type.as_deref(), filter.media_kind), (Some("image/png"), None));
        for wrong in ["*", "image", "image/**", "*/png"] {
            assert_eq!(
                fields(&list(wrong).map(drop).expect_err("refused")),
                ["filter.media_type"],
                "{wrong}"
            );
        }
    }
}
