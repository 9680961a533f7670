//! What the host offers: the imports of the module, behind safe functions.
//!
//! Text crosses as a pointer and a length into this module's memory. A reply is announced by its
//! length and then fetched into a buffer of the guest's own, so that the host never allocates here.

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

/// How a run ended, as the host knows it. The numbers are part of the ABI.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum Ending {
    /// The script's value, as JSON.
    Json = 0,
    /// The script's value in console notation, because JSON can't say what it is.
    Text = 1,
    /// The script has no value.
    Undefined = 2,
    /// An exception nobody caught: JSON with name, message, stack and perhaps code and details.
    Threw = 3,
    /// The memory was used up; perhaps with the same JSON.
    OutOfMemory = 4,
    /// The host's interruption was obeyed; the same JSON says where.
    Interrupted = 5,
}

/// The script, or the reply to a call, doesn't fit into the guest's memory.
pub(crate) struct TooLarge;

/// What the run is given, and a zero byte.
pub(crate) fn input(len: usize) -> Result<Vec<u8>, TooLarge> {
    let mut input = take(len)?;
    input.push(0);
    Ok(input)
}

/// Runs a tool and waits for it. `Ok(Err(_))` is the tool's own error, both are JSON.
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

/// Starts a tool, whose end is reported by [`wait_any`].
pub(crate) fn start(number: u32, name: &[u8], args: &[u8]) {
    // SAFETY: both slices are alive during the call; the host only reads them.
    unsafe { import::start(number, name.as_ptr(), name.len(), args.as_ptr(), args.len()) }
}

/// Drops a started call, whose end is of no interest any more.
pub(crate) fn cancel(number: u32) {
    // SAFETY: no memory is passed.
    unsafe { import::cancel(number) }
}

/// One started call that has ended.
pub(crate) struct Settled {
    pub(crate) number: u32,
    pub(crate) succeeded: bool,
    pub(crate) json: Vec<u8>,
}

/// Waits for one of the started calls; `None` when there is none.
pub(crate) fn wait_any() -> Result<Option<Settled>, TooLarge> {
    let (mut number, mut succeeded) = (0, 0);
    // SAFETY: both pointers are to live variables that the host writes four bytes to.
    let len = unsafe { import::wait_any(&raw mut number, &raw mut succeeded) };
    if len < 0 {
        return Ok(None);
    }
    Ok(Some(Settled { number, succeeded: succeeded != 0, json: take(len as usize)? }))
}

/// Adds one entry to the run's output.
pub(crate) fn log(text: &[u8]) {
    // SAFETY: the slice is alive during the call; the host only reads it.
    unsafe { import::log(text.as_ptr(), text.len()) }
}

/// Tells the reader of the outcome something that is neither output nor error.
pub(crate) fn note(text: &[u8]) {
    // SAFETY: the slice is alive during the call; the host only reads it.
    unsafe { import::note(text.as_ptr(), text.len()) }
}

/// Says how the run ended.
pub(crate) fn finish(ending: Ending, text: &[u8]) {
    // SAFETY: the slice is alive during the call; the host only reads it.
    unsafe { import::finish(ending as u32, text.as_ptr(), text.len()) }
}

/// The seed of this run's random numbers.
pub(crate) fn seed() -> [u8; 32] {
    let mut seed = [0; 32];
    // SAFETY: the host writes 32 bytes.
    unsafe { import::seed(seed.as_mut_ptr()) }
    seed
}

/// The JavaScript of TypeScript. `Ok(Err(_))` is what is wrong with it: JSON, an array of message,
/// line and column.
pub(crate) fn strip(source: &[u8]) -> Result<Result<Vec<u8>, Vec<u8>>, TooLarge> {
    // SAFETY: the slice is alive during the call; the host only reads it.
    let reply = unsafe { import::strip(source.as_ptr(), source.len()) };
    if reply >= 0 { Ok(Ok(take(reply as usize)?)) } else { Ok(Err(take((-1 - reply) as usize)?)) }
}

/// Fetches the reply that was announced. Growing a buffer in the usual way would abort the guest
/// when memory is short. There is room for one byte more, with which texts end that the engine
/// reads.
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
