//! Reading and uploading files.

use std::time::Duration;

use reqwest::{StatusCode, Url, header::AUTHORIZATION};
use secrecy::ExposeSecret as _;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Body, Error, Leave, PAUSE, Token, Web, limited};

const DOWNLOAD: &str = "file download";
const UPLOAD: &str = "file upload";
/// How often a file is asked for.
const ATTEMPTS: u32 = 3;
/// The longest that is waited between.
const LONGEST: Duration = Duration::from_secs(10);

/// The content of a file, if it has at most `limit` bytes. A Slack that is busy is asked again, as
/// long as somebody who waits for an answer would want it.
pub(crate) async fn download(
    web: &Web,
    token: &Token,
    url: &str,
    limit: usize,
) -> Result<Option<Vec<u8>>, Error> {
    for _ in 1..ATTEMPTS {
        let pause = match attempt(web, token, url, limit).await {
            Err(Error::Limited { after, .. }) => after,
            Err(Error::Unknown { .. }) => PAUSE,
            done => return done,
        };
        tokio::time::sleep(pause.min(LONGEST)).await;
    }
    attempt(web, token, url, limit).await
}

async fn attempt(
    web: &Web,
    token: &Token,
    url: &str,
    limit: usize,
) -> Result<Option<Vec<u8>>, Error> {
    let unknown = |what: String| Error::Unknown { method: DOWNLOAD, what };
    let url = Url::parse(url).map_err(|error| unknown(error.to_string()))?;
    // The token is not sent to whatever address stands in a message.
    if !web.is_slacks(&url) {
        return Err(Error::Refused { method: DOWNLOAD, code: "not_a_slack_address".to_owned() });
    }
    let request = web
        .client()
        .get(url)
        .header(AUTHORIZATION, format!("Bearer {}", token.secret.expose_secret()));
    let mut response =
        request.send().await.map_err(|error| unknown(error.without_url().to_string()))?;
    let status = response.status();
    if status == StatusCode::TOO_MANY_REQUESTS {
        return Err(limited(DOWNLOAD, &response));
    }
    if status.is_server_error() {
        return Err(unknown(format!("HTTP status {status}")));
    }
    if !status.is_success() {
        return Err(Error::Refused {
            method: DOWNLOAD,
            code: format!("status_{}", status.as_u16()),
        });
    }
    let mut content = Vec::new();
    while let Some(chunk) =
        response.chunk().await.map_err(|error| unknown(error.without_url().to_string()))?
    {
        content.extend_from_slice(&chunk);
        if content.len() > limit {
            return Ok(None);
        }
    }
    Ok(Some(content))
}

/// Where a new file goes.
#[derive(Debug, Deserialize)]
pub(crate) struct Upload {
    pub(crate) upload_url: String,
    pub(crate) file_id: String,
}

/// Makes room for a file. Nobody sees it until it is completed.
pub(crate) async fn begin(
    web: &Web,
    token: &Token,
    name: &str,
    length: usize,
) -> Result<Upload, Error> {
    let length = length.to_string();
    let fields = [("filename", name), ("length", &length), ("snippet_type", "markdown")];
    web.call(token, "files.getUploadURLExternal", Body::Form(&fields)).await
}

/// Sends the content.
pub(crate) async fn send(web: &Web, upload: &Upload, content: Vec<u8>) -> Result<(), Error> {
    let unknown = |what: String| Error::Unknown { method: UPLOAD, what };
    let url = Url::parse(&upload.upload_url).map_err(|error| unknown(error.to_string()))?;
    if !web.is_slacks(&url) {
        return Err(Error::Refused { method: UPLOAD, code: "not_a_slack_address".to_owned() });
    }
    let response = web
        .client()
        .post(url)
        .body(content)
        .send()
        .await
        .map_err(|error| unknown(error.without_url().to_string()))?;
    if response.status().is_success() {
        Ok(())
    } else {
        Err(unknown(format!("HTTP status {}", response.status())))
    }
}

#[derive(Debug, Deserialize)]
struct Done {}

/// Shows the file in a thread.
pub(crate) async fn complete(
    web: &Web,
    token: &Token,
    file: &str,
    title: &str,
    (channel, thread): (&str, &str),
    leave: Leave<'_>,
) -> Result<(), Error> {
    let body = json!({"files": [{"id": file, "title": title}], "channel_id": channel, "thread_ts": thread});
    web.call_while::<Done>(token, "files.completeUploadExternal", Body::Json(body), leave)
        .await
        .map(drop)
}

#[derive(Debug, Deserialize)]
struct Info {
    file: Shared,
}

#[derive(Debug, Deserialize)]
struct Shared {
    #[serde(default)]
    shares: Value,
}

/// Whether a file is shown anywhere.
pub(crate) async fn is_shared(web: &Web, token: &Token, file: &str) -> Result<bool, Error> {
    match web.call::<Info>(token, "files.info", Body::Form(&[("file", file)])).await {
        Ok(info) => Ok(info.file.shares.as_object().is_some_and(|shares| !shares.is_empty())),
        Err(error) if matches!(error.code(), Some("file_not_found" | "file_deleted")) => Ok(false),
        Err(error) => Err(error),
    }
}
