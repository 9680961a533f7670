//! `construct budget`: limits on spending.

use clap::{Args, Subcommand};
use construct_proto::v1::{
    Budget, BudgetPeriod, BudgetSpec, CreateBudgetRequest, DeleteBudgetRequest, GetBudgetRequest,
    ListBudgetsRequest, UpdateBudgetRequest, list_budgets_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, id, metadata_details};
use crate::{
    failure::Failure,
    gateway::{Gateway, call, idempotency_key},
    money::{self, Limit},
    output::{Entity, OutputArgs},
    page::ListArgs,
    time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum BudgetCommand {
    /// Limit the spending of the organization, an agent or a task.
    Create(Create),
    /// Show a budget.
    Get {
        /// The budget's id.
        budget: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List budgets.
    List(List),
    /// Change the limit of a budget.
    Update(Update),
    /// Delete a budget, which removes its limit.
    Delete {
        /// The budget's id.
        budget: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// Dollars per period: 5/month, 2/day, 10/total, 0.50/call. Default period: total.
    #[arg(value_parser = money::parse_limit)]
    limit: Limit,
    /// Limit this agent in all its tasks, by name or id.
    #[arg(long, default_value = "", hide_default_value = true)]
    agent: String,
    /// Limit this task with its subtasks.
    #[arg(long, default_value = "", hide_default_value = true, conflicts_with = "agent")]
    task: String,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only budgets of this agent.
    #[arg(long, default_value = "", hide_default_value = true)]
    agent: String,
    /// Only budgets of this task.
    #[arg(long, default_value = "", hide_default_value = true)]
    task: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// The budget's id.
    budget: String,
    /// The new limit in dollars.
    #[arg(value_name = "DOLLARS", value_parser = money::parse_limit)]
    limit: Limit,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl BudgetCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(Create { limit, agent, task, write, output }) => {
                let spec = BudgetSpec {
                    agent,
                    task,
                    period: limit.period.unwrap_or(BudgetPeriod::Total).into(),
                    limit_pico_usd: limit.pico_usd,
                    token_id: String::new(),
                };
                let request =
                    CreateBudgetRequest { spec: Some(spec), idempotency_key: write.key() };
                output.entity(&call(gateway.budgets().create_budget(request)).await?)
            }
            Self::Get { budget, output } => output
                .entity(&call(gateway.budgets().get_budget(GetBudgetRequest { budget })).await?),
            Self::List(args) => args.run(gateway).await,
            Self::Update(Update { budget, limit, change, output }) => {
                if limit.period.is_some() {
                    return Err(Failure::usage(
                        "the period of a budget cannot be changed; create another budget",
                    ));
                }
                let request = UpdateBudgetRequest {
                    budget,
                    limit_pico_usd: limit.pico_usd,
                    revision: change.revision,
                    idempotency_key: change.write.key(),
                };
                output.entity(&call(gateway.budgets().update_budget(request)).await?)
            }
            Self::Delete { budget, write, output } => {
                let request =
                    DeleteBudgetRequest { budget: budget.clone(), idempotency_key: write.key() };
                call(gateway.budgets().delete_budget(request)).await?;
                output.deleted("budget", &budget)
            }
        }
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter { agent: self.agent, task: self.task };
        let listed = self
            .list
            .collect(|page| {
                let request = ListBudgetsRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.budgets().list_budgets(request)).await?;
                    Ok((response.budgets, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

/// The owner of a budget.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Owner<'a> {
    /// Default period: month.
    Agent(&'a str),
    /// Default period: total.
    Task(&'a str),
}

/// Creates a budget if a limit is given.
///
/// # Errors
/// The error of the gateway.
pub(crate) async fn create(
    gateway: &Gateway,
    owner: Owner<'_>,
    limit: Option<Limit>,
) -> Result<(), Failure> {
    let Some(limit) = limit else { return Ok(()) };
    let (agent, task, period) = match owner {
        Owner::Agent(agent) => (agent.to_owned(), String::new(), BudgetPeriod::Month),
        Owner::Task(task) => (String::new(), task.to_owned(), BudgetPeriod::Total),
    };
    let spec = BudgetSpec {
        agent,
        task,
        period: limit.period.unwrap_or(period).into(),
        limit_pico_usd: limit.pico_usd,
        token_id: String::new(),
    };
    let request = CreateBudgetRequest { spec: Some(spec), idempotency_key: idempotency_key() };
    call(gateway.budgets().create_budget(request)).await.map(drop)
}

fn owner_name(spec: &BudgetSpec) -> String {
    match (spec.agent.as_str(), spec.task.as_str(), spec.token_id.as_str()) {
        ("", "", "") => "organization".to_owned(),
        ("", "", token) => format!("token {token}"),
        ("", task, _) => task.to_owned(),
        (agent, ..) => format!("agent {agent}"),
    }
}

impl Entity for Budget {
    const NAME: &'static str = "construct.v1.Budget";
    const PLURAL: &'static str = "budgets";
    const COLUMNS: &'static [&'static str] =
        &["ID", "OWNER", "PER", "LIMIT", "SPENT", "RESERVED", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        vec![
            id(self.metadata.as_ref()),
            owner_name(&spec),
            money::period(spec.period()).to_owned(),
            money::cost(spec.limit_pico_usd),
            money::cost(status.spent_pico_usd),
            money::cost(status.reserved_pico_usd),
            age(self.metadata.as_ref(), now),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let since = time::read(status.since.as_ref()).map(time::local).unwrap_or_default();
        let counts = spec.period() != BudgetPeriod::Call;
        let amount = |pico_usd| if counts { money::cost(pico_usd) } else { String::new() };
        let mut details = vec![
            ("id", id(self.metadata.as_ref())),
            ("owner", owner_name(&spec)),
            ("per", money::period(spec.period()).to_owned()),
            ("since", since),
            ("limit", money::cost(spec.limit_pico_usd)),
            ("spent", amount(status.spent_pico_usd)),
            ("reserved", amount(status.reserved_pico_usd)),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details
    }
}
