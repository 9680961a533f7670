//! The service is killed at every point: no mention is lost, and none is answered twice.

use super::*;

/// Kills the service when it reaches a method with this fault, after `ask` has sent a question.
async fn kill_at(
    mesh: &mut Mesh,
    slack: &SlackServer,
    (method, fault): (&str, Fault),
    (words, thread): (&str, Option<&str>),
) -> String {
    slack.fail(method, fault);
    let before = slack.calls(method).len();
    let files = if method == "files-pri" {
        json!([slack.add_file("log.txt", "text/plain", b"what stands in it")])
    } else {
        json!([])
    };
    let (ts, event) = slack.ask(CHANNEL, ANN, thread, words, files);
    assert_eq!(slack.send_event(mesh, &event).await.unwrap(), 200);
    wait_for_call(slack, method, before).await;
    mesh.crash(Service::Slack).await.unwrap();
    ts
}

/// Checks that a question was asked once and answered once.
async fn assert_answered_once(
    mesh: &Mesh,
    slack: &SlackServer,
    (thread, ts): (&str, &str),
    words: &str,
    what: &str,
) {
    let key = format!("{ts}.0.answer");
    until(&format!("the answer after a kill at {what}"), TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, thread);
        let own: Vec<&Value> = posts
            .iter()
            .filter(|post| post["metadata"]["event_payload"]["key"] == key.as_str())
            .collect();
        match own.as_slice() {
            [post] if visible_text(post).contains(words) => Ok(()),
            _ => Err(posts),
        }
    })
    .await;
    let asked = asked_questions(mesh).await;
    assert_eq!(asked.iter().filter(|asked| asked.contains(words)).count(), 1, "{what}: {asked:#?}");
}

#[tokio::test]
async fn mention_is_answered_once_when_killed_reading_thread() {
    let (mut mesh, slack) = begin(&json!([{"text": "You said: {{last_user_text}}"}])).await;
    let root = slack.add_message(CHANNEL, BOB, None, "The beginning.", json!([]));
    for (number, fault) in [Fault::Hang, Fault::DoneAndHang].into_iter().enumerate() {
        for method in ["conversations.replies", "files-pri"] {
            let (words, what) =
                (format!("question {number} at {method}"), format!("{method}: {fault:?}"));
            let ts =
                kill_at(&mut mesh, &slack, (method, fault.clone()), (&words, Some(&root))).await;
            assert_answered_once(&mesh, &slack, (&root, &ts), &words, &what).await;
        }
    }
    assert_eq!(slack.posts(CHANNEL, &root).len(), 4);
    let told = asked_questions(&mesh).await.join("\n");
    assert_eq!(told.matches("The beginning.").count(), 1, "{told}");
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn mention_is_answered_once_when_killed_calling_gateway() {
    let (mut mesh, slack) = begin(&json!([{"text": "You said: {{last_user_text}}"}])).await;
    let gateway = construct_tests::proxy::Proxy::start(&construct_tests::proxy::authority(
        &mesh.gateway_url(),
    ))
    .await
    .unwrap();
    mesh.set_env("CONSTRUCT_SLACK_GATEWAY_URL", format!("http://{}", gateway.address()));
    mesh.crash(Service::Slack).await.unwrap();
    // The first question of a thread creates a task; the second one looks it up and sends a message
    // only.
    let root = ask(&mesh, &slack, (CHANNEL, ANN), "before").await;
    wait_for_answer(&slack, CHANNEL, &root, "before").await;
    for (number, thread) in
        [None, Some(root.as_str()), None, Some(root.as_str())].into_iter().enumerate()
    {
        let words = format!("question {number}");
        if number < 2 {
            gateway.slow(std::time::Duration::from_secs(2));
        } else {
            mesh.pause(Service::Gateway).unwrap();
        }
        let (ts, event) = slack.ask(CHANNEL, ANN, thread, &words, json!([]));
        assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
        if number < 2 {
            // The gateway has executed the request, and its answer is on its way.
            until("the question to be asked", TURN_TIMEOUT, async || {
                let asked = asked_questions(&mesh).await;
                if asked.iter().any(|asked| asked.contains(&words)) { Ok(()) } else { Err(asked) }
            })
            .await;
        } else if thread.is_none() {
            until("the question to be marked as taken", TURN_TIMEOUT, async || {
                if slack.posts(CHANNEL, &ts).is_empty() { Err("not yet") } else { Ok(()) }
            })
            .await;
        } else {
            until("the question to be written down", TURN_TIMEOUT, async || {
                let stored = mesh.database.contents().await;
                let is = |line: &str| line.starts_with("slack_mentions: ") && line.contains(&words);
                if stored.lines().any(is) { Ok(()) } else { Err("not yet") }
            })
            .await;
        }
        mesh.kill(Service::Slack).unwrap();
        gateway.restore();
        let _ = mesh.resume(Service::Gateway);
        mesh.spawn(Service::Slack).unwrap();
        mesh.wait_until_ready(Service::Slack).await.unwrap();
        let what = format!("the gateway, {number}");
        assert_answered_once(&mesh, &slack, (thread.unwrap_or(&ts), &ts), &words, &what).await;
    }
    let tasks =
        mesh.client().unwrap().tasks().list_tasks(v1::ListTasksRequest::default()).await.unwrap();
    assert_eq!(tasks.into_inner().tasks.len(), 3);
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn long_answer_is_shown_once_when_killed_uploading() {
    let lines: Vec<String> =
        (0..3_000).map(|number| format!("- line number {number} of the answer")).collect();
    let (mut mesh, slack) =
        begin(&json!({"count": "since_user", "turns": [{"text": lines}]})).await;
    for (method, fault) in [
        ("files.getUploadURLExternal", Fault::Hang),
        ("files.getUploadURLExternal", Fault::DoneAndHang),
        ("upload", Fault::Hang),
        ("upload", Fault::DoneAndHang),
        ("files.completeUploadExternal", Fault::Hang),
    ] {
        let what = format!("{method}: {fault:?}");
        let ts = kill_at(&mut mesh, &slack, (method, fault), ("hi", None)).await;
        until(&format!("the file after a kill at {what}"), TURN_TIMEOUT, async || {
            let files = slack.shown_files(CHANNEL, &ts);
            if files == [lines.join("\n")] { Ok(()) } else { Err(files.len()) }
        })
        .await;
        wait_for_answer(&slack, CHANNEL, &ts, "The whole answer is in the file below").await;
    }
    mesh.wait_for_metric(
        Service::Slack,
        r#"construct_slack_mentions_total{construct_outcome="answered"} 1"#,
    )
    .await;
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn mention_is_answered_once_when_killed_renewing_token() {
    let (mut mesh, slack) =
        begin_with(&json!([{"text": "You said: {{last_user_text}}"}]), |_, slack| {
            slack.rotate_tokens()
        })
        .await;
    // Slack's answer to the second request is lost with the process, and the refresh token is used
    // up: the token stays valid for a while.
    for (number, fault) in [Fault::Hang, Fault::DoneAndHang].into_iter().enumerate() {
        let (words, what) = (format!("question {number}"), format!("{fault:?}"));
        let ts = kill_at(&mut mesh, &slack, ("oauth.v2.access", fault), (&words, None)).await;
        assert_answered_once(&mesh, &slack, (&ts, &ts), &words, &what).await;
    }
    // After a new installation, it is renewed as before.
    slack.install(&mesh).await.unwrap();
    let renewed = slack.calls("oauth.v2.access").len();
    let ts = ask(&mesh, &slack, (CHANNEL, ANN), "at the end").await;
    wait_for_answer(&slack, CHANNEL, &ts, "at the end").await;
    assert!(slack.calls("oauth.v2.access").len() > renewed);
    assert_no_complaints(&slack);
}
