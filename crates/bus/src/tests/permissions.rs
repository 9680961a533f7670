//! The server enforces the table: each service can do its work, and nothing else.

use std::{collections::BTreeSet, path::Path, time::Duration};

use async_nats::{Client, Event, ServerError};
use construct_domain::partition;
use construct_proto::mesh::v1 as mesh;
use futures::StreamExt as _;
use jiff::Timestamp;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{
    ORGANIZATION, event, execute, invoke, matches, next, options, result, step, task, wake, within,
};
use crate::{
    Bookmark, Bus, Pool, Service, User,
    permissions::{Permissions, config},
    publish,
    subject::{
        self, Address, Cancel, CodeExecute, DeadLetters, Journal, ModelInvoke, Question, SlackKind,
        TaskResult, TaskWake,
    },
    testing::NatsServer,
    topology::{self, Stream},
};

/// Denied to every user.
const MARKER: &str = "denied.to.all";

/// Copies of [`config`]: for servers of any kind, and for the chart, which can only contain files
/// of its own.
const COPIES: [&str; 2] =
    ["deploy/nats/permissions.conf", "deploy/helm/construct/files/permissions.conf"];

#[test]
fn permissions_match_the_committed_files() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for copy in COPIES {
        let path = root.join(copy);
        if std::env::var_os("UPDATE_DOCS").is_some() {
            std::fs::create_dir_all(path.parent().expect("it lies in a folder"))
                .expect("a folder can be made");
            std::fs::write(&path, config()).expect("the file can be written");
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(committed == config(), "{copy} is not current: UPDATE_DOCS=1 writes it");
    }
}

/// A client that records permissions violations.
struct Probe {
    client: Client,
    errors: mpsc::UnboundedReceiver<String>,
    inbox: String,
}

impl Probe {
    async fn connect(server: &NatsServer, user: User) -> Self {
        let (sender, errors) = mpsc::unbounded_channel();
        let client = async_nats::ConnectOptions::with_user_and_password(
            user.name().to_owned(),
            format!("p-{}", user.name()),
        )
        .custom_inbox_prefix(user.inbox())
        .event_callback(move |event| {
            if let Event::ServerError(ServerError::Other(error)) = event {
                // The test may have ended.
                let _ = sender.send(error);
            }
            std::future::ready(())
        })
        .connect(server.url())
        .await
        .expect("the user may connect");
        let inbox = client.new_inbox();
        Self { client, errors, inbox }
    }

    /// The subjects it may not publish to.
    async fn denied_to_publish(&mut self, subjects: &BTreeSet<String>) -> BTreeSet<String> {
        let mut refused = BTreeSet::new();
        for subjects in in_batches(subjects) {
            for subject in subjects.into_iter().chain([MARKER.to_owned()]) {
                self.client.publish(subject, "x".into()).await.expect("the client is open");
            }
            refused.append(&mut self.until_marker("Publish").await);
        }
        refused
    }

    /// The subjects it may not subscribe to.
    async fn denied_to_subscribe(&mut self, subjects: &BTreeSet<String>) -> BTreeSet<String> {
        let mut refused = BTreeSet::new();
        for subjects in in_batches(subjects) {
            let mut kept = Vec::new();
            for subject in subjects.into_iter().chain([MARKER.to_owned()]) {
                kept.push(self.client.subscribe(subject).await.expect("the client is open"));
            }
            refused.append(&mut self.until_marker("Subscription").await);
        }
        refused
    }

    async fn until_marker(&mut self, what: &str) -> BTreeSet<String> {
        let mut refused = BTreeSet::new();
        loop {
            let error =
                within("what is refused", self.errors.recv()).await.expect("the client is open");
            let subject =
                error.split('"').nth(1).unwrap_or_else(|| panic!("it names no subject: {error}"));
            assert!(error.contains(&format!("Permissions Violation for {what} to ")), "{error}");
            if subject == MARKER {
                return refused;
            }
            refused.insert(subject.to_owned());
        }
    }
}

/// The client drops errors beyond a number at once.
fn in_batches(subjects: &BTreeSet<String>) -> Vec<Vec<String>> {
    let subjects: Vec<_> = subjects.iter().cloned().collect();
    subjects.chunks(32).map(<[String]>::to_vec).collect()
}

/// A subject that matches a pattern.
fn sample(pattern: &str) -> String {
    pattern.replace('*', "x").replace('>', "y.z")
}

fn may_publish(permissions: &Permissions, subject: &str) -> bool {
    permissions.publish.iter().any(|pattern| matches(pattern, subject))
        && !permissions.deny.iter().any(|pattern| matches(pattern, subject))
}

fn may_subscribe(permissions: &Permissions, subject: &str) -> bool {
    permissions.subscribe.iter().any(|pattern| matches(pattern, subject))
}

/// The permissions of one user, and the subjects of all users.
fn all_subjects(of: impl Fn(&Permissions) -> Vec<String>) -> BTreeSet<String> {
    let mut subjects: BTreeSet<_> = User::ALL
        .iter()
        .flat_map(|user| of(&user.permissions()))
        .map(|pattern| sample(&pattern))
        .collect();
    for row in topology::streams() {
        subjects.insert(sample(row.subject));
        for request in
            ["STREAM.CREATE", "STREAM.UPDATE", "STREAM.DELETE", "STREAM.PURGE", "STREAM.MSG.GET"]
        {
            subjects.insert(format!("$JS.API.{request}.{}", row.stream.name()));
        }
        for request in
            ["CONSUMER.CREATE", "CONSUMER.DURABLE.CREATE", "CONSUMER.MSG.NEXT", "DIRECT.GET"]
        {
            subjects.insert(format!("$JS.API.{request}.{}.x", row.stream.name()));
        }
    }
    subjects.extend(
        ["_INBOX.x", "$SYS.REQ.SERVER.PING", "$JS.API.STREAM.LIST", "$JS.API.INFO"]
            .map(str::to_owned),
    );
    subjects
}

#[tokio::test]
async fn server_enforces_exactly_the_table() {
    let server = NatsServer::start().await;
    let published = all_subjects(|permissions| permissions.publish.clone());
    let subscribed = all_subjects(|permissions| permissions.subscribe.clone());
    for user in User::ALL {
        let permissions = user.permissions();
        let mut probe = Probe::connect(&server, user).await;
        let wanted = published
            .iter()
            .filter(|subject| !may_publish(&permissions, subject))
            .cloned()
            .collect();
        assert_eq!(probe.denied_to_publish(&published).await, wanted, "{user:?}");
        let wanted = subscribed
            .iter()
            .filter(|subject| !may_subscribe(&permissions, subject))
            .cloned()
            .collect();
        assert_eq!(probe.denied_to_subscribe(&subscribed).await, wanted, "{user:?}");
        assert!(probe.inbox.starts_with(&user.inbox()));
    }
}

/// Stated explicitly, so that a mistake in the table shows.
#[test]
fn users_command_and_receive_only_what_is_theirs() {
    let (code, model) = (CodeExecute::pattern(), ModelInvoke::pattern());
    for user in User::ALL {
        let permissions = user.permissions();
        let publishes = |pattern: &str| may_publish(&permissions, &sample(pattern));
        let subscribes = |pattern: &str| may_subscribe(&permissions, &sample(pattern));
        let reconciler = user == User::Reconciler;
        assert_eq!(publishes(&code) || publishes(&model), reconciler, "{user:?}");
        assert_eq!(publishes(&Cancel::pattern()), reconciler, "{user:?}");
        for stream in Stream::ALL.map(Stream::name) {
            assert_eq!(
                publishes(&format!("$JS.API.STREAM.CREATE.{stream}")),
                reconciler,
                "{user:?}"
            );
            assert_eq!(
                publishes(&format!("$JS.API.STREAM.UPDATE.{stream}")),
                reconciler,
                "{user:?}"
            );
            assert!(!publishes(&format!("$JS.API.STREAM.DELETE.{stream}")), "{user:?}");
            let purged: &[Stream] = match user {
                User::Gateway => &[Stream::Events, Stream::Deltas],
                User::Reconciler => &[Stream::Task, Stream::Model, Stream::Code, Stream::Journal],
                _ => &[],
            };
            let purges = purged.iter().any(|purged| purged.name() == stream);
            assert_eq!(publishes(&format!("$JS.API.STREAM.PURGE.{stream}")), purges, "{user:?}");
        }
        let journal = Stream::Journal.name();
        let journals = [User::Interpreter, User::Reconciler].contains(&user);
        assert_eq!(publishes(&Journal::pattern()), journals, "{user:?}");
        assert_eq!(publishes(&format!("$JS.API.STREAM.MSG.GET.{journal}")), journals, "{user:?}");
        assert_eq!(
            publishes(&format!("$JS.API.CONSUMER.MSG.NEXT.{journal}.x")),
            reconciler,
            "{user:?}"
        );
        assert_eq!(subscribes(&Journal::pattern()), user == User::Tap, "{user:?}");
        for other in User::ALL.into_iter().filter(|&other| other != user) {
            assert!(!subscribes(&format!("{}.x", other.inbox())), "{user:?} subscribes {other:?}");
        }
    }
    let tap = User::Tap.permissions();
    assert_eq!(tap.publish, ["_INBOX.tap.>"]);
}

/// JetStream delivers a consumer's messages to any subject for a user that may create or use the
/// consumer.
#[test]
fn users_consume_nothing_they_may_publish() {
    for user in User::ALL.into_iter().filter(|user| ![User::Reconciler, User::Slack].contains(user))
    {
        let permissions = user.permissions();
        for pattern in &permissions.publish {
            let parts: Vec<&str> = pattern.split('.').collect();
            let taken = match parts.as_slice() {
                ["$JS", "API", "CONSUMER", "CREATE", _stream, _consumer, filter @ ..] => {
                    assert!(
                        filter.len() > 2,
                        "{user:?} makes consumers of a whole stream: {pattern}"
                    );
                    filter.join(".")
                }
                _ => continue,
            };
            assert!(!may_publish(&permissions, &sample(&taken)), "{user:?}: {pattern}");
            if !permissions.deny.contains(&taken) {
                let own = permissions.publish.iter().find(|published| matches(&taken, published));
                assert_eq!(own, None, "{user:?} takes {taken}");
            }
        }
    }
}

/// Fails when NATS denies something before `work` ends.
async fn without_violation<T>(bus: &Bus, work: impl Future<Output = T>) -> T {
    tokio::select! {
        refusal = bus.permission_violation() => panic!("{refusal}"),
        done = work => done,
    }
}

#[tokio::test]
async fn service_waits_for_streams_of_the_reconciler() {
    let server = NatsServer::start().await;
    let waiting: Vec<Bus> = futures::future::join_all(
        User::ALL.into_iter().filter(|user| !user.makes_streams()).map(|user| server.bus_for(user)),
    )
    .await;
    for bus in waiting.iter().filter(|bus| bus.inner.user != Some(User::Tap)) {
        let error = without_violation(bus, bus.ensure_topology())
            .await
            .expect_err("the streams do not exist");
        assert!(error.is_retryable(), "{error:?}");
    }
    let reconciler = server.bus_for(User::Reconciler).await;
    without_violation(&reconciler, reconciler.ensure_topology()).await.expect("it makes them");
    for bus in &waiting {
        without_violation(bus, bus.ensure_topology()).await.expect("they are there");
    }
}

#[tokio::test]
async fn table_allows_each_service_its_work() {
    let server = NatsServer::start().await;
    let reconciler = server.bus_for(User::Reconciler).await;
    reconciler.ensure_topology().await.expect("it makes the streams");
    let [gateway, interpreter, providers, scanner, slack, tap] =
        [User::Gateway, User::Interpreter, User::Providers, User::Scanner, User::Slack, User::Tap]
            .map(|user| server.bus_for(user));
    let (gateway, interpreter, providers) = tokio::join!(gateway, interpreter, providers);
    let (scanner, slack, tap) = tokio::join!(scanner, slack, tap);
    let mut tapped = without_violation(&tap, tap.tap("construct.v1.>")).await.expect("it listens");
    let task = task(7);

    without_violation(&gateway, gateway.publish(&TaskWake::new(task), &wake(task, "x")))
        .await
        .expect("a wake");
    within("a message", tapped.next()).await.expect("the tap is open");
    let mut tasks = reconciler.consume_tasks(partition::for_task(task), options(8));
    without_violation(&reconciler, next(&mut tasks)).await.receipt.ack().await;

    let (model, code) =
        (ModelInvoke::new(Pool::model_default(), task), CodeExecute::new(pool("own"), task));
    without_violation(&reconciler, reconciler.publish_once(&model, &invoke(task, 1)))
        .await
        .expect("a command");
    let mut models = providers.consume_model(&Pool::model_default(), options(8));
    without_violation(&providers, next(&mut models)).await.receipt.ack().await;
    without_violation(&providers, providers.publish(&TaskResult::new(task), &result(task, 1)))
        .await
        .expect("a result");
    without_violation(&reconciler, next(&mut tasks)).await.receipt.ack().await;
    let mut live = providers.progress();
    without_violation(&providers, live.send(&event(task, "message.delta", 1, 0)))
        .await
        .expect("live text");
    assert_eq!(live.finish().await.lost, 0);

    // A pool that only the interpreter knows.
    let command = mesh::CodeExecute { compute: "own".into(), ..execute(task, 2) };
    without_violation(&reconciler, reconciler.publish_once(&code, &command))
        .await
        .expect("a command");
    let mut codes = interpreter.consume_code(&pool("own"), options(8));
    let delivery = without_violation(&interpreter, next(&mut codes)).await;
    let journal = interpreter.journal();
    let entry = mesh::JournalEntry { step_id: step(2).to_string(), ..Default::default() };
    let last = without_violation(&interpreter, journal.append(step(2), &entry, 0))
        .await
        .expect("an entry");
    without_violation(&interpreter, journal.append(step(2), &entry, last))
        .await
        .expect("another entry");
    let loaded = without_violation(&interpreter, journal.load(step(2))).await.expect("it is read");
    assert_eq!(loaded.entries.len(), 2);
    let mut progress = interpreter.progress();
    without_violation(&interpreter, progress.send(&event(task, "tool.called", 2, 0)))
        .await
        .expect("a call");
    assert_eq!(progress.finish().await.lost, 0);
    delivery.receipt.ack().await;
    let closed = reconciler.journal();
    without_violation(&reconciler, closed.close(step(2))).await.expect("it is closed");
    assert_eq!(
        without_violation(&reconciler, closed.remove_closed(Timestamp::now()))
            .await
            .expect("it is removed"),
        1
    );

    let missed = gateway.replay_progress(ORGANIZATION, task, None, Bookmark::default());
    assert_eq!(without_violation(&gateway, missed).await.expect("it is read").events.len(), 2);
    let created = event(task, "message.created", 0, 0);
    without_violation(&gateway, gateway.publish_event(&created)).await.expect("an event");
    without_violation(&reconciler, reconciler.publish_event(&created)).await.expect("an event");
    without_violation(&gateway, gateway.inspect_streams()).await.expect("they are described");
    without_violation(&gateway, gateway.inspect_consumer(&topology::slack_consumer()))
        .await
        .expect("it is described");

    let address = subject::SlackDelivery::new(SlackKind::Event, "T1").expect("a team");
    let delivery = mesh::SlackDelivery {
        team: "T1".into(),
        kind: "event".into(),
        key: "1".into(),
        ..Default::default()
    };
    without_violation(&slack, slack.publish(&address, &delivery)).await.expect("a delivery");
    let mut deliveries = slack.consume_slack(options(8));
    without_violation(&slack, next(&mut deliveries)).await.receipt.ack().await;

    let scan = construct_domain::ScanId::from_uuid(uuid::Uuid::from_u128(7));
    let run =
        mesh::ScanRun { organization_id: ORGANIZATION.to_string(), scan_id: scan.to_string() };
    let address = subject::ScanRun { organization: ORGANIZATION, scan };
    without_violation(&gateway, gateway.publish(&address, &run)).await.expect("a scan");
    let mut scans = scanner.consume_scans(options(8));
    without_violation(&scanner, next(&mut scans)).await.receipt.ack().await;
    let mut cancels = interpreter.subscribe_cancel(Service::Interpreter).await.expect("it listens");
    let cancel = mesh::CancelStep { step_id: step(2).to_string(), ..Default::default() };
    let address = Cancel { service: Service::Interpreter };
    without_violation(&reconciler, reconciler.publish_cancel(&address, &cancel))
        .await
        .expect("a cancellation");
    without_violation(&interpreter, within("it", cancels.next())).await.expect("it is subscribed");

    let said = Timestamp::from_second(1_000).expect("a time");
    let time = prost_types::Timestamp { seconds: said.as_second(), nanos: 0 };
    let mut times = Vec::new();
    for worker in [&interpreter, &providers] {
        times.push(without_violation(worker, worker.subscribe_time()).await.expect("it listens"));
    }
    let beat =
        mesh::ReconcilerHeartbeat { instance: "r".into(), time: Some(time), ..Default::default() };
    let address = subject::ReconcilerHeartbeat { instance: "r".into() };
    without_violation(&reconciler, reconciler.publish_heartbeat(&address, &beat))
        .await
        .expect("a beat");
    for times in &mut times {
        assert_eq!(within("it", times.next()).await, Some(said));
    }
}

#[tokio::test]
async fn permitted_questions_are_answered() {
    let server = NatsServer::start().await;
    let [gateway, interpreter, providers, reconciler, scanner] =
        [User::Gateway, User::Interpreter, User::Providers, User::Reconciler, User::Scanner]
            .map(|user| server.bus_for(user));
    let (gateway, interpreter, providers, reconciler, scanner) =
        tokio::join!(gateway, interpreter, providers, reconciler, scanner);
    answered(&gateway, &providers, &subject::BreakerState, &mesh::BreakerQuery::default()).await;
    answered(&gateway, &interpreter, &subject::Tools { pool: pool("own") }, &Default::default())
        .await;
    answered(
        &reconciler,
        &interpreter,
        &subject::Tools { pool: pool("other") },
        &Default::default(),
    )
    .await;
    answered(&interpreter, &reconciler, &subject::Census, &mesh::TaskCensus::default()).await;
    let organization_id = ORGANIZATION.to_string();
    let lookup =
        mesh::ModelLookup { organization_id: organization_id.clone(), ..Default::default() };
    answered(&providers, &reconciler, &subject::Models, &lookup).await;
    let question = mesh::StepLocationQuery {
        organization_id: organization_id.clone(),
        task_id: task(7).to_string(),
        step_id: step(7).to_string(),
        ..Default::default()
    };
    answered(&gateway, &reconciler, &subject::StepLocation, &question).await;
    let question = mesh::RepositoriesQuery { organization_id, ..Default::default() };
    answered(&gateway, &scanner, &subject::ListRepositories, &question).await;
}

fn pool(name: &str) -> Pool {
    Pool::new(name).expect("a name")
}

async fn answered<Q: Question>(asks: &Bus, answers: &Bus, address: &Q, question: &Q::Message) {
    let stop = CancellationToken::new();
    let serve =
        Box::pin(answers.answer(address, stop.clone(), async |_| Some(Q::Answer::default())));
    let ask = Box::pin(async {
        // The question may arrive before the subscription.
        while asks.ask(address, question, Duration::from_secs(5)).await.is_err() {
            tokio::task::yield_now().await;
        }
        stop.cancel();
    });
    let (served, ()) = without_violation(
        asks,
        without_violation(answers, within("an answer", async { tokio::join!(serve, ask) })),
    )
    .await;
    served.expect("it listens");
}

#[tokio::test]
async fn denied_publish_is_reported_and_letters_cannot_command() {
    let server = NatsServer::start().await;
    server.bus_for(User::Reconciler).await.ensure_topology().await.expect("it makes the streams");
    let providers = server.bus_for(User::Providers).await;
    let code = CodeExecute::new(Pool::code_default(), task(7));
    let (subject, command) = (code.subject(), execute(task(7), 1));
    let refused = providers.publish_raw(&subject, &command);
    let violation = tokio::select! {
        violation = within("the refusal", providers.permission_violation()) => violation,
        done = refused => panic!("it was not refused: {done:?}"),
    };
    assert!(violation.contains(&code.subject()), "{violation}");
    assert_eq!(server.message_count(Stream::Code).await, 0);

    // It may write dead letters of its own stream. The redrive publishes to that stream only.
    let gateway = server.bus_for(User::Gateway).await;
    let letters = [
        (Stream::Model, ModelInvoke::new(Pool::model_default(), task(7)).subject()),
        (Stream::Slack, code.subject()),
    ];
    for (stream, subject) in letters {
        let letter = mesh::DeadLetter {
            stream: stream.name().to_owned(),
            subject,
            headers: [("Construct-Type".to_owned(), "construct.mesh.v1.CodeExecute".to_owned())]
                .into(),
            ..Default::default()
        };
        let sender = if stream == Stream::Model { User::Providers } else { User::Slack };
        let ack: Result<_, publish::Error> =
            server.bus_for(sender).await.publish(&DeadLetters { stream }, &letter).await;
        let number = ack.expect("a letter").sequence;
        let error = without_violation(&gateway, gateway.redrive(number))
            .await
            .expect_err("a command is not redriven");
        let command = matches!(error, crate::dead_letter::Error::Command);
        assert!(command || matches!(error, crate::dead_letter::Error::Subject), "{error:?}");
        without_violation(&gateway, gateway.remove_dead_letter(number))
            .await
            .expect("it is removed");
    }
}
