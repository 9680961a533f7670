//! Machines whose clocks are set while services run on them: libfaketime says what time it is, in
//! each process whose clock the test has given to it. The monotonic clock, which nobody can set,
//! stays as it is.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

/// Names the library, where it is not where Debian's package puts it.
const LIBRARY_VARIABLE: &str = "CONSTRUCT_TEST_FAKETIME";

/// Whether the caller wants tests without clocks that jump, where libfaketime cannot be had.
pub fn are_disabled() -> bool {
    std::env::var_os("CONSTRUCT_TEST_CLOCKS").is_some_and(|clocks| clocks == "off")
}

/// Clocks in a folder, each a file that says by how many seconds it is wrong.
#[derive(Debug)]
pub struct Clocks {
    library: PathBuf,
    folder: PathBuf,
}

impl Clocks {
    /// Clocks that are right, in a folder that is there.
    ///
    /// # Errors
    /// When libfaketime is not installed.
    pub fn new(folder: &Path) -> anyhow::Result<Self> {
        Ok(Self { library: library()?, folder: folder.to_owned() })
    }

    /// Sets a clock by so many seconds, forward or backward, from what it says now.
    ///
    /// # Errors
    /// When its file cannot be written.
    pub fn jump(&self, name: &str, seconds: i64) -> io::Result<()> {
        let offset = self.offset(name) + seconds;
        let path = self.path(name);
        // At once: whoever reads half a number would be somewhere else.
        let new = path.with_extension("new");
        fs::write(&new, format!("{offset:+}\n"))?;
        fs::rename(new, path)
    }

    /// By how many seconds a clock is wrong.
    pub fn offset(&self, name: &str) -> i64 {
        fs::read_to_string(self.path(name))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or_default()
    }

    /// The words that begin a program which goes by this clock. The variables are set by the last
    /// of the programs that begin it: each that loads the library leaves something to the next one
    /// of the same process.
    ///
    /// # Errors
    /// When its file cannot be written.
    pub fn launch_prefix(&self, name: &str) -> io::Result<Vec<String>> {
        self.jump(name, 0)?;
        Ok(vec![
            "env".to_owned(),
            format!("LD_PRELOAD={}", self.library.display()),
            format!("FAKETIME_TIMESTAMP_FILE={}", self.path(name).display()),
            "FAKETIME_CACHE_DURATION=1".to_owned(),
            "FAKETIME_DONT_FAKE_MONOTONIC=1".to_owned(),
            "FAKETIME_DONT_RESET=1".to_owned(),
        ])
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(format!("{name}.clock"))
    }
}

/// Removes what the library has left in shared memory for a process that was killed.
pub(crate) fn cleanup(process: u32) {
    for name in [format!("sem.faketime_sem_{process}"), format!("faketime_shm_{process}")] {
        // Of a process that ended in good order there is nothing.
        let _ = fs::remove_file(Path::new("/dev/shm").join(name));
    }
}

fn library() -> anyhow::Result<PathBuf> {
    if let Some(named) = std::env::var_os(LIBRARY_VARIABLE) {
        return Ok(named.into());
    }
    let folders = fs::read_dir("/usr/lib")?.filter_map(Result::ok);
    let libraries = folders.map(|folder| folder.path().join("faketime/libfaketimeMT.so.1"));
    { libraries }.find(|library| library.exists()).with_context(|| {
        format!("libfaketime is not installed: `./dev test` installs it, or name it in {LIBRARY_VARIABLE}")
    })
}
