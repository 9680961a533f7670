//! What the Slack service keeps: it alone writes these tables, and no other.
//!
//! A mention is a row from before Slack is told that it was taken until it is answered for good.
//! Who works on it holds its lease; every change is guarded by that, so that of two processes that
//! work on the same mention one notices.

mod grant;
mod installation;
mod member;
mod mention;
mod post;

pub use grant::{Grant, GrantKind};
pub use installation::{Installation, NewInstallation, NewInstallState};
pub use member::Member;
pub use mention::{Mention, MentionKey, MentionState, NewMention, Thread};
pub use post::{ThreadKey, PostState};
