//! Modules that scripts import: files of the workspace, read for the sandbox.

use std::io::Read as _;

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    blocking::blocking,
    sandbox::ToolError,
    tools::Toolbox,
    workspace::{PathError, RelativePath, Workspace},
};

/// The tool whose policy rules apply to reading a module.
pub(crate) const READ_TOOL: &str = "read_file";

/// Maximum size of an imported file.
const MAX_SOURCE_BYTES: u64 = 1 << 20;

/// The arguments of the sandbox's import call.
#[derive(Deserialize)]
struct Arguments {
    path: String,
}

/// Reads a module and returns the path of its file and its text.
///
/// Tries, in order, the file names that TypeScript and Node agree on: the path itself; `.ts` for
/// `.js`, which is what TypeScript's own imports mean; and, if the path names no file, its endings
/// and its index.
pub(crate) async fn read(toolbox: &Toolbox, args: &Value) -> Result<Value, ToolError> {
    let Arguments { path } = Arguments::deserialize(args).map_err(|error| {
        ToolError::new("InternalError", format!("invalid arguments of an import: {error}"))
    })?;
    let names = candidates(toolbox, &path);
    let workspace = toolbox.workspace().clone();
    let reading = blocking(move || find(&workspace, &path, &names));
    reading.await.unwrap_or_else(|| {
        Err(ToolError::new("InternalError", "the thread that reads the module panicked"))
    })
}

fn find(workspace: &Workspace, path: &str, names: &[String]) -> Result<Value, ToolError> {
    for name in names {
        match open(workspace, name) {
            Ok((located, file)) => {
                let path = located.display();
                let source = source(&path, file)?;
                return Ok(json!({"path": path, "source": source}));
            }
            Err(
                PathError::NotFound { .. }
                | PathError::IsDirectory { .. }
                | PathError::NotDirectory { .. },
            ) => {}
            Err(error) => return Err(module_error(&error)),
        }
    }
    let similar =
        workspace.locate(path).map(|path| workspace.similar_names(&path, 3)).unwrap_or_default();
    let hint = if similar.is_empty() {
        String::new()
    } else {
        format!(" Similar names: {}.", similar.join(", "))
    };
    Err(ToolError {
        details: Some(json!({"path": path, "similar": similar})),
        ..ToolError::new(
            "FileNotFound",
            format!("The module {path:?} does not exist in the workspace.{hint}"),
        )
    })
}

fn open(workspace: &Workspace, path: &str) -> Result<(RelativePath, std::fs::File), PathError> {
    let located = workspace.locate(path)?;
    let file = workspace.open_file(&located)?;
    Ok((located, file))
}

/// The paths to try for a module, in order, in the form that `read_file` takes. So policies judge
/// the same path that is opened.
pub(crate) fn candidates(toolbox: &Toolbox, path: &str) -> Vec<String> {
    let canonical = |path: String| {
        let arguments = toolbox.canonical(READ_TOOL, &json!({"path": path})).ok();
        arguments
            .and_then(|arguments| arguments["path"].as_str().map(str::to_owned))
            .unwrap_or(path)
    };
    path_candidates(path).into_iter().map(canonical).collect()
}

fn path_candidates(path: &str) -> Vec<String> {
    let mut candidates = vec![path.to_owned()];
    match path.rsplit_once('.') {
        Some((stem, "js")) => candidates.push(format!("{stem}.ts")),
        Some((stem, "mjs")) => candidates.push(format!("{stem}.mts")),
        Some((_, "ts" | "mts" | "json")) => {}
        _ => candidates.extend(
            [".ts", ".js", ".mjs", ".json", "/index.ts", "/index.js"]
                .map(|ending| format!("{path}{ending}")),
        ),
    }
    candidates
}

fn source(path: &str, file: std::fs::File) -> Result<String, ToolError> {
    let failed = |message: String| ToolError::new("ImportFailed", message);
    let mut bytes = Vec::new();
    // The size from the metadata is not used: it may change, and means nothing for special files.
    file.take(MAX_SOURCE_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| failed(format!("Reading the module {path:?} failed: {error}.")))?;
    if bytes.len() as u64 > MAX_SOURCE_BYTES {
        let message = format!(
            "{path:?} is larger than {MAX_SOURCE_BYTES} bytes and cannot be imported. Read it as a file."
        );
        return Err(ToolError::new("ModuleTooLarge", message));
    }
    let text = String::from_utf8(bytes).ok().filter(|text| !text.contains('\0'));
    let text =
        text.ok_or_else(|| failed(format!("{path:?} is not UTF-8 text and cannot be imported.")))?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

fn module_error(error: &PathError) -> ToolError {
    match error {
        PathError::Outside { .. } => ToolError::new(
            "OutsideWorkspace",
            format!("{error}; modules must be inside the workspace."),
        ),
        _ => ToolError::new("ImportFailed", format!("The module cannot be read: {error}.")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn module_path_resolves_to_its_file() {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in [
            ("a.ts", "A"),
            ("lib/index.ts", "I"),
            ("b.js", "\u{feff}B"),
            ("b.ts", "T"),
            ("d.json", "{}"),
        ] {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        std::fs::write(dir.path().join("large.ts"), " ".repeat(MAX_SOURCE_BYTES as usize + 1))
            .unwrap();
        std::fs::write(dir.path().join("binary.js"), [0xff, 0xfe]).unwrap();
        let toolbox = crate::policy::tests::toolbox(dir.path());
        for (requested, path, text) in [
            ("a.ts", "a.ts", "A"),
            ("a", "a.ts", "A"),
            ("a.js", "a.ts", "A"),
            ("lib", "lib/index.ts", "I"),
            ("b.js", "b.js", "B"),
            ("b", "b.ts", "T"),
            ("d.json", "d.json", "{}"),
            ("lib/../a.ts", "a.ts", "A"),
            ("missing/../a", "a.ts", "A"),
        ] {
            assert_eq!(
                read(&toolbox, &json!({"path": requested})).await,
                Ok(json!({"path": path, "source": text})),
                "{requested}"
            );
        }
        for (requested, name, text_part) in [
            ("c.ts", "FileNotFound", "\"c.ts\" does not exist"),
            ("aa.ts", "FileNotFound", "Similar names: a.ts"),
            ("../x.ts", "OutsideWorkspace", "leads outside"),
            ("large.ts", "ModuleTooLarge", "larger than 1048576 bytes"),
            ("binary.js", "ImportFailed", "not UTF-8"),
        ] {
            let error = read(&toolbox, &json!({"path": requested})).await.unwrap_err();
            assert_eq!(error.name, name, "{requested}: {}", error.message);
            assert!(error.message.contains(text_part), "{requested}: {}", error.message);
        }
    }
}
