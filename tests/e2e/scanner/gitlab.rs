//! A scan of a project on GitLab.

use construct_tests::gitlab::{Fault, GitLabServer, TOKEN};

use super::*;

async fn begin() -> (Mesh, GitLabServer) {
    let gitlab = GitLabServer::start().await;
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.set_env("CONSTRUCT_SCANNER_GITLAB_URL", gitlab.url());
    mesh.set_env("CONSTRUCT_SCANNER_TRUSTED_HOSTS", "127.0.0.1");
    mesh.start_services().await.unwrap();
    mesh.spawn(Service::Scanner).unwrap();
    mesh.wait_until_ready(Service::Scanner).await.unwrap();
    (mesh, gitlab)
}

fn commit(gitlab: &GitLabServer, project: &str) -> String {
    let config = format!("[api]\ntoken = \"{PLANTED}\"\n");
    gitlab.commit(
        project,
        &[
            ("README.md", ledger("").as_bytes()),
            ("tools/report.py", REPORT.as_bytes()),
            ("config.toml", config.as_bytes()),
        ],
    )
}

fn project_spec(project: &str, connection: &str) -> v1::ScanSpec {
    v1::ScanSpec {
        source: Some(v1::scan_spec::Source::Gitlab(project.to_owned())),
        connection: connection.to_owned(),
        model: "m".into(),
        ..v1::ScanSpec::default()
    }
}

async fn repositories(
    mesh: &Mesh,
    owner: &str,
) -> Result<v1::ListRepositoriesResponse, tonic::Status> {
    let request = v1::ListRepositoriesRequest {
        connection: "lab".into(),
        owner: owner.to_owned(),
        ..Default::default()
    };
    Ok(mesh.client().unwrap().scans().list_repositories(request).await?.into_inner())
}

#[tokio::test]
async fn gitlab_subgroup_and_public_projects_are_scanned() {
    let (mesh, gitlab) = begin().await;
    let (id, open) = (commit(&gitlab, "corp/tools/ledger"), commit(&gitlab, "corp/open"));
    gitlab.make_private("corp/tools/ledger");
    gitlab.commit("ann/own", &[("README.md", b"# Ann's\n")]);
    gitlab.add_user("ann");
    for number in 0..120 {
        gitlab.create(&format!("many/p{number:03}"));
    }
    mesh.scripted_agent("m", &json!([{"text": answer(&[valid_candidate()])}])).await.unwrap();
    let spec = v1::ScanConnectionSpec {
        name: "lab".into(),
        host: v1::ScanHost::Gitlab.into(),
        base_url: gitlab.url(),
        credential: Some(Credential::Token(TOKEN.into())),
    };
    let request = v1::CreateScanConnectionRequest { spec: Some(spec), ..Default::default() };
    mesh.client().unwrap().scans().create_scan_connection(request).await.unwrap();

    // The reachable projects: the user's own, a group's with its subgroups, another user's; page by
    // page.
    for (owner, names) in [
        ("", &["corp/tools/ledger"][..]),
        ("corp", &["corp/open", "corp/tools/ledger"]),
        ("ann", &["ann/own"]),
    ] {
        let found = repositories(&mesh, owner).await.unwrap();
        assert_eq!(
            found.repositories.iter().map(|one| one.name.as_str()).collect::<Vec<_>>(),
            names,
            "{owner}"
        );
        assert_eq!(found.next_page, 0, "{owner}");
    }
    let page = repositories(&mesh, "many").await.unwrap();
    assert_eq!((page.repositories.len(), page.next_page), (100, 2));
    let unknown = repositories(&mesh, "nobody").await.unwrap_err();
    assert!(
        unknown.code() == Code::FailedPrecondition && unknown.message().contains("not found"),
        "{unknown}"
    );

    // By the address that people copy. An excess archive is waited for.
    gitlab.fail("/archive", Fault::Throttled(1));
    let address = format!("{}/corp/tools/ledger.git", gitlab.url());
    let scan = create(&mesh, project_spec(&address, "lab")).await;
    let status = wait_for_phase(&mesh, &scan, Review).await;
    assert_eq!(
        (status.commit.as_str(), status.files, status.candidates),
        (id.as_str(), 3, 1),
        "{status:?}"
    );
    assert!(status.secrets_masked >= 1, "{status:?}");
    let found = repositories(&mesh, "").await.unwrap().repositories;
    assert_eq!((found[0].last_scan.as_str(), found[0].private), (scan.as_str(), true), "{found:?}");

    // A public project needs no connection; a private one is not found without one.
    let before = gitlab.requests().len();
    let scan = create(&mesh, project_spec("corp/open", "")).await;
    assert_eq!(wait_for_phase(&mesh, &scan, Review).await.commit, open);
    let scan = create(&mesh, project_spec("corp/tools/ledger", "")).await;
    let status = wait_for_phase(&mesh, &scan, v1::ScanPhase::Failed).await;
    assert!(status.reason.contains("not found"), "{status:?}");
    assert!(
        gitlab.requests()[before..].iter().all(|asked| !asked.credential),
        "{:?}",
        gitlab.requests()
    );
    // A connection to one kind of host does not work for the other.
    let wrong = v1::ScanSpec { connection: "lab".into(), ..scan_spec("octo/ledger", "m") };
    let request = v1::CreateScanRequest { spec: Some(wrong), ..Default::default() };
    let refused = mesh.client().unwrap().scans().create_scan(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");

    let (contents, logs) = (mesh.database.contents().await, logs(&mesh));
    for secret in [PLANTED, TOKEN] {
        assert!(!contents.contains(secret) && !logs.contains(secret), "{secret}");
    }
    assert_eq!(gitlab.complaints(), Vec::<String>::new());
}
