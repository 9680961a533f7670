//! The methods of the Web API. Answers have the fields of the examples in Slack's documentation,
//! whose page is named beside each (`https://docs.slack.dev/reference/methods/` and the method's
//! name), with the ids of these tests.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{
    ANN, APP_TOKEN, BOT, CLIENT_ID, CLIENT_SECRET, DIRECT, File, OTHER_CHANNEL, OTHER_TEAM, Slack,
    TEAM,
};

/// The shortest time between two edits of a message that is accepted without a complaint. Slack's
/// own limit is per workspace; the promise is one edit per second. The service measures it when it
/// sends, this server when requests arrive, and on a busy machine the first of two may be on its
/// way for most of that second. Edits without any delay are still detected.
const MIN_EDIT_INTERVAL: Duration = Duration::from_millis(200);

/// The maximal number of characters of all blocks of a message. Slack accepts a few more.
const MAX_CHARACTERS: usize = 12_000;

/// The app's scopes.
const SCOPES: &str = "app_mentions:read,channels:history,chat:write,commands,files:read,files:write,links:read,links:write,\
                      users:read,im:history";

fn refuse(code: &str) -> Value {
    json!({"ok": false, "error": code})
}

impl Slack {
    /// Message ids increase with time across all users.
    pub(crate) fn next_ts(&mut self) -> String {
        self.clock += 1_000_123;
        format!("{}.{:06}", self.clock / 1_000_000, self.clock % 1_000_000)
    }

    fn complain(&mut self, what: String) {
        self.complaints.push(what);
    }

    /// Executes a call.
    pub(crate) fn call(&mut self, method: &str, authorization: &str, arguments: &Value) -> Value {
        if method == "oauth.v2.access" {
            return self.access(authorization, arguments);
        }
        let token = authorization.strip_prefix("Bearer ").unwrap_or_default();
        if method == "apps.connections.open" {
            let known = token == APP_TOKEN;
            return if known {
                json!({"ok": true, "url": self.socket})
            } else {
                refuse("not_allowed_token_type")
            };
        }
        if arguments["token"].is_string() {
            self.complain(format!("{method}: the token stands among the arguments"));
        }
        let Some(scopes) = self.tokens.get(token).cloned() else { return refuse("invalid_auth") };
        let team = self.teams.get(token).cloned().unwrap_or_default();
        if let Some(channel) = arguments["channel"].as_str()
            && (channel == OTHER_CHANNEL) != (team == OTHER_TEAM)
        {
            self.complain(format!("{method}: a token of {team} is used in {channel}"));
        }
        let needed = match method {
            "chat.postMessage" | "chat.update" | "chat.postEphemeral" => "chat:write",
            "conversations.replies" | "conversations.history" => "channels:history",
            "users.info" => "users:read",
            "files.getUploadURLExternal" | "files.completeUploadExternal" => "files:write",
            "files.info" => "files:read",
            "chat.unfurl" => "links:write",
            _ => "",
        };
        if !needed.is_empty() && !scopes.contains(needed) {
            return json!({"ok": false, "error": "missing_scope", "needed": needed});
        }
        match method {
            // https://docs.slack.dev/reference/methods/auth.test
            "auth.test" => {
                json!({"ok": true, "url": "https://example.slack.com/", "team": "Example", "user": "construct",
                                  "team_id": team, "user_id": BOT, "bot_id": "B0BOT", "is_enterprise_install": false})
            }
            "chat.postMessage" => self.post(arguments),
            "chat.update" => self.update(arguments),
            "chat.postEphemeral"
                if !self
                    .channels
                    .contains_key(arguments["channel"].as_str().unwrap_or_default()) =>
            {
                refuse("channel_not_found")
            }
            "chat.postEphemeral" => {
                self.ephemeral_messages.push(arguments.clone());
                // https://docs.slack.dev/reference/methods/chat.postEphemeral
                json!({"ok": true, "message_ts": "1502210682.580145"})
            }
            "chat.unfurl" => {
                self.unfurls.push(arguments.clone());
                json!({"ok": true})
            }
            "conversations.replies" => self.replies(arguments),
            "conversations.history" => self.history(arguments),
            // https://docs.slack.dev/reference/methods/users.info
            "users.info" => match self.users.get(arguments["user"].as_str().unwrap_or_default()) {
                Some(user) => json!({"ok": true, "user": user}),
                None => refuse("user_not_found"),
            },
            "files.getUploadURLExternal" => {
                let id = format!("F{}", self.files.len());
                let info =
                    json!({"id": id, "name": arguments["filename"], "length": arguments["length"]});
                self.files.insert(id.clone(), File { info, ..File::default() });
                // https://docs.slack.dev/reference/methods/files.getUploadURLExternal
                json!({"ok": true, "upload_url": format!("{}/upload/{id}", self.base), "file_id": id})
            }
            "files.completeUploadExternal" => self.complete(arguments),
            "files.info" => self.file_info(arguments),
            "views.publish" => {
                self.home.insert(
                    arguments["user_id"].as_str().unwrap_or_default().to_owned(),
                    arguments["view"].clone(),
                );
                json!({"ok": true, "view": view(&arguments["view"], &team, "VHOME")})
            }
            "views.open" => {
                self.forms.push(arguments["view"].clone());
                json!({"ok": true, "view": view(&arguments["view"], &team, "VFORM")})
            }
            _ => {
                self.complain(format!("there is no method {method}"));
                refuse("unknown_method")
            }
        }
    }

    pub(crate) fn give_token(&mut self, team: &str) -> String {
        self.issued += 1;
        let token = format!("xoxb-{}", self.issued);
        self.teams.insert(token.clone(), team.to_owned());
        self.tokens.insert(token.clone(), SCOPES.split(',').map(str::to_owned).collect());
        token
    }

    /// <https://docs.slack.dev/reference/methods/oauth.v2.access>
    fn access(&mut self, authorization: &str, arguments: &Value) -> Value {
        use base64::{Engine as _, engine::general_purpose::STANDARD};
        let app = STANDARD.encode(format!("{CLIENT_ID}:{CLIENT_SECRET}"));
        if authorization != format!("Basic {app}") {
            return refuse("bad_client_secret");
        }
        let renewed = arguments["grant_type"] == "refresh_token";
        let given = arguments[if renewed { "refresh_token" } else { "code" }]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let known = if renewed { self.refresh.remove(&given) } else { self.codes.remove(&given) };
        let Some(team) = known else {
            return refuse(if renewed { "invalid_refresh_token" } else { "invalid_code" });
        };
        let token = self.give_token(&team);
        let refresh = format!("xoxe-1-{}", self.issued);
        let mut answer = json!({
            "ok": true, "access_token": token, "token_type": "bot", "scope": SCOPES, "bot_user_id": BOT, "app_id": "A0APP",
            "team": {"name": "Example", "id": team}, "enterprise": null, "is_enterprise_install": false,
            "authed_user": {"id": ANN},
        });
        // <https://docs.slack.dev/enterprise/developing-for-enterprise-orgs>
        if self.org_wide {
            answer["is_enterprise_install"] = true.into();
            answer["team"] = Value::Null;
            answer["enterprise"] = json!({"id": "E0ALL", "name": "All"});
        }
        if self.rotates {
            self.refresh.insert(refresh.clone(), team);
            answer["refresh_token"] = refresh.into();
            // Shorter than the time before its expiry at which a token is renewed.
            answer["expires_in"] = 600.into();
        }
        answer
    }

    fn check_blocks(&mut self, method: &str, arguments: &Value) -> Result<(), Value> {
        let blocks = arguments["blocks"].as_array().cloned().unwrap_or_default();
        if arguments["text"].as_str().is_none_or(str::is_empty) {
            self.complain(format!("{method}: there is no text for notifications"));
        }
        if blocks.len() > 50 {
            return Err(refuse("invalid_blocks"));
        }
        let length = |value: &Value| value.as_str().map_or(0, |text| text.chars().count());
        let elements = |block: &Value| block["elements"].as_array().cloned().unwrap_or_default();
        let shown = blocks.iter().map(|block| {
            let elements = elements(block);
            let elements = elements
                .iter()
                .map(|element| length(&element["text"]) + length(&element["text"]["text"]));
            length(&block["text"]["text"]) + elements.sum::<usize>()
        });
        if shown.sum::<usize>() > MAX_CHARACTERS {
            return Err(refuse("msg_blocks_too_long"));
        }
        for block in &blocks {
            let text = block["text"]["text"].as_str().unwrap_or_default();
            let limit = if block["type"] == "header" { 150 } else { 3000 };
            let empty =
                text.is_empty() && matches!(block["type"].as_str(), Some("section" | "header"));
            if empty || text.chars().count() > limit {
                return Err(refuse("invalid_blocks"));
            }
            if text.contains("<!") {
                self.complain(format!("{method}: somebody is called: {text}"));
            }
        }
        Ok(())
    }

    fn post(&mut self, arguments: &Value) -> Value {
        if let Err(refusal) = self.check_blocks("chat.postMessage", arguments) {
            return refusal;
        }
        // A user's id means the conversation with them.
        let channel = match arguments["channel"].as_str().unwrap_or_default() {
            ANN => DIRECT.to_owned(),
            channel => channel.to_owned(),
        };
        let Some(messages) = self.channels.get(&channel) else { return refuse("not_in_channel") };
        let thread = &arguments["thread_ts"];
        if !thread.is_null() && !messages.iter().any(|message| message["ts"] == *thread) {
            return refuse("thread_not_found");
        }
        let ts = self.next_ts();
        // https://docs.slack.dev/reference/methods/chat.postMessage
        let mut message = json!({
            "type": "message", "subtype": null, "user": BOT, "bot_id": "B0BOT", "app_id": "A0APP", "ts": ts,
            "text": arguments["text"], "blocks": arguments["blocks"], "metadata": arguments["metadata"],
            "bot_profile": {"id": "B0BOT", "app_id": "A0APP", "name": "Construct", "deleted": false, "updated": 1_502_138_686},
        });
        if !thread.is_null() {
            message["thread_ts"] = thread.clone();
        }
        self.channels.entry(channel.clone()).or_default().push(message.clone());
        json!({"ok": true, "channel": channel, "ts": ts, "message": message})
    }

    fn update(&mut self, arguments: &Value) -> Value {
        if let Err(refusal) = self.check_blocks("chat.update", arguments) {
            return refusal;
        }
        let ts = arguments["ts"].as_str().unwrap_or_default().to_owned();
        let channel = arguments["channel"].as_str().unwrap_or_default().to_owned();
        let Some(messages) = self.channels.get_mut(&channel) else {
            return refuse("channel_not_found");
        };
        let Some(message) = messages.iter_mut().find(|message| message["ts"] == ts.as_str()) else {
            return refuse("message_not_found");
        };
        if self.old.contains(&ts) {
            return refuse("edit_window_closed");
        }
        if message["user"] != BOT {
            return refuse("cant_update_message");
        }
        let progress = [&message["text"], &arguments["text"]]
            .into_iter()
            .any(|text| text.as_str().is_some_and(|text| text.starts_with("Working")));
        message["text"] = arguments["text"].clone();
        message["blocks"] = arguments["blocks"].clone();
        message["edited"] = json!({"user": BOT, "ts": ts});
        let after = message.clone();
        let before = self.edits.insert(ts.clone(), Instant::now());
        if progress && before.is_some_and(|before| before.elapsed() < MIN_EDIT_INTERVAL) {
            self.complain(format!(
                "chat.update: {ts} was edited {:?} before",
                before.map(|before| before.elapsed())
            ));
        }
        // https://docs.slack.dev/reference/methods/chat.update
        json!({"ok": true, "channel": channel, "ts": ts, "text": arguments["text"], "message": after})
    }

    fn replies(&mut self, arguments: &Value) -> Value {
        let text = |name: &str| arguments[name].as_str().unwrap_or_default().to_owned();
        let (thread, oldest, latest) = (text("ts"), text("oldest"), text("latest"));
        let Some(messages) = self.channels.get(&text("channel")) else {
            return refuse("channel_not_found");
        };
        if !messages.iter().any(|message| message["ts"] == thread.as_str()) {
            return refuse("thread_not_found");
        }
        let within = |ts: &str| {
            (oldest.is_empty() || ts >= oldest.as_str())
                && (latest.is_empty() || ts <= latest.as_str())
        };
        let found: Vec<Value> = messages
            .iter()
            .filter(|message| {
                let root = message["ts"] == thread.as_str();
                root || (message["thread_ts"] == thread.as_str()
                    && within(message["ts"].as_str().unwrap_or_default()))
            })
            .cloned()
            .collect();
        page(threaded(found, &thread), arguments)
    }

    fn history(&mut self, arguments: &Value) -> Value {
        let channel = arguments["channel"].as_str().unwrap_or_default();
        let Some(messages) = self.channels.get(channel) else { return refuse("channel_not_found") };
        let found = messages
            .iter()
            .rev()
            .filter(|message| message["thread_ts"].is_null())
            .cloned()
            .collect();
        page(found, arguments)
    }

    fn complete(&mut self, arguments: &Value) -> Value {
        let place = format!(
            "{}.{}",
            arguments["channel_id"].as_str().unwrap_or_default(),
            arguments["thread_ts"].as_str().unwrap_or_default()
        );
        for file in arguments["files"].as_array().into_iter().flatten() {
            let id = file["id"].as_str().unwrap_or_default().to_owned();
            let Some(file) = self.files.get_mut(&id) else { return refuse("file_not_found") };
            let length = file.info["length"].as_str().and_then(|length| length.parse().ok());
            if length != Some(file.content.len()) {
                return refuse("file_upload_size_restricted");
            }
            file.shared.push(place.clone());
            if file.shared.len() > 1 {
                self.complain(format!("{id} was completed twice"));
            }
        }
        // https://docs.slack.dev/reference/methods/files.completeUploadExternal
        json!({"ok": true, "files": arguments["files"]})
    }

    fn file_info(&self, arguments: &Value) -> Value {
        match self.files.get(arguments["file"].as_str().unwrap_or_default()) {
            Some(file) => {
                let mut shares = json!({});
                for (channel, thread) in
                    file.shared.iter().filter_map(|place| place.split_once('.'))
                {
                    let share = json!({
                        "reply_users": [BOT], "reply_users_count": 1, "reply_count": 1, "ts": thread, "thread_ts": thread,
                        "latest_reply": thread, "channel_name": "general", "team_id": TEAM,
                    });
                    shares["public"][channel] = json!([share]);
                }
                let name = &file.info["name"];
                // https://docs.slack.dev/reference/methods/files.info
                json!({
                    "ok": true, "comments": [], "response_metadata": {"next_cursor": ""},
                    "file": {
                        "id": arguments["file"], "created": 1_531_763_342, "timestamp": 1_531_763_342, "name": name,
                        "title": name, "mimetype": "text/plain", "filetype": "markdown", "pretty_type": "Markdown",
                        "user": BOT, "editable": true, "size": file.content.len(), "mode": "snippet", "is_external": false,
                        "external_type": "", "is_public": true, "public_url_shared": false, "display_as_bot": false,
                        "username": "", "channels": [], "groups": [], "ims": [], "comments_count": 0,
                        "is_starred": false, "has_rich_preview": false, "shares": shares,
                    },
                })
            }
            None => refuse("file_not_found"),
        }
    }
}

/// The messages of a thread, each marked as part of it
/// (<https://docs.slack.dev/reference/methods/conversations.replies>).
fn threaded(mut messages: Vec<Value>, thread: &str) -> Vec<Value> {
    let replies: Vec<Value> =
        messages.iter().filter(|message| message["ts"] != thread).cloned().collect();
    let begun_by =
        messages.iter().find(|message| message["ts"] == thread).map(|root| root["user"].clone());
    for message in &mut messages {
        if message["ts"] != thread {
            message["parent_user_id"] = begun_by.clone().unwrap_or_default();
        } else if let Some(last) = replies.last() {
            message["thread_ts"] = thread.into();
            message["reply_count"] = replies.len().into();
            message["latest_reply"] = last["ts"].clone();
            message["subscribed"] = true.into();
            message["last_read"] = last["ts"].clone();
        }
    }
    messages
}

/// A view as it is answered (<https://docs.slack.dev/reference/methods/views.open>, likewise
/// `views.publish`).
fn view(sent: &Value, team: &str, id: &str) -> Value {
    let mut view = json!({
        "id": id, "team_id": team, "app_id": "A0APP", "bot_id": "B0BOT", "hash": "156772938.1827394", "state": {"values": {}},
        "clear_on_close": false, "notify_on_close": false, "private_metadata": "", "callback_id": "", "external_id": "",
        "previous_view_id": null, "root_view_id": id,
    });
    for (name, value) in sent.as_object().into_iter().flatten() {
        view[name] = value.clone();
    }
    view
}

/// A page of messages; metadata only on request.
fn page(mut messages: Vec<Value>, arguments: &Value) -> Value {
    if arguments["include_all_metadata"] != "true" {
        for message in &mut messages {
            message["metadata"] = Value::Null;
        }
    }
    let number = |name: &str| arguments[name].as_str().and_then(|text| text.parse::<usize>().ok());
    let begin = number("cursor").unwrap_or(0);
    let limit = number("limit").unwrap_or(100);
    if limit > 1000 {
        return refuse("invalid_limit");
    }
    let end = (begin + limit).min(messages.len());
    let next = if end < messages.len() { end.to_string() } else { String::new() };
    let shown = messages.get(begin..end).unwrap_or_default();
    json!({"ok": true, "messages": shown, "has_more": !next.is_empty(), "response_metadata": {"next_cursor": next}})
}
