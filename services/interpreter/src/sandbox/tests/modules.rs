//! Modules: `import`, `export`, and missing modules.

use super::*;

async fn run_with(
    files: &[(&'static str, &'static str)],
    script: &str,
) -> (Outcome, Vec<(u32, String, Json)>) {
    let host = TestHost { files: files.iter().copied().collect(), ..TestHost::new() };
    let outcome = run_on(&host, script).await;
    let calls = host.calls();
    (outcome, calls)
}

/// The value of a script that must complete.
async fn value_with(files: &[(&'static str, &'static str)], script: &str) -> String {
    match run_with(files, script).await.0.status {
        Status::Completed { value } => value.display().into_owned(),
        other => panic!("{script}\n{other:?}"),
    }
}

async fn thrown_with(
    files: &[(&'static str, &'static str)],
    script: &str,
) -> (String, String, String) {
    match run_with(files, script).await.0.status {
        Status::Threw { name, message, stack, .. } => (name, message, stack),
        other => panic!("{script}\n{other:?}"),
    }
}

const FILES: &[(&str, &str)] = &[
    (
        "lib.ts",
        "export interface Point { x: number }\nexport const double = (n: number): number => n * 2\nexport enum E { A = 4 }",
    ),
    ("plain.js", "export default 'plain'; export let n = 1; export function up() { n++ }"),
    (
        "deep/a.ts",
        "import { b } from './b.js'\nimport { double } from '../lib.ts'\nexport const a: number = double(b)",
    ),
    ("deep/b.js", "export const b = await later(3)"),
    ("data.json", "{\"__proto__\": 1, \"list\": [1, 2]}"),
    ("broken.json", "{\"a\": }"),
    (
        "cycle1.js",
        "import { two } from './cycle2.js'; export const one = () => two; export const seen = 'seen'",
    ),
    ("cycle2.js", "import { seen } from './cycle1.js'; export const two = () => seen"),
    ("throws.ts", "const n: number = 1\n\nthrow new Error('in the module')"),
    ("wrong.ts", "export const a: string = ;"),
    ("missing.js", "import './nowhere.js'"),
    ("script.js", "export default 'not the running one'"),
    ("calls.js", "export const text = echo('from a module').text"),
    ("types.ts", "export interface Only { x: number }\nexport type Other = string"),
];

#[tokio::test]
async fn script_with_import_or_export_is_a_module() {
    for (script, expected) in [
        ("import { double } from './lib.ts'\nexport default double(4)", "8"),
        (
            "import { double, E, type Point } from './lib'\nconst p: Point = { x: double(E.A) }\nexport default p",
            r#"{"x":8}"#,
        ),
        (
            "import plain, { n, up } from './plain.js'; up(); up(); export default [plain, n]",
            r#"["plain",3]"#,
        ),
        (
            "import * as all from './plain.js'; export default Object.keys(all)",
            r#"["default","n","up"]"#,
        ),
        ("import { a } from './deep/a.ts'; export default a", "6"),
        (
            "import data from './data.json'; export default [data.list, Object.keys(data)]",
            r#"[[1,2],["__proto__","list"]]"#,
        ),
        ("import data from './data.json' with { type: 'json' }; export default data.list", "[1,2]"),
        ("import { one } from './cycle1.js'; export default one()()", "seen"),
        ("import './plain.js'", "undefined"),
        ("export const x = 1", "undefined"),
        ("const n = await later(2); export default n", "2"),
        ("export default later(5)", "5"),
        ("export default (async () => 'awaited')()", "awaited"),
        ("import other from './script.js'; export default other", "not the running one"),
        ("import { text } from './calls.js'; export default text", "from a module"),
        (
            "import type { Point } from './nowhere'\nlet p: Point | undefined\n'a script, not a module'",
            "a script, not a module",
        ),
        (
            "import { Only, Other } from './types'\nexport default ((o: Only): Other => `${o.x}`)({ x: 1 })",
            "1",
        ),
        ("export interface A {}\nexport type B = A\n7", "7"),
    ] {
        assert_eq!(value_with(FILES, script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn any_script_can_import_dynamically() {
    for (script, expected) in [
        ("const { double } = await import('./lib.ts'); double(3)", "6"),
        ("(await import('./data.json')).default.list", "[1,2]"),
        (
            "const [x, y] = await Promise.all([import('./plain.js'), import('./plain.js')]); x === y",
            "true",
        ),
        ("const m = await import('./deep/a'); return m.a", "6"),
        ("await import('./nowhere.js').catch(e => e.name)", "FileNotFound"),
        ("await import('fs').catch(e => e.name)", "TypeError"),
    ] {
        assert_eq!(value_with(FILES, script).await, expected, "{script}");
    }
}

#[tokio::test]
async fn each_module_path_is_read_by_one_numbered_call() {
    let script = "import { a } from './deep/a.ts'\nimport { double } from './lib'\necho('x')\nawait import('./lib.ts')\nexport default a";
    let (outcome, calls) = run_with(FILES, script).await;
    assert_eq!(outcome.status, Status::Completed { value: Value::Json("6".to_owned()) });
    let import = |number, path: &str| (number, "import".to_owned(), json!({ "path": path }));
    assert_eq!(
        calls,
        [
            import(1, "deep/a.ts"),
            import(2, "deep/b.js"),
            import(3, "lib.ts"),
            import(4, "lib"),
            (5, "later".to_owned(), json!({"ms": 3})),
            (6, "echo".to_owned(), json!({"text": "x"})),
        ]
    );
    assert_eq!(outcome.host_calls, 6);
    // A replay makes the same calls with the same numbers.
    assert_eq!(run_with(FILES, script).await.1, calls);
}

#[tokio::test]
async fn errors_in_modules_have_file_and_line() {
    for (script, name, message, place) in [
        ("import './throws.ts'", "Error", "in the module", "throws.ts:3:"),
        ("import { a } from './wrong.ts'", "SyntaxError", "Unexpected token: ;", "wrong.ts:1:26"),
        ("import './broken.json'", "SyntaxError", "broken.json is not JSON: ", ""),
        ("import './missing.js'", "FileNotFound", "there is no nowhere.js", ""),
        ("import '../out.js'", "FileNotFound", "there is no ../out.js", ""),
        (
            "import { nothing } from './lib.ts'",
            "SyntaxError",
            "Could not find export 'nothing' in module 'lib.ts'",
            "",
        ),
        (
            "import { double } from './lib.ts'\nexport default double(",
            "SyntaxError",
            "Expected `)`",
            "script.js:2:23",
        ),
        ("export default 1;\nlet a; let a", "SyntaxError", "invalid redefinition", "script.js:2:"),
    ] {
        let (thrown, text, stack) = thrown_with(FILES, script).await;
        assert_eq!(thrown, name, "{script}: {text}");
        assert!(text.contains(message), "{script}: {text}");
        assert!(stack.contains(place), "{script}: {stack}");
    }
}

#[tokio::test]
async fn limits_apply_in_modules() {
    let files = [
        ("spin.js", "export function spin() { for (;;) {} }"),
        (
            "bomb.ts",
            "export const a: string[] = []\nfor (;;) a.push('x'.repeat(1 << 20) + a.length)",
        ),
    ];
    let host = TestHost { files: files.into_iter().collect(), ..TestHost::new() };
    let limits = Limits { cpu: Duration::from_millis(100), ..test_limits() };
    let outcome = engine()
        .run("import { spin } from './spin.js'\nspin()", &host, &limits, CancellationToken::new())
        .await;
    assert_eq!(exceeded(&outcome).0, Limit::Cpu);
    let Status::LimitExceeded { stack, .. } = outcome.status else { panic!() };
    assert!(
        stack.starts_with("    at spin (spin.js)\n    at <anonymous> (script.js:2:"),
        "{stack}"
    );
    assert_eq!(exceeded(&run_on(&host, "await import('./bomb.ts')").await).0, Limit::Memory);
    let calls = Limits { host_calls: 1, ..test_limits() };
    let outcome = engine()
        .run("import './spin.js'\nimport './bomb.ts'", &host, &calls, CancellationToken::new())
        .await;
    assert_eq!(exceeded(&outcome).0, Limit::HostCalls);
}

#[tokio::test]
async fn missing_module_error_says_what_to_use() {
    for (specifier, hint) in [
        ("fs", "Files are read and written by the tools read_file."),
        ("node:fs/promises", "Files are read and written by the tools read_file."),
        ("child_process", "Scripts import files of the workspace"),
        ("path", "join them with template literals"),
        ("crypto", "crypto.randomUUID"),
        ("lodash", "the methods of Array"),
        ("left-pad", "There are no packages"),
        ("@scope/package", "There are no packages"),
        ("https://esm.sh/zod", "Code is not loaded from elsewhere"),
        ("data:text/javascript,1", "Code is not loaded from elsewhere"),
        ("/etc/passwd", "begins with ./ or ../"),
        ("lib.ts", "write \"./lib.ts\""),
        ("", "There are no packages"),
    ] {
        for script in
            [format!("import x from {specifier:?}"), format!("await import({specifier:?})")]
        {
            let (name, message, _) = thrown_with(FILES, &script).await;
            assert_eq!(name, "TypeError", "{script}: {message}");
            assert!(
                message.starts_with(&format!("There is no module {specifier:?}. ")),
                "{script}: {message}"
            );
            assert!(message.contains(hint), "{script}: {message}");
        }
    }
    assert_eq!(value("typeof require").await, "undefined");
    let (name, message, _) = thrown("const fs = require('fs')").await;
    assert_eq!(name, "ReferenceError");
    assert!(
        message.starts_with("require is not defined. There are no CommonJS modules"),
        "{message}"
    );
    assert!(message.contains("read_file"), "{message}");
}

#[tokio::test]
async fn imported_files_of_a_script_are_limited() {
    let mut host = TestHost::new();
    let names: Vec<&'static str> = (0..300).map(|i| &*format!("m{i}.js").leak()).collect();
    host.files = names.iter().map(|name| (*name, "export default 1")).collect();
    let script = "let n = 0; try { for (; n < 300; n++) await import(`./m${n}.js`) } catch (e) { [n, e.name, e.message] }";
    let outcome = run_on(&host, script).await;
    let expected = r#"[256,"ModuleLimitExceeded","A script imports at most 256 files: put several into one."]"#;
    assert_eq!(outcome.status, Status::Completed { value: Value::Json(expected.to_owned()) });
    assert_eq!(host.calls().len(), 256);
}
