//! `construct token`: tokens for the model proxy.

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
    /// Create a token, and print it once.
    Create(Create),
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// A model that it may call, by name or id. Repeatable. The first is the default of requests.
    #[arg(long = "model", value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// The maximum cost in dollars, e.g. 2 or 0.50.
    #[arg(long, value_name = "DOLLARS", value_parser = money::parse_price)]
    budget: Option<i64>,
    /// How long the token is valid, at most 7d.
    #[arg(long, value_name = "TIME", default_value = "1h", value_parser = time::parse_duration)]
    expires: Duration,
    /// The task that the costs are charged to.
    #[arg(long, value_name = "TASK", default_value = "", hide_default_value = true)]
    task: String,
    #[command(flatten)]
    output: OutputArgs,
}

impl TokenCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let Self::Create(Create { models, budget, expires, task, output }) = self;
        let request = CreateModelTokenRequest {
            models,
            task,
            // Parsed as micro-dollars, like prices.
            budget_pico_usd: budget.unwrap_or(0).saturating_mul(1_000_000),
            expires_in: prost_types::Duration::try_from(expires).ok(),
        };
        let token = call(gateway.model_tokens().create_model_token(request)).await?;
        // Only the token on standard output, for use in a shell: `OPENAI_API_KEY=$(construct token
        // create …)`.
        if output.format() == Format::Table {
            for (name, value) in token.details(Timestamp::now()) {
                eprintln!("{name:<8} {value}");
            }
            return print(&format!("{}\n", token.token));
        }
        output.entity(&token)
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
