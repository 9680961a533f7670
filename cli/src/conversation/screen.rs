//! A terminal in raw mode: output flows, and below it stands one line that a person types in.

use std::io::{self, Write};

use crossterm::{
    event::{DisableBracketedPaste, EnableBracketedPaste},
    execute, terminal,
};
use unicode_width::UnicodeWidthChar as _;

use crate::{
    console::{Channel, Sink, Style},
    words::{columns, printable},
};

/// What stands between these is drawn at once by terminals that know them, and others ignore them.
/// Standard output is written line by line, so that one change takes several writes, between which
/// the prompt would be seen to come and go.
const FRAME: (&str, &str) = ("\x1b[?2026h", "\x1b[?2026l");

/// The terminal as it was found is given back when this is dropped.
pub(super) struct RawMode;

impl RawMode {
    /// # Errors
    /// When the terminal can't do it.
    pub(super) fn enter() -> io::Result<Self> {
        terminal::enable_raw_mode()?;
        let raw = Self;
        execute!(io::stdout(), EnableBracketedPaste)?;
        Ok(raw)
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        // There is nobody left to tell if that fails.
        let _ = execute!(io::stdout(), DisableBracketedPaste);
        let _ = terminal::disable_raw_mode();
    }
}

/// What is on the screen.
pub(super) struct Screen {
    to: Box<dyn Write + Send>,
    color: bool,
    width: usize,
    /// Written out with the prompt, so that nothing flickers.
    pending: String,
    /// Where the output's last line ends; 0 when it is complete.
    column: usize,
    prompted: bool,
    /// The channel whose line is open.
    open: Option<Channel>,
}

impl Screen {
    pub(super) fn new(to: Box<dyn Write + Send>, color: bool, width: usize) -> Self {
        Self {
            to,
            color,
            width: width.max(20),
            pending: String::new(),
            column: 0,
            prompted: false,
            open: None,
        }
    }

    pub(super) fn resize(&mut self, width: usize) {
        self.width = width.max(20);
    }

    /// Shows all output, and below it the line: `label`, then what `view` gives for the columns
    /// that are left.
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
        let label = crate::words::clip(&printable(label), self.width / 2);
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
        self.prompted = true;
        self.show()
    }

    /// Shows all output, and takes the prompt away.
    ///
    /// # Errors
    /// When the terminal is gone.
    pub(super) fn close(&mut self) -> io::Result<()> {
        self.erase_prompt();
        self.end_line()?;
        self.show()
    }

    /// Empties the terminal; the prompt comes back with the next [`Screen::prompt`].
    pub(super) fn clear(&mut self) {
        self.pending.push_str("\x1b[2J\x1b[H");
        (self.column, self.prompted, self.open) = (0, false, None);
    }

    fn show(&mut self) -> io::Result<()> {
        let pending = std::mem::take(&mut self.pending);
        let (begin, end) = FRAME;
        self.to.write_all(format!("{begin}{pending}{end}").as_bytes())?;
        self.to.flush()
    }

    /// Takes the prompt away and goes back to where the output ends.
    fn erase_prompt(&mut self) {
        if !std::mem::take(&mut self.prompted) {
            return;
        }
        self.pending.push_str("\r\x1b[K");
        if self.column >= self.width {
            // The line was full: what follows begins where the prompt stood.
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
        // Tabs move by what the terminal thinks; spaces by what we think.
        let shown = printable(text).replace('\t', "    ");
        for (index, line) in shown.split('\n').enumerate() {
            if index > 0 {
                self.pending.push_str("\r\n");
                self.column = 0;
            }
            self.pending.push_str(&style.paint(line, self.color));
            for c in line.chars() {
                let wide = c.width().unwrap_or(0);
                // A full line goes on in the next one.
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
    use crate::console::tests::Paper;

    fn screen() -> (Screen, Paper) {
        let paper = Paper::default();
        (Screen::new(Box::new(paper.clone()), false, 20), paper)
    }

    /// What was written, without the marks around each change.
    fn written(paper: &Paper) -> String {
        paper.text().replace(FRAME.0, "").replace(FRAME.1, "")
    }

    fn prompt(screen: &mut Screen) {
        screen.prompt("a ❯", Style::Plain, |_| ("hi".to_owned(), 2)).unwrap();
    }

    #[test]
    fn open_lines_go_on_where_they_ended_above_the_prompt() {
        let (mut screen, paper) = screen();
        screen.text(Channel::Answer, Style::Plain, "one\ntwo").unwrap();
        prompt(&mut screen);
        screen.text(Channel::Answer, Style::Plain, " three").unwrap();
        prompt(&mut screen);
        screen.close().unwrap();
        let frames = paper.text();
        assert_eq!(
            (frames.matches(FRAME.0).count(), frames.matches(FRAME.1).count()),
            (3, 3),
            "each change is one frame"
        );
        let prompt = "\r\na ❯ hi\r\x1b[6C";
        assert_eq!(
            written(&paper),
            format!(
                "one\r\ntwo{prompt}\r\x1b[K\x1b[A\x1b[3C three{prompt}\r\x1b[K\x1b[A\x1b[9C\r\n"
            )
        );
    }

    #[test]
    fn a_full_line_goes_on_in_the_next() {
        let (mut screen, paper) = screen();
        screen.text(Channel::Answer, Style::Plain, &"x".repeat(20)).unwrap();
        prompt(&mut screen);
        screen.text(Channel::Answer, Style::Plain, "y").unwrap();
        screen.close().unwrap();
        assert_eq!(written(&paper), format!("{}\r\na ❯ hi\r\x1b[6C\r\x1b[Ky\r\n", "x".repeat(20)));
    }
}
