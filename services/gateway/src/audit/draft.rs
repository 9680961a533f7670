//! The draft of an audit entry, while its call runs.

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
    origin::{CallerIdentity, Origin, code_number},
};

/// Passed along with a request, from the authentication layer to the store and back.
pub(crate) struct AuditDraft {
    method: &'static Method,
    /// Without objects and outcome.
    entry: AuditEntry,
    objects: Mutex<Vec<String>>,
    written: Arc<AtomicBool>,
}

impl AuditDraft {
    pub(crate) fn new(
        method: &'static Method,
        origin: &Origin,
        known: Option<CallerIdentity>,
    ) -> Self {
        let entry = origin.entry(&method.name, known, Code::Unknown);
        Self { method, entry, objects: Mutex::default(), written: Arc::default() }
    }

    /// Adds the objects that a request names.
    pub(crate) fn add_request_objects(&self, request: &impl Message) {
        for object in self.method.request_objects(&request.encode_to_vec()) {
            self.add_object(&object);
        }
    }

    /// Adds another object of the call.
    pub(crate) fn add_object(&self, object: &str) {
        objects::add(
            object.as_bytes(),
            &mut self.objects.lock().unwrap_or_else(PoisonError::into_inner),
        );
    }

    /// For a write, which stores the entry with its change.
    pub(crate) fn audit(&self) -> Audit {
        let written = Arc::clone(&self.written);
        Audit { entry: self.entry(Code::Ok), response_objects: methods::response_objects, written }
    }

    /// The entry of a call with this outcome. Its id is always the same, so that it is never stored
    /// twice.
    pub(crate) fn entry(&self, code: Code) -> AuditEntry {
        let objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner).clone();
        AuditEntry { objects, code: code_number(code), ..self.entry.clone() }
    }

    /// Whether a write has stored the entry.
    pub(crate) fn is_written(&self) -> bool {
        self.written.load(Ordering::Acquire)
    }
}
