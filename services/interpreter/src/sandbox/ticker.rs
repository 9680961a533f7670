//! The thread that advances the epoch, which interrupts running guests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use wasmtime::Engine;

/// How often running guests return to the host.
const TICK_INTERVAL: Duration = Duration::from_millis(1);
/// Number of ticks that the thread continues after the last run, before it sleeps until the next
/// one: waking it costs more than a short run.
const IDLE_TICKS: u32 = 100;

#[derive(Debug, Default)]
struct Shared {
    runs: AtomicUsize,
    parked: AtomicBool,
    stop: AtomicBool,
}

/// Owns the thread, which sleeps while nothing runs.
#[derive(Debug)]
pub(super) struct Ticker {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Keeps the epoch advancing.
pub(super) struct Ticking<'a>(&'a Ticker);

impl Ticker {
    /// Starts the thread.
    pub(super) fn start(engine: &Engine) -> std::io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = thread::Builder::new().name("sandbox-ticker".to_owned()).spawn({
            let (shared, engine) = (Arc::clone(&shared), engine.clone());
            move || tick(&shared, &engine)
        })?;
        Ok(Ticker { shared, thread: Some(thread) })
    }

    /// Keeps the epoch advancing until the returned value is dropped.
    pub(super) fn run(&self) -> Ticking<'_> {
        self.shared.runs.fetch_add(1, Ordering::SeqCst);
        if self.shared.parked.load(Ordering::SeqCst)
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
        Ticking(self)
    }
}

impl Drop for Ticking<'_> {
    fn drop(&mut self) {
        self.0.shared.runs.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Drop for Ticker {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // The thread does not panic, and nothing could be done about it here.
            let _ = thread.join();
        }
    }
}

fn tick(shared: &Shared, engine: &Engine) {
    let mut idle = 0;
    while !shared.stop.load(Ordering::SeqCst) {
        if shared.runs.load(Ordering::SeqCst) > 0 {
            idle = 0;
        } else if idle < IDLE_TICKS {
            idle += 1;
        } else {
            // A run that begins now either sees the flag and unparks the thread, or is counted
            // before the check below.
            shared.parked.store(true, Ordering::SeqCst);
            if shared.runs.load(Ordering::SeqCst) == 0 && !shared.stop.load(Ordering::SeqCst) {
                thread::park();
            }
            shared.parked.store(false, Ordering::SeqCst);
            continue;
        }
        thread::sleep(TICK_INTERVAL);
        engine.increment_epoch();
    }
}
