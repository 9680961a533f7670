//! Scripts that wait for approvals are suspended, resumed, and get the decision.

mod attachments;
mod call_events;
mod cancellation;
mod divergence;
mod environment;
mod journal_limit;
mod large_results;
mod outages;
mod randomness;
mod redirects;
mod result_notes;
mod secrets;
mod storage;
mod subtasks;
mod trials;
mod unreadable_command;

use std::{
    collections::BTreeMap,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use construct_bus::testing::NatsServer;
use construct_domain::{OrganizationId, TaskId, compute};
use construct_proto::{
    mesh::v1::{ApprovalDecision, ApprovalRequest, StepRef},
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

/// An interpreter without its service, and one step that is delivered to it repeatedly.
struct World {
    /// Stops at the end of the test.
    nats: Arc<NatsServer>,
    folder: tempfile::TempDir,
    executor: Executor,
    command: CodeExecute,
    deliveries: u32,
}

impl World {
    async fn new(scripts: &[&str]) -> Self {
        let sandbox = CommandSandbox::unavailable("a test needs none");
        Self::with_policy(scripts, Policy::default(), Egress::new(&[]).expect("created"), sandbox)
            .await
    }

    /// An interpreter whose scripts may run commands and reach this machine.
    async fn with_network_and_commands(scripts: &[&str]) -> Self {
        let egress = Egress::new(&[Ipv4Addr::LOCALHOST.into()]).expect("created");
        Self::with_policy(
            scripts,
            network_and_commands_policy(),
            egress,
            crate::command::tests::sandbox().await,
        )
        .await
    }

    async fn with_policy(
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
            ExecutionEnd::Outcome(outcome) => outcome,
            ExecutionEnd::HandBack(why) => panic!("the execution was handed back: {why}"),
            ExecutionEnd::Fenced => panic!("the execution was fenced"),
            ExecutionEnd::Obsolete => panic!("the execution is obsolete"),
        }
    }

    async fn run_until_suspended(&mut self) -> Suspended {
        match self.run().await {
            step_result::Outcome::Suspended(suspended) => suspended,
            other => panic!("the script should be suspended: {other:?}"),
        }
    }

    async fn run_to_completion(&mut self) -> Vec<CodeInterpreterResult> {
        match self.run().await {
            step_result::Outcome::CodeCompleted(completed) => completed.results,
            other => panic!("the script should complete: {other:?}"),
        }
    }

    /// Starts the next round, with one more decision.
    fn decide(&mut self, request: &ApprovalRequest, approved: bool, comment: &str) {
        self.command.decisions.push(ApprovalDecision {
            script: request.script,
            number: request.number,
            arguments_hash: request.arguments_hash.clone(),
            approved,
            comment: comment.to_owned(),
            decided_by: "ada".to_owned(),
        });
        self.next_round();
    }

    fn next_round(&mut self) {
        self.deliveries = 0;
        self.command.step.as_mut().expect("the command has a step").round += 1;
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join("work").join(name)
    }

    fn file(&self, name: &str) -> Option<String> {
        std::fs::read_to_string(self.path(name)).ok()
    }

    fn step(&self) -> StepId {
        let step = self.command.step.as_ref().expect("the command has a step");
        step.step_id.parse().expect("a step's id")
    }
}

/// A folder with the workspace `work` and the service's `data`.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["work", "data"] {
        std::fs::create_dir(folder.path().join(name)).expect("created");
    }
    folder
}

/// An executor that works in this folder.
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
        drain_timeout: Duration::from_secs(1),
    }
}

/// All tiers, with a CPU limit for slow machines and this wall limit.
fn tiers(wall: Duration) -> Tiers {
    let (cpu, wall) = (Span(Duration::from_secs(10)), Span(wall));
    let overrides =
        Overrides { script_cpu: Some(cpu), script_wall: Some(wall), ..Overrides::default() };
    Tiers::new(&compute::STANDARD.map(str::to_owned), &overrides, &BTreeMap::new())
        .expect("valid limits")
}

/// A policy that lets scripts run commands, confined where the machine can, and reach this machine.
fn network_and_commands_policy() -> Policy {
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

/// Polls until `poll` returns a value. Panics after a timeout.
async fn wait_for<T>(what: &str, mut poll: impl FnMut() -> Option<T>) -> T {
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(std::time::Instant::now() < deadline, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// The engine of all tests. The compiled guest is cached beside the build's other artifacts.
fn engine() -> Arc<Engine> {
    static ENGINE: OnceLock<Arc<Engine>> = OnceLock::new();
    let engine = ENGINE.get_or_init(|| {
        let executable = std::env::current_exe().expect("the path of this executable");
        let target = executable.ancestors().nth(3).unwrap_or(Path::new("."));
        let cache = target.join("tmp").join("sandbox-cache");
        Arc::new(
            Engine::new(&cache, EngineConfig { instances: 64, ..EngineConfig::default() })
                .expect("the engine starts"),
        )
    });
    Arc::clone(engine)
}

#[tokio::test]
async fn approval_suspends_the_script_and_then_makes_the_call() {
    let script =
        "print('before'); create_file('open.txt', 'x'); create_file('secrets/key', 'k').status";
    let mut world = World::new(&[script, "'second'"]).await;
    let suspended = world.run_until_suspended().await;
    let [request] = suspended.approval_requests.as_slice() else { panic!("{suspended:?}") };
    assert_eq!((request.script, request.number, request.tool.as_str()), (0, 2, "create_file"));
    assert_eq!(request.arguments, r#"{"content":"k","path":"secrets/key"}"#);
    assert_eq!((request.arguments_size, request.reason.as_str()), (36, "it is secret"));
    assert_eq!(world.file("secrets/key"), None);
    let [first, second] = suspended.results.as_slice() else { panic!("{suspended:?}") };
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

    // The same command again, because its acknowledgment was lost: it waits for the same call.
    assert_eq!(world.run_until_suspended().await.approval_requests, suspended.approval_requests);
    std::fs::write(world.folder.path().join("work/open.txt"), "changed").expect("written");
    world.decide(request, true, "");
    let results = world.run_to_completion().await;
    assert_eq!((results[0].output.as_str(), results[0].error.as_str()), ("before\ncreated", ""));
    assert_eq!(results[1].output, "second");
    assert_eq!(world.file("secrets/key").as_deref(), Some("k"));
    assert_eq!(
        world.file("open.txt").as_deref(),
        Some("changed"),
        "the first call is not repeated"
    );
    // A further run is answered from the journal.
    std::fs::remove_file(world.folder.path().join("work/secrets/key")).expect("removed");
    assert_eq!(world.run_to_completion().await, results);
    assert_eq!(world.file("secrets/key"), None);
}

#[tokio::test]
async fn rejection_reaches_the_script_with_the_comment() {
    let script = "try { create_file('secrets/key', 'k') } catch (error) { `${error.name}: ${error.message}` }";
    let mut world = World::new(&[script]).await;
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    world.decide(&request, false, "use the vault");
    let results = world.run_to_completion().await;
    assert!(results[0].output.starts_with("ApprovalRejected: "), "{results:?}");
    assert!(results[0].output.contains("use the vault"), "{results:?}");
    assert_eq!(world.file("secrets/key"), None);
    // A later decision does not change it.
    world.command.decisions[0].approved = true;
    assert_eq!(world.run_to_completion().await, results);
}

#[tokio::test]
async fn approval_is_bound_to_its_arguments() {
    let mut world = World::new(&["create_file('secrets/key', 'k')"]).await;
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    world.decide(&ApprovalRequest { arguments_hash: "0".repeat(64), ..request.clone() }, true, "");
    assert_eq!(world.run_until_suspended().await.approval_requests, std::slice::from_ref(&request));
    world.decide(&ApprovalRequest { number: 7, ..request.clone() }, true, "");
    assert_eq!(world.run_until_suspended().await.approval_requests, [request]);
    assert_eq!(world.file("secrets/key"), None);
}

#[tokio::test]
async fn concurrent_approvals_suspend_after_other_calls_end() {
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
    let suspended = world.run_until_suspended().await;
    assert!(began.elapsed() >= Duration::from_millis(200), "the script waits for the timer");
    let numbers: Vec<u32> =
        suspended.approval_requests.iter().map(|request| request.number).collect();
    assert_eq!(numbers, [1, 2]);
    // One is decided; the other one still waits.
    world.decide(&suspended.approval_requests[1], false, "no");
    std::fs::write(world.folder.path().join("work/there.txt"), "changed").expect("written");
    let resumed_at = std::time::Instant::now();
    assert_eq!(
        world.run_until_suspended().await.approval_requests,
        [suspended.approval_requests[0].clone()]
    );
    world.decide(&suspended.approval_requests[0], true, "");
    let results = world.run_to_completion().await;
    assert_eq!(results[0].output, "created ApprovalRejected hello slept");
    assert!(resumed_at.elapsed() < Duration::from_secs(15), "ended calls are not awaited again");
    assert_eq!((world.file("secrets/a").as_deref(), world.file("secrets/b")), (Some("1"), None));
}

#[tokio::test]
async fn denied_call_throws_a_catchable_error() {
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
    let results = world.run_to_completion().await;
    assert_eq!(results[0].output, "made PolicyDenied true");
    // Arguments and results of the calls are kept.
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
    // The policy may have changed at the replay; a refused call stays refused.
    world.command.task_policy.clear();
    world.command.agent_policy.clear();
    assert_eq!(world.run_to_completion().await, results);
}

#[tokio::test]
async fn unawaited_approval_does_not_suspend_the_script() {
    let script = "tools.create_file('secrets/key', 'k'); await new Promise(done => setTimeout(done, 100)); 'done'";
    let mut world = World::new(&[script]).await;
    let results = world.run_to_completion().await;
    assert!(results[0].output.contains("without waiting for it: #1 create_file"), "{results:?}");
    assert!(results[0].tool_uses.is_empty());
}

#[tokio::test]
async fn command_of_an_earlier_round_is_obsolete() {
    let mut world = World::new(&["create_file('secrets/key', 'k').status"]).await;
    let first = world.command.clone();
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    world.decide(&request, true, "");
    world.run_to_completion().await;
    assert!(matches!(world.executor.run(&first, 2).await, ExecutionEnd::Obsolete));
}

#[tokio::test]
async fn scripts_after_their_deadline_are_not_run() {
    let mut world =
        World::new(&["create_file('a', 'x').status", "create_file('secrets/key', 'k')"]).await;
    let at = |time: Timestamp| prost_types::Timestamp {
        seconds: time.as_second(),
        nanos: time.subsec_nanosecond(),
    };
    let now = clock::now();
    let set = |world: &mut World, deadline| {
        world.command.step.as_mut().expect("the command has a step").deadline = Some(at(deadline))
    };
    set(&mut world, now + Duration::from_secs(600));
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    std::fs::remove_file(world.path("a")).expect("the file exists");
    // Approved, but delivered again after the deadline: earlier results are reported, and nothing
    // more runs.
    world.decide(&request, true, "");
    set(&mut world, now);
    for _ in 0..2 {
        let canceled = match world.run().await {
            step_result::Outcome::Cancelled(canceled) => canceled,
            other => panic!("the script should not run: {other:?}"),
        };
        assert_eq!(canceled.reason, "its deadline has passed");
        assert_eq!(canceled.results[0].output, "created");
        assert!(canceled.results[1].error.contains("its deadline has passed"), "{canceled:?}");
    }
    assert_eq!((world.file("a"), world.file("secrets/key")), (None, None));
}

#[tokio::test]
async fn repeated_suspension_is_no_crash() {
    let mut world = World::new(&["create_file('secrets/key', 'k').status"]).await;
    for _ in 0..50 {
        world.run_until_suspended().await;
        world.next_round();
    }
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    world.decide(&request, true, "");
    assert_eq!(world.run_to_completion().await[0].output, "created");
}

#[tokio::test]
async fn call_too_large_to_show_is_not_requested() {
    // The size of the canonical arguments without the content.
    let around = r#"{"content":"","path":"secrets/key"}"#.len();
    let script = format!(
        "const most = 65536 - {around};
        let told;
        try {{ create_file('secrets/key', 'é' + 'x'.repeat(most - 1)) }} catch (error) {{ told = error }}
        const {{ bytes }} = create_file('secrets/key', 'x'.repeat(most));
        [told.name, told.details.size, told.message.includes('It was not made'), bytes === most].join(' ')"
    );
    let mut world = World::new(&[&script]).await;
    let [request] =
        world.run_until_suspended().await.approval_requests.try_into().expect("one call");
    assert_eq!(
        (request.number, request.arguments.len(), request.arguments_size),
        (2, 65536, 65536)
    );
    assert_eq!(world.file("secrets/key"), None);
    // It stays refused like a denied call, whatever the rules say by now.
    world.command.agent_policy.clear();
    world.decide(&request, true, "");
    assert_eq!(world.run_to_completion().await[0].output, "ApprovalTooLarge 65537 true true");
    assert_eq!(world.file("secrets/key").map(|content| content.len()), Some(65536 - around));
}

#[tokio::test]
async fn script_fits_larger_tier_only() {
    // 96 MiB: more than the 64 of `cpu-2`, less than the 128 of `cpu-4`.
    let script = "const bytes = new Uint8Array(96 << 20); bytes.fill(1); bytes.length >> 20";
    let run = async |compute: &str| {
        let mut world = World::new(&[script]).await;
        world.command.compute = compute.to_owned();
        world.run_to_completion().await.remove(0)
    };
    let fits = run("cpu-4").await;
    assert_eq!((fits.error.as_str(), fits.output.trim()), ("", "96"));
    for small in ["cpu-2", ""] {
        let refused = run(small).await;
        assert!(refused.error.contains("memory"), "{small}: {refused:?}");
    }
}

#[tokio::test]
async fn script_over_its_cpu_limit_reports_the_limit() {
    let short =
        Overrides { script_cpu: Some(Span(Duration::from_millis(50))), ..Overrides::default() };
    let pools = compute::STANDARD.map(str::to_owned);
    let mut world =
        World::new(&["let end = Date.now(); for (let i = 0; i < 1e9; i++) end += i; end"]).await;
    world.executor.tiers =
        Tiers::new(&pools, &Overrides::default(), &BTreeMap::from([("cpu-8".to_owned(), short)]))
            .expect("valid limits");
    world.command.compute = "cpu-8".to_owned();
    let ended = world.run_to_completion().await.remove(0);
    assert!(ended.error.contains("50ms"), "{ended:?}");
}
