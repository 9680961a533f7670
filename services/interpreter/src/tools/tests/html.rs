//! Conversion of pages to Markdown.

use reqwest::Url;

use super::*;
use crate::tools::html::to_markdown;

const LIMIT: usize = 10 << 20;

fn stop() -> Stop {
    Stop::new(CancellationToken::new(), Duration::from_secs(60))
}

fn markdown(html: &str) -> String {
    let base = Url::parse("https://example.com/docs/page.html?x=1").expect("a URL");
    to_markdown(html, &base, LIMIT, &stop()).expect("in time").text
}

#[test]
fn html_elements_become_markdown() {
    let cases = [
        ("", ""),
        ("plain", "plain\n"),
        ("<p>One\n  two</p><p>three", "One two\n\nthree\n"),
        ("<h1>A</h1><h3> B <b>c</b></h3>text", "# A\n\n### B **c**\n\ntext\n"),
        ("a<br>b<br><br>c", "a\nb\n\nc\n"),
        ("<p>a <b>b </b>c<i></i> <em>d</em>.</p>", "a **b** c *d*.\n"),
        ("<b><i>x</b></i>y", "***x***y\n"),
        ("<ul><li>a<li>b<ul><li>c</li></ul></li></ul>d", "- a\n- b\n  - c\n\nd\n"),
        ("<ol start=9><li>a</li><li>b<p>c</p></li></ol>", "9. a\n10. b\n\n    c\n"),
        ("<blockquote><p>a</p><p>b</p></blockquote>c", "> a\n>\n> b\n\nc\n"),
        ("<a href='../x?y=1#z'>text</a>", "[text](https://example.com/x?y=1#z)\n"),
        (
            "<a href='#here'>a</a> <a href='javascript:x()'>b</a> <a name=q>c</a> <a href=''>d</a>",
            "a b c d\n",
        ),
        ("<a href='/a(b)'>x</a><a href=/e></a>", "[x](<https://example.com/a(b)>)\n"),
        ("<img src=/i.png alt='An <i>'><img src=/j.png>", "![An <i>](https://example.com/i.png)\n"),
        (
            "<a href=/x><img src=/i.png alt=I></a>",
            "[![I](https://example.com/i.png)](https://example.com/x)\n",
        ),
        ("use <code>a*b</code> &amp; &lt;p&gt; caf&eacute;&nbsp;x", "use `a*b` & <p> café x\n"),
        ("<pre>\n  a\n\n    b  \n</pre>c", "```\n  a\n\n    b\n```\n\nc\n"),
        (
            "<pre><code class='x language-rust'>fn <b>a</b>() {}\n</code></pre>",
            "```rust\nfn a() {}\n```\n",
        ),
        ("<pre>a ```` b</pre>", "`````\na ```` b\n`````\n"),
        ("<ul><li>x<pre>a\nb</pre></ul>", "- x\n\n  ```\n  a\n  b\n  ```\n"),
        ("a<hr>b", "a\n\n---\n\nb\n"),
        (
            "<script>if (a<b) '</p>'</script><style>p > a {}</style>x<svg><title>t</title>y</svg>z",
            "xz\n",
        ),
        ("<p># no</p><p>&gt; no</p><p>- no</p><p>-5</p>", "\\# no\n\n\\> no\n\n\\- no\n\n-5\n"),
        ("<del>old</del><dl><dt>a<dd>b</dl>", "~~old~~\n\na\nb\n"),
        ("<title>T &amp; t</title><p>x", "# T & t\n\nx\n"),
        ("<title>T</title><h1>H</h1>x", "# H\n\nx\n"),
        ("<!-- c --><p>a</p></div></b></li>b", "a\n\nb\n"),
    ];
    let wrong: Vec<String> = cases
        .iter()
        .map(|(html, expected)| (html, expected, markdown(html)))
        .filter(|(_, expected, got)| got != *expected)
        .map(|(html, expected, got)| format!("{html}\n  expected {expected:?}\n  got      {got:?}"))
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn tables_with_a_head_are_kept_and_others_are_layout() {
    let html = "<table><caption>C</caption><thead><tr><th>A<th> B | C </thead><tbody><tr><td>1<p>2</p></td>\n\
        <td><a href=/x>y</a><br><b>z</b></td></tr><tr><td></td><td><table><tr><td>in<td>ner</table></td></tr></table>end";
    let expected = "C\n\n| A | B \\| C |\n| --- | --- |\n| 1 2 | [y](https://example.com/x) **z** |\n| | in ner |\n\nend\n";
    assert_eq!(markdown(html), expected);
    let layout = "<table><tr><td>Menu</td><td><h2>Title</h2><table><tr><th>k</th></tr><tr><td>v</td></tr></table></td></tr>\
        <tr><td>a</td><td>b</td></tr></table>";
    assert_eq!(markdown(layout), "Menu\n\n## Title\n\n| k |\n| --- |\n| v |\n\na b\n");
}

#[test]
fn output_is_cut_at_its_limit_between_characters() {
    let base = Url::parse(&format!("https://example.com/{}/", "a".repeat(1_500))).expect("a URL");
    // Each of these short links becomes a long address.
    let html = "<a href=x>ä</a>".repeat(10_000);
    let page = to_markdown(&html, &base, 100_001, &stop()).expect("in time");
    assert!(
        page.truncated && page.text.len() <= 100_001 && page.text.len() > 99_000,
        "{}",
        page.text.len()
    );
    let page = to_markdown("<p>ääää", &base, 3, &stop()).expect("in time");
    assert_eq!((page.text.as_str(), page.truncated), ("ä", true));
}

#[test]
fn hostile_pages_take_linear_time_and_memory_and_no_stack() {
    let many = 50_000;
    let repeated = |text: &str| text.repeat(many);
    let pages = [
        repeated("<div>"),
        repeated("<b>"),
        repeated("<b a=1><p>x"),
        repeated("<blockquote>x"),
        repeated("<ul><li>x"),
        repeated("<ol>"),
        repeated("<table><tr><td>"),
        repeated("<table><th>"),
        repeated("<a href=x>"),
        repeated("<b><i></b></i>"),
        repeated("</div></p></table></b>"),
        repeated("<pre>"),
        repeated("<svg>"),
        repeated("<h1>"),
        repeated("<b>x</b>"),
        repeated("<td>x"),
        format!("<table><tr>{}</tr>{}", "<th>x".repeat(2_000), "<tr><td>x".repeat(many)),
        format!("<table><tr><th>{}</tr>{}", "x".repeat(many), "<tr><td>x".repeat(many)),
        format!(
            "{}{}",
            (0..2_000).map(|n| format!("<b id={n}>")).collect::<String>(),
            repeated("<p>x")
        ),
        format!("<pre>{}", repeated("`")),
        format!("{}<pre>{}", "<blockquote>".repeat(100), repeated("x\n")),
        format!("<p {}>", (0..many).map(|n| format!("a{n}=1 ")).collect::<String>()),
        format!("<a href='{}'>x", repeated("../")),
        repeated("&lt"),
        repeated("<"),
        repeated("<!--"),
        repeated("<![CDATA["),
        repeated("<title>"),
        format!("<ol start=4294967295>{}", repeated("<li>x")),
    ];
    // The stack size of a thread that works for a tool.
    let convert = || {
        for page in &pages {
            let started = Instant::now();
            let text = markdown(page);
            let took = started.elapsed();
            let begin: String = page.chars().take(40).collect();
            // For unoptimized code; quadratic work would take minutes.
            assert!(took < Duration::from_secs(8), "{begin}… took {took:?}");
            assert!(text.len() <= LIMIT, "{begin}… became {} bytes", text.len());
        }
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .stack_size(2 << 20)
            .spawn_scoped(scope, convert)
            .expect("a thread");
        thread.join().expect("all pages were converted");
    });
}

#[test]
fn any_order_of_tags_is_converted() {
    let tags = [
        "p",
        "h1",
        "h2",
        "ul",
        "ol",
        "li",
        "blockquote",
        "pre",
        "code",
        "a href=/x",
        "b",
        "i",
        "table",
        "tr",
        "td",
        "th",
        "br",
        "hr",
        "img alt=x src=y",
        "svg",
        "title",
        "div",
        "dt",
        "script",
    ];
    // A linear congruential generator: the same pages every time.
    let mut state: u64 = 1;
    let mut random = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).expect("31 bits") % below
    };
    for _ in 0..5_000 {
        let mut page = String::new();
        for _ in 0..random(60) {
            let tag = tags[random(tags.len())];
            match random(3) {
                0 => page.push_str(&format!("</{}>", tag.split(' ').next().expect("a name"))),
                1 => page.push_str(&format!("<{tag}>")),
                _ => page.push_str(&format!("<{tag}>word ")),
            }
        }
        let text = markdown(&page);
        assert!(text.is_empty() || text.ends_with('\n'), "{page}\n{text}");
        // Preformatted text has its own empty lines.
        assert!(!text.contains("\n\n\n") || page.contains("<pre>"), "{page}\n{text}");
    }
}

#[test]
fn conversion_stops_at_its_time_limit() {
    let base = Url::parse("https://example.com/").expect("a URL");
    let stop = Stop::new(CancellationToken::new(), Duration::ZERO);
    assert!(to_markdown("<p>x", &base, LIMIT, &stop).is_err());
}
