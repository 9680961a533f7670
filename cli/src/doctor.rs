//! `construct doctor`: whether the deployment is well, and what to do where it is not.

use std::fmt::Write as _;

use clap::Args;
use construct_proto::v1::{DiagnoseRequest, Diagnosis, Finding, FindingSeverity};

use crate::{
    console::{Color, Style},
    failure::{Exit, Failure},
    gateway::{Gateway, call},
    output::OutputArgs,
};

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    output: OutputArgs,
}

impl DoctorArgs {
    /// Says what the gateway finds. What does not work makes the command fail; what only wants to
    /// be looked at does not.
    ///
    /// # Errors
    /// What the gateway fails with.
    pub(crate) async fn run(self, gateway: &Gateway, color: Color) -> Result<Exit, Failure> {
        let diagnosis = call(gateway.diagnosis().diagnose(DiagnoseRequest {})).await?;
        let colored = color.applies(std::io::IsTerminal::is_terminal(&std::io::stdout()));
        self.output.words("construct.v1.Diagnosis", &diagnosis, &words(&diagnosis, colored))?;
        let broken =
            diagnosis.findings.iter().any(|finding| finding.severity() == FindingSeverity::Problem);
        Ok(if broken { Exit::Failed } else { Exit::Completed })
    }
}

fn words(diagnosis: &Diagnosis, colored: bool) -> String {
    let mut text = String::new();
    let width =
        diagnosis.findings.iter().map(|finding| finding.check.len()).max().unwrap_or_default();
    for finding in &diagnosis.findings {
        let (mark, style) = match finding.severity() {
            FindingSeverity::Ok => ("ok", Style::Good),
            FindingSeverity::Warning => ("look", Style::Accent),
            FindingSeverity::Problem | FindingSeverity::Unspecified => ("BAD", Style::Bad),
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
    let count = |severity| {
        diagnosis.findings.iter().filter(|finding| finding.severity() == severity).count()
    };
    let (bad, look) = (count(FindingSeverity::Problem), count(FindingSeverity::Warning));
    _ = match (bad, look) {
        (0, 0) => writeln!(
            text,
            "everything is well, as far as a gateway of version {} can see",
            diagnosis.version
        ),
        (0, look) => writeln!(text, "it works; {look} to look at"),
        (bad, look) => writeln!(text, "{bad} wrong, {look} to look at"),
    };
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
    fn what_is_wrong_stands_out_with_what_to_do_about_it() {
        let findings = vec![
            finding("nats", FindingSeverity::Ok, ""),
            finding("tasks.overdue", FindingSeverity::Problem, "look there"),
            finding("blobs", FindingSeverity::Warning, "make room"),
        ];
        let mut diagnosis =
            Diagnosis { findings, version: "1.2.3".to_owned(), ..Default::default() };
        let expected = "\
ok   nats           about nats
BAD  tasks.overdue  about tasks.overdue
                    → look there
look blobs          about blobs
                    → make room
1 wrong, 1 to look at
";
        assert_eq!(words(&diagnosis, false), expected);
        diagnosis.findings.truncate(1);
        assert!(
            words(&diagnosis, true).contains("\u{1b}[32mok  \u{1b}[0m nats"),
            "{}",
            words(&diagnosis, true)
        );
        assert!(
            words(&diagnosis, false).ends_with("as far as a gateway of version 1.2.3 can see\n")
        );
    }
}
