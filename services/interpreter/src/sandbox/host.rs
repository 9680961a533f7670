//! The host interface of a run.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use serde::Serialize;

/// The host of a run: everything the run can reach. One host serves one run.
///
/// A run is deterministic. Everything that differs between two executions of the same script comes
/// through these functions, in an order that depends only on their earlier answers. So a host that
/// records the answers can repeat a run.
pub trait Host: Send + Sync {
    /// The tools the script may call.
    fn declare(&self) -> &ToolTable;

    /// Runs a tool. If the future is dropped, the run does not need the result: it was canceled,
    /// exceeded a limit, or ended without waiting for this call.
    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<serde_json::Value, ToolError>>;

    /// Waits for a timer of the script. Timers and calls share one sequence of numbers.
    fn sleep<'a>(&'a self, number: u32, duration: Duration) -> BoxFuture<'a, ()> {
        let _ = number;
        Box::pin(tokio::time::sleep(duration))
    }

    /// The current time, each time the script reads it.
    fn now(&self) -> jiff::Timestamp;

    /// The seed of the run's random numbers, read at most once. It differs between executions and
    /// is the same on a replay.
    fn seed(&self) -> [u8; 32];

    /// The concurrent call or timer whose end the script must see next, if an order is recorded.
    /// `outstanding` tells whether a number was started and its end not yet seen. `None` means
    /// whichever ends first.
    fn next_settled(&self, outstanding: &dyn Fn(u32) -> bool) -> Option<u32> {
        let _ = outstanding;
        None
    }

    /// The script is blocked until one of these calls and timers ends.
    fn on_blocked(&self, under_way: &mut dyn Iterator<Item = u32>) {
        let _ = under_way;
    }

    /// The script sees the end of this call or timer.
    fn on_settled(&self, number: u32) {
        let _ = number;
    }
}

/// The name of the call by which a script reads an imported module: `{"path": …}`, relative to the
/// workspace. The result is `{"path": …, "source": …}`, where `path` identifies the module. No tool
/// has this name.
pub const IMPORT: &str = "import";

/// A tool call of the script, or the reading of a module ([`IMPORT`]).
#[derive(Debug, Clone, PartialEq)]
pub struct HostCall {
    /// The call's position among all calls and timers of the run, from 1, in the order in which the
    /// script made them.
    pub number: u32,
    /// The tool's name, as declared.
    pub name: String,
    /// The arguments by name: always an object. The sandbox checks nothing else.
    pub args: serde_json::Value,
}

/// The error of a tool: in the script, an `Error` with these properties.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ToolError {
    /// The kind, such as `FileNotFound`. With `TypeError`, `RangeError` or `SyntaxError` the script
    /// gets an error of that class.
    pub name: String,
    /// What went wrong and what to do about it, for the model.
    pub message: String,
    /// A stable code, where the tool has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub code: Option<String>,
    /// Further data for the script.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<serde_json::Value>,
}

impl ToolError {
    /// An error with a name and a message only.
    pub fn new(name: impl Into<String>, message: impl Into<String>) -> Self {
        ToolError { name: name.into(), message: message.into(), code: None, details: None }
    }
}

/// The declaration of a tool for the guest.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// The name of the global function. `secrets.get` is the member `get` of the global object
    /// `secrets`; a member of `tools`, such as `tools.search`, always returns a promise.
    pub name: String,
    /// Further names of the same function, of either form.
    pub aliases: Vec<String>,
    /// The parameters in positional order.
    pub parameters: Vec<Parameter>,
    /// Whether the global function returns its result directly and blocks the script, or returns a
    /// promise. The member of `tools` always returns a promise.
    pub immediate: bool,
}

/// A parameter of a tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Whether it takes an object. An object in its place is then its value and not a set of named
    /// arguments.
    pub object: bool,
}

/// The tools of a run in the guest's format. Created once, used by many runs.
#[derive(Debug, Clone)]
pub struct ToolTable {
    json: String,
    names: Arc<HashSet<String>>,
}

impl ToolTable {
    /// The table of these tools.
    pub fn new<'a>(tools: impl IntoIterator<Item = &'a Tool>) -> Self {
        let mut tool_names = HashSet::new();
        let rows: Vec<_> = tools
            .into_iter()
            .map(|tool| {
                tool_names.insert(tool.name.clone());
                let names: Vec<_> =
                    tool.parameters.iter().map(|parameter| &parameter.name).collect();
                let objects: Vec<_> = tool
                    .parameters
                    .iter()
                    .enumerate()
                    .filter(|(_, p)| p.object)
                    .map(|(position, _)| position)
                    .collect();
                serde_json::json!([tool.name, tool.immediate, names, objects, tool.aliases])
            })
            .collect();
        ToolTable { json: serde_json::Value::Array(rows).to_string(), names: Arc::new(tool_names) }
    }

    /// The names that the guest uses in calls; only scripts see the aliases.
    pub(super) fn names(&self) -> Arc<HashSet<String>> {
        Arc::clone(&self.names)
    }

    /// See `configure` in the guest's `prelude/tools.js`.
    pub(crate) fn json(&self) -> &str {
        &self.json
    }
}
