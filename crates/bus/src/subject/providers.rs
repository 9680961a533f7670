//! Messages between the processes of the providers service, and questions to them.

use construct_proto::{mesh::v1 as mesh, v1};

use super::{Address, Invalid, Question, agree, tokens::ROOT, tokens::Tokens};

const PREFIX: &str = "ctl.providers";

/// A breaker of one process has changed. Not stored: a starting process requests all
/// ([`BreakersRequest`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerUpdate {
    /// The process; one token.
    pub instance: String,
}

impl BreakerUpdate {
    /// The subjects of all processes.
    pub(crate) fn filter() -> String {
        format!("{ROOT}.{PREFIX}.*.breaker")
    }
}

impl Address for BreakerUpdate {
    type Message = mesh::BreakerChanged;

    fn subject(&self) -> String {
        format!("{ROOT}.{PREFIX}.{}.breaker", self.instance)
    }

    fn pattern() -> String {
        Self::filter()
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, PREFIX)?;
        let instance = tokens.next()?.to_owned();
        tokens.word("breaker")?;
        tokens.end()?;
        Ok(Self { instance })
    }

    fn check(&self, message: &mesh::BreakerChanged) -> Result<(), Invalid> {
        let token = !self.instance.is_empty() && !self.instance.contains(['.', '*', '>', ' ']);
        if !token {
            return Err(Invalid::new("the instance is not one token", &self.instance));
        }
        agree("the update is of another process", &self.instance, &message.instance)
    }
}

/// A starting process requests all open breakers, from all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakersRequest;

/// Asks any process for the state of a breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerState;

/// Asks any process whether a vendor accepts a provider's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckProvider;

/// Asks any process which models a vendor offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListVendorModels;

/// Asks any process how many input tokens a call would have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountTokens;

macro_rules! fixed {
    ($($address:ident, $message:ty, $who:literal, $what:literal;)*) => {$(
        impl Address for $address {
            type Message = $message;

            fn subject(&self) -> String {
                format!("{ROOT}.{PREFIX}.{}.{}", $who, $what)
            }

            fn pattern() -> String {
                Self.subject()
            }

            fn parse(subject: &str) -> Result<Self, Invalid> {
                let mut tokens = Tokens::after(subject, PREFIX)?;
                tokens.word($who)?;
                tokens.word($what)?;
                tokens.end()?;
                Ok(Self)
            }

            fn check(&self, _message: &$message) -> Result<(), Invalid> {
                Ok(())
            }
        }
    )*};
}

fixed! {
    BreakersRequest, mesh::BreakersRequest, "all", "breakers";
    BreakerState, mesh::BreakerQuery, "any", "state";
    CheckProvider, mesh::ProviderCheck, "any", "check";
    ListVendorModels, mesh::VendorModelsQuery, "any", "models";
    CountTokens, mesh::TokenCountQuery, "any", "tokens";
}

impl Question for BreakerState {
    type Answer = v1::Breaker;

    const GROUP: Option<&'static str> = Some("providers");
}

impl Question for CheckProvider {
    type Answer = mesh::ProviderCheckResult;

    const GROUP: Option<&'static str> = Some("providers");
}

impl Question for ListVendorModels {
    type Answer = mesh::VendorModels;

    const GROUP: Option<&'static str> = Some("providers");
}

impl Question for CountTokens {
    type Answer = mesh::TokenCount;

    const GROUP: Option<&'static str> = Some("providers");
}
