//! Attacks that try to exhaust a gateway: it keeps serving others, and stays within the memory
//! limit of the chart. One gateway process, and no other service, for all attacks.

use std::{
    collections::HashSet,
    fs,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use construct_tests::mesh::{Mesh, Service, free_address};
use futures::future::join_all;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    task::JoinHandle,
    time::timeout,
};
use tokio_tungstenite::tungstenite::{Message, client::IntoClientRequest as _};

use crate::identity::{REQUIRED, first_key, json_output, output};

/// The chart's memory limit of a gateway.
const MEMORY_LIMIT: u64 = 512 * 1024 * 1024;
const MIB: usize = 1024 * 1024;
/// The address of attackers, and that of an uninvolved tenant.
const ATTACKER: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 1);
const TENANT: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
/// How long a client may leave data unread, including the test's own time.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(30 + 15);

/// A gateway, and what attackers know about it.
struct Target {
    address: SocketAddr,
    operator: SocketAddr,
}

impl Target {
    /// A connection to the gateway's port.
    async fn connect(&self) -> TcpStream {
        connect(ATTACKER, self.address, None).await.unwrap()
    }

    /// A connection of a client with a small receive buffer.
    async fn connect_small(&self, address: SocketAddr) -> TcpStream {
        connect(ATTACKER, address, Some(4096)).await.unwrap()
    }
}

async fn connect(
    from: Ipv4Addr,
    to: SocketAddr,
    buffer: Option<u32>,
) -> std::io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddrV4::new(from, 0).into())?;
    if let Some(bytes) = buffer {
        socket.set_recv_buffer_size(bytes)?;
    }
    socket.connect(to).await
}

/// Reads until the server closes the connection. Returns the relevant part of what came.
async fn read_to_close(stream: &mut TcpStream) -> String {
    let mut all = Vec::new();
    // A reset instead of an end is as good.
    _ = stream.take(MIB as u64).read_to_end(&mut all).await;
    String::from_utf8_lossy(&all).into_owned()
}

/// Waits until the server has closed so many of these connections, which are not read from.
async fn wait_for_closed(streams: &[TcpStream], least: usize) {
    let begun = Instant::now();
    loop {
        let open = established();
        // A connection that was reset has no peer any more.
        let is_open = |stream: &&TcpStream| match (stream.peer_addr(), stream.local_addr()) {
            (Ok(server), Ok(client)) => open.contains(&(server.port(), client.port())),
            _ => false,
        };
        let still = streams.iter().filter(is_open).count();
        if streams.len() - still >= least {
            return;
        }
        assert!(
            begun.elapsed() < UNREAD_TIMEOUT,
            "{still} connections whose clients do not read are still open"
        );
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The connections of this machine that neither side has closed: the ports of both sides, as the
/// first one sees it.
fn established() -> HashSet<(u16, u16)> {
    let table = fs::read_to_string("/proc/net/tcp").unwrap();
    let port = |address: &str| u16::from_str_radix(address.rsplit(':').next()?, 16).ok();
    let read = |line: &str| {
        let row: Vec<_> = line.split_whitespace().collect();
        let [_, local, remote, state, ..] = row.as_slice() else { return None };
        (*state == ESTABLISHED).then_some((port(local)?, port(remote)?))
    };
    table.lines().filter_map(read).collect()
}

/// The state of an established connection in `/proc/net/tcp`.
const ESTABLISHED: &str = "01";

fn half_request(path: &str, key: Option<&str>, announced: usize, sent: usize) -> Vec<u8> {
    let key = key.map(|key| format!("authorization: Bearer {key}\r\n")).unwrap_or_default();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\n{key}content-type: application/json\r\ncontent-length: {announced}\r\n\r\n"
    );
    [head.into_bytes(), vec![b' '; sent]].concat()
}

/// An HTTP/2 frame.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags][..], &stream.to_be_bytes()[..], payload].concat()
}

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;

/// The preface of an HTTP/2 connection, with settings.
fn preface(settings: &[(u16, u32)]) -> Vec<u8> {
    let payload: Vec<u8> = settings
        .iter()
        .flat_map(|(id, value)| [&id.to_be_bytes()[..], &value.to_be_bytes()[..]].concat())
        .collect();
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec(), frame(SETTINGS, 0, 0, &payload)].concat()
}

/// Headers as literals without indexing.
fn headers(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()][..], text.as_bytes()].concat();
    fields.iter().flat_map(|(name, value)| [vec![0], text(name), text(value)].concat()).collect()
}

fn call(path: &str, content_type: &str, key: Option<&str>) -> Vec<u8> {
    let bearer = key.map(|key| format!("Bearer {key}"));
    let mut fields = vec![
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "localhost"),
        ("content-type", content_type),
        ("te", "trailers"),
    ];
    fields.extend(bearer.as_deref().map(|bearer| ("authorization", bearer)));
    headers(&fields)
}

/// Sends requests repeatedly, as a working client, and measures each answer's time.
struct Prober {
    job: JoinHandle<()>,
    seen: Arc<Mutex<Vec<Result<Duration, String>>>>,
}

impl Prober {
    fn start(
        name: &'static str,
        address: SocketAddr,
        from: Ipv4Addr,
        key: String,
        reuses: bool,
    ) -> Self {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&seen);
        let job: JoinHandle<()> = tokio::spawn(async move {
            let mut held = None;
            loop {
                let begun = Instant::now();
                let asked =
                    timeout(Duration::from_secs(10), whoami(&mut held, address, from, &key)).await;
                let outcome = match asked {
                    Ok(Ok(())) => Ok(begun.elapsed()),
                    Ok(Err(error)) => Err(format!("{name}: {error}")),
                    Err(_) => Err(format!("{name}: no answer")),
                };
                if !reuses || outcome.is_err() {
                    held = None;
                }
                noted.lock().unwrap().push(outcome);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
        Self { job, seen }
    }

    /// Checks that every answer since the last check came, and soon.
    #[track_caller]
    fn check(&self, attack: &str) {
        assert!(!self.job.is_finished());
        let seen = std::mem::take(&mut *self.seen.lock().unwrap());
        let failed: Vec<_> = seen.iter().filter_map(|outcome| outcome.as_ref().err()).collect();
        assert!(
            failed.is_empty(),
            "{attack}: {} of {} failed: {failed:?}",
            failed.len(),
            seen.len()
        );
        let mut took: Vec<_> = seen.into_iter().flatten().collect();
        took.sort_unstable();
        assert!(!took.is_empty(), "{attack}: nothing was asked");
        let (slow, slowest) = (took[took.len() * 19 / 20], took[took.len() - 1]);
        println!(
            "{attack}: {} answers, of 20 one slower than {slow:?}, slowest {slowest:?}",
            took.len()
        );
        assert!(
            slow < Duration::from_secs(1),
            "{attack}: of 20 answers one took longer than {slow:?}"
        );
    }
}

async fn whoami(
    held: &mut Option<TcpStream>,
    address: SocketAddr,
    from: Ipv4Addr,
    key: &str,
) -> Result<(), std::io::Error> {
    let stream = match held {
        Some(stream) => stream,
        None => held.insert(connect(from, address, None).await?),
    };
    let request = format!(
        "GET /v1/whoami HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    while !answer.ends_with(b"}") {
        if stream.read_buf(&mut answer).await? == 0 {
            break;
        }
    }
    let answer = String::from_utf8_lossy(&answer);
    if answer.starts_with("HTTP/1.1 200") {
        Ok(())
    } else {
        Err(std::io::Error::other(answer.into_owned()))
    }
}

/// 300 requests without credentials whose bodies are incomplete.
async fn half_sent(target: &Target, size: usize) {
    let attacks = (0..300).map(|_| async {
        let mut stream = target.connect().await;
        // The server need not read all of it.
        _ = stream
            .write_all(&half_request("/v1/setup-codes/exchange", None, size, size - 50))
            .await;
        read_to_close(&mut stream).await
    });
    let begun = Instant::now();
    let answers = timeout(Duration::from_secs(10), join_all(attacks)).await.expect("none is held");
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(8), "{took:?}");
    let told = |status: &str| {
        answers.iter().filter(|answer| answer.starts_with(&format!("HTTP/1.1 {status}"))).count()
    };
    let (slow, crowded, large) = (told("408"), told("429"), told("413"));
    println!("half-sent bodies of {size}: 408 {slow}, 429 {crowded}, 413 {large}, after {took:?}");
    assert!(slow <= 100, "few of one network are waited for: {slow}");
    if size < MIB {
        assert!(slow > 0 && crowded > 0, "each is answered: {slow} {crowded}");
    }
}

/// The same over three connections with a hundred streams each.
async fn half_sent_streams(target: &Target) {
    let attacks = (0..3).map(|_| async {
        let mut stream = target.connect().await;
        let mut bytes = preface(&[]);
        for number in 0..100 {
            let id = 2 * number + 1;
            let head = call("/v1/setup-codes/exchange", "application/json", None);
            bytes.extend(frame(HEADERS, END_HEADERS, id, &head));
            bytes.extend(frame(DATA, 0, id, &[b' '; 50]));
        }
        stream.write_all(&bytes).await.unwrap();
        stream
    });
    let held = join_all(attacks).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    drop(held);
}

/// Streams that the server has to reset because the client violates the protocol. Each costs the
/// server work, and does not count against the client's limit.
async fn made_resets(target: &Target, key: &str) {
    let mut stream = target.connect().await;
    let mut bytes = preface(&[]);
    for number in 0..1000 {
        let id = 2 * number + 1;
        let head = call("/construct.v1.TaskService/ListTasks", "application/grpc", Some(key));
        bytes.extend(frame(HEADERS, END_HEADERS, id, &head));
        bytes.extend(frame(WINDOW_UPDATE, 0, id, &0x7fff_ffff_u32.to_be_bytes()));
    }
    // The connection may close before everything is sent.
    _ = stream.write_all(&bytes).await;
    let mut all = Vec::new();
    _ = timeout(Duration::from_secs(10), stream.read_to_end(&mut all))
        .await
        .expect("the connection is closed");
    let mut rest = all.as_slice();
    let (mut kinds, mut resets) = (Vec::new(), 0);
    while let [a, b, c, kind, _, _, _, _, _, ..] = rest {
        kinds.push(*kind);
        resets += usize::from(*kind == 3);
        let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
        rest = rest.get(9 + length..).unwrap_or_default();
    }
    assert!(kinds.contains(&GOAWAY) || resets < 1000, "the client gets the reason: {kinds:?}");
    assert!(resets <= 110, "the server resets few streams of one connection: {resets}");
}

/// Connections whose requests never begin, or whose headers never end, and some with invented
/// credentials.
async fn unfinished(target: &Target) {
    let silent = (0..100).map(|number| async move {
        let mut stream = target.connect().await;
        let bytes: Vec<u8> = match number % 4 {
            0 => Vec::new(),
            1 => b"PRI * HTT".to_vec(),
            2 => preface(&[]),
            _ => [b"GET / HTTP/1.1\r\nx: ".to_vec(), vec![b'x'; 60_000]].concat(),
        };
        // Those beyond the network's share are closed at once.
        _ = stream.write_all(&bytes).await;
        timeout(UNREAD_TIMEOUT, read_to_close(&mut stream))
            .await
            .unwrap_or_else(|_| panic!("connection {number} is still open"));
    });
    let made_up = (0..100).map(|number| async move {
        for attempt in 0..20 {
            let mut stream = target.connect().await;
            let key = format!("ct_{number:021}{attempt:022}");
            _ = stream.write_all(&half_request("/v1/tasks", Some(&key), MIB, 1000)).await;
            let answer = read_to_close(&mut stream).await;
            // Those without a slot are closed unread.
            let fine = answer.is_empty()
                || ["401", "429"]
                    .iter()
                    .any(|code| answer.starts_with(&format!("HTTP/1.1 {code}")));
            assert!(fine, "{answer}");
        }
    });
    tokio::join!(join_all(silent), join_all(made_up));
}

/// Bodies that a tenant leaves incomplete.
async fn half_sent_by_a_tenant(target: &Target, key: &str) {
    let attacks = (0..100).map(|_| async {
        let mut stream = target.connect().await;
        let size = 4 * MIB;
        _ = stream.write_all(&half_request("/v1/tasks", Some(key), size, size - 50)).await;
        read_to_close(&mut stream).await
    });
    let answers = timeout(Duration::from_secs(25), join_all(attacks)).await.expect("none is held");
    let told = |status: &str| {
        answers.iter().filter(|answer| answer.starts_with(&format!("HTTP/1.1 {status}"))).count()
    };
    let (slow, crowded) = (told("408"), told("429"));
    println!("half-sent bodies of a tenant: 408 {slow}, 429 {crowded}");
    assert!(slow <= 8, "one organization holds no more than its share: {slow}");
}

/// Subscriptions whose events are not read.
async fn unread_events(target: &Target, key: &str, task: &str) {
    let attacks = (0..150).map(|_| async {
        let mut stream = target.connect_small(target.address).await;
        let request = format!(
            "GET /v1/tasks/{task}/events?cursor=0 HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\
             connection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    });
    let streams = join_all(attacks).await;
    // Some do not read, and the others get no slot until they are told to retry.
    wait_for_closed(&streams, streams.len()).await;
}

/// gRPC answers that the client grants no window for.
async fn unread_answers(target: &Target, key: &str, task: &str) {
    let attacks = (0..5).map(|_| async {
        let mut stream = target.connect().await;
        // No window for any stream.
        let mut bytes = preface(&[(4, 0)]);
        let message = [&[0x0a, u8::try_from(task.len()).unwrap()][..], task.as_bytes()].concat();
        let body =
            [&[0, 0, 0, 0, u8::try_from(message.len()).unwrap()][..], message.as_slice()].concat();
        for number in 0..200 {
            let id = 2 * number + 1;
            let head =
                call("/construct.v1.MessageService/ListMessages", "application/grpc", Some(key));
            bytes.extend(frame(HEADERS, END_HEADERS, id, &head));
            bytes.extend(frame(DATA, END_STREAM, id, &body));
        }
        stream.write_all(&bytes).await.unwrap();
        // A client that got only refusals, which need no window, has read everything.
        timeout(UNREAD_TIMEOUT, read_to_close(&mut stream)).await.is_ok()
    });
    let ended = join_all(attacks).await;
    assert!(ended.contains(&true), "no connection without window is closed");
}

/// Connections of the operator protocol that request a whole session repeatedly and do not read.
async fn unread_sessions(target: &Target, key: &str, task: &str) {
    let lines = |wanted: u32| {
        (0..wanted).map(move |number| {
            json!({"id": number.to_string(), "type": "export_session", "sessionID": task})
                .to_string()
        })
    };
    let plain = (0..45).map(|_| async {
        let mut stream = target.connect_small(target.operator).await;
        let mut bytes = format!("{}\n", json!({"id": "a", "type": "auth", "key": key}));
        for line in lines(64) {
            bytes.push_str(&line);
            bytes.push('\n');
        }
        stream.write_all(bytes.as_bytes()).await.unwrap();
        stream
    });
    let sockets = (0..15).map(|_| async {
        let stream = target.connect_small(target.operator).await;
        let mut request = format!("ws://{}/", target.operator).into_client_request().unwrap();
        request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
        let (mut socket, _) = tokio_tungstenite::client_async(request, stream).await.unwrap();
        for line in lines(64) {
            futures::SinkExt::send(&mut socket, Message::text(line)).await.unwrap();
        }
        socket.into_inner()
    });
    let (mut streams, sockets) = tokio::join!(join_all(plain), join_all(sockets));
    streams.extend(sockets);
    // Few are served a session at a time. Those lose their connections; the others wait for a slot.
    wait_for_closed(&streams, 1).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
}

/// A task with a few MiB of text.
async fn talkative_task(mesh: &Mesh, key: &str) -> String {
    output(
        mesh,
        Some(key),
        &["modelprovider", "create", "p", "--type", "scripted", "--script-file", "-"],
        r#"{"turns": [{"text": "Done."}]}"#,
    )
    .await;
    output(mesh, Some(key), &["model", "create", "m", "--provider", "p", "--model-id", "m"], "")
        .await;
    output(mesh, Some(key), &["agent", "create", "worker", "--model", "m"], "").await;
    let http = construct_tests::http::client().build().unwrap();
    let post = async |path: String, body: Value| {
        let request =
            http.post(format!("{}{path}", mesh.gateway_url())).bearer_auth(key).json(&body);
        let answer = request.send().await.unwrap().error_for_status().unwrap();
        answer.json::<Value>().await.unwrap()
    };
    let task = post("/v1/tasks".to_owned(), json!({"agent": "worker"})).await;
    let id = task["metadata"]["id"].as_str().unwrap().to_owned();
    for number in 0..5 {
        let text = format!("{number}").repeat(900 * 1024);
        post(format!("/v1/tasks/{id}/messages"), json!({"blocks": [{"text": {"text": text}}]}))
            .await;
    }
    id
}

/// One long trial: `./dev test -P nightly -E 'test(flood::)'`.
mod nightly {
    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn flooded_gateway_serves_others_within_its_memory() {
        let operator = free_address().unwrap();
        let listen = operator.to_string();
        let mut mesh = Mesh::prepare(&[REQUIRED, ("CONSTRUCT_GATEWAY_OPERATOR_LISTEN", &listen)])
            .await
            .unwrap();
        mesh.spawn(Service::Gateway).unwrap();
        mesh.wait_until_ready(Service::Gateway).await.unwrap();
        let first = first_key(&mesh).await;
        let first = String::from_utf8(first.stdout).unwrap().trim().to_owned();
        let mut keys = Vec::new();
        for name in ["attacker", "hoarder", "tenant"] {
            let made = json_output(&mesh, &first, &["organization", "create", name], "").await;
            let code = made["setupCode"]["code"].as_str().unwrap().to_owned();
            keys.push(output(&mesh, None, &["key", "exchange"], &code).await.trim().to_owned());
        }
        let [attacker, hoarder, tenant] = [0, 1, 2].map(|number: usize| keys[number].clone());
        let task = talkative_task(&mesh, &attacker).await;
        let address: SocketAddr = mesh.gateway_url().trim_start_matches("http://").parse().unwrap();
        let target = Target { address, operator };
        let probers = [
            Prober::start("on new connections", address, TENANT, tenant.clone(), false),
            Prober::start("in the attackers' network", address, ATTACKER, tenant, true),
        ];
        let check = |attack: &str| probers.iter().for_each(|prober| prober.check(attack));
        tokio::time::sleep(Duration::from_millis(500)).await;
        check("nothing");

        half_sent(&target, 100).await;
        check("half-sent bodies");
        half_sent(&target, 4 * MIB).await;
        check("large half-sent bodies");
        half_sent_streams(&target).await;
        check("half-sent streams");
        made_resets(&target, &attacker).await;
        check("streams that the server has to reset");
        // Concurrently, since each takes half a minute. Clients that do not read are detected by
        // the time the others come, and leave them the slots for newcomers.
        let unfinished = async {
            tokio::time::sleep(Duration::from_secs(3)).await;
            tokio::join!(unfinished(&target), half_sent_by_a_tenant(&target, &hoarder));
        };
        tokio::join!(
            unread_events(&target, &attacker, &task),
            unread_answers(&target, &attacker, &task),
            unread_sessions(&target, &attacker, &task),
            unfinished,
        );
        check("answers that nobody reads, and requests that do not end");

        let peak = mesh.peak_memory(Service::Gateway).unwrap();
        println!(
            "peak: {} MiB, now: {} MiB",
            peak >> 20,
            mesh.resident_memory(Service::Gateway).unwrap() >> 20
        );
        assert!(peak < MEMORY_LIMIT, "the gateway took {} MiB", peak >> 20);
        // Clients that read again are served again.
        json_output(&mesh, &attacker, &["task", "get", &task], "").await;
    }
}
