//! Anthropic's token count: <https://docs.claude.com/en/api/messages-count-tokens>.

use std::sync::Arc;

use axum::{
    extract::{Request as HttpRequest, State},
    http::StatusCode,
    response::Response,
};
use serde_json::json;

use super::{
    Shared, access,
    messages::Messages,
    protocol::{ClientProtocol as _, to_json},
    refusal::Refusal,
    serve::{ReceivedRequest, json_response, refusal_response},
};
use crate::token_count::CountResult;

/// Counts tokens for any model, whichever vendor is behind it. Free of charge.
pub(crate) async fn answer(State(shared): State<Arc<Shared>>, request: HttpRequest) -> Response {
    match count(&shared, request).await {
        // The protocol does not define the second field, and its clients ignore unknown ones.
        Ok(counted) => {
            let body = json!({"input_tokens": counted.tokens, "exact": counted.exact});
            json_response(StatusCode::OK, to_json(&body))
        }
        Err(refusal) => refusal_response::<Messages>(&refusal),
    }
}

async fn count(shared: &Shared, request: HttpRequest) -> Result<CountResult, Refusal> {
    let ReceivedRequest { token, permit: _permit, body, .. } =
        ReceivedRequest::receive(shared, request).await?;
    let asked = Messages::read(&body)?;
    let route = shared
        .models
        .find(&token.organization, access::allowed_model(&token, &asked.model)?)
        .await?;
    let request = asked.into_request("", &token.task, &route)?;
    Ok(shared.router.count_tokens(&route.target, &request).await)
}
