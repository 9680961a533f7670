//! An agent in a channel: the whole mesh with the Slack service, and a Slack that is a real HTTP
//! server.

mod crashes;
mod home;
mod installation;
mod members;
mod organizations;
mod permissions;
mod socket;
mod subtasks;
mod threads;

use construct_proto::v1;
use construct_tests::{
    client::TURN_TIMEOUT,
    http,
    mesh::{Mesh, Service},
    slack::{
        ANN, BOB, CARL, CHANNEL, CONNECT_KEY, DIRECT, Fault, GUEST, PRIVATE, STRANGER, SlackServer,
        visible_text,
    },
    wait::until,
};
use serde_json::{Value, json};

/// A mesh with the Slack service, installed in a workspace, and a scripted agent.
async fn begin(script: &Value) -> (Mesh, SlackServer) {
    begin_with(script, |_, _| ()).await
}

/// The same with additional settings.
async fn begin_with(
    script: &Value,
    set: impl FnOnce(&mut Mesh, &SlackServer),
) -> (Mesh, SlackServer) {
    let slack = SlackServer::start().await;
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    slack.configure(&mut mesh);
    set(&mut mesh, &slack);
    mesh.start_services().await.unwrap();
    mesh.scripted_agent("helper", script).await.unwrap();
    mesh.spawn(Service::Slack).unwrap();
    mesh.wait_until_ready(Service::Slack).await.unwrap();
    slack.install(&mesh).await.unwrap();
    (mesh, slack)
}

/// Waits until the only post of a thread shows this text.
async fn wait_for_answer(slack: &SlackServer, channel: &str, thread: &str, words: &str) -> Value {
    until(&format!("an answer with {words:?}"), TURN_TIMEOUT, async || {
        let posts = slack.posts(channel, thread);
        match posts.as_slice() {
            [post] if visible_text(post).contains(words) => Ok(post.clone()),
            _ => Err(format!("{posts:#?}")),
        }
    })
    .await
}

/// Sends the event of a question, which the service accepts. Returns its `ts`.
async fn ask(
    mesh: &Mesh,
    slack: &SlackServer,
    (channel, user): (&str, &str),
    words: &str,
) -> String {
    let (ts, event) = slack.ask(channel, user, None, words, json!([]));
    assert_eq!(slack.send_event(mesh, &event).await.unwrap(), 200);
    ts
}

/// Waits until the service has called a method more than `before` times.
async fn wait_for_call(slack: &SlackServer, method: &str, before: usize) {
    until(&format!("the service to be at {method}"), TURN_TIMEOUT, async || {
        let calls = slack.calls(method).len();
        if calls > before { Ok(()) } else { Err(calls) }
    })
    .await;
}

/// The questions that the mesh was asked, over all tasks.
async fn asked_questions(mesh: &Mesh) -> Vec<String> {
    let client = mesh.client().unwrap();
    let page = v1::PageRequest { page_size: 100, ..v1::PageRequest::default() };
    let request = v1::ListTasksRequest { page: Some(page), ..v1::ListTasksRequest::default() };
    let mut questions = Vec::new();
    for task in client.tasks().list_tasks(request).await.unwrap().into_inner().tasks {
        let id = task.metadata.unwrap_or_default().id;
        let filter = v1::list_messages_request::Filter {
            source: v1::MessageSource::User.into(),
            ..Default::default()
        };
        let request = v1::ListMessagesRequest { task: id, page: None, filter: Some(filter) };
        let messages =
            client.messages().list_messages(request).await.unwrap().into_inner().messages;
        questions.extend(messages.iter().map(|message| format!("{:?}", message.spec)));
    }
    questions
}

fn assert_no_complaints(slack: &SlackServer) {
    assert_eq!(slack.complaints(), Vec::<String>::new());
}

#[tokio::test]
async fn mention_is_answered_and_the_next_continues_the_task() {
    let script = json!({"count": "total", "turns": [
        {"text": "# Found\n\nIt is **here**: <!channel> [link](https://example.com/?a=1&b=2)", "delay_ms": 300},
        {"text": "You said: {{last_user_text}}"},
    ]});
    let (mesh, slack) = begin(&script).await;
    slack.add_message(CHANNEL, BOB, None, "Unrelated.", json!([]));
    let root =
        slack.add_message(CHANNEL, BOB, None, "The build is red since <@U0ANN> pushed.", json!([]));
    slack.add_message(CHANNEL, ANN, Some(&root), "Which build?", json!([]));
    let file = slack.add_file("log.txt", "text/plain", b"error: it is broken\n");
    let (ts, event) = slack.ask(CHANNEL, ANN, Some(&root), "please look", json!([file]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    let post = wait_for_answer(&slack, CHANNEL, &root, "It is *here*").await;
    assert_eq!(post["metadata"]["event_payload"]["key"], format!("{ts}.0.answer"));
    let text = visible_text(&post);
    assert!(
        text.contains("&lt;!channel&gt;")
            && text.contains("<https://example.com/?a=1&amp;b=2|link>"),
        "{text}"
    );
    assert!(slack.calls("chat.postMessage")[0].arguments.to_string().contains("Working on it…"));

    // The agent's messages.
    let tasks =
        mesh.client().unwrap().tasks().list_tasks(v1::ListTasksRequest::default()).await.unwrap();
    let tasks = tasks.into_inner().tasks;
    assert_eq!(tasks.len(), 1);
    let conversation = mesh.client().unwrap().conversation(&tasks[0].metadata.as_ref().unwrap().id);
    let told = format!("{:?}", conversation.transcript().await);
    for words in [
        "Bob: The build is red since @Ann pushed.",
        "Ann: Which build?",
        "Ann asks you in Slack",
        "please look",
        "log.txt",
    ] {
        assert!(told.contains(words), "{words}: {told}");
    }
    assert!(!told.contains("Unrelated") && !told.contains("U0BOT"), "{told}");

    // The same mention as Slack resends it, with another id; and a new one.
    assert_eq!(
        slack.send_event(&mesh, &slack.envelope(event["event"].clone())).await.unwrap(),
        200
    );
    slack.add_message(CHANNEL, BOB, Some(&root), "It is green again.", json!([]));
    let (_, event) = slack.ask(CHANNEL, BOB, Some(&root), "thanks, and now?", json!([]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    until("the second answer", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &root);
        if posts.len() == 2 && visible_text(&posts[1]).contains("You said") {
            Ok(())
        } else {
            Err(posts)
        }
    })
    .await;
    let posts = slack.posts(CHANNEL, &root);
    assert!(visible_text(&posts[1]).contains("thanks, and now?"), "{posts:#?}");
    let told = format!("{:?}", conversation.transcript().await);
    assert!(told.contains("It is green again."), "{told}");
    assert_eq!(told.matches("Which build?").count(), 1, "{told}");
    mesh.wait_for_metric(
        Service::Slack,
        r#"construct_slack_mentions_total{construct_outcome="answered"} 2"#,
    )
    .await;
    crate::metrics::compare(&mesh, &[Service::Slack]).await;
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn strangers_and_guests_are_refused_and_bots_ignored() {
    let (mesh, slack) = begin(&json!([{"text": "Hello."}])).await;
    for user in [GUEST, STRANGER] {
        let (ts, event) = slack.ask(CHANNEL, user, None, "hi", json!([]));
        slack.send_event(&mesh, &event).await.unwrap();
        wait_for_answer(&slack, CHANNEL, &ts, "I am sorry").await;
    }
    let (from_bot, mut event) = slack.ask(CHANNEL, BOB, None, "hi", json!([]));
    event["event"]["bot_id"] = "B0OTHER".into();
    slack.send_event(&mesh, &event).await.unwrap();
    // In a shared channel, Slack may name another workspace outside; the app's workspace is inside.
    let (ts, mut event) = slack.ask(DIRECT, ANN, None, "hi", json!([]));
    event["team_id"] = "T0ELSE".into();
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, DIRECT, &ts, "Hello.").await;
    assert_eq!(slack.posts(CHANNEL, &from_bot), Vec::<Value>::new());
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn answer_is_posted_once_to_busy_or_failing_slack() {
    let (mesh, slack) = begin(&json!([{"text": "The answer."}])).await;
    slack.fail("chat.postMessage", Fault::Limited(1));
    slack.fail("chat.postMessage", Fault::DoneAnd(500));
    slack.fail("chat.update", Fault::Status(503));
    slack.fail("users.info", Fault::Status(500));
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "The answer.").await;
    let posts = slack.calls("chat.postMessage");
    assert_eq!(posts.len(), 2, "{posts:?}");
    assert!(posts[1].at - posts[0].at >= std::time::Duration::from_secs(1), "{posts:?}");
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn mention_is_answered_once_across_service_crashes() {
    let (mut mesh, slack) =
        begin(&json!([{"text": "The answer to {{last_user_text}}.", "delay_ms": 200}])).await;
    let boundaries = [
        ("users.info", Fault::Hang),
        ("chat.postMessage", Fault::Hang),
        ("chat.postMessage", Fault::DoneAndHang),
        ("chat.update", Fault::Hang),
        ("chat.update", Fault::DoneAndHang),
    ];
    for (number, (method, fault)) in boundaries.into_iter().enumerate() {
        slack.fail(method, fault.clone());
        let before = slack.calls(method).len();
        let words = format!("question {number}");
        let (ts, event) = slack.ask(CHANNEL, ANN, None, &words, json!([]));
        assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
        until(&format!("the service to be at {method}"), TURN_TIMEOUT, async || {
            let calls = slack.calls(method).len();
            // Names are cached, so that only the first one is requested.
            if calls > before { Ok(()) } else { Err(calls) }
        })
        .await;
        mesh.crash(Service::Slack).await.unwrap();
        wait_for_answer(&slack, CHANNEL, &ts, &words).await;
        let asked = asked_questions(&mesh).await;
        assert_eq!(
            asked.iter().filter(|asked| asked.contains(&words)).count(),
            1,
            "{method} {fault:?}: {asked:#?}"
        );
        assert_eq!(slack.posts(CHANNEL, &ts).len(), 1, "{method} {fault:?}");
    }
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn many_mentions_are_answered_once_across_all_crashes() {
    let (mut mesh, slack) =
        begin(&json!([{"text": "The answer to {{last_user_text}}.", "delay_ms": 300}])).await;
    let mut asked = Vec::new();
    for round in 0..6_u64 {
        let calls = slack.calls("chat.postMessage").len();
        for number in 0..3 {
            let words = format!("question {round}-{number}");
            let (ts, event) = slack.ask(CHANNEL, ANN, None, &words, json!([]));
            // Slack resends unconfirmed events with another id, and sometimes confirmed ones.
            until("a delivery to be confirmed", TURN_TIMEOUT, async || {
                match slack.send_event(&mesh, &slack.envelope(event["event"].clone())).await {
                    Ok(200) => Ok(()),
                    other => Err(format!("{other:?}")),
                }
            })
            .await;
            let again =
                slack.send_event(&mesh, &slack.envelope(event["event"].clone())).await.unwrap();
            assert_eq!(again, 200);
            asked.push((ts, words));
        }
        // At any point between the delivery and the answer.
        until("something to be posted", TURN_TIMEOUT, async || {
            let posted = slack.calls("chat.postMessage").len();
            if posted > calls || round % 3 == 2 { Ok(()) } else { Err(posted) }
        })
        .await;
        mesh.crash(if round % 2 == 0 { Service::Slack } else { Service::Gateway }).await.unwrap();
    }
    for (ts, words) in &asked {
        wait_for_answer(&slack, CHANNEL, ts, words).await;
    }
    let questions = asked_questions(&mesh).await;
    for (_, words) in &asked {
        assert_eq!(
            questions.iter().filter(|asked| asked.contains(words)).count(),
            1,
            "{words}: {questions:#?}"
        );
    }
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn call_is_approved_by_its_requester_for_shown_arguments() {
    let script = json!([
        {"text": "I shall do it.", "code": "create_file('secrets/key', 'the <key>').status"},
        {"text": "Done: {{last_result}}"},
    ]);
    let (mesh, slack) = begin(&script).await;
    let rule = v1::PolicyRule {
        action: v1::PolicyAction::Ask.into(),
        tools: vec!["create_file".to_owned()],
        reason: "it is secret".to_owned(),
        ..v1::PolicyRule::default()
    };
    let update = v1::UpdateAgentRequest {
        agent: "helper".to_owned(),
        policy: Some(v1::Policy { rules: vec![rule] }),
        ..v1::UpdateAgentRequest::default()
    };
    mesh.client().unwrap().agents().update_agent(update).await.unwrap();
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "write the key", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    let question = until("a question with buttons", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &ts);
        match posts.get(1) {
            Some(post) if visible_text(post).contains("May I call `create_file`?") => {
                Ok(post.clone())
            }
            _ => Err(posts),
        }
    })
    .await;
    let text = visible_text(&question);
    assert!(
        text.contains("secrets/key")
            && text.contains("the &lt;key&gt;")
            && text.contains("it is secret"),
        "{text}"
    );
    let at = question["ts"].as_str().unwrap();
    // Another user asks in the same thread, and waits as well: that gives no right to decide about
    // Ann's calls.
    let (_, event) = slack.ask(CHANNEL, CARL, Some(&ts), "and me?", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    until("the second question to be taken", TURN_TIMEOUT, async || {
        let asked = asked_questions(&mesh).await;
        if asked.iter().any(|asked| asked.contains("and me?")) { Ok(()) } else { Err(asked) }
    })
    .await;
    // Neither may a guest, and both get a refusal.
    for user in [CARL, GUEST] {
        assert_eq!(slack.press(&mesh, user, CHANNEL, at, "construct_approve").await.unwrap(), 200);
        until("a refusal to another user", TURN_TIMEOUT, async || {
            let ephemeral_messages = slack.ephemeral_messages();
            if ephemeral_messages.iter().any(|whisper| whisper["user"] == user) {
                Ok(())
            } else {
                Err(ephemeral_messages)
            }
        })
        .await;
    }
    assert_eq!(slack.press(&mesh, ANN, CHANNEL, at, "construct_approve").await.unwrap(), 200);
    until("the answer", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &ts);
        if posts.first().is_some_and(|post| visible_text(post).contains("Done:")) {
            Ok(())
        } else {
            Err(posts)
        }
    })
    .await;
    let closed = visible_text(&slack.message(CHANNEL, at).unwrap());
    assert!(closed.contains("Approved by <@U0ANN>") && closed.contains("secrets/key"), "{closed}");
    // Two calls waited, and each was asked about once.
    let asked = slack
        .calls("chat.postMessage")
        .into_iter()
        .map(|call| call.arguments["metadata"]["event_payload"]["key"].to_string());
    let mut asked: Vec<String> = asked.filter(|key| key.contains("approval.")).collect();
    let all = asked.len();
    asked.sort();
    asked.dedup();
    assert!(all > 0 && asked.len() == all, "{asked:?}");
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn failure_is_explained_and_retried_once_by_button() {
    let fault =
        json!({"class": "invalid_request", "times": 0, "message": "the model is on holiday"});
    let script = json!({"count": "since_user", "conversations": [{"match": "once more", "turns": [{"text": "All is well."}]}],
                        "turns": [{"text": "", "fault": fault}]});
    let (mesh, slack) = begin(&script).await;
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    let failed = wait_for_answer(&slack, CHANNEL, &ts, "I could not finish this").await;
    let at = failed["ts"].as_str().unwrap();
    // Not for users who may not ask; the button stays for those who may.
    assert_eq!(slack.press(&mesh, GUEST, CHANNEL, at, "construct_retry").await.unwrap(), 200);
    until("a refusal to a guest", TURN_TIMEOUT, async || {
        let ephemeral_messages = slack.ephemeral_messages();
        if ephemeral_messages.iter().any(|whisper| whisper["user"] == GUEST) {
            Ok(())
        } else {
            Err(ephemeral_messages)
        }
    })
    .await;
    assert_eq!(slack.posts(CHANNEL, &ts), std::slice::from_ref(&failed));
    for _ in 0..2 {
        assert_eq!(
            slack.press(&mesh, ANN, CHANNEL, at, "construct_retry").await.unwrap_or(200),
            200
        );
    }
    until("the second try", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &ts);
        match posts.as_slice() {
            [first, second]
                if visible_text(second).contains("All is well.")
                    && visible_text(first).contains("asked me to try again") =>
            {
                Ok(())
            }
            _ => Err(posts),
        }
    })
    .await;
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn long_answer_becomes_one_file() {
    let lines: Vec<String> =
        (0..3_000).map(|number| format!("- line number {number} of the answer")).collect();
    let (mut mesh, slack) = begin(&json!([{"text": lines}])).await;
    slack.fail("files.completeUploadExternal", Fault::DoneAndHang);
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    until("the file to be shown", TURN_TIMEOUT, async || {
        let files = slack.shown_files(CHANNEL, &ts);
        if files.len() == 1 { Ok(()) } else { Err(files.len()) }
    })
    .await;
    mesh.crash(Service::Slack).await.unwrap();
    let (_, event) = slack.ask(DIRECT, ANN, None, "and another", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    until("the service to continue", TURN_TIMEOUT, async || {
        let asked = slack.calls("files.info").len();
        if asked > 0 { Ok(()) } else { Err(asked) }
    })
    .await;
    wait_for_answer(&slack, CHANNEL, &ts, "The whole answer is in the file below").await;
    assert_eq!(slack.shown_files(CHANNEL, &ts), [lines.join("\n")]);
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn answer_part_refused_by_slack_becomes_a_file() {
    let lines: Vec<String> = (0..300)
        .map(|number| format!("- line number {number} of an answer with many lines"))
        .collect();
    let (mesh, slack) = begin(&json!([{"text": lines}])).await;
    // No model answers before the refusal is set up.
    mesh.pause(Service::Providers).unwrap();
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "Working on it").await;
    slack.fail("chat.postMessage", Fault::Refuse("invalid_blocks"));
    mesh.resume(Service::Providers).unwrap();
    until("the rest of the answer", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &ts);
        match posts.as_slice() {
            [first, second]
                if visible_text(first).contains("line number 0 ")
                    && visible_text(second).contains("The whole answer is in the file") =>
            {
                Ok(())
            }
            _ => Err(posts),
        }
    })
    .await;
    assert_eq!(slack.shown_files(CHANNEL, &ts), [lines.join("\n")]);
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn thread_continues_only_for_users_of_its_agent() {
    let (mesh, slack) = begin(&json!([{"text": "Hello from the helper."}])).await;
    mesh.scripted_agent("reviewer", &json!([{"text": "Reviewed."}])).await.unwrap();
    for allowed in ["helper", "reviewer <@U0ANN|ann>"] {
        slack.command(&mesh, BOB, CHANNEL, &format!("allow use {allowed}")).await.unwrap();
        until("the permission to be given", TURN_TIMEOUT, async || {
            let said = format!("{:?}", slack.responses());
            if said.contains(&format!("*{}*", allowed.split(' ').next().unwrap())) {
                Ok(())
            } else {
                Err(said)
            }
        })
        .await;
    }
    slack.command(&mesh, ANN, CHANNEL, "run reviewer look").await.unwrap();
    let post = until("the question in the channel", TURN_TIMEOUT, async || {
        let posts = slack.channel_posts(CHANNEL);
        posts.first().cloned().ok_or(posts)
    })
    .await;
    let thread = post["ts"].as_str().unwrap();
    wait_for_answer(&slack, CHANNEL, thread, "Reviewed.").await;
    // Carl may ask the helper, which answers mentions everywhere else.
    let (_, event) = slack.ask(CHANNEL, CARL, Some(thread), "go on", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    until("a refusal", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, thread);
        if posts.len() == 2 && visible_text(&posts[1]).contains("you may not use this agent here") {
            Ok(())
        } else {
            Err(posts)
        }
    })
    .await;
    assert!(!asked_questions(&mesh).await.iter().any(|asked| asked.contains("go on")));
    let (ts, event) = slack.ask(CHANNEL, CARL, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "Hello from the helper.").await;
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn commands_home_and_links_show_current_state() {
    let (mesh, slack) = begin(&json!([{"text": "Hello."}])).await;
    assert!(slack.command(&mesh, ANN, CHANNEL, "help").await.unwrap().contains("/construct list"));
    slack.command(&mesh, ANN, CHANNEL, "list").await.unwrap();
    until("the list", TURN_TIMEOUT, async || {
        let said = slack.responses();
        if said
            .iter()
            .any(|said| said["text"].as_str().is_some_and(|text| text.contains("*helper*")))
        {
            Ok(())
        } else {
            Err(said)
        }
    })
    .await;
    slack.command(&mesh, ANN, CHANNEL, "run helper greet <!channel> us").await.unwrap();
    let post = until("the question in the channel", TURN_TIMEOUT, async || {
        let posts = slack.channel_posts(CHANNEL);
        posts.first().cloned().ok_or(posts)
    })
    .await;
    let ts = post["ts"].as_str().unwrap();
    wait_for_answer(&slack, CHANNEL, ts, "Hello.").await;

    // Failures are explained.
    slack.fail("views.open", Fault::Refuse("expired_trigger_id"));
    slack.command(&mesh, ANN, CHANNEL, "run").await.unwrap();
    until("a message to Ann", TURN_TIMEOUT, async || {
        let said = slack.responses();
        if said.iter().any(|said| said.to_string().contains("it took too long")) {
            Ok(())
        } else {
            Err(said)
        }
    })
    .await;
    slack.command(&mesh, ANN, CHANNEL, "run").await.unwrap();
    let form =
        until("the form", TURN_TIMEOUT, async || slack.forms().first().cloned().ok_or("none"))
            .await;
    assert_eq!(form["callback_id"], "construct_run");
    let values = json!({"agent": {"agent": {"selected_option": {"value": "helper"}}}, "words": {"words": {"value": "By form."}}});
    let sent = json!({"type": "view_submission", "team": {"id": "T0TEAM1"}, "user": {"id": ANN},
        "view": {"id": "V1", "hash": "1.2", "callback_id": "construct_run", "private_metadata": CHANNEL, "state": {"values": values}}});
    for _ in 0..2 {
        assert_eq!(slack.send_action(&mesh, &sent).await.unwrap(), 200);
    }
    until("the second question", TURN_TIMEOUT, async || {
        let posts = slack.channel_posts(CHANNEL);
        if posts.len() == 2 && visible_text(&posts[1]).contains("By form.") {
            Ok(())
        } else {
            Err(posts)
        }
    })
    .await;
    slack.command(&mesh, ANN, PRIVATE, "run helper hello").await.unwrap();
    until("the way in", TURN_TIMEOUT, async || {
        let said = slack.responses();
        if said
            .iter()
            .any(|said| said["text"].as_str().is_some_and(|text| text.contains("/invite")))
        {
            Ok(())
        } else {
            Err(said)
        }
    })
    .await;

    // A form that was opened in such a channel: the app cannot post there, not even to one user.
    let mut elsewhere = sent.clone();
    (elsewhere["view"]["id"], elsewhere["view"]["private_metadata"]) =
        ("V2".into(), PRIVATE.into());
    assert_eq!(slack.send_action(&mesh, &elsewhere).await.unwrap(), 200);
    until("the way in, in the conversation with Ann", TURN_TIMEOUT, async || {
        let posts = slack.channel_posts(DIRECT);
        if posts.iter().any(|post| visible_text(post).contains("/invite")) {
            Ok(())
        } else {
            Err(posts)
        }
    })
    .await;

    let opened = slack.envelope(
        json!({"type": "app_home_opened", "user": ANN, "channel": DIRECT, "tab": "home"}),
    );
    slack.send_event(&mesh, &opened).await.unwrap();
    let home = until("the home", TURN_TIMEOUT, async || slack.home(ANN).ok_or("none")).await;
    assert!(visible_text(&home).contains("messages · $0."), "{home}");
    let tasks = mesh
        .client()
        .unwrap()
        .tasks()
        .list_tasks(v1::ListTasksRequest::default())
        .await
        .unwrap()
        .into_inner()
        .tasks;
    let id = tasks[0].metadata.as_ref().unwrap().id.clone();
    let url = format!("https://construct.example/tasks/{id}");
    let shared = json!({"type": "link_shared", "user": BOB, "channel": CHANNEL, "message_ts": ts,
                        "links": [{"domain": "construct.example", "url": url}]});
    slack.send_event(&mesh, &slack.envelope(shared)).await.unwrap();
    let unfurled = until("the link to be unfurled", TURN_TIMEOUT, async || {
        slack.unfurls().first().cloned().ok_or("none")
    })
    .await;
    assert!(unfurled["unfurls"][&url].to_string().contains("messages"), "{unfurled}");

    // Permissions: only admins grant them, and then only they count.
    slack.command(&mesh, ANN, CHANNEL, "allow use helper").await.unwrap();
    slack.command(&mesh, BOB, CHANNEL, "allow use helper <@U0BOB|bob>").await.unwrap();
    until("the messages to both", TURN_TIMEOUT, async || {
        let said = format!("{:?}", slack.responses());
        if said.contains("Only admins") && said.contains("Allowed: <@U0BOB> may ask *helper*") {
            Ok(())
        } else {
            Err(said)
        }
    })
    .await;
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "you may not use this agent here").await;
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn huge_threads_and_deleted_messages_are_handled() {
    let (mesh, slack) = begin(&json!([{"text": "You said {{last_user_text}}"}])).await;
    let root = slack.add_message(CHANNEL, BOB, None, "The beginning.", json!([]));
    for number in 0..2_500 {
        slack.add_message(CHANNEL, ANN, Some(&root), &format!("remark {number}."), json!([]));
    }
    // No model answers before the first message is deleted.
    mesh.pause(Service::Providers).unwrap();
    let (_, event) = slack.ask(CHANNEL, ANN, Some(&root), "sum up", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    let placeholder = wait_for_answer(&slack, CHANNEL, &root, "Working on it").await;
    // It is deleted while the agent works: the answer is posted anew.
    slack.delete(CHANNEL, placeholder["ts"].as_str().unwrap());
    mesh.resume(Service::Providers).unwrap();
    wait_for_answer(&slack, CHANNEL, &root, "You said").await;
    let asked = asked_questions(&mesh).await.join("\n");
    assert!(
        asked.contains("remark 2499.")
            && asked.contains("remark 2450.")
            && !asked.contains("remark 2449."),
        "{asked}"
    );

    // The question itself is deleted before the answer: there is nowhere to answer, and nothing
    // else is affected.
    let (gone, event) = slack.ask(CHANNEL, ANN, None, "never mind", json!([]));
    slack.delete(CHANNEL, &gone);
    slack.send_event(&mesh, &event).await.unwrap();
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "You said").await;
    assert_eq!(slack.posts(CHANNEL, &gone), Vec::<Value>::new());
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn progress_is_updated_in_place_and_dropped_when_slack_is_busy() {
    let script = json!([
        {"text": "Let me look.", "code": "execute_command(\"echo '<!here>'; sleep 6\"); 1"},
        {"text": "It is done.", "tokens_per_second": 4},
    ]);
    let (mesh, slack) = begin(&script).await;
    slack.fail("chat.update", Fault::Limited(2));
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "go", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    let post = wait_for_answer(&slack, CHANNEL, &ts, "execute_command").await;
    assert!(
        visible_text(&post).contains("1 call so far")
            && visible_text(&post).contains("'&lt;!here&gt;'"),
        "{post}"
    );
    wait_for_answer(&slack, CHANNEL, &ts, "It is done.").await;
    let edits = slack.calls("chat.update");
    assert!(edits.len() >= 3, "{edits:?}");
    // The one that Slack refused, and then none for as long as Slack asked.
    assert!(edits[1].at - edits[0].at >= std::time::Duration::from_millis(1_900), "{edits:?}");
    assert_no_complaints(&slack);
}
