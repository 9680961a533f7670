//! A conversation with a program: each line of standard input is a message, and is answered before the next is read.

use std::{io, thread};

use construct_proto::v1::{TaskPhase, TurnOutcome, event::Payload};
use tokio::sync::mpsc;

use super::talk::{Mode, Talk};
use crate::{
    console::{Colour, Console},
    failure::{Exit, Failure},
    follow::News,
    render::{Options, Renderer, note},
};

/// # Errors
/// When the gateway refuses or stays away.
pub(super) async fn run(mut talk: Talk, colour: Colour) -> Result<Exit, Failure> {
    let mut console = Console::standard(colour);
    let live = console.is_live();
    let mut renderer = Renderer::new(Options { live, people: true, entities: false });
    // A program is given answers to what it says, not the history.
    while talk.is_catching_up() {
        talk.news().await?;
    }
    if talk.mode() == Mode::Suspended {
        return Err(Failure::new(Exit::Suspended, "the task is suspended")
            .hint(format!("resume it first: construct task resume {}", talk.task())));
    }
    let mut exit = Exit::Completed;
    let mut lines = lines();
    while let Some(line) = lines.recv().await {
        if line.trim().is_empty() {
            continue;
        }
        let message = talk.say(line).await?;
        exit = loop {
            let news = talk.news().await?;
            let ended = ended(&news, &message);
            show(news, &mut renderer, &mut console)?;
            if let Some(exit) = ended {
                break exit;
            }
        };
        if exit == Exit::Suspended {
            break;
        }
    }
    if !talk.task().is_empty() {
        note(&format!("· go on with: construct resume {}", talk.task()), &mut console)?;
    }
    Ok(exit)
}

fn show(news: News, renderer: &mut Renderer, console: &mut Console) -> io::Result<()> {
    match news {
        News::Event(event) => renderer.event(&event, console),
        News::Lost(why) => note(&format!("· {why}; reconnecting"), console),
        News::Back => note("· connected again", console),
    }
}

/// How the turn of the message ended, if it did.
fn ended(news: &News, message: &str) -> Option<Exit> {
    let News::Event(event) = news else { return None };
    match &event.payload {
        Some(Payload::TurnCompleted(turn)) if turn.message_id == message => Some(match turn.outcome() {
            TurnOutcome::Completed => Exit::Completed,
            TurnOutcome::Cancelled => Exit::Cancelled,
            TurnOutcome::MaxTurns => Exit::MaxTurns,
            TurnOutcome::Failed | TurnOutcome::Unspecified => Exit::Failed,
        }),
        // Our message may have been dropped with the turn before it.
        Some(Payload::TurnCompleted(turn)) if turn.outcome() == TurnOutcome::Cancelled => Some(Exit::Cancelled),
        Some(Payload::PhaseChanged(changed)) if changed.phase() == TaskPhase::Suspended => Some(Exit::Suspended),
        Some(Payload::Deleted(_)) if event.r#type == "task.deleted" => Some(Exit::Failed),
        _ => None,
    }
}

/// The lines of standard input, read one at a time by a thread that nothing else waits for.
fn lines() -> mpsc::Receiver<String> {
    let (send, receive) = mpsc::channel(1);
    thread::spawn(move || {
        for line in io::stdin().lines().map_while(Result::ok) {
            if send.blocking_send(line).is_err() {
                return;
            }
        }
    });
    receive
}
