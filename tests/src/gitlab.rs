//! A GitLab for tests: a real HTTP server with the shapes of its REST API. It enforces rate limits,
//! answers conditional requests, serves archives itself, as GitLab does, and fails on demand.
//!
//! Requests that it should not have received are in [`GitLabServer::complaints`]; a passing test
//! has none.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::StreamExt as _;
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::github::{commit_id, tarball};

/// A personal token whose user is a member of every private project.
pub const TOKEN: &str = concat!("glpat-", "thisIsOfATest_Opens0");
/// The header with the credential.
const PRIVATE_TOKEN: HeaderName = HeaderName::from_static("private-token");
/// The requests per minute that the headers report.
const LIMIT: i64 = 600;

/// How one request fails.
#[derive(Debug, Clone)]
pub enum Fault {
    /// This status, with a message in GitLab's form.
    Status(u16),
    /// 429 of the server's front end: no JSON, with so many seconds in `Retry-After`.
    Throttled(u64),
    /// 429 of an endpoint's own limit: it names no time, and its headers describe another limit.
    TooOften,
    /// A redirect to this address.
    Redirect(String),
    /// For archives: the connection breaks after so many bytes.
    Truncate(usize),
}

/// A received request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReceivedRequest {
    /// E.g. `/projects/group%2Fname/repository/commits/main`, as received.
    pub path: String,
    /// E.g. `sha=…`.
    pub query: String,
    /// Whether it had a credential.
    pub credential: bool,
    /// Whether it was conditional.
    pub conditional: bool,
    /// The status of the answer.
    pub status: u16,
}

/// The server. It stops when it is dropped.
#[derive(Debug)]
pub struct GitLabServer {
    address: SocketAddr,
    shared: Arc<Mutex<GitLab>>,
    _stop: DropGuard,
}

#[derive(Debug, Default)]
struct GitLab {
    base: String,
    projects: BTreeMap<String, Project>,
    renamed: BTreeMap<String, String>,
    /// Namespaces that belong to users.
    users: Vec<String>,
    remaining: Option<(i64, i64)>,
    faults: VecDeque<(String, Fault)>,
    asked: Vec<ReceivedRequest>,
    complaints: Vec<String>,
}

#[derive(Debug, Clone)]
struct Project {
    number: usize,
    visibility: &'static str,
    /// None before the first commit.
    branch: Option<&'static str>,
    /// Branches and tags.
    references: BTreeMap<String, String>,
    archives: BTreeMap<String, Bytes>,
}

impl GitLabServer {
    /// A server without projects.
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let address = listener.local_addr().expect("it has an address");
        let base = format!("http://{address}/api/v4");
        let shared = Arc::new(Mutex::new(GitLab { base, ..GitLab::default() }));
        let router = Router::new().fallback(answer).with_state(Arc::clone(&shared));
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        tokio::spawn(async move {
            tokio::select! {
                () = stopped.cancelled() => {}
                served = async { axum::serve(listener, router).await } => served.expect("it serves"),
            }
        });
        Self { address, shared, _stop: stop.drop_guard() }
    }

    fn gitlab(&self) -> MutexGuard<'_, GitLab> {
        lock(&self.shared)
    }

    /// The server's address, e.g. `http://127.0.0.1:4242`; the API is below it.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Creates a public project without commits, and its groups.
    pub fn create(&self, project: &str) {
        let mut gitlab = self.gitlab();
        let number = gitlab.projects.len() + 1;
        gitlab.projects.entry(project.to_owned()).or_insert(Project {
            number,
            visibility: "public",
            branch: None,
            references: BTreeMap::new(),
            archives: BTreeMap::new(),
        });
    }

    /// Commits files to a project's default branch, and creates the project when it is missing.
    /// Returns the commit's id.
    pub fn commit(&self, project: &str, files: &[(&str, &[u8])]) -> String {
        self.create(project);
        let id = commit_id(project, files);
        let name = project.rsplit('/').next().unwrap_or(project);
        let archive = tarball(&format!("{name}-{id}-{id}"), &id, files);
        self.change(project, |project| {
            let branch = *project.branch.get_or_insert("main");
            project.references.insert(branch.to_owned(), id.clone());
            project.archives.insert(id.clone(), archive.into());
        });
        id
    }

    /// Creates a tag or a branch at a commit.
    pub fn tag(&self, project: &str, tag: &str, id: &str) {
        self.change(project, |project| {
            project.references.insert(tag.to_owned(), id.to_owned());
        });
    }

    /// Makes a project visible to its members only.
    pub fn make_private(&self, project: &str) {
        self.change(project, |project| project.visibility = "private");
    }

    /// Moves a project; the old path redirects.
    pub fn rename(&self, old: &str, new: &str) {
        let mut gitlab = self.gitlab();
        if let Some(project) = gitlab.projects.remove(old) {
            gitlab.projects.insert(new.to_owned(), project);
            gitlab.renamed.insert(old.to_owned(), new.to_owned());
        }
    }

    /// Makes the first segment of paths a user and not a group.
    pub fn add_user(&self, name: &str) {
        self.gitlab().users.push(name.to_owned());
    }

    fn change(&self, project: &str, change: impl FnOnce(&mut Project)) {
        change(self.gitlab().projects.get_mut(project).expect("the project was made before"));
    }

    /// Lets the next request fail whose path contains `path`. Several faults are played in order.
    pub fn fail(&self, path: &str, fault: Fault) {
        self.gitlab().faults.push_back((path.to_owned(), fault));
    }

    /// Leaves so many requests until the limit resets after so many seconds.
    pub fn limit(&self, requests: i64, reset: i64) {
        self.gitlab().remaining = Some((requests, now() + reset));
    }

    /// The requests received so far.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.gitlab().asked.clone()
    }

    /// Requests that it should not have received.
    pub fn complaints(&self) -> Vec<String> {
        self.gitlab().complaints.clone()
    }
}

fn lock(shared: &Mutex<GitLab>) -> MutexGuard<'_, GitLab> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

fn now() -> i64 {
    jiff::Timestamp::now().as_second()
}

fn status_code(status: u16) -> StatusCode {
    StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR)
}

fn message_response(status: u16, message: &Value) -> Response {
    let body = json!({"message": message}).to_string();
    (status_code(status), [(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn not_found(what: &str) -> Response {
    message_response(404, &json!(format!("404 {what} Not Found")))
}

fn redirect(status: u16, to: &str) -> Response {
    (status_code(status), [(header::LOCATION, to.to_owned())]).into_response()
}

/// Adds the headers of the rate limit.
fn limits(response: &mut Response, remaining: i64, reset: i64) {
    for (name, value) in
        [("ratelimit-limit", LIMIT), ("ratelimit-remaining", remaining), ("ratelimit-reset", reset)]
    {
        response.headers_mut().insert(name, value.into());
    }
}

async fn answer(State(shared): State<Arc<Mutex<GitLab>>>, request: Request) -> Response {
    let headers = request.headers().clone();
    let (path, query) =
        (request.uri().path().to_owned(), request.uri().query().unwrap_or_default().to_owned());
    let path = path.strip_prefix("/api/v4").unwrap_or(&path).to_owned();
    let response = {
        let mut gitlab = lock(&shared);
        let mut complain = |why: &str| gitlab.complaints.push(format!("{why}: {path}?{query}"));
        if !headers.contains_key(header::USER_AGENT) {
            complain("no user agent");
        }
        // A GitHub token, and one in the address, which every log on the way keeps.
        if headers.contains_key(header::AUTHORIZATION)
            || headers.contains_key(header::COOKIE)
            || query.contains("token")
        {
            complain("another credential than a private token");
        }
        gitlab.play(&path, &query, &headers)
    };
    let (credential, conditional) =
        (headers.contains_key(PRIVATE_TOKEN), headers.contains_key(header::IF_NONE_MATCH));
    let status = response.status().as_u16();
    lock(&shared).asked.push(ReceivedRequest { path, query, credential, conditional, status });
    response
}

impl GitLab {
    fn play(&mut self, path: &str, query: &str, headers: &HeaderMap) -> Response {
        let index = self.faults.iter().position(|(part, _)| path.contains(part.as_str()));
        let fault = index.and_then(|index| self.faults.remove(index)).map(|(_, fault)| fault);
        match fault {
            None => self.answer(path, query, headers),
            Some(Fault::Status(status)) => {
                message_response(status, &json!(format!("{status} Something is wrong")))
            }
            Some(Fault::Throttled(after)) => {
                let mut response = (StatusCode::TOO_MANY_REQUESTS, "Retry later\n").into_response();
                limits(&mut response, 0, now() + i64::try_from(after).unwrap_or(i64::MAX));
                response.headers_mut().insert(header::RETRY_AFTER, after.into());
                response
            }
            Some(Fault::TooOften) => {
                let words = "This endpoint has been requested too many times. Try again later.";
                let mut response = message_response(429, &json!({"error": words}));
                limits(&mut response, LIMIT - 5, now() + 30);
                response
            }
            Some(Fault::Redirect(to)) => redirect(302, &to),
            Some(Fault::Truncate(bytes)) => {
                let whole = self.answer(path, query, headers);
                // Let the head and the part leave before the connection breaks.
                let cut = futures::stream::once(async {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    Err(std::io::Error::other("cut"))
                });
                let part = whole.into_body().into_data_stream().map(move |chunk| {
                    let chunk = chunk.map_err(std::io::Error::other)?;
                    Ok(chunk.slice(..bytes.min(chunk.len())))
                });
                Body::from_stream(part.take(1).chain(cut)).into_response()
            }
        }
    }

    fn answer(&mut self, path: &str, query: &str, headers: &HeaderMap) -> Response {
        let token = headers.get(PRIVATE_TOKEN).map(HeaderValue::as_bytes);
        if token.is_some_and(|token| token != TOKEN.as_bytes()) {
            return message_response(401, &json!("401 Unauthorized"));
        }
        if let Some((0, reset)) = self.remaining.filter(|(_, reset)| *reset > now()) {
            let mut response = (StatusCode::TOO_MANY_REQUESTS, "Retry later\n").into_response();
            limits(&mut response, 0, reset);
            return response;
        }
        let segments: Vec<String> = path.split('/').skip(1).map(percent_decode).collect();
        let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
        let mut response = self.resource(&segments, query, token.is_some());
        let tag = response.headers().get(header::ETAG);
        if tag.is_some() && headers.get(header::IF_NONE_MATCH) == tag {
            response = (StatusCode::NOT_MODIFIED, response.headers().clone()).into_response();
        }
        // Unlike at GitHub, an unchanged answer counts as well.
        let (remaining, reset) = match &mut self.remaining {
            Some((remaining, reset)) => {
                *remaining -= 1;
                (*remaining, *reset)
            }
            None => (LIMIT - 1, now() + 60),
        };
        limits(&mut response, remaining, reset);
        response
    }

    fn resource(&mut self, segments: &[&str], query: &str, known: bool) -> Response {
        let asks = |pair: &str| query.split('&').any(|one| one == pair);
        let sees = |project: &Project| known || project.visibility == "public";
        let list = |takes: &dyn Fn(&str, &Project) -> bool| {
            let taken = self
                .projects
                .iter()
                .filter(|(path, project)| sees(project) && takes(path, project));
            taken.map(|(path, project)| to_json(path, project)).collect::<Vec<_>>()
        };
        let is_user = |name: &str| self.users.iter().any(|user| user == name);
        match segments {
            ["projects"] if asks("membership=true") && known => {
                let mine = list(&|_, project| project.visibility == "private");
                self.page(&mine, "projects", query)
            }
            ["projects"] => {
                self.complaints.push("all projects of the server were asked for".to_owned());
                self.page(&list(&|_, _| true), "projects", query)
            }
            ["groups", group, "projects"] => {
                let below = format!("{group}/");
                if is_user(group) || !self.projects.keys().any(|path| path.starts_with(&below)) {
                    return not_found("Group");
                }
                let deep = asks("include_subgroups=true");
                let is_in = |path: &str| {
                    path.strip_prefix(&below).is_some_and(|rest| deep || !rest.contains('/'))
                };
                self.page(
                    &list(&|path, _| is_in(path)),
                    &format!("groups/{}/projects", percent_encode(group)),
                    query,
                )
            }
            ["users", user, "projects"] if is_user(user) => {
                let below = format!("{user}/");
                self.page(
                    &list(&|path, _| path.starts_with(&below)),
                    &format!("users/{user}/projects"),
                    query,
                )
            }
            ["users", ..] => not_found("User"),
            ["projects", name, rest @ ..] => {
                if let Some(new) = self.renamed.get(*name) {
                    let rest: String =
                        rest.iter().map(|part| format!("/{}", percent_encode(part))).collect();
                    let query = if query.is_empty() { String::new() } else { format!("?{query}") };
                    let number = self.projects.get(new).map_or(0, |project| project.number);
                    return redirect(301, &format!("{}/projects/{number}{rest}{query}", self.base));
                }
                let is = |(path, project): &(&String, &Project)| {
                    path == name || project.number.to_string() == *name
                };
                match self.projects.iter().find(is) {
                    Some((path, project)) if sees(project) => {
                        project_resource(path, project, rest, query)
                    }
                    _ => not_found("Project"),
                }
            }
            _ => not_found("Page"),
        }
    }

    fn page(&self, all: &[Value], path: &str, query: &str) -> Response {
        let number = |name: &str, default: usize| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs
                .find(|(key, _)| *key == name)
                .and_then(|(_, value)| value.parse().ok())
                .unwrap_or(default)
        };
        let (size, page) = (number("per_page", 20).min(100), number("page", 1).max(1));
        let part: Vec<&Value> = all.iter().skip((page - 1) * size).take(size).collect();
        let mut response = with_etag(&json!(part));
        let pages = all.len().div_ceil(size).max(1);
        let link = |page: usize, rel: &str| {
            format!("<{}/{path}?page={page}&per_page={size}>; rel=\"{rel}\"", self.base)
        };
        let mut links = vec![link(1, "first"), link(pages, "last")];
        let next = if page < pages { (page + 1).to_string() } else { String::new() };
        if page < pages {
            links.insert(0, link(page + 1, "next"));
        }
        for (name, value) in
            [("link", links.join(", ")), ("x-next-page", next), ("x-page", page.to_string())]
        {
            response
                .headers_mut()
                .insert(name, HeaderValue::from_str(&value).expect("it is ASCII"));
        }
        response
    }
}

fn project_resource(path: &str, project: &Project, rest: &[&str], query: &str) -> Response {
    let find = |reference: &str| {
        let full = project.archives.contains_key(reference).then(|| reference.to_owned());
        full.or_else(|| project.references.get(reference).cloned()).or_else(|| {
            let short = reference.len() >= 7;
            project.archives.keys().find(|id| short && id.starts_with(reference)).cloned()
        })
    };
    match rest {
        [] => with_etag(&to_json(path, project)),
        ["repository", "commits", reference] => match find(reference) {
            Some(id) => with_etag(
                &json!({"id": id, "short_id": &id[..8], "title": "A commit", "parent_ids": []}),
            ),
            None => not_found("Commit"),
        },
        ["repository", "archive.tar.gz"] => {
            let sha = query.split('&').find_map(|pair| pair.strip_prefix("sha="));
            let archive = sha.and_then(find).and_then(|id| project.archives.get(&id).cloned());
            let kind = [(header::CONTENT_TYPE, "application/octet-stream")];
            archive.map_or_else(|| not_found("File"), |archive| (kind, archive).into_response())
        }
        _ => not_found("Page"),
    }
}

fn to_json(path: &str, project: &Project) -> Value {
    let (namespace, name) = path.rsplit_once('/').unwrap_or(("", path));
    json!({
        "id": project.number, "name": name, "path": name, "path_with_namespace": path,
        "namespace": {"full_path": namespace}, "description": format!("What {path} is"), "archived": false,
        "visibility": project.visibility, "default_branch": project.branch, "empty_repo": project.branch.is_none(),
        "topics": [], "last_activity_at": "2026-01-26T19:06:43.123Z",
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

/// Decodes a path segment: `%2F` is a slash in a project's path or a branch's name.
fn percent_decode(text: &str) -> String {
    text.replace("%2F", "/").replace("%2f", "/")
}

fn percent_encode(text: &str) -> String {
    text.replace('/', "%2F")
}
