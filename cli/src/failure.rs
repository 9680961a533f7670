//! Exit codes, and failures as people read them.

use std::{error::Error as _, fmt, io, process::ExitCode};

use tonic::{Code, Status};
use tonic_types::StatusExt as _;

/// The hint when the gateway does not answer.
const UNREACHABLE_HINT: &str = "is the mesh running? `construct up` (or ./dev up) starts it; set its address with --gateway or CONSTRUCT_GATEWAY_URL";

/// The exit codes in `--help`.
pub(crate) const EXIT_CODES: &str = "\
Exit codes:
  0    completed
  1    failed
  2    wrong usage, or rejected as invalid
  3    the gateway is unreachable or unavailable
  4    the turn was canceled, also by --timeout
  5    the limit of model calls was reached
  6    the task is suspended
  130  interrupted (the turn is canceled first)";

/// The exit code of the command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Exit {
    Completed = 0,
    Failed = 1,
    Usage = 2,
    Unreachable = 3,
    Cancelled = 4,
    MaxTurns = 5,
    Suspended = 6,
    Interrupted = 130,
    /// The reader of the output is gone. The code that a shell reports for SIGPIPE.
    BrokenPipe = 141,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// Why the command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    exit: Exit,
    message: String,
    /// The violated fields, one line each.
    details: Vec<String>,
    hint: Option<String>,
}

impl Failure {
    pub(crate) fn new(exit: Exit, message: impl Into<String>) -> Self {
        Self { exit, message: message.into(), details: Vec::new(), hint: None }
    }

    /// Wrong usage.
    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Exit::Usage, message)
    }

    /// A failed operation.
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(Exit::Failed, message)
    }

    /// Adds a hint at a remedy.
    #[must_use]
    pub(crate) fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    pub(crate) fn exit(&self) -> Exit {
        self.exit
    }

    /// The message without details and hint.
    pub(crate) fn message(&self) -> &str {
        &self.message
    }

    /// Prints the failure, unless the reader of the output is gone.
    pub(crate) fn report(&self) {
        if self.exit != Exit::BrokenPipe {
            eprintln!("error: {self}");
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::text::printable(&self.message))?;
        for detail in &self.details {
            write!(f, "\n  - {}", crate::text::printable(detail))?;
        }
        if let Some(hint) = &self.hint {
            write!(f, "\nhint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        if is_unreachable(&status) {
            let cause = root_cause(&status).unwrap_or_else(|| status.message().to_owned());
            return Self::new(Exit::Unreachable, format!("the gateway cannot be reached: {cause}"))
                .hint(UNREACHABLE_HINT);
        }
        let message = status.message();
        let violations =
            status.get_details_bad_request().map(|bad| bad.field_violations).unwrap_or_default();
        match status.code() {
            Code::Unavailable => {
                Self::new(Exit::Unreachable, format!("the gateway is unavailable: {message}"))
            }
            Code::InvalidArgument if violations.is_empty() => Self::usage(message),
            Code::InvalidArgument => Self {
                details: violations
                    .into_iter()
                    .map(|violation| format!("{}: {}", violation.field, violation.description))
                    .collect(),
                ..Self::usage("the gateway rejects the request as invalid")
            },
            Code::Aborted => Self::failed(message).hint("it was changed concurrently; check its state and retry"),
            Code::Unauthenticated => Self::failed(format!("authentication failed: {message}")).hint(
                "set CONSTRUCT_KEY to an API key, add a context with one (construct context add), or log in: construct login",
            ),
            Code::Unimplemented => Self::failed(format!("the gateway does not know this call: {message}"))
                .hint("does it have another version?"),
            Code::Ok | Code::Unknown | Code::Internal if message.is_empty() => {
                Self::failed(format!("the gateway failed ({})", status.code()))
            }
            _ => Self::failed(message),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        let exit =
            if error.kind() == io::ErrorKind::BrokenPipe { Exit::BrokenPipe } else { Exit::Failed };
        Self::new(exit, error.to_string())
    }
}

/// Whether the client created the status because no response arrived.
fn is_unreachable(status: &Status) -> bool {
    status.source().is_some()
        && matches!(
            status.code(),
            Code::Unavailable | Code::Unknown | Code::Internal | Code::Cancelled
        )
}

/// Whether a retry may help: the connection broke, or the gateway is unavailable.
pub(crate) fn is_retryable(status: &Status) -> bool {
    is_unreachable(status)
        || matches!(
            status.code(),
            Code::Unavailable
                | Code::Unknown
                | Code::Internal
                | Code::Cancelled
                | Code::DeadlineExceeded
        )
}

/// The innermost cause, which is the informative one (`Connection refused`).
fn root_cause(status: &Status) -> Option<String> {
    let mut error = status.source()?;
    while let Some(source) = error.source() {
        error = source;
    }
    Some(error.to_string())
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    #[test]
    fn violated_fields_are_listed() {
        let details = ErrorDetails::with_bad_request_violation("spec.name", "must not be empty");
        let failure = Failure::from(Status::with_error_details(
            Code::InvalidArgument,
            "spec.name: must not be empty",
            details,
        ));
        assert_eq!(
            failure.to_string(),
            "the gateway rejects the request as invalid\n  - spec.name: must not be empty"
        );
        assert_eq!(failure.exit(), Exit::Usage);
    }

    #[test]
    fn status_codes_map_to_exit_codes() {
        for (status, exit) in [
            (Status::unavailable("PostgreSQL is away"), Exit::Unreachable),
            (Status::not_found("there is no agent x"), Exit::Failed),
            (Status::invalid_argument("bad token"), Exit::Usage),
            (Status::failed_precondition("in use"), Exit::Failed),
        ] {
            assert_eq!(Failure::from(status.clone()).exit(), exit, "{status}");
        }
        assert_eq!(
            Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).exit(),
            Exit::BrokenPipe
        );
    }

    #[tokio::test]
    async fn stopped_gateway_is_reported_as_unreachable() {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let gateway = crate::gateway::Gateway::new(&crate::context::Target {
            address: format!("http://127.0.0.1:{port}"),
            key: None,
            organization: None,
            tls: crate::context::TlsArgs::default(),
            session: None,
        })
        .unwrap();
        let request = construct_proto::v1::ListAgentsRequest::default();
        let failure = Failure::from(gateway.agents().list_agents(request).await.unwrap_err());
        assert_eq!(failure.exit(), Exit::Unreachable);
        let text = failure.to_string();
        assert!(
            text.contains("cannot be reached") && text.contains("is the mesh running?"),
            "{text}"
        );
    }
}
