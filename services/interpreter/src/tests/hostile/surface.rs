//! What a script can name: nothing that leads outside, and no way to forge a call.

use super::*;

#[tokio::test]
async fn only_scripts_and_workspace_files_are_code() {
    let bench = Bench::with_files();
    std::fs::write(bench.work("worker.wasm"), b"\0asm\x01\0\0\0").expect("written");
    let mut calls: Vec<(String, &'static str)> = Vec::new();
    for name in [
        "WebAssembly",
        "Worker",
        "SharedWorker",
        "Atomics",
        "process",
        "require",
        "module",
        "Deno",
        "Bun",
        "std",
        "os",
        "bjson",
        "scriptArgs",
        "loadScript",
        "load",
        "gc",
        "window",
        "self",
        "global",
        "document",
        "XMLHttpRequest",
        "WebSocket",
        "EventSource",
        "importScripts",
        "navigator",
        "localStorage",
        "indexedDB",
        "Java",
        "ActiveXObject",
        "native",
        "inner",
        "__sleep",
        "__loadScript",
        "Temporal2",
    ] {
        calls.push((format!("globalThis.{name} === undefined && {name}"), "ReferenceError"));
    }
    for specifier in [
        "std",
        "os",
        "qjs:os",
        "node:fs",
        "fs",
        "child_process",
        "data:text/javascript,1",
        "http://example.com/a.js",
        "https://127.0.0.1/",
        "blob:x",
        "file:///etc/passwd",
        "/etc/passwd",
        "construct:tools.js",
        "worker.wasm",
        "",
    ] {
        calls.push((format!("await import({specifier:?})"), "TypeError"));
    }
    for specifier in ["../outside/secret", "./../outside/secret", "./a/../../outside/secret"] {
        calls.push((format!("await import({specifier:?})"), "OutsideWorkspace"));
    }
    calls.push(("await import('./worker.wasm')".to_owned(), "ImportFailed"));
    calls.push((
        "await import('./inside.txt', {with: {type: 'json'}})".to_owned(),
        "ReferenceError",
    ));
    calls.push(("await import({toString() { throw {name: 'own'} }})".to_owned(), "own"));
    let calls: Vec<(&str, &'static str)> =
        calls.iter().map(|(call, name)| (call.as_str(), *name)).collect();
    bench.refuses(&calls).await;
}

#[tokio::test]
async fn evaluated_code_has_no_further_abilities() {
    let bench = Bench::with_files();
    let ways = [
        "eval(CODE)",
        "(0, eval)(CODE)",
        "new Function('return ' + CODE)()",
        "(function () {}).constructor('return ' + CODE)()",
        "await (async function () {}).constructor('return ' + CODE)()",
        "(function* () {}).constructor('yield ' + CODE)().next().value",
        "setTimeout.constructor('return ' + CODE)()",
        "tools.read_file.constructor('return ' + CODE)()",
        "print.constructor('return ' + CODE)()",
        "Reflect.construct(Function, ['return ' + CODE])()",
    ];
    for way in ways {
        let globals = way.replace(
            "CODE",
            "'[typeof native, typeof inner, typeof callNow, typeof pending, typeof stringify].join()'",
        );
        let outcome = bench.run(&globals).await;
        assert_eq!(
            difference(&outcome, Is("undefined,undefined,undefined,undefined,undefined")),
            None,
            "{way}"
        );
        let call = way.replace("CODE", r#"'read_file("../outside/secret")'"#);
        assert_eq!(
            difference(&bench.run(&call).await, Throws("OutsideWorkspace", "")),
            None,
            "{way}"
        );
        bench.assert_works_normally(way).await;
    }
}

#[tokio::test]
async fn sandbox_functions_are_unreachable_from_globals() {
    // Visits every object reachable through properties, descriptors and prototypes, and collects
    // the names of functions.
    let script = "
        const seen = new Set(), queue = [globalThis, (() => { try { null.x } catch (e) { return e } })()];
        const names = new Set();
        const visit = (value) => { if (Object(value) === value && !seen.has(value)) { seen.add(value); queue.push(value) } };
        while (queue.length > 0) {
            const object = queue.pop();
            if (Object(object) !== object) continue;
            if (typeof object === 'function') names.add(object.name);
            try { visit(Object.getPrototypeOf(object)) } catch {}
            for (const key of Reflect.ownKeys(object)) {
                let descriptor; try { descriptor = Object.getOwnPropertyDescriptor(object, key) } catch {}
                if (descriptor === undefined) continue;
                visit(descriptor.get); visit(descriptor.set); visit(descriptor.value);
                try { visit(object[key]) } catch {}
            }
        }
        const inner = ['callNow', 'callLater', 'settle', 'configure', 'begin', 'arm', 'fire', 'schedule', 'pack', 'failure', 'start', 'number', 'rejection', 'numbers'];
        [seen.size > 500, names.has('read_file'), inner.filter((name) => names.has(name)).join()]";
    let bench = Bench::with_files();
    let outcome = bench.run(script).await;
    assert_eq!(difference(&outcome, Is(r#"[true,true,""]"#)), None);
}

#[tokio::test]
async fn calls_cannot_be_forged() {
    let bench = Bench::with_files();
    bench
        .refuses(&[
            ("tools.import('./inside.txt')", "UnknownTool"),
            ("tools.__sleep(1)", "UnknownTool"),
            ("tools['']()", "UnknownTool"),
            ("tools['read_file ']('inside.txt')", "UnknownTool"),
            ("tools.READ_FILE('inside.txt')", "UnknownTool"),
            ("tools['__proto__'].x()", "TypeError"),
            ("tools.hasOwnProperty('x')", "UnknownTool"),
            ("tools[Symbol.iterator]()", "TypeError"),
            ("'use strict'; tools.read_file = () => 'forged'", "TypeError"),
            ("'use strict'; delete tools.read_file", "TypeError"),
            ("Object.defineProperty(tools, 'forged', {value: 1})", "TypeError"),
            ("Object.setPrototypeOf(tools, {})", "TypeError"),
            (
                "Object.setPrototypeOf(Object.getPrototypeOf(tools), {forged: 1}); tools.forged()",
                "UnknownTool",
            ),
            ("new read_file('inside.txt')", "TypeError"),
            ("secrets.get('KEY')", "SecretNotFound"),
        ])
        .await;
    // Text that only looks like a handle stays text, in and out.
    let outcome =
        bench.run("create_file('h', '${secret:KEY} {{KEY}} secret://KEY'); read_file('h')").await;
    assert_eq!(difference(&outcome, Is("${secret:KEY} {{KEY}} secret://KEY")), None);
}

#[tokio::test]
async fn script_leaves_nothing_for_the_next() {
    let bench = Bench::with_files();
    let leave = "globalThis.leaked = 1; Object.prototype.leaked = 1; Array.prototype.map = () => 'leaked'; Symbol.for('leaked').description;
        JSON.parse = () => 'leaked'; read_file.leaked = 1; setInterval(() => {}, 1); tools.find_file('*'); Promise.reject(1); 1";
    let random = "[Math.random(), crypto.randomUUID(), Date.now()].join()";
    let first = bench.run(random).await;
    for _ in 0..20 {
        bench.run(leave).await;
        bench.assert_works_normally(leave).await;
    }
    // With the same seed and clock a script gets the same results, whatever ran before it.
    assert_eq!(bench.run(random).await.status, first.status);
}
