//! The home: costs, and more agents than a menu can hold.

use super::*;

/// The visible form of an amount in 10^-12 dollars.
fn dollars(pico: i64) -> String {
    let parts = pico / 100_000_000;
    format!("${}.{:04}", parts / 10_000, parts % 10_000)
}

#[tokio::test]
async fn home_shows_cost_of_a_task_and_its_subtasks() {
    let code = [
        "const one = tasks.spawn({ message: 'look', agent: 'reader' }).task;",
        "tasks.await(one).answer",
    ];
    let words = "word ".repeat(400);
    let script = json!([{"text": "I shall have it done.", "code": [code]}, {"text": format!("Done: {words}")}]);
    let (mesh, slack) = begin(&script).await;
    mesh.scripted_agent("reader", &json!([{"text": format!("Read: {words}")}])).await.unwrap();
    let ts = ask(&mesh, &slack, (CHANNEL, ANN), "have it read").await;
    wait_for_answer(&slack, CHANNEL, &ts, "Done: word").await;
    let found =
        mesh.client().unwrap().tasks().list_tasks(v1::ListTasksRequest::default()).await.unwrap();
    let costs: Vec<i64> = found
        .into_inner()
        .tasks
        .into_iter()
        .map(|task| task.status.unwrap_or_default().usage.unwrap_or_default().cost_pico_usd)
        .collect();
    // Each is large enough to be visible.
    assert!(costs.len() == 2 && costs.iter().all(|&cost| cost > 1_000_000_000), "{costs:?}");
    let opened = slack.envelope(
        json!({"type": "app_home_opened", "user": ANN, "channel": DIRECT, "tab": "home"}),
    );
    slack.send_event(&mesh, &opened).await.unwrap();
    let home = until("the home", TURN_TIMEOUT, async || slack.home(ANN).ok_or("none")).await;
    let wanted = format!("messages · {}", dollars(costs.iter().sum()));
    assert!(visible_text(&home).contains(&wanted), "{wanted}: {}", visible_text(&home));
    assert_no_complaints(&slack);
}

#[tokio::test]
async fn agents_beyond_menu_size_are_listed_and_searchable() {
    let (mesh, slack) = begin(&json!([{"text": "Hello."}])).await;
    let client = mesh.client().unwrap();
    for number in 0..120 {
        let spec = v1::AgentSpec {
            name: format!("agent-{number:03}"),
            model: "helper".to_owned(),
            ..v1::AgentSpec::default()
        };
        let request =
            v1::CreateAgentRequest { spec: Some(spec), ..v1::CreateAgentRequest::default() };
        client.agents().create_agent(request).await.unwrap();
    }
    for (user, text) in [(ANN, "list"), (ANN, "list agent-11"), (BOB, "allow use all")] {
        let before = slack.responses().len();
        slack.command(&mesh, user, CHANNEL, text).await.unwrap();
        let said = until("an answer", TURN_TIMEOUT, async || {
            slack.responses().get(before).cloned().ok_or("none")
        })
        .await;
        let said = said["text"].as_str().unwrap();
        match text {
            "list" => assert!(
                said.contains("*agent-000*")
                    && said.contains("*agent-119*")
                    && said.contains("*helper*"),
                "{said}"
            ),
            "list agent-11" => {
                assert!(said.lines().count() == 10 && said.contains("*agent-119*"), "{said}")
            }
            _ => assert!(said.contains("Allowed"), "{said}"),
        }
    }
    slack.command(&mesh, ANN, CHANNEL, "run").await.unwrap();
    let form =
        until("the form", TURN_TIMEOUT, async || slack.forms().first().cloned().ok_or("none"))
            .await;
    let menu = &form["blocks"][0]["element"];
    assert_eq!(
        (&menu["type"], &menu["initial_option"]["value"]),
        (&json!("external_select"), &json!("helper"))
    );
    let typed = |user: &str, value: &str| {
        json!({"type": "block_suggestion", "user": {"id": user, "team_id": "T0TEAM1"}, "team": {"id": "T0TEAM1"},
            "container": {"type": "view", "view_id": "V1"}, "api_app_id": "A0APP", "action_id": menu["action_id"],
            "block_id": form["blocks"][0]["block_id"], "value": value, "view": {"id": "V1", "callback_id": form["callback_id"]}})
    };
    // A service that finds no agents in time also answers with none, after 2.5 s. Only a faster
    // answer says that there are none.
    let offered = async |user: &str, value: &str| {
        until("an answer in time", TURN_TIMEOUT, async || {
            let asked = std::time::Instant::now();
            let answer = slack.suggestions(&mesh, &typed(user, value)).await.unwrap();
            let options = answer["options"].as_array().unwrap().iter();
            let options: Vec<_> =
                options.map(|option| option["value"].as_str().unwrap().to_owned()).collect();
            let took = asked.elapsed();
            if options.is_empty() && took > std::time::Duration::from_secs(2) {
                Err(took)
            } else {
                Ok(options)
            }
        })
        .await
    };
    until("all that a menu has room for", TURN_TIMEOUT, async || {
        let all = offered(ANN, "").await;
        if all.len() == 100 { Ok(()) } else { Err(all) }
    })
    .await;
    assert_eq!(
        offered(ANN, "agent-11").await,
        (110..120).map(|number| format!("agent-{number}")).collect::<Vec<_>>()
    );
    assert_eq!(offered(ANN, "No Such Name").await, Vec::<String>::new());
    assert_eq!(offered(GUEST, "agent").await, Vec::<String>::new());

    let values = json!({"agent": {"agent": {"selected_option": {"value": "agent-115"}}}, "words": {"words": {"value": "By form."}}});
    let sent = json!({"type": "view_submission", "team": {"id": "T0TEAM1"}, "user": {"id": ANN}, "view": {"id": "V1", "hash": "1.2",
        "callback_id": form["callback_id"], "private_metadata": CHANNEL, "state": {"values": values}}});
    assert_eq!(slack.send_action(&mesh, &sent).await.unwrap(), 200);
    let post = until("the question in the channel", TURN_TIMEOUT, async || {
        slack.channel_posts(CHANNEL).first().cloned().ok_or("none")
    })
    .await;
    assert!(visible_text(&post).contains("*agent-115*"), "{post}");
    wait_for_answer(&slack, CHANNEL, post["ts"].as_str().unwrap(), "Hello.").await;
    assert_no_complaints(&slack);
}
