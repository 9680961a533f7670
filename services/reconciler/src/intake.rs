//! Takes wakes and results from the partitions of the process, and stops where one becomes
//! another's.

use std::collections::HashMap;

use construct_bus::{Bus, ConsumeOptions, Delivery, TaskMessage};
use construct_domain::OrganizationId;
use construct_proto::mesh::v1::{StepResult, TaskWake};
use ractor::ActorRef;
use tokio::{sync::watch, task::JoinSet};
use tokio_util::sync::CancellationToken;

use crate::{assignment::PartitionAssignment, supervisor};

/// Takes in until told to stop; then what was taken and not handed over has been given back.
pub(crate) async fn run(
    bus: Bus,
    supervisor: ActorRef<supervisor::Msg>,
    mut share: watch::Receiver<PartitionAssignment>,
    backlog: usize,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let mut intakes = JoinSet::new();
    let mut open: HashMap<u16, CancellationToken> = HashMap::new();
    loop {
        let now = *share.borrow_and_update();
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
                changed = share.changed() => {
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

/// Hands what comes for one partition to the supervisor.
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
                // It says nothing that is not in PostgreSQL: what is lost from here on, the sweep
                // finds.
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

// That they name an organization is checked where they are received. It is used for fairness only.

fn wake_organization(wake: &TaskWake) -> OrganizationId {
    wake.organization_id.parse().unwrap_or(OrganizationId::LOCAL)
}

fn result_organization(result: &StepResult) -> OrganizationId {
    let organization = result.step.as_ref().and_then(|step| step.organization_id.parse().ok());
    organization.unwrap_or(OrganizationId::LOCAL)
}
