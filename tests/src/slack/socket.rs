//! Socket Mode (<https://docs.slack.dev/apis/events-api/using-socket-mode>): what Slack sends over
//! a WebSocket. Events that were not confirmed when a connection ends are sent once more over the
//! next one; commands and interactions are lost.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::{accept_async, tungstenite::Message};

use super::{Slack, SlackServer, lock};

/// The time between two checks for messages to send.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

impl SlackServer {
    /// Sends a message over Socket Mode; returns the id of its confirmation.
    pub fn send_over_socket(&self, kind: &str, payload: &Value) -> String {
        let mut slack = self.slack();
        slack.issued += 1;
        let id = format!("envelope-{}", slack.issued);
        slack.outgoing.push_back(json!({
            "envelope_id": id, "type": kind, "accepts_response_payload": false, "payload": payload,
            "retry_attempt": 0, "retry_reason": "",
        }));
        id
    }

    /// The same for a kind that may be answered with the confirmation.
    pub fn ask_over_socket(&self, kind: &str, payload: &Value) -> String {
        let id = self.send_over_socket(kind, payload);
        if let Some(envelope) =
            self.slack().outgoing.iter_mut().find(|envelope| envelope["envelope_id"] == id.as_str())
        {
            envelope["accepts_response_payload"] = true.into();
        }
        id
    }

    /// Ends a connection of Socket Mode with this reason (`warning`, `refresh_requested`,
    /// `link_disabled`).
    pub fn disconnect(&self, reason: &str) {
        let debug = json!({"host": "wss-111.slack.com"});
        self.slack()
            .outgoing
            .push_back(json!({"type": "disconnect", "reason": reason, "debug_info": debug}));
    }

    /// Resends unconfirmed messages, as Slack does with events after a while.
    pub fn resend_over_socket(&self) {
        self.slack().resend("timeout");
    }

    /// Breaks all connections of Socket Mode without a closing message.
    pub fn break_connections(&self) {
        self.slack().broken += 1;
    }

    /// The payload of a confirmation.
    pub fn answer_over_socket(&self, envelope: &str) -> Option<Value> {
        self.slack().answers.get(envelope).cloned()
    }

    /// Whether a message was confirmed over Socket Mode.
    pub fn is_confirmed(&self, envelope: &str) -> bool {
        self.slack().confirmed.contains(envelope)
    }

    /// The number of Socket Mode connections so far.
    pub fn connections(&self) -> usize {
        self.slack().connections
    }
}

impl Slack {
    /// Resends the unconfirmed events.
    pub(super) fn resend(&mut self, why: &str) {
        for (_, mut envelope) in std::mem::take(&mut self.unconfirmed) {
            if envelope["type"] == "events_api" {
                let attempt = envelope["retry_attempt"].as_u64().unwrap_or(0);
                (envelope["retry_attempt"], envelope["retry_reason"]) =
                    ((attempt + 1).into(), why.into());
                self.outgoing.push_back(envelope);
            }
        }
    }

    fn confirm(&mut self, answer: &Value) {
        let id = answer["envelope_id"].as_str().unwrap_or_default().to_owned();
        if id.is_empty() {
            self.complaints.push(format!("something is confirmed that was never sent: {answer}"));
        }
        let envelope = self.unconfirmed.remove(&id);
        if !answer["payload"].is_null() {
            if envelope.is_none_or(|envelope| envelope["accepts_response_payload"] != true) {
                self.complaints.push(format!("an answer is given where none is taken: {answer}"));
            }
            self.answers.insert(id.clone(), answer["payload"].clone());
        }
        self.confirmed.insert(id);
    }
}

pub(super) async fn serve(listener: TcpListener, shared: Arc<Mutex<Slack>>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(connection(stream, Arc::clone(&shared)));
    }
}

async fn connection(stream: TcpStream, shared: Arc<Mutex<Slack>>) -> Option<()> {
    let mut socket = accept_async(stream).await.ok()?;
    let (broken, number) = {
        let mut slack = lock(&shared);
        slack.connections += 1;
        slack.resend("connection closed");
        (slack.broken, slack.connections)
    };
    let hello = json!({
        "type": "hello", "num_connections": 1, "connection_info": {"app_id": "A0APP"},
        "debug_info": {"host": "applink-7fc4fdbb64-4x5xq", "build_number": 10, "approximate_connection_time": 18060},
    });
    socket.send(Message::text(hello.to_string())).await.ok()?;
    let mut looks = tokio::time::interval(POLL_INTERVAL);
    loop {
        tokio::select! {
            message = socket.next() => {
                if let Message::Text(text) = message?.ok()? {
                    lock(&shared).confirm(&serde_json::from_str(&text).unwrap_or_default());
                }
            }
            _ = looks.tick() => {
                let next = {
                    let mut slack = lock(&shared);
                    if slack.broken != broken {
                        return None;
                    }
                    let next = slack.outgoing.pop_front();
                    if let Some(next) = next.as_ref().filter(|next| next["type"] != "disconnect") {
                        slack.unconfirmed.insert(next["envelope_id"].as_str().unwrap_or_default().to_owned(), next.clone());
                    }
                    next
                };
                if let Some(next) = next {
                    let last = next["type"] == "disconnect";
                    socket.send(Message::text(next.to_string())).await.ok()?;
                    if last {
                        drain(socket, &shared).await;
                        let mut slack = lock(&shared);
                        if slack.connections == number {
                            slack.complaints.push("a connection that was to be replaced ended before the next one was there".to_owned());
                        }
                        return None;
                    }
                }
            }
        }
    }
}

/// A connection that is being replaced: it accepts confirmations, and nothing is sent over it any
/// more.
async fn drain(
    mut socket: tokio_tungstenite::WebSocketStream<TcpStream>,
    shared: &Mutex<Slack>,
) -> Option<()> {
    loop {
        if let Message::Text(text) = socket.next().await?.ok()? {
            lock(shared).confirm(&serde_json::from_str(&text).unwrap_or_default());
        }
    }
}
