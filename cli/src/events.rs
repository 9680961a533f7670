//! `construct events`: prints events as they happen.

use std::time::Duration;

use construct_proto::v1::SubscribeRequest;

use crate::{
    console::{Color, Console},
    event_follower::{EventFollower, StreamUpdate, is_last},
    failure::Failure,
    gateway::Gateway,
    json,
    render::{self, Options, Renderer},
    time,
};

/// The output format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// As a conversation.
    Text,
    /// One JSON object per line.
    Ndjson,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EventsArgs {
    /// The task to watch. Default: changes of agents, models and providers.
    #[arg(default_value = "", hide_default_value = true)]
    task: String,
    /// Continue after the event with this cursor; `0` is the beginning.
    #[arg(long, default_value = "", hide_default_value = true)]
    cursor: String,
    /// Only events of this type, e.g. `message.*`. Repeatable.
    #[arg(long = "type", value_name = "GLOB")]
    types: Vec<String>,
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// How long to retry when the gateway is away.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = time::parse_duration)]
    reconnect: Duration,
}

impl EventsArgs {
    /// Prints until interrupted, or until the task is deleted.
    ///
    /// # Errors
    /// When the gateway refuses or stays away, or the reader of the output is gone.
    pub(crate) async fn run(self, gateway: Gateway, color: Color) -> Result<(), Failure> {
        let request = SubscribeRequest { task: self.task, cursor: self.cursor, types: self.types };
        let mut follower =
            EventFollower::open(gateway, request, Duration::ZERO, self.reconnect).await?;
        let mut console = Console::merged(color);
        let live = console.is_live();
        let mut renderer = Renderer::new(Options { live, user_messages: true, entities: true });
        loop {
            match follower.next().await? {
                StreamUpdate::Event(event) => {
                    match self.output {
                        Output::Ndjson => console
                            .record(&json::message("construct.v1.Event", &*event).to_string())?,
                        Output::Text => renderer.event(&event, &mut console)?,
                    }
                    if is_last(&event) {
                        return Ok(());
                    }
                }
                StreamUpdate::Disconnected(reason) => {
                    eprintln!("the connection is lost ({reason}); reconnecting");
                    if follower.cursor().is_empty() {
                        eprintln!(
                            "no event has arrived yet; events before the reconnect are not shown"
                        );
                    }
                }
                StreamUpdate::Reconnected if self.output == Output::Text => {
                    render::note("reconnected", &mut console)?
                }
                StreamUpdate::Reconnected => {}
            }
        }
    }
}
