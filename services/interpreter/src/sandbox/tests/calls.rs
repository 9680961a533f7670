//! Tool calls, concurrency, timers, cancellation.

use super::*;

#[tokio::test]
async fn arguments_are_positional_named_or_both() {
    for (call, expected) in [
        ("echo('a', 1, 20)", json!({"text": "a", "first": 1, "last": 20})),
        ("echo({text: 'a', last: 3})", json!({"text": "a", "last": 3})),
        ("echo('a', {last: 3})", json!({"text": "a", "last": 3})),
        ("echo('a', undefined, 3)", json!({"text": "a", "last": 3})),
        ("echo()", json!({})),
        ("echo({})", json!({})),
        ("echo('a', undefined)", json!({"text": "a"})),
        ("echo([1, 2])", json!({"text": [1, 2]})),
        ("echo({unknown: 1})", json!({"unknown": 1})),
        ("run('ls', {cwd: 'x'})", json!({"command": "ls", "options": {"cwd": "x"}})),
        ("run({command: 'ls', options: {}})", json!({"command": "ls", "options": {}})),
        ("configure({depth: 1})", json!({"options": {"depth": 1}})),
        ("configure({options: {depth: 1}})", json!({"options": {"depth": 1}})),
        (
            "configure({options: {depth: 1}, other: 2})",
            json!({"options": {"options": {"depth": 1}, "other": 2}}),
        ),
        ("configure({depth: 1}, 'n')", json!({"options": {"depth": 1}, "name": "n"})),
        ("configure({depth: 1}, {name: 'n'})", json!({"options": {"depth": 1}, "name": "n"})),
    ] {
        assert_eq!(value(call).await, expected.to_string(), "{call}");
        assert_eq!(
            value(&format!("await tools.{call}")).await,
            expected.to_string(),
            "tools.{call}"
        );
    }
    let (name, message, _) = thrown("echo(1, 2, 3, 4)").await;
    assert_eq!(name, "TypeError");
    assert_eq!(message, "echo takes at most 3 arguments (text, first, last), but 4 were given");
    let (_, message, _) = thrown("echo('a', {text: 'b'})").await;
    assert_eq!(message, "echo: text is given twice, by position and by name");
}

#[tokio::test]
async fn tool_error_has_its_properties() {
    let script = "try { fail() } catch (e) { [e instanceof Error, e.name, e.message, e.code, e.details, Object.keys(e)] }";
    let expected = r#"[true,"FileNotFound","there is no a.txt","ENOENT",{"near":["b.txt"]},[]]"#;
    assert_eq!(value(script).await, expected);
    assert_eq!(value(&script.replace("fail()", "await tools.fail()")).await, expected);
    assert_eq!(
        value("try { fail('RangeError') } catch (e) { e instanceof RangeError }").await,
        "true"
    );
    for script in ["let a = 1;\n\nfail()", "let a = 1;\n\nawait tools.fail()"] {
        let Status::Threw { name, message, stack, code, details } = run(script).await.status else {
            panic!()
        };
        assert_eq!((name.as_str(), message.as_str()), ("FileNotFound", "there is no a.txt"));
        assert_eq!((code.as_deref(), details), (Some("ENOENT"), Some(json!({"near": ["b.txt"]}))));
        assert!(stack.contains("script.js:3:"), "{script}: {stack}");
    }
}

#[tokio::test]
async fn calls_through_tools_run_concurrently() {
    // Each of the three waits for the other two.
    assert_eq!(
        value("await Promise.all([tools.meet(), tools.meet(), tools.meet()])").await,
        r#"["met","met","met"]"#
    );
    // They continue while the script is blocked in an immediate call.
    assert_eq!(
        value("const a = tools.meet(), b = tools.meet(); meet(); [await a, await b]").await,
        r#"["met","met"]"#
    );
    // A tool that is not immediate returns a promise under its own name too. Awaiting an immediate
    // one is fine.
    assert_eq!(
        value("[later(1) instanceof Promise, await later(2), await echo('x')]").await,
        r#"[true,2,{"text":"x"}]"#
    );
    assert_eq!(
        value("(await Promise.allSettled([tools.fail(), tools.echo(1)])).map(r => r.status)").await,
        r#"["rejected","fulfilled"]"#
    );
    assert_eq!(value("await Promise.race([tools.hang(), tools.later(1)])").await, "1");
}

#[tokio::test]
async fn excess_concurrent_calls_wait_in_order() {
    let host = TestHost::new();
    let outcome = run_on(
        &host,
        "(await Promise.all(Array.from({length: 500}, (_, i) => tools.echo(i)))).length",
    )
    .await;
    assert_eq!(outcome.status, Status::Completed { value: Value::Json("500".to_owned()) });
    let numbers: Vec<_> = host.calls().iter().map(|call| call.0).collect();
    assert_eq!(numbers, (1..=500).collect::<Vec<_>>());
}

#[tokio::test]
async fn maximum_timers_leave_room_for_calls() {
    // A delay can run code that sets further timers, after the timers were counted.
    let script = "
        let depth = 0;
        const nested = { valueOf() { if (++depth < 20) setTimeout(() => {}, nested); return 1e6 } };
        for (let i = 0; i < 999; i++) setTimeout(() => {}, 1e6);
        setTimeout(() => {}, nested);
        (await Promise.all(Array.from({length: 500}, () => tools.later(1)))).length";
    let outcome = run(script).await;
    assert_eq!(outcome.status, Status::Completed { value: Value::Json("500".to_owned()) });
    assert!(
        outcome.notes[0].starts_with("1019 calls or timers had not ended"),
        "{:?}",
        outcome.notes
    );
}

#[tokio::test]
async fn calls_are_numbered_in_the_order_of_the_script() {
    let script = "const a = tools.later(20), b = tools.echo('b'); echo('c'); setTimeout(() => {}, 1); await tools.echo('d'); await a; await b";
    let mut runs = Vec::new();
    for _ in 0..5 {
        let host = TestHost::new();
        run_on(&host, script).await;
        runs.push(
            host.calls().into_iter().map(|(number, _, args)| (number, args)).collect::<Vec<_>>(),
        );
    }
    for calls in &mut runs {
        calls.sort_by_key(|call| call.0);
    }
    let expected = vec![
        (1, json!({"ms": 20})),
        (2, json!({"text": "b"})),
        (3, json!({"text": "c"})),
        (5, json!({"text": "d"})),
    ];
    assert_eq!(runs, vec![expected; 5]);
}

#[tokio::test]
async fn host_determines_the_order_of_ends() {
    let script = "const order = []; await Promise.all([1, 2, 3].map(i => tools.echo(i).then(() => order.push(i)))); order";
    assert_eq!(value(script).await, "[1,2,3]");
    let host = TestHost::new();
    *host.order.lock().unwrap() = vec![3, 1, 2];
    assert_eq!(
        run_on(&host, script).await.status,
        Status::Completed { value: Value::Json("[3,1,2]".to_owned()) }
    );
    assert_eq!(*host.settled.lock().unwrap(), [3, 1, 2]);
}

#[tokio::test]
async fn unawaited_calls_are_dropped_and_noted() {
    let host = TestHost::new();
    let outcome = run_on(
        &host,
        "const p = tools.hang(); setTimeout(() => {}, 100000); await later(1); 'end'",
    )
    .await;
    assert_eq!(outcome.status, Status::Completed { value: Value::Json("\"end\"".to_owned()) });
    assert_eq!(host.dropped.load(Ordering::SeqCst), 1);
    assert_eq!(outcome.notes.len(), 1);
    assert!(outcome.notes[0].starts_with("2 calls or timers had not ended"), "{:?}", outcome.notes);
    assert!(outcome.notes[0].contains("(hang, timer)"), "{:?}", outcome.notes);
    assert_eq!(
        run("setTimeout(() => {}, 1000); clearTimeout(1); 1").await.notes,
        Vec::<String>::new()
    );
}

#[tokio::test]
async fn unhandled_errors_are_noted() {
    let outcome =
        run("Promise.reject(new RangeError('lost')); (async () => { await null; fail() })(); await later(1); 'end'")
            .await;
    assert_eq!(outcome.status, Status::Completed { value: Value::Json("\"end\"".to_owned()) });
    assert_eq!(outcome.notes.len(), 2, "{:?}", outcome.notes);
    assert!(outcome.notes[0].contains("RangeError: lost\n    at"), "{:?}", outcome.notes);
    assert!(outcome.notes[1].contains("FileNotFound: there is no a.txt"), "{:?}", outcome.notes);
    let outcome =
        run("setTimeout(() => { throw new Error('in a timer') }, 1); await later(20)").await;
    assert!(outcome.notes[0].contains("Error: in a timer"), "{:?}", outcome.notes);
    // The error that ends the run is not noted as well.
    for script in [
        "await Promise.reject(new Error('x'))",
        "async function main() { throw new Error('x') }\nmain()",
        "return Promise.reject(1)",
    ] {
        let outcome = run(script).await;
        assert!(matches!(outcome.status, Status::Threw { .. }), "{script}");
        assert_eq!(outcome.notes, Vec::<String>::new(), "{script}");
    }
    // An error that is handled later is not noted.
    assert_eq!(
        run("const p = tools.fail(); await later(5); await p.catch(() => 1)").await.notes,
        Vec::<String>::new()
    );
}

#[tokio::test]
async fn timers_fire_in_order_and_can_be_cleared() {
    let script = r#"
        const seen = [];
        setTimeout((x) => seen.push(x), 20, 'late'); setTimeout(() => seen.push('soon'), 1);
        const cleared = setTimeout(() => seen.push('never'), 5); clearTimeout(cleared);
        let n = 0;
        await new Promise((done) => { const i = setInterval(() => { if (++n === 3) { clearInterval(i); done() } }, 1) });
        await new Promise((done) => setTimeout(done, 40));
        [...seen, n]"#;
    assert_eq!(value(script).await, r#"["soon","late",3]"#);
    const TIMERS: &str = "A script has at most 1000 timers at the same time: clear some, or wait for the first ones before setting more.";
    let (name, message, _) =
        thrown("for (let i = 0; i < 2000; i++) setTimeout(() => {}, 1000)").await;
    assert_eq!((name.as_str(), message.as_str()), ("TimerLimitExceeded", TIMERS));
}

#[tokio::test]
async fn promise_that_never_settles_is_an_error() {
    let (name, message, _) = thrown("await new Promise(() => {})").await;
    assert_eq!(name, "NeverSettled");
    assert!(message.contains("nothing will settle"), "{message}");
    assert_eq!(
        thrown(
            "const t = setTimeout(() => {}, 100000); clearTimeout(t); await new Promise(() => {})"
        )
        .await
        .0,
        "NeverSettled"
    );
}

#[tokio::test]
async fn host_panic_is_an_error_of_the_tool() {
    for script in ["panics()", "await tools.panics()"] {
        let (name, message, _) = thrown(script).await;
        assert_eq!(name, "InternalError");
        assert!(message.contains("panics failed inside the host"), "{message}");
    }
}

/// Runs a script, cancels it when `reached` returns, and returns its outcome and the time to its
/// end.
async fn cancel_when(script: &str, reached: impl AsyncFn(&TestHost)) -> (Outcome, Duration) {
    let host = Arc::new(TestHost::new());
    let cancel = CancellationToken::new();
    let task = tokio::spawn({
        let (host, cancel, script) = (Arc::clone(&host), cancel.clone(), script.to_owned());
        async move {
            let limits = Limits { host_calls: u32::MAX, ..test_limits() };
            (engine().run(&script, &*host, &limits, cancel).await, Instant::now())
        }
    });
    tokio::time::timeout(Duration::from_secs(10), reached(&host))
        .await
        .expect("the script reaches the point");
    let canceled_at = Instant::now();
    cancel.cancel();
    let (outcome, ended) = task.await.unwrap();
    (outcome, ended - canceled_at)
}

/// The promise is 100 ms. The machine may be busy, so one of several attempts must keep it.
async fn cancels_in_time(script: &str, reached: impl AsyncFn(&TestHost)) -> Outcome {
    let mut took = Vec::new();
    for _ in 0..5 {
        let (outcome, time) = cancel_when(script, &reached).await;
        assert_eq!(outcome.status, Status::Cancelled, "{script}");
        if time < Duration::from_millis(100) {
            return outcome;
        }
        took.push(time);
    }
    panic!("{script}: {took:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_ends_a_waiting_script() {
    for script in ["print('x'); hang()", "print('x'); await tools.hang()"] {
        let outcome =
            cancels_in_time(script, async |host: &TestHost| host.hanging.notified().await).await;
        assert_eq!(outcome.output, "x\n");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_drops_the_futures_of_the_host() {
    let host = TestHost::new();
    let cancel = CancellationToken::new();
    let limits = test_limits();
    let run = engine().run("tools.hang(); hang()", &host, &limits, cancel.clone());
    let ((), outcome) = tokio::join!(
        async {
            host.hanging.notified().await;
            cancel.cancel();
        },
        run
    );
    assert_eq!(outcome.status, Status::Cancelled);
    assert_eq!(host.dropped.load(Ordering::SeqCst), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancel_ends_a_computing_script() {
    for script in [
        "for (;;) echo(1)",
        "for (;;) {}",
        "for (;;) { try { for (;;) {} } finally { continue } }",
        "(function f() { Promise.resolve().then(f) })(); await new Promise(() => {})",
    ] {
        // `later(0)` starts no later than the first tick of the epoch interrupts the script.
        cancels_in_time(&format!("later(0); {script}"), async |host: &TestHost| {
            while host.calls.lock().unwrap().is_empty() {
                tokio::task::yield_now().await;
            }
        })
        .await;
    }
}

#[tokio::test]
async fn run_canceled_before_its_start_does_nothing() {
    let host = TestHost::new();
    let cancel = CancellationToken::new();
    cancel.cancel();
    let outcome = engine().run("echo(1)", &host, &test_limits(), cancel).await;
    assert_eq!(outcome.status, Status::Cancelled);
    assert_eq!(host.calls(), []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_hundred_concurrent_runs_complete() {
    let runs = (0..200).map(|i| {
        tokio::spawn(async move {
            let host = TestHost::new();
            let outcome = run_on(
                &host,
                &format!(
                    "globalThis.mine = {i}; await later(5); const x = echo({i}).text; [mine, x]"
                ),
            )
            .await;
            assert_eq!(
                outcome.status,
                Status::Completed { value: Value::Json(format!("[{i},{i}]")) }
            );
            assert_eq!(outcome.host_calls, 2);
        })
    });
    for run in futures::future::join_all(runs).await {
        run.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn excess_runs_wait_for_an_instance() {
    let engine = Arc::new(
        Engine::new(&cache_dir(), EngineConfig { instances: 2, ..EngineConfig::default() })
            .unwrap(),
    );
    let runs = (0..20).map(|_| {
        let engine = Arc::clone(&engine);
        tokio::spawn(async move {
            let host = TestHost::new();
            engine
                .run("await later(2)", &host, &test_limits(), CancellationToken::new())
                .await
                .status
        })
    });
    for status in futures::future::join_all(runs).await {
        assert_eq!(status.unwrap(), Status::Completed { value: Value::Json("2".to_owned()) });
    }
}

#[tokio::test]
async fn run_waiting_for_an_instance_is_canceled_at_once() {
    let engine =
        Engine::new(&cache_dir(), EngineConfig { instances: 1, ..EngineConfig::default() })
            .unwrap();
    let (host, waiting_host, limits) = (TestHost::new(), TestHost::new(), test_limits());
    let (stop, stop_waiting) = (CancellationToken::new(), CancellationToken::new());
    let mut running = std::pin::pin!(engine.run("hang()", &host, &limits, stop.clone()));
    tokio::select! {
        outcome = &mut running => panic!("the run should hang: {outcome:?}"),
        () = host.hanging.notified() => {}
    }
    let mut waiting =
        std::pin::pin!(engine.run("echo('x')", &waiting_host, &limits, stop_waiting.clone()));
    assert!(futures::poll!(&mut waiting).is_pending(), "there is one instance");
    stop_waiting.cancel();
    let std::task::Poll::Ready(outcome) = futures::poll!(&mut waiting) else {
        panic!("the run still waits")
    };
    assert_eq!((outcome.status, outcome.host_calls), (Status::Cancelled, 0));
    assert_eq!(waiting_host.calls(), []);
    // The run with the instance continues, and leaves it to the next one.
    assert!(futures::poll!(&mut running).is_pending());
    stop.cancel();
    assert_eq!(running.await.status, Status::Cancelled);
    let next = engine.run("1 + 1", &host, &limits, CancellationToken::new()).await;
    assert_eq!(next.status, Status::Completed { value: Value::Json("2".to_owned()) });
}

#[tokio::test]
async fn script_cannot_get_the_host_functions() {
    let script = "
        let found = [];
        Error.prepareStackTrace = (error, sites) => { for (const site of sites) found.push(site.getFunction?.()?.name ?? site); return 'x'; };
        try { echo(1, 2, 3, 4, 5, 6) } catch (error) { found.push(typeof error.stack, error.stack === 'x') }
        try { await tools.echo(1, 2, 3, 4, 5, 6) } catch (error) { found.push(error.stack === 'x') }
        found";
    assert_eq!(value(script).await, r#"["string",false,false]"#);
    let redefine =
        "'use strict'; Object.defineProperty(Error, 'prepareStackTrace', { value: () => 1 })";
    assert_eq!(thrown(redefine).await.0, "TypeError");
}
