//! Scans that are killed or canceled in every phase.

use super::*;

/// A scan that is held in a phase until the caller continues it: for `Exploring`, by resuming the
/// providers.
pub(super) async fn pause_in_phase(
    mesh: &Mesh,
    github: &GitHubServer,
    phase: v1::ScanPhase,
) -> String {
    commit(github, "octo/ledger", "");
    let turns = json!({"count": "total", "turns": [{"text": answer(&[valid_candidate()])}]});
    mesh.scripted_agent("m", &turns).await.unwrap();
    match phase {
        Queued => github.fail("/commits/", Fault::Hang),
        Snapshot => github.fail("legacy.tar.gz", Fault::Drip),
        // No model answers, as long as the caller wants.
        Exploring => mesh.pause(Service::Providers).unwrap(),
        Survey => gate(mesh, "survey", "exploring").await,
        Checking => gate(mesh, "checking", "review").await,
        _ => {}
    }
    let scan = create(mesh, scan_spec("octo/ledger", "m")).await;
    wait_for_phase(mesh, &scan, phase).await;
    match phase {
        // The request before the one that hangs.
        Queued => wait_for_request(github, "/repos/octo/ledger").await,
        Snapshot => wait_for_request(github, "legacy.tar.gz").await,
        Exploring => {
            let task = get(mesh, &scan).await.status.unwrap().task_id;
            mesh.client()
                .unwrap()
                .conversation(&task)
                .wait_for_phase(v1::TaskPhase::InvokeModel)
                .await;
        }
        Survey | Checking => {
            until("the end of the phase to be written", SCAN_TIMEOUT, async || {
                match mesh.database.waiting_statements("PgSleep").await {
                    0 => Err("no statement writes it"),
                    _ => Ok(()),
                }
            })
            .await;
        }
        _ => {}
    }
    scan
}

/// Makes the database refuse the transition between two phases, after a delay.
async fn gate(mesh: &Mesh, from: &str, to: &str) {
    mesh.database
        .execute(&format!(
            "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_sleep(2); RAISE EXCEPTION 'the gate is shut'; END $$;
             CREATE TRIGGER gate BEFORE UPDATE ON scans FOR EACH ROW
                 WHEN (OLD.phase = '{from}' AND NEW.phase = '{to}') EXECUTE FUNCTION gate()"
        ))
        .await;
}

/// Waits until the host received this request.
async fn wait_for_request(github: &GitHubServer, path: &str) {
    until(path, SCAN_TIMEOUT, async || {
        let asked = github.requests();
        if asked.iter().any(|asked| asked.path.contains(path)) { Ok(()) } else { Err(asked) }
    })
    .await;
}

#[tokio::test]
async fn killed_scanner_resumes_where_it_was() {
    for phase in [Queued, Snapshot, Survey, Exploring, Checking] {
        let (mut mesh, github) = begin().await;
        let scan = pause_in_phase(&mesh, &github, phase).await;
        mesh.crash(Service::Scanner).await.unwrap();
        mesh.resume(Service::Providers).unwrap();
        mesh.database.execute("DROP TRIGGER IF EXISTS gate ON scans").await;
        let status = wait_for_phase(&mesh, &scan, Review).await;
        assert_eq!(status.candidates, 1, "{phase:?}: {status:?}");
        // The task was asked once.
        let told = transcript(&mesh, &scan).await;
        assert_eq!(
            told.matches("propose what in it would make a good tool").count(),
            1,
            "{phase:?}: {told}"
        );
        let all = events(&mesh, &scan).await;
        assert_eq!(
            all.iter().map(|event| event.sequence).collect::<Vec<_>>(),
            (1..=status.event_sequence).collect::<Vec<_>>()
        );
    }
}

#[tokio::test]
async fn scan_is_canceled_in_every_phase() {
    for phase in [Queued, Snapshot, Survey, Exploring, Checking] {
        let (mesh, github) = begin().await;
        let scan = pause_in_phase(&mesh, &github, phase).await;
        let request = v1::CancelScanRequest {
            scan: scan.clone(),
            reason: "not now".into(),
            ..Default::default()
        };
        let client = mesh.client().unwrap();
        assert!(
            client
                .scans()
                .cancel_scan(request.clone())
                .await
                .unwrap()
                .into_inner()
                .status
                .unwrap()
                .cancel_requested
        );
        let status = wait_for_phase(&mesh, &scan, v1::ScanPhase::Cancelled).await;
        assert_eq!((status.reason.as_str(), status.candidates), ("not now", 0), "{phase:?}");
        let task = client.conversation(&status.task_id).wait_until_idle().await.status.unwrap();
        let outcome = match phase {
            Exploring => v1::TurnOutcome::Cancelled,
            Checking => v1::TurnOutcome::Completed,
            _ => v1::TurnOutcome::Unspecified,
        };
        assert_eq!(task.last_outcome(), outcome, "{phase:?}");
        mesh.resume(Service::Providers).unwrap();
        // A second cancel changes nothing.
        client.scans().cancel_scan(request).await.unwrap();
        until("the files to be deleted", SCAN_TIMEOUT, async || {
            let left: Vec<_> = std::fs::read_dir(mesh.scans()).unwrap().collect();
            if left.is_empty() { Ok(()) } else { Err(format!("{left:?}")) }
        })
        .await;
    }
}
