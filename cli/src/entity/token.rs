//! Tokens by which programs reach models through the proxy.

use std::time::Duration;

use clap::{Args, Subcommand};
use construct_proto::v1::{CreateModelTokenRequest, ModelToken};
use jiff::Timestamp;

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money,
    output::{Entity, Format, OutputArgs, print},
    time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Make one, and print it. It is shown this once.
    Create(Create),
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// A model it is good for, by name or id; can be given several times. The first is meant by
    /// requests that name none.
    #[arg(long = "model", value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// All that may be spent with it, in US dollars, like 2 or 0.50.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    budget: Option<i64>,
    /// How long it holds, at most 7d.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time::parse_duration)]
    expires: Duration,
    /// The task that pays.
    #[arg(long, value_name = "TASK", default_value = "", hide_default_value = true)]
    task: String,
    #[command(flatten)]
    output: OutputArgs,
}

impl TokenCommand {
    /// # Errors
    /// What the gateway fails with.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let Self::Create(Create { models, budget, expires, task, output }) = self;
        let request = CreateModelTokenRequest {
            models,
            task,
            // Micro-dollars, as prices are.
            budget_pico_usd: budget.unwrap_or(0).saturating_mul(1_000_000),
            expires_in: prost_types::Duration::try_from(expires).ok(),
        };
        let token = call(gateway.model_tokens().create_model_token(request)).await?;
        // Alone on standard output, so that a shell can take it: `OPENAI_API_KEY=$(construct token
        // create …)`.
        if output.format() == Format::Table {
            for (name, value) in token.details(Timestamp::now()) {
                eprintln!("{name:<8} {value}");
            }
            return print(&format!("{}\n", token.token));
        }
        output.one(&token)
    }
}

impl Entity for ModelToken {
    const NAME: &'static str = "construct.v1.ModelToken";
    const PLURAL: &'static str = "tokens";
    const COLUMNS: &'static [&'static str] = &["ID", "MODELS", "EXPIRES"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let expires = time::read(self.expires_at.as_ref()).map(|at| time::distance(now, at));
        vec![self.id.clone(), self.models.join(", "), expires.unwrap_or_default()]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let expires = time::read(self.expires_at.as_ref());
        vec![
            ("id", self.id.clone()),
            ("models", self.models.join(", ")),
            ("task", self.task_id.clone()),
            (
                "budget",
                if self.budget_pico_usd == 0 {
                    String::new()
                } else {
                    money::cost(self.budget_pico_usd)
                },
            ),
            (
                "expires",
                expires
                    .map(|at| format!("{} (in {})", time::local(at), time::distance(now, at)))
                    .unwrap_or_default(),
            ),
        ]
        .into_iter()
        .filter(|(_, value)| !value.is_empty())
        .collect()
    }
}
