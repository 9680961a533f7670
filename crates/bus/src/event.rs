//! Live events as one ordered stream.

use std::{cmp::Ordering, collections::VecDeque};

use async_nats::{Message, Subscriber};
use construct_domain::{OrganizationId, TaskId};
use construct_proto::v1::Event;
use futures::{FutureExt as _, StreamExt as _, future::Either, stream::BoxStream};
use tokio::task::coop::unconstrained;

use crate::{
    Bus,
    control::subscribe,
    subject::{Address as _, Delta, EntityEvent, TaskEvent},
};

/// What to subscribe to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Watch {
    /// Everything about one task, including live text.
    Task {
        /// The task's organization.
        organization: OrganizationId,
        /// The task.
        task: TaskId,
    },
    /// The organization's agents, models and providers.
    Entities {
        /// The organization.
        organization: OrganizationId,
    },
}

/// The position of a progress event within its task.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Position {
    /// Number of the step, from 1.
    pub step: u64,
    /// Rises within the step.
    pub index: u64,
}

impl Position {
    /// The position of an event. Meaningful for progress, which has a step and no sequence.
    pub const fn from_event(event: &Event) -> Self {
        Self { step: event.step, index: event.index }
    }
}

impl Bus {
    /// Subscribes to events from now on. When this returns, the server has registered the
    /// subscription: later events arrive unless the connection breaks or the reader is so slow that
    /// NATS drops messages. Both leave gaps in the events' sequence.
    ///
    /// The order is the server's. A task's text and its other events arrive over two subscriptions.
    /// When both have an event waiting, the step and index decide, then the time.
    ///
    /// # Errors
    /// When the server is unreachable.
    pub async fn subscribe_events(
        &self,
        watch: &Watch,
    ) -> Result<BoxStream<'static, Event>, subscribe::Error> {
        let filters = match *watch {
            Watch::Task { organization, task } => {
                vec![TaskEvent::all(organization, task), Delta { organization, task }.subject()]
            }
            Watch::Entities { organization } => {
                EntityEvent::KINDS.iter().map(|kind| EntityEvent::all(organization, kind)).collect()
            }
        };
        let mut sources = Vec::with_capacity(filters.len());
        for filter in filters {
            sources.push(Source {
                messages: self.subscribe(filter).await?,
                heads: VecDeque::new(),
                ended: false,
            });
        }
        self.flush().await?;
        let merge = Merge { bus: self.clone(), sources };
        Ok(futures::stream::unfold(
            merge,
            |mut merge| async move { Some((merge.next().await?, merge)) },
        )
        .boxed())
    }
}

struct Source {
    messages: Subscriber,
    /// Events that arrived and were not returned yet; at most one, for comparison.
    heads: VecDeque<Event>,
    ended: bool,
}

struct Merge {
    bus: Bus,
    sources: Vec<Source>,
}

impl Merge {
    async fn next(&mut self) -> Option<Event> {
        loop {
            // Peek at every source again after one has a head. This keeps the server's order: the
            // connection fills the sources in that order, so an event that came before a head is
            // visible by now.
            loop {
                let before = self.heads();
                for index in 0..self.sources.len() {
                    self.peek(index).await;
                }
                if self.heads() == before {
                    break;
                }
            }
            let first = (0..self.sources.len())
                .filter(|&index| !self.sources[index].heads.is_empty())
                .min_by(|&one, &other| {
                    compare(&self.sources[one].heads[0], &self.sources[other].heads[0])
                });
            if let Some(index) = first {
                return self.sources[index].heads.pop_front();
            }
            if self.sources.iter().all(|source| source.ended) {
                return None;
            }
            self.wait().await;
        }
    }

    fn heads(&self) -> usize {
        self.sources.iter().map(|source| source.heads.len()).sum()
    }

    /// Fills a source's head if a message is available, without waiting.
    async fn peek(&mut self, index: usize) {
        while self.sources[index].heads.is_empty() && !self.sources[index].ended {
            // Unconstrained: otherwise tokio's budget makes a full channel look empty now and then.
            match unconstrained(self.sources[index].messages.next()).now_or_never() {
                None => return,
                Some(message) => self.keep(index, message).await,
            }
        }
    }

    /// Waits until any source has a message.
    async fn wait(&mut self) {
        let waiting = self.sources.iter_mut().enumerate().map(|(index, source)| {
            if source.ended {
                Either::Left(std::future::pending())
            } else {
                Either::Right(async move { (index, source.messages.next().await) }.boxed())
            }
        });
        let ((index, message), _, _) = futures::future::select_all(waiting).await;
        self.keep(index, message).await;
    }

    async fn keep(&mut self, index: usize, message: Option<Message>) {
        let Some(message) = message else {
            self.sources[index].ended = true;
            return;
        };
        match self.bus.open(message.headers.as_ref(), message.payload).await {
            Ok(event) => self.sources[index].heads.push_back(event),
            Err(error) => {
                let error: &dyn std::error::Error = &error;
                tracing::warn!(subject = %message.subject, error, "an event cannot be decoded and is omitted");
            }
        }
    }
}

/// Orders two waiting events. Within a step, progress is ordered by index and comes before the
/// record that ends the step.
fn compare(one: &Event, other: &Event) -> Ordering {
    let time = |event: &Event| event.time.map(|time| (time.seconds, time.nanos));
    if one.step == 0 || other.step == 0 {
        return time(one).cmp(&time(other));
    }
    one.step
        .cmp(&other.step)
        .then_with(|| (one.sequence > 0).cmp(&(other.sequence > 0)))
        .then_with(|| one.index.cmp(&other.index))
}
