//! Forms and the app's home.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Body, Error, Token, Web};

#[derive(Debug, Deserialize)]
struct EmptyResponse {}

/// Opens a form. `trigger` identifies the user's interaction, and is valid for three seconds.
pub(crate) async fn open(
    web: &Web,
    token: &Token,
    trigger: &str,
    view: Value,
) -> Result<(), Error> {
    web.call::<EmptyResponse>(
        token,
        "views.open",
        Body::Json(json!({"trigger_id": trigger, "view": view})),
    )
    .await
    .map(drop)
}

/// Replaces the app's home of one user.
pub(crate) async fn publish(
    web: &Web,
    token: &Token,
    user: &str,
    view: Value,
) -> Result<(), Error> {
    web.call::<EmptyResponse>(
        token,
        "views.publish",
        Body::Json(json!({"user_id": user, "view": view})),
    )
    .await
    .map(drop)
}
