//! A worker: it takes a command, calls a model or runs a script with its journal, reports the
//! result, and acknowledges the command.

use super::*;

impl Mesh {
    pub(super) fn push_worker_actions(&self, index: usize, next: &mut Next) {
        match &self.workers[index] {
            Worker::Idle => {
                for (at, item) in self.commands.iter().enumerate() {
                    if item.taken && self.left.redelivered == 0 {
                        continue;
                    }
                    self.push_transition(next, "a command is taken", index, |mesh| {
                        mesh.left.redelivered -= u8::from(item.taken);
                        mesh.commands[at].taken = true;
                        mesh.take_over(index, item.body.clone());
                    });
                }
                return;
            }
            Worker::Runs(run) => match run.command.script {
                None => self.advance_model_call(index, &run.command, run.stop_requested, next),
                Some(script) => self.advance_script(index, script, run, next),
            },
            Worker::Reported(command) => {
                self.push_transition(next, "a command is acknowledged", index, |mesh| {
                    mesh.commands.retain(|item| item.body != *command);
                    mesh.workers[index] = Worker::Idle;
                })
            }
        }
        if self.left.crashes > 0 {
            self.push_transition(next, "a worker crashes", index, |mesh| {
                mesh.left.crashes -= 1;
                let command = match std::mem::replace(&mut mesh.workers[index], Worker::Idle) {
                    Worker::Runs(run) => run.command,
                    Worker::Reported(command) => command,
                    Worker::Idle => return,
                };
                for item in &mut mesh.commands {
                    item.taken &= item.body != command;
                }
            });
        }
    }

    /// Takes a command. For a script, the worker reads the journal and writes that it runs the
    /// script now.
    fn take_over(&mut self, index: usize, command: Command) {
        let mut run = Run {
            command,
            last: 0,
            call: Call::NotBegun,
            begun: false,
            acted: false,
            stop_requested: false,
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
            if self.disabled != Some(Guard::Journal) {
                run.call = journal.call;
            }
            run.stopped = journal.stopped && self.disabled != Some(Guard::StopEntry);
            run.stop_requested = run.stopped;
        }
        self.workers[index] = Worker::Runs(run);
    }

    fn report(&mut self, index: usize, command: &Command, outcome: Outcome) {
        let body = StepResult { step: command.step, round: command.round, outcome };
        if !self.results.iter().any(|item| item.body == body) {
            self.results.push(Item { body, taken: false });
        }
        self.workers[index] = Worker::Reported(command.clone());
    }

    fn advance_model_call(
        &self,
        index: usize,
        command: &Command,
        stop_requested: bool,
        next: &mut Next,
    ) {
        if stop_requested {
            let stopped = Outcome::Cancelled(Vec::new());
            return self.push_transition(next, "a model call is stopped", index, |mesh| {
                mesh.report(index, command, stopped)
            });
        }
        self.push_transition(next, "a model answers", index, |mesh| {
            mesh.report(index, command, text("answer"))
        });
        if self.left.scripts > 0 {
            self.push_transition(next, "a model wants a script", index, |mesh| {
                mesh.left.scripts -= 1;
                mesh.scripts += 1;
                let id = mesh.scripts.to_string();
                mesh.report(index, command, calls(&[&id]));
            });
        }
        if self.left.failures > 0 {
            self.push_transition(next, "a model call fails", index, |mesh| {
                mesh.left.failures -= 1;
                mesh.report(index, command, failed(FailureClass::Transient));
            });
        }
        if self.left.refusals > 0 {
            self.push_transition(next, "a model call is refused", index, |mesh| {
                mesh.left.refusals -= 1;
                mesh.report(index, command, failed(FailureClass::Authentication));
            });
        }
    }

    /// Writes an entry for a worker that knows all entries before it. Any other worker abandons the
    /// script.
    fn write(&mut self, index: usize, entry: impl FnOnce(&mut Journal)) -> bool {
        let Worker::Runs(run) = &mut self.workers[index] else { return false };
        let journal = self.journals.entry(run.command.step).or_default();
        let chained = journal.last == run.last
            || matches!(self.disabled, Some(Guard::JournalChain | Guard::Journal));
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
        self.workers[index] = Worker::Idle;
        false
    }

    /// Changes what a worker knows about its script, if that can be recorded.
    fn note(&mut self, index: usize, call: Call) -> bool {
        let written = self.write(index, |journal| journal.call = call);
        if let Worker::Runs(run) = &mut self.workers[index] {
            run.begun |= call == Call::Begun;
            run.call = call;
        }
        written
    }

    fn advance_script(&self, index: usize, script: u8, run: &Run, next: &mut Next) {
        let Run { command, call, acted, stop_requested, stopped, .. } = run;
        let result = |output: &str, error: &str| {
            let (output, error) = (output.to_owned(), error.to_owned());
            CodeResult { id: script.to_string(), output, error, ..CodeResult::default() }
        };
        let result_so_far = match call {
            Call::NotBegun => result("", "stopped before it began"),
            Call::Begun | Call::Unknown => result("", "unknown"),
            Call::Ended => result("done", ""),
        };
        match call {
            Call::NotBegun if *stop_requested => {}
            Call::NotBegun if self.child == Child::AtWork && command.round == 0 => {
                // It has asked while the subtask runs. When it is resumed, the wait is over.
                return self.push_transition(
                    next,
                    "a script waits for its subtask",
                    index,
                    |mesh| {
                        let until = NOW + Duration::from_secs(600);
                        let awaits =
                            vec![AwaitedCall { script: 0, number: 2, tasks: vec![child()], until }];
                        let results = vec![result("", "it waits")];
                        mesh.report(
                            index,
                            command,
                            Outcome::Suspended { approval_requests: Vec::new(), awaits, results },
                        );
                    },
                );
            }
            Call::NotBegun if self.left.subtask_waits > 0 => {
                // Rejected when the step is not the task's any more, or is to be stopped.
                let is_current =
                    self.task.step.as_ref().is_some_and(|step| step.id == command.step);
                let may_start = is_current
                    && self.task.cancel.is_none()
                    && self.task.rewind.is_none()
                    && !self.task.suspend;
                return self.push_transition(next, "a script creates a subtask", index, |mesh| {
                    mesh.left.subtask_waits -= 1;
                    if may_start {
                        mesh.child = Child::AtWork;
                    }
                });
            }
            Call::NotBegun => {
                self.push_transition(next, "a script starts its call", index, |mesh| {
                    if mesh.note(index, Call::Begun) {
                        let truth = mesh.truth.entry(script).or_default();
                        truth.late |= truth.reported_end;
                    }
                });
                if self.left.approvals > 0 && command.round == 0 {
                    self.push_transition(next, "a script waits for a person", index, |mesh| {
                        mesh.left.approvals -= 1;
                        let Outcome::Suspended { approval_requests, .. } =
                            suspend_for_approvals(&[1])
                        else {
                            return;
                        };
                        let results = vec![result("", "it waits")];
                        mesh.report(
                            index,
                            command,
                            Outcome::Suspended { approval_requests, awaits: Vec::new(), results },
                        );
                    });
                }
                return;
            }
            Call::Begun if *acted => {
                return self.push_transition(next, "a script ends its call", index, |mesh| {
                    _ = mesh.note(index, Call::Ended)
                });
            }
            Call::Begun if run.begun => {
                return self.push_transition(next, "a script has its side effect", index, |mesh| {
                    mesh.truth.entry(script).or_default().effects += 1;
                    if let Worker::Runs(run) = &mut mesh.workers[index] {
                        run.acted = true;
                    }
                });
            }
            Call::Begun => {
                return self.push_transition(
                    next,
                    "a script finds a call of unknown outcome",
                    index,
                    |mesh| _ = mesh.note(index, Call::Unknown),
                );
            }
            Call::Ended | Call::Unknown => {}
        }
        if *stop_requested && !stopped {
            // Proves that this worker still runs the script, and that no other may run it again.
            return self.push_transition(next, "a script writes its stop entry", index, |mesh| {
                if mesh.write(index, |journal| journal.stopped = true)
                    && let Worker::Runs(run) = &mut mesh.workers[index]
                {
                    run.stopped = true;
                }
            });
        }
        self.push_transition(next, "a script ends", index, |mesh| {
            let outcome = if *stop_requested {
                Outcome::Cancelled(vec![result_so_far])
            } else {
                Outcome::Code(vec![result_so_far])
            };
            mesh.report(index, command, outcome);
        });
    }
}
