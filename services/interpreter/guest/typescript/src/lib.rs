//! The guest that turns TypeScript into JavaScript, in its own Wasm module. On the host, deeply
//! nested source would overflow the parser's stack and crash the process; here it ends one
//! instance.
//!
//! The module imports nothing. The ABI:
//!
//! * `alloc(len) -> ptr`: a buffer for the source.
//! * `strip(ptr, len) -> ptr`: reads the source (UTF-8) and returns the address of five 32-bit
//! words: 0 for JavaScript or 1 for an error; the address and the length of the text; and for an
//! error the line and column, counted from 1.
//!
//! An instance serves one source, so nothing is freed, and running out of memory ends it.

mod edits;
mod erase;
mod strip;

use strip::Failure;

#[unsafe(no_mangle)]
extern "C" fn alloc(len: usize) -> *mut u8 {
    Vec::<u8>::with_capacity(len).leak().as_mut_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn strip(source: *const u8, len: usize) -> *const [usize; 5] {
    // SAFETY: before it calls `strip`, the host fills a buffer of this size, which it got from
    // `alloc` and which is never freed.
    let source = unsafe { std::slice::from_raw_parts(source, len) };
    let (kind, text, line, column) = match std::str::from_utf8(source) {
        Err(_) => (1, "the source is not UTF-8".to_owned(), 1, 1),
        Ok(source) => match strip::strip(source) {
            Ok(javascript) => (0, javascript, 0, 0),
            Err(Failure { message, line, column }) => (1, message, line, column),
        },
    };
    let text: &'static str = text.leak();
    Box::leak(Box::new([kind, text.as_ptr() as usize, text.len(), line, column]))
}
