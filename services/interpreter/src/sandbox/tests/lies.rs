//! Guests that lie: what the host does when a script has taken over the engine and calls the
//! imports itself.

use wasm_encoder::{
    BlockType, CodeSection, ConstExpr, DataSection, EntityType, ExportKind, ExportSection,
    Function, FunctionSection, ImportSection, InstructionSink, MemorySection, MemoryType, Module,
    TypeSection,
    ValType::{F64, I32, I64},
};

use super::*;

// The imports, in the order in which each guest has them.
const CALL: u32 = 0;
const START: u32 = 1;
const CANCEL: u32 = 2;
const TAKE: u32 = 3;
const SEED: u32 = 4;
const WAIT_ANY: u32 = 5;
const STRIP: u32 = 6;
const LOG: u32 = 7;
const NOTE: u32 = 8;
const FINISH: u32 = 9;
const NOW: u32 = 10;

/// Size of a guest's memory: one page.
const END: u32 = 64 << 10;

// Texts in its memory: where, and how long.
const ECHO: (u32, u32) = (0, 4);
const ARGUMENTS: (u32, u32) = (16, 2);
const NOTHING: (u32, u32) = (32, 7);
const SLEEP: (u32, u32) = (48, 7);
const FOREVER: (u32, u32) = (64, 27);
const NO_TEXT: (u32, u32) = (96, 2);
const LATER: (u32, u32) = (112, 5);
const A_MOMENT: (u32, u32) = (128, 8);
/// Arguments that are large, for this memory.
const LARGE: (u32, u32) = (4096, 32 << 10);
/// Where a reply has room.
const REPLY: u32 = 1024;

/// The guest's only local variable, beside the three parameters of `run`.
const COUNTER: u32 = 3;

/// What a guest does.
type Body = dyn Fn(&mut InstructionSink<'_>);

/// The second script runs the lie; the first one, which is empty, makes an honest call and gives
/// its result back.
const HONEST: &str = "";
const LYING: &str = "lie";

/// How a lie must end.
enum Expected {
    /// With an error for the operator that says this.
    Internal(&'static str),
    Exceeded(Limit),
}

use Expected::{Exceeded, Internal};

/// The module of a guest that lies like that, with these facts: where its flag and its tools are.
fn guest(lie: &Body, interrupt_flag: u32, booted_tools: i64) -> Vec<u8> {
    let mut types = TypeSection::new();
    let mut imports = ImportSection::new();
    let signatures: [(&str, &str, &[_], &[_]); 11] = [
        ("host", "call", &[I32; 5], &[I64]),
        ("host", "start", &[I32; 5], &[]),
        ("host", "cancel", &[I32], &[]),
        ("host", "take", &[I32], &[]),
        ("host", "seed", &[I32], &[]),
        ("host", "wait_any", &[I32; 2], &[I64]),
        ("host", "strip", &[I32; 2], &[I64]),
        ("host", "log", &[I32; 2], &[]),
        ("host", "note", &[I32; 2], &[]),
        ("host", "finish", &[I32; 3], &[]),
        ("env", "__rquickjs_host_now_us", &[], &[F64]),
    ];
    for (index, (module, name, parameters, results)) in (0..).zip(signatures) {
        types.ty().function(parameters.iter().copied(), results.iter().copied());
        imports.import(module, name, EntityType::Function(index));
    }
    let exported: [(&str, &[_], &[_], Function); 3] = [
        ("run", &[I32; 3], &[], run(lie)),
        (
            "interrupt_flag",
            &[],
            &[I32],
            constant(|code| _ = code.i32_const(interrupt_flag.cast_signed())),
        ),
        ("booted_tools", &[], &[I64], constant(|code| _ = code.i64_const(booted_tools))),
    ];
    let (mut functions, mut exports, mut code) =
        (FunctionSection::new(), ExportSection::new(), CodeSection::new());
    exports.export("memory", ExportKind::Memory, 0);
    for (index, (name, parameters, results, body)) in (imports.len()..).zip(exported) {
        types.ty().function(parameters.iter().copied(), results.iter().copied());
        functions.function(index);
        exports.export(name, ExportKind::Func, index);
        code.function(&body);
    }
    let mut memories = MemorySection::new();
    memories.memory(MemoryType {
        minimum: u64::from(END >> 16),
        maximum: None,
        memory64: false,
        shared: false,
        page_size_log2: None,
    });
    let mut data = DataSection::new();
    let large = format!(r#"{{"text":"{}"}}"#, "x".repeat(LARGE.1 as usize - 11));
    let texts: [((u32, u32), &[u8]); 9] = [
        (ECHO, b"echo"),
        (ARGUMENTS, b"{}"),
        (NOTHING, b"nothing"),
        (SLEEP, b"__sleep"),
        (FOREVER, br#"{"ms":18446744073709551615}"#),
        (NO_TEXT, b"\xff\xfe"),
        (LATER, b"later"),
        (A_MOMENT, br#"{"ms":5}"#),
        (LARGE, large.as_bytes()),
    ];
    for ((at, len), text) in texts {
        assert_eq!(text.len(), len as usize);
        data.active(0, &ConstExpr::i32_const(at.cast_signed()), text.iter().copied());
    }
    let mut module = Module::new();
    module
        .section(&types)
        .section(&imports)
        .section(&functions)
        .section(&memories)
        .section(&exports);
    module.section(&code).section(&data);
    module.finish()
}

fn run(lie: &Body) -> Function {
    let mut function = Function::new([(1, I32)]);
    let mut code = function.instructions();
    // The second parameter is the script's length.
    code.local_get(1).i32_eqz().if_(BlockType::Empty);
    invoke(&mut code, CALL, &[1, ECHO.0, ECHO.1, ARGUMENTS.0, ARGUMENTS.1]);
    code.i32_wrap_i64().local_set(COUNTER);
    invoke(&mut code, TAKE, &[REPLY]);
    code.i32_const(0)
        .i32_const(REPLY.cast_signed())
        .local_get(COUNTER)
        .call(FINISH)
        .return_()
        .end();
    lie(&mut code);
    code.end();
    function
}

fn constant(value: impl Fn(&mut InstructionSink<'_>)) -> Function {
    let mut function = Function::new([]);
    let mut code = function.instructions();
    value(&mut code);
    code.end();
    function
}

fn does(body: impl Fn(&mut InstructionSink<'_>) + 'static) -> Box<Body> {
    Box::new(body)
}

/// Calls an import with these arguments.
fn invoke(code: &mut InstructionSink<'_>, import: u32, arguments: &[u32]) {
    for argument in arguments {
        code.i32_const(argument.cast_signed());
    }
    code.call(import);
}

/// Calls imports one after the other, and does nothing with what they give.
fn calls(of: &'static [(u32, &'static [u32])]) -> Box<Body> {
    does(move |code| {
        for (import, arguments) in of {
            invoke(code, *import, arguments);
            if matches!(*import, CALL | WAIT_ANY | STRIP | NOW) {
                code.drop();
            }
        }
    })
}

/// Calls an import without end.
fn flood(import: u32, arguments: &'static [u32]) -> Box<Body> {
    does(move |code| {
        code.loop_(BlockType::Empty);
        invoke(code, import, arguments);
        if matches!(import, WAIT_ANY | NOW) {
            code.drop();
        }
        code.br(0).end();
    })
}

/// Makes calls without end, each with a number of its own.
fn flood_of_calls(import: u32, name: (u32, u32), arguments: (u32, u32)) -> Box<Body> {
    flood_of_calls_and(import, name, arguments, |_| {})
}

/// The same, with something done after each.
fn flood_of_calls_and(
    import: u32,
    name: (u32, u32),
    arguments: (u32, u32),
    then: impl Fn(&mut InstructionSink<'_>) + 'static,
) -> Box<Body> {
    does(move |code| {
        code.loop_(BlockType::Empty);
        next_number(code);
        invoke(code, import, &[name.0, name.1, arguments.0, arguments.1]);
        if import == CALL {
            code.drop();
        }
        then(code);
        code.br(0).end();
    })
}

/// Counts, and leaves the number as an argument.
fn next_number(code: &mut InstructionSink<'_>) {
    code.local_get(COUNTER).i32_const(1).i32_add().local_tee(COUNTER);
}

/// Takes an end, where there is one, and does not look at it.
fn take_an_end(code: &mut InstructionSink<'_>) {
    invoke(code, WAIT_ANY, &[REPLY, REPLY + 4]);
    code.drop();
}

/// Holds each of these lies to how it must end; after each an honest script of the same engine
/// works as ever.
async fn all_end(lies: Vec<(&str, Box<Body>, Expected)>) {
    let limits = Limits {
        cpu: Duration::from_millis(50),
        wall: Duration::from_secs(60),
        host_calls: 100,
        ..test_limits()
    };
    all_end_within(&limits, lies).await;
}

async fn all_end_within(limits: &Limits, lies: Vec<(&str, Box<Body>, Expected)>) {
    for (name, lie, expected) in lies {
        let engine = lying_engine(&*lie, 8, 0).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let host = TestHost::new();
        let outcome = engine.run(LYING, &host, limits, CancellationToken::new()).await;
        match (&outcome.status, expected) {
            (Status::Internal(text), Internal(part)) => {
                assert!(text.contains(part), "{name}: {text}")
            }
            (Status::LimitExceeded { limit, .. }, Exceeded(expected)) => {
                assert_eq!(*limit, expected, "{name}")
            }
            (other, _) => panic!("{name}: {other:?}"),
        }
        assert!(outcome.output.len() <= limits.output_bytes, "{name}");
        // A note of the host's own may come on top.
        assert!(outcome.notes.len() <= 33, "{name}: {} notes", outcome.notes.len());
        honest_runs_work(&engine, name).await;
    }
}

async fn honest_runs_work(engine: &Engine, after: &str) {
    let host = TestHost::new();
    let outcome = engine.run(HONEST, &host, &test_limits(), CancellationToken::new()).await;
    assert_eq!(
        outcome.status,
        Status::Completed { value: Value::Json("{}".to_owned()) },
        "after {after}"
    );
    assert_eq!(host.calls(), [(1, "echo".to_owned(), json!({}))], "after {after}");
}

fn lying_engine(lie: &Body, interrupt_flag: u32, booted_tools: i64) -> Result<Engine, Error> {
    let config = EngineConfig { instances: 2, ..EngineConfig::default() };
    Engine::with_guest(&guest(lie, interrupt_flag, booted_tools), &cache_dir(), config)
}

#[tokio::test]
async fn pointers_out_of_memory_are_refused() {
    const OUTSIDE: Expected = Internal("points outside of its memory");
    const MAX: u32 = u32::MAX;
    all_end(vec![
        ("a text from the end on", calls(&[(LOG, &[END, 1])]), OUTSIDE),
        ("a text over the end", calls(&[(LOG, &[END - 1, 2])]), OUTSIDE),
        ("a text of 4 GiB", calls(&[(LOG, &[1, MAX])]), OUTSIDE),
        ("a text whose end overflows", calls(&[(LOG, &[MAX, MAX])]), OUTSIDE),
        ("nothing, from past the end", calls(&[(LOG, &[END + 1, 0])]), OUTSIDE),
        ("a note over the end", calls(&[(NOTE, &[END - 1, 2])]), OUTSIDE),
        ("a note whose end overflows", calls(&[(NOTE, &[MAX, MAX])]), OUTSIDE),
        ("a value over the end", calls(&[(FINISH, &[0, END - 1, 2])]), OUTSIDE),
        ("a value whose end overflows", calls(&[(FINISH, &[0, MAX, MAX])]), OUTSIDE),
        ("a source of 4 GiB", calls(&[(STRIP, &[0, MAX])]), OUTSIDE),
        (
            "a name over the end",
            calls(&[(CALL, &[1, END - 1, 2, ARGUMENTS.0, ARGUMENTS.1])]),
            OUTSIDE,
        ),
        (
            "a name whose end overflows",
            calls(&[(START, &[1, MAX, MAX, ARGUMENTS.0, ARGUMENTS.1])]),
            OUTSIDE,
        ),
        ("arguments over the end", calls(&[(CALL, &[1, ECHO.0, ECHO.1, END - 1, 2])]), OUTSIDE),
        (
            "arguments whose end overflows",
            calls(&[(START, &[1, ECHO.0, ECHO.1, MAX, 4 << 20])]),
            OUTSIDE,
        ),
        ("a seed over the end", calls(&[(SEED, &[END - 31])]), OUTSIDE),
        ("a seed at the last address", calls(&[(SEED, &[MAX])]), OUTSIDE),
        (
            "a reply over the end",
            calls(&[(CALL, &[1, ECHO.0, ECHO.1, ARGUMENTS.0, ARGUMENTS.1]), (TAKE, &[END - 1])]),
            OUTSIDE,
        ),
        (
            "a number over the end",
            calls(&[
                (START, &[1, ECHO.0, ECHO.1, ARGUMENTS.0, ARGUMENTS.1]),
                (WAIT_ANY, &[END - 3, 0]),
            ]),
            OUTSIDE,
        ),
        (
            "whether it succeeded, over the end",
            calls(&[
                (START, &[1, ECHO.0, ECHO.1, ARGUMENTS.0, ARGUMENTS.1]),
                (WAIT_ANY, &[0, MAX]),
            ]),
            OUTSIDE,
        ),
        ("no reply, past the end", calls(&[(TAKE, &[REPLY]), (TAKE, &[MAX])]), OUTSIDE),
    ])
    .await;
}

#[tokio::test]
async fn calls_that_the_guest_must_not_make_are_refused() {
    const TWICE: Expected = Internal("two calls the number 1");
    const CALLED: &[u32] = &[1, ECHO.0, ECHO.1, ARGUMENTS.0, ARGUMENTS.1];
    const SLEPT: &[u32] = &[1, SLEEP.0, SLEEP.1, ARGUMENTS.0, ARGUMENTS.1];
    const UNSAID: Expected = Internal("without saying how the script ended");
    all_end(vec![
        ("two calls with one number", calls(&[(CALL, CALLED), (CALL, CALLED)]), TWICE),
        ("two started calls with one number", calls(&[(START, CALLED), (START, CALLED)]), TWICE),
        ("the number of a call that is started", calls(&[(START, CALLED), (CALL, CALLED)]), TWICE),
        ("the number of a timer", calls(&[(START, SLEPT), (CALL, CALLED)]), TWICE),
        (
            "the number of a cancelled timer",
            calls(&[(START, SLEPT), (CANCEL, &[1]), (CALL, CALLED)]),
            TWICE,
        ),
        (
            "the number of a call that was refused",
            calls(&[(CALL, &[1, ECHO.0, ECHO.1, 0, u32::MAX]), (CALL, CALLED)]),
            TWICE,
        ),
        (
            "an unknown tool",
            calls(&[(CALL, &[1, NOTHING.0, NOTHING.1, ARGUMENTS.0, ARGUMENTS.1])]),
            Internal("what is no tool"),
        ),
        (
            "an unknown tool, started",
            calls(&[(START, &[1, NOTHING.0, NOTHING.1, ARGUMENTS.0, ARGUMENTS.1])]),
            Internal("what is no tool"),
        ),
        (
            "a tool without a name",
            calls(&[(CALL, &[1, 0, 0, ARGUMENTS.0, ARGUMENTS.1])]),
            Internal("what is no tool"),
        ),
        (
            "a name that is no text",
            calls(&[(CALL, &[1, NO_TEXT.0, NO_TEXT.1, ARGUMENTS.0, ARGUMENTS.1])]),
            Internal("utf-8"),
        ),
        ("a source that is no text", calls(&[(STRIP, &[NO_TEXT.0, NO_TEXT.1])]), Internal("utf-8")),
        (
            "arguments of 4 GiB, which are an error of the call",
            calls(&[(CALL, &[1, 0, 4, 0, u32::MAX])]),
            UNSAID,
        ),
        ("arguments that are no JSON", calls(&[(CALL, &[1, 0, 4, NO_TEXT.0, NO_TEXT.1])]), UNSAID),
        (
            "cancelling and waiting for what there is not",
            calls(&[(CANCEL, &[7]), (WAIT_ANY, &[0, 4])]),
            UNSAID,
        ),
        (
            "waiting for a call that was cancelled",
            calls(&[(START, CALLED), (CANCEL, &[1]), (WAIT_ANY, &[0, 4]), (WAIT_ANY, &[0, 4])]),
            UNSAID,
        ),
        (
            "waiting for a timer that was cancelled",
            calls(&[
                (START, &[1, SLEEP.0, SLEEP.1, FOREVER.0, FOREVER.1]),
                (NOW, &[]),
                (CANCEL, &[1]),
                (WAIT_ANY, &[0, 4]),
            ]),
            UNSAID,
        ),
        ("taking twice, into the end", calls(&[(TAKE, &[REPLY]), (TAKE, &[END])]), UNSAID),
        ("returning at once", calls(&[]), UNSAID),
        (
            "an ending that there is not",
            calls(&[(FINISH, &[6, 0, 0])]),
            Internal("an unknown way: 6"),
        ),
        ("trapping", does(|code| _ = code.unreachable()), Internal("unreachable")),
    ])
    .await;
}

#[tokio::test]
async fn floods_of_imports_end_at_a_limit() {
    const CPU: Expected = Exceeded(Limit::Cpu);
    all_end(vec![
        ("cancelling", flood(CANCEL, &[1]), CPU),
        ("notes", flood(NOTE, &[0, END]), CPU),
        ("text", flood(LOG, &[0, END]), CPU),
        ("endings", flood(FINISH, &[0, 0, END]), CPU),
        ("taking", flood(TAKE, &[REPLY]), CPU),
        ("seeds", flood(SEED, &[REPLY]), CPU),
        ("waiting for nothing", flood(WAIT_ANY, &[0, 4]), CPU),
        ("asking for the time", flood(NOW, &[]), CPU),
        ("calls", flood_of_calls(CALL, ECHO, ARGUMENTS), Exceeded(Limit::HostCalls)),
        (
            "started calls",
            flood_of_calls(START, ECHO, ARGUMENTS),
            Internal("more than 64 calls at once"),
        ),
        ("timers", flood_of_calls(START, SLEEP, FOREVER), Exceeded(Limit::HostCalls)),
        (
            "nothing at all",
            does(|code| {
                code.loop_(BlockType::Empty).br(0).end();
            }),
            CPU,
        ),
        (
            "memory",
            does(|code| {
                code.i32_const(2000).memory_grow(0).drop().unreachable();
            }),
            Exceeded(Limit::Memory),
        ),
    ])
    .await;
}

#[tokio::test]
async fn more_than_an_honest_guest_starts_at_once_ends_the_run() {
    const CALLS: Expected = Internal("more than 64 calls at once");
    const NO_ROOM: (u32, u32) = (0, u32::MAX);
    let limits = Limits { wall: Duration::from_secs(60), ..test_limits() };
    all_end_within(
        &limits,
        vec![
            ("large arguments", flood_of_calls(START, ECHO, LARGE), CALLS),
            ("calls that are refused", flood_of_calls(START, ECHO, NO_ROOM), CALLS),
            (
                "calls that are cancelled",
                flood_of_calls_and(START, ECHO, LARGE, |code| {
                    code.local_get(COUNTER).call(CANCEL);
                }),
                CALLS,
            ),
            (
                "calls that end, but are not taken",
                flood_of_calls_and(START, ECHO, ARGUMENTS, |code| {
                    code.call(NOW).drop();
                }),
                CALLS,
            ),
            (
                "timers",
                flood_of_calls(START, SLEEP, FOREVER),
                Internal("more than 4096 timers at once"),
            ),
        ],
    )
    .await;
}

#[tokio::test]
async fn what_was_taken_or_cancelled_is_not_under_way() {
    let limits = Limits { wall: Duration::from_secs(60), host_calls: 5000, ..test_limits() };
    all_end_within(
        &limits,
        vec![
            (
                "calls",
                flood_of_calls_and(START, ECHO, ARGUMENTS, take_an_end),
                Exceeded(Limit::HostCalls),
            ),
            (
                "refused calls",
                flood_of_calls_and(START, ECHO, NO_TEXT, take_an_end),
                Exceeded(Limit::HostCalls),
            ),
            (
                "timers",
                flood_of_calls_and(START, SLEEP, FOREVER, |code| {
                    code.local_get(COUNTER).call(CANCEL);
                }),
                Exceeded(Limit::HostCalls),
            ),
        ],
    )
    .await;
}

#[tokio::test]
async fn cancelling_thousands_of_timers_ends_at_a_limit() {
    const TIMERS: i32 = 4000;
    let lie = does(|code| {
        code.loop_(BlockType::Empty);
        next_number(code);
        invoke(code, START, &[SLEEP.0, SLEEP.1, ARGUMENTS.0, ARGUMENTS.1]);
        code.local_get(COUNTER).i32_const(TIMERS).i32_lt_u().br_if(0).end();
        // They end while the host is asked for something.
        invoke(code, CALL, &[u32::MAX, LATER.0, LATER.1, A_MOMENT.0, A_MOMENT.1]);
        code.drop();
        // From the last one to the first, and on through numbers that nothing has.
        code.loop_(BlockType::Empty);
        code.local_get(COUNTER).call(CANCEL);
        code.local_get(COUNTER).i32_const(1).i32_sub().local_set(COUNTER);
        code.br(0).end();
    });
    let limits =
        Limits { cpu: Duration::from_millis(500), wall: Duration::from_secs(60), ..test_limits() };
    all_end_within(&limits, vec![("cancelling", lie, Exceeded(Limit::Cpu))]).await;
}

#[tokio::test]
async fn a_timer_without_end_ends_with_the_run() {
    let lie = calls(&[(START, &[1, SLEEP.0, SLEEP.1, FOREVER.0, FOREVER.1]), (WAIT_ANY, &[0, 4])]);
    let engine = lying_engine(&*lie, 8, 0).expect("an engine");
    let limits = Limits { wall: Duration::from_millis(200), ..test_limits() };
    let outcome = engine.run(LYING, &TestHost::new(), &limits, CancellationToken::new()).await;
    assert_eq!(exceeded(&outcome).0, Limit::Wall);
    honest_runs_work(&engine, "a timer").await;
}

#[tokio::test]
async fn a_flag_outside_of_memory_ends_the_run_at_its_limit() {
    let lie = flood(CANCEL, &[1]);
    let limits = Limits { cpu: Duration::from_millis(50), ..test_limits() };
    for flag in [END - 3, END, u32::MAX] {
        let engine = lying_engine(&*lie, flag, 0).expect("an engine");
        let outcome = engine.run(LYING, &TestHost::new(), &limits, CancellationToken::new()).await;
        assert_eq!(exceeded(&outcome).0, Limit::Cpu);
        honest_runs_work(&engine, "a flag").await;
    }
}

#[test]
fn a_guest_whose_tools_lie_outside_of_its_memory_is_refused() {
    for tools in [(i64::from(END) << 32) | 1, 0xffff_ffff, -1] {
        let refused = lying_engine(&*calls(&[]), 8, tools).expect_err("it does not fit");
        assert!(matches!(refused, Error::Guest(_)), "{refused:?}");
    }
}
