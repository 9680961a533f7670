//! What of a call a policy decides on.

use std::fmt;

use reqwest::Url;
use serde_json::Value;

/// What a policy compares with its patterns, according to the permission class of the tool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicySubject {
    /// A path in the workspace, relative to it, `.` for the workspace itself.
    Path(String),
    /// A directory with everything below it, named in the same way.
    Tree(String),
    /// A command line as a shell takes it.
    Command(String),
    /// A request.
    Request {
        /// In upper case.
        method: String,
        /// As the URL parser spells it, in lower case; empty when there is none.
        host: String,
        /// Without the query, which may hold a secret.
        path: String,
    },
    /// The name of the agent that is to work on something; empty for the task's own.
    Agent(String),
    /// A name, of an environment variable for example.
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

/// Of a tool that reaches nothing.
pub(super) fn none(_: &Value) -> PolicySubject {
    PolicySubject::None
}

/// The parameter `path`; the workspace where it is not given.
pub(super) fn path(args: &Value) -> PolicySubject {
    PolicySubject::Path(args["path"].as_str().unwrap_or(".").to_owned())
}

/// The parameter `path` and all that lies below it.
pub(super) fn tree(args: &Value) -> PolicySubject {
    PolicySubject::Tree(args["path"].as_str().unwrap_or(".").to_owned())
}

/// The parameter `path`, and all that lies below it when `recursive`.
pub(super) fn perhaps_tree(args: &Value) -> PolicySubject {
    if args["recursive"] == Value::Bool(true) { tree(args) } else { path(args) }
}

/// The parameters `url` and `options.method`.
pub(super) fn request(args: &Value) -> PolicySubject {
    let url = args["url"].as_str().and_then(|url| Url::parse(url).ok());
    request_to(args["options"]["method"].as_str().unwrap_or("GET"), url.as_ref())
}

/// A request to an address; none is one that cannot be read.
pub(super) fn request_to(method: &str, url: Option<&Url>) -> PolicySubject {
    let host = url.and_then(Url::host_str).unwrap_or_default();
    // A name with a dot at its end is the same name.
    let host = host.strip_suffix('.').unwrap_or(host).to_owned();
    let path = url.map(Url::path).unwrap_or_default().to_owned();
    PolicySubject::Request { method: method.to_owned(), host, path }
}
