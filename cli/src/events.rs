//! `construct events`: what happens, as it happens.

use std::time::Duration;

use construct_proto::v1::SubscribeRequest;

use crate::{
    console::{Color, Console},
    failure::Failure,
    follow::{Follow, News, is_last},
    gateway::Gateway,
    json,
    render::{self, Options, Renderer},
    time,
};

/// How events are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Output {
    /// As a conversation reads.
    Text,
    /// One JSON object per line.
    Ndjson,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EventsArgs {
    /// The task to watch; without it, what happens to agents, models and providers.
    #[arg(default_value = "", hide_default_value = true)]
    task: String,
    /// Go on after the event with this cursor; `0` is the beginning.
    #[arg(long, default_value = "", hide_default_value = true)]
    cursor: String,
    /// Only these types, e.g. `message.*`; can be given several times.
    #[arg(long = "type", value_name = "GLOB")]
    types: Vec<String>,
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
    /// How long to wait for a gateway that went away.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = time::parse_duration)]
    reconnect: Duration,
}

impl EventsArgs {
    /// Prints until interrupted, or until the task is deleted.
    ///
    /// # Errors
    /// When the gateway refuses or stays away, or nobody reads any more.
    pub(crate) async fn run(self, gateway: Gateway, color: Color) -> Result<(), Failure> {
        let request = SubscribeRequest { task: self.task, cursor: self.cursor, types: self.types };
        let mut follow = Follow::open(gateway, request, Duration::ZERO, self.reconnect).await?;
        let mut console = Console::merged(color);
        let live = console.is_live();
        let mut renderer = Renderer::new(Options { live, people: true, entities: true });
        loop {
            match follow.next().await? {
                News::Event(event) => {
                    match self.output {
                        Output::Ndjson => console
                            .record(&json::message("construct.v1.Event", &*event).to_string())?,
                        Output::Text => renderer.event(&event, &mut console)?,
                    }
                    if is_last(&event) {
                        return Ok(());
                    }
                }
                News::Lost(why) => {
                    eprintln!("the connection is lost ({why}); reconnecting");
                    if follow.cursor().is_empty() {
                        eprintln!(
                            "nothing had happened yet; what happens before it is back is not shown"
                        );
                    }
                }
                News::Back if self.output == Output::Text => {
                    render::note("connected again", &mut console)?
                }
                News::Back => {}
            }
        }
    }
}
