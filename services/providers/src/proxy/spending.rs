//! Reserves money for the calls of the proxy before, and reports their usage after.
//!
//! A query per call would cost more time than the rest of the proxy. So money is reserved in
//! *leases*, one at a time for each token and model, which serve several calls. The usage of a
//! lease's calls is reported together: when the lease is used up, when it was idle for a second, or
//! after 15 seconds. Money of a lease that is never reported, because the process died, counts as
//! spent when the reservation expires.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use construct_bus::{Bus, request, subject};
use construct_domain::{OrganizationId, money::Usage};
use construct_proto::mesh::v1 as mesh;
use construct_runtime::{ModelToken, clock};
use jiff::Timestamp;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::{
    refusal::{Kind, Refusal},
    routes::mesh_unavailable,
};
use crate::worker::usage_to_proto;

/// Timeout of a reservation.
const RESERVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a lease serves new calls.
const LEASE_TTL: Duration = Duration::from_secs(15);
/// A lease that was idle for this long is reported.
const LEASE_IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// How often leases are checked for reports.
const REPORT_INTERVAL: Duration = Duration::from_millis(250);
/// The calls that the first lease of a token covers; doubles while leases are used up quickly.
const INITIAL_LEASE_CALLS: i64 = 4;
/// The calls that a lease covers at most.
const MAX_LEASE_CALLS: i64 = 256;
/// The delay before a reservation with an unknown outcome is released.
const RELEASE_DELAY: Duration = Duration::from_secs(30);
/// How long publishing a report is tried before it waits for the next interval.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(2);

/// The payer and the model of calls.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Account {
    token: String,
    organization: String,
    task: String,
    key: String,
    model: String,
    purpose: &'static str,
}

/// Reserves money and reports usage. Clones share everything.
#[derive(Clone)]
pub(crate) struct Spending {
    bus: Bus,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    accounts: HashMap<Account, AccountState>,
    next: u64,
    /// Leases that take no new calls, by number.
    closing: HashMap<u64, (Account, Lease)>,
    unsent: Vec<mesh::SpendingReport>,
}

#[derive(Default)]
struct AccountState {
    lease: Option<Lease>,
    /// Calls that the next lease covers.
    next_lease_calls: i64,
    /// Serializes the opening of leases.
    open_lock: Arc<tokio::sync::Mutex<()>>,
}

struct Lease {
    number: u64,
    /// Empty when nothing had to be reserved.
    reservation: String,
    remaining: i64,
    opened_at: Instant,
    used_at: Instant,
    under_way: u32,
    calls: u32,
    used: Usage,
}

/// A call that needs a lease.
struct LeaseRequest {
    token: ModelToken,
    account: Account,
    amount: i64,
    expires: Duration,
}

/// Money for one call. Dropped without [`CallReservation::settle`], nothing was used.
pub(crate) struct CallReservation {
    spending: Spending,
    account: Account,
    lease: u64,
    amount: i64,
    used: Usage,
}

impl Spending {
    pub(crate) fn new(bus: Bus) -> Self {
        Self { bus, state: Arc::default() }
    }

    /// Reserves `amount` for a call.
    pub(crate) async fn reserve_call(
        &self,
        token: &ModelToken,
        model: &str,
        purpose: &'static str,
        amount: i64,
        expires: Duration,
    ) -> Result<CallReservation, Refusal> {
        let account = Account {
            token: token.id.clone(),
            organization: token.organization.clone(),
            task: token.task.clone(),
            key: token.key.clone(),
            model: model.to_owned(),
            purpose,
        };
        let reserved = |lease| CallReservation {
            spending: self.clone(),
            account: account.clone(),
            lease,
            amount,
            used: Usage::default(),
        };
        let (asking, is_free) = {
            let mut state = self.lock();
            if let Some(lease) = state.draw(&account, amount) {
                return Ok(reserved(lease));
            }
            // A free call needs no reservation.
            let is_free = amount == 0;
            (Arc::clone(&state.accounts.entry(account.clone()).or_default().open_lock), is_free)
        };
        // In a task of its own: a client that disconnects meanwhile must not leave an unknown
        // reservation behind.
        let request = LeaseRequest { token: token.clone(), account, amount, expires };
        let opening = tokio::spawn(self.clone().open_lease(asking, request, is_free));
        let failed = |_| Err(Refusal::new(Kind::Overloaded, "no money could be set aside"));
        opening.await.unwrap_or_else(failed)
    }

    /// Opens a lease with a call in it, unless a concurrent call has opened one.
    async fn open_lease(
        self,
        asking: Arc<tokio::sync::Mutex<()>>,
        request: LeaseRequest,
        is_free: bool,
    ) -> Result<CallReservation, Refusal> {
        let _turn = asking.lock().await;
        let LeaseRequest { account, amount, .. } = &request;
        let reserved = |lease| CallReservation {
            spending: self.clone(),
            account: account.clone(),
            lease,
            amount: *amount,
            used: Usage::default(),
        };
        let calls = {
            let mut state = self.lock();
            if let Some(lease) = state.draw(account, *amount) {
                return Ok(reserved(lease));
            }
            state.retire(account)
        };
        if is_free {
            return Ok(reserved(self.lock().insert_lease(account, String::new(), i64::MAX, 0)));
        }
        let whole = amount.saturating_mul(calls);
        let reservation = match self.request_reservation(&request, whole).await? {
            Ok(reservation) => (reservation, whole),
            // Near its end a budget may still cover this call.
            Err(refused) if calls == 1 => return Err(Refusal::new(Kind::Budget, refused)),
            Err(_) => match self.request_reservation(&request, *amount).await? {
                Ok(reservation) => (reservation, *amount),
                Err(refused) => return Err(Refusal::new(Kind::Budget, refused)),
            },
        };
        Ok(reserved(self.lock().insert_lease(account, reservation.0, reservation.1, *amount)))
    }

    /// Requests a reservation; the inner error is the reason of a refusal.
    async fn request_reservation(
        &self,
        request: &LeaseRequest,
        amount: i64,
    ) -> Result<Result<String, String>, Refusal> {
        let LeaseRequest { token, account, expires, .. } = request;
        let expires = clock::now()
            .checked_add(*expires + LEASE_TTL + PUBLISH_TIMEOUT)
            .unwrap_or(Timestamp::MAX);
        let question = mesh::BudgetReserve {
            reservation_id: Uuid::now_v7().to_string(),
            organization_id: token.organization.clone(),
            task_id: token.task.clone(),
            amount_pico_usd: amount,
            expires_at: Some(prost_types::Timestamp {
                seconds: expires.as_second(),
                nanos: expires.subsec_nanosecond(),
            }),
            token_id: token.id.clone(),
            token_budget_pico_usd: token.budget_pico_usd,
        };
        match self.bus.ask(&subject::Budgets, &question, RESERVE_TIMEOUT).await {
            Ok(answer) if answer.refusal.is_empty() => Ok(Ok(question.reservation_id)),
            Ok(answer) => Ok(Err(answer.refusal)),
            Err(error) => {
                if !matches!(error, request::Error::NoResponders) {
                    self.release_later(account.clone(), question.reservation_id);
                }
                Err(mesh_unavailable(&error))
            }
        }
    }

    /// Releases a reservation with an unknown outcome. Delayed, so that the release does not
    /// overtake the request.
    fn release_later(&self, account: Account, reservation: String) {
        let spending = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(RELEASE_DELAY).await;
            let unused = spending_report(account, reservation, Usage::default(), String::new());
            spending.lock().unsent.push(unused);
        });
    }

    /// Reports until `stop` is canceled, and then the rest.
    pub(crate) async fn run(self, stop: CancellationToken) {
        loop {
            let stopping = tokio::select! {
                () = stop.cancelled() => true,
                () = tokio::time::sleep(REPORT_INTERVAL) => false,
            };
            self.send_reports(stopping).await;
            if stopping {
                return;
            }
        }
    }

    async fn send_reports(&self, all: bool) {
        let reports = {
            let mut state = self.lock();
            state.collect_reports(all);
            std::mem::take(&mut state.unsent)
        };
        let sent = futures::future::join_all(reports.into_iter().map(async |report| {
            let Ok(organization) = report.organization_id.parse::<OrganizationId>() else {
                tracing::error!("a token names an organization that cannot be one");
                return None;
            };
            match self
                .bus
                .publish_within(&subject::Spending { organization }, &report, PUBLISH_TIMEOUT)
                .await
            {
                Ok(_) => None,
                Err(error) if error.is_retryable() => Some(report),
                Err(error) => {
                    tracing::error!(
                        error = &error as &dyn std::error::Error,
                        "what was spent cannot be reported"
                    );
                    None
                }
            }
        }));
        let unsent: Vec<_> = sent.await.into_iter().flatten().collect();
        if !unsent.is_empty() {
            tracing::warn!(reports = unsent.len(), "what was spent could not be reported yet");
            self.lock().unsent.extend(unsent);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No code panics between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes `amount` from the account's lease, if enough is left.
    fn draw(&mut self, account: &Account, amount: i64) -> Option<u64> {
        let lease = self.accounts.get_mut(account)?.lease.as_mut()?;
        if lease.remaining < amount || lease.opened_at.elapsed() > LEASE_TTL {
            return None;
        }
        lease.remaining -= amount;
        lease.under_way += 1;
        lease.calls += 1;
        lease.used_at = Instant::now();
        Some(lease.number)
    }

    /// Closes the account's lease to new calls. Returns the calls that the next lease should cover.
    fn retire(&mut self, account: &Account) -> i64 {
        let Some(open) = self.accounts.get_mut(account) else { return INITIAL_LEASE_CALLS };
        let Some(lease) = open.lease.take() else {
            open.next_lease_calls = INITIAL_LEASE_CALLS;
            return INITIAL_LEASE_CALLS;
        };
        let quick = lease.opened_at.elapsed() < LEASE_TTL / 3;
        open.next_lease_calls = if quick {
            (open.next_lease_calls * 2).clamp(INITIAL_LEASE_CALLS, MAX_LEASE_CALLS)
        } else {
            (open.next_lease_calls / 2).max(INITIAL_LEASE_CALLS)
        };
        let calls = open.next_lease_calls;
        self.closing.insert(lease.number, (account.clone(), lease));
        calls
    }

    /// Adds a lease with a call of `amount` in it.
    fn insert_lease(
        &mut self,
        account: &Account,
        reservation: String,
        whole: i64,
        amount: i64,
    ) -> u64 {
        let (number, now) = (self.next, Instant::now());
        self.next += 1;
        let lease = Lease {
            number,
            reservation,
            remaining: whole - amount,
            opened_at: now,
            used_at: now,
            under_way: 1,
            calls: 1,
            used: Usage::default(),
        };
        self.accounts.entry(account.clone()).or_default().lease = Some(lease);
        number
    }

    fn find_lease(&mut self, account: &Account, number: u64) -> Option<&mut Lease> {
        let open = self.accounts.get_mut(account).and_then(|open| open.lease.as_mut());
        match open.filter(|lease| lease.number == number) {
            Some(lease) => Some(lease),
            None => self.closing.get_mut(&number).map(|(_, lease)| lease),
        }
    }

    /// Turns ended leases into reports.
    fn collect_reports(&mut self, all: bool) {
        for (account, open) in &mut self.accounts {
            let over = |lease: &mut Lease| {
                all || (lease.under_way == 0 && lease.used_at.elapsed() > LEASE_IDLE_TIMEOUT)
                    || lease.opened_at.elapsed() > LEASE_TTL
            };
            if let Some(lease) = open.lease.take_if(over) {
                self.closing.insert(lease.number, (account.clone(), lease));
            }
        }
        // A task that opens a lease references the account.
        self.accounts
            .retain(|_, open| open.lease.is_some() || Arc::strong_count(&open.open_lock) > 1);
        let over: Vec<u64> = self
            .closing
            .iter()
            // A lease with a call in flight is not reported without it: its money counts as spent
            // when the reservation expires.
            .filter(|(_, (_, lease))| lease.under_way == 0)
            .map(|(number, _)| *number)
            .collect();
        for (account, lease) in over.iter().filter_map(|number| self.closing.remove(number)) {
            if lease.reservation.is_empty() && lease.used.is_zero() {
                continue;
            }
            let calls =
                if lease.calls > 1 { format!(" ({} calls)", lease.calls) } else { String::new() };
            self.unsent.push(spending_report(account, lease.reservation, lease.used, calls));
        }
    }
}

fn spending_report(
    account: Account,
    reservation_id: String,
    used: Usage,
    calls: String,
) -> mesh::SpendingReport {
    mesh::SpendingReport {
        call_id: Uuid::now_v7().to_string(),
        reservation_id,
        organization_id: account.organization,
        task_id: account.task,
        api_key_id: account.key,
        model_id: account.model,
        usage: Some(usage_to_proto(used)),
        purpose: format!("{}{calls}", account.purpose),
    }
}

impl CallReservation {
    /// Sets the usage of the call, with its cost. A later value replaces an earlier one.
    pub(crate) fn settle(&mut self, used: Usage) {
        self.used = used;
    }
}

impl Drop for CallReservation {
    fn drop(&mut self) {
        let mut state = self.spending.lock();
        let (amount, used) = (self.amount, self.used);
        let Some(lease) = state.find_lease(&self.account, self.lease) else { return };
        lease.used += used;
        lease.under_way = lease.under_way.saturating_sub(1);
        lease.used_at = Instant::now();
        // Unused money is available for the next call; usage beyond the estimate is not.
        lease.remaining =
            lease.remaining.saturating_add(amount.saturating_sub(used.cost_pico_usd)).max(0);
    }
}
