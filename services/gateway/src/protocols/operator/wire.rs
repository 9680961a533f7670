//! How lines travel: over TCP (or TLS) as they are, or as the messages of a WebSocket. The first
//! byte of a connection tells which.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures::{
    SinkExt as _, StreamExt as _,
    stream::{SplitSink, SplitStream},
};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf, ReadHalf, WriteHalf};
use tokio_tungstenite::{
    WebSocketStream, accept_hdr_async_with_config,
    tungstenite::{
        Message,
        error::{CapacityError, Error},
        handshake::server::{ErrorResponse, Request, Response},
        protocol::WebSocketConfig,
    },
};
use tonic::codegen::http::{HeaderMap, StatusCode};

use super::{
    MAX_LINE,
    line::{Line, Lines},
};
use crate::{limit::Account, protocols::guard::Guard, tls::stream::Stream};

/// Bytes that a WebSocket reads at once.
const READ: usize = 4 * 1024;

/// A connection of which one byte was read to see what is spoken. It is the first that is read.
pub(super) struct Rewound {
    first: Option<u8>,
    stream: Stream,
    /// Charged for what is read; none: nobody is yet.
    account: Option<Account>,
}

impl Rewound {
    pub(super) const fn new(first: u8, stream: Stream) -> Self {
        Self { first: Some(first), stream, account: None }
    }
}

impl AsyncRead for Rewound {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if buffer.remaining() > 0
            && let Some(first) = this.first.take()
        {
            buffer.put_slice(&[first]);
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
        let read = buffer.filled().len() - before;
        Poll::Ready(match &this.account {
            Some(account) => account.receive(read).map_err(io::Error::other),
            None => Ok(()),
        })
    }
}

impl AsyncWrite for Rewound {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(context, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(context)
    }
}

pub(super) struct Reader {
    wire: Wire,
    /// Charged for a line until it is there.
    account: Account,
}

enum Wire {
    Tcp(Lines<ReadHalf<Rewound>>),
    Web(SplitStream<WebSocketStream<Rewound>>),
}

pub(super) enum Writer {
    Tcp(WriteHalf<Rewound>),
    Web(SplitSink<WebSocketStream<Rewound>, Message>),
}

/// Lines as they are.
pub(super) fn plain(mut stream: Rewound, account: Account) -> (Reader, Writer) {
    stream.account = Some(account.clone());
    let (reader, writer) = tokio::io::split(stream);
    (Reader { wire: Wire::Tcp(Lines::new(reader, MAX_LINE)), account }, Writer::Tcp(writer))
}

/// The server's side of a WebSocket, if the guard lets it in, and the headers it was asked for
/// with.
///
/// # Errors
/// When it is not let in, or is no WebSocket; the client has been told.
pub(super) async fn web(stream: Rewound, guard: &Guard) -> Result<(WebSocket, HeaderMap), Error> {
    let mut headers = HeaderMap::new();
    let check = |request: &Request, response: Response| -> Result<Response, ErrorResponse> {
        headers.clone_from(request.headers());
        guard.check(request).map(|()| response).map_err(|status| {
            let mut refusal = ErrorResponse::new(Some(status.message().to_owned()));
            *refusal.status_mut() = StatusCode::FORBIDDEN;
            refusal
        })
    };
    // Small reads: what comes behind a log-in is read when it is known who sends it.
    let config = WebSocketConfig::default()
        .read_buffer_size(READ)
        .max_message_size(Some(MAX_LINE))
        .max_frame_size(Some(MAX_LINE));
    let socket = accept_hdr_async_with_config(stream, check, Some(config)).await?;
    Ok((WebSocket(socket), headers))
}

/// A WebSocket that was let in.
pub(super) struct WebSocket(WebSocketStream<Rewound>);

impl WebSocket {
    pub(super) fn split(mut self, account: Account) -> (Reader, Writer) {
        self.0.get_mut().account = Some(account.clone());
        let (writer, reader) = self.0.split();
        (Reader { wire: Wire::Web(reader), account }, Writer::Web(writer))
    }
}

impl Reader {
    /// The next line; none at the end. May be dropped and called again.
    pub(super) async fn next(&mut self) -> io::Result<Option<Line>> {
        let line = self.wire.next().await?;
        // What has come of the next one is a few KiB.
        self.account.consume(usize::MAX);
        Ok(line)
    }
}

impl Wire {
    async fn next(&mut self) -> io::Result<Option<Line>> {
        let reader = match self {
            Self::Tcp(lines) => return lines.next().await,
            Self::Web(reader) => reader,
        };
        loop {
            return match reader.next().await {
                Some(Ok(Message::Text(text))) => Ok(Some(Line::Text(text.as_str().to_owned()))),
                Some(Ok(Message::Binary(_))) => Ok(Some(Line::NoText)),
                // They are answered within.
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => continue,
                Some(Ok(Message::Close(_)) | Err(Error::ConnectionClosed)) | None => Ok(None),
                // The rest of it would have to be read; the next attempt finds the connection
                // broken.
                Some(Err(Error::Capacity(CapacityError::MessageTooLong { .. }))) => {
                    Ok(Some(Line::TooLong))
                }
                Some(Err(error)) => Err(io::Error::other(error)),
            };
        }
    }
}

impl Writer {
    /// Sends a line.
    ///
    /// # Errors
    /// When the connection is broken.
    pub(super) async fn write(&mut self, mut line: String) -> io::Result<()> {
        match self {
            Self::Tcp(writer) => {
                line.push('\n');
                writer.write_all(line.as_bytes()).await?;
                // TLS keeps what the socket doesn't take at once.
                writer.flush().await
            }
            Self::Web(writer) => writer.send(Message::text(line)).await.map_err(io::Error::other),
        }
    }

    /// Says that nothing follows.
    pub(super) async fn close(&mut self) {
        // The connection ends in any case.
        _ = match self {
            Self::Tcp(writer) => writer.shutdown().await,
            Self::Web(writer) => writer.close().await.map_err(io::Error::other),
        };
    }
}
