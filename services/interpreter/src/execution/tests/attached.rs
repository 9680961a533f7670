//! Files that people attached, saved by scripts that are interrupted.

use super::*;
use crate::tests::kept;

#[tokio::test]
async fn a_file_that_was_saved_is_not_saved_again_when_its_script_goes_on() {
    let mut world = World::new(&[""]).await;
    let blobs = world.folder.path().join("blobs");
    let file = kept(&blobs, OrganizationId::LOCAL, "t.csv", b"1;2;3");
    world.command.calls[0].code = format!(
        "const saved = save_file({:?}, 't.csv');
         const sum = read_file('t.csv').split(';').reduce((sum, n) => sum + Number(n), 0);
         create_file('secrets/sum', `${{sum}}`);
         [saved.path, saved.bytes, saved.status, sum].join(' ')",
        file.id
    );
    world.command.files.push(file);
    let asked = world.parks().await.calls.remove(0);
    assert_eq!(world.file("t.csv").as_deref(), Some("1;2;3"));
    // Neither the content nor what was saved is there any more: what the script goes on with is
    // what it knew.
    std::fs::remove_dir_all(blobs.join("files")).expect("removed");
    std::fs::remove_file(world.path("t.csv")).expect("removed");
    world.decide(&asked, true, "");
    let results = world.completes().await;
    assert_eq!((results[0].output.as_str(), results[0].error.as_str()), ("t.csv 5 created 6", ""));
    assert_eq!((world.file("t.csv"), world.file("secrets/sum").as_deref()), (None, Some("6")));
    assert_eq!(world.completes().await, results);
}

#[tokio::test]
async fn a_step_saves_what_its_command_names_and_nothing_else() {
    let mut world = World::new(&[""]).await;
    let blobs = world.folder.path().join("blobs");
    let named = kept(&blobs, OrganizationId::LOCAL, "a", b"named");
    let unnamed = kept(&blobs, OrganizationId::LOCAL, "b", b"unnamed");
    world.command.calls[0].code = format!(
        "let name = ''; try {{ save_file('sha256:{}', 'b') }} catch (error) {{ name = error.name }}
         save_file('sha256:{}', 'a'); name",
        unnamed.sha256, named.sha256
    );
    world.command.files.push(named);
    let results = world.completes().await;
    assert_eq!((results[0].output.as_str(), results[0].error.as_str()), ("FileNotAttached", ""));
    assert_eq!((world.file("a").as_deref(), world.file("b")), (Some("named"), None));
}
