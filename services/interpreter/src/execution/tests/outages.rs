//! What becomes of scripts when NATS is away, or has lost what it kept.

use construct_bus::topology::Stream;

use super::{subtasks::Desk, *};

/// One script that makes three files, with a command that takes its time between them.
const SCRIPT: &str = "
    create_file('first', '1');
    execute_command('touch begun; until test -e go-on; do sleep 0.01; done');
    create_file('second', '2');
    'done'";

fn lost(results: &[CodeInterpreterResult]) -> bool {
    results.iter().all(|result| {
        result.error.starts_with("JournalUnreadable: ") && result.error.contains("lost")
    })
}

#[tokio::test]
async fn a_script_goes_on_when_nats_is_back_and_repeats_nothing() {
    let mut world = World::granting(&[SCRIPT]).await;
    let (begun, go_on) = (world.path("begun"), world.path("go-on"));
    let nats = Arc::clone(&world.nats);
    let outage = async {
        until("the command to begin", || begun.exists().then_some(())).await;
        nats.pause();
        std::fs::write(&go_on, "").expect("written");
        // Longer than one try to write an entry takes.
        tokio::time::sleep(Duration::from_secs(6)).await;
        nats.resume();
    };
    let (results, ()) = tokio::join!(world.completes(), outage);
    assert_eq!(
        (results[0].output.as_str(), results[0].error.as_str()),
        ("done", ""),
        "{results:?}"
    );
    assert!(results[0].tool_uses.iter().all(|tool| tool.succeeded), "{results:?}");
}

#[tokio::test]
async fn a_script_whose_journal_is_lost_under_it_stops_and_says_so() {
    let mut world = World::granting(&[SCRIPT, "create_file('third', '3')"]).await;
    let (begun, go_on) = (world.path("begun"), world.path("go-on"));
    let nats = Arc::clone(&world.nats);
    let loss = async {
        until("the command to begin", || begun.exists().then_some(())).await;
        nats.recreate_stream(Stream::Journal).await;
        std::fs::write(&go_on, "").expect("written");
    };
    let (results, ()) = tokio::join!(world.completes(), loss);
    assert!(lost(&results[..1]) && results[0].error.contains("create_file"), "{results:?}");
    assert!(results[1].error.starts_with("NotRun: "), "{results:?}");
    assert_eq!((world.file("second"), world.file("third")), (None, None));
}

#[tokio::test]
async fn a_script_that_may_have_run_is_not_run_when_its_journal_is_lost() {
    let mut world = World::new(&["create_file('first', '1'); 'done'", "'second'"]).await;
    // Given to a process that died before it wrote anything, and sent again because no result came:
    // it never began.
    world.command.again = true;
    world.deliveries = 1;
    assert_eq!(world.completes().await[0].output, "done");

    world.nats.recreate_stream(Stream::Journal).await;
    std::fs::remove_file(world.path("first")).expect("removed");
    assert!(lost(&world.completes().await), "delivered again");
    world.deliveries = 0;
    assert!(lost(&world.completes().await), "sent again");
    assert_eq!(world.file("first"), None);

    // One that is wanted for the first time now is run.
    world.command = command(world.folder.path(), &["create_file('first', '1'); 'done'"]);
    world.command.again = true;
    assert_eq!(world.completes().await[0].output, "done");
}

#[tokio::test]
async fn what_a_person_has_approved_is_not_done_when_nobody_knows_what_was_done_before() {
    let mut world = World::new(&["create_file('secrets/key', 'k')"]).await;
    let asked = world.parks().await.calls.remove(0);
    world.nats.recreate_stream(Stream::Journal).await;
    world.decide(&asked, true, "");
    assert!(lost(&world.completes().await));
    assert_eq!(world.file("secrets/key"), None);
}

#[tokio::test]
async fn nothing_is_asked_of_other_tasks_before_what_it_follows_from_is_written() {
    let script = "
        create_file('begun', '');
        await new Promise(done => setTimeout(done, 1000));
        tasks.spawn(read_file('begun') + 'go').task";
    let mut world = World::new(&[script]).await;
    let desk = Desk::open(&world).await;
    let (begun, nats) = (world.path("begun"), Arc::clone(&world.nats));
    let outage = async {
        until("the script to begin", || begun.exists().then_some(())).await;
        nats.remove_stream(Stream::Journal).await;
        // Questions are still answered; only the end of the timer and what was read cannot be
        // written.
        tokio::time::sleep(Duration::from_secs(3)).await;
        let asked = desk.calls();
        // The stream is made anew, without what was in it, so that the script ends.
        drop(nats.bus().await);
        asked
    };
    let (results, asked) = tokio::join!(world.completes(), outage);
    assert_eq!(asked, [], "nobody knows whether it would be asked again");
    assert!(lost(&results), "{results:?}");
    assert_eq!(desk.calls(), []);
}
