//! How much is journaled of what calls have given.

use super::*;

/// Three results fit, and what little else there is.
const SCRIPT: &str = "
    const reads = count => Array.from({ length: count }, () => {
        try { return read_file('large').length } catch (error) { return `${error.name}: ${error.message}` }
    });
    const before = reads(3);
    create_file('secrets/key', 'k');
    const after = reads(10);
    try { create_file('late', '') } catch (error) { after.push(error.name) }
    JSON.stringify([before, after])";

#[tokio::test]
async fn the_results_of_an_execution_are_bounded_together_and_counted_the_same_when_it_is_gone_on_with()
 {
    let mut world = World::new(&[SCRIPT]).await;
    std::fs::write(world.path("large"), "x".repeat(30_000)).expect("written");
    let overrides = Overrides { journal_bytes: Some(91_000), ..Overrides::default() };
    let pools = compute::STANDARD.map(str::to_owned);
    world.executor.tiers = Tiers::new(&pools, &overrides, &BTreeMap::new()).expect("sound");
    // Gone on with from the journal, which holds what was read before.
    let asked = world.parks().await.calls.remove(0);
    world.decide(&asked, true, "");
    let results = world.completes().await;
    let (before, after): (Vec<u32>, Vec<serde_json::Value>) =
        serde_json::from_str(&results[0].output)
            .unwrap_or_else(|error| panic!("{error}: {results:?}"));
    assert_eq!(before, [30_000; 3]);
    let after: Vec<_> = after.iter().map(|said| said.as_str().expect("an error")).collect();
    assert!(
        after[0]
            .starts_with("JournalLimitExceeded: read_file was made, but its result of 30002 bytes"),
        "{after:?}"
    );
    assert!(after[9].starts_with("JournalLimitExceeded: read_file was not made"), "{after:?}");
    assert_eq!((after[10], world.file("late")), ("JournalLimitExceeded", None));
    // Run once more, every answer is from the journal.
    assert_eq!(world.completes().await, results);
}
