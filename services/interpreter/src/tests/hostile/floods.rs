//! Too many calls, timers, promises and errors; too much output; too large arguments and values.

use super::*;

fn bench() -> Bench {
    let mut bench = Bench::with_files();
    bench.limits.host_calls = 200;
    bench.limits.output_bytes = 10_000;
    bench.limits.cpu = Duration::from_millis(300);
    bench
}

#[tokio::test]
async fn endless_calls_and_timers_end_at_the_limit() {
    let scripts = [
        "for (;;) read_file('inside.txt')",
        "for (;;) try { read_file('nothing') } catch {}",
        "for (;;) try { read_file({}) } catch {}",
        "for (;;) await tools.read_file('inside.txt')",
        "for (;;) await Promise.all(Array.from({length: 100}, () => tools.read_file('inside.txt')))",
        "for (let i = 0; ; i++) try { await import(`./m${i}.js`) } catch {}",
        "await Promise.all(Array.from({length: 201}, () => tools.list_files('.')))",
        "const f = () => tools.read_file('inside.txt').then(f); await f()",
        "const f = () => tools.read_file('inside.txt').then(() => Promise.all([f(), f()])); await f()",
        "setInterval(() => {}, 0); await new Promise(() => {})",
        "const f = () => { setTimeout(f, 0) }; f(); await new Promise(() => {})",
        "const f = () => { setTimeout(f, 0); setTimeout(f, 0) }; f(); await new Promise(() => {})",
        "for (;;) clearTimeout(setTimeout(() => {}, 1e6))",
        "for (;;) clearInterval(setInterval(() => {}, 1))",
        "const f = () => { clearTimeout(t); t = setTimeout(f, 0); read_file('inside.txt') }; let t = setTimeout(f, 0); await new Promise(() => {})",
        "for (;;) tools.execute_command('x'.repeat(10))",
        "for (;;) read_file({get path() { return 'inside.txt' }})",
        "Object.defineProperty(globalThis, 'x', {get() { return read_file('inside.txt') }}); for (;;) x",
    ];
    // Started calls that are not awaited wait in the guest, whose memory and time are limited.
    let unawaited = "tools.execute_command";
    let (waiting, attacks): (Vec<_>, Vec<_>) =
        scripts.into_iter().partition(|script| script.contains(unawaited));
    let attacks: Vec<(&str, Expected)> =
        attacks.into_iter().map(|script| (script, Exceeds(Limit::HostCalls))).collect();
    let bench = bench();
    bench.withstands(&attacks).await;
    let waiting: Vec<(&str, Expected)> =
        waiting.into_iter().map(|script| (script, Exceeds(Limit::Cpu))).collect();
    bench.withstands(&waiting).await;
}

#[tokio::test]
async fn too_much_at_once_throws_a_catchable_error() {
    let mut bench = bench();
    bench.limits.host_calls = 10_000;
    bench.limits.cpu = Duration::from_secs(10);
    for module in 0..257 {
        std::fs::write(bench.work(&format!("m{module}.js")), "").expect("written");
    }
    bench
        .refuses(&[
            ("for (let i = 0; i < 1001; i++) setTimeout(() => {}, 1e9)", "TimerLimitExceeded"),
            ("for (let i = 0; i < 257; i++) await import(`./m${i}.js`)", "ModuleLimitExceeded"),
            ("create_file('a', 'x'.repeat(5 << 20))", "CallArgumentsLimitExceeded"),
            ("await tools.create_file('a', 'x'.repeat(5 << 20))", "CallArgumentsLimitExceeded"),
            ("create_file('\\ud800', 'x')", "TypeError"),
            ("create_file('a', '\\udfff')", "TypeError"),
            ("read_file('x'.repeat(4097))", "InvalidArguments"),
            ("read_file('x'.repeat(300))", "InvalidPath"),
            ("read_file('x/'.repeat(2000) + 'x')", "FileNotFound"),
            ("read_file('a\\0b')", "InvalidPath"),
            ("read_file(...new Array(1000).fill('x'))", "TypeError"),
            ("read_file({path: 'x', ['y'.repeat(1e6)]: 1})", "InvalidArguments"),
            ("const o = {}; for (let i = 0; i < 1000; i++) o['k' + i] = i; read_file(o)", "InvalidArguments"),
            // A megabyte of JSON that would take a hundred megabytes on the host.
            ("read_file(new Array(300000).fill(0))", "CallValuesLimitExceeded"),
            ("await Promise.all(Array.from({length: 64}, () => tools.edit_file('inside.txt', new Array(20001).fill({}))))", "CallValuesLimitExceeded"),
            ("execute_command('x'.repeat(100001))", "InvalidArguments"),
            ("fetch('http://example.com/' + 'x'.repeat(9000))", "InvalidArguments"),
            ("grep('x'.repeat(100000))", "InvalidArguments"),
            ("find_file(Array(101).fill('*'))", "InvalidArguments"),
            ("setenv('A', 'x'.repeat(1 << 20))", "InvalidArguments"),
            ("tools['x'.repeat(1e6)]()", "UnknownTool"),
        ])
        .await;
    // Many values in one text are one value.
    let outcome = bench.run("create_file('commas', '[{,\"'.repeat(500000)).bytes").await;
    assert_eq!(difference(&outcome, Is("2000000")), None);
}

#[tokio::test]
async fn too_much_text_is_cut_and_large_values_refused() {
    let mut bench = bench();
    bench.limits.cpu = Duration::from_secs(10);
    bench
        .withstands(&[
            ("for (let i = 0; i < 100000; i++) print('0123456789'); 'end'", Is("end")),
            ("print('x'.repeat(20 << 20)); 'end'", Is("end")),
            ("for (let i = 0; i < 1000; i++) console.error({a: 'ü'.repeat(1000)}); 'end'", Is("end")),
            (
                "console.group(); for (let i = 0; i < 1000; i++) console.group(); print('a\\n'.repeat(1000)); 'end'",
                Is("end"),
            ),
            ("print('%s%s%s', 'x'.repeat(1 << 20), 'y'.repeat(1 << 20)); 'end'", Is("end")),
            ("for (let i = 0; i < 10000; i++) Promise.reject(new Error('x'.repeat(1000))); 'end'", Is("end")),
            ("'x'.repeat(2 << 20)", Exceeds(Limit::Result)),
            ("new Array(300000).fill('abc')", Exceeds(Limit::Result)),
            ("new Map(Array.from({length: 3}, (_, i) => [i, 'x'.repeat(1 << 20)]))", Exceeds(Limit::Result)),
            ("return 'x'.repeat(2 << 20)", Exceeds(Limit::Result)),
            ("export default 'x'.repeat(2 << 20)", Exceeds(Limit::Result)),
            ("throw new Error('x'.repeat(20 << 20))", Throws("Error", "… (20971520 characters)")),
            ("throw 'x'.repeat(20 << 20)", Throws("NotAnError", "characters)")),
            (
                "throw Object.assign(new Error('x'), {name: 'y'.repeat(1 << 20)})",
                Throws("InternalError", "could not be described"),
            ),
            (
                "throw Object.assign(new Error('x'), {details: 'y'.repeat(1 << 20)})",
                Throws("InternalError", "could not be described"),
            ),
            ("throw new Error('\\ud800 half')", Throws("Error", "\u{fffd} half")),
            (
                "throw Object.assign(new Error('\\\\\\ud83d\\ude00\\udc00'), {name: 'A\\udc00B'})",
                Throws("A\u{fffd}B", "\\\u{1f600}\u{fffd}"),
            ),
        ])
        .await;
    let outcome = bench.run("for (let i = 0; i < 100000; i++) print('0123456789')").await;
    assert_eq!(
        (outcome.output.len() as u64 + outcome.output_dropped, outcome.output.len()),
        (1_100_000, 10_000)
    );
    // Only a few unhandled errors are noted.
    let outcome =
        bench.run("for (let i = 0; i < 1000; i++) Promise.reject(new Error('lost')); 'end'").await;
    assert!(outcome.notes.len() <= 32 && outcome.notes[0].contains("lost"), "{:?}", outcome.notes);
}

#[tokio::test]
async fn endless_wait_ends_with_its_reason() {
    let mut bench = bench();
    bench.limits.wall = Duration::from_millis(300);
    bench
        .withstands(&[
            ("await new Promise(() => {})", Throws("NeverSettled", "")),
            ("await {then() {}}", Throws("NeverSettled", "")),
            ("const p = new Promise(() => {}); p.then(() => {}); await Promise.all([p, tools.read_file('inside.txt')])", Throws("NeverSettled", "")),
            ("Promise.prototype.then = function () {}; await new Promise(() => {})", Throws("NeverSettled", "")),
            ("setTimeout(() => {}, 2147483647); await new Promise(() => {})", Exceeds(Limit::Wall)),
            ("await new Promise(done => setTimeout(done, 1e12))", Exceeds(Limit::Wall)),
        ])
        .await;
}
