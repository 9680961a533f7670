//! The JavaScript engine of an instance.

use std::cell::OnceCell;

use rquickjs::{Context, Ctx, Function, Object, Persistent, Result, Runtime, Value};

use crate::heap::{self, Heap};
use crate::modules::Modules;
use crate::{interrupted, natives, prelude};

/// Maximum stack of JavaScript in bytes. The sandbox gives the guest's Wasm stack 32 times this
/// much, which the worst recursion through native code (`JSON.stringify` of nested arrays) needs.
const STACK_LIMIT_BYTES: usize = 256 * 1024;

thread_local! {
    static GUEST: OnceCell<Guest> = const { OnceCell::new() };
}

/// The engine, its context and the functions of the prelude that the Rust side calls.
pub(crate) struct Guest {
    pub(crate) context: Context,
    pub(crate) prelude: Prelude,
}

/// A function of the prelude that outlives one entry into the engine.
pub(crate) struct PreludeFunction(Persistent<Function<'static>>);

impl PreludeFunction {
    fn load<'js>(ctx: &Ctx<'js>, inner: &Object<'js>, name: &str) -> Result<Self> {
        let function: Function<'js> = inner.get(name)?;
        Ok(PreludeFunction(Persistent::save(ctx, function)))
    }

    pub(crate) fn get<'js>(&self, ctx: &Ctx<'js>) -> Result<Function<'js>> {
        self.0.clone().restore(ctx)
    }
}

/// The prelude functions of the same names, see `prelude/`.
pub(crate) struct Prelude {
    configure: PreludeFunction,
    pub(crate) settle: PreludeFunction,
    pub(crate) describe: PreludeFunction,
    pub(crate) result: PreludeFunction,
    pub(crate) unhandled: PreludeFunction,
    pub(crate) waiting: PreludeFunction,
    pub(crate) failure: PreludeFunction,
    pub(crate) refuse: PreludeFunction,
    rejection: PreludeFunction,
}

impl Prelude {
    /// Declares the tools and replaces the earlier declaration.
    pub(crate) fn declare<'js>(&self, ctx: &Ctx<'js>, tools: rquickjs::String<'js>) -> Result<()> {
        self.configure.get(ctx)?.call((tools,))
    }
}

/// Runs `f` with the engine. The engine boots on first use, at build time.
pub(crate) fn with<T>(f: impl FnOnce(&Guest) -> T) -> T {
    GUEST.with(|guest| {
        f(guest.get_or_init(|| boot().expect("the prelude is part of this module and loads")))
    })
}

fn boot() -> Result<Guest> {
    let runtime = Runtime::new_with_alloc(Heap)?;
    runtime.set_max_stack_size(STACK_LIMIT_BYTES);
    runtime.set_loader(Modules, Modules);
    runtime.set_interrupt_handler(Some(Box::new(interrupted)));
    let context = Context::full(&runtime)?;
    let prelude = context.with(|ctx| -> Result<Prelude> {
        let native = natives::all(&ctx)?;
        let inner = prelude::load(&ctx, &native)?;
        let prelude = Prelude {
            configure: PreludeFunction::load(&ctx, &inner, "configure")?,
            settle: PreludeFunction::load(&ctx, &inner, "settle")?,
            describe: PreludeFunction::load(&ctx, &inner, "describe")?,
            result: PreludeFunction::load(&ctx, &inner, "result")?,
            unhandled: PreludeFunction::load(&ctx, &inner, "unhandled")?,
            waiting: PreludeFunction::load(&ctx, &inner, "waiting")?,
            failure: PreludeFunction::load(&ctx, &inner, "failure")?,
            refuse: PreludeFunction::load(&ctx, &inner, "refuse")?,
            rejection: PreludeFunction::load(&ctx, &inner, "rejection")?,
        };
        prelude.declare(&ctx, rquickjs::String::from_str(ctx.clone(), crate::TOOLS)?)?;
        Ok(prelude)
    })?;
    runtime.set_host_promise_rejection_tracker(Some(Box::new(track_rejection)));
    // Keeps garbage out of the snapshot, and delays the next collection.
    runtime.run_gc();
    heap::close_gaps();
    Ok(Guest { context, prelude })
}

fn track_rejection<'js>(ctx: Ctx<'js>, promise: Value<'js>, reason: Value<'js>, handled: bool) {
    natives::note();
    let recorded =
        with(|guest| guest.prelude.rejection.get(&ctx)?.call::<_, ()>((promise, reason, handled)));
    if recorded.is_err() {
        // Only memory or stack can be short here. The note about this rejection is lost, the
        // rejection is not.
        ctx.catch();
    }
}
