//! One message of the mesh, as a line or as JSON.

use std::io;

use jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    console::{Sink, Style},
    json as proto_json, time,
    words::{clip, columns, one_line, printable},
};

/// What every subject begins with.
const ROOT: &str = "construct.v1.";
/// How many bytes of an undecodable payload are shown.
const PREVIEW: usize = 32;
/// Fields that a line leaves out: the subject or the headers say the same, or they are of interest
/// only in full.
const KNOWN: [&str; 8] =
    ["organizationId", "taskId", "id", "cursor", "type", "time", "sequence", "metadata"];

/// What a message holds.
#[derive(Debug)]
pub(super) enum Payload {
    Empty,
    Decoded(Value),
    /// Of no known type, or not what its type says.
    Bytes {
        why: String,
        bytes: Vec<u8>,
    },
    /// Too large for a message, and its folder is not known or does not have it.
    Elsewhere(String),
}

impl Payload {
    pub(super) fn read(type_name: Option<&str>, blob: Option<&str>, bytes: &[u8]) -> Self {
        if let (Some(blob), true) = (blob, bytes.is_empty()) {
            return Self::Elsewhere(blob.to_owned());
        }
        let undecodable = |why: String| Self::Bytes { why, bytes: bytes.to_vec() };
        let Some(name) = type_name else {
            return if bytes.is_empty() { Self::Empty } else { undecodable("no type".to_owned()) };
        };
        match proto_json::decode(name, bytes) {
            Ok(mut value) => {
                // Whoever sees it could use it.
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

/// One message.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) time: Timestamp,
    pub(super) subject: String,
    pub(super) type_name: Option<String>,
    pub(super) headers: Vec<(String, String)>,
    pub(super) payload: Payload,
}

impl Shown {
    /// For people: when, where, what, and its content as far as the line goes.
    pub(super) fn write(&self, full: bool, sink: &mut dyn Sink) -> io::Result<()> {
        let clock = time::clock(self.time);
        let short = self.subject.strip_prefix(ROOT).unwrap_or(&self.subject);
        let subject: Vec<String> = short.split('.').map(shorten).collect();
        let subject = printable(&subject.join("."));
        let kind =
            self.type_name.as_deref().map_or("", |name| name.rsplit('.').next().unwrap_or(name));
        let content = match &self.payload {
            Payload::Empty => String::new(),
            Payload::Decoded(value) => compact(value),
            Payload::Bytes { why, bytes } => format!("{why}: {} bytes {}", bytes.len(), hex(bytes)),
            Payload::Elsewhere(blob) => format!("in blob {blob}"),
        };
        let style =
            if matches!(self.payload, Payload::Bytes { .. }) { Style::Bad } else { Style::Plain };
        let used = columns(&clock) + columns(&subject) + columns(kind) + 6;
        let room = sink.width().saturating_sub(used).max(60);
        let content = if full && matches!(self.payload, Payload::Decoded(_)) {
            String::new()
        } else {
            clip(&one_line(&content), room)
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

    /// For machines.
    pub(super) fn json(&self) -> Value {
        let headers: serde_json::Map<String, Value> = self
            .headers
            .iter()
            .map(|(name, value)| (name.clone(), Value::from(value.as_str())))
            .collect();
        let mut whole = json!({ "time": self.time.to_string(), "subject": self.subject, "type": self.type_name, "headers": headers });
        match &self.payload {
            Payload::Empty => {}
            Payload::Decoded(value) => whole["payload"] = value.clone(),
            Payload::Bytes { why, bytes } => {
                whole["undecodable"] = Value::from(why.as_str());
                whole["payload_hex"] = Value::from(all_hex(bytes));
            }
            Payload::Elsewhere(blob) => whole["blob"] = Value::from(blob.as_str()),
        }
        whole
    }
}

/// An id by its end, which alone differs between those that were made at the same time.
fn shorten(token: &str) -> String {
    match token.rsplit_once('_') {
        Some((prefix, uuid)) if uuid.len() == 36 && uuid.is_ascii() => {
            format!("{prefix}_…{}", &uuid[28..])
        }
        _ => token.to_owned(),
    }
}

/// Fields and values in one line, without quotes around what needs none.
fn compact(value: &Value) -> String {
    match value {
        Value::Object(fields) => {
            let shown = fields.iter().filter(|(name, _)| !KNOWN.contains(&name.as_str()));
            let shown = shown.map(|(name, value)| match value {
                Value::Object(_) => format!("{name} {{ {} }}", compact(value)),
                _ => format!("{name}={}", compact(value)),
            });
            shown.collect::<Vec<_>>().join(" ")
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

fn hex(bytes: &[u8]) -> String {
    let more = if bytes.len() > PREVIEW { "…" } else { "" };
    all_hex(&bytes[..bytes.len().min(PREVIEW)]) + more
}

fn all_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use construct_proto::{mesh::v1::TaskWake, v1};
    use prost::Message as _;

    use super::*;
    use crate::console::{Color, tests::paper};

    const TASK: &str = "task_01890a5d-ac96-774b-bcce-b302099a8057";

    fn shown(subject: &str, type_name: Option<&str>, bytes: &[u8]) -> Shown {
        Shown {
            time: Timestamp::UNIX_EPOCH,
            subject: subject.to_owned(),
            type_name: type_name.map(str::to_owned),
            headers: vec![("Nats-Msg-Id".to_owned(), "7".to_owned())],
            payload: Payload::read(type_name, None, bytes),
        }
    }

    fn text(shown: &Shown, full: bool) -> String {
        let (mut console, _, aside) = paper(false, Color::Never);
        shown.write(full, &mut console).unwrap();
        // What remains does not depend on the time zone.
        aside
            .text()
            .lines()
            .map(|line| if line.starts_with(' ') { line } else { &line[14..] })
            .collect::<Vec<_>>()
            .join("\n")
    }

    #[test]
    fn a_wake_is_one_line() {
        let wake = TaskWake {
            organization_id: "org".to_owned(),
            task_id: TASK.to_owned(),
            reason: "a message came".to_owned(),
        };
        let shown = shown(
            &format!("construct.v1.cmd.task.wake.3.{TASK}"),
            Some("construct.mesh.v1.TaskWake"),
            &wake.encode_to_vec(),
        );
        assert_eq!(
            text(&shown, false),
            r#"cmd.task.wake.3.task_…099a8057  TaskWake  reason="a message came""#
        );
        let full = text(&shown, true);
        assert!(
            full.contains("    Nats-Msg-Id: 7\n    {\n      \"organizationId\": \"org\",\n"),
            "{full}"
        );
        assert_eq!(shown.json()["payload"]["reason"], "a message came");
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
        let shown = shown(
            "construct.v1.delta.org.task.x",
            Some("construct.v1.Event"),
            &event.encode_to_vec(),
        );
        let line = text(&shown, false);
        assert_eq!(
            line,
            r#"delta.org.task.x  Event  step=2 index=9 messageDelta { index=4 text="Let me " }"#
        );
    }

    #[test]
    fn what_cannot_be_decoded_is_shown_as_bytes() {
        for (name, why) in [
            (None, "no type"),
            (Some("x.Y"), "unknown type x.Y"),
            (Some("construct.mesh.v1.TaskWake"), "not a construct.mesh.v1.TaskWake"),
        ] {
            let shown = shown("construct.v1.x", name, &[0xff, 0x01]);
            assert!(
                text(&shown, false).contains(&format!("{why}: 2 bytes ff01")),
                "{}",
                text(&shown, false)
            );
            assert_eq!(shown.json()["payload_hex"], "ff01");
        }
        assert!(matches!(
            Payload::read(Some("construct.v1.Event"), Some("sha256:ab"), &[]),
            Payload::Elsewhere(_)
        ));
    }
}
