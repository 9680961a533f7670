//! `construct scan review`: what a scan proposes, and what people say of it.

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
    page::Listed,
};

#[derive(Debug, Args)]
pub(super) struct Review {
    scan: String,
    /// Show everything about this candidate, by name or id.
    #[arg(long, value_name = "CANDIDATE", conflicts_with_all = ["accept", "reject", "undecide", "edit"])]
    show: Option<String>,
    /// Accept this candidate, by name or id; can be given several times. `all`: every one that
    /// nobody has decided about, and that is not named besides.
    #[arg(long, value_name = "CANDIDATE")]
    accept: Vec<String>,
    /// Reject this candidate.
    #[arg(long, value_name = "CANDIDATE")]
    reject: Vec<String>,
    /// Take a decision back.
    #[arg(long, value_name = "CANDIDATE")]
    undecide: Vec<String>,
    /// Change this candidate, by what `--with` says.
    #[arg(long, value_name = "CANDIDATE", requires = "with")]
    edit: Option<String>,
    /// A file with a JSON object (`-`: standard input) whose fields replace those of the candidate:
    /// name, description, category, score, score_reasons, confidence, inputs, outputs, credentials,
    /// side_effects, dry_run.
    #[arg(long, value_name = "FILE", requires = "edit")]
    with: Option<PathBuf>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// The candidates of a scan.
async fn all(gateway: &Gateway, scan: &str) -> Result<Vec<Candidate>, Failure> {
    let request =
        ListCandidatesRequest { scan: scan.to_owned(), ..ListCandidatesRequest::default() };
    Ok(call(gateway.scans().list_candidates(request)).await?.candidates)
}

fn is_called(candidate: &Candidate, named: &str) -> bool {
    let name = candidate.content.as_ref().map(|content| content.name.as_str());
    id(candidate.metadata.as_ref()) == named || name == Some(named)
}

fn find<'a>(candidates: &'a [Candidate], named: &str) -> Result<&'a Candidate, Failure> {
    let found = candidates.iter().find(|candidate| is_called(candidate, named));
    found.ok_or_else(|| Failure::usage(format!("the scan has no candidate {named}")))
}

/// Candidates by name or id, as ids.
///
/// # Errors
/// When one is none of the scan's.
pub(super) async fn ids(
    gateway: &Gateway,
    scan: &str,
    named: &[String],
) -> Result<Vec<String>, Failure> {
    if named.is_empty() {
        return Ok(Vec::new());
    }
    let candidates = all(gateway, scan).await?;
    named.iter().map(|named| Ok(id(find(&candidates, named)?.metadata.as_ref()))).collect()
}

impl Review {
    pub(super) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let candidates = all(gateway, &self.scan).await?;
        if let Some(named) = &self.show {
            return self.output.one(find(&candidates, named)?);
        }
        let mut requests = Vec::new();
        let request = |candidate: &Candidate| ReviewCandidateRequest {
            candidate: id(candidate.metadata.as_ref()),
            // What was looked at is what is decided about.
            revision: candidate.metadata.as_ref().map_or(0, |metadata| metadata.revision),
            ..ReviewCandidateRequest::default()
        };
        if let (Some(named), Some(file)) = (&self.edit, &self.with) {
            let (content, fields) = edit(&read_text(file)?)?;
            let content = Some(content);
            requests.push(ReviewCandidateRequest {
                content,
                fields,
                ..request(find(&candidates, named)?)
            });
        }
        let decisions = [
            (CandidateState::Accepted, &self.accept),
            (CandidateState::Rejected, &self.reject),
            (CandidateState::Proposed, &self.undecide),
        ];
        let mentioned: Vec<&String> =
            decisions.iter().flat_map(|(_, named)| named.iter()).collect();
        for (state, named) in decisions {
            for named in named {
                let undecided = |candidate: &&Candidate| {
                    let is_mentioned = mentioned.iter().any(|named| is_called(candidate, named));
                    candidate.state() == CandidateState::Proposed && !is_mentioned
                };
                let meant: Vec<&Candidate> = match named.as_str() {
                    "all" => candidates.iter().filter(undecided).collect(),
                    named => vec![find(&candidates, named)?],
                };
                let decide = |one: &Candidate| ReviewCandidateRequest {
                    state: state.into(),
                    ..request(one)
                };
                requests.extend(meant.into_iter().map(decide));
            }
        }
        let key = self.write.key();
        for (index, mut request) in requests.into_iter().enumerate() {
            request.idempotency_key = format!("{key}.{index}");
            // Who edits and decides at once has looked at it before both.
            if index > 0 && self.edit.is_some() {
                request.revision = 0;
            }
            call(gateway.scans().review_candidate(request)).await?;
        }
        self.output.list(&Listed {
            items: all(gateway, &self.scan).await?,
            next_page_token: String::new(),
        })
    }
}

/// What an edit says: the parts that are replaced, and which they are.
fn edit(text: &str) -> Result<(CandidateContent, Vec<String>), Failure> {
    let wrong =
        |error: &dyn std::fmt::Display| Failure::usage(format!("the edit cannot be read: {error}"));
    let value: Value = serde_json::from_str(text).map_err(|error| wrong(&error))?;
    let fields = value
        .as_object()
        .map(|fields| fields.keys().cloned().collect::<Vec<_>>())
        .unwrap_or_default();
    if fields.is_empty() {
        return Err(wrong(&"it is no JSON object with something in it"));
    }
    let kind = construct_proto::DESCRIPTORS.get_message_by_name("construct.v1.CandidateContent");
    let kind = kind.ok_or_else(|| wrong(&"the contract is not known"))?;
    let names = fields.iter().map(|field| {
        let known = kind.get_field_by_name(field).or_else(|| kind.get_field_by_json_name(field));
        known
            .map(|field| field.name().to_owned())
            .ok_or_else(|| wrong(&format!("there is no field `{field}`")))
    });
    let names = names.collect::<Result<Vec<_>, _>>()?;
    let message =
        DynamicMessage::deserialize(kind.clone(), value).map_err(|error| wrong(&error))?;
    Ok((message.transcode_to().map_err(|error| wrong(&error))?, names))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_edit_says_what_it_replaces() {
        let (content, fields) =
            edit(r#"{"name": "a-tool", "scoreReasons": ["good"], "score": 7}"#).unwrap();
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
            assert!(edit(text).is_err(), "{text}");
        }
    }
}
