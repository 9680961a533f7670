//! Two organizations behind one app: each has its own workspace, and neither sees the other's data.

use construct_tests::slack::{DORA, OTHER_CHANNEL, OTHER_TEAM, TEAM, oauth_redirect};

use super::*;
use crate::identity::{first_key, json_output, output};

/// An organization with an agent that answers its color, and one that asks before it writes.
/// Returns an owner's key.
async fn organization(mesh: &Mesh, operator: &str, color: &str) -> String {
    let made = json_output(mesh, operator, &["organization", "create", color], "").await;
    let code = made["setupCode"]["code"].as_str().unwrap();
    let key = output(mesh, None, &["key", "exchange"], code).await.trim().to_owned();
    let says = json!([{"text": format!("{color} heard: {{{{last_user_text}}}}")}, {"text": format!("{color} heard more")}]);
    let writes = json!([{"text": "I shall.", "code": "create_file('key', 'x').status"}, {"text": format!("{color} wrote")}]);
    for (agent, script) in
        [("worker", says), (if color == "red" { "red-asks" } else { "blue-asks" }, writes)]
    {
        let provider =
            ["modelprovider", "create", agent, "--type", "scripted", "--script-file", "-"];
        output(mesh, Some(&key), &provider, &script.to_string()).await;
        output(
            mesh,
            Some(&key),
            &["model", "create", agent, "--provider", agent, "--model-id", "m"],
            "",
        )
        .await;
        let policy = json!([{"action": "ask", "tools": ["create_file"]}]).to_string();
        output(
            mesh,
            Some(&key),
            &["agent", "create", agent, "--model", agent, "--policy", "-"],
            &policy,
        )
        .await;
    }
    key
}

async fn code(mesh: &Mesh, key: &str) -> String {
    let arguments = [
        "key",
        "code",
        "slack",
        "--role",
        "member",
        "--scope",
        "tasks:write",
        "--scope",
        "agents:read",
    ];
    output(mesh, Some(key), &arguments, "").await.trim().to_owned()
}

async fn tasks(mesh: &Mesh, key: &str) -> Vec<String> {
    let found = json_output(mesh, key, &["task", "list"], "").await;
    let tasks = found["tasks"].as_array().cloned().unwrap_or_default();
    tasks
        .iter()
        .map(|task| task["metadata"]["id"].as_str().unwrap_or_default().to_owned())
        .collect()
}

/// The reply to a command.
async fn command_reply(
    mesh: &Mesh,
    slack: &SlackServer,
    (user, channel): (&str, &str),
    text: &str,
) -> String {
    let before = slack.responses().len();
    slack.command(mesh, user, channel, text).await.unwrap();
    until(&format!("the reply to {text:?}"), TURN_TIMEOUT, async || {
        slack
            .responses()
            .get(before)
            .map(|said| said["text"].as_str().unwrap_or_default().to_owned())
            .ok_or("nothing")
    })
    .await
}

#[tokio::test]
async fn organizations_behind_one_app_are_isolated() {
    let slack = SlackServer::start().await;
    let mut mesh = Mesh::prepare(&[("CONSTRUCT_GATEWAY_LOGIN", "required")]).await.unwrap();
    slack.configure(&mut mesh);
    mesh.set_env("CONSTRUCT_SLACK_AGENT", "worker");
    mesh.start_services().await.unwrap();
    mesh.spawn(Service::Slack).unwrap();
    mesh.wait_until_ready(Service::Slack).await.unwrap();
    let operator = String::from_utf8(first_key(&mesh).await.stdout).unwrap().trim().to_owned();
    let (red, blue) =
        (organization(&mesh, &operator, "red").await, organization(&mesh, &operator, "blue").await);

    // Not with any code, not for a missing agent, and not by a form of another page.
    assert_eq!(slack.connect_workspace(&mesh, TEAM, "cs_nonsense", "").await.unwrap().0, 403);
    let reading = output(
        &mesh,
        Some(&red),
        &["key", "code", "slack", "--role", "member", "--scope", "tasks:read"],
        "",
    )
    .await;
    let (status, words) = slack.connect_workspace(&mesh, TEAM, reading.trim(), "").await.unwrap();
    assert!(status == 403 && words.contains("too few permissions"), "{status} {words}");
    let (status, words) =
        slack.connect_workspace(&mesh, TEAM, &code(&mesh, &red).await, "nobody").await.unwrap();
    assert!(status == 404 && words.contains("has no agent"), "{status} {words}");
    let browser = http::client().redirect(reqwest::redirect::Policy::none()).build().unwrap();
    let form = format!("{}/slack/connect", mesh.slack_url());
    assert!(
        browser
            .get(&form)
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
            .contains("<form method=post")
    );
    let (of_red, of_blue) = (code(&mesh, &red).await, code(&mesh, &blue).await);
    let send = async |code: &str, origin: &str| {
        let request = browser.post(&form).header("origin", origin).body(format!("code={code}"));
        request.header("content-type", "application/x-www-form-urlencoded").send().await.unwrap()
    };
    assert_eq!(send(&of_red, "https://elsewhere.example").await.status(), 403);

    // One browser's state is invalid with another's cookie, whoever started.
    let own = mesh.slack_url();
    let (red_state, red_cookie) = oauth_redirect(&send(&of_red, &own).await).unwrap();
    let (blue_state, blue_cookie) = oauth_redirect(&send(&of_blue, &own).await).unwrap();
    let sealed = |cookie: &str| cookie.split_once('.').unwrap().1.to_owned();
    let back = async |state: &str, cookie: &str| {
        let url = format!("{own}/slack/callback?code={}&state={state}", slack.authorize());
        browser.get(url).header("cookie", cookie).send().await.unwrap().status().as_u16()
    };
    assert_eq!(back(&red_state, &blue_cookie).await, 403);
    assert_eq!(
        back(&red_state, &format!("construct_slack_state={red_state}.{}", sealed(&blue_cookie)))
            .await,
        403
    );
    assert_eq!(
        back(&blue_state, &format!("construct_slack_state={blue_state}.{}", sealed(&red_cookie)))
            .await,
        403
    );
    assert_eq!(back(&red_state, &red_cookie).await, 200);
    assert_eq!(
        slack
            .connect_workspace(&mesh, OTHER_TEAM, &code(&mesh, &blue).await, "worker")
            .await
            .unwrap()
            .0,
        200
    );

    let here = ask(&mesh, &slack, (CHANNEL, ANN), "one").await;
    let there = ask(&mesh, &slack, (OTHER_CHANNEL, DORA), "two").await;
    wait_for_answer(&slack, CHANNEL, &here, "red heard").await;
    wait_for_answer(&slack, OTHER_CHANNEL, &there, "blue heard").await;
    let (reds, blues) = (tasks(&mesh, &red).await, tasks(&mesh, &blue).await);
    assert!(reds.len() == 1 && blues.len() == 1 && reds != blues, "{reds:?} {blues:?}");

    // Agents.
    let list = command_reply(&mesh, &slack, (ANN, CHANNEL), "list").await;
    assert!(list.contains("*red-asks*") && !list.contains("blue"), "{list}");
    let list = command_reply(&mesh, &slack, (DORA, OTHER_CHANNEL), "list").await;
    assert!(list.contains("*blue-asks*") && !list.contains("red"), "{list}");
    command_reply(&mesh, &slack, (BOB, CHANNEL), "allow use all").await;

    // Links.
    let url = |task: &str| format!("https://construct.example/tasks/{task}");
    for (user, channel, own) in [(ANN, CHANNEL, &reds[0]), (DORA, OTHER_CHANNEL, &blues[0])] {
        let ts = slack.add_message(channel, user, None, "look", json!([]));
        let links: Vec<Value> =
            [&reds[0], &blues[0]].iter().map(|task| json!({"url": url(task)})).collect();
        let event = json!({"type": "link_shared", "user": user, "channel": channel, "message_ts": ts, "links": links});
        let before = slack.unfurls().len();
        assert_eq!(slack.send_event(&mesh, &slack.envelope(event)).await.unwrap(), 200);
        let shown = until("the links to be unfurled", TURN_TIMEOUT, async || {
            slack.unfurls().get(before).cloned().ok_or("none")
        })
        .await;
        let shown: Vec<&String> = shown["unfurls"].as_object().unwrap().keys().collect();
        assert_eq!(shown, [&url(own)]);
    }

    // Approvals: a button of one organization, as if it were in a thread of the other.
    slack.command(&mesh, ANN, CHANNEL, "run red-asks write").await.unwrap();
    let thread = until("the question in the channel", TURN_TIMEOUT, async || {
        slack
            .channel_posts(CHANNEL)
            .first()
            .map(|post| post["ts"].as_str().unwrap().to_owned())
            .ok_or("none")
    })
    .await;
    let question = until("a question with buttons", TURN_TIMEOUT, async || {
        slack.posts(CHANNEL, &thread).get(1).cloned().ok_or("none")
    })
    .await;
    let button = SlackServer::button(&question, "construct_approve").unwrap();
    let elsewhere = slack.posts(OTHER_CHANNEL, &there).remove(0);
    let before = slack.responses().len();
    assert_eq!(
        slack
            .send_action(&mesh, &slack.press_payload((DORA, OTHER_CHANNEL), &elsewhere, &button))
            .await
            .unwrap(),
        200
    );
    until("a message to Dora", TURN_TIMEOUT, async || {
        let said = slack.responses();
        if said.get(before).is_some_and(|said| said.to_string().contains("nothing to decide")) {
            Ok(())
        } else {
            Err(said)
        }
    })
    .await;
    let pending = json_output(&mesh, &red, &["approval", "list"], "").await.to_string();
    assert!(pending.contains("PENDING"), "{pending}");
    let others = json_output(&mesh, &blue, &["approval", "list"], "").await;
    assert!(others["approvals"].as_array().is_none_or(Vec::is_empty), "{others}");
    let ts = question["ts"].as_str().unwrap();
    assert_eq!(slack.press(&mesh, ANN, CHANNEL, ts, "construct_approve").await.unwrap(), 200);
    until("the answer", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &thread);
        if visible_text(&posts[0]).contains("red wrote") { Ok(()) } else { Err(posts) }
    })
    .await;

    // The workspace stays with its organization until the app is removed there; then the other one
    // starts anew.
    let (status, words) =
        slack.connect_workspace(&mesh, TEAM, &code(&mesh, &blue).await, "").await.unwrap();
    assert!(status == 409 && words.contains("another organization"), "{status} {words}");
    let removed = slack.envelope(json!({"type": "app_uninstalled"}));
    assert_eq!(slack.send_event(&mesh, &removed).await.unwrap(), 200);
    until("the tokens to be forgotten", TURN_TIMEOUT, async || {
        let log = mesh.log(Service::Slack);
        if log.contains("the app was removed from a workspace") { Ok(()) } else { Err("not yet") }
    })
    .await;
    let before = (tasks(&mesh, &red).await.len(), tasks(&mesh, &blue).await.len());
    // Events of this second were before the new installation.
    until("the workspace to be connected", TURN_TIMEOUT, async || {
        match slack.connect_workspace(&mesh, TEAM, &code(&mesh, &blue).await, "").await.unwrap() {
            (200, _) => Ok(()),
            other => Err(other),
        }
    })
    .await;
    let (ts, event) = slack.ask(CHANNEL, ANN, Some(&here), "and now?", json!([]));
    assert_eq!(slack.send_event(&mesh, &event).await.unwrap(), 200);
    until("the other organization's answer", TURN_TIMEOUT, async || {
        let posts = slack.posts(CHANNEL, &here);
        if posts.iter().any(|post| visible_text(post).contains("blue heard")) {
            Ok(())
        } else {
            Err(posts)
        }
    })
    .await;
    assert!(!ts.is_empty());
    assert_eq!(
        (tasks(&mesh, &red).await.len(), tasks(&mesh, &blue).await.len()),
        (before.0, before.1 + 1)
    );

    // Keys are not readable anywhere.
    let stored = mesh.database.contents().await;
    let log = mesh.log(Service::Slack);
    for text in [&stored, &log] {
        for secret in [&red, &blue, &operator, &of_red, &of_blue] {
            assert!(!text.contains(secret.as_str()), "a secret can be read");
        }
    }
    // The service's own keys are sealed: neither their prefix nor their field name is in the stored
    // bytes.
    let rows: Vec<_> =
        stored.lines().filter(|line| line.starts_with("slack_installations: ")).collect();
    assert!(rows.len() == 2 && rows.iter().all(|row| row.contains("\\x")), "{rows:?}");
    for secret in ["ct_", "\"gateway\""] {
        let bytes: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
        assert!(
            rows.iter().all(|row| !row.contains(secret) && !row.contains(&bytes)),
            "{secret} can be read: {rows:?}"
        );
    }
    let mut words = log.split(|letter: char| !letter.is_alphanumeric() && letter != '_');
    assert!(!words.any(|word| word.starts_with("ct_")), "{log}");
    assert_no_complaints(&slack);
}
