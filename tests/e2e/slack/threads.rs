//! Content of threads: files, edits, questions out of order, and messages that are too old.

use construct_proto::v1::block::Block;

use super::*;

#[tokio::test]
async fn files_are_passed_exactly_and_skipped_ones_named() {
    let (mesh, slack) = begin(&json!([{"text": "I have seen it."}])).await;
    let log = "error: it is broken — äöü\r\n\ttwice\n".as_bytes().to_vec();
    let image: Vec<u8> = b"\x89PNG\r\n\x1a\n"
        .iter()
        .copied()
        .chain((0..70_000_u32).map(|n| u8::try_from(n % 251).unwrap()))
        .collect();
    let huge = vec![b'x'; 1024 * 1024 + 1];
    let files = json!([
        slack.add_file("gone.txt", "text/plain", b"nobody reads this"),
        slack.add_file("log.txt", "text/plain", &log),
        slack.add_file("dot.png", "image/png", &image),
        slack.add_file("huge.txt", "text/plain", &huge),
        slack.add_file("program.bin", "application/octet-stream", b"\0\x01"),
    ]);
    // For each attempt.
    for _ in 0..3 {
        slack.fail("files-pri", Fault::Status(503));
    }
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "look", files);
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    wait_for_answer(&slack, CHANNEL, &ts, "I have seen it.").await;
    let tasks =
        mesh.client().unwrap().tasks().list_tasks(v1::ListTasksRequest::default()).await.unwrap();
    let task = tasks.into_inner().tasks[0].metadata.clone().unwrap_or_default().id;
    let transcript = mesh.client().unwrap().conversation(&task).transcript().await;
    let asked = transcript.from_source(v1::MessageSource::User)[0].spec.clone().unwrap();
    let (mut attached, mut told) = (Vec::new(), String::new());
    for block in asked.blocks.into_iter().filter_map(|block| block.block) {
        match block {
            Block::Attachment(file) => attached.push((file.name, file.media_type, file.data)),
            Block::Text(text) => told.push_str(&text.text),
            other => panic!("{other:?}"),
        }
    }
    let wanted = [
        ("log.txt".to_owned(), "text/plain".to_owned(), log),
        ("dot.png".to_owned(), "image/png".to_owned(), image),
    ];
    assert!(
        attached == wanted,
        "{:?}",
        attached.iter().map(|file| (&file.0, &file.1, file.2.len())).collect::<Vec<_>>()
    );
    for words in [
        "gone.txt (text/plain, 17 bytes): it could not be read",
        "huge.txt (text/plain, 1048577 bytes): it is too large",
        "program.bin (application/octet-stream, 2 bytes): a file of this kind",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn edited_question_is_not_repeated_and_reordered_are_answered() {
    let (mesh, slack) = begin(&json!([{"text": "You said: {{last_user_text}}"}])).await;
    let (ts, event) = slack.ask(DIRECT, ANN, None, "the first words", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, DIRECT, &ts, "the first words").await;
    // As Slack's event in a direct message, and once more as a message with a mention.
    let mut edited = event["event"].clone();
    edited["text"] = "the other words".into();
    edited["edited"] = json!({"user": ANN, "ts": "1760000009.000000"});
    let changed = json!({"type": "message", "subtype": "message_changed", "channel": DIRECT, "channel_type": "im",
        "hidden": true, "ts": "1760000009.000000", "event_ts": "1760000009.000000", "message": edited,
        "previous_message": event["event"]});
    for event in [changed, edited] {
        assert_eq!(slack.send_event(&mesh, &slack.envelope(event)).await.unwrap(), 200);
    }

    let (root, first) = slack.ask(CHANNEL, ANN, None, "question one", json!([]));
    let (_, second) = slack.ask(CHANNEL, BOB, Some(&root), "question two", json!([]));
    for event in [second, first] {
        assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    }
    until("both answers", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &root);
        let texts: Vec<String> = posts.iter().map(visible_text).collect();
        let both = ["asks you in Slack:\n\nquestion one", "asks you in Slack:\n\nquestion two"]
            .iter()
            .all(|words| texts.iter().any(|text| text.contains(words)));
        if posts.len() == 2 && both { Ok(()) } else { Err(posts) }
    })
    .await;
    let asked = asked_questions(&mesh).await;
    assert!(
        asked.len() == 3 && !asked.iter().any(|asked| asked.contains("the other words")),
        "{asked:#?}"
    );
    assert_eq!(slack.posts(DIRECT, &ts).len(), 1);
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn answer_to_uneditable_message_is_posted_below_once() {
    let (mut mesh, slack) = begin(&json!([{"text": "The answer."}])).await;
    // No model answers before the first message is too old.
    mesh.pause(Service::Providers).unwrap();
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    let placeholder = wait_for_answer(&slack, CHANNEL, &ts, "Working on it").await;
    slack.expire_edits(placeholder["ts"].as_str().unwrap());
    // It is killed after the new message is posted, and before that is recorded.
    slack.fail("chat.postMessage", Fault::DoneAndHang);
    mesh.resume(Service::Providers).unwrap();
    let both = async |what: &str| {
        until(what, TURN_TIMEOUT, async || {
            let posts = slack.posts(CHANNEL, &ts);
            match posts.as_slice() {
                [first, second]
                    if *first == placeholder && visible_text(second).contains("The answer.") =>
                {
                    Ok(())
                }
                _ => Err(posts),
            }
        })
        .await;
    };
    both("the answer below").await;
    mesh.crash(Service::Slack).await.unwrap();
    mesh.wait_for_metric(
        Service::Slack,
        r#"construct_slack_mentions_total{construct_outcome="answered"} 1"#,
    )
    .await;
    both("the answer to stay the only one").await;
    assert_no_complaints(&slack);
}
