//! Deliveries from a Slack workspace.

use std::{fmt, str::FromStr};

use construct_proto::mesh::v1 as mesh;

use super::{Address, Invalid, StreamAddress, agree, tokens::ROOT, tokens::Tokens};
use crate::topology::Stream;

/// The longest workspace id in characters. Slack's have about eleven.
const MAX_TEAM_CHARS: usize = 32;

/// The Slack API of a delivery.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SlackKind {
    /// The Events API.
    Event,
    /// A button, or a submitted form.
    Action,
    /// A slash command.
    Command,
}

impl SlackKind {
    /// Its name in subjects.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Event => "event",
            Self::Action => "action",
            Self::Command => "command",
        }
    }
}

impl fmt::Display for SlackKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for SlackKind {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        [Self::Event, Self::Action, Self::Command]
            .into_iter()
            .find(|kind| kind.as_str() == text)
            .ok_or_else(|| Invalid::new("there is no such kind of delivery from Slack", text))
    }
}

/// A delivery from one workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlackDelivery {
    kind: SlackKind,
    team: String,
}

impl SlackDelivery {
    /// The address of a workspace.
    ///
    /// # Errors
    /// When `team` is not made of 1 to 32 letters and digits.
    pub fn new(kind: SlackKind, team: &str) -> Result<Self, Invalid> {
        let valid = (1..=MAX_TEAM_CHARS).contains(&team.len())
            && team.bytes().all(|byte| byte.is_ascii_alphanumeric());
        if !valid {
            return Err(Invalid::new("the id of a Slack workspace is malformed", team));
        }
        Ok(Self { kind, team: team.to_owned() })
    }
}

impl Address for SlackDelivery {
    type Message = mesh::SlackDelivery;

    fn subject(&self) -> String {
        format!("{ROOT}.cmd.slack.{}.{}", self.kind, self.team)
    }

    fn pattern() -> String {
        format!("{ROOT}.cmd.slack.*.*")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "cmd.slack")?;
        let kind = tokens.value()?;
        let team = tokens.next()?;
        tokens.end()?;
        Self::new(kind, team)
    }

    fn check(&self, delivery: &mesh::SlackDelivery) -> Result<(), Invalid> {
        agree("the delivery is of another workspace", &self.team, &delivery.team)?;
        agree("the delivery is of another kind", self.kind, &delivery.kind)
    }
}

impl StreamAddress for SlackDelivery {
    const STREAM: Stream = Stream::Slack;

    fn duplicate_key(delivery: &mesh::SlackDelivery) -> Option<String> {
        Some(format!("slack.{}.{}.{}", delivery.kind, delivery.team, delivery.key))
    }
}
