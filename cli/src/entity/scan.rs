//! `construct scan`: scans of repositories for Tools.

mod connection;
mod display;
mod review;
mod watch;

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use construct_proto::v1::{
    CancelScanRequest, CompareScansRequest, CompareScansResponse, CreateScanRequest,
    CreateToolsRequest, GetScanRequest, ListScansRequest, Scan, ScanLimits, ScanSpec, ScanUpload,
    list_scans_request::Filter, scan_spec::Source,
};

use super::WriteArgs;
use crate::{
    exec,
    failure::{Exit, Failure},
    gateway::{Gateway, call},
    money::{self, Limit},
    output::OutputArgs,
    page::ListArgs,
    text::count,
    time,
};

/// The maximum bytes of an archive: larger ones do not fit into a request.
const MAX_ARCHIVE_BYTES: usize = 3 * 1024 * 1024;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct ScanArgs {
    #[command(subcommand)]
    command: Option<ScanCommand>,
    #[command(flatten)]
    start: Start,
}

/// A new scan.
#[derive(Debug, Args)]
struct Start {
    /// `owner/name` or the address of a repository on GitHub or GitLab, an archive (tar.gz, zip),
    /// or a folder.
    #[arg(required = true)]
    repository: Option<String>,
    /// A branch, tag or commit. Default: the default branch.
    #[arg(long = "ref", value_name = "REF", default_value = "", hide_default_value = true)]
    reference: String,
    /// The repository is on GitLab.
    #[arg(long)]
    gitlab: bool,
    /// The connection for a private repository.
    #[arg(long, default_value = "", hide_default_value = true)]
    connection: String,
    /// The model that explores the repository. Default: the only model.
    #[arg(long, default_value = "", hide_default_value = true)]
    model: String,
    /// The maximum cost of the exploration in dollars. Default: 2.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_limit)]
    budget: Option<Limit>,
    /// The maximum model calls until the answer. Each of the at most two repairs of the answer may
    /// take as many.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    max_turns: u32,
    /// The timeout of the scan, e.g. 30m.
    #[arg(long, value_name = "DURATION", value_parser = time::parse_duration)]
    timeout: Option<std::time::Duration>,
    /// Print the scan, and do not follow it.
    #[arg(long)]
    no_wait: bool,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Subcommand)]
enum ScanCommand {
    /// Show a scan.
    Get {
        scan: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List scans.
    List(List),
    /// Follow a scan until it ends.
    Watch {
        scan: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Cancel a scan.
    Cancel {
        scan: String,
        /// The reason.
        #[arg(long, default_value = "", hide_default_value = true)]
        reason: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Review candidates: show, accept, reject or edit them.
    Review(review::Review),
    /// Hand over the accepted candidates, to be made into Tools.
    CreateTools {
        scan: String,
        /// Only this candidate, by name or id. Repeatable. Default: all accepted ones.
        #[arg(long = "candidate", value_name = "CANDIDATE")]
        candidates: Vec<String>,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Compare two scans of a repository.
    Compare {
        before: String,
        after: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Connections: credentials for repository hosts.
    #[command(subcommand)]
    Connection(connection::ConnectionCommand),
}

#[derive(Debug, Args)]
struct List {
    /// Only scans of this repository, e.g. `github:owner/name`.
    #[arg(long, default_value = "", hide_default_value = true)]
    repository: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl ScanArgs {
    /// # Errors
    /// The error of the gateway, or the failure of the scan.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<Exit, Failure> {
        let completed = |()| Exit::Completed;
        match self.command {
            None => self.start.run(gateway).await,
            Some(ScanCommand::Get { scan, output }) => output
                .entity(&call(gateway.scans().get_scan(GetScanRequest { scan })).await?)
                .map(completed),
            Some(ScanCommand::List(args)) => args.run(gateway).await.map(completed),
            Some(ScanCommand::Watch { scan, output }) => {
                watch::follow(gateway, &scan, output).await
            }
            Some(ScanCommand::Cancel { scan, reason, write, output }) => {
                let request = CancelScanRequest { scan, reason, idempotency_key: write.key() };
                output.entity(&call(gateway.scans().cancel_scan(request)).await?).map(completed)
            }
            Some(ScanCommand::Review(args)) => args.run(gateway).await.map(completed),
            Some(ScanCommand::CreateTools { scan, candidates, write, output }) => {
                let candidates = review::ids(gateway, &scan, &candidates).await?;
                let request = CreateToolsRequest { scan, candidates, idempotency_key: write.key() };
                let response = call(gateway.scans().create_tools(request)).await?;
                let text = if response.candidates.is_empty() {
                    "no accepted candidates to hand over: accept some first (construct scan review)\n".to_owned()
                } else {
                    let number = i64::try_from(response.candidates.len()).unwrap_or(i64::MAX);
                    format!(
                        "{} handed over as {}\n",
                        count(number, "candidate"),
                        response.hand_over_id
                    )
                };
                output.message("construct.v1.CreateToolsResponse", &response, &text).map(completed)
            }
            Some(ScanCommand::Compare { before, after, output }) => {
                let request = CompareScansRequest { before, after };
                let changes = call(gateway.scans().compare_scans(request)).await?;
                output
                    .message(
                        "construct.v1.CompareScansResponse",
                        &changes,
                        &describe_changes(&changes),
                    )
                    .map(completed)
            }
            Some(ScanCommand::Connection(command)) => command.run(gateway).await.map(completed),
        }
    }
}

impl Start {
    async fn run(self, gateway: &Gateway) -> Result<Exit, Failure> {
        let budget = self.budget;
        if budget.is_some_and(|budget| budget.period.is_some()) {
            return Err(Failure::usage("a scan's budget is an amount, without a period"));
        }
        let spec = ScanSpec {
            source: Some(source(self.repository.as_deref().unwrap_or_default(), self.gitlab)?),
            connection: self.connection,
            reference: self.reference,
            model: self.model,
            budget_pico_usd: budget.map_or(0, |budget| budget.pico_usd),
            limits: Some(ScanLimits {
                max_turns: self.max_turns,
                timeout: self.timeout.and_then(|timeout| timeout.try_into().ok()),
                ..ScanLimits::default()
            }),
        };
        let request = CreateScanRequest { spec: Some(spec), idempotency_key: self.write.key() };
        let scan: Scan = call(gateway.scans().create_scan(request)).await?;
        if self.no_wait {
            return self.output.entity(&scan).map(|()| Exit::Completed);
        }
        let id = super::id(scan.metadata.as_ref());
        eprintln!("{id}");
        watch::follow(gateway, &id, self.output).await
    }
}

/// The source that an argument names: a local file or folder if it exists, else a remote
/// repository.
fn source(argument: &str, gitlab: bool) -> Result<Source, Failure> {
    let path = Path::new(argument);
    let is_path = argument.starts_with(['.', '/', '~']) || !argument.contains('/');
    if gitlab || argument.contains("://") || !(is_path || path.exists()) {
        let on_gitlab = gitlab || argument.starts_with("https://gitlab.com/");
        return Ok(if on_gitlab {
            Source::Gitlab(argument.to_owned())
        } else {
            Source::Github(argument.to_owned())
        });
    }
    let unreadable = |error| Failure::usage(format!("{argument} cannot be read: {error}"));
    if std::fs::metadata(path).map_err(unreadable)?.is_dir() {
        return Ok(Source::Folder(exec::workspace(&PathBuf::from(argument))?));
    }
    let archive = std::fs::read(path).map_err(unreadable)?;
    if archive.len() > MAX_ARCHIVE_BYTES {
        return Err(Failure::usage(format!(
            "{argument} has more than 3 MiB: scan a repository or a folder instead"
        )));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Source::Upload(ScanUpload { archive, name }))
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter { repository: self.repository };
        let listed = self
            .list
            .collect(|page| {
                let request = ListScansRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.scans().list_scans(request)).await?;
                    Ok((response.scans, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

/// The changes as text.
fn describe_changes(changes: &CompareScansResponse) -> String {
    let mut text = format!(
        "{:.12} → {:.12}: {} added, {} removed, {} changed\n",
        changes.commit_before,
        changes.commit_after,
        count(changes.files_added_count, "file"),
        changes.files_removed_count,
        changes.files_changed_count
    );
    for (sign, paths) in
        [("+", &changes.files_added), ("-", &changes.files_removed), ("~", &changes.files_changed)]
    {
        for path in paths {
            text.push_str(&format!("  {sign} {}\n", crate::text::one_line(path)));
        }
    }
    for (change, names) in [
        ("new", &changes.candidates_added),
        ("removed", &changes.candidates_removed),
        ("changed", &changes.candidates_changed),
        ("to check, because their files have changed", &changes.candidates_to_check),
    ] {
        if !names.is_empty() {
            text.push_str(&format!("candidates {change}: {}\n", names.join(", ")));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_archive_and_folder_are_distinguished() {
        let parse = |argument: &str, gitlab| source(argument, gitlab).map_err(drop);
        assert_eq!(
            parse("octocat/hello-nowhere", false),
            Ok(Source::Github("octocat/hello-nowhere".into()))
        );
        assert_eq!(
            parse("https://gitlab.com/a/b", false),
            Ok(Source::Gitlab("https://gitlab.com/a/b".into()))
        );
        assert_eq!(parse("a/b", true), Ok(Source::Gitlab("a/b".into())));
        assert!(matches!(parse(".", false), Ok(Source::Folder(path)) if path.starts_with('/')));
        assert!(
            matches!(parse("Cargo.toml", false), Ok(Source::Upload(ScanUpload { name, .. })) if name == "Cargo.toml")
        );
        assert!(parse("./no-such-thing", false).is_err());
    }
}
