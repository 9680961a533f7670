//! `fetch`, and addresses that it must not reach.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

use super::*;

pub(super) const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// A server that answers every request with `answer`, and forwards the requests to the test.
pub(crate) async fn server(
    answer: impl Fn(&str) -> Vec<u8> + Send + 'static,
) -> (SocketAddr, mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let (seen, requests) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut request = Vec::new();
            let mut buffer = [0; 4096];
            // Only small requests: the body arrives with the head, or has a content length.
            while let Ok(read @ 1..) = stream.read(&mut buffer).await {
                request.extend_from_slice(&buffer[..read]);
                if is_complete(&request) {
                    break;
                }
            }
            let request = String::from_utf8_lossy(&request).into_owned();
            let response = answer(&request);
            drop(seen.send(request));
            drop(stream.write_all(&response).await);
        }
    });
    (address, requests)
}

fn is_complete(request: &[u8]) -> bool {
    let text = String::from_utf8_lossy(request);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length =
        head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
    body.len() >= length.unwrap_or(0)
}

pub(crate) fn ok(body: &str) -> Vec<u8> {
    let length = body.len();
    format!("HTTP/1.1 200 OK\r\nContent-Length: {length}\r\nX-A: 1\r\nX-A: 2\r\nConnection: close\r\n\r\n{body}").into()
}

pub(super) fn redirect(status: u16, to: &str) -> Vec<u8> {
    format!("HTTP/1.1 {status} Moved\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n").into()
}

/// A toolbox that may reach these hosts, and 127.0.0.1 although it is not public.
fn granted(hosts: &[&str]) -> Bench {
    let hosts = hosts.iter().map(|host| host.parse().expect("a host")).collect();
    let policy = Policy { hosts, ..Policy::default() };
    Bench::with(policy, Egress::new(&[LOCAL]).expect("an HTTP client"))
}

#[tokio::test]
async fn body_is_truncated_to_the_result_limit_as_json() {
    let page = "{\"a\":\"\u{1}é\"}\n".repeat(20_000);
    let (address, _requests) = server(move |_| ok(&page)).await;
    let mut bench = granted(&["127.0.0.1"]);
    bench.tools = bench.tools.with_result_bytes(100_000);
    let result =
        bench.call("fetch", json!([format!("http://{address}/"), {"max_bytes": 10 << 20}])).await;
    let size = result.to_string().len();
    assert!((98_000..=100_000).contains(&size), "{size}");
    assert_eq!(result["truncated"], true);
    // A body that fits is not truncated.
    bench.tools = bench.tools.with_result_bytes(1 << 20);
    let result = bench.call("fetch", json!([format!("http://{address}/")])).await;
    assert_eq!(
        (result["body"].as_str().map(str::len), &result["truncated"]),
        (Some(240_000), &json!(false))
    );
}

#[tokio::test]
async fn oversized_body_is_an_error_unless_a_part_is_requested() {
    let body = "0123456789abcdef\n".repeat(400_000);
    let sent = body.clone();
    let (address, _requests) = server(move |request| match request.split(' ').nth(1) {
        Some("/page") => of_type("text/html", format!("<p>{}", "word ".repeat(40_000)).as_bytes()),
        Some("/fits") => ok(&sent[..3_400_000]),
        _ => ok(&sent),
    })
    .await;
    let mut bench = granted(&["127.0.0.1"]);
    let refused = bench
        .fails("fetch", json!([format!("http://{address}/a?key=s3cret"), {"method": "POST"}]))
        .await;
    assert_eq!(refused.name, "BodyTooLarge");
    assert!(
        refused.message.contains("status 200") && refused.message.contains("max_bytes"),
        "{refused}"
    );
    assert!(!refused.message.contains("s3cret"), "{refused}");
    assert_eq!(refused.details, Some(json!({"status": 200, "limit": 4 << 20})));
    let fits = bench.call("fetch", json!([format!("http://{address}/fits")])).await;
    assert!(fits["body"] == body[..3_400_000] && fits["truncated"] == false);
    let part =
        bench.call("fetch", json!([format!("http://{address}/"), {"max_bytes": 1_000}])).await;
    assert_eq!((&part["body"], &part["truncated"]), (&json!(body[..1_000]), &json!(true)));
    assert_eq!(part.get("note"), None);
    bench.tools = bench.tools.with_result_bytes(100_000);
    let page =
        bench.fails("fetch", json!([format!("http://{address}/page"), {"as": "markdown"}])).await;
    assert_eq!(page.name, "BodyTooLarge");
    let page = bench
        .call(
            "fetch",
            json!([format!("http://{address}/page"), {"as": "markdown", "max_bytes": 100}]),
        )
        .await;
    assert!(
        page["truncated"] == true && page["body"].as_str().is_some_and(|body| body.len() <= 100),
        "{page}"
    );
}

#[tokio::test]
async fn replaced_bytes_of_a_body_are_noted() {
    let (address, _requests) = server(|request| match request.split(' ').nth(1) {
        Some("/latin") => of_type("text/plain; charset=iso-8859-1", b"caf\xe9"),
        _ => of_type("image/png", b"\x89PNG"),
    })
    .await;
    let bench = granted(&["127.0.0.1"]);
    let image = bench.call("fetch", json!([format!("http://{address}/")])).await;
    assert_eq!(image["body"], json!("\u{fffd}PNG"));
    assert!(image["note"].as_str().expect("a note").contains("U+FFFD"), "{image}");
    let latin = bench.call("fetch", json!([format!("http://{address}/latin")])).await;
    assert_eq!((&latin["body"], latin.get("note")), (&json!("caf\u{e9}"), None));
}

#[tokio::test]
async fn response_has_status_headers_and_body() {
    let (address, mut requests) = server(|_| ok("hello")).await;
    let bench = granted(&["127.0.0.1"]);
    let url = format!("http://{address}/a?b=c");
    let options = json!({"method": "post", "headers": {"X-Key": "k", "Content-Type": "text/plain"}, "body": "data"});
    let result = bench.call("fetch", json!([url, options])).await;
    assert_eq!(
        (&result["status"], &result["body"], &result["truncated"]),
        (&json!(200), &json!("hello"), &json!(false))
    );
    assert_eq!((&result["headers"]["x-a"], &result["url"]), (&json!("1, 2"), &json!(url)));
    let request = requests.recv().await.expect("a request").to_lowercase();
    assert!(
        request.starts_with("post /a?b=c http/1.1\r\n") && request.ends_with("\r\n\r\ndata"),
        "{request}"
    );
    assert!(
        request.contains("x-key: k\r\n") && request.contains("content-type: text/plain\r\n"),
        "{request}"
    );
}

#[tokio::test]
async fn error_status_is_a_result() {
    let (address, _requests) = server(|_| {
        b"HTTP/1.1 503 No\r\nContent-Length: 4\r\nConnection: close\r\n\r\nbusy".to_vec()
    })
    .await;
    let result = granted(&["127.0.0.1"]).call("fetch", json!([format!("http://{address}/")])).await;
    assert_eq!((&result["status"], &result["body"]), (&json!(503), &json!("busy")));
}

#[tokio::test]
async fn host_not_granted_error_says_how_to_grant_it() {
    for hosts in [&[][..], &["example.com"], &["*.0.0.1"][..0]] {
        let error = granted(hosts).fails("fetch", json!(["http://other.example.org/"])).await;
        assert_eq!(error.name, "HostNotGranted");
        assert!(
            error.message.contains("other.example.org") && error.message.contains("grant"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn private_addresses_are_rejected_in_every_spelling() {
    let policy = Policy { hosts: vec!["*".parse().expect("a host")], ..Policy::default() };
    let bench = Bench::with(policy, Egress::new(&[]).expect("an HTTP client"));
    // A server that would answer, so that a rejection is not a missing server.
    let (address, mut requests) = server(|_| ok("secret")).await;
    let port = address.port();
    let hosts = [
        "127.0.0.1",
        "localhost",
        "LOCALHOST",
        "127.1",
        "2130706433",
        "0x7f000001",
        "017700000001",
        "0",
        "0.0.0.0",
        "[::1]",
        "[::]",
        "[::ffff:127.0.0.1]",
        "[::ffff:7f00:1]",
        "[64:ff9b::7f00:1]",
        "169.254.169.254",
        "[fd00:ec2::254]",
        "10.0.0.1",
        "192.168.0.1",
        "172.16.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "[fe80::1]",
    ];
    for host in hosts {
        let error = bench.fails("fetch", json!([format!("http://{host}:{port}/")])).await;
        assert_eq!(error.name, "AddressForbidden", "{host}: {error}");
    }
    assert!(requests.try_recv().is_err(), "a request was sent");
}

#[tokio::test]
async fn redirect_target_is_checked_like_the_first_address() {
    let (inner, mut reached) = server(|_| ok("secret")).await;
    let port = inner.port();
    let targets = [
        (format!("http://127.0.0.2:{port}/"), "AddressForbidden"),
        (format!("http://localhost:{port}/"), "HostNotGranted"),
        (format!("http://[::1]:{port}/"), "AddressForbidden"),
        ("http://169.254.169.254/latest/meta-data".to_owned(), "AddressForbidden"),
        ("http://elsewhere.example.org/".to_owned(), "HostNotGranted"),
        ("file:///etc/passwd".to_owned(), "FetchFailed"),
        ("http://".to_owned(), "FetchFailed"),
    ];
    for (target, expected) in targets {
        let to = target.clone();
        let (outer, _requests) = server(move |_| redirect(302, &to)).await;
        let bench = granted(&["127.0.0.1", "127.0.0.2", "::1", "169.254.169.254"]);
        let error = bench.fails("fetch", json!([format!("http://{outer}/")])).await;
        assert_eq!(error.name, expected, "{target}: {error}");
    }
    assert!(reached.try_recv().is_err(), "a request was sent to the target of the redirect");
}

#[tokio::test]
async fn redirect_to_another_origin_drops_credentials() {
    let (inner, mut reached) = server(|_| ok("there")).await;
    let to = format!("http://user:password@{inner}/next");
    let (outer, _requests) = server(move |_| redirect(307, &to)).await;
    let headers = json!({"Authorization": "Bearer s3cret", "Cookie": "s3cret", "X-Api-Key": "s3cret", "Accept": "text/plain"});
    let options = json!({"method": "POST", "headers": headers, "body": "data"});
    let result =
        granted(&["127.0.0.1"]).call("fetch", json!([format!("http://{outer}/"), options])).await;
    assert_eq!(
        (&result["body"], &result["url"]),
        (&json!("there"), &json!(format!("http://{inner}/next")))
    );
    let request = reached.recv().await.expect("a request").to_lowercase();
    assert!(
        request.starts_with("post ")
            && request.ends_with("data")
            && request.contains("accept: text/plain")
    );
    assert!(!request.contains("s3cret") && !request.contains("authorization"), "{request}");
}

#[tokio::test]
async fn same_origin_redirect_keeps_headers_and_303_becomes_get() {
    let (address, mut requests) =
        server(
            |request| {
                if request.starts_with("GET /done") { ok("done") } else { redirect(303, "/done") }
            },
        )
        .await;
    let options = json!({"method": "POST", "headers": {"X-Api-Key": "k"}, "body": "data"});
    let result =
        granted(&["127.0.0.1"]).call("fetch", json!([format!("http://{address}/"), options])).await;
    assert_eq!(result["body"], json!("done"));
    requests.recv().await.expect("the first request");
    let second = requests.recv().await.expect("the second request").to_lowercase();
    assert!(second.contains("x-api-key: k\r\n") && !second.ends_with("data"), "{second}");
}

#[tokio::test]
async fn redirects_are_limited() {
    let (address, _requests) = server(|_| redirect(302, "/again")).await;
    let error = granted(&["127.0.0.1"]).fails("fetch", json!([format!("http://{address}/")])).await;
    assert_eq!(error.name, "TooManyRedirects");
}

#[tokio::test]
async fn endless_body_is_truncated() {
    let (address, _requests) = server(|_| {
        let mut response = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".to_vec();
        response.extend("\u{e4}".repeat(1_000_000).into_bytes());
        response
    })
    .await;
    let options = json!({"max_bytes": 1_001});
    let result =
        granted(&["127.0.0.1"]).call("fetch", json!([format!("http://{address}/"), options])).await;
    assert_eq!(
        (&result["body"], &result["truncated"]),
        (&json!("\u{e4}".repeat(500)), &json!(true))
    );
}

#[tokio::test]
async fn unresponsive_host_times_out_and_call_is_cancelable() {
    let listener = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let url = format!("http://{}/?key=s3cret", listener.local_addr().expect("an address"));
    let bench = granted(&["127.0.0.1"]);
    let error = bench.fails("fetch", json!([url, {"timeout_seconds": 1}])).await;
    assert_eq!(error.name, "Timeout");
    assert!(error.message.contains("unknown") && !error.message.contains("s3cret"), "{error}");

    let cx = CallContext::default();
    let (result, ()) = tokio::join!(bench.tools.call("fetch", json!([url]), &cx), async {
        drop(listener.accept().await);
        cx.cancel.cancel();
    });
    assert_eq!(result.expect_err("cancelled").name, "Cancelled");
}

#[tokio::test]
async fn unreachable_host_error_omits_the_query() {
    let listener = TcpListener::bind((LOCAL, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    drop(listener);
    let error = granted(&["127.0.0.1"])
        .fails("fetch", json!([format!("http://{address}/?key=s3cret")]))
        .await;
    assert_eq!(error.name, "FetchFailed");
    assert!(
        error.message.contains("nothing was sent") && !error.message.contains("s3cret"),
        "{error}"
    );
}

#[tokio::test]
async fn invalid_requests_are_rejected() {
    let bench = granted(&["*"]);
    let cases = [
        json!(["example.com/a"]),
        json!(["file:///etc/passwd"]),
        json!(["ftp://example.com/"]),
        json!(["http://user:password@example.com/"]),
        json!(["http://example.com/", {"headers": {"Host": "other"}}]),
        json!(["http://example.com/", {"headers": {"Proxy-Authorization": "x"}}]),
        json!(["http://example.com/", {"headers": {"A B": "x"}}]),
        json!(["http://example.com/", {"headers": {"A": "x\r\nB: y"}}]),
    ];
    for args in cases {
        let error = bench.fails("fetch", args.clone()).await;
        assert_eq!(error.name, "InvalidArguments", "{args}");
        assert!(!error.message.contains("password@"), "{error}");
    }
}

/// A response of this type.
pub(super) fn of_type(content_type: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

#[tokio::test]
async fn page_is_converted_to_markdown_on_request() {
    let page = "<title>T</title><p>caf\u{e9} <a href=/b>b</a><script>x</script>";
    let (address, mut requests) = server(|request| match request.split(' ').nth(1) {
        Some("/latin") => of_type("text/html; charset=ISO-8859-1", b"<p>caf\xe9"),
        Some("/json") => of_type("application/problem+json", b"{\"a\": \"<b>\"}"),
        Some("/untyped") => ok("<!DOCTYPE html><p>x"),
        Some("/image") => of_type("image/png", b"\x89PNG\0"),
        Some("/pdf") => of_type("application/pdf", b"%PDF"),
        Some("/empty") => of_type("image/png", b""),
        Some("/no-type") => ok("a\0b"),
        _ => of_type(
            "text/html; charset=utf-8",
            "<title>T</title><p>caf\u{e9} <a href=/b>b</a><script>x</script>".as_bytes(),
        ),
    })
    .await;
    let bench = granted(&["127.0.0.1"]);
    let fetch = async |path: &str, options: Value| {
        let url = format!("http://{address}{path}");
        bench.tools.call("fetch", json!([url, options]), &CallContext::default()).await
    };
    let body = async |path: &str| {
        fetch(path, json!({"as": "markdown"})).await.expect("a result")["body"].clone()
    };
    assert_eq!(body("/").await, json!(format!("# T\n\ncaf\u{e9} [b](http://{address}/b)\n")));
    let request = requests.recv().await.expect("a request").to_lowercase();
    assert!(request.contains("accept: text/markdown, text/html"), "{request}");
    assert_eq!(body("/latin").await, json!("caf\u{e9}\n"));
    assert_eq!(body("/json").await, json!("{\"a\": \"<b>\"}"));
    assert_eq!(body("/untyped").await, json!("x\n"));
    assert_eq!(body("/empty").await, json!(""));
    for (path, kind) in
        [("/image", "image/png"), ("/pdf", "application/pdf"), ("/no-type", "binary")]
    {
        let refused =
            fetch(path, json!({"as": "Markdown"})).await.expect_err("neither HTML nor text");
        assert!(refused.name == "NotText" && refused.message.contains(kind), "{refused}");
        assert_eq!(refused.details.expect("details")["status"], json!(200));
    }
    // Without it every body is returned unchanged.
    assert_eq!(fetch("/", json!({})).await.expect("a result")["body"], json!(page));
    assert_eq!(
        fetch("/pdf", json!({"as": "text"})).await.expect("a result")["body"],
        json!("%PDF")
    );
    let cut = fetch("/", json!({"as": "markdown", "max_bytes": 30})).await.expect("a result");
    assert_eq!((&cut["body"], &cut["truncated"]), (&json!("# T\n\ncaf\u{e9}\n"), &json!(true)));
    let own = fetch("/", json!({"as": "markdown", "headers": {"Accept": "text/html"}})).await;
    own.expect("a result");
    let mut last = String::new();
    while let Ok(request) = requests.try_recv() {
        last = request.to_lowercase();
    }
    assert!(last.contains("accept: text/html\r\n"), "{last}");
}
