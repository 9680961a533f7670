//! Minimal HTTP, so that the benchmark measures the proxy and not its client: an instant upstream,
//! and a client that sends the same bytes repeatedly over one connection.

use std::{
    net::SocketAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
};

/// The largest message in bytes.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;

/// A vendor that answers at once: Chat Completions, streamed on request.
pub(crate) async fn upstream() -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let whole = Arc::new(response("application/json", WHOLE));
    let streamed = Arc::new(response("text/event-stream", STREAMED));
    tokio::spawn(async move {
        while let Ok((connection, _)) = listener.accept().await {
            let (whole, streamed) = (Arc::clone(&whole), Arc::clone(&streamed));
            tokio::spawn(async move {
                // A disconnecting client ends it.
                let _ = answer(connection, &whole, &streamed).await;
            });
        }
    });
    Ok(address)
}

const WHOLE: &str = r#"{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"Hello there."},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}"#;

const STREAMED: &str = concat!(
    r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"Hello"},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" there."},"finish_reason":null}]}"#,
    "\n\n",
    r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
    "\n\n",
    r#"data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,"total_tokens":12}}"#,
    "\n\ndata: [DONE]\n\n",
);

fn response(content_type: &str, body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

async fn answer(mut connection: TcpStream, whole: &[u8], streamed: &[u8]) -> anyhow::Result<()> {
    connection.set_nodelay(true)?;
    let mut buffer = Vec::with_capacity(16 * 1024);
    loop {
        let (head, length) = loop {
            if let Some(end) = find(&buffer, b"\r\n\r\n") {
                break (end + 4, Length::parse(&buffer[..end])?);
            }
            read(&mut connection, &mut buffer).await?;
        };
        let end = length.end(&mut connection, &mut buffer, head).await?;
        let asks = |words: &[u8]| find(&buffer[head..end], words).is_some();
        let answer =
            if asks(b"\"stream\":true") || asks(b"\"stream\": true") { streamed } else { whole };
        connection.write_all(answer).await?;
        buffer.drain(..end);
    }
}

/// How the end of a body is determined.
enum Length {
    Known(usize),
    Chunked,
}

impl Length {
    fn parse(head: &[u8]) -> anyhow::Result<Self> {
        let head = std::str::from_utf8(head)?.to_ascii_lowercase();
        let value =
            |name: &str| head.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        if let Some(length) = value("content-length:") {
            return Ok(Self::Known(length.parse()?));
        }
        Ok(if value("transfer-encoding:").is_some() { Self::Chunked } else { Self::Known(0) })
    }

    /// Reads until the body, which begins at `head`, is complete, and returns its end.
    async fn end(
        &self,
        connection: &mut TcpStream,
        buffer: &mut Vec<u8>,
        head: usize,
    ) -> anyhow::Result<usize> {
        loop {
            let end = match self {
                Self::Known(length) => (buffer.len() >= head + length).then_some(head + length),
                Self::Chunked if buffer[head..].starts_with(b"0\r\n\r\n") => Some(head + 5),
                Self::Chunked => find(&buffer[head..], b"\r\n0\r\n\r\n").map(|at| head + at + 7),
            };
            if let Some(end) = end {
                return Ok(end);
            }
            read(connection, buffer).await?;
        }
    }
}

async fn read(connection: &mut TcpStream, buffer: &mut Vec<u8>) -> anyhow::Result<()> {
    let read = connection.read_buf(buffer).await?;
    ensure!(read > 0, "the connection was closed");
    ensure!(buffer.len() < MAX_MESSAGE_BYTES, "a message is too long");
    Ok(())
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// The target of requests.
#[derive(Debug, Clone)]
pub(crate) struct Target {
    pub(crate) address: SocketAddr,
    pub(crate) path: String,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) model: String,
}

impl Target {
    fn request(&self, streamed: bool) -> Vec<u8> {
        let stream =
            if streamed { r#""stream":true,"stream_options":{"include_usage":true},"# } else { "" };
        let model = &self.model;
        let body = format!(
            r#"{{"model":"{model}",{stream}"messages":[{{"role":"system","content":"Be brief."}},{{"role":"user","content":"Say hello."}}]}}"#
        );
        let headers: String =
            self.headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
        let (path, host, length) = (&self.path, self.address, body.len());
        format!(
            "POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n{headers}content-length: {length}\r\n\r\n{body}"
        )
        .into_bytes()
    }

    pub(crate) async fn connect(&self, streamed: bool) -> anyhow::Result<Client> {
        let connection = TcpStream::connect(self.address).await?;
        connection.set_nodelay(true)?;
        Ok(Client {
            connection,
            request: self.request(streamed),
            buffer: Vec::with_capacity(16 * 1024),
            streamed,
        })
    }
}

/// One connection.
#[derive(Debug)]
pub(crate) struct Client {
    connection: TcpStream,
    request: Vec<u8>,
    buffer: Vec<u8>,
    streamed: bool,
}

impl Client {
    /// Sends one request. Returns the time to the response, or for a stream to its first text.
    pub(crate) async fn call(&mut self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        self.connection.write_all(&self.request).await?;
        let mut first = None;
        let head = loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                break end + 4;
            }
            read(&mut self.connection, &mut self.buffer).await?;
        };
        if self.streamed && self.buffer.starts_with(b"HTTP/1.1 200") {
            while find(&self.buffer, b"Hello").is_none() {
                read(&mut self.connection, &mut self.buffer).await?;
            }
            first = Some(began.elapsed());
        }
        let length = Length::parse(&self.buffer[..head])?;
        let end = length.end(&mut self.connection, &mut self.buffer, head).await?;
        let took = first.unwrap_or_else(|| began.elapsed());
        if !self.buffer.starts_with(b"HTTP/1.1 200")
            || find(&self.buffer[head..end], b"Hello").is_none()
        {
            let answer = String::from_utf8_lossy(&self.buffer[..end.min(2_000)]).into_owned();
            bail!("an unexpected response: {answer}");
        }
        self.buffer.drain(..end);
        Ok(took)
    }
}

/// Calls one after the other for `duration`.
pub(crate) async fn serial(
    target: &Target,
    streamed: bool,
    duration: Duration,
) -> anyhow::Result<Vec<Duration>> {
    let mut client = target.connect(streamed).await?;
    let (mut times, began) = (Vec::new(), Instant::now());
    while began.elapsed() < duration {
        times.push(client.call().await.with_context(|| format!("at {}", target.address))?);
    }
    Ok(times)
}

/// Calls over several connections concurrently for `duration`. Returns calls per second.
pub(crate) async fn saturated(
    target: &Target,
    connections: usize,
    duration: Duration,
) -> anyhow::Result<f64> {
    let began = Instant::now();
    let mut running = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let mut client = target.connect(false).await?;
        running.spawn(async move {
            let mut calls = 0_u32;
            while began.elapsed() < duration {
                client.call().await?;
                calls += 1;
            }
            anyhow::Ok(calls)
        });
    }
    let mut calls = 0;
    while let Some(ended) = running.join_next().await {
        calls += ended??;
    }
    Ok(f64::from(calls) / began.elapsed().as_secs_f64())
}
