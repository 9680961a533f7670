//! The transcript in the form that every vendor accepts: roles alternate, the user begins and ends,
//! exactly one result follows each call, and no text is empty.

use std::collections::VecDeque;

use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use construct_proto::{
    mesh::v1::ChatMessage,
    v1::{Attachment, CodeInterpreterResult, MessageSource, block::Block},
};
use serde_json::{Value, json};

use crate::vendor::Origin;

/// The language of the fenced block in which a model without tool calls writes a script.
pub(crate) const FENCE_LANGUAGE: &str = "construct";

/// The result of a call without one. The transcript always has results; without one, a vendor would
/// reject the whole conversation forever.
const MISSING_RESULT: &str = "No result was recorded for this call: whether it ran is not known.";

/// The author of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    User,
    Assistant,
}

/// Everything one side says before the other answers.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Turn {
    pub(crate) role: Role,
    pub(crate) parts: Vec<Part>,
}

/// A piece of a turn. Calls and thinking occur only in the assistant's turns; results only in the
/// user's, before anything else; media only in the user's.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    Text(String),
    Media(Media),
    /// Thinking of the same provider, to be sent back in the form its vendor requires.
    Thinking {
        text: String,
        data: String,
    },
    Call {
        id: String,
        /// The called tool.
        name: String,
        arguments: Value,
    },
    Result {
        id: String,
        /// The called tool.
        name: String,
        output: String,
        failed: bool,
    },
}

/// The code tool, in which scripts of a transcript are presented to a vendor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CodeTool<'a> {
    pub(crate) name: &'a str,
    /// The argument that holds the script.
    pub(crate) argument: &'a str,
}

/// An image or document. Text files become text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Media {
    /// E.g. `image/png`.
    pub(crate) media_type: String,
    /// May be empty.
    pub(crate) name: String,
    pub(crate) base64: String,
}

impl Part {
    /// The text of a text part.
    pub(crate) fn text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// The output of a result part.
    pub(crate) fn output(&self) -> Option<&str> {
        if let Self::Result { output, .. } = self { Some(output) } else { None }
    }

    /// The characters from which the tokens of the part are estimated.
    pub(crate) fn chars(&self) -> usize {
        match self {
            Self::Text(text) | Self::Result { output: text, .. } => text.len(),
            Self::Call { arguments, .. } => chars(arguments),
            Self::Thinking { text, .. } => text.len(),
            // Vendors count images by their pixels; this is about the cost of a screenshot.
            Self::Media(_) => 6_000,
        }
    }
}

impl Media {
    pub(crate) fn is_image(&self) -> bool {
        self.media_type.starts_with("image/")
    }

    pub(crate) fn is_pdf(&self) -> bool {
        self.media_type == "application/pdf"
    }

    /// A URL that contains the content.
    pub(crate) fn data_url(&self) -> String {
        format!("data:{};base64,{}", self.media_type, self.base64)
    }

    /// The text in place of an attachment that the vendor does not accept. A rejection would block
    /// the conversation forever.
    pub(crate) fn omission_notice(&self) -> String {
        let name = if self.name.is_empty() { "without a name" } else { &self.name };
        notice_text(&format!(
            "The user attached a file ({name}, {}) that cannot be shown to you. Say so if it matters.",
            self.media_type
        ))
    }
}

/// The approximate length of the value as JSON.
fn chars(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(list) => list.iter().map(chars).sum(),
        Value::Object(fields) => {
            fields.iter().map(|(name, value)| name.len() + chars(value) + 4).sum()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => 5,
    }
}

/// Converts `messages` into that form, for the provider `to`. Without a `tool` (a call that offers
/// none) scripts and results become text, because vendors reject tool blocks in a request without
/// tools.
pub(crate) fn turns_from_messages(
    messages: &[ChatMessage],
    tool: Option<CodeTool<'_>>,
    to: &Origin,
) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    for message in messages {
        let role = match message.source() {
            MessageSource::Assistant => Role::Assistant,
            MessageSource::User | MessageSource::System | MessageSource::Unspecified => Role::User,
        };
        let parts = message
            .blocks
            .iter()
            .filter_map(|block| part_from_block(message.source(), block.block.as_ref()?, tool, to));
        match turns.last_mut() {
            Some(last) if last.role == role => last.parts.extend(parts),
            _ => turns.push(Turn { role, parts: parts.collect() }),
        }
    }
    normalize_turns(turns)
}

/// Brings turns of any origin into that form.
pub(crate) fn normalize_turns(turns: Vec<Turn>) -> Vec<Turn> {
    let mut turns = pair_results(turns);
    if turns.first().is_none_or(|first| first.role == Role::Assistant) {
        turns.insert(0, notice_turn("The conversation begins."));
    }
    if turns.last().is_some_and(|last| last.role == Role::Assistant) {
        turns.push(notice_turn("Continue."));
    }
    turns
}

/// Whether the conversation continues from a call that no thinking precedes.
pub(crate) fn continues_call_without_thinking(turns: &[Turn]) -> bool {
    let [.., asked, answered] = turns else { return false };
    answered.parts.iter().any(|part| matches!(part, Part::Result { .. }))
        && !matches!(asked.parts.first(), Some(Part::Thinking { .. }))
}

/// The text of a result as the model sees it.
pub(crate) fn result_text(result: &CodeInterpreterResult) -> String {
    match (result.output.trim_end(), result.error.trim_end()) {
        ("", "") => "(no output)".to_owned(),
        (output, "") => output.to_owned(),
        ("", error) => error.to_owned(),
        (output, error) => format!("{output}\n{error}"),
    }
}

fn part_from_block(
    source: MessageSource,
    block: &Block,
    tool: Option<CodeTool<'_>>,
    to: &Origin,
) -> Option<Part> {
    Some(match (block, tool) {
        (Block::Text(text), _) if text.text.trim().is_empty() => return None,
        (Block::Text(text), _) if source == MessageSource::System => {
            Part::Text(notice_text(&text.text))
        }
        (Block::Text(text), _) => Part::Text(text.text.clone()),
        (Block::CodeInterpreterCall(call), Some(tool)) => {
            let arguments = json!({tool.argument: call.code});
            Part::Call { id: call.id.clone(), name: tool.name.to_owned(), arguments }
        }
        (Block::CodeInterpreterCall(call), None) => Part::Text(fenced_block(&call.code)),
        (Block::CodeInterpreterResult(result), Some(tool)) => Part::Result {
            id: result.id.clone(),
            name: tool.name.to_owned(),
            output: result_text(result),
            failed: !result.error.is_empty(),
        },
        (Block::CodeInterpreterResult(result), None) => {
            Part::Text(format!("<result>\n{}\n</result>", result_text(result)))
        }
        (Block::Thinking(thinking), _)
            if source != MessageSource::Assistant || thinking.provider_id != to.provider_id =>
        {
            return None;
        }
        (Block::Thinking(thinking), _) => {
            Part::Thinking { text: thinking.text.clone(), data: thinking.data.clone() }
        }
        (Block::Attachment(attachment), _) => media_part(attachment),
    })
}

fn media_part(attachment: &Attachment) -> Part {
    let Attachment { media_type, name, data, .. } = attachment;
    if media_type.starts_with("image/") || media_type == "application/pdf" {
        return Part::Media(Media {
            media_type: media_type.clone(),
            name: name.clone(),
            base64: BASE64.encode(data),
        });
    }
    // Every model reads text, even where its vendor does not accept files.
    let name = name.replace('"', "'");
    Part::Text(format!(
        "<file name=\"{name}\" type=\"{media_type}\">\n{}\n</file>",
        String::from_utf8_lossy(data)
    ))
}

/// `code` as a fenced block that no line within it can end.
fn fenced_block(code: &str) -> String {
    let code = code.trim_end_matches('\n');
    let ticks = |line: &str| line.trim_start().chars().take_while(|&c| c == '`').count();
    let fence = "`".repeat(code.lines().map(ticks).max().unwrap_or(0).max(2) + 1);
    format!("{fence}{FENCE_LANGUAGE}\n{code}\n{fence}")
}

/// Moves the result of each call to the beginning of the next turn.
fn pair_results(turns: Vec<Turn>) -> Vec<Turn> {
    let mut paired: Vec<Turn> = Vec::with_capacity(turns.len() + 1);
    let mut open: Vec<OpenCall> = Vec::new();
    for turn in turns {
        match turn.role {
            Role::Assistant => {
                let parts = assistant_parts(turn.parts, &mut open);
                push_turn(&mut paired, Role::Assistant, parts);
            }
            Role::User => {
                let parts = user_parts(turn.parts, std::mem::take(&mut open));
                push_turn(&mut paired, Role::User, parts);
            }
        }
    }
    if !open.is_empty() {
        let parts = user_parts(Vec::new(), open);
        push_turn(&mut paired, Role::User, parts);
    }
    paired
}

fn push_turn(turns: &mut Vec<Turn>, role: Role, parts: Vec<Part>) {
    match turns.last_mut() {
        // Thinking alone says nothing, and no vendor accepts such a turn.
        _ if parts.iter().all(|part| matches!(part, Part::Thinking { .. })) => {}
        // The turn between the two was empty and was dropped.
        Some(last) if last.role == role => last.parts.extend(parts),
        _ => turns.push(Turn { role, parts }),
    }
}

/// A call of the assistant's last turn.
struct OpenCall {
    /// The original id.
    id: String,
    /// The id that is sent.
    sent_id: String,
    name: String,
}

/// The calls of a turn get ids that every vendor accepts and that are unique within the turn: a
/// conversation may continue at another vendor than the one that assigned them.
fn assistant_parts(parts: Vec<Part>, open: &mut Vec<OpenCall>) -> Vec<Part> {
    parts
        .into_iter()
        .filter_map(|part| match part {
            Part::Call { id, name, arguments } => {
                let sent = unique_id(&id, open);
                open.push(OpenCall { id, sent_id: sent.clone(), name: name.clone() });
                Some(Part::Call { id: sent, name, arguments })
            }
            Part::Text(_) | Part::Thinking { .. } => Some(part),
            Part::Result { .. } | Part::Media(_) => None,
        })
        .collect()
}

fn user_parts(parts: Vec<Part>, open: Vec<OpenCall>) -> Vec<Part> {
    let mut results: VecDeque<(String, String, bool)> = VecDeque::new();
    let mut rest = Vec::new();
    for part in parts {
        match part {
            Part::Result { id, output, failed, .. } => results.push_back((id, output, failed)),
            Part::Text(_) | Part::Media(_) => rest.push(part),
            Part::Call { .. } | Part::Thinking { .. } => {}
        }
    }
    let mut parts: Vec<Part> = open
        .into_iter()
        .map(|OpenCall { id, sent_id, name }| {
            match results.iter().position(|(of, ..)| *of == id).and_then(|at| results.remove(at)) {
                Some((_, output, failed)) => Part::Result { id: sent_id, name, output, failed },
                None => Part::Result {
                    id: sent_id,
                    name,
                    output: MISSING_RESULT.to_owned(),
                    failed: true,
                },
            }
        })
        .collect();
    // A result whose call is not in the preceding turn is still useful.
    parts.extend(results.into_iter().map(|(_, output, _)| Part::Text(notice_text(&output))));
    parts.extend(rest);
    parts
}

fn unique_id(id: &str, taken: &[OpenCall]) -> String {
    let mut base: String = id
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' })
        .take(56)
        .collect();
    if base.is_empty() {
        base = format!("call_{}", taken.len() + 1);
    }
    let is_taken = |candidate: &str| taken.iter().any(|open| open.sent_id == candidate);
    if !is_taken(&base) {
        return base;
    }
    (2..).map(|n| format!("{base}_{n}")).find(|candidate| !is_taken(candidate)).unwrap_or(base)
}

fn notice_turn(text: &str) -> Turn {
    Turn { role: Role::User, parts: vec![Part::Text(notice_text(text))] }
}

/// Marks text of the system, so that a model does not take it for the user's words.
pub(crate) fn notice_text(text: &str) -> String {
    format!("<system-notice>\n{text}\n</system-notice>")
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::{self, CodeInterpreterCall, Text};

    use super::*;

    fn turns(messages: &[ChatMessage], tools: bool) -> Vec<Turn> {
        turns_from_messages(
            messages,
            tools.then_some(CodeTool { name: "run", argument: "code" }),
            &Origin { vendor: "v".into(), provider_id: "p".into() },
        )
    }

    fn message(source: MessageSource, blocks: Vec<Block>) -> ChatMessage {
        ChatMessage {
            source: source.into(),
            blocks: blocks.into_iter().map(|block| v1::Block { block: Some(block) }).collect(),
        }
    }

    fn text(text: &str) -> Block {
        Block::Text(Text { text: text.into() })
    }

    fn call(id: &str) -> Block {
        Block::CodeInterpreterCall(CodeInterpreterCall { id: id.into(), code: "1".into() })
    }

    fn result(id: &str, output: &str) -> Block {
        Block::CodeInterpreterResult(CodeInterpreterResult {
            id: id.into(),
            output: output.into(),
            ..CodeInterpreterResult::default()
        })
    }

    fn sent_result(id: &str, output: &str) -> Part {
        Part::Result { id: id.into(), name: "run".into(), output: output.into(), failed: false }
    }

    use MessageSource::{Assistant, System, User};

    #[test]
    fn results_are_paired_with_their_calls_and_come_first() {
        let turns = turns(
            &[
                message(User, vec![text("go")]),
                message(Assistant, vec![text("two"), call("a"), call("b")]),
                message(System, vec![result("b", "B"), result("a", "A")]),
                message(User, vec![text("also this")]),
            ],
            true,
        );
        assert_eq!(turns.len(), 3);
        assert_eq!(
            turns[2].parts,
            [sent_result("a", "A"), sent_result("b", "B"), Part::Text("also this".into())]
        );
    }

    #[test]
    fn call_without_result_gets_a_result() {
        let turns =
            turns(&[message(User, vec![text("go")]), message(Assistant, vec![call("a")])], true);
        assert_eq!(
            turns[2].parts,
            [Part::Result {
                id: "a".into(),
                name: "run".into(),
                output: MISSING_RESULT.into(),
                failed: true
            }]
        );
    }

    #[test]
    fn result_without_call_becomes_text() {
        let turns = turns(
            &[message(User, vec![text("go")]), message(System, vec![result("x", "lost")])],
            true,
        );
        assert_eq!(turns.len(), 1);
        assert!(
            matches!(&turns[0].parts[..], [Part::Text(notice), Part::Text(_)] if notice.contains("lost"))
        );
    }

    #[test]
    fn repeated_and_invalid_call_ids_are_renamed_with_their_results() {
        let turns = turns(
            &[
                message(User, vec![text("go")]),
                message(Assistant, vec![call("x:1"), call("x:1"), call("")]),
                message(System, vec![result("x:1", "1"), result("x:1", "2"), result("", "3")]),
            ],
            true,
        );
        assert_eq!(
            turns[2].parts,
            [sent_result("x_1", "1"), sent_result("x_1_2", "2"), sent_result("call_3", "3")]
        );
    }

    #[test]
    fn roles_alternate_and_user_begins_and_ends() {
        let turns = turns(
            &[
                message(Assistant, vec![text("hello")]),
                message(User, vec![text("  ")]),
                message(Assistant, vec![text("again")]),
            ],
            true,
        );
        let roles: Vec<Role> = turns.iter().map(|turn| turn.role).collect();
        assert_eq!(roles, [Role::User, Role::Assistant, Role::User]);
        assert_eq!(turns[1].parts.len(), 2);
    }

    #[test]
    fn system_text_is_marked_as_notice() {
        let turns = turns(&[message(System, vec![text("limits changed")])], true);
        assert_eq!(
            turns[0].parts,
            [Part::Text("<system-notice>\nlimits changed\n</system-notice>".into())]
        );
    }

    #[test]
    fn scripts_become_text_without_tools() {
        let turns = turns(
            &[
                message(User, vec![text("go")]),
                message(Assistant, vec![call("a")]),
                message(System, vec![result("a", "A")]),
            ],
            false,
        );
        assert_eq!(turns[1].parts, [Part::Text("```construct\n1\n```".into())]);
        assert_eq!(turns[2].parts, [Part::Text("<result>\nA\n</result>".into())]);
    }

    fn thinking(provider_id: &str, text: &str) -> Block {
        let (text, data) = (text.into(), "sealed".into());
        Block::Thinking(v1::Thinking {
            text,
            vendor: "v".into(),
            provider_id: provider_id.into(),
            data,
        })
    }

    #[test]
    fn thinking_is_replayed_to_its_provider_and_never_alone() {
        let turns = turns(
            &[
                message(User, vec![text("go")]),
                message(
                    Assistant,
                    vec![thinking("p", "mine"), thinking("q", "not mine"), call("a")],
                ),
                message(System, vec![result("a", "A")]),
                message(Assistant, vec![thinking("p", "cut before it said anything")]),
                message(User, vec![text("again"), thinking("p", "what no user can have")]),
            ],
            true,
        );
        let thought = Part::Thinking { text: "mine".into(), data: "sealed".into() };
        assert_eq!(
            turns[1].parts,
            [
                thought,
                Part::Call { id: "a".into(), name: "run".into(), arguments: json!({"code": "1"}) }
            ]
        );
        assert_eq!(turns[2].parts, [sent_result("a", "A"), Part::Text("again".into())]);
        assert_eq!(turns.len(), 3);
    }

    #[test]
    fn text_files_become_text_and_other_files_stay_media() {
        let attachment = |media_type: &str, name: &str, data: &[u8]| {
            let (media_type, name) = (media_type.into(), name.into());
            Block::Attachment(Attachment {
                media_type,
                name,
                data: data.into(),
                ..Attachment::default()
            })
        };
        let turns = turns(
            &[message(
                User,
                vec![
                    attachment("text/csv", "a\"b.csv", b"1,2"),
                    attachment("image/png", "", &[0xFF]),
                ],
            )],
            true,
        );
        assert_eq!(
            turns[0].parts[0],
            Part::Text("<file name=\"a'b.csv\" type=\"text/csv\">\n1,2\n</file>".into())
        );
        let Part::Media(media) = &turns[0].parts[1] else { panic!("not media: {turns:?}") };
        assert_eq!(media.data_url(), "data:image/png;base64,/w==");
        assert!(media.omission_notice().contains("image/png"));
    }

    #[test]
    fn script_containing_fences_gets_a_longer_fence() {
        assert_eq!(fenced_block("f(`\n````\n`)"), "`````construct\nf(`\n````\n`)\n`````");
    }

    #[test]
    fn result_error_follows_the_output() {
        let result = CodeInterpreterResult {
            output: "half\n".into(),
            error: "Error: no".into(),
            ..Default::default()
        };
        assert_eq!(result_text(&result), "half\nError: no");
        assert_eq!(result_text(&CodeInterpreterResult::default()), "(no output)");
    }
}
