//! Streams of events that are reopened after the last event when the connection is lost.

use std::time::Duration;

use tonic::{Response, Status, Streaming};

use crate::failure::{Failure, is_retryable};

/// The delay before a reconnect.
const RECONNECT_DELAY: Duration = Duration::from_millis(500);
/// The maximum reconnects in a row.
const MAX_RECONNECTS: u32 = 120;

/// The meaning of a stream's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StreamEnd {
    /// There are no more events.
    Finished,
    /// The gateway requires a new authentication.
    Reauthenticate,
}

/// Opens a stream at a cursor, and reopens it when it is lost. `handle` takes an event, and returns
/// its cursor.
///
/// # Errors
/// Errors of the gateway that are not retryable, and those of `handle`.
pub(super) async fn follow<E>(
    mut cursor: String,
    end: StreamEnd,
    open: impl AsyncFn(String) -> Result<Response<Streaming<E>>, Status>,
    mut handle: impl FnMut(E) -> Result<String, Failure>,
) -> Result<(), Failure> {
    let mut reconnects = 0;
    loop {
        let error = match open(cursor.clone()).await {
            Err(status) => Some(status),
            Ok(stream) => {
                let mut events = stream.into_inner();
                loop {
                    match events.message().await {
                        Ok(Some(event)) => {
                            reconnects = 0;
                            cursor = handle(event)?;
                        }
                        Ok(None) => break None,
                        Err(status) => break Some(status),
                    }
                }
            }
        };
        match error {
            None if end == StreamEnd::Finished => return Ok(()),
            Some(status) if reconnects >= MAX_RECONNECTS || !is_retryable(&status) => {
                return Err(status.into());
            }
            None | Some(_) => {
                reconnects += 1;
                tokio::time::sleep(RECONNECT_DELAY).await;
            }
        }
    }
}
