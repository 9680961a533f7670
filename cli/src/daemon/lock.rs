//! One daemon for a mesh: it keeps a file of the mesh's folder locked as long as it lives. `./dev`
//! looks at the lock as well.

use std::{
    fs::{DirBuilder, File, OpenOptions, TryLockError},
    io::{ErrorKind, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::failure::Failure;

/// How long a lock is waited for that only somebody who looks may have.
const MOMENT: Duration = Duration::from_millis(200);

fn path(home: &Path) -> PathBuf {
    home.join("run").join("daemon")
}

/// Takes the lock for this process; it ends with the file.
///
/// # Errors
/// When another one has it.
pub(crate) fn take(home: &Path) -> Result<File, Failure> {
    let path = path(home);
    DirBuilder::new().recursive(true).mode(0o700).create(path.parent().unwrap_or(home))?;
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)?;
    // Whoever looks who has it has it for that moment.
    let end = Instant::now() + MOMENT;
    let mut tried = file.try_lock();
    while matches!(tried, Err(TryLockError::WouldBlock)) && Instant::now() < end {
        std::thread::sleep(MOMENT / 10);
        tried = file.try_lock();
    }
    match tried {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let message = format!(
                "a daemon runs the mesh in {} already (process {})",
                home.display(),
                holder_of(&mut file)
            );
            return Err(Failure::failed(message).hint("construct daemon stop"));
        }
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

/// The process that has the lock; 0 when it has not said yet who it is.
///
/// # Errors
/// When the file cannot be read.
pub(crate) fn holder(home: &Path) -> Result<Option<i32>, Failure> {
    let mut file = match File::open(path(home)) {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(None),
        Err(TryLockError::WouldBlock) => Ok(Some(holder_of(&mut file))),
        Err(TryLockError::Error(error)) => Err(error.into()),
    }
}

fn holder_of(file: &mut File) -> i32 {
    let mut text = String::new();
    _ = file.read_to_string(&mut text);
    text.trim().parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_at_a_time_has_it_and_it_is_known_who() {
        let home =
            std::env::temp_dir().join(format!("construct-daemon-lock-{}", uuid::Uuid::now_v7()));
        assert_eq!(holder(&home).unwrap(), None);
        let held = take(&home).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(holder(&home).unwrap(), Some(own));
        let refused = take(&home).unwrap_err().to_string();
        assert!(refused.contains(&format!("process {own}")), "{refused}");
        drop(held);
        assert_eq!(holder(&home).unwrap(), None);
        take(&home).unwrap();
        std::fs::remove_dir_all(home).unwrap();
    }
}
