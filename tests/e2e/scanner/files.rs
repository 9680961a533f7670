//! The files of scans: retention, and deletion of orphans.

use construct_domain::ScanId;

use super::*;

/// Whether a folder of this name is in the folder of scan files.
fn exists(mesh: &Mesh, name: &str) -> bool {
    mesh.scans().join(name).exists()
}

/// Waits until a folder is deleted.
async fn wait_until_deleted(mesh: &Mesh, name: &str) {
    until(
        name,
        SCAN_TIMEOUT,
        async || if exists(mesh, name) { Err("it is there") } else { Ok(()) },
    )
    .await;
}

/// Moves the end of a scan to before the retention period.
async fn expire(mesh: &Mesh, scan: &str) {
    let id: ScanId = scan.parse().unwrap();
    mesh.database
        .execute(&format!(
            "UPDATE scans SET ended_at = ended_at - interval '13 hours' WHERE id = '{}'",
            id.uuid()
        ))
        .await;
}

#[tokio::test]
async fn files_follow_retention_and_orphans_are_deleted() {
    let (mesh, github) = begin_with(&[("CONSTRUCT_SCANNER_KEEP_SNAPSHOTS", "12h")]).await;
    let commit = commit(&github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    mesh.scripted_agent("slow", &json!([{"delay_ms": 900_000, "text": "late"}])).await.unwrap();
    let packed = tarball("t", &"0".repeat(40), &[("tools/report.py", REPORT.as_bytes())]);
    let upload = v1::ScanUpload { archive: packed, name: "ledger.tar.gz".into() };
    let upload =
        v1::ScanSpec { source: Some(v1::scan_spec::Source::Upload(upload)), ..scan_spec("", "m") };
    let (done, sent) =
        (create(&mesh, scan_spec("octo/ledger", "m")).await, create(&mesh, upload).await);
    let open = create(&mesh, scan_spec("octo/ledger", "slow")).await;
    for scan in [&done, &sent] {
        wait_for_phase(&mesh, scan, Review).await;
    }
    wait_for_phase(&mesh, &open, Exploring).await;
    // As left by dead processes: for a deleted scan, and for one that was never created.
    let nobody = ScanId::from_uuid(Uuid::now_v7()).to_string();
    let unmasked = format!(".unmasked-{}", ScanId::from_uuid(Uuid::now_v7()));
    for left in [&nobody, &unmasked] {
        let folder = mesh.scans().join(left).join(".taking-x/tree");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("a.py"), REPORT).unwrap();
    }
    // Other content of the folder is not the scanner's.
    std::fs::create_dir(mesh.scans().join("lost+found")).unwrap();
    for left in [&nobody, &unmasked] {
        wait_until_deleted(&mesh, left).await;
    }

    let tree = |scan: &str| mesh.scans().join(scan).join(&commit).join("tree/tools/report.py");
    let blobs = mesh.home().join("data/blobs");
    assert!(
        tree(&done).is_file()
            && tree(&open).is_file()
            && exists(&mesh, &sent)
            && exists(&mesh, "lost+found")
    );
    assert_eq!(archives::files(&blobs).len(), 1);
    // After the retention period they are deleted, each with its uploaded archive; an active scan
    // keeps its files.
    for scan in [&done, &sent] {
        expire(&mesh, scan).await;
        wait_until_deleted(&mesh, scan).await;
    }
    until("the archive to be deleted", SCAN_TIMEOUT, async || {
        let left = archives::files(&blobs);
        if left.is_empty() { Ok(()) } else { Err(left) }
    })
    .await;
    assert!(tree(&open).is_file() && exists(&mesh, "lost+found"));
    let request =
        v1::CancelScanRequest { scan: open.clone(), reason: "enough".into(), ..Default::default() };
    mesh.client().unwrap().scans().cancel_scan(request).await.unwrap();
    wait_for_phase(&mesh, &open, v1::ScanPhase::Cancelled).await;
    assert!(tree(&open).is_file(), "it is over, and kept");
    expire(&mesh, &open).await;
    wait_until_deleted(&mesh, &open).await;
    assert!(exists(&mesh, "lost+found"));
}

#[tokio::test]
async fn interrupted_deletion_is_finished_by_the_next_scanner() {
    let (mut mesh, github) = begin().await;
    // It is killed while it fetches, which leaves half of the files, and the scan ends before
    // another scanner starts.
    let scan = interruptions::pause_in_phase(&mesh, &github, Snapshot).await;
    let unmasked = format!(".unmasked-{scan}");
    until("its folder", SCAN_TIMEOUT, async || {
        if exists(&mesh, &unmasked) { Ok(()) } else { Err("it is not there") }
    })
    .await;
    mesh.kill(Service::Scanner).unwrap();
    // Another finished scan's files were not deleted yet.
    let over = create(&mesh, scan_spec("octo/ledger", "m")).await;
    let id: ScanId = over.parse().unwrap();
    mesh.database
        .execute(&format!(
            "UPDATE scans SET phase = 'failed', reason = 'test', ended_at = now(), next_wake = NULL WHERE id = '{}'",
            id.uuid()
        ))
        .await;
    std::fs::create_dir_all(mesh.scans().join(&over).join("x/tree")).unwrap();
    let request =
        v1::CancelScanRequest { scan: scan.clone(), reason: "enough".into(), ..Default::default() };
    mesh.client().unwrap().scans().cancel_scan(request).await.unwrap();
    mesh.spawn(Service::Scanner).unwrap();
    wait_for_phase(&mesh, &scan, v1::ScanPhase::Cancelled).await;
    for name in [&unmasked, &over] {
        wait_until_deleted(&mesh, name).await;
    }
    wait_until_clean(&mesh).await;
}
