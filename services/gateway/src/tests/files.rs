//! Files: a download equals the upload, however it was split, and files that must not be accepted
//! are refused.

use std::collections::BTreeMap;

use construct_bus::files::{self, Sha256};
use construct_domain::{
    FileId, OrganizationId,
    access::{Role, Scope},
};
use construct_proto::v1::{self, file_service_client::FileServiceClient};
use construct_store::{Limits, NewPart, UPLOAD_TIMEOUT};
use futures::future::join_all;
use jiff::Timestamp;
use prost::bytes::Bytes;
use tonic::{Code, Status, transport::Channel};
use tonic_types::StatusExt as _;

use super::{
    harness::*,
    walk::{create_key, create_organization, login_required, with_key, write},
};
use crate::{Config, files::work::Files, organizations::response_output};

fn client(gateway: &Gateway) -> FileServiceClient<Channel> {
    FileServiceClient::new(gateway.channel())
}

fn folder(gateway: &Gateway) -> files::Store {
    files::Store::open(gateway.context.common().blob_dir()).expect("opened")
}

fn spec(name: &str, content: &[u8]) -> v1::FileSpec {
    let size = i64::try_from(content.len()).expect("short");
    v1::FileSpec { name: name.into(), size, ..v1::FileSpec::default() }
}

fn create(spec: v1::FileSpec) -> v1::CreateFileRequest {
    v1::CreateFileRequest { spec: Some(spec), ..v1::CreateFileRequest::default() }
}

async fn begin_upload(gateway: &Gateway, spec: v1::FileSpec) -> v1::File {
    client(gateway).create_file(create(spec)).await.expect("created").into_inner()
}

async fn upload_part(
    gateway: &Gateway,
    file: &v1::File,
    offset: usize,
    data: &[u8],
) -> Result<v1::File, Status> {
    let offset = i64::try_from(offset).expect("small");
    let request =
        v1::UploadPartRequest { file: id(file.metadata.clone()), offset, data: data.to_vec() };
    client(gateway).upload_part(request).await.map(tonic::Response::into_inner)
}

fn state(file: &v1::File) -> v1::FileState {
    file.status.as_ref().expect("it has one").state()
}

async fn get(gateway: &Gateway, file: &v1::File) -> v1::File {
    let request = v1::GetFileRequest { file: id(file.metadata.clone()) };
    client(gateway).get_file(request).await.expect("there").into_inner()
}

/// A file after its check.
async fn checked_file(gateway: &Gateway, file: &v1::File) -> v1::File {
    wait_until(
        "it is checked",
        || get(gateway, file),
        |file| state(file) != v1::FileState::Checking,
    )
    .await
}

/// Uploads a file in one part.
async fn upload(gateway: &Gateway, name: &str, content: &[u8]) -> v1::File {
    let file = begin_upload(gateway, spec(name, content)).await;
    upload_part(gateway, &file, 0, content).await.expect("uploaded");
    checked_file(gateway, &file).await
}

async fn download(
    gateway: &Gateway,
    file: &v1::File,
    offset: i64,
    length: i64,
) -> Result<Vec<u8>, Status> {
    let request = v1::DownloadFileRequest { file: id(file.metadata.clone()), offset, length };
    let mut stream = client(gateway).download_file(request).await?.into_inner();
    let mut content = Vec::new();
    while let Some(piece) = stream.message().await? {
        assert_eq!(piece.offset, offset + i64::try_from(content.len()).expect("small"));
        content.extend(piece.data);
    }
    Ok(content)
}

fn noise(bytes: u32) -> Vec<u8> {
    (0..bytes.div_ceil(4))
        .flat_map(|n| n.wrapping_mul(2_654_435_761).to_le_bytes())
        .take(bytes as usize)
        .collect()
}

fn details(status: &Status) -> (String, String) {
    let details = status.get_error_details();
    let violation = &details.precondition_failure().expect("there is one").violations[0];
    (violation.r#type.clone(), violation.description.clone())
}

#[tokio::test]
async fn file_uploaded_in_parts_downloads_unchanged() {
    let gateway = Gateway::start().await;
    let content = noise(3_000_001);
    let with_hash = v1::FileSpec {
        sha256: Sha256::digest(&content).to_string(),
        ..spec("Übersicht.bin", &content)
    };
    let file = begin_upload(&gateway, with_hash.clone()).await;
    assert_eq!(state(&file), v1::FileState::Uploading);
    expect_error(download(&gateway, &file, 0, 0).await, Code::FailedPrecondition);
    let half =
        upload_part(&gateway, &file, 0, &content[..2_000_000]).await.expect("the first part");
    assert_eq!(
        (state(&half), half.status.as_ref().map(|it| it.received)),
        (v1::FileState::Uploading, Some(2_000_000))
    );
    // A wrong offset is answered with the right one. A part can be repeated when its answer was
    // lost.
    let status = expect_error(upload_part(&gateway, &file, 0, b"x").await, Code::Aborted);
    assert_eq!(details(&status), ("OFFSET".into(), "2000000".into()));
    expect_error(upload_part(&gateway, &file, 2_000_001, b"x").await, Code::Aborted);
    assert_eq!(upload_part(&gateway, &file, 0, &content[..2_000_000]).await.expect("again"), half);
    expect_error(upload_part(&gateway, &file, 2_000_000, &content).await, Code::InvalidArgument);
    upload_part(&gateway, &file, 2_000_000, &content[2_000_000..]).await.expect("the last part");
    let file = checked_file(&gateway, &file).await;
    let status = file.status.clone().expect("it has one");
    assert_eq!(
        (status.state(), status.sha256.as_str(), status.expires_at),
        (v1::FileState::Ready, with_hash.sha256.as_str(), None)
    );
    assert_eq!(
        upload_part(&gateway, &file, 2_000_000, &content[2_000_000..]).await.expect("again"),
        file
    );
    expect_error(
        upload_part(&gateway, &file, 2_000_000, &noise(1_000_002)[1..]).await,
        Code::FailedPrecondition,
    );
    assert!(download(&gateway, &file, 0, 0).await.expect("all of it") == content);
    assert_eq!(download(&gateway, &file, 7, 3).await.expect("a part"), content[7..10]);
    assert_eq!(download(&gateway, &file, 3_000_001, 0).await.expect("nothing"), [0_u8; 0]);
    expect_error(download(&gateway, &file, 3_000_002, 0).await, Code::OutOfRange);

    // A second file with the same content is ready at once. The content is removed with the last
    // file that has it.
    let second = begin_upload(&gateway, v1::FileSpec { name: "again".into(), ..with_hash }).await;
    assert_eq!(state(&second), v1::FileState::Ready);
    let folder = folder(&gateway);
    let sha256: Sha256 = status.sha256.parse().expect("a hash");
    for (file, remains) in [(file, true), (second, false)] {
        let request =
            v1::DeleteFileRequest { file: id(file.metadata), ..v1::DeleteFileRequest::default() };
        client(&gateway).delete_file(request.clone()).await.expect("deleted");
        expect_error(client(&gateway).delete_file(request).await, Code::NotFound);
        let counts = || async {
            let head = folder.head(OrganizationId::LOCAL, &sha256).await.expect("it is read");
            (gateway.store().file_removals(1).await.expect("read").len(), head.is_some())
        };
        assert_eq!(
            wait_until("removals are done", counts, |(removals, _)| *removals == 0).await.1,
            remains
        );
    }
    let empty = begin_upload(&gateway, spec("empty", b"")).await;
    assert_eq!(state(&checked_file(&gateway, &empty).await), v1::FileState::Ready);
    assert_eq!(download(&gateway, &empty, 0, 0).await.expect("nothing"), [0_u8; 0]);
}

#[tokio::test]
async fn concurrent_parts_at_one_offset_store_exactly_one() {
    let gateway = Gateway::start().await;
    let file = begin_upload(&gateway, spec("race", &[0; 3000])).await;
    let mut content: Vec<u8> = Vec::new();
    for round in 0..3 {
        let parts: Vec<Vec<u8>> = (0..6).map(|sender| vec![10 * round + sender; 1000]).collect();
        let sent =
            parts.iter().map(|data| upload_part(&gateway, &file, 1000 * usize::from(round), data));
        let mut accepted = Vec::new();
        for (data, result) in parts.iter().zip(join_all(sent).await) {
            match result {
                Ok(_) => accepted.push(data.clone()),
                Err(status) => assert!(
                    matches!(status.code(), Code::Aborted | Code::FailedPrecondition),
                    "{status:?}"
                ),
            }
        }
        let [winner] = &accepted[..] else {
            panic!("{} were accepted in round {round}", accepted.len())
        };
        content.extend(winner);
    }
    let file = checked_file(&gateway, &file).await;
    assert_eq!(state(&file), v1::FileState::Ready);
    assert_eq!(download(&gateway, &file, 0, 0).await.expect("it can be read"), content);
}

#[tokio::test]
async fn file_that_fails_its_check_is_refused_and_removed() {
    let config = Config {
        gateway_files_max_bytes: 1_000_000,
        gateway_files_types: vec!["text/*".into(), "application/*".into()],
        ..Config::default()
    };
    let gateway = Gateway::start_local(config).await;
    let bomb = {
        let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::best());
        std::io::Write::write_all(&mut packed, &vec![0; 64 * 1024 * 1024]).expect("to memory");
        packed.finish().expect("to memory")
    };
    let png = [&b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\0\x01\0\0\0\x01\x08\x06\0\0\0"[..], &[0; 20]]
        .concat();
    for (content, media_type, sha256, reason) in [
        (&b"words"[..], "", Sha256::digest(b"other words").to_string(), "SHA-256"),
        (&b"words"[..], "application/pdf", String::new(), "looks like something else"),
        (&bomb[..], "application/gzip", String::new(), "bytes when decompressed"),
        (&png[..], "text/plain", String::new(), "looks like image/png"),
        (&png[..], "", String::new(), "image/png are not accepted"),
    ] {
        let spec = v1::FileSpec { media_type: media_type.into(), sha256, ..spec("x", content) };
        let file = begin_upload(&gateway, spec).await;
        upload_part(&gateway, &file, 0, content).await.expect("it is accepted");
        let file = checked_file(&gateway, &file).await;
        let status = file.status.clone().expect("it has one");
        assert_eq!(
            (status.state(), status.sha256.as_str()),
            (v1::FileState::Refused, ""),
            "{status:?}"
        );
        assert!(status.reason.contains(reason) && status.expires_at.is_some(), "{status:?}");
        let again =
            expect_error(upload_part(&gateway, &file, 0, content).await, Code::FailedPrecondition);
        assert!(again.message().contains(reason), "{again:?}");
        expect_error(download(&gateway, &file, 0, 0).await, Code::FailedPrecondition);
        assert_eq!(
            folder(&gateway)
                .head(OrganizationId::LOCAL, &Sha256::digest(content))
                .await
                .expect("it is read"),
            None
        );
    }
    let large = client(&gateway)
        .create_file(create(v1::FileSpec { size: 1_000_001, ..spec("x", b"") }))
        .await;
    expect_error(large, Code::InvalidArgument);
    let image = client(&gateway)
        .create_file(create(v1::FileSpec { media_type: "image/png".into(), ..spec("x", b"x") }))
        .await;
    expect_error(image, Code::InvalidArgument);
}

#[tokio::test]
async fn upload_left_by_a_killed_gateway_is_finished() {
    let gateway = Gateway::start().await;
    let file = begin_upload(&gateway, spec("left.txt", b"left behind")).await;
    let file_id: FileId = id(file.metadata.clone()).parse().expect("an id");
    // The state that a gateway leaves when it is killed after the last part.
    let bytes = Bytes::from_static(b"left behind");
    let name = folder(&gateway)
        .put_part(OrganizationId::LOCAL, file_id, bytes.clone())
        .await
        .expect("put");
    let sha256 = *Sha256::digest(&bytes).as_bytes();
    let last = NewPart { position: 0, size: 11, part: name.uuid(), sha256 };
    gateway
        .store()
        .file_part_add(&write(OrganizationId::LOCAL), file_id, last, |_| response_output(&()))
        .await
        .expect("taken");
    let file = checked_file(&gateway, &file).await;
    assert_eq!(state(&file), v1::FileState::Ready);
    assert_eq!(download(&gateway, &file, 0, 0).await.expect("it can be read"), bytes);
}

#[tokio::test]
async fn sweep_removes_abandoned_uploads_and_keeps_ready_files() {
    let gateway = Gateway::start().await;
    let ready = upload(&gateway, "ready.txt", b"ready").await;
    let begun = begin_upload(&gateway, spec("begun.txt", b"begun")).await;
    upload_part(&gateway, &begun, 0, b"beg").await.expect("a part");
    let blob_dir = gateway.context.common().blob_dir();
    let files = Files::new(gateway.store(), blob_dir.clone(), &Config::default()).expect("opened");
    files.sweep_once(Timestamp::now() + UPLOAD_TIMEOUT * 2).await;
    let abandoned = v1::GetFileRequest { file: id(begun.metadata.clone()) };
    expect_error(client(&gateway).get_file(abandoned).await, Code::NotFound);
    let upload =
        blob_dir.join(format!("files/{}/uploads/{}", OrganizationId::LOCAL, id(begun.metadata)));
    let exists = || async { upload.exists() };
    assert!(!wait_until("its parts are removed", exists, |exists| !exists).await);
    assert_eq!(download(&gateway, &ready, 0, 0).await.expect("it stays"), b"ready");
}

#[tokio::test]
async fn storage_is_counted_per_organization_and_not_disclosed() {
    let limits = Limits { storage_bytes: Some(1000), ..Limits::default() };
    let config = Config {
        gateway_tiers: BTreeMap::from([("small".to_owned(), limits)]),
        gateway_tier: "small".into(),
        ..login_required()
    };
    let gateway = Gateway::start_with(config).await;
    let mut keys = Vec::new();
    for slug in ["one", "two"] {
        let owner = create_organization(&gateway, slug).await;
        keys.push(create_key(&gateway, owner, Role::Member, &[Scope::FilesWrite], None).await.1);
    }
    let content = noise(600);
    let spec = v1::FileSpec { sha256: Sha256::digest(&content).to_string(), ..spec("x", &content) };
    let begin = async |key: &str, spec: &v1::FileSpec| {
        client(&gateway)
            .create_file(with_key(create(spec.clone()), Some(key)))
            .await
            .map(tonic::Response::into_inner)
    };
    let [one, two] = [&keys[0], &keys[1]];
    let file = begin(one, &spec).await.expect("within the quota");
    let data = v1::UploadPartRequest { file: id(file.metadata.clone()), offset: 0, data: content };
    let foreign = client(&gateway).upload_part(with_key(data.clone(), Some(two))).await;
    expect_error(foreign, Code::NotFound);
    client(&gateway).upload_part(with_key(data, Some(one))).await.expect("it is its own");
    // The upload of content that another organization has begins like any other.
    let file = begin(two, &spec).await.expect("within the quota");
    assert_eq!(state(&file), v1::FileState::Uploading);
    let full = expect_error(begin(one, &spec).await, Code::ResourceExhausted);
    assert!(full.get_error_details().quota_failure().is_some(), "{full:?}");
}
