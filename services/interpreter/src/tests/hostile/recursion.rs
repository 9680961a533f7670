//! Depth: in calls, in data and in source text. QuickJS and the host both recurse; each recursion
//! must be bounded.

use super::*;

/// Endless recursion that a script can catch.
const ENDLESS: &[&str] = &[
    "(function f() { return 1 + f() })()",
    "(function f() { [2, 1].sort(f) })()",
    "const o = {toJSON() { return JSON.stringify(o) }}; JSON.stringify(o)",
    "const p = new Proxy({}, {get(t, k, r) { return r[k] }}); p.x",
    "const p = new Proxy({}, {has(t, k) { return k in p }}); 'x' in p",
    "const p = new Proxy(function () {}, {apply() { return p() }}); p()",
    "const p = new Proxy(class {}, {construct() { return new p() }}); new p()",
    "let p = {}; for (let i = 0; i < 100000; i++) p = new Proxy(p, {}); p.x",
    "let o = {}; for (let i = 0; i < 100000; i++) o = Object.create(new Proxy(o, {})); o.x",
    "const o = {[Symbol.toPrimitive]() { return +o }}; +o",
    "const o = {toString() { return '' + o }}; '' + o",
    "const o = {valueOf() { return o < o }}; o < o",
    "const o = {get x() { return o.x }}; o.x",
    "const o = {set x(v) { o.x = v }}; o.x = 1",
    "class A { static [Symbol.hasInstance](v) { return v instanceof A } } 1 instanceof A",
    "let C = class {}; for (let i = 0; i < 20000; i++) C = class extends C {}; new C()",
    "const it = {[Symbol.iterator]() { return [...it] }}; [...it]",
    "function* g() { yield* g() } [...g()]",
    "await (async function f() { await f() })()",
    "(function f() { return 'a'.replace(/a/g, f) })()",
    "[1, 2].reduce(function f() { return [1, 2].reduce(f) })",
    "Array.from({length: 1}, function f() { return Array.from({length: 1}, f) })",
    "JSON.parse('[1]', function r() { return JSON.parse('[1]', r) })",
    "(function f() { return eval('f()') })()",
    "(function f() { return Reflect.apply(f, null, []) })()",
    "(function f() { return f.call() })()",
    "(function f() { return f.bind()() })()",
    "(function f() { read_file('inside.txt'); return f() })()",
    "(function f() { print('x'); return f() })()",
    "read_file({get path() { return read_file(this) }})",
    "const a = []; a[0] = a; a.join()",
    "let o = []; for (let i = 0; i < 100000; i++) o = [o]; o.flat(Infinity)",
    "let o = []; for (let i = 0; i < 100000; i++) o = [o]; String(o)",
    "let o = {}; for (let i = 0; i < 100000; i++) o = {o}; structuredClone(o)",
    "JSON.parse('['.repeat(100000) + ']'.repeat(100000))",
];

/// Nested source text; the error depends on which parser fails first.
const SOURCES: &[&str] = &[
    "'('.repeat(100000) + '1' + ')'.repeat(100000)",
    "'['.repeat(100000) + ']'.repeat(100000)",
    "'{'.repeat(100000) + '}'.repeat(100000)",
    "'!'.repeat(100000) + '1'",
    "'`${'.repeat(50000) + '1' + '}`'.repeat(50000)",
    "'x=>'.repeat(100000) + '1'",
    "'if(1)'.repeat(100000) + '1'",
    "'for(;;)'.repeat(100000) + '1'",
    "'['.repeat(100000) + 'a' + ']'.repeat(100000) + '=1'",
    "'class A { static { '.repeat(5000) + '} }'.repeat(5000)",
    "'(function(){'.repeat(20000) + '})()'.repeat(20000)",
    "'a ? '.repeat(100000) + '1' + ' : 1'.repeat(100000)",
    "'new '.repeat(100000) + 'A'",
    "'typeof '.repeat(100000) + '1'",
    "'2**'.repeat(100000) + '1'",
];

#[tokio::test]
async fn endless_recursion_throws_a_catchable_error() {
    let bench = Bench::with_files();
    let caught: Vec<(&str, &'static str)> =
        ENDLESS.iter().map(|script| (*script, "RangeError")).collect();
    bench.refuses(&caught).await;
    let uncaught: Vec<(&str, Expected)> = ENDLESS
        .iter()
        .map(|script| (*script, Throws("RangeError", "Maximum call stack size exceeded")))
        .collect();
    bench.withstands(&uncaught).await;
}

#[tokio::test]
async fn deeply_nested_source_is_refused_by_every_parser() {
    let bench = Bench::with_files();
    for source in SOURCES {
        let ways = [
            // Parsed by QuickJS while the script runs.
            format!("eval({source})"),
            format!("new Function({source})"),
            // Written to the workspace by the host; then parsed as a module, also by TypeScript's
            // parser.
            format!("create_file('m.js', {source}); await import('./m.js')"),
            format!("create_file('m.ts', {source}); await import('./m.ts')"),
        ];
        for way in ways {
            let script = format!(
                "let name = 'nothing'; try {{ {way} }} catch (error) {{ name = error.name }} name"
            );
            let outcome = bench.run(&script).await;
            let expected = ["RangeError", "SyntaxError"]
                .into_iter()
                .any(|name| difference(&outcome, Is(name)).is_none());
            assert!(expected, "{way}: {}", start(&format!("{outcome:?}"), 1000));
            bench.assert_works_normally(&way).await;
        }
        // Parsed as the script itself, in both languages.
        let text = bench.run(source).await;
        let Status::Completed { value } = text.status else { panic!("{source}: {text:?}") };
        for script in
            [value.display().into_owned(), format!("const n: number = 1;\n{}", value.display())]
        {
            let outcome = bench.run(&script).await;
            let Status::Threw { name, .. } = &outcome.status else {
                panic!("{source}: {outcome:?}")
            };
            assert!(name == "RangeError" || name == "SyntaxError", "{source}: {outcome:?}");
            bench.assert_works_normally(source).await;
        }
    }
}

#[tokio::test]
async fn deep_values_are_shown_in_part() {
    let arrays = "let o = []; for (let i = 0; i < 100000; i++) o = [o];";
    let bench = Bench::with_files();
    let scripts = [
        (format!("{arrays} o"), Is("[[[[[[[Array]]]]]]]")),
        (format!("{arrays} print(o); 'printed'"), Is("printed")),
        (format!("{arrays} throw o"), Throws("NotAnError", "[[[[[[[Array]]]]]]]")),
        (format!("{arrays} throw new Error('deep', {{cause: o}})"), Throws("Error", "deep")),
        // Neither JSON nor its reader on the host fails on depth that `toJSON` creates.
        (format!("{arrays} throw Object.assign(new Error('deep'), {{details: o}})"), Throws("Error", "deep")),
        (
            "let d = 1; for (let i = 0; i < 300; i++) d = [d]; throw Object.assign(new Error('x'), {details: {toJSON: () => d}})"
                .to_owned(),
            Throws("Error", "x"),
        ),
        (
            "let e = new Error('first'); for (let i = 0; i < 100000; i++) e = new Error('last', {cause: e}); throw e".to_owned(),
            Throws("Error", "last"),
        ),
        (
            "let e = new Error('x'); for (let i = 0; i < 100000; i++) e = new AggregateError([e, e, e], 'y'); throw e".to_owned(),
            Throws("AggregateError", "y"),
        ),
        (
            "let t = 1; for (let i = 0; i < 100000; i++) { const u = t; t = {then(done) { done(u) }} } await t".to_owned(),
            Is("1"),
        ),
        // Too deep for the host's reader of arguments.
        (
            "let o = []; for (let i = 0; i < 500; i++) o = [o]; try { read_file(o) } catch (e) { e.name }".to_owned(),
            Is("TypeError"),
        ),
    ];
    let attacks: Vec<(&str, Expected)> =
        scripts.iter().map(|(script, expected)| (script.as_str(), *expected)).collect();
    bench.withstands(&attacks).await;
}
