//! Output channels: answers go to one stream, status lines to another. Terminals get styled text.

use std::io::{self, IsTerminal as _, Write};

use crate::text::printable;

/// Whether output is colored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Color {
    /// On a terminal, unless NO_COLOR or TERM=dumb is set.
    Auto,
    Always,
    Never,
}

impl Color {
    /// Whether to color output, given whether it goes to a terminal.
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

/// The role of a text, which determines its look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Style {
    Plain,
    /// Less important.
    Dim,
    /// JavaScript.
    Code,
    /// A message of a user.
    Person,
    Good,
    Bad,
    Accent,
}

impl Style {
    /// The escape sequence that starts the style; `None` for plain.
    pub(crate) const fn escape_sequence(self) -> Option<&'static str> {
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
        match self.escape_sequence().filter(|_| color && !text.is_empty()) {
            Some(start) => format!("{start}{text}\x1b[0m"),
            None => text.to_owned(),
        }
    }
}

/// The purpose of output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Channel {
    /// The model's answer.
    Answer,
    /// Everything else: progress, tool calls, errors.
    Status,
}

/// Takes output piece by piece. Text on the same channel continues an open line; anything else
/// ends it.
pub(crate) trait Sink {
    /// Writes text, which may leave the line open.
    fn text(&mut self, channel: Channel, style: Style, text: &str) -> io::Result<()>;

    /// Ends the open line, if there is one.
    fn end_line(&mut self) -> io::Result<()>;

    /// The columns of a line.
    fn width(&self) -> usize;

    /// Writes a whole line on the status channel.
    fn line(&mut self, spans: &[(Style, &str)]) -> io::Result<()> {
        self.end_line()?;
        for (style, text) in spans {
            self.text(Channel::Status, *style, text)?;
        }
        self.end_line()
    }
}

/// Standard output and standard error.
pub(crate) struct Console {
    answer: Stream,
    status: Stream,
    open: Option<Channel>,
}

struct Stream {
    writer: Box<dyn Write + Send>,
    terminal: bool,
    color: bool,
}

impl Console {
    /// Answers go to standard output, status lines to standard error.
    pub(crate) fn standard(color: Color) -> Self {
        let (out, err) = (io::stdout(), io::stderr());
        let (out_terminal, err_terminal) = (out.is_terminal(), err.is_terminal());
        Self::new((Box::new(out), out_terminal), (Box::new(err), err_terminal), color)
    }

    /// Both channels go to standard output.
    pub(crate) fn merged(color: Color) -> Self {
        let terminal = io::stdout().is_terminal();
        Self::new((Box::new(io::stdout()), terminal), (Box::new(io::stdout()), terminal), color)
    }

    /// Takes the writers of both channels, each with whether it is a terminal.
    pub(crate) fn new(
        (answer, answer_terminal): (Box<dyn Write + Send>, bool),
        (status, status_terminal): (Box<dyn Write + Send>, bool),
        color: Color,
    ) -> Self {
        Self {
            answer: Stream {
                writer: answer,
                terminal: answer_terminal,
                color: color.applies(answer_terminal),
            },
            status: Stream {
                writer: status,
                terminal: status_terminal,
                color: color.applies(status_terminal),
            },
            open: None,
        }
    }

    /// Whether answers go to a terminal, where text is shown while it is written.
    pub(crate) fn is_live(&self) -> bool {
        self.answer.terminal
    }

    /// Writes an unstyled line for machines on the answer channel.
    pub(crate) fn record(&mut self, line: &str) -> io::Result<()> {
        writeln!(self.answer.writer, "{line}")?;
        self.answer.writer.flush()
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
        let stream = match channel {
            Channel::Answer => &mut self.answer,
            Channel::Status => &mut self.status,
        };
        // Files and programs get the answer unchanged.
        let output = if stream.terminal || channel == Channel::Status {
            printable(text)
        } else {
            text.to_owned()
        };
        stream.writer.write_all(style.paint(&output, stream.color).as_bytes())?;
        stream.writer.flush()?;
        self.open = (!output.ends_with('\n')).then_some(channel);
        Ok(())
    }

    fn end_line(&mut self) -> io::Result<()> {
        let stream = match self.open.take() {
            None => return Ok(()),
            Some(Channel::Answer) => &mut self.answer,
            Some(Channel::Status) => &mut self.status,
        };
        stream.writer.write_all(b"\n")?;
        stream.writer.flush()
    }

    fn width(&self) -> usize {
        let columns = crossterm::terminal::size().map_or(100, |(columns, _)| usize::from(columns));
        if self.status.terminal { columns.max(40) } else { 120 }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A writer that shares what was written with the test.
    #[derive(Debug, Clone, Default)]
    pub(crate) struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl SharedBuffer {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// A console that writes to buffers: answers and status lines.
    pub(crate) fn buffered_console(
        terminal: bool,
        color: Color,
    ) -> (Console, SharedBuffer, SharedBuffer) {
        let (answer, status) = (SharedBuffer::default(), SharedBuffer::default());
        let console = Console::new(
            (Box::new(answer.clone()), terminal),
            (Box::new(status.clone()), terminal),
            color,
        );
        (console, answer, status)
    }

    #[test]
    fn output_on_the_other_channel_ends_the_open_line() {
        let both = SharedBuffer::default();
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
    fn styled_text_is_colored_and_plain_text_is_not() {
        let (mut console, _, status) = buffered_console(true, Color::Always);
        console.line(&[(Style::Bad, "✗"), (Style::Plain, " no")]).unwrap();
        assert_eq!(status.text(), "\x1b[31m✗\x1b[0m no\n");
    }
}
