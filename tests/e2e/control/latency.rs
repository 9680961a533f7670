//! How soon a cancel or suspend takes effect in every phase: the script and its processes are dead,
//! and the vendor's connection is closed.
//!
//! The tests try each case once and check that it ends. `CONSTRUCT_TRIALS=30` measures: it prints
//! the figures and compares their median with the promise. The figures are those of a debug build,
//! and up to 20 ms too long, which is the poll interval.

use std::time::{Duration, Instant};

use construct_proto::v1::{self, PolicyAction, TaskPhase, TurnOutcome};
use construct_tests::{
    client::{Client, Conversation, TURN_TIMEOUT, wait_for_file},
    mesh::{Mesh, Service},
    transcript::status,
    vendor::{VendorServer, openai},
    wait::{POLL_INTERVAL, until},
};
use serde_json::json;

use crate::{is_running, wait_for_process_end};

/// The limit in half of the trials.
const MEDIAN_LIMIT: Duration = Duration::from_millis(200);
/// The limit in all trials. Generous for a busy machine; shorter than the grace period of a worker
/// that does not answer.
const MAX_LIMIT: Duration = Duration::from_secs(5);

/// The state in which a task is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Location {
    BeforeTheFirstWord,
    Speaking,
    Computing,
    InACall,
    AwaitingApproval,
    BetweenTries,
}

impl Location {
    const ALL: [Self; 6] = [
        Self::BeforeTheFirstWord,
        Self::Speaking,
        Self::Computing,
        Self::InACall,
        Self::AwaitingApproval,
        Self::BetweenTries,
    ];
}

struct Bench<'a> {
    mesh: &'a Mesh,
    client: Client,
    vendor: VendorServer,
}

/// The metric of an interpreter that runs no script.
const NO_SCRIPT: &str = "construct_interpreter_running 0";

/// A task in its state, and the evidence that it has stopped.
struct RunningTask {
    conversation: Conversation,
    process: Option<String>,
    /// Whether a script runs.
    script: bool,
}

impl<'a> Bench<'a> {
    async fn prepare(mesh: &'a Mesh) -> Self {
        let vendor = VendorServer::start().await;
        let provider = v1::ModelProviderSpec {
            name: "vendor".to_owned(),
            r#type: v1::ModelProviderType::Openai.into(),
            base_url: format!("{}/v1", vendor.url()),
            api_key: "sk-test".to_owned(),
            ..v1::ModelProviderSpec::default()
        };
        mesh.agent("vendor", provider).await.unwrap();
        let limited = json!({"class": "rate_limited", "retry_after_ms": 120_000, "times": 0});
        let script = json!({"conversations": [
            {"match": "compute", "turns": [{"code": "execute_command('touch begun'); for (;;) {}"}]},
            {"match": "call", "turns": [
                {"code": "const mark = read_file('mark').trim(); execute_command(`touch begun; sleep ${mark}`)"},
            ]},
            {"match": "approval", "turns": [{"code": "create_file('asked.txt', '')"}]},
            {"match": "tries", "turns": [{"text": "late", "fault": limited}]},
        ]});
        mesh.scripted_agent("scripted", &script).await.unwrap();
        Self { mesh, client: mesh.client().unwrap(), vendor }
    }

    async fn start_at(&self, place: Location, name: &str) -> RunningTask {
        let folder = self.mesh.folder(name).unwrap();
        let agent = match place {
            Location::BeforeTheFirstWord | Location::Speaking => "vendor",
            _ => "scripted",
        };
        let ask = v1::PolicyRule {
            action: PolicyAction::Ask.into(),
            tools: vec!["create_file".to_owned()],
            ..v1::PolicyRule::default()
        };
        let spec = v1::TaskSpec {
            agent: agent.to_owned(),
            workspace: folder.display().to_string(),
            title: "Control".to_owned(),
            policy: vec![ask],
            ..v1::TaskSpec::default()
        };
        let conversation = self.client.create_task_with(spec).await.unwrap();
        let mut process = None;
        match place {
            Location::BeforeTheFirstWord | Location::Speaking => {
                let wire = openai::Answer::text("A long answer that never comes to its end.");
                let whole = wire.wire().len();
                let length = if place == Location::Speaking { whole * 2 / 3 } else { 0 };
                self.vendor.reply(wire.reply().silent_after(length));
                let recorder = conversation.record();
                conversation.submit("speak").await;
                if place == Location::Speaking {
                    recorder.wait_for_count("message.delta", 1).await;
                }
                until("the vendor to be called", TURN_TIMEOUT, async || {
                    match self.vendor.open_answers() {
                        1 => Ok(()),
                        other => Err(other),
                    }
                })
                .await;
            }
            Location::Computing => {
                conversation.submit("compute").await;
                wait_for_file(&folder.join("begun"), |_| true).await;
            }
            Location::InACall => {
                let mark = format!("403.{}{}", std::process::id(), name.len());
                std::fs::write(folder.join("mark"), &mark).unwrap();
                conversation.submit("call").await;
                wait_for_file(&folder.join("begun"), |_| true).await;
                process = Some(format!("sleep {mark}"));
            }
            Location::AwaitingApproval => {
                conversation.submit("approval").await;
                conversation.wait_for_phase(TaskPhase::AwaitApproval).await;
            }
            Location::BetweenTries => {
                conversation.submit("tries").await;
                until("the task to pause", TURN_TIMEOUT, async || {
                    let why = conversation.explain().await.map_err(|status| status.to_string())?;
                    if why.waiting_for.contains("the next attempt at") {
                        Ok(())
                    } else {
                        Err(why.waiting_for)
                    }
                })
                .await;
            }
        }
        if let Some(process) = &process {
            assert!(is_running(process), "{place:?}");
        }
        let script = matches!(place, Location::Computing | Location::InACall);
        if script {
            self.mesh
                .wait_for_metric(Service::Interpreter, "construct_interpreter_running 1")
                .await;
        }
        RunningTask { conversation, process, script }
    }

    /// The time from the request until everything has stopped.
    async fn stop(&self, found: &RunningTask, suspend: bool) -> Duration {
        let began = Instant::now();
        let wanted = if suspend {
            found.conversation.suspend().await;
            TaskPhase::Suspended
        } else {
            found.conversation.cancel("it was a test").await;
            TaskPhase::AwaitInput
        };
        found
            .conversation
            .wait_for_task("to have stopped", |_, status| {
                // A script that was told to stop is still running while its result is missing.
                status.phase() == wanted && (suspend || status.turns_used == 0)
            })
            .await;
        until("the vendor's connection to close", TURN_TIMEOUT, async || {
            match self.vendor.open_answers() {
                0 => Ok(()),
                other => Err(other),
            }
        })
        .await;
        if let Some(process) = &found.process {
            wait_for_process_end(process).await;
        }
        // Regardless of the row: the script itself is over, and its resources are free.
        if found.script {
            self.mesh.wait_for_metric(Service::Interpreter, NO_SCRIPT).await;
        }
        began.elapsed()
    }
}

#[tokio::test]
async fn cancel_and_suspend_take_effect_at_once_in_every_phase() {
    let trials: usize =
        std::env::var("CONSTRUCT_TRIALS").ok().and_then(|trials| trials.parse().ok()).unwrap_or(1);
    // A median needs several trials, and a wall-clock promise an idle machine.
    let promise = if trials >= 10 { MEDIAN_LIMIT } else { MAX_LIMIT };
    let mut mesh = Mesh::start().await.unwrap();
    {
        let bench = Bench::prepare(&mesh).await;
        for place in Location::ALL {
            for suspend in [false, true] {
                let mut times = Vec::new();
                for trial in 0..trials {
                    let found =
                        bench.start_at(place, &format!("{place:?}-{suspend}-{trial}")).await;
                    times.push(bench.stop(&found, suspend).await);
                    if !suspend {
                        check_cancelled(&found.conversation).await;
                    }
                }
                times.sort_unstable();
                let at = |share: f64| {
                    times[((times.len() as f64 * share).ceil() as usize).clamp(1, times.len()) - 1]
                };
                let verb = if suspend { "suspend" } else { "cancel" };
                println!(
                    "{verb:8} {place:?}: p50 {:?}, p99 {:?}, {trials} trials",
                    at(0.5),
                    at(0.99)
                );
                assert!(
                    at(0.5) < promise && at(1.0) < MAX_LIMIT,
                    "{verb} {place:?}: {times:?}, checked every {POLL_INTERVAL:?}"
                );
            }
        }
    }

    // Queued: no worker takes the command.
    mesh.stop(Service::Providers).await.unwrap();
    let (client, mut times) = (mesh.client().unwrap(), Vec::new());
    for _ in 0..trials {
        let conversation = client.create_task("scripted", None).await.unwrap();
        conversation.submit("speak").await;
        conversation.wait_for_phase(TaskPhase::InvokeModel).await;
        let began = Instant::now();
        conversation.cancel("it was a test").await;
        conversation.wait_until_idle().await;
        times.push(began.elapsed());
        check_cancelled(&conversation).await;
    }
    times.sort_unstable();
    println!("cancel   Queued: {times:?}");
    assert!(times[(trials - 1) / 2] < promise && times[trials - 1] < MAX_LIMIT, "{times:?}");
}

/// The reason is where people look.
async fn check_cancelled(conversation: &Conversation) {
    let task = conversation.wait_until_idle().await;
    let task_status = task.status.unwrap();
    assert_eq!(task_status.last_outcome(), TurnOutcome::Cancelled);
    let error = task_status.last_error.unwrap();
    assert_eq!(
        (error.code.as_str(), error.message.as_str()),
        ("CANCELLED", "cancelled: it was a test")
    );
    let why = conversation.explain().await.unwrap();
    assert!(why.waiting_for.contains("the last turn was cancelled: it was a test"), "{why:?}");
    let transcript = conversation.transcript().await;
    assert_eq!(
        status(&transcript.messages[0]).error,
        "cancelled: it was a test",
        "{}",
        transcript.show()
    );
}
