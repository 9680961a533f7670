//! The invariants of every transcript, whatever happened while it was written.

use std::collections::BTreeSet;

use construct_proto::v1::{
    CodeInterpreterCall, CodeInterpreterResult, Message, MessageSource, MessageStatus, block::Block,
};

/// All messages of a task: those with a position in order, then those without.
#[derive(Debug, Clone)]
pub struct Transcript {
    /// In the API's order.
    pub messages: Vec<Message>,
}

impl Transcript {
    /// A transcript from a list of messages.
    pub fn new(messages: Vec<Message>) -> Self {
        Self { messages }
    }

    /// Panics unless the transcript is complete: positions 1, 2, 3, …; each answer's calls followed
    /// by exactly their results; the user's messages `said`, each once, in this order, and each
    /// handled.
    pub fn check(&self, said: &[&str]) -> &Self {
        let placed = self.placed_messages();
        let positions: Vec<i64> = placed.iter().map(|message| status(message).position).collect();
        let expected: Vec<i64> =
            (1..=i64::try_from(placed.len()).expect("a transcript is short")).collect();
        assert_eq!(positions, expected, "positions have a gap or a duplicate:\n{}", self.show());
        let ids: BTreeSet<String> = self
            .messages
            .iter()
            .map(|message| crate::client::id(message.metadata.as_ref()))
            .collect();
        assert_eq!(ids.len(), self.messages.len(), "a message is listed twice:\n{}", self.show());

        let users: Vec<String> = placed
            .iter()
            .filter(|message| source(message) == MessageSource::User)
            .map(|message| text(message))
            .collect();
        assert_eq!(
            users,
            said,
            "the user's messages are not all there, once and in order:\n{}",
            self.show()
        );
        for message in self.messages.iter().filter(|message| source(message) == MessageSource::User)
        {
            assert!(
                status(message).processed_at.is_some(),
                "a message is not dealt with:\n{}",
                self.show()
            );
        }

        for (at, message) in placed.iter().enumerate() {
            let calls: Vec<String> = calls(message).into_iter().map(|call| call.id).collect();
            let next: Vec<String> = placed
                .get(at + 1)
                .map(|next| results(next))
                .unwrap_or_default()
                .into_iter()
                .map(|result| result.id)
                .collect();
            match source(message) {
                MessageSource::Assistant => {
                    assert_eq!(
                        calls,
                        next,
                        "calls and results are not paired after {at}:\n{}",
                        self.show()
                    );
                }
                MessageSource::User | MessageSource::System | MessageSource::Unspecified => {
                    assert!(calls.is_empty(), "only the model calls:\n{}", self.show());
                    assert!(next.is_empty(), "a result without a call:\n{}", self.show());
                }
            }
        }
        self
    }

    /// Messages with a position in the transcript.
    pub fn placed_messages(&self) -> Vec<&Message> {
        self.messages.iter().filter(|message| status(message).position > 0).collect()
    }

    /// Messages without a position: queued or dropped.
    pub fn unplaced_messages(&self) -> Vec<&Message> {
        self.messages.iter().filter(|message| status(message).position == 0).collect()
    }

    /// The assistant's texts, message by message.
    pub fn answers(&self) -> Vec<String> {
        self.from_source(MessageSource::Assistant).into_iter().map(text).collect()
    }

    /// The messages of one source that have a position.
    pub fn from_source(&self, wanted: MessageSource) -> Vec<&Message> {
        self.placed_messages().into_iter().filter(|message| source(message) == wanted).collect()
    }

    /// All script results, in order.
    pub fn results(&self) -> Vec<CodeInterpreterResult> {
        self.placed_messages().into_iter().flat_map(results).collect()
    }

    /// The only script result.
    pub fn result(&self) -> CodeInterpreterResult {
        let mut results = self.results();
        assert_eq!(results.len(), 1, "one result is expected:\n{}", self.show());
        results.remove(0)
    }

    /// A description for failure messages.
    pub fn show(&self) -> String {
        use std::fmt::Write as _;
        let mut shown = String::new();
        for message in &self.messages {
            let status = status(message);
            // Writing to a string cannot fail.
            let _ =
                writeln!(shown, "{:>3} {:?} {}", status.position, status.source(), status.error);
            for block in message.spec.iter().flat_map(|spec| &spec.blocks) {
                let _ = writeln!(shown, "      {:?}", block.block);
            }
        }
        shown
    }
}

/// A message's status.
pub fn status(message: &Message) -> MessageStatus {
    message.status.clone().unwrap_or_default()
}

/// The author of a message.
pub fn source(message: &Message) -> MessageSource {
    status(message).source()
}

/// A message's text.
pub fn text(message: &Message) -> String {
    let texts = blocks(message).filter_map(|block| match block {
        Block::Text(text) => Some(text.text.as_str()),
        _ => None,
    });
    texts.collect()
}

/// The scripts that a message wants to run.
pub fn calls(message: &Message) -> Vec<CodeInterpreterCall> {
    let calls = blocks(message).filter_map(|block| match block {
        Block::CodeInterpreterCall(call) => Some(call.clone()),
        _ => None,
    });
    calls.collect()
}

/// The script results in a message.
pub fn results(message: &Message) -> Vec<CodeInterpreterResult> {
    let results = blocks(message).filter_map(|block| match block {
        Block::CodeInterpreterResult(result) => Some(result.clone()),
        _ => None,
    });
    results.collect()
}

fn blocks(message: &Message) -> impl Iterator<Item = &Block> {
    message.spec.iter().flat_map(|spec| &spec.blocks).filter_map(|block| block.block.as_ref())
}
