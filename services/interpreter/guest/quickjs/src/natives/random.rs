//! Random numbers from the seed that the host gives each run.

use std::cell::RefCell;

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rquickjs::{Ctx, Exception, Result, TypedArray};

use crate::host;

thread_local! {
    /// Seeded on first use, never at build time: a seeded generator in the snapshot would give
    /// every run the same numbers.
    static GENERATOR: RefCell<Option<ChaCha12Rng>> = const { RefCell::new(None) };
}

fn with_generator<T>(f: impl FnOnce(&mut ChaCha12Rng) -> T) -> T {
    GENERATOR.with_borrow_mut(|generator| {
        f(generator.get_or_insert_with(|| ChaCha12Rng::from_seed(host::seed())))
    })
}

/// A number in [0, 1) with 53 random bits.
pub(super) fn random() -> f64 {
    with_generator(|generator| (generator.next_u64() >> 11) as f64 / (1u64 << 53) as f64)
}

/// Fills the bytes.
pub(super) fn fill<'js>(ctx: Ctx<'js>, bytes: TypedArray<'js, u8>) -> Result<()> {
    let Some(mut raw) = bytes.as_raw() else {
        return Err(Exception::throw_type(&ctx, "the array's buffer is detached"));
    };
    // SAFETY: the pointer is to the array's bytes, which nothing else touches before this function
    // returns.
    with_generator(|generator| generator.fill_bytes(unsafe { raw.as_mut() }));
    Ok(())
}
