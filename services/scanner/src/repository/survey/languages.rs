//! The language of a file, by its name or first line.

/// Languages, their extensions, and whether their files are read for entry points.
const EXTENSIONS: &[(&str, &[&str], bool)] = &[
    ("Assembly", &["asm", "s"], false),
    ("C", &["c", "h"], false),
    ("C#", &["cs"], false),
    ("C++", &["cc", "cpp", "cxx", "hpp", "hh", "hxx"], false),
    ("CSS", &["css", "scss", "sass", "less"], false),
    ("Clojure", &["clj", "cljs", "cljc"], false),
    ("Dart", &["dart"], false),
    ("Elixir", &["ex", "exs"], false),
    ("Erlang", &["erl", "hrl"], false),
    ("Fortran", &["f90", "f95", "f"], false),
    ("Go", &["go"], true),
    ("GraphQL", &["graphql", "gql"], false),
    ("HCL", &["tf", "hcl"], false),
    ("HTML", &["html", "htm"], false),
    ("Haskell", &["hs"], false),
    ("JSON", &["json"], true),
    ("Java", &["java"], false),
    ("JavaScript", &["js", "mjs", "cjs", "jsx"], true),
    ("Jupyter Notebook", &["ipynb"], true),
    ("Julia", &["jl"], false),
    ("Kotlin", &["kt", "kts"], false),
    ("Lua", &["lua"], false),
    ("Markdown", &["md", "markdown", "rst", "adoc"], true),
    ("Nix", &["nix"], false),
    ("OCaml", &["ml", "mli"], false),
    ("PHP", &["php"], false),
    ("Perl", &["pl", "pm"], false),
    ("PowerShell", &["ps1", "psm1"], false),
    ("Protocol Buffers", &["proto"], true),
    ("Python", &["py", "pyw", "pyi"], true),
    ("R", &["r"], false),
    ("Ruby", &["rb", "rake"], false),
    ("Rust", &["rs"], true),
    ("SQL", &["sql"], false),
    ("Scala", &["scala", "sbt"], false),
    ("Shell", &["sh", "bash", "zsh", "ksh"], true),
    ("Svelte", &["svelte"], false),
    ("Swift", &["swift"], false),
    ("TOML", &["toml"], true),
    ("TypeScript", &["ts", "mts", "cts", "tsx"], true),
    ("Vue", &["vue"], false),
    ("XML", &["xml", "xsd", "xsl"], false),
    ("YAML", &["yaml", "yml"], true),
    ("Zig", &["zig"], false),
];

/// The language of a file, by its name.
pub(super) fn by_name(path: &str) -> Option<&'static str> {
    let name = path.rsplit('/').next().unwrap_or(path);
    match name {
        "Makefile" | "makefile" | "GNUmakefile" | "justfile" | "Justfile" => {
            return Some("Makefile");
        }
        "Dockerfile" | "Containerfile" => return Some("Dockerfile"),
        _ => {}
    }
    let extension = name.rsplit_once('.')?.1.to_ascii_lowercase();
    EXTENSIONS
        .iter()
        .find(|(_, extensions, _)| extensions.contains(&extension.as_str()))
        .map(|(name, ..)| *name)
}

/// Whether files of a language are read.
pub(super) fn is_read(language: &str) -> bool {
    EXTENSIONS.iter().find(|(name, ..)| *name == language).is_none_or(|(.., read)| *read)
}

/// The language of a script, by its first line.
pub(super) fn by_shebang(text: &str) -> Option<&'static str> {
    let line = text.lines().next()?.strip_prefix("#!")?;
    let program = line
        .split_whitespace()
        .flat_map(|word| word.rsplit('/').next())
        .find(|word| *word != "env" && *word != "-S")?;
    [
        ("python", "Python"),
        ("bash", "Shell"),
        ("zsh", "Shell"),
        ("dash", "Shell"),
        ("sh", "Shell"),
        ("node", "JavaScript"),
        ("deno", "TypeScript"),
        ("ruby", "Ruby"),
        ("perl", "Perl"),
        ("Rscript", "R"),
    ]
    .into_iter()
    .find_map(|(name, language)| program.starts_with(name).then_some(language))
}
