//! Quotas: how much an organization may do.

use clap::{Args, Subcommand};
use construct_proto::v1::{GetQuotaRequest, Quota, QuotaLimits, UpdateQuotaRequest};

use super::WriteArgs;
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money,
    output::OutputArgs,
    words::thousands,
};

/// What stands for the tier's limit.
const TIER: &str = "tier";

#[derive(Debug, Subcommand)]
pub(crate) enum QuotaCommand {
    /// Show how much an organization may do, and how much of it is used.
    Get {
        /// By id; when not given, the one that you work in. Others are shown to the operator only.
        // Not called like the option of all commands, whose value it would be.
        #[arg(value_name = "ORGANIZATION", default_value = "", hide_default_value = true)]
        of: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Say how much an organization may do. For the operator.
    Set(Set),
}

/// What is not given stays as it is.
#[derive(Debug, Args)]
pub(crate) struct Set {
    /// By id.
    #[arg(value_name = "ORGANIZATION")]
    of: String,
    /// One of the gateway's tiers, or `unlimited`; `""` for the one that holds for everybody.
    #[arg(long)]
    tier: Option<String>,
    /// Calls of the API, in all. A number, or `tier` for the tier's.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    requests_per_minute: Option<Limit>,
    /// Calls of the API with each key.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    key_requests_per_minute: Option<Limit>,
    /// Tasks begun.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    tasks_per_day: Option<Limit>,
    /// Steps that run scripts.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    runs_per_day: Option<Limit>,
    /// Tokens that models read and write.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    tokens_per_day: Option<Limit>,
    /// What models may cost.
    #[arg(long, value_name = "DOLLARS", value_parser = parse_dollars)]
    spend_per_month: Option<Limit>,
    /// Bytes of uploads and documents that are kept.
    #[arg(long, value_name = "BYTES", value_parser = parse_limit)]
    storage_bytes: Option<Limit>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// A limit as it is said: a number, or the tier's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Limit(Option<i64>);

fn parse_limit(text: &str) -> Result<Limit, String> {
    if text == TIER {
        return Ok(Limit(None));
    }
    let number = text.parse::<i64>().ok().filter(|number| *number >= 0);
    number
        .map(|number| Limit(Some(number)))
        .ok_or_else(|| "write a number, or `tier` for the tier's".to_owned())
}

fn parse_dollars(text: &str) -> Result<Limit, String> {
    if text == TIER {
        return Ok(Limit(None));
    }
    match money::parse_limit(text) {
        Ok(money::Limit { pico_usd, period: None }) => Ok(Limit(Some(pico_usd))),
        _ => Err("write dollars, like 5 or 2.50, or `tier` for the tier's".to_owned()),
    }
}

impl QuotaCommand {
    /// # Errors
    /// What the gateway fails with.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Get { of, output } => {
                let quota =
                    call(gateway.usage().get_quota(GetQuotaRequest { organization: of })).await?;
                show(output, &quota)
            }
            Self::Set(set) => set.run(gateway).await,
        }
    }
}

impl Set {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let before = GetQuotaRequest { organization: self.of.clone() };
        let before = call(gateway.usage().get_quota(before)).await?;
        let overrides = self.overrides(before.overrides.unwrap_or_default());
        let request = UpdateQuotaRequest {
            organization: self.of,
            tier: self.tier.unwrap_or(before.assigned_tier),
            overrides: Some(overrides),
            // What somebody else has said meanwhile is not undone.
            revision: before.revision,
            idempotency_key: self.write.key(),
        };
        show(self.output, &call(gateway.usage().update_quota(request)).await?)
    }

    fn overrides(&self, before: QuotaLimits) -> QuotaLimits {
        let said = |limit: Option<Limit>, before| limit.map_or(before, |limit| limit.0);
        QuotaLimits {
            requests_per_minute: said(self.requests_per_minute, before.requests_per_minute),
            key_requests_per_minute: said(
                self.key_requests_per_minute,
                before.key_requests_per_minute,
            ),
            tasks_per_day: said(self.tasks_per_day, before.tasks_per_day),
            runs_per_day: said(self.runs_per_day, before.runs_per_day),
            tokens_per_day: said(self.tokens_per_day, before.tokens_per_day),
            spend_per_month_pico_usd: said(self.spend_per_month, before.spend_per_month_pico_usd),
            storage_bytes: said(self.storage_bytes, before.storage_bytes),
        }
    }
}

fn show(output: OutputArgs, quota: &Quota) -> Result<(), Failure> {
    output.words("construct.v1.Quota", quota, &words(quota))
}

/// The tier, then a line for each limit.
fn words(quota: &Quota) -> String {
    let (limits, overrides) =
        (quota.limits.unwrap_or_default(), quota.overrides.unwrap_or_default());
    let used = quota.used;
    let number: fn(i64) -> String = |number| thousands(number);
    let rows = [
        (
            "requests a minute",
            number,
            limits.requests_per_minute,
            overrides.requests_per_minute,
            None,
        ),
        (
            "requests a minute, each key",
            number,
            limits.key_requests_per_minute,
            overrides.key_requests_per_minute,
            None,
        ),
        (
            "tasks a day",
            number,
            limits.tasks_per_day,
            overrides.tasks_per_day,
            used.map(|used| used.tasks),
        ),
        (
            "runs a day",
            number,
            limits.runs_per_day,
            overrides.runs_per_day,
            used.map(|used| used.runs),
        ),
        (
            "tokens a day",
            number,
            limits.tokens_per_day,
            overrides.tokens_per_day,
            used.map(|used| used.tokens),
        ),
        (
            "spending a month",
            money::cost,
            limits.spend_per_month_pico_usd,
            overrides.spend_per_month_pico_usd,
            used.map(|used| used.spend_pico_usd),
        ),
        (
            "bytes that are kept",
            number,
            limits.storage_bytes,
            overrides.storage_bytes,
            used.map(|used| used.storage_bytes),
        ),
    ];
    let mut text = format!("{}: tier {}\n", quota.organization, quota.tier);
    let mut lines = vec![["".to_owned(), "USED".to_owned(), "LIMIT".to_owned(), "FROM".to_owned()]];
    lines.extend(rows.map(|(what, show, limit, own, used)| {
        let from = match (limit, own) {
            (None, _) => "",
            (Some(_), None) => "tier",
            (Some(_), Some(_)) => "here",
        };
        let limit = limit.map_or("none".to_owned(), show);
        [what.to_owned(), used.map(show).unwrap_or_default(), limit, from.to_owned()]
    }));
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let [what, used, limit] = [0, 1, 2].map(width);
    for line in &lines {
        let line =
            format!("{:what$}  {:>used$}  {:>limit$}  {}", line[0], line[1], line[2], line[3]);
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use construct_proto::v1::QuotaUsage;

    use super::*;

    #[test]
    fn limits_are_numbers_dollars_or_the_tiers() {
        assert_eq!(parse_limit("1000"), Ok(Limit(Some(1000))));
        assert_eq!(parse_limit("tier"), Ok(Limit(None)));
        assert_eq!(parse_dollars("2.50"), Ok(Limit(Some(2_500_000_000_000))));
        for wrong in ["-1", "", "1.5", "none"] {
            assert!(parse_limit(wrong).is_err(), "{wrong}");
        }
        assert!(parse_dollars("5/month").is_err());
    }

    #[test]
    fn a_quota_is_shown_with_what_is_used_and_whose_limit_it_is() {
        let quota = Quota {
            organization: "org_1".into(),
            tier: "free".into(),
            limits: Some(QuotaLimits {
                tasks_per_day: Some(1000),
                spend_per_month_pico_usd: Some(5_000_000_000_000),
                ..QuotaLimits::default()
            }),
            overrides: Some(QuotaLimits { tasks_per_day: Some(1000), ..QuotaLimits::default() }),
            used: Some(QuotaUsage {
                tasks: 12,
                spend_pico_usd: 1_200_000_000_000,
                ..QuotaUsage::default()
            }),
            ..Quota::default()
        };
        let expected = [
            "org_1: tier free",
            "                              USED  LIMIT  FROM",
            "requests a minute                    none",
            "requests a minute, each key          none",
            "tasks a day                     12  1,000  here",
            "runs a day                       0   none",
            "tokens a day                     0   none",
            "spending a month             $1.20  $5.00  tier",
            "bytes that are kept              0   none",
        ];
        assert_eq!(words(&quota).lines().collect::<Vec<_>>(), expected);
    }
}
