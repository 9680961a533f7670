//! A conversation with a program: each line of standard input is a message, and is answered before
//! the next is read.

use std::{io, thread};

use construct_proto::v1::{TaskPhase, TurnOutcome, event::Payload};
use tokio::{sync::mpsc, time::Instant};

use super::talk::{DELETED, Mode, Talk};
use crate::{
    console::{Color, Console, Sink as _, Style},
    exec::{LAST_WORDS, interrupts, watch::is_dropped},
    failure::{Exit, Failure},
    follow::{News, is_last},
    render::{Options, Renderer, note},
};

/// # Errors
/// When the gateway refuses or stays away.
pub(super) async fn run(mut talk: Talk, color: Color) -> Result<Exit, Failure> {
    let mut console = Console::standard(color);
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
    let mut interrupts = interrupts()?;
    let mut lines = lines();
    loop {
        let line = tokio::select! {
            line = lines.recv() => match line {
                Some(line) => line,
                None => break,
            },
            Some(()) = interrupts.recv() => {
                exit = Exit::Interrupted;
                break;
            }
        };
        if line.trim().is_empty() {
            continue;
        }
        let message = talk.say(line).await?;
        exit = Box::pin(answer(&mut talk, &message, &mut renderer, &mut console, &mut interrupts))
            .await?;
        if matches!(exit, Exit::Suspended | Exit::Interrupted) {
            break;
        }
    }
    if !talk.task().is_empty() {
        note(&format!("· go on with: construct resume {}", talk.task()), &mut console)?;
    }
    Ok(exit)
}

/// Shows how the message is answered. An interrupt cancels the turn, and a second one, or a turn
/// that does not end by that, leaves it.
async fn answer(
    talk: &mut Talk,
    message: &str,
    renderer: &mut Renderer,
    console: &mut Console,
    interrupts: &mut mpsc::Receiver<()>,
) -> Result<Exit, Failure> {
    let mut leave_at: Option<Instant> = None;
    loop {
        let due = async {
            match leave_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            Some(()) = interrupts.recv() => {
                if leave_at.is_some() {
                    return Ok(Exit::Interrupted);
                }
                leave_at = Some(Instant::now() + LAST_WORDS);
                console.line(&[(Style::Bad, "■ interrupted by the user; cancelling")])?;
                talk.cancel().await?;
            }
            () = due => return Ok(Exit::Interrupted),
            news = talk.news() => {
                let news = news?;
                let ended = ended(&news, message);
                let deleted = matches!(&news, News::Event(event) if is_last(event));
                show(news, renderer, console)?;
                if deleted {
                    return Err(Failure::failed(DELETED));
                }
                if let Some(exit) = ended {
                    return Ok(if leave_at.is_some() { Exit::Interrupted } else { exit });
                }
            }
        }
    }
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
        Some(Payload::TurnCompleted(turn)) if turn.message_id == message => {
            Some(match turn.outcome() {
                TurnOutcome::Completed => Exit::Completed,
                TurnOutcome::Cancelled | TurnOutcome::Interrupted => Exit::Cancelled,
                TurnOutcome::MaxTurns => Exit::MaxTurns,
                TurnOutcome::Failed | TurnOutcome::Unspecified => Exit::Failed,
            })
        }
        Some(Payload::Message(changed))
            if event.r#type == "message.updated" && is_dropped(changed) =>
        {
            let ours = changed.metadata.as_ref().is_some_and(|metadata| metadata.id == message);
            ours.then_some(Exit::Cancelled)
        }
        Some(Payload::Deleted(deleted)) if deleted.id == message => Some(Exit::Cancelled),
        Some(Payload::PhaseChanged(changed)) if changed.phase() == TaskPhase::Suspended => {
            Some(Exit::Suspended)
        }
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
