//! Events of a scan, for clients that stay, disconnect and return, or lose their gateway.

use tokio::sync::watch;

use super::*;
use crate::protocols::follow_events;

/// Events from a cursor on, until `wanted` accepts one; or all.
async fn watch_until(
    mesh: &Mesh,
    scan: &str,
    cursor: &str,
    wanted: impl Fn(&v1::ScanEvent) -> bool,
) -> Vec<v1::ScanEvent> {
    let request = v1::WatchScanRequest { scan: scan.to_owned(), cursor: cursor.to_owned() };
    // A restarting gateway is not available at once.
    let mut stream = until("the gateway to be there", SCAN_TIMEOUT, async || {
        let stream = mesh.client().unwrap().scans().watch_scan(request.clone()).await;
        stream.map(tonic::Response::into_inner).map_err(|status| status.to_string())
    })
    .await;
    let mut seen = Vec::new();
    while let Some(event) =
        tokio::time::timeout(SCAN_TIMEOUT, stream.message()).await.unwrap().unwrap()
    {
        let is_enough = wanted(&event);
        seen.push(event);
        if is_enough {
            break;
        }
    }
    seen
}

#[tokio::test]
async fn scan_watcher_misses_and_repeats_nothing() {
    let (mut mesh, github) = begin().await;
    let commit = commit(&github, "octo/ledger", "");
    let read = format!(
        "read_file('{commit}/tree/README.md'); grep('def', '{commit}/tree').matches.length"
    );
    let script = json!({"turns": [
        {"text": "Let me look.", "code": read},
        {"delay_ms": 4000, "text": answer(&[valid_candidate()])},
    ]});
    mesh.scripted_agent("m", &script).await.unwrap();
    // No model answers before the gateway has been killed, so that the scan cannot be over by then.
    mesh.pause(Service::Providers).unwrap();
    let scan = create(&mesh, scan_spec("octo/ledger", "m")).await;
    let url = format!("{}/v1/scans/{scan}/events", mesh.gateway_url());
    let (seen, _) = watch::channel(Vec::new());
    let follower = follow_events(url, seen.clone());

    // A client that watches, disconnects, and returns twice: the second time to a restarted
    // gateway.
    let mut all = watch_until(&mesh, &scan, "", |event| event.phase() == Snapshot).await;
    assert!(
        get(&mesh, &scan).await.status.unwrap().next_wake.is_some(),
        "it was told while it happened"
    );
    let cursor = all.last().unwrap().cursor.clone();
    all.extend(watch_until(&mesh, &scan, &cursor, |event| event.phase() == Exploring).await);
    mesh.crash(Service::Gateway).await.unwrap();
    mesh.resume(Service::Providers).unwrap();
    let cursor = all.last().unwrap().cursor.clone();
    all.extend(watch_until(&mesh, &scan, &cursor, |_| false).await);

    let status = wait_for_phase(&mesh, &scan, Review).await;
    let expected: Vec<i64> = (1..=status.event_sequence).collect();
    assert_eq!(all.iter().map(|event| event.sequence).collect::<Vec<_>>(), expected, "{all:#?}");
    assert_eq!(all, events(&mesh, &scan).await, "a later watch has the same events");
    assert!(all.iter().all(|event| event.scan_id == scan && event.time.is_some()), "{all:#?}");

    // Each has the progress: files once they are there, cost, findings.
    let first = |phase| all.iter().find(|event| event.phase() == phase).unwrap();
    assert_eq!((first(Queued).files, first(Survey).files), (0, 3), "{all:#?}");
    assert!(all.is_sorted_by_key(|event| (event.cost_pico_usd, event.candidates)), "{all:#?}");
    let last = all.last().unwrap();
    assert_eq!((last.phase(), last.files, last.candidates), (Review, 3, 1), "{last:?}");
    assert!(last.cost_pico_usd > 0 && last.cost_pico_usd == status.cost_pico_usd, "{last:?}");
    assert!(all.iter().any(|event| event.tool_calls >= 2), "{all:#?}");

    // The same as server-sent events, whose ids are the cursors.
    let told = until("the last event", SCAN_TIMEOUT, async || {
        let seen = seen.borrow().clone();
        if seen.len() >= all.len() { Ok(seen) } else { Err(seen) }
    })
    .await;
    follower.abort();
    let told: Vec<&str> = told.iter().map(|event| event["sequence"].as_str().unwrap()).collect();
    assert_eq!(told, expected.iter().map(i64::to_string).collect::<Vec<_>>());
    // An invalid cursor is refused.
    let request = v1::WatchScanRequest { scan, cursor: "nonsense".into() };
    let refused = mesh.client().unwrap().scans().watch_scan(request).await.map(drop).unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
}
