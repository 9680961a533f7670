//! Breakers of all processes of the service tell each other how they change, over plain NATS. News
//! that is lost costs calls that fail once more, nothing else.

use std::time::Duration;

use construct_bus::{
    Bus,
    subject::{BreakerNews, BreakerState},
    subscribe,
};
use construct_proto::{
    mesh::v1::{BreakerChanged, BreakerQuestion, BreakerRef, BreakersWanted},
    v1::{self, breaker},
};
use construct_runtime::Lifecycle;
use futures::{StreamExt as _, stream::BoxStream};
use tokio::{sync::mpsc, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{Breakers, Change, Key, News, wire_duration};

/// Before the mesh is tried again.
const PAUSE: Duration = Duration::from_millis(500);

/// Tells and hears, until the service drains. Returns when it hears, and has asked the others what
/// is open.
///
/// # Errors
/// When the mesh cannot be reached.
pub(crate) async fn start(
    bus: &Bus,
    instance: &str,
    breakers: &Breakers,
    changed: mpsc::UnboundedReceiver<Change>,
    lifecycle: &Lifecycle,
) -> Result<(), subscribe::Error> {
    let news = bus.hear_breakers().await?;
    let wanted = bus.hear_breakers_wanted().await?;
    let sharing =
        Sharing { bus: bus.clone(), instance: instance.to_owned(), breakers: breakers.clone() };
    lifecycle.spawn_job("breaker-news", sharing.clone().hear(news, lifecycle.draining()));
    lifecycle
        .spawn_job("breakers-wanted", sharing.clone().tell_who_asks(wanted, lifecycle.draining()));
    lifecycle.spawn_job("breaker-changes", sharing.clone().tell(changed, lifecycle.draining()));
    lifecycle.spawn_job("breaker-questions", sharing.clone().answer(lifecycle.draining()));
    if let Err(error) = bus.want_breakers(&BreakersWanted { instance: instance.to_owned() }).await {
        tracing::warn!(%error, "the other processes cannot be asked which breakers are open");
    }
    Ok(())
}

#[derive(Clone)]
struct Sharing {
    bus: Bus,
    instance: String,
    breakers: Breakers,
}

impl Sharing {
    async fn hear(self, mut news: BoxStream<'static, BreakerChanged>, draining: CancellationToken) {
        loop {
            let heard = tokio::select! {
                () = draining.cancelled() => return,
                heard = news.next() => heard,
            };
            match heard {
                Some(heard) if heard.instance == self.instance => {}
                Some(heard) => {
                    if let Some((key, news)) = read(heard) {
                        self.breakers.hear(&key, news);
                    }
                }
                None => {
                    sleep(PAUSE).await;
                    if let Ok(again) = self.bus.hear_breakers().await {
                        news = again;
                    }
                }
            }
        }
    }

    async fn tell_who_asks(
        self,
        mut wanted: BoxStream<'static, BreakersWanted>,
        draining: CancellationToken,
    ) {
        loop {
            let asked = tokio::select! {
                () = draining.cancelled() => return,
                asked = wanted.next() => asked,
            };
            match asked {
                Some(asked) if asked.instance == self.instance => {}
                Some(_) => {
                    for change in self.breakers.open() {
                        self.publish(change).await;
                    }
                }
                None => {
                    sleep(PAUSE).await;
                    if let Ok(again) = self.bus.hear_breakers_wanted().await {
                        wanted = again;
                    }
                }
            }
        }
    }

    async fn tell(self, mut changed: mpsc::UnboundedReceiver<Change>, draining: CancellationToken) {
        loop {
            let change = tokio::select! {
                () = draining.cancelled() => return,
                change = changed.recv() => change,
            };
            let Some(change) = change else { return };
            self.publish(change).await;
        }
    }

    async fn answer(self, draining: CancellationToken) {
        let breakers = &self.breakers;
        while !draining.is_cancelled() {
            let answered = self.bus.answer(
                &BreakerState,
                draining.clone(),
                |question: BreakerQuestion| async move {
                    Some(question.breaker.map_or_else(v1::Breaker::default, |breaker| {
                        breakers.status(&key(breaker))
                    }))
                },
            );
            if let Err(error) = answered.await {
                tracing::warn!(%error, "questions about breakers cannot be heard yet");
                sleep(PAUSE).await;
            }
        }
    }

    async fn publish(&self, Change { key, news }: Change) {
        let (state, remaining) = match news {
            News::Closed => (breaker::State::Closed, None),
            News::Open(left) => (breaker::State::Open, Some(wire_duration(left))),
            News::HalfOpen => (breaker::State::HalfOpen, None),
        };
        let changed = BreakerChanged {
            instance: self.instance.clone(),
            breaker: Some(BreakerRef {
                provider_id: key.provider_id,
                vendor_model: key.vendor_model,
            }),
            state: state.into(),
            remaining,
        };
        if let Err(error) =
            self.bus.tell_breaker(&BreakerNews { instance: self.instance.clone() }, &changed).await
        {
            tracing::warn!(%error, "the other processes cannot be told how a breaker has changed");
        }
    }
}

fn key(breaker: BreakerRef) -> Key {
    Key { provider_id: breaker.provider_id, vendor_model: breaker.vendor_model }
}

fn read(changed: BreakerChanged) -> Option<(Key, News)> {
    let news = match changed.state() {
        breaker::State::Closed => News::Closed,
        breaker::State::HalfOpen => News::HalfOpen,
        breaker::State::Open => News::Open(Duration::try_from(changed.remaining?).ok()?),
        breaker::State::Unspecified => return None,
    };
    Some((key(changed.breaker?), news))
}
