//! Attached files that interrupted scripts save.

use super::*;
use crate::tests::store_file;

#[tokio::test]
async fn saved_file_is_not_saved_again_on_resume() {
    let mut world = World::new(&[""]).await;
    let blobs = world.folder.path().join("blobs");
    let file = store_file(&blobs, OrganizationId::LOCAL, "t.csv", b"1;2;3");
    world.command.calls[0].code = format!(
        "const saved = save_file({:?}, 't.csv');
         const sum = read_file('t.csv').split(';').reduce((sum, n) => sum + Number(n), 0);
         create_file('secrets/sum', `${{sum}}`);
         [saved.path, saved.bytes, saved.status, sum].join(' ')",
        file.id
    );
    world.command.files.push(file);
    let request = world.run_until_suspended().await.approval_requests.remove(0);
    assert_eq!(world.file("t.csv").as_deref(), Some("1;2;3"));
    // The content and the saved file are gone: the resumed script uses the journaled result.
    std::fs::remove_dir_all(blobs.join("files")).expect("removed");
    std::fs::remove_file(world.path("t.csv")).expect("removed");
    world.decide(&request, true, "");
    let results = world.run_to_completion().await;
    assert_eq!((results[0].output.as_str(), results[0].error.as_str()), ("t.csv 5 created 6", ""));
    assert_eq!((world.file("t.csv"), world.file("secrets/sum").as_deref()), (None, Some("6")));
    assert_eq!(world.run_to_completion().await, results);
}

#[tokio::test]
async fn step_saves_only_files_of_its_command() {
    let mut world = World::new(&[""]).await;
    let blobs = world.folder.path().join("blobs");
    let named = store_file(&blobs, OrganizationId::LOCAL, "a", b"named");
    let unnamed = store_file(&blobs, OrganizationId::LOCAL, "b", b"unnamed");
    world.command.calls[0].code = format!(
        "let name = ''; try {{ save_file('sha256:{}', 'b') }} catch (error) {{ name = error.name }}
         save_file('sha256:{}', 'a'); name",
        unnamed.sha256, named.sha256
    );
    world.command.files.push(named);
    let results = world.run_to_completion().await;
    assert_eq!((results[0].output.as_str(), results[0].error.as_str()), ("FileNotAttached", ""));
    assert_eq!((world.file("a").as_deref(), world.file("b")), (Some("named"), None));
}
