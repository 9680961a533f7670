//! The inputs of a decision's commands besides the task itself. They are read while the decision is
//! being committed, so nothing here may depend on the commit: what it writes is taken from the
//! decision.

use construct_domain::{
    MessageId,
    decide::{ContextCompaction, Decision, Effect},
    message::{Attachment, Block, Source},
};
use construct_store::{
    Compaction, Error, Invocation, LoadedTask, ScriptCapabilities, Secret, StoredApproval,
    StoredMessage,
};

use crate::reconcile::Reconciler;

/// Maximum number of files of a conversation that its scripts may save: the newest.
const MAX_FILES: u32 = 1_000;

/// The inputs. Empty where no effect needs them.
#[derive(Debug, Default)]
pub(crate) struct CommandInputs {
    /// The task's agent, its model and account.
    pub(crate) invocation: Option<Invocation>,
    /// The secrets that the agent may use by name.
    pub(crate) secrets: Vec<Secret>,
    /// The approvals of the step's scripts.
    pub(crate) approvals: Vec<StoredApproval>,
    /// The models that its scripts may call.
    pub(crate) script_models: Vec<String>,
    /// The files that its scripts may save into the workspace.
    pub(crate) files: Vec<Attachment>,
    /// The summary that replaces the transcript's older part.
    summary: Option<Vec<Block>>,
    /// The visible transcript before the decision.
    transcript: Vec<StoredMessage>,
    /// The messages that the decision appends.
    appended: Vec<(Source, Vec<Block>)>,
}

/// A message of a transcript, as models and scripts see it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TranscriptMessage<'a> {
    /// The author.
    pub(crate) source: Source,
    /// The content.
    pub(crate) blocks: &'a [Block],
}

/// What the effects of a decision need.
#[derive(Debug, Default, Clone, Copy)]
struct RequiredInputs {
    agent: bool,
    secrets: bool,
    script: bool,
    transcript: bool,
    approvals: bool,
}

impl CommandInputs {
    /// The transcript, including the messages that the decision appends.
    pub(crate) fn transcript(&self) -> Vec<TranscriptMessage<'_>> {
        let summary = self.summary.iter().map(|blocks| (Source::System, blocks));
        let stored =
            self.transcript.iter().map(|message| (message.source, &message.content.blocks));
        let appended = self.appended.iter().map(|(source, blocks)| (*source, blocks));
        summary
            .chain(stored)
            .chain(appended)
            .map(|(source, blocks)| TranscriptMessage { source, blocks })
            .collect()
    }

    /// The messages to summarize: the visible ones up to a position, without those that are kept.
    pub(crate) fn older_messages(&self, through: i64, kept: &[i64]) -> Vec<TranscriptMessage<'_>> {
        let summary = self.summary.iter().map(|blocks| (Source::System, blocks));
        let is_replaced = |message: &&StoredMessage| {
            message
                .position
                .is_some_and(|position| position <= through && !kept.contains(&position))
        };
        let stored = self.transcript.iter().filter(is_replaced);
        let stored = stored.map(|message| (message.source, &message.content.blocks));
        summary.chain(stored).map(|(source, blocks)| TranscriptMessage { source, blocks }).collect()
    }
}

impl RequiredInputs {
    fn for_decision(decision: &Decision) -> Self {
        let mut required = Self::default();
        for effect in &decision.effects {
            match effect {
                Effect::InvokeModel(_) => {
                    (required.agent, required.transcript, required.secrets) = (true, true, true)
                }
                Effect::Compact(_) => (required.agent, required.transcript) = (true, true),
                Effect::MakeTitle(_) => (required.agent, required.transcript) = (true, true),
                Effect::ExecuteCode(step) => {
                    (required.script, required.secrets) = (true, true);
                    required.approvals |= step.round > 0;
                    // The scripts to run are usually in the message that the decision appends.
                    required.transcript |= !decision
                        .appended
                        .iter()
                        .any(|message| message.source == Source::Assistant);
                }
                Effect::CancelModel(..) | Effect::CancelCode(..) | Effect::EndCode(_) => {}
            }
        }
        required
    }
}

/// Reads what the effects of a decision need.
pub(crate) async fn gather(
    reconciler: &Reconciler,
    loaded: &LoadedTask,
    decision: &Decision,
) -> Result<CommandInputs, Error> {
    let required = RequiredInputs::for_decision(decision);
    let (store, task) = (&reconciler.store, loaded.task.id);
    // Absent things are not read: most agents have no secrets, and most conversations no files.
    let by_agent = async {
        let invocation = if required.agent { store.invocation(task).await? } else { None };
        let means = if required.script {
            store.task_script_capabilities(task).await?
        } else {
            ScriptCapabilities::default()
        };
        let has_secrets =
            means.secrets || invocation.as_ref().is_some_and(|invocation| invocation.has_secrets);
        let secrets = async {
            if required.secrets && has_secrets {
                store.task_secrets(task).await
            } else {
                Ok(Vec::new())
            }
        };
        let files = async {
            if means.files { store.task_files(task, MAX_FILES).await } else { Ok(Vec::new()) }
        };
        let (secrets, files) = tokio::try_join!(secrets, files)?;
        // Without a key for tokens, scripts cannot call models.
        let models = if reconciler.token_keys.is_some() { means.models } else { Vec::new() };
        Ok::<_, Error>((invocation, secrets, files, models))
    };
    let approvals = async {
        let Some(step) = decision.task.step.as_ref().filter(|_| required.approvals) else {
            return Ok(Vec::new());
        };
        let mut approvals = store.approvals_of_step(step.id).await?;
        for closed in &decision.closed_approvals {
            if let Some(approval) = approvals.iter_mut().find(|approval| approval.id == closed.id) {
                approval.state = closed.state;
                approval.comment.clone_from(&closed.reason);
            }
        }
        Ok(approvals)
    };
    let admitted = decision.admitted.map(|(message, _): (MessageId, i64)| message);
    let transcript = async {
        if required.transcript {
            // Messages that the decision supersedes are not shown.
            let until = decision.rewound.map_or(loaded.task.last_position, |from| from - 1);
            let compaction = compaction(reconciler, loaded, decision, until).await?;
            let (after, kept) =
                compaction.as_ref().map_or((0, &[][..]), |one| (one.through, &one.kept));
            let messages = store.transcript_after(task, after, kept, until, admitted).await?;
            Ok((compaction.map(|compaction| vec![Block::Text(compaction.text)]), messages))
        } else {
            Ok((None, Vec::new()))
        }
    };
    let ((invocation, secrets, files, script_models), approvals, (summary, transcript)) =
        tokio::try_join!(by_agent, approvals, transcript)?;
    let stays = |position: i64| decision.rewound.is_none_or(|from| position < from);
    let appended = decision.appended.iter().filter(|message| stays(message.position));
    let appended = appended.map(|message| (message.source, message.blocks.clone())).collect();
    Ok(CommandInputs {
        invocation,
        secrets,
        approvals,
        script_models,
        files,
        summary,
        transcript,
        appended,
    })
}

/// The compaction that replaces the transcript's older part once the decision is committed.
async fn compaction(
    reconciler: &Reconciler,
    loaded: &LoadedTask,
    decision: &Decision,
    until: i64,
) -> Result<Option<Compaction>, Error> {
    let through = loaded.task.context.through;
    match &decision.compacted {
        Some(ContextCompaction { through, kept, text, tokens, .. }) => Ok(Some(Compaction {
            through: *through,
            kept: kept.clone(),
            text: text.clone(),
            tokens: *tokens,
        })),
        None if through == 0 || through > until => Ok(None),
        None => reconciler.store.compaction(loaded.task.id, through).await,
    }
}
