//! What is known of one call that writes, while it runs.

use std::sync::{
    Arc, Mutex, PoisonError,
    atomic::{AtomicBool, Ordering},
};

use construct_store::{Audit, AuditEntry};
use prost::Message;
use tonic::Code;

use super::{
    methods::{self, Method},
    objects,
    origin::{Known, Origin, number},
};

/// Goes with a request, from the layer that finds out who calls to the store and back.
pub(crate) struct AuditDraft {
    method: &'static Method,
    /// Without objects and outcome.
    entry: AuditEntry,
    objects: Mutex<Vec<String>>,
    written: Arc<AtomicBool>,
}

impl AuditDraft {
    pub(crate) fn new(method: &'static Method, origin: &Origin, known: Option<Known>) -> Self {
        let entry = origin.entry(&method.name, known, Code::Unknown);
        Self { method, entry, objects: Mutex::default(), written: Arc::default() }
    }

    /// Notes what a request names.
    pub(crate) fn read(&self, request: &impl Message) {
        for object in self.method.asked(&request.encode_to_vec()) {
            self.touch(&object);
        }
    }

    /// Notes what the call is about besides that.
    pub(crate) fn touch(&self, object: &str) {
        objects::add(
            object.as_bytes(),
            &mut self.objects.lock().unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// For a write, which stores the entry with what it changes.
    pub(crate) fn audit(&self) -> Audit {
        let written = Arc::clone(&self.written);
        Audit { entry: self.entry(Code::Ok), response_objects: methods::answered, written }
    }

    /// The entry, as it is when the call ends like this. It always has the same id, so that it is
    /// never there twice.
    pub(crate) fn entry(&self, code: Code) -> AuditEntry {
        let objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner).clone();
        AuditEntry { objects, code: number(code), ..self.entry.clone() }
    }

    /// Whether a write has stored the entry.
    pub(crate) fn is_written(&self) -> bool {
        self.written.load(Ordering::Acquire)
    }
}
