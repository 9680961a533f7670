//! Removes the directories of deleted tasks.
//!
//! It needs no state and no events: it periodically compares the existing directories with the
//! existing tasks.

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

use super::{AllowedDirectories, Workspaces};
use crate::blocking::blocking;

/// How often the directories are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(600);
/// Maximum depth to which permissions in a workspace are changed; each level keeps a file open.
const MAX_DEPTH: u32 = 128;
/// Time limit for an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// The reason why not everything was removed.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("failed to ask which tasks exist")]
    Ask(#[source] request::Error),
    #[error("failed to read the directories")]
    List(#[source] std::io::Error),
}

impl Workspaces {
    /// Removes the directories of deleted tasks, until `stop`.
    pub(crate) async fn remove_deleted(&self, bus: Bus, stop: CancellationToken) {
        loop {
            match self.remove_deleted_once(&bus).await {
                Ok(0) => {}
                Ok(removed) => tracing::info!(removed, "removed workspaces of deleted tasks"),
                Err(error) => {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(
                        error,
                        "failed to remove workspaces of deleted tasks; retrying later"
                    );
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(CHECK_INTERVAL) => {}
            }
        }
    }

    async fn remove_deleted_once(&self, bus: &Bus) -> Result<usize, Error> {
        let directories = Arc::clone(&self.directories);
        let tasks = blocking(move || directories.tasks())
            .await
            .unwrap_or_else(|| Ok(Vec::new()))
            .map_err(Error::List)?;
        let mut removed = 0;
        for candidates in tasks.chunks(subject::MAX_CENSUS_TASKS) {
            let census =
                TaskCensus { task_ids: candidates.iter().map(ToString::to_string).collect() };
            let answer =
                bus.ask(&subject::Census, &census, ANSWER_TIMEOUT).await.map_err(Error::Ask)?;
            // Only tasks from the request: an answer is not trusted with directory names.
            let deleted = answer
                .task_ids
                .iter()
                .filter_map(|id| id.parse().ok())
                .filter(|task| candidates.contains(task));
            for task in deleted {
                let directories = Arc::clone(&self.directories);
                match blocking(move || directories.remove(task)).await {
                    Some(Ok(())) => removed += 1,
                    // A command of the task may still be ending.
                    Some(Err(error)) => {
                        tracing::warn!(%task, %error, "failed to remove a workspace; retrying later")
                    }
                    None => {}
                }
            }
        }
        Ok(removed)
    }
}

impl AllowedDirectories {
    /// The tasks that have their own directory.
    fn tasks(&self) -> std::io::Result<Vec<TaskId>> {
        let mut tasks = Vec::new();
        for entry in std::fs::read_dir(&self.own)? {
            tasks.extend(entry?.file_name().to_str().and_then(|name| name.parse::<TaskId>().ok()));
        }
        Ok(tasks)
    }

    fn remove(&self, task: TaskId) -> std::io::Result<()> {
        let directory = self.own.join(task.to_string());
        // Follows no symbolic link, not even a new one.
        match std::fs::remove_dir_all(&directory) {
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                restore_permissions(CWD, &directory, MAX_DEPTH)?;
                std::fs::remove_dir_all(&directory)
            }
            done => done,
        }
    }
}

/// Gives the owner permission to empty a directory and everything in it. Commands may have removed
/// that permission.
fn restore_permissions(
    parent: impl AsFd,
    path: impl rustix::path::Arg,
    depth: u32,
) -> std::io::Result<()> {
    let directory =
        openat(parent, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW, Mode::empty())?;
    // By its descriptor, so that no symbolic link is followed that replaces it.
    chmod(format!("/proc/self/fd/{}", directory.as_raw_fd()), Mode::RWXU)?;
    let directory = openat(&directory, ".", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    for entry in Dir::read_from(&directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if entry.file_type() == FileType::Directory && name != c"." && name != c".." {
            let depth = depth
                .checked_sub(1)
                .ok_or_else(|| std::io::Error::other("it is nested too deeply"))?;
            restore_permissions(&directory, name, depth)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use construct_bus::testing::NatsServer;
    use construct_proto::mesh::v1::DeletedTasks;
    use uuid::Uuid;

    use super::*;
    use crate::{
        command::CommandSandbox,
        tools::{Egress, Policy},
    };

    #[tokio::test]
    async fn only_directories_of_deleted_tasks_are_removed() {
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
            matches!(workspaces.remove_deleted_once(&bus).await, Err(Error::Ask(_))),
            "there is no reconciler"
        );
        // The answer also contains a task that was not asked about.
        let answer = vec![
            tasks[0].to_string(),
            tasks[2].to_string(),
            "../../outside".to_owned(),
            "no-task".to_owned(),
        ];
        let (answering, stop) = (bus.clone(), CancellationToken::new());
        let stopped = stop.clone();
        let answering = tokio::spawn(async move {
            let answer = |_| std::future::ready(Some(DeletedTasks { task_ids: answer.clone() }));
            answering.answer(&subject::Census, stopped, answer).await
        });
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        let removed = loop {
            match workspaces.remove_deleted_once(&bus).await {
                Ok(removed) => break removed,
                Err(error) => assert!(std::time::Instant::now() < deadline, "{error:?}"),
            }
        };
        assert_eq!(removed, 2);
        let is_there = tasks.map(|task| own.join(task.to_string()).exists());
        assert_eq!(is_there, [false, true, false]);
        assert!(own.join("no-task").exists() && outside.join("kept").exists());
        assert_eq!(workspaces.remove_deleted_once(&bus).await.expect("answered"), 0);
        stop.cancel();
        answering.await.expect("it ends").expect("it answered");
    }

    #[test]
    fn permissions_are_restored_only_inside_the_workspace() {
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
        restore_permissions(CWD, &own, MAX_DEPTH).expect("opened");
        let mode =
            |directory| std::fs::metadata(directory).expect("read").permissions().mode() & 0o777;
        assert_eq!((mode(&own.join("a")), mode(&deep), mode(&outside)), (0o700, 0o700, 0o000));
        assert!(restore_permissions(CWD, &own, 1).is_err(), "it is deeper than that");
        std::fs::remove_dir_all(&own).expect("removed");
    }
}
