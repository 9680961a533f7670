//! The one table of who may do what at NATS: what each service publishes and subscribes to, and
//! nothing else. The server enforces it: [`config`] writes its configuration, which is committed
//! (`deploy/nats/permissions.conf`).
//!
//! JetStream does on behalf of who asks it what he may not do himself: it delivers a consumer's
//! messages to any subject he names (nats-server#8274). So besides the reconciler nobody makes
//! streams, and nobody takes messages that he could have published himself; Slack's service, which
//! queues for itself, is the exception that [ADR 34](../../../docs/adr/0034-nats-permissions.md)
//! tells of.

mod rules;
mod server;

use std::collections::BTreeSet;

pub use server::config;

use self::rules::Rules;
use crate::{
    subject::{
        BreakerState, BreakerUpdate, BreakersRequest, Budgets, Cancel, Census, CheckProvider,
        CodeExecute, CountTokens, Delta, EntityEvent, Journal, ListRepositories, ListVendorModels,
        ModelInvoke, Models, ReconcilerBeat, ScanRun, ScanUpdate, Service, SlackDelivery, Spending,
        StateUpdate, StepLocation, Subtasks, TaskEvent, TaskResult, TaskWake, ToolCreate, Tools,
        all_subjects,
    },
    topology::{self, Stream},
};

/// Who connects to NATS, each with a password of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum User {
    /// Every outward face.
    Gateway,
    /// Runs scripts.
    Interpreter,
    /// Calls models.
    Providers,
    /// Decides about tasks. It alone makes streams, and commands the others.
    Reconciler,
    /// Looks through repositories.
    Scanner,
    /// Talks to Slack.
    Slack,
    /// People who watch what passes (`construct tap`) and change nothing.
    Tap,
}

impl User {
    /// Everybody, alphabetically.
    pub const ALL: [Self; 7] = [
        Self::Gateway,
        Self::Interpreter,
        Self::Providers,
        Self::Reconciler,
        Self::Scanner,
        Self::Slack,
        Self::Tap,
    ];

    /// The name to log in with.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Interpreter => "interpreter",
            Self::Providers => "providers",
            Self::Reconciler => "reconciler",
            Self::Scanner => "scanner",
            Self::Slack => "slack",
            Self::Tap => "tap",
        }
    }

    /// Where answers to it go; nobody else hears them.
    pub fn inbox(self) -> String {
        format!("_INBOX.{}", self.name())
    }

    /// The environment variable of the server that holds its password.
    pub fn password_variable(self) -> String {
        format!("CONSTRUCT_NATS_{}_PASSWORD", self.name().to_uppercase())
    }

    /// Whether it makes the streams; the others wait for them.
    pub const fn makes_streams(self) -> bool {
        matches!(self, Self::Reconciler)
    }

    /// Whether it makes the consumers that it takes from; else it waits until the reconciler has
    /// made them.
    pub const fn makes_consumers(self) -> bool {
        !matches!(self, Self::Slack | Self::Tap)
    }

    /// What it is allowed.
    pub fn permissions(self) -> Permissions {
        let mut permissions = self.rules().permissions;
        for asker in Self::ALL {
            if !asker.rules().asked.is_disjoint(&self.rules().answered) {
                permissions.publish.push(format!("{}.>", asker.inbox()));
            }
        }
        permissions
    }

    /// The streams that must be there before it can work.
    pub(crate) fn streams(self) -> BTreeSet<&'static str> {
        self.rules().streams
    }

    fn rules(self) -> Rules {
        let rules = Rules::new(self);
        match self {
            Self::Gateway => gateway(rules),
            Self::Interpreter => interpreter(rules),
            Self::Providers => providers(rules),
            Self::Reconciler => reconciler(rules),
            Self::Scanner => rules
                .consumes(
                    Stream::Scan,
                    &topology::scan_consumer().durable,
                    Some(&topology::scan_consumer().filter),
                )
                .stores::<ScanUpdate>()
                .stores::<ToolCreate>()
                .answers::<ListRepositories>(),
            Self::Slack => rules
                .consumes(Stream::Slack, &topology::slack_consumer().durable, None)
                .stores::<SlackDelivery>(),
            Self::Tap => rules.subscribes(all_subjects()),
        }
    }
}

/// What a user is allowed. Everything else is refused.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Permissions {
    /// Subjects it may publish to.
    pub publish: Vec<String>,
    /// What of these it may not.
    pub deny: Vec<String>,
    /// Subjects it may subscribe to.
    pub subscribe: Vec<String>,
}

/// It writes PostgreSQL anyway, so what it may publish of other services' (when a dead letter is
/// sent again) gives it no power that it has not; it cannot command the interpreter and the
/// providers.
fn gateway(rules: Rules) -> Rules {
    let rules = rules
        .stores::<TaskWake>()
        .stores::<ScanRun>()
        .stores::<ToolCreate>()
        .stores::<TaskEvent>()
        .asks::<BreakerState>()
        .asks::<CheckProvider>()
        .asks::<ListVendorModels>()
        .asks::<ListRepositories>()
        .asks::<Tools>()
        .asks::<StepLocation>()
        .subscribes_all::<TaskEvent>()
        .subscribes_all::<Delta>()
        .subscribes_all::<ScanUpdate>()
        .publishes::<StateUpdate>()
        .subscribes_all::<StateUpdate>()
        // DeadLetters letters: told, removed, and published where they were found.
        .reads(Stream::DeadLetters)
        .removes(Stream::DeadLetters)
        .stores::<TaskResult>()
        .stores::<Spending>()
        .stores::<SlackDelivery>()
        // What is left of an organization that is erased.
        .purges(Stream::Events)
        .purges(Stream::Deltas)
        // What subscribers missed. Of what it reads through consumers, it publishes nothing.
        .reads_through_consumers(Stream::Deltas, &[rules::pattern::<Delta>()])
        .reads_through_consumers(Stream::Events, &[TaskEvent::any_tool()])
        .denies(TaskEvent::any_tool());
    let rules = EntityEvent::KINDS.iter().fold(rules, |rules, kind| {
        rules.stores_at(Stream::Events, EntityEvent::any(kind)).subscribes(EntityEvent::any(kind))
    });
    // `construct doctor`.
    Stream::ALL.into_iter().fold(rules, Rules::inspects)
}

fn interpreter(rules: Rules) -> Rules {
    rules
        // Pools have any name, and their consumers are made by who serves them.
        .consumes(Stream::Code, "*", Some(&rules::pattern::<CodeExecute>()))
        .stores::<TaskResult>()
        .stores::<Journal>()
        .reads(Stream::Journal)
        .stores_at(Stream::Events, TaskEvent::any_tool())
        .subscribes_at(&Cancel { service: Service::Interpreter })
        // What time it is.
        .subscribes_all::<ReconcilerBeat>()
        .asks::<Census>()
        .asks::<Subtasks>()
        .answers::<Tools>()
}

fn providers(rules: Rules) -> Rules {
    rules
        .consumes(Stream::Model, "*", Some(&rules::pattern::<ModelInvoke>()))
        .stores::<TaskResult>()
        .stores::<Delta>()
        .stores::<Spending>()
        .publishes::<BreakerUpdate>()
        .publishes::<BreakersRequest>()
        .subscribes_all::<BreakerUpdate>()
        .subscribes_all::<BreakersRequest>()
        .subscribes_at(&Cancel { service: Service::Providers })
        // What time it is.
        .subscribes_all::<ReconcilerBeat>()
        .asks::<Models>()
        .asks::<Budgets>()
        .answers::<BreakerState>()
        .answers::<CheckProvider>()
        .answers::<ListVendorModels>()
        .answers::<CountTokens>()
}

/// It commands the others and makes what they need, so it is trusted with the streams.
fn reconciler(rules: Rules) -> Rules {
    let rules = rules
        .consumes(Stream::Task, "*", None)
        .consumes(Stream::Spending, &topology::spending_consumer().durable, None)
        .stores::<TaskWake>()
        .stores::<ModelInvoke>()
        .stores::<CodeExecute>()
        .stores::<Journal>()
        .stores::<TaskEvent>()
        // Reports that cannot be booked are put aside whole.
        .reads(Stream::Spending)
        // Commands that gave way to others, results that wait, journals that are over.
        .reads(Stream::Task)
        // What NATS cannot read any more is in the way of what comes after it.
        .purges(Stream::Task)
        .reads(Stream::Model)
        .reads(Stream::Code)
        .reads(Stream::Journal)
        .removes(Stream::Model)
        .purges(Stream::Model)
        .removes(Stream::Code)
        .purges(Stream::Code)
        .lists_consumers(Stream::Code)
        // How far commands were handed out.
        .inspects(Stream::Model)
        .removes(Stream::Journal)
        .purges(Stream::Journal)
        .reads_through_consumers(Stream::Journal, &[])
        .publishes::<Cancel>()
        .publishes::<ReconcilerBeat>()
        .subscribes_all::<ReconcilerBeat>()
        .asks::<Tools>()
        .answers::<Census>()
        .answers::<Models>()
        .answers::<Budgets>()
        .answers::<Subtasks>()
        .answers::<StepLocation>();
    let rules = EntityEvent::KINDS
        .iter()
        .fold(rules, |rules, kind| rules.stores_at(Stream::Events, EntityEvent::any(kind)));
    Stream::ALL.into_iter().fold(rules, Rules::makes)
}
