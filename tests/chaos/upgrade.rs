//! A new version takes the place of the one before it while tasks are at work.
//!
//! `./dev chaos upgrade [COMMIT]` builds the version before and begins with that, with its schema
//! and its streams; the tests begin with this one, which takes its own place.

use std::{path::PathBuf, sync::atomic::AtomicBool, time::Duration};

use construct_tests::{
    mesh::{Mesh, Service},
    random,
};
use tokio::time::sleep;

use crate::{check, load, people};

/// Where the programs of the version before are.
const PREVIOUS_VARIABLE: &str = "CONSTRUCT_PREVIOUS";
/// How long things stay as they are between two steps.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// Services with two processes.
const REPLICATED: [Service; 3] = [Service::Reconciler, Service::Interpreter, Service::Providers];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn upgrade_under_load_is_not_noticed() {
    let previous = std::env::var_os(PREVIOUS_VARIABLE).map(PathBuf::from);
    let mut mesh = Mesh::prepare_empty().await.unwrap();
    mesh.set_programs_dir(previous);
    mesh.start_services().await.unwrap();
    let mut replicas = Vec::new();
    for service in REPLICATED {
        replicas.push((service, mesh.start_replica(service).await.unwrap()));
    }
    let jobs = load::begin(&mesh).await;
    let over = AtomicBool::new(false);
    let upgrading = async {
        sleep(SETTLE_TIME).await;
        mesh.set_programs_dir(None);
        // As a deployment does: first the schema, on which the version before works for a while,
        // then one process after the other.
        mesh.migrate().await.unwrap();
        sleep(SETTLE_TIME).await;
        for (service, replica) in replicas {
            assert_eq!(
                mesh.stop_replica(replica).await.unwrap(),
                0,
                "{service:?}:\n{}",
                mesh.log(service)
            );
            mesh.start_replica(service).await.unwrap();
            sleep(SETTLE_TIME).await;
        }
        for service in Service::ALL {
            assert_eq!(mesh.stop(service).await.unwrap(), 0, "{service:?}:\n{}", mesh.log(service));
            mesh.spawn(service).unwrap();
            mesh.wait_until_ready(service).await.unwrap();
            sleep(SETTLE_TIME).await;
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    };
    let work =
        async { tokio::join!(load::run_conversations(&jobs, random::seed(), &over), upgrading) };
    people::approving(&jobs, work).await;
    let report = people::approving(&jobs, check::check(&mesh, &jobs)).await;
    eprintln!("upgraded: {report}");
    assert_eq!(report.interrupted(), 0, "nothing was killed: {report}");
}
