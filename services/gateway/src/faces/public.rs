//! Streams that anybody may open, and leave open: so many in all, and so many of one network.

use std::{
    net::Ipv4Addr,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::{
    Status,
    body::Body,
    codegen::http::{Request, Response},
};

use crate::{
    identity::peer::Peer,
    places::{Place, Places},
    status,
};

const STREAMS: [&str; 3] = [
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];
/// Streams at the same time. Clients that balance their load themselves watch the health of each
/// connection.
const MOST: usize = 4096;
/// Those of one network.
const OF_ONE: usize = 2048;

pub(super) struct Public(Places);

impl Default for Public {
    fn default() -> Self {
        Self(Places::new(MOST, OF_ONE))
    }
}

impl Public {
    /// A place for a request that opens such a stream; none for any other.
    ///
    /// # Errors
    /// `RESOURCE_EXHAUSTED` when there are too many.
    pub(super) fn take(&self, request: &Request<Body>) -> Result<Option<Place>, Status> {
        if !STREAMS.contains(&request.uri().path()) {
            return Ok(None);
        }
        // Over the socket it is somebody of this machine.
        let peer = Peer::of(request.extensions()).address().unwrap_or(Ipv4Addr::LOCALHOST.into());
        let crowded = || {
            status::exhausted(
                "too many watch the gateway's health or ask for its methods at the moment",
            )
        };
        self.0.take(Some(peer)).map(Some).ok_or_else(crowded)
    }
}

/// An answer that holds a place until its end.
pub(super) fn holding(place: Option<Place>, answer: Response<Body>) -> Response<Body> {
    match place {
        None => answer,
        Some(place) => answer.map(|body| Body::new(Held { body, _place: place })),
    }
}

struct Held {
    body: Body,
    _place: Place,
}

impl http_body::Body for Held {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use http_body_util::Full;
    use tonic::transport::server::TcpConnectInfo;

    use super::*;
    use crate::identity::peer::Forwarded;

    #[test]
    fn a_place_is_held_until_the_answer_is_read_or_left() {
        let public = Public(Places::new(2, 1));
        let ask = |path: &str, network: u8| {
            let mut request = Request::new(Body::empty());
            *request.uri_mut() = path.parse().expect("a path");
            let remote_addr = Some(SocketAddr::from(([10, 0, 0, network], 1)));
            request.extensions_mut().insert(TcpConnectInfo { local_addr: None, remote_addr });
            public.take(&request)
        };
        let [watch, reflection, _] = STREAMS;
        let first = holding(
            ask(watch, 1).expect("there is room"),
            Response::new(Body::new(Full::new(Bytes::from("ready")))),
        );
        assert!(
            ask(reflection, 1).is_err_and(|status| status.code() == tonic::Code::ResourceExhausted)
        );
        let second = ask(reflection, 2).expect("another network has room");
        assert!(ask(watch, 3).is_err());
        for path in ["/grpc.health.v1.Health/Check", "/construct.v1.EventService/Subscribe"] {
            assert!(ask(path, 1).expect("it is not counted here").is_none());
        }
        drop(first);
        assert!(second.is_some() && ask(watch, 3).is_ok());
    }

    #[test]
    fn clients_of_one_proxy_are_told_apart() {
        let public = Public(Places::new(8, 1));
        let ask = |client: u8| {
            let mut request = Request::new(Body::empty());
            *request.uri_mut() = STREAMS[0].parse().expect("a path");
            let remote_addr = Some(SocketAddr::from(([10, 0, 0, 1], 1)));
            request.extensions_mut().insert(TcpConnectInfo { local_addr: None, remote_addr });
            request.extensions_mut().insert(Forwarded([192, 0, 2, client].into()));
            public.take(&request)
        };
        let held = ask(1).expect("there is room");
        assert!(held.is_some() && ask(1).is_err() && ask(2).is_ok());
    }
}
