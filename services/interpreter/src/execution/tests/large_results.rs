//! Results that are too large for a journal entry and are stored beside it.

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::watch,
};

use super::*;

const SIZE: usize = 3 << 20;

/// A server that returns three megabytes, each time different, and counts the requests.
async fn server() -> (String, Arc<watch::Sender<usize>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let request_count = Arc::new(watch::Sender::new(0));
    let count = Arc::clone(&request_count);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            count.send_modify(|count| *count += 1);
            // The request is small and arrives at once.
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\nConnection: close\r\n\r\n");
            let last = count.borrow().to_string();
            let body = " ".repeat(SIZE - last.len()) + &last;
            let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
        }
    });
    (format!("http://{address}/"), request_count)
}

async fn world() -> (World, Arc<watch::Sender<usize>>) {
    let (url, request_count) = server().await;
    let script = format!(
        "const {{ body }} = fetch('{url}', {{ max_bytes: 4000000 }}); create_file('after', ''); [body.length, body.trim()]"
    );
    let mut world = World::with_network_and_commands(&["'first'", &script]).await;
    let results = world.run_to_completion().await;
    assert_eq!((results[1].error.as_str(), results[1].output.as_str()), ("", "[3145728,\"1\"]"));
    assert_eq!(*request_count.borrow(), 1);
    std::fs::remove_file(world.path("after")).expect("the file exists");
    (world, request_count)
}

#[tokio::test]
async fn large_result_is_answered_from_the_journal() {
    let (mut world, request_count) = world().await;
    let results = world.run_to_completion().await;
    assert_eq!((results[1].error.as_str(), results[1].output.as_str()), ("", "[3145728,\"1\"]"));
    assert_eq!((*request_count.borrow(), world.file("after")), (1, None), "nothing was repeated");
}

#[tokio::test]
async fn missing_result_is_reported_and_not_requested_again() {
    let (mut world, request_count) = world().await;
    std::fs::remove_dir_all(world.nats.blobs().join("sha256")).expect("the blobs exist");
    let results = world.run_to_completion().await;
    // The script before it is complete.
    assert_eq!((results[0].error.as_str(), results[0].output.as_str()), ("", "first"));
    let error = &results[1].error;
    assert!(
        error.starts_with("JournalUnreadable: the script was interrupted and is not continued"),
        "{error}"
    );
    assert!(error.contains("blob sha256:") && error.contains("is missing"), "{error}");
    assert!(error.contains("Calls that had ended: #2 create_file."), "{error}");
    assert!(error.contains("may or may not have had their effect: #1 fetch."), "{error}");
    assert_eq!((*request_count.borrow(), world.file("after")), (1, None), "nothing was repeated");
    // Another delivery ends the same.
    assert_eq!(world.run_to_completion().await, results);
}

#[tokio::test]
async fn corrupt_result_is_reported_and_not_used() {
    let (mut world, request_count) = world().await;
    let mut folder = world.nats.blobs();
    // sha256/<two digits>/<the other digits>
    while folder.is_dir() {
        folder = std::fs::read_dir(&folder)
            .expect("a folder")
            .next()
            .expect("a non-empty folder")
            .expect("an entry")
            .path();
    }
    let mut blob = std::fs::read(&folder).expect("the blob");
    blob[SIZE / 2] ^= 1;
    std::fs::write(&folder, blob).expect("written");
    let results = world.run_to_completion().await;
    assert!(results[1].error.contains("is corrupt"), "{results:?}");
    assert_eq!((*request_count.borrow(), world.file("after")), (1, None), "nothing was repeated");
}

#[tokio::test]
async fn command_with_too_large_output_is_reported_as_run() {
    let script = "try { execute_command('touch made; yes 0123456789 | head -c 100000') } catch (error) { `${error.name}: ${error.message}` }";
    let mut world = World::with_network_and_commands(&[script]).await;
    let overrides = Overrides { host_call_bytes: Some(10_000), ..Overrides::default() };
    let pools = compute::STANDARD.map(str::to_owned);
    world.executor.tiers = Tiers::new(&pools, &overrides, &BTreeMap::new()).expect("valid limits");
    let results = world.run_to_completion().await;
    assert!(
        results[0].output.starts_with(
            "OutputTooLarge: execute_command: the command ran and ended with exit code 0"
        ),
        "{results:?}"
    );
    assert!(world.path("made").exists());
}
