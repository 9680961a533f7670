//! Scripts that are resumed on a machine without their files.

use super::*;

/// Another machine with its own storage.
async fn other_machine(world: &World) -> (tempfile::TempDir, Executor) {
    let folder = folder();
    let sandbox = CommandSandbox::unavailable("a test needs none");
    let egress = Egress::new(&[]).expect("made");
    let executor =
        executor(world.nats.bus().await, folder.path(), Policy::default(), egress, sandbox);
    (folder, executor)
}

/// Whether the task's own directory on a machine has this file.
fn has(folder: &Path, world: &World, name: &str) -> bool {
    let step = world.command.step.as_ref().expect("it names a step");
    folder.join("data/own").join(&step.task_id).join(name).exists()
}

/// Starts the next round with one more approval.
async fn approve(world: &mut World) {
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    world.decide(&request, true, "");
}

#[tokio::test]
async fn scripts_are_not_resumed_without_their_files() {
    for used in [
        "create_file('a', 'x')",
        "try { read_file('a') } catch {}",
        "try { await import('./a.js') } catch {}",
    ] {
        let script = format!("{used}; create_file('secrets/key', 'k').status");
        let mut world = World::new(&[&script, "'second'"]).await;
        world.command.workspace.clear();
        approve(&mut world).await;
        let (elsewhere, executor) = other_machine(&world).await;
        let here = std::mem::replace(&mut world.executor, executor);
        let results = world.run_to_completion().await;
        assert!(
            results[0].error.starts_with("Stopped: they were interrupted and cannot be continued"),
            "{results:?}"
        );
        assert!(
            results[0].error.contains("another storage")
                && results[0].error.contains("had ended: #1"),
            "{results:?}"
        );
        assert!(results[1].error.starts_with("NotRun: "), "{results:?}");
        assert!(!has(elsewhere.path(), &world, "secrets/key"), "{used}");
        // Where the files are it continues, also with another process.
        drop(here);
        let sandbox = CommandSandbox::unavailable("a test needs none");
        let egress = Egress::new(&[]).expect("made");
        world.executor = self::executor(
            world.nats.bus().await,
            world.folder.path(),
            Policy::default(),
            egress,
            sandbox,
        );
        assert_eq!(world.run_to_completion().await[0].output, "created", "{used}");
        assert!(has(world.folder.path(), &world, "secrets/key"), "{used}");
    }
}

#[tokio::test]
async fn scripts_without_file_access_resume_anywhere() {
    let script = "
        setenv('X', getenv('X') ?? '1');
        await new Promise(done => setTimeout(done, 1));
        create_file('secrets/a', pwd());
        create_file('secrets/b', 'b').status";
    let mut world = World::new(&[script]).await;
    world.command.workspace.clear();
    approve(&mut world).await;
    let (elsewhere, executor) = other_machine(&world).await;
    let here = std::mem::replace(&mut world.executor, executor);
    approve(&mut world).await;
    assert!(
        has(elsewhere.path(), &world, "secrets/a")
            && !has(world.folder.path(), &world, "secrets/a")
    );
    // Its files are no longer where it began.
    let there = std::mem::replace(&mut world.executor, here);
    assert!(world.run_to_completion().await[0].error.contains("another storage"));
    world.executor = there;
    assert_eq!(world.run_to_completion().await[0].output, "created");

    // A named workspace is whatever has its name.
    let mut world =
        World::new(&["create_file('a', 'x'); create_file('secrets/key', 'k').status"]).await;
    approve(&mut world).await;
    let (elsewhere, executor) = other_machine(&world).await;
    world.executor = executor;
    world.command.workspace = elsewhere.path().join("work").display().to_string();
    assert_eq!(world.run_to_completion().await[0].output, "created");
}
