//! The built-in model: answers from a script instead of a vendor (`docs/scripted.md`). For the
//! demo, tests, benchmarks and chaos tests.
//!
//! It stores no conversation: the transcript in the command decides which turn to play, so that a
//! redelivered command plays the same turn. Only the attempts of faults are counted, in
//! [`AttemptCounter`].

mod attempts;
mod play;
mod script;
mod template;

use std::sync::Arc;

use construct_proto::{
    mesh::v1::{ChatMessage, model_invoke::Purpose},
    v1::{MessageSource, VendorModel, block::Block},
};
use futures::{
    FutureExt as _,
    future::{self, BoxFuture},
    stream::BoxStream,
};

pub(crate) use self::attempts::AttemptCounter;
use self::{
    play::Play,
    script::{Count, Script, Turn},
};
use crate::{
    cassette::Cassette,
    failure::Failure,
    transcript::{self, Part, Role},
    vendor::{Chunk, Request, Vendor},
};

/// Words of the first message that make a title.
const TITLE_WORDS: usize = 6;
/// Characters of a title at most.
const TITLE_CHARS: usize = 60;

/// A script, ready to be played.
pub(crate) struct Scripted {
    script: Script,
    /// Recordings, in place of a script.
    cassettes: Vec<Cassette>,
    provider_id: String,
    attempts: Arc<AttemptCounter>,
}

impl Scripted {
    pub(crate) fn parse(
        text: &str,
        provider_id: String,
        attempts: Arc<AttemptCounter>,
    ) -> Result<Self, Failure> {
        let unreadable = |error: serde_json::Error| {
            Failure::configuration(format!("the provider's script cannot be read: {error}"))
        };
        let cassettes = Cassette::parse(text).map_err(unreadable)?;
        let script = if cassettes.is_some() { "" } else { text };
        let script = Script::parse(script).map_err(unreadable)?;
        Ok(Self { script, cassettes: cassettes.unwrap_or_default(), provider_id, attempts })
    }

    /// The recording to play: that of the next answer, or the last one. Calls without an answer are
    /// played before it, each once.
    fn select_cassette(&self, request: &Request, state: &ConversationState) -> Option<&Cassette> {
        let purpose = match request.purpose {
            Purpose::Title => "title",
            Purpose::Compaction => "compaction",
            Purpose::Turn | Purpose::Unspecified => "turn",
        };
        let fitting: Vec<&Cassette> =
            self.cassettes.iter().filter(|cassette| cassette.purpose == purpose).collect();
        let mut answers = fitting.split_inclusive(|cassette| cassette.is_answer()).enumerate();
        let last = answers.clone().last();
        let (at, tries) = answers.nth(state.answers).or(last)?;
        // Counts only where needed: otherwise a redelivery plays the same recording.
        let before = match tries.len() {
            1 => 0,
            _ => {
                self.attempts
                    .count(format!("{}/{}/{purpose}/{at}", self.provider_id, request.task_id))
                    - 1
            }
        };
        let before = usize::try_from(before).unwrap_or(usize::MAX);
        tries.get(before).or(tries.last()).copied()
    }

    fn next_play(&self, request: &Request) -> Play {
        let state = if request.turns.is_empty() {
            ConversationState::from_messages(&request.messages)
        } else {
            ConversationState::from_turns(&request.turns)
        };
        if let Some(cassette) = self.select_cassette(request, &state) {
            return Play::from_cassette(cassette);
        }
        let conversation = self.script.conversation(&state.last_user_text);
        if request.purpose == Purpose::Title {
            let title =
                conversation.title.clone().unwrap_or_else(|| default_title(&state.first_user_text));
            return Play::new(Turn::from_text(title), request, &state, None);
        }
        if request.purpose == Purpose::Compaction {
            let length = state.last_user_text.len();
            let default = || {
                Turn::from_text(format!(
                    "# Goal\n# Facts\nThey said {length} characters.\n# Done\n# Open\n"
                ))
            };
            let turn = self.script.summary(conversation).cloned().unwrap_or_else(default);
            return self.play_with_fault(
                turn,
                request,
                &state,
                &format!("{}/summary", conversation.name),
            );
        }
        let at = match conversation.count {
            Count::Total => state.answers,
            Count::SinceUser => state.answers_since_user,
        };
        let Some(turn) = conversation.turns.get(at) else {
            return Play::new(Turn::from_text(echo(&state.last_user_text)), request, &state, None);
        };
        // The number of user messages is part of the name, because a conversation counted since the
        // last user message plays the same turn for each of them.
        self.play_with_fault(
            turn.clone(),
            request,
            &state,
            &format!("{}/{}/{at}", conversation.name, state.user_messages),
        )
    }

    /// A turn with its fault, unless that has occurred often enough. `name` identifies the turn
    /// within a task.
    fn play_with_fault(
        &self,
        mut turn: Turn,
        request: &Request,
        state: &ConversationState,
        name: &str,
    ) -> Play {
        turn.inherit(&self.script.defaults);
        let fault = turn.fault.take().filter(|fault| {
            let key = format!("{}/{}/{name}", self.provider_id, request.task_id);
            fault.times == 0 || self.attempts.count(key) <= fault.times
        });
        Play::new(turn, request, state, fault)
    }
}

impl Vendor for Scripted {
    fn invoke(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        self.next_play(&request).stream()
    }

    /// None: any name works.
    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        future::ready(Ok(Vec::new())).boxed()
    }
}

/// The state of the conversation, as far as scripts use it.
#[derive(Debug, Default)]
struct ConversationState {
    first_user_text: String,
    last_user_text: String,
    last_result: String,
    /// Messages of the user.
    user_messages: usize,
    /// Messages of the assistant.
    answers: usize,
    answers_since_user: usize,
}

impl ConversationState {
    fn from_messages(messages: &[ChatMessage]) -> Self {
        let mut state = Self::default();
        for message in messages {
            match message.source() {
                MessageSource::User => {
                    state.last_user_text = message_text(message);
                    if state.user_messages == 0 {
                        state.first_user_text.clone_from(&state.last_user_text);
                    }
                    state.user_messages += 1;
                    state.answers_since_user = 0;
                }
                MessageSource::Assistant => {
                    state.answers += 1;
                    state.answers_since_user += 1;
                }
                MessageSource::System | MessageSource::Unspecified => {
                    for block in message.blocks.iter().filter_map(|block| block.block.as_ref()) {
                        if let Block::CodeInterpreterResult(result) = block {
                            state.last_result = transcript::result_text(result);
                        }
                    }
                }
            }
        }
        state
    }

    /// The same for a conversation outside a task.
    fn from_turns(turns: &[transcript::Turn]) -> Self {
        let mut state = Self::default();
        for turn in turns {
            let texts: Vec<&str> = turn.parts.iter().filter_map(Part::text).collect();
            match turn.role {
                Role::Assistant => {
                    state.answers += 1;
                    state.answers_since_user += 1;
                }
                Role::User => {
                    if let Some(output) = turn.parts.iter().rev().find_map(Part::output) {
                        state.last_result = output.to_owned();
                    }
                    if !texts.is_empty() {
                        state.last_user_text = texts.join("\n");
                        if state.user_messages == 0 {
                            state.first_user_text.clone_from(&state.last_user_text);
                        }
                        state.user_messages += 1;
                        state.answers_since_user = 0;
                    }
                }
            }
        }
        state
    }
}

fn message_text(message: &ChatMessage) -> String {
    let texts: Vec<&str> = message
        .blocks
        .iter()
        .filter_map(|block| match block.block.as_ref()? {
            Block::Text(text) => Some(text.text.as_str()),
            _ => None,
        })
        .collect();
    texts.join("\n")
}

fn echo(text: &str) -> String {
    format!("You said: {text}")
}

/// The first words of the user. A request for a title quotes the conversation with its roles.
fn default_title(text: &str) -> String {
    let text = text.strip_prefix("user: ").unwrap_or(text);
    let text = text.split("\n\nassistant: ").next().unwrap_or(text);
    let words: Vec<&str> = text.split_whitespace().take(TITLE_WORDS).collect();
    let title: String = words.join(" ").chars().take(TITLE_CHARS).collect();
    if title.is_empty() { "Untitled".to_owned() } else { title }
}

#[cfg(test)]
mod tests;
