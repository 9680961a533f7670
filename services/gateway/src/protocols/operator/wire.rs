//! The transport of lines: plain over TCP (or TLS), or as messages of a WebSocket. The first byte
//! of a connection decides.

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
use crate::{limit::Account, protocols::guard::OriginGuard, tls::stream::Stream};

/// Bytes that a WebSocket reads at once.
const WEB_SOCKET_READ_BYTES: usize = 4 * 1024;

/// A connection whose first byte was read to detect the transport. The byte is read again first.
pub(super) struct PeekedStream {
    first: Option<u8>,
    stream: Stream,
    /// The account charged for reads, once there is one.
    account: Option<Account>,
}

impl PeekedStream {
    pub(super) const fn new(first: u8, stream: Stream) -> Self {
        Self { first: Some(first), stream, account: None }
    }
}

impl AsyncRead for PeekedStream {
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

impl AsyncWrite for PeekedStream {
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
    /// The account charged for a line until it is complete.
    account: Account,
}

enum Wire {
    Tcp(Lines<ReadHalf<PeekedStream>>),
    Web(SplitStream<WebSocketStream<PeekedStream>>),
}

pub(super) enum Writer {
    Tcp(WriteHalf<PeekedStream>),
    Web(SplitSink<WebSocketStream<PeekedStream>, Message>),
}

/// Plain lines.
pub(super) fn line_stream(mut stream: PeekedStream, account: Account) -> (Reader, Writer) {
    stream.account = Some(account.clone());
    let (reader, writer) = tokio::io::split(stream);
    (Reader { wire: Wire::Tcp(Lines::new(reader, MAX_LINE)), account }, Writer::Tcp(writer))
}

/// Accepts a WebSocket if the guard allows it, and returns the headers of its request.
///
/// # Errors
/// When it is refused or is not a WebSocket; the client has been answered.
pub(super) async fn accept_web_socket(
    stream: PeekedStream,
    guard: &OriginGuard,
) -> Result<(WebSocket, HeaderMap), Error> {
    let mut headers = HeaderMap::new();
    let check = |request: &Request, response: Response| -> Result<Response, ErrorResponse> {
        headers.clone_from(request.headers());
        guard.check(request).map(|()| response).map_err(|status| {
            let mut refusal = ErrorResponse::new(Some(status.message().to_owned()));
            *refusal.status_mut() = StatusCode::FORBIDDEN;
            refusal
        })
    };
    // Small reads: data after a log-in is read only when the caller is known.
    let config = WebSocketConfig::default()
        .read_buffer_size(WEB_SOCKET_READ_BYTES)
        .max_message_size(Some(MAX_LINE))
        .max_frame_size(Some(MAX_LINE));
    let socket = accept_hdr_async_with_config(stream, check, Some(config)).await?;
    Ok((WebSocket(socket), headers))
}

/// An accepted WebSocket.
pub(super) struct WebSocket(WebSocketStream<PeekedStream>);

impl WebSocket {
    pub(super) fn split(mut self, account: Account) -> (Reader, Writer) {
        self.0.get_mut().account = Some(account.clone());
        let (writer, reader) = self.0.split();
        (Reader { wire: Wire::Web(reader), account }, Writer::Web(writer))
    }
}

impl Reader {
    /// The next line; `None` at the end. Cancel-safe.
    pub(super) async fn next(&mut self) -> io::Result<Option<Line>> {
        let line = self.wire.next().await?;
        // At most a few KiB of the next line are buffered.
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
                Some(Ok(Message::Binary(_))) => Ok(Some(Line::NotUtf8)),
                // The library answers them.
                Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => continue,
                Some(Ok(Message::Close(_)) | Err(Error::ConnectionClosed)) | None => Ok(None),
                // The rest of the message would have to be read. The next attempt finds the
                // connection broken.
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
                // TLS buffers what the socket doesn't accept at once.
                writer.flush().await
            }
            Self::Web(writer) => writer.send(Message::text(line)).await.map_err(io::Error::other),
        }
    }

    /// Sends the end of the stream.
    pub(super) async fn close(&mut self) {
        // The connection ends in any case.
        _ = match self {
            Self::Tcp(writer) => writer.shutdown().await,
            Self::Web(writer) => writer.close().await.map_err(io::Error::other),
        };
    }
}
