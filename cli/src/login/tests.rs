//! Tests with an issuer in the test's process, which also serves the gateway's metadata. Its tokens
//! are unsigned: this program does not verify them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard},
};

use axum::{
    Json, Router,
    extract::{RawForm, State},
    http::StatusCode,
    routing::{get, post},
};
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use ring::digest::{SHA256, digest};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::*;
use crate::failure::Exit;

type Form = HashMap<String, String>;

/// The behavior of the issuer, and the requests it received.
#[derive(Default)]
struct StubState {
    url: String,
    /// Overrides of its metadata; `null` removes a member.
    overrides: Value,
    /// The errors that its token endpoint returns first; then it returns tokens.
    refusals: Vec<&'static str>,
    requests: Vec<(&'static str, Form)>,
    /// The number of issued tokens.
    issued: usize,
}

#[derive(Clone, Default)]
struct Stub {
    state: Arc<Mutex<StubState>>,
}

impl Stub {
    async fn start(overrides: Value, refusals: &[&'static str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stub = Self::default();
        {
            let mut state = stub.state();
            state.url = format!("http://{}", listener.local_addr().unwrap());
            state.overrides = overrides;
            state.refusals = refusals.to_vec();
        }
        let routes = Router::new()
            .route("/.well-known/oauth-protected-resource", get(resource))
            .route("/.well-known/openid-configuration", get(discovery))
            .route("/device", post(device_code))
            .route("/token", post(tokens))
            .route("/revoke", post(revoke))
            .with_state(stub.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        stub
    }

    fn state(&self) -> MutexGuard<'_, StubState> {
        self.state.lock().unwrap()
    }

    fn url(&self) -> String {
        self.state().url.clone()
    }

    fn record(&self, endpoint: &'static str, form: &[u8]) -> Form {
        let form: Form = form_urlencoded::parse(form).into_owned().collect();
        self.state().requests.push((endpoint, form.clone()));
        form
    }

    /// The requests to an endpoint, in order.
    fn requests(&self, endpoint: &str) -> Vec<Form> {
        self.state()
            .requests
            .iter()
            .filter(|(at, _)| *at == endpoint)
            .map(|(_, form)| form.clone())
            .collect()
    }

    async fn issuer(&self) -> Result<Issuer, Error> {
        Issuer::discover(&self.login(), None).await
    }

    fn login(&self) -> Login {
        Login { issuer: self.url(), client_id: "cli".into(), audience: "construct".into() }
    }
}

async fn resource(State(stub): State<Stub>) -> Json<Value> {
    let url = stub.url();
    Json(
        json!({"resource": url, "authorization_servers": [url], "scopes_supported": ["openid", "email", "offline_access"],
        "construct_client_id": "cli", "construct_audience": "construct"}),
    )
}

async fn discovery(State(stub): State<Stub>) -> Json<Value> {
    let state = stub.state();
    let url = &state.url;
    let mut metadata = json!({"issuer": url, "token_endpoint": format!("{url}/token"),
        "authorization_endpoint": format!("{url}/authorize?realm=r"), "revocation_endpoint": format!("{url}/revoke"),
        "device_authorization_endpoint": format!("{url}/device")});
    for (name, value) in state.overrides.as_object().into_iter().flatten() {
        metadata[name] = value.clone();
    }
    Json(metadata)
}

async fn device_code(State(stub): State<Stub>, RawForm(form): RawForm) -> Json<Value> {
    stub.record("device", &form);
    let page = format!("{}/enter", stub.url());
    Json(
        json!({"device_code": "d", "user_code": "ABCD-EFGH", "verification_uri": page, "expires_in": 600, "interval": 0}),
    )
}

async fn tokens(State(stub): State<Stub>, RawForm(form): RawForm) -> (StatusCode, Json<Value>) {
    stub.record("token", &form);
    let mut state = stub.state();
    if !state.refusals.is_empty() {
        let error = state.refusals.remove(0);
        return (
            StatusCode::BAD_REQUEST,
            Json(json!({"error": error, "error_description": "the description"})),
        );
    }
    state.issued += 1;
    let claims = json!({"aud": "construct", "exp": jiff::Timestamp::now().as_second() + 3600, "sub": state.issued});
    let id = format!("e30.{}.c2ln", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()));
    let refresh = format!("refresh-{}", state.issued);
    (
        StatusCode::OK,
        Json(
            json!({"access_token": "opaque", "id_token": id, "refresh_token": refresh, "expires_in": 3600}),
        ),
    )
}

async fn revoke(State(stub): State<Stub>, RawForm(form): RawForm) {
    stub.record("revoke", &form);
}

fn assert_form(form: &Form, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        assert_eq!(form.get(*name).map(String::as_str), Some(*value), "{name} of {form:?}");
    }
}

#[tokio::test]
async fn device_code_login_is_renewed_and_revoked() {
    let stub = Stub::start(
        json!({"scopes_supported": ["openid", "email"]}),
        &["authorization_pending"; 2],
    )
    .await;
    let resource = Resource::fetch(&stub.url(), &TlsArgs::default()).await.unwrap();
    assert_eq!(
        (resource.client_id.as_deref(), resource.audience.as_str()),
        (Some("cli"), "construct")
    );
    let issuer = stub.issuer().await.unwrap();
    // Unsupported scopes are not requested.
    let scopes = issuer.supported_scopes(resource.scopes);
    let code = issuer.request_device_code(&scopes).await.unwrap().expect("a device code");
    let tokens = device::wait(&issuer, code).await.unwrap();
    let first = session_from_tokens(&stub.login(), tokens, None).unwrap();
    assert_form(&stub.requests("device")[0], &[("client_id", "cli"), ("scope", "openid email")]);
    let polls = stub.requests("token");
    assert_eq!(polls.len(), 3);
    let grant = "urn:ietf:params:oauth:grant-type:device_code";
    assert_form(&polls[2], &[("client_id", "cli"), ("device_code", "d"), ("grant_type", grant)]);

    let second =
        renew(&stub.login(), &first, &TlsArgs::default()).await.expect("a renewed session");
    assert!(second.token != first.token && second.refresh.as_deref() == Some("refresh-2"));
    assert_form(
        &stub.requests("token")[3],
        &[("grant_type", "refresh_token"), ("refresh_token", "refresh-1"), ("client_id", "cli")],
    );
    issuer.revoke("refresh-2").await.unwrap();
    assert_form(&stub.requests("revoke")[0], &[("token", "refresh-2"), ("client_id", "cli")]);

    stub.state().refusals = vec!["invalid_grant", "temporarily_unavailable"];
    assert_eq!(
        renew(&stub.login(), &second, &TlsArgs::default()).await.err(),
        Some(None),
        "the session assert_form ended"
    );
    let temporary =
        renew(&stub.login(), &second, &TlsArgs::default()).await.err().expect("a refusal");
    assert!(
        temporary
            .expect("a retryable failure")
            .message()
            .contains("the description (temporarily_unavailable)")
    );
}

#[tokio::test]
async fn denied_or_expired_device_code_ends_the_login() {
    for (code, message) in [
        ("access_denied", "was denied"),
        ("expired_token", "in time"),
        ("invalid_grant", "the description (invalid_grant)"),
    ] {
        let stub = Stub::start(Value::Null, &["authorization_pending", code]).await;
        let issuer = stub.issuer().await.unwrap();
        let device_code =
            issuer.request_device_code("openid").await.unwrap().expect("a device code");
        let failure = device::wait(&issuer, device_code).await.err().expect("a failure");
        assert!(failure.message().contains(message), "{code}: {failure}");
        assert_eq!(stub.requests("token").len(), 2);
    }
}

#[tokio::test]
async fn browser_redirect_is_accepted_and_other_requests_are_ignored() {
    let stub = Stub::start(json!({"device_authorization_endpoint": null}), &[]).await;
    let issuer = stub.issuer().await.unwrap();
    assert!(issuer.request_device_code("openid").await.unwrap().is_none());
    // A fixed port, so that the test knows the redirect.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let waiting = browser::wait_with(&issuer, "openid offline_access", port, |page| {
        let query: Form = page.query_pairs().into_owned().collect();
        let redirect = format!("http://127.0.0.1:{port}/");
        assert_form(
            &query,
            &[
                ("realm", "r"),
                ("response_type", "code"),
                ("client_id", "cli"),
                ("redirect_uri", redirect.as_str()),
            ],
        );
        assert_form(
            &query,
            &[
                ("scope", "openid offline_access"),
                ("prompt", "consent"),
                ("code_challenge_method", "S256"),
            ],
        );
        let (state, challenge) = (query["state"].clone(), query["code_challenge"].clone());
        stub.state().requests.push(("page", Form::from([("challenge".to_owned(), challenge)])));
        tokio::spawn(async move {
            let client = issuer::client_builder(&redirect).build().unwrap();
            // A connection without a request does not block others.
            let _silent = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            for wrong in ["?code=evil&state=guessed", "favicon.ico", "?code=evil"] {
                let answer = client.get(format!("{redirect}{wrong}")).send().await.unwrap();
                assert_eq!(answer.status().as_u16(), 404, "{wrong}");
            }
            client.get(format!("{redirect}?code=c&state={state}")).send().await.unwrap();
        });
    });
    let tokens = waiting.await.unwrap();
    assert_eq!(tokens.refresh_token.as_deref(), Some("refresh-1"));
    let request = stub.requests("token").remove(0);
    assert_form(
        &request,
        &[("grant_type", "authorization_code"), ("code", "c"), ("client_id", "cli")],
    );
    let challenge =
        BASE64_URL_SAFE_NO_PAD.encode(digest(&SHA256, request["code_verifier"].as_bytes()));
    assert_eq!(stub.requests("page")[0]["challenge"], challenge);
}

#[tokio::test]
async fn foreign_or_insecure_issuer_is_refused() {
    let refused = async |overrides: Value| {
        let error = Stub::start(overrides, &[]).await.issuer().await.err().expect("a refusal");
        Failure::from(error)
    };
    let another = refused(json!({"issuer": "https://login.example.com"})).await;
    assert!(another.message().contains("another issuer"), "{another}");
    for endpoint in [
        "token_endpoint",
        "authorization_endpoint",
        "device_authorization_endpoint",
        "revocation_endpoint",
    ] {
        let insecure = refused(json!({endpoint: "http://login.example.com/x"})).await;
        assert!(insecure.message().contains("without TLS"), "{endpoint}: {insecure}");
    }
    let login = Login {
        issuer: "http://login.example.com".into(),
        client_id: "cli".into(),
        audience: "c".into(),
    };
    assert!(matches!(Issuer::discover(&login, None).await, Err(Error::Invalid(_))));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let login = Login { issuer: format!("http://127.0.0.1:{port}"), ..login };
    let unreachable = Failure::from(Issuer::discover(&login, None).await.err().expect("no issuer"));
    assert_eq!(unreachable.exit(), Exit::Unreachable);
}
