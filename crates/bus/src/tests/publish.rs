use std::{fs, os::unix::fs::PermissionsExt as _, path::PathBuf, time::Duration};

use construct_proto::mesh::v1::{
    CancelStep, StepLocation, StepLocationQuery, ToolCatalog, ToolCatalogRequest,
};
use futures::StreamExt as _;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{
    ORGANIZATION, event, execute, invoke, next, options, result, step, step_ref, task, within,
};
use crate::{
    Address as _, Bus, ConnectOptions, Dispatch, Pool, Service, TaskMessage,
    control::{CONFIRM_TIMEOUT, MAX_CONCURRENT_ANSWERS},
    envelope::{BLOB, INLINE_LIMIT, PAYLOAD_LIMIT, STEP, TYPE},
    publish, request, subject,
    testing::NatsServer,
    topology,
};

#[tokio::test]
async fn events_are_deduplicated_and_results_are_not() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut event = event(task(1), "message.created", 0, 0);
    event.id = "event-1".to_owned();
    let first = bus.publish_event(&event).await.expect("accepted");
    let second = bus.publish_event(&event).await.expect("accepted");
    assert!(!first.duplicate && second.duplicate);
    assert_eq!(first.sequence, second.sequence);

    let address = subject::TaskResult::new(task(1));
    let first = bus.publish(&address, &result(task(1), 1)).await.expect("accepted");
    let second = bus.publish(&address, &result(task(1), 1)).await.expect("accepted");
    assert!(!second.duplicate && second.sequence > first.sequence);
}

#[tokio::test]
async fn command_is_queued_once_until_acknowledged() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let address = subject::ModelInvoke::new(Pool::model_default(), task(1));
    assert_eq!(
        bus.publish_once(&address, &invoke(task(1), 3)).await.expect("sent"),
        Dispatch::Published
    );
    assert_eq!(
        bus.publish_once(&address, &invoke(task(1), 3)).await.expect("sent"),
        Dispatch::AlreadyQueued
    );

    let row = topology::model_consumer(&Pool::model_default());
    let place =
        bus.queue_position(&address, step(3), 0).await.expect("asked").expect("it stands there");
    for (other, round) in [(4, 0), (3, 1)] {
        assert_eq!(bus.queue_position(&address, step(other), round).await.expect("asked"), None);
    }

    // A command in progress is still queued.
    let mut consumer = bus.consume_model(&Pool::model_default(), options(1));
    let delivery = next(&mut consumer).await;
    assert_eq!(delivery.message, invoke(task(1), 3));
    assert_eq!(
        bus.publish_once(&address, &invoke(task(1), 3)).await.expect("sent"),
        Dispatch::AlreadyQueued
    );

    // The last delivered sequence shows which commands a worker has.
    let behind = subject::ModelInvoke::new(Pool::model_default(), task(2));
    bus.publish_once(&behind, &invoke(task(2), 4)).await.expect("sent");
    let waits =
        bus.queue_position(&behind, step(4), 0).await.expect("asked").expect("it stands there");
    let reached = bus.inspect_consumer(&row).await.expect("asked").expect("it is there").reached;
    assert!(place <= reached && reached < waits, "{place} {reached} {waits}");
    // Only an undelivered command is withdrawn this way.
    assert_eq!(
        bus.withdraw_undelivered(&address, &row, step(3)).await.expect("asked"),
        Some(false)
    );
    assert_eq!(bus.withdraw_undelivered(&behind, &row, step(3)).await.expect("asked"), None);
    assert_eq!(bus.withdraw_undelivered(&behind, &row, step(4)).await.expect("asked"), Some(true));
    assert_eq!(bus.withdraw_undelivered(&behind, &row, step(4)).await.expect("asked"), None);

    // After the acknowledgement the subject is free, even for the same step and within the
    // duplicate window.
    delivery.receipt.ack().await;
    within("the place to become free", async {
        while bus.publish_once(&address, &invoke(task(1), 3)).await.expect("sent")
            != Dispatch::Published
        {}
    })
    .await;
    assert_eq!(next(&mut consumer).await.delivery, 1);
}

#[tokio::test]
async fn later_round_supersedes_earlier_round() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let address = subject::CodeExecute::new(Pool::code_default(), task(1));
    let of_round = |round| {
        let mut command = execute(task(1), 3);
        command.step.as_mut().expect("it names a step").round = round;
        command
    };
    bus.publish_once(&address, &of_round(0)).await.expect("sent");
    let superseded = Dispatch::Superseded { step_id: step(3).to_string() };
    assert_eq!(bus.publish_once(&address, &of_round(1)).await.expect("sent"), superseded);
    assert_eq!(
        bus.publish_once(&address, &of_round(1)).await.expect("sent"),
        Dispatch::AlreadyQueued
    );
    assert_eq!(
        bus.publish_once(&address, &of_round(0)).await.expect("sent"),
        Dispatch::Stale { number: 3 }
    );
    let mut consumer = bus.consume_code(&Pool::code_default(), options(4));
    assert_eq!(next(&mut consumer).await.message, of_round(1));
}

#[tokio::test]
async fn later_step_supersedes_earlier_step() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let address = subject::CodeExecute::new(Pool::code_default(), task(1));
    bus.publish_once(&address, &execute(task(1), 3)).await.expect("sent");
    let superseded = Dispatch::Superseded { step_id: step(3).to_string() };
    assert_eq!(bus.publish_once(&address, &execute(task(1), 5)).await.expect("sent"), superseded);
    assert_eq!(
        bus.publish_once(&address, &execute(task(1), 4)).await.expect("sent"),
        Dispatch::Stale { number: 5 }
    );
    // Commands of other tasks or pools are independent.
    let other = subject::CodeExecute::new(Pool::code_default(), task(2));
    assert_eq!(
        bus.publish_once(&other, &execute(task(2), 1)).await.expect("sent"),
        Dispatch::Published
    );

    let mut consumer = bus.consume_code(&Pool::code_default(), options(4));
    assert_eq!(next(&mut consumer).await.message, execute(task(1), 5));
    assert_eq!(next(&mut consumer).await.message, execute(task(2), 1));
}

#[tokio::test]
async fn concurrent_dispatchers_queue_one_command() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let address = subject::ModelInvoke::new(Pool::model_default(), task(1));
    let command = invoke(task(1), 1);
    let sent =
        futures::future::join_all((0..20).map(|_| bus.publish_once(&address, &command))).await;
    let published =
        sent.iter().filter(|outcome| matches!(outcome, Ok(Dispatch::Published))).count();
    assert_eq!(published, 1, "{sent:?}");
    assert!(sent.iter().all(Result::is_ok), "{sent:?}");
}

fn large(task: construct_domain::TaskId, size: usize) -> construct_proto::mesh::v1::ModelInvoke {
    let mut command = invoke(task, 1);
    command.system = "x".repeat(size);
    command
}

fn blob_files(server: &NatsServer) -> Vec<PathBuf> {
    let mut dirs = vec![server.blobs()];
    let mut files = Vec::new();
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir).expect("the folder can be read") {
            let path = entry.expect("the entry can be read").path();
            if path.is_dir() { dirs.push(path) } else { files.push(path) }
        }
    }
    files
}

#[tokio::test]
async fn large_payload_travels_as_blob() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut tap = bus.tap("construct.v1.cmd.>").await.expect("tapped");
    let command = large(task(1), 3 * 1024 * 1024);
    let address = subject::ModelInvoke::new(Pool::model_default(), task(1));
    bus.publish_once(&address, &command).await.expect("sent");
    // The same content is stored once.
    let other = subject::ModelInvoke::new(Pool::new("other").expect("a name"), task(1));
    bus.publish_once(&other, &command).await.expect("sent");
    assert_eq!(blob_files(&server).len(), 1);
    assert_eq!(
        fs::metadata(server.blobs()).expect("it is there").permissions().mode() & 0o777,
        0o700
    );

    let tapped = within("the tapped message", tap.next()).await.expect("tapped");
    assert_eq!(tapped.subject, address.subject());
    assert_eq!(tapped.type_name.as_deref(), Some("construct.mesh.v1.ModelInvoke"));
    assert_eq!(tapped.payload, prost::Message::encode_to_vec(&command));
    assert!(tapped.blob.is_some_and(|blob| blob.starts_with("sha256:")));
    assert!(tapped.headers.contains(&(STEP.to_owned(), step(1).to_string())));

    let mut consumer = bus.consume_model(&Pool::model_default(), options(1));
    assert_eq!(next(&mut consumer).await.message, command);
}

#[tokio::test]
async fn oversized_payload_is_refused_with_its_size() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let address = subject::ModelInvoke::new(Pool::model_default(), task(1));
    let error =
        bus.publish_once(&address, &large(task(1), PAYLOAD_LIMIT)).await.expect_err("too large");
    assert!(
        matches!(error, publish::Error::TooLarge { size, limit: PAYLOAD_LIMIT } if size > PAYLOAD_LIMIT),
        "{error}"
    );
    assert!(!error.is_retryable());

    let without = Bus::connect(server.url(), ConnectOptions::new("test")).await.expect("connected");
    let error =
        without.publish_once(&address, &large(task(1), INLINE_LIMIT)).await.expect_err("too large");
    assert!(matches!(error, publish::Error::TooLarge { limit: INLINE_LIMIT, .. }), "{error}");
}

#[tokio::test]
async fn damaged_blob_is_dead_lettered_and_republishing_heals_it() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut dead = bus.tap("construct.v1.dead.>").await.expect("tapped");
    let address = subject::ModelInvoke::new(Pool::model_default(), task(1));
    let command = large(task(1), INLINE_LIMIT);
    bus.publish_once(&address, &command).await.expect("sent");
    let file = blob_files(&server).pop().expect("a blob");
    let mut content = fs::read(&file).expect("readable");
    content[1000] ^= 1;
    fs::write(&file, content).expect("writable");

    let mut consumer = bus.consume_model(&Pool::model_default(), options(1));
    let letter = tokio::select! {
        letter = within("the dead letter", dead.next()) => letter.expect("tapped"),
        delivery = consumer.next() => panic!("delivered in spite of the damage: {:?}", delivery.map(|it| it.delivery)),
    };
    let letter: construct_proto::mesh::v1::DeadLetter =
        prost::Message::decode(letter.payload).expect("a letter");
    assert!(letter.reason.contains("corrupt"), "{}", letter.reason);
    assert_eq!(letter.subject, address.subject());

    within("the damaged command to be gone", async {
        while bus.publish_once(&address, &command).await.expect("sent") != Dispatch::Published {}
    })
    .await;
    assert_eq!(next(&mut consumer).await.message, command);
}

#[tokio::test]
async fn publish_without_stream_or_server_fails_in_time() {
    let mut server = NatsServer::start().await;
    let bus = Bus::connect(server.url(), ConnectOptions::new("test")).await.expect("connected");
    let address = subject::TaskResult::new(task(1));
    let short = Duration::from_millis(500);
    let error =
        bus.publish_within(&address, &result(task(1), 1), short).await.expect_err("no stream");
    assert!(matches!(error, publish::Error::NoStream { .. }), "{error:?}");
    assert!(error.is_retryable());

    server.kill();
    let began = std::time::Instant::now();
    let error =
        bus.publish_within(&address, &result(task(1), 1), short).await.expect_err("no server");
    assert!(error.is_retryable(), "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());

    let error =
        Bus::connect(server.url(), ConnectOptions::new("test")).await.expect_err("no server");
    assert!(error.is_retryable(), "{error:?}");
}

#[tokio::test]
async fn cancellation_reaches_every_process_of_its_service() {
    let server = NatsServer::start().await;
    let (sender, one, two) = (server.bus().await, server.bus().await, server.bus().await);
    let mut cancels = Vec::new();
    for bus in [&one, &two] {
        cancels.push(bus.subscribe_cancel(Service::Interpreter).await.expect("subscribed"));
    }
    let cancel = |number| CancelStep {
        task_id: task(1).to_string(),
        step_id: step(number).to_string(),
        reason: "told to".to_owned(),
    };
    let to = |service| subject::Cancel { service };
    sender.publish_cancel(&to(Service::Providers), &cancel(1)).await.expect("sent");
    sender.publish_cancel(&to(Service::Interpreter), &cancel(2)).await.expect("sent");
    for cancels in &mut cancels {
        assert_eq!(within("the cancellation", cancels.next()).await, Some(cancel(2)));
    }
    assert!(
        sender.publish_cancel(&to(Service::Interpreter), &CancelStep::default()).await.is_err()
    );
}

#[tokio::test]
async fn cancel_subscription_waits_for_hanging_server() {
    let server = NatsServer::start().await;
    let (sender, bus) = (server.bus().await, server.bus().await);
    server.pause();
    let listening = tokio::spawn(async move { bus.subscribe_cancel(Service::Interpreter).await });
    // Longer than the server has for the confirmation.
    tokio::time::sleep(CONFIRM_TIMEOUT + Duration::from_millis(500)).await;
    assert!(!listening.is_finished());
    server.resume();
    let mut cancels =
        within("the subscription", listening).await.expect("no panic").expect("subscribed");
    let cancel = CancelStep {
        task_id: task(1).to_string(),
        step_id: step(1).to_string(),
        ..CancelStep::default()
    };
    sender
        .publish_cancel(&subject::Cancel { service: Service::Interpreter }, &cancel)
        .await
        .expect("sent");
    assert_eq!(within("the cancellation", cancels.next()).await, Some(cancel));
}

#[tokio::test]
async fn queued_result_is_found_for_its_step_only() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    for number in [1, 2] {
        bus.publish(&subject::TaskResult::new(task(1)), &result(task(1), number))
            .await
            .expect("sent");
    }
    for (of, number, waits) in
        [(task(1), 1, true), (task(1), 2, true), (task(1), 3, false), (task(2), 1, false)]
    {
        assert_eq!(
            bus.has_queued_result(of, step(number)).await.expect("the server says"),
            waits,
            "{number}"
        );
    }
}

#[tokio::test]
async fn tools_question_is_answered_within_its_pool() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let (pool, other) = (Pool::code_default(), Pool::new("cpu-8").expect("a name"));
    let question = ToolCatalogRequest { workspace: "/srv/w".to_owned() };
    let error = bus
        .request_tools(&pool, &question, Duration::from_secs(5))
        .await
        .expect_err("no process answers");
    assert!(matches!(error, request::Error::NoResponders), "{error:?}");

    let stop = CancellationToken::new();
    let interpreter = server.bus().await;
    let serving = tokio::spawn({
        let (stop, pool) = (stop.clone(), pool.clone());
        async move {
            interpreter
                .serve_tools(&pool, stop, |question| async move {
                    ToolCatalog { facts: question.workspace, ..Default::default() }
                })
                .await
        }
    });
    let answer = within("an answer", async {
        loop {
            if let Ok(answer) = bus.request_tools(&pool, &question, Duration::from_secs(5)).await {
                return answer;
            }
        }
    })
    .await;
    assert_eq!(answer.facts, "/srv/w");
    let patience = Duration::from_secs(5);
    assert!(bus.pool_is_served(&pool, patience).await.expect("asked"));
    assert!(!bus.pool_is_served(&other, patience).await.expect("asked"));
    stop.cancel();
    within("the server of tools to stop", serving).await.expect("no panic").expect("no error");
}

fn location_question(round: u32) -> StepLocationQuery {
    StepLocationQuery {
        organization_id: ORGANIZATION.to_string(),
        task_id: task(1).to_string(),
        step_id: step(3).to_string(),
        round,
        ..StepLocationQuery::default()
    }
}

/// Asks as soon as a process answers.
async fn ask(bus: &Bus, round: u32, timeout: Duration) -> Result<StepLocation, request::Error> {
    within("an answer", async {
        loop {
            match bus.ask(&subject::StepLocation, &location_question(round), timeout).await {
                Err(request::Error::NoResponders) => tokio::task::yield_now().await,
                answer => return answer,
            }
        }
    })
    .await
}

/// Work that never ends and reports that it was dropped.
struct Work(mpsc::UnboundedSender<()>);

impl Drop for Work {
    fn drop(&mut self) {
        // A failed test receives nothing.
        _ = self.0.send(());
    }
}

#[tokio::test]
async fn answer_is_dropped_when_its_timeout_has_passed() {
    let server = NatsServer::start().await;
    let (asks, answers) = tokio::join!(server.bus(), server.bus());
    let (dropped, mut reports) = mpsc::unbounded_channel();
    let stop = CancellationToken::new();
    let stopped = stop.clone();
    let serving = tokio::spawn(async move {
        let answer = move |_| {
            let work = Work(dropped.clone());
            async move {
                let _work = work;
                std::future::pending::<Option<StepLocation>>().await
            }
        };
        answers.answer(&subject::StepLocation, stopped, answer).await
    });
    let answer = ask(&asks, 0, Duration::from_millis(300)).await;
    assert!(matches!(answer, Err(request::Error::Timeout)), "{answer:?}");
    within("the work to be dropped", reports.recv()).await.expect("a report");
    stop.cancel();
    within("nothing is at work any more", serving).await.expect("no panic").expect("no error");
}

#[tokio::test]
async fn question_expired_while_queued_is_not_started() {
    let server = NatsServer::start().await;
    let (asks, answers) = tokio::join!(server.bus(), server.bus());
    let (started, mut reports) = mpsc::unbounded_channel();
    let (go, stop) = (CancellationToken::new(), CancellationToken::new());
    let (going, stopped) = (go.clone(), stop.clone());
    let serving = tokio::spawn(async move {
        let answer = move |question: StepLocationQuery| {
            let (started, going) = (started.clone(), going.clone());
            async move {
                started.send(question.round).expect("the test listens");
                going.cancelled().await;
                Some(StepLocation::default())
            }
        };
        answers.answer(&subject::StepLocation, stopped, answer).await
    });
    let long = Duration::from_secs(60);
    let asking: Vec<_> = (0..MAX_CONCURRENT_ANSWERS)
        .map(|_| {
            let asks = asks.clone();
            tokio::spawn(async move { ask(&asks, 1, long).await })
        })
        .collect();
    for _ in 0..MAX_CONCURRENT_ANSWERS {
        assert_eq!(within("every slot to be in use", reports.recv()).await, Some(1));
    }
    // The second one's timeout passes later, at both ends.
    for round in [2, 3] {
        let answer = ask(&asks, round, Duration::from_millis(200)).await;
        assert!(matches!(answer, Err(request::Error::Timeout)), "{answer:?}");
    }
    go.cancel();
    for asking in asking {
        within("an answer", asking).await.expect("no panic").expect("it is answered");
    }
    ask(&asks, 4, long).await.expect("it is answered");
    stop.cancel();
    within("it to stop", serving).await.expect("no panic").expect("no error");
    let mut rounds = Vec::new();
    while let Some(round) = reports.recv().await {
        rounds.push(round);
    }
    assert!(!rounds.contains(&2) && rounds.contains(&4), "{rounds:?}");
}

#[tokio::test]
async fn question_without_group_is_answered_by_the_owner() {
    let server = NatsServer::start().await;
    let (asks, knows, other) = tokio::join!(server.bus(), server.bus(), server.bus());
    let stop = CancellationToken::new();
    let answers = |bus: Bus, sequence: Option<u64>| {
        let stop = stop.clone();
        let answer = move |_| async move {
            sequence.map(|sequence| StepLocation { sequence, ..StepLocation::default() })
        };
        tokio::spawn(async move { bus.answer(&subject::StepLocation, stop, answer).await })
    };
    let serving = [answers(knows, Some(7)), answers(other, None)];
    let question = location_question(0);
    let mut answered = 0;
    within("answers", async {
        // The first questions may arrive before the subscriptions.
        while answered < 20 {
            match asks.ask(&subject::StepLocation, &question, Duration::from_secs(5)).await {
                Ok(answer) => {
                    assert_eq!(answer.sequence, 7);
                    answered += 1;
                }
                Err(_) if answered == 0 => {}
                Err(error) => panic!("{error:?}"),
            }
        }
    })
    .await;
    stop.cancel();
    for serving in serving {
        within("it to stop", serving).await.expect("no panic").expect("no error");
    }
}

#[tokio::test]
async fn headers_describe_the_message() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let mut tap = bus.tap("construct.v1.cmd.task.>").await.expect("tapped");
    bus.publish(&subject::TaskResult::new(task(1)), &result(task(1), 4)).await.expect("sent");
    let message = within("the tapped message", tap.next()).await.expect("tapped");
    let header = |name: &str| {
        message.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    };
    assert_eq!(header(TYPE), Some("construct.mesh.v1.StepResult"));
    assert_eq!(header(STEP), Some(step_ref(task(1), 4).step_id.as_str()));
    assert!(header("Nats-Msg-Id").is_some());
    assert_eq!(header(BLOB), None);

    let partition = construct_domain::partition::for_task(task(1));
    let mut consumer = bus.consume_tasks(partition, options(1));
    assert_eq!(next(&mut consumer).await.message, TaskMessage::Result(result(task(1), 4).into()));
}
