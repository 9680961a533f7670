//! The answer, in the place of "Working on it…" and below it.

use construct_proto::v1::{self, MessageSource, block};
use construct_runtime::clock;
use construct_store::slack::Mention;
use serde_json::json;

use crate::{
    Shared,
    gateway::{Caller, call},
    mention::{Trouble, answer_key},
    mrkdwn,
    posts::{self, Posts},
    web::{chat::Content, files},
    words,
};

/// Messages that an answer may become; a longer one becomes a file.
const MESSAGES: usize = 3;
/// Messages of a transcript read at once.
const PAGE: i32 = 50;
/// What a long answer is called.
const FILE_NAME: &str = "answer.md";

/// Shows how a question's turn has ended.
pub(crate) async fn give(
    shared: &Shared,
    (posts, caller): (&Posts<'_>, &Caller),
    mention: &mut Mention,
    message: &v1::Message,
    placeholder: &str,
) -> Result<(), Trouble> {
    let status = message.status.clone().unwrap_or_default();
    let text = written(shared, caller, mention, status.position).await?;
    let (place, key) = (mention.place(), answer_key(mention));
    let at = (key.as_str(), placeholder);
    if !status.error.is_empty() {
        let mut content = words::failed(&status.error, &mention.key);
        let written = mrkdwn::messages(&text);
        let more = written.len() > 1;
        if let Some(mut first) = written.into_iter().next() {
            if more {
                first.push(mrkdwn::context(
                    "This is only the beginning of what was written until then.",
                ));
            }
            content.blocks.splice(0..0, first);
        }
        return match posts.replace(&place, at, &mention.key.ts, &content).await {
            Err(posts::Error::Slack(error)) if error.is_shape() => {
                let content = words::failed(&status.error, &mention.key);
                posts.replace(&place, at, &mention.key.ts, &content).await?;
                Ok(())
            }
            done => Ok(done.map(drop)?),
        };
    }
    let mut messages = mrkdwn::messages(&text);
    if messages.is_empty() {
        posts
            .replace(
                &place,
                at,
                &mention.key.ts,
                &words::plain("Done. (I have nothing to add in words.)"),
            )
            .await?;
        return Ok(());
    }
    let long = messages.len() > MESSAGES;
    if long {
        messages.truncate(1);
        messages[0].push(mrkdwn::context(
            "This is only the beginning. The whole answer is in the file below.",
        ));
    }
    let notification = words::notification(&text);
    for (number, blocks) in messages.into_iter().enumerate() {
        let content = Content { text: notification.clone(), blocks };
        let part = format!("{key}.{number}");
        let done = if number == 0 {
            posts.replace(&place, at, &mention.key.ts, &content).await
        } else if mention.file.is_some() {
            // Somebody has come to a part that Slack does not take, and died.
            return rest(shared, posts, mention, &part, &text).await;
        } else {
            posts.once(&place, &part, &mention.key.ts, &content).await
        };
        match done {
            Ok(_) => {}
            Err(posts::Error::Slack(error)) if number > 0 && error.is_shape() => {
                tracing::warn!(%error, "an answer is shown as a file, because Slack does not take a part of it");
                shared.store.slack_post_forget(&place, &part).await?;
                return rest(shared, posts, mention, &part, &text).await;
            }
            // Slack finds fault with how it looks. The words are what counts.
            Err(posts::Error::Slack(error)) if error.is_shape() => {
                tracing::warn!(%error, "an answer is shown as a file, because Slack does not take its blocks");
                posts
                    .replace(
                        &place,
                        at,
                        &mention.key.ts,
                        &words::plain("The answer is in the file below."),
                    )
                    .await?;
                return upload(shared, posts, mention, &text).await;
            }
            Err(error) => return Err(error.into()),
        }
    }
    if long { upload(shared, posts, mention, &text).await } else { Ok(()) }
}

/// Shows the whole answer as a file, where Slack does not take a part of it.
async fn rest(
    shared: &Shared,
    posts: &Posts<'_>,
    mention: &mut Mention,
    key: &str,
    text: &str,
) -> Result<(), Trouble> {
    upload(shared, posts, mention, text).await?;
    let content = words::plain("The whole answer is in the file.");
    posts.once(&mention.place(), key, &mention.key.ts, &content).await?;
    Ok(())
}

/// What the agent has said last in a turn, in Markdown.
async fn written(
    shared: &Shared,
    caller: &Caller,
    mention: &Mention,
    position: i64,
) -> Result<String, Trouble> {
    let (mut last, mut page_token) = (String::new(), String::new());
    loop {
        let request = v1::ListMessagesRequest {
            task: mention.task.clone().unwrap_or_default(),
            page: Some(v1::PageRequest {
                page_size: PAGE,
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
                    let text = text_of(message.spec.unwrap_or_default().blocks);
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

fn text_of(blocks: Vec<v1::Block>) -> String {
    let texts = blocks.into_iter().filter_map(|block| match block.block {
        Some(block::Block::Text(text)) => Some(text.text),
        _ => None,
    });
    texts.collect::<Vec<_>>().join("\n\n")
}

/// Shows a long answer as a file, once: a file that nobody has completed is seen by nobody.
async fn upload(
    shared: &Shared,
    posts: &Posts<'_>,
    mention: &mut Mention,
    text: &str,
) -> Result<(), Trouble> {
    let place = mention.place();
    if let Some(file) = &mention.file
        && files::is_shared(posts.web, posts.token, file).await?
    {
        return Ok(());
    }
    let upload = files::begin(posts.web, posts.token, FILE_NAME, text.len()).await?;
    files::send(posts.web, &upload, text.as_bytes().to_vec()).await?;
    mention.file = Some(upload.file_id.clone());
    shared.store.slack_mention_save(mention, false, clock::now()).await?;
    let (there, leave) =
        ((place.channel.as_str(), place.thread.as_str()), || posts.right.is_held());
    match files::complete(posts.web, posts.token, &upload.file_id, "Answer", there, &leave).await {
        Ok(()) => Ok(()),
        Err(error) if error.code() == Some("missing_scope") => {
            let content = Content {
                text: "The file could not be shown.".to_owned(),
                blocks: vec![json!({"type": "section", "text": {"type": "plain_text",
                    "text": "The file could not be shown: the app may not upload files (scope files:write)."}})],
            };
            posts
                .once(&place, &format!("{}.file", answer_key(mention)), &mention.key.ts, &content)
                .await?;
            Ok(())
        }
        Err(error) => Err(posts::Error::from(error).into()),
    }
}
