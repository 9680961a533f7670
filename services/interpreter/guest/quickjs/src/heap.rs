//! The engine's memory: the C library's, with the sizes of its pieces. For this target the engine does not ask for them by itself, counts each
//! piece of more than half a KiB as eight bytes, and looks for garbage accordingly late.

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

// SAFETY: each function is the C library's of the same name, and nothing else gives or takes the engine's memory.
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
