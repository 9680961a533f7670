//! The operator protocol, line by line. The tests stand in for the reconciler and the workers.

use construct_bus::Bus;
use construct_domain::{
    MessageId, OrganizationId, TaskId,
    message::{Attachment, Block, CodeCall, CodeResult, Content, Source, ToolUse},
    task::{Phase, Stage, Turn},
};
use construct_proto::v1::{self, event::Payload, message_delta::Delta};
use construct_store::{AppendedMessage, EndedMessage, NewEvent, Store, TaskCommit};
use futures::{SinkExt as _, StreamExt as _};
use jiff::Timestamp;
use prost::Message as _;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    net::tcp::{OwnedReadHalf, OwnedWriteHalf},
};
use tokio_tungstenite::tungstenite::{Message as Frame, client::IntoClientRequest as _};
use uuid::Uuid;

use super::*;

/// A client over TCP.
struct Client {
    lines: Lines<BufReader<OwnedReadHalf>>,
    writer: OwnedWriteHalf,
}

impl Client {
    async fn connect(gateway: &Gateway) -> Self {
        let (reader, writer) =
            TcpStream::connect(gateway.operator).await.expect("it listens").into_split();
        Self { lines: BufReader::new(reader).lines(), writer }
    }

    async fn send(&mut self, line: &Value) {
        self.writer.write_all(format!("{line}\n").as_bytes()).await.expect("it reads");
    }

    async fn next(&mut self) -> Value {
        let line = wait_for("the next line", self.lines.next_line())
            .await
            .expect("it is open")
            .expect("it continues");
        serde_json::from_str(&line).expect("JSON")
    }

    async fn ask(&mut self, line: &Value) -> Value {
        self.send(line).await;
        self.next().await
    }

    /// The next line that matches.
    async fn next_where(&mut self, matches: impl Fn(&Value) -> bool) -> Value {
        loop {
            let line = self.next().await;
            if matches(&line) {
                return line;
            }
        }
    }
}

/// Answers messages as the mesh does, with given text instead of a model.
struct Mesh {
    store: Store,
    bus: Bus,
    task: TaskId,
}

impl Mesh {
    async fn connect(gateway: &Gateway, session: &Value) -> Self {
        let task = session.as_str().expect("an id").parse().expect("a task's id");
        Self { store: gateway.store(), bus: gateway.nats.bus().await, task }
    }

    fn event(&self, kind: &str, payload: Payload) -> v1::Event {
        v1::Event {
            r#type: kind.into(),
            organization_id: OrganizationId::LOCAL.to_string(),
            task_id: self.task.to_string(),
            payload: Some(payload),
            ..v1::Event::default()
        }
    }

    /// Admits the queued message to the transcript.
    async fn admit(&self) -> MessageId {
        let load = || async {
            self.store.task_load(self.task).await.expect("it loads").expect("it is there")
        };
        let before = wait_until("a message is queued", load, |task| task.queued.is_some()).await;
        let message = before.queued.expect("it is queued").message;
        let mut task = before.task.clone();
        (task.last_position, task.steps, task.phase) =
            (task.last_position + 1, task.steps + 1, Phase::InvokeModel);
        task.turn = Some(Turn { calls: 1, ..Turn::new(message, Stage::Model) });
        let admitted = Some((message, task.last_position));
        let commit = TaskCommit { admitted, ..TaskCommit::new(&before, &task, Timestamp::now()) };
        self.store.task_commit(commit).await.expect("it commits");
        message
    }

    /// Publishes progress as a worker does.
    async fn progress(&self, numbered: Vec<(&str, Payload)>) {
        let step = self
            .store
            .task_load(self.task)
            .await
            .expect("it loads")
            .expect("it is there")
            .task
            .steps;
        for (number, (kind, payload)) in (0..).zip(numbered) {
            let index = (1 << 32) + number;
            let id = format!("{}.{step}.{index}", self.task);
            let event = v1::Event { id, step, index, ..self.event(kind, payload) };
            self.bus.publish_event(&event).await.expect("it is published");
        }
    }

    /// Appends a block to the transcript, in the middle of a turn.
    async fn append(&self, source: Source, block: Block) {
        let before = self.store.task_load(self.task).await.expect("it loads").expect("it is there");
        let mut task = before.task.clone();
        task.last_position += 1;
        let id = MessageId::from_uuid(Uuid::now_v7());
        let message = v1::Message {
            metadata: Some(v1::Metadata { id: id.to_string(), ..v1::Metadata::default() }),
            spec: Some(v1::MessageSpec {
                blocks: vec![crate::convert::block(&block)],
                ..v1::MessageSpec::default()
            }),
            status: Some(v1::MessageStatus {
                source: crate::convert::source(source).into(),
                position: task.last_position,
                ..v1::MessageStatus::default()
            }),
        };
        let event = v1::Event { payload: Some(Payload::Message(message)), ..v1::Event::default() };
        let created = NewEvent {
            kind: "message.created".to_owned(),
            payload: event.encode_to_vec(),
            step: Some(task.steps),
        };
        let commit = TaskCommit {
            appended: vec![AppendedMessage {
                id,
                position: task.last_position,
                source,
                content: Content { blocks: vec![block] },
                agent: (source == Source::Assistant).then_some(task.agent),
                usage: Default::default(),
                step: None,
            }],
            events: vec![created],
            ..TaskCommit::new(&before, &task, Timestamp::now())
        };
        self.store.task_commit(commit).await.expect("it commits");
    }

    /// Ends the turn with an answer.
    async fn answer(&self, message: MessageId, text: &str) {
        let before = self.store.task_load(self.task).await.expect("it loads").expect("it is there");
        let mut task = before.task.clone();
        let step = task.steps;
        (task.turn, task.phase, task.next_wake) = (None, Phase::AwaitInput, None);
        task.last_position += 1;
        let id = MessageId::from_uuid(Uuid::now_v7());
        let answer = v1::Message {
            metadata: Some(v1::Metadata { id: id.to_string(), ..v1::Metadata::default() }),
            spec: Some(v1::MessageSpec {
                blocks: vec![v1::Block {
                    block: Some(v1::block::Block::Text(v1::Text { text: text.into() })),
                }],
                ..v1::MessageSpec::default()
            }),
            status: Some(v1::MessageStatus {
                source: v1::MessageSource::Assistant.into(),
                position: task.last_position,
                ..v1::MessageStatus::default()
            }),
        };
        let completed = v1::TurnCompleted {
            message_id: message.to_string(),
            outcome: v1::TurnOutcome::Completed.into(),
            turns: 1,
            error: None,
        };
        let events = [
            ("message.created", Payload::Message(answer)),
            ("turn.completed", Payload::TurnCompleted(completed)),
        ];
        let event = |(kind, payload)| {
            let event = v1::Event { payload: Some(payload), ..v1::Event::default() };
            NewEvent { kind: str::to_owned(kind), payload: event.encode_to_vec(), step: Some(step) }
        };
        let commit = TaskCommit {
            appended: vec![AppendedMessage {
                id,
                position: task.last_position,
                source: Source::Assistant,
                content: Content { blocks: vec![Block::Text(text.to_owned())] },
                agent: Some(task.agent),
                usage: Default::default(),
                step: None,
            }],
            ended_message: Some(EndedMessage { message, error: None }),
            events: events.map(event).into(),
            ..TaskCommit::new(&before, &task, Timestamp::now())
        };
        self.store.task_commit(commit).await.expect("it commits");
    }

    /// Answers the next message, with the text in pieces and a tool call in between.
    async fn answer_next(&self, text: &str) {
        let message = self.admit().await;
        let delta = |index, text: &str| {
            let delta = Some(Delta::Text(text.to_owned()));
            ("message.delta", Payload::MessageDelta(v1::MessageDelta { index, block: 0, delta }))
        };
        let (first, rest) = text.split_at(2);
        let called = v1::ToolCalled {
            step_id: "s".into(),
            number: 1,
            name: "readFile".into(),
            arguments: "{\"path\":\"a\"}".into(),
            script_id: "c".into(),
            ..v1::ToolCalled::default()
        };
        let result = v1::ToolResult {
            step_id: "s".into(),
            number: 1,
            name: "readFile".into(),
            succeeded: true,
            result: "\"text\"".into(),
            duration_micros: 1,
            script_id: "c".into(),
        };
        let progress = vec![
            delta(0, first),
            ("tool.called", Payload::ToolCalled(called)),
            ("tool.result", Payload::ToolResult(result)),
            delta(1, rest),
        ];
        self.progress(progress).await;
        self.answer(message, text).await;
    }
}

fn user_message(text: &str) -> Value {
    json!([{"role": "user", "content": [{"type": "text", "text": text}]}])
}

#[tokio::test]
async fn query_is_answered_at_the_end_of_its_turn() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let made = client
        .ask(&json!({"id": "1", "type": "dispatch", "agentID": "ada", "messages": user_message("one")}))
        .await;
    assert_eq!(
        (&made["id"], &made["agentID"], &made["stopReason"]),
        (&json!("1"), &json!("ada"), &json!("dispatched"))
    );
    let session = made["sessionID"].clone();
    let mesh = Mesh::connect(&gateway, &session).await;
    mesh.answer_next("the first").await;

    client
        .send(&json!({"id": "2", "type": "query", "sessionID": session, "messages": user_message("two")}))
        .await;
    mesh.answer_next("the second").await;
    let answer = client.next().await;
    assert_eq!((&answer["id"], &answer["stopReason"]), (&json!("2"), &json!("end_turn")));
    assert_eq!(answer["content"], json!([{"type": "text", "text": "the second"}]));
    assert_eq!(answer["turns"][0]["request"]["content"][0]["text"], "one");
    assert_eq!(answer["turns"][1]["response"]["content"][0]["text"], "the second");

    // Other protocols show the same conversation. Here it is listed, exported and deleted.
    let task = gateway.url(&format!("/v1/tasks/{}/messages", session.as_str().expect("an id")));
    let messages: Value =
        http().get(task).send().await.expect("it answers").json().await.expect("JSON");
    assert_eq!(messages["messages"].as_array().expect("messages").len(), 4);
    let listed = client.ask(&json!({"type": "list_sessions", "agentID": "ada"})).await;
    assert_eq!(listed["sessions"][0]["sessionID"], session);
    let exported = client.ask(&json!({"type": "export_session", "sessionID": session})).await;
    assert_eq!(exported["session"]["turns"], answer["turns"]);
    let deleted = client.ask(&json!({"type": "delete_session", "sessionID": session})).await;
    assert_eq!(deleted, json!({"type": "session-deleted", "sessionID": session}));
    let missing = client.ask(&json!({"type": "export_session", "sessionID": session})).await;
    assert_eq!(missing["content"][0]["code"], "SESSION_NOT_FOUND");
}

#[tokio::test]
async fn request_with_content_is_answered_with_events() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let request = json!({
        "id": "r", "type": "dispatch", "agentID": "ada", "content": "Deploy", "files": ["src/main.ts"], "metadata": {"a": 1},
    });
    let started = client.ask(&request).await;
    assert_eq!(
        (&started["type"], &started["id"], &started["metadata"]),
        (&json!("turn-started"), &json!("r"), &json!({"a": 1}))
    );
    let mesh = Mesh::connect(&gateway, &started["sessionID"]).await;
    mesh.answer_next("hello there").await;
    let mut lines = Vec::new();
    while lines.last().is_none_or(|line: &Value| line["type"] != "turn-completed") {
        lines.push(client.next().await);
    }
    let types: Vec<_> = lines.iter().map(|line| line["type"].as_str().expect("a type")).collect();
    assert_eq!(
        types,
        ["response-block", "tool-call", "tool-result", "response-chunk", "turn-completed"],
        "{lines:?}"
    );
    assert_eq!((&lines[0]["content"], &lines[3]["content"]), (&json!("he"), &json!("llo there")));
    assert_eq!(
        (&lines[1]["name"], &lines[1]["input"]),
        (&json!("readFile"), &json!({"path": "a"}))
    );
    assert_eq!((&lines[1]["toolID"], &lines[2]["toolID"]), (&json!("c/1"), &json!("c/1")));
    assert_eq!(
        (&lines[4]["turnID"], &lines[4]["stopReason"]),
        (&started["turnID"], &json!("end_turn"))
    );
    assert!(
        lines.iter().all(|line| line["id"] == "r" && line["sessionID"] == started["sessionID"]),
        "{lines:?}"
    );
}

#[tokio::test]
async fn exported_turn_has_inputs_and_results_of_tools() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let made = client
        .ask(&json!({"type": "dispatch", "agentID": "ada", "messages": user_message("one")}))
        .await;
    let session = &made["sessionID"];
    let mut stream = Client::connect(&gateway).await;
    stream.ask(&json!({"type": "stream", "sessionID": session})).await;

    let mesh = Mesh::connect(&gateway, session).await;
    let message = mesh.admit().await;
    let call = CodeCall { id: "c".into(), code: "read_file('a')".into() };
    mesh.append(Source::Assistant, Block::CodeInterpreterCall(call)).await;
    let used = |number, succeeded, arguments: &str, result: &str| ToolUse {
        number,
        name: "read_file".into(),
        succeeded,
        duration_micros: 1,
        arguments: arguments.into(),
        result: result.into(),
    };
    let tool_uses = vec![
        used(1, true, r#"{"path":"a"}"#, r#""text""#),
        used(2, false, r#"{"path":"b"}"#, r#"{"name":"NotFound"}"#),
        // A call whose arguments and result were not kept.
        used(3, false, "", ""),
    ];
    let result =
        CodeResult { id: "c".into(), output: "text".into(), tool_uses, ..CodeResult::default() };
    mesh.append(Source::System, Block::CodeInterpreterResult(result)).await;
    let image = Attachment {
        media_type: "image/png".into(),
        name: "chart".into(),
        data: "AP+A".into(),
        ..Attachment::default()
    };
    mesh.append(Source::Assistant, Block::Attachment(image)).await;
    mesh.answer(message, "it is text").await;

    let code = stream.next_where(|line| line["content"][0]["type"] == "code").await;
    assert_eq!(code["stopReason"], "tool_use");
    let image = stream.next_where(|line| line["content"][0]["type"] == "image").await;
    assert_eq!(
        image["content"],
        json!([{"type": "image", "url": "data:image/png;base64,AP+A", "alt": "chart"}])
    );
    let end = stream.next_where(|line| line["stopReason"] == "end_turn").await;
    assert_eq!(end["content"][1], image["content"][0]);
    let calls = end["turns"][0]["toolCalls"].as_array().expect("calls");
    let calls: Vec<_> = calls
        .iter()
        .map(|call| json!([call["id"], call["input"], call["result"], call["error"]]))
        .collect();
    let expected = [
        json!(["c/1", {"path": "a"}, "\"text\"", null]),
        json!(["c/2", {"path": "b"}, "", "{\"name\":\"NotFound\"}"]),
        json!(["c/3", {}, "", "TOOL_EXECUTION_FAILED"]),
        json!(["c", {"code": "read_file('a')"}, "text", null]),
    ];
    assert_eq!(calls, expected);
    let exported = client.ask(&json!({"type": "export_session", "sessionID": session})).await;
    assert_eq!(exported["session"]["turns"], end["turns"]);
}

#[tokio::test]
async fn broken_result_stream_resumes_at_the_cursor() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let made = client
        .ask(&json!({"type": "dispatch", "agentID": "ada", "messages": user_message("one")}))
        .await;
    let session = &made["sessionID"];
    let mesh = Mesh::connect(&gateway, session).await;
    mesh.answer_next("the first").await;

    // A client without turns gets all of them; a client that has some gets the others.
    let mut stream = Client::connect(&gateway).await;
    let start = stream.ask(&json!({"id": "s", "type": "stream", "sessionID": session})).await;
    assert_eq!(
        (&start["stopReason"], start["turns"].as_array().map(Vec::len)),
        (&json!("stream_start"), Some(1))
    );
    let start = client.ask(&json!({"type": "stream", "sessionID": session, "lastTurn": 1})).await;
    assert_eq!(start["turns"], json!([]));

    client
        .send(&json!({"type": "dispatch", "sessionID": session, "messages": user_message("two")}))
        .await;
    mesh.answer_next("the second").await;
    let piece = stream.next_where(|line| line["content"][0]["type"] == "text").await;
    assert_eq!((&piece["content"][0]["text"], &piece["id"]), (&json!("th"), &json!("s")));
    drop(stream);
    // The cursor of the last line is exactly where the stream resumes.
    let mut resumed = Client::connect(&gateway).await;
    resumed.send(&json!({"type": "stream", "sessionID": session, "cursor": piece["cursor"]})).await;
    assert_eq!(resumed.next().await["stopReason"], "stream_start");
    let call = resumed.next().await;
    assert_eq!(
        (&call["content"][0]["type"], &call["content"][0]["name"]),
        (&json!("tool"), &json!("readFile"))
    );
    let result = resumed.next().await;
    let execution = &result["turns"][0]["toolCalls"][0];
    assert_eq!(
        (&execution["result"], &execution["input"]),
        (&json!("\"text\""), &json!({"path": "a"}))
    );
    // The result has the call's input, also for a client that resumes after the call.
    let mut after_call = Client::connect(&gateway).await;
    after_call
        .send(&json!({"type": "stream", "sessionID": session, "cursor": call["cursor"]}))
        .await;
    assert_eq!(after_call.next().await["stopReason"], "stream_start");
    assert_eq!(after_call.next().await["turns"], result["turns"]);
    assert_eq!(resumed.next().await["content"][0]["text"], "e second");
    let end = resumed.next().await;
    assert_eq!(
        (&end["stopReason"], &end["content"][0]["text"]),
        (&json!("end_turn"), &json!("the second"))
    );
    assert_eq!(end["turns"].as_array().map(Vec::len), Some(2));
    // The stream ends with the session.
    client.send(&json!({"type": "delete_session", "sessionID": session})).await;
    assert_eq!(
        resumed.next_where(|line| !line["stopReason"].is_null()).await["stopReason"],
        "stream_end"
    );
}

/// All tasks, once there is one.
async fn wait_for_tasks(gateway: &Gateway) -> Vec<v1::Task> {
    let tasks = || async {
        gateway
            .tasks()
            .list_tasks(v1::ListTasksRequest::default())
            .await
            .expect("a list")
            .into_inner()
            .tasks
    };
    wait_until("a session exists", tasks, |tasks| !tasks.is_empty()).await
}

/// How many messages a session has.
async fn messages(gateway: &Gateway, session: &Value) -> usize {
    let task = session.as_str().expect("an id").to_owned();
    let request = v1::ListMessagesRequest { task, ..v1::ListMessagesRequest::default() };
    gateway.messages().list_messages(request).await.expect("a list").into_inner().messages.len()
}

/// The lines up to the end of a turn, without their cursors, and the cursors.
async fn read_turn(client: &mut Client) -> (Vec<Value>, Vec<Value>) {
    let (mut lines, mut cursors): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
    while lines.last().is_none_or(|line| line["type"] != "turn-completed") {
        let mut line = client.next().await;
        cursors.push(line.as_object_mut().expect("an object").remove("cursor").unwrap_or_default());
        lines.push(line);
    }
    (lines, cursors)
}

#[tokio::test]
async fn repeated_query_runs_once_and_gets_the_same_answer() {
    let gateway = Gateway::start().await.with_agent().await;
    let ask = json!({"id": Uuid::now_v7().to_string(), "type": "query", "agentID": "ada", "messages": user_message("one")});
    let mut lost = Client::connect(&gateway).await;
    lost.send(&ask).await;
    let session = json!(id(wait_for_tasks(&gateway).await[0].metadata.clone()));
    let mesh = Mesh::connect(&gateway, &session).await;
    let message = mesh.admit().await;
    drop(lost);
    // While its turn is in progress.
    let mut retry = Client::connect(&gateway).await;
    retry.send(&ask).await;
    mesh.answer(message, "the first").await;
    let first = retry.next().await;
    assert_eq!(
        (&first["sessionID"], &first["stopReason"]),
        (&session, &json!("end_turn")),
        "{first}"
    );
    assert_eq!(first["content"], json!([{"type": "text", "text": "the first"}]));
    // After its turn, when the conversation has continued.
    retry
        .send(&json!({"type": "dispatch", "sessionID": session, "messages": user_message("two")}))
        .await;
    assert_eq!(retry.next().await["stopReason"], "dispatched");
    mesh.answer_next("the second").await;
    let late = Client::connect(&gateway).await.ask(&ask).await;
    for field in ["id", "sessionID", "content", "usage", "stopReason"] {
        assert_eq!(late[field], first[field], "{field} of {late}");
    }
    assert_eq!((wait_for_tasks(&gateway).await.len(), messages(&gateway, &session).await), (1, 4));

    // Another request with the same id is refused and not executed.
    let mut other = ask.clone();
    other["messages"] = user_message("three");
    let refused = Client::connect(&gateway).await.ask(&other).await;
    assert_eq!(refused["content"][0]["code"], "INVALID_REQUEST", "{refused}");
    let wrong = json!({"type": "dispatch", "idempotencyKey": "a b", "sessionID": session, "messages": user_message("x")});
    let refused = retry.ask(&wrong).await;
    assert_eq!(refused["content"][0]["code"], "INVALID_REQUEST", "{refused}");
    // An id that is not a UUID identifies a request only on its connection.
    for _ in 0..2 {
        let next = json!({"id": "1", "type": "dispatch", "sessionID": session, "messages": user_message("more")});
        assert_eq!(Client::connect(&gateway).await.ask(&next).await["stopReason"], "dispatched");
    }
    assert_eq!(messages(&gateway, &session).await, 6);
}

#[tokio::test]
async fn repeated_dispatch_replays_the_same_events() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let made = client
        .ask(&json!({"type": "dispatch", "agentID": "ada", "messages": user_message("zero")}))
        .await;
    let session = &made["sessionID"];
    let mesh = Mesh::connect(&gateway, session).await;
    mesh.answer_next("not relevant").await;
    let ask = json!({"type": "dispatch", "idempotencyKey": "mine", "sessionID": session, "content": "one"});
    let mut turns = Vec::new();
    for first in [true, false] {
        let mut client = Client::connect(&gateway).await;
        client.send(&ask).await;
        if first {
            mesh.answer_next("hello there").await;
        }
        turns.push(read_turn(&mut client).await.0);
    }
    assert_eq!(turns[0].len(), 6, "{turns:?}");
    assert_eq!(turns[0], turns[1]);
    assert_eq!(messages(&gateway, session).await, 4);
}

#[tokio::test]
async fn broken_event_stream_resumes_at_the_cursor() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    client.send(&json!({"id": "r", "type": "dispatch", "agentID": "ada", "content": "one"})).await;
    let session = json!(id(wait_for_tasks(&gateway).await[0].metadata.clone()));
    let mesh = Mesh::connect(&gateway, &session).await;
    let (lines, _) = tokio::join!(read_turn(&mut client), mesh.answer_next("the first"));
    let (first, cursors) = lines;
    assert_eq!(first.len(), 6, "{first:?}");

    // A client without a cursor gets the same lines again; a client with one gets the lines after
    // it.
    let ask = json!({"id": "r", "type": "stream", "form": "events", "sessionID": session});
    let mut from_start = Client::connect(&gateway).await;
    from_start.send(&ask).await;
    assert_eq!(read_turn(&mut from_start).await.0, first);
    let mut rest = Client::connect(&gateway).await;
    let mut from = ask.clone();
    from["cursor"] = cursors[2].clone();
    rest.send(&from).await;
    assert_eq!(read_turn(&mut rest).await.0, first[3..]);
    // After the last piece of an answer, the answer is not repeated as a from_start.
    let mut end = Client::connect(&gateway).await;
    from["cursor"] = cursors[4].clone();
    end.send(&from).await;
    assert_eq!(read_turn(&mut end).await.0, first[5..]);
    // A client that has a turn gets the next ones.
    let mut later = Client::connect(&gateway).await;
    let mut without = ask.clone();
    without["lastTurn"] = 1.into();
    later.send(&without).await;
    let two = client
        .ask(&json!({"id": "r", "type": "dispatch", "sessionID": session, "content": "two"}))
        .await;
    mesh.answer_next("the second").await;
    let (second, _) = read_turn(&mut from_start).await;
    let types: Vec<_> = second.iter().map(|line| line["type"].as_str().expect("a type")).collect();
    let expected = [
        "turn-started",
        "response-block",
        "tool-call",
        "tool-result",
        "response-chunk",
        "turn-completed",
    ];
    assert_eq!(types, expected, "{second:?}");
    assert_eq!((&second[0], &second[5]["turnID"]), (&two, &two["turnID"]));
    assert_eq!(read_turn(&mut client).await.0, second[1..]);
    assert_eq!(read_turn(&mut rest).await.0, second);
    assert_eq!(read_turn(&mut later).await.0, second);

    // A message deleted before its turn has no turn. The stream ends with the session.
    client
        .send(&json!({"id": "x", "type": "dispatch", "sessionID": session, "content": "three"}))
        .await;
    let three = client.next_where(|line| line["type"] == "turn-started").await;
    let message = three["turnID"].as_str().expect("an id").to_owned();
    let delete = v1::DeleteMessageRequest { message, ..v1::DeleteMessageRequest::default() };
    gateway.messages().delete_message(delete).await.expect("it is queued");
    assert_eq!(from_start.next().await["turnID"], three["turnID"]);
    let dropped = from_start.next().await;
    assert_eq!(
        (&dropped["code"], &dropped["turnID"]),
        (&json!("SESSION_ERROR"), &three["turnID"]),
        "{dropped}"
    );
    client.send(&json!({"type": "delete_session", "sessionID": session})).await;
    let end = from_start.next().await;
    assert_eq!(
        (&end["type"], &end["code"]),
        (&json!("error"), &json!("SESSION_NOT_FOUND")),
        "{end}"
    );
}

#[tokio::test]
async fn cancel_does_not_wait_behind_a_stream() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let made = client
        .ask(&json!({"type": "dispatch", "agentID": "ada", "messages": user_message("one")}))
        .await;
    let session = &made["sessionID"];
    let task = session.as_str().expect("an id");
    // Streams with more data than the client reads.
    for number in 0..4 {
        client.send(&json!({"id": format!("s{number}"), "type": "stream", "sessionID": session, "cursor": "0"})).await;
    }
    let mesh = Mesh::connect(&gateway, session).await;
    mesh.admit().await;
    let text = "x".repeat(200_000);
    let delta = |index| {
        let delta = Some(Delta::Text(text.clone()));
        ("message.delta", Payload::MessageDelta(v1::MessageDelta { index, block: 0, delta }))
    };
    mesh.progress((0..60).map(delta).collect()).await;
    client.send(&json!({"id": "c", "type": "cancel", "sessionID": session})).await;
    // The cancel is recorded although the client has not read a line yet.
    let is_recorded = || async {
        gateway
            .store()
            .task_load(task.parse().expect("an id"))
            .await
            .expect("it loads")
            .expect("there")
            .has_new_intents()
    };
    wait_until("the cancel is recorded", is_recorded, |recorded| *recorded).await;
    let cancelled = client.next_where(|line| line["id"] == "c").await;
    assert_eq!(cancelled, json!({"type": "cancelled", "sessionID": task, "id": "c"}));
    // A single stream can be canceled as well, and its id used again.
    let cancel = json!({"id": "e", "type": "cancel", "requestID": "s0"});
    client.send(&cancel).await;
    assert_eq!(client.next_where(|line| line["id"] == "e").await["type"], "cancelled");
    client.send(&json!({"id": "s0", "type": "list_sessions"})).await;
    assert_eq!(
        client.next_where(|line| line["id"] == "s0" && line["type"] == "sessions").await["sessions"]
            [0]["sessionID"],
        task
    );
}

#[tokio::test]
async fn cancel_is_accepted_at_the_request_limit() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let made = client
        .ask(&json!({"type": "dispatch", "agentID": "ada", "messages": user_message("one")}))
        .await;
    let session = &made["sessionID"];
    for number in 0..64 {
        client
            .send(&json!({"id": format!("s{number}"), "type": "stream", "sessionID": session}))
            .await;
    }
    for _ in 0..64 {
        assert_eq!(client.next().await["stopReason"], "stream_start");
    }
    let refused = client.ask(&json!({"id": "l", "type": "list_sessions"})).await;
    assert_eq!(
        (&refused["id"], &refused["content"][0]["code"]),
        (&json!("l"), &json!("RATE_LIMIT_EXCEEDED"))
    );
    let cancelled = client.ask(&json!({"id": "c", "type": "cancel", "sessionID": session})).await;
    assert_eq!(cancelled, json!({"type": "cancelled", "sessionID": session, "id": "c"}));
}

#[tokio::test]
async fn stopping_gateway_tells_waiting_clients_to_retry() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let made = client
        .ask(&json!({"type": "dispatch", "agentID": "ada", "messages": user_message("one")}))
        .await;
    let session = &made["sessionID"];
    client.send(&json!({"id": "s", "type": "stream", "sessionID": session})).await;
    assert_eq!(client.next().await["stopReason"], "stream_start");
    client
        .send(&json!({"id": "e", "type": "dispatch", "sessionID": session, "content": "two"}))
        .await;
    client.next_where(|line| line["type"] == "turn-started").await;
    client
        .send(&json!({"id": "q", "type": "query", "sessionID": session, "messages": user_message("three")}))
        .await;
    wait_until("all messages are sent", || messages(&gateway, session), |count| *count == 3).await;

    gateway.context.lifecycle().stop("the test wants it to");
    let mut lines = Vec::new();
    while let Some(line) =
        wait_for("the end", client.lines.next_line()).await.expect("it is no reset")
    {
        lines.push(serde_json::from_str::<Value>(&line).expect("JSON"));
    }
    for (id, form) in [("s", "results"), ("e", "events"), ("q", "results")] {
        let answers: Vec<_> = lines.iter().filter(|line| line["id"] == id).collect();
        let last = answers.last().unwrap_or_else(|| panic!("`{id}` got no answer: {lines:?}"));
        let error = if form == "events" { last } else { &last["content"][0] };
        assert_eq!(
            (&error["type"], &error["code"]),
            (&json!("error"), &json!("UNAVAILABLE")),
            "{last}"
        );
        assert!(error["details"]["retryAfter"].as_u64() >= Some(1), "{last}");
        assert_eq!(last["sessionID"], *session, "{last}");
    }
}

#[tokio::test]
async fn invalid_requests_have_error_codes() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let missing = "task_01890a5d-ac96-774b-bcce-b302099a8057";
    for (line, code) in [
        (json!({"type": "tea"}), "INVALID_REQUEST"),
        (json!({"type": "stream"}), "INVALID_REQUEST"),
        (json!({"type": "stream", "sessionID": missing, "form": "tea"}), "INVALID_REQUEST"),
        (json!({"type": "dispatch", "agentID": "ada"}), "INVALID_REQUEST"),
        (json!({"type": "dispatch", "messages": user_message("x")}), "AGENT_NOT_FOUND"),
        (
            json!({"type": "dispatch", "agentID": "eve", "messages": user_message("x")}),
            "AGENT_NOT_FOUND",
        ),
        (
            json!({"type": "send_context_request", "context": {"userMessage": "x"}, "agentID": "E v e"}),
            "AGENT_NOT_FOUND",
        ),
        (
            json!({"type": "query", "sessionID": missing, "messages": user_message("x")}),
            "SESSION_NOT_FOUND",
        ),
        (json!({"type": "stream", "sessionID": "sess_abc123"}), "SESSION_NOT_FOUND"),
        (json!({"type": "cancel"}), "INVALID_REQUEST"),
        (json!({"type": "cancel", "requestID": "none"}), "INVALID_REQUEST"),
    ] {
        let mut line = line;
        line["id"] = "e".into();
        let answer = client.ask(&line).await;
        assert_eq!(
            (&answer["content"][0]["type"], &answer["stopReason"]),
            (&json!("error"), &json!("error")),
            "{answer}"
        );
        assert_eq!(answer["content"][0]["code"], code, "{line}: {answer}");
    }
    let events =
        client.ask(&json!({"id": "e", "type": "dispatch", "agentID": "eve", "content": "x"})).await;
    assert_eq!((&events["type"], &events["code"]), (&json!("error"), &json!("AGENT_NOT_FOUND")));
    client.writer.write_all(b"no json\n").await.expect("it reads");
    assert_eq!(client.next().await["content"][0]["code"], "INVALID_REQUEST");
    client.writer.write_all(&vec![b' '; 5 << 20]).await.expect("it reads");
    client.writer.write_all(b"\n").await.expect("it reads");
    assert_eq!(client.next().await["content"][0]["code"], "CONTEXT_TOO_LARGE");
    // None of that breaks the connection, nor do too many lines.
    for number in 0..300 {
        let id = number.to_string();
        let line = if number % 2 == 0 {
            json!({"id": id})
        } else {
            json!({"id": id, "type": "query", "content": ""})
        };
        client.send(&line).await;
    }
    // Each refusal has the form of its request.
    let is_refused = |line: &Value| line.to_string().contains("RATE_LIMIT_EXCEEDED");
    let results = client.next_where(|line| is_refused(line) && line["content"].is_array()).await;
    let events = client.next_where(|line| is_refused(line) && line["type"] == "error").await;
    assert_eq!(results["content"][0]["details"], json!({"retryAfter": 1}));
    assert_eq!(
        (&events["code"], &events["details"]),
        (&json!("RATE_LIMIT_EXCEEDED"), &json!({"retryAfter": 1}))
    );
    for (line, odd) in [(results, 0), (events, 1)] {
        assert_eq!(
            line["id"].as_str().and_then(|id| id.parse::<u32>().ok()).map(|id| id % 2),
            Some(odd),
            "{line}"
        );
    }
}

#[tokio::test]
async fn session_may_call_only_the_tools_the_client_names() {
    let gateway = Gateway::start().await.with_agent().await;
    let mut client = Client::connect(&gateway).await;
    let context = json!({"project": {"name": "p", "path": "/srv/p"}, "tools": ["read"], "userMessage": "look"});
    client.send(&json!({"id": "1", "type": "send_context_request", "agentID": "ada", "context": context})).await;
    let made = wait_for_tasks(&gateway).await;
    let spec = made[0].spec.clone().expect("a specification");
    assert_eq!(spec.workspace, "/srv/p");
    let rules: Vec<_> =
        spec.policy.iter().map(|rule| (rule.action(), rule.tools.clone())).collect();
    assert_eq!(
        rules,
        [(v1::PolicyAction::Allow, vec!["read".to_owned()]), (v1::PolicyAction::Deny, vec![])]
    );
    let id = json!(id(made[0].metadata.clone()));
    Mesh::connect(&gateway, &id).await.answer_next("it is good").await;
    assert_eq!(client.next().await["content"][0]["text"], "it is good");
    let later = client
        .ask(&json!({"type": "query", "sessionID": id, "tools": ["bash"], "messages": user_message("x")}))
        .await;
    assert_eq!(later["content"][0]["code"], "INVALID_REQUEST");
    // A wrong name would leave the session without tools.
    for request in [
        json!({"type": "dispatch", "agentID": "ada", "tools": ["read", "readFile"], "messages": user_message("x")}),
        json!({"type": "send_context_request", "agentID": "ada", "context": {"tools": ["readFile"], "userMessage": "x"}}),
    ] {
        let error = client.ask(&request).await["content"][0].clone();
        assert_eq!(error["code"], "TOOL_NOT_AVAILABLE", "{error}");
        let message = error["message"].as_str().expect("a message");
        assert!(
            message.contains("`readFile`") && message.contains("read_file, read,"),
            "{message}"
        );
    }
    let events =
        json!({"type": "dispatch", "agentID": "ada", "tools": ["readFile"], "content": "x"});
    let error = client.ask(&events).await;
    assert_eq!((&error["type"], &error["code"]), (&json!("error"), &json!("TOOL_NOT_AVAILABLE")));
    assert_eq!(wait_for_tasks(&gateway).await.len(), 1, "a session was created");
}

#[tokio::test]
async fn websocket_carries_lines_and_refuses_web_pages() {
    let gateway = Gateway::start().await.with_agent().await;
    let open = |origin: &'static str| {
        let address = gateway.operator;
        async move {
            let mut request = format!("ws://{address}/").into_client_request().expect("a request");
            if !origin.is_empty() {
                request.headers_mut().insert("origin", origin.parse().expect("a value"));
            }
            let stream = TcpStream::connect(address).await.expect("it listens");
            tokio_tungstenite::client_async(request, stream).await
        }
    };
    assert!(open("https://evil.example").await.is_err());
    let (mut socket, _) = open("").await.expect("it connects");
    let ask = json!({"id": "1", "type": "list_sessions"});
    socket.send(Frame::text(ask.to_string())).await.expect("it reads");
    let Some(Ok(Frame::Text(text))) = wait_for("an answer", socket.next()).await else {
        panic!("no text")
    };
    assert_eq!(
        serde_json::from_str::<Value>(&text).expect("JSON"),
        json!({"type": "sessions", "sessions": [], "nextPageToken": "", "id": "1"})
    );

    // A request that a page can post to any port without a preflight is not read as lines.
    let mut stream = TcpStream::connect(gateway.operator).await.expect("it listens");
    let body = json!({"type": "dispatch", "agentID": "ada", "messages": user_message("x")});
    let post =
        format!("POST / HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n\r\n{body}\n");
    stream.write_all(post.as_bytes()).await.expect("it reads");
    let mut answer = String::new();
    // A reset is as good as a close.
    _ = wait_for("the connection ends", stream.read_to_string(&mut answer)).await;
    assert!(
        gateway
            .tasks()
            .list_tasks(v1::ListTasksRequest::default())
            .await
            .expect("a list")
            .into_inner()
            .tasks
            .is_empty()
    );
}

#[tokio::test]
async fn oversized_websocket_line_closes_with_a_reason() {
    let gateway = Gateway::start().await;
    let mut stream =
        BufReader::new(TcpStream::connect(gateway.operator).await.expect("it listens"));
    let request = format!(
        "GET / HTTP/1.1\r\nhost: {}\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
         sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        gateway.operator
    );
    stream.write_all(request.as_bytes()).await.expect("it reads");
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert_ne!(
            wait_for("its answer", stream.read_line(&mut head)).await.expect("it answers"),
            0,
            "{head}"
        );
    }
    assert!(head.starts_with("HTTP/1.1 101"), "{head}");
    // The header of a frame of 5 MiB is enough: no payload has to follow.
    let mut frame = vec![0x81, 0xff];
    frame.extend((5_u64 << 20).to_be_bytes());
    frame.extend([0; 4]);
    stream.write_all(&frame).await.expect("it reads");
    let mut answer = Vec::new();
    // A reset is as good as a close.
    _ = wait_for("the connection ends", stream.read_to_end(&mut answer)).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.contains("CONTEXT_TOO_LARGE"), "{answer}");
}

#[tokio::test]
async fn auth_reports_whether_the_key_is_valid() {
    let gateway = Gateway::start().await;
    let mut client = Client::connect(&gateway).await;
    let wrong = client.ask(&json!({"type": "auth", "id": "1", "key": "ct_wrong"})).await;
    assert!(wrong.to_string().contains("UNAUTHORIZED"), "{wrong}");
    // After a failed authentication the client is not the operator.
    let listed = client.ask(&json!({"type": "list_sessions", "id": "2"})).await;
    assert!(listed.to_string().contains("UNAUTHORIZED"), "{listed}");
    let owner = (OrganizationId::LOCAL, construct_domain::UserId::LOCAL);
    let scopes = [construct_domain::access::Scope::Admin];
    let (_, key) = crate::tests::walk::create_key(
        &gateway,
        owner,
        construct_domain::access::Role::Owner,
        &scopes,
        None,
    )
    .await;
    let elsewhere =
        json!({"type": "auth", "id": "3", "key": key, "organizationID": "org_elsewhere"});
    let elsewhere = client.ask(&elsewhere).await;
    assert!(elsewhere.to_string().contains("UNAUTHORIZED"), "{elsewhere}");
    // The organization of a failed attempt is not kept.
    let right = client.ask(&json!({"type": "auth", "id": "4", "key": key})).await;
    assert_eq!(right["type"], "authenticated", "{right}");
    let listed = client.ask(&json!({"type": "list_sessions", "id": "5"})).await;
    assert_eq!(listed["type"], "sessions", "{listed}");
}
