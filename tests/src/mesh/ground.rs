//! A mesh on disks that can be full, and with clocks that can be set.

use std::{fs, path::Path};

use anyhow::Context as _;
use construct_bus::testing::NatsServer;
use construct_store::testing::Database;

use super::{Mesh, Service};
use crate::{
    clocks::{self, Clocks},
    disk::Disks,
};

/// What the disks hold, in MiB.
const SERVICES_DISK: u32 = 64;
const NATS_DISK: u32 = 64;

/// A disk of a mesh that has disks of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Disk {
    /// The streams.
    Nats,
    /// What services keep in files, and the folders that tasks work in.
    Services,
}

impl Mesh {
    /// Everything but the services, on small disks that can be full ([`Mesh::fill`]), and with
    /// clocks that can be set ([`Mesh::jump`]).
    ///
    /// # Errors
    /// As [`Mesh::prepare`], and when the machine does not allow it.
    pub async fn on_own_ground(database: Database) -> anyhow::Result<Self> {
        let (ground, store) = (
            tempfile::tempdir()?,
            tempfile::Builder::new().prefix("construct-streams-").tempdir()?,
        );
        let disks =
            Disks::over(&[(ground.path(), SERVICES_DISK), (store.path(), NATS_DISK)], None)?;
        let (workspace, data) = (ground.path().join("workspace"), ground.path().join("data"));
        for folder in [&workspace, &data] {
            fs::create_dir(disks.seen(folder))?;
        }
        let nats = NatsServer::start_by(disks.starter(), store.path().to_owned()).await;
        drop(nats.bus().await);
        let mut mesh = Self::on(database, nats, &[])?;
        if !clocks::left_out() {
            mesh.clocks = Some(Clocks::new(mesh.home.path())?);
        }
        (mesh.ground, mesh.workspace, mesh.data) = (ground, workspace, data);
        (mesh.store, mesh.disks) = (Some(store), Some(disks));
        Ok(mesh)
    }

    /// Fills a disk.
    ///
    /// # Errors
    /// When the mesh has none of its own.
    pub fn fill(&self, disk: Disk) -> anyhow::Result<()> {
        self.disks()?.fill(self.folder_of(disk)?)
    }

    /// Makes room on a disk again.
    ///
    /// # Errors
    /// When the mesh has none of its own.
    pub fn clear(&self, disk: Disk) -> anyhow::Result<()> {
        self.disks()?.clear(self.folder_of(disk)?)
    }

    fn disks(&self) -> anyhow::Result<&Disks> {
        self.disks.as_ref().context("the mesh has no disks of its own")
    }

    fn folder_of(&self, disk: Disk) -> anyhow::Result<&Path> {
        match disk {
            Disk::Services => Ok(self.ground.path()),
            Disk::Nats => {
                Ok(self.store.as_ref().context("the mesh has no disks of its own")?.path())
            }
        }
    }

    /// Sets the clock of a service's machine by so many seconds, forward or backward: of its first
    /// process, or of its further ones. Who is started later goes by the same clock.
    ///
    /// # Errors
    /// When the mesh has no clocks of its own.
    pub fn jump(&self, service: Service, further: bool, seconds: i64) -> anyhow::Result<()> {
        let clocks = self.clocks.as_ref().context("the mesh has no clocks of its own")?;
        Ok(clocks.jump(&clock(service, further), seconds)?)
    }
}

/// The name of the clock of a service's first process, or of its further ones.
pub(super) fn clock(service: Service, further: bool) -> String {
    format!("{}{}", service.name(), if further { "-further" } else { "" })
}
