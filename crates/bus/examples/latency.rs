//! How long a command takes from publisher to worker in an idle mesh, one after the other.

use std::time::{Duration, Instant};

use construct_bus::{ConsumeOptions, Pool, subject, testing::NatsServer};
use construct_domain::{OrganizationId, StepId, TaskId};
use construct_proto::mesh::v1::{ModelInvoke, StepRef};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

const ROUNDS: u32 = 1000;

#[tokio::main]
async fn main() {
    let server = NatsServer::start().await;
    let (sender, worker) = (server.bus().await, server.bus().await);
    let pool = Pool::model_default();
    for max_in_flight in [1, 16] {
        let stop = CancellationToken::new();
        let mut consumer =
            worker.consume_model(&pool, ConsumeOptions::new(max_in_flight, stop.clone()));
        let mut delivered = Vec::new();
        let mut published = Vec::new();
        for round in 0..ROUNDS {
            let task = TaskId::from_uuid(Uuid::from_u128(u128::from(round) + 1));
            let step = StepRef {
                organization_id: OrganizationId::LOCAL.to_string(),
                task_id: task.to_string(),
                step_id: StepId::from_uuid(task.uuid()).to_string(),
                number: 1,
                deadline: None,
                round: 0,
            };
            let command = ModelInvoke { step: Some(step), ..Default::default() };
            let began = Instant::now();
            let publish = async {
                sender
                    .publish_once(&subject::ModelInvoke::new(pool.clone(), task), &command)
                    .await
                    .expect("accepted");
                began.elapsed()
            };
            let receive = async {
                let delivery = consumer.next().await.expect("not stopped");
                let elapsed = began.elapsed();
                delivery.receipt.ack().await;
                elapsed
            };
            let (publish, receive) = tokio::join!(publish, receive);
            published.push(publish);
            delivered.push(receive);
        }
        stop.cancel();
        consumer.next().await;
        println!("one by one, {ROUNDS} rounds, max_in_flight {max_in_flight}:");
        print("publish to acknowledgement", &mut published);
        print("publish to delivery", &mut delivered);
    }
    let journal = sender.journal();
    let mut empty = Vec::new();
    for round in 0..ROUNDS {
        let step = StepId::from_uuid(Uuid::from_u128(u128::from(round) + 1));
        let began = Instant::now();
        journal.load(step).await.expect("readable");
        empty.push(began.elapsed());
    }
    print("load of an empty journal", &mut empty);
}

fn print(what: &str, times: &mut [Duration]) {
    times.sort();
    println!("  {what}: p50 {:?}, p99 {:?}", times[times.len() / 2], times[times.len() * 99 / 100]);
}
