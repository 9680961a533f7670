//! Forbidden requests: addresses in every spelling, names that resolve to them, redirects, and
//! names that resolve differently each time.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;

/// An address that counts as public here.
const PUBLIC: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 1));
/// An address that does not. The server answers there too, so that a refusal is not just a missing
/// answer.
const PRIVATE: IpAddr = IpAddr::V4(Ipv4Addr::new(127, 0, 0, 2));

/// A server on all loopback addresses. It answers `/to/URL` with a redirect to the URL, and counts
/// the requests per address.
async fn server() -> (u16, Arc<Mutex<HashMap<IpAddr, usize>>>) {
    let listener = TcpListener::bind(SocketAddr::from(([0, 0, 0, 0], 0))).await.expect("a port");
    let port = listener.local_addr().expect("an address").port();
    let requests: Arc<Mutex<HashMap<IpAddr, usize>>> = Arc::default();
    let counter = Arc::clone(&requests);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            *counter
                .lock()
                .expect("the lock is not poisoned")
                .entry(stream.local_addr().expect("an address").ip())
                .or_default() += 1;
            let mut request = vec![0; 4096];
            let read = stream.read(&mut request).await.unwrap_or(0);
            let request = String::from_utf8_lossy(&request[..read]).into_owned();
            let path = request.split(' ').nth(1).unwrap_or_default();
            let answer = match path.strip_prefix("/to/") {
                Some(target) => format!(
                    "HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                ),
                None => "HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nanswer"
                    .to_owned(),
            };
            drop(stream.write_all(answer.as_bytes()).await);
        }
    });
    (port, requests)
}

/// A bench that may fetch from every host. The function resolves names, given the name and the
/// number of earlier lookups.
fn bench(
    resolve: impl Fn(&str, usize) -> Vec<IpAddr> + Send + Sync + 'static,
) -> (Bench, Arc<AtomicUsize>) {
    let lookups = Arc::new(AtomicUsize::new(0));
    let (counter, times) = (Arc::clone(&lookups), Mutex::new(HashMap::<String, usize>::new()));
    let egress = Egress::with_lookup(
        &[PUBLIC],
        Arc::new(move |host| {
            counter.fetch_add(1, Ordering::SeqCst);
            let mut times = times.lock().expect("the lock is not poisoned");
            let time = times.entry(host.clone()).or_default();
            *time += 1;
            let found = resolve(&host, *time - 1);
            Box::pin(async move { Ok(found) })
        }),
    );
    let policy = Policy { hosts: vec!["*".parse().expect("a pattern")], ..Policy::default() };
    (
        Bench::new(policy, egress.expect("an HTTP client"), CommandSandbox::unavailable("a test")),
        lookups,
    )
}

#[tokio::test]
async fn private_addresses_are_refused_in_every_spelling() {
    let (port, requests) = server().await;
    let (bench, _) = bench(|host, _| panic!("{host} is an address and must not be looked up"));
    let hosts = [
        "127.0.0.2",
        "127.0.0.2.",
        "127.2",
        "127.0.2",
        "0177.0.0.2",
        "0x7f.0.0.2",
        "0x7f000002",
        "2130706434",
        "017700000002",
        "127.0.0.0x2",
        "0",
        "0.0.0.0",
        "\u{ff11}\u{ff12}\u{ff17}.0.0.2",
        "\u{2460}\u{2461}\u{2466}.0.0.2",
        "127\u{3002}0\u{3002}0\u{3002}2",
        "169.254.169.254",
        "0xa9fea9fe",
        "2852039166",
        "0251.0376.0251.0376",
        "169.254.43518",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "10.0.0.1",
        "012.0.0.1",
        "172.16.0.1",
        "172.31.255.254",
        "192.168.0.1",
        "3232235521",
        "100.64.0.1",
        "198.18.0.1",
        "255.255.255.255",
        "224.0.0.1",
        "[::]",
        "[::1]",
        "[0:0:0:0:0:0:0:1]",
        "[::ffff:127.0.0.2]",
        "[::ffff:7f00:2]",
        "[::ffff:169.254.169.254]",
        "[::ffff:a9fe:a9fe]",
        "[::127.0.0.2]",
        "[64:ff9b::127.0.0.2]",
        "[64:ff9b::a9fe:a9fe]",
        "[64:ff9b:1::7f00:2]",
        "[2002:7f00:2::]",
        "[2001:0:7f00:2::]",
        "[fe80::1]",
        "[fc00::1]",
        "[fd00:ec2::254]",
        "[fec0::1]",
        "[ff02::1]",
        "[100::1]",
        "[2001:db8::1]",
        "[5f00::1]",
    ];
    let calls: Vec<String> = hosts
        .iter()
        .map(|host| {
            format!("fetch({})", Value::from(format!("http://{host}:{port}/latest/meta-data")))
        })
        .collect();
    let calls: Vec<(&str, &'static str)> =
        calls.iter().map(|call| (call.as_str(), "AddressForbidden")).collect();
    bench.refuses(&calls).await;
    // Through a redirect from an allowed host.
    let calls: Vec<String> = hosts
        .iter()
        .filter(|host| host.is_ascii())
        .map(|host| {
            format!(
                "fetch({})",
                Value::from(format!("http://127.0.0.1:{port}/to/http://{host}:{port}/"))
            )
        })
        .collect();
    let calls: Vec<(&str, &'static str)> =
        calls.iter().map(|call| (call.as_str(), "AddressForbidden")).collect();
    bench.refuses(&calls).await;
    let requests = requests.lock().expect("the lock is not poisoned").clone();
    assert!(
        requests.keys().all(|address| *address == PUBLIC) && requests[&PUBLIC] > 0,
        "{requests:?}"
    );
}

#[tokio::test]
async fn invalid_and_deceptive_urls_are_refused() {
    let (port, _) = server().await;
    let (bench, _) = bench(|_, _| vec![PRIVATE]);
    let calls = [
        ("fetch('file:///etc/passwd')", "InvalidArguments"),
        ("fetch('ftp://127.0.0.1/')", "InvalidArguments"),
        ("fetch('gopher://127.0.0.1/')", "InvalidArguments"),
        ("fetch('data:text/plain,x')", "InvalidArguments"),
        ("fetch('unix:///var/run/docker.sock')", "InvalidArguments"),
        ("fetch('//127.0.0.2/')", "InvalidArguments"),
        ("fetch('http://')", "InvalidArguments"),
        ("fetch('http://example.com@127.0.0.2/')", "InvalidArguments"),
        ("fetch('http://127.0.0.1:PORT@127.0.0.2/')", "InvalidArguments"),
        ("fetch('http:\\\\\\\\127.0.0.2/')", "AddressForbidden"),
        ("fetch('http:127.0.0.2')", "AddressForbidden"),
        ("fetch('http:///127.0.0.2/')", "AddressForbidden"),
        ("fetch('http://127.0.0.2\\\\@127.0.0.1:PORT/')", "AddressForbidden"),
        ("fetch('http://127.0.0.2#@127.0.0.1:PORT/')", "AddressForbidden"),
        ("fetch('http://127.0.0.2?@127.0.0.1:PORT/')", "AddressForbidden"),
        ("fetch('ht\\ntp://127.0.\\t0.2/')", "AddressForbidden"),
        ("fetch('http://localhost:PORT/')", "AddressForbidden"),
        ("fetch('http://LOCALHOST.:PORT/')", "AddressForbidden"),
        ("fetch('http://anything.internal:PORT/')", "AddressForbidden"),
        ("fetch('http://127.0.0.1:PORT/', {headers: {Host: '127.0.0.2'}})", "InvalidArguments"),
        ("fetch('http://127.0.0.1:PORT/', {headers: {'X': 'a\\r\\nHost: b'}})", "InvalidArguments"),
        ("fetch('http://127.0.0.1:PORT/', {method: 'CONNECT'})", "InvalidArguments"),
        (
            "fetch('http://127.0.0.1:PORT/', {headers: {'Proxy-Authorization': 'x'}})",
            "InvalidArguments",
        ),
        (
            "fetch('http://127.0.0.1:PORT/', {headers: {'Transfer-Encoding': 'chunked'}})",
            "InvalidArguments",
        ),
        ("fetch('http://127.0.0.1:PORT/to/file:///etc/passwd')", "FetchFailed"),
        (
            "fetch('http://127.0.0.1:PORT/to/http://127.0.0.1:PORT/to/http://127.0.0.2:PORT/')",
            "AddressForbidden",
        ),
        ("fetch('http://127.0.0.1:PORT/to/http://x@127.0.0.2:PORT/')", "AddressForbidden"),
        ("fetch('http://127.0.0.1:PORT/to///127.0.0.2:PORT/')", "AddressForbidden"),
    ];
    let calls: Vec<(String, &'static str)> =
        calls.iter().map(|(call, name)| (call.replace("PORT", &port.to_string()), *name)).collect();
    let calls: Vec<(&str, &'static str)> =
        calls.iter().map(|(call, name)| (call.as_str(), *name)).collect();
    bench.refuses(&calls).await;
}

#[tokio::test]
async fn dns_rebinding_gains_nothing() {
    let (port, requests) = server().await;
    // Only the first answer is allowed: the checked address must be the one that is connected to.
    let (bench, lookups) = bench(|host, time| match (host, time) {
        ("rebind.test", 0) | ("redirect.test", _) => vec![PUBLIC],
        ("mixed.test", _) => vec![PRIVATE, PUBLIC, PRIVATE],
        ("mapped.test", _) => vec!["::ffff:127.0.0.2".parse().expect("an address")],
        ("many.test", _) => vec!["169.254.169.254", "10.0.0.1", "::1", "fd00:ec2::254"]
            .into_iter()
            .map(|text| text.parse().expect("an address"))
            .collect(),
        _ => vec![PRIVATE],
    });
    let fetch =
        |url: &str| format!("fetch({}).body", Value::from(url.replace("PORT", &port.to_string())));
    let first = bench.run(&fetch("http://rebind.test:PORT/")).await;
    assert_eq!(difference(&first, Is("answer")), None);
    assert_eq!(lookups.load(Ordering::SeqCst), 1, "a request looks its name up once");
    for (url, expected) in [
        ("http://rebind.test:PORT/", Throws("AddressForbidden", "127.0.0.2")),
        (
            "http://redirect.test:PORT/to/http://rebind.test:PORT/",
            Throws("AddressForbidden", "127.0.0.2"),
        ),
        (
            "http://redirect.test:PORT/to/http://many.test/",
            Throws("AddressForbidden", "169.254.169.254"),
        ),
        ("http://mapped.test:PORT/", Throws("AddressForbidden", "127.0.0.2")),
        ("http://many.test:PORT/", Throws("AddressForbidden", "fd00:ec2::254")),
        // Only the allowed ones of several addresses are tried.
        ("http://mixed.test:PORT/", Is("answer")),
        ("http://redirect.test:PORT/to/http://mixed.test:PORT/", Is("answer")),
    ] {
        let outcome = bench.run(&fetch(url)).await;
        assert_eq!(difference(&outcome, expected), None, "{url}");
        bench.assert_works_normally(url).await;
    }
    let requests = requests.lock().expect("the lock is not poisoned").clone();
    assert!(requests.keys().all(|address| *address == PUBLIC), "{requests:?}");
}

#[tokio::test]
async fn hosts_not_granted_are_not_looked_up() {
    let (port, requests) = server().await;
    let lookups = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&lookups);
    let egress = Egress::with_lookup(
        &[PUBLIC],
        Arc::new(move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
            Box::pin(async { Ok(vec![PUBLIC]) })
        }),
    );
    let hosts = ["api.example.com", "*.granted.test"]
        .iter()
        .map(|host| host.parse().expect("a pattern"))
        .collect();
    let bench = Bench::new(
        Policy { hosts, ..Policy::default() },
        egress.expect("an HTTP client"),
        CommandSandbox::unavailable("a test"),
    );
    let hosts = [
        "example.com",
        "api.example.com.evil.test",
        "evil-api.example.com",
        "xapi.example.com",
        "granted.test",
        "evilgranted.test",
        "a.granted.test.evil.test",
        "api.example.com%00.evil.test",
        "api\u{2024}example.com.evil.test",
        "127.0.0.1",
        "secret-in-a-name.evil.test",
    ];
    let calls: Vec<String> = hosts
        .iter()
        .map(|host| format!("fetch({})", Value::from(format!("http://{host}:{port}/"))))
        .collect();
    let calls: Vec<(&str, &'static str)> = calls
        .iter()
        .map(|call| {
            (
                call.as_str(),
                if call.contains("%00") || !call.is_ascii() {
                    "InvalidArguments"
                } else {
                    "HostNotGranted"
                },
            )
        })
        .collect();
    bench.refuses(&calls).await;
    assert_eq!(lookups.load(Ordering::SeqCst), 0, "a lookup could carry data to the name's server");
    assert!(requests.lock().expect("the lock is not poisoned").is_empty());
    let granted = bench.run(&format!("fetch('http://a.b.granted.test:{port}/').body")).await;
    assert_eq!(difference(&granted, Is("answer")), None);
}
