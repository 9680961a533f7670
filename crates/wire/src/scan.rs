//! Scans for clients, without the credentials of repositories.

use construct_domain::OrganizationId;
use construct_proto::{DESCRIPTORS, v1};
use construct_store::scan::{
    Candidate, CandidateState, Scan, ScanConnection, ScanCredential, ScanEvent, ScanHost, ScanKind,
    ScanPhase,
};
use prost_reflect::{DynamicMessage, SerializeOptions};
use serde_json::Value;

use crate::convert::{metadata, time};

/// The JSON Schema of a candidate's content, for models and for people who edit it.
pub const CANDIDATE_SCHEMA: &str = include_str!("scan/candidate.json");

/// A connection for clients.
pub fn connection(connection: &ScanConnection) -> v1::ScanConnection {
    let times = (connection.created_at, connection.updated_at);
    v1::ScanConnection {
        metadata: metadata(connection.id, connection.organization, times, connection.revision),
        spec: Some(v1::ScanConnectionSpec {
            name: connection.name.clone(),
            host: host(connection.host).into(),
            base_url: connection.base_url.clone(),
            credential: None,
        }),
        status: Some(v1::ScanConnectionStatus {
            credential: connection.credential.as_str().to_owned(),
            encryption_key_id: connection.sealed.key_id.clone(),
        }),
    }
}

/// The host of repositories for clients.
pub const fn host(host: ScanHost) -> v1::ScanHost {
    match host {
        ScanHost::Github => v1::ScanHost::Github,
        ScanHost::Gitlab => v1::ScanHost::Gitlab,
    }
}

/// The host of repositories from clients.
pub const fn to_host(host: v1::ScanHost) -> Option<ScanHost> {
    match host {
        v1::ScanHost::Github => Some(ScanHost::Github),
        v1::ScanHost::Gitlab => Some(ScanHost::Gitlab),
        v1::ScanHost::Unspecified => None,
    }
}

/// The kind of a connection's credential.
pub const fn credential(credential: &v1::scan_connection_spec::Credential) -> ScanCredential {
    match credential {
        v1::scan_connection_spec::Credential::Token(_) => ScanCredential::Token,
        v1::scan_connection_spec::Credential::App(_) => ScanCredential::App,
    }
}

/// A scan for clients.
pub fn scan(scan: &Scan) -> v1::Scan {
    use v1::scan_spec::Source;
    let source = match scan.kind {
        ScanKind::Github => Source::Github(scan.location.clone()),
        ScanKind::Gitlab => Source::Gitlab(scan.location.clone()),
        ScanKind::Upload => {
            Source::Upload(v1::ScanUpload { archive: Vec::new(), name: scan.location.clone() })
        }
        ScanKind::Folder => Source::Folder(scan.location.clone()),
    };
    v1::Scan {
        metadata: metadata(
            scan.id,
            scan.organization,
            (scan.created_at, scan.updated_at),
            scan.revision,
        ),
        spec: Some(v1::ScanSpec {
            source: Some(source),
            connection: scan.connection_name.clone(),
            reference: scan.reference.clone(),
            model: scan.model.clone(),
            budget_pico_usd: scan.budget_pico_usd,
            limits: Some(v1::ScanLimits {
                max_bytes: scan.limits.max_bytes,
                max_files: scan.limits.max_files,
                max_turns: u32::try_from(scan.limits.max_turns).unwrap_or_default(),
                timeout: Some(prost_types::Duration {
                    seconds: scan.limits.timeout_seconds,
                    nanos: 0,
                }),
            }),
        }),
        status: Some(v1::ScanStatus {
            phase: phase(scan.phase).into(),
            phase_since: Some(time(scan.phase_since)),
            reason: scan.reason.clone(),
            next_wake: scan.next_wake.map(time),
            deadline: Some(time(scan.deadline)),
            repository: scan.repository.clone(),
            commit: scan.commit.clone(),
            task_id: scan.task.clone(),
            files: scan.files,
            files_skipped: scan.files_skipped,
            secrets_masked: scan.secrets_masked,
            candidates: scan.candidates,
            refused: scan.refused,
            cost_pico_usd: scan.cost_pico_usd,
            event_sequence: scan.event_sequence,
            cancel_requested: scan.cancel_requested.is_some(),
        }),
    }
}

/// The phase of a scan for clients.
pub const fn phase(phase: ScanPhase) -> v1::ScanPhase {
    match phase {
        ScanPhase::Queued => v1::ScanPhase::Queued,
        ScanPhase::Snapshot => v1::ScanPhase::Snapshot,
        ScanPhase::Survey => v1::ScanPhase::Survey,
        ScanPhase::Exploring => v1::ScanPhase::Exploring,
        ScanPhase::Checking => v1::ScanPhase::Checking,
        ScanPhase::Review => v1::ScanPhase::Review,
        ScanPhase::Failed => v1::ScanPhase::Failed,
        ScanPhase::Cancelled => v1::ScanPhase::Cancelled,
    }
}

/// An event of a scan for clients.
pub fn event(
    organization: OrganizationId,
    scan: impl ToString,
    event: &ScanEvent,
) -> v1::ScanEvent {
    v1::ScanEvent {
        scan_id: scan.to_string(),
        cursor: event.sequence.to_string(),
        sequence: event.sequence,
        r#type: event.kind.clone(),
        time: Some(time(event.created_at)),
        organization_id: organization.to_string(),
        phase: phase(event.phase).into(),
        message: event.message.clone(),
        files: event.files,
        candidates: event.candidates,
        cost_pico_usd: event.cost_pico_usd,
        tool_calls: event.tool_calls,
    }
}

/// A candidate for clients. An undecodable one has no content.
pub fn candidate(candidate: &Candidate) -> v1::Candidate {
    let times = (candidate.created_at, candidate.updated_at);
    v1::Candidate {
        metadata: metadata(candidate.id, candidate.organization, times, candidate.revision),
        scan_id: candidate.scan.to_string(),
        state: candidate_state(candidate.state).into(),
        content: content(&candidate.content),
        reviewed_by: candidate.reviewed_by.clone(),
        reviewed_at: candidate.reviewed_at.map(time),
        edited: candidate.edited,
        hand_over_id: candidate.hand_over.map(|id| id.to_string()).unwrap_or_default(),
    }
}

/// The state of a candidate for clients.
pub const fn candidate_state(state: CandidateState) -> v1::CandidateState {
    match state {
        CandidateState::Proposed => v1::CandidateState::Proposed,
        CandidateState::Accepted => v1::CandidateState::Accepted,
        CandidateState::Rejected => v1::CandidateState::Rejected,
        CandidateState::HandedOver => v1::CandidateState::HandedOver,
    }
}

/// The state of a candidate from clients.
pub const fn to_candidate_state(state: v1::CandidateState) -> Option<CandidateState> {
    match state {
        v1::CandidateState::Unspecified => None,
        v1::CandidateState::Proposed => Some(CandidateState::Proposed),
        v1::CandidateState::Accepted => Some(CandidateState::Accepted),
        v1::CandidateState::Rejected => Some(CandidateState::Rejected),
        v1::CandidateState::HandedOver => Some(CandidateState::HandedOver),
    }
}

const CONTENT: &str = "construct.v1.CandidateContent";

/// The content of a candidate from JSON with the contract's names; `None` for other JSON.
pub fn content(json: &Value) -> Option<v1::CandidateContent> {
    let kind = DESCRIPTORS.get_message_by_name(CONTENT)?;
    DynamicMessage::deserialize(kind, json).ok()?.transcode_to().ok()
}

/// The content of a candidate as JSON.
pub fn to_content(content: &v1::CandidateContent) -> Option<Value> {
    let kind = DESCRIPTORS.get_message_by_name(CONTENT)?;
    let mut message = DynamicMessage::new(kind);
    message.transcode_from(content).ok()?;
    let options = SerializeOptions::new().use_proto_field_name(true).skip_default_fields(false);
    message.serialize_with_options(serde_json::value::Serializer, &options).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn candidate_content_reads_back() {
        let said = v1::CandidateContent {
            name: "a-tool".into(),
            score: 70,
            confidence: 0.5,
            entry_point: Some(v1::CandidateEntryPoint {
                path: "src/main.rs".into(),
                line: 7,
                ..Default::default()
            }),
            ..Default::default()
        };
        let json = to_content(&said).expect("it can be written");
        assert_eq!(json["entry_point"]["line"], 7);
        assert_eq!(content(&json), Some(said));
        assert_eq!(content(&serde_json::json!({"nothing": "known"})), None);
    }
}
