//! Modules: files of the workspace, which the host reads through a numbered call like any other.
//!
//! A module's name is the path of its file as the host gives it, so that `./lib` and `./lib.ts` are
//! one module.

use std::cell::RefCell;
use std::collections::BTreeMap;

use rquickjs::loader::{ImportAttributes, Loader, Resolver};
use rquickjs::module::Declared;
use rquickjs::{Ctx, Exception, Module, Object, Result, Value};

use crate::guest;
use crate::host;
use crate::natives::{number, string_from, utf8};
use crate::source::{self, SCRIPT};

/// The name under which the host reads modules; as a reserved word it can be no tool's.
const IMPORT: &[u8] = b"import";

/// Files that one script may import.
const MAX_MODULES: usize = 256;

thread_local! {
    static STATE: RefCell<State> = const { RefCell::new(State { names: BTreeMap::new(), sources: BTreeMap::new(), asked: 0 }) };
}

struct State {
    /// Names of modules by the paths they were asked for.
    names: BTreeMap<String, String>,
    /// Sources that were read and not yet compiled.
    sources: BTreeMap<String, Vec<u8>>,
    /// How often a module was asked for.
    asked: u32,
}

/// Finds modules and loads them.
pub(crate) struct Modules;

/// How often a module was asked for. What compiles a module asks for those it imports only once it
/// has parsed it.
pub(crate) fn asked() -> u32 {
    STATE.with_borrow(|state| state.asked)
}

impl Resolver for Modules {
    fn resolve<'js>(
        &mut self,
        ctx: &Ctx<'js>,
        base: &str,
        specifier: &str,
        _: Option<ImportAttributes<'js>>,
    ) -> Result<String> {
        STATE.with_borrow_mut(|state| state.asked += 1);
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
            // The engine keeps what was loaded and forgets what failed.
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
            // What leads out of the workspace is the host's to refuse.
            ".." if parts.last().is_some_and(|last| *last != "..") => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Asks the host for a module: its name and its source.
fn read<'js>(ctx: &Ctx<'js>, path: &str) -> Result<(String, Vec<u8>)> {
    let args = format!("{{\"path\":{}}}", quote(path));
    match host::call(number(), IMPORT, args.as_bytes()) {
        Ok(Ok(reply)) => {
            let reply: Object = ctx.json_parse(reply)?.get()?;
            let name: String = reply.get("path")?;
            let text = utf8(ctx, reply.get("source")?)?;
            let source = copy(ctx, text.as_str().as_bytes())?;
            // The running script has that name already.
            Ok((if name == SCRIPT { format!("./{name}") } else { name }, source))
        }
        Ok(Err(error)) => Err(ctx.throw(failure(ctx, &error)?)),
        Err(host::TooLarge) => {
            Err(Exception::throw_range(ctx, "the module does not fit into the sandbox's memory"))
        }
    }
}

/// An error as the host gives them, which is JSON, as one of the script's.
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
    let before = asked();
    let error = match declare_javascript(ctx, name, source) {
        Err(error) if asked() == before => error,
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

/// The text in a buffer that has room for one byte more, or a JavaScript error.
fn copy(ctx: &Ctx<'_>, text: &[u8]) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    if buffer.try_reserve_exact(text.len() + 1).is_err() {
        return Err(Exception::throw_internal(ctx, "out of memory"));
    }
    buffer.extend_from_slice(text);
    Ok(buffer)
}

/// JSON of a text. The script can't meddle with it, as it could with setters of an object that is
/// made into JSON.
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
