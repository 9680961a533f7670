//! Scripts that wait for people: put away, gone on with, and told what was decided.

mod attached;
mod divergence;
mod environment;
mod kept;
mod lacks;
mod large;
mod outages;
mod randomness;
mod redirects;
mod secrets;
mod stopping;
mod storage;
mod subtasks;
mod told;
mod trials;
mod unreadable;

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use construct_bus::testing::NatsServer;
use construct_domain::{OrganizationId, TaskId, compute};
use construct_proto::{
    mesh::v1::{ApprovalDecision, AskedCall, StepRef},
    v1::{CodeInterpreterCall, PolicyAction, PolicyRule},
};
use uuid::Uuid;

use super::*;
use crate::{
    command::{CommandPolicy, CommandSandbox, Confinement},
    sandbox::EngineConfig,
    tiers::{Overrides, Span},
    tools::{Egress, Policy},
};

/// An interpreter without its service around it, and one step that it is given again and again.
struct World {
    /// Ends with the test.
    nats: Arc<NatsServer>,
    folder: tempfile::TempDir,
    executor: Executor,
    command: CodeExecute,
    deliveries: u32,
}

impl World {
    async fn new(scripts: &[&str]) -> Self {
        let sandbox = CommandSandbox::unavailable("a test needs none");
        Self::with(scripts, Policy::default(), Egress::new(&[]).expect("made"), sandbox).await
    }

    /// One in which scripts may run commands and reach this machine.
    async fn granting(scripts: &[&str]) -> Self {
        let egress = Egress::new(&[Ipv4Addr::LOCALHOST.into()]).expect("made");
        Self::with(scripts, granting(), egress, crate::command::tests::sandbox().await).await
    }

    async fn with(
        scripts: &[&str],
        policy: Policy,
        egress: Egress,
        sandbox: CommandSandbox,
    ) -> Self {
        let nats = Arc::new(NatsServer::start().await);
        let folder = folder();
        let executor = executor(nats.bus().await, folder.path(), policy, egress, sandbox);
        let command = CodeExecute {
            agent_policy: vec![PolicyRule {
                action: PolicyAction::Ask.into(),
                tools: vec!["create_file".to_owned()],
                paths: vec!["secrets/**".to_owned()],
                reason: "it is secret".to_owned(),
                ..PolicyRule::default()
            }],
            ..command(folder.path(), scripts)
        };
        Self { nats, folder, executor, command, deliveries: 0 }
    }

    async fn run(&mut self) -> step_result::Outcome {
        self.deliveries += 1;
        match self.executor.run(&self.command, self.deliveries).await {
            End::Outcome(outcome) => outcome,
            End::HandBack(why) => panic!("it was handed back: {why}"),
            End::Fenced => panic!("it was fenced"),
            End::Over => panic!("it is over"),
        }
    }

    async fn parks(&mut self) -> Parked {
        match self.run().await {
            step_result::Outcome::Parked(parked) => parked,
            other => panic!("it should wait: {other:?}"),
        }
    }

    async fn completes(&mut self) -> Vec<CodeInterpreterResult> {
        match self.run().await {
            step_result::Outcome::CodeCompleted(completed) => completed.results,
            other => panic!("it should complete: {other:?}"),
        }
    }

    /// The next round, with one more decision.
    fn decide(&mut self, asked: &AskedCall, approved: bool, words: &str) {
        self.command.decisions.push(ApprovalDecision {
            script: asked.script,
            number: asked.number,
            arguments_hash: asked.arguments_hash.clone(),
            approved,
            words: words.to_owned(),
            decided_by: "ada".to_owned(),
        });
        self.next_round();
    }

    fn next_round(&mut self) {
        self.deliveries = 0;
        self.command.step.as_mut().expect("it names a step").round += 1;
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("work").join(name)
    }

    fn file(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.path(name)).ok()
    }

    fn step(&self) -> StepId {
        let step = self.command.step.as_ref().expect("it names a step");
        step.step_id.parse().expect("a step's id")
    }
}

/// A folder with the workspace `work` and the service's own `data`.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["work", "data"] {
        std::fs::create_dir(folder.path().join(name)).expect("made");
    }
    folder
}

/// What an interpreter is that works in this folder.
fn executor(
    bus: Bus,
    folder: &Path,
    policy: Policy,
    egress: Egress,
    sandbox: CommandSandbox,
) -> Executor {
    let workspaces =
        Workspaces::new(&[folder.join("work")], folder.join("data/own"), policy, egress, sandbox);
    Executor {
        bus,
        engine: engine(),
        table: crate::tool_table(),
        workspaces: workspaces.expect("granted"),
        tiers: tiers(Duration::from_secs(20)),
        secrets_keys: None,
        llm: None,
        files: files::Store::open(folder.join("blobs")).expect("a folder"),
        running: Running::default(),
        draining: CancellationToken::new(),
        patience: Duration::from_secs(1),
    }
}

/// Every tier, with room for a slow machine and at most this long from a script's start to its end.
fn tiers(wall: Duration) -> Tiers {
    let (cpu, wall) = (Span(Duration::from_secs(10)), Span(wall));
    let overrides =
        Overrides { script_cpu: Some(cpu), script_wall: Some(wall), ..Overrides::default() };
    Tiers::new(&compute::STANDARD.map(str::to_owned), &overrides, &BTreeMap::new()).expect("sound")
}

/// Lets scripts run commands, confined where the machine can, and reach this machine.
fn granting() -> Policy {
    let commands =
        CommandPolicy { confinement: Confinement::AllowUnconfined, ..CommandPolicy::default() };
    Policy { commands, hosts: vec!["127.0.0.1".parse().expect("a host")] }
}

/// A new step that runs these scripts in the folder's workspace.
fn command(folder: &Path, scripts: &[&str]) -> CodeExecute {
    CodeExecute {
        step: Some(StepRef {
            organization_id: OrganizationId::LOCAL.to_string(),
            task_id: TaskId::from_uuid(Uuid::now_v7()).to_string(),
            step_id: StepId::from_uuid(Uuid::now_v7()).to_string(),
            number: 2,
            deadline: None,
            round: 0,
        }),
        calls: (0..)
            .zip(scripts)
            .map(|(n, code)| CodeInterpreterCall {
                id: format!("call_{n}"),
                code: (*code).to_owned(),
            })
            .collect(),
        workspace: folder.join("work").display().to_string(),
        ..CodeExecute::default()
    }
}

/// Looks every few milliseconds until `look` gives something; panics when that takes too long.
async fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(std::time::Instant::now() < deadline, "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The engine of all tests. The compiled guest is kept beside the build's other artifacts.
fn engine() -> Arc<Engine> {
    static ENGINE: OnceLock<Arc<Engine>> = OnceLock::new();
    let engine = ENGINE.get_or_init(|| {
        let executable = std::env::current_exe().expect("there is one");
        let target = executable.ancestors().nth(3).unwrap_or(Path::new("."));
        let cache = target.join("tmp").join("sandbox-cache");
        Arc::new(
            Engine::new(&cache, EngineConfig { instances: 64, ..EngineConfig::default() })
                .expect("it is set up"),
        )
    });
    Arc::clone(engine)
}

#[tokio::test]
async fn a_call_that_needs_an_approval_parks_the_script_and_is_made_once_it_has_it() {
    let script =
        "print('before'); create_file('open.txt', 'x'); create_file('secrets/key', 'k').status";
    let mut world = World::new(&[script, "'second'"]).await;
    let parked = world.parks().await;
    let [asked] = parked.calls.as_slice() else { panic!("{parked:?}") };
    assert_eq!((asked.script, asked.number, asked.tool.as_str()), (0, 2, "create_file"));
    assert_eq!(asked.arguments, r#"{"content":"k","path":"secrets/key"}"#);
    assert_eq!((asked.arguments_size, asked.reason.as_str()), (36, "it is secret"));
    assert_eq!(world.file("secrets/key"), None);
    let [first, second] = parked.results.as_slice() else { panic!("{parked:?}") };
    assert_eq!(first.output, "before\n");
    assert!(
        first.error.starts_with("Stopped: canceled while waiting for an approval."),
        "{}",
        first.error
    );
    assert!(first.error.contains("they were not approved: #2 create_file"), "{}", first.error);
    assert!(
        second.error.starts_with("NotRun: canceled while waiting for an approval."),
        "{}",
        second.error
    );

    // The same command again, because its acknowledgement was lost: it waits for the same.
    assert_eq!(world.parks().await.calls, parked.calls);
    std::fs::write(world.folder.path().join("work/open.txt"), "changed").expect("written");
    world.decide(asked, true, "");
    let results = world.completes().await;
    assert_eq!((results[0].output.as_str(), results[0].error.as_str()), ("before\ncreated", ""));
    assert_eq!(results[1].output, "second");
    assert_eq!(world.file("secrets/key").as_deref(), Some("k"));
    assert_eq!(
        world.file("open.txt").as_deref(),
        Some("changed"),
        "what was done before is not done again"
    );
    // Run once more, it is answered from the journal.
    std::fs::remove_file(world.folder.path().join("work/secrets/key")).expect("removed");
    assert_eq!(world.completes().await, results);
    assert_eq!(world.file("secrets/key"), None);
}

#[tokio::test]
async fn a_script_is_told_in_the_persons_words_what_was_rejected() {
    let script = "try { create_file('secrets/key', 'k') } catch (error) { `${error.name}: ${error.message}` }";
    let mut world = World::new(&[script]).await;
    let asked = world.parks().await.calls.remove(0);
    world.decide(&asked, false, "use the vault");
    let results = world.completes().await;
    assert!(results[0].output.starts_with("ApprovalRejected: "), "{results:?}");
    assert!(results[0].output.contains("use the vault"), "{results:?}");
    assert_eq!(world.file("secrets/key"), None);
    // A decision does not change with what is decided later.
    world.command.decisions[0].approved = true;
    assert_eq!(world.completes().await, results);
}

#[tokio::test]
async fn an_approval_holds_for_the_arguments_it_was_given_for() {
    let mut world = World::new(&["create_file('secrets/key', 'k')"]).await;
    let asked = world.parks().await.calls.remove(0);
    world.decide(&AskedCall { arguments_hash: "0".repeat(64), ..asked.clone() }, true, "");
    assert_eq!(world.parks().await.calls, std::slice::from_ref(&asked));
    world.decide(&AskedCall { number: 7, ..asked.clone() }, true, "");
    assert_eq!(world.parks().await.calls, [asked]);
    assert_eq!(world.file("secrets/key"), None);
}

#[tokio::test]
async fn calls_that_ask_at_once_wait_together_once_everything_else_has_ended() {
    let script = "
        const [a, b, text, slept] = await Promise.all([
            tools.create_file('secrets/a', '1'),
            tools.create_file('secrets/b', '2').catch(error => error.name),
            tools.read_file('there.txt'),
            new Promise(done => setTimeout(() => done('slept'), 200)),
        ]);
        [a.status, b, text, slept].join(' ')";
    let mut world = World::new(&[script]).await;
    std::fs::write(world.folder.path().join("work/there.txt"), "hello").expect("written");
    let began = std::time::Instant::now();
    let parked = world.parks().await;
    assert!(began.elapsed() >= Duration::from_millis(200), "the timer was waited for");
    let numbers: Vec<u32> = parked.calls.iter().map(|asked| asked.number).collect();
    assert_eq!(numbers, [1, 2]);
    // One is decided, and the other one waits on.
    world.decide(&parked.calls[1], false, "no");
    std::fs::write(world.folder.path().join("work/there.txt"), "changed").expect("written");
    let again = std::time::Instant::now();
    assert_eq!(world.parks().await.calls, [parked.calls[0].clone()]);
    world.decide(&parked.calls[0], true, "");
    let results = world.completes().await;
    assert_eq!(results[0].output, "created ApprovalRejected hello slept");
    assert!(again.elapsed() < Duration::from_secs(15), "it does not wait for what has ended");
    assert_eq!((world.file("secrets/a").as_deref(), world.file("secrets/b")), (Some("1"), None));
}

#[tokio::test]
async fn what_the_policy_forbids_is_an_error_the_script_can_catch() {
    let script = "
        const names = [];
        for (const path of ['a', 'secrets/key']) {
            try { create_file(path, 'x'); names.push('made') }
            catch (error) { names.push(error.name, error.message.includes('not on this task')) }
        }
        names.join(' ')";
    let mut world = World::new(&[script]).await;
    world.command.task_policy = vec![PolicyRule {
        action: PolicyAction::Deny.into(),
        paths: vec!["secrets/*".to_owned()],
        reason: "not on this task".to_owned(),
        ..PolicyRule::default()
    }];
    let results = world.completes().await;
    assert_eq!(results[0].output, "made PolicyDenied true");
    // What the calls were given and gave is kept with their names.
    let uses = &results[0].tool_uses;
    let given: Vec<serde_json::Value> =
        uses.iter().map(|used| serde_json::from_str(&used.arguments).expect("JSON")).collect();
    let expected =
        ["a", "secrets/key"].map(|path| serde_json::json!({"path": path, "content": "x"}));
    assert_eq!(given, expected);
    assert!(
        uses[0].result.contains("created") && uses[1].result.contains("PolicyDenied"),
        "{uses:?}"
    );
    // The policy may have changed when the script is run again; what was refused stays refused.
    world.command.task_policy.clear();
    world.command.agent_policy.clear();
    assert_eq!(world.completes().await, results);
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_keeps_no_script_waiting() {
    let script = "tools.create_file('secrets/key', 'k'); await new Promise(done => setTimeout(done, 100)); 'done'";
    let mut world = World::new(&[script]).await;
    let results = world.completes().await;
    assert!(results[0].output.contains("without waiting for it: #1 create_file"), "{results:?}");
    assert!(results[0].tool_uses.is_empty());
}

#[tokio::test]
async fn a_command_of_an_earlier_round_is_over() {
    let mut world = World::new(&["create_file('secrets/key', 'k').status"]).await;
    let first = world.command.clone();
    let asked = world.parks().await.calls.remove(0);
    world.decide(&asked, true, "");
    world.completes().await;
    assert!(matches!(world.executor.run(&first, 2).await, End::Over));
}

#[tokio::test]
async fn scripts_that_come_too_late_are_not_run() {
    let mut world =
        World::new(&["create_file('a', 'x').status", "create_file('secrets/key', 'k')"]).await;
    let at = |time: Timestamp| prost_types::Timestamp {
        seconds: time.as_second(),
        nanos: time.subsec_nanosecond(),
    };
    let now = clock::now();
    let set = |world: &mut World, deadline| {
        world.command.step.as_mut().expect("it names a step").deadline = Some(at(deadline))
    };
    set(&mut world, now + Duration::from_secs(600));
    let asked = world.parks().await.calls.remove(0);
    std::fs::remove_file(world.path("a")).expect("it was made");
    // Approved, and wanted again when its time is over: what was done is told, and nothing more is
    // done.
    world.decide(&asked, true, "");
    set(&mut world, now);
    for _ in 0..2 {
        let cancelled = match world.run().await {
            step_result::Outcome::Cancelled(cancelled) => cancelled,
            other => panic!("it should not be run: {other:?}"),
        };
        assert_eq!(cancelled.reason, "its deadline has passed");
        assert_eq!(cancelled.results[0].output, "created");
        assert!(cancelled.results[1].error.contains("its deadline has passed"), "{cancelled:?}");
    }
    assert_eq!((world.file("a"), world.file("secrets/key")), (None, None));
}

#[tokio::test]
async fn waiting_again_and_again_is_not_taken_for_dying() {
    let mut world = World::new(&["create_file('secrets/key', 'k').status"]).await;
    for _ in 0..50 {
        world.parks().await;
        world.next_round();
    }
    let asked = world.parks().await.calls.remove(0);
    world.decide(&asked, true, "");
    assert_eq!(world.completes().await[0].output, "created");
}

#[tokio::test]
async fn a_call_that_cannot_be_shown_whole_is_not_asked_about() {
    // What stands around the content in the canonical arguments.
    let around = r#"{"content":"","path":"secrets/key"}"#.len();
    let script = format!(
        "const most = 65536 - {around};
        let told;
        try {{ create_file('secrets/key', 'é' + 'x'.repeat(most - 1)) }} catch (error) {{ told = error }}
        const {{ bytes }} = create_file('secrets/key', 'x'.repeat(most));
        [told.name, told.details.size, told.message.includes('nobody was asked'), bytes === most].join(' ')"
    );
    let mut world = World::new(&[&script]).await;
    let [asked] = world.parks().await.calls.try_into().expect("one call");
    assert_eq!((asked.number, asked.arguments.len(), asked.arguments_size), (2, 65536, 65536));
    assert_eq!(world.file("secrets/key"), None);
    // Like what is denied it stays so, whatever the rules say by now.
    world.command.agent_policy.clear();
    world.decide(&asked, true, "");
    assert_eq!(world.completes().await[0].output, "ApprovalTooLarge 65537 true true");
    assert_eq!(world.file("secrets/key").map(|content| content.len()), Some(65536 - around));
}

#[tokio::test]
async fn the_same_script_fits_into_a_larger_tier_and_not_into_the_smaller_one() {
    // 96 MiB: more than the 64 of `cpu-2`, less than the 128 of `cpu-4`.
    let script = "const bytes = new Uint8Array(96 << 20); bytes.fill(1); bytes.length >> 20";
    let run = async |compute: &str| {
        let mut world = World::new(&[script]).await;
        world.command.compute = compute.to_owned();
        world.completes().await.remove(0)
    };
    let fits = run("cpu-4").await;
    assert_eq!((fits.error.as_str(), fits.output.trim()), ("", "96"));
    for small in ["cpu-2", ""] {
        let refused = run(small).await;
        assert!(refused.error.contains("memory"), "{small}: {refused:?}");
    }
}

#[tokio::test]
async fn a_script_that_computes_for_too_long_is_told_the_limit_of_its_tier() {
    let short =
        Overrides { script_cpu: Some(Span(Duration::from_millis(50))), ..Overrides::default() };
    let pools = compute::STANDARD.map(str::to_owned);
    let mut world =
        World::new(&["let end = Date.now(); for (let i = 0; i < 1e9; i++) end += i; end"]).await;
    world.executor.tiers =
        Tiers::new(&pools, &Overrides::default(), &BTreeMap::from([("cpu-8".to_owned(), short)]))
            .expect("sound");
    world.command.compute = "cpu-8".to_owned();
    let ended = world.completes().await.remove(0);
    assert!(ended.error.contains("50ms"), "{ended:?}");
}
