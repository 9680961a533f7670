//! Boots a guest once and writes a Wasm module that starts from the state after the boot.
//!
//! `construct-guest-preinit IN.wasm OUT.wasm` instantiates the module, calls its
//! `wizer-initialize`, and stores the resulting memory and globals. The result is deterministic:
//! the only import that answers is the clock, which always returns the same time. Any other import
//! call during the boot stops the tool with the import's name.

use wasmtime::error::Context as _;
use wasmtime::{Config, Engine, Linker, Result, Store, bail};
use wasmtime_wizer::Wizer;

/// The time during the boot, in microseconds since 1970.
const BOOT_TIME_MICROS: f64 = 1.7e15;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [input, output] = arguments.as_slice() else {
        bail!("usage: construct-guest-preinit IN.wasm OUT.wasm");
    };
    let module = std::fs::read(input).with_context(|| format!("cannot read {input}"))?;
    let booted = tokio::runtime::Builder::new_current_thread().build()?.block_on(boot(&module))?;
    std::fs::write(output, &booted).with_context(|| format!("cannot write {output}"))?;
    println!("{} bytes before, {} bytes after initialization", module.len(), booted.len());
    Ok(())
}

async fn boot(module: &[u8]) -> Result<Vec<u8>> {
    let mut config = Config::new();
    config.max_wasm_stack(8 << 20).async_stack_size(9 << 20);
    let engine = Engine::new(&config)?;
    let mut linker: Linker<()> = Linker::new(&engine);
    linker.func_wrap("env", "__rquickjs_host_now_us", || BOOT_TIME_MICROS)?;
    let mut store = Store::new(&engine, ());
    let booted = Wizer::new()
        .keep_init_func(false)
        .run(&mut store, module, async |store, module| {
            linker.define_unknown_imports_as_traps(module)?;
            linker.instantiate_async(store, module).await
        })
        .await?;
    Ok(booted)
}
