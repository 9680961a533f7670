//! Installation of the app in a workspace, its requests, and its removal.

use super::*;

#[tokio::test]
async fn only_signed_requests_and_key_holders_are_accepted() {
    let (mut mesh, slack) = begin(&json!([{"text": "Hello."}])).await;
    let client = http::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let url = |path: &str| format!("{}/slack/{path}", mesh.slack_url());
    let unsigned = client.post(url("events")).body("{}").send().await.unwrap();
    assert_eq!(
        (unsigned.status().as_u16(), &unsigned.headers()["x-slack-no-retry"]),
        (401, &"1".parse().unwrap())
    );
    let challenge = json!({"type": "url_verification", "token": "x", "challenge": "3eZbrw1aB10"});
    let body = challenge.to_string();
    let now = jiff::Timestamp::now().as_second().to_string();
    let signature = construct_tests::slack::sign(
        construct_tests::slack::SIGNING_SECRET.as_bytes(),
        &now,
        body.as_bytes(),
    );
    let request = client
        .post(url("events"))
        .header("x-slack-request-timestamp", &now)
        .header("x-slack-signature", signature);
    assert_eq!(request.body(body).send().await.unwrap().text().await.unwrap(), "3eZbrw1aB10");

    let status = async |path: &str| client.get(url(path)).send().await.unwrap().status().as_u16();
    assert_eq!(status("connect?key=wrong-and-long-enough").await, 403);
    assert_eq!(status("callback?code=x&state=y").await, 403);
    // A state is valid once, and for the browser that it was given to.
    let begun = client.get(url(&format!("connect?key={CONNECT_KEY}"))).send().await.unwrap();
    let location = begun.headers()["location"].to_str().unwrap().to_owned();
    let state = location.split("state=").nth(1).unwrap().to_owned();
    let cookie =
        begun.headers()["set-cookie"].to_str().unwrap().split(';').next().unwrap().to_owned();
    let back = async |cookie: &str| {
        let url = url(&format!("callback?code={}&state={state}", slack.authorize()));
        client.get(url).header("cookie", cookie).send().await.unwrap().status().as_u16()
    };
    assert_eq!(back("").await, 403);
    assert_eq!(back(&cookie).await, 200);
    assert_eq!(back(&cookie).await, 403);

    // Slack is asked to resend events that the work queue cannot take.
    mesh.nats.kill();
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    assert_retry_requested(&mesh, &slack, &event).await;
    mesh.nats.restart().await;
    assert_accepted(&mesh, &slack, &event).await;
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;
}

/// Checks that Slack is asked in time to resend the event. A busy machine may need several attempts
/// to show that.
async fn assert_retry_requested(mesh: &Mesh, slack: &SlackServer, event: &Value) {
    until("Slack to be asked within three seconds to resend it", TURN_TIMEOUT, async || {
        let sent =
            tokio::time::timeout(std::time::Duration::from_secs(3), slack.send_event(mesh, event))
                .await;
        match sent {
            Ok(Ok(503)) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

async fn assert_accepted(mesh: &Mesh, slack: &SlackServer, event: &Value) {
    until("the delivery to be taken", TURN_TIMEOUT, async || {
        match slack.send_event(mesh, event).await {
            Ok(200) => Ok(()),
            other => Err(format!("{other:?}")),
        }
    })
    .await;
}

#[tokio::test]
async fn hanging_work_queue_is_bounded_and_mention_answered_once() {
    let (mesh, slack) = begin(&json!([{"text": "You said: {{last_user_text}}"}])).await;
    mesh.nats.pause();
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "while it hangs", json!([]));
    for _ in 0..2 {
        assert_retry_requested(&mesh, &slack, &slack.envelope(event["event"].clone())).await;
    }
    // Events that were sent meanwhile are accepted, and so are those that Slack resends.
    mesh.nats.resume();
    assert_accepted(&mesh, &slack, &slack.envelope(event["event"].clone())).await;
    wait_for_answer(&slack, CHANNEL, &ts, "while it hangs").await;
    let after = ask(&mesh, &slack, (CHANNEL, ANN), "afterwards").await;
    wait_for_answer(&slack, CHANNEL, &after, "afterwards").await;
    let questions = asked_questions(&mesh).await;
    assert_eq!(questions.len(), 2, "{questions:#?}");
    assert_eq!(slack.posts(CHANNEL, &ts).len(), 1);
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn tokens_are_renewed_and_deleted_on_uninstall() {
    let (mut mesh, slack) =
        begin_with(&json!([{"text": "Hello."}]), |_, slack| slack.rotate_tokens()).await;
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;
    assert!(slack.calls("oauth.v2.access").len() >= 2, "{:?}", slack.calls("oauth.v2.access"));

    // Slack accepts a refresh token once: its answer is stored although the process is told to stop
    // meanwhile, and nothing waits for it.
    slack.fail("oauth.v2.access", Fault::DoneAfter(std::time::Duration::from_secs(2)));
    let renewed = slack.calls("oauth.v2.access").len();
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    until("a token to be renewed", TURN_TIMEOUT, async || {
        let calls = slack.calls("oauth.v2.access").len();
        if calls > renewed { Ok(()) } else { Err(calls) }
    })
    .await;
    assert_eq!(mesh.stop(Service::Slack).await.unwrap(), 0);
    mesh.spawn(Service::Slack).unwrap();
    mesh.wait_until_ready(Service::Slack).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;
    let log = mesh.log(Service::Slack);
    assert!(!log.contains("cannot renew a token") && !log.contains("cannot be renewed"), "{log}");

    // A late event about a removal before the installation changes nothing.
    let mut late = slack.envelope(json!({"type": "app_uninstalled"}));
    late["event_time"] = 1_700_000_000.into();
    assert_eq!(slack.send_event(&mesh, &late).await.unwrap(), 200);
    until("the late word to be heard", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Slack);
        if log.contains("before its current installation") { Ok(()) } else { Err(log) }
    })
    .await;
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;

    slack.revoke_tokens();
    let removed = slack.envelope(json!({"type": "app_uninstalled"}));
    assert_eq!(slack.send_event(&mesh, &removed).await.unwrap(), 200);
    until("the tokens to be forgotten", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Slack);
        // The other sentence continues after this text.
        if log.matches("the app was removed from a workspace").count() == 2 {
            Ok(())
        } else {
            Err(log)
        }
    })
    .await;
    let posts = slack.calls("chat.postMessage").len();
    let (_, event) = slack.ask(CHANNEL, ANN, None, "hi again", json!([]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    until("the mention to be abandoned", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Slack);
        if log.contains("a mention failed permanently") { Ok(()) } else { Err(log) }
    })
    .await;
    assert_eq!(slack.calls("chat.postMessage").len(), posts);
    // No token is in a log.
    let log = mesh.log(Service::Slack);
    assert!(!log.contains("xoxb-") && !log.contains("xoxe-"), "{log}");
}

#[tokio::test]
async fn tokens_are_sealed_at_rest() {
    let (mesh, slack) =
        begin_with(&json!([{"text": "Hello."}]), |_, slack| slack.rotate_tokens()).await;
    // Both have been used: the token expires soon, and is renewed.
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;
    let stored = mesh.database.contents().await;
    let row = stored.lines().find(|line| line.starts_with("slack_installations: ")).unwrap();
    assert!(row.contains(construct_tests::slack::TEAM) && row.contains("\\x"), "{row}");
    for secret in ["xoxb-", "xoxe-"] {
        let bytes: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        assert!(
            !stored.contains(secret) && !stored.contains(&bytes),
            "{secret} can be read in the database"
        );
    }
}

#[tokio::test]
async fn revoked_token_loses_only_the_question() {
    let (mesh, slack) = begin(&json!([{"text": "Hello."}])).await;
    // There is no event about it.
    slack.revoke_tokens();
    let (lost, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    until("the mention to be abandoned", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Slack);
        if log.contains("a mention failed permanently") { Ok(()) } else { Err(log) }
    })
    .await;
    assert_eq!(slack.posts(CHANNEL, &lost), Vec::<Value>::new());
    slack.install(&mesh).await.unwrap();
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi again", json!([]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn workspaces_use_own_tokens_and_survive_others_uninstall() {
    use construct_tests::slack::{DORA, OTHER_CHANNEL, OTHER_TEAM, TEAM};
    let (mesh, slack) = begin(&json!([{"text": "You said: {{last_user_text}}"}])).await;
    slack.install_in(&mesh, OTHER_TEAM).await.unwrap();
    let (here, event) = slack.ask(CHANNEL, ANN, None, "here", json!([]));
    let (there, other) = slack.ask(OTHER_CHANNEL, DORA, None, "there", json!([]));
    for event in [&event, &other] {
        assert_eq!(slack.send_event(&mesh, event).await.unwrap(), 200);
    }
    wait_for_answer(&slack, CHANNEL, &here, "here").await;
    wait_for_answer(&slack, OTHER_CHANNEL, &there, "there").await;
    // A member of one workspace is a stranger in the other.
    let (stranger, event) = slack.ask(CHANNEL, DORA, None, "and here?", json!([]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    wait_for_answer(&slack, CHANNEL, &stranger, "only help members of this workspace").await;
    // Permissions of one workspace do not apply to the other.
    slack.command(&mesh, BOB, CHANNEL, "allow use helper <@U0BOB>").await.unwrap();
    until("the permission to be given", TURN_TIMEOUT, async || {
        let said = format!("{:?}", slack.responses());
        if said.contains("may ask *helper*") { Ok(()) } else { Err(said) }
    })
    .await;
    let (again, event) = slack.ask(OTHER_CHANNEL, DORA, None, "once more", json!([]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    wait_for_answer(&slack, OTHER_CHANNEL, &again, "once more").await;

    let removed = slack.envelope_of_other(json!({"type": "app_uninstalled"}));
    assert_eq!(slack.send_event(&mesh, &removed).await.unwrap(), 200);
    until("the tokens to be forgotten", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Slack);
        if log.contains("the app was removed from a workspace") { Ok(()) } else { Err(log) }
    })
    .await;
    let stored = mesh.database.contents().await;
    let sealed = |team: &str| {
        let rows = stored
            .lines()
            .filter(|line| line.starts_with("slack_installations: ") && line.contains(team));
        rows.filter(|row| row.contains("\\x")).count()
    };
    assert_eq!((sealed(TEAM), sealed(OTHER_TEAM)), (1, 0), "{stored}");
    let (after, event) = slack.ask(CHANNEL, BOB, None, "still here", json!([]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    wait_for_answer(&slack, CHANNEL, &after, "still here").await;
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn enterprise_wide_installation_is_refused_with_reason() {
    let (mesh, slack) = begin(&json!([{"text": "Hello."}])).await;
    slack.install_org_wide();
    let refused = slack.install(&mesh).await.unwrap_err().to_string();
    assert!(
        refused.contains("400") && refused.contains("install it in single workspaces"),
        "{refused}"
    );
    // The installation in a workspace is unchanged.
    let ts = ask(&mesh, &slack, (CHANNEL, ANN), "hi").await;
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;
    assert_no_complaints(&slack);
}
