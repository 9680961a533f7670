//! Random histories: the invariants of `World::check` hold after any sequence of actions.

use proptest::prelude::*;

use super::*;

/// An external action on a task.
#[derive(Debug, Clone)]
enum Action {
    Send,
    Interrupt,
    Rewind(usize, bool),
    Edit(usize),
    Said(bool),
    Wake,
    Elapse(i64),
    Suspend,
    Resume,
    Cancel,
    Broke(bool),
    Answer,
    Calls(usize),
    Results(usize),
    Fail(FailureClass),
    Stopped,
    Park(u32),
    Await(u32, u128),
    ChildEnds,
    Say(ApprovalState),
    Repeat,
}

fn action() -> impl Strategy<Value = Action> {
    use FailureClass::*;
    prop_oneof![
        3 => Just(Action::Send),
        2 => Just(Action::Interrupt),
        1 => (0..20_usize, any::<bool>()).prop_map(|(position, keep)| Action::Rewind(position, keep)),
        1 => (0..20_usize).prop_map(Action::Edit),
        2 => any::<bool>().prop_map(Action::Said),
        3 => Just(Action::Wake),
        2 => (0..2000_i64).prop_map(Action::Elapse),
        1 => Just(Action::Suspend),
        2 => Just(Action::Resume),
        1 => Just(Action::Cancel),
        2 => any::<bool>().prop_map(Action::Broke),
        3 => Just(Action::Answer),
        4 => (1..3_usize).prop_map(Action::Calls),
        4 => (0..3_usize).prop_map(Action::Results),
        2 => prop::sample::select(vec![Transient, RateLimited, Authentication, Internal, ContextTooLong]).prop_map(Action::Fail),
        1 => Just(Action::Stopped),
        3 => (1..4_u32).prop_map(Action::Park),
        3 => (0..2_u32, 1..4_u128).prop_map(|(approvals, tasks)| Action::Await(approvals, tasks)),
        2 => Just(Action::ChildEnds),
        2 => prop::sample::select(vec![ApprovalState::Approved, ApprovalState::Rejected]).prop_map(Action::Say),
        1 => Just(Action::Elapse(8 * 24 * 3600)),
        2 => Just(Action::Repeat),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// `World::check` holds after every decision of any history. Finally every message was
    /// answered, failed or dropped exactly once.
    #[test]
    fn every_history_accounts_for_every_message(
        actions in prop::collection::vec(action(), 0..60),
        max_turns in prop::sample::select(vec![3_u32, 40]),
        room in prop::sample::select(vec![0_i64, 300, 1_000, 3_000]),
    ) {
        const IDS: [&str; 3] = ["a", "b", "c"];
        let mut world = World::new();
        world.task.max_turns = max_turns;
        world.task.context.input_limit = room;
        let mut sent = 0;
        let mut last_result = None;
        for action in actions {
            let stage = world.task.turn.as_ref().map(|turn| turn.stage.clone());
            let outcome = match action {
                Action::Send => { world.send(); sent += 1; None }
                Action::Wake => None,
                Action::Elapse(seconds) => { world.elapse(seconds); None }
                Action::Suspend => { world.task.suspend = true; None }
                Action::Resume => { world.task.suspend = false; None }
                Action::Broke(broke) => { world.broke = broke; None }
                Action::Cancel => { world.cancel(); None }
                Action::Interrupt => { world.send_message(true); sent += 1; None }
                Action::Rewind(position, keep) => {
                    let at = position.checked_rem(world.transcript.len()).unwrap_or(0);
                    world.rewind_to(at as i64 + 1, keep);
                    // The next action finds it, whatever that is.
                    if position % 2 == 0 { continue; }
                    None
                }
                Action::Edit(position) => {
                    let position = position.checked_rem(world.transcript.len()).unwrap_or(0);
                    if world.rewind(position as i64 + 1) { world.send(); sent += 1; }
                    None
                }
                Action::Said(anything) => {
                    let partial = if anything { vec![Block::Text("so far".to_owned())] } else { Vec::new() };
                    Some(Outcome::Interrupted(partial))
                }
                Action::Answer => Some(text("answer")),
                Action::Calls(count) => Some(calls(&IDS[..count])),
                Action::Results(count) => Some(results(&IDS[..count])),
                Action::Fail(class) => Some(failed(class)),
                Action::Stopped => Some(Outcome::Cancelled(Vec::new())),
                Action::Park(count) => Some(suspend_for_approvals(&(1..=count).collect::<Vec<_>>())),
                Action::Await(approvals, tasks) => {
                    world.running_subtasks = (1..=tasks).map(|n| TaskId::from_uuid(Uuid::from_u128(900 + n))).collect();
                    let until = world.now + jiff::SignedDuration::from_secs(1000);
                    let call = AwaitedCall { script: 0, number: 9, tasks: world.running_subtasks.clone(), until };
                    Some(suspend_outcome(&(1..=approvals).collect::<Vec<_>>(), vec![call]))
                }
                Action::ChildEnds => { world.running_subtasks.pop(); None }
                Action::Say(state) => { world.decide_approval(state); None }
                Action::Repeat => {
                    if let Some(result) = last_result.clone() { world.decide(Event::Result(result)); }
                    None
                }
            };
            // Workers only answer steps they were given, and with the right kind of result.
            let fits = matches!(
                (&outcome, &stage),
                (Some(Outcome::Model(..) | Outcome::Interrupted(_)), Some(Stage::Model | Stage::Compact { .. }))
                    | (Some(Outcome::Code(_) | Outcome::Suspended { .. }), Some(Stage::Code { .. }))
                    | (Some(Outcome::Failed(_) | Outcome::Cancelled(_)), Some(_))
            );
            match (outcome, world.task.step.clone()) {
                (Some(outcome), Some(step)) if fits && !matches!(step.state, StepState::Backoff { .. }) => {
                    let result = StepResult { step: step.id, round: step.round, outcome };
                    last_result = Some(result.clone());
                    world.decide(Event::Result(result));
                }
                _ => { world.decide(Event::Wake); }
            }
        }
        world.task.suspend = false;
        world.decide(Event::Wake);
        for _ in 0..400 {
            if world.task.turn.is_none() && world.queue.is_empty() && world.task.cancel.is_none() && world.task.rewind.is_none() { break; }
            world.elapse(60);
            world.running_subtasks.clear();
            if world.task.phase == Phase::AwaitApproval { world.decide_approval(ApprovalState::Approved); }
            match (world.task.turn.as_ref().map(|turn| turn.stage.clone()), world.task.step.clone()) {
                (Some(Stage::Model | Stage::Compact { .. }), Some(step)) if matches!(step.state, StepState::InFlight { .. }) => { world.result(text("answer")); }
                (Some(Stage::Code { calls }), Some(step)) if !matches!(step.state, StepState::Suspended { .. }) => {
                    let ids: Vec<&str> = calls.iter().map(String::as_str).collect();
                    world.result(results(&ids));
                }
                _ => { world.decide(Event::Wake); }
            }
        }
        prop_assert!(world.longest_loop() <= 2 * MAX_REPEATS, "nothing runs in circles for longer");
        prop_assert!(world.queue.is_empty());
        prop_assert_eq!(world.ended.len() + world.dropped, sent);
        prop_assert_eq!(world.task.phase, Phase::AwaitInput);
        prop_assert!(!world.states().contains(&ApprovalState::Pending));
    }
}
