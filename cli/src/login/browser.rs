//! Log-in with a browser of this machine: it comes back to a loopback port with a code (RFC 8252),
//! which is worth something only to who sent it there (PKCE, RFC 7636).

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
    end,
    issuer::{Error, Issuer, Tokens},
};
use crate::{failure::Failure, words::one_line};

/// How long a person may take, in seconds.
const PATIENCE: u64 = 600;
/// How long a browser may take to say what it wants.
const ASKING: Duration = Duration::from_secs(10);
/// Bytes of the head of a request.
const LONGEST: usize = 16 * 1024;

/// What a browser comes back with.
#[derive(Debug, Default, PartialEq, Eq)]
struct Came {
    code: Option<String>,
    state: Option<String>,
    error: Option<String>,
    words: Option<String>,
    issuer: Option<String>,
}

/// Shows where to log in, and waits for the browser.
///
/// # Errors
/// When nobody comes back, or the issuer does not take who did.
pub(super) async fn wait(issuer: &Issuer, scopes: &str, port: u16) -> Result<Tokens, Failure> {
    wait_with(issuer, scopes, port, |page| eprintln!("open {page}")).await
}

/// The same with something else than a person who is shown the page.
pub(super) async fn wait_with(
    issuer: &Issuer,
    scopes: &str,
    port: u16,
    show: impl FnOnce(&Url),
) -> Result<Tokens, Failure> {
    let busy = |error| {
        Failure::failed(format!(
            "the browser cannot come back to port {port} of this machine: {error}"
        ))
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.map_err(busy)?;
    // The address, and not `localhost`: that may be another one (RFC 8252, 8.3).
    let redirect = format!("http://127.0.0.1:{}/", listener.local_addr()?.port());
    let (state, verifier) = (random()?, random()?);
    let challenge = BASE64_URL_SAFE_NO_PAD.encode(digest(&SHA256, verifier.as_bytes()));
    show(&issuer.page(scopes, &redirect, &state, &challenge)?);
    let came = timeout_at(end(PATIENCE), comes(listener, &state)).await;
    let came = came.map_err(|_| Failure::failed("nobody has logged in in time"))??;
    if came.issuer.is_some_and(|other| !issuer.is(&other)) {
        return Err(Failure::failed("the browser comes back from another issuer"));
    }
    if let Some(code) = came.error {
        let words = came.words.unwrap_or_default();
        return Err(Error::Refused { code: one_line(&code), words: one_line(&words) }.into());
    }
    let code = came.code.ok_or_else(|| Failure::failed("the browser comes back without a code"))?;
    Ok(issuer.code_tokens(&code, &redirect, &verifier).await?)
}

/// 256 random bits as text.
fn random() -> Result<String, Failure> {
    let mut bytes = [0; 32];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| Failure::failed("this machine has no randomness"))?;
    Ok(BASE64_URL_SAFE_NO_PAD.encode(bytes))
}

/// Waits for the browser that was sent with `state`. Others are told that they are wrong here, and
/// end nothing.
async fn comes(listener: TcpListener, state: &str) -> Result<Came, Failure> {
    let (sender, mut receiver) = mpsc::channel(1);
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let (sender, state) = (sender.clone(), state.to_owned());
                let (stream, _) = accepted?;
                // A browser opens connections that it says nothing over.
                tokio::spawn(async move {
                    if let Ok(Some(came)) = timeout(ASKING, answer(stream, &state)).await {
                        _ = sender.send(came).await;
                    }
                });
            }
            Some(came) = receiver.recv() => return Ok(came),
        }
    }
}

/// Reads one request and answers it.
async fn answer(mut stream: TcpStream, state: &str) -> Option<Came> {
    let mut head = Vec::new();
    while !head.windows(4).any(|bytes| bytes == b"\r\n\r\n") {
        if head.len() > LONGEST || stream.read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let came = Came::of(&head).filter(|came| came.state.as_deref() == Some(state));
    let (status, words) = match &came {
        Some(Came { error: None, code: Some(_), .. }) => {
            ("200 OK", "You can close this page and go on in the terminal.")
        }
        Some(_) => ("200 OK", "You are not logged in. The terminal says why."),
        None => ("404 Not Found", "There is nothing here."),
    };
    let length = words.len();
    // The address of the page has the code in it.
    let page = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: {length}\r\ncache-control: no-store\r\n\
         referrer-policy: no-referrer\r\nconnection: close\r\n\r\n{words}"
    );
    // Who has said what they came for need not hear the answer.
    _ = stream.write_all(page.as_bytes()).await;
    _ = stream.shutdown().await;
    came
}

impl Came {
    /// What the first line of a request says, if it is one for us.
    fn of(head: &[u8]) -> Option<Self> {
        let line = head.split(|byte| *byte == b'\r').next()?;
        let target = str::from_utf8(line).ok()?.strip_prefix("GET ")?.split(' ').next()?;
        let url = Url::parse("http://127.0.0.1").ok()?.join(target).ok()?;
        if url.path() != "/" {
            return None;
        }
        let mut came = Self::default();
        for (name, value) in url.query_pairs() {
            let field = match name.as_ref() {
                "code" => &mut came.code,
                "state" => &mut came.state,
                "error" => &mut came.error,
                "error_description" => &mut came.words,
                "iss" => &mut came.issuer,
                _ => continue,
            };
            *field = Some(value.into_owned());
        }
        Some(came)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_browser_comes_back_with_is_read_from_its_request() {
        let came =
            Came::of(b"GET /?code=a%2Bb&state=s&iss=https%3A%2F%2Fi HTTP/1.1\r\nhost: x\r\n\r\n")
                .unwrap();
        assert_eq!((came.code.as_deref(), came.state.as_deref()), (Some("a+b"), Some("s")));
        assert_eq!(came.issuer.as_deref(), Some("https://i"));
        for wrong in [
            "GET /favicon.ico HTTP/1.1\r\n\r\n",
            "POST /?state=s HTTP/1.1\r\n\r\n",
            "\r\n\r\n",
            "GET\r\n\r\n",
        ] {
            assert_eq!(Came::of(wrong.as_bytes()), None, "{wrong}");
        }
    }
}
