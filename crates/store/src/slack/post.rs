//! Posts to Slack. The row is stored before the post is sent.

use jiff::Timestamp;

use crate::{Error, Store, time};

/// A thread in Slack.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ThreadKey {
    /// The workspace.
    pub team: String,
    /// The channel.
    pub channel: String,
    /// The first message of the thread.
    pub thread: String,
}

/// The state of a post.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PostState {
    /// Never attempted.
    NotPosted,
    /// Attempted, with an unknown outcome.
    Unknown,
    /// Posted as this message.
    Posted(String),
}

impl Store {
    /// Records an attempt to post. Returns the previous state.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_post_begin(
        &self,
        place: &ThreadKey,
        key: &str,
        now: Timestamp,
    ) -> Result<PostState, Error> {
        let done = sqlx::query!(
            "INSERT INTO slack_posts (team, channel, thread, key, created_at) VALUES ($1, $2, $3, $4, $5)
             ON CONFLICT DO NOTHING",
            place.team,
            place.channel,
            place.thread,
            key,
            time::sql(now),
        )
        .execute(&self.pool)
        .await?;
        if done.rows_affected() == 1 {
            return Ok(PostState::NotPosted);
        }
        self.slack_post(place, key).await
    }

    /// The state of a post.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_post(&self, place: &ThreadKey, key: &str) -> Result<PostState, Error> {
        let ts = sqlx::query_scalar!(
            "SELECT ts FROM slack_posts WHERE team = $1 AND channel = $2 AND thread = $3 AND key = $4",
            place.team,
            place.channel,
            place.thread,
            key,
        )
        .fetch_optional(&self.pool)
        .await?;
        Ok(match ts {
            None => PostState::NotPosted,
            Some(None) => PostState::Unknown,
            Some(Some(ts)) => PostState::Posted(ts),
        })
    }

    /// The posts of a thread whose key begins with `begin`, and for which no post exists whose key
    /// is theirs plus `closed`; at most 200, as keys without the prefix.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_posts_open(
        &self,
        place: &ThreadKey,
        begin: &str,
        closed: &str,
    ) -> Result<Vec<String>, Error> {
        let keys = sqlx::query_scalar!(
            "SELECT p.key FROM slack_posts p
             WHERE p.team = $1 AND p.channel = $2 AND p.thread = $3 AND starts_with(p.key, $4) AND NOT p.key LIKE '%' || $5
               AND p.ts IS NOT NULL AND NOT EXISTS
                   (SELECT FROM slack_posts c WHERE c.team = $1 AND c.channel = $2 AND c.thread = $3 AND c.key = p.key || $5
                        AND c.ts IS NOT NULL)
             ORDER BY p.key LIMIT 200",
            place.team,
            place.channel,
            place.thread,
            begin,
            closed,
        )
        .fetch_all(&self.pool)
        .await?;
        Ok(keys.into_iter().filter_map(|key| key.strip_prefix(begin).map(str::to_owned)).collect())
    }

    /// Records that it was posted.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_post_done(
        &self,
        place: &ThreadKey,
        key: &str,
        ts: &str,
    ) -> Result<(), Error> {
        sqlx::query!(
            "UPDATE slack_posts SET ts = $5 WHERE team = $1 AND channel = $2 AND thread = $3 AND key = $4",
            place.team,
            place.channel,
            place.thread,
            key,
            ts,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }

    /// Deletes a post that Slack refused, or that was deleted in Slack, so that it can be posted
    /// again.
    ///
    /// # Errors
    /// [`Error::Unavailable`].
    #[tracing::instrument(level = "debug", skip_all, err(level = "debug"))]
    pub async fn slack_post_forget(&self, place: &ThreadKey, key: &str) -> Result<(), Error> {
        sqlx::query!(
            "DELETE FROM slack_posts WHERE team = $1 AND channel = $2 AND thread = $3 AND key = $4",
            place.team,
            place.channel,
            place.thread,
            key,
        )
        .execute(&self.pool)
        .await?;
        Ok(())
    }
}
