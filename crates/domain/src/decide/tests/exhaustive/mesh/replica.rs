//! A reconciler: it loads the task, decides, commits, and performs the effects.

use super::*;

impl Mesh {
    pub(super) fn load(&self, result: Option<StepResult>) -> LoadedTask {
        let mut task = self.task.clone();
        let of_step = self
            .approval
            .iter()
            .filter(|(step, _)| task.step.as_ref().is_some_and(|now| now.id == *step));
        task.approvals = of_step.map(|(_, approval)| approval.clone()).collect();
        let queued = self.queue.iter().map(|(queued, _)| *queued);
        let queued =
            queued.clone().find(|queued| queued.interrupts).or_else(|| queued.clone().next());
        let (version, intents, drop_before) = (self.version, self.intents, self.drop_before);
        let awaits = |step: &Step| matches!(&step.state, StepState::Suspended { awaits, .. } if !awaits.is_empty());
        let at_work = if self.child == Child::AtWork { vec![child()] } else { Vec::new() };
        task.subtasks = task.step.as_ref().is_some_and(awaits).then_some(at_work);
        let newest = self.transcript.iter().rev().find_map(|entry| match entry {
            Message { content: TranscriptEntry::User(message), superseded: false } => {
                Some(*message)
            }
            _ => None,
        });
        task.retry = newest.filter(|_| self.retry > self.seen);
        LoadedTask {
            task,
            version,
            queued,
            intents,
            drop_before,
            child_noted: self.child_noted,
            result,
        }
    }

    pub(super) fn push_replica_actions(&self, index: usize, next: &mut Next) {
        match &self.replicas[index] {
            Replica::Idle => {
                if self.wake {
                    self.push_transition(next, "a wake is taken", index, |mesh| {
                        // It may be lost with the process: the row says what is to be done.
                        mesh.wake = false;
                        mesh.replicas[index] = Replica::Loaded(mesh.load(None));
                    });
                }
                for (at, item) in self.results.iter().enumerate() {
                    if item.taken && self.left.redelivered == 0 {
                        continue;
                    }
                    self.push_transition(next, "a result is taken", index, |mesh| {
                        mesh.left.redelivered -= u8::from(item.taken);
                        mesh.results[at].taken = true;
                        mesh.replicas[index] = Replica::Loaded(mesh.load(Some(item.body.clone())));
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
                    && self.disabled != Some(Guard::CloseBeforeCommit)
                {
                    self.push_transition(next, "a journal is closed", index, |mesh| {
                        for effect in &decision.effects {
                            mesh.end(effect);
                        }
                        mesh.replicas[index] = Replica::Closed(loaded.clone());
                    });
                } else {
                    self.commit(index, loaded, decision, next);
                }
            }
            Replica::Closed(loaded) => self.commit(index, loaded, Self::decide(loaded), next),
            Replica::Performing(effects, result) => {
                let perform = |mesh: &mut Self, lost: bool| {
                    let (effect, rest) = effects.split_first().expect("there is one left");
                    if !lost {
                        mesh.perform(effect);
                    }
                    mesh.performed(index, rest.to_vec(), result.clone());
                };
                self.push_transition(next, "an effect is performed", index, |mesh| {
                    perform(mesh, false)
                });
                if self.left.lost > 0 {
                    self.push_transition(next, "an effect is lost", index, |mesh| {
                        mesh.left.lost -= 1;
                        perform(mesh, true);
                    });
                }
            }
        }
        if self.left.crashes > 0 {
            self.push_transition(next, "a reconciler crashes", index, |mesh| {
                mesh.left.crashes -= 1;
                let result = match std::mem::replace(&mut mesh.replicas[index], Replica::Idle) {
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

    fn decide(loaded: &LoadedTask) -> Decision {
        // Two replicas that decide from the same state may use the same ids: only one of them
        // commits.
        let id = |n: u128| Uuid::from_u128(10_000 + u128::from(loaded.task.steps) * 10 + n);
        let fresh = Entropy {
            step: StepId::from_uuid(id(0)),
            title_step: StepId::from_uuid(id(1)),
            messages: [MessageId::from_uuid(id(2)), MessageId::from_uuid(id(3))],
            jitter: 0.5,
        };
        let event = loaded.result.clone().map_or(Event::Wake, Event::Result);
        decide(&loaded.task, loaded.queued, event, NOW, fresh)
    }

    fn commit(&self, index: usize, loaded: &LoadedTask, decision: Decision, next: &mut Next) {
        if loaded.version != self.version && self.disabled != Some(Guard::Version) {
            self.push_transition(
                next,
                "a commit is rejected, and the task loaded again",
                index,
                |mesh| {
                    mesh.replicas[index] = Replica::Loaded(mesh.load(loaded.result.clone()));
                },
            );
            return;
        }
        let mut mesh = self.clone();
        let holds = mesh.store(loaded, &decision).and_then(|()| {
            mesh.performed(index, decision.effects, loaded.result.clone());
            mesh.check()
        });
        next.push((Label("a decision is committed", index), holds.map(|()| mesh)));
    }

    /// One commit of the store.
    fn store(&mut self, loaded: &LoadedTask, decision: &Decision) -> Result<(), String> {
        // A subtask end that was recorded at load time is handled now. A subtask that ends again is
        // recorded again, but this one ends once.
        self.child_noted &= !loaded.child_noted;
        if !decision.changes(&loaded.task) {
            self.seen = self.seen.max(loaded.intents);
            return Ok(());
        }
        self.version += 1;
        // What another replica has seen refers to the state before.
        self.seen = if self.disabled == Some(Guard::RecheckIntents) {
            self.seen.max(loaded.intents)
        } else {
            loaded.intents
        };
        let (suspend, cancel, rewind) =
            (self.task.suspend, self.task.cancel.take(), self.task.rewind.take());
        let had_ended = self.task.turn.is_none();
        self.task = decision.task.clone();
        self.task.retry = None;
        self.task.approvals.clear();
        self.task.subtasks = None;
        if self.disabled == Some(Guard::SubtaskRecheck)
            && let Some(Step { state: StepState::Suspended { awaits, .. }, .. }) = &self.task.step
            && let Some(call) = awaits.first()
        {
            self.task.next_wake = Some(call.until);
        }
        self.task.suspend = suspend;
        // A cancel is cleared when it was seen, and kept when it arrived meanwhile.
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
            self.push_message(TranscriptEntry::User(message));
        } else if let (true, Some(turn)) = (had_ended, &decision.task.turn) {
            self.retried = Some(turn.message);
        }
        for message in &decision.appended {
            self.append(message)?;
        }
        if let Some(from) = decision.rewound {
            for (_, entry) in
                (1..).zip(&mut self.transcript).filter(|(position, _)| *position >= from)
            {
                entry.superseded = true;
            }
        }
        if let Some(ended) = &decision.ended {
            self.account_for(ended.message)?;
        }
        if decision.drop_queued.is_some() {
            let (dropped, stay) =
                self.queue.drain(..).partition(|(_, asked)| *asked <= loaded.drop_before);
            self.queue = stay;
            let dropped: Vec<(QueuedMessage, u32)> = dropped;
            for (queued, _) in dropped {
                self.account_for(queued.message)?;
            }
            if !self.queue.is_empty() {
                self.task.next_wake = Some(NOW);
            }
        }
        for request in &decision.approval_requests {
            let step = loaded.task.step.as_ref().expect("only a step asks").id;
            let id = ApprovalId::from_uuid(Uuid::from_u128(7));
            self.approval = Some((
                step,
                Approval { id, call: request.call.clone(), state: ApprovalState::Pending },
            ));
        }
        for closed in &decision.closed_approvals {
            if let Some((_, approval)) = &mut self.approval {
                approval.state = closed.state;
            }
        }
        if self.disabled == Some(Guard::StepCheck) && self.task.step.is_some() {
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
        let entry = match message.blocks.first() {
            Some(Block::CodeInterpreterCall(call)) => TranscriptEntry::Script(number(&call.id)),
            Some(Block::CodeInterpreterResult(result)) => {
                self.check_result(result)?;
                TranscriptEntry::Result(number(&result.id))
            }
            _ if message.source == Source::Assistant => TranscriptEntry::Answer,
            _ => TranscriptEntry::Other,
        };
        self.push_message(entry);
        Ok(())
    }

    fn push_message(&mut self, entry: TranscriptEntry) {
        self.transcript.push(Message { content: entry, superseded: false });
    }

    /// Checks what the model is told about a script against the truth.
    fn check_result(&mut self, result: &CodeResult) -> Result<(), String> {
        let truth = self.truth.entry(number(&result.id)).or_default();
        let effects = truth.effects;
        truth.reported = (!result.error.contains("unknown")).then_some(effects);
        truth.reported_end = true;
        let is_true = match (&*result.error, &*result.output) {
            ("", "done") => effects == 1,
            (error, _) if error.contains("unknown") => true,
            (error, _) if error.contains("not run") => effects == 0,
            ("stopped before it began" | "it waits", _) => effects == 0,
            other => return Err(format!("unexpected result: {other:?}")),
        };
        if is_true {
            Ok(())
        } else {
            Err(format!("the model is told {result:?} when {effects} effects have happened"))
        }
    }

    /// Continues with the remaining effects, or acknowledges the result.
    fn performed(&mut self, index: usize, left: Vec<Effect>, result: Option<StepResult>) {
        if !left.is_empty() {
            self.replicas[index] = Replica::Performing(left, result);
            return;
        }
        self.replicas[index] = Replica::Idle;
        if let Some(at) = self.results.iter().position(|item| Some(&item.body) == result.as_ref()) {
            self.results.remove(at);
        }
    }

    fn perform(&mut self, effect: &Effect) {
        let command = match effect {
            Effect::InvokeModel(step) => Command { step: step.id, round: step.round, script: None },
            Effect::ExecuteCode(step) => {
                let asked = self.transcript.iter().rev().find_map(|entry| match &entry.content {
                    TranscriptEntry::Script(script) => Some(*script),
                    _ => None,
                });
                Command { step: step.id, round: step.round, script: asked }
            }
            Effect::CancelCode(step, _) | Effect::CancelModel(step, _) => {
                for worker in &mut self.workers {
                    if let Worker::Runs(run) = worker
                        && run.command.step == *step
                    {
                        run.stop_requested = true;
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
        // The bus queues one command of a kind per task.
        if !self.commands.iter().any(|item| item.body.script.is_some() == command.script.is_some())
        {
            self.commands.push(Item { body: command, taken: false });
        }
    }

    /// Closes the journal of a stopping script that no worker has started, and reports that.
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
        let begun = journal.last > 0 && self.disabled != Some(Guard::EmptyJournal);
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

    /// Closes the journal of an ended script, and withdraws its command.
    fn end(&mut self, effect: &Effect) {
        let Effect::EndCode(step) = effect else { return };
        self.journals.entry(*step).or_default().closed = true;
        self.commands.retain(|item| item.body.step != *step || item.taken);
    }
}
