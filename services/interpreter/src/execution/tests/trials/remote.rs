//! Somebody else's server, on which requests have an effect.

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

/// What requests did, by the number they came with.
pub(super) type Effects = HashMap<u32, Vec<Effect>>;

/// What one request did.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Effect {
    /// What the script said.
    pub(super) note: String,
    /// What it was answered, which nobody could have guessed.
    pub(super) reply: String,
}

/// `POST /<number>` appends the number to the file of effects, sooner or later, and is answered,
/// sooner or later.
pub(super) struct Remote {
    url: String,
    shared: Arc<Shared>,
    abort: AbortHandle,
}

struct Shared {
    work: PathBuf,
    longest: Duration,
    random: Mutex<fastrand::Rng>,
    effects: Mutex<Effects>,
    /// Requests so far, and how many of them are not answered.
    requests: watch::Sender<(u32, u32)>,
}

impl Remote {
    pub(super) async fn start(work: &Path, shape: Shape, random: fastrand::Rng) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let shared = Arc::new(Shared {
            work: work.to_owned(),
            longest: match shape {
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
                // In a task of its own, which goes on when whoever asked is gone.
                tokio::spawn(async move { shared.answer(stream).await });
            }
        });
        Self { url, shared, abort: serve.abort_handle() }
    }

    pub(super) fn url(&self) -> &str {
        &self.url
    }

    /// How many requests came so far.
    pub(super) fn requests(&self) -> u32 {
        self.shared.requests.borrow().0
    }

    /// Waits for so many requests.
    pub(super) async fn asked(&self, requests: u32) {
        let mut changes = self.shared.requests.subscribe();
        changes.wait_for(|(all, _)| *all >= requests).await.expect("the sender is ours");
    }

    /// Waits until every request is dealt with.
    pub(super) async fn is_idle(&self) {
        let mut changes = self.shared.requests.subscribe();
        changes.wait_for(|(_, open)| *open == 0).await.expect("the sender is ours");
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
        let Some((number, note)) = read(&mut stream).await else { return };
        let mut all = 0;
        self.requests.send_modify(|(requests, open)| {
            *requests += 1;
            *open += 1;
            all = *requests;
        });
        let (before, after, reply) = {
            let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
            let longest = u64::try_from(self.longest.as_micros()).unwrap_or(u64::MAX);
            let mut pause =
                || Duration::from_micros(random.u64(..longest) * u64::from(random.bool()));
            (pause(), pause(), random.u64(..).to_string())
        };
        pass(before).await;
        self.tick(all);
        append(&self.work, number);
        let effect = Effect { note, reply: reply.clone() };
        self.effects
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .entry(number)
            .or_default()
            .push(effect);
        pass(after).await;
        let head = format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n",
            reply.len()
        );
        // Whoever asked may be dead.
        let _ = stream.write_all(format!("{head}{reply}").as_bytes()).await;
        self.requests.send_modify(|(_, open)| *open -= 1);
    }

    /// Changes a file that the script reads: whoever read it again would read something else.
    fn tick(&self, number: u32) {
        std::fs::write(self.work.join(script::TICK), number.to_string())
            .expect("the workspace can be written to");
    }
}

/// Lets time pass: none, or milliseconds.
async fn pass(time: Duration) {
    if time >= Duration::from_millis(1) {
        tokio::time::sleep(time).await;
    }
}

/// Appends to the file of effects, in one write.
fn append(work: &Path, number: u32) {
    let file = std::fs::File::options().append(true).create(true).open(work.join(script::LOG));
    file.and_then(|mut file| file.write_all(format!("{number}\n").as_bytes()))
        .expect("the workspace can be written to");
}

/// The number and the body of a request; nothing when it was broken off.
async fn read(stream: &mut TcpStream) -> Option<(u32, String)> {
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
