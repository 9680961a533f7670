//! Shows what the scanner finds in a folder or an archive, with the duration of each step:
//! `repository FOLDER|ARCHIVE [--brief CHARACTERS]`. With `outline` it is the child process that
//! parses.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use construct_scanner::repository::{
    Folder, Limits, Outliner, OutlinerLimits, Snapshot, Source, SurveyLimits, Upload, brief, mask,
    outline, outline_child, survey,
};

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let Some(first) = arguments.next() else {
        eprintln!("usage: repository FOLDER|ARCHIVE [--brief CHARACTERS]");
        return ExitCode::FAILURE;
    };
    if first == "outline" {
        return outline_child();
    }
    let characters = arguments.nth(1).and_then(|number| number.to_str()?.parse().ok());
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .expect("a runtime can be made");
    match runtime.block_on(measure(first.into(), characters)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn measure(
    path: PathBuf,
    characters: Option<usize>,
) -> Result<(), Box<dyn std::error::Error>> {
    let into = tempfile::tempdir()?;
    let source: Box<dyn Source> =
        if path.is_dir() { Box::new(Folder::new(path)) } else { Box::new(Upload::new(path)?) };
    let mut began = Instant::now();
    let mut step = |what: &str, result: String| {
        println!("{what:<9} {:>8.2} s  {:>5} MiB  {result}", began.elapsed().as_secs_f64(), peak());
        began = Instant::now();
    };
    let commit = source.resolve(None).await?;
    step("resolve", commit.id().to_owned());
    let snapshot = Snapshot::take(&*source, &commit, &Limits::default(), into.path()).await?;
    let manifest = snapshot.manifest();
    step(
        "snapshot",
        format!(
            "{} files, {} bytes, skipped {:?}",
            manifest.files.len(),
            manifest.bytes,
            manifest.skipped.counts
        ),
    );
    let clean = mask(&snapshot).await?;
    let masked = clean.report();
    step("mask", format!("{} secrets", masked.total));
    let survey = survey(&clean, &SurveyLimits::default()).await?;
    step(
        "survey",
        format!(
            "{} modules, {} entry points, {} operations",
            survey.modules.len(),
            survey.entries.len(),
            survey.operations.len()
        ),
    );
    let outliner =
        Outliner::new(std::env::current_exe()?, vec!["outline".into()], OutlinerLimits::default());
    let outlined = outline(&clean, &outliner).await?;
    step(
        "outline",
        format!(
            "{} files, {} symbols, {} skipped",
            outlined.files, outlined.symbols, outlined.skipped
        ),
    );
    if let Some(characters) = characters {
        println!("\n{}", brief(&survey, characters));
        for finding in masked.findings.iter().take(50) {
            println!("masked {} in {}:{}", finding.rule, finding.path, finding.line);
        }
        for (path, reason) in outlined.named.iter().take(20) {
            println!("no outline of {path}: {reason}");
        }
    }
    Ok(())
}

/// The peak memory of this process in MiB.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) / 1024
}
