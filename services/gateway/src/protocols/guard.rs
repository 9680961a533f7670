//! Which requests don't come from where they may come from.
//!
//! A gateway in local mode asks nobody who they are, so any page a person has open in a browser
//! could drive it. Two looks at each request prevent that: a page's request names its origin, which
//! must be a configured one; and a page whose name was made to point at loopback (DNS rebinding)
//! has that name in the request's host, which must be loopback's own or a configured one.

use tonic::{
    Status,
    body::Body,
    codegen::http::{
        HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header,
        uri::Authority,
    },
};

use crate::identity::peer::is_loopback_host;

/// What a page's script may send, besides what it always may.
const SENT: HeaderValue = HeaderValue::from_static(
    "authorization, connect-content-encoding, connect-protocol-version, connect-timeout-ms, content-encoding, content-type, \
     grpc-timeout, idempotency-key, if-match, if-none-match, if-range, last-event-id, range, traceparent, tracestate, tus-resumable, \
     upload-length, upload-metadata, upload-offset, x-grpc-web, x-http-method-override, x-organization-id, x-requested-with, \
     x-user-agent",
);
/// What a page's script may read, besides what it always may.
const READ: HeaderValue = HeaderValue::from_static(
    "accept-ranges, connect-content-encoding, content-disposition, content-encoding, content-range, etag, grpc-message, grpc-status, \
     grpc-status-details-bin, location, ratelimit, ratelimit-policy, retry-after, tus-extension, tus-max-size, tus-resumable, \
     tus-version, upload-expires, upload-length, upload-metadata, upload-offset, www-authenticate",
);
const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE");
/// Seconds a browser may remember the answer to its question.
const REMEMBER: HeaderValue = HeaderValue::from_static("7200");

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

pub(super) struct Guard {
    /// Whether the gateway listens on a loopback address only.
    loopback: bool,
    origins: Vec<String>,
    hosts: Vec<String>,
}

impl Guard {
    pub(super) fn new(loopback: bool, origins: &[String], hosts: &[String]) -> Self {
        Self { loopback, origins: origins.to_vec(), hosts: hosts.to_vec() }
    }

    /// Whether a request may be answered at all.
    ///
    /// # Errors
    /// `PERMISSION_DENIED`.
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<(), Status> {
        let headers = request.headers();
        match headers.get(header::ORIGIN) {
            Some(origin) if !self.knows(origin) => {
                let words = "pages of this origin may not call this gateway: gateway_origins names those that may";
                return Err(Status::permission_denied(words));
            }
            Some(_) => {}
            // An image or a frame of a page: a browser doesn't say whose it is then, but that it is
            // another one's.
            None if headers
                .get(FETCH_SITE)
                .is_some_and(|site| site == "cross-site" || site == "same-site") =>
            {
                return Err(Status::permission_denied(
                    "pages of others may not embed this gateway",
                ));
            }
            None => {}
        }
        if self.loopback && !self.is_ours(request) {
            let words = "this gateway listens on loopback and is not called that: gateway_hosts names further hosts it may be";
            return Err(Status::permission_denied(words));
        }
        Ok(())
    }

    /// The request's origin, if pages of it may call.
    pub(super) fn allowed_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        headers.get(header::ORIGIN).filter(|origin| self.knows(origin)).cloned()
    }

    fn knows(&self, origin: &HeaderValue) -> bool {
        self.origins.iter().any(|known| known.as_bytes() == origin.as_bytes())
    }

    /// Whether the request's host is one we are called. HTTP/2 has it in its target. A request
    /// without any is not a browser's.
    fn is_ours<B>(&self, request: &Request<B>) -> bool {
        let named = |host: &str| {
            is_loopback_host(host)
                || self.hosts.iter().any(|known| known.eq_ignore_ascii_case(host))
        };
        let target = request.uri().authority().map(Authority::host);
        let fine = |host: &HeaderValue| {
            let authority = Authority::try_from(host.as_bytes());
            authority.is_ok_and(|authority| named(authority.host()))
        };
        target.is_none_or(named) && request.headers().get_all(header::HOST).iter().all(fine)
    }
}

/// Whether a browser asks what it may send.
pub(super) fn is_preflight(request: &Request<Body>) -> bool {
    request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// What a browser may send for pages of `origin`.
pub(super) fn preflight(origin: &HeaderValue, request: &Request<Body>) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, METHODS);
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, SENT);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, REMEMBER);
    if request.headers().contains_key("access-control-request-private-network") {
        headers.insert("access-control-allow-private-network", HeaderValue::from_static("true"));
    }
    allow(origin.clone(), headers);
    response
}

/// Lets pages of `origin` read an answer.
pub(super) fn allow(origin: HeaderValue, headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, READ);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fine(guard: &Guard, target: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::get(target);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        guard.check(&request.body(Body::empty()).expect("a request")).is_ok()
    }

    #[test]
    fn only_pages_of_configured_origins_may_call() {
        let guard = Guard::new(false, &["https://app.example".into()], &[]);
        for (headers, expected) in [
            (&[][..], true),
            (&[("origin", "https://app.example")], true),
            (&[("origin", "https://app.example"), ("sec-fetch-site", "cross-site")], true),
            (&[("origin", "https://app.example.evil")], false),
            (&[("origin", "http://app.example")], false),
            (&[("origin", "null")], false),
            (&[("origin", "")], false),
            (&[("sec-fetch-site", "cross-site")], false),
            (&[("sec-fetch-site", "same-site")], false),
            (&[("sec-fetch-site", "none")], true),
        ] {
            assert_eq!(fine(&guard, "/v1/tasks", headers), expected, "{headers:?}");
        }
    }

    #[test]
    fn a_gateway_on_loopback_answers_to_its_own_names_only() {
        let guard = Guard::new(true, &[], &["construct.test".into()]);
        for (target, host, expected) in [
            ("/", "localhost:60080", true),
            ("/", "LOCALHOST", true),
            ("/", "127.0.0.1:60080", true),
            ("/", "127.8.8.8", true),
            ("/", "[::1]:60080", true),
            ("/", "Construct.Test:60080", true),
            ("/", "evil.example:60080", false),
            ("/", "localhost.evil.example", false),
            ("/", "127.0.0.1.evil.example", false),
            ("/", "10.0.0.1", false),
            ("/", "evil.example@localhost", true),
            ("/", "", false),
            ("http://localhost/", "localhost", true),
            ("http://localhost/", "evil.example", false),
            ("http://evil.example/", "localhost", false),
        ] {
            assert_eq!(fine(&guard, target, &[("host", host)]), expected, "{target} {host}");
        }
        assert!(fine(&guard, "http://[::1]:60080/x", &[]));
        assert!(!fine(&guard, "http://evil.example:60080/x", &[]));
        assert!(
            fine(&Guard::new(false, &[], &[]), "/", &[("host", "construct.example")]),
            "others guard that address"
        );
    }
}
