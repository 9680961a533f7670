//! Random histories: whatever happens in whatever order, what `World::check` says holds.

use proptest::prelude::*;

use super::*;

/// Anything that can happen to a task from outside.
#[derive(Debug, Clone)]
enum Happening {
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

fn happening() -> impl Strategy<Value = Happening> {
    use FailureClass::*;
    prop_oneof![
        3 => Just(Happening::Send),
        2 => Just(Happening::Interrupt),
        1 => (0..20_usize, any::<bool>()).prop_map(|(place, keep)| Happening::Rewind(place, keep)),
        1 => (0..20_usize).prop_map(Happening::Edit),
        2 => any::<bool>().prop_map(Happening::Said),
        3 => Just(Happening::Wake),
        2 => (0..2000_i64).prop_map(Happening::Elapse),
        1 => Just(Happening::Suspend),
        2 => Just(Happening::Resume),
        1 => Just(Happening::Cancel),
        2 => any::<bool>().prop_map(Happening::Broke),
        3 => Just(Happening::Answer),
        4 => (1..3_usize).prop_map(Happening::Calls),
        4 => (0..3_usize).prop_map(Happening::Results),
        2 => prop::sample::select(vec![Transient, RateLimited, Authentication, Internal, ContextTooLong]).prop_map(Happening::Fail),
        1 => Just(Happening::Stopped),
        3 => (1..4_u32).prop_map(Happening::Park),
        3 => (0..2_u32, 1..4_u128).prop_map(|(asked, tasks)| Happening::Await(asked, tasks)),
        2 => Just(Happening::ChildEnds),
        2 => prop::sample::select(vec![ApprovalState::Approved, ApprovalState::Rejected]).prop_map(Happening::Say),
        1 => Just(Happening::Elapse(8 * 24 * 3600)),
        2 => Just(Happening::Repeat),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// `World::check` holds after every decision of any history, and when everything calms down
    /// every message was answered, failed or dropped exactly once.
    #[test]
    fn any_history_ends_with_every_message_accounted_for(
        happenings in prop::collection::vec(happening(), 0..60),
        max_turns in prop::sample::select(vec![3_u32, 40]),
        room in prop::sample::select(vec![0_i64, 300, 1_000, 3_000]),
    ) {
        const IDS: [&str; 3] = ["a", "b", "c"];
        let mut world = World::new();
        world.task.max_turns = max_turns;
        world.task.context.room = room;
        let mut sent = 0;
        let mut last_result = None;
        for happening in happenings {
            let stage = world.task.turn.as_ref().map(|turn| turn.stage.clone());
            let outcome = match happening {
                Happening::Send => { world.send(); sent += 1; None }
                Happening::Wake => None,
                Happening::Elapse(seconds) => { world.elapse(seconds); None }
                Happening::Suspend => { world.task.suspend = true; None }
                Happening::Resume => { world.task.suspend = false; None }
                Happening::Broke(broke) => { world.broke = broke; None }
                Happening::Cancel => { world.cancel(); None }
                Happening::Interrupt => { world.send_as(true); sent += 1; None }
                Happening::Rewind(place, keep) => {
                    let at = place.checked_rem(world.transcript.len()).unwrap_or(0);
                    world.rewind_to(at as i64 + 1, keep);
                    // What comes next finds it, whatever that is.
                    if place % 2 == 0 { continue; }
                    None
                }
                Happening::Edit(place) => {
                    let place = place.checked_rem(world.transcript.len()).unwrap_or(0);
                    if world.rewind(place as i64 + 1) { world.send(); sent += 1; }
                    None
                }
                Happening::Said(anything) => {
                    let said = if anything { vec![Block::Text("so far".to_owned())] } else { Vec::new() };
                    Some(Outcome::Stopped(said))
                }
                Happening::Answer => Some(text("answer")),
                Happening::Calls(count) => Some(calls(&IDS[..count])),
                Happening::Results(count) => Some(results(&IDS[..count])),
                Happening::Fail(class) => Some(failed(class)),
                Happening::Stopped => Some(Outcome::Cancelled(Vec::new())),
                Happening::Park(count) => Some(park(&(1..=count).collect::<Vec<_>>())),
                Happening::Await(asked, tasks) => {
                    world.at_work = (1..=tasks).map(|n| TaskId::from_uuid(Uuid::from_u128(900 + n))).collect();
                    let until = world.now + jiff::SignedDuration::from_secs(1000);
                    let call = AwaitedCall { script: 0, number: 9, tasks: world.at_work.clone(), until };
                    Some(park_for(&(1..=asked).collect::<Vec<_>>(), vec![call]))
                }
                Happening::ChildEnds => { world.at_work.pop(); None }
                Happening::Say(state) => { world.say(state); None }
                Happening::Repeat => {
                    if let Some(result) = last_result.clone() { world.decide(Event::Result(result)); }
                    None
                }
            };
            // Workers answer only steps they were given, and in kind.
            let fits = matches!(
                (&outcome, &stage),
                (Some(Outcome::Model(..) | Outcome::Stopped(_)), Some(Stage::Model | Stage::Compact { .. }))
                    | (Some(Outcome::Code(_) | Outcome::Parked { .. }), Some(Stage::Code { .. }))
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
            world.at_work.clear();
            if world.task.phase == Phase::AwaitApproval { world.say(ApprovalState::Approved); }
            match (world.task.turn.as_ref().map(|turn| turn.stage.clone()), world.task.step.clone()) {
                (Some(Stage::Model | Stage::Compact { .. }), Some(step)) if matches!(step.state, StepState::InFlight { .. }) => { world.result(text("answer")); }
                (Some(Stage::Code { calls }), Some(step)) if !matches!(step.state, StepState::Parked { .. }) => {
                    let ids: Vec<&str> = calls.iter().map(String::as_str).collect();
                    world.result(results(&ids));
                }
                _ => { world.decide(Event::Wake); }
            }
        }
        prop_assert!(world.longest_loop() <= 2 * REPEATS, "nothing runs in circles for longer");
        prop_assert!(world.queue.is_empty());
        prop_assert_eq!(world.ended.len() + world.dropped, sent);
        prop_assert_eq!(world.task.phase, Phase::AwaitInput);
        prop_assert!(!world.states().contains(&ApprovalState::Pending));
    }
}
