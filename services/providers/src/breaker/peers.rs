//! Exchanges breaker states between the processes of the service, over plain NATS. A lost message
//! costs some more failing calls, nothing else.

use std::time::Duration;

use construct_bus::{
    Bus,
    subject::{BreakerState, BreakerUpdate},
    subscribe,
};
use construct_proto::{
    mesh::v1::{BreakerChanged, BreakerQuery, BreakerRef, BreakersRequest},
    v1::{self, breaker},
};
use construct_runtime::Lifecycle;
use futures::{StreamExt as _, stream::BoxStream};
use tokio::{sync::mpsc, time::sleep};
use tokio_util::sync::CancellationToken;

use super::{Breakers, Change, Key, PeerUpdate, duration_to_proto};

/// Delay before NATS is tried again.
const RETRY_DELAY: Duration = Duration::from_millis(500);

/// Starts to publish and receive states, until the service drains. Returns when it is subscribed,
/// and has requested the open breakers of the other processes.
///
/// # Errors
/// When NATS cannot be reached.
pub(crate) async fn start(
    bus: &Bus,
    instance: &str,
    breakers: &Breakers,
    changed: mpsc::UnboundedReceiver<Change>,
    lifecycle: &Lifecycle,
) -> Result<(), subscribe::Error> {
    let news = bus.subscribe_breakers().await?;
    let wanted = bus.subscribe_breaker_requests().await?;
    let exchange = PeerExchange {
        bus: bus.clone(),
        instance: instance.to_owned(),
        breakers: breakers.clone(),
    };
    lifecycle
        .spawn_job("breaker-news", exchange.clone().receive_updates(news, lifecycle.draining()));
    lifecycle.spawn_job(
        "breakers-wanted",
        exchange.clone().answer_snapshot_requests(wanted, lifecycle.draining()),
    );
    lifecycle.spawn_job(
        "breaker-changes",
        exchange.clone().publish_changes(changed, lifecycle.draining()),
    );
    lifecycle.spawn_job(
        "breaker-questions",
        exchange.clone().answer_state_queries(lifecycle.draining()),
    );
    if let Err(error) =
        bus.request_breakers(&BreakersRequest { instance: instance.to_owned() }).await
    {
        tracing::warn!(%error, "the other processes cannot be asked which breakers are open");
    }
    Ok(())
}

#[derive(Clone)]
struct PeerExchange {
    bus: Bus,
    instance: String,
    breakers: Breakers,
}

impl PeerExchange {
    async fn receive_updates(
        self,
        mut news: BoxStream<'static, BreakerChanged>,
        draining: CancellationToken,
    ) {
        loop {
            let heard = tokio::select! {
                () = draining.cancelled() => return,
                heard = news.next() => heard,
            };
            match heard {
                Some(heard) if heard.instance == self.instance => {}
                Some(heard) => {
                    if let Some((key, news)) = parse_update(heard) {
                        self.breakers.apply_peer_update(&key, news);
                    }
                }
                None => {
                    sleep(RETRY_DELAY).await;
                    if let Ok(again) = self.bus.subscribe_breakers().await {
                        news = again;
                    }
                }
            }
        }
    }

    async fn answer_snapshot_requests(
        self,
        mut wanted: BoxStream<'static, BreakersRequest>,
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
                    for change in self.breakers.open_breakers() {
                        self.publish(change).await;
                    }
                }
                None => {
                    sleep(RETRY_DELAY).await;
                    if let Ok(again) = self.bus.subscribe_breaker_requests().await {
                        wanted = again;
                    }
                }
            }
        }
    }

    async fn publish_changes(
        self,
        mut changed: mpsc::UnboundedReceiver<Change>,
        draining: CancellationToken,
    ) {
        loop {
            let change = tokio::select! {
                () = draining.cancelled() => return,
                change = changed.recv() => change,
            };
            let Some(change) = change else { return };
            self.publish(change).await;
        }
    }

    async fn answer_state_queries(self, draining: CancellationToken) {
        let breakers = &self.breakers;
        while !draining.is_cancelled() {
            let answered = self.bus.answer(
                &BreakerState,
                draining.clone(),
                |question: BreakerQuery| async move {
                    Some(question.breaker.map_or_else(v1::Breaker::default, |breaker| {
                        breakers.status(&key_from_proto(breaker))
                    }))
                },
            );
            if let Err(error) = answered.await {
                tracing::warn!(%error, "questions about breakers cannot be heard yet");
                sleep(RETRY_DELAY).await;
            }
        }
    }

    async fn publish(&self, Change { key, update: news }: Change) {
        let (state, remaining) = match news {
            PeerUpdate::Closed => (breaker::State::Closed, None),
            PeerUpdate::Open(left) => (breaker::State::Open, Some(duration_to_proto(left))),
            PeerUpdate::HalfOpen => (breaker::State::HalfOpen, None),
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
        if let Err(error) = self
            .bus
            .publish_breaker(&BreakerUpdate { instance: self.instance.clone() }, &changed)
            .await
        {
            tracing::warn!(%error, "the other processes cannot be told how a breaker has changed");
        }
    }
}

fn key_from_proto(breaker: BreakerRef) -> Key {
    Key { provider_id: breaker.provider_id, vendor_model: breaker.vendor_model }
}

fn parse_update(changed: BreakerChanged) -> Option<(Key, PeerUpdate)> {
    let news = match changed.state() {
        breaker::State::Closed => PeerUpdate::Closed,
        breaker::State::HalfOpen => PeerUpdate::HalfOpen,
        breaker::State::Open => PeerUpdate::Open(Duration::try_from(changed.remaining?).ok()?),
        breaker::State::Unspecified => return None,
    };
    Some((key_from_proto(changed.breaker?), news))
}
