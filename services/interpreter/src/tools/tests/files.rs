//! The tools that work on files.

use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use super::*;

#[tokio::test]
async fn file_is_read_exactly_and_by_lines() {
    let bench = Bench::new();
    let text = "one\r\ntwo\n\u{e4}\u{1f600}\n\nlast";
    bench.write("a", text);
    assert_eq!(bench.call("read_file", json!(["a"])).await, json!(text));
    assert_eq!(bench.call("read_file", json!(["a", 2, 3])).await, json!("two\n\u{e4}\u{1f600}\n"));
    assert_eq!(bench.call("read_file", json!(["a", 5])).await, json!("last"));
    assert_eq!(bench.call("read_file", json!(["a", 5, 500])).await, json!("last"));
    assert_eq!(bench.call("read_file", json!(["a", 4, 4])).await, json!("\n"));
    bench.write("empty", "");
    assert_eq!(bench.call("read_file", json!(["empty"])).await, json!(""));
}

#[tokio::test]
async fn line_out_of_range_error_has_the_line_count() {
    let bench = Bench::new();
    bench.write("a", "one\ntwo\n");
    let error = bench.fails("read_file", json!(["a", 3])).await;
    assert_eq!(
        (error.name, error.details),
        ("LineOutOfRange", Some(json!({"path": "a", "lines": 2})))
    );
    assert_eq!(bench.fails("read_file", json!(["a", 2, 1])).await.name, "InvalidArguments");
}

#[tokio::test]
async fn unreadable_file_errors_say_why_and_what_to_do() {
    let bench = Bench::new();
    bench.write("src/main.rs", "");
    bench.write("binary", [0x7f, b'E', b'L', b'F', 0, 0]);
    symlink("/etc/passwd", bench.path("passwd")).expect("linked");
    let missing = bench.fails("read_file", json!(["src/mian.rs"])).await;
    assert_eq!(missing.name, "FileNotFound");
    assert!(missing.message.contains("Similar names: src/main.rs."), "{missing}");
    assert!(bench.fails("read_file", json!(["src"])).await.message.contains("list_files(\"src\")"));
    let binary = bench.fails("read_file", json!(["binary"])).await;
    assert_eq!(binary.details, Some(json!({"path": "binary", "size": 6})));
    for path in ["passwd", "../x", "/etc/passwd"] {
        assert_eq!(bench.fails("read_file", json!([path])).await.name, "OutsideWorkspace");
    }
}

#[tokio::test]
async fn sparse_gigabyte_file_is_handled_quickly() {
    let bench = Bench::new();
    let file = std::fs::File::create(bench.path("huge")).expect("made");
    file.set_len(1 << 30).expect("sparse");
    let started = Instant::now();
    let error = bench.fails("read_file", json!(["huge"])).await;
    assert_eq!(
        (error.name, error.details),
        ("BinaryFile", Some(json!({"path": "huge", "size": 1 << 30})))
    );
    assert_eq!(
        bench.fails("edit_file", json!(["huge", [{"old": "a", "new": "b"}]])).await.name,
        "FileTooLarge"
    );
    assert_eq!(bench.call("grep", json!(["x"])).await["matches"], json!([]));
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
}

#[tokio::test]
async fn create_file_creates_directories_and_reports_status() {
    let bench = Bench::new();
    let created = bench.call("create_file", json!(["a/b/c.txt", "\u{e4}"])).await;
    assert_eq!(created, json!({"path": "a/b/c.txt", "bytes": 2, "status": "created"}));
    std::fs::set_permissions(bench.path("a/b/c.txt"), std::fs::Permissions::from_mode(0o755))
        .expect("set");
    let again = bench.call("create_file", json!(["./a/b//c.txt", "new"])).await;
    assert_eq!(again, json!({"path": "a/b/c.txt", "bytes": 3, "status": "overwritten"}));
    assert_eq!(bench.read("a/b/c.txt"), "new");
    assert_eq!(std::fs::metadata(bench.path("a/b/c.txt")).expect("there").mode() & 0o777, 0o755);
    for (path, name) in [
        ("a", "IsADirectory"),
        ("new/", "InvalidArguments"),
        ("..", "IsADirectory"),
        ("../x", "OutsideWorkspace"),
        ("a/b/c.txt/d", "NotADirectory"),
    ] {
        assert_eq!(bench.fails("create_file", json!([path, ""])).await.name, name, "{path}");
    }
}

#[tokio::test]
async fn edit_returns_a_unified_diff_and_keeps_the_mode() {
    let bench = Bench::new();
    bench.write("a.rs", "one\ntwo\nthree\nfour\n");
    std::fs::set_permissions(bench.path("a.rs"), std::fs::Permissions::from_mode(0o700))
        .expect("set");
    let edits = json!([{"old": "three", "new": "3"}, {"old": "one\n", "new": ""}]);
    let edited = bench.call("edit_file", json!(["a.rs", edits])).await;
    let diff = "--- a/a.rs\n+++ b/a.rs\n@@ -1,4 +1,3 @@\n-one\n two\n-three\n+3\n four\n";
    assert_eq!(edited, json!({"path": "a.rs", "diff": diff, "replacements": 2}));
    assert_eq!(bench.read("a.rs"), "two\n3\nfour\n");
    assert_eq!(std::fs::metadata(bench.path("a.rs")).expect("there").mode() & 0o777, 0o700);
}

#[tokio::test]
async fn ambiguous_edit_error_lists_lines_and_changes_nothing() {
    let bench = Bench::new();
    let text = "x = 1\ny\nx = 1\n";
    bench.write("a", text);
    let edits = json!([{"old": "y", "new": "z"}, {"old": "x = 1", "new": "x = 2"}]);
    let error = bench.fails("edit_file", json!(["a", edits])).await;
    assert_eq!(error.name, "AmbiguousEdit");
    assert!(error.message.contains("occurs 2 times in \"a\", at lines 1, 3."), "{error}");
    assert_eq!(
        error.details,
        Some(json!({"path": "a", "index": 1, "occurrences": 2, "lines": [1, 3]}))
    );
    assert_eq!(bench.read("a"), text);
    // Overlapping occurrences are ambiguous too.
    bench.write("b", "aaa");
    assert_eq!(
        bench.fails("edit_file", json!(["b", [{"old": "aa", "new": "b"}]])).await.name,
        "AmbiguousEdit"
    );
}

#[tokio::test]
async fn overlapping_edits_are_rejected_and_adjacent_ones_are_not() {
    let bench = Bench::new();
    bench.write("a", "abcdef");
    let overlapping = json!([{"old": "abc", "new": "1"}, {"old": "cd", "new": "2"}]);
    let error = bench.fails("edit_file", json!(["a", overlapping])).await;
    assert_eq!(error.name, "OverlappingEdits");
    let same = json!([{"old": "abc", "new": "1"}, {"old": "abc", "new": "2"}]);
    assert_eq!(bench.fails("edit_file", json!(["a", same])).await.name, "OverlappingEdits");
    assert_eq!(bench.read("a"), "abcdef");
    let touching = json!([{"old": "def", "new": "2"}, {"old": "abc", "new": "1"}]);
    bench.call("edit_file", json!(["a", touching])).await;
    assert_eq!(bench.read("a"), "12");
}

#[tokio::test]
async fn missing_text_error_shows_the_most_similar_text() {
    let bench = Bench::new();
    bench.write("a", "fn main() {\n    let count = 1;\n}\n");
    let error =
        bench.fails("edit_file", json!(["a", [{"old": "\tlet count = 1;", "new": "x"}]])).await;
    assert_eq!(error.name, "TextNotFound");
    assert!(
        error.message.contains("only in whitespace")
            && error.message.contains("at line 2:\n    let count = 1;"),
        "{error}"
    );
    let error = bench
        .fails("edit_file", json!(["a", [{"old": "something else entirely", "new": "x"}]]))
        .await;
    assert!(error.message.contains("There is no similar text"), "{error}");
}

#[tokio::test]
async fn windows_line_endings_are_kept_and_optional_in_edits() {
    let bench = Bench::new();
    bench.write("crlf", "one\r\ntwo\r\nthree\r\n");
    let edited = bench
        .call("edit_file", json!(["crlf", [{"old": "one\ntwo\n", "new": "1\n2\n2b\n"}]]))
        .await;
    assert_eq!(bench.read("crlf"), "1\r\n2\r\n2b\r\nthree\r\n");
    assert!(edited["diff"].as_str().expect("text").contains("+2b\r\n"));
    bench.call("edit_file", json!(["crlf", [{"old": "\nthree", "new": "\n3"}]])).await;
    assert_eq!(bench.read("crlf"), "1\r\n2\r\n2b\r\n3\r\n");
    bench.write("mixed", "one\r\ntwo\nthree\r\n");
    bench
        .call("edit_file", json!(["mixed", [{"old": "one\ntwo", "new": "1\n2"}, {"old": "three\n", "new": "3\n"}]]))
        .await;
    assert_eq!(bench.read("mixed"), "1\r\n2\n3\r\n");
    bench.write("unix", "one\ntwo\n");
    bench.call("edit_file", json!(["unix", [{"old": "one\r\ntwo", "new": "1\r\n2"}]])).await;
    assert_eq!(bench.read("unix"), "1\n2\n");
}

#[tokio::test]
async fn bytes_that_are_not_utf8_survive_an_edit() {
    let bench = Bench::new();
    bench.write("latin", b"caf\xe9 = 1\n");
    bench.call("edit_file", json!(["latin", [{"old": "= 1", "new": "= 2"}]])).await;
    assert_eq!(std::fs::read(bench.path("latin")).expect("readable"), b"caf\xe9 = 2\n");
}

#[tokio::test]
async fn invalid_edits_are_rejected() {
    let bench = Bench::new();
    bench.write("a", "x");
    for edit in [json!({"old": "", "new": "y"}), json!({"old": "x", "new": "x"})] {
        assert_eq!(bench.fails("edit_file", json!(["a", [edit]])).await.name, "InvalidArguments");
    }
    assert_eq!(
        bench.fails("edit_file", json!(["missing", [{"old": "x", "new": "y"}]])).await.name,
        "FileNotFound"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_edits_of_one_file_all_apply() {
    let bench = Bench::new();
    bench.write("a", (0..40).map(|n| format!("<{n}>\n")).collect::<String>());
    let tools = Arc::new(bench.tools);
    let mut edits = tokio::task::JoinSet::new();
    for n in 0..40 {
        let tools = Arc::clone(&tools);
        let edit = json!(["a", [{"old": format!("<{n}>"), "new": format!("[{n}]")}]]);
        edits.spawn(async move { tools.call("edit_file", edit, &CallContext::default()).await });
    }
    while let Some(edited) = edits.join_next().await {
        edited.expect("no panic").expect("an edit that succeeds");
    }
    let text = std::fs::read_to_string(bench.directory.path().join("a")).expect("readable");
    assert_eq!(text, (0..40).map(|n| format!("[{n}]\n")).collect::<String>());
}

#[tokio::test]
async fn listing_has_types_and_sizes_and_omits_ignored_files() {
    let bench = Bench::new();
    bench.write(".gitignore", "target\n");
    bench.write("target/x", "");
    bench.write("src/main.rs", "12345");
    symlink("/etc", bench.path("link")).expect("linked");
    let names = |listed: &Value| -> Vec<String> {
        listed
            .as_array()
            .expect("a list")
            .iter()
            .map(|e| e["path"].as_str().expect("a path").to_owned())
            .collect()
    };
    let flat = bench.call("list_files", json!([])).await;
    assert_eq!(names(&flat), [".gitignore", "link", "src", "target"]);
    assert_eq!(flat[1]["type"], json!("symlink"));
    let all = bench.call("list_files", json!([".", true])).await;
    assert_eq!(names(&all), [".gitignore", "link", "src", "src/main.rs"]);
    assert_eq!(all[3], json!({"path": "src/main.rs", "type": "file", "size": 5}));
    let ignored = bench.call("list_files", json!([".", true, {"include_ignored": true}])).await;
    assert!(names(&ignored).contains(&"target/x".to_owned()));
    assert_eq!(bench.fails("list_files", json!(["link"])).await.name, "OutsideWorkspace");
    assert_eq!(bench.fails("list_files", json!(["src/main.rs"])).await.name, "NotADirectory");
    assert_eq!(bench.fails("list_files", json!(["scr"])).await.name, "FileNotFound");
}

#[tokio::test]
async fn grep_returns_lines_with_numbers_and_context() {
    let bench = Bench::new();
    bench.write("src/a.rs", "one\r\nfn two() {}\r\nthree\n");
    bench.write("src/b.txt", "fn other() {}\n");
    bench.write("c.rs", "FN UPPER\n");
    bench.write("binary.rs", b"fn x() {}\n\0");
    let found = bench
        .call("grep", json!([r"^fn \w+\(\) \{\}$", ".", {"include": "*.rs", "context": 1}]))
        .await;
    let expected = json!({
        "matches": [{"path": "src/a.rs", "line": 2, "text": "fn two() {}", "before": ["one"], "after": ["three"]}],
        "truncated": false, "files_searched": 2,
    });
    assert_eq!(found, expected);
    let paths = |found: &Value| -> Vec<String> {
        let matches = found["matches"].as_array().expect("a list");
        matches.iter().map(|found| found["path"].as_str().expect("a path").to_owned()).collect()
    };
    let any_case = bench
        .call("grep", json!(["fn", ".", {"case_sensitive": false, "exclude": ["src/*.txt"]}]))
        .await;
    assert_eq!(paths(&any_case), ["c.rs", "src/a.rs"]);
    let literal = bench.call("grep", json!(["() {", null, {"literal": true}])).await;
    assert_eq!(paths(&literal), ["src/a.rs", "src/b.txt"]);
    let one_file = bench.call("grep", json!(["fn", "src/b.txt"])).await;
    assert_eq!(paths(&one_file), ["src/b.txt"]);
    let below = bench.call("grep", json!(["fn", "src", {"include": "b.*"}])).await;
    assert_eq!(paths(&below), ["src/b.txt"]);
}

#[tokio::test]
async fn grep_context_lines_belong_to_both_near_matches() {
    let bench = Bench::new();
    bench.write("near", "hit 1\ntwo\nthree\nhit 4\nhit 5\nsix\n7\n8\n9\n10\nhit 11\n");
    bench.write("other", "hit a\n");
    let found = bench.call("grep", json!(["hit", ".", {"context": 2}])).await;
    let context: Vec<(&Value, &Value, &Value)> = found["matches"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|m| (&m["line"], &m["before"], &m["after"]))
        .collect();
    let expected = [
        (json!(1), json!([]), json!(["two", "three"])),
        (json!(4), json!(["two", "three"]), json!(["hit 5", "six"])),
        (json!(5), json!(["three", "hit 4"]), json!(["six", "7"])),
        (json!(11), json!(["9", "10"]), json!([])),
        (json!(1), json!([]), json!([])),
    ];
    assert_eq!(
        context,
        expected.iter().map(|(line, before, after)| (line, before, after)).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn invalid_expression_error_explains_the_fault() {
    let bench = Bench::new();
    for query in ["(", "(?<=x)y", "a\\1"] {
        let error = bench.fails("grep", json!([query])).await;
        assert_eq!(error.name, "InvalidArguments", "{query}");
        assert!(error.message.contains("literal: true") && error.message.len() < 2_000, "{error}");
    }
    let error = bench.fails("grep", json!([r"(\w{1000}){1000}"])).await;
    assert!(
        error.name == "ExpressionTooLarge" && error.message.contains("counted repetitions"),
        "{error}"
    );
    let glob = bench.fails("grep", json!(["x", ".", {"include": "[z-a]"}])).await;
    assert_eq!(glob.name, "InvalidArguments");
    // Backtracking engines take exponential time for this one.
    bench.write("a", format!("{}!\n", "a".repeat(50_000)));
    let started = Instant::now();
    bench.call("grep", json!(["^(a+)+$"])).await;
    assert!(started.elapsed() < Duration::from_secs(5));
}

#[tokio::test]
async fn grep_and_find_do_not_follow_links_outside() {
    let bench = Bench::new();
    let outside = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(outside.path().join("secret.txt"), "needle").expect("written");
    symlink(outside.path(), bench.path("away")).expect("linked");
    symlink(outside.path().join("secret.txt"), bench.path("file")).expect("linked");
    assert_eq!(bench.call("grep", json!(["needle"])).await["matches"], json!([]));
    assert_eq!(bench.call("find_file", json!(["secret*"])).await["paths"], json!([]));
    for path in ["away", "file", "away/secret.txt"] {
        assert_eq!(bench.fails("grep", json!(["needle", path])).await.name, "OutsideWorkspace");
    }
}

#[tokio::test]
async fn find_file_matches_names_and_paths() {
    let bench = Bench::new();
    for path in ["Cargo.toml", "a/Cargo.toml", "a/src/lib.rs", "b/src/deep/lib.rs"] {
        bench.write(path, "");
    }
    let cases = [
        (json!(["Cargo.toml"]), json!(["Cargo.toml", "a/Cargo.toml"])),
        (json!(["*.rs"]), json!(["a/src/lib.rs", "b/src/deep/lib.rs"])),
        (json!(["*/src/*.rs"]), json!(["a/src/lib.rs"])),
        (json!(["b/**/*.rs"]), json!(["b/src/deep/lib.rs"])),
        (json!(["src/**", "b"]), json!(["b/src/deep", "b/src/deep/lib.rs"])),
        (json!(["deep"]), json!(["b/src/deep"])),
        (json!(["*.{md,toml}", "a"]), json!(["a/Cargo.toml"])),
        (json!(["nothing*"]), json!([])),
    ];
    for (args, expected) in cases {
        let found = bench.call("find_file", args.clone()).await;
        assert_eq!(found, json!({"paths": expected, "truncated": false}), "{args}");
    }
}
