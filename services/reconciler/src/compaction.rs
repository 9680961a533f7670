//! Builds the input of a summary, and estimates the fixed part of a call.

use construct_domain::{
    context::Context,
    message::{Attachment, Block},
    money::tokens_of_bytes,
};

use crate::command_inputs::TranscriptMessage;

/// Assumed size of the tool catalog when it is not cached.
const DEFAULT_CATALOG_BYTES: usize = 30_000;
/// Size of the fixed part of a prompt: our rules, the code tool, the environment.
const RULES_BYTES: usize = 4_000;
/// Share of the model's input limit for the messages to summarize, in percent. The rest is for the
/// prompt, and for the error of the estimate.
const INPUT_PERCENT: i64 = 60;
/// Minimum size, however small the limit is.
const MIN_INPUT_BYTES: usize = 2_000;
/// Minimum size of an excerpt of a text; a shorter one would say nothing.
const MIN_EXCERPT_BYTES: usize = 200;

/// Adds the fixed part of a call to the estimate.
pub(crate) fn add_fixed_tokens(context: &mut Context, catalog: Option<usize>) {
    let bytes = RULES_BYTES + catalog.unwrap_or(DEFAULT_CATALOG_BYTES);
    context.base = context.base.saturating_add(tokens_of_bytes(bytes));
}

/// Maximum size of the messages to summarize, in bytes.
pub(crate) fn max_input_bytes(context: &Context) -> usize {
    let tokens = context.input_limit.saturating_mul(INPUT_PERCENT) / 100;
    // The estimate assumes two bytes per token.
    let bytes = tokens.saturating_mul(2_000) / i64::from(context.scale.max(1));
    usize::try_from(bytes).unwrap_or(MIN_INPUT_BYTES).max(MIN_INPUT_BYTES)
}

/// Renders a conversation as one text of at most `limit` bytes. If it is longer, the middle of its
/// longest texts is left out; if that is not enough, the middle of the whole.
pub(crate) fn render(messages: &[TranscriptMessage<'_>], limit: usize) -> String {
    let pieces: Vec<(String, &str)> =
        messages.iter().flat_map(|message| message_pieces(*message)).collect();
    let whole = |excerpt: usize| -> String {
        let mut text = String::new();
        for (name, piece) in &pieces {
            text.push_str(name);
            text.push_str(": ");
            text.push_str(&truncate_middle(piece, excerpt));
            text.push_str("\n\n");
        }
        text
    };
    let mut excerpt =
        pieces.iter().map(|(_, piece)| piece.len()).max().unwrap_or(0).max(MIN_EXCERPT_BYTES);
    let mut text = whole(excerpt);
    while text.len() > limit && excerpt > MIN_EXCERPT_BYTES {
        excerpt = (excerpt / 2).max(MIN_EXCERPT_BYTES);
        text = whole(excerpt);
    }
    truncate_middle(&text, limit)
}

/// The texts of a message, each with its speaker.
fn message_pieces<'a>(message: TranscriptMessage<'a>) -> impl Iterator<Item = (String, &'a str)> {
    let speaker = message.source.as_str();
    message.blocks.iter().flat_map(move |block| {
        let one = |name: &str, text: &'a str| vec![(name.to_owned(), text)];
        match block {
            Block::Text(text) => one(speaker, text),
            Block::CodeInterpreterCall(call) => one("script", &call.code),
            Block::CodeInterpreterResult(result) if result.error.is_empty() => {
                one("result", &result.output)
            }
            Block::CodeInterpreterResult(result) => {
                vec![("result".to_owned(), &*result.output), ("error".to_owned(), &*result.error)]
            }
            // Keeps the id: a script can still save the file.
            Block::Attachment(Attachment { name, file: Some(file), .. }) => {
                one(&format!("file {}", file.id), name)
            }
            Block::Attachment(attachment) => one("attachment", &attachment.name),
            // Reasoning belongs to its vendor and is left out.
            Block::Thinking(_) => Vec::new(),
        }
    })
}

/// Truncates a text to about `limit` bytes: its beginning and its end.
fn truncate_middle(text: &str, limit: usize) -> String {
    if text.len() <= limit {
        return text.to_owned();
    }
    let (head, tail) =
        (text.floor_char_boundary(limit / 2), text.ceil_char_boundary(text.len() - limit / 2));
    format!("{} […{} bytes left out…] {}", &text[..head], tail - head, &text[tail..])
}

#[cfg(test)]
mod tests {
    use construct_domain::message::{AttachedFile, CodeCall, CodeResult, Source};

    use super::*;

    #[test]
    fn summary_input_names_speakers_and_fits_limit() {
        let question = [Block::Text("Count the lines.".to_owned())];
        let script =
            [Block::CodeInterpreterCall(CodeCall { id: "1".into(), code: "count()".into() })];
        let output = format!("begin{}end", "ü".repeat(50_000));
        let result =
            CodeResult { id: "1".into(), output, error: "broke".into(), ..CodeResult::default() };
        let result = [Block::CodeInterpreterResult(result)];
        let messages = [
            TranscriptMessage { source: Source::User, blocks: &question },
            TranscriptMessage { source: Source::Assistant, blocks: &script },
            TranscriptMessage { source: Source::System, blocks: &result },
        ];
        let text = render(&messages, 10_000);
        assert!(text.len() < 10_100, "{}", text.len());
        assert!(
            text.starts_with("user: Count the lines.\n\nscript: count()\n\nresult: begin"),
            "{text}"
        );
        assert!(
            text.contains("bytes left out") && text.ends_with("end\n\nerror: broke\n\n"),
            "{text}"
        );
        assert_eq!(render(&messages[..2], 10_000), "user: Count the lines.\n\nscript: count()\n\n");
        let many = vec![messages[0]; 10_000];
        assert!(render(&many, 10_000).len() < 10_100);
    }

    #[test]
    fn file_is_rendered_with_its_id() {
        let id = "file_01890a5d-ac96-774b-bcce-b302099a8057".parse().expect("an id");
        let file = Some(AttachedFile { id, sha256: "0f".repeat(32), size: 7 });
        let attached = Attachment { name: "t.csv".into(), file, ..Attachment::default() };
        let blocks = [Block::Attachment(attached)];
        let text = render(&[TranscriptMessage { source: Source::User, blocks: &blocks }], 10_000);
        assert_eq!(text, "file file_01890a5d-ac96-774b-bcce-b302099a8057: t.csv\n\n");
    }

    #[test]
    fn input_size_follows_the_input_limit() {
        let context = |room| Context { input_limit: room, scale: 500, ..Context::default() };
        assert_eq!(max_input_bytes(&context(100_000)), 240_000);
        assert_eq!(max_input_bytes(&context(100)), MIN_INPUT_BYTES);
    }
}
