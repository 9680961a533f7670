//! Embeddings from model files on disk: no vendor, no key, no network ([ADR
//! 19](../../../docs/adr/0019-embeddings.md)).
//!
//! A model is a folder with `model.safetensors`, `tokenizer.json` and optionally `config.json`, in
//! the format of Model2Vec: each token has a vector, and the vector of a text is their mean. The
//! name of a model is the path of its folder below the folder that the operator configures, so that
//! a provider cannot read other files.

mod model;
mod tokenizer;

use std::{
    collections::HashMap,
    fs, io,
    num::NonZero,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::SystemTime,
};

use construct_proto::{mesh::v1::FailureClass, v1::VendorModel};
use futures::{
    FutureExt as _,
    future::{self, BoxFuture},
    stream::{self, BoxStream, StreamExt as _},
};
use tokio::{sync::Semaphore, task::spawn_blocking};

use self::model::Model;
use crate::{
    embedding::{self, EmbeddingResult},
    failure::Failure,
    vendor::{Chunk, EmbedRequest, Request, Vendor},
};

/// Models in memory at most; a further one replaces all of them.
const MAX_LOADED_MODELS: usize = 8;
/// The file whose change means a changed model.
const WEIGHTS_FILE: &str = "model.safetensors";
/// The other files of a model.
const COMPANION_FILES: [&str; 2] = ["config.json", "tokenizer.json"];

/// The models of this machine. Clones share them.
#[derive(Debug, Clone)]
pub(crate) struct LocalModels {
    folder: Option<Arc<Path>>,
    loaded: Arc<Mutex<HashMap<String, LoadedModel>>>,
    /// One permit per processor: the work is CPU-bound.
    processors: Arc<Semaphore>,
}

#[derive(Debug, Clone)]
struct LoadedModel {
    modified: (SystemTime, [Option<SystemTime>; 2]),
    model: Arc<Model>,
}

impl LocalModels {
    /// The models in `folder`; none without one.
    pub(crate) fn new(folder: Option<PathBuf>) -> Self {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        Self {
            folder: folder.map(Arc::from),
            loaded: Arc::default(),
            processors: Arc::new(Semaphore::new(processors)),
        }
    }

    fn folder(&self) -> Result<&Path, Failure> {
        self.folder.as_deref().ok_or_else(|| {
            Failure::configuration(
                "this installation has no folder with models: the providers service needs CONSTRUCT_PROVIDERS_MODELS_DIR",
            )
        })
    }

    /// The model of this name, from memory when its files have not changed. Blocks.
    fn model(&self, name: &str) -> Result<Arc<Model>, Failure> {
        let folder = self.folder()?.join(model_path(name)?);
        let changed = |file| fs::metadata(folder.join(file)).and_then(|file| file.modified());
        let weights = changed(WEIGHTS_FILE).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => model_not_found(name),
            _ => Failure::configuration(format!("the model `{name}` cannot be read: {error}")),
        })?;
        // Loading reports which of the others are missing.
        let changed = (weights, COMPANION_FILES.map(|file| changed(file).ok()));
        if let Some(loaded) = self.lock().get(name).filter(|loaded| loaded.modified == changed) {
            return Ok(Arc::clone(&loaded.model));
        }
        // Without the lock: another model must not wait for this one. Two concurrent loads of the
        // same model waste some time.
        let model = Model::load(&folder).map_err(|error| {
            Failure::configuration(format!(
                "the model `{name}` cannot be used: {}",
                crate::http::error_chain(&error)
            ))
        })?;
        let model = Arc::new(model);
        let mut loaded = self.lock();
        if loaded.len() >= MAX_LOADED_MODELS && !loaded.contains_key(name) {
            loaded.clear();
        }
        loaded
            .insert(name.to_owned(), LoadedModel { modified: changed, model: Arc::clone(&model) });
        Ok(model)
    }

    /// Every folder with a model, at most two levels deep. Blocks.
    fn names(&self) -> Result<Vec<String>, Failure> {
        let root = self.folder()?;
        let mut names = Vec::new();
        let unreadable = |error| {
            Failure::configuration(format!("the folder with models cannot be read: {error}"))
        };
        for name in list_folders(root).map_err(unreadable)? {
            if root.join(&name).join(WEIGHTS_FILE).is_file() {
                names.push(name);
                continue;
            }
            let inner = list_folders(&root.join(&name)).unwrap_or_default().into_iter();
            let inner = inner.map(|inner| format!("{name}/{inner}"));
            names.extend(inner.filter(|name| root.join(name).join(WEIGHTS_FILE).is_file()));
        }
        names.sort();
        Ok(names)
    }

    fn embed(&self, request: &Request) -> Result<EmbeddingResult, Failure> {
        let Some(EmbedRequest { texts, dimensions }) = &request.embed else {
            return Ok((Vec::new(), None));
        };
        let model = self.model(&request.model)?;
        let mut tokens = 0;
        let vectors = texts.iter().map(|text| {
            let (vector, read) = model.embed(text, *dimensions);
            tokens += read;
            vector
        });
        Ok((vectors.collect(), embedding::input_usage(i64::try_from(tokens).unwrap_or(i64::MAX))))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, LoadedModel>> {
        // No code panics between two changes that belong together.
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// This machine as a vendor.
pub(crate) struct LocalVendor(pub(crate) LocalModels);

impl Vendor for LocalVendor {
    fn invoke(&self, _request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let words = "a local model turns texts into vectors and gives no answers";
        stream::once(future::ready(Err(Failure::new(FailureClass::InvalidRequest, words)))).boxed()
    }

    fn embed(&self, request: Arc<Request>) -> BoxStream<'static, Result<Chunk, Failure>> {
        let models = self.0.clone();
        embedding::vector_chunks(async move {
            let closed = |_| Failure::internal("nobody closes this semaphore");
            let permit = Arc::clone(&models.processors).acquire_owned().await.map_err(closed)?;
            let embedded = spawn_blocking(move || {
                // Held as long as the work lasts, even when its result is not needed any more.
                let _permit = permit;
                models.embed(&request)
            });
            let embedded = embedded.await;
            embedded.map_err(|error| Failure::internal(format!("the local model: {error}")))?
        })
    }

    fn models(&self) -> BoxFuture<'static, Result<Vec<VendorModel>, Failure>> {
        let models = self.0.clone();
        async move {
            let names = spawn_blocking(move || models.names()).await;
            let names = names
                .map_err(|error| Failure::internal(format!("the folder with models: {error}")))??;
            Ok(names
                .into_iter()
                .map(|name| VendorModel { name, ..VendorModel::default() })
                .collect())
        }
        .boxed()
    }
}

/// The name of a model as a path that stays below the folder with models.
fn model_path(name: &str) -> Result<&Path, Failure> {
    let plain = |part: &str| {
        !part.starts_with('.')
            && !part.is_empty()
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    let parts = name.split('/');
    if parts.clone().count() <= 2 && parts.into_iter().all(plain) {
        Ok(Path::new(name))
    } else {
        Err(model_not_found(name))
    }
}

fn model_not_found(name: &str) -> Failure {
    Failure::new(
        FailureClass::InvalidRequest,
        format!("the model `{name}` does not exist in the folder with models"),
    )
}

fn list_folders(path: &Path) -> io::Result<Vec<String>> {
    let entries = fs::read_dir(path)?.filter_map(Result::ok);
    let folders = entries
        .filter(|entry| entry.path().is_dir())
        .filter_map(|entry| entry.file_name().into_string().ok());
    Ok(folders.filter(|name| model_path(name).is_ok()).collect())
}

#[cfg(test)]
mod tests;
