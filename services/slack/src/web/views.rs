//! Forms and the app's home.

use serde::Deserialize;
use serde_json::{Value, json};

use super::{Body, Error, Token, Web};

#[derive(Debug, Deserialize)]
struct Done {}

/// Opens a form for whoever has just done something; `trigger` says who, and is good for three
/// seconds.
pub(crate) async fn open(
    web: &Web,
    token: &Token,
    trigger: &str,
    view: Value,
) -> Result<(), Error> {
    web.call::<Done>(token, "views.open", Body::Json(json!({"trigger_id": trigger, "view": view})))
        .await
        .map(drop)
}

/// Replaces the app's home of one person.
pub(crate) async fn publish(
    web: &Web,
    token: &Token,
    user: &str,
    view: Value,
) -> Result<(), Error> {
    web.call::<Done>(token, "views.publish", Body::Json(json!({"user_id": user, "view": view})))
        .await
        .map(drop)
}
