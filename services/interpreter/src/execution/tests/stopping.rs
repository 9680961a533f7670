//! Executions that are told to stop, wherever they are.

use std::{fs::File, time::Instant};

use rustix::fs::FlockOperation;
use tokio::net::TcpListener;

use super::*;

/// What a stop may take on a machine that compiles meanwhile.
const PROMPT: Duration = Duration::from_secs(1);

/// What is promised: of several stops in one place, half take less.
const PROMISED: Duration = Duration::from_millis(100);

/// How often is stopped in one place.
const STOPS: usize = 10;

/// Starts a process in a session of its own that holds a lock as long as it lives, and one that
/// does nothing for long.
const TREE: &str =
    r"(setsid sh -c 'exec 9>lock; flock 9; touch begun; sleep 300; true' &); sleep 300";

/// The same of several commands, which share the lock.
const SHARING_TREE: &str =
    r"(setsid sh -c 'exec 9>lock; flock -s 9; touch begun; sleep 300; true' &); sleep 300";

/// Stops the script again and again, each time as a step of its own, and gives what the model is
/// told.
async fn stops(world: &mut World, place: &str, entries: usize) -> Vec<CodeInterpreterResult> {
    let (told, took) = repeated_stops(world, place, entries).await;
    are_prompt(place, took);
    told
}

/// The same, with how long each took.
async fn repeated_stops(
    world: &mut World,
    place: &str,
    entries: usize,
) -> (Vec<CodeInterpreterResult>, Vec<Duration>) {
    let (mut told, mut took) = (Vec::new(), Vec::new());
    for _ in 0..STOPS {
        world.command.step.as_mut().expect("it names a step").step_id =
            StepId::from_uuid(Uuid::now_v7()).to_string();
        // Neither may be there.
        let _ = std::fs::remove_file(world.path("begun"));
        let (result, gone) = stop_once(world, place, entries).await;
        told.push(result);
        took.push(gone);
    }
    (told, took)
}

/// Whether stops in one place keep the promise.
fn are_prompt(place: &str, mut took: Vec<Duration>) {
    took.sort_unstable();
    println!("stopped in {place}: nothing of it was left after {took:?}");
    assert!(took.iter().all(|gone| *gone < PROMPT), "{place}: {took:?}");
    assert!(took[took.len() / 2] < PROMISED, "{place}: {took:?}");
}

/// Runs the script until there is a file `begun` and the journal has so many entries, tells it to
/// stop, and gives what the model is told, and how long it took until nothing of it was left.
async fn stop_once(
    world: &mut World,
    place: &str,
    entries: usize,
) -> (CodeInterpreterResult, Duration) {
    let (begun, lock, step) = (world.path("begun"), world.path("lock"), world.step());
    let (running, journal) = (&world.executor.running, world.executor.bus.journal());
    let stop = async {
        until(place, || begun.exists().then_some(())).await;
        while journal.load(step).await.expect("readable").entries.len() < entries {
            tokio::task::yield_now().await;
        }
        let began = Instant::now();
        running.cancel(step, "enough");
        began
    };
    let (end, began) = tokio::join!(world.executor.run(&world.command, 1), stop);
    until("the processes to be gone", || is_free(&lock).then_some(())).await;
    let gone = began.elapsed();
    match end {
        End::Outcome(step_result::Outcome::Cancelled(Cancelled {
            reason, mut results, ..
        })) => {
            assert_eq!(reason, "enough");
            (results.remove(0), gone)
        }
        _ => panic!("{place}: it is not stopped"),
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
async fn a_script_that_computes_is_stopped() {
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
        for told in stops(&mut world, place, 3).await {
            let what = "Stopped: enough.\nCalls that had ended: #1 create_file";
            assert!(told.error.starts_with(what), "{place}: {told:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_that_waits_is_stopped() {
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
        let mut world = World::granting(&[&format!("create_file('begun', ''); {then}")]).await;
        let what = format!("may or may not have had their effect: {under_way}");
        for told in stops(&mut world, place, entries).await {
            assert!(told.error.contains(&what), "{place}: {told:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_that_goes_through_thousands_of_files_is_stopped() {
    for (place, then) in [
        ("grep", "for (;;) grep('nothing like it', 'tree')"),
        ("find_file", "for (;;) find_file('tree/**/*.none')"),
        // Of which eight work.
        (
            "64 searches",
            "for (;;) await Promise.all(Array.from({ length: 64 }, () => tools.grep('nothing like it', 'tree')))",
        ),
    ] {
        let mut world = World::new(&[&format!("create_file('begun', ''); {then}")]).await;
        let tree = world.path("").canonicalize().expect("the workspace").join("tree");
        plant(&tree);
        for told in stops(&mut world, place, 3).await {
            let what = "Stopped: enough.\nCalls that had ended: #1 create_file";
            assert!(told.error.starts_with(what), "{place}: {told:?}");
        }
        until("its threads to let go of the files", || is_let_go(&tree).then_some(())).await;
    }
}

/// A folder of ten thousand files.
fn plant(tree: &Path) {
    for folder in 0..100 {
        let folder = tree.join(folder.to_string());
        std::fs::create_dir_all(&folder).expect("made");
        for file in 0..100 {
            std::fs::write(folder.join(format!("{file}.txt")), "a line of text\n".repeat(20))
                .expect("written");
        }
    }
}

/// Whether this process has nothing open below the folder: nobody works there any more.
fn is_let_go(folder: &Path) -> bool {
    let open = std::fs::read_dir("/proc/self/fd").expect("Linux").flatten();
    !open
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .any(|target| target.starts_with(folder))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_that_imports_is_stopped() {
    // When all of them are imported, the engine has them and the script goes on without the host.
    let script =
        "create_file('begun', ''); for (let n = 0; ; n++) await import(`./module-${n % 256}.js`)";
    let mut world = World::new(&[script]).await;
    let first = world.path("module-0.js");
    std::fs::write(&first, "// a line of the module\n".repeat(4000) + "export default 1;\n")
        .expect("written");
    for module in 1..256 {
        std::fs::hard_link(&first, world.path(&format!("module-{module}.js"))).expect("linked");
    }
    for told in stops(&mut world, "an import", 5).await {
        let what = "Stopped: enough.\nCalls that had ended: #1 create_file, #2 import";
        assert!(told.error.starts_with(what), "{told:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_are_stopped_of_which_some_wait_for_a_place() {
    // Eight run at the same time; each has its beginning journaled.
    let script = format!(
        "await Promise.all(Array.from({{ length: 12 }}, () => tools.execute_command({})))",
        serde_json::json!(SHARING_TREE)
    );
    let mut world = World::granting(&[&script]).await;
    let (told, took) = repeated_stops(&mut world, "the wait for a place", 13).await;
    // Eight sandboxes are being made at the moment of the stop: the kernel ends that first, on two
    // cores in more than the time that is promised.
    assert!(took.iter().all(|gone| *gone < PROMPT), "{took:?}");
    for told in told {
        let what = "may or may not have had their effect: #1 execute_command, #2 execute_command,";
        assert!(
            told.error.contains(what) && told.error.contains(", #12 execute_command."),
            "{told:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn commands_are_stopped_with_everything_they_started() {
    let script = format!("execute_command({})", serde_json::json!(TREE));
    let unconfined = CommandSandbox::unavailable("a test");
    for (place, sandbox) in [
        ("a command", crate::command::tests::sandbox().await),
        ("an unconfined command", unconfined),
    ] {
        let egress = Egress::new(&[]).expect("made");
        let mut world = World::with(&[&script], granting(), egress, sandbox).await;
        for told in stops(&mut world, place, 2).await {
            let what = "may or may not have had their effect: #1 execute_command.";
            assert!(told.error.contains(what), "{place}: {told:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_script_is_stopped_while_its_journal_hangs() {
    // Without an answer of NATS neither call can begin, and the script not see the end of the
    // first.
    let script = format!(
        "const tree = tools.execute_command({}); const files = []; \
         while (true) files.push(create_file(`file-${{files.length}}`, ''))",
        serde_json::json!(TREE)
    );
    let mut took = Vec::new();
    for _ in 0..STOPS {
        took.push(stop_while_the_journal_hangs(&script).await);
    }
    are_prompt("an entry of the journal", took);
}

async fn stop_while_the_journal_hangs(script: &str) -> Duration {
    let mut world = World::granting(&[script]).await;
    let (begun, lock, step) = (world.path("begun"), world.path("lock"), world.step());
    let World { executor, command, nats, .. } = &mut world;
    let stop = async {
        until("the command to begin", || begun.exists().then_some(())).await;
        nats.pause();
        // What is under way is not waited for: wherever the script is, it comes to its next entry
        // at once.
        let mut written = count(&begun);
        until("the script to stand still", || {
            let before = std::mem::replace(&mut written, count(&begun));
            std::thread::sleep(Duration::from_millis(100));
            (before == count(&begun)).then_some(())
        })
        .await;
        let began = Instant::now();
        executor.running.cancel(step, "enough");
        until("the processes to be gone", || is_free(&lock).then_some(())).await;
        began.elapsed()
    };
    let (end, gone) = tokio::join!(executor.run(command, 1), stop);
    assert!(matches!(end, End::Outcome(step_result::Outcome::Cancelled(_))), "it is stopped");
    // What is known of it is known to whoever goes on.
    nats.resume();
    // Right after NATS is back the journal may not be readable yet, or what was on its way to it
    // arrive: then the command comes once more.
    let mut delivery = 2;
    let end = loop {
        match executor.run(command, delivery).await {
            End::HandBack(_) | End::Fenced if delivery < 10 => delivery += 1,
            end => break end,
        }
    };
    let End::Outcome(step_result::Outcome::Cancelled(Cancelled { results, .. })) = end else {
        panic!("it stays stopped");
    };
    assert!(
        results[0].error.contains("may or may not have had their effect: #1 execute_command"),
        "{results:?}"
    );
    gone
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_stopped_is_not_run_by_whoever_gets_its_command_later() {
    let script = "create_file('begun', ''); await new Promise(done => setTimeout(done, 2000)); create_file('late', '')";
    let mut world = World::new(&[script]).await;
    stop_once(&mut world, "a timer", 3).await;
    // A process that was told nothing: the one that was has died before it could acknowledge the
    // command.
    let sandbox = CommandSandbox::unavailable("a test needs none");
    let egress = Egress::new(&[]).expect("made");
    world.executor =
        executor(world.nats.bus().await, world.folder.path(), Policy::default(), egress, sandbox);
    world.deliveries = 1;
    let step_result::Outcome::Cancelled(Cancelled { reason, results, .. }) = world.run().await
    else {
        panic!("it stays stopped");
    };
    assert_eq!(reason, "enough");
    assert!(results[0].error.contains("#1 create_file"), "{results:?}");
    assert!(!world.path("late").exists());
}

/// How many files lie beside this one.
fn count(file: &Path) -> usize {
    let folder = file.parent().expect("it lies in a folder");
    std::fs::read_dir(folder).expect("a folder").count()
}
