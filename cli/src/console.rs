//! Where output goes: answers to one place, everything about them to another, styled if a person
//! looks.

use std::io::{self, IsTerminal as _, Write};

use crate::words::printable;

/// Whether output is colored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Color {
    /// When a person looks, and neither NO_COLOR nor TERM=dumb say otherwise.
    Auto,
    Always,
    Never,
}

impl Color {
    /// Whether to color what goes to a place that is a terminal or not.
    pub(crate) fn applies(self, terminal: bool) -> bool {
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        match self {
            Self::Auto => {
                terminal
                    && !set("NO_COLOR")
                    && std::env::var_os("TERM").is_none_or(|term| term != "dumb")
            }
            Self::Always => true,
            Self::Never => false,
        }
    }
}

/// What a piece of text is, and so how it looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    /// Of less interest.
    Dim,
    /// JavaScript.
    Code,
    /// What a person said.
    Person,
    Good,
    Bad,
    Accent,
}

impl Style {
    /// The escape sequence that switches it on; `None` for plain.
    pub(crate) const fn on(self) -> Option<&'static str> {
        match self {
            Self::Plain => None,
            Self::Dim => Some("\x1b[2m"),
            Self::Code => Some("\x1b[2;36m"),
            Self::Person => Some("\x1b[1m"),
            Self::Good => Some("\x1b[32m"),
            Self::Bad => Some("\x1b[31m"),
            Self::Accent => Some("\x1b[36m"),
        }
    }

    /// The text in this style.
    pub(crate) fn paint(self, text: &str, color: bool) -> String {
        match self.on().filter(|_| color && !text.is_empty()) {
            Some(on) => format!("{on}{text}\x1b[0m"),
            None => text.to_owned(),
        }
    }
}

/// What output is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    /// The model's words.
    Answer,
    /// Everything about them.
    Aside,
}

/// Takes output, piece by piece. Text that leaves its line open is continued by text on the same
/// channel, and ended by anything else.
pub(crate) trait Sink {
    /// Writes text, which may leave the line open.
    fn text(&mut self, channel: Channel, style: Style, text: &str) -> io::Result<()>;

    /// Ends the open line, if there is one.
    fn end_line(&mut self) -> io::Result<()>;

    /// Columns a line may take.
    fn width(&self) -> usize;

    /// A line of its own, about the answer.
    fn line(&mut self, spans: &[(Style, &str)]) -> io::Result<()> {
        self.end_line()?;
        for (style, text) in spans {
            self.text(Channel::Aside, *style, text)?;
        }
        self.end_line()
    }
}

/// Standard output and standard error.
pub(crate) struct Console {
    answer: Place,
    aside: Place,
    open: Option<Channel>,
}

struct Place {
    to: Box<dyn Write + Send>,
    terminal: bool,
    color: bool,
}

impl Console {
    /// Answers go to standard output, the rest to standard error.
    pub(crate) fn standard(color: Color) -> Self {
        let (out, err) = (io::stdout(), io::stderr());
        let (out_terminal, err_terminal) = (out.is_terminal(), err.is_terminal());
        Self::new((Box::new(out), out_terminal), (Box::new(err), err_terminal), color)
    }

    /// Everything goes to standard output.
    pub(crate) fn merged(color: Color) -> Self {
        let terminal = io::stdout().is_terminal();
        Self::new((Box::new(io::stdout()), terminal), (Box::new(io::stdout()), terminal), color)
    }

    /// Writers, each with whether it is a terminal.
    pub(crate) fn new(
        (answer, answer_terminal): (Box<dyn Write + Send>, bool),
        (aside, aside_terminal): (Box<dyn Write + Send>, bool),
        color: Color,
    ) -> Self {
        Self {
            answer: Place {
                to: answer,
                terminal: answer_terminal,
                color: color.applies(answer_terminal),
            },
            aside: Place {
                to: aside,
                terminal: aside_terminal,
                color: color.applies(aside_terminal),
            },
            open: None,
        }
    }

    /// Whether a person sees answers as they are written.
    pub(crate) fn is_live(&self) -> bool {
        self.answer.terminal
    }

    /// A line on the answers' side as it is, for machines.
    pub(crate) fn record(&mut self, line: &str) -> io::Result<()> {
        writeln!(self.answer.to, "{line}")?;
        self.answer.to.flush()
    }
}

impl Sink for Console {
    fn text(&mut self, channel: Channel, style: Style, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        if self.open.is_some_and(|open| open != channel) {
            self.end_line()?;
        }
        let place = match channel {
            Channel::Answer => &mut self.answer,
            Channel::Aside => &mut self.aside,
        };
        // What goes to a file or another program is given as it is.
        let shown = if place.terminal || channel == Channel::Aside {
            printable(text)
        } else {
            text.to_owned()
        };
        place.to.write_all(style.paint(&shown, place.color).as_bytes())?;
        place.to.flush()?;
        self.open = (!shown.ends_with('\n')).then_some(channel);
        Ok(())
    }

    fn end_line(&mut self) -> io::Result<()> {
        let place = match self.open.take() {
            None => return Ok(()),
            Some(Channel::Answer) => &mut self.answer,
            Some(Channel::Aside) => &mut self.aside,
        };
        place.to.write_all(b"\n")?;
        place.to.flush()
    }

    fn width(&self) -> usize {
        let columns = crossterm::terminal::size().map_or(100, |(columns, _)| usize::from(columns));
        if self.aside.terminal { columns.max(40) } else { 120 }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// What was written, shared with whoever writes.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct Paper(Arc<Mutex<Vec<u8>>>);

    impl Paper {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Paper {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A console on paper: answers and the rest.
    pub(crate) fn paper(terminal: bool, color: Color) -> (Console, Paper, Paper) {
        let (answer, aside) = (Paper::default(), Paper::default());
        let console = Console::new(
            (Box::new(answer.clone()), terminal),
            (Box::new(aside.clone()), terminal),
            color,
        );
        (console, answer, aside)
    }

    #[test]
    fn a_line_of_the_other_channel_ends_the_open_one() {
        let both = Paper::default();
        let mut console = Console::new(
            (Box::new(both.clone()), true),
            (Box::new(both.clone()), true),
            Color::Never,
        );
        console.text(Channel::Answer, Style::Plain, "half ").unwrap();
        console.text(Channel::Answer, Style::Plain, "a line").unwrap();
        console.line(&[(Style::Good, "✓"), (Style::Plain, " done")]).unwrap();
        console.text(Channel::Answer, Style::Plain, "whole\n").unwrap();
        console.end_line().unwrap();
        assert_eq!(both.text(), "half a line\n✓ done\nwhole\n");
    }

    #[test]
    fn colors_surround_text_only_when_wanted() {
        let (mut console, _, aside) = paper(true, Color::Always);
        console.line(&[(Style::Bad, "✗"), (Style::Plain, " no")]).unwrap();
        assert_eq!(aside.text(), "\x1b[31m✗\x1b[0m no\n");
    }
}
