//! Validation of requests. A request is checked against the rules of the contract, and all
//! violations are returned at once, as `INVALID_ARGUMENT` with a `google.rpc.BadRequest` that names
//! each field.
//!
//! The limits of single fields are in `proto/construct/v1`, as the option `rule`.
//! [`Api::begin_request`](crate::api::Api::begin_request) checks them for every request. Checks
//! that depend on several fields, on the configuration or on an embedded language are in
//! [`requests`].

mod contract;
pub(crate) mod formats;
pub(crate) mod requests;

use std::{fmt::Display, str::FromStr};

use construct_domain::id;
use construct_proto::ApiRequest;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt as _};

/// Maximum number of listed violations. The response must fit into trailers.
const MAX_LISTED: usize = 32;

/// The violations of a request, by field.
#[derive(Debug, Default)]
pub(crate) struct Violations {
    found: Vec<FieldViolation>,
}

impl Violations {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// The violations of the contract's rules.
    pub(crate) fn in_request<R: ApiRequest>(request: &R) -> Self {
        let mut violations = Self::new();
        contract::check(R::NAME, &request.encode_to_vec(), &mut violations);
        violations
    }

    /// The number of listed violations.
    fn len(&self) -> usize {
        self.found.len()
    }

    /// Whether a violation concerns this field or a field within it. If the list is full, the
    /// answer is unknown, and true is returned.
    pub(crate) fn concern(&self, field: &str) -> bool {
        let is_within = |known: &FieldViolation| {
            known
                .field
                .strip_prefix(field)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
        };
        self.found.len() == MAX_LISTED || self.found.iter().any(is_within)
    }

    /// Reports a violation.
    pub(crate) fn add(&mut self, field: impl Into<String>, description: impl Into<String>) {
        if self.found.len() < MAX_LISTED {
            self.found.push(FieldViolation::new(field, description));
        }
    }

    /// Reports a violation unless `holds`.
    pub(crate) fn require(
        &mut self,
        holds: bool,
        field: &(impl Display + ?Sized),
        description: impl FnOnce() -> String,
    ) {
        if !holds {
            self.add(field.to_string(), description());
        }
    }

    /// Returns a status with all violations, if there are any.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if there is a violation.
    pub(crate) fn finish(self) -> Result<(), Status> {
        let Some(first) = self.found.first() else { return Ok(()) };
        let message = match self.found.len() {
            1 => format!("{}: {}", first.field, first.description),
            more => format!("{}: {} (and {} more)", first.field, first.description, more - 1),
        };
        Err(Status::with_error_details(
            Code::InvalidArgument,
            message,
            ErrorDetails::with_bad_request(self.found),
        ))
    }
}

/// Checks a request against the contract.
///
/// # Errors
/// `INVALID_ARGUMENT` with all violations.
pub(crate) fn check<R: ApiRequest>(request: &R) -> Result<(), Status> {
    Violations::in_request(request).finish()
}

/// Parses an id of a request that was checked against the contract.
///
/// # Errors
/// `INVALID_ARGUMENT` if it is not valid.
pub(crate) fn id<T: FromStr<Err = id::ParseError>>(text: &str) -> Result<T, Status> {
    text.parse().map_err(|error: id::ParseError| Status::invalid_argument(error.to_string()))
}

/// Parses an optional id.
///
/// # Errors
/// Those of [`id`].
pub(crate) fn optional_id<T: FromStr<Err = id::ParseError>>(
    text: &str,
) -> Result<Option<T>, Status> {
    if text.is_empty() { Ok(None) } else { id(text).map(Some) }
}

/// Formats `1048576` as `1,048,576`.
pub(crate) fn thousands(number: usize) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
pub(crate) mod tests {
    use construct_proto::v1;

    use super::*;

    const TASK: &str = "task_01890a5d-ac96-774b-bcce-b302099a8057";

    /// The violated fields of a status.
    pub(crate) fn fields(status: &Status) -> Vec<String> {
        let details = status.get_error_details();
        details.bad_request().map_or_else(Vec::new, |bad| {
            bad.field_violations.iter().map(|violation| violation.field.clone()).collect()
        })
    }

    #[test]
    fn all_violations_are_reported_at_once() {
        let spec = v1::AgentSpec {
            name: "Not A Name".into(),
            description: "x".repeat(1025),
            model: "m".into(),
            max_turns: 1001,
            ..v1::AgentSpec::default()
        };
        let status = check(&v1::CreateAgentRequest {
            spec: Some(spec),
            ..v1::CreateAgentRequest::default()
        })
        .expect_err("three things are wrong");
        assert_eq!(status.code(), Code::InvalidArgument);
        assert_eq!(fields(&status), ["spec.name", "spec.description", "spec.max_turns"]);
        assert!(status.message().contains("(and 2 more)"), "{}", status.message());
        let details = status.get_error_details();
        let bad = details.bad_request().expect("there are field violations");
        assert_eq!(
            bad.field_violations[1].description,
            "must have at most 1,024 characters, has 1,025"
        );
        assert_eq!(bad.field_violations[2].description, "must be between 0 and 1000, is 1001");
    }

    #[test]
    fn lengths_count_characters_or_bytes_as_documented() {
        let update = |title: &str| {
            check(&v1::ForkTaskRequest {
                task: TASK.into(),
                message: TASK.replace("task", "msg"),
                title: title.into(),
                workspace: format!("/{}", "ä".repeat(2047)),
                ..v1::ForkTaskRequest::default()
            })
        };
        assert!(update(&"ä".repeat(200)).is_ok());
        assert_eq!(fields(&update(&"ä".repeat(201)).expect_err("too long")), ["title"]);
        assert_eq!(fields(&update("a\0b").expect_err("U+0000")), ["title"]);
        let list = |workspace: String| {
            let filter = v1::list_tasks_request::Filter { workspace, ..Default::default() };
            check(&v1::ListTasksRequest { filter: Some(filter), page: None })
        };
        assert!(list(format!("/{}", "x".repeat(4095))).is_ok());
        assert_eq!(
            fields(&list(format!("/{}", "ä".repeat(2048))).expect_err("too long")),
            ["filter.workspace"]
        );
    }

    #[test]
    fn secret_values_and_lengths_are_not_repeated() {
        let value = "hunter2".repeat(2000);
        let credential = Some(v1::scan_connection_spec::Credential::Token(value.clone()));
        let spec =
            v1::ScanConnectionSpec { name: "c".into(), host: 1, credential, ..Default::default() };
        let status =
            check(&v1::CreateScanConnectionRequest { spec: Some(spec), ..Default::default() });
        let status = status.expect_err("it is too long");
        assert_eq!(fields(&status), ["spec.token"]);
        let text = format!("{status:?} {:?}", status.get_error_details());
        assert!(
            !text.contains("hunter2") && !text.contains("14,000") && !text.contains("14000"),
            "{text}"
        );
    }

    #[test]
    fn unknown_enum_values_and_invalid_times_are_refused() {
        let filter = v1::list_approvals_request::Filter { state: 99, ..Default::default() };
        let request = v1::ListApprovalsRequest { filter: Some(filter), page: None };
        assert_eq!(fields(&check(&request).expect_err("unknown")), ["filter.state"]);
        for (seconds, nanos) in [(i64::MAX, 0), (0, -1), (0, 1_000_000_000)] {
            let since = Some(prost_types::Timestamp { seconds, nanos });
            let request = v1::GetCostsRequest { since, ..v1::GetCostsRequest::default() };
            assert_eq!(
                fields(&check(&request).expect_err("no time")),
                ["since"],
                "{seconds} {nanos}"
            );
        }
    }

    #[test]
    fn durations_are_bounded_and_canonical() {
        let hedge = |seconds, nanos| {
            let hedge_after = Some(prost_types::Duration { seconds, nanos });
            check(&v1::UpdateModelRequest {
                model: "m".into(),
                hedge_after,
                ..v1::UpdateModelRequest::default()
            })
        };
        for (seconds, nanos) in [(0, 0), (0, 100_000_000), (600, 0)] {
            assert!(hedge(seconds, nanos).is_ok(), "{seconds} {nanos}");
        }
        for (seconds, nanos) in
            [(0, 99_999_999), (600, 1), (-1, 0), (1, -1), (0, 1_000_000_000), (i64::MAX, 0)]
        {
            let status = hedge(seconds, nanos).expect_err("out of bounds");
            assert_eq!(fields(&status), ["hedge_after"], "{seconds} {nanos}");
            assert!(
                status.message().ends_with("must be 0, or 100 milliseconds to 10 minutes"),
                "{status:?}"
            );
        }
    }

    #[test]
    fn entries_beyond_a_list_limit_are_only_counted() {
        let candidates = vec!["none".to_owned(); 100_000];
        let request = v1::CreateToolsRequest {
            scan: TASK.replace("task", "scan"),
            candidates,
            ..Default::default()
        };
        let status = check(&request).expect_err("too many");
        let fields = fields(&status);
        assert_eq!((fields.len(), fields[0].as_str()), (MAX_LISTED, "candidates[0]"));
        let agents = vec!["a".repeat(2000); 101];
        let rule = v1::PolicyRule { action: 1, agents, ..v1::PolicyRule::default() };
        let policy = Some(v1::Policy { rules: vec![rule] });
        let request =
            v1::UpdateTaskRequest { task: TASK.into(), policy, ..v1::UpdateTaskRequest::default() };
        let status = check(&request).expect_err("too many and too long");
        let last = status.get_error_details().bad_request().map(|bad| bad.field_violations.len());
        assert_eq!(last, Some(MAX_LISTED));
    }

    #[test]
    fn list_of_violations_is_bounded() {
        let mut violations = Violations::new();
        for index in 0..1000 {
            violations.add(format!("types[{index}]"), "wrong");
        }
        assert_eq!(fields(&violations.finish().expect_err("much is wrong")).len(), MAX_LISTED);
    }
}
