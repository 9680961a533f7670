//! `construct new` and `construct resume`: in a terminal, and without one.

use construct_proto::v1::{self, MessageSource, TaskPhase, TurnOutcome};
use construct_tests::{
    client::{Client, Conversation, TURN_TIMEOUT, id},
    mesh::{Mesh, Service},
    terminal::{CTRL_C, CTRL_D, ESC, TAB, contains_text},
    transcript,
    wait::until,
};
use serde_json::json;

use super::{construct, spawn, terminal};

/// Longer than a line of the terminal.
const GREETING: &str = "Good morning to you, and to everybody who reads along! There is a great deal that I could tell you, \
                        and I shall tell it word by word, so that you see how it comes.";

/// The only task of an agent.
async fn task_of(client: &Client, agent: &str) -> Conversation {
    let filter = v1::list_tasks_request::Filter { agent: agent.to_owned(), ..Default::default() };
    let request = v1::ListTasksRequest { page: None, filter: Some(filter) };
    let task = until("a task", TURN_TIMEOUT, async || {
        let tasks = client
            .tasks()
            .list_tasks(request.clone())
            .await
            .map_err(|status| status.to_string())?;
        match tasks.into_inner().tasks.as_slice() {
            [task] => Ok(id(task.metadata.as_ref())),
            tasks => Err(format!("{} tasks", tasks.len())),
        }
    })
    .await;
    client.conversation(&task)
}

/// Whether a line is the input line below `agent`'s answers.
fn has_prompt(screen: &str) -> bool {
    screen.lines().any(|line| ["❯", "⋯", "‖"].iter().any(|sign| line.contains(&format!(" {sign}"))))
}

#[tokio::test]
async fn conversation_in_terminal_is_continued_later() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "hello", "turns": [{"text": GREETING, "tokens_per_second": 60}]},
        {"match": "sum", "turns": [{"text": "Adding.", "code": "create_file('n.txt', '3'); 1 + 2"}, {"text": "It is {{last_result}}."}]},
        {"match": "think", "turns": [{"text": "I thought of it.", "fault": {"stall_ms": 600_000, "times": 1}}]},
    ]});
    mesh.scripted_agent("one", &script).await.unwrap();
    mesh.scripted_agent(
        "two",
        &json!({"conversations": [{"match": "who", "turns": [{"text": "Two speaks."}]}]}),
    )
    .await
    .unwrap();
    let client = mesh.client().unwrap();
    let mut person =
        terminal(&mesh, &["new", "--workspace", &mesh.workspace().display().to_string()]);
    person.wait_for_text("one ❯").await;
    person.wait_for_text("type a message; /help lists the keys").await;

    // The answer is visible as it grows, above the input line.
    person.type_line("hello").await;
    person.wait_for_text("✓ completed").await;
    person.wait_for_text("❯ hello").await;
    person.wait_for_text(GREETING).await;
    let pictures = person.pictures();
    let begun = pictures.iter().position(|picture| has_prompt(picture)).unwrap();
    let growing = pictures
        .iter()
        .filter(|picture| picture.contains("Good") && !contains_text(picture, GREETING))
        .count();
    assert!(growing > 5, "the answer came in {growing} steps: {pictures:#?}");
    for picture in &pictures[begun..] {
        assert!(has_prompt(picture), "the line that is typed in went away:\n{picture}");
        let shown: String = picture.lines().filter(|line| line.starts_with("Good")).collect();
        assert!(GREETING.starts_with(&shown), "the answer is garbled:\n{picture}");
    }

    person.type_line("the sum, please").await;
    person.wait_for_text("It is 3.").await;
    person.wait_for_text("✓ create_file(path: \"n.txt\", content: \"3\")").await;
    assert_eq!(crate::read(&mesh.workspace().join("n.txt")), "3");

    // Esc suspends; the next message resumes, and the interrupted turn ends first.
    let conversation = task_of(&client, "one").await;
    conversation.wait_until_idle().await;
    person.type_line("think").await;
    person.wait_for_text("one ⋯").await;
    conversation.wait_for_phase(TaskPhase::InvokeModel).await;
    person.press(ESC).await;
    person.wait_for_text("one ‖").await;
    conversation.wait_for_phase(TaskPhase::Suspended).await;
    person.type_line("and then?").await;
    person.wait_for_text("I thought of it.").await;
    person.wait_for_text("You said: and then?").await;
    conversation.wait_until_idle().await;
    person.wait_for_text("one ❯").await;

    // Tab cycles through the agents.
    person.press(TAB).await;
    person.wait_for_text("two ❯").await;
    person.press(TAB).await;
    person.wait_for_text("one ❯").await;
    person.press(TAB).await;
    person.type_line("who are you?").await;
    person.wait_for_text("the agent is now two").await;
    person.wait_for_text("Two speaks.").await;
    let task = conversation.wait_until_idle().await;
    assert_eq!(task.spec.unwrap().agent, "two");
    person
        .wait_for_screen("the end of the turn", |screen| {
            screen.lines().last().is_some_and(|line| line.starts_with("two ❯"))
        })
        .await;
    person.press(CTRL_C).await;
    person.wait_for_text("Ctrl-C again leaves").await;
    person.press(CTRL_C).await;
    let farewell = format!("continue with: construct resume {}", conversation.id());
    person.wait_for_text(&farewell).await;
    assert!(!has_prompt(person.screen().lines().last().unwrap_or_default()));
    assert_eq!(person.wait_for_exit().await, 0);

    // Later: the whole conversation is there again and continues. The task that changed last is not
    // the one that was created last.
    client.create_task("one", None).await.unwrap();
    conversation.ask("between").await;
    let mut person = terminal(&mesh, &["resume", "--last"]);
    person.wait_for_text("two ❯").await;
    for part in [
        "❯ hello",
        GREETING,
        "It is 3.",
        "I thought of it.",
        "Two speaks.",
        "❯ between",
        "You said: between",
    ] {
        person.wait_for_text(part).await;
    }
    let before =
        person.pictures().iter().filter(|picture| !picture.contains("You said: between")).count();
    assert!(before <= 2, "the history is shown in one go, and not in {before} steps");
    person.type_line("who again?").await;
    person
        .wait_for_screen("a second answer", |screen| screen.matches("Two speaks.").count() == 2)
        .await;
    conversation.wait_until_idle().await;
    person.press(CTRL_D).await;
    assert_eq!(person.wait_for_exit().await, 0);
    let transcript = conversation.transcript().await;
    transcript.check(&[
        "hello",
        "the sum, please",
        "think",
        "and then?",
        "who are you?",
        "between",
        "who again?",
    ]);
    let last =
        transcript.from_source(MessageSource::Assistant).pop().map(transcript::status).unwrap();
    let agents: Vec<String> = transcript
        .from_source(MessageSource::Assistant)
        .into_iter()
        .map(|message| transcript::status(message).agent_id)
        .collect();
    assert!(agents[0] != last.agent_id, "each answer names the agent that gave it");
}

#[tokio::test]
async fn terminal_is_restored_however_the_conversation_ends() {
    let mut mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "stall", "turns": [{"text": "Slowly.", "fault": {"stall_ms": 600_000, "times": 0}}]},
        {"match": "locked", "turns": [{"text": "x", "fault": {"class": "authentication", "times": 0, "message": "the key is refused"}}]},
    ]});
    for agent in ["broken", "ended", "watched", "piped"] {
        mesh.scripted_agent(agent, &script).await.unwrap();
    }
    let client = mesh.client().unwrap();

    // No agent has this name: refused before any input.
    let person = terminal(&mesh, &["new", "--agent", "nobody"]);
    person.wait_for_text("error: agent `nobody` not found").await;
    assert_eq!(person.wait_for_exit().await, 1);
    let person = terminal(&mesh, &["resume", "task_01890a5d-ac96-774b-bcce-b302099a8057"]);
    person.wait_for_text("not found").await;
    assert_eq!(person.wait_for_exit().await, 1);

    // The command is told to end while a turn runs: the turn continues.
    let ended = async {
        let mut person = terminal(&mesh, &["new", "--agent", "ended"]);
        person.wait_for_text("ended ❯").await;
        person.type_line("stall").await;
        let conversation = task_of(&client, "ended").await;
        conversation.wait_for_phase(TaskPhase::InvokeModel).await;
        person.wait_for_text("· invoke model").await;
        person.signal("TERM").unwrap();
        assert_eq!(person.wait_for_exit().await, 130);
        assert_eq!(
            conversation.task().await.unwrap().status.unwrap().phase(),
            TaskPhase::InvokeModel
        );

        // Ctrl-C cancels the turn; the conversation continues.
        let mut person = terminal(&mesh, &["resume", conversation.id()]);
        person.wait_for_text("ended ⋯").await;
        person.press(CTRL_C).await;
        person.wait_for_text("■ cancelled").await;
        let task = conversation.wait_until_idle().await;
        assert_eq!(task.status.unwrap().last_outcome(), TurnOutcome::Cancelled);
        person.type_line("locked").await;
        person.wait_for_text("AUTHENTICATION: the key is refused").await;
        person.type_line("/nonsense").await;
        person.wait_for_text("✗ there is no command /nonsense; /help lists them").await;
        person.type_line("/explain").await;
        person
            .wait_for_text("The task waits for a message from a user; the last turn has failed.")
            .await;
        person.type_line("/agent broken").await;
        person.wait_for_text("broken ❯").await;
        // The task is deleted elsewhere.
        conversation.delete().await;
        person.wait_for_text("error: the task was deleted").await;
        assert!(!person.screen().contains("reconnecting"), "{}", person.screen());
        assert_eq!(person.wait_for_exit().await, 1);
    };
    ended.await;

    // The gateway stops and comes back.
    let mut person = terminal(&mesh, &["new", "--agent", "watched"]);
    person.wait_for_text("watched ❯").await;
    person.type_line("first").await;
    person.wait_for_text("You said: first").await;
    person.wait_for_text("✓ completed").await;
    mesh.kill(Service::Gateway).unwrap();
    person.wait_for_text("; reconnecting").await;
    mesh.spawn(Service::Gateway).unwrap();
    mesh.wait_until_ready(Service::Gateway).await.unwrap();
    person.wait_for_text("· reconnected").await;
    person.type_line("second").await;
    person.wait_for_text("You said: second").await;
    person.wait_for_text("watched ❯").await;
    person.press(CTRL_D).await;
    assert_eq!(person.wait_for_exit().await, 0);
}

#[tokio::test]
async fn conversation_without_terminal_answers_line_by_line() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "locked", "turns": [{"text": "x", "fault": {"class": "authentication", "times": 0, "message": "the key is refused"}}]},
        {"match": "stall", "turns": [{"text": "Slowly.", "fault": {"stall_ms": 600_000, "times": 0}}]},
    ]});
    mesh.scripted_agent("piped", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let done = construct(&mesh, &["new"], "one\n\n  two  \n").await;
    assert_eq!(
        (done.code(), done.output.as_str()),
        (0, "You said: one\nYou said:   two  \n"),
        "{done:?}"
    );
    let conversation = task_of(&client, "piped").await;
    assert!(done.errors.contains(&format!("construct resume {}", conversation.id())), "{done:?}");
    assert!(
        !done.errors.contains('\x1b') && !done.output.contains('\x1b'),
        "nothing is for a terminal: {done:?}"
    );

    // A program gets the answers to its messages, without the transcript.
    let done = construct(&mesh, &["resume", "--last"], "three").await;
    assert_eq!((done.code(), done.output.as_str()), (0, "You said: three\n"), "{done:?}");
    assert!(!done.errors.contains("one"), "{done:?}");
    conversation.transcript().await.check(&["one", "  two  ", "three"]);

    // The exit code is that of the last turn.
    let done = construct(&mesh, &["resume", conversation.id()], "locked\n").await;
    assert_eq!((done.code(), done.output.as_str()), (1, ""), "{done:?}");
    assert!(done.errors.contains("the key is refused"), "{done:?}");

    // Interrupted: the turn is canceled first.
    let job = spawn(&mesh, &["resume", conversation.id()], "stall\nnever said\n").await;
    conversation.wait_for_phase(TaskPhase::InvokeModel).await;
    job.signal("INT");
    let done = job.wait().await;
    assert_eq!(done.code(), 130, "{done:?}");
    let status = conversation.wait_until_idle().await.status.unwrap();
    assert_eq!(status.last_outcome(), TurnOutcome::Cancelled);

    // Suspended while it waits, and before.
    let job = spawn(&mesh, &["resume", conversation.id()], "stall again\n").await;
    conversation.wait_for_phase(TaskPhase::InvokeModel).await;
    conversation.suspend().await;
    assert_eq!(job.wait().await.code(), 6);
    let done = construct(&mesh, &["resume", "--last"], "more\n").await;
    assert_eq!(done.code(), 6, "{done:?}");
    assert!(done.errors.contains("construct task resume"), "{done:?}");
    let said = ["one", "  two  ", "three", "locked", "stall"];
    let users: Vec<String> = conversation
        .transcript()
        .await
        .from_source(MessageSource::User)
        .into_iter()
        .map(transcript::text)
        .collect();
    assert_eq!(users[..5], said);
    assert_eq!(
        users.len(),
        6,
        "nothing was said to a suspended task, or after an interrupt: {users:?}"
    );

    // Deleted while it works: the conversation ends.
    conversation.resume().await;
    conversation.cancel("enough").await;
    conversation.wait_until_idle().await;
    let job = spawn(&mesh, &["resume", conversation.id()], "stall\nmore\n").await;
    conversation.wait_for_phase(TaskPhase::InvokeModel).await;
    conversation.delete().await;
    let done = job.wait().await;
    assert_eq!(done.code(), 1, "{done:?}");
    assert!(done.errors.ends_with("error: the task was deleted\n"), "{done:?}");

    // With several agents, a program has to name one.
    mesh.scripted_agent("other", &json!([])).await.unwrap();
    let done = construct(&mesh, &["new"], "hello\n").await;
    assert_eq!(done.code(), 2, "{done:?}");
    assert!(done.errors.contains("other, piped"), "{done:?}");
}
