//! An external server whose requests have an effect.

use std::{
    collections::HashMap,
    io::Write as _,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::AbortHandle,
};

use super::{Shape, script};

/// Effects of requests, by the number in the request.
pub(super) type Effects = HashMap<u32, Vec<Effect>>;

/// The effect of one request.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Effect {
    /// The text of the script.
    pub(super) note: String,
    /// The random reply.
    pub(super) reply: String,
}

/// `POST /<number>` appends the number to the file of effects and is answered, both after random
/// delays.
pub(super) struct Remote {
    url: String,
    shared: Arc<Shared>,
    abort: AbortHandle,
}

struct Shared {
    work: PathBuf,
    max_delay: Duration,
    random: Mutex<fastrand::Rng>,
    effects: Mutex<Effects>,
    /// Number of requests, and of those without a response.
    requests: watch::Sender<(u32, u32)>,
}

impl Remote {
    pub(super) async fn start(work: &Path, shape: Shape, random: fastrand::Rng) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let shared = Arc::new(Shared {
            work: work.to_owned(),
            max_delay: match shape {
                Shape::Sequential => Duration::from_millis(3),
                Shape::Concurrent => Duration::from_millis(12),
            },
            random: Mutex::new(random),
            effects: Mutex::default(),
            requests: watch::Sender::new((0, 0)),
        });
        shared.tick(0);
        let serving = Arc::clone(&shared);
        let serve = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let shared = Arc::clone(&serving);
                // In its own task, which continues when the client is gone.
                tokio::spawn(async move { shared.answer(stream).await });
            }
        });
        Self { url, shared, abort: serve.abort_handle() }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// Number of requests so far.
    pub(super) fn requests(&self) -> u32 {
        self.shared.requests.borrow().0
    }

    /// Waits for this number of requests.
    pub(super) async fn wait_for_requests(&self, requests: u32) {
        let mut changes = self.shared.requests.subscribe();
        changes
            .wait_for(|(all, _)| *all >= requests)
            .await
            .expect("the sender lives as long as this server");
    }

    /// Waits until every request is answered.
    pub(super) async fn wait_until_idle(&self) {
        let mut changes = self.shared.requests.subscribe();
        changes
            .wait_for(|(_, open)| *open == 0)
            .await
            .expect("the sender lives as long as this server");
    }

    pub(super) fn effects(&self) -> Effects {
        self.shared.effects.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Remote {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl Shared {
    async fn answer(&self, mut stream: TcpStream) {
        let Some((number, note)) = read_request(&mut stream).await else { return };
        let mut all = 0;
        self.requests.send_modify(|(requests, open)| {
            *requests += 1;
            *open += 1;
            all = *requests;
        });
        let (before, after, reply) = {
            let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
            let max_delay = u64::try_from(self.max_delay.as_micros()).unwrap_or(u64::MAX);
            let mut delay =
                || Duration::from_micros(random.u64(..max_delay) * u64::from(random.bool()));
            (delay(), delay(), random.u64(..).to_string())
        };
        sleep_if_long(before).await;
        self.tick(all);
        append(&self.work, number);
        let effect = Effect { note, reply: reply.clone() };
        self.effects
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(number)
            .or_default()
            .push(effect);
        sleep_if_long(after).await;
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            reply.len()
        );
        // The client may be dead.
        let _ = stream.write_all(format!("{head}{reply}").as_bytes()).await;
        self.requests.send_modify(|(_, open)| *open -= 1);
    }

    /// Changes a file that the script reads: another read would give other content.
    fn tick(&self, number: u32) {
        std::fs::write(self.work.join(script::TICK_FILE), number.to_string())
            .expect("a writable workspace");
    }
}

/// Sleeps, unless the time is below a millisecond.
async fn sleep_if_long(time: Duration) {
    if time >= Duration::from_millis(1) {
        tokio::time::sleep(time).await;
    }
}

/// Appends to the file of effects, in one write.
fn append(work: &Path, number: u32) {
    let file = std::fs::File::options().append(true).create(true).open(work.join(script::LOG_FILE));
    file.and_then(|mut file| file.write_all(format!("{number}\n").as_bytes()))
        .expect("a writable workspace");
}

/// Reads the number and the body of a request; `None` if it was cut off.
async fn read_request(stream: &mut TcpStream) -> Option<(u32, String)> {
    let mut request = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&request);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok());
            if body.len() >= length.unwrap_or(0) {
                let number = head.split([' ', '/']).find_map(|word| word.parse().ok())?;
                return Some((number, body.to_owned()));
            }
        }
        match stream.read(&mut buffer).await {
            Ok(read @ 1..) => request.extend_from_slice(&buffer[..read]),
            _ => return None,
        }
    }
}
