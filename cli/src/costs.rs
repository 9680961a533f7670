//! `construct costs`: costs by agent, model, task, day or purpose.

use clap::ValueEnum;
use construct_proto::v1::{Cost, CostGroup, GetCostsRequest, GetCostsResponse};
use jiff::Timestamp;

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money,
    output::OutputArgs,
    text::{clip, one_line, thousands},
    time,
};

/// The maximum columns of a name.
const NAME_COLUMNS: usize = 40;

/// The dimension to group by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    Agent,
    Model,
    /// Each task with its subtasks.
    Task,
    /// Days in UTC.
    Day,
    /// Turns, titles, model calls of scripts, …
    Purpose,
}

impl From<By> for CostGroup {
    fn from(by: By) -> Self {
        match by {
            By::Agent => Self::Agent,
            By::Model => Self::Model,
            By::Task => Self::Task,
            By::Day => Self::Day,
            By::Purpose => Self::Purpose,
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct CostsArgs {
    /// The dimension to group by.
    #[arg(long, value_enum, value_name = "WHAT")]
    by: Option<By>,
    /// Only costs of this agent, by name or id.
    #[arg(long, default_value = "", hide_default_value = true)]
    agent: String,
    /// Only costs of this model, by name or id.
    #[arg(long, default_value = "", hide_default_value = true)]
    model: String,
    /// Only costs of this task and its subtasks.
    #[arg(long, default_value = "", hide_default_value = true)]
    task: String,
    /// Start: a time, or how long ago, e.g. 7d.
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    since: Option<Timestamp>,
    /// End, exclusive.
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    until: Option<Timestamp>,
    #[command(flatten)]
    output: OutputArgs,
}

impl CostsArgs {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let request = GetCostsRequest {
            group: self.by.map_or(CostGroup::Unspecified, CostGroup::from).into(),
            agent: self.agent,
            model: self.model,
            task: self.task,
            since: self.since.map(time::write),
            until: self.until.map(time::write),
        };
        let costs = call(gateway.budgets().get_costs(request)).await?;
        self.output.message("construct.v1.GetCostsResponse", &costs, &describe(&costs))
    }
}

/// A table with the total last.
fn describe(response: &GetCostsResponse) -> String {
    let mut rows: Vec<[String; 5]> = vec![["", "CALLS", "IN", "OUT", "COST"].map(str::to_owned)];
    rows.extend(response.costs.iter().map(|cost| row(&name(cost), cost)));
    if let Some(total) = &response.total {
        rows.push(row("total", total));
    }
    let widths: [usize; 5] = std::array::from_fn(|column| {
        rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0)
    });
    let line = |row: &[String; 5]| {
        let [name, calls, input, output, cost] = row;
        let [w0, w1, w2, w3, w4] = widths;
        format!("{name:<w0$}  {calls:>w1$}  {input:>w2$}  {output:>w3$}  {cost:>w4$}\n")
    };
    rows.iter().map(line).collect()
}

fn name(cost: &Cost) -> String {
    match (cost.name.as_str(), cost.key.as_str()) {
        ("", "") => "none".to_owned(),
        ("", key) => key.to_owned(),
        (name, _) => clip(&one_line(name), NAME_COLUMNS),
    }
}

fn row(name: &str, cost: &Cost) -> [String; 5] {
    let usage = cost.usage.unwrap_or_default();
    let input = usage
        .input_tokens
        .saturating_add(usage.cache_read_tokens)
        .saturating_add(usage.cache_write_tokens);
    [
        name.to_owned(),
        thousands(cost.calls),
        thousands(input),
        thousands(usage.output_tokens),
        money::cost(usage.cost_pico_usd),
    ]
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::Usage;

    use super::*;

    #[test]
    fn costs_are_a_table_with_the_total_last() {
        let usage = |cost_pico_usd| Usage {
            input_tokens: 1_200,
            output_tokens: 30,
            cost_pico_usd,
            ..Usage::default()
        };
        let cost = |key: &str, name: &str, cost| Cost {
            key: key.into(),
            name: name.into(),
            calls: 2,
            usage: Some(usage(cost)),
        };
        let response = GetCostsResponse {
            total: Some(cost("", "", 1_700_000_000_000)),
            costs: vec![cost("agent_1", "coder", 1_200_000_000_000), cost("", "", 500_000_000_000)],
        };
        assert_eq!(
            describe(&response),
            "       CALLS     IN  OUT   COST\n\
             coder      2  1,200   30  $1.20\n\
             none       2  1,200   30  $0.50\n\
             total      2  1,200   30  $1.70\n"
        );
    }
}
