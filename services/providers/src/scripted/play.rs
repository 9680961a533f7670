//! Plays one turn: the chunks and their times.

use std::{collections::VecDeque, time::Duration};

use construct_domain::money::Usage;
use construct_proto::mesh::v1::model_completed::StopReason;
use construct_runtime::clock;
use futures::stream::{self, BoxStream, StreamExt as _};
use tokio::time::{Instant, sleep_until};

use super::{
    ConversationState,
    script::{Fault, ScriptedStopReason, Turn},
    template,
};
use crate::{
    answer,
    cassette::Cassette,
    failure::Failure,
    vendor::{Chunk, Request},
};

/// Characters of a token when pacing.
const TOKEN_CHARS: usize = 4;
/// A slower pace would be a stall, for which there are faults.
const MIN_TOKENS_PER_SECOND: f64 = 0.1;

/// A turn as a list of acts, each with the delay before it.
#[derive(Debug)]
pub(super) struct Play {
    acts: VecDeque<(Duration, Act)>,
}

#[derive(Debug)]
enum Act {
    Chunk(Chunk),
    Fail(Failure, Option<Duration>),
}

impl Play {
    pub(super) fn new(
        turn: Turn,
        request: &Request,
        state: &ConversationState,
        fault: Option<Fault>,
    ) -> Self {
        let text = template::expand(&turn.text, state, &request.model);
        let codes: Vec<String> =
            turn.code.iter().map(|code| template::expand(code, state, &request.model)).collect();
        let total = match turn.usage {
            Some(tokens) => tokens.usage(),
            None => Usage {
                input_tokens: answer::estimate_tokens(request.input_chars()),
                output_tokens: answer::estimate_tokens(
                    text.len() + codes.iter().map(String::len).sum::<usize>(),
                ),
                ..Usage::default()
            },
        };
        let stop = turn.stop_reason.map(ScriptedStopReason::reason);
        let stop = stop.unwrap_or(if codes.is_empty() {
            StopReason::EndTurn
        } else {
            StopReason::ToolUse
        });

        let mut writer = Writer {
            acts: VecDeque::new(),
            delay: Duration::ZERO,
            token_delay: token_delay(turn.tokens_per_second),
            fault,
        };
        writer.delay += Duration::from_millis(turn.delay_ms.unwrap_or(0));
        // As vendors do: the input is reported at the beginning, the output at the end.
        writer.push(Act::Chunk(Chunk::Usage(Usage { output_tokens: 0, ..total })));
        let whole = writer.write(&text, Chunk::Text) && writer.write_calls(&codes, request);
        if whole && writer.fault.take().is_none_or(|fault| writer.inject_fault(&fault)) {
            writer.push(Act::Chunk(Chunk::Usage(total)));
            writer.push(Act::Chunk(Chunk::Stop(stop)));
        }
        Self { acts: writer.acts }
    }

    /// Plays a recording at its original pace.
    pub(super) fn from_cassette(cassette: &Cassette) -> Self {
        let mut at = 0;
        let mut pause =
            |ms: u64| Duration::from_millis(ms.saturating_sub(std::mem::replace(&mut at, ms)));
        let pieces = cassette
            .pieces
            .iter()
            .map(|piece| (pause(piece.ms), Act::Chunk(piece.content.clone().into_chunk())));
        let mut acts: VecDeque<_> = pieces.collect();
        if let Some(failed) = &cassette.end.failure {
            let (failure, retry_after) = failed.to_failure();
            acts.push_back((pause(cassette.end.ms), Act::Fail(failure, retry_after)));
        } else if cassette.end.given_up {
            let words = "the recording ends here: nobody waited for the rest of the answer";
            acts.push_back((Duration::ZERO, Act::Fail(Failure::transient(words), None)));
        }
        Self { acts }
    }

    pub(super) fn stream(self) -> BoxStream<'static, Result<Chunk, Failure>> {
        // Delays are measured from the planned end of the last one, so that they don't add up.
        stream::unfold((self.acts, Instant::now()), |(mut acts, at)| async move {
            let (pause, act) = acts.pop_front()?;
            let at = at + pause;
            if !pause.is_zero() {
                sleep_until(at).await;
            }
            let chunk = match act {
                Act::Chunk(chunk) => Ok(chunk),
                Act::Fail(failure, retry_after) => {
                    acts.clear();
                    let retry_at =
                        retry_after.and_then(|after| clock::now().checked_add(after).ok());
                    Err(failure.with_retry_at(retry_at))
                }
            };
            Some((chunk, (acts, at)))
        })
        .boxed()
    }
}

struct Writer {
    acts: VecDeque<(Duration, Act)>,
    /// Before the next act.
    delay: Duration,
    /// Between tokens; none: everything at once.
    token_delay: Option<Duration>,
    /// Its `after_chars` counts down.
    fault: Option<Fault>,
}

impl Writer {
    fn push(&mut self, act: Act) {
        self.acts.push_back((std::mem::take(&mut self.delay), act));
    }

    /// Writes `text` in pieces until it is complete (true) or the fault occurs within it (false).
    fn write(&mut self, text: &str, chunk: impl Fn(String) -> Chunk) -> bool {
        let mut rest = text;
        while !rest.is_empty() {
            if let Some(fault) = self.fault.take_if(|fault| fault.after_chars == 0)
                && !self.inject_fault(&fault)
            {
                return false;
            }
            let size = if self.token_delay.is_some() { TOKEN_CHARS } else { usize::MAX };
            let size = self.fault.as_ref().map_or(size, |fault| size.min(fault.after_chars));
            let end = rest.char_indices().nth(size).map_or(rest.len(), |(at, _)| at);
            let (piece, after) = rest.split_at(end);
            if let Some(fault) = &mut self.fault {
                fault.after_chars -= piece.chars().count().min(fault.after_chars);
            }
            self.push(Act::Chunk(chunk(piece.to_owned())));
            self.delay += self.token_delay.unwrap_or_default();
            rest = after;
        }
        true
    }

    fn write_calls(&mut self, codes: &[String], request: &Request) -> bool {
        let tool = request.tools.first();
        let (name, argument) =
            tool.map_or(("code_interpreter", "code"), |tool| (&tool.name, &tool.argument));
        (0..).zip(codes).all(|(slot, code)| {
            let arguments = |json: String| Chunk::Arguments { slot, json };
            self.push(Act::Chunk(Chunk::Call { slot, id: String::new(), name: name.to_owned() }));
            self.push(Act::Chunk(arguments(format!("{{{}:\"", json_string(argument)))));
            let whole = self.write(code, |piece| arguments(json_escape(&piece)));
            if whole {
                self.push(Act::Chunk(arguments("\"}".to_owned())));
            }
            whole
        })
    }

    /// Injects the fault; true when it is only a stall and the turn continues.
    fn inject_fault(&mut self, fault: &Fault) -> bool {
        self.delay += Duration::from_millis(fault.stall_ms);
        let Some(class) = fault.class else { return true };
        let message = fault
            .message
            .clone()
            .unwrap_or_else(|| format!("the script injects a fault ({class:?})"));
        let failure = Failure::new(class.failure_class(), message).with_status(fault.http_status);
        self.push(Act::Fail(failure, fault.retry_after_ms.map(Duration::from_millis)));
        false
    }
}

fn token_delay(tokens_per_second: Option<f64>) -> Option<Duration> {
    let rate = tokens_per_second.filter(|rate| rate.is_finite() && *rate > 0.0)?;
    Some(Duration::from_secs_f64(1.0 / rate.max(MIN_TOKENS_PER_SECOND)))
}

fn json_string(text: &str) -> String {
    serde_json::Value::String(text.to_owned()).to_string()
}

/// `text` as it stands between the quotes of a JSON string.
fn json_escape(text: &str) -> String {
    let mut json = json_string(text);
    json.pop();
    json.remove(0);
    json
}
