//! What the table says is what the server does: each service can do its work, and nothing else.

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

/// Refused to everybody.
const MARK: &str = "nobody.may";

/// Copies of what [`config`] writes: for servers of any kind, and for the chart, which can hold
/// files of its own only.
const COPIES: [&str; 2] =
    ["deploy/nats/permissions.conf", "deploy/helm/construct/files/permissions.conf"];

#[test]
fn permissions_are_committed() {
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

/// A client that is told what it is refused.
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
                // The test may be over.
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

    /// What of these it may not publish to.
    async fn refused_to_publish(&mut self, subjects: &BTreeSet<String>) -> BTreeSet<String> {
        let mut refused = BTreeSet::new();
        for subjects in in_portions(subjects) {
            for subject in subjects.into_iter().chain([MARK.to_owned()]) {
                self.client.publish(subject, "x".into()).await.expect("the client is open");
            }
            refused.append(&mut self.until_marked("Publish").await);
        }
        refused
    }

    /// What of these it may not subscribe to.
    async fn refused_to_hear(&mut self, subjects: &BTreeSet<String>) -> BTreeSet<String> {
        let mut refused = BTreeSet::new();
        for subjects in in_portions(subjects) {
            let mut kept = Vec::new();
            for subject in subjects.into_iter().chain([MARK.to_owned()]) {
                kept.push(self.client.subscribe(subject).await.expect("the client is open"));
            }
            refused.append(&mut self.until_marked("Subscription").await);
        }
        refused
    }

    async fn until_marked(&mut self, what: &str) -> BTreeSet<String> {
        let mut refused = BTreeSet::new();
        loop {
            let error =
                within("what is refused", self.errors.recv()).await.expect("the client is open");
            let subject =
                error.split('"').nth(1).unwrap_or_else(|| panic!("it names no subject: {error}"));
            assert!(error.contains(&format!("Permissions Violation for {what} to ")), "{error}");
            if subject == MARK {
                return refused;
            }
            refused.insert(subject.to_owned());
        }
    }
}

/// The client drops what it is told at once beyond some number.
fn in_portions(subjects: &BTreeSet<String>) -> Vec<Vec<String>> {
    let subjects: Vec<_> = subjects.iter().cloned().collect();
    subjects.chunks(32).map(<[String]>::to_vec).collect()
}

/// A subject that a pattern stands for.
fn sample(pattern: &str) -> String {
    pattern.replace('*', "x").replace('>', "y.z")
}

fn may_publish(permissions: &Permissions, subject: &str) -> bool {
    permissions.publish.iter().any(|pattern| matches(pattern, subject))
        && !permissions.deny.iter().any(|pattern| matches(pattern, subject))
}

fn may_hear(permissions: &Permissions, subject: &str) -> bool {
    permissions.subscribe.iter().any(|pattern| matches(pattern, subject))
}

/// What somebody may do, and what everybody would like to.
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
async fn the_server_allows_each_user_what_the_table_says_and_refuses_the_rest() {
    let server = NatsServer::start().await;
    let published = all_subjects(|permissions| permissions.publish.clone());
    let heard = all_subjects(|permissions| permissions.subscribe.clone());
    for user in User::ALL {
        let permissions = user.permissions();
        let mut probe = Probe::connect(&server, user).await;
        let wanted = published
            .iter()
            .filter(|subject| !may_publish(&permissions, subject))
            .cloned()
            .collect();
        assert_eq!(probe.refused_to_publish(&published).await, wanted, "{user:?}");
        let wanted =
            heard.iter().filter(|subject| !may_hear(&permissions, subject)).cloned().collect();
        assert_eq!(probe.refused_to_hear(&heard).await, wanted, "{user:?}");
        assert!(probe.inbox.starts_with(&user.inbox()));
    }
}

/// In words, so that a mistake in the table shows.
#[test]
fn nobody_commands_another_or_hears_what_is_not_his() {
    let (code, model) = (CodeExecute::pattern(), ModelInvoke::pattern());
    for user in User::ALL {
        let permissions = user.permissions();
        let publishes = |pattern: &str| may_publish(&permissions, &sample(pattern));
        let hears = |pattern: &str| may_hear(&permissions, &sample(pattern));
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
        assert_eq!(hears(&Journal::pattern()), user == User::Tap, "{user:?}");
        for other in User::ALL.into_iter().filter(|&other| other != user) {
            assert!(!hears(&format!("{}.x", other.inbox())), "{user:?} hears {other:?}");
        }
    }
    let tap = User::Tap.permissions();
    assert_eq!(tap.publish, ["_INBOX.tap.>"]);
}

/// JetStream delivers what a consumer has to any subject, for whoever may make the consumer or take
/// from it.
#[test]
fn nobody_takes_what_he_could_have_published() {
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

/// Fails when something is refused before this ends.
async fn unrefused<T>(bus: &Bus, work: impl Future<Output = T>) -> T {
    tokio::select! {
        refusal = bus.permission_violation() => panic!("{refusal}"),
        done = work => done,
    }
}

#[tokio::test]
async fn a_service_waits_for_the_streams_that_the_reconciler_makes() {
    let server = NatsServer::start().await;
    let waiting: Vec<Bus> = futures::future::join_all(
        User::ALL.into_iter().filter(|user| !user.makes_streams()).map(|user| server.bus_for(user)),
    )
    .await;
    for bus in waiting.iter().filter(|bus| bus.inner.user != Some(User::Tap)) {
        let error =
            unrefused(bus, bus.ensure_topology()).await.expect_err("nobody has made the streams");
        assert!(error.is_retryable(), "{error:?}");
    }
    let reconciler = server.bus_for(User::Reconciler).await;
    unrefused(&reconciler, reconciler.ensure_topology()).await.expect("it makes them");
    for bus in &waiting {
        unrefused(bus, bus.ensure_topology()).await.expect("they are there");
    }
}

#[tokio::test]
async fn every_service_can_do_its_work() {
    let server = NatsServer::start().await;
    let reconciler = server.bus_for(User::Reconciler).await;
    reconciler.ensure_topology().await.expect("it makes the streams");
    let [gateway, interpreter, providers, scanner, slack, tap] =
        [User::Gateway, User::Interpreter, User::Providers, User::Scanner, User::Slack, User::Tap]
            .map(|user| server.bus_for(user));
    let (gateway, interpreter, providers) = tokio::join!(gateway, interpreter, providers);
    let (scanner, slack, tap) = tokio::join!(scanner, slack, tap);
    let mut tapped = unrefused(&tap, tap.tap("construct.v1.>")).await.expect("it listens");
    let task = task(7);

    unrefused(&gateway, gateway.publish(&TaskWake::new(task), &wake(task, "x")))
        .await
        .expect("a wake");
    within("what passes", tapped.next()).await.expect("the tap goes on");
    let mut tasks = reconciler.consume_tasks(partition::for_task(task), options(8));
    unrefused(&reconciler, next(&mut tasks)).await.receipt.ack().await;

    let (model, code) =
        (ModelInvoke::new(Pool::model_default(), task), CodeExecute::new(pool("own"), task));
    unrefused(&reconciler, reconciler.publish_once(&model, &invoke(task, 1)))
        .await
        .expect("a command");
    let mut models = providers.consume_model(&Pool::model_default(), options(8));
    unrefused(&providers, next(&mut models)).await.receipt.ack().await;
    unrefused(&providers, providers.publish(&TaskResult::new(task), &result(task, 1)))
        .await
        .expect("a result");
    unrefused(&reconciler, next(&mut tasks)).await.receipt.ack().await;
    let mut live = providers.progress();
    unrefused(&providers, live.send(&event(task, "message.delta", 1, 0))).await.expect("live text");
    assert_eq!(live.finish().await.lost, 0);

    // A pool that nobody else knows.
    let command = mesh::CodeExecute { compute: "own".into(), ..execute(task, 2) };
    unrefused(&reconciler, reconciler.publish_once(&code, &command)).await.expect("a command");
    let mut codes = interpreter.consume_code(&pool("own"), options(8));
    let delivery = unrefused(&interpreter, next(&mut codes)).await;
    let journal = interpreter.journal();
    let entry = mesh::JournalEntry { step_id: step(2).to_string(), ..Default::default() };
    let last = unrefused(&interpreter, journal.append(step(2), &entry, 0)).await.expect("an entry");
    unrefused(&interpreter, journal.append(step(2), &entry, last)).await.expect("another entry");
    let loaded = unrefused(&interpreter, journal.load(step(2))).await.expect("it is read");
    assert_eq!(loaded.entries.len(), 2);
    let mut progress = interpreter.progress();
    unrefused(&interpreter, progress.send(&event(task, "tool.called", 2, 0)))
        .await
        .expect("a call");
    assert_eq!(progress.finish().await.lost, 0);
    delivery.receipt.ack().await;
    let closed = reconciler.journal();
    unrefused(&reconciler, closed.close(step(2))).await.expect("it is closed");
    assert_eq!(
        unrefused(&reconciler, closed.remove_closed(Timestamp::now()))
            .await
            .expect("it is removed"),
        1
    );

    let missed = gateway.replay_progress(ORGANIZATION, task, None, Bookmark::default());
    assert_eq!(unrefused(&gateway, missed).await.expect("it is read").events.len(), 2);
    let told = event(task, "message.created", 0, 0);
    unrefused(&gateway, gateway.publish_event(&told)).await.expect("an event");
    unrefused(&reconciler, reconciler.publish_event(&told)).await.expect("an event");
    unrefused(&gateway, gateway.inspect_streams()).await.expect("they are described");
    unrefused(&gateway, gateway.inspect_consumer(&topology::slack_consumer()))
        .await
        .expect("it is described");

    let address = subject::SlackDelivery::new(SlackKind::Event, "T1").expect("a team");
    let delivery = mesh::SlackDelivery {
        team: "T1".into(),
        kind: "event".into(),
        key: "1".into(),
        ..Default::default()
    };
    unrefused(&slack, slack.publish(&address, &delivery)).await.expect("a delivery");
    let mut deliveries = slack.consume_slack(options(8));
    unrefused(&slack, next(&mut deliveries)).await.receipt.ack().await;

    let scan = construct_domain::ScanId::from_uuid(uuid::Uuid::from_u128(7));
    let run =
        mesh::ScanRun { organization_id: ORGANIZATION.to_string(), scan_id: scan.to_string() };
    let address = subject::ScanRun { organization: ORGANIZATION, scan };
    unrefused(&gateway, gateway.publish(&address, &run)).await.expect("a scan");
    let mut scans = scanner.consume_scans(options(8));
    unrefused(&scanner, next(&mut scans)).await.receipt.ack().await;
    let mut cancels = interpreter.subscribe_cancel(Service::Interpreter).await.expect("it listens");
    let cancel = mesh::CancelStep { step_id: step(2).to_string(), ..Default::default() };
    let address = Cancel { service: Service::Interpreter };
    unrefused(&reconciler, reconciler.publish_cancel(&address, &cancel))
        .await
        .expect("a cancellation");
    unrefused(&interpreter, within("it", cancels.next())).await.expect("it is heard");

    let said = Timestamp::from_second(1_000).expect("a time");
    let time = prost_types::Timestamp { seconds: said.as_second(), nanos: 0 };
    let mut times = Vec::new();
    for worker in [&interpreter, &providers] {
        times.push(unrefused(worker, worker.subscribe_time()).await.expect("it listens"));
    }
    let beat =
        mesh::ReconcilerBeat { instance: "r".into(), time: Some(time), ..Default::default() };
    let address = subject::ReconcilerBeat { instance: "r".into() };
    unrefused(&reconciler, reconciler.publish_beat(&address, &beat)).await.expect("a beat");
    for times in &mut times {
        assert_eq!(within("it", times.next()).await, Some(said));
    }
}

#[tokio::test]
async fn who_may_ask_is_answered() {
    let server = NatsServer::start().await;
    let [gateway, interpreter, providers, reconciler, scanner] =
        [User::Gateway, User::Interpreter, User::Providers, User::Reconciler, User::Scanner]
            .map(|user| server.bus_for(user));
    let (gateway, interpreter, providers, reconciler, scanner) =
        tokio::join!(gateway, interpreter, providers, reconciler, scanner);
    answered(&gateway, &providers, &subject::BreakerState, &mesh::BreakerQuestion::default()).await;
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
    let question = mesh::WhereaboutsQuestion {
        organization_id: organization_id.clone(),
        task_id: task(7).to_string(),
        step_id: step(7).to_string(),
        ..Default::default()
    };
    answered(&gateway, &reconciler, &subject::StepLocation, &question).await;
    let question = mesh::RepositoriesQuestion { organization_id, ..Default::default() };
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
        // The question may come before the subscription.
        while asks.ask(address, question, Duration::from_secs(5)).await.is_err() {
            tokio::task::yield_now().await;
        }
        stop.cancel();
    });
    let (served, ()) = unrefused(
        asks,
        unrefused(answers, within("an answer", async { tokio::join!(serve, ask) })),
    )
    .await;
    served.expect("it listens");
}

#[tokio::test]
async fn what_is_not_allowed_is_told_and_a_letter_commands_nobody() {
    let server = NatsServer::start().await;
    server.bus_for(User::Reconciler).await.ensure_topology().await.expect("it makes the streams");
    let providers = server.bus_for(User::Providers).await;
    let code = CodeExecute::new(Pool::code_default(), task(7));
    let (subject, command) = (code.subject(), execute(task(7), 1));
    let refused = providers.publish_raw(&subject, &command);
    let told = tokio::select! {
        told = within("the refusal", providers.permission_violation()) => told,
        done = refused => panic!("it was not refused: {done:?}"),
    };
    assert!(told.contains(&code.subject()), "{told}");
    assert_eq!(server.message_count(Stream::Code).await, 0);

    // Of a stream of its own it may write letters; whoever publishes them again does it where they
    // were found.
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
        let error =
            unrefused(&gateway, gateway.redrive(number)).await.expect_err("it commands nobody");
        let command = matches!(error, crate::dead_letter::Error::Command);
        assert!(command || matches!(error, crate::dead_letter::Error::Subject), "{error:?}");
        unrefused(&gateway, gateway.remove_dead_letter(number)).await.expect("it is removed");
    }
}
