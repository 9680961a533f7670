//! The subjects of policy decisions about calls.

use std::fmt;

use reqwest::Url;
use serde_json::Value;

/// What a policy compares with its patterns. It depends on the permission class of the tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySubject {
    /// A path in the workspace, relative to it, `.` for the workspace itself.
    Path(String),
    /// A directory with everything below it, in the same form.
    Tree(String),
    /// A shell command line.
    Command(String),
    /// A request.
    Request {
        /// In upper case.
        method: String,
        /// As the URL parser normalizes it, in lower case; empty when there is none.
        host: String,
        /// Without the query, which may hold a secret.
        path: String,
    },
    /// The name of the agent that a call assigns work to; empty for the task's own.
    Agent(String),
    /// A name, for example of an environment variable.
    Name(String),
    /// There is nothing to decide on.
    None,
}

impl fmt::Display for PolicySubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(text) | Self::Tree(text) | Self::Command(text) | Self::Name(text) => {
                f.write_str(text)
            }
            Self::Agent(name) => write!(f, "agent:{name}"),
            Self::Request { method, host, path } => write!(f, "{method} {host}{path}"),
            Self::None => Ok(()),
        }
    }
}

/// The subject of a tool without access to anything.
pub(super) fn none(_: &Value) -> PolicySubject {
    PolicySubject::None
}

/// The parameter `path`; the workspace if it is absent.
pub(super) fn path(args: &Value) -> PolicySubject {
    PolicySubject::Path(args["path"].as_str().unwrap_or(".").to_owned())
}

/// The parameter `path` and everything below it.
pub(super) fn tree(args: &Value) -> PolicySubject {
    PolicySubject::Tree(args["path"].as_str().unwrap_or(".").to_owned())
}

/// The parameter `path`, and everything below it if `recursive`.
pub(super) fn path_or_tree(args: &Value) -> PolicySubject {
    if args["recursive"] == Value::Bool(true) { tree(args) } else { path(args) }
}

/// The parameters `url` and `options.method`.
pub(super) fn request(args: &Value) -> PolicySubject {
    let url = args["url"].as_str().and_then(|url| Url::parse(url).ok());
    request_to(args["options"]["method"].as_str().unwrap_or("GET"), url.as_ref())
}

/// A request to an address; `None` for an address that cannot be parsed.
pub(super) fn request_to(method: &str, url: Option<&Url>) -> PolicySubject {
    let host = url.and_then(Url::host_str).unwrap_or_default();
    // A name with a trailing dot is the same name.
    let host = host.strip_suffix('.').unwrap_or(host).to_owned();
    let path = url.map(Url::path).unwrap_or_default().to_owned();
    PolicySubject::Request { method: method.to_owned(), host, path }
}
