//! Consumes wakes and results of the process's partitions, and stops consuming a partition that
//! moves to another process.

use std::collections::HashMap;

use construct_bus::{Bus, ConsumeOptions, Delivery, TaskMessage};
use construct_domain::OrganizationId;
use construct_proto::mesh::v1::{StepResult, TaskWake};
use ractor::ActorRef;
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{assignment::PartitionAssignment, supervisor};

/// Consumes until stopped. Then every message was either handed over or given back.
pub(crate) async fn run(
    bus: Bus,
    supervisor: ActorRef<supervisor::Msg>,
    mut assignment: watch::Receiver<PartitionAssignment>,
    backlog: usize,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut intakes = JoinSet::new();
    let mut open: HashMap<u16, CancellationToken> = HashMap::new();
    loop {
        let now = *assignment.borrow_and_update();
        open.retain(|&partition, intake| {
            let ours = now.contains(partition);
            if !ours {
                intake.cancel();
            }
            ours
        });
        for partition in now.partitions() {
            open.entry(partition).or_insert_with(|| {
                let intake = stop.child_token();
                let options = ConsumeOptions::new(backlog, intake.clone());
                intakes.spawn(consume_partition(
                    bus.clone(),
                    partition,
                    options,
                    supervisor.clone(),
                ));
                intake
            });
        }
        supervisor.cast(supervisor::Msg::AssignmentChanged)?;
        loop {
            tokio::select! {
                changed = assignment.changed() => {
                    if changed.is_err() {
                        // The placement ends with the service.
                        stop.cancelled().await;
                    }
                    break;
                }
                Some(ended) = intakes.join_next() => ended?,
                () = stop.cancelled() => break,
            }
        }
        if stop.is_cancelled() {
            while let Some(ended) = intakes.join_next().await {
                ended?;
            }
            return Ok(());
        }
    }
}

/// Sends the messages of one partition to the supervisor.
async fn consume_partition(
    bus: Bus,
    partition: u16,
    options: ConsumeOptions,
    supervisor: ActorRef<supervisor::Msg>,
) {
    let mut consumer = bus.consume_tasks(partition, options);
    while let Some(Delivery { message, task, receipt, .. }) = consumer.next().await {
        let handed = match message {
            TaskMessage::Wake(wake) => {
                let trace = receipt.parent().clone();
                // A wake contains nothing that is not in PostgreSQL: if it is lost from here on,
                // the sweep finds the task.
                receipt.ack().await;
                supervisor.cast(supervisor::Msg::Wake {
                    task,
                    organization: wake_organization(&wake),
                    trace,
                    swept: false,
                })
            }
            TaskMessage::Result(result) => {
                let (organization, receipt) = (result_organization(&result), Box::new(receipt));
                supervisor.cast(supervisor::Msg::Deliver { task, organization, result, receipt })
            }
        };
        if handed.is_err() {
            return;
        }
    }
}

// The consumer checks that they name an organization. It is only used for fairness.

fn wake_organization(wake: &TaskWake) -> OrganizationId {
    wake.organization_id.parse().unwrap_or(OrganizationId::LOCAL)
}

fn result_organization(result: &StepResult) -> OrganizationId {
    let organization = result.step.as_ref().and_then(|step| step.organization_id.parse().ok());
    organization.unwrap_or(OrganizationId::LOCAL)
}
