//! Files over plain HTTP: their content, and uploads by tus.

use reqwest::{Method, StatusCode, header::HeaderMap};

use super::*;

const BODY: &str = "application/offset+octet-stream";

fn header(headers: &HeaderMap, name: &str) -> String {
    headers.get(name).map(|value| value.to_str().expect("text").to_owned()).unwrap_or_default()
}

/// Sends a request of tus; returns the status and the headers of the answer.
async fn tus(
    gateway: &Gateway,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: Vec<u8>,
) -> (u16, HeaderMap) {
    let method = Method::from_bytes(method.as_bytes()).expect("a method");
    let url = if path.starts_with('/') { gateway.url(path) } else { path.to_owned() };
    let mut request = http().request(method, url).header("tus-resumable", "1.0.0").body(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = request.send().await.expect("it answers");
    let (status, headers) = (answer.status().as_u16(), answer.headers().clone());
    assert_eq!(header(&headers, "tus-resumable"), "1.0.0", "{status}");
    (status, headers)
}

/// Begins an upload; returns its location.
async fn begin_upload(gateway: &Gateway, size: usize) -> String {
    let size = size.to_string();
    let headers_sent = [
        ("upload-length", size.as_str()),
        ("upload-metadata", "filename w5xiZXIudHh0,filetype dGV4dC9wbGFpbg=="),
    ];
    let (status, headers) =
        tus(gateway, "POST", "/v1/files/uploads", &headers_sent, Vec::new()).await;
    assert_eq!(status, 201);
    assert!(header(&headers, "upload-expires").ends_with(" GMT"), "{headers:?}");
    header(&headers, "location")
}

fn content_location(location: &str) -> String {
    location.replace("/uploads/", "/") + "/content"
}

/// Waits until a file is checked.
async fn wait_until_checked(gateway: &Gateway, location: &str) {
    let url = gateway.url(&location.replace("/uploads/", "/"));
    let get =
        || async { http().get(&url).send().await.expect("it answers").text().await.expect("text") };
    wait_until("it is checked", get, |file| !file.contains("FILE_STATE_CHECKING")).await;
}

#[tokio::test]
async fn interrupted_tus_upload_resumes() {
    let gateway = Gateway::start().await;
    let (status, headers) = tus(&gateway, "OPTIONS", "/v1/files/uploads", &[], Vec::new()).await;
    assert_eq!(
        (status, header(&headers, "tus-version"), header(&headers, "tus-max-size")),
        (204, "1.0.0".into(), "536870912".into())
    );
    assert!(header(&headers, "tus-extension").contains("creation-with-upload"));

    let content = "what we spent in May\n".repeat(300_000).into_bytes();
    let location = begin_upload(&gateway, content.len()).await;
    // The connection breaks in the middle of a body.
    let head = format!(
        "PATCH {location} HTTP/1.1\r\nhost: localhost\r\ntus-resumable: 1.0.0\r\nupload-offset: 0\r\ncontent-type: {BODY}\r\n\
         content-length: {}\r\n\r\n",
        content.len()
    );
    let mut stream = TcpStream::connect(gateway.address).await.expect("it listens");
    stream.write_all(head.as_bytes()).await.expect("it reads");
    stream.write_all(&content[..5_000_000]).await.expect("it reads");
    let offset = || async {
        let (status, headers) = tus(&gateway, "HEAD", &location, &[], Vec::new()).await;
        assert_eq!((status, header(&headers, "upload-length")), (200, content.len().to_string()));
        assert!(
            header(&headers, "upload-metadata").starts_with("filename w5xiZXIudHh0"),
            "{headers:?}"
        );
        header(&headers, "upload-offset").parse::<usize>().expect("a number")
    };
    wait_until("two parts are there", offset, |offset| *offset >= 4 * 1024 * 1024).await;
    drop(stream);
    // Whether the rest of the sent bytes was stored as well, shows in the next offset.
    let mut conflicts = 0;
    loop {
        let at = offset().await;
        let headers_sent = [("upload-offset", at.to_string()), ("content-type", BODY.to_owned())];
        let headers_sent: Vec<_> =
            headers_sent.iter().map(|(name, value)| (*name, value.as_str())).collect();
        match tus(&gateway, "PATCH", &location, &headers_sent, content[at..].to_vec()).await {
            (204, headers) => {
                assert_eq!(header(&headers, "upload-offset"), content.len().to_string());
                break;
            }
            (status, _) => {
                conflicts += 1;
                assert!(status == 409 && conflicts < 10, "{status}");
            }
        }
    }
    wait_until_checked(&gateway, &location).await;
    let got =
        http().get(gateway.url(&content_location(&location))).send().await.expect("it answers");
    assert_eq!(
        header(got.headers(), "content-disposition"),
        "attachment; filename=\"_ber.txt\"; filename*=UTF-8''%C3%9Cber.txt"
    );
    assert!(got.bytes().await.expect("a body") == content);
    let (status, _) = tus(&gateway, "DELETE", &location, &[], Vec::new()).await;
    assert_eq!((status, tus(&gateway, "HEAD", &location, &[], Vec::new()).await.0), (204, 404));
}

#[tokio::test]
async fn invalid_tus_requests_are_refused() {
    let gateway = Gateway::start().await;
    let location = begin_upload(&gateway, 5).await;
    let at = |offset: &'static str| [("upload-offset", offset), ("content-type", BODY)];
    let (status, headers) = tus(&gateway, "PATCH", &location, &at("3"), b"lo".to_vec()).await;
    assert_eq!((status, header(&headers, "upload-offset")), (409, "0".into()));
    for (method, path, headers, expected) in [
        (
            "PATCH",
            location.as_str(),
            &[("upload-offset", "0"), ("content-type", "text/plain")][..],
            415,
        ),
        ("PATCH", &location, &[("content-type", BODY)], 400),
        ("PATCH", "/v1/files/uploads/file_x", &at("0"), 400),
        ("GET", &location, &[], 405),
        ("POST", "/v1/files/uploads", &[], 400),
        (
            "POST",
            "/v1/files/uploads",
            &[("upload-length", "1"), ("upload-metadata", "filename !")],
            400,
        ),
        ("POST", "/v1/files/uploads", &[("upload-length", "99999999999")], 413),
        // More than the announced length.
        ("PATCH", &location, &at("0"), 400),
    ] {
        let (status, _) = tus(&gateway, method, path, headers, b"too long".to_vec()).await;
        assert_eq!(status, expected, "{method} {path} {headers:?}");
    }
    let old = http().head(gateway.url(&location)).send().await.expect("it answers");
    assert_eq!(
        (old.status().as_u16(), header(old.headers(), "tus-version")),
        (412, "1.0.0".into())
    );
    // Clients that can only send POST.
    let overridden =
        [("x-http-method-override", "PATCH"), ("upload-offset", "0"), ("content-type", BODY)];
    assert_eq!(tus(&gateway, "POST", &location, &overridden, b"hel".to_vec()).await.0, 204);
    // Its declared type is text.
    let png = [b"\x89PNG\r\n\x1a\n".to_vec(), vec![0; 32]].concat();
    let size = png.len().to_string();
    let headers_sent = [
        ("upload-length", size.as_str()),
        ("upload-metadata", "filetype dGV4dC9wbGFpbg=="),
        ("content-type", BODY),
    ];
    let (status, headers) = tus(&gateway, "POST", "/v1/files/uploads", &headers_sent, png).await;
    assert_eq!(status, 201);
    let location = header(&headers, "location");
    wait_until_checked(&gateway, &location).await;
    assert_eq!(tus(&gateway, "HEAD", &location, &[], Vec::new()).await.0, 422);
    let got =
        http().get(gateway.url(&content_location(&location))).send().await.expect("it answers");
    assert_eq!(got.status(), StatusCode::CONFLICT);
}

#[tokio::test]
async fn file_content_is_served_in_ranges_and_never_executed() {
    let gateway = Gateway::start().await;
    let page = b"<script>alert(1)</script>".to_vec();
    let size = page.len().to_string();
    let headers_sent = [
        ("upload-length", size.as_str()),
        ("upload-metadata", "filename eC5odG1s,filetype dGV4dC9odG1s"),
        ("content-type", BODY),
    ];
    let (_, headers) =
        tus(&gateway, "POST", "/v1/files/uploads", &headers_sent, page.clone()).await;
    assert_eq!(header(&headers, "upload-offset"), size);
    let location = header(&headers, "location");
    wait_until_checked(&gateway, &location).await;
    let url = gateway.url(&content_location(&location));
    for client in [http(), http2()] {
        let full = client.get(&url).send().await.expect("it answers");
        let headers = full.headers().clone();
        for (name, expected) in [
            ("content-type", "text/html"),
            ("content-length", "25"),
            ("content-disposition", "attachment; filename=\"x.html\""),
            ("content-security-policy", "default-src 'none'; sandbox"),
            ("x-content-type-options", "nosniff"),
            ("accept-ranges", "bytes"),
            ("cache-control", "private, no-cache"),
        ] {
            assert_eq!(header(&headers, name), expected, "{name}");
        }
        assert_eq!(full.bytes().await.expect("a body"), page);
        let tag = header(&headers, "etag");
        assert_eq!(tag, format!("\"{}\"", construct_bus::files::Sha256::digest(&page)));
        for (name, value, expected, body) in [
            ("range", "bytes=1-6", 206, "script"),
            ("range", "bytes=-9", 206, "</script>"),
            ("range", "bytes=25-", 416, ""),
            ("if-none-match", tag.as_str(), 304, ""),
        ] {
            let got = client.get(&url).header(name, value).send().await.expect("it answers");
            let (status, headers) = (got.status().as_u16(), got.headers().clone());
            assert_eq!(status, expected, "{name}: {value}");
            let text = got.text().await.expect("a body");
            if status == 416 {
                assert_eq!(header(&headers, "content-range"), "bytes */25");
            } else {
                assert_eq!(text, body);
            }
        }
        let head = client.head(&url).send().await.expect("it answers");
        assert_eq!(
            (head.status().as_u16(), header(head.headers(), "content-length")),
            (200, "25".into())
        );
        assert_eq!(head.bytes().await.expect("a body").len(), 0);
        let post = client.post(&url).send().await.expect("it answers");
        assert_eq!(post.status(), StatusCode::METHOD_NOT_ALLOWED);
    }
}
