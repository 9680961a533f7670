//! Files.

use construct_bus::files::Sha256;
use construct_proto::v1::{self, CreateFileRequest, list_files_request::Filter};
use construct_store::{FileFilter, FileState};
use tonic::Status;

use crate::{
    files::work::Limits,
    validate::{Violations, thousands},
};

/// Maximum size of a part in bytes. JSON makes it a third longer, and it must still fit into a
/// request.
pub(crate) const PART_BYTES: usize = 2 * 1024 * 1024;

/// Returns the expected hash of the content, if the request has one.
pub(crate) fn create_file(
    request: &CreateFileRequest,
    limits: &Limits,
) -> Result<Option<Sha256>, Status> {
    let mut violations = Violations::in_request(request);
    let spec = request.spec.clone().unwrap_or_default();
    let kind = &spec.media_type;
    let is_accepted =
        kind.is_empty() || violations.concern("spec.media_type") || limits.accepts(kind);
    violations.require(is_accepted, "spec.media_type", || {
        format!("files of this type are not accepted; accepted types: {}", limits.types.join(", "))
    });
    let fits = u64::try_from(spec.size).is_ok_and(|size| size <= limits.max_bytes);
    violations.require(fits || spec.size < 0, "spec.size", || {
        let max = thousands(usize::try_from(limits.max_bytes).unwrap_or(usize::MAX));
        format!("must be between 0 and {max} bytes, is {}", spec.size)
    });
    violations.finish()?;
    Ok(spec.sha256.parse().ok())
}

/// Converts the filter of a list.
pub(crate) fn file_filter(filter: Filter) -> FileFilter {
    let state = match filter.state() {
        v1::FileState::Unspecified => None,
        v1::FileState::Uploading => Some(FileState::Uploading),
        v1::FileState::Checking => Some(FileState::Checking),
        v1::FileState::Ready => Some(FileState::Ready),
        v1::FileState::Refused => Some(FileState::Refused),
    };
    let some = |text: String| (!text.is_empty()).then_some(text);
    let media_kind = filter.media_type.strip_suffix('*').map(str::to_owned);
    FileFilter {
        name: some(filter.name),
        media_type: some(filter.media_type).filter(|_| media_kind.is_none()),
        media_kind,
        sha256: filter.sha256.parse::<Sha256>().ok().map(|sha256| *sha256.as_bytes()),
        state,
    }
}

#[cfg(test)]
mod tests {
    use construct_domain::OrganizationId;
    use construct_store::Cursor;

    use super::*;
    use crate::{
        page::Page,
        validate::{requests, tests::fields},
    };

    #[test]
    fn part_size_matches_the_contract() {
        let part =
            construct_proto::DESCRIPTORS.get_message_by_name("construct.v1.UploadPartRequest");
        let data = part.and_then(|part| part.get_field_by_name("data")).expect("it has data");
        let most = construct_proto::options::rule(&data).max_bytes.expect("it has a limit");
        assert_eq!(most as usize, PART_BYTES);
    }

    #[test]
    fn file_name_type_and_size_are_validated() {
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
    fn list_filters_by_media_type_or_range() {
        let list = |media_type: &str| {
            let filter = Filter { media_type: media_type.into(), ..Filter::default() };
            let request = v1::ListFilesRequest { page: None, filter: Some(filter.clone()) };
            let page: Result<Page<Cursor>, _> =
                requests::list(OrganizationId::LOCAL, &request, &[crate::page::Column::CreatedAt]);
            page.map(|page| (page, file_filter(filter)))
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
