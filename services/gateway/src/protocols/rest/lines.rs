//! A stream as lines of JSON (NDJSON), for files.

use bytes::Bytes;
use futures::stream;
use http_body::Frame;
use http_body_util::StreamBody;
use prost_reflect::{DynamicMessage, MessageDescriptor};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderValue, Response, header},
};

use crate::{
    protocols::{call::Answers, errors},
    status,
};

/// One line per message. Asks for the next message when the client has taken the previous one. An
/// error cuts the stream off, which clients notice; a line cannot report it.
pub(super) fn response(mut answers: Answers, kind: MessageDescriptor) -> Response<Body> {
    let metadata = std::mem::take(&mut answers.metadata);
    let lines = stream::unfold(Some((answers, kind)), async |state| {
        let (mut answers, kind) = state?;
        match answers
            .next()
            .await
            .and_then(|message| message.map(|message| line(&kind, message)).transpose())
        {
            Ok(Some(line)) => Some((Ok::<_, Status>(Frame::data(line)), Some((answers, kind)))),
            Ok(None) => None,
            Err(status) => Some((Err(status), None)),
        }
    });
    let mut response = Response::new(Body::new(StreamBody::new(lines)));
    let headers = response.headers_mut();
    errors::append(headers, metadata);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

fn line(kind: &MessageDescriptor, message: Bytes) -> Result<Bytes, Status> {
    let message = DynamicMessage::decode(kind.clone(), message)
        .map_err(|error| status::internal("an answer cannot be read", &error))?;
    let mut line = serde_json::to_vec(&message)
        .map_err(|error| status::internal("an answer cannot be written as JSON", &error))?;
    line.push(b'\n');
    Ok(line.into())
}
