use std::collections::BTreeMap;

use uuid::Uuid;

use super::*;
use crate::{
    AgentId, ApprovalId, OrganizationId, TaskId,
    approval::{Approval, ApprovalCall, ApprovalState},
    context::{Outline, OutlineEntry},
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
    /// Queued messages, each with the intent count when it was accepted.
    queue: Vec<(QueuedMessage, u32)>,
    intents: u32,
    /// The intent count when a cancel or rewind was requested. Messages queued before are dropped.
    drop_before: u32,
    transcript: Vec<(Source, Vec<Block>)>,
    /// Whether each message of the transcript is superseded.
    superseded: Vec<bool>,
    /// The ids of the transcript's messages.
    message_ids: Vec<MessageId>,
    ended: Vec<EndedTurn>,
    dropped: usize,
    /// Every step with a command, and how often it was sent.
    commands_sent: BTreeMap<StepId, u32>,
    code_steps: Vec<StepId>,
    /// Every approval, with its step.
    approvals: Vec<(StepId, Approval)>,
    /// The running subtasks.
    running_subtasks: Vec<TaskId>,
    /// Whether no budget is left for model calls.
    broke: bool,
    /// The compactions in effect, the newest last.
    compacted: Vec<ContextCompaction>,
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
            intents: 0,
            drop_before: 0,
            transcript: Vec::new(),
            superseded: Vec::new(),
            message_ids: Vec::new(),
            ended: Vec::new(),
            dropped: 0,
            commands_sent: BTreeMap::new(),
            code_steps: Vec::new(),
            approvals: Vec::new(),
            running_subtasks: Vec::new(),
            broke: false,
            compacted: Vec::new(),
            now: Timestamp::UNIX_EPOCH,
            ids: 100,
        }
    }

    /// A task with a message and a model call in flight.
    fn with_model_call() -> Self {
        let mut world = Self::new();
        world.send();
        world.decide(Event::Wake);
        world
    }

    fn uuid(&mut self) -> Uuid {
        self.ids += 1;
        Uuid::from_u128(self.ids)
    }

    fn new_entropy(&mut self) -> Entropy {
        Entropy {
            step: StepId::from_uuid(self.uuid()),
            title_step: StepId::from_uuid(self.uuid()),
            messages: [MessageId::from_uuid(self.uuid()), MessageId::from_uuid(self.uuid())],
            jitter: 0.5,
        }
    }

    fn send(&mut self) -> MessageId {
        self.send_message(false)
    }

    fn send_message(&mut self, interrupts: bool) -> MessageId {
        let message = MessageId::from_uuid(self.uuid());
        self.intents += 1;
        self.queue.push((QueuedMessage { message, interrupts }, self.intents));
        message
    }

    fn cancel(&mut self) {
        self.intents += 1;
        self.drop_before = self.intents;
        self.task.cancel = Some("enough".to_owned());
    }

    fn rewind(&mut self, position: i64) -> bool {
        self.rewind_to(position, false)
    }

    /// Requests a rewind to this position, or to the one after it (`keep`), if the model sees it,
    /// as the store does.
    fn rewind_to(&mut self, position: i64, keep: bool) -> bool {
        let at = usize::try_from(position - 1).expect("places begin with 1");
        let Some((_, blocks)) = self.transcript.get(at) else { return false };
        if self.superseded[at] || self.task.rewind.is_some_and(|pending| pending <= position) {
            return false;
        }
        let from = message::cut_position(position, blocks, keep);
        self.intents += 1;
        self.drop_before = self.intents;
        self.task.rewind = Some(self.task.rewind.map_or(from, |pending| pending.min(from)));
        true
    }

    /// The messages that a model sees.
    fn visible_messages(&self) -> Vec<&(Source, Vec<Block>)> {
        self.visible_indices().map(|at| &self.transcript[at]).collect()
    }

    /// The indices of the messages that a model sees.
    fn visible_indices(&self) -> impl Iterator<Item = usize> {
        let is_shown = |at: &usize| {
            let position = *at as i64 + 1;
            let stays = |compacted: &ContextCompaction| {
                position > compacted.through || compacted.kept.contains(&position)
            };
            !self.superseded[*at] && self.compacted.last().is_none_or(stays)
        };
        (0..self.transcript.len()).filter(is_shown)
    }

    /// The outline as the store loads it.
    fn outline(&self) -> Outline {
        let entry = |at: usize| {
            let (source, blocks) = &self.transcript[at];
            let is_result = |block: &Block| matches!(block, Block::CodeInterpreterResult(_));
            OutlineEntry {
                message: self.message_ids[at],
                position: at as i64 + 1,
                source: *source,
                results: blocks.iter().any(is_result),
                tokens: tokens_of_content(&Content { blocks: blocks.clone() }),
            }
        };
        let summary = self.compacted.last().map_or(0, |compacted| compacted.tokens);
        Outline { summary, shown: self.visible_indices().map(entry).collect() }
    }

    /// The estimated tokens of the outline.
    fn size(&self) -> i64 {
        let outline = self.outline();
        outline.shown.iter().map(|entry| entry.tokens).sum::<i64>() + outline.summary
    }

    /// The next queued message, as the store selects it.
    fn next_queued(&self) -> Option<QueuedMessage> {
        let first = self.queue.iter().map(|(queued, _)| *queued);
        first.clone().find(|queued| queued.interrupts).or_else(|| first.into_iter().next())
    }

    fn decide(&mut self, event: Event) -> Decision {
        let fresh = self.new_entropy();
        let asking = self.task.step.as_ref().map(|step| step.id);
        let of_step = self.approvals.iter().filter(|(step, _)| Some(*step) == asking);
        self.task.approvals = of_step.map(|(_, approval)| approval.clone()).collect();
        // As the store loads them. A result is decided with the cached task.
        let awaits = |step: &Step| matches!(&step.state, StepState::Suspended { awaits, .. } if !awaits.is_empty());
        let load_subtasks =
            matches!(event, Event::Wake) && self.task.step.as_ref().is_some_and(awaits);
        self.task.subtasks = load_subtasks.then(|| self.running_subtasks.clone());
        let queued = self.next_queued();
        self.task.context.transcript = self.size();
        self.task.context.queued = 80;
        let mut decision = decide(&self.task, queued, event.clone(), self.now, fresh);
        if decision.needs_outline {
            self.task.context.outline = Some(self.outline());
            decision = decide(&self.task, queued, event.clone(), self.now, fresh);
            assert!(!decision.needs_outline, "it is there");
        }
        // As the store rejects a commit that starts a call without budget.
        let starts_call = |effect: &Effect| match effect {
            Effect::InvokeModel(step) | Effect::Compact(step) => asking != Some(step.id),
            Effect::MakeTitle(_) => true,
            _ => false,
        };
        if self.broke && decision.effects.iter().any(starts_call) {
            decision =
                decide_without_budget(&self.task, queued, event, self.now, fresh, "no money");
            assert!(!decision.effects.iter().any(starts_call), "{decision:?}");
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
                "messages are admitted in order"
            );
            self.queue.retain(|(queued, _)| queued.message != message);
            self.transcript.push((Source::User, vec![Block::Text(message.to_string())]));
            self.superseded.push(false);
            self.message_ids.push(message);
            assert_eq!(position, self.transcript.len() as i64);
        }
        for message in &decision.appended {
            self.transcript.push((message.source, message.blocks.clone()));
            self.superseded.push(false);
            self.message_ids.push(message.id);
            assert_eq!(message.position, self.transcript.len() as i64, "the transcript has no gap");
        }
        if decision.drop_queued.is_some() {
            let before = self.queue.len();
            self.queue.retain(|(_, arrival)| *arrival > self.drop_before);
            self.dropped += before - self.queue.len();
            if !self.queue.is_empty() {
                // As the store does for messages that survive a cancel.
                decision.task.next_wake = Some(self.now);
            }
        }
        if let Some(from) = decision.rewound {
            let from = usize::try_from(from - 1).expect("places begin with 1");
            self.superseded[from..].fill(true);
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
                *self.commands_sent.entry(step.id).or_default() += 1;
                assert_eq!(
                    command(&decision.task).as_ref(),
                    Some(effect),
                    "the command is derived from the task"
                );
                if matches!(effect, Effect::ExecuteCode(_)) && !self.code_steps.contains(&step.id) {
                    self.code_steps.push(step.id);
                }
            }
        }
        for request in &decision.approval_requests {
            let step = asking.expect("only a step asks");
            let id = ApprovalId::from_uuid(self.uuid());
            assert!(
                !self.approvals.iter().any(|(of, known)| *of == step && known.call == request.call),
                "asked once"
            );
            let approval =
                Approval { id, call: request.call.clone(), state: ApprovalState::Pending };
            self.approvals.push((step, approval));
        }
        for closed in &decision.closed_approvals {
            let found = self.approvals.iter_mut().find(|(_, approval)| approval.id == closed.id);
            let (_, approval) = found.expect("what is closed was asked");
            assert_eq!(approval.state, ApprovalState::Pending, "what was decided stays decided");
            approval.state = closed.state;
        }
        self.task = decision.task.clone();
        self.check();
        decision
    }

    /// Decides the oldest pending approval.
    fn decide_approval(&mut self, state: ApprovalState) -> bool {
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
    fn suspended(calls_of_script: &[u32]) -> Self {
        let mut world = Self::new();
        world.send();
        world.decide(Event::Wake);
        world.result(calls(&["a"]));
        world.result(suspend_for_approvals(calls_of_script));
        world
    }

    /// Invariants after every decision.
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
        let is_parked = task
            .step
            .as_ref()
            .is_some_and(|step| matches!(step.state, StepState::Suspended { .. }));
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
        assert!(!self.approvals.iter().any(open), "no approval of an ended script is pending");
        // Calls and results are paired: their exact results follow an assistant message with calls.
        for pair in self.visible_messages().windows(2) {
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

    /// The longest run of the same scripts with the same results within one turn.
    fn longest_loop(&self) -> u32 {
        let (mut longest, mut count, mut last) = (0, 0, None);
        for pair in self.transcript.windows(2) {
            if pair[1].0 == Source::User {
                (count, last) = (0, None);
            }
            let [(Source::Assistant, asked), (Source::System, results)] = pair else { continue };
            let codes: Vec<String> = code_calls(asked).map(|call| call.code.clone()).collect();
            let outputs: Vec<String> = results
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
        self.visible_messages()
            .last()
            .is_some_and(|(_, blocks)| code_calls(blocks).next().is_some())
    }

    /// Reports a result of the current step as a worker would.
    fn result(&mut self, outcome: Outcome) -> Decision {
        let step = self.task.step.as_ref().expect("a step is in flight");
        let result = StepResult { step: step.id, round: step.round, outcome };
        self.decide(Event::Result(result))
    }

    /// The worker reports that a model call has stopped.
    fn report_stopped(&mut self) -> Decision {
        self.result(Outcome::Interrupted(vec![Block::Text("half of an".to_owned())]))
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
    Outcome::Model(vec![Block::Text(text.to_owned())], StopReason::Complete)
}

fn calls(ids: &[&str]) -> Outcome {
    Outcome::Model(
        ids.iter()
            .map(|id| {
                Block::CodeInterpreterCall(CodeCall { id: (*id).to_owned(), code: "1".to_owned() })
            })
            .collect(),
        StopReason::Complete,
    )
}

fn results(ids: &[&str]) -> Outcome {
    Outcome::Code(
        ids.iter().map(|id| CodeResult { id: (*id).to_owned(), ..CodeResult::default() }).collect(),
    )
}

fn suspend_for_approvals(numbers: &[u32]) -> Outcome {
    suspend_outcome(numbers, Vec::new())
}

fn suspend_outcome(numbers: &[u32], awaits: Vec<AwaitedCall>) -> Outcome {
    let requests = numbers.iter().map(|&number| ApprovalRequest {
        call: ApprovalCall { script: 0, number, hash: format!("hash {number}") },
        tool: "create_file".to_owned(),
        arguments: "{}".to_owned(),
        arguments_size: 2,
        reason: String::new(),
    });
    let waited =
        CodeResult { id: "a".to_owned(), error: "it waited".to_owned(), ..CodeResult::default() };
    Outcome::Suspended { approval_requests: requests.collect(), awaits, results: vec![waited] }
}

fn failed(class: FailureClass) -> Outcome {
    failed_after(class, 1)
}

fn failed_after(class: FailureClass, attempts: u32) -> Outcome {
    Outcome::Failed(Failure { class, message: "it broke".to_owned(), retry_at: None, attempts })
}
