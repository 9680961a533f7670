//! Live text: buffers the visible text of an answer into deltas, and sends them as progress of the
//! step.

use std::time::Duration;

use async_trait::async_trait;
use construct_proto::v1::{Event, MessageDelta, MessageRestarted, event::Payload, message_delta};
use jiff::Timestamp;
use tokio::time::Instant;

use crate::answer::{BlockKind, VisibleText};

/// How long text is buffered. Readers notice no difference, and the mesh carries a fraction of the
/// messages.
const FLUSH_INTERVAL: Duration = Duration::from_millis(25);
/// Bytes of text that are buffered at most.
const MAX_BUFFERED_BYTES: usize = 2 * 1024;

/// Receives progress. It may be lost: the result carries the complete answer.
#[async_trait]
pub(crate) trait Progress: Send {
    async fn send(&mut self, event: Event);
}

/// The identifiers of a step's events.
#[derive(Debug, Clone)]
pub(crate) struct StepContext {
    pub(crate) organization_id: String,
    pub(crate) task_id: String,
    pub(crate) step_id: String,
    /// The number of the step in its task.
    pub(crate) step: u64,
    /// The delivery of the command.
    pub(crate) delivery: u32,
    /// False for calls without subscribers, e.g. for a title.
    pub(crate) live: bool,
}

/// Streams the answers of one step, one after the other.
pub(crate) struct Deltas<'a> {
    context: StepContext,
    progress: &'a mut dyn Progress,
    /// Events of this delivery so far. A later delivery starts above, so that the index increases
    /// over all of them.
    sent: u64,
    /// Deltas of this answer so far.
    deltas: u64,
    buffered: Option<VisibleText>,
    flushed_at: Option<Instant>,
}

impl<'a> Deltas<'a> {
    pub(crate) fn new(context: StepContext, progress: &'a mut dyn Progress) -> Self {
        Self { context, progress, sent: 0, deltas: 0, buffered: None, flushed_at: None }
    }

    /// Takes visible text. The first piece of an answer is sent at once.
    pub(crate) async fn push(&mut self, visible: VisibleText) {
        if !self.context.live || visible.text.is_empty() {
            return;
        }
        match &mut self.buffered {
            Some(buffered) if buffered.block == visible.block && buffered.kind == visible.kind => {
                buffered.text.push_str(&visible.text);
            }
            _ => {
                self.flush().await;
                self.buffered = Some(visible);
            }
        }
        let full = self
            .buffered
            .as_ref()
            .is_some_and(|buffered| buffered.text.len() >= MAX_BUFFERED_BYTES);
        if full || self.due().is_some_and(|due| due <= Instant::now()) {
            self.flush().await;
        }
    }

    /// When [`Deltas::flush`] is due; none while nothing is buffered.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.buffered.as_ref()?;
        Some(self.flushed_at.map_or_else(Instant::now, |at| at + FLUSH_INTERVAL))
    }

    /// Sends what is buffered.
    pub(crate) async fn flush(&mut self) {
        let Some(buffered) = self.buffered.take() else { return };
        let delta = match buffered.kind {
            BlockKind::Text => message_delta::Delta::Text(buffered.text),
            BlockKind::Code => message_delta::Delta::Code(buffered.text),
            BlockKind::Thinking => message_delta::Delta::Thinking(buffered.text),
        };
        let payload =
            MessageDelta { index: self.deltas, block: buffered.block, delta: Some(delta) };
        self.deltas += 1;
        self.flushed_at = Some(Instant::now());
        self.send("message.delta", Payload::MessageDelta(payload)).await;
    }

    /// Voids the text that was streamed of this step. Another delivery may have streamed, even when
    /// this one has not. Within a delivery nothing is sent when nothing was visible.
    pub(crate) async fn restart(&mut self, reason: String) {
        self.buffered = None;
        let shown = self.deltas > 0 || (self.sent == 0 && self.context.delivery > 1);
        if self.context.live && shown {
            self.deltas = 0;
            self.flushed_at = None;
            self.send("message.restarted", Payload::MessageRestarted(MessageRestarted { reason }))
                .await;
        }
    }

    async fn send(&mut self, kind: &str, payload: Payload) {
        let index = (u64::from(self.context.delivery) << 32) + self.sent;
        self.sent += 1;
        let now = Timestamp::now();
        let event = Event {
            // Derived, so that a repeated event has the same id.
            id: format!("{}.{index}", self.context.step_id),
            r#type: kind.to_owned(),
            time: Some(prost_types::Timestamp {
                seconds: now.as_second(),
                nanos: now.subsec_nanosecond(),
            }),
            organization_id: self.context.organization_id.clone(),
            task_id: self.context.task_id.clone(),
            step: self.context.step,
            index,
            payload: Some(payload),
            ..Event::default()
        };
        self.progress.send(event).await;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Records every event.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct RecordingProgress(Arc<Mutex<Vec<Event>>>);

    impl RecordingProgress {
        pub(crate) fn events(&self) -> Vec<Event> {
            self.0.lock().expect("no test panics while it holds the lock").clone()
        }

        /// Text and code of all deltas after the last restart.
        pub(crate) fn text(&self) -> String {
            let events = self.events();
            let begin = events
                .iter()
                .rposition(|event| event.r#type == "message.restarted")
                .map_or(0, |at| at + 1);
            events[begin..].iter().filter_map(delta_text).collect()
        }

        pub(crate) fn types(&self) -> Vec<String> {
            self.events().into_iter().map(|event| event.r#type).collect()
        }
    }

    #[async_trait]
    impl Progress for RecordingProgress {
        async fn send(&mut self, event: Event) {
            self.0.lock().expect("no test panics while it holds the lock").push(event);
        }
    }

    fn delta_text(event: &Event) -> Option<String> {
        match &event.payload {
            Some(Payload::MessageDelta(MessageDelta {
                delta: Some(message_delta::Delta::Text(text) | message_delta::Delta::Code(text)),
                ..
            })) => Some(text.clone()),
            _ => None,
        }
    }

    pub(crate) fn step_context(delivery: u32) -> StepContext {
        StepContext {
            organization_id: "org".into(),
            task_id: "task".into(),
            step_id: "step".into(),
            step: 4,
            delivery,
            live: true,
        }
    }

    fn visible(block: u32, kind: BlockKind, text: &str) -> VisibleText {
        VisibleText { block, kind, text: text.into() }
    }

    #[tokio::test(start_paused = true)]
    async fn first_delta_is_sent_at_once_and_later_ones_are_buffered() {
        let mut progress_log = RecordingProgress::default();
        let seen = progress_log.clone();
        let mut deltas = Deltas::new(step_context(1), &mut progress_log);
        deltas.push(visible(0, BlockKind::Text, "a")).await;
        assert_eq!(seen.events().len(), 1);
        deltas.push(visible(0, BlockKind::Text, "b")).await;
        deltas.push(visible(0, BlockKind::Text, "c")).await;
        assert_eq!(seen.events().len(), 1);
        assert_eq!(deltas.due(), Some(Instant::now() + FLUSH_INTERVAL));
        tokio::time::advance(FLUSH_INTERVAL).await;
        deltas.push(visible(0, BlockKind::Text, "d")).await;
        assert_eq!(seen.text(), "abcd");
        assert_eq!(seen.events().len(), 2);
        deltas.push(visible(0, BlockKind::Text, &"x".repeat(MAX_BUFFERED_BYTES))).await;
        assert_eq!(seen.events().len(), 3);
        deltas.push(visible(0, BlockKind::Text, "e")).await;
        deltas.push(visible(1, BlockKind::Code, "f")).await;
        assert_eq!(seen.events().len(), 4, "another block ends what was gathered");
        deltas.flush().await;
        assert_eq!(deltas.due(), None);
        let indexes: Vec<u64> = seen.events().iter().map(|event| event.index).collect();
        assert_eq!(indexes, (0..5).map(|n| (1 << 32) + n).collect::<Vec<u64>>());
    }

    #[tokio::test(start_paused = true)]
    async fn later_delivery_voids_text_of_an_earlier_one() {
        let mut progress_log = RecordingProgress::default();
        let seen = progress_log.clone();
        let mut deltas = Deltas::new(step_context(2), &mut progress_log);
        deltas.restart("the worker was lost".into()).await;
        deltas.push(visible(0, BlockKind::Text, "a")).await;
        assert_eq!(seen.types(), ["message.restarted", "message.delta"]);
        assert_eq!(seen.events()[1].index, (2 << 32) + 1);
    }

    #[tokio::test(start_paused = true)]
    async fn restart_without_visible_text_sends_nothing() {
        let mut progress_log = RecordingProgress::default();
        let seen = progress_log.clone();
        let mut deltas = Deltas::new(step_context(1), &mut progress_log);
        deltas.restart("first try failed".into()).await;
        deltas.push(visible(0, BlockKind::Text, "a")).await;
        deltas.restart("second try failed".into()).await;
        deltas.push(visible(0, BlockKind::Text, "b")).await;
        assert_eq!(seen.types(), ["message.delta", "message.restarted", "message.delta"]);
        assert_eq!(seen.text(), "b");
    }

    #[tokio::test(start_paused = true)]
    async fn title_is_not_streamed() {
        let mut progress_log = RecordingProgress::default();
        let seen = progress_log.clone();
        let mut deltas =
            Deltas::new(StepContext { live: false, ..step_context(2) }, &mut progress_log);
        deltas.restart("again".into()).await;
        deltas.push(visible(0, BlockKind::Text, "a")).await;
        deltas.flush().await;
        assert!(seen.events().is_empty());
    }
}
