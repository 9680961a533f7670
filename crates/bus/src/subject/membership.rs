//! Heartbeats of reconcilers.

use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, agree, tokens::ROOT, tokens::Tokens};

const PREFIX: &str = "ctl.reconciler";

/// The heartbeat of one reconciler process. Not stored: a process without heartbeats does not
/// count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReconcilerHeartbeat {
    /// The process; one token.
    pub instance: String,
}

impl ReconcilerHeartbeat {
    /// The subjects of all processes.
    pub(crate) fn filter() -> String {
        format!("{ROOT}.{PREFIX}.*.beat")
    }
}

impl Address for ReconcilerHeartbeat {
    type Message = mesh::ReconcilerHeartbeat;

    fn subject(&self) -> String {
        format!("{ROOT}.{PREFIX}.{}.beat", self.instance)
    }

    fn pattern() -> String {
        Self::filter()
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, PREFIX)?;
        let instance = tokens.next()?.to_owned();
        tokens.word("beat")?;
        tokens.end()?;
        Ok(Self { instance })
    }

    fn check(&self, beat: &mesh::ReconcilerHeartbeat) -> Result<(), Invalid> {
        let token = !self.instance.is_empty() && !self.instance.contains(['.', '*', '>', ' ']);
        if !token {
            return Err(Invalid::new("the instance is not one token", &self.instance));
        }
        agree("the heartbeat is of another process", &self.instance, &beat.instance)
    }
}
