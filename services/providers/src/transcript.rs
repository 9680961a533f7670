//! Our transcript in the shape every vendor accepts: sides alternate, the user begins and ends, each call is followed
//! by exactly one result, and no text is empty.

use std::collections::VecDeque;

use construct_proto::{
    mesh::v1::ChatMessage,
    v1::{CodeInterpreterResult, MessageSource, block::Block},
};

/// What a call is told whose result is missing. The transcript never lacks one; a vendor would refuse the whole
/// conversation for ever if it did.
const NO_RESULT: &str = "No result was recorded for this call: whether it ran is not known.";

/// Who speaks.
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

/// A piece of a turn. Calls occur only in the assistant's turns, results only in the user's, before any text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Part {
    Text(String),
    Call { id: String, code: String },
    Result { id: String, output: String, failed: bool },
}

/// Brings `messages` into that shape. With `tools` false (a call that offers no tool, e.g. for a title) scripts and
/// results become text, because vendors refuse tool blocks in a request without tools.
pub(crate) fn turns(messages: &[ChatMessage], tools: bool) -> Vec<Turn> {
    let mut turns: Vec<Turn> = Vec::new();
    for message in messages {
        let role = match message.source() {
            MessageSource::Assistant => Role::Assistant,
            MessageSource::User | MessageSource::System | MessageSource::Unspecified => Role::User,
        };
        let parts = message.blocks.iter().filter_map(|block| part(message.source(), block.block.as_ref()?, tools));
        match turns.last_mut() {
            Some(last) if last.role == role => last.parts.extend(parts),
            _ => turns.push(Turn { role, parts: parts.collect() }),
        }
    }
    let mut turns = pair(turns);
    if turns.first().is_none_or(|first| first.role == Role::Assistant) {
        turns.insert(0, notice("The conversation begins."));
    }
    if turns.last().is_some_and(|last| last.role == Role::Assistant) {
        turns.push(notice("Continue."));
    }
    turns
}

/// The text a model is shown of a result.
pub(crate) fn result_text(result: &CodeInterpreterResult) -> String {
    match (result.output.trim_end(), result.error.trim_end()) {
        ("", "") => "(no output)".to_owned(),
        (output, "") => output.to_owned(),
        ("", error) => error.to_owned(),
        (output, error) => format!("{output}\n{error}"),
    }
}

fn part(source: MessageSource, block: &Block, tools: bool) -> Option<Part> {
    Some(match block {
        Block::Text(text) if text.text.trim().is_empty() => return None,
        Block::Text(text) if source == MessageSource::System => Part::Text(notice_text(&text.text)),
        Block::Text(text) => Part::Text(text.text.clone()),
        Block::CodeInterpreterCall(call) if tools => Part::Call { id: call.id.clone(), code: call.code.clone() },
        Block::CodeInterpreterCall(call) => Part::Text(format!("```js\n{}\n```", call.code)),
        Block::CodeInterpreterResult(result) if tools => {
            Part::Result { id: result.id.clone(), output: result_text(result), failed: !result.error.is_empty() }
        }
        Block::CodeInterpreterResult(result) => Part::Text(format!("<result>\n{}\n</result>", result_text(result))),
    })
}

/// Puts each call's result at the beginning of the turn after it.
fn pair(turns: Vec<Turn>) -> Vec<Turn> {
    let mut paired: Vec<Turn> = Vec::with_capacity(turns.len() + 1);
    // Calls of the assistant's last turn: the id they came with, and the one they are sent with.
    let mut open: Vec<(String, String)> = Vec::new();
    for turn in turns {
        match turn.role {
            Role::Assistant => {
                let parts = assistant_parts(turn.parts, &mut open);
                push(&mut paired, Role::Assistant, parts);
            }
            Role::User => {
                let parts = user_parts(turn.parts, std::mem::take(&mut open));
                push(&mut paired, Role::User, parts);
            }
        }
    }
    if !open.is_empty() {
        let parts = user_parts(Vec::new(), open);
        push(&mut paired, Role::User, parts);
    }
    paired
}

fn push(turns: &mut Vec<Turn>, role: Role, parts: Vec<Part>) {
    match turns.last_mut() {
        _ if parts.is_empty() => {}
        // A turn between the two was empty and is gone.
        Some(last) if last.role == role => last.parts.extend(parts),
        _ => turns.push(Turn { role, parts }),
    }
}

/// A turn's calls get ids that every vendor accepts and that differ within the turn: a conversation may go on with
/// another vendor than the one that named them.
fn assistant_parts(parts: Vec<Part>, open: &mut Vec<(String, String)>) -> Vec<Part> {
    parts
        .into_iter()
        .filter_map(|part| match part {
            Part::Call { id, code } => {
                let sent = unique_id(&id, open);
                open.push((id, sent.clone()));
                Some(Part::Call { id: sent, code })
            }
            Part::Text(_) => Some(part),
            Part::Result { .. } => None,
        })
        .collect()
}

fn user_parts(parts: Vec<Part>, open: Vec<(String, String)>) -> Vec<Part> {
    let mut results: VecDeque<(String, String, bool)> = VecDeque::new();
    let mut rest = Vec::new();
    for part in parts {
        match part {
            Part::Result { id, output, failed } => results.push_back((id, output, failed)),
            Part::Text(_) => rest.push(part),
            Part::Call { .. } => {}
        }
    }
    let mut parts: Vec<Part> = open
        .into_iter()
        .map(|(id, sent)| match results.iter().position(|(of, ..)| *of == id).and_then(|at| results.remove(at)) {
            Some((_, output, failed)) => Part::Result { id: sent, output, failed },
            None => Part::Result { id: sent, output: NO_RESULT.to_owned(), failed: true },
        })
        .collect();
    // A result whose call is not in the turn before still says something.
    parts.extend(results.into_iter().map(|(_, output, _)| Part::Text(notice_text(&output))));
    parts.extend(rest);
    parts
}

fn unique_id(id: &str, taken: &[(String, String)]) -> String {
    let mut base: String =
        id.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' }).take(56).collect();
    if base.is_empty() {
        base = format!("call_{}", taken.len() + 1);
    }
    let is_taken = |candidate: &str| taken.iter().any(|(_, sent)| sent == candidate);
    if !is_taken(&base) {
        return base;
    }
    (2..).map(|n| format!("{base}_{n}")).find(|candidate| !is_taken(candidate)).unwrap_or(base)
}

fn notice(text: &str) -> Turn {
    Turn { role: Role::User, parts: vec![Part::Text(notice_text(text))] }
}

/// Marks what the system says, so that a model does not take it for the person's words.
fn notice_text(text: &str) -> String {
    format!("<system-notice>\n{text}\n</system-notice>")
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::{self, CodeInterpreterCall, Text};

    use super::*;

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
        Part::Result { id: id.into(), output: output.into(), failed: false }
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
        assert_eq!(turns[2].parts, [sent_result("a", "A"), sent_result("b", "B"), Part::Text("also this".into())]);
    }

    #[test]
    fn a_call_without_result_gets_one() {
        let turns = turns(&[message(User, vec![text("go")]), message(Assistant, vec![call("a")])], true);
        assert_eq!(turns[2].parts, [Part::Result { id: "a".into(), output: NO_RESULT.into(), failed: true }]);
    }

    #[test]
    fn a_result_without_call_becomes_text() {
        let turns = turns(&[message(User, vec![text("go")]), message(System, vec![result("x", "lost")])], true);
        assert_eq!(turns.len(), 1);
        assert!(matches!(&turns[0].parts[..], [Part::Text(notice), Part::Text(_)] if notice.contains("lost")));
    }

    #[test]
    fn ids_that_repeat_or_that_a_vendor_would_refuse_are_renamed_with_their_results() {
        let turns = turns(
            &[
                message(User, vec![text("go")]),
                message(Assistant, vec![call("x:1"), call("x:1"), call("")]),
                message(System, vec![result("x:1", "1"), result("x:1", "2"), result("", "3")]),
            ],
            true,
        );
        assert_eq!(turns[2].parts, [sent_result("x_1", "1"), sent_result("x_1_2", "2"), sent_result("call_3", "3")]);
    }

    #[test]
    fn sides_alternate_and_the_user_begins_and_ends() {
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
    fn text_of_the_system_is_marked() {
        let turns = turns(&[message(System, vec![text("limits changed")])], true);
        assert_eq!(turns[0].parts, [Part::Text("<system-notice>\nlimits changed\n</system-notice>".into())]);
    }

    #[test]
    fn without_tools_scripts_become_text() {
        let turns = turns(
            &[
                message(User, vec![text("go")]),
                message(Assistant, vec![call("a")]),
                message(System, vec![result("a", "A")]),
            ],
            false,
        );
        assert_eq!(turns[1].parts, [Part::Text("```js\n1\n```".into())]);
        assert_eq!(turns[2].parts, [Part::Text("<result>\nA\n</result>".into())]);
    }

    #[test]
    fn an_error_follows_what_was_printed() {
        let result = CodeInterpreterResult { output: "half\n".into(), error: "Error: no".into(), ..Default::default() };
        assert_eq!(result_text(&result), "half\nError: no");
        assert_eq!(result_text(&CodeInterpreterResult::default()), "(no output)");
    }
}
