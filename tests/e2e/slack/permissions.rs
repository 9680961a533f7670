//! Permissions set by `/construct`, and data that guests must not see.

use super::*;

/// Sends a command and waits for its reply.
async fn command_reply(
    mesh: &Mesh,
    slack: &SlackServer,
    (user, channel): (&str, &str),
    text: &str,
) -> String {
    let before = slack.responses().len();
    slack.command(mesh, user, channel, text).await.unwrap();
    until(&format!("the reply to {text:?}"), TURN_TIMEOUT, async || {
        let said = slack.responses();
        match said.get(before) {
            Some(said) => Ok(said["text"].as_str().unwrap_or_default().to_owned()),
            None => Err(said),
        }
    })
    .await
}

/// Asks a question; returns whether it is answered.
async fn is_answered(mesh: &Mesh, slack: &SlackServer, user: &str, channel: &str) -> bool {
    let (ts, event) = slack.ask(channel, user, None, "hi", json!([]));
    assert_eq!(slack.send_event(mesh, &event).await.unwrap(), 200);
    until("an answer or a refusal", TURN_TIMEOUT, async || {
        let posts = slack.posts(channel, &ts);
        match posts.first().map(visible_text) {
            Some(text) if text.contains("Hello.") => Ok(true),
            Some(text) if text.contains("you may not use this agent here") => Ok(false),
            _ => Err(posts),
        }
    })
    .await
}

#[tokio::test]
async fn permissions_apply_to_named_scope_until_revoked() {
    let (mesh, slack) = begin(&json!([{"text": "Hello."}])).await;
    let admin = (BOB, CHANNEL);
    assert!(
        command_reply(&mesh, &slack, (CARL, CHANNEL), "who")
            .await
            .contains("No permissions are set")
    );
    assert!(is_answered(&mesh, &slack, CARL, CHANNEL).await);

    // In this channel only, and every agent.
    command_reply(&mesh, &slack, admin, "allow use all here").await;
    assert!(is_answered(&mesh, &slack, CARL, CHANNEL).await);
    assert!(!is_answered(&mesh, &slack, ANN, DIRECT).await);
    command_reply(&mesh, &slack, admin, "allow use helper <@U0ANN|ann>").await;
    command_reply(&mesh, &slack, admin, "allow approve all <@U0CARL|carl> here").await;
    assert!(is_answered(&mesh, &slack, ANN, DIRECT).await);
    let who = command_reply(&mesh, &slack, (CARL, CHANNEL), "who").await;
    for line in [
        "every member may ask every agent in <#C0GENERAL>",
        "<@U0ANN> may ask *helper*",
        "<@U0CARL> may decide about calls of every agent in <#C0GENERAL>",
    ] {
        assert!(who.lines().any(|said| said == line), "{line}: {who}");
    }
    // Guests get no reply.
    assert!(!command_reply(&mesh, &slack, (GUEST, CHANNEL), "who").await.contains("*helper*"));

    // Only admins revoke permissions, and exactly the named ones.
    assert!(
        command_reply(&mesh, &slack, (CARL, CHANNEL), "forbid use helper <@U0ANN>")
            .await
            .contains("Only admins")
    );
    command_reply(&mesh, &slack, admin, "forbid use helper").await;
    assert!(is_answered(&mesh, &slack, ANN, DIRECT).await);
    command_reply(&mesh, &slack, admin, "forbid use all here").await;
    assert!(!is_answered(&mesh, &slack, CARL, CHANNEL).await);
    assert!(is_answered(&mesh, &slack, ANN, CHANNEL).await);
    command_reply(&mesh, &slack, admin, "forbid use helper <@U0ANN|ann>").await;
    let who = command_reply(&mesh, &slack, (CARL, CHANNEL), "who").await;
    assert_eq!(who, "<@U0CARL> may decide about calls of every agent in <#C0GENERAL>");
    // No permission about asking is left: it is as in the beginning.
    assert!(is_answered(&mesh, &slack, CARL, CHANNEL).await);
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn guest_links_unfurl_nothing() {
    let (mesh, slack) = begin(&json!([{"text": "Hello."}])).await;
    let (ts, event) = slack.ask(CHANNEL, ANN, None, "hi", json!([]));
    slack.send_event(&mesh, &event).await.unwrap();
    wait_for_answer(&slack, CHANNEL, &ts, "Hello.").await;
    let tasks =
        mesh.client().unwrap().tasks().list_tasks(v1::ListTasksRequest::default()).await.unwrap();
    let id = tasks.into_inner().tasks[0].metadata.clone().unwrap_or_default().id;
    let url = format!("https://construct.example/tasks/{id}");
    for user in [GUEST, STRANGER, BOB] {
        let message = slack.add_message(CHANNEL, user, None, &url, json!([]));
        let link = json!({"type": "link_shared", "user": user, "channel": CHANNEL, "message_ts": message,
                          "links": [{"domain": "construct.example", "url": url}]});
        assert_eq!(slack.send_event(&mesh, &slack.envelope(link)).await.unwrap(), 200);
        until("the user to be looked up", TURN_TIMEOUT, async || {
            let calls = slack.calls("users.info");
            if calls.iter().any(|call| call.arguments["user"] == user) {
                Ok(())
            } else {
                Err(calls)
            }
        })
        .await;
        if user == BOB {
            until("the link to be unfurled", TURN_TIMEOUT, async || {
                slack.unfurls().first().cloned().ok_or("none")
            })
            .await;
            let unfurls = slack.unfurls();
            assert!(unfurls.len() == 1 && unfurls[0]["ts"] == message, "{unfurls:?}");
        }
    }
    assert_no_complaints(&slack);
}
