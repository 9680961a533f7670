//! `construct audit`: the audit log.

use clap::{Args, Subcommand};
use construct_proto::v1::{
    AuditEntry, AuditFilter, ExportAuditEntriesRequest, ListAuditEntriesRequest,
};
use jiff::Timestamp;

use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    json,
    output::{Entity, OutputArgs, print},
    page::ListArgs,
    text::{clip, one_line},
    time,
};

#[derive(Debug, Subcommand)]
pub(crate) enum AuditCommand {
    /// List audit entries, the newest first.
    List {
        #[command(flatten)]
        filter: FilterArgs,
        #[command(flatten)]
        list: ListArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Print all audit entries, the oldest first, as one JSON object per line.
    Export {
        #[command(flatten)]
        filter: FilterArgs,
    },
}

/// The filter for entries.
#[derive(Debug, Args)]
pub(crate) struct FilterArgs {
    /// Only entries since this time: `2026-11-21T22:55:00Z`, or how long ago, `7d`.
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    since: Option<Timestamp>,
    /// Only entries before this time.
    #[arg(long, value_name = "TIME", value_parser = time::parse_past)]
    until: Option<Timestamp>,
    /// Only entries of this user, by id.
    #[arg(long, value_name = "ID", default_value = "", hide_default_value = true)]
    user: String,
    /// Only entries of this API key, by id.
    #[arg(long, value_name = "ID", default_value = "", hide_default_value = true)]
    key: String,
    /// Only calls of these methods: `TaskService/CreateTask`, `*/Delete*`.
    #[arg(long, value_name = "PATTERN", default_value = "", hide_default_value = true)]
    method: String,
    /// Only entries about this object, by the id or name in the entry.
    #[arg(long, value_name = "ID", default_value = "", hide_default_value = true)]
    object: String,
    /// Only entries with this outcome: `OK`, `PERMISSION_DENIED`.
    #[arg(long, value_name = "CODE", default_value = "", hide_default_value = true)]
    outcome: String,
}

impl FilterArgs {
    fn filter(self) -> AuditFilter {
        AuditFilter {
            since: self.since.map(time::write),
            until: self.until.map(time::write),
            user: self.user,
            api_key: self.key,
            method: self.method,
            object: self.object,
            outcome: self.outcome.to_uppercase(),
        }
    }
}

impl AuditCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::List { filter, list, output } => {
                let filter = filter.filter();
                let listed = list
                    .collect(|page| {
                        let request = ListAuditEntriesRequest {
                            page: Some(page),
                            filter: Some(filter.clone()),
                        };
                        async move {
                            let response =
                                call(gateway.audit().list_audit_entries(request)).await?;
                            Ok((response.audit_entries, response.page))
                        }
                    })
                    .await?;
                output.list(&listed)
            }
            Self::Export { filter } => {
                let request = ExportAuditEntriesRequest { filter: Some(filter.filter()) };
                let mut entries = call(gateway.audit().export_audit_entries(request)).await?;
                while let Some(entry) = entries.message().await? {
                    print(&format!("{}\n", json::message(AuditEntry::NAME, &entry)))?;
                }
                Ok(())
            }
        }
    }
}

/// The caller: the API key, or else the user.
fn caller(entry: &AuditEntry) -> String {
    let caller = [&entry.api_key, &entry.user].into_iter().find(|id| !id.is_empty());
    caller.cloned().unwrap_or_else(|| "none".to_owned())
}

impl Entity for AuditEntry {
    const NAME: &'static str = "construct.v1.AuditEntry";
    const PLURAL: &'static str = "auditEntries";
    const COLUMNS: &'static [&'static str] =
        &["TIME", "CALLER", "METHOD", "OBJECTS", "OUTCOME", "CALLS", "PROTOCOL", "PEER"];

    fn row(&self, _: Timestamp) -> Vec<String> {
        vec![
            time::read(self.time.as_ref()).map(time::local).unwrap_or_default(),
            caller(self),
            self.method.clone(),
            clip(&one_line(&self.objects.join(" ")), 60),
            self.outcome.clone(),
            self.count.to_string(),
            self.protocol.clone(),
            self.peer.clone(),
        ]
    }

    fn details(&self, _: Timestamp) -> Vec<(&'static str, String)> {
        vec![
            ("time", time::read(self.time.as_ref()).map(time::local).unwrap_or_default()),
            ("id", self.id.clone()),
            ("user", self.user.clone()),
            ("key", self.api_key.clone()),
            ("method", self.method.clone()),
            ("objects", self.objects.join(" ")),
            ("outcome", self.outcome.clone()),
            ("calls", self.count.to_string()),
            ("protocol", self.protocol.clone()),
            ("peer", self.peer.clone()),
            ("client", one_line(&self.user_agent)),
            ("request", self.request_id.clone()),
            ("trace", self.trace_id.clone()),
        ]
    }
}
