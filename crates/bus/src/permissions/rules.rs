//! Translates the operations of a user into NATS subjects.

use std::collections::BTreeSet;

use super::{Permissions, User};
use crate::{
    subject::{Address, DeadLetters, Question, StreamAddress},
    topology::Stream,
};

/// The rules of one user.
pub(super) struct Rules {
    pub(super) permissions: Permissions,
    /// Questions it asks, by subject.
    pub(super) asked: BTreeSet<String>,
    /// Questions it answers, by subject.
    pub(super) answered: BTreeSet<String>,
    /// Streams it uses.
    pub(super) streams: BTreeSet<&'static str>,
}

pub(super) fn pattern<A: Address>() -> String {
    A::pattern()
}

impl Rules {
    pub(super) fn new(user: User) -> Self {
        // `Bus::flush` publishes to its own inbox.
        let own = format!("{}.>", user.inbox());
        let permissions =
            Permissions { publish: vec![own.clone()], deny: Vec::new(), subscribe: vec![own] };
        Self {
            permissions,
            asked: BTreeSet::new(),
            answered: BTreeSet::new(),
            streams: BTreeSet::new(),
        }
    }

    /// Publishes core NATS messages.
    pub(super) fn publishes<A: Address>(mut self) -> Self {
        self.publish(A::pattern());
        self
    }

    /// Publishes into a stream.
    pub(super) fn stores<A: StreamAddress>(self) -> Self {
        self.stores_at(A::STREAM, A::pattern())
    }

    /// Publishes messages of a pattern into a stream.
    pub(super) fn stores_at(mut self, stream: Stream, pattern: String) -> Self {
        self.publish(pattern);
        self.uses(stream)
    }

    /// Denies publishing to a pattern, whatever else is allowed.
    pub(super) fn denies(mut self, pattern: String) -> Self {
        self.permissions.deny.push(pattern);
        self
    }

    pub(super) fn subscribes(mut self, pattern: String) -> Self {
        self.permissions.subscribe.push(pattern);
        self
    }

    pub(super) fn subscribes_all<A: Address>(self) -> Self {
        self.subscribes(A::pattern())
    }

    pub(super) fn subscribes_at<A: Address>(self, address: &A) -> Self {
        self.subscribes(address.subject())
    }

    pub(super) fn asks<Q: Question>(mut self) -> Self {
        self.publish(Q::pattern());
        self.asked.insert(Q::pattern());
        self
    }

    /// Answers go to the inboxes of all users that ask.
    pub(super) fn answers<Q: Question>(mut self) -> Self {
        self.answered.insert(Q::pattern());
        self.subscribes(Q::pattern())
    }

    /// Uses a consumer of a stream, creates it with `filter` if there is one, and publishes dead
    /// letters.
    pub(super) fn consumes(mut self, stream: Stream, durable: &str, filter: Option<&str>) -> Self {
        let name = stream.name();
        self.api(format!("CONSUMER.INFO.{name}.{durable}"));
        self.api(format!("CONSUMER.MSG.NEXT.{name}.{durable}"));
        if let Some(filter) = filter {
            self.api(format!("CONSUMER.CREATE.{name}.{durable}.{filter}"));
            self.api(format!("CONSUMER.DELETE.{name}.{durable}"));
        }
        self.publish(format!("$JS.ACK.{name}.{durable}.>"));
        // The form of a cluster with domains.
        self.publish(format!("$JS.ACK.*.*.{name}.{durable}.>"));
        self.publish(DeadLetters { stream }.subject());
        self.uses(stream).uses(Stream::DeadLetters)
    }

    /// Reads messages of a stream one by one.
    pub(super) fn reads(mut self, stream: Stream) -> Self {
        self.api(format!("STREAM.MSG.GET.{}", stream.name()));
        self.uses(stream)
    }

    /// Removes messages of a stream.
    pub(super) fn removes(mut self, stream: Stream) -> Self {
        self.api(format!("STREAM.MSG.DELETE.{}", stream.name()));
        self.uses(stream)
    }

    /// Purges a stream.
    pub(super) fn purges(mut self, stream: Stream) -> Self {
        self.api(format!("STREAM.PURGE.{}", stream.name()));
        self.uses(stream)
    }

    /// Reads a stream through its own consumers with one of the filters.
    pub(super) fn reads_through_consumers(mut self, stream: Stream, filters: &[String]) -> Self {
        let name = stream.name();
        for filter in filters {
            self.api(format!("CONSUMER.CREATE.{name}.*.{filter}"));
        }
        self.api(format!("CONSUMER.MSG.NEXT.{name}.*"));
        self.api(format!("CONSUMER.DELETE.{name}.*"));
        self.reads(stream)
    }

    /// Reads the state of a stream and its consumers.
    pub(super) fn inspects(mut self, stream: Stream) -> Self {
        self.api(format!("CONSUMER.INFO.{}.*", stream.name()));
        self.uses(stream)
    }

    /// Creates and updates a stream and its consumers.
    pub(super) fn manages(mut self, stream: Stream) -> Self {
        let name = stream.name();
        self.api(format!("STREAM.CREATE.{name}"));
        self.api(format!("STREAM.UPDATE.{name}"));
        self.api(format!("CONSUMER.CREATE.{name}.>"));
        self.api(format!("CONSUMER.DELETE.{name}.*"));
        self.uses(stream)
    }

    /// Lists the consumers of a stream.
    pub(super) fn lists_consumers(mut self, stream: Stream) -> Self {
        self.api(format!("CONSUMER.NAMES.{}", stream.name()));
        self.uses(stream)
    }

    fn uses(mut self, stream: Stream) -> Self {
        if self.streams.insert(stream.name()) {
            self.api(format!("STREAM.INFO.{}", stream.name()));
        }
        self
    }

    fn api(&mut self, request: String) {
        self.publish(format!("$JS.API.{request}"));
    }

    fn publish(&mut self, pattern: String) {
        if !self.permissions.publish.contains(&pattern) {
            self.permissions.publish.push(pattern);
        }
    }
}
