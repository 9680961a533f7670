//! The mesh around one task, as small as it can be and still do all that the real one does to it.

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
    /// Answers of the model that have a script.
    pub(super) scripts: u8,
    /// Times that a script waits for a person.
    pub(super) parks: u8,
    /// Model calls that fail.
    pub(super) failures: u8,
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
    /// What asked for nothing of a state is looked at anew with the next.
    SeenAnew,
    /// A script that was stopped is not run again by whoever gets its command later.
    LastWord,
    /// A step in flight is looked at again.
    LookAgain,
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
            let Loaded { task, version, queued, asked_for, drop_before, result } = loaded;
            // Whether it is the newest is all that matters of a version.
            let newest = *version == newest;
            format!("{:?}{:?}", state(task), (newest, queued, asked_for, drop_before, result, &task.approvals))
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
    ((suspend, cancel, phase, turn, step), (title_step, titled, steps, last_position, next_wake, last_outcome))
}

#[derive(Debug, Clone)]
struct Loaded {
    task: Task,
    version: u32,
    queued: Option<Queued>,
    asked_for: u32,
    drop_before: u32,
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

/// Who is said what, without the words.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Said {
    User,
    Answer,
    Script(u8),
    Result(u8),
    Other,
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
    transcript: Vec<Said>,
    accounted: Vec<MessageId>,

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
            transcript: Vec::new(),
            accounted: Vec::new(),
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
    }

    /// What tells this state from others. It makes no difference which of two processes is which.
    pub(super) fn fingerprint(&self) -> String {
        let sorted = |mut texts: [String; 2]| {
            texts.sort_unstable();
            texts
        };
        let Self { left, sent, scripts, queue, asked_for, seen, drop_before, approval, .. } = self;
        let Self { transcript, accounted, wake, commands, results, journals, truth, .. } = self;
        let Scope { messages, interrupts, cancels, suspends, scripts: wanted, parks, .. } = left;
        let Scope { failures, crashes, lost, redelivered, late, .. } = left;
        let left = [messages, interrupts, cancels, suspends, wanted, parks, failures, crashes, lost, redelivered, late];
        let counts = (sent, scripts, asked_for, seen, drop_before, wake);
        let kept = (state(&self.task), queue, approval, transcript, accounted);
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

    fn then(&self, next: &mut Next, what: &'static str, who: usize, change: impl FnOnce(&mut Self)) {
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

    fn load(&self, result: Option<StepResult>) -> Loaded {
        let mut task = self.task.clone();
        let of_step = self.approval.iter().filter(|(step, _)| task.step.as_ref().is_some_and(|now| now.id == *step));
        task.approvals = of_step.map(|(_, approval)| approval.clone()).collect();
        let queued = self.queue.iter().map(|(queued, _)| *queued);
        let queued = queued.clone().find(|queued| queued.interrupts).or_else(|| queued.clone().next());
        let (version, asked_for, drop_before) = (self.version, self.asked_for, self.drop_before);
        Loaded { task, version, queued, asked_for, drop_before, result }
    }

    fn replica(&self, who: usize, next: &mut Next) {
        match &self.replicas[who] {
            Replica::Idle => {
                if self.wake {
                    self.then(next, "a wake is taken", who, |mesh| {
                        // It may be lost with who takes it: the row says what is to be done.
                        mesh.wake = false;
                        mesh.replicas[who] = Replica::Loaded(mesh.load(None));
                    });
                }
                for (at, item) in self.results.iter().enumerate() {
                    if item.taken && self.left.redelivered == 0 {
                        continue;
                    }
                    self.then(next, "a result is taken", who, |mesh| {
                        mesh.left.redelivered -= u8::from(item.taken);
                        mesh.results[at].taken = true;
                        mesh.replicas[who] = Replica::Loaded(mesh.load(Some(item.body.clone())));
                    });
                }
                return;
            }
            Replica::Loaded(loaded) => {
                let decision = Self::decide(loaded);
                let ends = |effect: &Effect| matches!(effect, Effect::EndCode(_));
                let of_result = loaded
                    .result
                    .as_ref()
                    .is_some_and(|result| loaded.task.step.as_ref().is_some_and(|step| step.awaits(result)));
                if decision.effects.iter().any(ends) && !of_result && self.without != Some(Guard::CloseFirst) {
                    self.then(next, "a journal is closed", who, |mesh| {
                        for effect in &decision.effects {
                            mesh.end(effect);
                        }
                        mesh.replicas[who] = Replica::Closed(loaded.clone());
                    });
                } else {
                    self.commit(who, loaded, decision, next);
                }
            }
            Replica::Closed(loaded) => self.commit(who, loaded, Self::decide(loaded), next),
            Replica::Performing(effects, result) => {
                let perform = |mesh: &mut Self, lost: bool| {
                    let (effect, rest) = effects.split_first().expect("there is one left");
                    if !lost {
                        mesh.perform(effect);
                    }
                    mesh.performed(who, rest.to_vec(), result.clone());
                };
                self.then(next, "an effect is performed", who, |mesh| perform(mesh, false));
                if self.left.lost > 0 {
                    self.then(next, "an effect is lost", who, |mesh| {
                        mesh.left.lost -= 1;
                        perform(mesh, true);
                    });
                }
            }
        }
        if self.left.crashes > 0 {
            self.then(next, "a reconciler dies", who, |mesh| {
                mesh.left.crashes -= 1;
                let result = match std::mem::replace(&mut mesh.replicas[who], Replica::Idle) {
                    Replica::Loaded(loaded) | Replica::Closed(loaded) => loaded.result,
                    Replica::Performing(_, result) => result,
                    Replica::Idle => None,
                };
                for item in &mut mesh.results {
                    item.taken &= Some(&item.body) != result.as_ref();
                }
            });
        }
    }

    fn decide(loaded: &Loaded) -> Decision {
        // Two that decide from the same state may well have the same ids: one of them does not get to commit.
        let id = |n: u128| Uuid::from_u128(10_000 + u128::from(loaded.task.steps) * 10 + n);
        let fresh = Fresh {
            step: StepId::from_uuid(id(0)),
            title_step: StepId::from_uuid(id(1)),
            messages: [MessageId::from_uuid(id(2)), MessageId::from_uuid(id(3))],
            jitter: 0.5,
        };
        let event = loaded.result.clone().map_or(Event::Wake, Event::Result);
        decide(&loaded.task, loaded.queued, event, NOW, fresh)
    }

    fn commit(&self, who: usize, loaded: &Loaded, decision: Decision, next: &mut Next) {
        if loaded.version != self.version && self.without != Some(Guard::Version) {
            self.then(next, "a commit is refused, and the task loaded anew", who, |mesh| {
                mesh.replicas[who] = Replica::Loaded(mesh.load(loaded.result.clone()));
            });
            return;
        }
        let mut mesh = self.clone();
        let holds = mesh.store(loaded, &decision).and_then(|()| {
            mesh.performed(who, decision.effects, loaded.result.clone());
            mesh.check()
        });
        next.push((Label("a decision is committed", who), holds.map(|()| mesh)));
    }

    /// What one statement of the store does.
    fn store(&mut self, loaded: &Loaded, decision: &Decision) -> Result<(), String> {
        if !decision.changes(&loaded.task) {
            self.seen = self.seen.max(loaded.asked_for);
            return Ok(());
        }
        self.version += 1;
        // What another one has seen, it has seen of the state before.
        self.seen =
            if self.without == Some(Guard::SeenAnew) { self.seen.max(loaded.asked_for) } else { loaded.asked_for };
        let (suspend, cancel) = (self.task.suspend, self.task.cancel.take());
        self.task = decision.task.clone();
        self.task.approvals.clear();
        self.task.suspend = suspend;
        // A cancel is cleared when it was seen, and stays when it came meanwhile.
        self.task.cancel = if loaded.task.cancel.is_some() { decision.task.cancel.clone() } else { cancel };
        self.task.last_error.take();
        if let Some((message, _)) = decision.admitted {
            let before = self.queue.len();
            self.queue.retain(|(queued, _)| queued.message != message);
            if self.queue.len() == before {
                return Err("a message is admitted that is not queued".to_owned());
            }
            self.transcript.push(Said::User);
        }
        for message in &decision.appended {
            self.append(message)?;
        }
        if let Some(ended) = &decision.ended {
            self.account_for(ended.message)?;
        }
        if decision.drop_queued.is_some() {
            let (dropped, stay) = self.queue.drain(..).partition(|(_, asked)| *asked <= loaded.drop_before);
            self.queue = stay;
            let dropped: Vec<(Queued, u32)> = dropped;
            for (queued, _) in dropped {
                self.account_for(queued.message)?;
            }
            if !self.queue.is_empty() {
                self.task.next_wake = Some(NOW);
            }
        }
        for asked in &decision.asked {
            let step = loaded.task.step.as_ref().expect("only a step asks").id;
            let id = ApprovalId::from_uuid(Uuid::from_u128(7));
            self.approval = Some((step, Approval { id, call: asked.call.clone(), state: ApprovalState::Pending }));
        }
        for closed in &decision.closed {
            if let Some((_, approval)) = &mut self.approval {
                approval.state = closed.state;
            }
        }
        if self.without == Some(Guard::LookAgain) && self.task.step.is_some() {
            self.task.next_wake = None;
        }
        self.wake |= self.task.next_wake.is_some_and(|wake| wake <= NOW);
        Ok(())
    }

    fn account_for(&mut self, message: MessageId) -> Result<(), String> {
        if self.accounted.contains(&message) {
            return Err("a message ends twice".to_owned());
        }
        self.accounted.push(message);
        Ok(())
    }

    fn append(&mut self, message: &NewMessage) -> Result<(), String> {
        let said = match message.blocks.first() {
            Some(Block::CodeInterpreterCall(call)) => Said::Script(number(&call.id)),
            Some(Block::CodeInterpreterResult(result)) => {
                self.is_true(result)?;
                Said::Result(number(&result.id))
            }
            _ if message.source == Source::Assistant => Said::Answer,
            _ => Said::Other,
        };
        self.transcript.push(said);
        Ok(())
    }

    /// Whether what the model is told of a script is what has happened.
    fn is_true(&mut self, result: &CodeResult) -> Result<(), String> {
        let truth = self.truth.entry(number(&result.id)).or_default();
        let effects = truth.effects;
        truth.said = (!result.error.contains("unknown")).then_some(effects);
        truth.over = true;
        let is_true = match (&*result.error, &*result.output) {
            ("", "done") => effects == 1,
            (error, _) if error.contains("unknown") => true,
            (error, _) if error.contains("not run") => effects == 0,
            ("stopped before it began" | "it waits", _) => effects == 0,
            other => return Err(format!("nobody knows these words: {other:?}")),
        };
        if is_true { Ok(()) } else { Err(format!("the model is told {result:?} when {effects} effects have happened")) }
    }

    /// What is left to do after a commit, or else the message is acknowledged that it was about.
    fn performed(&mut self, who: usize, left: Vec<Effect>, result: Option<StepResult>) {
        if !left.is_empty() {
            self.replicas[who] = Replica::Performing(left, result);
            return;
        }
        self.replicas[who] = Replica::Idle;
        if let Some(at) = self.results.iter().position(|item| Some(&item.body) == result.as_ref()) {
            self.results.remove(at);
        }
    }

    fn perform(&mut self, effect: &Effect) {
        let command = match effect {
            Effect::InvokeModel(step) => Command { step: step.id, round: step.round, script: None },
            Effect::ExecuteCode(step) => {
                let asked = self.transcript.iter().rev().find_map(|said| match said {
                    Said::Script(script) => Some(*script),
                    _ => None,
                });
                Command { step: step.id, round: step.round, script: asked }
            }
            Effect::CancelCode(step, _) | Effect::CancelModel(step, _) => {
                for worker in &mut self.workers {
                    if let Worker::Runs(run) = worker
                        && run.command.step == *step
                    {
                        run.told = true;
                    }
                }
                return;
            }
            Effect::EndCode(_) => return self.end(effect),
            Effect::MakeTitle(_) | Effect::Compact(_) => return,
        };
        // The bus lets one command of a kind wait for a task.
        if !self.commands.iter().any(|item| item.body.script.is_some() == command.script.is_some()) {
            self.commands.push(Item { body: command, taken: false });
        }
    }

    /// Closes the journal of a script that is over, and takes back its command.
    fn end(&mut self, effect: &Effect) {
        let Effect::EndCode(step) = effect else { return };
        self.journals.entry(*step).or_default().closed = true;
        self.commands.retain(|item| item.body.step != *step || item.taken);
    }

    fn worker(&self, who: usize, next: &mut Next) {
        match &self.workers[who] {
            Worker::Idle => {
                for (at, item) in self.commands.iter().enumerate() {
                    if item.taken && self.left.redelivered == 0 {
                        continue;
                    }
                    self.then(next, "a command is taken", who, |mesh| {
                        mesh.left.redelivered -= u8::from(item.taken);
                        mesh.commands[at].taken = true;
                        mesh.take_over(who, item.body.clone());
                    });
                }
                return;
            }
            Worker::Runs(run) => match run.command.script {
                None => self.calls_a_model(who, &run.command, run.told, next),
                Some(script) => self.runs_a_script(who, script, run, next),
            },
            Worker::Told(command) => self.then(next, "a command is acknowledged", who, |mesh| {
                mesh.commands.retain(|item| item.body != *command);
                mesh.workers[who] = Worker::Idle;
            }),
        }
        if self.left.crashes > 0 {
            self.then(next, "a worker dies", who, |mesh| {
                mesh.left.crashes -= 1;
                let command = match std::mem::replace(&mut mesh.workers[who], Worker::Idle) {
                    Worker::Runs(run) => run.command,
                    Worker::Told(command) => command,
                    Worker::Idle => return,
                };
                for item in &mut mesh.commands {
                    item.taken &= item.body != command;
                }
            });
        }
    }

    /// A worker takes a command; of a script it reads the journal, and writes that it is the one who runs it now.
    fn take_over(&mut self, who: usize, command: Command) {
        let mut run =
            Run { command, last: 0, call: Call::NotBegun, begun: false, acted: false, told: false, stopped: false };
        if run.command.script.is_some() {
            let journal = self.journals.entry(run.command.step).or_default();
            if journal.closed {
                self.commands.retain(|item| item.body != run.command);
                return;
            }
            journal.last += 1;
            run.last = journal.last;
            if self.without != Some(Guard::Journal) {
                run.call = journal.call;
            }
            run.stopped = journal.stopped && self.without != Some(Guard::LastWord);
            run.told = run.stopped;
        }
        self.workers[who] = Worker::Runs(run);
    }

    fn tell(&mut self, who: usize, command: &Command, outcome: Outcome) {
        let body = StepResult { step: command.step, round: command.round, outcome };
        if !self.results.iter().any(|item| item.body == body) {
            self.results.push(Item { body, taken: false });
        }
        self.workers[who] = Worker::Told(command.clone());
    }

    fn calls_a_model(&self, who: usize, command: &Command, told: bool, next: &mut Next) {
        if told {
            let stopped = Outcome::Cancelled(Vec::new());
            return self.then(next, "a model call is stopped", who, |mesh| mesh.tell(who, command, stopped));
        }
        self.then(next, "a model answers", who, |mesh| mesh.tell(who, command, text("answer")));
        if self.left.scripts > 0 {
            self.then(next, "a model wants a script", who, |mesh| {
                mesh.left.scripts -= 1;
                mesh.scripts += 1;
                let id = mesh.scripts.to_string();
                mesh.tell(who, command, calls(&[&id]));
            });
        }
        if self.left.failures > 0 {
            self.then(next, "a model call fails", who, |mesh| {
                mesh.left.failures -= 1;
                mesh.tell(who, command, failed(FailureClass::Transient));
            });
        }
    }

    /// Writes an entry of a worker that knows of all those before it; any other one lets go of the script.
    fn write(&mut self, who: usize, entry: impl FnOnce(&mut Journal)) -> bool {
        let Worker::Runs(run) = &mut self.workers[who] else { return false };
        let journal = self.journals.entry(run.command.step).or_default();
        let chained = journal.last == run.last || matches!(self.without, Some(Guard::Chain | Guard::Journal));
        if chained && !journal.closed {
            entry(journal);
            journal.last += 1;
            run.last = journal.last;
            return true;
        }
        if journal.closed {
            let command = run.command.clone();
            self.commands.retain(|item| item.body != command);
        }
        self.workers[who] = Worker::Idle;
        false
    }

    /// Changes what a worker knows of its script, if that can be written down.
    fn note(&mut self, who: usize, call: Call) -> bool {
        let written = self.write(who, |journal| journal.call = call);
        if let Worker::Runs(run) = &mut self.workers[who] {
            run.begun |= call == Call::Begun;
            run.call = call;
        }
        written
    }

    fn runs_a_script(&self, who: usize, script: u8, run: &Run, next: &mut Next) {
        let Run { command, call, acted, told, stopped, .. } = run;
        let result = |output: &str, error: &str| {
            let (output, error) = (output.to_owned(), error.to_owned());
            CodeResult { id: script.to_string(), output, error, ..CodeResult::default() }
        };
        let said = match call {
            Call::NotBegun => result("", "stopped before it began"),
            Call::Begun | Call::Unknown => result("", "unknown"),
            Call::Ended => result("done", ""),
        };
        match call {
            Call::NotBegun if *told => {}
            Call::NotBegun => {
                self.then(next, "a script begins its call", who, |mesh| {
                    if mesh.note(who, Call::Begun) {
                        let truth = mesh.truth.entry(script).or_default();
                        truth.late |= truth.over;
                    }
                });
                if self.left.parks > 0 && command.round == 0 {
                    self.then(next, "a script waits for a person", who, |mesh| {
                        mesh.left.parks -= 1;
                        let Outcome::Parked { asked, .. } = park(&[1]) else { return };
                        mesh.tell(who, command, Outcome::Parked { asked, results: vec![result("", "it waits")] });
                    });
                }
                return;
            }
            Call::Begun if *acted => {
                return self.then(next, "a script ends its call", who, |mesh| _ = mesh.note(who, Call::Ended));
            }
            Call::Begun if run.begun => {
                return self.then(next, "a script does what it is for", who, |mesh| {
                    mesh.truth.entry(script).or_default().effects += 1;
                    if let Worker::Runs(run) = &mut mesh.workers[who] {
                        run.acted = true;
                    }
                });
            }
            Call::Begun => {
                return self.then(next, "a script finds a call that nobody knows about", who, |mesh| {
                    _ = mesh.note(who, Call::Unknown)
                });
            }
            Call::Ended | Call::Unknown => {}
        }
        if *told && !stopped {
            // It shows that it is still the one who runs the script, and that nobody is to run it any more.
            return self.then(next, "a script has its last word", who, |mesh| {
                if mesh.write(who, |journal| journal.stopped = true)
                    && let Worker::Runs(run) = &mut mesh.workers[who]
                {
                    run.stopped = true;
                }
            });
        }
        self.then(next, "a script is over", who, |mesh| {
            let outcome = if *told { Outcome::Cancelled(vec![said]) } else { Outcome::Code(vec![said]) };
            mesh.tell(who, command, outcome);
        });
    }

    fn time(&self, next: &mut Next) {
        let idle = self.replicas.iter().all(|replica| matches!(replica, Replica::Idle));
        if !idle || self.wake {
            return;
        }
        if self.seen < self.asked_for || self.task.next_wake.is_some_and(|wake| wake <= NOW) {
            self.then(next, "the sweep finds the task", 0, |mesh| mesh.wake = true);
            return;
        }
        let waits = |taken: bool| !taken;
        let at_rest = self.workers.iter().all(|worker| matches!(worker, Worker::Idle))
            && !self.commands.iter().any(|item| waits(item.taken))
            && !self.results.iter().any(|item| waits(item.taken));
        let Some(wake) = self.task.next_wake else { return };
        if at_rest {
            self.then(next, "time goes by", 0, |mesh| mesh.elapse(wake));
        } else if self.left.late > 0 {
            let deadline = self.task.step.as_ref().and_then(|step| match step.state {
                StepState::InFlight { deadline } | StepState::Cancelling { deadline } => Some(deadline),
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
                StepState::Parked { .. } => {}
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
        for pair in self.transcript.windows(2) {
            let pairs = match pair {
                [Said::Script(asked), Said::Result(given)] => asked == given,
                [Said::Script(_), _] | [_, Said::Result(_)] => false,
                _ => true,
            };
            if !pairs {
                return Err(format!("a script and its result are parted: {:?}", self.transcript));
            }
        }
        if task.turn.is_none() && matches!(self.transcript.last(), Some(Said::Script(_))) {
            return Err("a turn is over whose script has no result".to_owned());
        }
        Ok(())
    }
}
