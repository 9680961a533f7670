//! Connecting and listening at the start, when a server may not be available yet, or a port may
//! still be in use.

use std::{io, net::SocketAddr, time::Duration};

use anyhow::Context as _;
use backon::{BackoffBuilder as _, ConstantBuilder, ExponentialBuilder, Retryable as _};
use tokio::{net::TcpListener, time};
use tokio_util::sync::CancellationToken;

use crate::{Latch, Stopping};

/// A peer that accepts the connection and does not respond must count as unavailable.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);

const FIRST_DELAY: Duration = Duration::from_millis(100);
const MAX_DELAY: Duration = Duration::from_secs(5);

/// Listens on an address. Retries for a second if it is in use: child processes that a killed
/// service was just starting hold its port a moment longer.
///
/// # Errors
/// When binding fails, with the address.
/// What forbids it, with the address.
pub async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let pauses =
        ConstantBuilder::default().with_delay(Duration::from_millis(50)).with_max_times(20);
    let listening = (|| TcpListener::bind(address))
        .retry(pauses)
        .when(|error| error.kind() == io::ErrorKind::AddrInUse);
    listening.await.with_context(|| format!("cannot listen on {address}"))
}

/// Retries until it succeeds or the process stops, with delays from 0.1 s to 5 s (doubled, with
/// jitter). An attempt may take 10 s.
///
/// The latch always has the current reason. The log has a line when the reason changes, not for
/// every attempt: a service that waits for an hour logs one line.
///
/// # Errors
/// [`Stopping`] when `draining` is cancelled first.
pub async fn connect_with_retry<T, E, F>(
    name: &str,
    latch: &Latch,
    draining: &CancellationToken,
    mut attempt: impl FnMut() -> F,
) -> Result<T, Stopping>
where
    F: Future<Output = Result<T, E>>,
    E: Into<anyhow::Error>,
{
    let mut delays = ExponentialBuilder::default()
        .with_min_delay(FIRST_DELAY)
        .with_max_delay(MAX_DELAY)
        .without_max_times()
        .with_jitter()
        .build();
    let mut failures: u64 = 0;
    let mut last_reason = String::new();
    loop {
        let tried = tokio::select! {
            tried = time::timeout(ATTEMPT_TIMEOUT, attempt()) => tried,
            () = draining.cancelled() => return Err(Stopping),
        };
        let reason = match tried {
            Ok(Ok(connection)) => {
                if failures > 0 {
                    tracing::info!(to = name, failures, "connected");
                }
                latch.set_ready();
                return Ok(connection);
            }
            Ok(Err(error)) => format!("{:#}", error.into()),
            Err(_) => format!("no answer within {} s", ATTEMPT_TIMEOUT.as_secs()),
        };
        failures += 1;
        if reason != last_reason {
            tracing::warn!(to = name, reason, "cannot connect; retrying");
            latch.set_not_ready(&reason);
            last_reason = reason;
        }
        tokio::select! {
            () = time::sleep(delays.next().unwrap_or(MAX_DELAY)) => {}
            () = draining.cancelled() => return Err(Stopping),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::{Common, Context, health::Condition};

    #[tokio::test]
    async fn connecting_retries_and_the_latch_has_the_reason() {
        let context = Context::new("sample", Common::default());
        let latch = context.readiness().register("nats");
        let mut attempts = 0;
        let readiness = context.readiness().clone();
        let mut seen = Vec::new();
        let connected = context
            .connect_with_retry("nats", &latch, || {
                attempts += 1;
                seen.push(readiness.report().waiting);
                let outcome =
                    if attempts < 3 { Err(io::Error::other("refused")) } else { Ok(attempts) };
                async move { outcome }
            })
            .await;
        assert_eq!(connected, Ok(3));
        let reason =
            |text: &str| vec![Condition { name: "nats".to_owned(), reason: Some(text.to_owned()) }];
        assert_eq!(seen, [reason("starting"), reason("refused"), reason("refused")]);
        assert!(readiness.report().ready);
    }

    #[tokio::test]
    async fn stop_interrupts_a_hanging_attempt() {
        let context = Context::new("sample", Common::default());
        let latch = context.readiness().register("nats");
        let lifecycle = context.lifecycle().clone();
        let connected = context
            .connect_with_retry("nats", &latch, || {
                lifecycle.stop("test");
                std::future::pending::<io::Result<()>>()
            })
            .await;
        assert_eq!(connected, Err(Stopping));
    }

    #[tokio::test]
    async fn stop_interrupts_the_delay_between_attempts() {
        let context = Context::new("sample", Common::default());
        let latch = context.readiness().register("nats");
        let lifecycle = context.lifecycle().clone();
        let connected: Result<(), _> = context
            .connect_with_retry("nats", &latch, || {
                lifecycle.stop("test");
                async { Err(io::Error::other("refused")) }
            })
            .await;
        assert_eq!(connected, Err(Stopping));
    }

    #[tokio::test]
    async fn connecting_works_in_a_spawned_task() {
        let context = Context::new("sample", Common::default());
        let latch = context.readiness().register("nats");
        let address = String::from("nats");
        let connecting = tokio::spawn(async move {
            context
                .connect_with_retry("nats", &latch, || async { Ok::<_, io::Error>(address.len()) })
                .await
        });
        assert_eq!(connecting.await.unwrap(), Ok(4));
    }
}
