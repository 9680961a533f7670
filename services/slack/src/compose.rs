//! Composes the message for the agent: the author, the thread since the last question, the
//! question, and files.

use construct_proto::v1::{self, block};
use construct_store::slack::Mention;
use jiff::Timestamp;

use crate::{
    mrkdwn,
    shared::Shared,
    teams::Team,
    web::{self, conversations, conversations::File, conversations::Message, files},
};

/// Messages of the thread at most.
const MAX_MESSAGES: usize = 50;
/// Characters of one message at most.
const MAX_MESSAGE_CHARS: usize = 8_000;
/// Bytes of all messages at most.
const MAX_THREAD_BYTES: usize = 300_000;
/// Bytes of one file at most. The API accepts 2 MiB of attachments in all, and 4 MiB per request.
const MAX_FILE_BYTES: usize = 1024 * 1024;
/// Bytes of all files at most.
const MAX_TOTAL_FILE_BYTES: usize = 1_900_000;
/// Files that are attached at most; others are named.
const MAX_FILES: usize = 20;
/// Images and documents that the API accepts unchanged; text is accepted under any name.
const ACCEPTED_MEDIA_TYPES: [&str; 7] = [
    "image/png",
    "image/jpeg",
    "image/gif",
    "image/webp",
    "application/pdf",
    "application/json",
    "application/xml",
];

/// The blocks of the message for a mention.
pub(crate) async fn message_blocks(
    shared: &Shared,
    team: &Team,
    mention: &Mention,
) -> Result<Vec<v1::Block>, crate::error::Error> {
    let (thread_key, event) = (mention.thread_key(), &mention.event);
    let question_message = serde_json::from_value::<Message>(event.clone()).unwrap_or_default();
    let before = shared.store.slack_message_before(&thread_key, &mention.key.ts).await?;
    let messages = if mention.thread == mention.key.ts {
        Vec::new()
    } else {
        let read = conversations::last_messages(
            &shared.web,
            &team.token,
            &thread_key.channel,
            &thread_key.thread,
            // Earlier messages are not read again: third-party apps may read a thread only once a
            // minute.
            (before.as_deref().unwrap_or_default(), &mention.key.ts),
            // The mention itself is among them.
            MAX_MESSAGES + 1,
        );
        match read.await {
            Ok(messages) => messages,
            // The question can be answered without the thread.
            Err(error @ web::Error::Refused { .. }) if !error.is_revoked() => {
                tracing::warn!(%error, channel = thread_key.channel, "cannot read a thread");
                Vec::new()
            }
            Err(error) => return Err(error.into()),
        }
    };
    let messages: Vec<Message> = messages
        .into_iter()
        .filter(|message| message.ts != mention.key.ts && message.key().is_none())
        // The file of a long answer has no key.
        .filter(|message| message.user.as_ref() != Some(&team.installation.bot_user))
        .filter(|message| before.as_ref().is_none_or(|before| message.ts > *before))
        .filter(|message| message.ts < mention.key.ts)
        .collect();
    let mut blocks = Vec::new();
    let mut lines = Vec::new();
    let mut size = 0;
    // Messages close to the question matter most.
    for message in messages.iter().rev() {
        let line = message_line(shared, team, message).await;
        size += line.len();
        if size > MAX_THREAD_BYTES {
            break;
        }
        lines.push(line);
    }
    lines.reverse();
    if !lines.is_empty() {
        let what = if before.is_some() {
            "What was said in the Slack thread since your last message"
        } else {
            "The Slack thread before the question"
        };
        blocks.push(text_block(format!("{what}, oldest first:\n\n{}", lines.join("\n"))));
    }
    let name = shared.people.display_name(&team.token, &mention.user).await;
    let question = readable_text(shared, team, &question_message.text).await;
    let question = question.trim();
    let question =
        if question.is_empty() { "(no text; see the thread and the files)" } else { question };
    let again = if mention.key.attempt > 0 { " once more, because it failed before" } else { "" };
    blocks.push(text_block(format!("{name} asks you in Slack{again}:\n\n{question}")));
    // Files of the question come first, then those of the closest messages.
    let files: Vec<&File> = [&question_message]
        .into_iter()
        .chain(messages.iter().rev())
        .flat_map(|message| &message.files)
        .collect();
    blocks.extend(attachment_blocks(shared, team, &files).await?);
    Ok(blocks)
}

async fn message_line(shared: &Shared, team: &Team, message: &Message) -> String {
    let name = match (&message.user, &message.username) {
        (Some(user), _) if message.bot_id.is_none() => {
            shared.people.display_name(&team.token, user).await
        }
        (_, Some(name)) => format!("{name} (bot)"),
        (Some(user), None) => {
            format!("{} (bot)", shared.people.display_name(&team.token, user).await)
        }
        (None, None) => "unknown".to_owned(),
    };
    let seconds = message.ts.split('.').next().and_then(|seconds| seconds.parse().ok());
    let at = seconds.and_then(|seconds| Timestamp::from_second(seconds).ok());
    let at = at.map(|at| at.strftime("%Y-%m-%d %H:%M UTC").to_string()).unwrap_or_default();
    let words = mrkdwn::truncate(
        &readable_text(shared, team, &message.full_text()).await,
        MAX_MESSAGE_CHARS,
    );
    let files: Vec<&str> = message.files.iter().filter_map(|file| file.name.as_deref()).collect();
    let files =
        if files.is_empty() { String::new() } else { format!(" [files: {}]", files.join(", ")) };
    format!("[{at}] {name}: {words}{files}")
}

/// Converts Slack's markup to what people see: names for ids, and without the app's own name at the
/// beginning.
async fn readable_text(shared: &Shared, team: &Team, text: &str) -> String {
    let own = format!("<@{}>", team.installation.bot_user);
    let text = text.trim();
    let text = text.strip_prefix(&own).unwrap_or(text);
    let mut readable = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('<') {
        readable.push_str(before);
        let Some((inside, after)) = after.split_once('>') else {
            readable.push('<');
            rest = after;
            continue;
        };
        let (target, label) =
            inside.split_once('|').map_or((inside, None), |(target, label)| (target, Some(label)));
        let words = match (target.split_at_checked(1), label) {
            (Some(("@", user)), _) => {
                format!("@{}", shared.people.display_name(&team.token, user).await)
            }
            (Some(("#", channel)), label) => {
                format!("#{}", label.filter(|label| !label.is_empty()).unwrap_or(channel))
            }
            (Some(("!", call)), label) => label.map_or_else(|| format!("@{call}"), str::to_owned),
            (_, Some(label)) if label != target => format!("{label} ({target})"),
            _ => target.to_owned(),
        };
        readable.push_str(&words);
        rest = after;
    }
    readable.push_str(rest);
    readable.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
}

/// The blocks for the accepted files, and a text about the others.
async fn attachment_blocks(
    shared: &Shared,
    team: &Team,
    files: &[&File],
) -> Result<Vec<v1::Block>, crate::error::Error> {
    let (mut blocks, mut omitted, mut size, mut seen_ids) = (Vec::new(), Vec::new(), 0, Vec::new());
    for file in files {
        if seen_ids.contains(&&file.id) {
            continue;
        }
        seen_ids.push(&file.id);
        let name = file.name.as_deref().unwrap_or("file").replace(char::is_control, " ");
        let name = mrkdwn::truncate(&name, 200);
        let kind = media_type(file.mimetype.as_deref().unwrap_or_default());
        let length = file.size.unwrap_or(0);
        let mut omit = |reason: &str| {
            omitted.push(format!(
                "{name} ({}, {length} bytes): {reason}",
                file.mimetype.as_deref().unwrap_or("?")
            ))
        };
        let Some(kind) = kind else {
            omit("a file of this kind cannot be shown to you");
            continue;
        };
        let room = MAX_FILE_BYTES.min(MAX_TOTAL_FILE_BYTES.saturating_sub(size));
        if blocks.len() >= MAX_FILES || length > room as u64 {
            omit("it is too large, or there are too many");
            continue;
        }
        let Some(url) = &file.url_private_download else {
            omit("Slack does not provide it");
            continue;
        };
        let data = match files::download(&shared.web, &team.token, url, room).await {
            Ok(Some(data)) if !data.is_empty() => data,
            Ok(_) => {
                omit("it is empty or too large");
                continue;
            }
            // The question can be answered without the file.
            Err(
                error @ (web::Error::Refused { .. }
                | web::Error::Limited { .. }
                | web::Error::Unknown { .. }),
            ) => {
                tracing::warn!(%error, file = file.id, "cannot read a file");
                omit("it could not be read");
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let is_text = kind.starts_with("text/")
            || kind.starts_with("application/json")
            || kind.starts_with("application/xml");
        // Slack responds with a web page when it rejects the token.
        if is_text && (std::str::from_utf8(&data).is_err() || data.contains(&0)) {
            omit("it is not UTF-8 text");
            continue;
        }
        size += data.len();
        let attachment =
            v1::Attachment { media_type: kind, name, data, ..v1::Attachment::default() };
        blocks.push(v1::Block { block: Some(block::Block::Attachment(attachment)) });
    }
    if !omitted.is_empty() {
        blocks.push(text_block(format!(
            "Files in the thread that you cannot see:\n{}",
            omitted.join("\n")
        )));
    }
    Ok(blocks)
}

/// The media type of an attachment, if the file can be attached.
fn media_type(mime: &str) -> Option<String> {
    let mime = mime.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    let source = [
        "application/javascript",
        "application/x-javascript",
        "application/x-sh",
        "application/toml",
        "application/x-yaml",
    ];
    if ACCEPTED_MEDIA_TYPES.contains(&mime.as_str()) || mime == "application/yaml" {
        Some(mime)
    } else if mime.starts_with("text/") || source.contains(&mime.as_str()) {
        Some("text/plain".to_owned())
    } else {
        None
    }
}

fn text_block(text: String) -> v1::Block {
    v1::Block { block: Some(block::Block::Text(v1::Text { text: text.replace('\0', "\u{FFFD}") })) }
}
