//! Scripts whose files are not where they are gone on with.

use super::*;

/// Another machine, whose storage is its own.
async fn another(world: &World) -> (tempfile::TempDir, Executor) {
    let folder = folder();
    let sandbox = CommandSandbox::unavailable("a test needs none");
    let egress = Egress::new(&[]).expect("made");
    let executor =
        executor(world.nats.bus().await, folder.path(), Policy::default(), egress, sandbox);
    (folder, executor)
}

/// Whether the task has this file of its own on a machine.
fn has(folder: &Path, world: &World, name: &str) -> bool {
    let step = world.command.step.as_ref().expect("it names a step");
    folder.join("data/own").join(&step.task_id).join(name).exists()
}

/// The next round, in which one more call has its approval.
async fn approve(world: &mut World) {
    let asked = world.parks().await.calls.remove(0);
    world.decide(&asked, true, "");
}

#[tokio::test]
async fn scripts_are_not_gone_on_with_where_the_files_are_not_that_they_had() {
    for used in [
        "create_file('a', 'x')",
        "try { read_file('a') } catch {}",
        "try { await import('./a.js') } catch {}",
    ] {
        let script = format!("{used}; create_file('secrets/key', 'k').status");
        let mut world = World::new(&[&script, "'second'"]).await;
        world.command.workspace.clear();
        approve(&mut world).await;
        let (elsewhere, executor) = another(&world).await;
        let here = std::mem::replace(&mut world.executor, executor);
        let results = world.completes().await;
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
        // Where the files are it would go on, also with another process.
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
        assert_eq!(world.completes().await[0].output, "created", "{used}");
        assert!(has(world.folder.path(), &world, "secrets/key"), "{used}");
    }
}

#[tokio::test]
async fn scripts_that_have_not_looked_at_a_file_are_gone_on_with_anywhere() {
    let script = "
        setenv('X', getenv('X') ?? '1');
        await new Promise(done => setTimeout(done, 1));
        create_file('secrets/a', pwd());
        create_file('secrets/b', 'b').status";
    let mut world = World::new(&[script]).await;
    world.command.workspace.clear();
    approve(&mut world).await;
    let (elsewhere, executor) = another(&world).await;
    let here = std::mem::replace(&mut world.executor, executor);
    approve(&mut world).await;
    assert!(
        has(elsewhere.path(), &world, "secrets/a")
            && !has(world.folder.path(), &world, "secrets/a")
    );
    // Where it began its files are not any more.
    let there = std::mem::replace(&mut world.executor, here);
    assert!(world.completes().await[0].error.contains("another storage"));
    world.executor = there;
    assert_eq!(world.completes().await[0].output, "created");

    // A workspace that was named is what lies under its name.
    let mut world =
        World::new(&["create_file('a', 'x'); create_file('secrets/key', 'k').status"]).await;
    approve(&mut world).await;
    let (elsewhere, executor) = another(&world).await;
    world.executor = executor;
    world.command.workspace = elsewhere.path().join("work").display().to_string();
    assert_eq!(world.completes().await[0].output, "created");
}
