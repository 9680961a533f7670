//! The work of each phase.

use std::{
    path::PathBuf,
    time::{Duration, SystemTime},
};

use construct_domain::CandidateId;
use construct_store::scan::{NewCandidate, ScanChanges, ScanPhase};
use jiff::Timestamp;
use uuid::Uuid;

use super::source;
use crate::{
    candidate::{self, CheckReport},
    cleanup,
    error::Error,
    explore,
    repository::{self, Commit, Limits, Manifest, MaskedSnapshot, Snapshot, SurveyLimits},
    work::{Work, scan_event},
};

/// Characters of the brief for the model.
const MAX_BRIEF_CHARS: usize = 24_000;
/// How often the model may repair its answer.
const MAX_REPAIRS: i32 = 2;
/// Bytes of a stored manifest at most: the gateway reads two of them to compare scans.
const MAX_MANIFEST_BYTES: usize = 16 * 1024 * 1024;
/// Refusal events of a scan at most.
const MAX_REFUSAL_EVENTS: usize = 50;

/// Continues from the scan's phase, until the scanner's work is done or it has to wait. Returns the
/// time to continue; none: the scan is over.
pub(super) async fn advance(work: &mut Work<'_>) -> Result<Option<Timestamp>, Error> {
    loop {
        match work.scan.phase {
            ScanPhase::Queued => resolve(work).await?,
            ScanPhase::Snapshot => take_snapshot(work).await?,
            ScanPhase::Survey => run_survey(work).await?,
            ScanPhase::Exploring => return explore::explore(work).await.map(Some),
            ScanPhase::Checking => check_answer(work).await?,
            ScanPhase::Review | ScanPhase::Failed | ScanPhase::Cancelled => return Ok(None),
        }
    }
}

/// The folder of the scan's files, and their commit.
fn snapshot_location(work: &Work<'_>) -> Result<(PathBuf, Commit), Error> {
    Ok((work.shared.dir.join(work.scan.id.to_string()), Commit::new(&work.scan.commit, None)?))
}

/// Resolves the exact commit.
async fn resolve(work: &mut Work<'_>) -> Result<(), Error> {
    let source = source::open(work.shared, &work.scan).await?;
    let reference = Some(work.scan.reference.as_str()).filter(|reference| !reference.is_empty());
    let commit = source.source.resolve(reference).await?;
    work.scan.commit = commit.id().to_owned();
    let named = commit.reference().map(|name| format!(" ({name})")).unwrap_or_default();
    let message = format!("the commit is {}{named}", commit.id());
    work.enter_phase(ScanPhase::Snapshot, message, ScanChanges::default()).await
}

/// The stricter of two limits; a requested limit of 0 is none.
fn stricter_limit(by_default: u64, wanted: i64) -> u64 {
    u64::try_from(wanted)
        .ok()
        .filter(|wanted| *wanted > 0)
        .map_or(by_default, |wanted| wanted.min(by_default))
}

/// Fetches the files and masks the secrets.
async fn take_snapshot(work: &mut Work<'_>) -> Result<(), Error> {
    let (dir, commit) = snapshot_location(work)?;
    let limits = Limits::default();
    let limits = Limits {
        bytes: stricter_limit(limits.bytes, work.scan.limits.max_bytes),
        entries: stricter_limit(limits.entries, work.scan.limits.max_files),
        ..limits
    };
    // Members may already send messages to the task, which reads the scan's folder. Unmasked files
    // must not get there.
    let unmasked = cleanup::unmasked_dir(&work.shared.dir, work.scan.id);
    let existing = Snapshot::open(&commit, &dir).await?;
    let is_present = existing.is_some();
    let snapshot = match existing {
        Some(existing) => existing,
        None => {
            let source = source::open(work.shared, &work.scan).await?;
            Snapshot::take(&*source.source, &commit, &limits, &unmasked).await?
        }
    };
    // Delete leftovers of a crash.
    Snapshot::sweep(&unmasked, Duration::ZERO, SystemTime::from(Timestamp::now())).await?;
    let clean = repository::mask(&snapshot).await.map_err(|error| Error::retryable(&error))?;
    if !is_present {
        clean.publish_to(&dir).await?;
    }
    let masked = clean.report();
    let manifest = snapshot.manifest();
    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    work.scan.files = i64::try_from(manifest.files.len()).unwrap_or(i64::MAX);
    work.scan.files_skipped = count(manifest.skipped.counts.values().sum());
    work.scan.secrets_masked = count(masked.total);
    let lines = manifest_lines(manifest);
    let unlisted = if lines.is_some() { "" } else { "; too many to compare with other scans" };
    let message = format!(
        "{} files of {} bytes, {} skipped; {} secrets masked{unlisted}",
        work.scan.files, manifest.bytes, work.scan.files_skipped, masked.total
    );
    let changes = ScanChanges { manifest: lines, ..ScanChanges::default() };
    work.enter_phase(ScanPhase::Survey, message, changes).await
}

/// The stored form of a manifest: one line per file, with a part of its hash and its path. Paths
/// contain no line breaks. None when it is too long.
fn manifest_lines(manifest: &Manifest) -> Option<String> {
    let line =
        |(path, entry): (&String, &repository::FileEntry)| format!("{:.32} {path}\n", entry.hash);
    let lines: String = manifest.files.iter().map(line).collect();
    (lines.len() <= MAX_MANIFEST_BYTES).then_some(lines)
}

/// Opens the snapshot; none when it is missing, as when another machine took it.
async fn open_snapshot(work: &mut Work<'_>) -> Result<Option<MaskedSnapshot>, Error> {
    let (dir, commit) = snapshot_location(work)?;
    let Some(found) = Snapshot::open(&commit, &dir).await? else {
        let message = "the files are no longer here; they are fetched again";
        work.enter_phase(ScanPhase::Snapshot, message, ScanChanges::default()).await?;
        return Ok(None);
    };
    // It is masked already, unless another process took it again.
    Ok(Some(repository::mask(&found).await.map_err(|error| Error::retryable(&error))?))
}

/// Surveys the files without a model.
async fn run_survey(work: &mut Work<'_>) -> Result<(), Error> {
    let Some(snapshot) = open_snapshot(work).await? else { return Ok(()) };
    let survey = repository::survey(&snapshot, &SurveyLimits::default()).await;
    let survey = survey.map_err(|error| Error::retryable(&error))?;
    let outlined = repository::outline(&snapshot, &work.shared.outliner).await;
    let outlined = outlined.map_err(|error| Error::retryable(&error))?;
    let message = format!(
        "{} languages, {} entry points; {} symbols of {} files listed",
        survey.languages.len(),
        survey.entries.len(),
        outlined.symbols,
        outlined.files
    );
    let changes = ScanChanges {
        brief: Some(repository::brief(&survey, MAX_BRIEF_CHARS)),
        ..ScanChanges::default()
    };
    work.enter_phase(ScanPhase::Exploring, message, changes).await
}

/// Checks the model's answer. Stores the candidates, or asks the model for a repair.
async fn check_answer(work: &mut Work<'_>) -> Result<(), Error> {
    let Some(snapshot) = open_snapshot(work).await? else { return Ok(()) };
    let answer = explore::last_answer(work).await?;
    let checked = check_answers(work, &snapshot, vec![answer.text]).await?;
    let mut checked = checked.into_iter().next().unwrap_or_default();
    if !checked.problems.is_empty()
        && answer.turn_error.is_none()
        && work.scan.repairs < MAX_REPAIRS
    {
        work.scan.repairs += 1;
        work.scan.request = candidate::repair_prompt(&checked.problems);
        work.scan.message.clear();
        let message = format!(
            "the model is asked to repair {} mistakes in its answer",
            checked.problems.len()
        );
        let repair = scan_event("repair", message);
        let changes = ScanChanges { events: vec![repair], ..ScanChanges::default() };
        return work.enter_phase(ScanPhase::Exploring, "", changes).await;
    }
    let mut events = Vec::new();
    if !checked.problems.is_empty() && work.scan.repairs > 0 {
        // A model that made its answer worse, or could not continue, may have had better candidates
        // in an earlier answer.
        let earlier = explore::earlier_answers(work).await?;
        // Among equal answers, the latest one.
        for earlier in check_answers(work, &snapshot, earlier).await? {
            if earlier.candidates.len() > checked.candidates.len() {
                checked = earlier;
                events = vec![scan_event(
                    "earlier",
                    "an earlier answer has more valid candidates than the last one: it is used",
                )];
            }
        }
    }
    let CheckReport { candidates, problems, merged } = checked;
    if candidates.is_empty() {
        if let Some(why) = answer.turn_error {
            return Err(Error::Failed(why));
        }
        if let Some(problem) = problems.iter().find(|problem| problem.is_about_answer()) {
            return Err(Error::Failed(format!("the model's answer cannot be used: {problem}")));
        }
    }
    let mut refusals: Vec<_> = problems.iter().map(ToString::to_string).collect();
    work.scan.refused = i64::try_from(candidate::refused_count(&problems)).unwrap_or(i64::MAX);
    refusals.truncate(MAX_REFUSAL_EVENTS);
    work.scan.candidates = i64::try_from(candidates.len()).unwrap_or(i64::MAX);
    let candidates: Vec<NewCandidate> = candidates
        .into_iter()
        .map(|candidate| NewCandidate {
            id: CandidateId::from_uuid(Uuid::now_v7()),
            name: candidate.name,
            score: candidate.score,
            content: candidate.content,
        })
        .collect();
    let message = format!(
        "{} candidates to review; {} merged, {} refused",
        candidates.len(),
        merged,
        work.scan.refused
    );
    events.extend(refusals.into_iter().map(|why| scan_event("refused", why)));
    work.enter_phase(
        ScanPhase::Review,
        message,
        ScanChanges { events, candidates, ..ScanChanges::default() },
    )
    .await?;
    let count = |count: i64| u64::try_from(count).unwrap_or(0);
    work.shared.metrics.record_candidates(count(work.scan.candidates), count(work.scan.refused));
    Ok(())
}

/// Checks answers against the files.
async fn check_answers(
    work: &Work<'_>,
    snapshot: &MaskedSnapshot,
    answers: Vec<String>,
) -> Result<Vec<CheckReport>, Error> {
    let (snapshot, root) = (snapshot.clone(), work.scan.commit.clone());
    run_blocking(move || {
        Ok(answers.iter().map(|answer| candidate::check(answer, &snapshot, &root)).collect())
    })
    .await
}

/// Runs file work on a thread for blocking calls.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| Error::retryable(&error)),
        Err(error) => Err(Error::retryable(&error)),
    }
}
