//! Limits, and hostile scripts.

use super::*;

async fn with_limits(script: &str, limits: Limits) -> Outcome {
    engine().run(script, &TestHost::new(), &limits, CancellationToken::new()).await
}

fn short_cpu_limit() -> Limits {
    Limits { cpu: Duration::from_millis(100), ..test_limits() }
}

#[tokio::test]
async fn endless_computation_ends_at_the_cpu_limit() {
    for script in [
        "print('x');\nwhile (true) {}",
        "print('x');\ntry { for (;;) {} } finally { for (;;) {} }",
        "print('x');\n/(a+)+$/.test('a'.repeat(40) + 'b')",
        "print('x');\n[3, 1, 2].sort(() => { for (;;) {} })",
        "print('x');\nawait null; for (;;) {}",
        "print('x');\n(async () => { await null; for (;;) {} })(); await new Promise(() => {})",
        "print('x');\nfunction f() { return Promise.resolve().then(f) } await f()",
        "print('x');\nfor (;;) { try { for (;;) {} } catch {} }",
        "print('x');\nfor (;;) echo('y')",
        "print('x');\nArray.from({length: 1e9}, (_, i) => i)",
        "print('x');\nnew Set(function* () { for (;;) yield 1 }())",
        "print('x');\nJSON.stringify({toJSON() { for (;;) {} }})",
        "print('x');\n({toString() { for (;;) {} }}) + ''",
    ] {
        let limits = Limits { host_calls: u32::MAX, ..short_cpu_limit() };
        let outcome = with_limits(script, limits).await;
        let (limit, message) = exceeded(&outcome);
        if script.contains("Array.from") && limit == Limit::Memory {
            continue; // Which limit comes first depends on the machine.
        }
        assert_eq!(limit, Limit::Cpu, "{script}");
        assert!(message.contains("more than 100ms of CPU time"), "{message}");
        assert_eq!(outcome.output, "x\n", "{script}");
        assert!(
            outcome.cpu >= Duration::from_millis(100) && outcome.cpu < Duration::from_secs(2),
            "{script}: {:?}",
            outcome.cpu
        );
    }
    let outcome =
        with_limits("let i = 0;\nfunction spin() { for (;;) i++ }\nspin()", short_cpu_limit())
            .await;
    let Status::LimitExceeded { stack, .. } = outcome.status else { panic!() };
    assert_eq!(stack, "    at spin (script.js)\n    at <eval> (script.js:3:1)");
}

#[tokio::test]
async fn pages_of_a_heavy_run_are_released() {
    // If tests share a process, its memory says nothing about one test.
    if std::env::var_os("NEXTEST").is_none() {
        return;
    }
    // The written pages of the guest. It is mapped from its cache file, or from memory in the
    // process that has just compiled it.
    let written = || {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let sizes = maps.split("\n").scan(false, |is_image, line| {
            if line.split_whitespace().next().is_some_and(|first| first.contains('-')) {
                *is_image = line.contains(".cwasm") || line.contains("memfd:wasm-memory-image");
            }
            let size = line.strip_prefix("Private_Dirty:").filter(|_| *is_image);
            Some(size.map_or(0, |size| size.trim().trim_end_matches(" kB").parse::<u64>().unwrap()))
        });
        sizes.sum::<u64>()
    };
    let run = async |script: &str| {
        let outcome = with_limits(script, test_limits()).await;
        assert!(matches!(outcome.status, Status::Completed { .. }), "{outcome:?}");
    };
    // The first runs take longer than light ones: nothing of the guest is in memory yet.
    let mut light = 0;
    for _ in 0..100 {
        run("1 + 1").await;
        light = light.max(written());
    }
    assert!(light > 0, "no pages stay with a slot");
    run("const all = []; for (let i = 0; i < 200000; i++) all.push({i}); all.length").await;
    run("1 + 1").await;
    assert!(written() <= light + 64, "{} KiB, and {light} before", written());
}

#[tokio::test]
async fn time_in_tools_is_not_cpu_time() {
    let outcome = with_limits("await later(300); 'slept'", short_cpu_limit()).await;
    assert_eq!(outcome.status, Status::Completed { value: Value::Json("\"slept\"".to_owned()) });
    assert!(outcome.cpu < Duration::from_millis(100), "{:?}", outcome.cpu);
}

/// Simulates a machine whose processors are busy while a tool works.
#[tokio::test]
async fn idle_tool_time_does_not_reduce_cpu_time() {
    let cpu = async |ms: u32| {
        let script = format!(
            "for (let n = 0; n < 40; n++) {{ for (let i = 0; i < 10000; i++); block({ms}) }}"
        );
        with_limits(&script, test_limits()).await.cpu
    };
    let (without, with) = (cpu(0).await, cpu(5).await);
    assert!(with > without / 2, "{with:?} with waits, {without:?} without");
}

#[tokio::test]
async fn waiting_ends_at_the_wall_limit_with_the_calls() {
    let limits = Limits { wall: Duration::from_millis(100), ..test_limits() };
    let outcome = with_limits("print('x'); tools.later(5000); hang()", limits.clone()).await;
    let (limit, message) = exceeded(&outcome);
    assert_eq!(limit, Limit::Wall);
    assert!(message.contains("longer than 100ms"), "{message}");
    assert!(message.contains("waiting for: hang, later."), "{message}");
    assert_eq!(outcome.output, "x\n");
    let outcome =
        with_limits("setInterval(() => {}, 1); await new Promise(() => {})", limits).await;
    assert_eq!(exceeded(&outcome).0, Limit::Wall);
}

#[tokio::test]
async fn memory_limit_error_can_be_caught() {
    for script in [
        "let s = 'x'; for (;;) s = `${s}${s}`.toUpperCase()",
        "const a = []; for (;;) a.push(new Uint8Array(1 << 20))",
        "const a = []; for (;;) a.push({})",
        "new ArrayBuffer(1e9)",
        "const m = new Map(); for (let i = 0; ; i++) m.set(i, 'x'.repeat(1000) + i)",
        "let o = {}; for (;;) o = {o}",
        "print('y'.repeat(60 << 20) + 'ü')",
        "btoa('x'.repeat(40 << 20))",
        "JSON.stringify(new Array(1e7).fill('long enough'))",
    ] {
        let outcome = with_limits(&format!("print('x');\n{script}"), test_limits()).await;
        let (limit, message) = exceeded(&outcome);
        assert_eq!(limit, Limit::Memory, "{script}");
        assert!(message.contains("64 MiB"), "{message}");
        assert!(outcome.output.starts_with("x\n"), "{script}");
        let caught = with_limits(
            &format!("try {{ (() => {{ {script} }})() }} catch (e) {{ 'caught' }}"),
            test_limits(),
        )
        .await;
        assert_eq!(
            caught.status,
            Status::Completed { value: Value::Json("\"caught\"".to_owned()) },
            "{script}"
        );
    }
    let small = Limits { memory_bytes: 8 << 20, ..test_limits() };
    assert_eq!(exceeded(&with_limits("new Uint8Array(10 << 20)", small).await).0, Limit::Memory);
    let large = Limits { memory_bytes: 128 << 20, ..test_limits() };
    assert_eq!(
        with_limits("new Uint8Array(100 << 20).length", large).await.status,
        Status::Completed { value: Value::Json("104857600".to_owned()) }
    );
}

#[tokio::test]
async fn cyclic_garbage_is_collected() {
    let script = |mib: u32| {
        format!(
            "for (let i = 0; i < {mib} * 1024; i++) {{ const a = {{text: i + 'x'.repeat(1000)}}; a.a = a; }} 'done'"
        )
    };
    for memory in [8, 16, 64] {
        let limits = Limits { memory_bytes: memory << 20, ..test_limits() };
        let outcome = with_limits(&script(3 * memory as u32), limits).await;
        assert_eq!(
            outcome.status,
            Status::Completed { value: Value::Json("\"done\"".to_owned()) },
            "{memory} MiB"
        );
    }
}

#[tokio::test]
async fn waiting_script_uses_only_its_changed_pages() {
    const WAITING: usize = 100;
    /// The pages of the guest are about 200 of it.
    const MAX_KIB: usize = 320;
    // If tests share a process, its memory says nothing about one test.
    if std::env::var_os("NEXTEST").is_none() {
        return;
    }
    // Counts shared pages once.
    let memory = || {
        let rollup = std::fs::read_to_string("/proc/self/smaps_rollup").unwrap();
        let line = rollup.lines().find_map(|line| line.strip_prefix("Pss:")).unwrap();
        line.trim().trim_end_matches("kB").trim().parse::<usize>().unwrap()
    };
    let host = BootedToolsHost {
        tools: crate::tool_table(),
        waiting: Barrier::new(WAITING + 1),
        release: Barrier::new(WAITING + 1),
    };
    let limits = test_limits();
    let run = |script| engine().run(script, &host, &limits, CancellationToken::new());
    assert!(matches!(run("pwd()").await.status, Status::Completed { .. }));
    let before = memory();
    let scripts = futures::future::join_all(
        (0..WAITING).map(|_| run("const text = 'x'.repeat(100); read_file(text)")),
    );
    let measure = async {
        host.waiting.wait().await;
        let each = memory().saturating_sub(before) / WAITING;
        host.release.wait().await;
        each
    };
    let (ended, each) = futures::join!(scripts, measure);
    assert!(
        ended.iter().all(|outcome| matches!(outcome.status, Status::Completed { .. })),
        "{:?}",
        ended[0]
    );
    println!("{each} KiB each");
    assert!((40..MAX_KIB).contains(&each), "a waiting script takes {each} KiB");
}

/// A host with the tools that the guest was booted with; `read_file` waits.
struct BootedToolsHost {
    tools: ToolTable,
    waiting: Barrier,
    release: Barrier,
}

impl Host for BootedToolsHost {
    fn declare(&self) -> &ToolTable {
        &self.tools
    }

    fn call<'a>(&'a self, call: HostCall) -> BoxFuture<'a, Result<Json, ToolError>> {
        Box::pin(async move {
            if call.name == "read_file" {
                self.waiting.wait().await;
                self.release.wait().await;
            }
            Ok(Json::Null)
        })
    }

    fn now(&self) -> jiff::Timestamp {
        jiff::Timestamp::UNIX_EPOCH
    }

    fn seed(&self) -> [u8; 32] {
        [1; 32]
    }
}

#[tokio::test]
async fn script_larger_than_memory_hits_the_memory_limit() {
    let outcome = with_limits(&" ".repeat(70 << 20), test_limits()).await;
    assert_eq!(exceeded(&outcome).0, Limit::Memory);
}

#[tokio::test]
async fn deep_recursion_throws_a_catchable_error() {
    for script in [
        "(function f() { return 1 + f() })()",
        "(function f() { [2, 1].sort(f) })()",
        "const o = {toJSON() { return JSON.stringify(o) }}; JSON.stringify(o)",
        "let o = []; for (let i = 0; i < 100000; i++) o = [o]; JSON.stringify(o)",
        "const p = new Proxy({}, {get(t, k, r) { return r[k] }}); p.x",
        "let p = {}; for (let i = 0; i < 100000; i++) p = new Proxy(p, {}); p.x",
        "(0, eval)('('.repeat(100000) + '1' + ')'.repeat(100000))",
        "(0, eval)('`${'.repeat(50000) + '1' + '}`'.repeat(50000))",
        "(0, eval)('x=>'.repeat(100000) + '1')",
        "JSON.parse('['.repeat(100000) + ']'.repeat(100000))",
        "new RegExp('(?:'.repeat(50000) + ')'.repeat(50000))",
        "(function f() { return 'a'.replace(/a/, f) })()",
        "(function f() { echo('x'); return f() })()",
        "const o = {toString() { return '' + o }}; '' + o",
        "function* g() { yield* g() } [...g()]",
        "const o = {get x() { return o.x }}; o.x",
    ] {
        let (name, message, _) = thrown(script).await;
        assert!(
            (name == "RangeError" && message.contains("stack"))
                || (name == "SyntaxError" && message.contains("stack")),
            "{script}: {name}: {message}"
        );
        assert_eq!(
            value(&format!("try {{ {script} }} catch (e) {{ 'caught' }}")).await,
            "caught",
            "{script}"
        );
    }
    // Formatting handles depth as well.
    assert_eq!(
        value("let o = []; for (let i = 0; i < 100000; i++) o = [o]; o").await,
        "[[[[[[[Array]]]]]]]"
    );
}

#[tokio::test]
async fn output_is_cut_and_the_run_continues() {
    let limits = Limits { output_bytes: 1000, ..test_limits() };
    let outcome = with_limits(
        "for (let i = 0; i < 1000; i++) print('0123456789'); print('ü'); 'end'",
        limits.clone(),
    )
    .await;
    assert_eq!(outcome.output.len(), 1000);
    assert_eq!(outcome.output_dropped, 11_000 + 3 - 1000);
    assert_eq!(outcome.status, Status::Completed { value: Value::Json("\"end\"".to_owned()) });
    let outcome = with_limits("print('x'.repeat(10 << 20))", limits.clone()).await;
    assert_eq!((outcome.output.len(), outcome.output_dropped), (1000, (10 << 20) + 1 - 1000));
    // Characters are not cut in two.
    let outcome = with_limits("print('x' + 'ü'.repeat(1000))", limits).await;
    assert_eq!(outcome.output.chars().filter(|&c| c == 'ü').count(), 499);
    assert_eq!(outcome.output.len(), 999);
    assert_eq!(run("print('\\ud800')").await.output, "\u{fffd}\u{fffd}\u{fffd}\n");
}

#[tokio::test]
async fn too_large_value_hits_the_result_limit() {
    let outcome = run("'x'.repeat(20 << 20)").await;
    let (limit, message) = exceeded(&outcome);
    assert_eq!(limit, Limit::Result);
    assert!(message.contains("20971522 bytes, more than the 1048576 allowed"), "{message}");
    // A long error is cut, not refused.
    let (_, message, _) = thrown("throw new Error('x'.repeat(1 << 20))").await;
    assert!(message.ends_with("… (1048576 characters)"), "{}", &message[message.len() - 40..]);
}

#[tokio::test]
async fn host_calls_are_limited() {
    let limits = Limits { host_calls: 100, ..test_limits() };
    let outcome = with_limits("for (let i = 0; i < 100; i++) echo(i)", limits.clone()).await;
    assert!(matches!(outcome.status, Status::Completed { .. }));
    assert_eq!(outcome.host_calls, 100);
    for script in [
        "print('x'); for (;;) { try { echo(1) } catch {} }",
        "print('x'); for (;;) tools.hang()",
        "print('x'); await Promise.all(Array.from({length: 101}, () => tools.echo(1)))",
        "print('x'); setInterval(() => {}, 0); await new Promise(() => {})",
    ] {
        let outcome =
            with_limits(script, Limits { cpu: Duration::from_secs(2), ..limits.clone() }).await;
        match exceeded(&outcome).0 {
            Limit::HostCalls => {}
            // Calls that wait for a slot stay in the guest until its own limits end it.
            Limit::Cpu | Limit::Memory if script.contains("hang") => {}
            other => panic!("{script}: {other:?}"),
        }
        assert_eq!(outcome.output, "x\n");
    }
}

#[tokio::test]
async fn large_arguments_and_results_throw_catchable_errors() {
    let limits = Limits { call_bytes: 1000, ..test_limits() };
    for (script, name) in [
        ("echo('x'.repeat(2000))", "CallArgumentsLimitExceeded"),
        ("await tools.echo('x'.repeat(2000))", "CallArgumentsLimitExceeded"),
        ("large(2000)", "CallResultLimitExceeded"),
        ("await tools.large(2000)", "CallResultLimitExceeded"),
    ] {
        let outcome = with_limits(
            &format!("try {{ {script} }} catch (e) {{ [e.name, e.message.includes('more than the 1000 allowed')] }}"),
            limits.clone(),
        )
        .await;
        assert_eq!(
            outcome.status,
            Status::Completed { value: Value::Json(format!(r#"["{name}",true]"#)) },
            "{script}"
        );
    }
    let small = Limits { memory_bytes: 8 << 20, call_bytes: 64 << 20, ..test_limits() };
    let outcome = with_limits("try { large(20 << 20) } catch (e) { e.name }", small.clone()).await;
    assert_eq!(
        outcome.status,
        Status::Completed { value: Value::Json("\"RangeError\"".to_owned()) }
    );
    assert_eq!(exceeded(&with_limits("await tools.large(20 << 20)", small).await).0, Limit::Memory);
}

#[tokio::test]
async fn unreadable_arguments_throw_catchable_errors() {
    assert_eq!(value("try { echo('\\ud800') } catch (e) { e.name }").await, "TypeError");
    assert_eq!(
        value("let o = []; for (let i = 0; i < 500; i++) o = [o]; try { echo(o) } catch (e) { e.name }").await,
        "TypeError"
    );
    assert_eq!(thrown("echo(1n)").await.0, "TypeError");
    assert_eq!(thrown("const o = {}; o.o = o; echo([o])").await.0, "TypeError");
}

#[test]
fn damaged_compiled_code_is_not_used() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().join("cache");
    let _compiled = engine();
    copy_dir(&cache_dir(), &dir);
    // An intact file is used as it is, without compilation.
    Engine::new(&dir, EngineConfig { instances: 1, ..EngineConfig::default() }).unwrap();
    let files: Vec<_> =
        std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    for file in
        files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "cwasm"))
    {
        let mut bytes = std::fs::read(file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(file, bytes).unwrap();
    }
    let wasmtime = wasmtime::Engine::new(&engine::wasmtime_config(&EngineConfig {
        instances: 1,
        ..EngineConfig::default()
    }))
    .unwrap();
    assert!(cache::find(&wasmtime, &dir, &cache::QUICKJS).unwrap().is_none());
}

#[test]
fn cache_folder_writable_by_others_is_refused() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let error = Engine::new(dir.path(), EngineConfig { instances: 1, ..EngineConfig::default() })
        .unwrap_err();
    assert!(matches!(error, Error::CacheNotPrivate { .. }), "{error:?}");
}

fn copy_dir(from: &Path, to: &Path) {
    use std::os::unix::fs::DirBuilderExt as _;
    std::fs::DirBuilder::new().mode(0o700).create(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        if entry.path().extension().is_some_and(|extension| extension == "cwasm") {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}
