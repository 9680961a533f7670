use std::{collections::BTreeSet, net::TcpListener, num::NonZeroUsize, time::Duration};

use async_nats::jetstream::stream::Config;
use construct_domain::partition;
use construct_proto::mesh::v1 as mesh;
use futures::future::join_all;
use tokio_util::sync::CancellationToken;

use super::{ORGANIZATION, matches, step, task, within};
use crate::{
    Bus, ConnectOptions, EventType, Pool, User, blob, subject,
    subject::StreamAddress,
    testing::NatsServer,
    topology::{Retention, Stream, consumers, streams},
};

fn scan() -> construct_domain::ScanId {
    construct_domain::ScanId::from_uuid(task(1).uuid())
}

fn address_of<A: StreamAddress>(address: &A) -> (Stream, String) {
    (A::STREAM, address.subject())
}

#[test]
fn journal_retention_exceeds_approvals_and_blobs_exceed_it() {
    use construct_domain::{approval::APPROVAL_TIMEOUT, decide::CODE_TIMEOUT};
    let journal =
        streams().iter().find(|row| row.stream == Stream::Journal).expect("there is one").max_age;
    // A script that continues at the last moment runs once more.
    assert!(journal > APPROVAL_TIMEOUT + 2 * CODE_TIMEOUT);
    assert!(blob::RETENTION > journal);
}

#[test]
fn each_address_has_exactly_its_stream() {
    let event = |name| EventType::new(name).expect("a valid type");
    let agent = construct_domain::AgentId::from_uuid(task(1).uuid());
    let all = [
        address_of(&subject::TaskWake::new(task(1))),
        address_of(&subject::TaskResult::new(task(1))),
        address_of(&subject::ModelInvoke::new(Pool::model_default(), task(1))),
        address_of(&subject::CodeExecute::new(Pool::code_default(), task(1))),
        address_of(&subject::TaskEvent {
            organization: ORGANIZATION,
            task: task(1),
            event: event("error"),
        }),
        address_of(&subject::EntityEvent {
            organization: ORGANIZATION,
            entity: subject::Entity::Agent(agent),
            event: event("agent.created"),
        }),
        address_of(&subject::Delta { organization: ORGANIZATION, task: task(1) }),
        address_of(&subject::Journal { step: step(1) }),
        address_of(&subject::DeadLetters { stream: Stream::Task }),
        address_of(&subject::Spending { organization: ORGANIZATION }),
        address_of(
            &subject::SlackDelivery::new(subject::SlackKind::Event, "T0123").expect("it is a team"),
        ),
        address_of(&subject::ScanRun { organization: ORGANIZATION, scan: scan() }),
        address_of(&subject::ScanUpdate { organization: ORGANIZATION, scan: scan() }),
        address_of(&subject::ToolCreate { organization: ORGANIZATION }),
    ];
    let mut used = BTreeSet::new();
    for (stream, subject) in all {
        let found: Vec<Stream> = streams()
            .iter()
            .filter(|row| matches(row.subject, &subject))
            .map(|row| row.stream)
            .collect();
        assert_eq!(found, [stream], "{subject}");
        used.insert(stream.name());
    }
    let declared: BTreeSet<&str> = streams().iter().map(|row| row.stream.name()).collect();
    assert_eq!(declared, used);
    assert_eq!(declared, Stream::ALL.iter().map(|stream| stream.name()).collect());
}

#[test]
fn each_command_has_exactly_one_consumer() {
    let [small, middle, large] = Pool::code_standard();
    let commands = (1..500).map(task).flat_map(|task| {
        [
            address_of(&subject::TaskWake::new(task)),
            address_of(&subject::TaskResult::new(task)),
            address_of(&subject::ModelInvoke::new(Pool::model_default(), task)),
            address_of(&subject::CodeExecute::new(small.clone(), task)),
            address_of(&subject::CodeExecute::new(middle.clone(), task)),
            address_of(&subject::CodeExecute::new(large.clone(), task)),
            address_of(&subject::Spending { organization: ORGANIZATION }),
            address_of(
                &subject::SlackDelivery::new(subject::SlackKind::Command, "T0123")
                    .expect("it is a team"),
            ),
            address_of(&subject::ScanRun { organization: ORGANIZATION, scan: scan() }),
            address_of(&subject::ToolCreate { organization: ORGANIZATION }),
        ]
    });
    let rows = consumers();
    let mut used = BTreeSet::new();
    for (stream, subject) in commands {
        let found: Vec<_> = rows
            .iter()
            .filter(|row| row.stream == stream && matches(&row.filter, &subject))
            .collect();
        assert_eq!(found.len(), 1, "{subject}: {found:?}");
        used.insert(found[0].durable.clone());
    }
    assert_eq!(used.len(), rows.len(), "a consumer that gets nothing");
    assert_eq!(rows.len(), usize::from(partition::COUNT) + 8);
}

#[test]
fn only_work_queues_have_consumers() {
    let queues = streams()
        .iter()
        .filter(|row| row.retention == Retention::WorkQueue)
        .map(|row| row.stream.name());
    let consumed: BTreeSet<&str> = consumers().iter().map(|row| row.stream.name()).collect();
    assert_eq!(queues.collect::<BTreeSet<_>>(), consumed);
}

#[tokio::test]
async fn concurrent_starts_agree_on_the_topology() {
    let server = NatsServer::start().await;
    let buses = join_all(
        (0..6).map(|n| Bus::connect(server.url(), ConnectOptions::new(format!("service {n}")))),
    )
    .await;
    let buses: Vec<Bus> =
        buses.into_iter().map(|bus| bus.expect("the server accepts connections")).collect();
    for outcome in join_all(buses.iter().map(Bus::ensure_topology)).await {
        outcome.expect("every service succeeds");
    }
    for row in consumers() {
        let stream = buses[0]
            .inner
            .jetstream
            .get_stream(row.stream.name())
            .await
            .expect("the stream is there");
        let info = stream.consumer_info(&row.durable).await.expect("the consumer is there");
        assert_eq!(info.config.filter_subject, row.filter);
    }
}

#[tokio::test]
async fn changed_stream_is_restored_except_operator_settings() {
    let server = NatsServer::start().await;
    let bus = server.bus().await;
    let jetstream = &bus.inner.jetstream;
    let name = Stream::Deltas.name();
    let config =
        |stream: &async_nats::jetstream::stream::Stream| stream.cached_info().config.clone();
    let right = config(&jetstream.get_stream(name).await.expect("it is there"));
    let changed = Config { max_bytes: 12_345, allow_direct: true, ..right.clone() };
    jetstream.update_stream(changed).await.expect("the server takes it");

    bus.ensure_topology().await.expect("it can be brought back");
    let healed = config(&jetstream.get_stream(name).await.expect("it is there"));
    assert_eq!(healed.max_bytes, right.max_bytes);
    assert!(healed.allow_direct);
}

#[tokio::test]
async fn unchangeable_stream_is_an_error_with_its_name() {
    let server = NatsServer::start().await;
    let bus = Bus::connect(server.url(), ConnectOptions::new("test"))
        .await
        .expect("the server accepts connections");
    let wrong = Config {
        name: Stream::Task.name().to_owned(),
        subjects: vec!["construct.v1.cmd.task.>".to_owned()],
        ..Default::default()
    };
    bus.inner.jetstream.create_stream(wrong).await.expect("the server takes it");
    let error = bus.ensure_topology().await.expect_err("limits cannot become a work queue");
    assert!(error.to_string().contains("CONSTRUCT_TASK"), "{error}");
    assert!(!error.is_retryable());
}

#[tokio::test]
async fn deleted_stream_is_recreated_by_the_reconciler() {
    let server = NatsServer::start().await;
    let options = ConnectOptions::new("reconciler").user(User::Reconciler);
    let bus = Bus::connect(&server.url_for(User::Reconciler), options)
        .await
        .expect("the user may connect");
    bus.ensure_topology().await.expect("the server accepts the topology");
    let stop = CancellationToken::new();
    let keeping = tokio::spawn(bus.clone().maintain_topology(stop.clone()));
    server.remove_stream(Stream::Spending).await;
    // The checks are periodic.
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(60)).await;
    tokio::time::resume();
    within("the stream to be there", async {
        while bus
            .inspect_streams()
            .await
            .expect("the server answers")
            .iter()
            .any(|(_, state)| state.is_none())
        {
            tokio::task::yield_now().await;
        }
    })
    .await;
    stop.cancel();
    keeping.await.expect("it ends");
}

/// Three servers in one cluster.
async fn cluster() -> Vec<NatsServer> {
    // Held until all are chosen, so that they differ.
    let free = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0").expect("there is a free port"));
    let ports = free.map(|listener| listener.local_addr().expect("it has one").port());
    let routes = ports.map(|port| format!("nats://127.0.0.1:{port}")).join(", ");
    let launched = ports.into_iter().enumerate().map(async |(number, port)| {
        let cluster =
            format!("cluster {{ name: test, listen: \"127.0.0.1:{port}\", routes: [{routes}] }}");
        NatsServer::start_configured(&format!("server_name: server-{number}\n{cluster}")).await
    });
    join_all(launched).await
}

#[tokio::test]
async fn streams_are_replicated_and_survive_one_server() {
    let mut servers = cluster().await;
    let urls: Vec<&str> = servers.iter().map(NatsServer::url).collect();
    let connect = async |replicas: usize| {
        let options = ConnectOptions::new("test")
            .blobs(servers[0].blobs())
            .replicas(NonZeroUsize::new(replicas));
        let bus =
            Bus::connect(&urls.join(","), options).await.expect("the servers accept connections");
        // They elect a leader first, and one for each stream.
        within("the topology", async {
            while let Err(error) = bus.ensure_topology().await {
                assert!(error.is_retryable(), "{error:?}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
        bus
    };
    let kept = async |bus: &Bus| -> BTreeSet<usize> {
        let states = within("the streams", async {
            loop {
                match bus.inspect_streams().await {
                    Ok(states) => break states,
                    Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
                }
            }
        })
        .await;
        states.into_iter().map(|(_, state)| state.expect("it is there").replicas).collect()
    };
    assert_eq!(kept(&connect(0).await).await, BTreeSet::from([1]));
    let bus = connect(3).await;
    assert_eq!(kept(&bus).await, BTreeSet::from([3]));
    // A connection without this option changes nothing.
    assert_eq!(kept(&connect(0).await).await, BTreeSet::from([3]));

    let wake = mesh::TaskWake {
        organization_id: ORGANIZATION.to_string(),
        task_id: task(1).to_string(),
        ..mesh::TaskWake::default()
    };
    let publish = async || {
        within("a publication", async {
            while bus.publish(&subject::TaskWake::new(task(1)), &wake).await.is_err() {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        })
        .await;
    };
    publish().await;
    servers[1].kill();
    publish().await;
}

#[tokio::test]
async fn too_many_replicas_are_refused_with_the_server_error() {
    let server = NatsServer::start().await;
    let options = ConnectOptions::new("test").replicas(NonZeroUsize::new(3));
    let bus = Bus::connect(server.url(), options).await.expect("the server accepts connections");
    let error = bus.ensure_topology().await.expect_err("one server cannot keep three");
    let words = std::error::Error::source(&error).expect("the server's words").to_string();
    assert!(!error.is_retryable() && words.contains("replicas"), "{words}");
}
