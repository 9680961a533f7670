//! Refuses requests from foreign web pages.
//!
//! A gateway in local mode does not authenticate, so any page that is open in a person's browser
//! could control it. Two checks prevent that. A request of a page names its origin, which must be
//! configured. And a page whose name was made to resolve to loopback (DNS rebinding) has that name
//! as the request's host, which must be loopback's own name or configured.

use tonic::{
    Status,
    body::Body,
    codegen::http::{
        HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, header,
        uri::Authority,
    },
};

use crate::identity::peer::is_loopback_host;

/// The request headers that scripts of a page may send, besides the safelisted ones.
const ALLOWED_HEADERS: HeaderValue = HeaderValue::from_static(
    "authorization, connect-content-encoding, connect-protocol-version, connect-timeout-ms, content-encoding, content-type, \
     grpc-timeout, idempotency-key, if-match, if-none-match, if-range, last-event-id, range, traceparent, tracestate, tus-resumable, \
     upload-length, upload-metadata, upload-offset, x-grpc-web, x-http-method-override, x-organization-id, x-requested-with, \
     x-user-agent",
);
/// The response headers that scripts of a page may read, besides the safelisted ones.
const EXPOSED_HEADERS: HeaderValue = HeaderValue::from_static(
    "accept-ranges, connect-content-encoding, content-disposition, content-encoding, content-range, etag, grpc-message, grpc-status, \
     grpc-status-details-bin, location, ratelimit, ratelimit-policy, retry-after, tus-extension, tus-max-size, tus-resumable, \
     tus-version, upload-expires, upload-length, upload-metadata, upload-offset, www-authenticate",
);
const ALLOWED_METHODS: HeaderValue =
    HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE");
/// How long a browser may cache the answer to a preflight request, in seconds.
const PREFLIGHT_MAX_AGE: HeaderValue = HeaderValue::from_static("7200");

const FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");

pub(super) struct OriginGuard {
    /// Whether the gateway listens on a loopback address only.
    is_loopback: bool,
    origins: Vec<String>,
    hosts: Vec<String>,
}

impl OriginGuard {
    pub(super) fn new(is_loopback: bool, origins: &[String], hosts: &[String]) -> Self {
        Self { is_loopback, origins: origins.to_vec(), hosts: hosts.to_vec() }
    }

    /// Whether a request may be answered at all.
    ///
    /// # Errors
    /// `PERMISSION_DENIED`.
    pub(super) fn check<B>(&self, request: &Request<B>) -> Result<(), Status> {
        let headers = request.headers();
        match headers.get(header::ORIGIN) {
            Some(origin) if !self.allows_origin(origin) => {
                let message = "pages of this origin may not call this gateway: add the origin to gateway_origins";
                return Err(Status::permission_denied(message));
            }
            Some(_) => {}
            // For an image or a frame, a browser does not name the page's origin, only that it is
            // another one.
            None if headers
                .get(FETCH_SITE)
                .is_some_and(|site| site == "cross-site" || site == "same-site") =>
            {
                return Err(Status::permission_denied(
                    "pages of other origins may not embed this gateway",
                ));
            }
            None => {}
        }
        if self.is_loopback && !self.allows_host(request) {
            let message =
                "unknown host: this gateway listens on loopback; add the host to gateway_hosts";
            return Err(Status::permission_denied(message));
        }
        Ok(())
    }

    /// The request's origin, if its pages may call.
    pub(super) fn allowed_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        headers.get(header::ORIGIN).filter(|origin| self.allows_origin(origin)).cloned()
    }

    fn allows_origin(&self, origin: &HeaderValue) -> bool {
        self.origins.iter().any(|allowed| allowed.as_bytes() == origin.as_bytes())
    }

    /// Whether the request's host is a name of this gateway. HTTP/2 has it in its target. A request
    /// without a host is not a browser's.
    fn allows_host<B>(&self, request: &Request<B>) -> bool {
        let named = |host: &str| {
            is_loopback_host(host)
                || self.hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(host))
        };
        let target = request.uri().authority().map(Authority::host);
        let is_allowed = |host: &HeaderValue| {
            let authority = Authority::try_from(host.as_bytes());
            authority.is_ok_and(|authority| named(authority.host()))
        };
        target.is_none_or(named) && request.headers().get_all(header::HOST).iter().all(is_allowed)
    }
}

/// Whether it is a preflight request.
pub(super) fn is_preflight(request: &Request<Body>) -> bool {
    request.method() == Method::OPTIONS
        && request.headers().contains_key(header::ACCESS_CONTROL_REQUEST_METHOD)
}

/// The answer to a preflight request of `origin`.
pub(super) fn preflight(origin: &HeaderValue, request: &Request<Body>) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, ALLOWED_METHODS);
    headers.insert(header::ACCESS_CONTROL_ALLOW_HEADERS, ALLOWED_HEADERS);
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, PREFLIGHT_MAX_AGE);
    if request.headers().contains_key("access-control-request-private-network") {
        headers.insert("access-control-allow-private-network", HeaderValue::from_static("true"));
    }
    allow(origin.clone(), headers);
    response
}

/// Lets pages of `origin` read the response.
pub(super) fn allow(origin: HeaderValue, headers: &mut HeaderMap) {
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_HEADERS);
    headers.append(header::VARY, HeaderValue::from_static("origin"));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_allowed(guard: &OriginGuard, target: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::get(target);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        guard.check(&request.body(Body::empty()).expect("a request")).is_ok()
    }

    #[test]
    fn page_of_configured_origin_is_allowed() {
        let guard = OriginGuard::new(false, &["https://app.example".into()], &[]);
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
            assert_eq!(is_allowed(&guard, "/v1/tasks", headers), expected, "{headers:?}");
        }
    }

    #[test]
    fn loopback_gateway_refuses_foreign_hosts() {
        let guard = OriginGuard::new(true, &[], &["construct.test".into()]);
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
            assert_eq!(is_allowed(&guard, target, &[("host", host)]), expected, "{target} {host}");
        }
        assert!(is_allowed(&guard, "http://[::1]:60080/x", &[]));
        assert!(!is_allowed(&guard, "http://evil.example:60080/x", &[]));
        assert!(
            is_allowed(&OriginGuard::new(false, &[], &[]), "/", &[("host", "construct.example")]),
            "others guard that address"
        );
    }
}
