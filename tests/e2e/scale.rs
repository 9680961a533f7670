//! Several reconcilers share the work, come, go and die, and nobody notices for long.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use construct_bus::subject;
use construct_domain::{OrganizationId, partition};
use construct_proto::{
    mesh::v1::{ReconcilerBeat, TaskWake},
    v1::{Event, TurnOutcome},
};
use construct_store::{Order, Page, TaskFilter};
use construct_tests::{
    client::{Conversation, PATIENCE},
    mesh::{Mesh, Service},
    recorder::{check_order, describe},
    slack::SlackServer,
    wait::until,
};
use futures::StreamExt as _;
use serde_json::{Value, json};
use tokio::task::AbortHandle;

use crate::read;

/// Who says nothing for so long is not there any more; they say something several times a second.
const SILENCE: Duration = Duration::from_secs(5);

/// What reconcilers say of themselves, as last heard, and when.
struct Beats {
    last: Arc<Mutex<BTreeMap<String, (Instant, ReconcilerBeat)>>>,
    abort: AbortHandle,
}

impl Drop for Beats {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl Beats {
    async fn hear(mesh: &Mesh) -> Self {
        let last: Arc<Mutex<BTreeMap<String, (Instant, ReconcilerBeat)>>> = Arc::default();
        let (bus, heard) = (mesh.bus().await, Arc::clone(&last));
        let mut beats = bus.hear_beats().await.unwrap();
        let abort = tokio::spawn(async move {
            let _bus = bus;
            while let Some(beat) = beats.next().await {
                let mut heard = heard.lock().unwrap();
                if beat.leaves {
                    heard.remove(&beat.instance);
                } else {
                    heard.insert(beat.instance.clone(), (Instant::now(), beat));
                }
            }
        })
        .abort_handle();
        Self { last, abort }
    }

    /// Those of whom something was heard lately: the last beat of one that was killed may be heard
    /// when it is gone.
    fn all(&self) -> Vec<ReconcilerBeat> {
        let last = self.last.lock().unwrap();
        last.values()
            .filter(|(heard, _)| heard.elapsed() < SILENCE)
            .map(|(_, beat)| beat.clone())
            .collect()
    }

    /// Waits until `among` have all partitions, none of them twice, each at least one. Gives how
    /// long that took.
    async fn shared(&self, among: impl Fn(&ReconcilerBeat) -> bool, count: usize) -> Duration {
        let began = Instant::now();
        until("the partitions to be shared", PATIENCE, async || {
            let beats: Vec<_> = self.all().into_iter().filter(|beat| among(beat)).collect();
            let all: Vec<u32> = beats.iter().flat_map(|beat| beat.partitions.clone()).collect();
            let unique: BTreeSet<u32> = all.iter().copied().collect();
            let whole = unique.len() == usize::from(partition::COUNT) && all.len() == unique.len();
            let even = beats.len() == count && beats.iter().all(|beat| !beat.partitions.is_empty());
            if whole && even { Ok(()) } else { Err(beats) }
        })
        .await;
        began.elapsed()
    }
}

/// A turn of a second or two with ten side effects.
fn script() -> Value {
    json!({"count": "since_user", "turns": [
        {"text": "I shall do that now.", "tokens_per_second": 40, "code": [
            "for (let n = 1; n <= 10; n++) {\n  try {\n    execute_command(`echo ${n} >> effects.log; sleep 0.05`);\n  } catch (error) {\n    \
             if (error.name !== 'OutcomeUnknown') throw error;\n    execute_command(`echo ${n} >> unknown.log`);\n  }\n}\n'done'"
        ]},
        {"text": "Done: {{last_result}}", "tokens_per_second": 40},
    ]})
}

/// Tasks that work, each in a folder of its own.
async fn begin_jobs(mesh: &Mesh, count: usize) -> Vec<(Conversation, std::path::PathBuf)> {
    let mut jobs = Vec::new();
    for n in 0..count {
        let folder = mesh.folder(&format!("job-{n}")).unwrap();
        let conversation = mesh.client().unwrap().begin("worker", Some(&folder)).await.unwrap();
        conversation.say("Do it.").await;
        jobs.push((conversation, folder));
    }
    jobs
}

/// Every job is done, nothing twice, and nothing is missing without a word.
async fn check_jobs(jobs: &[(Conversation, std::path::PathBuf)]) {
    for (conversation, folder) in jobs {
        let status = conversation.settled().await.status.unwrap();
        let transcript = conversation.transcript().await;
        transcript.check(&["Do it."]);
        assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{}", transcript.show());
        let effects = read(&folder.join("effects.log"));
        let unique: BTreeSet<&str> = effects.lines().collect();
        assert_eq!(unique.len(), effects.lines().count(), "an effect happened twice: {effects}");
        let unknown = std::fs::read_to_string(folder.join("unknown.log")).unwrap_or_default();
        let missing: Vec<String> =
            (1..=10).map(|n| n.to_string()).filter(|n| !unique.contains(n.as_str())).collect();
        assert!(
            missing.iter().all(|n| unknown.lines().any(|line| line == n)),
            "{missing:?} are missing without a word"
        );
    }
}

#[tokio::test]
async fn reconcilers_share_the_partitions_and_take_over_from_one_that_leaves_or_dies() {
    let mut mesh = Mesh::start().await.unwrap();
    let beats = Beats::hear(&mesh).await;
    beats.shared(|_| true, 1).await;
    let first = beats.all()[0].instance.clone();
    let second = mesh.replicate(Service::Reconciler).await.unwrap();
    beats.shared(|_| true, 2).await;
    let third = mesh.replicate(Service::Reconciler).await.unwrap();
    beats.shared(|_| true, 3).await;
    let before = beats.all();
    assert!(before.iter().all(|beat| beat.partitions.len() <= 6), "{before:?}");

    // One that leaves says so.
    assert_eq!(mesh.stop_replica(third).await.unwrap(), 0, "{}", mesh.log(Service::Reconciler));
    let took = beats.shared(|_| true, 2).await;
    assert!(took < Duration::from_secs(2), "{took:?}");
    // One that dies is missed.
    mesh.kill_replica(second).unwrap();
    let took = beats.shared(|beat| beat.instance == first, 1).await;
    assert!(took < Duration::from_secs(4), "{took:?}");
    let log = mesh.log(Service::Reconciler);
    assert!(log.contains("the partition assignment has changed"), "{log}");
}

#[tokio::test]
async fn two_reconcilers_that_both_take_all_tasks_for_their_own_do_nothing_twice() {
    let mut mesh = Mesh::start().await.unwrap();
    let beats = Beats::hear(&mesh).await;
    mesh.replicate(Service::Reconciler).await.unwrap();
    beats.shared(|_| true, 2).await;
    // Each is told again and again that the other one leaves.
    let bus = mesh.bus().await;
    let processes = beats.all();
    let lies = tokio::spawn(async move {
        loop {
            for beat in &processes {
                let address = subject::ReconcilerBeat { instance: beat.instance.clone() };
                let lie = ReconcilerBeat { leaves: true, ..beat.clone() };
                bus.tell_beat(&address, &lie).await.unwrap();
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    until("both to have everything", PATIENCE, async || {
        let log = mesh.log(Service::Reconciler);
        let whole = log.matches("replicas=1").count() + log.matches("\"replicas\":1,").count();
        if whole >= 3 { Ok(()) } else { Err(log) }
    })
    .await;
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let jobs = begin_jobs(&mesh, 8).await;
    let recorders: Vec<_> = jobs.iter().map(|(conversation, _)| conversation.record()).collect();
    check_jobs(&jobs).await;
    for ((conversation, folder), recorder) in jobs.iter().zip(&recorders) {
        assert!(!folder.join("unknown.log").exists(), "nothing was interrupted");
        let last = conversation.task().await.unwrap().status.unwrap().event_sequence;
        check_order(&recorder.until_sequence(last).await);
    }
    lies.abort();
}

/// Whether a message came after the last turn was over.
fn is_busy(events: &[Event]) -> bool {
    let last = |kind| events.iter().rposition(|event| event.r#type == kind);
    last("message.created") > last("turn.completed")
}

/// Which event it is, and the second in the hour at which it was told: whether it was late, or only
/// what was heard of it.
fn with_time(event: &Event) -> String {
    let time = event.time.unwrap_or_default();
    format!("{} at {}.{:03}", describe(event), time.seconds % 3_600, time.nanos / 1_000_000)
}

/// The longest time between two events of a task that is not idle, as its follower sees it.
struct Stalls {
    noted: Arc<Mutex<Noted>>,
    abort: AbortHandle,
}

struct Noted {
    longest: Duration,
    /// The event before that, and the one that ended it.
    after: String,
    until: Option<String>,
    /// When something was last heard of the task, or it was idle.
    heard: Instant,
}

impl Drop for Stalls {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

impl Stalls {
    fn watch(conversation: &Conversation) -> Self {
        let heard = Instant::now();
        let noted = Arc::new(Mutex::new(Noted {
            longest: Duration::ZERO,
            after: String::new(),
            until: None,
            heard,
        }));
        let (recorder, shared) = (conversation.record(), Arc::clone(&noted));
        let abort = tokio::spawn(async move {
            let mut seen = 0;
            loop {
                tokio::time::sleep(Duration::from_millis(10)).await;
                let (events, busy, newest, next) = recorder.look(|events| {
                    let newest = events.last().map(with_time).unwrap_or_default();
                    (events.len(), is_busy(events), newest, events.get(seen).map(with_time))
                });
                let mut noted = shared.lock().unwrap();
                let silent = noted.heard.elapsed();
                if silent > noted.longest && next.is_none() {
                    (noted.longest, noted.after, noted.until) = (silent, newest, None);
                } else if noted.until.is_none() {
                    noted.until = next;
                }
                if events != seen || !busy {
                    (seen, noted.heard) = (events, Instant::now());
                }
            }
        })
        .abort_handle();
        Self { noted, abort }
    }

    fn forget(&self) {
        let mut noted = self.noted.lock().unwrap();
        (noted.longest, noted.after, noted.until) = (Duration::ZERO, String::new(), None);
    }

    fn longest(&self) -> Duration {
        self.noted.lock().unwrap().longest
    }

    /// Waits until no silence lasts that had begun before.
    async fn heard(&self) {
        let now = Instant::now();
        until("a task to go on", PATIENCE, async || {
            let heard = self.noted.lock().unwrap().heard;
            if heard > now { Ok(()) } else { Err(heard.elapsed()) }
        })
        .await;
    }
}

/// How long a task may stand still when the process that worked for it is replaced or killed,
/// beyond how long tasks do anyhow.
const STILL: Duration = Duration::from_secs(5);
/// How long it does when nothing else is in the way.
const EXPECTED: Duration = Duration::from_secs(3);
/// From so many kills on the longest silence of a hundred is said of them; of fewer only the
/// longest of half.
const MANY: u32 = 25;

/// Kills a replica of `service` again and again under load, and tells how long the task stood still
/// that did so longest, each time: what most kills do to most tasks would hide what each does to
/// one. As many tasks as leave the processors some time: on full ones they wait for these.
async fn recovers(service: Service) {
    let (kills, tasks) = (sized("CONSTRUCT_SCALE_KILLS", 1), sized("CONSTRUCT_SCALE_TASKS", 4));
    let mut mesh = Mesh::start().await.unwrap();
    mesh.scripted_agent("worker", &script()).await.unwrap();
    let mut replica = mesh.replicate(service).await.unwrap();
    let beats = Beats::hear(&mesh).await;
    let jobs = begin_jobs(&mesh, tasks as usize).await;
    let stalls: Vec<Stalls> =
        jobs.iter().map(|(conversation, _)| Stalls::watch(conversation)).collect();
    let over = tokio::sync::watch::Sender::new(false);
    let speaking = futures::future::join_all(jobs.iter().map(async |(conversation, _)| {
        let mut said = vec!["Do it.".to_owned()];
        conversation.settled().await;
        while !*over.borrow() {
            let text = format!("And again, {}.", said.len());
            conversation.ask(&text).await;
            said.push(text);
        }
        said
    }));
    let killing = async {
        let (mut longest, mut undisturbed) = (Vec::new(), Vec::new());
        for _ in 0..kills {
            if service == Service::Reconciler {
                beats.shared(|_| true, 2).await;
            }
            // It is the time that passes which is measured: first some of it undisturbed, then what
            // a kill can hold up, and until that goes on.
            stalls.iter().for_each(Stalls::forget);
            tokio::time::sleep(Duration::from_secs(2)).await;
            undisturbed.extend(stalls.iter().map(Stalls::longest));
            stalls.iter().for_each(Stalls::forget);
            mesh.kill_replica(replica).unwrap();
            tokio::time::sleep(Duration::from_secs(5)).await;
            futures::future::join_all(stalls.iter().map(Stalls::heard)).await;
            longest.extend(stalls.iter().map(Stalls::longest).max());
            for (stall, (conversation, _)) in
                stalls.iter().zip(&jobs).filter(|(stall, _)| stall.longest() > EXPECTED)
            {
                let noted = stall.noted.lock().unwrap();
                println!(
                    "{}: {:?} between {} and {:?}",
                    conversation.id(),
                    noted.longest,
                    noted.after,
                    noted.until
                );
            }
            replica = mesh.replicate(service).await.unwrap();
        }
        over.send_replace(true);
        (longest, undisturbed)
    };
    let (said, (mut longest, undisturbed)) = tokio::join!(speaking, killing);
    for ((conversation, _), said) in jobs.iter().zip(&said) {
        let said: Vec<&str> = said.iter().map(String::as_str).collect();
        conversation.transcript().await.check(&said);
    }
    longest.sort_unstable();
    // The smallest that so many of them do not exceed: of fewer than a hundred, 99 % is all.
    let at = |share: f64| {
        longest[((longest.len() as f64 * share).ceil() as usize).clamp(1, longest.len()) - 1]
    };
    println!(
        "{service:?}: {kills} kills under {} tasks; of each the longest silence of a task: {:.2?} (p50), {:.2?} (p99), {:.2?} (longest); \
         undisturbed {:.2?} at most",
        jobs.len(),
        at(0.5),
        at(0.99),
        at(1.0),
        undisturbed.iter().max()
    );
    // The machine that runs the tests may stand still itself.
    let undisturbed = undisturbed.iter().max().copied().unwrap_or_default();
    let expected = if kills >= MANY { at(0.99) } else { at(0.5) };
    assert!(expected < EXPECTED + undisturbed && at(1.0) < STILL + undisturbed, "{longest:?}");
}

/// Each of so many turns had each effect once.
fn check_effects(folder: &std::path::Path, turns: usize) {
    let effects = read(&folder.join("effects.log"));
    for n in 1..=10 {
        let times = effects.lines().filter(|line| *line == n.to_string()).count();
        assert_eq!(times, turns, "effect {n} happened {times} times in {turns} turns: {effects}");
    }
}

/// How much of something there is: what the variable says, for runs by hand.
fn sized(variable: &str, otherwise: u32) -> u32 {
    std::env::var(variable).ok().and_then(|count| count.parse().ok()).unwrap_or(otherwise)
}

/// Processor time that a process has used so far.
fn processor(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    let ticks = |field: usize| fields[field].parse::<u64>().unwrap();
    // User and system time, in hundredths of a second.
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

#[tokio::test]
async fn idle_tasks_cost_no_memory_and_many_active_ones_are_all_answered() {
    let idle = sized("CONSTRUCT_SCALE_IDLE", 5_000);
    let active = sized("CONSTRUCT_SCALE_ACTIVE", 200);
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    SlackServer::start().await.configure(&mut mesh);
    mesh.start_services().await.unwrap();
    for service in Service::CLIENTS {
        mesh.spawn(service).unwrap();
        mesh.ready(service).await.unwrap();
    }
    let services: Vec<Service> = Service::ALL.into_iter().chain(Service::CLIENTS).collect();
    let script =
        json!({"count": "since_user", "turns": [{"code": "1 + 1"}, {"text": "{{last_result}}"}]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    mesh.client().unwrap().begin("worker", None).await.unwrap().ask("warm up").await;
    let memory = |mesh: &Mesh| {
        services.iter().map(|service| mesh.resident(*service).unwrap()).collect::<Vec<u64>>()
    };
    let local = OrganizationId::LOCAL;
    let before = memory(&mesh);
    mesh.database.fill_tasks(local, "worker", idle, None).await;
    let scans = mesh.database.task_table_scans().await;
    // Time for some sweeps.
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert_eq!(mesh.database.task_table_scans().await, scans, "idle tasks are read by somebody");
    let after = memory(&mesh);
    for ((service, before), after) in services.iter().zip(before).zip(after) {
        println!(
            "{service:?}: {} KiB before, {} KiB with {idle} idle tasks",
            before / 1024,
            after / 1024
        );
        assert!(after < before + (8 << 20), "{service:?}: {before} bytes before, {after} after");
    }
    let began = Instant::now();
    mesh.database.fill_tasks(local, "worker", active, Some("hello")).await;
    let patience = Duration::from_secs(60 + u64::from(active) / 4);
    let seconds = until("all to be answered", patience, async || {
        match mesh.database.answer_times(local).await {
            (seconds, 0) => Ok(seconds),
            (seconds, left) => Err((seconds.len(), left)),
        }
    })
    .await;
    let took = began.elapsed();
    println!(
        "{active} tasks at once: {took:?}; the slowest {:.1} s",
        seconds.last().copied().unwrap_or_default()
    );
    for (service, after) in services.iter().zip(memory(&mesh)) {
        println!("{service:?}: {} KiB after {active} active tasks", after / 1024);
    }
}

/// Measurements and long trials: `./dev test -P nightly`.
mod nightly {
    use super::*;

    #[tokio::test]
    async fn reconcilers_without_nats_keep_their_partitions() {
        let mut mesh = Mesh::start().await.unwrap();
        mesh.replicate(Service::Reconciler).await.unwrap();
        let beats = Beats::hear(&mesh).await;
        beats.shared(|_| true, 2).await;
        let changes = |mesh: &Mesh| {
            mesh.log(Service::Reconciler).matches("the partition assignment has changed").count()
        };
        let before = changes(&mesh);
        // It hangs for longer than a process may be silent, and is then gone for as long.
        // It is the time that passes which is tried here.
        mesh.nats.pause();
        tokio::time::sleep(Duration::from_secs(4)).await;
        mesh.nats.resume();
        tokio::time::sleep(Duration::from_secs(1)).await;
        mesh.nats.kill();
        tokio::time::sleep(Duration::from_secs(3)).await;
        mesh.nats.restart().await;
        tokio::time::sleep(Duration::from_secs(3)).await;
        assert_eq!(changes(&mesh), before, "{}", mesh.log(Service::Reconciler));
        mesh.scripted_agent("worker", &script()).await.unwrap();
        check_jobs(&begin_jobs(&mesh, 4).await).await;
    }

    #[tokio::test]
    async fn rolling_restart_loses_nothing_and_stalls_no_task() {
        let mut mesh = Mesh::start().await.unwrap();
        for service in [Service::Reconciler, Service::Interpreter, Service::Providers] {
            mesh.replicate(service).await.unwrap();
        }
        mesh.scripted_agent("worker", &script()).await.unwrap();
        let beats = Beats::hear(&mesh).await;
        beats.shared(|_| true, 2).await;
        let jobs = begin_jobs(&mesh, 6).await;
        let stalls: Vec<Stalls> =
            jobs.iter().map(|(conversation, _)| Stalls::watch(conversation)).collect();
        let over = tokio::sync::watch::Sender::new(false);
        // Each is given work again and again until everything was restarted.
        let speaking =
            futures::future::join_all(jobs.iter().map(async |(conversation, folder)| {
                let mut said = vec!["Do it.".to_owned()];
                conversation.settled().await;
                while !*over.borrow() {
                    check_effects(folder, said.len());
                    let text = format!("And again, {}.", said.len());
                    conversation.ask(&text).await;
                    said.push(text);
                }
                said
            }));
        let undisturbed = std::cell::Cell::new(Duration::ZERO);
        let restarting = async {
            // How long tasks stand still anyhow, on a machine that has other things to do.
            tokio::time::sleep(Duration::from_secs(2)).await;
            undisturbed.set(stalls.iter().map(Stalls::longest).max().unwrap());
            stalls.iter().for_each(Stalls::forget);
            for service in [
                Service::Reconciler,
                Service::Providers,
                Service::Interpreter,
                Service::Gateway,
                Service::Reconciler,
            ] {
                assert_eq!(
                    mesh.stop(service).await.unwrap(),
                    0,
                    "{service:?}:\n{}",
                    mesh.log(service)
                );
                mesh.spawn(service).unwrap();
                mesh.ready(service).await.unwrap();
            }
            over.send_replace(true);
        };
        let (said, ()) = tokio::join!(speaking, restarting);
        for ((conversation, folder), said) in jobs.iter().zip(&said) {
            let said: Vec<&str> = said.iter().map(String::as_str).collect();
            conversation.transcript().await.check(&said);
            check_effects(folder, said.len());
            assert!(!folder.join("unknown.log").exists(), "nothing was interrupted");
        }
        // Which nobody has kept from it.
        assert!(
            !mesh.log(Service::Reconciler).contains("takes part again"),
            "{}",
            mesh.log(Service::Reconciler)
        );
        let longest = stalls.iter().map(Stalls::longest).max().unwrap();
        let (turns, undisturbed) = (said.iter().map(Vec::len).sum::<usize>(), undisturbed.get());
        println!(
            "{turns} turns; the longest silence of a task was {longest:?}, undisturbed {undisturbed:?}"
        );
        assert!(longest < STILL + undisturbed, "a task stood still for {longest:?}");
    }

    #[tokio::test]
    async fn killed_reconciler_recovers_within_seconds() {
        recovers(Service::Reconciler).await;
    }

    #[tokio::test]
    async fn killed_providers_recover_within_seconds() {
        recovers(Service::Providers).await;
    }

    #[tokio::test]
    async fn killed_interpreter_recovers_within_seconds() {
        recovers(Service::Interpreter).await;
    }

    #[tokio::test]
    async fn organization_flooding_the_queue_does_not_delay_another() {
        let flood = sized("CONSTRUCT_SCALE_ACTIVE", 300);
        // One look at a time, so that it is the reconciler that is too small.
        let mesh = Mesh::start_with(&[("CONSTRUCT_RECONCILER_CONCURRENCY", "2")]).await.unwrap();
        let script = json!({"count": "since_user", "turns": [{"code": "1 + 1"}, {"text": "{{last_result}}"}]});
        mesh.scripted_agent("worker", &script).await.unwrap();
        let other = mesh.database.create_tenant("other").await;
        mesh.database.fill_tasks(OrganizationId::LOCAL, "worker", flood, Some("hello")).await;
        until("the flood to be noticed", PATIENCE, async || {
            let (done, left) = mesh.database.answer_times(OrganizationId::LOCAL).await;
            if done.len() >= 5 { Ok(()) } else { Err((done.len(), left)) }
        })
        .await;
        mesh.database.fill_tasks(other, "worker", 3, Some("hello")).await;
        // As somebody's who sends a message, and not when the sweep finds them.
        let page = Page { limit: 3, order: Order::default(), after: None };
        for task in
            mesh.database.store().task_list(other, &TaskFilter::default(), &page).await.unwrap()
        {
            let (organization_id, task_id) = (other.to_string(), task.state.id.to_string());
            let wake = TaskWake { organization_id, task_id, ..TaskWake::default() };
            mesh.bus().await.publish(&subject::TaskWake::new(task.state.id), &wake).await.unwrap();
        }
        let (seconds, left) =
            until("the other organization to be answered", PATIENCE, async || {
                match mesh.database.answer_times(other).await {
                    (seconds, 0) => {
                        Ok((seconds, mesh.database.answer_times(OrganizationId::LOCAL).await.1))
                    }
                    (_, left) => Err(left),
                }
            })
            .await;
        println!(
            "answered after {seconds:?} s, while {left} of {flood} tasks of the other organization waited"
        );
        assert!(
            i64::from(flood) / 2 < left,
            "the flood was over before: {left} of {flood} are left"
        );
    }

    #[tokio::test]
    async fn idle_reconcilers_use_little_processor_time() {
        let seconds = u64::from(sized("CONSTRUCT_SCALE_SECONDS", 5));
        let mut mesh = Mesh::start().await.unwrap();
        let mut pids = vec![mesh.pid(Service::Reconciler).unwrap()];
        for replicas in [1, 3] {
            while pids.len() < replicas {
                let replica = mesh.replicate(Service::Reconciler).await.unwrap();
                pids.push(mesh.replica_pid(replica).unwrap());
            }
            // It is what time costs that is measured.
            tokio::time::sleep(Duration::from_secs(2)).await;
            let nats = mesh.nats.pid().unwrap();
            let used =
                || (pids.iter().map(|pid| processor(*pid)).sum::<Duration>(), processor(nats));
            let before = used();
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            let after = used();
            let percent =
                |from: Duration, to: Duration| (to - from).as_secs_f64() / seconds as f64 * 100.0;
            let (reconcilers, nats) = (percent(before.0, after.0), percent(before.1, after.1));
            println!(
                "{replicas} idle reconcilers: {reconcilers:.2} % of a core together, NATS {nats:.2} %"
            );
            assert!(reconcilers < 10.0 * replicas as f64, "{reconcilers} %");
        }
    }
}
