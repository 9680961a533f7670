//! A key file, as text that is changed line by line: names and comments stay.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{Read as _, Write as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, fchown},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail, ensure};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use construct_runtime::MasterKeys;
use jiff::{Timestamp, Unit};

/// The prefix of a comment with the time until which a key was the first. Services skip it.
const FIRST_UNTIL_PREFIX: &str = "# first until ";

/// A key file with a lock: no other run of this command changes it as long as the value lives.
pub(super) struct LockedFile {
    path: PathBuf,
    /// Holds the lock.
    file: File,
}

impl LockedFile {
    /// Opens a file and waits for its lock.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let context = || format!("{} cannot be opened", path.display());
        // Of a link the target is replaced.
        let path = fs::canonicalize(path).with_context(context)?;
        loop {
            let file = File::open(&path).with_context(context)?;
            file.lock().with_context(context)?;
            let (locked, current) = (file.metadata()?, fs::metadata(&path).with_context(context)?);
            // Otherwise the previous holder of the lock has replaced the file.
            if (locked.dev(), locked.ino()) == (current.dev(), current.ino()) {
                return Ok(Self { path, file });
            }
        }
    }

    pub(super) fn read(&self) -> anyhow::Result<KeyFile> {
        // The permissions are checked as the services do it.
        MasterKeys::read(&self.path)
            .with_context(|| format!("{} is not a key file", self.path.display()))?;
        let mut text = String::new();
        (&self.file).read_to_string(&mut text)?;
        KeyFile::parse(&text)
    }

    /// When the file was last changed.
    pub(super) fn modified_at(&self) -> anyhow::Result<Timestamp> {
        Ok(self.file.metadata()?.modified()?.try_into()?)
    }

    /// Replaces the file atomically, with the same owner and permissions.
    pub(super) fn replace(&self, keys: &KeyFile) -> anyhow::Result<()> {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        let write = || -> anyhow::Result<()> {
            // Left by a process that was killed.
            match fs::remove_file(&new) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(error.into());
                }
                _ => {}
            }
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new)?;
            let (before, now) = (self.file.metadata()?, file.metadata()?);
            if (before.uid(), before.gid()) != (now.uid(), now.gid()) {
                fchown(&file, Some(before.uid()), Some(before.gid()))?;
            }
            file.set_permissions(Permissions::from_mode(before.mode() & 0o777))?;
            file.write_all(keys.text().as_bytes())?;
            file.sync_all()?;
            fs::rename(&new, &self.path)?;
            if let Some(folder) = self.path.parent() {
                File::open(folder)?.sync_all()?;
            }
            Ok(())
        };
        write().with_context(|| format!("{} cannot be replaced", self.path.display()))
    }
}

/// The keys of a file in order, and the lines between them.
pub(super) struct KeyFile {
    lines: Vec<Line>,
}

enum Line {
    /// A comment, or an empty line.
    Comment(String),
    /// A key was the first until this time.
    FirstUntil { id: String, until: Timestamp },
    /// A key as in the file.
    Key { id: String, text: String },
}

impl KeyFile {
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        // A file that services would refuse is not changed.
        MasterKeys::parse(text).context("the text")?;
        let mut lines = Vec::new();
        for line in text.lines() {
            let trimmed = line.trim();
            if let Some((until, id)) =
                trimmed.strip_prefix(FIRST_UNTIL_PREFIX).and_then(|rest| rest.split_once(": "))
                && let Ok(until) = until.parse()
            {
                lines.push(Line::FirstUntil { id: id.to_owned(), until });
            } else if trimmed.is_empty() || trimmed.starts_with('#') {
                lines.push(Line::Comment(line.to_owned()));
            } else {
                for entry in line.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
                    let id = MasterKeys::parse(entry)?.active().id().to_owned();
                    lines.push(Line::Key { id, text: entry.to_owned() });
                }
            }
        }
        Ok(Self { lines })
    }

    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        for line in &self.lines {
            match line {
                Line::Comment(comment) => text.push_str(comment),
                Line::FirstUntil { id, until } => {
                    text.push_str(&format!("{FIRST_UNTIL_PREFIX}{until}: {id}"))
                }
                Line::Key { text: key, .. } => text.push_str(key),
            }
            text.push('\n');
        }
        text
    }

    /// The names of the keys. The first one encrypts.
    pub(super) fn ids(&self) -> Vec<&str> {
        self.lines
            .iter()
            .filter_map(|line| match line {
                Line::Key { id, .. } => Some(id.as_str()),
                Line::Comment(_) | Line::FirstUntil { .. } => None,
            })
            .collect()
    }

    /// Until when a key was the first, if this command promoted another one.
    pub(super) fn first_until(&self, id: &str) -> Option<Timestamp> {
        self.lines
            .iter()
            .filter_map(|line| match line {
                Line::FirstUntil { id: other, until } if other == id => Some(*until),
                _ => None,
            })
            .max()
    }

    /// Appends a key. Returns its name.
    pub(super) fn add(&mut self, name: Option<&str>, key: &[u8; 32]) -> anyhow::Result<String> {
        let encoded = STANDARD.encode(key);
        let text = name.map_or_else(|| encoded.clone(), |name| format!("{name}:{encoded}"));
        let id = MasterKeys::parse(&text).context("the new key")?.active().id().to_owned();
        ensure!(!self.ids().contains(&id.as_str()), "there is a key `{id}` already");
        self.lines.push(Line::Key { id: id.clone(), text });
        // The last line may be a comment without a newline, and the name may break the format.
        MasterKeys::parse(&self.text()).context("with the new key the file")?;
        Ok(id)
    }

    /// Makes a key the first. Returns the name of the previous first one.
    pub(super) fn promote(&mut self, id: &str, now: Timestamp) -> anyhow::Result<String> {
        let index = self.index_of(id)?;
        let first =
            self.lines.iter().position(|line| matches!(line, Line::Key { .. })).unwrap_or(index);
        ensure!(index != first, "`{id}` is the first already");
        let key = self.lines.remove(index);
        let before = match &self.lines[first] {
            Line::Key { id, .. } => id.clone(),
            Line::Comment(_) | Line::FirstUntil { .. } => bail!("the first key is missing"),
        };
        // Rounded to seconds, for readers.
        let until = now.round(Unit::Second).unwrap_or(now);
        self.lines.insert(first, Line::FirstUntil { id: before.clone(), until });
        self.lines.insert(first, key);
        self.remove_first_until(id);
        Ok(before)
    }

    /// Removes a key that is not the first.
    pub(super) fn retire(&mut self, id: &str) -> anyhow::Result<()> {
        let index = self.index_of(id)?;
        ensure!(
            self.ids().first() != Some(&id),
            "`{id}` is the first: promote another one before (`keys promote`)"
        );
        self.lines.remove(index);
        self.remove_first_until(id);
        Ok(())
    }

    fn remove_first_until(&mut self, id: &str) {
        self.lines
            .retain(|line| !matches!(line, Line::FirstUntil { id: other, .. } if other == id));
    }

    fn index_of(&self, id: &str) -> anyhow::Result<usize> {
        let index = self
            .lines
            .iter()
            .position(|line| matches!(line, Line::Key { id: other, .. } if other == id));
        index.with_context(|| {
            format!("there is no key `{id}`; there are: {}", self.ids().join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "old:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    fn time(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn rotation_keeps_names_and_comments() {
        let unnamed = STANDARD.encode([7; 32]);
        let text = format!("# of the installation\n{OLD}, {unnamed}\n\n# the end");
        let mut keys = KeyFile::parse(&text).expect("keys");
        let unnamed_id = keys.ids()[1].to_owned();
        assert_eq!(keys.add(Some("new"), &[9; 32]).expect("it is added"), "new");
        assert_eq!(keys.ids(), ["old", &unnamed_id, "new"]);
        assert_eq!(keys.promote("new", time(1_000)).expect("it is promoted"), "old");
        let expected = format!(
            "# of the installation\nnew:{}\n# first until 1970-01-01T00:16:40Z: old\n{OLD}\n{unnamed}\n\n# the end\n",
            STANDARD.encode([9; 32])
        );
        assert_eq!(keys.text(), expected);
        let mut keys = KeyFile::parse(&expected).expect("its own text");
        assert_eq!((keys.first_until("old"), keys.first_until("new")), (Some(time(1_000)), None));
        let services = MasterKeys::parse(&expected).expect("services accept it");
        assert_eq!(services.iter().map(|key| key.id()).collect::<Vec<_>>(), keys.ids());
        keys.retire("old").expect("it is not the first");
        assert_eq!(keys.ids(), ["new", &unnamed_id]);
        assert!(!keys.text().contains("old"), "{}", keys.text());
    }

    #[test]
    fn key_promoted_again_loses_its_mark() {
        let mut keys = KeyFile::parse(OLD).expect("a key");
        keys.add(Some("new"), &[9; 32]).expect("it is added");
        keys.promote("new", time(1)).expect("it is promoted");
        keys.promote("old", time(2)).expect("it is promoted");
        assert_eq!((keys.first_until("old"), keys.first_until("new")), (None, Some(time(2))));
        assert_eq!(keys.ids(), ["old", "new"]);
    }

    #[test]
    fn invalid_changes_are_refused_without_showing_keys() {
        let mut keys = KeyFile::parse(OLD).expect("a key");
        let refusal =
            |result: anyhow::Result<String>| format!("{:#}", result.expect_err("it is refused"));
        assert!(refusal(keys.add(Some("old"), &[9; 32])).contains("there is a key `old` already"));
        assert!(refusal(keys.add(Some("a b"), &[9; 32])).contains("whose id is not"));
        assert!(refusal(keys.promote("old", time(0))).contains("is the first already"));
        assert!(
            refusal(keys.promote("none", time(0)))
                .contains("there is no key `none`; there are: old")
        );
        let first = keys.retire("old").expect_err("it is refused");
        assert!(format!("{first:#}").contains("is the first"), "{first:#}");
        for text in ["", "# nothing", "a secret that is no key"] {
            let refused = KeyFile::parse(text)
                .err()
                .map(|error| format!("{error:#}"))
                .expect("it is refused");
            assert!(!refused.contains("a secret"), "{refused}");
        }
    }

    #[test]
    fn concurrent_changes_replace_the_file_atomically() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, link) = (folder.path().join("master.key"), folder.path().join("link"));
        fs::write(&path, OLD).expect("it is written");
        std::os::unix::fs::symlink(&path, &link).expect("a link");
        fs::set_permissions(&path, Permissions::from_mode(0o600)).expect("its rights are set");
        fs::write(folder.path().join("master.key.new"), "left over").expect("it is written");
        std::thread::scope(|scope| {
            for number in 0..16_u8 {
                let path = if number % 2 == 0 { &path } else { &link };
                scope.spawn(move || {
                    let locked = LockedFile::open(path).expect("it is there");
                    let mut keys = locked.read().expect("keys");
                    keys.add(None, &[number; 32]).expect("it is added");
                    locked.replace(&keys).expect("it is replaced");
                });
            }
        });
        assert_eq!(MasterKeys::read(&path).expect("keys").iter().count(), 17, "no key is lost");
        assert!(link.is_symlink(), "the file is replaced, not the link");
        assert!(!folder.path().join("master.key.new").exists());
        fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("its rights are set");
        let error = LockedFile::open(&path)
            .and_then(|locked| locked.read())
            .err()
            .expect("others may read it");
        assert!(format!("{error:#}").contains("chmod 600"), "{error:#}");
    }
}
