//! Redirects: where they lead, and whether they are followed.

use std::fmt;

use construct_domain::policy::{Action, Verdict};
use reqwest::header::LOCATION;
use reqwest::{Method, Response, StatusCode};
use serde_json::json;

use super::{HARMLESS, Hop, shown};
use crate::tools::error::ToolError;
use crate::tools::secrets;
use crate::tools::subject::{PolicySubject, request_to};

/// Says whether a redirect is followed. The rules were asked about the address of the call, and
/// know nothing of where it leads.
pub trait Redirects: fmt::Debug + Send + Sync {
    /// What the rules say about the request that the redirect asks for.
    fn judge(&self, to: PolicySubject) -> Verdict;
}

impl Hop {
    /// By which rules know it: method and host.
    pub(super) fn subject(&self) -> PolicySubject {
        match request_to(self.method.as_str(), Some(&self.url)) {
            PolicySubject::Request { method, host, path: _ } => {
                PolicySubject::Request { method, host, path: String::new() }
            }
            subject => subject,
        }
    }
}

/// Refuses a redirect that the rules forbid, and one about which a person has to be asked: nobody
/// was shown where it leads.
pub(super) fn may_follow(redirects: &dyn Redirects, from: &Hop, to: &Hop) -> Result<(), ToolError> {
    let Verdict { action, reason } = redirects.judge(request_to(to.method.as_str(), Some(&to.url)));
    let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let (name, why) = match action {
        Action::Allow => return Ok(()),
        Action::Deny => (
            "PolicyDenied",
            format!("which the policy does not let scripts make{because}. Go on without it."),
        ),
        Action::Ask => (
            "RedirectNotFollowed",
            format!(
                "which needs a person's approval{because}. To ask for it, fetch the address in details.url in a call of its own."
            ),
        ),
    };
    let (host, target) = (from.url.host_str().unwrap_or_default(), shown(&to.url));
    let message = format!(
        "fetch: the request to {host} was made, and answered with a redirect to {} {target}, {why} It was not followed.",
        to.method
    );
    Err(ToolError::new(name, message)
        .with(json!({"url": to.url.as_str(), "method": to.method.as_str()})))
}

/// The request that a redirect asks for, if the response is one.
pub(super) fn next(response: &Response, hop: &Hop) -> Result<Option<Hop>, ToolError> {
    let status = response.status();
    let redirects = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
    let Some(location) = response.headers().get(LOCATION).filter(|_| redirects) else {
        return Ok(None);
    };
    let broken = || {
        ToolError::new(
            "FetchFailed",
            format!("fetch: {} redirects to an address that cannot be used.", shown(&hop.url)),
        )
    };
    let location = std::str::from_utf8(location.as_bytes()).map_err(|_| broken())?;
    let url = hop.url.join(location).map_err(|_| broken())?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(broken());
    }
    let mut further = Hop {
        url,
        method: hop.method.clone(),
        headers: hop.headers.clone(),
        body: hop.body.clone(),
    };
    // Nobody typed this address: a name and a password in it are not ours to use.
    let cleaned = further.url.set_username("").and_then(|()| further.url.set_password(None));
    cleaned.map_err(|()| broken())?;
    let becomes_get = status == StatusCode::SEE_OTHER && hop.method != Method::HEAD
        || matches!(status, StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND)
            && hop.method == Method::POST;
    if becomes_get {
        further.method = Method::GET;
        further.body = None;
        further.headers.remove(reqwest::header::CONTENT_TYPE);
    }
    if further.url.origin() != hop.url.origin() {
        further.headers = hop
            .headers
            .iter()
            .filter(|(name, value)| {
                HARMLESS.contains(&name.as_str())
                    && further.headers.contains_key(*name)
                    && !value.to_str().is_ok_and(secrets::has_handle)
            })
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
    }
    Ok(Some(further))
}
