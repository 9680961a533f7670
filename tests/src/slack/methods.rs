//! The methods of the Web API.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{ANN, APP_TOKEN, BOT, CLIENT_ID, CLIENT_SECRET, File, Slack, TEAM};

/// The shortest time between two edits of a message that is not complained about. Slack's own limit is per workspace; the promise is one
/// a second, less the time that a request takes on its way.
const EDIT: Duration = Duration::from_millis(700);

/// Characters of all blocks of a message. Slack takes a few more.
const CHARACTERS: usize = 12_000;

/// What the app is given.
const SCOPES: &str = "app_mentions:read,channels:history,chat:write,commands,files:read,files:write,links:read,links:write,\
                      users:read,im:history";

fn refuse(code: &str) -> Value {
    json!({"ok": false, "error": code})
}

impl Slack {
    /// Names for messages rise with time, whoever posts them.
    pub(crate) fn next_ts(&mut self) -> String {
        self.clock += 1_000_123;
        format!("{}.{:06}", self.clock / 1_000_000, self.clock % 1_000_000)
    }

    fn complain(&mut self, what: String) {
        self.complaints.push(what);
    }

    /// Carries a call out.
    pub(crate) fn call(&mut self, method: &str, authorization: &str, arguments: &Value) -> Value {
        if method == "oauth.v2.access" {
            return self.access(authorization, arguments);
        }
        let token = authorization.strip_prefix("Bearer ").unwrap_or_default();
        if method == "apps.connections.open" {
            let known = token == APP_TOKEN;
            return if known { json!({"ok": true, "url": self.socket}) } else { refuse("not_allowed_token_type") };
        }
        if arguments["token"].is_string() {
            self.complain(format!("{method}: the token stands among the arguments"));
        }
        let Some(scopes) = self.tokens.get(token).cloned() else { return refuse("invalid_auth") };
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
            "auth.test" => {
                json!({"ok": true, "url": "https://example.slack.com/", "team": "Example", "user": "construct",
                                  "team_id": TEAM, "user_id": BOT, "bot_id": "B0BOT", "is_enterprise_install": false})
            }
            "chat.postMessage" => self.post(arguments),
            "chat.update" => self.update(arguments),
            "chat.postEphemeral" => {
                self.whispers.push(arguments.clone());
                json!({"ok": true, "message_ts": "1.1"})
            }
            "chat.unfurl" => {
                self.unfurls.push(arguments.clone());
                json!({"ok": true})
            }
            "conversations.replies" => self.replies(arguments),
            "conversations.history" => self.history(arguments),
            "users.info" => match self.users.get(arguments["user"].as_str().unwrap_or_default()) {
                Some(user) => json!({"ok": true, "user": user}),
                None => refuse("user_not_found"),
            },
            "files.getUploadURLExternal" => {
                let id = format!("F{}", self.files.len());
                let info = json!({"id": id, "name": arguments["filename"], "length": arguments["length"]});
                self.files.insert(id.clone(), File { info, ..File::default() });
                json!({"ok": true, "upload_url": format!("{}/upload/{id}", self.base), "file_id": id})
            }
            "files.completeUploadExternal" => self.complete(arguments),
            "files.info" => self.file_info(arguments),
            "views.publish" => {
                self.home
                    .insert(arguments["user_id"].as_str().unwrap_or_default().to_owned(), arguments["view"].clone());
                json!({"ok": true, "view": arguments["view"]})
            }
            "views.open" => {
                self.forms.push(arguments["view"].clone());
                json!({"ok": true, "view": arguments["view"]})
            }
            _ => {
                self.complain(format!("there is no method {method}"));
                refuse("unknown_method")
            }
        }
    }

    pub(crate) fn give_token(&mut self) -> String {
        self.issued += 1;
        let token = format!("xoxb-{}", self.issued);
        self.tokens.insert(token.clone(), SCOPES.split(',').map(str::to_owned).collect());
        token
    }

    fn access(&mut self, authorization: &str, arguments: &Value) -> Value {
        use base64::{Engine as _, engine::general_purpose::STANDARD};
        let app = STANDARD.encode(format!("{CLIENT_ID}:{CLIENT_SECRET}"));
        if authorization != format!("Basic {app}") {
            return refuse("bad_client_secret");
        }
        let renewed = arguments["grant_type"] == "refresh_token";
        let given = arguments[if renewed { "refresh_token" } else { "code" }].as_str().unwrap_or_default().to_owned();
        let known = if renewed { self.refresh.remove(&given) } else { self.codes.remove(&given) };
        if !known {
            return refuse(if renewed { "invalid_refresh_token" } else { "invalid_code" });
        }
        let token = self.give_token();
        let refresh = format!("xoxe-1-{}", self.issued);
        let mut answer = json!({
            "ok": true, "access_token": token, "token_type": "bot", "scope": SCOPES, "bot_user_id": BOT, "app_id": "A0APP",
            "team": {"name": "Example", "id": TEAM}, "enterprise": null, "is_enterprise_install": false,
            "authed_user": {"id": ANN},
        });
        if self.rotates {
            self.refresh.insert(refresh.clone());
            answer["refresh_token"] = refresh.into();
            // Less than what a token is renewed before its end.
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
            let elements = elements.iter().map(|element| length(&element["text"]) + length(&element["text"]["text"]));
            length(&block["text"]["text"]) + elements.sum::<usize>()
        });
        if shown.sum::<usize>() > CHARACTERS {
            return Err(refuse("msg_blocks_too_long"));
        }
        for block in &blocks {
            let text = block["text"]["text"].as_str().unwrap_or_default();
            let limit = if block["type"] == "header" { 150 } else { 3000 };
            let empty = text.is_empty() && matches!(block["type"].as_str(), Some("section" | "header"));
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
        let channel = arguments["channel"].as_str().unwrap_or_default().to_owned();
        let Some(messages) = self.channels.get(&channel) else { return refuse("not_in_channel") };
        let thread = &arguments["thread_ts"];
        if !thread.is_null() && !messages.iter().any(|message| message["ts"] == *thread) {
            return refuse("thread_not_found");
        }
        let ts = self.next_ts();
        let mut message = json!({
            "type": "message", "subtype": null, "user": BOT, "bot_id": "B0BOT", "app_id": "A0APP", "team": TEAM, "ts": ts,
            "text": arguments["text"], "blocks": arguments["blocks"], "metadata": arguments["metadata"],
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
        let Some(messages) = self.channels.get_mut(&channel) else { return refuse("channel_not_found") };
        let Some(message) = messages.iter_mut().find(|message| message["ts"] == ts.as_str()) else {
            return refuse("message_not_found");
        };
        if message["user"] != BOT {
            return refuse("cant_update_message");
        }
        let progress = [&message["text"], &arguments["text"]]
            .into_iter()
            .any(|text| text.as_str().is_some_and(|text| text.starts_with("Working")));
        message["text"] = arguments["text"].clone();
        message["blocks"] = arguments["blocks"].clone();
        message["edited"] = json!({"user": BOT, "ts": ts});
        let before = self.edits.insert(ts.clone(), Instant::now());
        if progress && before.is_some_and(|before| before.elapsed() < EDIT) {
            self.complain(format!("chat.update: {ts} was edited {:?} before", before.map(|before| before.elapsed())));
        }
        json!({"ok": true, "channel": channel, "ts": ts, "text": arguments["text"]})
    }

    fn replies(&mut self, arguments: &Value) -> Value {
        let text = |name: &str| arguments[name].as_str().unwrap_or_default().to_owned();
        let (thread, oldest, latest) = (text("ts"), text("oldest"), text("latest"));
        let Some(messages) = self.channels.get(&text("channel")) else { return refuse("channel_not_found") };
        if !messages.iter().any(|message| message["ts"] == thread.as_str()) {
            return refuse("thread_not_found");
        }
        let within =
            |ts: &str| (oldest.is_empty() || ts >= oldest.as_str()) && (latest.is_empty() || ts <= latest.as_str());
        let found: Vec<Value> = messages
            .iter()
            .filter(|message| {
                let root = message["ts"] == thread.as_str();
                root || (message["thread_ts"] == thread.as_str() && within(message["ts"].as_str().unwrap_or_default()))
            })
            .cloned()
            .collect();
        page(found, arguments)
    }

    fn history(&mut self, arguments: &Value) -> Value {
        let channel = arguments["channel"].as_str().unwrap_or_default();
        let Some(messages) = self.channels.get(channel) else { return refuse("channel_not_found") };
        let found = messages.iter().rev().filter(|message| message["thread_ts"].is_null()).cloned().collect();
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
        json!({"ok": true, "files": arguments["files"]})
    }

    fn file_info(&self, arguments: &Value) -> Value {
        match self.files.get(arguments["file"].as_str().unwrap_or_default()) {
            Some(file) => {
                let shares = if file.shared.is_empty() { json!({}) } else { json!({"public": {"C": [{"ts": "1"}]}}) };
                json!({"ok": true, "file": {"id": arguments["file"], "shares": shares}})
            }
            None => refuse("file_not_found"),
        }
    }
}

/// A page of messages; metadata only where it is asked for.
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
