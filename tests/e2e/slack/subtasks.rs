//! Threads whose task is more than one agent's: subtasks that ask, hand-overs, and what waits for
//! people.

use construct_tests::slack::TEAM;
use jiff::{SignedDuration, Timestamp};

use super::*;

/// Has calls of these tools of an agent's scripts wait for a person.
pub(super) async fn have_asked(mesh: &Mesh, agent: &str, tool: &str) {
    let rule = v1::PolicyRule {
        action: v1::PolicyAction::Ask.into(),
        tools: vec![tool.to_owned()],
        ..v1::PolicyRule::default()
    };
    let update = v1::UpdateAgentRequest {
        agent: agent.to_owned(),
        policy: Some(v1::Policy { rules: vec![rule] }),
        ..v1::UpdateAgentRequest::default()
    };
    mesh.client().unwrap().agents().update_agent(update).await.unwrap();
}

/// The post with this number in a thread, once it shows these words; its `ts`.
async fn shows(slack: &SlackServer, thread: &str, number: usize, words: &[&str]) -> String {
    until(&format!("post {number} to show {words:?}"), PATIENCE, async || {
        let posts = slack.posts(CHANNEL, thread);
        match posts.get(number) {
            Some(post) if words.iter().all(|words| shown(post).contains(words)) => {
                Ok(post["ts"].as_str().unwrap_or_default().to_owned())
            }
            _ => Err(format!("{posts:#?}")),
        }
    })
    .await
}

async fn ask(
    mesh: &Mesh,
    slack: &SlackServer,
    user: &str,
    thread: Option<&str>,
    words: &str,
) -> String {
    let (ts, event) = slack.ask(CHANNEL, user, thread, words, json!([]));
    assert_eq!(slack.send_event(mesh, &event).await.unwrap(), 200);
    ts
}

#[tokio::test]
async fn what_a_subtask_wants_to_do_is_approved_in_the_thread_by_who_asked() {
    let code = [
        "const one = tasks.spawn({ message: 'write it', agent: 'reader' }).task;",
        "tasks.await(one).answer",
    ];
    let script = json!([{"text": "I shall have it done.", "code": [code]}, {"text": "Done: {{last_result}}"}]);
    let (mesh, slack) = begin(&script).await;
    let reader = json!([
        {"text": "I write.", "code": "create_file('secrets/key', 'the key').status"},
        {"text": "Written: {{last_result}}"},
    ]);
    mesh.scripted_agent("reader", &reader).await.unwrap();
    have_asked(&mesh, "helper", "tasks.spawn").await;
    have_asked(&mesh, "reader", "create_file").await;

    let thread = ask(&mesh, &slack, ANN, None, "have the key written").await;
    let spawn = shows(&slack, &thread, 1, &["May I call `tasks.spawn`?", "write it"]).await;
    assert_eq!(slack.press(&mesh, ANN, CHANNEL, &spawn, "construct_approve").await.unwrap(), 200);
    let create =
        shows(&slack, &thread, 2, &["*reader* asks", "May I call `create_file`?", "secrets/key"])
            .await;
    // Who has not asked may not decide about what others do for it, either.
    assert_eq!(slack.press(&mesh, CARL, CHANNEL, &create, "construct_approve").await.unwrap(), 200);
    until("Carl to be told", PATIENCE, async || {
        let whispers = slack.whispers();
        if whispers.iter().any(|whisper| whisper["user"] == CARL) { Ok(()) } else { Err(whispers) }
    })
    .await;
    assert_eq!(slack.press(&mesh, ANN, CHANNEL, &create, "construct_approve").await.unwrap(), 200);
    shows(&slack, &thread, 0, &["Done: Written: created"]).await;
    shows(&slack, &thread, 2, &["*reader* asks", "Approved by <@U0ANN>"]).await;
    assert_eq!(slack.posts(CHANNEL, &thread).len(), 3);
    no_complaints(&slack);
}

#[tokio::test]
async fn a_button_of_another_task_decides_nothing_and_a_call_can_be_rejected() {
    let code = [
        "let said;",
        "try { said = create_file('key', 'x').status } catch (error) { said = error.name }",
        "said",
    ];
    let script =
        json!([{"text": "I shall do it.", "code": [code]}, {"text": "Done: {{last_result}}"}]);
    let (mesh, slack) = begin(&script).await;
    have_asked(&mesh, "helper", "create_file").await;
    let thread = ask(&mesh, &slack, ANN, None, "write the key").await;
    let question = shows(&slack, &thread, 1, &["May I call `create_file`?"]).await;

    // The same button, as if it stood in a thread of another task, that Ann has begun, too.
    let other = ask(&mesh, &slack, ANN, None, "write another key").await;
    let elsewhere = shows(&slack, &other, 1, &["May I call `create_file`?"]).await;
    let blocks = slack.message(CHANNEL, &question).unwrap()["blocks"].clone();
    let button = blocks.as_array().unwrap().last().unwrap()["elements"][0].clone();
    let mut message = slack.message(CHANNEL, &elsewhere).unwrap();
    message["blocks"] = blocks;
    let mut button = button;
    button["action_ts"] = "1760000000.000001".into();
    let forged = json!({"type": "block_actions", "user": {"id": ANN, "team_id": "T0TEAM1"}, "team": {"id": "T0TEAM1"},
        "channel": {"id": CHANNEL}, "message": message, "actions": [button]});
    assert_eq!(slack.send_action(&mesh, &forged).await.unwrap(), 200);
    until("the wrong button to be refused", PATIENCE, async || {
        let log = mesh.log(Service::Slack);
        if log.contains("the approval belongs to a task of another thread") {
            Ok(())
        } else {
            Err(log)
        }
    })
    .await;
    assert!(
        shown(&slack.message(CHANNEL, &question).unwrap()).contains("May I call `create_file`?")
    );

    assert_eq!(slack.press(&mesh, ANN, CHANNEL, &question, "construct_reject").await.unwrap(), 200);
    shows(&slack, &thread, 0, &["Done: ApprovalRejected"]).await;
    shows(&slack, &thread, 1, &["Rejected by <@U0ANN>", "May I call `create_file`?"]).await;
    assert!(!shown(&slack.posts(CHANNEL, &other)[0]).contains("Done"));
    no_complaints(&slack);
}

#[tokio::test]
async fn a_task_that_was_handed_over_answers_those_who_may_use_the_agent_it_has_now() {
    let script = json!([{"text": "The reviewer goes on.", "code": "tasks.hand_off('reviewer')"}, {"text": "Hello."}]);
    let (mesh, slack) = begin(&script).await;
    // A script goes by the answers there are in the task, whoever gave them.
    mesh.scripted_agent("reviewer", &json!(vec![json!({"text": "Reviewed."}); 4])).await.unwrap();
    for allowed in ["helper", "reviewer <@U0ANN|ann>"] {
        slack.command(&mesh, BOB, CHANNEL, &format!("allow use {allowed}")).await.unwrap();
        until("the permission to be given", PATIENCE, async || {
            let said = format!("{:?}", slack.responses());
            if said.contains(&format!("*{}*", allowed.split(' ').next().unwrap())) {
                Ok(())
            } else {
                Err(said)
            }
        })
        .await;
    }
    let thread = ask(&mesh, &slack, ANN, None, "look at this").await;
    shows(&slack, &thread, 0, &["Reviewed."]).await;
    // Carl may ask the helper, with which the thread has begun.
    ask(&mesh, &slack, CARL, Some(&thread), "go on").await;
    shows(&slack, &thread, 1, &["you may not use this agent here"]).await;
    assert_eq!(questions(&mesh).await.len(), 1);
    ask(&mesh, &slack, ANN, Some(&thread), "and now?").await;
    shows(&slack, &thread, 2, &["Reviewed."]).await;

    // Somebody gives the task back to the helper over the API: then Carl may.
    let tasks =
        mesh.client().unwrap().tasks().list_tasks(v1::ListTasksRequest::default()).await.unwrap();
    let task = tasks.into_inner().tasks[0].metadata.clone().unwrap_or_default().id;
    let update = v1::UpdateTaskRequest {
        task,
        agent: Some("helper".to_owned()),
        ..v1::UpdateTaskRequest::default()
    };
    mesh.client().unwrap().tasks().update_task(update).await.unwrap();
    ask(&mesh, &slack, CARL, Some(&thread), "may I now?").await;
    until("the question to be taken", PATIENCE, async || {
        let asked = questions(&mesh).await;
        if asked.iter().any(|asked| asked.contains("may I now?")) { Ok(()) } else { Err(asked) }
    })
    .await;
    no_complaints(&slack);
}

#[tokio::test]
async fn a_suspended_task_says_so_in_its_thread_and_goes_on_when_it_is_resumed() {
    let (mesh, slack) = begin(&json!([{"text": "The answer."}])).await;
    // No model answers before the task is suspended.
    mesh.pause(Service::Providers).unwrap();
    let thread = ask(&mesh, &slack, ANN, None, "hi").await;
    let task = until("the task to be there", PATIENCE, async || {
        let asked = questions(&mesh).await;
        let tasks = mesh
            .client()
            .unwrap()
            .tasks()
            .list_tasks(v1::ListTasksRequest::default())
            .await
            .unwrap();
        match tasks.into_inner().tasks.first() {
            Some(task) if !asked.is_empty() => Ok(task.metadata.clone().unwrap_or_default().id),
            _ => Err(asked),
        }
    })
    .await;
    let conversation = mesh.client().unwrap().conversation(&task);
    conversation.suspend().await;
    answered(&slack, CHANNEL, &thread, "This task is suspended").await;
    mesh.resume(Service::Providers).unwrap();
    conversation.resume().await;
    answered(&slack, CHANNEL, &thread, "The answer.").await;
    let edits = slack.calls("chat.update");
    let suspended = edits
        .iter()
        .filter(|edit| edit.arguments.to_string().contains("This task is suspended"))
        .count();
    assert_eq!(suspended, 1, "{edits:?}");
    no_complaints(&slack);
}

#[tokio::test]
async fn what_a_subtask_asks_after_its_parents_answer_is_asked_in_the_thread_and_decided_by_who_had_it_begun()
 {
    let code = "tasks.spawn({ message: 'write it', agent: 'reader' }).task";
    let script = json!([{"text": "I shall have it done.", "code": code}, {"text": "It is under way."}, {"text": "You said: {{last_user_text}}"}]);
    let (mut mesh, slack) = begin(&script).await;
    // Its parent must be over and the service killed before it asks; both have the same providers,
    // so that these cannot be held.
    let reader = json!([
        {"text": "I write.", "code": "create_file('secrets/key', 'the key').status", "delay_ms": 30_000},
        {"text": "Written: {{last_result}}"},
    ]);
    mesh.scripted_agent("reader", &reader).await.unwrap();
    have_asked(&mesh, "reader", "create_file").await;
    let thread = ask(&mesh, &slack, ANN, None, "have the key written").await;
    shows(&slack, &thread, 0, &["It is under way."]).await;
    // The question is over, and nothing of it is in the process's memory.
    mesh.counted(
        Service::Slack,
        r#"construct_slack_mentions_total{construct_outcome="answered"} 1"#,
    )
    .await;
    mesh.crash(Service::Slack).await.unwrap();
    // A later question has an eye on what the subtask asks, and comes to nothing: the first one
    // still has.
    ask(&mesh, &slack, CARL, Some(&thread), "how far is it?").await;
    shows(&slack, &thread, 1, &["how far is it?"]).await;
    until("the first question to leave it to the second", PATIENCE, async || {
        let asked = mesh.database.store().slack_mentions_by_user(TEAM, ANN, 10).await.unwrap();
        let rarely = Timestamp::now() + SignedDuration::from_secs(20);
        if asked[0].next_wake.is_some_and(|next| next > rarely) { Ok(()) } else { Err(asked) }
    })
    .await;
    let fails = format!(
        "UPDATE slack_mentions SET state = 'failed', next_look = NULL, lease = lease + 1 WHERE user_id = '{CARL}';
         UPDATE slack_mentions SET next_look = now() WHERE user_id = '{ANN}'"
    );
    mesh.database.execute(&fails).await;
    let create =
        shows(&slack, &thread, 2, &["*reader* asks", "May I call `create_file`?", "secrets/key"])
            .await;
    // Another question of somebody else's in the thread takes nothing from Ann, and gives nothing
    // to Carl.
    ask(&mesh, &slack, CARL, Some(&thread), "and me?").await;
    shows(&slack, &thread, 3, &["and me?"]).await;
    assert_eq!(slack.press(&mesh, CARL, CHANNEL, &create, "construct_approve").await.unwrap(), 200);
    until("Carl to be told", PATIENCE, async || {
        let whispers = slack.whispers();
        if whispers.iter().any(|whisper| whisper["user"] == CARL) { Ok(()) } else { Err(whispers) }
    })
    .await;
    assert_eq!(slack.press(&mesh, ANN, CHANNEL, &create, "construct_approve").await.unwrap(), 200);
    shows(&slack, &thread, 2, &["*reader* asks", "Approved by <@U0ANN>"]).await;
    until("the subtask to go on", PATIENCE, async || {
        let tasks = mesh
            .client()
            .unwrap()
            .tasks()
            .list_tasks(v1::ListTasksRequest::default())
            .await
            .unwrap()
            .into_inner()
            .tasks;
        let calls = tasks.iter().filter(|task| {
            task.status.as_ref().is_some_and(|status| status.tool_uses.contains_key("create_file"))
        });
        if calls.count() == 1 { Ok(()) } else { Err(tasks) }
    })
    .await;
    assert!(shown(&slack.posts(CHANNEL, &thread)[0]).contains("It is under way."));
    let asked = slack.calls("chat.postMessage");
    let asked = asked.iter().filter(|call| {
        call.arguments["metadata"]["event_payload"]["key"].to_string().contains("approval.")
    });
    assert_eq!(asked.count(), 1);
    no_complaints(&slack);
}
