//! Posts the answer, in place of "Working on it…" and below it.

use construct_proto::v1::{self, MessageSource, block};
use construct_runtime::clock;
use construct_store::slack::Mention;
use serde_json::json;

use crate::{
    error::Error,
    gateway::{Caller, call},
    mrkdwn,
    posts::{self, Posts},
    shared::Shared,
    texts,
    web::{chat::Content, files},
};

/// Messages of an answer at most. A longer one becomes a file.
const MAX_MESSAGES: usize = 3;
/// Messages of a transcript per page.
const PAGE_SIZE: i32 = 50;
/// The file name of a long answer.
const FILE_NAME: &str = "answer.md";

/// The key of the post that becomes the answer.
pub(crate) fn post_key(mention: &Mention) -> String {
    format!("{}.{}.answer", mention.key.ts, mention.key.attempt)
}

/// Posts the result of a question's turn.
pub(crate) async fn post_answer(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    mention: &mut Mention,
    message: &v1::Message,
    placeholder: &str,
) -> Result<(), Error> {
    let status = message.status.clone().unwrap_or_default();
    let text = final_text(shared, caller, mention, status.position).await?;
    let (thread_key, key) = (mention.thread_key(), post_key(mention));
    let at = (key.as_str(), placeholder);
    if !status.error.is_empty() {
        let mut content = texts::failure(&status.error, &mention.key);
        let parts = mrkdwn::messages(&text);
        let more = parts.len() > 1;
        if let Some(mut first) = parts.into_iter().next() {
            if more {
                first.push(mrkdwn::context("This is only the beginning of the text so far."));
            }
            content.blocks.splice(0..0, first);
        }
        return match posts.replace(&thread_key, at, &mention.key.ts, &content).await {
            Err(posts::Error::Slack(error)) if error.is_invalid_content() => {
                let content = texts::failure(&status.error, &mention.key);
                posts.replace(&thread_key, at, &mention.key.ts, &content).await?;
                Ok(())
            }
            result => Ok(result.map(drop)?),
        };
    }
    let mut messages = mrkdwn::messages(&text);
    if messages.is_empty() {
        posts
            .replace(
                &thread_key,
                at,
                &mention.key.ts,
                &texts::plain_text("Done. (There is no text to show.)"),
            )
            .await?;
        return Ok(());
    }
    let long = messages.len() > MAX_MESSAGES;
    if long {
        messages.truncate(1);
        messages[0].push(mrkdwn::context(
            "This is only the beginning. The whole answer is in the file below.",
        ));
    }
    let notification = texts::notification(&text);
    for (number, blocks) in messages.into_iter().enumerate() {
        let content = Content { text: notification.clone(), blocks };
        let part = format!("{key}.{number}");
        let result = if number == 0 {
            posts.replace(&thread_key, at, &mention.key.ts, &content).await
        } else if mention.file.is_some() {
            // An earlier attempt reached a part that Slack rejects, and crashed.
            return post_remainder_as_file(shared, posts, mention, &part, &text).await;
        } else {
            posts.post_once(&thread_key, &part, &mention.key.ts, &content).await
        };
        match result {
            Ok(_) => {}
            Err(posts::Error::Slack(error)) if number > 0 && error.is_invalid_content() => {
                tracing::warn!(%error, "posting an answer as a file: Slack rejected a part of it");
                shared.store.slack_post_forget(&thread_key, &part).await?;
                return post_remainder_as_file(shared, posts, mention, &part, &text).await;
            }
            // Slack rejects the format. The text is what counts.
            Err(posts::Error::Slack(error)) if error.is_invalid_content() => {
                tracing::warn!(%error, "posting an answer as a file: Slack rejected its blocks");
                posts
                    .replace(
                        &thread_key,
                        at,
                        &mention.key.ts,
                        &texts::plain_text("The answer is in the file below."),
                    )
                    .await?;
                return upload(shared, posts, mention, &text).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    if long { upload(shared, posts, mention, &text).await } else { Ok(()) }
}

/// Posts the whole answer as a file, because Slack rejects a part of it.
async fn post_remainder_as_file(
    shared: &Shared,
    posts: &Posts<'_>,
    mention: &mut Mention,
    key: &str,
    text: &str,
) -> Result<(), Error> {
    upload(shared, posts, mention, text).await?;
    let content = texts::plain_text("The whole answer is in the file.");
    posts.post_once(&mention.thread_key(), key, &mention.key.ts, &content).await?;
    Ok(())
}

/// The agent's last text in a turn, in Markdown.
async fn final_text(
    shared: &Shared,
    caller: &Caller,
    mention: &Mention,
    position: i64,
) -> Result<String, Error> {
    let (mut last, mut page_token) = (String::new(), String::new());
    loop {
        let request = v1::ListMessagesRequest {
            task: mention.task.clone().unwrap_or_default(),
            page: Some(v1::PageRequest {
                page_size: PAGE_SIZE,
                page_token,
                ..v1::PageRequest::default()
            }),
            filter: Some(v1::list_messages_request::Filter {
                after_position: position,
                ..Default::default()
            }),
        };
        let request = shared.gateway.request(caller, request);
        let answer = call(shared.gateway.messages().list_messages(request)).await?;
        for message in answer.messages {
            let source = message.status.as_ref().map(v1::MessageStatus::source).unwrap_or_default();
            match source {
                // The next question.
                MessageSource::User => return Ok(last),
                MessageSource::Assistant => {
                    let text = join_text(message.spec.unwrap_or_default().blocks);
                    if !text.trim().is_empty() {
                        last = text;
                    }
                }
                _ => {}
            }
        }
        page_token = answer.page.unwrap_or_default().next_page_token;
        if page_token.is_empty() {
            return Ok(last);
        }
    }
}

fn join_text(blocks: Vec<v1::Block>) -> String {
    let texts = blocks.into_iter().filter_map(|block| match block.block {
        Some(block::Block::Text(text)) => Some(text.text),
        _ => None,
    });
    texts.collect::<Vec<_>>().join("\n\n")
}

/// Posts a long answer as a file, once. A file that was not completed is invisible.
async fn upload(
    shared: &Shared,
    posts: &Posts<'_>,
    mention: &mut Mention,
    text: &str,
) -> Result<(), Error> {
    let thread_key = mention.thread_key();
    if let Some(file) = &mention.file
        && files::is_shared(posts.web, posts.token, file).await?
    {
        return Ok(());
    }
    let upload = files::begin_upload(posts.web, posts.token, FILE_NAME, text.len()).await?;
    files::send_content(posts.web, &upload, text.as_bytes().to_vec()).await?;
    mention.file = Some(upload.file_id.clone());
    shared.store.slack_mention_save(mention, false, clock::now()).await?;
    let (target, may_continue) =
        ((thread_key.channel.as_str(), thread_key.thread.as_str()), || posts.lease.is_held());
    match files::complete_upload(
        posts.web,
        posts.token,
        &upload.file_id,
        "Answer",
        target,
        &may_continue,
    )
    .await
    {
        Ok(()) => Ok(()),
        Err(error) if error.code() == Some("missing_scope") => {
            let content = Content {
                text: "The file could not be shown.".to_owned(),
                blocks: vec![json!({"type": "section", "text": {"type": "plain_text",
                    "text": "The file could not be shown: the app may not upload files (scope files:write)."}})],
            };
            posts
                .post_once(
                    &thread_key,
                    &format!("{}.file", post_key(mention)),
                    &mention.key.ts,
                    &content,
                )
                .await?;
            Ok(())
        }
        Err(error) => Err(posts::Error::from(error).into()),
    }
}
