//! The data of the Slack service. It alone writes these tables, and writes no others.
//!
//! A mention is stored before it is acknowledged to Slack, and stays until it is finally answered.
//! The process that works on it holds its lease. The lease guards every change, so that of two
//! processes that work on the same mention one fails.

mod grant;
mod installation;
mod member;
mod mention;
mod post;

pub use grant::{Grant, GrantKind};
pub use installation::{Installation, NewInstallState, NewInstallation};
pub use member::Member;
pub use mention::{Mention, MentionKey, MentionState, NewMention, Thread};
pub use post::{PostState, ThreadKey};
