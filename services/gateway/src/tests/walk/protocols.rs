//! The walk over the other faces: every route of REST, what files say and uploads by tus, Connect's
//! GET, and lines of the operator protocol. Each has one look at who calls before it reads
//! anything; this is what holds that look against the table of rules.

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
    faces::rest::routes::{Content, ROUTES, Route},
    tests::protocols::http,
};

/// What is shown of those who own what others ask for.
const MARKS: [&str; 2] = ["tenant-a", "TENANT_A"];

/// Somebody who calls.
struct Who {
    name: String,
    key: Option<String>,
    /// The organization they ask to be let into.
    organization: Option<String>,
    is: Is,
}

enum Is {
    /// Nobody that is known.
    Nobody,
    /// Somebody of another organization than the one they ask for.
    Elsewhere,
    /// Of the operator's organization.
    Of(Role, Vec<Scope>),
}

impl Who {
    /// What HTTP says to them of a method that needs this; none: they are let in, whatever comes of
    /// it.
    fn refusal(&self, access: Access) -> Option<u16> {
        let (has, scopes) = match &self.is {
            _ if access == Access::Public => return None,
            Is::Nobody => return Some(401),
            Is::Elsewhere => return Some(403),
            Is::Of(has, scopes) => (has, scopes),
        };
        let (role, scope) = match access {
            Access::Public | Access::Caller => return None,
            Access::Role(role, scope) => (role, scope),
            Access::Operator => (Role::Owner, Scope::Admin),
        };
        (*has < role || !scope.is_within(scopes)).then_some(403)
    }

    /// Whether something is learnt of a method by asking for it: a scope alone is tried where it is
    /// the one that is needed. That no other does is what the walk over gRPC has seen, and here who
    /// has none.
    fn learns(&self, access: Access) -> bool {
        match &self.is {
            Is::Of(_, scopes) if scopes.len() == 1 && !scopes.contains(&Scope::Admin) => {
                matches!(access, Access::Role(_, needed) if scopes.contains(&needed))
            }
            _ => true,
        }
    }
}

/// Strangers of every kind, and who has which role; with all scopes, with none, and with each
/// alone.
async fn everybody(gateway: &Gateway, local: (OrganizationId, UserId), foreign: &str) -> Vec<Who> {
    let all = [Scope::Admin];
    let who = |name: &str, key: Option<String>, is| Who {
        name: name.to_owned(),
        key,
        organization: None,
        is,
    };
    let (id, revoked) = key(gateway, local, Role::Owner, &all, None).await;
    let silent = crate::organizations::silent(&());
    let revoking =
        gateway.store().api_key_revoke(&write(local.0), id, None, Role::Owner, |_| silent).await;
    revoking.expect("it is revoked");
    let past = Timestamp::now() - jiff::SignedDuration::from_secs(1);
    let expired = key(gateway, local, Role::Owner, &all, Some(past)).await.1;
    let unknown = credential::mint(credential::KEY).expect("there is randomness").0;
    let mut everybody = vec![
        who("nobody", None, Is::Nobody),
        who("a revoked key", Some(revoked), Is::Nobody),
        who("an expired key", Some(expired), Is::Nobody),
        who("an unknown key", Some(unknown), Is::Nobody),
        Who {
            organization: Some(local.0.to_string()),
            ..who("an owner of another organization", Some(foreign.to_owned()), Is::Elsewhere)
        },
    ];
    for role in Role::ALL {
        let key = key(gateway, local, *role, &all, None).await.1;
        everybody.push(who(role.as_str(), Some(key), Is::Of(*role, all.to_vec())));
    }
    let none = key(gateway, local, Role::Owner, &[], None).await.1;
    everybody.push(who("an owner without scopes", Some(none), Is::Of(Role::Owner, Vec::new())));
    for scope in Scope::ALL.iter().filter(|scope| **scope != Scope::Admin) {
        let key = key(gateway, local, Role::Owner, &[*scope], None).await.1;
        let name = format!("an owner with {} alone", scope.as_str());
        everybody.push(who(&name, Some(key), Is::Of(Role::Owner, vec![*scope])));
    }
    everybody
}

/// A request.
struct Row {
    verb: Verb,
    path: String,
    headers: Vec<(&'static str, &'static str)>,
    body: Option<String>,
    access: Access,
}

impl Row {
    /// The status, and what is said. Of a stream that has begun nothing is read: it has no end.
    async fn ask(
        &self,
        gateway: &Gateway,
        http: &reqwest::Client,
        key: Option<&str>,
        into: Option<&str>,
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
        if let Some(organization) = into {
            request = request.header("x-organization-id", organization);
        }
        let answer = within(&self.path, request.send()).await.expect("it answers");
        let status = answer.status().as_u16();
        if answer.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream") {
            return (status, String::new());
        }
        (status, answer.text().await.expect("text"))
    }
}

fn access(method: &str) -> Access {
    rules::of(&format!("/construct.v1.{method}")).unwrap_or_else(|| panic!("{method} is no method"))
}

const JSON: (&str, &str) = ("content-type", "application/json");

/// Every route. What its path names exists nowhere, so that who is let in changes nothing.
fn routes(ids: &Ids) -> Vec<Row> {
    let name = |field: &str| match field {
        "after" => invented(&ids["scan"]),
        "letter" => "1".to_owned(),
        "model_provider" => invented(&ids["provider"]),
        "spec.task" => invented(&ids["task"]),
        "state" => "nothing".to_owned(),
        field => invented(&ids[field]),
    };
    let row = |route: &Route| Row {
        verb: route.verb.clone(),
        path: filled(route, name),
        headers: vec![JSON],
        body: (route.body != Content::None).then(|| "{}".to_owned()),
        access: access(route.method),
    };
    ROUTES.iter().map(row).collect()
}

/// The path of a route with something in the place of its fields.
fn filled(route: &Route, mut name: impl FnMut(&str) -> String) -> String {
    let part = |part: &str| match part.strip_prefix('{').and_then(|part| part.strip_suffix('}')) {
        Some(field) => name(field),
        None => part.to_owned(),
    };
    route.path.split('/').map(part).collect::<Vec<_>>().join("/")
}

/// What a file says, and its upload by tus.
fn of_file(file: &str) -> Vec<Row> {
    const TUS: [(&str, &str); 3] = [
        ("tus-resumable", "1.0.0"),
        ("upload-offset", "0"),
        ("content-type", "application/offset+octet-stream"),
    ];
    let (content, upload) =
        (format!("/v1/files/{file}/content"), format!("/v1/files/uploads/{file}"));
    let row = |verb: Verb, path: &str, method: &str| Row {
        verb,
        path: path.to_owned(),
        headers: TUS.to_vec(),
        body: None,
        access: access(&format!("FileService/{method}")),
    };
    let mut instead = row(Verb::POST, &upload, "UploadPart");
    instead.headers.push(("x-http-method-override", "PATCH"));
    vec![
        row(Verb::GET, &content, "DownloadFile"),
        row(Verb::HEAD, &content, "DownloadFile"),
        row(Verb::HEAD, &upload, "GetFile"),
        row(Verb::PATCH, &upload, "UploadPart"),
        row(Verb::DELETE, &upload, "DeleteFile"),
        instead,
    ]
}

/// Every method by Connect's GET. One that doesn't only read is refused for that, but not to who
/// may not call it: they learn nothing.
fn gets() -> Vec<Row> {
    let row = |(method, access): (MethodDescriptor, Access)| get(&method, &json!({}), access);
    methods().into_iter().map(row).collect()
}

fn get(method: &MethodDescriptor, message: &Value, access: Access) -> Row {
    let path = rules::path(method.parent_service().full_name(), method.name());
    let message: String = form_urlencoded::byte_serialize(message.to_string().as_bytes()).collect();
    let path = format!("{path}?connect=v1&encoding=json&message={message}");
    Row { verb: Verb::GET, path, headers: Vec::new(), body: None, access }
}

#[tokio::test]
async fn every_protocol_enforces_the_access_of_grpc() {
    let gateway = Gateway::start_with(required()).await;
    let local = (OrganizationId::LOCAL, UserId::LOCAL);
    let (own_key_id, own) = key(&gateway, local, Role::Owner, &[Scope::Admin], None).await;
    let ids = belongings(&gateway, &own, own_key_id, local).await;
    let foreign =
        key(&gateway, other(&gateway, "elsewhere").await, Role::Owner, &[Scope::Admin], None)
            .await
            .1;
    // Somebody who has named nothing of others, which would be in their own organization's audit
    // trail.
    let silent =
        key(&gateway, other(&gateway, "silent").await, Role::Owner, &[Scope::Admin], None).await.1;
    let everybody = everybody(&gateway, local, &foreign).await;
    let http = http();

    let begin = Row {
        verb: Verb::POST,
        path: "/v1/files/uploads".to_owned(),
        headers: vec![("tus-resumable", "1.0.0")],
        body: None,
        access: access("FileService/CreateFile"),
    };
    let rows = [routes(&ids), of_file(&invented(&ids["file"])), vec![begin], gets()];
    let mut asked = 0;
    for row in rows.iter().flatten() {
        let asking: Vec<&Who> = everybody.iter().filter(|who| who.learns(row.access)).collect();
        let ask = asking
            .iter()
            .map(|who| row.ask(&gateway, &http, who.key.as_deref(), who.organization.as_deref()));
        for (who, (status, said)) in asking.iter().zip(join_all(ask).await) {
            let what = format!("{} {} for {}: {status} {said}", row.verb, row.path, who.name);
            match who.refusal(row.access) {
                Some(refusal) => assert_eq!(status, refusal, "{what}"),
                // A method of anybody's may look at a credential in its request, and find that it
                // is none.
                None => assert!(
                    status != 403 && (status != 401 || row.access == Access::Public),
                    "{what}"
                ),
            }
            assert_ne!(status, 500, "{what}");
            asked += 1;
        }
    }
    assert!(asked > 2400, "{asked}");

    hides_what_is_named(&gateway, &http, &foreign, &ids).await;
    hides_what_is_listed(&gateway, &http, &silent, &ids).await;
    obeys_in_lines(&gateway, &everybody, &ids).await;
    hides_in_lines(&gateway, &foreign, &ids).await;
    // Everything is still there.
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
        let row =
            Row { verb: Verb::GET, path, headers: Vec::new(), body: None, access: Access::Public };
        let (status, said) = row.ask(&gateway, &http, Some(&own), None).await;
        assert_eq!(status, 200, "{what}: {said}");
    }
}

/// A request of [`naming`] as one of REST: what it says stands in the path, in the body, or in the
/// query.
fn naming_over_rest(route: &Route, mut message: Value) -> Row {
    let mut path = filled(route, |field| {
        let (within, field) = field.split_once('.').unwrap_or(("", field));
        let field = match field {
            "api_key" => "apiKey",
            "model_provider" => "modelProvider",
            field => field,
        };
        let stands = if within.is_empty() { &mut message } else { &mut message[within] };
        let taken = stands.as_object_mut().and_then(|fields| fields.remove(field));
        taken
            .and_then(|taken| taken.as_str().map(str::to_owned))
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
    Row { verb: route.verb.clone(), path, headers: vec![JSON], body, access: access(route.method) }
}

/// What belongs to another organization is not found by any route, nor by Connect's GET.
async fn hides_what_is_named(gateway: &Gateway, http: &reqwest::Client, foreign: &str, ids: &Ids) {
    let naming = naming(ids);
    let message =
        |method: &str| naming.iter().find(|(name, _)| *name == method).map(|(_, message)| message);
    let mut rows = of_file(&ids["file"]);
    // `/v1/events` are those of no task.
    for route in ROUTES.iter().filter(|route| route.path != "/v1/events") {
        let method = route.method.replace('/', ".");
        match message(&method) {
            Some(message) => rows.push(naming_over_rest(route, message.clone())),
            None => assert!(NAMELESS.contains(&method.as_str()), "{method}"),
        }
    }
    let reads = [".Get", ".List", ".Explain", ".Compare"];
    for (method, access) in methods() {
        let name = method.full_name().trim_start_matches("construct.v1.");
        if let Some(message) = message(name)
            && reads.iter().any(|reads| name.contains(reads))
        {
            rows.push(get(&method, message, access));
        }
    }
    assert!(rows.len() > 90, "{}", rows.len());
    for row in rows {
        let (status, said) = row.ask(gateway, http, Some(foreign), None).await;
        assert_eq!(status, 404, "{} {}: {said}", row.verb, row.path);
        assert!(MARKS.iter().all(|mark| !said.contains(mark)), "{} {}: {said}", row.verb, row.path);
    }
}

/// Lists of an organization have nothing of another's.
async fn hides_what_is_listed(gateway: &Gateway, http: &reqwest::Client, silent: &str, ids: &Ids) {
    let is_list = |route: &&Route| {
        route.verb == Verb::GET && !route.path.contains('{') && !route.path.ends_with("/events")
    };
    let mut lists = 0;
    for route in ROUTES.iter().filter(is_list) {
        let (verb, path) = (Verb::GET, route.path.to_owned());
        let row = Row { verb, path, headers: Vec::new(), body: None, access: access(route.method) };
        let (status, said) = row.ask(gateway, http, Some(silent), None).await;
        assert_eq!(
            status,
            if row.access == Access::Operator { 403 } else { 200 },
            "{}: {said}",
            route.path
        );
        for hidden in ids.values().map(String::as_str).chain(MARKS) {
            assert!(!said.contains(hidden), "{} shows {hidden}: {said}", route.path);
        }
        lists += 1;
    }
    assert!(lists > 20, "{lists}");
}

/// A connection of the operator protocol.
struct Operator {
    lines: Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
    asked: u32,
}

impl Operator {
    async fn of(gateway: &Gateway) -> Self {
        let (reader, writer) =
            TcpStream::connect(gateway.operator).await.expect("it listens").into_split();
        Self { lines: BufReader::new(reader).lines(), writer, asked: 0 }
    }

    /// The first line that answers a request.
    async fn ask(&mut self, kind: &str, mut line: Value) -> Value {
        self.asked += 1;
        let id = self.asked.to_string();
        (line["type"], line["id"]) = (kind.into(), id.as_str().into());
        self.writer.write_all(format!("{line}\n").as_bytes()).await.expect("it reads");
        loop {
            let line =
                within(kind, self.lines.next_line()).await.expect("it lives").expect("it goes on");
            let line: Value = serde_json::from_str(&line).expect("JSON");
            if line["id"] == id.as_str() {
                return line;
            }
        }
    }
}

/// What went wrong, if something did, in either form of an answer.
fn failure(line: &Value) -> &str {
    line["code"].as_str().or_else(|| line["content"][0]["code"].as_str()).unwrap_or_default()
}

/// A request of every kind, and the method that decides who may make it.
fn requests(ids: &Ids) -> Vec<(&'static str, Value, &'static str)> {
    let (own, nothing) = (ids["task"].as_str(), invented(&ids["task"]));
    let hello = json!([{"role": "user", "content": [{"type": "text", "text": "hello"}]}]);
    vec![
        ("cancel", json!({"sessionID": nothing}), "TaskService/CancelTask"),
        ("delete_session", json!({"sessionID": nothing}), "TaskService/DeleteTask"),
        ("dispatch", json!({"agentID": "nobody", "messages": hello}), "TaskService/CreateTask"),
        // Who may see a session need not be one who may say something in it.
        ("dispatch", json!({"sessionID": own, "messages": hello}), "MessageService/CreateMessage"),
        ("dispatch", json!({"agentID": "nobody", "content": "hello"}), "TaskService/CreateTask"),
        ("export_session", json!({"sessionID": own}), "TaskService/GetTask"),
        ("list_sessions", json!({}), "TaskService/ListTasks"),
        ("query", json!({"agentID": "nobody", "messages": hello}), "TaskService/CreateTask"),
        ("query", json!({"agentID": "nobody", "content": "hello"}), "TaskService/CreateTask"),
        ("query", json!({"sessionID": nothing, "messages": hello}), "TaskService/GetTask"),
        (
            "send_context_request",
            json!({"agentID": "nobody", "context": {"userMessage": "hello"}}),
            "TaskService/CreateTask",
        ),
        ("stream", json!({"sessionID": nothing}), "EventService/Subscribe"),
    ]
}

/// Every kind of request, for everybody.
async fn obeys_in_lines(gateway: &Gateway, everybody: &[Who], ids: &Ids) {
    let requests = requests(ids);
    // The kinds there are, as a request that is none of them is told.
    let told = Operator::of(gateway).await.ask("none", json!({})).await.to_string();
    let (_, kinds) = told.split_once("expected one of").expect("the kinds are told");
    let kinds: Vec<&str> = kinds.split('`').skip(1).step_by(2).collect();
    assert!(kinds.len() > 8, "{told}");
    for kind in kinds {
        assert!(
            kind == "auth" || requests.iter().any(|(known, ..)| *known == kind),
            "{kind} is asked for by nobody"
        );
    }
    for who in everybody {
        let mut client = Operator::of(gateway).await;
        if let Some(key) = &who.key {
            let told =
                client.ask("auth", json!({"key": key, "organizationID": who.organization})).await;
            let is_refused = who.refusal(Access::Caller).is_some();
            assert_eq!(failure(&told) == "UNAUTHORIZED", is_refused, "{}: {told}", who.name);
        }
        for (kind, line, method) in &requests {
            let told = client.ask(kind, line.clone()).await;
            let is_refused = who.refusal(access(method)).is_some();
            assert_eq!(
                failure(&told) == "UNAUTHORIZED",
                is_refused,
                "{kind} {line} for {}: {told}",
                who.name
            );
        }
    }
}

/// What belongs to another organization is not found by any line.
async fn hides_in_lines(gateway: &Gateway, foreign: &str, ids: &Ids) {
    let mut client = Operator::of(gateway).await;
    let told = client.ask("auth", json!({"key": foreign})).await;
    assert_eq!(told["type"], "authenticated", "{told}");
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
        let told = client.ask(kind, line.clone()).await;
        assert_eq!(failure(&told), code, "{kind} {line}: {told}");
        assert!(MARKS.iter().all(|mark| !told.to_string().contains(mark)), "{kind} {line}: {told}");
    }
    for line in [json!({}), json!({"agentID": agent}), json!({"agentID": "tenant-a-a"})] {
        let told = client.ask("list_sessions", line.clone()).await;
        assert!(told["sessions"].as_array().is_none_or(Vec::is_empty), "{line}: {told}");
    }
}
