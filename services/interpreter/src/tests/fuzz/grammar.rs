//! Random programs: mostly valid by the grammar, so that they pass the parser; sometimes damaged,
//! so that they do not.

use fastrand::Rng;

/// Maximum nesting depth of a program; deeper nodes are leaves.
const MAX_DEPTH: usize = 5;

const NAMES: &[&str] =
    &["a", "b", "c", "d", "self", "of", "type", "async", "get", "\u{e4}", "$", "_0"];

const GLOBALS: &[&str] = &[
    "Object",
    "Array",
    "Function",
    "Promise",
    "Proxy",
    "Reflect",
    "Symbol",
    "Map",
    "Set",
    "WeakMap",
    "Date",
    "RegExp",
    "Error",
    "TypeError",
    "JSON",
    "Math",
    "Number",
    "String",
    "BigInt",
    "Uint8Array",
    "DataView",
    "ArrayBuffer",
    "globalThis",
    "Iterator",
    "URL",
    "URLSearchParams",
    "TextEncoder",
    "structuredClone",
    "setTimeout",
    "clearTimeout",
    "queueMicrotask",
    "crypto",
    "performance",
    "console",
    "print",
    "tools",
    "eval",
    "atob",
    "btoa",
    "AbortController",
    "undefined",
    "WeakRef",
    "FinalizationRegistry",
    "SharedArrayBuffer",
    "DOMException",
    "Event",
    "secrets",
];

const MEMBERS: &[&str] = &[
    "length",
    "prototype",
    "constructor",
    "__proto__",
    "then",
    "next",
    "return",
    "name",
    "message",
    "stack",
    "cause",
    "toString",
    "valueOf",
    "toJSON",
    "call",
    "apply",
    "bind",
    "map",
    "filter",
    "reduce",
    "sort",
    "flat",
    "concat",
    "slice",
    "splice",
    "push",
    "fill",
    "keys",
    "values",
    "entries",
    "get",
    "set",
    "has",
    "add",
    "delete",
    "defineProperty",
    "getOwnPropertyDescriptor",
    "setPrototypeOf",
    "freeze",
    "assign",
    "create",
    "from",
    "of",
    "all",
    "race",
    "allSettled",
    "resolve",
    "reject",
    "replace",
    "replaceAll",
    "match",
    "matchAll",
    "split",
    "repeat",
    "padEnd",
    "at",
    "normalize",
    "exec",
    "test",
    "parse",
    "stringify",
    "buffer",
    "resize",
    "transfer",
    "subarray",
    "getTime",
    "toISOString",
    "random",
    "floor",
    "iterator",
    "species",
    "toPrimitive",
    "hasInstance",
    "asyncIterator",
    "prepareStackTrace",
    "stackTraceLimit",
    "captureStackTrace",
    "log",
    "read_file",
    "list_files",
    "create_file",
    "grep",
    "search",
    "href",
    "searchParams",
];

const LITERALS: &[&str] = &[
    "0",
    "1",
    "-1",
    "2**31",
    "2**53",
    "1e308",
    "NaN",
    "-0",
    "0.1",
    "1n",
    "-2n**64n",
    "''",
    "'x'",
    "'\\ud800'",
    "'\\0'",
    "'inside.txt'",
    "'../outside/secret'",
    "\"__proto__\"",
    "'x'.repeat(1000)",
    "null",
    "undefined",
    "true",
    "[]",
    "{}",
    "[1, 2, 3]",
    "[, 1]",
    "({a: 1})",
    "/a+b*/g",
    "/(?<n>a)|(b)/dgsu",
    "/[\\p{L}--a]/v",
    "`x${1}`",
    "new Error('x')",
    "Symbol.iterator",
    "Symbol('x')",
    "new Uint8Array(8)",
    "new Map([[1, {}]])",
    "new Date(0)",
    "new Date(NaN)",
    "(() => {})",
    "this",
    "new Proxy({}, {})",
    "Promise.resolve(1)",
    "Object.create(null)",
    "String.raw`\\x`",
    "0x1F",
    "1_000",
    "'\\u{1F600}'",
    "new.target",
    "import.meta",
    "arguments",
];

const TYPES: &[&str] = &[
    "number",
    "string[]",
    "any",
    "unknown",
    "Map<string, number[]>",
    "{a: number; b?: string}",
    "(x: number) => void",
    "'a' | 'b'",
    "[number, ...string[]]",
    "Record<string, unknown>",
    "typeof a",
    "keyof T",
    "T extends string ? 1 : 2",
    "`x${string}`",
    "readonly string[]",
    "asserts x is string",
    "Array<Array<Array<number>>>",
];

const BINARY: &[&str] = &[
    "+",
    "-",
    "*",
    "/",
    "%",
    "**",
    "<",
    ">",
    "<=",
    "==",
    "===",
    "!==",
    "&&",
    "||",
    "??",
    "&",
    "|",
    "^",
    "<<",
    ">>",
    ">>>",
    "in",
    "instanceof",
    ",",
    "=",
    "+=",
    "??=",
    "&&=",
    "**=",
];

const CALLS: &[&str] = &[
    "print(E)",
    "print(E, E)",
    "read_file(E)",
    "await tools.read_file(E)",
    "await Promise.all([tools.list_files(E), E])",
    "grep(E, E, E)",
    "list_files(E, E)",
    "create_file(E, E)",
    "edit_file(E, [{old: E, new: E}])",
    "delete_file(E)",
    "await tools.search(E)",
    "find_file(E)",
    "getenv(E)",
    "setenv(E, E)",
    "fetch(E, E)",
    "execute_command(E)",
    "JSON.stringify(E)",
    "JSON.parse(E)",
    "structuredClone(E)",
    "eval(E)",
    "new Function(E)",
    "new Function(E, E)()",
    "setTimeout(E, E)",
    "setInterval(() => {S}, 1)",
    "queueMicrotask(E)",
    "Object.defineProperty(E, E, {get() {S}, configurable: true})",
    "Reflect.construct(E, [E], E)",
    "await import(E)",
    "await import('./lib.ts')",
    "Object.setPrototypeOf(E, E)",
    "new Proxy(E, {get: (t, k) => E, ownKeys: () => E, has: () => E})",
    "await E",
    "Array.from(E, E)",
    "await new Promise((done, fail) => {S})",
    "Promise.reject(E)",
    "[...E]",
    "E?.(E)",
    "String(E)",
    "BigInt(E)",
    "new Intl.NumberFormat()",
    "console.table(E)",
    "console.group(E)",
    "console.count(E)",
    "console.log('%s %d %o', E, E, E)",
    "Error.captureStackTrace(E)",
    "new URL(E, E)",
    "atob(E)",
    "btoa(E)",
    "crypto.getRandomValues(E)",
    "new AbortController().signal.addEventListener(E, E)",
    "Symbol.for(E)",
    "new Date(E)",
    "E.repeat(E)",
    "new RegExp(E, E)",
    "E.replace(E, E)",
    "tools[E](E)",
    "secrets.get(E)",
    "globalThis[E] = E",
    "new WeakRef(E).deref()",
    "new Error(E, {cause: E})",
    "new AggregateError([E, E])",
    "E.map((x) => E)",
];

const STATEMENTS: &[&str] = &[
    "E;",
    "E;",
    "let N = E;",
    "const N = E;",
    "var N = E;",
    "N = E;",
    "if (E) {S} else {S}",
    "for (let i = 0; i < 3; i++) {S}",
    "for (const N of E) {S}",
    "for (const N in E) {S}",
    "for await (const N of E) {S}",
    "while (E) {S; break}",
    "do {S} while (false)",
    "try {S} catch (N) {S} finally {S}",
    "try {S} catch {S}",
    "throw E;",
    "return E;",
    "switch (E) { case E: S; break; default: S }",
    "label: for (;;) { S; break label }",
    "function N(N, ...N) {S}",
    "async function N() {S}",
    "function* N() { yield E; yield* E; S }",
    "async function* N() { yield E; S }",
    "class N { #p = E; static s = E; get N() {S} static {S} constructor() {S} }",
    "class N extends E { constructor() { super(E); S } }",
    "const {N, ...N} = E;",
    "const [N, , ...N] = E;",
    "({N: E, [E]: E, ...E, get N() {S}});",
    "debugger;",
    "(async () => {S})();",
    "(() => {S})();",
    "void E;",
    "{S}",
    ";",
    "export default E;",
    "export const N = E;",
    "import {N} from './lib.ts';",
    "'use strict';",
    "using N = E;",
    "with (E) {S}",
    "delete E;",
    "N++;",
    "await E;",
    "import json from './data.json';",
];

const TYPED: &[&str] = &[
    "const N: T = E;",
    "let N = E as T;",
    "let N = <T>E;",
    "let N = E satisfies T;",
    "type N<T> = T;",
    "interface N<T extends string = 'x'> { N: T; (x: T): void }",
    "enum N { A = 1, B = 'x', C = A << 2 }",
    "const enum N { A }",
    "declare const N: T;",
    "function N<T>(N: T, N?: T): T {S}",
    "abstract class N<T> { private N!: T; abstract m(): void }",
    "class N { constructor(private readonly N: T, public N = E) {S} }",
    "E!;",
    "namespace N { export type X = T }",
    "namespace N { export const x = E }",
    "import type {N} from './lib';",
    "export type {N};",
    "const N = <T,>(N: T): N is T => E;",
    "let N: T | undefined",
    "@N class N {}",
    "declare global { var N: T }",
    "function N(this: T, N: T): asserts N {S}",
];

/// Generates a program in JavaScript or TypeScript.
pub(super) fn program(random: &mut Rng) -> String {
    let mut generator = Generator { typed: random.u8(..4) == 0, random };
    let mut program = String::new();
    for _ in 0..generator.random.usize(1..8) {
        program.push_str(&generator.statement(0));
        program.push('\n');
    }
    match random.u8(..10) {
        0 => damage(random, &program),
        1 => random_tokens(random),
        _ => program,
    }
}

struct Generator<'a> {
    typed: bool,
    random: &'a mut Rng,
}

impl Generator<'_> {
    fn statement(&mut self, depth: usize) -> String {
        let forms = if self.typed && self.random.bool() { TYPED } else { STATEMENTS };
        let form = if depth >= MAX_DEPTH { "E;" } else { self.one_of(forms) };
        self.fill(form, depth)
    }

    fn expression(&mut self, depth: usize) -> String {
        if depth >= MAX_DEPTH {
            return self.leaf();
        }
        let form = match self.random.u8(..10) {
            0..3 => return self.leaf(),
            3..6 => self.one_of(CALLS),
            6 => {
                let operator = self.one_of(BINARY);
                return format!(
                    "({} {operator} {})",
                    self.expression(depth + 1),
                    self.expression(depth + 1)
                );
            }
            7 => return format!("{}.{}", self.expression(depth + 1), self.one_of(MEMBERS)),
            8 => {
                return format!(
                    "{}.{}({})",
                    self.expression(depth + 1),
                    self.one_of(MEMBERS),
                    self.expression(depth + 1)
                );
            }
            _ => self.one_of(&[
                "(E ? E : E)",
                "[E, ...E]",
                "({N: E, [E]: E})",
                "(N => E)",
                "(async N => {S})",
                "new E(E)",
                "!E",
                "typeof E",
                "-E",
                "`${E}`",
                "E`${E}`",
                "E[E]",
                "E?.[E]",
                "function* () {S}",
                "class {}",
                "(yield)",
            ]),
        };
        self.fill(form, depth)
    }

    fn leaf(&mut self) -> String {
        match self.random.u8(..6) {
            0 | 1 => self.one_of(NAMES).to_owned(),
            2 => self.one_of(GLOBALS).to_owned(),
            3 => format!("{}.{}", self.one_of(GLOBALS), self.one_of(MEMBERS)),
            _ => self.one_of(LITERALS).to_owned(),
        }
    }

    /// Fills the placeholders of a form: E is an expression, S statements, N a name, T a type. A
    /// placeholder is never part of a word.
    fn fill(&mut self, form: &str, depth: usize) -> String {
        let mut text = String::new();
        let mut rest = form;
        while let Some(at) = rest.find(['E', 'S', 'N', 'T']) {
            let (before, place) = rest.split_at(at);
            text.push_str(before);
            let word = |character: Option<char>| {
                character.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == '.')
            };
            let part_of_a_word = word(before.chars().next_back())
                || word(place.chars().nth(1)) && place.chars().nth(1) != Some('.');
            match place.as_bytes()[0] {
                _ if part_of_a_word => text.push_str(&place[..1]),
                b'E' => text.push_str(&self.expression(depth + 1)),
                b'S' => {
                    for _ in 0..self.random.usize(..3) {
                        text.push_str(&self.statement(depth + 1));
                        text.push('\n');
                    }
                }
                b'N' => text.push_str(self.one_of(NAMES)),
                _ => text.push_str(if self.typed { self.one_of(TYPES) } else { "T" }),
            }
            rest = &place[1..];
        }
        text + rest
    }

    fn one_of(&mut self, list: &[&'static str]) -> &'static str {
        list[self.random.usize(..list.len())]
    }
}

/// Removes, doubles, swaps or replaces characters of a program.
fn damage(random: &mut Rng, program: &str) -> String {
    let mut characters: Vec<char> = program.chars().collect();
    for _ in 0..random.usize(1..6) {
        let (at, other) = (random.usize(..characters.len()), random.usize(..characters.len()));
        match random.u8(..5) {
            0 if characters.len() > 1 => drop(characters.remove(at)),
            1 => characters.swap(at, other),
            2 => characters[at] = characters[other],
            3 => characters.insert(at, random.char(..)),
            _ => characters.truncate(at.max(1)),
        }
    }
    characters.into_iter().collect()
}

/// Tokens in random order.
fn random_tokens(random: &mut Rng) -> String {
    const SIGNS: &[&str] = &[
        "(", ")", "{", "}", "[", "]", "<", ">", "=>", "...", "?.", "`", "${", "'", "\"", "/", "/*",
        "*/", "//", "\n", ";", ":", ",", "#", "@", "\\", "\u{2028}", "await", "async", "function",
        "class", "let", "of", "in", "yield", "import", "export", "return", "new", "super",
        "static", "\u{0}", "<!--", "-->", "#!", "enum", "as", "abstract",
    ];
    let mut text = String::new();
    for _ in 0..random.usize(1..60) {
        let list = [NAMES, LITERALS, BINARY, SIGNS, SIGNS, TYPES][random.usize(..6)];
        text.push_str(list[random.usize(..list.len())]);
        text.push_str(if random.bool() { " " } else { "" });
    }
    text
}
