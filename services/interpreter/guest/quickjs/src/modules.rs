//! Modules: files of the workspace, which the host reads through a numbered call like any other.
//!
//! A module's name is the path of its file as the host returns it, so that `./lib` and `./lib.ts`
//! are one module.

use std::cell::RefCell;
use std::collections::BTreeMap;

use rquickjs::loader::{ImportAttributes, Loader, Resolver};
use rquickjs::module::Declared;
use rquickjs::{Ctx, Exception, Module, Object, Result, Value};

use crate::guest;
use crate::host;
use crate::natives::{number, string_from, utf8};
use crate::source::{self, SCRIPT};

/// The name of the host call that reads modules. As a reserved word it cannot be a tool's name.
const IMPORT: &[u8] = b"import";

/// Maximum number of files that one script imports.
const MAX_MODULES: usize = 256;

thread_local! {
    static STATE: RefCell<State> = const { RefCell::new(State { names: BTreeMap::new(), sources: BTreeMap::new(), request_count: 0 }) };
}

struct State {
    /// Names of modules by requested path.
    names: BTreeMap<String, String>,
    /// Sources that were read and not yet compiled.
    sources: BTreeMap<String, Vec<u8>>,
    /// Number of requests to resolve a module.
    request_count: u32,
}

/// Resolves and loads modules.
pub(crate) struct Modules;

/// The number of requests to resolve a module. The engine resolves the imports of a module only
/// after it has parsed the module.
pub(crate) fn request_count() -> u32 {
    STATE.with_borrow(|state| state.request_count)
}

impl Resolver for Modules {
    fn resolve<'js>(
        &mut self,
        ctx: &Ctx<'js>,
        base: &str,
        specifier: &str,
        _: Option<ImportAttributes<'js>>,
    ) -> Result<String> {
        STATE.with_borrow_mut(|state| state.request_count += 1);
        if !specifier.starts_with("./") && !specifier.starts_with("../") {
            let refused: Value =
                guest::with(|guest| guest.prelude.refuse.get(ctx)?.call((specifier,)))?;
            return Err(ctx.throw(refused));
        }
        let path = path(base, specifier);
        if let Some(name) = STATE.with_borrow(|state| state.names.get(&path).cloned()) {
            return Ok(name);
        }
        if STATE.with_borrow(|state| state.names.len()) >= MAX_MODULES {
            let message =
                format!("A script imports at most {MAX_MODULES} files: put several into one.");
            let error =
                format!("{{\"name\":\"ModuleLimitExceeded\",\"message\":{}}}", quote(&message));
            return Err(ctx.throw(failure(ctx, error.as_bytes())?));
        }
        let (name, source) = read(ctx, &path)?;
        STATE.with_borrow_mut(|state| {
            state.names.insert(path, name.clone());
            state.sources.insert(name.clone(), source);
        });
        Ok(name)
    }
}

impl Loader for Modules {
    fn load<'js>(
        &mut self,
        ctx: &Ctx<'js>,
        name: &str,
        _: Option<ImportAttributes<'js>>,
    ) -> Result<Module<'js, Declared>> {
        let Some(source) = STATE.with_borrow_mut(|state| state.sources.remove(name)) else {
            // The engine keeps loaded modules and forgets failed ones.
            return Err(Exception::throw_reference(
                ctx,
                &format!("{name} could not be loaded before"),
            ));
        };
        if name.ends_with(".json") { json(ctx, name, source) } else { declare(ctx, name, &source) }
    }
}

/// The path of a module that a file imports, both relative to the workspace.
fn path(base: &str, specifier: &str) -> String {
    let folder = base.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(specifier.split('/')) {
        match part {
            "" | "." => {}
            // The host refuses paths outside the workspace.
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Reads a module from the host: its name and its source.
fn read<'js>(ctx: &Ctx<'js>, path: &str) -> Result<(String, Vec<u8>)> {
    let args = format!("{{\"path\":{}}}", quote(path));
    match host::call(number(), IMPORT, args.as_bytes()) {
        Ok(Ok(reply)) => {
            let reply: Object = ctx.json_parse(reply)?.get()?;
            let name: String = reply.get("path")?;
            let text = utf8(ctx, reply.get("source")?)?;
            let source = copy(ctx, text.as_str().as_bytes())?;
            // The running script already has that name.
            Ok((if name == SCRIPT { format!("./{name}") } else { name }, source))
        }
        Ok(Err(error)) => Err(ctx.throw(failure(ctx, &error)?)),
        Err(host::TooLarge) => {
            Err(Exception::throw_range(ctx, "the module does not fit into the sandbox's memory"))
        }
    }
}

/// Turns an error of the host, which is JSON, into an error of the script.
fn failure<'js>(ctx: &Ctx<'js>, error: &[u8]) -> Result<Value<'js>> {
    let error = string_from(ctx, error)?;
    guest::with(|guest| guest.prelude.failure.get(ctx)?.call((error,)))
}

/// Compiles a module, which may be TypeScript, and loads what it imports.
fn declare<'js>(ctx: &Ctx<'js>, name: &str, source: &[u8]) -> Result<Module<'js, Declared>> {
    if source::may_mislead(source)
        && let Ok(javascript) = source::strip(ctx, source, name)
    {
        return declare_javascript(ctx, name, &javascript);
    }
    let before = request_count();
    let error = match declare_javascript(ctx, name, source) {
        Err(error) if request_count() == before => error,
        done => return done,
    };
    let thrown = source::exception(ctx, &error);
    if !source::may_be_typescript(&thrown) {
        return Err(ctx.throw(thrown));
    }
    match source::strip(ctx, source, name) {
        Ok(javascript) if javascript == source => Err(ctx.throw(thrown)),
        Ok(javascript) => declare_javascript(ctx, name, &javascript),
        Err(thrown) => Err(ctx.throw(thrown)),
    }
}

/// Compiles a module of JavaScript and loads what it imports.
pub(crate) fn declare_javascript<'js>(
    ctx: &Ctx<'js>,
    name: &str,
    source: &[u8],
) -> Result<Module<'js, Declared>> {
    Module::declare(ctx.clone(), name, copy(ctx, source)?)
}

/// A module whose default export is the JSON of its file.
fn json<'js>(ctx: &Ctx<'js>, name: &str, source: Vec<u8>) -> Result<Module<'js, Declared>> {
    let value = match ctx.json_parse(source) {
        Ok(value) => value,
        Err(error) => {
            let thrown = source::exception(ctx, &error);
            let message = source::message(&thrown).unwrap_or_default();
            return Err(Exception::throw_syntax(ctx, &format!("{name} is not JSON: {message}")));
        }
    };
    let module = Module::declare(ctx.clone(), name, "export default import.meta.json;")?;
    module.meta()?.set("json", value)?;
    Ok(module)
}

/// Copies a text into a buffer with room for one more byte, or throws a JavaScript error.
fn copy(ctx: &Ctx<'_>, text: &[u8]) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    if buffer.try_reserve_exact(text.len() + 1).is_err() {
        return Err(Exception::throw_internal(ctx, "out of memory"));
    }
    buffer.extend_from_slice(text);
    Ok(buffer)
}

/// Encodes a text as JSON. The script cannot interfere, as it could with setters of an object.
fn quote(text: &str) -> String {
    let mut json = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            '\u{0}'..='\u{1f}' => json.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ => json.push(character),
        }
    }
    json.push('"');
    json
}
