//! A Slack for tests: a real HTTP server with the documented shapes of the Web API. It keeps the
//! state of channels, checks requests (tokens, scopes, arguments, limits) and signs what it sends.
//!
//! Requests that it should not have received are in [`SlackServer::complaints`]; a passing test has
//! none.

mod methods;
mod serve;
mod socket;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use axum::{Router, http::header};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{http, mesh::Mesh};

/// The app's signing secret for requests.
pub const SIGNING_SECRET: &str = "8f742231b10e8888abcd99yyyzzz85a5";
/// The app's id for OAuth.
pub const CLIENT_ID: &str = "111.222";
/// The app's secret for OAuth.
pub const CLIENT_SECRET: &str = "client-secret-of-the-test";
/// The key for connecting workspaces.
pub const CONNECT_KEY: &str = "the-key-for-connecting";
/// The app-level token.
pub const APP_TOKEN: &str = "xapp-1-test";
/// The installed workspace.
pub const TEAM: &str = "T0TEAM1";
/// Another workspace that the app can be installed in.
pub const OTHER_TEAM: &str = "T0TEAM2";
/// The app's user.
pub const BOT: &str = "U0BOT";
/// A member.
pub const ANN: &str = "U0ANN";
/// Another member, an admin.
pub const BOB: &str = "U0BOB";
/// A third member.
pub const CARL: &str = "U0CARL";
/// A guest.
pub const GUEST: &str = "U0GUEST";
/// A user of another workspace.
pub const STRANGER: &str = "U0OTHER";
/// A member of the other workspace.
pub const DORA: &str = "U0DORA";
/// A channel with the app.
pub const CHANNEL: &str = "C0GENERAL";
/// A channel with the app in the other workspace.
pub const OTHER_CHANNEL: &str = "C0OTHER";
/// A channel without the app.
pub const PRIVATE: &str = "C0PRIVATE";
/// Ann's direct messages with the app.
pub const DIRECT: &str = "D0ANN";

/// A call of the Web API.
#[derive(Debug, Clone)]
pub struct Call {
    /// E.g. `chat.postMessage`.
    pub method: String,
    /// The arguments, from any encoding.
    pub arguments: Value,
    /// The time of the call.
    pub at: Instant,
}

/// How one call fails.
#[derive(Debug, Clone)]
pub enum Fault {
    /// 429, with so many seconds in `Retry-After`. The call has no effect.
    Limited(u64),
    /// This status; the call has no effect.
    Status(u16),
    /// This status, although the call takes effect.
    DoneAnd(u16),
    /// Refused with this code.
    Refuse(&'static str),
    /// Takes effect at once, and is answered after this time.
    DoneAfter(Duration),
    /// No answer and no effect.
    Hang,
    /// No answer, although the call takes effect.
    DoneAndHang,
}

/// The server. It stops when it is dropped.
#[derive(Debug)]
pub struct SlackServer {
    address: SocketAddr,
    shared: Arc<Mutex<Slack>>,
    _stop: DropGuard,
}

/// The server's state.
#[derive(Debug, Default)]
pub(crate) struct Slack {
    base: String,
    /// Valid bot tokens with their scopes.
    tokens: BTreeMap<String, BTreeSet<String>>,
    /// The workspace of each token.
    teams: BTreeMap<String, String>,
    /// Refresh tokens and first authorization codes, with their workspaces.
    refresh: BTreeMap<String, String>,
    codes: BTreeMap<String, String>,
    issued: u32,
    /// Whether tokens expire.
    rotates: bool,
    /// Whether the app is installed in an Enterprise organization.
    org_wide: bool,
    users: BTreeMap<String, Value>,
    channels: BTreeMap<String, Vec<Value>>,
    files: BTreeMap<String, File>,
    calls: Vec<Call>,
    faults: VecDeque<(String, Fault)>,
    complaints: Vec<String>,
    edits: BTreeMap<String, Instant>,
    /// Messages that are too old to be edited.
    old: BTreeSet<String>,
    clock: u64,
    home: BTreeMap<String, Value>,
    forms: Vec<Value>,
    unfurls: Vec<Value>,
    ephemeral_messages: Vec<Value>,
    responses: Vec<Value>,
    seen_triggers: u32,
    /// The address for Socket Mode.
    socket: String,
    /// Messages to send over Socket Mode, to the first connection that asks.
    outgoing: VecDeque<Value>,
    /// Sent messages without confirmation.
    unconfirmed: BTreeMap<String, Value>,
    confirmed: BTreeSet<String>,
    /// The payloads of confirmations.
    answers: BTreeMap<String, Value>,
    connections: usize,
    /// Increased to break all connections.
    broken: usize,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct File {
    content: Vec<u8>,
    info: Value,
    shared: Vec<String>,
}

impl SlackServer {
    /// A server with a workspace of some users and channels, in which the app is not installed yet.
    pub async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        let address = listener.local_addr().expect("it has an address");
        let mut slack = Slack {
            base: format!("http://{address}"),
            clock: 1_760_000_000_000_000,
            ..Slack::default()
        };
        for (id, name, more) in [
            (ANN, "Ann", json!({})),
            (BOB, "Bob", json!({"is_admin": true})),
            (CARL, "Carl", json!({})),
            (GUEST, "Guest", json!({"is_restricted": true})),
            (STRANGER, "Stranger", json!({"team_id": "T0ELSE", "is_stranger": true})),
            (DORA, "Dora", json!({"team_id": OTHER_TEAM})),
            (BOT, "Construct", json!({"is_bot": true})),
        ] {
            let mut user = json!({
                "id": id, "team_id": TEAM, "name": name.to_lowercase(), "deleted": false, "color": "9f69e7",
                "real_name": name, "tz": "Europe/Berlin", "tz_offset": 3600, "is_admin": false, "is_owner": false,
                "is_primary_owner": false, "is_restricted": false, "is_ultra_restricted": false, "is_bot": false,
                "is_app_user": false, "updated": 1_502_138_686, "has_2fa": false,
                "tz_label": "Central European Time", "is_email_confirmed": true, "who_can_share_contact_card": "EVERYONE",
                "profile": {"display_name": name, "real_name": name, "avatar_hash": "ge3b51ca72de", "status_text": ""},
            });
            for (key, value) in more.as_object().into_iter().flatten() {
                user[key] = value.clone();
            }
            slack.users.insert(id.to_owned(), user);
        }
        for channel in [CHANNEL, DIRECT, OTHER_CHANNEL] {
            slack.channels.insert(channel.to_owned(), Vec::new());
        }
        let shared = Arc::new(Mutex::new(slack));
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port is free");
        lock(&shared).socket = format!("ws://{}", socket.local_addr().expect("it has an address"));
        let router = Router::new().fallback(serve::answer).with_state(Arc::clone(&shared));
        let stop = CancellationToken::new();
        let (stopped, connected) = (stop.clone(), Arc::clone(&shared));
        tokio::spawn(async move {
            let serving = axum::serve(listener, router);
            tokio::select! {
                () = stopped.cancelled() => {}
                () = socket::serve(socket, connected) => {}
                served = serving => served.expect("it serves"),
            }
        });
        Self { address, shared, _stop: stop.drop_guard() }
    }

    pub(crate) fn slack(&self) -> MutexGuard<'_, Slack> {
        lock(&self.shared)
    }

    /// The server's URL, e.g. `http://127.0.0.1:4242`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Configures the services of a mesh for this Slack.
    pub fn configure(&self, mesh: &mut Mesh) {
        mesh.set_env("CONSTRUCT_SLACK_LISTEN", mesh.slack_address().to_string());
        mesh.set_env("CONSTRUCT_SLACK_PUBLIC_URL", mesh.slack_url());
        mesh.set_env("CONSTRUCT_SLACK_GATEWAY_URL", mesh.gateway_url());
        mesh.set_env("CONSTRUCT_SLACK_API_URL", format!("{}/api/", self.url()));
        mesh.set_env("CONSTRUCT_SLACK_AUTHORIZE_URL", format!("{}/oauth/v2/authorize", self.url()));
        mesh.set_env("CONSTRUCT_SLACK_SIGNING_SECRET", SIGNING_SECRET);
        mesh.set_env("CONSTRUCT_SLACK_CLIENT_ID", CLIENT_ID);
        mesh.set_env("CONSTRUCT_SLACK_CLIENT_SECRET", CLIENT_SECRET);
        mesh.set_env("CONSTRUCT_SLACK_CONNECT_KEY", CONNECT_KEY);
        mesh.set_env("CONSTRUCT_SLACK_AGENT", "helper");
        mesh.set_env("CONSTRUCT_SLACK_LEASE", "3s");
        mesh.set_env("CONSTRUCT_SLACK_TASK_URL", "https://construct.example/tasks/{task}");
    }

    /// Tokens expire from now on.
    pub fn rotate_tokens(&self) {
        self.slack().rotates = true;
    }

    /// From now on, users agree to an installation in their whole Enterprise organization.
    pub fn install_org_wide(&self) {
        self.slack().org_wide = true;
    }

    /// Returns a code that the app can exchange for a token, as after a user's consent to the
    /// installation.
    pub fn authorize(&self) -> String {
        self.authorize_in(TEAM)
    }

    fn authorize_in(&self, team: &str) -> String {
        let mut slack = self.slack();
        slack.issued += 1;
        let code = format!("code-{}", slack.issued);
        slack.codes.insert(code.clone(), team.to_owned());
        code
    }

    /// Connects a workspace to the organization of a setup code through the form. Returns the
    /// status and the text of the last page.
    ///
    /// # Errors
    /// Any error of the browser.
    pub async fn connect_workspace(
        &self,
        mesh: &Mesh,
        team: &str,
        code: &str,
        agent: &str,
    ) -> anyhow::Result<(u16, String)> {
        let browser = http::client().redirect(reqwest::redirect::Policy::none()).build()?;
        let request = browser.post(format!("{}/slack/connect", mesh.slack_url()));
        let request = request.header(header::ORIGIN, mesh.slack_url());
        let request = request.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded");
        let begun = request.body(form(&[("code", code), ("agent", agent)])).send().await?;
        if begun.status() != 303 {
            return Ok((begun.status().as_u16(), begun.text().await?));
        }
        let (state, cookie) = oauth_redirect(&begun)?;
        let url = format!(
            "{}/slack/callback?code={}&state={state}",
            mesh.slack_url(),
            self.authorize_in(team)
        );
        let done = browser.get(url).header(header::COOKIE, cookie).send().await?;
        Ok((done.status().as_u16(), done.text().await?))
    }

    /// Installs the app in a workspace of the mesh through a browser, as an admin would.
    pub async fn install(&self, mesh: &Mesh) -> anyhow::Result<String> {
        self.install_in(mesh, TEAM).await
    }

    /// The same in one of the two workspaces.
    ///
    /// # Errors
    /// Any error of the service or the browser.
    pub async fn install_in(&self, mesh: &Mesh, team: &str) -> anyhow::Result<String> {
        let browser = http::client().redirect(reqwest::redirect::Policy::none()).build()?;
        let begun = browser
            .get(format!("{}/slack/connect?key={CONNECT_KEY}", mesh.slack_url()))
            .send()
            .await?;
        anyhow::ensure!(begun.status() == 303, "{}", begun.status());
        let (state, cookie) = oauth_redirect(&begun)?;
        let url = format!(
            "{}/slack/callback?code={}&state={state}",
            mesh.slack_url(),
            self.authorize_in(team)
        );
        let done = browser.get(url).header(header::COOKIE, cookie).send().await?;
        anyhow::ensure!(done.status() == 200, "{}: {}", done.status(), done.text().await?);
        Ok(done.text().await?)
    }

    /// Revokes all tokens.
    pub fn revoke_tokens(&self) {
        self.slack().tokens.clear();
    }

    /// Lets the next call of a method fail, or the next download (`files-pri`) or upload (`upload`)
    /// of a file. Several faults are played in order.
    pub fn fail(&self, method: &str, fault: Fault) {
        self.slack().faults.push_back((method.to_owned(), fault));
    }

    /// The calls of a method so far.
    pub fn calls(&self, method: &str) -> Vec<Call> {
        self.slack().calls.iter().filter(|call| call.method == method).cloned().collect()
    }

    /// Requests that it should not have received.
    pub fn complaints(&self) -> Vec<String> {
        self.slack().complaints.clone()
    }

    /// Adds a user's message and returns its `ts`. No event is sent yet.
    pub fn add_message(
        &self,
        channel: &str,
        user: &str,
        thread: Option<&str>,
        text: &str,
        files: Value,
    ) -> String {
        let mut slack = self.slack();
        let ts = slack.next_ts();
        let mut message =
            json!({"type": "message", "user": user, "text": text, "ts": ts, "team": TEAM});
        if let Some(thread) = thread {
            message["thread_ts"] = thread.into();
        }
        if files.as_array().is_some_and(|files| !files.is_empty()) {
            message["files"] = files;
        }
        slack.channels.entry(channel.to_owned()).or_default().push(message);
        ts
    }

    /// Adds a user's file.
    pub fn add_file(&self, name: &str, mimetype: &str, content: &[u8]) -> Value {
        let mut slack = self.slack();
        let id = format!("F{}", slack.files.len());
        let url = format!("{}/files-pri/{id}/download/{name}", slack.base);
        let info = json!({"id": id, "name": name, "mimetype": mimetype, "size": content.len(), "url_private_download": url});
        slack
            .files
            .insert(id, File { content: content.to_vec(), info: info.clone(), shared: Vec::new() });
        info
    }

    /// Deletes a message.
    pub fn delete(&self, channel: &str, ts: &str) {
        let mut slack = self.slack();
        slack.channels.entry(channel.to_owned()).or_default().retain(|message| message["ts"] != ts);
    }

    /// Adds a user's message to the app: a mention in a channel, or a direct message. Returns its
    /// `ts` and its event.
    pub fn ask(
        &self,
        channel: &str,
        user: &str,
        thread: Option<&str>,
        text: &str,
        files: Value,
    ) -> (String, Value) {
        let direct = channel.starts_with('D');
        let text = if direct { text.to_owned() } else { format!("<@{BOT}> {text}") };
        let ts = self.add_message(channel, user, thread, &text, files.clone());
        let mut event = json!({
            "type": if direct { "message" } else { "app_mention" }, "user": user, "ts": ts, "client_msg_id": "d3a5",
            "text": text, "team": TEAM, "channel": channel, "event_ts": ts,
        });
        if direct {
            event["channel_type"] = "im".into();
        }
        if let Some(thread) = thread {
            event["thread_ts"] = thread.into();
        }
        if files.as_array().is_some_and(|files| !files.is_empty()) {
            event["files"] = files;
        }
        (ts, self.envelope(event))
    }

    /// An event as Slack sends it, with a new id.
    pub fn envelope(&self, event: Value) -> Value {
        let mut slack = self.slack();
        slack.issued += 1;
        let team = team_of(event["channel"].as_str().unwrap_or_default());
        json!({
            "token": "Jhj5dZrVaK7ZwHHjRyZWjbDl", "team_id": team, "api_app_id": "A0APP", "event": event,
            "type": "event_callback", "event_id": format!("Ev{:08}", slack.issued), "event_time": jiff::Timestamp::now().as_second(),
            "authorizations": [{"enterprise_id": null, "team_id": team, "user_id": BOT, "is_bot": true, "is_enterprise_install": false}],
            "is_ext_shared_channel": false,
        })
    }

    /// An event of the other workspace as Slack sends it.
    pub fn envelope_of_other(&self, event: Value) -> Value {
        let mut envelope = self.envelope(event);
        envelope["team_id"] = OTHER_TEAM.into();
        envelope["authorizations"][0]["team_id"] = OTHER_TEAM.into();
        envelope
    }

    /// Makes a message too old to be edited.
    pub fn expire_edits(&self, ts: &str) {
        self.slack().old.insert(ts.to_owned());
    }

    /// Sends an event to the service; returns the status.
    pub async fn send_event(&self, mesh: &Mesh, envelope: &Value) -> anyhow::Result<u16> {
        self.send_event_to(&mesh.slack_url(), envelope).await
    }

    /// The same to the service at an address, whatever happens to its mesh.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn send_event_to(&self, service: &str, envelope: &Value) -> anyhow::Result<u16> {
        let body = envelope.to_string();
        Ok(self.post(service, "events", "application/json", body).await?.status().as_u16())
    }

    /// The service's answer to typing in a menu with external options.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn suggestions(&self, mesh: &Mesh, payload: &Value) -> anyhow::Result<Value> {
        let body = form(&[("payload", &payload.to_string())]);
        let answer = self
            .post(&mesh.slack_url(), "interactivity", "application/x-www-form-urlencoded", body)
            .await?;
        Ok(serde_json::from_str(&answer.text().await?)?)
    }

    /// Sends a user's action with a button or form.
    pub async fn send_action(&self, mesh: &Mesh, payload: &Value) -> anyhow::Result<u16> {
        let body = form(&[("payload", &payload.to_string())]);
        Ok(self
            .post(&mesh.slack_url(), "interactivity", "application/x-www-form-urlencoded", body)
            .await?
            .status()
            .as_u16())
    }

    /// Gives the app a token, as if it were installed from its settings.
    pub fn give_token(&self) -> String {
        self.slack().give_token(TEAM)
    }

    /// Presses the button with this action in a message.
    pub async fn press(
        &self,
        mesh: &Mesh,
        user: &str,
        channel: &str,
        ts: &str,
        action: &str,
    ) -> anyhow::Result<u16> {
        let message = self.message(channel, ts).unwrap_or_default();
        let button = Self::button(&message, action);
        let button =
            &button.ok_or_else(|| anyhow::anyhow!("there is no button {action}: {message}"))?;
        self.send_action(mesh, &self.press_payload((user, channel), &message, button)).await
    }

    /// The payload that Slack sends when a user presses a button of a message.
    pub fn press_payload(
        &self,
        (user, channel): (&str, &str),
        message: &Value,
        button: &Value,
    ) -> Value {
        let (team, mut button) = (team_of(channel), button.clone());
        if button["action_ts"].is_null() {
            button["action_ts"] = self.slack().next_ts().into();
        }
        json!({
            "type": "block_actions", "user": {"id": user, "username": "x", "team_id": team}, "api_app_id": "A0APP",
            "container": {"type": "message", "message_ts": message["ts"], "channel_id": channel, "is_ephemeral": false},
            "trigger_id": "12321423423.333649436676.d8c1bb837935619ccad0f624c448ffb3", "team": {"id": team},
            "channel": {"id": channel, "name": "general"}, "message": message, "actions": [button],
            "response_url": format!("{}/response", self.url()),
        })
    }

    /// The button with this action in a message.
    pub fn button(message: &Value, action: &str) -> Option<Value> {
        let blocks = message["blocks"].as_array().cloned().unwrap_or_default();
        let mut buttons = blocks
            .iter()
            .flat_map(|block| block["elements"].as_array().cloned().unwrap_or_default());
        buttons.find(|button| button["action_id"] == action)
    }

    /// Sends a user's slash command.
    pub async fn command(
        &self,
        mesh: &Mesh,
        user: &str,
        channel: &str,
        text: &str,
    ) -> anyhow::Result<String> {
        let command = self.command_payload(user, channel, text);
        let fields: Vec<(&str, &str)> = command
            .as_object()
            .into_iter()
            .flatten()
            .map(|(name, value)| (name.as_str(), value.as_str().unwrap_or_default()))
            .collect();
        let answer = self
            .post(&mesh.slack_url(), "commands", "application/x-www-form-urlencoded", form(&fields))
            .await?;
        anyhow::ensure!(answer.status() == 200, "{}", answer.status());
        Ok(answer.text().await?)
    }

    /// The payload of a slash command
    /// (<https://docs.slack.dev/interactivity/implementing-slash-commands>).
    pub fn command_payload(&self, user: &str, channel: &str, text: &str) -> Value {
        let mut slack = self.slack();
        slack.seen_triggers += 1;
        json!({
            "token": "gIkuvaNzQIHg97ATvDxqgjtO", "team_id": team_of(channel), "team_domain": "example",
            "channel_id": channel, "channel_name": "general", "user_id": user, "user_name": "x",
            "command": "/construct", "text": text, "response_url": format!("{}/response", slack.base),
            "trigger_id": format!("13345224609.738474920.{}", slack.seen_triggers), "api_app_id": "A0APP",
            "is_enterprise_install": "false",
        })
    }

    async fn post(
        &self,
        service: &str,
        path: &str,
        kind: &str,
        body: String,
    ) -> anyhow::Result<reqwest::Response> {
        let timestamp = jiff::Timestamp::now().as_second().to_string();
        let signature = sign(SIGNING_SECRET.as_bytes(), &timestamp, body.as_bytes());
        let request = http::client().build()?.post(format!("{service}/slack/{path}"));
        let request = request
            .header("x-slack-request-timestamp", timestamp)
            .header("x-slack-signature", signature);
        Ok(request
            .header(header::CONTENT_TYPE, kind)
            .body(body)
            .timeout(Duration::from_secs(60))
            .send()
            .await?)
    }

    /// The current state of a message.
    pub fn message(&self, channel: &str, ts: &str) -> Option<Value> {
        self.slack().channels.get(channel)?.iter().find(|message| message["ts"] == ts).cloned()
    }

    /// The app's posts in a thread, in order.
    pub fn posts(&self, channel: &str, thread: &str) -> Vec<Value> {
        let slack = self.slack();
        let messages = slack.channels.get(channel).into_iter().flatten();
        messages
            .filter(|message| message["user"] == BOT && message["thread_ts"] == thread)
            .cloned()
            .collect()
    }

    /// The app's posts in a channel outside of threads.
    pub fn channel_posts(&self, channel: &str) -> Vec<Value> {
        let slack = self.slack();
        let messages = slack.channels.get(channel).into_iter().flatten();
        messages
            .filter(|message| message["user"] == BOT && message["thread_ts"].is_null())
            .cloned()
            .collect()
    }

    /// The files shown in a thread.
    pub fn shown_files(&self, channel: &str, thread: &str) -> Vec<String> {
        let slack = self.slack();
        let place = format!("{channel}.{thread}");
        let shown = slack.files.values().filter(|file| file.shared.contains(&place));
        shown.map(|file| String::from_utf8_lossy(&file.content).into_owned()).collect()
    }

    /// Ephemeral messages to single users.
    pub fn ephemeral_messages(&self) -> Vec<Value> {
        self.slack().ephemeral_messages.clone()
    }

    /// The responses to commands.
    pub fn responses(&self) -> Vec<Value> {
        self.slack().responses.clone()
    }

    /// A user's home.
    pub fn home(&self, user: &str) -> Option<Value> {
        self.slack().home.get(user).cloned()
    }

    /// The opened forms.
    pub fn forms(&self) -> Vec<Value> {
        self.slack().forms.clone()
    }

    /// The unfurled links.
    pub fn unfurls(&self) -> Vec<Value> {
        self.slack().unfurls.clone()
    }
}

/// The state and the cookie of a browser's redirect to Slack.
///
/// # Errors
/// When there was no redirect.
pub fn oauth_redirect(begun: &reqwest::Response) -> anyhow::Result<(String, String)> {
    let header =
        |name| begun.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let asked = reqwest::Url::parse(header(header::LOCATION))?;
    let state =
        asked.query_pairs().find(|(name, _)| name == "state").map(|(_, state)| state.into_owned());
    let cookie = header(header::SET_COOKIE).split(';').next().unwrap_or_default().to_owned();
    Ok((state.unwrap_or_default(), cookie))
}

/// The workspace of a channel.
fn team_of(channel: &str) -> &'static str {
    if channel == OTHER_CHANNEL { OTHER_TEAM } else { TEAM }
}

/// All visible text of a message.
pub fn visible_text(message: &Value) -> String {
    let blocks = message["blocks"].as_array().cloned().unwrap_or_default();
    let texts = blocks.iter().map(|block| {
        let text = block["text"]["text"].as_str().unwrap_or_default().to_owned();
        let elements = block["elements"].as_array().cloned().unwrap_or_default();
        let elements =
            elements.iter().filter_map(|element| element["text"].as_str().map(str::to_owned));
        std::iter::once(text).chain(elements).collect::<Vec<_>>().join("\n")
    });
    texts.collect::<Vec<_>>().join("\n")
}

/// `v0=` and the HMAC-SHA256 of a request, as RFC 2104 defines it; the key has at most 64 bytes.
pub fn sign(secret: &[u8], timestamp: &str, body: &[u8]) -> String {
    let mut key = [0_u8; 64];
    key[..secret.len()].copy_from_slice(secret);
    let padded = |pad: u8| key.map(|byte| byte ^ pad);
    let inner = Sha256::new()
        .chain_update(padded(0x36))
        .chain_update([b"v0:", timestamp.as_bytes(), b":", body].concat());
    let outer = Sha256::new().chain_update(padded(0x5c)).chain_update(inner.finalize()).finalize();
    format!("v0={}", outer.iter().map(|byte| format!("{byte:02x}")).collect::<String>())
}

fn form(fields: &[(&str, &str)]) -> String {
    let mut url = reqwest::Url::parse("http://x/").expect("an address");
    url.query_pairs_mut().extend_pairs(fields);
    url.query().unwrap_or_default().to_owned()
}

pub(crate) fn lock(shared: &Mutex<Slack>) -> MutexGuard<'_, Slack> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}
