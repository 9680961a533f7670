//! The engine: the compiled guest, the pool of instances and the epoch. Runs one script from start
//! to end.

use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use wasmtime::{
    Config, Enabled, InstanceAllocationStrategy, InstancePre, Linker, Module, ModuleExport,
    PoolingAllocationConfig, Store, UpdateDeadline,
};

use super::cache;
use super::drive::{Driver, lock};
use super::host::Host;
#[cfg(test)]
use super::host::ToolTable;
use super::imports::{self, State};
use super::limits::Limits;
use super::outcome::{Limit, Outcome, Status};
use super::ticker::Ticker;
use super::typescript::{self, StripError, TypeScript};

/// Stack of native code in bytes: 32 times the guest's limit on JavaScript, which the worst
/// recursion needs.
const WASM_STACK_BYTES: usize = 8 << 20;
/// Additional stack for the host's own frames.
const HOST_STACK_BYTES: usize = 512 << 10;
/// Time after the interruption at the CPU limit for the guest to report where it was. Then it is
/// stopped without a report.
const INTERRUPT_GRACE: Duration = Duration::from_millis(250);

/// Maximum CPU time of a run whose instance keeps its pages for the next run. In a debug build the
/// host's part of the same run takes several times as long.
const MAX_WARM_RUN_CPU: Duration =
    Duration::from_millis(if cfg!(debug_assertions) { 8 } else { 1 });

/// The configuration of an [`Engine`].
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Maximum number of concurrent runs; further ones wait. Each takes 4 GiB of address space (not
    /// memory) and up to eight memory maps, of which a process has 65,530 by default. So 8,000 is a
    /// sensible maximum. The few instances that parse TypeScript are additional.
    pub instances: u32,
    /// The upper bound of [`Limits::memory_bytes`].
    pub max_memory_bytes: usize,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig { instances: 1000, max_memory_bytes: 512 << 20 }
    }
}

/// Why an engine could not be created.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder of compiled code cannot be used.
    #[error("the folder for compiled code {path} cannot be used")]
    Cache {
        /// The folder.
        path: PathBuf,
        /// What failed.
        source: std::io::Error,
    },
    /// The folder of compiled code belongs to another user, or others may write to it. They could
    /// run code as this service.
    #[error(
        "the folder for compiled code {path} must belong to this user and be writable only by this user"
    )]
    CacheNotPrivate {
        /// The folder.
        path: PathBuf,
    },
    /// The guest cannot be compiled.
    #[error("the sandbox's guest cannot be compiled")]
    Compile(#[source] wasmtime::Error),
    /// The pool cannot be set up, most likely for lack of address space.
    #[error("the sandbox cannot be set up for {instances} instances")]
    Setup {
        /// The configured number of instances.
        instances: u32,
        /// What failed.
        #[source]
        source: wasmtime::Error,
    },
    /// The guest does not match this service.
    #[error("the sandbox's guest does not match this service: {0}")]
    Guest(String),
    /// The ticker thread cannot be started.
    #[error("the sandbox's ticker thread cannot be started")]
    Ticker(#[source] std::io::Error),
}

/// Runs scripts. One per process; runs share nothing but the compiled code.
pub struct Engine {
    instance: InstancePre<State>,
    exports: Exports,
    typescript: TypeScript,
    /// The address of the guest's interrupt flag, see `interrupt_flag` in the guest.
    interrupt_flag: u32,
    /// The tool declaration that every instance was booted with.
    booted_tools: String,
    slots: Semaphore,
    max_memory_bytes: usize,
    ticker: Ticker,
}

/// Indexes of the guest's exports, so that a run need not look them up by name.
struct Exports {
    memory: ModuleExport,
    run: ModuleExport,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("free_slots", &self.slots.available_permits())
            .finish_non_exhaustive()
    }
}

impl Engine {
    /// Loads the guest, and compiles it first if `cache_dir` has no matching code. Blocks
    /// meanwhile: a second in a release build, half a minute in a debug build, a few milliseconds
    /// with cached code. The guest for TypeScript is loaded on first use.
    pub fn new(cache_dir: &Path, config: EngineConfig) -> Result<Self, Error> {
        let setup = |source| Error::Setup { instances: config.instances, source };
        let engine = wasmtime::Engine::new(&wasmtime_config(&config)).map_err(setup)?;
        let module = cache::load(&engine, cache_dir, &cache::QUICKJS)?;
        Self::from_module(&module, cache_dir, config)
    }

    /// An engine with another guest, compiled each time.
    #[cfg(test)]
    pub(super) fn with_guest(
        wasm: &[u8],
        cache_dir: &Path,
        config: EngineConfig,
    ) -> Result<Self, Error> {
        let setup = |source| Error::Setup { instances: config.instances, source };
        let engine = wasmtime::Engine::new(&wasmtime_config(&config)).map_err(setup)?;
        Self::from_module(&Module::new(&engine, wasm).map_err(Error::Compile)?, cache_dir, config)
    }

    /// The engine of a compiled guest.
    fn from_module(module: &Module, cache_dir: &Path, config: EngineConfig) -> Result<Self, Error> {
        let (engine, setup) =
            (module.engine(), |source| Error::Setup { instances: config.instances, source });
        let mut linker = Linker::new(engine);
        imports::define(&mut linker).map_err(setup)?;
        let instance =
            linker.instantiate_pre(module).map_err(|error| Error::Guest(format!("{error:#}")))?;
        let exports = Exports::find(module)?;
        // This never suspends: the epoch deadline is out of reach, and no import that waits is
        // called.
        let constants = guest_constants(engine, &instance).now_or_never();
        let constants = constants
            .unwrap_or_else(|| Err(wasmtime::Error::msg("the guest suspends where it must not")));
        let (interrupt_flag, booted_tools) =
            constants.map_err(|error| Error::Guest(format!("{error:#}")))?;
        Ok(Engine {
            instance,
            exports,
            typescript: TypeScript::new(engine, cache_dir, config.max_memory_bytes),
            interrupt_flag,
            booted_tools,
            slots: Semaphore::new(config.instances as usize),
            max_memory_bytes: config.max_memory_bytes,
            ticker: Ticker::start(engine).map_err(Error::Ticker)?,
        })
    }

    /// Runs a script in a fresh instance. Waits for a free slot if the maximum number of runs is
    /// under way.
    ///
    /// Ends within milliseconds after `cancel`, wherever the script is; the host's futures are
    /// dropped then.
    pub async fn run(
        &self,
        script: &str,
        host: &dyn Host,
        limits: &Limits,
        cancel: CancellationToken,
    ) -> Outcome {
        let state =
            State::new(limits, self.max_memory_bytes, self.interrupt_flag, host.declare().names());
        let slot = tokio::select! {
            biased;
            () = cancel.cancelled() => return state.outcome(Status::Cancelled),
            slot = self.slots.acquire() => slot,
        };
        if slot.is_err() {
            return state.outcome(Status::Internal("the sandbox is closed".to_owned()));
        }
        let _ticking = self.ticker.run();
        let bridge = Arc::clone(&state.bridge);
        let mut store = self.store(state);
        let mut driver = Driver::new(host, &self.typescript, Arc::clone(&bridge), limits);
        let ended = {
            let tools = host.declare().json();
            let tools = if tools == self.booted_tools { "" } else { tools };
            let mut guest = pin!(self.execute(&mut store, tools, script));
            let driven = std::future::poll_fn(|cx| driver.poll(cx, guest.as_mut()));
            tokio::select! {
                biased;
                ended = AssertUnwindSafe(driven).catch_unwind() => match ended {
                    Ok(Ok(())) => RunEnd::Returned,
                    Ok(Err(error)) => RunEnd::Trapped(error),
                    Err(panic) => RunEnd::Panicked(panic_text(panic.as_ref())),
                },
                () = cancel.cancelled() => RunEnd::Cancelled,
                () = tokio::time::sleep(limits.wall) => RunEnd::TimedOut,
            }
        };
        let dropped = driver.dropped();
        drop(driver);
        if lock(&bridge).meter.cpu() > MAX_WARM_RUN_CPU {
            release_pages(&store);
        }
        let mut state = store.into_data();
        state.note_dropped(&dropped);
        let status = status(&mut state, ended, &dropped, limits);
        state.outcome(status)
    }

    /// Whether instances are booted with these tools, which is much faster than declaring them.
    #[cfg(test)]
    pub(crate) fn is_booted_with(&self, tools: &ToolTable) -> bool {
        tools.json() == self.booted_tools
    }

    /// Turns TypeScript into JavaScript that keeps each line in place. Types become blanks; enums
    /// and parameter properties are rewritten in place. JavaScript stays unchanged.
    ///
    /// # Errors
    /// [`StripError::Syntax`] when the source does not parse, is nested too deeply or too large, or
    /// has a construct without an equivalent.
    pub async fn strip_types(&self, source: &str) -> Result<String, StripError> {
        let _ticking = self.ticker.run();
        self.typescript.strip(source).await
    }

    fn store(&self, state: State) -> Store<State> {
        let mut store = Store::new(self.instance.module().engine(), state);
        store.limiter(|state| &mut state.memory_limiter);
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut store| {
            let state = store.data_mut();
            let cpu = lock(&state.bridge).meter.cpu();
            if cpu > state.limits.cpu + INTERRUPT_GRACE {
                state.stopped = Some(Limit::Cpu);
                return Ok(UpdateDeadline::Interrupt);
            }
            if cpu > state.limits.cpu && state.stopped.is_none() {
                state.stopped = Some(Limit::Cpu);
                let (memory, flag) = (state.memory, state.interrupt_flag);
                if let Some(memory) = memory {
                    memory.write(&mut store, flag as usize, &1u32.to_le_bytes())?;
                }
            }
            Ok(UpdateDeadline::Yield(1))
        });
        store
    }

    async fn execute(
        &self,
        store: &mut Store<State>,
        tools: &str,
        script: &str,
    ) -> wasmtime::Result<()> {
        let instance = self.instance.instantiate_async(&mut *store).await?;
        let checked = "Engine::new has checked the exports";
        let memory = instance
            .get_module_export(&mut *store, &self.exports.memory)
            .and_then(|export| export.into_memory())
            .expect(checked);
        let run = instance
            .get_module_export(&mut *store, &self.exports.run)
            .and_then(|export| export.into_func())
            .expect(checked);
        let run = run.typed::<(u32, u32, u32), ()>(&*store)?;
        let memory_limit = store.data().memory_limiter.limit.min(u32::MAX as usize) as u32;
        let state = store.data_mut();
        state.memory = Some(memory);
        if u32::try_from(tools.len() + script.len() + 1).is_err() {
            state.memory_limiter.refused = true;
            return Err(wasmtime::Error::msg("the script does not fit into any memory"));
        }
        state.reply = [tools, script].concat().into_bytes();
        run.call_async(&mut *store, (tools.len() as u32, script.len() as u32, memory_limit)).await
    }
}

impl Exports {
    fn find(module: &Module) -> Result<Self, Error> {
        let find = |name: &str| {
            module
                .get_export_index(name)
                .ok_or_else(|| Error::Guest(format!("it has no export {name}")))
        };
        Ok(Exports { memory: find("memory")?, run: find("run")? })
    }
}

pub(super) fn wasmtime_config(config: &EngineConfig) -> Config {
    let instances = config.instances.saturating_add(typescript::MAX_INSTANCES);
    let mut pool = PoolingAllocationConfig::new();
    pool.total_core_instances(instances)
        .total_memories(instances)
        .total_tables(instances)
        .total_stacks(instances)
        .max_memory_size(config.max_memory_bytes)
        .table_elements(4096)
        .max_core_instance_size(1 << 20)
        .max_tables_per_module(1)
        .max_unused_warm_slots(instances)
        // Pages that a short run touches stay mapped, which is cheaper than faulting them in again;
        // PAGEMAP_SCAN (Linux 6.7) finds the pages to reset.
        .linear_memory_keep_resident(512 << 10)
        .table_keep_resident(8 << 10)
        .async_stack_keep_resident(64 << 10)
        .pagemap_scan(Enabled::Auto);
    let mut wasmtime = Config::new();
    wasmtime
        .epoch_interruption(true)
        .memory_init_cow(true)
        // With the whole 32-bit address space reserved, accesses need no bounds checks.
        .memory_reservation(4 << 30)
        .memory_guard_size(32 << 20)
        .max_wasm_stack(WASM_STACK_BYTES)
        .async_stack_size(WASM_STACK_BYTES + HOST_STACK_BYTES)
        .async_stack_zeroing(true)
        .gc_support(false)
        .allocation_strategy(InstanceAllocationStrategy::Pooling(pool));
    wasmtime
}

/// Reads the values that are the same in every instance: the address of the interrupt flag, and the
/// declaration of the tools it was booted with.
async fn guest_constants(
    engine: &wasmtime::Engine,
    instance: &InstancePre<State>,
) -> wasmtime::Result<(u32, String)> {
    let mut store =
        Store::new(engine, State::new(&Limits::default(), usize::MAX, 0, Arc::default()));
    store.limiter(|state| &mut state.memory_limiter);
    store.set_epoch_deadline(u64::MAX / 2);
    let instance = instance.instantiate_async(&mut store).await?;
    let flag = instance.get_typed_func::<(), u32>(&mut store, "interrupt_flag")?;
    let flag = flag.call_async(&mut store, ()).await?;
    let tools = instance.get_typed_func::<(), u64>(&mut store, "booted_tools")?;
    let tools = tools.call_async(&mut store, ()).await?;
    let (at, len) = ((tools >> 32) as usize, (tools & 0xffff_ffff) as usize);
    let memory = instance
        .get_memory(&mut store, "memory")
        .ok_or_else(|| wasmtime::Error::msg("it has no memory"))?;
    let tools = memory.data(&store).get(at..at + len);
    let tools = tools.ok_or_else(|| wasmtime::Error::msg("its tools lie outside of its memory"))?;
    Ok((flag, str::from_utf8(tools)?.to_owned()))
}

/// Returns the pages that a run has written to the system. Otherwise up to half a MiB of them stays
/// with the slot, for a start without page faults. The host cannot see which of them the next run
/// has written to, and resets all of them, for as long as the slot is used. A light run writes to
/// few.
fn release_pages(store: &Store<State>) {
    let Some(memory) = store.data().memory else { return };
    let (start, len) = (memory.data_ptr(store), memory.data_size(store));
    // SAFETY: the pages belong to the run's memory, which nothing refers to or uses any more. The
    // store is dropped next, and the pool resets the memory to the guest's image, whatever its
    // content.
    let released =
        unsafe { rustix::mm::madvise(start.cast(), len, rustix::mm::Advice::LinuxDontNeed) };
    if let Err(error) = released {
        tracing::debug!(%error, "releasing the pages of a run failed");
    }
}

/// How a run ended, as the driver saw it.
enum RunEnd {
    /// The guest returned after it reported how the script ended.
    Returned,
    Trapped(wasmtime::Error),
    Panicked(String),
    Cancelled,
    TimedOut,
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "a panic".to_owned())
}

fn status(state: &mut State, ended: RunEnd, waiting_for: &[String], limits: &Limits) -> Status {
    let error = match ended {
        RunEnd::Returned => return state.finished(),
        RunEnd::Cancelled => return Status::Cancelled,
        RunEnd::TimedOut => {
            let waiting = if waiting_for.is_empty() {
                String::new()
            } else {
                format!(" It was waiting for: {}.", waiting_for.join(", "))
            };
            return Status::LimitExceeded {
                limit: Limit::Wall,
                message: format!(
                    "the script ran for longer than {:?} and was stopped.{waiting}",
                    limits.wall
                ),
                stack: String::new(),
            };
        }
        RunEnd::Panicked(text) => return Status::Internal(format!("panic in the sandbox: {text}")),
        RunEnd::Trapped(error) => error,
    };
    if let Some(limit) = state.stopped {
        return state.exceeded(limit, String::new());
    }
    match error.downcast_ref::<wasmtime::Trap>() {
        Some(wasmtime::Trap::StackOverflow) => state.exceeded(Limit::Stack, String::new()),
        _ if state.memory_limiter.refused => state.exceeded(Limit::Memory, String::new()),
        _ => Status::Internal(format!("{error:#}")),
    }
}
