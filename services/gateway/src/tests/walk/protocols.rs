//! The same checks over the other protocols: every route of REST, file content and uploads by tus,
//! Connect's GET, and the operator protocol. Each authenticates the caller before it reads
//! anything. These tests check that against the table of rules.

use futures::future::join_all;
use reqwest::Method as Verb;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
};

use super::*;
use crate::{
    protocols::rest::routes::{Content, ROUTES, Route},
    tests::protocols::http,
};

/// Text in the resources of the organization that others must not read.
const OWNER_MARKS: [&str; 2] = ["tenant-a", "TENANT_A"];

/// A caller.
struct Caller {
    name: String,
    key: Option<String>,
    /// The organization that the request names.
    organization: Option<String>,
    identity: Identity,
}

enum Identity {
    /// Without valid credentials.
    Unknown,
    /// A member of another organization than the one that the request names.
    Foreign,
    /// A member of the operator's organization.
    Member(Role, Vec<Scope>),
}

impl Caller {
    /// The HTTP status that refuses this caller a method with this access; none: the caller is
    /// authorized, and the call may still fail.
    fn refusal(&self, access: Access) -> Option<u16> {
        let (has, scopes) = match &self.identity {
            _ if access == Access::Public => return None,
            Identity::Unknown => return Some(401),
            Identity::Foreign => return Some(403),
            Identity::Member(has, scopes) => (has, scopes),
        };
        let (role, scope) = match access {
            Access::Public | Access::Caller => return None,
            Access::Role(role, scope) => (role, scope),
            Access::Operator => (Role::Owner, Scope::Admin),
        };
        (*has < role || !scope.is_within(scopes)).then_some(403)
    }

    /// Whether a call of a method tests something: a single scope is tried only where it is the
    /// needed one. That no other suffices is tested over gRPC, and here by the owner without
    /// scopes.
    fn is_informative_for(&self, access: Access) -> bool {
        match &self.identity {
            Identity::Member(_, scopes) if scopes.len() == 1 && !scopes.contains(&Scope::Admin) => {
                matches!(access, Access::Role(_, needed) if scopes.contains(&needed))
            }
            _ => true,
        }
    }
}

/// Callers without valid credentials, and members of every role: with all scopes, with none, and
/// with each alone.
async fn all_callers(
    gateway: &Gateway,
    local: (OrganizationId, UserId),
    foreign: &str,
) -> Vec<Caller> {
    let all = [Scope::Admin];
    let caller = |name: &str, key: Option<String>, identity| Caller {
        name: name.to_owned(),
        key,
        organization: None,
        identity,
    };
    let (id, revoked) = create_key(gateway, local, Role::Owner, &all, None).await;
    let silent = crate::organizations::response_output(&());
    let revoking =
        gateway.store().api_key_revoke(&write(local.0), id, None, Role::Owner, |_| silent).await;
    revoking.expect("it is revoked");
    let past = Timestamp::now() - jiff::SignedDuration::from_secs(1);
    let expired = create_key(gateway, local, Role::Owner, &all, Some(past)).await.1;
    let unknown = credential::mint(credential::KEY).expect("there is randomness").0;
    let mut callers = vec![
        caller("no credentials", None, Identity::Unknown),
        caller("a revoked key", Some(revoked), Identity::Unknown),
        caller("an expired key", Some(expired), Identity::Unknown),
        caller("an unknown key", Some(unknown), Identity::Unknown),
        Caller {
            organization: Some(local.0.to_string()),
            ..caller(
                "an owner of another organization",
                Some(foreign.to_owned()),
                Identity::Foreign,
            )
        },
    ];
    for role in Role::ALL {
        let key = create_key(gateway, local, *role, &all, None).await.1;
        callers.push(caller(role.as_str(), Some(key), Identity::Member(*role, all.to_vec())));
    }
    let none = create_key(gateway, local, Role::Owner, &[], None).await.1;
    callers.push(caller(
        "an owner without scopes",
        Some(none),
        Identity::Member(Role::Owner, Vec::new()),
    ));
    for scope in Scope::ALL.iter().filter(|scope| **scope != Scope::Admin) {
        let key = create_key(gateway, local, Role::Owner, &[*scope], None).await.1;
        let name = format!("an owner with {} alone", scope.as_str());
        callers.push(caller(&name, Some(key), Identity::Member(Role::Owner, vec![*scope])));
    }
    callers
}

/// An HTTP request, and the access that its method needs.
struct HttpCall {
    verb: Verb,
    path: String,
    headers: Vec<(&'static str, &'static str)>,
    body: Option<String>,
    access: Access,
}

impl HttpCall {
    /// The status and the body. The body of an event stream is not read: it has no end.
    async fn send(
        &self,
        gateway: &Gateway,
        http: &reqwest::Client,
        key: Option<&str>,
        organization: Option<&str>,
    ) -> (u16, String) {
        let mut request = http.request(self.verb.clone(), gateway.url(&self.path));
        for (name, value) in &self.headers {
            request = request.header(*name, *value);
        }
        if let Some(body) = &self.body {
            request = request.body(body.clone());
        }
        if let Some(key) = key {
            request = request.bearer_auth(key);
        }
        if let Some(organization) = organization {
            request = request.header("x-organization-id", organization);
        }
        let answer = wait_for(&self.path, request.send()).await.expect("it answers");
        let status = answer.status().as_u16();
        if answer.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream") {
            return (status, String::new());
        }
        (status, answer.text().await.expect("text"))
    }
}

fn access(method: &str) -> Access {
    rules::access(&format!("/construct.v1.{method}"))
        .unwrap_or_else(|| panic!("{method} is no method"))
}

const JSON: (&str, &str) = ("content-type", "application/json");

/// Every route. Its path names unknown ids, so an authorized call changes nothing.
fn rest_calls(ids: &Ids) -> Vec<HttpCall> {
    let name = |field: &str| match field {
        "after" => unknown_id(&ids["scan"]),
        "letter" => "1".to_owned(),
        "model_provider" => unknown_id(&ids["provider"]),
        "spec.task" => unknown_id(&ids["task"]),
        "state" => "nothing".to_owned(),
        field => unknown_id(&ids[field]),
    };
    let call = |route: &Route| HttpCall {
        verb: route.verb.clone(),
        path: fill_path(route, name),
        headers: vec![JSON],
        body: (route.body != Content::None).then(|| "{}".to_owned()),
        access: access(route.method),
    };
    ROUTES.iter().map(call).collect()
}

/// The path of a route with values in the place of its fields.
fn fill_path(route: &Route, mut name: impl FnMut(&str) -> String) -> String {
    let part = |part: &str| match part.strip_prefix('{').and_then(|part| part.strip_suffix('}')) {
        Some(field) => name(field),
        None => part.to_owned(),
    };
    route.path.split('/').map(part).collect::<Vec<_>>().join("/")
}

/// The content of a file, and its upload by tus.
fn file_calls(file: &str) -> Vec<HttpCall> {
    const TUS: [(&str, &str); 3] = [
        ("tus-resumable", "1.0.0"),
        ("upload-offset", "0"),
        ("content-type", "application/offset+octet-stream"),
    ];
    let (content, upload) =
        (format!("/v1/files/{file}/content"), format!("/v1/files/uploads/{file}"));
    let call = |verb: Verb, path: &str, method: &str| HttpCall {
        verb,
        path: path.to_owned(),
        headers: TUS.to_vec(),
        body: None,
        access: access(&format!("FileService/{method}")),
    };
    let mut overridden = call(Verb::POST, &upload, "UploadPart");
    overridden.headers.push(("x-http-method-override", "PATCH"));
    vec![
        call(Verb::GET, &content, "DownloadFile"),
        call(Verb::HEAD, &content, "DownloadFile"),
        call(Verb::HEAD, &upload, "GetFile"),
        call(Verb::PATCH, &upload, "UploadPart"),
        call(Verb::DELETE, &upload, "DeleteFile"),
        overridden,
    ]
}

/// Every method by Connect's GET. A method with side effects is refused for that only to callers
/// who may call it; others learn nothing.
fn connect_get_calls() -> Vec<HttpCall> {
    let call =
        |(method, access): (MethodDescriptor, Access)| connect_get(&method, &json!({}), access);
    methods().into_iter().map(call).collect()
}

fn connect_get(method: &MethodDescriptor, message: &Value, access: Access) -> HttpCall {
    let path = rules::method_path(method.parent_service().full_name(), method.name());
    let message: String = form_urlencoded::byte_serialize(message.to_string().as_bytes()).collect();
    let path = format!("{path}?connect=v1&encoding=json&message={message}");
    HttpCall { verb: Verb::GET, path, headers: Vec::new(), body: None, access }
}

#[tokio::test]
async fn every_protocol_enforces_the_access_of_grpc() {
    let gateway = Gateway::start_with(login_required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (own_key_id, own) = create_key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    let ids = create_resources(&gateway, &own, own_key_id, local).await;
    let foreign = create_key(
        &gateway,
        create_organization(&gateway, "elsewhere").await,
        Role::Owner,
        &[Scope::Admin],
        None,
    )
    .await
    .1;
    // A caller whose own audit entries name nothing of other organizations.
    let silent = create_key(
        &gateway,
        create_organization(&gateway, "silent").await,
        Role::Owner,
        &[Scope::Admin],
        None,
    )
    .await
    .1;
    let callers = all_callers(&gateway, local, &foreign).await;
    let http = http();

    let begin = HttpCall {
        verb: Verb::POST,
        path: "/v1/files/uploads".to_owned(),
        headers: vec![("tus-resumable", "1.0.0")],
        body: None,
        access: access("FileService/CreateFile"),
    };
    let rows =
        [rest_calls(&ids), file_calls(&unknown_id(&ids["file"])), vec![begin], connect_get_calls()];
    let mut sent = 0;
    for call in rows.iter().flatten() {
        let asking: Vec<&Caller> =
            callers.iter().filter(|caller| caller.is_informative_for(call.access)).collect();
        let answers = asking.iter().map(|caller| {
            call.send(&gateway, &http, caller.key.as_deref(), caller.organization.as_deref())
        });
        for (caller, (status, body)) in asking.iter().zip(join_all(answers).await) {
            let what = format!("{} {} for {}: {status} {body}", call.verb, call.path, caller.name);
            match caller.refusal(call.access) {
                Some(refusal) => assert_eq!(status, refusal, "{what}"),
                // A public method may check a credential in its request, and refuse it.
                None => assert!(
                    status != 403 && (status != 401 || call.access == Access::Public),
                    "{what}"
                ),
            }
            assert_ne!(status, 500, "{what}");
            sent += 1;
        }
    }
    assert!(sent > 2400, "{sent}");

    check_references(&gateway, &http, &foreign, &ids).await;
    check_lists(&gateway, &http, &silent, &ids).await;
    check_operator_access(&gateway, &callers, &ids).await;
    check_operator_references(&gateway, &foreign, &ids).await;
    // All resources still exist.
    for (resource, what) in [
        ("agents", "agent"),
        ("api-keys", "api_key"),
        ("approvals", "approval"),
        ("budgets", "budget"),
        ("files", "file"),
        ("messages", "message"),
        ("model-providers", "provider"),
        ("models", "model"),
        ("organizations", "organization"),
        ("scans", "scan"),
        ("schedules", "schedule"),
        ("secrets", "secret"),
        ("tasks", "task"),
    ] {
        let path = format!("/v1/{resource}/{}", ids[what]);
        let call = HttpCall {
            verb: Verb::GET,
            path,
            headers: Vec::new(),
            body: None,
            access: Access::Public,
        };
        let (status, body) = call.send(&gateway, &http, Some(&own), None).await;
        assert_eq!(status, 200, "{what}: {body}");
    }
}

/// A request of [`reference_requests`] over REST: its fields go into the path, the body, or the
/// query.
fn rest_call(route: &Route, mut message: Value) -> HttpCall {
    let mut path = fill_path(route, |field| {
        let (parent, field) = field.split_once('.').unwrap_or(("", field));
        let field = match field {
            "api_key" => "apiKey",
            "model_provider" => "modelProvider",
            field => field,
        };
        let fields = if parent.is_empty() { &mut message } else { &mut message[parent] };
        let value = fields.as_object_mut().and_then(|fields| fields.remove(field));
        value
            .and_then(|value| value.as_str().map(str::to_owned))
            .unwrap_or_else(|| panic!("{}: {field}", route.path))
    });
    let body = match route.body {
        Content::Field(field, _) => Some(message[field].to_string()),
        Content::All(_) => Some(message.to_string()),
        Content::None => {
            let mut query = form_urlencoded::Serializer::new(String::new());
            for (name, value) in message.as_object().expect("an object") {
                query.append_pair(
                    name,
                    value.as_str().map_or_else(|| value.to_string(), str::to_owned).as_str(),
                );
            }
            path = format!("{path}?{}", query.finish());
            None
        }
    };
    HttpCall {
        verb: route.verb.clone(),
        path,
        headers: vec![JSON],
        body,
        access: access(route.method),
    }
}

/// Resources of another organization are not found by any route, nor by Connect's GET.
async fn check_references(gateway: &Gateway, http: &reqwest::Client, foreign: &str, ids: &Ids) {
    let requests = reference_requests(ids);
    let message = |method: &str| {
        requests.iter().find(|(name, _)| *name == method).map(|(_, message)| message)
    };
    let mut rows = file_calls(&ids["file"]);
    // `/v1/events` has the events of the organization, not of a task.
    for route in ROUTES.iter().filter(|route| route.path != "/v1/events") {
        let method = route.method.replace('/', ".");
        match message(&method) {
            Some(message) => rows.push(rest_call(route, message.clone())),
            None => assert!(METHODS_WITHOUT_REFERENCES.contains(&method.as_str()), "{method}"),
        }
    }
    let reads = [".Get", ".List", ".Explain", ".Compare"];
    for (method, access) in methods() {
        let name = method.full_name().trim_start_matches("construct.v1.");
        if let Some(message) = message(name)
            && reads.iter().any(|reads| name.contains(reads))
        {
            rows.push(connect_get(&method, message, access));
        }
    }
    assert!(rows.len() > 90, "{}", rows.len());
    for call in rows {
        let (status, body) = call.send(gateway, http, Some(foreign), None).await;
        assert_eq!(status, 404, "{} {}: {body}", call.verb, call.path);
        assert!(
            OWNER_MARKS.iter().all(|mark| !body.contains(mark)),
            "{} {}: {body}",
            call.verb,
            call.path
        );
    }
}

/// Lists show nothing of another organization.
async fn check_lists(gateway: &Gateway, http: &reqwest::Client, silent: &str, ids: &Ids) {
    let is_list = |route: &&Route| {
        route.verb == Verb::GET && !route.path.contains('{') && !route.path.ends_with("/events")
    };
    let mut lists = 0;
    for route in ROUTES.iter().filter(is_list) {
        let (verb, path) = (Verb::GET, route.path.to_owned());
        let call =
            HttpCall { verb, path, headers: Vec::new(), body: None, access: access(route.method) };
        let (status, body) = call.send(gateway, http, Some(silent), None).await;
        assert_eq!(
            status,
            if call.access == Access::Operator { 403 } else { 200 },
            "{}: {body}",
            route.path
        );
        for hidden in ids.values().map(String::as_str).chain(OWNER_MARKS) {
            assert!(!body.contains(hidden), "{} shows {hidden}: {body}", route.path);
        }
        lists += 1;
    }
    assert!(lists > 20, "{lists}");
}

/// A connection of the operator protocol.
struct Operator {
    lines: Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
    requests: u32,
}

impl Operator {
    async fn connect(gateway: &Gateway) -> Self {
        let (reader, writer) =
            TcpStream::connect(gateway.operator).await.expect("it listens").into_split();
        Self { lines: BufReader::new(reader).lines(), writer, requests: 0 }
    }

    /// The first line that answers a request.
    async fn ask(&mut self, kind: &str, mut line: Value) -> Value {
        self.requests += 1;
        let id = self.requests.to_string();
        (line["type"], line["id"]) = (kind.into(), id.as_str().into());
        self.writer.write_all(format!("{line}\n").as_bytes()).await.expect("it reads");
        loop {
            let line = wait_for(kind, self.lines.next_line())
                .await
                .expect("it is open")
                .expect("it continues");
            let line: Value = serde_json::from_str(&line).expect("JSON");
            if line["id"] == id.as_str() {
                return line;
            }
        }
    }
}

/// The error code, in either form of an answer; empty without an error.
fn error_code(line: &Value) -> &str {
    line["code"].as_str().or_else(|| line["content"][0]["code"].as_str()).unwrap_or_default()
}

/// A request of every kind, and the method whose access it needs.
fn operator_requests(ids: &Ids) -> Vec<(&'static str, Value, &'static str)> {
    let (own, nothing) = (ids["task"].as_str(), unknown_id(&ids["task"]));
    let hello = json!([{"role": "user", "content": [{"type": "text", "text": "hello"}]}]);
    vec![
        ("cancel", json!({"sessionID": nothing}), "TaskService/CancelTask"),
        ("delete_session", json!({"sessionID": nothing}), "TaskService/DeleteTask"),
        ("dispatch", json!({"agentID": "unknown", "messages": hello}), "TaskService/CreateTask"),
        // Reading a session does not include sending to it.
        ("dispatch", json!({"sessionID": own, "messages": hello}), "MessageService/CreateMessage"),
        ("dispatch", json!({"agentID": "unknown", "content": "hello"}), "TaskService/CreateTask"),
        ("export_session", json!({"sessionID": own}), "TaskService/GetTask"),
        ("list_sessions", json!({}), "TaskService/ListTasks"),
        ("query", json!({"agentID": "unknown", "messages": hello}), "TaskService/CreateTask"),
        ("query", json!({"agentID": "unknown", "content": "hello"}), "TaskService/CreateTask"),
        ("query", json!({"sessionID": nothing, "messages": hello}), "TaskService/GetTask"),
        (
            "send_context_request",
            json!({"agentID": "unknown", "context": {"userMessage": "hello"}}),
            "TaskService/CreateTask",
        ),
        ("stream", json!({"sessionID": nothing}), "EventService/Subscribe"),
    ]
}

/// Every kind of request, for every caller.
async fn check_operator_access(gateway: &Gateway, callers: &[Caller], ids: &Ids) {
    let requests = operator_requests(ids);
    // The refusal of an unknown kind lists all kinds.
    let refusal = Operator::connect(gateway).await.ask("none", json!({})).await.to_string();
    let (_, kinds) = refusal.split_once("expected one of").expect("the kinds are listed");
    let kinds: Vec<&str> = kinds.split('`').skip(1).step_by(2).collect();
    assert!(kinds.len() > 8, "{refusal}");
    for kind in kinds {
        assert!(
            kind == "auth" || requests.iter().any(|(known, ..)| *known == kind),
            "no request has the kind {kind}"
        );
    }
    for caller in callers {
        let mut client = Operator::connect(gateway).await;
        if let Some(key) = &caller.key {
            let answer = client
                .ask("auth", json!({"key": key, "organizationID": caller.organization}))
                .await;
            let is_refused = caller.refusal(Access::Caller).is_some();
            assert_eq!(
                error_code(&answer) == "UNAUTHORIZED",
                is_refused,
                "{}: {answer}",
                caller.name
            );
        }
        for (kind, line, method) in &requests {
            let answer = client.ask(kind, line.clone()).await;
            let is_refused = caller.refusal(access(method)).is_some();
            assert_eq!(
                error_code(&answer) == "UNAUTHORIZED",
                is_refused,
                "{kind} {line} for {}: {answer}",
                caller.name
            );
        }
    }
}

/// Resources of another organization are not found over the operator protocol.
async fn check_operator_references(gateway: &Gateway, foreign: &str, ids: &Ids) {
    let mut client = Operator::connect(gateway).await;
    let answer = client.ask("auth", json!({"key": foreign})).await;
    assert_eq!(answer["type"], "authenticated", "{answer}");
    let (session, agent) = (&ids["task"], &ids["agent"]);
    for (kind, line, code) in [
        ("cancel", json!({"sessionID": session}), "SESSION_NOT_FOUND"),
        ("delete_session", json!({"sessionID": session}), "SESSION_NOT_FOUND"),
        ("dispatch", json!({"sessionID": session, "content": "hello"}), "SESSION_NOT_FOUND"),
        ("dispatch", json!({"agentID": agent, "content": "hello"}), "AGENT_NOT_FOUND"),
        ("export_session", json!({"sessionID": session}), "SESSION_NOT_FOUND"),
        ("query", json!({"sessionID": session, "content": "hello"}), "SESSION_NOT_FOUND"),
        ("query", json!({"agentID": agent, "content": "hello"}), "AGENT_NOT_FOUND"),
        (
            "send_context_request",
            json!({"agentID": agent, "context": {"userMessage": "hello"}}),
            "AGENT_NOT_FOUND",
        ),
        ("stream", json!({"sessionID": session, "cursor": "0"}), "SESSION_NOT_FOUND"),
    ] {
        let answer = client.ask(kind, line.clone()).await;
        assert_eq!(error_code(&answer), code, "{kind} {line}: {answer}");
        assert!(
            OWNER_MARKS.iter().all(|mark| !answer.to_string().contains(mark)),
            "{kind} {line}: {answer}"
        );
    }
    for line in [json!({}), json!({"agentID": agent}), json!({"agentID": "tenant-a-a"})] {
        let answer = client.ask("list_sessions", line.clone()).await;
        assert!(answer["sessions"].as_array().is_none_or(Vec::is_empty), "{line}: {answer}");
    }
}
