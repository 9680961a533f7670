//! Manifests: packages, their programs and scripts, workspaces, recipes.

use serde_json::Value as Json;
use toml::Value as Toml;

use super::{
    Argument, EntryKind, EntryPoint, Findings, Module, SourceFile, findings::MAX_PER_FILE,
    line_number, text,
};

/// Libraries that characterize a package.
const KNOWN_LIBRARIES: &[&str] = &[
    "actix-web",
    "aiohttp",
    "anthropic",
    "axum",
    "beautifulsoup4",
    "boto3",
    "celery",
    "clap",
    "click",
    "cobra",
    "commander",
    "django",
    "duckdb",
    "express",
    "fastapi",
    "fastify",
    "fire",
    "flask",
    "gin",
    "gradio",
    "hono",
    "httpx",
    "koa",
    "langchain",
    "matplotlib",
    "nestjs",
    "next",
    "numpy",
    "openai",
    "pandas",
    "pillow",
    "playwright",
    "polars",
    "puppeteer",
    "pydantic",
    "pyspark",
    "react",
    "requests",
    "reqwest",
    "rocket",
    "scikit-learn",
    "scrapy",
    "selenium",
    "serde",
    "sqlalchemy",
    "sqlx",
    "streamlit",
    "svelte",
    "tensorflow",
    "tokio",
    "tonic",
    "torch",
    "transformers",
    "typer",
    "vue",
    "yargs",
    "yt-dlp",
];

/// Whether a file is a manifest that its extension does not reveal.
pub(super) fn is_manifest(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let manifest_names = ["go.mod", "Procfile", "requirements.txt", "setup.cfg", "Taskfile.yml"];
    manifest_names.contains(&name) || is_dockerfile(name) || is_makefile(name) || is_justfile(name)
}

fn is_dockerfile(name: &str) -> bool {
    name == "Containerfile"
        || name == "Dockerfile"
        || name.starts_with("Dockerfile.")
        || name.ends_with(".dockerfile")
}

fn is_makefile(name: &str) -> bool {
    ["Makefile", "makefile", "GNUmakefile"].contains(&name) || name.ends_with(".mk")
}

fn is_justfile(name: &str) -> bool {
    name.eq_ignore_ascii_case("justfile") || name.eq_ignore_ascii_case(".justfile")
}

/// Collects the findings of a file, if it is a manifest.
pub(super) fn collect(source: &SourceFile<'_>, found: &mut Findings) {
    match source.name() {
        "Cargo.toml" => collect_cargo(source, found),
        "pyproject.toml" => collect_pyproject(source, found),
        "setup.py" | "setup.cfg" => collect_setuptools(source, found),
        "requirements.txt" => collect_requirements(source, found),
        "package.json" => collect_package_json(source, found),
        "pnpm-workspace.yaml" => collect_pnpm(source, found),
        "go.mod" | "go.work" => collect_go(source, found),
        "Procfile" => collect_procfile(source, found),
        name if is_dockerfile(name) => collect_dockerfile(source, found),
        name if is_makefile(name) => collect_makefile(source, found),
        name if is_justfile(name) => collect_justfile(source, found),
        _ => {}
    }
}

fn new_module(
    source: &SourceFile<'_>,
    kind: &str,
    name: Option<&str>,
    about: Option<&str>,
) -> Module {
    let quoted = name.map(|name| format!("\"{name}\""));
    let line = quoted.as_deref().map_or(0, |quoted| source.line_with(&["name", quoted]));
    Module {
        kind: kind.to_owned(),
        name: name.unwrap_or(source.folder()).to_owned(),
        about: about.map(str::to_owned),
        place: source.location(line),
        frameworks: Vec::new(),
        members: Vec::new(),
    }
}

fn new_entry(
    source: &SourceFile<'_>,
    kind: EntryKind,
    name: &str,
    line: usize,
    about: Option<String>,
) -> EntryPoint {
    let place = source.location(line);
    EntryPoint {
        kind,
        name: name.to_owned(),
        place,
        about,
        with: None,
        arguments: Vec::new(),
        aside: false,
    }
}

fn known_libraries<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    names
        .filter(|name| KNOWN_LIBRARIES.contains(name) || name.starts_with("@nestjs/"))
        .map(str::to_owned)
        .collect()
}

fn strings(value: Option<&Toml>) -> Vec<String> {
    let list = value.and_then(Toml::as_array).into_iter().flatten();
    list.filter_map(Toml::as_str).map(str::to_owned).collect()
}

fn collect_cargo(source: &SourceFile<'_>, found: &mut Findings) {
    let Ok(manifest) = source.text.parse::<toml::Table>() else { return };
    let package = manifest.get("package");
    let name = package.and_then(|package| package.get("name")).and_then(Toml::as_str);
    let about = package.and_then(|package| package.get("description")).and_then(Toml::as_str);
    let mut module = new_module(source, "cargo", name, about);
    module.members =
        strings(manifest.get("workspace").and_then(|workspace| workspace.get("members")));
    let dependencies = manifest.get("dependencies").and_then(Toml::as_table);
    module.frameworks = known_libraries(
        dependencies.into_iter().flat_map(|table| table.keys().map(String::as_str)),
    );
    found.add_module(module);
    for bin in manifest.get("bin").and_then(Toml::as_array).into_iter().flatten().take(MAX_PER_FILE)
    {
        if let Some(name) = bin.get("name").and_then(Toml::as_str) {
            let mut binary = new_entry(
                source,
                EntryKind::Binary,
                name,
                source.line_with(&["name", &format!("\"{name}\"")]),
                None,
            );
            binary.with =
                bin.get("path").and_then(Toml::as_str).map(|path| format!("cargo, {path}"));
            found.add_entry(binary);
        }
    }
}

fn python_dependencies<'a>(list: impl Iterator<Item = &'a str>) -> Vec<String> {
    let bare = |text: &'a str| {
        text.split(|c: char| !(c.is_ascii_alphanumeric() || "-_.".contains(c)))
            .next()
            .unwrap_or(text)
    };
    let names: Vec<String> = list.map(|text| bare(text.trim()).to_ascii_lowercase()).collect();
    known_libraries(names.iter().map(String::as_str))
}

fn collect_pyproject(source: &SourceFile<'_>, found: &mut Findings) {
    let Ok(manifest) = source.text.parse::<toml::Table>() else { return };
    let tool = |name: &str| manifest.get("tool").and_then(|tool| tool.get(name));
    let poetry = tool("poetry");
    let project = manifest.get("project").or(poetry);
    let name = project.and_then(|project| project.get("name")).and_then(Toml::as_str);
    let about = project.and_then(|project| project.get("description")).and_then(Toml::as_str);
    let mut module = new_module(source, "python", name, about);
    let mut dependencies = strings(project.and_then(|project| project.get("dependencies")));
    let of_poetry = poetry.and_then(|poetry| poetry.get("dependencies")).and_then(Toml::as_table);
    dependencies.extend(of_poetry.into_iter().flat_map(|table| table.keys().cloned()));
    module.frameworks = python_dependencies(dependencies.iter().map(String::as_str));
    module.members = strings(
        tool("uv")
            .and_then(|uv| uv.get("workspace"))
            .and_then(|workspace| workspace.get("members")),
    );
    found.add_module(module);
    let tables = ["scripts", "gui-scripts"].map(|key| project.and_then(|project| project.get(key)));
    for (name, target) in
        tables.into_iter().flatten().filter_map(Toml::as_table).flatten().take(MAX_PER_FILE)
    {
        let line = source.line_with(&[name, target.as_str().unwrap_or_default()]);
        let mut binary = new_entry(source, EntryKind::Binary, name, line, None);
        binary.with = target.as_str().map(|target| format!("python, {target}"));
        found.add_entry(binary);
    }
}

/// Collects `console_scripts` of setuptools, from either of its files, and the package's name.
fn collect_setuptools(source: &SourceFile<'_>, found: &mut Findings) {
    let value = |key: &str| {
        let line = source.lines.iter().find(|line| {
            line.trim().strip_prefix(key).is_some_and(|rest| rest.trim_start().starts_with('='))
        })?;
        let value = line.split_once('=')?.1.trim().trim_end_matches(',');
        Some(value.trim_matches(['"', '\'']).to_owned())
    };
    let mut module =
        new_module(source, "python", value("name").as_deref(), value("description").as_deref());
    let named = source.lines.iter().position(|line| line.trim().starts_with("name"));
    module.place = source.location(named.unwrap_or(0));
    found.add_module(module);
    let mut in_scripts = false;
    for (index, line) in source.lines.iter().enumerate() {
        if line.contains("console_scripts") || line.contains("gui_scripts") {
            in_scripts = true;
        } else if in_scripts && line.trim().is_empty() {
            in_scripts = false;
        }
        if !in_scripts {
            continue;
        }
        if found.is_full_of_entries() {
            break;
        }
        for part in line.split(['"', '\'', ',', '[', ']']) {
            let Some((name, target)) = part.split_once('=') else { continue };
            let (name, target) = (name.trim(), target.trim());
            let is_script =
                target.contains(':') && !name.is_empty() && !name.contains(char::is_whitespace);
            if is_script && !target.contains(' ') {
                let mut binary = new_entry(source, EntryKind::Binary, name, index, None);
                binary.with = Some(format!("python, {target}"));
                found.add_entry(binary);
            }
        }
    }
}

fn collect_requirements(source: &SourceFile<'_>, found: &mut Findings) {
    let mut module = new_module(source, "python", None, None);
    module.frameworks = python_dependencies(
        source.lines.iter().copied().filter(|line| !line.trim_start().starts_with('#')),
    );
    found.add_module(module);
}

fn collect_package_json(source: &SourceFile<'_>, found: &mut Findings) {
    let Ok(manifest) = serde_json::from_str::<Json>(source.text) else { return };
    let name = manifest["name"].as_str();
    let mut module = new_module(source, "node", name, manifest["description"].as_str());
    let workspaces =
        manifest["workspaces"].as_array().or_else(|| manifest["workspaces"]["packages"].as_array());
    module.members =
        workspaces.into_iter().flatten().filter_map(Json::as_str).map(str::to_owned).collect();
    let dependencies = manifest["dependencies"]
        .as_object()
        .into_iter()
        .flat_map(|all| all.keys().map(String::as_str));
    module.frameworks = known_libraries(dependencies);
    found.add_module(module);
    let mut binary = |name: &str, target: &str| {
        let line = source.line_of_literal(target, 0);
        let mut binary = new_entry(source, EntryKind::Binary, name, line, None);
        binary.with = Some(format!("node, {target}"));
        found.add_entry(binary);
    };
    match &manifest["bin"] {
        Json::String(target) => {
            binary(name.unwrap_or(source.folder()).rsplit('/').next().unwrap_or_default(), target)
        }
        Json::Object(all) => all
            .iter()
            .take(MAX_PER_FILE)
            .for_each(|(name, target)| binary(name, target.as_str().unwrap_or_default())),
        _ => {}
    }
    let from = source.line_of_literal("scripts", 0);
    for (name, script) in manifest["scripts"].as_object().into_iter().flatten().take(MAX_PER_FILE) {
        let script = script.as_str().map(str::to_owned);
        found.add_entry(new_entry(
            source,
            EntryKind::PackageScript,
            name,
            source.line_of_literal(name, from),
            script,
        ));
    }
}

fn collect_pnpm(source: &SourceFile<'_>, found: &mut Findings) {
    let mut module = new_module(source, "node", None, None);
    let members = source.lines.iter().skip_while(|line| !line.starts_with("packages:")).skip(1);
    module.members = members
        .map_while(|line| line.trim_start().strip_prefix("- "))
        .map(|member| member.trim().trim_matches(['"', '\'']).to_owned())
        .collect();
    found.add_module(module);
}

fn collect_go(source: &SourceFile<'_>, found: &mut Findings) {
    let name = source.lines.iter().find_map(|line| line.strip_prefix("module ")).map(str::trim);
    let mut module = new_module(source, "go", name, None);
    module.place = source.location(source.line_with(&["module "]));
    let names = source
        .lines
        .iter()
        .filter_map(|line| line.trim().trim_start_matches("require ").split(' ').next());
    module.frameworks = known_libraries(names.flat_map(|path| path.split('/')));
    let used = source.lines.iter().skip_while(|line| !line.starts_with("use")).skip(1);
    if source.name() == "go.work" {
        module.members = used
            .map(|line| line.trim())
            .take_while(|line| *line != ")")
            .map(str::to_owned)
            .collect();
    }
    found.add_module(module);
}

fn collect_dockerfile(source: &SourceFile<'_>, found: &mut Findings) {
    for (index, line) in source.lines.iter().enumerate() {
        let upper = line.trim_start().to_ascii_uppercase();
        if upper.starts_with("ENTRYPOINT") || upper.starts_with("CMD") {
            let command =
                line.trim().split_once(char::is_whitespace).map(|(_, command)| command.to_owned());
            found.add_entry(new_entry(
                source,
                EntryKind::Container,
                source.folder(),
                index,
                command,
            ));
        }
    }
}

fn collect_procfile(source: &SourceFile<'_>, found: &mut Findings) {
    for (index, line) in source.lines.iter().enumerate() {
        if found.is_full_of_entries() {
            break;
        }
        if let Some((name, command)) = line.split_once(':') {
            found.add_entry(new_entry(
                source,
                EntryKind::Container,
                name.trim(),
                index,
                Some(command.trim().to_owned()),
            ));
        }
    }
}

fn collect_makefile(source: &SourceFile<'_>, found: &mut Findings) {
    for (index, line) in source.lines.iter().enumerate() {
        let Some((target, rest)) = line.split_once(':') else { continue };
        let plain = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
        let is_target = !target.is_empty()
            && target.chars().all(plain)
            && !rest.starts_with('=')
            && !rest.starts_with(":=");
        if !is_target {
            continue;
        }
        if found.is_full_of_entries() {
            break;
        }
        // `target: ## what it does` is a convention of Makefiles that print their help.
        let about = rest.split_once("##").map(|(_, about)| about.trim().to_owned());
        let about = about.or_else(|| text::comment_above(&source.lines, index, &["#"]));
        found.add_entry(new_entry(
            source,
            EntryKind::Recipe,
            &format!("make {target}"),
            index,
            about,
        ));
    }
}

fn collect_justfile(source: &SourceFile<'_>, found: &mut Findings) {
    for (index, line) in source.lines.iter().enumerate() {
        if found.is_full_of_entries() {
            break;
        }
        let Some((head, rest)) = line.split_once(':') else { continue };
        let mut words = head.split_whitespace();
        let Some(name) = words.next() else { continue };
        let starts_recipe = line.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
        if !starts_recipe
            || rest.starts_with('=')
            || ["set", "export", "alias", "import", "mod"].contains(&name)
        {
            continue;
        }
        let about = text::comment_above(&source.lines, index, &["#"]);
        let mut recipe =
            new_entry(source, EntryKind::Recipe, &format!("just {name}"), index, about);
        recipe.arguments = words
            .take(MAX_PER_FILE)
            .map(|word| Argument { name: word.to_owned(), about: None, line: line_number(index) })
            .collect();
        found.add_entry(recipe);
    }
}
