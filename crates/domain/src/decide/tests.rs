use std::collections::BTreeMap;

use uuid::Uuid;

use super::*;
use crate::{
    AgentId, ApprovalId, OrganizationId, TaskId,
    approval::{Approval, ApprovalState, AskedCall},
    context::{Entry, Outline},
    message::{self, CodeCall, Content},
    money::tokens_of_content,
    subtask::AwaitedCall,
    task::{FailureClass, Phase, Turn},
};

mod approvals;
mod compact;
mod control;
mod exhaustive;
mod histories;
mod money;
mod repeats;
mod subtasks;
mod turns;

/// A task with everything around it that the shell would hold: the queue, the transcript, the
/// workers.
struct World {
    task: Task,
    /// Each with the count of what was asked for when it was accepted.
    queue: Vec<(Queued, u32)>,
    asked_for: u32,
    /// The count when a cancel or rewind was asked for: what was queued before goes with it.
    drop_before: u32,
    transcript: Vec<(Source, Vec<Block>)>,
    /// For each of these, whether it was put aside.
    aside: Vec<bool>,
    /// And its id.
    ids_said: Vec<MessageId>,
    ended: Vec<EndedTurn>,
    dropped: usize,
    /// Every step that was commanded, with how often.
    commanded: BTreeMap<StepId, u32>,
    code_steps: Vec<StepId>,
    /// Every question, with the step it is of.
    approvals: Vec<(StepId, Approval)>,
    /// The subtasks that are at work.
    at_work: Vec<TaskId>,
    /// Whether there is no money for model calls.
    broke: bool,
    /// Those that hold, the newest last.
    compacted: Vec<Compacted>,
    now: Timestamp,
    ids: u128,
}

impl World {
    fn new() -> Self {
        let id = |n| Uuid::from_u128(n);
        Self {
            task: Task {
                id: TaskId::from_uuid(id(1)),
                organization: OrganizationId::LOCAL,
                agent: AgentId::from_uuid(id(2)),
                suspend: false,
                cancel: None,
                rewind: None,
                retry: None,
                max_turns: 3,
                titled: true,
                phase: Phase::AwaitInput,
                turn: None,
                step: None,
                title_step: None,
                steps: 0,
                last_position: 0,
                next_wake: None,
                last_outcome: None,
                last_error: None,
                approvals: Vec::new(),
                subtasks: None,
                context: Context::default(),
            },
            queue: Vec::new(),
            asked_for: 0,
            drop_before: 0,
            transcript: Vec::new(),
            aside: Vec::new(),
            ids_said: Vec::new(),
            ended: Vec::new(),
            dropped: 0,
            commanded: BTreeMap::new(),
            code_steps: Vec::new(),
            approvals: Vec::new(),
            at_work: Vec::new(),
            broke: false,
            compacted: Vec::new(),
            now: Timestamp::UNIX_EPOCH,
            ids: 100,
        }
    }

    /// A message was sent, and the model is asked.
    fn asking() -> Self {
        let mut world = Self::new();
        world.send();
        world.decide(Event::Wake);
        world
    }

    fn uuid(&mut self) -> Uuid {
        self.ids += 1;
        Uuid::from_u128(self.ids)
    }

    fn fresh(&mut self) -> Fresh {
        Fresh {
            step: StepId::from_uuid(self.uuid()),
            title_step: StepId::from_uuid(self.uuid()),
            messages: [MessageId::from_uuid(self.uuid()), MessageId::from_uuid(self.uuid())],
            jitter: 0.5,
        }
    }

    fn send(&mut self) -> MessageId {
        self.send_as(false)
    }

    fn send_as(&mut self, interrupts: bool) -> MessageId {
        let message = MessageId::from_uuid(self.uuid());
        self.asked_for += 1;
        self.queue.push((Queued { message, interrupts }, self.asked_for));
        message
    }

    fn cancel(&mut self) {
        self.asked_for += 1;
        self.drop_before = self.asked_for;
        self.task.cancel = Some("enough".to_owned());
    }

    fn rewind(&mut self, place: i64) -> bool {
        self.rewind_to(place, false)
    }

    /// Asks for the transcript to be put aside from this place on, or from the one after it, if the
    /// model sees it, as the store does.
    fn rewind_to(&mut self, place: i64, keep: bool) -> bool {
        let at = usize::try_from(place - 1).expect("places begin with 1");
        let Some((_, blocks)) = self.transcript.get(at) else { return false };
        if self.aside[at] || self.task.rewind.is_some_and(|pending| pending <= place) {
            return false;
        }
        let from = message::cut(place, blocks, keep);
        self.asked_for += 1;
        self.drop_before = self.asked_for;
        self.task.rewind = Some(self.task.rewind.map_or(from, |pending| pending.min(from)));
        true
    }

    /// What a model is shown.
    fn shown(&self) -> Vec<&(Source, Vec<Block>)> {
        self.places().map(|at| &self.transcript[at]).collect()
    }

    /// Where in the transcript that is.
    fn places(&self) -> impl Iterator<Item = usize> {
        let is_shown = |at: &usize| {
            let place = *at as i64 + 1;
            let stays = |compacted: &Compacted| {
                place > compacted.through || compacted.kept.contains(&place)
            };
            !self.aside[*at] && self.compacted.last().is_none_or(stays)
        };
        (0..self.transcript.len()).filter(is_shown)
    }

    /// The outline as the store gives it.
    fn outline(&self) -> Outline {
        let entry = |at: usize| {
            let (source, blocks) = &self.transcript[at];
            let is_result = |block: &Block| matches!(block, Block::CodeInterpreterResult(_));
            Entry {
                message: self.ids_said[at],
                position: at as i64 + 1,
                source: *source,
                results: blocks.iter().any(is_result),
                tokens: tokens_of_content(&Content { blocks: blocks.clone() }),
            }
        };
        let summary = self.compacted.last().map_or(0, |compacted| compacted.tokens);
        Outline { summary, shown: self.places().map(entry).collect() }
    }

    /// What it is estimated at.
    fn size(&self) -> i64 {
        let outline = self.outline();
        outline.shown.iter().map(|entry| entry.tokens).sum::<i64>() + outline.summary
    }

    /// The message that is next, as the store finds it.
    fn next(&self) -> Option<Queued> {
        let first = self.queue.iter().map(|(queued, _)| *queued);
        first.clone().find(|queued| queued.interrupts).or_else(|| first.into_iter().next())
    }

    fn decide(&mut self, event: Event) -> Decision {
        let fresh = self.fresh();
        let asking = self.task.step.as_ref().map(|step| step.id);
        let of_step = self.approvals.iter().filter(|(step, _)| Some(*step) == asking);
        self.task.approvals = of_step.map(|(_, approval)| approval.clone()).collect();
        // As the store reads them. A result is decided about from what is remembered.
        let awaits = |step: &Step| matches!(&step.state, StepState::Parked { awaits, .. } if !awaits.is_empty());
        let looks = matches!(event, Event::Wake) && self.task.step.as_ref().is_some_and(awaits);
        self.task.subtasks = looks.then(|| self.at_work.clone());
        let queued = self.next();
        self.task.context.transcript = self.size();
        self.task.context.queued = 80;
        let mut decision = decide(&self.task, queued, event.clone(), self.now, fresh);
        if decision.wants_outline {
            self.task.context.outline = Some(self.outline());
            decision = decide(&self.task, queued, event.clone(), self.now, fresh);
            assert!(!decision.wants_outline, "it is there");
        }
        // As the store refuses a commit that begins a call there is no money for.
        let begins = |effect: &Effect| match effect {
            Effect::InvokeModel(step) | Effect::Compact(step) => asking != Some(step.id),
            Effect::MakeTitle(_) => true,
            _ => false,
        };
        if self.broke && decision.effects.iter().any(begins) {
            decision = decide_without_money(&self.task, queued, event, self.now, fresh, "no money");
            assert!(!decision.effects.iter().any(begins), "{decision:?}");
            let ended = decision.ended.as_ref().map(|ended| ended.message);
            assert!(
                ended.is_none() || ended != decision.admitted.map(|(message, _)| message),
                "{decision:?}"
            );
        }
        if let Some((message, position)) = decision.admitted {
            assert_eq!(
                queued.map(|queued| queued.message),
                Some(message),
                "messages are admitted in their order"
            );
            self.queue.retain(|(queued, _)| queued.message != message);
            self.transcript.push((Source::User, vec![Block::Text(message.to_string())]));
            self.aside.push(false);
            self.ids_said.push(message);
            assert_eq!(position, self.transcript.len() as i64);
        }
        for message in &decision.appended {
            self.transcript.push((message.source, message.blocks.clone()));
            self.aside.push(false);
            self.ids_said.push(message.id);
            assert_eq!(message.position, self.transcript.len() as i64, "the transcript has no gap");
        }
        if decision.drop_queued.is_some() {
            let before = self.queue.len();
            self.queue.retain(|(_, arrival)| *arrival > self.drop_before);
            self.dropped += before - self.queue.len();
            if !self.queue.is_empty() {
                // As the store does for messages that outlive a cancel.
                decision.task.next_wake = Some(self.now);
            }
        }
        if let Some(from) = decision.rewound {
            let from = usize::try_from(from - 1).expect("places begin with 1");
            self.aside[from..].fill(true);
            self.compacted.retain(|compacted| compacted.through <= from as i64);
            decision.task.context.through =
                self.compacted.last().map_or(0, |compacted| compacted.through);
        }
        if let Some(compacted) = &decision.compacted {
            let before = self.size();
            self.compacted.push(compacted.clone());
            assert!(
                self.size() < before && compacted.tokens < compacted.replaced,
                "it became smaller"
            );
            assert_eq!(before - self.size(), compacted.replaced - compacted.tokens);
        }
        self.ended.extend(decision.ended.clone());
        for effect in &decision.effects {
            if let Effect::InvokeModel(step) | Effect::Compact(step) | Effect::ExecuteCode(step) =
                effect
            {
                *self.commanded.entry(step.id).or_default() += 1;
                assert_eq!(
                    command(&decision.task).as_ref(),
                    Some(effect),
                    "it follows from the task"
                );
                if matches!(effect, Effect::ExecuteCode(_)) && !self.code_steps.contains(&step.id) {
                    self.code_steps.push(step.id);
                }
            }
        }
        for asked in &decision.asked {
            let step = asking.expect("only a step asks");
            let id = ApprovalId::from_uuid(self.uuid());
            assert!(
                !self.approvals.iter().any(|(of, known)| *of == step && known.call == asked.call),
                "asked once"
            );
            let approval = Approval { id, call: asked.call.clone(), state: ApprovalState::Pending };
            self.approvals.push((step, approval));
        }
        for closed in &decision.closed {
            let found = self.approvals.iter_mut().find(|(_, approval)| approval.id == closed.id);
            let (_, approval) = found.expect("what is closed was asked");
            assert_eq!(approval.state, ApprovalState::Pending, "what was decided stays decided");
            approval.state = closed.state;
        }
        self.task = decision.task.clone();
        self.check();
        decision
    }

    /// A person decides about the oldest question that is open.
    fn say(&mut self, state: ApprovalState) -> bool {
        let pending = |approval: &Approval| approval.state == ApprovalState::Pending;
        let Some((_, approval)) = self.approvals.iter_mut().find(|(_, approval)| pending(approval))
        else {
            return false;
        };
        approval.state = state;
        true
    }

    fn states(&self) -> Vec<ApprovalState> {
        self.approvals.iter().map(|(_, approval)| approval.state).collect()
    }

    /// A task whose script waits for approvals of these calls.
    fn parked(calls_of_script: &[u32]) -> Self {
        let mut world = Self::new();
        world.send();
        world.decide(Event::Wake);
        world.result(calls(&["a"]));
        world.result(park(calls_of_script));
        world
    }

    /// What holds after every decision.
    fn check(&self) {
        let task = &self.task;
        assert_eq!(task.last_position, self.transcript.len() as i64);
        if task.turn.is_some() && task.phase != Phase::Suspended || task.step.is_some() {
            assert!(task.next_wake.is_some(), "no silent stall: {task:?}");
        }
        if task.turn.is_none() {
            assert!(task.step.is_none());
            assert!(!self.open_calls(), "a turn never ends with an unanswered call");
        }
        match (&task.turn, task.phase) {
            (
                Some(Turn { stage: Stage::Code { .. }, .. }),
                Phase::ExecuteTools | Phase::Suspended,
            )
            | (
                Some(Turn { stage: Stage::Code { .. }, .. }),
                Phase::AwaitApproval | Phase::AwaitSubtasks,
            )
            | (
                Some(Turn { stage: Stage::Model | Stage::Compact { .. }, .. }),
                Phase::InvokeModel | Phase::Suspended,
            )
            | (None, Phase::AwaitInput | Phase::Suspended) => {}
            other => panic!("phase and stage disagree: {other:?}"),
        }
        let is_parked =
            task.step.as_ref().is_some_and(|step| matches!(step.state, StepState::Parked { .. }));
        if task.phase != Phase::Suspended {
            assert_eq!(
                is_parked,
                matches!(task.phase, Phase::AwaitApproval | Phase::AwaitSubtasks)
            );
        }
        let open = |(step, approval): &(StepId, Approval)| {
            approval.state == ApprovalState::Pending
                && task.step.as_ref().is_none_or(|now| now.id != *step)
        };
        assert!(!self.approvals.iter().any(open), "nobody is asked about a script that is over");
        // Calls and results pair up: an assistant message with calls is followed by exactly their
        // results.
        for pair in self.shown().windows(2) {
            let calls: Vec<&str> = code_calls(&pair[0].1).map(|call| call.id.as_str()).collect();
            let results: Vec<&str> = pair[1]
                .1
                .iter()
                .filter_map(|block| match block {
                    Block::CodeInterpreterResult(result) => Some(result.id.as_str()),
                    _ => None,
                })
                .collect();
            assert_eq!(calls, results);
        }
    }

    /// How often, at most, the same scripts gave the same in a row within one turn.
    fn longest_loop(&self) -> u32 {
        let (mut longest, mut count, mut last) = (0, 0, None);
        for pair in self.transcript.windows(2) {
            if pair[1].0 == Source::User {
                (count, last) = (0, None);
            }
            let [(Source::Assistant, asked), (Source::System, given)] = pair else { continue };
            let codes: Vec<String> = code_calls(asked).map(|call| call.code.clone()).collect();
            let outputs: Vec<String> = given
                .iter()
                .filter_map(|block| match block {
                    Block::CodeInterpreterResult(result) => {
                        Some(format!("{}/{}", result.output, result.error))
                    }
                    _ => None,
                })
                .collect();
            let now = (!codes.is_empty()).then_some((codes, outputs));
            count = if now.is_some() && now == last { count + 1 } else { 1 };
            last = now;
            longest = longest.max(count);
        }
        longest
    }

    fn open_calls(&self) -> bool {
        self.shown().last().is_some_and(|(_, blocks)| code_calls(blocks).next().is_some())
    }

    /// Ends the current step as a worker would.
    fn result(&mut self, outcome: Outcome) -> Decision {
        let step = self.task.step.as_ref().expect("a step is in flight");
        let result = StepResult { step: step.id, round: step.round, outcome };
        self.decide(Event::Result(result))
    }

    /// The worker at a model call says that it has stopped.
    fn stopped(&mut self) -> Decision {
        self.result(Outcome::Stopped(vec![Block::Text("half of an".to_owned())]))
    }

    fn elapse(&mut self, seconds: i64) {
        self.now += jiff::SignedDuration::from_secs(seconds);
    }
}

/// How the newest turn ended.
fn outcome(world: &World) -> Option<TurnOutcome> {
    world.ended.last().map(|turn| turn.outcome)
}

fn text(text: &str) -> Outcome {
    Outcome::Model(vec![Block::Text(text.to_owned())], Stop::Done)
}

fn calls(ids: &[&str]) -> Outcome {
    Outcome::Model(
        ids.iter()
            .map(|id| {
                Block::CodeInterpreterCall(CodeCall { id: (*id).to_owned(), code: "1".to_owned() })
            })
            .collect(),
        Stop::Done,
    )
}

fn results(ids: &[&str]) -> Outcome {
    Outcome::Code(
        ids.iter().map(|id| CodeResult { id: (*id).to_owned(), ..CodeResult::default() }).collect(),
    )
}

fn park(numbers: &[u32]) -> Outcome {
    park_for(numbers, Vec::new())
}

fn park_for(numbers: &[u32], awaits: Vec<AwaitedCall>) -> Outcome {
    let asked = numbers.iter().map(|&number| Asked {
        call: AskedCall { script: 0, number, hash: format!("hash {number}") },
        tool: "create_file".to_owned(),
        arguments: "{}".to_owned(),
        arguments_size: 2,
        reason: String::new(),
    });
    let waited =
        CodeResult { id: "a".to_owned(), error: "it waited".to_owned(), ..CodeResult::default() };
    Outcome::Parked { asked: asked.collect(), awaits, results: vec![waited] }
}

fn failed(class: FailureClass) -> Outcome {
    failed_after(class, 1)
}

fn failed_after(class: FailureClass, tries: u32) -> Outcome {
    Outcome::Failed(Failure { class, message: "it broke".to_owned(), retry_at: None, tries })
}
