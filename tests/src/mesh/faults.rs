//! A mesh on disks that can be full and with clocks that can be set.

use std::{fs, path::Path};

use anyhow::Context as _;
use construct_bus::testing::NatsServer;
use construct_store::testing::Database;

use super::{Mesh, Service};
use crate::{
    clocks::{self, Clocks},
    disk::Disks,
};

/// Sizes of the disks in MiB.
const SERVICES_DISK: u32 = 64;
const NATS_DISK: u32 = 64;

/// A disk of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// The streams.
    Nats,
    /// The services' files and the tasks' folders.
    Services,
}

impl Mesh {
    /// Prepares everything but the services, on small disks that can be full ([`Mesh::fill`]) and
    /// with clocks that can be set ([`Mesh::jump`]).
    ///
    /// # Errors
    /// As [`Mesh::prepare`], and when the machine does not allow it.
    pub async fn with_disks_and_clocks(database: Database) -> anyhow::Result<Self> {
        let (service_dir, store) = (
            tempfile::tempdir()?,
            tempfile::Builder::new().prefix("construct-streams-").tempdir()?,
        );
        let disks =
            Disks::mount(&[(service_dir.path(), SERVICES_DISK), (store.path(), NATS_DISK)], None)?;
        let (workspace, data) =
            (service_dir.path().join("workspace"), service_dir.path().join("data"));
        for folder in [&workspace, &data] {
            fs::create_dir(disks.host_path(folder))?;
        }
        let nats = NatsServer::start_through(disks.launch_prefix(), store.path().to_owned()).await;
        drop(nats.bus().await);
        let mut mesh = Self::from_parts(database, nats, &[])?;
        if !clocks::are_disabled() {
            mesh.clocks = Some(Clocks::new(mesh.home.path())?);
        }
        (mesh.service_dir, mesh.workspace, mesh.data) = (service_dir, workspace, data);
        (mesh.store, mesh.disks) = (Some(store), Some(disks));
        Ok(mesh)
    }

    /// Fills a disk.
    ///
    /// # Errors
    /// When the mesh has no disks of its own.
    pub fn fill(&self, disk: Disk) -> anyhow::Result<()> {
        self.disks()?.fill(self.disk_path(disk)?)
    }

    /// Frees the space of a disk again.
    ///
    /// # Errors
    /// When the mesh has no disks of its own.
    pub fn clear(&self, disk: Disk) -> anyhow::Result<()> {
        self.disks()?.clear(self.disk_path(disk)?)
    }

    fn disks(&self) -> anyhow::Result<&Disks> {
        self.disks.as_ref().context("the mesh has no disks of its own")
    }

    fn disk_path(&self, disk: Disk) -> anyhow::Result<&Path> {
        match disk {
            Disk::Services => Ok(self.service_dir.path()),
            Disk::Nats => {
                Ok(self.store.as_ref().context("the mesh has no disks of its own")?.path())
            }
        }
    }

    /// Moves the clock of a service's machine by `seconds`, forward or backward: that of its first
    /// process or that of its replicas. Processes that start later use the same clock.
    ///
    /// # Errors
    /// When the mesh has no clocks of its own.
    pub fn jump(&self, service: Service, replica: bool, seconds: i64) -> anyhow::Result<()> {
        let clocks = self.clocks.as_ref().context("the mesh has no clocks of its own")?;
        Ok(clocks.jump(&clock(service, replica), seconds)?)
    }
}

/// The name of the clock of a service's first process or of its replicas.
pub(super) fn clock(service: Service, replica: bool) -> String {
    format!("{}{}", service.name(), if replica { "-replica" } else { "" })
}
