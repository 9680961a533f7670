//! The engine's memory: the C library's, with the sizes of its pieces. For this target the engine
//! does not ask for them by itself, counts each piece of more than half a KiB as eight bytes, and
//! looks for garbage accordingly late.

use std::alloc::{GlobalAlloc as _, Layout, System};
use std::ffi::c_void;

use rquickjs::allocator::Allocator;

unsafe extern "C" {
    fn malloc(size: usize) -> *mut c_void;
    fn calloc(count: usize, size: usize) -> *mut c_void;
    fn realloc(pointer: *mut c_void, size: usize) -> *mut c_void;
    fn free(pointer: *mut c_void);
    fn malloc_usable_size(pointer: *mut c_void) -> usize;
}

pub(crate) struct Heap;

// SAFETY: each function is the C library's of the same name, and nothing else gives or takes the
// engine's memory.
unsafe impl Allocator for Heap {
    fn alloc(&mut self, size: usize) -> *mut u8 {
        // SAFETY: any size may be asked for.
        unsafe { malloc(size).cast() }
    }

    fn calloc(&mut self, count: usize, size: usize) -> *mut u8 {
        // SAFETY: any size may be asked for.
        unsafe { calloc(count, size).cast() }
    }

    unsafe fn dealloc(&mut self, pointer: *mut u8) {
        // SAFETY: the caller gives back what it was given here.
        unsafe { free(pointer.cast()) }
    }

    unsafe fn realloc(&mut self, pointer: *mut u8, size: usize) -> *mut u8 {
        // SAFETY: the caller gives back what it was given here, or null.
        unsafe { realloc(pointer.cast(), size).cast() }
    }

    unsafe fn usable_size(pointer: *mut u8) -> usize {
        // SAFETY: the pointer is to memory that was given here, or null.
        unsafe { malloc_usable_size(pointer.cast()) }
    }
}

/// More than what is free between two pieces in use.
const BEYOND_GAPS: usize = 64 << 10;

/// Takes what is free between the pieces in use, and keeps it. What a run allocates then lies
/// together, behind all of them, instead of scattered over pages that the run would otherwise share
/// with all others.
pub(crate) fn close_gaps() {
    // SAFETY: what is taken is given back at most once, to where it is from.
    unsafe {
        close_gaps_of(|size| malloc(size).cast(), |piece, _| free(piece.cast()));
        let layout = |size| Layout::from_size_align_unchecked(size, 8);
        close_gaps_of(
            |size| System.alloc(layout(size)),
            |piece, size| System.dealloc(piece, layout(size)),
        );
    }
}

fn close_gaps_of(take: impl Fn(usize) -> *mut u8, give_back: impl Fn(*mut u8, usize)) {
    let take = |size| {
        let piece = take(size);
        assert!(!piece.is_null(), "the guest boots with memory to spare");
        piece
    };
    let end = take(BEYOND_GAPS);
    let mut size = BEYOND_GAPS / 2;
    while size >= 8 {
        let piece = take(size);
        if piece >= end {
            give_back(piece, size);
            size /= 2;
        }
    }
    give_back(end, BEYOND_GAPS);
}
