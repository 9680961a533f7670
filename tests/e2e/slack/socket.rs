//! Socket Mode: all of Slack's requests over the service's own connection.

use super::*;

/// A mesh whose Slack service has no public address.
async fn begin_over_socket(script: &Value) -> (Mesh, SlackServer) {
    let slack = SlackServer::start().await;
    let mut mesh = Mesh::prepare(&[]).await.unwrap();
    mesh.set_env("CONSTRUCT_SLACK_APP_TOKEN", construct_tests::slack::APP_TOKEN);
    mesh.set_env("CONSTRUCT_SLACK_BOT_TOKEN", slack.give_token());
    mesh.set_env("CONSTRUCT_SLACK_API_URL", format!("{}/api/", slack.url()));
    mesh.set_env("CONSTRUCT_SLACK_GATEWAY_URL", mesh.gateway_url());
    mesh.set_env("CONSTRUCT_SLACK_AGENT", "helper");
    mesh.set_env("CONSTRUCT_SLACK_LEASE", "3s");
    mesh.start_services().await.unwrap();
    mesh.scripted_agent("helper", script).await.unwrap();
    mesh.spawn(Service::Slack).unwrap();
    mesh.wait_until_ready(Service::Slack).await.unwrap();
    until("the workspace to be known", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Slack);
        if log.contains("the app was installed") { Ok(()) } else { Err(log) }
    })
    .await;
    (mesh, slack)
}

async fn wait_for_confirmation(slack: &SlackServer, id: &str) {
    until("the message to be confirmed", TURN_TIMEOUT, async || {
        if slack.is_confirmed(id) { Ok(()) } else { Err(slack.connections()) }
    })
    .await;
}

async fn wait_for_reconnect(slack: &SlackServer, before: usize) {
    until("a new connection", TURN_TIMEOUT, async || {
        let connections = slack.connections();
        if connections > before { Ok(()) } else { Err(connections) }
    })
    .await;
}

/// Sends the event of a question; returns its `ts` and the id of its confirmation.
fn ask(slack: &SlackServer, words: &str) -> (String, String) {
    let (ts, event) = slack.ask(CHANNEL, ANN, None, words, json!([]));
    let id = slack.send_over_socket("events_api", &event);
    (ts, id)
}

#[tokio::test]
async fn all_requests_arrive_over_socket_mode() {
    let script = json!({"count": "since_user", "conversations": [{"match": "write the key", "turns": [
        {"text": "I shall do it.", "code": "create_file('key', 'x').status"}, {"text": "Done: {{last_result}}"}]}],
        "turns": [{"text": "Hello."}]});
    let (mesh, slack) = begin_over_socket(&script).await;
    subtasks::require_approval(&mesh, "helper", "create_file").await;
    let (ts, id) = ask(&slack, "hi");
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;
    assert!(slack.is_confirmed(&id));

    // A command that is answered with the confirmation, and one that is not.
    let help =
        slack.ask_over_socket("slash_commands", &slack.command_payload(ANN, CHANNEL, "help"));
    wait_for_confirmation(&slack, &help).await;
    assert!(
        slack.answer_over_socket(&help).unwrap()["text"]
            .as_str()
            .unwrap()
            .contains("/construct list")
    );
    let list =
        slack.ask_over_socket("slash_commands", &slack.command_payload(ANN, CHANNEL, "list"));
    wait_for_confirmation(&slack, &list).await;
    until("the list", TURN_TIMEOUT, async || {
        let said = slack.responses();
        if format!("{said:?}").contains("*helper*") { Ok(()) } else { Err(said) }
    })
    .await;

    // A form.
    slack.ask_over_socket("slash_commands", &slack.command_payload(ANN, CHANNEL, "run"));
    let form =
        until("the form", TURN_TIMEOUT, async || slack.forms().first().cloned().ok_or("none"))
            .await;
    let values = json!({"agent": {"agent": {"selected_option": {"value": "helper"}}}, "words": {"words": {"value": "By form."}}});
    let sent = json!({"type": "view_submission", "team": {"id": "T0TEAM1"}, "user": {"id": ANN}, "view": {"id": "V1", "hash": "1.2",
        "callback_id": form["callback_id"], "private_metadata": CHANNEL, "state": {"values": values}}});
    for _ in 0..2 {
        wait_for_confirmation(&slack, &slack.ask_over_socket("interactive", &sent)).await;
    }
    let post = until("the question in the channel", TURN_TIMEOUT, async || {
        let posts = slack.channel_posts(CHANNEL);
        posts.first().filter(|post| visible_text(post).contains("By form.")).cloned().ok_or(posts)
    })
    .await;
    wait_for_answer(&slack, CHANNEL, post["ts"].as_str().unwrap(), "Hello.").await;

    // Buttons.
    let (ts, _) = ask(&slack, "write the key");
    let question = until("a question with buttons", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &ts);
        posts
            .get(1)
            .filter(|post| visible_text(post).contains("May I call `create_file`?"))
            .cloned()
            .ok_or(posts)
    })
    .await;
    let button = SlackServer::button(&question, "construct_approve").unwrap();
    let pressed = slack.press_payload((ANN, CHANNEL), &question, &button);
    wait_for_confirmation(&slack, &slack.send_over_socket("interactive", &pressed)).await;
    until("the answer", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &ts);
        if visible_text(&posts[0]).contains("Done: created") { Ok(()) } else { Err(posts) }
    })
    .await;
    assert_eq!(slack.channel_posts(CHANNEL).len(), 1);
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn broken_or_replaced_connection_loses_and_repeats_nothing() {
    let (mut mesh, slack) =
        begin_over_socket(&json!([{"text": "You said: {{last_user_text}}"}])).await;
    for (number, end) in ["warning", "break", "refresh_requested", "kill"].into_iter().enumerate() {
        let before = slack.connections();
        let words = [format!("question {number}-0"), format!("question {number}-1")];
        let (first, _) = ask(&slack, &words[0]);
        match end {
            "break" => slack.break_connections(),
            "kill" => mesh.crash(Service::Slack).await.unwrap(),
            reason => slack.disconnect(reason),
        }
        let (second, id) = ask(&slack, &words[1]);
        wait_for_reconnect(&slack, before).await;
        wait_for_confirmation(&slack, &id).await;
        for (ts, words) in [(&first, &words[0]), (&second, &words[1])] {
            wait_for_answer(&slack, CHANNEL, ts, words).await;
        }
        let asked = asked_questions(&mesh).await;
        for words in &words {
            assert_eq!(
                asked.iter().filter(|asked| asked.contains(words)).count(),
                1,
                "{end}: {asked:#?}"
            );
        }
    }
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn unavailable_work_queue_confirms_nothing_and_blocks_nothing() {
    let (mut mesh, slack) =
        begin_over_socket(&json!([{"text": "You said: {{last_user_text}}"}])).await;
    for gone in [false, true] {
        if gone {
            mesh.nats.kill()
        } else {
            mesh.nats.pause()
        }
        let questions_now: Vec<_> = (0..3)
            .map(|number| {
                let words = format!("question {gone} {number}");
                let (ts, id) = ask(&slack, &words);
                (ts, id, words)
            })
            .collect();
        // If each waited for those before it, the last one would wait longer than this test does.
        for _ in 0..40 {
            let opened =
                json!({"type": "app_home_opened", "user": BOB, "channel": CHANNEL, "tab": "home"});
            slack.send_over_socket("events_api", &slack.envelope(opened));
        }
        // Requests that need no queue are answered meanwhile.
        let typed = json!({"type": "block_suggestion", "user": {"id": ANN}, "team": {"id": "T0TEAM1"}, "action_id": "agent",
            "block_id": "agent", "value": "hel", "container": {"type": "view"}});
        // A service that finds no agents in time answers with none; the user keeps typing.
        until("the agent to be offered", TURN_TIMEOUT, async || {
            let menu = slack.ask_over_socket("interactive", &typed);
            wait_for_confirmation(&slack, &menu).await;
            let answer = slack.answer_over_socket(&menu).unwrap();
            if answer["options"][0]["value"] == "helper" { Ok(()) } else { Err(answer) }
        })
        .await;
        until("the work queue to time out", TURN_TIMEOUT, async || {
            let log = mesh.log(Service::Slack);
            let lost = log.matches("a Slack delivery was not accepted").count();
            if lost >= if gone { 86 } else { 43 } { Ok(()) } else { Err(lost) }
        })
        .await;
        assert!(questions_now.iter().all(|(_, id, _)| !slack.is_confirmed(id)));
        if gone {
            mesh.nats.restart().await
        } else {
            mesh.nats.resume()
        }
        until("Slack to have sent everything again", TURN_TIMEOUT, async || {
            slack.resend_over_socket();
            if questions_now.iter().all(|(_, id, _)| slack.is_confirmed(id)) {
                Ok(())
            } else {
                Err("not yet")
            }
        })
        .await;
        for (ts, _, words) in &questions_now {
            wait_for_answer(&slack, CHANNEL, ts, words).await;
        }
        let asked = asked_questions(&mesh).await;
        for (_, _, words) in &questions_now {
            assert_eq!(asked.iter().filter(|asked| asked.contains(words)).count(), 1, "{asked:#?}");
        }
    }
    assert_no_complaints(&slack);
}
