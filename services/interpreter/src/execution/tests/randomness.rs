//! Random numbers are unique to an execution and the same on each replay.

use std::collections::HashSet;

use super::*;

/// Draws before and after a call that needs an approval.
const SCRIPT: &str = "
    const draw = () => print([Math.random(), crypto.randomUUID(), ...crypto.getRandomValues(new Uint32Array(2))].join('\\n'));
    draw();
    create_file('secrets/key', crypto.randomUUID());
    draw();";

/// Runs both scripts of an execution until they wait, then to their end, and once more from the
/// journal. Returns the drawn values.
async fn draw_all(world: &mut World) -> Vec<String> {
    let mut suspended = world.run_until_suspended().await;
    let request = suspended.approval_requests.remove(0);
    let before = suspended.results.remove(0).output;
    assert_eq!(before.lines().count(), 4, "{before}");
    world.decide(&request, true, "");
    // The second script waits, too.
    let suspended = world.run_until_suspended().await;
    assert!(
        suspended.results[0].output.starts_with(&before),
        "the resumed script drew other numbers"
    );
    world.decide(&suspended.approval_requests[0], true, "");
    let results = world.run_to_completion().await;
    assert!(
        results[0].output.starts_with(&before)
            && results[1].output.starts_with(&suspended.results[1].output)
    );
    let written = world.file("secrets/key").expect("the file exists");
    std::fs::remove_file(world.path("secrets/key")).expect("removed");
    assert_eq!(world.run_to_completion().await, results, "a replay draws the same numbers");
    assert_eq!(world.file("secrets/key"), None, "a replay is answered from the journal");
    let lines = results.iter().flat_map(|result| result.output.lines().map(str::to_owned));
    lines.chain([written]).collect()
}

#[tokio::test]
async fn random_numbers_are_unique_and_replay_equal() {
    let mut world = World::new(&[SCRIPT, SCRIPT]).await;
    let mut all = draw_all(&mut world).await;
    // The same scripts of another step, in the same process.
    world.command = CodeExecute {
        agent_policy: world.command.agent_policy.clone(),
        ..command(world.folder.path(), &[SCRIPT, SCRIPT])
    };
    world.deliveries = 0;
    all.extend(draw_all(&mut world).await);
    assert_eq!(all.len(), 2 * (2 * 8 + 1));
    let different: HashSet<&String> = all.iter().collect();
    assert_eq!(different.len(), all.len(), "{all:?}");
}
