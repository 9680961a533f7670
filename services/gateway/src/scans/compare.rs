//! The differences between two scans of a repository.

use std::collections::{BTreeMap, BTreeSet};

use construct_domain::ScanId;
use construct_proto::v1::{CandidateContent, CompareScansResponse};
use construct_store::scan::ScanPhase;
use construct_wire::scan as show;
use tonic::Status;

use super::find_scan;
use crate::{api::CallerContext, status};

/// Paths that are listed for each kind of change, as the contract says.
const MAX_LISTED_PATHS: usize = 1000;

pub(super) async fn compare(
    context: &CallerContext,
    (before_named, before): (&str, ScanId),
    (after_named, after): (&str, ScanId),
) -> Result<CompareScansResponse, Status> {
    let (earlier, later) = (
        find_scan(context, before_named, before).await?,
        find_scan(context, after_named, after).await?,
    );
    if earlier.repository != later.repository {
        return Err(Status::invalid_argument("after: is a scan of another repository"));
    }
    // Otherwise all candidates of one scan would seem added or removed.
    for (named, scan) in [(before_named, &earlier), (after_named, &later)] {
        if scan.phase != ScanPhase::Review {
            return Err(Status::failed_precondition(format!(
                "the scan {named} has no candidates to compare yet"
            )));
        }
    }
    let (store, organization) = (context.store(), context.organization());
    let manifests = (
        store.scan_manifest(organization, before).await.map_err(status::from_store)?,
        store.scan_manifest(organization, after).await.map_err(status::from_store)?,
    );
    for (named, manifest) in [(before_named, &manifests.0), (after_named, &manifests.1)] {
        if manifest.is_empty() {
            return Err(Status::failed_precondition(format!(
                "the scan {named} has no list of files: it has not reached them, or there are too many"
            )));
        }
    }
    let mut contents = Vec::new();
    for scan in [before, after] {
        let found =
            store.candidate_list(organization, scan, None).await.map_err(status::from_store)?;
        contents.push(
            found
                .iter()
                .filter_map(|candidate| show::content(&candidate.content))
                .collect::<Vec<_>>(),
        );
    }
    let mut answer = compare_files(&manifests.0, &manifests.1);
    (answer.commit_before, answer.commit_after) = (earlier.commit, later.commit);
    compare_candidates(
        &mut answer,
        &contents[0],
        &contents[1],
        &changed(&manifests.0, &manifests.1),
    );
    Ok(answer)
}

/// Path and hash of each file. A line is a hash, a space and a path.
fn parse_manifest(manifest: &str) -> BTreeMap<&str, &str> {
    manifest
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(hash, path)| (path, hash))
        .collect()
}

/// Files that were changed or removed.
fn changed<'a>(before: &'a str, after: &'a str) -> BTreeSet<&'a str> {
    let (before, after) = (parse_manifest(before), parse_manifest(after));
    before
        .iter()
        .filter(|(path, hash)| after.get(*path) != Some(hash))
        .map(|(path, _)| *path)
        .collect()
}

fn compare_files(before: &str, after: &str) -> CompareScansResponse {
    let (before, after) = (parse_manifest(before), parse_manifest(after));
    let list = |paths: Vec<&str>| {
        let count = i64::try_from(paths.len()).unwrap_or(i64::MAX);
        (paths.into_iter().take(MAX_LISTED_PATHS).map(str::to_owned).collect::<Vec<_>>(), count)
    };
    let added = after.keys().filter(|path| !before.contains_key(*path)).copied().collect();
    let removed = before.keys().filter(|path| !after.contains_key(*path)).copied().collect();
    let differs =
        |path: &&&str| after.get(**path).is_some_and(|hash| before.get(**path) != Some(hash));
    let changed = before.keys().filter(differs).copied().collect();
    let ((files_added, added), (files_removed, removed), (files_changed, changed)) =
        (list(added), list(removed), list(changed));
    CompareScansResponse {
        files_added,
        files_removed,
        files_changed,
        files_added_count: added,
        files_removed_count: removed,
        files_changed_count: changed,
        ..CompareScansResponse::default()
    }
}

/// Whether two candidates are the same tool: by name, or by entry point.
fn is_same_tool(one: &CandidateContent, other: &CandidateContent) -> bool {
    let entry_point = |content: &CandidateContent| {
        content
            .entry_point
            .as_ref()
            .map(|entry| (entry.path.clone(), entry.symbol.clone(), entry.command.clone()))
    };
    one.name == other.name || (entry_point(one).is_some() && entry_point(one) == entry_point(other))
}

/// The parts of a candidate that its users depend on.
fn contract(content: &CandidateContent) -> impl PartialEq {
    let CandidateContent { inputs, outputs, credentials, side_effects, .. } = content.clone();
    (inputs, outputs, credentials, side_effects)
}

fn compare_candidates(
    answer: &mut CompareScansResponse,
    before: &[CandidateContent],
    after: &[CandidateContent],
    changed: &BTreeSet<&str>,
) {
    for candidate in after {
        let Some(earlier) = before.iter().find(|earlier| is_same_tool(earlier, candidate)) else {
            answer.candidates_added.push(candidate.name.clone());
            continue;
        };
        let entry_path = candidate.entry_point.iter().map(|entry| entry.path.as_str());
        let mut paths =
            entry_path.chain(candidate.evidence.iter().map(|evidence| evidence.path.as_str()));
        if contract(earlier) != contract(candidate) || earlier.name != candidate.name {
            answer.candidates_changed.push(candidate.name.clone());
        } else if paths.any(|path| changed.contains(path)) {
            answer.candidates_to_check.push(candidate.name.clone());
        }
    }
    let removed = before
        .iter()
        .filter(|earlier| !after.iter().any(|candidate| is_same_tool(earlier, candidate)));
    answer.candidates_removed = removed.map(|candidate| candidate.name.clone()).collect();
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::{CandidateEntryPoint, CandidateField};

    use super::*;

    fn candidate(name: &str, path: &str) -> CandidateContent {
        let entry = CandidateEntryPoint {
            path: path.into(),
            line: 1,
            symbol: name.into(),
            ..Default::default()
        };
        CandidateContent { name: name.into(), entry_point: Some(entry), ..Default::default() }
    }

    #[test]
    fn comparison_lists_added_removed_changed_and_affected() {
        let (before, after) = ("1 a.py\n2 b.py\n3 c d.py\n", "1 a.py\n9 b.py\n4 e.py\n");
        let mut answer = compare_files(before, after);
        assert_eq!(
            (&*answer.files_added, &*answer.files_removed),
            (&["e.py".into()][..], &["c d.py".into()][..])
        );
        assert_eq!(
            (&*answer.files_changed, answer.files_changed_count),
            (&["b.py".to_owned()][..], 1)
        );
        let more = CandidateContent {
            inputs: vec![CandidateField { name: "month".into(), ..Default::default() }],
            ..candidate("changes", "a.py")
        };
        let earlier = [
            candidate("stays", "a.py"),
            candidate("check", "b.py"),
            candidate("gone", "c d.py"),
            candidate("changes", "a.py"),
        ];
        let later = [
            candidate("stays", "a.py"),
            candidate("check", "b.py"),
            more,
            candidate("new", "e.py"),
        ];
        compare_candidates(&mut answer, &earlier, &later, &changed(before, after));
        assert_eq!(answer.candidates_added, ["new"]);
        assert_eq!(answer.candidates_removed, ["gone"]);
        assert_eq!(answer.candidates_changed, ["changes"]);
        assert_eq!(answer.candidates_to_check, ["check"]);
    }
}
