//! A terminal in raw mode: scrolling output with one input line below it.

use std::io::{self, Write};

use crossterm::{
    event::{DisableBracketedPaste, EnableBracketedPaste},
    execute, terminal,
};
use unicode_width::UnicodeWidthChar as _;

use crate::{
    console::{Channel, Sink, Style},
    text::{columns, printable},
};

/// Start and end of a synchronized update: the terminal draws it at once, or ignores the sequences.
/// Standard output is line-buffered, so one change takes several writes. Without this the prompt
/// would flicker.
const SYNCHRONIZED_UPDATE: (&str, &str) = ("\x1b[?2026h", "\x1b[?2026l");

/// Raw mode; dropping it restores the terminal.
pub(super) struct RawMode;

impl RawMode {
    /// # Errors
    /// When the terminal refuses.
    pub(super) fn enter() -> io::Result<Self> {
        terminal::enable_raw_mode()?;
        let raw = Self;
        execute!(io::stdout(), EnableBracketedPaste)?;
        Ok(raw)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // A failure cannot be reported here.
        let _ = execute!(io::stdout(), DisableBracketedPaste);
        let _ = terminal::disable_raw_mode();
    }
}

/// The state of the screen.
pub(super) struct Screen {
    writer: Box<dyn Write + Send>,
    color: bool,
    width: usize,
    /// Output that is written together with the next prompt, against flicker.
    pending: String,
    /// The column where the last line of output ends; 0 when the line is complete.
    column: usize,
    prompt_shown: bool,
    /// The channel of the open line.
    open: Option<Channel>,
}

impl Screen {
    pub(super) fn new(writer: Box<dyn Write + Send>, color: bool, width: usize) -> Self {
        Self {
            writer,
            color,
            width: width.max(20),
            pending: String::new(),
            column: 0,
            prompt_shown: false,
            open: None,
        }
    }

    pub(super) fn resize(&mut self, width: usize) {
        self.width = width.max(20);
    }

    /// Writes all output, and below it the prompt: `label`, then the line that `view` returns for
    /// the remaining columns.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub(super) fn prompt(
        &mut self,
        label: &str,
        style: Style,
        view: impl FnOnce(usize) -> (String, usize),
    ) -> io::Result<()> {
        self.erase_prompt();
        let label = crate::text::clip(&printable(label), self.width / 2);
        let used = columns(&label) + 1;
        let (text, cursor) = view(self.width - used);
        if self.column > 0 {
            self.pending.push_str("\r\n");
        }
        self.pending.push_str(&format!(
            "{} {text}\r\x1b[{}C",
            style.paint(&label, self.color),
            used + cursor
        ));
        self.prompt_shown = true;
        self.flush_frame()
    }

    /// Writes all output, and removes the prompt.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub(super) fn close(&mut self) -> io::Result<()> {
        self.erase_prompt();
        self.end_line()?;
        self.flush_frame()
    }

    /// Clears the terminal. The next [`Screen::prompt`] shows the prompt again.
    pub(super) fn clear(&mut self) {
        self.pending.push_str("\x1b[2J\x1b[H");
        (self.column, self.prompt_shown, self.open) = (0, false, None);
    }

    fn flush_frame(&mut self) -> io::Result<()> {
        let pending = std::mem::take(&mut self.pending);
        let (start, end) = SYNCHRONIZED_UPDATE;
        self.writer.write_all(format!("{start}{pending}{end}").as_bytes())?;
        self.writer.flush()
    }

    /// Removes the prompt, and moves the cursor to the end of the output.
    fn erase_prompt(&mut self) {
        if !std::mem::take(&mut self.prompt_shown) {
            return;
        }
        self.pending.push_str("\r\x1b[K");
        if self.column >= self.width {
            // The line was full: output continues in the line of the prompt.
            self.column = 0;
        } else if self.column > 0 {
            self.pending.push_str(&format!("\x1b[A\x1b[{}C", self.column));
        }
    }
}

impl Sink for Screen {
    fn text(&mut self, channel: Channel, style: Style, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.erase_prompt();
        if self.open.is_some_and(|open| open != channel) {
            self.end_line()?;
        }
        // The width of a tab depends on the terminal.
        let output = printable(text).replace('\t', "    ");
        for (index, line) in output.split('\n').enumerate() {
            if index > 0 {
                self.pending.push_str("\r\n");
                self.column = 0;
            }
            self.pending.push_str(&style.paint(line, self.color));
            for c in line.chars() {
                let wide = c.width().unwrap_or(0);
                // A full line wraps.
                self.column =
                    if self.column + wide > self.width { wide } else { self.column + wide };
            }
        }
        self.open = (self.column > 0).then_some(channel);
        Ok(())
    }

    fn end_line(&mut self) -> io::Result<()> {
        self.erase_prompt();
        if self.column > 0 {
            self.pending.push_str("\r\n");
            self.column = 0;
        }
        self.open = None;
        Ok(())
    }

    fn width(&self) -> usize {
        self.width
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::tests::SharedBuffer;

    fn screen() -> (Screen, SharedBuffer) {
        let buffer = SharedBuffer::default();
        (Screen::new(Box::new(buffer.clone()), false, 20), buffer)
    }

    /// The output without the sequences around each update.
    fn written(buffer: &SharedBuffer) -> String {
        buffer.text().replace(SYNCHRONIZED_UPDATE.0, "").replace(SYNCHRONIZED_UPDATE.1, "")
    }

    fn prompt(screen: &mut Screen) {
        screen.prompt("a ❯", Style::Plain, |_| ("hi".to_owned(), 2)).unwrap();
    }

    #[test]
    fn open_line_continues_above_the_prompt() {
        let (mut screen, buffer) = screen();
        screen.text(Channel::Answer, Style::Plain, "one\ntwo").unwrap();
        prompt(&mut screen);
        screen.text(Channel::Answer, Style::Plain, " three").unwrap();
        prompt(&mut screen);
        screen.close().unwrap();
        let frames = buffer.text();
        assert_eq!(
            (
                frames.matches(SYNCHRONIZED_UPDATE.0).count(),
                frames.matches(SYNCHRONIZED_UPDATE.1).count()
            ),
            (3, 3),
            "each change is one update"
        );
        let prompt = "\r\na ❯ hi\r\x1b[6C";
        assert_eq!(
            written(&buffer),
            format!(
                "one\r\ntwo{prompt}\r\x1b[K\x1b[A\x1b[3C three{prompt}\r\x1b[K\x1b[A\x1b[9C\r\n"
            )
        );
    }

    #[test]
    fn full_line_wraps() {
        let (mut screen, buffer) = screen();
        screen.text(Channel::Answer, Style::Plain, &"x".repeat(20)).unwrap();
        prompt(&mut screen);
        screen.text(Channel::Answer, Style::Plain, "y").unwrap();
        screen.close().unwrap();
        assert_eq!(written(&buffer), format!("{}\r\na ❯ hi\r\x1b[6C\r\x1b[Ky\r\n", "x".repeat(20)));
    }
}
