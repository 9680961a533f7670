//! Small disks that can be full, without administrator rights: in-memory file systems in the
//! namespace of a holder process. Only the holder and the programs started inside see them. They
//! vanish with the holder, however it ends.
//!
//! This needs user namespaces, as the sandbox of commands does. A limit of file sizes
//! (`RLIMIT_FSIZE`) would cause another error, and a loop device needs an administrator.

use std::{
    fs,
    io::{self, BufRead as _, BufReader},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
};

use anyhow::{Context as _, ensure};

/// The file that fills a disk up, beside its other content.
const BALLAST: &str = "ballast";
/// Mounts a file system of so many MiB over each folder, reports that, and stays until its input
/// ends, which is the end of the test.
const HOLDER: &str = "while [ $# -gt 0 ]; do mount -t tmpfs -o \"mode=700,size=$2m\" tmpfs \"$1\" || exit 1; shift 2; done; echo ready; exec cat";

/// Disks that the same processes see.
#[derive(Debug)]
pub struct Disks {
    holder: Child,
    /// Closed when this value is dropped.
    _stay: ChildStdin,
    /// The prefix that starts a process as another user; empty for the test's own user.
    user: Vec<String>,
    /// The ids of that user.
    ids: (u32, u32),
}

impl Disks {
    /// Mounts a disk over each existing folder, with a size in MiB, for processes of the test's
    /// user or of another one.
    ///
    /// # Errors
    /// When the system does not let users mount file systems; the error says so.
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

    /// The command line prefix of a program that sees the disks. The process stays the same.
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

    /// Where the test finds a path of the disk.
    pub fn host_path(&self, path: &Path) -> PathBuf {
        let root = PathBuf::from(format!("/proc/{}/root", self.holder.id()));
        root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Fills the disk over a folder to the last byte.
    ///
    /// # Errors
    /// When writing fails for another reason than a full disk.
    pub fn fill(&self, folder: &Path) -> anyhow::Result<()> {
        // From inside, as the user who writes there: another one may not exist in that namespace.
        let said = self.run_inside("exec cat /dev/zero >> \"$0\"", folder)?;
        ensure!(
            said.contains("No space left on device"),
            "the disk over {} is not full: {said}",
            folder.display()
        );
        Ok(())
    }

    /// Frees the space again.
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

    /// Runs a line of shell with the ballast's path; returns its standard error.
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
        // Processes that still run inside keep the disks until they end.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// The id of the user as whom the prefix starts programs.
fn id(user: &[String], which: &str) -> anyhow::Result<u32> {
    let said = command(user, &["id".to_owned(), which.to_owned()]).output()?;
    let said = String::from_utf8(said.stdout)?;
    said.trim().parse().with_context(|| format!("there is no such user: {user:?}"))
}

/// A command from a prefix and its own words.
pub(crate) fn command(prefix: &[String], words: &[String]) -> Command {
    let mut all = prefix.iter().chain(words);
    let mut command = Command::new(all.next().map_or("true", String::as_str));
    command.args(all);
    command
}

/// The user to run PostgreSQL as when the test is root, which PostgreSQL refuses to be.
///
/// # Errors
/// When the test's own user cannot be determined.
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
        assert!(!folder.path().join("file").exists(), "no other process sees it");
    }
}
