//! A new version replaces the previous one while tasks are active.
//!
//! `./dev chaos upgrade [COMMIT]` builds the previous version and starts with its programs, schema
//! and streams; the tests start with the current version, which replaces itself.

use std::{path::PathBuf, sync::atomic::AtomicBool, time::Duration};

use construct_tests::{
    mesh::{Mesh, Service},
    random,
};
use tokio::time::sleep;

use crate::{check, load, people};

/// The variable with the folder of the previous version's programs.
const PREVIOUS_VARIABLE: &str = "CONSTRUCT_PREVIOUS";
/// The time between two steps.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// The services with two processes.
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
        // As in a deployment: first the schema, with which the previous version keeps working for a
        // while, then one process after the other.
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
