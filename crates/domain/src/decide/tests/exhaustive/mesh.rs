//! A minimal model of the mesh around one task.

mod replica;
mod worker;

use std::collections::BTreeMap;

use super::super::*;

/// How often each optional action may happen.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scope {
    /// Messages of the user.
    pub(super) messages: u8,
    /// Messages that interrupt the turn.
    pub(super) interrupts: u8,
    /// Cancels.
    pub(super) cancels: u8,
    /// Suspensions by a person. The task can be resumed at any time.
    pub(super) suspends: u8,
    /// Rewinds by a person, to any message.
    pub(super) rewinds: u8,
    /// Retries of a failed turn by a person.
    pub(super) retries: u8,
    /// Answers of the model with a script.
    pub(super) scripts: u8,
    /// Waits of a script for an approval.
    pub(super) approvals: u8,
    /// Waits of a script for a subtask that it has created.
    pub(super) subtask_waits: u8,
    /// Model calls that fail and may be retried.
    pub(super) failures: u8,
    /// Model calls that fail permanently.
    pub(super) refusals: u8,
    /// Processes that crash.
    pub(super) crashes: u8,
    /// Lost commands and cancel requests.
    pub(super) lost: u8,
    /// Messages that are redelivered while the first process still handles them.
    pub(super) redelivered: u8,
    /// Deadlines that pass while a worker is still running.
    pub(super) late: u8,
}

/// A mechanism that keeps the mesh correct. Tests disable one to see that it is needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guard {
    /// A commit requires the version that was loaded.
    Version,
    /// A journal entry names the one before it.
    JournalChain,
    /// A script that runs again reads its earlier calls.
    Journal,
    /// The journal of a script is closed before the script is reported as ended.
    CloseBeforeCommit,
    /// The journal of a script that is reported as not started must be empty when it is closed.
    EmptyJournal,
    /// Intents that required nothing of one state are checked again with the next.
    RecheckIntents,
    /// A stopped script is not run by a worker that gets its command later.
    StopEntry,
    /// A step in flight is checked again.
    StepCheck,
    /// A task is reconciled again once its row says that its script waits for a subtask.
    SubtaskRecheck,
    /// The end of a subtask is recorded until its parent was reconciled.
    SubtaskEndRecorded,
    /// Where a transcript is cut, a script is kept or removed with its result.
    CutWithResults,
}

/// A transition, and the index of the process that it concerns.
#[derive(Debug, Clone, Copy)]
pub(super) struct Label(pub(super) &'static str, pub(super) usize);

type Next = Vec<(Label, Result<Mesh, String>)>;

/// A message of a work queue.
#[derive(Debug, Clone)]
struct Item<T> {
    /// The content.
    body: T,
    /// Whether a process handles it.
    taken: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Command {
    step: StepId,
    round: u32,
    /// The script to run; `None`: a model call.
    script: Option<u8>,
}

/// The journal of a step, as a reader of all entries understands it.
#[derive(Debug, Clone, Copy, Default)]
struct Journal {
    /// The sequence number of the newest entry.
    last: u8,
    /// The script's only call.
    call: Call,
    /// Whether the script was stopped permanently.
    stopped: bool,
    closed: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Call {
    #[default]
    NotBegun,
    Begun,
    Ended,
    /// The worker that started it has crashed. The outcome is unknown.
    Unknown,
}

/// The truth about a script, whichever worker runs it.
#[derive(Debug, Clone, Copy, Default)]
struct Truth {
    /// How often its side effect happened.
    effects: u8,
    /// The number of side effects that the model was told, if it was told.
    reported: Option<u8>,
    /// Whether the model was told that the script has ended.
    reported_end: bool,
    /// Whether it started its call after that.
    late: bool,
}

#[derive(Debug, Clone)]
enum Replica {
    Idle,
    /// The task is loaded.
    Loaded(LoadedTask),
    /// The task is loaded, and the journal of the step that the decision ends is closed.
    Closed(LoadedTask),
    /// The decision is committed; the remaining effects.
    Performing(Vec<Effect>, Option<StepResult>),
}

impl Replica {
    fn fingerprint(&self, newest: u32) -> String {
        let describe = |loaded: &LoadedTask| {
            let LoadedTask { task, version, queued, intents, drop_before, child_noted, result } =
                loaded;
            // Only whether it is the newest version matters.
            let newest = *version == newest;
            let seen = (child_noted, &task.approvals, &task.subtasks);
            format!("{:?}{:?}", state(task), (newest, queued, intents, drop_before, result, seen))
        };
        match self {
            Self::Idle => String::new(),
            Self::Loaded(loaded) => format!("loaded {}", describe(loaded)),
            Self::Closed(loaded) => format!("closed {}", describe(loaded)),
            Self::Performing(left, result) => format!("{left:?}{result:?}"),
        }
    }
}

/// The changing fields of a task.
fn state(task: &Task) -> impl std::fmt::Debug + '_ {
    let Task {
        suspend,
        cancel,
        rewind,
        retry,
        phase,
        turn,
        step,
        title_step,
        titled,
        steps,
        last_position,
        next_wake,
        last_outcome,
        ..
    } = task;
    (
        (suspend, cancel, rewind, retry),
        (phase, turn, step),
        (title_step, titled, steps, last_position, next_wake, last_outcome),
    )
}

#[derive(Debug, Clone)]
struct LoadedTask {
    task: Task,
    version: u32,
    queued: Option<QueuedMessage>,
    intents: u32,
    drop_before: u32,
    child_noted: bool,
    result: Option<StepResult>,
}

#[derive(Debug, Clone)]
enum Worker {
    Idle,
    Runs(Run),
    /// The result is reported, and the command not yet acknowledged.
    Reported(Command),
}

/// A worker's run of a command.
#[derive(Debug, Clone)]
struct Run {
    command: Command,
    /// The newest journal entry that it knows.
    last: u8,
    /// What it knows about the script's call.
    call: Call,
    /// Whether it has started the call itself.
    begun: bool,
    /// Whether the side effect has happened.
    acted: bool,
    /// Whether it was told to stop.
    stop_requested: bool,
    /// Whether it has written the stop entry.
    stopped: bool,
}

/// A message of the transcript.
#[derive(Debug, Clone)]
struct Message {
    content: TranscriptEntry,
    /// Whether a rewind has superseded it.
    superseded: bool,
}

/// The author and kind of a message, without its text.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TranscriptEntry {
    User(MessageId),
    Answer,
    Script(u8),
    Result(u8),
    Other,
}

/// A subtask that a script has created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Child {
    NotBegun,
    AtWork,
    Ended,
}

#[derive(Debug, Clone)]
pub(super) struct Mesh {
    left: Scope,
    disabled: Option<Guard>,
    sent: u8,
    scripts: u8,

    // PostgreSQL.
    task: Task,
    version: u32,
    queue: Vec<(QueuedMessage, u32)>,
    /// The number of intents so far, and how many of them were seen.
    intents: u32,
    seen: u32,
    drop_before: u32,
    approval: Option<(StepId, Approval)>,
    /// The state of the subtask, and whether its end is recorded.
    child: Child,
    child_noted: bool,
    transcript: Vec<Message>,
    accounted: Vec<MessageId>,
    /// The intent that requested the newest retry, and the message whose turn may therefore end
    /// again.
    retry: u32,
    retried: Option<MessageId>,

    // NATS.
    wake: bool,
    commands: Vec<Item<Command>>,
    results: Vec<Item<StepResult>>,
    journals: BTreeMap<StepId, Journal>,

    // Processes.
    replicas: [Replica; 2],
    workers: [Worker; 2],

    // The world outside.
    truth: BTreeMap<u8, Truth>,
}

fn message(number: u8) -> MessageId {
    MessageId::from_uuid(Uuid::from_u128(1_000 + u128::from(number)))
}

/// The blocks that matter for where a transcript is cut.
fn blocks(entry: &TranscriptEntry) -> Vec<Block> {
    match entry {
        TranscriptEntry::Script(script) => {
            vec![Block::CodeInterpreterCall(CodeCall {
                id: script.to_string(),
                code: String::new(),
            })]
        }
        TranscriptEntry::Result(script) => {
            vec![Block::CodeInterpreterResult(CodeResult {
                id: script.to_string(),
                ..CodeResult::default()
            })]
        }
        TranscriptEntry::User(_) | TranscriptEntry::Answer | TranscriptEntry::Other => Vec::new(),
    }
}

fn child() -> TaskId {
    TaskId::from_uuid(Uuid::from_u128(900))
}

fn number(script: &str) -> u8 {
    script.parse().expect("scripts are numbered")
}

/// The time never changes. Instead, all future times move closer.
const NOW: Timestamp = Timestamp::UNIX_EPOCH;

/// Times further back make no difference.
const LONG_AGO: i64 = -3600;

impl Mesh {
    pub(super) fn new(scope: Scope, disabled: Option<Guard>) -> Self {
        Self {
            left: scope,
            disabled,
            sent: 0,
            scripts: 0,
            task: World::new().task,
            version: 0,
            queue: Vec::new(),
            intents: 0,
            seen: 0,
            drop_before: 0,
            approval: None,
            child: Child::NotBegun,
            child_noted: false,
            transcript: Vec::new(),
            accounted: Vec::new(),
            retry: 0,
            retried: None,
            wake: false,
            commands: Vec::new(),
            results: Vec::new(),
            journals: BTreeMap::new(),
            replicas: [Replica::Idle, Replica::Idle],
            workers: [Worker::Idle, Worker::Idle],
            truth: BTreeMap::new(),
        }
    }

    /// Whether every sent message is accounted for and the task waits for input.
    pub(super) fn is_settled(&self) -> bool {
        self.accounted.len() == usize::from(self.sent)
            && self.task.phase == Phase::AwaitInput
            && self.task.cancel.is_none()
            && self.task.rewind.is_none()
            && self.retried.is_none()
    }

    /// The fingerprint of the state. Which of two processes is which makes no difference.
    pub(super) fn fingerprint(&self) -> String {
        let sorted = |mut texts: [String; 2]| {
            texts.sort_unstable();
            texts
        };
        let Self { left, sent, scripts, queue, intents, seen, drop_before, approval, .. } = self;
        let Self {
            transcript,
            accounted,
            wake,
            commands,
            results,
            journals,
            truth,
            child,
            child_noted,
            ..
        } = self;
        let Self { retry, retried, .. } = self;
        let Scope {
            messages,
            interrupts,
            cancels,
            suspends,
            rewinds,
            retries,
            scripts: scripts_left,
            approvals,
            subtask_waits,
            ..
        } = left;
        let Scope { failures, refusals, crashes, lost, redelivered, late, .. } = left;
        let left = [
            messages,
            interrupts,
            cancels,
            suspends,
            rewinds,
            retries,
            scripts_left,
            approvals,
            subtask_waits,
            failures,
            refusals,
            crashes,
            lost,
            redelivered,
            late,
        ];
        let counts = (sent, scripts, intents, seen, drop_before, wake);
        let stored = (
            state(&self.task),
            queue,
            approval,
            (child, child_noted),
            transcript,
            (accounted, retry, retried),
        );
        let sent = (commands, results, journals, truth);
        let replicas = sorted([0, 1].map(|index| self.replicas[index].fingerprint(self.version)));
        let workers = sorted([0, 1].map(|index| format!("{:?}", self.workers[index])));
        format!("{left:?}{counts:?}{stored:?}{sent:?}{replicas:?}{workers:?}")
    }

    /// All transitions from this state.
    pub(super) fn transitions(&self) -> Next {
        let mut next = Vec::new();
        self.push_user_actions(&mut next);
        for index in 0..self.replicas.len() {
            self.push_replica_actions(index, &mut next);
        }
        for index in 0..self.workers.len() {
            self.push_worker_actions(index, &mut next);
        }
        self.push_time(&mut next);
        next
    }

    fn push_transition(
        &self,
        next: &mut Next,
        what: &'static str,
        index: usize,
        change: impl FnOnce(&mut Self),
    ) {
        let mut mesh = self.clone();
        change(&mut mesh);
        let holds = mesh.check();
        next.push((Label(what, index), holds.map(|()| mesh)));
    }

    fn push_user_actions(&self, next: &mut Next) {
        let send = |mesh: &mut Self, interrupts: bool| {
            mesh.sent += 1;
            mesh.intents += 1;
            mesh.queue
                .push((QueuedMessage { message: message(mesh.sent), interrupts }, mesh.intents));
            mesh.wake = true;
        };
        if self.left.messages > 0 {
            self.push_transition(next, "a message is sent", 0, |mesh| {
                mesh.left.messages -= 1;
                send(mesh, false);
            });
        }
        if self.left.interrupts > 0 && self.sent > 0 {
            self.push_transition(next, "a message interrupts", 0, |mesh| {
                mesh.left.interrupts -= 1;
                send(mesh, true);
            });
        }
        if self.left.cancels > 0 && self.sent > 0 && self.task.cancel.is_none() {
            self.push_transition(next, "a person cancels", 0, |mesh| {
                mesh.left.cancels -= 1;
                mesh.intents += 1;
                mesh.drop_before = mesh.intents;
                mesh.task.cancel = Some("enough".to_owned());
                mesh.wake = true;
            });
        }
        if self.task.suspend || self.left.suspends > 0 {
            self.push_transition(next, "a person suspends or resumes", 0, |mesh| {
                mesh.left.suspends -= u8::from(!mesh.task.suspend);
                mesh.intents += 1;
                mesh.task.suspend = !mesh.task.suspend;
                mesh.wake = true;
            });
        }
        if self.left.rewinds > 0 && self.task.rewind.is_none() {
            for (at, entry) in
                self.transcript.iter().enumerate().filter(|(_, entry)| !entry.superseded)
            {
                for keep in [false, true] {
                    let whole = self.disabled != Some(Guard::CutWithResults);
                    let blocks = if whole { blocks(&entry.content) } else { Vec::new() };
                    let from = message::cut_position(at as i64 + 1, &blocks, keep);
                    self.push_transition(next, "a person rewinds the conversation", at, |mesh| {
                        mesh.left.rewinds -= 1;
                        mesh.intents += 1;
                        mesh.drop_before = mesh.intents;
                        mesh.task.rewind = Some(from);
                        mesh.wake = true;
                    });
                }
            }
        }
        let failed =
            self.task.turn.is_none() && self.task.last_outcome == Some(TurnOutcome::Failed);
        let last = self.transcript.iter().rev().find(|entry| !entry.superseded);
        let answered = last.is_none_or(|last| {
            matches!(last.content, TranscriptEntry::Answer | TranscriptEntry::Script(_))
        });
        if self.left.retries > 0 && failed && !self.task.suspend && !answered {
            self.push_transition(next, "a person retries a turn", 0, |mesh| {
                mesh.left.retries -= 1;
                mesh.intents += 1;
                mesh.retry = mesh.intents;
                mesh.wake = true;
            });
        }
        if self.child == Child::AtWork {
            let ends = |mesh: &mut Self, woken: bool| {
                mesh.child = Child::Ended;
                // Recorded in the commit that ends its turn. The wake follows, unless it is lost.
                mesh.child_noted = mesh.disabled != Some(Guard::SubtaskEndRecorded);
                mesh.wake |= woken;
            };
            self.push_transition(next, "a subtask ends", 0, |mesh| ends(mesh, true));
            if self.left.lost > 0 {
                self.push_transition(next, "a subtask ends, and its wake is lost", 0, |mesh| {
                    mesh.left.lost -= 1;
                    ends(mesh, false);
                });
            }
        }
        if let Some((_, Approval { state: ApprovalState::Pending, .. })) = &self.approval {
            self.push_transition(next, "a person approves", 0, |mesh| {
                if let Some((_, approval)) = &mut mesh.approval {
                    approval.state = ApprovalState::Approved;
                }
                // A decision raises the version, as in the store.
                mesh.version += 1;
                mesh.intents += 1;
                mesh.wake = true;
            });
        }
    }

    fn push_time(&self, next: &mut Next) {
        let idle = self.replicas.iter().all(|replica| matches!(replica, Replica::Idle));
        if !idle || self.wake {
            return;
        }
        if self.seen < self.intents
            || self.child_noted
            || self.task.next_wake.is_some_and(|wake| wake <= NOW)
        {
            self.push_transition(next, "the sweep finds the task", 0, |mesh| mesh.wake = true);
            return;
        }
        let waits = |taken: bool| !taken;
        let at_rest = self.workers.iter().all(|worker| matches!(worker, Worker::Idle))
            && !self.commands.iter().any(|item| waits(item.taken))
            && !self.results.iter().any(|item| waits(item.taken));
        let Some(wake) = self.task.next_wake else { return };
        if at_rest {
            let awaits = |step: &Step| matches!(&step.state, StepState::Suspended { awaits, .. } if !awaits.is_empty());
            if !self.task.suspend
                && self.child == Child::Ended
                && self.task.step.as_ref().is_some_and(awaits)
            {
                next.push((
                    Label("time goes by", 0),
                    Err("a script waits for a subtask that has ended".to_owned()),
                ));
                return;
            }
            self.push_transition(next, "time goes by", 0, |mesh| mesh.elapse(wake));
        } else if self.left.late > 0 {
            let deadline = self.task.step.as_ref().and_then(|step| match step.state {
                StepState::InFlight { deadline } | StepState::Cancelling { deadline } => {
                    Some(deadline)
                }
                StepState::Backoff { .. } | StepState::Suspended { .. } => None,
            });
            if let Some(deadline) = deadline {
                self.push_transition(next, "a deadline passes", 0, |mesh| {
                    mesh.left.late -= 1;
                    mesh.elapse(deadline);
                });
            }
        }
    }

    fn elapse(&mut self, to: Timestamp) {
        let by = to.duration_since(NOW);
        let oldest = NOW + jiff::SignedDuration::from_secs(LONG_AGO);
        let earlier = |time: &mut Timestamp| *time = (*time - by).max(oldest);
        self.task.next_wake.iter_mut().for_each(earlier);
        if let Some(step) = &mut self.task.step {
            earlier(&mut step.since);
            step.resumed.iter_mut().for_each(earlier);
            match &mut step.state {
                StepState::InFlight { deadline: time }
                | StepState::Cancelling { deadline: time }
                | StepState::Backoff { until: time } => earlier(time),
                StepState::Suspended { awaits, .. } => {
                    awaits.iter_mut().for_each(|call| earlier(&mut call.until))
                }
            }
        }
        self.wake = true;
    }

    /// Invariants of every state.
    fn check(&self) -> Result<(), String> {
        let task = &self.task;
        let at_work = task.turn.is_some() && task.phase != Phase::Suspended || task.step.is_some();
        if at_work && task.next_wake.is_none() && self.disabled != Some(Guard::StepCheck) {
            return Err("a task waits for nothing".to_owned());
        }
        for truth in self.truth.values() {
            if truth.effects > 1 {
                return Err("an effect happens twice".to_owned());
            }
            if truth.late || truth.reported.is_some_and(|reported| reported < truth.effects) {
                return Err("a side effect happens after it was reported".to_owned());
            }
        }
        // Superseded messages are kept as they were, and the others are consistent without them.
        let all: Vec<&TranscriptEntry> =
            self.transcript.iter().map(|entry| &entry.content).collect();
        let shown: Vec<&TranscriptEntry> = self
            .transcript
            .iter()
            .filter(|entry| !entry.superseded)
            .map(|entry| &entry.content)
            .collect();
        for entries in [&all, &shown] {
            for pair in entries.windows(2) {
                let pairs = match pair {
                    [TranscriptEntry::Script(asked), TranscriptEntry::Result(given)] => {
                        asked == given
                    }
                    [TranscriptEntry::Script(_), _] | [_, TranscriptEntry::Result(_)] => false,
                    _ => true,
                };
                if !pairs {
                    return Err(format!(
                        "a script and its result are separated: {:?}",
                        self.transcript
                    ));
                }
            }
            if task.turn.is_none() && matches!(entries.last(), Some(TranscriptEntry::Script(_))) {
                return Err("a turn ended whose script has no result".to_owned());
            }
        }
        // No message of a running turn is superseded.
        if let Some(turn) = &task.turn
            && !shown.contains(&&TranscriptEntry::User(turn.message))
        {
            return Err("a message is answered that is superseded".to_owned());
        }
        Ok(())
    }
}
