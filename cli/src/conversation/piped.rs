//! A conversation with a program: each line of standard input is a message. It is answered before
//! the next line is read.

use std::{io, thread};

use construct_proto::v1::{TaskPhase, TurnOutcome, event::Payload};
use tokio::{sync::mpsc, time::Instant};

use super::chat::{Chat, DELETED, Mode};
use crate::{
    console::{Color, Console, Sink as _, Style},
    event_follower::{StreamUpdate, is_last},
    exec::{CANCEL_GRACE_PERIOD, interrupts, watch::is_dropped},
    failure::{Exit, Failure},
    render::{Options, Renderer, note},
};

/// # Errors
/// When the gateway refuses or stays away.
pub(super) async fn run(mut chat: Chat, color: Color) -> Result<Exit, Failure> {
    let mut console = Console::standard(color);
    let live = console.is_live();
    let mut renderer = Renderer::new(Options { live, user_messages: true, entities: false });
    // A program gets the answers to its messages, not the history.
    while chat.is_catching_up() {
        chat.next_update().await?;
    }
    if chat.mode() == Mode::Suspended {
        return Err(Failure::new(Exit::Suspended, "the task is suspended")
            .hint(format!("resume it first: construct task resume {}", chat.task())));
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
        let message = chat.send(line).await?;
        exit = Box::pin(answer(&mut chat, &message, &mut renderer, &mut console, &mut interrupts))
            .await?;
        if matches!(exit, Exit::Suspended | Exit::Interrupted) {
            break;
        }
    }
    if !chat.task().is_empty() {
        note(&format!("· continue with: construct resume {}", chat.task()), &mut console)?;
    }
    Ok(exit)
}

/// Prints the answer to the message. An interrupt cancels the turn. A second one, or the end of the
/// grace period, abandons it.
async fn answer(
    chat: &mut Chat,
    message: &str,
    renderer: &mut Renderer,
    console: &mut Console,
    interrupts: &mut mpsc::Receiver<()>,
) -> Result<Exit, Failure> {
    let mut exit_at: Option<Instant> = None;
    loop {
        let due = async {
            match exit_at {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            Some(()) = interrupts.recv() => {
                if exit_at.is_some() {
                    return Ok(Exit::Interrupted);
                }
                exit_at = Some(Instant::now() + CANCEL_GRACE_PERIOD);
                console.line(&[(Style::Bad, "■ interrupted by the user; canceling")])?;
                chat.cancel().await?;
            }
            () = due => return Ok(Exit::Interrupted),
            update = chat.next_update() => {
                let update = update?;
                let ended = turn_end(&update, message);
                let deleted = matches!(&update, StreamUpdate::Event(event) if is_last(event));
                show(update, renderer, console)?;
                if deleted {
                    return Err(Failure::failed(DELETED));
                }
                if let Some(exit) = ended {
                    return Ok(if exit_at.is_some() { Exit::Interrupted } else { exit });
                }
            }
        }
    }
}

fn show(update: StreamUpdate, renderer: &mut Renderer, console: &mut Console) -> io::Result<()> {
    match update {
        StreamUpdate::Event(event) => renderer.event(&event, console),
        StreamUpdate::Disconnected(reason) => note(&format!("· {reason}; reconnecting"), console),
        StreamUpdate::Reconnected => note("· reconnected", console),
    }
}

/// The exit code of the message's turn, if the update ends it.
fn turn_end(update: &StreamUpdate, message: &str) -> Option<Exit> {
    let StreamUpdate::Event(event) = update else { return None };
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
            let matches = changed.metadata.as_ref().is_some_and(|metadata| metadata.id == message);
            matches.then_some(Exit::Cancelled)
        }
        Some(Payload::Deleted(deleted)) if deleted.id == message => Some(Exit::Cancelled),
        Some(Payload::PhaseChanged(changed)) if changed.phase() == TaskPhase::Suspended => {
            Some(Exit::Suspended)
        }
        _ => None,
    }
}

/// The lines of standard input, read one at a time by a detached thread.
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
