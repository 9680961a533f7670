//! Posts exactly once, despite crashes.
//!
//! The row of a post is written first, and the message carries the row's key as metadata. After a
//! crash between the two, the thread is searched for the key before anything is posted again.

use std::sync::{Arc, Mutex, PoisonError};

use construct_runtime::clock;
use construct_store::{
    Store,
    slack::{PostState, ThreadKey},
};
use tokio::time::Instant;

use crate::{
    error,
    web::{self, Token, Web, chat, chat::Content, conversations},
};

/// Why a message was not posted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Slack did not accept it.
    #[error(transparent)]
    Slack(web::Error),
    /// The row cannot be written.
    #[error("cannot store the post")]
    Store(#[from] construct_store::Error),
    /// The lease was lost.
    #[error("the lease was lost")]
    LeaseLost,
}

impl From<web::Error> for Error {
    fn from(error: web::Error) -> Self {
        match error {
            web::Error::Stopped { .. } => Self::LeaseLost,
            error => Self::Slack(error),
        }
    }
}

impl From<Error> for error::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Slack(error) => error.into(),
            Error::Store(error) => error.into(),
            Error::LeaseLost => Self::LeaseLost,
        }
    }
}

/// The right to post while a lease is held. Cheap to clone. The default has no limit, for work
/// without a lease.
#[derive(Debug, Clone, Default)]
pub(crate) struct LeaseGuard(Option<Arc<Mutex<Instant>>>);

impl LeaseGuard {
    /// A guard for a lease that lasts until `end`.
    pub(crate) fn until(end: Instant) -> Self {
        Self(Some(Arc::new(Mutex::new(end))))
    }

    /// Extends the lease until `end`.
    pub(crate) fn extend(&self, end: Instant) {
        if let Some(held) = &self.0 {
            *held.lock().unwrap_or_else(PoisonError::into_inner) = end;
        }
    }

    /// Whether the lease is held.
    pub(crate) fn is_held(&self) -> bool {
        let end = self.0.as_ref().map(|held| *held.lock().unwrap_or_else(PoisonError::into_inner));
        end.is_none_or(|end| end > Instant::now())
    }

    /// # Errors
    /// [`Error::Lost`].
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.is_held() { Ok(()) } else { Err(Error::LeaseLost) }
    }
}

/// Whether a message can never be edited again: it was deleted, or is too old by the rules of its
/// workspace.
pub(crate) fn is_uneditable(error: &web::Error) -> bool {
    matches!(error.code(), Some("message_not_found" | "cant_update_message" | "edit_window_closed"))
}

/// Posts into the threads of one workspace.
#[derive(Debug)]
pub(crate) struct Posts<'a> {
    pub(crate) web: &'a Web,
    pub(crate) store: &'a Store,
    pub(crate) token: &'a Token,
    pub(crate) lease: LeaseGuard,
}

impl Posts<'_> {
    /// Posts a message with this key, unless it is posted already. Returns its `ts`. It cannot have
    /// been posted before the message `oldest`.
    pub(crate) async fn post_once(
        &self,
        thread_key: &ThreadKey,
        key: &str,
        oldest: &str,
        content: &Content,
    ) -> Result<String, Error> {
        match self.store.slack_post_begin(thread_key, key, clock::now()).await? {
            PostState::Posted(ts) => return Ok(ts),
            PostState::NotPosted => {}
            PostState::Unknown => {
                let found = if thread_key.thread.is_empty() {
                    conversations::find_in_channel(self.web, self.token, &thread_key.channel, key)
                        .await?
                } else {
                    let target = (thread_key.channel.as_str(), thread_key.thread.as_str());
                    conversations::find_in_thread(self.web, self.token, target, oldest, key).await?
                };
                if let Some(ts) = found {
                    self.store.slack_post_done(thread_key, key, &ts).await?;
                    return Ok(ts);
                }
            }
        }
        let (target, may_continue) =
            ((thread_key.channel.as_str(), thread_key.thread.as_str()), || self.lease.is_held());
        let ts = chat::post(self.web, self.token, target, key, content, &may_continue).await?;
        self.store.slack_post_done(thread_key, key, &ts).await?;
        Ok(ts)
    }

    /// Like [`Posts::post_once`], and posts `plainer` if Slack rejects the format of `content`.
    pub(crate) async fn post_once_or_plainer(
        &self,
        thread_key: &ThreadKey,
        key: &str,
        oldest: &str,
        (content, plainer): (&Content, &Content),
    ) -> Result<String, Error> {
        match self.post_once(thread_key, key, oldest, content).await {
            Err(Error::Slack(error)) if error.is_invalid_content() => {
                self.store.slack_post_forget(thread_key, key).await?;
                self.post_once(thread_key, key, oldest, plainer).await
            }
            result => result,
        }
    }

    /// Replaces the content of a message.
    pub(crate) async fn update(
        &self,
        thread_key: &ThreadKey,
        ts: &str,
        content: &Content,
    ) -> Result<(), Error> {
        let may_continue = || self.lease.is_held();
        Ok(chat::update(self.web, self.token, (&thread_key.channel, ts), content, &may_continue)
            .await?)
    }

    /// Replaces the content of a post. Posts it again if it was deleted, or is too old to be
    /// edited.
    pub(crate) async fn replace(
        &self,
        thread_key: &ThreadKey,
        (key, ts): (&str, &str),
        oldest: &str,
        content: &Content,
    ) -> Result<String, Error> {
        match self.update(thread_key, ts, content).await {
            Ok(()) => Ok(ts.to_owned()),
            Err(Error::Slack(error)) if error.code() == Some("message_not_found") => {
                self.store.slack_post_forget(thread_key, key).await?;
                self.post_once(thread_key, key, oldest, content).await
            }
            // The old message stays and keeps its key, so the new one needs another.
            Err(Error::Slack(error)) if is_uneditable(&error) => {
                let key = format!("{key}.anew");
                match self.store.slack_post(thread_key, &key).await? {
                    PostState::Posted(ts) => {
                        self.update(thread_key, &ts, content).await.map(|()| ts)
                    }
                    PostState::NotPosted | PostState::Unknown => {
                        self.post_once(thread_key, &key, oldest, content).await
                    }
                }
            }
            Err(error) => Err(error),
        }
    }
}
