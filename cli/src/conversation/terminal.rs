//! A conversation with a person at a terminal.

use std::io;

use construct_proto::v1::{Event, decide_approval_request::Decision};
use crossterm::event::{Event as Input, EventStream, KeyEventKind};
use futures::StreamExt as _;
use tokio::sync::mpsc;

use super::{
    line::{Line, Wish},
    screen::{RawMode, Screen},
    talk::{DELETED, Mode, Talk, total},
};
use crate::{
    console::{Color, Sink as _, Style},
    exec::interrupts,
    failure::{Exit, Failure},
    follow::{News, is_last},
    render::{Options, Renderer, note},
    tally::Tally,
    words::one_line,
};

const HELP: &str = "\
Enter       send; while a turn runs, the message waits for its end
Alt-Enter   a new line within the message
Tab         let another agent answer the next message
Esc         suspend the running turn; Enter on an empty line, or /resume, goes on
Ctrl-C      cancel the running turn; twice: leave
Ctrl-D      leave
y or n      approve or reject the call that waits for it; /reject WHY tells the script why
/agent NAME /approve /cancel /help /quit /reject /resume /suspend /why
A message that begins with a slash is written with two.";

/// # Errors
/// When the gateway refuses or stays away, or the terminal is gone.
pub(super) async fn run(talk: Talk, color: Color) -> Result<Exit, Failure> {
    // A signal must not end us in the middle: the terminal would stay as no shell can use it.
    let mut interrupts = interrupts()?;
    let raw = RawMode::enter()?;
    let width = crossterm::terminal::size().map_or(80, |(columns, _)| usize::from(columns));
    let mut conversation = Conversation {
        talk,
        screen: Screen::new(Box::new(io::stdout()), color.applies(true), width),
        line: Line::default(),
        renderer: Renderer::new(Options { live: true, people: true, entities: false }),
        tally: Tally::default(),
        armed: false,
    };
    let ended = conversation.run(&mut interrupts).await;
    let closed = conversation.screen.close();
    drop(raw);
    let exit = ended?;
    closed?;
    conversation.farewell();
    Ok(exit)
}

struct Conversation {
    talk: Talk,
    screen: Screen,
    line: Line,
    renderer: Renderer,
    tally: Tally,
    /// Whether the next Ctrl-C leaves.
    armed: bool,
}

/// What a person answers who is asked; anything else is a message like any other.
fn yes_or_no(text: &str) -> Option<Decision> {
    match text.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Some(Decision::Approve),
        "n" | "no" => Some(Decision::Reject),
        _ => None,
    }
}

/// Whether to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    On,
    Leave,
}

impl Conversation {
    async fn run(&mut self, interrupts: &mut mpsc::Receiver<()>) -> Result<Exit, Failure> {
        let mut inputs = EventStream::new();
        if self.talk.task().is_empty() {
            note("type a message; /help tells the keys", &mut self.screen)?;
        }
        loop {
            self.prompt()?;
            tokio::select! {
                input = inputs.next() => {
                    let Some(input) = input else { return Ok(Exit::Completed) };
                    if self.input(input?).await? == Flow::Leave {
                        return Ok(Exit::Completed);
                    }
                }
                // From another program: Ctrl-C is a key here. What runs goes on, as when the person
                // leaves.
                Some(()) = interrupts.recv() => return Ok(Exit::Interrupted),
                news = self.talk.news() => match news? {
                    News::Event(event) => {
                        self.event(&event)?;
                        if is_last(&event) {
                            return Err(Failure::failed(DELETED));
                        }
                    }
                    News::Lost(why) => note(&format!("· {why}; reconnecting"), &mut self.screen)?,
                    News::Back => note("· connected again", &mut self.screen)?,
                },
            }
        }
    }

    fn prompt(&mut self) -> io::Result<()> {
        // The history is shown in one go.
        if self.talk.is_catching_up() {
            return Ok(());
        }
        let (sign, style) = match self.talk.mode() {
            Mode::Idle => ("❯", Style::Accent),
            Mode::Running => ("⋯", Style::Dim),
            Mode::Asking => ("? y/n", Style::Accent),
            Mode::Suspended => ("‖", Style::Bad),
        };
        // Of several calls that wait, the one that is decided about.
        let asked = self
            .talk
            .asked()
            .and_then(|asked| asked.spec.as_ref())
            .filter(|_| self.talk.mode() == Mode::Asking);
        let about = asked
            .map(|spec| one_line(&format!("#{} {} ", spec.number, spec.tool)))
            .unwrap_or_default();
        let label = format!("{} {about}{sign}", self.talk.agent());
        self.screen.prompt(&label, style, |width| self.line.view(width))
    }

    fn event(&mut self, event: &Event) -> io::Result<()> {
        self.tally.event(event);
        self.renderer.event(event, &mut self.screen)
    }

    async fn input(&mut self, input: Input) -> Result<Flow, Failure> {
        let wish = match input {
            Input::Key(key) if key.kind != KeyEventKind::Release => self.line.key(key),
            Input::Paste(text) => {
                self.line.insert(&text);
                None
            }
            Input::Resize(columns, _) => {
                self.screen.resize(usize::from(columns));
                None
            }
            _ => None,
        };
        let armed = std::mem::take(&mut self.armed);
        match wish {
            None => Ok(Flow::On),
            Some(Wish::Say(text)) => self.say(text).await,
            Some(Wish::Leave) => Ok(Flow::Leave),
            Some(Wish::NextAgent) => {
                self.talk.next_agent();
                Ok(Flow::On)
            }
            Some(Wish::Suspend) => {
                if matches!(self.talk.mode(), Mode::Running | Mode::Asking) {
                    let done = self.talk.suspend().await;
                    self.tell(done)?;
                }
                Ok(Flow::On)
            }
            Some(Wish::Redraw) => {
                self.screen.clear();
                Ok(Flow::On)
            }
            Some(Wish::Interrupt) if armed => Ok(Flow::Leave),
            Some(Wish::Interrupt) => {
                if !self.line.is_empty() {
                    self.line.clear();
                    return Ok(Flow::On);
                }
                self.armed = true;
                if matches!(self.talk.mode(), Mode::Running | Mode::Asking) {
                    let done = self.talk.cancel().await;
                    self.tell(done)?;
                    note("· cancelling; Ctrl-C again leaves", &mut self.screen)?;
                } else {
                    note("· Ctrl-C again leaves", &mut self.screen)?;
                }
                Ok(Flow::On)
            }
        }
    }

    async fn say(&mut self, text: String) -> Result<Flow, Failure> {
        if self.talk.mode() == Mode::Asking
            && let Some(decision) = yes_or_no(&text)
        {
            let done = self.talk.decide(decision, String::new()).await;
            self.tell(done)?;
            return Ok(Flow::On);
        }
        if text.trim().is_empty() {
            if self.talk.mode() == Mode::Suspended {
                let done = self.talk.go_on().await;
                self.tell(done)?;
            }
            return Ok(Flow::On);
        }
        let message = match text.strip_prefix('/') {
            Some(rest) if rest.starts_with('/') => rest.to_owned(),
            Some(command) => return self.command(command).await,
            None => text.clone(),
        };
        if let Err(failure) = self.talk.say(message).await {
            self.line.restore(&text);
            self.tell(Err(failure))?;
        }
        Ok(Flow::On)
    }

    async fn command(&mut self, command: &str) -> Result<Flow, Failure> {
        let (name, argument) = command.split_once(' ').unwrap_or((command, ""));
        let has_task = !self.talk.task().is_empty();
        let done = match name {
            "quit" | "exit" => return Ok(Flow::Leave),
            "help" => Ok(note(HELP, &mut self.screen)?),
            "why" => match self.talk.why().await {
                Ok(words) => Ok(note(words.trim_end(), &mut self.screen)?),
                Err(failure) => Err(failure),
            },
            "agent" if self.talk.set_agent(argument.trim()) => Ok(()),
            "agent" => Err(Failure::failed(format!(
                "there is no agent '{}'; Tab goes through all",
                argument.trim()
            ))),
            "approve" | "reject" | "resume" | "suspend" | "cancel" if !has_task => {
                Err(Failure::failed("nothing runs yet"))
            }
            "approve" => self.talk.decide(Decision::Approve, argument.trim().to_owned()).await,
            "reject" => self.talk.decide(Decision::Reject, argument.trim().to_owned()).await,
            "resume" => self.talk.go_on().await,
            "suspend" => self.talk.suspend().await,
            "cancel" => self.talk.cancel().await,
            _ => Err(Failure::failed(format!("there is no command /{name}; /help lists them"))),
        };
        self.tell(done)?;
        Ok(Flow::On)
    }

    /// A failure is said, and the conversation goes on.
    fn tell(&mut self, done: Result<(), Failure>) -> io::Result<()> {
        match done {
            Ok(()) => Ok(()),
            Err(failure) => self.screen.line(&[(Style::Bad, &format!("✗ {failure}"))]),
        }
    }

    fn farewell(&self) {
        let total = total(&self.tally);
        if !total.is_empty() {
            println!("{total}");
        }
        if !self.talk.task().is_empty() {
            println!("go on with: construct resume {}", self.talk.task());
        }
    }
}
