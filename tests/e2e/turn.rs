//! Turns as users see them: answers, scripts, queues, limits, and all kinds of control.

use construct_proto::v1::{self, MessageSource, TaskPhase, TurnOutcome, event::Payload};
use construct_tests::{
    client::{TURN_TIMEOUT, wait_for_file},
    mesh::Mesh,
    recorder::{check_order, records, streamed_text, types},
    transcript,
    wait::until,
};
use serde_json::json;
use tonic::Code;

use crate::{read, wait_for_process_end};

#[tokio::test]
async fn message_is_answered_through_model_and_script() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"turns": [
        {
            "text": "Let me look at that first.",
            "code": [[
                "create_file('notes/sum.txt', String(19 + 23));",
                "const ran = execute_command('echo out; echo err >&2; exit 3');",
                "print(`exit ${ran.exit_code}, ${ran.stdout.trim()}, ${ran.stderr.trim()}`);",
                "`the sum is ${read_file('notes/sum.txt')}`",
            ]],
            "usage": {"input": 1000, "output": 200, "cache_read": 300, "cache_write": 40},
            "tokens_per_second": 400,
        },
        {"text": "I found: {{last_result}}", "usage": {"input": 7, "output": 5}},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    let spec = v1::TaskSpec {
        agent: "worker".into(),
        workspace: mesh.workspace().display().to_string(),
        title: "Sums".into(),
        ..v1::TaskSpec::default()
    };
    let conversation = client.create_task_with(spec).await.unwrap();
    let recorder = conversation.record();
    let task = conversation.ask("What is the sum?").await;

    // The effects are there, and the answer has the computed value.
    assert_eq!(read(&mesh.workspace().join("notes/sum.txt")), "42");
    let transcript = conversation.transcript().await;
    transcript.check(&["What is the sum?"]);
    let result = transcript.result();
    assert_eq!(
        (result.output.as_str(), result.error.as_str()),
        ("exit 3, out, err\nthe sum is 42", "")
    );
    let uses: Vec<(u32, &str, bool)> = result
        .tool_uses
        .iter()
        .map(|used| (used.number, used.name.as_str(), used.succeeded))
        .collect();
    assert_eq!(
        uses,
        [(1, "create_file", true), (2, "execute_command", true), (3, "read_file", true)]
    );
    // Their inputs and outputs are kept.
    let given: serde_json::Value = serde_json::from_str(&result.tool_uses[2].arguments).unwrap();
    assert_eq!(given["path"], "notes/sum.txt");
    assert!(result.tool_uses[2].result.contains("42"), "{:?}", result.tool_uses);
    assert_eq!(
        transcript.answers(),
        ["Let me look at that first.", "I found: exit 3, out, err\nthe sum is 42"],
        "{}",
        transcript.show()
    );

    // Every token is charged once, exactly.
    let first = 1000 * 3_000_000 + 200 * 15_000_000 + 300 * 300_000 + 40 * 3_750_000;
    let second = 7 * 3_000_000 + 5 * 15_000_000;
    let usage = |message: &v1::Message| transcript::status(message).usage.unwrap_or_default();
    let answers = transcript.from_source(MessageSource::Assistant);
    assert_eq!(usage(answers[0]).cost_pico_usd, first);
    assert_eq!(
        usage(answers[1]),
        v1::Usage {
            input_tokens: 7,
            output_tokens: 5,
            cost_pico_usd: second,
            ..v1::Usage::default()
        }
    );
    let status = task.status.clone().unwrap();
    let total = v1::Usage {
        input_tokens: 1007,
        output_tokens: 205,
        cache_read_tokens: 300,
        cache_write_tokens: 40,
        cost_pico_usd: first + second,
        ..v1::Usage::default()
    };
    assert_eq!(status.usage, Some(total));
    let uses: Vec<(&str, i64)> =
        [("create_file", 1), ("execute_command", 1), ("read_file", 1)].into();
    let mut counted: Vec<(&str, i64)> =
        status.tool_uses.iter().map(|(tool, uses)| (tool.as_str(), *uses)).collect();
    counted.sort_unstable();
    assert_eq!(counted, uses);
    assert_eq!(status.last_outcome(), TurnOutcome::Completed);
    assert_eq!(
        (status.last_error, status.message_count, status.queued_count, status.turns_used),
        (None, 4, 0, 0)
    );
    assert_eq!(task.spec.unwrap().title, "Sums");

    // A subscriber saw everything, in order.
    let events = recorder.wait_for_sequence(status.event_sequence).await;
    check_order(&events);
    let kinds: Vec<&str> =
        records(&events).into_iter().map(|event| event.r#type.as_str()).collect();
    assert_eq!(
        kinds,
        [
            "task.created",
            "message.created",
            "task.phase_changed",
            "message.created",
            "task.phase_changed",
            "message.created",
            "task.phase_changed",
            "message.created",
            "turn.completed",
            "task.phase_changed",
        ]
    );
    let phases: Vec<(TaskPhase, TaskPhase)> = events
        .iter()
        .filter_map(|event| match &event.payload {
            Some(Payload::PhaseChanged(changed)) => Some((changed.previous(), changed.phase())),
            _ => None,
        })
        .collect();
    let (idle, model, tools) =
        (TaskPhase::AwaitInput, TaskPhase::InvokeModel, TaskPhase::ExecuteTools);
    assert_eq!(phases, [(idle, model), (model, tools), (tools, model), (model, idle)]);
    assert_eq!(streamed_text(&events, 1), "Let me look at that first.");
    assert!(
        types(&events).iter().filter(|kind| **kind == "message.delta").count() > 3,
        "text is streamed in pieces"
    );
    assert_eq!(streamed_text(&events, 3), "I found: exit 3, out, err\nthe sum is 42");
    let mut open = Vec::new();
    let mut ended = Vec::new();
    for event in &events {
        match &event.payload {
            Some(Payload::ToolCalled(called)) => open.push((called.number, called.name.clone())),
            Some(Payload::ToolResult(result)) => {
                assert_eq!(
                    open.pop(),
                    Some((result.number, result.name.clone())),
                    "a result follows its call"
                );
                ended.push((result.number, result.name.clone(), result.succeeded));
            }
            _ => {}
        }
    }
    assert!(open.is_empty());
    assert_eq!(ended.len(), 3);
    let turn = events.iter().find_map(|event| match &event.payload {
        Some(Payload::TurnCompleted(turn)) => Some(turn.clone()),
        _ => None,
    });
    let turn = turn.expect("the turn's end is published");
    assert_eq!((turn.outcome(), turn.turns, turn.error.clone()), (TurnOutcome::Completed, 2, None));
    let user = transcript.from_source(MessageSource::User)[0];
    assert_eq!(turn.message_id, construct_tests::client::id(user.metadata.as_ref()));

    // An idle task explains that it waits for its user.
    let why = conversation.explain().await.unwrap();
    assert_eq!(
        (why.phase(), why.waiting_for.as_str()),
        (TaskPhase::AwaitInput, "a message from a user")
    );
}

#[tokio::test]
async fn scripts_errors_queues_limits_titles_and_agents_work_together() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "several", "turns": [
            {"code": ["create_file('one.txt', '1'); print('first')", "print(read_file('one.txt')); 'second'"]},
            {"text": "{{last_result}}"},
        ]},
        {"match": "throw", "turns": [
            {"code": [[
                "print('before the error');",
                "function inner() { throw new TypeError('a broken promise'); }",
                "inner();",
            ]]},
            {"text": "{{last_result}}"},
        ]},
        {"match": "gate", "turns": [
            {"code": "execute_command('touch begun; while [ ! -e go ]; do sleep 0.05; done'); 'opened'"},
            {"text": "{{last_result}}"},
        ]},
        {"match": "endless", "turns": [{"code": "1"}, {"code": "2"}, {"code": "3"}, {"code": "4"}]},
        {"match": "quick", "turns": [{"text": "quick: {{last_user_text}}"}]},
        {"match": "titled", "title": "\"A good title\"\nand more", "turns": [{"text": "hello"}]},
    ]});
    mesh.scripted_agent("one", &script).await.unwrap();
    mesh.scripted_agent("two", &json!({"turns": [{"text": "unused"}, {"text": "two took over"}]}))
        .await
        .unwrap();
    let client = mesh.client().unwrap();
    let begin = async |name: &str| {
        client.create_task("one", Some(&mesh.folder(name).unwrap())).await.unwrap()
    };

    let several = async {
        let conversation = begin("several").await;
        conversation.ask("several").await;
        let transcript = conversation.transcript().await;
        transcript.check(&["several"]);
        let results: Vec<String> =
            transcript.results().into_iter().map(|result| result.output).collect();
        assert_eq!(results, ["first\n", "1\nsecond"]);
    };

    let throws = async {
        let conversation = begin("throw").await;
        let task = conversation.ask("throw").await;
        let transcript = conversation.transcript().await;
        transcript.check(&["throw"]);
        // The model's own view of the result, repeated by its answer.
        let answer = transcript.answers().pop().unwrap();
        for part in ["before the error", "TypeError: a broken promise", "at inner (script.js:2"] {
            assert!(answer.contains(part), "{part:?} is not in the model's input:\n{answer}");
        }
        assert_eq!(
            task.status.unwrap().last_outcome(),
            TurnOutcome::Completed,
            "a script's error is the model's matter"
        );
    };

    let queue = async {
        let folder = mesh.folder("queue").unwrap();
        let conversation = client.create_task("one", Some(&folder)).await.unwrap();
        let recorder = conversation.record();
        conversation.submit("gate").await;
        wait_for_file(&folder.join("begun"), |_| true).await;
        for n in 1..=3 {
            conversation.submit(&format!("quick {n}")).await;
        }
        let waiting = conversation.task().await.unwrap().status.unwrap();
        assert_eq!((waiting.phase(), waiting.queued_count), (TaskPhase::ExecuteTools, 3));
        // Queued messages can be edited and removed.
        let queued: Vec<String> = {
            let transcript = conversation.transcript().await;
            transcript
                .unplaced_messages()
                .iter()
                .map(|message| construct_tests::client::id(message.metadata.as_ref()))
                .collect()
        };
        let block = v1::block::Block::Text(v1::Text { text: "quick and changed".into() });
        let update = v1::UpdateMessageRequest {
            message: queued[1].clone(),
            blocks: vec![v1::Block { block: Some(block) }],
            ..v1::UpdateMessageRequest::default()
        };
        client.messages().update_message(update).await.unwrap();
        let delete = v1::DeleteMessageRequest {
            message: queued[2].clone(),
            ..v1::DeleteMessageRequest::default()
        };
        client.messages().delete_message(delete).await.unwrap();
        std::fs::write(folder.join("go"), "").unwrap();
        let task = conversation.wait_until_idle().await;
        let transcript = conversation.transcript().await;
        transcript.check(&["gate", "quick 1", "quick and changed"]);
        assert_eq!(
            transcript.answers(),
            ["", "opened", "quick: quick 1", "quick: quick and changed"]
        );
        let events = recorder.wait_for_sequence(task.status.unwrap().event_sequence).await;
        check_order(&events);
        assert_eq!(types(&events).iter().filter(|kind| **kind == "turn.completed").count(), 3);
    };

    let limit = async {
        let spec = v1::TaskSpec { agent: "one".into(), max_turns: 3, ..v1::TaskSpec::default() };
        let conversation = client.create_task_with(spec).await.unwrap();
        let recorder = conversation.record();
        let task = conversation.ask("endless").await;
        let status = task.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::MaxTurns);
        assert_eq!(status.last_error.as_ref().map(|error| error.code.as_str()), Some("MAX_TURNS"));
        let transcript = conversation.transcript().await;
        transcript.check(&["endless"]);
        assert_eq!(
            transcript.results().len(),
            3,
            "the last script was run before the limit was noticed"
        );
        let user = transcript.from_source(MessageSource::User)[0];
        assert!(
            transcript::status(user).error.contains("limit of 3 model calls"),
            "{}",
            transcript.show()
        );
        let events = recorder.wait_for_sequence(status.event_sequence).await;
        assert!(types(&events).contains(&"error"));
        // The limit is per message, not per task.
        let task = conversation.ask("quick again").await;
        assert_eq!(task.status.unwrap().last_outcome(), TurnOutcome::Completed);
        conversation.transcript().await.check(&["endless", "quick again"]);
    };

    let title = async {
        let conversation = begin("title").await;
        conversation.ask("titled").await;
        let task = conversation
            .wait_for_task("a title", |task, _| {
                task.spec.as_ref().is_some_and(|spec| !spec.title.is_empty())
            })
            .await;
        assert_eq!(task.spec.unwrap().title, "A good title");
        conversation.transcript().await.check(&["titled"]);
    };

    let agents = async {
        let conversation = begin("agents").await;
        conversation.ask("quick first").await;
        let update = v1::UpdateTaskRequest {
            task: conversation.id().to_owned(),
            agent: Some("two".into()),
            ..v1::UpdateTaskRequest::default()
        };
        let task = client.tasks().update_task(update).await.unwrap().into_inner();
        assert_eq!(task.spec.unwrap().agent, "two");
        conversation.ask("who is there?").await;
        let transcript = conversation.transcript().await;
        transcript.check(&["quick first", "who is there?"]);
        assert_eq!(transcript.answers(), ["quick: quick first", "two took over"]);
        let authors: Vec<String> = transcript
            .from_source(MessageSource::Assistant)
            .into_iter()
            .map(|message| transcript::status(message).agent_id)
            .collect();
        assert!(authors[0].starts_with("agent_") && authors[0] != authors[1], "{authors:?}");
    };

    tokio::join!(several, throws, queue, limit, title, agents);
}

#[tokio::test]
async fn task_can_be_suspended_resumed_canceled_and_deleted_any_time() {
    let mesh = Mesh::start().await.unwrap();
    let stall = json!({"stall_ms": 600_000, "times": 1, "after_chars": 7});
    let script = json!({"conversations": [
        {"match": "stall", "turns": [{"text": "It is a long story.", "fault": stall}]},
        {"match": "command", "turns": [
            {"code": [[
                "create_file('done.txt', 'yes');",
                "const mark = read_file('mark.txt').trim();",
                "execute_command(`touch begun; sleep ${mark}; touch never`);",
            ]]},
            {"text": "After that: {{last_result}}"},
        ]},
        {"match": "quick", "turns": [{"text": "quick: {{last_user_text}}"}]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();
    // A duration that no other process sleeps for identifies the command.
    let begin = async |name: &str, seconds: &str| {
        let folder = mesh.folder(name).unwrap();
        let mark = format!("{seconds}.{}", std::process::id());
        std::fs::write(folder.join("mark.txt"), &mark).unwrap();
        (
            client.create_task("worker", Some(&folder)).await.unwrap(),
            folder,
            format!("sleep {mark}"),
        )
    };

    let suspended_model = async {
        let (conversation, ..) = begin("suspended-model", "301").await;
        let recorder = conversation.record();
        conversation.submit("stall").await;
        recorder.wait_for_count("message.delta", 1).await;
        conversation.suspend().await;
        let status = conversation.wait_for_phase(TaskPhase::Suspended).await.status.unwrap();
        assert_eq!(status.desired_phase(), TaskPhase::Suspended);
        // Messages are accepted meanwhile, and queued.
        conversation.submit("quick meanwhile").await;
        // Before that it waits for the call to stop.
        until("the task to wait for a person", TURN_TIMEOUT, async || {
            let why = conversation.explain().await.unwrap();
            if why.waiting_for.contains("a person to resume it; 1 message is queued") {
                Ok(())
            } else {
                Err(why)
            }
        })
        .await;
        conversation.resume().await;
        let task = conversation.wait_until_idle().await;
        let transcript = conversation.transcript().await;
        transcript.check(&["stall", "quick meanwhile"]);
        assert_eq!(transcript.answers(), ["It is a long story.", "quick: quick meanwhile"]);
        check_order(&recorder.wait_for_sequence(task.status.unwrap().event_sequence).await);
    };

    let suspended_command = async {
        let (conversation, folder, process) = begin("suspended-command", "302").await;
        conversation.submit("command").await;
        wait_for_file(&folder.join("begun"), |_| true).await;
        assert!(crate::is_running(&process));
        let why = conversation.explain().await.unwrap();
        assert!(why.waiting_for.starts_with("the script of the model to end"), "{why:?}");
        assert_eq!(why.attempt, 1, "{why:?}");
        assert!(
            why.since.is_some() && why.deadline.is_some() && why.next_wake.is_some(),
            "{why:?}"
        );
        assert!(why.step_id.starts_with("step_") && why.trace_id.len() == 32, "{why:?}");
        assert!(why.released_by.contains("interpreter"), "{why:?}");
        conversation.suspend().await;
        conversation.wait_for_phase(TaskPhase::Suspended).await;
        wait_for_process_end(&process).await;
        conversation.resume().await;
        conversation.wait_until_idle().await;
        let transcript = conversation.transcript().await;
        transcript.check(&["command"]);
        let answer = transcript.answers().pop().unwrap();
        for part in [
            "Stopped: the user suspended the task",
            "#1 create_file",
            "may or may not have had their effect: #3",
        ] {
            assert!(answer.contains(part), "{part:?} is not in the model's input:\n{answer}");
        }
        assert_eq!(read(&folder.join("done.txt")), "yes");
        assert!(!folder.join("never").exists());
    };

    let cancelled_model = async {
        let (conversation, ..) = begin("cancelled-model", "303").await;
        let recorder = conversation.record();
        conversation.submit("stall").await;
        conversation.submit("quick and dropped").await;
        recorder.wait_for_count("message.delta", 1).await;
        conversation.cancel("changed my mind").await;
        let status = conversation.wait_until_idle().await.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::Cancelled);
        let dropped = conversation.transcript().await;
        dropped.check(&["stall"]);
        let texts: Vec<String> =
            dropped.unplaced_messages().into_iter().map(transcript::text).collect();
        assert_eq!(texts, ["quick and dropped"]);
        let status = conversation.ask("quick afterwards").await.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::Completed);
        let transcript = conversation.transcript().await;
        transcript.check(&["stall", "quick afterwards"]);
        check_order(&recorder.wait_for_sequence(status.event_sequence).await);
    };

    let cancelled_command = async {
        let (conversation, folder, process) = begin("cancelled-command", "304").await;
        conversation.submit("command").await;
        wait_for_file(&folder.join("begun"), |_| true).await;
        conversation.cancel("enough").await;
        let status = conversation.wait_until_idle().await.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::Cancelled);
        wait_for_process_end(&process).await;
        let transcript = conversation.transcript().await;
        transcript.check(&["command"]);
        let result = transcript.result();
        assert!(result.error.contains("Stopped: enough"), "{result:?}");
        assert_eq!(
            status.tool_uses.get("create_file"),
            Some(&1),
            "what was done before counts: {status:?}"
        );
        // A canceled script does not run again.
        conversation.ask("quick").await;
        assert!(!folder.join("never").exists());
        conversation.transcript().await.check(&["command", "quick"]);
    };

    let deleted = async {
        let (conversation, folder, process) = begin("deleted", "305").await;
        let recorder = conversation.record();
        conversation.submit("command").await;
        wait_for_file(&folder.join("begun"), |_| true).await;
        conversation.delete().await;
        recorder.wait_for_end().await.unwrap();
        let events = recorder.events();
        assert_eq!(types(&events).last(), Some(&"task.deleted"));
        assert_eq!(conversation.task().await.unwrap_err().code(), Code::NotFound);
        assert_eq!(conversation.send("hello?").await.unwrap_err().code(), Code::NotFound);
        wait_for_process_end(&process).await;
    };

    tokio::join!(suspended_model, suspended_command, cancelled_model, cancelled_command, deleted);
}

#[tokio::test]
async fn failing_vendor_is_retried_and_its_error_reported() {
    let mesh = Mesh::start_with(&[
        ("CONSTRUCT_PROVIDERS_RETRY_FIRST", "20ms"),
        ("CONSTRUCT_PROVIDERS_RETRY_LAST", "20ms"),
    ])
    .await
    .unwrap();
    let fault = |class: &str, times: u32| json!({"class": class, "times": times, "message": "try later", "after_chars": 4});
    let script = json!({"conversations": [
        {"match": "blip", "turns": [{"text": "It worked.", "fault": fault("overloaded", 2)}]},
        {"match": "storm", "turns": [{"text": "It worked after all.", "fault": fault("rate_limited", 4)}]},
        {"match": "key", "turns": [{"text": "never", "fault": fault("authentication", 0)}]},
        {"match": "fine", "turns": [{"text": "fine"}]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let client = mesh.client().unwrap();

    let blip = async {
        // Within one call only subscribers of the text notice.
        let conversation = client.create_task("worker", None).await.unwrap();
        let recorder = conversation.record();
        let status = conversation.ask("blip").await.status.unwrap();
        let events = recorder.wait_for_sequence(status.event_sequence).await;
        check_order(&events);
        assert!(!types(&events).contains(&"error"));
        assert_eq!(types(&events).iter().filter(|kind| **kind == "message.restarted").count(), 2);
        assert_eq!(streamed_text(&events, 1), "It worked.");
        conversation.transcript().await.check(&["blip"]);
    };
    let storm = async {
        let conversation = client.create_task("worker", None).await.unwrap();
        let recorder = conversation.record();
        let status = conversation.ask("storm").await.status.unwrap();
        assert_eq!((status.last_outcome(), status.last_error), (TurnOutcome::Completed, None));
        let events = recorder.wait_for_sequence(status.event_sequence).await;
        check_order(&events);
        let errors: Vec<&str> = events
            .iter()
            .filter_map(|event| match &event.payload {
                Some(Payload::Error(error)) => Some(error.code.as_str()),
                _ => None,
            })
            .collect();
        assert_eq!(errors, ["RATE_LIMITED"]);
        let transcript = conversation.transcript().await;
        transcript.check(&["storm"]);
        assert_eq!(transcript.answers(), ["It worked after all."]);
    };
    let key = async {
        // Permanent errors fail at once, and the task remains usable.
        let conversation = client.create_task("worker", None).await.unwrap();
        let status = conversation.ask("key").await.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::Failed);
        assert_eq!(status.last_error.unwrap().code, "AUTHENTICATION");
        let status = conversation.ask("fine").await.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::Completed);
        let transcript = conversation.transcript().await;
        transcript.check(&["key", "fine"]);
        let user = transcript.from_source(MessageSource::User)[0];
        assert!(transcript::status(user).error.contains("try later"), "{}", transcript.show());
    };
    tokio::join!(blip, storm, key);
}

#[tokio::test]
async fn oversized_messages_arrive_and_huge_results_are_truncated() {
    let mesh = Mesh::start().await.unwrap();
    let script = json!({"conversations": [
        {"match": "print", "turns": [
            {"code": "for (let n = 0; n < 4; n++) print(String(n).repeat(60000)); 'v'.repeat(900000)"},
            {"text": "{{last_result}}"},
        ]},
        {"match": "read", "turns": [
            {"code": "create_file('big.txt', 'z'.repeat(3000000)); execute_command('cat big.txt | wc -c').stdout.trim()"},
            {"text": "{{last_result}}"},
        ]},
    ]});
    mesh.scripted_agent("worker", &script).await.unwrap();
    let conversation =
        mesh.client().unwrap().create_task("worker", Some(mesh.workspace())).await.unwrap();
    let recorder = conversation.record();
    // A megabyte is the largest user message; without a scripted turn for it, the model repeats it.
    let long = "ä".repeat(512 * 1024);
    let mut said = Vec::new();
    for text in [long.as_str(), "print", "read", long.as_str(), long.as_str()] {
        said.push(text);
        let status = conversation.ask(text).await.status.unwrap();
        assert_eq!(status.last_outcome(), TurnOutcome::Completed, "{:?}", status.last_error);
    }
    let transcript = conversation.transcript().await;
    // A failure must not print megabytes.
    assert_eq!(transcript.placed_messages().len(), 14);
    let answers = transcript.answers();
    assert!(answers[0] == format!("You said: {long}"), "the answer is whole");
    // The size of one script's result for the model is limited; otherwise one result would fill the
    // conversation for good.
    let told = &answers[2];
    assert!(
        told.len() < 66_000 && told.starts_with("000") && told.ends_with("vvv"),
        "{} bytes",
        told.len()
    );
    assert!(told.contains("bytes are left out here"));
    assert_eq!(answers[4], "3000000");
    transcript.check(&said);
    let last = conversation.task().await.unwrap().status.unwrap().event_sequence;
    let events = recorder.wait_for_sequence(last).await;
    check_order(&events);
    assert!(streamed_text(&events, 1) == answers[0], "the streamed text is whole");
}
