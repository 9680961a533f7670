//! Random numbers are an execution's own, and stay the same as often as it is run again.

use std::collections::HashSet;

use super::*;

/// Draws before a call that a person must decide about, and after it.
const SCRIPT: &str = "
    const draw = () => print([Math.random(), crypto.randomUUID(), ...crypto.getRandomValues(new Uint32Array(2))].join('\\n'));
    draw();
    create_file('secrets/key', crypto.randomUUID());
    draw();";

/// Both scripts of an execution until they wait, then to their end, and once more from its journal.
/// Gives what they drew.
async fn drawn(world: &mut World) -> Vec<String> {
    let mut parked = world.parks().await;
    let asked = parked.calls.remove(0);
    let before = parked.results.remove(0).output;
    assert_eq!(before.lines().count(), 4, "{before}");
    world.decide(&asked, true, "");
    // The second script waits, too.
    let parked = world.parks().await;
    assert!(
        parked.results[0].output.starts_with(&before),
        "it goes on with other numbers than it began with"
    );
    world.decide(&parked.calls[0], true, "");
    let results = world.completes().await;
    assert!(
        results[0].output.starts_with(&before)
            && results[1].output.starts_with(&parked.results[1].output)
    );
    let written = world.file("secrets/key").expect("it was made");
    std::fs::remove_file(world.path("secrets/key")).expect("removed");
    assert_eq!(world.completes().await, results, "run again, they draw the same");
    assert_eq!(world.file("secrets/key"), None, "and are answered from the journal");
    let lines = results.iter().flat_map(|result| result.output.lines().map(str::to_owned));
    lines.chain([written]).collect()
}

#[tokio::test]
async fn random_numbers_differ_between_executions_and_scripts_and_are_the_same_when_one_is_run_again()
 {
    let mut world = World::new(&[SCRIPT, SCRIPT]).await;
    let mut all = drawn(&mut world).await;
    // The same scripts of another step, in the same process.
    world.command = CodeExecute {
        agent_policy: world.command.agent_policy.clone(),
        ..command(world.folder.path(), &[SCRIPT, SCRIPT])
    };
    world.deliveries = 0;
    all.extend(drawn(&mut world).await);
    assert_eq!(all.len(), 2 * (2 * 8 + 1));
    let different: HashSet<&String> = all.iter().collect();
    assert_eq!(different.len(), all.len(), "{all:?}");
}
