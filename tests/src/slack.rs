//! A Slack to test against: a real HTTP server that speaks the Web API in the shapes of its
//! documentation, keeps the state of channels, checks what it is sent (tokens, scopes, arguments,
//! limits) and signs what it sends.
//!
//! What it was sent and should not have been stands in [`SlackServer::complaints`]; a test that
//! ends well has none.

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

/// Of the app; requests are signed with it.
pub const SIGNING_SECRET: &str = "8f742231b10e8888abcd99yyyzzz85a5";
/// The app's id for OAuth.
pub const CLIENT_ID: &str = "111.222";
/// The app's secret for OAuth.
pub const CLIENT_SECRET: &str = "client-secret-of-the-test";
/// Lets one connect workspaces.
pub const CONNECT_KEY: &str = "the-key-for-connecting";
/// The app-level token.
pub const APP_TOKEN: &str = "xapp-1-test";
/// The workspace that is installed.
pub const TEAM: &str = "T0TEAM1";
/// Another workspace, in which the app can be installed, too.
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
/// Somebody of another workspace.
pub const STRANGER: &str = "U0OTHER";
/// A member of the other workspace.
pub const DORA: &str = "U0DORA";
/// A channel that the app is in.
pub const CHANNEL: &str = "C0GENERAL";
/// A channel of the other workspace that it is in.
pub const OTHER_CHANNEL: &str = "C0OTHER";
/// A channel that it is not in.
pub const PRIVATE: &str = "C0PRIVATE";
/// Ann's direct messages with the app.
pub const DIRECT: &str = "D0ANN";

/// A call of the Web API.
#[derive(Debug, Clone)]
pub struct Call {
    /// E.g. `chat.postMessage`.
    pub method: String,
    /// The arguments, of whichever form.
    pub arguments: Value,
    /// When it came.
    pub at: Instant,
}

/// What goes wrong with one call.
#[derive(Debug, Clone)]
pub enum Fault {
    /// 429, with so many seconds in `Retry-After`. Nothing is done.
    Limited(u64),
    /// This status; nothing is done.
    Status(u16),
    /// This status, although it is done.
    DoneAnd(u16),
    /// Refused with this code.
    Refuse(&'static str),
    /// Done at once, and answered after so long.
    DoneAfter(Duration),
    /// Never answered; nothing is done.
    Hang,
    /// Never answered, although it is done.
    DoneAndHang,
}

/// The server. It ends when this is dropped.
#[derive(Debug)]
pub struct SlackServer {
    address: SocketAddr,
    shared: Arc<Mutex<Slack>>,
    _stop: DropGuard,
}

/// What the server knows.
#[derive(Debug, Default)]
pub(crate) struct Slack {
    base: String,
    /// Valid bot tokens, and what they may.
    tokens: BTreeMap<String, BTreeSet<String>>,
    /// Of which workspace each is.
    teams: BTreeMap<String, String>,
    /// What tokens are renewed with, and what they are given for first; of which workspace each is.
    refresh: BTreeMap<String, String>,
    codes: BTreeMap<String, String>,
    issued: u32,
    /// Whether tokens end.
    rotates: bool,
    /// Whether the app is installed in a whole Enterprise organization.
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
    /// Where Socket Mode connects to.
    socket: String,
    /// What is sent over it, to whichever connection is first.
    outgoing: VecDeque<Value>,
    /// What was sent and is not confirmed.
    unconfirmed: BTreeMap<String, Value>,
    confirmed: BTreeSet<String>,
    /// What confirmations carried.
    answers: BTreeMap<String, Value>,
    connections: usize,
    /// Rises when all connections are to break.
    broken: usize,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct File {
    content: Vec<u8>,
    info: Value,
    shared: Vec<String>,
}

impl SlackServer {
    /// A server with a workspace of some people and channels, in which the app is not installed
    /// yet.
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

    /// Where it is, e.g. `http://127.0.0.1:4242`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Tells the services of a mesh about this Slack.
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

    /// Tokens end after so long from now on.
    pub fn rotate_tokens(&self) {
        self.slack().rotates = true;
    }

    /// From now on people agree to an installation in their whole Enterprise organization.
    pub fn install_org_wide(&self) {
        self.slack().org_wide = true;
    }

    /// Gives a code that the app can have a token for, as when somebody has agreed to its
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

    /// Connects a workspace to the organization that a set-up code was made in, through the form.
    /// Gives the status and the words of the last page.
    ///
    /// # Errors
    /// Whatever the browser fails with.
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

    /// Installs the app in a workspace of the mesh, as its admin would: through a browser.
    pub async fn install(&self, mesh: &Mesh) -> anyhow::Result<String> {
        self.install_in(mesh, TEAM).await
    }

    /// The same in one of the two workspaces.
    ///
    /// # Errors
    /// Whatever the service or the browser fails with.
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

    /// Makes the tokens useless, as when somebody revokes them.
    pub fn revoke_tokens(&self) {
        self.slack().tokens.clear();
    }

    /// Has the next call of a method go wrong, or, as `files-pri` or `upload`, the next download or
    /// upload of a file; several are played in their order.
    pub fn fail(&self, method: &str, fault: Fault) {
        self.slack().faults.push_back((method.to_owned(), fault));
    }

    /// The calls of a method so far.
    pub fn calls(&self, method: &str) -> Vec<Call> {
        self.slack().calls.iter().filter(|call| call.method == method).cloned().collect()
    }

    /// What it was sent and should not have been.
    pub fn complaints(&self) -> Vec<String> {
        self.slack().complaints.clone()
    }

    /// Somebody says something; gives the message's `ts`. Nobody is told of it yet.
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

    /// A file that somebody has put there.
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

    /// Somebody's words to the app: in a channel with its name, or directly. Gives the message's
    /// `ts`, and the event of it.
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

    /// An event as Slack sends it, under a new id.
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

    /// An event as Slack sends it of the other workspace.
    pub fn envelope_of_other(&self, event: Value) -> Value {
        let mut envelope = self.envelope(event);
        envelope["team_id"] = OTHER_TEAM.into();
        envelope["authorizations"][0]["team_id"] = OTHER_TEAM.into();
        envelope
    }

    /// Lets a message become too old to be edited.
    pub fn expire_edits(&self, ts: &str) {
        self.slack().old.insert(ts.to_owned());
    }

    /// Sends an event to the service; the status it is answered with.
    pub async fn send_event(&self, mesh: &Mesh, envelope: &Value) -> anyhow::Result<u16> {
        self.send_event_to(&mesh.slack_url(), envelope).await
    }

    /// The same to the service at an address, whatever is done with its mesh meanwhile.
    ///
    /// # Errors
    /// When it does not answer.
    pub async fn send_event_to(&self, service: &str, envelope: &Value) -> anyhow::Result<u16> {
        let body = envelope.to_string();
        Ok(self.post(service, "events", "application/json", body).await?.status().as_u16())
    }

    /// What the service answers to somebody who types in a menu that asks it for choices.
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

    /// Sends what somebody did with a button or form.
    pub async fn send_action(&self, mesh: &Mesh, payload: &Value) -> anyhow::Result<u16> {
        let body = form(&[("payload", &payload.to_string())]);
        Ok(self
            .post(&mesh.slack_url(), "interactivity", "application/x-www-form-urlencoded", body)
            .await?
            .status()
            .as_u16())
    }

    /// Lets the app use a token as if it had been installed from its settings.
    pub fn give_token(&self) -> String {
        self.slack().give_token(TEAM)
    }

    /// Somebody presses the button with this action in a message.
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

    /// What Slack sends when somebody presses a button of a message.
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

    /// Somebody gives the slash command.
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

    /// What Slack sends when somebody gives the slash command (<https://docs.slack.dev/interactivity/implementing-slash-commands>).
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

    /// A message, as it is now.
    pub fn message(&self, channel: &str, ts: &str) -> Option<Value> {
        self.slack().channels.get(channel)?.iter().find(|message| message["ts"] == ts).cloned()
    }

    /// What the app has posted into a thread, in order.
    pub fn posts(&self, channel: &str, thread: &str) -> Vec<Value> {
        let slack = self.slack();
        let messages = slack.channels.get(channel).into_iter().flatten();
        messages
            .filter(|message| message["user"] == BOT && message["thread_ts"] == thread)
            .cloned()
            .collect()
    }

    /// What the app has posted into a channel, outside of threads.
    pub fn channel_posts(&self, channel: &str) -> Vec<Value> {
        let slack = self.slack();
        let messages = slack.channels.get(channel).into_iter().flatten();
        messages
            .filter(|message| message["user"] == BOT && message["thread_ts"].is_null())
            .cloned()
            .collect()
    }

    /// Files that are shown in a thread.
    pub fn shown_files(&self, channel: &str, thread: &str) -> Vec<String> {
        let slack = self.slack();
        let place = format!("{channel}.{thread}");
        let shown = slack.files.values().filter(|file| file.shared.contains(&place));
        shown.map(|file| String::from_utf8_lossy(&file.content).into_owned()).collect()
    }

    /// What was said to single persons.
    pub fn ephemeral_messages(&self) -> Vec<Value> {
        self.slack().ephemeral_messages.clone()
    }

    /// What commands were answered with.
    pub fn responses(&self) -> Vec<Value> {
        self.slack().responses.clone()
    }

    /// Somebody's home.
    pub fn home(&self, user: &str) -> Option<Value> {
        self.slack().home.get(user).cloned()
    }

    /// Forms that were opened.
    pub fn forms(&self) -> Vec<Value> {
        self.slack().forms.clone()
    }

    /// What links were unfurled to.
    pub fn unfurls(&self) -> Vec<Value> {
        self.slack().unfurls.clone()
    }
}

/// The state and the cookie with which a browser was sent to Slack.
///
/// # Errors
/// When it was sent nowhere.
pub fn oauth_redirect(begun: &reqwest::Response) -> anyhow::Result<(String, String)> {
    let header =
        |name| begun.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let asked = reqwest::Url::parse(header(header::LOCATION))?;
    let state =
        asked.query_pairs().find(|(name, _)| name == "state").map(|(_, state)| state.into_owned());
    let cookie = header(header::SET_COOKIE).split(';').next().unwrap_or_default().to_owned();
    Ok((state.unwrap_or_default(), cookie))
}

/// The workspace that a channel is in.
fn team_of(channel: &str) -> &'static str {
    if channel == OTHER_CHANNEL { OTHER_TEAM } else { TEAM }
}

/// All text that a message shows.
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
