//! The one JavaScript engine of an instance.

use std::cell::OnceCell;

use rquickjs::{Context, Ctx, Function, Object, Persistent, Result, Runtime, Value};

use crate::heap::{self, Heap};
use crate::modules::Modules;
use crate::{interrupted, natives, prelude};

/// How deep JavaScript may nest. The sandbox gives the guest's Wasm stack 32 times this much, which
/// the worst recursion through native code (`JSON.stringify` of nested arrays) needs.
const STACK_LIMIT: usize = 256 * 1024;

thread_local! {
    static GUEST: OnceCell<Guest> = const { OnceCell::new() };
}

/// The engine, its context and the functions of the prelude that the Rust side calls.
pub(crate) struct Guest {
    pub(crate) context: Context,
    pub(crate) prelude: Prelude,
}

/// A function of the prelude, kept across entries into the engine.
pub(crate) struct Kept(Persistent<Function<'static>>);

impl Kept {
    fn of<'js>(ctx: &Ctx<'js>, inner: &Object<'js>, name: &str) -> Result<Self> {
        let function: Function<'js> = inner.get(name)?;
        Ok(Kept(Persistent::save(ctx, function)))
    }

    pub(crate) fn get<'js>(&self, ctx: &Ctx<'js>) -> Result<Function<'js>> {
        self.0.clone().restore(ctx)
    }
}

/// See the functions of the same names in `prelude/`.
pub(crate) struct Prelude {
    configure: Kept,
    pub(crate) settle: Kept,
    pub(crate) describe: Kept,
    pub(crate) result: Kept,
    pub(crate) unhandled: Kept,
    pub(crate) waiting: Kept,
    pub(crate) failure: Kept,
    pub(crate) refuse: Kept,
    rejection: Kept,
}

impl Prelude {
    /// Declares the tools, instead of those declared before.
    pub(crate) fn declare<'js>(&self, ctx: &Ctx<'js>, tools: rquickjs::String<'js>) -> Result<()> {
        self.configure.get(ctx)?.call((tools,))
    }
}

/// Runs `f` with the engine, which is booted on first use: while the module is built.
pub(crate) fn with<T>(f: impl FnOnce(&Guest) -> T) -> T {
    GUEST.with(|guest| {
        f(guest.get_or_init(|| boot().expect("the prelude is part of this module and loads")))
    })
}

fn boot() -> Result<Guest> {
    let runtime = Runtime::new_with_alloc(Heap)?;
    runtime.set_max_stack_size(STACK_LIMIT);
    runtime.set_loader(Modules, Modules);
    runtime.set_interrupt_handler(Some(Box::new(interrupted)));
    let context = Context::full(&runtime)?;
    let prelude = context.with(|ctx| -> Result<Prelude> {
        let native = natives::all(&ctx)?;
        let inner = prelude::load(&ctx, &native)?;
        let prelude = Prelude {
            configure: Kept::of(&ctx, &inner, "configure")?,
            settle: Kept::of(&ctx, &inner, "settle")?,
            describe: Kept::of(&ctx, &inner, "describe")?,
            result: Kept::of(&ctx, &inner, "result")?,
            unhandled: Kept::of(&ctx, &inner, "unhandled")?,
            waiting: Kept::of(&ctx, &inner, "waiting")?,
            failure: Kept::of(&ctx, &inner, "failure")?,
            refuse: Kept::of(&ctx, &inner, "refuse")?,
            rejection: Kept::of(&ctx, &inner, "rejection")?,
        };
        prelude.declare(&ctx, rquickjs::String::from_str(ctx.clone(), crate::TOOLS)?)?;
        Ok(prelude)
    })?;
    runtime.set_host_promise_rejection_tracker(Some(Box::new(track_rejection)));
    // The snapshot should hold no garbage, and the next collection should be far away.
    runtime.run_gc();
    heap::close_gaps();
    Ok(Guest { context, prelude })
}

fn track_rejection<'js>(ctx: Ctx<'js>, promise: Value<'js>, reason: Value<'js>, handled: bool) {
    natives::note();
    let told =
        with(|guest| guest.prelude.rejection.get(&ctx)?.call::<_, ()>((promise, reason, handled)));
    if told.is_err() {
        // Only memory or stack can be short here. The note about this rejection is lost, the
        // rejection isn't.
        ctx.catch();
    }
}
