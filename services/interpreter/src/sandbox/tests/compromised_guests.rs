//! Compromised guests: a script has taken over the engine and calls the imports itself.

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
const MEMORY_SIZE: u32 = 64 << 10;

// Texts in its memory: address and length.
const ECHO: (u32, u32) = (0, 4);
const ARGUMENTS: (u32, u32) = (16, 2);
const NOTHING: (u32, u32) = (32, 7);
const SLEEP: (u32, u32) = (48, 7);
const FOREVER: (u32, u32) = (64, 27);
const NO_TEXT: (u32, u32) = (96, 2);
const LATER: (u32, u32) = (112, 5);
const A_MOMENT: (u32, u32) = (128, 8);
/// Large arguments, for this memory.
const LARGE: (u32, u32) = (4096, 32 << 10);
/// The address of the buffer for replies.
const REPLY: u32 = 1024;

/// The guest's only local variable, after the three parameters of `run`.
const COUNTER: u32 = 3;

/// The code of a guest.
type Body = dyn Fn(&mut InstructionSink<'_>);

/// With the second script the guest attacks; with the first one, which is empty, it makes a valid
/// call and returns its result.
const VALID_SCRIPT: &str = "";
const ATTACK_SCRIPT: &str = "attack";

/// The required end of an attack.
enum ExpectedEnd {
    /// An internal error for the operator with this text.
    Internal(&'static str),
    Exceeded(Limit),
}

use ExpectedEnd::{Exceeded, Internal};

/// Builds the module of a guest with this attack, and with these addresses of its flag and its
/// tools.
fn guest(attack: &Body, interrupt_flag: u32, booted_tools: i64) -> Vec<u8> {
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
        ("run", &[I32; 3], &[], run(attack)),
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
        minimum: u64::from(MEMORY_SIZE >> 16),
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

fn run(attack: &Body) -> Function {
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
    attack(&mut code);
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

fn body(code: impl Fn(&mut InstructionSink<'_>) + 'static) -> Box<Body> {
    Box::new(code)
}

/// Calls an import with these arguments.
fn invoke(code: &mut InstructionSink<'_>, import: u32, arguments: &[u32]) {
    for argument in arguments {
        code.i32_const(argument.cast_signed());
    }
    code.call(import);
}

/// Calls imports one after the other and ignores their results.
fn calls(imports: &'static [(u32, &'static [u32])]) -> Box<Body> {
    body(move |code| {
        for (import, arguments) in imports {
            invoke(code, *import, arguments);
            if matches!(*import, CALL | WAIT_ANY | STRIP | NOW) {
                code.drop();
            }
        }
    })
}

/// Calls an import in an endless loop.
fn flood(import: u32, arguments: &'static [u32]) -> Box<Body> {
    body(move |code| {
        code.loop_(BlockType::Empty);
        invoke(code, import, arguments);
        if matches!(import, WAIT_ANY | NOW) {
            code.drop();
        }
        code.br(0).end();
    })
}

/// Makes calls in an endless loop, each with its own number.
fn flood_of_calls(import: u32, name: (u32, u32), arguments: (u32, u32)) -> Box<Body> {
    flood_of_calls_and(import, name, arguments, |_| {})
}

/// The same, with code after each call.
fn flood_of_calls_and(
    import: u32,
    name: (u32, u32),
    arguments: (u32, u32),
    then: impl Fn(&mut InstructionSink<'_>) + 'static,
) -> Box<Body> {
    body(move |code| {
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

/// Increments the counter and pushes it as an argument.
fn next_number(code: &mut InstructionSink<'_>) {
    code.local_get(COUNTER).i32_const(1).i32_add().local_tee(COUNTER);
}

/// Takes the end of a call, if there is one, and ignores it.
fn take_an_end(code: &mut InstructionSink<'_>) {
    invoke(code, WAIT_ANY, &[REPLY, REPLY + 4]);
    code.drop();
}

/// Asserts the end of each attack. After each, a valid script on the same engine works.
async fn assert_ends(attacks: Vec<(&str, Box<Body>, ExpectedEnd)>) {
    let limits = Limits {
        cpu: Duration::from_millis(50),
        wall: Duration::from_secs(60),
        host_calls: 100,
        ..test_limits()
    };
    assert_ends_within(&limits, attacks).await;
}

async fn assert_ends_within(limits: &Limits, attacks: Vec<(&str, Box<Body>, ExpectedEnd)>) {
    for (name, attack, expected) in attacks {
        let engine =
            attacking_engine(&*attack, 8, 0).unwrap_or_else(|error| panic!("{name}: {error:?}"));
        let host = TestHost::new();
        let outcome = engine.run(ATTACK_SCRIPT, &host, limits, CancellationToken::new()).await;
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
        // The host may add a note.
        assert!(outcome.notes.len() <= 33, "{name}: {} notes", outcome.notes.len());
        assert_valid_run(&engine, name).await;
    }
}

async fn assert_valid_run(engine: &Engine, after: &str) {
    let host = TestHost::new();
    let outcome = engine.run(VALID_SCRIPT, &host, &test_limits(), CancellationToken::new()).await;
    assert_eq!(
        outcome.status,
        Status::Completed { value: Value::Json("{}".to_owned()) },
        "after {after}"
    );
    assert_eq!(host.calls(), [(1, "echo".to_owned(), json!({}))], "after {after}");
}

fn attacking_engine(
    attack: &Body,
    interrupt_flag: u32,
    booted_tools: i64,
) -> Result<Engine, Error> {
    let config = EngineConfig { instances: 2, ..EngineConfig::default() };
    Engine::with_guest(&guest(attack, interrupt_flag, booted_tools), &cache_dir(), config)
}

#[tokio::test]
async fn pointers_outside_of_memory_are_refused() {
    const OUTSIDE: ExpectedEnd = Internal("points outside of its memory");
    const MAX: u32 = u32::MAX;
    assert_ends(vec![
        ("a text from the end on", calls(&[(LOG, &[MEMORY_SIZE, 1])]), OUTSIDE),
        ("a text over the end", calls(&[(LOG, &[MEMORY_SIZE - 1, 2])]), OUTSIDE),
        ("a text of 4 GiB", calls(&[(LOG, &[1, MAX])]), OUTSIDE),
        ("a text whose end overflows", calls(&[(LOG, &[MAX, MAX])]), OUTSIDE),
        ("nothing, from past the end", calls(&[(LOG, &[MEMORY_SIZE + 1, 0])]), OUTSIDE),
        ("a note over the end", calls(&[(NOTE, &[MEMORY_SIZE - 1, 2])]), OUTSIDE),
        ("a note whose end overflows", calls(&[(NOTE, &[MAX, MAX])]), OUTSIDE),
        ("a value over the end", calls(&[(FINISH, &[0, MEMORY_SIZE - 1, 2])]), OUTSIDE),
        ("a value whose end overflows", calls(&[(FINISH, &[0, MAX, MAX])]), OUTSIDE),
        ("a source of 4 GiB", calls(&[(STRIP, &[0, MAX])]), OUTSIDE),
        (
            "a name over the end",
            calls(&[(CALL, &[1, MEMORY_SIZE - 1, 2, ARGUMENTS.0, ARGUMENTS.1])]),
            OUTSIDE,
        ),
        (
            "a name whose end overflows",
            calls(&[(START, &[1, MAX, MAX, ARGUMENTS.0, ARGUMENTS.1])]),
            OUTSIDE,
        ),
        (
            "arguments over the end",
            calls(&[(CALL, &[1, ECHO.0, ECHO.1, MEMORY_SIZE - 1, 2])]),
            OUTSIDE,
        ),
        (
            "arguments whose end overflows",
            calls(&[(START, &[1, ECHO.0, ECHO.1, MAX, 4 << 20])]),
            OUTSIDE,
        ),
        ("a seed over the end", calls(&[(SEED, &[MEMORY_SIZE - 31])]), OUTSIDE),
        ("a seed at the last address", calls(&[(SEED, &[MAX])]), OUTSIDE),
        (
            "a reply over the end",
            calls(&[
                (CALL, &[1, ECHO.0, ECHO.1, ARGUMENTS.0, ARGUMENTS.1]),
                (TAKE, &[MEMORY_SIZE - 1]),
            ]),
            OUTSIDE,
        ),
        (
            "a number over the end",
            calls(&[
                (START, &[1, ECHO.0, ECHO.1, ARGUMENTS.0, ARGUMENTS.1]),
                (WAIT_ANY, &[MEMORY_SIZE - 3, 0]),
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
async fn invalid_calls_of_the_guest_are_refused() {
    const TWICE: ExpectedEnd = Internal("two calls the number 1");
    const CALLED: &[u32] = &[1, ECHO.0, ECHO.1, ARGUMENTS.0, ARGUMENTS.1];
    const SLEPT: &[u32] = &[1, SLEEP.0, SLEEP.1, ARGUMENTS.0, ARGUMENTS.1];
    const UNSAID: ExpectedEnd = Internal("without saying how the script ended");
    assert_ends(vec![
        ("two calls with one number", calls(&[(CALL, CALLED), (CALL, CALLED)]), TWICE),
        ("two started calls with one number", calls(&[(START, CALLED), (START, CALLED)]), TWICE),
        ("the number of a call that is started", calls(&[(START, CALLED), (CALL, CALLED)]), TWICE),
        ("the number of a timer", calls(&[(START, SLEPT), (CALL, CALLED)]), TWICE),
        (
            "the number of a canceled timer",
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
            "canceling and waiting for nothing",
            calls(&[(CANCEL, &[7]), (WAIT_ANY, &[0, 4])]),
            UNSAID,
        ),
        (
            "waiting for a canceled call",
            calls(&[(START, CALLED), (CANCEL, &[1]), (WAIT_ANY, &[0, 4]), (WAIT_ANY, &[0, 4])]),
            UNSAID,
        ),
        (
            "waiting for a canceled timer",
            calls(&[
                (START, &[1, SLEEP.0, SLEEP.1, FOREVER.0, FOREVER.1]),
                (NOW, &[]),
                (CANCEL, &[1]),
                (WAIT_ANY, &[0, 4]),
            ]),
            UNSAID,
        ),
        ("taking twice, into the end", calls(&[(TAKE, &[REPLY]), (TAKE, &[MEMORY_SIZE])]), UNSAID),
        ("returning at once", calls(&[]), UNSAID),
        ("an unknown kind of end", calls(&[(FINISH, &[6, 0, 0])]), Internal("an unknown way: 6")),
        ("trapping", body(|code| _ = code.unreachable()), Internal("unreachable")),
    ])
    .await;
}

#[tokio::test]
async fn endless_import_calls_end_at_a_limit() {
    const CPU: ExpectedEnd = Exceeded(Limit::Cpu);
    assert_ends(vec![
        ("canceling", flood(CANCEL, &[1]), CPU),
        ("notes", flood(NOTE, &[0, MEMORY_SIZE]), CPU),
        ("text", flood(LOG, &[0, MEMORY_SIZE]), CPU),
        ("endings", flood(FINISH, &[0, 0, MEMORY_SIZE]), CPU),
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
            body(|code| {
                code.loop_(BlockType::Empty).br(0).end();
            }),
            CPU,
        ),
        (
            "memory",
            body(|code| {
                code.i32_const(2000).memory_grow(0).drop().unreachable();
            }),
            Exceeded(Limit::Memory),
        ),
    ])
    .await;
}

#[tokio::test]
async fn too_many_started_calls_end_the_run() {
    const CALLS: ExpectedEnd = Internal("more than 64 calls at once");
    const NO_ROOM: (u32, u32) = (0, u32::MAX);
    let limits = Limits { wall: Duration::from_secs(60), ..test_limits() };
    assert_ends_within(
        &limits,
        vec![
            ("large arguments", flood_of_calls(START, ECHO, LARGE), CALLS),
            ("calls that are refused", flood_of_calls(START, ECHO, NO_ROOM), CALLS),
            (
                "canceled calls",
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
async fn taken_and_canceled_calls_are_not_counted() {
    let limits = Limits { wall: Duration::from_secs(60), host_calls: 5000, ..test_limits() };
    assert_ends_within(
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
async fn canceling_thousands_of_timers_ends_at_a_limit() {
    const TIMERS: i32 = 4000;
    let attack = body(|code| {
        code.loop_(BlockType::Empty);
        next_number(code);
        invoke(code, START, &[SLEEP.0, SLEEP.1, ARGUMENTS.0, ARGUMENTS.1]);
        code.local_get(COUNTER).i32_const(TIMERS).i32_lt_u().br_if(0).end();
        // They end during this call.
        invoke(code, CALL, &[u32::MAX, LATER.0, LATER.1, A_MOMENT.0, A_MOMENT.1]);
        code.drop();
        // Cancels from the last one to the first, and then unused numbers.
        code.loop_(BlockType::Empty);
        code.local_get(COUNTER).call(CANCEL);
        code.local_get(COUNTER).i32_const(1).i32_sub().local_set(COUNTER);
        code.br(0).end();
    });
    let limits =
        Limits { cpu: Duration::from_millis(500), wall: Duration::from_secs(60), ..test_limits() };
    assert_ends_within(&limits, vec![("canceling", attack, Exceeded(Limit::Cpu))]).await;
}

#[tokio::test]
async fn endless_timer_ends_with_the_run() {
    let attack =
        calls(&[(START, &[1, SLEEP.0, SLEEP.1, FOREVER.0, FOREVER.1]), (WAIT_ANY, &[0, 4])]);
    let engine = attacking_engine(&*attack, 8, 0).expect("an engine");
    let limits = Limits { wall: Duration::from_millis(200), ..test_limits() };
    let outcome =
        engine.run(ATTACK_SCRIPT, &TestHost::new(), &limits, CancellationToken::new()).await;
    assert_eq!(exceeded(&outcome).0, Limit::Wall);
    assert_valid_run(&engine, "a timer").await;
}

#[tokio::test]
async fn flag_outside_of_memory_ends_the_run_at_its_limit() {
    let attack = flood(CANCEL, &[1]);
    let limits = Limits { cpu: Duration::from_millis(50), ..test_limits() };
    for flag in [MEMORY_SIZE - 3, MEMORY_SIZE, u32::MAX] {
        let engine = attacking_engine(&*attack, flag, 0).expect("an engine");
        let outcome =
            engine.run(ATTACK_SCRIPT, &TestHost::new(), &limits, CancellationToken::new()).await;
        assert_eq!(exceeded(&outcome).0, Limit::Cpu);
        assert_valid_run(&engine, "a flag").await;
    }
}

#[test]
fn guest_with_tools_outside_of_its_memory_is_refused() {
    for tools in [(i64::from(MEMORY_SIZE) << 32) | 1, 0xffff_ffff, -1] {
        let refused = attacking_engine(&*calls(&[]), 8, tools).expect_err("an invalid guest");
        assert!(matches!(refused, Error::Guest(_)), "{refused:?}");
    }
}
