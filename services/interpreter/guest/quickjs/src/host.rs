//! The imports of the module, behind safe functions.
//!
//! Text is passed as a pointer and a length in this module's memory. A reply is announced by its
//! length and then fetched into a buffer of the guest, so that the host never allocates here.

mod import {
    #[link(wasm_import_module = "host")]
    unsafe extern "C" {
        pub(super) fn call(
            number: u32,
            name: *const u8,
            name_len: usize,
            args: *const u8,
            args_len: usize,
        ) -> i64;
        pub(super) fn start(
            number: u32,
            name: *const u8,
            name_len: usize,
            args: *const u8,
            args_len: usize,
        );
        pub(super) fn cancel(number: u32);
        pub(super) fn wait_any(number: *mut u32, succeeded: *mut u32) -> i64;
        pub(super) fn take(buffer: *mut u8);
        pub(super) fn log(text: *const u8, len: usize);
        pub(super) fn note(text: *const u8, len: usize);
        pub(super) fn finish(kind: u32, text: *const u8, len: usize);
        pub(super) fn seed(buffer: *mut u8);
        pub(super) fn strip(source: *const u8, len: usize) -> i64;
    }
}

/// How a run ended. The numbers are part of the ABI.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum RunEnd {
    /// The script's value, as JSON.
    Json = 0,
    /// The script's value in console notation, because JSON cannot represent it.
    Text = 1,
    /// The script has no value.
    Undefined = 2,
    /// An uncaught exception: JSON with name, message, stack and perhaps code and details.
    Threw = 3,
    /// The memory was exhausted; perhaps with the same JSON.
    OutOfMemory = 4,
    /// The host interrupted the run; the same JSON says where.
    Interrupted = 5,
}

/// The script, or the reply to a call, does not fit into the guest's memory.
pub(crate) struct TooLarge;

/// The input of the run, and a zero byte.
pub(crate) fn input(len: usize) -> Result<Vec<u8>, TooLarge> {
    let mut input = take(len)?;
    input.push(0);
    Ok(input)
}

/// Runs a tool and waits for it. `Ok(Err(_))` is the tool's own error; both are JSON.
pub(crate) fn call(
    number: u32,
    name: &[u8],
    args: &[u8],
) -> Result<Result<Vec<u8>, Vec<u8>>, TooLarge> {
    // SAFETY: both slices are alive during the call; the host only reads them.
    let reply =
        unsafe { import::call(number, name.as_ptr(), name.len(), args.as_ptr(), args.len()) };
    if reply >= 0 { Ok(Ok(take(reply as usize)?)) } else { Ok(Err(take((-1 - reply) as usize)?)) }
}

/// Starts a tool; [`wait_any`] reports its end.
pub(crate) fn start(number: u32, name: &[u8], args: &[u8]) {
    // SAFETY: both slices are alive during the call; the host only reads them.
    unsafe { import::start(number, name.as_ptr(), name.len(), args.as_ptr(), args.len()) }
}

/// Drops a started call whose end is no longer needed.
pub(crate) fn cancel(number: u32) {
    // SAFETY: no memory is passed.
    unsafe { import::cancel(number) }
}

/// A started call that has ended.
pub(crate) struct SettledCall {
    pub(crate) number: u32,
    pub(crate) succeeded: bool,
    pub(crate) json: Vec<u8>,
}

/// Waits for the end of a started call; `None` if there is none.
pub(crate) fn wait_any() -> Result<Option<SettledCall>, TooLarge> {
    let (mut number, mut succeeded) = (0, 0);
    // SAFETY: both pointers are to live variables that the host writes four bytes to.
    let len = unsafe { import::wait_any(&raw mut number, &raw mut succeeded) };
    if len < 0 {
        return Ok(None);
    }
    Ok(Some(SettledCall { number, succeeded: succeeded != 0, json: take(len as usize)? }))
}

/// Adds one entry to the run's output.
pub(crate) fn log(text: &[u8]) {
    // SAFETY: the slice is alive during the call; the host only reads it.
    unsafe { import::log(text.as_ptr(), text.len()) }
}

/// Adds a note to the outcome: neither output nor error.
pub(crate) fn note(text: &[u8]) {
    // SAFETY: the slice is alive during the call; the host only reads it.
    unsafe { import::note(text.as_ptr(), text.len()) }
}

/// Reports how the run ended.
pub(crate) fn finish(end: RunEnd, text: &[u8]) {
    // SAFETY: the slice is alive during the call; the host only reads it.
    unsafe { import::finish(end as u32, text.as_ptr(), text.len()) }
}

/// The seed of this run's random numbers.
pub(crate) fn seed() -> [u8; 32] {
    let mut seed = [0; 32];
    // SAFETY: the host writes 32 bytes.
    unsafe { import::seed(seed.as_mut_ptr()) }
    seed
}

/// Turns TypeScript into JavaScript. `Ok(Err(_))` is the error: a JSON array of message, line and
/// column.
pub(crate) fn strip(source: &[u8]) -> Result<Result<Vec<u8>, Vec<u8>>, TooLarge> {
    // SAFETY: the slice is alive during the call; the host only reads it.
    let reply = unsafe { import::strip(source.as_ptr(), source.len()) };
    if reply >= 0 { Ok(Ok(take(reply as usize)?)) } else { Ok(Err(take((-1 - reply) as usize)?)) }
}

/// Fetches the announced reply. Growing a buffer in the usual way would abort the guest when memory
/// is short. There is room for one more byte, for the terminator of texts that the engine reads.
fn take(len: usize) -> Result<Vec<u8>, TooLarge> {
    let mut reply = Vec::new();
    reply.try_reserve_exact(len + 1).map_err(|_| TooLarge)?;
    // SAFETY: the host writes exactly the `len` bytes it announced, for which the buffer has room.
    unsafe {
        import::take(reply.as_mut_ptr());
        reply.set_len(len);
    }
    Ok(reply)
}
