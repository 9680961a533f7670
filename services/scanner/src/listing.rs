//! Lists the repositories of connections for the gateway. No credential leaves this service.

use std::{sync::Arc, time::Duration};

use construct_bus::subject;
use construct_domain::OrganizationId;
use construct_proto::{mesh::v1 as mesh, v1};
use construct_store::scan::ScanHost;
use tokio_util::sync::CancellationToken;

use crate::{
    repository::{Listing, Owner, Repository, SourceError},
    scan::source,
    shared::Shared,
};

/// The delay before a subscription is retried.
const RETRY_DELAY: Duration = Duration::from_secs(2);

pub(super) async fn run(shared: Arc<Shared>, draining: CancellationToken) {
    while !draining.is_cancelled() {
        let answer = |question| {
            let shared = Arc::clone(&shared);
            async move { Some(answer_question(&shared, question).await) }
        };
        if let Err(error) =
            shared.bus.answer(&subject::ListRepositories, draining.clone(), answer).await
        {
            tracing::warn!(%error, "the subscription to repository questions failed");
        }
        tokio::select! {
            () = draining.cancelled() => {}
            () = tokio::time::sleep(RETRY_DELAY) => {}
        }
    }
}

async fn answer_question(shared: &Shared, question: mesh::RepositoriesQuery) -> mesh::Repositories {
    match list(shared, &question).await {
        Ok((repositories, next_page)) => {
            mesh::Repositories { repositories, next_page, failure: String::new() }
        }
        Err(failure) => mesh::Repositories { failure, ..mesh::Repositories::default() },
    }
}

async fn list(
    shared: &Shared,
    question: &mesh::RepositoriesQuery,
) -> Result<(Vec<v1::Repository>, u32), String> {
    let organization: OrganizationId =
        question.organization_id.parse().map_err(|_| "the question is malformed")?;
    let connection = shared.store.scan_connection_find(organization, &question.connection_id).await;
    let connection = connection.map_err(|error| error.to_string())?;
    let (owner, page) = (question.owner.as_str(), question.page.max(1));
    let listing = match connection.host {
        ScanHost::Gitlab => {
            let gitlab = source::gitlab_client(shared, Some(&connection))
                .map_err(|trouble| trouble.to_string())?;
            list_owner(owner, |owner| {
                let gitlab = gitlab.clone();
                async move { gitlab.projects(&owner, page).await }
            })
            .await
        }
        ScanHost::Github => {
            let github = source::github_client(shared, Some(&connection))
                .map_err(|trouble| trouble.to_string())?;
            list_owner(owner, |owner| {
                let github = github.clone();
                async move { github.repositories(&owner, page).await }
            })
            .await
        }
    };
    listing.map(|listing| to_page(listing, page)).map_err(|error| error.to_string())
}

/// A page of the connection's repositories, or of an owner's. A name does not tell whether it is an
/// organization's or a user's.
async fn list_owner<F>(name: &str, list: impl Fn(Owner) -> F) -> Result<Listing, SourceError>
where
    F: Future<Output = Result<Listing, SourceError>>,
{
    if name.is_empty() {
        return list(Owner::Connection).await;
    }
    match list(Owner::Organization(name.to_owned())).await {
        Err(SourceError::NotFound { .. }) => list(Owner::User(name.to_owned())).await,
        listing => listing,
    }
}

/// A page, and the number of the next one.
fn to_page(listing: Listing, page: u32) -> (Vec<v1::Repository>, u32) {
    let next = if listing.more { page.saturating_add(1) } else { 0 };
    (listing.repositories.into_iter().map(to_proto).collect(), next)
}

fn to_proto(repository: Repository) -> v1::Repository {
    v1::Repository {
        name: repository.full_name,
        description: repository.description.unwrap_or_default().chars().take(500).collect(),
        private: repository.private,
        default_branch: repository.default_branch.unwrap_or_default(),
        last_scan: String::new(),
    }
}
