//! A model that runs in circles.

use super::*;
use crate::task::STUCK;

/// The model runs one script, which gives this. What was said to it then, if anything was.
fn round(world: &mut World, code: &str, output: &str) -> Option<String> {
    let id = world.ids.to_string();
    let call = CodeCall { id: id.clone(), code: code.to_owned() };
    world.result(Outcome::Model(vec![Block::CodeInterpreterCall(call)], Stop::Done));
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

fn started() -> World {
    let mut world = World::new();
    world.task.max_turns = 50;
    world.send();
    world.decide(Event::Wake);
    world
}

#[test]
fn a_loop_is_said_to_the_model_once_and_then_ends_the_turn_with_its_own_reason() {
    let mut world = started();
    let said: Vec<bool> =
        (0..2 * REPEATS).map(|_| round(&mut world, "look()", "nothing").is_some()).collect();
    assert_eq!(said, [false, false, true, false, false, false], "told after three");
    let ended = world.ended.last().expect("the turn ended");
    assert_eq!((ended.outcome, ended.calls), (TurnOutcome::Failed, 2 * REPEATS));
    assert_eq!(world.task.last_error.as_ref().map(|error| error.code.as_str()), Some(STUCK));
    assert_eq!((world.task.phase, &world.task.step), (Phase::AwaitInput, &None));
    world.send();
    world.decide(Event::Wake);
    assert!(round(&mut world, "look()", "nothing").is_none(), "another turn begins anew");
    world.result(text("found"));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Completed));
}

#[test]
fn another_script_or_another_result_is_no_loop() {
    let mut world = started();
    for number in 0..10 {
        assert_eq!(round(&mut world, "look()", &number.to_string()), None);
        assert_eq!(round(&mut world, &format!("look({number})"), "nothing"), None);
    }
    assert!(world.ended.is_empty());
}

#[test]
fn whoever_finds_out_of_the_loop_after_being_told_goes_on() {
    let mut world = started();
    for _ in 0..REPEATS {
        round(&mut world, "look()", "nothing");
    }
    round(&mut world, "look_elsewhere()", "something");
    round(&mut world, "look()", "nothing");
    world.result(text("found"));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Completed));
}

#[test]
fn a_cancel_during_a_loop_is_a_cancel() {
    let mut world = started();
    for _ in 0..2 * REPEATS - 1 {
        round(&mut world, "look()", "nothing");
    }
    world.result(calls(&["a"]));
    world.cancel();
    world.decide(Event::Wake);
    world.result(Outcome::Cancelled(Vec::new()));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Cancelled));
}
