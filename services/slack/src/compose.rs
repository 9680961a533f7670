//! What the agent is told: who asks, what stands in the thread since it was last asked, and the
//! files there.

use construct_proto::v1::{self, block};
use construct_store::slack::Mention;
use jiff::Timestamp;

use crate::{
    mrkdwn,
    shared::Shared,
    teams::Team,
    web::{self, conversations, conversations::File, conversations::Message, files},
};

/// Messages of the thread that are told at most.
const MAX_MESSAGES: usize = 50;
/// Characters of one of them.
const MAX_MESSAGE_CHARS: usize = 8_000;
/// Bytes of all of them.
const MAX_THREAD_BYTES: usize = 300_000;
/// Bytes of one file. The API takes 2 MiB of attachments in all, and 4 MiB of everything.
const MAX_FILE_BYTES: usize = 1024 * 1024;
/// Bytes of all files.
const MAX_TOTAL_FILE_BYTES: usize = 1_900_000;
/// Files that are handed over at most; others are named.
const MAX_FILES: usize = 20;
/// Images and documents that the API takes as they are; text is taken whatever it is called.
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
    let (place, event) = (mention.thread_key(), &mention.event);
    let asked = serde_json::from_value::<Message>(event.clone()).unwrap_or_default();
    let before = shared.store.slack_message_before(&place, &mention.key.ts).await?;
    let told = if mention.thread == mention.key.ts {
        Vec::new()
    } else {
        let read = conversations::last_messages(
            &shared.web,
            &team.token,
            &place.channel,
            &place.thread,
            // What was told before is not read again: apps that are not of one's own may read a
            // thread once in a minute.
            (before.as_deref().unwrap_or_default(), &mention.key.ts),
            // The mention itself is among them.
            MAX_MESSAGES + 1,
        );
        match read.await {
            Ok(messages) => messages,
            // Without the thread the question can still be answered.
            Err(error @ web::Error::Refused { .. }) if !error.is_revoked() => {
                tracing::warn!(%error, channel = place.channel, "a thread cannot be read");
                Vec::new()
            }
            Err(error) => return Err(error.into()),
        }
    };
    let told: Vec<Message> = told
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
    // What is nearest to the question counts most.
    for message in told.iter().rev() {
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
    let question = readable_text(shared, team, &asked.text).await;
    let question = question.trim();
    let question =
        if question.is_empty() { "(no words; look at the thread and the files)" } else { question };
    let again =
        if mention.key.attempt > 0 { " once more, because it went wrong before" } else { "" };
    blocks.push(text_block(format!("{name} asks you in Slack{again}:\n\n{question}")));
    // Those of the question itself come first, then what is nearest to it.
    let files: Vec<&File> =
        [&asked].into_iter().chain(told.iter().rev()).flat_map(|message| &message.files).collect();
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
        (None, None) => "somebody".to_owned(),
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

/// Slack's markup as people see it: names for ids, and without the app's own name at the beginning.
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

/// The files that the API takes, and words about the others.
async fn attachment_blocks(
    shared: &Shared,
    team: &Team,
    files: &[&File],
) -> Result<Vec<v1::Block>, crate::error::Error> {
    let (mut blocks, mut left_out, mut size, mut seen) = (Vec::new(), Vec::new(), 0, Vec::new());
    for file in files {
        if seen.contains(&&file.id) {
            continue;
        }
        seen.push(&file.id);
        let name = file.name.as_deref().unwrap_or("file").replace(char::is_control, " ");
        let name = mrkdwn::truncate(&name, 200);
        let kind = media_type(file.mimetype.as_deref().unwrap_or_default());
        let length = file.size.unwrap_or(0);
        let mut leave = |why: &str| {
            left_out.push(format!(
                "{name} ({}, {length} bytes): {why}",
                file.mimetype.as_deref().unwrap_or("?")
            ))
        };
        let Some(kind) = kind else {
            leave("a file of this kind cannot be shown to you");
            continue;
        };
        let room = MAX_FILE_BYTES.min(MAX_TOTAL_FILE_BYTES.saturating_sub(size));
        if blocks.len() >= MAX_FILES || length > room as u64 {
            leave("it is too large, or there are too many");
            continue;
        }
        let Some(url) = &file.url_private_download else {
            leave("Slack does not hand it out");
            continue;
        };
        let data = match files::download(&shared.web, &team.token, url, room).await {
            Ok(Some(data)) if !data.is_empty() => data,
            Ok(_) => {
                leave("it is empty or too large");
                continue;
            }
            // Without the file the question can still be answered.
            Err(
                error @ (web::Error::Refused { .. }
                | web::Error::Limited { .. }
                | web::Error::Unknown { .. }),
            ) => {
                tracing::warn!(%error, file = file.id, "a file cannot be read");
                leave("it could not be read");
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let is_text = kind.starts_with("text/")
            || kind.starts_with("application/json")
            || kind.starts_with("application/xml");
        // Slack answers with a page for people where the token is not accepted.
        if is_text && (std::str::from_utf8(&data).is_err() || data.contains(&0)) {
            leave("it is no text in UTF-8");
            continue;
        }
        size += data.len();
        let attachment =
            v1::Attachment { media_type: kind, name, data, ..v1::Attachment::default() };
        blocks.push(v1::Block { block: Some(block::Block::Attachment(attachment)) });
    }
    if !left_out.is_empty() {
        blocks.push(text_block(format!(
            "Files in the thread that you cannot see:\n{}",
            left_out.join("\n")
        )));
    }
    Ok(blocks)
}

/// The media type to hand a file over as, if that can be done.
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
