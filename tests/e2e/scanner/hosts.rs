//! GitHub's failures and rate limits, and connections to it.

use construct_tests::github::{APP, APP_KEY, INSTALLATION};
use jiff::Timestamp;

use super::*;

#[tokio::test]
async fn failing_host_is_retried_and_missing_repository_reported() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    github.fail("/repos/octo/ledger", Fault::Status(502));
    let scan = create(&mesh, scan_spec("octo/ledger", "m")).await;
    wait_for_phase(&mesh, &scan, Review).await;
    let scan = create(&mesh, scan_spec("octo/nowhere", "m")).await;
    let status = wait_for_phase(&mesh, &scan, v1::ScanPhase::Failed).await;
    assert!(status.reason.contains("not found"), "{status:?}");
}

#[tokio::test]
async fn host_answers_and_app_tokens_are_cached_per_connection() {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    github.make_private("octo/ledger");
    let app = v1::GitHubApp {
        app_id: APP.to_owned(),
        installation_id: INSTALLATION.to_string(),
        private_key: APP_KEY.to_owned(),
    };
    connect(&mesh, &github, "app", Credential::App(app)).await;
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    let spec = || v1::ScanSpec { connection: "app".into(), ..scan_spec("octo/ledger", "m") };
    let first = create(&mesh, spec()).await;
    wait_for_phase(&mesh, &first, Review).await;
    let before = github.requests();
    assert!(before.iter().all(|asked| !asked.conditional), "{before:#?}");
    let second = create(&mesh, spec()).await;
    wait_for_phase(&mesh, &second, Review).await;
    let after = github.requests().split_off(before.len());
    let unchanged = after.iter().filter(|asked| asked.conditional && asked.status == 304).count();
    // The repository's branch, and its commit.
    assert_eq!(unchanged, 2, "{after:#?}");
    assert_eq!((github.issued_tokens(), github.complaints()), (1, Vec::new()));
    // The repositories are listed through the same client, with the same token.
    let request = v1::ListRepositoriesRequest { connection: "app".into(), ..Default::default() };
    let listed = mesh
        .client()
        .unwrap()
        .scans()
        .list_repositories(request)
        .await
        .unwrap()
        .into_inner()
        .repositories;
    assert_eq!(
        listed.iter().map(|one| one.last_scan.as_str()).collect::<Vec<_>>(),
        [second.as_str()]
    );
    assert_eq!(github.issued_tokens(), 1);
}

#[tokio::test]
async fn rate_limited_host_is_spared_by_all_scans() {
    let faults: [fn(u32) -> Fault; 2] =
        [|s| Fault::Primary(s.into()), |s| Fault::Secondary(s.into())];
    for fault in faults {
        // On a busy machine the state may be over before it is checked.
        let mut seconds = 15;
        while !is_spared(fault, seconds).await {
            seconds *= 3;
            assert!(seconds < 200, "the machine is too slow for this test");
        }
    }
}

/// False when the host's waiting time was over before everything was checked.
async fn is_spared(fault: fn(u32) -> Fault, seconds: u32) -> bool {
    let (mesh, github) = begin().await;
    commit(&github, "octo/ledger", "");
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    // The host counts in whole seconds.
    let reset = Timestamp::now().as_second() + i64::from(seconds) - 1;
    github.fail("/repos/octo/ledger", fault(seconds));
    let mut scans = Vec::new();
    let mut asked = None;
    for _ in 0..3 {
        let scan = create(&mesh, scan_spec("octo/ledger", "m")).await;
        let waits = until("the scan to wait for the host", SCAN_TIMEOUT, async || {
            let status = get(&mesh, &scan).await.status.unwrap();
            let over = Timestamp::now().as_second() >= reset;
            let waits = status.reason.contains("rate limit");
            if waits || over {
                Ok(Some(status).filter(|_| waits && !over))
            } else {
                Err(format!("{status:?}"))
            }
        })
        .await;
        let Some(status) = waits else { return false };
        assert!(
            status.phase() == Queued && status.next_wake.unwrap().seconds >= reset,
            "{reset}: {status:?}"
        );
        scans.push(scan);
        asked.get_or_insert_with(|| github.requests());
    }
    // A waiting scan reacts to requests.
    let request = v1::CancelScanRequest {
        scan: scans[2].clone(),
        reason: "enough".into(),
        ..Default::default()
    };
    mesh.client().unwrap().scans().cancel_scan(request).await.unwrap();
    assert_eq!(wait_for_phase(&mesh, &scans[2], v1::ScanPhase::Cancelled).await.reason, "enough");
    let now = github.requests();
    if Timestamp::now().as_second() >= reset {
        return false;
    }
    assert_eq!(Some(now), asked, "it is left alone");
    for scan in &scans[..2] {
        wait_for_phase(&mesh, scan, Review).await;
        let told = events(&mesh, scan).await;
        assert_eq!(told.iter().filter(|event| event.r#type == "waiting").count(), 1, "{told:#?}");
    }
    assert!(Timestamp::now().as_second() >= reset);
    true
}

/// All pages of a connection's repositories, of one owner or all: the number on each, and the
/// names.
async fn list_pages(
    mesh: &Mesh,
    connection: &str,
    owner: &str,
) -> Result<(Vec<usize>, Vec<String>), tonic::Status> {
    let (mut pages, mut names, mut page) = (Vec::new(), Vec::new(), 1);
    while page != 0 {
        let request = v1::ListRepositoriesRequest {
            connection: connection.to_owned(),
            owner: owner.to_owned(),
            page,
        };
        let listed = mesh.client().unwrap().scans().list_repositories(request).await?.into_inner();
        pages.push(listed.repositories.len());
        names.extend(listed.repositories.into_iter().map(|one| one.name));
        assert!(
            listed.next_page == 0 || listed.next_page == page + 1,
            "{page}: {}",
            listed.next_page
        );
        page = listed.next_page;
    }
    Ok((pages, names))
}

#[tokio::test]
async fn repositories_of_token_app_and_user_are_paged() {
    let (mesh, github) = begin().await;
    let many: Vec<String> = (0..230).map(|number| format!("many/r{number:03}")).collect();
    for name in &many {
        github.create(name);
    }
    let own: Vec<String> = (0..101).map(|number| format!("ann/r{number:03}")).collect();
    for name in &own {
        github.create(name);
    }
    github.add_user("ann");
    github.make_private("many/r117");
    connect(&mesh, &github, "work", Credential::Token(TOKEN.into())).await;
    let app = v1::GitHubApp {
        app_id: APP.to_owned(),
        installation_id: INSTALLATION.to_string(),
        private_key: APP_KEY.to_owned(),
    };
    connect(&mesh, &github, "app", Credential::App(app)).await;
    let all: Vec<String> = own.iter().chain(&many).cloned().collect();
    for connection in ["work", "app"] {
        assert_eq!(
            list_pages(&mesh, connection, "").await.unwrap(),
            (vec![100, 100, 100, 31], all.clone()),
            "{connection}"
        );
        assert_eq!(
            list_pages(&mesh, connection, "many").await.unwrap(),
            (vec![100, 100, 30], many.clone()),
            "{connection}"
        );
        // A user is no organization, which a request shows.
        assert_eq!(
            list_pages(&mesh, connection, "ann").await.unwrap(),
            (vec![100, 1], own.clone()),
            "{connection}"
        );
        let nobody = list_pages(&mesh, connection, "nobody").await.unwrap_err();
        assert!(
            nobody.code() == Code::FailedPrecondition && nobody.message().contains("not found"),
            "{nobody}"
        );
    }
    // One token served all of the app's requests.
    assert_eq!((github.issued_tokens(), github.complaints()), (1, Vec::new()));
    let asked: Vec<String> = github.requests().into_iter().map(|asked| asked.path).collect();
    for (path, times) in
        [("/user/repos", 4), ("/installation/repositories", 4), ("/users/ann/repos", 4)]
    {
        assert_eq!(asked.iter().filter(|asked| *asked == path).count(), times, "{path}: {asked:?}");
    }
    // After the last page there is nothing.
    let request =
        v1::ListRepositoriesRequest { connection: "work".into(), page: 9, ..Default::default() };
    let behind =
        mesh.client().unwrap().scans().list_repositories(request).await.unwrap().into_inner();
    assert_eq!((behind.repositories.len(), behind.next_page), (0, 0));
}
