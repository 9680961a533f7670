//! One script whose interpreter is killed, `kill -9`, again and again: it is gone on with each time, repeats nothing, and knows the
//! same each time. The moments come from a seed, which is printed: `CONSTRUCT_SEED=… ./dev test -E 'test(durable::)'` chooses the same again,
//! as far as the machine lets it.
//!
//! Many more trials, within one process, are the interpreter's own tests: `./dev chaos scripts`.

use std::collections::{BTreeMap, BTreeSet};

use construct_proto::v1::{TaskPhase, TurnOutcome};
use construct_tests::{
    client::{Conversation, PATIENCE},
    mesh::{Mesh, Service},
    random::{self, Random},
    wait::until,
};
use serde::Deserialize;
use serde_json::json;

/// Side effects of the script.
const EFFECTS: u32 = 50;
/// How often its interpreter is killed.
const KILLS: u32 = 10;

/// Each effect says with it what the script knows, so that a run that knew something else would be seen.
const PRELUDE: &str = r"
const notes = {}, unknown = [], order = [];
const note = n => notes[n] = [n, Math.random(), Date.now(), `(${order})`].join(' ');
const command = n => `sleep 0.0${n % 5}; echo '${note(n)}' >> effects.log; sleep 0.0${n % 3}`;
const missed = (n, error) => {
    if (error.name !== 'OutcomeUnknown') throw error;
    unknown.push(n);
    order.push(-n);
};
";

const SEQUENTIAL: &str = r"
for (let n = 1; n <= 50; n++) {
    try {
        execute_command(command(n));
        order.push(n);
    } catch (error) {
        missed(n, error);
    }
}
({ notes, unknown })
";

const CONCURRENT: &str = r"
for (let group = 0; group < 10; group++) {
    const numbers = [1, 2, 3, 4, 5].map(i => group * 5 + i);
    await Promise.all(numbers.map(n =>
        tools.execute_command(command(n)).then(() => order.push(n), error => missed(n, error))));
}
({ notes, unknown })
";

/// The script's value.
#[derive(Debug, Deserialize)]
struct Account {
    notes: BTreeMap<u32, String>,
    unknown: BTreeSet<u32>,
}

/// What the effects have written.
fn effects(mesh: &Mesh) -> Vec<String> {
    let text = std::fs::read_to_string(mesh.workspace().join("effects.log")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Waits until there are so many effects; false when the script is over before.
async fn has_effects(mesh: &Mesh, conversation: &Conversation, wanted: usize) -> bool {
    until("the script to go on", PATIENCE, async || {
        let seen = effects(mesh).len();
        if seen >= wanted {
            return Ok(true);
        }
        match conversation.task().await.map(|task| task.status.unwrap_or_default().phase()) {
            Ok(TaskPhase::AwaitInput) => Ok(false),
            _ => Err((seen, wanted)),
        }
    })
    .await
}

/// `at_once` effects can be under way.
async fn survives(script: &str, at_once: usize) {
    let mut random = Random::new(random::seed());
    let mut mesh = Mesh::start().await.unwrap();
    let code = format!("{PRELUDE}{script}");
    mesh.scripted_agent("worker", &json!({"turns": [{"code": [code]}, {"text": "done"}]})).await.unwrap();
    let conversation = mesh.client().unwrap().begin("worker", Some(mesh.workspace())).await.unwrap();
    conversation.say("go").await;
    conversation.in_phase(TaskPhase::ExecuteTools).await;
    let mut kills = 0;
    while kills < KILLS {
        // A process that gets no further than the one before it would count as one that the script has killed.
        let further = 1 + random.below(6) as usize;
        if !has_effects(&mesh, &conversation, effects(&mesh).len() + further).await {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_micros(random.below(60_000))).await;
        mesh.crash(Service::Interpreter).await.unwrap();
        kills += 1;
    }
    let status = conversation.settled().await.status.unwrap();
    let transcript = conversation.transcript().await;
    transcript.check(&["go"]);
    assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{}", transcript.show());
    let result = transcript.result();
    assert_eq!(result.error, "", "{}", transcript.show());
    let account: Account = serde_json::from_str(&result.output).unwrap();

    let effects = effects(&mesh);
    let mut times = BTreeMap::new();
    for effect in &effects {
        let number: u32 = effect.split(' ').next().unwrap().parse().unwrap();
        assert_eq!(effect, &account.notes[&number], "another run of the script knew something else");
        *times.entry(number).or_insert(0) += 1;
    }
    let twice: Vec<_> = times.iter().filter(|(_, times)| **times > 1).collect();
    assert!(twice.is_empty(), "effects happened more than once: {twice:?}");
    let missing: Vec<u32> = (1..=EFFECTS).filter(|n| !times.contains_key(n) && !account.unknown.contains(n)).collect();
    assert!(missing.is_empty(), "effects did not happen, and nothing was said: {missing:?}; {account:?}");
    let unknown = account.unknown.len();
    println!("{kills} kills, {} effects, {unknown} calls of unknown outcome", effects.len());
    assert!(unknown <= kills as usize * at_once, "{kills} kills interrupted {unknown} calls");
    assert!(kills >= KILLS / 2, "the script is over too soon: {kills} kills");
}

#[tokio::test]
async fn a_script_is_killed_ten_times_and_repeats_nothing() {
    survives(SEQUENTIAL, 1).await;
}

#[tokio::test]
async fn a_script_with_concurrent_calls_is_killed_again_and_again_and_repeats_nothing() {
    survives(CONCURRENT, 5).await;
}
