//! Asking for what must not be shown.

use std::io::{self, IsTerminal as _, Read as _, Write as _};

use crossterm::{
    event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
    terminal,
};

use crate::failure::Failure;

/// A text that is typed unseen, or all of standard input when that is no terminal; without the line
/// break at its end.
///
/// # Errors
/// When it can't be read, is no text, or the person gives up.
pub(crate) fn read(prompt: &str) -> Result<String, Failure> {
    let mut text = String::new();
    if !io::stdin().is_terminal() {
        io::stdin().read_to_string(&mut text)?;
        return Ok(without_line_break(text));
    }
    let typed = typed(prompt);
    eprintln!();
    typed
}

fn without_line_break(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

/// The terminal shows what is typed again when this is dropped.
struct Unseen;

impl Drop for Unseen {
    fn drop(&mut self) {
        // Nothing can be done about a terminal that does not take its settings back.
        _ = terminal::disable_raw_mode();
    }
}

fn typed(prompt: &str) -> Result<String, Failure> {
    // Before anybody is asked: what is typed at once must not be shown either.
    terminal::enable_raw_mode()?;
    let _unseen = Unseen;
    eprint!("{prompt}");
    io::stderr().flush()?;
    let mut text = String::new();
    loop {
        let Event::Key(KeyEvent { code, modifiers, kind, .. }) = crossterm::event::read()? else {
            continue;
        };
        if kind == KeyEventKind::Release {
            continue;
        }
        match code {
            KeyCode::Enter => return Ok(text),
            KeyCode::Char('c' | 'd') if modifiers.contains(KeyModifiers::CONTROL) => {
                return Err(Failure::usage("nothing was given"));
            }
            KeyCode::Char('u') if modifiers.contains(KeyModifiers::CONTROL) => text.clear(),
            KeyCode::Char(c) => text.push(c),
            KeyCode::Backspace => drop(text.pop()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_break_at_the_end_belongs_to_the_shell_and_not_to_the_value() {
        for (given, expected) in
            [("a", "a"), ("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), (" a ", " a ")]
        {
            assert_eq!(without_line_break(given.to_owned()), expected);
        }
    }
}
