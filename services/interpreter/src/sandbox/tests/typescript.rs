//! TypeScript: what is stripped, what is refused, and how scripts use it.

use super::*;

#[tokio::test]
async fn types_become_blanks_and_code_is_rewritten_in_place() {
    #[rustfmt::skip]
    let table = [
        ("let x: number = 1",
         "let x         = 1"),
        ("let x: T\n(a)",
         "let x;  \n(a)"),
        ("let x!: string;",
         "let x         ;"),
        ("const f = (a?: number, ...r: string[]): void => {}",
         "const f = (a         , ...r          )       => {}"),
        ("function f(this: Foo, a: string) {}",
         "function f(           a        ) {}"),
        ("function f(this: Foo) {}",
         "function f(         ) {}"),
        ("const x = y as T\n(z)",
         "const x = y;    \n(z)"),
        ("const x = y satisfies T\n[0].toString()",
         "const x = y;           \n[0].toString()"),
        ("x! as T\n`a`",
         "x ;    \n`a`"),
        ("a!.b!.c!()",
         "a .b .c ()"),
        ("a! = 5",
         "a  = 5"),
        ("a?.b!.c",
         "a?.b .c"),
        ("foo<string>(1)",
         "foo        (1)"),
        ("new Map<string, number>()",
         "new Map                ()"),
        ("new Foo<T>",
         "new Foo   "),
        ("tag<T>`x`",
         "tag   `x`"),
        ("const g = f<string>\nbar()",
         "const g = f;       \nbar()"),
        ("const f = <T>(x: T): T => x",
         "const f =    (x   )    => x"),
        ("const f = <T,>(x: T) => x",
         "const f =     (x   ) => x"),
        ("function g() { return <\nT\n>(x: T) => x }",
         "function g() { return (\n \n  x   ) => x }"),
        ("const f = async <\nT>(x: T) => x",
         "const f = async (\n   x   ) => x"),
        ("const f = (x: number): {\n  a: string\n} => ({a: 'x'})",
         "const f = (x            \n           \n) => ({a: 'x'})"),
        ("const f = (\n  x: number,\n): Promise<\n  string\n> => x",
         "const f = (\n  x        ,\n           \n        \n) => x"),
        ("const f = async (x: T): Promise<void> => {}",
         "const f = async (x   )                => {}"),
        ("type A = string\ninterface B { x: number }\ndeclare const z: number\ndeclare function f(): void\ndeclare module 'x' {}\ndeclare global { var y: number }\n1",
         ";              \n;                        \n;                      \n;                         \n;                    \n;                               \n1"),
        ("foo\ntype A = B\n(bar)",
         "foo\n;         \n(bar)"),
        ("function f(a: string): void;\nfunction f(a: number): void;\nfunction f(a: any) { return a }",
         ";                           \n;                           \nfunction f(a     ) { return a }"),
        ("export type A = string; export interface B {}\nexport const a: A = 'x'",
         ";                       ;                    \nexport const a    = 'x'"),
        ("abstract class A<T> extends B<T> implements C, D<T> {\n  private readonly x: number = 1\n  static y?: string\n  z!: number\n  declare w: number\n  abstract foo(): void\n  [key: string]: any\n  constructor(private a: string, public readonly b = 2, c?: number) { super(a); this.c = c }\n  foo?(x: number): void {}\n  get v(): number { return 1 }\n  set v(x: number) {}\n  async *gen<T>(): AsyncGenerator<T> {}\n  override toString(): string { return '' }\n  bar(a: string): void;\n  bar(a: any) {}\n}",
         "         class A    extends B                       { a; b;\n                   x         = 1\n  static y ;       \n  z ;       \n  ;                \n  ;                   \n  ;                 \n  constructor(        a        ,                 b = 2, c         ) { super(a); this.a = a; this.b = b; this.c = c }\n  foo (x        )       {}\n  get v()         { return 1 }\n  set v(x        ) {}\n  async *gen   ()                    {}\n           toString()         { return '' }\n  ;                    \n  bar(a     ) {}\n}"),
        ("class A { get: number\n foo() {} }",
         "class A { get;       \n foo() {} }"),
        ("class A { static: T\n x = 1 }",
         "class A { static;  \n x = 1 }"),
        ("class A { a = 1\n private [b] = 2 }",
         "class A { a = 1\n ;       [b] = 2 }"),
        ("class A { a = {}\n readonly [b] = 2 }",
         "class A { a = {}\n ;        [b] = 2 }"),
        ("class A { a = 1\n public *gen() {} }",
         "class A { a = 1\n ;      *gen() {} }"),
        ("class A { a = x as T\n [b] = 1 }",
         "class A { a = x;    \n [b] = 1 }"),
        ("class A { a = 1\n abstract foo(): void\n [b] = 2 }",
         "class A { a = 1\n ;                   \n [b] = 2 }"),
        ("class A { constructor(readonly x: number) {} }",
         "class A { x; constructor(         x        ) { this.x = x;} }"),
        ("class A { constructor(public x) { 'use strict'; y() } }",
         "class A { x; constructor(       x) { 'use strict'; this.x = x; y() } }"),
        ("class A extends B { constructor(public x) { super()\n y() } }",
         "class A extends B { x; constructor(       x) { super(); this.x = x;\n y() } }"),
        ("enum E { A, B, C = 5, D }",
         "var E = ((E) => { E[E[\"A\"] = 0] = \"A\"; E[E[\"B\"] = 1] = \"B\"; E[E[\"C\"] = 5] = \"C\"; E[E[\"D\"] = 6] = \"D\"; return E; })(E || {});"),
        ("enum E { A = 'a', B = `b`, C = 1 << 2, D = C | 1, E2 = f(A), F = 'x'.length }",
         "var E = ((E) => { E[\"A\"] = 'a'; E[\"B\"] = `b`; E[E[\"C\"] = 1 << 2] = \"C\"; E[E[\"D\"] = E.C | 1] = \"D\"; E[E[\"E2\"] = f(E.A)] = \"E2\"; E[E[\"F\"] = 'x'.length] = \"F\"; return E; })(E || {});"),
        ("const enum E { 'a-b', ['c'], [`d`] = 1 }",
         "var E = ((E) => { E[E[\"a-b\"] = 0] = \"a-b\"; E[E[\"c\"] = 1] = \"c\"; E[E[\"d\"] = 1] = \"d\"; return E; })(E || {});"),
        ("enum E { A }\nenum E { B = 1 + A }",
         "var E = ((E) => { E[E[\"A\"] = 0] = \"A\"; return E; })(E || {});\n;((E) => { E[E[\"B\"] = 1 + E.A] = \"B\"; })(E);"),
        ("function f() { enum E { A }\n enum E { B = 1 } }",
         "function f() { let E = ((E) => { E[E[\"A\"] = 0] = \"A\"; return E; })({});\n ;((E) => { E[E[\"B\"] = 1] = \"B\"; })(E); }"),
        ("export enum E {\n  A,\n  B = 'b', // c\n}",
         "export var E = ((E) => {\n  E[E[\"A\"] = 0] = \"A\";\n  E[\"B\"] = 'b'; // c\nreturn E; })(E || {});"),
        ("declare enum E { A }",
         ";                   "),
        ("enum A { X = 1 }\nenum B { Y = A.X, Z }",
         "var A = ((A) => { A[A[\"X\"] = 1] = \"X\"; return A; })(A || {});\nvar B = ((B) => { B[B[\"Y\"] = A.X] = \"Y\"; B[B[\"Z\"] = 2] = \"Z\"; return B; })(B || {});"),
        ("foo\nenum E { A }",
         "foo\nvar E = ((E) => { E[E[\"A\"] = 0] = \"A\"; return E; })(E || {});"),
        ("enum E\n{\n}",
         "var E = ((E) => {\n \nreturn E; })(E || {});"),
        ("enum E { A = -1, B, C = ~1, D = 2 ** 3, F = 7 / 2, G = 'a' + 1, H = 1e21 }",
         "var E = ((E) => { E[E[\"A\"] = -1] = \"A\"; E[E[\"B\"] = 0] = \"B\"; E[E[\"C\"] = ~1] = \"C\"; E[E[\"D\"] = 2 ** 3] = \"D\"; E[E[\"F\"] = 7 / 2] = \"F\"; E[\"G\"] = 'a' + 1; E[E[\"H\"] = 1e21] = \"H\"; return E; })(E || {});"),
        ("-1 as number ** 2",
         "(-1)          ** 2"),
        ("x = <T>y",
         "x =    y"),
        ("const f = () => <T>{a: 1}",
         "const f = () => (  {a: 1})"),
        ("return <T>\n{a: 1}",
         "return (  \n{a: 1})"),
        ("<any>function(){}",
         "(    function(){})"),
        ("(<any>x).y",
         "(     x).y"),
        ("<T>x\n(y)",
         "   x\n(y)"),
        ("import type { A } from './a'\nimport { type B, c } from './b'\nimport { type D } from './d'\nimport E, { F } from './e'\nlet x: E = F",
         ";                           \nimport {         c } from './b'\n;                           \nimport    { F } from './e'\nlet x    = F"),
        ("import X, * as T from './t'\nlet y: T.Foo = X",
         "import X         from './t'\nlet y        = X"),
        ("import { Foo } from './t'\nlet y: Foo",
         ";                        \nlet y     "),
        ("import { Foo } from './t'\n1",
         "import { Foo } from './t'\n1"),
        ("export { type A, b } from './x'\nexport type { C } from './y'\nexport type * from './z'",
         "export {         b } from './x'\n;                           \n;                       "),
        ("type A = 1\nexport { A, b }",
         ";         \nexport {    b }"),
        ("export default interface Foo {}",
         ";                              "),
        ("export default abstract class A {}",
         "export default          class A {}"),
        ("export default foo as T\n(x)",
         "export default foo;    \n(x)"),
        ("namespace A { export type B = 1 }",
         ";                                "),
        ("namespace A.B { interface C {} }",
         ";                               "),
        ("try {} catch (e: unknown) {}",
         "try {} catch (e         ) {}"),
        ("for (const x of y as T[]) {}",
         "for (const x of y       ) {}"),
        ("let a: string, b: number = 1, c",
         "let a        , b         = 1, c"),
        ("const {a, b}: {a: string, b: number} = x",
         "const {a, b}                         = x"),
        ("function f({a}: {a: string}, [b]: [number] = [1]) {}",
         "function f({a}             , [b]           = [1]) {}"),
        ("let x = y as const",
         "let x = y         "),
        ("let f: (a: string) => void = (a) => {}",
         "let f                      = (a) => {}"),
        ("function isX(a: any): a is X { return true }",
         "function isX(a     )         { return true }"),
        ("function assertX(a: any): asserts a is X {}",
         "function assertX(a     )                 {}"),
        ("let u: unique symbol",
         "let u               "),
        ("let ü: 'ä' | 'ö' = 'ä'; x",
         "let ü              = 'ä'; x"),
        ("let x: /* c\n */ T // d\n = 1",
         "let x      \n      // d\n = 1"),
        ("async function* f<T>(): AsyncGenerator<T> { yield <T>1 }",
         "async function* f   ()                    { yield    1 }"),
        ("a ? (b) : c => d",
         "a ? (b) : c => d"),
        ("a ? (b): c => d : e",
         "a ? (b)    => d : e"),
        ("switch (x as T) { case y as T: z!\n }",
         "switch (x     ) { case y     : z \n }"),
        ("do x as T\nwhile (y)",
         "do x;    \nwhile (y)"),
        ("while (x) y as T\n;[1]",
         "while (x) y     \n;[1]"),
        ("const o = { m<T>(this: X, a: T): T { return a }, get x(): T { return 1 }, async *[k]<T>() {} }",
         "const o = { m   (         a   )    { return a }, get x()    { return 1 }, async *[k]   () {} }"),
        ("(x as any) = 5",
         "(x       ) = 5"),
        ("[a as any, b!] = c",
         "[a       , b ] = c"),
        ("for (const [k, v] of Object.entries(x as Record<string, number>)) {}",
         "for (const [k, v] of Object.entries(x                          )) {}"),
        ("let x = y as any as T\n(z)",
         "let x = y       ;    \n(z)"),
        ("type\nFoo = 1",
         "type\nFoo = 1"),
        ("declare\nfoo",
         "declare\nfoo"),
        ("var x = a as T | U, y",
         "var x = a         , y"),
        ("if (a as T) b!\nelse c!",
         "if (a     ) b;\nelse c "),
        ("class A<in out T> {}",
         "class A           {}"),
        ("class A { static { let x: T } }",
         "class A { static { let x    } }"),
        ("class A { 'quoted'?: T; 123?: T; [a.b]?: T; #p?: T }",
         "class A { 'quoted'    ; 123    ; [a.b]    ; #p     }"),
        ("let x = (y: T) => z as W\n(q)",
         "let x = (y   ) => z;    \n(q)"),
        ("let v = a satisfies T ? b : c",
         "let v = a             ? b : c"),
        ("import { a } from './a' with { type: 'json' }",
         "import { a } from './a' with { type: 'json' }"),
        ("export const x = <const T,>(y: T) => y",
         "export const x =           (y   ) => y"),
        ("let a = b!\n++c",
         "let a = b;\n++c"),
        ("let a: T\n++c",
         "let a;  \n++c"),
        ("let a: T\n/x/.test(b)",
         "let a;  \n/x/.test(b)"),
        ("let a = class<T> implements I { x: T }",
         "let a = class                 { x    }"),
        ("new (foo as any)()",
         "new (foo       )()"),
        ("new A!()",
         "new A ()"),
        ("await (x as T)",
         "await (x     )"),
        ("(await x)!.y",
         "(await x) .y"),
        ("a!<b>(c)",
         "a    (c)"),
        ("f?.<T>(x)",
         "f?.   (x)"),
        ("interface A {}\n[1].map(x => x)",
         ";             \n[1].map(x => x)"),
        ("let x: typeof import('fs')",
         "let x                     "),
        ("x as unknown as {\n a: string\n}\n[0]",
         "x           ;    \n          \n \n[0]"),
        ("let x = await y as T",
         "let x = await y     "),
        ("with (a) { let b: T }",
         "with (a) { let b    }"),
        ("return 5 as number",
         "return 5          "),
        ("await x as T; return 1",
         "await x     ; return 1"),
    ];
    let mut mismatches = Vec::new();
    for (typescript, javascript) in table {
        let stripped = engine().strip_types(typescript).await.unwrap();
        if stripped != javascript {
            mismatches
                .push(format!("{typescript}\n  expected {javascript:?}\n  but got  {stripped:?}"));
        }
        assert_eq!(stripped.lines().count(), typescript.lines().count(), "{typescript}");
        // JavaScript stays unchanged.
        assert_eq!(engine().strip_types(javascript).await.unwrap(), javascript);
    }
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
    // The engine parses all of it as JavaScript, except modules, which a function cannot contain.
    let scripts: Vec<_> =
        table.iter().map(|(_, javascript)| javascript).filter(|it| !is_module(it)).collect();
    let check = format!(
        "{}.filter(source => {{ try {{ new Function(`return async function* () {{\n${{source}}\n}}`) }} catch (e) {{ return true }} }})",
        json!(scripts)
    );
    assert_eq!(value(&check).await, "[]");
}

#[tokio::test]
async fn javascript_is_unchanged() {
    for script in [
        include_str!("../../../guest/quickjs/src/prelude/console.js"),
        include_str!("../../../guest/quickjs/src/prelude/core.js"),
        include_str!("../../../guest/quickjs/src/prelude/events.js"),
        include_str!("../../../guest/quickjs/src/prelude/format.js"),
        include_str!("../../../guest/quickjs/src/prelude/modules.js"),
        include_str!("../../../guest/quickjs/src/prelude/names.js"),
        include_str!("../../../guest/quickjs/src/prelude/text.js"),
        include_str!("../../../guest/quickjs/src/prelude/tools.js"),
        include_str!("../../../guest/quickjs/src/prelude/url.js"),
        "",
        "\u{feff}'use strict'\r\nlet a = 1 // ü 😀\r\n",
        "var let_ = 010; with (Math) max(let_, 1) // only sloppy mode has these",
        "a < b; c > (d); e<f, g>h",
        "label: for (;;) { break label }\n/a/g\n`${`${1}`}`",
    ] {
        assert_eq!(engine().strip_types(script).await.as_deref(), Ok(script));
    }
}

fn is_module(source: &str) -> bool {
    source.contains("import ") || source.contains("export ")
}

#[tokio::test]
async fn unsupported_syntax_error_has_position_and_alternative() {
    #[rustfmt::skip]
    let table = [
        ("if (x) type A = string\nelse y", 1, 8, "Declaration cannot appear in a single-statement context: type A = string (Wrap this declaration in a block statement)"),
        ("enum E { A = f(), B }", 1, 19, "the enum member B needs a value: the one before it is not a constant number"),
        ("1 + 1 as number / 2", 1, 16, "Expected a semicolon or an implicit semicolon after a statement, but found none (Try inserting a semicolon here)"),
        ("a + b as T * c", 1, 11, "Expected a semicolon or an implicit semicolon after a statement, but found none (Try inserting a semicolon here)"),
        ("a as T < b", 1, 11, "Expected `>` but found `EOF` at the end of the source (`>` expected)"),
        ("import foo = require('foo')", 1, 1, "`import foo = …` is not supported; write `import foo from \"./file\"`, or `const foo = …` for an alias"),
        ("export = foo", 1, 1, "`export =` is not supported; write `export default …`"),
        ("namespace A { export const x = 1 }", 1, 1, "`namespace A` with values is not supported; write an object, `const A = { … }`, or a module file"),
        ("@dec class A {}", 1, 1, "decorators are not supported; call a function on the class or the method instead"),
        ("class A { @dec x = 1 }", 1, 11, "decorators are not supported; call a function on the class or the method instead"),
        ("class A { accessor x = 1 }", 1, 11, "`accessor` fields are not supported; write a getter and a setter, or a plain field"),
        ("const x = <div>hi</div>", 1, 19, "JSX is not supported; write the text with template literals, or call a function that builds it"),
        ("import A = B.C", 1, 1, "`import A = …` is not supported; write `import A from \"./file\"`, or `const A = …` for an alias"),
        ("label: type X = 1", 1, 8, "Declaration cannot appear in a single-statement context: type X = 1 (Wrap this declaration in a block statement)"),
        ("abstract\nclass", 2, 6, "Expected `{` but found `EOF` at the end of the source (`{` expected)"),
        ("let a = ;", 1, 9, "Unexpected token: ;"),
        ("let x: = 1", 1, 8, "Unexpected token: ="),
        ("function f( { }", 1, 16, "Expected `)` but found `EOF` at the end of the source (`)` expected)"),
        ("class {", 1, 8, "Expected `}` but found `EOF` at the end of the source (`}` expected)"),
        ("foo(", 1, 5, "Expected `)` but found `EOF` at the end of the source (`)` expected)"),
        ("let x = 'abc", 1, 9, "Unterminated string: 'abc"),
        ("const a: string = {", 1, 20, "Expected `}` but found `EOF` at the end of the source (`}` expected)"),
        ("interface X { a: string", 1, 24, "Expected `}` but found `EOF` at the end of the source (`}` expected)"),
        ("let a: number = 1 2", 1, 18, "Expected a semicolon or an implicit semicolon after a statement, but found none (Try inserting a semicolon here)"),
    ];
    for (typescript, line, column, message) in table {
        let expected = StripError::Syntax { message: message.to_owned(), line, column };
        assert_eq!(engine().strip_types(typescript).await, Err(expected), "{typescript}");
    }
}

/// TypeScript scripts with the values of the TypeScript compiler's output.
#[tokio::test]
async fn typescript_scripts_have_the_compilers_values() {
    for (script, expected) in [
        ("interface A { x: number }\nconst a: A = { x: 1 };\na.x", "1"),
        (
            "enum E { A, B = 5, C, D = 'd', F = B | 8 }\n[E.A, E.C, E[6], E.D, E.F, Object.keys(E).length]",
            r#"[0,6,"C","d",13,9]"#,
        ),
        ("enum E { A = 1 }\nenum E { B = A + 1 }\nE", r#"{"1":"A","2":"B","A":1,"B":2}"#),
        ("const f = (n: number) => { enum L { X = 3 } return L.X * n };\nf(2)", "6"),
        (
            "class P { z = 1; constructor(public x: number, private readonly y = 2) {} }\nnew P(5)",
            r#"{"x":5,"y":2,"z":1}"#,
        ),
        (
            "class A { constructor(protected n: number) {} }\nclass B extends A { constructor(n: number, public m: string) { super(n) } }\nnew B(1, 'm')",
            r#"{"n":1,"m":"m"}"#,
        ),
        (
            "class A { get: number\n foo() { return 1 } }\n[new A().foo(), 'get' in new A()]",
            "[1,true]",
        ),
        ("let x: number\n(globalThis as any).y = 2\nx", "undefined"),
        ("const v = [1, 2] as const satisfies readonly number[]\n;[v.length]", "[2]"),
        ("const id = <T,>(x: T): T => x\nid<string>('a')", "a"),
        ("function identity<T>(x: T) { return x }\nidentity<number>(3)", "3"),
        // These parse as JavaScript, where they would be comparisons.
        ("const identity = x => x; identity<string>('a')", "a"),
        ("const parse = JSON.parse; parse<{ a: number }>('{\"a\":4}').a", "4"),
        ("const i = 1, n = 2; i<n", "true"),
        ("async function main(): Promise<string> { return 'done' }\nmain()", "done"),
        ("const n: number = await later(1)\nreturn n + 1", "2"),
        (
            "function f(a: string): string;\nfunction f(a: number): number;\nfunction f(a: any) { return a }\nf(1)",
            "1",
        ),
        (
            "abstract class S { abstract area(): number; double() { return this.area() * 2 } }\nclass Q extends S { area(): number { return 4 } }\nnew Q().double()",
            "8",
        ),
        ("let s!: string\ns = 'x'\ns!.length", "1"),
        ("try { throw new Error('e') } catch (e: unknown) { (e as Error).message }", "e"),
        ("1 as any\ntype T = 1\ninterface I {}", "1"),
        ("const o = { m<T>(this: any, a?: T): T | undefined { return a } }\no.m(7)", "7"),
        (
            "for (const [k, v] of Object.entries({ a: 1 } as Record<string, number>)) print(`${k}=${v}`)",
            "undefined",
        ),
    ] {
        assert_eq!(value(script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn typescript_positions_match_the_source() {
    let script = "interface A {\n  x: number\n}\nfunction inner(a: A): never {\n  throw new TypeError(`bad ${a.x}`);\n}\nprint(new Error('here').stack);\ninner({ x: 1 } as A)";
    let outcome = run(script).await;
    assert!(outcome.output.contains("script.js:7:11)"), "{}", outcome.output);
    let Status::Threw { name, message, stack, .. } = outcome.status else {
        panic!("{:?}", outcome.status)
    };
    assert_eq!((name.as_str(), message.as_str()), ("TypeError", "bad 1"));
    assert!(stack.contains("inner (script.js:5:30)"), "{stack}");
    assert!(stack.contains("script.js:8:"), "{stack}");
}

#[tokio::test]
async fn invalid_source_has_the_typescript_parsers_error() {
    let (name, message, stack) = thrown("const a: number = 1;\nconst b: string = ;").await;
    assert_eq!((name.as_str(), message.as_str()), ("SyntaxError", "Unexpected token: ;"));
    assert_eq!(stack, "    at script.js:2:19");
    let (name, message, stack) = thrown("\nnamespace N { export const x: number = 1 }\nN.x").await;
    assert_eq!(name, "SyntaxError");
    assert!(message.contains("`const N = { … }`"), "{message}");
    assert_eq!(stack, "    at script.js:2:1");
    // Errors that only the engine finds are its own.
    let (name, message, stack) = thrown("let a: number = 1;\nlet a = 2;").await;
    assert_eq!(
        (name.as_str(), message.as_str()),
        ("SyntaxError", "invalid redefinition of lexical identifier")
    );
    assert!(stack.contains("script.js:2:"), "{stack}");
    let (_, message, _) = thrown("let a = 1;\nlet a = 2;").await;
    assert_eq!(message, "invalid redefinition of lexical identifier");
}

#[tokio::test]
async fn hostile_typescript_is_refused_quickly() {
    // Compiling the guest in a debug build takes longer than anything below.
    engine().strip_types("").await.unwrap();
    for (source, expected) in [
        ("[".repeat(100_000), "nested too deeply"),
        ("let a: ".to_owned() + &"x<".repeat(100_000), "nested too deeply"),
        (format!("let a: any = {}1", "1+".repeat(400_000)), "nested too deeply"),
        (format!("let a: any = {}1", "x=>".repeat(100_000)), "nested too deeply"),
        (format!("let a: any = {}", "{a:".repeat(100_000)), "nested too deeply"),
        (format!("let a: any = [{}]", "1,".repeat(8 << 20)), "too large"),
    ] {
        let began = Instant::now();
        match engine().strip_types(&source).await {
            Err(StripError::Syntax { message, .. }) => {
                assert!(message.contains(expected), "{message}")
            }
            other => panic!("{:?} of {}…", other.map(|text| text.len()), &source[..20]),
        }
        assert!(began.elapsed() < Duration::from_secs(15), "{}…", &source[..20]);
    }
    // The script gets the same kind of error as for any other source.
    let (name, message, _) = thrown(&format!("let a: any = {}1", "x=>".repeat(100_000))).await;
    assert_eq!(name, "SyntaxError");
    assert!(message.contains("nested too deeply"), "{message}");
    assert_eq!(value("let a: number = 1; a").await, "1");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excess_sources_wait_for_an_instance() {
    let strips = (0..64)
        .map(|i| tokio::spawn(async move { value(&format!("const n: number = {i}; n")).await }));
    for (i, stripped) in futures::future::join_all(strips).await.into_iter().enumerate() {
        assert_eq!(stripped.unwrap(), i.to_string());
    }
}
