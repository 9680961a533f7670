//! Calls with streams.

use bytes::Bytes;
use futures::stream;
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use prost_reflect::MessageDescriptor;
use serde_json::{Map, Value, json};
use tonic::{
    Status,
    body::Body,
    codegen::http::{HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header, request::Parts},
};

use super::{check_version, timeout};
use crate::{
    faces::{
        Inner,
        call::{self, Answers, Call, Deadline},
        codec::{Codec, Encoding},
        envelope::{COMPRESSED, END, Envelope, Envelopes},
        errors,
        methods::{Method, Methods},
    },
    server::MAX_REQUEST,
};

const CONTENT_ENCODING: HeaderName = HeaderName::from_static("connect-content-encoding");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("connect-accept-encoding");

/// Answers a call whose request or answer is a stream. Whatever becomes of the call stands in the stream's end.
pub(super) async fn serve(
    inner: Inner,
    methods: &Methods,
    method: &Method,
    request: Request<Body>,
    codec: Codec,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    let content_type = match codec {
        Codec::Json => "application/connect+json",
        Codec::Proto => "application/connect+proto",
    };
    let accepted = Encoding::accepted(&head.headers, &ACCEPT_ENCODING);
    let (mut metadata, mut sending) = (HeaderMap::new(), None);
    match open(inner, method, &head, body, codec).await {
        Ok((mut answers, deadline)) => {
            metadata = std::mem::take(&mut answers.metadata);
            let (kind, pool) = (method.descriptor.output(), methods.pool().clone());
            sending = Some(Body::new(StreamBody::new(stream::unfold(
                Some(Sending { answers, deadline, codec, kind, accepted, pool }),
                async |sending| {
                    let mut sending = sending?;
                    let (bytes, last) = sending.next().await;
                    Some((Ok::<_, Status>(Frame::data(bytes)), (!last).then_some(sending)))
                },
            ))));
        }
        Err(status) => {
            let end = end(Err(&status), methods.pool());
            sending.get_or_insert(Body::new(http_body_util::Full::new(end)));
        }
    }
    let mut response = Response::new(sending.unwrap_or_default());
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    errors::append(headers, metadata);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    if accepted == Encoding::Gzip {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// The answer to a call that is refused before its body is read.
pub(super) fn refusal(codec: Codec, status: &Status, methods: &Methods) -> Response<Body> {
    let content_type = match codec {
        Codec::Json => "application/connect+json",
        Codec::Proto => "application/connect+proto",
    };
    errors::response(StatusCode::OK, content_type, end(Err(status), methods.pool()))
}

async fn open(
    inner: Inner,
    method: &Method,
    head: &Parts,
    body: Body,
    codec: Codec,
) -> Result<(Answers, Deadline), Status> {
    check_version(&head.headers)?;
    let deadline = Deadline::new(timeout(&head.headers)?);
    let encoding = Encoding::of(&head.headers, &CONTENT_ENCODING)?;
    let (kind, envelopes) = (method.descriptor.input(), Envelopes::new(MAX_REQUEST));
    let receiving = Receiving { body, envelopes, encoding, codec, kind };
    let body = stream::try_unfold(receiving, async |mut receiving| {
        let message = receiving.next().await?;
        Ok::<_, Status>(message.map(|message| (Frame::data(Envelope::encode(0, &message)), receiving)))
    });
    let answers = deadline.begin(Call { method, head }.open(inner, Body::new(StreamBody::new(body)))).await?;
    Ok((answers, deadline))
}

/// The client's messages.
struct Receiving {
    body: Body,
    envelopes: Envelopes,
    encoding: Encoding,
    codec: Codec,
    kind: MessageDescriptor,
}

impl Receiving {
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(Envelope { flags, message }) = self.envelopes.next()? {
                let message = match (flags, self.encoding) {
                    (0, _) => message,
                    (COMPRESSED, Encoding::Gzip) => self.encoding.unpack(message)?,
                    (COMPRESSED, Encoding::Identity) => {
                        return Err(Status::invalid_argument("a message is compressed, and no header says how"));
                    }
                    _ => return Err(Status::invalid_argument("an envelope has flags that are not known")),
                };
                return self.codec.request(&self.kind, message).map(Some);
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame.map_err(call::cut_off)?.into_data() {
                        self.envelopes.push(&data);
                    }
                }
                None if self.envelopes.is_within() => {
                    return Err(Status::invalid_argument("the request ends within a message"));
                }
                None => return Ok(None),
            }
        }
    }
}

/// The answers on their way. The next one is asked for when the client has taken the one before: whoever reads slowly holds
/// back only their own call.
struct Sending {
    answers: Answers,
    deadline: Deadline,
    codec: Codec,
    kind: MessageDescriptor,
    accepted: Encoding,
    pool: prost_reflect::DescriptorPool,
}

impl Sending {
    /// The next envelope, and whether it is the last one.
    async fn next(&mut self) -> (Bytes, bool) {
        let next = match self.deadline.go_on(self.answers.next()).await {
            Ok(Some(message)) => self.codec.response(&self.kind, message).map(Some),
            other => other,
        };
        match next {
            Ok(Some(message)) => match self.accepted.pack(&message) {
                Some(packed) => (Envelope::encode(COMPRESSED, &packed), false),
                None => (Envelope::encode(0, &message), false),
            },
            Ok(None) => (end(Ok(std::mem::take(&mut self.answers.trailers)), &self.pool), true),
            Err(status) => (end(Err(&status), &self.pool), true),
        }
    }
}

/// The last message of a stream.
fn end(result: Result<HeaderMap, &Status>, pool: &prost_reflect::DescriptorPool) -> Bytes {
    let mut end = json!({});
    let trailers = match result {
        Ok(trailers) => trailers,
        Err(status) => {
            end["error"] = errors::connect(status, pool);
            status.metadata().clone().into_headers()
        }
    };
    let mut metadata = Map::new();
    for (name, value) in &call::theirs(trailers) {
        let values = metadata.entry(name.as_str()).or_insert_with(|| json!([]));
        if let (Value::Array(values), Ok(value)) = (values, value.to_str()) {
            values.push(value.into());
        }
    }
    if !metadata.is_empty() {
        end["metadata"] = metadata.into();
    }
    Envelope::encode(END, end.to_string().as_bytes())
}
