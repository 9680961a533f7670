//! Feeds: what is live about one task or organization, heard once by the process and passed on to
//! all who watch it.
//!
//! A feed's buffer is bounded in number and size of what it holds, and the same for all: who is too
//! slow for it loses what was overwritten, knows that, and reads it again. So no subscriber can
//! slow another or the feed down. A feed ends with its last subscriber.

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
    Watched,
    marks::Past,
    merge::{Live, Mark},
    replays::Replays,
};
use crate::{metrics, status::chain};

/// Items a feed remembers for its slowest subscriber.
const BUFFER: usize = 256;
/// Bytes of an event at most that is kept in a feed's buffer, which so holds at most 16 MiB. Of a
/// larger one only its place is passed on, and each subscriber reads it when it is ready for it.
const LARGEST: usize = 64 * 1024;
/// How often the streams' heads are looked at. Only records whose publication was lost wait for it.
const LOOK: Duration = Duration::from_secs(3);
/// Streams asked for with one query.
const CHUNK: usize = 1000;
/// How long the bus may take to subscribe. After that subscribers go on with what PostgreSQL tells.
const PATIENCE: Duration = Duration::from_secs(2);
/// The pause before subscribing again.
const PAUSE: Duration = Duration::from_secs(1);

/// All feeds of the process.
pub(crate) struct Hub {
    store: Store,
    bus: Bus,
    lifecycle: Lifecycle,
    feeds: Mutex<HashMap<Watched, Weak<Feed>>>,
    pub(super) replays: Replays,
}

/// A place at a feed; it lives at least as long.
pub(crate) struct Joined {
    pub(super) live: broadcast::Receiver<Live>,
    feed: Arc<Feed>,
}

impl Joined {
    /// How far the progress went when it was last looked, and then the records.
    pub(super) fn past(&self) -> Past {
        *self.feed.past.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Feed {
    sender: broadcast::Sender<Live>,
    /// Sequence of the newest record heard of.
    head: Arc<AtomicU64>,
    past: Mutex<Past>,
    /// Whether the bus was asked at least once.
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

    /// Listens to a feed. When this returns the bus has been subscribed to, or is not there.
    pub(crate) async fn join(&self, watched: Watched) -> Joined {
        let feed = self.feed(watched);
        let live = feed.sender.subscribe();
        // Fails only when the feed has ended with the process.
        _ = feed.started.clone().wait_for(|started| *started).await;
        Joined { live, feed }
    }

    fn feed(&self, watched: Watched) -> Arc<Feed> {
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
            past: Mutex::default(),
            started: has_started,
            _stop: stop.drop_guard(),
        });
        feeds.insert(watched, Arc::downgrade(&feed));
        feed
    }

    /// Looks after records whose publication was lost, until the process drains.
    pub(crate) async fn watch(&self) {
        let draining = self.lifecycle.draining();
        let mut failing = false;
        loop {
            tokio::select! {
                () = draining.cancelled() => return,
                () = tokio::time::sleep(LOOK) => {}
            }
            match self.look().await {
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

    /// Tells every feed the head of its stream, if it has not heard of it.
    async fn look(&self) -> Result<(), Error> {
        let feeds: Vec<(Watched, Arc<Feed>)> = {
            let feeds = self.feeds.lock().unwrap_or_else(PoisonError::into_inner);
            feeds
                .iter()
                .filter_map(|(watched, feed)| feed.upgrade().map(|feed| (*watched, feed)))
                .collect()
        };
        // Before the heads: what is stored by now is of steps that records up to them begin.
        let end = self.end(&feeds).await;
        for feeds in feeds.chunks(CHUNK) {
            let streams: Vec<_> = feeds.iter().map(|(watched, _)| watched.stored()).collect();
            for ((_, feed), (_, head)) in feeds.iter().zip(self.store.event_heads(&streams).await?)
            {
                if feed.head.fetch_max(head, Ordering::Relaxed) < head {
                    // Without subscribers nobody needs to know.
                    _ = feed.sender.send(Live::Head(head));
                }
                if let Some(end) = end {
                    *feed.past.lock().unwrap_or_else(PoisonError::into_inner) = Past { end, head };
                }
            }
        }
        Ok(())
    }

    /// The end of the streams that keep progress, if any feed has some.
    async fn end(&self, feeds: &[(Watched, Arc<Feed>)]) -> Option<Bookmark> {
        if !self.bus.is_connected() || feeds.iter().all(|(watched, _)| watched.task.is_none()) {
            return None;
        }
        match tokio::time::timeout(PATIENCE, self.bus.progress_end()).await {
            Ok(Ok(end)) => Some(end),
            // The next look finds it. Until then a catch-up reads more than it would have to.
            Ok(Err(error)) => {
                tracing::debug!(error = chain(&error), "the end of the streams is not known");
                None
            }
            Err(_) => None,
        }
    }
}

/// What keeps a feed going.
struct Listener {
    bus: Bus,
    watched: Watched,
    sender: broadcast::Sender<Live>,
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

    /// Subscribes again and again; never returns.
    async fn listen(&self) {
        loop {
            let mut connection = self.bus.connection();
            connection.mark_unchanged();
            match tokio::time::timeout(PATIENCE, self.bus.live(&self.watched.live())).await {
                Ok(Ok(events)) => {
                    if self.started.send_replace(true) {
                        // Somebody is watching already, and did not hear what was published before
                        // this.
                        self.pass_on_lost();
                    }
                    self.pass_on(events, &mut connection).await;
                }
                Ok(Err(error)) => {
                    tracing::debug!(error = chain(&error), "cannot listen to live events")
                }
                Err(_) => tracing::debug!("cannot listen to live events: the bus does not answer"),
            }
            self.started.send_replace(true);
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Until the bus ends the subscription.
    async fn pass_on(
        &self,
        mut events: futures::stream::BoxStream<'static, Event>,
        connection: &mut watch::Receiver<Connection>,
    ) {
        loop {
            tokio::select! {
                // First, so that a loss is known before what came after it.
                biased;
                changed = connection.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    if matches!(*connection.borrow_and_update(), Connection::Up { .. }) {
                        self.pass_on_lost();
                    }
                }
                event = events.next() => match event {
                    Some(event) => self.pass_on_event(event),
                    None => return,
                },
            }
        }
    }

    fn pass_on_lost(&self) {
        // Without subscribers nobody needs to know.
        _ = self.sender.send(Live::Lost);
    }

    fn pass_on_event(&self, event: Event) {
        if event.sequence > 0 {
            metrics::heard(&event);
            self.head.fetch_max(event.sequence, Ordering::Relaxed);
        }
        let live = match Mark::of(&event) {
            _ if event.encoded_len() <= LARGEST => Live::Event(Arc::new(event)),
            Mark::Record { sequence, .. } => Live::Head(sequence),
            Mark::Progress { .. } | Mark::Unplaced => Live::Lost,
        };
        _ = self.sender.send(live);
    }
}
