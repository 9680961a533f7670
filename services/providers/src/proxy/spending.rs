//! Money of the proxy's calls: set aside before, reported after.
//!
//! A question per call would cost more time than the rest of the proxy. So money is set aside in
//! *leases*, one at a time for each token and model, which are good for several calls; what the
//! calls of a lease have used is reported together, when the lease is used up, when nobody has used
//! it for a second, or after 15 seconds. Money of a lease that is never reported, because the
//! process died, counts as spent when the reservation expires.

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
    models::away,
    refusal::{Kind, Refusal},
};
use crate::worker::usage_to_proto;

/// How long the answer to a reservation may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a lease is used for new calls.
const LEASE: Duration = Duration::from_secs(15);
/// A lease that is idle for so long is reported.
const IDLE: Duration = Duration::from_secs(1);
/// How often what is to be reported is looked for.
const TICK: Duration = Duration::from_millis(250);
/// How many calls the first lease of a token is meant for; doubles while leases are used up
/// quickly.
const FIRST_CALLS: i64 = 4;
/// How many at most.
const MAX_CALLS: i64 = 256;
/// When money is given back of which nobody said whether it was set aside.
const GIVE_BACK: Duration = Duration::from_secs(30);
/// How long publishing a report is tried for before it waits for the next tick.
const PUBLISH: Duration = Duration::from_secs(2);

/// Whose money, for which model.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Account {
    token: String,
    organization: String,
    task: String,
    key: String,
    model: String,
    purpose: &'static str,
}

/// Sets money aside and reports what was used. Clones are the same.
#[derive(Clone)]
pub(crate) struct Spending {
    bus: Bus,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    accounts: HashMap<Account, Open>,
    next: u64,
    /// Leases that take no new calls, by number.
    closing: HashMap<u64, (Account, Lease)>,
    unsent: Vec<mesh::SpendingReport>,
}

#[derive(Default)]
struct Open {
    lease: Option<Lease>,
    /// Calls the next lease is meant for.
    calls: i64,
    /// One asks at a time.
    asking: Arc<tokio::sync::Mutex<()>>,
}

struct Lease {
    number: u64,
    /// Empty: nothing had to be set aside.
    reservation: String,
    left: i64,
    began: Instant,
    used_at: Instant,
    under_way: u32,
    calls: u32,
    used: Usage,
}

/// A call that money is wanted for.
struct Wanted {
    token: ModelToken,
    account: Account,
    amount: i64,
    expires: Duration,
}

/// Money for one call. Dropped without [`Hold::settle`], nothing was used.
pub(crate) struct Hold {
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

    /// Sets `amount` aside for a call.
    pub(crate) async fn hold(
        &self,
        token: &ModelToken,
        model: &str,
        purpose: &'static str,
        amount: i64,
        expires: Duration,
    ) -> Result<Hold, Refusal> {
        let account = Account {
            token: token.id.clone(),
            organization: token.organization.clone(),
            task: token.task.clone(),
            key: token.key.clone(),
            model: model.to_owned(),
            purpose,
        };
        let held = |lease| Hold {
            spending: self.clone(),
            account: account.clone(),
            lease,
            amount,
            used: Usage::default(),
        };
        let (asking, free) = {
            let mut state = self.lock();
            if let Some(lease) = state.take(&account, amount) {
                return Ok(held(lease));
            }
            // What costs nothing needs no leave.
            let free = amount == 0;
            (Arc::clone(&state.accounts.entry(account.clone()).or_default().asking), free)
        };
        // In a task of its own: a client that goes away in the middle must not leave money set
        // aside that nobody knows of.
        let wanted = Wanted { token: token.clone(), account, amount, expires };
        let opening = tokio::spawn(self.clone().open_lease(asking, wanted, free));
        let failed = |_| Err(Refusal::new(Kind::Overloaded, "no money could be set aside"));
        opening.await.unwrap_or_else(failed)
    }

    /// Opens a lease with a call in it, unless another one has meanwhile.
    async fn open_lease(
        self,
        asking: Arc<tokio::sync::Mutex<()>>,
        wanted: Wanted,
        free: bool,
    ) -> Result<Hold, Refusal> {
        let _turn = asking.lock().await;
        let Wanted { account, amount, .. } = &wanted;
        let held = |lease| Hold {
            spending: self.clone(),
            account: account.clone(),
            lease,
            amount: *amount,
            used: Usage::default(),
        };
        let calls = {
            let mut state = self.lock();
            if let Some(lease) = state.take(account, *amount) {
                return Ok(held(lease));
            }
            state.retire(account)
        };
        if free {
            return Ok(held(self.lock().open(account, String::new(), i64::MAX, 0)));
        }
        let whole = amount.saturating_mul(calls);
        let reservation = match self.reserve(&wanted, whole).await? {
            Ok(reservation) => (reservation, whole),
            // Near its end a budget may still be enough for this one.
            Err(refused) if calls == 1 => return Err(Refusal::new(Kind::Budget, refused)),
            Err(_) => match self.reserve(&wanted, *amount).await? {
                Ok(reservation) => (reservation, *amount),
                Err(refused) => return Err(Refusal::new(Kind::Budget, refused)),
            },
        };
        Ok(held(self.lock().open(account, reservation.0, reservation.1, *amount)))
    }

    /// Asks for a reservation; the inner error is why it is refused.
    async fn reserve(
        &self,
        wanted: &Wanted,
        amount: i64,
    ) -> Result<Result<String, String>, Refusal> {
        let Wanted { token, account, expires, .. } = wanted;
        let expires =
            clock::now().checked_add(*expires + LEASE + PUBLISH).unwrap_or(Timestamp::MAX);
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
        match self.bus.ask(&subject::Budgets, &question, PATIENCE).await {
            Ok(answer) if answer.refused.is_empty() => Ok(Ok(question.reservation_id)),
            Ok(answer) => Ok(Err(answer.refused)),
            Err(error) => {
                if !matches!(error, request::Error::NoResponders) {
                    self.give_back(account.clone(), question.reservation_id);
                }
                Err(away(&error))
            }
        }
    }

    /// Gives back what may have been set aside although nobody said so. Later, so that this is not
    /// heard before the question.
    fn give_back(&self, account: Account, reservation: String) {
        let spending = self.clone();
        tokio::spawn(async move {
            tokio::time::sleep(GIVE_BACK).await;
            let unused = report(account, reservation, Usage::default(), String::new());
            spending.lock().unsent.push(unused);
        });
    }

    /// Reports until told to stop, and then the rest.
    pub(crate) async fn report(self, stop: CancellationToken) {
        loop {
            let stopping = tokio::select! {
                () = stop.cancelled() => true,
                () = tokio::time::sleep(TICK) => false,
            };
            self.send(stopping).await;
            if stopping {
                return;
            }
        }
    }

    async fn send(&self, all: bool) {
        let reports = {
            let mut state = self.lock();
            state.collect(all);
            std::mem::take(&mut state.unsent)
        };
        let sent = futures::future::join_all(reports.into_iter().map(async |report| {
            let Ok(organization) = report.organization_id.parse::<OrganizationId>() else {
                tracing::error!("a token names an organization that cannot be one");
                return None;
            };
            match self
                .bus
                .publish_within(&subject::Spending { organization }, &report, PUBLISH)
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
        // Nothing panics between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes `amount` from the account's lease, when it has so much.
    fn take(&mut self, account: &Account, amount: i64) -> Option<u64> {
        let lease = self.accounts.get_mut(account)?.lease.as_mut()?;
        if lease.left < amount || lease.began.elapsed() > LEASE {
            return None;
        }
        lease.left -= amount;
        lease.under_way += 1;
        lease.calls += 1;
        lease.used_at = Instant::now();
        Some(lease.number)
    }

    /// Lets the account's lease take no new calls; gives how many the next one is to be for.
    fn retire(&mut self, account: &Account) -> i64 {
        let Some(open) = self.accounts.get_mut(account) else { return FIRST_CALLS };
        let Some(lease) = open.lease.take() else {
            open.calls = FIRST_CALLS;
            return FIRST_CALLS;
        };
        let quick = lease.began.elapsed() < LEASE / 3;
        open.calls = if quick {
            (open.calls * 2).clamp(FIRST_CALLS, MAX_CALLS)
        } else {
            (open.calls / 2).max(FIRST_CALLS)
        };
        let calls = open.calls;
        self.closing.insert(lease.number, (account.clone(), lease));
        calls
    }

    /// Opens a lease with a call of `amount` in it.
    fn open(&mut self, account: &Account, reservation: String, whole: i64, amount: i64) -> u64 {
        let (number, now) = (self.next, Instant::now());
        self.next += 1;
        let lease = Lease {
            number,
            reservation,
            left: whole - amount,
            began: now,
            used_at: now,
            under_way: 1,
            calls: 1,
            used: Usage::default(),
        };
        self.accounts.entry(account.clone()).or_default().lease = Some(lease);
        number
    }

    fn lease(&mut self, account: &Account, number: u64) -> Option<&mut Lease> {
        let open = self.accounts.get_mut(account).and_then(|open| open.lease.as_mut());
        match open.filter(|lease| lease.number == number) {
            Some(lease) => Some(lease),
            None => self.closing.get_mut(&number).map(|(_, lease)| lease),
        }
    }

    /// Turns what is over into reports.
    fn collect(&mut self, all: bool) {
        for (account, open) in &mut self.accounts {
            let over = |lease: &mut Lease| {
                all || (lease.under_way == 0 && lease.used_at.elapsed() > IDLE)
                    || lease.began.elapsed() > LEASE
            };
            if let Some(lease) = open.lease.take_if(over) {
                self.closing.insert(lease.number, (account.clone(), lease));
            }
        }
        // One that asks holds on to the account.
        self.accounts.retain(|_, open| open.lease.is_some() || Arc::strong_count(&open.asking) > 1);
        let over: Vec<u64> = self
            .closing
            .iter()
            // One that a call is still under way in is not reported without it: its money counts as
            // spent when its time is over.
            .filter(|(_, (_, lease))| lease.under_way == 0)
            .map(|(number, _)| *number)
            .collect();
        for (account, lease) in over.iter().filter_map(|number| self.closing.remove(number)) {
            if lease.reservation.is_empty() && lease.used.is_zero() {
                continue;
            }
            let calls =
                if lease.calls > 1 { format!(" ({} calls)", lease.calls) } else { String::new() };
            self.unsent.push(report(account, lease.reservation, lease.used, calls));
        }
    }
}

fn report(
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

impl Hold {
    /// What the call has used, with its cost. Said again, it replaces what was said before.
    pub(crate) fn settle(&mut self, used: Usage) {
        self.used = used;
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut state = self.spending.lock();
        let (amount, used) = (self.amount, self.used);
        let Some(lease) = state.lease(&self.account, self.lease) else { return };
        lease.used += used;
        lease.under_way = lease.under_way.saturating_sub(1);
        lease.used_at = Instant::now();
        // What was not needed is there for the next call; what was beyond the estimate is not.
        lease.left = lease.left.saturating_add(amount.saturating_sub(used.cost_pico_usd)).max(0);
    }
}
