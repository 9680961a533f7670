//! A program in its own terminal: what a person types, and what the person sees.
//!
//! The terminal is a real pseudo-terminal, and a terminal emulator computes what it shows. A shell
//! starts the program, as it does for a person: it notices when the terminal is not restored.

use std::{
    ffi::OsStr,
    fmt, fs,
    path::Path,
    process::Command,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use anyhow::Context as _;
use pty_process::OwnedWritePty;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    process::Child,
    task::AbortHandle,
};
use vt100::Parser;

use crate::{client::TURN_TIMEOUT, wait::until};

/// Ends a line.
pub const ENTER: &str = "\r";
/// The escape key. Keys typed directly after it would be read as one key with it.
pub const ESC: &str = "\x1b";
/// The tab key.
pub const TAB: &str = "\t";
/// Ctrl-C.
pub const CTRL_C: &str = "\x03";
/// Ctrl-D.
pub const CTRL_D: &str = "\x04";

/// Rows and columns.
const SIZE: (u16, u16) = (50, 100);

/// What the shell prints when the program has ended.
const EXIT_MARK: &str = "~ the program has ended";

/// Writes the terminal's state before and after the program, its process id and its exit code to
/// files. Ctrl-C reaches the whole foreground; the shell survives it.
const SHELL: &str = r#"
trap : INT
dir=$1
shift
stty -g >"$dir/before"
sh -c 'echo $$ >"$0"; exec "$@"' "$dir/pid" "$@"
echo $? >"$dir/code"
stty -g >"$dir/after"
printf '%s\n' "$EXIT_MARK"
read -r _
"#;

/// The marks around output that a terminal draws at once.
const FRAME: (&[u8], &[u8]) = (b"\x1b[?2026h", b"\x1b[?2026l");

/// A terminal with a program. Everything ends when it is dropped.
pub struct Terminal {
    keyboard: OwnedWritePty,
    shared: Arc<Mutex<Screen>>,
    reader: AbortHandle,
    /// Killed when dropped.
    _shell: Child,
    notes: TempDir,
}

/// The current and the earlier content of the screen.
struct Screen {
    emulator: Parser,
    /// Output that is not shown yet because its frame is incomplete.
    pending: Vec<u8>,
    /// Every distinct screen content, in order.
    pictures: Vec<String>,
}

impl fmt::Debug for Terminal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Terminal").field("screen", &self.screen()).finish_non_exhaustive()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        self.reader.abort();
        if std::thread::panicking() {
            eprintln!("---- terminal ----\n{}", self.screen());
        }
    }
}

impl Terminal {
    /// Runs a program with these arguments and only these environment variables.
    ///
    /// # Errors
    /// When the system provides no terminal, or the shell does not start.
    pub fn run<A: AsRef<OsStr>>(
        program: &Path,
        arguments: &[A],
        environment: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let notes = tempfile::tempdir()?;
        let (pty, pts) = pty_process::open()?;
        pty.resize(pty_process::Size::new(SIZE.0, SIZE.1))?;
        let shell = pty_process::Command::new("/bin/sh")
            .args(["-c", SHELL, "sh"])
            .arg(notes.path())
            .arg(program)
            .args(arguments)
            .env_clear()
            .env("PATH", std::env::var_os("PATH").unwrap_or_default())
            .env("TERM", "xterm-256color")
            .env("EXIT_MARK", EXIT_MARK)
            .envs(environment.iter().copied())
            .kill_on_drop(true)
            .spawn(pts)
            .context("the shell does not start")?;
        let (mut screen, keyboard) = pty.into_split();
        let (rows, columns) = (SIZE.0.try_into()?, SIZE.1.try_into()?);
        let shared = Arc::new(Mutex::new(Screen {
            emulator: Parser::new(rows, columns, 0),
            pending: Vec::new(),
            pictures: Vec::new(),
        }));
        let shown = Arc::clone(&shared);
        let reader = tokio::spawn(async move {
            let mut buffer = [0; 4096];
            // Reading from an abandoned terminal ends with an error.
            while let Ok(count @ 1..) = screen.read(&mut buffer).await {
                lock(&shown).write(&buffer[..count]);
            }
        });
        Ok(Self { keyboard, shared, reader: reader.abort_handle(), _shell: shell, notes })
    }

    /// The current screen content.
    pub fn screen(&self) -> String {
        lock(&self.shared).emulator.screen().contents()
    }

    /// Every distinct screen content so far, in order.
    pub fn pictures(&self) -> Vec<String> {
        lock(&self.shared).pictures.clone()
    }

    /// Types keys.
    pub async fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).await.expect("the terminal takes keys");
    }

    /// Types a line.
    pub async fn type_line(&mut self, text: &str) {
        self.press(&format!("{text}{ENTER}")).await;
    }

    /// Waits until the screen contains this text, on one line or wrapped.
    pub async fn wait_for_text(&self, text: &str) {
        self.wait_for_screen(&format!("{text:?} on the screen"), |screen| {
            contains_text(screen, text)
        })
        .await;
    }

    /// Waits until `predicate` accepts the screen.
    pub async fn wait_for_screen(&self, what: &str, predicate: impl Fn(&str) -> bool) {
        until(what, TURN_TIMEOUT, async || {
            let screen = self.screen();
            if predicate(&screen) {
                Ok(())
            } else {
                Err(screen.lines().map(ToOwned::to_owned).collect::<Vec<_>>())
            }
        })
        .await;
    }

    /// Sends a signal (`TERM`, …) to the program.
    ///
    /// # Errors
    /// When the program is not running.
    pub fn signal(&self, name: &str) -> anyhow::Result<()> {
        let status =
            Command::new("kill").args([&format!("-{name}"), &self.read_note("pid")?]).status()?;
        anyhow::ensure!(status.success(), "the program does not run");
        Ok(())
    }

    /// Waits for the program to end; returns its exit code.
    ///
    /// # Panics
    /// When it left the terminal in a changed state.
    pub async fn wait_for_exit(self) -> i32 {
        self.wait_for_text(EXIT_MARK).await;
        let note = |name: &str| self.read_note(name).expect("the shell wrote it down");
        assert_eq!(
            note("before"),
            note("after"),
            "the terminal is not as it was:\n{}",
            self.screen()
        );
        {
            let shown = lock(&self.shared);
            let screen = shown.emulator.screen();
            assert!(
                !screen.bracketed_paste() && !screen.hide_cursor() && !screen.alternate_screen()
            );
        }
        let screen = self.screen();
        assert!(
            screen.lines().any(|line| line == EXIT_MARK),
            "the shell's line does not begin at the margin:\n{screen}"
        );
        note("code").parse().expect("an exit code is a number")
    }

    fn read_note(&self, name: &str) -> anyhow::Result<String> {
        let text = fs::read_to_string(self.notes.path().join(name))
            .with_context(|| format!("no {name} is noted"))?;
        Ok(text.trim().to_owned())
    }
}

impl Screen {
    fn write(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
        while let Some(end) = find(&self.pending, FRAME.1) {
            let whole: Vec<u8> = self.pending.drain(..end + FRAME.1.len()).collect();
            self.draw(&whole);
        }
        let begun = find(&self.pending, FRAME.0).is_some();
        let beginning = (1..FRAME.0.len()).any(|length| self.pending.ends_with(&FRAME.0[..length]));
        if !begun && !beginning {
            let rest = std::mem::take(&mut self.pending);
            self.draw(&rest);
        }
    }

    fn draw(&mut self, bytes: &[u8]) {
        self.emulator.process(bytes);
        let picture = self.emulator.screen().contents();
        if self.pictures.last() != Some(&picture) {
            self.pictures.push(picture);
        }
    }
}

/// Whether a screen contains this text, on one line or wrapped.
pub fn contains_text(screen: &str, text: &str) -> bool {
    screen.contains(text) || screen.replace('\n', "").contains(text)
}

fn find(bytes: &[u8], predicate: &[u8]) -> Option<usize> {
    bytes.windows(predicate.len()).position(|window| window == predicate)
}

fn lock(shown: &Mutex<Screen>) -> MutexGuard<'_, Screen> {
    shown.lock().unwrap_or_else(PoisonError::into_inner)
}
