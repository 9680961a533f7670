//! The set of definitions, and what is generated from it.

use std::collections::HashSet;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::*;

/// Whether a result is of the type that a definition describes; the error says where it differs.
pub(super) fn accept(output: &Output, value: &Value) -> Result<(), String> {
    let fits = match (output, value) {
        (Output::Any, _)
        | (Output::Nothing | Output::Nullable(_), Value::Null)
        | (Output::Text, Value::String(_))
        | (Output::Boolean, Value::Bool(_)) => true,
        (Output::Integer, value) => value.is_u64(),
        (Output::Number, value) => value.as_f64().is_some_and(|number| number >= 0.0),
        (Output::Vector, Value::Array(items)) => items.iter().all(Value::is_number),
        (Output::OneOrMore(output), Value::Array(items)) => {
            return items.iter().try_for_each(|item| accept(output, item));
        }
        (Output::OneOrMore(output), value) => return accept(output, value),
        (Output::OneOf(words), Value::String(word)) => words.contains(&word.as_str()),
        (Output::Nullable(output), value) => return accept(output, value),
        (Output::List(output), Value::Array(items)) => {
            return items.iter().try_for_each(|item| accept(output, item));
        }
        (Output::TextMap, Value::Object(map)) => map.values().all(Value::is_string),
        (Output::Object(fields), Value::Object(map)) => {
            if let Some(unknown) =
                map.keys().find(|name| !fields.iter().any(|field| field.name == *name))
            {
                return Err(format!("it has an unknown property {unknown}"));
            }
            return fields.iter().try_for_each(|field| match map.get(field.name) {
                None if field.optional => Ok(()),
                None => Err(format!("it has no {}", field.name)),
                Some(value) => {
                    accept(&field.output, value).map_err(|why| format!("{}: {why}", field.name))
                }
            });
        }
        _ => false,
    };
    if fits { Ok(()) } else { Err(format!("{value} is not a {}", output.typescript())) }
}

#[test]
fn tools_page_matches_definitions() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/tools.md");
    let generated = documentation();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, &generated).expect("docs/tools.md can be written");
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = committed.lines().zip(generated.lines()).position(|(old, new)| old != new);
    assert!(
        committed == generated,
        "docs/tools.md does not match the definitions, first at line {}. To regenerate it: UPDATE_DOCS=1 cargo test \
         -p construct-interpreter tools_page_matches_definitions",
        differs.unwrap_or_else(|| committed.lines().count().min(generated.lines().count())) + 1
    );
}

#[test]
fn base_tool_is_declared_earlier_with_equal_options() {
    for (position, tool) in definitions().iter().enumerate() {
        let Some(base) = tool.base_tool else { continue };
        let before = definitions()[..position]
            .iter()
            .find(|other| other.name == base)
            .expect("a tool declared earlier");
        let options = |tool: &Definition| tool.input_schema()["properties"]["options"].clone();
        assert_eq!(
            (options(tool), tool.output_schema()),
            (options(before), before.output_schema()),
            "{}",
            tool.name
        );
        assert_eq!(before.parameters.iter().position(|p| p.name == "options"), Some(1), "{base}");
    }
}

/// The error names in source text: separate quoted words in the form of such names. A name of a
/// single part must be an argument of `new`.
fn error_names(source: &str) -> impl Iterator<Item = &str> {
    source.match_indices(['"', '\'']).filter_map(|(at, _)| {
        let rest = &source[at + 1..];
        let length = rest.find(|c: char| !c.is_ascii_alphabetic())?;
        let (word, after) = rest.split_at(length);
        let capitals = word.bytes().filter(u8::is_ascii_uppercase).count();
        let is_name = word.starts_with(|c: char| c.is_ascii_uppercase())
            && capitals < word.len()
            && (capitals > 1 || source[..at].trim_end().ends_with("new("));
        (is_name && after.starts_with(['"', '\'', '\\'])).then_some(word)
    })
}

/// The product's own sources below a folder, without tests.
fn sources(folder: &Path) -> Vec<String> {
    let entries =
        std::fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    let entries = entries.filter(|path| path.file_stem().is_some_and(|name| name != "tests"));
    let text = |path: &Path| {
        let text = std::fs::read_to_string(path).expect("text");
        text.split("#[cfg(test)]\nmod ").next().unwrap_or_default().to_owned()
    };
    entries
        .flat_map(|path| if path.is_dir() { sources(&path) } else { vec![text(&path)] })
        .collect()
}

#[test]
fn every_error_of_scripts_is_documented() {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(package.join(path)).expect("a page");
    let pages =
        [documentation(), read("../../docs/interpreter.md"), read("guest/README.md")].concat();
    let sources =
        [sources(&package.join("src")), sources(&package.join("guest/quickjs/src"))].concat();
    let names: HashSet<&str> = sources.iter().flat_map(|source| error_names(source)).collect();
    for known in [
        "Cancelled",
        "CommandNotStarted",
        "JournalLimitExceeded",
        "TimerLimitExceeded",
        "NeverSettled",
    ] {
        assert!(names.contains(known), "{known} is not found in the sources");
    }
    let mut undocumented: Vec<&str> =
        names.into_iter().filter(|name| !pages.contains(&format!("`{name}`"))).collect();
    undocumented.sort_unstable();
    assert!(undocumented.is_empty(), "neither a definition nor a page documents {undocumented:?}");

    // Every call in any test checks which of them a tool can throw, see `check_error_name`.
    let page = documentation();
    let (introduction, _) = page.split_once("\n| tool |").expect("the table of tools");
    for name in [
        &definition::COMMON_ERRORS[..],
        &definition::PATH_ERRORS,
        &definition::FILE_ERRORS,
        &definition::TASK_ERRORS,
    ]
    .concat()
    {
        assert!(introduction.contains(&format!("`{name}`")), "{name}");
    }
    for tool in definitions() {
        let names: HashSet<&str> = tool.all_errors().map(|(name, _)| *name).collect();
        assert_eq!(names.len(), tool.all_errors().count(), "{} lists an error twice", tool.name);
    }
}

#[test]
#[should_panic(expected = "the definition of pwd does not list FileNotFound")]
fn undocumented_error_fails_the_test() {
    let pwd = definition("pwd").expect("a tool");
    drop(check_error_name(pwd, Err::<(), _>(ToolError::new("FileNotFound", "there is none"))));
}

#[test]
fn tool_names_are_unique() {
    let mut seen = HashSet::new();
    for tool in definitions() {
        for name in tool.aliases.iter().chain([&tool.name]) {
            assert!(seen.insert(*name), "{name} is defined twice");
            assert!(definition(name).is_some_and(|found| found.name == tool.name), "{name}");
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c == '.'), "{name}");
        }
    }
}

#[test]
fn declarations_document_every_tool_in_typescript() {
    let text = declarations(usize::MAX);
    assert!(text.contains(
        "declare function read_file(path: string, start_line?: number, end_line?: number, named?: { offset?: number; limit?: number; \
         encoding?: \"utf-8\" | \"latin1\" | \"utf-16le\" | \"utf-16be\" }): string;"
    ));
    assert!(text.contains(" * @param named.offset "));
    assert!(text.contains(
        "declare function edit_file(path: string, diffs: { old: string; new: string }[]):"
    ));
    assert!(text.contains("declare function print(value: unknown): void;"));
    assert!(text.contains(" * @param options.timeout_seconds "));
    for tool in definitions() {
        let name = tool.name.rsplit('.').next().expect("a name");
        assert!(text.contains(&format!("function {name}(")), "{name}");
        assert!(tool.example.contains(&format!("{}(", tool.name)), "{}", tool.name);
        assert!(tool.summary.ends_with('.') && !tool.summary.contains('\n'), "{}", tool.name);
        let optional_first =
            tool.parameters.windows(2).any(|pair| !pair[0].required && pair[1].required);
        assert!(!optional_first, "{} has a required parameter after an optional one", tool.name);
        assert!(tool.description.lines().all(|line| !line.starts_with(' ')), "{}", tool.name);
        assert!(!tool.description.contains("*/"), "{}", tool.name);
    }
}

#[test]
fn schemas_have_types_bounds_and_required_parameters() {
    let schema = definition("grep").expect("a tool").input_schema();
    assert_eq!(schema["required"], json!(["query"]));
    assert_eq!(schema["additionalProperties"], json!(false));
    assert_eq!(
        schema["properties"]["options"]["properties"]["max_results"]["maximum"],
        json!(1_000_000)
    );
}

#[test]
fn declarations_fit_their_budget_and_list_the_rest() {
    let all = declarations(usize::MAX);
    assert!(
        all.len() < 25 * 1024,
        "the declarations have {} bytes, too many for a prompt",
        all.len()
    );
    assert!(all.contains(
        "declare namespace tools { function search(query: string, limit?: number): Promise<{ tools:"
    ));
    assert!(all.contains(" * Other names: tools.delete."));
    assert!(all.contains(
        "function git(args: string[], options?: Parameters<typeof execute_command>[1]): ReturnType<typeof execute_command>;"
    ));
    assert_eq!(declarations(all.len()), all);
    let mut declared = usize::MAX;
    for budget in (300..all.len()).rev().step_by(97) {
        let text = declarations(budget);
        assert!(text.len() <= budget, "{} bytes in a budget of {budget}", text.len());
        assert_eq!(declarations(budget), text);
        let now = text.matches("/**").count();
        assert!(now <= declared, "a smaller budget must not declare more");
        declared = now;
        let whole = !text.contains("There are more tools");
        for tool in definitions() {
            let name = tool.name.rsplit('.').next().expect("a name");
            assert!(
                !whole || text.contains(&format!("{name}(")),
                "{name} is missing in a budget of {budget}"
            );
        }
        assert!(
            whole || text.ends_with("tools.search(\"words\") finds them by what they do.\n"),
            "{text}"
        );
    }
    assert_eq!(declared, 0);
}

#[tokio::test]
async fn search_finds_tools_by_their_purpose() {
    let bench = Bench::new();
    let first = async |query: &str| {
        bench.call("tools.search", json!([query])).await["tools"][0]["name"].clone()
    };
    let mut wrong = Vec::new();
    for (query, expected) in [
        ("delete a directory", "delete_file"),
        ("remove files", "delete_file"),
        ("bash", "execute_command"),
        ("read", "read_file"),
        ("find", "find_file"),
        ("run a shell command", "execute_command"),
        ("http request", "fetch"),
        ("search text with a regex", "grep"),
        ("regular expression", "grep"),
        ("environment variable set", "setenv"),
        ("version control commits", "git"),
        ("replace text", "edit_file"),
        ("list the directory", "list_files"),
        ("glob", "find_file"),
        ("TOOLS.SEARCH", "tools.search"),
    ] {
        let found = first(query).await;
        if found != expected {
            wrong.push(format!("{query:?} finds {found} and not {expected}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let none = bench.call("tools.search", json!(["zzz the of"])).await;
    assert_eq!(none, json!({"tools": [], "total": 0}));
    let few = bench.call("tools.search", json!(["file", 2])).await;
    assert_eq!(few["tools"].as_array().expect("a list").len(), 2);
    assert!(few["total"].as_u64().expect("a number") > 2);
}

#[tokio::test]
async fn description_has_declaration_and_schemas() {
    let bench = Bench::new();
    let described = bench.call("tools.describe", json!(["edit"])).await;
    let tool = definition("edit_file").expect("a tool");
    assert_eq!(described["name"], json!("edit_file"));
    assert_eq!(described["declaration"], json!(tool.declaration()));
    assert_eq!(
        (&described["input_schema"], &described["output_schema"]),
        (&tool.input_schema(), &tool.output_schema())
    );
    assert_eq!(
        (&described["effect"], &described["permission"]),
        (&json!("write"), &json!("files.write"))
    );
    let unknown = bench.fails("tools.describe", json!(["read_flie"])).await;
    assert!(
        unknown.name == "UnknownTool" && unknown.message.contains("Did you mean read_file?"),
        "{unknown}"
    );
}

#[test]
fn result_schemas_match_result_types() {
    let list = definition("list_files").expect("a tool").output_schema();
    assert_eq!(list["items"]["properties"]["type"]["enum"][0], json!("file"));
    let command = definition("execute_command").expect("a tool").output_schema();
    assert_eq!(
        command["properties"]["signal"]["anyOf"],
        json!([{"type": "string"}, {"type": "null"}])
    );
    let grep = definition("grep").expect("a tool");
    assert_eq!(grep.output_schema()["required"], json!(["matches", "truncated", "files_searched"]));
    assert!(
        grep.signature()
            .contains("{ matches: { path: string; line: number; text: string; before?: string[];")
    );
    assert_eq!(Output::List(&Output::Nullable(&Output::Text)).typescript(), "(string | null)[]");
}

#[test]
fn permission_of_a_tool_matches_its_effect() {
    for tool in definitions() {
        let expected = match tool.permission {
            Permission::Pure | Permission::FilesRead => Effect::Read,
            Permission::FilesWrite | Permission::FilesDelete => Effect::Write,
            Permission::Commands | Permission::Network | Permission::Models => Effect::External,
            Permission::Environment | Permission::Tasks => continue,
        };
        assert_eq!(tool.effect, expected, "{}", tool.name);
    }
}

#[test]
fn equivalent_calls_have_one_canonical_form() {
    let same = |name: &str, forms: &[Value]| -> Value {
        let tool = definition(name).expect("a tool");
        let canonical = tool.canonical(&forms[0]).expect("arguments that fit");
        for form in forms {
            assert_eq!(
                tool.canonical(form).expect("arguments that fit").to_string(),
                canonical.to_string(),
                "{form}"
            );
        }
        // The canonical form is itself a valid call.
        assert_eq!(tool.canonical(&canonical).expect("arguments that fit"), canonical);
        canonical
    };
    let forms = [
        json!(["./src//a/../b.rs", 2.0]),
        json!({"start_line": 2, "path": "src/b.rs"}),
        json!([{"path": "src/b.rs/", "start_line": 2, "end_line": null}]),
    ];
    assert_eq!(same("read_file", &forms).to_string(), r#"{"path":"src/b.rs","start_line":2}"#);
    let forms = [
        json!(["https://a.com", {"method": "post", "headers": {"b": "1", "a": "2"}}]),
        json!({"options": {"headers": {"a": "2", "b": "1"}, "method": "POST"}, "url": "https://a.com"}),
    ];
    let expected =
        r#"{"options":{"headers":{"a":"2","b":"1"},"method":"POST"},"url":"https://a.com"}"#;
    assert_eq!(same("fetch", &forms).to_string(), expected);
    same(
        "grep",
        &[
            json!(["x", ".", {"include": "*.rs"}]),
            json!({"query": "x", "path": "./", "options": {"include": ["*.rs"]}}),
        ],
    );
    let wrong =
        definition("read_file").expect("a tool").canonical(&json!([])).expect_err("no path");
    assert_eq!(wrong.name, "InvalidArguments");
}

#[tokio::test]
async fn absolute_workspace_paths_become_relative() {
    let bench = Bench::new();
    bench.write("a/b", "text");
    let root = bench.directory.path().to_str().expect("UTF-8");
    for (given, expected) in [
        (format!("{root}/a/./b"), "a/b".to_owned()),
        (format!("{root}/"), ".".to_owned()),
        ("/etc/../etc/passwd".to_owned(), "/etc/passwd".to_owned()),
        (
            format!("{root}/../x"),
            bench.directory.path().with_file_name("x").to_str().expect("UTF-8").to_owned(),
        ),
    ] {
        assert_eq!(
            bench.tools.canonical("read", &json!([given])),
            Ok(json!({"path": expected})),
            "{given}"
        );
    }
    assert_eq!(bench.call("read", json!([format!("{root}/a/../a/b")])).await, json!("text"));
}

#[test]
fn policy_subjects_are_paths_commands_and_requests() {
    let subject = |name: &str, args: Value| {
        let tool = definition(name).expect("a tool");
        tool.subject(&tool.canonical(&args).expect("arguments that fit"))
    };
    assert_eq!(
        subject("create_file", json!(["./a//b", ""])),
        PolicySubject::Path("a/b".to_owned())
    );
    assert_eq!(subject("list_files", json!([])), PolicySubject::Path(".".to_owned()));
    assert_eq!(
        subject("bash", json!(["ls -l | wc"])),
        PolicySubject::Command("ls -l | wc".to_owned())
    );
    let request =
        subject("fetch", json!(["HTTPS://Exämple.COM./a/../b?key=s3cret", {"method": "put"}]));
    let expected = PolicySubject::Request {
        method: "PUT".to_owned(),
        host: "xn--exmple-cua.com".to_owned(),
        path: "/b".to_owned(),
    };
    assert_eq!(request, expected);
    assert_eq!(request.to_string(), "PUT xn--exmple-cua.com/b");
    for (args, name) in [(json!(["x", "lawyer"]), "lawyer"), (json!(["x"]), "")] {
        assert_eq!(subject("tasks.spawn", args), PolicySubject::Agent(name.to_owned()));
    }
    assert_eq!(
        subject("tasks.hand_off", json!(["lawyer"])),
        PolicySubject::Agent("lawyer".to_owned())
    );
    assert_eq!(subject("print", json!([1])), PolicySubject::None);
}

#[tokio::test]
async fn policy_subjects_include_link_targets() {
    let bench = Bench::new();
    bench.write("secret/key", "");
    symlink("secret", bench.path("open")).expect("linked");
    symlink("secret/new", bench.path("dangling")).expect("linked");
    symlink("../open/../dangling", bench.path("secret/back")).expect("linked");
    symlink("loop", bench.path("loop")).expect("linked");
    symlink("/etc/nothing", bench.path("away")).expect("linked");
    let asked = async |name: &str, path: &str| -> Vec<String> {
        let canonical =
            bench.tools.canonical(name, &json!([path, "x"])).expect("arguments that fit");
        let subjects = bench
            .tools
            .subjects(name, &canonical, &bench.tools.environment())
            .await
            .expect("a tool");
        subjects.iter().map(ToString::to_string).collect()
    };
    assert_eq!(asked("create_file", "secret/key").await, ["secret/key"]);
    assert_eq!(asked("create_file", "new/dir/file").await, ["new/dir/file"]);
    assert_eq!(asked("create_file", "open/key").await, ["open/key", "secret/key"]);
    assert_eq!(asked("create_file", "open/not/yet").await, ["open/not/yet", "secret/not/yet"]);
    assert_eq!(asked("create_file", "dangling").await, ["dangling", "secret/new"]);
    assert_eq!(asked("create_file", "secret/back").await, ["secret/back", "secret/new"]);
    for path in ["loop", "away", "../x", "/etc/passwd"] {
        assert_eq!(asked("create_file", path).await, [path]);
        bench.fails("create_file", json!([path, "x"])).await;
    }
    // The tool uses the path that the policy decided about.
    bench.call("create_file", json!(["dangling", "text"])).await;
    assert_eq!(bench.read("secret/new"), "text");
}
