//! Unusual files and trees.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;

use rustix::fs::{CWD, FileType, Mode};

use super::*;

fn utf16(text: &str, big: bool) -> Vec<u8> {
    let units = std::iter::once(0xfeff).chain(text.encode_utf16());
    units.flat_map(|unit: u16| if big { unit.to_be_bytes() } else { unit.to_le_bytes() }).collect()
}

/// A bench with pipes, sockets and, if the tests may create one, a device.
fn special() -> (Bench, Vec<&'static str>, UnixListener) {
    let bench = Bench::new();
    rustix::fs::mknodat(CWD, bench.path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
        .expect("a pipe");
    let socket = UnixListener::bind(bench.path("socket")).expect("a socket");
    let mut names = vec!["pipe", "socket"];
    let zero = rustix::fs::makedev(1, 5);
    if rustix::fs::mknodat(CWD, bench.path("zero"), FileType::CharacterDevice, Mode::RUSR, zero)
        .is_ok()
    {
        names.push("zero");
    }
    (bench, names, socket)
}

#[tokio::test]
async fn pipes_sockets_and_devices_never_block_a_call() {
    let (bench, names, _socket) = special();
    bench.write("text", "needle");
    let all = async {
        for name in &names {
            for (tool, args) in [
                ("read_file", json!([name])),
                ("edit_file", json!([name, [{"old": "a", "new": "b"}]])),
                ("create_file", json!([name, "x"])),
                ("grep", json!(["x", name])),
            ] {
                let refused = bench.fails(tool, args).await;
                assert_eq!(refused.name, "NotARegularFile", "{tool} {name}: {refused}");
            }
        }
        let listed = bench.call("list_files", json!([])).await;
        assert_eq!(listed[0], json!({"path": "pipe", "type": "other", "size": 0}));
        assert_eq!(bench.call("grep", json!(["needle"])).await["files_searched"], json!(1));
        for name in &names {
            assert_eq!(bench.call("delete_file", json!([name])).await["deleted"], json!(1));
        }
        // Also in place of ignore files.
        rustix::fs::mknodat(
            CWD,
            bench.path(".gitignore"),
            FileType::Fifo,
            Mode::RUSR | Mode::WUSR,
            0,
        )
        .expect("a pipe");
        assert_eq!(bench.call("find_file", json!(["text"])).await["paths"], json!(["text"]));
    };
    tokio::time::timeout(Duration::from_secs(20), all).await.expect("a call waits for a pipe");
}

#[tokio::test]
async fn utf16_is_searched_and_read_with_its_encoding() {
    let bench = Bench::new();
    let text = format!("eins\r\nzw\u{f6}lf \u{1f600}\n{}ende", "\u{1f600} lang\n".repeat(20_000));
    for (name, encoding, big) in [("little", "utf-16le", false), ("big", "utf-16be", true)] {
        bench.write(name, utf16(&text, big));
        let read = async |lines: (u64, u64)| {
            let args = json!({"path": name, "start_line": lines.0, "end_line": lines.1, "encoding": encoding});
            bench.call("read_file", args).await
        };
        assert_eq!(read((1, 2)).await, json!("\u{feff}eins\r\nzw\u{f6}lf \u{1f600}\n"));
        assert_eq!(read((20_002, 20_003)).await, json!("\u{1f600} lang\nende"));
        let unnamed = bench.fails("read_file", json!([name])).await;
        assert!(unnamed.name == "WrongEncoding" && unnamed.message.contains(encoding), "{unnamed}");
        let found = bench.call("grep", json!(["zw\u{f6}lf", name])).await;
        assert_eq!(found["matches"][0]["text"], json!("zw\u{f6}lf \u{1f600}"));
        let refused = bench.fails("edit_file", json!([name, [{"old": "eins", "new": "1"}]])).await;
        assert!(refused.name == "BinaryFile" && refused.message.contains(encoding), "{refused}");
    }
    // Half a code unit at the end, and UTF-32, which looks similar.
    bench.write("odd", [0xff, 0xfe, b'a', 0, b'b']);
    let odd = bench.fails("read_file", json!({"path": "odd", "encoding": "utf-16le"})).await;
    assert_eq!((odd.name, &odd.details.expect("details")["at"]), ("WrongEncoding", &json!(4)));
    bench.write("utf32", [0xff, 0xfe, 0, 0, b'a', 0, 0, 0]);
    assert_eq!(bench.fails("read_file", json!(["utf32"])).await.name, "BinaryFile");
    // The byte order mark of UTF-8 is part of the text, so an edit keeps it.
    bench.write("bom", "\u{feff}a = 1\n");
    assert_eq!(bench.call("read_file", json!(["bom"])).await, json!("\u{feff}a = 1\n"));
    bench.call("edit_file", json!(["bom", [{"old": "1", "new": "2"}]])).await;
    assert_eq!(bench.read("bom"), "\u{feff}a = 2\n");
}

#[tokio::test]
async fn binary_file_is_not_read_edited_or_searched_silently() {
    let bench = Bench::new();
    let content = [b"\x7fELF\0\0 version = 1\n".as_slice(), &[0; 100]].concat();
    bench.write("program", &content);
    for (tool, args) in [
        ("read_file", json!(["program"])),
        ("edit_file", json!(["program", [{"old": "version = 1", "new": "x"}]])),
    ] {
        let refused = bench.fails(tool, args).await;
        assert!(
            refused.name == "BinaryFile" && refused.message.contains("of 119 bytes"),
            "{refused}"
        );
    }
    assert_eq!(std::fs::read(bench.path("program")).expect("readable"), content);
    let found = bench.call("grep", json!(["version", "program"])).await;
    assert_eq!((&found["matches"], &found["files_searched"]), (&json!([]), &json!(0)));
    assert!(
        found["note"].as_str().expect("a note").contains("program is a binary file"),
        "{found}"
    );
}

#[tokio::test]
async fn lines_of_a_gigabyte_file_are_read_quickly() {
    let bench = Bench::new();
    let mut file = File::create(bench.path("huge")).expect("made");
    for n in 1..=20_000 {
        writeln!(file, "line {n}").expect("written");
    }
    file.set_len(1 << 30).expect("sparse");
    drop(file);
    let started = Instant::now();
    assert_eq!(
        bench.call("read_file", json!(["huge", 9_999, 10_000])).await,
        json!("line 9999\nline 10000\n")
    );
    let refused =
        bench.fails("edit_file", json!(["huge", [{"old": "line 5\n", "new": "x"}]])).await;
    assert!(
        refused.name == "FileTooLarge" && refused.message.contains("nothing was changed"),
        "{refused}"
    );
    // The rest of the file is NUL bytes, which the search only finds when it gets there.
    let found = bench.call("grep", json!(["line 7$", "huge"])).await;
    assert!(found["note"].as_str().expect("a note").contains("binary"), "{found}");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test]
async fn line_too_long_for_a_search_is_noted() {
    let bench = Bench::new();
    bench.write("wide", format!("needle\n{}\nneedle\n", "x".repeat(20 << 20)));
    bench.write("narrow", "needle\n");
    let found = bench.call("grep", json!(["needle"])).await;
    assert_eq!(found["matches"][0]["path"], json!("narrow"));
    let note = found["note"].as_str().expect("a note");
    assert!(
        note.contains("wide has a line that is too long") && note.contains("command"),
        "{note}"
    );
    // It can still be edited up to the size limit of files.
    bench.write("bundle.js", format!("a;{}b;", "x".repeat(8 << 20)));
    let edited = bench.call("edit_file", json!(["bundle.js", [{"old": "b;", "new": "c;"}]])).await;
    assert!(edited["diff"].as_str().expect("text").len() < 300 * 1024);
    assert!(bench.read("bundle.js").ends_with("xc;"));
}

#[tokio::test]
async fn shortened_lines_are_cut_between_characters() {
    let bench = Bench::new();
    for lead in 0..4 {
        let text = format!(
            "{}{}needle{}\n",
            "x".repeat(lead),
            "\u{1f600}".repeat(1_000),
            "\u{20ac}".repeat(1_000)
        );
        bench.write("wide", text);
        let found = bench.call("grep", json!(["needle"])).await;
        let text = found["matches"][0]["text"].as_str().expect("text");
        assert!(text.contains("\u{1f600}needle\u{20ac}") && !text.contains('\u{fffd}'), "{text}");
    }
}

#[tokio::test]
async fn edit_keeps_all_other_bytes() {
    let bench = Bench::new();
    for (before, edit, after) in [
        ("a\nb", json!({"old": "b", "new": "c"}), "a\nc"),
        ("a\nb", json!({"old": "a", "new": "c"}), "c\nb"),
        ("a\r\nb", json!({"old": "a\nb", "new": "c\nd"}), "c\r\nd"),
        ("a\r\nb\r\n", json!({"old": "b", "new": "c\nd"}), "a\r\nc\r\nd\r\n"),
        ("\ta  \n\n\n", json!({"old": "a", "new": "b"}), "\tb  \n\n\n"),
        ("a\rb\r", json!({"old": "b", "new": "c"}), "a\rc\r"),
    ] {
        bench.write("file", before);
        std::fs::set_permissions(bench.path("file"), std::fs::Permissions::from_mode(0o640))
            .expect("set");
        bench.call("edit_file", json!(["file", [edit]])).await;
        assert_eq!(bench.read("file"), after);
        assert_eq!(
            std::fs::metadata(bench.path("file")).expect("there").permissions().mode() & 0o777,
            0o640
        );
    }
}

#[tokio::test]
async fn failed_edit_changes_nothing() {
    let bench = Bench::new();
    let text = "one\ntwo\ntwo\nthree\n";
    let good = json!({"old": "one", "new": "1"});
    for (bad, name) in [
        (json!({"old": "two", "new": "2"}), "AmbiguousEdit"),
        (json!({"old": "four", "new": "4"}), "TextNotFound"),
        (json!({"old": "one\ntwo", "new": "x"}), "OverlappingEdits"),
        (json!({"old": "", "new": "x"}), "InvalidArguments"),
    ] {
        for edits in [json!([good, bad]), json!([bad, good])] {
            bench.write("file", text);
            let modified = || {
                std::fs::metadata(bench.path("file")).expect("there").modified().expect("a time")
            };
            let before = modified();
            let refused = bench.fails("edit_file", json!(["file", edits])).await;
            assert_eq!(refused.name, name);
            assert!(refused.message.contains("Nothing was changed"), "{refused}");
            assert_eq!((bench.read("file").as_str(), modified()), (text, before));
        }
    }
}

#[tokio::test]
async fn loops_of_directory_links_end() {
    let bench = Bench::new();
    bench.write("d/e/file", "needle");
    symlink(".", bench.path("d/self")).expect("linked");
    symlink("..", bench.path("d/up")).expect("linked");
    symlink("../../d", bench.path("d/e/back")).expect("linked");
    let listed = bench.call("list_files", json!(["d", true])).await;
    let paths: Vec<&str> = listed
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|entry| entry["path"].as_str())
        .collect();
    assert_eq!(paths, ["d/e", "d/e/back", "d/e/file", "d/self", "d/up"]);
    assert_eq!(
        bench.call("grep", json!(["needle"])).await["matches"].as_array().expect("a list").len(),
        1
    );
    assert_eq!(bench.call("find_file", json!(["file"])).await["paths"], json!(["d/e/file"]));
    // A file can be accessed through a link that stays inside.
    assert_eq!(
        bench.call("read_file", json!(["d/self/self/e/back/e/file"])).await,
        json!("needle")
    );
}

#[tokio::test]
async fn non_utf8_names_are_listed_but_not_accessible() {
    let bench = Bench::new();
    let name = OsStr::from_bytes(b"caf\xe9.txt");
    std::fs::write(bench.directory.path().join(name), "needle").expect("written");
    std::fs::create_dir(bench.directory.path().join(OsStr::from_bytes(b"\xff"))).expect("made");
    std::fs::write(bench.directory.path().join(OsStr::from_bytes(b"\xff/inner")), "needle")
        .expect("written");
    let shown = "caf\u{fffd}.txt";
    let listed = bench.call("list_files", json!([])).await;
    assert_eq!(listed[0], json!({"path": shown, "type": "file", "size": 6}));
    assert_eq!(bench.call("find_file", json!(["*.txt"])).await["paths"], json!([shown]));
    let found = bench.call("grep", json!(["needle"])).await;
    assert_eq!(found["matches"].as_array().expect("a list").len(), 2);
    let missing = bench.fails("read_file", json!([shown])).await;
    assert!(missing.name == "FileNotFound" && missing.message.contains("not UTF-8"), "{missing}");
    std::fs::create_dir(bench.path("d")).expect("made");
    std::fs::rename(bench.directory.path().join(name), bench.path("d").join(name)).expect("moved");
    assert_eq!(bench.call("delete_file", json!(["d", true])).await["deleted"], json!(2));
}

#[tokio::test]
async fn files_without_a_size_are_read_to_their_end() {
    let mut bench = Bench::new();
    bench.tools.workspace = Workspace::open("/proc/self").expect("a workspace");
    let text = bench.call("read_file", json!(["status"])).await;
    assert!(text.as_str().expect("text").starts_with("Name:"), "{text}");
    assert_eq!(
        bench.call("grep", json!(["^Pid:", "status"])).await["matches"][0]["path"],
        json!("status")
    );
    let binary = bench.fails("read_file", json!(["auxv"])).await;
    assert!(binary.name == "BinaryFile" && !binary.message.contains("0 bytes"), "{binary}");
    assert_eq!(bench.fails("read_file", json!(["mem"])).await.name, "IoError");
}

#[tokio::test]
async fn huge_tree_is_handled_in_time_with_a_note() {
    let bench = Bench::new();
    for directory in 0..201 {
        let directory = bench.path(&format!("d{directory:03}"));
        std::fs::create_dir(&directory).expect("made");
        let first = directory.join("f0");
        File::create(&first).expect("made");
        for file in 1..1_000 {
            let path = directory.join(format!("f{file}"));
            // A hard link is created faster than another file.
            std::fs::hard_link(&first, &path)
                .or_else(|_| File::create(&path).map(drop))
                .expect("made");
        }
    }
    bench.write("d000/needle", "needle");
    bench.write("d200/needle", "needle");
    // On a busy machine the time limit may be reached before that many files.
    let is_honest = |note: &Value| {
        let note = note.as_str().expect("a note");
        assert!(
            note.contains("more than 200000 files") || note.contains("the time limit was reached"),
            "{note}"
        );
    };
    let started = Instant::now();
    let found = bench.call("find_file", json!(["needle"])).await;
    assert_eq!((&found["paths"], &found["truncated"]), (&json!(["d000/needle"]), &json!(true)));
    is_honest(&found["note"]);
    let found = bench.call("grep", json!(["needle"])).await;
    assert_eq!(
        (&found["matches"][0]["path"], &found["truncated"]),
        (&json!("d000/needle"), &json!(true))
    );
    is_honest(&found["note"]);
    let listed = bench.fails("list_files", json!([".", true])).await;
    assert!(["TooManyEntries", "Timeout"].contains(&listed.name), "{listed}");
    assert_eq!(
        bench.call("find_file", json!(["needle", "d200"])).await["paths"],
        json!(["d200/needle"])
    );
    // The time limits of the four calls together.
    assert!(started.elapsed() < Duration::from_secs(4 * 60), "{:?}", started.elapsed());
}

#[test]
fn timed_out_search_returns_partial_results_with_a_note() {
    let bench = Bench::new();
    bench.write("a", "needle");
    let workspace = bench.tools.workspace();
    let stop = Stop::new(CancellationToken::new(), Duration::ZERO);
    let found = grep::run(
        workspace,
        serde_json::from_value(json!({"query": "needle"})).expect("arguments"),
        &stop,
        10_000,
    );
    let found = serde_json::to_value(found.expect("a result")).expect("JSON");
    assert!(
        found["truncated"] == true
            && found["note"].as_str().expect("a note").contains("the time limit was reached")
    );
    let found = find::run(
        workspace,
        serde_json::from_value(json!({"pattern": "a"})).expect("arguments"),
        &stop,
        10_000,
    );
    let found = serde_json::to_value(found.expect("a result")).expect("JSON");
    assert!(
        found["truncated"] == true
            && found["note"].as_str().expect("a note").contains("the time limit was reached")
    );
    let listed =
        list::run(workspace, serde_json::from_value(json!({})).expect("arguments"), &stop, 10_000);
    assert_eq!(listed.err().expect("no time").name, "Timeout");
    let read = read::run(
        workspace,
        serde_json::from_value(json!({"path": "a"})).expect("arguments"),
        &stop,
        10_000,
    );
    assert_eq!(read.expect_err("no time").name, "Timeout");
}

#[tokio::test]
async fn canceled_large_edit_stops_quickly_and_changes_nothing() {
    let bench = Bench::new();
    let mut text = "0123456789abcde\n".repeat((15 << 20) / 16);
    (0..4000).for_each(|mark| text.push_str(&format!("mark {mark}.\n")));
    bench.write("large", &text);
    let edits: Vec<Value> =
        (0..4000).map(|mark| json!({"old": format!("k {mark}."), "new": "x"})).collect();
    let cx = CallContext::default();
    let stopping = async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        cx.cancel.cancel();
        Instant::now()
    };
    let (ended, stopped) =
        tokio::join!(bench.tools.call("edit_file", json!(["large", edits]), &cx), stopping);
    assert_eq!(ended.expect_err("it was stopped").name, "Cancelled");
    assert!(stopped.elapsed() < Duration::from_secs(2), "it continued for {:?}", stopped.elapsed());
    assert_eq!(bench.read("large"), text);
}
