//! Log-in with a browser on this machine: the issuer redirects it to a loopback port with a code
//! (RFC 8252). Only the process that started the log-in can use the code (PKCE, RFC 7636).

use std::{net::Ipv4Addr, time::Duration};

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use reqwest::Url;
use ring::{
    digest::{SHA256, digest},
    rand::{SecureRandom as _, SystemRandom},
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc,
    time::{timeout, timeout_at},
};

use super::{
    deadline_in,
    issuer::{Error, Issuer, Tokens},
};
use crate::{failure::Failure, text::one_line};

/// The timeout of the log-in, in seconds.
const LOGIN_TIMEOUT_SECS: u64 = 600;
/// The timeout of one request of the browser.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The maximum bytes of a request's head.
const MAX_HEAD_BYTES: usize = 16 * 1024;

/// The parameters of the redirect.
#[derive(Debug, Default, PartialEq, Eq)]
struct Redirect {
    code: Option<String>,
    state: Option<String>,
    error: Option<String>,
    description: Option<String>,
    issuer: Option<String>,
}

/// Prints the address of the log-in page, and waits for the redirect.
///
/// # Errors
/// When the log-in times out or fails.
pub(super) async fn wait(issuer: &Issuer, scopes: &str, port: u16) -> Result<Tokens, Failure> {
    wait_with(issuer, scopes, port, |page| eprintln!("open {page}")).await
}

/// Like [`wait`], with a callback for the page's address.
pub(super) async fn wait_with(
    issuer: &Issuer,
    scopes: &str,
    port: u16,
    show: impl FnOnce(&Url),
) -> Result<Tokens, Failure> {
    let busy =
        |error| Failure::failed(format!("cannot listen on port {port} for the redirect: {error}"));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.map_err(busy)?;
    // The address instead of `localhost`, which may resolve to another one (RFC 8252, 8.3).
    let redirect_uri = format!("http://127.0.0.1:{}/", listener.local_addr()?.port());
    let (state, verifier) = (random_token()?, random_token()?);
    let challenge = BASE64_URL_SAFE_NO_PAD.encode(digest(&SHA256, verifier.as_bytes()));
    show(&issuer.authorization_url(scopes, &redirect_uri, &state, &challenge)?);
    let redirect =
        timeout_at(deadline_in(LOGIN_TIMEOUT_SECS), wait_for_redirect(listener, &state)).await;
    let redirect = redirect.map_err(|_| Failure::failed("the log-in timed out"))??;
    if redirect.issuer.is_some_and(|other| !issuer.is(&other)) {
        return Err(Failure::failed("the redirect is from another issuer"));
    }
    if let Some(code) = redirect.error {
        let description = one_line(&redirect.description.unwrap_or_default());
        return Err(Error::Refused { code: one_line(&code), description }.into());
    }
    let code = redirect.code.ok_or_else(|| Failure::failed("the redirect has no code"))?;
    Ok(issuer.exchange_code(&code, &redirect_uri, &verifier).await?)
}

/// 256 random bits as text.
fn random_token() -> Result<String, Failure> {
    let mut bytes = [0; 32];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| Failure::failed("the system has no source of randomness"))?;
    Ok(BASE64_URL_SAFE_NO_PAD.encode(bytes))
}

/// Waits for the redirect with `state`. Other requests get an error, and do not end the log-in.
async fn wait_for_redirect(listener: TcpListener, state: &str) -> Result<Redirect, Failure> {
    let (sender, mut receiver) = mpsc::channel(1);
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (sender, state) = (sender.clone(), state.to_owned());
                let (stream, _) = accepted?;
                // Browsers open connections without sending a request.
                tokio::spawn(async move {
                    let handled = timeout(REQUEST_TIMEOUT, handle_request(stream, &state)).await;
                    if let Ok(Some(redirect)) = handled {
                        _ = sender.send(redirect).await;
                    }
                });
            }
            Some(redirect) = receiver.recv() => return Ok(redirect),
        }
    }
}

/// Reads one request and responds. Returns the redirect if the request is one.
async fn handle_request(mut stream: TcpStream, state: &str) -> Option<Redirect> {
    let mut head = Vec::new();
    while !head.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        if head.len() > MAX_HEAD_BYTES || stream.read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let redirect =
        Redirect::parse(&head).filter(|redirect| redirect.state.as_deref() == Some(state));
    let (status, text) = match &redirect {
        Some(Redirect { error: None, code: Some(_), .. }) => {
            ("200 OK", "You can close this page and continue in the terminal.")
        }
        Some(_) => ("200 OK", "You are not logged in. The terminal shows the reason."),
        None => ("404 Not Found", "Not found."),
    };
    let length = text.len();
    // No caching and no referrer: the page's address contains the code.
    let page = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {length}\r\ncache-control: no-store\r\n\
         referrer-policy: no-referrer\r\nconnection: close\r\n\r\n{text}"
    );
    // The redirect counts even if the browser does not read the response.
    _ = stream.write_all(page.as_bytes()).await;
    _ = stream.shutdown().await;
    redirect
}

impl Redirect {
    /// Parses the first line of a request. None for other paths.
    fn parse(head: &[u8]) -> Option<Self> {
        let line = head.split(|byte| *byte == b'\r').next()?;
        let target = str::from_utf8(line).ok()?.strip_prefix("GET ")?.split(' ').next()?;
        let url = Url::parse("http://127.0.0.1").ok()?.join(target).ok()?;
        if url.path() != "/" {
            return None;
        }
        let mut redirect = Self::default();
        for (name, value) in url.query_pairs() {
            let field = match name.as_ref() {
                "code" => &mut redirect.code,
                "state" => &mut redirect.state,
                "error" => &mut redirect.error,
                "error_description" => &mut redirect.description,
                "iss" => &mut redirect.issuer,
                _ => continue,
            };
            *field = Some(value.into_owned());
        }
        Some(redirect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirect_is_parsed_from_the_request() {
        let redirect = Redirect::parse(
            b"GET /?code=a%2Bb&state=s&iss=https%3A%2F%2Fi HTTP/1.1\r\nhost: x\r\n\r\n",
        )
        .unwrap();
        assert_eq!((redirect.code.as_deref(), redirect.state.as_deref()), (Some("a+b"), Some("s")));
        assert_eq!(redirect.issuer.as_deref(), Some("https://i"));
        for other in [
            "GET /favicon.ico HTTP/1.1\r\n\r\n",
            "POST /?state=s HTTP/1.1\r\n\r\n",
            "\r\n\r\n",
            "GET\r\n\r\n",
        ] {
            assert_eq!(Redirect::parse(other.as_bytes()), None, "{other}");
        }
    }
}
