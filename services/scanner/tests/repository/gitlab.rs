//! GitLab as a source, against a real HTTP server.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use construct_scanner::repository::{
    ForgeClients, GitLab, Limits, Listing, Owner, Repository, Snapshot, SnapshotError, Source as _,
    SourceError, mask,
};
use construct_tests::gitlab::{Fault, GitLabServer, TOKEN};
use jiff::Timestamp;
use secrecy::SecretString;

const FILES: &[(&str, &[u8])] =
    &[("README.md", b"# Hello\n"), ("src/main.rs", b"fn main() {}\n"), ("run.sh", b"#!/bin/sh\n")];

fn connect(server: &GitLabServer, token: Option<&str>) -> GitLab {
    let reach = ForgeClients::new(["127.0.0.1".to_owned()]).expect("a client");
    GitLab::new(&reach, Some(&server.url()), token.map(SecretString::from))
        .expect("the base is trusted")
}

async fn take(
    server: &GitLabServer,
    token: Option<&str>,
    name: &str,
    into: &Path,
) -> Result<Snapshot, SnapshotError> {
    let project = connect(server, token).project(name)?;
    let commit = project.resolve(None).await?;
    Snapshot::take(&project, &commit, &Limits::default(), into).await
}

fn names(repositories: &[Repository]) -> Vec<&str> {
    repositories.iter().map(|repository| repository.full_name.as_str()).collect()
}

#[tokio::test]
async fn subgroup_project_is_fetched_with_private_token() {
    let (server, into) = (GitLabServer::start().await, tempfile::tempdir().expect("a folder"));
    let id = server.commit("corp/tools/hello.rs", FILES);
    server.make_private("corp/tools/hello.rs");
    let snapshot =
        take(&server, Some(TOKEN), "corp/tools/hello.rs", into.path()).await.expect("it is there");
    assert_eq!(snapshot.manifest().commit, id);
    // GitLab's root folder is removed.
    assert_eq!(
        snapshot.manifest().files.keys().collect::<Vec<_>>(),
        ["README.md", "run.sh", "src/main.rs"]
    );
    let clean = mask(&snapshot).await.expect("the disk works");
    assert_eq!(clean.lines("src/main.rs", 1, 9), Some(vec!["fn main() {}".to_owned()]));
    let asked: Vec<_> = server
        .requests()
        .into_iter()
        .map(|asked| (asked.path, asked.query, asked.credential))
        .collect();
    let project = "/projects/corp%2Ftools%2Fhello.rs";
    let expected = [
        (project.to_owned(), String::new(), true),
        (format!("{project}/repository/commits/main"), String::new(), true),
        (format!("{project}/repository/archive.tar.gz"), format!("sha={id}"), true),
    ];
    assert_eq!(asked, expected);
    assert_eq!(server.complaints(), [""; 0]);
    assert!(!format!("{:?}", connect(&server, Some(TOKEN))).contains("glpat"));
}

#[tokio::test]
async fn references_are_resolved_to_commits() {
    let server = GitLabServer::start().await;
    let first = server.commit("corp/hello", FILES);
    server.tag("corp/hello", "feature/x", &first);
    server.tag("corp/hello", "v1.0", &first);
    let second = server.commit("corp/hello", &FILES[..1]);
    let project = connect(&server, None).project("corp/hello").expect("a name");
    for (reference, id) in [
        (None, &second),
        (Some("main"), &second),
        (Some("feature/x"), &first),
        (Some("v1.0"), &first),
        (Some(&first[..8]), &first),
    ] {
        assert_eq!(project.resolve(reference).await.expect("it exists").id(), id, "{reference:?}");
    }
    let missing = project.resolve(Some("gone")).await;
    assert!(matches!(missing, Err(SourceError::NotFound { .. })), "{missing:?}");
    // A project without commits has no default branch.
    server.create("corp/empty");
    let empty = connect(&server, None).project("corp/empty").expect("a name").resolve(None).await;
    let Err(SourceError::NotFound { subject }) = empty else { panic!("{empty:?}") };
    assert_eq!(subject, "a commit of corp/empty");
}

#[tokio::test]
async fn hidden_removed_and_moved_projects_are_distinguished() {
    let (server, into) = (GitLabServer::start().await, tempfile::tempdir().expect("a folder"));
    server.commit("corp/private", FILES);
    server.make_private("corp/private");
    let hidden = take(&server, None, "corp/private", into.path()).await;
    assert!(
        matches!(hidden, Err(SnapshotError::Source(SourceError::NotFound { .. }))),
        "{hidden:?}"
    );
    let refused = take(&server, Some("wrong"), "corp/private", into.path()).await;
    assert!(
        matches!(refused, Err(SnapshotError::Source(SourceError::Denied { .. }))),
        "{refused:?}"
    );
    server.fail("/projects/", Fault::Status(451));
    let gone = take(&server, Some(TOKEN), "corp/private", into.path()).await;
    assert!(matches!(gone, Err(SnapshotError::Source(SourceError::Gone { .. }))), "{gone:?}");
    server.rename("corp/private", "corp/tools/new-name");
    take(&server, Some(TOKEN), "corp/private", into.path())
        .await
        .expect("the redirect is followed");
    assert_eq!(server.complaints(), [""; 0]);
}

#[tokio::test]
async fn short_rate_limits_are_waited_out_and_long_ones_reported() {
    let server = GitLabServer::start().await;
    server.commit("corp/hello", FILES);
    let project = connect(&server, Some(TOKEN)).project("corp/hello").expect("a name");
    let began = Instant::now();
    server.fail("/commits/", Fault::Throttled(1));
    let commit = project.resolve(None).await.expect("it is asked again");
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    server.fail("/commits/", Fault::Status(502));
    project.resolve(None).await.expect("it is asked again");

    // Archives have their own limit, which names no time; the reported limit is far from exhausted.
    server.fail("/archive", Fault::TooOften);
    let limited = project.archive(&commit).await;
    let Err(SourceError::RateLimited { until }) = limited else { panic!("{limited:?}") };
    let left = until.duration_since(Timestamp::now()).as_secs();
    assert!((50..=60).contains(&left), "{left}");

    let project = connect(&server, Some(TOKEN)).project("corp/hello").expect("a name");
    server.fail("/projects/", Fault::Throttled(1800));
    let limited = project.resolve(None).await;
    let Err(SourceError::RateLimited { until }) = limited else { panic!("{limited:?}") };
    let left = until.duration_since(Timestamp::now()).as_secs();
    assert!((1700..=1800).contains(&left), "{left}");
    // Until then no request is sent.
    let asked = server.requests().len();
    let again = project.archive(&commit).await;
    assert!(matches!(again, Err(SourceError::RateLimited { .. })), "{again:?}");
    assert_eq!(server.requests().len(), asked);
}

#[tokio::test]
async fn exhausted_rate_limit_stops_requests() {
    let server = GitLabServer::start().await;
    server.commit("corp/hello", FILES);
    server.limit(2, 900);
    let project = connect(&server, Some(TOKEN)).project("corp/hello").expect("a name");
    project.resolve(None).await.expect("two requests");
    assert!(matches!(project.resolve(None).await, Err(SourceError::RateLimited { .. })));
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn unchanged_responses_are_not_sent_again() {
    let server = GitLabServer::start().await;
    server.commit("corp/hello", FILES);
    let gitlab = connect(&server, Some(TOKEN));
    let resolve = async || {
        gitlab.project("corp/hello").expect("a name").resolve(None).await.expect("it exists")
    };
    let first = resolve().await;
    // All projects of a connection share the cache.
    assert_eq!(resolve().await, first);
    let statuses: Vec<(bool, u16)> =
        server.requests().iter().map(|asked| (asked.conditional, asked.status)).collect();
    assert_eq!(statuses, [(false, 200), (false, 200), (true, 304), (true, 304)]);
    let second = server.commit("corp/hello", &FILES[..1]);
    assert_eq!(resolve().await.id(), second);
}

#[tokio::test]
async fn project_lists_cover_groups_with_subgroups_and_users() {
    let server = GitLabServer::start().await;
    for number in 0..130 {
        server.commit(&format!("corp/r{number:03}"), &FILES[..1]);
    }
    for number in 0..100 {
        server.create(&format!("corp/tools/deep/s{number:03}"));
    }
    for name in ["other/one", "corporate/two", "ann/three"] {
        server.commit(name, FILES);
    }
    server.make_private("other/one");
    server.make_private("corp/tools/deep/s000");
    server.add_user("ann");
    let gitlab = connect(&server, Some(TOKEN));
    let organization = |name: &str| Owner::Organization(name.to_owned());
    let mut all = Vec::new();
    for (page, (count, is_more)) in [(100, true), (100, true), (30, false)].into_iter().enumerate()
    {
        let Listing { repositories: found, more } = gitlab
            .projects(&organization("corp"), u32::try_from(page + 1).expect("few"))
            .await
            .expect("a page");
        assert_eq!((found.len(), more), (count, is_more), "{page}");
        all.extend(found);
    }
    // One request per page, and each project once.
    assert_eq!(server.requests().len(), 3);
    let unique: std::collections::BTreeSet<&str> = names(&all).into_iter().collect();
    assert_eq!((unique.len(), all[129].full_name.as_str()), (230, "corp/r129"));
    let deep = &all[130];
    assert_eq!(
        (deep.full_name.as_str(), deep.private, deep.default_branch.as_deref()),
        ("corp/tools/deep/s000", true, None)
    );
    assert!(!all[0].private && all[0].default_branch.as_deref() == Some("main"), "{:?}", all[0]);

    let Listing { repositories: below, more } =
        gitlab.projects(&organization("corp/tools"), 1).await.expect("a page");
    assert_eq!((below.len(), more), (100, false));
    let Listing { repositories: mine, .. } =
        gitlab.projects(&Owner::Connection, 1).await.expect("a page");
    assert_eq!(names(&mine), ["corp/tools/deep/s000", "other/one"]);
    let Listing { repositories: hers, .. } =
        gitlab.projects(&Owner::User("ann".to_owned()), 1).await.expect("a page");
    assert_eq!(names(&hers), ["ann/three"]);
    for unknown in [organization("ann"), organization("nobody"), Owner::User("corp".to_owned())] {
        let refused = gitlab.projects(&unknown, 1).await;
        assert!(matches!(refused, Err(SourceError::NotFound { .. })), "{unknown:?}: {refused:?}");
    }
    for odd in ["../x", "", "a//b", "a b", "corp/%2e%2e"] {
        assert!(
            matches!(
                gitlab.projects(&organization(odd), 1).await,
                Err(SourceError::Invalid { .. })
            ),
            "{odd}"
        );
    }
    assert_eq!(server.complaints(), [""; 0]);
}

#[tokio::test]
async fn broken_downloads_leave_nothing_and_credential_stays() {
    let (server, into) = (GitLabServer::start().await, tempfile::tempdir().expect("a folder"));
    server.commit("corp/hello", FILES);
    server.fail("/archive", Fault::Truncate(100));
    let cut = take(&server, Some(TOKEN), "corp/hello", into.path()).await;
    assert!(matches!(&cut, Err(SnapshotError::Source(SourceError::Unavailable { .. }))), "{cut:?}");
    assert_eq!(std::fs::read_dir(into.path()).expect("a folder").count(), 0);

    let project = connect(&server, Some(TOKEN)).project("corp/hello").expect("a name");
    let commit = project.resolve(None).await.expect("it exists");
    for to in ["http://169.254.169.254/latest/", "https://10.0.0.1/", "file:///etc/passwd"] {
        server.fail("/archive", Fault::Redirect(to.to_owned()));
        let refused = project.archive(&commit).await;
        assert!(matches!(refused, Err(SourceError::Forbidden { .. })), "{to}: {refused:?}");
    }
    let elsewhere = GitLabServer::start().await;
    elsewhere.commit("corp/hello", FILES);
    let there = format!(
        "{}/api/v4/projects/1/repository/archive.tar.gz?sha={}",
        elsewhere.url(),
        commit.id()
    );
    server.fail("/archive", Fault::Redirect(there.clone()));
    Snapshot::take(&project, &commit, &Limits::default(), into.path())
        .await
        .expect("archives may lie elsewhere");
    assert_eq!(
        elsewhere.requests().iter().map(|asked| asked.credential).collect::<Vec<_>>(),
        [false]
    );
    server.fail("/commits/", Fault::Redirect(there));
    let refused = project.resolve(Some("main")).await;
    assert!(matches!(refused, Err(SourceError::Forbidden { .. })), "{refused:?}");
    assert_eq!((elsewhere.requests().len(), elsewhere.complaints()), (1, Vec::new()));
    // An organization's own address is not trusted by the operator.
    let untrusted = ForgeClients::new([]).expect("a client");
    assert!(GitLab::new(&untrusted, Some(&server.url()), None).is_err());
}
