//! Scans of repositories: continuing them, their events, their candidates, and the repositories of
//! connections.

use construct_domain::{OrganizationId, ScanId};
use construct_proto::{mesh::v1 as mesh, v1};

use super::{Address, Invalid, Question, StreamAddress, agree, tokens::ROOT, tokens::Tokens};
use crate::topology::Stream;

/// Continue a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanRun {
    /// The scan's organization.
    pub organization: OrganizationId,
    /// The scan.
    pub scan: ScanId,
}

impl Address for ScanRun {
    type Message = mesh::ScanRun;

    fn subject(&self) -> String {
        format!("{ROOT}.cmd.scan.run.{}.{}", self.organization, self.scan)
    }

    fn pattern() -> String {
        format!("{ROOT}.cmd.scan.run.*.*")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "cmd.scan")?;
        tokens.word("run")?;
        let (organization, scan) = (tokens.value()?, tokens.value()?);
        tokens.end()?;
        Ok(Self { organization, scan })
    }

    fn check(&self, run: &mesh::ScanRun) -> Result<(), Invalid> {
        agree("the scan belongs to another organization", self.organization, &run.organization_id)?;
        agree("it is another scan", self.scan, &run.scan_id)
    }
}

impl StreamAddress for ScanRun {
    const STREAM: Stream = Stream::Scan;
}

/// Create Tools from accepted candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ToolCreate {
    /// The organization.
    pub organization: OrganizationId,
}

impl Address for ToolCreate {
    type Message = mesh::ToolCreate;

    fn subject(&self) -> String {
        format!("{ROOT}.cmd.tool.create.{}", self.organization)
    }

    fn pattern() -> String {
        format!("{ROOT}.cmd.tool.create.*")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "cmd.tool")?;
        tokens.word("create")?;
        let organization = tokens.value()?;
        tokens.end()?;
        Ok(Self { organization })
    }

    fn check(&self, create: &mesh::ToolCreate) -> Result<(), Invalid> {
        agree("the tools are for another organization", self.organization, &create.organization_id)
    }
}

impl StreamAddress for ToolCreate {
    const STREAM: Stream = Stream::Tool;

    fn duplicate_key(create: &mesh::ToolCreate) -> Option<String> {
        Some(format!("tool.create.{}", create.hand_over_id))
    }
}

/// An event of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanUpdate {
    /// The scan's organization.
    pub organization: OrganizationId,
    /// The scan.
    pub scan: ScanId,
}

impl Address for ScanUpdate {
    type Message = v1::ScanEvent;

    fn subject(&self) -> String {
        format!("{ROOT}.evt.{}.scan.{}", self.organization, self.scan)
    }

    fn pattern() -> String {
        format!("{ROOT}.evt.*.scan.*")
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "evt")?;
        let organization = tokens.value()?;
        tokens.word("scan")?;
        let scan = tokens.value()?;
        tokens.end()?;
        Ok(Self { organization, scan })
    }

    fn check(&self, event: &v1::ScanEvent) -> Result<(), Invalid> {
        agree(
            "the event belongs to another organization",
            self.organization,
            &event.organization_id,
        )?;
        agree("the event is about another scan", self.scan, &event.scan_id)
    }
}

impl StreamAddress for ScanUpdate {
    const STREAM: Stream = Stream::Events;

    fn duplicate_key(event: &v1::ScanEvent) -> Option<String> {
        Some(format!("{}.{}", event.scan_id, event.sequence))
    }
}

/// Asks any scanner which repositories a connection reaches; the answer is a `Repositories`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListRepositories;

impl Address for ListRepositories {
    type Message = mesh::RepositoriesQuery;

    fn subject(&self) -> String {
        format!("{ROOT}.ctl.scanner.any.repositories")
    }

    fn pattern() -> String {
        Self.subject()
    }

    fn parse(subject: &str) -> Result<Self, Invalid> {
        let mut tokens = Tokens::after(subject, "ctl.scanner")?;
        tokens.word("any")?;
        tokens.word("repositories")?;
        tokens.end()?;
        Ok(Self)
    }

    fn check(&self, question: &mesh::RepositoriesQuery) -> Result<(), Invalid> {
        let organization: Result<OrganizationId, _> = question.organization_id.parse();
        organization.map(drop).map_err(|_| {
            Invalid::new(
                "the payload's organization id is malformed",
                question.organization_id.clone(),
            )
        })
    }
}

impl Question for ListRepositories {
    type Answer = mesh::Repositories;

    const GROUP: Option<&'static str> = Some("scanner");
}
