//! Calls the model. The one place of the proxy that does.
//!
//! What fails before anything of the answer was passed on is tried again, as within a turn; after that the client is told,
//! because nothing can be taken back from it.

use std::{collections::VecDeque, sync::Arc};

use construct_domain::money::Usage;
use construct_proto::mesh::v1::FailureClass;
use futures::stream::{BoxStream, StreamExt as _};
use jiff::Timestamp;
use secrecy::ExposeSecret as _;
use tokio::time::{Instant, sleep, timeout_at};

use super::models::Route;
use crate::{
    failure::Failure,
    retry::Policy,
    vendor::{Chunk, Request},
};

/// One call of a model. Dropping it closes the vendor's connection.
pub(crate) struct Call {
    route: Arc<Route>,
    request: Arc<Request>,
    policy: Policy,
    deadline: Instant,
    chunks: Option<BoxStream<'static, Result<Chunk, Failure>>>,
    /// What may still be taken back: nothing of the answer has come.
    held: VecDeque<Chunk>,
    shown: bool,
    failed: u32,
    /// What tries that failed have used.
    lost: Usage,
}

impl Call {
    pub(crate) fn new(route: Arc<Route>, request: Arc<Request>, policy: Policy, deadline: Instant) -> Self {
        Self {
            route,
            request,
            policy,
            deadline,
            chunks: None,
            held: VecDeque::new(),
            shown: false,
            failed: 0,
            lost: Usage::default(),
        }
    }

    /// What tries that failed before this one have used, as far as their vendor said it.
    pub(crate) fn lost(&self) -> Usage {
        self.lost
    }

    /// The next piece of the answer; none at its end.
    pub(crate) async fn next(&mut self) -> Option<Result<Chunk, Failure>> {
        loop {
            if self.shown
                && let Some(chunk) = self.held.pop_front()
            {
                return Some(Ok(chunk));
            }
            let (vendor, request) = (&self.route.vendor, &self.request);
            let chunks = self.chunks.get_or_insert_with(|| vendor.invoke(Arc::clone(request)));
            let failure = match timeout_at(self.deadline, chunks.next()).await {
                Ok(None) if self.shown => return None,
                // An answer without a word is one, too.
                Ok(None) => {
                    self.shown = true;
                    if self.held.is_empty() {
                        return None;
                    }
                    continue;
                }
                Ok(Some(Ok(chunk))) => {
                    self.shown |= !matches!(chunk, Chunk::Usage(_));
                    self.held.push_back(chunk);
                    continue;
                }
                Ok(Some(Err(failure))) => failure,
                Err(_elapsed) => {
                    Failure::new(FailureClass::DeadlineExceeded, "the model did not finish its answer in time")
                }
            };
            let mut failure = failure.scrubbed(self.route.key.as_ref().map(|key| key.expose_secret()));
            self.failed += 1;
            failure.tries = self.failed;
            let left = self.deadline.saturating_duration_since(Instant::now());
            let pause = self.policy.pause(self.failed, &failure, left, Timestamp::now(), fastrand::f64());
            let Some(pause) = pause.filter(|_| !self.shown) else { return Some(Err(failure)) };
            self.chunks = None;
            for chunk in self.held.drain(..) {
                if let Chunk::Usage(usage) = chunk {
                    self.lost = usage;
                }
            }
            tracing::info!(
                class = failure.class.as_str_name(),
                failed = self.failed,
                "a model call of the proxy is tried again: {failure}"
            );
            sleep(pause).await;
        }
    }
}
