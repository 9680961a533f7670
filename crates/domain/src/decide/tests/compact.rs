//! Conversations that do not fit their model.

use super::*;
use crate::task::CONTEXT_TOO_LONG;

/// A summary with all sections.
const SUMMARY: &str = "# Goal\nTo talk.\n## **Facts:**\nAbout x.\n# done\n# Open\nNothing.";

fn answer(world: &mut World, characters: usize) -> Decision {
    world.result(text(&"x".repeat(characters)))
}

/// A task with this many answered messages of about a thousand estimated tokens each, and a scale
/// at which estimates are exact.
fn long(exchanges: usize, room: i64) -> World {
    let mut world = World::new();
    world.task.context.scale = 1_000;
    for _ in 0..exchanges {
        world.send();
        world.decide(Event::Wake);
        answer(&mut world, 2_000);
    }
    world.task.context.input_limit = room;
    world
}

fn stage(world: &World) -> Option<Stage> {
    world.task.turn.as_ref().map(|turn| turn.stage.clone())
}

/// Reconciles the task until it waits for something.
fn settle(world: &mut World) -> Decision {
    loop {
        let decision = world.decide(Event::Wake);
        if world.task.next_wake != Some(world.now) {
            return decision;
        }
    }
}

fn through(world: &World) -> i64 {
    world.compacted.last().map_or(0, |compacted| compacted.through)
}

#[test]
fn full_conversation_is_summarized_within_the_turn() {
    let mut world = long(10, 10_000);
    world.send();
    let decision = settle(&mut world);
    let [Effect::Compact(step)] = decision.effects.as_slice() else { panic!("{decision:?}") };
    assert_eq!((world.task.phase, step.attempt), (Phase::InvokeModel, 1));
    let decision = world.result(text(SUMMARY));
    let compacted = decision.compacted.as_ref().expect("it is taken");
    assert!(compacted.summary && compacted.after < compacted.before, "{compacted:?}");
    assert!(compacted.text.ends_with(SUMMARY));
    assert_eq!(compacted.kept, [1], "the first message stays");
    assert!(
        matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]),
        "and the model is asked at once"
    );
    assert_eq!(world.task.context.tokens, compacted.after);
    answer(&mut world, 10);
    let ended = world.ended.last().expect("it ended");
    assert_eq!((ended.calls, ended.outcome), (1, TurnOutcome::Completed));
}

#[test]
fn useless_summary_is_retried_once_then_messages_are_dropped() {
    let mut world = long(10, 10_000);
    world.send();
    settle(&mut world);
    let decision = answer(&mut world, 100_000);
    assert!(decision.compacted.is_none());
    assert!(matches!(decision.effects.as_slice(), [Effect::Compact(_)]), "{decision:?}");
    let decision = world.result(Outcome::Model(Vec::new(), StopReason::Complete));
    let compacted = decision.compacted.as_ref().expect("something is left out");
    assert!(!compacted.summary && compacted.text.contains("left out"), "{compacted:?}");
    assert!(matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]), "{decision:?}");
    assert_eq!(
        world.transcript[usize::try_from(compacted.through).expect("a place")].0,
        Source::User,
        "whole exchanges"
    );
}

#[test]
fn summary_without_sections_is_retried_once_then_accepted() {
    for summary in
        ["They talked about x.", "# Goal\nTo talk.\n# Facts\nAbout x. Done and open: nothing."]
    {
        let mut world = long(10, 10_000);
        world.send();
        settle(&mut world);
        let decision = world.result(text(summary));
        assert!(decision.compacted.is_none(), "{summary}");
        assert!(matches!(decision.effects.as_slice(), [Effect::Compact(_)]), "{decision:?}");
        let decision = world.result(text(summary));
        let compacted = decision.compacted.as_ref().expect("it is better than nothing");
        assert!(compacted.summary && compacted.text.ends_with(summary), "{compacted:?}");
    }
}

#[test]
fn too_long_call_is_repeated_after_cuts_and_then_fails() {
    let mut world = long(10, 100_000);
    world.send();
    let decision = settle(&mut world);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]),
        "it seems to fit: {decision:?}"
    );
    let decision = world.result(failed(FailureClass::ContextTooLong));
    assert!(matches!(decision.effects.as_slice(), [Effect::Compact(_)]), "{decision:?}");
    assert_eq!(decision.error, None, "it is not reported");
    world.result(text(SUMMARY));
    let decision = world.result(failed(FailureClass::ContextTooLong));
    let compacted = decision.compacted.as_ref().expect("cut without another call");
    assert!(
        !compacted.summary && matches!(decision.effects.as_slice(), [Effect::InvokeModel(_)]),
        "{decision:?}"
    );
    let decision = world.result(failed(FailureClass::ContextTooLong));
    assert_eq!(decision.error.map(|error| error.code).as_deref(), Some(CONTEXT_TOO_LONG));
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Failed));
}

#[test]
fn last_compaction_replaces_all_earlier_ones() {
    let mut world = long(10, 10_000);
    let mut cuts = Vec::new();
    for _ in 0..30 {
        world.send();
        settle(&mut world);
        if matches!(stage(&world), Some(Stage::Compact { .. })) {
            world.result(text(SUMMARY));
            cuts.push(through(&world));
        }
        answer(&mut world, 2_000);
    }
    assert!(cuts.len() > 2 && cuts.is_sorted(), "{cuts:?}");
    assert!(world.ended.iter().all(|turn| turn.outcome == TurnOutcome::Completed));
    assert!(world.size() < 10_000, "{}", world.size());
}

#[test]
fn failing_summary_is_retried_and_cancel_ends_it() {
    let mut world = long(10, 10_000);
    world.send();
    settle(&mut world);
    world.result(failed(FailureClass::Overloaded));
    assert!(matches!(
        world.task.step.as_ref().map(|step| &step.state),
        Some(StepState::Backoff { .. })
    ));
    world.elapse(20);
    let decision = world.decide(Event::Wake);
    assert!(
        matches!(decision.effects.as_slice(), [Effect::Compact(step)] if step.attempt == 2),
        "{decision:?}"
    );
    world.elapse(3);
    let again = world.decide(Event::Wake);
    assert_eq!(decision.effects, again.effects, "a lost command is sent again");
    world.cancel();
    let decision = world.decide(Event::Wake);
    assert!(matches!(decision.effects.as_slice(), [Effect::CancelModel(..)]), "{decision:?}");
    world.report_stopped();
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Cancelled));
    assert!(world.compacted.is_empty());
}

#[test]
fn suspended_summary_is_requested_again_after_resume() {
    let mut world = long(10, 10_000);
    world.send();
    settle(&mut world);
    world.task.suspend = true;
    world.decide(Event::Wake);
    world.report_stopped();
    assert_eq!((world.task.phase, world.task.next_wake), (Phase::Suspended, None));
    world.task.suspend = false;
    let decision = settle(&mut world);
    assert!(matches!(decision.effects.as_slice(), [Effect::Compact(_)]), "{decision:?}");
}

#[test]
fn rewind_before_cut_restores_original_messages() {
    let mut world = long(10, 10_000);
    world.send();
    settle(&mut world);
    world.result(text(SUMMARY));
    answer(&mut world, 10);
    let end = through(&world);
    assert!(world.rewind(end + 2));
    world.decide(Event::Wake);
    assert_eq!(through(&world), end, "what was summed up is still before");
    assert!(world.rewind(3));
    world.decide(Event::Wake);
    assert_eq!(
        (through(&world), world.task.context.through, world.visible_messages().len()),
        (0, 0, 2)
    );
}

#[test]
fn summary_arriving_after_rewind_is_discarded() {
    let mut world = long(10, 10_000);
    world.send();
    settle(&mut world);
    assert!(matches!(stage(&world), Some(Stage::Compact { .. })));
    assert!(world.rewind(3));
    let decision = world.result(text(SUMMARY));
    assert_eq!((decision.compacted, decision.rewound), (None, Some(3)));
    assert_eq!((world.compacted.len(), world.visible_messages().len()), (0, 2));
}

#[test]
fn early_compaction_is_not_repeated_at_once() {
    for compact_at in [1, 10, 20, 40, 60] {
        let mut world = long(10, 20_000);
        world.task.context.compact_at = compact_at;
        let mut summaries = 0;
        for _ in 0..20 {
            world.send();
            settle(&mut world);
            if matches!(stage(&world), Some(Stage::Compact { .. })) {
                world.result(text(SUMMARY));
                summaries += 1;
                let last = world.compacted.last().expect("it is taken");
                assert!(
                    last.summary,
                    "nothing is left out that was just summed up ({compact_at} %)"
                );
            }
            answer(&mut world, 100);
        }
        assert!(world.compacted.iter().all(|compacted| compacted.summary), "{compact_at} %");
        assert!(
            compact_at < 10 || summaries < 10,
            "{summaries} summaries of 20 answers at {compact_at} %"
        );
    }
}

#[test]
fn large_prompt_does_not_cause_summary_before_every_call() {
    for base in [0, 5_000, 8_500, 9_000, 10_000, 20_000] {
        let mut world = long(1, 1_000);
        (world.task.context.input_limit, world.task.context.base, world.task.context.scale) =
            (10_000, base, 1_000);
        let mut summaries = 0;
        for _ in 0..40 {
            world.send();
            settle(&mut world);
            while matches!(stage(&world), Some(Stage::Compact { .. })) {
                world.result(text(SUMMARY));
                summaries += 1;
            }
            answer(&mut world, 20);
        }
        assert!(
            summaries <= 20,
            "{summaries} summaries of 40 answers, with {base} tokens that are always sent"
        );
    }
}

#[test]
fn smaller_model_continues_the_same_conversation() {
    let mut world = long(10, 1_000_000);
    world.send();
    settle(&mut world);
    answer(&mut world, 2_000);
    world.task.context.input_limit = 4_000;
    world.send();
    settle(&mut world);
    assert!(matches!(stage(&world), Some(Stage::Compact { .. })));
    world.result(text(SUMMARY));
    assert!(!world.task.context.is_full(world.size()), "{}", world.size());
    answer(&mut world, 10);
    assert_eq!(world.ended.last().map(|turn| turn.outcome), Some(TurnOutcome::Completed));
}
