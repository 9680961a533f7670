//! Time and memory: endless computations, exploding expressions, endless allocations.

use super::*;

fn bench() -> Bench {
    let mut bench = Bench::with_files();
    bench.limits.cpu = Duration::from_millis(100);
    bench
}

#[tokio::test]
async fn endless_computation_ends_at_the_cpu_limit_everywhere() {
    let scripts = [
        "for (;;) {}",
        "for (;;) try { for (;;) {} } catch {} finally { for (;;) {} }",
        "await (async () => { for (;;) await null })()",
        "for await (const x of (async function* () { for (;;) yield 1 })()) {}",
        "for (const x of (function* () { for (;;) yield 1 })()) {}",
        "const [...all] = {*[Symbol.iterator]() { for (;;) yield }, length: 0}",
        "[...{[Symbol.iterator]: () => ({next: () => { for (;;); }})}]",
        "const g = (function* () { try { yield } finally { for (;;); } })(); g.next(); g.return()",
        "queueMicrotask(function f() { queueMicrotask(f) }); await new Promise(() => {})",
        "await (function f() { return Promise.resolve().then(f) })()",
        "const t = {then(done) { done(t) }}; await t",
        "[].copyWithin.call({length: 2 ** 53 - 1}, 1)",
        "Array.prototype.indexOf.call(new Proxy({}, {get: (t, k) => k === 'length' ? 2 ** 53 - 1 : 0, has: () => true}), 1)",
        "JSON.stringify({toJSON() { for (;;); }})",
        "let bomb = 1; for (let i = 0; i < 60; i++) bomb = {toJSON: (b => () => (b && b.toJSON?.(), b && b.toJSON?.(), 1))(bomb)}; JSON.stringify(bomb)",
        "(2n ** 1000000n).toString().length",
        "for (;;) Date.now()",
        "for (;;) Math.random() + crypto.randomUUID()",
        "for (;;) new URL('http://example.com/' + 'x'.repeat(1000))",
        "for (;;) structuredClone([1, {a: new Map([[1, 2]])}])",
        "for (;;) eval('1 + 1')",
        "for (;;) new Function('return 1')",
        "for (;;) try { JSON.parse('{') } catch {}",
        "for (;;) try { new RegExp('(') } catch {}",
        "for (;;) try { null.x } catch {}",
        "for (;;) try { import('x') } catch {}",
        "for (;;) new WeakRef({})",
        // Describing a value or an error may run the script's own code.
        "({get x() { for (;;); }})",
        "({toJSON() { for (;;); }})",
        "new Proxy({}, {ownKeys() { for (;;); }})",
        "throw {get name() { for (;;); }}",
        "throw new Proxy({}, {get() { for (;;); }, getPrototypeOf() { for (;;); }, ownKeys() { for (;;); }})",
        "throw Object.assign(new Error('x'), {details: {toJSON() { for (;;); }}})",
        "throw Object.defineProperty(new Error('x'), 'stack', {get() { for (;;); }})",
        "throw Object.defineProperty(new Error('x'), 'cause', {get() { for (;;); }})",
        "print({get x() { for (;;); }, toJSON() { for (;;); }})",
        "read_file({get path() { for (;;); }})",
        "read_file(new Proxy({}, {ownKeys() { for (;;); }}))",
        "read_file(new Proxy({}, {getPrototypeOf() { for (;;); }}))",
        "setTimeout(() => {}, {valueOf() { for (;;); }})",
        "setTimeout(() => { for (;;); }); await new Promise(() => {})",
    ];
    let mut attacks: Vec<(&str, Expected)> =
        scripts.into_iter().map(|script| (script, Exceeds(Limit::Cpu))).collect();
    // A script cannot influence how stacks are written.
    attacks.push((
        "Error.prepareStackTrace = () => { for (;;); }; throw new Error('mine')",
        Throws("Error", "mine"),
    ));
    bench().withstands(&attacks).await;
}

#[tokio::test]
async fn exploding_expressions_are_stopped_or_refused() {
    let bench = bench();
    let scripts = [
        "/(a+)+$/.test('a'.repeat(40) + 'b')",
        "/(.*)*x/.test('a'.repeat(40))",
        "/(?:a|b|ab)*c/.test('ab'.repeat(100000))",
        r"/^(\w+\s?)*$/.test('a'.repeat(50) + '!')",
        r"/(a*)*\1b/.test('a'.repeat(60))",
        "/(?:(?:(?:a?){30}){30}){30}a{900}/.test('a'.repeat(900))",
        "/a{1,2147483647}b/.test('a'.repeat(1e6))",
        "'x'.repeat(1e6).replace(/(x+x+)+y/, '')",
        "('a'.repeat(3e5) + 'b').match(/(?<=a+)c/)",
        "'a'.repeat(60).split(/(a|a)*$b/)",
        "[...('a'.repeat(60) + 'b').matchAll(/(a|aa)+$/g)]",
        "('a'.repeat(60) + 'b').search(/(?=(a+)+$)c/)",
        "const r = /(a+)+$/y; for (;;) r.exec('a'.repeat(40) + 'b')",
    ];
    let attacks: Vec<(&str, Expected)> =
        scripts.into_iter().map(|script| (script, Exceeds(Limit::Cpu))).collect();
    bench.withstands(&attacks).await;

    std::fs::write(bench.work("long.txt"), "a".repeat(1 << 20)).expect("written");
    bench
        .refuses(&[
            ("new RegExp('('.repeat(100000) + ')'.repeat(100000))", "SyntaxError"),
            ("new RegExp('(?='.repeat(20000) + ')'.repeat(20000))", "SyntaxError"),
            ("new RegExp('a{2147483648,1}')", "SyntaxError"),
            ("grep('('.repeat(100000) + ')'.repeat(100000))", "InvalidArguments"),
            ("grep('(?:(?:(?:a{1000}){1000}){1000}){1000}')", "ExpressionTooLarge"),
            ("grep('(a)\\\\1')", "InvalidArguments"),
            ("grep('(?=a)')", "InvalidArguments"),
            // These take linear time in searches, whatever they take elsewhere.
            (
                "grep('(a+)+$b'); grep('(.*)*x'); grep('(?:a?){50}a{50}b'); throw {name: 'found'}",
                "found",
            ),
        ])
        .await;
}

#[tokio::test]
async fn memory_beyond_the_limit_is_an_error() {
    let mut bench = bench();
    bench.limits.cpu = Duration::from_secs(10);
    bench.limits.memory_bytes = 24 << 20;
    let scripts = [
        "let s = 'x'; for (;;) s = `${s}${s}`.toUpperCase()",
        "const all = []; for (;;) all.push(new Uint8Array(1 << 20))",
        "const all = []; for (;;) all.push({})",
        "let f = () => {}; for (let i = 0; i < 1e6; i++) f = f.bind(); f()",
        "let o = {}; for (;;) o = {o}",
        "'x'.padEnd(2 ** 30 - 1)",
        "new Array(2 ** 32 - 1).fill(0)",
        "eval('1+'.repeat(1000000) + '1')",
        "let p = Promise.resolve(); for (let i = 0; i < 1e7; i++) p = p.then(x => x); await p",
        "async function f() { await null; return f() } await f()",
        "const m = new Map(); for (let i = 0; ; i++) m.set({}, 'x'.repeat(1000) + i)",
        "const all = []; for (;;) all.push(new WeakRef({}), Symbol(), () => {}, /x/, new Error('x'))",
        "const all = []; for (;;) all.push((function* () { yield 1 })())",
        "const all = []; for (;;) all.push(new Proxy({}, {}))",
        "const all = []; for (;;) all.push(eval(`(function () { return ${all.length} })`))",
        "JSON.stringify(new Array(1e7).fill('long enough'))",
        "JSON.parse('[' + '{},'.repeat(5e6) + '1]')",
        "print('y'.repeat(60 << 20) + 'ü')",
        "btoa('x'.repeat(40 << 20))",
        "const g = (function* () { for (;;) yield 'x'.repeat(100) })(); [...g]",
        "const all = []; for (;;) all.push(crypto.getRandomValues(new Uint8Array(65536)))",
    ];
    let attacks: Vec<(&str, Expected)> =
        scripts.into_iter().map(|script| (script, Exceeds(Limit::Memory))).collect();
    bench.withstands(&attacks).await;
    bench
        .refuses(&[
            ("'x'.repeat(2 ** 30)", "RangeError"),
            ("new Uint8Array(2 ** 33)", "RangeError"),
            ("new ArrayBuffer(8, {maxByteLength: 2 ** 40})", "RangeError"),
            ("2n ** 100000000n", "RangeError"),
            ("let n = 3n; for (;;) n = n * n", "RangeError"),
            ("BigInt('9'.repeat(1e6))", "RangeError"),
            ("new Array(-1)", "RangeError"),
            ("print(...new Array(100000).fill('x'))", "RangeError"),
            ("crypto.getRandomValues(new Uint8Array(65537))", "RangeError"),
            ("new ArrayBuffer(1e9)", "InternalError"),
            ("const all = []; for (;;) all.push(new Uint8Array(1 << 20))", "InternalError"),
        ])
        .await;
}

#[tokio::test]
async fn modest_script_continues_beside_greedy_ones() {
    let greedy = Bench::with_files();
    let modest = Bench::with_files();
    let attack = async |script: &'static str| {
        let limits = Limits {
            cpu: Duration::from_millis(200),
            host_calls: 2000,
            memory_bytes: 24 << 20,
            ..greedy.limits.clone()
        };
        greedy.run_within(script, &limits).await
    };
    let attacks = futures::future::join_all([
        attack("for (;;) {}"),
        attack("for (;;) read_file('inside.txt')"),
        attack("for (;;) tools.read_file('inside.txt')"),
        attack("const all = []; for (;;) all.push({})"),
        attack("/(a+)+$/.test('a'.repeat(40) + 'b')"),
        attack("for (;;) print('x'.repeat(1000))"),
    ]);
    tokio::pin!(attacks);
    let mut served = 0;
    let ended = loop {
        tokio::select! {
            biased;
            () = modest.assert_works_normally("the start of six greedy scripts") => served += 1,
            ended = &mut attacks => break ended,
        }
    };
    assert!(
        ended.iter().all(|outcome| matches!(outcome.status, Status::LimitExceeded { .. })),
        "{ended:?}"
    );
    assert!(served >= 3, "the modest script ran only {served} times");
}
