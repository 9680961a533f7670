//! Files: what is uploaded is what is given out, however it was cut; what should not be taken is
//! not.

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
    walk::{with_key, create_key, create_organization, login_required, write},
};
use crate::{Config, files::work::Files, organizations::silent};

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

async fn created(gateway: &Gateway, spec: v1::FileSpec) -> v1::File {
    client(gateway).create_file(create(spec)).await.expect("created").into_inner()
}

async fn part(
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

/// What became of a file, at last.
async fn settled(gateway: &Gateway, file: &v1::File) -> v1::File {
    wait_until("it is looked at", || get(gateway, file), |file| state(file) != v1::FileState::Checking)
        .await
}

/// A file with this content, uploaded at once.
async fn uploaded(gateway: &Gateway, name: &str, content: &[u8]) -> v1::File {
    let file = created(gateway, spec(name, content)).await;
    part(gateway, &file, 0, content).await.expect("uploaded");
    settled(gateway, &file).await
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
    let wanted = v1::FileSpec {
        sha256: Sha256::digest(&content).to_string(),
        ..spec("Übersicht.bin", &content)
    };
    let file = created(&gateway, wanted.clone()).await;
    assert_eq!(state(&file), v1::FileState::Uploading);
    expect_error(download(&gateway, &file, 0, 0).await, Code::FailedPrecondition);
    let half = part(&gateway, &file, 0, &content[..2_000_000]).await.expect("the first part");
    assert_eq!(
        (state(&half), half.status.as_ref().map(|it| it.received)),
        (v1::FileState::Uploading, Some(2_000_000))
    );
    // Who does not know where it stands is told; who was not told that it was taken says it again.
    let status = expect_error(part(&gateway, &file, 0, b"x").await, Code::Aborted);
    assert_eq!(details(&status), ("OFFSET".into(), "2000000".into()));
    expect_error(part(&gateway, &file, 2_000_001, b"x").await, Code::Aborted);
    assert_eq!(part(&gateway, &file, 0, &content[..2_000_000]).await.expect("again"), half);
    expect_error(part(&gateway, &file, 2_000_000, &content).await, Code::InvalidArgument);
    part(&gateway, &file, 2_000_000, &content[2_000_000..]).await.expect("the last part");
    let file = settled(&gateway, &file).await;
    let status = file.status.clone().expect("it has one");
    assert_eq!(
        (status.state(), status.sha256.as_str(), status.expires_at),
        (v1::FileState::Ready, wanted.sha256.as_str(), None)
    );
    assert_eq!(part(&gateway, &file, 2_000_000, &content[2_000_000..]).await.expect("again"), file);
    expect_error(
        part(&gateway, &file, 2_000_000, &noise(1_000_002)[1..]).await,
        Code::FailedPrecondition,
    );
    assert!(download(&gateway, &file, 0, 0).await.expect("all of it") == content);
    assert_eq!(download(&gateway, &file, 7, 3).await.expect("a part"), content[7..10]);
    assert_eq!(download(&gateway, &file, 3_000_001, 0).await.expect("nothing"), [0_u8; 0]);
    expect_error(download(&gateway, &file, 3_000_002, 0).await, Code::OutOfRange);

    // The same once more is there already. The content goes with the last that says it.
    let second = created(&gateway, v1::FileSpec { name: "again".into(), ..wanted }).await;
    assert_eq!(state(&second), v1::FileState::Ready);
    let folder = folder(&gateway);
    let sha256: Sha256 = status.sha256.parse().expect("a hash");
    for (file, left) in [(file, true), (second, false)] {
        let request =
            v1::DeleteFileRequest { file: id(file.metadata), ..v1::DeleteFileRequest::default() };
        client(&gateway).delete_file(request.clone()).await.expect("deleted");
        expect_error(client(&gateway).delete_file(request).await, Code::NotFound);
        let look = || async {
            let head = folder.head(OrganizationId::LOCAL, &sha256).await.expect("looked");
            (gateway.store().file_removals(1).await.expect("read").len(), head.is_some())
        };
        assert_eq!(
            wait_until("what has to go is gone", look, |(removals, _)| *removals == 0).await.1,
            left
        );
    }
    let nothing = created(&gateway, spec("nothing", b"")).await;
    assert_eq!(state(&settled(&gateway, &nothing).await), v1::FileState::Ready);
    assert_eq!(download(&gateway, &nothing, 0, 0).await.expect("nothing"), [0_u8; 0]);
}

#[tokio::test]
async fn concurrent_parts_at_one_offset_store_exactly_one() {
    let gateway = Gateway::start().await;
    let file = created(&gateway, spec("race", &[0; 3000])).await;
    let mut content: Vec<u8> = Vec::new();
    for round in 0..3 {
        let parts: Vec<Vec<u8>> = (0..6).map(|who| vec![10 * round + who; 1000]).collect();
        let sent = parts.iter().map(|data| part(&gateway, &file, 1000 * usize::from(round), data));
        let mut taken = Vec::new();
        for (data, result) in parts.iter().zip(join_all(sent).await) {
            match result {
                Ok(_) => taken.push(data.clone()),
                Err(status) => assert!(
                    matches!(status.code(), Code::Aborted | Code::FailedPrecondition),
                    "{status:?}"
                ),
            }
        }
        let [winner] = &taken[..] else { panic!("{} were taken in round {round}", taken.len()) };
        content.extend(winner);
    }
    let file = settled(&gateway, &file).await;
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
    for (content, media_type, sha256, words) in [
        (&b"words"[..], "", Sha256::digest(b"other words").to_string(), "SHA-256"),
        (&b"words"[..], "application/pdf", String::new(), "looks like something else"),
        (&bomb[..], "application/gzip", String::new(), "bytes, unpacked"),
        (&png[..], "text/plain", String::new(), "looks like image/png"),
        (&png[..], "", String::new(), "image/png are not taken here"),
    ] {
        let spec = v1::FileSpec { media_type: media_type.into(), sha256, ..spec("x", content) };
        let file = created(&gateway, spec).await;
        part(&gateway, &file, 0, content).await.expect("it is looked at");
        let file = settled(&gateway, &file).await;
        let status = file.status.clone().expect("it has one");
        assert_eq!(
            (status.state(), status.sha256.as_str()),
            (v1::FileState::Refused, ""),
            "{status:?}"
        );
        assert!(status.reason.contains(words) && status.expires_at.is_some(), "{status:?}");
        let again = expect_error(part(&gateway, &file, 0, content).await, Code::FailedPrecondition);
        assert!(again.message().contains(words), "{again:?}");
        expect_error(download(&gateway, &file, 0, 0).await, Code::FailedPrecondition);
        assert_eq!(
            folder(&gateway)
                .head(OrganizationId::LOCAL, &Sha256::digest(content))
                .await
                .expect("looked"),
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
    let file = created(&gateway, spec("left.txt", b"left behind")).await;
    let file_id: FileId = id(file.metadata.clone()).parse().expect("an id");
    // As a gateway leaves it that is killed between the last part and what follows.
    let bytes = Bytes::from_static(b"left behind");
    let name = folder(&gateway)
        .put_part(OrganizationId::LOCAL, file_id, bytes.clone())
        .await
        .expect("put");
    let sha256 = *Sha256::digest(&bytes).as_bytes();
    let last = NewPart { position: 0, size: 11, part: name.uuid(), sha256 };
    gateway
        .store()
        .file_part_add(&write(OrganizationId::LOCAL), file_id, last, |_| silent(&()))
        .await
        .expect("taken");
    let file = settled(&gateway, &file).await;
    assert_eq!(state(&file), v1::FileState::Ready);
    assert_eq!(download(&gateway, &file, 0, 0).await.expect("it can be read"), bytes);
}

#[tokio::test]
async fn sweep_removes_abandoned_uploads_and_keeps_ready_files() {
    let gateway = Gateway::start().await;
    let kept = uploaded(&gateway, "kept.txt", b"kept").await;
    let begun = created(&gateway, spec("begun.txt", b"begun")).await;
    part(&gateway, &begun, 0, b"beg").await.expect("a part");
    let blob_dir = gateway.context.common().blob_dir();
    let files = Files::new(gateway.store(), blob_dir.clone(), &Config::default()).expect("opened");
    files.sweep_once(Timestamp::now() + UPLOAD_TIMEOUT * 2).await;
    let gone = v1::GetFileRequest { file: id(begun.metadata.clone()) };
    expect_error(client(&gateway).get_file(gone).await, Code::NotFound);
    let upload =
        blob_dir.join(format!("files/{}/uploads/{}", OrganizationId::LOCAL, id(begun.metadata)));
    let look = || async { upload.exists() };
    assert!(!wait_until("its parts are gone", look, |there| !there).await);
    assert_eq!(download(&gateway, &kept, 0, 0).await.expect("it stays"), b"kept");
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
        let whose = create_organization(&gateway, slug).await;
        keys.push(create_key(&gateway, whose, Role::Member, &[Scope::FilesWrite], None).await.1);
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
    let file = begin(one, &spec).await.expect("there is room");
    let data = v1::UploadPartRequest { file: id(file.metadata.clone()), offset: 0, data: content };
    let theirs = client(&gateway).upload_part(with_key(data.clone(), Some(two))).await;
    expect_error(theirs, Code::NotFound);
    client(&gateway).upload_part(with_key(data, Some(one))).await.expect("it is theirs");
    // That somebody else has it, nobody is told by how theirs begins.
    let file = begin(two, &spec).await.expect("there is room");
    assert_eq!(state(&file), v1::FileState::Uploading);
    let full = expect_error(begin(one, &spec).await, Code::ResourceExhausted);
    assert!(full.get_error_details().quota_failure().is_some(), "{full:?}");
}
