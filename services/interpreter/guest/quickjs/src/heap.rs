//! The engine's memory: the C library's allocator, with the sizes of its blocks. For this target
//! the engine does not query the sizes itself. It would count each block of more than half a KiB as
//! eight bytes, and collect garbage too late.

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

// SAFETY: each function is the C library's function of the same name, and no other allocator
// handles the engine's memory.
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
        // SAFETY: the caller passes a pointer that was allocated here.
        unsafe { free(pointer.cast()) }
    }

    unsafe fn realloc(&mut self, pointer: *mut u8, size: usize) -> *mut u8 {
        // SAFETY: the caller passes a pointer that was allocated here, or null.
        unsafe { realloc(pointer.cast(), size).cast() }
    }

    unsafe fn usable_size(pointer: *mut u8) -> usize {
        // SAFETY: the pointer was allocated here, or is null.
        unsafe { malloc_usable_size(pointer.cast()) }
    }
}

/// More than the free space between any two used blocks.
const MIN_END_BYTES: usize = 64 << 10;

/// Allocates the free space between used blocks and keeps it. The memory of a run then lies
/// together behind them, instead of scattered over pages that the run would otherwise share with
/// all others.
pub(crate) fn close_gaps() {
    // SAFETY: each block is freed at most once, by the allocator it came from.
    unsafe {
        close_gaps_in(|size| malloc(size).cast(), |block, _| free(block.cast()));
        let layout = |size| Layout::from_size_align_unchecked(size, 8);
        close_gaps_in(
            |size| System.alloc(layout(size)),
            |block, size| System.dealloc(block, layout(size)),
        );
    }
}

fn close_gaps_in(allocate: impl Fn(usize) -> *mut u8, release: impl Fn(*mut u8, usize)) {
    let allocate = |size| {
        let block = allocate(size);
        assert!(!block.is_null(), "the guest boots with memory to spare");
        block
    };
    let end = allocate(MIN_END_BYTES);
    let mut size = MIN_END_BYTES / 2;
    while size >= 8 {
        let block = allocate(size);
        if block >= end {
            release(block, size);
            size /= 2;
        }
    }
    release(end, MIN_END_BYTES);
}
