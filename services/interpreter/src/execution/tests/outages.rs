//! Scripts while NATS is unavailable or has lost its data.

use construct_bus::topology::Stream;

use super::{subtasks::FakeReconciler, *};

/// A script that creates files, with a slow command between them.
const SCRIPT: &str = "
    create_file('first', '1');
    execute_command('touch begun; until test -e go-on; do sleep 0.01; done');
    create_file('second', '2');
    'done'";

fn journal_lost(results: &[CodeInterpreterResult]) -> bool {
    results.iter().all(|result| {
        result.error.starts_with("JournalUnreadable: ") && result.error.contains("lost")
    })
}

#[tokio::test]
async fn script_continues_after_an_outage_without_repeats() {
    let mut world = World::with_network_and_commands(&[SCRIPT]).await;
    let (begun, go_on) = (world.path("begun"), world.path("go-on"));
    let nats = Arc::clone(&world.nats);
    let outage = async {
        wait_for("the command to begin", || begun.exists().then_some(())).await;
        nats.pause();
        std::fs::write(&go_on, "").expect("written");
        // Longer than one attempt to write an entry.
        tokio::time::sleep(Duration::from_secs(6)).await;
        nats.resume();
    };
    let (results, ()) = tokio::join!(world.run_to_completion(), outage);
    assert_eq!(
        (results[0].output.as_str(), results[0].error.as_str()),
        ("done", ""),
        "{results:?}"
    );
    assert!(results[0].tool_uses.iter().all(|tool| tool.succeeded), "{results:?}");
}

#[tokio::test]
async fn script_stops_when_its_journal_is_lost() {
    let mut world = World::with_network_and_commands(&[SCRIPT, "create_file('third', '3')"]).await;
    let (begun, go_on) = (world.path("begun"), world.path("go-on"));
    let nats = Arc::clone(&world.nats);
    let loss = async {
        wait_for("the command to begin", || begun.exists().then_some(())).await;
        nats.recreate_stream(Stream::Journal).await;
        std::fs::write(&go_on, "").expect("written");
    };
    let (results, ()) = tokio::join!(world.run_to_completion(), loss);
    assert!(journal_lost(&results[..1]) && results[0].error.contains("create_file"), "{results:?}");
    assert!(results[1].error.starts_with("NotRun: "), "{results:?}");
    assert_eq!((world.file("second"), world.file("third")), (None, None));
}

#[tokio::test]
async fn lost_journal_prevents_another_run() {
    let mut world = World::new(&["create_file('first', '1'); 'done'", "'second'"]).await;
    // A process crashed before it wrote anything, and the command was sent again for lack of a
    // result: the script never started.
    world.command.may_have_been_sent = true;
    world.deliveries = 1;
    assert_eq!(world.run_to_completion().await[0].output, "done");

    world.nats.recreate_stream(Stream::Journal).await;
    std::fs::remove_file(world.path("first")).expect("removed");
    assert!(journal_lost(&world.run_to_completion().await), "delivered again");
    world.deliveries = 0;
    assert!(journal_lost(&world.run_to_completion().await), "sent again");
    assert_eq!(world.file("first"), None);

    // A new step runs.
    world.command = command(world.folder.path(), &["create_file('first', '1'); 'done'"]);
    world.command.may_have_been_sent = true;
    assert_eq!(world.run_to_completion().await[0].output, "done");
}

#[tokio::test]
async fn approved_call_is_not_made_after_journal_loss() {
    let mut world = World::new(&["create_file('secrets/key', 'k')"]).await;
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    world.nats.recreate_stream(Stream::Journal).await;
    world.decide(&request, true, "");
    assert!(journal_lost(&world.run_to_completion().await));
    assert_eq!(world.file("secrets/key"), None);
}

#[tokio::test]
async fn subtask_requests_wait_for_the_journal() {
    let script = "
        create_file('begun', '');
        await new Promise(done => setTimeout(done, 1000));
        tasks.spawn(read_file('begun') + 'go').task";
    let mut world = World::new(&[script]).await;
    let reconciler = FakeReconciler::open(&world).await;
    let (begun, nats) = (world.path("begun"), Arc::clone(&world.nats));
    let outage = async {
        wait_for("the script to begin", || begun.exists().then_some(())).await;
        nats.remove_stream(Stream::Journal).await;
        // Requests are still answered; only the end of the timer and the read content cannot be
        // written.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let calls = reconciler.calls();
        // The stream is created again, empty, so that the script ends.
        drop(nats.bus().await);
        calls
    };
    let (results, calls) = tokio::join!(world.run_to_completion(), outage);
    assert_eq!(calls, [], "the request might differ on replay");
    assert!(journal_lost(&results), "{results:?}");
    assert_eq!(reconciler.calls(), []);
}
