//! Lists the symbols of a source file, by its syntax tree: `12-40 fn parse(input: &str) -> Ast  —
//! Parses a program.`

use std::fmt::Write as _;

use tree_sitter::{Language, LanguageError, Node, Parser};

/// Characters of a signature, and of a description.
const MAX_TEXT_CHARS: usize = 200;
/// Symbols of one file.
const MAX_SYMBOLS: usize = 3000;
/// Lines above a symbol that are searched for its comment.
const MAX_COMMENT_LINES: usize = 60;

/// A supported language. The numbers are used between parent and child, which are the same program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Grammar {
    Rust,
    Python,
    JavaScript,
    TypeScript,
    Tsx,
    Go,
    Java,
    Bash,
}

impl Grammar {
    const ALL: [Self; 8] = [
        Self::Rust,
        Self::Python,
        Self::JavaScript,
        Self::TypeScript,
        Self::Tsx,
        Self::Go,
        Self::Java,
        Self::Bash,
    ];

    /// The grammar of a file, by its name.
    pub(super) fn for_path(path: &str) -> Option<Self> {
        if path.ends_with(".min.js")
            || path.split('/').any(|part| ["node_modules", "vendor", "third_party"].contains(&part))
        {
            return None;
        }
        let name = path.rsplit('/').next().unwrap_or(path);
        Some(match name.rsplit_once('.')?.1 {
            "rs" => Self::Rust,
            "py" | "pyi" => Self::Python,
            "js" | "mjs" | "cjs" | "jsx" => Self::JavaScript,
            "ts" | "mts" | "cts" => Self::TypeScript,
            "tsx" => Self::Tsx,
            "go" => Self::Go,
            "java" => Self::Java,
            "sh" | "bash" => Self::Bash,
            _ => return None,
        })
    }

    /// The grammar with a number.
    pub(super) fn from_wire(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    fn language(self) -> Language {
        match self {
            Self::Rust => tree_sitter_rust::LANGUAGE,
            Self::Python => tree_sitter_python::LANGUAGE,
            Self::JavaScript => tree_sitter_javascript::LANGUAGE,
            Self::TypeScript => tree_sitter_typescript::LANGUAGE_TYPESCRIPT,
            Self::Tsx => tree_sitter_typescript::LANGUAGE_TSX,
            Self::Go => tree_sitter_go::LANGUAGE,
            Self::Java => tree_sitter_java::LANGUAGE,
            Self::Bash => tree_sitter_bash::LANGUAGE,
        }
        .into()
    }

    /// The role of a node.
    fn role(self, node: &Node<'_>) -> Role {
        match (self, node.kind()) {
            (
                Self::Rust,
                "function_item"
                | "function_signature_item"
                | "macro_definition"
                | "const_item"
                | "static_item"
                | "type_item",
            )
            | (Self::Rust, "struct_item" | "enum_item" | "union_item")
            | (Self::Python | Self::Bash, "function_definition")
            | (
                Self::JavaScript | Self::TypeScript | Self::Tsx,
                "function_declaration"
                | "generator_function_declaration"
                | "method_definition"
                | "function_signature"
                | "type_alias_declaration"
                | "enum_declaration"
                | "method_signature"
                | "abstract_method_signature",
            )
            | (Self::Go, "function_declaration" | "method_declaration" | "type_spec")
            | (Self::Java, "method_declaration" | "constructor_declaration") => Role::Symbol,
            (Self::Rust, "impl_item" | "trait_item" | "mod_item")
            | (Self::Python, "class_definition")
            | (
                Self::JavaScript | Self::TypeScript | Self::Tsx,
                "class_declaration"
                | "abstract_class_declaration"
                | "interface_declaration"
                | "internal_module"
                | "module",
            )
            | (
                Self::Java,
                "class_declaration"
                | "interface_declaration"
                | "enum_declaration"
                | "record_declaration",
            ) => Role::Container,
            (Self::JavaScript | Self::TypeScript | Self::Tsx, "variable_declarator") => {
                let is_function = node.child_by_field_name("value").is_some_and(|value| {
                    ["arrow_function", "function_expression", "generator_function"]
                        .contains(&value.kind())
                });
                if is_function { Role::Symbol } else { Role::Opaque }
            }
            // Expressions contain no symbols that others could use.
            (_, kind)
                if kind.ends_with("_expression") || kind == "string" || kind == "token_tree" =>
            {
                Role::Opaque
            }
            _ => Role::Transparent,
        }
    }
}

enum Role {
    /// A symbol.
    Symbol,
    /// A symbol that contains others.
    Container,
    /// No symbol, but it may contain some.
    Transparent,
    /// No symbol, and it contains none.
    Opaque,
}

/// The parsers.
pub(super) struct Symbols {
    parsers: Vec<Parser>,
}

impl Symbols {
    pub(super) fn new() -> Result<Self, LanguageError> {
        let parser = |grammar: &Grammar| {
            let mut parser = Parser::new();
            parser.set_language(&grammar.language())?;
            Ok(parser)
        };
        Ok(Self { parsers: Grammar::ALL.iter().map(parser).collect::<Result<_, _>>()? })
    }

    /// Lists a file's symbols, one per line; nested ones are indented.
    pub(super) fn list(&mut self, grammar: Grammar, content: &[u8]) -> String {
        let Some(tree) = self.parsers[grammar as usize].parse(content, None) else {
            return String::new();
        };
        let lines: Vec<&[u8]> = content.split(|byte| *byte == b'\n').collect();
        let (mut list, mut count) = (String::new(), 0);
        let mut cursor = tree.walk();
        // The cursor's depth, and the depths of the symbols that contain it. No recursion: the
        // depth of a tree is not limited.
        let (mut depth, mut containers): (usize, Vec<usize>) = (0, Vec::new());
        loop {
            let node = cursor.node();
            let role = grammar.role(&node);
            if matches!(role, Role::Symbol | Role::Container) {
                let indent = "  ".repeat(containers.len());
                let (first, last) = (node.start_position().row + 1, node.end_position().row + 1);
                // Writing to a string cannot fail.
                let _ = write!(list, "{indent}{first}-{last} {}", signature(&node, content));
                if let Some(about) = description(grammar, &node, content, &lines) {
                    let _ = write!(list, "  — {about}");
                }
                list.push('\n');
                count += 1;
                if count >= MAX_SYMBOLS {
                    return list;
                }
            }
            let down =
                matches!(role, Role::Container | Role::Transparent) && cursor.goto_first_child();
            if down {
                if matches!(role, Role::Container) {
                    containers.push(depth);
                }
                depth += 1;
                continue;
            }
            while !cursor.goto_next_sibling() {
                if !cursor.goto_parent() {
                    return list;
                }
                depth -= 1;
                if containers.last() == Some(&depth) {
                    containers.pop();
                }
            }
        }
    }
}

/// The text before a symbol's body, in one line.
fn signature(node: &Node<'_>, content: &[u8]) -> String {
    let body = node
        .child_by_field_name("body")
        .or_else(|| node.child_by_field_name("value")?.child_by_field_name("body"));
    let end = body
        .map_or(node.end_byte(), |body| body.start_byte())
        .min(node.start_byte() + 4 * MAX_TEXT_CHARS);
    let text = String::from_utf8_lossy(content.get(node.start_byte()..end).unwrap_or_default());
    let signature = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let signature =
        signature.trim_end_matches(['{', ':', ' ', ';']).trim_end_matches("=>").trim_end();
    signature.chars().take(MAX_TEXT_CHARS).collect()
}

/// The first line of a symbol's comment above it, or of its docstring in Python.
fn description(
    grammar: Grammar,
    node: &Node<'_>,
    content: &[u8],
    lines: &[&[u8]],
) -> Option<String> {
    if grammar == Grammar::Python {
        let first = node.child_by_field_name("body")?.named_child(0)?;
        let text =
            if first.kind() == "expression_statement" { first.named_child(0)? } else { first };
        if text.kind() != "string" {
            return None;
        }
        let text = String::from_utf8_lossy(content.get(text.byte_range())?);
        return first_line(text.trim_start_matches(['r', 'u', 'b', 'f']).trim_matches(['"', '\'']));
    }
    let mut comment = None;
    for line in
        lines[..node.start_position().row.min(lines.len())].iter().rev().take(MAX_COMMENT_LINES)
    {
        let line = line.trim_ascii();
        let text = String::from_utf8_lossy(line);
        let marks = ["///", "//", "/**", "/*", "*/", "*", "#!", "#"];
        // Attributes and decorators are between a symbol and its comment.
        if line.starts_with(b"#[") || line.starts_with(b"@") {
            continue;
        }
        let Some(mark) = marks.iter().find(|mark| text.starts_with(**mark)) else { break };
        if *mark == "#!" {
            break;
        }
        let text = text[mark.len()..].trim().trim_end_matches("*/");
        if let Some(text) = first_line(text).filter(|text| !text.starts_with('@')) {
            comment = Some(text);
        }
        if *mark == "/**" || *mark == "/*" {
            break;
        }
    }
    comment
}

fn first_line(text: &str) -> Option<String> {
    let line = text.trim().lines().next().unwrap_or_default().trim();
    (!line.is_empty()).then(|| line.chars().take(MAX_TEXT_CHARS).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(grammar: Grammar, text: &str) -> String {
        Symbols::new().expect("the grammars fit the library").list(grammar, text.as_bytes())
    }

    #[test]
    fn symbols_are_listed_with_lines_and_descriptions() {
        let rust = "/// Parses a\n/// program.\n#[must_use]\npub fn parse(\n    input: &str,\n) -> Ast {\n    fn inner() {}\n}\n\nimpl Ast {\n    // Counts.\n    fn len(&self) -> usize { 0 }\n}\nstruct Ast;\n";
        assert_eq!(
            list(Grammar::Rust, rust),
            "4-8 pub fn parse( input: &str, ) -> Ast  — Parses a\n10-13 impl Ast\n  12-12 fn len(&self) -> usize  — Counts.\n14-14 struct Ast\n"
        );
        let python = "class A(B):\n    \"\"\"Does it.\n\n    More.\"\"\"\n    async def run(self, x: int = 1) -> str:\n        'Runs.'\n        return ''\n";
        assert_eq!(
            list(Grammar::Python, python),
            "1-7 class A(B)  — Does it.\n  5-7 async def run(self, x: int = 1) -> str  — Runs.\n"
        );
        let script = "/**\n * Adds.\n * @param a\n */\nexport const add = (a, b) => a + b;\nexport default class C {\n  m() {}\n}\nconst table = { a: 1 };\n";
        assert_eq!(
            list(Grammar::JavaScript, script),
            "5-5 add = (a, b)  — Adds.\n6-8 class C\n  7-7 m()\n"
        );
        let typed =
            "export interface Shape { area(): number }\nexport type Id = string;\nenum E { A }\n";
        assert_eq!(
            list(Grammar::TypeScript, typed),
            "1-1 interface Shape\n  1-1 area(): number\n2-2 type Id = string\n3-3 enum E\n"
        );
        let go = "package a\n\n// Run runs.\nfunc (s *S) Run(x int) error {\n\treturn nil\n}\ntype S struct {\n\tA int\n}\n";
        let listed = list(Grammar::Go, go);
        assert!(
            listed.starts_with("4-6 func (s *S) Run(x int) error  — Run runs.\n7-9 S struct"),
            "{listed}"
        );
        assert_eq!(
            list(Grammar::Bash, "# Builds.\nbuild() {\n  make\n}\n"),
            "2-4 build()  — Builds.\n"
        );
        assert!(
            list(
                Grammar::Java,
                "class A {\n  /** Says. */\n  public int f(int x) { return x; }\n}\n"
            )
            .contains("3-3 public int f(int x)  — Says.")
        );
        assert!(
            list(Grammar::Tsx, "export function App() { return <a/>; }\n")
                .starts_with("1-1 function App()")
        );
    }

    #[test]
    fn invalid_source_still_gives_a_list() {
        let deep = "[".repeat(200_000);
        for grammar in Grammar::ALL {
            list(grammar, "\u{0}\u{1}((((fn class def {{{{");
            list(grammar, "");
        }
        assert_eq!(list(Grammar::JavaScript, &deep), "");
    }
}
