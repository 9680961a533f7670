//! `construct doctor`: checks the deployment and suggests remedies.

use std::fmt::Write as _;

use clap::Args;
use construct_proto::v1::{DiagnoseRequest, Diagnosis, Finding, FindingSeverity};

use crate::{
    console::{Color, Style},
    failure::{Exit, Failure},
    gateway::{Gateway, call},
    output::OutputArgs,
    text::count,
};

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    output: OutputArgs,
}

impl DoctorArgs {
    /// Prints the findings of the gateway. Problems make the command fail; warnings do not.
    ///
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway, color: Color) -> Result<Exit, Failure> {
        let diagnosis = call(gateway.diagnosis().diagnose(DiagnoseRequest {})).await?;
        let colored = color.applies(std::io::IsTerminal::is_terminal(&std::io::stdout()));
        self.output.message(
            "construct.v1.Diagnosis",
            &diagnosis,
            &describe(&diagnosis, colored),
        )?;
        let has_problems =
            diagnosis.findings.iter().any(|finding| finding.severity() == FindingSeverity::Problem);
        Ok(if has_problems { Exit::Failed } else { Exit::Completed })
    }
}

/// The findings as text, with a summary.
fn describe(diagnosis: &Diagnosis, colored: bool) -> String {
    let mut text = String::new();
    let width =
        diagnosis.findings.iter().map(|finding| finding.check.len()).max().unwrap_or_default();
    for finding in &diagnosis.findings {
        let (mark, style) = match finding.severity() {
            FindingSeverity::Ok => ("ok", Style::Good),
            FindingSeverity::Warning => ("WARN", Style::Accent),
            FindingSeverity::Problem | FindingSeverity::Unspecified => ("FAIL", Style::Bad),
        };
        let Finding { check, summary, remedy, .. } = finding;
        _ = writeln!(
            text,
            "{} {check:width$}  {summary}",
            style.paint(&format!("{mark:<4}"), colored)
        );
        if !remedy.is_empty() {
            _ = writeln!(
                text,
                "{:indent$}{}",
                "",
                Style::Dim.paint(&format!("→ {remedy}"), colored),
                indent = width + 7
            );
        }
    }
    let total = |severity| {
        let findings = diagnosis.findings.iter();
        findings.filter(|finding| finding.severity() == severity).count() as i128
    };
    let problems = count(total(FindingSeverity::Problem), "problem");
    let warnings = count(total(FindingSeverity::Warning), "warning");
    _ = writeln!(text, "{problems}, {warnings} (gateway version {})", diagnosis.version);
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(check: &str, severity: FindingSeverity, remedy: &str) -> Finding {
        let summary = format!("about {check}");
        Finding {
            check: check.to_owned(),
            severity: severity.into(),
            summary,
            remedy: remedy.to_owned(),
        }
    }

    #[test]
    fn problems_and_warnings_are_marked_with_remedies() {
        let findings = vec![
            finding("nats", FindingSeverity::Ok, ""),
            finding("tasks.overdue", FindingSeverity::Problem, "check the reconciler"),
            finding("blobs", FindingSeverity::Warning, "free disk space"),
        ];
        let mut diagnosis =
            Diagnosis { findings, version: "1.2.3".to_owned(), ..Default::default() };
        let expected = "\
ok   nats           about nats
FAIL tasks.overdue  about tasks.overdue
                    → check the reconciler
WARN blobs          about blobs
                    → free disk space
1 problem, 1 warning (gateway version 1.2.3)
";
        assert_eq!(describe(&diagnosis, false), expected);
        diagnosis.findings.truncate(1);
        assert!(
            describe(&diagnosis, true).contains("\u{1b}[32mok  \u{1b}[0m nats"),
            "{}",
            describe(&diagnosis, true)
        );
        assert!(
            describe(&diagnosis, false)
                .ends_with("0 problems, 0 warnings (gateway version 1.2.3)\n")
        );
    }
}
