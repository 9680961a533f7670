//! `construct scan review`: review of a scan's candidates.

use std::path::PathBuf;

use clap::Args;
use construct_proto::v1::{
    Candidate, CandidateContent, CandidateState, ListCandidatesRequest, ReviewCandidateRequest,
};
use prost_reflect::DynamicMessage;
use serde_json::Value;

use crate::{
    entity::{WriteArgs, id, read_text},
    failure::Failure,
    gateway::{Gateway, call},
    output::OutputArgs,
    page::Page,
};

#[derive(Debug, Args)]
pub(super) struct Review {
    scan: String,
    /// Show all details of this candidate, by name or id.
    #[arg(long, value_name = "CANDIDATE", conflicts_with_all = ["accept", "reject", "undecide", "edit"])]
    show: Option<String>,
    /// Accept this candidate, by name or id. Repeatable. `all`: every undecided candidate that no
    /// other option names.
    #[arg(long, value_name = "CANDIDATE")]
    accept: Vec<String>,
    /// Reject this candidate. Repeatable.
    #[arg(long, value_name = "CANDIDATE")]
    reject: Vec<String>,
    /// Revert the decision about this candidate. Repeatable.
    #[arg(long, value_name = "CANDIDATE")]
    undecide: Vec<String>,
    /// Edit this candidate as `--with` describes.
    #[arg(long, value_name = "CANDIDATE", requires = "with")]
    edit: Option<String>,
    /// A file with a JSON object (`-`: standard input). Its fields replace those of the candidate:
    /// name, description, category, score, score_reasons, confidence, inputs, outputs, credentials,
    /// side_effects, dry_run.
    #[arg(long, value_name = "FILE", requires = "edit")]
    with: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// Lists the candidates of a scan.
async fn list_candidates(gateway: &Gateway, scan: &str) -> Result<Vec<Candidate>, Failure> {
    let request =
        ListCandidatesRequest { scan: scan.to_owned(), ..ListCandidatesRequest::default() };
    Ok(call(gateway.scans().list_candidates(request)).await?.candidates)
}

fn matches(candidate: &Candidate, reference: &str) -> bool {
    let name = candidate.content.as_ref().map(|content| content.name.as_str());
    id(candidate.metadata.as_ref()) == reference || name == Some(reference)
}

fn find<'a>(candidates: &'a [Candidate], reference: &str) -> Result<&'a Candidate, Failure> {
    let candidate = candidates.iter().find(|candidate| matches(candidate, reference));
    candidate.ok_or_else(|| Failure::usage(format!("the scan has no candidate {reference}")))
}

/// Resolves names or ids of candidates to ids.
///
/// # Errors
/// When the scan has no such candidate.
pub(super) async fn ids(
    gateway: &Gateway,
    scan: &str,
    references: &[String],
) -> Result<Vec<String>, Failure> {
    if references.is_empty() {
        return Ok(Vec::new());
    }
    let candidates = list_candidates(gateway, scan).await?;
    references
        .iter()
        .map(|reference| Ok(id(find(&candidates, reference)?.metadata.as_ref())))
        .collect()
}

impl Review {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let candidates = list_candidates(gateway, &self.scan).await?;
        if let Some(reference) = &self.show {
            return self.output.entity(find(&candidates, reference)?);
        }
        let mut requests = Vec::new();
        let request = |candidate: &Candidate| ReviewCandidateRequest {
            candidate: id(candidate.metadata.as_ref()),
            // The decision is about the shown revision only.
            revision: candidate.metadata.as_ref().map_or(0, |metadata| metadata.revision),
            ..ReviewCandidateRequest::default()
        };
        if let (Some(reference), Some(file)) = (&self.edit, &self.with) {
            let (content, fields) = parse_edit(&read_text(file)?)?;
            let content = Some(content);
            requests.push(ReviewCandidateRequest {
                content,
                fields,
                ..request(find(&candidates, reference)?)
            });
        }
        let decisions = [
            (CandidateState::Accepted, &self.accept),
            (CandidateState::Rejected, &self.reject),
            (CandidateState::Proposed, &self.undecide),
        ];
        let mentioned: Vec<&String> =
            decisions.iter().flat_map(|(_, references)| references.iter()).collect();
        for (state, references) in decisions {
            for reference in references {
                let undecided = |candidate: &&Candidate| {
                    let is_mentioned =
                        mentioned.iter().any(|reference| matches(candidate, reference));
                    candidate.state() == CandidateState::Proposed && !is_mentioned
                };
                let selected: Vec<&Candidate> = match reference.as_str() {
                    "all" => candidates.iter().filter(undecided).collect(),
                    reference => vec![find(&candidates, reference)?],
                };
                let decide = |candidate: &Candidate| ReviewCandidateRequest {
                    state: state.into(),
                    ..request(candidate)
                };
                requests.extend(selected.into_iter().map(decide));
            }
        }
        let key = self.write.key();
        for (index, mut request) in requests.into_iter().enumerate() {
            request.idempotency_key = format!("{key}.{index}");
            // The edit changes the revision that a later decision would require.
            if index > 0 && self.edit.is_some() {
                request.revision = 0;
            }
            call(gateway.scans().review_candidate(request)).await?;
        }
        self.output.list(&Page {
            items: list_candidates(gateway, &self.scan).await?,
            next_page_token: String::new(),
        })
    }
}

/// Parses an edit: the new content, and the names of its fields.
fn parse_edit(text: &str) -> Result<(CandidateContent, Vec<String>), Failure> {
    let invalid =
        |error: &dyn std::fmt::Display| Failure::usage(format!("the edit cannot be read: {error}"));
    let value: Value = serde_json::from_str(text).map_err(|error| invalid(&error))?;
    let fields = value
        .as_object()
        .map(|fields| fields.keys().cloned().collect::<Vec<_>>())
        .unwrap_or_default();
    if fields.is_empty() {
        return Err(invalid(&"it must be a JSON object with at least one field"));
    }
    let kind = construct_proto::DESCRIPTORS.get_message_by_name("construct.v1.CandidateContent");
    let kind = kind.ok_or_else(|| invalid(&"its type is unknown"))?;
    let names = fields.iter().map(|field| {
        let descriptor =
            kind.get_field_by_name(field).or_else(|| kind.get_field_by_json_name(field));
        descriptor
            .map(|field| field.name().to_owned())
            .ok_or_else(|| invalid(&format!("there is no field `{field}`")))
    });
    let names = names.collect::<Result<Vec<_>, _>>()?;
    let message =
        DynamicMessage::deserialize(kind.clone(), value).map_err(|error| invalid(&error))?;
    Ok((message.transcode_to().map_err(|error| invalid(&error))?, names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edit_names_replaced_fields() {
        let (content, fields) =
            parse_edit(r#"{"name": "a-tool", "scoreReasons": ["good"], "score": 7}"#).unwrap();
        assert_eq!((content.name.as_str(), content.score), ("a-tool", 7));
        assert_eq!(
            fields,
            ["name", "scoreReasons", "score"].map(|field| if field == "scoreReasons" {
                "score_reasons"
            } else {
                field
            })
        );
        for text in ["", "7", "{}", r#"{"nothing": 1}"#, r#"{"score": "high"}"#] {
            assert!(parse_edit(text).is_err(), "{text}");
        }
    }
}
