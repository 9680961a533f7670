//! `construct tap`: the messages on the mesh, decoded.

mod show;

use std::path::PathBuf;

use construct_bus::{Bus, ConnectOptions, Tls, User};
use futures::StreamExt as _;

use self::show::{Payload, Shown};
use crate::{
    console::{Color, Console},
    failure::{Exit, Failure},
};

/// How messages are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// A line each.
    Text,
    /// One JSON object per line.
    Json,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TapArgs {
    /// Which subjects; `*` stands for one token, `>` for all that follow.
    #[arg(default_value = "construct.v1.>")]
    filter: String,
    /// Where NATS is.
    #[arg(
        long,
        env = "CONSTRUCT_NATS_URL",
        default_value = "nats://127.0.0.1:4222",
        value_name = "URL",
        hide_env_values = true
    )]
    nats: String,
    /// Certificates of those who vouch for NATS, for an address that begins with tls://.
    #[arg(long, env = "CONSTRUCT_NATS_CA_FILE", value_name = "FILE")]
    nats_ca: Option<PathBuf>,
    /// Where the mesh keeps its data, to show payloads that are too large for a message.
    #[arg(long, env = "CONSTRUCT_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Each message's content in full, below its line.
    #[arg(long)]
    full: bool,
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
}

impl TapArgs {
    /// Prints until interrupted.
    ///
    /// # Errors
    /// When NATS can't be reached, refuses the subject, or nobody reads any more.
    pub(crate) async fn run(self, color: Color) -> Result<(), Failure> {
        let tls = Tls { ca: self.nats_ca, certificate: None };
        let mut options = ConnectOptions::new("construct-tap").user(User::Tap).tls(tls);
        // Only a folder that is there: who looks creates nothing.
        if let Some(blobs) = self.data_dir.map(|dir| dir.join("blobs")).filter(|dir| dir.is_dir()) {
            options = options.blobs(blobs);
        }
        let bus = Bus::connect(&self.nats, options).await.map_err(|error| {
            Failure::new(Exit::Unreachable, chain(&error))
                .hint("--nats or CONSTRUCT_NATS_URL says where NATS is")
        })?;
        let mut messages =
            bus.tap(&self.filter).await.map_err(|error| Failure::failed(chain(&error)))?;
        let mut console = Console::merged(color);
        loop {
            let message = tokio::select! {
                message = messages.next() => message,
                refusal = bus.permission_violation() => return Err(Failure::failed(refusal)),
            };
            let Some(message) = message else { break };
            let shown = Shown {
                time: jiff::Timestamp::now(),
                payload: Payload::read(
                    message.type_name.as_deref(),
                    message.blob.as_deref(),
                    &message.payload,
                ),
                subject: message.subject,
                type_name: message.type_name,
                headers: message.headers,
            };
            match self.output {
                Output::Text => shown.write(self.full, &mut console)?,
                Output::Json => console.record(&shown.json().to_string())?,
            }
        }
        Err(Failure::new(Exit::Unreachable, "the connection to NATS has ended"))
    }
}

/// An error and what caused it, as far as that says more.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    for cause in
        std::iter::successors(error.source(), |cause| cause.source()).map(ToString::to_string)
    {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
