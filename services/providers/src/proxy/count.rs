//! Anthropic's question how many tokens a request has: <https://docs.claude.com/en/api/messages-count-tokens>.

use std::sync::Arc;

use axum::{
    extract::{Request as HttpRequest, State},
    http::StatusCode,
    response::Response,
};
use serde_json::json;

use super::{
    Shared, access,
    face::{Face as _, json},
    messages::Messages,
    refusal::Refusal,
    serve::{Arrived, refused, whole},
};
use crate::count::Counted;

/// Counts for any model, whichever vendor is behind it. Costs nothing.
pub(crate) async fn answer(State(shared): State<Arc<Shared>>, request: HttpRequest) -> Response {
    match count(&shared, request).await {
        // The protocol has no place for the second word, and its clients ignore what they don't
        // know.
        Ok(counted) => {
            let body = json!({"input_tokens": counted.tokens, "exact": counted.exact});
            whole(StatusCode::OK, json(&body))
        }
        Err(refusal) => refused::<Messages>(&refusal),
    }
}

async fn count(shared: &Shared, request: HttpRequest) -> Result<Counted, Refusal> {
    let Arrived { token, permit: _permit, body, .. } = Arrived::take(shared, request).await?;
    let asked = Messages::read(&body)?;
    let route =
        shared.models.find(&token.organization, access::model(&token, &asked.model)?).await?;
    let request = asked.request("", &token.task, &route)?;
    Ok(shared.router.count(&route.target, &request).await)
}
