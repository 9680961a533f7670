use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

use super::*;

/// Expressions that are large for their length, but small enough for a search.
const LARGE: [&str; 4] =
    ["(a{1,150}){1,150}b", "(?:(?:a?){100}){100}b", "[a-y]{0,9000}z", r"(\w{2}b?){8}!"];

fn stop() -> Stop {
    Stop::new(CancellationToken::new(), Duration::from_secs(600))
}

/// The line of the first match, from 0, found as the searcher does; an error if it cannot be
/// decided.
fn first_line(expression: &BoundedMatcher<'_>, text: &str) -> io::Result<Option<usize>> {
    let matches = |line: &str| {
        Ok::<_, io::Error>(expression.shortest_match(without_ending(line.as_bytes()))?.is_some())
    };
    if expression.line_terminator().is_none() {
        for (number, line) in text.split_inclusive('\n').enumerate() {
            if matches(line)? {
                return Ok(Some(number));
            }
        }
        return Ok(None);
    }
    let mut from = 0;
    while let Some(found) = expression.find_candidate_line(&text.as_bytes()[from..])? {
        let (LineMatchKind::Confirmed(at) | LineMatchKind::Candidate(at)) = found;
        let before = &text.as_bytes()[..from + at];
        let start = memchr::memrchr(b'\n', before).map_or(0, |at| at + 1);
        let line = text[start..].split_inclusive('\n').next().unwrap_or_default();
        if line.is_empty() {
            return Ok(None);
        }
        if matches!(found, LineMatchKind::Confirmed(_)) || matches(line)? {
            return Ok(Some(memchr::memchr_iter(b'\n', &text.as_bytes()[..start]).count()));
        }
        from = start + line.len();
    }
    Ok(None)
}

#[test]
fn line_matches_equally_in_pieces_and_byte_by_byte() {
    let stop = stop();
    let texts = [
        "",
        "\n",
        "one\ntwo\r\nthree",
        "\n\nfoo bar\n",
        "äöü\nÄrger über b\n\u{fffd}x\n",
        "aaaaaaaaaaaaaaaaaaaaaaaaaaaaab\naab\n",
        "word, another-word\r\nlast",
    ];
    for query in [
        "o",
        "two",
        "t.*e$",
        "(?m)^t",
        "^$",
        "(?m)^$",
        "(?m)o$",
        r"\bword\b",
        r"(?-u:\b)word",
        "ä",
        "(?i)ärger",
        "a{3,5}b",
        "o{0}",
        r"\s",
        "[^a]b",
        "x|r$",
        "nothing",
    ] {
        for case_sensitive in [true, false] {
            let at_once = BoundedMatcher::new(query, false, case_sensitive, &stop).expect(query);
            for text in texts {
                let expected = first_line(&at_once, text).expect("it is short");
                for bytes_per_check in 1..20 {
                    let pieces = BoundedMatcher {
                        bytes_per_check,
                        ..BoundedMatcher::new(query, false, case_sensitive, &stop)
                            .expect("the same")
                    };
                    match first_line(&pieces, text) {
                        Ok(found) => {
                            assert_eq!(
                                found, expected,
                                "{query} in {text:?}, {bytes_per_check} bytes at once"
                            )
                        }
                        Err(why) => assert!(
                            query == r"\bword\b" && !text.is_ascii(),
                            "{query} in {text:?}: {why}"
                        ),
                    }
                }
            }
        }
    }
}

#[test]
fn oversized_and_invalid_expressions_have_different_errors() {
    let stop = stop();
    let fails =
        |query: &str| BoundedMatcher::new(query, false, true, &stop).err().map(|error| error.name);
    for query in ["(a{1,500}){1,500}", r"\w{1000}", "(((a{100}){100}){100}){100}", "[a-z]{1000000}"]
    {
        assert_eq!(fails(query), Some("ExpressionTooLarge"), "{query}");
    }
    for query in ["(", "a{2,1}", r"(a)\1", "(?=a)", r"a\nb"] {
        assert_eq!(fails(query), Some("InvalidArguments"), "{query}");
    }
    for query in LARGE.into_iter().chain([
        r"\w+\s*=\s*\d+",
        r"\w{20}",
        r"\p{Greek}{5,50}",
        "a{1,1000}",
        "[0-9a-f]{40}",
    ]) {
        assert_eq!(fails(query), None, "{query}");
    }
    assert!(
        BoundedMatcher::new("((((a{1000}){1000}", true, false, &stop).is_ok(),
        "it is small as plain text"
    );
}

#[test]
fn compilation_time_is_bounded() {
    let stop = stop();
    let classes = r"\pL".repeat(2730);
    let names = (0..1300).map(|n| format!("{n:x}x|")).collect::<String>();
    // CPU time: other tests may delay this one.
    let began = thread_time();
    for query in
        LARGE.into_iter().chain([classes.as_str(), &names, "(a{1,500}){1,500}", r"\w{1000}"])
    {
        for case_sensitive in [true, false] {
            let one = Instant::now();
            let made = BoundedMatcher::new(query, false, case_sensitive, &stop);
            let bytes_per_check = made.map_or(0, |made| made.bytes_per_check);
            println!(
                "{:>8.1?} {bytes_per_check:>8} {}",
                one.elapsed(),
                &query[..query.len().min(30)]
            );
        }
    }
    let took = thread_time() - began;
    assert!(took < Duration::from_secs(20), "{took:?}");
}

/// The CPU time of this thread.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

#[test]
fn any_search_stops_quickly() {
    // One line, many short ones, and text that defeats the cache.
    let mut random = fastrand::Rng::with_seed(1);
    let long = vec![b'a'; 4 << 20];
    let short: Vec<u8> = (0..4 << 20).map(|at| if at % 80 == 79 { b'\n' } else { b'a' }).collect();
    let mixed: Vec<u8> = (0..4 << 20).map(|_| if random.bool() { b'a' } else { b'b' }).collect();
    for query in LARGE {
        for text in [&long, &short, &mixed] {
            let cancel = CancellationToken::new();
            let stop = Stop::new(cancel.clone(), Duration::from_secs(600));
            let took = std::thread::scope(|scope| {
                let searching = scope.spawn(|| {
                    let expression =
                        BoundedMatcher::new(query, false, true, &stop).expect("it is small enough");
                    // As the searcher continues after a match.
                    let mut from = 0;
                    while let Ok(Some(found)) = expression.find_candidate_line(&text[from..]) {
                        let (LineMatchKind::Confirmed(at) | LineMatchKind::Candidate(at)) = found;
                        from = (from + at + 1).min(text.len());
                    }
                    Instant::now()
                });
                std::thread::sleep(Duration::from_millis(300));
                let stopped = Instant::now();
                cancel.cancel();
                searching.join().expect("it ends").saturating_duration_since(stopped)
            });
            println!("{took:>8.1?} after the stop: {query}");
            assert!(took < Duration::from_secs(2), "{query} continued for {took:?}");
        }
    }
}
