//! Scripts whose interpreter is killed repeatedly with `kill -9`: they continue each time, repeat
//! nothing, and see the same values each time. The times come from a seed, which is printed:
//! `CONSTRUCT_SEED=… ./dev test -E 'test(durable::)'` repeats them, as far as the machine allows.
//! `CONSTRUCT_TRIALS` is the total number of kills; `./dev chaos kills` does a thousand.
//!
//! More trials, within one process, are the interpreter's own tests: `./dev chaos scripts`.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{Ipv4Addr, SocketAddr},
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, extract::Path, routing::post};
use construct_proto::v1::{TaskPhase, TurnOutcome};
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT},
    mesh::{Mesh, Service},
    random::{self, Random},
    wait::until,
};
use serde::Deserialize;
use serde_json::json;

/// The side effects of a script.
const EFFECTS: u32 = 60;
/// The maximal number of kills while the same scripts run: fewer than the limit at which a script
/// counts as killing its interpreter.
const KILLS: u64 = 10;
/// Kills for each of the two shapes when `CONSTRUCT_TRIALS` is not set.
const TRIALS: u64 = 3;
/// Concurrent scripts: one kill interrupts all of them.
const JOBS: usize = 4;

/// Each effect writes what the script knows, so that a replay with other values would be detected.
const PRELUDE: &str = r"
const job = pwd().split('/').pop();
const notes = {}, unknown = [], twice = [], order = [];
const note = n => notes[n] = [n, Math.random(), Date.now(), `(${order})`].join(' ');
const command = n => `sleep 0.0${n % 5}; echo '${note(n)}' >> effects.log; sleep 0.0${n % 3}`;
const perform = (n, tools) => {
    if (n % 3 === 0) return tools.execute_command(command(n));
    if (n % 3 === 1) return tools.create_file(`made/${n}`, note(n));
    return tools.fetch(`SERVER/${job}`, { method: 'POST', body: note(n) });
};
const done = (n, result) => {
    if (result.status === 'overwritten') twice.push(n);
    order.push(n);
};
const missed = (n, error) => {
    if (error.name !== 'OutcomeUnknown') throw error;
    unknown.push(n);
    order.push(-n);
};
";

const SEQUENTIAL: &str = r"
for (let n = 1; n <= 60; n++) {
    try {
        done(n, perform(n, { execute_command, create_file, fetch }));
    } catch (error) {
        missed(n, error);
    }
}
({ notes, unknown, twice })
";

const CONCURRENT: &str = r"
for (let group = 0; group < 12; group++) {
    const numbers = [1, 2, 3, 4, 5].map(i => group * 5 + i);
    await Promise.all(numbers.map(n => perform(n, tools).then(result => done(n, result), error => missed(n, error))));
}
({ notes, unknown, twice })
";

/// The script's result.
#[derive(Debug, Deserialize)]
struct Account {
    notes: BTreeMap<u32, String>,
    unknown: BTreeSet<u32>,
    /// Files that existed before they were created.
    twice: BTreeSet<u32>,
}

/// The bodies of requests, by job.
type Requests = Arc<Mutex<BTreeMap<String, Vec<String>>>>;

/// A server that is not killed, and records each request. It takes some time before and after.
async fn server() -> (SocketAddr, Requests) {
    let requests = Requests::default();
    let noted = Arc::clone(&requests);
    let note = async move |Path(job): Path<String>, body: String| {
        let pause = Duration::from_millis(u64::try_from(body.len() % 4).unwrap() * 10);
        tokio::time::sleep(pause).await;
        noted.lock().unwrap().entry(job).or_default().push(body);
        tokio::time::sleep(pause).await;
    };
    let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().route("/{job}", post(note));
    tokio::spawn(async move { axum::serve(listener, router).await });
    (address, requests)
}

/// One script.
struct Job {
    name: String,
    folder: PathBuf,
    conversation: Conversation,
    requests: Requests,
}

impl Job {
    /// The output of its effects, in no order.
    fn effects(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.folder.join("effects.log")).unwrap_or_default();
        let files = std::fs::read_dir(self.folder.join("made")).into_iter().flatten().flatten();
        // A file has another name until it is complete.
        let files = files.filter(|file| {
            file.file_name().to_str().is_some_and(|name| name.parse::<u32>().is_ok())
        });
        let files = files.map(|file| std::fs::read_to_string(file.path()).unwrap());
        let requests = self.requests.lock().unwrap().get(&self.name).cloned().unwrap_or_default();
        log.lines().map(str::to_owned).chain(files).chain(requests).collect()
    }

    async fn is_over(&self) -> bool {
        let Ok(task) = self.conversation.task().await else { return false };
        let status = task.status.unwrap_or_default();
        // Also before its message is processed.
        status.phase() == TaskPhase::AwaitInput && status.queued_count == 0
    }

    /// Waits until there is one more effect; false when the script is over before. A process that
    /// gets no further than the previous one would count as one that the script has killed.
    async fn makes_progress(&self, before: usize) -> bool {
        until("a script to continue", TURN_TIMEOUT, async || {
            if self.effects().len() > before {
                return Ok(true);
            }
            if self.is_over().await { Ok(false) } else { Err((&self.name, before)) }
        })
        .await
    }

    /// Compares what happened with the script's account; returns the number of effects and of
    /// unknown outcomes.
    async fn check(&self, kills: u64, at_once: u64) -> (u64, u64) {
        let status = self.conversation.wait_until_idle().await.status.unwrap();
        let transcript = self.conversation.transcript().await;
        transcript.check(&["go"]);
        assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{}", transcript.show());
        let result = transcript.result();
        assert_eq!(result.error, "", "{}", transcript.show());
        let account: Account = serde_json::from_str(&result.output).unwrap();

        let effects = self.effects();
        let mut times = BTreeMap::new();
        for effect in &effects {
            let number: u32 = effect.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(
                effect, &account.notes[&number],
                "another run of the script knew something else"
            );
            *times.entry(number).or_insert(0) += 1;
        }
        let twice: Vec<_> = times.iter().filter(|(_, times)| **times > 1).collect();
        assert!(twice.is_empty(), "effects happened more than once: {twice:?}");
        assert!(account.twice.is_empty(), "files were made more than once: {account:?}");
        let missing: Vec<u32> = (1..=EFFECTS)
            .filter(|n| !times.contains_key(n) && !account.unknown.contains(n))
            .collect();
        assert!(
            missing.is_empty(),
            "effects did not happen, and nothing was said: {missing:?}; {account:?}"
        );
        let unknown = account.unknown.len() as u64;
        assert!(unknown <= kills * at_once, "{kills} kills interrupted {unknown} calls");
        (effects.len() as u64, unknown)
    }
}

/// Kills the interpreter at most so often while the jobs run. Returns the number of kills and of
/// interrupted scripts.
async fn kill(mesh: &mut Mesh, jobs: &[Job], most: u64, random: &mut Random) -> (u64, u64) {
    let (mut kills, mut interrupted) = (0, 0);
    let mut seen = vec![0; jobs.len()];
    while kills < most {
        let mut running = 0;
        for (job, seen) in jobs.iter().zip(&seen) {
            running += u64::from(job.makes_progress(*seen).await);
        }
        if running == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_micros(random.next_below(120_000))).await;
        seen = jobs.iter().map(|job| job.effects().len()).collect();
        mesh.crash(Service::Interpreter).await.unwrap();
        kills += 1;
        interrupted += running;
    }
    (kills, interrupted)
}

/// `at_once` effects of a script can run concurrently.
async fn survives_kills(script: &str, at_once: u64) {
    let mut random = Random::new(random::seed());
    let wanted = random::from_env("CONSTRUCT_TRIALS").map_or(TRIALS, |trials| trials.div_ceil(2));
    let (address, requests) = server().await;
    let mut mesh = Mesh::start_with(&[
        ("CONSTRUCT_INTERPRETER_FETCH_HOSTS", "127.0.0.1"),
        ("CONSTRUCT_INTERPRETER_FETCH_PRIVATE_ADDRESSES", "127.0.0.1"),
    ])
    .await
    .unwrap();
    let code = format!("{PRELUDE}{script}").replace("SERVER", &format!("http://{address}"));
    mesh.scripted_agent("worker", &json!({"turns": [{"code": [code]}, {"text": "done"}]}))
        .await
        .unwrap();
    let (mut kills, mut scripts, mut interrupted, mut effects, mut unknown) = (0, 0, 0, 0, 0);
    while kills < wanted {
        let mut jobs = Vec::new();
        for _ in 0..JOBS {
            let name = format!("job-{scripts}");
            scripts += 1;
            let folder = mesh.folder(&name).unwrap();
            let conversation =
                mesh.client().unwrap().create_task("worker", Some(&folder)).await.unwrap();
            conversation.submit("go").await;
            jobs.push(Job { name, folder, conversation, requests: Arc::clone(&requests) });
        }
        let (killed, met) = kill(&mut mesh, &jobs, KILLS.min(wanted - kills), &mut random).await;
        assert!(killed > 0, "the scripts are over too soon");
        for job in &jobs {
            let (happened, untold) = job.check(killed, at_once).await;
            effects += happened;
            unknown += untold;
        }
        kills += killed;
        interrupted += met;
        println!(
            "{kills} kills, {scripts} scripts interrupted {interrupted} times, {effects} effects, {unknown} calls of unknown outcome"
        );
    }
}

#[tokio::test]
async fn repeatedly_killed_scripts_repeat_nothing() {
    survives_kills(SEQUENTIAL, 1).await;
}

#[tokio::test]
async fn repeatedly_killed_concurrent_scripts_repeat_nothing() {
    survives_kills(CONCURRENT, 5).await;
}
