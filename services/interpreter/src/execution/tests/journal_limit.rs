//! The limit of journaled results.

use super::*;

/// Three results fit, with the little else there is.
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
async fn journal_limit_counts_the_same_on_resume() {
    let mut world = World::new(&[SCRIPT]).await;
    std::fs::write(world.path("large"), "x".repeat(30_000)).expect("written");
    let overrides = Overrides { journal_bytes: Some(91_000), ..Overrides::default() };
    let pools = compute::STANDARD.map(str::to_owned);
    world.executor.tiers = Tiers::new(&pools, &overrides, &BTreeMap::new()).expect("valid limits");
    // Resumed from the journal, which holds the earlier results.
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    world.decide(&request, true, "");
    let results = world.run_to_completion().await;
    let (before, after): (Vec<u32>, Vec<serde_json::Value>) =
        serde_json::from_str(&results[0].output)
            .unwrap_or_else(|error| panic!("{error}: {results:?}"));
    assert_eq!(before, [30_000; 3]);
    let after: Vec<_> = after.iter().map(|error| error.as_str().expect("an error")).collect();
    assert!(
        after[0].starts_with(
            "JournalLimitExceeded: read_file was called, but its result of 30002 bytes"
        ),
        "{after:?}"
    );
    assert!(after[9].starts_with("JournalLimitExceeded: read_file was not called"), "{after:?}");
    assert_eq!((after[10], world.file("late")), ("JournalLimitExceeded", None));
    // A further run gets every answer from the journal.
    assert_eq!(world.run_to_completion().await, results);
}
