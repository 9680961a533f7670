//! The mesh around one task, as small as it can be and still do all that the real one does to it.

mod replica;
mod worker;

use std::collections::BTreeMap;

use super::super::*;

/// How often something may happen that does not have to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scope {
    /// Messages of the user.
    pub(super) messages: u8,
    /// Messages that don't wait for the end of the turn.
    pub(super) interrupts: u8,
    /// Cancels.
    pub(super) cancels: u8,
    /// Times that a person suspends the task. It can be resumed at any time.
    pub(super) suspends: u8,
    /// Times that a person takes the conversation back, to any of its messages.
    pub(super) rewinds: u8,
    /// Times that a person has a failed turn gone on with.
    pub(super) retries: u8,
    /// Answers of the model that have a script.
    pub(super) scripts: u8,
    /// Times that a script waits for a person.
    pub(super) parks: u8,
    /// Times that a script waits for a subtask it has begun.
    pub(super) awaits: u8,
    /// Model calls that fail, and may be tried again.
    pub(super) failures: u8,
    /// Those that fail for good.
    pub(super) refusals: u8,
    /// Processes that die.
    pub(super) crashes: u8,
    /// Commands, and words to a worker, that get lost.
    pub(super) lost: u8,
    /// Messages that are delivered to another process while the first one is still at them.
    pub(super) redelivered: u8,
    /// Deadlines that pass while somebody is still at it.
    pub(super) late: u8,
}

/// What keeps the mesh from going wrong, and can be left out to see that it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Guard {
    /// A commit needs the version that was loaded.
    Version,
    /// A journal entry names the one before it.
    Chain,
    /// A script that runs again reads what it has done.
    Journal,
    /// The journal of a script is closed before it is said that the script is over.
    CloseFirst,
    /// The journal of a script that is said not to have begun must be empty when it is closed.
    Unbegun,
    /// What asked for nothing of a state is looked at anew with the next.
    SeenAnew,
    /// A script that was stopped is not run again by whoever gets its command later.
    LastWord,
    /// A step in flight is looked at again.
    LookAgain,
    /// A task is looked at again when it stands in its row that its script waits for a subtask.
    LookAnew,
    /// That a subtask has ended is noted until its parent was looked at.
    EndNoted,
    /// Where a transcript is cut, a script stays or goes with its result.
    CutWhole,
}

/// What happened, and to which of several.
#[derive(Debug, Clone, Copy)]
pub(super) struct Label(pub(super) &'static str, pub(super) usize);

type Next = Vec<(Label, Result<Mesh, String>)>;

/// A message of a work queue.
#[derive(Debug, Clone)]
struct Item<T> {
    /// What it says.
    body: T,
    /// Whether a process is at it.
    taken: bool,
}

#[derive(Debug, Clone, PartialEq)]
struct Command {
    step: StepId,
    round: u32,
    /// The script to run; None: the model is to be called.
    script: Option<u8>,
}

/// The journal of a step, as who reads all of it understands it.
#[derive(Debug, Clone, Copy, Default)]
struct Journal {
    /// The number of the newest entry.
    last: u8,
    /// The script's only call.
    call: Call,
    /// Whether the script was stopped for good.
    stopped: bool,
    closed: bool,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Call {
    #[default]
    NotBegun,
    Begun,
    Ended,
    /// Who had begun it has died. Nobody knows what became of it.
    Unknown,
}

/// What is true of a script, whoever runs it.
#[derive(Debug, Clone, Copy, Default)]
struct Truth {
    /// How often it did what it is for.
    effects: u8,
    /// How often it had, as the model was told, if the model was told that.
    said: Option<u8>,
    /// Whether the model was told that it is over.
    over: bool,
    /// Whether it has begun its call after that.
    late: bool,
}

#[derive(Debug, Clone)]
enum Replica {
    Idle,
    /// It has loaded the task.
    Loaded(Loaded),
    /// And closed the journal of what it is about to call over.
    Closed(Loaded),
    /// It has committed; what is left to do.
    Performing(Vec<Effect>, Option<StepResult>),
}

impl Replica {
    fn fingerprint(&self, newest: u32) -> String {
        let of = |loaded: &Loaded| {
            let Loaded { task, version, queued, asked_for, drop_before, child_noted, result } =
                loaded;
            // Whether it is the newest is all that matters of a version.
            let newest = *version == newest;
            let seen = (child_noted, &task.approvals, &task.subtasks);
            format!("{:?}{:?}", state(task), (newest, queued, asked_for, drop_before, result, seen))
        };
        match self {
            Self::Idle => String::new(),
            Self::Loaded(loaded) => format!("loaded {}", of(loaded)),
            Self::Closed(loaded) => format!("closed {}", of(loaded)),
            Self::Performing(left, result) => format!("{left:?}{result:?}"),
        }
    }
}

/// What changes of a task.
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
struct Loaded {
    task: Task,
    version: u32,
    queued: Option<Queued>,
    asked_for: u32,
    drop_before: u32,
    child_noted: bool,
    result: Option<StepResult>,
}

#[derive(Debug, Clone)]
enum Worker {
    Idle,
    Runs(Run),
    /// It has told the result, and not acknowledged the command.
    Told(Command),
}

/// What a worker does for a command.
#[derive(Debug, Clone)]
struct Run {
    command: Command,
    /// The newest entry of its journal that it knows of.
    last: u8,
    /// What it knows of the script's call.
    call: Call,
    /// Whether it has begun the call itself.
    begun: bool,
    /// And made it.
    acted: bool,
    /// Whether it was told to stop.
    told: bool,
    /// Whether it has had its last word about that.
    stopped: bool,
}

/// A message of the transcript.
#[derive(Debug, Clone)]
struct Entry {
    said: Said,
    /// Whether it was put aside when the conversation was taken back.
    aside: bool,
}

/// Who is said what, without the words.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Said {
    User(MessageId),
    Answer,
    Script(u8),
    Result(u8),
    Other,
}

/// A task that a script has begun.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Child {
    NotBegun,
    AtWork,
    Ended,
}

#[derive(Debug, Clone)]
pub(super) struct Mesh {
    left: Scope,
    without: Option<Guard>,
    sent: u8,
    scripts: u8,

    // PostgreSQL.
    task: Task,
    version: u32,
    queue: Vec<(Queued, u32)>,
    /// What people have asked for so far, and what of that was seen.
    asked_for: u32,
    seen: u32,
    drop_before: u32,
    approval: Option<(StepId, Approval)>,
    /// Whether the subtask is at work, and whether it is noted that it has ended.
    child: Child,
    child_noted: bool,
    transcript: Vec<Entry>,
    accounted: Vec<MessageId>,
    /// Of what was asked for, the newest that was to go on with a failed turn; and whose end that
    /// may be told again by that.
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

/// As far as it matters where a transcript is cut.
fn blocks(said: &Said) -> Vec<Block> {
    match said {
        Said::Script(script) => {
            vec![Block::CodeInterpreterCall(CodeCall {
                id: script.to_string(),
                code: String::new(),
            })]
        }
        Said::Result(script) => {
            vec![Block::CodeInterpreterResult(CodeResult {
                id: script.to_string(),
                ..CodeResult::default()
            })]
        }
        Said::User(_) | Said::Answer | Said::Other => Vec::new(),
    }
}

fn child() -> TaskId {
    TaskId::from_uuid(Uuid::from_u128(900))
}

fn number(script: &str) -> u8 {
    script.parse().expect("scripts are numbered")
}

/// The time it always is: instead of it, all that is to come moves.
const NOW: Timestamp = Timestamp::UNIX_EPOCH;

/// What lies so far back makes no difference to what lies further back.
const LONG_AGO: i64 = -3600;

impl Mesh {
    pub(super) fn new(scope: Scope, without: Option<Guard>) -> Self {
        Self {
            left: scope,
            without,
            sent: 0,
            scripts: 0,
            task: World::new().task,
            version: 0,
            queue: Vec::new(),
            asked_for: 0,
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

    /// Every message that was sent is accounted for, and the task waits for the next.
    pub(super) fn is_well(&self) -> bool {
        self.accounted.len() == usize::from(self.sent)
            && self.task.phase == Phase::AwaitInput
            && self.task.cancel.is_none()
            && self.task.rewind.is_none()
            && self.retried.is_none()
    }

    /// What tells this state from others. It makes no difference which of two processes is which.
    pub(super) fn fingerprint(&self) -> String {
        let sorted = |mut texts: [String; 2]| {
            texts.sort_unstable();
            texts
        };
        let Self { left, sent, scripts, queue, asked_for, seen, drop_before, approval, .. } = self;
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
            scripts: wanted,
            parks,
            awaits,
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
            wanted,
            parks,
            awaits,
            failures,
            refusals,
            crashes,
            lost,
            redelivered,
            late,
        ];
        let counts = (sent, scripts, asked_for, seen, drop_before, wake);
        let kept = (
            state(&self.task),
            queue,
            approval,
            (child, child_noted),
            transcript,
            (accounted, retry, retried),
        );
        let sent = (commands, results, journals, truth);
        let replicas = sorted([0, 1].map(|who| self.replicas[who].fingerprint(self.version)));
        let workers = sorted([0, 1].map(|who| format!("{:?}", self.workers[who])));
        format!("{left:?}{counts:?}{kept:?}{sent:?}{replicas:?}{workers:?}")
    }

    /// Everything that can happen now.
    pub(super) fn what_can_happen(&self) -> Next {
        let mut next = Vec::new();
        self.people(&mut next);
        for who in 0..self.replicas.len() {
            self.replica(who, &mut next);
        }
        for who in 0..self.workers.len() {
            self.worker(who, &mut next);
        }
        self.time(&mut next);
        next
    }

    fn then(
        &self,
        next: &mut Next,
        what: &'static str,
        who: usize,
        change: impl FnOnce(&mut Self),
    ) {
        let mut mesh = self.clone();
        change(&mut mesh);
        let holds = mesh.check();
        next.push((Label(what, who), holds.map(|()| mesh)));
    }

    fn people(&self, next: &mut Next) {
        let send = |mesh: &mut Self, interrupts: bool| {
            mesh.sent += 1;
            mesh.asked_for += 1;
            mesh.queue.push((Queued { message: message(mesh.sent), interrupts }, mesh.asked_for));
            mesh.wake = true;
        };
        if self.left.messages > 0 {
            self.then(next, "a message is sent", 0, |mesh| {
                mesh.left.messages -= 1;
                send(mesh, false);
            });
        }
        if self.left.interrupts > 0 && self.sent > 0 {
            self.then(next, "a message interrupts", 0, |mesh| {
                mesh.left.interrupts -= 1;
                send(mesh, true);
            });
        }
        if self.left.cancels > 0 && self.sent > 0 && self.task.cancel.is_none() {
            self.then(next, "a person cancels", 0, |mesh| {
                mesh.left.cancels -= 1;
                mesh.asked_for += 1;
                mesh.drop_before = mesh.asked_for;
                mesh.task.cancel = Some("enough".to_owned());
                mesh.wake = true;
            });
        }
        if self.task.suspend || self.left.suspends > 0 {
            self.then(next, "a person suspends or resumes", 0, |mesh| {
                mesh.left.suspends -= u8::from(!mesh.task.suspend);
                mesh.asked_for += 1;
                mesh.task.suspend = !mesh.task.suspend;
                mesh.wake = true;
            });
        }
        if self.left.rewinds > 0 && self.task.rewind.is_none() {
            for (at, entry) in self.transcript.iter().enumerate().filter(|(_, entry)| !entry.aside)
            {
                for keep in [false, true] {
                    let whole = self.without != Some(Guard::CutWhole);
                    let blocks = if whole { blocks(&entry.said) } else { Vec::new() };
                    let from = message::cut(at as i64 + 1, &blocks, keep);
                    self.then(next, "a person takes the conversation back", at, |mesh| {
                        mesh.left.rewinds -= 1;
                        mesh.asked_for += 1;
                        mesh.drop_before = mesh.asked_for;
                        mesh.task.rewind = Some(from);
                        mesh.wake = true;
                    });
                }
            }
        }
        let failed =
            self.task.turn.is_none() && self.task.last_outcome == Some(TurnOutcome::Failed);
        let last = self.transcript.iter().rev().find(|entry| !entry.aside);
        let answered = last.is_none_or(|last| matches!(last.said, Said::Answer | Said::Script(_)));
        if self.left.retries > 0 && failed && !self.task.suspend && !answered {
            self.then(next, "a person has a turn gone on with", 0, |mesh| {
                mesh.left.retries -= 1;
                mesh.asked_for += 1;
                mesh.retry = mesh.asked_for;
                mesh.wake = true;
            });
        }
        if self.child == Child::AtWork {
            let ends = |mesh: &mut Self, told: bool| {
                mesh.child = Child::Ended;
                // In the commit that ends its turn; the wake comes after that, if it comes.
                mesh.child_noted = mesh.without != Some(Guard::EndNoted);
                mesh.wake |= told;
            };
            self.then(next, "a subtask ends", 0, |mesh| ends(mesh, true));
            if self.left.lost > 0 {
                self.then(next, "a subtask ends, and nobody is told", 0, |mesh| {
                    mesh.left.lost -= 1;
                    ends(mesh, false);
                });
            }
        }
        if let Some((_, Approval { state: ApprovalState::Pending, .. })) = &self.approval {
            self.then(next, "a person approves", 0, |mesh| {
                if let Some((_, approval)) = &mut mesh.approval {
                    approval.state = ApprovalState::Approved;
                }
                // Deciding raises the version, as the store does.
                mesh.version += 1;
                mesh.asked_for += 1;
                mesh.wake = true;
            });
        }
    }

    fn time(&self, next: &mut Next) {
        let idle = self.replicas.iter().all(|replica| matches!(replica, Replica::Idle));
        if !idle || self.wake {
            return;
        }
        if self.seen < self.asked_for
            || self.child_noted
            || self.task.next_wake.is_some_and(|wake| wake <= NOW)
        {
            self.then(next, "the sweep finds the task", 0, |mesh| mesh.wake = true);
            return;
        }
        let waits = |taken: bool| !taken;
        let at_rest = self.workers.iter().all(|worker| matches!(worker, Worker::Idle))
            && !self.commands.iter().any(|item| waits(item.taken))
            && !self.results.iter().any(|item| waits(item.taken));
        let Some(wake) = self.task.next_wake else { return };
        if at_rest {
            let awaits = |step: &Step| matches!(&step.state, StepState::Parked { awaits, .. } if !awaits.is_empty());
            if !self.task.suspend
                && self.child == Child::Ended
                && self.task.step.as_ref().is_some_and(awaits)
            {
                next.push((
                    Label("time goes by", 0),
                    Err("a script waits for what has come".to_owned()),
                ));
                return;
            }
            self.then(next, "time goes by", 0, |mesh| mesh.elapse(wake));
        } else if self.left.late > 0 {
            let deadline = self.task.step.as_ref().and_then(|step| match step.state {
                StepState::InFlight { deadline } | StepState::Cancelling { deadline } => {
                    Some(deadline)
                }
                StepState::Backoff { .. } | StepState::Parked { .. } => None,
            });
            if let Some(deadline) = deadline {
                self.then(next, "a deadline passes", 0, |mesh| {
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
                StepState::Parked { awaits, .. } => {
                    awaits.iter_mut().for_each(|call| earlier(&mut call.until))
                }
            }
        }
        self.wake = true;
    }

    /// What holds in every state.
    fn check(&self) -> Result<(), String> {
        let task = &self.task;
        let at_work = task.turn.is_some() && task.phase != Phase::Suspended || task.step.is_some();
        if at_work && task.next_wake.is_none() && self.without != Some(Guard::LookAgain) {
            return Err("a task waits for nothing".to_owned());
        }
        for truth in self.truth.values() {
            if truth.effects > 1 {
                return Err("an effect happens twice".to_owned());
            }
            if truth.late || truth.said.is_some_and(|said| said < truth.effects) {
                return Err("something happens behind what was said".to_owned());
            }
        }
        // What is put aside is kept as it was, and what stays is whole without it.
        let all: Vec<&Said> = self.transcript.iter().map(|entry| &entry.said).collect();
        let shown: Vec<&Said> =
            self.transcript.iter().filter(|entry| !entry.aside).map(|entry| &entry.said).collect();
        for said in [&all, &shown] {
            for pair in said.windows(2) {
                let pairs = match pair {
                    [Said::Script(asked), Said::Result(given)] => asked == given,
                    [Said::Script(_), _] | [_, Said::Result(_)] => false,
                    _ => true,
                };
                if !pairs {
                    return Err(format!(
                        "a script and its result are parted: {:?}",
                        self.transcript
                    ));
                }
            }
            if task.turn.is_none() && matches!(said.last(), Some(Said::Script(_))) {
                return Err("a turn is over whose script has no result".to_owned());
            }
        }
        // Nothing of a turn that goes on was put aside.
        if let Some(turn) = &task.turn
            && !shown.contains(&&Said::User(turn.message))
        {
            return Err("a message is answered that is not there any more".to_owned());
        }
        Ok(())
    }
}
