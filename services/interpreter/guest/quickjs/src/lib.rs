//! The guest: QuickJS and its prelude in one Wasm module, run once per instance by the
//! interpreter's sandbox.
//!
//! The module is booted at build time (`wizer-initialize`) and stored with its memory, so that an
//! instance starts with the engine running and the prelude loaded. The ABI, in addition to the
//! imports in [`host`]:
//!
//! * `run(tools_len, script_len, memory_limit)`: runs a script. The import `take` provides the
//! declaration of the tools (JSON, see `prelude/tools.js`) and the script (UTF-8); the import
//! `finish` receives the end. Without a declaration, the tools of the boot apply.
//! * `booted_tools() -> ptr << 32 | len`: the declaration of the tools of the boot.
//! * `interrupt_flag() -> ptr`: a 32-bit word. When the host sets it to non-zero, the script ends
//! at its next loop or call and cannot catch that; `finish` reports where it was.
//!
//! Values, errors and texts are never passed in the guest's own allocations, because those abort
//! when memory is short. Text is passed where QuickJS has it, and necessary buffers are allocated
//! fallibly.

mod guest;
mod heap;
mod host;
mod modules;
mod natives;
mod prelude;
mod run;
mod source;

use std::sync::atomic::{AtomicU32, Ordering};

/// Non-zero if the script must end.
static INTERRUPT: AtomicU32 = AtomicU32::new(0);

pub(crate) fn interrupted() -> bool {
    INTERRUPT.load(Ordering::Relaxed) != 0
}

/// Lets the guest run JavaScript again, to report where it was interrupted.
pub(crate) fn clear_interrupt() {
    INTERRUPT.store(0, Ordering::Relaxed);
}

/// The declaration of the product's tools. Declaring them takes longer than everything else before
/// a script begins, so it happens at build time.
const TOOLS: &str = include_str!("tools.json");

#[unsafe(export_name = "wizer-initialize")]
extern "C" fn boot() {
    guest::with(|_| ());
}

#[unsafe(no_mangle)]
extern "C" fn booted_tools() -> u64 {
    (TOOLS.as_ptr() as u64) << 32 | TOOLS.len() as u64
}

#[unsafe(no_mangle)]
extern "C" fn interrupt_flag() -> *const AtomicU32 {
    &raw const INTERRUPT
}

#[unsafe(no_mangle)]
extern "C" fn run(tools_len: usize, script_len: usize, memory_limit: usize) {
    match host::input(tools_len + script_len) {
        Ok(input) => {
            let (tools, script) = input.split_at(tools_len);
            guest::with(|guest| run::run(guest, tools, script, memory_limit));
        }
        Err(host::TooLarge) => host::finish(host::RunEnd::OutOfMemory, b""),
    }
}
