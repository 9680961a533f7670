//! Cancellation of executions, wherever they are.

use std::{fs::File, time::Instant};

use rustix::fs::FlockOperation;
use tokio::net::TcpListener;

use super::*;

/// Maximum duration of a cancellation on a machine that compiles meanwhile.
const MAX_CANCEL_TIME: Duration = Duration::from_secs(1);

/// Number of cancellations at one point.
const CANCELS: usize = 10;

/// Starts a process in its own session that holds a lock as long as it lives, and one that sleeps
/// for long.
const TREE: &str =
    r"(setsid sh -c 'exec 9>lock; flock 9; touch begun; sleep 300; true' &); sleep 300";

/// The same for several commands, which share the lock.
const SHARING_TREE: &str =
    r"(setsid sh -c 'exec 9>lock; flock -s 9; touch begun; sleep 300; true' &); sleep 300";

/// Cancels the script repeatedly, each time as a new step, and returns the reports.
async fn cancel_repeatedly(
    world: &mut World,
    place: &str,
    entries: usize,
) -> Vec<CodeInterpreterResult> {
    let (reports, took) = timed_cancels(world, place, entries).await;
    assert_prompt(place, took);
    reports
}

/// The same, with the duration of each cancellation.
async fn timed_cancels(
    world: &mut World,
    place: &str,
    entries: usize,
) -> (Vec<CodeInterpreterResult>, Vec<Duration>) {
    let (mut reports, mut took) = (Vec::new(), Vec::new());
    for _ in 0..CANCELS {
        world.command.step.as_mut().expect("it names a step").step_id =
            StepId::from_uuid(Uuid::now_v7()).to_string();
        // The file may not exist.
        let _ = std::fs::remove_file(world.path("begun"));
        let (result, elapsed) = cancel_once(world, place, entries).await;
        reports.push(result);
        took.push(elapsed);
    }
    (reports, took)
}

/// Asserts that the cancellations at one point keep the promise.
fn assert_prompt(place: &str, mut took: Vec<Duration>) {
    took.sort_unstable();
    println!("canceled in {place}: nothing was left after {took:?}");
    assert!(took.iter().all(|elapsed| *elapsed < MAX_CANCEL_TIME), "{place}: {took:?}");
}

/// Runs the script until the file `begun` exists and the journal has this many entries, and cancels
/// it. Returns the report, and the time until nothing of it was left.
async fn cancel_once(
    world: &mut World,
    place: &str,
    entries: usize,
) -> (CodeInterpreterResult, Duration) {
    let (begun, lock, step) = (world.path("begun"), world.path("lock"), world.step());
    let (running, journal) = (&world.executor.running, world.executor.bus.journal());
    let stop = async {
        wait_for(place, || begun.exists().then_some(())).await;
        while journal.load(step).await.expect("readable").entries.len() < entries {
            tokio::task::yield_now().await;
        }
        let began = Instant::now();
        running.cancel(step, "enough");
        began
    };
    let (end, began) = tokio::join!(world.executor.run(&world.command, 1), stop);
    wait_for("the processes to be gone", || is_free(&lock).then_some(())).await;
    let elapsed = began.elapsed();
    match end {
        ExecutionEnd::Outcome(step_result::Outcome::Cancelled(Cancelled {
            reason,
            mut results,
            ..
        })) => {
            assert_eq!(reason, "enough");
            (results.remove(0), elapsed)
        }
        _ => panic!("{place}: the script was not canceled"),
    }
}

/// Whether no process holds the lock.
fn is_free(lock: &Path) -> bool {
    File::open(lock).is_err()
        || File::options().write(true).open(lock).is_ok_and(|file| {
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok()
        })
}

#[tokio::test(flavor = "multi_thread")]
async fn computing_script_is_canceled() {
    for (place, then) in [
        ("a loop", "for (;;);"),
        ("a regular expression", "/^(a+)+$/.test('a'.repeat(40) + 'b')"),
        ("a loop of microtasks", "for (;;) await null;"),
        ("a loop of calls", "for (;;) pwd();"),
        (
            "a sort",
            "Array.from({ length: 3000000 }, (_, i) => -i).sort((a, b) => { for (let i = 0; i < 100; i++); return a - b })",
        ),
    ] {
        let mut world = World::new(&[&format!("create_file('begun', ''); {then}")]).await;
        for report in cancel_repeatedly(&mut world, place, 3).await {
            let expected = "Stopped: enough.\nCalls that had ended: #1 create_file";
            assert!(report.error.starts_with(expected), "{place}: {report:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_script_is_canceled() {
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let url = format!("http://{}/", silent.local_addr().expect("an address"));
    for (place, then, entries, under_way) in [
        ("a timer", "await new Promise(done => setTimeout(done, 1e8))".to_owned(), 3, "none."),
        ("a request", format!("fetch('{url}')"), 4, "#2 fetch."),
        (
            "64 requests",
            format!("await Promise.all(Array.from({{ length: 64 }}, () => tools.fetch('{url}')))"),
            67,
            "#2 fetch, #3",
        ),
    ] {
        let mut world =
            World::with_network_and_commands(&[&format!("create_file('begun', ''); {then}")]).await;
        let expected = format!("may or may not have had their effect: {under_way}");
        for report in cancel_repeatedly(&mut world, place, entries).await {
            assert!(report.error.contains(&expected), "{place}: {report:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn tool_over_thousands_of_files_is_canceled() {
    for (place, then) in [
        ("grep", "for (;;) grep('nothing like it', 'tree')"),
        ("find_file", "for (;;) find_file('tree/**/*.none')"),
        // Eight of them run at a time.
        (
            "64 searches",
            "for (;;) await Promise.all(Array.from({ length: 64 }, () => tools.grep('nothing like it', 'tree')))",
        ),
    ] {
        let mut world = World::new(&[&format!("create_file('begun', ''); {then}")]).await;
        let tree = world.path("").canonicalize().expect("the workspace").join("tree");
        create_tree(&tree);
        for report in cancel_repeatedly(&mut world, place, 3).await {
            let expected = "Stopped: enough.\nCalls that had ended: #1 create_file";
            assert!(report.error.starts_with(expected), "{place}: {report:?}");
        }
        wait_for("its threads to close the files", || has_no_open_files(&tree).then_some(())).await;
    }
}

/// A folder of ten thousand files.
fn create_tree(tree: &Path) {
    for folder in 0..100 {
        let folder = tree.join(folder.to_string());
        std::fs::create_dir_all(&folder).expect("made");
        for file in 0..100 {
            std::fs::write(folder.join(format!("{file}.txt")), "a line of text\n".repeat(20))
                .expect("written");
        }
    }
}

/// Whether this process has no open files below the folder: no thread works there any more.
fn has_no_open_files(folder: &Path) -> bool {
    let open = std::fs::read_dir("/proc/self/fd").expect("Linux").flatten();
    !open
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .any(|target| target.starts_with(folder))
}

#[tokio::test(flavor = "multi_thread")]
async fn importing_script_is_canceled() {
    // Once all modules are imported, the engine has them and the script continues without the host.
    let script =
        "create_file('begun', ''); for (let n = 0; ; n++) await import(`./module-${n % 256}.js`)";
    let mut world = World::new(&[script]).await;
    let first = world.path("module-0.js");
    std::fs::write(&first, "// a line of the module\n".repeat(4000) + "export default 1;\n")
        .expect("written");
    for module in 1..256 {
        std::fs::hard_link(&first, world.path(&format!("module-{module}.js"))).expect("linked");
    }
    for report in cancel_repeatedly(&mut world, "an import", 5).await {
        let expected = "Stopped: enough.\nCalls that had ended: #1 create_file, #2 import";
        assert!(report.error.starts_with(expected), "{report:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn running_and_queued_commands_are_canceled() {
    // Eight commands run at a time; the start of each is journaled.
    let script = format!(
        "await Promise.all(Array.from({{ length: 12 }}, () => tools.execute_command({})))",
        serde_json::json!(SHARING_TREE)
    );
    let mut world = World::with_network_and_commands(&[&script]).await;
    let (reports, took) = timed_cancels(&mut world, "the wait for a slot", 13).await;
    // Eight sandboxes are being created at the cancellation. The kernel finishes that first, which
    // takes longer than the promised time on two cores.
    assert!(took.iter().all(|elapsed| *elapsed < MAX_CANCEL_TIME), "{took:?}");
    for report in reports {
        let expected =
            "may or may not have had their effect: #1 execute_command, #2 execute_command,";
        assert!(
            report.error.contains(expected) && report.error.contains(", #12 execute_command."),
            "{report:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_are_canceled_with_their_processes() {
    let script = format!("execute_command({})", serde_json::json!(TREE));
    let unconfined = CommandSandbox::unavailable("a test");
    for (place, sandbox) in [
        ("a command", crate::command::tests::sandbox().await),
        ("an unconfined command", unconfined),
    ] {
        let egress = Egress::new(&[]).expect("made");
        let mut world =
            World::with_policy(&[&script], network_and_commands_policy(), egress, sandbox).await;
        for report in cancel_repeatedly(&mut world, place, 2).await {
            let expected = "may or may not have had their effect: #1 execute_command.";
            assert!(report.error.contains(expected), "{place}: {report:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn script_is_canceled_while_its_journal_hangs() {
    // Without a response of NATS no call can start, and the script cannot see the end of the first
    // one.
    let script = format!(
        "const tree = tools.execute_command({}); const files = []; \
         while (true) files.push(create_file(`file-${{files.length}}`, ''))",
        serde_json::json!(TREE)
    );
    let mut took = Vec::new();
    for _ in 0..CANCELS {
        took.push(cancel_while_the_journal_hangs(&script).await);
    }
    assert_prompt("an entry of the journal", took);
}

async fn cancel_while_the_journal_hangs(script: &str) -> Duration {
    let mut world = World::with_network_and_commands(&[script]).await;
    let (begun, lock, step) = (world.path("begun"), world.path("lock"), world.step());
    let World { executor, command, nats, .. } = &mut world;
    let stop = async {
        wait_for("the command to begin", || begun.exists().then_some(())).await;
        nats.pause();
        // The script does not wait for calls under way: wherever it is, it soon reaches its next
        // entry.
        let mut written = count(&begun);
        wait_for("the script to block", || {
            let before = std::mem::replace(&mut written, count(&begun));
            std::thread::sleep(Duration::from_millis(100));
            (before == count(&begun)).then_some(())
        })
        .await;
        let began = Instant::now();
        executor.running.cancel(step, "enough");
        wait_for("the processes to be gone", || is_free(&lock).then_some(())).await;
        began.elapsed()
    };
    let (end, elapsed) = tokio::join!(executor.run(command, 1), stop);
    assert!(
        matches!(end, ExecutionEnd::Outcome(step_result::Outcome::Cancelled(_))),
        "the script is canceled"
    );
    // The next process reports the same calls.
    nats.resume();
    // Right after the outage the journal may be unreadable, or pending entries may arrive: then the
    // command is delivered once more.
    let mut delivery = 2;
    let end = loop {
        match executor.run(command, delivery).await {
            ExecutionEnd::HandBack(_) | ExecutionEnd::Fenced if delivery < 10 => delivery += 1,
            end => break end,
        }
    };
    let ExecutionEnd::Outcome(step_result::Outcome::Cancelled(Cancelled { results, .. })) = end
    else {
        panic!("the script stays canceled");
    };
    assert!(
        results[0].error.contains("may or may not have had their effect: #1 execute_command"),
        "{results:?}"
    );
    elapsed
}

#[tokio::test(flavor = "multi_thread")]
async fn canceled_script_is_not_run_by_the_next_process() {
    let script = "create_file('begun', ''); await new Promise(done => setTimeout(done, 2000)); create_file('late', '')";
    let mut world = World::new(&[script]).await;
    cancel_once(&mut world, "a timer", 3).await;
    // A process without the cancellation: the one that had it crashed before it could acknowledge
    // the command.
    let sandbox = CommandSandbox::unavailable("a test needs none");
    let egress = Egress::new(&[]).expect("made");
    world.executor =
        executor(world.nats.bus().await, world.folder.path(), Policy::default(), egress, sandbox);
    world.deliveries = 1;
    let step_result::Outcome::Cancelled(Cancelled { reason, results, .. }) = world.run().await
    else {
        panic!("the script stays canceled");
    };
    assert_eq!(reason, "enough");
    assert!(results[0].error.contains("#1 create_file"), "{results:?}");
    assert!(!world.path("late").exists());
}

/// Number of files in the folder of this one.
fn count(file: &Path) -> usize {
    let folder = file.parent().expect("a parent folder");
    std::fs::read_dir(folder).expect("a folder").count()
}
