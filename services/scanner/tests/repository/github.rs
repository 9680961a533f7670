//! GitHub as a source, against real HTTP servers.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use construct_scanner::repository::{
    ForgeClients, GitHub, GitHubAuth, Limit, Limits, Owner, Snapshot, SnapshotError, Source as _,
    SourceError, mask,
};
use construct_tests::github::{APP, APP_KEY, Fault, GitHubServer, INSTALLATION, TOKEN};
use jiff::Timestamp;
use secrecy::SecretString;

fn forge_clients() -> ForgeClients {
    ForgeClients::new(["127.0.0.1".to_owned()]).expect("a client")
}

fn connect(server: &GitHubServer, auth: &GitHubAuth) -> GitHub {
    GitHub::new(&forge_clients(), Some(&server.url()), auth).expect("the base is trusted")
}

fn with_token() -> GitHubAuth {
    GitHubAuth::Token(SecretString::from(TOKEN))
}

fn app() -> GitHubAuth {
    GitHubAuth::App {
        issuer: APP.to_owned(),
        installation: INSTALLATION,
        key: SecretString::from(APP_KEY),
    }
}

const FILES: &[(&str, &[u8])] =
    &[("README.md", b"# Hello\n"), ("src/main.rs", b"fn main() {}\n"), ("run.sh", b"#!/bin/sh\n")];

async fn take(
    server: &GitHubServer,
    auth: &GitHubAuth,
    name: &str,
    into: &Path,
) -> Result<Snapshot, SnapshotError> {
    let repository = connect(server, auth).repository(name)?;
    let commit = repository.resolve(None).await?;
    Snapshot::take(&repository, &commit, &Limits::default(), into).await
}

#[tokio::test]
async fn snapshot_is_taken_once_and_credential_stays_with_the_api() {
    let (server, into) = (GitHubServer::start().await, tempfile::tempdir().expect("a folder"));
    let id = server.commit("octo/hello", FILES);
    server.make_private("octo/hello");
    let snapshot =
        take(&server, &with_token(), "octo/hello", into.path()).await.expect("it is there");
    assert_eq!(snapshot.manifest().commit, id);
    assert_eq!(
        snapshot.manifest().files.keys().collect::<Vec<_>>(),
        ["README.md", "run.sh", "src/main.rs"]
    );
    let clean = mask(&snapshot).await.expect("the disk works");
    assert_eq!(clean.lines("src/main.rs", 1, 9), Some(vec!["fn main() {}".to_owned()]));
    assert!(
        clean.has_line("README.md", 1)
            && !clean.has_line("README.md", 2)
            && !clean.has_line("none", 1)
    );
    assert!(!clean.has_line("README.md", 0) && !clean.has_line("../README.md", 1));
    let mode = |path: &str| {
        std::os::unix::fs::MetadataExt::mode(
            &snapshot.path().join(path).metadata().expect("it is there"),
        )
    };
    assert_eq!((mode("run.sh") & 0o7777, mode("src") & 0o7777), (0o644, 0o755));
    assert!(snapshot.manifest().files["run.sh"].executable);

    let downloads = || server.requests().iter().filter(|asked| !asked.api).count();
    take(&server, &with_token(), "octo/hello", into.path()).await.expect("it is there");
    assert_eq!(downloads(), 1);
    assert_eq!(server.complaints(), [""; 0]);
    // Nothing unfinished is left beside it.
    assert_eq!(std::fs::read_dir(into.path()).expect("a folder").count(), 1);
}

#[tokio::test]
async fn references_are_resolved_to_commits() {
    let server = GitHubServer::start().await;
    let first = server.commit("octo/hello", FILES);
    server.tag("octo/hello", "feature/x", &first);
    let second = server.commit("octo/hello", &FILES[..1]);
    let repository =
        connect(&server, &GitHubAuth::Anonymous).repository("octo/hello").expect("a name");
    for (reference, id) in [
        (None, &second),
        (Some("main"), &second),
        (Some("feature/x"), &first),
        (Some(&first[..8]), &first),
    ] {
        assert_eq!(
            repository.resolve(reference).await.expect("it exists").id(),
            id,
            "{reference:?}"
        );
    }
    let missing = repository.resolve(Some("gone")).await;
    assert!(matches!(missing, Err(SourceError::NotFound { .. })), "{missing:?}");
}

#[tokio::test]
async fn hidden_removed_and_renamed_repositories_are_distinguished() {
    let (server, into) = (GitHubServer::start().await, tempfile::tempdir().expect("a folder"));
    server.commit("octo/private", FILES);
    server.make_private("octo/private");
    let hidden = take(&server, &GitHubAuth::Anonymous, "octo/private", into.path()).await;
    assert!(
        matches!(hidden, Err(SnapshotError::Source(SourceError::NotFound { .. }))),
        "{hidden:?}"
    );
    let bad = GitHubAuth::Token(SecretString::from("wrong"));
    let refused = take(&server, &bad, "octo/private", into.path()).await;
    assert!(
        matches!(refused, Err(SnapshotError::Source(SourceError::Denied { .. }))),
        "{refused:?}"
    );
    server.fail("/repos/octo/private", Fault::Status(451));
    let gone = take(&server, &with_token(), "octo/private", into.path()).await;
    assert!(matches!(gone, Err(SnapshotError::Source(SourceError::Gone { .. }))), "{gone:?}");
    server.rename("octo/private", "octo/new-name");
    take(&server, &with_token(), "octo/private", into.path())
        .await
        .expect("the redirect is followed");
    assert_eq!(server.complaints(), [""; 0]);
}

#[tokio::test]
async fn short_rate_limits_are_waited_out_and_long_ones_reported() {
    let server = GitHubServer::start().await;
    server.commit("octo/hello", FILES);
    let repository = connect(&server, &with_token()).repository("octo/hello").expect("a name");
    let began = Instant::now();
    server.fail("/repos/octo/hello", Fault::Secondary(1));
    repository.resolve(None).await.expect("it is asked again");
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    server.fail("/repos/octo/hello", Fault::Status(502));
    repository.resolve(None).await.expect("it is asked again");

    server.fail("/repos/octo/hello", Fault::Primary(1800));
    let limited = repository.resolve(None).await;
    let Err(SourceError::RateLimited { until }) = limited else { panic!("{limited:?}") };
    let left = until.duration_since(Timestamp::now()).as_secs();
    assert!((1700..=1800).contains(&left), "{left}");
    // Until then no request is sent.
    let asked = server.requests().len();
    let again = repository.resolve(None).await;
    assert!(matches!(again, Err(SourceError::RateLimited { .. })), "{again:?}");
    assert_eq!(server.requests().len(), asked);
}

#[tokio::test]
async fn exhausted_rate_limit_stops_requests() {
    let server = GitHubServer::start().await;
    server.commit("octo/hello", FILES);
    server.limit(2, 900);
    let repository = connect(&server, &with_token()).repository("octo/hello").expect("a name");
    repository.resolve(None).await.expect("two requests");
    assert!(matches!(repository.resolve(None).await, Err(SourceError::RateLimited { .. })));
    assert_eq!(server.requests().len(), 2);
}

#[tokio::test]
async fn unchanged_responses_are_not_sent_again() {
    let server = GitHubServer::start().await;
    server.commit("octo/hello", FILES);
    let repository = connect(&server, &with_token()).repository("octo/hello").expect("a name");
    let first = repository.resolve(None).await.expect("it exists");
    assert_eq!(repository.resolve(None).await.expect("it exists"), first);
    let statuses: Vec<(bool, u16)> =
        server.requests().iter().map(|asked| (asked.conditional, asked.status)).collect();
    assert_eq!(statuses, [(false, 200), (false, 200), (true, 304), (true, 304)]);
    let second = server.commit("octo/hello", &FILES[..1]);
    assert_eq!(repository.resolve(None).await.expect("it exists").id(), second);
}

#[tokio::test]
async fn app_token_is_reused_until_shortly_before_expiry() {
    let server = GitHubServer::start().await;
    server.commit("octo/hello", FILES);
    server.make_private("octo/hello");
    let github = connect(&server, &app());
    let repository = github.repository("octo/hello").expect("a name");
    repository.resolve(None).await.expect("the app may");
    repository.resolve(None).await.expect("the app may");
    assert_eq!((server.issued_tokens(), server.complaints()), (1, Vec::new()));
    // A token that is refused early is replaced.
    server.revoke_tokens();
    repository.resolve(None).await.expect("a new token");
    assert_eq!(server.issued_tokens(), 2);
    // A token that expires within minutes is not used for long operations.
    server.token_lifetime(200);
    server.revoke_tokens();
    repository.resolve(None).await.expect("a new token");
    let issued = server.issued_tokens();
    repository.resolve(None).await.expect("a new token");
    assert!(server.issued_tokens() > issued);
    assert_eq!(server.complaints(), [""; 0]);
    assert_eq!(
        github.repositories(&Owner::Connection, 1).await.expect("a list").repositories.len(),
        1
    );
}

#[tokio::test]
async fn repository_lists_are_read_page_by_page() {
    let server = GitHubServer::start().await;
    for number in 0..230 {
        server.commit(&format!("corp/r{number:03}"), &FILES[..1]);
    }
    server.commit("other/one", FILES);
    let github = connect(&server, &with_token());
    let owner = Owner::Organization("corp".to_owned());
    for (page, count, more) in [(1, 100, true), (2, 100, true), (3, 30, false), (4, 0, false)] {
        let listing = github.repositories(&owner, page).await.expect("a list");
        assert_eq!((listing.repositories.len(), listing.more), (count, more), "{page}");
    }
    // Each page needs one request, wherever it is in the list.
    assert_eq!(server.requests().len(), 4);
    let last = github.repositories(&owner, 3).await.expect("a list").repositories;
    assert_eq!(last[29].full_name, "corp/r229");
    assert!(github.repositories(&Owner::User("../x".to_owned()), 1).await.is_err());
}

#[tokio::test]
async fn broken_and_stalled_downloads_leave_nothing_behind() {
    let (server, into) = (GitHubServer::start().await, tempfile::tempdir().expect("a folder"));
    server.commit("octo/hello", FILES);
    let repository = connect(&server, &with_token()).repository("octo/hello").expect("a name");
    let commit = repository.resolve(None).await.expect("it exists");
    let limits = Limits { idle: Duration::from_millis(300), ..Limits::default() };
    server.fail("legacy.tar.gz", Fault::Truncate(100));
    let cut = Snapshot::take(&repository, &commit, &limits, into.path()).await;
    assert!(matches!(&cut, Err(SnapshotError::Source(SourceError::Unavailable { .. }))), "{cut:?}");
    server.fail("legacy.tar.gz", Fault::Drip);
    let slow = Snapshot::take(&repository, &commit, &limits, into.path()).await;
    assert!(
        matches!(&slow, Err(SnapshotError::Exceeded { limit: Limit::Download, .. })),
        "{slow:?}"
    );
    // No error contains the address, which holds a token.
    assert!(!format!("{cut:?}{slow:?}").contains("SECRETOFTHEADDRESS"));
    assert_eq!(std::fs::read_dir(into.path()).expect("a folder").count(), 0);
    Snapshot::take(&repository, &commit, &limits, into.path()).await.expect("now it is whole");
}

#[tokio::test]
async fn redirects_to_private_network_or_other_api_are_refused() {
    let server = GitHubServer::start().await;
    server.commit("octo/hello", FILES);
    let repository = connect(&server, &with_token()).repository("octo/hello").expect("a name");
    let commit = repository.resolve(None).await.expect("it exists");
    for to in [
        "http://169.254.169.254/latest/",
        "https://10.0.0.1/",
        "http://example.com/x.tgz",
        "https://[::1]/",
        "file:///etc/passwd",
    ] {
        server.fail("/tarball/", Fault::Redirect(to.to_owned()));
        let refused = repository.archive(&commit).await;
        assert!(matches!(refused, Err(SourceError::Forbidden { .. })), "{to}: {refused:?}");
    }
    server.fail("/commits/", Fault::Redirect("https://example.com/".to_owned()));
    let refused = repository.resolve(Some("main")).await;
    assert!(matches!(refused, Err(SourceError::Forbidden { .. })), "{refused:?}");
    // An organization's own base URL is not trusted by the operator.
    let untrusted = ForgeClients::new([]).expect("a client");
    assert!(GitHub::new(&untrusted, Some(&server.url()), &with_token()).is_err());
    assert!(!format!("{:?} {:?}", with_token(), connect(&server, &app())).contains("ghp_"));
}
