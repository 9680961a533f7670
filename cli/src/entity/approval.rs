//! `construct approval`: decisions about calls of scripts.

use clap::{Args, Subcommand, ValueEnum};
use construct_proto::v1::{
    Approval, ApprovalState, DecideApprovalRequest, GetApprovalRequest, ListApprovalsRequest,
    decide_approval_request::Decision, list_approvals_request::Filter,
};
use jiff::Timestamp;

use super::{WriteArgs, age, id, metadata_details};
use crate::{
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs},
    page::ListArgs,
    text::{clip, one_line},
    time,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum State {
    Pending,
    Approved,
    Rejected,
    Expired,
    Cancelled,
}

impl From<State> for ApprovalState {
    fn from(state: State) -> Self {
        match state {
            State::Pending => Self::Pending,
            State::Approved => Self::Approved,
            State::Rejected => Self::Rejected,
            State::Expired => Self::Expired,
            State::Cancelled => Self::Cancelled,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum ApprovalCommand {
    /// List approvals.
    List(List),
    /// Show an approval with all arguments.
    Get {
        /// The id of the approval.
        approval: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// Approve the call.
    Approve(Decide),
    /// Reject the call; the script gets an error.
    Reject(Decide),
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// Only approvals of this task.
    #[arg(long, default_value = "", hide_default_value = true)]
    task: String,
    /// Only approvals of this task and its subtasks.
    #[arg(long, value_name = "TASK", default_value = "", hide_default_value = true)]
    tree: String,
    /// Only approvals in this state.
    #[arg(long, value_enum)]
    state: Option<State>,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Decide {
    /// The approval's id.
    approval: String,
    /// A comment, recorded with the decision. The script gets it when the call is rejected.
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    comment: String,
    /// Refuse unless the arguments have this hash.
    #[arg(long, value_name = "HASH", default_value = "", hide_default_value = true)]
    arguments_hash: String,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl ApprovalCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::List(args) => args.run(gateway).await,
            Self::Get { approval, output } => output.entity(
                &call(gateway.approvals().get_approval(GetApprovalRequest { approval })).await?,
            ),
            Self::Approve(args) => args.run(gateway, Decision::Approve).await,
            Self::Reject(args) => args.run(gateway, Decision::Reject).await,
        }
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let state = self.state.map_or(ApprovalState::Unspecified, ApprovalState::from).into();
        let filter = Filter { task: self.task, state, tree: self.tree };
        let listed = self
            .list
            .collect(|page| {
                let request =
                    ListApprovalsRequest { page: Some(page), filter: Some(filter.clone()) };
                async move {
                    let response = call(gateway.approvals().list_approvals(request)).await?;
                    Ok((response.approvals, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

impl Decide {
    async fn run(self, gateway: &Gateway, decision: Decision) -> Result<(), Failure> {
        let request = DecideApprovalRequest {
            approval: self.approval,
            decision: decision.into(),
            comment: self.comment,
            arguments_hash: self.arguments_hash,
            idempotency_key: self.write.key(),
        };
        self.output.entity(&call(gateway.approvals().decide_approval(request)).await?)
    }
}

/// The name of a state.
pub(crate) fn state_name(state: ApprovalState) -> &'static str {
    match state {
        ApprovalState::Pending => "pending",
        ApprovalState::Approved => "approved",
        ApprovalState::Rejected => "rejected",
        ApprovalState::Expired => "expired",
        ApprovalState::Cancelled => "cancelled",
        ApprovalState::Unspecified => "",
    }
}

impl Entity for Approval {
    const NAME: &'static str = "construct.v1.Approval";
    const PLURAL: &'static str = "approvals";
    const COLUMNS: &'static [&'static str] = &["ID", "TASK", "STATE", "TOOL", "ARGUMENTS", "AGE"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let spec = self.spec.clone().unwrap_or_default();
        let state =
            self.status.as_ref().map_or(ApprovalState::Unspecified, |status| status.state());
        vec![
            id(self.metadata.as_ref()),
            spec.task,
            state_name(state).to_owned(),
            spec.tool,
            clip(&one_line(&spec.arguments), 60),
            age(self.metadata.as_ref(), now),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let spec = self.spec.clone().unwrap_or_default();
        let status = self.status.clone().unwrap_or_default();
        let at = |time: Option<&prost_types::Timestamp>| {
            time::read(time)
                .map(|at| format!("{} ({})", time::local(at), time::relative(at, now)))
                .unwrap_or_default()
        };
        let shown = spec.arguments.len() as u64;
        let omitted = match spec.arguments_size.checked_sub(shown) {
            None | Some(0) => String::new(),
            Some(more) => format!("{more} bytes of the arguments are not shown"),
        };
        let mut details = vec![
            ("id", id(self.metadata.as_ref())),
            ("task", spec.task),
            ("state", state_name(status.state()).to_owned()),
            ("tool", spec.tool),
            ("reason", spec.reason),
            ("decided by", status.decided_by.clone()),
            ("decided", at(status.decided_at.as_ref())),
            ("comment", status.comment.clone()),
            ("expires", at(status.expires_at.as_ref())),
            (
                "call",
                format!("number {} of script {} of {}", spec.number, spec.script, spec.step_id),
            ),
            ("hash", spec.arguments_hash),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details.push(("omitted", omitted));
        details.push(("arguments", spec.arguments));
        details
    }
}
