//! OpenAI's Embeddings for clients:
//! <https://platform.openai.com/docs/api-reference/embeddings/create>.

use std::sync::Arc;

use async_trait::async_trait;
use axum::{
    extract::{Request as HttpRequest, State},
    http::StatusCode,
    response::Response,
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use construct_proto::v1::ModelParameters;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::Instrument as _;

use super::{
    Shared, access,
    chat::Chat,
    client_request::{self, ClientRequest, OneOrMany, estimate_embedding_cost, parse},
    protocol::to_json,
    refusal::{Kind, Refusal},
    serve::{ReceivedRequest, cancel_guard, json_response, refusal_response, reserve_spending},
    upstream::canceled_with_task,
};
use crate::{
    answer::estimate_tokens,
    cancels::CancelSignal,
    failure::Failure,
    router::{CallEnd, Interrupts, RoutedCall, Sink},
    vendor::{Chunk, EmbedRequest, Request},
};

/// The name of such calls in the ledger.
const PURPOSE: &str = "embeddings";
/// Texts of one request at most, as with the vendor whose protocol it is.
const MAX_TEXTS: usize = 2_048;

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    model: String,
    input: Input,
    #[serde(default)]
    encoding_format: Encoding,
    dimensions: Option<u32>,
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "a text or a list of texts")]
enum Input {
    Texts(OneOrMany),
    /// Tokens instead of texts, which only their own model understands.
    Tokens(serde::de::IgnoredAny),
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Float,
    /// Single-precision numbers in little-endian order.
    Base64,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Item<'a>>,
    model: &'a str,
    usage: Usage,
}

#[derive(Serialize)]
struct Item<'a> {
    object: &'static str,
    index: usize,
    embedding: Vector<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector<'a> {
    Numbers(&'a [f32]),
    Base64(String),
}

#[derive(Serialize)]
struct Usage {
    prompt_tokens: i64,
    total_tokens: i64,
}

/// Answers a request.
pub(crate) async fn answer(State(shared): State<Arc<Shared>>, request: HttpRequest) -> Response {
    match Box::pin(embed(&shared, request)).await {
        Ok(response) => response,
        Err(refusal) => refusal_response::<Chat>(&refusal),
    }
}

async fn embed(shared: &Shared, request: HttpRequest) -> Result<Response, Refusal> {
    let ReceivedRequest { token, permit, body, deadline, .. } =
        ReceivedRequest::receive(shared, request).await?;
    let Body { model, input, encoding_format, dimensions } = parse(&body)?;
    drop(body);
    let embed = EmbedRequest {
        texts: read_texts(input)?,
        dimensions: dimensions.filter(|&dimensions| dimensions > 0),
    };
    let name = access::allowed_model(&token, &model)?;
    let route = shared.models.find(&token.organization, name).await?;
    let asked = ClientRequest {
        model: name.to_owned(),
        parameters: ModelParameters::default(),
        ..ClientRequest::default()
    };
    let amount = estimate_embedding_cost(&embed, &route);
    let request = Request { embed: Some(embed), ..asked.into_request("", &token.task, &route)? };
    let mut reservation =
        reserve_spending(shared, &token, &route, PURPOSE, amount, deadline).await?;

    let request = Arc::new(request);
    let (router, targets, hedge_after) =
        (shared.router.clone(), route.ordered_targets(false), route.hedge_after);
    let guard = cancel_guard(shared, &token);
    let cancel = guard.as_ref().map(|guard| guard.cancel.clone()).unwrap_or_default();
    let asked = Arc::clone(&request);
    // Dropped with this future when the client disconnects.
    let _cancel_on_drop = CancelOnDrop(cancel.clone());
    // In a task of its own, so that the usage until then is settled.
    let calling = async move {
        let mut sink = VectorSink::default();
        let interrupts =
            Interrupts { cancel: &cancel, deadline, hand_back: CancellationToken::new() };
        let call = RoutedCall {
            request: asked,
            targets,
            hedge_after,
            tries: 0,
            lost_calls: 0,
            interrupts,
        };
        let routed = router.call(call, &mut sink).await;
        reservation.settle(routed.usage);
        drop((reservation, permit, guard));
        (routed.end, sink)
    };
    let called = tokio::spawn(calling.in_current_span()).await;
    let (ended, sink) =
        called.map_err(|_| Refusal::new(Kind::Internal, "the call ended without a word"))?;
    match ended {
        CallEnd::Completed => {}
        CallEnd::Failed(failure) => return Err(failure.into()),
        CallEnd::Cancelled { reason } => return Err(canceled_with_task(&reason).into()),
        CallEnd::HandedBack => {
            return Err(Refusal::new(Kind::Internal, "the call was handed back"));
        }
    }
    let read = sink.input_tokens.unwrap_or_else(|| estimate_tokens(request.input_chars()));
    let data = sink.vectors.iter().enumerate().map(|(index, vector)| Item {
        object: "embedding",
        index,
        embedding: match encoding_format {
            Encoding::Float => Vector::Numbers(vector),
            Encoding::Base64 => Vector::Base64(encode_base64(vector)),
        },
    });
    let usage = Usage { prompt_tokens: read, total_tokens: read };
    Ok(json_response(
        StatusCode::OK,
        to_json(&List { object: "list", data: data.collect(), model: name, usage }),
    ))
}

fn read_texts(input: Input) -> Result<Vec<String>, Refusal> {
    let texts = match input {
        Input::Texts(texts) => texts.into_list(),
        Input::Tokens(_) => {
            return Err(Refusal::invalid(
                "`input` must be a text or a list of texts: tokens are not supported by this proxy",
            ));
        }
    };
    client_request::reject_if(texts.is_empty(), "an empty list of texts")?;
    client_request::reject_if(texts.iter().any(String::is_empty), "an empty text")?;
    if texts.len() > MAX_TEXTS {
        return Err(Refusal::invalid(format!(
            "at most {MAX_TEXTS} texts can be sent at once, here are {}",
            texts.len()
        )));
    }
    Ok(texts)
}

fn encode_base64(vector: &[f32]) -> String {
    let bytes: Vec<u8> = vector.iter().flat_map(|number| number.to_le_bytes()).collect();
    STANDARD.encode(bytes)
}

struct CancelOnDrop(CancelSignal);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel("the client is gone");
    }
}

/// Collects the vectors of one attempt.
#[derive(Default)]
struct VectorSink {
    vectors: Vec<Vec<f32>>,
    /// Tokens, as the vendor has counted them.
    input_tokens: Option<i64>,
}

#[async_trait]
impl Sink for VectorSink {
    fn begin(&mut self, _request: &Request) {
        *self = Self::default();
    }

    async fn push(&mut self, chunk: Chunk) -> Result<(), Failure> {
        match chunk {
            Chunk::Vector(vector) => self.vectors.push(vector),
            Chunk::Usage(usage) => self.input_tokens = Some(usage.input_tokens),
            _ => return Err(Failure::internal("vectors were asked for, and an answer came")),
        }
        Ok(())
    }

    fn due(&self) -> Option<Instant> {
        None
    }

    async fn flush(&mut self) {}

    async fn discard(&mut self, _failure: &Failure) -> bool {
        *self = Self::default();
        true
    }
}
