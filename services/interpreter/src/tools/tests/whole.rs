//! Values that scripts receive are complete and exact, or an error says what to do.

use super::*;

/// Result limit in the tests of limits, in bytes.
const SMALL: usize = 10_000;

/// A toolbox whose results may have [`SMALL`] bytes.
fn small() -> Bench {
    let mut bench = Bench::new();
    bench.tools = bench.tools.with_result_bytes(SMALL);
    bench
}

impl Bench {
    async fn text(&self, args: Value) -> String {
        let Value::String(text) = self.call("read_file", args).await else { panic!("no text") };
        text
    }

    /// A file concatenated from pieces of at most `limit` bytes.
    async fn pieces(&self, path: &str, limit: usize, encoding: &str) -> String {
        let (mut text, mut offset) = (String::new(), 0);
        loop {
            let args =
                json!({"path": path, "offset": offset, "limit": limit, "encoding": encoding});
            let piece = self.text(args).await;
            if piece.is_empty() {
                return text;
            }
            text.push_str(&piece);
            offset += limit;
        }
    }

    fn bytes(&self, path: &str) -> Vec<u8> {
        std::fs::read(self.path(path)).expect("readable")
    }
}

#[tokio::test]
async fn large_file_is_read_completely() {
    let bench = Bench::new();
    let lines: String = std::iter::once("id,v\n".to_owned())
        .chain((0..100_000).map(|n| format!("{n},1\n")))
        .collect();
    bench.write("over.csv", &lines);
    assert!(bench.text(json!(["over.csv"])).await == lines);
    // One line of 900 KB, and one of 100 KB between others.
    let array: Vec<usize> = (0..150_000).collect();
    bench.write("array.json", json!(array).to_string());
    let parsed: Vec<usize> =
        serde_json::from_str(&bench.text(json!(["array.json"])).await).expect("JSON");
    assert!(parsed == array);
    let wide = format!("{}\n", "\u{1f600}x".repeat(20_000));
    bench.write("wide", format!("one\n{wide}three"));
    assert!(bench.text(json!(["wide", 2, 2])).await == wide);
    assert!(bench.text(json!(["wide"])).await == format!("one\n{wide}three"));
}

#[tokio::test]
async fn oversized_file_is_an_error_and_readable_in_pieces() {
    let bench = small();
    // Characters of every length, line feeds and control characters, which are longer as JSON, and
    // long stretches without line feeds.
    let text = format!(
        "{}{}\n\u{1}\u{2}\n",
        "a\n\u{e4}\u{20ac}\u{1f600}\"\\".repeat(400),
        "\u{1f600}z\u{e4}".repeat(1_500)
    );
    bench.write("big", &text);
    let refused = bench.fails("read_file", json!(["big"])).await;
    assert_eq!(refused.name, "FileTooLarge");
    let details = refused.details.expect("details");
    assert_eq!((&details["size"], &details["limit"]), (&json!(text.len()), &json!(SMALL)));
    assert!(
        refused.message.contains("{ offset: 0, limit: 1024 }")
            && refused.message.contains("offset 1024"),
        "{}",
        refused.message
    );
    let piece = details["piece"].as_u64().expect("a number").try_into().expect("small");
    for limit in [piece, 4, 5, 6, 7, 997] {
        assert!(bench.pieces("big", limit, "utf-8").await == text, "pieces of {limit}");
    }
    // The suggested piece size works even for a file of control characters.
    bench.write("controls", "\u{1}".repeat(5_000));
    assert_eq!(bench.fails("read_file", json!(["controls"])).await.name, "FileTooLarge");
    assert!(bench.pieces("controls", piece, "utf-8").await == "\u{1}".repeat(5_000));
    let much = bench.fails("read_file", json!({"path": "big", "limit": 9_999})).await;
    assert!(much.name == "FileTooLarge" && much.message.contains("9999 bytes"), "{much}");
    let rest = bench.fails("read_file", json!({"path": "big", "offset": 3})).await;
    assert!(
        rest.name == "FileTooLarge" && rest.message.contains("offset: 3, limit: 1024"),
        "{rest}"
    );
}

#[tokio::test]
async fn file_at_the_limit_is_read_and_one_byte_more_is_an_error() {
    let bench = small();
    for content in ["x", "\n", "\u{e4}", "\u{1f600}"] {
        let fitting = (SMALL - 2) / (serde_json::to_string(content).expect("JSON").len() - 2);
        bench.write("fits", content.repeat(fitting));
        assert!(bench.text(json!(["fits"])).await == content.repeat(fitting));
        bench.write("over", content.repeat(fitting + 1));
        assert_eq!(
            bench.fails("read_file", json!(["over"])).await.name,
            "FileTooLarge",
            "{content:?}"
        );
        assert_eq!(
            bench.fails("read_file", json!(["over", 1])).await.name,
            "FileTooLarge",
            "{content:?}"
        );
    }
    // From within a character on, the rest has to fit, too.
    bench.write("shifted", format!("\u{1f600}{}", "x".repeat(SMALL - 1)));
    assert_eq!(
        bench.fails("read_file", json!({"path": "shifted", "offset": 1})).await.name,
        "FileTooLarge"
    );
}

#[tokio::test]
async fn oversized_line_range_error_has_the_range_that_fits() {
    let bench = small();
    let line = format!("{}\n", "x".repeat(98));
    bench.write("lines", line.repeat(1_000));
    let refused = bench.fails("read_file", json!(["lines", 11, 500])).await;
    assert_eq!(refused.name, "FileTooLarge");
    let last = refused.details.as_ref().expect("details")["last_line"].as_u64().expect("a number");
    assert!(refused.message.contains(&format!("read_file(\"lines\", 11, {last})")), "{refused}");
    assert_eq!(
        bench.text(json!(["lines", 11, last])).await,
        line.repeat((last - 10).try_into().expect("small"))
    );
    assert_eq!(bench.fails("read_file", json!(["lines", 11, last + 1])).await.name, "FileTooLarge");
    // A single line that is too large can be read by its offset.
    let wide = format!("{}\n", "\u{20ac}\"".repeat(5_000));
    bench.write("wide", format!("one\ntwo\n{wide}four\n"));
    let refused = bench.fails("read_file", json!(["wide", 3, 3])).await;
    let details = refused.details.expect("details");
    assert_eq!((refused.name, &details["offset"]), ("FileTooLarge", &json!(8)));
    assert!(bench.pieces("wide", 1_024, "utf-8").await == format!("one\ntwo\n{wide}four\n"));
    assert_eq!(bench.text(json!(["wide", 4, 4])).await, "four\n");
    let both =
        bench.fails("read_file", json!({"path": "lines", "start_line": 1, "limit": 5})).await;
    assert_eq!(both.name, "InvalidArguments");
}

#[tokio::test]
async fn gigabyte_line_is_rejected_quickly_and_read_in_pieces() {
    use std::os::unix::fs::FileExt as _;
    let bench = Bench::new();
    let file = std::fs::File::create(bench.path("line")).expect("made");
    file.write_all_at(&b"x".repeat(100_000), 0).expect("written");
    file.write_all_at(b"the end", (1 << 30) - 7).expect("written");
    let started = Instant::now();
    for args in [json!(["line"]), json!(["line", 1, 1])] {
        assert_eq!(bench.fails("read_file", args).await.name, "FileTooLarge");
    }
    let end = bench.text(json!({"path": "line", "offset": (1_u64 << 30) - 7, "limit": 100})).await;
    assert_eq!(end, "the end");
    assert_eq!(bench.text(json!({"path": "line", "offset": 1_u64 << 30})).await, "");
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[tokio::test]
async fn other_encodings_are_rejected_and_round_trip_when_named() {
    let bench = Bench::new();
    let all: Vec<u8> = (0..=u8::MAX).collect();
    let utf16: Vec<u8> = "\u{feff}eins\r\nzw\u{f6}lf \u{1f600}\n"
        .encode_utf16()
        .flat_map(u16::to_le_bytes)
        .collect();
    for (name, bytes, error, encoding) in [
        ("latin", b"caf\xe9\n".as_slice(), "WrongEncoding", "latin1"),
        ("binary", &all, "BinaryFile", "latin1"),
        ("utf16", &utf16, "WrongEncoding", "utf-16le"),
    ] {
        bench.write(name, bytes);
        let refused = bench.fails("read_file", json!([name])).await;
        assert!(refused.name == error && refused.message.contains(encoding), "{refused}");
        let text = bench.text(json!({"path": name, "encoding": encoding})).await;
        bench
            .call("create_file", json!({"path": name, "content": text, "encoding": encoding}))
            .await;
        assert_eq!(bench.bytes(name), bytes, "{name}");
    }
    let place = bench.fails("read_file", json!(["latin"])).await.details.expect("details");
    assert_eq!((&place["at"], &place["encoding"]), (&json!(3), &json!("latin1")));
    // Only the requested part has to be text.
    bench.write("mixed", b"one\n\xff\nthree\n");
    assert_eq!(bench.text(json!(["mixed", 3])).await, "three\n");
    assert_eq!(
        bench.fails("read_file", json!(["mixed", 2, 2])).await.details.expect("details")["at"],
        json!(4)
    );
    let missing = bench
        .fails("create_file", json!({"path": "new", "content": "5 \u{20ac}", "encoding": "latin1"}))
        .await;
    assert!(missing.name == "InvalidArguments" && missing.message.contains("U+20AC"), "{missing}");
    assert!(!bench.path("new").exists());
}

#[tokio::test]
async fn pieces_of_utf16_are_whole_characters() {
    let bench = small();
    let text = format!("\u{feff}{}", "a\u{1f600}\u{a0a}\n".repeat(1_200));
    for (name, to_bytes) in
        [("utf-16le", u16::to_le_bytes as fn(u16) -> [u8; 2]), ("utf-16be", u16::to_be_bytes)]
    {
        bench.write(name, text.encode_utf16().flat_map(to_bytes).collect::<Vec<u8>>());
        let refused = bench.fails("read_file", json!({"path": name, "encoding": name})).await;
        assert!(refused.name == "FileTooLarge" && refused.message.contains(name), "{refused}");
        for limit in [1_024, 5, 14] {
            assert!(bench.pieces(name, limit, name).await == text, "{name}, pieces of {limit}");
        }
        let line = bench
            .text(json!({"path": name, "start_line": 2, "end_line": 2, "encoding": name}))
            .await;
        assert_eq!(line, "a\u{1f600}\u{a0a}\n");
    }
}

#[tokio::test]
async fn listing_and_search_are_complete() {
    let bench = Bench::new();
    for n in 0..2_100 {
        bench.write(&format!("{n:04}"), "hit\n");
    }
    let listed = bench.call("list_files", json!([])).await;
    assert_eq!(listed.as_array().map(Vec::len), Some(2_100));
    let found = bench.call("find_file", json!(["*"])).await;
    assert_eq!(
        (found["paths"].as_array().map(Vec::len), &found["truncated"]),
        (Some(2_100), &json!(false))
    );
    let found = bench.call("grep", json!(["hit"])).await;
    assert_eq!(
        (found["matches"].as_array().map(Vec::len), &found["truncated"]),
        (Some(2_100), &json!(false))
    );
    assert_eq!(found.get("note"), None);
}

#[tokio::test]
async fn oversized_listing_is_an_error_and_search_is_truncated() {
    let bench = small();
    for n in 0..400 {
        bench.write(&format!("d/{n:04}-{}", "x".repeat(40)), "hit\n");
    }
    let refused = bench.fails("list_files", json!(["d"])).await;
    assert_eq!(refused.name, "TooManyEntries");
    assert!(
        refused.message.contains("\"d\"") && refused.message.contains("find_file"),
        "{refused}"
    );
    for (tool, args, all) in
        [("find_file", json!(["*-*"]), "paths"), ("grep", json!(["hit"]), "matches")]
    {
        let found = bench.call(tool, args).await;
        let count = found[all].as_array().map_or(0, Vec::len);
        assert!((50..400).contains(&count) && found.to_string().len() <= SMALL, "{tool}: {count}");
        assert_eq!(found["truncated"], json!(true));
        // The host shows this to the model whatever the script does.
        let notes: Vec<&str> = definition(tool).expect("a tool").notes(&found).collect();
        assert!(matches!(notes[..], [note] if note.contains(&count.to_string())), "{notes:?}");
    }
    // A requested truncation needs no note.
    let few = bench.call("grep", json!(["hit", "d", {"max_results": 3}])).await;
    assert_eq!(
        (few["matches"].as_array().map(Vec::len), &few["truncated"]),
        (Some(3), &json!(true))
    );
    assert_eq!(few.get("note"), None);
}

#[tokio::test]
async fn line_of_a_match_is_complete_or_marked() {
    let bench = Bench::new();
    bench.write("short", format!("{}needle\n", "\u{20ac}".repeat(490)));
    bench.write("wide", format!("before\n{}needle{}\n", "a".repeat(100_000), "b".repeat(100_000)));
    bench.write("latin", b"needle caf\xe9\n");
    let found = bench.call("grep", json!(["needle", "short"])).await;
    assert_eq!(found["matches"][0]["text"], json!(format!("{}needle", "\u{20ac}".repeat(490))));
    assert_eq!((found["matches"][0].get("clipped"), found.get("note")), (None, None));
    let found = bench.call("grep", json!(["needle", "wide", {"context": 1}])).await;
    let text = found["matches"][0]["text"].as_str().expect("text");
    assert!(
        text.contains("needle") && text.chars().count() <= 500 && !text.contains('\u{2026}'),
        "{text}"
    );
    assert_eq!(
        (&found["matches"][0]["clipped"], &found["truncated"]),
        (&json!(true), &json!(false))
    );
    assert!(
        found["note"].as_str().expect("a note").contains("read_file(path, line, line)"),
        "{found}"
    );
    // A long line next to the match counts as well.
    let beside = bench.call("grep", json!(["before", "wide", {"context": 1}])).await;
    assert_eq!(beside["matches"][0]["clipped"], json!(true));
    let latin = bench.call("grep", json!(["needle", "latin"])).await;
    assert!(latin["note"].as_str().expect("a note").contains("U+FFFD"), "{latin}");
}

#[tokio::test]
async fn long_diff_ends_at_a_line_with_a_note() {
    let bench = Bench::new();
    bench.write("big", "x".repeat(400_000));
    let edited = bench
        .call(
            "edit_file",
            json!(["big", [{"old": "x".repeat(400_000), "new": "line\n".repeat(100_000)}]]),
        )
        .await;
    let diff = edited["diff"].as_str().expect("text");
    assert!(diff.len() <= 256 * 1024 && !diff.contains("more bytes"), "{} bytes", diff.len());
    assert!(edited["note"].as_str().expect("a note").contains("All edits were made"), "{edited}");
}

#[tokio::test]
async fn command_output_is_complete_or_an_error() {
    let mut policy = Policy::default();
    policy.commands.confinement = crate::command::Confinement::AllowUnconfined;
    let bench = Bench::with(policy, Egress::new(&[]).expect("an HTTP client"));
    let whole = bench.call("execute_command", json!(["seq 200000; seq 100000 >&2"])).await;
    let lines = |name: &str| {
        whole[name]
            .as_str()
            .expect("text")
            .lines()
            .map(|line| line.parse::<u64>().expect("a number"))
            .sum::<u64>()
    };
    assert_eq!((lines("stdout"), lines("stderr")), (20_000_100_000, 5_000_050_000));
    let refused = bench
        .fails("execute_command", json!(["echo first; seq 1000000; echo last; touch done; exit 3"]))
        .await;
    assert!(
        refused.name == "OutputTooLarge" && refused.message.contains("ended with exit code 3"),
        "{refused}"
    );
    let details = refused.details.expect("details");
    let stdout = details["stdout"].as_str().expect("text");
    assert_eq!(details["exit_code"], json!(3));
    assert!(
        stdout.starts_with("first\n1\n")
            && stdout.ends_with("\n1000000\nlast\n")
            && stdout.len() < 20_000
    );
    assert!(bench.path("done").exists());
    // Each alone is small enough, but both as JSON are not.
    let quotes = bench
        .fails(
            "execute_command",
            json!(["yes '\"' | head -c 1500000; yes '\"' | head -c 1500000 >&2"]),
        )
        .await;
    assert_eq!(quotes.name, "OutputTooLarge");
    let bytes = bench.call("execute_command", json!([r"printf 'caf\351'"])).await;
    assert_eq!(bytes["stdout"], json!("caf\u{fffd}"));
    assert!(bytes["note"].as_str().expect("a note").contains("U+FFFD"), "{bytes}");
}
