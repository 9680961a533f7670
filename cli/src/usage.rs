//! `construct usage`: usage by day, agent, key, model or tool.

use clap::ValueEnum;
use construct_proto::v1::{
    ListUsageRequest, ListUsageResponse, PageInfo, UsageDimension, UsageRow,
    list_usage_request::Filter,
};
use jiff::Timestamp;

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money,
    output::OutputArgs,
    page::ListArgs,
    text::{clip, one_line, thousands},
    time,
};

/// The maximum columns of a name.
const NAME_COLUMNS: usize = 40;

/// A dimension to group by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum By {
    Day,
    Agent,
    /// The API key of the request.
    Key,
    Model,
    /// Tool calls instead of model calls.
    Tool,
}

impl From<By> for UsageDimension {
    fn from(by: By) -> Self {
        match by {
            By::Day => Self::Day,
            By::Agent => Self::Agent,
            By::Key => Self::Key,
            By::Model => Self::Model,
            By::Tool => Self::Tool,
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct UsageArgs {
    /// Dimensions to group by: day, agent, key, model or tool, separated by commas.
    #[arg(long, value_enum, value_name = "WHAT", value_delimiter = ',', default_value = "day")]
    by: Vec<By>,
    /// Only usage of this agent, by name or id.
    #[arg(long, default_value = "", hide_default_value = true)]
    agent: String,
    /// Only usage with this API key, by id.
    #[arg(long, default_value = "", hide_default_value = true)]
    key: String,
    /// Only usage of this model, by name or id.
    #[arg(long, default_value = "", hide_default_value = true)]
    model: String,
    /// Only calls of this tool, with `--by tool`.
    #[arg(long, default_value = "", hide_default_value = true)]
    tool: String,
    /// Start: a time, or how long ago, e.g. 7d. Default: 30 days ago.
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    since: Option<Timestamp>,
    /// End, exclusive. Default: now.
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    until: Option<Timestamp>,
    /// The time zone of days, e.g. Europe/Berlin. Default: UTC.
    #[arg(long, value_name = "ZONE", default_value = "", hide_default_value = true)]
    time_zone: String,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl UsageArgs {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter {
            agent: self.agent,
            model: self.model,
            tool: self.tool,
            since: self.since.map(time::write),
            // A fixed end keeps all pages consistent.
            until: Some(time::write(self.until.unwrap_or_else(Timestamp::now))),
            time_zone: self.time_zone,
            api_key: self.key,
        };
        let dimensions: Vec<i32> =
            self.by.iter().map(|by| UsageDimension::from(*by).into()).collect();
        let listed = self
            .list
            .collect(|page| {
                let (filter, dimensions) = (Some(filter.clone()), dimensions.clone());
                let request = ListUsageRequest { page: Some(page), filter, dimensions };
                async move {
                    let response = call(gateway.usage().list_usage(request)).await?;
                    Ok((response.usage, response.page))
                }
            })
            .await?;
        let text = describe(&self.by, &listed.items);
        let next_page_token = listed.next_page_token;
        if !next_page_token.is_empty() {
            eprintln!("there are more: --page-token {next_page_token}");
        }
        let page = Some(PageInfo { next_page_token });
        let response = ListUsageResponse { usage: listed.items, page };
        self.output.message("construct.v1.ListUsageResponse", &response, &text)
    }
}

/// A table: dimensions on the left, numbers on the right.
fn describe(by: &[By], rows: &[UsageRow]) -> String {
    let tools = by.contains(&By::Tool);
    let names = by.iter().map(|by| match by {
        By::Day => "DAY",
        By::Agent => "AGENT",
        By::Key => "KEY",
        By::Model => "MODEL",
        By::Tool => "TOOL",
    });
    let numbers: &[&str] =
        if tools { &["CALLS", "FAILED", "TIME"] } else { &["CALLS", "IN", "OUT", "COST"] };
    let heading = names.chain(numbers.iter().copied()).map(str::to_owned).collect();
    let lines: Vec<Vec<String>> =
        std::iter::once(heading).chain(rows.iter().map(|row| line(by, tools, row))).collect();
    let width =
        |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..by.len() + numbers.len()).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        for (column, (cell, width)) in line.iter().zip(&widths).enumerate() {
            let gap = if column == 0 { "" } else { "  " };
            let cell = if column < by.len() {
                format!("{cell:<width$}")
            } else {
                format!("{cell:>width$}")
            };
            text.push_str(&format!("{gap}{cell}"));
        }
        text.push('\n');
    }
    text
}

fn line(by: &[By], tools: bool, row: &UsageRow) -> Vec<String> {
    let name = |name: &str, id: &str| match (name, id) {
        ("", "") => "none".to_owned(),
        ("", id) => id.to_owned(),
        (name, _) => clip(&one_line(name), NAME_COLUMNS),
    };
    let mut cells: Vec<String> = by
        .iter()
        .map(|by| match by {
            By::Day => row.day.clone(),
            By::Agent => name(&row.agent, &row.agent_id),
            By::Key => name(&row.api_key, &row.api_key_id),
            By::Model => name(&row.model, &row.model_id),
            By::Tool => clip(&one_line(&row.tool), NAME_COLUMNS),
        })
        .collect();
    cells.push(thousands(row.calls));
    if tools {
        cells.extend([thousands(row.failed), format!("{:.1} s", row.duration_ms as f64 / 1000.0)]);
        return cells;
    }
    let usage = row.usage.unwrap_or_default();
    let input = usage
        .input_tokens
        .saturating_add(usage.cache_read_tokens)
        .saturating_add(usage.cache_write_tokens);
    cells.extend([
        thousands(input),
        thousands(usage.output_tokens),
        money::cost(usage.cost_pico_usd),
    ]);
    cells
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::Usage;

    use super::*;

    #[test]
    fn usage_is_a_table_by_dimension() {
        let usage = Usage {
            input_tokens: 1_200,
            output_tokens: 30,
            cost_pico_usd: 1_200_000_000_000,
            ..Usage::default()
        };
        let row = |day: &str, agent: &str| UsageRow {
            day: day.into(),
            agent: agent.into(),
            calls: 2,
            usage: Some(usage),
            ..UsageRow::default()
        };
        assert_eq!(
            describe(&[By::Day, By::Agent], &[row("2026-11-21", "coder"), row("2026-11-22", "")]),
            "DAY         AGENT  CALLS     IN  OUT   COST\n\
             2026-11-21  coder      2  1,200   30  $1.20\n\
             2026-11-22  none       2  1,200   30  $1.20\n"
        );
        let keyed = UsageRow { api_key_id: "key_1".into(), usage: None, ..row("", "") };
        assert_eq!(
            describe(&[By::Key], &[keyed]),
            "KEY    CALLS  IN  OUT   COST\nkey_1      2   0    0  $0.00\n"
        );
        let tool = UsageRow {
            tool: "fetch".into(),
            calls: 3,
            failed: 1,
            duration_ms: 1_250,
            ..UsageRow::default()
        };
        assert_eq!(
            describe(&[By::Tool], &[tool]),
            "TOOL   CALLS  FAILED   TIME\nfetch      3       1  1.2 s\n"
        );
    }
}
