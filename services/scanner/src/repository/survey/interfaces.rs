//! Interface descriptions (OpenAPI, AsyncAPI, protobuf), workflows, notebooks, and the README.

use serde_json::Value as Json;

use super::{
    Argument, EntryKind, EntryPoint, Findings, Location, Operation, Readme, SourceFile,
    findings::MAX_PER_FILE, line_number, text,
};

/// The HTTP methods that an OpenAPI file can describe.
const HTTP_METHODS: [&str; 7] = ["get", "put", "post", "delete", "patch", "head", "options"];

/// Lines of an operation that are searched for its description.
const MAX_BLOCK_LINES: usize = 400;

/// Whether a file must be read completely, by its name and beginning.
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

/// Collects the findings of a file, if it describes an interface, workflow or notebook.
pub(super) fn collect(source: &SourceFile<'_>, found: &mut Findings) {
    let name = source.name();
    let extension = name.rsplit_once('.').map_or("", |(_, extension)| extension);
    match extension {
        "json" => collect_openapi_json(source, found),
        "yaml" | "yml" if source.path.contains(".github/workflows/") => {
            collect_workflow(source, found)
        }
        "yaml" | "yml" => collect_yaml(source, found),
        "proto" => collect_proto(source, found),
        "ipynb" => collect_notebook(source, found),
        _ => {}
    }
}

fn new_operation(
    source: &SourceFile<'_>,
    kind: &str,
    name: String,
    about: Option<String>,
    line: usize,
) -> Operation {
    Operation { kind: kind.to_owned(), name, about, place: source.location(line) }
}

fn collect_openapi_json(source: &SourceFile<'_>, found: &mut Findings) {
    let head = source.text.get(..2000).unwrap_or(source.text);
    if !head.contains("\"openapi\"") && !head.contains("\"swagger\"") {
        return;
    }
    let Ok(document) = serde_json::from_str::<Json>(source.text) else { return };
    for (path, methods) in document["paths"].as_object().into_iter().flatten() {
        if found.is_full_of_operations() {
            return;
        }
        let from = source.line_of_literal(path, 0);
        for (method, described) in methods.as_object().into_iter().flatten() {
            if !HTTP_METHODS.contains(&method.as_str()) {
                continue;
            }
            let line = source.line_of_literal(method, from);
            let about = described["summary"]
                .as_str()
                .or_else(|| described["description"].as_str())
                .map(str::to_owned);
            let name = format!("{} {path}", method.to_uppercase());
            found.add_operation(new_operation(source, "openapi", name, about, line));
        }
    }
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// The value after a key, without quotes.
fn yaml_scalar(line: &str) -> Option<String> {
    let (_, value) = line.split_once(':')?;
    let value = value.trim().trim_matches(['"', '\'']);
    (!value.is_empty() && !value.starts_with(['|', '>', '&', '{', '['])).then(|| value.to_owned())
}

fn yaml_key(line: &str) -> Option<&str> {
    let (key, _) = line
        .trim()
        .rsplit_once(": ")
        .or_else(|| line.trim().strip_suffix(':').map(|key| (key, "")))?;
    Some(key.trim_matches(['"', '\'']))
}

/// The indented block below a line.
fn indented_block<'a>(
    source: &'a SourceFile<'_>,
    from: usize,
) -> impl Iterator<Item = (usize, &'a str)> {
    let outer = indent(source.lines[from]);
    let lines = source.lines.iter().enumerate().skip(from + 1);
    lines
        .filter(|(_, line)| !line.trim().is_empty() && !line.trim_start().starts_with('#'))
        .take_while(move |(_, line)| indent(line) > outer)
        .map(|(index, line)| (index, *line))
}

fn collect_yaml(source: &SourceFile<'_>, found: &mut Findings) {
    let begins = |word: &str| source.lines.iter().take(200).any(|line| line.starts_with(word));
    let (kind, top) = if begins("openapi:") || begins("swagger:") {
        ("openapi", "paths:")
    } else if begins("asyncapi:") {
        ("asyncapi", "channels:")
    } else {
        return;
    };
    let Some(from) = source.lines.iter().position(|line| line.starts_with(top)) else { return };
    let Some(first) = indented_block(source, from).next().map(|(_, line)| indent(line)) else {
        return;
    };
    let mut path = String::new();
    for (index, line) in indented_block(source, from) {
        let Some(name) = yaml_key(line) else { continue };
        if found.is_full_of_operations() {
            break;
        }
        if indent(line) == first {
            name.clone_into(&mut path);
            if kind == "asyncapi" {
                found.add_operation(new_operation(source, kind, path.clone(), None, index));
            }
        } else if kind == "openapi" && HTTP_METHODS.contains(&name) && indent(line) > first {
            let inner = indented_block(source, index).next().map_or(0, |(_, line)| indent(line));
            let field = |word: &str| {
                let mut lines = indented_block(source, index)
                    .take(MAX_BLOCK_LINES)
                    .filter(|(_, line)| indent(line) == inner);
                lines
                    .find(|(_, line)| line.trim().starts_with(word))
                    .and_then(|(_, line)| yaml_scalar(line))
            };
            let about = field("summary:")
                .or_else(|| field("operationId:"))
                .or_else(|| field("description:"));
            let name = format!("{} {path}", name.to_uppercase());
            found.add_operation(new_operation(source, kind, name, about, index));
        }
    }
}

fn collect_proto(source: &SourceFile<'_>, found: &mut Findings) {
    let mut service = None;
    for (index, line) in source.lines.iter().enumerate() {
        let trimmed = line.trim();
        if let Some(rest) = trimmed.strip_prefix("service ") {
            service = rest.split([' ', '{']).next();
        } else if let (Some(service), Some(rest)) = (service, trimmed.strip_prefix("rpc ")) {
            if found.is_full_of_operations() {
                break;
            }
            let method = rest.split([' ', '(']).next().unwrap_or_default();
            let about = text::comment_above(&source.lines, index, &["//"]);
            found.add_operation(new_operation(
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

/// Collects a workflow that people may start, with its inputs.
fn collect_workflow(source: &SourceFile<'_>, found: &mut Findings) {
    let Some(from) =
        source.lines.iter().position(|line| line.trim_start().starts_with("workflow_dispatch"))
    else {
        return;
    };
    let name = source
        .lines
        .iter()
        .find(|line| line.starts_with("name:"))
        .and_then(|line| yaml_scalar(line));
    let mut arguments = Vec::new();
    let inputs = indented_block(source, from).find(|(_, line)| line.trim() == "inputs:");
    if let Some((at, _)) = inputs {
        let first = indented_block(source, at).next().map_or(0, |(_, line)| indent(line));
        for (index, line) in
            indented_block(source, at).filter(|(_, line)| indent(line) == first).take(MAX_PER_FILE)
        {
            let about = indented_block(source, index)
                .find(|(_, line)| line.trim().starts_with("description:"));
            let about = about.and_then(|(_, line)| yaml_scalar(line));
            arguments.push(Argument {
                name: yaml_key(line).unwrap_or_default().to_owned(),
                about,
                line: line_number(index),
            });
        }
    }
    found.add_entry(EntryPoint {
        kind: EntryKind::Workflow,
        name: name.unwrap_or_else(|| source.stem().to_owned()),
        place: source.location(from),
        about: None,
        with: Some("workflow_dispatch".to_owned()),
        arguments,
        aside: false,
    });
}

/// Collects a notebook: its title, and the parameters of its tagged cell.
fn collect_notebook(source: &SourceFile<'_>, found: &mut Findings) {
    let Ok(document) = serde_json::from_str::<Json>(source.text) else { return };
    let cell_text = |cell: &Json| match &cell["source"] {
        Json::String(text) => text.clone(),
        Json::Array(lines) => lines.iter().filter_map(Json::as_str).collect(),
        _ => String::new(),
    };
    let cells: Vec<&Json> = document["cells"].as_array().into_iter().flatten().collect();
    let title = cells
        .iter()
        .filter(|cell| cell["cell_type"] == "markdown")
        .map(|cell| cell_text(cell))
        .find_map(|text| {
            let line = text.lines().find(|line| line.starts_with('#'))?;
            Some(line.trim_start_matches('#').trim().to_owned())
        });
    let tagged = |cell: &&&Json| {
        let mut tags = cell["metadata"]["tags"].as_array().into_iter().flatten();
        tags.any(|tag| tag == "parameters")
    };
    let parameters = cells.iter().find(tagged).map(|cell| cell_text(cell)).unwrap_or_default();
    let mut arguments = Vec::new();
    for line in parameters.lines().take(MAX_PER_FILE) {
        let Some((name, value)) = line.split_once('=') else { continue };
        if name.trim().is_empty() || name.starts_with(['#', ' ']) {
            continue;
        }
        let at = source.line_with(&[name.trim(), "="]);
        let about = Some(format!("default {}", value.trim()));
        arguments.push(Argument { name: name.trim().to_owned(), about, line: line_number(at) });
    }
    let line = title.as_deref().map_or(0, |title| source.line_with(&[title]));
    found.add_entry(EntryPoint {
        kind: EntryKind::Notebook,
        name: source.name().to_owned(),
        place: source.location(line),
        about: title,
        with: None,
        arguments,
        aside: false,
    });
}

/// The first paragraphs of a README, without images and badges.
pub(super) fn read_readme(source: &SourceFile<'_>, limit: usize) -> Option<Readme> {
    let is_decoration = |line: &str| {
        line.starts_with("[![")
            || line.starts_with("![")
            || line.starts_with('<')
            || line.starts_with("..")
    };
    let first = source
        .lines
        .iter()
        .position(|line| !line.trim().is_empty() && !is_decoration(line.trim()))?;
    let mut text = String::new();
    for line in source.lines.iter().skip(first).filter(|line| !is_decoration(line.trim())) {
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
    Some(Readme {
        place: Location { path: source.path.to_owned(), line: line_number(first) },
        text,
    })
}
