//! A conversation with a person at a terminal.

use std::io;

use construct_proto::v1::{Event, decide_approval_request::Decision};
use crossterm::event::{Event as Input, EventStream, KeyEventKind};
use futures::StreamExt as _;
use tokio::sync::mpsc;

use super::{
    chat::{Chat, DELETED, Mode, describe_totals},
    input_line::{Action, InputLine},
    screen::{RawMode, Screen},
};
use crate::{
    console::{Color, Sink as _, Style},
    event_follower::{StreamUpdate, is_last},
    exec::interrupts,
    failure::{Exit, Failure},
    render::{Options, Renderer, note},
    text::one_line,
    totals::Totals,
};

const HELP: &str = "\
Enter       send; while a turn runs, the message waits for its end
Alt-Enter   a new line within the message
Tab         select another agent for the next message
Esc         suspend the running turn; Enter on an empty line, or /resume, resumes it
Ctrl-C      cancel the running turn; twice: leave
Ctrl-D      leave
y or n      approve or reject the pending call; /reject COMMENT gives the script a reason
/agent NAME /approve /cancel /explain /help /quit /reject /resume /suspend
Start a message that begins with a slash with two slashes.";

/// # Errors
/// When the gateway refuses or stays away, or the terminal is gone.
pub(super) async fn run(chat: Chat, color: Color) -> Result<Exit, Failure> {
    // A signal must not kill the process: the terminal would stay in raw mode.
    let mut interrupts = interrupts()?;
    let raw = RawMode::enter()?;
    let width = crossterm::terminal::size().map_or(80, |(columns, _)| usize::from(columns));
    let mut conversation = TerminalChat {
        chat,
        screen: Screen::new(Box::new(io::stdout()), color.applies(true), width),
        line: InputLine::default(),
        renderer: Renderer::new(Options { live: true, user_messages: true, entities: false }),
        totals: Totals::default(),
        leave_on_interrupt: false,
    };
    let result = conversation.run(&mut interrupts).await;
    let closed = conversation.screen.close();
    drop(raw);
    let exit = result?;
    closed?;
    conversation.print_farewell();
    Ok(exit)
}

/// A conversation, its screen and its input line.
struct TerminalChat {
    chat: Chat,
    screen: Screen,
    line: InputLine,
    renderer: Renderer,
    totals: Totals,
    /// Whether the next Ctrl-C leaves.
    leave_on_interrupt: bool,
}

/// A short answer to a pending approval. Any other text is a message.
fn parse_decision(text: &str) -> Option<Decision> {
    match text.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Some(Decision::Approve),
        "n" | "no" => Some(Decision::Reject),
        _ => None,
    }
}

/// Whether the conversation continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Continue,
    Leave,
}

impl TerminalChat {
    async fn run(&mut self, interrupts: &mut mpsc::Receiver<()>) -> Result<Exit, Failure> {
        let mut inputs = EventStream::new();
        if self.chat.task().is_empty() {
            note("type a message; /help lists the keys", &mut self.screen)?;
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
                // A signal of another program: Ctrl-C is a key here. The turn keeps running, as
                // when the user leaves.
                Some(()) = interrupts.recv() => return Ok(Exit::Interrupted),
                update = self.chat.next_update() => match update? {
                    StreamUpdate::Event(event) => {
                        self.event(&event)?;
                        if is_last(&event) {
                            return Err(Failure::failed(DELETED));
                        }
                    }
                    StreamUpdate::Disconnected(reason) => {
                        note(&format!("· {reason}; reconnecting"), &mut self.screen)?
                    }
                    StreamUpdate::Reconnected => note("· reconnected", &mut self.screen)?,
                },
            }
        }
    }

    fn prompt(&mut self) -> io::Result<()> {
        // No prompt while the history is printed.
        if self.chat.is_catching_up() {
            return Ok(());
        }
        let (sign, style) = match self.chat.mode() {
            Mode::Idle => ("❯", Style::Accent),
            Mode::Running => ("⋯", Style::Dim),
            Mode::AwaitingApproval => ("? y/n", Style::Accent),
            Mode::Suspended => ("‖", Style::Bad),
        };
        // The pending call that an answer decides.
        let pending = self
            .chat
            .pending_approval()
            .and_then(|approval| approval.spec.as_ref())
            .filter(|_| self.chat.mode() == Mode::AwaitingApproval);
        let call = pending
            .map(|spec| one_line(&format!("#{} {} ", spec.number, spec.tool)))
            .unwrap_or_default();
        let label = format!("{} {call}{sign}", self.chat.agent());
        self.screen.prompt(&label, style, |width| self.line.view(width))
    }

    fn event(&mut self, event: &Event) -> io::Result<()> {
        self.totals.add_event(event);
        self.renderer.event(event, &mut self.screen)
    }

    async fn input(&mut self, input: Input) -> Result<Flow, Failure> {
        let action = match input {
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
        let leave = std::mem::take(&mut self.leave_on_interrupt);
        match action {
            None => Ok(Flow::Continue),
            Some(Action::Send(text)) => self.submit(text).await,
            Some(Action::Leave) => Ok(Flow::Leave),
            Some(Action::NextAgent) => {
                self.chat.next_agent();
                Ok(Flow::Continue)
            }
            Some(Action::Suspend) => {
                if matches!(self.chat.mode(), Mode::Running | Mode::AwaitingApproval) {
                    let result = self.chat.suspend().await;
                    self.report(result)?;
                }
                Ok(Flow::Continue)
            }
            Some(Action::Redraw) => {
                self.screen.clear();
                Ok(Flow::Continue)
            }
            Some(Action::Interrupt) if leave => Ok(Flow::Leave),
            Some(Action::Interrupt) => {
                if !self.line.is_empty() {
                    self.line.clear();
                    return Ok(Flow::Continue);
                }
                self.leave_on_interrupt = true;
                if matches!(self.chat.mode(), Mode::Running | Mode::AwaitingApproval) {
                    let result = self.chat.cancel().await;
                    self.report(result)?;
                    note("· canceling; Ctrl-C again leaves", &mut self.screen)?;
                } else {
                    note("· Ctrl-C again leaves", &mut self.screen)?;
                }
                Ok(Flow::Continue)
            }
        }
    }

    /// Handles a submitted line: a decision, a command or a message.
    async fn submit(&mut self, text: String) -> Result<Flow, Failure> {
        if self.chat.mode() == Mode::AwaitingApproval
            && let Some(decision) = parse_decision(&text)
        {
            let result = self.chat.decide(decision, String::new()).await;
            self.report(result)?;
            return Ok(Flow::Continue);
        }
        if text.trim().is_empty() {
            if self.chat.mode() == Mode::Suspended {
                let result = self.chat.resume().await;
                self.report(result)?;
            }
            return Ok(Flow::Continue);
        }
        let message = match text.strip_prefix('/') {
            Some(rest) if rest.starts_with('/') => rest.to_owned(),
            Some(command) => return self.command(command).await,
            None => text.clone(),
        };
        if let Err(failure) = self.chat.send(message).await {
            self.line.restore(&text);
            self.report(Err(failure))?;
        }
        Ok(Flow::Continue)
    }

    async fn command(&mut self, command: &str) -> Result<Flow, Failure> {
        let (name, argument) = command.split_once(' ').unwrap_or((command, ""));
        let has_task = !self.chat.task().is_empty();
        let result = match name {
            "quit" | "exit" => return Ok(Flow::Leave),
            "help" => Ok(note(HELP, &mut self.screen)?),
            "explain" => match self.chat.explain().await {
                Ok(text) => Ok(note(text.trim_end(), &mut self.screen)?),
                Err(failure) => Err(failure),
            },
            "agent" if self.chat.set_agent(argument.trim()) => Ok(()),
            "agent" => Err(Failure::failed(format!(
                "there is no agent '{}'; Tab cycles through all agents",
                argument.trim()
            ))),
            "approve" | "reject" | "resume" | "suspend" | "cancel" if !has_task => {
                Err(Failure::failed("there is no task yet"))
            }
            "approve" => self.chat.decide(Decision::Approve, argument.trim().to_owned()).await,
            "reject" => self.chat.decide(Decision::Reject, argument.trim().to_owned()).await,
            "resume" => self.chat.resume().await,
            "suspend" => self.chat.suspend().await,
            "cancel" => self.chat.cancel().await,
            _ => Err(Failure::failed(format!("there is no command /{name}; /help lists them"))),
        };
        self.report(result)?;
        Ok(Flow::Continue)
    }

    /// Prints a failure. The conversation continues.
    fn report(&mut self, result: Result<(), Failure>) -> io::Result<()> {
        match result {
            Ok(()) => Ok(()),
            Err(failure) => self.screen.line(&[(Style::Bad, &format!("✗ {failure}"))]),
        }
    }

    fn print_farewell(&self) {
        let totals = describe_totals(&self.totals);
        if !totals.is_empty() {
            println!("{totals}");
        }
        if !self.chat.task().is_empty() {
            println!("continue with: construct resume {}", self.chat.task());
        }
    }
}
