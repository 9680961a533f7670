//! `UsageService`: usage and quotas of organizations.

use construct_domain::OrganizationId;
use construct_proto::v1::{
    self, GetQuotaRequest, ListUsageRequest, ListUsageResponse, QuotaLimits, QuotaUsage,
    UpdateQuotaRequest, usage_service_server::UsageService,
};
use construct_runtime::clock;
use construct_store::{
    CountSelection, Counts, Error, Limits, Quota, UsageFilter, UsageRow, UsageTotals, WriteOutcome,
};
use tonic::{Request, Response, Status};

use crate::{
    api::{Api, CallerContext, no_wake},
    budgets::{agent, model},
    convert,
    identity::rules::Access,
    organizations::response_output,
    status,
    validate::{optional_id, requests},
};

impl Api {
    /// The effective quota of an organization.
    fn quota(&self, quota: &Quota, used: Option<Counts>) -> v1::Quota {
        let (tier, holding) = self.quotas().effective_limits(quota.organization, Some(quota));
        v1::Quota {
            organization: quota.organization.to_string(),
            tier,
            limits: Some(limits(&holding)),
            overrides: Some(limits(&quota.overrides)),
            used: used.map(|used| QuotaUsage {
                tasks: used.tasks,
                runs: used.runs,
                tokens: used.tokens,
                spend_pico_usd: used.spend_pico_usd,
                storage_bytes: used.storage_bytes,
            }),
            revision: quota.revision,
            updated_at: quota.updated_at.map(convert::time),
            assigned_tier: quota.tier.clone(),
        }
    }
}

fn limits(limits: &Limits) -> QuotaLimits {
    QuotaLimits {
        requests_per_minute: limits.requests_per_minute,
        key_requests_per_minute: limits.key_requests_per_minute,
        tasks_per_day: limits.tasks_per_day,
        runs_per_day: limits.runs_per_day,
        tokens_per_day: limits.tokens_per_day,
        spend_per_month_pico_usd: limits.spend_per_month_pico_usd,
        storage_bytes: limits.storage_bytes,
    }
}

fn to_row(row: &UsageRow) -> v1::UsageRow {
    let mut usage_row = v1::UsageRow {
        day: row.cursor.day.clone(),
        agent_id: row.agent.map(|id| id.to_string()).unwrap_or_default(),
        agent: row.agent_name.clone(),
        api_key_id: row.key.map(|id| id.to_string()).unwrap_or_default(),
        api_key: row.key_name.clone(),
        model_id: row.model.map(|id| id.to_string()).unwrap_or_default(),
        model: row.model_name.clone(),
        ..v1::UsageRow::default()
    };
    match row.totals {
        UsageTotals::Models { calls, usage } => {
            usage_row.calls = calls;
            usage_row.usage = Some(convert::usage(&usage));
        }
        UsageTotals::Tools { calls, failed, micros } => {
            usage_row.tool.clone_from(&row.cursor.item);
            (usage_row.calls, usage_row.failed, usage_row.duration_ms) =
                (calls, failed, micros / 1000);
        }
    }
    usage_row
}

/// The organization of a quota request. Only the operator sees other organizations; for others they
/// do not exist.
fn quota_organization(
    context: &CallerContext,
    named: Option<OrganizationId>,
) -> Result<OrganizationId, Status> {
    let own = context.organization();
    let organization = named.unwrap_or(own);
    if organization == own || Access::Operator.check(context.caller()).is_ok() {
        return Ok(organization);
    }
    Err(status::for_reference(&organization.to_string(), Error::NotFound { what: "organization" }))
}

#[tonic::async_trait]
impl UsageService for Api {
    async fn get_quota(
        &self,
        request: Request<GetQuotaRequest>,
    ) -> Result<Response<v1::Quota>, Status> {
        let (context, request) = self.begin_request(request)?;
        let organization = quota_organization(&context, optional_id(&request.organization)?)?;
        let about = |error| status::for_reference(&organization.to_string(), error);
        let quota = context.store().quota_get(organization).await.map_err(about)?;
        let periods = self.quotas().periods(clock::now());
        let _permit = self.acquire_sum_permit(context.organization()).await?;
        let used = context
            .store()
            .quota_counts(organization, CountSelection::ALL, &periods)
            .await
            .map_err(status::from_store)?;
        Ok(Response::new(self.quota(&quota, Some(used))))
    }

    async fn update_quota(
        &self,
        request: Request<UpdateQuotaRequest>,
    ) -> Result<Response<v1::Quota>, Status> {
        let (context, mut request) = self.begin_unchecked_request(request)?;
        let (organization, overrides) =
            requests::update_quota(&request, |tier| self.quotas().has_tier(tier))?;
        let quota = Quota {
            organization,
            tier: request.tier.clone(),
            overrides,
            revision: 0,
            updated_at: None,
        };
        let (_, holding) = self.quotas().effective_limits(organization, Some(&quota));
        if organization == OrganizationId::LOCAL
            && [holding.requests_per_minute, holding.key_requests_per_minute].contains(&Some(0))
        {
            let message = "the operator's organization needs some requests: without any, nobody could raise its quota";
            return Err(Status::invalid_argument(message));
        }
        context.touch(&organization.to_string());
        let write = context.write("UpdateQuota", &mut request);
        let expected = (request.revision != 0).then_some(request.revision);
        let render = |quota: &Quota| response_output(&self.quota(quota, None));
        let written = context
            .store()
            .quota_set(&write, organization, &request.tier, overrides, expected, render)
            .await;
        let written =
            written.map_err(|error| status::for_reference(&request.organization, error))?;
        if let WriteOutcome::Applied { entity, .. } = &written {
            self.quotas().update(entity);
            tracing::info!(%organization, by = context.name(), "quota changed");
        }
        context.answer(written, no_wake, |quota| self.quota(quota, None)).await
    }

    async fn list_usage(
        &self,
        request: Request<ListUsageRequest>,
    ) -> Result<Response<ListUsageResponse>, Status> {
        let (context, request) = self.begin_unchecked_request(request)?;
        let query = requests::list_usage(context.organization(), &request, clock::now())?;
        let filter = request.filter.unwrap_or_default();
        let filter = UsageFilter {
            agent: agent(&context, &filter.agent).await?,
            model: model(&context, &filter.model).await?,
            key: query.key,
            tool: (!filter.tool.is_empty()).then_some(filter.tool),
            since: query.since,
            until: query.until,
            time_zone: query.time_zone,
        };
        let _permit = self.acquire_sum_permit(context.organization()).await?;
        let found = context
            .store()
            .usage_list(context.organization(), &filter, query.of, &query.page.query())
            .await;
        let found = found.map_err(status::from_store)?;
        let (usage, info) = query.page.cut(&found, to_row, |row| row.cursor.clone());
        Ok(Response::new(ListUsageResponse { usage, page: Some(info) }))
    }
}
