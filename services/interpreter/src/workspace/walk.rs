//! Walks a workspace in name order, through directory descriptors, without ignored files.
//!
//! Directories are opened one component at a time relative to their parent's descriptor and never
//! through a symbolic link. A path-based walker cannot guarantee that while commands change the
//! tree. The rules of `.gitignore` and `.ignore` come from the `ignore` crate; hidden files are
//! visited, `.git` is not.

use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use ignore::Match;
use ignore::gitignore::{Gitignore, GitignoreBuilder};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, ResolveFlags};

use super::write::TEMPORARY_PREFIX;
use super::{Identity, PathError, RelativePath, Workspace, open_beneath, path_error};

/// Maximum number of entries of one walk; the walk reports that more were omitted.
pub(crate) const MAX_VISITED: usize = 200_000;

/// Maximum depth of a walk; each level holds one descriptor.
pub(crate) const MAX_DEPTH: usize = 100;

/// How much of an ignore file is read, in bytes.
const MAX_IGNORE_FILE_BYTES: u64 = 256 * 1024;

/// Maximum number of ignore rules of one directory.
const MAX_RULES: usize = 4_096;

/// Longest glob, in bytes.
const MAX_GLOB_BYTES: usize = 1_024;

/// Maximum number of opening braces in one glob, nested or not.
const MAX_GLOB_BRACES: usize = 32;

/// Whether a glob may be compiled. The compiler recurses for every level of nested braces, so a
/// glob from a script or from a file of a cloned repository could overflow the stack and end the
/// process.
pub(crate) fn is_bounded_glob(glob: &str) -> bool {
    // Counts all braces, not nested ones: what closes a brace depends on classes and escapes.
    glob.len() <= MAX_GLOB_BYTES
        && glob.bytes().filter(|byte| *byte == b'{').count() <= MAX_GLOB_BRACES
}

/// Options of a walk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Walk {
    /// Descend into subdirectories.
    pub(crate) recursive: bool,
    /// Visit ignored files and `.git`.
    pub(crate) include_ignored: bool,
}

/// How a walk ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WalkEnd {
    /// Everything was visited.
    Complete,
    /// The visitor stopped the walk.
    Stopped,
    /// The tree exceeds the limits of a walk.
    TooLarge,
}

/// The type of an entry, without following symbolic links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link, which is never followed.
    Symlink,
    /// A device, pipe or socket.
    Other,
}

/// One entry of a directory.
pub(crate) struct Entry<'a> {
    /// Path relative to the root of the workspace.
    pub(crate) path: &'a Path,
    /// Its type.
    pub(crate) kind: EntryKind,
    directory: BorrowedFd<'a>,
    name: &'a OsStr,
}

impl Entry<'_> {
    /// Opens a regular file for reading; `None` if it is not one any more, or may not be read.
    pub(crate) fn open(&self) -> Option<File> {
        let flags =
            OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let name = Path::new(self.name);
        let file =
            open_beneath(self.directory, name, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
                .ok()?;
        let stat = rustix::fs::fstat(&file).ok()?;
        (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then(|| File::from(file))
    }

    /// Size in bytes; 0 if it is unknown.
    pub(crate) fn size(&self) -> u64 {
        rustix::fs::statat(self.directory, self.name, AtFlags::SYMLINK_NOFOLLOW)
            .ok()
            .and_then(|stat| u64::try_from(stat.st_size).ok())
            .unwrap_or(0)
    }
}

type Visitor<'v> = dyn FnMut(&Entry<'_>) -> ControlFlow<()> + 'v;

struct Walker<'v> {
    options: Walk,
    visited: usize,
    too_large: bool,
    /// Files and directories that are not visited.
    hidden: Vec<Identity>,
    /// Rules of the directories from the root down to the current one.
    rules: Vec<Gitignore>,
    visit: &'v mut Visitor<'v>,
}

impl Workspace {
    /// Visits everything below the directory `base`, sorted by name within each directory.
    pub(crate) fn walk<'v>(
        &self,
        base: &RelativePath,
        options: Walk,
        visit: &'v mut Visitor<'v>,
    ) -> Result<WalkEnd, PathError> {
        let directory = self.open_directory(base)?;
        let hidden = self.hidden_identities();
        let mut walker =
            Walker { options, visited: 0, too_large: false, hidden, rules: Vec::new(), visit };
        if !options.include_ignored {
            self.rules_above(base, &mut walker.rules);
        }
        let start = if base.is_root() { PathBuf::new() } else { base.as_path().to_owned() };
        let flow = walker.descend(&directory, &start, 0).map_err(|e| path_error(base, e))?;
        Ok(match flow {
            ControlFlow::Break(()) if !walker.too_large => WalkEnd::Stopped,
            _ if walker.too_large => WalkEnd::TooLarge,
            _ => WalkEnd::Complete,
        })
    }

    /// Collects the rules of the directories above `base`, which apply below it too.
    fn rules_above(&self, base: &RelativePath, rules: &mut Vec<Gitignore>) {
        let mut above = Vec::new();
        let mut current = base.clone();
        while let Some((parent, _)) = current.split() {
            above.push(parent.clone());
            current = parent;
        }
        for path in above.iter().rev() {
            if let Ok(directory) = self.open_directory(path) {
                let start = if path.is_root() { Path::new("") } else { path.as_path() };
                rules.push(read_rules(&directory, start));
            }
        }
    }
}

impl Walker<'_> {
    fn descend(
        &mut self,
        directory: &OwnedFd,
        path: &Path,
        depth: usize,
    ) -> rustix::io::Result<ControlFlow<()>> {
        let mut names: Vec<(CString, FileType)> = Vec::new();
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name == b"." || name == b".." || name.starts_with(TEMPORARY_PREFIX.as_bytes()) {
                continue;
            }
            self.visited += 1;
            if self.visited > MAX_VISITED {
                self.too_large = true;
                break;
            }
            names.push((entry.file_name().to_owned(), entry.file_type()));
        }
        names.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        if !self.options.include_ignored {
            self.rules.push(read_rules(directory, path));
        }
        let flow = self.visit_names(directory, path, depth, &names);
        if !self.options.include_ignored {
            self.rules.pop();
        }
        Ok(flow)
    }

    fn visit_names(
        &mut self,
        directory: &OwnedFd,
        path: &Path,
        depth: usize,
        names: &[(CString, FileType)],
    ) -> ControlFlow<()> {
        for (name, file_type) in names {
            let name = OsStr::from_bytes(name.to_bytes());
            if self.is_hidden(directory.as_fd(), name) {
                continue;
            }
            let kind = kind_of(directory.as_fd(), name, *file_type);
            let path = path.join(name);
            if !self.options.include_ignored && self.is_ignored(&path, name, kind) {
                continue;
            }
            (self.visit)(&Entry { path: &path, kind, directory: directory.as_fd(), name })?;
            if kind != EntryKind::Directory || !self.options.recursive {
                continue;
            }
            if depth + 1 >= MAX_DEPTH {
                self.too_large = true;
                continue;
            }
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let opened = open_beneath(
                directory.as_fd(),
                Path::new(name),
                flags,
                Mode::empty(),
                ResolveFlags::NO_SYMLINKS,
            );
            // A directory that was deleted, became a link or may not be read is skipped.
            if let Ok(child) = opened
                && !Identity::from_handle(&child)
                    .is_ok_and(|identity| self.hidden.contains(&identity))
                && let Ok(flow) = self.descend(&child, &path, depth + 1)
            {
                flow?;
            }
            if self.visited > MAX_VISITED {
                return ControlFlow::Break(());
            }
        }
        ControlFlow::Continue(())
    }

    fn is_hidden(&self, directory: BorrowedFd<'_>, name: &OsStr) -> bool {
        !self.hidden.is_empty()
            && rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
                .is_ok_and(|stat| self.hidden.contains(&Identity::from_stat(&stat)))
    }

    fn is_ignored(&self, path: &Path, name: &OsStr, kind: EntryKind) -> bool {
        if name == ".git" {
            return true;
        }
        let path = Path::new("/").join(path);
        // The rules of the deepest directory take precedence.
        for rules in self.rules.iter().rev() {
            match rules.matched(&path, kind == EntryKind::Directory) {
                Match::Ignore(_) => return true,
                Match::Whitelist(_) => return false,
                Match::None => {}
            }
        }
        false
    }
}

fn kind_of(directory: BorrowedFd<'_>, name: &OsStr, file_type: FileType) -> EntryKind {
    let file_type = if file_type == FileType::Unknown {
        rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)
            .map_or(FileType::Unknown, |stat| FileType::from_raw_mode(stat.st_mode))
    } else {
        file_type
    };
    match file_type {
        FileType::RegularFile => EntryKind::File,
        FileType::Directory => EntryKind::Directory,
        FileType::Symlink => EntryKind::Symlink,
        _ => EntryKind::Other,
    }
}

/// Reads the rules of one directory. Invalid lines are skipped, as in git.
fn read_rules(directory: &OwnedFd, path: &Path) -> Gitignore {
    let mut builder = GitignoreBuilder::new(Path::new("/").join(path));
    let mut rules = 0;
    for name in [".git/info/exclude", ".gitignore", ".ignore"] {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = open_beneath(
            directory.as_fd(),
            Path::new(name),
            flags,
            Mode::empty(),
            ResolveFlags::NO_SYMLINKS,
        );
        let Ok(file) = opened else { continue };
        let mut text = Vec::new();
        if File::from(file).take(MAX_IGNORE_FILE_BYTES).read_to_end(&mut text).is_err() {
            continue;
        }
        for line in String::from_utf8_lossy(&text).lines().filter(|line| is_bounded_glob(line)) {
            if rules < MAX_RULES {
                drop(builder.add_line(None, line));
            }
            rules += 1;
        }
    }
    builder.build().unwrap_or_else(|_| Gitignore::empty())
}
