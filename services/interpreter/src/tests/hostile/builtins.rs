//! Replaced built-ins, and deceptive arguments. The sandbox's own code runs in the same engine.
//! Whatever a script does to it, a call must be the one that was shown, and a result the one that
//! came.

use super::*;

/// What a script does to the engine before it continues normally.
const SABOTAGES: &[&str] = &[
    "JSON.parse = JSON.stringify = () => '{\"forged\": true}'",
    "globalThis.JSON = {}",
    "globalThis.Promise = class { constructor() { throw 'forged' } }",
    "Promise.prototype.then = function (ok) { return ok('forged') }",
    "Promise.resolve = Promise.all = () => 'forged'",
    "Object.defineProperty(Promise, Symbol.species, {get() { throw 'forged' }})",
    "Promise.prototype.constructor = function (f) { f(() => {}, () => {}) }",
    "Reflect.apply = Function.prototype.call = Function.prototype.apply = Function.prototype.bind = () => 'forged'",
    "Map.prototype.get = Map.prototype.set = Map.prototype.delete = Map.prototype.has = () => 'forged'",
    "Set.prototype.add = Set.prototype.has = Set.prototype.delete = () => { throw 'forged' }",
    "Object.keys = Object.entries = Object.hasOwn = Object.getPrototypeOf = () => ['forged']",
    "Object.defineProperty = Object.freeze = Object.setPrototypeOf = () => { throw 'forged' }",
    "String.prototype.indexOf = String.prototype.slice = String.prototype.split = String.prototype.includes = () => 'forged'",
    "Array.prototype.join = Array.prototype.includes = Array.prototype.push = Array.prototype.map = () => 'forged'",
    "Array.isArray = () => true",
    "Array.prototype[Symbol.iterator] = function* () { yield 'forged' }",
    "Object.defineProperty(Array.prototype, Symbol.species, {get() { throw 'forged' }})",
    "RegExp.prototype.exec = () => ['forged']",
    "Math.trunc = Math.random = () => NaN",
    "globalThis.Error = globalThis.TypeError = globalThis.RangeError = class { constructor() { throw 'forged' } }",
    "Error.prepareStackTrace = () => { throw 'forged' }",
    "Error.prepareStackTrace = (error, sites) => sites",
    "Error.stackTraceLimit = 1e9",
    "Error.stackTraceLimit = -1",
    "Object.defineProperty(Error, 'stackTraceLimit', {get() { throw 'forged' }})",
    "Object.defineProperty(Error.prototype, 'message', {set() { throw 'forged' }, get() { return 'forged' }})",
    "Error.prototype.toString = () => { throw 'forged' }",
    "Object.prototype.get = Object.prototype.set = () => 'forged'",
    "Object.prototype.value = 'forged'",
    "Object.prototype.toString = Object.prototype.valueOf = () => 'forged'",
    "Object.prototype.path = '../outside/secret'",
    "Object.defineProperty(Object.prototype, 'path', {get: () => '../outside/secret', set() {}})",
    "for (const name of ['number', 'name', 'args', 'resolve', 'reject', 'site', 'next', 'timer', 'id', 'callback', 'delay']) Object.defineProperty(Object.prototype, name, {set() { throw 'forged' }, get() { return 'forged' }, configurable: true})",
    "Object.defineProperty(Array.prototype, 0, {set() {}, get() { return 'forged' }})",
    "Object.prototype.then = undefined",
    "Object.prototype.__proto__ = null",
    "Object.preventExtensions(globalThis)",
    "Object.freeze(Object.prototype); Object.freeze(Array.prototype); Object.freeze(Function.prototype); Object.freeze(Promise.prototype)",
    "globalThis.read_file = globalThis.print = () => 'forged'; delete globalThis.read_file; var read_file = tools.read_file",
    "globalThis.setTimeout = globalThis.queueMicrotask = () => 'forged'",
    "String = Number = Boolean = Symbol = Map = Set = WeakMap = Proxy = Date = RegExp = undefined",
    "globalThis.undefined",
    "Symbol.toPrimitive; Object.prototype[Symbol.toPrimitive] = () => 'forged'",
    "Object.prototype[Symbol.toStringTag] = 'forged'",
    "for (const type of [Map, Set, RegExp, Date, Promise, Error]) Object.defineProperty(type, Symbol.hasInstance, {value: () => true})",
    "Number.isFinite = isFinite = isNaN = () => false",
];

#[tokio::test]
async fn replaced_builtins_change_neither_calls_nor_results() {
    let bench = Bench::with_files();
    let mut failures = Vec::new();
    for sabotage in SABOTAGES {
        let script = format!(
            "const call = tools.read_file, list = tools.list_files;
             {sabotage};
             (async () => {{
                 const text = await call('inside.txt');
                 if (text !== 'inside') return 'read ' + text;
                 let refused; try {{ await call('../outside/secret') }} catch (error) {{ refused = error.name }}
                 if (refused !== 'OutsideWorkspace') return 'refused by ' + refused;
                 const listed = await list('.');
                 if (listed.length !== 1 || listed[0].path !== 'inside.txt') return 'listed';
                 return 'true to itself'
             }})()"
        );
        let outcome = bench.run(&script).await;
        if let Some(difference) = difference(&outcome, Is("true to itself")) {
            failures.push(format!("{sabotage}\n  {difference}"));
        }
        bench.assert_works_normally(sabotage).await;
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[tokio::test]
async fn replaced_builtins_change_neither_output_nor_errors() {
    let bench = Bench::with_files();
    // These change an object or its description for any code that prints it.
    let own = [
        "toStringTag",
        "Error.prepareStackTrace",
        "'message'",
        "Array.prototype, 0",
        "hasInstance",
        "__proto__ = null",
        "print =",
    ];
    let mut failures = Vec::new();
    for sabotage in
        SABOTAGES.iter().filter(|sabotage| !own.iter().any(|part| sabotage.contains(part)))
    {
        let script = format!(
            "const Thrown = TypeError, say = print; {sabotage}; say('text', 1, {{a: [1, 'b']}}); throw new Thrown('thrown')"
        );
        let outcome = bench.run(&script).await;
        let printed = outcome.output.starts_with("text 1 {\"a\":[1,\"b\"]}");
        if !printed || !matches!(&outcome.status, Status::Threw { name, .. } if name == "TypeError")
        {
            failures.push(format!("{sabotage}\n  {outcome:?}"));
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[tokio::test]
async fn deceptive_arguments_are_what_was_shown() {
    let bench = Bench::with_files();
    bench
        .refuses(&[
            // Getters, proxies and conversions: only the JSON counts, serialized once.
            ("read_file({get path() { return '../outside/secret' }})", "OutsideWorkspace"),
            ("let n = 0; read_file({get path() { return n++ ? 'inside.txt' : '../outside/secret' }})", "OutsideWorkspace"),
            (
                "read_file(new Proxy({path: 'inside.txt'}, {ownKeys: () => ['path'], get: () => '../outside/secret',
                    getOwnPropertyDescriptor: () => ({enumerable: true, configurable: true, value: 'inside.txt'})}))",
                "OutsideWorkspace",
            ),
            ("const s = new String('inside.txt'); s.toJSON = () => '../outside/secret'; read_file(s)", "OutsideWorkspace"),
            ("String.prototype.toJSON = () => '../outside/secret'; read_file(new String('inside.txt'))", "OutsideWorkspace"),
            ("read_file({toString: () => 'inside.txt'})", "InvalidArguments"),
            ("read_file([['inside.txt']])", "InvalidArguments"),
            ("read_file(Symbol('inside.txt'))", "InvalidArguments"),
            ("read_file(() => 'inside.txt')", "InvalidArguments"),
            ("read_file(1n)", "TypeError"),
            ("read_file(Promise.resolve('inside.txt'))", "InvalidArguments"),
            ("read_file(new Date(NaN))", "InvalidArguments"),
            ("read_file({path: 'inside.txt', __proto__: {start_line: 1}, toString: 1})", "InvalidArguments"),
            ("read_file(JSON.parse('{\"__proto__\": {\"path\": \"x\"}, \"path\": \"inside.txt\"}'))", "InvalidArguments"),
            ("read_file({path: 'inside.txt', constructor: 1})", "InvalidArguments"),
            ("read_file('inside.txt', {path: '../outside/secret'})", "TypeError"),
            ("read_file('inside.txt', -1)", "InvalidArguments"),
            ("read_file('inside.txt', NaN, Infinity); read_file('inside.txt', 1.5)", "InvalidArguments"),
            ("read_file('inside.txt', 2 ** 53)", "InvalidArguments"),
            ("const o = {}; o.o = o; read_file({path: o})", "TypeError"),
            ("read_file({get path() { throw {name: 'own'} }})", "own"),
            ("read_file({toJSON() { throw {name: 'own'} }})", "own"),
            // An array that changes after its creation.
            ("class Evil extends Array { static get [Symbol.species]() { throw {name: 'own'} } toJSON() { return ['../outside'] } } list_files(new Evil('.'))", "InvalidArguments"),
            ("const path = ['.']; path.toString = () => '..'; path.length = 2 ** 32 - 1; read_file(path)", "InternalError"),
        ])
        .await;
    bench
        .withstands(&[
            // A call within the arguments of another is a separate, earlier call.
            ("read_file({get path() { print(read_file('inside.txt')); return 'inside.txt' }})", Is("inside")),
            ("const p = tools.read_file('inside.txt'); p.then = 5; p.constructor = null; await p", Is("inside")),
            ("Object.prototype.then = function (done) { done('own') }; await tools.list_files('.')", Is("own")),
            ("const p = tools.read_file('inside.txt'); p.constructor = {[Symbol.species]: function (f) { f(() => {}, () => {}) }}; p.then(() => {}); await tools.read_file('inside.txt')", Is("inside")),
        ])
        .await;
}
