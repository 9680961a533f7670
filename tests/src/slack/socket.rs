//! Socket Mode: what Slack sends over a WebSocket.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{SinkExt as _, StreamExt as _};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpStream};
use tokio_tungstenite::{accept_async, tungstenite::Message};

use super::{Slack, lock};

/// How often it is looked whether there is something to send.
const LOOK: Duration = Duration::from_millis(20);

pub(super) async fn serve(listener: TcpListener, shared: Arc<Mutex<Slack>>) {
    while let Ok((stream, _)) = listener.accept().await {
        tokio::spawn(connection(stream, Arc::clone(&shared)));
    }
}

async fn connection(stream: TcpStream, shared: Arc<Mutex<Slack>>) -> Option<()> {
    let mut socket = accept_async(stream).await.ok()?;
    lock(&shared).connections += 1;
    socket.send(Message::text(json!({"type": "hello", "num_connections": 1}).to_string())).await.ok()?;
    let mut looks = tokio::time::interval(LOOK);
    loop {
        tokio::select! {
            message = socket.next() => {
                if let Message::Text(text) = message?.ok()? {
                    let answer: Value = serde_json::from_str(&text).unwrap_or_default();
                    lock(&shared).confirmed.insert(answer["envelope_id"].as_str().unwrap_or_default().to_owned());
                }
            }
            _ = looks.tick() => {
                let next = lock(&shared).outgoing.pop_front();
                if let Some(next) = next {
                    socket.send(Message::text(next.to_string())).await.ok()?;
                }
            }
        }
    }
}
