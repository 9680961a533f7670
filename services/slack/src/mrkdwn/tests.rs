use proptest::prelude::*;

use super::*;

fn rendered(markdown: &str) -> Vec<String> {
    let blocks = messages(markdown).into_iter().flatten();
    blocks.map(|block| block["text"]["text"].as_str().unwrap_or("---").to_owned()).collect()
}

#[test]
fn marks_links_and_code_are_converted() {
    let markdown = "Some **bold**, *slanted*, ~~gone~~ and `x < y` with [a link](https://example.com/?a=1&b=2).";
    let expected = "Some *bold*, _slanted_, ~gone~ and `x &lt; y` with <https://example.com/?a=1&amp;b=2|a link>.";
    assert_eq!(rendered(markdown), [expected]);
}

#[test]
fn headings_rules_quotes_and_fences_are_separate_blocks() {
    let markdown = "# Title\n\nText.\n\n---\n\n> said\n> twice\n\n```rust\nfn f() -> &str {}\n```\n\n### Small\nEnd.";
    let expected = [
        "Title",
        "Text.",
        "---",
        "> said\n> twice",
        "```\nfn f() -&gt; &amp;str {}\n```",
        "*Small*\nEnd.",
    ];
    let shown: Vec<String> =
        rendered(markdown).iter().map(|text| text.replace("\n\n", "\n")).collect();
    assert_eq!(shown, expected);
}

#[test]
fn list_levels_and_numbers_are_kept() {
    let markdown = "Do:\n\n- one\n  - inner\n- two\n\n3. three\n4. four\n\n- [x] done\n- [ ] open";
    let text = rendered(markdown).join("\n");
    assert!(text.contains("• one\n    ◦ inner\n• two"), "{text}");
    assert!(text.contains("3. three\n4. four"), "{text}");
    assert!(text.contains("• ☑ done\n• ☐ open"), "{text}");
}

#[test]
fn table_cells_are_aligned_in_columns() {
    let markdown = "| name | cost |\n|---|--:|\n| a | 10 |\n| long name | 5 |";
    assert_eq!(
        rendered(markdown),
        ["```\nname      | cost\n----------+-----\na         |   10\nlong name |    5\n```"]
    );
}

#[test]
fn list_item_paragraph_starts_a_new_line() {
    let markdown = "1. **Title**\n\n   Text of it.\n\n   - inner\n\n     more\n\n   Last.\n2. next";
    let expected = "1. *Title*\n    Text of it.\n    • inner";
    let text = rendered(markdown).join("\n");
    assert!(text.starts_with(&expected.replace('•', "◦")), "{text}");
    assert!(text.contains("◦ inner\n        more\n    Last.\n2. next"), "{text}");
}

#[test]
fn list_item_paragraphs_after_code_stay_separate() {
    let markdown =
        format!("- {}\n- see\n\n  ```\n  code\n  ```\n\n  First.\n\n  Second.", "word ".repeat(50));
    let text = rendered(&markdown).join("\n");
    assert!(text.contains("First.\n    Second."), "{text}");
}

#[test]
fn heading_is_bold_once_and_overlong_heading_becomes_text() {
    assert_eq!(rendered("### **Bold** and _slanted_"), ["*Bold and _slanted_*"]);
    let long = "word ".repeat(40);
    assert_eq!(rendered(&format!("# {long}")), [format!("*{}*", long.trim())]);
}

#[test]
fn table_with_long_cells_becomes_a_list() {
    let long = "a cell that is much longer than anybody would want to see in a column of a table";
    let markdown = format!("| name | what <b> |\n|---|---|\n| one | {long} |\n| two | x |");
    assert_eq!(
        rendered(&markdown),
        [format!("*name*: one\n*what &lt;b&gt;*: {long}\n\n*name*: two\n*what &lt;b&gt;*: x")]
    );
    let linked = rendered(
        "| name |\n|---|\n| [docs](https://e.example/a) |\n\n# See [it](https://e.example/b)",
    );
    assert!(linked[0].contains("docs (https://e.example/a)"), "{linked:?}");
    assert_eq!(linked[1], "See it (https://e.example/b)");
}

#[test]
fn split_code_keeps_every_space() {
    let code: Vec<String> =
        (0..400).map(|line| format!("{}line {line}  ", " ".repeat(line % 9))).collect();
    let code = code.join("\n");
    let blocks = fenced(&code);
    assert!(blocks.len() > 1);
    let inside = blocks.iter().map(|block| {
        let text = block["text"]["text"].as_str().unwrap_or_default();
        text.strip_prefix("```\n")
            .and_then(|text| text.strip_suffix("\n```"))
            .expect("a fence")
            .to_owned()
    });
    assert_eq!(inside.collect::<Vec<_>>().join("\n"), code);
}

#[test]
fn model_text_mentions_nobody() {
    let markdown = "<!channel> <@U123> <!here|x> &lt;!everyone&gt; [go](<!channel>) [x](javascript:alert(1)) `<!here>`\n\n\
                    ```\n<!channel>\n```\n\n# <!channel>\n\n| <!channel> |\n|---|\n| <@U1> |\n\n![<!here>](https://e.example/>|<!here>)";
    for block in messages(markdown).into_iter().flatten() {
        let text = block["text"]["text"].as_str().unwrap_or_default();
        if block["text"]["type"] == "plain_text" {
            continue;
        }
        assert_eq!(block["text"]["verbatim"], true, "{block}");
        assert!(!text.contains("<!") && !text.contains("<@") && !text.contains("<#"), "{text}");
    }
}

#[test]
fn long_text_is_split_without_losing_a_word() {
    let words: Vec<String> = (0..20_000).map(|number| format!("w{number}")).collect();
    let messages = messages(&words.join(" "));
    assert!(messages.len() > 5);
    let text: Vec<String> = messages
        .iter()
        .flatten()
        .map(|block| block["text"]["text"].as_str().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(text.join(" "), words.join(" "));
}

#[test]
fn fence_in_code_does_not_end_the_block() {
    let shown = fenced("a ``` b");
    assert_eq!(shown[0]["text"]["text"].as_str().unwrap_or_default().matches("```").count(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_text_fits_slack_limits_and_mentions_nobody(
        markdown in "([a-z<>&!@#|`*_~\\[\\]()\\-\n 0-9]|<!channel>|\\[x\\]\\(https://e\\.x/\\)|```|\n\n|\\| a \\| b \\|\n|\\|--\\|--\\|\n|https://e\\.x/ ){0,400}",
        times in 1_usize..40,
    ) {
        let messages = messages(&markdown.repeat(times));
        for message in &messages {
            prop_assert!(!message.is_empty() && message.len() <= 50);
            let mut size = 0;
            for block in message {
                let text = block["text"]["text"].as_str().unwrap_or_default();
                let chars = text.chars().count();
                size += chars;
                if block["type"] == "section" {
                    prop_assert!((1..=3000).contains(&chars), "{} characters", chars);
                    for (at, _) in text.match_indices('<') {
                        let rest = &text[at + 1..];
                        prop_assert!(["https://", "http://", "mailto:"].iter().any(|scheme| rest.starts_with(scheme)), "{}", text);
                    }
                }
                if block["type"] == "header" {
                    prop_assert!((1..=150).contains(&chars));
                }
            }
            prop_assert!(size <= MAX_MESSAGE_CHARS + MAX_SECTION_CHARS);
        }
    }
}
