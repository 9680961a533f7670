//! Against an issuer in the test's own process, which is at the same time what a gateway says of
//! it. Its tokens are signed by nobody: this program does not look at that.

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

/// What the issuer does, and what it was asked.
#[derive(Default)]
struct Does {
    url: String,
    /// Members of its description that are other than usual; `null` leaves one out.
    described: Value,
    /// What it answers one after the other at its endpoint of tokens; then tokens.
    refusals: Vec<&'static str>,
    asked: Vec<(&'static str, Form)>,
    /// How many tokens it gave.
    given: usize,
}

#[derive(Clone, Default)]
struct Stub {
    does: Arc<Mutex<Does>>,
}

impl Stub {
    async fn start(described: Value, refusals: &[&'static str]) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stub = Self::default();
        {
            let mut does = stub.does();
            does.url = format!("http://{}", listener.local_addr().unwrap());
            does.described = described;
            does.refusals = refusals.to_vec();
        }
        let routes = Router::new()
            .route("/.well-known/oauth-protected-resource", get(resource))
            .route("/.well-known/openid-configuration", get(discovery))
            .route("/device", post(begin))
            .route("/token", post(tokens))
            .route("/revoke", post(revoked))
            .with_state(stub.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        stub
    }

    fn does(&self) -> MutexGuard<'_, Does> {
        self.does.lock().unwrap()
    }

    fn url(&self) -> String {
        self.does().url.clone()
    }

    fn note(&self, what: &'static str, form: &[u8]) -> Form {
        let form: Form = form_urlencoded::parse(form).into_owned().collect();
        self.does().asked.push((what, form.clone()));
        form
    }

    /// What was asked for at an endpoint, in order.
    fn asked(&self, what: &str) -> Vec<Form> {
        self.does()
            .asked
            .iter()
            .filter(|(at, _)| *at == what)
            .map(|(_, form)| form.clone())
            .collect()
    }

    async fn issuer(&self) -> Result<Issuer, Error> {
        Issuer::find(&self.login(), None).await
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
    let does = stub.does();
    let url = &does.url;
    let mut described = json!({"issuer": url, "token_endpoint": format!("{url}/token"),
        "authorization_endpoint": format!("{url}/authorize?realm=r"), "revocation_endpoint": format!("{url}/revoke"),
        "device_authorization_endpoint": format!("{url}/device")});
    for (name, value) in does.described.as_object().into_iter().flatten() {
        described[name] = value.clone();
    }
    Json(described)
}

async fn begin(State(stub): State<Stub>, RawForm(form): RawForm) -> Json<Value> {
    stub.note("device", &form);
    let page = format!("{}/enter", stub.url());
    Json(
        json!({"device_code": "d", "user_code": "ABCD-EFGH", "verification_uri": page, "expires_in": 600, "interval": 0}),
    )
}

async fn tokens(State(stub): State<Stub>, RawForm(form): RawForm) -> (StatusCode, Json<Value>) {
    stub.note("token", &form);
    let mut does = stub.does();
    if !does.refusals.is_empty() {
        let error = does.refusals.remove(0);
        return (
            StatusCode::BAD_REQUEST,
            Json(json!({"error": error, "error_description": "words of it"})),
        );
    }
    does.given += 1;
    let claims = json!({"aud": "construct", "exp": jiff::Timestamp::now().as_second() + 3600, "sub": does.given});
    let id = format!("e30.{}.c2ln", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()));
    let refresh = format!("refresh-{}", does.given);
    (
        StatusCode::OK,
        Json(
            json!({"access_token": "opaque", "id_token": id, "refresh_token": refresh, "expires_in": 3600}),
        ),
    )
}

async fn revoked(State(stub): State<Stub>, RawForm(form): RawForm) {
    stub.note("revoke", &form);
}

fn has(form: &Form, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        assert_eq!(form.get(*name).map(String::as_str), Some(*value), "{name} of {form:?}");
    }
}

#[tokio::test]
async fn a_code_is_waited_for_until_it_is_entered_and_the_session_renewed_and_ended() {
    let stub = Stub::start(
        json!({"scopes_supported": ["openid", "email"]}),
        &["authorization_pending"; 2],
    )
    .await;
    let resource = Resource::ask(&stub.url(), &TlsArgs::default()).await.unwrap();
    assert_eq!(
        (resource.client_id.as_deref(), resource.audience.as_str()),
        (Some("cli"), "construct")
    );
    let issuer = stub.issuer().await.unwrap();
    // What the issuer does not have is not asked for.
    let scopes = issuer.known(resource.scopes);
    let begun = issuer.begin_device(&scopes).await.unwrap().expect("it gives codes");
    let tokens = device::wait(&issuer, begun).await.unwrap();
    let first = accepted(&stub.login(), tokens, None).unwrap();
    has(&stub.asked("device")[0], &[("client_id", "cli"), ("scope", "openid email")]);
    let polls = stub.asked("token");
    assert_eq!(polls.len(), 3);
    let grant = "urn:ietf:params:oauth:grant-type:device_code";
    has(&polls[2], &[("client_id", "cli"), ("device_code", "d"), ("grant_type", grant)]);

    let second = renewed(&stub.login(), &first, &TlsArgs::default()).await.expect("it is renewed");
    assert!(second.token != first.token && second.refresh.as_deref() == Some("refresh-2"));
    has(
        &stub.asked("token")[3],
        &[("grant_type", "refresh_token"), ("refresh_token", "refresh-1"), ("client_id", "cli")],
    );
    issuer.revoke("refresh-2").await.unwrap();
    has(&stub.asked("revoke")[0], &[("token", "refresh-2"), ("client_id", "cli")]);

    stub.does().refusals = vec!["invalid_grant", "temporarily_unavailable"];
    assert_eq!(
        renewed(&stub.login(), &second, &TlsArgs::default()).await.err(),
        Some(None),
        "it is over"
    );
    let passes =
        renewed(&stub.login(), &second, &TlsArgs::default()).await.err().expect("it is refused");
    assert!(
        passes.expect("it may pass").message().contains("words of it (temporarily_unavailable)")
    );
}

#[tokio::test]
async fn a_code_that_is_refused_or_ends_is_not_waited_for() {
    for (code, words) in [
        ("access_denied", "refused there"),
        ("expired_token", "in time"),
        ("invalid_grant", "words of it (invalid_grant)"),
    ] {
        let stub = Stub::start(Value::Null, &["authorization_pending", code]).await;
        let issuer = stub.issuer().await.unwrap();
        let begun = issuer.begin_device("openid").await.unwrap().expect("it gives codes");
        let failure = device::wait(&issuer, begun).await.err().expect("it fails");
        assert!(failure.message().contains(words), "{code}: {failure}");
        assert_eq!(stub.asked("token").len(), 2);
    }
}

#[tokio::test]
async fn a_browser_comes_back_and_what_others_say_is_not_listened_to() {
    let stub = Stub::start(json!({"device_authorization_endpoint": null}), &[]).await;
    let issuer = stub.issuer().await.unwrap();
    assert!(issuer.begin_device("openid").await.unwrap().is_none());
    // The port is chosen here, so that the browser knows where to come.
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let waiting = browser::wait_with(&issuer, "openid offline_access", port, |page| {
        let query: Form = page.query_pairs().into_owned().collect();
        let redirect = format!("http://127.0.0.1:{port}/");
        has(
            &query,
            &[
                ("realm", "r"),
                ("response_type", "code"),
                ("client_id", "cli"),
                ("redirect_uri", redirect.as_str()),
            ],
        );
        has(
            &query,
            &[
                ("scope", "openid offline_access"),
                ("prompt", "consent"),
                ("code_challenge_method", "S256"),
            ],
        );
        let (state, challenge) = (query["state"].clone(), query["code_challenge"].clone());
        stub.does().asked.push(("page", Form::from([("challenge".to_owned(), challenge)])));
        tokio::spawn(async move {
            let client = issuer::builder(&redirect).build().unwrap();
            // Says nothing, and does not keep anybody waiting.
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
    let asked = stub.asked("token").remove(0);
    has(&asked, &[("grant_type", "authorization_code"), ("code", "c"), ("client_id", "cli")]);
    let challenge =
        BASE64_URL_SAFE_NO_PAD.encode(digest(&SHA256, asked["code_verifier"].as_bytes()));
    assert_eq!(stub.asked("page")[0]["challenge"], challenge);
}

#[tokio::test]
async fn nobody_is_sent_to_an_issuer_that_is_another_one_or_that_others_can_listen_to() {
    let refused = async |described: Value| {
        let error = Stub::start(described, &[]).await.issuer().await.err().expect("it is refused");
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
        let open = refused(json!({endpoint: "http://login.example.com/x"})).await;
        assert!(open.message().contains("without TLS"), "{endpoint}: {open}");
    }
    let login = Login {
        issuer: "http://login.example.com".into(),
        client_id: "cli".into(),
        audience: "c".into(),
    };
    assert!(matches!(Issuer::find(&login, None).await, Err(Error::Wrong(_))));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let login = Login { issuer: format!("http://127.0.0.1:{port}"), ..login };
    let away = Failure::from(Issuer::find(&login, None).await.err().expect("nobody is there"));
    assert_eq!(away.exit(), Exit::Unreachable);
}
