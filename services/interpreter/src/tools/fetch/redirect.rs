//! Redirects: their targets, and whether they are followed.

use std::fmt;

use construct_domain::policy::{Action, Verdict};
use reqwest::header::LOCATION;
use reqwest::{Method, Response, StatusCode};
use serde_json::json;

use super::{FORWARDED_HEADERS, Hop, without_query};
use crate::tools::error::ToolError;
use crate::tools::secrets;
use crate::tools::subject::{PolicySubject, request_to};

/// Decides whether a redirect is followed. The policy decided about the address of the call, not
/// about the targets of its redirects.
pub trait Redirects: fmt::Debug + Send + Sync {
    /// The verdict of the rules about the redirected request.
    fn judge(&self, to: PolicySubject) -> Verdict;
}

impl Hop {
    /// Its policy subject: method and host.
    pub(super) fn subject(&self) -> PolicySubject {
        match request_to(self.method.as_str(), Some(&self.url)) {
            PolicySubject::Request { method, host, path: _ } => {
                PolicySubject::Request { method, host, path: String::new() }
            }
            subject => subject,
        }
    }
}

/// Rejects a redirect that the rules deny, and one that needs a person's approval: the approver of
/// the call did not see the target.
pub(super) fn check_redirect(
    redirects: &dyn Redirects,
    from: &Hop,
    to: &Hop,
) -> Result<(), ToolError> {
    let Verdict { action, reason } = redirects.judge(request_to(to.method.as_str(), Some(&to.url)));
    let because = if reason.is_empty() { String::new() } else { format!(": {reason}") };
    let (name, why) = match action {
        Action::Allow => return Ok(()),
        Action::Deny => {
            ("PolicyDenied", format!("which the policy denies{because}. Continue without it."))
        }
        Action::Ask => (
            "RedirectNotFollowed",
            format!(
                "which needs a person's approval{because}. To request it, fetch the address in details.url in a separate call."
            ),
        ),
    };
    let (host, target) = (from.url.host_str().unwrap_or_default(), without_query(&to.url));
    let message = format!(
        "fetch: the request to {host} was made, and answered with a redirect to {} {target}, {why} It was not followed.",
        to.method
    );
    Err(ToolError::new(name, message)
        .with(json!({"url": to.url.as_str(), "method": to.method.as_str()})))
}

/// The redirected request, if the response is a redirect.
pub(super) fn redirect_target(response: &Response, hop: &Hop) -> Result<Option<Hop>, ToolError> {
    let status = response.status();
    let redirects = matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308);
    let Some(location) = response.headers().get(LOCATION).filter(|_| redirects) else {
        return Ok(None);
    };
    let broken = || {
        ToolError::new(
            "FetchFailed",
            format!("fetch: {} redirects to an invalid address.", without_query(&hop.url)),
        )
    };
    let location = std::str::from_utf8(location.as_bytes()).map_err(|_| broken())?;
    let url = hop.url.join(location).map_err(|_| broken())?;
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return Err(broken());
    }
    let mut target = Hop {
        url,
        method: hop.method.clone(),
        headers: hop.headers.clone(),
        body: hop.body.clone(),
    };
    // The address comes from the host: never use a user name and password in it.
    let cleaned = target.url.set_username("").and_then(|()| target.url.set_password(None));
    cleaned.map_err(|()| broken())?;
    let becomes_get = status == StatusCode::SEE_OTHER && hop.method != Method::HEAD
        || matches!(status, StatusCode::MOVED_PERMANENTLY | StatusCode::FOUND)
            && hop.method == Method::POST;
    if becomes_get {
        target.method = Method::GET;
        target.body = None;
        target.headers.remove(reqwest::header::CONTENT_TYPE);
    }
    if target.url.origin() != hop.url.origin() {
        target.headers = hop
            .headers
            .iter()
            .filter(|(name, value)| {
                FORWARDED_HEADERS.contains(&name.as_str())
                    && target.headers.contains_key(*name)
                    && !value.to_str().is_ok_and(secrets::has_handle)
            })
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect();
    }
    Ok(Some(target))
}
