//! Log-in by a code that is entered in any browser (RFC 8628).

use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::{
    end,
    issuer::{Begun, Error, Issuer, Tokens},
};
use crate::{failure::Failure, words::one_line};

/// The pause between two questions at least, and at most; what the issuer says lies between.
const PAUSES: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(60));
/// What is added when it says that it is asked too often.
const SLOWER: Duration = Duration::from_secs(5);

/// Shows the code, and waits for the person.
///
/// # Errors
/// When nobody enters it, or the issuer does not take who did.
pub(super) async fn wait(issuer: &Issuer, begun: Begun) -> Result<Tokens, Failure> {
    let Begun {
        device_code,
        user_code,
        verification_uri,
        verification_uri_complete,
        expires_in,
        interval,
    } = begun;
    eprintln!("open {} and enter the code {}", one_line(&verification_uri), one_line(&user_code));
    if let Some(whole) = verification_uri_complete {
        eprintln!("or open {}, and see that it shows this code", one_line(&whole));
    }
    let end = end(expires_in);
    let mut pause = Duration::from_secs(interval).clamp(PAUSES.0, PAUSES.1);
    loop {
        sleep(pause).await;
        if Instant::now() >= end {
            return Err(Failure::failed("nobody has entered the code in time"));
        }
        match issuer.device_tokens(&device_code).await {
            Ok(tokens) => return Ok(tokens),
            Err(Error::Refused { code, words }) => match code.as_str() {
                "authorization_pending" => {}
                "slow_down" => pause += SLOWER,
                "expired_token" => {
                    return Err(Failure::failed("nobody has entered the code in time"));
                }
                "access_denied" => return Err(Failure::failed("the log-in was refused there")),
                _ => return Err(Error::Refused { code, words }.into()),
            },
            // It may be back before the code ends.
            Err(Error::Away(_)) => pause = (pause * 2).min(PAUSES.1),
            Err(error) => return Err(error.into()),
        }
    }
}
