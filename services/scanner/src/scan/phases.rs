//! What is done in each phase.

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
    candidate::{self, Checked},
    cleanup,
    error::Error,
    explore,
    repository::{self, Clean, Commit, Limits, Manifest, Snapshot, SurveyLimits},
    work::{Work, scan_event},
};

/// Characters of what the model is told of the repository.
const BRIEF: usize = 24_000;
/// How often the model is told what is wrong with its answer.
const REPAIRS: i32 = 2;
/// Bytes of a manifest that is kept: the gateway reads two of them to compare scans.
const MAX_MANIFEST: usize = 16 * 1024 * 1024;
/// Refused proposals that are told of.
const REFUSALS: usize = 50;

/// Goes on from the phase the scan is in, until the scanner's work is over or somebody else's is
/// waited for. Gives when somebody has to go on; none: it is over.
pub(super) async fn go_on(work: &mut Work<'_>) -> Result<Option<Timestamp>, Error> {
    loop {
        match work.scan.phase {
            ScanPhase::Queued => resolve(work).await?,
            ScanPhase::Snapshot => fetch(work).await?,
            ScanPhase::Survey => look(work).await?,
            ScanPhase::Exploring => return explore::explore(work).await.map(Some),
            ScanPhase::Checking => check(work).await?,
            ScanPhase::Review | ScanPhase::Failed | ScanPhase::Cancelled => return Ok(None),
        }
    }
}

/// Where the scan's files lie, and the commit they are of.
fn place(work: &Work<'_>) -> Result<(PathBuf, Commit), Error> {
    Ok((work.shared.dir.join(work.scan.id.to_string()), Commit::new(&work.scan.commit, None)?))
}

/// Finds the exact commit.
async fn resolve(work: &mut Work<'_>) -> Result<(), Error> {
    let opened = source::open(work.shared, &work.scan).await?;
    let reference = Some(work.scan.reference.as_str()).filter(|reference| !reference.is_empty());
    let commit = opened.source.resolve(reference).await?;
    work.scan.commit = commit.id().to_owned();
    let named = commit.reference().map(|name| format!(" ({name})")).unwrap_or_default();
    let words = format!("the commit is {}{named}", commit.id());
    work.enter_phase(ScanPhase::Snapshot, words, ScanChanges::default()).await
}

/// The smaller of two limits, of which 0 is none.
fn smaller(by_default: u64, wanted: i64) -> u64 {
    u64::try_from(wanted)
        .ok()
        .filter(|wanted| *wanted > 0)
        .map_or(by_default, |wanted| wanted.min(by_default))
}

/// Fetches the files and masks what must not be shown.
async fn fetch(work: &mut Work<'_>) -> Result<(), Error> {
    let (dir, commit) = place(work)?;
    let limits = Limits::default();
    let limits = Limits {
        bytes: smaller(limits.bytes, work.scan.limits.max_bytes),
        entries: smaller(limits.entries, work.scan.limits.max_files),
        ..limits
    };
    // Members may speak to the task already, which reads the scan's folder: nothing comes there
    // that is not masked.
    let unmasked = cleanup::unmasked_dir(&work.shared.dir, work.scan.id);
    let there = Snapshot::open(&commit, &dir).await?;
    let is_there = there.is_some();
    let snapshot = match there {
        Some(there) => there,
        None => {
            let opened = source::open(work.shared, &work.scan).await?;
            Snapshot::take(&*opened.source, &commit, &limits, &unmasked).await?
        }
    };
    // What a process that died has left half-way.
    Snapshot::sweep(&unmasked, Duration::ZERO, SystemTime::from(Timestamp::now())).await?;
    let clean = repository::mask(&snapshot).await.map_err(|error| Error::retryable(&error))?;
    if !is_there {
        clean.reveal(&dir).await?;
    }
    let masked = clean.masked();
    let manifest = snapshot.manifest();
    let count = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
    work.scan.files = i64::try_from(manifest.files.len()).unwrap_or(i64::MAX);
    work.scan.files_skipped = count(manifest.skipped.counts.values().sum());
    work.scan.secrets_masked = count(masked.total);
    let kept = lines(manifest);
    let unlisted = if kept.is_some() {
        ""
    } else {
        "; they are too many to be compared with those of other scans"
    };
    let words = format!(
        "{} files of {} bytes, {} left out; {} secrets masked{unlisted}",
        work.scan.files, manifest.bytes, work.scan.files_skipped, masked.total
    );
    let changes = ScanChanges { manifest: kept, ..ScanChanges::default() };
    work.enter_phase(ScanPhase::Survey, words, changes).await
}

/// A manifest as it is kept: a line for each file, a part of its hash and its path. No path has a
/// line break. None when it is too long.
fn lines(manifest: &Manifest) -> Option<String> {
    let line =
        |(path, entry): (&String, &repository::FileEntry)| format!("{:.32} {path}\n", entry.hash);
    let lines: String = manifest.files.iter().map(line).collect();
    (lines.len() <= MAX_MANIFEST).then_some(lines)
}

/// The snapshot; none when it is gone, as when another machine has taken it.
async fn snapshot(work: &mut Work<'_>) -> Result<Option<Clean>, Error> {
    let (dir, commit) = place(work)?;
    let Some(found) = Snapshot::open(&commit, &dir).await? else {
        let words = "the files are not here any more, and are fetched again";
        work.enter_phase(ScanPhase::Snapshot, words, ScanChanges::default()).await?;
        return Ok(None);
    };
    // It is masked already, unless somebody else has taken it anew.
    Ok(Some(repository::mask(&found).await.map_err(|error| Error::retryable(&error))?))
}

/// Looks through the files without a model.
async fn look(work: &mut Work<'_>) -> Result<(), Error> {
    let Some(snapshot) = snapshot(work).await? else { return Ok(()) };
    let survey = repository::survey(&snapshot, &SurveyLimits::default()).await;
    let survey = survey.map_err(|error| Error::retryable(&error))?;
    let outlined = repository::outline(&snapshot, &work.shared.outliner).await;
    let outlined = outlined.map_err(|error| Error::retryable(&error))?;
    let words = format!(
        "{} languages, {} entry points; {} symbols of {} files listed",
        survey.languages.len(),
        survey.entries.len(),
        outlined.symbols,
        outlined.files
    );
    let changes =
        ScanChanges { brief: Some(repository::brief(&survey, BRIEF)), ..ScanChanges::default() };
    work.enter_phase(ScanPhase::Exploring, words, changes).await
}

/// Checks what the model said, and writes the candidates down, or has the model repair it.
async fn check(work: &mut Work<'_>) -> Result<(), Error> {
    let Some(snapshot) = snapshot(work).await? else { return Ok(()) };
    let answer = explore::answer(work).await?;
    let checked = examine(work, &snapshot, vec![answer.text]).await?;
    let mut checked = checked.into_iter().next().unwrap_or_default();
    if !checked.problems.is_empty() && answer.ended.is_none() && work.scan.repairs < REPAIRS {
        work.scan.repairs += 1;
        work.scan.request = candidate::repair(&checked.problems);
        work.scan.message.clear();
        let words =
            format!("the model is told of {} mistakes in its answer", checked.problems.len());
        let repair = scan_event("repair", words);
        let changes = ScanChanges { events: vec![repair], ..ScanChanges::default() };
        return work.enter_phase(ScanPhase::Exploring, "", changes).await;
    }
    let mut events = Vec::new();
    if !checked.problems.is_empty() && work.scan.repairs > 0 {
        // A model that has mended its answer to pieces, or could not go on, has said before what
        // holds.
        let earlier = explore::answers(work).await?;
        // Of those that hold as much the last one.
        for earlier in examine(work, &snapshot, earlier).await? {
            if earlier.candidates.len() > checked.candidates.len() {
                checked = earlier;
                events = vec![scan_event(
                    "earlier",
                    "of an earlier answer more holds than of the last one: it is taken",
                )];
            }
        }
    }
    let Checked { candidates, problems, merged } = checked;
    if candidates.is_empty() {
        if let Some(why) = answer.ended {
            return Err(Error::Failed(why));
        }
        if let Some(problem) = problems.iter().find(|problem| problem.is_whole()) {
            return Err(Error::Failed(format!("the model's answer cannot be used: {problem}")));
        }
    }
    let mut refusals: Vec<_> = problems.iter().map(ToString::to_string).collect();
    work.scan.refused = i64::try_from(candidate::refused(&problems)).unwrap_or(i64::MAX);
    refusals.truncate(REFUSALS);
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
    let words = format!(
        "{} candidates are to be reviewed; {} merged, {} refused",
        candidates.len(),
        merged,
        work.scan.refused
    );
    events.extend(refusals.into_iter().map(|why| scan_event("refused", why)));
    work.enter_phase(
        ScanPhase::Review,
        words,
        ScanChanges { events, candidates, ..ScanChanges::default() },
    )
    .await?;
    let count = |count: i64| u64::try_from(count).unwrap_or(0);
    work.shared.metrics.record_candidates(count(work.scan.candidates), count(work.scan.refused));
    Ok(())
}

/// Checks answers against the files.
async fn examine(
    work: &Work<'_>,
    snapshot: &Clean,
    answers: Vec<String>,
) -> Result<Vec<Checked>, Error> {
    let (snapshot, root) = (snapshot.clone(), work.scan.commit.clone());
    blocking(move || {
        Ok(answers.iter().map(|answer| candidate::check(answer, &snapshot, &root)).collect())
    })
    .await
}

/// Work on files, where that is allowed.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> Result<T, Error> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done.map_err(|error| Error::retryable(&error)),
        Err(error) => Err(Error::retryable(&error)),
    }
}
