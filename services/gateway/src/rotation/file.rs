//! A file of keys, as text that is changed line by line: names and what people wrote beside them
//! stay.

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

/// How a line begins that says until when a key was the first. Services skip it.
const MARK: &str = "# first until ";

/// A file that nobody else changes by this command as long as the value lives.
pub(super) struct Locked {
    path: PathBuf,
    /// Holds the lock.
    file: File,
}

impl Locked {
    /// Waits until nobody else is at the file.
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let about = || format!("{} cannot be opened", path.display());
        // What is replaced is the file, not a link to it.
        let path = fs::canonicalize(path).with_context(about)?;
        loop {
            let file = File::open(&path).with_context(about)?;
            file.lock().with_context(about)?;
            let (locked, there) = (file.metadata()?, fs::metadata(&path).with_context(about)?);
            // Whoever had the lock has put another file in its place.
            if (locked.dev(), locked.ino()) == (there.dev(), there.ino()) {
                return Ok(Self { path, file });
            }
        }
    }

    pub(super) fn read(&self) -> anyhow::Result<KeyFile> {
        // Who may read the file is checked as the services do it.
        MasterKeys::read(&self.path)
            .with_context(|| format!("{} is no file of keys", self.path.display()))?;
        let mut text = String::new();
        (&self.file).read_to_string(&mut text)?;
        KeyFile::parse(&text)
    }

    /// When the file was last changed.
    pub(super) fn changed(&self) -> anyhow::Result<Timestamp> {
        Ok(self.file.metadata()?.modified()?.try_into()?)
    }

    /// Puts another file in its place, in one step, with the same owner and rights.
    pub(super) fn replace(&self, keys: &KeyFile) -> anyhow::Result<()> {
        let mut name = self.path.clone().into_os_string();
        name.push(".new");
        let new = PathBuf::from(name);
        let write = || -> anyhow::Result<()> {
            // Left over by one that was killed.
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

/// The keys of a file, in their order, with the lines between them.
pub(super) struct KeyFile {
    lines: Vec<Line>,
}

enum Line {
    /// A comment, or nothing.
    Words(String),
    /// That a key was the first until then.
    Mark { id: String, until: Timestamp },
    /// As it stands in the file.
    Key { id: String, text: String },
}

impl KeyFile {
    pub(super) fn parse(text: &str) -> anyhow::Result<Self> {
        // What the services would not take is not touched.
        MasterKeys::parse(text).context("the text")?;
        let mut lines = Vec::new();
        for line in text.lines() {
            let trimmed = line.trim();
            if let Some((until, id)) =
                trimmed.strip_prefix(MARK).and_then(|mark| mark.split_once(": "))
                && let Ok(until) = until.parse()
            {
                lines.push(Line::Mark { id: id.to_owned(), until });
            } else if trimmed.is_empty() || trimmed.starts_with('#') {
                lines.push(Line::Words(line.to_owned()));
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
                Line::Words(words) => text.push_str(words),
                Line::Mark { id, until } => text.push_str(&format!("{MARK}{until}: {id}")),
                Line::Key { text: key, .. } => text.push_str(key),
            }
            text.push('\n');
        }
        text
    }

    /// The names of the keys; the first is the one that encrypts.
    pub(super) fn ids(&self) -> Vec<&str> {
        self.lines
            .iter()
            .filter_map(|line| match line {
                Line::Key { id, .. } => Some(id.as_str()),
                Line::Words(_) | Line::Mark { .. } => None,
            })
            .collect()
    }

    /// Until when a key was the first, where this command has made another one that.
    pub(super) fn first_until(&self, id: &str) -> Option<Timestamp> {
        self.lines
            .iter()
            .filter_map(|line| match line {
                Line::Mark { id: of, until } if of == id => Some(*until),
                _ => None,
            })
            .max()
    }

    /// Adds a key behind the others. Gives its name.
    pub(super) fn add(&mut self, name: Option<&str>, key: &[u8; 32]) -> anyhow::Result<String> {
        let encoded = STANDARD.encode(key);
        let text = name.map_or_else(|| encoded.clone(), |name| format!("{name}:{encoded}"));
        let id = MasterKeys::parse(&text).context("the new key")?.active().id().to_owned();
        ensure!(!self.ids().contains(&id.as_str()), "there is a key `{id}` already");
        self.lines.push(Line::Key { id: id.clone(), text });
        // The last line may have been a comment without an end, and the name one that breaks the
        // rest.
        MasterKeys::parse(&self.text()).context("with the new key the file")?;
        Ok(id)
    }

    /// Makes a key the first. Gives the one that was.
    pub(super) fn promote(&mut self, id: &str, now: Timestamp) -> anyhow::Result<String> {
        let place = self.place(id)?;
        let first =
            self.lines.iter().position(|line| matches!(line, Line::Key { .. })).unwrap_or(place);
        ensure!(place != first, "`{id}` is the first already");
        let key = self.lines.remove(place);
        let before = match &self.lines[first] {
            Line::Key { id, .. } => id.clone(),
            Line::Words(_) | Line::Mark { .. } => bail!("the first key is none"),
        };
        // To the second: nobody reads more than that.
        let until = now.round(Unit::Second).unwrap_or(now);
        self.lines.insert(first, Line::Mark { id: before.clone(), until });
        self.lines.insert(first, key);
        self.unmark(id);
        Ok(before)
    }

    /// Takes a key out that is not the first.
    pub(super) fn retire(&mut self, id: &str) -> anyhow::Result<()> {
        let place = self.place(id)?;
        ensure!(
            self.ids().first() != Some(&id),
            "`{id}` is the first: make another one that before (`keys promote`)"
        );
        self.lines.remove(place);
        self.unmark(id);
        Ok(())
    }

    fn unmark(&mut self, id: &str) {
        self.lines.retain(|line| !matches!(line, Line::Mark { id: of, .. } if of == id));
    }

    fn place(&self, id: &str) -> anyhow::Result<usize> {
        let place =
            self.lines.iter().position(|line| matches!(line, Line::Key { id: of, .. } if of == id));
        place.with_context(|| {
            format!("there is no key `{id}`; there are: {}", self.ids().join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: &str = "old:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=";

    fn at(second: i64) -> Timestamp {
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
        assert_eq!(keys.promote("new", at(1_000)).expect("it is promoted"), "old");
        let expected = format!(
            "# of the installation\nnew:{}\n# first until 1970-01-01T00:16:40Z: old\n{OLD}\n{unnamed}\n\n# the end\n",
            STANDARD.encode([9; 32])
        );
        assert_eq!(keys.text(), expected);
        let mut keys = KeyFile::parse(&expected).expect("what is written is read again");
        assert_eq!((keys.first_until("old"), keys.first_until("new")), (Some(at(1_000)), None));
        let services = MasterKeys::parse(&expected).expect("services take it");
        assert_eq!(services.iter().map(|key| key.id()).collect::<Vec<_>>(), keys.ids());
        keys.retire("old").expect("it is not the first");
        assert_eq!(keys.ids(), ["new", &unnamed_id]);
        assert!(!keys.text().contains("old"), "{}", keys.text());
    }

    #[test]
    fn key_promoted_again_loses_its_mark() {
        let mut keys = KeyFile::parse(OLD).expect("a key");
        keys.add(Some("new"), &[9; 32]).expect("it is added");
        keys.promote("new", at(1)).expect("it is promoted");
        keys.promote("old", at(2)).expect("it is promoted");
        assert_eq!((keys.first_until("old"), keys.first_until("new")), (None, Some(at(2))));
        assert_eq!(keys.ids(), ["old", "new"]);
    }

    #[test]
    fn invalid_changes_are_refused_without_showing_keys() {
        let mut keys = KeyFile::parse(OLD).expect("a key");
        let refused =
            |done: anyhow::Result<String>| format!("{:#}", done.expect_err("it is refused"));
        assert!(refused(keys.add(Some("old"), &[9; 32])).contains("there is a key `old` already"));
        assert!(refused(keys.add(Some("a b"), &[9; 32])).contains("whose id is not"));
        assert!(refused(keys.promote("old", at(0))).contains("is the first already"));
        assert!(
            refused(keys.promote("none", at(0))).contains("there is no key `none`; there are: old")
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
                    let locked = Locked::open(path).expect("it is there");
                    let mut keys = locked.read().expect("keys");
                    keys.add(None, &[number; 32]).expect("it is added");
                    locked.replace(&keys).expect("it is replaced");
                });
            }
        });
        assert_eq!(
            MasterKeys::read(&path).expect("keys").iter().count(),
            17,
            "nobody's key is lost"
        );
        assert!(link.is_symlink(), "the file is replaced, not the link");
        assert!(!folder.path().join("master.key.new").exists());
        fs::set_permissions(&path, Permissions::from_mode(0o640)).expect("its rights are set");
        let error =
            Locked::open(&path).and_then(|locked| locked.read()).err().expect("others may read it");
        assert!(format!("{error:#}").contains("chmod 600"), "{error:#}");
    }
}
