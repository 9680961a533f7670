//! Messages.

use clap::{Args, Subcommand, ValueEnum};
use construct_proto::v1::{
    Block, CreateMessageRequest, DeleteMessageRequest, EditMessageRequest, GetMessageRequest,
    ListMessagesRequest, Message, MessagePriority, MessageSource, MessageSpec, Text,
    UpdateMessageRequest, block, list_messages_request::Filter,
};
use jiff::Timestamp;

use super::{ChangeArgs, WriteArgs, age, id, metadata_details, read_stdin};
use crate::{
    attach::AttachArgs,
    failure::Failure,
    gateway::{Gateway, call},
    output::{Entity, OutputArgs},
    page::ListArgs,
    render,
    text::{clip, one_line},
    time,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Source {
    User,
    Assistant,
    System,
}

impl From<Source> for MessageSource {
    fn from(source: Source) -> Self {
        match source {
            Source::User => Self::User,
            Source::Assistant => Self::Assistant,
            Source::System => Self::System,
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum MessageCommand {
    /// Send a message; it is answered in the background.
    Create(Create),
    /// Show a message.
    Get {
        /// The message's id.
        message: String,
        #[command(flatten)]
        output: OutputArgs,
    },
    /// List the messages of a task in transcript order.
    List(List),
    /// Change a queued message.
    Update(Update),
    /// Edit an answered message: later messages are superseded, and the new text is answered.
    Edit(Edit),
    /// Delete a queued message.
    Delete {
        /// The message's id.
        message: String,
        #[command(flatten)]
        write: WriteArgs,
        #[command(flatten)]
        output: OutputArgs,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Create {
    /// The task's id.
    task: String,
    /// The text. `-`, or no argument, reads it from standard input.
    text: Option<String>,
    #[command(flatten)]
    attach: AttachArgs,
    /// Interrupt the running turn, and answer this message immediately.
    #[arg(long)]
    interrupt: bool,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct List {
    /// The task's id.
    task: String,
    /// Only messages from this source.
    #[arg(long, value_enum)]
    source: Option<Source>,
    /// Only messages after this position in the transcript.
    #[arg(long, value_name = "N", default_value_t = 0, hide_default_value = true)]
    after_position: i64,
    /// Include messages that a rewind or an edit superseded.
    #[arg(long)]
    superseded: bool,
    #[command(flatten)]
    list: ListArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Update {
    /// The message's id.
    message: String,
    /// The new text. `-`, or no argument, reads it from standard input.
    text: Option<String>,
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    output: OutputArgs,
}

#[derive(Debug, Args)]
pub(crate) struct Edit {
    /// The id of the user's message.
    message: String,
    /// The new text. `-`, or no argument, reads it from standard input.
    text: Option<String>,
    #[command(flatten)]
    write: WriteArgs,
    #[command(flatten)]
    output: OutputArgs,
}

impl MessageCommand {
    /// # Errors
    /// The error of the gateway.
    pub(crate) async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        match self {
            Self::Create(args) => {
                let mut blocks = blocks(args.text)?;
                blocks.extend(args.attach.blocks(gateway).await?);
                let priority = if args.interrupt {
                    MessagePriority::Interrupt
                } else {
                    MessagePriority::AfterTurn
                }
                .into();
                let spec = MessageSpec { task: args.task, blocks, priority };
                let request =
                    CreateMessageRequest { spec: Some(spec), idempotency_key: args.write.key() };
                args.output.entity(&call(gateway.messages().create_message(request)).await?)
            }
            Self::Get { message, output } => output.entity(
                &call(gateway.messages().get_message(GetMessageRequest { message })).await?,
            ),
            Self::List(args) => args.run(gateway).await,
            Self::Update(args) => {
                let request = UpdateMessageRequest {
                    message: args.message,
                    blocks: blocks(args.text)?,
                    revision: args.change.revision,
                    idempotency_key: args.change.write.key(),
                };
                args.output.entity(&call(gateway.messages().update_message(request)).await?)
            }
            Self::Edit(args) => {
                let (blocks, idempotency_key) = (blocks(args.text)?, args.write.key());
                let request = EditMessageRequest { message: args.message, blocks, idempotency_key };
                args.output.entity(&call(gateway.messages().edit_message(request)).await?)
            }
            Self::Delete { message, write, output } => {
                let request =
                    DeleteMessageRequest { message: message.clone(), idempotency_key: write.key() };
                call(gateway.messages().delete_message(request)).await?;
                output.deleted("message", &message)
            }
        }
    }
}

impl List {
    async fn run(self, gateway: &Gateway) -> Result<(), Failure> {
        let filter = Filter {
            source: self.source.map_or(MessageSource::Unspecified, MessageSource::from).into(),
            after_position: self.after_position,
            include_superseded: self.superseded,
        };
        let task = self.task;
        let listed = self
            .list
            .collect(|page| {
                let request = ListMessagesRequest {
                    task: task.clone(),
                    page: Some(page),
                    filter: Some(filter),
                };
                async move {
                    let response = call(gateway.messages().list_messages(request)).await?;
                    Ok((response.messages, response.page))
                }
            })
            .await?;
        self.output.list(&listed)
    }
}

fn blocks(text: Option<String>) -> Result<Vec<Block>, Failure> {
    let text = match text {
        Some(text) if text != "-" => text,
        _ => read_stdin()?,
    };
    Ok(vec![Block { block: Some(block::Block::Text(Text { text })) }])
}

fn source_name(source: MessageSource) -> &'static str {
    match source {
        MessageSource::User => "user",
        MessageSource::Assistant => "assistant",
        MessageSource::System => "system",
        MessageSource::Unspecified => "unknown",
    }
}

/// The content of all blocks of a message as text.
fn content(message: &Message) -> String {
    let blocks = message.spec.iter().flat_map(|spec| &spec.blocks);
    let parts = blocks.filter_map(|block| match block.block.as_ref()? {
        block::Block::Text(text) => Some(text.text.clone()),
        block::Block::CodeInterpreterCall(call) => {
            Some(format!("[script]\n{}", call.code.trim_end()))
        }
        block::Block::CodeInterpreterResult(result) if result.error.is_empty() => {
            Some(format!("[result]\n{}", result.output.trim_end()))
        }
        block::Block::CodeInterpreterResult(result) => Some(format!(
            "[result]\n{}\n[error]\n{}",
            result.output.trim_end(),
            result.error.trim_end()
        )),
        block::Block::Thinking(thinking) if thinking.text.trim().is_empty() => None,
        block::Block::Thinking(thinking) => {
            Some(format!("[thinking]\n{}", thinking.text.trim_end()))
        }
        block::Block::Attachment(attachment) => Some(render::attachment_line(attachment)),
    });
    parts.collect::<Vec<_>>().join("\n")
}

impl Entity for Message {
    const NAME: &'static str = "construct.v1.Message";
    const PLURAL: &'static str = "messages";
    const COLUMNS: &'static [&'static str] = &["#", "SOURCE", "STATE", "AGE", "ID", "CONTENT"];

    fn row(&self, now: Timestamp) -> Vec<String> {
        let status = self.status.clone().unwrap_or_default();
        let state = match (&status.processed_at, status.position) {
            _ if status.superseded_at.is_some() => "superseded",
            _ if !status.error.is_empty() => "failed",
            (Some(_), _) => "processed",
            (None, 0) => "queued",
            (None, _) => "running",
        };
        let position =
            if status.position == 0 { "-".to_owned() } else { status.position.to_string() };
        vec![
            position,
            source_name(status.source()).to_owned(),
            state.to_owned(),
            age(self.metadata.as_ref(), now),
            id(self.metadata.as_ref()),
            clip(&one_line(&content(self)), 80),
        ]
    }

    fn details(&self, now: Timestamp) -> Vec<(&'static str, String)> {
        let status = self.status.clone().unwrap_or_default();
        let position =
            if status.position == 0 { "queued".to_owned() } else { status.position.to_string() };
        let mut details = vec![
            ("id", id(self.metadata.as_ref())),
            ("task", self.spec.as_ref().map(|spec| spec.task.clone()).unwrap_or_default()),
            ("source", source_name(status.source()).to_owned()),
            ("position", position),
            ("agent", status.agent_id),
            ("error", status.error),
            (
                "superseded",
                time::read(status.superseded_at.as_ref())
                    .map(|at| time::relative(at, now))
                    .unwrap_or_default(),
            ),
            ("replaces", status.replaces),
            ("usage", status.usage.map(|usage| render::usage(&usage)).unwrap_or_default()),
        ];
        details.extend(metadata_details(self.metadata.as_ref(), now));
        details.push(("content", content(self)));
        details
    }
}
