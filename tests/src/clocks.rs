//! Sets the clocks of machines while services run on them. libfaketime reports the time to each
//! process that uses a clock of the test. The monotonic clock, which cannot be set, stays as it is.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::Context as _;

/// Names the library when it is not where Debian's package installs it.
const LIBRARY_VARIABLE: &str = "CONSTRUCT_TEST_FAKETIME";

/// Whether tests with clock jumps are disabled, for machines without libfaketime.
pub fn are_disabled() -> bool {
    std::env::var_os("CONSTRUCT_TEST_CLOCKS").is_some_and(|clocks| clocks == "off")
}

/// Clocks in a folder. Each is a file with its offset in seconds.
#[derive(Debug)]
pub struct Clocks {
    library: PathBuf,
    folder: PathBuf,
}

impl Clocks {
    /// Correct clocks in an existing folder.
    ///
    /// # Errors
    /// When libfaketime is not installed.
    pub fn new(folder: &Path) -> anyhow::Result<Self> {
        Ok(Self { library: library()?, folder: folder.to_owned() })
    }

    /// Moves a clock by `seconds`, forward or backward, relative to its current time.
    ///
    /// # Errors
    /// When its file cannot be written.
    pub fn jump(&self, name: &str, seconds: i64) -> io::Result<()> {
        let offset = self.offset(name) + seconds;
        let path = self.path(name);
        // Replace the file atomically: a reader of half a number would jump elsewhere.
        let new = path.with_extension("new");
        fs::write(&new, format!("{offset:+}\n"))?;
        fs::rename(new, path)
    }

    /// The offset of a clock in seconds.
    pub fn offset(&self, name: &str) -> i64 {
        fs::read_to_string(self.path(name))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .unwrap_or_default()
    }

    /// The command line prefix of a program that uses this clock. The last program of the prefix
    /// sets the variables: each one that loads the library leaves state to the next program of the
    /// same process.
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

/// Removes the shared memory that the library leaves behind for a killed process.
pub(crate) fn cleanup(process: u32) {
    for name in [format!("sem.faketime_sem_{process}"), format!("faketime_shm_{process}")] {
        // A process that ended normally leaves nothing.
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
