//! Turns TypeScript into JavaScript, in the second guest.
//!
//! Parsing hostile source natively could crash this process, because a parser recurses. So it
//! happens in a Wasm instance without imports, a fresh one for each source.

use std::path::{Path, PathBuf};

use tokio::sync::{OnceCell, Semaphore};
use wasmtime::{Engine, InstancePre, Linker, Memory, Store, Trap, UpdateDeadline};

use super::cache;
use super::imports::MemoryLimiter;

/// Maximum number of sources parsed at once; further ones wait. Parsing never waits, so more would
/// only share the processors.
pub(super) const MAX_INSTANCES: u32 = 8;
/// Memory of an instance; parsing takes a few hundred bytes per token.
const MAX_MEMORY_BYTES: usize = 256 << 20;
/// Maximum parse time in ticks of a millisecond; 200 lines take less than one.
const MAX_TICKS: u32 = 2000;

/// Why a source could not be turned into JavaScript.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StripError {
    /// The source is not runnable TypeScript.
    #[error("{message} (line {line}, column {column})")]
    Syntax {
        /// The error and, if there is an equivalent, what to write instead.
        message: String,
        /// The line, counted from 1.
        line: u32,
        /// The column in characters, counted from 1.
        column: u32,
    },
    /// The guest is unusable; this is not the source's fault.
    #[error("TypeScript cannot be parsed: {0}")]
    Unavailable(String),
}

/// The guest, loaded on first use.
pub(super) struct TypeScript {
    engine: Engine,
    cache_dir: PathBuf,
    memory: usize,
    instance: OnceCell<InstancePre<Parse>>,
    slots: Semaphore,
}

/// The data of an instance.
struct Parse {
    memory: MemoryLimiter,
    ticks: u32,
}

impl TypeScript {
    pub(super) fn new(engine: &Engine, cache_dir: &Path, max_memory_bytes: usize) -> Self {
        TypeScript {
            engine: engine.clone(),
            cache_dir: cache_dir.to_owned(),
            memory: MAX_MEMORY_BYTES.min(max_memory_bytes),
            instance: OnceCell::new(),
            slots: Semaphore::new(MAX_INSTANCES as usize),
        }
    }

    /// See [`Engine::strip_types`](super::Engine::strip_types). The engine's epoch must be
    /// advancing.
    pub(super) async fn strip(&self, source: &str) -> Result<String, StripError> {
        let instance = self.instance.get_or_try_init(|| self.load()).await?;
        let _slot = self
            .slots
            .acquire()
            .await
            .map_err(|error| StripError::Unavailable(error.to_string()))?;
        let memory = MemoryLimiter { limit: self.memory, refused: false };
        let mut store = Store::new(&self.engine, Parse { memory, ticks: 0 });
        store.limiter(|parse| &mut parse.memory);
        store.set_epoch_deadline(1);
        store.epoch_deadline_callback(|mut store| {
            let parse = store.data_mut();
            parse.ticks += 1;
            Ok(if parse.ticks > MAX_TICKS {
                UpdateDeadline::Interrupt
            } else {
                UpdateDeadline::Yield(1)
            })
        });
        let error = match parse(&mut store, instance, source).await {
            Ok(parsed) => return parsed,
            Err(error) => error,
        };
        let syntax_error =
            |message: &str| StripError::Syntax { message: message.to_owned(), line: 1, column: 1 };
        Err(match error.downcast_ref::<Trap>() {
            Some(Trap::Interrupt) => {
                syntax_error("the source takes too long to parse; split it into several")
            }
            _ if store.data().memory.refused => {
                syntax_error("the source is too large to parse; split it into several")
            }
            // The parser's stack has its own end inside the memory.
            Some(Trap::StackOverflow | Trap::MemoryOutOfBounds) => {
                syntax_error("the source is nested too deeply")
            }
            _ => StripError::Unavailable(format!("{error:#}")),
        })
    }

    async fn load(&self) -> Result<InstancePre<Parse>, StripError> {
        let (engine, dir) = (self.engine.clone(), self.cache_dir.clone());
        let loaded = tokio::task::spawn_blocking(move || {
            let module = cache::load(&engine, &dir, &cache::TYPESCRIPT)
                .map_err(|error| error.to_string())?;
            Linker::new(&engine).instantiate_pre(&module).map_err(|error| format!("{error:#}"))
        });
        let loaded = loaded.await.unwrap_or_else(|error| Err(error.to_string()));
        loaded.map_err(StripError::Unavailable)
    }
}

/// Passes the source in and the text out, see `guest/typescript/src/lib.rs`.
async fn parse(
    store: &mut Store<Parse>,
    instance: &InstancePre<Parse>,
    source: &str,
) -> wasmtime::Result<Result<String, StripError>> {
    let out_of_bounds = || wasmtime::Error::msg("the guest points outside of its memory");
    let instance = instance.instantiate_async(&mut *store).await?;
    let memory = instance
        .get_memory(&mut *store, "memory")
        .ok_or_else(|| wasmtime::Error::msg("the guest has no memory"))?;
    let alloc = instance.get_typed_func::<u32, u32>(&mut *store, "alloc")?;
    let strip = instance.get_typed_func::<(u32, u32), u32>(&mut *store, "strip")?;
    let len = u32::try_from(source.len())?;
    let at = alloc.call_async(&mut *store, len).await?;
    memory.write(&mut *store, at as usize, source.as_bytes()).map_err(|_| out_of_bounds())?;
    let answer = strip.call_async(&mut *store, (at, len)).await? as usize;
    let word = |index: usize| -> wasmtime::Result<u32> {
        let mut bytes = [0; 4];
        memory.read(&*store, answer + index * 4, &mut bytes).map_err(|_| out_of_bounds())?;
        Ok(u32::from_le_bytes(bytes))
    };
    let text = text(memory, store, word(1)?, word(2)?).ok_or_else(out_of_bounds)?;
    Ok(match word(0)? {
        0 => Ok(text),
        _ => Err(StripError::Syntax { message: text, line: word(3)?, column: word(4)? }),
    })
}

fn text(memory: Memory, store: &Store<Parse>, at: u32, len: u32) -> Option<String> {
    let bytes = memory.data(store).get(at as usize..)?.get(..len as usize)?;
    Some(String::from_utf8_lossy(bytes).into_owned())
}
