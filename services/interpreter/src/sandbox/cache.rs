//! The cache of the guests' machine code.
//!
//! Compiling takes a second in a release build (many in a debug build), loading a millisecond. A
//! file name holds everything its content depends on (the guest's name and hash; wasmtime's
//! version, settings and features) and the hash of the content. The hash is checked before use,
//! because wasmtime trusts the machine code it loads. For the same reason the folder must be
//! writable by this service only.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};
use wasmtime::{Engine, Module};

use super::Error;

/// A guest, see `guest/README.md`.
pub(super) struct Guest {
    name: &'static str,
    wasm: &'static [u8],
}

/// Runs scripts.
pub(super) const QUICKJS: Guest =
    Guest { name: "quickjs", wasm: include_bytes!("../../guest/artifacts/quickjs.wasm") };

/// Turns TypeScript into JavaScript.
pub(super) const TYPESCRIPT: Guest =
    Guest { name: "typescript", wasm: include_bytes!("../../guest/artifacts/typescript.wasm") };

/// Loads a guest's machine code. Compiles it first if the cache has none.
pub(super) fn load(engine: &Engine, dir: &Path, guest: &Guest) -> Result<Module, Error> {
    prepare(dir)?;
    if let Some(module) = find(engine, dir, guest)? {
        return Ok(module);
    }
    // Only one of several starting processes compiles.
    let failed = |source| Error::Cache { path: dir.to_owned(), source };
    let lock = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(dir.join("lock"))
        .map_err(failed)?;
    lock.lock().map_err(failed)?;
    if let Some(module) = find(engine, dir, guest)? {
        return Ok(module);
    }
    tracing::info!(dir = %dir.display(), guest = guest.name, "compiling a guest of the sandbox");
    let code = engine.precompile_module(guest.wasm).map_err(Error::Compile)?;
    let prefix = prefix(engine, guest);
    let path = dir.join(format!("{prefix}{}.cwasm", hex(&Sha256::digest(&code))));
    let temporary = dir.join(format!("{prefix}{}.tmp", std::process::id()));
    let mut file = OpenOptions::new()
        .create(true)
        .truncate(true)
        .write(true)
        .mode(0o600)
        .open(&temporary)
        .map_err(failed)?;
    file.write_all(&code).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&temporary, &path).map_err(failed)?;
    find(engine, dir, guest)?
        .ok_or_else(|| failed(std::io::Error::other("the compiled guest vanished")))
}

/// The name prefix of files for this engine and this guest.
fn prefix(engine: &Engine, guest: &Guest) -> String {
    struct Digest(Sha256);
    impl Hasher for Digest {
        fn finish(&self) -> u64 {
            0
        }
        fn write(&mut self, bytes: &[u8]) {
            self.0.update(bytes);
        }
    }
    let mut digest = Digest(Sha256::new_with_prefix(guest.wasm));
    engine.precompile_compatibility_hash().hash(&mut digest);
    format!("{}-{}-", guest.name, hex(&digest.0.finalize()[..16]))
}

/// Creates the folder. Refuses one that others may write to.
fn prepare(dir: &Path) -> Result<(), Error> {
    let failed = |source| Error::Cache { path: dir.to_owned(), source };
    DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    let metadata = fs::metadata(dir).map_err(failed)?;
    if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o022 != 0 {
        return Err(Error::CacheNotPrivate { path: dir.to_owned() });
    }
    Ok(())
}

/// Returns the compiled guest if the cache has an intact one. Removes damaged files for this
/// engine.
pub(super) fn find(engine: &Engine, dir: &Path, guest: &Guest) -> Result<Option<Module>, Error> {
    let prefix = prefix(engine, guest);
    let failed = |source| Error::Cache { path: dir.to_owned(), source };
    for entry in fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let Some(expected) =
            name.strip_prefix(&prefix).and_then(|rest| rest.strip_suffix(".cwasm"))
        else {
            continue;
        };
        match open(engine, &path, expected) {
            Ok(module) => return Ok(Some(module)),
            Err(reason) => {
                tracing::warn!(path = %path.display(), reason, "a compiled guest is unusable; compiling it again");
                // Another process may have removed it first.
                let _ = fs::remove_file(&path);
            }
        }
    }
    Ok(None)
}

fn open(engine: &Engine, path: &PathBuf, expected: &str) -> Result<Module, String> {
    let mut file = File::open(path).map_err(|error| error.to_string())?;
    let mut digest = Sha256::new();
    std::io::copy(&mut file, &mut HashWriter(&mut digest)).map_err(|error| error.to_string())?;
    if hex(&digest.finalize()) != expected {
        return Err("its content has changed".to_owned());
    }
    // SAFETY: the hash proves that the file is the output of `precompile_module`, for an engine
    // with this compatibility hash. Only this service's user can write to the folder, and files in
    // it are never changed in place.
    unsafe { Module::deserialize_file(engine, path) }.map_err(|error| error.to_string())
}

struct HashWriter<'a>(&'a mut Sha256);

impl std::io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write as _;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
