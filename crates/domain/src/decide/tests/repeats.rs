//! Loops of a model.

use super::*;
use crate::task::STUCK;

/// The model runs one script with this output. Returns the notice to the model, if any.
fn round(world: &mut World, code: &str, output: &str) -> Option<String> {
    let id = world.ids.to_string();
    let call = CodeCall { id: id.clone(), code: code.to_owned() };
    world.result(Outcome::Model(vec![Block::CodeInterpreterCall(call)], StopReason::Complete));
    let result = CodeResult { id, output: output.to_owned(), ..CodeResult::default() };
    let decision = world.result(Outcome::Code(vec![result]));
    match decision.appended.as_slice() {
        [_, note] => match note.blocks.as_slice() {
            [Block::Text(text)] => Some(text.clone()),
            other => panic!("not one text: {other:?}"),
        },
        _ => None,
    }
}

fn world_with_turn() -> World {
    let mut world = World::new();
    world.task.max_turns = 50;
    world.send();
    world.decide(Event::Wake);
    world
}

#[test]
fn loop_warns_model_once_then_ends_turn_as_stuck() {
    let mut world = world_with_turn();
    let warned: Vec<bool> =
        (0..2 * MAX_REPEATS).map(|_| round(&mut world, "look()", "nothing").is_some()).collect();
    assert_eq!(warned, [false, false, true, false, false, false], "told after three");
    let ended = world.ended.last().expect("the turn ended");
    assert_eq!((ended.outcome, ended.calls), (TurnOutcome::Failed, 2 * MAX_REPEATS));
    assert_eq!(world.task.last_error.as_ref().map(|error| error.code.as_str()), Some(STUCK));
    assert_eq!((world.task.phase, &world.task.step), (Phase::AwaitInput, &None));
    world.send();
    world.decide(Event::Wake);
    assert!(round(&mut world, "look()", "nothing").is_none(), "another turn begins anew");
    world.result(text("found"));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Completed));
}

#[test]
fn different_script_or_result_is_no_loop() {
    let mut world = world_with_turn();
    for number in 0..10 {
        assert_eq!(round(&mut world, "look()", &number.to_string()), None);
        assert_eq!(round(&mut world, &format!("look({number})"), "nothing"), None);
    }
    assert!(world.ended.is_empty());
}

#[test]
fn model_leaving_loop_after_warning_continues() {
    let mut world = world_with_turn();
    for _ in 0..MAX_REPEATS {
        round(&mut world, "look()", "nothing");
    }
    round(&mut world, "look_elsewhere()", "something");
    round(&mut world, "look()", "nothing");
    world.result(text("found"));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Completed));
}

#[test]
fn cancel_during_loop_ends_turn_as_cancelled() {
    let mut world = world_with_turn();
    for _ in 0..2 * MAX_REPEATS - 1 {
        round(&mut world, "look()", "nothing");
    }
    world.result(calls(&["a"]));
    world.cancel();
    world.decide(Event::Wake);
    world.result(Outcome::Cancelled(Vec::new()));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Cancelled));
}
