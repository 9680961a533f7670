//! Log-in with a device code that the user enters in any browser (RFC 8628).

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{
    deadline_in,
    issuer::{DeviceCode, Error, Issuer, Tokens},
};
use crate::{failure::Failure, text::one_line};

/// The bounds of the poll interval that the issuer requests.
const POLL_INTERVALS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// What `slow_down` adds to the poll interval.
const SLOW_DOWN: Duration = Duration::from_secs(5);

/// Prints the code, and waits until the user has logged in.
///
/// # Errors
/// When the log-in times out or fails.
pub(super) async fn wait(issuer: &Issuer, device_code: DeviceCode) -> Result<Tokens, Failure> {
    let DeviceCode {
        device_code,
        user_code,
        verification_uri,
        verification_uri_complete,
        expires_in,
        interval,
    } = device_code;
    eprintln!("open {} and enter the code {}", one_line(&verification_uri), one_line(&user_code));
    if let Some(uri) = verification_uri_complete {
        eprintln!("or open {}, and check that it shows this code", one_line(&uri));
    }
    let deadline = deadline_in(expires_in);
    let mut delay = Duration::from_secs(interval).clamp(POLL_INTERVALS.0, POLL_INTERVALS.1);
    loop {
        sleep(delay).await;
        if Instant::now() >= deadline {
            return Err(Failure::failed("the code was not entered in time"));
        }
        match issuer.poll_device_code(&device_code).await {
            Ok(tokens) => return Ok(tokens),
            Err(Error::Refused { code, description }) => match code.as_str() {
                "authorization_pending" => {}
                "slow_down" => delay += SLOW_DOWN,
                "expired_token" => {
                    return Err(Failure::failed("the code was not entered in time"));
                }
                "access_denied" => return Err(Failure::failed("the log-in was denied")),
                _ => return Err(Error::Refused { code, description }.into()),
            },
            // The issuer may be back before the code expires.
            Err(Error::Unreachable(_)) => delay = (delay * 2).min(POLL_INTERVALS.1),
            Err(error) => return Err(error.into()),
        }
    }
}
