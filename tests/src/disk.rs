//! Small disks that can be full, without the rights of an administrator: file systems in memory
//! that only a process which does nothing else sees, and whoever is started beside it. They are
//! gone with that process, whatever ends it.
//!
//! It needs what the sandbox of commands needs as well: namespaces of users. A limit of a process's
//! files (`RLIMIT_FSIZE`) would be another error, and a file system in a file (a loop device) an
//! administrator's.

use std::{
    fs,
    io::{self, BufRead as _, BufReader},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
};

use anyhow::{Context as _, ensure};

/// What fills a disk up; beside what else is on it.
const BALLAST: &str = "ballast";
/// Makes a file system of so many MiB over each of the folders, says so, and stays until its input
/// ends, which is the test's end.
const HOLDER: &str = "while [ $# -gt 0 ]; do mount -t tmpfs -o \"mode=700,size=$2m\" tmpfs \"$1\" || exit 1; shift 2; done; echo ready; exec cat";

/// Disks that are seen by the same processes.
#[derive(Debug)]
pub struct Disks {
    holder: Child,
    /// Closed with this value.
    _stay: ChildStdin,
    /// What makes a process another user's; empty: it stays the test's.
    user: Vec<String>,
    /// That user.
    ids: (u32, u32),
}

impl Disks {
    /// Disks of so many MiB, each over a folder that is there, for processes of the test's user, or
    /// of another one.
    ///
    /// # Errors
    /// When the system does not let users make file systems of their own, which the error then
    /// says.
    pub fn mount(folders: &[(&Path, u32)], user: Option<&str>) -> anyhow::Result<Self> {
        let user: Vec<String> = match user {
            None => Vec::new(),
            Some(name) => ["setpriv", "--reuid", name, "--regid", name, "--init-groups", "--"]
                .map(str::to_owned)
                .into(),
        };
        let ids = (id(&user, "-u")?, id(&user, "-g")?);
        let unshare =
            ["unshare", "--user", "--map-root-user", "--mount", "--", "sh", "-c", HOLDER, "disks"];
        let mut command = command(&user, &unshare.map(str::to_owned));
        for (folder, size) in folders {
            command.arg(folder).arg(size.to_string());
        }
        let mut holder = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stay = holder.stdin.take().context("it has an input")?;
        let mut said = String::new();
        BufReader::new(holder.stdout.take().context("it has an output")?).read_line(&mut said)?;
        let disks = Self { holder, _stay: stay, user, ids };
        ensure!(
            said == "ready\n",
            "there can be no disks of our own: the system does not let users make namespaces (kernel.unprivileged_userns_clone, \
             user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns, or what the container allows)"
        );
        Ok(disks)
    }

    /// What a program that sees the disks is started by, in the process that is begun.
    pub fn launch_prefix(&self) -> Vec<String> {
        let holder = self.holder.id().to_string();
        let enter =
            ["nsenter", "--target", &holder, "--user", "--mount", "--preserve-credentials", "--"];
        let mut words: Vec<String> =
            self.user.iter().cloned().chain(enter.map(str::to_owned)).collect();
        // Inside, the user is called root, which servers refuse to be.
        let (user, group) = self.ids;
        if user != 0 {
            let (user, group) = (format!("--map-user={user}"), format!("--map-group={group}"));
            words.extend(["unshare", "--user", &user, &group, "--"].map(str::to_owned));
        }
        words
    }

    /// Where the test itself finds what lies at this path on a disk.
    pub fn host_path(&self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Fills the disk over a folder up to the last byte.
    ///
    /// # Errors
    /// When it cannot be written to for another reason than that it is full.
    pub fn fill(&self, folder: &Path) -> anyhow::Result<()> {
        // From inside, as the user who writes there: another one may not exist there.
        let said = self.run_inside("exec cat /dev/zero >> \"$0\"", folder)?;
        ensure!(
            said.contains("No space left on device"),
            "the disk over {} is not full: {said}",
            folder.display()
        );
        Ok(())
    }

    /// Makes room again.
    ///
    /// # Errors
    /// When that fails.
    pub fn clear(&self, folder: &Path) -> anyhow::Result<()> {
        let said = self.run_inside("rm \"$0\"", folder)?;
        ensure!(
            said.is_empty(),
            "there is no room again on the disk over {}: {said}",
            folder.display()
        );
        Ok(())
    }

    /// What a line of shell complains of that has the path of the ballast.
    fn run_inside(&self, script: &str, folder: &Path) -> io::Result<String> {
        let ballast = folder.join(BALLAST).display().to_string();
        let words = ["sh".to_owned(), "-c".to_owned(), script.to_owned(), ballast];
        let done =
            command(&self.launch_prefix(), &words).current_dir("/").env("LC_ALL", "C").output()?;
        Ok(String::from_utf8_lossy(&done.stderr).into_owned())
    }
}

impl Drop for Disks {
    fn drop(&mut self) {
        // What still runs inside keeps its disks until it ends.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// The user whose programs these words start.
fn id(user: &[String], which: &str) -> anyhow::Result<u32> {
    let said = command(user, &["id".to_owned(), which.to_owned()]).output()?;
    let said = String::from_utf8(said.stdout)?;
    said.trim().parse().with_context(|| format!("there is no such user: {user:?}"))
}

/// A command of some words, begun by others.
pub(crate) fn command(prefix: &[String], words: &[String]) -> Command {
    let mut all = prefix.iter().chain(words);
    let mut command = Command::new(all.next().map_or("true", String::as_str));
    command.args(all);
    command
}

/// The user as whom PostgreSQL runs where the test is root, which it refuses to be.
///
/// # Errors
/// When the test's own user cannot be found out.
pub fn unprivileged_user() -> io::Result<Option<&'static str>> {
    Ok((fs::metadata("/proc/self")?.uid() == 0).then_some("postgres"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_is_full_inside_its_namespace_until_cleared() {
        let folder = tempfile::tempdir().unwrap();
        let disks = Disks::mount(&[(folder.path(), 1)], None).unwrap();
        let write = || {
            let file = folder.path().join("file").display().to_string();
            let words = ["sh", "-c", "echo text | cat > \"$0\"", &file].map(str::to_owned);
            command(&disks.launch_prefix(), &words).output().unwrap()
        };
        disks.fill(folder.path()).unwrap();
        let refused = write();
        assert!(String::from_utf8_lossy(&refused.stderr).contains("No space left"), "{refused:?}");
        disks.clear(folder.path()).unwrap();
        assert!(write().status.success());
        assert_eq!(
            fs::read_to_string(disks.host_path(&folder.path().join("file"))).unwrap(),
            "text\n"
        );
        assert!(!folder.path().join("file").exists(), "nobody else sees it");
    }
}
