//! Interfaces described in files (OpenAPI, AsyncAPI, protobuf), workflows, notebooks, and the
//! README.

use serde_json::Value as Json;

use super::{
    Argument, EntryKind, EntryPoint, Found, Operation, Place, Readme, Source, found::MAX_OF_FILE,
    number, text,
};

/// Methods of HTTP that an OpenAPI file can describe.
const METHODS: [&str; 7] = ["get", "put", "post", "delete", "patch", "head", "options"];

/// How far is looked for what an operation says of itself.
const MAX_BLOCK: usize = 400;

/// Whether a file is understood as a whole or not at all, by its name and beginning.
pub(super) fn is_document(path: &str, beginning: &[u8]) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let beginning = String::from_utf8_lossy(&beginning[..beginning.len().min(2000)]);
    let is_interface =
        ["openapi", "swagger", "asyncapi"].iter().any(|word| beginning.contains(word));
    let is_data = [".json", ".yaml", ".yml"].iter().any(|extension| name.ends_with(extension));
    name == "package.json"
        || name.ends_with(".ipynb")
        || name.ends_with(".toml")
        || is_data && is_interface
}

/// Looks at a file if it describes something.
pub(super) fn look(source: &Source<'_>, found: &mut Found) {
    let name = source.name();
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    match extension {
        "json" => json(source, found),
        "yaml" | "yml" if source.path.contains(".github/workflows/") => workflow(source, found),
        "yaml" | "yml" => yaml(source, found),
        "proto" => proto(source, found),
        "ipynb" => notebook(source, found),
        _ => {}
    }
}

fn operation(
    source: &Source<'_>,
    kind: &str,
    name: String,
    about: Option<String>,
    line: usize,
) -> Operation {
    Operation { kind: kind.to_owned(), name, about, place: source.place(line) }
}

fn json(source: &Source<'_>, found: &mut Found) {
    let head = source.text.get(..2000).unwrap_or(source.text);
    if !head.contains("\"openapi\"") && !head.contains("\"swagger\"") {
        return;
    }
    let Ok(document) = serde_json::from_str::<Json>(source.text) else { return };
    for (path, methods) in document["paths"].as_object().into_iter().flatten() {
        if found.has_operations() {
            return;
        }
        let from = source.quoted(path, 0);
        for (method, described) in methods.as_object().into_iter().flatten() {
            if !METHODS.contains(&method.as_str()) {
                continue;
            }
            let line = source.quoted(method, from);
            let about = described["summary"]
                .as_str()
                .or_else(|| described["description"].as_str())
                .map(str::to_owned);
            let name = format!("{} {path}", method.to_uppercase());
            found.operation(operation(source, "openapi", name, about, line));
        }
    }
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// What stands after a key, without quotes.
fn scalar(line: &str) -> Option<String> {
    let (_, value) = line.split_once(':')?;
    let value = value.trim().trim_matches(['"', '\'']);
    (!value.is_empty() && !value.starts_with(['|', '>', '&', '{', '['])).then(|| value.to_owned())
}

fn key(line: &str) -> Option<&str> {
    let (key, _) = line
        .trim()
        .rsplit_once(": ")
        .or_else(|| line.trim().strip_suffix(':').map(|key| (key, "")))?;
    Some(key.trim_matches(['"', '\'']))
}

/// The indented block below a line.
fn block<'a>(source: &'a Source<'_>, from: usize) -> impl Iterator<Item = (usize, &'a str)> {
    let outer = indent(source.lines[from]);
    let lines = source.lines.iter().enumerate().skip(from + 1);
    lines
        .filter(|(_, line)| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
        .take_while(move |(_, line)| indent(line) > outer)
        .map(|(index, line)| (index, *line))
}

fn yaml(source: &Source<'_>, found: &mut Found) {
    let begins = |word: &str| source.lines.iter().take(200).any(|line| line.starts_with(word));
    let (kind, top) = if begins("openapi:") || begins("swagger:") {
        ("openapi", "paths:")
    } else if begins("asyncapi:") {
        ("asyncapi", "channels:")
    } else {
        return;
    };
    let Some(from) = source.lines.iter().position(|line| line.starts_with(top)) else { return };
    let Some(first) = block(source, from).next().map(|(_, line)| indent(line)) else { return };
    let mut path = String::new();
    for (index, line) in block(source, from) {
        let Some(name) = key(line) else { continue };
        if found.has_operations() {
            break;
        }
        if indent(line) == first {
            name.clone_into(&mut path);
            if kind == "asyncapi" {
                found.operation(operation(source, kind, path.clone(), None, index));
            }
        } else if kind == "openapi" && METHODS.contains(&name) && indent(line) > first {
            let inner = block(source, index).next().map_or(0, |(_, line)| indent(line));
            let say = |word: &str| {
                let mut lines =
                    block(source, index).take(MAX_BLOCK).filter(|(_, line)| indent(line) == inner);
                lines
                    .find(|(_, line)| line.trim().starts_with(word))
                    .and_then(|(_, line)| scalar(line))
            };
            let about =
                say("summary:").or_else(|| say("operationId:")).or_else(|| say("description:"));
            let name = format!("{} {path}", name.to_uppercase());
            found.operation(operation(source, kind, name, about, index));
        }
    }
}

fn proto(source: &Source<'_>, found: &mut Found) {
    let mut service = None;
    for (index, line) in source.lines.iter().enumerate() {
        let trimmed = line.trim();
        if let Some(rest) = trimmed.strip_prefix("service ") {
            service = rest.split([' ', '{']).next();
        } else if let (Some(service), Some(rest)) = (service, trimmed.strip_prefix("rpc ")) {
            if found.has_operations() {
                break;
            }
            let method = rest.split([' ', '(']).next().unwrap_or_default();
            let about = text::comment_above(&source.lines, index, &["//"]);
            found.operation(operation(
                source,
                "proto",
                format!("{service}.{method}"),
                about,
                index,
            ));
        } else if line.starts_with('}') {
            service = None;
        }
    }
}

/// A workflow that people may start, with what it asks them.
fn workflow(source: &Source<'_>, found: &mut Found) {
    let Some(from) =
        source.lines.iter().position(|line| line.trim_start().starts_with("workflow_dispatch"))
    else {
        return;
    };
    let name =
        source.lines.iter().find(|line| line.starts_with("name:")).and_then(|line| scalar(line));
    let mut arguments = Vec::new();
    let inputs = block(source, from).find(|(_, line)| line.trim() == "inputs:");
    if let Some((at, _)) = inputs {
        let first = block(source, at).next().map_or(0, |(_, line)| indent(line));
        for (index, line) in
            block(source, at).filter(|(_, line)| indent(line) == first).take(MAX_OF_FILE)
        {
            let about =
                block(source, index).find(|(_, line)| line.trim().starts_with("description:"));
            let about = about.and_then(|(_, line)| scalar(line));
            arguments.push(Argument {
                name: key(line).unwrap_or_default().to_owned(),
                about,
                line: number(index),
            });
        }
    }
    found.entry(EntryPoint {
        kind: EntryKind::Workflow,
        name: name.unwrap_or_else(|| source.stem().to_owned()),
        place: source.place(from),
        about: None,
        with: Some("workflow_dispatch".to_owned()),
        arguments,
        aside: false,
    });
}

/// A notebook: its title, and the cell that is marked as holding its parameters.
fn notebook(source: &Source<'_>, found: &mut Found) {
    let Ok(document) = serde_json::from_str::<Json>(source.text) else { return };
    let said = |cell: &Json| match &cell["source"] {
        Json::String(text) => text.clone(),
        Json::Array(lines) => lines.iter().filter_map(Json::as_str).collect(),
        _ => String::new(),
    };
    let cells: Vec<&Json> = document["cells"].as_array().into_iter().flatten().collect();
    let title = cells
        .iter()
        .filter(|cell| cell["cell_type"] == "markdown")
        .map(|cell| said(cell))
        .find_map(|text| {
            let line = text.lines().find(|line| line.starts_with('#'))?;
            Some(line.trim_start_matches('#').trim().to_owned())
        });
    let tagged = |cell: &&&Json| {
        let mut tags = cell["metadata"]["tags"].as_array().into_iter().flatten();
        tags.any(|tag| tag == "parameters")
    };
    let parameters = cells.iter().find(tagged).map(|cell| said(cell)).unwrap_or_default();
    let mut arguments = Vec::new();
    for line in parameters.lines().take(MAX_OF_FILE) {
        let Some((name, value)) = line.split_once('=') else { continue };
        if name.trim().is_empty() || name.starts_with(['#', ' ']) {
            continue;
        }
        let at = source.line_with(&[name.trim(), "="]);
        let about = Some(format!("default {}", value.trim()));
        arguments.push(Argument { name: name.trim().to_owned(), about, line: number(at) });
    }
    let line = title.as_deref().map_or(0, |title| source.line_with(&[title]));
    found.entry(EntryPoint {
        kind: EntryKind::Notebook,
        name: source.name().to_owned(),
        place: source.place(line),
        about: title,
        with: None,
        arguments,
        aside: false,
    });
}

/// The first paragraphs of a README, without what is only there to be looked at.
pub(super) fn readme(source: &Source<'_>, limit: usize) -> Option<Readme> {
    let is_shown = |line: &str| {
        line.starts_with("[![")
            || line.starts_with("![")
            || line.starts_with('<')
            || line.starts_with("..")
    };
    let first =
        source.lines.iter().position(|line| !line.trim().is_empty() && !is_shown(line.trim()))?;
    let mut text = String::new();
    for line in source.lines.iter().skip(first).filter(|line| !is_shown(line.trim())) {
        let is_gap = line.trim().is_empty() && text.ends_with("\n\n");
        if !is_gap {
            text.extend(line.chars().take(500));
            text.push('\n');
        }
        if text.len() >= limit {
            break;
        }
    }
    let text: String = text.trim().chars().take(limit).collect();
    Some(Readme { place: Place { path: source.path.to_owned(), line: number(first) }, text })
}
