use proptest::prelude::*;
use uuid::Uuid;

use super::*;

fn entry(position: i64, source: Source, results: bool, tokens: i64) -> Entry {
    let message = MessageId::from_uuid(Uuid::from_u128(position.unsigned_abs().into()));
    Entry { message, position, source, results, tokens }
}

/// Exchanges of a question, so many scripts with their results, and an answer.
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
    Context { room, scale: 1_000, ..Context::default() }
}

#[test]
fn the_estimate_becomes_what_the_vendor_has_counted() {
    let mut context = Context { base: 1_000, transcript: 9_000, ..context(100_000) };
    context.scale = FIRST_SCALE;
    assert_eq!(context.need(0), 5_000);
    context.counted = Some(3_000);
    context.learn();
    assert_eq!((context.need(0), context.need(10_000)), (3_000, 6_000));
    context.counted = Some(0);
    context.learn();
    assert_eq!(context.need(0), 3_000, "a vendor that counts nothing says nothing");
    context.room = 2_000;
    context.learn_too_long();
    assert_eq!(context.need(0), 3_000, "it was above the room already");
    context.room = 6_000;
    context.learn_too_long();
    assert_eq!(context.need(0), 6_000);
}

#[test]
fn a_conversation_is_full_at_its_agents_share_of_the_room() {
    let mut context = context(1_000);
    assert!(!context.is_full(799) && context.is_full(800));
    context.compact_at = 50;
    assert!(!context.is_full(499) && context.is_full(500));
    // Of what tools and instructions leave it has to fill twice what is kept.
    for (base, compact_at, full) in
        [(100, 80, 800), (700, 80, 880), (900, 80, 960), (700, 50, 850), (100, 20, 280)]
    {
        (context.base, context.compact_at) = (base, compact_at);
        assert!(!context.is_full(full - 1) && context.is_full(full), "{base} {compact_at}");
    }
    context.base = 1_000;
    assert!(!context.is_full(2_000), "a summary would not help");
    (context.base, context.room) = (0, 0);
    assert!(!context.is_full(i64::MAX), "nothing is known of the model");
    assert_eq!(
        (Context::room_of(200_000, 8_000), Context::room_of(8_000, 8_000)),
        (192_000, 4_000)
    );
}

#[test]
fn what_is_left_out_without_a_summary_are_whole_exchanges() {
    let outline = outline(&[2, 2, 2, 2], 100);
    let answered = outline.shown[18].message;
    let context = context(2_400);
    let summed = context.cut(&outline, answered, Keep::Summary).expect("a cut");
    assert_eq!(
        (summed.through, summed.kept.as_slice()),
        (17, [1].as_slice()),
        "720 tokens are kept, in whole pairs"
    );
    let dropped = context.cut(&outline, answered, Keep::Newest).expect("a cut");
    assert_eq!((dropped.through, dropped.messages, dropped.replaced), (12, 11, 1_100));
}

#[test]
fn of_a_single_long_turn_the_question_stays_and_the_newest_scripts_with_their_results() {
    let outline = outline(&[10], 100);
    let answered = outline.shown[0].message;
    let cut = context(1_000).cut(&outline, answered, Keep::Newest).expect("a cut");
    assert_eq!((cut.through, cut.kept.as_slice()), (17, [1].as_slice()));
}

#[test]
fn nothing_is_cut_where_nothing_would_be_left_out() {
    let outline = outline(&[0], 1_000_000);
    let answered = outline.shown[0].message;
    assert_eq!(context(1_000).cut(&outline, answered, Keep::Least), None);
}

proptest! {
    /// Wherever it is cut: scripts and their results stay together, the question stays, something
    /// is left out, and something of the newest stays.
    #[test]
    fn a_cut_parts_no_script_from_its_results(
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
        let keep = [Keep::Summary, Keep::Newest, Keep::Least][which];
        if let Some(cut) = context.cut(&outline, last, keep) {
            prop_assert!(cut.through > through);
            prop_assert!(cut.replaced > 0 && cut.messages > 0);
            let stays = |entry: &&Entry| entry.position > cut.through || cut.kept.contains(&entry.position);
            let tail: Vec<&Entry> = outline.shown.iter().filter(|entry| entry.position > cut.through).collect();
            prop_assert!(!tail.is_empty() && !tail[0].results);
            let shown = |message| outline.shown.iter().any(|entry| entry.message == message);
            prop_assert!(!shown(last) || outline.shown.iter().filter(stays).any(|entry| entry.message == last));
        }
    }
}
