//! How long a connection may be silent, and how much may be said over it at once. Time stands still
//! here as soon as nothing more is said, and what is waited for comes at once.

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
use crate::protocols::operator::{SESSIONS, SESSIONS_OF_ONE};
use crate::{
    Config, Keyrings,
    api::Api,
    identity::authenticate::Gate,
    limit::{Limit, connection::Connections},
    protocols::{ProtocolLayer, guard::OriginGuard},
    tls::stream::Transport,
};

/// Calls of a gateway that has not begun to serve.
fn calls(config: &Config) -> Calls {
    let keyring = Keyring::new("k", [("k".to_owned(), [0; 32])]).expect("a keyring");
    let keyrings = Keyrings { providers: Arc::new(keyring), secrets: None, tokens: None };
    let gate = Gate::new(config).expect("a gate");
    let api = Api::new(config, keyrings, gate, Lifecycle::new(Duration::ZERO));
    Calls::new(&ProtocolLayer::new(api, true, config).expect("the protocols"))
}

/// With so many places for WebSockets of trusted proxies' clients.
fn options(proxied: Limit) -> Arc<Options> {
    let sessions = Limit::new(SESSIONS, SESSIONS_OF_ONE);
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
    // Its end is seen by the client.
    drop(tokio::spawn(connection.run(Stream::new(Transport::Plain(stream)), accepted)));
    client.expect("it connects")
}

/// How long it takes until a connection is closed over which nothing more is said.
async fn silence(mut client: impl AsyncRead + Unpin) -> Duration {
    let begun = Instant::now();
    tokio::time::pause();
    let mut rest = Vec::new();
    // A reset instead of an end is as good.
    _ = client.read_to_end(&mut rest).await;
    let took = begun.elapsed();
    tokio::time::resume();
    took
}

/// What the test itself takes is no matter.
fn about(time: Duration) -> Range<Duration> {
    time.saturating_sub(Duration::from_secs(1))..time + Duration::from_secs(1)
}

#[tokio::test]
async fn the_first_line_has_ten_seconds_from_the_beginning_on() {
    for begun in ["", "{\"type\":"] {
        let mut client = connected().await;
        client.write_all(begun.as_bytes()).await.expect("it reads");
        let took = silence(client).await;
        assert!(about(FIRST).contains(&took), "{begun:?}: {took:?}");
    }
    assert_eq!(FIRST, Duration::from_secs(10));
}

#[tokio::test]
async fn who_has_nothing_to_do_and_says_nothing_is_cut_off_after_ten_minutes() {
    let mut client = BufReader::new(connected().await);
    client.write_all(b"{\"id\":\"1\",\"type\":\"cancel\"}\n").await.expect("it reads");
    let mut line = String::new();
    client.read_line(&mut line).await.expect("it answers");
    assert!(line.contains("INVALID_REQUEST"), "{line}");
    // What is begun and not ended is no line.
    client.write_all(b"{").await.expect("it reads");
    let took = silence(client).await;
    assert!(about(IDLE).contains(&took), "{took:?}");

    let (mut socket, _) = tokio_tungstenite::client_async("ws://127.0.0.1/", connected().await)
        .await
        .expect("it is let in");
    let took = silence(socket.get_mut()).await;
    assert!(about(IDLE).contains(&took), "{took:?}");
    assert_eq!(IDLE, Duration::from_secs(600));
}

#[tokio::test]
async fn websockets_that_come_by_a_trusted_proxy_are_counted_by_whom_it_asks_for() {
    let config =
        Config { gateway_trusted_proxies: vec!["127.0.0.1".to_owned()], ..Config::default() };
    let options = options(Limit::new(8, 1));
    let open = async |client: &str| {
        let stream = connected_to(calls(&config), Arc::clone(&options)).await;
        let mut request = "ws://127.0.0.1/".into_client_request().expect("a request");
        request.headers_mut().insert("x-forwarded-for", client.parse().expect("a value"));
        tokio_tungstenite::client_async(request, stream).await.expect("it is let in").0
    };
    let mut held = Vec::new();
    for client in ["192.0.2.7", "192.0.2.8"] {
        let mut socket = open(client).await;
        socket.send(Message::text("nonsense")).await.expect("it reads");
        let answer = socket.next().await.expect("an answer").expect("it lives").to_string();
        assert!(answer.contains("INVALID_REQUEST"), "{answer}");
        held.push(socket);
    }
    let mut third = open("192.0.2.9, 192.0.2.7").await;
    let answer = third.next().await.expect("an answer").expect("it lives").to_string();
    assert!(answer.contains("RATE_LIMIT_EXCEEDED"), "{answer}");
}

#[tokio::test(start_paused = true)]
async fn a_hundred_lines_are_read_at_once_and_fifty_more_each_second() {
    let mut bucket = Bucket { left: f64::from(BURST), at: Instant::now() };
    let taken = |bucket: &mut Bucket| (0..1000).filter(|_| bucket.take()).count();
    assert_eq!((taken(&mut bucket), bucket.wait()), (100, 1));
    tokio::time::advance(Duration::from_secs(1)).await;
    assert_eq!(taken(&mut bucket), 50);
    // Who waits long saves no more than that.
    tokio::time::advance(Duration::from_secs(3600)).await;
    assert_eq!(taken(&mut bucket), 100);
}
