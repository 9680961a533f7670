//! Input of secrets: a terminal does not echo them.

use std::io::{self, IsTerminal as _, Read as _, Write as _};

use crossterm::{
    event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers},
    terminal,
};

use crate::failure::Failure;

/// Reads a secret without echo, or all of standard input when that is no terminal. One trailing
/// line break is removed.
///
/// # Errors
/// When it can't be read, is not UTF-8, or the user aborts.
pub(crate) fn read(prompt: &str) -> Result<String, Failure> {
    let mut text = String::new();
    if !io::stdin().is_terminal() {
        io::stdin().read_to_string(&mut text)?;
        return Ok(without_line_break(text));
    }
    let secret = read_without_echo(prompt);
    eprintln!();
    secret
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

/// Disables the terminal's echo until it is dropped.
struct EchoGuard;

impl Drop for EchoGuard {
    fn drop(&mut self) {
        // A terminal that refuses its settings cannot be repaired here.
        _ = terminal::disable_raw_mode();
    }
}

fn read_without_echo(prompt: &str) -> Result<String, Failure> {
    // Before the prompt: early input must not be echoed either.
    terminal::enable_raw_mode()?;
    let _echo = EchoGuard;
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
                return Err(Failure::usage("no input"));
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
    fn trailing_line_break_is_removed_once() {
        for (input, expected) in
            [("a", "a"), ("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), (" a ", " a ")]
        {
            assert_eq!(without_line_break(input.to_owned()), expected);
        }
    }
}
