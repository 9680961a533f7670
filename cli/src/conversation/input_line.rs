//! The input line of a conversation. Pure: keys in, text and actions out.

use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use unicode_width::UnicodeWidthChar as _;

/// An action of the user, beyond editing the line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Action {
    Send(String),
    /// Esc.
    Suspend,
    /// Tab.
    NextAgent,
    /// Ctrl-C.
    Interrupt,
    /// Ctrl-D on an empty line.
    Leave,
    /// Ctrl-L.
    Redraw,
}

/// The edited line, and the earlier lines.
#[derive(Debug, Default)]
pub(super) struct InputLine {
    text: Vec<char>,
    /// The index of the character after the cursor.
    cursor: usize,
    history: Vec<Vec<char>>,
    /// The shown line of the history, counted from its end; 0 is the new line.
    back: usize,
    /// The new line, while a line of the history is shown.
    draft: Vec<char>,
}

impl InputLine {
    pub(super) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.set(Vec::new());
        self.back = 0;
    }

    /// Restores a text that could not be sent.
    pub(super) fn restore(&mut self, text: &str) {
        self.set(text.chars().collect());
    }

    /// Inserts text, for example from the clipboard.
    pub(super) fn insert(&mut self, text: &str) {
        for c in text
            .replace("\r\n", "\n")
            .replace('\r', "\n")
            .chars()
            .filter(|c| *c == '\n' || *c == '\t' || !c.is_control())
        {
            self.text.insert(self.cursor, c);
            self.cursor += 1;
        }
    }

    /// Handles a key press.
    pub(super) fn key(&mut self, key: KeyEvent) -> Option<Action> {
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return self.control(key.code);
        }
        match key.code {
            KeyCode::Enter if key.modifiers.intersects(KeyModifiers::ALT | KeyModifiers::SHIFT) => {
                self.insert("\n")
            }
            KeyCode::Enter => return Some(self.submit()),
            KeyCode::Esc => return Some(Action::Suspend),
            KeyCode::Tab => return Some(Action::NextAgent),
            KeyCode::Char('b') if key.modifiers.contains(KeyModifiers::ALT) => {
                self.cursor = self.word_before()
            }
            KeyCode::Char('f') if key.modifiers.contains(KeyModifiers::ALT) => {
                self.cursor = self.word_after()
            }
            KeyCode::Char(c) => self.insert(c.encode_utf8(&mut [0; 4])),
            KeyCode::Backspace if key.modifiers.contains(KeyModifiers::ALT) => {
                self.cut(self.word_before(), self.cursor)
            }
            KeyCode::Backspace => self.cut(self.cursor.saturating_sub(1), self.cursor),
            KeyCode::Delete => self.cut(self.cursor, self.cursor + 1),
            KeyCode::Left => self.cursor = self.cursor.saturating_sub(1),
            KeyCode::Right => self.cursor = (self.cursor + 1).min(self.text.len()),
            KeyCode::Home => self.cursor = 0,
            KeyCode::End => self.cursor = self.text.len(),
            KeyCode::Up => self.recall(self.back + 1),
            KeyCode::Down if self.back > 0 => self.recall(self.back - 1),
            _ => {}
        }
        None
    }

    /// The visible part of the line in `width` columns, and the column of the cursor.
    pub(super) fn view(&self, width: usize) -> (String, usize) {
        let width = width.max(2);
        let visible = |c: char| {
            if c == '\n' {
                '⏎'
            } else if c.is_control() {
                ' '
            } else {
                c
            }
        };
        let wide = |c: char| visible(c).width().unwrap_or(0);
        // As many characters before the cursor as fit.
        let mut start = self.cursor;
        let mut before = 0;
        while start > 0 && before + wide(self.text[start - 1]) < width {
            start -= 1;
            before += wide(self.text[start]);
        }
        let mut view = String::new();
        let mut used = 0;
        for &c in &self.text[start..] {
            used += wide(c);
            if used >= width && view.chars().count() >= self.cursor - start {
                break;
            }
            view.push(visible(c));
        }
        (view, before)
    }

    fn control(&mut self, code: KeyCode) -> Option<Action> {
        match code {
            KeyCode::Char('c') => return Some(Action::Interrupt),
            KeyCode::Char('d') if self.text.is_empty() => return Some(Action::Leave),
            KeyCode::Char('d') => self.cut(self.cursor, self.cursor + 1),
            KeyCode::Char('l') => return Some(Action::Redraw),
            KeyCode::Char('j') => self.insert("\n"),
            KeyCode::Char('a') => self.cursor = 0,
            KeyCode::Char('e') => self.cursor = self.text.len(),
            KeyCode::Char('u') => self.cut(0, self.cursor),
            KeyCode::Char('k') => self.cut(self.cursor, self.text.len()),
            KeyCode::Char('w') => self.cut(self.word_before(), self.cursor),
            KeyCode::Char('h') => self.cut(self.cursor.saturating_sub(1), self.cursor),
            KeyCode::Char('p') => self.recall(self.back + 1),
            KeyCode::Char('n') if self.back > 0 => self.recall(self.back - 1),
            KeyCode::Left => self.cursor = self.word_before(),
            KeyCode::Right => self.cursor = self.word_after(),
            _ => {}
        }
        None
    }

    fn submit(&mut self) -> Action {
        let text = std::mem::take(&mut self.text);
        if !text.is_empty() && self.history.last() != Some(&text) {
            self.history.push(text.clone());
        }
        self.clear();
        Action::Send(text.into_iter().collect())
    }

    fn recall(&mut self, back: usize) {
        if back > self.history.len() {
            return;
        }
        if self.back == 0 {
            self.draft = std::mem::take(&mut self.text);
        }
        self.back = back;
        let text = if back == 0 {
            std::mem::take(&mut self.draft)
        } else {
            self.history[self.history.len() - back].clone()
        };
        self.set(text);
    }

    fn set(&mut self, text: Vec<char>) {
        self.cursor = text.len();
        self.text = text;
    }

    fn cut(&mut self, from: usize, to: usize) {
        self.text.drain(from..to.min(self.text.len()));
        self.cursor = from;
    }

    fn word_before(&self) -> usize {
        let space = self.text[..self.cursor].iter().rposition(|c| !c.is_whitespace());
        let Some(last) = space else { return 0 };
        self.text[..last].iter().rposition(|c| c.is_whitespace()).map_or(0, |at| at + 1)
    }

    fn word_after(&self) -> usize {
        let rest = &self.text[self.cursor..];
        let Some(word) = rest.iter().position(|c| !c.is_whitespace()) else {
            return self.text.len();
        };
        let end = rest[word..].iter().position(|c| c.is_whitespace()).unwrap_or(rest.len() - word);
        self.cursor + word + end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(line: &mut InputLine, code: KeyCode) -> Option<Action> {
        line.key(KeyEvent::new(code, KeyModifiers::NONE))
    }

    fn control(line: &mut InputLine, c: char) -> Option<Action> {
        line.key(KeyEvent::new(KeyCode::Char(c), KeyModifiers::CONTROL))
    }

    fn typed(text: &str) -> InputLine {
        let mut line = InputLine::default();
        line.insert(text);
        line
    }

    #[test]
    fn line_is_edited_and_sent() {
        let mut line = typed("helo wrld");
        for _ in 0..6 {
            press(&mut line, KeyCode::Left);
        }
        press(&mut line, KeyCode::Char('l'));
        control(&mut line, 'e');
        control(&mut line, 'w');
        line.insert("world\r\n\x1b!");
        assert_eq!(
            press(&mut line, KeyCode::Enter),
            Some(Action::Send("hello world\n!".to_owned()))
        );
        assert!(line.is_empty());
    }

    #[test]
    fn history_is_recalled_and_draft_is_preserved() {
        let mut line = typed("one");
        press(&mut line, KeyCode::Enter);
        line.insert("two");
        press(&mut line, KeyCode::Enter);
        line.insert("dra");
        for expected in ["two", "one", "one"] {
            press(&mut line, KeyCode::Up);
            assert_eq!(line.view(80).0, expected);
        }
        press(&mut line, KeyCode::Down);
        press(&mut line, KeyCode::Down);
        assert_eq!(line.view(80), ("dra".to_owned(), 3));
    }

    #[test]
    fn keys_trigger_documented_actions() {
        let mut line = typed("x");
        assert_eq!(press(&mut line, KeyCode::Esc), Some(Action::Suspend));
        assert_eq!(press(&mut line, KeyCode::Tab), Some(Action::NextAgent));
        assert_eq!(control(&mut line, 'c'), Some(Action::Interrupt));
        assert_eq!(control(&mut line, 'd'), None);
        control(&mut line, 'u');
        assert_eq!(control(&mut line, 'd'), Some(Action::Leave));
    }

    #[test]
    fn cursor_is_always_visible() {
        let mut line = typed("0123456789");
        assert_eq!(line.view(6), ("56789".to_owned(), 5));
        control(&mut line, 'a');
        assert_eq!(line.view(6), ("01234".to_owned(), 0));
        let wide = typed("日本語\n");
        assert_eq!(wide.view(20), ("日本語⏎".to_owned(), 7));
        for width in 0..12 {
            let (view, cursor) = wide.view(width);
            assert!(
                cursor < width.max(2) && crate::text::columns(&view) < width.max(3),
                "{width} {view} {cursor}"
            );
        }
    }
}
