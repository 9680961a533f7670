//! A connection, secured or not.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::TcpStream,
};
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::places::Place;

/// What a client and the gateway speak over. The layers above see no difference.
#[derive(Debug)]
pub(crate) struct Stream {
    over: Over,
    _place: Place,
}

#[derive(Debug)]
pub(crate) enum Over {
    Plain(TcpStream),
    // Much larger than the other.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Stream {
    /// A connection, and the place it holds as long as it is there.
    pub(crate) const fn holding(over: Over, place: Place) -> Self {
        Self { over, _place: place }
    }

    fn tcp(&self) -> &TcpStream {
        match &self.over {
            Over::Plain(stream) => stream,
            Over::Tls(stream) => stream.get_ref().0,
        }
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
        match &mut self.get_mut().over {
            Over::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Over::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.get_mut().over {
            Over::Plain(stream) => Pin::new(stream).poll_write_vectored(context, parts),
            Over::Tls(stream) => Pin::new(stream).poll_write_vectored(context, parts),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.over {
            Over::Plain(stream) => stream.is_write_vectored(),
            Over::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().over {
            Over::Plain(stream) => Pin::new(stream).poll_flush(context),
            Over::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.get_mut().over {
            Over::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Over::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
