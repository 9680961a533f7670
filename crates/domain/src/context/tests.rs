use proptest::prelude::*;
use uuid::Uuid;

use super::*;

fn entry(position: i64, source: Source, results: bool, tokens: i64) -> OutlineEntry {
    let message = MessageId::from_uuid(Uuid::from_u128(position.unsigned_abs().into()));
    OutlineEntry { message, position, source, results, tokens }
}

/// Exchanges of a question, the given number of scripts with their results, and an answer.
fn outline(exchanges: &[usize], tokens: i64) -> Outline {
    let mut shown = Vec::new();
    let mut add =
        |source, results| shown.push(entry(shown.len() as i64 + 1, source, results, tokens));
    for scripts in exchanges {
        add(Source::User, false);
        for _ in 0..*scripts {
            add(Source::Assistant, false);
            add(Source::System, true);
        }
        add(Source::Assistant, false);
    }
    Outline { summary: 0, shown }
}

fn context(room: i64) -> Context {
    Context { input_limit: room, scale: 1_000, ..Context::default() }
}

#[test]
fn estimate_is_calibrated_by_vendor_counts() {
    let mut context = Context { base: 1_000, transcript: 9_000, ..context(100_000) };
    context.scale = INITIAL_SCALE;
    assert_eq!(context.tokens_needed(0), 5_000);
    context.counted = Some(3_000);
    context.calibrate();
    assert_eq!((context.tokens_needed(0), context.tokens_needed(10_000)), (3_000, 6_000));
    context.counted = Some(0);
    context.calibrate();
    assert_eq!(context.tokens_needed(0), 3_000, "a vendor that counts nothing says nothing");
    context.input_limit = 2_000;
    context.calibrate_too_long();
    assert_eq!(context.tokens_needed(0), 3_000, "it was above the room already");
    context.input_limit = 6_000;
    context.calibrate_too_long();
    assert_eq!(context.tokens_needed(0), 6_000);
}

#[test]
fn conversation_is_full_at_the_agents_fill_level() {
    let mut context = context(1_000);
    assert!(!context.is_full(799) && context.is_full(800));
    context.compact_at = 50;
    assert!(!context.is_full(499) && context.is_full(500));
    // The conversation must fill twice what is kept of the rest.
    for (base, compact_at, full) in
        [(100, 80, 800), (700, 80, 880), (900, 80, 960), (700, 50, 850), (100, 20, 280)]
    {
        (context.base, context.compact_at) = (base, compact_at);
        assert!(!context.is_full(full - 1) && context.is_full(full), "{base} {compact_at}");
    }
    context.base = 1_000;
    assert!(!context.is_full(2_000), "a summary would not help");
    (context.base, context.input_limit) = (0, 0);
    assert!(!context.is_full(i64::MAX), "nothing is known of the model");
    assert_eq!(
        (Context::input_limit_for(200_000, 8_000), Context::input_limit_for(8_000, 8_000)),
        (192_000, 4_000)
    );
}

#[test]
fn drop_without_summary_removes_whole_exchanges() {
    let outline = outline(&[2, 2, 2, 2], 100);
    let answered = outline.shown[18].message;
    let context = context(2_400);
    let summed = context.find_cut(&outline, answered, KeepPolicy::Summary).expect("a cut");
    assert_eq!(
        (summed.through, summed.kept.as_slice()),
        (17, [1].as_slice()),
        "720 tokens are kept, in whole pairs"
    );
    let dropped = context.find_cut(&outline, answered, KeepPolicy::Newest).expect("a cut");
    assert_eq!((dropped.through, dropped.messages, dropped.replaced), (12, 11, 1_100));
}

#[test]
fn cut_of_a_long_turn_keeps_question_and_newest_scripts() {
    let outline = outline(&[10], 100);
    let answered = outline.shown[0].message;
    let cut = context(1_000).find_cut(&outline, answered, KeepPolicy::Newest).expect("a cut");
    assert_eq!((cut.through, cut.kept.as_slice()), (17, [1].as_slice()));
}

#[test]
fn no_cut_when_nothing_can_be_removed() {
    let outline = outline(&[0], 1_000_000);
    let answered = outline.shown[0].message;
    assert_eq!(context(1_000).find_cut(&outline, answered, KeepPolicy::Least), None);
}

proptest! {
    /// At any cut, scripts and their results stay together, the question stays, something is
    /// removed, and some of the newest messages stay.
    #[test]
    fn cut_keeps_scripts_with_their_results(
        exchanges in prop::collection::vec(0..6_usize, 1..8),
        tokens in 1..5_000_i64,
        room in 1..100_000_i64,
        through in 0..10_i64,
        which in 0..3_usize,
    ) {
        let mut outline = outline(&exchanges, tokens);
        let last = outline.shown.iter().rev().find(|entry| entry.source == Source::User).expect("a question").message;
        outline.shown.retain(|entry| entry.position > through || entry.position == 1);
        outline.summary = if through > 0 { 50 } else { 0 };
        if outline.shown.get(1).is_some_and(|entry| entry.results) { outline.shown.remove(1); }
        let context = Context { through, ..context(room) };
        let keep = [KeepPolicy::Summary, KeepPolicy::Newest, KeepPolicy::Least][which];
        if let Some(cut) = context.find_cut(&outline, last, keep) {
            prop_assert!(cut.through > through);
            prop_assert!(cut.replaced > 0 && cut.messages > 0);
            let stays = |entry: &&OutlineEntry| entry.position > cut.through || cut.kept.contains(&entry.position);
            let tail: Vec<&OutlineEntry> = outline.shown.iter().filter(|entry| entry.position > cut.through).collect();
            prop_assert!(!tail.is_empty() && !tail[0].results);
            let shown = |message| outline.shown.iter().any(|entry| entry.message == message);
            prop_assert!(!shown(last) || outline.shown.iter().filter(stays).any(|entry| entry.message == last));
        }
    }
}
