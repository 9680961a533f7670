//! Mentions of the app, and the threads they are in.

use std::time::Duration;

use construct_domain::OrganizationId;
use jiff::Timestamp;
use serde_json::Value;
use uuid::Uuid;

use super::ThreadKey;
use crate::{Error, Store, text, time};

/// The key of a mention.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct MentionKey {
    /// The workspace.
    pub team: String,
    /// The channel.
    pub channel: String,
    /// The message's timestamp, which identifies it in its channel.
    pub ts: String,
    /// 0; incremented by every retry that a user requests.
    pub attempt: i32,
}

/// The state of a mention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MentionState {
    /// It is stored.
    Received,
    /// The gateway has accepted its message.
    Asked,
    /// The answer is posted.
    Answered,
    /// The user has no permission.
    Refused,
    /// It failed, and the failure was posted if possible.
    Failed,
}

impl MentionState {
    const ALL: [Self; 5] =
        [Self::Received, Self::Asked, Self::Answered, Self::Refused, Self::Failed];

    /// The stored form.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Received => "received",
            Self::Asked => "asked",
            Self::Answered => "answered",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// A mention to store.
#[derive(Debug, Clone, PartialEq)]
pub struct NewMention {
    /// Its key.
    pub key: MentionKey,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The first message of its thread; its own if it starts one.
    pub thread: String,
    /// The Slack user who asks.
    pub user: String,
    /// The event that Slack sent.
    pub event: Value,
}

/// A mention with its lease.
#[derive(Debug, Clone, PartialEq)]
pub struct Mention {
    /// Its key.
    pub key: MentionKey,
    /// The organization it belongs to.
    pub organization: OrganizationId,
    /// The first message of its thread.
    pub thread: String,
    /// The Slack user who asks.
    pub user: String,
    /// The event that Slack sent; null once it was deleted.
    pub event: Value,
    /// Its state.
    pub state: MentionState,
    /// The request to the gateway; stored before it is sent.
    pub request: Option<Vec<u8>>,
    /// The thread's task.
    pub task: Option<String>,
    /// The message of the task.
    pub message: Option<String>,
    /// The file of a long answer.
    pub file: Option<String>,
    /// Consecutive failures.
    pub failures: i32,
    /// Why it failed.
    pub error: Option<String>,
    /// When it is due; none when it is over.
    pub next_wake: Option<Timestamp>,
    /// The number of its current lease.
    pub lease: i64,
}

impl Mention {
    /// The thread it is in.
    pub fn thread_key(&self) -> ThreadKey {
        ThreadKey {
            team: self.key.team.clone(),
            channel: self.key.channel.clone(),
            thread: self.thread.clone(),
        }
    }
}

/// A thread and its task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Thread {
    /// The agent of its task.
    pub agent: String,
    /// The number of its earlier, deleted tasks.
    pub generation: i32,
    /// Its task.
    pub task: Option<String>,
}

struct Row {
    team: String,
    channel: String,
    ts: String,
    attempt: i32,
    organization_id: Uuid,
    thread: String,
    user_id: String,
    event: Value,
    state: String,
    request: Option<Vec<u8>>,
    task: Option<String>,
    message: Option<String>,
    file: Option<String>,
    failures: i32,
    error: Option<String>,
    next_look: Option<jiff_sqlx::Timestamp>,
    lease: i64,
}

impl TryFrom<Row> for Mention {
    type Error = Error;

    fn try_from(row: Row) -> Result<Self, Error> {
        let state = MentionState::ALL.into_iter().find(|state| state.as_str() == row.state);
        Ok(Self {
            key: MentionKey {
                team: row.team,
                channel: row.channel,
                ts: row.ts,
                attempt: row.attempt,
            },
            organization: OrganizationId::from_uuid(row.organization_id),
            thread: row.thread,
            user: row.user_id,
            event: row.event,
            state: state.ok_or_else(|| {
                Error::internal(format!("a mention is in the state {:?}", row.state))
            })?,
            request: row.request,
            task: row.task,
            message: row.message,
            file: row.file,
            failures: row.failures,
            error: row.error,
            next_wake: time::from_sql_option(row.next_look),
            lease: row.lease,
        })
    }
}

macro_rules! select {
    ($tail:literal, $($argument:expr),* $(,)?) => {
        sqlx::query_as!(
            Row,
            "SELECT team, channel, ts, attempt, organization_id, thread, user_id, event, state, request, task, message, file,
                    failures, error, next_look, lease
             FROM slack_mentions " + $tail,
            $($argument),*
        )
    };
}

impl Store {
    /// Stores a mention that is due now. Returns whether it was new.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mention_put(&self, new: &NewMention, now: Timestamp) -> Result<bool, Error> {
        let done = sqlx::query!(
            "INSERT INTO slack_mentions (team, channel, ts, attempt, organization_id, thread, user_id, event, state, next_look,
                 leased_until, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, 'received', $9, $9, $9, $9) ON CONFLICT DO NOTHING",
            new.key.team,
            new.key.channel,
            new.key.ts,
            new.key.attempt,
            new.organization.uuid(),
            new.thread,
            new.user,
            text::json(&new.event)?,
            time::sql(now) as _,
        )
        .execute(&self.pool)
        .await
        .map_err(Error::from_write)?;
        Ok(done.rows_affected() == 1)
    }

    /// Claims due mentions, for the duration of the lease.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mentions_claim(
        &self,
        limit: i64,
        lease: Duration,
        now: Timestamp,
    ) -> Result<Vec<Mention>, Error> {
        let rows = sqlx::query_as!(
            Row,
            "UPDATE slack_mentions m SET lease = m.lease + 1, leased_until = $2
             FROM (SELECT team, channel, ts, attempt FROM slack_mentions
                   WHERE next_look <= $1 AND leased_until <= $1 ORDER BY next_look LIMIT $3 FOR UPDATE SKIP LOCKED) due
             WHERE m.team = due.team AND m.channel = due.channel AND m.ts = due.ts AND m.attempt = due.attempt
             RETURNING m.team, m.channel, m.ts, m.attempt, m.organization_id, m.thread, m.user_id, m.event, m.state, m.request,
                 m.task, m.message, m.file, m.failures, m.error, m.next_look, m.lease",
            time::sql(now) as _,
            time::sql(now + lease) as _,
            limit,
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter().map(Mention::try_from).collect()
    }

    /// Extends the lease of a mention. False when another process has taken it.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mention_extend_lease(
        &self,
        key: &MentionKey,
        lease: i64,
        until: Timestamp,
    ) -> Result<bool, Error> {
        let done = sqlx::query!(
            "UPDATE slack_mentions SET leased_until = $6
             WHERE team = $1 AND channel = $2 AND ts = $3 AND attempt = $4 AND lease = $5",
            key.team,
            key.channel,
            key.ts,
            key.attempt,
            lease,
            time::sql(until) as _,
        )
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Stores the progress of a mention, and with `release` releases its lease.
    ///
    /// # Errors
    /// [`Error::Conflict`] when another process has the lease. Nothing was written.
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mention_save(
        &self,
        mention: &Mention,
        release: bool,
        now: Timestamp,
    ) -> Result<(), Error> {
        let key = &mention.key;
        let done = sqlx::query!(
            "UPDATE slack_mentions SET state = $6, request = $7, task = $8, message = $9, file = $10, failures = $11, error = $12,
                 next_look = $13, leased_until = CASE WHEN $14 THEN $15 ELSE leased_until END, updated_at = $15
             WHERE team = $1 AND channel = $2 AND ts = $3 AND attempt = $4 AND lease = $5",
            key.team,
            key.channel,
            key.ts,
            key.attempt,
            mention.lease,
            mention.state.as_str(),
            mention.request,
            mention.task,
            mention.message,
            mention.file,
            mention.failures,
            text::clean_option(mention.error.as_deref()),
            time::sql_option(mention.next_wake) as _,
            release,
            time::sql(now) as _,
        )
        .execute(&self.pool)
        .await?;
        if done.rows_affected() == 1 { Ok(()) } else { Err(Error::Conflict) }
    }

    /// The current row of a mention.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mention(&self, key: &MentionKey) -> Result<Mention, Error> {
        select!(
            "WHERE team = $1 AND channel = $2 AND ts = $3 AND attempt = $4",
            key.team,
            key.channel,
            key.ts,
            key.attempt,
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: "mention" })?
        .try_into()
    }

    /// The last message of a thread before this one that was sent to the gateway.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_message_before(
        &self,
        place: &ThreadKey,
        ts: &str,
    ) -> Result<Option<String>, Error> {
        let before = sqlx::query_scalar!(
            "SELECT max(ts) FROM slack_mentions
             WHERE team = $1 AND channel = $2 AND thread = $3 AND ts < $4 AND message IS NOT NULL",
            place.team,
            place.channel,
            place.thread,
            ts,
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(before)
    }

    /// The latest mentions by a user, newest first.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mentions_by_user(
        &self,
        team: &str,
        user: &str,
        limit: i64,
    ) -> Result<Vec<Mention>, Error> {
        let rows = select!(
            "WHERE team = $1 AND user_id = $2 ORDER BY created_at DESC LIMIT $3",
            team,
            user,
            limit
        )
        .fetch_all(&self.pool)
        .await?;
        rows.into_iter().map(Mention::try_from).collect()
    }

    /// Makes the unfinished mentions of a task due now, after a decision about it.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mentions_wake(&self, task: &str, now: Timestamp) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE slack_mentions SET next_look = $2 WHERE task = $1 AND next_look > $2",
            task,
            time::sql(now) as _,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// The mention that shows the approvals of a task: of those that are not over, the one that the
    /// gateway accepted first. It may be answered already and stay open for the approvals of
    /// subtasks.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mention_for_approvals(
        &self,
        task: &str,
    ) -> Result<Option<MentionKey>, Error> {
        // Ids of messages increase with time.
        let key = sqlx::query_as!(
            MentionKey,
            "SELECT team, channel, ts, attempt FROM slack_mentions
             WHERE task = $1 AND next_look IS NOT NULL AND message IS NOT NULL ORDER BY message COLLATE \"C\" LIMIT 1",
            task,
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(key)
    }

    /// Makes a mention due now that is answered and stays open only for the approvals of subtasks.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mention_wake(
        &self,
        key: &MentionKey,
        now: Timestamp,
    ) -> Result<bool, Error> {
        let done = sqlx::query!(
            "UPDATE slack_mentions SET next_look = $5
             WHERE team = $1 AND channel = $2 AND ts = $3 AND attempt = $4 AND next_look > $5 AND state = 'answered'",
            key.team,
            key.channel,
            key.ts,
            key.attempt,
            time::sql(now) as _,
        )
        .execute(&self.pool)
        .await?;
        Ok(done.rows_affected() == 1)
    }

    /// Whether a later mention of the task waits for its answer, or for the approvals of its
    /// subtasks.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mention_has_successor(
        &self,
        task: &str,
        message: &str,
    ) -> Result<bool, Error> {
        let followed = sqlx::query_scalar!(
            "SELECT EXISTS (SELECT FROM slack_mentions
                 WHERE task = $1 AND next_look IS NOT NULL AND state IN ('asked', 'answered') AND message COLLATE \"C\" > $2) AS \"followed!\"",
            task,
            message,
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(followed)
    }

    /// The mentions of a thread's task that were stored before a time, as pairs of user and
    /// message: at most `limit`, those that the gateway accepted last first.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_askers(
        &self,
        place: &ThreadKey,
        task: &str,
        before: Timestamp,
        limit: i64,
    ) -> Result<Vec<(String, String)>, Error> {
        let rows = sqlx::query!(
            "SELECT user_id, message AS \"message!\" FROM slack_mentions
             WHERE team = $1 AND channel = $2 AND thread = $3 AND task = $4 AND message IS NOT NULL AND created_at < $5
             ORDER BY message COLLATE \"C\" DESC LIMIT $6",
            place.team,
            place.channel,
            place.thread,
            task,
            time::sql(before) as _,
            limit,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(rows.into_iter().map(|row| (row.user_id, row.message)).collect())
    }

    /// Whether a mention is due and not leased.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_mentions_due(&self, now: Timestamp) -> Result<bool, Error> {
        let due = sqlx::query_scalar!(
            "SELECT EXISTS (SELECT FROM slack_mentions WHERE next_look <= $1 AND leased_until <= $1) AS \"due!\"",
            time::sql(now) as _,
        )
        .fetch_one(&self.pool)
        .await?;
        Ok(due)
    }

    /// Deletes the contents and errors of mentions that were over before this time, and older posts
    /// whose threads have no unfinished mention; at most `limit` of each. Returns their number. The
    /// keys of the mentions stay, for deduplication.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_cleanup(&self, before: Timestamp, limit: i64) -> Result<u64, Error> {
        let mentions = sqlx::query!(
            "UPDATE slack_mentions SET event = 'null'::jsonb, error = NULL WHERE ctid IN
                 (SELECT ctid FROM slack_mentions
                  WHERE next_look IS NULL AND event <> 'null'::jsonb AND updated_at < $1 LIMIT $2 FOR UPDATE SKIP LOCKED)",
            time::sql(before) as _,
            limit,
        )
        .execute(&self.pool)
        .await?;
        let posts = sqlx::query!(
            "DELETE FROM slack_posts WHERE ctid IN
                 (SELECT p.ctid FROM slack_posts p
                  WHERE p.created_at < $1 AND NOT EXISTS
                      (SELECT FROM slack_mentions m WHERE m.team = p.team AND m.channel = p.channel AND m.thread = p.thread
                           AND (m.next_look IS NOT NULL OR m.updated_at >= $1))
                  LIMIT $2 FOR UPDATE OF p SKIP LOCKED)",
            time::sql(before) as _,
            limit,
        )
        .execute(&self.pool)
        .await?;
        Ok(mentions.rows_affected() + posts.rows_affected())
    }

    /// Gets or creates a thread. An existing one without a task gets this agent.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_thread_open(
        &self,
        place: &ThreadKey,
        organization: OrganizationId,
        agent: &str,
    ) -> Result<Thread, Error> {
        sqlx::query!(
            "INSERT INTO slack_threads AS t (team, channel, thread, organization_id, agent) VALUES ($1, $2, $3, $4, $5)
             ON CONFLICT (team, channel, thread) DO UPDATE SET agent = $5, generation = t.generation + 1
             WHERE t.task IS NULL AND t.agent <> $5",
            place.team,
            place.channel,
            place.thread,
            organization.uuid(),
            text::clean(agent).into_owned(),
        )
        .execute(&self.pool)
        .await
        .map_err(Error::from_write)?;
        self.slack_thread(place).await
    }

    /// A thread.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_thread(&self, place: &ThreadKey) -> Result<Thread, Error> {
        sqlx::query_as!(
            Thread,
            "SELECT agent, generation, task FROM slack_threads WHERE team = $1 AND channel = $2 AND thread = $3",
            place.team,
            place.channel,
            place.thread,
        )
        .fetch_optional(&self.pool)
        .await?
        .ok_or(Error::NotFound { what: "thread" })
    }

    /// Sets the task of a thread.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_thread_set_task(
        &self,
        place: &ThreadKey,
        generation: i32,
        task: &str,
    ) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE slack_threads SET task = $5 WHERE team = $1 AND channel = $2 AND thread = $3 AND generation = $4",
            place.team,
            place.channel,
            place.thread,
            generation,
            task,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Clears the deleted task of a thread. The next one uses this agent.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_thread_clear_task(
        &self,
        place: &ThreadKey,
        task: &str,
        agent: &str,
    ) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE slack_threads SET task = NULL, generation = generation + 1, agent = $5
             WHERE team = $1 AND channel = $2 AND thread = $3 AND task = $4",
            place.team,
            place.channel,
            place.thread,
            task,
            text::clean(agent).into_owned(),
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}
