//! What all watches have in common: a stream that is lost is opened again, with the cursor of its
//! last event.

use std::time::Duration;

use tonic::{Response, Status, Streaming};

use crate::failure::{Failure, may_pass};

/// The pause before a lost connection is tried again, and how often in a row.
const PAUSE: Duration = Duration::from_millis(500);
const TRIES: u32 = 120;

/// What the end of a stream means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// There is nothing more to tell.
    Over,
    /// The gateway wants to know again who this is.
    Again,
}

/// Opens a stream with a cursor, and again whenever it is lost. `seen` takes an event, and gives
/// the cursor that stands behind it.
///
/// # Errors
/// Those of the gateway that won't pass, and what `seen` fails with.
pub(super) async fn follow<E>(
    mut cursor: String,
    end: End,
    open: impl AsyncFn(String) -> Result<Response<Streaming<E>>, Status>,
    mut seen: impl FnMut(E) -> Result<String, Failure>,
) -> Result<(), Failure> {
    let mut tries = 0;
    loop {
        let lost = match open(cursor.clone()).await {
            Err(status) => Some(status),
            Ok(stream) => {
                let mut events = stream.into_inner();
                loop {
                    match events.message().await {
                        Ok(Some(event)) => {
                            tries = 0;
                            cursor = seen(event)?;
                        }
                        Ok(None) => break None,
                        Err(status) => break Some(status),
                    }
                }
            }
        };
        match lost {
            None if end == End::Over => return Ok(()),
            Some(status) if tries >= TRIES || !may_pass(&status) => return Err(status.into()),
            None | Some(_) => {
                tries += 1;
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
}
