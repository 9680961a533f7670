//! Values, printing and errors.

use super::*;

#[tokio::test]
async fn value_is_that_of_the_last_expression() {
    for (script, expected) in [
        ("1 + 1", "2"),
        ("'text'", "text"),
        ("({a: 1, b: [true, null, 'x']})", r#"{"a":1,"b":[true,null,"x"]}"#),
        ("let x = 5; x * 2", "10"),
        ("undefined", "undefined"),
        ("", "undefined"),
        ("if (true) { 3 }", "3"),
        ("const {a} = {a: 4}; a", "4"),
        ("'\\0 \\ud83d\\ude00 ü'", "\0 😀 ü"),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
    assert_eq!(
        run("'a'").await.status,
        Status::Completed { value: Value::Json("\"a\"".to_owned()) }
    );
    assert_eq!(run("10n").await.status, Status::Completed { value: Value::Text("10n".to_owned()) });
    assert_eq!(run("var x").await.status, Status::Completed { value: Value::Undefined });
}

#[tokio::test]
async fn top_level_await_and_return_work() {
    for (script, expected) in [
        ("await 1", "1"),
        ("const x = await Promise.resolve(2); x + 1", "3"),
        ("async function main() { await null; return 'done' }\nmain()", "done"),
        ("return 4", "4"),
        ("const y = await later(1);\nif (y) return {y}\n", r#"{"y":1}"#),
        ("return", "undefined"),
        ("for await (const x of [1, Promise.resolve(2)]) x", "2"),
        ("return 5 // the end", "5"),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn non_json_values_are_shown_like_in_a_console() {
    for (script, expected) in [
        (
            "new Map([['a', 1], [{b: 2}, new Set([3])]])",
            r#"Map(2) { "a" => 1, { b: 2 } => Set(1) { 3 } }"#,
        ),
        ("const o = {n: 1}; o.self = o; o", "{ n: 1, self: [Circular] }"),
        (
            "[1n, undefined, () => 1, function f() {}, class A {}]",
            "[1n, undefined, [Function (anonymous)], [Function f], [class A]]",
        ),
        ("NaN", "NaN"),
        ("[-0, 1/0]", "[-0, Infinity]"),
        ("Symbol('s')", "Symbol(s)"),
        ("new Uint8Array([1, 2])", "Uint8Array(2) [1, 2]"),
        ("({get x() { throw 1 }, f() {}})", "{ x: [Getter], f: [Function f] }"),
        ("/a+/g", "/a+/g"),
        ("new Date(0)", "1970-01-01T00:00:00.000Z"),
        ("new Date(NaN)", "Invalid Date"),
        ("class P { constructor() { this.m = new Map() } }; new P()", "P { m: Map(0) {} }"),
        (
            "[new Promise(() => {}), Promise.resolve(1)]",
            "[Promise { pending }, Promise { fulfilled }]",
        ),
        ("[new RangeError('x')]", "[[RangeError: x]]"),
        ("[,1]", "[<empty>, 1]"),
        (
            "let deep = []; for (let i = 0; i < 20; i++) deep = [deep, 1n]; typeof deep; deep",
            "[[[[[[[Array], 1n], 1n], 1n], 1n], 1n], 1n]",
        ),
        ("new Proxy({}, {ownKeys() { throw new Error('no') }})", "[Object: cannot be shown]"),
        ("Object.create(null)", "{}"),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn print_and_console_write_lines() {
    let outcome = run(
        r#"print('a', 1, {b: [2]}, undefined); console.log('%s is %d%%: %j', 'x', 5, {y: 1}, 'rest'); console.error('e');
           print(); print(new Map([[1, 2]])); console.group('g'); console.log('in\nside'); console.groupEnd(); console.count(); print('%s')"#,
    )
    .await;
    let expected = "a 1 {\"b\":[2]} undefined\nx is 5%: {\"y\":1} rest\ne\n\nMap(1) { 1 => 2 }\ng\n  in\n  side\ndefault: 1\n%s\n";
    assert_eq!(outcome.output, expected);
    assert_eq!(outcome.status, Status::Completed { value: Value::Undefined });
}

#[tokio::test]
async fn uncaught_error_has_position_and_keeps_output() {
    let script = "print('before');\nfunction inner() {\n  throw new TypeError('bad');\n}\ninner();\nprint('after')";
    let outcome = run(script).await;
    assert_eq!(outcome.output, "before\n");
    let Status::Threw { name, message, stack, .. } = outcome.status else { panic!() };
    assert_eq!((name.as_str(), message.as_str()), ("TypeError", "bad"));
    assert!(stack.contains("inner (script.js:3:"), "{stack}");
    assert!(stack.contains("script.js:5:"), "{stack}");
    assert!(!stack.contains("construct:"), "{stack}");
}

#[tokio::test]
async fn positions_are_right_with_top_level_return() {
    let (name, _, stack) = thrown("if (false) return 1;\nnothing.x").await;
    assert_eq!(name, "ReferenceError");
    assert!(stack.contains("script.js:2:"), "{stack}");
    let (_, _, stack) = thrown("throw new Error('first line'); return 1").await;
    assert!(stack.contains("script.js:1:"), "{stack}");
}

#[tokio::test]
async fn syntax_error_has_its_position() {
    let (name, message, stack) = thrown("let a = 1;\nlet b = ;").await;
    assert_eq!(name, "SyntaxError");
    assert_eq!(message, "Unexpected token: ;");
    assert!(stack.contains("script.js:2:"), "{stack}");
    assert_eq!(thrown("return 1; let x = ;").await.0, "SyntaxError");
}

#[tokio::test]
async fn thrown_non_errors_are_described() {
    for (script, expected) in [
        ("throw 'text'", "the script threw a value that is not an Error: text"),
        ("throw {code: 5}", r#"the script threw a value that is not an Error: {"code":5}"#),
        ("throw null", "the script threw a value that is not an Error: null"),
        ("throw undefined", "the script threw a value that is not an Error: undefined"),
        ("await Promise.reject(3n)", "the script threw a value that is not an Error: 3n"),
    ] {
        let (name, message, _) = thrown(script).await;
        assert_eq!((name.as_str(), message.as_str()), ("NotAnError", expected), "{script}");
    }
    let (name, message, _) =
        thrown("class Mine extends Error { get name() { throw 1 } }; throw new Mine('m')").await;
    assert_eq!((name.as_str(), message.as_str()), ("Error", "m"));
    let (_, _, stack) = thrown("throw new Error('outer', {cause: new TypeError('inner')})").await;
    assert!(stack.contains("Caused by: TypeError: inner"), "{stack}");
}

#[tokio::test]
async fn scripts_cannot_break_the_prelude() {
    let sabotage = r#"
        JSON.stringify = JSON.parse = () => { throw 'sabotage' };
        Function.prototype.call = Function.prototype.apply = Function.prototype.bind = () => { throw 'sabotage' };
        Map.prototype.get = Map.prototype.set = Map.prototype.delete = Set.prototype.has = Set.prototype.add = () => { throw 'sabotage' };
        Array.prototype[Symbol.iterator] = Array.prototype.join = Array.prototype.push = () => { throw 'sabotage' };
        String.prototype.split = String.prototype.includes = String.prototype.slice = () => { throw 'sabotage' };
        Object.keys = Object.hasOwn = Object.defineProperty = Object.getPrototypeOf = () => { throw 'sabotage' };
        Reflect.apply = () => { throw 'sabotage' };
        Promise.prototype.then = Promise.resolve = () => { throw 'sabotage' };
        globalThis.Promise = globalThis.Error = globalThis.Map = globalThis.Set = globalThis.String = undefined;
    "#;
    let outcome = run(&format!(
        "{sabotage} print(echo('x', 1)); print([new Date(0)]); ({{value: echo({{text: 'y'}})}})"
    ))
    .await;
    assert_eq!(outcome.output, "{\"text\":\"x\",\"first\":1}\n[\"1970-01-01T00:00:00.000Z\"]\n");
    assert_eq!(
        outcome.status,
        Status::Completed { value: Value::Json(r#"{"value":{"text":"y"}}"#.to_owned()) }
    );
    let (name, message, stack) = thrown(&format!("{sabotage}\nfail()")).await;
    assert_eq!((name.as_str(), message.as_str()), ("FileNotFound", "there is no a.txt"));
    assert!(stack.contains("script.js:"), "{stack}");
    let (name, _, _) = thrown(&format!("{sabotage}\nnull.x")).await;
    assert_eq!(name, "TypeError");
}

#[tokio::test]
async fn prototype_accessors_see_nothing_of_the_prelude() {
    let script = r#"
        let seen = [];
        for (const name of ['name', 'get', 'set', 'number', 'parameters', 'resolve'])
            Object.defineProperty(Object.prototype, name, {__proto__: null, set(v) { seen.push(name) }, get() { seen.push(name); return undefined }, configurable: true});
        echo('x'); await tools.echo('y');
        seen.length"#;
    assert_eq!(value(script).await, "0");
}

#[tokio::test]
async fn internals_are_not_global() {
    let script = "Object.getOwnPropertyNames(globalThis).filter(n => /^_|native|inner|host|require|process|std|os$/i.test(n))";
    assert_eq!(value(script).await, "[]");
    assert_eq!(thrown("require('fs')").await.0, "ReferenceError");
    assert!(matches!(run("await import('fs')").await.status, Status::Threw { .. }));
    assert!(matches!(run("import fs from 'fs'").await.status, Status::Threw { .. }));
}

#[tokio::test]
async fn scripts_can_redeclare_globals() {
    assert_eq!(
        value("const print = 1, echo = 2, URL = 3; function fail() { return 4 } print + echo + URL + fail()").await,
        "10"
    );
}

#[tokio::test]
async fn two_runs_share_nothing() {
    assert_eq!(value("globalThis.left = 1; Object.prototype.left = 2; left").await, "1");
    assert_eq!(value("typeof left").await, "undefined");
}
