//! Names of tools: dotted names, aliases, and unknown names.

use super::*;

#[tokio::test]
async fn dotted_name_is_a_member_of_an_object() {
    for (script, expected) in [
        ("secrets.get('A')", r#"{"name":"A"}"#),
        ("secrets.later('A') instanceof Promise", "true"),
        ("await secrets.later({name: 'A'})", r#"{"name":"A"}"#),
        (
            "const p = tools.secrets.get('B'); [p instanceof Promise, await p]",
            r#"[true,{"name":"B"}]"#,
        ),
        ("const p = tools.search('x'); [p instanceof Promise, await p]", r#"[true,{"query":"x"}]"#),
        (
            "[Object.keys(secrets), Object.keys(tools.secrets), typeof search, 'search' in tools, 'nope' in tools]",
            r#"[["get","later"],["get","later"],"undefined",true,false]"#,
        ),
        ("'use strict'; try { secrets.get = 1 } catch (e) { e.name }", "TypeError"),
        ("'use strict'; try { tools.more = 1 } catch (e) { e.name }", "TypeError"),
        ("secrets", "{ get: [Function secrets.get], later: [Function secrets.later] }"),
        ("JSON.stringify(tools)", "{\"talk\":{},\"secrets\":{}}"),
        ("await tools === tools", "true"),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
    let host = TestHost::new();
    run_on(&host, "secrets.get('A'); await tools.search('q')").await;
    assert_eq!(
        host.calls(),
        [
            (1, "secrets.get".to_owned(), json!({"name": "A"})),
            (2, "tools.search".to_owned(), json!({"query": "q"}))
        ]
    );
}

#[tokio::test]
async fn tool_can_have_aliases() {
    assert_eq!(value("say('a', 1)").await, r#"{"text":"a","first":1}"#);
    assert_eq!(value("await tools.say('a')").await, r#"{"text":"a"}"#);
    assert_eq!(
        value("[talk.loudly('a'), await tools.talk.loudly('b')]").await,
        r#"[{"text":"a"},{"text":"b"}]"#
    );
    let host = TestHost::new();
    run_on(&host, "say('a')").await;
    assert_eq!(host.calls(), [(1, "echo".to_owned(), json!({"text": "a"}))]);
}

#[tokio::test]
async fn unknown_tool_error_names_the_nearest() {
    for (script, hint) in [
        (
            "tools.ecko('x')",
            "There is no tool ecko. Did you mean echo? The tools are: echo, say, talk.loudly, configure,",
        ),
        ("await tools.readFile('x')", "There is no tool readFile. Did you mean read_file?"),
        ("await tools.read('x')", "Did you mean read_file?"),
        ("secrets.gte('x')", "There is no tool secrets.gte. Did you mean secrets.get?"),
        ("tools.secrets.put('x')", "There is no tool secrets.put."),
        ("tools.xyzzy()", "There is no tool xyzzy. The tools are: "),
    ] {
        let (name, message, stack) = thrown(script).await;
        assert_eq!(name, "UnknownTool", "{script}: {message}");
        assert!(message.starts_with(hint) || message.contains(hint), "{script}: {message}");
        assert!(stack.contains("script.js:1:"), "{stack}");
    }
    assert_eq!(
        value("try { tools.nope() } catch (e) { [e instanceof Error, e.name] }").await,
        r#"[true,"UnknownTool"]"#
    );
}

#[tokio::test]
async fn undefined_name_error_has_a_hint() {
    for (script, expected) in [
        ("readFile('x')", "readFile is not defined. Did you mean the tool read_file?"),
        ("await ech('x')", "ech is not defined. Did you mean the tool echo?"),
        (
            "Buffer.from('x')",
            "Buffer is not defined. This is not Node.js; use Uint8Array, TextEncoder and TextDecoder, atob and btoa.",
        ),
        ("process.exit()", "process is not defined. This is not Node.js."),
        ("xyzzy", "xyzzy is not defined"),
        ("throw new ReferenceError('my own')", "my own"),
    ] {
        let (name, message, _) = thrown(script).await;
        assert_eq!((name.as_str(), message.as_str()), ("ReferenceError", expected), "{script}");
    }
}
