//! The one table of NATS permissions: what each service publishes and subscribes to, and nothing
//! else. The server enforces it. [`config`] writes its configuration, which is committed
//! (`deploy/nats/permissions.conf`).
//!
//! JetStream acts on behalf of clients with more rights than they have: it delivers a consumer's
//! messages to any subject the client names (nats-server#8274). So only the reconciler creates
//! streams, and no user consumes messages that it could have published itself. The exception is
//! Slack's service, which queues for itself; [ADR 34](../../../docs/adr/0034-nats-permissions.md)
//! explains it.

mod rules;
mod server;

use std::collections::BTreeSet;

pub use server::config;

use self::rules::Rules;
use crate::{
    subject::{
        BreakerState, BreakerUpdate, BreakersRequest, Budgets, Cancel, Census, CheckProvider,
        CodeExecute, CountTokens, Delta, EntityEvent, Journal, ListRepositories, ListVendorModels,
        ModelInvoke, Models, ReconcilerHeartbeat, ScanRun, ScanUpdate, Service, SlackDelivery,
        Spending, StateUpdate, StepLocation, Subtasks, TaskEvent, TaskResult, TaskWake, ToolCreate,
        Tools, all_subjects,
    },
    topology::{self, Stream},
};

/// A NATS user. Each has its own password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum User {
    /// Serves all client protocols.
    Gateway,
    /// Runs scripts.
    Interpreter,
    /// Calls models.
    Providers,
    /// Decides about tasks. Only it creates streams and commands the other services.
    Reconciler,
    /// Scans repositories.
    Scanner,
    /// Talks to Slack.
    Slack,
    /// People who watch messages (`construct tap`). Read-only.
    Tap,
}

impl User {
    /// All users, alphabetically.
    pub const ALL: [Self; 7] = [
        Self::Gateway,
        Self::Interpreter,
        Self::Providers,
        Self::Reconciler,
        Self::Scanner,
        Self::Slack,
        Self::Tap,
    ];

    /// The login name.
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

    /// The prefix of its reply subjects, which only it receives.
    pub fn inbox(self) -> String {
        format!("_INBOX.{}", self.name())
    }

    /// The server's environment variable with its password.
    pub fn password_variable(self) -> String {
        format!("CONSTRUCT_NATS_{}_PASSWORD", self.name().to_uppercase())
    }

    /// Whether it creates the streams. The other users wait for them.
    pub const fn makes_streams(self) -> bool {
        matches!(self, Self::Reconciler)
    }

    /// Whether it creates the consumers it uses. Otherwise it waits until the reconciler has
    /// created them.
    pub const fn makes_consumers(self) -> bool {
        !matches!(self, Self::Slack | Self::Tap)
    }

    /// Its permissions.
    pub fn permissions(self) -> Permissions {
        let mut permissions = self.rules().permissions;
        for asker in Self::ALL {
            if !asker.rules().asked.is_disjoint(&self.rules().answered) {
                permissions.publish.push(format!("{}.>", asker.inbox()));
            }
        }
        permissions
    }

    /// The streams that must exist before it can work.
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

/// The permissions of a user. Everything else is denied.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Permissions {
    /// Subjects it may publish to.
    pub publish: Vec<String>,
    /// Exceptions from these.
    pub deny: Vec<String>,
    /// Subjects it may subscribe to.
    pub subscribe: Vec<String>,
}

/// The gateway writes PostgreSQL anyway. So publishing other services' messages when it redrives a
/// dead letter gives it no additional power. It cannot command the interpreter and the providers.
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
        // Dead letters: listed, removed and redriven.
        .reads(Stream::DeadLetters)
        .removes(Stream::DeadLetters)
        .stores::<TaskResult>()
        .stores::<Spending>()
        .stores::<SlackDelivery>()
        // Messages of a deleted organization.
        .purges(Stream::Events)
        .purges(Stream::Deltas)
        // Messages that subscribers missed. It publishes nothing of what it reads through
        // consumers.
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
        // Pools have any name, and their interpreters create the consumers.
        .consumes(Stream::Code, "*", Some(&rules::pattern::<CodeExecute>()))
        .stores::<TaskResult>()
        .stores::<Journal>()
        .reads(Stream::Journal)
        .stores_at(Stream::Events, TaskEvent::any_tool())
        .subscribes_at(&Cancel { service: Service::Interpreter })
        // The time.
        .subscribes_all::<ReconcilerHeartbeat>()
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
        // The time.
        .subscribes_all::<ReconcilerHeartbeat>()
        .asks::<Models>()
        .asks::<Budgets>()
        .answers::<BreakerState>()
        .answers::<CheckProvider>()
        .answers::<ListVendorModels>()
        .answers::<CountTokens>()
}

/// The reconciler commands the others and creates what they need, so it is trusted with the
/// streams.
fn reconciler(rules: Rules) -> Rules {
    let rules = rules
        .consumes(Stream::Task, "*", None)
        .consumes(Stream::Spending, &topology::spending_consumer().durable, None)
        .stores::<TaskWake>()
        .stores::<ModelInvoke>()
        .stores::<CodeExecute>()
        .stores::<Journal>()
        .stores::<TaskEvent>()
        // Spending reports that cannot be recorded become dead letters.
        .reads(Stream::Spending)
        // Superseded commands, queued results, finished journals.
        .reads(Stream::Task)
        // Messages that NATS cannot read any more block later ones.
        .purges(Stream::Task)
        .reads(Stream::Model)
        .reads(Stream::Code)
        .reads(Stream::Journal)
        .removes(Stream::Model)
        .purges(Stream::Model)
        .removes(Stream::Code)
        .purges(Stream::Code)
        .lists_consumers(Stream::Code)
        // The last delivered command.
        .inspects(Stream::Model)
        .removes(Stream::Journal)
        .purges(Stream::Journal)
        .reads_through_consumers(Stream::Journal, &[])
        .publishes::<Cancel>()
        .publishes::<ReconcilerHeartbeat>()
        .subscribes_all::<ReconcilerHeartbeat>()
        .asks::<Tools>()
        .answers::<Census>()
        .answers::<Models>()
        .answers::<Budgets>()
        .answers::<Subtasks>()
        .answers::<StepLocation>();
    let rules = EntityEvent::KINDS
        .iter()
        .fold(rules, |rules, kind| rules.stores_at(Stream::Events, EntityEvent::any(kind)));
    Stream::ALL.into_iter().fold(rules, Rules::manages)
}
