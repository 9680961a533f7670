//! Timeouts and rate limits of connections. Time is paused: waiting takes no real time when nothing
//! else happens.

use std::ops::Range;

use construct_runtime::Lifecycle;
use construct_store::Keyring;
use futures::{SinkExt as _, StreamExt as _};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, BufReader},
    net::TcpListener,
};
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest as _};

use super::*;
use crate::protocols::operator::{MAX_SESSIONS, MAX_SESSIONS_PER_ORGANIZATION};
use crate::{
    Config, Keyrings,
    api::Api,
    identity::authenticate::Authenticator,
    limit::{Limit, connection::Connections},
    protocols::{ProtocolLayer, guard::OriginGuard},
    tls::stream::Transport,
};

/// Calls of a gateway that does not serve yet.
fn calls(config: &Config) -> Calls {
    let keyring = Keyring::new("k", [("k".to_owned(), [0; 32])]).expect("a keyring");
    let keyrings = Keyrings { providers: Arc::new(keyring), secrets: None, tokens: None };
    let gate = Authenticator::new(config).expect("a gate");
    let api = Api::new(config, keyrings, gate, Lifecycle::new(Duration::ZERO));
    Calls::new(&ProtocolLayer::new(api, true, config).expect("the protocols"))
}

/// Options with so many permits for WebSockets of trusted proxies.
fn options(proxied: Limit) -> Arc<Options> {
    let sessions = Limit::new(MAX_SESSIONS, MAX_SESSIONS_PER_ORGANIZATION);
    Arc::new(Options { agent: None, guard: OriginGuard::new(true, &[], &[]), sessions, proxied })
}

/// The client's end of a connection.
async fn connected() -> TcpStream {
    connected_to(calls(&Config::default()), options(Limit::new(1, 1))).await
}

async fn connected_to(calls: Calls, options: Arc<Options>) -> TcpStream {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("it is bound");
    let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    let (stream, _) = accepted.expect("it comes in");
    let connection = Connection::new(&stream, calls, options, CancellationToken::new());
    let connections = Connections::new(Limit::new(1, 1), Limit::new(1, 1));
    let accepted = connections.accept(Holder::network(Some(address.ip()))).expect("there is room");
    // The client observes its end.
    drop(tokio::spawn(connection.run(Stream::new(Transport::Plain(stream)), accepted)));
    client.expect("it connects")
}

/// How long a silent connection stays open.
async fn silence(mut client: impl AsyncRead + Unpin) -> Duration {
    let begun = Instant::now();
    tokio::time::pause();
    let mut rest = Vec::new();
    // A reset is as good as an end.
    _ = client.read_to_end(&mut rest).await;
    let took = begun.elapsed();
    tokio::time::resume();
    took
}

/// Tolerates the time of the test itself.
fn roughly(time: Duration) -> Range<Duration> {
    time.saturating_sub(Duration::from_secs(1))..time + Duration::from_secs(1)
}

#[tokio::test]
async fn first_line_times_out_after_ten_seconds() {
    for begun in ["", "{\"type\":"] {
        let mut client = connected().await;
        client.write_all(begun.as_bytes()).await.expect("it reads");
        let took = silence(client).await;
        assert!(roughly(FIRST_LINE_TIMEOUT).contains(&took), "{begun:?}: {took:?}");
    }
    assert_eq!(FIRST_LINE_TIMEOUT, Duration::from_secs(10));
}

#[tokio::test]
async fn idle_connection_is_closed_after_ten_minutes() {
    let mut client = BufReader::new(connected().await);
    client.write_all(b"{\"id\":\"1\",\"type\":\"cancel\"}\n").await.expect("it reads");
    let mut line = String::new();
    client.read_line(&mut line).await.expect("it answers");
    assert!(line.contains("INVALID_REQUEST"), "{line}");
    // An incomplete line does not count.
    client.write_all(b"{").await.expect("it reads");
    let took = silence(client).await;
    assert!(roughly(IDLE_TIMEOUT).contains(&took), "{took:?}");

    let (mut socket, _) = tokio_tungstenite::client_async("ws://127.0.0.1/", connected().await)
        .await
        .expect("it is let in");
    let took = silence(socket.get_mut()).await;
    assert!(roughly(IDLE_TIMEOUT).contains(&took), "{took:?}");
    assert_eq!(IDLE_TIMEOUT, Duration::from_secs(600));
}

#[tokio::test]
async fn proxied_web_sockets_are_counted_per_client() {
    let config =
        Config { gateway_trusted_proxies: vec!["127.0.0.1".to_owned()], ..Config::default() };
    let options = options(Limit::new(8, 1));
    let open = async |client: &str| {
        let stream = connected_to(calls(&config), Arc::clone(&options)).await;
        let mut request = "ws://127.0.0.1/".into_client_request().expect("a request");
        request.headers_mut().insert("x-forwarded-for", client.parse().expect("a value"));
        tokio_tungstenite::client_async(request, stream).await.expect("it is let in").0
    };
    let mut sockets = Vec::new();
    for client in ["192.0.2.7", "192.0.2.8"] {
        let mut socket = open(client).await;
        socket.send(Message::text("nonsense")).await.expect("it reads");
        let answer = socket.next().await.expect("an answer").expect("it lives").to_string();
        assert!(answer.contains("INVALID_REQUEST"), "{answer}");
        sockets.push(socket);
    }
    let mut third = open("192.0.2.9, 192.0.2.7").await;
    let answer = third.next().await.expect("an answer").expect("it lives").to_string();
    assert!(answer.contains("RATE_LIMIT_EXCEEDED"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn line_burst_is_limited_and_refills() {
    let mut bucket = Bucket { available: f64::from(MAX_LINE_BURST), refilled_at: Instant::now() };
    let take_all = |bucket: &mut Bucket| (0..1000).filter(|_| bucket.take()).count();
    assert_eq!((take_all(&mut bucket), bucket.wait()), (100, 1));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(take_all(&mut bucket), 50);
    // Waiting longer does not add to the burst.
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert_eq!(take_all(&mut bucket), 100);
}
