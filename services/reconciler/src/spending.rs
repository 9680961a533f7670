//! Spending: reservations for a task's model calls, and reservations and reports of calls outside
//! of turns.

use std::time::Duration;

use construct_bus::{Bus, ConsumeOptions, Delivery, subject};
use construct_domain::{
    OrganizationId, TaskId,
    decide::{Decision, Effect, MODEL_TIMEOUT},
    message::Content,
    money::{max_cost, tokens_of_bytes, tokens_of_content},
};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::{Lifecycle, clock, telemetry::Chain};
use construct_store::{CallReport, CallReservation, Error, LoadedTask, StepReservation, Store};
use construct_wire::convert;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::{catalog::Catalog, command};

/// Tokens of a prompt besides instructions and tool declarations: our rules, and the names of
/// secrets.
const PROMPT_TOKENS: i64 = 8_000;
/// Assumed size of the tool catalog when it is not cached. It has some thirty thousand bytes, and a
/// project's notes.
const DEFAULT_CATALOG_BYTES: usize = 80_000;
/// Tokens of a title's prompt: four excerpts of two thousand characters, and the instructions.
const TITLE_TOKENS: i64 = 17_000;
/// Time after a step's deadline when its worker may still report usage.
const USAGE_GRACE_PERIOD: Duration = Duration::from_secs(300);
/// Interval at which expired reservations are released.
const CLEANUP_INTERVAL: Duration = Duration::from_secs(15);
/// Maximum number of reports in progress; the rest waits in JetStream.
const MAX_UNSETTLED_REPORTS: usize = 64;
/// Delay before a report that could not be recorded is retried.
const RECORD_RETRY_DELAY: Duration = Duration::from_secs(2);
/// Maximum length in characters of a purpose; longer ones are truncated.
const MAX_PURPOSE_CHARS: usize = 64;

/// The reservation for a decision: an upper estimate of the model call that it starts. `None` when
/// it starts none, no budget applies to the task, or the call is free.
pub(crate) fn reservation(
    loaded: &LoadedTask,
    decision: &Decision,
    catalog: &Catalog,
    now: Timestamp,
) -> Option<StepReservation> {
    let spending = loaded.cost_inputs.as_ref()?;
    let before = loaded.task.step.as_ref().map(|step| step.id);
    let (step, input) = decision.effects.iter().find_map(|effect| match effect {
        // The command of a checked step is sent again. Its money is reserved already.
        Effect::InvokeModel(step) if before != Some(step.id) => {
            let admitted = if decision.admitted.is_some() { spending.queued_tokens } else { 0 };
            let appended = decision.appended.iter();
            let appended = appended
                .map(|message| tokens_of_content(&Content { blocks: message.blocks.clone() }));
            let catalog_bytes = catalog
                .cached_bytes(&command::pool(loaded), &loaded.workspace)
                .unwrap_or(DEFAULT_CATALOG_BYTES);
            let instructions = usize::try_from(spending.instructions_bytes).unwrap_or(0);
            let prompt = PROMPT_TOKENS
                .saturating_add(tokens_of_bytes(catalog_bytes.saturating_add(instructions)));
            let transcript = spending.transcript_tokens.saturating_add(admitted);
            Some((step.id, appended.fold(transcript.saturating_add(prompt), i64::saturating_add)))
        }
        // A summary reads a part of the transcript, and its instructions are short.
        Effect::Compact(step) if before != Some(step.id) => {
            Some((step.id, spending.transcript_tokens.saturating_add(PROMPT_TOKENS)))
        }
        Effect::MakeTitle(step) => Some((*step, TITLE_TOKENS)),
        _ => None,
    })?;
    // A cost that is only known afterwards at least requires that something is left.
    let amount_pico_usd = max_cost(&spending.targets, spending.hedged, input)
        .max(i64::from(spending.has_reported_cost));
    let expires_at = now + MODEL_TIMEOUT + USAGE_GRACE_PERIOD;
    (amount_pico_usd > 0).then_some(StepReservation { step, amount_pico_usd, expires_at })
}

/// Handles reservations and reports of calls outside of turns, and releases expired reservations,
/// until the service drains.
pub(crate) fn spawn(store: &Store, bus: &Bus, lifecycle: &Lifecycle) {
    let (database, responder, stop) = (store.clone(), bus.clone(), lifecycle.draining());
    lifecycle.spawn("budget questions", async move {
        let answer = move |question| {
            let store = database.clone();
            Box::pin(async move { reserve(&store, question).await })
                as futures::future::BoxFuture<'static, _>
        };
        responder.answer(&subject::Budgets, stop, answer).await
    });
    let (database, responder, stop) = (store.clone(), bus.clone(), lifecycle.draining());
    lifecycle.spawn("model questions", async move {
        let answer = move |question| {
            let store = database.clone();
            Box::pin(async move { look_up_model(&store, question).await })
                as futures::future::BoxFuture<'static, _>
        };
        responder.answer(&subject::Models, stop, answer).await
    });
    lifecycle.spawn("spending", record_spending(store.clone(), bus.clone(), lifecycle.draining()));
    lifecycle.spawn_job("budgets", expire_reservations(store.clone(), lifecycle.draining()));
}

/// Reserves money. Returns no answer when that is not possible now, so that the requester retries.
async fn reserve(store: &Store, question: mesh::BudgetReserve) -> Option<mesh::BudgetReserved> {
    let Some(reservation) = parse_reservation(&question) else {
        let refused = "the reservation has no valid id, organization or time".to_owned();
        return Some(mesh::BudgetReserved { refusal: refused });
    };
    match store.call_reserve(&reservation, clock::now()).await {
        Ok(()) => Some(mesh::BudgetReserved::default()),
        Err(Error::Exhausted(exhausted)) => {
            Some(mesh::BudgetReserved { refusal: exhausted.to_string() })
        }
        Err(error @ Error::NotFound { .. }) => {
            Some(mesh::BudgetReserved { refusal: error.to_string() })
        }
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "a reservation request is not answered");
            None
        }
    }
}

fn parse_reservation(question: &mesh::BudgetReserve) -> Option<CallReservation> {
    let token = (question.token_id.clone(), question.token_budget_pico_usd);
    Some(CallReservation {
        id: Uuid::parse_str(&question.reservation_id).ok()?,
        organization: question.organization_id.parse().ok()?,
        task: parse_task(&question.task_id)?,
        token: (!token.0.is_empty()).then_some(token),
        amount_pico_usd: question.amount_pico_usd,
        expires_at: question.expires_at.and_then(convert::to_time)?,
    })
}

/// Parses an optional task id. `None` when it is invalid.
fn parse_task(id: &str) -> Option<Option<TaskId>> {
    if id.is_empty() { Some(None) } else { id.parse().ok().map(Some) }
}

/// Looks up a model with its provider.
async fn look_up_model(store: &Store, question: mesh::ModelLookup) -> Option<mesh::ResolvedModel> {
    let organization: OrganizationId = question.organization_id.parse().ok()?;
    match store.model_route(organization, &question.model).await {
        Ok(None) => Some(mesh::ResolvedModel::default()),
        Ok(Some(callable)) => Some(mesh::ResolvedModel {
            provider: Some(command::build_provider(&callable.provider)),
            model: Some(command::build_target(&callable.model)),
            fallbacks: command::build_routes(&callable.fallbacks),
            hedge_after: convert::hedge_after(callable.hedge_after_ms),
        }),
        Err(error) => {
            tracing::warn!(error = %Chain(&error), "a model lookup is not answered");
            None
        }
    }
}

/// Records reports. Each is acknowledged when it is recorded. One that cannot be recorded becomes a
/// dead letter.
async fn record_spending(
    store: Store,
    bus: Bus,
    stop: CancellationToken,
) -> Result<(), std::convert::Infallible> {
    let mut reports = bus.consume_spending(ConsumeOptions::new(MAX_UNSETTLED_REPORTS, stop));
    while let Some(Delivery { message, receipt, .. }) = reports.next().await {
        let Some(report) = parse_report(message) else {
            bus.dead_letter(receipt, "the spending report is invalid").await;
            continue;
        };
        match store.call_book(&report, clock::now()).await {
            Ok(_) => receipt.ack().await,
            Err(error) if error.is_retryable() => {
                tracing::warn!(error = %Chain(&error), "spending could not be recorded; retrying");
                receipt.nak(RECORD_RETRY_DELAY).await;
            }
            // The organization was erased, so nobody pays.
            Err(error @ Error::NotFound { .. }) => {
                tracing::warn!(error = %Chain(&error), call = %report.id, "spending of an erased organization is dropped");
                receipt.ack().await;
            }
            Err(error) => {
                bus.dead_letter(receipt, &format!("spending cannot be recorded: {}", Chain(&error)))
                    .await
            }
        }
    }
    Ok(())
}

fn parse_report(report: mesh::SpendingReport) -> Option<CallReport> {
    Some(CallReport {
        id: Uuid::parse_str(&report.call_id).ok()?,
        reservation: Uuid::parse_str(&report.reservation_id).ok(),
        organization: report.organization_id.parse().ok()?,
        task: parse_task(&report.task_id)?,
        key: report.api_key_id.parse().ok(),
        model: report.model_id.parse().ok()?,
        purpose: report.purpose.chars().take(MAX_PURPOSE_CHARS).collect(),
        usage: report.usage.map(convert::to_usage).unwrap_or_default(),
    })
}

/// Releases expired reservations, one pass after another. Every replica does it; what one has
/// released, the next does not find.
async fn expire_reservations(store: Store, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(CLEANUP_INTERVAL) => {}
        }
        match store.budgets_cleanup(clock::now()).await {
            Ok(tidied) if tidied.expired > 0 => {
                tracing::warn!(
                    reservations = tidied.expired,
                    "reservations of calls without a report have expired"
                );
            }
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(error = %Chain(&error), "expired reservations could not be released")
            }
        }
    }
}
