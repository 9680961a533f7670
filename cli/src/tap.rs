//! `construct tap`: prints the decoded messages of the mesh.

mod format;

use std::path::PathBuf;

use construct_bus::{Bus, ConnectOptions, Tls, User};
use futures::StreamExt as _;

use self::format::{Payload, TappedMessage};
use crate::{
    console::{Color, Console},
    failure::{Exit, Failure},
};

/// The output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// One line per message.
    Text,
    /// One JSON object per line.
    Json,
}

#[derive(Debug, clap::Args)]
pub(crate) struct TapArgs {
    /// The subjects; `*` matches one token, `>` all following tokens.
    #[arg(default_value = "construct.v1.>")]
    filter: String,
    /// The address of NATS.
    #[arg(
        long,
        env = "CONSTRUCT_NATS_URL",
        default_value = "nats://127.0.0.1:4222",
        value_name = "URL",
        hide_env_values = true
    )]
    nats: String,
    /// The certificate authorities (PEM) to trust for a tls:// address.
    #[arg(long, env = "CONSTRUCT_NATS_CA_FILE", value_name = "FILE")]
    nats_ca: Option<PathBuf>,
    /// The mesh's data directory, to show payloads that are too large for a message.
    #[arg(long, env = "CONSTRUCT_DATA_DIR", value_name = "DIR")]
    data_dir: Option<PathBuf>,
    /// Print headers and the whole content below each line.
    #[arg(long)]
    full: bool,
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
}

impl TapArgs {
    /// Prints until interrupted.
    ///
    /// # Errors
    /// When NATS can't be reached or refuses the subject, or the reader of the output is gone.
    pub(crate) async fn run(self, color: Color) -> Result<(), Failure> {
        let tls = Tls { ca: self.nats_ca, certificate: None };
        let mut options = ConnectOptions::new("construct-tap").user(User::Tap).tls(tls);
        // Only an existing directory: `tap` must not create one.
        if let Some(blobs) = self.data_dir.map(|dir| dir.join("blobs")).filter(|dir| dir.is_dir()) {
            options = options.blobs(blobs);
        }
        let bus = Bus::connect(&self.nats, options).await.map_err(|error| {
            Failure::new(Exit::Unreachable, error_chain(&error))
                .hint("set the address of NATS with --nats or CONSTRUCT_NATS_URL")
        })?;
        let mut messages =
            bus.tap(&self.filter).await.map_err(|error| Failure::failed(error_chain(&error)))?;
        let mut console = Console::merged(color);
        loop {
            let message = tokio::select! {
                message = messages.next() => message,
                refusal = bus.permission_violation() => return Err(Failure::failed(refusal)),
            };
            let Some(message) = message else { break };
            let tapped = TappedMessage {
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
                Output::Text => tapped.write(self.full, &mut console)?,
                Output::Json => console.record(&tapped.json().to_string())?,
            }
        }
        Err(Failure::new(Exit::Unreachable, "the connection to NATS has ended"))
    }
}

/// An error with those of its causes that it does not contain.
fn error_chain(error: &dyn std::error::Error) -> String {
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
