//! Reading and uploading files.

use std::time::Duration;

use reqwest::{StatusCode, Url, header::AUTHORIZATION};
use secrecy::ExposeSecret as _;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Body, DEFAULT_RETRY_DELAY, Error, MayContinue, Token, Web, rate_limited_error};

const DOWNLOAD_METHOD: &str = "file download";
const UPLOAD_METHOD: &str = "file upload";
/// Attempts to download a file.
const MAX_ATTEMPTS: u32 = 3;
/// The longest delay between attempts.
const MAX_RETRY_DELAY: Duration = Duration::from_secs(10);

/// Downloads a file of at most `limit` bytes; none when it is larger. Retries only for as long as a
/// user would wait for an answer.
pub(crate) async fn download(
    web: &Web,
    token: &Token,
    url: &str,
    limit: usize,
) -> Result<Option<Vec<u8>>, Error> {
    for _ in 1..MAX_ATTEMPTS {
        let delay = match attempt(web, token, url, limit).await {
            Err(Error::Limited { retry_after: after, .. }) => after,
            Err(Error::Unknown { .. }) => DEFAULT_RETRY_DELAY,
            result => return result,
        };
        tokio::time::sleep(delay.min(MAX_RETRY_DELAY)).await;
    }
    attempt(web, token, url, limit).await
}

async fn attempt(
    web: &Web,
    token: &Token,
    url: &str,
    limit: usize,
) -> Result<Option<Vec<u8>>, Error> {
    let unknown = |reason: String| Error::Unknown { method: DOWNLOAD_METHOD, reason };
    let url = Url::parse(url).map_err(|error| unknown(error.to_string()))?;
    // The token must not be sent to an arbitrary address in a message.
    if !web.is_slack_url(&url) {
        return Err(Error::Refused {
            method: DOWNLOAD_METHOD,
            code: "not_a_slack_address".to_owned(),
        });
    }
    let request = web
        .client()
        .get(url)
        .header(AUTHORIZATION, format!("Bearer {}", token.secret.expose_secret()));
    let mut response =
        request.send().await.map_err(|error| unknown(error.without_url().to_string()))?;
    let status = response.status();
    if status == StatusCode::TOO_MANY_REQUESTS {
        return Err(rate_limited_error(DOWNLOAD_METHOD, &response));
    }
    if status.is_server_error() {
        return Err(unknown(format!("HTTP status {status}")));
    }
    if !status.is_success() {
        return Err(Error::Refused {
            method: DOWNLOAD_METHOD,
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

/// The destination of an upload.
#[derive(Debug, Deserialize)]
pub(crate) struct Upload {
    pub(crate) upload_url: String,
    pub(crate) file_id: String,
}

/// Starts an upload. The file is invisible until it is completed.
pub(crate) async fn begin_upload(
    web: &Web,
    token: &Token,
    name: &str,
    length: usize,
) -> Result<Upload, Error> {
    let length = length.to_string();
    let fields = [("filename", name), ("length", &length), ("snippet_type", "markdown")];
    web.call(token, "files.getUploadURLExternal", Body::Form(&fields)).await
}

/// Uploads the content.
pub(crate) async fn send_content(
    web: &Web,
    upload: &Upload,
    content: Vec<u8>,
) -> Result<(), Error> {
    let unknown = |reason: String| Error::Unknown { method: UPLOAD_METHOD, reason };
    let url = Url::parse(&upload.upload_url).map_err(|error| unknown(error.to_string()))?;
    if !web.is_slack_url(&url) {
        return Err(Error::Refused {
            method: UPLOAD_METHOD,
            code: "not_a_slack_address".to_owned(),
        });
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
struct EmptyResponse {}

/// Completes an upload by sharing the file in a thread.
pub(crate) async fn complete_upload(
    web: &Web,
    token: &Token,
    file: &str,
    title: &str,
    (channel, thread): (&str, &str),
    may_continue: MayContinue<'_>,
) -> Result<(), Error> {
    let body = json!({"files": [{"id": file, "title": title}], "channel_id": channel, "thread_ts": thread});
    web.call_while::<EmptyResponse>(
        token,
        "files.completeUploadExternal",
        Body::Json(body),
        may_continue,
    )
    .await
    .map(drop)
}

#[derive(Debug, Deserialize)]
struct FileInfoResponse {
    file: SharedFile,
}

#[derive(Debug, Deserialize)]
struct SharedFile {
    #[serde(default)]
    shares: Value,
}

/// Whether a file is shared anywhere.
pub(crate) async fn is_shared(web: &Web, token: &Token, file: &str) -> Result<bool, Error> {
    match web.call::<FileInfoResponse>(token, "files.info", Body::Form(&[("file", file)])).await {
        Ok(info) => Ok(info.file.shares.as_object().is_some_and(|shares| !shares.is_empty())),
        Err(error) if matches!(error.code(), Some("file_not_found" | "file_deleted")) => Ok(false),
        Err(error) => Err(error),
    }
}
