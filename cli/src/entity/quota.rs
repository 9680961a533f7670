//! `construct quota`: limits of an organization.

use clap::{Args, Subcommand};
use construct_proto::v1::{GetQuotaRequest, Quota, QuotaLimits, UpdateQuotaRequest};

use super::WriteArgs;
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    money,
    output::OutputArgs,
    text::thousands,
};

/// The argument for the tier's limit.
const TIER: &str = "tier";

#[derive(Debug, Subcommand)]
pub(crate) enum QuotaCommand {
    /// Show the quota and the usage of an organization.
    Get {
        /// The id. Default: the current organization. Others are visible only to operators.
        // Not `organization`: that is the global option.
        #[arg(value_name = "ORGANIZATION", default_value = "", hide_default_value = true)]
        id: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Set the quota of an organization. For operators.
    Set(Set),
}

/// The new limits. Others stay unchanged.
#[derive(Debug, Args)]
pub(crate) struct Set {
    /// The id of the organization.
    #[arg(value_name = "ORGANIZATION")]
    id: String,
    /// One of the gateway's tiers, or `unlimited`; `""` for the default tier.
    #[arg(long)]
    tier: Option<String>,
    /// API requests in total: a number, or `tier` for the tier's limit.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    requests_per_minute: Option<Limit>,
    /// API requests per key.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    key_requests_per_minute: Option<Limit>,
    /// Created tasks.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    tasks_per_day: Option<Limit>,
    /// Steps that execute scripts.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    runs_per_day: Option<Limit>,
    /// Input and output tokens of models.
    #[arg(long, value_name = "N", value_parser = parse_limit)]
    tokens_per_day: Option<Limit>,
    /// Costs of models.
    #[arg(long, value_name = "DOLLARS", value_parser = parse_dollars)]
    spend_per_month: Option<Limit>,
    /// Stored bytes of uploads and documents.
    #[arg(long, value_name = "BYTES", value_parser = parse_limit)]
    storage_bytes: Option<Limit>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

/// A limit argument: a number, or the tier's.
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
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Get { id, output } => {
                let quota =
                    call(gateway.usage().get_quota(GetQuotaRequest { organization: id })).await?;
                show(output, &quota)
            }
            Self::Set(set) => set.run(gateway).await,
        }
    }
}

impl Set {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let request = GetQuotaRequest { organization: self.id.clone() };
        let current = call(gateway.usage().get_quota(request)).await?;
        let overrides = self.merge_overrides(current.overrides.unwrap_or_default());
        let request = UpdateQuotaRequest {
            organization: self.id,
            tier: self.tier.unwrap_or(current.assigned_tier),
            overrides: Some(overrides),
            // A concurrent change is not overwritten.
            revision: current.revision,
            idempotency_key: self.write.key(),
        };
        show(self.output, &call(gateway.usage().update_quota(request)).await?)
    }

    /// The given overrides, with the others from `base`.
    fn merge_overrides(&self, base: QuotaLimits) -> QuotaLimits {
        let merge = |limit: Option<Limit>, base| limit.map_or(base, |limit| limit.0);
        QuotaLimits {
            requests_per_minute: merge(self.requests_per_minute, base.requests_per_minute),
            key_requests_per_minute: merge(
                self.key_requests_per_minute,
                base.key_requests_per_minute,
            ),
            tasks_per_day: merge(self.tasks_per_day, base.tasks_per_day),
            runs_per_day: merge(self.runs_per_day, base.runs_per_day),
            tokens_per_day: merge(self.tokens_per_day, base.tokens_per_day),
            spend_per_month_pico_usd: merge(self.spend_per_month, base.spend_per_month_pico_usd),
            storage_bytes: merge(self.storage_bytes, base.storage_bytes),
        }
    }
}

fn show(output: OutputArgs, quota: &Quota) -> Result<(), Failure> {
    output.message("construct.v1.Quota", quota, &describe(quota))
}

/// The tier, then one line per limit.
fn describe(quota: &Quota) -> String {
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
            "stored bytes",
            number,
            limits.storage_bytes,
            overrides.storage_bytes,
            used.map(|used| used.storage_bytes),
        ),
    ];
    let mut text = format!("{}: tier {}\n", quota.organization, quota.tier);
    let mut lines = vec![["".to_owned(), "USED".to_owned(), "LIMIT".to_owned(), "FROM".to_owned()]];
    lines.extend(rows.map(|(name, format, limit, own, used)| {
        let from = match (limit, own) {
            (None, _) => "",
            (Some(_), None) => "tier",
            (Some(_), Some(_)) => "override",
        };
        let limit = limit.map_or("none".to_owned(), format);
        [name.to_owned(), used.map(format).unwrap_or_default(), limit, from.to_owned()]
    }));
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let [name, used, limit] = [0, 1, 2].map(width);
    for line in &lines {
        let line =
            format!("{:name$}  {:>used$}  {:>limit$}  {}", line[0], line[1], line[2], line[3]);
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
    fn limit_arguments_are_numbers_dollars_or_tier() {
        assert_eq!(parse_limit("1000"), Ok(Limit(Some(1000))));
        assert_eq!(parse_limit("tier"), Ok(Limit(None)));
        assert_eq!(parse_dollars("2.50"), Ok(Limit(Some(2_500_000_000_000))));
        for invalid in ["-1", "", "1.5", "none"] {
            assert!(parse_limit(invalid).is_err(), "{invalid}");
        }
        assert!(parse_dollars("5/month").is_err());
    }

    #[test]
    fn quota_is_a_table_with_usage_and_origin_of_limits() {
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
            "tasks a day                     12  1,000  override",
            "runs a day                       0   none",
            "tokens a day                     0   none",
            "spending a month             $1.20  $5.00  tier",
            "stored bytes                     0   none",
        ];
        assert_eq!(describe(&quota).lines().collect::<Vec<_>>(), expected);
    }
}
