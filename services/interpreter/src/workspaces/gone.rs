//! Removing the directories of tasks that are gone.
//!
//! Nothing is remembered and nothing needs to be heard: what is there is held against the tasks
//! there are, again and again.

use std::{
    os::fd::{AsFd, AsRawFd},
    sync::Arc,
    time::Duration,
};

use construct_bus::{Bus, request, subject};
use construct_domain::TaskId;
use construct_proto::mesh::v1::TaskCensus;
use rustix::fs::{CWD, Dir, FileType, Mode, OFlags, chmod, openat};
use tokio_util::sync::CancellationToken;

use super::{Places, Workspaces};
use crate::blocking::blocking;

/// How often it is looked.
const INTERVAL: Duration = Duration::from_secs(600);
/// How deep a workspace is followed to change rights in it: each level keeps a file open.
const DEEPEST: u32 = 128;
/// How long an answer may take.
const ANSWER: Duration = Duration::from_secs(10);

/// Why not everything could be removed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("nobody says which tasks there are")]
    Ask(#[source] request::Error),
    #[error("the directories cannot be read")]
    List(#[source] std::io::Error),
}

impl Workspaces {
    /// Removes the directories of tasks that are gone, until `stop`.
    pub(crate) async fn remove_gone(&self, bus: Bus, stop: CancellationToken) {
        loop {
            match self.remove_gone_once(&bus).await {
                Ok(0) => {}
                Ok(removed) => tracing::info!(removed, "workspaces of deleted tasks were removed"),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(
                        error,
                        "workspaces of deleted tasks could not be removed; it is tried again later"
                    );
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(INTERVAL) => {}
            }
        }
    }

    async fn remove_gone_once(&self, bus: &Bus) -> Result<usize, Error> {
        let places = Arc::clone(&self.places);
        let tasks = blocking(move || places.tasks())
            .await
            .unwrap_or_else(|| Ok(Vec::new()))
            .map_err(Error::List)?;
        let mut removed = 0;
        for asked in tasks.chunks(subject::MAX_CENSUS_TASKS) {
            let census = TaskCensus { task_ids: asked.iter().map(ToString::to_string).collect() };
            let answer = bus.ask(&subject::Census, &census, ANSWER).await.map_err(Error::Ask)?;
            // Only what was asked about: an answer is not to be trusted with the name of a
            // directory.
            let gone = answer
                .task_ids
                .iter()
                .filter_map(|id| id.parse().ok())
                .filter(|task| asked.contains(task));
            for task in gone {
                let places = Arc::clone(&self.places);
                match blocking(move || places.remove(task)).await {
                    Some(Ok(())) => removed += 1,
                    // A command of it may still be at its end.
                    Some(Err(error)) => {
                        tracing::warn!(%task, %error, "a workspace could not be removed yet")
                    }
                    None => {}
                }
            }
        }
        Ok(removed)
    }
}

impl Places {
    /// The tasks that have a directory of their own.
    fn tasks(&self) -> std::io::Result<Vec<TaskId>> {
        let mut tasks = Vec::new();
        for entry in std::fs::read_dir(&self.own)? {
            tasks.extend(entry?.file_name().to_str().and_then(|name| name.parse::<TaskId>().ok()));
        }
        Ok(tasks)
    }

    fn remove(&self, task: TaskId) -> std::io::Result<()> {
        let directory = self.own.join(task.to_string());
        // Follows no symbolic link, also none that appears meanwhile.
        match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                open_up(CWD, &directory, DEEPEST)?;
                std::fs::remove_dir_all(&directory)
            }
            done => done,
        }
    }
}

/// Makes a directory and all in it such that their owner can empty them. Commands may have taken
/// that right away.
fn open_up(parent: impl AsFd, path: impl rustix::path::Arg, depth: u32) -> std::io::Result<()> {
    let directory =
        openat(parent, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
    // By its descriptor, so that no symbolic link is followed that takes its place.
    chmod(format!("/proc/self/fd/{}", directory.as_raw_fd()), Mode::RWXU)?;
    let directory = openat(&directory, ".", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type() == FileType::Directory && name != c"." && name != c".." {
            let depth = depth
                .checked_sub(1)
                .ok_or_else(|| std::io::Error::other("it is nested too deeply"))?;
            open_up(&directory, name, depth)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use construct_bus::testing::NatsServer;
    use construct_proto::mesh::v1::TasksGone;
    use uuid::Uuid;

    use super::*;
    use crate::{
        command::CommandSandbox,
        tools::{Egress, Policy},
    };

    #[tokio::test]
    async fn directories_of_tasks_that_are_gone_are_removed_and_no_others() {
        let nats = NatsServer::start().await;
        let bus = nats.bus().await;
        let folder = tempfile::tempdir().expect("a folder");
        let own = folder.path().join("data/workspaces");
        let (egress, sandbox) =
            (Egress::new(&[]).expect("made"), CommandSandbox::unavailable("a test needs none"));
        let workspaces =
            Workspaces::new(&[], own.clone(), Policy::default(), egress, sandbox).expect("made");
        let tasks: [TaskId; 3] = std::array::from_fn(|_| TaskId::from_uuid(Uuid::now_v7()));
        let outside = folder.path().join("outside");
        std::fs::create_dir(&outside).expect("made");
        for task in tasks {
            let directory =
                workspaces.workspace("", &task.to_string()).await.expect("made").root().to_owned();
            std::fs::create_dir(directory.join("deep")).expect("made");
            std::fs::write(directory.join("deep/file"), "").expect("written");
            symlink(&outside, directory.join("link")).expect("linked");
        }
        std::fs::create_dir(own.join("no-task")).expect("made");
        std::fs::write(outside.join("kept"), "").expect("written");

        assert!(
            matches!(workspaces.remove_gone_once(&bus).await, Err(Error::Ask(_))),
            "nobody is there"
        );
        // It answers about a task that nobody asked about as well.
        let answer = vec![
            tasks[0].to_string(),
            tasks[2].to_string(),
            "../../outside".to_owned(),
            "no-task".to_owned(),
        ];
        let (answering, stop) = (bus.clone(), CancellationToken::new());
        let stopped = stop.clone();
        let answering = tokio::spawn(async move {
            let answer = |_| std::future::ready(Some(TasksGone { task_ids: answer.clone() }));
            answering.answer(&subject::Census, stopped, answer).await
        });
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let removed = loop {
            match workspaces.remove_gone_once(&bus).await {
                Ok(removed) => break removed,
                Err(error) => assert!(std::time::Instant::now() < deadline, "{error:?}"),
            }
        };
        assert_eq!(removed, 2);
        let is_there = tasks.map(|task| own.join(task.to_string()).exists());
        assert_eq!(is_there, [false, true, false]);
        assert!(own.join("no-task").exists() && outside.join("kept").exists());
        assert_eq!(workspaces.remove_gone_once(&bus).await.expect("asked"), 0);
        stop.cancel();
        answering.await.expect("it ends").expect("it answered");
    }

    #[test]
    fn directories_that_were_closed_are_opened_up_and_nothing_outside_is() {
        let folder = tempfile::tempdir().expect("a folder");
        let (own, outside) = (folder.path().join("own"), folder.path().join("outside"));
        let (deep, closed) = (own.join("a/b"), std::fs::Permissions::from_mode(0o000));
        for directory in [&deep, &outside] {
            std::fs::create_dir_all(directory).expect("made");
        }
        symlink(&outside, own.join("link")).expect("linked");
        for directory in [&deep, &own.join("a"), &outside] {
            std::fs::set_permissions(directory, closed.clone()).expect("set");
        }
        open_up(CWD, &own, DEEPEST).expect("opened");
        let mode =
            |directory| std::fs::metadata(directory).expect("read").permissions().mode() & 0o777;
        assert_eq!((mode(&own.join("a")), mode(&deep), mode(&outside)), (0o700, 0o700, 0o000));
        assert!(open_up(CWD, &own, 1).is_err(), "it is deeper than that");
        std::fs::remove_dir_all(&own).expect("removed");
    }
}
