//! Which reconcilers live.

use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, agree, tokens::ROOT, tokens::Tokens};

const PREFIX: &str = "ctl.reconciler";

/// One process of the reconciler service says that it lives. Not kept: who is not heard does not
/// count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReconcilerBeat {
    /// Whose; one token.
    pub instance: String,
}

impl ReconcilerBeat {
    /// What all processes say.
    pub(crate) fn filter() -> String {
        format!("{ROOT}.{PREFIX}.*.beat")
    }
}

impl Address for ReconcilerBeat {
    type Message = mesh::ReconcilerBeat;

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

    fn check(&self, beat: &mesh::ReconcilerBeat) -> Result<(), Invalid> {
        let token = !self.instance.is_empty() && !self.instance.contains(['.', '*', '>', ' ']);
        if !token {
            return Err(Invalid::new("the instance is not one token", &self.instance));
        }
        agree("the beat is of another process", &self.instance, &beat.instance)
    }
}
