//! Results that are too large for an entry of the journal and lie beside it.

use std::sync::Arc;

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpListener,
    sync::watch,
};

use super::*;

const SIZE: usize = 3 << 20;

/// A server that gives three megabytes, each time others, and counts how often.
async fn server() -> (String, Arc<watch::Sender<usize>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
    let address = listener.local_addr().expect("an address");
    let asked = Arc::new(watch::Sender::new(0));
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            count.send_modify(|asked| *asked += 1);
            // The request is small and comes at once.
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let head =
                format!("HTTP/1.1 200 OK\r\nContent-Length: {SIZE}\r\nConnection: close\r\n\r\n");
            let last = count.borrow().to_string();
            let body = " ".repeat(SIZE - last.len()) + &last;
            let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
        }
    });
    (format!("http://{address}/"), asked)
}

async fn world() -> (World, Arc<watch::Sender<usize>>) {
    let (url, asked) = server().await;
    let script = format!(
        "const {{ body }} = fetch('{url}', {{ max_bytes: 4000000 }}); create_file('after', ''); [body.length, body.trim()]"
    );
    let mut world = World::granting(&["'first'", &script]).await;
    let results = world.completes().await;
    assert_eq!((results[1].error.as_str(), results[1].output.as_str()), ("", "[3145728,\"1\"]"));
    assert_eq!(*asked.borrow(), 1);
    std::fs::remove_file(world.path("after")).expect("it was made");
    (world, asked)
}

#[tokio::test]
async fn a_result_of_megabytes_is_answered_from_the_journal() {
    let (mut world, asked) = world().await;
    let results = world.completes().await;
    assert_eq!((results[1].error.as_str(), results[1].output.as_str()), ("", "[3145728,\"1\"]"));
    assert_eq!((*asked.borrow(), world.file("after")), (1, None), "nothing was done again");
}

#[tokio::test]
async fn a_result_that_is_gone_is_said_and_not_asked_for_again() {
    let (mut world, asked) = world().await;
    std::fs::remove_dir_all(world.nats.blobs().join("sha256")).expect("it lies there");
    let results = world.completes().await;
    // Of the script before it everything is known.
    assert_eq!((results[0].error.as_str(), results[0].output.as_str()), ("", "first"));
    let error = &results[1].error;
    assert!(
        error.starts_with("JournalUnreadable: the script was interrupted and is not continued"),
        "{error}"
    );
    assert!(error.contains("blob sha256:") && error.contains("is missing"), "{error}");
    assert!(error.contains("Calls that had ended: #2 create_file."), "{error}");
    assert!(error.contains("may or may not have had their effect: #1 fetch."), "{error}");
    assert_eq!((*asked.borrow(), world.file("after")), (1, None), "nothing was done again");
    // Nor does it help to try again.
    assert_eq!(world.completes().await, results);
}

#[tokio::test]
async fn a_result_that_was_damaged_is_said_and_not_taken() {
    let (mut world, asked) = world().await;
    let mut folder = world.nats.blobs();
    // sha256/<two digits>/<the other digits>
    while folder.is_dir() {
        folder = std::fs::read_dir(&folder)
            .expect("a folder")
            .next()
            .expect("it is not empty")
            .expect("an entry")
            .path();
    }
    let mut blob = std::fs::read(&folder).expect("the blob");
    blob[SIZE / 2] ^= 1;
    std::fs::write(&folder, blob).expect("written");
    let results = world.completes().await;
    assert!(results[1].error.contains("is corrupt"), "{results:?}");
    assert_eq!((*asked.borrow(), world.file("after")), (1, None), "nothing was done again");
}

#[tokio::test]
async fn a_call_whose_result_is_too_large_is_said_to_have_been_made() {
    let script = "try { execute_command('touch made; yes 0123456789 | head -c 100000') } catch (error) { `${error.name}: ${error.message}` }";
    let mut world = World::granting(&[script]).await;
    let overrides = Overrides { host_call_bytes: Some(10_000), ..Overrides::default() };
    let pools = compute::STANDARD.map(str::to_owned);
    world.executor.tiers = Tiers::new(&pools, &overrides, &BTreeMap::new()).expect("sound");
    let results = world.completes().await;
    assert!(
        results[0]
            .output
            .starts_with("CallResultLimitExceeded: the call was made, and what it did stands"),
        "{results:?}"
    );
    assert!(world.path("made").exists());
}
