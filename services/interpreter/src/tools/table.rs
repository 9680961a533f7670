//! The table of tools.

use std::time::Duration;

use super::definition::{Definition, Effect, Kind, Limits, MAX_SAFE_INTEGER, Parameter, Provider};

/// Longest path, in bytes.
const PATH: Kind = Kind::Text { min_bytes: 1, max_bytes: 4096 };

/// Longest content of a file that a tool writes, and longest text of an edit: 16 MiB.
const CONTENT: Kind = Kind::Text { min_bytes: 0, max_bytes: 16 << 20 };

const LINE: Kind = Kind::Integer { min: 1, max: MAX_SAFE_INTEGER };

/// Every tool, in the order in which models are told of them.
#[must_use]
pub fn definitions() -> &'static [Definition] {
    &DEFINITIONS
}

/// The tool of this name.
#[must_use]
pub fn definition(name: &str) -> Option<&'static Definition> {
    DEFINITIONS.iter().find(|tool| tool.name == name)
}

/// The TypeScript declarations of all tools, with doc comments, for the system prompt.
#[must_use]
pub fn declarations() -> String {
    DEFINITIONS.iter().map(Definition::declaration).collect::<Vec<_>>().join("\n")
}

const fn required(name: &'static str, kind: Kind, description: &'static str) -> Parameter {
    Parameter { name, kind, required: true, default: None, description }
}

const fn optional(name: &'static str, kind: Kind, default: &'static str, description: &'static str) -> Parameter {
    Parameter { name, kind, required: false, default: Some(default), description }
}

const fn limits(wall_seconds: u64, result_kib: usize) -> Limits {
    Limits { wall: Duration::from_secs(wall_seconds), result_bytes: result_kib << 10 }
}

const OUTSIDE: (&str, &str) = ("OutsideWorkspace", "when the path leaves the workspace.");
const NOT_FOUND: (&str, &str) = ("FileNotFound", "when there is no such file; the message names similar ones.");

static DEFINITIONS: [Definition; 9] = [
    Definition {
        name: "read_file",
        description: "Returns the text of a file exactly as it is, without line numbers.\n\
            Of a file over 256 KiB only the first part is returned, with a note at the end saying how to read on.\n\
            Lines over 64 KiB are cut, with a marker.",
        parameters: &[
            required("path", PATH, "File, relative to the workspace."),
            optional("start_line", LINE, "1", "First line to return, counted from 1."),
            optional("end_line", LINE, "the last line", "Last line to return, included."),
        ],
        returns: "string",
        example: "read_file(\"src/main.rs\", 10, 40)",
        errors: &[NOT_FOUND, OUTSIDE, ("BinaryFile", "when the file is not text.")],
        effect: Effect::Read,
        provider: Provider::Host,
        limits: limits(60, 256),
    },
    Definition {
        name: "create_file",
        description: "Writes a file as a whole, replacing it if it exists. Missing directories are made.\n\
            To change a part of a file use edit_file.",
        parameters: &[
            required("path", PATH, "File, relative to the workspace."),
            required("content", CONTENT, "The whole new content."),
        ],
        returns: "{ path: string; bytes: number; status: \"created\" | \"overwritten\" }",
        example: "create_file(\"notes/todo.md\", \"# To do\\n\")",
        errors: &[OUTSIDE, ("IsADirectory", "when the path is a directory.")],
        effect: Effect::Write,
        provider: Provider::Host,
        limits: limits(60, 8),
    },
    Definition {
        name: "edit_file",
        description: "Replaces exact pieces of text in a file. Each `old` must occur exactly once, as it was before \
            the call, whitespace included.\nAll edits are made, or none when one of them fails. Line endings and the \
            file's mode are kept.",
        parameters: &[
            required("path", PATH, "File, relative to the workspace."),
            required(
                "diffs",
                Kind::Objects(&[
                    required("old", CONTENT, "Text that is there now, with enough around it to be unique."),
                    required("new", CONTENT, "Text to put in its place; empty to delete it."),
                ]),
                "The edits.",
            ),
        ],
        returns: "{ path: string; diff: string; replacements: number }",
        example: "edit_file(\"src/main.rs\", [{ old: \"let a = 1;\", new: \"let a = 2;\" }])",
        errors: &[
            NOT_FOUND,
            OUTSIDE,
            ("TextNotFound", "when `old` does not occur; the message shows the most similar place."),
            ("AmbiguousEdit", "when `old` occurs more than once; the message gives the lines."),
            ("OverlappingEdits", "when two edits touch the same text."),
        ],
        effect: Effect::Write,
        provider: Provider::Host,
        limits: limits(60, 256),
    },
    Definition {
        name: "list_files",
        description: "Lists a directory, sorted by name. `size` is in bytes. Recursive listings leave out what \
            .gitignore and .ignore name, and .git.\nAt most 2000 entries; if there are more, the last entry has the \
            type \"note\" and says so in `path`.",
        parameters: &[
            optional("path", PATH, "the workspace", "Directory, relative to the workspace."),
            optional("recursive", Kind::Boolean, "false", "Also list what is in its directories."),
            optional(
                "options",
                Kind::Object(&[optional(
                    "include_ignored",
                    Kind::Boolean,
                    "false",
                    "Also list what ignore files name, when recursive.",
                )]),
                "{}",
                "Options.",
            ),
        ],
        returns: "{ path: string; type: \"file\" | \"directory\" | \"symlink\" | \"other\" | \"note\"; size: number }[]",
        example: "list_files(\"src\", true)",
        errors: &[NOT_FOUND, OUTSIDE, ("NotADirectory", "when the path is a file.")],
        effect: Effect::Read,
        provider: Provider::Host,
        limits: limits(60, 1024),
    },
    Definition {
        name: "grep",
        description: "Searches the text of files for a regular expression (Rust syntax, as ripgrep), line by line. \
            Leaves out binary files, .git, and what .gitignore and .ignore name.\nPaths in the result are relative to \
            the workspace, lines are counted from 1, and long lines are clipped.",
        parameters: &[
            required("query", Kind::Text { min_bytes: 1, max_bytes: 8192 }, "The regular expression."),
            optional("path", PATH, "the workspace", "File or directory to search."),
            optional(
                "options",
                Kind::Object(&[
                    optional(
                        "include",
                        Kind::TextOrTexts,
                        "all files",
                        "Only files that match one of these globs, for example \"*.rs\".",
                    ),
                    optional("exclude", Kind::TextOrTexts, "none", "Not files that match one of these globs."),
                    optional("case_sensitive", Kind::Boolean, "true", "Distinguish upper and lower case."),
                    optional("literal", Kind::Boolean, "false", "Take the query as plain text."),
                    optional(
                        "context",
                        Kind::Integer { min: 0, max: 20 },
                        "0",
                        "Lines to show before and after each match.",
                    ),
                    optional(
                        "max_results",
                        Kind::Integer { min: 1, max: 2000 },
                        "200",
                        "Stop after this many matches.",
                    ),
                ]),
                "{}",
                "Options.",
            ),
        ],
        returns: "{ matches: { path: string; line: number; text: string; before?: string[]; after?: string[] }[]; \
            truncated: boolean; files_searched: number }",
        example: "grep(\"fn main\", \"src\", { include: \"*.rs\", context: 2 })",
        errors: &[NOT_FOUND, OUTSIDE],
        effect: Effect::Read,
        provider: Provider::Host,
        limits: limits(60, 512),
    },
    Definition {
        name: "find_file",
        description: "Finds files and directories by a glob. Without a slash it is compared with names, otherwise \
            with paths below `path` (`**` crosses directories).\nPaths in the result are relative to the workspace \
            and sorted, at most 1000. Leaves out .git and what .gitignore and .ignore name.",
        parameters: &[
            required(
                "pattern",
                Kind::Text { min_bytes: 1, max_bytes: 1024 },
                "Glob, for example \"*.toml\" or \"src/**/test_*.py\".",
            ),
            optional("path", PATH, "the workspace", "Directory to search."),
        ],
        returns: "{ paths: string[]; truncated: boolean }",
        example: "find_file(\"*.toml\")",
        errors: &[NOT_FOUND, OUTSIDE],
        effect: Effect::Read,
        provider: Provider::Host,
        limits: limits(60, 1024),
    },
    Definition {
        name: "execute_command",
        description: "Runs a shell command in the workspace and waits for its end. A non-zero exit code is a result, \
            not an error: look at exit_code.\nOnly the workspace and a private /tmp are writable, and there is no \
            network unless it was granted. Processes left in the background are killed at the end. Of each output \
            the first and the last 128 KiB are kept.",
        parameters: &[
            required("command", Kind::Text { min_bytes: 1, max_bytes: 100_000 }, "Shell script."),
            optional(
                "options",
                Kind::Object(&[
                    optional(
                        "timeout_seconds",
                        Kind::Integer { min: 1, max: 600 },
                        "120",
                        "After this time everything it started is killed.",
                    ),
                    optional("cwd", PATH, "the workspace", "Directory to start in, relative to the workspace."),
                    optional("env", Kind::TextMap, "{}", "Environment variables to set."),
                    optional("stdin", Kind::Text { min_bytes: 0, max_bytes: 1 << 20 }, "empty", "Its standard input."),
                ]),
                "{}",
                "Options.",
            ),
        ],
        returns: "{ exit_code: number | null; stdout: string; stderr: string; timed_out: boolean; \
            signal: string | null; truncated: boolean; limit_exceeded: \"processes\" | \"memory\" | null; \
            duration_ms: number }",
        example: "execute_command(\"cargo test\", { timeout_seconds: 300 })",
        errors: &[("CommandsUnavailable", "when this host cannot confine commands; nothing ran."), OUTSIDE],
        effect: Effect::External,
        provider: Provider::Host,
        limits: limits(620, 512),
    },
    Definition {
        name: "fetch",
        description: "Makes an HTTP request to a host that was granted. A status other than 2xx is a result, not an \
            error: look at status.\nRedirects are followed to granted hosts, at most 5. Header names in the result \
            are in lower case.",
        parameters: &[
            required("url", Kind::Text { min_bytes: 1, max_bytes: 8192 }, "Address, http or https."),
            optional(
                "options",
                Kind::Object(&[
                    optional(
                        "method",
                        Kind::OneOf(&["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]),
                        "GET",
                        "Request method.",
                    ),
                    optional("headers", Kind::TextMap, "{}", "Request headers."),
                    optional("body", Kind::Text { min_bytes: 0, max_bytes: 1 << 20 }, "none", "Request body."),
                    optional(
                        "timeout_seconds",
                        Kind::Integer { min: 1, max: 120 },
                        "30",
                        "For the whole exchange, redirects included.",
                    ),
                    optional(
                        "max_bytes",
                        Kind::Integer { min: 1, max: 10 << 20 },
                        "1048576",
                        "Of the body, at most this much is returned.",
                    ),
                ]),
                "{}",
                "Options.",
            ),
        ],
        returns: "{ status: number; headers: Record<string, string>; body: string; truncated: boolean; url: string }",
        example: "fetch(\"https://example.com/data.json\", { headers: { accept: \"application/json\" } })",
        errors: &[
            ("HostNotGranted", "when the host, or one it redirects to, was not granted."),
            ("AddressForbidden", "when the host has a private, local or reserved address."),
            ("Timeout", "when it takes too long; whether the request had an effect is unknown."),
            ("FetchFailed", "when the host cannot be reached or breaks off."),
        ],
        effect: Effect::External,
        provider: Provider::Host,
        limits: limits(125, 10 << 10),
    },
    Definition {
        name: "print",
        description: "Shows a value to you, the model; nobody else sees it. Objects are shown as JSON.",
        parameters: &[required("value", Kind::Any, "What to show.")],
        returns: "void",
        example: "print(read_file(\"README.md\"))",
        errors: &[],
        effect: Effect::Read,
        provider: Provider::Sandbox,
        limits: limits(1, 256),
    },
];
