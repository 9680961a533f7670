//! What the processes of the providers service tell each other, and what they are asked.

use construct_proto::{mesh::v1 as mesh, v1};

use super::{Address, Invalid, Question, agree, tokens::ROOT, tokens::Tokens};

const PREFIX: &str = "ctl.providers";

/// A breaker of one process has changed. Not kept: who begins asks ([`BreakersRequest`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerUpdate {
    /// Whose; one token.
    pub instance: String,
}

impl BreakerUpdate {
    /// What all processes say.
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
        agree("the news is of another process", &self.instance, &message.instance)
    }
}

/// A process has begun, and wants to hear again which breakers are open. Said to all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakersRequest;

/// Asks any one process how a breaker stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BreakerState;

/// Asks any one process whether a vendor takes a provider's keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckProvider;

/// Asks any one process which models a vendor offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListVendorModels;

/// Asks any one process how many tokens a call would read.
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
    BreakersRequest, mesh::BreakersWanted, "all", "breakers";
    BreakerState, mesh::BreakerQuestion, "any", "state";
    CheckProvider, mesh::ProviderCheck, "any", "check";
    ListVendorModels, mesh::VendorModelsQuestion, "any", "models";
    CountTokens, mesh::TokenQuestion, "any", "tokens";
}

impl Question for BreakerState {
    type Answer = v1::Breaker;

    const GROUP: Option<&'static str> = Some("providers");
}

impl Question for CheckProvider {
    type Answer = mesh::ProviderChecked;

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
