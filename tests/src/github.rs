//! A GitHub for tests: a real HTTP server with the shapes of the REST API, and a second one that
//! serves archives, as codeload.github.com does. It enforces rate limits, answers conditional
//! requests, verifies what an app signs, and fails on demand.
//!
//! Requests that it should not have received are in [`GitHubServer::complaints`]; a passing test
//! has none.

mod archive;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::StreamExt as _;
use jsonwebtoken::{Algorithm, DecodingKey, Validation};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

pub use self::archive::tarball;

/// The app's private key. It was created for these tests and gives access to nothing.
pub const APP_KEY: &str = include_str!("github/app.pem");
/// Its public half.
const APP_PUBLIC_KEY: &[u8] = include_bytes!("github/app.pub.pem");
/// The app's client id.
pub const APP: &str = "Iv1.0123456789abcdef";
/// The id of the app's installation.
pub const INSTALLATION: u64 = 4242;
/// A personal token that may read everything.
pub const TOKEN: &str = concat!("ghp_", "thisIsTheTokenOfATestAndOpensNothing");

/// How one request fails.
#[derive(Debug, Clone)]
pub enum Fault {
    /// This status, with a message in GitHub's form.
    Status(u16),
    /// 403: the hourly limit is used up; it resets after so many seconds.
    Primary(i64),
    /// 429 with so many seconds in `Retry-After`.
    Secondary(u64),
    /// A redirect to this address.
    Redirect(String),
    /// No answer.
    Hang,
    /// For archives: the connection breaks after so many bytes.
    Truncate(usize),
    /// For archives: one byte, then nothing more.
    Drip,
}

/// A received request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedRequest {
    /// Whether it went to the API and not to the archive server.
    pub api: bool,
    /// E.g. `/repos/octo/hello`.
    pub path: String,
    /// Whether it was conditional.
    pub conditional: bool,
    /// The status of the answer.
    pub status: u16,
}

/// The server. It stops when it is dropped.
#[derive(Debug)]
pub struct GitHubServer {
    api: SocketAddr,
    shared: Arc<Mutex<GitHub>>,
    _stop: DropGuard,
}

#[derive(Debug, Default)]
struct GitHub {
    base: String,
    codeload: String,
    repositories: BTreeMap<String, Repository>,
    renamed: BTreeMap<String, String>,
    /// Owners that are users, not organizations.
    people: BTreeSet<String>,
    /// Valid installation tokens.
    tokens: BTreeSet<String>,
    issued: u32,
    lifetime: i64,
    remaining: Option<(u32, i64)>,
    faults: VecDeque<(String, Fault)>,
    asked: Vec<ReceivedRequest>,
    complaints: Vec<String>,
}

#[derive(Debug, Clone, Default)]
struct Repository {
    private: bool,
    branch: String,
    /// Branches and tags.
    references: BTreeMap<String, String>,
    archives: BTreeMap<String, Bytes>,
}

impl GitHubServer {
    /// A server without repositories.
    pub async fn start() -> Self {
        let bind =
            async || TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let (api, codeload) = (bind().await, bind().await);
        let address = |listener: &TcpListener| listener.local_addr().expect("it has an address");
        let (api_address, codeload_address) = (address(&api), address(&codeload));
        let github = GitHub {
            base: format!("http://{api_address}/api/v3"),
            codeload: format!("http://{codeload_address}"),
            lifetime: 3600,
            ..GitHub::default()
        };
        let shared = Arc::new(Mutex::new(github));
        let stop = CancellationToken::new();
        let routers = [
            (api, Router::new().fallback(answer_api).with_state(Arc::clone(&shared))),
            (codeload, Router::new().fallback(answer_codeload).with_state(Arc::clone(&shared))),
        ];
        for (listener, router) in routers {
            let stopped = stop.clone();
            tokio::spawn(async move {
                tokio::select! {
                    () = stopped.cancelled() => {}
                    served = async { axum::serve(listener, router).await } => served.expect("it serves"),
                }
            });
        }
        Self { api: api_address, shared, _stop: stop.drop_guard() }
    }

    fn github(&self) -> MutexGuard<'_, GitHub> {
        lock(&self.shared)
    }

    /// The API's base, e.g. `http://127.0.0.1:4242/api/v3`.
    pub fn url(&self) -> String {
        format!("http://{}/api/v3", self.api)
    }

    /// Commits files to a repository's default branch, and creates the repository when it is
    /// missing. Returns the commit's id.
    pub fn commit(&self, repository: &str, files: &[(&str, &[u8])]) -> String {
        let id = commit_id(repository, files);
        let folder = format!("{}-{}", repository.replace('/', "-"), &id[..7]);
        let archive = tarball(&folder, &id, files);
        self.commit_archive(repository, &id, archive);
        id
    }

    /// The same with a given archive.
    pub fn commit_archive(&self, repository: &str, id: &str, archive: impl Into<Bytes>) {
        let mut github = self.github();
        let repository = github.repositories.entry(repository.to_owned()).or_default();
        if repository.branch.is_empty() {
            "main".clone_into(&mut repository.branch);
        }
        repository.references.insert(repository.branch.clone(), id.to_owned());
        repository.archives.insert(id.to_owned(), archive.into());
    }

    /// Creates a repository without commits.
    pub fn create(&self, repository: &str) {
        self.github().repositories.entry(repository.to_owned()).or_default().branch =
            "main".to_owned();
    }

    /// Makes an owner a user: no organization has this name.
    pub fn add_user(&self, name: &str) {
        self.github().people.insert(name.to_owned());
    }

    /// Tags a commit.
    pub fn tag(&self, repository: &str, tag: &str, id: &str) {
        self.change(repository, |repository| {
            repository.references.insert(tag.to_owned(), id.to_owned());
        });
    }

    /// Makes a repository invisible without a credential.
    pub fn make_private(&self, repository: &str) {
        self.change(repository, |repository| repository.private = true);
    }

    /// Renames a repository; the old name redirects.
    pub fn rename(&self, old: &str, new: &str) {
        let mut github = self.github();
        if let Some(repository) = github.repositories.remove(old) {
            github.repositories.insert(new.to_owned(), repository);
            github.renamed.insert(old.to_owned(), new.to_owned());
        }
    }

    fn change(&self, repository: &str, change: impl FnOnce(&mut Repository)) {
        change(
            self.github().repositories.get_mut(repository).expect("the repository was made before"),
        );
    }

    /// Lets the next request fail whose path contains `path`. Several faults are played in order.
    pub fn fail(&self, path: &str, fault: Fault) {
        self.github().faults.push_back((path.to_owned(), fault));
    }

    /// Leaves so many requests until the limit resets after so many seconds. Conditional requests
    /// whose answer is unchanged are free.
    pub fn limit(&self, requests: u32, reset: i64) {
        self.github().remaining = Some((requests, now() + reset));
    }

    /// Tokens that the app is issued from now on expire after so many seconds.
    pub fn token_lifetime(&self, seconds: i64) {
        self.github().lifetime = seconds;
    }

    /// Revokes the app's tokens.
    pub fn revoke_tokens(&self) {
        self.github().tokens.clear();
    }

    /// The number of tokens that the app was issued.
    pub fn issued_tokens(&self) -> u32 {
        self.github().issued
    }

    /// The requests received so far.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.github().asked.clone()
    }

    /// Requests that it should not have received.
    pub fn complaints(&self) -> Vec<String> {
        self.github().complaints.clone()
    }
}

fn lock(shared: &Mutex<GitHub>) -> MutexGuard<'_, GitHub> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

pub(crate) fn commit_id(repository: &str, files: &[(&str, &[u8])]) -> String {
    let mut hash = Sha256::new();
    hash.update(repository);
    for (path, content) in files {
        hash.update(path);
        hash.update([0]);
        hash.update(content);
        hash.update([0]);
    }
    hash.finalize().iter().take(20).map(|byte| format!("{byte:02x}")).collect()
}

fn message_response(status: u16, message: &str) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let body = json!({"message": message, "documentation_url": "https://docs.github.com/rest", "status": status.as_str()});
    (status, [(header::CONTENT_TYPE, "application/json")], body.to_string()).into_response()
}

fn redirect(status: u16, to: &str) -> Response {
    let status = StatusCode::from_u16(status).unwrap_or(StatusCode::FOUND);
    (status, [(header::LOCATION, to.to_owned())]).into_response()
}

async fn play_fault(fault: Fault) -> Response {
    match fault {
        Fault::Status(status) => message_response(status, "Something is wrong"),
        Fault::Primary(reset) => {
            let mut response = message_response(403, "API rate limit exceeded for user ID 1.");
            let headers = response.headers_mut();
            headers.insert("x-ratelimit-remaining", HeaderValue::from_static("0"));
            headers.insert("x-ratelimit-reset", (now() + reset).into());
            response
        }
        Fault::Secondary(after) => {
            let mut response = message_response(429, "You have exceeded a secondary rate limit.");
            response.headers_mut().insert(header::RETRY_AFTER, after.into());
            response
        }
        Fault::Redirect(to) => redirect(302, &to),
        Fault::Hang | Fault::Truncate(_) | Fault::Drip => std::future::pending().await,
    }
}

async fn answer_api(State(shared): State<Arc<Mutex<GitHub>>>, request: Request) -> Response {
    let (method, headers) = (request.method().clone(), request.headers().clone());
    let (path, query) =
        (request.uri().path().to_owned(), request.uri().query().unwrap_or_default().to_owned());
    let path = path.strip_prefix("/api/v3").unwrap_or(&path).to_owned();
    let conditional = headers.contains_key(header::IF_NONE_MATCH);
    let fault = {
        let mut github = lock(&shared);
        if !headers.contains_key(header::USER_AGENT) {
            github.complaints.push(format!("no user agent: {path}"));
        }
        github.take_fault(&path)
    };
    let response = match fault {
        Some(fault) => play_fault(fault).await,
        None => lock(&shared).answer(&method, &path, &query, &headers),
    };
    let status = response.status().as_u16();
    lock(&shared).asked.push(ReceivedRequest { api: true, path, conditional, status });
    response
}

async fn answer_codeload(State(shared): State<Arc<Mutex<GitHub>>>, request: Request) -> Response {
    let path = request.uri().path().to_owned();
    let (fault, archive) = {
        let mut github = lock(&shared);
        for name in
            [header::AUTHORIZATION, HeaderName::from_static("private-token"), header::COOKIE]
        {
            if request.headers().contains_key(&name) {
                github.complaints.push(format!("the second host was sent {name}: {path}"));
            }
        }
        let mut parts = path.trim_start_matches('/').rsplitn(3, '/');
        let (id, _, repository) = (parts.next(), parts.next(), parts.next());
        let repository = repository.and_then(|repository| github.repositories.get(repository));
        let archive = repository
            .and_then(|repository| repository.archives.get(id.unwrap_or_default()))
            .cloned();
        github.asked.push(ReceivedRequest {
            api: false,
            path: path.clone(),
            conditional: false,
            status: 200,
        });
        (github.take_fault(&path), archive)
    };
    let Some(archive) = archive else { return message_response(404, "Not Found") };
    let kind = [(header::CONTENT_TYPE, "application/x-gzip")];
    match fault {
        None => (kind, archive).into_response(),
        Some(Fault::Truncate(bytes)) => {
            let part = archive.slice(..bytes.min(archive.len()));
            // Let the head and the part leave before the connection breaks.
            let cut = futures::stream::once(async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                Err(std::io::Error::other("cut"))
            });
            let broken = futures::stream::iter([Ok(part)]).chain(cut);
            (kind, Body::from_stream(broken)).into_response()
        }
        Some(Fault::Drip) => {
            let first = futures::stream::iter([Ok::<_, std::io::Error>(archive.slice(..1))]);
            (kind, Body::from_stream(first.chain(futures::stream::pending()))).into_response()
        }
        Some(fault) => tokio::time::timeout(Duration::from_secs(600), play_fault(fault))
            .await
            .unwrap_or_else(|_| message_response(500, "")),
    }
}

impl GitHub {
    fn take_fault(&mut self, path: &str) -> Option<Fault> {
        let index = self.faults.iter().position(|(part, _)| path.contains(part.as_str()))?;
        self.faults.remove(index).map(|(_, fault)| fault)
    }

    fn answer(
        &mut self,
        method: &Method,
        path: &str,
        query: &str,
        headers: &HeaderMap,
    ) -> Response {
        let segments: Vec<String> = path.split('/').skip(1).map(percent_decode).collect();
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let authorization =
            headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        if let ["app", "installations", installation, "access_tokens"] = segments.as_slice() {
            return self.token(method, installation, authorization);
        }
        let bearer = authorization.and_then(|value| value.strip_prefix("Bearer "));
        let known = bearer.is_some_and(|token| token == TOKEN || self.tokens.contains(token));
        if authorization.is_some() && !known {
            return message_response(401, "Bad credentials");
        }
        if let Some((0, reset)) = self.remaining.filter(|(_, reset)| *reset > now()) {
            let mut response = message_response(403, "API rate limit exceeded");
            response.headers_mut().insert("x-ratelimit-remaining", HeaderValue::from_static("0"));
            response.headers_mut().insert("x-ratelimit-reset", reset.into());
            return response;
        }
        let mut response = self.resource(&segments, query, known);
        if headers
            .get(header::IF_NONE_MATCH)
            .is_some_and(|tag| response.headers().get(header::ETAG) == Some(tag))
        {
            response = StatusCode::NOT_MODIFIED.into_response();
        } else if let Some((left, _)) = &mut self.remaining {
            *left = left.saturating_sub(1);
        }
        if let Some((left, reset)) = self.remaining {
            response.headers_mut().insert("x-ratelimit-remaining", left.into());
            response.headers_mut().insert("x-ratelimit-reset", reset.into());
        }
        response
    }

    /// Issues a token to the app for its signed assertion.
    fn token(
        &mut self,
        method: &Method,
        installation: &str,
        authorization: Option<&str>,
    ) -> Response {
        let assertion =
            authorization.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
        let key = DecodingKey::from_rsa_pem(APP_PUBLIC_KEY).expect("the key is one");
        let mut rules = Validation::new(Algorithm::RS256);
        rules.set_issuer(&[APP]);
        rules.set_required_spec_claims(&["exp", "iss"]);
        let claims = match jsonwebtoken::decode::<Value>(assertion, &key, &rules) {
            Ok(verified) => verified.claims,
            Err(error) => {
                self.complaints.push(format!("the app's assertion does not hold: {error}"));
                return message_response(401, "A JSON web token could not be decoded");
            }
        };
        let (from, until) = (
            claims["iat"].as_i64().unwrap_or(i64::MAX),
            claims["exp"].as_i64().unwrap_or(i64::MAX),
        );
        if method != Method::POST || from > now() || until > now() + 600 {
            self.complaints
                .push(format!("the app's assertion is not as GitHub wants it: {claims}"));
            return message_response(
                401,
                "'Expiration time' claim ('exp') is too far in the future",
            );
        }
        if installation != INSTALLATION.to_string() {
            return message_response(404, "Not Found");
        }
        self.issued += 1;
        let token = format!("ghs_{:036}", self.issued);
        self.tokens.insert(token.clone());
        let until =
            jiff::Timestamp::from_second(now() + self.lifetime).expect("a time").to_string();
        (StatusCode::CREATED, json!({"token": token, "expires_at": until}).to_string())
            .into_response()
    }

    fn resource(&self, segments: &[&str], query: &str, known: bool) -> Response {
        let list = |prefix: &str| {
            let mine = |(name, one): &(&String, &Repository)| {
                name.starts_with(prefix) && (known || !one.private)
            };
            self.repositories
                .iter()
                .filter(mine)
                .map(|(name, one)| to_json(name, one))
                .collect::<Vec<_>>()
        };
        let exists = |owner: &str| {
            self.people.contains(owner)
                || self.repositories.keys().any(|name| name.split('/').next() == Some(owner))
        };
        match segments {
            ["orgs", owner, "repos"] if self.people.contains(*owner) => {
                message_response(404, "Not Found")
            }
            ["orgs" | "users", owner, "repos"] if exists(owner) => {
                self.page(&list(&format!("{owner}/")), segments, query, false)
            }
            ["user", "repos"] if known => self.page(&list(""), segments, query, false),
            ["installation", "repositories"] if known => {
                self.page(&list(""), segments, query, true)
            }
            ["repos", owner, name, rest @ ..] => {
                let full = format!("{owner}/{name}");
                if let Some(new) = self.renamed.get(&full) {
                    let rest: String = rest.iter().map(|part| format!("/{part}")).collect();
                    return redirect(301, &format!("{}/repos/{new}{rest}", self.base));
                }
                match self.repositories.get(&full) {
                    Some(repository) if known || !repository.private => {
                        self.repository(&full, repository, rest)
                    }
                    _ => message_response(404, "Not Found"),
                }
            }
            _ => message_response(404, "Not Found"),
        }
    }

    fn repository(&self, name: &str, repository: &Repository, rest: &[&str]) -> Response {
        let find = |reference: &str| {
            let full = repository.archives.contains_key(reference).then(|| reference.to_owned());
            full.or_else(|| repository.references.get(reference).cloned()).or_else(|| {
                let short = reference.len() >= 7;
                repository.archives.keys().find(|id| short && id.starts_with(reference)).cloned()
            })
        };
        match rest {
            [] => with_etag(&to_json(name, repository)),
            ["commits", reference] => match find(reference) {
                Some(id) => with_etag(&json!({"sha": id, "commit": {"message": "A commit"}})),
                None => message_response(422, &format!("No commit found for SHA: {reference}")),
            },
            ["tarball", reference] => match find(reference) {
                Some(id) => redirect(
                    302,
                    &format!(
                        "{}/{name}/legacy.tar.gz/{id}?token=SECRETOFTHEADDRESS",
                        self.codeload
                    ),
                ),
                None => message_response(404, "Not Found"),
            },
            _ => message_response(404, "Not Found"),
        }
    }

    fn page(&self, all: &[Value], segments: &[&str], query: &str, wrapped: bool) -> Response {
        let number = |name: &str, default: usize| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs
                .find(|(key, _)| *key == name)
                .and_then(|(_, value)| value.parse().ok())
                .unwrap_or(default)
        };
        let (size, page) = (number("per_page", 30).min(100), number("page", 1).max(1));
        let part: Vec<&Value> = all.iter().skip((page - 1) * size).take(size).collect();
        let body = if wrapped {
            json!({"total_count": all.len(), "repositories": part})
        } else {
            json!(part)
        };
        let mut response = with_etag(&body);
        if page * size < all.len() {
            let path = segments.join("/");
            let link = |page: usize, rel: &str| {
                format!("<{}/{path}?per_page={size}&page={page}>; rel=\"{rel}\"", self.base)
            };
            let links = [link(page + 1, "next"), link(all.len().div_ceil(size), "last")].join(", ");
            response
                .headers_mut()
                .insert(header::LINK, HeaderValue::from_str(&links).expect("it is ASCII"));
        }
        response
    }
}

fn to_json(name: &str, repository: &Repository) -> Value {
    let short = name.split('/').next_back();
    json!({
        "id": 1, "name": short, "full_name": name, "private": repository.private, "fork": false, "archived": false,
        "description": format!("What {name} is"), "default_branch": repository.branch, "language": "Rust", "size": 108,
        "pushed_at": "2026-01-26T19:06:43Z", "owner": {"login": name.split('/').next()},
    })
}

fn with_etag(body: &Value) -> Response {
    let body = body.to_string();
    let tag: String =
        Sha256::digest(&body).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    let headers = [
        (header::CONTENT_TYPE, "application/json".to_owned()),
        (header::ETAG, format!("W/\"{tag}\"")),
    ];
    (headers, body).into_response()
}

/// Decodes a path segment: `%2F` is a slash in a branch's name.
fn percent_decode(text: &str) -> String {
    text.replace("%2F", "/").replace("%2f", "/")
}
