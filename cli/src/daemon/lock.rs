//! The lock that allows one daemon per mesh: a file in the mesh's data directory, locked as long as
//! the daemon runs. `./dev` checks the lock as well.

use std::{
    fs::{DirBuilder, File, OpenOptions, TryLockError},
    io::{ErrorKind, Read as _, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use crate::failure::Failure;

/// How long to wait for a lock that a status check may hold.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

fn path(home: &Path) -> PathBuf {
    home.join("run").join("daemon")
}

/// Acquires the lock for this process, until the file is dropped.
///
/// # Errors
/// When another process holds it.
pub(crate) fn acquire(home: &Path) -> Result<File, Failure> {
    let path = path(home);
    DirBuilder::new().recursive(true).mode(0o700).create(path.parent().unwrap_or(home))?;
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)?;
    // [`holder`] takes the lock for a moment.
    let deadline = Instant::now() + LOCK_TIMEOUT;
    let mut locked = file.try_lock();
    while matches!(locked, Err(TryLockError::WouldBlock)) && Instant::now() < deadline {
        std::thread::sleep(LOCK_TIMEOUT / 10);
        locked = file.try_lock();
    }
    match locked {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            let message = format!(
                "a daemon already runs the mesh in {} (process {})",
                home.display(),
                read_pid(&mut file)
            );
            return Err(Failure::failed(message).hint("construct daemon stop"));
        }
        Err(TryLockError::Error(error)) => return Err(error.into()),
    }
    file.set_len(0)?;
    writeln!(file, "{}", std::process::id())?;
    Ok(file)
}

/// The process that holds the lock; 0 when it has not written its id yet.
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
        Err(TryLockError::WouldBlock) => Ok(Some(read_pid(&mut file))),
        Err(TryLockError::Error(error)) => Err(error.into()),
    }
}

fn read_pid(file: &mut File) -> i32 {
    let mut text = String::new();
    _ = file.read_to_string(&mut text);
    text.trim().parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_has_one_holder_with_a_known_pid() {
        let home =
            std::env::temp_dir().join(format!("construct-daemon-lock-{}", uuid::Uuid::now_v7()));
        assert_eq!(holder(&home).unwrap(), None);
        let lock = acquire(&home).unwrap();
        let own = i32::try_from(std::process::id()).unwrap();
        assert_eq!(holder(&home).unwrap(), Some(own));
        let refused = acquire(&home).unwrap_err().to_string();
        assert!(refused.contains(&format!("process {own}")), "{refused}");
        drop(lock);
        assert_eq!(holder(&home).unwrap(), None);
        acquire(&home).unwrap();
        std::fs::remove_dir_all(home).unwrap();
    }
}
