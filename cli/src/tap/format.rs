//! Formats one message of the mesh as a line or as JSON.

use std::io;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    console::{Sink, Style},
    json as proto_json,
    text::{clip, columns, one_line, printable},
    time,
};

/// The prefix of every subject.
const SUBJECT_PREFIX: &str = "construct.v1.";
/// The shown bytes of an undecodable payload.
const PREVIEW_BYTES: usize = 32;
/// Fields that a line omits: the subject or the headers contain them, or they matter only in the
/// full output.
const OMITTED_FIELDS: [&str; 8] =
    ["organizationId", "taskId", "id", "cursor", "type", "time", "sequence", "metadata"];

/// The payload of a message.
#[derive(Debug)]
pub(super) enum Payload {
    Empty,
    Decoded(Value),
    /// Not decodable: the type is unknown, or the bytes are not of the type.
    Undecodable {
        reason: String,
        bytes: Vec<u8>,
    },
    /// In a blob that cannot be read here.
    Blob(String),
}

impl Payload {
    pub(super) fn read(type_name: Option<&str>, blob: Option<&str>, bytes: &[u8]) -> Self {
        if let (Some(blob), true) = (blob, bytes.is_empty()) {
            return Self::Blob(blob.to_owned());
        }
        let undecodable = |reason: String| Self::Undecodable { reason, bytes: bytes.to_vec() };
        let Some(name) = type_name else {
            return if bytes.is_empty() { Self::Empty } else { undecodable("no type".to_owned()) };
        };
        match proto_json::decode(name, bytes) {
            Ok(mut value) => {
                // A valid credential.
                if let Some(token) = value.get_mut("modelToken") {
                    *token = json!("***");
                }
                Self::Decoded(value)
            }
            Err(proto_json::Error::UnknownType) => undecodable(format!("unknown type {name}")),
            Err(proto_json::Error::Undecodable) => undecodable(format!("not a {name}")),
        }
    }
}

/// A received message.
#[derive(Debug)]
pub(super) struct TappedMessage {
    pub(super) time: Timestamp,
    pub(super) subject: String,
    pub(super) type_name: Option<String>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) payload: Payload,
}

impl TappedMessage {
    /// Writes a line for people: time, subject, type and clipped content. With `full`, also headers
    /// and the whole content.
    pub(super) fn write(&self, full: bool, sink: &mut dyn Sink) -> io::Result<()> {
        let clock = time::clock(self.time);
        let short = self.subject.strip_prefix(SUBJECT_PREFIX).unwrap_or(&self.subject);
        let subject: Vec<String> = short.split('.').map(shorten).collect();
        let subject = printable(&subject.join("."));
        let kind =
            self.type_name.as_deref().map_or("", |name| name.rsplit('.').next().unwrap_or(name));
        let content = match &self.payload {
            Payload::Empty => String::new(),
            Payload::Decoded(value) => compact(value),
            Payload::Undecodable { reason, bytes } => {
                format!("{reason}: {} bytes {}", bytes.len(), hex_preview(bytes))
            }
            Payload::Blob(blob) => format!("in blob {blob}"),
        };
        let style = if matches!(self.payload, Payload::Undecodable { .. }) {
            Style::Bad
        } else {
            Style::Plain
        };
        let used = columns(&clock) + columns(&subject) + columns(kind) + 6;
        let available = sink.width().saturating_sub(used).max(60);
        let content = if full && matches!(self.payload, Payload::Decoded(_)) {
            String::new()
        } else {
            clip(&one_line(&content), available)
        };
        sink.line(&[
            (Style::Dim, &clock),
            (Style::Accent, &format!("  {subject}")),
            (Style::Person, &format!("  {kind}")),
            (style, &format!("  {content}")),
        ])?;
        if !full {
            return Ok(());
        }
        for (name, value) in &self.headers {
            sink.line(&[(Style::Dim, &format!("    {name}: {value}"))])?;
        }
        if let Payload::Decoded(value) = &self.payload {
            for line in serde_json::to_string_pretty(value).unwrap_or_default().lines() {
                sink.line(&[(Style::Plain, &format!("    {line}"))])?;
            }
        }
        Ok(())
    }

    /// The message as JSON.
    pub(super) fn json(&self) -> Value {
        let headers: serde_json::Map<String, Value> = self
            .headers
            .iter()
            .map(|(name, value)| (name.clone(), Value::from(value.as_str())))
            .collect();
        let mut message = json!({ "time": self.time.to_string(), "subject": self.subject, "type": self.type_name, "headers": headers });
        match &self.payload {
            Payload::Empty => {}
            Payload::Decoded(value) => message["payload"] = value.clone(),
            Payload::Undecodable { reason, bytes } => {
                message["undecodable"] = Value::from(reason.as_str());
                message["payload_hex"] = Value::from(hex(bytes));
            }
            Payload::Blob(blob) => message["blob"] = Value::from(blob.as_str()),
        }
        message
    }
}

/// Shortens an id to its end: ids created at the same time differ only there.
fn shorten(token: &str) -> String {
    match token.rsplit_once('_') {
        Some((prefix, uuid)) if uuid.len() == 36 && uuid.is_ascii() => {
            format!("{prefix}_…{}", &uuid[28..])
        }
        _ => token.to_owned(),
    }
}

/// Formats fields and values in one line, with quotes only where needed.
fn compact(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let shown_fields =
                fields.iter().filter(|(name, _)| !OMITTED_FIELDS.contains(&name.as_str()));
            let shown_fields = shown_fields.map(|(name, value)| match value {
                Value::Object(_) => format!("{name} {{ {} }}", compact(value)),
                _ => format!("{name}={}", compact(value)),
            });
            shown_fields.collect::<Vec<_>>().join(" ")
        }
        Value::Array(items) => {
            format!("[{}]", items.iter().map(compact).collect::<Vec<_>>().join(", "))
        }
        Value::String(text) => shorten_text(text),
        Value::Null | Value::Bool(_) | Value::Number(_) => value.to_string(),
    }
}

fn shorten_text(text: &str) -> String {
    let short = shorten(text);
    if short.is_empty() || short.chars().any(char::is_whitespace) {
        Value::from(short).to_string()
    } else {
        short
    }
}

fn hex_preview(bytes: &[u8]) -> String {
    let ellipsis = if bytes.len() > PREVIEW_BYTES { "…" } else { "" };
    hex(&bytes[..bytes.len().min(PREVIEW_BYTES)]) + ellipsis
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use construct_proto::{mesh::v1::TaskWake, v1};
    use prost::Message as _;

    use super::*;
    use crate::console::{Color, tests::buffered_console};

    const TASK: &str = "task_01890a5d-ac96-774b-bcce-b302099a8057";

    fn message(subject: &str, type_name: Option<&str>, bytes: &[u8]) -> TappedMessage {
        TappedMessage {
            time: Timestamp::UNIX_EPOCH,
            subject: subject.to_owned(),
            type_name: type_name.map(str::to_owned),
            headers: vec![("Nats-Msg-Id".to_owned(), "7".to_owned())],
            payload: Payload::read(type_name, None, bytes),
        }
    }

    fn text(message: &TappedMessage, full: bool) -> String {
        let (mut console, _, status) = buffered_console(false, Color::Never);
        message.write(full, &mut console).unwrap();
        // Without the time, which depends on the time zone.
        status
            .text()
            .lines()
            .map(|line| if line.starts_with(' ') { line } else { &line[14..] })
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn wake_is_one_line() {
        let wake = TaskWake {
            organization_id: "org".to_owned(),
            task_id: TASK.to_owned(),
            reason: "a message was created".to_owned(),
        };
        let message = message(
            &format!("construct.v1.cmd.task.wake.3.{TASK}"),
            Some("construct.mesh.v1.TaskWake"),
            &wake.encode_to_vec(),
        );
        assert_eq!(
            text(&message, false),
            r#"cmd.task.wake.3.task_…099a8057  TaskWake  reason="a message was created""#
        );
        let full = text(&message, true);
        assert!(
            full.contains("    Nats-Msg-Id: 7\n    {\n      \"organizationId\": \"org\",\n"),
            "{full}"
        );
        assert_eq!(message.json()["payload"]["reason"], "a message was created");
    }

    #[test]
    fn deltas_are_compact() {
        let delta = v1::MessageDelta {
            index: 4,
            block: 0,
            delta: Some(v1::message_delta::Delta::Text("Let me ".to_owned())),
        };
        let event = v1::Event {
            r#type: "message.delta".to_owned(),
            step: 2,
            index: 9,
            payload: Some(v1::event::Payload::MessageDelta(delta)),
            ..v1::Event::default()
        };
        let message = message(
            "construct.v1.delta.org.task.x",
            Some("construct.v1.Event"),
            &event.encode_to_vec(),
        );
        let line = text(&message, false);
        assert_eq!(
            line,
            r#"delta.org.task.x  Event  step=2 index=9 messageDelta { index=4 text="Let me " }"#
        );
    }

    #[test]
    fn undecodable_payload_is_shown_as_hex() {
        for (name, reason) in [
            (None, "no type"),
            (Some("x.Y"), "unknown type x.Y"),
            (Some("construct.mesh.v1.TaskWake"), "not a construct.mesh.v1.TaskWake"),
        ] {
            let message = message("construct.v1.x", name, &[0xff, 0x01]);
            assert!(
                text(&message, false).contains(&format!("{reason}: 2 bytes ff01")),
                "{}",
                text(&message, false)
            );
            assert_eq!(message.json()["payload_hex"], "ff01");
        }
        assert!(matches!(
            Payload::read(Some("construct.v1.Event"), Some("sha256:ab"), &[]),
            Payload::Blob(_)
        ));
    }
}
