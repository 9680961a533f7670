use serde_json::json;

use super::*;

const FILE: &[&str] =
    &["import argparse", "", "def main():", "    parser = argparse.ArgumentParser()", "", "main()"];

fn lines(path: &str, first: u32, last: u32) -> Option<Vec<String>> {
    let all = if path == "tools/report.py" { FILE } else { return None };
    let from = usize::try_from(first.checked_sub(1)?).unwrap();
    let found: Vec<String> = all
        .iter()
        .skip(from)
        .take((last + 1 - first) as usize)
        .map(|line| (*line).to_owned())
        .collect();
    (!found.is_empty()).then_some(found)
}

fn valid_candidate() -> Value {
    json!({
        "name": "monthly-report",
        "description": "Writes the report of one month.",
        "category": "report",
        "score": 80,
        "score_reasons": ["It is asked for every month."],
        "confidence": 0.9,
        "entry_point": {"path": "tools/report.py", "line": 3, "symbol": "main", "command": "report.py --month MONTH"},
        "inputs": [{"name": "month", "type": "string", "description": "Which month.", "required": true}],
        "outputs": [{"name": "report", "type": "file", "description": "The report."}],
        "credentials": [{"name": "LEDGER_TOKEN", "purpose": "to read the ledger"}],
        "side_effects": [{"kind": "writes_files", "description": "the report"}],
        "evidence": [{"path": "tools/report.py", "line": 4, "quote": "argparse.ArgumentParser()", "statement": "It takes arguments."}],
        "dry_run": {"steps": ["report.py --help"], "expected": "its arguments are shown"},
    })
}

fn candidate_with(pointer: &str, value: Value) -> Value {
    let mut candidate = valid_candidate();
    *candidate.pointer_mut(pointer).expect("it is there") = value;
    candidate
}

fn check_all(candidates: Vec<Value>) -> CheckReport {
    check_with(&json!({"candidates": candidates}).to_string(), "abc", &lines)
}

#[test]
fn valid_candidate_is_found_among_other_text() {
    let answer = format!(
        "Here it is:\n```json\n{}\n```\nThat is all.",
        json!({"candidates": [valid_candidate()]})
    );
    let checked = check_with(&answer, "abc", &lines);
    assert_eq!(checked.problems, []);
    assert_eq!(checked.candidates[0].content, valid_candidate());
    assert_eq!(check_with("{\"candidates\": []}", "abc", &lines), CheckReport::default());
}

#[test]
fn malformed_answer_is_refused_as_a_whole() {
    for answer in [
        "",
        "I found nothing.",
        "} {",
        "{\"candidates\": 7}",
        "{\"tools\": []}",
        "{\"candidates\": [}",
        &"x".repeat(MAX_ANSWER_BYTES + 1),
    ] {
        let checked = check_with(answer, "abc", &lines);
        assert!(
            checked.candidates.is_empty() && checked.problems[0].is_about_answer(),
            "{checked:?}"
        );
    }
}

#[test]
fn invalid_candidate_is_refused_with_its_location() {
    for (pointer, value, words) in [
        ("/score", json!(120), "score"),
        ("/score", json!("high"), "score"),
        ("/score_reasons", json!([]), "score_reasons"),
        ("/confidence", json!(2), "confidence"),
        ("/category", json!("fun"), "category"),
        ("/name", json!("!!!"), "name"),
        ("/outputs", json!([]), "outputs"),
        ("/inputs/0/type", json!("blob"), "inputs/0/type"),
        (
            "/credentials/0",
            json!({"name": "TOKEN", "purpose": "to read", "value": "s3cret"}),
            "value",
        ),
        ("/credentials/0/name", json!("ghp_ secret"), "credentials/0/name"),
        ("/dry_run", json!({"steps": [], "expected": "x"}), "dry_run/steps"),
        ("/entry_point/path", json!("nowhere.py"), "no text file nowhere.py"),
        ("/entry_point/line", json!(7), "has no line 7"),
        ("/entry_point/path", json!("../../etc/passwd"), "no text file"),
        ("/evidence/0/line", json!(99), "has no line 99"),
        ("/evidence/0/quote", json!("click.command"), "does not have the quote"),
        ("/evidence/0/quote", json!(" \t"), "the quote is too short"),
        ("/evidence/0/quote", json!("a r"), "the quote is too short"),
        ("/entry_point/symbol", json!("Report.render"), "have the symbol `render`"),
        ("/evidence", json!([]), "evidence"),
    ] {
        let checked = check_all(vec![candidate_with(pointer, value.clone()), valid_candidate()]);
        assert_eq!(checked.candidates.len(), 1, "{pointer} {value}");
        let message = checked.problems[0].to_string();
        assert!(
            message.starts_with("candidates[0]") && message.contains(words),
            "{pointer} {value}: {message}"
        );
        assert_eq!(refused_count(&checked.problems), 1);
        assert!(repair_prompt(&checked.problems).contains(&message));
    }
    let mut short = valid_candidate();
    short.as_object_mut().expect("an object").remove("dry_run");
    assert!(check_all(vec![short]).problems[0].to_string().contains("dry_run"));
}

#[test]
fn names_and_paths_are_normalized_and_lines_corrected() {
    let mut candidate = candidate_with("/name", json!("  Monthly Report! "));
    candidate["entry_point"]["path"] = json!("./tools/report.py");
    candidate["evidence"][0]["path"] = json!("abc/tree/tools/report.py");
    candidate["evidence"][0]["line"] = json!(2);
    candidate["evidence"][0]["quote"] = json!("parser   =  argparse.ArgumentParser()");
    let checked = check_all(vec![candidate]);
    assert_eq!(checked.problems, []);
    let content = &checked.candidates[0].content;
    assert_eq!(
        (&content["name"], &content["evidence"][0]["line"]),
        (&json!("monthly-report"), &json!(4))
    );
    assert_eq!(content["evidence"][0]["path"], "tools/report.py");
}

#[test]
fn answer_is_found_after_text_with_braces_and_other_objects() {
    let object = json!({"candidates": [valid_candidate()]});
    for before in [
        "It fills `{month}`: ",
        "It reads {\"month\": 5}.\n",
        "{ { {",
        "```js\nfunction f() { return {}; }\n```\n",
    ] {
        let checked =
            check_with(&format!("{before}```json\n{object}\n``` and {{so on}}"), "abc", &lines);
        assert_eq!(
            (checked.candidates.len(), checked.problems.len()),
            (1, 0),
            "{before}: {checked:?}"
        );
    }
    let shown = format!(
        "The form is {{\"candidates\": []}}; here it is filled: {object} (no `{{\"candidates\": []}}`)."
    );
    assert_eq!(check_with(&shown, "abc", &lines).candidates.len(), 1);
    let cut = object.to_string();
    let message = check_with(&cut[..cut.len() - 1], "abc", &lines).problems[0].to_string();
    assert!(message.contains("not valid JSON"), "{message}");
}

#[test]
fn symbol_is_searched_nearby_and_blank_entry_line_is_refused() {
    let mut candidate = candidate_with("/entry_point/line", json!(1));
    candidate["entry_point"]["symbol"] = json!("tools.report.main()");
    let checked = check_all(vec![candidate]);
    assert_eq!(checked.problems, []);
    assert_eq!(checked.candidates[0].content["entry_point"]["line"], 3);
    let mut blank = candidate_with("/entry_point/line", json!(2));
    blank["entry_point"].as_object_mut().expect("an object").remove("symbol");
    assert!(
        check_all(vec![blank]).problems[0]
            .to_string()
            .contains("line 2 of tools/report.py is blank")
    );
}

#[test]
fn subcommands_of_one_program_are_separate_tools() {
    let command = |name: &str, command: &str| {
        let mut candidate = candidate_with("/name", json!(name));
        candidate["entry_point"]["command"] = json!(command);
        candidate
    };
    let checked = check_all(vec![
        command("export", "report.py export"),
        command("import", "report.py  import"),
    ]);
    assert_eq!((checked.candidates.len(), checked.merged), (2, 0));
}

#[test]
fn equal_names_in_several_packages_are_numbered() {
    let everywhere = |path: &str, first: u32, last: u32| lines(path.get(2..)?, first, last);
    let of = |package: &str, score: i32| {
        let mut candidate = candidate_with("/score", json!(score));
        let path = format!("{package}/tools/report.py");
        candidate["entry_point"]["path"] = json!(path);
        candidate["evidence"][0]["path"] = json!(path);
        candidate["name"] = json!(format!("build{}", "x".repeat(58)));
        candidate
    };
    let answer =
        json!({"candidates": [of("a", 50), of("b", 70), of("c", 60), of("b", 20)]}).to_string();
    let checked = check_with(&answer, "abc", &everywhere);
    assert_eq!(checked.problems, []);
    let names: Vec<_> =
        checked.candidates.iter().map(|candidate| candidate.name.replace('x', "")).collect();
    assert_eq!(
        (names, checked.merged),
        (vec!["build".into(), "build-2".into(), "build-3".into()], 1)
    );
    for Candidate { name, content, .. } in &checked.candidates {
        assert!(
            name.len() <= MAX_NAME_CHARS
                && VALIDATOR.is_valid(content)
                && content["name"] == **name,
            "{name}"
        );
    }
}

#[test]
fn equal_candidates_are_merged_with_the_evidence_of_both() {
    let mut second = candidate_with("/name", json!("report-of-a-month"));
    second["score"] = json!(90);
    second["evidence"][0] = json!({"path": "tools/report.py", "line": 6, "quote": "main()", "statement": "It is started here."});
    let checked = check_all(vec![valid_candidate(), second, candidate_with("/score", json!(10))]);
    assert_eq!((checked.candidates.len(), checked.merged), (1, 2));
    let Candidate { name, score, content } = &checked.candidates[0];
    assert_eq!((name.as_str(), *score), ("report-of-a-month", 90));
    assert_eq!(content["evidence"].as_array().map(Vec::len), Some(2));
}

#[test]
fn candidate_equal_to_two_others_leaves_unique_names() {
    let named = |name: &str, line: u32, score: i32| {
        let mut candidate = candidate_with("/name", json!(name));
        (candidate["entry_point"]["line"], candidate["score"]) = (json!(line), json!(score));
        candidate
    };
    for third in [named("bb", 3, 70), named("aa", 6, 55)] {
        let checked = check_all(vec![named("aa", 3, 50), named("bb", 6, 60), third]);
        assert_eq!((checked.candidates.len(), checked.merged), (1, 2), "{checked:?}");
    }
    // The better one stays apart from the one that only the worse one was like.
    let checked = check_all(vec![named("aa", 3, 50), named("bb", 6, 60), named("cc", 3, 70)]);
    let names: Vec<_> =
        checked.candidates.iter().map(|candidate| candidate.name.as_str()).collect();
    assert_eq!((names, checked.merged), (vec!["cc", "bb"], 1));
}

#[test]
fn repair_prompt_is_bounded() {
    let problem = Problem { candidate: Some((0, "a".into())), message: "x".repeat(500) };
    assert!(repair_prompt(&vec![problem; 1000]).len() < MAX_REPAIR_BYTES + 100);
}
