//! Feeds: the live events of one task or organization. The process subscribes to them once and
//! forwards them to all subscribers.
//!
//! A feed has one buffer for all subscribers, bounded in number and size of its items. A subscriber
//! that is too slow loses what was overwritten, notices that, and reads it again. So no subscriber
//! can slow down another, or the feed. A feed ends with its last subscriber.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use construct_bus::{Bookmark, Bus, Connection};
use construct_proto::v1::Event;
use construct_runtime::Lifecycle;
use construct_store::{Error, Store};
use futures::StreamExt as _;
use prost::Message as _;
use tokio::sync::{broadcast, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    WatchedEvents,
    merge::{LiveItem, Mark},
    replay_start::StreamEnds,
    replays::Replays,
};
use crate::{metrics, status::chain};

/// Items that a feed keeps for its slowest subscriber.
const BUFFER: usize = 256;
/// The largest event that is kept in a feed's buffer, in bytes; so a buffer holds at most 4 MiB. Of
/// a larger event only the position is forwarded, and each subscriber reads it when it is ready.
const LARGEST_EVENT_BYTES: usize = 16 * 1024;
/// How often the heads of the streams are read. Only records whose publication was lost wait for
/// it.
const HEAD_POLL_INTERVAL: Duration = Duration::from_secs(3);
/// Streams whose heads one query reads.
const STREAMS_PER_QUERY: usize = 1000;
/// How long a request to the bus may take. After that subscribers continue with what PostgreSQL
/// has.
const BUS_TIMEOUT: Duration = Duration::from_secs(2);
/// The delay before a feed subscribes again.
const SUBSCRIBE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// All feeds of the process.
pub(crate) struct Hub {
    store: Store,
    bus: Bus,
    lifecycle: Lifecycle,
    feeds: Mutex<HashMap<WatchedEvents, Weak<Feed>>>,
    pub(super) replays: Replays,
}

/// A subscription to a feed, which lives at least as long.
pub(crate) struct FeedSubscription {
    pub(super) live: broadcast::Receiver<LiveItem>,
    feed: Arc<Feed>,
}

impl FeedSubscription {
    /// The ends of the streams when they were last read.
    pub(super) fn stream_ends(&self) -> StreamEnds {
        *self.feed.stream_ends.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Feed {
    sender: broadcast::Sender<LiveItem>,
    /// The sequence of the newest known record.
    head: Arc<AtomicU64>,
    stream_ends: Mutex<StreamEnds>,
    /// Whether a subscription at the bus was tried at least once.
    started: watch::Receiver<bool>,
    _stop: DropGuard,
}

impl Hub {
    pub(crate) fn new(store: Store, bus: Bus, lifecycle: Lifecycle) -> Self {
        Self { store, bus, lifecycle, feeds: Mutex::default(), replays: Replays::default() }
    }

    pub(crate) fn bus(&self) -> &Bus {
        &self.bus
    }

    /// Subscribes to a feed. When this returns, the feed is subscribed at the bus, or the bus is
    /// not available.
    pub(crate) async fn subscribe(&self, watched: WatchedEvents) -> FeedSubscription {
        let feed = self.feed(watched);
        let live = feed.sender.subscribe();
        // Fails only when the feed has ended with the process.
        _ = feed.started.clone().wait_for(|started| *started).await;
        FeedSubscription { live, feed }
    }

    fn feed(&self, watched: WatchedEvents) -> Arc<Feed> {
        let mut feeds = self.feeds.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(feed) = feeds.get(&watched).and_then(Weak::upgrade) {
            return feed;
        }
        feeds.retain(|_, feed| feed.strong_count() > 0);
        let stop = self.lifecycle.draining().child_token();
        let (sender, _) = broadcast::channel(BUFFER);
        let (started, has_started) = watch::channel(false);
        let head = Arc::new(AtomicU64::new(0));
        let listener = Listener {
            bus: self.bus.clone(),
            watched,
            sender: sender.clone(),
            head: Arc::clone(&head),
            started,
        };
        self.lifecycle.spawn_job("event feed", listener.run(stop.clone()));
        let feed = Arc::new(Feed {
            sender,
            head,
            stream_ends: Mutex::default(),
            started: has_started,
            _stop: stop.drop_guard(),
        });
        feeds.insert(watched, Arc::downgrade(&feed));
        feed
    }

    /// Finds records whose publication was lost, until the process drains.
    pub(crate) async fn poll_heads(&self) {
        let draining = self.lifecycle.draining();
        let mut failing = false;
        loop {
            tokio::select! {
                () = draining.cancelled() => return,
                () = tokio::time::sleep(HEAD_POLL_INTERVAL) => {}
            }
            match self.publish_heads().await {
                Ok(()) => failing = false,
                Err(error) if failing => {
                    tracing::debug!(
                        error = chain(&error),
                        "the heads of event streams cannot be read"
                    )
                }
                Err(error) => {
                    failing = true;
                    tracing::warn!(
                        error = chain(&error),
                        "the heads of event streams cannot be read"
                    );
                }
            }
        }
    }

    /// Sends the head of its stream to every feed that does not know it.
    async fn publish_heads(&self) -> Result<(), Error> {
        let feeds: Vec<(WatchedEvents, Arc<Feed>)> = {
            let feeds = self.feeds.lock().unwrap_or_else(PoisonError::into_inner);
            feeds
                .iter()
                .filter_map(|(watched, feed)| feed.upgrade().map(|feed| (*watched, feed)))
                .collect()
        };
        // Before the heads: the progress stored by now is of steps that records up to the heads
        // begin.
        let end = self.progress_end(&feeds).await;
        for feeds in feeds.chunks(STREAMS_PER_QUERY) {
            let streams: Vec<_> = feeds.iter().map(|(watched, _)| watched.stored()).collect();
            for ((_, feed), (_, head)) in feeds.iter().zip(self.store.event_heads(&streams).await?)
            {
                if feed.head.fetch_max(head, Ordering::Relaxed) < head {
                    // Fails without subscribers.
                    _ = feed.sender.send(LiveItem::Head(head));
                }
                if let Some(progress) = end {
                    *feed.stream_ends.lock().unwrap_or_else(PoisonError::into_inner) =
                        StreamEnds { progress, head };
                }
            }
        }
        Ok(())
    }

    /// The end of the streams that retain progress, if any feed has progress.
    async fn progress_end(&self, feeds: &[(WatchedEvents, Arc<Feed>)]) -> Option<Bookmark> {
        if !self.bus.is_connected() || feeds.iter().all(|(watched, _)| watched.task.is_none()) {
            return None;
        }
        match tokio::time::timeout(BUS_TIMEOUT, self.bus.progress_end()).await {
            Ok(Ok(end)) => Some(end),
            // The next poll reads it. Until then a catch-up reads more than necessary.
            Ok(Err(error)) => {
                tracing::debug!(error = chain(&error), "the end of the streams is not known");
                None
            }
            Err(_) => None,
        }
    }
}

/// Forwards the events of the bus to a feed.
struct Listener {
    bus: Bus,
    watched: WatchedEvents,
    sender: broadcast::Sender<LiveItem>,
    head: Arc<AtomicU64>,
    started: watch::Sender<bool>,
}

impl Listener {
    async fn run(self, stop: CancellationToken) {
        tokio::select! {
            () = stop.cancelled() => {}
            () = self.listen() => {}
        }
    }

    /// Subscribes, and subscribes again when that ends; never returns.
    async fn listen(&self) {
        loop {
            let mut connection = self.bus.connection();
            connection.mark_unchanged();
            match tokio::time::timeout(BUS_TIMEOUT, self.bus.subscribe_events(&self.watched.live()))
                .await
            {
                Ok(Ok(events)) => {
                    if self.started.send_replace(true) {
                        // Subscribers exist already, and have missed what was published before
                        // this.
                        self.forward_loss();
                    }
                    self.forward(events, &mut connection).await;
                }
                Ok(Err(error)) => {
                    tracing::debug!(error = chain(&error), "cannot listen to live events")
                }
                Err(_) => tracing::debug!("cannot listen to live events: the bus does not answer"),
            }
            self.started.send_replace(true);
            tokio::time::sleep(SUBSCRIBE_RETRY_DELAY).await;
        }
    }

    /// Forwards events until the bus ends the subscription.
    async fn forward(
        &self,
        mut events: futures::stream::BoxStream<'static, Event>,
        connection: &mut watch::Receiver<Connection>,
    ) {
        loop {
            tokio::select! {
                // First, so that subscribers learn of a loss before the events after it.
                biased;
                changed = connection.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    if matches!(*connection.borrow_and_update(), Connection::Up { .. }) {
                        self.forward_loss();
                    }
                }
                event = events.next() => match event {
                    Some(event) => self.forward_event(event),
                    None => return,
                },
            }
        }
    }

    fn forward_loss(&self) {
        // Fails without subscribers.
        _ = self.sender.send(LiveItem::Lost);
    }

    fn forward_event(&self, event: Event) {
        if event.sequence > 0 {
            metrics::record_delay(&event);
            self.head.fetch_max(event.sequence, Ordering::Relaxed);
        }
        let live = match Mark::from_event(&event) {
            _ if event.encoded_len() <= LARGEST_EVENT_BYTES => LiveItem::Event(Arc::new(event)),
            Mark::Record { sequence, .. } => LiveItem::Head(sequence),
            Mark::Progress { .. } | Mark::Unplaced => LiveItem::Lost,
        };
        _ = self.sender.send(live);
    }
}
