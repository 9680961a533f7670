//! Web APIs that the prelude adds.

use super::*;

#[tokio::test]
async fn urls_follow_the_standard() {
    for (script, expected) in [
        (
            "new URL('HTTP://User:p%40ss@Example.com:80/a/../b?q=1&q=2#h').href",
            "http://User:p%40ss@example.com/b?q=1&q=2#h",
        ),
        (
            "const {protocol, host, hostname, port, pathname, search, hash, origin} = new URL('https://a.b:8080/p?s#f'); [protocol, host, hostname, port, pathname, search, hash, origin].join(' ')",
            "https: a.b:8080 a.b 8080 /p ?s #f https://a.b:8080",
        ),
        ("new URL('../x?y', 'https://a.b/c/d/e').toString()", "https://a.b/c/x?y"),
        (
            "const u = new URL('https://a.b/?x=1'); u.searchParams.append('y', 'ä &'); u.pathname = '/p q'; u.href",
            "https://a.b/p%20q?x=1&y=%C3%A4+%26",
        ),
        (
            "JSON.stringify({u: new URL('https://münchen.de')})",
            r#"{"u":"https://xn--mnchen-3ya.de/"}"#,
        ),
        ("URL.canParse('nonsense')", "false"),
        (
            "try { new URL('nonsense') } catch (e) { `${e.name}: ${e.message}` }",
            "TypeError: Invalid URL: nonsense",
        ),
        ("new URL('https://a.b/c')", "\"https://a.b/c\""),
        ("[...new URLSearchParams('?a=1&b=%20+&a=2')].join('|')", "a,1|b,  |a,2"),
        (
            "const p = new URLSearchParams({b: 2, a: 1}); p.set('c', 3); p.delete('b'); p.sort(); [p.get('a'), p.has('b'), p.size, `${p}`]",
            r#"["1",false,2,"a=1&c=3"]"#,
        ),
        ("new URLSearchParams([['a', 'b'], ['a', 'c']]).getAll('a')", r#"["b","c"]"#),
        (
            "const u = new URL('https://a.b/?x=1'); const p = u.searchParams; u.search = '?y=2'; [p.get('x'), u.searchParams.get('y')]",
            r#"["1","2"]"#,
        ),
    ] {
        let expected = expected.trim_matches('"');
        assert_eq!(value(script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn text_is_encoded_and_decoded() {
    for (script, expected) in [
        (
            "[btoa('hello'), atob('aGVsbG8='), atob(' aGVs bG8 '), btoa('\\xff')]",
            r#"["aGVsbG8=","hello","hello","/w=="]"#,
        ),
        ("try { btoa('ä€') } catch (e) { e.name }", "InvalidCharacterError"),
        ("try { atob('a') } catch (e) { e.name }", "InvalidCharacterError"),
        ("[...new TextEncoder().encode('aü😀')]", "[97,195,188,240,159,152,128]"),
        ("new TextDecoder().decode(new TextEncoder().encode('aü😀'))", "aü😀"),
        ("[...new TextEncoder().encode('\\ud800')]", "[239,191,189]"),
        ("new TextDecoder().decode(new Uint8Array([0xef, 0xbb, 0xbf, 97, 0xff]))", "a\u{fffd}"),
        (
            "try { new TextDecoder('utf-8', {fatal: true}).decode(new Uint8Array([0xff])) } catch (e) { e.name }",
            "TypeError",
        ),
        (
            "const d = new TextDecoder(); d.decode(new Uint8Array([0xf0, 0x9f]), {stream: true}) + d.decode(new Uint8Array([0x98, 0x80]))",
            "😀",
        ),
        (
            "const t = new Uint8Array(4); const r = new TextEncoder().encodeInto('aü😀', t); [r, [...t]]",
            r#"[{"read":2,"written":3},[97,195,188,0]]"#,
        ),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn structured_clone_copies_deeply() {
    for (script, expected) in [
        (
            "const a = {d: new Date(5), r: /x/g, m: new Map([[1, {b: 2}]]), s: new Set([1]), u: new Uint8Array([1, 2])}; const b = structuredClone(a); [b !== a, b.d.getTime(), b.r.flags, b.m.get(1).b, b.m.get(1) !== a.m.get(1), b.s.has(1), [...b.u], b.u.buffer !== a.u.buffer]",
            r#"[true,5,"g",2,true,true,[1,2],true]"#,
        ),
        ("const o = {}; o.self = o; const c = structuredClone(o); c.self === c && c !== o", "true"),
        ("try { structuredClone({f() {}}) } catch (e) { e.name }", "DataCloneError"),
        (
            "const e = structuredClone(new RangeError('m')); [e instanceof RangeError, e.message]",
            r#"[true,"m"]"#,
        ),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn randomness_depends_on_the_seed_only() {
    let script = "[Math.random(), crypto.randomUUID(), ...crypto.getRandomValues(new Uint32Array(4)), Math.random()]";
    let with_seed = async |seed: u8| {
        let host = TestHost { seed: [seed; 32], ..TestHost::new() };
        let Status::Completed { value } = run_on(&host, script).await.status else { panic!() };
        value.display().into_owned()
    };
    let (first, repeated, other) = (with_seed(1).await, with_seed(1).await, with_seed(2).await);
    assert_eq!(first, repeated);
    assert_ne!(first, other);
    let uuid = value("crypto.randomUUID()").await;
    assert_eq!(uuid::version(&uuid), Some('4'), "{uuid}");
    assert_eq!(value("const n = Array.from({length: 10000}, Math.random); n.every(x => x >= 0 && x < 1) && Math.abs(n.reduce((a, b) => a + b) / 10000 - 0.5) < 0.02").await, "true");
    assert_eq!(thrown("crypto.getRandomValues(new Uint8Array(65537))").await.0, "RangeError");
}

mod uuid {
    /// The version digit of a well-formed UUID.
    pub(super) fn version(text: &str) -> Option<char> {
        let lengths: Vec<_> = text.split('-').map(str::len).collect();
        (lengths == [8, 4, 4, 4, 12]).then(|| text.chars().nth(14)).flatten()
    }
}

#[tokio::test]
async fn clock_is_that_of_the_host() {
    assert_eq!(value("[Date.now(), new Date().toISOString(), new Date().getTimezoneOffset(), performance.now(), performance.timeOrigin]").await,
        r#"[1772600767089,"2026-03-04T05:06:07.089Z",0,0,1772600767089]"#);
}

#[tokio::test]
async fn modern_language_features_work() {
    for (script, expected) in [
        ("[3, 1, 2].toSorted().at(-1)", "3"),
        ("Object.groupBy([1, 2, 3], x => x % 2 ? 'odd' : 'even')", r#"{"odd":[1,3],"even":[2]}"#),
        ("class A { static #x = 1; static { this.y = A.#x + 1 } } A.y", "2"),
        ("'a-b'.replaceAll('-', '+')", "a+b"),
        ("null ?? (undefined?.x ?? 'd')", "d"),
        ("[...'aXbX'.matchAll(/(?<l>[a-z])X/g)].map(m => m.groups.l).join()", "a,b"),
        ("new Set([1, 2]).union(new Set([3])).size", "3"),
        ("queueMicrotask(() => {}); await null; 1_000", "1000"),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
}

/// The global names. Detects names that go missing with a new engine.
#[tokio::test]
async fn promised_globals_exist() {
    let functions = "Array.fromAsync Array.prototype.at Array.prototype.findLast Array.prototype.findLastIndex Array.prototype.flatMap \
        Array.prototype.toReversed Array.prototype.toSorted Array.prototype.toSpliced Array.prototype.with ArrayBuffer.prototype.transfer \
        AggregateError BigInt.asIntN Error.isError FinalizationRegistry Iterator.from Iterator.prototype.map \
        Iterator.prototype.toArray JSON.rawJSON Map.groupBy Math.clz32 Math.f16round Object.fromEntries Object.groupBy Object.hasOwn \
        Promise.allSettled Promise.any Promise.try Promise.withResolvers Proxy Reflect.ownKeys RegExp.escape \
        Set.prototype.difference Set.prototype.intersection Set.prototype.isSubsetOf Set.prototype.union String.prototype.at \
        String.prototype.isWellFormed String.prototype.matchAll String.prototype.normalize String.prototype.padStart \
        String.prototype.replaceAll String.raw Uint8Array.prototype.toSorted WeakRef \
        AbortController AbortSignal.any AbortSignal.timeout DOMException Event EventTarget TextDecoder TextEncoder URL URL.canParse \
        URLSearchParams atob btoa clearImmediate clearInterval clearTimeout crypto.getRandomValues crypto.randomUUID \
        performance.now queueMicrotask setImmediate setInterval setTimeout structuredClone \
        console.assert console.debug console.dir console.error console.group console.info console.log console.table console.time \
        console.trace console.warn print";
    let script = format!(
        "{}.filter(path => typeof path.split('.').reduce((value, name) => value?.[name], globalThis) !== 'function')",
        json!(functions.split_whitespace().collect::<Vec<_>>())
    );
    assert_eq!(value(&script).await, "[]");
    // These must be absent, so that feature tests of scripts are correct.
    let absent = "require process Buffer global window document Blob FormData Headers Request Response WebSocket XMLHttpRequest \
        WebAssembly Intl localStorage navigator Deno Bun __dirname std os bjson";
    let script = format!(
        "{}.filter(name => name in globalThis)",
        json!(absent.split_whitespace().collect::<Vec<_>>())
    );
    assert_eq!(value(&script).await, "[]");
}

#[tokio::test]
async fn syntax_up_to_es2025_is_supported() {
    for (script, expected) in [
        ("let a = null; a ??= 1; a ||= 2; a &&= 3; a", "3"),
        ("class A { #p = 1; has(o) { return #p in o } } new A().has(new A())", "true"),
        ("/(?<y>\\d{4})/d.exec('in 2024').indices.groups.y", "[3,7]"),
        ("/[\\p{L}--[a-z]]/v.test('a')", "false"),
        ("/(?i:a)b/.test('Ab')", "true"),
        ("label: { break label } 1", "1"),
        (
            "async function* g() { yield 1; yield 2 } const out = []; for await (const x of g()) out.push(x); out",
            "[1,2]",
        ),
        ("try { throw new Error('a', { cause: 'b' }) } catch ({ cause }) { cause }", "b"),
        ("[1, 2, 3].values().filter(x => x > 1).map(x => x * 2).toArray()", "[4,6]"),
        ("((a, b = a, ...[c]) => [a, b, c])(1, undefined, 3)", "[1,1,3]"),
        ("`a${1}b` + String.raw`\\n`", "a1b\\n"),
        ("0b11 + 0o17 + 1_0 + 2 ** 3", "36"),
        ("10n ** 20n === 100000000000000000000n", "true"),
        ("new Error('x').stack.includes('script.js:1:')", "true"),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn events_and_signals_work() {
    for (script, expected) in [
        (
            "const c = new AbortController(), seen = []; c.signal.addEventListener('abort', () => seen.push('heard')); c.signal.onabort = () => seen.push('own'); c.abort(); c.abort(); [seen, c.signal.aborted, c.signal.reason.name]",
            r#"[["own","heard"],true,"AbortError"]"#,
        ),
        ("try { AbortSignal.abort('why').throwIfAborted() } catch (e) { e }", "why"),
        (
            "const s = AbortSignal.timeout(1); await new Promise(done => { s.onabort = done }); s.reason.name",
            "TimeoutError",
        ),
        (
            "const c = new AbortController(); const any = AbortSignal.any([c.signal, AbortSignal.timeout(100000)]); c.abort(7); [any.aborted, any.reason]",
            "[true,7]",
        ),
        ("try { new AbortSignal() } catch (e) { e.name }", "TypeError"),
        (
            "class Bus extends EventTarget {} const b = new Bus(); let n = 0; const f = (e) => { n += e.type.length; e.preventDefault() }; b.addEventListener('go', f, {once: true}); [b.dispatchEvent(new Event('go', {cancelable: true})), b.dispatchEvent(new Event('go')), n]",
            "[false,true,2]",
        ),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
}
