//! What a run can reach.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use serde::Serialize;

/// What a run can reach. One host serves one run.
///
/// A run is deterministic: everything that differs between two executions of the same script comes
/// through these functions, in an order that only depends on what they answered before. A host that
/// records the answers can therefore repeat a run.
pub trait Host: Send + Sync {
    /// The tools the script may call.
    fn declare(&self) -> &ToolTable;

    /// Runs a tool. Dropping the future means that nobody will learn the result: the run was
    /// cancelled, exceeded a limit, or ended without waiting for this call.
    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<serde_json::Value, ToolError>>;

    /// Lets a timer of the script elapse. Timers are numbered in one sequence with calls.
    fn sleep<'a>(&'a self, number: u32, duration: Duration) -> BoxFuture<'a, ()> {
        let _ = number;
        Box::pin(tokio::time::sleep(duration))
    }

    /// The time, whenever the script asks for it.
    fn now(&self) -> jiff::Timestamp;

    /// The seed of the run's random numbers, asked for at most once. Different for every execution,
    /// the same when one is repeated.
    fn seed(&self) -> [u8; 32];

    /// Which concurrent call or timer the script must see end next, where an order is known.
    /// `outstanding` says of a number whether it is one that was started and that the script has
    /// not seen end. `None` means whichever ends first.
    fn next_settled(&self, outstanding: &dyn Fn(u32) -> bool) -> Option<u32> {
        let _ = outstanding;
        None
    }

    /// The script can do nothing until one of these calls and timers has ended.
    fn stands_still(&self, under_way: &mut dyn Iterator<Item = u32>) {
        let _ = under_way;
    }

    /// The script now sees the end of this call or timer.
    fn settled(&self, number: u32) {
        let _ = number;
    }
}

/// The name of the call by which a script reads a module it imports: `{"path": …}`, relative to the
/// workspace; the result is `{"path": …, "source": …}`, where `path` is what tells modules apart.
/// No tool has this name.
pub const IMPORT: &str = "import";

/// A tool call of the script, or the reading of a module ([`IMPORT`]).
#[derive(Debug, Clone, PartialEq)]
pub struct HostCall {
    /// The call's place among all calls and timers of the run, from 1, in the order in which the
    /// script made them.
    pub number: u32,
    /// The tool's name, as declared.
    pub name: String,
    /// The arguments by name: always an object. The sandbox checks no more than that.
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
    /// Anything a script might want to look at.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<serde_json::Value>,
}

impl ToolError {
    /// An error with a name and a message only.
    pub fn new(name: impl Into<String>, message: impl Into<String>) -> Self {
        ToolError { name: name.into(), message: message.into(), code: None, details: None }
    }
}

/// A tool as the guest must know it to offer it to scripts.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// The name of the global function. `secrets.get` is the member `get` of the global object
    /// `secrets`; a member of `tools`, such as `tools.search`, always gives a promise.
    pub name: String,
    /// Further names of the same function, of either form.
    pub aliases: Vec<String>,
    /// The parameters in positional order.
    pub parameters: Vec<Parameter>,
    /// Whether the global function gives its result directly, while the script stands still, or a
    /// promise of it. The member of `tools` always gives a promise.
    pub immediate: bool,
}

/// A parameter of a tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Whether it takes an object, so that an object in its place is its value and not a set of
    /// named arguments.
    pub object: bool,
}

/// The tools of a run, in the form in which the guest takes them. Made once, used by many runs.
#[derive(Debug, Clone)]
pub struct ToolTable {
    json: String,
    names: Arc<HashSet<String>>,
}

impl ToolTable {
    /// The table of these tools.
    pub fn new<'a>(tools: impl IntoIterator<Item = &'a Tool>) -> Self {
        let mut called = HashSet::new();
        let rows: Vec<_> = tools
            .into_iter()
            .map(|tool| {
                called.insert(tool.name.clone());
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
        ToolTable { json: serde_json::Value::Array(rows).to_string(), names: Arc::new(called) }
    }

    /// The names under which the guest calls tools; their further names are known to scripts only.
    pub(super) fn names(&self) -> Arc<HashSet<String>> {
        Arc::clone(&self.names)
    }

    /// See `configure` in the guest's `prelude/tools.js`.
    pub(crate) fn json(&self) -> &str {
        &self.json
    }
}
