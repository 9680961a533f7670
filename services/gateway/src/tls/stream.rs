//! A connection, secured or not.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use socket2::SockRef;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
    time::Sleep,
};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::limit::UNREAD_TIMEOUT;

/// Bytes that the kernel keeps for a client before it is ready to take them. What is on its way
/// comes on top, which grows with the line.
const UNSENT: u32 = 128 * 1024;

/// What a client and the gateway speak over. The layers above see no difference.
///
/// A client that takes nothing for [`UNREAD_TIMEOUT`] while there is something to write loses the
/// connection.
#[derive(Debug)]
pub(crate) struct Stream {
    over: Over,
    /// When a write that cannot go on fails.
    blocked: Option<Pin<Box<Sleep>>>,
}

#[derive(Debug)]
pub(crate) enum Over {
    Plain(TcpStream),
    // Much larger than the other.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    pub(crate) fn new(over: Over) -> Self {
        let stream = Self { over, blocked: None };
        // If it cannot be set, the kernel keeps more.
        _ = SockRef::from(stream.tcp()).set_tcp_notsent_lowat(UNSENT);
        stream
    }

    fn tcp(&self) -> &TcpStream {
        match &self.over {
            Over::Plain(stream) => stream,
            Over::Tls(stream) => stream.get_ref().0,
        }
    }

    /// Fails a write that has not gone on for too long.
    fn limit<T>(
        &mut self,
        context: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.blocked = None;
            return written;
        }
        let blocked =
            self.blocked.get_or_insert_with(|| Box::pin(tokio::time::sleep(UNREAD_TIMEOUT)));
        ready!(blocked.as_mut().poll(context));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl Connected for Stream {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.tcp().connect_info()
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match &mut self.get_mut().over {
            Over::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Over::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match &mut this.over {
            Over::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Over::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        };
        this.limit(context, written)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = match &mut this.over {
            Over::Plain(stream) => Pin::new(stream).poll_write_vectored(context, parts),
            Over::Tls(stream) => Pin::new(stream).poll_write_vectored(context, parts),
        };
        this.limit(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.over {
            Over::Plain(stream) => stream.is_write_vectored(),
            Over::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let written = match &mut this.over {
            Over::Plain(stream) => Pin::new(stream).poll_flush(context),
            Over::Tls(stream) => Pin::new(stream).poll_flush(context),
        };
        this.limit(context, written)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let written = match &mut this.over {
            Over::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Over::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        };
        this.limit(context, written)
    }
}
