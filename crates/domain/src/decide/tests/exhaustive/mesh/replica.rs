//! What a reconciler does: it loads the task, decides, commits, and performs what follows.

use super::*;

impl Mesh {
    pub(super) fn load(&self, result: Option<StepResult>) -> Loaded {
        let mut task = self.task.clone();
        let of_step = self
            .approval
            .iter()
            .filter(|(step, _)| task.step.as_ref().is_some_and(|now| now.id == *step));
        task.approvals = of_step.map(|(_, approval)| approval.clone()).collect();
        let queued = self.queue.iter().map(|(queued, _)| *queued);
        let queued =
            queued.clone().find(|queued| queued.interrupts).or_else(|| queued.clone().next());
        let (version, asked_for, drop_before) = (self.version, self.asked_for, self.drop_before);
        let awaits = |step: &Step| matches!(&step.state, StepState::Parked { awaits, .. } if !awaits.is_empty());
        let at_work = if self.child == Child::AtWork { vec![child()] } else { Vec::new() };
        task.subtasks = task.step.as_ref().is_some_and(awaits).then_some(at_work);
        let newest = self.transcript.iter().rev().find_map(|entry| match entry {
            Entry { said: Said::User(message), aside: false } => Some(*message),
            _ => None,
        });
        task.retry = newest.filter(|_| self.retry > self.seen);
        Loaded {
            task,
            version,
            queued,
            asked_for,
            drop_before,
            child_noted: self.child_noted,
            result,
        }
    }

    pub(super) fn replica(&self, who: usize, next: &mut Next) {
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
                let of_result = loaded.result.as_ref().is_some_and(|result| {
                    loaded.task.step.as_ref().is_some_and(|step| step.awaits(result))
                });
                if decision.effects.iter().any(ends)
                    && !of_result
                    && self.without != Some(Guard::CloseFirst)
                {
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
        // Two that decide from the same state may well have the same ids: one of them does not get
        // to commit.
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
        // What was noted when it was loaded was looked at. A subtask that ends again is noted
        // again, but this one ends once.
        self.child_noted &= !loaded.child_noted;
        if !decision.changes(&loaded.task) {
            self.seen = self.seen.max(loaded.asked_for);
            return Ok(());
        }
        self.version += 1;
        // What another one has seen, it has seen of the state before.
        self.seen = if self.without == Some(Guard::SeenAnew) {
            self.seen.max(loaded.asked_for)
        } else {
            loaded.asked_for
        };
        let (suspend, cancel, rewind) =
            (self.task.suspend, self.task.cancel.take(), self.task.rewind.take());
        let had_ended = self.task.turn.is_none();
        self.task = decision.task.clone();
        self.task.retry = None;
        self.task.approvals.clear();
        self.task.subtasks = None;
        if self.without == Some(Guard::LookAnew)
            && let Some(Step { state: StepState::Parked { awaits, .. }, .. }) = &self.task.step
            && let Some(call) = awaits.first()
        {
            self.task.next_wake = Some(call.until);
        }
        self.task.suspend = suspend;
        // A cancel is cleared when it was seen, and stays when it came meanwhile.
        self.task.cancel =
            if loaded.task.cancel.is_some() { decision.task.cancel.clone() } else { cancel };
        self.task.rewind = if loaded.task.rewind.is_some() { decision.task.rewind } else { rewind };
        self.task.last_error.take();
        if let Some((message, _)) = decision.admitted {
            let before = self.queue.len();
            self.queue.retain(|(queued, _)| queued.message != message);
            if self.queue.len() == before {
                return Err("a message is admitted that is not queued".to_owned());
            }
            self.say(Said::User(message));
        } else if let (true, Some(turn)) = (had_ended, &decision.task.turn) {
            self.retried = Some(turn.message);
        }
        for message in &decision.appended {
            self.append(message)?;
        }
        if let Some(from) = decision.rewound {
            for (_, entry) in (1..).zip(&mut self.transcript).filter(|(place, _)| *place >= from) {
                entry.aside = true;
            }
        }
        if let Some(ended) = &decision.ended {
            self.account_for(ended.message)?;
        }
        if decision.drop_queued.is_some() {
            let (dropped, stay) =
                self.queue.drain(..).partition(|(_, asked)| *asked <= loaded.drop_before);
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
            self.approval = Some((
                step,
                Approval { id, call: asked.call.clone(), state: ApprovalState::Pending },
            ));
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
        if self.retried.take_if(|retried| *retried == message).is_some() {
            return Ok(());
        }
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
        self.say(said);
        Ok(())
    }

    fn say(&mut self, said: Said) {
        self.transcript.push(Entry { said, aside: false });
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
        if is_true {
            Ok(())
        } else {
            Err(format!("the model is told {result:?} when {effects} effects have happened"))
        }
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
                let asked = self.transcript.iter().rev().find_map(|entry| match &entry.said {
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
                if matches!(effect, Effect::CancelCode(..)) {
                    self.end_unbegun(*step);
                }
                return;
            }
            Effect::EndCode(_) => return self.end(effect),
            Effect::MakeTitle(_) | Effect::Compact(_) => return,
        };
        // The bus lets one command of a kind wait for a task.
        if !self.commands.iter().any(|item| item.body.script.is_some() == command.script.is_some())
        {
            self.commands.push(Item { body: command, taken: false });
        }
    }

    /// Closes the journal of a script that was told to stop and that nobody has begun, and says so.
    fn end_unbegun(&mut self, step: StepId) {
        let Some(Stage::Code { calls }) = self.task.turn.as_ref().map(|turn| turn.stage.clone())
        else {
            return;
        };
        let Some(round) = self.task.step.as_ref().filter(|now| now.id == step).map(|now| now.round)
        else {
            return;
        };
        let journal = self.journals.entry(step).or_default();
        let begun = journal.last > 0 && self.without != Some(Guard::Unbegun);
        if begun || journal.closed || round > 0 {
            return;
        }
        journal.closed = true;
        let not_run = |call: &String| CodeResult {
            id: call.clone(),
            error: "stopped before it began".into(),
            ..CodeResult::default()
        };
        let outcome = Outcome::Cancelled(calls.iter().map(not_run).collect());
        self.results.push(Item { body: StepResult { step, round, outcome }, taken: false });
    }

    /// Closes the journal of a script that is over, and takes back its command.
    fn end(&mut self, effect: &Effect) {
        let Effect::EndCode(step) = effect else { return };
        self.journals.entry(*step).or_default().closed = true;
        self.commands.retain(|item| item.body.step != *step || item.taken);
    }
}
