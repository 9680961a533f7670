//! Streaming calls.

use bytes::Bytes;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use prost_reflect::MessageDescriptor;
use serde_json::{Map, Value, json};
use tonic::{
    Code, Status,
    body::Body,
    codegen::http::{
        HeaderMap, HeaderName, HeaderValue, Request, Response, StatusCode, header, request::Parts,
    },
};

use super::check;
use crate::{
    deadline::Deadline,
    protocols::{
        Inner,
        call::{self, Answers, Call},
        codec::{Codec, Encoding},
        envelope::{COMPRESSED, END, Envelope, Envelopes},
        errors,
        methods::{Method, Methods},
    },
    server::MAX_REQUEST,
};

const CONTENT_ENCODING: HeaderName = HeaderName::from_static("connect-content-encoding");
const ACCEPT_ENCODING: HeaderName = HeaderName::from_static("connect-accept-encoding");

/// Answers a streaming call. The last envelope has the status of the call.
pub(super) async fn serve(
    inner: Inner,
    methods: &Methods,
    method: &Method,
    deadline: Deadline,
    request: Request<Body>,
    codec: Codec,
) -> Response<Body> {
    let (head, body) = request.into_parts();
    let content_type = match codec {
        Codec::Json => "application/connect+json",
        Codec::Proto => "application/connect+proto",
    };
    let accepted = Encoding::accepted_by(&head.headers, &ACCEPT_ENCODING);
    let (mut sending, mut failure) = (None, None);
    let metadata: HeaderMap;
    match open(inner, method, deadline, &head, body, codec).await {
        Ok(mut answers) => {
            metadata = std::mem::take(&mut answers.metadata);
            let (kind, pool) = (method.descriptor.output(), methods.pool().clone());
            sending = Some(Body::new(StreamBody::new(stream::unfold(
                Some(ResponseStream { answers, deadline, codec, kind, accepted, pool }),
                async |sending| {
                    let mut sending = sending?;
                    let (bytes, last) = sending.next().await;
                    Some((Ok::<_, Status>(Frame::data(bytes)), (!last).then_some(sending)))
                },
            ))));
        }
        Err(status) => {
            metadata = call::application_metadata(status.metadata().clone().into_headers());
            let end = end(Err(&status), methods.pool());
            sending.get_or_insert(Body::new(http_body_util::Full::new(end)));
            failure = Some(status.code());
        }
    }
    let mut response = Response::new(sending.unwrap_or_default());
    *response.status_mut() = StatusCode::OK;
    if let Some(code) = failure {
        response.extensions_mut().insert::<Code>(code);
    }
    let headers = response.headers_mut();
    errors::append(headers, metadata);
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    if accepted == Encoding::Gzip {
        headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    response
}

/// The response to a call that is refused before its body is read.
pub(super) fn refusal(codec: Codec, status: &Status, methods: &Methods) -> Response<Body> {
    let content_type = match codec {
        Codec::Json => "application/connect+json",
        Codec::Proto => "application/connect+proto",
    };
    let mut response =
        errors::response(StatusCode::OK, content_type, end(Err(status), methods.pool()));
    response.extensions_mut().insert(status.code());
    errors::append(
        response.headers_mut(),
        call::application_metadata(status.metadata().clone().into_headers()),
    );
    response
}

async fn open(
    inner: Inner,
    method: &Method,
    deadline: Deadline,
    head: &Parts,
    body: Body,
    codec: Codec,
) -> Result<Answers, Status> {
    check(&head.headers)?;
    let encoding = Encoding::from_header(&head.headers, &CONTENT_ENCODING)?;
    let (kind, envelopes) = (method.descriptor.input(), Envelopes::new(MAX_REQUEST));
    let mut receiving = RequestStream { body, envelopes, encoding, codec, kind };
    deadline
        .begin(async {
            let first = receiving.next().await?;
            let _permit = call::acquire_request_permit(&head.extensions)?;
            let further = stream::try_unfold(receiving, async |mut receiving| {
                Ok::<_, Status>(receiving.next().await?.map(|message| (message, receiving)))
            });
            let messages = stream::iter(first.map(Ok)).chain(further);
            let body = messages.map_ok(|message| Frame::data(Envelope::encode(0, &message)));
            Call { method, head }.open(inner, Body::new(StreamBody::new(body))).await
        })
        .await
}

/// The client's messages.
struct RequestStream {
    body: Body,
    envelopes: Envelopes,
    encoding: Encoding,
    codec: Codec,
    kind: MessageDescriptor,
}

impl RequestStream {
    async fn next(&mut self) -> Result<Option<Bytes>, Status> {
        loop {
            if let Some(Envelope { flags, message }) = self.envelopes.next()? {
                let message = match (flags, self.encoding) {
                    (0, _) => message,
                    (COMPRESSED, Encoding::Gzip) => self.encoding.decompress(message)?,
                    (COMPRESSED, Encoding::Identity) => {
                        return Err(Status::invalid_argument(
                            "a message is compressed, but `connect-content-encoding` is missing",
                        ));
                    }
                    _ => {
                        return Err(Status::invalid_argument("an envelope has unknown flags"));
                    }
                };
                return self.codec.request(&self.kind, message).map(Some);
            }
            match self.body.frame().await {
                Some(frame) => {
                    if let Ok(data) = frame.map_err(call::interrupted)?.into_data() {
                        self.envelopes.push(&data);
                    }
                }
                None if self.envelopes.is_incomplete() => {
                    return Err(Status::invalid_argument("the request ends within a message"));
                }
                None => return Ok(None),
            }
        }
    }
}

/// The response stream. It asks for the next message when the client has taken the previous one: a
/// slow client delays only its own call.
struct ResponseStream {
    answers: Answers,
    deadline: Deadline,
    codec: Codec,
    kind: MessageDescriptor,
    accepted: Encoding,
    pool: prost_reflect::DescriptorPool,
}

impl ResponseStream {
    /// The next envelope, and whether it is the last one.
    async fn next(&mut self) -> (Bytes, bool) {
        let next = match self.deadline.limit_response(self.answers.next()).await {
            Ok(Some(message)) => self.codec.response(&self.kind, message).map(Some),
            other => other,
        };
        match next {
            Ok(Some(message)) => match self.accepted.compress(&message) {
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
    for (name, value) in &call::application_metadata(trailers) {
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

#[cfg(test)]
mod tests {
    use construct_proto::DESCRIPTORS;
    use proptest::prelude::*;
    use prost_reflect::DynamicMessage;

    use super::*;
    use crate::tests::fuzz::fuzz;

    /// Maximum size of a message in this test, in bytes.
    const LIMIT: usize = 4 * 1024;

    /// A valid or malformed envelope.
    fn piece() -> impl Strategy<Value = Vec<u8>> {
        let flags =
            prop_oneof![4 => Just(0), 2 => Just(COMPRESSED), 1 => Just(END), 1 => any::<u8>()];
        let message = prop_oneof![
            Just(br#"{"task":"t","cursor":"0","types":["*"]}"#.to_vec()),
            Just(br#"{"tsak":1}"#.to_vec()),
            prop::collection::vec(any::<u8>(), 0..64),
            // The decompressed message may be far larger than its envelope.
            (0_usize..200_000).prop_map(|size| Encoding::Gzip
                .compress(&vec![b' '; size].into())
                .unwrap_or_default()
                .to_vec()),
        ];
        prop_oneof![
            9 => (flags, message, -2_i64..3).prop_map(|(flags, message, lie)| {
                let mut bytes = Envelope::encode(flags, &message).to_vec();
                // A length that differs slightly from the message's.
                let length = u32::try_from(message.len() as i64 + if lie.abs() == 2 { lie } else { 0 }).unwrap_or(0);
                bytes[1..5].copy_from_slice(&length.to_be_bytes());
                bytes
            }),
            1 => prop::collection::vec(any::<u8>(), 0..40),
        ]
    }

    /// Any body, however it is cut, terminates and yields messages of the method's type before the
    /// first error.
    #[test]
    fn random_bodies_are_parsed_or_refused() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let kind = DESCRIPTORS
            .get_message_by_name("construct.v1.SubscribeRequest")
            .expect("it is in the contract");
        let codec = prop::sample::select(&[Codec::Json, Codec::Proto][..]);
        let encoding = prop::sample::select(&[Encoding::Identity, Encoding::Gzip][..]);
        let cuts = prop::collection::vec(any::<prop::sample::Index>(), 0..6);
        let input = (prop::collection::vec(piece(), 0..6), cuts, codec, encoding);
        fuzz(&input, |(pieces, cuts, codec, encoding)| {
            let bytes = pieces.concat();
            let mut cuts: Vec<_> =
                cuts.iter().map(|cut| cut.index(bytes.len() + 1)).chain([0, bytes.len()]).collect();
            cuts.sort_unstable();
            let frames: Vec<_> = cuts
                .windows(2)
                .map(|pair| {
                    Ok::<_, Status>(Frame::data(Bytes::copy_from_slice(&bytes[pair[0]..pair[1]])))
                })
                .collect();
            let body = Body::new(StreamBody::new(stream::iter(frames)));
            let envelopes = Envelopes::new(LIMIT);
            let mut receiving =
                RequestStream { body, envelopes, encoding, codec, kind: kind.clone() };
            let mut message_count = 0;
            while let Ok(Some(message)) = runtime.block_on(receiving.next()) {
                message_count += 1;
                prop_assert!(
                    message_count <= pieces.len() * 8 + 40,
                    "more messages than the bytes can hold"
                );
                if codec == Codec::Json {
                    let read = DynamicMessage::decode(kind.clone(), message);
                    prop_assert!(read.is_ok(), "{read:?}");
                }
            }
            Ok(())
        });
    }
}
