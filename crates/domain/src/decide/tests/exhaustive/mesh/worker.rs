//! What a worker does: it takes a command, calls a model or runs a script by its journal, tells the
//! result, and acknowledges.

use super::*;

impl Mesh {
    pub(super) fn worker(&self, who: usize, next: &mut Next) {
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

    /// A worker takes a command; of a script it reads the journal, and writes that it is the one
    /// who runs it now.
    fn take_over(&mut self, who: usize, command: Command) {
        let mut run = Run {
            command,
            last: 0,
            call: Call::NotBegun,
            begun: false,
            acted: false,
            told: false,
            stopped: false,
        };
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
            return self.then(next, "a model call is stopped", who, |mesh| {
                mesh.tell(who, command, stopped)
            });
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
        if self.left.refusals > 0 {
            self.then(next, "a model call is refused", who, |mesh| {
                mesh.left.refusals -= 1;
                mesh.tell(who, command, failed(FailureClass::Authentication));
            });
        }
    }

    /// Writes an entry of a worker that knows of all those before it; any other one lets go of the
    /// script.
    fn write(&mut self, who: usize, entry: impl FnOnce(&mut Journal)) -> bool {
        let Worker::Runs(run) = &mut self.workers[who] else { return false };
        let journal = self.journals.entry(run.command.step).or_default();
        let chained =
            journal.last == run.last || matches!(self.without, Some(Guard::Chain | Guard::Journal));
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
            Call::NotBegun if self.child == Child::AtWork && command.round == 0 => {
                // It has asked while the subtask is at work. What comes of that comes later; when
                // it is gone on with, the wait is over.
                return self.then(next, "a script waits for its subtask", who, |mesh| {
                    let until = NOW + Duration::from_secs(600);
                    let awaits =
                        vec![AwaitedCall { script: 0, number: 2, tasks: vec![child()], until }];
                    let results = vec![result("", "it waits")];
                    mesh.tell(who, command, Outcome::Parked { asked: Vec::new(), awaits, results });
                });
            }
            Call::NotBegun if self.left.awaits > 0 => {
                // Refused when the step is not the task's any more, or is to be stopped.
                let runs = self.task.step.as_ref().is_some_and(|step| step.id == command.step);
                let begins = runs
                    && self.task.cancel.is_none()
                    && self.task.rewind.is_none()
                    && !self.task.suspend;
                return self.then(next, "a script begins a subtask", who, |mesh| {
                    mesh.left.awaits -= 1;
                    if begins {
                        mesh.child = Child::AtWork;
                    }
                });
            }
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
                        let results = vec![result("", "it waits")];
                        mesh.tell(
                            who,
                            command,
                            Outcome::Parked { asked, awaits: Vec::new(), results },
                        );
                    });
                }
                return;
            }
            Call::Begun if *acted => {
                return self.then(next, "a script ends its call", who, |mesh| {
                    _ = mesh.note(who, Call::Ended)
                });
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
                return self.then(
                    next,
                    "a script finds a call that nobody knows about",
                    who,
                    |mesh| _ = mesh.note(who, Call::Unknown),
                );
            }
            Call::Ended | Call::Unknown => {}
        }
        if *told && !stopped {
            // It shows that it is still the one who runs the script, and that nobody is to run it
            // any more.
            return self.then(next, "a script has its last word", who, |mesh| {
                if mesh.write(who, |journal| journal.stopped = true)
                    && let Worker::Runs(run) = &mut mesh.workers[who]
                {
                    run.stopped = true;
                }
            });
        }
        self.then(next, "a script is over", who, |mesh| {
            let outcome =
                if *told { Outcome::Cancelled(vec![said]) } else { Outcome::Code(vec![said]) };
            mesh.tell(who, command, outcome);
        });
    }
}
