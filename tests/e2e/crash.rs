//! The first promises: after every crash during a job, the job is finished, nothing is lost,
//! nothing is done twice, and unknown outcomes are reported.

mod boundaries;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use construct_proto::v1::{Event, TaskPhase, TurnOutcome};
use construct_tests::{
    client::{Conversation, TURN_TIMEOUT, wait_for_file},
    mesh::{Mesh, Service},
    proxy::{Proxy, authority},
    random,
    recorder::{Recorder, check_order},
    wait::until,
};
use serde_json::{Value, json};

use crate::{is_running, read, wait_for_process_end};

/// The side effects of a job.
const EFFECTS: u32 = 24;

/// A job: the model answers, a script has one side effect after another, the model answers again.
fn script(code: &[&str]) -> Value {
    json!({"turns": [
        {"text": "I shall do that now, one thing after the other, carefully.", "code": [code], "tokens_per_second": 40},
        {"text": "Done, one thing after the other, carefully. {{last_result}}", "tokens_per_second": 40},
    ]})
}

/// Each effect is its own line or file, and unknown outcomes are noted, as the prompt asks.
const SEQUENTIAL: [&str; 13] = [
    "const unknown = [];",
    "for (let n = 1; n <= 24; n++) {",
    "  try {",
    "    if (n % 6 === 0) create_file(`made/${n}.txt`, String(n));",
    "    else execute_command(`echo ${n} >> effects.log; sleep 0.05`);",
    "  } catch (error) {",
    "    if (error.name !== 'OutcomeUnknown') throw error;",
    "    unknown.push(n);",
    "  }",
    "  print(n);",
    "}",
    "`unknown: ${JSON.stringify(unknown)}`",
    "",
];

const CONCURRENT: [&str; 14] = [
    "const order = [];",
    "const one = async n => {",
    "  try {",
    "    await tools.execute_command(`sleep 0.${(n * 7) % 5 + 1}; echo ${n} >> effects.log`);",
    "    order.push(n);",
    "    if (n <= 12) await one(n + 12);",
    "  } catch (error) {",
    "    if (error.name !== 'OutcomeUnknown') throw error;",
    "    order.push(-n);",
    "    if (n <= 12) await one(n + 12);",
    "  }",
    "};",
    "await Promise.all([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12].map(one));",
    "`unknown: ${JSON.stringify(order.filter(n => n < 0).map(n => -n))}`",
];

struct Job {
    conversation: Conversation,
    recorder: Recorder,
    effects: u32,
}

impl Job {
    async fn begin(mesh: &Mesh, code: &[&str]) -> Self {
        mesh.scripted_agent("worker", &script(code)).await.unwrap();
        Self::begin_in(mesh, mesh.workspace()).await
    }

    /// Another job of the same agent.
    async fn begin_in(mesh: &Mesh, workspace: &Path) -> Self {
        let job = Self::prepare(mesh, workspace, EFFECTS).await;
        job.conversation.submit("Do it.").await;
        job
    }

    /// A job that has not been started, whose script has so many side effects.
    async fn prepare(mesh: &Mesh, workspace: &Path, effects: u32) -> Self {
        let conversation =
            mesh.client().unwrap().create_task("worker", Some(workspace)).await.unwrap();
        let recorder = conversation.record();
        Self { conversation, recorder, effects }
    }

    /// Waits until the model is in the middle of its first answer.
    async fn wait_for_first_answer(&self) {
        self.recorder.wait_for_count("message.delta", 3).await;
        self.assert_phase(TaskPhase::InvokeModel).await;
    }

    /// Waits until the script is in the middle of its side effects.
    async fn wait_for_effects(&self) {
        self.recorder.wait_for_count("tool.result", 8).await;
        self.assert_phase(TaskPhase::ExecuteTools).await;
    }

    /// The number of tool results received so far.
    fn script_event_count(&self) -> usize {
        self.recorder.events().iter().filter(|event| event.r#type == "tool.result").count()
    }

    /// A kill at this point is in the middle of the phase.
    async fn assert_phase(&self, phase: TaskPhase) {
        let status = self.conversation.task().await.unwrap().status.unwrap();
        assert_eq!(status.phase(), phase, "the job is faster than the test");
    }

    /// Waits until the model is in the middle of its last answer.
    async fn wait_for_last_answer(&self) {
        let is_delta = |event: &&Event| event.step == 3 && event.r#type == "message.delta";
        let what = "deltas of the last answer";
        self.recorder.wait_until(what, |events| events.iter().filter(is_delta).count() > 2).await;
        self.assert_phase(TaskPhase::InvokeModel).await;
    }

    /// Checks the promises of the job. Returns the effects whose outcome was reported as unknown.
    async fn check(&self, workspace: &Path) -> BTreeSet<u32> {
        let status = self.conversation.wait_until_idle().await.status.unwrap();
        let transcript = self.conversation.transcript().await;
        transcript.check(&["Do it."]);
        assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{}", transcript.show());
        let result = transcript.result();
        assert_eq!(result.error, "", "{}", transcript.show());
        let answer = transcript.answers().pop().unwrap();
        let unknown = answer.rsplit("unknown: ").next().expect("the answer repeats the result");
        let unknown: BTreeSet<u32> =
            serde_json::from_str(unknown.trim()).unwrap_or_else(|_| panic!("{answer}"));

        let mut done: Vec<u32> = read(&workspace.join("effects.log"))
            .lines()
            .map(|line| line.parse().unwrap())
            .collect();
        if let Ok(made) = std::fs::read_dir(workspace.join("made")) {
            done.extend(made.map(|file| read(&file.unwrap().path()).parse::<u32>().unwrap()));
        }
        let unique: BTreeSet<u32> = done.iter().copied().collect();
        assert_eq!(unique.len(), done.len(), "an effect happened twice: {done:?}");
        let missing: Vec<u32> =
            (1..=self.effects).filter(|n| !unique.contains(n) && !unknown.contains(n)).collect();
        assert!(
            missing.is_empty(),
            "effects did not happen, and nothing was said: {missing:?}; unknown: {unknown:?}"
        );

        let events = self.recorder.wait_for_sequence(status.event_sequence).await;
        check_order(&events);
        unknown
    }
}

async fn survives_crash_of(service: Service) -> BTreeSet<u32> {
    let mut mesh = Mesh::start().await.unwrap();
    let job = Job::begin(&mesh, &SEQUENTIAL).await;
    job.wait_for_first_answer().await;
    mesh.crash(service).await.unwrap();
    job.wait_for_effects().await;
    mesh.crash(service).await.unwrap();
    job.wait_for_last_answer().await;
    mesh.crash(service).await.unwrap();
    job.check(mesh.workspace()).await
}

#[tokio::test]
async fn job_survives_gateway_crash() {
    assert_eq!(survives_crash_of(Service::Gateway).await, BTreeSet::new());
}

#[tokio::test]
async fn job_survives_reconciler_crash() {
    assert_eq!(survives_crash_of(Service::Reconciler).await, BTreeSet::new());
}

#[tokio::test]
async fn job_survives_providers_crash() {
    assert_eq!(survives_crash_of(Service::Providers).await, BTreeSet::new());
}

#[tokio::test]
async fn job_survives_interpreter_crash() {
    let unknown = survives_crash_of(Service::Interpreter).await;
    assert!(unknown.len() <= 1, "one call at a time can have been interrupted: {unknown:?}");
}

#[tokio::test]
async fn concurrent_calls_survive_interpreter_crash() {
    let mut mesh = Mesh::start().await.unwrap();
    let job = Job::begin(&mesh, &CONCURRENT).await;
    job.recorder.wait_for_count("tool.result", 4).await;
    mesh.crash(Service::Interpreter).await.unwrap();
    let unknown = job.check(mesh.workspace()).await;
    assert!(
        !unknown.is_empty() && unknown.len() <= 12,
        "calls were under way, and said to be unknown: {unknown:?}"
    );
}

#[tokio::test]
async fn job_survives_crash_of_all_services_at_once() {
    let mut mesh = Mesh::start().await.unwrap();
    let job = Job::begin(&mesh, &SEQUENTIAL).await;
    job.wait_for_effects().await;
    for service in Service::ALL {
        mesh.kill(service).unwrap();
    }
    mesh.start_services().await.unwrap();
    let unknown = job.check(mesh.workspace()).await;
    assert!(unknown.len() <= 1, "one call at a time can have been interrupted: {unknown:?}");
}

#[tokio::test]
async fn job_survives_nats_crash() {
    let mut mesh = Mesh::start().await.unwrap();
    let job = Job::begin(&mesh, &SEQUENTIAL).await;
    job.wait_for_first_answer().await;
    mesh.nats.restart().await;
    job.wait_for_effects().await;
    mesh.nats.restart().await;
    let unknown = job.check(mesh.workspace()).await;
    assert!(unknown.len() <= 1, "one call at a time can have been interrupted: {unknown:?}");
}

#[tokio::test]
async fn job_survives_partition_from_postgresql() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    let url = mesh.database.url().to_owned();
    let proxy = Proxy::start(&authority(&url)).await.unwrap();
    mesh.set_env("CONSTRUCT_DATABASE_URL", proxy.proxied_url(&url));
    mesh.start_services().await.unwrap();
    let job = Job::begin(&mesh, &SEQUENTIAL).await;
    job.wait_for_effects().await;
    proxy.cut();
    // The script continues to its end meanwhile, and its result waits.
    job.recorder.wait_for_count("tool.result", EFFECTS as usize).await;
    proxy.restore();
    assert_eq!(job.check(mesh.workspace()).await, BTreeSet::new());
}

#[tokio::test]
async fn intents_survive_reconciler_crash() {
    let mut mesh = Mesh::start().await.unwrap();
    let job = Job::begin(&mesh, &SEQUENTIAL).await;
    job.wait_for_effects().await;
    mesh.kill(Service::Reconciler).unwrap();
    job.conversation.suspend().await;
    mesh.spawn(Service::Reconciler).unwrap();
    mesh.wait_until_ready(Service::Reconciler).await.unwrap();
    job.conversation.wait_for_phase(TaskPhase::Suspended).await;
    job.conversation.resume().await;
    let status = job.conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Completed);
    job.conversation.transcript().await.check(&["Do it."]);
    let done = read(&mesh.workspace().join("effects.log"));
    let unique: BTreeSet<&str> = done.lines().collect();
    assert_eq!(unique.len(), done.lines().count(), "an effect happened twice: {done}");
}

#[tokio::test]
async fn job_survives_partition_from_nats() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    let proxy = Proxy::start(&authority(mesh.nats.url())).await.unwrap();
    mesh.set_env("CONSTRUCT_NATS_URL", proxy.proxied_url(mesh.nats.url()));
    mesh.start_services().await.unwrap();
    let job = Job::begin(&mesh, &SEQUENTIAL).await;
    job.wait_for_effects().await;
    proxy.cut();
    // Without its journal a script must not continue, and waits.
    until("the interpreter to notice", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Interpreter);
        if log.contains("a journal cannot be written yet") {
            Ok(())
        } else {
            Err(log.lines().last().map(str::to_owned))
        }
    })
    .await;
    proxy.restore();
    let unknown = job.check(mesh.workspace()).await;
    assert!(unknown.len() <= 1, "one call at a time can have been interrupted: {unknown:?}");
}

/// A single connection never reorders in reality; several servers and redeliveries do.
#[tokio::test]
async fn job_survives_reordered_and_duplicated_messages() {
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    let proxy = Proxy::start_nats(&authority(mesh.nats.url())).await.unwrap();
    mesh.set_env("CONSTRUCT_NATS_URL", proxy.proxied_url(mesh.nats.url()));
    mesh.start_services().await.unwrap();
    proxy.disorder(random::seed());
    let job = Job::begin(&mesh, &SEQUENTIAL).await;
    assert_eq!(job.check(mesh.workspace()).await, BTreeSet::new(), "no process was killed");
}

#[tokio::test]
async fn deploy_during_a_job_is_not_noticed() {
    let mut mesh = Mesh::start().await.unwrap();
    let job = Job::begin(&mesh, &SEQUENTIAL).await;
    job.wait_for_first_answer().await;
    for service in [Service::Providers, Service::Reconciler, Service::Gateway] {
        assert_eq!(mesh.stop(service).await.unwrap(), 0, "{service:?}:\n{}", mesh.log(service));
        mesh.start_services().await.unwrap();
    }
    job.wait_for_effects().await;
    for service in Service::ALL {
        assert_eq!(mesh.stop(service).await.unwrap(), 0, "{service:?}:\n{}", mesh.log(service));
        mesh.start_services().await.unwrap();
    }
    assert_eq!(
        job.check(mesh.workspace()).await,
        BTreeSet::new(),
        "what can end within the grace is let end"
    );
}

#[tokio::test]
async fn shell_command_dies_with_interpreter_as_outcome_unknown() {
    let mut mesh = Mesh::start().await.unwrap();
    let code = |n: u32, seconds: &str| {
        format!(
            "try {{ execute_command('touch begun{n}; sleep {seconds}; touch never{n}') }} catch (error) {{ \
             print(`{n}: ${{error.name}}`) }}"
        )
    };
    let seconds = [format!("401.{}", std::process::id()), format!("402.{}", std::process::id())];
    let codes = [code(0, &seconds[0]), code(1, &seconds[1])];
    mesh.scripted_agent(
        "worker",
        &json!({"turns": [{"code": codes}, {"text": "{{last_result}}"}]}),
    )
    .await
    .unwrap();
    let conversation =
        mesh.client().unwrap().create_task("worker", Some(mesh.workspace())).await.unwrap();
    conversation.submit("go").await;
    for (n, seconds) in seconds.iter().enumerate() {
        wait_for_file(&mesh.workspace().join(format!("begun{n}")), |_| true).await;
        let process = format!("sleep {seconds}");
        assert!(is_running(&process));
        if n == 0 {
            mesh.kill(Service::Interpreter).unwrap();
        } else {
            mesh.stop(Service::Interpreter).await.unwrap();
        }
        wait_for_process_end(&process).await;
        mesh.start_services().await.unwrap();
    }
    conversation.wait_until_idle().await;
    let transcript = conversation.transcript().await;
    let outputs: Vec<String> =
        transcript.check(&["go"]).results().into_iter().map(|result| result.output).collect();
    assert_eq!(outputs, ["0: OutcomeUnknown\n", "1: OutcomeUnknown\n"]);
    assert!(!mesh.workspace().join("never0").exists() && !mesh.workspace().join("never1").exists());
}

#[tokio::test]
async fn messages_during_crashes_are_accepted_and_answered_in_order() {
    let mut mesh = Mesh::start().await.unwrap();
    let script =
        json!({"conversations": [{"match": "", "turns": [{"text": "heard {{last_user_text}}"}]}]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let conversation = mesh.client().unwrap().create_task("worker", None).await.unwrap();
    let texts: Vec<String> = (0..30).map(|n| format!("message {n}")).collect();
    let speaking = async {
        for text in &texts {
            conversation.submit(text).await;
        }
    };
    let dying = async {
        for (position, service) in [
            (2, Service::Gateway),
            (8, Service::Reconciler),
            (14, Service::Gateway),
            (20, Service::Providers),
        ] {
            conversation
                .wait_for_task("some messages", |_, status| status.message_count >= position)
                .await;
            mesh.crash(service).await.unwrap();
        }
    };
    tokio::join!(speaking, dying);
    conversation.wait_until_idle().await;
    let transcript = conversation.transcript().await;
    let said: Vec<&str> = texts.iter().map(String::as_str).collect();
    transcript.check(&said);
    let expected: Vec<String> = texts.iter().map(|text| format!("heard {text}")).collect();
    assert_eq!(transcript.answers(), expected);
}

#[tokio::test]
async fn concurrent_jobs_survive_crashes_of_all_services_in_turn() {
    const JOBS: usize = 6;
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script(&SEQUENTIAL)).await.unwrap();
    let mut jobs = Vec::new();
    for n in 0..JOBS {
        let folder = mesh.folder(&format!("job-{n}")).unwrap();
        jobs.push((Job::begin_in(&mesh, &folder).await, folder));
    }
    let progress = |jobs: &[(Job, PathBuf)]| {
        jobs.iter().map(|(job, _)| job.script_event_count()).sum::<usize>()
    };
    // None: NATS.
    let victims = [
        Some(Service::Interpreter),
        Some(Service::Reconciler),
        None,
        Some(Service::Gateway),
        Some(Service::Interpreter),
        Some(Service::Providers),
        None,
        Some(Service::Reconciler),
    ];
    for (turn, victim) in (1..).zip(victims) {
        let wanted = turn * JOBS * 2;
        until("the jobs to continue", TURN_TIMEOUT, async || match progress(&jobs) {
            seen if seen >= wanted => Ok(()),
            seen => Err((seen, wanted)),
        })
        .await;
        match victim {
            Some(service) => mesh.crash(service).await.unwrap(),
            None => mesh.nats.restart().await,
        }
    }
    for (job, folder) in &jobs {
        let unknown = job.check(folder).await;
        assert!(
            unknown.len() <= 4,
            "as many calls as disturbances can have been interrupted: {unknown:?}"
        );
    }
}

#[tokio::test]
async fn replicas_share_the_work_and_repeat_nothing() {
    let mut mesh = Mesh::start().await.unwrap();
    for service in [Service::Reconciler, Service::Interpreter, Service::Providers] {
        mesh.start_replica(service).await.unwrap();
    }
    mesh.scripted_agent("worker", &script(&SEQUENTIAL)).await.unwrap();
    let mut jobs = Vec::new();
    for n in 0..6 {
        let folder = mesh.folder(&format!("job-{n}")).unwrap();
        jobs.push((Job::begin_in(&mesh, &folder).await, folder));
    }
    jobs[0].0.recorder.wait_for_count("tool.result", 4).await;
    // The remaining processes continue the work.
    for service in [Service::Reconciler, Service::Interpreter, Service::Providers] {
        mesh.kill(service).unwrap();
    }
    for (job, folder) in &jobs {
        let unknown = job.check(folder).await;
        assert!(unknown.len() <= 1, "one call at a time can have been interrupted: {unknown:?}");
    }
}

#[tokio::test]
async fn script_canceled_before_delivery_never_runs() {
    let mut mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "hello", "turns": [{"text": "hello"}]},
        {"match": "write", "turns": [{"code": "create_file('late.txt', 'late')"}, {"text": "written"}]},
        {"match": "look", "turns": [{"code": "find_file('late.txt').paths.length"}, {"text": "{{last_result}}"}]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let conversation =
        mesh.client().unwrap().create_task("worker", Some(mesh.workspace())).await.unwrap();
    // The reconciler has learned the available tools before the interpreter is gone.
    conversation.ask("hello").await;
    mesh.kill(Service::Interpreter).unwrap();
    conversation.submit("write").await;
    conversation.wait_for_phase(TaskPhase::ExecuteTools).await;
    conversation.cancel("changed my mind").await;
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Cancelled);
    mesh.spawn(Service::Interpreter).unwrap();
    mesh.wait_until_ready(Service::Interpreter).await.unwrap();
    // Anything still queued would run before this.
    conversation.ask("look").await;
    let transcript = conversation.transcript().await;
    assert_eq!(transcript.answers().last().map(String::as_str), Some("0"));
    assert!(!mesh.workspace().join("late.txt").exists());
    transcript.check(&["hello", "write", "look"]);
}
