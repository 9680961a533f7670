//! Posting once, whoever dies whenever.
//!
//! The row of a post comes before it, and the message carries the row's key as metadata. After a
//! death between the two nobody knows whether Slack has the message; so the thread is searched for
//! the key before anything is posted again.

use std::sync::{Arc, Mutex, PoisonError};

use construct_runtime::clock;
use construct_store::{
    Store,
    slack::{Place, Posted},
};
use tokio::time::Instant;

use crate::web::{self, Token, Web, chat, chat::Content, conversations};

/// Why something was not posted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// Slack hasn't taken it.
    #[error(transparent)]
    Slack(web::Error),
    /// It cannot be written down.
    #[error("what is posted cannot be written down")]
    Store(#[from] construct_store::Error),
    /// Somebody else works on this by now.
    #[error("somebody else works on this by now")]
    Lost,
}

impl From<web::Error> for Error {
    fn from(error: web::Error) -> Self {
        match error {
            web::Error::Stopped { .. } => Self::Lost,
            error => Self::Slack(error),
        }
    }
}

/// The right to post: gone as soon as somebody else may have it. Cheap to clone; without a limit
/// for what is done on no lease.
#[derive(Debug, Clone, Default)]
pub(crate) struct Right(Option<Arc<Mutex<Instant>>>);

impl Right {
    /// The right of who holds a lease until then.
    pub(crate) fn until(end: Instant) -> Self {
        Self(Some(Arc::new(Mutex::new(end))))
    }

    /// The lease lasts until then.
    pub(crate) fn extend(&self, end: Instant) {
        if let Some(held) = &self.0 {
            *held.lock().unwrap_or_else(PoisonError::into_inner) = end;
        }
    }

    /// Whether it is there.
    pub(crate) fn is_held(&self) -> bool {
        let end = self.0.as_ref().map(|held| *held.lock().unwrap_or_else(PoisonError::into_inner));
        end.is_none_or(|end| end > Instant::now())
    }

    /// # Errors
    /// [`Error::Lost`].
    pub(crate) fn check(&self) -> Result<(), Error> {
        if self.is_held() { Ok(()) } else { Err(Error::Lost) }
    }
}

/// Whether a message can never be edited again: it is gone, or too old by the rules of its
/// workspace.
pub(crate) fn is_out_of_reach(error: &web::Error) -> bool {
    matches!(error.code(), Some("message_not_found" | "cant_update_message" | "edit_window_closed"))
}

/// Posts into threads of one workspace.
#[derive(Debug)]
pub(crate) struct Posts<'a> {
    pub(crate) web: &'a Web,
    pub(crate) store: &'a Store,
    pub(crate) token: &'a Token,
    pub(crate) right: Right,
}

impl Posts<'_> {
    /// Posts what has this key, unless it is there; gives the message. It cannot have been posted
    /// before the message `oldest`.
    pub(crate) async fn once(
        &self,
        place: &Place,
        key: &str,
        oldest: &str,
        content: &Content,
    ) -> Result<String, Error> {
        match self.store.slack_post_begin(place, key, clock::now()).await? {
            Posted::At(ts) => return Ok(ts),
            Posted::Never => {}
            Posted::Perhaps => {
                let found = if place.thread.is_empty() {
                    conversations::find_in_channel(self.web, self.token, &place.channel, key)
                        .await?
                } else {
                    let there = (place.channel.as_str(), place.thread.as_str());
                    conversations::find(self.web, self.token, there, oldest, key).await?
                };
                if let Some(ts) = found {
                    self.store.slack_post_done(place, key, &ts).await?;
                    return Ok(ts);
                }
            }
        }
        let (there, leave) =
            ((place.channel.as_str(), place.thread.as_str()), || self.right.is_held());
        let ts = chat::post(self.web, self.token, there, key, content, &leave).await?;
        self.store.slack_post_done(place, key, &ts).await?;
        Ok(ts)
    }

    /// The same, and where Slack finds fault with how it looks, something plainer.
    pub(crate) async fn once_or(
        &self,
        place: &Place,
        key: &str,
        oldest: &str,
        (content, plainer): (&Content, &Content),
    ) -> Result<String, Error> {
        match self.once(place, key, oldest, content).await {
            Err(Error::Slack(error)) if error.is_shape() => {
                self.store.slack_post_forget(place, key).await?;
                self.once(place, key, oldest, plainer).await
            }
            done => done,
        }
    }

    /// Puts something in the place of a message.
    pub(crate) async fn update(
        &self,
        place: &Place,
        ts: &str,
        content: &Content,
    ) -> Result<(), Error> {
        let leave = || self.right.is_held();
        Ok(chat::update(self.web, self.token, (&place.channel, ts), content, &leave).await?)
    }

    /// Puts something in the place of a post; posts it anew where somebody has deleted that, or it
    /// is too old to be edited.
    pub(crate) async fn replace(
        &self,
        place: &Place,
        (key, ts): (&str, &str),
        oldest: &str,
        content: &Content,
    ) -> Result<String, Error> {
        match self.update(place, ts, content).await {
            Ok(()) => Ok(ts.to_owned()),
            Err(Error::Slack(error)) if error.code() == Some("message_not_found") => {
                self.store.slack_post_forget(place, key).await?;
                self.once(place, key, oldest, content).await
            }
            // The old message stays and has the key, so that the new one has another.
            Err(Error::Slack(error)) if is_out_of_reach(&error) => {
                let key = format!("{key}.anew");
                match self.store.slack_post(place, &key).await? {
                    Posted::At(ts) => self.update(place, &ts, content).await.map(|()| ts),
                    Posted::Never | Posted::Perhaps => {
                        self.once(place, &key, oldest, content).await
                    }
                }
            }
            Err(error) => Err(error),
        }
    }
}
