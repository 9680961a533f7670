//! How scans, candidates, connections and repositories are printed.

use construct_proto::v1::{
    Candidate, CandidateState, Scan, ScanConnection, ScanHost, ScanPhase, ScanSpec,
    scan_spec::Source,
};
use jiff::Timestamp;

use crate::{
    entity::{age, id, metadata_details, unless_zero},
    money,
    output::Entity,
    text::{clip, one_line},
    time,
};

pub(super) const fn phase_name(phase: ScanPhase) -> &'static str {
    match phase {
        ScanPhase::Unspecified => "unknown",
        ScanPhase::Queued => "queued",
        ScanPhase::Snapshot => "snapshot",
        ScanPhase::Survey => "survey",
        ScanPhase::Exploring => "exploring",
        ScanPhase::Checking => "checking",
        ScanPhase::Review => "review",
        ScanPhase::Failed => "failed",
        ScanPhase::Cancelled => "cancelled",
    }
}

pub(super) const fn state_name(state: CandidateState) -> &'static str {
    match state {
        CandidateState::Unspecified => "unknown",
        CandidateState::Proposed => "proposed",
        CandidateState::Accepted => "accepted",
        CandidateState::Rejected => "rejected",
        CandidateState::HandedOver => "handed over",
    }
}

fn location(spec: &ScanSpec) -> String {
    match &spec.source {
        Some(Source::Github(name)) => format!("github:{name}"),
        Some(Source::Gitlab(name)) => format!("gitlab:{name}"),
        Some(Source::Upload(upload)) => format!("upload:{}", upload.name),
        Some(Source::Folder(path)) => format!("folder:{path}"),
        None => String::new(),
    }
}

impl Entity for Scan {
    const NAME: &'static str = "construct.v1.Scan";
    const PLURAL: &'static str = "scans";
    const COLUMNS: &'static [&'static str] =
        &["ID", "REPOSITORY", "COMMIT", "PHASE", "CANDIDATES", "COST", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let status = self.status.clone().unwrap_or_default();
        vec![
            id(self.metadata.as_ref()),
            location(&self.spec.clone().unwrap_or_default()),
            status.commit.chars().take(12).collect(),
            phase_name(status.phase()).to_owned(),
            status.candidates.to_string(),
            money::cost(status.cost_pico_usd),
            age(self.metadata.as_ref(), now),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let (spec, status) =
            (self.spec.clone().unwrap_or_default(), self.status.clone().unwrap_or_default());
        let at = |at: Option<&prost_types::Timestamp>| {
            time::read(at)
                .map(|at| format!("{} ({})", time::local(at), time::relative(at, now)))
                .unwrap_or_default()
        };
        let has_ended = status.next_wake.is_none();
        let mut details = vec![
            ("id", id(self.metadata.as_ref())),
            ("repository", location(&spec)),
            ("reference", spec.reference.clone()),
            ("commit", status.commit.clone()),
            (
                "phase",
                format!("{} since {}", phase_name(status.phase()), at(status.phase_since.as_ref())),
            ),
            ("reason", status.reason.clone()),
            (
                "cancel",
                if status.cancel_requested && !has_ended {
                    "requested".to_owned()
                } else {
                    String::new()
                },
            ),
            ("next wake", at(status.next_wake.as_ref())),
            ("deadline", if has_ended { String::new() } else { at(status.deadline.as_ref()) }),
            ("connection", spec.connection.clone()),
            ("model", spec.model.clone()),
            ("task", status.task_id.clone()),
            ("files", unless_zero(status.files)),
            ("skipped files", unless_zero(status.files_skipped)),
            ("secrets masked", unless_zero(status.secrets_masked)),
            ("candidates", status.candidates.to_string()),
            ("refused", unless_zero(status.refused)),
            (
                "cost",
                format!(
                    "{} of {}",
                    money::cost(status.cost_pico_usd),
                    money::cost(spec.budget_pico_usd)
                ),
            ),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}

impl Entity for Candidate {
    const NAME: &'static str = "construct.v1.Candidate";
    const PLURAL: &'static str = "candidates";
    const COLUMNS: &'static [&'static str] =
        &["NAME", "STATE", "SCORE", "CATEGORY", "LOCATION", "DESCRIPTION"];

    fn row(&self, _: Timestamp) -> Vec<String> {
        let content = self.content.clone().unwrap_or_default();
        let entry = content.entry_point.unwrap_or_default();
        vec![
            content.name,
            state_name(self.state()).to_owned(),
            content.score.to_string(),
            content.category,
            format!("{}:{}", entry.path, entry.line),
            clip(&one_line(&content.description), 70),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let content = self.content.clone().unwrap_or_default();
        let entry = content.entry_point.unwrap_or_default();
        let lines = |lines: Vec<String>| {
            if lines.len() == 1 { format!("{}\n ", lines[0]) } else { lines.join("\n") }
        };
        let fields = |fields: &[construct_proto::v1::CandidateField]| {
            let field = |field: &construct_proto::v1::CandidateField| {
                let required = if field.required { ", required" } else { "" };
                format!("{} ({}{required}): {}", field.name, field.r#type, field.description)
            };
            lines(fields.iter().map(field).collect())
        };
        let evidence = content.evidence.iter().map(|item| {
            format!(
                "{}:{}: {}\n    {}",
                item.path,
                item.line,
                item.statement,
                one_line(&item.quote)
            )
        });
        let dry_run = content.dry_run.unwrap_or_default();
        let steps = dry_run.steps.iter().cloned().chain([format!("→ {}", dry_run.expected)]);
        let mut details = vec![
            ("name", content.name),
            ("id", id(self.metadata.as_ref())),
            ("state", state_name(self.state()).to_owned()),
            ("reviewed by", self.reviewed_by.clone()),
            ("edited", if self.edited { "by a person".to_owned() } else { String::new() }),
            ("hand-over", self.hand_over_id.clone()),
            ("category", content.category),
            (
                "score",
                format!("{} of 100, {:.0} % confidence", content.score, content.confidence * 100.0),
            ),
            ("command", entry.command),
            ("location", format!("{}:{} {}", entry.path, entry.line, entry.symbol)),
            ("description", content.description),
            ("reasons", lines(content.score_reasons)),
            ("inputs", fields(&content.inputs)),
            ("outputs", fields(&content.outputs)),
            (
                "credentials",
                lines(
                    content
                        .credentials
                        .iter()
                        .map(|credential| format!("{}: {}", credential.name, credential.purpose))
                        .collect(),
                ),
            ),
            (
                "side effects",
                lines(
                    content
                        .side_effects
                        .iter()
                        .map(|effect| format!("{}: {}", effect.kind, effect.description))
                        .collect(),
                ),
            ),
            ("evidence", lines(evidence.collect())),
            ("dry run", lines(steps.collect())),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}

impl Entity for ScanConnection {
    const NAME: &'static str = "construct.v1.ScanConnection";
    const PLURAL: &'static str = "connections";
    const COLUMNS: &'static [&'static str] = &["NAME", "HOST", "CREDENTIAL", "ADDRESS", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let (spec, status) =
            (self.spec.clone().unwrap_or_default(), self.status.clone().unwrap_or_default());
        let host = match spec.host() {
            ScanHost::Github => "github",
            ScanHost::Gitlab => "gitlab",
            ScanHost::Unspecified => "",
        };
        vec![
            spec.name,
            host.to_owned(),
            status.credential,
            spec.base_url,
            age(self.metadata.as_ref(), now),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let mut details = vec![
            ("name", spec.name.clone()),
            ("id", id(self.metadata.as_ref())),
            ("host", self.row(now).swap_remove(1)),
            ("address", spec.base_url),
            (
                "credential",
                format!("{}, encrypted with {}", status.credential, status.encryption_key_id),
            ),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}

impl Entity for construct_proto::v1::Repository {
    const NAME: &'static str = "construct.v1.Repository";
    const PLURAL: &'static str = "repositories";
    const COLUMNS: &'static [&'static str] =
        &["NAME", "VISIBILITY", "BRANCH", "LAST SCAN", "DESCRIPTION"];

    fn row(&self, _: Timestamp) -> Vec<String> {
        vec![
            self.name.clone(),
            if self.private { "private" } else { "public" }.to_owned(),
            self.default_branch.clone(),
            self.last_scan.clone(),
            clip(&one_line(&self.description), 60),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        Self::COLUMNS.iter().map(|column| column.to_owned()).zip(self.row(now)).collect()
    }
}
